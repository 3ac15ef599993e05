//! From the bytes of a quantised module's tensors to its matrix, row after row.

use std::ops::Range;

use super::module::{CodeLayout, QuantModule, ScaleLayout, ZeroLayout};
use super::order::order_of;
use super::words::{awq_rows, gptq_rows, pack_nibbles, unpack_nibbles, word_at, AWQ_NIBBLES};
use crate::error::{try_filled, Error, Result};
use crate::memory::DType;
use crate::model::checkpoint::RawTensor;
use crate::ops::quantised::QuantisedMatrix;

/// Rows are decoded in multiples of this number: what AWQ packs into a word.
pub const ROWS_AT_ONCE: usize = 8;

/// The bytes of the tensors of a module, of which those that concern all rows have been read.
#[derive(Clone, Debug)]
pub struct ModuleBytes<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    zeros: &'a [u8],
    /// See [`QuantisedMatrix::order`].
    pub order: Vec<u32>,
}

impl QuantModule {
    /// Takes the bytes of each of [`QuantModule::tensors`] as `bytes_of` gives them, whole, and
    /// checks what concerns all rows: the order of the inputs, and zeros that must be the middle.
    pub fn bytes<'a>(
        &self,
        mut bytes_of: impl FnMut(&RawTensor) -> Result<&'a [u8]>,
    ) -> Result<ModuleBytes<'a>> {
        let mut read = |tensor: &RawTensor| -> Result<&'a [u8]> {
            let bytes = bytes_of(tensor)?;
            if bytes.len() as u64 == tensor.len_bytes {
                return Ok(bytes);
            }
            Err(Error::internal(format!(
                "{} bytes of tensor {}, which has {}",
                bytes.len(),
                tensor.name,
                tensor.len_bytes
            )))
        };
        let zeros = self.zeros.as_ref().map(&mut read).transpose()?.unwrap_or_default();
        let mut bytes = ModuleBytes {
            codes: read(&self.codes)?,
            scales: read(&self.scales)?,
            zeros,
            order: Vec::new(),
        };
        if let Some(shape) = &self.shape {
            self.check_shape(shape, read(shape)?)?;
        }
        if let Some(groups) = &self.groups {
            bytes.order = order_of(self, groups, read(groups)?)?;
        }
        self.check_zeros(&bytes)?;
        Ok(bytes)
    }

    /// Makes the matrix on this thread.
    pub fn decode<'a>(
        &self,
        bytes_of: impl FnMut(&RawTensor) -> Result<&'a [u8]>,
    ) -> Result<QuantisedMatrix> {
        let mut bytes = self.bytes(bytes_of)?;
        let mut matrix = QuantisedMatrix::empty(self.out_features, self.in_features, self.format)?;
        let QuantisedMatrix { codes, scales, zeros, .. } = &mut matrix;
        self.decode_rows(&bytes, 0..self.out_features, codes, scales, zeros)?;
        matrix.order = std::mem::take(&mut bytes.order);
        Ok(matrix)
    }

    /// Decodes some rows: their part of [`QuantisedMatrix::codes`], `scales` and `zeros`. The first
    /// row is a multiple of [`ROWS_AT_ONCE`], and so is the end unless it is that of the matrix.
    pub fn decode_rows(
        &self,
        bytes: &ModuleBytes<'_>,
        rows: Range<usize>,
        codes: &mut [u8],
        scales: &mut [f32],
        zeros: &mut [u8],
    ) -> Result<()> {
        let groups = self.format.num_groups(self.in_features);
        let row_bytes = self.format.code.row_bytes(self.in_features);
        let expected_zeros = if self.format.has_zeros { rows.len() * groups } else { 0 };
        let is_whole = |row: usize| row.is_multiple_of(ROWS_AT_ONCE) || row == self.out_features;
        if rows.end > self.out_features
            || !is_whole(rows.start)
            || !is_whole(rows.end)
            || codes.len() != rows.len() * row_bytes
            || scales.len() != rows.len() * groups
            || zeros.len() != expected_zeros
        {
            return Err(Error::internal(format!(
                "rows {rows:?} of {} into {} bytes, {} scales and {} zeros",
                self.name,
                codes.len(),
                scales.len(),
                zeros.len()
            )));
        }
        if rows.is_empty() || groups == 0 {
            return Ok(());
        }
        self.decode_codes(bytes, rows.clone(), codes)?;
        self.decode_scales(bytes, rows.clone(), scales)?;
        for (row, zeros) in rows.zip(zeros.chunks_exact_mut(groups)) {
            for (group, zero) in zeros.iter_mut().enumerate() {
                *zero = self.zero(bytes.zeros, row, group);
            }
        }
        Ok(())
    }

    fn decode_codes(
        &self,
        bytes: &ModuleBytes<'_>,
        rows: Range<usize>,
        codes: &mut [u8],
    ) -> Result<()> {
        let row_bytes = self.format.code.row_bytes(self.in_features);
        let first = rows.start;
        match self.layout.codes {
            CodeLayout::Awq => awq_rows(bytes.codes, self.out_features, first, codes, row_bytes),
            CodeLayout::Gptq => gptq_rows(bytes.codes, self.out_features, first, codes, row_bytes),
            CodeLayout::Packed => {
                let stored = bytes.codes.len() / self.out_features.max(1);
                let stored_rows = bytes.codes.chunks_exact(stored.max(1)).skip(first);
                for (row, stored) in codes.chunks_exact_mut(row_bytes).zip(stored_rows) {
                    row.copy_from_slice(stored.get(..row_bytes).unwrap_or_default());
                    if self.format.code.bits() == 4 && self.in_features % 2 == 1 {
                        // The padding of the last byte is not a number.
                        if let Some(last) = row.last_mut() {
                            *last &= 15;
                        }
                    }
                }
            }
            CodeLayout::Signed => {
                let stored = bytes.codes.get(first * row_bytes..).unwrap_or_default();
                codes.iter_mut().zip(stored).for_each(|(code, byte)| *code = byte ^ 0x80);
            }
            CodeLayout::Plain => {
                let begin = first * row_bytes;
                let stored = bytes.codes.get(begin..begin + codes.len()).unwrap_or_default();
                codes.copy_from_slice(stored);
                self.check_numbers(codes, first)?;
            }
        }
        if bytes.order.is_empty() {
            return Ok(());
        }
        let what = "a row of a quantised weight";
        let mut row = try_filled(self.in_features, 0_u8, what)?;
        let mut sorted = try_filled(self.in_features, 0_u8, what)?;
        for codes in codes.chunks_exact_mut(row_bytes) {
            match self.format.code.bits() {
                4 => unpack_nibbles(codes, &mut row),
                _ => row.copy_from_slice(codes),
            }
            for (code, &input) in sorted.iter_mut().zip(&bytes.order) {
                *code = row.get(input as usize).copied().unwrap_or_default();
            }
            match self.format.code.bits() {
                4 => pack_nibbles(&sorted, codes),
                _ => codes.copy_from_slice(&sorted),
            }
        }
        Ok(())
    }

    /// Refuses codes that are no numbers.
    fn check_numbers(&self, codes: &[u8], first_row: usize) -> Result<()> {
        let code = self.format.code;
        if code.are_numbers(codes) {
            return Ok(());
        }
        let at = codes.iter().position(|&byte| !code.is_number(byte)).unwrap_or_default();
        let (row, column) = (at / self.in_features.max(1), at % self.in_features.max(1));
        Err(Error::invalid_file(format!(
            "{}: tensor {} has no number (NaN) at [{}, {column}]",
            self.codes.file,
            self.codes.name,
            first_row + row
        )))
    }

    fn decode_scales(
        &self,
        bytes: &ModuleBytes<'_>,
        rows: Range<usize>,
        scales: &mut [f32],
    ) -> Result<()> {
        let groups = self.format.num_groups(self.in_features).max(1);
        let dtype = self.format.scale;
        match self.layout.scales {
            ScaleLayout::ByOutput { rows: rows_each } => {
                for (row, scales) in rows.zip(scales.chunks_exact_mut(groups)) {
                    let first = row / rows_each * groups;
                    for (group, scale) in scales.iter_mut().enumerate() {
                        *scale = number(bytes.scales, first + group, dtype);
                    }
                }
            }
            ScaleLayout::ByInput => {
                for group in 0..groups {
                    let first = group * self.out_features + rows.start;
                    let column = scales.iter_mut().skip(group).step_by(groups);
                    for (row, scale) in column.enumerate() {
                        *scale = number(bytes.scales, first + row, dtype);
                    }
                }
            }
        }
        if scales.iter().all(|scale| scale.is_finite()) {
            Ok(())
        } else {
            Err(self.bad_scale(bytes))
        }
    }

    /// Returns the error of a scale that is no finite number.
    fn bad_scale(&self, bytes: &ModuleBytes<'_>) -> Error {
        let dtype = self.format.scale;
        let len = bytes.scales.len() / dtype.size_bytes();
        let value = |index: usize| number(bytes.scales, index, dtype);
        let at = (0..len).find(|&index| !value(index).is_finite()).unwrap_or_default();
        let columns = self.scales.shape.last().map_or(1, |&n| (n as usize).max(1));
        Error::invalid_file(format!(
            "{}: tensor {} has {} at [{}, {}], expected a finite number",
            self.scales.file,
            self.scales.name,
            value(at),
            at / columns,
            at % columns
        ))
    }

    /// Returns the zero of a group of a row, as a code.
    fn zero(&self, bytes: &[u8], row: usize, group: usize) -> u8 {
        let bits = self.format.code.bits();
        let per_word = 32 / bits;
        let mask = (1_u32 << bits) - 1;
        let groups = self.format.num_groups(self.in_features);
        let zero = match self.layout.zeros {
            ZeroLayout::Awq => {
                let word = word_at(bytes, group * (self.out_features / 8) + row / 8);
                word >> (AWQ_NIBBLES[row % 8] * 4)
            }
            ZeroLayout::Gptq { less_one } => {
                let word = word_at(bytes, group * (self.out_features / per_word) + row / per_word);
                (word >> (row % per_word * bits)).wrapping_add(u32::from(less_one))
            }
            ZeroLayout::Packed => {
                let word = word_at(bytes, row / per_word * groups + group);
                word >> (row % per_word * bits)
            }
            ZeroLayout::Signed => {
                let row = match self.layout.scales {
                    ScaleLayout::ByOutput { rows } => row / rows,
                    ScaleLayout::ByInput => row,
                };
                let byte = bytes.get(row * groups + group).copied().unwrap_or_default();
                u32::from(byte ^ 0x80)
            }
        };
        (zero & mask) as u8
    }

    /// Refuses zeros of a module that has none of its own by its config.
    fn check_zeros(&self, bytes: &ModuleBytes<'_>) -> Result<()> {
        let Some(tensor) = self.zeros.as_ref().filter(|_| self.layout.zeros_are_middle) else {
            return Ok(());
        };
        let wrong = |place: String| {
            Err(Error::invalid_file(format!(
                "{}: tensor {} has a zero other than the middle at {place}, but the config says \
                 that the weights are symmetric",
                tensor.file, tensor.name
            )))
        };
        if self.layout.zeros == ZeroLayout::Signed {
            return match bytes.zeros.iter().position(|&byte| byte != 0) {
                Some(at) => wrong(format!("byte {at}")),
                None => Ok(()),
            };
        }
        let middle = self.format.code.middle();
        for group in 0..self.format.num_groups(self.in_features) {
            for row in 0..self.out_features {
                let zero = self.zero(bytes.zeros, row, group);
                if zero != middle {
                    return wrong(format!("output {row}, group {group}: {zero}"));
                }
            }
        }
        Ok(())
    }

    /// Refuses a shape of packed codes that is not that of the matrix.
    fn check_shape(&self, tensor: &RawTensor, bytes: &[u8]) -> Result<()> {
        let size = bytes.len() / 2;
        let number = |bytes: &[u8]| match *bytes {
            [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => i64::from_le_bytes([a, b, c, d, e, f, g, h]),
            _ => -1,
        };
        let found: Vec<i64> = bytes.chunks_exact(size.max(1)).map(number).collect();
        let is = |found: i64, wanted: usize| usize::try_from(found) == Ok(wanted);
        match found.as_slice() {
            &[out, inputs] if is(out, self.out_features) && is(inputs, self.in_features) => Ok(()),
            _ => Err(Error::invalid_file(format!(
                "{}: tensor {} is {found:?}, expected {:?} from config.json",
                tensor.file,
                tensor.name,
                [self.out_features, self.in_features]
            ))),
        }
    }
}

/// Returns element `index` of little-endian numbers.
fn number(bytes: &[u8], index: usize, dtype: DType) -> f32 {
    let size = dtype.size_bytes();
    match (bytes.get(index * size..(index + 1) * size), dtype) {
        (Some(&[a, b, c, d]), DType::F32) => f32::from_le_bytes([a, b, c, d]),
        (Some(&[a, b]), DType::F16) => half::f16::from_le_bytes([a, b]).to_f32(),
        (Some(&[a, b]), DType::BF16) => half::bf16::from_le_bytes([a, b]).to_f32(),
        _ => f32::NAN,
    }
}
