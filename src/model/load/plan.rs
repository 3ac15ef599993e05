//! Plans how the tensors of the files become the matrices and vectors of a model.
//!
//! A [`Planner`] finds the tensors of a checkpoint, and checks names, shapes and types against the
//! headers; what a family asks it for becomes a [`DecoderPlan`]. A [`WeightReader`] then turns each
//! plan into a loaded weight (or, for a report, into its size).

use std::collections::HashSet;

use crate::error::{Error, Result};
use crate::memory::DType;
use crate::model::checkpoint::{Checkpoint, Tensor};
use crate::model::config::ModelConfig;
use crate::model::decoder::block::{DecoderPlan, MlpWeights, TokenMatrices};
use crate::model::load::weights::{MatrixPart, MatrixPlan, PartSource, VectorPlan, WeightReader};
use crate::model::quantised::{self, QuantConfig, QuantModule};
use crate::model::safetensors::compute_dtype;
use crate::ops::linear::cpu::WeightForm;
use crate::ops::linear::{MatrixLayout, ShardAxis};
use crate::ops::quantised::QuantFormat;

/// A decoder as its headers describe it.
pub struct PlannedDecoder {
    /// The plan, with the embedding as the output matrix wherever the config declares the two tied.
    pub plan: DecoderPlan,
    /// The output matrix that is stored although it is declared to be the embedding, which is stored too. If
    /// it differs, the plan's output matrix is this one.
    pub stored_output: Option<MatrixPlan>,
    /// The names of the tensors that the model does not need and that are not known to be harmless, sorted.
    pub unused: Vec<String>,
}

impl DecoderPlan {
    /// Counts what the plan would load.
    pub fn totals(&self) -> Result<Totals> {
        let mut totals = Totals::default();
        self.read(&mut totals)?;
        Ok(totals)
    }

    /// Returns the matrices of the layers, and not those of tokens, nor routers, which are too small to
    /// be worth another format than that of their files.
    fn layer_matrices(&self) -> impl Iterator<Item = &MatrixPlan> {
        self.blocks.iter().flat_map(|block| {
            let attention = [&block.attention.qkv, &block.attention.output];
            attention.map(|layer| &layer.weight).into_iter().chain(block.mlp.matrices())
        })
    }

    fn routers(&self) -> impl Iterator<Item = &MatrixPlan> {
        self.blocks.iter().filter_map(|block| match &block.mlp {
            MlpWeights::Experts(experts) => Some(&experts.router),
            _ => None,
        })
    }

    /// Returns in what forms the matrices of the layers, routers aside, are multiplied on the CPU, each
    /// form once.
    pub fn weight_forms(&self) -> Result<Vec<WeightForm>> {
        forms_of(self.layer_matrices())
    }

    /// The same of the routers.
    pub fn router_forms(&self) -> Result<Vec<WeightForm>> {
        forms_of(self.routers())
    }

    fn layer_matrices_mut(&mut self) -> impl Iterator<Item = &mut MatrixPlan> {
        self.blocks.iter_mut().flat_map(|block| {
            let attention = [&mut block.attention.qkv, &mut block.attention.output];
            let mlp = block.mlp.matrices_mut();
            attention.map(|layer| &mut layer.weight).into_iter().chain(mlp)
        })
    }

    fn token_matrices_mut(&mut self) -> impl Iterator<Item = &mut MatrixPlan> {
        let TokenMatrices { embedding, output } = &mut self.tokens;
        std::iter::once(embedding).chain(output)
    }

    /// Has the matrices of the layers that are stored otherwise brought into `format`.
    pub fn quantise(&mut self, format: QuantFormat) {
        self.layer_matrices_mut().for_each(|matrix| matrix.quantise(format));
    }

    /// The same of the embedding and the output matrix.
    pub fn quantise_tokens(&mut self, format: QuantFormat) {
        self.token_matrices_mut().for_each(|matrix| matrix.quantise(format));
    }

    /// Has the products of all matrices keep their activations, whatever the folder's config says.
    pub fn keep_activations(&mut self) {
        self.layer_matrices_mut().for_each(MatrixPlan::keep_activations);
        self.token_matrices_mut().for_each(MatrixPlan::keep_activations);
    }
}

/// Returns the forms of some matrices, each once.
fn forms_of<'a>(matrices: impl Iterator<Item = &'a MatrixPlan>) -> Result<Vec<WeightForm>> {
    let mut forms = Vec::new();
    for matrix in matrices {
        let form = matrix.form();
        if !forms.contains(&form) {
            let no_room = |_| Error::out_of_memory("the forms of weights", size_of_val(&form));
            forms.try_reserve(1).map_err(no_room)?;
            forms.push(form);
        }
    }
    Ok(forms)
}

/// Buffers that older versions of the libraries stored: causal masks and rotary frequencies.
fn is_harmless(name: &str) -> bool {
    [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"]
        .iter()
        .any(|suffix| name.ends_with(suffix))
        || quantised::is_harmless(name)
}

/// Finds tensors in a checkpoint and remembers which were asked for.
pub struct Planner<'a> {
    checkpoint: &'a Checkpoint,
    quantisation: Option<&'a QuantConfig>,
    used: HashSet<String>,
    /// See [`PlannedDecoder::stored_output`].
    stored_output: Option<MatrixPlan>,
}

impl<'a> Planner<'a> {
    /// Makes a planner that has not been asked for anything.
    pub fn new(checkpoint: &'a Checkpoint, quantisation: Option<&'a QuantConfig>) -> Self {
        Planner { checkpoint, quantisation, used: HashSet::new(), stored_output: None }
    }

    /// Returns the plan that was made, with the tensors that it leaves over.
    pub fn finish(self, plan: DecoderPlan) -> PlannedDecoder {
        let mut unused: Vec<String> = self
            .checkpoint
            .tensors
            .keys()
            .filter(|name| !self.used.contains(*name) && !is_harmless(name))
            .cloned()
            .collect();
        unused.sort_unstable();
        PlannedDecoder { plan, stored_output: self.stored_output, unused }
    }

    /// Returns the prefix of all names: `with` if the tensor `<with><probe>` exists, nothing if
    /// `<probe>` does; otherwise `with`, so that the message about the missing tensor has the usual
    /// name.
    pub fn prefix(&self, with: &'static str, probe: &str) -> &'static str {
        let prefixed = self.checkpoint.contains(&format!("{with}{probe}"));
        if !prefixed && self.checkpoint.contains(probe) {
            ""
        } else {
            with
        }
    }

    /// Returns a matrix of tensors `[out_features, in_features]` stacked by rows, which may be
    /// quantised.
    pub fn rows(&mut self, parts: &[(String, usize)], in_features: usize) -> Result<MatrixPlan> {
        self.stacked(parts, in_features, self.quantisation)
    }

    /// Returns the router of experts, `[num_experts, in_features]`. It may be dense whatever the config
    /// says of linear layers: in Transformers 5 it is none of them.
    pub fn router(
        &mut self,
        name: String,
        num_experts: usize,
        in_features: usize,
    ) -> Result<MatrixPlan> {
        let stored = self.checkpoint.raw(&name);
        let is_quantised = stored.is_none_or(|tensor| compute_dtype(tensor.dtype).is_none());
        let is_dense = self.checkpoint.is_random() || !is_quantised;
        let quantisation = self.quantisation.filter(|_| !is_dense);
        self.stacked(&[(name, num_experts)], in_features, quantisation)
    }

    /// The same as [`Planner::rows`], where `quantisation` says what may be quantised.
    fn stacked(
        &mut self,
        parts: &[(String, usize)],
        in_features: usize,
        quantisation: Option<&QuantConfig>,
    ) -> Result<MatrixPlan> {
        let mut plan = MatrixPlan {
            parts: Vec::new(),
            out_features: 0,
            in_features,
            layout: MatrixLayout::Rows,
            shard: ShardAxis::None,
            quantised: None,
            is_gated: false,
        };
        for (name, out_features) in parts {
            let source = self.source(name, *out_features, in_features, quantisation)?;
            plan.parts.push(MatrixPart { source, out_features: *out_features });
            plan.out_features += out_features;
        }
        plan.quantised = match (quantisation, parts) {
            (Some(config), [(name, _), ..]) if self.checkpoint.is_random() => {
                let module = name.strip_suffix(".weight").unwrap_or(name);
                config.scheme(module)?.map(|scheme| scheme.usual_format())
            }
            _ => plan.stored_format(),
        };
        Ok(plan)
    }

    /// Returns expert `index` of a tensor `[num_experts, out_features, in_features]`.
    pub fn expert_rows(
        &mut self,
        name: &str,
        index: usize,
        num_experts: usize,
        (out_features, in_features): (usize, usize),
    ) -> Result<MatrixPlan> {
        let mut tensor = self.tensor(name, &[num_experts, out_features, in_features])?;
        tensor.name = format!("{name}[{index}]");
        tensor.len_bytes /= num_experts.max(1) as u64;
        tensor.file_offset += tensor.len_bytes * index as u64;
        Ok(MatrixPlan {
            parts: vec![MatrixPart { source: PartSource::Dense(tensor), out_features }],
            out_features,
            in_features,
            layout: MatrixLayout::Rows,
            shard: ShardAxis::None,
            quantised: None,
            is_gated: false,
        })
    }

    /// Whether a tensor is in the files.
    pub fn contains(&self, name: &str) -> bool {
        self.checkpoint.contains(name)
    }

    /// Returns a `Conv1D` weight `[in_features, out_features]`.
    pub fn columns(
        &mut self,
        name: &str,
        in_features: usize,
        out_features: usize,
    ) -> Result<MatrixPlan> {
        let tensor = self.tensor(name, &[in_features, out_features])?;
        Ok(MatrixPlan {
            parts: vec![MatrixPart { source: PartSource::Dense(tensor), out_features }],
            out_features,
            in_features,
            layout: MatrixLayout::Columns,
            shard: ShardAxis::None,
            quantised: None,
            is_gated: false,
        })
    }

    /// Returns a vector of one-dimensional tensors, one after the other.
    pub fn vector(&mut self, parts: &[(String, usize)]) -> Result<VectorPlan> {
        let mut plan = VectorPlan { parts: Vec::new(), len: 0, shard: ShardAxis::None };
        for (name, len) in parts {
            plan.parts.push(self.tensor(name, &[*len])?);
            plan.len += len;
        }
        Ok(plan)
    }

    /// Returns a table `[rows, columns]` that is kept as a vector, row after row.
    pub fn table(&mut self, name: &str, rows: usize, columns: usize) -> Result<VectorPlan> {
        let parts = vec![self.tensor(name, &[rows, columns])?];
        Ok(VectorPlan { parts, len: rows * columns, shard: ShardAxis::None })
    }

    /// Returns the embedding `embedding_name` and the output matrix `lm_head.weight`.
    ///
    /// As in Transformers 5: with tied embeddings one of the two suffices, whichever is there; if
    /// both are there and differ, they are not tied after all, which is left to
    /// [`PlannedDecoder::stored_output`].
    pub fn token_matrices(
        &mut self,
        config: &ModelConfig,
        embedding_name: &str,
    ) -> Result<TokenMatrices<MatrixPlan>> {
        const OUTPUT: &str = "lm_head.weight";
        let tied = config.tie_word_embeddings;
        let (vocab_size, hidden_size) = (config.vocab_size, config.hidden_size);
        let has_output = self.checkpoint.contains(OUTPUT);
        let swapped = tied && has_output && !self.checkpoint.contains(embedding_name);
        // An embedding is no linear layer, whatever a config says of those, and is stored dense. The
        // output matrix may be quantised.
        let mut plan = |name: &str| {
            let quantisation = self.quantisation.filter(|_| name == OUTPUT);
            self.stacked(&[(name.to_owned(), vocab_size)], hidden_size, quantisation)
        };
        let embedding = plan(if swapped { OUTPUT } else { embedding_name })?;
        let output = if !tied || (has_output && !swapped) { Some(plan(OUTPUT)?) } else { None };
        if tied {
            self.stored_output = output;
            return Ok(TokenMatrices { embedding, output: None });
        }
        Ok(TokenMatrices { embedding, output })
    }

    /// Returns a part `[out_features, in_features]` whose weight would be called `name`.
    fn source(
        &mut self,
        name: &str,
        out_features: usize,
        in_features: usize,
        quantisation: Option<&QuantConfig>,
    ) -> Result<PartSource> {
        if let (Some(config), Some(module)) = (quantisation, name.strip_suffix(".weight")) {
            let found =
                QuantModule::find(self.checkpoint, config, module, out_features, in_features)?;
            if let Some(found) = found {
                self.used.extend(found.tensor_names().map(str::to_owned));
                return Ok(PartSource::Quantised(Box::new(found)));
            }
        }
        self.tensor(name, &[out_features, in_features]).map(PartSource::Dense)
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let tensor = self.checkpoint.tensor(name, shape)?;
        self.used.insert(name.to_owned());
        Ok(tensor)
    }
}

/// The size and the format of a matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatrixSize {
    /// See [`MatrixPlan::may_be_ordered`].
    pub may_be_ordered: bool,
    /// Rows.
    pub out_features: usize,
    /// Columns.
    pub in_features: usize,
    /// See [`MatrixPlan::quantised`].
    pub quantised: Option<QuantFormat>,
}

/// The totals of a plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Totals {
    /// Numbers in all weights, a tied output matrix counted once.
    pub num_parameters: u64,
    /// Every matrix.
    pub matrices: Vec<MatrixSize>,
    /// Numbers in all vectors.
    pub vector_len: u64,
    /// Bytes to read from the files.
    pub stored_bytes: u64,
    /// Numbers in the matrices stored as f32, f16 and bf16.
    stored: [u64; 3],
}

impl Totals {
    /// Returns the element type in which most of the matrices' numbers are stored.
    pub fn stored_dtype(&self) -> DType {
        let [f32_len, f16_len, bf16_len] = self.stored;
        if f32_len >= f16_len && f32_len >= bf16_len {
            DType::F32
        } else if bf16_len >= f16_len {
            DType::BF16
        } else {
            DType::F16
        }
    }
}

impl WeightReader for Totals {
    type Matrix = ();
    type Vector = ();

    fn matrix(&mut self, plan: &MatrixPlan) -> Result<()> {
        for part in &plan.parts {
            let len = part.out_features as u64 * plan.in_features as u64;
            self.num_parameters += len;
            self.stored_bytes += part.stored_bytes();
            let PartSource::Dense(tensor) = &part.source else { continue };
            let [f32_len, f16_len, bf16_len] = &mut self.stored;
            *match tensor.dtype {
                DType::F32 => f32_len,
                DType::F16 => f16_len,
                DType::BF16 => bf16_len,
            } += len;
        }
        self.matrices.push(MatrixSize {
            out_features: plan.out_features,
            in_features: plan.in_features,
            quantised: plan.quantised,
            may_be_ordered: plan.may_be_ordered(),
        });
        Ok(())
    }

    fn vector(&mut self, plan: &VectorPlan) -> Result<()> {
        self.num_parameters += plan.len as u64;
        self.vector_len += plan.len as u64;
        self.stored_bytes += plan.parts.iter().map(|tensor| tensor.len_bytes).sum::<u64>();
        Ok(())
    }
}
