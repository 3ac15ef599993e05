//! Rows in the tiles that a unit multiplies: the left operand of [`tile_product`](super::tile_product).

use crate::backend::cpu::simd::{TileKernel, TileSimd, Vector16};
use crate::backend::cpu::tiles::{TILE_K, TILE_LEN, TILE_ROWS};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::Result;
use crate::memory::HostBuffer;
use crate::ops::common::panel_product::grow;

/// The values of a row that are changed at a time.
const GROUP: usize = 128;

/// Writes values as they are in another type.
pub(crate) type Round = fn(&[f32], &mut [f32]);

/// What is done with the values of a row before they are rounded to bf16: nothing by default.
#[derive(Clone, Copy, Default)]
pub(crate) struct Inputs<'a> {
    /// The value that comes to each place; empty if that is the value itself.
    pub order: &'a [u32],
    /// Writes the values of a run of whole groups of 128, or the last ones of a row, as they are in another
    /// type; `None` if that is as they are.
    pub round: Option<Round>,
}

/// Returns the bytes of the tiles of `num_rows` rows of `in_features` values.
pub(crate) fn tiles_bytes(num_rows: usize, in_features: usize) -> usize {
    let rows = num_rows.div_ceil(TILE_ROWS).saturating_mul(TILE_ROWS);
    let columns = in_features.div_ceil(TILE_K).saturating_mul(TILE_K);
    rows.saturating_mul(columns).saturating_mul(size_of::<u16>())
}

/// Rounds rows of `in_features` values to bf16 and arranges them in tiles, [rows of tiles][steps of
/// k], filled up with zeros.
pub(crate) fn make_tiles(
    backend: &CpuBackend,
    x: &[f32],
    in_features: usize,
    inputs: Inputs<'_>,
    tiles: &mut HostBuffer,
) -> Result<()> {
    let num_rows = x.len().checked_div(in_features).unwrap_or(0);
    grow::<u16>(tiles, tiles_bytes(num_rows, in_features) / size_of::<u16>(), "activations")?;
    let num_steps = in_features.div_ceil(TILE_K);
    let target = SendPointer(tiles.as_mut_slice::<u16>().as_mut_ptr());
    let row_len = TILE_ROWS * in_features;
    backend.parallel_tokens(num_rows.div_ceil(TILE_ROWS), row_len, |row_tiles| {
        for row_tile in row_tiles {
            let rows = &x[row_tile * row_len..x.len().min((row_tile + 1) * row_len)];
            // SAFETY: `tiles` has num_steps tiles for each row of tiles, which is given out once.
            let tiles = unsafe {
                let start = target.get().add(row_tile * num_steps * TILE_LEN);
                std::slice::from_raw_parts_mut(start, num_steps * TILE_LEN)
            };
            backend.run_tiles(RowOfTiles { rows, in_features, inputs, tiles });
        }
    })
}

/// Up to 16 rows on their way into a row of tiles.
struct RowOfTiles<'a> {
    rows: &'a [f32],
    in_features: usize,
    inputs: Inputs<'a>,
    tiles: &'a mut [u16],
}

impl TileKernel for RowOfTiles<'_> {
    #[inline(always)]
    fn run<S: TileSimd>(self) {
        let Inputs { order, round } = self.inputs;
        let num_rows = self.rows.len() / self.in_features;
        if num_rows < TILE_ROWS || !self.in_features.is_multiple_of(TILE_K) {
            self.tiles.fill(0);
        }
        for (row, x) in self.rows.chunks_exact(self.in_features).enumerate() {
            let tiles = &mut self.tiles[row * TILE_K..];
            if order.is_empty() && round.is_none() {
                store_row::<S>(x, tiles);
                continue;
            }
            let groups = x.chunks(GROUP).zip(tiles.chunks_mut(GROUP / TILE_K * TILE_LEN));
            for (group, (from, to)) in groups.enumerate() {
                let (mut gathered, mut rounded) = ([0.0; GROUP], [0.0; GROUP]);
                let mut values = from;
                if !order.is_empty() {
                    let order = order.get(group * GROUP..).unwrap_or_default();
                    for (value, &input) in gathered.iter_mut().zip(order) {
                        *value = x.get(input as usize).copied().unwrap_or(0.0);
                    }
                    values = &gathered[..from.len()];
                }
                if let Some(round) = round {
                    round(values, &mut rounded[..from.len()]);
                    values = &rounded[..from.len()];
                }
                store_row::<S>(values, to);
            }
        }
    }
}

/// Writes a row, or a part of it that begins with a tile, to its places in a row of tiles, of which the
/// first is that of `tiles`.
#[inline(always)]
pub(crate) fn store_row<S: TileSimd>(x: &[f32], tiles: &mut [u16]) {
    for (x, place) in x.chunks(TILE_K).zip(tiles.chunks_mut(TILE_LEN)) {
        // SAFETY: this is called by a kernel, which runs for an instruction set that is there; 32 values
        // are read and written, of a copy where there are fewer.
        unsafe {
            let mut filled = [0.0; TILE_K];
            let x = if x.len() < TILE_K {
                filled[..x.len()].copy_from_slice(x);
                &filled
            } else {
                x
            };
            let low = S::Vector::load(x.as_ptr());
            let high = S::Vector::load(x.as_ptr().add(TILE_K / 2));
            S::store_bf16(low, high, place[..TILE_K].as_mut_ptr());
        }
    }
}
