//! Requests on their way in: from prompt and parameters to sequences of the scheduler.

use std::sync::Arc;
use std::time::Instant;

use super::engine::Engine;
use super::host_logits::{check_changed, LogitsEvent, OnLogits};
use super::inbox::{check_may_wait, Inbox, Waker};
use super::logit_changes::check_biases;
use super::request::{FinishReason, Prompt, Request};
use super::sampler::{Sampler, SamplingParams};
use super::scored::ScoreRules;
use super::sequence::NewSequence;
use super::submission::{SampleWork, ScoreWork, Submission, Work};
use super::ticket::{Event, Generation, LogitsTurn, TextRules, Ticket};
use crate::error::{try_with_capacity, Error, ErrorKind, Result};
use crate::model::{TokenChoice, MAX_TOP_LOG_PROBS};

/// Most samples of one request.
pub const MAX_SAMPLES: u32 = 256;

/// Called for every token with the sample, the token (none for text that was held back at the end),
/// the text that became certain, and the number of tokens so far. Returns false to stop.
pub type OnToken<'a> = dyn FnMut(usize, Option<u32>, &str, usize) -> Result<bool> + 'a;

/// The number of generated tokens that a sequence has room for from the start; it grows for more.
/// (64 KiB, of which the system commits the part that is used.)
const USUAL_TOKENS: usize = 16384;

/// Returns a seed from the operating system's random numbers.
pub(super) fn random_seed() -> u64 {
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
        let unasked = |_: &Ticket, _| Err(Error::internal("logits that nobody asked for"));
        self.run(&mut ticket, on_token, &mut { unasked })
    }

    /// As [`Engine::generate`]; before every choice of a token this thread calls `on_logits`.
    pub fn generate_with(
        &self,
        request: &Request<'_>,
        on_token: &mut OnToken<'_>,
        on_logits: &mut OnLogits<'_>,
    ) -> Result<Vec<Generation>> {
        check_may_wait()?;
        let (mut ticket, prepared, prompt) = self.prepare_with(request, None, true)?;
        self.hand_over(prepared)?;
        self.run(&mut ticket, on_token, &mut |ticket, turn| {
            let LogitsTurn { sample, key, mut logits } = turn;
            let event = LogitsEvent {
                sample,
                prompt_token_ids: &prompt,
                token_ids: ticket.token_ids(sample),
            };
            let goes_on = on_logits(&event, &mut logits)?;
            // The callback may have forked.
            self.check_process()?;
            if goes_on {
                check_changed(&mut logits)?;
                let mut answer = try_with_capacity(1, "a request")?;
                answer.push(Submission::Answer { key, logits });
                self.service().submit(answer)?;
            }
            Ok(goes_on)
        })
    }

    /// Takes the events of a request to its end. `on_turn` is called for logits.
    fn run(
        &self,
        ticket: &mut Ticket,
        on_token: &mut OnToken<'_>,
        on_turn: &mut dyn FnMut(&Ticket, LogitsTurn) -> Result<bool>,
    ) -> Result<Vec<Generation>> {
        loop {
            let goes_on = match ticket.next(None)? {
                Some(Event::Token { sample, token, text, num_tokens, .. }) => {
                    on_token(sample, Some(token), &text, num_tokens)?
                }
                Some(Event::Text { sample, text, num_tokens }) => {
                    on_token(sample, None, &text, num_tokens)?
                }
                Some(Event::Logits(turn)) => on_turn(ticket, turn)?,
                Some(Event::End { .. } | Event::Prompt { .. } | Event::Answer { .. }) => continue,
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
        let (ticket, prepared, _) = self.prepare_with(request, waker, false)?;
        Ok((ticket, prepared))
    }

    /// As [`Engine::prepare`], and returns the ids of the prompt. With `asks_host` the ticket's events
    /// contain logits, to be answered.
    fn prepare_with(
        &self,
        request: &Request<'_>,
        waker: Option<Waker>,
        asks_host: bool,
    ) -> Result<(Ticket, Prepared, Vec<u32>)> {
        let begin = Instant::now();
        let config = self.generation_config();
        let params = SamplingParams::resolve(&request.sampling, &config.sampling)?;
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
        let num_top = request.log_probs.map(|wanted| wanted.num_top);
        let names = ["num_log_probs", "num_prompt_log_probs"];
        for (name, wanted) in names.into_iter().zip([num_top, request.prompt_log_probs]) {
            if let Some(wanted) = wanted.filter(|&wanted| wanted > MAX_TOP_LOG_PROBS) {
                return Err(Error::invalid_argument(format!(
                    "{name} is {wanted}, but at most {MAX_TOP_LOG_PROBS} are given"
                )));
            }
        }
        let first_seed = request.seed.unwrap_or_else(random_seed);
        let seed_of = |sample: u32| first_seed.wrapping_add(u64::from(sample));
        let tokenizer = match self.tokenizer() {
            Ok(tokenizer) => Some(tokenizer),
            // Ids alone need no tokenizer; stop strings do.
            Err(_) if request.stop_strings.is_empty() && request.answer_format.is_none() => None,
            Err(error) => return Err(error),
        };
        let mut rules = TextRules {
            tokenizer,
            skip_special: request.skip_special,
            after: None,
            stop_strings: &request.stop_strings,
            answer: None,
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
        // Tokenizing a long prompt would be wasted work.
        let (ids, stopped) = match stopped() {
            Some(reason) => (Vec::new(), Some(reason)),
            None => match self.prompt_ids(&request.shown_prompt(), &|| stopped().is_some()) {
                Err(error) if error.kind() == ErrorKind::Cancelled => {
                    (Vec::new(), stopped().or(Some(FinishReason::Cancelled)))
                }
                ids => (ids?, None),
            },
        };
        let continues = !matches!(&request.prompt, Prompt::Chat(_) | Prompt::Text { text: "", .. });
        rules.after = continues.then_some(ids.as_slice());
        rules.answer = self.answer_rules(request, &ids)?;
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
        let mut stop_token_ids = try_with_capacity(request.stop_token_ids.len(), "stop tokens")?;
        stop_token_ids.extend_from_slice(request.stop_token_ids);
        if !request.ignore_eos {
            stop_token_ids.extend_from_slice(self.eos_token_ids());
        }
        let stop_token_ids = Arc::new(stop_token_ids);
        // A request that is over already has no answer.
        let constrained = match stopped {
            Some(_) => None,
            None => self.constrain(request, &ids, &stop_token_ids)?,
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
        let num_top = request.prompt_log_probs.map(|it| vocab_size.min(it as usize));
        if let Some(num_top) = num_top {
            ticket.expect_prompt(&ids, num_top)?;
        }
        let begins_with_prompt = num_top.filter(|_| stopped.is_none() && ids.len() > 1);
        let after_prompt = |then: Vec<Submission>| {
            let Some(num_top) = begins_with_prompt else { return Ok(then) };
            let (priority, cache_key) = (request.priority, request.cache_key);
            let rules = ScoreRules { first_row: 0, num_top, priority, cache_key };
            let mut first = try_with_capacity(1, "a request")?;
            first.push(ScoreWork::of_request(inbox.clone(), &ids, &rules, then)?);
            Ok::<_, Error>(first)
        };
        let over = stopped.or((max_new == 0).then_some(FinishReason::MaxTokens));
        if let Some(reason) = over {
            if begins_with_prompt.is_none() {
                // The caller need not wait for the scheduler, which calls the waker and counts the
                // end.
                ticket.stop(reason);
            }
            let mut submissions = try_with_capacity(1, "a request")?;
            submissions.push(Submission::End { inbox: inbox.clone(), num_samples, reason });
            return Ok((ticket, Prepared(after_prompt(submissions)?), ids));
        }
        let mut submissions = try_with_capacity(num_samples as usize, "samples")?;
        for sample in 0..num_samples {
            let seed = seed_of(sample);
            let constrained = match &constrained {
                Some(constrained) => Some(Box::new(constrained.try_clone()?)),
                None => None,
            };
            let choice = params.model_choice(seed);
            let choice = Some(choice).filter(|it| !asks_host && self.model().can_choose(it));
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
                constrained,
                stop_token_ids: stop_token_ids.clone(),
                num_prompt_tokens: ids.len(),
                max_tokens,
                reason_at_max,
                choice: choice.unwrap_or(TokenChoice::Caller),
                log_probs: request.log_probs,
                asks_host,
            };
            let sequence = NewSequence {
                token_ids,
                max_tokens,
                priority: request.priority,
                isolation: request.cache_key,
                max_cached_tokens: usize::MAX,
                runs_ahead: choice.is_some() && !params.looks_back(),
                by_model: choice.is_some(),
                alone: false,
                scored: false,
            };
            submissions.push(Submission::Run { sequence, work: Work::Sample(Box::new(work)) });
        }
        Ok((ticket, Prepared(after_prompt(submissions)?), ids))
    }

    /// Hands a request to the scheduler. From now on its waker is called.
    pub fn hand_over(&self, prepared: Prepared) -> Result<()> {
        self.service().submit(prepared.0)
    }
}
