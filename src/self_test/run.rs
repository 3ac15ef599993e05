//! Runs the cases and compares the results.

use std::fmt;

use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::{check_room, Error, ErrorKind, Result};
use crate::memory::{Device, ElementType, HostTensor, Tensor};
use crate::ops::copy::copy;
use crate::self_test::case::{decode, encode, Case, Compute, Emit};
use crate::self_test::{
    cases_attention, cases_elementwise, cases_gemm, cases_index, cases_quantised, cases_rows,
};

/// The reference of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference {
    /// Plain loops in f64.
    Float64,
    /// The same operator on the CPU.
    Cpu,
}

/// The outcome of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every error is within the bound.
    Passed,
    /// An error is beyond the bound, memory beside the result was written, or the call failed.
    Failed,
    /// The device, the machine or the type lacks this variant of the operator, which is no fault.
    Unsupported,
}

/// One comparison of the self-test.
pub struct Line<'a> {
    /// The operator's C function without `xserv_op_`.
    pub operator: &'static str,
    /// The types, sizes and variants.
    pub what: &'a str,
    /// The reference that the result is compared with.
    pub reference: Reference,
    /// The outcome of the comparison.
    pub outcome: Outcome,
    /// The largest error; infinite where a result is no number or there is none.
    pub max_error: f64,
    /// The largest error that is no fault.
    pub bound: f64,
    /// Why it failed or is unsupported; otherwise empty.
    pub message: String,
}

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outcome = match self.outcome {
            Outcome::Passed => "ok",
            Outcome::Failed => "FAILED",
            Outcome::Unsupported => "unsupported",
        };
        let reference = match self.reference {
            Reference::Float64 => "float64",
            Reference::Cpu => "cpu",
        };
        write!(f, "{outcome:<11} {} {}, against {reference}: ", self.operator, self.what)?;
        if self.outcome != Outcome::Unsupported {
            write!(f, "largest error {:.2e}, bound {:.2e}", self.max_error, self.bound)?;
        }
        let comma = if self.outcome == Outcome::Unsupported { "" } else { ", " };
        match self.message.as_str() {
            "" => Ok(()),
            message => write!(f, "{comma}{message}"),
        }
    }
}

/// Bytes that the largest case takes on the host, several times over.
const ROOM_BYTES: usize = 4 << 20;

/// Runs every operator on a context and reports each comparison; `report` returns whether to go on.
///
/// Fails with [`ErrorKind::Internal`] and the names of the operators that failed, after the whole
/// test; at once if there is no memory, the device is lost, or `report` ends it.
pub fn self_test(
    context: &ComputeContext,
    report: &mut dyn FnMut(&Line<'_>) -> bool,
) -> Result<()> {
    self_test_with(
        context,
        &|case, context, inputs, outputs| (case.compute)(context, inputs, outputs),
        report,
    )
}

/// Computes a case on a context, from inputs to outputs.
pub type Substitute<'a> = dyn Fn(&Case, &ComputeContext, &[Tensor], &[Tensor]) -> Result<()> + 'a;

/// As [`self_test`], with `compute` in place of the operators on the device (and not on the CPU that
/// a GPU is compared with), so that tests can put in a wrong one.
pub fn self_test_with(
    context: &ComputeContext,
    compute: &Substitute<'_>,
    report: &mut dyn FnMut(&Line<'_>) -> bool,
) -> Result<()> {
    check_room(ROOM_BYTES, "the self-test")?;
    let cpu = match context.device() {
        Device::Cpu => None,
        Device::Cuda(_) => Some(ComputeContext::cpu(1, usize::MAX)?),
    };
    let (mut num_lines, mut num_failed) = (0, 0);
    let mut failed: Vec<&'static str> = Vec::new();
    let mut take = |line: &Line<'_>| {
        num_lines += 1;
        if line.outcome == Outcome::Failed {
            num_failed += 1;
            if !failed.contains(&line.operator) {
                failed.push(line.operator);
            }
        }
        if report(line) {
            Ok(())
        } else {
            Err(Error::new(
                ErrorKind::Cancelled,
                "the report callback returned false, so the self-test ended",
            ))
        }
    };
    let mut emit = |case: Case| run_case(&case, context, cpu.as_ref(), compute, &mut take);
    let emit: &mut Emit<'_> = &mut emit;
    cases_rows::emit(emit)?;
    cases_index::emit(emit)?;
    cases_quantised::emit(emit)?;
    cases_elementwise::emit(emit)?;
    cases_gemm::emit(context.device(), emit)?;
    cases_attention::emit(emit)?;
    if failed.is_empty() {
        return Ok(());
    }
    Err(Error::internal(format!(
        "the self-test failed on {}: {num_failed} of {num_lines} comparisons, in {}",
        context.device(),
        failed.join(", ")
    )))
}

/// Computes a case on the device and compares the outputs.
fn run_case(
    case: &Case,
    context: &ComputeContext,
    cpu: Option<&ComputeContext>,
    compute: &Substitute<'_>,
    take: &mut dyn FnMut(&Line<'_>) -> Result<()>,
) -> Result<()> {
    let line = |reference, outcome, max_error, bound, message| Line {
        operator: case.operator,
        what: &case.what,
        reference,
        outcome,
        max_error,
        bound,
        message,
    };
    let found = match compute_on(case, context, &|c, i, o| compute(case, c, i, o)) {
        Ok(found) => found,
        Err(error) => {
            let outcome = match error.kind() {
                ErrorKind::Unsupported if case.is_optional => Outcome::Unsupported,
                // Nothing that follows could be told from this.
                ErrorKind::DeviceLost | ErrorKind::OutOfMemory => return Err(error),
                _ => Outcome::Failed,
            };
            let message = error.message().to_string();
            let bound = case.outputs.iter().map(|output| output.bound).fold(0.0, f64::max);
            let max_error = if outcome == Outcome::Failed { f64::INFINITY } else { 0.0 };
            return take(&line(Reference::Float64, outcome, max_error, bound, message));
        }
    };
    let expected: Vec<&[f64]> = case.outputs.iter().map(|output| &output.expected[..]).collect();
    let (max_error, bound) = compare(case, &found, &expected, 1.0);
    let (outcome, message) = judge(max_error, bound, found.guards_hold);
    take(&line(Reference::Float64, outcome, max_error, bound, message))?;

    let Some(cpu) = cpu else { return Ok(()) };
    let twin = compute_on(case, cpu, &|c, i, o| (case.compute)(c, i, o))?;
    let expected: Vec<&[f64]> = twin.outputs.iter().map(|values| &values[..]).collect();
    // Each of the two may be off by the bound.
    let (max_error, bound) = compare(case, &found, &expected, 2.0);
    let (outcome, message) = judge(max_error, bound, true);
    take(&line(Reference::Cpu, outcome, max_error, bound, message))
}

fn judge(max_error: f64, bound: f64, guards_hold: bool) -> (Outcome, String) {
    if !guards_hold {
        return (Outcome::Failed, "memory beside the result was written".to_string());
    }
    if max_error <= bound {
        (Outcome::Passed, String::new())
    } else {
        (Outcome::Failed, String::new())
    }
}

/// The results of a case's call.
struct Found {
    outputs: Vec<Vec<f64>>,
    guards_hold: bool,
}

/// Elements on both sides of each tensor; a multiple of 16 bytes in every type, as kernels for
/// aligned tensors need.
const GUARD: usize = 64;
/// The byte that fills guards: a NaN in the floating-point types, -1 in the others.
const GUARD_BYTE: u8 = 0xff;

/// A tensor between its guards.
struct Guarded {
    view: DeviceTensor,
    whole: DeviceTensor,
    element: ElementType,
    len: usize,
}

impl Guarded {
    /// `values` of `None` is what guards hold.
    fn new(
        context: &ComputeContext,
        element: ElementType,
        shape: &[i64],
        values: Option<&[f64]>,
    ) -> Result<Self> {
        let sizes: Vec<usize> = shape.iter().map(|&size| size as usize).collect();
        let len: usize = sizes.iter().product();
        let total = len + 2 * GUARD;
        let mut host = HostTensor::zeroed(element, &[total as i64])?;
        host.bytes_mut().fill(GUARD_BYTE);
        let start = GUARD * element.size_bytes();
        if let (Some(values), Some(bytes)) = (values, host.bytes_mut().get_mut(start..)) {
            encode(element, values, bytes);
        }
        let whole = DeviceTensor::temporary(context, element, &[total], "the self-test")?;
        copy(context, &host, &whole)?;
        let view = whole.view(GUARD, &sizes, None)?;
        Ok(Guarded { view, whole, element, len })
    }

    /// Returns the values, and whether the guards are untouched.
    fn read(&self, context: &ComputeContext) -> Result<(Vec<f64>, bool)> {
        let mut host = HostTensor::zeroed(self.element, &[(self.len + 2 * GUARD) as i64])?;
        // The copy must not find what it is to bring.
        host.bytes_mut().fill(0);
        copy(context, &self.whole, &host)?;
        let (start, size) = (GUARD * self.element.size_bytes(), self.element.size_bytes());
        let (before, rest) = host.bytes().split_at(start);
        let (values, after) = rest.split_at(self.len * size);
        let holds = before.iter().chain(after).all(|&byte| byte == GUARD_BYTE);
        Ok((decode(self.element, values), holds))
    }
}

fn compute_on(case: &Case, context: &ComputeContext, compute: &Compute<'_>) -> Result<Found> {
    let inputs = case
        .inputs
        .iter()
        .map(|input| Guarded::new(context, input.element, &input.shape, Some(&input.values)));
    let inputs = inputs.collect::<Result<Vec<_>>>()?;
    let outputs = case.outputs.iter().map(|output| {
        Guarded::new(context, output.element, &output.shape, output.initial.as_deref())
    });
    let outputs = outputs.collect::<Result<Vec<_>>>()?;
    let views = |tensors: &[Guarded]| -> Vec<Tensor> { tensors.iter().map(|t| *t.view).collect() };
    compute(context, &views(&inputs), &views(&outputs))?;
    context.synchronize()?;
    let mut found = Found { outputs: Vec::new(), guards_hold: true };
    for output in &outputs {
        let (values, holds) = output.read(context)?;
        found.outputs.push(values);
        found.guards_hold &= holds;
    }
    // An operator has to leave alone what it reads.
    for (input, given) in inputs.iter().zip(&case.inputs) {
        let (values, holds) = input.read(context)?;
        let same = values.iter().zip(&given.values).all(|(a, b)| a.to_bits() == b.to_bits());
        found.guards_hold &= holds && same;
    }
    Ok(found)
}

/// Returns the error and the bound of the output that is worst in units of its bound.
fn compare(case: &Case, found: &Found, expected: &[&[f64]], factor: f64) -> (f64, f64) {
    let mut worst = (0.0, 0.0);
    let mut most_bounds = -1.0;
    for ((output, found), expected) in case.outputs.iter().zip(&found.outputs).zip(expected) {
        let (error, bound) = (largest_error(found, expected), factor * output.bound);
        let bounds =
            if error <= bound { error / bound.max(f64::MIN_POSITIVE) } else { f64::INFINITY };
        if bounds > most_bounds || (error > bound && error > worst.0) {
            (worst, most_bounds) = ((error, bound), bounds);
        }
    }
    worst
}

/// See the head of the module for what an error is.
fn largest_error(found: &[f64], expected: &[f64]) -> f64 {
    let mean = expected.iter().map(|x| x.abs()).sum::<f64>() / expected.len().max(1) as f64;
    let error = |(&found, &expected): (&f64, &f64)| {
        if found == expected {
            return 0.0;
        }
        let error = (found - expected).abs() / expected.abs().max(mean);
        if error.is_nan() {
            f64::INFINITY
        } else {
            error
        }
    };
    let lengths_differ = found.len() != expected.len();
    let worst = found.iter().zip(expected).map(error).fold(0.0, f64::max);
    if lengths_differ {
        f64::INFINITY
    } else {
        worst
    }
}
