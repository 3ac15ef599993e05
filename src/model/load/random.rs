//! Weights that are random numbers, for a checkpoint without files: a model of any shape can be
//! timed without its files, which for 32 billion numbers would take 60 GB. The numbers are the same
//! on the CPU and on a device, but for the rounding to another element type.

use super::loader::{piece_rows, Loader};
use super::weights::{MatrixPlan, VectorPlan, WeightReader};
use crate::error::{try_filled, Result};
use crate::ops::common::packed_matrix::{PackedMatrix, PairOrder};
use crate::ops::fill::cpu::mix;
use crate::ops::fill::{cpu, Noise};
use crate::ops::linear::{HostMatrix, MatrixLayout};

/// The seed from which all others follow.
const SEED: u64 = 0x78_7365_7276;
/// The standard deviation of embeddings of positions, as models are initialised.
const TABLE_STD: f32 = 0.02;

/// The random numbers of one weight after the other, in the order in which they are read. Those of
/// a matrix `W` have the standard deviation that gives `W x` the magnitude of `x`, so that hidden
/// states neither vanish nor overflow.
#[derive(Default)]
pub(in crate::model) struct WeightNoise {
    num_weights: u64,
}

impl WeightNoise {
    fn next(&mut self, mean: f32, std: f32) -> Noise {
        let seed = mix(SEED, self.num_weights);
        self.num_weights += 1;
        Noise { seed, mean, std }
    }

    /// Returns the numbers of a matrix, in the order in which its rows would be stored.
    pub fn matrix(&mut self, plan: &MatrixPlan) -> Noise {
        self.next(0.0, 1.0 / (plan.in_features.max(1) as f32).sqrt())
    }

    /// Returns the numbers of a bias: zeros.
    pub fn bias(&mut self) -> Noise {
        self.next(0.0, 0.0)
    }

    /// Returns the factors of a norm: ones.
    pub fn norm_weight(&mut self) -> Noise {
        self.next(1.0, 0.0)
    }

    /// Returns the numbers of a table.
    pub fn table(&mut self) -> Noise {
        self.next(0.0, TABLE_STD)
    }
}

/// Makes up the weights of a model on the CPU, in pieces, as they would be read.
pub(super) struct RandomWeights<'l, 'a> {
    loader: &'l mut Loader<'a>,
    noise: WeightNoise,
}

impl<'l, 'a> RandomWeights<'l, 'a> {
    /// Returns the state before the first weight.
    pub fn new(loader: &'l mut Loader<'a>) -> Self {
        RandomWeights { loader, noise: WeightNoise::default() }
    }

    fn fill_vector(&mut self, plan: &VectorPlan, noise: &Noise) -> Result<Vec<f32>> {
        let mut vector = try_filled(plan.len, 0.0, "a weight vector")?;
        cpu::fill(self.loader.backend, noise, &mut vector)?;
        self.loader.weights_bytes += (plan.len * size_of::<f32>()) as u64;
        self.loader.done_bytes += plan.parts.iter().map(|part| part.len_bytes).sum::<u64>();
        Ok(vector)
    }
}

impl WeightReader for RandomWeights<'_, '_> {
    type Matrix = HostMatrix;
    type Vector = Vec<f32>;

    fn matrix(&mut self, plan: &MatrixPlan) -> Result<HostMatrix> {
        let noise = self.noise.matrix(plan);
        if let Some(format) = plan.quantised {
            let matrix = self.loader.random_quantised(plan, format, noise.seed)?;
            return self.loader.pack_quantised(matrix);
        }
        let dtype = self.loader.dtype;
        let order = PairOrder::of(self.loader.backend);
        let (out_features, in_features) = (plan.out_features, plan.in_features);
        let arena = &mut self.loader.arena;
        let mut matrix = PackedMatrix::zeroed_in(arena, out_features, in_features, dtype, order)?;
        let writer = matrix.writer()?;
        let (num_rows, row_len) = match plan.layout {
            MatrixLayout::Rows => (plan.out_features, plan.in_features),
            MatrixLayout::Columns => (plan.in_features, plan.out_features),
        };
        let row_bytes = row_len * dtype.size_bytes();
        let stored = match plan.parts.first() {
            Some(part) => part.dense()?.dtype,
            None => dtype,
        };
        let rows = piece_rows(plan.layout, row_bytes);
        self.loader.in_pieces(
            num_rows,
            rows,
            row_len * stored.size_bytes(),
            &|files, first, last| {
                files.with_buffer((last - first) * row_bytes, |bytes| {
                    cpu::fill_bytes(&noise, (first * row_len) as u64, dtype, bytes);
                    match plan.layout {
                        MatrixLayout::Rows => writer.pack_rows(first, bytes, dtype),
                        MatrixLayout::Columns => {
                            writer.pack_columns(first, last - first, 0, bytes, dtype)
                        }
                    }
                })
            },
        )?;
        drop(writer);
        self.loader.weights_bytes += matrix.size_bytes() as u64;
        Ok(HostMatrix::Dense(matrix))
    }

    fn vector(&mut self, plan: &VectorPlan) -> Result<Vec<f32>> {
        let noise = self.noise.bias();
        self.fill_vector(plan, &noise)
    }

    fn norm_weight(&mut self, plan: &VectorPlan) -> Result<Vec<f32>> {
        let noise = self.noise.norm_weight();
        self.fill_vector(plan, &noise)
    }

    fn table(&mut self, plan: &VectorPlan) -> Result<Vec<f32>> {
        let noise = self.noise.table();
        self.fill_vector(plan, &noise)
    }
}
