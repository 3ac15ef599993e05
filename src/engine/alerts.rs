//! Messages about a model that runs: a lost device, odd or preempted requests, steps that take long.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::log::{LogLevel, LogTarget, Logger};
use crate::error::{Error, ErrorKind};

/// The least time between two messages of a kind; what happens meanwhile is in the next one.
const BETWEEN: Duration = Duration::from_secs(1);
/// A step is never slow that takes less.
const SHORTEST_SLOW: Duration = Duration::from_secs(1);
/// A step is slow that takes this many times as long as those before it, per token.
const SLOW: f64 = 8.0;
/// The number of steps after which it is known how long they take.
const KNOWN_AFTER: u32 = 8;

/// The time that a token takes in steps of one kind.
#[derive(Default)]
struct Usual {
    seconds_per_token: f64,
    num_steps: u32,
}

impl Usual {
    /// Adds a step; returns how many times as long as usual it took, if that is known.
    fn add(&mut self, seconds_per_token: f64) -> Option<f64> {
        let ratio = (self.num_steps >= KNOWN_AFTER && self.seconds_per_token > 0.0)
            .then(|| seconds_per_token / self.seconds_per_token);
        // An exponential mean, so that a change of the load is learnt.
        let weight = 1.0 / f64::from(self.num_steps.min(KNOWN_AFTER) + 1);
        self.seconds_per_token += weight * (seconds_per_token - self.seconds_per_token);
        self.num_steps = self.num_steps.saturating_add(1);
        ratio
    }
}

/// The state of a running model, for telling what is out of the ordinary.
pub(super) struct Alerts {
    log: Arc<Logger>,
    is_lost: bool,
    /// Steps of one token for each sequence, and others.
    decoding: Usual,
    prefill: Usual,
    slow_said: Option<Instant>,
    num_preemptions: u64,
    preemptions_said: Option<Instant>,
    remark_said: Option<Instant>,
}

fn is_due(said: &mut Option<Instant>) -> bool {
    let now = Instant::now();
    let is_due = said.is_none_or(|last| now.saturating_duration_since(last) >= BETWEEN);
    if is_due {
        *said = Some(now);
    }
    is_due
}

impl Alerts {
    /// Returns the state in which nothing has happened yet.
    pub fn new(log: Arc<Logger>) -> Self {
        Alerts {
            log,
            is_lost: false,
            decoding: Usual::default(),
            prefill: Usual::default(),
            slow_said: None,
            num_preemptions: 0,
            preemptions_said: None,
            remark_said: None,
        }
    }

    /// Notes that a step has failed.
    pub fn failed(&mut self, error: &Error) {
        if error.kind() == ErrorKind::DeviceLost && !std::mem::replace(&mut self.is_lost, true) {
            self.log.log(LogLevel::Warning, LogTarget::Device, || error.to_string());
        }
    }

    /// Notes that a step of `num_tokens` took `time`; `is_decoding`: each sequence had one token in it.
    pub fn step(&mut self, num_tokens: usize, is_decoding: bool, time: Duration) {
        // Steps of few tokens take as long as those of more, so that they are compared by tokens
        // only where there are many.
        let per = if is_decoding { 1.0 } else { num_tokens.max(64) as f64 };
        let usual = if is_decoding { &mut self.decoding } else { &mut self.prefill };
        let Some(ratio) = usual.add(time.as_secs_f64() / per) else { return };
        if ratio >= SLOW && time >= SHORTEST_SLOW && is_due(&mut self.slow_said) {
            self.log.log(LogLevel::Warning, LogTarget::Scheduler, || {
                format!(
                    "a step of {num_tokens} tokens took {:.1} s, {ratio:.0} times as long as usual",
                    time.as_secs_f64()
                )
            });
        }
    }

    /// Notes that something about a request is odd.
    pub fn remark(&mut self, sentence: &str) {
        if is_due(&mut self.remark_said) {
            self.log.log(LogLevel::Warning, LogTarget::Scheduler, || sentence.to_owned());
        }
    }

    /// `total` preemptions since the load, with this many blocks of the KV cache.
    pub fn preemptions(&mut self, total: u64, num_blocks: usize) {
        if total == self.num_preemptions || !is_due(&mut self.preemptions_said) {
            return;
        }
        let new = total - self.num_preemptions.min(total);
        self.num_preemptions = total;
        self.log.log(LogLevel::Info, LogTarget::Scheduler, || {
            format!(
                "the KV cache of {num_blocks} blocks is full: {new} requests were preempted and \
                 will go on later ({total} since the model was loaded)"
            )
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    fn recorded() -> (Alerts, Arc<Mutex<Vec<String>>>) {
        let said = Arc::new(Mutex::new(Vec::new()));
        let to = said.clone();
        let log = Logger::new(move |level, target, message| {
            to.lock().unwrap().push(format!("{level:?} {target:?} {message}"));
        });
        (Alerts::new(Arc::new(log)), said)
    }

    #[test]
    fn a_lost_device_is_told_once() {
        let (mut alerts, said) = recorded();
        let lost = Error::new(ErrorKind::DeviceLost, "a kernel failed");
        alerts.failed(&Error::out_of_memory("a step", 5));
        alerts.failed(&lost);
        alerts.failed(&lost);
        assert_eq!(*said.lock().unwrap(), ["Warning Device a kernel failed"]);
    }

    #[test]
    fn slow_steps_are_told_and_usual_ones_are_not() {
        let (mut alerts, said) = recorded();
        let seconds = Duration::from_secs_f64;
        for _ in 0..20 {
            alerts.step(8, true, seconds(0.2));
            alerts.step(2048, false, seconds(1.5));
        }
        // A longer prompt takes longer, and a short step is no reason to worry.
        alerts.step(8192, false, seconds(6.0));
        alerts.step(8, true, seconds(0.9));
        assert!(said.lock().unwrap().is_empty());
        alerts.step(8, true, seconds(2.5));
        // Within a second there is one message.
        alerts.step(8, true, seconds(2.5));
        let said = said.lock().unwrap();
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with("Warning Scheduler a step of 8 tokens took 2.5 s, "));
    }

    #[test]
    fn preemptions_are_counted_between_messages() {
        let (mut alerts, said) = recorded();
        alerts.preemptions(0, 64);
        alerts.preemptions(2, 64);
        alerts.preemptions(5, 64);
        alerts.preemptions_said = Instant::now().checked_sub(BETWEEN);
        alerts.preemptions(5, 64);
        alerts.preemptions(5, 64);
        let said = said.lock().unwrap();
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].contains("64 blocks") && said[0].contains("2 requests"));
        assert!(said[1].contains("3 requests") && said[1].contains("5 since"));
    }
}
