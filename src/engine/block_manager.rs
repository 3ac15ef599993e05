//! Which blocks of the KV cache are free. Bookkeeping of integers; no tensor is touched here.

use crate::error::{try_filled, try_with_capacity, Result};

/// Hands out the blocks of one KV cache.
pub struct BlockManager {
    /// Free block ids, the next one to be given last.
    free: Vec<u32>,
    /// By block id: is it given out?
    used: Vec<bool>,
}

impl BlockManager {
    /// All of `num_blocks` blocks are free.
    pub fn new(num_blocks: u32) -> Result<Self> {
        let mut free = try_with_capacity(num_blocks as usize, "the list of free KV blocks")?;
        free.extend((0..num_blocks).rev());
        Ok(BlockManager { free, used: try_filled(num_blocks as usize, false, "KV block states")? })
    }

    /// Blocks in all.
    pub fn num_blocks(&self) -> usize {
        self.used.len()
    }

    /// Blocks that can be had now.
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// A block for its new owner, or `None` if all are given out.
    pub fn allocate(&mut self) -> Option<u32> {
        let block = self.free.pop()?;
        if let Some(used) = self.used.get_mut(block as usize) {
            *used = true;
        }
        Some(block)
    }

    /// Takes blocks back, leaving the table empty. A block that is not given out is ignored: a double
    /// free must not hand one block to two owners.
    pub fn release(&mut self, block_table: &mut Vec<u32>) {
        for block in block_table.drain(..).rev() {
            match self.used.get_mut(block as usize) {
                Some(used) if *used => {
                    *used = false;
                    self.free.push(block);
                }
                _ => debug_assert!(false, "block {block} was not given out"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_has_one_owner_and_all_come_back() {
        let mut manager = BlockManager::new(7).unwrap();
        let mut tables: Vec<Vec<u32>> = vec![Vec::new(); 3];
        // A fixed pseudo-random walk of allocations and releases.
        let mut state = 12345u64;
        for _ in 0..10_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let who = (state >> 33) as usize % 3;
            if (state >> 40).is_multiple_of(5) {
                manager.release(&mut tables[who]);
            } else if let Some(block) = manager.allocate() {
                tables[who].push(block);
            }
            let mut owned: Vec<u32> = tables.concat();
            assert_eq!(owned.len() + manager.num_free(), manager.num_blocks());
            owned.sort_unstable();
            owned.dedup();
            assert_eq!(owned.len() + manager.num_free(), manager.num_blocks());
        }
        for table in &mut tables {
            manager.release(table);
        }
        assert_eq!(manager.num_free(), 7);
    }
}
