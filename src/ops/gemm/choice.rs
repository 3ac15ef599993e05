//! Chooses the kernel that multiplies on CUDA. The numbers behind the choice were measured on an
//! H200 with bf16 weights that are not in the L2 cache.

use crate::error::{Error, Result};
use crate::memory::DType;
use crate::ops::gemm::options::{GemmBackend, SumOrder};

/// The facts that the choice depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    pub dtype: DType,
    pub m: i64,
    pub n: i64,
    pub k: i64,
    pub batch: i64,
    pub transpose_a: bool,
    pub transpose_b: bool,
    /// Whether 16 bytes at a time can be read of A, and of B.
    pub a_in_vectors: bool,
    pub b_in_vectors: bool,
    pub has_cublas: bool,
    pub num_multiprocessors: i64,
    pub shared_memory_bytes: usize,
    /// Whether the chip has the kernels of `csrc/ops/gemm/wgmma.cu`.
    pub has_wgmma: bool,
}

/// A kernel, or a family of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    Naive,
    Tiled,
    /// The sums are f32 in registers.
    Simt,
    TensorCore(Tile, i64),
    /// Uses wgmma in tiles of 128x128, with k in this number of parts.
    Parts(i64),
    Cublas,
    /// For few rows against B stored [n, k], by FMA; the number is the most rows of the kernel.
    Gemv(i64),
    /// Like `Gemv`, on the tensor cores.
    GemvTensorCore,
    /// For few rows against B stored [k, n].
    GemvColumns(i64),
}

/// The tile of C that a block computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tile {
    /// Uses wgmma, with 192 KB of shared memory.
    W128x256,
    /// Uses wgmma, with 96 KB.
    W128x128,
    /// Uses 192 KB of shared memory.
    T128x256,
    T128x128,
    T64x128,
    T64x64,
}

impl Tile {
    pub(super) fn rows(self) -> i64 {
        match self {
            Tile::W128x256 | Tile::W128x128 | Tile::T128x256 | Tile::T128x128 => 128,
            Tile::T64x128 | Tile::T64x64 => 64,
        }
    }

    pub(super) fn columns(self) -> i64 {
        match self {
            Tile::W128x256 | Tile::T128x256 => 256,
            Tile::W128x128 | Tile::T128x128 | Tile::T64x128 => 128,
            Tile::T64x64 => 64,
        }
    }

    pub(super) fn is_wgmma(self) -> bool {
        matches!(self, Tile::W128x256 | Tile::W128x128)
    }

    pub(super) fn threads(self) -> u32 {
        match self {
            Tile::W128x256 | Tile::W128x128 | Tile::T128x256 => 256,
            _ => 128,
        }
    }

    /// Returns the bytes for four stages of 64 of k, or three; of 32 for 128x128 without wgmma.
    pub(super) fn shared_bytes(self) -> u32 {
        match self {
            Tile::W128x256 | Tile::T128x256 => 4 * (128 + 256) * 64 * 2,
            Tile::W128x128 => 6 * (128 + 128) * 64 * 2,
            Tile::T128x128 => 4 * (128 + 128) * 32 * 2,
            Tile::T64x128 => 3 * (64 + 128) * 64 * 2,
            Tile::T64x64 => 4 * (64 + 64) * 64 * 2,
        }
    }

    /// Returns the elements of C that a multiprocessor finishes in a microsecond at k = 4096, by
    /// the number of blocks it has to do.
    fn rate(self, blocks: i64) -> i64 {
        match (self, blocks) {
            (Tile::W128x256, _) => 670,
            (Tile::W128x128, 0..=1) => 480,
            (Tile::W128x128, _) => 560,
            (Tile::T128x256, _) => 410,
            (Tile::T128x128, 0..=1) => 300,
            (Tile::T128x128, _) => 390,
            (Tile::T64x128, 0..=1) => 225,
            (Tile::T64x128, _) => 340,
            (Tile::T64x64, 0..=1) => 178,
            (Tile::T64x64, 2) => 220,
            (Tile::T64x64, _) => 260,
        }
    }
}

fn div_ceil(a: i64, b: i64) -> i64 {
    a / b + i64::from(a % b != 0)
}

/// Returns the kernel for a product; an operand that it cannot read as it lies is copied first.
pub(super) fn choose(backend: GemmBackend, facts: &Facts) -> Choice {
    match backend {
        GemmBackend::Naive => Choice::Naive,
        // With k = 0 only the plain kernels have anything to do.
        _ if facts.k == 0 => Choice::Tiled,
        GemmBackend::Tiled | GemmBackend::Blocked => Choice::Tiled,
        GemmBackend::Cublas => Choice::Cublas,
        GemmBackend::TensorCore => tensor_core(facts),
        GemmBackend::Auto => few_rows(facts).unwrap_or_else(|| many_rows(facts)),
    }
}

/// Returns the kernel for an order that does not depend on m. Tiles of one kind of instruction give
/// the same bits: each element is one chain of products, 16 of k at a time, from the first to the
/// last.
pub(super) fn choose_ordered(order: SumOrder, facts: &Facts) -> Result<Choice> {
    let parts = match order {
        _ if facts.k == 0 => return Ok(Choice::Tiled),
        SumOrder::Fastest => return Ok(choose(GemmBackend::Auto, facts)),
        SumOrder::ByRow if facts.dtype == DType::F32 => return Ok(Choice::Simt),
        SumOrder::ByRow => {
            let tiles = [Tile::T128x256, Tile::T128x128, Tile::T64x128, Tile::T64x64];
            return Ok(Choice::TensorCore(fastest(facts, &tiles), 1));
        }
        SumOrder::Parts(parts) => i64::from(parts),
    };
    let is_served = facts.has_wgmma
        && facts.dtype != DType::F32
        && (facts.transpose_a, facts.transpose_b) == (false, true)
        && facts.a_in_vectors
        && facts.b_in_vectors;
    match (is_served, parts) {
        (false, _) => Err(Error::internal("gemm: no kernel with k in parts")),
        (true, ..=1) => {
            Ok(Choice::TensorCore(fastest(facts, &[Tile::W128x256, Tile::W128x128]), 1))
        }
        (true, parts) => Ok(Choice::Parts(parts)),
    }
}

/// Weights up to this size are read faster by the kernel for few rows than by cuBLAS; for larger
/// ones cuBLAS is as fast or faster.
const SMALL_WEIGHTS: i64 = 128 << 20;

/// Returns the kernel for few rows, which is bound by reading B.
fn few_rows(facts: &Facts) -> Option<Choice> {
    let Facts { m, n, k, has_cublas, .. } = *facts;
    let reads = facts.a_in_vectors && facts.b_in_vectors;
    if m > 8 || facts.batch != 1 || facts.transpose_a || !facts.b_in_vectors {
        return None;
    }
    if !facts.transpose_b {
        return (!has_cublas).then_some(Choice::GemvColumns(if m == 1 { 1 } else { 8 }));
    }
    if !reads {
        return None;
    }
    if m == 1 {
        return Some(Choice::Gemv(1));
    }
    let by_fma = Choice::Gemv(if m == 2 {
        2
    } else if m <= 4 {
        4
    } else {
        8
    });
    if facts.dtype == DType::F32 || k % 8 != 0 {
        // FMA keeps up with memory for two rows.
        return (m == 2 || !has_cublas).then_some(by_fma);
    }
    let bytes = n.saturating_mul(k).saturating_mul(2);
    // Time in us for 24576x4096 (192 MiB) and 151936x4096 (1187 MiB): m = 2: FMA 48.9, 273, cuBLAS
    // 48.1, 286; m = 4: tensor cores 50.8, 296, cuBLAS 48.1, 287; m = 8: 50.9, 296 and 52.6, 288.
    let own = match m {
        _ if bytes <= SMALL_WEIGHTS => true,
        2 => bytes > 4 * SMALL_WEIGHTS,
        3 | 4 => false,
        _ => bytes <= 4 * SMALL_WEIGHTS,
    };
    match (own || !has_cublas, m) {
        (true, 2) if bytes > SMALL_WEIGHTS => Some(by_fma),
        (true, _) => Some(Choice::GemvTensorCore),
        (false, _) => None,
    }
}

/// Products below this many multiplications are not worth a copy of their operands.
const WORTH_A_COPY: i64 = 1 << 22;

fn many_rows(facts: &Facts) -> Choice {
    if facts.has_cublas {
        return Choice::Cublas;
    }
    let Facts { m, n, k, batch, .. } = *facts;
    let work = m.saturating_mul(n).saturating_mul(k).saturating_mul(batch);
    let reads = facts.a_in_vectors && facts.b_in_vectors;
    if !reads && work < WORTH_A_COPY {
        return Choice::Tiled;
    }
    match facts.dtype {
        DType::F32 if m.min(n) >= 32 => Choice::Simt,
        DType::F32 => Choice::Tiled,
        DType::F16 | DType::BF16 => tensor_core(facts),
    }
}

/// An upper bound of the number of multiprocessors of any chip.
const MAX_MULTIPROCESSORS: usize = 256;

/// Returns the most bytes of partial sums, on any chip, of a product whose result takes `results`
/// bytes in f32 and which sums over `k`: those of [`tensor_core`].
pub(super) fn most_partial_bytes(dtype: DType, results: usize, k: usize) -> usize {
    let splits = (k / 512).min(16);
    if splits < 2 || dtype == DType::F32 {
        return 0;
    }
    // Split products have no more tiles than there are multiprocessors, or three times as many if
    // the tiles are small.
    let tiles = MAX_MULTIPROCESSORS * 128 * 256 * 4;
    // Rows that do not exist are not part of it.
    results.saturating_mul(splits).min(tiles)
}

/// Returns the number of tiles.
fn tiles_of(facts: &Facts, tile: Tile) -> i64 {
    div_ceil(facts.m, tile.rows()) * div_ceil(facts.n, tile.columns()) * facts.batch.max(1)
}

/// Returns the tile that is expected to finish first.
fn fastest(facts: &Facts, tiles: &[Tile]) -> Tile {
    let time = |tile: &Tile| {
        let blocks = div_ceil(tiles_of(facts, *tile), facts.num_multiprocessors);
        // The unit is picoseconds, so that whole numbers tell them apart.
        blocks.saturating_mul(tile.rows() * tile.columns() * 1_000_000) / tile.rate(blocks)
    };
    let fits = |tile: &&Tile| tile.shared_bytes() as usize <= facts.shared_memory_bytes;
    tiles.iter().filter(fits).copied().min_by_key(time).unwrap_or(Tile::T64x64)
}

/// Returns the tile that is expected to finish first, and the number of parts that k is split into.
fn tensor_core(facts: &Facts) -> Choice {
    let Facts { m, k, num_multiprocessors: sms, .. } = *facts;
    let tile = fastest(facts, &[Tile::T128x256, Tile::T128x128, Tile::T64x128, Tile::T64x64]);
    // Few rows are bound by reading B, which needs three blocks per multiprocessor; otherwise one
    // is enough.
    let blocks = if m <= 64 { 3 * sms } else { sms };
    let small = if m <= 64 { Tile::T64x64 } else { tile };
    let splits = (blocks / tiles_of(facts, small).max(1)).min(k / 512).clamp(1, 16);
    if splits > 1 {
        Choice::TensorCore(small, splits)
    } else if facts.has_wgmma {
        Choice::TensorCore(fastest(facts, &[Tile::W128x256, Tile::W128x128, tile]), 1)
    } else {
        Choice::TensorCore(tile, 1)
    }
}

/// Returns the dynamic shared memory that `csrc/common/layouts.cuh` states for the kernels; they
/// check it.
#[cfg(test)]
pub(in crate::ops) fn shared_bytes() -> Vec<(String, u32)> {
    [
        ("wgmma_128x256", Tile::W128x256),
        ("wgmma_128x128", Tile::W128x128),
        ("tensor_core_128x256", Tile::T128x256),
        ("tensor_core_128x128", Tile::T128x128),
        ("tensor_core_64x128", Tile::T64x128),
        ("tensor_core_64x64", Tile::T64x64),
    ]
    .map(|(name, tile)| (format!("gemm_{name}"), tile.shared_bytes()))
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn h200(m: i64, n: i64, k: i64) -> Facts {
        Facts {
            dtype: DType::BF16,
            m,
            n,
            k,
            batch: 1,
            transpose_a: false,
            transpose_b: true,
            a_in_vectors: true,
            b_in_vectors: true,
            has_cublas: true,
            num_multiprocessors: 132,
            shared_memory_bytes: 227 << 10,
            has_wgmma: false,
        }
    }

    #[test]
    fn large_products_take_wgmma_where_it_is() {
        for (facts, tile) in [
            (h200(2048, 6144, 4096), Tile::W128x256),
            (h200(16, 24_576, 4096), Tile::T64x64),
            (h200(16, 4096, 4096), Tile::T64x64),
        ] {
            let facts = Facts { has_wgmma: true, has_cublas: false, ..facts };
            let chosen = choose(GemmBackend::Auto, &facts);
            assert!(matches!(chosen, Choice::TensorCore(t, _) if t == tile), "{chosen:?}");
        }
    }

    #[test]
    fn ordered_products_take_one_family_whatever_the_rows() {
        for m in [1, 2, 8, 33, 128, 129, 2048] {
            let facts = Facts { has_wgmma: true, ..h200(m, 4096, 4096) };
            let by = |order| choose_ordered(order, &facts).unwrap();
            assert!(matches!(by(SumOrder::ByRow), Choice::TensorCore(t, 1) if !t.is_wgmma()));
            assert!(matches!(by(SumOrder::Parts(1)), Choice::TensorCore(t, 1) if t.is_wgmma()));
            assert_eq!(by(SumOrder::Parts(4)), Choice::Parts(4));
            let f32 = Facts { dtype: DType::F32, ..facts };
            assert_eq!(choose_ordered(SumOrder::ByRow, &f32).unwrap(), Choice::Simt);
            assert!(choose_ordered(SumOrder::Parts(2), &f32).is_err());
        }
    }

    #[test]
    fn few_rows_go_to_the_kernels_that_stream_the_weights() {
        let auto = |facts: Facts| choose(GemmBackend::Auto, &facts);
        assert_eq!(auto(h200(1, 151_936, 4096)), Choice::Gemv(1));
        for m in 2..=8 {
            assert_eq!(auto(h200(m, 6144, 4096)), Choice::GemvTensorCore);
            assert_eq!(auto(h200(m, 4096, 12_288)), Choice::GemvTensorCore);
        }
        assert_eq!(auto(h200(2, 24_576, 4096)), Choice::Cublas);
        assert_eq!(auto(h200(2, 151_936, 4096)), Choice::Gemv(2));
        assert_eq!(auto(h200(4, 24_576, 4096)), Choice::Cublas);
        assert_eq!(auto(h200(8, 24_576, 4096)), Choice::GemvTensorCore);
        assert_eq!(auto(h200(8, 151_936, 4096)), Choice::Cublas);
        assert_eq!(auto(h200(9, 6144, 4096)), Choice::Cublas);
        assert_eq!(auto(Facts { transpose_b: false, ..h200(1, 64, 64) }), Choice::Cublas);
        assert_eq!(auto(Facts { a_in_vectors: false, ..h200(1, 64, 64) }), Choice::Cublas);
        assert_eq!(auto(Facts { batch: 2, ..h200(1, 64, 64) }), Choice::Cublas);
    }

    #[test]
    fn without_cublas_our_kernels_serve_everything() {
        let own = |facts: Facts| choose(GemmBackend::Auto, &Facts { has_cublas: false, ..facts });
        let tile = |facts: Facts| match own(facts) {
            Choice::TensorCore(tile, splits) => (tile, splits),
            other => panic!("{other:?}"),
        };
        assert_eq!(tile(h200(2048, 6144, 4096)), (Tile::T128x256, 1));
        assert_eq!(tile(h200(8192, 24_576, 4096)), (Tile::T128x256, 1));
        assert_eq!(tile(h200(512, 6144, 4096)), (Tile::T64x128, 1));
        assert_eq!(tile(h200(512, 4096, 4096)), (Tile::T64x128, 1));
        assert_eq!(tile(h200(128, 4096, 4096)), (Tile::T64x64, 1));
        assert_eq!(tile(h200(16, 4096, 4096)), (Tile::T64x64, 6));
        assert_eq!(tile(h200(16, 24_576, 4096)).1, 1);
        // This is a card with 99 KB of shared memory per block.
        let ada = Facts { shared_memory_bytes: 99 << 10, ..h200(2048, 6144, 4096) };
        assert_eq!(tile(ada), (Tile::T128x128, 1));
        let odd = Facts { b_in_vectors: false, ..h200(33, 33, 33) };
        assert_eq!(own(odd), Choice::Tiled);
        assert_eq!(tile(Facts { b_in_vectors: false, ..h200(1024, 1023, 1023) }).1, 1);
        assert_eq!(own(Facts { dtype: DType::F32, ..h200(512, 512, 512) }), Choice::Simt);
        assert_eq!(own(Facts { transpose_b: false, ..h200(3, 64, 64) }), Choice::GemvColumns(8));
        assert_eq!(own(h200(64, 64, 0)), Choice::Tiled);
    }
}
