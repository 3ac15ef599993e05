//! Which kernels compute the linear layers of a model, decided once, when it is loaded; and the
//! layers computed by them.
//!
//! * Up to [`MAX_CHAIN_ROWS`] rows on Hopper, where the weights suit: a chain of kernels in which each
//!   begins to fetch its weights while those before it are still running, so that the device memory is
//!   hardly ever idle. The products add to the residual stream themselves.
//! * One row of a chain that decodes, or two where the sizes are multiples of 256: the norms are fused
//!   into the products.
//! * One row of a small model, whose step is a chain of trips to memory rather than a stream: the
//!   products run on tensor cores, and the output projection is fused into the attention.
//! * A few rows of a narrow model: norms are fused into the products, which run on tensor cores, also
//!   by weights of 4 or 8 bits.
//! * Everything else: separate norms, which add what is pending, and products. Up to
//!   [`MAX_CHAIN_ROWS`] rows are computed by the kernel of the chain where it serves the weights,
//!   more by the kernel for prompts where that is the fastest, and otherwise by [`gemm`].
//!
//! Weights that are quantised have one kernel for few rows, whatever links them, on every device with
//! tensor cores, and on Hopper one for a single row of a wide stream, which normalises it too; for
//! more rows their numbers are made for the time of a product. Those of a matrix as tall as a
//! vocabulary are made in pieces, where its codes cannot be multiplied. An output matrix may be
//! quantised beside layers that are not, and the other way round. Where the format of FP8 weights says
//! that activations are quantised, they are for any number of rows, and the products are those of FP8
//! with FP8; the norm before a product quantises what it gives, and with one or two rows a product
//! normalises and quantises what it multiplies. Where that of 8-bit integers with a scale for each row
//! says so, prompts on Hopper are products of integers.
//!
//! In a model that is to be deterministic, every row of a linear layer is summed in an order that
//! follows from the shape of the weight alone. The other rows of a batch, the pieces that a prompt
//! is cut into, a preemption or a warm prefix then change nothing. Where the weights suit the
//! chain, up to [`MAX_CHAIN_ROWS`] rows are computed by its kernel, more by [`gemm`] with
//! [`SumOrder::Parts`]; both add up k by wgmma, 16 at a time from the first to the last, in the
//! number of parts that the shape of the weight gives. Other weights take [`SumOrder::ByRow`].

use super::cuda_fp8::{
    has_linear_fp8, is_fp8_weight, linear_fp8, linear_own_fp8, quantises_inputs,
};
use super::cuda_gemv::{has_linear_gemv, linear_gemv, max_gemv_tokens, GEMV_TOKENS};
use super::cuda_gemv_mma::{has_linear_gemv_mma, linear_gemv_mma, OneTokenLinear};
use super::cuda_narrow::{has_linear_narrow, linear_narrow, max_narrow_tokens, NARROW_TOKENS};
use super::cuda_narrow_quantised::{linear_narrow_quantised, max_narrow_quantised_tokens};
use super::cuda_numbers::{is_tall, linear_numbers};
use super::cuda_prefill::{has_linear_prefill, is_prefill_faster, linear_prefill};
use super::cuda_prefill_heads::{is_prefill_heads_faster, linear_prefill_heads};
use super::cuda_prefill_int8::{
    has_prefill_int8, is_prefill_int8_weight, linear_prefill_int8, MIN_INT8_TOKENS,
};
use super::cuda_quantised::{has_linear_quantised, linear_quantised, max_quantised_tokens};
use super::cuda_quantised_blocks::is_quantised_weight;
use super::cuda_quantised_many::has_quantised_many;
use super::cuda_quantised_one::{has_quantised_one, linear_quantised_one};
use super::cuda_skinny::{
    has_linear_skinny, is_skinny_weight, linear_skinny, num_fixed_parts, SKINNY_TOKENS,
};
use super::matrix::{Matrix, MatrixLayout, WeightFormat};
use super::residual::{Norm, Pending, ResidualStream};
use super::Epilogue;
use crate::backend::cuda::CudaContext;
use crate::backend::{ComputeContext, ContextBackend, DeviceTensor};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::attention::AttentionPlan;
use crate::ops::common::launch::is_portable;
use crate::ops::gemm::{
    cublas_workspace_for, gemm, gemm_with_bias, GemmOptions, SumOrder, WeightShape,
};
use crate::ops::kv_cache::KvSlots;
use crate::ops::qk_norm_rope_append::QkNormRope;
use crate::ops::quantised::cuda::QuantisedTiles;
use crate::ops::quantised::cuda_activations::{quantise_inputs, QuantisedInputs};
use crate::ops::quantised::tiles::TileLayout;
use crate::ops::silu_mul::cuda_rounded::silu_mul;

/// The most rows of a chain.
pub const MAX_CHAIN_ROWS: usize = SKINNY_TOKENS;

/// The widest stream that the norm of the chain takes.
const MAX_CHAIN_WIDTH: usize = 16384;

/// Hundredths of the memory of a multiprocessor that a chain takes as shared memory. The weights in
/// flight need the rest, which is the first-level cache; without it a step of Qwen3-8B takes 5 %
/// longer (H200).
const CHAIN_SHARED_PERCENT: i32 = 75;
/// The percentage for one row, where streams are narrow or kernels have bounds: these have more loads
/// under way. A step of Qwen3-1.7B, Llama-3.2-1B, Qwen3-4B and -14B takes 0.5 to 3 % less with it, one
/// of Qwen3-8B 1.3 % more (H200; a step of Qwen3-0.6B after 512 tokens takes a quarter longer with 75).
const ONE_ROW_SHARED_PERCENT: i32 = 50;
/// The percentage for one row and weights of 4 or 8 bits, which pass through shared memory: a step of
/// Qwen3-8B in 4 bits takes 1.5 % less with it (H200).
const INTEGERS_SHARED_PERCENT: i32 = 100;
/// Streams narrower than this are narrow.
const WIDE: usize = 4096;
/// Streams for which the kernel for one row of integers is the fastest are at least so wide: a step of
/// Qwen3-4B in 4 bits takes 7 % less with it, one of Qwen3-1.7B 5 % more, and one of Qwen3-0.6B 20 % (H200).
const WIDE_FOR_INTEGERS: usize = 2560;
/// Streams narrower than this have [`CHAIN_SHARED_PERCENT`] with such weights: a step of Qwen3-0.6B takes 9 %
/// less with it, one of Qwen3-1.7B as long, and one of Qwen3-4B 2 % more (H200).
const NARROW_FOR_INTEGERS: usize = 2048;
/// Streams up to this width have the kernels for narrow models.
const NARROW: usize = 2048;
/// Up to this width they are faster for one and two rows too.
const NARROWEST: usize = 1024;
/// The most rows of a prompt that are a chain in a stream of this width: one of 128 tokens of Qwen3-0.6B
/// takes 7 % longer as a chain (H200).
const MAX_NARROWEST_ROWS: usize = 64;

/// A product of a model, as [`LinearPlan::find`] asks for it.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// The matrix to multiply by.
    pub weight: &'a Matrix,
    /// Whether a bias is added.
    pub has_bias: bool,
    /// What is done with the product.
    pub epilogue: Epilogue,
    /// Whether it is that with the output matrix, the last of a pass.
    pub is_output: bool,
}

/// The sizes of a decoder that kernels are made for.
#[derive(Clone, Copy, Debug)]
pub struct DecoderSizes {
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width of the MLP.
    pub intermediate_size: usize,
    /// Whether all norms are RMSNorms.
    pub has_rms_norms: bool,
    /// The type that is computed in.
    pub dtype: DType,
}

/// The plan for the linear layers of a model; see the head of the file.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinearPlan {
    has_chain: bool,
    /// The most rows of a chain of which the norms are fused into the products.
    gemv_rows: usize,
    has_one_token: bool,
    /// The most rows of a chain that are those of a narrow model.
    narrow_rows: usize,
    /// Whether the stream is as narrow as [`NARROWEST`].
    is_narrowest: bool,
    has_prefill: bool,
    /// Whether the device has the kernel for quantised weights.
    has_quantised: bool,
    /// Whether it has those for many rows.
    has_quantised_many: bool,
    /// Whether it has those for activations in FP8.
    has_fp8: bool,
    /// Whether it has those for prompts in integers of 8 bits.
    has_int8: bool,
    /// Whether layers have integers as weights.
    has_integers: bool,
    /// Whether the stream is as wide as [`WIDE_FOR_INTEGERS`].
    is_wide: bool,
    is_deterministic: bool,
}

/// How the linear layers of one pass follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Links {
    Apart,
    Chain,
    Gemv,
    OneToken,
    Narrow,
}

/// The linear layers of one pass.
#[derive(Clone, Copy)]
pub struct LinearPass<'a> {
    plan: &'a LinearPlan,
    context: &'a ComputeContext,
    cuda: &'a CudaContext,
    links: Links,
}

/// A weight and its bias.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// Its name in a profile.
    pub name: &'static str,
    /// The weight, [out_features, in_features].
    pub weight: &'a Matrix,
    /// The bias, [out_features].
    pub bias: Option<&'a DeviceTensor>,
}

fn num_rows(x: &Tensor) -> usize {
    x.shape().first().map_or(0, |&n| n as usize)
}

impl LinearPlan {
    /// Finds the kernels that serve the products of a model on the device of `context`.
    /// `XSERV_CUDA_PORTABLE=1` in the environment selects [`gemm`] alone, for comparing and testing
    /// what other devices take.
    pub fn find<'a>(
        context: &ComputeContext,
        attention: &AttentionPlan,
        sizes: &DecoderSizes,
        products: impl Iterator<Item = Product<'a>>,
        is_deterministic: bool,
    ) -> Result<Self> {
        let (mut suit_chain, mut gemv_rows, mut has_biases) = (true, GEMV_TOKENS, false);
        let mut has_integers = false;
        let mut narrow_rows = NARROW_TOKENS;
        let has_quantised = sizes.dtype != DType::F32 && has_linear_quantised(context)?;
        let has_fp8 = has_quantised && has_linear_fp8(context)?;
        for Product { weight, has_bias, epilogue, is_output } in products {
            has_biases |= has_bias;
            suit_chain &=
                (!has_bias || epilogue == Epilogue::Store) && weight.layout() == MatrixLayout::Rows;
            match weight.format() {
                WeightFormat::Dense(_) => {
                    suit_chain &= is_skinny_weight(weight.data(), epilogue);
                    gemv_rows = gemv_rows.min(max_gemv_tokens(weight.data(), epilogue));
                    // The output matrix is multiplied as in any chain.
                    if !is_output {
                        narrow_rows = narrow_rows.min(max_narrow_tokens(weight.data(), epilogue));
                    }
                }
                WeightFormat::Quantised(layout) => {
                    suit_chain &= has_quantised
                        && is_quantised_weight(&layout)
                        && (!layout.format().has_fp8_inputs()
                            || (has_fp8 && is_fp8_weight(&layout)));
                    // The norm before the output matrix can be a kernel of its own.
                    if !is_output {
                        gemv_rows = 0;
                        narrow_rows =
                            narrow_rows.min(max_narrow_quantised_tokens(&layout, epilogue));
                        has_integers |= !layout.format().code.is_float();
                    }
                }
            }
        }
        let has_chain = suit_chain
            && !is_portable()
            && sizes.dtype != DType::F32
            && sizes.has_rms_norms
            && has_linear_skinny(context)?
            && sizes.hidden_size <= MAX_CHAIN_WIDTH;
        if !has_chain || is_deterministic || !has_linear_gemv(context)? {
            gemv_rows = 0;
        }
        let is_narrow = sizes.hidden_size <= NARROW && has_linear_narrow(context)?;
        if !has_chain || is_deterministic || !is_narrow {
            narrow_rows = 0;
        }
        let DecoderSizes { hidden_size, intermediate_size, .. } = *sizes;
        let has_one_token = gemv_rows > 0
            && !has_biases
            && attention.has_fused_projection(context, hidden_size)?
            && has_linear_gemv_mma(
                context,
                hidden_size,
                intermediate_size,
                attention.num_kv_heads(),
            )?;
        let has_prefill = has_chain && has_linear_prefill(context)?;
        Ok(LinearPlan {
            has_chain,
            gemv_rows,
            has_one_token,
            narrow_rows,
            is_narrowest: hidden_size <= NARROWEST,
            has_prefill,
            has_quantised,
            has_quantised_many: has_quantised_many(context)?,
            has_fp8,
            has_int8: has_quantised && !is_deterministic && has_prefill_int8(context)?,
            has_integers,
            is_wide: hidden_size >= WIDE_FOR_INTEGERS,
            is_deterministic,
        })
    }

    /// Returns the most rows of a decoding step for which the layers are a chain; `None` if they
    /// never are.
    pub fn max_chain_rows(&self) -> Option<usize> {
        self.has_chain.then_some(MAX_CHAIN_ROWS)
    }

    /// Returns the layers of any other pass than a step that decodes, of up to `num_rows` rows.
    pub fn of_rows<'a>(
        &'a self,
        context: &'a ComputeContext,
        num_rows: usize,
    ) -> Result<LinearPass<'a>> {
        let most_rows = if self.is_narrowest { MAX_NARROWEST_ROWS } else { MAX_CHAIN_ROWS };
        let is_chain = self.has_chain && num_rows <= most_rows;
        self.pass(context, if is_chain { Links::Chain } else { Links::Apart })
    }

    /// Returns the layers of a step that decodes `num_rows` rows, up to
    /// [`LinearPlan::max_chain_rows`].
    pub fn chain<'a>(
        &'a self,
        context: &'a ComputeContext,
        num_rows: usize,
    ) -> Result<LinearPass<'a>> {
        let links = if self.has_one_token && num_rows == 1 {
            Links::OneToken
        } else if num_rows <= self.narrow_rows && (num_rows > self.gemv_rows || self.is_narrowest) {
            Links::Narrow
        } else if num_rows <= self.gemv_rows {
            Links::Gemv
        } else if self.has_chain && num_rows <= MAX_CHAIN_ROWS {
            Links::Chain
        } else {
            Links::Apart
        };
        self.pass(context, links)
    }

    fn pass<'a>(&'a self, context: &'a ComputeContext, links: Links) -> Result<LinearPass<'a>> {
        match context.backend() {
            ContextBackend::Cuda(cuda) => Ok(LinearPass { plan: self, context, cuda, links }),
            ContextBackend::Cpu { .. } => Err(Error::internal("a device's layers on the CPU")),
        }
    }

    /// Returns the order in which [`gemm`] adds up the products with a weight.
    fn sum_order(&self, weight: &Tensor, epilogue: Epilogue) -> SumOrder {
        match (self.is_deterministic, self.has_chain) {
            (false, _) => SumOrder::Fastest,
            (true, false) => SumOrder::ByRow,
            (true, true) => SumOrder::Parts(num_fixed_parts(weight, epilogue)),
        }
    }
}

/// Returns the workspace that a library of products gets out of that: none where sums have a fixed
/// order, because those products are computed by this library's own kernels.
pub fn library_workspace_bytes(
    num_rows: usize,
    weight: &WeightShape,
    is_deterministic: bool,
) -> usize {
    if is_deterministic {
        0
    } else {
        cublas_workspace_for(num_rows, weight.out_features)
    }
}

impl LinearPass<'_> {
    /// Whether the attention also has to project what it computes, with
    /// [`AttentionPlan::attend_and_project`](crate::ops::attention::AttentionPlan::attend_and_project).
    pub fn projects_in_attention(&self) -> bool {
        self.links == Links::OneToken
    }

    /// Calls `queue`, which queues all layers of the pass, with the memory of multiprocessors
    /// divided as suits the kernels.
    pub fn with_memory_divided<T>(
        &self,
        hidden_size: usize,
        num_rows: usize,
        queue: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let percent = match self.links {
            Links::OneToken | Links::Narrow => ONE_ROW_SHARED_PERCENT,
            Links::Gemv if num_rows == 1 && (hidden_size < WIDE || self.plan.gemv_rows == 1) => {
                ONE_ROW_SHARED_PERCENT
            }
            Links::Gemv => CHAIN_SHARED_PERCENT,
            Links::Chain if num_rows == 1 && self.plan.has_integers && self.plan.is_wide => {
                INTEGERS_SHARED_PERCENT
            }
            Links::Chain
                if num_rows == 1 && self.plan.has_integers && hidden_size < NARROW_FOR_INTEGERS =>
            {
                CHAIN_SHARED_PERCENT
            }
            Links::Apart | Links::Chain => return queue(),
        };
        self.cuda.prefer_shared_memory(Some(percent));
        let done = queue();
        self.cuda.prefer_shared_memory(None);
        done
    }

    /// Marks the end of a product in a profile.
    fn mark(&self, layer: &Layer<'_>, num_rows: usize) -> Result<()> {
        let flops = 2.0 * layer.weight.num_elements() as f64 * num_rows as f64;
        self.cuda.mark(layer.name, layer.weight.data().size_bytes() as u64, flops)
    }

    /// Computes `stream.normed = norm(stream)`, with what was pending added to the stream.
    pub fn normalise(&self, stream: &mut ResidualStream, norm: &Norm<'_>) -> Result<()> {
        stream.normalise(self.context, norm)?;
        self.cuda.mark("norm", 0, 0.0)
    }

    /// Whether nothing is ever pending beside the stream, so that an operator may normalise it itself. Not where
    /// a token's bits must be the same in every pass.
    pub fn has_whole_stream(&self) -> bool {
        !self.plan.is_deterministic && !matches!(self.links, Links::Apart | Links::OneToken)
    }

    /// Computes `stream.normed = norm(stream)` in any pass, for an operator that adds itself to the stream.
    pub fn normalise_whole(&self, stream: &mut ResidualStream, norm: &Norm<'_>) -> Result<()> {
        match self.links {
            Links::Apart => self.normalise(stream, norm),
            _ => {
                stream.normalise_in_chain(self.context, norm)?;
                self.cuda.mark("norm", 0, 0.0)
            }
        }
    }

    /// Computes `out = norm(stream) W^T + b`. out [num_rows, out_features].
    pub fn normed(
        &self,
        stream: &mut ResidualStream,
        norm: &Norm<'_>,
        layer: &Layer<'_>,
        out: &DeviceTensor,
    ) -> Result<()> {
        if self.normed_fp8(stream, norm, layer, Epilogue::Store, out)? {
            return self.mark(layer, stream.num_rows());
        }
        match self.links {
            Links::Apart => {
                self.normalise(stream, norm)?;
                return self.plain(&stream.normed, layer, out);
            }
            Links::Chain => self.in_chain(stream, norm, layer, Epilogue::Store, out)?,
            Links::Gemv => self.gemv(stream, norm, layer, Epilogue::Store, out)?,
            Links::Narrow => {
                let norm = Some(rms(norm)?);
                self.narrow(&stream.hidden, norm, layer, Epilogue::Store, out)?
            }
            Links::OneToken => {
                let (norm, eps) = rms(norm)?;
                let x = OneTokenLinear::Norm { norm, eps };
                linear_gemv_mma(self.context, &stream.hidden, x, layer.weight.dense_data()?, out)?;
            }
        }
        self.mark(layer, stream.num_rows())
    }

    /// Does the same for the output matrix, which has one row per token of the vocabulary: the kernels
    /// for one row of a small model are not made for it, and it may be quantised where the layers are
    /// not.
    pub fn normed_output(
        &self,
        stream: &mut ResidualStream,
        norm: &Norm<'_>,
        layer: &Layer<'_>,
        out: &DeviceTensor,
    ) -> Result<()> {
        let epilogue = Epilogue::Store;
        match (self.links, layer.weight.format()) {
            (Links::Narrow, _) | (Links::Gemv | Links::OneToken, WeightFormat::Quantised(_)) => {
                self.in_chain(stream, norm, layer, epilogue, out)?
            }
            (Links::OneToken, WeightFormat::Dense(_)) => {
                self.gemv(stream, norm, layer, epilogue, out)?
            }
            _ => return self.normed(stream, norm, layer, out),
        }
        self.mark(layer, stream.num_rows())
    }

    /// Projects to queries, keys and values and, where one kernel does both faster, treats the
    /// heads as [`heads`](QkNormRope) says. Returns whether that is done; otherwise the rows of
    /// `out` are as they were projected. out [num_rows, num_heads + 2 num_kv_heads, head_stride].
    pub fn normed_heads(
        &self,
        stream: &mut ResidualStream,
        norm: &Norm<'_>,
        layer: &Layer<'_>,
        heads: Option<(&QkNormRope<'_>, &KvSlots<'_>)>,
        out: &DeviceTensor,
    ) -> Result<bool> {
        let num_rows = stream.num_rows();
        let width = out.num_elements() as usize / num_rows.max(1);
        let rows = out.view(0, &[num_rows, width], None)?;
        let Some((how, slots)) = heads.filter(|(how, _)| {
            self.links == Links::Apart && self.projects_heads(num_rows, layer, how, out)
        }) else {
            self.normed(stream, norm, layer, &rows)?;
            return Ok(false);
        };
        self.normalise(stream, norm)?;
        let bias = layer.bias.map(|bias| &**bias);
        let weight = layer.weight.dense_data()?;
        linear_prefill_heads(self.context, &stream.normed, weight, bias, how, slots, out)?;
        self.mark(layer, num_rows)?;
        Ok(true)
    }

    /// Whether one kernel projects a prompt to heads, normalises and rotates them, and does so
    /// faster than several.
    fn projects_heads(
        &self,
        num_rows: usize,
        layer: &Layer<'_>,
        how: &QkNormRope<'_>,
        out: &Tensor,
    ) -> bool {
        let (head_dim, stride) = (how.head_dim() as usize, out.width() as usize);
        (layer.bias.is_none() || how.norms.is_none())
            && !self.takes_skinny(num_rows, layer)
            && self.takes_prefill(num_rows, layer, Epilogue::Store)
            && is_prefill_heads_faster(
                self.context,
                num_rows,
                layer.weight.data(),
                head_dim,
                stride,
            )
    }

    /// Computes `out = silu(gate) * up` of `norm(stream)`, where the rows of W are those of gate
    /// and then those of up. gate_up [num_rows, 2 * width], which may stay as it is, out [num_rows,
    /// width].
    pub fn normed_gated(
        &self,
        stream: &mut ResidualStream,
        norm: &Norm<'_>,
        layer: &Layer<'_>,
        gate_up: &DeviceTensor,
        out: &DeviceTensor,
    ) -> Result<()> {
        let epilogue = Epilogue::SwiGlu;
        if self.normed_fp8(stream, norm, layer, epilogue, out)? {
            return self.mark(layer, stream.num_rows());
        }
        match self.links {
            Links::Apart => {
                self.normalise(stream, norm)?;
                let (x, rows) = (&stream.normed, stream.num_rows());
                if let Some(tiles) = self.takes_int8(rows, layer)?.filter(|_| layer.bias.is_none())
                {
                    linear_prefill_int8(self.context, x, &tiles, None, epilogue, out)?;
                } else if layer.bias.is_none() && self.takes_skinny(rows, layer) {
                    self.skinny(x, layer, epilogue, out)?;
                } else if layer.bias.is_none() && self.takes_prefill(rows, layer, epilogue) {
                    let weight = layer.weight.dense_data()?;
                    linear_prefill(self.context, x, weight, epilogue, out)?;
                } else {
                    self.by_gemm(x, layer, epilogue, gate_up)?;
                    silu_mul(self.context, gate_up, out)?;
                }
            }
            Links::Chain => self.in_chain(stream, norm, layer, epilogue, out)?,
            Links::Gemv => self.gemv(stream, norm, layer, epilogue, out)?,
            Links::Narrow => self.narrow(&stream.hidden, Some(rms(norm)?), layer, epilogue, out)?,
            Links::OneToken => {
                let Pending::Sums(sums) = &stream.pending else {
                    return Err(Error::internal("an attention that has not projected"));
                };
                let (norm, eps) = rms(norm)?;
                let (sums, hidden) = (&**sums, &*stream.projected);
                let gated = OneTokenLinear::SumsSwiGlu { norm, eps, sums, hidden };
                let weight = layer.weight.dense_data()?;
                linear_gemv_mma(self.context, &stream.hidden, gated, weight, out)?;
            }
        }
        self.mark(layer, stream.num_rows())
    }

    /// Computes the product of `norm(stream)` and a weight that takes its activations in FP8, which
    /// nobody else needs: the norm quantises them, or for the fewest rows the product does both. Returns
    /// whether that is done.
    fn normed_fp8(
        &self,
        stream: &mut ResidualStream,
        norm: &Norm<'_>,
        layer: &Layer<'_>,
        epilogue: Epilogue,
        out: &DeviceTensor,
    ) -> Result<bool> {
        let WeightFormat::Quantised(layout) = layer.weight.format() else { return Ok(false) };
        let is_separate = matches!(self.links, Links::Apart | Links::Chain);
        let has_epilogue = layer.bias.is_none() || epilogue == Epilogue::Store;
        if !is_separate || !has_epilogue || !self.takes_fp8(&layout) {
            return Ok(false);
        }
        let (context, rows, is_fixed) =
            (self.context, stream.num_rows(), self.plan.is_deterministic);
        let tiles = QuantisedTiles::new(layout, layer.weight.data())?;
        let bias = layer.bias.map(|bias| &**bias);
        if self.links == Links::Chain && !is_fixed && quantises_inputs(context, rows, &layout)? {
            let x = &*stream.hidden;
            linear_own_fp8(context, x, Some(rms(norm)?), &tiles, bias, epilogue, out)?;
            return Ok(true);
        }
        let inputs = QuantisedInputs::new(context, rows, layout.in_features())?;
        stream.normalise_in_fp8(context, norm, &inputs)?;
        self.cuda.mark("norm", 0, 0.0)?;
        linear_fp8(context, &inputs, &tiles, bias, epilogue, is_fixed, out)?;
        Ok(true)
    }

    /// Computes `stream += x W^T + b`. x [num_rows, in_features].
    pub fn add_to(
        &self,
        stream: &mut ResidualStream,
        x: &DeviceTensor,
        layer: &Layer<'_>,
    ) -> Result<()> {
        let epilogue = Epilogue::AddResidual;
        match self.links {
            Links::Apart => {
                self.plain(x, layer, &stream.projected)?;
                stream.pending = Pending::Projected;
                return Ok(());
            }
            Links::Chain => {
                if !self.by_quantised_one(x, None, layer, epilogue, &stream.hidden)? {
                    self.skinny(x, layer, epilogue, &stream.hidden)?
                }
            }
            Links::Gemv => {
                let weight = layer.weight.dense_data()?;
                linear_gemv(self.context, x, None, weight, None, epilogue, &stream.hidden)?
            }
            Links::Narrow => self.narrow(x, None, layer, epilogue, &stream.hidden)?,
            Links::OneToken => {
                // What was pending went into `projected` on the way to x.
                let added = OneTokenLinear::Residual { residual: &stream.projected };
                let weight = layer.weight.dense_data()?;
                linear_gemv_mma(self.context, x, added, weight, &stream.hidden)?;
                stream.pending = Pending::Nothing;
            }
        }
        self.mark(layer, stream.num_rows())
    }

    /// Notes that the attention has projected: `sums` f32 [num_kv_heads, hidden_size] are to be
    /// added up and to the stream.
    pub fn add_sums(
        &self,
        stream: &mut ResidualStream,
        sums: DeviceTensor,
        layer: &Layer<'_>,
    ) -> Result<()> {
        stream.pending = Pending::Sums(sums);
        self.mark(layer, stream.num_rows())
    }

    /// Computes `out = x W^T + b`. x [num_rows, in_features], out [num_rows, out_features].
    pub fn plain(&self, x: &DeviceTensor, layer: &Layer<'_>, out: &DeviceTensor) -> Result<()> {
        let (epilogue, rows) = (Epilogue::Store, num_rows(x));
        if let Some(tiles) = self.takes_int8(rows, layer)? {
            let bias = layer.bias.map(|bias| &**bias);
            linear_prefill_int8(self.context, x, &tiles, bias, epilogue, out)?;
        } else if self.takes_skinny(rows, layer) {
            self.skinny(x, layer, epilogue, out)?;
        } else if layer.bias.is_none() && self.takes_prefill(rows, layer, epilogue) {
            linear_prefill(self.context, x, layer.weight.dense_data()?, epilogue, out)?;
        } else {
            self.by_gemm(x, layer, epilogue, out)?;
        }
        self.mark(layer, rows)
    }

    /// Whether the kernel of the chain for this weight computes `num_rows` rows, those of prompts
    /// included. That for quantised weights also computes them outside of a chain, and where sums
    /// have a fixed order any number.
    fn takes_skinny(&self, num_rows: usize, layer: &Layer<'_>) -> bool {
        match layer.weight.format() {
            WeightFormat::Dense(_) => self.plan.has_chain && num_rows <= MAX_CHAIN_ROWS,
            WeightFormat::Quantised(layout) if self.takes_fp8(&layout) => true,
            WeightFormat::Quantised(layout) => {
                let is_few =
                    num_rows <= max_quantised_tokens(self.plan.has_quantised_many, &layout);
                self.plan.has_quantised
                    && !layout.format().has_fp8_inputs()
                    && (is_few || is_tall(&layout) || self.plan.is_deterministic)
                    && is_quantised_weight(&layout)
            }
        }
    }

    /// Returns the tiles of a weight by which rows, those of a prompt, are multiplied as integers of 8 bits.
    fn takes_int8<'a>(
        &self,
        num_rows: usize,
        layer: &Layer<'a>,
    ) -> Result<Option<QuantisedTiles<'a>>> {
        let WeightFormat::Quantised(layout) = layer.weight.format() else { return Ok(None) };
        let is_served = self.plan.has_int8
            && self.links == Links::Apart
            && num_rows >= MIN_INT8_TOKENS
            && layout.format().quantises_inputs
            && !is_tall(&layout)
            && is_prefill_int8_weight(&layout);
        is_served.then(|| QuantisedTiles::new(layout, layer.weight.data())).transpose()
    }

    /// Whether products with such a weight take their activations in FP8.
    fn takes_fp8(&self, layout: &TileLayout) -> bool {
        self.plan.has_fp8 && is_fp8_weight(layout)
    }

    /// Whether the kernel for prompts is the fastest for these rows.
    fn takes_prefill(&self, num_rows: usize, layer: &Layer<'_>, epilogue: Epilogue) -> bool {
        !self.plan.is_deterministic
            && self.plan.has_prefill
            && matches!(layer.weight.format(), WeightFormat::Dense(_))
            && is_prefill_faster(num_rows, layer.weight.data(), epilogue)
    }

    fn skinny(
        &self,
        x: &DeviceTensor,
        layer: &Layer<'_>,
        epilogue: Epilogue,
        out: &DeviceTensor,
    ) -> Result<()> {
        let is_fixed = self.plan.is_deterministic;
        let bias = layer.bias.map(|bias| &**bias);
        match layer.weight.format() {
            WeightFormat::Dense(_) => {
                let weight = layer.weight.data();
                linear_skinny(self.context, x, weight, bias, epilogue, is_fixed, out)
            }
            WeightFormat::Quantised(layout) => {
                let tiles = QuantisedTiles::new(layout, layer.weight.data())?;
                if self.takes_fp8(&layout) {
                    if !is_fixed && quantises_inputs(self.context, num_rows(x), &layout)? {
                        return linear_own_fp8(self.context, x, None, &tiles, bias, epilogue, out);
                    }
                    let inputs =
                        QuantisedInputs::new(self.context, num_rows(x), layout.in_features())?;
                    quantise_inputs(self.context, x, &inputs)?;
                    return linear_fp8(
                        self.context,
                        &inputs,
                        &tiles,
                        bias,
                        epilogue,
                        is_fixed,
                        out,
                    );
                }
                linear_quantised(self.context, x, &tiles, bias, epilogue, is_fixed, out)
            }
        }
    }

    fn in_chain(
        &self,
        stream: &ResidualStream,
        norm: &Norm<'_>,
        layer: &Layer<'_>,
        epilogue: Epilogue,
        out: &DeviceTensor,
    ) -> Result<()> {
        if self.by_quantised_one(&stream.hidden, Some(norm), layer, epilogue, out)? {
            return Ok(());
        }
        stream.normalise_in_chain(self.context, norm)?;
        self.cuda.mark("norm", 0, 0.0)?;
        self.skinny(&stream.normed, layer, epilogue, out)
    }

    /// Computes the product of one row and a weight of 4 or 8 bits, normalised by `norm` or not, if the
    /// kernel for that is the fastest. Returns whether that is done.
    fn by_quantised_one(
        &self,
        x: &DeviceTensor,
        norm: Option<&Norm<'_>>,
        layer: &Layer<'_>,
        epilogue: Epilogue,
        out: &DeviceTensor,
    ) -> Result<bool> {
        let WeightFormat::Quantised(layout) = layer.weight.format() else { return Ok(false) };
        let is_served = self.links == Links::Chain
            && self.plan.is_wide
            && num_rows(x) == 1
            && !self.plan.is_deterministic
            && has_quantised_one(self.context, &layout)?;
        if is_served {
            let tiles = QuantisedTiles::new(layout, layer.weight.data())?;
            let norm = norm.map(rms).transpose()?;
            let bias = layer.bias.map(|bias| &**bias);
            linear_quantised_one(self.context, x, norm, &tiles, bias, epilogue, out)?;
        }
        Ok(is_served)
    }

    /// Computes the product of `norm(stream)` and a dense weight for one or two rows.
    fn gemv(
        &self,
        stream: &ResidualStream,
        norm: &Norm<'_>,
        layer: &Layer<'_>,
        epilogue: Epilogue,
        out: &DeviceTensor,
    ) -> Result<()> {
        let norm = Some(rms(norm)?);
        let bias = layer.bias.map(|bias| &**bias);
        let weight = layer.weight.dense_data()?;
        linear_gemv(self.context, &stream.hidden, norm, weight, bias, epilogue, out)
    }

    /// Computes the product of a few rows of a narrow model, normalised by `norm` or not.
    fn narrow(
        &self,
        x: &DeviceTensor,
        norm: Option<(&Tensor, f32)>,
        layer: &Layer<'_>,
        epilogue: Epilogue,
        out: &DeviceTensor,
    ) -> Result<()> {
        let bias = layer.bias.map(|bias| &**bias);
        match layer.weight.format() {
            WeightFormat::Dense(_) => {
                let weight = layer.weight.data();
                linear_narrow(self.context, x, norm, weight, bias, epilogue, out)
            }
            WeightFormat::Quantised(layout) => {
                let tiles = QuantisedTiles::new(layout, layer.weight.data())?;
                linear_narrow_quantised(self.context, x, norm, &tiles, bias, epilogue, out)
            }
        }
    }

    /// Computes the product, to which a bias is added before it is rounded.
    fn by_gemm(
        &self,
        x: &Tensor,
        layer: &Layer<'_>,
        epilogue: Epilogue,
        out: &DeviceTensor,
    ) -> Result<()> {
        let mut options = GemmOptions {
            transpose_b: layer.weight.layout() == MatrixLayout::Rows,
            ..GemmOptions::default()
        };
        match layer.weight.format() {
            WeightFormat::Dense(_) => {
                let weight = layer.weight.data();
                options.order = self.plan.sum_order(weight, epilogue);
                match layer.bias {
                    Some(bias) => gemm_with_bias(self.context, &options, x, weight, bias, out),
                    None => gemm(self.context, &options, x, weight, out),
                }
            }
            WeightFormat::Quantised(layout) => {
                let tiles = QuantisedTiles::new(layout, layer.weight.data())?;
                let order = |weight: &Tensor| self.plan.sum_order(weight, epilogue);
                linear_numbers(self.context, x, &tiles, options, &order, layer.bias, out)
            }
        }
    }
}

fn rms<'a>(norm: &Norm<'a>) -> Result<(&'a Tensor, f32)> {
    match *norm {
        Norm::Rms { weight, eps } => Ok((weight, eps)),
        Norm::Layer { .. } => Err(Error::internal("the chain of kernels with a LayerNorm")),
    }
}
