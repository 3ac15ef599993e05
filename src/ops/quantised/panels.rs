//! Quantised matrices in the layout that the kernels of the CPU stream.
//!
//! As in a [`PackedMatrix`](crate::ops::common::packed_matrix::PackedMatrix), 64 output columns make
//! a panel, one contiguous stretch. It consists of a block for each group of inputs, one after the
//! other: 64 scales, 64 zeros as bytes where the format has them, and the codes. Those of floats are
//! 64 in a row for each input. Those of integers are taken four inputs at a time, a unit: the four
//! codes of a column are neighbours, and the last unit of a group is filled up. Codes of 4 bits
//! share bytes with those 32 columns further, which are the high halves.

use super::format::{Code, QuantFormat};
use super::matrix::QuantisedMatrix;
use crate::backend::cpu::dot::{MAX_SUMMED, UNIT};
use crate::backend::cpu::simd::{Kernel, Simd, Vector16};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::{try_with_capacity, Error, Result};
use crate::memory::{DType, HostArena, HostBuffer};
use crate::ops::common::packed_matrix::PANEL_COLUMNS;
use std::ops::Range;

/// A quantised weight matrix [out_features, in_features], packed in panels.
#[derive(Debug)]
pub struct QuantisedPanels {
    out_features: usize,
    in_features: usize,
    format: QuantFormat,
    /// See [`QuantisedMatrix::order`].
    order: Vec<u32>,
    /// See [`QuantisedPanels::rounding`].
    is_rounded: bool,
    buffer: HostBuffer,
}

/// Returns the inputs whose codes are stored together.
const fn unit_places(code: Code) -> usize {
    match code {
        Code::Int4 | Code::Int8 => UNIT,
        Code::Fp8 => 1,
    }
}

/// Returns the bytes of the codes of a unit of inputs for all columns of a panel.
pub(crate) const fn unit_bytes(code: Code) -> usize {
    code.row_bytes(PANEL_COLUMNS * unit_places(code))
}

/// The division of a row's inputs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Division {
    in_features: usize,
    group_size: usize,
    unit_places: usize,
    /// The segments of each group but the last.
    group_segments: usize,
}

impl Division {
    /// Returns the division of `in_features` inputs.
    pub fn new(in_features: usize, format: &QuantFormat) -> Self {
        let group_size = format.group_size.clamp(1, in_features.max(1));
        let group_segments = group_size.div_ceil(MAX_SUMMED);
        Division { in_features, group_size, unit_places: unit_places(format.code), group_segments }
    }

    /// Returns the number of inputs.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    fn num_groups(&self) -> usize {
        self.in_features.div_ceil(self.group_size)
    }

    /// Returns the places of a group.
    fn places(&self, group: usize) -> Range<usize> {
        let first = group * self.group_size;
        first..self.in_features.min(first + self.group_size)
    }

    fn group_units(&self) -> usize {
        self.group_size.div_ceil(self.unit_places)
    }

    /// Returns the units of a row.
    pub fn num_units(&self) -> usize {
        let (whole, rest) =
            (self.in_features / self.group_size, self.in_features % self.group_size);
        whole * self.group_units() + rest.div_ceil(self.unit_places)
    }

    /// Returns the segments of a row: runs of inputs of one group that can be summed up as
    /// integers.
    pub fn num_segments(&self) -> usize {
        let (whole, rest) =
            (self.in_features / self.group_size, self.in_features % self.group_size);
        whole * self.group_segments + rest.div_ceil(MAX_SUMMED)
    }

    /// Returns the group of a segment, and which of the group's segments it is.
    #[inline(always)]
    fn group_of(&self, segment: usize) -> (usize, usize) {
        // Divisions take long, and most groups are a segment.
        match self.group_segments {
            1 => (segment, 0),
            count => (segment / count, segment % count),
        }
    }

    /// Returns the places of a segment.
    #[inline(always)]
    pub fn segment_places(&self, segment: usize) -> Range<usize> {
        let (group, part) = self.group_of(segment);
        let group = self.places(group);
        let first = group.start + part * MAX_SUMMED;
        first..group.end.min(first + MAX_SUMMED)
    }

    /// Returns the first unit of a segment.
    #[inline(always)]
    pub fn first_unit(&self, segment: usize) -> usize {
        let (group, part) = self.group_of(segment);
        group * self.group_units() + part * (MAX_SUMMED / UNIT)
    }
}

/// The division of panels: the numbers that every segment needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PanelDivision {
    pub inputs: Division,
    panel_bytes: usize,
    head_bytes: usize,
    /// The bytes of each group but the last.
    group_bytes: usize,
    scales_bytes: usize,
    unit_bytes: usize,
}

/// Returns the bytes before the codes of a group.
fn head_bytes(format: &QuantFormat) -> usize {
    PANEL_COLUMNS * (format.scale.size_bytes() + usize::from(format.has_zeros))
}

/// Returns the bytes of a panel; `None` on overflow.
fn panel_bytes(division: &Division, format: &QuantFormat) -> Option<usize> {
    // There are at most UNIT units for each input, in groups of one.
    division.in_features.checked_mul(UNIT)?;
    let codes = division.num_units().checked_mul(unit_bytes(format.code))?;
    codes.checked_add(division.num_groups().checked_mul(head_bytes(format))?)
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
        let panel = panel_bytes(&Division::new(in_features, format), format)?;
        let panels = panel.checked_mul(out_features.div_ceil(PANEL_COLUMNS))?;
        panels.checked_add(if is_ordered { in_features.checked_mul(4)? } else { 0 })
    }

    /// Packs a matrix, on all threads.
    pub fn pack(backend: &CpuBackend, matrix: &QuantisedMatrix) -> Result<Self> {
        Self::pack_in(&mut HostArena::new(0), backend, matrix)
    }

    /// The same, with its memory from `arena`.
    pub fn pack_in(
        arena: &mut HostArena,
        backend: &CpuBackend,
        matrix: &QuantisedMatrix,
    ) -> Result<Self> {
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
            is_rounded: false,
            buffer: arena.zeroed(bytes)?,
        };
        let division = panels.division();
        let panel_bytes = division.panel_bytes;
        let num_panels = out_features.div_ceil(PANEL_COLUMNS);
        let start = SendPointer(panels.buffer.as_bytes_mut().as_mut_ptr());
        backend.parallel_for(num_panels, &|panel| {
            // SAFETY: the buffer has num_panels > panel panels of panel_bytes each, and every panel
            // is given out once.
            let bytes = unsafe {
                std::slice::from_raw_parts_mut(start.get().add(panel * panel_bytes), panel_bytes)
            };
            pack_panel(matrix, &division.inputs, panel * PANEL_COLUMNS, bytes);
        })?;
        Ok(panels)
    }

    /// Returns the panels such that products of several rows may round activations and numbers to bf16, where
    /// that is faster, or may not: then the bits of a row do not depend on the rows beside it.
    pub fn rounding(self, is_rounded: bool) -> Self {
        QuantisedPanels { is_rounded, ..self }
    }

    /// See [`QuantisedPanels::rounding`].
    pub(crate) fn is_rounded(&self) -> bool {
        self.is_rounded
    }

    /// Returns the number of rows of the matrix, which is the width of its results.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Returns the number of columns of the matrix, which is the width of its inputs.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Returns the format of the numbers.
    pub fn format(&self) -> QuantFormat {
        self.format
    }

    /// Returns the bytes in memory, padding included.
    pub fn size_bytes(&self) -> usize {
        self.buffer.len_bytes() + self.order.len() * size_of::<u32>()
    }

    /// Returns the input that stands at each place of a row; empty if that is the input itself.
    pub(crate) fn order(&self) -> &[u32] {
        &self.order
    }

    /// Returns the number of panels.
    pub(crate) fn num_panels(&self) -> usize {
        self.out_features.div_ceil(PANEL_COLUMNS)
    }

    /// Returns how the inputs of a row and the panels are divided.
    pub(crate) fn division(&self) -> PanelDivision {
        let format = &self.format;
        let inputs = Division::new(self.in_features, format);
        let (head_bytes, unit_bytes) = (head_bytes(format), unit_bytes(format.code));
        PanelDivision {
            panel_bytes: panel_bytes(&inputs, format).unwrap_or(0),
            head_bytes,
            group_bytes: head_bytes + inputs.group_units() * unit_bytes,
            scales_bytes: PANEL_COLUMNS * format.scale.size_bytes(),
            unit_bytes,
            inputs,
        }
    }

    /// Returns a group of a panel; `None` if there is none of that number.
    #[inline(always)]
    pub(super) fn group(
        &self,
        division: &PanelDivision,
        panel: usize,
        group: usize,
    ) -> Option<Group<'_>> {
        let inputs = &division.inputs;
        let places = inputs.places(group);
        if places.is_empty() {
            return None;
        }
        let first = panel * division.panel_bytes + group * division.group_bytes;
        let block = self.buffer.as_bytes().get(first..)?;
        let (head, codes) = block.split_at_checked(division.head_bytes)?;
        let (scales, zeros) = head.split_at_checked(division.scales_bytes)?;
        let num_units = places.len().div_ceil(inputs.unit_places);
        let codes = codes.get(..num_units * division.unit_bytes)?;
        Some(Group { format: &self.format, head, scales, zeros, codes, places })
    }

    /// Returns the groups of a panel, from the first to the last.
    #[inline(always)]
    pub(crate) fn groups(&self, panel: usize) -> impl Iterator<Item = Group<'_>> {
        let division = self.division();
        (0..division.inputs.num_groups())
            .map_while(move |group| self.group(&division, panel, group))
    }

    /// Returns a segment of a panel of integers, and its first unit; `None` if there is none of that
    /// number.
    #[inline(always)]
    pub(crate) fn segment(
        &self,
        division: &PanelDivision,
        panel: usize,
        segment: usize,
    ) -> Option<Segment<'_>> {
        let (group, part) = division.inputs.group_of(segment);
        let group = self.group(division, panel, group)?;
        let codes = group.codes.get(part * (MAX_SUMMED / UNIT) * division.unit_bytes..)?;
        let len = codes.len().min(MAX_SUMMED / UNIT * division.unit_bytes);
        let first_unit = division.inputs.first_unit(segment);
        Some(Segment { codes: codes.get(..len)?, group, first_unit })
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
        for group in self.groups(panel) {
            let (scale, zero) = group.factor(column);
            for place in group.places.clone() {
                let value = self.format.code.value(group.code(place, column), zero);
                let input = self.order.get(place).map_or(place, |&input| input as usize);
                if let Some(out) = out.get_mut(input) {
                    *out = value * scale;
                }
            }
        }
        Ok(())
    }
}

/// The zeros of groups that state none.
static MIDDLES: [[u8; PANEL_COLUMNS]; 2] =
    [[Code::Int4.middle(); PANEL_COLUMNS], [Code::Int8.middle(); PANEL_COLUMNS]];

/// A group of inputs of the 64 columns of a panel.
pub(crate) struct Group<'a> {
    format: &'a QuantFormat,
    head: &'a [u8],
    scales: &'a [u8],
    zeros: &'a [u8],
    codes: &'a [u8],
    /// The places of the group in a row.
    pub places: Range<usize>,
}

impl Group<'_> {
    /// Returns the scales of columns `16 * vector..`.
    ///
    /// # Safety
    /// The instruction set of `V` is there; `vector` is less than 4.
    #[inline(always)]
    pub unsafe fn scales<V: Vector16>(&self, vector: usize) -> V {
        let scales = self.scales.as_ptr();
        // SAFETY: there are 64 scales of the type that the format says.
        unsafe {
            match self.format.scale {
                DType::F32 => V::load(scales.add(64 * vector).cast()),
                DType::F16 => V::load_f16(scales.add(32 * vector).cast()),
                DType::BF16 => V::load_bf16(scales.add(32 * vector).cast()),
            }
        }
    }

    /// Returns the codes, whole units.
    #[inline(always)]
    pub fn codes(&self) -> &[u8] {
        self.codes
    }

    /// Returns the bytes before the codes.
    #[inline(always)]
    pub fn head(&self) -> &[u8] {
        self.head
    }

    /// Returns the 64 zeros.
    #[inline(always)]
    pub fn zeros(&self) -> &[u8] {
        match (self.format.has_zeros, self.format.code) {
            (true, _) => self.zeros,
            (false, Code::Int4) => &MIDDLES[0],
            (false, _) => &MIDDLES[1],
        }
    }

    /// Returns the floats at `place` of columns `16 * vector..`.
    ///
    /// # Safety
    /// The instruction set of `V` is there; the codes are those of floats, `place` is one of `places`
    /// and `vector` less than 4.
    #[inline(always)]
    pub unsafe fn floats<V: Vector16>(&self, place: usize, vector: usize) -> V {
        let first = (place - self.places.start) * unit_bytes(Code::Fp8) + 16 * vector;
        // SAFETY: each place has 64 codes, which lie within `codes`.
        unsafe { V::load_fp8(self.codes.as_ptr().add(first)) }
    }

    /// Returns the scale and the zero of a column.
    fn factor(&self, column: usize) -> (f32, u8) {
        let size = self.format.scale.size_bytes();
        let bytes = self.scales.get(column * size..(column + 1) * size).unwrap_or_default();
        let scale = match (self.format.scale, bytes) {
            (DType::F32, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]),
            (DType::F16, &[a, b]) => half::f16::from_ne_bytes([a, b]).to_f32(),
            (DType::BF16, &[a, b]) => half::bf16::from_ne_bytes([a, b]).to_f32(),
            _ => 0.0,
        };
        (scale, self.zeros().get(column).copied().unwrap_or(0))
    }

    /// Returns the code at a place of a column.
    fn code(&self, place: usize, column: usize) -> u8 {
        let (byte, shift) = code_place(self.format.code, place - self.places.start, column);
        let byte = self.codes.get(byte).copied().unwrap_or(0);
        if self.format.code == Code::Int4 {
            byte >> shift & 15
        } else {
            byte
        }
    }
}

/// A run of inputs of a group that can be summed up as integers.
pub(crate) struct Segment<'a> {
    pub group: Group<'a>,
    /// The codes, whole units.
    pub codes: &'a [u8],
    /// Its first unit in a row.
    pub first_unit: usize,
}

/// Returns the place of a column's code among those of a group: the byte, and the number of bits by which it is shifted
/// up.
#[inline(always)]
fn code_place(code: Code, place_in_group: usize, column: usize) -> (usize, u32) {
    let (unit, place) = (place_in_group / UNIT * unit_bytes(code), place_in_group % UNIT);
    match code {
        Code::Int4 => (unit + column % 32 * UNIT + place, column as u32 / 32 * 4),
        Code::Int8 => (unit + column * UNIT + place, 0),
        Code::Fp8 => (place_in_group * unit_bytes(code) + column, 0),
    }
}

/// Returns the runs of 16 columns whose codes are read together: for 4 bits those from `16 * pair`
/// and from `32 + 16 * pair` on, for 8 bits those from `32 * pair` on.
#[inline(always)]
pub(crate) const fn vectors_of(code: Code, pair: usize) -> [usize; 2] {
    match code {
        Code::Int4 => [pair, pair + 2],
        Code::Int8 | Code::Fp8 => [2 * pair, 2 * pair + 1],
    }
}

/// Writes the panel of the rows of `matrix` from `first_row` on into zeroed bytes.
fn pack_panel(
    matrix: &QuantisedMatrix,
    division: &Division,
    first_row: usize,
    mut panel: &mut [u8],
) {
    let (format, head) = (&matrix.format, head_bytes(&matrix.format));
    let code = format.code;
    let scale_bytes = format.scale.size_bytes();
    let rows = first_row..matrix.out_features.min(first_row + PANEL_COLUMNS);
    for group in 0..division.num_groups() {
        let places = division.places(group);
        let codes_len = places.len().div_ceil(unit_places(code)) * unit_bytes(code);
        let taken = std::mem::take(&mut panel);
        let Some((block, after)) = taken.split_at_mut_checked(head + codes_len) else {
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
                *place = zero;
            }
            let row_codes = matrix.row_codes(row);
            let packed = pack_units(code, row_codes, places.clone(), column, codes);
            for place in places.start + packed..places.end {
                let (byte, shift) = code_place(code, place - places.start, column);
                let stored = code.at(row_codes, place);
                if let Some(out) = codes.get_mut(byte) {
                    *out |= stored << shift;
                }
            }
        }
    }
}

/// Adds the codes of the whole units of a group of integers to those of a column of its panel, a unit at a time,
/// and returns how many places that are.
fn pack_units(
    code: Code,
    row_codes: &[u8],
    places: Range<usize>,
    column: usize,
    codes: &mut [u8],
) -> usize {
    // The inputs of a byte of a row.
    let shared = if code == Code::Int4 { 2 } else { 1 };
    if code == Code::Fp8 || !places.start.is_multiple_of(shared) {
        return 0;
    }
    let (first, _) = code_place(code, 0, column);
    let whole = places.len() / UNIT;
    let from = row_codes.get(places.start / shared..).unwrap_or_default();
    let units = codes.get_mut(first..).unwrap_or_default().chunks_mut(unit_bytes(code));
    for (from, to) in from.chunks_exact(UNIT / shared).zip(units).take(whole) {
        let stored = match *from {
            [a, b] => {
                let shift = column as u32 / 32 * 4;
                [a & 15, a >> 4, b & 15, b >> 4].map(|code| code << shift)
            }
            [a, b, c, d] => [a, b, c, d],
            _ => return 0,
        };
        to.iter_mut().zip(stored).for_each(|(to, code)| *to |= code);
    }
    whole * UNIT
}

/// Writes a scale, which the type holds without rounding, in the order of the machine.
pub(crate) fn store_scale(place: &mut [u8], scale: f32, dtype: DType) {
    match dtype {
        DType::F32 => place.copy_from_slice(&scale.to_ne_bytes()),
        DType::F16 => place.copy_from_slice(&half::f16::from_f32(scale).to_ne_bytes()),
        DType::BF16 => place.copy_from_slice(&half::bf16::from_f32(scale).to_ne_bytes()),
    }
}

/// Writes the weights of a panel of floats as f32, [in_features][64], in the order of the places.
pub(crate) struct Dequantise<'a> {
    pub panels: &'a QuantisedPanels,
    pub panel: usize,
    pub to: &'a mut [f32],
}

impl Kernel for Dequantise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for group in self.panels.groups(self.panel) {
            for vector in 0..PANEL_COLUMNS / 16 {
                // SAFETY: `run` is called for an instruction set that is there; vectors are 0 to 3.
                unsafe {
                    let scales = group.scales::<S::Vector>(vector);
                    let places = group.places.clone();
                    let range = places.start * PANEL_COLUMNS..places.end * PANEL_COLUMNS;
                    let Some(to) = self.to.get_mut(range) else { return };
                    for (place, to) in places.zip(to.chunks_exact_mut(PANEL_COLUMNS)) {
                        let floats = group.floats::<S::Vector>(place, vector);
                        floats.mul(scales).store(to.as_mut_ptr().add(16 * vector));
                    }
                }
            }
        }
    }
}
