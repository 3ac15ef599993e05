//! Loading: from a path to an engine that can take requests.

use std::sync::atomic::AtomicBool;
use std::sync::Arc;
use std::time::Instant;

use super::batch_builder::BatchBuilder;
use super::block_pool::BlockPool;
use super::constrained::LazyCompiler;
use super::engine::Engine;
use super::log::{LogLevel, LogTarget, Logger};
use super::memory_plan::max_swapped;
use super::options::{num_threads, EngineOptions};
use super::placement::{load_model, start_device, Placed};
use super::scheduler::Scheduler;
use super::service::Service;
use super::step_resources::StepResources;
use super::text_files::{read_generation_config, read_templates};
use super::tokenizer_reader::TokenizerReader;
use crate::backend::cpu::CpuBackend;
use crate::error::{check_room, Error, ErrorKind, Result};
use crate::model::{ActivationFormat, Model, ModelHeaders};
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
        let _starter = start_device(options, presumed);
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
        let placed = load_model(options, opened, &backend, &log, progress, &tell);
        // A damaged tokenizer is told first, whatever else is wrong.
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
        let placed = placed?;
        let steps = placed.steps();
        let Placed { planned, size, model, kv, swap, workspace } = placed;
        tell("tokenizer read");
        if let (true, Ok(tokenizer)) = (generation_config.eos_token_ids.is_empty(), &tokenizer) {
            // Neither config names an end token, so the tokenizer's own one counts.
            generation_config.eos_token_ids.extend(tokenizer.eos_token_id());
        }
        let max_context_tokens = size.max_context_tokens;
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
        let num_blocks = kv.num_blocks();
        let pool = BlockPool::new(num_blocks as u32, !options.no_prefix_cache)?;
        let closed = Arc::new(AtomicBool::new(false));
        // As many blocks as the longest context needs, or all.
        let most_blocks = (max_context_tokens as usize).div_ceil(BLOCK_SIZE).min(num_blocks);
        let builder = BatchBuilder::with_room(&planned.limits, most_blocks)?;
        let max_swapped = max_swapped(options, planned.on_device, swap.place_bytes());
        let resources = StepResources { kv, swap, workspace, builder };
        let mut scheduler = Scheduler::new(pool, planned.limits)?;
        scheduler.set_max_swapped(max_swapped);
        let service =
            Service::new(steps, backend, resources, scheduler, closed.clone(), log.clone());
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
