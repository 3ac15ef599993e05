//! The number of layers by which the host may be ahead of the device within a long pass: few, so
//! that a cancelled pass ends soon, but enough that the device never waits.

use crate::backend::cuda::{CudaContext, Event};
use crate::error::{try_with_capacity, Error, Result};
use crate::model::config::ModelConfig;

/// The work to queue ahead, in estimated seconds: many times what it takes to queue a layer.
const SECONDS_AHEAD: f64 = 0.004;
/// The floating-point operations per second that the estimate assumes.
const FLOPS: f64 = 5e14;
/// The maximum number of layers ahead.
const MAX_LAYERS: usize = 63;

/// Marks between layers, reused by each pass.
pub(in crate::model) struct Lead {
    marks: Vec<Event>,
}

fn no_mark() -> Error {
    Error::internal("no mark for a layer")
}

impl Lead {
    pub fn new(cuda: &CudaContext) -> Result<Self> {
        let mut marks = try_with_capacity(MAX_LAYERS + 1, "marks between layers")?;
        for _ in 0..=MAX_LAYERS {
            marks.push(Event::new(cuda)?);
        }
        Ok(Lead { marks })
    }

    /// Waits until the device is at most `layers` layers behind. Must be called before layer
    /// `index` of a pass is queued.
    pub fn keep(&self, cuda: &CudaContext, index: usize, layers: usize) -> Result<()> {
        let mark = |index: usize| self.marks.get(index % (layers + 1)).ok_or_else(no_mark);
        mark(index)?.record(cuda)?;
        match index.checked_sub(layers) {
            Some(index) => mark(index)?.synchronize(cuda),
            None => Ok(()),
        }
    }
}

/// Returns the number of layers of a pass over `num_tokens` tokens that may be ahead, or `None` if
/// all may be.
pub(super) fn layers_ahead(config: &ModelConfig, num_tokens: usize) -> Option<usize> {
    let heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim;
    let weights = config.hidden_size as f64 * (heads + 3 * config.mlp_width_of_token()) as f64;
    let seconds = 2.0 * weights * num_tokens as f64 / FLOPS;
    let layers = ((SECONDS_AHEAD / seconds).ceil() as usize).max(2);
    (layers <= MAX_LAYERS && layers < config.num_layers).then_some(layers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_passes_of_large_models_are_queued_in_parts() {
        let config = |hidden: usize, intermediate: usize, layers: usize, heads: usize| {
            let json = format!(
                r#"{{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": {hidden},
                "intermediate_size": {intermediate}, "vocab_size": 1000, "num_hidden_layers": {layers},
                "num_attention_heads": {heads}, "num_key_value_heads": 8, "head_dim": 128,
                "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"}}"#
            );
            ModelConfig::parse(json.as_bytes()).unwrap()
        };
        let large = config(4096, 12288, 36, 32);
        assert_eq!(layers_ahead(&large, 2048), Some(3));
        assert_eq!(layers_ahead(&large, 8192), Some(2));
        assert_eq!(layers_ahead(&large, 1), None);
        let small = config(1024, 3072, 28, 16);
        assert_eq!(layers_ahead(&small, 512), None);
        assert_eq!(layers_ahead(&small, 8192), Some(8));
    }
}
