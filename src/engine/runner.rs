//! Runs forward passes for many sequences over one KV cache.
//!
//! The runner is behind a lock that a request takes for one forward pass at a time. Sequences keep
//! their KV blocks between passes. When blocks run out, an older sequence takes those of a younger one,
//! which is computed again when there is room: on the CPU rows of the forward pass do not depend on what is
//! computed beside them, so the recomputed cache has the same bits. The oldest always gets on, so
//! every request ends that could run alone. A sequence whose owner is busy elsewhere, in its callback,
//! loses its rank after a while: the callback may be waiting for a younger request on the same model.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::block_manager::BlockManager;
use crate::error::{Error, Result};
use crate::model::{ForwardBatch, KvCache, Model, Workspace};
use crate::ops::BLOCK_SIZE;

/// Longest piece of a prompt in one forward pass: long enough for the matrix products to run at full
/// speed, short enough for others to get their turn. The second is that of a GPU.
const MAX_CHUNK_TOKENS: [usize; 2] = [512, 2048];

/// Longest piece of a prompt in one forward pass where contexts have up to `max_context` tokens.
pub fn chunk_tokens(on_device: bool, max_context: u64) -> usize {
    let [host, device] = MAX_CHUNK_TOKENS;
    let most = if on_device { device } else { host };
    usize::try_from(max_context).map_or(most, |context| context.min(most)).max(1)
}

/// How long a sequence may stay away before younger ones may take its blocks.
const IDLE: Duration = Duration::from_millis(100);

/// A sequence of a runner. Smaller numbers are older.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// Since when the owner of a sequence has been elsewhere (in its callback), `None` while it computes or
/// waits for its turn.
#[derive(Default)]
pub struct Absence {
    since: Mutex<Option<Instant>>,
}

impl Absence {
    fn set(&self, since: Option<Instant>) {
        *self.since.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }

    /// The owner goes elsewhere.
    pub fn begin(&self) {
        self.set(Some(Instant::now()));
    }

    /// The owner is back.
    pub fn end(&self) {
        self.set(None);
    }

    fn is_long(&self) -> bool {
        let since = *self.since.lock().unwrap_or_else(PoisonError::into_inner);
        since.is_some_and(|since| since.elapsed() > IDLE)
    }
}

struct Sequence {
    id: SequenceId,
    absence: Arc<Absence>,
    /// KV blocks in the order of positions.
    block_table: Vec<u32>,
    /// Tokens whose keys and values are in the cache.
    num_computed: usize,
}

/// Which rows of logits a pass is to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsRows {
    /// The last token's, once the pass has come to it.
    Last,
    /// Every token's of the pass.
    All,
}

/// What a turn at the runner came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// All tokens are computed.
    Done,
    /// Some are; come again.
    Partly,
    /// Nothing was done: older sequences hold the KV blocks. Come again when one has moved on.
    NoBlocks,
}

/// The KV cache and who has what of it.
pub struct Runner {
    kv: KvCache,
    workspace: Workspace,
    max_chunk_tokens: usize,
    blocks: BlockManager,
    sequences: Vec<Sequence>,
    positions: Vec<u32>,
    slot_mapping: Vec<u32>,
    logits_rows: Vec<u32>,
}

impl Runner {
    /// A runner over an empty cache that computes up to `max_chunk_tokens` in one forward pass.
    pub fn new(kv: KvCache, workspace: Workspace, max_chunk_tokens: usize) -> Result<Self> {
        // Slots are numbered in 32 bits.
        let num_slots = kv.num_blocks().saturating_mul(BLOCK_SIZE);
        if u32::try_from(num_slots).is_err() {
            return Err(Error::invalid_argument("the KV cache has more than 2^32 tokens"));
        }
        Ok(Runner {
            blocks: BlockManager::new(kv.num_blocks() as u32)?,
            kv,
            workspace,
            max_chunk_tokens,
            sequences: Vec::new(),
            positions: Vec::new(),
            slot_mapping: Vec::new(),
            logits_rows: Vec::new(),
        })
    }

    /// Ends a sequence and frees its blocks. One that never had a turn is not known, and that is fine.
    pub fn remove_sequence(&mut self, id: SequenceId) {
        if let Some(index) = self.sequences.iter().position(|sequence| sequence.id == id) {
            let mut sequence = self.sequences.swap_remove(index);
            self.blocks.release(&mut sequence.block_table);
        }
    }

    fn sequence(&mut self, id: SequenceId) -> Result<&mut Sequence> {
        let sequence = self.sequences.iter_mut().find(|sequence| sequence.id == id);
        sequence.ok_or_else(|| Error::internal("the sequence is not registered"))
    }

    fn register(&mut self, id: SequenceId, absence: &Arc<Absence>) -> Result<&mut Sequence> {
        if !self.sequences.iter().any(|sequence| sequence.id == id) {
            self.sequences
                .try_reserve(1)
                .map_err(|_| Error::out_of_memory("a sequence", size_of::<Sequence>()))?;
            self.sequences.push(Sequence {
                id,
                absence: absence.clone(),
                block_table: Vec::new(),
                num_computed: 0,
            });
        }
        self.sequence(id)
    }

    /// Computes the next piece of a sequence whose tokens are `token_ids`; those that are computed
    /// already are not computed again. The owner tells by `absence` when it is elsewhere.
    ///
    /// `logits`: with [`LogitsRows::Last`] [vocab_size], written when the last token is computed; with
    /// [`LogitsRows::All`] [token_ids.len(), vocab_size], of which the rows of this pass are written.
    /// `should_stop` is asked between layers; then the pass fails as cancelled and has no effect.
    pub fn advance(
        &mut self,
        model: &Model,
        (id, absence): (SequenceId, &Arc<Absence>),
        token_ids: &[u32],
        rows: LogitsRows,
        logits: &mut [f32],
        should_stop: &dyn Fn() -> bool,
    ) -> Result<Turn> {
        let start = self.register(id, absence)?.num_computed;
        let end = token_ids.len().min(start.saturating_add(self.max_chunk_tokens));
        let Some(chunk) = token_ids.get(start..end).filter(|chunk| !chunk.is_empty()) else {
            return Ok(Turn::Done);
        };
        if !self.reserve_blocks(id, end)? {
            return Ok(Turn::NoBlocks);
        }
        self.describe(id, start, end)?;
        let is_last = end == token_ids.len();
        let vocab_size = model.config().vocab_size;
        let last_row = chunk.len() as u32 - 1;
        self.logits_rows.clear();
        let out_range = match rows {
            LogitsRows::All => {
                self.logits_rows.extend(0..=last_row);
                start * vocab_size..end * vocab_size
            }
            LogitsRows::Last if is_last => {
                self.logits_rows.push(last_row);
                0..vocab_size
            }
            LogitsRows::Last => 0..0,
        };
        let out = logits
            .get_mut(out_range)
            .ok_or_else(|| Error::internal("the logits buffer is too small"))?;
        let sequence = self.sequences.iter().find(|sequence| sequence.id == id);
        let sequence = sequence.ok_or_else(|| Error::internal("the sequence is not registered"))?;
        let batch = ForwardBatch {
            token_ids: chunk,
            positions: &self.positions,
            cu_seqlens_q: &[0, chunk.len() as u32],
            context_lens: &[end as u32],
            block_tables: &sequence.block_table,
            max_blocks_per_seq: sequence.block_table.len(),
            slot_mapping: &self.slot_mapping,
            logits_rows: &self.logits_rows,
        };
        model.forward(&batch, &mut self.kv, &mut self.workspace, out, should_stop)?;
        self.sequence(id)?.num_computed = end;
        Ok(if is_last { Turn::Done } else { Turn::Partly })
    }

    /// Gives a sequence the blocks for `num_tokens` tokens, taking them from others if need be. False if
    /// those that have them may keep them.
    fn reserve_blocks(&mut self, id: SequenceId, num_tokens: usize) -> Result<bool> {
        let wanted = num_tokens.div_ceil(BLOCK_SIZE);
        if wanted > self.blocks.num_blocks() {
            // Load made sure that one request of the longest context fits alone.
            return Err(Error::internal("the KV cache is smaller than the longest context"));
        }
        let missing = wanted.saturating_sub(self.sequence(id)?.block_table.len());
        while self.blocks.num_free() < missing {
            if !self.evict_for(id) {
                return Ok(false);
            }
        }
        self.sequence(id)?
            .block_table
            .try_reserve(missing)
            .map_err(|_| Error::out_of_memory("a block table", missing * 4))?;
        for _ in 0..missing {
            let block = self.blocks.allocate();
            let block =
                block.ok_or_else(|| Error::internal("the free KV blocks were miscounted"))?;
            self.sequence(id)?.block_table.push(block);
        }
        Ok(true)
    }

    /// Takes the blocks of the youngest sequence that must give way to `id`: a younger one, or one
    /// whose owner has long been elsewhere. False if there is none.
    fn evict_for(&mut self, id: SequenceId) -> bool {
        let gives_way = |other: &Sequence| other.id > id || other.absence.is_long();
        let victim = self
            .sequences
            .iter_mut()
            .filter(|other| other.id != id && !other.block_table.is_empty() && gives_way(other))
            .max_by_key(|other| other.id);
        let Some(victim) = victim else { return false };
        victim.num_computed = 0;
        self.blocks.release(&mut victim.block_table);
        true
    }

    /// Fills positions and slots of the tokens `start..end` of a sequence, and makes room for the rows.
    fn describe(&mut self, id: SequenceId, start: usize, end: usize) -> Result<()> {
        let no_memory = |_| Error::out_of_memory("batch metadata", (end - start) * 4);
        self.positions.clear();
        self.positions.try_reserve(end - start).map_err(no_memory)?;
        self.positions.extend(start as u32..end as u32);
        self.slot_mapping.clear();
        self.slot_mapping.try_reserve(end - start).map_err(no_memory)?;
        let sequence = self.sequences.iter().find(|sequence| sequence.id == id);
        let sequence = sequence.ok_or_else(|| Error::internal("the sequence is not registered"))?;
        for position in start..end {
            let block = sequence.block_table.get(position / BLOCK_SIZE).copied();
            let block = block.ok_or_else(|| Error::internal("a position has no KV block"))?;
            self.slot_mapping.push(block * BLOCK_SIZE as u32 + (position % BLOCK_SIZE) as u32);
        }
        self.logits_rows.try_reserve(end - start).map_err(no_memory)
    }
}
