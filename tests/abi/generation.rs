//! Behaviour of xserv_generate: streaming, stopping, cancelling, many threads, little memory.

use std::ffi::{c_char, CString};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use xserv::ffi::xserv_finish_reason::*;
use xserv::ffi::*;

use crate::client::*;

fn prompt(model: &Model) -> Vec<u32> {
    model.tokenize("Once upon a time").unwrap()
}

/// Returns a long greedy run: the tokens that the tests below cut short.
fn reference(model: &Model, ids: &[u32], max_tokens: u32) -> Output {
    model.generate(&xserv_request { ignore_eos: 1, ..greedy(ids, max_tokens) }).unwrap()
}

#[test]
fn text_prompt_and_ids_are_the_same_request() {
    let model = Model::open(&tiny());
    let ids = prompt(&model);
    let text = CString::new("Once upon a time").unwrap();
    let by_text =
        xserv_request { prompt: text.as_ptr(), max_tokens: 40, temperature: 0.0, ..request() };
    let by_length = xserv_request { prompt_len: 16, ..by_text };
    let expected = model.generate(&greedy(&ids, 40)).unwrap();
    assert_eq!(expected.num_prompt_tokens, ids.len());
    for request in [by_text, by_length] {
        let got = model.generate(&request).unwrap();
        assert_eq!((got.text, got.ids), (expected.text.clone(), expected.ids.clone()));
    }
    // And a conversation is its rendered text.
    let messages = r#"[{"role": "user", "content": "What is 2 plus 3?"}]"#;
    let rendered = model.apply_chat_template(messages, None, None, true).unwrap();
    let ids = model.tokenize(&rendered).unwrap();
    let messages = CString::new(messages).unwrap();
    let by_chat = xserv_request {
        messages_json: messages.as_ptr(),
        max_tokens: 40,
        temperature: 0.0,
        ..request()
    };
    assert_eq!(
        model.generate(&by_chat).unwrap().ids,
        model.generate(&greedy(&ids, 40)).unwrap().ids
    );
}

#[test]
fn events_add_up_to_the_result() {
    let model = Model::open(&tiny());
    for text in ["Once upon a time", "\u{4f60}\u{597d} \u{1f600}", "x"] {
        let ids = model.tokenize(text).unwrap();
        let mut request = greedy(&ids, 60);
        request.temperature = 1.5;
        request.seed = 11;
        let mut events = Vec::new();
        let got = model
            .stream(&request, &mut |event| {
                events.push(event);
                true
            })
            .unwrap();
        let joined: String = events.iter().map(|e| e.text.as_str()).collect();
        assert_eq!(joined, got.text);
        let tokens: Vec<u32> =
            events.iter().map(|e| e.id).filter(|id| *id != XSERV_NO_TOKEN).collect();
        assert_eq!(tokens, got.ids);
        for (i, event) in events.iter().filter(|e| e.id != XSERV_NO_TOKEN).enumerate() {
            assert_eq!(event.num_tokens as usize, i + 1);
        }
    }
}

#[test]
fn the_callback_stops_at_every_token() {
    let model = Model::open(&tiny());
    let ids = prompt(&model);
    let expected = reference(&model, &ids, 24);
    for stop_at in 1..=24u32 {
        let mut calls = 0;
        let request = xserv_request { ignore_eos: 1, ..greedy(&ids, 1000) };
        let got = model
            .stream(&request, &mut |event| {
                calls += u32::from(event.id != XSERV_NO_TOKEN);
                event.num_tokens < stop_at
            })
            .unwrap();
        assert_eq!(calls, stop_at);
        assert_eq!(got.finish_reason, XSERV_FINISH_CALLBACK as u32);
        assert_eq!(got.ids, expected.ids[..stop_at as usize]);
    }
}

#[test]
fn max_tokens_and_the_context_end_a_generation() {
    let model = Model::open(&tiny());
    let ids = prompt(&model);
    let none = model.generate(&greedy(&ids, 0)).unwrap();
    assert_eq!((none.ids.len(), none.finish_reason), (0, XSERV_FINISH_MAX_TOKENS as u32));
    drop(model);

    let options = xserv_load_options { max_context_tokens: 40, ..load_options() };
    let model = Model::load(&tiny(), &options).unwrap();
    assert_eq!(model.info().max_context_tokens, 40);
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids, XSERV_UNSET_INT) };
    let got = model.generate(&request).unwrap();
    assert_eq!(got.finish_reason, XSERV_FINISH_CONTEXT_FULL as u32);
    // Every position is used, and the logits of the last one give one token more.
    assert_eq!(ids.len() + got.ids.len(), 41);
    let long: Vec<u32> = std::iter::repeat_n(ids[0], 41).collect();
    let failure = model.generate(&greedy(&long, 1)).unwrap_err();
    assert_eq!(failure.status, Status::XSERV_STATUS_CONTEXT_FULL);
    assert!(failure.message.contains("41") && failure.message.contains("40"), "{failure:?}");
    assert_eq!(model.generate(&greedy(&long[..40], 5)).unwrap().ids.len(), 1);
}

fn with_stop_strings(model: &Model, ids: &[u32], stops: &[&str]) -> (Output, String) {
    let strings: Vec<CString> = stops.iter().map(c_string).collect();
    let pointers: Vec<*const c_char> = strings.iter().map(|s| s.as_ptr()).collect();
    let request = xserv_request {
        stop_strings: pointers.as_ptr(),
        num_stop_strings: pointers.len(),
        ignore_eos: 1,
        ..greedy(ids, 60)
    };
    let mut streamed = String::new();
    let got = model
        .stream(&request, &mut |event| {
            streamed.push_str(&event.text);
            true
        })
        .unwrap();
    (got, streamed)
}

#[test]
fn stop_strings_end_the_text_and_never_leak() {
    let model = Model::open(&tiny());
    let ids = prompt(&model);
    let full = reference(&model, &ids, 60).text;
    let characters: Vec<(usize, char)> = full.char_indices().collect();
    // Every stretch of 1, 3, 7 and 15 characters, so those that cross tokens are among them.
    let mut crossed = 0;
    for len in [1, 3, 7, 15] {
        for start in (0..characters.len().saturating_sub(len)).step_by(3) {
            let end = characters.get(start + len).map_or(full.len(), |c| c.0);
            let stop = &full[characters[start].0..end];
            let (got, streamed) = with_stop_strings(&model, &ids, &[stop, "\u{1f680}never"]);
            assert_eq!(got.finish_reason, XSERV_FINISH_STOP_STRING as u32, "{stop:?}");
            assert_eq!(got.text, full[..full.find(stop).unwrap()], "{stop:?}");
            assert_eq!(streamed, got.text, "{stop:?}");
            crossed += usize::from(len > 7);
        }
    }
    assert!(crossed > 5);
    // One that never comes changes nothing, though its beginning is held back.
    let beginning: String = full.chars().take(4).collect();
    let (got, streamed) = with_stop_strings(&model, &ids, &[&format!("{beginning}\u{1}")]);
    assert_eq!(got.text, full);
    assert_eq!(streamed, full);
}

#[test]
fn stop_tokens_end_a_generation() {
    let model = Model::open(&tiny());
    let ids = prompt(&model);
    let full = reference(&model, &ids, 20);
    let stop = [full.ids[7]];
    let request =
        xserv_request { stop_token_ids: stop.as_ptr(), num_stop_token_ids: 1, ..greedy(&ids, 60) };
    let got = model.generate(&request).unwrap();
    let first = full.ids.iter().position(|id| *id == stop[0]).unwrap();
    assert_eq!(got.ids, full.ids[..=first]);
    assert_eq!(got.finish_reason, XSERV_FINISH_STOP_TOKEN as u32);
    assert_eq!(got.text, model.detokenize(&full.ids[..first], true).unwrap());
}

#[test]
fn the_same_seed_gives_the_same_tokens() {
    let model = Model::open(&tiny());
    let ids = prompt(&model);
    let sampled = |seed: u64| {
        let request =
            xserv_request { seed, temperature: 1.0, top_k: 0, top_p: 1.0, ..greedy(&ids, 30) };
        model.generate(&request).unwrap()
    };
    let first = sampled(5);
    assert_eq!(first.seed, 5);
    assert_eq!(first, sampled(5));
    let others: Vec<Vec<u32>> = (6..12).map(|seed| sampled(seed).ids).collect();
    assert!(others.iter().any(|ids| *ids != first.ids));
    // A drawn seed is told, and can be used again.
    let drawn = sampled(XSERV_SEED_RANDOM);
    assert_ne!(drawn.seed, XSERV_SEED_RANDOM);
    assert_eq!(drawn, sampled(drawn.seed));
}

#[test]
fn threads_get_what_they_would_get_alone() {
    let model = Model::open(&tiny());
    let ids = prompt(&model);
    let alone: Vec<Output> =
        (0..8).map(|i| reference(&model, &ids[..1 + i % ids.len()], 30)).collect();
    std::thread::scope(|scope| {
        for (i, expected) in alone.iter().enumerate() {
            let (model, ids) = (&model, &ids);
            scope.spawn(move || {
                for _ in 0..3 {
                    let got = reference(model, &ids[..1 + i % ids.len()], 30);
                    assert_eq!((&got.ids, &got.text), (&expected.ids, &expected.text));
                }
            });
        }
    });
}

#[test]
fn a_small_cache_preempts_and_changes_nothing() {
    let large = Model::open(&tiny());
    let ids = prompt(&large);
    let options =
        xserv_load_options { kv_cache_tokens: 96, max_context_tokens: 96, ..load_options() };
    let small = Model::load(&tiny(), &options).unwrap();
    assert_eq!(small.info().kv_cache_tokens, 96);
    // Four at a time need 4 x 80 positions of the 96.
    let expected: Vec<Output> = (0..4).map(|i| reference(&large, &ids[i % 2..], 72)).collect();
    std::thread::scope(|scope| {
        for (i, expected) in expected.iter().enumerate() {
            let (small, ids) = (&small, &ids);
            scope.spawn(move || assert_eq!(reference(small, &ids[i % 2..], 72).ids, expected.ids));
        }
    });
}

/// Three prompts of two chunks each, of which the cache holds one: each must get its turn to the end.
/// (Evicting the one that was served longest ago let none of them ever finish.)
#[test]
fn long_prompts_in_a_small_cache_all_finish() {
    let large = Model::open(&tiny());
    let options =
        xserv_load_options { kv_cache_tokens: 640, max_context_tokens: 640, ..load_options() };
    let small = Model::load(&tiny(), &options).unwrap();
    let vocab_size = small.info().vocab_size;
    let prompts: Vec<Vec<u32>> = (0..3u32)
        .map(|k| (0..530u32).map(|i| (i * (7 + k) + 13 * k) % (vocab_size - 30)).collect())
        .collect();
    let expected: Vec<Output> = prompts.iter().map(|ids| reference(&large, ids, 4)).collect();
    std::thread::scope(|scope| {
        for (ids, expected) in prompts.iter().zip(&expected) {
            let small = &small;
            scope.spawn(move || assert_eq!(reference(small, ids, 4).ids, expected.ids));
            scope.spawn(move || small.logits(ids, true).unwrap());
        }
    });
}

#[test]
fn a_callback_that_said_stop_is_not_called_again() {
    let model = Model::open(&tiny());
    // A token that ends in the middle of a character, so that text is held back.
    let you = model.tokenize("你").unwrap();
    assert!(you.len() > 1, "the character is one token");
    let messages =
        CString::new(r#"[{"role": "user", "content": "Say hello in Chinese."}]"#).unwrap();
    let request = xserv_request { messages_json: messages.as_ptr(), temperature: 0.0, ..request() };
    assert!(model.generate(&request).unwrap().text.contains('你'));
    let mut calls = 0;
    let got = model
        .stream(&request, &mut |event| {
            calls += 1;
            !you[..you.len() - 1].contains(&event.id)
        })
        .unwrap();
    assert_eq!(got.finish_reason, XSERV_FINISH_CALLBACK as u32);
    assert_eq!(calls, got.ids.len());
}

#[test]
fn a_request_that_is_cancelled_beforehand_does_nothing() {
    let model = Model::open(&tiny());
    let mut token = ptr::null_mut();
    check(unsafe { xserv_cancel_token_new(&mut token) }).unwrap();
    check(xserv_cancel_token_cancel(token)).unwrap();
    let text = CString::new("word ".repeat(100_000)).unwrap();
    let request =
        xserv_request { prompt: text.as_ptr(), cancel: token, max_tokens: 0, ..request() };
    let got = model.generate(&request).unwrap();
    assert_eq!(got.finish_reason, XSERV_FINISH_CANCELLED as u32);
    xserv_cancel_token_free(token);
}

#[test]
fn the_callback_may_call_the_library_on_the_same_model() {
    let model = Model::open(&tiny());
    let ids = prompt(&model);
    let expected = reference(&model, &ids, 12);
    let mut inner = Vec::new();
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids, 12) };
    let got = model
        .stream(&request, &mut |event| {
            if event.num_tokens % 4 == 0 {
                inner.push(reference(&model, &ids, 12).ids);
                model.tokenize("again").unwrap();
                model.logits(&ids, false).unwrap();
                model.info();
            }
            true
        })
        .unwrap();
    assert_eq!(got.ids, expected.ids);
    assert_eq!(inner, vec![expected.ids.clone(); 3]);
}

/// The outer request holds the blocks that the inner one needs, and waits for it.
#[test]
fn the_callback_may_call_the_library_when_the_cache_is_full() {
    let large = Model::open(&tiny());
    let options =
        xserv_load_options { kv_cache_tokens: 64, max_context_tokens: 64, ..load_options() };
    let small = Model::load(&tiny(), &options).unwrap();
    let ids = prompt(&large);
    let expected = reference(&large, &ids, 50);
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids, 50) };
    let mut inner = Vec::new();
    let got = small
        .stream(&request, &mut |event| {
            if event.num_tokens == 40 {
                inner = reference(&small, &ids, 50).ids;
            }
            true
        })
        .unwrap();
    assert_eq!(got.ids, expected.ids);
    assert_eq!(inner, expected.ids);
}

#[test]
fn another_thread_cancels() {
    let model = Model::open(&tiny());
    let ids = prompt(&model);
    let mut token = ptr::null_mut();
    check(unsafe { xserv_cancel_token_new(&mut token) }).unwrap();
    let request = xserv_request { cancel: token, ignore_eos: 1, ..greedy(&ids, XSERV_UNSET_INT) };
    let started = AtomicBool::new(false);
    let address = token.addr();
    let got = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !started.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            let token = ptr::with_exposed_provenance::<xserv_cancel_token>(address);
            check(xserv_cancel_token_cancel(token)).unwrap();
        });
        let mut after_cancel = 0;
        model
            .stream(&request, &mut |event| {
                started.store(event.num_tokens >= 3, Ordering::Release);
                after_cancel += 1;
                true
            })
            .unwrap()
    });
    assert_eq!(got.finish_reason, XSERV_FINISH_CANCELLED as u32);
    assert!(got.ids.len() >= 3);
    assert_eq!(got.ids, reference(&model, &ids, got.ids.len() as u32).ids);
    // The token stays thrown; freeing it does not.
    let again = model.generate(&request).unwrap();
    assert_eq!((again.ids.len(), again.finish_reason), (0, XSERV_FINISH_CANCELLED as u32));
    xserv_cancel_token_free(token);
    let failure = model.generate(&request).unwrap_err();
    assert_eq!(failure.status, Status::XSERV_STATUS_BAD_HANDLE);
}

#[test]
fn freeing_a_model_ends_its_requests() {
    let model = Model::open(&tiny());
    let ids = prompt(&model);
    let tokens = model.tokenize("still here").unwrap();
    let request = xserv_request { ignore_eos: 1, ..greedy(&ids, XSERV_UNSET_INT) };
    let got = model
        .stream(&request, &mut |event| {
            if event.num_tokens == 5 {
                xserv_model_free(model.0);
            }
            true
        })
        .unwrap();
    assert_eq!(got.finish_reason, XSERV_FINISH_CANCELLED as u32);
    assert_eq!(got.ids.len(), 5);
    assert!(!tokens.is_empty());
    assert_eq!(model.generate(&request).unwrap_err().status, Status::XSERV_STATUS_BAD_HANDLE);
}

#[test]
fn threads_do_not_change_results() {
    let one =
        Model::load(&tiny(), &xserv_load_options { num_threads: 1, ..load_options() }).unwrap();
    let ids = prompt(&one);
    let expected = one.logits(&ids, true).unwrap();
    for num_threads in [2, 3, 7] {
        let options = xserv_load_options { num_threads, ..load_options() };
        let model = Model::load(&tiny(), &options).unwrap();
        assert_eq!(model.info().num_threads, num_threads);
        assert_eq!(model.logits(&ids, true).unwrap(), expected, "{num_threads} threads");
    }
}

#[test]
fn mapped_files_give_the_same_weights() {
    let read = Model::open(&tiny());
    let mapped =
        Model::load(&tiny(), &xserv_load_options { map_files: 1, ..load_options() }).unwrap();
    let ids = prompt(&read);
    assert_eq!(read.logits(&ids, true).unwrap(), mapped.logits(&ids, true).unwrap());
}

#[test]
fn load_and_free_again_and_again() {
    for _ in 0..20 {
        let model = Model::open(&tiny());
        let ids = prompt(&model);
        assert_eq!(reference(&model, &ids, 3).ids.len(), 3);
    }
}
