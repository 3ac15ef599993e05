//! The self-test through the C interface.

use std::ffi::{c_void, CStr};

use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;

fn options() -> xserv_context_options {
    let mut options: xserv_context_options = unsafe { std::mem::zeroed() };
    unsafe { xserv_context_options_init(&mut options, size_of_val(&options)) };
    options.device_kind = xserv_device_kind::XSERV_DEVICE_CPU as u32;
    options.num_threads = 2;
    options
}

/// The lines that the callback saw, and when it is to end the test.
struct Seen {
    texts: Vec<String>,
    limit: usize,
}

unsafe extern "C" fn take(line: *const xserv_self_test_line, user_data: *mut c_void) -> bool {
    let (line, seen) = unsafe { (&*line, &mut *user_data.cast::<Seen>()) };
    let text = |text| unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_string();
    assert_eq!(line.struct_size, size_of::<xserv_self_test_line>());
    assert_eq!(line.reference, xserv_self_test_reference::XSERV_REFERENCE_FLOAT64 as u32);
    let whole = text(line.text);
    // Not every machine has every variant.
    if line.outcome == xserv_self_test_outcome::XSERV_SELF_TEST_UNSUPPORTED as u32 {
        assert!(
            whole.starts_with("unsupported ") && whole.ends_with(&text(line.message)),
            "{whole}"
        );
        return true;
    }
    assert_eq!(line.outcome, xserv_self_test_outcome::XSERV_SELF_TEST_PASSED as u32);
    assert!(line.max_error >= 0.0 && line.max_error <= line.bound);
    assert_eq!(text(line.message), "");
    let begin =
        format!("ok          {} {}, against float64: ", text(line.operator_name), text(line.what));
    assert!(whole.starts_with(&begin), "{whole}");
    seen.texts.push(whole);
    // The callback may call the library.
    assert_eq!(xserv_abi_version(), XSERV_ABI_VERSION);
    seen.texts.len() < seen.limit
}

#[test]
fn every_comparison_is_reported() {
    let mut seen = Seen { texts: Vec::new(), limit: usize::MAX };
    let user_data = (&raw mut seen).cast();
    check(unsafe { xserv_self_test(&options(), Some(take), user_data) }).unwrap();
    assert!(seen.texts.len() > 200, "{}", seen.texts.len());
    check(unsafe { xserv_self_test(&options(), None, std::ptr::null_mut()) }).unwrap();
}

#[test]
fn the_callback_can_end_it() {
    let mut seen = Seen { texts: Vec::new(), limit: 5 };
    let user_data = (&raw mut seen).cast();
    let status = unsafe { xserv_self_test(&options(), Some(take), user_data) };
    assert_eq!((status, seen.texts.len()), (XSERV_STATUS_CANCELLED, 5));
    assert!(last_error().contains("the report callback returned false"), "{}", last_error());
}

#[test]
fn a_device_that_is_not_there_is_refused() {
    let elsewhere = xserv_context_options { device_index: 1, ..options() };
    let status = unsafe { xserv_self_test(&elsewhere, None, std::ptr::null_mut()) };
    assert_eq!(status, XSERV_STATUS_NO_DEVICE, "{}", last_error());
    let unknown = xserv_context_options { device_kind: 7, ..options() };
    let status = unsafe { xserv_self_test(&unknown, None, std::ptr::null_mut()) };
    assert_eq!(status, XSERV_STATUS_INVALID_ARGUMENT, "{}", last_error());
}
