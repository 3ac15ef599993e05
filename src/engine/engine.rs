//! The handle of a loaded model, with its queries.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::constrained::LazyCompiler;
use super::generation_config::GenerationConfig;
use super::log::Logger;
use super::service::Service;
use super::stats::EngineStats;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{DType, MemoryStats};
use crate::model::folder::Folder;
use crate::model::{Model, ModelConfig};
use crate::ops::kv_cache::layout::BLOCK_SIZE;
use crate::process::Process;
use crate::text::{
    CallForm, ChatTemplate, Detokenizer, ResponseTemplate, SpecialTokens, Tokenizer,
};

/// The sizes of a model that users ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelShape {
    /// Length of a row of logits.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Transformer layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl ModelShape {
    /// Returns the sizes in a config.
    pub fn of(config: &ModelConfig) -> Self {
        ModelShape {
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            num_layers: config.num_layers,
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
        }
    }
}

/// A loaded model and everything that serves requests on it. Shared by all threads.
pub struct Engine {
    pub(super) model: Arc<Model>,
    pub(super) architecture: String,
    pub(super) folder: Folder,
    pub(super) tokenizer: Result<Arc<Tokenizer>>,
    pub(super) chat_template: Result<ChatTemplate>,
    pub(super) no_special_tokens: SpecialTokens,
    pub(super) constraints: LazyCompiler,
    /// The rules by which the model's answers are read, if it comes with some.
    pub(super) response_template: Option<Arc<ResponseTemplate>>,
    /// The form in which the model writes calls, found when a request first asks; `None` if it is
    /// not a known one.
    pub(super) call_form: OnceLock<Option<CallForm>>,
    pub(super) generation_config: GenerationConfig,
    pub(super) service: Service,
    pub(super) max_context_tokens: u64,
    pub(super) kv_cache_tokens: u64,
    pub(super) closed: Arc<AtomicBool>,
    pub(super) log: Arc<Logger>,
    pub(super) process: Process,
    pub(super) load_seconds: f64,
    pub(super) workspace_bytes: u64,
}

impl Engine {
    /// Refuses to go on in a forked child, where the threads of the pool do not exist.
    pub fn check_process(&self) -> Result<()> {
        if self.process.is_current() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Forked,
            "the model was loaded before this process was forked: load it again in the child",
        ))
    }

    /// Ends every request as cancelled, now and later. Called when the model's handle is freed.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.log.end();
    }

    /// Whether [`Engine::close`] has been called.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Returns the tokenizer, or the reason why there is none.
    pub fn tokenizer(&self) -> Result<&Arc<Tokenizer>> {
        self.tokenizer.as_ref().map_err(Error::clone)
    }

    /// Returns the chat template, or the reason why there is none.
    pub fn chat_template(&self) -> Result<&ChatTemplate> {
        self.chat_template.as_ref().map_err(Error::clone)
    }

    /// Returns the special tokens by role, for templates.
    pub fn special_tokens(&self) -> &SpecialTokens {
        match &self.tokenizer {
            Ok(tokenizer) => tokenizer.special_tokens(),
            Err(_) => &self.no_special_tokens,
        }
    }

    /// Returns a detokenizer for one stream of ids.
    pub fn detokenizer(&self, skip_special: bool) -> Result<Detokenizer> {
        Ok(Detokenizer::new(self.tokenizer()?.clone(), skip_special))
    }

    /// Returns the text of token ids.
    pub fn detokenize(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let tokenizer = self.tokenizer()?;
        ids.iter().try_for_each(|id| self.check_token_id(*id))?;
        tokenizer.decode(ids, skip_special)
    }

    /// Refuses an id that the model cannot produce. (Ids between the tokenizer's last token and the
    /// model's last row of logits are fine, and have no text.)
    pub fn check_token_id(&self, id: u32) -> Result<()> {
        let vocab_size = self.shape().vocab_size;
        if (id as usize) < vocab_size {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "token id {id} is outside the vocabulary of {vocab_size}"
        )))
    }

    pub(super) fn model(&self) -> &Model {
        &self.model
    }

    pub(super) fn service(&self) -> &Service {
        &self.service
    }

    pub(super) fn closed(&self) -> &Arc<AtomicBool> {
        &self.closed
    }

    /// Returns the bytes of weights, work space and KV cache at their peak: on a device as its
    /// allocator counts them, on the host with the blocks that have been used.
    pub fn peak_memory_bytes(&self) -> u64 {
        match self.model.compute_context() {
            Some(context) => context.memory_stats().peak as u64,
            None => {
                let blocks = self.stats().peak_used_blocks as u64;
                let kv = blocks * BLOCK_SIZE as u64 * self.kv_bytes_per_token();
                self.weights_bytes() + self.workspace_bytes + kv
            }
        }
    }

    /// Returns the counts of the allocator of the model's device; `None` on the CPU. For tests.
    #[doc(hidden)]
    pub fn device_memory_stats(&self) -> Option<MemoryStats> {
        self.model.compute_context().map(|context| context.memory_stats())
    }

    /// Statistics of what the engine has done and is doing.
    pub fn stats(&self) -> EngineStats {
        self.service.stats()
    }

    /// Returns the model's own defaults.
    pub fn generation_config(&self) -> &GenerationConfig {
        &self.generation_config
    }

    /// Returns the tokens that end a generation.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.generation_config.eos_token_ids
    }

    /// Returns the architecture that config.json names.
    pub fn architecture(&self) -> &str {
        &self.architecture
    }

    /// Returns the folder that was opened.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns a description for people: backend, instruction set and threads, or the name of the
    /// GPU.
    pub fn device_name(&self) -> String {
        self.model.device_name()
    }

    /// Returns the index of the GPU; `None` on the CPU.
    pub fn device_index(&self) -> Option<i32> {
        self.model.device_index()
    }

    /// Sizes of the model.
    pub fn shape(&self) -> ModelShape {
        ModelShape::of(self.model.config())
    }

    /// Returns the element type of weights and KV cache.
    pub fn dtype(&self) -> DType {
        self.model.dtype()
    }

    /// Threads of the kernels; 0 on a GPU.
    pub fn num_threads(&self) -> usize {
        self.model.num_threads()
    }

    /// Returns the number of weights.
    pub fn num_parameters(&self) -> u64 {
        self.model.num_parameters()
    }

    /// Returns the bytes of the weights in memory.
    pub fn weights_bytes(&self) -> u64 {
        self.model.weights_bytes()
    }

    /// Returns the bytes of KV cache for a token.
    pub fn kv_bytes_per_token(&self) -> u64 {
        self.model.kv_layout().bytes_per_token() as u64
    }

    /// Returns the number of tokens that the KV cache holds.
    pub fn kv_cache_tokens(&self) -> u64 {
        self.kv_cache_tokens
    }

    /// Returns the longest context of a request.
    pub fn max_context_tokens(&self) -> u64 {
        self.max_context_tokens
    }

    /// Returns the most bytes that activations and scratch take, as planned.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    /// Returns the seconds that loading took.
    pub fn load_seconds(&self) -> f64 {
        self.load_seconds
    }
}
