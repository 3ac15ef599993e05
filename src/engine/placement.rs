//! Which device a model goes to: decided from its headers, before a weight is read.

use std::sync::Arc;

use super::engine_load::EngineOptions;
use super::log::{LogLevel, Logger};
use super::step_limits::step_limits;
use crate::backend::{cuda, ComputeContext, ContextBackend};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::DType;
use crate::model::{DevicePlan, ModelFolder};
use crate::ops::BLOCK_SIZE;

/// Where the caller wants a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first CUDA device where it can be used and the model runs and fits there, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The first CUDA device, or an error.
    Cuda,
}

/// Where a model goes.
pub(super) enum Placement {
    Cpu,
    Cuda {
        /// Of this model alone.
        context: Arc<ComputeContext>,
        plan: DevicePlan,
        /// Device memory that nobody uses.
        free_bytes: u64,
    },
}

/// Decides for the model in `opened`.
pub(super) fn place(
    options: &EngineOptions,
    opened: &ModelFolder,
    dtype: DType,
    max_context: u64,
    log: &Logger,
) -> Result<Placement> {
    match options.device {
        DeviceChoice::Cpu => Ok(Placement::Cpu),
        DeviceChoice::Cuda => on_cuda(options, opened, dtype, max_context),
        // Most machines without a GPU are so on purpose: nothing to be said about.
        DeviceChoice::Auto if cuda::available().is_err() => Ok(Placement::Cpu),
        DeviceChoice::Auto => match on_cuda(options, opened, dtype, max_context) {
            Err(error) => {
                log.log(LogLevel::Warning, || format!("the model runs on the CPU: {error}"));
                Ok(Placement::Cpu)
            }
            placement => placement,
        },
    }
}

fn on_cuda(
    options: &EngineOptions,
    opened: &ModelFolder,
    dtype: DType,
    max_context: u64,
) -> Result<Placement> {
    let limits = step_limits(options, true, max_context)?;
    let plan = opened.device_plan(dtype, limits.max_step_tokens())?;
    cuda::available()?;
    let budget = match options.max_memory_bytes {
        0 => usize::MAX,
        bytes => usize::try_from(bytes).unwrap_or(usize::MAX),
    };
    let context = Arc::new(ComputeContext::cuda_private(0, budget)?);
    let ContextBackend::Cuda(device) = context.backend() else {
        return Err(Error::internal("a CUDA context on the CPU"));
    };
    let free_bytes = device.device().free_memory_bytes()? as u64;
    let least = plan
        .weights_bytes
        .saturating_add(plan.workspace_bytes)
        .saturating_add(plan.kv_bytes_per_token.saturating_mul(BLOCK_SIZE as u64));
    if least > free_bytes {
        return Err(Error::new(
            ErrorKind::OutOfMemory,
            format!(
                "{} has {free_bytes} bytes of free memory, but the weights take {} bytes, the work space {} and \
                 the KV cache {} a token",
                device.device().info().name,
                plan.weights_bytes,
                plan.workspace_bytes,
                plan.kv_bytes_per_token
            ),
        ));
    }
    Ok(Placement::Cuda { context, plan, free_bytes })
}
