//! The caller's side of a request: takes tokens from the inbox, turns them into text, looks for
//! stop strings, takes answers apart. All of this happens on the caller's thread, so that a slow
//! caller delays nobody else.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::answer_output::AnswerOutput;
use super::inbox::{Inbox, Message, Progress};
use super::prompt_log_probs::PromptLogProbs;
use super::request::FinishReason;
use super::sequence::SequenceKey;
use crate::error::{try_with_capacity, Error, ErrorKind, Result};
use crate::model::{LogProbs, TokenLogProb};
use crate::process::Process;
use crate::text::{Answer, AnswerPart, AnswerRules, Detokenizer, StopMatcher, Tokenizer};

/// The outcome of a sample of a request.
#[derive(Clone, Debug)]
pub struct Generation {
    /// The generated text, without stop token and stop string.
    pub text: String,
    /// The generated ids, with the stop token.
    pub token_ids: Vec<u32>,
    /// Tokens of the prompt.
    pub num_prompt_tokens: usize,
    /// The tokens of the prompt whose keys and values were in the cache.
    pub num_cached_tokens: usize,
    /// The number of times that it made room for others and was resumed.
    pub num_preemptions: u32,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// The seed that was used.
    pub seed: u64,
    /// Seconds from the call to the first token; 0 if there is none.
    pub time_to_first_token_seconds: f64,
    /// Seconds of the whole call.
    pub total_seconds: f64,
    /// Computed prompt tokens per second of prompt processing.
    pub prompt_tokens_per_second: f64,
    /// Tokens per second after the first.
    pub tokens_per_second: f64,
    /// The log-probabilities of each of `token_ids`; empty unless the request wanted them.
    pub log_probs: Vec<LogProbs>,
    /// Those of the prompt, if the request wanted them; all samples share them.
    pub prompt_log_probs: Option<Arc<PromptLogProbs>>,
    /// The parts of the text, if the request has an [`AnswerFormat`](super::AnswerFormat).
    pub answer: Option<Answer>,
}

/// News of a request for its caller.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// The log-probability of a token of the prompt, from the second one on, if the request asked
    /// for it.
    Prompt {
        /// Its index in the prompt.
        index: usize,
        /// The token.
        token: u32,
        /// Its log-probability, and the likeliest tokens in its place.
        log_probs: LogProbs,
    },
    /// The next token of a sample is to be chosen, after the host has changed the logits.
    #[doc(hidden)]
    Logits(LogitsTurn),
    /// A token, and the text that became certain with it.
    Token {
        /// Which sample.
        sample: usize,
        /// The token.
        token: u32,
        /// Whole characters, possibly none.
        text: String,
        /// Tokens of the sample so far.
        num_tokens: usize,
        /// The token's log-probabilities, if the request wanted them.
        log_probs: Option<Box<LogProbs>>,
    },
    /// Text that was held back; at most once, after the last token.
    Text {
        /// Which sample.
        sample: usize,
        /// Not empty.
        text: String,
        /// Tokens of the sample.
        num_tokens: usize,
    },
    /// A part of the answer became certain, if the request has an
    /// [`AnswerFormat`](super::AnswerFormat). It comes after the token that made it so, and has the
    /// text of that token and those before it once more.
    Answer {
        /// Which sample.
        sample: usize,
        /// The part itself.
        part: AnswerPart,
        /// Tokens of the sample so far.
        num_tokens: usize,
    },
    /// A sample has ended.
    End {
        /// Which sample.
        sample: usize,
        /// The reason.
        reason: FinishReason,
        /// Tokens of the sample.
        num_tokens: usize,
    },
    /// All samples have ended.
    Done,
}

/// Logits that a host changes.
#[derive(Clone, Debug, PartialEq)]
pub struct LogitsTurn {
    pub(super) sample: usize,
    pub(super) key: SequenceKey,
    pub(super) logits: Vec<f32>,
}

/// The rules by which a ticket's text is made.
pub(super) struct TextRules<'a> {
    /// `None`: there is no text.
    pub tokenizer: Option<&'a Arc<Tokenizer>>,
    pub skip_special: bool,
    /// The prompt, if the text goes on with that of the prompt, and is no answer of its own.
    pub after: Option<&'a [u32]>,
    pub stop_strings: &'a [&'a str],
    /// The rules by which answers are taken apart, if they are.
    pub answer: Option<AnswerRules>,
}

/// The text side of a sample: ids to text, stop strings. Without a tokenizer there is no text.
struct TextOutput {
    detokenizer: Option<Detokenizer>,
    stop: StopMatcher,
    text: String,
    answer: Option<AnswerOutput>,
}

impl TextOutput {
    fn new(rules: &TextRules<'_>, sample: usize) -> Result<Self> {
        let stop = StopMatcher::new(rules.stop_strings)?;
        let new = |tokenizer: &Arc<_>| {
            let tokenizer = Arc::clone(tokenizer);
            match rules.after {
                Some(prompt) => Detokenizer::continuing(tokenizer, rules.skip_special, prompt),
                None => Ok(Detokenizer::new(tokenizer, rules.skip_special)),
            }
        };
        let answer = match (&rules.answer, rules.tokenizer) {
            (Some(answer), Some(tokenizer)) => {
                // Calls of other samples have other ids.
                let id_seed = answer.id_seed.wrapping_add(sample as u64);
                let answer = AnswerRules { id_seed, ..answer.clone() };
                let detokenizer = Detokenizer::new(tokenizer.clone(), false);
                Some(AnswerOutput::new(answer, detokenizer, stop.clone(), rules.skip_special))
            }
            _ => None,
        };
        let detokenizer = rules.tokenizer.map(new).transpose()?;
        Ok(TextOutput { detokenizer, stop, text: String::new(), answer })
    }

    fn append(&mut self, piece: &str) -> Result<()> {
        let no_memory = |_| Error::out_of_memory("the generated text", piece.len());
        self.text.try_reserve(piece.len()).map_err(no_memory)?;
        self.text.push_str(piece);
        Ok(())
    }

    /// Takes a token; returns the text that may be shown, and whether a stop string came. Appends
    /// what became certain of the answer.
    fn push(&mut self, token: u32, parts: &mut Vec<AnswerPart>) -> Result<(String, bool)> {
        let Some(detokenizer) = &mut self.detokenizer else { return Ok((String::new(), false)) };
        let piece = detokenizer.push(token)?;
        let output = self.stop.push(&piece)?;
        self.append(&output.text)?;
        if let Some(answer) = &mut self.answer {
            answer.push(token, parts)?;
        }
        Ok((output.text, output.matched.is_some()))
    }

    /// Ends the answer, and appends what was held back of it.
    fn finish_answer(&mut self, is_stopped: bool, parts: &mut Vec<AnswerPart>) -> Result<()> {
        match &mut self.answer {
            Some(answer) => answer.finish(is_stopped, parts),
            None => Ok(()),
        }
    }

    /// Ends the stream; returns the text that was held back, and whether a stop string came in it.
    fn finish(&mut self) -> Result<(String, bool)> {
        let Some(detokenizer) = &mut self.detokenizer else { return Ok((String::new(), false)) };
        let rest = detokenizer.finish()?;
        let output = self.stop.push(&rest)?;
        let mut piece = output.text;
        if output.matched.is_none() {
            let held = self.stop.finish();
            let no_memory = |_| Error::out_of_memory("the generated text", held.len());
            piece.try_reserve(held.len()).map_err(no_memory)?;
            piece.push_str(&held);
        }
        self.append(&piece)?;
        Ok((piece, output.matched.is_some()))
    }
}

struct Sample {
    seed: u64,
    output: TextOutput,
    token_ids: Vec<u32>,
    /// One for each token, if the request wants them.
    log_probs: Vec<LogProbs>,
    /// Why it ends, once that is decided; later tokens are dropped.
    reason: Option<FinishReason>,
    /// Whether the text that was held back has been told.
    is_flushed: bool,
    /// Whether what was held back of the answer has been told.
    is_answered: bool,
    /// Whether its end has been told.
    is_over: bool,
    /// Whether the caller wants to hear more.
    listening: bool,
    ended: Option<Instant>,
    progress: Progress,
}

/// The log-probabilities of a prompt.
struct Prompt {
    log_probs: PromptLogProbs,
    /// The token that is told next, and the first one of which nothing has come yet.
    next: usize,
    end: usize,
}

/// A request under way. Dropping it cancels the rest of it.
pub struct Ticket {
    inbox: Arc<Inbox>,
    samples: Vec<Sample>,
    /// Parts of answers that are told before anything else.
    parts: VecDeque<Event>,
    num_prompt_tokens: usize,
    prompt: Option<Prompt>,
    begin: Instant,
    process: Process,
}

/// Cancels a ticket, from any thread and at any time.
#[derive(Clone)]
pub struct TicketHandle {
    inbox: Arc<Inbox>,
    process: Process,
}

impl TicketHandle {
    /// Ends the request; tokens that were not taken yet are dropped.
    pub fn cancel(&self) {
        self.inbox.cancel();
    }

    /// Stops calls of the waker. Waits for one that runs on another thread.
    pub fn disarm(&self) {
        // In a forked child nobody calls it, and its lock may be held for ever.
        if self.process.is_current() {
            self.inbox.disarm();
        }
    }

    /// Calls `take` until it returns something, or `timeout` has passed (`None`: for as long as it
    /// takes). Between the calls it waits for news of the request, and no lock is held. Only a
    /// timeout of zero is allowed in a waker.
    pub fn wait_for<T>(
        &self,
        timeout: Option<Duration>,
        take: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        self.inbox.wait_for(timeout, take)
    }

    /// Refuses to go on in a forked child, where nobody computes.
    pub fn check_process(&self) -> Result<()> {
        if self.process.is_current() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Forked,
            "the request was submitted before this process was forked",
        ))
    }
}

fn rate(count: usize, seconds: f64) -> f64 {
    if count > 0 && seconds > 0.0 {
        count as f64 / seconds
    } else {
        0.0
    }
}

impl Ticket {
    /// Returns a ticket for samples with these seeds.
    pub(super) fn new(
        inbox: Arc<Inbox>,
        rules: &TextRules<'_>,
        seeds: impl ExactSizeIterator<Item = u64>,
        num_prompt_tokens: usize,
        begin: Instant,
    ) -> Result<Self> {
        let mut samples = try_with_capacity(seeds.len(), "samples")?;
        for (index, seed) in seeds.enumerate() {
            samples.push(Sample {
                seed,
                output: TextOutput::new(rules, index)?,
                token_ids: Vec::new(),
                log_probs: Vec::new(),
                reason: None,
                is_flushed: false,
                is_answered: false,
                is_over: false,
                listening: true,
                ended: None,
                progress: Progress::default(),
            });
        }
        let process = Process::current();
        let parts = VecDeque::new();
        Ok(Ticket { inbox, samples, parts, num_prompt_tokens, prompt: None, begin, process })
    }

    /// Makes room for the log-probabilities of the prompt, of `num_top` tokens for each of its own.
    pub(super) fn expect_prompt(&mut self, token_ids: &[u32], num_top: usize) -> Result<()> {
        let log_probs = PromptLogProbs::new(token_ids, num_top)?;
        self.prompt = Some(Prompt { log_probs, next: 1, end: 1 });
        Ok(())
    }

    /// Returns the ids that a sample has so far.
    pub(super) fn token_ids(&self, sample: usize) -> &[u32] {
        self.samples.get(sample).map_or(&[], |sample| &sample.token_ids)
    }

    /// Returns a handle to cancel it with.
    pub fn handle(&self) -> TicketHandle {
        TicketHandle { inbox: self.inbox.clone(), process: self.process }
    }

    /// Whether every sample's end has been told.
    pub fn is_done(&self) -> bool {
        self.samples.iter().all(|sample| sample.is_over)
    }

    /// Whether there is an event that needs no waiting.
    pub fn has_event(&self) -> bool {
        self.is_done()
            || !self.parts.is_empty()
            || self.samples.iter().any(|sample| sample.reason.is_some() && !sample.is_over)
            || self.prompt.as_ref().is_some_and(|prompt| prompt.next < prompt.end)
            || !self.inbox.is_empty()
            || self.inbox.is_cancelled()
    }

    /// Decides that all samples end now, with the tokens that were told so far.
    pub fn stop(&mut self, reason: FinishReason) {
        self.parts.clear();
        for (index, sample) in self.samples.iter_mut().enumerate() {
            sample.listening = false;
            if sample.reason.is_none() {
                sample.reason = Some(reason);
            }
            self.inbox.stop(index);
        }
    }

    /// Returns the next event; `None` if there is none within `timeout` (`None`: waits as long as
    /// it takes). An error ends the sample in which it happened.
    pub fn next(&mut self, timeout: Option<Duration>) -> Result<Option<Event>> {
        let inbox = self.inbox.clone();
        inbox.wait_for(timeout, || self.try_next())
    }

    /// Returns the next event, if there is one that needs no waiting. An error ends the sample in
    /// which it happened.
    pub fn try_next(&mut self) -> Result<Option<Event>> {
        let event = self.find_event();
        if !matches!(event, Ok(None)) {
            self.inbox.taken();
        }
        event
    }

    fn find_event(&mut self) -> Result<Option<Event>> {
        loop {
            if self.inbox.is_cancelled() {
                for sample in &mut self.samples {
                    sample.reason.get_or_insert(FinishReason::Cancelled);
                }
            }
            if let Some(part) = self.parts.pop_front() {
                return Ok(Some(part));
            }
            let ending = |sample: &Sample| sample.reason.is_some() && !sample.is_over;
            if let Some(index) = self.samples.iter().position(ending) {
                let event = self.end(index).inspect_err(|_| self.fail(index))?;
                if event.is_none() {
                    continue;
                }
                return Ok(event);
            }
            if self.is_done() {
                return Ok(Some(Event::Done));
            }
            if let Some(event) = self.prompt.as_mut().map_or(Ok(None), Prompt::next)? {
                return Ok(Some(event));
            }
            let Some(message) = self.inbox.pop() else { return Ok(None) };
            let index = match &message {
                Message::Prompt(piece) => {
                    if let Some(prompt) = &mut self.prompt {
                        prompt.log_probs.put(piece);
                        prompt.end = piece.first + piece.log_probs.len();
                    }
                    continue;
                }
                Message::Token { sample, .. }
                | Message::Logits { sample, .. }
                | Message::End { sample, .. }
                | Message::Failed { sample, .. } => *sample as usize,
            };
            let event = self.take(index, message).inspect_err(|_| self.fail(index))?;
            if event.is_some() {
                return Ok(event);
            }
        }
    }

    /// Ends a sample whose failure is told instead of its end: a token of it could not be taken or
    /// told, so those that follow would be wrong.
    pub fn fail(&mut self, index: usize) {
        self.parts
            .retain(|event| !matches!(event, Event::Answer { sample, .. } if *sample == index));
        if let Some(sample) = self.samples.get_mut(index) {
            sample.is_over = true;
            sample.ended.get_or_insert_with(Instant::now);
        }
        self.inbox.stop(index);
    }

    /// As [`Ticket::fail`], for all samples.
    pub fn fail_all(&mut self) {
        (0..self.samples.len()).for_each(|index| self.fail(index));
    }

    fn take(&mut self, index: usize, message: Message) -> Result<Option<Event>> {
        let inbox = &self.inbox;
        let cancelled = inbox.is_cancelled();
        let Some(sample) = self.samples.get_mut(index) else { return Ok(None) };
        if sample.is_over || sample.reason.is_some() || cancelled {
            return Ok(None);
        }
        let (token, is_stop, log_probs) = match message {
            Message::Token { token, is_stop, log_probs, .. } => (token, is_stop, log_probs),
            Message::End { reason, .. } => {
                sample.reason = Some(reason);
                return Ok(None);
            }
            Message::Failed { error, .. } => return Err(error),
            Message::Logits { key, logits, .. } => {
                return Ok(Some(Event::Logits(LogitsTurn { sample: index, key, logits })));
            }
            Message::Prompt(_) => return Ok(None),
        };
        let ids = &mut sample.token_ids;
        ids.try_reserve(1).map_err(|_| Error::out_of_memory("token ids", size_of::<u32>()))?;
        let num_tokens = ids.len() + 1;
        if let Some(log_probs) = &log_probs {
            let bytes = size_of::<LogProbs>() + log_probs.top.len() * size_of::<TokenLogProb>();
            let no_memory = |_| Error::out_of_memory("log-probabilities", bytes);
            let mut top = try_with_capacity(log_probs.top.len(), "log-probabilities")?;
            top.extend_from_slice(&log_probs.top);
            sample.log_probs.try_reserve(1).map_err(no_memory)?;
            sample.log_probs.push(LogProbs { chosen: log_probs.chosen, top });
        }
        if is_stop {
            ids.push(token);
            sample.reason = Some(FinishReason::StopToken);
            return Ok(Some(Event::Token {
                sample: index,
                token,
                text: String::new(),
                num_tokens,
                log_probs,
            }));
        }
        let mut parts = Vec::new();
        let (text, stopped) = sample.output.push(token, &mut parts)?;
        ids.push(token);
        let answers =
            parts.into_iter().map(|part| Event::Answer { sample: index, part, num_tokens });
        self.parts.extend(answers);
        if stopped {
            sample.reason = Some(FinishReason::StopString);
            inbox.stop(index);
        }
        Ok(Some(Event::Token { sample: index, token, text, num_tokens, log_probs }))
    }

    /// Reports the end of a sample: first the text that was held back, then, through `parts`, what
    /// was held back of the answer, then the end itself.
    fn end(&mut self, index: usize) -> Result<Option<Event>> {
        let progress = self.inbox.progress(index);
        let Some(sample) = self.samples.get_mut(index) else { return Ok(Some(Event::Done)) };
        sample.progress = progress;
        let num_tokens = sample.token_ids.len();
        let mut reason = sample.reason.unwrap_or(FinishReason::Cancelled);
        if reason != FinishReason::StopString && !sample.is_flushed {
            sample.is_flushed = true;
            let (text, stopped) = sample.output.finish()?;
            if sample.listening && stopped {
                reason = FinishReason::StopString;
                sample.reason = Some(reason);
            }
            if sample.listening && !text.is_empty() {
                return Ok(Some(Event::Text { sample: index, text, num_tokens }));
            }
        }
        if !sample.is_answered {
            sample.is_answered = true;
            let mut parts = Vec::new();
            sample.output.finish_answer(reason == FinishReason::StopString, &mut parts)?;
            if sample.listening && !parts.is_empty() {
                let answer = |part| Event::Answer { sample: index, part, num_tokens };
                self.parts.extend(parts.into_iter().map(answer));
                return Ok(None);
            }
        }
        sample.is_over = true;
        sample.ended = Some(Instant::now());
        Ok(Some(Event::End { sample: index, reason, num_tokens }))
    }

    /// Takes the outcomes of all samples. To be called when all have ended.
    pub fn take_generations(&mut self) -> Result<Vec<Generation>> {
        let mut generations = try_with_capacity(self.samples.len(), "results")?;
        let prompt = self.prompt.take().map(|prompt| Arc::new(prompt.log_probs));
        for sample in std::mem::take(&mut self.samples) {
            let mut generation = self.generation(sample);
            generation.prompt_log_probs = prompt.clone();
            generations.push(generation);
        }
        Ok(generations)
    }

    fn generation(&self, sample: Sample) -> Generation {
        let end = sample.ended.unwrap_or_else(Instant::now);
        let Progress { started, first_token, num_cached_tokens, num_preemptions } = sample.progress;
        let since = |t: Instant| t.duration_since(self.begin).as_secs_f64();
        let prompt_seconds = match (started, first_token) {
            (Some(started), Some(first)) => first.duration_since(started).as_secs_f64(),
            _ => 0.0,
        };
        let after_first = first_token.map_or(0.0, |t| end.duration_since(t).as_secs_f64());
        let computed = self.num_prompt_tokens.saturating_sub(num_cached_tokens);
        Generation {
            text: sample.output.text,
            num_prompt_tokens: self.num_prompt_tokens,
            num_cached_tokens,
            num_preemptions,
            finish_reason: sample.reason.unwrap_or(FinishReason::Cancelled),
            seed: sample.seed,
            time_to_first_token_seconds: first_token.map_or(0.0, since),
            total_seconds: since(end),
            prompt_tokens_per_second: rate(computed, prompt_seconds),
            tokens_per_second: rate(sample.token_ids.len().saturating_sub(1), after_first),
            token_ids: sample.token_ids,
            log_probs: sample.log_probs,
            prompt_log_probs: None,
            answer: sample.output.answer.map(AnswerOutput::into_answer),
        }
    }
}

impl Prompt {
    /// Returns the next token that is told.
    fn next(&mut self) -> Result<Option<Event>> {
        let (index, all) = (self.next, &self.log_probs);
        if index >= self.end {
            return Ok(None);
        }
        let (Some(&token), Some(&chosen)) = (all.token_ids.get(index), all.log_probs.get(index))
        else {
            return Ok(None);
        };
        let found = all.top.get(index * all.num_top..(index + 1) * all.num_top);
        let found = found.unwrap_or_default();
        let mut top = try_with_capacity(found.len(), "log-probabilities")?;
        top.extend_from_slice(found);
        self.next += 1;
        Ok(Some(Event::Prompt { index, token, log_probs: LogProbs { chosen, top } }))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // In a forked child there is no scheduler to be told. (This uses atomics only and takes no
        // lock.)
        if self.process.is_current() {
            self.inbox.cancel();
        }
    }
}
