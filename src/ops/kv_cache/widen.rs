//! Blocks of a paged cache of 8-bit floats as blocks of a type that is computed with, for kernels
//! that go over keys and values many times: `csrc/ops/kv_cache/widen.cu`.

use crate::backend::cpu::math::fp8_to_f32;
use crate::backend::cuda::{kernels, Arguments, CudaContext, Launch};
use crate::backend::{Arena, ComputeContext, ContextBackend, DeviceTensor};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};
use crate::ops::common::contiguous::check;
use crate::ops::common::staging::host_slice;

/// The number of threads of a block.
const THREADS: u32 = 256;

/// The most keys that a kernel of attention reads at a time, from a multiple of them on.
const TILE_KEYS: i64 = 128;
/// The most keys of a sequence that a kernel counts.
const ALL_KEYS: i64 = 1 << 30;

const WHAT: &str = "keys and values of 8 bits as wider numbers";

/// The place for keys and values of some sequences. The blocks of each follow each other.
pub struct Widened {
    /// The keys, [num_seqs * blocks_per_seq, block_size, num_kv_heads, head_dim].
    pub k: DeviceTensor,
    /// The values, of the same shape.
    pub v: DeviceTensor,
    /// The blocks of each sequence, i32 [num_seqs, blocks_per_seq].
    pub block_tables: DeviceTensor,
}

/// The sizes of a [`Widened`].
#[derive(Clone, Copy, Debug)]
pub struct WidenedSizes {
    /// The type of the result.
    pub dtype: DType,
    /// The number of sequences.
    pub num_seqs: usize,
    /// The blocks of each sequence that are kept.
    pub blocks_per_seq: usize,
    /// The tokens of a block.
    pub block_size: usize,
    /// The key and value heads.
    pub num_kv_heads: usize,
    /// The elements of a head.
    pub head_dim: usize,
}

impl WidenedSizes {
    fn shape(&self) -> [usize; 4] {
        let num_blocks = self.num_seqs.saturating_mul(self.blocks_per_seq);
        [num_blocks, self.block_size, self.num_kv_heads, self.head_dim]
    }

    /// Returns the bytes of all tensors.
    pub fn bytes(&self) -> Result<usize> {
        let element = ElementType::Float(self.dtype);
        let table = [self.num_seqs, self.blocks_per_seq];
        let both = Arena::bytes_for(element, &self.shape())?.saturating_mul(2);
        Ok(both.saturating_add(Arena::bytes_for(ElementType::I32, &table)?))
    }
}

impl Widened {
    /// Allocates the place, for work that is queued before it is dropped.
    pub fn new(context: &ComputeContext, sizes: &WidenedSizes) -> Result<Self> {
        let element = ElementType::Float(sizes.dtype);
        let table = [sizes.num_seqs, sizes.blocks_per_seq];
        Ok(Widened {
            k: DeviceTensor::temporary(context, element, &sizes.shape(), WHAT)?,
            v: DeviceTensor::temporary(context, element, &sizes.shape(), WHAT)?,
            block_tables: DeviceTensor::temporary(context, ElementType::I32, &table, WHAT)?,
        })
    }

    /// Fills in the blocks in which sequences have keys; with `num_seen` those of the last so many, and of
    /// the tile of keys in which these begin. k and v [num_blocks, block_size,
    /// num_kv_heads, head_dim] of 8-bit floats, block_tables i32 [num_seqs, max_blocks_per_seq] and
    /// context_lens i32 [num_seqs] are contiguous. A block that the cache does not have is an error
    /// on the host; on a device it is read as zeros and reported.
    pub fn fill(
        &self,
        context: &ComputeContext,
        k: &Tensor,
        v: &Tensor,
        block_tables: &Tensor,
        context_lens: &Tensor,
        num_seen: Option<i64>,
    ) -> Result<()> {
        let &[num_blocks, block_size, num_kv_heads, head_dim] = &**k.shape() else {
            return Err(Error::internal(format!("a cache of shape {}", k.shape())));
        };
        let &[num_seqs, kept_blocks] = &**self.block_tables.shape() else {
            return Err(Error::internal("a block table without rows"));
        };
        let width = block_tables.width();
        check("k", k, ElementType::Fp8, k.shape())?;
        check("v", v, ElementType::Fp8, k.shape())?;
        check("block_tables", block_tables, ElementType::I32, &[num_seqs, width])?;
        check("context_lens", context_lens, ElementType::I32, &[num_seqs])?;
        let kept = [num_seqs.saturating_mul(kept_blocks), block_size, num_kv_heads, head_dim];
        check("the widened keys", &self.k, self.k.element(), &kept)?;
        check("the widened values", &self.v, self.k.element(), &kept)?;
        if width < kept_blocks {
            return Err(Error::internal(format!("{kept_blocks} blocks of tables of {width}")));
        }
        if kept.contains(&0) {
            return Ok(());
        }
        let block_len = block_size * num_kv_heads * head_dim;
        let num_seen = num_seen.unwrap_or(ALL_KEYS).clamp(0, ALL_KEYS);
        let to = self;
        let call = Call {
            to,
            k,
            v,
            block_tables,
            context_lens,
            num_blocks,
            block_size,
            block_len,
            num_seen,
        };
        match context.backend() {
            ContextBackend::Cpu { .. } => call.on_host(),
            ContextBackend::Cuda(cuda) => call.on_device(cuda),
        }
    }
}

struct Call<'a> {
    to: &'a Widened,
    k: &'a Tensor,
    v: &'a Tensor,
    block_tables: &'a Tensor,
    context_lens: &'a Tensor,
    num_blocks: i64,
    block_size: i64,
    block_len: i64,
    num_seen: i64,
}

impl Call<'_> {
    fn on_device(&self, cuda: &CudaContext) -> Result<()> {
        let ElementType::Float(dtype) = self.to.k.element() else {
            return Err(Error::internal("keys and values that are no numbers"));
        };
        let int = |value: i64| {
            i32::try_from(value).map_err(|_| Error::unsupported(format!("a size of {value}")))
        };
        let are_vectors = self.block_len % 16 == 0
            && [self.k, self.v].iter().all(|t| (t.data() as usize).is_multiple_of(16));
        if !are_vectors {
            return Err(Error::internal(format!("blocks of {} elements", self.block_len)));
        }
        let (num_seqs, kept) = (self.block_tables.shape().first(), self.to.block_tables.width());
        let num_seqs = int(num_seqs.copied().unwrap_or(0))? as u32;
        if num_seqs > 65535 {
            return Err(Error::unsupported(format!("{num_seqs} sequences in a launch")));
        }
        let arguments = Arguments::new()
            .tensor(self.k)
            .tensor(self.v)
            .tensor(self.block_tables)
            .tensor(self.context_lens)
            .pointer(cuda.faults())
            .tensor(&self.to.k)
            .tensor(&self.to.v)
            .tensor(&self.to.block_tables)
            .i32(int(self.block_tables.width())?)
            .i32(int(self.num_blocks)?)
            .i32(int(self.block_size)?)
            .i32(int(self.block_len)?)
            .i32(int(self.num_seen)?)
            .i32(int(TILE_KEYS)?);
        // A thread has a unit of 16 numbers, or two; more are not needed to fill the chip.
        let shares = (self.block_len as u64).div_ceil(16 * 2 * u64::from(THREADS)).clamp(1, 16);
        let grid = (int(kept)? as u32, num_seqs, 2 * shares as u32);
        let launch = Launch { grid, block: THREADS, shared_bytes: 0 };
        // SAFETY: the arguments of the kernel; the shapes were checked by the caller, and the
        // kernel follows no entry of a table beyond the cache.
        unsafe { cuda.launch_overlapping(kernels::KV_CACHE_WIDEN.of(dtype), launch, arguments) }
    }

    fn on_host(&self) -> Result<()> {
        // SAFETY: contiguous tensors of these types on the host (checked by the caller), which live
        // as long as this call.
        let (tables, lens, k, v) = unsafe {
            let (k, v) = (host_slice::<u8>(self.k), host_slice::<u8>(self.v));
            (host_slice::<i32>(self.block_tables), host_slice::<i32>(self.context_lens), k, v)
        };
        let (width, kept) = (self.block_tables.width() as usize, self.to.block_tables.width());
        for (place, id) in (0..self.to.block_tables.num_elements()).enumerate() {
            // SAFETY: an element of the contiguous table, memory of this call's own.
            unsafe { self.to.block_tables.data().cast::<i32>().add(place).write(id as i32) };
        }
        let block_len = self.block_len as usize;
        for (seq, (table, &len)) in tables.chunks_exact(width.max(1)).zip(lens).enumerate() {
            let len = i64::from(len.max(0));
            let used = (len as u64).div_ceil(self.block_size as u64).min(kept as u64);
            let first_key = (len - self.num_seen).max(0) / TILE_KEYS * TILE_KEYS;
            let hidden = (first_key / self.block_size) as usize;
            for (place, &id) in table.iter().enumerate().take(used as usize).skip(hidden) {
                let block = usize::try_from(id).ok().filter(|&id| (id as i64) < self.num_blocks);
                let codes = |cache: &'_ [u8]| {
                    let first = block?.checked_mul(block_len)?;
                    cache.get(first..first.checked_add(block_len)?).map(<[u8]>::as_ptr)
                };
                let (Some(k), Some(v)) = (codes(k), codes(v)) else {
                    return Err(Error::invalid_argument(format!(
                        "block_tables[{seq}][{place}] is {id}, but k has {} blocks",
                        self.num_blocks
                    )));
                };
                let first = (seq * kept as usize + place) * block_len;
                for (codes, to) in [(k, &self.to.k), (v, &self.to.v)] {
                    // SAFETY: a block of the cache, found above, and one of the contiguous result,
                    // memory of this call's own.
                    unsafe {
                        let codes = std::slice::from_raw_parts(codes, block_len);
                        widen_block(codes, to, first);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Writes the numbers that `codes` stand for from element `first` of `to` on.
///
/// # Safety
/// `to` has so many elements from there on, contiguous and on the host, and nobody else uses them.
unsafe fn widen_block(codes: &[u8], to: &Tensor, first: usize) {
    // SAFETY: passed on to the caller.
    unsafe {
        match to.element() {
            ElementType::Float(DType::F32) => {
                write_each(codes, to.data().cast::<f32>().add(first), |x| x)
            }
            ElementType::Float(DType::F16) => {
                write_each(codes, to.data().cast::<half::f16>().add(first), half::f16::from_f32)
            }
            _ => write_each(codes, to.data().cast::<half::bf16>().add(first), half::bf16::from_f32),
        }
    }
}

/// Returns the value of a code, also of the two that are no numbers.
fn number(code: u8) -> f32 {
    if code & 0x7f == 0x7f {
        return f32::NAN;
    }
    fp8_to_f32(code)
}

/// # Safety
/// `to` is valid for as many writes as there are codes.
unsafe fn write_each<T>(codes: &[u8], to: *mut T, convert: impl Fn(f32) -> T) {
    for (i, &code) in codes.iter().enumerate() {
        // SAFETY: passed on to the caller.
        unsafe { to.add(i).write(convert(number(code))) };
    }
}
