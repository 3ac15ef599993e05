//! Requests on their way in: from prompt and parameters to sequences of the scheduler.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::batch_builder::Part;
use super::engine::Engine;
use super::inbox::{check_may_wait, Inbox, Waker};
use super::lease::{Handoff, Lease};
use super::logit_changes::check_biases;
use super::request::{CancelToken, FinishReason, Prompt, Request};
use super::sampler::{Sampler, SamplingParams};
use super::sequence::NewSequence;
use super::submission::{SampleWork, Submission, Work};
use super::ticket::{Event, Generation, TextRules, Ticket};
use crate::error::{try_with_capacity, Error, ErrorKind, Result};
use crate::model::{Model, TokenChoice, TokenScore, MAX_TOP_LOG_PROBS};

/// Most samples of one request.
pub const MAX_SAMPLES: u32 = 256;

/// Called for every token with the sample, the token (none for text that was held back at the end),
/// the text that became certain, and the number of tokens so far. Returns false to stop.
pub type OnToken<'a> = dyn FnMut(usize, Option<u32>, &str, usize) -> Result<bool> + 'a;

/// The number of generated tokens that a sequence has room for from the start; it grows for more.
/// (64 KiB, of which the system commits the part that is used.)
const USUAL_TOKENS: usize = 16384;

/// A seed from the operating system's random numbers.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The standard library keys each `RandomState` from them.
    let seed = std::collections::hash_map::RandomState::new().build_hasher().finish();
    // u64::MAX stands for "draw one" at the C interface.
    seed.min(u64::MAX - 1)
}

/// A request that is ready for the scheduler, to be given to [`Engine::hand_over`].
pub struct Prepared(Vec<Submission>);

impl Engine {
    /// Runs a request to its end and returns each sample's outcome; this thread also calls
    /// `on_token`. Being stopped is a success with the tokens that were generated.
    pub fn generate(
        &self,
        request: &Request<'_>,
        on_token: &mut OnToken<'_>,
    ) -> Result<Vec<Generation>> {
        check_may_wait()?;
        let mut ticket = self.submit(request, None)?;
        loop {
            let goes_on = match ticket.next(None)? {
                Some(Event::Token { sample, token, text, num_tokens, .. }) => {
                    on_token(sample, Some(token), &text, num_tokens)?
                }
                Some(Event::Text { sample, text, num_tokens }) => {
                    on_token(sample, None, &text, num_tokens)?
                }
                Some(Event::End { .. }) => continue,
                Some(Event::Done) | None => break,
            };
            // The callback may have forked.
            self.check_process()?;
            if !goes_on {
                ticket.stop(FinishReason::Callback);
            }
        }
        ticket.take_generations()
    }

    /// Hands a request to the scheduler. `waker` is called when there is an event after there was
    /// none.
    pub fn submit(&self, request: &Request<'_>, waker: Option<Waker>) -> Result<Ticket> {
        let (ticket, prepared) = self.prepare(request, waker)?;
        self.hand_over(prepared)?;
        Ok(ticket)
    }

    /// Does everything of [`Engine::submit`] but handing the request over: `waker` is not called
    /// yet.
    pub fn prepare(
        &self,
        request: &Request<'_>,
        waker: Option<Waker>,
    ) -> Result<(Ticket, Prepared)> {
        let begin = Instant::now();
        let config = self.generation_config();
        let params = SamplingParams::resolve(&request.sampling, config)?;
        let num_samples = request.num_samples;
        if !(1..=MAX_SAMPLES).contains(&num_samples) {
            return Err(Error::invalid_argument(format!(
                "num_samples is {num_samples}, but must be from 1 to {MAX_SAMPLES}"
            )));
        }
        check_biases(&request.logit_bias, self.shape().vocab_size)?;
        let vocab_size = self.shape().vocab_size;
        let wrong = request.first_tokens.iter().position(|&id| id as usize >= vocab_size);
        if let Some((place, id)) = wrong.and_then(|at| Some((at, request.first_tokens.get(at)?))) {
            return Err(Error::invalid_argument(format!(
                "first_tokens[{place}] is {id}, but the vocabulary has {vocab_size} tokens"
            )));
        }
        let most = self.max_context_tokens() as usize;
        if request.first_tokens.len() > most {
            return Err(Error::invalid_argument(format!(
                "first_tokens has {} tokens, but the context has {most}",
                request.first_tokens.len()
            )));
        }
        if let Some(wanted) = request.log_probs.filter(|it| it.num_top > MAX_TOP_LOG_PROBS) {
            return Err(Error::invalid_argument(format!(
                "num_log_probs is {}, but at most {MAX_TOP_LOG_PROBS} are given",
                wanted.num_top
            )));
        }
        let first_seed = request.seed.unwrap_or_else(random_seed);
        let seed_of = |sample: u32| first_seed.wrapping_add(u64::from(sample));
        let tokenizer = match self.tokenizer() {
            Ok(tokenizer) => Some(tokenizer),
            // Ids alone need no tokenizer; stop strings do.
            Err(_) if request.stop_strings.is_empty() => None,
            Err(error) => return Err(error),
        };
        let rules = TextRules {
            tokenizer,
            skip_special: request.skip_special,
            continues: !matches!(&request.prompt, Prompt::Chat(_) | Prompt::Text { text: "", .. }),
            stop_strings: &request.stop_strings,
        };
        let deadline = request.time_limit.and_then(|limit| begin.checked_add(limit));
        let stopped = || {
            let cancel = request.cancel.as_ref();
            if self.is_closed() || cancel.is_some_and(|cancel| cancel.is_cancelled()) {
                return Some(FinishReason::Cancelled);
            }
            let is_over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            is_over.then_some(FinishReason::Deadline)
        };
        // Tokenizing a long prompt would be in vain.
        let (ids, stopped) = match stopped() {
            Some(reason) => (Vec::new(), Some(reason)),
            None => match self.prompt_ids(&request.prompt, &|| stopped().is_some()) {
                Err(error) if error.kind() == ErrorKind::Cancelled => {
                    (Vec::new(), stopped().or(Some(FinishReason::Cancelled)))
                }
                ids => (ids?, None),
            },
        };
        let max_new = request.max_tokens.or(config.max_new_tokens).unwrap_or(u32::MAX) as usize;
        if request.min_tokens as usize > max_new {
            return Err(Error::invalid_argument(format!(
                "min_tokens is {}, but max_tokens is {max_new}",
                request.min_tokens
            )));
        }
        // The last token of a full context is generated but never computed.
        let full = self.max_context_tokens() as usize + 1;
        let by_request = ids.len().saturating_add(max_new);
        let (max_tokens, reason_at_max) = if by_request <= full {
            (by_request, FinishReason::MaxTokens)
        } else {
            (full, FinishReason::ContextFull)
        };
        let inbox = Arc::new(Inbox::new(
            num_samples as usize,
            max_tokens.saturating_sub(ids.len()),
            request.cancel.clone(),
            self.closed().clone(),
            deadline,
            waker,
        )?);
        let seeds = (0..num_samples).map(seed_of);
        let mut ticket = Ticket::new(inbox.clone(), &rules, seeds, ids.len(), begin)?;
        let over = stopped.or((max_new == 0).then_some(FinishReason::MaxTokens));
        if let Some(reason) = over {
            // The caller need not wait for the scheduler, which calls the waker and counts the end.
            ticket.stop(reason);
            let mut submissions = try_with_capacity(1, "a request")?;
            submissions.push(Submission::End { inbox, num_samples, reason });
            return Ok((ticket, Prepared(submissions)));
        }
        let mut stop_token_ids = try_with_capacity(request.stop_token_ids.len(), "stop tokens")?;
        stop_token_ids.extend_from_slice(request.stop_token_ids);
        if !request.ignore_eos {
            stop_token_ids.extend_from_slice(self.eos_token_ids());
        }
        let stop_token_ids = Arc::new(stop_token_ids);
        let mut submissions = try_with_capacity(num_samples as usize, "samples")?;
        for sample in 0..num_samples {
            let seed = seed_of(sample);
            let choice = params.model_choice(seed).filter(|c| self.model().can_choose(c));
            let capacity = max_tokens.min(ids.len().saturating_add(USUAL_TOKENS)).max(ids.len());
            let mut token_ids = try_with_capacity(capacity, "token ids")?;
            token_ids.extend_from_slice(&ids);
            let mut sampler = Sampler::new(params, seed, &ids)?;
            let changes = sampler.changes_mut();
            changes.add_biases(&request.logit_bias)?;
            changes.ban_ends(request.min_tokens, &stop_token_ids)?;
            changes.begin_with(request.first_tokens)?;
            changes.reserve((capacity - ids.len()).min(self.shape().vocab_size))?;
            let work = SampleWork {
                inbox: inbox.clone(),
                sample,
                sampler,
                stop_token_ids: stop_token_ids.clone(),
                num_prompt_tokens: ids.len(),
                max_tokens,
                reason_at_max,
                choice: choice.unwrap_or(TokenChoice::Caller),
                log_probs: request.log_probs,
            };
            let sequence = NewSequence {
                token_ids,
                max_tokens,
                priority: request.priority,
                isolation: request.cache_key,
                max_cached_tokens: usize::MAX,
                runs_ahead: choice.is_some(),
                alone: false,
            };
            submissions.push(Submission::Run { sequence, work: Work::Sample(Box::new(work)) });
        }
        Ok((ticket, Prepared(submissions)))
    }

    /// Hands a request to the scheduler. From now on its waker is called.
    pub fn hand_over(&self, prepared: Prepared) -> Result<()> {
        self.service().submit(prepared.0)
    }

    /// The logits after the last token, or after every token, of `ids`.
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
        let vocab_size = self.shape().vocab_size;
        self.evaluate(ids, first_row, 0, cancel, RowsOut::Logits(out, vocab_size))
    }

    /// How likely the tokens of `ids` from number `num_given` on are, each after those before it.
    /// Requests with other numbers than `cache_key` share no keys and values.
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
        // The last token is scored, but nothing comes after it.
        self.check_tokens(ids)?;
        let (Some(computed), Some(scored)) = (ids.get(..ids.len() - 1), ids.get(num_given..))
        else {
            return Err(Error::internal("scores of no tokens"));
        };
        if scored.is_empty() {
            return check_may_wait();
        }
        let out = RowsOut::Scores(scored, scores);
        self.evaluate(computed, num_given - 1, cache_key, cancel, out)
    }

    /// Computes the rows of logits from number `first_row` on of `ids`, a piece at a time, alone in
    /// the step. What becomes of them goes to `out`, whose rows count from `first_row`.
    fn evaluate(
        &self,
        ids: &[u32],
        first_row: usize,
        cache_key: u64,
        cancel: Option<&CancelToken>,
        mut out: RowsOut<'_>,
    ) -> Result<()> {
        check_may_wait()?;
        self.check_tokens(ids)?;
        let mut token_ids = try_with_capacity(ids.len(), "token ids")?;
        token_ids.extend_from_slice(ids);
        let handoff = Arc::new(Handoff::default());
        let sequence = NewSequence {
            token_ids,
            max_tokens: ids.len().saturating_add(1),
            priority: 0,
            isolation: cache_key,
            max_cached_tokens: first_row,
            runs_ahead: false,
            alone: true,
        };
        let mut submissions = try_with_capacity(1, "a request")?;
        submissions.push(Submission::Run { sequence, work: Work::Logits(handoff.clone()) });
        self.service().submit(submissions)?;
        loop {
            let mut borrowed = handoff.borrow(cancel)?;
            let lease = borrowed.lease()?;
            let (start, end) = (lease.start, lease.start + lease.num_new);
            let should_stop = || self.is_closed() || cancel.is_some_and(CancelToken::is_cancelled);
            let rows = start.max(first_row)..end.max(first_row);
            let outcome = out
                .piece(rows.start - first_row..rows.end - first_row)
                .and_then(|out| compute_piece(self.model(), lease, ids, rows, out, &should_stop));
            borrowed.give_back(&outcome);
            outcome?;
            if end >= ids.len() {
                return Ok(());
            }
        }
    }
}

/// Where the wanted rows go.
enum RowsOut<'a> {
    /// Logits `[rows, vocab_size]`, and the size of the vocabulary.
    Logits(&'a mut [f32], usize),
    /// The tokens to score, and their scores.
    Scores(&'a [u32], &'a mut [TokenScore]),
}

impl RowsOut<'_> {
    /// Where some of the rows go.
    fn piece(&mut self, rows: Range<usize>) -> Result<RowsOut<'_>> {
        let too_small = || Error::internal("the room for logits or scores is too small");
        match self {
            RowsOut::Logits(logits, vocab_size) => {
                let range = rows.start * *vocab_size..rows.end * *vocab_size;
                let logits = logits.get_mut(range).ok_or_else(too_small)?;
                Ok(RowsOut::Logits(logits, *vocab_size))
            }
            RowsOut::Scores(tokens, scores) => {
                let tokens = tokens.get(rows.clone()).ok_or_else(too_small)?;
                Ok(RowsOut::Scores(tokens, scores.get_mut(rows).ok_or_else(too_small)?))
            }
        }
    }
}

/// Computes the leased piece of `ids`, and those rows of logits of it that are wanted.
fn compute_piece(
    model: &Model,
    lease: &mut Lease,
    ids: &[u32],
    rows: Range<usize>,
    out: RowsOut<'_>,
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
    let (kv, workspace) = (&mut resources.kv, &mut resources.workspace);
    match out {
        RowsOut::Logits(logits, _) => model.forward(&batch, kv, workspace, logits, should_stop),
        RowsOut::Scores(tokens, scores) => {
            model.score(&batch, kv, workspace, tokens, scores, should_stop)
        }
    }
}
