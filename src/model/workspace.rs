//! The activations of a forward pass, kept from one pass to the next.
//!
//! The buffers grow to the largest pass seen (or reserved) and are then reused, so that
//! steady-state decoding allocates nothing.

use super::config::{ExpertsConfig, MlpKind, ModelConfig};
use super::device::limits::PassLimits;
use super::device::model::DeviceModel;
use super::device::workspace::DeviceWorkspace;
use super::step::HostSteps;
use crate::backend::cpu::Isa;
use crate::error::{Error, Result};
use crate::memory::{DType, HostBuffer, Pages};
use crate::ops::attention::cpu_paged::AttentionScratch;
use crate::ops::experts::cpu::ExpertsScratch;
use crate::ops::experts::ExpertSizes;
use crate::ops::linear::cpu::{LinearCall, LinearScratch, WeightForm};

/// Buffers for one forward pass at a time.
#[derive(Default)]
pub struct Workspace {
    hidden: HostBuffer,
    normed: HostBuffer,
    qkv: HostBuffer,
    attn_out: HostBuffer,
    mlp_up: HostBuffer,
    mlp_act: HostBuffer,
    logits_hidden: HostBuffer,
    linear: LinearScratch,
    attention: AttentionScratch,
    experts: ExpertsScratch,
    /// The workspace of a model on a device, which replaces all others.
    device: Option<Box<DeviceWorkspace>>,
    host_steps: HostSteps,
}

/// The forms in which the matrices of a model are multiplied on the CPU.
#[derive(Clone, Copy, Debug)]
pub struct WeightForms<'a> {
    /// Those of the layers, each once, routers aside.
    pub layers: &'a [WeightForm],
    /// Those of the routers of experts, each once.
    pub routers: &'a [WeightForm],
    /// That of the output matrix.
    pub output: WeightForm,
}

/// The buffers cut to the size of one pass, all row-major.
pub(super) struct Activations<'a> {
    /// `[num_tokens, hidden_size]`, the residual stream.
    pub hidden: &'a mut [f32],
    /// `[num_tokens, hidden_size]`, the residual stream normalised.
    pub normed: &'a mut [f32],
    /// `[num_tokens, q_size + 2 * kv_size]`
    pub qkv: &'a mut [f32],
    /// `[num_tokens, q_size]`, the results of the heads.
    pub attn_out: &'a mut [f32],
    /// `[num_tokens, mlp_up_size]`
    pub mlp_up: &'a mut [f32],
    /// `[num_tokens, intermediate_size]`
    pub mlp_act: &'a mut [f32],
    /// `[2, num_logits_rows, hidden_size]`: the rows whose logits are wanted, before and after the
    /// final norm.
    pub logits_hidden: &'a mut [f32],
    /// The scratch of every matrix product.
    pub linear: &'a mut LinearScratch,
    /// The scratch of every attention.
    pub attention: &'a mut AttentionScratch,
    /// The scratch of every mixture of experts.
    pub experts: &'a mut ExpertsScratch,
}

impl Workspace {
    /// Returns an empty workspace, which grows with the first pass.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes room for passes of up to `num_tokens` tokens that ask for the logits of up to
    /// `num_logits_rows` of them. The scratch of the ops still grows with the first such pass.
    pub fn reserve(
        &mut self,
        config: &ModelConfig,
        num_tokens: usize,
        num_logits_rows: usize,
    ) -> Result<()> {
        self.activations(config, num_tokens, num_logits_rows).map(|_| ())
    }

    /// Returns the activations on the device of `model`, with room for passes of `num_tokens`
    /// tokens.
    pub(super) fn on_device(
        &mut self,
        model: &DeviceModel,
        config: &ModelConfig,
        num_tokens: usize,
    ) -> Result<&mut DeviceWorkspace> {
        if !self.device.as_ref().is_some_and(|device| device.fits(num_tokens)) {
            if self.device.as_ref().is_some_and(|device| device.steps.is_busy()) {
                return Err(Error::internal("a larger step while smaller ones are under way"));
            }
            self.reserve_on_device(model, config, &PassLimits::of_tokens(config, num_tokens))?;
        }
        self.device.as_deref_mut().ok_or_else(|| Error::internal("no device workspace"))
    }

    /// Makes room on the device of `model` for passes within `limits`, replacing what there was.
    pub(super) fn reserve_on_device(
        &mut self,
        model: &DeviceModel,
        config: &ModelConfig,
        limits: &PassLimits,
    ) -> Result<()> {
        // The old workspace is dropped first, because both may not fit.
        self.device = None;
        self.device = Some(Box::new(model.workspace(config, limits)?));
        Ok(())
    }

    /// Returns the steps that are computed as they begin.
    pub(super) fn host_steps(&mut self) -> &mut HostSteps {
        &mut self.host_steps
    }

    /// Returns the bytes held on the host: activations and the scratch of the ops.
    pub fn size_bytes(&self) -> usize {
        let buffers: usize = [
            &self.hidden,
            &self.normed,
            &self.qkv,
            &self.attn_out,
            &self.mlp_up,
            &self.mlp_act,
            &self.logits_hidden,
        ]
        .iter()
        .map(|buffer| buffer.len_bytes())
        .sum();
        buffers + self.linear.size_bytes() + self.attention.size_bytes() + self.experts.size_bytes()
    }

    /// Returns the value that [`Workspace::size_bytes`] reaches with passes of up to `num_tokens`
    /// tokens on `num_threads` threads that ask for the logits of up to `num_logits_rows` of them.
    pub fn bytes_for(
        config: &ModelConfig,
        dtype: DType,
        forms: WeightForms<'_>,
        num_threads: usize,
        num_tokens: usize,
        num_logits_rows: usize,
    ) -> usize {
        let activations = shapes(config, num_tokens, num_logits_rows)
            .iter()
            .map(|(rows, columns)| rows.saturating_mul(*columns).saturating_mul(4))
            .fold(0, usize::saturating_add);
        let is_gated = config.mlp == MlpKind::Gated && forms.layers.len() == 1;
        let experts = config.experts.as_ref();
        let widest = [
            (config.hidden_size, false),
            (config.q_size(), false),
            (config.dense_mlp_width(), is_gated && !config.biases.mlp),
            (experts.map_or(0, |experts| experts.width), is_gated),
        ];
        let products = forms.layers.iter().flat_map(|&form| {
            widest.map(|(in_features, ends_gated_mlp)| LinearCall {
                num_tokens,
                in_features,
                form,
                ends_gated_mlp,
            })
        });
        let routers = forms.routers.iter().map(|&form| LinearCall {
            num_tokens,
            in_features: config.hidden_size,
            form,
            ends_gated_mlp: false,
        });
        let output = LinearCall {
            num_tokens: num_logits_rows,
            in_features: config.hidden_size,
            form: forms.output,
            ends_gated_mlp: false,
        };
        let calls = products.chain(routers).chain([output]);
        let linear = LinearScratch::bytes_for(dtype, Isa::detect(), num_threads, calls);
        let experts = experts.map_or(0, |experts| {
            let ExpertsConfig { routing, width, .. } = *experts;
            let sizes = ExpertSizes { routing, hidden_size: config.hidden_size, width };
            ExpertsScratch::bytes_for(&sizes, num_tokens)
        });
        activations
            .saturating_add(linear)
            .saturating_add(AttentionScratch::bytes_for(num_threads))
            .saturating_add(experts)
    }

    pub(super) fn activations(
        &mut self,
        config: &ModelConfig,
        num_tokens: usize,
        num_logits_rows: usize,
    ) -> Result<Activations<'_>> {
        let [hidden, normed, qkv, attn_out, mlp_up, mlp_act, logits_hidden] =
            shapes(config, num_tokens, num_logits_rows);
        Ok(Activations {
            hidden: cut(&mut self.hidden, hidden)?,
            normed: cut(&mut self.normed, normed)?,
            qkv: cut(&mut self.qkv, qkv)?,
            attn_out: cut(&mut self.attn_out, attn_out)?,
            mlp_up: cut(&mut self.mlp_up, mlp_up)?,
            mlp_act: cut(&mut self.mlp_act, mlp_act)?,
            logits_hidden: cut(&mut self.logits_hidden, logits_hidden)?,
            linear: &mut self.linear,
            attention: &mut self.attention,
            experts: &mut self.experts,
        })
    }
}

/// Returns the rows and columns of the buffers, in the order of [`Activations`].
fn shapes(config: &ModelConfig, num_tokens: usize, num_logits_rows: usize) -> [(usize, usize); 7] {
    [
        (num_tokens, config.hidden_size),
        (num_tokens, config.hidden_size),
        (num_tokens, config.q_size() + 2 * config.kv_size()),
        (num_tokens, config.q_size()),
        (num_tokens, config.mlp_up_size()),
        (num_tokens, config.mlp_act_size()),
        (num_logits_rows, 2 * config.hidden_size),
    ]
}

/// Returns the first `rows * columns` elements of `buffer`, which grows if need be and loses what it
/// held then. What a pass does not use is never touched, and takes no memory.
fn cut(buffer: &mut HostBuffer, (rows, columns): (usize, usize)) -> Result<&mut [f32]> {
    let too_large = || Error::out_of_memory("activations", usize::MAX);
    let len = rows.checked_mul(columns).ok_or_else(too_large)?;
    let bytes = len.checked_mul(size_of::<f32>()).ok_or_else(too_large)?;
    if buffer.len_bytes() < bytes {
        *buffer = HostBuffer::empty();
        *buffer = HostBuffer::zeroed(bytes, Pages::Huge)
            .map_err(|_| Error::out_of_memory("activations", bytes))?;
    }
    buffer.as_mut_slice().get_mut(..len).ok_or_else(too_large)
}
