//! Quantised matrices in the layout that the kernels of the CPU stream.
//!
//! As in a [`PackedMatrix`](crate::ops::common::packed_matrix::PackedMatrix), 64 output columns make
//! a panel, one contiguous stretch. It consists of a block for each group of inputs, one after the
//! other: 64 scales, 64 zeros as bytes where the format has them, and the codes of each input, 64
//! in a row. Codes of 4 bits share bytes with those 32 columns further, which are the high halves;
//! codes and zeros of 8-bit integers are kept less 128, as signed bytes.

use super::format::{Code, QuantFormat};
use super::matrix::QuantisedMatrix;
use crate::backend::cpu::simd::{Kernel, Simd, Vector16};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::{try_with_capacity, Error, Result};
use crate::memory::{DType, HostBuffer, Pages};
use crate::ops::common::packed_matrix::PANEL_COLUMNS;

/// A quantised weight matrix [out_features, in_features], packed in panels.
#[derive(Debug)]
pub struct QuantisedPanels {
    out_features: usize,
    in_features: usize,
    format: QuantFormat,
    /// See [`QuantisedMatrix::order`].
    order: Vec<u32>,
    buffer: HostBuffer,
}

/// The bytes of the codes of one input for all columns of a panel.
const fn codes_bytes(code: Code) -> usize {
    code.row_bytes(PANEL_COLUMNS)
}

/// The bytes before the codes of a group.
fn head_bytes(format: &QuantFormat) -> usize {
    PANEL_COLUMNS * (format.scale.size_bytes() + usize::from(format.has_zeros))
}

impl QuantisedPanels {
    /// Returns the bytes that a matrix of this shape takes in memory, padding included; `None` on
    /// overflow.
    pub fn bytes_for(
        out_features: usize,
        in_features: usize,
        format: &QuantFormat,
        is_ordered: bool,
    ) -> Option<usize> {
        let codes = in_features.checked_mul(codes_bytes(format.code))?;
        let heads = format.num_groups(in_features).checked_mul(head_bytes(format))?;
        let panels = codes.checked_add(heads)?.checked_mul(out_features.div_ceil(PANEL_COLUMNS))?;
        panels.checked_add(if is_ordered { in_features.checked_mul(4)? } else { 0 })
    }

    /// Packs a matrix, on all threads.
    pub fn pack(backend: &CpuBackend, matrix: &QuantisedMatrix) -> Result<Self> {
        let (out_features, in_features) = (matrix.out_features, matrix.in_features);
        let format = matrix.format;
        let bytes = Self::bytes_for(out_features, in_features, &format, false)
            .ok_or_else(|| Error::out_of_memory("a weight matrix", usize::MAX))?;
        let mut order = try_with_capacity(matrix.order.len(), "the order of inputs")?;
        order.extend_from_slice(&matrix.order);
        let mut panels = QuantisedPanels {
            out_features,
            in_features,
            format,
            order,
            buffer: HostBuffer::zeroed(bytes, Pages::Huge)?,
        };
        let panel_bytes = panels.panel_bytes();
        let num_panels = out_features.div_ceil(PANEL_COLUMNS);
        let start = SendPointer(panels.buffer.as_bytes_mut().as_mut_ptr());
        backend.parallel_for(num_panels, &|panel| {
            // SAFETY: the buffer has num_panels > panel panels of panel_bytes each, and every panel
            // is given out once.
            let bytes = unsafe {
                std::slice::from_raw_parts_mut(start.get().add(panel * panel_bytes), panel_bytes)
            };
            pack_panel(matrix, panel * PANEL_COLUMNS, bytes);
        })?;
        Ok(panels)
    }

    /// Returns the number of rows of the matrix, which is the width of its results.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Returns the number of columns of the matrix, which is the width of its inputs.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// How the numbers are stored.
    pub fn format(&self) -> QuantFormat {
        self.format
    }

    /// Returns the bytes in memory, padding included.
    pub fn size_bytes(&self) -> usize {
        self.buffer.len_bytes() + self.order.len() * size_of::<u32>()
    }

    /// The input that stands at each place of a row; empty if that is the input itself.
    pub(crate) fn order(&self) -> &[u32] {
        &self.order
    }

    /// Returns the number of panels.
    pub(crate) fn num_panels(&self) -> usize {
        self.out_features.div_ceil(PANEL_COLUMNS)
    }

    fn panel_bytes(&self) -> usize {
        self.format.num_groups(self.in_features) * head_bytes(&self.format)
            + self.in_features * codes_bytes(self.format.code)
    }

    /// Returns the groups of a panel, from the first to the last.
    #[inline(always)]
    pub(crate) fn groups(&self, panel: usize) -> impl Iterator<Item = Group<'_>> {
        let (len, head) = (self.panel_bytes(), head_bytes(&self.format));
        let scales_bytes = PANEL_COLUMNS * self.format.scale.size_bytes();
        let group_size = self.format.group_size.max(1);
        let mut rest = self.buffer.as_bytes().get(panel * len..(panel + 1) * len).unwrap_or(&[]);
        let mut first = 0;
        std::iter::from_fn(move || {
            let num_places = group_size.min(self.in_features - first);
            let bytes = head + num_places * codes_bytes(self.format.code);
            if num_places == 0 || rest.len() < bytes {
                return None;
            }
            let (block, after) = rest.split_at(bytes);
            let (head, codes) = block.split_at(head);
            let (scales, zeros) = head.split_at(scales_bytes);
            rest = after;
            first += num_places;
            Some(Group { format: &self.format, scales, zeros, codes, first: first - num_places })
        })
    }

    /// Writes row `row` ([in_features]) to `out` as f32, in the order of the inputs.
    pub fn row_to_f32(&self, row: usize, out: &mut [f32]) -> Result<()> {
        if row >= self.out_features || out.len() != self.in_features {
            return Err(Error::internal(format!(
                "row {row} into {} values, of a matrix of {} x {}",
                out.len(),
                self.out_features,
                self.in_features
            )));
        }
        let (panel, column) = (row / PANEL_COLUMNS, row % PANEL_COLUMNS);
        let (vector, lane) = (column / 16, column % 16);
        for group in self.groups(panel) {
            let mut values = [0.0_f32; 16];
            for place in group.places() {
                // SAFETY: plain Rust, and `values` has 16 elements.
                unsafe { group.weights::<[f32; 16]>(place, vector).store(values.as_mut_ptr()) };
                let input = self.order.get(place).map_or(place, |&input| input as usize);
                if let Some(out) = out.get_mut(input) {
                    *out = values[lane];
                }
            }
        }
        Ok(())
    }
}

/// A group of inputs of the 64 columns of a panel.
pub(crate) struct Group<'a> {
    format: &'a QuantFormat,
    scales: &'a [u8],
    zeros: &'a [u8],
    codes: &'a [u8],
    /// The first place of the group.
    first: usize,
}

impl Group<'_> {
    /// The places of the group in a row.
    #[inline(always)]
    pub fn places(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.codes.len() / codes_bytes(self.format.code)
    }

    /// The scales of columns `16 * vector..` and what is subtracted from their codes.
    ///
    /// # Safety
    /// The instruction set of `V` is there; `vector` is less than 4.
    #[inline(always)]
    pub unsafe fn factors<V: Vector16>(&self, vector: usize) -> (V, V) {
        let scales = self.scales.as_ptr();
        // SAFETY: 64 scales of the type that the format says, and 64 zeros if it has any.
        unsafe {
            let scale = match self.format.scale {
                DType::F32 => V::load(scales.add(64 * vector).cast()),
                DType::F16 => V::load_f16(scales.add(32 * vector).cast()),
                DType::BF16 => V::load_bf16(scales.add(32 * vector).cast()),
            };
            let zero = match (self.format.has_zeros, self.format.code) {
                (true, _) => V::load_i8(self.zeros.as_ptr().add(16 * vector)),
                (false, Code::Int4) => V::splat(8.0),
                (false, _) => V::zero(),
            };
            (scale, zero)
        }
    }

    /// The codes at `place` of two runs of 16 columns: for 4 bits those from `16 * pair` and from
    /// `32 + 16 * pair` on, for 8 bits those from `32 * pair` on.
    ///
    /// # Safety
    /// The instruction set of `V` is there; `place` is one of [`Group::places`], `pair` less than 2.
    #[inline(always)]
    pub unsafe fn codes<V: Vector16>(&self, code: Code, place: usize, pair: usize) -> (V, V) {
        // SAFETY: the place has 64 codes, which lie within `codes`.
        unsafe {
            let codes = self.codes.as_ptr().add((place - self.first) * codes_bytes(code));
            match code {
                Code::Int4 => V::load_nibbles(codes.add(16 * pair)),
                Code::Int8 => {
                    (V::load_i8(codes.add(32 * pair)), V::load_i8(codes.add(32 * pair + 16)))
                }
                Code::Fp8 => {
                    (V::load_fp8(codes.add(32 * pair)), V::load_fp8(codes.add(32 * pair + 16)))
                }
            }
        }
    }

    /// The weights at `place` of columns `16 * vector..`.
    ///
    /// # Safety
    /// As [`Group::factors`] and [`Group::codes`].
    #[inline(always)]
    unsafe fn weights<V: Vector16>(&self, place: usize, vector: usize) -> V {
        // SAFETY: passed on to the caller.
        unsafe {
            let (scale, zero) = self.factors::<V>(vector);
            let code = self.format.code;
            let (pair, is_second) = pair_of(code, vector);
            let (first, second) = self.codes::<V>(code, place, pair);
            (if is_second { second } else { first }).sub(zero).mul(scale)
        }
    }
}

/// Where the codes of columns `16 * vector..` are: the pair of runs, and whether they are its second.
#[inline(always)]
pub(crate) const fn pair_of(code: Code, vector: usize) -> (usize, bool) {
    match code {
        Code::Int4 => (vector % 2, vector / 2 == 1),
        Code::Int8 | Code::Fp8 => (vector / 2, vector % 2 == 1),
    }
}

/// The runs of 16 columns that [`Group::codes`] gives for a pair.
#[inline(always)]
pub(crate) const fn vectors_of(code: Code, pair: usize) -> [usize; 2] {
    match code {
        Code::Int4 => [pair, pair + 2],
        Code::Int8 | Code::Fp8 => [2 * pair, 2 * pair + 1],
    }
}

/// Writes the panel of the rows of `matrix` from `first_row` on into zeroed bytes.
fn pack_panel(matrix: &QuantisedMatrix, first_row: usize, mut panel: &mut [u8]) {
    let format = &matrix.format;
    let (head, codes_len) = (head_bytes(format), codes_bytes(format.code));
    let scale_bytes = format.scale.size_bytes();
    let rows = first_row..matrix.out_features.min(first_row + PANEL_COLUMNS);
    let group_size = format.group_size.max(1);
    for group in 0..matrix.num_groups() {
        let first = group * group_size;
        let num_places = group_size.min(matrix.in_features - first);
        let taken = std::mem::take(&mut panel);
        let Some((block, after)) = taken.split_at_mut_checked(head + num_places * codes_len) else {
            return;
        };
        panel = after;
        let (head, codes) = block.split_at_mut(head);
        let (scales, zeros) = head.split_at_mut(PANEL_COLUMNS * scale_bytes);
        for (column, row) in rows.clone().enumerate() {
            let (scale, zero) = matrix.group(row, group);
            if let Some(place) = scales.get_mut(column * scale_bytes..(column + 1) * scale_bytes) {
                store_scale(place, scale, format.scale);
            }
            if let Some(place) = zeros.get_mut(column) {
                *place = if format.code == Code::Int8 { zero ^ 0x80 } else { zero };
            }
            let row_codes = matrix.row_codes(row);
            let columns = codes.chunks_exact_mut(codes_len);
            match format.code {
                Code::Int4 => {
                    let (byte, shift) = (column % 32, column / 32 * 4);
                    for (place, out) in (first..).zip(columns) {
                        let code =
                            row_codes.get(place / 2).map_or(0, |b| b >> (place % 2 * 4) & 15);
                        if let Some(out) = out.get_mut(byte) {
                            *out |= code << shift;
                        }
                    }
                }
                Code::Int8 | Code::Fp8 => {
                    let flip = if format.code == Code::Int8 { 0x80 } else { 0 };
                    let row_codes = row_codes.get(first..).unwrap_or_default();
                    for (&code, out) in row_codes.iter().zip(columns) {
                        if let Some(out) = out.get_mut(column) {
                            *out = code ^ flip;
                        }
                    }
                }
            }
        }
    }
}

/// Writes a scale, which the type holds without rounding, in the order of the machine.
pub(crate) fn store_scale(place: &mut [u8], scale: f32, dtype: DType) {
    match dtype {
        DType::F32 => place.copy_from_slice(&scale.to_ne_bytes()),
        DType::F16 => place.copy_from_slice(&half::f16::from_f32(scale).to_ne_bytes()),
        DType::BF16 => place.copy_from_slice(&half::bf16::from_f32(scale).to_ne_bytes()),
    }
}

/// Writes the weights of a panel as f32, [in_features][64], in the order of the places.
pub(crate) struct Dequantise<'a> {
    pub panels: &'a QuantisedPanels,
    pub panel: usize,
    pub to: &'a mut [f32],
}

impl Kernel for Dequantise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let code = self.panels.format.code;
        for group in self.panels.groups(self.panel) {
            for pair in 0..2 {
                // SAFETY: `run` is called for an instruction set that is there; pairs are 0 and 1, and
                // vectors 0 to 3.
                unsafe {
                    let [a, b] = vectors_of(code, pair);
                    let (scale_a, zero_a) = group.factors::<S::Vector>(a);
                    let (scale_b, zero_b) = group.factors::<S::Vector>(b);
                    let places = group.places();
                    let range = places.start * PANEL_COLUMNS..places.end * PANEL_COLUMNS;
                    let Some(to) = self.to.get_mut(range) else { return };
                    for (place, to) in places.zip(to.chunks_exact_mut(PANEL_COLUMNS)) {
                        let (codes_a, codes_b) = group.codes::<S::Vector>(code, place, pair);
                        let to = to.as_mut_ptr();
                        codes_a.sub(zero_a).mul(scale_a).store(to.add(16 * a));
                        codes_b.sub(zero_b).mul(scale_b).store(to.add(16 * b));
                    }
                }
            }
        }
    }
}
