//! Linear layers for more tokens than [`super::linear_skinny()`] takes, on Hopper:
//! `csrc/ops/linear/prefill.cu`.

use crate::backend::cuda::{
    is_cublas_present, kernel_struct, kernels, Arguments, Kernel, Launch, TensorMap,
};
use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::{Error, Result};
use crate::memory::{DType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};
use crate::ops::linear::cuda_skinny::{is_skinny_weight, weight_map};
use crate::ops::linear::Epilogue;

kernel_struct! {
    /// The kernel has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct PrefillParams {
        pub(super) weight: TensorMap,
        pub(super) x: TensorMap,
        pub(super) out: *mut u8,
        pub(super) ldo: i64,
        pub(super) num_tokens: i32,
        pub(super) n: i32,
        pub(super) k: i32,
        pub(super) padding: [i32; 7],
    }
}

/// What the two blocks of a pair in a cluster have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pair {
    /// The rows of the weight; their tokens differ.
    Rows,
    /// The tokens.
    Tokens,
}

/// A kernel, as instantiated at the end of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) name: &'static str,
    /// The tokens of a block, its rows of the weight, and its stages of 64 of k.
    tokens: i64,
    pub(super) rows: i64,
    stages: i64,
    pair: Pair,
    /// The number of pairs that divide k.
    splits: i64,
    /// How long a tile takes, in parts of 200; measured on an H200.
    cost: i64,
}

/// The tiles that serve all products and results of all kinds.
const WIDE: [Shape; 6] = {
    const fn wide(name: &'static str, rows: i64, stages: i64, pair: Pair, cost: i64) -> Shape {
        Shape { name, tokens: 128, rows, stages, pair, splits: 1, cost }
    }
    [
        wide("128x256_m", 256, 4, Pair::Rows, 200),
        wide("128x192_m", 192, 5, Pair::Rows, 157),
        wide("128x128_n", 128, 6, Pair::Tokens, 119),
        wide("128x128_m", 128, 6, Pair::Rows, 119),
        wide("128x256_n", 256, 4, Pair::Tokens, 206),
        wide("128x192_n", 192, 5, Pair::Tokens, 161),
    ]
};
/// The tiles for weights with few rows; the first one is chosen whose tiles all fit on the chip at
/// once.
const NARROW: [Shape; 3] = {
    const fn narrow(name: &'static str, rows: i64, stages: i64, pair: Pair, splits: i64) -> Shape {
        Shape { name, tokens: 64, rows, stages, pair, splits, cost: 0 }
    }
    [
        narrow("64x64_n_s2", 64, 11, Pair::Tokens, 2),
        narrow("64x128_m_s2", 128, 8, Pair::Rows, 2),
        narrow("64x128_m", 128, 8, Pair::Rows, 1),
    ]
};
/// The most rows of a weight with few rows, and the smallest k.
const NARROW_ROWS: i64 = 1024;
const NARROW_K: i64 = 512;

impl Shape {
    /// Returns the shape whose last block finishes first.
    pub(super) fn choose(
        num_tokens: i64,
        rows: i64,
        k: i64,
        is_gated: bool,
        num_multiprocessors: i64,
    ) -> Self {
        if !is_gated {
            if let Some(shape) = Shape::narrow(num_tokens, rows, k, num_multiprocessors) {
                return shape;
            }
        }
        Shape::choose_wide(num_tokens, rows, num_multiprocessors)
    }

    /// Returns the one of [`WIDE`] whose last block finishes first.
    pub(super) fn choose_wide(num_tokens: i64, rows: i64, num_multiprocessors: i64) -> Self {
        let [first, ..] = WIDE;
        WIDE.into_iter()
            .min_by_key(|shape| {
                let clusters = shape.clusters(num_tokens, rows);
                (shape.cost_of_waves(clusters, num_multiprocessors), clusters)
            })
            .unwrap_or(first)
    }

    /// Returns how long so many clusters take, one wave after the other, in the parts of `cost`.
    fn cost_of_waves(self, clusters: i64, num_multiprocessors: i64) -> i64 {
        let waves = (clusters as u64).div_ceil(self.room(num_multiprocessors) as u64);
        waves as i64 * self.cost
    }

    /// Returns the shape for a weight with few rows, if there is one.
    fn narrow(num_tokens: i64, rows: i64, k: i64, num_multiprocessors: i64) -> Option<Self> {
        let is_narrow = rows <= NARROW_ROWS && k >= NARROW_K;
        NARROW.into_iter().find(|shape| {
            is_narrow && shape.clusters(num_tokens, rows) <= shape.room(num_multiprocessors)
        })
    }

    /// The number of blocks of a cluster.
    pub(super) fn blocks(self) -> i64 {
        2 * self.splits
    }

    /// The number of clusters that the chip holds at a time. Pairs of multiprocessors are never
    /// split; about a tenth of the groups of four are.
    fn room(self, num_multiprocessors: i64) -> i64 {
        let clusters = num_multiprocessors / self.blocks();
        (if self.splits > 1 { clusters * 10 / 11 } else { clusters }).max(1)
    }

    /// The number of clusters, each with its tile.
    fn clusters(self, num_tokens: i64, rows: i64) -> i64 {
        let (tokens, of_weight) = match self.pair {
            Pair::Rows => (2 * self.tokens, self.rows),
            Pair::Tokens => (self.tokens, 2 * self.rows),
        };
        let count = |size: i64, of: i64| (size as u64).div_ceil(of as u64) as i64;
        count(num_tokens, tokens) * count(rows, of_weight)
    }

    /// The number of tokens in a box that one block of a pair copies.
    pub(super) fn token_box(self) -> u32 {
        match (self.tokens, self.pair) {
            (64, Pair::Tokens) => 32,
            _ => 64,
        }
    }

    /// Returns the launch for `num_tokens` tokens and `rows` rows: blocks take several tiles in
    /// turn, and the ring of copies runs on.
    pub(super) fn launch(self, num_tokens: i64, rows: i64, num_multiprocessors: i64) -> Launch {
        let clusters = self.clusters(num_tokens, rows).min(self.room(num_multiprocessors));
        Launch {
            grid: ((clusters * self.blocks()) as u32, 1, 1),
            block: (self.tokens * 2 + 128) as u32,
            shared_bytes: self.shared_bytes(),
        }
    }

    /// Returns the bytes for stages of 64 of k, sums of other blocks, results on their way out, and
    /// barriers.
    fn shared_bytes(self) -> u32 {
        let stages = self.stages * (self.tokens + self.rows) * 64 * 2;
        // Each block finishes 64 tokens by its part of the rows.
        let received = (self.splits - 1) * 64 * (self.rows / self.splits) * 4;
        (stages + received + self.tokens / 16 * 2048 + self.stages * 16 + 8) as u32
    }

    fn kernel(self, dtype: DType, is_gated: bool) -> Option<Kernel> {
        let kernel = match (self.name, is_gated) {
            ("128x256_m", true) => kernels::LINEAR_PREFILL_SWIGLU_128X256_M,
            ("128x256_n", true) => kernels::LINEAR_PREFILL_SWIGLU_128X256_N,
            ("128x192_m", true) => kernels::LINEAR_PREFILL_SWIGLU_128X192_M,
            ("128x192_n", true) => kernels::LINEAR_PREFILL_SWIGLU_128X192_N,
            ("128x128_m", true) => kernels::LINEAR_PREFILL_SWIGLU_128X128_M,
            ("128x128_n", true) => kernels::LINEAR_PREFILL_SWIGLU_128X128_N,
            ("128x256_m", false) => kernels::LINEAR_PREFILL_PLAIN_128X256_M,
            ("128x256_n", false) => kernels::LINEAR_PREFILL_PLAIN_128X256_N,
            ("128x192_m", false) => kernels::LINEAR_PREFILL_PLAIN_128X192_M,
            ("128x192_n", false) => kernels::LINEAR_PREFILL_PLAIN_128X192_N,
            ("128x128_m", false) => kernels::LINEAR_PREFILL_PLAIN_128X128_M,
            ("128x128_n", false) => kernels::LINEAR_PREFILL_PLAIN_128X128_N,
            ("64x64_n_s2", false) => kernels::LINEAR_PREFILL_PLAIN_64X64_N_S2,
            ("64x128_m_s2", false) => kernels::LINEAR_PREFILL_PLAIN_64X128_M_S2,
            ("64x128_m", false) => kernels::LINEAR_PREFILL_PLAIN_64X128_M,
            _ => return None,
        };
        kernel.of(dtype)
    }
}

/// The dynamic shared memory that `csrc/common/layouts.cuh` states for the kernels; they check it.
#[cfg(test)]
pub(in crate::ops) fn shared_bytes() -> Vec<(String, u32)> {
    let shapes = WIDE.into_iter().chain(NARROW);
    shapes.map(|shape| (format!("linear_prefill_{}", shape.name), shape.shared_bytes())).collect()
}

/// Whether [`linear_prefill`] is faster than cuBLAS (which needs another kernel to compute the gate or
/// to treat heads, and begins only when the preceding kernel has ended), or cuBLAS is not there.
pub fn is_prefill_faster(num_tokens: usize, weight: &Tensor, result: Epilogue) -> bool {
    let [rows, k] = [0, 1].map(|i| weight.shape().get(i).copied().unwrap_or(0));
    let num_tokens = num_tokens as i64;
    if !is_cublas_present() {
        return true;
    }
    match result {
        Epilogue::Store if rows > k && k <= NARROW_STREAM => rows >= 4096,
        Epilogue::Store if rows > k => OF_HEADS.is_faster(num_tokens, rows, k, false),
        Epilogue::Store => {
            num_tokens <= MAX_NARROW_TOKENS
                && Shape::narrow(num_tokens, rows, k, MULTIPROCESSORS).is_some()
        }
        Epilogue::SwiGlu => k <= NARROW_STREAM || OF_GATES.is_faster(num_tokens, rows, k, true),
        Epilogue::AddResidual => false,
    }
}

/// Up to this width of the stream a product is so short that it counts most that this file's begins
/// before the preceding kernel has ended: choosing by [`Times`], which know nothing of it, made prompts
/// up to 16 percent longer (H200, streams of 1,024 to 2,048).
const NARROW_STREAM: i64 = 2048;

/// Times of products on an H200, in microseconds: this file's grow in waves of tiles, and cuBLAS has tiles
/// for all sizes. Both are fitted to 130 to 4,096 tokens and the weights of twelve models with streams of
/// 1,024 to 5,120, each kernel timed by itself; the median error of this file's is 5 percent for gates
/// and 7 for heads.
struct Times {
    /// Of this file: of a part of a tile's cost and a column of k, and in addition to that.
    wave: f64,
    start: f64,
    /// Of cuBLAS: in relation to arithmetic and memory, whichever takes longer, and in addition to that.
    share: f64,
    rest: f64,
}

const OF_GATES: Times = Times { wave: 5.32e-5, start: -3.4, share: 1.1, rest: 3.0 };
const OF_HEADS: Times = Times { wave: 6.97e-5, start: -0.5, share: 1.15, rest: 8.0 };

impl Times {
    /// The multiplications and additions of a microsecond, and the bytes.
    const FLOPS: f64 = 675e6;
    const BYTES: f64 = 4.6e6;

    fn is_faster(&self, num_tokens: i64, rows: i64, k: i64, is_gated: bool) -> bool {
        let shape = Shape::choose(num_tokens, rows, k, is_gated, MULTIPROCESSORS);
        let waves = shape.cost_of_waves(shape.clusters(num_tokens, rows), MULTIPROCESSORS) * k;
        let (tokens, numbers) = (num_tokens as f64, rows as f64 * k as f64);
        let least = (2.0 * tokens * numbers / Self::FLOPS).max(2.0 * numbers / Self::BYTES);
        self.wave * waves as f64 + self.start <= self.share * least + self.rest
    }
}

/// The most tokens with which the shapes for weights with few rows are faster than cuBLAS, and the
/// number of multiprocessors of the chips on which that was measured.
const MAX_NARROW_TOKENS: i64 = 448;
const MULTIPROCESSORS: i64 = 132;

/// Whether the chip and the build have the kernels of this file.
pub fn has_linear_prefill(context: &ComputeContext) -> Result<bool> {
    let Ok(cuda) = cuda(context) else { return Ok(false) };
    Ok(cuda.device().info().compute_capability == (9, 0)
        && cuda.has_kernel(kernels::LINEAR_PREFILL_PLAIN_128X128_M.bf16)?)
}

/// Computes the product of x [num_tokens, in_features] and `weight` [out_features, in_features]
/// (twice the rows of `out` with [`Epilogue::SwiGlu`]; not with [`Epilogue::AddResidual`]) into out
/// [num_tokens, out_features], of f16 or bf16. The weight is one that [`is_skinny_weight`] accepts.
/// A token's bits depend only on the token, the weight and, where the weight has few rows, the
/// number of tokens.
pub fn linear_prefill(
    context: &ComputeContext,
    x: &Tensor,
    weight: &DeviceTensor,
    result: Epilogue,
    out: &Tensor,
) -> Result<()> {
    let (dtype, (num_tokens, n)) = (float("out", out)?, matrix_size("out", out)?);
    let (rows, k) = matrix_size("weight", weight)?;
    check("x", x, out.element(), &[num_tokens.into(), k.into()])?;
    let is_gated = result == Epilogue::SwiGlu;
    let expected = if is_gated { 2 * i64::from(n) } else { i64::from(n) };
    check("weight", weight, out.element(), &[expected, k.into()])?;
    if out.is_empty() {
        return Ok(());
    }
    let cuda = cuda(context)?;
    let processors = i64::from(cuda.device().info().num_multiprocessors);
    let shape = Shape::choose(num_tokens.into(), rows.into(), k.into(), is_gated, processors);
    let kernel = shape.kernel(dtype, is_gated);
    let is_served = is_skinny_weight(weight, result) && result != Epilogue::AddResidual;
    let Some(kernel) = kernel.filter(|_| is_served) else {
        return Err(Error::internal(format!("no prefill kernel for {num_tokens} x {rows} x {k}")));
    };
    let params = PrefillParams {
        weight: weight_map(cuda, weight, n as usize, k as usize, is_gated)?,
        x: TensorMap::new(cuda, x, &[shape.token_box(), 64])?,
        out: out.data(),
        ldo: n.into(),
        num_tokens: num_tokens as i32,
        n,
        k,
        padding: [0; 7],
    };
    let launch = shape.launch(num_tokens.into(), rows.into(), processors);
    let arguments = Arguments::new().value(&params);
    // SAFETY: the argument of the kernel; the copy engine reads nothing outside the tensors of its
    // maps, and the stores are bounded by num_tokens and n.
    unsafe { cuda.launch_clusters(kernel, launch, shape.blocks() as u32, arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(num_tokens: i64, rows: i64, k: i64, is_gated: bool) -> &'static str {
        Shape::choose(num_tokens, rows, k, is_gated, 132).name
    }

    #[test]
    fn the_shape_is_the_one_that_was_fastest() {
        for (num_tokens, rows, name) in [
            (512, 6144, "128x192_m"),
            (512, 24576, "128x256_m"),
            (512, 4096, "128x128_n"),
            (1024, 6144, "128x192_m"),
            (2048, 6144, "128x256_m"),
            (2048, 4096, "128x256_m"),
            // Three and five tiles of tokens do not make pairs.
            (384, 4096, "128x128_n"),
            (640, 6144, "128x256_n"),
        ] {
            assert_eq!(shape(num_tokens, rows, 4096, true), name, "{num_tokens} x {rows}");
        }
        for (num_tokens, name) in [
            (160, "64x64_n_s2"),
            (192, "64x64_n_s2"),
            (256, "64x128_m_s2"),
            (384, "64x128_m_s2"),
            (512, "64x128_m"),
            (1024, "64x128_m"),
            (2048, "128x128_n"),
        ] {
            assert_eq!(shape(num_tokens, 1024, 3072, false), name, "{num_tokens}");
        }
    }

    /// Microseconds on an H200 of this file's product and of cuBLAS with what it needs besides.
    #[test]
    fn the_faster_product_is_chosen() {
        for (num_tokens, rows, k, own, library) in
            [(512, 6144, 4096, 44.4, 45.8), (704, 6144, 4096, 83.6, 60.6)]
        {
            let is_faster = OF_HEADS.is_faster(num_tokens, rows, k, false);
            assert_eq!(is_faster, own < library, "{num_tokens} x {rows} x {k}");
        }
    }

    #[test]
    fn the_shapes_are_those_of_the_kernels() {
        for shape in WIDE.into_iter().chain(NARROW) {
            assert!(shape.shared_bytes() <= 227 << 10, "{shape:?}");
            assert!(shape.kernel(DType::BF16, false).is_some(), "{shape:?}");
            assert_eq!(shape.kernel(DType::F16, true).is_some(), shape.tokens == 128, "{shape:?}");
        }
        let [wide, ..] = WIDE;
        assert_eq!(wide.clusters(513, 300), 6);
        assert_eq!([wide, NARROW[0]].map(|shape| shape.room(132)), [66, 30]);
    }
}
