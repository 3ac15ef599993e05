//! Log-probabilities of given tokens: xserv_score. The expected values are computed here, in f64,
//! from the logits that xserv_logits gives.

use std::process::Command;
use std::ptr;
use std::time::Instant;

use xserv::ffi::*;

use crate::batching::{idle, tokens, PATIENCE};
use crate::choosing::log_softmax;
use crate::client::*;
use crate::cuda::whole_cuda;
use crate::files::{Store, TestModel};
use crate::load_options::slow_model;

const CONTEXT: usize = 200;

/// Returns a model of a short context, which computes a long text in pieces.
fn short() -> Model {
    let options = xserv_load_options {
        max_context_tokens: CONTEXT as u64,
        max_prefill_tokens: 64,
        ..load_options()
    };
    Model::load(&tiny(), &options).unwrap()
}

fn options() -> xserv_score_options {
    let mut options: xserv_score_options = unsafe { std::mem::zeroed() };
    unsafe { xserv_score_options_init(&mut options, size_of_val(&options)) };
    options
}

/// Returns the log-probability of each token from `num_given` on, and whether it is the likeliest.
fn score_with(
    model: &Model,
    ids: &[u32],
    num_given: usize,
    options: *const xserv_score_options,
) -> Outcome<Vec<(f32, u32)>> {
    let unset = xserv_token_score { log_prob: f32::NAN, is_likeliest: 9 };
    let mut scores = vec![unset; ids.len().saturating_sub(num_given)];
    let (to, count) = (scores.as_mut_ptr(), scores.len());
    check(unsafe { xserv_score(model.0, ids.as_ptr(), ids.len(), num_given, options, to, count) })?;
    Ok(scores.iter().map(|score| (score.log_prob, score.is_likeliest)).collect())
}

fn score(model: &Model, ids: &[u32], num_given: usize) -> Vec<(f32, u32)> {
    score_with(model, ids, num_given, ptr::null()).unwrap()
}

/// Weights that make no numbers are told as generation tells them, to scores and to prompts alike.
#[test]
fn logits_that_are_no_numbers_are_an_error() {
    let mut model = TestModel::qwen3(1);
    let norm = model.tensors.iter_mut().find(|tensor| tensor.name == "model.norm.weight");
    norm.unwrap().values[0] = f32::NAN;
    let folder = model.write(Store::F32);
    let model = Model::open(folder.path());
    let scored = score_with(&model, &[1, 2, 3], 1, ptr::null()).unwrap_err();
    let generated = model.generate(&greedy(&[1, 2, 3], 1)).map(|output| output.ids).unwrap_err();
    assert_eq!(scored.status, xserv_status::XSERV_STATUS_INVALID_FILE);
    assert_eq!((scored.status, &scored.message), (generated.status, &generated.message));
    let request = xserv_request { num_prompt_log_probs: 0, ..greedy(&[1, 2, 3], 1) };
    let prompt = model.generate(&request).map(|output| output.ids).unwrap_err();
    assert_eq!(prompt.message, scored.message);
}

/// As long a text as the context holds: of any tokens, then of those that the model generates, then of any.
fn longest(model: &Model) -> Vec<u32> {
    let mut ids = tokens(90, 5);
    let request = xserv_request { ignore_eos: 1, repetition_penalty: 1.0, ..greedy(&ids, 60) };
    ids.extend(model.generate(&request).unwrap().ids);
    ids.extend(tokens(CONTEXT - ids.len(), 3));
    ids
}

#[test]
fn scores_are_the_log_softmax_of_the_models_own_logits() {
    let model = short();
    let ids = longest(&model);
    assert_eq!(ids.len(), CONTEXT);
    let logits = model.logits(&ids, true).unwrap();
    let rows: Vec<&[f32]> = logits.chunks(model.info().vocab_size as usize).collect();
    for num_given in [1, 2, 31, 32, 33, 64, 65, 100, CONTEXT - 1, CONTEXT] {
        let scores = score(&model, &ids, num_given);
        assert_eq!(scores.len(), CONTEXT - num_given);
        for (i, (log_prob, is_likeliest)) in scores.iter().enumerate() {
            let (at, id) = (num_given + i, ids[num_given + i] as usize);
            let row: Vec<f64> = rows[at - 1].iter().map(|x| f64::from(*x)).collect();
            let expected = log_softmax(&row)[id];
            assert!(
                (f64::from(*log_prob) - expected).abs() < 1e-4,
                "token {at} after {num_given}: {log_prob} instead of {expected}"
            );
            // The first of the largest.
            let best = (0..row.len()).rev().max_by(|a, b| row[*a].total_cmp(&row[*b]));
            assert_eq!(*is_likeliest, u32::from(best == Some(id)), "token {at}");
        }
    }
    // The tokens that the model generates are the likeliest; the rest of the text has others.
    let scores = score(&model, &ids, 1);
    assert!(scores[89..149].iter().all(|(_, is_likeliest)| *is_likeliest == 1));
    assert!(scores.iter().filter(|(_, is_likeliest)| *is_likeliest == 0).count() > 50);
    // A text of one token has no other to score.
    assert!(score(&model, &ids[..1], 1).is_empty());
    idle(&model);
}

/// Returns the statistics after this many calls and requests have ended. (A call may return before
/// it is counted.)
fn stats_after(model: &Model, count: u64) -> xserv_model_stats {
    let begin = Instant::now();
    loop {
        let stats = idle(model);
        assert!(stats.total_submitted <= count && begin.elapsed() < PATIENCE);
        if stats.total_submitted == count {
            return stats;
        }
        std::thread::yield_now();
    }
}

#[test]
fn the_tokens_before_come_from_the_prefix_cache() {
    let model = Model::open(&tiny());
    let mut last = idle(&model);
    // The tokens that a call computes, and those that it finds.
    let mut cost = |options: &xserv_score_options, ids: &[u32], num_given: usize| {
        let scores = score_with(&model, ids, num_given, options).unwrap();
        let now = stats_after(&model, last.total_submitted + 1);
        let cost = (
            now.total_prompt_tokens - last.total_prompt_tokens,
            now.total_cached_tokens - last.total_cached_tokens,
        );
        last = now;
        (scores, cost)
    };
    let (usual, other) = (options(), xserv_score_options { cache_key: 5, ..options() });
    let ids = tokens(160, 2);
    let (first, (computed, found)) = cost(&usual, &ids, 130);
    assert_eq!((computed, found), (159, 0), "the last token is not computed");
    let (second, (computed, found)) = cost(&usual, &ids, 130);
    assert_eq!((computed, found), (31, 128));
    assert_eq!(first, second);
    // Another continuation of the same tokens.
    let continued = [&ids[..130], &tokens(7, 6)].concat();
    assert_eq!(cost(&usual, &continued, 130).1, (8, 128));
    // Another key shares nothing with it, and then with itself.
    assert_eq!(cost(&other, &ids, 130), (first.clone(), (159, 0)));
    assert_eq!(cost(&other, &ids, 130), (first.clone(), (31, 128)));
    // The logits of tokens that are to be scored are computed.
    let (all, (computed, found)) = cost(&usual, &ids, 1);
    assert_eq!((computed, found), (159, 0));
    for (one, expected) in all[129..].iter().zip(&first) {
        assert!((one.0 - expected.0).abs() < 1e-4 && one.1 == expected.1, "{one:?}, {expected:?}");
    }
    // A request finds what was computed for the scores, and the other way round.
    let prompt = tokens(100, 9);
    let mut found = Vec::new();
    for ids in [&ids[..150], &prompt] {
        model.generate(&xserv_request { ignore_eos: 1, ..greedy(ids, 2) }).unwrap();
        let now = stats_after(&model, last.total_submitted + 1);
        found.push(now.total_cached_tokens - last.total_cached_tokens);
        last = now;
    }
    assert_eq!(found, [128, 0]);
    score(&model, &[&prompt[..], &[1, 2]].concat(), 100);
    let now = stats_after(&model, last.total_submitted + 1);
    assert_eq!(now.total_cached_tokens - last.total_cached_tokens, 96);
}

#[test]
fn calls_and_requests_run_at_the_same_time() {
    let model = Model::open(&tiny());
    let texts: Vec<Vec<u32>> = (0..4).map(|salt| tokens(100 + 9 * salt as usize, salt)).collect();
    let request = |i: usize| xserv_request { ignore_eos: 1, ..greedy(&texts[i], 40) };
    let scores: Vec<_> = texts.iter().map(|ids| score(&model, ids, 40)).collect();
    let answers: Vec<_> = (0..4).map(|i| model.generate(&request(i)).unwrap().ids).collect();
    std::thread::scope(|scope| {
        for i in 0..4 {
            let (model, scores, answers, texts) = (&model, &scores, &answers, &texts);
            scope.spawn(move || {
                for _ in 0..4 {
                    let found = score(model, &texts[i], 40);
                    for (one, expected) in found.iter().zip(&scores[i]) {
                        assert!((one.0 - expected.0).abs() < 1e-4, "{one:?}, {expected:?}");
                        assert_eq!(one.1, expected.1);
                    }
                }
            });
            scope.spawn(move || {
                for _ in 0..3 {
                    assert_eq!(model.generate(&request(i)).unwrap().ids, answers[i]);
                }
            });
        }
    });
    idle(&model);
}

/// Texts of many lengths, with some of their tokens given.
#[test]
fn calls_at_the_same_time_share_steps() {
    const THREADS: usize = 24;
    const ROUNDS: usize = 6;
    let model = Model::open(&tiny());
    let text = |i: usize| {
        let ids = tokens(3 + 37 * i % (CONTEXT - 3), i as u32);
        let num_given = 1 + 11 * i % (ids.len() - 1);
        (ids, num_given)
    };
    let texts: Vec<(Vec<u32>, usize)> = (0..THREADS).map(text).collect();
    let expected: Vec<_> = texts.iter().map(|(ids, given)| score(&model, ids, *given)).collect();
    let before = idle(&model).total_steps;
    let begin = std::sync::Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for first in 0..THREADS {
            let (model, texts, expected, begin) = (&model, &texts, &expected, &begin);
            scope.spawn(move || {
                begin.wait();
                for round in 0..ROUNDS {
                    let index = (first + round) % THREADS;
                    let (ids, num_given) = &texts[index];
                    let found = score(model, ids, *num_given);
                    assert_eq!(found.len(), expected[index].len());
                    for (one, expected) in found.iter().zip(&expected[index]) {
                        assert!((one.0 - expected.0).abs() < 1e-4, "{one:?}, {expected:?}");
                    }
                }
            });
        }
    });
    let steps = idle(&model).total_steps - before;
    assert!(steps < (THREADS * ROUNDS) as u64 / 2, "{steps} steps");
}

#[test]
fn scores_are_cancelled_before_and_while_they_are_computed() {
    let mut token = ptr::null_mut();
    check(unsafe { xserv_cancel_token_new(&mut token) }).unwrap();
    // A GPU is too fast to be cancelled on its way.
    let is_fast = std::env::var_os(TEST_ON_CUDA).is_some();
    let model = if is_fast { Model::open(&tiny()) } else { slow_model() };
    let num_tokens = if is_fast { 1500 } else { 8000 };
    let ids: Vec<u32> = (0..num_tokens).map(|i| i % 100).collect();
    let throw = token as usize;
    let run = || {
        let options =
            xserv_score_options { cancel: throw as *const xserv_cancel_token, ..options() };
        score_with(&model, &ids, 1000, &options)
    };
    let throw = || check(xserv_cancel_token_cancel(throw as *const xserv_cancel_token)).unwrap();
    if is_fast {
        throw();
    } else {
        std::thread::scope(|scope| {
            let running = scope.spawn(run);
            std::thread::sleep(std::time::Duration::from_millis(300));
            assert!(!running.is_finished(), "the model is too fast for this test");
            throw();
            let failure = running.join().unwrap().unwrap_err();
            assert_eq!(failure.status, Status::XSERV_STATUS_CANCELLED, "{failure:?}");
        });
    }
    let failure = run().unwrap_err();
    assert_eq!(failure.status, Status::XSERV_STATUS_CANCELLED, "{failure:?}");
    assert_eq!(score(&model, &ids[..5], 2).len(), 3);
    idle(&model);
    xserv_cancel_token_free(token);
}

#[test]
fn wrong_sizes_and_ids_are_refused_by_sentences() {
    let model = short();
    let ids = tokens(CONTEXT + 1, 1);
    let unset = xserv_token_score { log_prob: 5.0, is_likeliest: 9 };
    let mut scores = vec![unset; CONTEXT];
    let mut refused = |num_tokens: usize, num_given: usize, num_scores: usize, words: &[&str]| {
        let (from, to) = (ids.as_ptr(), scores.as_mut_ptr());
        let none = ptr::null();
        let status =
            unsafe { xserv_score(model.0, from, num_tokens, num_given, none, to, num_scores) };
        let message = last_error();
        for word in words {
            assert!(message.contains(word), "no {word:?} in: {message}");
        }
        status
    };
    let bad = Status::XSERV_STATUS_INVALID_ARGUMENT;
    assert_eq!(refused(4, 0, 4, &["num_given is 0", "from 1 to num_tokens", "is 4"]), bad);
    assert_eq!(refused(4, 5, 0, &["num_given is 5", "num_tokens", "is 4"]), bad);
    assert_eq!(refused(0, 0, 0, &["num_given is 0"]), bad);
    assert_eq!(refused(0, 1, 0, &["num_given is 1", "num_tokens, which is 0"]), bad);
    assert_eq!(refused(4, 2, 3, &["num_scores is 3", "num_tokens - num_given is 2"]), bad);
    assert_eq!(refused(4, 4, 1, &["num_scores is 1", "is 0"]), bad);
    assert_eq!(refused(usize::MAX, 1, 4, &["num_scores is 4"]), bad);
    assert_eq!(refused(usize::MAX, usize::MAX - 3, 3, &["token_ids", "impossible"]), bad);
    // The text must fit into the context, though the last token is not computed.
    let full = Status::XSERV_STATUS_CONTEXT_FULL;
    assert_eq!(refused(CONTEXT + 1, 1, CONTEXT, &["201 tokens", "holds 200"]), full);
    assert_eq!(refused(CONTEXT + 1, CONTEXT + 1, 0, &["201 tokens", "holds 200"]), full);

    // Ids in any place: given, scored, and the last one.
    let vocab_size = model.info().vocab_size;
    for place in [0, 2, 4] {
        for id in [vocab_size, u32::MAX] {
            let mut ids = tokens(5, 1);
            ids[place] = id;
            let failure = score_with(&model, &ids, 2, ptr::null()).unwrap_err();
            assert_eq!(failure.status, bad);
            for word in [id.to_string(), format!("position {place}"), vocab_size.to_string()] {
                assert!(failure.message.contains(&word), "no {word} in: {}", failure.message);
            }
        }
    }

    let (from, to) = (ids.as_ptr(), scores.as_mut_ptr());
    let misaligned = to.wrapping_byte_add(2);
    let fails = |status: xserv_status, words: &str| {
        assert_eq!(status, bad);
        assert!(last_error().contains(words), "{}", last_error());
    };
    unsafe {
        let none = ptr::null();
        fails(xserv_score(model.0, ptr::null(), 4, 2, none, to, 2), "token_ids is NULL");
        fails(xserv_score(model.0, from.byte_add(1), 4, 2, none, to, 2), "token_ids is misaligned");
        fails(xserv_score(model.0, from, 4, 2, none, ptr::null_mut(), 2), "scores is NULL");
        fails(xserv_score(model.0, from, 4, 2, none, misaligned, 2), "scores is misaligned");
        for struct_size in [0, 16, 25, 32] {
            let wrong = xserv_score_options { struct_size, ..options() };
            fails(xserv_score(model.0, from, 4, 2, &wrong, to, 2), "struct_size is");
        }
        let status = xserv_score(ptr::null(), from, 4, 2, none, to, 2);
        assert_ne!(status, Status::XSERV_STATUS_OK);
        let forged = xserv_score_options { cancel: forged(), ..options() };
        let status = xserv_score(model.0, from, 4, 2, &forged, to, 2);
        assert_eq!(status, Status::XSERV_STATUS_BAD_HANDLE);
        // Without scores there is nothing to write.
        check(xserv_score(model.0, from, 4, 4, none, ptr::null_mut(), 0)).unwrap();
    }
    assert!(scores.iter().all(|one| one.log_prob == 5.0 && one.is_likeliest == 9));
    assert_eq!(idle(&model).total_submitted, 0, "what is refused is not submitted");
}

/// The tests of this file once more, over a model on a GPU, whose kernels add up and compare.
#[test]
fn all_of_it_holds_on_cuda() {
    let Some(_device) = whole_cuda() else { return };
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["scoring::", "--skip", "scoring::all_of_it_holds_on_cuda"])
        .env(TEST_ON_CUDA, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains("test result: ok. 7 passed"),
        "{text}{errors}"
    );
}
