//! The tensors that make one weight, and the readers that turn them into it.

use crate::error::{Error, Result};
use crate::model::checkpoint::Tensor;
use crate::model::quantised::QuantModule;
use crate::ops::linear::cpu::WeightForm;
use crate::ops::linear::{MatrixLayout, ShardAxis};
use crate::ops::quantised::QuantFormat;

/// A part of a matrix, and how many of its output features it gives.
#[derive(Clone, Debug, PartialEq)]
pub struct MatrixPart {
    /// The location of the numbers.
    pub source: PartSource,
    /// Rows of this part.
    pub out_features: usize,
}

/// The location of the numbers of a part.
#[derive(Clone, Debug, PartialEq)]
pub enum PartSource {
    /// In a tensor, each by itself.
    Dense(Tensor),
    /// In the tensors of a quantised module.
    Quantised(Box<QuantModule>),
}

impl MatrixPart {
    /// Returns the tensor of a part that is stored dense.
    pub fn dense(&self) -> Result<&Tensor> {
        match &self.source {
            PartSource::Dense(tensor) => Ok(tensor),
            PartSource::Quantised(module) => {
                Err(Error::internal(format!("{} is not stored dense", module.name)))
            }
        }
    }

    /// Returns the bytes to read from the files.
    pub fn stored_bytes(&self) -> u64 {
        match &self.source {
            PartSource::Dense(tensor) => tensor.len_bytes,
            PartSource::Quantised(module) => module.stored_bytes(),
        }
    }
}

/// A matrix `[out_features, in_features]` made of one tensor, or of several stacked by rows.
#[derive(Clone, Debug, PartialEq)]
pub struct MatrixPlan {
    /// From the first row on.
    pub parts: Vec<MatrixPart>,
    /// Sum of the parts' rows.
    pub out_features: usize,
    /// Columns.
    pub in_features: usize,
    /// The layout of every part.
    pub layout: MatrixLayout,
    /// The axis along which devices divide it.
    pub shard: ShardAxis,
    /// The format that it is kept in; `None` keeps every number by itself, in the model's type.
    pub quantised: Option<QuantFormat>,
    /// Whether it is a gate on top of what the gate multiplies.
    pub is_gated: bool,
}

/// A vector made of one tensor, or of several one after the other; kept in f32.
#[derive(Clone, Debug, PartialEq)]
pub struct VectorPlan {
    /// From the first element on.
    pub parts: Vec<Tensor>,
    /// Sum of the parts' lengths.
    pub len: usize,
    /// [`ShardAxis::Out`] if it belongs to output features that devices divide.
    pub shard: ShardAxis,
}

impl MatrixPlan {
    /// The same, divided along an axis.
    pub fn sharded(self, shard: ShardAxis) -> Self {
        MatrixPlan { shard, ..self }
    }

    /// Whether a part is stored quantised.
    pub fn is_stored_quantised(&self) -> bool {
        self.parts.iter().any(|part| matches!(part.source, PartSource::Quantised(_)))
    }

    /// Whether inputs may be stored in another order than their own.
    pub fn may_be_ordered(&self) -> bool {
        self.parts.iter().any(|part| match &part.source {
            PartSource::Dense(_) => false,
            PartSource::Quantised(module) => module.may_be_ordered(),
        })
    }

    /// Returns the format in which all parts are stored; `None` if any of them is dense, or if they differ in
    /// more than the type of their scales, whether they have zeros and whether activations are quantised: then
    /// all of them become dense.
    pub fn stored_format(&self) -> Option<QuantFormat> {
        let mut common: Option<QuantFormat> = None;
        for part in &self.parts {
            let PartSource::Quantised(module) = &part.source else { return None };
            let format = module.format;
            common = Some(match common {
                None => format,
                Some(other) => other.with(&format, self.in_features)?,
            });
        }
        common
    }

    /// Has the matrix brought into `format`, unless it is stored quantised.
    pub fn quantise(&mut self, format: QuantFormat) {
        if !self.is_stored_quantised() {
            self.quantised.get_or_insert(format);
        }
    }

    /// The same, with every number by itself.
    pub fn dense(&self) -> Self {
        MatrixPlan { quantised: None, ..self.clone() }
    }

    /// Has its products keep their activations.
    pub fn keep_activations(&mut self) {
        if let Some(format) = &mut self.quantised {
            format.quantises_inputs = false;
        }
    }

    /// Returns in what form it is multiplied on the CPU.
    pub fn form(&self) -> WeightForm {
        match self.quantised {
            Some(format) => WeightForm::Quantised { format, is_ordered: self.may_be_ordered() },
            None => WeightForm::Dense,
        }
    }

    /// Returns the bytes to read from the files.
    pub fn stored_bytes(&self) -> u64 {
        self.parts.iter().map(MatrixPart::stored_bytes).fold(0, u64::saturating_add)
    }

    /// The same, of a gate on top of what it multiplies.
    pub fn gated(self) -> Self {
        MatrixPlan { is_gated: true, ..self }
    }
}

impl VectorPlan {
    /// The same, divided along an axis.
    pub fn sharded(self, shard: ShardAxis) -> Self {
        VectorPlan { shard, ..self }
    }
}

/// Turns plans into something.
pub trait WeightReader {
    /// The result for a matrix.
    type Matrix;
    /// The result for a vector.
    type Vector;
    /// Called once for each matrix, in the order of the forward pass.
    fn matrix(&mut self, plan: &MatrixPlan) -> Result<Self::Matrix>;
    /// Whether the matrices of a layer's experts, those of gates and ups and those of downs, are taken in the
    /// formats that they are planned in. Otherwise `matrix` gets all of them with every number by itself.
    fn takes_formats_of_experts(
        &self,
        _gate_up: &[MatrixPlan],
        _down: &[MatrixPlan],
    ) -> Result<bool> {
        Ok(true)
    }
    /// Called once for each vector that is of neither kind below (a bias), in the order of the forward pass.
    fn vector(&mut self, plan: &VectorPlan) -> Result<Self::Vector>;
    /// Called instead of `vector` for the factors of a norm. Only a reader that makes up numbers
    /// tells them apart.
    fn norm_weight(&mut self, plan: &VectorPlan) -> Result<Self::Vector> {
        self.vector(plan)
    }
    /// Called instead of `vector` for a table, such as embeddings of positions.
    fn table(&mut self, plan: &VectorPlan) -> Result<Self::Vector> {
        self.vector(plan)
    }
}
