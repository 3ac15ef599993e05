//! Statistics of what an engine has done and is doing.

use std::time::{Duration, Instant};

use super::scheduler::SchedulerCounts;
use crate::model::StepTime;

/// Bounds of the histogram of step times: bucket `i` counts the steps shorter than `FIRST_BUCKET_US
/// << i` microseconds that are in no bucket before it; the last one counts all others.
pub const FIRST_BUCKET_US: u64 = 125;
/// Buckets of the histogram of step times.
pub const NUM_STEP_BUCKETS: usize = 20;

/// Statistics of an engine at one moment, consistent with each other. Totals are since loading.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineStats {
    /// Sequences, blocks, and hits of the prefix cache.
    pub scheduler: SchedulerCounts,
    /// Most KV blocks that had owners at one time.
    pub peak_used_blocks: usize,
    /// Samples that were submitted.
    pub submitted: u64,
    /// Samples that have ended, for any reason.
    pub ended: u64,
    /// Forward passes.
    pub steps: u64,
    /// Tokens of prompts that were computed, including those computed again after a preemption.
    pub prompt_tokens: u64,
    /// Tokens that were chosen.
    pub generated_tokens: u64,
    /// Time spent on steps.
    pub busy: Duration,
    /// Time for which the device, or the CPU, computed steps.
    pub device_busy: Duration,
    /// Time between steps for which it waited for the host, while there were sequences to compute.
    pub device_idle: Duration,
    /// Tokens chosen per second, over the last second or two of work.
    pub tokens_per_second: f64,
    /// See [`FIRST_BUCKET_US`].
    pub step_times: [u64; NUM_STEP_BUCKETS],
}

/// Collects statistics, without allocating.
#[derive(Default)]
pub(super) struct Recorder {
    pub stats: EngineStats,
    window: Window,
    previous: Window,
    /// The time at which the last step was finished.
    last: Option<Instant>,
}

/// A stretch of work of about a second.
#[derive(Clone, Copy, Default)]
struct Window {
    tokens: u64,
    busy: Duration,
}

const WINDOW: Duration = Duration::from_secs(1);

impl Recorder {
    /// Returns a record of a scheduler that has done nothing yet.
    pub fn new(counts: SchedulerCounts) -> Self {
        let mut recorder = Recorder::default();
        recorder.counts(counts);
        recorder
    }

    /// Notes a step that took from `begin`, or from the end of the one before it, to now. `time`:
    /// the busy and idle time of the device. Without `follows` there was nothing to do before the
    /// step.
    pub fn step(
        &mut self,
        begin: Instant,
        time: StepTime,
        follows: bool,
        prompt_tokens: usize,
        generated_tokens: usize,
    ) {
        self.stats.device_busy += time.busy;
        self.stats.device_idle += if follows { time.idle } else { Duration::ZERO };
        let now = Instant::now();
        let time = now.duration_since(self.last.map_or(begin, |last| last.max(begin)));
        self.last = Some(now);
        let stats = &mut self.stats;
        stats.steps += 1;
        stats.busy += time;
        stats.prompt_tokens += prompt_tokens as u64;
        stats.generated_tokens += generated_tokens as u64;
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let bucket = (0..NUM_STEP_BUCKETS - 1).find(|i| micros < FIRST_BUCKET_US << i);
        if let Some(count) = stats.step_times.get_mut(bucket.unwrap_or(NUM_STEP_BUCKETS - 1)) {
            *count += 1;
        }
        self.window.tokens += generated_tokens as u64;
        self.window.busy += time;
        let busy = (self.window.busy + self.previous.busy).as_secs_f64();
        if busy > 0.0 {
            let tokens = self.window.tokens + self.previous.tokens;
            stats.tokens_per_second = tokens as f64 / busy;
        }
        if self.window.busy >= WINDOW {
            self.previous = std::mem::take(&mut self.window);
        }
    }

    /// Notes the scheduler's counts.
    pub fn counts(&mut self, counts: SchedulerCounts) {
        self.stats.scheduler = counts;
        self.stats.peak_used_blocks = self.stats.peak_used_blocks.max(counts.blocks.used);
    }
}
