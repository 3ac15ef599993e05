//! The computation of a request's prompt that gets log-probabilities: by itself, with all its logits,
//! before the request's samples, which find its keys and values in the prefix cache.

use std::sync::Arc;

use super::batch_builder::Part;
use super::inbox::{Inbox, Message};
use super::lease::Lease;
use super::prompt_log_probs::{PromptPiece, EMPTY};
use super::sequence::NewSequence;
use super::step_model::StepModel;
use super::submission::{PromptWork, Submission, Work};
use crate::error::{try_filled, try_with_capacity, Error, Result};
use crate::model::{ScoresOut, TokenScore};

impl PromptWork {
    /// Returns the submission that computes a prompt of at least two tokens, and then begins
    /// others.
    pub fn submission(
        inbox: Arc<Inbox>,
        token_ids: &[u32],
        num_top: usize,
        priority: i32,
        cache_key: u64,
        then: Vec<Submission>,
    ) -> Result<Submission> {
        // The last token is scored, but nothing comes after it.
        let computed = token_ids.split_last().map_or(token_ids, |(_, computed)| computed);
        let mut ids = try_with_capacity(token_ids.len(), "a prompt's tokens")?;
        ids.extend_from_slice(token_ids);
        let mut of_sequence = try_with_capacity(computed.len(), "a prompt's tokens")?;
        of_sequence.extend_from_slice(computed);
        let sequence = NewSequence {
            max_tokens: token_ids.len(),
            token_ids: of_sequence,
            priority,
            isolation: cache_key,
            // The logits of all its tokens are needed.
            max_cached_tokens: 0,
            runs_ahead: false,
            by_model: false,
            alone: true,
        };
        let work = PromptWork { inbox, token_ids: ids, num_top, then };
        Ok(Submission::Run { sequence, work: Work::Prompt(Box::new(work)) })
    }

    /// Computes a piece of the prompt, and tells the log-probabilities of the tokens that come after
    /// its tokens.
    pub fn compute(&self, model: &dyn StepModel, lease: &mut Lease) -> Result<()> {
        let (start, num_new) = (lease.start, lease.num_new);
        let wrong = || Error::internal("a piece out of range");
        let token_ids = self.token_ids.get(start..start + num_new).ok_or_else(wrong)?;
        let scored = self.token_ids.get(start + 1..start + 1 + num_new).ok_or_else(wrong)?;
        let mut scores = try_filled(num_new, TokenScore::default(), "log-probabilities")?;
        let mut top = try_filled(num_new.saturating_mul(self.num_top), EMPTY, "log-probabilities")?;
        let resources = &mut *lease.resources;
        resources.builder.clear(lease.blocks.len())?;
        let part = Part { token_ids, start, blocks: &lease.blocks, source: None };
        resources.builder.push(&part, None)?;
        resources.builder.want_rows(0..num_new)?;
        let should_stop = || self.inbox.stop_reason(0).is_some();
        let out = ScoresOut { tokens: scored, scores: &mut scores, top: &mut top };
        let batch = resources.builder.step().batch;
        model.score(&batch, &mut resources.kv, &mut resources.workspace, out, &should_stop)?;
        let mut log_probs = try_with_capacity(num_new, "log-probabilities")?;
        log_probs.extend(scores.iter().map(|score| score.log_prob));
        let piece = PromptPiece { first: start + 1, log_probs, top };
        self.inbox.push(Message::Prompt(Box::new(piece)))
    }
}
