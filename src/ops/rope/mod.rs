//! Rotary position embedding (Su et al., 2021, equation 34), with a table of angles:
//!
//! `cos[p, i] = attention_scale * cos(p * inv_freq[i])`, `sin` likewise, for i < head_dim / 2, and
//! for the pair (a, b) number i of a head at position p: `a' = a cos[p, i] - b sin[p, i]`,
//! `b' = b cos[p, i] + a sin[p, i]`. The angle is computed in f64, so that the table is as good at
//! the last position as at the first (with f32 angles, as in Transformers, it is off by up to
//! `p * 2^-24`).
//!
//! q [num_tokens, num_heads, head_dim], k [num_tokens, num_kv_heads, head_dim] f32, f16 or bf16,
//! positions [num_tokens] i32 or i64, cos and sin [max_position, head_dim / 2] f32.

mod angles;
pub mod cpu;
pub mod cpu_table;
mod cuda;
pub mod cuda_rounded;

pub use self::angles::RopePairing;
use self::angles::{head_strides, Angles};
use self::cuda::on_cuda;
#[cfg(test)]
pub(in crate::ops) use self::cuda::RopeArgs;
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::backend::cuda::{kernels, Arguments, Launch};
use crate::backend::{ComputeContext, ContextBackend};
use crate::error::{Error, Result};
use crate::memory::{DType, Device, ElementType, Tensor};
use crate::ops::common::check::{self, InPlace, Named};
use crate::ops::common::copy::copy_unchecked;
use crate::ops::common::launch::{num_blocks, with_storage};
use crate::ops::common::staging::{contiguous, host_slice, host_slice_mut, input, output, Output};
use crate::ops::common::storage::Storage;
use crate::ops::rope::cpu::Rotate;

fn check_f32((name, tensor): Named<'_>) -> Result<()> {
    match tensor.element() {
        ElementType::Float(DType::F32) => Ok(()),
        other => Err(Error::invalid_argument(format!(
            "{name} has elements of {other}, but f32 is needed"
        ))),
    }
}

/// Fills cos and sin [max_position, head_dim / 2] from inv_freq [head_dim / 2], all f32; see the
/// head of the file.
pub fn rope_table(
    context: &ComputeContext,
    inv_freq: &Tensor,
    attention_scale: f32,
    cos: &Tensor,
    sin: &Tensor,
) -> Result<()> {
    let (freq_named, cos_named, sin_named) = (("inv_freq", inv_freq), ("cos", cos), ("sin", sin));
    for named in [freq_named, cos_named, sin_named] {
        check_f32(named)?;
    }
    check::rank(freq_named, 1, "[head_dim / 2]")?;
    check::rank(cos_named, 2, "[max_position, head_dim / 2]")?;
    let positions = cos.shape().first().copied().unwrap_or(0);
    check::shape(cos_named, &[positions, inv_freq.width()], "inv_freq")?;
    check::same_shape(&[cos_named, sin_named])?;
    if !attention_scale.is_finite() {
        return Err(Error::invalid_argument(format!(
            "attention_scale is {attention_scale}, not a finite number"
        )));
    }
    check::reachable(context, &[freq_named, cos_named, sin_named])?;
    check::result(cos_named, &[freq_named], InPlace::Refused)?;
    check::result(sin_named, &[freq_named, cos_named], InPlace::Refused)?;
    if cos.is_empty() {
        return Ok(());
    }
    let inv_freq = &input(context, inv_freq, contiguous)?.tensor;
    let cos_place = output(context, cos, contiguous)?;
    let sin_place = output(context, sin, contiguous)?;
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            // SAFETY: contiguous tensors of f32 on the host; the results overlap nothing.
            let (inv_freq, cos, sin) = unsafe {
                (
                    host_slice::<f32>(inv_freq),
                    host_slice_mut::<f32>(&cos_place.tensor),
                    host_slice_mut::<f32>(&sin_place.tensor),
                )
            };
            let half = inv_freq.len();
            let scale = f64::from(attention_scale);
            let angle = |entry: usize| {
                let freq = inv_freq.get(entry % half).copied().unwrap_or(0.0);
                (entry / half) as f64 * f64::from(freq)
            };
            let fill = |out: &mut [f32], function: fn(f64) -> f64| {
                backend.parallel_rows(out, half, |first, rows| {
                    for (i, value) in rows.iter_mut().enumerate() {
                        *value = (scale * function(angle(first * half + i))) as f32;
                    }
                })
            };
            fill(cos, f64::cos)?;
            fill(sin, f64::sin)?;
        }
        ContextBackend::Cuda(cuda) => {
            let too_many =
                || Error::unsupported(format!("cos: shape {} is too large", cos.shape()));
            let arguments = Arguments::new()
                .tensor(&cos_place.tensor)
                .tensor(&sin_place.tensor)
                .tensor(inv_freq)
                .f32(attention_scale)
                .i32(i32::try_from(positions).map_err(|_| too_many())?)
                .i32(i32::try_from(inv_freq.width()).map_err(|_| too_many())?);
            let grid = num_blocks(cos.num_elements(), 256).ok_or_else(too_many)?;
            // SAFETY: the arguments of xserv_rope_table; both tables are contiguous.
            unsafe { cuda.launch(kernels::ROPE_TABLE, Launch::linear(grid, 256), arguments) }?;
        }
    }
    cos_place.finish(context)?;
    sin_place.finish(context)
}

/// Heads to rotate and where the result goes.
pub struct RopeHeads<'a> {
    /// The heads, [num_tokens, num_heads, head_dim].
    pub x: &'a Tensor,
    /// The result, of the same shape; may be the same view.
    pub out: &'a Tensor,
}

/// Rotates the heads of q, and of k if there is one; see the head of the file. A position outside
/// the table is an error on the CPU; on CUDA its token is copied unrotated and reported when the
/// context is waited for.
pub fn rope(
    context: &ComputeContext,
    q: RopeHeads<'_>,
    k: Option<RopeHeads<'_>>,
    positions: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    pairing: RopePairing,
) -> Result<()> {
    let (q_named, q_out_named) = (("q", q.x), ("q_out", q.out));
    let k_named = k.as_ref().map(|k| (("k", k.x), ("k_out", k.out)));
    let (positions_named, cos_named, sin_named) =
        (("positions", positions), ("cos", cos), ("sin", sin));
    let dtype = check::float(q_named)?;
    let positions_are_i64 = check::indices_are_i64(positions_named)?;
    check_f32(cos_named)?;
    check_f32(sin_named)?;
    check::rank(q_named, 3, "[num_tokens, num_heads, head_dim]")?;
    let (num_tokens, head_dim) = (q.x.shape().first().copied().unwrap_or(0), q.x.width());
    if head_dim % 2 != 0 {
        return Err(Error::invalid_argument(format!("q: head_dim is {head_dim}, an odd number")));
    }
    check::same_type(&[q_named, q_out_named])?;
    check::same_shape(&[q_named, q_out_named])?;
    check::shape(positions_named, &[num_tokens], "the first dimension of q")?;
    check::rank(cos_named, 2, "[max_position, head_dim / 2]")?;
    let max_position = cos.shape().first().copied().unwrap_or(0);
    check::shape(cos_named, &[max_position, head_dim / 2], "the last dimension of q")?;
    check::same_shape(&[cos_named, sin_named])?;
    check::reachable(context, &[q_named, q_out_named, positions_named, cos_named, sin_named])?;
    check::result(q_out_named, &[q_named], InPlace::Allowed)?;
    check::result(q_out_named, &[positions_named, cos_named, sin_named], InPlace::Refused)?;
    if let Some((k_named, k_out_named)) = k_named {
        check::rank(k_named, 3, "[num_tokens, num_kv_heads, head_dim]")?;
        let kv_heads = k_named.1.shape().get(1).copied().unwrap_or(0);
        check::shape(k_named, &[num_tokens, kv_heads, head_dim], "q")?;
        check::same_type(&[q_named, k_named, k_out_named])?;
        check::same_shape(&[k_named, k_out_named])?;
        check::reachable(context, &[k_named, k_out_named])?;
        check::result(k_out_named, &[k_named], InPlace::Allowed)?;
        let others = [positions_named, cos_named, sin_named, q_named, q_out_named];
        check::result(k_out_named, &others, InPlace::Refused)?;
        check::result(q_out_named, &[k_named], InPlace::Refused)?;
    }
    let heads = [Some(&q), k.as_ref()];
    let heads = heads.map(|heads| heads.filter(|heads| !heads.x.is_empty()));
    if heads.iter().all(Option::is_none) {
        return Ok(());
    }
    let positions = &input(context, positions, contiguous)?.tensor;
    let cos = &input(context, cos, contiguous)?.tensor;
    let sin = &input(context, sin, contiguous)?.tensor;
    let angles = Angles { positions, positions_are_i64, cos, sin, pairing };
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => with_storage!(dtype, T => {
            // The positions are checked before anything is written.
            // SAFETY: contiguous integers of the type named, on the host.
            unsafe { angles.check_positions() }?;
            for heads in heads.iter().flatten() {
                let place = output(context, heads.out, heads_lie_together)?;
                if !heads.x.is_same_view(&place.tensor) {
                    // SAFETY: memory of the host, of one shape and type, that does not overlap.
                    unsafe { copy_unchecked(context, heads.x, &place.tensor) }?;
                }
                // SAFETY: heads of T, together in each token, on the host; `angles` was checked.
                unsafe { rotate_on_host::<T>(backend, &place.tensor, &angles) }?;
                place.finish(context)?;
            }
            Ok(())
        }),
        ContextBackend::Cuda(cuda) => {
            let inner = |tensor: &Tensor| head_strides(tensor).is_some();
            let mut inputs = [None, None];
            let mut outputs: [Option<Output>; 2] = [None, None];
            for ((heads, x), out) in heads.iter().zip(&mut inputs).zip(&mut outputs) {
                if let Some(heads) = heads {
                    *x = Some(input(context, heads.x, inner)?);
                    *out = Some(output(context, heads.out, inner)?);
                }
            }
            let [q_in, k_in] = inputs.each_ref().map(|x| x.as_ref().map(|x| &x.tensor));
            let [q_out, k_out] = outputs.each_ref().map(|out| out.as_ref().map(|out| &out.tensor));
            on_cuda(cuda, dtype, [q_in, q_out, k_in, k_out], num_tokens, head_dim, &angles)?;
            outputs.into_iter().flatten().try_for_each(|out| out.finish(context))
        }
    }
}

/// Whether the heads of each token also lie one after another.
fn heads_lie_together(tensor: &Tensor) -> bool {
    let num_heads = tensor.shape().get(1).copied().unwrap_or(0);
    head_strides(tensor).is_some_and(|(_, head)| num_heads <= 1 || head == tensor.width())
}

/// Rotates heads in place.
///
/// # Safety
/// `heads` is a tensor of T on the host that `heads_lie_together`, overlapping nothing of `angles`;
/// the positions are inside the table, and all of `angles` is contiguous on the host.
unsafe fn rotate_on_host<T: Storage>(
    backend: &CpuBackend,
    heads: &Tensor,
    angles: &Angles<'_>,
) -> Result<()> {
    debug_assert!(heads.device() == Device::Cpu);
    let Some((token_stride, _)) = head_strides(heads) else { return Ok(()) };
    let num_tokens = heads.shape().first().map_or(0, |&size| size as usize);
    let half = heads.width() as usize / 2;
    let row_len = heads.num_elements() as usize / num_tokens.max(1);
    let start = SendPointer(heads.data().cast::<T>());
    backend.parallel_tokens(num_tokens, row_len, |tokens| {
        for token in tokens {
            // SAFETY: the elements of one token, by contract; each token is given out once.
            let (row, position, cos, sin) = unsafe {
                (
                    std::slice::from_raw_parts_mut(
                        start.get().add(token * token_stride as usize),
                        row_len,
                    ),
                    angles.position(token),
                    host_slice::<f32>(angles.cos),
                    host_slice::<f32>(angles.sin),
                )
            };
            let Some(position) = position else { continue };
            let range = position * half..(position + 1) * half;
            if let (Some(cos), Some(sin)) = (cos.get(range.clone()), sin.get(range)) {
                backend.run(Rotate { row, cos, sin, pairing: angles.pairing });
            }
        }
    })
}
