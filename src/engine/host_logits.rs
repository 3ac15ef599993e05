//! Logits that the host changes before a token is chosen. A row of them goes to the thread of the
//! blocking call, where the host's callback runs, and comes back as a submission. Its sequence waits
//! meanwhile; others go on.

use super::inbox::Message;
use super::sequence::SequenceKey;
use super::submission::{Submission, Work};
use super::worker::Worker;
use crate::error::{Error, Result};

/// The arguments of a callback besides the logits.
#[derive(Clone, Copy, Debug)]
pub struct LogitsEvent<'a> {
    /// Which sample.
    pub sample: usize,
    /// The ids of the prompt.
    pub prompt_token_ids: &'a [u32],
    /// The ids that the sample has so far.
    pub token_ids: &'a [u32],
}

/// Called for every token that is to be chosen, with the model's logits `[vocab_size]`, which it may
/// change: minus infinity bans a token. Returns false to stop the request.
pub type OnLogits<'a> = dyn FnMut(&LogitsEvent<'_>, &mut [f32]) -> Result<bool> + 'a;

/// Checks what a callback left, and writes bans as the sampler expects them.
pub(super) fn check_changed(logits: &mut [f32]) -> Result<()> {
    let mut is_any_left = false;
    for (id, logit) in logits.iter_mut().enumerate() {
        if *logit == f32::NEG_INFINITY {
            *logit = f32::MIN;
        } else if !logit.is_finite() {
            return Err(Error::invalid_argument(format!(
                "the logits callback left {logit} for token {id}, but a logit must be finite or minus infinity"
            )));
        }
        is_any_left |= *logit > f32::MIN;
    }
    if is_any_left {
        return Ok(());
    }
    Err(Error::invalid_argument("the logits callback banned every token of the vocabulary"))
}

impl Worker {
    /// Sends the row of logits that a step gave a sequence to its host.
    pub(super) fn ask_host(&mut self, key: SequenceKey) {
        let Some(active) = self.works.get_mut(key) else { return };
        let Work::Sample(work) = &active.work else { return };
        let logits = std::mem::take(&mut active.row);
        let message = Message::Logits { sample: work.sample, key, logits };
        let inbox = work.inbox.clone();
        self.scheduler.set_awaits_host(key, true);
        if let Err(error) = inbox.push(message) {
            self.end(key, Err(error));
        }
    }

    /// Chooses tokens from the logits that hosts have changed, several at a time. They wait with their
    /// sequences to be handed out.
    pub(super) fn choose_from_answers(&mut self, submissions: &mut [Submission]) -> Result<()> {
        if !submissions.iter().any(|it| matches!(it, Submission::Answer { .. })) {
            return Ok(());
        }
        let (works, scheduler, backend) = (&self.works, &self.scheduler, &self.backend);
        backend.parallel_each_row(submissions, 1, |_, submissions| {
            for submission in submissions {
                let Submission::Answer { key, logits } = submission else { continue };
                let Some(sequence) = scheduler.sequence(*key) else { continue };
                works.with(*key, |active| {
                    let Work::Sample(work) = &mut active.work else { return };
                    let tokens = sequence.token_ids();
                    let index = tokens.len().saturating_sub(work.num_prompt_tokens) as u64;
                    active.chosen = Some(work.choose(backend, logits, index, tokens));
                });
            }
        })
    }

    /// Hands out the token that was chosen from logits that a host has changed.
    pub(super) fn take_answer(&mut self, key: SequenceKey, logits: Vec<f32>) {
        self.scheduler.set_awaits_host(key, false);
        let Some(active) = self.works.get_mut(key) else { return };
        active.row = logits;
        match active.chosen.take() {
            Some(Ok(chosen)) => self.hand_out(key, chosen),
            Some(Err(error)) => self.end(key, Err(error)),
            None => self.end(key, Err(Error::internal("an answer that was not chosen from"))),
        }
    }
}
