//! Attention.

#![allow(non_camel_case_types)]

use super::context::{context_of, xserv_context};
use super::guard::{guard_or, guard_work, init_struct, read_struct, GrowingStruct};
use super::status::xserv_status;
use super::tensor::{optional_tensor, tensor_argument, xserv_tensor};
use super::types::XSERV_UNSET_FLOAT;
use crate::error::{Error, Result};
use crate::ops;
use crate::ops::attention::{AttentionBackend, AttentionOptions};

/// The algorithms of xserv_op_attention().
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_attention_backend {
    /// SPLIT_KV where no sequence has more than one query, else FLASH, else NAIVE.
    XSERV_ATTENTION_AUTO = 0,
    /// All scores first, then their softmax, then the product with the values. On CUDA the scores
    /// take 4 bytes for each head, query and key. Supports the batched form only, with any head_dim
    /// on CUDA, up to 256 on the CPU.
    XSERV_ATTENTION_NAIVE = 1,
    /// Tiles of keys and an online softmax (Dao, 2023), without scores in memory. Supports all
    /// forms. On CUDA head_dim is 64, 80, 96, 128 or 256, and block_size a power of two of at least
    /// 16; on the CPU head_dim is up to 256.
    XSERV_ATTENTION_FLASH = 2,
    /// For one query per sequence, as in decoding: the keys of a sequence are split among the
    /// multiprocessors. Otherwise as FLASH, which is also the code that runs on the CPU. On CUDA it
    /// takes a workspace of up to 64 rows of head_dim + 2 floats for each head and sequence.
    XSERV_ATTENTION_SPLIT_KV = 3,
}

/// How to attend. Fill with xserv_attention_options_default() first.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xserv_attention_options {
    /// sizeof(xserv_attention_options); set by xserv_attention_options_default().
    pub struct_size: usize,
    /// 1: query i of a sequence sees keys 0 to kv_len - q_len + i. 0, the default: every query sees
    /// all keys.
    pub causal: u32,
    /// An xserv_attention_backend; default XSERV_ATTENTION_AUTO.
    pub backend: u32,
    /// Factor of the scores: finite, possibly 0 or negative; default XSERV_UNSET_FLOAT, 1 /
    /// sqrt(head_dim).
    pub scale: f32,
    /// With cu_seqlens_q: the largest number of queries of a sequence; default 0, unknown. 1 lets
    /// AUTO choose SPLIT_KV.
    pub max_q_len: u32,
    /// With cu_seqlens_k or context_lens: the largest number of keys of a sequence; default 0,
    /// unknown. Bounds the workspace of SPLIT_KV.
    pub max_kv_len: u32,
    /// With causal: the most keys that a query sees, those at positions p - window + 1 to p for a query
    /// at position p of its sequence (sliding-window attention; Beltagy et al., 2020). Default 0: all
    /// keys up to p. Hidden keys cost no time, unless a tile of keys holds some that are seen too: all
    /// values of such a tile must be finite.
    pub window: u32,
    /// Packed queries: i32 [num_seqs + 1], the first token of each sequence and the end of the
    /// last; begins with 0. Default NULL.
    pub cu_seqlens_q: *const xserv_tensor,
    /// Packed keys and values: i32 [num_seqs + 1], as cu_seqlens_q. Default NULL.
    pub cu_seqlens_k: *const xserv_tensor,
    /// A cache in blocks: i32 [num_seqs, max_blocks_per_seq], the blocks of each sequence in order.
    /// Entries past the end of a sequence are not read. Default NULL.
    pub block_tables: *const xserv_tensor,
    /// With block_tables: i32 [num_seqs], the number of keys of each sequence. Default NULL.
    pub context_lens: *const xserv_tensor,
}

// SAFETY: repr(C), struct_size first, numbers and pointers.
unsafe impl GrowingStruct for xserv_attention_options {
    const SIZES: &'static [usize] = &[64];
    const NAME: &'static str = "xserv_attention_options";
    const HOW: &'static str = "fill it with xserv_attention_options_default()";

    fn defaults() -> Self {
        xserv_attention_options {
            struct_size: size_of::<Self>(),
            causal: 0,
            backend: xserv_attention_backend::XSERV_ATTENTION_AUTO as u32,
            scale: XSERV_UNSET_FLOAT,
            max_q_len: 0,
            max_kv_len: 0,
            window: 0,
            cu_seqlens_q: std::ptr::null(),
            cu_seqlens_k: std::ptr::null(),
            block_tables: std::ptr::null(),
            context_lens: std::ptr::null(),
        }
    }
}

/// # Safety
/// The tensors that the options name are NULL or readable descriptors.
unsafe fn convert(options: &xserv_attention_options) -> Result<AttentionOptions> {
    use xserv_attention_backend::*;
    let backend = match options.backend {
        n if n == XSERV_ATTENTION_AUTO as u32 => AttentionBackend::Auto,
        n if n == XSERV_ATTENTION_NAIVE as u32 => AttentionBackend::Naive,
        n if n == XSERV_ATTENTION_FLASH as u32 => AttentionBackend::Flash,
        n if n == XSERV_ATTENTION_SPLIT_KV as u32 => AttentionBackend::SplitKv,
        n => {
            let what = format!("backend is {n}, not an xserv_attention_backend");
            return Err(Error::invalid_argument(what));
        }
    };
    if options.causal > 1 {
        return Err(Error::invalid_argument(format!("causal is {}, not 0 or 1", options.causal)));
    }
    // SAFETY: by the contract above.
    unsafe {
        Ok(AttentionOptions {
            causal: options.causal == 1,
            window: (options.window > 0).then_some(options.window),
            backend,
            scale: (options.scale != XSERV_UNSET_FLOAT).then_some(options.scale),
            cu_seqlens_q: optional_tensor(options.cu_seqlens_q, "cu_seqlens_q")?,
            cu_seqlens_k: optional_tensor(options.cu_seqlens_k, "cu_seqlens_k")?,
            block_tables: optional_tensor(options.block_tables, "block_tables")?,
            context_lens: optional_tensor(options.context_lens, "context_lens")?,
            max_q_len: options.max_q_len,
            max_kv_len: options.max_kv_len,
            ..AttentionOptions::default()
        })
    }
}

/// Sets every option to its default.
///
/// struct_size: sizeof(xserv_attention_options) of the header that the program is built with; no
/// byte beyond it is written. xserv_attention_options_default() passes it. Does nothing if options
/// is NULL.
///
/// # Safety
/// `options` is NULL or writable for `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn xserv_attention_options_init(
    options: *mut xserv_attention_options,
    struct_size: usize,
) {
    guard_or((), || {
        // SAFETY: writable by contract.
        unsafe { init_struct(options, struct_size) };
        Ok(())
    })
}

/// Attention with grouped query heads (Vaswani et al., 2017, equation 1): out = softmax(scale * q
/// k^T) v, where query head h reads kv head h / (num_heads / num_kv_heads). Sums in f32; CUDA
/// rounds the weights of 16-bit types before they meet the values.
///
/// q, k, v, out: all f32, all f16 or all bf16; a block cache may also have k and v of 8-bit floats
/// (e4m3fn), contiguous, which become numbers of q's type where they are used. out has the shape of
/// q and shares no memory with the others. options may be NULL for the defaults. Three forms:
///
/// - batched, without index arrays: q [batch, q_len, num_heads, head_dim], k and v [batch, kv_len,
///   num_kv_heads, head_dim]. Tensors [batch, num_heads, q_len, head_dim] are passed with permuted
///   strides.
/// - packed, with cu_seqlens_q and cu_seqlens_k: q [num_tokens, num_heads, head_dim], k and v
///   [num_kv_tokens, num_kv_heads, head_dim], sequence after sequence. Rows of out after the last
///   sequence are left unchanged.
/// - paged, with block_tables and context_lens: k and v [num_blocks, block_size, num_kv_heads,
///   head_dim], q packed with cu_seqlens_q, or [num_seqs, q_len, num_heads, head_dim] without.
///
/// Any strides are allowed; contiguous heads that begin at multiples of 16 bytes are fastest,
/// others are copied first. With causal no sequence may have more queries than keys, unless it has
/// only one query. A query that sees no key gives zeros. Equal inputs give equal bits, and with
/// SPLIT_KV a sequence gives the same bits in any batch.
///
/// On the CPU all index arrays are checked. On CUDA they are not read before the work is queued:
/// sequences that reach outside a tensor are cut, queries beyond max_q_len may be left out, a query
/// to which causal leaves no key gives zeros, and a block outside the cache counts as keys and
/// values of zero and is reported by xserv_context_synchronize().
///
/// Errors: XSERV_STATUS_INVALID_ARGUMENT; XSERV_STATUS_UNSUPPORTED where the requested backend does
/// not support the form, the head_dim or the block_size; XSERV_STATUS_OUT_OF_MEMORY with sizes, for
/// copies and workspaces; XSERV_STATUS_DEVICE_LOST.
///
/// # Safety
/// The descriptors are readable, and their memory is what they say; `options` is NULL or readable
/// for its struct_size.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_op_attention(
    context: *const xserv_context,
    options: *const xserv_attention_options,
    q: *const xserv_tensor,
    k: *const xserv_tensor,
    v: *const xserv_tensor,
    out: *const xserv_tensor,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let (options, q, k, v, out) = unsafe {
            (
                convert(&read_struct(options, "options")?)?,
                tensor_argument(q, "q")?,
                tensor_argument(k, "k")?,
                tensor_argument(v, "v")?,
                tensor_argument(out, "out")?,
            )
        };
        ops::attention::attention(context_of(context)?.get()?, &options, &q, &k, &v, &out)
    })
}
