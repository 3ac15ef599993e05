//! The scheduler's thread from its start to its end.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

use xserv::engine::harness::{Harness, HarnessOptions, HarnessRequest};
use xserv::engine::scheduler::Limits;
use xserv::engine::{Event, FinishReason};

use crate::toy_model::Toy;

const PATIENCE: Duration = Duration::from_secs(20);

/// The time that a step of the slow model takes.
const STEP: Duration = Duration::from_millis(5);

#[test]
fn what_was_submitted_ends_also_when_the_engine_goes_before_its_first_step() {
    let options = HarnessOptions {
        num_blocks: 64,
        limits: Limits { max_sequences: 4, max_prefill_tokens: 64 },
        prefix_cache: true,
        max_swapped: 0,
    };
    for round in 0..100 {
        // A thousand steps take far longer than any pause between the calls below, so that no
        // answer is complete when the engine goes.
        let slow = Toy::new(1, |_| {
            std::thread::sleep(STEP);
            None
        });
        let engine = Harness::new(Arc::new(slow), &options).unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let mut tickets: Vec<_> = (0..3)
            .map(|_| {
                let calls = calls.clone();
                let waker = move || {
                    calls.fetch_add(1, Ordering::SeqCst);
                };
                engine
                    .submit(HarnessRequest {
                        token_ids: vec![1, 2, 3],
                        max_new: 1000,
                        waker: Some(Box::new(waker)),
                        ..HarnessRequest::default()
                    })
                    .unwrap()
            })
            .collect();
        drop(engine);
        // The thread has been joined.
        assert!(calls.load(Ordering::SeqCst) >= 3, "in round {round} somebody was not woken");
        for ticket in &mut tickets {
            loop {
                match ticket.next(Some(PATIENCE)).unwrap() {
                    Some(Event::Token { .. }) => {}
                    Some(Event::End { reason, .. }) => {
                        break assert_eq!(reason, FinishReason::Cancelled)
                    }
                    other => panic!("in round {round}: {other:?}"),
                }
            }
        }
    }
}
