//! The experts of a layer on a device, whose matrices lie at equal distances.

use super::Routing;
use crate::error::{Error, Result};
use crate::ops::linear::{Matrix, MatrixLayout, WeightFormat};

/// The operands of a layer besides its tokens.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLayer<'a> {
    /// How tokens choose.
    pub routing: Routing,
    /// `[2 * width, hidden_size]` of each expert.
    pub gate_up: StridedMatrices<'a>,
    /// `[hidden_size, width]` of each expert.
    pub down: StridedMatrices<'a>,
    /// How they are multiplied.
    pub kernels: ExpertKernels,
}

/// The kernels that serve experts, which is found out when a model is loaded.
#[derive(Clone, Copy, Debug)]
pub struct ExpertKernels {
    /// Whether dense weights of 16 bits have those of Hopper.
    pub(super) has_wgmma: bool,
    /// Whether a token's bits depend on the token alone. (They do but for quantised weights.)
    pub(super) is_deterministic: bool,
}

/// One matrix of each expert, all of one shape and format.
#[derive(Clone, Copy, Debug)]
pub struct StridedMatrices<'a> {
    first: &'a Matrix,
    len: usize,
    /// The bytes from one to the next.
    stride: usize,
}

impl<'a> StridedMatrices<'a> {
    /// Takes the matrices of all experts, in their order; [`StridedMatrices::check`] has found them to be
    /// alike.
    pub fn new(matrices: &'a [Matrix]) -> Result<Self> {
        let first = matrices.first().ok_or_else(|| Error::internal("a layer without experts"))?;
        let stride = matrices.get(1).map_or(0, |second| distance(first, second));
        Ok(StridedMatrices { first, len: matrices.len(), stride })
    }

    /// Refuses matrices that kernels cannot take together.
    pub fn check(matrices: &[Matrix]) -> Result<()> {
        let all = StridedMatrices::new(matrices)?;
        let first = all.first;
        for (index, matrix) in matrices.iter().enumerate() {
            if matrix.format() != first.format()
                || matrix.layout() != MatrixLayout::Rows
                || matrix.data().shape() != first.data().shape()
            {
                return Err(Error::unsupported(format!(
                    "experts of one layer in different formats on CUDA: {:?} and {:?}",
                    first.format(),
                    matrix.format()
                )));
            }
            if distance(first, matrix) != index * all.stride {
                return Err(Error::internal("experts at different distances"));
            }
        }
        Ok(())
    }

    /// Returns the matrix of the first expert.
    pub(super) fn first(&self) -> &'a Matrix {
        self.first
    }

    /// Returns how many experts there are.
    pub fn num_experts(&self) -> usize {
        self.len
    }

    /// Returns the bytes from one to the next.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Returns the rows of each.
    pub fn out_features(&self) -> usize {
        match self.first.format() {
            WeightFormat::Dense(_) => {
                self.first.data().shape().first().map_or(0, |&rows| rows as usize)
            }
            WeightFormat::Quantised(layout) => layout.out_features(),
        }
    }

    /// Returns the columns of each.
    pub fn in_features(&self) -> usize {
        match self.first.format() {
            WeightFormat::Dense(_) => self.first.data().width() as usize,
            WeightFormat::Quantised(layout) => layout.in_features(),
        }
    }
}

fn distance(first: &Matrix, other: &Matrix) -> usize {
    (other.data().data() as usize).wrapping_sub(first.data().data() as usize)
}
