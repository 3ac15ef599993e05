//! Sequences whose tokens get log-probabilities: those of [`Engine::score`](super::engine::Engine::score),
//! and the prompts of requests that want them, which are computed before the request's samples. They
//! share steps among themselves, but not with others, as all their tokens have logits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::batch_builder::Part;
use super::inbox::{Inbox, Message};
use super::prompt_log_probs::{PromptPiece, EMPTY};
use super::request::FinishReason;
use super::sampler::not_finite;
use super::score_call::ScoreCall;
use super::sequence::{Entry, NewSequence};
use super::step_resources::StepResources;
use super::submission::{ScoreReceiver, ScoreWork, Submission, Work};
use super::worker::{cancelled, no_resources, Worker};
use crate::error::{try_filled, try_with_capacity, Error, ErrorKind, Result};
use crate::model::{ScoresOut, StepTime, TokenLogProb, TokenScore};

/// What a sequence is scored for, besides its tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScoreRules {
    /// The first token whose next one is scored.
    pub first_row: usize,
    /// The number of likeliest tokens that are told in the place of each.
    pub num_top: usize,
    /// Higher goes first.
    pub priority: i32,
    /// See [`NewSequence::isolation`].
    pub cache_key: u64,
}

impl ScoreWork {
    /// Returns the submission that scores a request's prompt of at least two tokens, and then begins
    /// others.
    pub fn of_request(
        inbox: Arc<Inbox>,
        token_ids: &[u32],
        rules: &ScoreRules,
        then: Vec<Submission>,
    ) -> Result<Submission> {
        Self::submission(token_ids, rules, ScoreReceiver::Request { inbox, then })
    }

    /// Returns the submission that scores at least two tokens for a thread.
    pub fn of_call(
        call: Arc<ScoreCall>,
        token_ids: &[u32],
        rules: &ScoreRules,
    ) -> Result<Submission> {
        Self::submission(token_ids, rules, ScoreReceiver::Call(call))
    }

    fn submission(token_ids: &[u32], rules: &ScoreRules, to: ScoreReceiver) -> Result<Submission> {
        let &ScoreRules { first_row, num_top, priority, cache_key } = rules;
        // The last token is scored, but nothing comes after it.
        let computed = token_ids.split_last().map_or(token_ids, |(_, computed)| computed);
        let mut ids = try_with_capacity(token_ids.len(), "the tokens to score")?;
        ids.extend_from_slice(token_ids);
        let mut of_sequence = try_with_capacity(computed.len(), "the tokens to score")?;
        of_sequence.extend_from_slice(computed);
        let sequence = NewSequence {
            max_tokens: token_ids.len(),
            token_ids: of_sequence,
            priority,
            isolation: cache_key,
            // Tokens that are not computed have no logits.
            max_cached_tokens: first_row,
            runs_ahead: false,
            by_model: false,
            alone: true,
            scored: true,
        };
        let work = ScoreWork { token_ids: ids, first_row, num_top, to };
        Ok(Submission::Run { sequence, work: Work::Score(Box::new(work)) })
    }

    /// Returns the reason for which it is to end early, if there is one. `is_closed`: the engine is.
    pub fn stop_reason(&self, is_closed: bool) -> Option<FinishReason> {
        match &self.to {
            ScoreReceiver::Request { inbox, .. } => inbox.stop_reason(0),
            ScoreReceiver::Call(call) => {
                (is_closed || call.has_left()).then_some(FinishReason::Cancelled)
            }
        }
    }

    /// Returns the rows of a piece that are wanted, counted from the sequence's first token.
    fn rows(&self, entry: &Entry) -> std::ops::Range<usize> {
        let end = entry.start + entry.num_new;
        entry.start.max(self.first_row)..end.max(self.first_row)
    }

    /// Passes on the scores of the rows of a piece, and the likeliest tokens, `num_top` for each.
    fn tell(
        &self,
        first_row: usize,
        scores: &[TokenScore],
        top: &[TokenLogProb],
        num_top: usize,
    ) -> Result<()> {
        match &self.to {
            ScoreReceiver::Call(call) => {
                call.put(first_row.saturating_sub(self.first_row), scores);
                Ok(())
            }
            ScoreReceiver::Request { inbox, .. } => {
                let mut log_probs = try_with_capacity(scores.len(), "log-probabilities")?;
                log_probs.extend(scores.iter().map(|score| score.log_prob));
                let len = scores.len().saturating_mul(self.num_top);
                let mut own = try_with_capacity(len, "log-probabilities")?;
                for top in top.chunks_exact(num_top.max(1)) {
                    own.extend_from_slice(top.get(..self.num_top).unwrap_or_default());
                }
                let piece = PromptPiece { first: first_row + 1, log_probs, top: own };
                inbox.push(Message::Prompt(Box::new(piece)))
            }
        }
    }
}

impl Worker {
    /// Computes the next pieces of the sequences that are scored, as many as a step may have.
    pub(super) fn score(&mut self) -> Result<()> {
        let mut entries = self.scheduler.take_plan_memory();
        self.scheduler.plan_scored(&mut entries);
        let begun = Instant::now();
        self.follows = false;
        let mut resources = self.resources.take().ok_or_else(no_resources)?;
        let outcome = self.score_entries(&entries, &mut resources);
        self.resources = Some(resources);
        match outcome {
            Ok(()) => {
                let time = StepTime { busy: begun.elapsed(), idle: Duration::ZERO };
                let num_tokens = entries.iter().map(|entry| entry.num_new).sum();
                self.recorder.step(begun, time, false, num_tokens, 0);
                self.scheduler.begun(&entries);
                for entry in &entries {
                    let is_last = self
                        .scheduler
                        .sequence(entry.key)
                        .is_some_and(|it| entry.start + entry.num_new >= it.token_ids().len());
                    self.scheduler.finished(entry);
                    let told = self.works.get_mut(entry.key).and_then(|it| it.chosen.take());
                    match told {
                        Some(Err(error)) => self.end(entry.key, Err(error)),
                        _ if is_last => self.end_scored(entry),
                        _ => {}
                    }
                }
            }
            // The next turn sees why, and ends them.
            Err(error) if error.kind() == ErrorKind::Cancelled && self.are_stopped(&entries) => {}
            // They are computed again in smaller steps, if there are any.
            Err(error)
                if error.kind() == ErrorKind::OutOfMemory
                    && self.scheduler.found_no_memory(&entries) => {}
            Err(error) => {
                for entry in &entries {
                    self.end(entry.key, Err(error.clone()));
                }
            }
        }
        self.scheduler.give_back_plan_memory(entries);
        Ok(())
    }

    fn are_stopped(&self, entries: &[Entry]) -> bool {
        let is_closed = self.is_closed();
        entries.iter().all(|entry| {
            let stopped = self.works.with(entry.key, |active| match &active.work {
                Work::Score(work) => work.stop_reason(is_closed).is_some(),
                _ => false,
            });
            stopped.unwrap_or(true)
        })
    }

    /// Computes pieces of sequences in one pass, and tells their scores.
    fn score_entries(&self, entries: &[Entry], resources: &mut StepResources) -> Result<()> {
        let gone = || Error::internal("a planned sequence is gone");
        let wrong = || Error::internal("a piece out of range");
        let (works, scheduler) = (&self.works, &self.scheduler);
        let num_tokens = entries.iter().map(|entry| entry.num_new).sum();
        let mut tokens = try_with_capacity(num_tokens, "the tokens to score")?;
        let mut most_blocks = 0;
        for entry in entries {
            let sequence = scheduler.sequence(entry.key).ok_or_else(gone)?;
            most_blocks = most_blocks.max(sequence.blocks().len());
        }
        let StepResources { kv, workspace, builder, .. } = resources;
        builder.clear(most_blocks)?;
        let (mut first, mut num_top) = (0, 0);
        for entry in entries {
            let sequence = scheduler.sequence(entry.key).ok_or_else(gone)?;
            let pushed = works.with(entry.key, |active| {
                let Work::Score(work) = &active.work else { return Err(gone()) };
                let (start, end) = (entry.start, entry.start + entry.num_new);
                let token_ids = work.token_ids.get(start..end).ok_or_else(wrong)?;
                let part = Part { token_ids, start, blocks: sequence.blocks(), source: None };
                builder.push(&part, None)?;
                let rows = work.rows(entry);
                let scored = work.token_ids.get(rows.start + 1..rows.end + 1);
                tokens.extend_from_slice(scored.ok_or_else(wrong)?);
                builder.want_rows(first + rows.start - start..first + rows.end - start)?;
                num_top = num_top.max(work.num_top);
                first += entry.num_new;
                Ok(())
            });
            pushed.ok_or_else(gone)??;
        }
        let mut scores = try_filled(tokens.len(), TokenScore::default(), "log-probabilities")?;
        let len = tokens.len().saturating_mul(num_top);
        let mut top = try_filled(len, EMPTY, "log-probabilities")?;
        let out = ScoresOut { tokens: &tokens, scores: &mut scores, top: &mut top };
        let should_stop = || self.are_stopped(entries);
        let batch = builder.step().batch;
        self.model.score(&batch, kv, workspace, out, &should_stop)?;
        let (mut scores, mut top) = (scores.as_slice(), top.as_slice());
        for entry in entries {
            let told = works.with(entry.key, |active| {
                let Work::Score(work) = &active.work else { return Err(gone()) };
                let rows = work.rows(entry);
                let split = scores.split_at_checked(rows.len()).ok_or_else(wrong)?;
                let split_top =
                    top.split_at_checked(rows.len().saturating_mul(num_top)).ok_or_else(wrong)?;
                (scores, top) = (split.1, split_top.1);
                // Those of logits that are finite are so too.
                let are_finite = split.0.iter().all(|score| score.log_prob.is_finite());
                let told = if are_finite {
                    work.tell(rows.start, split.0, split_top.0, num_top)
                } else {
                    Err(not_finite())
                };
                if let Err(error) = told {
                    // The others have theirs.
                    active.chosen = Some(Err(error));
                }
                Ok(())
            });
            told.ok_or_else(gone)??;
        }
        Ok(())
    }

    /// Ends a sequence whose scores have all been told.
    fn end_scored(&mut self, entry: &Entry) {
        self.scheduler.remove(entry.key);
        let Some(active) = self.works.remove(entry.key) else { return };
        let Work::Score(work) = active.work else { return };
        match work.to {
            ScoreReceiver::Request { then, .. } => {
                then.into_iter().for_each(|submission| self.start(submission));
            }
            ScoreReceiver::Call(call) => {
                self.count_end();
                call.end(Ok(()));
            }
        }
    }

    /// Tells the end of a sequence that was not scored to the end.
    pub(super) fn tell_end_of_score(&mut self, work: &ScoreWork, outcome: Result<FinishReason>) {
        match &work.to {
            ScoreReceiver::Request { then, .. } => {
                then.iter().for_each(|submission| self.refuse(submission, outcome.clone()));
            }
            ScoreReceiver::Call(call) => {
                self.count_end();
                call.end(outcome.and(Err(cancelled())));
            }
        }
    }
}
