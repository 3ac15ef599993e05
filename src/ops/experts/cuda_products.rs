//! Which kernels multiply the tokens of experts, and their launches: `csrc/ops/experts/wgmma.cu` dense weights on
//! Hopper, `quantised.cu` those of few bits, and `tiled.cu` dense weights of any type on any device.

use super::cuda_routes::Routes;
use super::matrices::{ExpertKernels, ExpertLayer, StridedMatrices};
use crate::backend::cuda::{kernels, Arguments, CudaContext, Kernel, Launch, TensorMap};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};
use crate::ops::common::contiguous::{cuda, float};
use crate::ops::common::launch::is_portable;
use crate::ops::linear::cuda_quantised::{shared_bytes, QuantisedLaunch, QuantisedParams};
use crate::ops::linear::cuda_quantised_blocks::{factor_of_units, is_quantised_weight, TILES};
use crate::ops::linear::{Epilogue, WeightFormat};
use crate::ops::quantised::cuda::QuantisedTiles;
use crate::ops::quantised::tiles::{TileLayout, CHUNK};
use crate::ops::quantised::Code;

/// The shared memory that a block may have on Hopper, in bytes.
const MAX_SHARED_BYTES: usize = 227 << 10;
/// The elements of a row of a box.
const BOX: usize = 64;
/// The rows and results of a tile of tiled.cu.
const TILED_ROWS: usize = 64;
const TILED_SLOTS: usize = 64;
const THREADS: u32 = 256;
/// The scales of a chunk and row in quantised.cu.
const SCALES: usize = 2;

/// A shape of wgmma.cu, as instantiated at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// The most rows of weight of a tile.
    rows: usize,
    /// The most slots.
    slots: usize,
    /// The boxes of a stage.
    boxes: usize,
}

/// Up to so many tokens their rows are fetched one by one, which takes longer than the weights of more.
const MAX_FEW_TOKENS: usize = 4;
const FEW: Shape = Shape { rows: 128, slots: 16, boxes: 2 };
const SOME: Shape = Shape { rows: 128, slots: 64, boxes: 1 };
const MANY: Shape = Shape { rows: 256, slots: 128, boxes: 1 };

impl Shape {
    /// Returns the shape for the tokens of a pass, of which an expert has `mean` on average.
    fn choose(num_tokens: usize, mean: f64) -> Self {
        match mean {
            _ if num_tokens <= MAX_FEW_TOKENS => FEW,
            // Tokens choose unevenly: large tiles hold the tokens of those experts that most choose.
            ..4.0 => SOME,
            _ => MANY,
        }
    }

    fn stage_bytes(self) -> usize {
        (self.rows + self.slots) * BOX * 2 * self.boxes
    }

    fn num_stages(self) -> usize {
        // Two barriers for each.
        MAX_SHARED_BYTES / (self.stage_bytes() + 16)
    }

    fn shared_bytes(self) -> usize {
        self.num_stages() * (self.stage_bytes() + 16)
    }

    /// The threads of a block: two groups of four warps multiply, and of large tiles one more moves its
    /// registers to them.
    fn threads(self) -> u32 {
        if self.rows > 128 {
            384
        } else {
            288
        }
    }

    fn kernel(self, dtype: DType, is_gated: bool) -> Option<Kernel> {
        let kernel = match (self.slots, is_gated) {
            (16, true) => kernels::EXPERTS_SWIGLU_128X16,
            (16, false) => kernels::EXPERTS_PLAIN_128X16,
            (64, true) => kernels::EXPERTS_SWIGLU_128X64,
            (64, false) => kernels::EXPERTS_PLAIN_128X64,
            (128, true) => kernels::EXPERTS_SWIGLU_256X128,
            (128, false) => kernels::EXPERTS_PLAIN_256X128,
            _ => return None,
        };
        kernel.of(dtype)
    }

    /// Returns the rows of a tile of a weight with `rows` rows, a multiple of 16, so that the tiles of
    /// `experts` experts keep the multiprocessors busy to the end.
    fn tile_rows(self, rows: usize, experts: f64, processors: usize) -> usize {
        if self != FEW {
            return self.rows.min(rows.next_multiple_of(16));
        }
        let candidates = (4..=self.rows / 16).map(|sixteens| sixteens * 16);
        let cost = |tile: usize| {
            let tiles = (experts * rows.div_ceil(tile) as f64).ceil() as usize;
            // A tile begins and ends in the time of a few rows.
            tiles.div_ceil(processors.max(1)) * (tile + 8)
        };
        candidates.min_by_key(|&tile| cost(tile)).unwrap_or(self.rows)
    }
}

/// How the products of a pass are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Wgmma(Shape),
    /// The slots of a tile.
    Quantised(usize),
    Tiled,
}

/// The products of a pass.
pub(super) struct Products {
    form: Form,
    num_tokens: usize,
    /// The experts that tokens are expected to choose.
    num_chosen: f64,
    is_deterministic: bool,
}

/// One of the two products of a layer.
pub(super) struct Product<'a> {
    pub matrices: &'a StridedMatrices<'a>,
    /// Whether it ends with silu(gate) * up.
    pub is_gated: bool,
    /// The row of x of each slot; `None`: slots are rows.
    pub tokens: Option<*mut u8>,
}

impl Product<'_> {
    /// Returns the columns of the result and of x.
    fn sizes(&self) -> (usize, usize) {
        let rows = self.matrices.out_features();
        (if self.is_gated { rows / 2 } else { rows }, self.matrices.in_features())
    }
}

/// Whether the copy engine can fetch boxes of these matrices.
fn suits_wgmma(matrices: &StridedMatrices<'_>) -> bool {
    let is_dense = matches!(matrices.first().format(), WeightFormat::Dense(_));
    let starts = [matrices.first().data().data() as usize, matrices.stride()];
    is_dense
        && starts.iter().all(|start| start.is_multiple_of(16))
        && [matrices.in_features(), matrices.out_features()].iter().all(|n| n.is_multiple_of(8))
}

/// Whether there are products with experts that are quantised in this way, of activations of this type.
pub fn has_products(layout: &TileLayout, element: ElementType) -> bool {
    is_quantised_weight(layout) && !layout.has_pieces() && element != ElementType::Float(DType::F32)
}

/// Refuses experts that no kernel of the device serves.
pub fn check_experts(
    context: &ComputeContext,
    layer: &ExpertLayer<'_>,
    dtype: DType,
) -> Result<()> {
    for matrices in [&layer.gate_up, &layer.down] {
        let WeightFormat::Quantised(layout) = matrices.first().format() else { continue };
        let capability = cuda(context)?.device().info().compute_capability.0;
        if capability < 8 || !has_products(&layout, ElementType::Float(dtype)) {
            return Err(Error::unsupported(format!(
                "experts as {:?} in groups of {} in {dtype} on this device",
                layout.format().code,
                layout.format().group_size
            )));
        }
    }
    Ok(())
}

impl ExpertKernels {
    /// Finds the kernels that serve experts on the device of `context`.
    pub fn find(context: &ComputeContext, is_deterministic: bool) -> Result<Self> {
        let cuda = cuda(context)?;
        let has_wgmma = !is_portable()
            && cuda.device().info().compute_capability == (9, 0)
            && cuda.has_kernel(kernels::EXPERTS_PLAIN_128X16.bf16)?;
        Ok(ExpertKernels { has_wgmma, is_deterministic })
    }
}

impl Products {
    pub fn new(layer: &ExpertLayer<'_>, num_tokens: usize, element: ElementType) -> Self {
        let (experts, taken) = (layer.routing.num_experts(), layer.routing.experts_per_token());
        let left_out = 1.0 - taken as f64 / experts.max(1) as f64;
        let num_chosen = experts as f64 * (1.0 - left_out.powi(num_tokens.min(1 << 20) as i32));
        let mean = (num_tokens * taken) as f64 / num_chosen.max(1.0);
        let has_wgmma = layer.kernels.has_wgmma && element != ElementType::Float(DType::F32);
        let form = match layer.gate_up.first().format() {
            // Tokens choose unevenly, so that more than 8 of some expert are common where the mean is a few.
            WeightFormat::Quantised(layout) => Form::Quantised(match mean {
                _ if num_tokens <= 16 => 8,
                ..4.0 if layout.format().code.bits() == 8 => 8,
                // The larger tile pays from fewer tokens on where numbers are made of 4 bits.
                ..40.0 if layout.format().code.bits() == 8 => 32,
                ..12.0 => 32,
                _ => 64,
            }),
            WeightFormat::Dense(_)
                if has_wgmma && suits_wgmma(&layer.gate_up) && suits_wgmma(&layer.down) =>
            {
                Form::Wgmma(Shape::choose(num_tokens, mean))
            }
            WeightFormat::Dense(_) => Form::Tiled,
        };
        Products { form, num_tokens, num_chosen, is_deterministic: layer.kernels.is_deterministic }
    }

    pub fn tile_slots(&self) -> usize {
        match self.form {
            Form::Wgmma(shape) => shape.slots,
            Form::Quantised(slots) => slots,
            Form::Tiled => TILED_SLOTS,
        }
    }

    /// Whether the first product takes its tokens in the order of slots.
    pub fn gathers(&self) -> bool {
        matches!(self.form, Form::Wgmma(shape) if shape != FEW)
    }

    /// Returns the bytes of weights and the operations of a product of `rows` slots, for a profile.
    pub fn estimate(&self, matrices: &StridedMatrices<'_>, rows: usize) -> (u64, f64) {
        let numbers = matrices.out_features() as f64 * matrices.in_features() as f64;
        let bytes = matrices.first().data().size_bytes() as f64 * self.num_chosen;
        (bytes as u64, 2.0 * numbers * rows as f64)
    }

    /// Queues a product: out `[num_slots, n]`.
    pub fn launch(
        &self,
        cuda: &CudaContext,
        product: &Product<'_>,
        routes: &Routes,
        x: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        match (self.form, product.matrices.first().format()) {
            (Form::Wgmma(shape), WeightFormat::Dense(_)) => {
                self.wgmma(cuda, shape, product, routes, x, out)
            }
            (Form::Quantised(slots), WeightFormat::Quantised(layout)) => {
                self.quantised(cuda, slots, &layout, product, routes, x, out)
            }
            (Form::Tiled, WeightFormat::Dense(_)) => tiled(cuda, product, routes, x, out),
            (form, format) => Err(Error::internal(format!("experts as {format:?} by {form:?}"))),
        }
    }

    fn wgmma(
        &self,
        cuda: &CudaContext,
        shape: Shape,
        product: &Product<'_>,
        routes: &Routes,
        x: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        let Product { matrices, is_gated, tokens } = *product;
        let (rows, (n, k)) = (matrices.out_features(), product.sizes());
        let processors = cuda.device().info().num_multiprocessors as usize;
        let tile_rows = shape.tile_rows(rows, self.num_chosen, processors);
        let data = matrices.first().dense_data()?;
        let (len, stride) = (matrices.num_experts(), matrices.stride() / 2);
        let weight = if is_gated {
            let strides = [stride, 8 * k, n * k, k, 1];
            let halves = data.view(0, &[len, n / 8, 2, 8, k], Some(&strides))?;
            TensorMap::streamed(cuda, &halves, &[1, tile_rows as u32 / 16, 2, 8, BOX as u32])?
        } else {
            let all = data.view(0, &[len, rows, k], Some(&[stride, k, 1]))?;
            TensorMap::streamed(cuda, &all, &[1, tile_rows as u32, BOX as u32])?
        };
        let slot_rows = if tokens.is_some() { 1 } else { shape.slots.min(32) };
        let x = TensorMap::new(cuda, x, &[slot_rows as u32, BOX as u32])?;
        let kernel = shape.kernel(float("out", out)?, is_gated);
        let kernel = kernel.ok_or_else(|| Error::internal(format!("no kernel for {shape:?}")))?;
        let items = routes.max_tiles.saturating_mul(rows.div_ceil(tile_rows));
        let launch = Launch {
            grid: (items.min(processors) as u32, 1, 1),
            block: shape.threads(),
            shared_bytes: shape.shared_bytes() as u32,
        };
        let arguments = routes
            .add_to(Arguments::new().value(&weight).value(&x).tensor(out), tokens)
            .i32(n as i32)
            .i32(k as i32)
            .i32(tile_rows as i32)
            .i32(shape.num_stages() as i32)
            // The second product of a layer begins when the blocks of the first have waited.
            .i32((!is_gated).into());
        // SAFETY: the arguments of the kernel; the copy engine reads nothing outside the tensors of its
        // maps, tiles and tokens are those of the routes, and stores are bounded by the slots of a tile and n.
        unsafe { cuda.launch_overlapping(kernel, launch, arguments) }
    }

    #[allow(clippy::too_many_arguments)]
    fn quantised(
        &self,
        cuda: &CudaContext,
        slots: usize,
        layout: &TileLayout,
        product: &Product<'_>,
        routes: &Routes,
        x: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        let Product { matrices, is_gated, tokens } = *product;
        let (n, _) = product.sizes();
        let dtype = float("out", out)?;
        let code = layout.format().code;
        let (kernel, ahead) = match (code, slots) {
            (Code::Int4, 8) => (kernels::EXPERTS_QUANTISED_INT4_8, 6),
            (Code::Int4, 32) => (kernels::EXPERTS_QUANTISED_INT4_32, 6),
            (Code::Int4, _) => (kernels::EXPERTS_QUANTISED_INT4_64, 6),
            (Code::Int8, 8) => (kernels::EXPERTS_QUANTISED_INT8_8, 4),
            (Code::Int8, 32) => (kernels::EXPERTS_QUANTISED_INT8_32, 4),
            (Code::Int8, _) => (kernels::EXPERTS_QUANTISED_INT8_64, 4),
            (Code::Fp8, 8) => (kernels::EXPERTS_QUANTISED_FP8_8, 4),
            (Code::Fp8, 32) => (kernels::EXPERTS_QUANTISED_FP8_32, 4),
            (Code::Fp8, _) => (kernels::EXPERTS_QUANTISED_FP8_64, 4),
        };
        // Numbers of bytes are of 32 bits.
        let rows_fit = x.size_bytes() <= u32::MAX as usize;
        let is_aligned = (x.data() as usize).is_multiple_of(16)
            && (out.data() as usize).is_multiple_of(4)
            && layout.is_gated() == is_gated;
        let kernel = kernel.of(dtype).filter(|_| rows_fit && is_aligned);
        let kernel = kernel.ok_or_else(|| {
            Error::internal(format!("no product of experts with {layout:?} in {dtype}"))
        })?;
        // Sums of a token must not depend on the other tokens: how many warps share the inputs is then one
        // number for all passes.
        let row_shift = if self.is_deterministic || self.num_tokens <= 4 { 1u32 } else { 2 };
        let row_tiles = (TILES << row_shift) as usize;
        let tiles = QuantisedTiles::new(*layout, matrices.first().data())?;
        let how = QuantisedLaunch {
            epilogue: if is_gated { Epilogue::SwiGlu } else { Epilogue::Store },
            row_shift,
            group_factor: factor_of_units(layout, CHUNK / SCALES),
        };
        // How many slots there are is said by tiles.
        let params = QuantisedParams::new(&tiles, x, out, (0, n as i32), &how);
        let chunk_bytes = 128 * code.bits() as u64;
        let shared_bytes = shared_bytes(ahead, slots as u64, chunk_bytes, SCALES as u64);
        let launch = Launch {
            grid: (layout.num_tiles().div_ceil(row_tiles) as u32, grid_tiles(routes)?, 1),
            block: THREADS,
            shared_bytes: shared_bytes as u32,
        };
        let arguments =
            routes.add_to(Arguments::new().value(&params), tokens).i64(matrices.stride() as i64);
        // SAFETY: the arguments of the kernel; it reads the regions of the experts' tiles, which lie at equal
        // distances, and rows of x that the routes name, and its stores are bounded by the slots of a tile and n.
        unsafe { cuda.launch_overlapping(kernel, launch, arguments) }
    }
}

/// Returns the second dimension of a grid with blocks for all tiles that there can be.
fn grid_tiles(routes: &Routes) -> Result<u32> {
    let tiles = u16::try_from(routes.max_tiles);
    let too_many = |_| Error::internal(format!("{} tiles of slots", routes.max_tiles));
    tiles.map(u32::from).map_err(too_many)
}

fn tiled(
    cuda: &CudaContext,
    product: &Product<'_>,
    routes: &Routes,
    x: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let Product { matrices, is_gated, tokens } = *product;
    let (n, k) = product.sizes();
    let dtype = float("out", out)?;
    let kernel = match is_gated {
        true => kernels::EXPERTS_TILED_SWIGLU.of(dtype),
        false => kernels::EXPERTS_TILED_PLAIN.of(dtype),
    };
    let launch = Launch {
        grid: (n.div_ceil(TILED_ROWS) as u32, grid_tiles(routes)?, 1),
        block: THREADS,
        shared_bytes: 0,
    };
    let weight = matrices.first().dense_data()?;
    let arguments = routes
        .add_to(Arguments::new().tensor(weight).tensor(x).tensor(out), tokens)
        .i32(n as i32)
        .i32(k as i32)
        .i64((matrices.stride() / dtype.size_bytes()) as i64);
    // SAFETY: the arguments of the kernel; experts lie at equal distances, and its reads and stores are
    // bounded by the slots of a tile, n and k.
    unsafe { cuda.launch_overlapping(kernel, launch, arguments) }
}
