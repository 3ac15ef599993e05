//! The settings of a request for the choice of tokens: biases, the least number of tokens,
//! log-probabilities. The expected values are computed here, in f64, from the logits that
//! xserv_logits gives.

use std::ffi::{c_char, c_void, CString};
use std::process::Command;
use std::ptr;

use xserv::ffi::xserv_constraint_kind::*;
use xserv::ffi::xserv_event_kind::*;
use xserv::ffi::xserv_finish_reason::*;
use xserv::ffi::*;

use crate::batching::{idle, tokens, Submission};
use crate::client::*;
use crate::cuda::{on_cuda, shared_cuda};

const BANNED: f32 = f32::NEG_INFINITY;

fn bias(token_id: u32, bias: f32) -> xserv_logit_bias {
    xserv_logit_bias { token_id, bias }
}

/// Returns the request with these biases, which must live as long.
fn biased(request: xserv_request, biases: &[xserv_logit_bias]) -> xserv_request {
    xserv_request { logit_bias: biases.as_ptr(), num_logit_bias: biases.len(), ..request }
}

/// Returns the ids that end a generation of this model.
fn end_tokens(model: &Model) -> Vec<u32> {
    let info = model.info();
    unsafe { std::slice::from_raw_parts(info.eos_token_ids, info.num_eos_token_ids as usize) }
        .to_vec()
}

#[test]
fn a_large_bias_decides() {
    let model = Model::open(&tiny());
    let ids = tokens(20, 1);
    for token in [0, 7, 1500, model.info().vocab_size - 1] {
        let biases = [bias(token, 100.0)];
        let greedy = xserv_request { ignore_eos: 1, ..greedy(&ids, 12) };
        let drawn = xserv_request { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 3, ..greedy };
        for request in [greedy, drawn] {
            let got = model.generate(&biased(request, &biases)).unwrap();
            assert_eq!(got.ids, [token; 12]);
        }
    }
}

#[test]
fn minus_infinity_bans() {
    let model = Model::open(&tiny());
    let ids = tokens(20, 1);
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids, 16) };
    let usual = model.generate(&request).unwrap().ids;
    let mut banned: Vec<u32> = usual.clone();
    banned.sort_unstable();
    banned.dedup();
    let biases: Vec<_> = banned.iter().map(|id| bias(*id, BANNED)).collect();
    let drawn = xserv_request { temperature: 2.0, top_k: 0, top_p: 1.0, ..request };
    for request in [request, drawn] {
        let got = model.generate(&biased(request, &biases)).unwrap();
        assert_eq!(got.ids.len(), 16);
        assert!(got.ids.iter().all(|id| !banned.contains(id)), "{:?}", got.ids);
    }
    // All but two.
    let others = 0..model.info().vocab_size;
    let biases: Vec<_> =
        others.filter(|id| ![40, 50].contains(id)).map(|id| bias(id, BANNED)).collect();
    let drawn = xserv_request { temperature: 100.0, seed: 5, max_tokens: 60, ..drawn };
    let got = model.generate(&biased(drawn, &biases)).unwrap().ids;
    assert!(got.iter().all(|id| [40, 50].contains(id)), "{got:?}");
    assert!(got.contains(&40) && got.contains(&50), "{got:?}");
}

#[test]
fn a_small_bias_is_added_to_the_logit() {
    let model = Model::open(&tiny());
    let ids = tokens(20, 1);
    let logits = model.logits(&ids, false).unwrap();
    let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
    for other in [3, 700, 1999] {
        let gap = logits[best] - logits[other];
        for (more, expected) in [(-0.01, best), (0.01, other)] {
            let biases = [bias(other as u32, gap + more)];
            let got = model.generate(&biased(greedy(&ids, 1), &biases)).unwrap();
            assert_eq!(got.ids, [expected as u32], "{other} with {}", gap + more);
        }
    }
}

#[test]
fn no_end_token_comes_before_min_tokens() {
    let model = Model::open(&tiny());
    let ids = tokens(20, 1);
    let ends = end_tokens(&model);
    assert!(!ends.is_empty());
    for end in &ends {
        let biases = [bias(*end, 100.0)];
        for min_tokens in [0, 1, 5, 11] {
            let request = xserv_request { min_tokens, ..greedy(&ids, 12) };
            let got = model.generate(&biased(request, &biases)).unwrap();
            assert_eq!(got.ids.len(), min_tokens as usize + 1);
            assert_eq!(got.ids.last(), Some(end));
            assert_eq!(got.finish_reason, XSERV_FINISH_STOP_TOKEN as u32);
            assert!(got.ids[..min_tokens as usize].iter().all(|id| !ends.contains(id)));
        }
        // If it ends nothing, it may be chosen.
        let request = xserv_request { min_tokens: 12, ignore_eos: 1, ..greedy(&ids, 12) };
        assert_eq!(model.generate(&biased(request, &biases)).unwrap().ids, [*end; 12]);
        // max_tokens ends it all the same.
        let request = xserv_request { min_tokens: 12, ..greedy(&ids, 12) };
        let got = model.generate(&biased(request, &biases)).unwrap();
        assert_eq!((got.ids.len(), got.finish_reason), (12, XSERV_FINISH_MAX_TOKENS as u32));
    }
    // A stop token is an end token, also where the model's own are none.
    let usual = model.generate(&xserv_request { ignore_eos: 1, ..greedy(&ids, 12) }).unwrap().ids;
    let stop = [usual[3]];
    for ignore_eos in [0, 1] {
        let request = xserv_request {
            stop_token_ids: stop.as_ptr(),
            num_stop_token_ids: 1,
            ignore_eos,
            ..greedy(&ids, 12)
        };
        assert!(model.generate(&request).unwrap().ids.len() <= 4);
        let got = model.generate(&xserv_request { min_tokens: 8, ..request }).unwrap().ids;
        assert!(got.len() >= 8 && !got[..8].contains(&stop[0]), "{got:?}");
    }
    // A stop string is not.
    let text = model.detokenize(&usual[..3], true).unwrap();
    let stop = CString::new(text.chars().last().unwrap().to_string()).unwrap();
    let stops: [*const c_char; 1] = [stop.as_ptr()];
    let request = xserv_request {
        stop_strings: stops.as_ptr(),
        num_stop_strings: 1,
        min_tokens: 12,
        ignore_eos: 1,
        ..greedy(&ids, 12)
    };
    let got = model.generate(&request).unwrap();
    assert_eq!(got.finish_reason, XSERV_FINISH_STOP_STRING as u32);
    assert!(got.ids.len() <= 3);
}

/// The log-probabilities of the tokens of a sample: each with that of the chosen one and the likeliest.
#[derive(Clone, Debug, PartialEq)]
struct Told {
    ids: Vec<u32>,
    log_probs: Vec<f32>,
    top: Vec<Vec<(u32, f32)>>,
}

fn pairs(first: *const xserv_log_prob, count: usize) -> Vec<(u32, f32)> {
    if count == 0 {
        assert!(first.is_null());
        return Vec::new();
    }
    let all = unsafe { std::slice::from_raw_parts(first, count) };
    all.iter().map(|one| (one.token_id, one.log_prob)).collect()
}

/// Returns the log-probabilities that a result has for each sample.
fn told_by(result: *mut xserv_result, num_samples: usize) -> Vec<Told> {
    let mut all = Vec::new();
    for sample in 0..num_samples {
        let mut info: xserv_result_info = unsafe { std::mem::zeroed() };
        info.struct_size = size_of::<xserv_result_info>();
        check(unsafe { xserv_result_get_sample(result, sample, &mut info) }).unwrap();
        let ids = unsafe { std::slice::from_raw_parts(info.token_ids, info.num_tokens) }.to_vec();
        let log_probs = match info.log_probs.is_null() {
            true => Vec::new(),
            false => unsafe { std::slice::from_raw_parts(info.log_probs, ids.len()) }.to_vec(),
        };
        let flat = pairs(info.top_log_probs, info.num_top_log_probs * ids.len());
        let top = match info.num_top_log_probs {
            0 => Vec::new(),
            count => flat.chunks(count).map(<[_]>::to_vec).collect(),
        };
        all.push(Told { ids, log_probs, top });
    }
    xserv_result_free(result);
    all
}

fn generate(model: &Model, request: &xserv_request) -> Vec<Told> {
    let mut result = ptr::null_mut();
    check(unsafe { xserv_generate(model.0, request, None, ptr::null_mut(), &mut result) }).unwrap();
    told_by(result, request.num_samples as usize)
}

/// Returns the log-softmax of a row in f64.
pub fn log_softmax(row: &[f64]) -> Vec<f64> {
    let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = row.iter().map(|x| (x - largest).exp()).sum();
    row.iter().map(|x| x - largest - sum.ln()).collect()
}

fn close(found: f32, expected: f64) -> bool {
    f64::from(found) == expected || (f64::from(found) - expected).abs() < 1e-3
}

/// Holds what a sample was told to the rows that are expected, each before its token was chosen.
fn assert_told(told: &Told, rows: &[Vec<f64>], num_top: usize) {
    assert_eq!((told.log_probs.len(), rows.len()), (told.ids.len(), told.ids.len()));
    assert_eq!(told.top.len(), if num_top == 0 { 0 } else { told.ids.len() });
    for (i, row) in rows.iter().enumerate() {
        let expected = log_softmax(row);
        let (id, found) = (told.ids[i], told.log_probs[i]);
        assert!(
            close(found, expected[id as usize]),
            "token {i}: {found}, {}",
            expected[id as usize]
        );
        if num_top == 0 {
            continue;
        }
        let top = &told.top[i];
        let mut sorted = expected.clone();
        sorted.sort_unstable_by(|a, b| b.total_cmp(a));
        assert_eq!(top.len(), num_top);
        for (place, (id, found)) in top.iter().enumerate() {
            assert!(close(*found, expected[*id as usize]), "token {i}, {place}: {found} for {id}");
            assert!(close(*found, sorted[place]), "token {i}, {place}: {found}, {}", sorted[place]);
        }
        for two in top.windows(2) {
            let is_ordered = two[0].1 > two[1].1 || (two[0].1 == two[1].1 && two[0].0 < two[1].0);
            assert!(is_ordered, "token {i}: {top:?}");
        }
        if let Some(same) = top.iter().find(|(other, _)| *other == id) {
            assert_eq!(same.1, found);
        }
    }
}

/// Returns the model's own logits before each of the generated tokens.
fn own_rows(model: &Model, prompt: &[u32], generated: &[u32]) -> Vec<Vec<f64>> {
    let all = [prompt, generated].concat();
    let logits = model.logits(&all[..all.len() - 1], true).unwrap();
    let vocab_size = model.info().vocab_size as usize;
    let rows = logits.chunks(vocab_size).skip(prompt.len() - 1);
    rows.map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect()
}

#[test]
fn log_probabilities_are_those_of_the_models_own_logits() {
    let model = Model::open(&tiny());
    let ids = tokens(30, 2);
    let biases = [bias(7, 3.0), bias(8, BANNED)];
    let usual = xserv_request { ignore_eos: 1, ..greedy(&ids, 20) };
    let drawn = xserv_request { temperature: 1.3, top_k: 50, seed: 9, ..usual };
    let changed = xserv_request {
        repetition_penalty: 1.3,
        presence_penalty: 0.5,
        frequency_penalty: 0.2,
        ..biased(drawn, &biases)
    };
    for request in [usual, drawn, changed] {
        let without = model.generate(&request).unwrap().ids;
        for num_log_probs in [0, 1, 5, 20] {
            let told = generate(&model, &xserv_request { num_log_probs, ..request }).remove(0);
            assert_eq!(told.ids, without, "asking must not change the tokens");
            let rows = own_rows(&model, &ids, &told.ids);
            assert_told(&told, &rows, num_log_probs as usize);
        }
    }
}

/// A token that is chosen need not be among the likeliest: here it is the only one that is not banned.
#[test]
fn the_chosen_token_may_be_unlikely() {
    let model = Model::open(&tiny());
    let ids = tokens(30, 2);
    let biases = [bias(1234, 1e4)];
    let request = xserv_request { num_log_probs: 3, ignore_eos: 1, ..greedy(&ids, 6) };
    let told = generate(&model, &biased(request, &biases)).remove(0);
    assert_eq!(told.ids, [1234; 6]);
    assert_told(&told, &own_rows(&model, &ids, &told.ids), 3);
    assert!(told.top[0].iter().all(|(id, _)| *id != 1234), "{:?}", told.top[0]);
}

#[test]
fn processed_log_probabilities_are_after_biases_penalties_and_temperature() {
    let model = Model::open(&tiny());
    let ids = tokens(30, 2);
    let biases = [bias(7, 3.0), bias(8, BANNED), bias(900, -2.5)];
    let ends = end_tokens(&model);
    for temperature in [0.0, 0.7, 1.6] {
        let request = xserv_request {
            temperature,
            top_k: 50,
            top_p: 0.95,
            seed: 9,
            repetition_penalty: 1.3,
            presence_penalty: 0.5,
            frequency_penalty: 0.2,
            min_tokens: 10,
            num_log_probs: 20,
            processed_log_probs: 1,
            ..biased(greedy(&ids, 16), &biases)
        };
        let told = generate(&model, &request).remove(0);
        let mut rows = own_rows(&model, &ids, &told.ids);
        for (i, row) in rows.iter_mut().enumerate() {
            for one in biases {
                row[one.token_id as usize] += f64::from(one.bias);
            }
            if i < 10 {
                ends.iter().for_each(|id| row[*id as usize] = f64::NEG_INFINITY);
            }
            for (id, logit) in row.iter_mut().enumerate() {
                let id = id as u32;
                let times = told.ids[..i].iter().filter(|other| **other == id).count();
                if times > 0 || ids.contains(&id) {
                    *logit = if *logit > 0.0 { *logit / 1.3 } else { *logit * 1.3 };
                }
                *logit -= 0.5 * f64::from(u8::from(times > 0)) + 0.2 * times as f64;
                if temperature > 0.0 {
                    *logit /= f64::from(temperature);
                }
            }
        }
        assert_told(&told, &rows, 20);
    }
}

#[test]
fn a_banned_token_has_no_probability() {
    let model = Model::open(&tiny());
    let ids = tokens(30, 2);
    let biases: Vec<_> =
        (0..model.info().vocab_size).filter(|id| *id > 2).map(|id| bias(id, BANNED)).collect();
    let request = xserv_request {
        num_log_probs: 5,
        processed_log_probs: 1,
        ignore_eos: 1,
        ..biased(greedy(&ids, 3), &biases)
    };
    let told = generate(&model, &request).remove(0);
    assert_eq!(told.top.len(), 3);
    for top in &told.top {
        let mut likely: Vec<u32> = top[..3].iter().map(|(id, _)| *id).collect();
        likely.sort_unstable();
        assert_eq!(likely, [0, 1, 2]);
        assert_eq!(top[3..], [(3, f32::NEG_INFINITY), (4, f32::NEG_INFINITY)]);
    }
}

/// Takes all events, and what they say of each sample.
fn follow(submission: &Submission, num_samples: usize, num_top: u32) -> Vec<Told> {
    let none = Told { ids: Vec::new(), log_probs: Vec::new(), top: Vec::new() };
    let mut all = vec![none; num_samples];
    loop {
        let mut event: xserv_event = unsafe { std::mem::zeroed() };
        event.struct_size = size_of::<xserv_event>();
        check(unsafe { xserv_next(submission.0, XSERV_WAIT_FOREVER, &mut event) }).unwrap();
        if event.kind == XSERV_EVENT_TOKEN as u32 {
            let told = &mut all[event.sample as usize];
            told.ids.push(event.token_id);
            told.log_probs.push(event.log_prob);
            assert_eq!(event.num_top_log_probs, num_top);
            let top = pairs(event.top_log_probs, num_top as usize);
            if num_top > 0 {
                told.top.push(top);
            }
        } else {
            assert!(event.log_prob.is_nan() && event.num_top_log_probs == 0);
            assert!(event.top_log_probs.is_null());
        }
        if event.kind == XSERV_EVENT_DONE as u32 {
            return all;
        }
    }
}

#[test]
fn events_and_results_agree() {
    let model = Model::open(&tiny());
    let ids = tokens(40, 3);
    for (num_samples, num_log_probs) in [(1, 0), (1, 4), (3, 20)] {
        let request = xserv_request {
            num_samples,
            num_log_probs,
            temperature: 1.0,
            seed: 4,
            ignore_eos: 1,
            ..greedy(&ids, 15)
        };
        let submission = Submission::new(&model, &request, ptr::null()).unwrap();
        let by_events = follow(&submission, num_samples as usize, num_log_probs);
        let mut result = ptr::null_mut();
        check(unsafe { xserv_submission_take_result(submission.0, &mut result) }).unwrap();
        assert_eq!(told_by(result, num_samples as usize), by_events);
        assert_eq!(generate(&model, &request), by_events);
        for (sample, told) in by_events.iter().enumerate() {
            assert_told(told, &own_rows(&model, &ids, &told.ids), num_log_probs as usize);
            let alone = xserv_request { num_samples: 1, seed: 4 + sample as u64, ..request };
            assert_eq!(generate(&model, &alone).remove(0).ids, told.ids);
        }
    }
    // Nobody asked.
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids, 5) };
    let told = generate(&model, &request).remove(0);
    assert!(told.log_probs.is_empty() && told.top.is_empty() && told.ids.len() == 5);
    let submission = Submission::new(&model, &request, ptr::null()).unwrap();
    let told = follow(&submission, 1, 0).remove(0);
    assert!(told.log_probs.len() == 5 && told.log_probs.iter().all(|one| one.is_nan()));
    // A stop token has one as well, and no token none.
    let stop = [told.ids[2]];
    let request = xserv_request {
        stop_token_ids: stop.as_ptr(),
        num_stop_token_ids: 1,
        num_log_probs: 2,
        ..request
    };
    let told = generate(&model, &request).remove(0);
    assert_eq!(told.ids.last(), Some(&stop[0]));
    assert_told(&told, &own_rows(&model, &ids, &told.ids), 2);
    let told = generate(&model, &xserv_request { max_tokens: 0, ..request }).remove(0);
    assert!(told.ids.is_empty() && told.log_probs.is_empty() && told.top.is_empty());
}

/// Requests that are computed together do not see each other's biases.
#[test]
fn requests_of_one_step_keep_their_own() {
    let model = Model::open(&tiny());
    let prompts: Vec<Vec<u32>> = (0..8).map(|i| tokens(10 + 3 * i as usize, i)).collect();
    let biases: Vec<Vec<xserv_logit_bias>> =
        (0..8).map(|i| (0..i * 30).map(|j| bias(j * 5 + i, 4.0 - i as f32)).collect()).collect();
    let request = |i: usize| xserv_request {
        ignore_eos: (i % 2) as u8,
        min_tokens: i as u32 * 3,
        num_log_probs: if i.is_multiple_of(3) { XSERV_UNSET_INT } else { i as u32 },
        processed_log_probs: u8::from(i % 3 == 2),
        temperature: [0.0, 1.0][i / 2 % 2],
        seed: i as u64,
        ..biased(greedy(&prompts[i], 24), &biases[i])
    };
    let alone: Vec<Told> = (0..8).map(|i| generate(&model, &request(i)).remove(0)).collect();
    let all: Vec<Submission> =
        (0..8).map(|i| Submission::new(&model, &request(i), ptr::null()).unwrap()).collect();
    for (i, (submission, alone)) in all.iter().zip(&alone).enumerate() {
        assert_eq!(alone.log_probs.len(), if i.is_multiple_of(3) { 0 } else { alone.ids.len() });
        submission.finish(1);
        let mut result = ptr::null_mut();
        check(unsafe { xserv_submission_take_result(submission.0, &mut result) }).unwrap();
        assert_eq!(&told_by(result, 1)[0], alone);
    }
    drop(all);
    idle(&model);
}

#[test]
fn wrong_wishes_are_refused_by_name() {
    let model = Model::open(&tiny());
    let ids = tokens(10, 3);
    let vocab_size = model.info().vocab_size;
    let refused = |request: xserv_request, words: &[&str]| {
        let failure = model.generate(&request).unwrap_err();
        assert_eq!(failure.status, Status::XSERV_STATUS_INVALID_ARGUMENT, "{failure:?}");
        for word in words {
            assert!(failure.message.contains(word), "no {word:?} in: {}", failure.message);
        }
        let submitted = Submission::new(&model, &request, ptr::null()).err().unwrap();
        assert_eq!(submitted.message, failure.message);
    };
    let plain = greedy(&ids, 2);
    let wrong: [(&[xserv_logit_bias], &[&str]); 7] = [
        (&[bias(1, 0.0), bias(vocab_size, 1.0)], &["logit_bias[1]", "2048"]),
        (&[bias(u32::MAX, 1.0)], &["logit_bias[0]", "4294967295"]),
        (&[bias(1, 1.0), bias(2, 1.0), bias(1, -1.0)], &["logit_bias", "1"]),
        (&[bias(1, f32::NAN)], &["logit_bias[0]", "NaN"]),
        (&[bias(1, f32::INFINITY)], &["logit_bias[0]", "inf"]),
        (&[bias(1, 10001.0)], &["logit_bias[0]", "10001"]),
        (&[bias(1, -1e30)], &["logit_bias[0]"]),
    ];
    for (biases, words) in wrong {
        refused(biased(plain, biases), words);
    }
    let one = [bias(1, 1.0), bias(2, 1.0)];
    let misaligned = unsafe { one.as_ptr().byte_add(2) };
    let name = "request.logit_bias";
    refused(xserv_request { num_logit_bias: 1, ..plain }, &[name, "NULL"]);
    refused(
        xserv_request { logit_bias: misaligned, num_logit_bias: 1, ..plain },
        &[name, "misaligned"],
    );
    for num_logit_bias in [usize::MAX, usize::MAX / 8, 1 << 60] {
        let request = xserv_request { logit_bias: one.as_ptr(), num_logit_bias, ..plain };
        refused(request, &[name, &num_logit_bias.to_string()]);
    }
    for num_log_probs in [21, 1 << 31, u32::MAX - 1] {
        refused(xserv_request { num_log_probs, ..plain }, &["log_probs", "20"]);
    }
    let asked = xserv_request { num_log_probs: 1, ..plain };
    for processed_log_probs in [2, 255] {
        refused(xserv_request { processed_log_probs, ..asked }, &["request.processed_log_probs"]);
    }
    refused(xserv_request { processed_log_probs: 1, ..plain }, &["num_log_probs"]);
    for min_tokens in [3, u32::MAX] {
        refused(
            xserv_request { min_tokens, ..plain },
            &["min_tokens", &min_tokens.to_string(), "max_tokens is 2"],
        );
    }
    let many = vec![bias(1, 1.0); 16385];
    refused(biased(plain, &many), &["num_logit_bias is 16385", "16384"]);
    let all: Vec<_> = (0..vocab_size).map(|id| bias(id, BANNED)).collect();
    refused(biased(plain, &all), &["logit_bias bans every token"]);

    // The limits themselves are allowed; a pointer without a count is not looked at.
    let biases = [bias(0, 1e4), bias(vocab_size - 1, -1e4), bias(5, BANNED)];
    assert!(model.generate(&biased(plain, &biases)).is_ok());
    let ignored = xserv_request { logit_bias: misaligned, num_logit_bias: 0, ..plain };
    assert!(model.generate(&ignored).is_ok());
    assert!(model.generate(&xserv_request { min_tokens: 2, ..plain }).is_ok());
    idle(&model);
}

/// The callback of xserv_generate is told what it always was; the result has the rest.
#[test]
fn the_blocking_call_has_log_probabilities_in_its_result() {
    unsafe extern "C" fn stop_at_three(event: *const xserv_token_event, _: *mut c_void) -> bool {
        unsafe { (*event).num_tokens < 3 }
    }
    let model = Model::open(&tiny());
    let ids = tokens(10, 3);
    let request = xserv_request { ignore_eos: 1, num_log_probs: 2, ..greedy(&ids, 30) };
    let mut result = ptr::null_mut();
    check(unsafe {
        xserv_generate(model.0, &request, Some(stop_at_three), ptr::null_mut(), &mut result)
    })
    .unwrap();
    let told = told_by(result, 1).remove(0);
    assert_eq!(told.ids.len(), 3);
    assert_told(&told, &own_rows(&model, &ids, &told.ids), 2);
}

#[test]
fn an_answer_begins_with_the_first_tokens() {
    let model = Model::open(&tiny());
    let ids = tokens(30, 2);
    let first = [1234, 7, 7, 40];
    let after = [&ids[..], &first].concat();
    for temperature in [0.0, 1.0] {
        let request = xserv_request {
            first_tokens: first.as_ptr(),
            num_first_tokens: first.len(),
            temperature,
            ignore_eos: 1,
            ..greedy(&ids, 20)
        };
        let got = model.generate(&request).unwrap().ids;
        assert_eq!((&got[..4], got.len()), (&first[..], 20));
        if temperature == 0.0 {
            let usual = xserv_request { ignore_eos: 1, ..greedy(&after, 16) };
            assert_eq!(got[4..], model.generate(&usual).unwrap().ids);
        }
        // Nothing else decides, and the log-probabilities are those of the model.
        let biases: Vec<_> = first.iter().take(2).map(|id| bias(*id, BANNED)).collect();
        let others = xserv_request {
            repetition_penalty: 5.0,
            min_tokens: 4,
            num_log_probs: 3,
            max_tokens: 4,
            ..biased(request, &biases)
        };
        let told = generate(&model, &others).remove(0);
        assert_eq!(told.ids, first);
        assert_told(&told, &own_rows(&model, &ids, &told.ids), 3);
    }
    // One that ends the answer ends it.
    let ending = [first[0], end_tokens(&model)[0], first[1]];
    let request =
        xserv_request { first_tokens: ending.as_ptr(), num_first_tokens: 3, ..greedy(&ids, 20) };
    let got = model.generate(&request).unwrap();
    assert_eq!(got.ids, ending[..2]);
    assert_eq!(got.finish_reason, XSERV_FINISH_STOP_TOKEN as u32);
}

#[test]
fn no_sequence_of_tokens_comes_twice() {
    let model = Model::open(&tiny());
    let ids = tokens(40, 2);
    for size in [1, 2, 3] {
        let request = xserv_request { no_repeat_ngram_size: size, ..greedy(&ids, 120) };
        for temperature in [0.0, 1.0] {
            let request = xserv_request { temperature, ignore_eos: 1, ..request };
            let got = model.generate(&request).unwrap().ids;
            assert_eq!(got.len(), 120);
            let all = [&ids[..], &got].concat();
            let windows: Vec<&[u32]> = all.windows(size as usize).collect();
            // Only those that end within the answer are its own.
            for (at, window) in windows.iter().enumerate().skip(ids.len() - size as usize + 1) {
                assert!(!windows[..at].contains(window), "{window:?} comes twice");
            }
        }
    }
    let usual = model.generate(&xserv_request { ignore_eos: 1, ..greedy(&ids, 120) }).unwrap().ids;
    let repeats = usual
        .windows(2)
        .enumerate()
        .any(|(at, pair)| usual[..at + 1].windows(2).any(|other| other == pair));
    assert!(repeats, "without it there would be nothing to ban");
}

#[test]
fn typical_tokens_are_not_the_likeliest() {
    let model = Model::open(&tiny());
    let ids = tokens(30, 2);
    // In f64, from the model's own logits: the token whose information is nearest to the entropy.
    let rows = own_rows(&model, &ids, &[0]);
    let log_probs = log_softmax(&rows[0]);
    let entropy: f64 = log_probs.iter().map(|x| -x * x.exp()).sum();
    let distance = |id: &usize| (-log_probs[*id] - entropy).abs();
    let nearest = (0..log_probs.len()).map(|id| distance(&id)).fold(f64::INFINITY, f64::min);
    let all = xserv_request { top_k: 0, top_p: 1.0, min_p: 0.0, ..greedy(&ids, 1) };
    let request = xserv_request { temperature: 1.0, typical_p: 1e-30, ..all };
    for seed in 0..5 {
        let got = model.generate(&xserv_request { seed, ..request }).unwrap().ids;
        // Others may be as near.
        assert!(distance(&(got[0] as usize)) <= nearest + 1e-5, "{got:?}");
    }
    // All of it is kept.
    let drawn = xserv_request { temperature: 1.0, seed: 8, max_tokens: 20, ..greedy(&ids, 20) };
    let usual = model.generate(&drawn).unwrap().ids;
    assert_eq!(model.generate(&xserv_request { typical_p: 1.0, ..drawn }).unwrap().ids, usual);
}

#[test]
fn wrong_sequences_and_shares_are_refused_by_name() {
    let model = Model::open(&tiny());
    let ids = tokens(10, 1);
    let vocab_size = model.info().vocab_size;
    let refused = |request: xserv_request, words: &str| {
        let failure = model.generate(&request).err().unwrap();
        assert_eq!(failure.status, xserv_status::XSERV_STATUS_INVALID_ARGUMENT);
        assert!(failure.message.contains(words), "{}", failure.message);
    };
    for typical_p in [0.0, -0.5, 1.01, f32::NAN, f32::INFINITY] {
        refused(xserv_request { typical_p, ..greedy(&ids, 2) }, "typical_p");
    }
    let first = [3, vocab_size];
    let wrong =
        xserv_request { first_tokens: first.as_ptr(), num_first_tokens: 2, ..greedy(&ids, 2) };
    refused(wrong, "first_tokens[1]");
    refused(xserv_request { first_tokens: ptr::null(), ..wrong }, "first_tokens");
    let many = vec![3; 1 << 20];
    let num_first_tokens = many.len();
    refused(
        xserv_request { first_tokens: many.as_ptr(), num_first_tokens, ..wrong },
        "first_tokens",
    );
}

/// The tests of this file once more, over a model on a GPU: it changes logits and adds up by
/// kernels of its own.
#[test]
fn all_of_it_holds_on_cuda() {
    let Some(_device) = shared_cuda() else { return };
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["choosing::", "--skip", "choosing::all_of_it_holds_on_cuda"])
        .env(TEST_ON_CUDA, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("test result: ok. 1"), "{text}{errors}");
}

/// All penalties, biases, constraints and an end that may not come yet, in f32: the GPU chooses what the CPU
/// chooses, alone and beside others that want other things.
#[test]
fn cuda_chooses_what_the_cpu_chooses() {
    let Some(_device) = shared_cuda() else { return };
    let on_cpu = Model::load(
        &tiny(),
        &xserv_load_options { dtype: xserv_dtype::XSERV_DTYPE_F32 as u32, ..load_options() },
    )
    .unwrap();
    let gpu = Model::load(&tiny(), &on_cuda(xserv_dtype::XSERV_DTYPE_F32)).unwrap();
    let biases: Vec<_> = (0..40).map(|i| bias(i * 37, (i % 7) as f32 - 3.0)).collect();
    let prompts: Vec<Vec<u32>> = (0..9).map(|salt| tokens(20 + 5 * salt as usize, salt)).collect();
    let schema = r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}}, "required": ["name", "n"], "additionalProperties": false}"#;
    let constrained =
        |request: xserv_request, kind: xserv_constraint_kind, text: &str| xserv_request {
            constraint_kind: kind as u32,
            constraint: text.as_ptr().cast(),
            constraint_len: text.len(),
            num_log_probs: 5,
            ..request
        };
    let first = on_cpu.tokenize("{\"name\": \"ab").unwrap();
    let requests: Vec<xserv_request> = prompts
        .iter()
        .enumerate()
        .map(|(index, prompt)| {
            let request = greedy(prompt, 48);
            match index {
                0 => request,
                1 => xserv_request { repetition_penalty: 1.4, ..request },
                2 => xserv_request { presence_penalty: 1.5, frequency_penalty: 0.3, ..request },
                3 => biased(request, &biases),
                4 => xserv_request { min_tokens: 40, num_log_probs: 5, ..request },
                5 => xserv_request {
                    first_tokens: first.as_ptr(),
                    num_first_tokens: first.len(),
                    ..constrained(request, XSERV_CONSTRAINT_JSON_SCHEMA, schema)
                },
                6 => xserv_request {
                    repetition_penalty: 1.2,
                    presence_penalty: 0.3,
                    processed_log_probs: 1,
                    ..biased(
                        constrained(request, XSERV_CONSTRAINT_REGEX, "([a-z]{2,8} ){3,20}[0-9]"),
                        &biases,
                    )
                },
                7 => xserv_request {
                    no_repeat_ngram_size: 3,
                    min_tokens: 12,
                    ..constrained(request, XSERV_CONSTRAINT_REGEX, "[a-z ]{4,60}")
                },
                _ => xserv_request {
                    repetition_penalty: 1.2,
                    presence_penalty: -0.4,
                    frequency_penalty: 0.2,
                    min_tokens: 30,
                    num_log_probs: 20,
                    processed_log_probs: 1,
                    ..biased(request, &biases)
                },
            }
        })
        .collect();
    let expected: Vec<Told> =
        requests.iter().map(|request| generate(&on_cpu, request).remove(0)).collect();
    let compare = |found: &Told, expected: &Told| {
        assert_eq!(found.ids, expected.ids);
        assert_eq!(found.log_probs.len(), expected.log_probs.len());
        for (found, expected) in found.log_probs.iter().zip(&expected.log_probs) {
            assert!((found - expected).abs() <= 2e-4, "{found} instead of {expected}");
        }
    };
    for (request, expected) in requests.iter().zip(&expected) {
        compare(&generate(&gpu, request).remove(0), expected);
    }
    let together: Vec<Submission> = requests
        .iter()
        .map(|request| Submission::new(&gpu, request, ptr::null()).unwrap())
        .collect();
    for (submission, expected) in together.iter().zip(&expected) {
        submission.finish(1);
        let mut result = ptr::null_mut();
        check(unsafe { xserv_submission_take_result(submission.0, &mut result) }).unwrap();
        compare(&told_by(result, 1)[0], expected);
    }
}
