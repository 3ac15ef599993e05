//! Activations in e4m3 on a GPU: `csrc/ops/quantised/activations.cu`; see
//! [`activations`](super::activations).

use super::activations::INPUT_GROUP;
use crate::backend::cuda::{kernels, Arguments, Launch};
use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::{Error, Result};
use crate::memory::{ElementType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};

/// The threads of a block, and how many of them have a group of inputs.
const THREADS: u32 = 256;
const GROUP_THREADS: usize = 16;
/// The alignment of the scales in bytes, as the copy engine needs it.
const ALIGNMENT: usize = 256;
const WHAT: &str = "activations in 8 bits";

/// The codes of activations `[num_rows, in_features]`, each row filled up to whole groups of inputs
/// with zeros, and their scales `[num_groups, pitch]`, in f32, the rows being neighbours.
#[derive(Debug)]
pub struct QuantisedInputs {
    memory: DeviceTensor,
    num_rows: usize,
    in_features: usize,
}

/// The sizes of such activations.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    first_scale: usize,
    bytes: usize,
}

impl Sizes {
    /// `None` if an address has not enough bits.
    fn of(num_rows: usize, in_features: usize) -> Option<Self> {
        let num_groups = in_features.div_ceil(INPUT_GROUP);
        let pitch = num_rows.checked_next_multiple_of(4)?;
        let codes = num_groups.checked_mul(INPUT_GROUP)?.checked_mul(num_rows)?;
        let first_scale = codes.checked_next_multiple_of(ALIGNMENT)?;
        let scales = num_groups.checked_mul(pitch)?.checked_mul(size_of::<f32>())?;
        let bytes = first_scale.checked_add(scales)?.checked_next_multiple_of(ALIGNMENT)?;
        Some(Sizes { first_scale, bytes })
    }
}

/// Returns the device memory of activations in 8 bits; the most there is if that cannot be counted.
pub fn quantised_inputs_bytes(num_rows: usize, in_features: usize) -> usize {
    Sizes::of(num_rows, in_features).map_or(usize::MAX, |sizes| sizes.bytes)
}

impl QuantisedInputs {
    /// Takes memory for activations, which say nothing yet.
    pub fn new(context: &ComputeContext, num_rows: usize, in_features: usize) -> Result<Self> {
        let words = quantised_inputs_bytes(num_rows, in_features) / size_of::<i32>();
        let memory = DeviceTensor::temporary(context, ElementType::I32, &[words], WHAT)?;
        Ok(QuantisedInputs { memory, num_rows, in_features })
    }

    /// Returns the rows.
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Returns the inputs of a row, without those that fill it up.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// All of the memory as words: the codes, four a word, and the scales.
    pub fn words(&self) -> &DeviceTensor {
        &self.memory
    }

    /// Returns the byte at which the scales begin.
    pub fn scales_start(&self) -> usize {
        Sizes::of(self.num_rows, self.in_features).map_or(0, |sizes| sizes.first_scale)
    }

    /// Returns the groups of a row.
    pub(in crate::ops) fn num_groups(&self) -> usize {
        self.in_features.div_ceil(INPUT_GROUP)
    }

    /// Returns the scales of a group: those of the rows, and up to three more.
    pub(in crate::ops) fn pitch(&self) -> usize {
        self.num_rows.next_multiple_of(4)
    }

    /// Returns the codes, in rows of whole groups.
    pub(in crate::ops) fn codes(&self) -> *mut u8 {
        self.memory.data()
    }

    /// Returns the scales.
    pub(in crate::ops) fn scales(&self) -> *mut u8 {
        self.memory.data().wrapping_add(self.scales_start())
    }
}

/// Returns a launch for all groups of a matrix.
fn launch(num_rows: usize, num_groups: usize) -> Result<Launch> {
    let groups = num_rows.saturating_mul(num_groups);
    let blocks = groups.div_ceil(THREADS as usize / GROUP_THREADS);
    let blocks = i32::try_from(blocks)
        .map_err(|_| Error::unsupported(format!("{num_rows} rows of {num_groups} x 128 inputs")))?;
    Ok(Launch::linear(blocks as u32, THREADS))
}

/// Quantises x `[num_rows, in_features]`, of f16 or bf16, in_features a multiple of 8.
pub fn quantise_inputs(context: &ComputeContext, x: &Tensor, out: &QuantisedInputs) -> Result<()> {
    let dtype = float("x", x)?;
    check("x", x, x.element(), &[out.num_rows as i64, out.in_features as i64])?;
    let is_aligned = (x.data() as usize).is_multiple_of(16);
    if !is_aligned || !out.in_features.is_multiple_of(8) {
        return Err(Error::internal(format!(
            "activations at {:?} of {} inputs in 8 bits",
            x.data(),
            out.in_features
        )));
    }
    if x.is_empty() {
        return Ok(());
    }
    let kernel = kernels::QUANTISE_ACTIVATIONS.of_half(dtype)?;
    let arguments = Arguments::new()
        .tensor(x)
        .pointer(out.codes())
        .pointer(out.scales())
        .i32(out.num_rows as i32)
        .i32(out.in_features as i32)
        .i32(out.num_groups() as i32)
        .i32(out.pitch() as i32);
    // SAFETY: the arguments of the kernel; it reads x, which has these rows, and writes a row of codes and
    // the scales of each, for which `out` has memory.
    unsafe {
        let launch = launch(out.num_rows, out.num_groups())?;
        cuda(context)?.launch_overlapping(kernel, launch, arguments)
    }
}

/// The most threads of a block of [`normalise_inputs`], each of which has two vectors of eight inputs.
const NORM_THREADS: usize = 1024;

/// Whether [`normalise_inputs`] serves the rows of a residual stream.
pub fn has_normalise_inputs(residual: &Tensor) -> bool {
    let width = residual.width() as usize;
    let is_half = residual.element().size_bytes() == 2;
    is_half
        && width.is_multiple_of(8)
        && width <= 16 * NORM_THREADS
        && (residual.data() as usize).is_multiple_of(16)
}

/// Adds `x` to the residual stream, unless there is none, and quantises what RMSNorm makes of the sum:
/// the same bits as those of [`add_rms_norm`](crate::ops::rms_norm::cuda_rounded::add_rms_norm) and
/// [`quantise_inputs`].
///
/// x, residual `[num_rows, in_features]`, weight `[in_features]`, of one type, for what
/// [`has_normalise_inputs`] says.
pub fn normalise_inputs(
    context: &ComputeContext,
    x: Option<&Tensor>,
    residual: &Tensor,
    weight: &Tensor,
    eps: f32,
    out: &QuantisedInputs,
) -> Result<()> {
    let dtype = float("residual", residual)?;
    let (element, shape) = (residual.element(), residual.shape());
    check("residual", residual, element, &[out.num_rows as i64, out.in_features as i64])?;
    check("weight", weight, element, &[out.in_features as i64])?;
    if let Some(x) = x {
        check("x", x, element, shape)?;
    }
    let odd = x.map_or(0, |x| x.data() as usize) | weight.data() as usize;
    if !has_normalise_inputs(residual) || !odd.is_multiple_of(16) {
        return Err(Error::internal(format!("a norm in 8 bits of rows of {}", out.in_features)));
    }
    if residual.is_empty() {
        return Ok(());
    }
    let kernel = kernels::NORMALISE_ACTIVATIONS.of_half(dtype)?;
    let arguments = Arguments::new()
        .pointer(out.codes())
        .pointer(out.scales())
        .tensor(residual)
        .optional(x)
        .tensor(weight)
        .i32(out.in_features as i32)
        .i32(out.num_groups() as i32)
        .i32(out.pitch() as i32)
        .f32(eps);
    let vectors = out.num_groups() * GROUP_THREADS;
    let block = vectors.clamp(32, NORM_THREADS).next_multiple_of(32) as u32;
    let rows = i32::try_from(out.num_rows)
        .map_err(|_| Error::unsupported(format!("a norm of {} rows", out.num_rows)))?;
    // SAFETY: the arguments of the kernel; it reads and writes the rows of the stream, and writes a row
    // of codes and the scales of each, for which `out` has memory.
    unsafe {
        let launch = Launch::linear(rows as u32, block);
        cuda(context)?.launch_overlapping(kernel, launch, arguments)
    }
}

/// Replaces activations by what they are in e4m3, rounded to their type: x, out `[num_rows,
/// in_features]`, of one type.
pub fn round_inputs(context: &ComputeContext, x: &Tensor, out: &Tensor) -> Result<()> {
    let (dtype, (num_rows, k)) = (float("x", x)?, matrix_size("x", x)?);
    check("out", out, x.element(), x.shape())?;
    if x.is_empty() {
        return Ok(());
    }
    let num_groups = (k as usize).div_ceil(INPUT_GROUP);
    let launch = launch(num_rows as usize, num_groups)?;
    let arguments =
        Arguments::new().tensor(x).tensor(out).i32(num_rows as i32).i32(k).i32(num_groups as i32);
    let kernel = kernels::ROUND_ACTIVATIONS.of(dtype);
    // SAFETY: the arguments of the kernel; both tensors have these rows and columns.
    unsafe { cuda(context)?.launch_overlapping(kernel, launch, arguments) }
}
