//! Loading: from a path to an engine that can take requests.

use std::sync::atomic::AtomicBool;
use std::sync::Arc;
use std::time::Instant;

use super::batch_builder::BatchBuilder;
use super::block_pool::BlockPool;
use super::constrained::LazyCompiler;
use super::device_starter::DeviceStarter;
use super::engine::Engine;
use super::log::{LogLevel, LogTarget, Logger};
use super::memory_plan::{max_swapped, KvSize};
use super::options::{num_threads, EngineOptions};
use super::placement::{device_context, expect_on_device, place};
use super::scheduler::Scheduler;
use super::service::Service;
use super::step_resources::StepResources;
use super::text_files::{read_generation_config, read_templates};
use super::tokenizer_reader::TokenizerReader;
use crate::backend::cpu::CpuBackend;
use crate::error::{check_room, Error, ErrorKind, Result};
use crate::model::{ActivationFormat, LoadOptions, Model, ModelHeaders, Workspace};
use crate::ops::kv_cache::layout::BLOCK_SIZE;
use crate::process::Process;
use crate::text::{shortened, SpecialTokens};

/// More than all the small allocations of a load together, which are not checked each.
const SMALL_ALLOCATIONS_BYTES: usize = 2 << 20;

/// Reads the headers of the model, with its weights as the options want them.
pub(super) fn read_headers(path: &str, options: &EngineOptions) -> Result<ModelHeaders> {
    let format = options.weights.format(options.weights_group_size)?;
    let embeddings = options.embeddings.embeddings_format()?;
    if options.kept_weights.is_some() {
        let is_quantised = format.or(embeddings).is_some();
        if options.random_weights || !is_quantised {
            let why = if is_quantised {
                "the weights are random numbers"
            } else {
                "neither weights nor embeddings are quantised at load"
            };
            return Err(Error::invalid_argument(format!("kept_weights was given, but {why}")));
        }
    }
    let mut headers = if options.random_weights {
        Model::read_config_alone(path)?
    } else {
        Model::read_headers(path)?
    };
    if let Some(format) = format {
        headers.quantise(format);
    }
    if let Some(format) = embeddings {
        headers.quantise_tokens(format);
    }
    if options.activations == ActivationFormat::Unquantised {
        headers.keep_activations();
    }
    Ok(headers)
}

fn lost<T>() -> Result<T> {
    Err(Error::internal("a load was given up for no reason"))
}

impl Engine {
    /// Opens a folder or cached repo id and loads it. `progress` is called with the fraction of the
    /// weights that is loaded, from 0 to 1, and cancels by returning false.
    pub fn load(
        path: &str,
        options: &EngineOptions,
        log: Arc<Logger>,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<Engine> {
        let begin = Instant::now();
        let tell = |done: &str| {
            let seconds = begin.elapsed().as_secs_f64();
            log.log(LogLevel::Debug, LogTarget::Load, || format!("{done} after {seconds:.3} s"));
        };
        check_room(SMALL_ALLOCATIONS_BYTES, "loading a model")?;
        let mut headers = read_headers(path, options)?;
        if let Some(file) = &options.kept_weights {
            headers.recall_output(file);
        }
        let presumed = headers.presumed();
        for warning in presumed.warnings() {
            log.log(LogLevel::Warning, LogTarget::Load, || warning.clone());
        }
        let folder = presumed.folder().clone();
        let config = presumed.config().clone();
        let _starter = expect_on_device(options, presumed)
            .map(|_| DeviceStarter::start(options.device_index()));
        // The small files come first, so that a damaged one is reported before the weights are
        // read. The template is checked before the tokenizer's thread starts: it takes a stack for
        // a moment, which the other must not find missing.
        let templates = read_templates(&folder)?;
        let chat_template = templates.chat.map_err(|error| {
            if error.kind() != ErrorKind::NotFound {
                log.log(LogLevel::Warning, LogTarget::Load, || {
                    format!("chat messages cannot be used: {error}")
                });
            }
            error.with_kind(ErrorKind::Unsupported)
        });
        let response_template = match templates.response {
            Ok(template) => {
                for field in template.unknown_fields() {
                    log.log(LogLevel::Info, LogTarget::Load, || {
                        format!(
                            "response_template: the text of the field {:?} is left out of answers",
                            shortened(field)
                        )
                    });
                }
                Some(Arc::new(template))
            }
            Err(error) => {
                if error.kind() != ErrorKind::NotFound {
                    log.log(LogLevel::Warning, LogTarget::Load, || {
                        format!("the model's response template is not used: {error}")
                    });
                }
                None
            }
        };
        let reader = TokenizerReader::start(&folder);
        let mut generation_config = read_generation_config(&folder, &config)?;
        for ignored in &generation_config.ignored {
            log.log(LogLevel::Warning, LogTarget::Load, || {
                format!("generation_config.json: {ignored} is set, but xserv does not implement it")
            });
        }

        let backend = Arc::new(CpuBackend::new(num_threads(options.num_threads)?)?);
        tell("headers read");
        let progress = &mut |fraction: f32| !reader.has_failed() && progress(fraction);
        // A device starts while tied matrices are compared.
        let opened = match headers.settle(Some(&backend), progress) {
            Ok(opened) => opened,
            // The tokenizer's error is the reason for the cancellation.
            Err(_) if reader.has_failed() => return reader.finish().and_then(|_| lost()),
            Err(error) => return Err(error),
        };
        let expected_dtype = expect_on_device(options, &opened);
        let mut load_options = LoadOptions {
            dtype: expected_dtype,
            map_files: options.map_files,
            deterministic: options.deterministic,
            kv_format: options.kv_format,
            activations: options.activations,
            kept_weights: options.kept_weights.clone(),
        };
        let begun = match expected_dtype {
            Some(_) => match opened.begin_on_device(&backend, &load_options, progress) {
                Ok(begun) => Some(begun),
                Err(_) if reader.has_failed() => return reader.finish().and_then(|_| lost()),
                Err(error) => return Err(error),
            },
            None => None,
        };
        let (planned, size) = place(options, &opened, &log)?;
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
            // If there is no memory for it, the load is refused before the weights are read.
            workspace.reserve(&config, limits.max_step_tokens(), limits.max_sequences)?;
            opened.load(backend.clone(), &load_options, progress)
        };
        tell("weights read");
        let tokenizer = match reader.finish() {
            Ok(tokenizer) => Ok(Arc::new(tokenizer)),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                log.log(LogLevel::Warning, LogTarget::Load, || {
                    format!("{error}: only token ids can be used")
                });
                Err(error.with_kind(ErrorKind::Unsupported))
            }
            Err(error) => return Err(error),
        };
        let model = model?;
        tell("tokenizer read");
        if let (true, Ok(tokenizer)) = (generation_config.eos_token_ids.is_empty(), &tokenizer) {
            // Neither config names an end token, so the tokenizer's own one counts.
            generation_config.eos_token_ids.extend(tokenizer.eos_token_id());
        }
        let KvSize { max_context_tokens, kv_cache_tokens } = size;
        if max_context_tokens < planned.max_context {
            log.log(LogLevel::Warning, LogTarget::Load, || {
                let why = match (options.kv_cache_tokens, options.max_memory_bytes) {
                    (0, 0) => "there is not memory for a larger KV cache".to_owned(),
                    (0, limit) => format!(
                        "max_memory_bytes is {limit}, which leaves no room for a larger KV cache"
                    ),
                    (tokens, _) => format!("kv_cache_tokens is {tokens}"),
                };
                format!(
                    "the context is {max_context_tokens} tokens instead of {}: {why}",
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
        // As many blocks as the longest context needs, or all.
        let most_blocks = (max_context_tokens as usize).div_ceil(BLOCK_SIZE).min(num_blocks);
        let builder = BatchBuilder::with_room(&limits, most_blocks)?;
        let swap = model.kv_swap();
        let max_swapped = max_swapped(options, planned.on_device, swap.place_bytes());
        let resources = StepResources { kv, swap, workspace, builder };
        let mut scheduler = Scheduler::new(pool, limits)?;
        scheduler.set_max_swapped(max_swapped);
        let service =
            Service::new(model.clone(), backend, resources, scheduler, closed.clone(), log.clone());
        let engine = Engine {
            architecture: config.architecture.to_string(),
            folder,
            tokenizer,
            chat_template,
            no_special_tokens: SpecialTokens::default(),
            constraints: LazyCompiler::default(),
            response_template,
            call_form: Default::default(),
            generation_config,
            service,
            max_context_tokens,
            kv_cache_tokens: (num_blocks * BLOCK_SIZE) as u64,
            closed,
            log: log.clone(),
            process: Process::current(),
            load_seconds: begin.elapsed().as_secs_f64(),
            workspace_bytes: planned.memory.workspace_bytes,
            model,
        };
        log.log(LogLevel::Info, LogTarget::Load, || {
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
}
