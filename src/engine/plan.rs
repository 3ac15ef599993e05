//! The memory that a load would take, planned from the model's headers: the same decision that a
//! load makes, without the load. What a load refuses is refused here too, the small files included.

use super::load::read_headers;
use super::log::Logger;
use super::memory_plan::KvSize;
use super::options::{DeviceChoice, EngineOptions};
use super::placement::{place, Planned};
use super::text_files::{has_tokenizer, read_chat_template, read_generation_config};
use crate::error::{ErrorKind, Result};
use crate::memory::DType;

/// The memory that a model would take, in the place where it would go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Whether it goes to a CUDA device, else to the CPU.
    pub on_device: bool,
    /// The element type that is computed with.
    pub dtype: DType,
    /// Bytes of the weights, on a device with the tables of positions.
    pub weights_bytes: u64,
    /// The most bytes that activations and scratch take.
    pub workspace_bytes: u64,
    /// Bytes of the keys and values of one token in all layers.
    pub kv_bytes_per_token: u64,
    /// Tokens of the KV cache; 0 if not one block fits, or fewer tokens than were asked for.
    pub kv_cache_tokens: u64,
    /// Longest context; 0 as above.
    pub max_context_tokens: u64,
    /// Weights, work space and KV cache; if they do not fit, with the smallest cache that the
    /// options allow.
    pub total_bytes: u64,
    /// The smallest budget with which the options load.
    pub minimum_bytes: u64,
    /// The bytes that it may take: the budget, or the available memory if that is less; `None` if
    /// not known.
    pub memory_bytes: Option<u64>,
    /// Whether `total_bytes` are no more than `memory_bytes`, as far as known.
    pub fits: bool,
    /// Whether the folder has a tokenizer; else it can be used with token ids only.
    pub has_tokenizer: bool,
}

/// Plans a load of the folder or cached repo id `path`. Where CUDA is asked for and there is no
/// device, the plan is that of a device whose memory is the budget. A model that could not be
/// loaded with any amount of memory fails with the error of its load, which looks at the files in
/// the same order.
pub fn plan(path: &str, options: &EngineOptions) -> Result<Plan> {
    let opened = read_headers(path, options)?.settle(None, &mut |_| true)?;
    // A template that cannot be used keeps no model from being loaded; one that cannot be read does.
    let _ = read_chat_template(opened.folder())?;
    read_generation_config(opened.folder(), opened.config())?;
    let out_of_memory = |kind| kind == ErrorKind::OutOfMemory;
    let (planned, size) = match options.device {
        DeviceChoice::Cpu => without_memory(Planned::new(options, &opened, false)?, options)?,
        DeviceChoice::Cuda => without_memory(Planned::new(options, &opened, true)?, options)?,
        DeviceChoice::Auto => match place(options, &opened, &Logger::silent()) {
            Err(error) if out_of_memory(error.kind()) => {
                without_memory(Planned::new(options, &opened, false)?, options)?
            }
            placed => placed.map(|(planned, size)| (planned, Some(size)))?,
        },
    };
    let has_tokenizer = has_tokenizer(opened.folder())?;
    let memory = planned.memory;
    let minimum_bytes = memory.minimum_bytes(options);
    let total_bytes =
        size.map_or(minimum_bytes, |size: KvSize| memory.total_bytes(size.kv_cache_tokens));
    let memory_bytes = planned.available.limit(options);
    let size = size.unwrap_or_default();
    Ok(Plan {
        on_device: planned.on_device,
        dtype: planned.dtype,
        weights_bytes: memory.weights_bytes,
        workspace_bytes: memory.workspace_bytes,
        kv_bytes_per_token: memory.kv_bytes_per_token,
        kv_cache_tokens: size.kv_cache_tokens,
        max_context_tokens: size.max_context_tokens,
        total_bytes,
        minimum_bytes,
        memory_bytes,
        fits: memory_bytes.is_none_or(|bytes| total_bytes <= bytes),
        has_tokenizer,
    })
}

/// Returns the plan with the size of its KV cache, `None` if it does not fit.
fn without_memory(planned: Planned, options: &EngineOptions) -> Result<(Planned, Option<KvSize>)> {
    match planned.kv_size(options) {
        Ok(size) => Ok((planned, Some(size))),
        Err(error) if error.kind() == ErrorKind::OutOfMemory => Ok((planned, None)),
        Err(error) => Err(error),
    }
}
