//! The host's thread: an operator allocates nothing on it; what a token needs can fail to be
//! allocated, which is an error that loses nothing.

// The contracts of the C functions that are called here are in the header.
#![allow(clippy::undocumented_unsafe_blocks)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use xserv::error::{ErrorKind, Result};
use xserv::ffi::*;
use xserv::text::{Detokenizer, StopMatcher, Tokenizer};

use crate::counting::{count, fail_nth};

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-qwen3")
}

/// Repeats `call` with its first allocation failing, then its second, and so on, until it needs no
/// more. Every failure must be an error that left things as they were: the result is that of the
/// call which succeeds. Returns how often it failed.
fn despite_failures<T>(mut call: impl FnMut() -> Result<T>) -> (T, u64) {
    for nth in 1.. {
        let (outcome, failed) = fail_nth(nth, &mut call);
        match outcome {
            Ok(value) => return (value, nth - 1),
            Err(error) => {
                assert!(failed, "{error}");
                assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
            }
        }
    }
    unreachable!()
}

#[test]
fn tokens_survive_failed_allocations() {
    let _one = crate::begin();
    let file = std::fs::read(model().join("tokenizer.json")).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_bytes(&file, None).unwrap());
    assert!(tokenizer.has_token_bytes());
    let text = "One 日本 🎉 and STOP more. The STOP";
    let ids = tokenizer.encode(text, false, true).unwrap();
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), true);
    let (mut matcher, mut failures) =
        despite_failures(|| StopMatcher::new(&["STOP more!", "日本!"]));
    let mut shown = String::new();
    // The last token is cut from its character.
    let half = tokenizer.encode("🎉", false, true).unwrap();
    for id in ids.iter().chain(&half[..half.len() - 1]) {
        let (piece, failed) = despite_failures(|| detokenizer.push(*id));
        failures += failed;
        let (output, failed) = despite_failures(|| matcher.push(&piece));
        failures += failed;
        shown.push_str(&output.text);
    }
    let (rest, failed) = despite_failures(|| detokenizer.finish());
    failures += failed;
    shown.push_str(&despite_failures(|| matcher.push(&rest)).0.text);
    shown.push_str(&matcher.finish());
    assert!(failures > ids.len() as u64, "{failures}");
    let whole = tokenizer.decode(&[&ids, &half[..half.len() - 1]].concat(), true).unwrap();
    assert_eq!(shown, whole);
}

#[test]
fn operators_allocate_nothing() {
    let _one = crate::lock();
    let mut options: xserv_context_options = unsafe { std::mem::zeroed() };
    // SAFETY: a struct of integers and pointers, which is filled here.
    unsafe { xserv_context_options_init(&mut options, size_of_val(&options)) };
    options.device_kind = xserv_device_kind::XSERV_DEVICE_CPU as u32;
    options.num_threads = 1;
    let mut context = std::ptr::null_mut();
    assert_eq!(unsafe { xserv_context_new(&options, &mut context) }, xserv_status::XSERV_STATUS_OK);
    let (mut values, mut out) = ([2f32; 64], [0f32; 64]);
    let (mut shape, mut strides) = ([8i64, 8], [8i64, 1]);
    let mut tensor = |data: &mut [f32; 64]| xserv_tensor {
        data: data.as_mut_ptr().cast(),
        device: xserv_tensor_device { device_type: 1, device_id: 0 },
        ndim: 2,
        dtype: xserv_tensor_dtype { code: 2, bits: 32, lanes: 1 },
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let (a, to) = (tensor(&mut values), tensor(&mut out));
    let call = || unsafe { xserv_op_mul(context, &a, &a, &to) };
    assert_eq!(call(), xserv_status::XSERV_STATUS_OK);
    let counts = count(|| assert_eq!(call(), xserv_status::XSERV_STATUS_OK));
    crate::assert_none(&counts);
    assert_eq!(out, [4f32; 64]);
    xserv_context_free(context);
}
