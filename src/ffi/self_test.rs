//! The self-test of the operators.

#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_void};

use super::context::{make_context, xserv_context_options};
use super::guard::{call_host, guard_work, read_struct, with_nul};
use super::status::xserv_status;
use crate::self_test::{self_test, Line, Outcome, Reference};

/// What the self-test compares a result with.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_self_test_reference {
    /// Plain loops in f64 on the CPU.
    XSERV_REFERENCE_FLOAT64 = 0,
    /// The same operator of this library on the CPU.
    XSERV_REFERENCE_CPU = 1,
}

/// How a comparison of the self-test ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_self_test_outcome {
    /// Every error is within the bound.
    XSERV_SELF_TEST_PASSED = 0,
    /// An error is beyond the bound, memory beside the result was written, or the call failed.
    XSERV_SELF_TEST_FAILED = 1,
    /// The device, the machine or the element type lacks this variant of the operator, which is no
    /// fault: cuBLAS may not be installed.
    XSERV_SELF_TEST_UNSUPPORTED = 2,
}

/// One comparison of xserv_self_test(). Owned by the library, and valid during the callback only.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xserv_self_test_line {
    /// sizeof(xserv_self_test_line) in the library; fields beyond it do not exist.
    pub struct_size: usize,
    /// The operator: its function without "xserv_op_", for example "rms_norm".
    pub operator_name: *const c_char,
    /// What was computed: types, shapes and the variant, for people.
    pub what: *const c_char,
    /// The whole line, for people, without a line end.
    pub text: *const c_char,
    /// Why it failed or is unsupported; often empty, never NULL.
    pub message: *const c_char,
    /// The largest error of an element: its distance from the reference, divided by the size of the
    /// reference or, where that is larger, by the mean size of the elements. Infinite where a result
    /// is not a number, or there is none.
    pub max_error: f64,
    /// The largest error that is no fault; 0 where every bit has to be right.
    pub bound: f64,
    /// An xserv_self_test_reference: what the result was compared with.
    pub reference: u32,
    /// An xserv_self_test_outcome.
    pub outcome: u32,
}

/// Called for each comparison of xserv_self_test(), on the thread that called it, with no lock held.
/// Returns true to continue, false to end the test.
pub type xserv_self_test_callback =
    Option<unsafe extern "C" fn(line: *const xserv_self_test_line, user_data: *mut c_void) -> bool>;

/// Tests the operators on a device of this machine: runs every xserv_op_* at small and odd sizes, in
/// every element type and with every backend that it has there, and compares the results with plain
/// loops in f64 and, on a GPU, also with the operators on the CPU. It needs no model, and takes a few
/// seconds and some megabytes.
///
/// options: NULL for the defaults; the device, and how a context is made there, as for
/// xserv_context_new(). report: called for every comparison, or NULL; user_data is passed on to it.
/// Any thread may run it, also while models are at work on the device, which does not change the
/// result.
///
/// Returns XSERV_STATUS_OK if every comparison passed or is unsupported.
///
/// Errors: XSERV_STATUS_INTERNAL if some failed, after all were reported: xserv_last_error() names
/// the operators. Then the driver, the hardware or the library is at fault, and what models generate
/// on the device is not to be trusted. XSERV_STATUS_CANCELLED if report returned false;
/// XSERV_STATUS_DEVICE_LOST and XSERV_STATUS_OUT_OF_MEMORY, at once; XSERV_STATUS_NO_DEVICE,
/// XSERV_STATUS_UNSUPPORTED and XSERV_STATUS_INVALID_ARGUMENT as xserv_context_new().
///
/// # Safety
/// `options` is NULL or readable for its struct_size, and its stream is a stream; `report` is NULL or
/// such a function, and does not unwind.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_self_test(
    options: *const xserv_context_options,
    report: xserv_self_test_callback,
    user_data: *mut c_void,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let options = unsafe { read_struct(options, "options") }?;
        let context = make_context(&options)?;
        let mut failure = None;
        let mut give = |line: &Line<'_>| {
            let Some(report) = report else { return true };
            // SAFETY: the callback's contract.
            let reported = with_line(line, |line| call_host(|| unsafe { report(line, user_data) }));
            reported.unwrap_or_else(|error| {
                failure = Some(error);
                false
            })
        };
        let result = self_test(&context, &mut give);
        match failure {
            Some(error) => Err(error),
            None => result,
        }
    })
}

/// Calls `body` with the C form of a line.
fn with_line<T>(
    line: &Line<'_>,
    body: impl FnOnce(&xserv_self_test_line) -> T,
) -> crate::error::Result<T> {
    let operator_name = with_nul(line.operator)?;
    let (what, text) = (with_nul(line.what)?, with_nul(&line.to_string())?);
    let message = with_nul(&line.message)?;
    let reference = match line.reference {
        Reference::Float64 => xserv_self_test_reference::XSERV_REFERENCE_FLOAT64,
        Reference::Cpu => xserv_self_test_reference::XSERV_REFERENCE_CPU,
    };
    let outcome = match line.outcome {
        Outcome::Passed => xserv_self_test_outcome::XSERV_SELF_TEST_PASSED,
        Outcome::Failed => xserv_self_test_outcome::XSERV_SELF_TEST_FAILED,
        Outcome::Unsupported => xserv_self_test_outcome::XSERV_SELF_TEST_UNSUPPORTED,
    };
    Ok(body(&xserv_self_test_line {
        struct_size: size_of::<xserv_self_test_line>(),
        operator_name: operator_name.as_ptr().cast(),
        what: what.as_ptr().cast(),
        text: text.as_ptr().cast(),
        message: message.as_ptr().cast(),
        max_error: line.max_error,
        bound: line.bound,
        reference: reference as u32,
        outcome: outcome as u32,
    }))
}
