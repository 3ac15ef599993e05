//! Runs sequences through a model's forward pass, as an engine would: blocks, tables, slots.

#![allow(dead_code)] // each test binary uses its part

use std::sync::Arc;

use xserv::backend::cpu::CpuBackend;
use xserv::backend::ComputeContext;
use xserv::error::Result;
use xserv::memory::DType;
use xserv::model::{
    BlockCopy, CopyDirection, ForwardBatch, KvCache, KvFormat, KvSwap, LoadOptions, Model, Step,
    StepResult, TokenChoice, Workspace,
};
use xserv::ops::kv_cache::layout::BLOCK_SIZE;

#[path = "cuda_context.rs"]
mod cuda_context;
pub use cuda_context::cuda_context;

/// Loads the folder `path`, quietly.
pub fn load(path: &str, dtype: Option<DType>, num_threads: usize) -> Model {
    load_on(path, dtype, CpuBackend::new(num_threads).expect("threads"))
}

/// The same on a given backend.
pub fn load_on(path: &str, dtype: Option<DType>, backend: CpuBackend) -> Model {
    let backend = Arc::new(backend);
    Model::open(path)
        .and_then(|folder| {
            let options = LoadOptions { dtype, ..LoadOptions::default() };
            folder.load(backend, &options, &mut |_| true)
        })
        .unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Loads the folder `path` to the device of a context.
pub fn load_on_cuda(
    path: &str,
    dtype: Option<DType>,
    context: Arc<ComputeContext>,
) -> Result<Model> {
    let backend = CpuBackend::new(2).expect("threads");
    let options = LoadOptions { dtype, ..LoadOptions::default() };
    Model::open(path)?.load_on_device(context, &backend, &options, &mut |_| true)
}

/// The same, and deterministic.
pub fn load_deterministic(
    path: &str,
    dtype: Option<DType>,
    context: Arc<ComputeContext>,
) -> Result<Model> {
    let backend = CpuBackend::new(2).expect("threads");
    let options = LoadOptions { dtype, deterministic: true, ..LoadOptions::default() };
    Model::open(path)?.load_on_device(context, &backend, &options, &mut |_| true)
}

/// The same on the host, with a cache of 8-bit floats.
pub fn load_fp8_cache(path: &str, dtype: DType, num_threads: usize) -> Model {
    let backend = Arc::new(CpuBackend::new(num_threads).expect("threads"));
    let options = fp8_cache(dtype, false);
    Model::open(path)
        .and_then(|folder| folder.load(backend, &options, &mut |_| true))
        .unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The same on a device.
pub fn load_fp8_cache_on_cuda(
    path: &str,
    dtype: DType,
    context: Arc<ComputeContext>,
    deterministic: bool,
) -> Result<Model> {
    let backend = CpuBackend::new(2).expect("threads");
    let options = fp8_cache(dtype, deterministic);
    Model::open(path)?.load_on_device(context, &backend, &options, &mut |_| true)
}

fn fp8_cache(dtype: DType, deterministic: bool) -> LoadOptions {
    LoadOptions {
        dtype: Some(dtype),
        deterministic,
        kv_format: KvFormat::Fp8,
        ..LoadOptions::default()
    }
}

/// A sequence in the cache.
#[derive(Default)]
pub struct Sequence {
    len: usize,
    blocks: Vec<u32>,
}

/// The arrays of a batch.
#[derive(Default)]
struct Described {
    token_ids: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    cu_seqlens_q: Vec<u32>,
    context_lens: Vec<u32>,
    tables: Vec<u32>,
    max_blocks: usize,
    rows: Vec<u32>,
    /// The number of rows of each sequence.
    rows_of: Vec<usize>,
}

impl Described {
    fn batch(&self) -> ForwardBatch<'_> {
        ForwardBatch {
            token_ids: &self.token_ids,
            positions: &self.positions,
            slot_mapping: &self.slots,
            cu_seqlens_q: &self.cu_seqlens_q,
            context_lens: &self.context_lens,
            block_tables: &self.tables,
            max_blocks_per_seq: self.max_blocks,
            logits_rows: &self.rows,
        }
    }
}

/// A model with a cache and a workspace.
pub struct Driver<'m> {
    pub model: &'m Model,
    kv: KvCache,
    workspace: Workspace,
    free: Vec<u32>,
}

impl<'m> Driver<'m> {
    pub fn new(model: &'m Model, num_blocks: usize) -> Self {
        let kv = model.kv_cache(num_blocks).expect("a cache");
        // Out of order, so that a block table that is ignored shows.
        let (even, odd): (Vec<u32>, Vec<u32>) =
            (0..num_blocks as u32).rev().partition(|block| block % 2 == 0);
        let free = even.into_iter().chain(odd).collect();
        Driver { model, kv, workspace: Workspace::new(), free }
    }

    /// Returns the next tokens of several sequences, of which all rows or the last ones are wanted.
    fn describe(&mut self, parts: &mut [(&mut Sequence, &[u32])], all_rows: bool) -> Described {
        let mut made = Described { cu_seqlens_q: vec![0], ..Described::default() };
        for (sequence, new) in parts.iter_mut() {
            for &id in *new {
                if sequence.len % BLOCK_SIZE == 0 {
                    sequence.blocks.push(self.free.pop().expect("a free block"));
                }
                let block = sequence.blocks[sequence.len / BLOCK_SIZE];
                made.token_ids.push(id);
                made.positions.push(sequence.len as u32);
                made.slots.push(block * BLOCK_SIZE as u32 + (sequence.len % BLOCK_SIZE) as u32);
                sequence.len += 1;
            }
            let end = made.token_ids.len();
            made.cu_seqlens_q.push(end as u32);
            made.context_lens.push(sequence.len as u32);
            let wanted = if all_rows { end - new.len()..end } else { end - 1..end };
            made.rows_of.push(wanted.len());
            made.rows.extend(wanted.map(|row| row as u32));
        }
        made.max_blocks = parts.iter().map(|(s, _)| s.blocks.len()).max().unwrap_or(0);
        for (sequence, _) in parts.iter() {
            made.tables.extend(&sequence.blocks);
            made.tables
                .resize(made.tables.len() + made.max_blocks - sequence.blocks.len(), u32::MAX);
        }
        made
    }

    /// Runs the next tokens of several sequences in one batch. Returns the logits `[rows,
    /// vocab_size]` of each: of all its new tokens, or of the last.
    pub fn step(&mut self, parts: &mut [(&mut Sequence, &[u32])], all_rows: bool) -> Vec<Vec<f32>> {
        let described = self.describe(parts, all_rows);
        let vocab_size = self.model.config().vocab_size;
        let mut logits = vec![f32::NAN; described.rows.len() * vocab_size];
        let batch = described.batch();
        self.model
            .forward(&batch, &mut self.kv, &mut self.workspace, &mut logits, &|| false)
            .expect("the forward pass");
        let mut rest = logits.as_slice();
        described
            .rows_of
            .iter()
            .map(|rows| {
                let (own, others) = rest.split_at(rows * vocab_size);
                rest = others;
                own.to_vec()
            })
            .collect()
    }

    /// Begins a step with the next tokens of several sequences, whose last rows choose tokens.
    pub fn begin(
        &mut self,
        parts: &mut [(&mut Sequence, &[u32])],
        token_sources: &[u32],
        choices: &[TokenChoice],
    ) -> Result<()> {
        let described = self.describe(parts, false);
        let step = Step {
            batch: described.batch(),
            token_sources,
            choices,
            adjusted_rows: &[],
            adjustments: &[],
            log_probs: &[],
            masked_rows: &[],
        };
        self.model.begin_step(&step, &mut self.kv, &mut self.workspace, &|| false)
    }

    /// Waits for the oldest step.
    pub fn finish(&mut self) -> StepResult {
        let mut result = StepResult::default();
        self.model.finish_step(&mut self.workspace, &mut result).expect("the end of a step");
        result
    }

    /// Makes a sequence as long as if `len` tokens had been computed, with whatever is in the cache.
    pub fn pretend(&mut self, sequence: &mut Sequence, len: usize) {
        sequence.len = len;
        for _ in 0..len.div_ceil(BLOCK_SIZE) {
            sequence.blocks.push(self.free.pop().expect("a free block"));
        }
    }

    /// Makes a sequence of `len` tokens out of what a swapped one left in places from `first` on,
    /// which stay as they are.
    pub fn copy_in(&mut self, sequence: &mut Sequence, len: usize, swap: &mut KvSwap, first: u32) {
        self.pretend(sequence, len);
        self.swap(sequence, swap, first, CopyDirection::FromHost);
    }

    /// Makes room for passes of this many tokens.
    pub fn reserve(&mut self, num_tokens: usize) {
        self.model.reserve(&mut self.workspace, num_tokens, 1).expect("a workspace");
    }

    /// Bytes of the workspace on the host.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.size_bytes()
    }

    /// Has a sequence's blocks copied to places from `first` on, and gives them back.
    pub fn swap_out(&mut self, sequence: &mut Sequence, swap: &mut KvSwap, first: u32) {
        self.swap(sequence, swap, first, CopyDirection::ToHost);
        self.free.splice(..0, sequence.blocks.drain(..));
    }

    /// Has them copied back, to other blocks.
    pub fn swap_in(&mut self, sequence: &mut Sequence, swap: &mut KvSwap, first: u32) {
        let len = std::mem::take(&mut sequence.len);
        self.copy_in(sequence, len, swap, first);
    }

    fn swap(
        &mut self,
        sequence: &Sequence,
        swap: &mut KvSwap,
        first: u32,
        direction: CopyDirection,
    ) {
        let copies: Vec<BlockCopy> = (first..)
            .zip(&sequence.blocks)
            .map(|(place, &block)| BlockCopy { block, place, direction })
            .collect();
        self.model.copy_blocks(&mut self.kv, swap, &copies).expect("copies");
    }

    /// Gives a sequence's blocks back.
    pub fn free(&mut self, sequence: Sequence) {
        self.free.extend(sequence.blocks);
    }

    /// Logits of all tokens, fed in pieces of `chunk`.
    pub fn logits(&mut self, ids: &[u32], chunk: usize) -> Vec<f32> {
        let mut sequence = Sequence::default();
        let mut logits = Vec::new();
        for piece in ids.chunks(chunk) {
            logits.extend(self.step(&mut [(&mut sequence, piece)], true).remove(0));
        }
        self.free(sequence);
        logits
    }

    /// Returns the likeliest `count` tokens one after the other, the prompt fed in pieces of
    /// `chunk`, and the logits that each was chosen from.
    pub fn greedy(&mut self, prompt: &[u32], chunk: usize, count: usize) -> (Vec<u32>, Vec<f32>) {
        let mut sequence = Sequence::default();
        let (mut ids, mut all) = (Vec::new(), Vec::new());
        let mut last = Vec::new();
        for piece in prompt.chunks(chunk) {
            last = self.step(&mut [(&mut sequence, piece)], false).remove(0);
        }
        loop {
            ids.push(argmax(&last));
            all.extend(&last);
            if ids.len() == count {
                self.free(sequence);
                return (ids, all);
            }
            last = self.step(&mut [(&mut sequence, &ids[ids.len() - 1..])], false).remove(0);
        }
    }
}

/// Returns the index of the largest value, the first of equals.
pub fn argmax(values: &[f32]) -> u32 {
    assert!(values.iter().all(|x| !x.is_nan()), "NaN among the logits");
    let mut best = 0;
    for (i, x) in values.iter().enumerate() {
        if *x > values[best] {
            best = i;
        }
    }
    best as u32
}

/// Returns the bits, for comparisons that must be exact.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}
