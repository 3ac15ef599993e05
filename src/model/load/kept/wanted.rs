//! The tensors of a model that a load quantises, and what is kept of each.

use crate::error::{Error, Result};
use crate::model::checkpoint::Tensor;
use crate::model::decoder::block::DecoderPlan;
use crate::model::load::weights::{MatrixPlan, PartSource, VectorPlan, WeightReader};
use crate::model::safetensors::StoredDType;
use crate::ops::quantised::QuantFormat;

/// A tensor that a load quantises.
pub(super) struct Wanted {
    /// The tensor of the model.
    pub source: Tensor,
    /// Rows.
    pub out_features: usize,
    /// Columns.
    pub in_features: usize,
    /// The format of the result.
    pub format: QuantFormat,
}

/// A tensor of the file.
pub(super) struct WantedTensor {
    /// Its name.
    pub name: String,
    /// The element type.
    pub dtype: StoredDType,
    /// The dimensions.
    pub shape: [usize; 2],
    /// The bytes of a row.
    pub row_bytes: usize,
}

impl WantedTensor {
    /// Returns the length in bytes.
    pub fn len_bytes(&self) -> Result<u64> {
        let len = self.shape[0].checked_mul(self.row_bytes);
        len.map(|len| len as u64).ok_or_else(|| Error::out_of_memory(&self.name, usize::MAX))
    }
}

impl Wanted {
    fn tensor(&self, what: &str, dtype: StoredDType, columns: usize) -> WantedTensor {
        WantedTensor {
            name: format!("{}.{what}", self.source.name),
            dtype,
            shape: [self.out_features, columns],
            row_bytes: columns * (dtype.bitsize() / 8),
        }
    }

    /// Returns the tensor of the scales.
    pub fn scales(&self) -> WantedTensor {
        self.tensor("scales", StoredDType::BF16, self.format.num_groups(self.in_features))
    }

    /// Returns the tensor of the codes.
    pub fn codes(&self) -> WantedTensor {
        self.tensor("codes", StoredDType::U8, self.format.code.row_bytes(self.in_features))
    }

    /// Returns the tensor of the zeros; `None` if the format has none.
    pub fn zeros(&self) -> Option<WantedTensor> {
        let groups = self.format.num_groups(self.in_features);
        self.format.has_zeros.then(|| self.tensor("zeros", StoredDType::U8, groups))
    }
}

/// Whether `plan` is quantised at load: its numbers are stored each by itself.
pub(in crate::model::load) fn is_quantised_at_load(plan: &MatrixPlan) -> bool {
    plan.quantised.is_some() && !plan.is_stored_quantised()
}

/// Collects the tensors of matrices that are quantised at load.
struct Collect(Vec<Wanted>);

impl WeightReader for Collect {
    type Matrix = ();
    type Vector = ();

    fn matrix(&mut self, plan: &MatrixPlan) -> Result<()> {
        let Some(format) = plan.quantised.filter(|_| is_quantised_at_load(plan)) else {
            return Ok(());
        };
        for part in &plan.parts {
            let PartSource::Dense(source) = &part.source else { continue };
            let room = self.0.try_reserve(1);
            room.map_err(|_| Error::out_of_memory("the list of weights", 1))?;
            self.0.push(Wanted {
                source: source.clone(),
                out_features: part.out_features,
                in_features: plan.in_features,
                format,
            });
        }
        Ok(())
    }

    fn vector(&mut self, _: &VectorPlan) -> Result<()> {
        Ok(())
    }
}

/// Returns the tensors that a load of `plan` quantises, in the order of the forward pass.
pub(super) fn wanted(plan: &DecoderPlan) -> Result<Vec<Wanted>> {
    let mut collect = Collect(Vec::new());
    plan.read(&mut collect)?;
    Ok(collect.0)
}
