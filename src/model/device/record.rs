//! The record of a step: the index arrays of the batch and how tokens are chosen, written to pinned
//! memory and copied in one piece to fixed addresses on the device.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::{Arena, ComputeContext, DeviceTensor, PinnedBuffer};
use crate::error::{Error, Result};
use crate::memory::ElementType;
use crate::model::batch::ForwardBatch;
use crate::model::step::{TokenChoice, FROM_BATCH};
use crate::ops::kv_cache::layout::BLOCK_SIZE;
use crate::ops::sample::{SampleRow, SAMPLE_ROW_WORDS};

/// The alignment of each array in a record, in numbers.
const ALIGNMENT: usize = 4;

/// The sizes of the arrays. Where they exceed those of the batch, the arrays are padded with rows
/// that change nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::model) struct RecordShape {
    pub num_tokens: usize,
    pub num_seqs: usize,
    pub num_rows: usize,
    pub blocks_per_seq: usize,
}

impl RecordShape {
    /// Returns the exact sizes of the batch.
    pub fn of(batch: &ForwardBatch<'_>) -> Self {
        RecordShape {
            num_tokens: batch.num_tokens(),
            num_seqs: batch.num_seqs(),
            num_rows: batch.logits_rows.len(),
            blocks_per_seq: batch.max_blocks_per_seq,
        }
    }
}

/// The parts of a record besides the batch.
#[derive(Clone, Copy, Debug)]
pub(in crate::model) struct RecordExtras<'a> {
    /// As in [`crate::model::Step`].
    pub token_sources: &'a [u32],
    /// As in [`crate::model::Step`]; missing ones choose nothing.
    pub choices: &'a [TokenChoice],
    /// The address in host memory to which the kernels write the tokens.
    pub host_tokens: u64,
    /// The block of the KV cache to which padding rows write.
    pub spare_block: u32,
}

/// The range of each array among the numbers of a record.
#[derive(Debug)]
struct Places {
    host_tokens: Range<usize>,
    sample_rows: Range<usize>,
    token_ids: Range<usize>,
    token_sources: Range<usize>,
    positions: Range<usize>,
    slots: Range<usize>,
    cu_seqlens_q: Range<usize>,
    context_lens: Range<usize>,
    block_tables: Range<usize>,
    logits_rows: Range<usize>,
    len: usize,
}

impl Places {
    fn new(shape: &RecordShape) -> Result<Self> {
        let mut len = 0usize;
        let mut place = |count: usize| {
            let range = len..len.saturating_add(count);
            len = range.end.saturating_add(ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
            range
        };
        let places = Places {
            host_tokens: place(2),
            sample_rows: place(shape.num_rows.saturating_mul(SAMPLE_ROW_WORDS)),
            token_ids: place(shape.num_tokens),
            token_sources: place(shape.num_tokens),
            positions: place(shape.num_tokens),
            slots: place(shape.num_tokens),
            cu_seqlens_q: place(shape.num_seqs.saturating_add(1)),
            context_lens: place(shape.num_seqs),
            block_tables: place(shape.num_seqs.saturating_mul(shape.blocks_per_seq)),
            logits_rows: place(shape.num_rows),
            len: 0,
        };
        match len.checked_mul(8) {
            Some(bytes) if bytes <= isize::MAX as usize => Ok(Places { len, ..places }),
            _ => Err(Error::out_of_memory("index arrays", usize::MAX)),
        }
    }

    fn write(
        &self,
        shape: &RecordShape,
        batch: &ForwardBatch<'_>,
        extras: &RecordExtras<'_>,
        bytes: &mut [u8],
    ) {
        let address = extras.host_tokens;
        put(bytes, &self.host_tokens, [address as u32, (address >> 32) as u32].into_iter());
        let nothing = SampleRow { temperature: -1.0, top_p: 1.0, ..SampleRow::default() };
        let rows = extras.choices.iter().map(sample_row).chain(std::iter::repeat(nothing));
        put(bytes, &self.sample_rows, rows.take(shape.num_rows).flat_map(|row| row.words()));

        // Padding rows are sequences of one token, with the spare block as their cache.
        let spare_slot = extras.spare_block.saturating_mul(BLOCK_SIZE as u32);
        fill(bytes, &self.token_ids, batch.token_ids, 0);
        fill(bytes, &self.token_sources, extras.token_sources, FROM_BATCH);
        fill(bytes, &self.positions, batch.positions, 0);
        fill(bytes, &self.slots, batch.slot_mapping, spare_slot);
        let ends = batch.cu_seqlens_q.iter().copied();
        put(bytes, &self.cu_seqlens_q, ends.chain(batch.num_tokens() as u32 + 1..));
        fill(bytes, &self.context_lens, batch.context_lens, 1);
        fill(bytes, &self.logits_rows, batch.logits_rows, 0);

        // Entries after those in use may be anything; a kernel must never see them.
        for seq in 0..shape.num_seqs {
            let len = batch.context_lens.get(seq).copied().unwrap_or(0) as usize;
            let used = len.div_ceil(BLOCK_SIZE).min(batch.max_blocks_per_seq);
            let begin = seq * batch.max_blocks_per_seq;
            let table = batch.block_tables.get(begin..begin + used).unwrap_or_default();
            let begin = self.block_tables.start + seq * shape.blocks_per_seq;
            fill(bytes, &(begin..begin + shape.blocks_per_seq), table, extras.spare_block);
        }
    }
}

/// Converts a choice to the form that the kernel reads.
fn sample_row(choice: &TokenChoice) -> SampleRow {
    let greedy = SampleRow { top_p: 1.0, ..SampleRow::default() };
    match choice {
        TokenChoice::Greedy => greedy,
        TokenChoice::Caller => SampleRow { temperature: -1.0, ..greedy },
        TokenChoice::Draw(draw) => (*draw).into(),
    }
}

/// Writes the first numbers of `values` that fit into a place.
fn put(bytes: &mut [u8], place: &Range<usize>, values: impl Iterator<Item = u32>) {
    let room = bytes.get_mut(place.start * 4..place.end * 4).unwrap_or_default();
    for (word, value) in room.chunks_exact_mut(4).zip(values) {
        word.copy_from_slice(&value.to_ne_bytes());
    }
}

/// Writes `values` to a place and fills the rest of it with `filler`.
fn fill(bytes: &mut [u8], place: &Range<usize>, values: &[u32], filler: u32) {
    put(bytes, place, values.iter().copied().chain(std::iter::repeat(filler)));
}

/// A record on the device, in 32-bit numbers.
pub(in crate::model) struct DeviceRecord {
    /// i32 [2]
    pub host_tokens: DeviceTensor,
    /// `[num_rows, SAMPLE_ROW_WORDS]`
    pub sample_rows: DeviceTensor,
    /// `[num_tokens]`
    pub token_ids: DeviceTensor,
    /// `[num_tokens]`
    pub token_sources: DeviceTensor,
    /// `[num_tokens]`
    pub positions: DeviceTensor,
    /// `[num_tokens]`
    pub slots: DeviceTensor,
    /// `[num_seqs + 1]`
    pub cu_seqlens_q: DeviceTensor,
    /// `[num_seqs]`
    pub context_lens: DeviceTensor,
    /// `[num_seqs, blocks_per_seq]`
    pub block_tables: DeviceTensor,
    /// `[num_rows]`
    pub logits_rows: DeviceTensor,
}

/// The initial size of a record on the host: room for 256 sequences of 4096 tokens.
const FIRST_HOST_BYTES: usize = 256 << 10;

/// Memory for records: one on the device, which the stream keeps in order, and one on the host for
/// each step in flight.
pub(in crate::model) struct RecordMemory {
    context: Arc<ComputeContext>,
    device: DeviceTensor,
    /// Each as large as the largest record so far, because pinned memory is slow to allocate.
    host: Vec<PinnedBuffer>,
    next: usize,
}

impl RecordMemory {
    /// Allocates memory for records of up to `len` numbers and `num_in_flight` steps.
    pub fn new(context: &Arc<ComputeContext>, len: usize, num_in_flight: usize) -> Result<Self> {
        let bytes = Arena::bytes_for(ElementType::I32, &[len])?;
        let device =
            Arena::new(context, bytes, "index arrays")?.tensor(ElementType::I32, &[len])?;
        let mut host = Vec::new();
        for _ in 0..num_in_flight.max(1) {
            let bytes = bytes.min(FIRST_HOST_BYTES);
            host.push(PinnedBuffer::new(context, bytes, "index arrays")?);
        }
        Ok(RecordMemory { context: context.clone(), device, host, next: 0 })
    }

    /// Returns the length of a record of this shape, in numbers.
    pub fn len_for(shape: &RecordShape) -> Result<usize> {
        Ok(Places::new(shape)?.len)
    }

    /// Returns the capacity for a record, in numbers.
    pub fn len(&self) -> usize {
        self.device.num_elements() as usize
    }

    /// Queues the copy of a step's record to the device. The batch is no larger than `shape`.
    pub fn upload(
        &mut self,
        shape: &RecordShape,
        batch: &ForwardBatch<'_>,
        extras: &RecordExtras<'_>,
    ) -> Result<()> {
        let places = Places::new(shape)?;
        if places.len > self.len() {
            return Err(Error::internal("a record larger than its memory"));
        }
        self.next = (self.next + 1) % self.host.len();
        let host = self.host.get_mut(self.next);
        let host = host.ok_or_else(|| Error::internal("no memory for records"))?;
        if places.len * 4 > host.len_bytes() {
            let bytes = (places.len * 4).next_power_of_two().min(self.device.size_bytes());
            *host = PinnedBuffer::new(&self.context, bytes, "index arrays")?;
        }
        let bytes = host.bytes()?;
        places.write(shape, batch, extras, bytes);
        host.upload(0..places.len * 4, &self.device, 0)?;
        host.fence()
    }

    /// Returns the arrays of a record of this shape, which lie at the same addresses in every such
    /// record.
    pub fn arrays(&self, shape: &RecordShape) -> Result<DeviceRecord> {
        let places = Places::new(shape)?;
        let view =
            |range: &Range<usize>, shape: &[usize]| self.device.view(range.start, shape, None);
        Ok(DeviceRecord {
            host_tokens: view(&places.host_tokens, &[2])?,
            sample_rows: view(&places.sample_rows, &[shape.num_rows, SAMPLE_ROW_WORDS])?,
            token_ids: view(&places.token_ids, &[shape.num_tokens])?,
            token_sources: view(&places.token_sources, &[shape.num_tokens])?,
            positions: view(&places.positions, &[shape.num_tokens])?,
            slots: view(&places.slots, &[shape.num_tokens])?,
            cu_seqlens_q: view(&places.cu_seqlens_q, &[shape.num_seqs + 1])?,
            context_lens: view(&places.context_lens, &[shape.num_seqs])?,
            block_tables: view(&places.block_tables, &[shape.num_seqs, shape.blocks_per_seq])?,
            logits_rows: view(&places.logits_rows, &[shape.num_rows])?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCH: ForwardBatch<'static> = ForwardBatch {
        token_ids: &[5, 6, 7],
        positions: &[0, 1, 40],
        slot_mapping: &[32, 33, 8],
        cu_seqlens_q: &[0, 2, 3],
        context_lens: &[2, 41],
        block_tables: &[1, u32::MAX, 3, 0],
        max_blocks_per_seq: 2,
        logits_rows: &[2],
    };

    fn written(shape: &RecordShape) -> (Places, Vec<u32>) {
        let places = Places::new(shape).unwrap();
        let mut bytes = vec![0xee; places.len * 4];
        let draw = crate::model::Draw {
            temperature: 0.5,
            top_k: 3,
            top_p: 0.75,
            seed: 1 << 32 | 7,
            index: 9,
            ..crate::model::Draw::default()
        };
        let extras = RecordExtras {
            token_sources: &[FROM_BATCH, FROM_BATCH, 0],
            choices: &[TokenChoice::Draw(draw)],
            host_tokens: 2 << 32 | 3,
            spare_block: 4,
        };
        places.write(shape, &BATCH, &extras, &mut bytes);
        let words = bytes.chunks(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap()));
        (places, words.collect())
    }

    #[test]
    fn arrays_lie_one_after_the_other() {
        let (places, words) = written(&RecordShape::of(&BATCH));
        let at = |range: &Range<usize>| {
            assert_eq!(range.start % ALIGNMENT, 0);
            &words[range.clone()]
        };
        assert_eq!(at(&places.host_tokens), [3, 2]);
        let [half, most, all] = [0.5f32, 0.75, 1.0].map(f32::to_bits);
        let draw = [7, 1, 9, 0, half, most, 0, 3, all, 0];
        assert_eq!(at(&places.sample_rows), draw);
        assert_eq!(at(&places.token_ids), [5, 6, 7]);
        assert_eq!(at(&places.token_sources), [FROM_BATCH, FROM_BATCH, 0]);
        assert_eq!(at(&places.positions), [0, 1, 40]);
        assert_eq!(at(&places.slots), [32, 33, 8]);
        assert_eq!(at(&places.cu_seqlens_q), [0, 2, 3]);
        assert_eq!(at(&places.context_lens), [2, 41]);
        assert_eq!(at(&places.block_tables), [1, 4, 3, 0]);
        assert_eq!(at(&places.logits_rows), [2]);
    }

    #[test]
    fn larger_shapes_are_filled_with_rows_of_the_spare_block() {
        let shape = RecordShape { num_tokens: 4, num_seqs: 3, num_rows: 2, blocks_per_seq: 3 };
        let (places, words) = written(&shape);
        let at = |range: &Range<usize>| &words[range.clone()];
        assert_eq!(at(&places.token_ids), [5, 6, 7, 0]);
        assert_eq!(at(&places.token_sources)[3], FROM_BATCH);
        assert_eq!(at(&places.slots), [32, 33, 8, 4 * BLOCK_SIZE as u32]);
        assert_eq!(at(&places.cu_seqlens_q), [0, 2, 3, 4]);
        assert_eq!(at(&places.context_lens), [2, 41, 1]);
        assert_eq!(at(&places.block_tables), [1, 4, 4, 3, 0, 4, 4, 4, 4]);
        assert_eq!(f32::from_bits(at(&places.sample_rows)[SAMPLE_ROW_WORDS + 4]), -1.0);
    }
}
