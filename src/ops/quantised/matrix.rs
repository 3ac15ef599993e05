//! A quantised matrix on the host, row after row: what readers of files and the quantiser make, and
//! what the layouts of the kernels are made from.

use super::format::QuantFormat;
use crate::error::{try_filled, Error, Result};

/// A quantised matrix `[out_features, in_features]` on the host; see [`QuantFormat`].
#[derive(Clone, Debug, PartialEq)]
pub struct QuantisedMatrix {
    /// Rows.
    pub out_features: usize,
    /// Columns.
    pub in_features: usize,
    /// The format of the numbers.
    pub format: QuantFormat,
    /// `[out_features, format.code.row_bytes(in_features)]`. Of two codes of 4 bits in a byte the
    /// first is in the low half.
    pub codes: Vec<u8>,
    /// `[out_features, num_groups]`, each a number of type `format.scale`.
    pub scales: Vec<f32>,
    /// `[out_features, num_groups]`, or empty without `format.has_zeros`.
    pub zeros: Vec<u8>,
    /// `[in_features]`, or empty if inputs are stored in their order: the input that stands at each
    /// place of a row. Groups are those of the places.
    pub order: Vec<u32>,
}

impl QuantisedMatrix {
    /// Makes a matrix of codes 0 with scales 0, to be filled.
    pub fn empty(out_features: usize, in_features: usize, format: QuantFormat) -> Result<Self> {
        let what = "a quantised weight";
        let too_large = || Error::out_of_memory(what, usize::MAX);
        let groups = format.num_groups(in_features);
        let row_bytes = format.code.row_bytes(in_features);
        let num_codes = out_features.checked_mul(row_bytes).ok_or_else(too_large)?;
        let num_scales = out_features.checked_mul(groups).ok_or_else(too_large)?;
        Ok(QuantisedMatrix {
            out_features,
            in_features,
            format,
            codes: try_filled(num_codes, 0, what)?,
            scales: try_filled(num_scales, 0.0, what)?,
            zeros: try_filled(if format.has_zeros { num_scales } else { 0 }, 0, what)?,
            order: Vec::new(),
        })
    }

    /// Returns the groups of a row.
    pub fn num_groups(&self) -> usize {
        self.format.num_groups(self.in_features)
    }

    /// Returns the codes of a row.
    pub fn row_codes(&self, row: usize) -> &[u8] {
        let len = self.format.code.row_bytes(self.in_features);
        self.codes.get(row * len..(row + 1) * len).unwrap_or_default()
    }

    /// Returns the scale and the zero of a group of a row.
    pub fn group(&self, row: usize, group: usize) -> (f32, u8) {
        let index = row * self.num_groups() + group;
        let zero = self.zeros.get(index).copied().unwrap_or(self.format.code.middle());
        (self.scales.get(index).copied().unwrap_or(0.0), zero)
    }

    /// Returns the code at a place of a row.
    pub fn code(&self, row: usize, place: usize) -> u8 {
        self.format.code.at(self.row_codes(row), place)
    }

    /// Writes row `row`, `[in_features]`, in the order of the inputs.
    pub fn row_to_f32(&self, row: usize, out: &mut [f32]) -> Result<()> {
        if row >= self.out_features || out.len() != self.in_features {
            return Err(Error::internal(format!(
                "row {row} into {} values, of a quantised matrix of {} x {}",
                out.len(),
                self.out_features,
                self.in_features
            )));
        }
        let group_size = self.format.group_size.max(1);
        for place in 0..self.in_features {
            let (scale, zero) = self.group(row, place / group_size);
            let value = self.format.code.value(self.code(row, place), zero);
            let input = self.order.get(place).map_or(place, |&input| input as usize);
            if let Some(out) = out.get_mut(input) {
                *out = value * scale;
            }
        }
        Ok(())
    }
}
