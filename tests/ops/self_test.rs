//! The self-test: it passes on the devices that are here, and finds a wrong operator.

use std::cell::RefCell;
use std::collections::BTreeSet;

use xserv::backend::cuda::{num_cuda_devices, StreamChoice};
use xserv::backend::ComputeContext;
use xserv::error::{Error, ErrorKind};
use xserv::memory::{HostTensor, Tensor};
use xserv::ops::copy::copy;
use xserv::self_test::case::{Case, Compute};
use xserv::self_test::{self_test, self_test_with, Line, Outcome, Reference};
use xserv::Result;

fn contexts() -> Vec<ComputeContext> {
    let mut contexts = vec![ComputeContext::cpu(2, usize::MAX).unwrap()];
    if num_cuda_devices() > 0 {
        contexts.push(ComputeContext::cuda(0, StreamChoice::Own, usize::MAX).unwrap());
    }
    contexts
}

/// Returns the names of the operators that C sees.
fn operators() -> BTreeSet<String> {
    let header = concat!(env!("CARGO_MANIFEST_DIR"), "/include/xserv_ops.h");
    let header = std::fs::read_to_string(header).unwrap();
    let lines = header.lines().filter_map(|line| line.strip_prefix("enum xserv_status xserv_op_"));
    lines.map(|rest| rest.split('(').next().unwrap().to_string()).collect()
}

#[test]
fn every_operator_passes_here() {
    for context in contexts() {
        let mut seen = BTreeSet::new();
        let mut lines = 0;
        let result = self_test(&context, &mut |line| {
            println!("{line}");
            seen.insert(line.operator.to_string());
            lines += 1;
            assert_ne!(line.outcome, Outcome::Failed, "{line}");
            if line.outcome == Outcome::Passed {
                assert!(line.max_error <= line.bound, "{line}");
            }
            true
        });
        result.unwrap();
        assert_eq!(seen, operators(), "an operator without a case");
        assert!(lines > 200, "{lines}");
    }
}

/// Adds the value of the last digit to one byte of a tensor, in its middle.
fn damage(context: &ComputeContext, tensor: &Tensor) -> Result<()> {
    let mut host = HostTensor::zeroed(tensor.element(), tensor.shape())?;
    copy(context, tensor, &host)?;
    let bytes = host.bytes_mut();
    // The sign and the exponent are at the end of an element.
    let size = tensor.element().size_bytes();
    let at = bytes.len() / size / 2 * size + size - 1;
    bytes[at] ^= 1;
    copy(context, &host, tensor)
}

/// Runs the self-test with one operator's last output damaged; returns the message and the operators
/// that failed.
fn planted(context: &ComputeContext, wrong: &str) -> (Error, BTreeSet<String>) {
    let compute = |case: &Case, context: &ComputeContext, i: &[Tensor], o: &[Tensor]| {
        (case.compute)(context, i, o)?;
        if case.operator == wrong {
            damage(context, o.last().unwrap())?;
        }
        Ok(())
    };
    let mut failed = BTreeSet::new();
    let result = self_test_with(context, &compute, &mut |line| {
        if line.outcome == Outcome::Failed {
            failed.insert(line.operator.to_string());
        }
        true
    });
    (result.unwrap_err(), failed)
}

#[test]
fn a_wrong_operator_is_named_and_no_other() {
    for context in contexts() {
        for wrong in operators() {
            let (error, failed) = planted(&context, &wrong);
            assert_eq!(failed, BTreeSet::from([wrong.clone()]));
            assert_eq!(error.kind(), ErrorKind::Internal);
            assert!(error.message().ends_with(&format!(" comparisons, in {wrong}")), "{error}");
        }
    }
}

/// Returns the outcomes of one case of the softmax of f32 with `compute` in its place.
fn softmax_with(compute: &Compute) -> String {
    let context = ComputeContext::cpu(1, usize::MAX).unwrap();
    let found = RefCell::new(None);
    let is_it = |operator: &str, what: &str| operator == "softmax" && what == "f32 [5, 67]";
    let substitute = |case: &Case, context: &ComputeContext, i: &[Tensor], o: &[Tensor]| {
        if is_it(case.operator, &case.what) {
            compute(context, i, o)
        } else {
            (case.compute)(context, i, o)
        }
    };
    let result = self_test_with(&context, &substitute, &mut |line: &Line| {
        if is_it(line.operator, line.what) {
            assert_eq!((line.outcome, line.reference), (Outcome::Failed, Reference::Float64));
            *found.borrow_mut() = Some(line.to_string());
        }
        true
    });
    let message = result.unwrap_err().to_string();
    assert!(message.contains(" 1 of ") && message.ends_with(" in softmax"), "{message}");
    found.into_inner().unwrap()
}

#[test]
fn what_is_not_written_or_written_elsewhere_is_found() {
    let line = softmax_with(&|_, _, _| Ok(()));
    assert!(line.contains("largest error inf"), "{line}");
    let line = softmax_with(&|_, _, _| Err(Error::invalid_argument("a bad day")));
    assert!(line.ends_with("a bad day"), "{line}");
    let line = softmax_with(&|_, _, _| Err(Error::unsupported("not here")));
    assert!(line.starts_with("FAILED"), "{line}");
    let line = softmax_with(&|context, inputs, outputs| {
        xserv::ops::softmax::softmax(context, &inputs[0], &outputs[0])?;
        let out = &outputs[0];
        // SAFETY: on the CPU; the element after the tensor belongs to its guard.
        unsafe { out.data().add(out.size_bytes()).cast::<f32>().write(1.0) };
        Ok(())
    });
    assert!(line.contains("memory beside the result was written"), "{line}");
    let line = softmax_with(&|context, inputs, outputs| {
        xserv::ops::softmax::softmax(context, &inputs[0], &outputs[0])?;
        // SAFETY: on the CPU, in memory of the test.
        unsafe { inputs[0].data().cast::<f32>().write(1.0) };
        Ok(())
    });
    assert!(line.contains("memory beside the result was written"), "{line}");
}

#[test]
fn the_report_can_end_it() {
    for context in contexts() {
        let mut lines = 0;
        let error = self_test(&context, &mut |_| {
            lines += 1;
            lines < 3
        })
        .unwrap_err();
        assert_eq!((error.kind(), lines), (ErrorKind::Cancelled, 3));
    }
}
