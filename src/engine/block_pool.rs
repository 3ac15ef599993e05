//! The blocks of a KV cache: their owners, and the content that is worth keeping. This is
//! bookkeeping of integers; no tensor is touched here.
//!
//! A block has any number of owners (block tables of sequences). One whose tokens are all known and
//! computed may be entered under its content: the content before it, and its own tokens. Another
//! sequence that begins with the same tokens then shares it. Without owners it stays where it is,
//! until room is needed: then the one that was left longest ago goes first.
//!
//! Contents are chained: each has a number of its own, and is known by the number of the content
//! before it and its tokens. A block is found by a keyed hash of its tokens, which are then
//! compared: a hit is exact.

use std::collections::hash_map::RandomState;
use std::collections::HashMap;
use std::hash::BuildHasher;

use crate::error::{try_filled, try_with_capacity, Error, Result};
use crate::ops::kv_cache::layout::BLOCK_SIZE;

/// The tokens of a block and of all blocks before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContentId(u64);

impl ContentId {
    /// The content before the first block: no tokens.
    pub const EMPTY: ContentId = ContentId(0);
}

/// The key under which a block is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    /// Sequences with different numbers share nothing.
    isolation: u64,
    before: ContentId,
    /// Keyed hash of the tokens, which are compared as well.
    tokens: u64,
}

/// Stands for no block.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Block {
    num_owners: u32,
    content: Option<(Key, ContentId)>,
    /// Neighbours in the list of idle blocks, which is in the order in which they lost their last
    /// owner.
    older: u32,
    newer: u32,
}

/// Counts of a pool. `used + idle + free` is the number of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// Blocks with owners.
    pub used: usize,
    /// Blocks without owners, but with content that may be shared again.
    pub idle: usize,
    /// Blocks without either.
    pub free: usize,
}

/// Hands out the blocks of one KV cache.
pub struct BlockPool {
    blocks: Vec<Block>,
    /// `[num_blocks, BLOCK_SIZE]`: the tokens of the blocks with content.
    tokens: Vec<u32>,
    free: Vec<u32>,
    entered: HashMap<Key, u32, RandomState>,
    oldest: u32,
    newest: u32,
    num_idle: usize,
    next_content: u64,
    keeps_content: bool,
}

impl BlockPool {
    /// All of `num_blocks` blocks are free. Without `keeps_content` no block is ever shared.
    pub fn new(num_blocks: u32, keeps_content: bool) -> Result<Self> {
        let count = num_blocks as usize;
        let mut free = try_with_capacity(count, "the list of free KV blocks")?;
        free.extend((0..num_blocks).rev());
        let num_tokens = if keeps_content { count.saturating_mul(BLOCK_SIZE) } else { 0 };
        let mut entered = HashMap::default();
        if keeps_content {
            // With twice the room the table clears out its tombstones in place, without allocating.
            entered
                .try_reserve(count.saturating_mul(2))
                .map_err(|_| Error::out_of_memory("the table of KV blocks", count))?;
        }
        let block = Block { num_owners: 0, content: None, older: NONE, newer: NONE };
        Ok(BlockPool {
            blocks: try_filled(count, block, "KV block states")?,
            tokens: try_filled(num_tokens, 0, "tokens of KV blocks")?,
            free,
            entered,
            oldest: NONE,
            newest: NONE,
            num_idle: 0,
            next_content: 1,
            keeps_content,
        })
    }

    /// Returns the number of blocks in all.
    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the number of blocks that can be allocated now: free ones and idle ones.
    pub fn num_available(&self) -> usize {
        self.free.len() + self.num_idle
    }

    /// Whether content is kept for sharing.
    pub fn keeps_content(&self) -> bool {
        self.keeps_content
    }

    /// Returns the number of blocks in each state.
    pub fn counts(&self) -> BlockCounts {
        let used = self.blocks.len() - self.num_available();
        BlockCounts { used, idle: self.num_idle, free: self.free.len() }
    }

    /// Returns the number of owners of a block.
    pub fn num_owners(&self, block: u32) -> u32 {
        self.blocks.get(block as usize).map_or(0, |block| block.num_owners)
    }

    /// Allocates a block and forgets its content. `None` if all have owners.
    pub fn allocate(&mut self) -> Option<u32> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let block = self.oldest;
                self.blocks.get(block as usize)?;
                self.unlink(block);
                self.forget(block);
                block
            }
        };
        if let Some(state) = self.blocks.get_mut(block as usize) {
            state.num_owners = 1;
        }
        Some(block)
    }

    /// Takes blocks back from one owner, leaving the table empty. A block without owners is
    /// ignored: a double free must not hand one block to two.
    pub fn release(&mut self, block_table: &mut Vec<u32>) {
        // The last ones first: a block is useless without those before it, so it is reused before
        // them.
        for block in block_table.drain(..).rev() {
            let Some(state) = self.blocks.get_mut(block as usize) else { continue };
            if state.num_owners == 0 {
                debug_assert!(false, "block {block} has no owner");
                continue;
            }
            state.num_owners -= 1;
            if state.num_owners == 0 {
                if state.content.is_some() {
                    self.link(block)
                } else {
                    self.free.push(block)
                }
            }
        }
    }

    fn key(&self, isolation: u64, before: ContentId, tokens: &[u32]) -> Key {
        Key { isolation, before, tokens: self.entered.hasher().hash_one(tokens) }
    }

    fn has_tokens(&self, block: u32, tokens: &[u32]) -> bool {
        let begin = block as usize * BLOCK_SIZE;
        self.tokens.get(begin..begin + BLOCK_SIZE) == Some(tokens)
    }

    /// Returns the block that holds `tokens` (as many as a block holds) after the content `before`.
    pub fn find(
        &self,
        isolation: u64,
        before: ContentId,
        tokens: &[u32],
    ) -> Option<(u32, ContentId)> {
        if !self.keeps_content {
            return None;
        }
        let block = *self.entered.get(&self.key(isolation, before, tokens))?;
        if !self.has_tokens(block, tokens) {
            return None;
        }
        let (_, content) = self.blocks.get(block as usize)?.content?;
        Some((block, content))
    }

    /// Adds an owner to a block that was found.
    pub fn share(&mut self, block: u32) {
        if self.num_owners(block) == 0 {
            self.unlink(block);
        }
        if let Some(state) = self.blocks.get_mut(block as usize) {
            state.num_owners += 1;
        }
    }

    /// Whether a block has content but no owner.
    pub fn is_idle(&self, block: u32) -> bool {
        self.blocks.get(block as usize).is_some_and(|b| b.num_owners == 0 && b.content.is_some())
    }

    /// Enters a block that is computed and holds `tokens` after the content `before`; returns the
    /// content that it then ends. If another block has the same content already, that one stays.
    pub fn enter(
        &mut self,
        block: u32,
        isolation: u64,
        before: ContentId,
        tokens: &[u32],
    ) -> ContentId {
        if !self.keeps_content || tokens.len() != BLOCK_SIZE {
            return ContentId::EMPTY;
        }
        if let Some((_, content)) = self.find(isolation, before, tokens) {
            return content;
        }
        let content = ContentId(self.next_content);
        self.next_content += 1;
        let key = self.key(isolation, before, tokens);
        let begin = block as usize * BLOCK_SIZE;
        let state = self.blocks.get_mut(block as usize);
        let (Some(state), Some(kept)) = (state, self.tokens.get_mut(begin..begin + BLOCK_SIZE))
        else {
            return content;
        };
        // Other tokens with the same hash, or a block that is entered already: nothing is entered.
        if state.content.is_none() && !self.entered.contains_key(&key) {
            state.content = Some((key, content));
            kept.copy_from_slice(tokens);
            // There is room for every block.
            self.entered.insert(key, block);
        }
        content
    }

    fn forget(&mut self, block: u32) {
        let Some(state) = self.blocks.get_mut(block as usize) else { return };
        if let Some((key, _)) = state.content.take() {
            self.entered.remove(&key);
        }
    }

    /// Appends an idle block to the list as the newest.
    fn link(&mut self, block: u32) {
        let newest = std::mem::replace(&mut self.newest, block);
        if let Some(state) = self.blocks.get_mut(block as usize) {
            (state.older, state.newer) = (newest, NONE);
        }
        match self.blocks.get_mut(newest as usize) {
            Some(before) => before.newer = block,
            None => self.oldest = block,
        }
        self.num_idle += 1;
    }

    fn unlink(&mut self, block: u32) {
        let Some(state) = self.blocks.get_mut(block as usize) else { return };
        let (older, newer) = (state.older, state.newer);
        (state.older, state.newer) = (NONE, NONE);
        match self.blocks.get_mut(older as usize) {
            Some(state) => state.newer = newer,
            None => self.oldest = newer,
        }
        match self.blocks.get_mut(newer as usize) {
            Some(state) => state.older = older,
            None => self.newest = older,
        }
        self.num_idle -= 1;
    }

    /// Counts everything again from the block tables of all owners; an error says which count is
    /// wrong.
    pub fn audit<'a>(&self, block_tables: impl Iterator<Item = &'a [u32]>) -> Result<()> {
        let wrong = |what: String| Err(Error::internal(what));
        let mut owners = try_filled(self.blocks.len(), 0u32, "an audit")?;
        for block in block_tables.flatten() {
            match owners.get_mut(*block as usize) {
                Some(count) => *count += 1,
                None => return wrong(format!("block {block} does not exist")),
            }
        }
        let mut idle = 0;
        let (mut at, mut before) = (self.oldest, NONE);
        while let Some(state) = self.blocks.get(at as usize) {
            if state.older != before || !self.is_idle(at) || idle > self.blocks.len() {
                return wrong(format!("block {at} is in the list of idle blocks"));
            }
            idle += 1;
            (before, at) = (at, state.newer);
        }
        if idle != self.num_idle || self.newest != before {
            return wrong(format!("{idle} idle blocks, {} counted", self.num_idle));
        }
        let mut is_free = try_filled(self.blocks.len(), false, "an audit")?;
        for block in &self.free {
            match is_free.get_mut(*block as usize) {
                Some(seen) if !*seen => *seen = true,
                _ => return wrong(format!("block {block} is free twice")),
            }
        }
        let mut entered = 0;
        for (block, state) in self.blocks.iter().enumerate() {
            let expected = owners.get(block).copied().unwrap_or_default();
            if state.num_owners != expected {
                return wrong(format!(
                    "block {block} has {expected} owners, {} counted",
                    state.num_owners
                ));
            }
            if expected > 1 && state.content.is_none() {
                return wrong(format!("block {block} is shared without a content"));
            }
            let resting = expected == 0 && state.content.is_none();
            if is_free.get(block).copied() != Some(resting) {
                return wrong(format!("block {block} is free and not, or neither"));
            }
            if let Some((key, _)) = &state.content {
                entered += 1;
                if self.entered.get(key) != Some(&(block as u32)) {
                    return wrong(format!("block {block} cannot be found"));
                }
            }
        }
        if entered == self.entered.len() {
            Ok(())
        } else {
            wrong(format!("{entered} blocks with content, {} known", self.entered.len()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(of: u32) -> Vec<u32> {
        (0..BLOCK_SIZE as u32).map(|i| of * 1000 + i).collect()
    }

    #[test]
    fn contents_are_found_after_the_content_they_were_computed_after() {
        let mut pool = BlockPool::new(4, true).unwrap();
        let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
        let first = pool.enter(a, 0, ContentId::EMPTY, &tokens(1));
        let second = pool.enter(b, 0, first, &tokens(2));
        assert_eq!(pool.find(0, ContentId::EMPTY, &tokens(1)), Some((a, first)));
        assert_eq!(pool.find(0, first, &tokens(2)), Some((b, second)));
        // Other place, other isolation, other tokens.
        assert_eq!(pool.find(0, ContentId::EMPTY, &tokens(2)), None);
        assert_eq!(pool.find(7, ContentId::EMPTY, &tokens(1)), None);
        assert_eq!(pool.find(0, first, &tokens(3)), None);
        // The same content in a second block is the same content.
        let c = pool.allocate().unwrap();
        assert_eq!(pool.enter(c, 0, ContentId::EMPTY, &tokens(1)), first);
        assert_eq!(pool.find(0, ContentId::EMPTY, &tokens(1)), Some((a, first)));
        pool.audit([&[a, b][..], &[c][..]].into_iter()).unwrap();
        pool.release(&mut vec![c]);
        assert_eq!(pool.counts(), BlockCounts { used: 2, idle: 0, free: 2 });
    }

    #[test]
    fn the_block_idle_longest_goes_first_and_the_end_of_a_sequence_before_its_beginning() {
        let mut pool = BlockPool::new(3, true).unwrap();
        let mut table: Vec<u32> = (0..3).map(|_| pool.allocate().unwrap()).collect();
        let mut content = ContentId::EMPTY;
        for (i, block) in table.iter().enumerate() {
            content = pool.enter(*block, 0, content, &tokens(i as u32));
        }
        let [a, b, c] = table[..] else { panic!() };
        pool.release(&mut table);
        assert_eq!(pool.counts(), BlockCounts { used: 0, idle: 3, free: 0 });
        pool.share(b);
        assert_eq!(pool.allocate(), Some(c));
        assert_eq!(pool.allocate(), Some(a));
        assert_eq!(pool.allocate(), None);
        assert_eq!(pool.find(0, ContentId::EMPTY, &tokens(0)), None);
        pool.audit([&[a, b, c][..]].into_iter()).unwrap();
    }

    #[test]
    fn without_contents_nothing_is_shared() {
        let mut pool = BlockPool::new(2, false).unwrap();
        let a = pool.allocate().unwrap();
        pool.enter(a, 0, ContentId::EMPTY, &tokens(1));
        assert_eq!(pool.find(0, ContentId::EMPTY, &tokens(1)), None);
        pool.release(&mut vec![a]);
        assert_eq!(pool.counts(), BlockCounts { used: 0, idle: 0, free: 2 });
    }
}
