//! The choice of the device that a model goes to, and the memory that it takes there: both are
//! decided from its headers, before a weight is read. Then the model is loaded there.

use std::sync::Arc;

use super::device_starter::DeviceStarter;
use super::log::{LogLevel, LogTarget, Logger};
use super::memory_plan::{available_memory_bytes, Available, KvSize, MemoryPlan};
use super::options::{context_limit, num_threads, DeviceChoice, EngineOptions};
use super::step_limits::step_limits;
use super::step_model::StepModel;
use super::step_size::Limits;
use crate::backend::cpu::CpuBackend;
use crate::backend::cuda::{self, CudaDevice};
use crate::backend::ComputeContext;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::DType;
use crate::model::{KvCache, KvSwap, LoadOptions, Model, ModelFolder, Workspace};
use crate::ops::kv_cache::layout::BLOCK_SIZE;

/// The plan of a model in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Planned {
    pub(super) on_device: bool,
    pub(super) dtype: DType,
    /// Longest context that was asked for.
    pub(super) max_context: u64,
    /// The largest steps.
    pub(super) limits: Limits,
    pub(super) memory: MemoryPlan,
    pub(super) available: Available,
}

impl Planned {
    /// Returns the plan for the model in `opened` on the CPU, or on a CUDA device, which need not
    /// be there.
    pub(super) fn new(
        options: &EngineOptions,
        opened: &ModelFolder,
        on_device: bool,
    ) -> Result<Self> {
        let mut planned = Self::before_the_device(options, opened, on_device)?;
        if on_device && cuda::available().is_ok() {
            let free = CudaDevice::get(options.device_index())?.free_memory_bytes()?;
            planned.available = Available::Device(Some(free as u64));
        }
        Ok(planned)
    }

    /// The same plan, without asking a device how much memory is free.
    fn before_the_device(
        options: &EngineOptions,
        opened: &ModelFolder,
        on_device: bool,
    ) -> Result<Self> {
        let config = opened.config();
        let max_context = context_limit(options.max_context_tokens, config)?;
        let dtype = match options.dtype {
            Some(dtype) => dtype,
            None => opened.stored_dtype()?,
        };
        let num_threads = num_threads(options.num_threads)?;
        let limits = step_limits(options, on_device, max_context)?;
        let num_tokens = limits.max_step_tokens();
        let kv_format = options.kv_format;
        let (memory, available) = if on_device {
            let passes = limits.passes(max_context);
            let plan = opened.device_plan(dtype, kv_format, &passes, options.deterministic)?;
            (plan, Available::Device(None))
        } else {
            let plan = opened.host_plan(
                dtype,
                kv_format,
                options.activations,
                num_threads,
                num_tokens,
                limits.max_sequences,
            )?;
            (plan, Available::Host(available_memory_bytes()))
        };
        Ok(Planned { on_device, dtype, max_context, limits, memory: memory.into(), available })
    }

    /// Returns the size of its KV cache; [`crate::error::ErrorKind::OutOfMemory`] if it does not
    /// fit.
    pub(super) fn kv_size(&self, options: &EngineOptions) -> Result<KvSize> {
        self.memory.kv_size(options, self.max_context, self.available)
    }
}

/// Decides where the model in `opened` goes, and plans it there.
pub(super) fn place(
    options: &EngineOptions,
    opened: &ModelFolder,
    log: &Logger,
) -> Result<(Planned, KvSize)> {
    let on = |on_device: bool| {
        let planned = Planned::new(options, opened, on_device)?;
        let size = planned.kv_size(options)?;
        Ok((planned, size))
    };
    match options.device {
        DeviceChoice::Cpu if options.device_index != 0 => Err(Error::new(
            ErrorKind::NoDevice,
            format!("there is no CPU device {}, only 0", options.device_index),
        )),
        DeviceChoice::Cpu => on(false),
        DeviceChoice::Cuda => {
            // A model that cannot run there is reported first: that holds on every machine.
            let planned = Planned::new(options, opened, true)?;
            cuda::available()?;
            CudaDevice::get(options.device_index())?;
            Ok((planned, planned.kv_size(options)?))
        }
        // Most machines without a GPU are so on purpose, so nothing is logged.
        DeviceChoice::Auto if cuda::available().is_err() => on(false),
        DeviceChoice::Auto => match on(true) {
            Err(error) => {
                log.log(LogLevel::Warning, LogTarget::Load, || {
                    format!("the model runs on the CPU: {error}")
                });
                on(false)
            }
            placement => placement,
        },
    }
}

/// Returns the element type of the model in `opened` on a CUDA device, if it will probably go
/// there: there is a driver, and the budget allows it. Starts nothing.
fn expect_on_device(options: &EngineOptions, opened: &ModelFolder) -> Option<DType> {
    if options.device == DeviceChoice::Cpu || !cuda::is_present() {
        return None;
    }
    let planned = Planned::before_the_device(options, opened, true).ok()?;
    planned.kv_size(options).ok().map(|_| planned.dtype)
}

/// Begins to start the device that the model in `opened` will probably go to, if it is one.
pub(super) fn start_device(options: &EngineOptions, opened: &ModelFolder) -> Option<DeviceStarter> {
    expect_on_device(options, opened).map(|_| DeviceStarter::start(options.device_index()))
}

/// Returns the context of a model on a CUDA device, which never takes more memory than the options
/// allow.
fn device_context(options: &EngineOptions) -> Result<Arc<ComputeContext>> {
    let budget = match options.max_memory_bytes {
        0 => usize::MAX,
        bytes => usize::try_from(bytes).unwrap_or(usize::MAX),
    };
    Ok(Arc::new(ComputeContext::cuda_private(options.device_index(), budget)?))
}

/// A model where it was placed, with the memory that it computes in.
pub(super) struct Placed {
    pub(super) planned: Planned,
    pub(super) size: KvSize,
    pub(super) model: Arc<Model>,
    pub(super) kv: KvCache,
    pub(super) swap: KvSwap,
    pub(super) workspace: Workspace,
}

impl Placed {
    /// Returns what computes the steps.
    pub(super) fn steps(&self) -> Arc<dyn StepModel> {
        self.model.clone()
    }
}

/// Decides where the model in `opened` goes, and loads it there. `tell` is told of what is done.
pub(super) fn load_model(
    options: &EngineOptions,
    opened: ModelFolder,
    backend: &Arc<CpuBackend>,
    log: &Logger,
    progress: &mut dyn FnMut(f32) -> bool,
    tell: &dyn Fn(&str),
) -> Result<Placed> {
    let expected_dtype = expect_on_device(options, &opened);
    let mut load_options = LoadOptions {
        dtype: expected_dtype,
        map_files: options.map_files,
        deterministic: options.deterministic,
        kv_format: options.kv_format,
        activations: options.activations,
        kept_weights: options.kept_weights.clone(),
    };
    // While the device starts.
    let begun = match expected_dtype {
        Some(_) => Some(opened.begin_on_device(backend, &load_options, progress)?),
        None => None,
    };
    let (planned, size) = place(options, &opened, log)?;
    load_options.dtype = Some(planned.dtype);
    let limits = planned.limits;
    let mut workspace = Workspace::new();
    let model = if planned.on_device {
        let context = device_context(options)?;
        tell("device started");
        let begun = match begun {
            Some(begun) => begun,
            None => opened.begin_on_device(backend, &load_options, progress)?,
        };
        let model = begun.finish(context)?;
        tell("weights read");
        model.reserve_on_device(&mut workspace, &limits.passes(planned.max_context))?;
        model
    } else {
        drop(begun);
        // If there is no memory for it, the load is refused before the weights are read.
        workspace.reserve(opened.config(), limits.max_step_tokens(), limits.max_sequences)?;
        let model = opened.load(backend.clone(), &load_options, progress)?;
        tell("weights read");
        model
    };
    tell("work space made");
    let num_blocks = size.kv_cache_tokens.div_ceil(BLOCK_SIZE as u64) as usize;
    let kv = model.kv_cache(num_blocks)?;
    tell("KV cache made");
    // Slots are numbered in 32 bits.
    if u32::try_from(num_blocks.saturating_mul(BLOCK_SIZE)).is_err() {
        return Err(Error::invalid_argument("the KV cache has more than 2^32 tokens"));
    }
    let swap = model.kv_swap();
    Ok(Placed { planned, size, model: Arc::new(model), kv, swap, workspace })
}
