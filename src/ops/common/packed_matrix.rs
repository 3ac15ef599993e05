//! Weight matrices in the layout that the matrix kernels stream.
//!
//! A matrix [out_features, in_features] is cut into panels of 64 output columns. A panel is one
//! contiguous stretch: f32 and f16 `[in_features][64]`, bf16 with pairs of k side by side, as the bf16
//! dot product takes them, in a [`PairOrder`]. The last panel and the last k are padded with zeros.
//! Decoding reads each panel once from front to back; prefill keeps it in the L2 cache.

use crate::backend::cpu::math::{bf16_bits, bf16_to_f32};
use crate::backend::cpu::tiles::{TILE_K, TILE_ROWS};
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::memory::{DType, HostArena, HostBuffer, Plain};
use std::sync::atomic::{AtomicBool, Ordering};

/// The number of output columns of a panel.
pub const PANEL_COLUMNS: usize = 64;

/// The order of the pairs of k and columns of a panel of bf16. Other types have one order only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairOrder {
    /// `[pairs of k][64][2]`: vectors of columns that pass by k together read one stream. In tiles they
    /// would read four, which takes twice as long on a Zen 4 (10 against 25 GB/s of one thread).
    Rows,
    /// `[ceil(in_features / 32)][4][16][16][2]`, tiles of 16 pairs of k by 16 columns, four for each 32
    /// values of k: a tile is one kilobyte without gaps, as units that multiply tiles load it fastest.
    Tiles,
}

impl PairOrder {
    /// Returns the order in which a backend multiplies fastest.
    pub fn of(backend: &CpuBackend) -> Self {
        if backend.has_tiles() {
            PairOrder::Tiles
        } else {
            PairOrder::Rows
        }
    }

    /// Returns the place in a panel of a pair of k, counted in pairs, of a column.
    #[inline(always)]
    pub(crate) const fn place(self, pair: usize, column: usize) -> usize {
        match self {
            PairOrder::Rows => pair * PANEL_COLUMNS + column,
            PairOrder::Tiles => {
                let (step, group) = (pair / TILE_PAIRS, column / TILE_COLUMNS);
                let tile = step * (PANEL_COLUMNS / TILE_COLUMNS) + group;
                (tile * TILE_PAIRS + pair % TILE_PAIRS) * TILE_COLUMNS + column % TILE_COLUMNS
            }
        }
    }
}

/// A weight matrix [out_features, in_features], packed in panels.
#[derive(Debug)]
pub struct PackedMatrix {
    out_features: usize,
    in_features: usize,
    dtype: DType,
    order: PairOrder,
    buffer: HostBuffer,
}

impl PackedMatrix {
    /// Makes a matrix of zeros, to be filled through [`PackedMatrix::writer`]. `order` is for bf16.
    pub fn zeroed(
        out_features: usize,
        in_features: usize,
        dtype: DType,
        order: PairOrder,
    ) -> Result<Self> {
        Self::zeroed_in(&mut HostArena::new(0), out_features, in_features, dtype, order)
    }

    /// The same, with its memory from `arena`.
    pub fn zeroed_in(
        arena: &mut HostArena,
        out_features: usize,
        in_features: usize,
        dtype: DType,
        order: PairOrder,
    ) -> Result<Self> {
        let bytes = Self::bytes_for(out_features, in_features, dtype).ok_or_else(|| {
            Error::invalid_argument(format!(
                "a matrix of {out_features} x {in_features} {dtype} exceeds the address space"
            ))
        })?;
        let buffer = arena.zeroed(bytes)?;
        let order = if dtype == DType::BF16 { order } else { PairOrder::Rows };
        Ok(PackedMatrix { out_features, in_features, dtype, order, buffer })
    }

    /// Returns the bytes that a matrix of this shape takes in memory, padding included; `None` on
    /// overflow.
    pub fn bytes_for(out_features: usize, in_features: usize, dtype: DType) -> Option<usize> {
        let columns = out_features.checked_next_multiple_of(PANEL_COLUMNS)?;
        let rows = in_features.checked_next_multiple_of(k_padding(dtype))?;
        columns.checked_mul(rows)?.checked_mul(dtype.size_bytes())
    }

    /// Returns the number of rows of the matrix, which is the width of its results.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Returns the number of columns of the matrix, which is the width of its inputs.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// The element type held.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the order of pairs; rows for all types but bf16.
    pub(crate) fn order(&self) -> PairOrder {
        self.order
    }

    /// Whether panels lie in tiles, which only those of bf16 do.
    pub(crate) fn is_in_tiles(&self) -> bool {
        self.order == PairOrder::Tiles
    }

    /// Returns the bytes in memory, padding included.
    pub fn size_bytes(&self) -> usize {
        self.buffer.len_bytes()
    }

    /// Returns the number of panels.
    pub(crate) fn num_panels(&self) -> usize {
        self.out_features.div_ceil(PANEL_COLUMNS)
    }

    /// Returns the number of elements of one panel, padding included.
    pub(crate) fn panel_len(&self) -> usize {
        self.in_features.next_multiple_of(k_padding(self.dtype)) * PANEL_COLUMNS
    }

    /// Returns all panels, as elements of the size of [`PackedMatrix::dtype`].
    pub(crate) fn panels<T: Plain>(&self) -> &[T] {
        self.buffer.as_slice()
    }

    /// Returns all panels for writing, as elements of the size of [`PackedMatrix::dtype`]; what pads
    /// them must stay zero.
    pub(crate) fn panels_mut<T: Plain>(&mut self) -> &mut [T] {
        let len = self.num_panels() * self.panel_len();
        &mut self.buffer.as_mut_slice()[..len]
    }

    /// Gives up the rows of the matrix past the first `out_features`, if there are more.
    pub(crate) fn keep_rows(&mut self, out_features: usize) {
        self.out_features = self.out_features.min(out_features);
    }

    /// Returns the writer that fills the matrix; it may be shared by several threads.
    pub fn writer(&mut self) -> Result<PanelWriter<'_>> {
        let mut busy = crate::error::try_with_capacity(self.num_panels(), "panel locks")?;
        busy.resize_with(self.num_panels(), || AtomicBool::new(false));
        Ok(PanelWriter {
            out_features: self.out_features,
            in_features: self.in_features,
            dtype: self.dtype,
            order: self.order,
            panel_bytes: self.panel_len() * self.dtype.size_bytes(),
            start: self.buffer.as_bytes_mut().as_mut_ptr(),
            busy,
            _matrix: std::marker::PhantomData,
        })
    }

    /// Writes row `row` ([in_features]) to `out` as f32: the embedding of a token when the output
    /// matrix is the embedding table.
    pub fn row_to_f32(&self, row: usize, out: &mut [f32]) -> Result<()> {
        if row >= self.out_features || out.len() != self.in_features {
            return Err(Error::internal(format!(
                "row {row} into {} values, of a matrix of {} x {}",
                out.len(),
                self.out_features,
                self.in_features
            )));
        }
        let panel_len = self.panel_len();
        let (panel, column) = (row / PANEL_COLUMNS, row % PANEL_COLUMNS);
        let range = panel * panel_len..(panel + 1) * panel_len;
        match self.dtype {
            DType::F32 => {
                let values = self.panels::<f32>()[range][column..].iter().step_by(PANEL_COLUMNS);
                out.iter_mut().zip(values).for_each(|(o, &v)| *o = v);
            }
            DType::F16 => {
                let values = self.panels::<u16>()[range][column..].iter().step_by(PANEL_COLUMNS);
                out.iter_mut()
                    .zip(values)
                    .for_each(|(o, &v)| *o = half::f16::from_bits(v).to_f32_const());
            }
            DType::BF16 => {
                let (pairs, _) = self.panels::<u16>()[range].as_chunks::<2>();
                for (k, out) in out.chunks_mut(2).enumerate() {
                    let pair = pairs[self.order.place(k, column)];
                    out.iter_mut().zip(pair).for_each(|(o, v)| *o = bf16_to_f32(v));
                }
            }
        }
        Ok(())
    }
}

/// Returns how many values of k lie side by side in a panel.
pub(crate) const fn k_step(dtype: DType) -> usize {
    match dtype {
        DType::BF16 => 2,
        DType::F32 | DType::F16 => 1,
    }
}

/// Returns what the values of k of a panel are padded to a multiple of.
pub(crate) const fn k_padding(dtype: DType) -> usize {
    match dtype {
        DType::BF16 => TILE_K,
        DType::F32 | DType::F16 => 1,
    }
}

/// The pairs of k and the columns of a tile of a panel of bf16 in [`PairOrder::Tiles`].
const TILE_PAIRS: usize = TILE_K / 2;
const TILE_COLUMNS: usize = TILE_ROWS;

/// Fills a [`PackedMatrix`] from rows or columns as they come from a file.
///
/// It may be used from several threads at once. Each panel of 64 rows is locked while it is
/// written, so threads are fastest when they write different panels.
pub struct PanelWriter<'a> {
    out_features: usize,
    in_features: usize,
    dtype: DType,
    order: PairOrder,
    panel_bytes: usize,
    start: *mut u8,
    busy: Vec<AtomicBool>,
    _matrix: std::marker::PhantomData<&'a mut PackedMatrix>,
}

// SAFETY: `start` points into the matrix that this writer borrows exclusively; it may go to
// another thread as `&mut PackedMatrix` may.
unsafe impl Send for PanelWriter<'_> {}
// SAFETY: panels are only reached through `with_panel`, which gives one out to one thread at a
// time.
unsafe impl Sync for PanelWriter<'_> {}

impl PanelWriter<'_> {
    /// Writes rows `first_row..` of the matrix. `rows` is [n, in_features], row-major,
    /// little-endian, of type `source`; it is converted (rounded to nearest even) to the type of
    /// the matrix.
    pub fn pack_rows(&self, first_row: usize, rows: &[u8], source: DType) -> Result<()> {
        let row_bytes = self.in_features * source.size_bytes();
        if row_bytes == 0 {
            return Ok(());
        }
        let num_rows = rows.len() / row_bytes;
        if !rows.len().is_multiple_of(row_bytes)
            || first_row.checked_add(num_rows).is_none_or(|end| end > self.out_features)
        {
            return Err(Error::internal(format!(
                "{} bytes of {source} at row {first_row} of a matrix of {} x {}",
                rows.len(),
                self.out_features,
                self.in_features
            )));
        }
        let mut row = first_row;
        while row < first_row + num_rows {
            let panel = row / PANEL_COLUMNS;
            let end = ((panel + 1) * PANEL_COLUMNS).min(first_row + num_rows);
            let bytes = &rows[(row - first_row) * row_bytes..(end - first_row) * row_bytes];
            let column = row % PANEL_COLUMNS;
            self.with_panel(panel, |panel| {
                self.write(panel, column, 0, bytes, source, self.in_features);
            });
            row = end;
        }
        Ok(())
    }

    /// Writes part of the matrix from a weight stored [in_features, out_features], as GPT-2's are:
    /// `rows` is [num_k, n] for k in `first_k..first_k + num_k` and outputs
    /// `column_offset..column_offset + n`. For bf16 `first_k` must be even.
    pub fn pack_columns(
        &self,
        first_k: usize,
        num_k: usize,
        column_offset: usize,
        rows: &[u8],
        source: DType,
    ) -> Result<()> {
        if num_k == 0 {
            return Ok(());
        }
        let row_bytes = rows.len() / num_k;
        let num_columns = row_bytes / source.size_bytes();
        if rows.len() != num_k * num_columns * source.size_bytes()
            || first_k.checked_add(num_k).is_none_or(|end| end > self.in_features)
            || column_offset.checked_add(num_columns).is_none_or(|end| end > self.out_features)
            || !first_k.is_multiple_of(k_step(self.dtype))
        {
            return Err(Error::internal(format!(
                "{} bytes of {source} as {num_k} rows from k {first_k}, column {column_offset}, of a \
                 matrix of {} x {}",
                rows.len(),
                self.out_features,
                self.in_features
            )));
        }
        let mut output = column_offset;
        while output < column_offset + num_columns {
            let panel = output / PANEL_COLUMNS;
            let end = ((panel + 1) * PANEL_COLUMNS).min(column_offset + num_columns);
            let column = output % PANEL_COLUMNS;
            let count = end - output;
            let from = (output - column_offset) * source.size_bytes();
            self.with_panel(panel, |panel| {
                for k in 0..num_k {
                    let bytes = &rows[k * row_bytes + from..][..count * source.size_bytes()];
                    self.write(panel, column, first_k + k, bytes, source, 1);
                }
            });
            output = end;
        }
        Ok(())
    }

    /// Writes `bytes`, [columns, num_k] of `source`, into a panel from column `column` and k `first_k`.
    fn write(
        &self,
        panel: &mut [u8],
        column: usize,
        first_k: usize,
        bytes: &[u8],
        source: DType,
        num_k: usize,
    ) {
        let (order, place) = (self.order, (column, first_k));
        match self.dtype {
            DType::F32 => transpose::<f32, 1>(panel, order, place, bytes, source, num_k),
            DType::F16 => transpose::<half::f16, 1>(panel, order, place, bytes, source, num_k),
            DType::BF16 => transpose::<half::bf16, 2>(panel, order, place, bytes, source, num_k),
        }
    }

    /// Locks a panel and gives its bytes to `write`.
    fn with_panel(&self, panel: usize, write: impl FnOnce(&mut [u8])) {
        let lock = &self.busy[panel];
        while lock.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            std::thread::yield_now();
        }
        // SAFETY: panel < num_panels (the index above checks it), so the range lies in the matrix
        // that `self` borrows exclusively; the lock makes this the only reference to the panel.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(
                self.start.add(panel * self.panel_bytes),
                self.panel_bytes,
            )
        };
        let _unlock = Unlock(lock);
        write(bytes);
    }
}

/// Unlocks a panel also when its writer panics: another thread may be waiting for it.
struct Unlock<'a>(&'a AtomicBool);

impl Drop for Unlock<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// An element type that panels hold.
trait Stored: Copy {
    const DTYPE: DType;
    fn from_f32(x: f32) -> Self;
    /// Returns its bytes in the machine's order, as panels are read.
    fn to_ne(self) -> [u8; 4];
}

impl Stored for f32 {
    const DTYPE: DType = DType::F32;
    fn from_f32(x: f32) -> Self {
        x
    }
    fn to_ne(self) -> [u8; 4] {
        self.to_ne_bytes()
    }
}

impl Stored for half::f16 {
    const DTYPE: DType = DType::F16;
    fn from_f32(x: f32) -> Self {
        half::f16::from_f32_const(x)
    }
    fn to_ne(self) -> [u8; 4] {
        let [a, b] = self.to_bits().to_ne_bytes();
        [a, b, 0, 0]
    }
}

impl Stored for half::bf16 {
    const DTYPE: DType = DType::BF16;
    fn from_f32(x: f32) -> Self {
        half::bf16::from_bits(bf16_bits(x))
    }
    fn to_ne(self) -> [u8; 4] {
        let [a, b] = self.to_bits().to_ne_bytes();
        [a, b, 0, 0]
    }
}

/// Returns element `index` of `bytes`, little-endian, of type `source`, as f32.
#[inline]
fn read_f32(bytes: &[u8], index: usize, source: DType) -> f32 {
    match source {
        DType::F32 => {
            let b = &bytes[4 * index..4 * index + 4];
            f32::from_le_bytes([b[0], b[1], b[2], b[3]])
        }
        DType::F16 => {
            half::f16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f32_const()
        }
        DType::BF16 => bf16_to_f32(u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]])),
    }
}

/// Writes `bytes`, [columns, num_k] of `source`, into a panel from column `column` and k `first_k`.
fn transpose<T: Stored, const K_STEP: usize>(
    panel: &mut [u8],
    order: PairOrder,
    (column, first_k): (usize, usize),
    bytes: &[u8],
    source: DType,
    num_k: usize,
) {
    // The usual case, a checkpoint's own type, moves bytes and converts nothing.
    if source == T::DTYPE && cfg!(target_endian = "little") && num_k.is_multiple_of(K_STEP) {
        // Pairs of k are words of four bytes; `first_k` is even.
        let (first, words) = (first_k / K_STEP, num_k / K_STEP);
        return match K_STEP * T::DTYPE.size_bytes() {
            2 => move_words::<2>(panel, order, (column, first), bytes, words),
            _ => move_words::<4>(panel, order, (column, first), bytes, words),
        };
    }
    let columns = bytes.len() / (num_k * source.size_bytes());
    let size = T::DTYPE.size_bytes();
    for c in 0..columns {
        for k in 0..num_k {
            let value = T::from_f32(read_f32(bytes, c * num_k + k, source)).to_ne();
            let k = first_k + k;
            let index = order.place(k / K_STEP, column + c) * K_STEP + k % K_STEP;
            panel[index * size..(index + 1) * size].copy_from_slice(&value[..size]);
        }
    }
}

/// Moves [columns, num_words] words of SIZE bytes into a panel from column `column` and word
/// `first_word`, in squares small enough that both sides stay in the first-level cache.
fn move_words<const SIZE: usize>(
    panel: &mut [u8],
    order: PairOrder,
    (column, first_word): (usize, usize),
    bytes: &[u8],
    num_words: usize,
) {
    const SQUARE: usize = TILE_COLUMNS;
    let (from, _) = bytes.as_chunks::<SIZE>();
    let (to, _) = panel.as_chunks_mut::<SIZE>();
    let columns = from.len() / num_words.max(1);
    let mut start = 0;
    while start < columns {
        // Columns of a tile are neighbours, and so are those of a row.
        let group = start..columns.min(start + SQUARE - (column + start) % SQUARE);
        for first in (0..num_words).step_by(SQUARE) {
            for word in first..num_words.min(first + SQUARE) {
                let place = order.place(first_word + word, column + start);
                let to = &mut to[place..place + group.len()];
                for (to, c) in to.iter_mut().zip(group.clone()) {
                    *to = from[c * num_words + word];
                }
            }
        }
        start = group.end;
    }
}
