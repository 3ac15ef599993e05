//! Logits of given tokens, computed by the thread that wants them, a piece at a time
//! ([`lease`](super::lease)), and scores ([`scored`](super::scored)).

use std::ops::Range;
use std::sync::Arc;

use super::batch_builder::Part;
use super::engine::Engine;
use super::inbox::check_may_wait;
use super::lease::{Handoff, Lease};
use super::request::CancelToken;
use super::score_call::ScoreCall;
use super::scored::ScoreRules;
use super::sequence::NewSequence;
use super::step_model::StepModel;
use super::submission::{ScoreWork, Submission, Work};
use crate::error::{try_with_capacity, Error, Result};
use crate::model::TokenScore;

impl Engine {
    /// Computes the logits after the last token, or after every token, of `ids`.
    ///
    /// `out`: [rows, vocab_size] with 1 or `ids.len()` rows.
    pub fn logits(
        &self,
        ids: &[u32],
        all: bool,
        cancel: Option<&CancelToken>,
        out: &mut [f32],
    ) -> Result<()> {
        // Tokens that are not computed have no logits.
        let first_row = if all { 0 } else { ids.len().saturating_sub(1) };
        self.evaluate(ids, first_row, cancel, out)
    }

    /// Computes the log-probabilities of the tokens of `ids` from number `num_given` on, each after
    /// those before it. Requests with other numbers than `cache_key` share no keys and values.
    ///
    /// `num_given`: from 1 to `ids.len()`; `scores`: `[ids.len() - num_given]`.
    pub fn score(
        &self,
        ids: &[u32],
        num_given: usize,
        cache_key: u64,
        cancel: Option<&CancelToken>,
        scores: &mut [TokenScore],
    ) -> Result<()> {
        if num_given == 0 || num_given.checked_add(scores.len()) != Some(ids.len()) {
            return Err(Error::invalid_argument(format!(
                "num_given is {num_given}, but must be from 1 to the {} tokens, and the rest get scores",
                ids.len()
            )));
        }
        check_may_wait()?;
        self.check_tokens(ids)?;
        if scores.is_empty() {
            return Ok(());
        }
        let call = Arc::new(ScoreCall::new(scores.len())?);
        let rules = ScoreRules { first_row: num_given - 1, cache_key, ..ScoreRules::default() };
        let mut submissions = try_with_capacity(1, "a request")?;
        submissions.push(ScoreWork::of_call(call.clone(), ids, &rules)?);
        self.service().submit(submissions)?;
        call.wait(cancel, scores)
    }

    /// Computes the rows of logits from number `first_row` on of `ids`, a piece at a time, alone in
    /// the step, and writes them to `out`, whose rows count from `first_row`.
    fn evaluate(
        &self,
        ids: &[u32],
        first_row: usize,
        cancel: Option<&CancelToken>,
        out: &mut [f32],
    ) -> Result<()> {
        check_may_wait()?;
        self.check_tokens(ids)?;
        let mut token_ids = try_with_capacity(ids.len(), "token ids")?;
        token_ids.extend_from_slice(ids);
        let handoff = Arc::new(Handoff::default());
        let sequence = NewSequence {
            token_ids,
            max_tokens: ids.len().saturating_add(1),
            max_cached_tokens: first_row,
            alone: true,
            ..NewSequence::default()
        };
        let mut submissions = try_with_capacity(1, "a request")?;
        submissions.push(Submission::Run { sequence, work: Work::Logits(handoff.clone()) });
        self.service().submit(submissions)?;
        let vocab_size = self.shape().vocab_size;
        loop {
            let mut borrowed = handoff.borrow(cancel)?;
            let lease = borrowed.lease()?;
            let (start, end) = (lease.start, lease.start + lease.num_new);
            let should_stop = || self.is_closed() || cancel.is_some_and(CancelToken::is_cancelled);
            let rows = start.max(first_row)..end.max(first_row);
            let places = (rows.start - first_row) * vocab_size..(rows.end - first_row) * vocab_size;
            let outcome = out
                .get_mut(places)
                .ok_or_else(|| Error::internal("the room for logits is too small"))
                .and_then(|out| compute_piece(self.model(), lease, ids, rows, out, &should_stop));
            borrowed.give_back(&outcome);
            outcome?;
            if end >= ids.len() {
                return Ok(());
            }
        }
    }
}

/// Computes the leased piece of `ids`, and those rows of logits of it that are wanted.
fn compute_piece(
    model: &dyn StepModel,
    lease: &mut Lease,
    ids: &[u32],
    rows: Range<usize>,
    out: &mut [f32],
    should_stop: &dyn Fn() -> bool,
) -> Result<()> {
    let (start, end) = (lease.start, lease.start + lease.num_new);
    let resources = &mut *lease.resources;
    let part = Part {
        token_ids: ids.get(start..end).ok_or_else(|| Error::internal("a piece out of range"))?,
        start,
        blocks: &lease.blocks,
        source: None,
    };
    resources.builder.clear(lease.blocks.len())?;
    resources.builder.push(&part, None)?;
    resources.builder.want_rows(rows.start - start..rows.end - start)?;
    let batch = resources.builder.step().batch;
    model.logits(&batch, &mut resources.kv, &mut resources.workspace, out, should_stop)
}
