//! Linear layers whose weights and activations are both FP8 on a GPU, for any number of tokens:
//! `csrc/ops/linear/fp8.cu`, and for more than 16 tokens on Hopper `fp8_many.cu` and `fp8_prefill.cu`.

use crate::backend::cuda::{kernel_struct, kernels, Arguments, CudaContext, Kernel, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};
use crate::ops::linear::cuda_fp8_many::{has_fp8_many, Fp8ManyDivision};
use crate::ops::linear::cuda_fp8_prefill::Fp8PrefillDivision;
use crate::ops::linear::cuda_quantised_blocks::{
    epilogue_number, fp8_group_stages as group_stages, fp8_stages as num_stages,
    is_quantised_weight, launch, MULTIPROCESSORS, TILES, WARPS, WARPS_SHIFT,
};
use crate::ops::linear::cuda_quantised_few::Chip;
use crate::ops::linear::Epilogue;
use crate::ops::quantised::activations::{are_inputs_quantised, INPUT_GROUP};
use crate::ops::quantised::cuda::{scale_number, QuantisedTiles};
use crate::ops::quantised::cuda_activations::QuantisedInputs;
use crate::ops::quantised::tiles::{TileLayout, TILE_ROWS};
use crate::ops::quantised::Code;

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct Fp8Params {
        x: *mut u8,
        x_scales: *mut u8,
        codes: *mut u8,
        scales: *mut u8,
        out: *mut u8,
        bias: *mut u8,
        ldo: i64,
        num_tokens: i32,
        n: i32,
        num_tiles: i32,
        num_chunks: i32,
        num_groups: i32,
        group_stages: i32,
        x_pitch: i32,
        scale_type: i32,
        epilogue: i32,
        row_shift: i32,
        k: i32,
        eps: f32,
        norm_weight: *mut u8,
    }
}

/// The bytes of a tile in a stage: its codes, and its scales in f32.
const TILE_BYTES: u64 = (TILE_ROWS * INPUT_GROUP + TILE_ROWS * 4) as u64;

/// The most tokens for which the kernel for any number can be the fastest on Hopper.
const FEW_TOKENS: u64 = 16;

/// The tokens that a block may have, as instantiated at the end of the source.
const TOKENS: [u64; 5] = [4, 8, 16, 32, 64];

/// How a product is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    /// The tokens of a block.
    tokens: u64,
    /// log2 of the warps of a block that have different rows; the others share the inputs.
    row_shift: u32,
    /// The blocks of a cluster, which share the inputs.
    splits: u64,
    /// The stages of the rings of blocks that quantise x themselves, and keep what they need of it
    /// after the rings; 0 of others.
    own_stages: u64,
}

impl Division {
    /// Returns the division of a product by its sizes that takes the least time, or none where the
    /// chip has too little shared memory. No measurement is made, so it is the same on every load.
    ///
    /// With `is_fixed` neither the parts of the inputs nor, then, a token's results depend on the
    /// number of tokens.
    fn choose(num_tokens: u64, layout: &TileLayout, chip: Chip, is_fixed: bool) -> Option<Self> {
        let splits: &[u64] = if chip.has_clusters { &[1, 2] } else { &[1] };
        let has_room = |&tokens: &u64| {
            let division = Division { tokens, row_shift: 0, splits: 1, own_stages: 0 };
            division.shared_bytes(num_tokens, layout) <= chip.shared_memory_bytes as u64
        };
        let with_room = || TOKENS.into_iter().filter(has_room);
        let tokens = with_room().find(|&tokens| tokens >= num_tokens).or(with_room().next_back())?;
        let all = (0..=WARPS_SHIFT).flat_map(|row_shift| {
            splits.iter().map(move |&splits| Division { tokens, row_shift, splits, own_stages: 0 })
        });
        if is_fixed {
            // The best for one token.
            let one = |division: Division| Division { tokens: 4, ..division };
            return all.min_by_key(|&division| one(division).cost(layout));
        }
        all.min_by_key(|division| division.cost(layout))
    }

    /// Returns the same for blocks that quantise x themselves, or none where a multiprocessor has no room
    /// for two of them.
    fn own(num_tokens: u64, layout: &TileLayout, chip: Chip) -> Option<Self> {
        let division = Division::choose(num_tokens, layout, chip, false)?;
        let room = (chip.shared_memory_bytes / 2).saturating_sub(RESERVED_BYTES) as u64;
        let has_room = |own: &Division| own.shared_bytes(num_tokens, layout) <= room;
        let all = [3, 2].map(|own_stages| Division { own_stages, ..division });
        all.into_iter().find(|own| own.tokens <= 8 && has_room(own))
    }

    fn blocks(&self, layout: &TileLayout) -> u64 {
        (layout.num_tiles() as u64).div_ceil(TILES << self.row_shift) * self.splits
    }

    /// The stages of a warp's ring, and the blocks of a multiprocessor, as instantiated at the end of
    /// the source.
    fn variant(&self) -> (u64, u64) {
        match self.tokens {
            _ if self.own_stages > 0 => (self.own_stages, 2),
            ..=4 => (3, 2),
            5..=16 => (2, 2),
            _ => (2, 1),
        }
    }

    /// About how long the product takes, in units of 10 ns, fitted to the shapes of Qwen3-8B on an
    /// H200.
    fn cost(&self, layout: &TileLayout) -> u64 {
        let (begin, exchange, slot) = (390, 310, if self.tokens <= 8 { 115 } else { 150 });
        let slots = MULTIPROCESSORS * self.variant().1;
        let blocks = self.blocks(layout);
        let stages = (num_stages(layout) as u64).div_ceil((WARPS >> self.row_shift) * self.splits);
        // Two blocks of a multiprocessor slow each other down.
        let stage = if blocks > MULTIPROCESSORS { slot * 13 / 10 } else { slot };
        let exchange = if self.splits > 1 { exchange } else { 0 };
        blocks.div_ceil(slots) * (begin + stages * stage) + exchange
    }

    /// The bytes of shared memory: the rings of all warps, which take the sums at the end.
    fn shared_bytes(&self, num_tokens: u64, layout: &TileLayout) -> u64 {
        let rows = num_tokens.min(self.tokens);
        let inputs = rows * INPUT_GROUP as u64 + rows.next_multiple_of(4) * 4;
        let sums = TILES * self.tokens.div_ceil(8) * 512;
        let (in_ring, beside) = match self.own_stages {
            0 => (inputs, 0),
            _ => (0, inputs * (num_stages(layout) as u64).div_ceil(self.splits)),
        };
        let rings = WARPS * self.variant().0 * (TILES * TILE_BYTES + in_ring);
        (rings + beside).max(WARPS * sums)
    }

    fn kernel(&self, dtype: DType) -> Option<Kernel> {
        let kernel = match (self.own_stages, self.tokens) {
            (0, 4) => kernels::LINEAR_FP8_4,
            (0, 8) => kernels::LINEAR_FP8_8,
            (0, 16) => kernels::LINEAR_FP8_16,
            (0, 32) => kernels::LINEAR_FP8_32,
            (0, 64) => kernels::LINEAR_FP8_64,
            (2, 4 | 8) => kernels::LINEAR_FP8_OWN_2,
            (3, 4 | 8) => kernels::LINEAR_FP8_OWN_3,
            _ => return None,
        };
        kernel.of(dtype)
    }

    fn launch(&self, num_tokens: u64, layout: &TileLayout) -> Option<Launch> {
        let groups = num_tokens.div_ceil(self.tokens);
        launch(self.blocks(layout), groups, self.shared_bytes(num_tokens, layout))
    }
}

/// Whether the chip and the build have the kernels of this file.
pub fn has_linear_fp8(context: &ComputeContext) -> Result<bool> {
    let Ok(cuda) = cuda(context) else { return Ok(false) };
    Ok(cuda.device().info().compute_capability.0 >= 8
        && cuda.has_kernel(kernels::LINEAR_FP8_8.bf16)?)
}

/// Whether the kernels of this file multiply by a weight: its format says that activations are
/// quantised, and its groups are multiples of 128 inputs or whole rows.
pub fn is_fp8_weight(layout: &TileLayout) -> bool {
    let format = layout.format();
    format.code == Code::Fp8
        && format.quantises_inputs
        && is_quantised_weight(layout)
        && are_inputs_quantised(format.group_size, layout.in_features())
}

/// Computes the product of x `[num_tokens, in_features]` in FP8 and a weight in FP8 into out
/// `[num_tokens, out_features]`, of f16 or bf16, for any number of tokens. With
/// [`Epilogue::SwiGlu`] the weight is gated and has twice the rows; with the others it is not.
/// `bias` `[out_features]` is added before the rounding; only with [`Epilogue::Store`]. Nothing but
/// the result is rounded. With `is_fixed` a token's bits depend only on the token and the weight.
pub fn linear_fp8(
    context: &ComputeContext,
    x: &QuantisedInputs,
    weight: &QuantisedTiles<'_>,
    bias: Option<&Tensor>,
    epilogue: Epilogue,
    is_fixed: bool,
    out: &Tensor,
) -> Result<()> {
    let call = Call { weight, bias, epilogue, out };
    let (dtype, num_tokens) = call.check()?;
    let k = weight.layout().in_features();
    if (x.num_rows(), x.in_features()) != (num_tokens, k) {
        return Err(Error::internal(format!(
            "{} x {} activations in FP8 for {num_tokens} results of {k} inputs",
            x.num_rows(),
            x.in_features()
        )));
    }
    if out.is_empty() {
        return Ok(());
    }
    let cuda = cuda(context)?;
    let layout = weight.layout();
    // The sums of the kernels for few and many tokens are in other orders.
    let tokens = num_tokens as u64;
    let few = Division::choose(tokens, layout, Chip::of(cuda), is_fixed);
    if !is_fixed && call.is_served(cuda) && has_fp8_many(context)? {
        let few = few.filter(|_| tokens <= FEW_TOKENS).map(|few| few.cost(layout));
        let is_faster = |cost: usize| few.is_none_or(|few| (cost as u64) < few);
        let many = Fp8ManyDivision::choose(num_tokens, layout);
        let many = many.map(|many| (many.cost(num_tokens, layout), many));
        let prefill = Fp8PrefillDivision::choose(num_tokens, layout);
        let prefill = prefill.map(|prefill| (prefill.cost(num_tokens, layout), prefill));
        match (many, prefill) {
            (Some((many, _)), Some((cost, prefill))) if cost < many && is_faster(cost) => {
                return prefill.launch(cuda, x, weight, bias, epilogue, out);
            }
            (Some((cost, many)), _) if is_faster(cost) => {
                return many.launch(cuda, x, weight, bias, epilogue, out);
            }
            _ => {}
        }
    }
    let inputs = Inputs { x: x.codes(), scales: x.scales(), pitch: x.pitch(), norm: None };
    call.launch(cuda, dtype, few, inputs)
}

/// The most tokens for which blocks quantise x themselves: with one, a step of Qwen3-8B takes 6 % less on
/// an H200, with two 1 %, with four 15 % more.
const MAX_OWN_TOKENS: usize = 2;
/// The shared memory of a block that the chip takes, and that the kernel has beside the rings.
const RESERVED_BYTES: usize = 1280;

/// Whether [`linear_own_fp8`] serves a weight and so many tokens.
pub fn quantises_inputs(
    context: &ComputeContext,
    num_tokens: usize,
    layout: &TileLayout,
) -> Result<bool> {
    let cuda = cuda(context)?;
    Ok((1..=MAX_OWN_TOKENS).contains(&num_tokens)
        && is_fp8_weight(layout)
        && has_linear_fp8(context)?
        && Division::own(num_tokens as u64, layout, Chip::of(cuda)).is_some())
}

/// Does the same as [`linear_fp8`] with x `[num_tokens, in_features]` of the type of out, which the
/// blocks of the product quantise, for what [`quantises_inputs`] says. With `norm`, which is the
/// weight `[in_features]` of an RMSNorm and what is added to the mean of the squares, they first
/// normalise it, as [`rms_norm_rounded`](crate::ops::rms_norm::cuda_rounded::rms_norm_rounded) does.
pub fn linear_own_fp8(
    context: &ComputeContext,
    x: &Tensor,
    norm: Option<(&Tensor, f32)>,
    weight: &QuantisedTiles<'_>,
    bias: Option<&Tensor>,
    epilogue: Epilogue,
    out: &Tensor,
) -> Result<()> {
    let call = Call { weight, bias, epilogue, out };
    let (dtype, num_tokens) = call.check()?;
    let k = weight.layout().in_features() as i64;
    check("x", x, out.element(), &[num_tokens as i64, k])?;
    if let Some((weight, _)) = norm {
        check("norm_weight", weight, out.element(), &[k])?;
    }
    let norm_weight = norm.map_or(std::ptr::null_mut(), |(weight, _)| weight.data());
    if !(x.data() as usize | norm_weight as usize).is_multiple_of(16) {
        return Err(Error::internal("rows of an FP8 product at an odd place"));
    }
    if out.is_empty() {
        return Ok(());
    }
    let cuda = cuda(context)?;
    let division = Division::own(num_tokens as u64, weight.layout(), Chip::of(cuda));
    let inputs = Inputs { x: x.data(), scales: std::ptr::null_mut(), pitch: 0, norm };
    call.launch(cuda, dtype, division, inputs)
}

/// What a kernel reads of the activations.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    x: *mut u8,
    /// Null: x is not quantised.
    scales: *mut u8,
    pitch: usize,
    norm: Option<(&'a Tensor, f32)>,
}

/// The operands of a product beside the activations.
#[derive(Clone, Copy)]
struct Call<'a> {
    weight: &'a QuantisedTiles<'a>,
    bias: Option<&'a Tensor>,
    epilogue: Epilogue,
    out: &'a Tensor,
}

impl Call<'_> {
    /// Checks the operands against each other, and returns the type of out and its tokens.
    fn check(&self) -> Result<(DType, usize)> {
        let Call { weight, bias, epilogue, out } = *self;
        let (dtype, (num_tokens, n)) = (float("out", out)?, matrix_size("out", out)?);
        let layout = weight.layout();
        let (rows, k) = (layout.out_features(), layout.in_features());
        let is_gated = epilogue == Epilogue::SwiGlu;
        let expected = if is_gated { 2 * i64::from(n) } else { i64::from(n) };
        if layout.is_gated() != is_gated || rows as i64 != expected {
            return Err(Error::internal(format!(
                "an FP8 weight of {rows} x {k}, gated: {}, for {num_tokens} x {n} results and \
                 {epilogue:?}",
                layout.is_gated(),
            )));
        }
        if let Some(bias) = bias {
            check("bias", bias, out.element(), &[n.into()])?;
            if epilogue != Epilogue::Store {
                return Err(Error::internal("a bias of an FP8 product that does not store"));
            }
        }
        Ok((dtype, num_tokens as usize))
    }

    /// Whether the device has kernels for the operands.
    fn is_served(&self, cuda: &CudaContext) -> bool {
        (self.out.data() as usize).is_multiple_of(4)
            && is_fp8_weight(self.weight.layout())
            && cuda.device().info().compute_capability.0 >= 8
    }

    fn launch(
        &self,
        cuda: &CudaContext,
        dtype: DType,
        division: Option<Division>,
        inputs: Inputs<'_>,
    ) -> Result<()> {
        let Call { weight, bias, epilogue, out } = *self;
        let layout = weight.layout();
        let (num_tokens, n) = matrix_size("out", out)?;
        let chosen = division.and_then(|division| {
            let launch = division.launch(num_tokens.into(), layout)?;
            Some((division, division.kernel(dtype)?, launch))
        });
        let (Some((division, kernel, launch)), true) = (chosen, self.is_served(cuda)) else {
            return Err(Error::internal(format!(
                "no FP8 product of {num_tokens} tokens with {layout:?} in {dtype}"
            )));
        };
        let regions = weight.regions();
        let params = Fp8Params {
            x: inputs.x,
            x_scales: inputs.scales,
            codes: regions.codes,
            scales: regions.scales,
            out: out.data(),
            bias: bias.map_or(std::ptr::null_mut(), |bias| bias.data()),
            ldo: n.into(),
            num_tokens: num_tokens as i32,
            n,
            num_tiles: layout.num_tiles() as i32,
            num_chunks: layout.num_chunks() as i32,
            num_groups: layout.num_groups() as i32,
            group_stages: group_stages(layout) as i32,
            x_pitch: inputs.pitch as i32,
            scale_type: scale_number(layout.format().scale),
            epilogue: epilogue_number(epilogue),
            row_shift: division.row_shift as i32,
            k: layout.in_features() as i32,
            eps: inputs.norm.map_or(0.0, |(_, eps)| eps),
            norm_weight: inputs.norm.map_or(std::ptr::null_mut(), |(weight, _)| weight.data()),
        };
        let arguments = Arguments::new().value(&params);
        // SAFETY: the argument of the kernel; it reads the regions of the tiles, the rows of x and
        // the weight of the norm, and its stores are bounded by num_tokens and n.
        unsafe { cuda.launch_clusters(kernel, launch, division.splits as u32, arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::quantised::QuantFormat;

    fn layout(rows: usize, k: usize, group_size: usize) -> TileLayout {
        let format = QuantFormat {
            code: Code::Fp8,
            group_size,
            has_zeros: false,
            scale: DType::F32,
            quantises_inputs: true,
        };
        TileLayout::new(rows, k, format, false).unwrap()
    }

    #[test]
    fn every_product_has_a_kernel() {
        let h200 = Chip { has_clusters: true, shared_memory_bytes: 227 << 10 };
        let consumer = Chip { has_clusters: false, shared_memory_bytes: 99 << 10 };
        for (rows, k) in
            [(6144, 4096), (24_576, 4096), (4096, 12_288), (1024, 3072), (8, 64), (40, 72)]
        {
            let layout = layout(rows, k, 128);
            assert!(is_fp8_weight(&layout));
            for chip in [h200, consumer] {
                let alone = Division::choose(1, &layout, chip, true).unwrap();
                for num_tokens in 1..=130 {
                    let fixed = Division::choose(num_tokens, &layout, chip, true).unwrap();
                    let parts = |division: Division| (division.row_shift, division.splits);
                    assert_eq!(parts(fixed), parts(alone));
                    let free = Division::choose(num_tokens, &layout, chip, false).unwrap();
                    for division in [fixed, free] {
                        assert!(chip.has_clusters || division.splits == 1);
                        let launch = division.launch(num_tokens, &layout).unwrap();
                        assert!(launch.shared_bytes as usize <= chip.shared_memory_bytes);
                        assert!(u64::from(launch.grid.0).is_multiple_of(division.splits));
                        assert!(division.kernel(DType::F16).is_some());
                    }
                }
            }
        }
    }

    #[test]
    fn groups_are_whole_stages() {
        for (group_size, is_served) in [(128, true), (256, true), (1 << 20, true), (64, false)] {
            assert_eq!(is_fp8_weight(&layout(64, 1024, group_size)), is_served);
        }
        assert_eq!(num_stages(&layout(64, 136, 128)), 2);
        assert_eq!(group_stages(&layout(64, 1024, 256)), 2);
        assert_eq!(crate::ops::quantised::tiles::CHUNK * 2, INPUT_GROUP);
    }
}
