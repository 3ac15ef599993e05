//! The scheduler and its blocks under random arrivals, lengths, cancels and priorities, over small pools and
//! with steps under way while the next is planned; the model is a toy that checks what it is given.
//!
//! The toy remembers, for every place of the KV cache, which token of which past was computed into
//! it. Before a token is computed it looks whether the places of all tokens before it, as the block
//! table has them, hold exactly those: so no block has two owners with different contents, nothing
//! is shared that is not the same, and nothing is read before it is computed or after it was taken.
//! The next token is a function of all tokens before it, so that every sequence can be checked
//! against a run of its own.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use proptest::prelude::*;
use xserv::engine::block_pool::BlockPool;
use xserv::engine::scheduler::{Entry, Limits, NewSequence, Scheduler, SequenceKey};
use xserv::engine::SwapCosts;
use xserv::model::CopyDirection;

const BLOCK: usize = 32;

/// A request, and when it comes and goes.
#[derive(Clone, Debug)]
struct Request {
    /// Turns to wait after the request before.
    delay: usize,
    /// Which of a few common beginnings, and how much of it.
    family: u32,
    common: usize,
    own: usize,
    num_new: usize,
    priority: i32,
    isolation: u64,
    /// Cancelled this many turns after it came.
    cancel: Option<usize>,
    alone: bool,
}

fn request(max_tokens: usize) -> impl Strategy<Value = Request> {
    let third = max_tokens / 3;
    (
        (0..4usize, 0..3u32, 0..third, 1..third, 1..third),
        (prop::sample::select(vec![0, 0, 0, 1, -1]), prop::sample::select(vec![0, 0, 0, 7])),
        prop::option::weighted(0.2, 0..40usize),
        prop::bool::weighted(0.1),
    )
        .prop_map(
            |((delay, family, common, own, num_new), (priority, isolation), cancel, alone)| {
                Request { delay, family, common, own, num_new, priority, isolation, cancel, alone }
            },
        )
}

fn prompt(request: &Request, index: usize) -> Vec<u32> {
    let common = (0..request.common).map(|i| request.family * 1000 + i as u32);
    common.chain((0..request.own).map(|i| 1_000_000 * (1 + index as u32) + i as u32)).collect()
}

/// Returns the past of a token: what a place of the cache depends on.
fn past(tokens: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    tokens.hash(&mut hasher);
    hasher.finish()
}

fn next_token(tokens: &[u32]) -> u32 {
    (past(tokens) % 1000) as u32
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    num_blocks: u32,
    limits: Limits,
    depth: usize,
    caching: bool,
    runs_ahead: bool,
    /// Blocks that may be kept on the host.
    max_swapped: usize,
    /// The cost of a step of this many tokens, where copying a block costs 10.
    compute_cost: u64,
}

fn setting() -> impl Strategy<Value = Setting> {
    let swap = (prop::sample::select(vec![0, 1, 5, 40]), prop::sample::select(vec![0, 1, 100]));
    let depth = (1..=2usize, any::<bool>());
    (3..14u32, 1..6usize, 1..100usize, depth, any::<bool>(), swap).prop_map(
        |(num_blocks, max_sequences, max_prefill_tokens, (depth, runs_ahead), caching, swap)| {
            Setting {
                num_blocks,
                limits: Limits { max_sequences, max_prefill_tokens },
                depth,
                caching,
                // With one step at a time there is nothing to run ahead of.
                runs_ahead: runs_ahead && depth == 2,
                max_swapped: swap.0,
                compute_cost: swap.1,
            }
        },
    )
}

fn scenario() -> impl Strategy<Value = (Setting, Vec<Request>)> {
    setting().prop_flat_map(|setting| {
        let max_tokens = setting.num_blocks as usize * BLOCK;
        (Just(setting), prop::collection::vec(request(max_tokens), 1..24))
    })
}

struct Live {
    index: usize,
    until: Option<usize>,
}

struct Toy {
    setting: Setting,
    scheduler: Scheduler,
    /// By place of the cache: the past of the token in it.
    cache: HashMap<usize, u64>,
    /// The same of the places on the host.
    swapped: HashMap<usize, u64>,
    live: HashMap<SequenceKey, Live>,
    /// Steps under way: what was planned, and which token each row gives.
    flights: VecDeque<(Vec<Entry>, Vec<u32>)>,
    /// The tokens that sequences know or will know; the scheduler's own view lags behind.
    tokens: HashMap<SequenceKey, Vec<u32>>,
}

impl Toy {
    /// Computes an entry: checks its past and writes its places.
    fn compute(&mut self, entry: &Entry) -> Option<u32> {
        let sequence = self.scheduler.sequence(entry.key).expect("planned sequences are there");
        let tokens = self.tokens.get_mut(&entry.key).unwrap();
        match entry.source {
            Some(row) => {
                let (_, before) = self.flights.back().expect("a source without a step before");
                assert_eq!(tokens[entry.start], before[row as usize], "the wrong source");
                assert_eq!((entry.start, entry.num_new), (sequence.token_ids().len(), 1));
            }
            None => {
                let end = entry.start + entry.num_new;
                assert_eq!(
                    sequence.token_ids().get(entry.start..end),
                    tokens.get(entry.start..end)
                );
            }
        }
        let place = |position: usize| {
            sequence.blocks()[position / BLOCK] as usize * BLOCK + position % BLOCK
        };
        for position in 0..entry.start {
            let found = self.cache.get(&place(position));
            assert_eq!(
                found,
                Some(&past(&tokens[..=position])),
                "position {position} of {entry:?}"
            );
        }
        for position in entry.start..entry.start + entry.num_new {
            let block = sequence.blocks()[position / BLOCK];
            self.cache
                .insert(block as usize * BLOCK + position % BLOCK, past(&tokens[..=position]));
        }
        entry.row?;
        let end = entry.start + entry.num_new;
        assert_eq!(end, tokens.len(), "logits in the middle of {entry:?}");
        let token = next_token(tokens);
        tokens.push(token);
        Some(token)
    }

    /// Does what the plan wants done before it.
    fn copy(&mut self) {
        for copy in self.scheduler.copies() {
            let (cache, swapped) = (&mut self.cache, &mut self.swapped);
            let (from, to, source, target) = match copy.direction {
                CopyDirection::ToHost => (cache, swapped, copy.block, copy.place),
                CopyDirection::FromHost => (swapped, cache, copy.place, copy.block),
            };
            for slot in 0..BLOCK {
                match from.get(&(source as usize * BLOCK + slot)) {
                    Some(past) => to.insert(target as usize * BLOCK + slot, *past),
                    None => to.remove(&(target as usize * BLOCK + slot)),
                };
            }
        }
        self.scheduler.clear_copies();
        // Three places at a time.
        let wanted = self.scheduler.swap_places_wanted();
        if wanted > 0 {
            self.scheduler.add_swap_places(wanted.min(3));
        }
    }

    fn step(&mut self, entries: &[Entry]) {
        assert!(entries.len() <= self.setting.limits.max_sequences);
        let singles = entries.iter().take_while(|entry| entry.num_new == 1).count();
        assert!(entries[singles..].iter().all(|entry| entry.num_new > 1), "{entries:?}");
        let long: usize = entries[singles..].iter().map(|entry| entry.num_new).sum();
        assert!(long <= self.setting.limits.max_prefill_tokens, "{entries:?}");
        let rows: Vec<u32> = entries.iter().filter_map(|entry| self.compute(entry)).collect();
        let numbers: Vec<u32> = entries.iter().filter_map(|entry| entry.row).collect();
        assert_eq!(numbers, (0..rows.len() as u32).collect::<Vec<_>>());
        self.scheduler.begun(entries);
        self.flights.push_back((entries.to_vec(), rows));
    }
}

fn run(setting: Setting, requests: &[Request]) {
    let pool = BlockPool::new(setting.num_blocks, setting.caching).unwrap();
    let mut toy = Toy {
        setting,
        scheduler: Scheduler::new(pool, setting.limits).unwrap(),
        cache: HashMap::new(),
        swapped: HashMap::new(),
        live: HashMap::new(),
        flights: VecDeque::new(),
        tokens: HashMap::new(),
    };
    toy.scheduler.set_max_swapped(setting.max_swapped);
    if setting.compute_cost > 0 {
        let costs = toy.scheduler.swap_costs();
        costs.copied(1, Duration::from_millis(10));
        costs.computed(100, 0, Duration::from_millis(100 * setting.compute_cost));
    }
    let mut arrivals: VecDeque<(usize, usize)> = VecDeque::new();
    let mut at = 0;
    for (index, request) in requests.iter().enumerate() {
        at += request.delay;
        arrivals.push_back((at, index));
    }
    let mut finished = vec![false; requests.len()];
    // Of those that are computed alone.
    let is_scored = |index: usize| !index.is_multiple_of(3);
    let mut entries = Vec::new();
    let mut turn = 0;
    while !arrivals.is_empty() || !toy.scheduler.is_empty() || !toy.flights.is_empty() {
        // Far more than all tokens one at a time, recomputed for each other request.
        assert!(turn < 200_000, "no end is in sight");
        while arrivals.front().is_some_and(|(at, _)| *at <= turn) {
            let (_, index) = arrivals.pop_front().unwrap();
            let request = &requests[index];
            let token_ids = prompt(request, index);
            let key = toy
                .scheduler
                .add(NewSequence {
                    max_tokens: token_ids.len() + request.num_new,
                    token_ids: token_ids.clone(),
                    priority: request.priority,
                    isolation: request.isolation,
                    max_cached_tokens: if request.alone { 0 } else { usize::MAX },
                    runs_ahead: setting.runs_ahead && !request.alone,
                    by_model: setting.runs_ahead && !request.alone,
                    alone: request.alone,
                    scored: request.alone && is_scored(index),
                })
                .unwrap();
            toy.tokens.insert(key, token_ids);
            let until = request.cancel.map(|turns| turn + turns);
            toy.live.insert(key, Live { index, until });
        }
        let cancelled: Vec<SequenceKey> =
            toy.live.iter().filter(|(_, live)| live.until == Some(turn)).map(|(k, _)| *k).collect();
        for key in cancelled {
            toy.scheduler.remove(key);
            finished[toy.live.remove(&key).unwrap().index] = true;
        }
        toy.scheduler.audit().unwrap();

        let mut begun = false;
        if toy.flights.len() < setting.depth {
            toy.scheduler.plan(&mut entries).unwrap();
            toy.scheduler.audit().unwrap();
            toy.copy();
            begun = !entries.is_empty();
            if begun {
                toy.step(&entries);
            }
        }
        if toy.flights.len() >= setting.depth || !begun {
            if let Some((entries, rows)) = toy.flights.pop_front() {
                for entry in &entries {
                    toy.scheduler.finished(entry);
                    let Some(row) = entry.row else { continue };
                    if !toy.scheduler.chosen(entry.key, rows[row as usize]).unwrap() {
                        continue;
                    }
                    let live = &toy.live[&entry.key];
                    let len = toy.scheduler.sequence(entry.key).unwrap().token_ids().len();
                    let request = &requests[live.index];
                    if len == request.common + request.own + request.num_new {
                        check(&toy, entry.key, &prompt(request, live.index));
                        finished[live.index] = true;
                        toy.scheduler.remove(entry.key);
                        toy.live.remove(&entry.key);
                    }
                }
            } else if let Some(entry) = toy.scheduler.plan_alone() {
                assert_eq!(entry.row, None);
                let mut planned = vec![entry];
                if is_scored(toy.live[&entry.key].index) {
                    toy.scheduler.plan_scored(&mut planned);
                    assert!(planned.contains(&entry), "{entry:?} is not in {planned:?}");
                    let num_tokens: usize = planned.iter().map(|entry| entry.num_new).sum();
                    assert!(num_tokens <= setting.limits.max_prefill_tokens, "{planned:?}");
                    let is_long: Vec<bool> = planned.iter().map(|it| it.num_new > 1).collect();
                    assert!(is_long.is_sorted(), "{planned:?}");
                }
                for entry in &planned {
                    toy.compute(entry);
                }
                toy.scheduler.begun(&planned);
                for entry in &planned {
                    toy.scheduler.finished(entry);
                    if entry.start + entry.num_new == toy.tokens[&entry.key].len() {
                        finished[toy.live.remove(&entry.key).unwrap().index] = true;
                        toy.scheduler.remove(entry.key);
                    }
                }
            } else {
                assert!(toy.scheduler.is_empty(), "nobody gets on");
            }
        }
        toy.scheduler.audit().unwrap();
        turn += 1;
    }
    assert!(finished.iter().all(|finished| *finished), "lost: {finished:?}");
    let counts = toy.scheduler.counts();
    assert_eq!(counts.swap.used, 0);
    assert!(counts.swap.places <= setting.max_swapped);
    let blocks = counts.blocks;
    assert_eq!((blocks.used, blocks.idle + blocks.free), (0, setting.num_blocks as usize));
    if !setting.caching {
        assert_eq!(blocks.idle, 0);
    }
}

/// The tokens are those of a run alone.
fn check(toy: &Toy, key: SequenceKey, prompt: &[u32]) {
    let sequence = toy.scheduler.sequence(key).unwrap();
    let mut alone = prompt.to_vec();
    while alone.len() < sequence.token_ids().len() {
        alone.push(next_token(&alone));
    }
    assert_eq!(sequence.token_ids(), alone);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn everyone_gets_the_tokens_of_a_run_alone_and_all_blocks_come_back(
        (setting, requests) in scenario()
    ) {
        run(setting, &requests);
    }
}

fn scheduler(num_blocks: u32, max_sequences: usize, max_prefill_tokens: usize) -> Scheduler {
    let limits = Limits { max_sequences, max_prefill_tokens };
    Scheduler::new(BlockPool::new(num_blocks, true).unwrap(), limits).unwrap()
}

fn sequence(token_ids: Vec<u32>, num_new: usize) -> NewSequence {
    NewSequence {
        max_tokens: token_ids.len() + num_new,
        token_ids,
        max_cached_tokens: usize::MAX,
        ..NewSequence::default()
    }
}

fn step(scheduler: &mut Scheduler) -> Vec<Entry> {
    let mut entries = Vec::new();
    scheduler.plan(&mut entries).unwrap();
    scheduler.begun(&entries);
    for entry in &entries {
        scheduler.finished(entry);
        if entry.row.is_some() {
            scheduler.chosen(entry.key, 5).unwrap();
        }
    }
    entries
}

#[test]
fn what_could_never_fit_is_refused_with_the_numbers() {
    let mut scheduler = scheduler(4, 4, 64);
    let error = scheduler.add(sequence(vec![1; 100], 30)).unwrap_err();
    assert!(error.message().contains("129") && error.message().contains("4 blocks"), "{error}");
    // The last token is not computed.
    scheduler.add(sequence(vec![1; 100], 29)).unwrap();
    assert!(scheduler.add(sequence(Vec::new(), 1)).is_err());
}

#[test]
fn samples_of_one_prompt_compute_it_once() {
    let mut scheduler = scheduler(64, 8, 256);
    let prompt: Vec<u32> = (0..100).collect();
    let keys: Vec<_> =
        (0..5).map(|_| scheduler.add(sequence(prompt.clone(), 9)).unwrap()).collect();
    let first = step(&mut scheduler);
    assert_eq!(first.iter().map(|e| (e.key, e.num_new)).collect::<Vec<_>>(), [(keys[0], 100)]);
    // The others take three whole blocks and compute the rest.
    let second = step(&mut scheduler);
    let new: Vec<usize> = second.iter().map(|entry| entry.num_new).collect();
    assert_eq!(new, [1, 4, 4, 4, 4]);
    assert_eq!(scheduler.sequence(keys[3]).unwrap().num_cached(), 96);
    assert_eq!(scheduler.counts().blocks.used, 3 + 5);
}

#[test]
fn the_next_turn_of_a_conversation_costs_its_new_tokens() {
    let mut scheduler = scheduler(64, 8, 256);
    let key = scheduler.add(sequence((0..60).collect(), 11)).unwrap();
    while scheduler.sequence(key).unwrap().token_ids().len() < 71 {
        step(&mut scheduler);
    }
    let mut tokens = scheduler.sequence(key).unwrap().token_ids().to_vec();
    scheduler.remove(key);
    tokens.extend([7; 20]);
    let other = NewSequence { isolation: 1, ..sequence(tokens.clone(), 1) };
    scheduler.add(sequence(tokens, 1)).unwrap();
    scheduler.add(other).unwrap();
    let new: Vec<usize> = step(&mut scheduler).iter().map(|entry| entry.num_new).collect();
    // 64 of the 70 computed tokens lie in whole blocks; who must not share computes all.
    assert_eq!(new, [91 - 64, 91]);
}

/// Two requests that must know their tokens, of which the second comes while the first is computed,
/// would take turns for ever.
#[test]
fn who_must_know_a_token_is_waited_for_unless_they_are_few() {
    let mut scheduler = scheduler(64, 32, 64);
    let begin = |scheduler: &mut Scheduler| {
        let mut entries = Vec::new();
        scheduler.plan(&mut entries).unwrap();
        scheduler.begun(&entries);
        entries
    };
    let finish = |scheduler: &mut Scheduler, entries: &[Entry]| {
        for entry in entries {
            scheduler.finished(entry);
            scheduler.chosen(entry.key, 5).unwrap();
        }
    };
    assert!(!scheduler.wants_finished_step());
    scheduler.add(sequence(vec![1, 2, 3], 4)).unwrap();
    let first = begin(&mut scheduler);
    scheduler.add(sequence(vec![4, 5], 4)).unwrap();
    assert!(scheduler.wants_finished_step());
    finish(&mut scheduler, &first);
    assert!(!scheduler.wants_finished_step());
    let both = begin(&mut scheduler);
    assert_eq!(both.len(), 2);
    finish(&mut scheduler, &both);

    let add_ahead = |scheduler: &mut Scheduler, count: u32| {
        for id in 0..count {
            let spec = sequence(vec![7, id, count], 40);
            scheduler.add(NewSequence { runs_ahead: true, by_model: true, ..spec }).unwrap();
        }
    };
    add_ahead(&mut scheduler, 8);
    let all = begin(&mut scheduler);
    assert_eq!(all.len(), 10);
    assert!(scheduler.wants_finished_step(), "two, and eight that go on without");
    add_ahead(&mut scheduler, 1);
    finish(&mut scheduler, &all);
    let last_of_first = begin(&mut scheduler);
    assert_eq!(last_of_first.len(), 11);
    assert!(!scheduler.wants_finished_step(), "one that goes on, and the first does not");
}

#[test]
fn a_prompt_that_fits_into_a_step_is_not_cut() {
    let mut scheduler = scheduler(64, 8, 64);
    for (first, len) in [(0, 40), (100, 50), (200, 100)] {
        scheduler.add(sequence((first..first + len).collect(), 3)).unwrap();
    }
    let news = |entries: Vec<Entry>| entries.iter().map(|e| e.num_new).collect::<Vec<_>>();
    assert_eq!(news(step(&mut scheduler)), [40]);
    assert_eq!(news(step(&mut scheduler)), [1, 50, 14]);
    assert_eq!(news(step(&mut scheduler)), [1, 1, 64]);
}

#[test]
fn the_urgent_go_first_and_may_take_the_place_of_others() {
    let mut scheduler = scheduler(8, 2, 64);
    let keys: Vec<_> = (0..3u32)
        .map(|i| scheduler.add(sequence((i * 100..i * 100 + 20).collect(), 20)).unwrap())
        .collect();
    let running = |entries: Vec<Entry>| entries.iter().map(|e| e.key).collect::<Vec<_>>();
    assert_eq!(running(step(&mut scheduler)), [keys[0], keys[1]]);
    let urgent = NewSequence { priority: 1, ..sequence((900..920).collect(), 20) };
    let urgent = scheduler.add(urgent).unwrap();
    let second = running(step(&mut scheduler));
    assert!(second.contains(&urgent) && second.contains(&keys[0]), "{second:?}");
    assert_eq!(scheduler.counts().preemptions, 1);
    scheduler.remove(urgent);
    assert_eq!(running(step(&mut scheduler)), [keys[0], keys[1]]);
}

/// Two sequences of which the second is preempted while the first grows, with 16 blocks on the host for it.
fn preempted(costs: impl Fn(&mut SwapCosts)) -> (Scheduler, SequenceKey) {
    let mut scheduler = scheduler(6, 2, 256);
    scheduler.set_max_swapped(16);
    scheduler.add_swap_places(16);
    costs(scheduler.swap_costs());
    scheduler.add(sequence((0..60).collect(), 100)).unwrap();
    let second = scheduler.add(sequence((100..190).collect(), 40)).unwrap();
    while scheduler.counts().preempted == 0 {
        step(&mut scheduler);
    }
    (scheduler, second)
}

#[test]
fn a_preempted_sequence_keeps_its_blocks_on_the_host_and_goes_on_where_it_was() {
    let (mut scheduler, key) = preempted(|_| {});
    let counts = scheduler.counts();
    let len = scheduler.sequence(key).unwrap().token_ids().len();
    assert_eq!(
        (counts.swap.used, counts.swap.blocks_out),
        ((len - 1).div_ceil(32), (len - 1).div_ceil(32) as u64)
    );
    let saved: Vec<u32> = scheduler.copies().iter().map(|copy| copy.place).collect();
    assert!(scheduler.copies().iter().all(|copy| copy.direction == CopyDirection::ToHost));
    assert!(scheduler.copied_keys().iter().all(|other| *other == key));
    scheduler.clear_copies();
    // All but the token that was chosen last is there.
    let resumed = loop {
        let entries = step(&mut scheduler);
        match entries.iter().find(|entry| entry.key == key) {
            Some(entry) => break *entry,
            None if scheduler.counts().running == 1 => end_first(&mut scheduler, key, &entries),
            None => {}
        }
    };
    assert_eq!((resumed.start, resumed.num_new), (len - 1, 1));
    let restored = scheduler.copies();
    assert!(restored.iter().all(|copy| copy.direction == CopyDirection::FromHost));
    // Blocks that still lay in the cache were not copied; the rest came in the order of positions.
    let places: Vec<u32> = restored.iter().map(|copy| copy.place).collect();
    assert!(!places.is_empty() && saved.ends_with(&places), "{saved:?} {places:?}");
    assert_eq!(scheduler.counts().swap.used, 0);
    scheduler.audit().unwrap();
}

/// Ends the first sequence when it is at its end.
fn end_first(scheduler: &mut Scheduler, second: SequenceKey, entries: &[Entry]) {
    let first = entries.iter().map(|entry| entry.key).find(|key| *key != second);
    let Some(first) = first else { return };
    if scheduler.sequence(first).is_some_and(|sequence| sequence.token_ids().len() == 160) {
        scheduler.remove(first);
    }
}

#[test]
fn what_is_computed_faster_than_it_is_copied_is_computed_anew() {
    let (scheduler, _) = preempted(|costs| {
        costs.copied(1, Duration::from_millis(10));
        costs.computed(100, 0, Duration::from_millis(10));
    });
    assert_eq!((scheduler.copies(), scheduler.counts().swap.used), (&[][..], 0));
}

#[test]
fn copies_that_fail_are_forgotten_with_those_they_were_for() {
    let (mut scheduler, key) = preempted(|_| {});
    assert!(!scheduler.copies().is_empty());
    scheduler.forget_copies(key);
    scheduler.remove(key);
    assert!(scheduler.copies().is_empty() && scheduler.copied_keys().is_empty());
    assert_eq!(scheduler.counts().swap.used, 0);
    scheduler.audit().unwrap();
}
