//! Passes of a model on a device, and the logits or scores that the host asks for.

use super::lead::layers_ahead;
use super::model::DeviceModel;
use super::record::{DeviceRecord, RecordExtras, RecordShape};
use super::workspace::DeviceWorkspace;
use crate::backend::DeviceTensor;
use crate::error::Result;
use crate::memory::DType;
use crate::model::batch::ForwardBatch;
use crate::model::config::ModelConfig;
use crate::model::decoder::device::{rows_of, DevicePass, Wanted};
use crate::model::kv_cache::KvCache;
use crate::model::step::{RowsOut, ScoresOut};
use crate::ops::elementwise::cast;
use crate::ops::linear::{Layer, LinearPass};

impl DeviceModel {
    /// Runs the whole pass over a validated batch: writes keys and values to `kv`, and what becomes
    /// of the logits of the wanted rows to `out`. All work is done on return.
    pub fn forward(
        &self,
        config: &ModelConfig,
        batch: &ForwardBatch<'_>,
        kv: &KvCache,
        workspace: &mut DeviceWorkspace,
        out: RowsOut<'_>,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        let extras = RecordExtras {
            token_sources: &[],
            choices: &[],
            host_tokens: 0,
            spare_block: kv.spare_block(),
        };
        let record = workspace.steps.upload(&RecordShape::of(batch), batch, &extras)?;
        let wanted = Wanted::of(config, batch, &record, &self.attention)?;
        let linear = self.linear.of_rows(&self.context, batch.max_rows())?;
        let pass = self.pass(config, &record, &wanted, linear, workspace, should_stop)?;
        let normed = match pass.run(kv, workspace)? {
            Some(mut act) => {
                pass.final_norm(&mut act)?;
                Some(act.stream.normed)
            }
            None => None,
        };
        if let Some(normed) = normed {
            match out {
                RowsOut::Logits(logits) => {
                    self.read_logits(config, linear, &normed, workspace, logits)?;
                }
                RowsOut::Scores(out) => {
                    self.read_scores(config, linear, &normed, workspace, out)?;
                }
            }
        }
        self.context.synchronize()
    }

    /// Returns a pass over a record, whose linear layers are computed by `linear`.
    pub(super) fn pass<'a>(
        &'a self,
        config: &'a ModelConfig,
        record: &'a DeviceRecord,
        wanted: &'a Wanted,
        linear: LinearPass<'a>,
        workspace: &'a DeviceWorkspace,
        should_stop: &'a dyn Fn() -> bool,
    ) -> Result<DevicePass<'a>> {
        let (context, cuda) = (&*self.context, self.cuda()?);
        let num_tokens = record.token_ids.num_elements() as usize;
        // A graph replay never waits, and no earlier step's tokens may be delayed so that a later
        // step can be cancelled.
        let may_wait = !wanted.is_decode && workspace.steps.may_lag();
        let layers = if may_wait { layers_ahead(config, num_tokens) } else { None };
        let lead = layers.map(|layers| (&workspace.steps.lead, layers));
        Ok(DevicePass {
            model: self,
            config,
            context,
            cuda,
            record,
            wanted,
            linear,
            should_stop,
            lead,
        })
    }

    /// Returns the output layer.
    pub fn output(&self) -> Layer<'_> {
        Layer { name: "output", weight: self.weights.tokens.output(), bias: None }
    }

    /// Computes the logits of all rows of `normed` and reads them to the host, a few rows at a
    /// time.
    fn read_logits(
        &self,
        config: &ModelConfig,
        linear: LinearPass<'_>,
        normed: &DeviceTensor,
        workspace: &mut DeviceWorkspace,
        logits: &mut [f32],
    ) -> Result<()> {
        let (hidden_size, vocab_size) = (config.hidden_size, config.vocab_size);
        let max_rows = workspace.copied_rows();
        for (index, out) in logits.chunks_mut(max_rows * vocab_size).enumerate() {
            let rows = out.len() / vocab_size;
            let x = normed.view(index * max_rows * hidden_size, &[rows, hidden_size], None)?;
            let f32s = rows_of(&workspace.logits_f32, rows)?;
            if self.dtype == DType::F32 {
                linear.plain(&x, &self.output(), &f32s)?;
            } else {
                // Rounded to the element type first, as in Transformers.
                let rounded = rows_of(&workspace.logits, rows)?;
                linear.plain(&x, &self.output(), &rounded)?;
                cast(&self.context, &rounded, &f32s)?;
            }
            workspace.read_logits(&self.context, &f32s, out)?;
        }
        Ok(())
    }

    /// Computes the scores of one token for each row of `normed`, and the likeliest ones, as many rows at
    /// a time as have room for their logits.
    fn read_scores(
        &self,
        config: &ModelConfig,
        linear: LinearPass<'_>,
        normed: &DeviceTensor,
        workspace: &mut DeviceWorkspace,
        out: ScoresOut<'_>,
    ) -> Result<()> {
        let (hidden_size, max_rows) = (config.hidden_size, workspace.step_rows());
        let num_top = out.num_top();
        let ScoresOut { tokens, scores, top: mut left } = out;
        let pieces = tokens.chunks(max_rows).zip(scores.chunks_mut(max_rows));
        for (index, (tokens, scores)) in pieces.enumerate() {
            let (top, rest) = left.split_at_mut(tokens.len() * num_top);
            left = rest;
            let x =
                normed.view(index * max_rows * hidden_size, &[tokens.len(), hidden_size], None)?;
            let logits = rows_of(&workspace.logits, tokens.len())?;
            linear.plain(&x, &self.output(), &logits)?;
            let piece = ScoresOut { tokens, scores, top };
            workspace.steps.extras.read_scores(&logits, piece)?;
        }
        Ok(())
    }
}
