//! Products of bf16 on a unit that multiplies tiles: op(A) is arranged in tiles once, op(B) in
//! panels, as many columns at a time as a bounded buffer holds.

use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::tiles::{TILE_K, TILE_LEN, TILE_ROWS};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::Result;
use crate::memory::{DType, HostBuffer};
use crate::ops::common::cpu_turn::{Exact, Turn};
use crate::ops::common::packed_matrix::{PackedMatrix, PairOrder, PANEL_COLUMNS};
use crate::ops::common::panel_product::{grow, Epilogue};
use crate::ops::common::tile_product::{multiply, EachPanel};
use crate::ops::common::tile_rows::tiles_bytes;
use crate::ops::gemm::cpu_shape::Gemm;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use std::marker::PhantomData;

/// The most bytes of op(B) that are arranged at a time, unless one panel has more.
const BLOCK_BYTES: usize = 4 << 20;
/// The sides of the squares in which matrices are turned: tiles of a panel, in pairs of k.
const SQUARE: usize = TILE_ROWS;

/// Buffers that products in tiles need; they grow to the largest call and are then reused.
#[derive(Debug, Default)]
pub(super) struct TileScratch {
    tiles: HostBuffer,
    sums: HostBuffer,
}

/// Passes all sums of op(A) op(B) to the epilogue that `finish` makes for the columns from a first
/// one on.
///
/// # Safety
/// The backend has tiles, m, n and k are not zero, and A and B hold what `gemm` says.
pub(super) unsafe fn product<P: Epilogue>(
    backend: &CpuBackend,
    gemm: &Gemm,
    a: &[bf16],
    b: &[bf16],
    finish: impl Fn(usize) -> P,
    scratch: &mut TileScratch,
) -> Result<()> {
    let Gemm { m, n, k, .. } = *gemm;
    let TileScratch { tiles, sums } = scratch;
    make_tiles(backend, gemm, a.reinterpret_cast(), tiles)?;
    let padded = k.checked_next_multiple_of(TILE_K).unwrap_or(usize::MAX);
    let panel_bytes = PANEL_COLUMNS.saturating_mul(padded).saturating_mul(size_of::<bf16>());
    let block = (BLOCK_BYTES / panel_bytes).max(1).saturating_mul(PANEL_COLUMNS);
    let mut right = PackedMatrix::zeroed(n.min(block), k, DType::BF16, PairOrder::Tiles)?;
    for first in (0..n).step_by(block) {
        right.keep_rows(n - first);
        let panel_len = right.panel_len();
        let panels = right.panels_mut::<u16>();
        backend.parallel_rows(panels, panel_len, |panel, to| {
            for (i, to) in to.chunks_exact_mut(panel_len).enumerate() {
                let first_column = first + (panel + i) * PANEL_COLUMNS;
                backend.run(MakePanel { gemm, b: b.reinterpret_cast(), first_column, to });
            }
        })?;
        let epilogue = EachPanel(finish(first));
        // SAFETY: the backend has tiles, by contract; the matrix is bf16 with k inputs, and the
        // tiles are those of m rows of k values.
        unsafe { multiply(backend, tiles.as_slice(), m, &right, &epilogue, sums) }?;
    }
    Ok(())
}

/// Arranges op(A) in tiles, [rows of tiles][steps of k], filled up with zeros.
fn make_tiles(backend: &CpuBackend, gemm: &Gemm, a: &[u16], tiles: &mut HostBuffer) -> Result<()> {
    let Gemm { m, k, lda, transpose_a, .. } = *gemm;
    grow::<u16>(tiles, tiles_bytes(m, k) / size_of::<u16>(), "tiles of a product")?;
    let row_len = k.div_ceil(TILE_K) * TILE_LEN;
    let target = SendPointer(tiles.as_mut_slice::<u16>().as_mut_ptr());
    backend.parallel_tokens(m.div_ceil(TILE_ROWS), row_len, |row_tiles| {
        for row_tile in row_tiles {
            // SAFETY: `tiles` has row_len elements for each row of tiles, which is given out once.
            let to = unsafe {
                std::slice::from_raw_parts_mut(target.get().add(row_tile * row_len), row_len)
            };
            let rows = row_tile * TILE_ROWS..m.min((row_tile + 1) * TILE_ROWS);
            if rows.len() < TILE_ROWS || !k.is_multiple_of(TILE_K) {
                to.fill(0);
            }
            if transpose_a {
                for (l, from) in a.chunks(lda).take(k).enumerate() {
                    let to = &mut to[l / TILE_K * TILE_LEN + l % TILE_K..];
                    let places = to.iter_mut().step_by(TILE_K);
                    places.zip(&from[rows.clone()]).for_each(|(to, &x)| *to = x);
                }
            } else {
                for (r, row) in rows.enumerate() {
                    let from = a[row * lda..][..k].chunks(TILE_K);
                    for (from, to) in from.zip(to[r * TILE_K..].chunks_mut(TILE_LEN)) {
                        to[..from.len()].copy_from_slice(from);
                    }
                }
            }
        }
    })
}

/// Makes the panel of op(B) that begins with a column, as a [`PackedMatrix`] has it; what is past
/// column n and past k is zero.
struct MakePanel<'a> {
    gemm: &'a Gemm,
    b: &'a [u16],
    first_column: usize,
    to: &'a mut [u16],
}

impl Kernel for MakePanel<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let MakePanel { gemm: &Gemm { n, k, ldb, transpose_b, .. }, b, first_column, to } = self;
        let columns = (n - first_column).min(PANEL_COLUMNS);
        if columns < PANEL_COLUMNS || !k.is_multiple_of(TILE_K) {
            to.fill(0);
        }
        if !transpose_b {
            return interleave(k, |l| &b[l * ldb + first_column..][..columns], to);
        }
        let b = &b[first_column * ldb..];
        // SAFETY: any two u16 are an f32, whose bits are moved and nothing else.
        let (before, words, _) = unsafe { b.align_to::<f32>() };
        // SAFETY: as above.
        let (_, to_words, _) = unsafe { to.align_to_mut::<f32>() };
        if before.is_empty() && k.is_multiple_of(2) && ldb.is_multiple_of(2) {
            for column in (0..columns).step_by(TILE_ROWS) {
                for pair in (0..k / 2).step_by(TILE_K / 2) {
                    Turn::<f32, f32, Exact<f32>> {
                        from: &words[column * (ldb / 2) + pair..],
                        from_stride: ldb / 2,
                        rows: TILE_ROWS.min(columns - column),
                        columns: (TILE_K / 2).min(k / 2 - pair),
                        to: &mut to_words[PairOrder::Tiles.place(pair, column)..],
                        to_stride: TILE_ROWS,
                        _element: PhantomData,
                    }
                    .run::<S>();
                }
            }
        } else {
            turn_pairs(k, columns, |column| &b[column * ldb..][..k], to);
        }
    }
}

/// Writes rows of op(B), two at a time, value beside value.
#[inline(always)]
fn interleave<'a>(k: usize, row: impl Fn(usize) -> &'a [u16], to: &mut [u16]) {
    let (pairs, _) = to.as_chunks_mut::<2>();
    for pair in 0..k.div_ceil(2) {
        let even = row(2 * pair);
        let odd = if 2 * pair + 1 < k { row(2 * pair + 1) } else { &[] };
        for (group, even) in even.chunks(TILE_ROWS).enumerate() {
            let to = &mut pairs[PairOrder::Tiles.place(pair, group * TILE_ROWS)..][..even.len()];
            if odd.is_empty() {
                to.iter_mut().zip(even).for_each(|(to, &x)| *to = [x, 0]);
            } else {
                let values = even.iter().zip(&odd[group * TILE_ROWS..]);
                to.iter_mut().zip(values).for_each(|(to, (&x, &y))| *to = [x, y]);
            }
        }
    }
}

/// Writes columns of op(B) that cannot be read in words.
#[inline(always)]
fn turn_pairs<'a>(k: usize, columns: usize, column: impl Fn(usize) -> &'a [u16], to: &mut [u16]) {
    let (pairs, _) = to.as_chunks_mut::<2>();
    for first in (0..columns).step_by(SQUARE) {
        for from in (0..k).step_by(2 * SQUARE) {
            for c in first..columns.min(first + SQUARE) {
                let (values, last) = column(c)[from..k.min(from + 2 * SQUARE)].as_chunks::<2>();
                let mut places =
                    pairs[PairOrder::Tiles.place(from / 2, c)..].iter_mut().step_by(TILE_ROWS);
                for (&pair, place) in values.iter().zip(&mut places) {
                    *place = pair;
                }
                if let (Some(&last), Some(place)) = (last.first(), places.next()) {
                    *place = [last, 0];
                }
            }
        }
    }
}
