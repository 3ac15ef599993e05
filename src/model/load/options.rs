//! The options for loading a model.

use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::memory::DType;
use crate::ops::kv_cache::layout::KvFormat;
use crate::ops::linear::cpu::WeightForm;
use crate::ops::quantised::{quantised_format, Code, QuantFormat};

/// The options for loading a model.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Element type of the weights, and of the KV cache if that has no other format; `None` takes the
    /// one that is stored.
    pub dtype: Option<DType>,
    /// Read through a mapping of the files instead of `pread`. A file that another process cuts
    /// short meanwhile then kills this process.
    pub map_files: bool,
    /// On a GPU: a row's logits have the same bits whatever is computed beside it, however its
    /// prompt is cut, and whether it is computed for the first time or again. On the CPU that is
    /// always so, except with quantised weights in bf16 on a processor with AMX or AMD's AVX-512 BF16:
    /// there it holds with this option only.
    pub deterministic: bool,
    /// What the KV cache stores.
    pub kv_format: KvFormat,
    /// What products with quantised weights take their activations as.
    pub activations: ActivationFormat,
    /// The file in which matrices that are quantised at load are kept: read if it is there, else made.
    pub kept_weights: Option<PathBuf>,
}

/// What products with quantised weights take their activations as.
///
/// With weights of integers on the CPU these are integers of 16 bits, with a scale for each group of inputs,
/// unless [`Int8`](ActivationFormat::Int8) is chosen. In passes of many tokens of a model of bf16 that is not
/// deterministic, they are numbers of bf16 where the processor multiplies them (AMX, AMD's AVX-512 BF16).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationFormat {
    /// Where weights are FP8, as the folder's config says: in FP8 too, with a scale for each token and 128
    /// inputs, or as they are computed. (On Hopper they are as computed in steps of few tokens of narrow
    /// models.) Where weights are integers of 8 bits of which rows have one scale, and the config says so,
    /// steps of many tokens on Hopper take them as integers of 8 bits with a scale for each token.
    #[default]
    AsComputed,
    /// The same, and with weights of integers on the CPU as integers of 8 bits, with a scale for each group of
    /// inputs. With groups of fewer than 64, AMX takes numbers of bf16 in such passes as well.
    Int8,
    /// Never in 8 bits, whatever the config says. A model's
    /// [`ModelHeaders::keep_activations`](crate::model::ModelHeaders::keep_activations) does that.
    Unquantised,
}

impl ActivationFormat {
    /// Returns the format of a matrix whose products take their activations so.
    pub(in crate::model) fn of(self, format: QuantFormat) -> QuantFormat {
        let quantises_inputs = if format.code.is_float() {
            format.quantises_inputs
        } else {
            self == ActivationFormat::Int8
        };
        QuantFormat { quantises_inputs, ..format }
    }

    /// The same of the form of a matrix.
    pub(in crate::model) fn of_form(self, form: WeightForm) -> WeightForm {
        match form {
            WeightForm::Dense => form,
            WeightForm::Quantised { format, is_ordered } => {
                WeightForm::Quantised { format: self.of(format), is_ordered }
            }
        }
    }
}

/// The storage of the matrices of the layers, or of the embedding and the output matrix. Norms and
/// biases stay as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightStorage {
    /// As the files have them.
    #[default]
    AsStored,
    /// Numbers of 32 and 16 bits become 8-bit integers while they are read.
    Int8,
    /// Numbers of 32 and 16 bits become 4-bit integers while they are read.
    Int4,
}

impl WeightStorage {
    /// Returns the inputs that share a scale if the caller does not say.
    const fn default_group_size(self) -> usize {
        match self {
            WeightStorage::Int4 => 32,
            WeightStorage::AsStored | WeightStorage::Int8 => 128,
        }
    }

    /// Returns the format of the matrices that are quantised; `None` if none is. `group_size` 0 leaves
    /// the size to the library.
    pub fn format(self, group_size: usize) -> Result<Option<QuantFormat>> {
        let code = match self {
            WeightStorage::AsStored if group_size == 0 => return Ok(None),
            WeightStorage::AsStored => {
                return Err(Error::invalid_argument(
                    "a group size was given, but the weights are not quantised at load",
                ))
            }
            WeightStorage::Int8 => Code::Int8,
            WeightStorage::Int4 => Code::Int4,
        };
        let group_size = if group_size == 0 { self.default_group_size() } else { group_size };
        if !group_size.is_multiple_of(32) || group_size > 1 << 20 {
            return Err(Error::invalid_argument(format!(
                "the group size is {group_size}, but must be a multiple of 32 up to {}",
                1 << 20
            )));
        }
        Ok(Some(quantised_format(code, group_size)))
    }

    /// Returns the format of the embedding and the output matrix, if they are quantised: to 8 bits,
    /// since 4 would cost more than they save.
    pub fn embeddings_format(self) -> Result<Option<QuantFormat>> {
        match self {
            WeightStorage::AsStored | WeightStorage::Int8 => self.format(0),
            WeightStorage::Int4 => Err(Error::invalid_argument(
                "embeddings is int4, but embeddings are kept as stored or as int8",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::quantised::Code;

    #[test]
    fn a_cpu_has_integers_of_8_bits_where_the_caller_asks_for_them() {
        let format = |code, quantises_inputs| {
            let (group_size, has_zeros, scale) = (usize::MAX, false, DType::F32);
            QuantFormat { code, group_size, has_zeros, scale, quantises_inputs }
        };
        for says in [false, true] {
            let of = |activations: ActivationFormat, code| {
                activations.of(format(code, says)).quantises_inputs
            };
            assert_eq!(of(ActivationFormat::AsComputed, Code::Fp8), says);
            assert_eq!(of(ActivationFormat::Int8, Code::Fp8), says);
            assert!(!of(ActivationFormat::AsComputed, Code::Int8));
            assert!(of(ActivationFormat::Int8, Code::Int4));
        }
    }
}
