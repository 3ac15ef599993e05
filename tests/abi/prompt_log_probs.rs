//! The log-probabilities of a request's prompt. The expected values are computed here, in f64, from the
//! logits that xserv_logits gives.

use std::process::Command;
use std::ptr;

use xserv::ffi::xserv_event_kind::*;
use xserv::ffi::xserv_finish_reason::*;
use xserv::ffi::*;

use crate::batching::{idle, stats, tokens, Submission};
use crate::choosing::log_softmax;
use crate::client::*;
use crate::cuda::whole_cuda;

/// The log-probabilities reported for a prompt.
#[derive(Clone, Debug, Default)]
struct Told {
    ids: Vec<u32>,
    log_probs: Vec<f32>,
    top: Vec<Vec<(u32, f32)>>,
}

fn pairs(first: *const xserv_log_prob, count: usize) -> Vec<(u32, f32)> {
    if count == 0 {
        return Vec::new();
    }
    let all = unsafe { std::slice::from_raw_parts(first, count) };
    all.iter().map(|one| (one.token_id, one.log_prob)).collect()
}

fn told_by(info: &xserv_result_info) -> Told {
    assert!(!info.prompt_tokens.is_null() && !info.prompt_log_probs.is_null());
    let count = info.num_prompt_tokens;
    let num_top = info.num_prompt_top_log_probs;
    let flat = pairs(info.prompt_top_log_probs, count * num_top);
    Told {
        ids: unsafe { std::slice::from_raw_parts(info.prompt_tokens, count) }.to_vec(),
        log_probs: unsafe { std::slice::from_raw_parts(info.prompt_log_probs, count) }.to_vec(),
        top: match num_top {
            0 => vec![Vec::new(); count],
            _ => flat.chunks(num_top).map(<[_]>::to_vec).collect(),
        },
    }
}

/// Submits a request; returns what its events and what its result tell of the prompt, and its first
/// sample's ids.
fn follow(model: &Model, request: &xserv_request) -> (Told, Told, Vec<u32>) {
    let mut options: xserv_submit_options = unsafe { std::mem::zeroed() };
    unsafe { xserv_submit_options_init(&mut options, size_of_val(&options)) };
    let kinds = [XSERV_EVENT_TOKEN, XSERV_EVENT_TEXT, XSERV_EVENT_END, XSERV_EVENT_PROMPT];
    options.events = kinds.iter().map(|kind| 1 << *kind as u32).sum();
    let submission = Submission::new(model, request, &options).unwrap();
    let mut by_events = Told::default();
    let mut num_tokens = 0;
    loop {
        let mut event: xserv_event = unsafe { std::mem::zeroed() };
        event.struct_size = size_of::<xserv_event>();
        check(unsafe { xserv_next(submission.0, XSERV_WAIT_FOREVER, &mut event) }).unwrap();
        match event.kind {
            kind if kind == XSERV_EVENT_DONE as u32 => break,
            kind if kind == XSERV_EVENT_PROMPT as u32 => {
                assert_eq!((num_tokens, event.text_len, event.sample), (0, 0, 0));
                assert_eq!(event.num_tokens as usize, by_events.ids.len() + 2);
                by_events.ids.push(event.token_id);
                by_events.log_probs.push(event.log_prob);
                let top = pairs(event.top_log_probs, event.num_top_log_probs as usize);
                by_events.top.push(top);
            }
            kind => num_tokens += usize::from(kind == XSERV_EVENT_TOKEN as u32),
        }
    }
    let mut result = ptr::null_mut();
    check(unsafe { xserv_submission_take_result(submission.0, &mut result) }).unwrap();
    let mut info: xserv_result_info = unsafe { std::mem::zeroed() };
    info.struct_size = size_of::<xserv_result_info>();
    let mut last = None;
    for sample in (0..request.num_samples as usize).rev() {
        check(unsafe { xserv_result_get_sample(result, sample, &mut info) }).unwrap();
        let told = told_by(&info);
        last = Some(told);
    }
    let ids = match info.num_tokens {
        0 => Vec::new(),
        n => unsafe { std::slice::from_raw_parts(info.token_ids, n) }.to_vec(),
    };
    xserv_result_free(result);
    (by_events, last.unwrap(), ids)
}

fn assert_told(model: &Model, prompt: &[u32], told: &Told, num_top: usize, tolerance: f64) {
    assert_eq!(told.ids, prompt);
    assert_eq!((told.log_probs.len(), told.top.len()), (prompt.len(), prompt.len()));
    assert!(told.log_probs[0].is_nan());
    assert!(told.top[0].len() == num_top && told.top[0].iter().all(|(_, it)| it.is_nan()));
    if prompt.len() == 1 {
        return;
    }
    let logits = model.logits(&prompt[..prompt.len() - 1], true).unwrap();
    let rows = logits.chunks(model.info().vocab_size as usize);
    for (index, row) in (1..).zip(rows) {
        let row: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
        let expected = log_softmax(&row);
        let close = |found: f32, id: u32| {
            let expected = expected[id as usize];
            assert!(
                (f64::from(found) - expected).abs() <= tolerance,
                "token {index}: {found} instead of {expected}"
            );
        };
        close(told.log_probs[index], prompt[index]);
        let top = &told.top[index];
        assert_eq!(top.len(), num_top);
        let mut sorted = expected.clone();
        sorted.sort_unstable_by(|a, b| b.total_cmp(a));
        for ((id, found), best) in top.iter().zip(&sorted) {
            close(*found, *id);
            assert!((f64::from(*found) - best).abs() <= tolerance, "{found} for {best}");
        }
        assert!(top.is_sorted_by(|a, b| a.1 > b.1 || (a.1 == b.1 && a.0 < b.0)), "{top:?}");
    }
}

/// Returns a model that computes a prompt in pieces.
fn in_pieces() -> Model {
    let options = xserv_load_options { max_prefill_tokens: 32, ..load_options() };
    Model::load(&tiny(), &options).unwrap()
}

#[test]
fn they_are_the_log_softmax_of_the_models_own_logits() {
    let model = in_pieces();
    for (len, num_top) in [(1, 3), (2, 0), (2, 20), (17, 1), (32, 5), (33, 5), (34, 5), (150, 20)] {
        let ids = tokens(len, len as u32);
        let usual = xserv_request { ignore_eos: 1, ..greedy(&ids, 5) };
        let request = xserv_request { num_prompt_log_probs: num_top, ..usual };
        let drawn = xserv_request { temperature: 1.0, seed: 2, num_samples: 3, ..request };
        let expected = model.generate(&usual).unwrap().ids;
        for request in [request, drawn] {
            let (by_events, by_result, generated) = follow(&model, &request);
            assert_told(&model, &ids, &by_result, num_top as usize, 1e-3);
            assert_eq!(by_events.ids, by_result.ids[1..]);
            assert_eq!(by_events.log_probs, by_result.log_probs[1..]);
            assert_eq!(by_events.top, by_result.top[1..]);
            if request.temperature == 0.0 {
                assert_eq!(generated, expected, "asking must not change the tokens");
            }
        }
    }
    let stats = idle(&model);
    assert_eq!(stats.total_submitted, stats.total_ended);
}

/// As tests of models ask for them: nothing is generated.
#[test]
fn a_prompt_alone_can_be_asked_about() {
    let model = in_pieces();
    let ids = tokens(70, 3);
    let request = xserv_request { num_prompt_log_probs: 4, ..greedy(&ids, 0) };
    let (by_events, by_result, generated) = follow(&model, &request);
    assert!(generated.is_empty());
    assert_eq!(by_events.ids.len(), 69);
    assert_told(&model, &ids, &by_result, 4, 1e-3);
    // With the logits callback, which is not asked about the prompt.
    let mut result = ptr::null_mut();
    check(unsafe { xserv_generate(model.0, &request, None, ptr::null_mut(), &mut result) })
        .unwrap();
    let mut info: xserv_result_info = unsafe { std::mem::zeroed() };
    info.struct_size = size_of::<xserv_result_info>();
    check(unsafe { xserv_result_get_info(result, &mut info) }).unwrap();
    assert_eq!(info.finish_reason, XSERV_FINISH_MAX_TOKENS as u32);
    assert_told(&model, &ids, &told_by(&info), 4, 1e-3);
    xserv_result_free(result);
}

/// Nobody hears of them unasked, and events go only to those who ask.
#[test]
fn who_does_not_ask_is_told_nothing() {
    let model = in_pieces();
    let ids = tokens(40, 4);
    let usual = xserv_request { ignore_eos: 1, ..greedy(&ids, 4) };
    let asking = xserv_request { num_prompt_log_probs: 2, ..usual };
    for (request, is_told) in [(usual, false), (asking, true)] {
        let submission = Submission::new(&model, &request, ptr::null()).unwrap();
        let mut kinds = Vec::new();
        while kinds.last() != Some(&(XSERV_EVENT_DONE as u32)) {
            kinds.push(submission.next(XSERV_WAIT_FOREVER).unwrap().kind);
        }
        assert!(!kinds.contains(&(XSERV_EVENT_PROMPT as u32)), "{kinds:?}");
        let info = submission.result(0);
        assert_eq!(info.prompt_log_probs.is_null(), !is_told);
        assert_eq!(info.prompt_tokens.is_null(), !is_told);
    }
    let refused = xserv_request { num_prompt_log_probs: 21, ..usual };
    let message = model.generate(&refused).err().unwrap().message;
    assert_eq!(message, "num_prompt_log_probs is 21, but at most 20 are given");
}

/// A request that is stopped while its prompt is computed says what it knows.
#[test]
fn a_stopped_prompt_ends_its_request() {
    let model = in_pieces();
    let ids = tokens(300, 5);
    let mut cancel = ptr::null_mut();
    check(unsafe { xserv_cancel_token_new(&mut cancel) }).unwrap();
    check(xserv_cancel_token_cancel(cancel)).unwrap();
    let request =
        xserv_request { num_prompt_log_probs: 4, num_samples: 3, cancel, ..greedy(&ids, 5) };
    assert_eq!(model.generate(&request).unwrap().finish_reason, XSERV_FINISH_CANCELLED as u32);
    xserv_cancel_token_free(cancel);
    for time_limit_ms in 1..8 {
        let request = xserv_request { cancel: ptr::null(), time_limit_ms, ..request };
        let submission = Submission::new(&model, &request, ptr::null()).unwrap();
        let ends = submission.finish(3);
        assert_eq!(ends.len(), 3);
        let mut result = ptr::null_mut();
        check(unsafe { xserv_submission_take_result(submission.0, &mut result) }).unwrap();
        let mut info: xserv_result_info = unsafe { std::mem::zeroed() };
        info.struct_size = size_of::<xserv_result_info>();
        check(unsafe { xserv_result_get_sample(result, 1, &mut info) }).unwrap();
        let log_probs = told_by(&info).log_probs;
        xserv_result_free(result);
        // Known values come before unknown ones.
        let known = log_probs.iter().skip(1).take_while(|it| !it.is_nan()).count();
        assert!(log_probs.iter().skip(1 + known).all(|it| it.is_nan()));
    }
    // Its samples count from the beginning, while only the prompt is there.
    let before = idle(&model).total_submitted;
    let submission = Submission::new(&model, &request_of(&ids), ptr::null()).unwrap();
    while stats(&model).total_submitted == before {
        std::thread::yield_now();
    }
    assert_eq!(stats(&model).total_submitted, before + 2);
    submission.finish(2);
    // One that is dropped at once, many times.
    for _ in 0..30 {
        drop(Submission::new(&model, &request_of(&ids), ptr::null()).unwrap());
    }
    let stats = idle(&model);
    assert_eq!(stats.total_submitted, stats.total_ended);
}

fn request_of(ids: &[u32]) -> xserv_request {
    xserv_request { num_prompt_log_probs: 4, num_samples: 2, ..greedy(ids, 5) }
}

/// In f32 a GPU tells what the CPU tells; and the tests of this file once more, on a GPU.
#[test]
fn cuda_tells_them_too() {
    let Some(_device) = whole_cuda() else { return };
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["prompt_log_probs::", "--skip", "cuda", "--test-threads", "1"])
        .env(TEST_ON_CUDA, "1")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}{}", String::from_utf8_lossy(&output.stderr));
    assert!(told.contains("test result: ok. 4 passed"), "{told}");
}
