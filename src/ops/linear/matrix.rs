//! The matrix of a linear layer on a device: its data, how they are stored, and along which axis
//! devices could divide it.

use crate::backend::DeviceTensor;
use crate::error::{Error, Result};
use crate::memory::DType;
use crate::ops::quantised::tiles::TileLayout;

/// How the numbers of a matrix are stored. The type that they are computed in is a [`DType`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    /// Every number is stored by itself.
    Dense(DType),
    /// Numbers of few bits and scales for groups of them, in tiles.
    Quantised(TileLayout),
}

/// The order of the two axes in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixLayout {
    /// `[out_features, in_features]`, as `nn.Linear` and embeddings are stored.
    Rows,
    /// `[in_features, out_features]`, as GPT-2's `Conv1D` is stored.
    Columns,
}

/// What must stay together where an axis is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardUnit {
    /// Nothing: every feature stands by itself.
    Feature,
    /// An attention head.
    Head,
}

/// The axis along which devices divide a weight, and hence the axis along which its attention heads
/// lie, head after head. A device may place heads further apart, with zeros between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardAxis {
    /// No axis: every device has all of it, as with norms and embeddings.
    None,
    /// The output features: projections to q, k and v, gate and up, and their biases. Each device
    /// has a different part of the result.
    Out(ShardUnit),
    /// The input features: the projections back into the residual stream. The results of all
    /// devices are added up before anything else is done with them.
    In(ShardUnit),
}

impl ShardAxis {
    /// Returns the axis of the transposed weight.
    pub fn transposed(self) -> Self {
        match self {
            ShardAxis::None => ShardAxis::None,
            ShardAxis::Out(unit) => ShardAxis::In(unit),
            ShardAxis::In(unit) => ShardAxis::Out(unit),
        }
    }
}

/// A matrix `[out_features, in_features]` on a device.
#[derive(Debug)]
pub struct Matrix {
    data: DeviceTensor,
    format: WeightFormat,
    layout: MatrixLayout,
    shard: ShardAxis,
}

impl Matrix {
    /// Makes a dense matrix; `data` has the axes that `layout` says.
    pub fn dense(data: DeviceTensor, dtype: DType, layout: MatrixLayout, shard: ShardAxis) -> Self {
        Matrix { data, format: WeightFormat::Dense(dtype), layout, shard }
    }

    /// Makes a quantised matrix; `data` are the bytes of its tiles.
    pub fn quantised(data: DeviceTensor, layout: TileLayout, shard: ShardAxis) -> Self {
        let format = WeightFormat::Quantised(layout);
        Matrix { data, format, layout: MatrixLayout::Rows, shard }
    }

    /// The memory, whatever lies in it.
    pub fn data(&self) -> &DeviceTensor {
        &self.data
    }

    /// The numbers of a dense matrix, with the axes that its layout says.
    pub fn dense_data(&self) -> Result<&DeviceTensor> {
        match self.format {
            WeightFormat::Dense(_) => Ok(&self.data),
            WeightFormat::Quantised(_) => {
                Err(Error::internal("a quantised matrix where a dense one is needed"))
            }
        }
    }

    /// How many numbers it has.
    pub fn num_elements(&self) -> usize {
        match self.format {
            WeightFormat::Dense(_) => self.data.num_elements() as usize,
            WeightFormat::Quantised(layout) => layout.out_features() * layout.in_features(),
        }
    }

    /// How the numbers are stored.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// The order of the axes.
    pub fn layout(&self) -> MatrixLayout {
        self.layout
    }

    /// The axis along which devices divide it.
    pub fn shard(&self) -> ShardAxis {
        self.shard
    }
}
