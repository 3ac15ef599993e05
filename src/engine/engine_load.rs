//! Loading: from a path to an engine that can take requests.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Instant;

use super::batch_builder::BatchBuilder;
use super::block_pool::BlockPool;
use super::device_starter::DeviceStarter;
use super::generation_config::GenerationConfig;
use super::log::{LogLevel, Logger};
use super::memory_plan::{most_swapped, KvSize};
use super::order::Machine;
use super::placement::{device_context, expect_on_device, place, DeviceChoice};
use super::scheduler::Scheduler;
use super::service::Service;
use super::stats::EngineStats;
use super::tokenizer_reader::TokenizerReader;
use crate::backend::cpu::{CpuBackend, MAX_THREADS};
use crate::error::{check_room, Error, ErrorKind, Result};
use crate::memory::{DType, MemoryStats};
use crate::model::config::MAX_CONFIG_BYTES;
use crate::model::folder::Folder;
use crate::model::{LoadOptions, Model, ModelConfig, Workspace};
use crate::ops::kv_cache::layout::BLOCK_SIZE;
use crate::text::{
    ChatTemplate, Detokenizer, SpecialTokens, Tokenizer, MAX_TEMPLATE_BYTES, MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_CONFIG_BYTES,
};

/// How to load. 0 leaves a number to the library.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// Where to compute.
    pub device: DeviceChoice,
    /// Element type of weights and KV cache; `None`: as stored.
    pub dtype: Option<DType>,
    /// Threads of the kernels; 0: one for each core.
    pub num_threads: usize,
    /// Map weight files instead of reading them.
    pub map_files: bool,
    /// Longest context of a request; 0: as the config says.
    pub max_context_tokens: u64,
    /// Tokens in the KV cache; 0: what the budget leaves, or a share of the memory that is free.
    pub kv_cache_tokens: u64,
    /// Budget for weights, KV cache and work space together, on the device that computes; 0: none.
    pub max_memory_bytes: u64,
    /// Most sequences in a step; 0: as many as pay on the device.
    pub max_batch_size: u32,
    /// Tokens of prompts in a step; 0: as many as pay on the device.
    pub max_prefill_tokens: u64,
    /// Most bytes of the host for preempted requests; 0: a share of what is available for a model on a device, none
    /// for one on the CPU.
    pub max_swap_bytes: u64,
    /// Never take keys and values that another request, or another part of the same, has computed.
    pub no_prefix_cache: bool,
    /// See [`LoadOptions::deterministic`].
    pub deterministic: bool,
}

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
    /// The sizes in a config.
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
    model: Arc<Model>,
    architecture: String,
    folder: Folder,
    tokenizer: Result<Arc<Tokenizer>>,
    chat_template: Result<ChatTemplate>,
    no_special_tokens: SpecialTokens,
    generation_config: GenerationConfig,
    service: Service,
    max_context_tokens: u64,
    kv_cache_tokens: u64,
    closed: Arc<AtomicBool>,
    process_id: u32,
    load_seconds: f64,
    workspace_bytes: u64,
}

/// More than all the small allocations of a load together, which are not checked one by one.
const SMALL_ALLOCATIONS_BYTES: usize = 2 << 20;

fn lost<T>() -> Result<T> {
    Err(Error::internal("a load was given up for no reason"))
}

/// The folder's tokenizer. [`ErrorKind::NotFound`] if it has no tokenizer.json.
pub(super) fn read_tokenizer(folder: &Folder) -> Result<Tokenizer> {
    let json = folder.read_optional_file("tokenizer.json", MAX_TOKENIZER_BYTES)?;
    let Some(json) = json else {
        return Err(Error::new(ErrorKind::NotFound, "the folder has no tokenizer.json"));
    };
    let config = folder.read_optional_file("tokenizer_config.json", MAX_TOKENIZER_CONFIG_BYTES)?;
    Tokenizer::from_bytes(&json, config.as_deref())
}

/// The folder's chat template, `None` if it has none.
pub(super) fn read_chat_template(folder: &Folder) -> Result<Option<ChatTemplate>> {
    let jinja = folder.read_optional_file("chat_template.jinja", MAX_TEMPLATE_BYTES)?;
    let config = folder.read_optional_file("tokenizer_config.json", MAX_TOKENIZER_CONFIG_BYTES)?;
    ChatTemplate::from_files(config.as_deref(), jinja.as_deref())
}

/// The folder's generation_config.json, and the end tokens of its config.json.
pub(super) fn read_generation_config(
    folder: &Folder,
    config: &ModelConfig,
) -> Result<GenerationConfig> {
    GenerationConfig::from_files(
        folder.read_optional_file("generation_config.json", MAX_CONFIG_BYTES)?.as_deref(),
        folder.read_optional_file("config.json", MAX_CONFIG_BYTES)?.as_deref(),
        config.vocab_size,
    )
}

impl Engine {
    /// Opens a folder or cached repo id and loads it. `progress` hears fractions of the weights from 0
    /// to 1 and cancels by returning false.
    pub fn load(
        path: &str,
        options: &EngineOptions,
        log: Logger,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<Engine> {
        let begin = Instant::now();
        let tell = |done: &str| {
            let seconds = begin.elapsed().as_secs_f64();
            log.log(LogLevel::Debug, || format!("{done} after {seconds:.3} s"));
        };
        check_room(SMALL_ALLOCATIONS_BYTES, "loading a model")?;
        let opened = Model::open(path)?;
        for warning in opened.warnings() {
            log.log(LogLevel::Warning, || warning.clone());
        }
        let folder = opened.folder().clone();
        let config = opened.config().clone();
        let expected_dtype = expect_on_device(options, &opened);
        let _starter = expected_dtype.map(|_| DeviceStarter::start());
        let reader = TokenizerReader::start(&folder);
        // The small files first: a damaged one is told before the weights are read.
        let chat_template = match read_chat_template(&folder) {
            Ok(Some(template)) => Ok(template),
            Ok(None) => Err(Error::unsupported("the model's folder has no chat template")),
            // That says nothing about the template; later there may be memory enough.
            Err(error) if error.kind() == ErrorKind::OutOfMemory => return Err(error),
            Err(error) => {
                log.log(LogLevel::Warning, || format!("chat messages cannot be used: {error}"));
                Err(Error::unsupported(error.message()))
            }
        };
        let mut generation_config = read_generation_config(&folder, &config)?;
        for ignored in &generation_config.ignored {
            log.log(LogLevel::Warning, || {
                format!("generation_config.json: {ignored} is set, but xserv does not implement it")
            });
        }

        let backend = Arc::new(CpuBackend::new(num_threads(options.num_threads)?)?);
        tell("headers read");
        let mut load_options = LoadOptions {
            dtype: expected_dtype,
            map_files: options.map_files,
            deterministic: options.deterministic,
        };
        let progress = &mut |fraction: f32| !reader.has_failed() && progress(fraction);
        let begun = match expected_dtype {
            Some(_) => match opened.begin_on_device(&backend, &load_options, progress) {
                Ok(begun) => Some(begun),
                // Why it was cancelled.
                Err(_) if reader.has_failed() => return reader.finish().and_then(|_| lost()),
                Err(error) => return Err(error),
            },
            None => None,
        };
        let (planned, mut size) = place(options, &opened, &log)?;
        load_options.dtype = Some(planned.dtype);
        let mut workspace = Workspace::new();
        let limits = planned.limits;
        let model = if planned.on_device {
            let context = device_context(options)?;
            tell("device started");
            match begun {
                Some(load) => load.finish(context),
                None => opened
                    .begin_on_device(&backend, &load_options, progress)
                    .and_then(|load| load.finish(context)),
            }
        } else {
            drop(begun);
            // Refused before the weights are read, if need be.
            workspace.reserve(&config, limits.max_step_tokens(), limits.max_sequences)?;
            opened.load(backend.clone(), &load_options, progress)
        };
        tell("weights read");
        let tokenizer = match reader.finish() {
            Ok(tokenizer) => Ok(Arc::new(tokenizer)),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                log.log(LogLevel::Warning, || format!("{error}: only token ids can be used"));
                Err(Error::unsupported(error.message()))
            }
            Err(error) => return Err(error),
        };
        let model = model?;
        tell("tokenizer read");
        if let (true, Ok(tokenizer)) = (generation_config.eos_token_ids.is_empty(), &tokenizer) {
            // Neither config names an end token: the tokenizer's own.
            generation_config.eos_token_ids.extend(tokenizer.eos_token_id());
        }
        if model.weights_bytes() > planned.memory.weights_bytes {
            // An output matrix that is declared to be the embedding, but is not: less is left.
            size = planned.with_weights_bytes(model.weights_bytes()).kv_size(options)?;
        }
        let KvSize { max_context_tokens, kv_cache_tokens } = size;
        if max_context_tokens < planned.max_context {
            log.log(LogLevel::Warning, || {
                format!(
                    "the context is {max_context_tokens} tokens instead of {}: there is not memory for a \
                     larger KV cache",
                    planned.max_context
                )
            });
        }
        if planned.on_device {
            model.reserve_on_device(&mut workspace, &limits.passes(planned.max_context))?;
        }
        tell("work space made");
        let num_blocks = kv_cache_tokens.div_ceil(BLOCK_SIZE as u64) as usize;
        let kv = model.kv_cache(num_blocks)?;
        tell("KV cache made");
        // Slots are numbered in 32 bits.
        if u32::try_from(num_blocks.saturating_mul(BLOCK_SIZE)).is_err() {
            return Err(Error::invalid_argument("the KV cache has more than 2^32 tokens"));
        }
        let pool = BlockPool::new(num_blocks as u32, !options.no_prefix_cache)?;
        let model = Arc::new(model);
        let closed = Arc::new(AtomicBool::new(false));
        // As many as the longest context needs, or all.
        let most_blocks = (max_context_tokens as usize).div_ceil(BLOCK_SIZE).min(num_blocks);
        let builder = BatchBuilder::with_room(&limits, most_blocks)?;
        let swap = model.kv_swap();
        let most_swapped = most_swapped(options, planned.on_device, swap.place_bytes());
        let machine = Machine { kv, swap, workspace, builder };
        let mut scheduler = Scheduler::new(pool, limits)?;
        scheduler.set_most_swapped(most_swapped);
        let service = Service::new(model.clone(), backend, machine, scheduler, closed.clone());
        let engine = Engine {
            architecture: config.family.name.to_string(),
            folder,
            tokenizer,
            chat_template,
            no_special_tokens: SpecialTokens::default(),
            generation_config,
            service,
            max_context_tokens,
            kv_cache_tokens: (num_blocks * BLOCK_SIZE) as u64,
            closed,
            process_id: std::process::id(),
            load_seconds: begin.elapsed().as_secs_f64(),
            workspace_bytes: planned.memory.workspace_bytes,
            model,
        };
        log.log(LogLevel::Info, || {
            format!(
                "loaded {} ({} parameters, {}, {} MiB) on {} in {:.2} s; context {} tokens, KV cache {} \
                 tokens of {} bytes",
                engine.architecture,
                engine.num_parameters(),
                engine.dtype(),
                engine.weights_bytes() >> 20,
                engine.device_name(),
                engine.load_seconds,
                engine.max_context_tokens,
                engine.kv_cache_tokens,
                engine.kv_bytes_per_token(),
            )
        });
        Ok(engine)
    }

    /// Refuses to go on in a forked child, where the threads of the pool do not exist.
    pub fn check_process(&self) -> Result<()> {
        if std::process::id() == self.process_id {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Forked,
            "the model was loaded before this process was forked: load it again in the child",
        ))
    }

    /// Ends every request as cancelled, now and later. For when the model's handle is freed.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Was it closed?
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The tokenizer, or why there is none.
    pub fn tokenizer(&self) -> Result<&Arc<Tokenizer>> {
        self.tokenizer.as_ref().map_err(Error::clone)
    }

    /// The chat template, or why there is none.
    pub fn chat_template(&self) -> Result<&ChatTemplate> {
        self.chat_template.as_ref().map_err(Error::clone)
    }

    /// The special tokens by role, for templates.
    pub fn special_tokens(&self) -> &SpecialTokens {
        match &self.tokenizer {
            Ok(tokenizer) => tokenizer.special_tokens(),
            Err(_) => &self.no_special_tokens,
        }
    }

    /// A detokenizer for one stream of ids.
    pub fn detokenizer(&self, skip_special: bool) -> Result<Detokenizer> {
        Ok(Detokenizer::new(self.tokenizer()?.clone(), skip_special))
    }

    /// Ids to text.
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

    /// Bytes of weights, work space and KV cache at their peak: on a device as its allocator counts them, on
    /// the host with the blocks that have been used.
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

    /// What the allocator of the model's device counts; `None` on the CPU.
    pub fn device_memory_stats(&self) -> Option<MemoryStats> {
        self.model.compute_context().map(|context| context.memory_stats())
    }

    /// What the engine has done and is doing.
    pub fn stats(&self) -> EngineStats {
        self.service.stats()
    }

    /// The model's own defaults.
    pub fn generation_config(&self) -> &GenerationConfig {
        &self.generation_config
    }

    /// Tokens that end a generation.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.generation_config.eos_token_ids
    }

    /// As config.json names it.
    pub fn architecture(&self) -> &str {
        &self.architecture
    }

    /// The folder that was opened.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// For people: backend, instruction set, threads, or the name of the GPU.
    pub fn device_name(&self) -> String {
        self.model.device_name()
    }

    /// Sizes of the model.
    pub fn shape(&self) -> ModelShape {
        ModelShape::of(self.model.config())
    }

    /// Element type of weights and KV cache.
    pub fn dtype(&self) -> DType {
        self.model.dtype()
    }

    /// Threads of the kernels; 0 on a GPU.
    pub fn num_threads(&self) -> usize {
        self.model.num_threads()
    }

    /// Number of weights.
    pub fn num_parameters(&self) -> u64 {
        self.model.num_parameters()
    }

    /// Bytes of the weights in memory.
    pub fn weights_bytes(&self) -> u64 {
        self.model.weights_bytes()
    }

    /// Bytes of KV cache for a token.
    pub fn kv_bytes_per_token(&self) -> u64 {
        self.model.kv_layout().bytes_per_token() as u64
    }

    /// Tokens that the KV cache holds.
    pub fn kv_cache_tokens(&self) -> u64 {
        self.kv_cache_tokens
    }

    /// Longest context of a request.
    pub fn max_context_tokens(&self) -> u64 {
        self.max_context_tokens
    }

    /// The most bytes that activations and scratch take, as planned.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    /// How long loading took.
    pub fn load_seconds(&self) -> f64 {
        self.load_seconds
    }
}

pub(super) fn num_threads(wanted: usize) -> Result<usize> {
    match wanted {
        0 => Ok(std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS))),
        n if n <= MAX_THREADS => Ok(n),
        n => Err(Error::invalid_argument(format!(
            "num_threads is {n}, but at most {MAX_THREADS} are allowed"
        ))),
    }
}

pub(super) fn context_limit(wanted: u64, config: &ModelConfig) -> Result<u64> {
    let limit = config.max_context_tokens as u64;
    match wanted {
        0 => Ok(limit),
        n if n <= limit => Ok(n),
        n => Err(Error::invalid_argument(format!(
            "max_context_tokens is {n}, but the model's context is {limit}"
        ))),
    }
}
