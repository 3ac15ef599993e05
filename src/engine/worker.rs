//! The scheduler's thread, which takes requests in, plans and runs steps, and hands out tokens.
//!
//! If the model takes several steps at a time (a device does, the CPU does not), a step is planned and begun while the
//! one before is under way, and only then is that one finished: the host works while the device does. It is begun as
//! late as that allows ([`Pace`]), so that requests that come meanwhile are in it. Where constraints say which tokens
//! may come, the choice of a step's tokens is queued apart from its pass: when the step before is finished, beside the
//! pass, the constraints take its tokens and give the masks of the next ones. No callback of a request runs here; only
//! wakers do, which are quick. They run on this thread only, from this loop only, and with no lock held: they may call
//! what does not wait, also what ends the request that they wake for.
//!
//! A step that fails ends the sequences in it, and no others. A step that finds no memory is
//! planned again with fewer tokens: it fails only if it is one token of one sequence and nothing
//! else is under way. Planning itself takes no memory, so no waiting request fails for lack of
//! it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::active::ActiveTable;
use super::alerts::Alerts;
use super::batch_builder::Part;
use super::inbox::{mark_scheduler_thread, Inbox, Message};
use super::intake::{lock, Shared};
use super::log::Logger;
use super::pace::Pace;
use super::request::FinishReason;
use super::sampler::{not_finite, Chosen};
use super::scheduler::Scheduler;
use super::sequence::{Entry, SequenceKey};
use super::stats::Recorder;
use super::step_model::StepModel;
use super::step_resources::StepResources;
use super::submission::{Submission, Work};
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{mask_words, Draw, StepResult, TokenChoice, NO_TOKEN};
use crate::ops::adjust_logits::AdjustedRow;
use crate::panic_guard;
use crate::text::Progress;

/// A step under way.
struct Flight {
    entries: Vec<Entry>,
    begun: Instant,
    /// The value of [`Worker::follows`] when it was begun.
    follows: bool,
    /// Its sequences, if each has one token in it.
    num_decoding: Option<usize>,
    /// Whether blocks were copied before it: its time may be partly theirs.
    copied: bool,
    /// Whether the choice of its tokens waits for masks.
    awaits_masks: bool,
}

/// The thread's own state.
pub(super) struct Worker {
    pub(super) model: Arc<dyn StepModel>,
    pub(super) backend: Arc<CpuBackend>,
    pub(super) shared: Arc<Shared>,
    pub(super) scheduler: Scheduler,
    /// `None` while they are lent.
    pub(super) resources: Option<Box<StepResources>>,
    pub(super) works: ActiveTable,
    flights: VecDeque<Flight>,
    /// Submissions that are being taken in.
    arriving: VecDeque<Submission>,
    result: StepResult,
    pub(super) recorder: Recorder,
    alerts: Alerts,
    closed: Arc<AtomicBool>,
    /// Whether a sequence that is computed alone has the next turn.
    pub(super) alone_next: bool,
    /// Whether there has been something to do, and no other use of the resources, since the last
    /// step was begun.
    pub(super) follows: bool,
    /// Whether the last turn found nothing to do but to wait for hosts that change logits.
    awaits_hosts: bool,
    pace: Pace,
}

pub(super) fn no_resources() -> Error {
    Error::internal("the engine's KV cache was lent and not given back")
}

impl Worker {
    /// Returns a worker that has not started.
    pub fn new(
        model: Arc<dyn StepModel>,
        backend: Arc<CpuBackend>,
        resources: StepResources,
        scheduler: Scheduler,
        closed: Arc<AtomicBool>,
        shared: Arc<Shared>,
        log: Arc<Logger>,
    ) -> Self {
        let recorder = Recorder::new(scheduler.counts());
        Worker {
            model,
            backend,
            shared,
            scheduler,
            resources: Some(Box::new(resources)),
            works: ActiveTable::default(),
            flights: VecDeque::new(),
            arriving: VecDeque::new(),
            result: StepResult::default(),
            recorder,
            alerts: Alerts::new(log),
            closed,
            alone_next: false,
            follows: false,
            awaits_hosts: false,
            pace: Pace::default(),
        }
    }

    /// Serves until the service ends.
    pub fn run(&mut self) {
        mark_scheduler_thread();
        loop {
            let turn = panic_guard::catch(|| {
                let goes_on = self.await_work();
                if goes_on {
                    self.take_submissions()?;
                    self.turn()?;
                }
                Ok(goes_on)
            });
            match turn {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => self.fail(error),
            }
            *lock(&self.shared.stats) = self.recorder.stats;
        }
        self.end_all(&|| Ok(FinishReason::Cancelled));
    }

    /// Returns the time at which to begin the next step, if that is to wait for submissions.
    fn next_begin(&self) -> Option<Instant> {
        let flight = self.flights.front().filter(|_| self.flights.len() == 1)?;
        match self.scheduler.plan_alone() {
            None => self.pace.next(flight.num_decoding, flight.begun),
            Some(_) => None,
        }
    }

    /// Waits for something to do, and fetches the submissions that have arrived. False when the thread is to
    /// end.
    fn await_work(&mut self) -> bool {
        let next_begin = self.next_begin();
        let shared = self.shared.clone();
        let mut intake = lock(&shared.intake);
        loop {
            if intake.shutdown {
                return false;
            }
            let idle = intake.submissions.is_empty() && self.scheduler.is_empty();
            if !(idle && self.flights.is_empty()) {
                let left = match (intake.submissions.is_empty(), next_begin) {
                    (true, Some(at)) => at.saturating_duration_since(Instant::now()),
                    (true, None) if self.awaits_hosts => LOOK_AT_HOSTS_EVERY,
                    _ => Duration::ZERO,
                };
                if left.is_zero() {
                    break;
                }
                self.awaits_hosts = false;
                let waited = shared.arrived.wait_timeout(intake, left);
                intake = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            self.follows = false;
            intake = shared.arrived.wait(intake).unwrap_or_else(PoisonError::into_inner);
        }
        // The lock is released first: a caller that is told of an end meanwhile may submit its next
        // request.
        std::mem::swap(&mut intake.submissions, &mut self.arriving);
        let remarks = std::mem::take(&mut intake.remarks);
        drop(intake);
        remarks.iter().for_each(|sentence| self.alerts.remark(sentence));
        true
    }

    /// Begins what has arrived.
    fn take_submissions(&mut self) -> Result<()> {
        let mut arriving = std::mem::take(&mut self.arriving);
        // Whatever happens, their callers are told how they end.
        let chosen = panic_guard::catch(|| self.choose_from_answers(arriving.make_contiguous()));
        self.arriving = arriving;
        chosen?;
        while let Some(submission) = self.arriving.pop_front() {
            self.take_in(submission);
        }
        Ok(())
    }

    /// Counts what was submitted, and begins it.
    fn take_in(&mut self, submission: Submission) {
        self.recorder.stats.submitted += submission.num_samples();
        self.start(submission);
    }

    /// Begins what was submitted and counted.
    pub(super) fn start(&mut self, submission: Submission) {
        match submission {
            Submission::Run { sequence, work } => {
                let added = self.works.reserve().and_then(|()| self.scheduler.add(sequence));
                match added {
                    Ok(key) => self.works.insert(key, work),
                    Err(error) => self.tell_end(&work, Err(error)),
                }
            }
            Submission::End { inbox, num_samples, reason } => {
                self.end_at_once(&inbox, num_samples, Ok(reason));
            }
            Submission::Answer { key, logits } => self.take_answer(key, logits),
        }
    }

    /// Ends what was submitted, counted and not begun.
    pub(super) fn refuse(&mut self, submission: &Submission, outcome: Result<FinishReason>) {
        match submission {
            Submission::Run { work, .. } => self.tell_end(work, outcome),
            Submission::End { inbox, num_samples, .. } => {
                self.end_at_once(inbox, *num_samples, outcome);
            }
            // Its sequence is ended for itself.
            Submission::Answer { .. } => {}
        }
    }

    /// Reports the ends of a request that was over when it came.
    fn end_at_once(&mut self, inbox: &Inbox, num_samples: u32, outcome: Result<FinishReason>) {
        for sample in 0..num_samples {
            self.tell_end_of_sample(inbox, sample, outcome.clone());
        }
    }

    /// Ends a sequence and tells its caller.
    pub(super) fn end(&mut self, key: SequenceKey, outcome: Result<FinishReason>) {
        self.scheduler.remove(key);
        if let Some(active) = self.works.remove(key) {
            self.tell_end(&active.work, outcome);
        }
    }

    pub(super) fn tell_end(&mut self, work: &Work, outcome: Result<FinishReason>) {
        match work {
            Work::Logits(handoff) => {
                self.count_end();
                handoff.end(outcome.and(Err(cancelled())));
            }
            Work::Sample(work) => self.tell_end_of_sample(&work.inbox, work.sample, outcome),
            Work::Score(work) => self.tell_end_of_score(work, outcome),
        }
    }

    fn tell_end_of_sample(&mut self, inbox: &Inbox, sample: u32, outcome: Result<FinishReason>) {
        self.count_end();
        let message = match outcome {
            Ok(reason) => Message::End { sample, reason },
            Err(error) => Message::Failed { sample, error },
        };
        // Ends always find room.
        let _ = inbox.push(message);
    }

    /// Counts the end of a sample. A caller that hears of the end and asks for statistics finds it
    /// in them.
    pub(super) fn count_end(&mut self) {
        self.recorder.stats.ended += 1;
        self.recorder.counts(self.scheduler.counts());
        *lock(&self.shared.stats) = self.recorder.stats;
    }

    fn end_all(&mut self, outcome: &dyn Fn() -> Result<FinishReason>) {
        for slot in 0..self.works.num_slots() {
            if let Some(key) = self.works.at_mut(slot).map(|active| active.key) {
                self.end(key, outcome());
            }
        }
        let arrived = std::mem::take(&mut self.arriving);
        let submissions = std::mem::take(&mut lock(&self.shared.intake).submissions);
        for submission in arrived.into_iter().chain(submissions) {
            self.recorder.stats.submitted += submission.num_samples();
            self.refuse(&submission, outcome());
        }
    }

    /// Ends every request, and takes none any more: after a fault of the library itself nothing is
    /// certain.
    fn fail(&mut self, error: Error) {
        lock(&self.shared.intake).failed = Some(error.clone());
        self.abandon_flights();
        self.end_all(&|| Err(error.clone()));
    }

    /// Drops the results of the steps under way. The model finishes its steps in order, so none may
    /// be left for the next request to get.
    fn abandon_flights(&mut self) {
        while let Some(Flight { entries, .. }) = self.flights.pop_front() {
            if let Some(resources) = self.resources.as_deref_mut() {
                let _ = self.model.finish_step(&mut resources.workspace, &mut self.result);
            }
            self.scheduler.give_back_plan_memory(entries);
        }
    }

    /// Does one thing: begins a step, finishes one, or lends the resources. Every error is a fault
    /// of the library: whatever can go wrong with a request ends that request here.
    fn turn(&mut self) -> Result<()> {
        self.end_stopped();
        let depth = self.model.max_steps_in_flight().clamp(1, 2);
        self.awaits_hosts = false;
        let alone = if self.alone_next { self.scheduler.plan_alone() } else { None };
        let mut begun = false;
        if alone.is_none() && self.flights.len() < depth {
            let waits = !self.flights.is_empty() && self.scheduler.wants_finished_step();
            begun = !waits && self.begin()?;
            let chosen = self.choose_masked();
            self.fail_unchosen(chosen);
        }
        if self.flights.len() >= depth || (!begun && !self.flights.is_empty()) {
            self.finish();
        } else if !begun && self.flights.is_empty() {
            match self.scheduler.plan_alone() {
                Some(entry) => {
                    self.alone_next = false;
                    return self.compute_alone(entry);
                }
                None if self.scheduler.awaits_hosts() => self.awaits_hosts = alone.is_none(),
                None if !self.scheduler.is_empty() && alone.is_none() => {
                    self.check_progress()?;
                }
                None => {}
            }
        }
        if begun {
            self.alone_next = true;
        }
        let counts = self.scheduler.counts();
        let blocks = counts.blocks;
        self.alerts.preemptions(counts.preemptions, blocks.used + blocks.idle + blocks.free);
        self.recorder.counts(counts);
        Ok(())
    }

    /// Fails if sequences would wait for ever: nothing could be planned and nothing is under way.
    fn check_progress(&mut self) -> Result<()> {
        let mut entries = self.scheduler.take_plan_memory();
        let planned = self.plan(&mut entries);
        let stuck = entries.is_empty() && self.scheduler.plan_alone().is_none();
        self.scheduler.give_back_plan_memory(entries);
        planned?;
        if stuck && !self.scheduler.is_empty() {
            Err(Error::internal("requests wait for KV blocks that nobody has"))
        } else {
            Ok(())
        }
    }

    /// Whether the engine takes no more requests and ends those that it has.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Ends sequences that were cancelled or stopped by their caller, or whose time limit has
    /// passed.
    pub(super) fn end_stopped(&mut self) {
        let is_closed = self.is_closed();
        for slot in 0..self.works.num_slots() {
            let Some(active) = self.works.at_mut(slot) else { continue };
            let reason = match &active.work {
                Work::Sample(work) => work.inbox.stop_reason(work.sample as usize),
                Work::Score(work) => work.stop_reason(is_closed),
                Work::Logits(_) => is_closed.then_some(FinishReason::Cancelled),
            };
            if let Some(reason) = reason {
                let key = active.key;
                self.end(key, Ok(reason));
            }
        }
    }

    /// Plans a step and copies the blocks that the plan wants copied. Returns whether there were
    /// any.
    fn plan(&mut self, entries: &mut Vec<Entry>) -> Result<bool> {
        loop {
            self.scheduler.plan(entries)?;
            let Self { model, scheduler, resources, .. } = self;
            if scheduler.copies().is_empty() {
                return Ok(false);
            }
            let StepResources { kv, swap, .. } =
                resources.as_deref_mut().ok_or_else(no_resources)?;
            let copied = model.copy_blocks(kv, swap, scheduler.copies());
            if let Some((num_blocks, time)) = swap.take_time() {
                scheduler.swap_costs().copied(num_blocks, time);
            }
            let Err(error) = copied else {
                scheduler.clear_copies();
                return Ok(true);
            };
            // The copy failed, so the contents of these sequences' blocks are unknown.
            while let Some(&key) = self.scheduler.copied_keys().first() {
                self.scheduler.forget_copies(key);
                self.end(key, Err(error.clone()));
            }
        }
    }

    /// Takes memory for preempted sequences if there was too little, while the device computes.
    fn grow_swap(&mut self) {
        let most = self.scheduler.swap_places_wanted();
        let Some(resources) = self.resources.as_deref_mut().filter(|_| most > 0) else { return };
        match resources.swap.grow(most) {
            Ok(Some(num_places)) => self.scheduler.add_swap_places(num_places),
            // It is being taken in the background.
            Ok(None) => {}
            // Without memory, preempted sequences are recomputed.
            Err(_) => self.scheduler.add_swap_places(0),
        }
    }

    /// Plans and begins a step. False if there was nothing to do, or no memory for it yet.
    fn begin(&mut self) -> Result<bool> {
        let start = Instant::now();
        let mut entries = self.scheduler.take_plan_memory();
        let mut copied = false;
        let begun = loop {
            copied |= self.plan(&mut entries)?;
            if entries.is_empty() {
                break false;
            }
            let begun = Instant::now();
            let Err(error) = self.begin_step(&entries, begun) else {
                self.scheduler.begun(&entries);
                let follows = std::mem::replace(&mut self.follows, true);
                let is_decoding = entries.iter().all(|entry| entry.num_new == 1);
                let num_decoding = is_decoding.then_some(entries.len());
                self.pace.begun(num_decoding, start.elapsed());
                let resources = self.resources.as_ref();
                let awaits_masks =
                    resources.is_some_and(|it| !it.builder.step().masked_rows.is_empty());
                self.flights.push_back(Flight {
                    entries,
                    begun,
                    follows,
                    num_decoding,
                    copied,
                    awaits_masks,
                });
                self.grow_swap();
                return Ok(true);
            };
            match error.kind() {
                // Every sequence in it was to stop.
                ErrorKind::Cancelled => self.end_stopped(),
                ErrorKind::OutOfMemory if self.scheduler.found_no_memory(&entries) => {
                    if self.flights.is_empty() {
                        continue;
                    }
                }
                // There may be memory when the step under way is finished.
                ErrorKind::OutOfMemory if !self.flights.is_empty() => {}
                // A failed step fails every sequence in it.
                _ => self.fail_entries(&entries, &error),
            }
            // The model may have overwritten the tokens that the step under way chooses, so that is
            // finished before another step needs them.
            break self.flights.is_empty();
        };
        self.scheduler.give_back_plan_memory(entries);
        Ok(begun)
    }

    fn fail_entries(&mut self, entries: &[Entry], error: &Error) {
        self.alerts.failed(error);
        for entry in entries {
            self.end(entry.key, Err(error.clone()));
        }
    }

    fn begin_step(&mut self, entries: &[Entry], now: Instant) -> Result<()> {
        let no_memory = |_| Error::out_of_memory("a step", size_of::<Flight>());
        self.flights.try_reserve(1).map_err(no_memory)?;
        let Self { model, scheduler, works, resources, .. } = self;
        let StepResources { kv, workspace, builder, .. } =
            resources.as_deref_mut().ok_or_else(no_resources)?;
        let blocks = |entry: &Entry| scheduler.sequence(entry.key).map_or(0, |s| s.blocks().len());
        builder.clear(entries.iter().map(blocks).max().unwrap_or(0))?;
        for entry in entries {
            let gone = || Error::internal("a planned sequence is gone");
            let sequence = scheduler.sequence(entry.key).ok_or_else(gone)?;
            let active = works.get_mut(entry.key).ok_or_else(gone)?;
            active.progress.started.get_or_insert(now);
            let Work::Sample(work) = &mut active.work else { return Err(gone()) };
            let token_ids = match entry.source {
                // Any valid id stands for the one that is being chosen.
                Some(_) => sequence.token_ids().get(..1),
                None => sequence.token_ids().get(entry.start..entry.start + entry.num_new),
            };
            let index = sequence.num_tokens().saturating_sub(work.num_prompt_tokens) as u64;
            let choice = match work.choice {
                TokenChoice::Draw(draw) => TokenChoice::Draw(Draw { index, ..draw }),
                choice => choice,
            };
            let part = Part {
                token_ids: token_ids.ok_or_else(|| Error::internal("a plan beyond the tokens"))?,
                start: entry.start,
                blocks: sequence.blocks(),
                source: entry.source,
            };
            builder.push(&part, entry.row.map(|_| choice))?;
            if entry.row.is_none() || choice == TokenChoice::Caller {
                continue;
            }
            let changes = work.sampler.changes_mut();
            if let Some((row, adjustments)) = changes.row_after(index, sequence.token_ids())? {
                let pending = entry.source.unwrap_or(AdjustedRow::NONE_PENDING);
                builder.adjust(AdjustedRow { pending, ..row }, adjustments)?;
            }
            if let Some(wanted) = work.log_probs {
                builder.want_log_probs(wanted)?;
            }
            if work.is_masked(index) {
                builder.mask()?;
            }
        }
        // A step whose sequences were all stopped ends between layers.
        let should_stop = || {
            entries.iter().all(|entry| {
                let stopped = works.with(entry.key, |active| match &active.work {
                    Work::Sample(work) => work.inbox.stop_reason(work.sample as usize).is_some(),
                    Work::Logits(_) | Work::Score(_) => true,
                });
                stopped.unwrap_or(true)
            })
        };
        model.begin_step(&builder.step(), kv, workspace, &should_stop)
    }

    /// Waits for the oldest step under way, and hands out its tokens.
    fn finish(&mut self) {
        let Some(flight) = self.flights.pop_front() else { return };
        let Flight { entries, begun, follows, num_decoding, copied, .. } = flight;
        let finished = match self.resources.as_deref_mut() {
            Some(resources) => self.model.finish_step(&mut resources.workspace, &mut self.result),
            None => Err(no_resources()),
        };
        self.pace.finished(num_decoding, self.result.time.busy, Instant::now());
        let no_memory =
            finished.as_ref().is_err_and(|error| error.kind() == ErrorKind::OutOfMemory);
        if no_memory && self.scheduler.found_no_memory(&entries) {
            // It is computed again in smaller steps, and so is the step that was begun after it
            // with its tokens.
            self.abandon_flights();
            self.scheduler.abandon_steps();
            return self.scheduler.give_back_plan_memory(entries);
        }
        let chosen = finished.and_then(|()| self.choose(&entries));
        if let Err(error) = &chosen {
            self.fail_entries(&entries, error);
        }
        // The device waits for this choice, nobody for the tokens.
        let next_chosen = self.choose_masked();
        match chosen {
            Err(_) => {}
            Ok(()) => {
                let (mut num_prompt, mut num_chosen) = (0, 0);
                for entry in &entries {
                    num_prompt += entry.num_new - usize::from(entry.row.is_some());
                    num_chosen += usize::from(entry.row.is_some());
                }
                if !copied {
                    let single = entries.iter().filter(|entry| entry.num_new == 1).count();
                    let all: usize = entries.iter().map(|entry| entry.num_new).sum();
                    let costs = self.scheduler.swap_costs();
                    costs.computed(all - single, single, self.result.time.busy);
                }
                // This comes before the tokens go out: a caller that has the last one finds it
                // counted.
                self.recorder.step(begun, self.result.time, follows, num_prompt, num_chosen);
                let num_tokens = entries.iter().map(|entry| entry.num_new).sum();
                self.alerts.step(num_tokens, num_decoding.is_some(), self.result.time.busy);
                for entry in &entries {
                    self.deliver(entry);
                }
            }
        }
        self.fail_unchosen(next_chosen);
        self.scheduler.give_back_plan_memory(entries);
    }

    /// Has the model choose the tokens of the step under way, if that is the only one and masks say
    /// which may come: the constraints first take the tokens of the step before, which was finished
    /// last.
    fn choose_masked(&mut self) -> Result<()> {
        let Self { flights, works, resources, result, backend, model, .. } = self;
        let [flight] = flights.make_contiguous() else { return Ok(()) };
        if !std::mem::take(&mut flight.awaits_masks) {
            return Ok(());
        }
        let resources = resources.as_deref_mut().ok_or_else(no_resources)?;
        let step = resources.builder.step();
        let (works, tokens) = (&*works, &result.tokens);
        let masked_rows = step.masked_rows;
        let is_masked =
            |entry: &&Entry| entry.row.is_some_and(|row| masked_rows.binary_search(&row).is_ok());
        let masked = flight.entries.iter().filter(is_masked);
        let mask_bytes = 4 * mask_words(model.vocab_size());
        let mut write = |masks: &mut [u8]| {
            backend.parallel_each_row(masks, mask_bytes, |first, rows| {
                let mine = masked.clone().skip(first);
                for (entry, row) in mine.zip(rows.chunks_exact_mut(mask_bytes)) {
                    let before = entry
                        .source
                        .map(|source| tokens.get(source as usize).copied().unwrap_or(NO_TOKEN));
                    let written = works.with(entry.key, |active| active.write_mask(before, row));
                    if written != Some(true) {
                        // The sequence has ended, or ends with the token before.
                        row.fill(u8::MAX);
                    }
                }
            })
        };
        model.choose_masked(&step, &mut resources.workspace, &mut write)
    }

    /// Ends those whose tokens could not be chosen, in the step under way.
    fn fail_unchosen(&mut self, chosen: Result<()>) {
        let Err(error) = chosen else { return };
        let Some(flight) = self.flights.front_mut() else { return };
        let entries = std::mem::take(&mut flight.entries);
        self.fail_entries(&entries, &error);
        if let Some(flight) = self.flights.front_mut() {
            flight.entries = entries;
        }
    }

    /// Chooses the tokens that the model leaves to the host, several at a time.
    fn choose(&mut self, entries: &[Entry]) -> Result<()> {
        let StepResult { logits, .. } = &mut self.result;
        let vocab_size = self.model.vocab_size();
        let works = &self.works;
        let (scheduler, backend) = (&self.scheduler, &self.backend);
        let ours = entries.iter().filter(|entry| entry.row.is_some() && !entry.by_model);
        let num_ours = ours.clone().count();
        if num_ours.checked_mul(vocab_size) != Some(logits.len()) {
            return Err(Error::internal("a step gave other rows of logits than were asked for"));
        }
        backend.parallel_rows(logits, vocab_size, |first, rows| {
            let mine = ours.clone().skip(first);
            for (entry, row) in mine.zip(rows.chunks_exact_mut(vocab_size)) {
                let Some(sequence) = scheduler.sequence(entry.key) else { continue };
                works.with(entry.key, |active| {
                    let Work::Sample(work) = &mut active.work else { return };
                    let index = sequence.token_ids().len().saturating_sub(work.num_prompt_tokens);
                    let (index, tokens) = (index as u64, sequence.token_ids());
                    if work.asks_host {
                        active.row.clear();
                        let room = active.row.try_reserve_exact(row.len());
                        match room {
                            Ok(()) => active.row.extend_from_slice(row),
                            Err(_) => active.chosen = Some(Err(no_row(row.len()))),
                        }
                        return;
                    }
                    active.chosen = Some(work.choose(backend, row, index, tokens));
                });
            }
        })
    }

    /// Hands out the token that a step gave a sequence.
    fn deliver(&mut self, entry: &Entry) {
        let by_model = entry.row.and_then(|row| self.result.tokens.get(row as usize).copied());
        let Some(active) = self.works.get_mut(entry.key) else {
            // The sequence has ended meanwhile.
            return;
        };
        let asks_host =
            entry.row.is_some() && matches!(&active.work, Work::Sample(work) if work.asks_host);
        let chosen = match (entry.row, active.chosen.take(), by_model) {
            (None, ..) => None,
            (_, Some(Ok(chosen)), _) => Some(chosen),
            (_, Some(Err(error)), _) => return self.end(entry.key, Err(error)),
            (Some(_), None, _) if asks_host => None,
            (Some(row), None, Some(token)) if token != NO_TOKEN => {
                let log_probs = self.result.log_probs.get_mut(row as usize).and_then(Option::take);
                Some(Chosen { token, log_probs })
            }
            _ => return self.end(entry.key, Err(not_finite())),
        };
        self.scheduler.finished(entry);
        match chosen {
            Some(chosen) => self.hand_out(entry.key, chosen),
            None if asks_host => self.ask_host(entry.key),
            None => {}
        }
    }

    /// Hands out the token that was chosen for a sequence.
    pub(super) fn hand_out(&mut self, key: SequenceKey, chosen: Chosen) {
        let Chosen { token, log_probs } = chosen;
        let Some(active) = self.works.get_mut(key) else { return };
        let mut is_complete = false;
        if let Work::Sample(work) = &mut active.work {
            if let Err(error) = work.sampler.changes_mut().remember(token) {
                return self.end(key, Err(error));
            }
            let followed = match active.followed.take() {
                Some(followed) => Some(followed),
                None => work.constrained.as_mut().map(|it| it.consume(token)),
            };
            match followed.transpose() {
                Ok(progress) => is_complete = progress == Some(Progress::Complete),
                Err(error) => return self.end(key, Err(error)),
            }
        }
        if let Err(error) = self.scheduler.chosen(key, token) {
            return self.end(key, Err(error));
        }
        let Some(sequence) = self.scheduler.sequence(key) else { return };
        let (len, num_cached, num_preemptions) =
            (sequence.token_ids().len(), sequence.num_cached(), sequence.num_preemptions());
        let Some(active) = self.works.get_mut(key) else { return };
        let Work::Sample(work) = &active.work else { return };
        let is_first = active.progress.first_token.is_none();
        if is_first || num_preemptions != active.progress.num_preemptions {
            active.progress.first_token.get_or_insert_with(Instant::now);
            active.progress.num_cached_tokens = num_cached;
            active.progress.num_preemptions = num_preemptions;
            work.inbox.set_progress(work.sample as usize, active.progress);
        }
        let is_stop = work.stop_token_ids.contains(&token);
        let end = if is_stop {
            Some(FinishReason::StopToken)
        } else if is_complete {
            Some(FinishReason::Complete)
        } else {
            (len >= work.max_tokens).then_some(work.reason_at_max)
        };
        let (inbox, sample) = (work.inbox.clone(), work.sample);
        if let Err(error) = inbox.push(Message::Token { sample, token, is_stop, log_probs }) {
            return self.end(key, Err(error));
        }
        if let Some(reason) = end {
            self.end(key, Ok(reason));
        }
    }
}

/// The interval at which the thread checks whether hosts that it waits for have given up.
const LOOK_AT_HOSTS_EVERY: Duration = Duration::from_millis(20);

fn no_row(len: usize) -> Error {
    Error::out_of_memory("logits for a callback", len * size_of::<f32>())
}

pub(super) fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, "the request was cancelled")
}
