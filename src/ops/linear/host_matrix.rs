//! The matrix of a linear layer on the CPU.

use crate::ops::common::packed_matrix::PackedMatrix;
use crate::ops::quantised::QuantisedPanels;

/// A matrix `[out_features, in_features]` in the layout of its kernels.
#[derive(Debug)]
pub enum HostMatrix {
    /// Every number is stored by itself.
    Dense(PackedMatrix),
    /// Numbers of few bits, and scales for groups of them.
    Quantised(QuantisedPanels),
}

/// A reference to either.
#[derive(Clone, Copy, Debug)]
pub enum HostWeight<'a> {
    /// Every number is stored by itself.
    Dense(&'a PackedMatrix),
    /// Numbers of few bits, and scales for groups of them.
    Quantised(&'a QuantisedPanels),
}

impl HostMatrix {
    /// Returns the bytes in memory, padding included.
    pub fn size_bytes(&self) -> usize {
        match self {
            HostMatrix::Dense(matrix) => matrix.size_bytes(),
            HostMatrix::Quantised(matrix) => matrix.size_bytes(),
        }
    }
}

impl HostWeight<'_> {
    /// Returns the number of rows of the matrix, which is the width of its results.
    pub fn out_features(&self) -> usize {
        match self {
            HostWeight::Dense(matrix) => matrix.out_features(),
            HostWeight::Quantised(matrix) => matrix.out_features(),
        }
    }

    /// Returns the number of columns of the matrix, which is the width of its inputs.
    pub fn in_features(&self) -> usize {
        match self {
            HostWeight::Dense(matrix) => matrix.in_features(),
            HostWeight::Quantised(matrix) => matrix.in_features(),
        }
    }
}

impl<'a> From<&'a HostMatrix> for HostWeight<'a> {
    fn from(matrix: &'a HostMatrix) -> Self {
        match matrix {
            HostMatrix::Dense(matrix) => HostWeight::Dense(matrix),
            HostMatrix::Quantised(matrix) => HostWeight::Quantised(matrix),
        }
    }
}

impl<'a> From<&'a PackedMatrix> for HostWeight<'a> {
    fn from(matrix: &'a PackedMatrix) -> Self {
        HostWeight::Dense(matrix)
    }
}

impl<'a> From<&'a QuantisedPanels> for HostWeight<'a> {
    fn from(matrix: &'a QuantisedPanels) -> Self {
        HostWeight::Quantised(matrix)
    }
}
