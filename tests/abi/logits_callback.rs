//! Callbacks that change the logits before a token is chosen.

use std::ffi::c_void;
use std::process::Command;
use std::ptr;
use std::time::{Duration, Instant};

use xserv::ffi::xserv_finish_reason::*;
use xserv::ffi::*;

use crate::batching::{idle, mixed, tokens, PATIENCE};
use crate::client::*;
use crate::cuda::whole_cuda;

/// The arguments of a callback.
struct Asked<'a> {
    sample: u32,
    prompt: &'a [u32],
    ids: &'a [u32],
    logits: &'a mut [f32],
}

type OnLogits<'a> = Box<dyn FnMut(Asked<'_>) -> bool + 'a>;

unsafe extern "C" fn on_logits(event: *const xserv_logits_event, user_data: *mut c_void) -> bool {
    let event = unsafe { &*event };
    assert_eq!(event.struct_size, size_of::<xserv_logits_event>());
    let on = unsafe { &mut *(user_data as *mut OnLogits<'_>) };
    let asked = unsafe {
        Asked {
            sample: event.sample,
            prompt: std::slice::from_raw_parts(event.prompt_tokens, event.num_prompt_tokens),
            ids: std::slice::from_raw_parts(event.token_ids, event.num_tokens as usize),
            logits: std::slice::from_raw_parts_mut(event.logits, event.vocab_size),
        }
    };
    on(asked)
}

/// Generates with a callback.
fn generate<'a>(
    model: &Model,
    request: &xserv_request,
    on: impl FnMut(Asked<'_>) -> bool + 'a,
) -> Outcome<Output> {
    let mut on: OnLogits<'a> = Box::new(on);
    model.generate(&xserv_request {
        logits_callback: Some(on_logits),
        logits_user_data: &raw mut on as *mut c_void,
        ..*request
    })
}

fn argmax(row: &[f32]) -> u32 {
    (0..row.len()).rev().max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as u32
}

/// Whatever is asked for besides: a callback that changes nothing leaves the tokens as they are.
#[test]
fn a_callback_that_changes_nothing_changes_nothing() {
    let model = Model::open(&tiny());
    let ids = tokens(40, 1);
    for index in 0..12 {
        let request = mixed(&ids, index);
        if std::env::var_os(TEST_ON_CUDA).is_some() && request.temperature != 0.0 {
            // A GPU draws by itself, with other random numbers.
            continue;
        }
        let expected = model.generate(&request).unwrap();
        let mut num_calls = 0;
        let found = generate(&model, &request, |asked| {
            assert_eq!(asked.prompt, ids);
            num_calls += 1;
            true
        });
        let found = found.unwrap();
        assert_eq!(found.ids, expected.ids, "request {index}");
        assert_eq!((found.text, found.finish_reason), (expected.text, expected.finish_reason));
        assert!(num_calls >= found.ids.len());
    }
}

#[test]
fn it_sees_the_models_own_logits_and_the_tokens_so_far() {
    let model = Model::open(&tiny());
    let ids = tokens(30, 2);
    let bias = [xserv_logit_bias { token_id: 3, bias: 2.0 }];
    let request = xserv_request {
        ignore_eos: 1,
        temperature: 0.9,
        seed: 11,
        repetition_penalty: 1.2,
        logit_bias: bias.as_ptr(),
        num_logit_bias: 1,
        ..greedy(&ids, 10)
    };
    let mut seen: Vec<(Vec<u32>, Vec<f32>)> = Vec::new();
    let found = generate(&model, &request, |asked| {
        assert_eq!((asked.sample, asked.prompt), (0, &*ids));
        seen.push((asked.ids.to_vec(), asked.logits.to_vec()));
        true
    });
    let found = found.unwrap().ids;
    assert_eq!(seen.len(), found.len());
    for (index, (so_far, logits)) in seen.iter().enumerate() {
        assert_eq!(*so_far, found[..index]);
        let expected = model.logits(&[&ids, &found[..index]].concat(), false).unwrap();
        let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
        for (found, expected) in logits.iter().zip(&expected) {
            assert!((found - expected).abs() <= 1e-2 * largest, "{found} and {expected}");
        }
    }
}

/// The least likely token is chosen each time; minus infinity bans.
#[test]
fn what_it_leaves_decides() {
    let model = Model::open(&tiny());
    let ids = tokens(25, 3);
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids, 12) };
    let drawn = xserv_request { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 3, ..request };
    for request in [request, drawn] {
        let mut expected = Vec::new();
        let found = generate(&model, &request, |asked| {
            asked.logits.iter_mut().for_each(|logit| *logit = -*logit);
            let wanted = argmax(asked.logits);
            expected.push(wanted);
            for (id, logit) in asked.logits.iter_mut().enumerate() {
                if id as u32 != wanted {
                    *logit = f32::NEG_INFINITY;
                }
            }
            true
        });
        assert_eq!(found.unwrap().ids, expected);
    }
    // Biases, penalties and log-probabilities go by what it leaves.
    let bias = [xserv_logit_bias { token_id: 40, bias: 5.0 }];
    let request = xserv_request {
        logit_bias: bias.as_ptr(),
        num_logit_bias: 1,
        presence_penalty: 2.5,
        ..request
    };
    let found = generate(&model, &xserv_request { max_tokens: 4, ..request }, |asked| {
        asked.logits.fill(0.0);
        asked.logits[50] = 4.0;
        true
    });
    // 5 against 4; then 2.5 against 4; then 2.5 against 1.5; then 2.5 (penalised once) again.
    assert_eq!(found.unwrap().ids, [40, 50, 40, 40]);
}

#[test]
fn samples_are_asked_about_each() {
    let model = Model::open(&tiny());
    let ids = tokens(25, 4);
    let request = xserv_request { num_samples: 5, ignore_eos: 1, ..greedy(&ids, 9) };
    let mut counts = [0; 5];
    let mut on: OnLogits<'_> = Box::new(|asked| {
        let sample = asked.sample as usize;
        assert_eq!(asked.ids.len(), counts[sample]);
        counts[sample] += 1;
        asked.logits[100 + sample] = 1e3;
        true
    });
    let request = xserv_request {
        logits_callback: Some(on_logits),
        logits_user_data: &raw mut on as *mut c_void,
        ..request
    };
    let mut result = ptr::null_mut();
    check(unsafe { xserv_generate(model.0, &request, None, ptr::null_mut(), &mut result) })
        .unwrap();
    for sample in 0..5 {
        let mut info: xserv_result_info = unsafe { std::mem::zeroed() };
        info.struct_size = size_of::<xserv_result_info>();
        check(unsafe { xserv_result_get_sample(result, sample, &mut info) }).unwrap();
        let found = unsafe { std::slice::from_raw_parts(info.token_ids, info.num_tokens) };
        assert_eq!(found, [100 + sample as u32; 9]);
    }
    xserv_result_free(result);
    drop(on);
    assert_eq!(counts, [9; 5]);
}

#[test]
fn false_stops_as_the_token_callback_does() {
    let model = Model::open(&tiny());
    let ids = tokens(25, 5);
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids, 50) };
    for stop_at in [0, 1, 7] {
        let mut num_calls = 0;
        let found = generate(&model, &request, |asked| {
            num_calls += 1;
            asked.ids.len() < stop_at
        });
        let found = found.unwrap();
        assert_eq!((found.ids.len(), num_calls), (stop_at, stop_at + 1));
        assert_eq!(found.finish_reason, XSERV_FINISH_CALLBACK as u32);
    }
    let stats = idle(&model);
    assert_eq!(stats.total_submitted, stats.total_ended);
}

#[test]
fn logits_that_are_none_are_refused() {
    let model = Model::open(&tiny());
    let ids = tokens(25, 6);
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids, 50) };
    for (wrong, sentence) in [
        (f32::NAN, "the logits callback left NaN for token 17"),
        (f32::INFINITY, "the logits callback left inf for token 17"),
    ] {
        let failed = generate(&model, &request, |asked| {
            asked.logits[17] = if asked.ids.len() == 3 { wrong } else { 0.0 };
            true
        });
        let Failure { status, message } = failed.err().unwrap();
        assert_eq!(status, xserv_status::XSERV_STATUS_INVALID_ARGUMENT);
        assert!(message.starts_with(sentence), "{message}");
    }
    let failed = generate(&model, &request, |asked| {
        asked.logits.fill(f32::NEG_INFINITY);
        true
    });
    let message = failed.err().unwrap().message;
    assert!(message.contains("banned every token"), "{message}");
    // A submission has no thread of the host's.
    let refused = xserv_request { logits_callback: Some(on_logits), ..request };
    let mut submission = ptr::null_mut();
    let status = unsafe { xserv_submit(model.0, &refused, ptr::null(), &mut submission) };
    let Failure { status, message } = check(status).err().unwrap();
    assert_eq!(status, xserv_status::XSERV_STATUS_INVALID_ARGUMENT);
    assert!(message.contains("logits_callback is for xserv_generate()"), "{message}");
    assert_eq!(model.generate(&request).unwrap().ids.len(), 50);
    let stats = idle(&model);
    assert_eq!(stats.total_submitted, stats.total_ended);
}

/// It may use the model itself, and others are computed while it runs.
#[test]
fn a_callback_holds_up_nobody_else() {
    let model = Model::open(&tiny());
    let ids = tokens(25, 7);
    let usual = || xserv_request { ignore_eos: 1, ..greedy(&ids, 6) };
    let request = usual();
    let expected = model.generate(&request).unwrap().ids;
    let found = generate(&model, &request, |asked| {
        if asked.ids.len() == 2 {
            // On this thread, and on another one.
            assert_eq!(model.generate(&request).unwrap().ids, expected);
            std::thread::scope(|scope| {
                let other = scope.spawn(|| model.generate(&usual()).unwrap().ids);
                assert_eq!(other.join().unwrap(), expected);
            });
        }
        true
    });
    assert_eq!(found.unwrap().ids, expected);
}

/// A sequence that waits for its host keeps its KV blocks, or loses them and is recomputed; either way its
/// tokens are the same, and others get their turn.
#[test]
fn waiting_for_the_host_is_no_deadlock() {
    let options = xserv_load_options { kv_cache_tokens: 96, ..load_options() };
    let model = Model::load(&tiny(), &options).unwrap();
    let prompts: Vec<Vec<u32>> = (0..6).map(|salt| tokens(30, salt)).collect();
    let expected: Vec<Vec<u32>> = prompts
        .iter()
        .map(|ids| model.generate(&xserv_request { ignore_eos: 1, ..greedy(ids, 30) }).unwrap().ids)
        .collect();
    std::thread::scope(|scope| {
        for (index, (ids, expected)) in prompts.iter().zip(&expected).enumerate() {
            let model = &model;
            scope.spawn(move || {
                let priority = (index % 3) as i32;
                let request = xserv_request { ignore_eos: 1, priority, ..greedy(ids, 30) };
                for round in 0..4 {
                    let found = match (index + round) % 2 {
                        0 => model.generate(&request).unwrap(),
                        _ => generate(model, &request, |asked| {
                            if asked.ids.len() % 10 == 0 {
                                std::thread::sleep(Duration::from_millis(3));
                            }
                            true
                        })
                        .unwrap(),
                    };
                    assert_eq!(found.ids, *expected, "prompt {index}, round {round}");
                }
            });
        }
    });
    let stats = idle(&model);
    assert_eq!(stats.total_submitted, stats.total_ended);
}

/// A time limit and a cancel token end the request also while the host thinks.
#[test]
fn limits_hold_while_the_host_thinks() {
    let model = Model::open(&tiny());
    let ids = tokens(25, 9);
    let request = xserv_request { ignore_eos: 1, time_limit_ms: 60, ..greedy(&ids, 500) };
    let begun = Instant::now();
    let found = generate(&model, &request, |_| {
        std::thread::sleep(Duration::from_millis(25));
        true
    });
    let found = found.unwrap();
    assert_eq!(found.finish_reason, XSERV_FINISH_DEADLINE as u32);
    assert!(found.ids.len() < 500 && begun.elapsed() < PATIENCE);
    let mut cancel = ptr::null_mut();
    check(unsafe { xserv_cancel_token_new(&mut cancel) }).unwrap();
    let request = xserv_request { cancel, time_limit_ms: 0, ..request };
    let found = generate(&model, &request, |asked| {
        if asked.ids.len() == 4 {
            check(xserv_cancel_token_cancel(cancel)).unwrap();
        }
        true
    });
    let found = found.unwrap();
    xserv_cancel_token_free(cancel);
    assert_eq!(found.finish_reason, XSERV_FINISH_CANCELLED as u32);
    assert_eq!(found.ids.len(), 4);
    let stats = idle(&model);
    assert_eq!(stats.total_submitted, stats.total_ended);
}

/// The tests of this file once more, on a GPU.
#[test]
fn cuda_asks_its_host_too() {
    let Some(_device) = whole_cuda() else { return };
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["logits_callback::", "--skip", "cuda", "--test-threads", "1"])
        .env(TEST_ON_CUDA, "1")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}{}", String::from_utf8_lossy(&output.stderr));
    assert!(told.contains("test result: ok. 9 passed"), "{told}");
}
