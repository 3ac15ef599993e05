//! Steps that fail in the middle of a run, or find no memory: who is told, who goes on, and that nothing is lost.

use std::sync::Arc;

use proptest::prelude::*;
use xserv::engine::harness::{Harness, HarnessOptions, HarnessRequest};
use xserv::engine::scheduler::Limits;
use xserv::engine::{CancelToken, Event, FinishReason, Ticket};
use xserv::error::ErrorKind;

use crate::toy_model::{expected, injected, outcome, Attempt, Fault, Toy, PATIENCE, VOCAB};

const OPTIONS: HarnessOptions = HarnessOptions {
    num_blocks: 64,
    limits: Limits { max_sequences: 8, max_prefill_tokens: 64 },
    prefix_cache: true,
    max_swapped: 0,
};

fn prompt(seed: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * i + 7 * i + 13 * seed) % VOCAB) as u32).collect()
}

fn submit(engine: &Harness, prompt: &[u32], max_new: usize, by_model: bool) -> Ticket {
    let token_ids = prompt.to_vec();
    engine
        .submit(HarnessRequest { token_ids, max_new, by_model, ..HarnessRequest::default() })
        .unwrap()
}

/// Everything came back, and the engine serves as if nothing had been.
fn check_healthy(engine: &Harness, by_model: bool) {
    let stats = engine.stats();
    assert_eq!(stats.scheduler.blocks.used, 0, "{stats:?}");
    assert_eq!((stats.scheduler.running, stats.scheduler.waiting), (0, 0), "{stats:?}");
    assert_eq!(stats.submitted, stats.ended);
    let prompt = prompt(99, 70);
    let (tokens, end) = outcome(&mut submit(engine, &prompt, 20, by_model));
    assert_eq!((tokens, end.unwrap()), (expected(&prompt, 20), FinishReason::MaxTokens));
    assert_eq!(engine.stats().scheduler.blocks.used, 0);
}

/// In every combination of steps under way and who chooses tokens.
fn each_kind(check: impl Fn(usize, bool)) {
    for (depth, by_model) in [(1, false), (2, false), (2, true)] {
        check(depth, by_model);
    }
}

#[test]
fn a_step_that_fails_ends_those_in_it_and_nobody_else() {
    for at in [1, 9] {
        for fault in [Fault::Begin(ErrorKind::Internal), Fault::Finish(ErrorKind::DeviceLost)] {
            each_kind(|depth, by_model| {
                let told = fault.clone();
                let toy =
                    Toy::new(depth, move |attempt| (attempt.number == at).then(|| told.clone()));
                let options = HarnessOptions {
                    limits: Limits { max_sequences: 3, ..OPTIONS.limits },
                    ..OPTIONS
                };
                let engine = Harness::new(Arc::new(toy), &options).unwrap();
                let prompts: Vec<_> = (0..9).map(|i| prompt(i, 20 + i)).collect();
                let tickets: Vec<_> =
                    prompts.iter().map(|p| submit(&engine, p, 40, by_model)).collect();
                let mut failed = 0;
                for (prompt, mut ticket) in prompts.iter().zip(tickets) {
                    let (tokens, end) = outcome(&mut ticket);
                    let right = expected(prompt, 40);
                    assert_eq!(tokens, right[..tokens.len()]);
                    match end {
                        Ok(reason) => {
                            assert_eq!((tokens.len(), reason), (40, FinishReason::MaxTokens))
                        }
                        Err(error) => {
                            failed += 1;
                            let (Fault::Begin(kind) | Fault::Finish(kind)) = fault else {
                                unreachable!()
                            };
                            assert_eq!(error.kind(), kind);
                            assert_eq!(error.message(), injected(kind).message());
                        }
                    }
                }
                assert!((1..=3).contains(&failed), "{failed} failed in {fault:?} at {at}");
                check_healthy(&engine, by_model);
            });
        }
    }
}

#[test]
fn steps_shrink_until_they_find_memory() {
    type Make = fn(ErrorKind) -> Fault;
    for make in [Fault::Begin as Make, Fault::Finish as Make] {
        for most in [1, 2, 5, 17] {
            each_kind(|depth, by_model| {
                let toy = Arc::new(Toy::new(depth, move |attempt: &Attempt| {
                    (attempt.token_ids.len() > most).then(|| make(ErrorKind::OutOfMemory))
                }));
                let engine = Harness::new(toy.clone(), &OPTIONS).unwrap();
                let prompts: Vec<_> = (0..12).map(|i| prompt(i, 5 + 20 * i)).collect();
                let tickets: Vec<_> =
                    prompts.iter().map(|p| submit(&engine, p, 20, by_model)).collect();
                for (prompt, mut ticket) in prompts.iter().zip(tickets) {
                    let (tokens, end) = outcome(&mut ticket);
                    assert_eq!(end.unwrap(), FinishReason::MaxTokens);
                    assert_eq!(tokens, expected(prompt, 20));
                }
                let largest = toy.largest();
                assert!(largest <= most && 2 * largest >= most, "{largest} of {most}");
                // With memory enough they grow again.
                toy.heal();
                let long = prompt(50, 1500);
                let (tokens, _) = outcome(&mut submit(&engine, &long, 90, by_model));
                assert_eq!(tokens, expected(&long, 90));
                let next = prompt(51, 300);
                outcome(&mut submit(&engine, &next, 90, by_model)).1.unwrap();
                assert!(toy.largest() > most);
                check_healthy(&engine, by_model);
            });
        }
    }
}

#[test]
fn only_who_fails_alone_is_told_of_too_little_memory() {
    const POISON: u32 = VOCAB as u32 + 1;
    type Make = fn(ErrorKind) -> Fault;
    for make in [Fault::Begin as Make, Fault::Finish as Make] {
        each_kind(|depth, by_model| {
            let toy = Toy::new(depth, move |attempt: &Attempt| {
                attempt.token_ids.contains(&POISON).then(|| make(ErrorKind::OutOfMemory))
            });
            let engine = Harness::new(Arc::new(toy), &OPTIONS).unwrap();
            let prompts: Vec<_> = (0..8).map(|i| prompt(i, 10 + 9 * i)).collect();
            let mut tickets = Vec::new();
            for (i, prompt) in prompts.iter().enumerate() {
                let mut prompt = prompt.clone();
                if i == 3 {
                    prompt[17] = POISON;
                }
                tickets.push(submit(&engine, &prompt, 30, by_model));
            }
            for (i, mut ticket) in tickets.into_iter().enumerate() {
                match outcome(&mut ticket) {
                    (tokens, Ok(FinishReason::MaxTokens)) if i != 3 => {
                        assert_eq!(tokens, expected(&prompts[i], 30))
                    }
                    (tokens, Err(error)) if i == 3 => {
                        assert_eq!((tokens.len(), error.kind()), (0, ErrorKind::OutOfMemory));
                    }
                    other => panic!("request {i}: {other:?}"),
                }
            }
            check_healthy(&engine, by_model);
        });
    }
}

#[test]
fn without_any_memory_everyone_is_told_and_the_engine_lives() {
    each_kind(|depth, by_model| {
        let toy =
            Arc::new(Toy::new(depth, |_: &Attempt| Some(Fault::Begin(ErrorKind::OutOfMemory))));
        let engine = Harness::new(toy.clone(), &OPTIONS).unwrap();
        let tickets: Vec<_> =
            (0..20).map(|i| submit(&engine, &prompt(i, 50), 10, by_model)).collect();
        for mut ticket in tickets {
            let (tokens, end) = outcome(&mut ticket);
            assert_eq!((tokens.len(), end.unwrap_err().kind()), (0, ErrorKind::OutOfMemory));
        }
        // A few halvings a request.
        assert!(toy.num_tried() < 20 * 12, "{}", toy.num_tried());
        toy.heal();
        check_healthy(&engine, by_model);
    });
}

#[test]
fn after_a_fault_of_the_library_everyone_is_told_and_nothing_more_is_taken() {
    each_kind(|depth, by_model| {
        let toy =
            Toy::new(depth, |attempt: &Attempt| (attempt.number == 5).then_some(Fault::Panic));
        let engine = Harness::new(Arc::new(toy), &OPTIONS).unwrap();
        let tickets: Vec<_> = (0..20)
            .map(|i| {
                engine.submit(HarnessRequest {
                    token_ids: prompt(i, 30),
                    max_new: 1000,
                    by_model,
                    ..HarnessRequest::default()
                })
            })
            .collect();
        for (i, ticket) in tickets.into_iter().enumerate() {
            let error = match ticket {
                Ok(mut ticket) => outcome(&mut ticket).1.unwrap_err(),
                // The fault was faster.
                Err(error) if i > 0 => error,
                Err(error) => panic!("{error}"),
            };
            assert_eq!(error.kind(), ErrorKind::Internal, "{error}");
            assert!(error.message().contains("told to panic"), "{error}");
        }
        let stats = engine.stats();
        assert_eq!((stats.scheduler.blocks.used, stats.submitted), (0, stats.ended));
        let refused = engine.submit(HarnessRequest {
            token_ids: vec![1],
            max_new: 1,
            ..HarnessRequest::default()
        });
        assert!(refused.is_err_and(|error| error.message().contains("told to panic")));
    });
}

#[derive(Clone, Debug)]
struct RandomRequest {
    family: usize,
    len: usize,
    num_new: usize,
    priority: i32,
    cancelled_after: Option<usize>,
}

#[derive(Clone, Debug)]
struct Scenario {
    options: HarnessOptions,
    depth: usize,
    by_model: bool,
    requests: Vec<RandomRequest>,
    /// By the number of the attempt, over and over.
    faults: Vec<Option<Fault>>,
    /// Larger steps find no memory.
    most_tokens: usize,
}

fn fault(only_memory: bool) -> impl Strategy<Value = Option<Fault>> {
    let kind = match only_memory {
        true => prop::sample::select(vec![ErrorKind::OutOfMemory]),
        false => prop::sample::select(vec![
            ErrorKind::OutOfMemory,
            ErrorKind::Internal,
            ErrorKind::DeviceLost,
        ]),
    };
    prop::option::weighted(
        0.15,
        (kind, any::<bool>()).prop_map(|(kind, begins)| match begins {
            true => Fault::Finish(kind),
            false => Fault::Begin(kind),
        }),
    )
}

fn scenario() -> impl Strategy<Value = Scenario> {
    let swap = prop::sample::select(vec![0, 6, 100]);
    let options = (4..20u32, 1..6usize, 1..100usize, any::<bool>(), swap).prop_map(
        |(num_blocks, max_sequences, max_prefill_tokens, prefix_cache, max_swapped)| {
            HarnessOptions {
                num_blocks,
                limits: Limits { max_sequences, max_prefill_tokens },
                prefix_cache,
                max_swapped,
            }
        },
    );
    let kind = prop::sample::select(vec![(1, false), (2, false), (2, true)]);
    (options, kind, any::<bool>()).prop_flat_map(|(options, (depth, by_model), only_memory)| {
        let longest = options.num_blocks as usize * 32 / 2;
        let request = (
            (0..3usize, 1..longest, 1..longest.min(60)),
            prop::sample::select(vec![0, 0, 0, 1, -1]),
            prop::option::weighted(0.2, 0..30usize),
        );
        let request = request.prop_map(|((family, len, num_new), priority, cancelled_after)| {
            RandomRequest { family, len, num_new, priority, cancelled_after }
        });
        (
            prop::collection::vec(request, 1..16),
            prop::collection::vec(fault(only_memory), 1..30),
            prop::sample::select(vec![1, 3, 10, 40, 1000]),
        )
            .prop_map(move |(requests, faults, most_tokens)| Scenario {
                options,
                depth,
                by_model,
                requests,
                faults,
                most_tokens,
            })
    })
}

/// Whether a step of one token always found memory at least at the next try, and nothing else failed.
fn is_survivable(scenario: &Scenario) -> bool {
    scenario.faults.iter().all(Option::is_none)
}

fn run(scenario: &Scenario) {
    let Scenario { faults, most_tokens, .. } = scenario.clone();
    let toy = Arc::new(Toy::new(scenario.depth, move |attempt: &Attempt| {
        if attempt.token_ids.len() > most_tokens {
            return Some(Fault::Begin(ErrorKind::OutOfMemory));
        }
        faults[attempt.number % faults.len()].clone()
    }));
    let engine = Harness::new(toy.clone(), &scenario.options).unwrap();
    let requests: Vec<_> = (scenario.requests.iter())
        .map(|request| {
            let token_ids = prompt(request.family, request.len);
            let cancel = Arc::new(CancelToken::default());
            let ticket = engine.submit(HarnessRequest {
                token_ids: token_ids.clone(),
                max_new: request.num_new,
                priority: request.priority,
                by_model: scenario.by_model,
                cancel: Some(cancel.clone()),
                ..HarnessRequest::default()
            });
            (request, token_ids, cancel, ticket.unwrap())
        })
        .collect();
    for (request, token_ids, cancel, mut ticket) in requests {
        let mut tokens = Vec::new();
        let end = loop {
            if request.cancelled_after == Some(tokens.len()) {
                cancel.cancel();
            }
            match ticket.next(Some(PATIENCE)) {
                Ok(Some(Event::Token { token, .. })) => tokens.push(token),
                Ok(Some(Event::End { reason, .. })) => break Ok(reason),
                Ok(other) => panic!("{other:?} after {} tokens", tokens.len()),
                Err(error) => break Err(error),
            }
        };
        assert_eq!(tokens, expected(&token_ids, request.num_new)[..tokens.len()]);
        match end {
            Ok(FinishReason::MaxTokens) => assert_eq!(tokens.len(), request.num_new),
            Ok(FinishReason::Cancelled) => assert!(request.cancelled_after.is_some()),
            Ok(reason) => panic!("{reason:?}"),
            Err(error) => {
                assert!(!is_survivable(scenario), "{error}");
                assert_eq!(error.message(), injected(error.kind()).message());
            }
        }
    }
    toy.heal();
    // Who was cancelled hears of it before the scheduler does.
    let begin = std::time::Instant::now();
    while engine.stats().ended < engine.stats().submitted {
        assert!(begin.elapsed() < PATIENCE, "{:?}", engine.stats());
        std::thread::yield_now();
    }
    if scenario.options.num_blocks >= 3 {
        check_healthy(&engine, scenario.by_model);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_fails_tokens_are_right_and_blocks_come_back(scenario in scenario()) {
        run(&scenario);
    }
}

/// A KV cache for two or three of a dozen requests, and room on the host for most.
const SWAPPING: HarnessOptions = HarnessOptions {
    num_blocks: 10,
    limits: Limits { max_sequences: 8, max_prefill_tokens: 64 },
    prefix_cache: false,
    max_swapped: 40,
};

#[test]
fn preempted_requests_go_on_with_what_was_kept_on_the_host() {
    for prefix_cache in [false, true] {
        each_kind(|depth, by_model| {
            let toy = Arc::new(Toy::new(depth, |_| None));
            let options = HarnessOptions { prefix_cache, ..SWAPPING };
            let engine = Harness::new(toy, &options).unwrap();
            let prompts: Vec<_> = (0..12).map(|i| prompt(i, 40 + 7 * i)).collect();
            let tickets: Vec<_> =
                prompts.iter().map(|p| submit(&engine, p, 100, by_model)).collect();
            for (prompt, mut ticket) in prompts.iter().zip(tickets) {
                let (tokens, end) = outcome(&mut ticket);
                assert_eq!(
                    (tokens, end.unwrap()),
                    (expected(prompt, 100), FinishReason::MaxTokens)
                );
            }
            let swap = engine.stats().scheduler.swap;
            assert!(swap.blocks_out > 0 && swap.blocks_in > 0, "{swap:?}");
            assert_eq!(swap.used, 0);
            check_healthy(&engine, by_model);
        });
    }
}

#[test]
fn copies_that_fail_end_those_they_are_for_and_nobody_else() {
    each_kind(|depth, by_model| {
        let toy = Arc::new(Toy::new(depth, |_| None));
        toy.fail_copies(|number| number % 7 == 5);
        let engine = Harness::new(toy.clone(), &SWAPPING).unwrap();
        let prompts: Vec<_> = (0..12).map(|i| prompt(i, 40 + 7 * i)).collect();
        let tickets: Vec<_> = prompts.iter().map(|p| submit(&engine, p, 100, by_model)).collect();
        let mut failed = 0;
        for (prompt, mut ticket) in prompts.iter().zip(tickets) {
            let (tokens, end) = outcome(&mut ticket);
            let right = expected(prompt, 100);
            assert_eq!(tokens, right[..tokens.len()]);
            match end {
                Ok(reason) => assert_eq!((tokens.len(), reason), (100, FinishReason::MaxTokens)),
                Err(error) => {
                    assert_eq!(error.message(), injected(ErrorKind::DeviceLost).message());
                    failed += 1;
                }
            }
        }
        assert!((1..12).contains(&failed), "{failed} failed");
        assert_eq!(engine.stats().scheduler.swap.used, 0);
        toy.fail_copies(|_| false);
        check_healthy(&engine, by_model);
    });
}

#[test]
fn a_fault_while_requests_are_taken_in_is_told_to_everyone_too() {
    each_kind(|depth, by_model| {
        let engine = Harness::new(Arc::new(Toy::new(depth, |_| None)), &OPTIONS).unwrap();
        let mut running = submit(&engine, &prompt(1, 30), 900, by_model);
        assert!(matches!(running.next(Some(PATIENCE)), Ok(Some(Event::Token { .. }))));
        // It is too long for the cache, of which it is told as it is taken in.
        let mut fatal = engine
            .submit(HarnessRequest {
                token_ids: prompt(2, 30),
                max_new: 100_000,
                by_model,
                waker: Some(Box::new(|| panic!("the waker was told to panic"))),
                ..HarnessRequest::default()
            })
            .unwrap();
        assert_eq!(outcome(&mut fatal).1.unwrap_err().kind(), ErrorKind::InvalidArgument);
        match outcome(&mut running).1 {
            Err(error) => assert!(error.message().contains("told to panic"), "{error}"),
            // It was faster.
            Ok(reason) => assert_eq!(reason, FinishReason::MaxTokens),
        }
        let stats = engine.stats();
        assert_eq!((stats.scheduler.blocks.used, stats.submitted), (0, stats.ended));
    });
}
