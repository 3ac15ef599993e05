//! The activations of a forward pass on a device, and what goes there and back with each pass: allocated once
//! for the largest pass, so that steady-state decoding asks the driver for nothing.

use std::ops::Range;
use std::sync::Arc;

use super::heads::HeadSpacing;
use crate::backend::{Arena, ComputeContext, DeviceTensor, PinnedBuffer};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType};
use crate::model::batch::ForwardBatch;
use crate::model::ModelConfig;
use crate::ops::BLOCK_SIZE;

/// Rows whose logits are computed and copied at a time.
const LOGITS_ROWS: usize = 64;

/// Index arrays begin at multiples of this many numbers.
const INDEX_ALIGNMENT: usize = 4;

/// Memory for passes of up to `num_tokens` tokens. Element type: the model's.
pub(in crate::model) struct DeviceWorkspace {
    num_tokens: usize,
    /// `[num_tokens, hidden_size]`, the residual stream.
    pub hidden: DeviceTensor,
    /// `[num_tokens, hidden_size]`, the residual stream normalised.
    pub normed: DeviceTensor,
    /// `[num_tokens, hidden_size]`, what is added to the residual stream next.
    pub projected: DeviceTensor,
    /// `[num_tokens, hidden_size]`, the wanted rows of the residual stream.
    pub wanted: DeviceTensor,
    /// `[num_tokens, num_heads + 2 * num_kv_heads, head_stride]`
    pub qkv: DeviceTensor,
    /// `[num_tokens, num_heads, head_stride]`, what the heads see.
    pub attn_out: DeviceTensor,
    /// `[num_tokens, 2 * intermediate_size]`
    pub gate_up: DeviceTensor,
    /// `[num_tokens, intermediate_size]`
    pub mlp_act: DeviceTensor,
    /// `[LOGITS_ROWS, vocab_size]`
    pub logits: DeviceTensor,
    /// `[LOGITS_ROWS, vocab_size]` of f32.
    pub logits_f32: DeviceTensor,
    logits_host: PinnedBuffer,
    indices: Option<Indices>,
}

/// Room for the index arrays of a pass, of 32-bit numbers.
struct Indices {
    device: DeviceTensor,
    host: PinnedBuffer,
}

/// The sizes of the tensors, in the order of the struct: `(rows, columns, is_f32)`.
fn shapes(
    config: &ModelConfig,
    spacing: HeadSpacing,
    num_tokens: usize,
) -> [(usize, usize, bool); 10] {
    let (hidden, width) = (config.hidden_size, config.intermediate_size);
    let (heads, kv_heads) = (config.num_heads, config.num_kv_heads);
    let logits_rows = num_tokens.min(LOGITS_ROWS);
    [
        (num_tokens, hidden, false),
        (num_tokens, hidden, false),
        (num_tokens, hidden, false),
        (num_tokens, hidden, false),
        (num_tokens, (heads + 2 * kv_heads) * spacing.stride, false),
        (num_tokens, heads * spacing.stride, false),
        (num_tokens, 2 * width, false),
        (num_tokens, width, false),
        (logits_rows, config.vocab_size, false),
        (logits_rows, config.vocab_size, true),
    ]
}

fn element_of(dtype: DType, is_f32: bool) -> ElementType {
    ElementType::Float(if is_f32 { DType::F32 } else { dtype })
}

/// Bytes of device memory that the activations take.
pub(super) fn device_bytes(
    config: &ModelConfig,
    dtype: DType,
    spacing: HeadSpacing,
    num_tokens: usize,
) -> Result<usize> {
    let mut sum = 0usize;
    for (rows, columns, is_f32) in shapes(config, spacing, num_tokens) {
        let bytes = Arena::bytes_for(element_of(dtype, is_f32), &[rows, columns])?;
        let next = sum.checked_add(bytes);
        sum = next.ok_or_else(|| Error::out_of_memory("activations", usize::MAX))?;
    }
    Ok(sum)
}

impl DeviceWorkspace {
    /// Memory for passes of up to `num_tokens` tokens.
    pub fn new(
        context: &Arc<ComputeContext>,
        config: &ModelConfig,
        dtype: DType,
        spacing: HeadSpacing,
        num_tokens: usize,
    ) -> Result<Self> {
        let num_tokens = num_tokens.max(1);
        let bytes = device_bytes(config, dtype, spacing, num_tokens)?;
        let mut arena = Arena::new(context, bytes, "activations")?;
        let mut shapes = shapes(config, spacing, num_tokens).into_iter();
        let mut next = || {
            let shape = shapes.next().ok_or_else(|| Error::internal("a buffer too many"))?;
            arena.tensor(element_of(dtype, shape.2), &[shape.0, shape.1])
        };
        let (hidden, normed, projected, wanted) = (next()?, next()?, next()?, next()?);
        let (qkv, attn_out) = (next()?, next()?);
        let (gate_up, mlp_act) = (next()?, next()?);
        let (logits, logits_f32) = (next()?, next()?);
        let logits_host = PinnedBuffer::new(context, logits_f32.size_bytes(), "logits")?;
        Ok(DeviceWorkspace {
            num_tokens,
            hidden,
            normed,
            projected,
            wanted,
            qkv,
            attn_out,
            gate_up,
            mlp_act,
            logits,
            logits_f32,
            logits_host,
            indices: None,
        })
    }

    /// Whether a pass of so many tokens fits.
    pub fn fits(&self, num_tokens: usize) -> bool {
        num_tokens <= self.num_tokens
    }

    /// Rows of logits that can be computed at a time.
    pub fn logits_rows(&self) -> usize {
        self.num_tokens.min(LOGITS_ROWS)
    }

    /// Reads the first logits `[rows, vocab_size]` of `logits_f32` to the host, waiting for all work.
    pub fn read_logits(&mut self, source: &DeviceTensor, out: &mut [f32]) -> Result<()> {
        self.logits_host.download(source)?;
        let bytes = self.logits_host.bytes()?;
        for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
            if let [a, b, c, d] = *bytes {
                *value = f32::from_ne_bytes([a, b, c, d]);
            }
        }
        Ok(())
    }

    /// Queues the index arrays of a pass on their way to the device, in one copy.
    pub fn upload_indices(
        &mut self,
        context: &Arc<ComputeContext>,
        batch: &ForwardBatch<'_>,
    ) -> Result<BatchIndices> {
        let places = IndexPlaces::new(batch)?;
        let bytes = places.len.saturating_mul(4);
        let fits = |indices: &Indices| indices.host.len_bytes() >= bytes;
        let mut indices = match self.indices.take().filter(fits) {
            Some(indices) => indices,
            None => {
                // Twice what is needed: block tables grow with the context.
                let len = places.len.saturating_mul(2).max(4096);
                let host = PinnedBuffer::new(context, len.saturating_mul(4), "index arrays")?;
                let mut arena = Arena::new(context, len.saturating_mul(4), "index arrays")?;
                Indices { device: arena.tensor(ElementType::I32, &[len])?, host }
            }
        };
        places.write(batch, indices.host.bytes()?);
        indices.host.upload(0..bytes, &indices.device, 0)?;
        let view =
            |range: &Range<usize>, shape: &[usize]| indices.device.view(range.start, shape, None);
        let (num_tokens, num_seqs) = (batch.num_tokens(), batch.num_seqs());
        let arrays = BatchIndices {
            token_ids: view(&places.token_ids, &[num_tokens])?,
            positions: view(&places.positions, &[num_tokens])?,
            slots: view(&places.slots, &[num_tokens])?,
            cu_seqlens_q: view(&places.cu_seqlens_q, &[num_seqs + 1])?,
            context_lens: view(&places.context_lens, &[num_seqs])?,
            block_tables: view(&places.block_tables, &[num_seqs, batch.max_blocks_per_seq])?,
            logits_rows: view(&places.logits_rows, &[batch.logits_rows.len()])?,
        };
        self.indices = Some(indices);
        Ok(arrays)
    }
}

/// The index arrays of a pass on the device, of 32-bit numbers.
pub(in crate::model) struct BatchIndices {
    /// `[num_tokens]`
    pub token_ids: DeviceTensor,
    /// `[num_tokens]`
    pub positions: DeviceTensor,
    /// `[num_tokens]`
    pub slots: DeviceTensor,
    /// `[num_seqs + 1]`
    pub cu_seqlens_q: DeviceTensor,
    /// `[num_seqs]`
    pub context_lens: DeviceTensor,
    /// `[num_seqs, max_blocks_per_seq]`
    pub block_tables: DeviceTensor,
    /// `[num_logits_rows]`
    pub logits_rows: DeviceTensor,
}

/// Where each array lies among the numbers that are uploaded.
#[derive(Debug)]
struct IndexPlaces {
    token_ids: Range<usize>,
    positions: Range<usize>,
    slots: Range<usize>,
    cu_seqlens_q: Range<usize>,
    context_lens: Range<usize>,
    block_tables: Range<usize>,
    logits_rows: Range<usize>,
    len: usize,
}

impl IndexPlaces {
    fn new(batch: &ForwardBatch<'_>) -> Result<Self> {
        let mut len = 0usize;
        let mut place = |count: usize| {
            let range = len..len.saturating_add(count);
            len = range.end.saturating_add(INDEX_ALIGNMENT - 1) / INDEX_ALIGNMENT * INDEX_ALIGNMENT;
            range
        };
        let num_tokens = batch.num_tokens();
        let places = IndexPlaces {
            token_ids: place(num_tokens),
            positions: place(num_tokens),
            slots: place(num_tokens),
            cu_seqlens_q: place(batch.num_seqs() + 1),
            context_lens: place(batch.num_seqs()),
            block_tables: place(batch.block_tables.len()),
            logits_rows: place(batch.logits_rows.len()),
            len: 0,
        };
        match len.checked_mul(8) {
            Some(bytes) if bytes <= isize::MAX as usize => Ok(IndexPlaces { len, ..places }),
            _ => Err(Error::out_of_memory("index arrays", usize::MAX)),
        }
    }

    fn write(&self, batch: &ForwardBatch<'_>, bytes: &mut [u8]) {
        put(bytes, &self.token_ids, batch.token_ids.iter().copied());
        put(bytes, &self.positions, batch.positions.iter().copied());
        put(bytes, &self.slots, batch.slot_mapping.iter().copied());
        put(bytes, &self.cu_seqlens_q, batch.cu_seqlens_q.iter().copied());
        put(bytes, &self.context_lens, batch.context_lens.iter().copied());
        // Entries behind those in use may be anything; a kernel shall never see them.
        let used = |context_len: &u32| (*context_len as usize).div_ceil(BLOCK_SIZE);
        let tables = batch
            .block_tables
            .chunks(batch.max_blocks_per_seq.max(1))
            .zip(batch.context_lens)
            .flat_map(|(table, len)| {
                let used = used(len);
                let entry = move |(i, &id): (usize, &u32)| if i < used { id } else { 0 };
                table.iter().enumerate().map(entry)
            });
        put(bytes, &self.block_tables, tables);
        put(bytes, &self.logits_rows, batch.logits_rows.iter().copied());
    }
}

fn put(bytes: &mut [u8], place: &Range<usize>, values: impl Iterator<Item = u32>) {
    let room = bytes.get_mut(place.start * 4..place.end * 4).unwrap_or_default();
    for (word, value) in room.chunks_exact_mut(4).zip(values) {
        word.copy_from_slice(&value.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_arrays_lie_one_behind_the_other() {
        let batch = ForwardBatch {
            token_ids: &[5, 6, 7],
            positions: &[0, 1, 40],
            slot_mapping: &[32, 33, 8],
            cu_seqlens_q: &[0, 2, 3],
            context_lens: &[2, 41],
            block_tables: &[1, u32::MAX, 3, 0],
            max_blocks_per_seq: 2,
            logits_rows: &[2],
        };
        let places = IndexPlaces::new(&batch).unwrap();
        let mut bytes = vec![0xee; places.len * 4];
        places.write(&batch, &mut bytes);
        let at = |range: &Range<usize>| -> Vec<u32> {
            assert_eq!(range.start % INDEX_ALIGNMENT, 0);
            let bytes = &bytes[range.start * 4..range.end * 4];
            bytes.chunks(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap())).collect()
        };
        assert_eq!(at(&places.token_ids), [5, 6, 7]);
        assert_eq!(at(&places.positions), [0, 1, 40]);
        assert_eq!(at(&places.slots), [32, 33, 8]);
        assert_eq!(at(&places.cu_seqlens_q), [0, 2, 3]);
        assert_eq!(at(&places.context_lens), [2, 41]);
        assert_eq!(at(&places.block_tables), [1, 0, 3, 0]);
        assert_eq!(at(&places.logits_rows), [2]);
    }
}
