//! Wrong arguments: a status and one sentence that names the argument, for every function; and the next
//! valid call works.

use std::ffi::{c_char, c_void, CString};
use std::ptr;
use std::sync::Mutex;

use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;

/// Fails with this status, and says something that has these words.
#[track_caller]
fn fails(status: xserv_status, expected: xserv_status, words: &str) {
    assert_eq!(status, expected, "{}", last_error());
    assert!(last_error().contains(words), "{:?} does not say {words:?}", last_error());
}

/// Not aligned for any struct.
fn misaligned<T>() -> *mut T {
    static SPACE: [u64; 64] = [0; 64];
    (&raw const SPACE as usize + 1) as *mut T
}

#[test]
fn pointers_that_are_null_or_misaligned() {
    let model = Model::open(&tiny());
    let m = model.0;
    let text = c"hello";
    let bad = XSERV_STATUS_INVALID_ARGUMENT;
    let ids = [1u32, 2];
    unsafe {
        let mut out_model = ptr::null_mut();
        fails(xserv_load(ptr::null(), ptr::null(), &mut out_model), bad, "path is NULL");
        fails(xserv_load(text.as_ptr(), ptr::null(), ptr::null_mut()), bad, "model is NULL");
        fails(
            xserv_load(text.as_ptr(), misaligned(), &mut out_model),
            bad,
            "options is misaligned",
        );
        fails(xserv_load(text.as_ptr(), ptr::null(), misaligned()), bad, "model is misaligned");
        assert!(out_model.is_null());
        // Nothing is written, and nothing can fail.
        xserv_load_options_init(ptr::null_mut(), 104);
        xserv_request_init(ptr::null_mut(), 0);
        xserv_chat_options_init(misaligned(), 40);
        fails(xserv_model_get_info(m, ptr::null_mut()), bad, "info is NULL");
        fails(xserv_model_get_info(ptr::null(), ptr::null_mut()), bad, "model is NULL");
        let mut tokens = ptr::null_mut();
        fails(xserv_tokenize(m, ptr::null(), 5, ptr::null(), &mut tokens), bad, "text is NULL");
        let len = XSERV_NUL_TERMINATED;
        fails(xserv_tokenize(m, ptr::null(), len, ptr::null(), &mut tokens), bad, "text is NULL");
        fails(
            xserv_tokenize(m, text.as_ptr(), len - 1, ptr::null(), &mut tokens),
            bad,
            "is impossible",
        );
        fails(xserv_tokenize(m, text.as_ptr(), 5, ptr::null(), ptr::null_mut()), bad, "tokens is");
        // Length 0 ignores the pointer.
        check(xserv_tokenize(m, ptr::null(), 0, ptr::null(), &mut tokens)).unwrap();
        let mut count = 7;
        assert!(!xserv_tokens_data(tokens, &mut count).is_null());
        assert_eq!(count, 0);
        xserv_tokens_free(tokens);
        let mut out = ptr::null_mut();
        fails(xserv_detokenize(m, ptr::null(), 3, true, &mut out), bad, "token_ids is NULL");
        fails(xserv_detokenize(m, misaligned(), 3, true, &mut out), bad, "token_ids is misaligned");
        fails(xserv_detokenize(m, ids.as_ptr(), 2, true, ptr::null_mut()), bad, "text is NULL");
        fails(xserv_detokenize(m, ids.as_ptr(), usize::MAX / 4, true, &mut out), bad, "impossible");
        fails(xserv_detokenizer_new(m, true, ptr::null_mut()), bad, "detokenizer is NULL");
        fails(xserv_apply_chat_template(m, ptr::null(), &mut out), bad, "messages_json is NULL");
        let mut logits = [0f32; 4];
        let rows = logits_options(xserv_logits_rows::XSERV_LOGITS_ALL as u32);
        let all: *const xserv_logits_options = &rows;
        let p = logits.as_mut_ptr();
        fails(xserv_logits(m, ids.as_ptr(), 2, all, p, 4), bad, "num_logits is 4");
        fails(xserv_logits(m, ids.as_ptr(), 2, &logits_options(9), p, 4), bad, "options.rows is 9");
        fails(xserv_logits(m, ids.as_ptr(), usize::MAX, all, p, 4), bad, "");
        let n = 2 * model.info().vocab_size as usize;
        fails(xserv_logits(m, ids.as_ptr(), 2, all, ptr::null_mut(), n), bad, "logits is NULL");
        fails(
            xserv_generate(m, ptr::null(), None, ptr::null_mut(), ptr::null_mut()),
            bad,
            "request is NULL",
        );
        fails(xserv_cancel_token_new(ptr::null_mut()), bad, "cancel_token is NULL");
        fails(xserv_cancel_token_cancel(ptr::null()), bad, "cancel token is NULL");
        let mut inspection = ptr::null_mut();
        fails(xserv_inspect(ptr::null(), &mut inspection), bad, "path is NULL");
        fails(xserv_inspect(text.as_ptr(), ptr::null_mut()), bad, "inspection is NULL");
    }
    assert!(model.tokenize("").unwrap().is_empty());
}

#[test]
fn handles_that_are_forged_freed_or_of_another_kind() {
    let model = Model::open(&tiny());
    let bad = XSERV_STATUS_BAD_HANDLE;
    let mut info: xserv_model_info = unsafe { std::mem::zeroed() };
    info.struct_size = size_of::<xserv_model_info>();
    unsafe {
        fails(xserv_model_get_info(forged(), &mut info), bad, "model");
        let mut tokens = ptr::null_mut();
        check(xserv_tokenize(model.0, c"a".as_ptr(), 1, ptr::null(), &mut tokens)).unwrap();
        // A list of tokens is no model, and no text.
        fails(xserv_model_get_info(tokens.cast(), &mut info), bad, "model");
        assert!(xserv_text_data(tokens.cast(), ptr::null_mut()).is_null());
        assert!(last_error().contains("text"), "{}", last_error());
        xserv_tokens_free(tokens);
        assert!(xserv_tokens_data(tokens, ptr::null_mut()).is_null());
        // Freed twice, and freed as something else: nothing happens.
        xserv_tokens_free(tokens);
        xserv_text_free(model.0.cast());
        xserv_result_free(forged());
        xserv_inspection_free(forged());
        xserv_detokenizer_free(forged());
        xserv_cancel_token_free(forged());
        xserv_model_free(forged());
        xserv_model_free(ptr::null_mut());
        xserv_tokens_free(ptr::null_mut());
        xserv_text_free(ptr::null_mut());
        xserv_result_free(ptr::null_mut());
        xserv_detokenizer_free(ptr::null_mut());
        xserv_inspection_free(ptr::null_mut());
        xserv_cancel_token_free(ptr::null_mut());
        let (mut text, mut len) = (ptr::null(), 0);
        fails(xserv_detokenizer_push(forged(), 1, &mut text, &mut len), bad, "detokenizer");
        fails(xserv_detokenizer_finish(forged(), &mut text, &mut len), bad, "detokenizer");
        assert!(xserv_result_text(forged()).is_null());
        let mut result: xserv_result_info = std::mem::zeroed();
        result.struct_size = size_of::<xserv_result_info>();
        fails(xserv_result_get_info(forged(), &mut result), bad, "result");
        let mut found: xserv_inspection_info = std::mem::zeroed();
        found.struct_size = size_of::<xserv_inspection_info>();
        fails(xserv_inspection_get_info(forged(), &mut found), bad, "inspection");
    }
    let ids = model.tokenize("Once").unwrap();
    let request = xserv_request { cancel: forged(), ..greedy(&ids, 1) };
    assert_eq!(model.generate(&request).unwrap_err().status, bad);
    model.generate(&greedy(&ids, 1)).unwrap();
}

#[test]
fn struct_sizes() {
    let model = Model::open(&tiny());
    let ids = model.tokenize("Once").unwrap();
    for struct_size in [0, 1, 7, 8, 64, size_of::<xserv_request>() + 8, 1 << 40, usize::MAX] {
        let request = xserv_request { struct_size, ..greedy(&ids, 1) };
        let failure = model.generate(&request).unwrap_err();
        assert_eq!(failure.status, XSERV_STATUS_INVALID_ARGUMENT);
        assert!(failure.message.contains("struct_size"), "{failure:?}");
        let mut info: xserv_model_info = unsafe { std::mem::zeroed() };
        info.struct_size = struct_size;
        let status = unsafe { xserv_model_get_info(model.0, &mut info) };
        fails(status, XSERV_STATUS_INVALID_ARGUMENT, "struct_size");
        assert!(info.architecture.is_null(), "written on failure");
    }
}

#[test]
fn options_of_load() {
    let fails_with = |options: xserv_load_options, status: xserv_status, words: &str| {
        let failure = Model::load(&tiny(), &options).err().expect(words);
        assert_eq!(failure.status, status, "{failure:?}");
        assert!(failure.message.contains(words), "{failure:?}");
    };
    let bad = XSERV_STATUS_INVALID_ARGUMENT;
    let base = load_options();
    fails_with(xserv_load_options { device_kind: 77, ..base }, bad, "options.device_kind is 77");
    if xserv::backend::cuda::available().is_err() {
        fails_with(xserv_load_options { device_kind: 1, ..base }, XSERV_STATUS_NO_DEVICE, "CUDA");
    }
    fails_with(xserv_load_options { dtype: 9, ..base }, bad, "options.dtype is 9");
    fails_with(xserv_load_options { num_threads: 5000, ..base }, bad, "num_threads is 5000");
    fails_with(xserv_load_options { map_files: 2, ..base }, bad, "map_files");
    fails_with(
        xserv_load_options { max_context_tokens: u64::MAX, ..base },
        bad,
        "max_context_tokens",
    );
    let memory = XSERV_STATUS_OUT_OF_MEMORY;
    fails_with(xserv_load_options { max_memory_bytes: 1000, ..base }, memory, "max_memory_bytes");
    fails_with(xserv_load_options { kv_cache_tokens: u64::MAX, ..base }, memory, "");
    fails_with(xserv_load_options { kv_cache_tokens: 1 << 45, ..base }, memory, "");
}

#[test]
fn a_load_can_be_cancelled_and_reports_progress() {
    unsafe extern "C" fn stop(_: f32, _: *mut c_void) -> bool {
        false
    }
    unsafe extern "C" fn note(fraction: f32, seen: *mut c_void) -> bool {
        unsafe { &mut *(seen as *mut Vec<f32>) }.push(fraction);
        true
    }
    let options = xserv_load_options { progress: Some(stop), ..load_options() };
    let failure = Model::load(&tiny(), &options).err().unwrap();
    assert_eq!(failure.status, XSERV_STATUS_CANCELLED);
    let mut seen: Vec<f32> = Vec::new();
    let options = xserv_load_options {
        progress: Some(note),
        progress_user_data: &raw mut seen as *mut c_void,
        ..load_options()
    };
    Model::load(&tiny(), &options).unwrap();
    assert!(seen.is_sorted(), "{seen:?}");
    assert_eq!(seen.last(), Some(&1.0));
}

type Logged = Mutex<Vec<(u32, String, String)>>;

unsafe extern "C" fn note_log(
    level: u32,
    target: *const c_char,
    message: *const c_char,
    seen: *mut c_void,
) {
    let text = |p| unsafe { std::ffi::CStr::from_ptr(p) }.to_str().unwrap().to_string();
    let seen = unsafe { &*(seen as *const Logged) };
    seen.lock().unwrap().push((level, text(target), text(message)));
}

#[test]
fn the_log_goes_to_the_callback() {
    let seen = Logged::default();
    let options = xserv_load_options {
        log: Some(note_log),
        log_user_data: &raw const seen as *mut c_void,
        ..load_options()
    };
    drop(Model::load(&tiny(), &options).unwrap());
    let seen = seen.into_inner().unwrap();
    let loaded = seen.iter().any(|(level, target, message)| {
        let is_info = *level == xserv_log_level::XSERV_LOG_INFO as u32;
        is_info && target == "load" && message.contains("ForCausalLM")
    });
    assert!(loaded, "{seen:?}");
}

#[test]
fn the_log_goes_on_after_the_load_and_ends_with_the_model() {
    let seen = Logged::default();
    let options = xserv_load_options {
        log: Some(note_log),
        log_user_data: &raw const seen as *mut c_void,
        kv_cache_tokens: 96,
        ..load_options()
    };
    let model = Model::load(&tiny(), &options).unwrap();
    let says = |words: &str| {
        let seen = seen.lock().unwrap();
        assert!(seen.iter().any(|(.., message)| message.contains(words)), "{seen:?}");
    };
    says("the context is 96 tokens instead of 2048: kv_cache_tokens is 96");
    let odd = c_string(r#"[{"role": "user"}]"#);
    let request = xserv_request { messages_json: odd.as_ptr(), max_tokens: 1, ..request() };
    model.generate(&request).unwrap();
    says("messages[0] has no \"content\"");
    seen.lock().unwrap().clear();
    // Each fits alone, and two do not fit together.
    std::thread::scope(|scope| {
        for first in [5_u32, 9, 13] {
            let model = &model;
            scope.spawn(move || {
                let ids = [first, 6, 7];
                let request = xserv_request { ignore_eos: 1, ..greedy(&ids, 85) };
                assert_eq!(model.generate(&request).unwrap().ids.len(), 85);
            });
        }
    });
    let preempted = |seen: &Logged| {
        let seen = seen.lock().unwrap();
        let found = seen.iter().find(|(_, target, message)| {
            target == "scheduler" && message.contains("were preempted")
        });
        assert!(found.is_some(), "{seen:?}");
        seen.len()
    };
    let num_messages = preempted(&seen);
    drop(model);
    assert_eq!(seen.into_inner().unwrap().len(), num_messages);
}

#[test]
fn fields_of_a_request() {
    let model = Model::open(&tiny());
    let ids = model.tokenize("Once").unwrap();
    let fails_with = |request: xserv_request, words: &str| {
        let failure = model.generate(&request).unwrap_err();
        assert_eq!(failure.status, XSERV_STATUS_INVALID_ARGUMENT, "{failure:?}");
        assert!(failure.message.contains(words), "{failure:?} does not say {words}");
    };
    let base = greedy(&ids, 4);
    fails_with(request(), "exactly one of prompt");
    fails_with(xserv_request { prompt: c"x".as_ptr(), ..base }, "exactly one of prompt");
    fails_with(xserv_request { tools_json: c"[]".as_ptr(), ..base }, "tools_json");
    fails_with(xserv_request { num_prompt_tokens: 0, ..base }, "no tokens");
    fails_with(xserv_request { num_prompt_tokens: usize::MAX / 2, ..base }, "prompt_tokens");
    for wrong in [f32::NAN, -0.5, f32::INFINITY, f32::NEG_INFINITY] {
        fails_with(xserv_request { temperature: wrong, ..base }, "temperature");
        fails_with(xserv_request { repetition_penalty: wrong, ..base }, "repetition_penalty");
        fails_with(xserv_request { top_p: wrong, ..base }, "top_p");
        fails_with(xserv_request { min_p: wrong, ..base }, "min_p");
    }
    fails_with(xserv_request { top_p: 1.5, ..base }, "top_p");
    fails_with(xserv_request { presence_penalty: f32::NAN, ..base }, "presence_penalty");
    fails_with(xserv_request { frequency_penalty: f32::INFINITY, ..base }, "frequency_penalty");
    fails_with(xserv_request { ignore_eos: 7, ..base }, "ignore_eos is 7");
    fails_with(xserv_request { skip_special_tokens: 2, ..base }, "skip_special_tokens");
    let text = xserv_request { prompt: c"x".as_ptr(), ..request() };
    fails_with(xserv_request { parse_special_tokens: 9, ..text }, "parse_special_tokens");
    fails_with(xserv_request { prompt: c"".as_ptr(), ..text }, "no tokens");
    fails_with(xserv_request { prompt: c"a\xff".as_ptr(), ..text }, "offset 1");
    let vocab_size = model.info().vocab_size;
    let outside = [ids[0], vocab_size];
    let words = format!("token id {vocab_size} at position 1");
    fails_with(
        xserv_request { prompt_tokens: outside.as_ptr(), num_prompt_tokens: 2, ..base },
        &words,
    );
    // Stop strings.
    let one = [c"x".as_ptr()];
    let stops = |pointer: *const *const c_char, num| xserv_request {
        stop_strings: pointer,
        num_stop_strings: num,
        ..base
    };
    fails_with(stops(one.as_ptr(), 1_000_000), "at most 64");
    fails_with(stops(ptr::null(), 1), "stop_strings is NULL");
    let null = [ptr::null()];
    fails_with(stops(null.as_ptr(), 1), "stop_strings[0] is NULL");
    let empty = [c"".as_ptr()];
    fails_with(stops(empty.as_ptr(), 1), "empty");
    let long = CString::new("y".repeat(100_000)).unwrap();
    let long = [long.as_ptr()];
    fails_with(stops(long.as_ptr(), 1), "");
    // Conversations.
    let chat = |json: &std::ffi::CStr, words: &str| {
        fails_with(xserv_request { messages_json: json.as_ptr(), ..request() }, words);
    };
    chat(c"{", "messages");
    chat(c"{}", "messages");
    chat(c"[1]", "0");
    chat(c"[{\"role\": \"user\", \"content\": \"a\"}", "messages");
    let deep = CString::new("[".repeat(100_000)).unwrap();
    chat(&deep, "messages");
    model.generate(&base).unwrap();
}

#[test]
fn special_tokens_in_text_can_be_kept_as_text() {
    let model = Model::open(&tiny());
    let tokenize = |parse: u8| {
        let mut options = unsafe { std::mem::zeroed() };
        unsafe { xserv_tokenize_options_init(&mut options, size_of_val(&options)) };
        options.parse_special_tokens = parse;
        let mut tokens = ptr::null_mut();
        let text = c"<|im_end|>";
        check(unsafe { xserv_tokenize(model.0, text.as_ptr(), 10, &options, &mut tokens) })
            .unwrap();
        let mut count = 0;
        let data = unsafe { xserv_tokens_data(tokens, &mut count) };
        let ids = unsafe { std::slice::from_raw_parts(data, count) }.to_vec();
        xserv_tokens_free(tokens);
        ids
    };
    assert_eq!(tokenize(1).len(), 1);
    let as_text = tokenize(0);
    assert!(as_text.len() > 1, "{as_text:?}");
    // Text all the same: skipping special tokens leaves it.
    assert_eq!(model.detokenize(&as_text, true).unwrap(), "<|im_end|>");
}

#[test]
fn paths_that_lead_nowhere() {
    let fails_with = |path: &str, status: xserv_status| {
        let failure = Model::load(path.as_ref(), &load_options()).err().unwrap();
        assert_eq!(failure.status, status, "{failure:?}");
        let mut inspection = ptr::null_mut();
        let path = c_string(path);
        let status_of_inspect = unsafe { xserv_inspect(path.as_ptr(), &mut inspection) };
        assert_eq!(status_of_inspect, status, "{}", last_error());
    };
    fails_with("/nonexistent/folder", XSERV_STATUS_NOT_FOUND);
    fails_with("nobody/no-such-model-in-the-cache", XSERV_STATUS_NOT_FOUND);
    fails_with(&"x/".repeat(5000), XSERV_STATUS_IO);
    let failure = Model::load("".as_ref(), &load_options()).err().unwrap();
    assert!(failure.message.contains("path"), "{failure:?}");
}

#[test]
fn inspection_of_the_repository_model() {
    let path = c_string(tiny().to_str().unwrap());
    let mut inspection = ptr::null_mut();
    check(unsafe { xserv_inspect(path.as_ptr(), &mut inspection) }).unwrap();
    let mut info: xserv_inspection_info = unsafe { std::mem::zeroed() };
    info.struct_size = size_of::<xserv_inspection_info>();
    check(unsafe { xserv_inspection_get_info(inspection, &mut info) }).unwrap();
    let text = |p: *const c_char| unsafe { std::ffi::CStr::from_ptr(p) }.to_str().unwrap();
    assert_eq!(text(info.architecture), "Qwen3ForCausalLM");
    assert_eq!(text(info.unsupported_reason), "");
    assert_eq!((info.supported, info.has_tokenizer, info.has_chat_template), (1, 1, 1));
    let model = Model::open(&tiny());
    let loaded = model.info();
    assert_eq!(info.num_parameters, loaded.num_parameters);
    assert_eq!(info.kv_bytes_per_token, loaded.kv_bytes_per_token);
    assert_eq!(info.vocab_size, loaded.vocab_size);
    assert_eq!(info.dtype, loaded.dtype);
    assert_eq!(info.max_context_tokens, loaded.max_context_tokens);
    // The plan is what the load took.
    let ratio = info.weights_bytes as f64 / loaded.weights_bytes as f64;
    assert!((0.95..=1.05).contains(&ratio), "{ratio}");
    xserv_inspection_free(inspection);
}

#[test]
fn statuses_and_versions() {
    let text = |p: *const c_char| unsafe { std::ffi::CStr::from_ptr(p) }.to_str().unwrap();
    assert_eq!(text(xserv_version()), env!("CARGO_PKG_VERSION"));
    assert_eq!(xserv_abi_version(), XSERV_ABI_VERSION);
    assert_eq!(text(xserv_status_name(0)), "XSERV_STATUS_OK");
    assert_eq!(text(xserv_status_name(4_000_000_000)), "unknown status");
    // Every status of the header has its name.
    let header = std::fs::read_to_string(root().join("include/xserv.h")).unwrap();
    let mut seen = 0;
    for line in header.lines().map(str::trim).filter(|l| l.starts_with("XSERV_STATUS_")) {
        let (name, value) = line.trim_end_matches(',').split_once(" = ").unwrap();
        assert_eq!(text(xserv_status_name(value.parse().unwrap())), name);
        seen += 1;
    }
    assert!(seen >= 14);
}

#[test]
fn the_last_error_is_each_threads_own() {
    unsafe {
        let mut model = ptr::null_mut();
        let _ = xserv_load(ptr::null(), ptr::null(), &mut model);
    }
    let mine = last_error();
    std::thread::spawn(|| assert_eq!(last_error(), "")).join().unwrap();
    assert_eq!(last_error(), mine);
}

#[test]
fn a_forked_child_is_refused() {
    let model = Model::open(&tiny());
    let ids = model.tokenize("Once").unwrap();
    let request = greedy(&ids, 2);
    let expected = model.generate(&request).unwrap();
    // SAFETY: the child calls only the library and _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let status =
            unsafe { xserv_generate(model.0, &request, None, ptr::null_mut(), ptr::null_mut()) };
        xserv_model_free(model.0);
        unsafe { libc::_exit(status as i32) };
    }
    let mut status = 0;
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status));
    assert_eq!(libc::WEXITSTATUS(status), XSERV_STATUS_FORKED as i32);
    assert_eq!(model.generate(&request).unwrap().ids, expected.ids);
}
