//! Attention with grouped query heads (Vaswani et al. 2017, equation 1; Ainslie et al. 2023):
//! `out = softmax(scale * q k^T) v`, head h over kv head `h / (num_heads / num_kv_heads)`.
//!
//! There are three forms, all of one floating-point type, `out` laid out as `q`; only a cache may
//! store its keys and values as 8-bit floats (e4m3fn), which then become numbers of q's type:
//!
//! * batched: q [batch, q_len, num_heads, head_dim], k and v [batch, kv_len, num_kv_heads,
//!   head_dim]
//! * packed: q [num_tokens, num_heads, head_dim], k and v [num_kv_tokens, num_kv_heads, head_dim];
//!   sequence s has tokens `cu_seqlens[s] .. cu_seqlens[s + 1]`
//! * paged: k and v [num_blocks, block_size, num_kv_heads, head_dim]; key j of sequence s lies at
//!   place `j % block_size` of block `block_tables[s][j / block_size]`; q packed, or [num_seqs,
//!   q_len, num_heads, head_dim]
//!
//! With `causal` query i of a sequence sees keys up to `p = kv_len - q_len + i`, and with a `window`
//! w (Beltagy et al. 2020, section 3.1) of these the last w alone, `p - w + 1 ..= p`; otherwise all.
//! A query that sees no key gives zeros. Tiles of keys that no query of a tile sees are not read;
//! keys beside those that are seen may be. The contents of the index arrays are checked on the CPU;
//! on CUDA they lie on the device, and the kernels access nothing outside the tensors.

pub mod cpu_flash;
pub mod cpu_naive;
mod cpu_online_softmax;
mod cpu_online_tiles;
pub mod cpu_paged;
mod cpu_widen;
pub mod cuda_fused;
mod cuda_fused_kernels;
pub mod cuda_fused_project;
mod cuda_split_kv;
mod widened;

mod choice;
mod cpu;
mod cuda;
mod cuda_flash;
mod cuda_flash_wgmma;
mod cuda_naive;
mod cuda_params;
#[cfg(test)]
pub(in crate::ops) mod layouts;
mod plan;

pub use choice::AttentionBackend;
pub(crate) use choice::KERNEL_HEAD_DIMS;
pub use cuda_fused::{DecodeScratch, DecodeSequences};
pub use plan::{partial_bytes, partials, scratch_bytes, AttentionPlan, AttentionSizes};

/// Returns the most device memory that [`attention`] over a block cache takes while it is queued,
/// on any chip, for up to `num_seqs` sequences of up to `max_kv_len` keys: with `in_segments`, or
/// otherwise with one query each.
pub fn attention_scratch_bytes(
    sizes: &AttentionSizes,
    dtype: DType,
    num_seqs: usize,
    max_kv_len: usize,
    in_segments: bool,
) -> usize {
    let AttentionSizes { num_heads, num_kv_heads, head_stride, kv_format, .. } = *sizes;
    let widened = match kv_format {
        KvFormat::Dense => 0,
        KvFormat::Fp8 => widened::scratch_bytes(
            dtype,
            num_seqs,
            num_kv_heads,
            head_stride,
            max_kv_len,
            BLOCK_SIZE,
        ),
    };
    let kernels = if in_segments {
        cuda_flash_wgmma::scratch_bytes(dtype, head_stride)
    } else {
        cuda_split_kv::scratch_bytes(num_seqs, num_heads, head_stride, max_kv_len)
    };
    widened.saturating_add(kernels)
}

use crate::backend::{ComputeContext, ContextBackend};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};
use crate::ops::common::check::{self, InPlace, Named};
use crate::ops::kv_cache::layout::{KvFormat, BLOCK_SIZE};

/// Options of attention. The default is batched, without a mask, scaled by `1 / sqrt(head_dim)`.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionOptions {
    /// Whether a query sees no later keys.
    pub causal: bool,
    /// The most keys that a query sees, its own and those before it; all of them if `None`. Only with
    /// `causal`.
    pub window: Option<u32>,
    /// The algorithm.
    pub backend: AttentionBackend,
    /// The factor of the scores; `1 / sqrt(head_dim)` if `None`.
    pub scale: Option<f32>,
    /// The first query of each sequence, i32 [num_seqs + 1]; the first entry is 0, the last at most
    /// num_tokens.
    pub cu_seqlens_q: Option<Tensor>,
    /// The first key of each sequence, i32 [num_seqs + 1], in the same way.
    pub cu_seqlens_k: Option<Tensor>,
    /// The blocks of each sequence, i32 [num_seqs, max_blocks_per_seq].
    pub block_tables: Option<Tensor>,
    /// The number of keys of each sequence, i32 [num_seqs].
    pub context_lens: Option<Tensor>,
    /// The most queries of a sequence where `cu_seqlens_q` is given; 0 if not known.
    pub max_q_len: u32,
    /// The most keys of a sequence where `cu_seqlens_k` or `context_lens` is given; 0 if not known.
    pub max_kv_len: u32,
    /// Whether flash attention on Hopper takes the keys of a query in segments of a fixed length,
    /// which blocks may then share where there are few queries. The bits of a query's result do not
    /// depend on the other queries, with or without this; but they do depend on this option.
    pub in_segments: bool,
    /// Whether the index arrays were copied from the host, and no kernel queued since writes them:
    /// a kernel that begins while those before it are still running may read them at once.
    pub has_settled_indices: bool,
}

/// Sizes beyond this are refused: the kernels count tokens, heads and blocks in 32 bits.
const MAX_SIZE: i64 = 1 << 30;

/// Which tensors are packed or in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Batched,
    Packed,
    Paged,
}

/// A call whose shapes fit together.
#[derive(Debug)]
struct Problem<'a> {
    form: Form,
    dtype: DType,
    /// Whether k and v are 8-bit floats.
    is_fp8: bool,
    q: &'a Tensor,
    k: &'a Tensor,
    v: &'a Tensor,
    out: &'a Tensor,
    options: &'a AttentionOptions,
    scale: f32,
    /// The window, if it can hide any key.
    window: Option<i64>,
    num_seqs: i64,
    num_heads: i64,
    num_kv_heads: i64,
    head_dim: i64,
    /// The most queries and keys of a sequence; upper bounds where the lengths lie on the device.
    max_q_len: i64,
    max_kv_len: i64,
}

fn wrong<T>(what: String) -> Result<T> {
    Err(Error::invalid_argument(what))
}

/// Computes attention; see the head of the file. `out` shares no memory with the others.
///
/// A packed `out` keeps its contents in tokens that belong to no sequence. Flash and split-KV
/// allocate nothing that grows with the product of the lengths; naive takes a score of 4 bytes for
/// each pair of a query and a key on CUDA.
pub fn attention(
    context: &ComputeContext,
    options: &AttentionOptions,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let problem = check(context, options, q, k, v, out)?;
    if out.is_empty() {
        return Ok(());
    }
    let on_cuda = matches!(context.backend(), ContextBackend::Cuda(_));
    let backend = choice::choose(&problem, on_cuda)?;
    if problem.is_fp8 && !(on_cuda && backend == AttentionBackend::SplitKv) {
        return widened::run(context, &problem, backend);
    }
    dispatch(context, &problem, backend)
}

/// Runs the kernels of the context's device.
fn dispatch(
    context: &ComputeContext,
    problem: &Problem<'_>,
    backend: AttentionBackend,
) -> Result<()> {
    match context.backend() {
        ContextBackend::Cpu { backend: cpu, .. } => cpu::run(context, cpu, problem, backend),
        ContextBackend::Cuda(cuda) => cuda::run(context, cuda, problem, backend),
    }
}

/// Returns a dimension of a tensor whose rank has been checked.
fn size(tensor: &Tensor, dimension: usize) -> i64 {
    tensor.shape().get(dimension).copied().unwrap_or(0)
}

fn index_array((name, tensor): Named<'_>, rank: usize) -> Result<()> {
    match tensor.element() {
        ElementType::I32 => check::rank((name, tensor), rank, ["", "[n]", "[n, m]"][rank.min(2)]),
        other => wrong(format!("{name} has elements of {other}, but i32 is needed")),
    }
}

fn check<'a>(
    context: &ComputeContext,
    options: &'a AttentionOptions,
    q: &'a Tensor,
    k: &'a Tensor,
    v: &'a Tensor,
    out: &'a Tensor,
) -> Result<Problem<'a>> {
    let (q_named, k_named, v_named, out_named) = (("q", q), ("k", k), ("v", v), ("out", out));
    let dtype = check::float(q_named)?;
    let is_fp8 = k.element() == ElementType::Fp8;
    if is_fp8 {
        check::same_type(&[q_named, out_named])?;
        check::same_type(&[k_named, v_named])?;
        if options.block_tables.is_none() || !k.is_contiguous() || !v.is_contiguous() {
            return Err(Error::unsupported(
                "attention: k and v of 8-bit floats are taken as a contiguous block cache only, with block_tables",
            ));
        }
    } else {
        check::same_type(&[q_named, k_named, v_named, out_named])?;
    }
    check::same_shape(&[q_named, out_named])?;
    check::same_shape(&[k_named, v_named])?;
    let mut inputs: [Option<Named<'_>>; 7] =
        [Some(q_named), Some(k_named), Some(v_named), None, None, None, None];
    let arrays = [
        ("cu_seqlens_q", &options.cu_seqlens_q, 1),
        ("cu_seqlens_k", &options.cu_seqlens_k, 1),
        ("block_tables", &options.block_tables, 2),
        ("context_lens", &options.context_lens, 1),
    ];
    for (slot, (name, array, rank)) in inputs.iter_mut().skip(3).zip(arrays) {
        if let Some(array) = array {
            index_array((name, array), rank)?;
            *slot = Some((name, array));
        }
    }

    let (form, num_seqs) = form(options, q, k)?;
    let packed_q = options.cu_seqlens_q.is_some();
    let heads = if packed_q { 1 } else { 2 };
    let (num_heads, head_dim) = (size(q, heads), size(q, heads + 1));
    let heads = if form == Form::Packed { 1 } else { 2 };
    let (num_kv_heads, kv_head_dim) = (size(k, heads), size(k, heads + 1));
    if kv_head_dim != head_dim {
        return wrong(format!(
            "k has head_dim {kv_head_dim}, shape {}, but q has {head_dim}",
            k.shape()
        ));
    }
    if num_heads.checked_rem(num_kv_heads).unwrap_or(num_heads) != 0 {
        return wrong(format!("q has {num_heads} heads, no multiple of the {num_kv_heads} of k"));
    }
    if let Some(scale) = options.scale.filter(|scale| !scale.is_finite()) {
        return wrong(format!("scale is {scale}, not a finite number"));
    }
    match options.window {
        Some(0) => return wrong("window is 0, but a query sees at least its own key".to_string()),
        Some(window) if !options.causal => {
            return wrong(format!("window is {window}, but a window needs causal"));
        }
        _ => {}
    }

    for (name, tensor) in inputs.iter().flatten() {
        if let Some(size) = tensor.shape().iter().find(|&&size| size > MAX_SIZE) {
            return Err(Error::unsupported(format!(
                "{name} has shape {}: sizes beyond 2^30 such as {size} are not supported",
                tensor.shape()
            )));
        }
        check::reachable(context, &[(name, tensor)])?;
        check::result(out_named, &[(name, tensor)], InPlace::Refused)?;
    }
    check::reachable(context, &[out_named])?;

    let bound = |limit: u32, most: i64| match i64::from(limit) {
        0 => most,
        limit => limit.min(most),
    };
    let max_q_len = if packed_q { bound(options.max_q_len, size(q, 0)) } else { size(q, 1) };
    let max_kv_len = match form {
        Form::Batched => size(k, 1),
        Form::Packed => bound(options.max_kv_len, size(k, 0)),
        Form::Paged => {
            let blocks = options.block_tables.as_ref().map_or(0, |tables| size(tables, 1));
            let capacity = blocks * size(k, 1);
            if capacity > MAX_SIZE {
                return Err(Error::unsupported(format!(
                    "block_tables name {blocks} blocks of {} keys for a sequence, more than 2^30 keys",
                    size(k, 1)
                )));
            }
            bound(options.max_kv_len, capacity)
        }
    };
    if options.causal && form == Form::Batched && max_q_len > max_kv_len && max_q_len > 1 {
        return wrong(format!(
            "q has {max_q_len} queries a sequence and k {max_kv_len} keys, but causal needs as many keys as \
             queries"
        ));
    }
    let scale = match options.scale {
        None => 1.0 / (head_dim.max(1) as f32).sqrt(),
        // The kernels scale the maximum of the scores, and minus infinity times 0 is no number.
        Some(0.0) => f32::MIN_POSITIVE,
        Some(scale) => scale,
    };
    let window = options.window.map(i64::from).filter(|&window| window < max_kv_len);
    Ok(Problem {
        form,
        dtype,
        is_fp8,
        q,
        k,
        v,
        out,
        options,
        scale,
        window,
        num_seqs,
        num_heads,
        num_kv_heads,
        head_dim,
        max_q_len,
        max_kv_len,
    })
}

impl Problem<'_> {
    /// Returns the most keys that a query sees.
    fn max_seen(&self) -> i64 {
        self.window.unwrap_or(self.max_kv_len)
    }
}

/// Returns the form that the options ask for, and the number of sequences; checks ranks and sizes
/// by it.
fn form(options: &AttentionOptions, q: &Tensor, k: &Tensor) -> Result<(Form, i64)> {
    let AttentionOptions { cu_seqlens_q, cu_seqlens_k, block_tables, context_lens, .. } = options;
    let needs = |name: &str, other: &str| wrong(format!("{name} is given, but {other} is NULL"));
    let num_ranges = |(name, array): Named<'_>| match size(array, 0) {
        0 => wrong(format!("{name} has no elements, but num_seqs + 1 are needed")),
        n => Ok(n - 1),
    };
    let (form, num_seqs) = match (block_tables, context_lens) {
        (Some(_), None) => return needs("block_tables", "context_lens"),
        (None, Some(_)) => return needs("context_lens", "block_tables"),
        (Some(tables), Some(lens)) => {
            if cu_seqlens_k.is_some() {
                return wrong("cu_seqlens_k and block_tables exclude each other".to_string());
            }
            check::rank(("k", k), 4, "[num_blocks, block_size, num_kv_heads, head_dim]")?;
            let num_seqs = size(lens, 0);
            let tables = ("block_tables", tables);
            check::shape(tables, &[num_seqs, size(tables.1, 1)], "context_lens")?;
            (Form::Paged, num_seqs)
        }
        (None, None) => match (cu_seqlens_q, cu_seqlens_k) {
            (Some(_), None) => return needs("cu_seqlens_q", "cu_seqlens_k"),
            (None, Some(_)) => return needs("cu_seqlens_k", "cu_seqlens_q"),
            (Some(_), Some(ends)) => {
                check::rank(("k", k), 3, "[num_kv_tokens, num_kv_heads, head_dim]")?;
                (Form::Packed, num_ranges(("cu_seqlens_k", ends))?)
            }
            (None, None) => {
                check::rank(("q", q), 4, "[batch, q_len, num_heads, head_dim]")?;
                check::rank(("k", k), 4, "[batch, kv_len, num_kv_heads, head_dim]")?;
                if size(q, 0) != size(k, 0) {
                    return wrong(format!("q has batch {}, but k has {}", size(q, 0), size(k, 0)));
                }
                return Ok((Form::Batched, size(q, 0)));
            }
        },
    };
    match cu_seqlens_q {
        Some(ends) => {
            check::rank(("q", q), 3, "[num_tokens, num_heads, head_dim] with cu_seqlens_q")?;
            let found = num_ranges(("cu_seqlens_q", ends))?;
            if found != num_seqs {
                return wrong(format!(
                    "cu_seqlens_q has {found} sequences, but there are {num_seqs}"
                ));
            }
        }
        None => {
            check::rank(
                ("q", q),
                4,
                "[num_seqs, q_len, num_heads, head_dim] without cu_seqlens_q",
            )?;
            if size(q, 0) != num_seqs {
                return wrong(format!(
                    "q has {} sequences, but context_lens {num_seqs}",
                    size(q, 0)
                ));
            }
        }
    }
    Ok((form, num_seqs))
}

/// Whether the heads of a tensor lie together, which every kernel needs.
fn has_whole_heads(tensor: &Tensor) -> bool {
    tensor.width() == 1 || tensor.strides().last() == Some(&1)
}

/// Returns the distances in elements from sequence (or block) to sequence, token to token and head
/// to head of a tensor of rank 3 or 4; 0 along axes of size one.
fn head_strides(tensor: &Tensor) -> [i64; 3] {
    let mut strides = [0; 3];
    let leading = tensor.shape().iter().zip(tensor.strides().iter()).rev().skip(1);
    for (slot, (&size, &stride)) in strides.iter_mut().rev().zip(leading) {
        if size > 1 {
            *slot = stride;
        }
    }
    strides
}
