//! The activations of a forward pass on a device, and the inputs and results of each pass:
//! allocated once for the largest pass, so that steady-state decoding asks the driver for nothing.

use std::sync::Arc;

use super::limits::{PassLimits, COPIED_ROWS, MAX_STEP_ROWS};
use super::scratch::{attention_sizes, Scratch};
use super::step_memory::DeviceSteps;
use crate::backend::{Arena, ComputeContext, ContextBackend, DeviceTensor, PinnedBuffer};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, SetApart};
use crate::model::config::ModelConfig;
use crate::model::load::heads::HeadSpacing;
use crate::ops::attention::{partial_bytes, partials, DecodeScratch};
use crate::ops::kv_cache::layout::KvFormat;

/// Memory for passes within limits. The element type is the model's.
pub(in crate::model) struct DeviceWorkspace {
    num_tokens: usize,
    /// `[num_tokens, hidden_size]`, the residual stream.
    pub hidden: DeviceTensor,
    /// `[num_tokens, hidden_size]`, the residual stream normalised.
    pub normed: DeviceTensor,
    /// `[num_tokens, hidden_size]`, what is added to the residual stream next.
    pub projected: DeviceTensor,
    /// `[num_tokens, hidden_size]`, the wanted rows of the residual stream.
    pub wanted: DeviceTensor,
    /// `[num_tokens, num_heads + 2 * num_kv_heads, head_stride]`
    pub qkv: DeviceTensor,
    /// `[num_tokens, num_heads, head_stride]`, the results of the heads.
    pub attn_out: DeviceTensor,
    /// `[num_tokens, mlp_up_size]`: gate and up in Qwen3.
    pub gate_up: DeviceTensor,
    /// `[num_tokens, mlp_act_size]`: empty in GPT-2, whose activation works in place.
    pub mlp_act: DeviceTensor,
    /// `[min(num_tokens, MAX_STEP_ROWS), vocab_size]`
    pub logits: DeviceTensor,
    /// Logits as f32, `[rows, vocab_size]`: those that are copied to the host, at most COPIED_ROWS, or
    /// those of a step that change before tokens are chosen.
    pub logits_f32: DeviceTensor,
    logits_host: Option<PinnedBuffer>,
    /// Partial results of decode attention, if there are kernels that write any.
    pub attention_partials: Option<DecodeScratch>,
    /// The inputs and results of steps.
    pub steps: DeviceSteps,
    /// Declared after the graphs, which use it.
    _scratch: SetApart,
}

/// Returns the sizes of the tensors, in the order of the struct: `(rows, columns, is_f32)`.
fn shapes(
    config: &ModelConfig,
    spacing: HeadSpacing,
    limits: &PassLimits,
) -> [(usize, usize, bool); 10] {
    let num_tokens = limits.num_tokens.max(1);
    let hidden = config.hidden_size;
    let (heads, kv_heads) = (config.num_heads, config.num_kv_heads);
    let step_rows = num_tokens.min(MAX_STEP_ROWS);
    let f32_rows = num_tokens.min(limits.rows().max(COPIED_ROWS));
    [
        (num_tokens, hidden, false),
        (num_tokens, hidden, false),
        (num_tokens, hidden, false),
        (num_tokens, hidden, false),
        (num_tokens, (heads + 2 * kv_heads) * spacing.stride, false),
        (num_tokens, heads * spacing.stride, false),
        (num_tokens, config.mlp_up_size(), false),
        (num_tokens, config.mlp_act_size(), false),
        (step_rows, config.vocab_size, false),
        (f32_rows, config.vocab_size, true),
    ]
}

fn element_of(dtype: DType, is_f32: bool) -> ElementType {
    ElementType::Float(if is_f32 { DType::F32 } else { dtype })
}

/// Returns the bytes of partial results of decode attention.
fn partials_bytes(
    config: &ModelConfig,
    dtype: DType,
    spacing: HeadSpacing,
    num_tokens: usize,
) -> Result<usize> {
    // They are of the same size whatever the cache stores.
    let sizes = attention_sizes(config, spacing, KvFormat::Dense);
    partial_bytes(&sizes, dtype, num_tokens.min(MAX_STEP_ROWS))
}

/// Returns the bytes of device memory that a workspace takes, without its scratch.
pub(super) fn device_bytes(
    config: &ModelConfig,
    dtype: DType,
    spacing: HeadSpacing,
    limits: &PassLimits,
) -> Result<usize> {
    let num_tokens = limits.num_tokens.max(1);
    let mut sum = DeviceSteps::device_bytes(limits, config.vocab_size)?
        .saturating_add(partials_bytes(config, dtype, spacing, num_tokens)?);
    for (rows, columns, is_f32) in shapes(config, spacing, limits) {
        let bytes = Arena::bytes_for(element_of(dtype, is_f32), &[rows, columns])?;
        let next = sum.checked_add(bytes);
        sum = next.ok_or_else(|| Error::out_of_memory("activations", usize::MAX))?;
    }
    Ok(sum)
}

impl DeviceWorkspace {
    /// Allocates memory for passes within `limits`.
    pub(super) fn new(
        context: &Arc<ComputeContext>,
        config: &ModelConfig,
        dtype: DType,
        spacing: HeadSpacing,
        limits: &PassLimits,
        scratch: Scratch,
    ) -> Result<Self> {
        let num_tokens = limits.num_tokens.max(1);
        let others = DeviceSteps::device_bytes(limits, config.vocab_size)?
            .saturating_add(partials_bytes(config, dtype, spacing, num_tokens)?);
        let bytes = device_bytes(config, dtype, spacing, limits)?.saturating_sub(others);
        let mut arena = Arena::new(context, bytes, "activations")?;
        let mut shapes = shapes(config, spacing, limits).into_iter();
        let mut next = || {
            let shape = shapes.next().ok_or_else(|| Error::internal("a buffer too many"))?;
            arena.tensor(element_of(dtype, shape.2), &[shape.0, shape.1])
        };
        let (hidden, normed, projected, wanted) = (next()?, next()?, next()?, next()?);
        let (qkv, attn_out) = (next()?, next()?);
        let (gate_up, mlp_act) = (next()?, next()?);
        let (logits, logits_f32) = (next()?, next()?);
        let sizes = attention_sizes(config, spacing, KvFormat::Dense);
        let attention_partials = partials(context, &sizes, dtype, num_tokens.min(MAX_STEP_ROWS))?;
        if let ContextBackend::Cuda(cuda) = context.backend() {
            // Allocated now, so that no pass allocates more.
            cuda.counters(1)?;
            if scratch.library_bytes > 0 {
                cuda.limit_library_workspace(scratch.library_bytes);
            }
        }
        Ok(DeviceWorkspace {
            num_tokens,
            hidden,
            normed,
            projected,
            wanted,
            qkv,
            attn_out,
            gate_up,
            mlp_act,
            logits,
            logits_f32,
            logits_host: None,
            attention_partials,
            steps: DeviceSteps::new(context, limits, dtype, config.vocab_size)?,
            _scratch: context.set_apart(scratch.bytes, "the scratch of operators")?,
        })
    }

    /// Whether a pass of `num_tokens` tokens fits.
    pub fn fits(&self, num_tokens: usize) -> bool {
        num_tokens <= self.num_tokens
    }

    /// Returns the number of rows of logits that can be copied at a time.
    pub fn copied_rows(&self) -> usize {
        self.num_tokens.min(COPIED_ROWS)
    }

    /// Returns the maximum number of rows of logits of a step.
    pub fn step_rows(&self) -> usize {
        self.num_tokens.min(MAX_STEP_ROWS)
    }

    /// Reads logits `[rows, vocab_size]` of f32 to the host, waiting for all work.
    pub fn read_logits(
        &mut self,
        context: &Arc<ComputeContext>,
        source: &DeviceTensor,
        out: &mut [f32],
    ) -> Result<()> {
        let mut host = match self.logits_host.take() {
            Some(host) => host,
            None => {
                let vocab_size = self.logits_f32.width() as usize;
                PinnedBuffer::new(context, self.copied_rows() * vocab_size * 4, "logits")?
            }
        };
        host.download(source, 0)?;
        copy_floats(host.bytes()?, out);
        self.logits_host = Some(host);
        Ok(())
    }
}

/// Copies numbers in the machine's own byte order.
pub(super) fn copy_floats(bytes: &[u8], out: &mut [f32]) {
    for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
        if let [a, b, c, d] = *bytes {
            *value = f32::from_ne_bytes([a, b, c, d]);
        }
    }
}
