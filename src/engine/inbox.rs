//! The link between the scheduler's thread and the caller of a request: a queue of tokens in one
//! direction, the wish to stop in the other.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::host_call::HostCall;
use super::prompt_log_probs::PromptPiece;
use super::request::{CancelToken, FinishReason};
use super::sequence::SequenceKey;
use crate::error::{try_with_capacity, Error, Result};
use crate::model::LogProbs;

/// Called on the scheduler's thread, with no lock held, when an inbox is not empty any more. It may
/// do everything that does not wait.
pub type Waker = Box<dyn Fn() + Send + Sync>;

/// News of a sample from the scheduler.
#[derive(Clone, Debug)]
pub(super) enum Message {
    /// A token, whether it ends the sample, and its log-probabilities if the request wants them.
    Token { sample: u32, token: u32, is_stop: bool, log_probs: Option<Box<LogProbs>> },
    /// Log-probabilities of the prompt.
    Prompt(Box<PromptPiece>),
    /// Logits that the host changes before a token is chosen.
    Logits { sample: u32, key: SequenceKey, logits: Vec<f32> },
    /// The sample has ended.
    End { sample: u32, reason: FinishReason },
    /// The sample has failed.
    Failed { sample: u32, error: Error },
}

/// The progress of a sample.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    /// The time at which its prompt's first piece was begun.
    pub started: Option<Instant>,
    /// The time at which its first token was chosen.
    pub first_token: Option<Instant>,
    /// Tokens of the prompt that were in the cache.
    pub num_cached_tokens: usize,
    /// The number of times that it lost its KV blocks.
    pub num_preemptions: u32,
}

struct Queue {
    messages: VecDeque<Message>,
    progress: Vec<Progress>,
    /// The number of events that were taken: after each, those who wait look again.
    num_taken: u64,
    /// Threads in [`Inbox::wait_for`].
    num_waiting: usize,
}

/// The queue of one request.
pub(super) struct Inbox {
    queue: Mutex<Queue>,
    filled: Condvar,
    /// By sample, whether the caller wants no more of it.
    stopped: Vec<AtomicBool>,
    cancelled: AtomicBool,
    cancel: Option<Arc<CancelToken>>,
    closed: Arc<AtomicBool>,
    deadline: Option<Instant>,
    waker: Option<Waker>,
    waking: HostCall,
}

thread_local! {
    /// Whether this thread is a scheduler's.
    static IS_SCHEDULER: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as a scheduler's, which must never wait for its own work.
pub(super) fn mark_scheduler_thread() {
    IS_SCHEDULER.set(true);
}

/// Whether this thread is a scheduler's.
pub(super) fn is_scheduler_thread() -> bool {
    IS_SCHEDULER.get()
}

/// Refuses to wait on a scheduler's thread, where the host's code is wakers and log callbacks.
pub(super) fn check_may_wait() -> Result<()> {
    if is_scheduler_thread() {
        return Err(Error::invalid_argument(
            "a wake-up or log callback called a function that waits",
        ));
    }
    Ok(())
}

/// The number of tokens that a queue has room for from the start; it grows for more.
const USUAL_BACKLOG: usize = 64;

impl Inbox {
    /// Returns an empty queue of `num_samples` samples that get at most `max_tokens` tokens each.
    /// `closed` is the engine's.
    pub fn new(
        num_samples: usize,
        max_tokens: usize,
        cancel: Option<Arc<CancelToken>>,
        closed: Arc<AtomicBool>,
        deadline: Option<Instant>,
        waker: Option<Waker>,
    ) -> Result<Self> {
        let backlog = max_tokens.min(USUAL_BACKLOG).saturating_add(1).saturating_mul(num_samples);
        let mut messages = VecDeque::new();
        messages
            .try_reserve(backlog)
            .map_err(|_| Error::out_of_memory("a request", backlog * size_of::<Message>()))?;
        let mut progress = try_with_capacity(num_samples, "a request")?;
        progress.resize(num_samples, Progress::default());
        let mut stopped = try_with_capacity(num_samples, "a request")?;
        stopped.resize_with(num_samples, AtomicBool::default);
        Ok(Inbox {
            queue: Mutex::new(Queue { messages, progress, num_taken: 0, num_waiting: 0 }),
            filled: Condvar::new(),
            stopped,
            cancelled: AtomicBool::new(false),
            cancel,
            closed,
            deadline,
            waker,
            waking: HostCall::default(),
        })
    }

    fn wake(&self) {
        if let Some(waker) = &self.waker {
            self.waking.call(waker);
        }
    }

    /// Stops calls of the waker. Waits for one that is running, unless the waker itself calls this.
    pub fn disarm(&self) {
        if self.waker.is_some() {
            self.waking.end();
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message, and calls the waker if there was none: only the scheduler's thread does this.
    /// News for which there is no memory is an error; room for the end is found in any case.
    pub fn push(&self, message: Message) -> Result<()> {
        let mut queue = self.queue();
        // One place more for the end of each sample.
        let spare = 1 + self.stopped.len();
        let is_end = matches!(message, Message::End { .. } | Message::Failed { .. });
        if !is_end && queue.messages.try_reserve(spare).is_err() {
            return Err(Error::out_of_memory("waiting tokens", size_of::<Message>()));
        }
        let was_empty = queue.messages.is_empty();
        queue.messages.push_back(message);
        let is_awaited = queue.num_waiting > 0;
        drop(queue);
        if is_awaited {
            self.filled.notify_all();
        }
        if was_empty {
            self.wake();
        }
        Ok(())
    }

    /// Returns the next message, if there is one.
    pub fn pop(&self) -> Option<Message> {
        self.queue().messages.pop_front()
    }

    /// Records that an event was taken: another one may have become due that no message announces.
    pub fn taken(&self) {
        let mut queue = self.queue();
        queue.num_taken += 1;
        let is_awaited = queue.num_waiting > 0;
        drop(queue);
        if is_awaited {
            self.filled.notify_all();
        }
    }

    /// Calls `take` until it returns something, or `timeout` has passed (`None`: for as long as it
    /// takes). Between the calls it waits for news, and no lock is held.
    pub fn wait_for<T>(
        &self,
        timeout: Option<Duration>,
        mut take: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        if timeout == Some(Duration::ZERO) {
            return take();
        }
        check_may_wait()?;
        // A time beyond what the clock can tell never comes.
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let num_taken = self.queue().num_taken;
            if let Some(taken) = take()? {
                return Ok(Some(taken));
            }
            if !self.wait_for_news(num_taken, until) {
                return Ok(None);
            }
        }
    }

    /// Waits for a message, or until the number of events that were taken is not `num_taken` any
    /// more. False if there is neither at the time `until`.
    fn wait_for_news(&self, num_taken: u64, until: Option<Instant>) -> bool {
        let mut queue = self.queue();
        queue.num_waiting += 1;
        let has_news = loop {
            if !queue.messages.is_empty() || queue.num_taken != num_taken {
                break true;
            }
            queue = match until {
                None => self.filled.wait(queue).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break false;
                    }
                    self.filled.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        };
        queue.num_waiting -= 1;
        has_news
    }

    /// Whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.queue().messages.is_empty()
    }

    /// Notes how far a sample has come.
    pub fn set_progress(&self, sample: usize, progress: Progress) {
        if let Some(place) = self.queue().progress.get_mut(sample) {
            *place = progress;
        }
    }

    /// Returns the progress that was noted last.
    pub fn progress(&self, sample: usize) -> Progress {
        self.queue().progress.get(sample).copied().unwrap_or_default()
    }

    /// Records that the caller wants no more of a sample.
    pub fn stop(&self, sample: usize) {
        if let Some(stopped) = self.stopped.get(sample) {
            stopped.store(true, Ordering::Release);
        }
    }

    /// Cancels all samples; messages in the queue are not to be used.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    /// Whether the request was cancelled, in any way.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
            || self.closed.load(Ordering::Acquire)
            || self.cancel.as_ref().is_some_and(|cancel| cancel.is_cancelled())
    }

    /// Returns the reason to compute nothing more for a sample, if there is one.
    pub fn stop_reason(&self, sample: usize) -> Option<FinishReason> {
        if self.is_cancelled() {
            return Some(FinishReason::Cancelled);
        }
        if self.stopped.get(sample).is_none_or(|stopped| stopped.load(Ordering::Acquire)) {
            return Some(FinishReason::Callback);
        }
        match self.deadline {
            Some(deadline) if Instant::now() >= deadline => Some(FinishReason::Deadline),
            _ => None,
        }
    }
}
