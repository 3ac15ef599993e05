//! Attention on the host, see [`super::cpu_naive`]. Flash and split-KV are one algorithm
//! there.

use crate::backend::cpu::CpuBackend;
use crate::backend::ComputeContext;
use crate::error::{try_with_capacity, Result};
use crate::memory::Tensor;
use crate::ops::attention::cpu_flash::FlashScratch;
use crate::ops::attention::cpu_naive::{HeadStrides, Sequences};
use crate::ops::attention::{
    has_whole_heads, head_strides, size, wrong, AttentionBackend, Form, Problem,
};
use crate::ops::common::copy::copy_unchecked;
use crate::ops::common::launch::with_storage;
use crate::ops::common::staging::{contiguous, host_slice, input, output, Input};

/// The values of an index array, which may lie in a copy.
struct Indices(Option<Input>);

impl Indices {
    fn new(context: &ComputeContext, tensor: &Option<Tensor>) -> Result<Self> {
        let staged = tensor.as_ref().map(|tensor| input(context, tensor, contiguous));
        Ok(Indices(staged.transpose()?))
    }

    fn get(&self) -> &[i32] {
        // SAFETY: a contiguous tensor of i32 on the host (checked), which lives as long as this
        // call.
        self.0.as_ref().map_or(&[], |staged| unsafe { host_slice(&staged.tensor) })
    }
}

/// Returns the elements that a tensor spans, gaps included.
///
/// # Safety
/// The tensor is on the host and its element type is `T`, and nobody writes what it spans
/// meanwhile.
unsafe fn host_span<'a, T>(tensor: &Tensor) -> &'a [T] {
    let len = tensor.span_bytes() / size_of::<T>();
    if len == 0 {
        return &[];
    }
    // SAFETY: `Tensor::from_raw` has checked address, alignment and size; the caller vouches for
    // the rest.
    unsafe { std::slice::from_raw_parts(tensor.data().cast(), len) }
}

/// Whether a result has no gaps between its heads, whatever their order, so that it can be lent for
/// writing.
fn is_dense(tensor: &Tensor) -> bool {
    has_whole_heads(tensor) && tensor.span_bytes() == tensor.size_bytes()
}

/// Whether the heads of a [num_seqs, q_len, num_heads, head_dim] tensor lie as in a packed one.
fn is_packed(tensor: &Tensor) -> bool {
    let [seq, token, _] = head_strides(tensor);
    has_whole_heads(tensor)
        && (size(tensor, 0) == 1 || size(tensor, 1) == 1 || seq == size(tensor, 1) * token)
}

fn strides(tensor: &Tensor, as_packed: bool) -> HeadStrides {
    let [seq, token, head] = head_strides(tensor).map(|stride| stride as usize);
    // The strides of a packed view of sequences of one query.
    let token =
        if as_packed && tensor.shape().len() == 4 && size(tensor, 1) == 1 { seq } else { token };
    HeadStrides { seq, token, head }
}

/// Runs a call on the host.
pub(super) fn run(
    context: &ComputeContext,
    cpu: &CpuBackend,
    problem: &Problem<'_>,
    backend: AttentionBackend,
) -> Result<()> {
    let Problem { form, options, out, .. } = *problem;
    let cu_seqlens_q = Indices::new(context, &options.cu_seqlens_q)?;
    let cu_seqlens_k = Indices::new(context, &options.cu_seqlens_k)?;
    let block_tables = Indices::new(context, &options.block_tables)?;
    let context_lens = Indices::new(context, &options.context_lens)?;
    let mut uniform;
    let q_ends = match (form, options.cu_seqlens_q) {
        (Form::Paged, None) => {
            uniform = try_with_capacity(problem.num_seqs as usize + 1, "ends of sequences")?;
            for seq in 0..=problem.num_seqs {
                match i32::try_from(seq * problem.max_q_len) {
                    Ok(end) => uniform.push(end),
                    Err(_) => return wrong(format!("q has more than {} queries", i32::MAX)),
                }
            }
            &uniform[..]
        }
        _ => cu_seqlens_q.get(),
    };
    let sequences = match form {
        Form::Batched => Sequences::Batch {
            num_seqs: problem.num_seqs as usize,
            q_len: problem.max_q_len as usize,
            kv_len: problem.max_kv_len as usize,
        },
        Form::Packed => {
            Sequences::Ragged { cu_seqlens_q: q_ends, cu_seqlens_k: cu_seqlens_k.get() }
        }
        Form::Paged => Sequences::Paged {
            cu_seqlens_q: q_ends,
            context_lens: context_lens.get(),
            block_tables: block_tables.get(),
            max_blocks_per_seq: options.block_tables.as_ref().map_or(0, |t| size(t, 1)) as usize,
            block_size: size(problem.k, 1) as usize,
        },
    };
    check_indices(problem, &sequences)?;
    if form == Form::Paged && size(problem.k, 1) == 0 {
        return wrong("k has blocks of 0 keys".to_string());
    }

    let packed = form == Form::Paged;
    let fits_queries = |tensor: &Tensor| {
        if packed && tensor.shape().len() == 4 {
            is_packed(tensor)
        } else {
            has_whole_heads(tensor)
        }
    };
    let q = input(context, problem.q, fits_queries)?;
    let k = input(context, problem.k, has_whole_heads)?;
    let v = input(context, problem.v, has_whole_heads)?;
    let place = output(context, out, |tensor| fits_queries(tensor) && is_dense(tensor))?;
    if options.cu_seqlens_q.is_some() && place.tensor.data() != out.data() {
        // Tokens that belong to no sequence stay as they are.
        // SAFETY: both are valid for their layouts; the place is fresh memory.
        unsafe { copy_unchecked(context, out, &place.tensor) }?;
    }
    with_storage!(problem.dtype, T => {
        // SAFETY: tensors of T on the host; the result has no gaps and overlaps no input.
        let (q_values, k_values, v_values, out_values) = unsafe {
            let len = place.tensor.span_bytes() / size_of::<T>();
            (
                host_span::<T>(&q.tensor),
                host_span::<T>(&k.tensor),
                host_span::<T>(&v.tensor),
                std::slice::from_raw_parts_mut(place.tensor.data().cast::<T>(), len),
            )
        };
        let attention = super::cpu_naive::Attention {
            q: q_values,
            q_strides: strides(&q.tensor, packed),
            k: k_values,
            k_strides: strides(&k.tensor, false),
            v: v_values,
            v_strides: strides(&v.tensor, false),
            out_strides: strides(&place.tensor, packed),
            num_heads: problem.num_heads as usize,
            num_kv_heads: problem.num_kv_heads as usize,
            head_dim: problem.head_dim as usize,
            scale: problem.scale,
            // Without a window a single query sees all keys either way.
            causal: options.causal && problem.max_q_len > 1,
            window: problem.window.map(|window| window as usize),
            sequences,
        };
        match backend {
            AttentionBackend::Naive => super::cpu_naive::attention_naive(cpu, &attention, out_values),
            // The online softmax masks with minus infinity before it scales, and a negative scale
            // would make that plus infinity.
            _ if problem.scale < 0.0 => super::cpu_naive::attention_naive(cpu, &attention, out_values),
            _ => super::cpu_flash::attention_flash(cpu, &attention, out_values, &mut FlashScratch::new()),
        }
    })?;
    place.finish(context)
}

/// Returns the length of sequence `seq`, from where the sequences of a packed tensor end.
fn packed_len(
    (name, ends): (&str, &[i32]),
    seq: usize,
    (tensor, num_tokens): (&str, i64),
    (limit_name, limit): (&str, u32),
) -> Result<i64> {
    let (Some(&begin), Some(&end)) = (ends.get(seq), ends.get(seq + 1)) else {
        return wrong(format!("{name} has {} elements", ends.len()));
    };
    if seq == 0 && begin != 0 {
        return wrong(format!("{name}[0] is {begin}, not 0"));
    }
    if end < begin || i64::from(end) > num_tokens {
        return wrong(format!(
            "{name}[{}] is {end}, but the sequence begins at {begin} and {tensor} has {num_tokens} tokens",
            seq + 1
        ));
    }
    let len = i64::from(end) - i64::from(begin);
    if limit > 0 && len > i64::from(limit) {
        return wrong(format!(
            "{name}: sequence {seq} has {len} tokens, but {limit_name} is {limit}"
        ));
    }
    Ok(len)
}

/// Checks the contents of the index arrays.
fn check_indices(problem: &Problem<'_>, sequences: &Sequences<'_>) -> Result<()> {
    let options = problem.options;
    let q_limit = ("max_q_len", options.max_q_len * u32::from(options.cu_seqlens_q.is_some()));
    let kv_limit = ("max_kv_len", options.max_kv_len);
    let num_queries = match options.cu_seqlens_q {
        Some(_) => size(problem.q, 0),
        None => problem.num_seqs * problem.max_q_len,
    };
    for seq in 0..problem.num_seqs as usize {
        let (q_len, kv_len) = match *sequences {
            Sequences::Batch { .. } => return Ok(()),
            Sequences::Ragged { cu_seqlens_q, cu_seqlens_k } => {
                let (q, k) = (("q", num_queries), ("k", size(problem.k, 0)));
                (
                    packed_len(("cu_seqlens_q", cu_seqlens_q), seq, q, q_limit)?,
                    packed_len(("cu_seqlens_k", cu_seqlens_k), seq, k, kv_limit)?,
                )
            }
            Sequences::Paged {
                cu_seqlens_q,
                context_lens,
                block_tables,
                max_blocks_per_seq,
                block_size,
            } => {
                let len = context_lens.get(seq).copied().map_or(0, i64::from);
                let capacity = max_blocks_per_seq as i64 * block_size as i64;
                if !(0..=capacity).contains(&len) {
                    return wrong(format!(
                        "context_lens[{seq}] is {len}, but block_tables name {max_blocks_per_seq} blocks of \
                         {block_size} for a sequence"
                    ));
                }
                if kv_limit.1 > 0 && len > i64::from(kv_limit.1) {
                    return wrong(format!(
                        "context_lens[{seq}] is {len}, but max_kv_len is {}",
                        kv_limit.1
                    ));
                }
                let table =
                    block_tables.chunks(max_blocks_per_seq.max(1)).nth(seq).unwrap_or_default();
                let num_blocks = (len as usize).div_ceil(block_size.max(1));
                let blocks = 0..size(problem.k, 0);
                for (index, &id) in table.iter().take(num_blocks).enumerate() {
                    if !blocks.contains(&i64::from(id)) {
                        return wrong(format!(
                            "block_tables[{seq}][{index}] is {id}, but k has {} blocks",
                            blocks.end
                        ));
                    }
                }
                let q = ("q", num_queries);
                (packed_len(("cu_seqlens_q", cu_seqlens_q), seq, q, q_limit)?, len)
            }
        };
        if options.causal && problem.max_q_len > 1 && q_len > kv_len {
            return wrong(format!(
                "sequence {seq} has {q_len} queries and {kv_len} keys, but causal needs as many keys as queries"
            ));
        }
    }
    Ok(())
}
