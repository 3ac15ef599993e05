//! Decides when to begin the next step while one is under way: late enough that a request that
//! comes meanwhile is in it, early enough that the device never waits.
//!
//! A step that is begun ahead of time makes a request that comes a moment later wait for two steps.
//! Steps in which every sequence has one token follow each other by the hundred and take about as
//! long each, so the end of one is known from those before: it takes as long as the shortest of the
//! latest ones, since some wait for the masks of their tokens. Nothing is known of other steps, and
//! the next one is begun at once.

use std::time::{Duration, Instant};

/// Waiting is not worth it for shorter steps, of which the margin is the larger part.
const SHORTEST: Duration = Duration::from_millis(1);

/// The time by which a sleeping thread may wake late, and other delays.
const SLACK: Duration = Duration::from_micros(300);

/// Measurements of the latest steps.
#[derive(Default)]
pub(super) struct Pace {
    /// Sequences of the last step that was finished, and the time that such steps take at least: a
    /// minimum that grows slowly. `None` if it was not a decoding step.
    last: Option<(usize, Duration)>,
    /// The time at which it was finished.
    finished: Option<Instant>,
    /// The time that the host took to begin the last decoding step, or more: a maximum that decays
    /// slowly.
    host: Duration,
}

/// Whether a step of `n` sequences takes about as long as one of `last`.
fn is_like(last: usize, n: usize) -> bool {
    (last - last / 8..=last + last / 8).contains(&n)
}

impl Pace {
    /// Records that a step was begun, and how long that took. `num_decoding`: its sequences, if each
    /// has one token.
    pub fn begun(&mut self, num_decoding: Option<usize>, host: Duration) {
        if num_decoding.is_some() {
            self.host = host.max(self.host - self.host / 16);
        }
    }

    /// Records that a step was finished at `now`, for which the device took `busy`.
    pub fn finished(&mut self, num_decoding: Option<usize>, busy: Duration, now: Instant) {
        let before = self.last.zip(num_decoding).filter(|((last, _), n)| is_like(*last, *n));
        let least = before.map_or(busy, |((_, least), _)| busy.min(least + least / 16));
        self.last = num_decoding.map(|n| (n, least));
        self.finished = Some(now);
    }

    /// Returns the time at which to begin the next step, if the only one under way has
    /// `num_decoding` sequences with a token each and was begun at `begun`. `None`: at once.
    pub fn next(&self, num_decoding: Option<usize>, begun: Instant) -> Option<Instant> {
        let (last, busy) = self.last?;
        let now = num_decoding?;
        if busy < SHORTEST || !is_like(last, now) {
            return None;
        }
        let from = self.finished.map_or(begun, |finished| finished.max(begun));
        let margin = SLACK + self.host * 2 + busy / 16;
        Some(from + busy.checked_sub(margin)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn decoding_steps_are_begun_late_and_all_others_at_once() {
        let start = Instant::now();
        let mut pace = Pace::default();
        assert_eq!(pace.next(Some(8), start), None);
        pace.begun(Some(8), Duration::from_micros(100));
        pace.finished(Some(8), ms(16), start + ms(20));
        // 16 ms less 300 us, twice 100 us and 1 ms.
        let expected = start + ms(20) + Duration::from_micros(14_500);
        // It was begun ahead of time, and has run since the end of the one before.
        assert_eq!(pace.next(Some(8), start + ms(5)), Some(expected));
        assert_eq!(pace.next(Some(9), start + ms(5)), Some(expected));
        // Begun after a pause, it runs since then.
        assert_eq!(pace.next(Some(8), start + ms(21)), Some(expected + ms(1)));
        for unlike in [None, Some(6), Some(10)] {
            assert_eq!(pace.next(unlike, start + ms(5)), None);
        }
        // Host work that takes most of a step leaves nothing to wait for.
        pace.begun(Some(8), ms(8));
        assert_eq!(pace.next(Some(8), start), None);
        // A prompt says nothing of the step after it.
        pace.finished(None, ms(40), start + ms(60));
        assert_eq!(pace.next(Some(8), start + ms(61)), None);
        pace.finished(Some(8), Duration::from_micros(900), start + ms(70));
        assert_eq!(pace.next(Some(8), start + ms(71)), None);
    }

    #[test]
    fn steps_that_waited_say_little() {
        let start = Instant::now();
        let mut pace = Pace::default();
        pace.finished(Some(8), ms(16), start);
        let expected = pace.next(Some(8), start).map(|at| at - start);
        // One that waited for its masks.
        pace.finished(Some(8), ms(30), start);
        let after = pace.next(Some(8), start).map(|at| at - start);
        assert!(after >= expected && after < Some(ms(16)), "{after:?}");
        // Steps that have become longer are known as such in the end.
        for _ in 0..20 {
            pace.finished(Some(8), ms(30), start);
        }
        assert!(pace.next(Some(8), start) > Some(start + ms(27)));
        // Another size is another time.
        pace.finished(Some(4), ms(40), start);
        assert!(pace.next(Some(4), start) > Some(start + ms(36)));
    }

    #[test]
    fn a_slow_beginning_is_forgotten_slowly() {
        let start = Instant::now();
        let mut pace = Pace::default();
        pace.finished(Some(4), ms(100), start);
        pace.begun(Some(4), ms(16));
        let first = pace.next(Some(4), start);
        for _ in 0..40 {
            let before = pace.next(Some(4), start);
            pace.begun(Some(4), ms(1));
            assert!(pace.next(Some(4), start) > before);
        }
        assert!(pace.next(Some(4), start) > first);
        // The time that a prompt's step takes to begin says nothing.
        let before = pace.next(Some(4), start);
        pace.begun(None, ms(50));
        assert_eq!(pace.next(Some(4), start), before);
    }
}
