//! Quantised matrices as tensors that a caller has, row after row: `quantise` and `dequantise`. The
//! product with them is that of [`linear`](crate::ops::linear::tensors).
//!
//! Codes are words of 32 bits, little-endian, of which the first code has the lowest bits: what
//! bytes in row-major order are as words, and as published checkpoints pack them.

use super::cuda::{dequantise as dequantise_on_cuda, QuantisedTiles};
use super::format::{Code, QuantFormat};
use super::matrix::QuantisedMatrix;
use super::quantise::{quantise_row, quantised_format, RowOut};
use super::tiles::{TileLayout, TileMemory};
use crate::backend::cpu::CpuBackend;
use crate::backend::{ComputeContext, ContextBackend, DeviceTensor};
use crate::error::{try_filled, try_with_capacity, Context, Error, ErrorKind, Result};
use crate::memory::{DType, ElementType, HostTensor, Tensor};
use crate::ops::common::check::{self, InPlace};
use crate::ops::common::staging::output;
use crate::ops::copy::copy;
use crate::ops::elementwise::cast;
use std::sync::{Mutex, PoisonError};

/// The bits of a word of codes.
const WORD_BITS: usize = 32;

/// The parts of a quantised matrix W `[out_features, in_features]`; see
/// [`QuantFormat`](super::QuantFormat) for what they mean.
#[derive(Clone, Copy, Debug)]
pub struct QuantisedTensors<'a> {
    /// The encoding of the numbers.
    pub code: Code,
    /// Rows that share a scale; 0 stands for 1.
    pub group_rows: usize,
    /// Inputs that share a scale; 0 stands for all.
    pub group_size: usize,
    /// `[out_features, in_features * bits / 32]`, i32
    pub codes: &'a Tensor,
    /// `[out_features / group_rows, in_features / group_size]`, rounded up; f32, f16 or bf16
    pub scales: &'a Tensor,
    /// As the scales, i32; `None` if all zeros are the middle of the codes. Not of floats.
    pub zeros: Option<&'a Tensor>,
}

fn wrong<T>(what: String) -> Result<T> {
    Err(Error::invalid_argument(what))
}

/// Returns the rows and columns of a matrix.
pub(in crate::ops) fn matrix_sizes((name, tensor): check::Named<'_>) -> Result<[usize; 2]> {
    check::rank((name, tensor), 2, "[rows, columns]")?;
    match **tensor.shape() {
        [rows, columns] => Ok([rows as usize, columns as usize]),
        _ => wrong(format!("{name} has shape {}, but is to be a matrix", tensor.shape())),
    }
}

impl QuantisedTensors<'_> {
    /// Checks the tensors of a matrix `[out_features, in_features]`.
    pub(in crate::ops) fn check(&self, out_features: usize, in_features: usize) -> Result<()> {
        let bits = self.code.bits();
        let [_, words] = matrix_sizes(("codes", self.codes))?;
        if self.codes.element() != ElementType::I32 {
            let element = self.codes.element();
            return wrong(format!("codes has elements of {element}, but i32 are needed"));
        }
        if in_features.checked_mul(bits) != words.checked_mul(WORD_BITS) {
            return wrong(format!(
                "codes has {words} words in a row, which are {} codes of {bits} bits, but a row has \
                 {in_features}",
                words.saturating_mul(WORD_BITS / bits)
            ));
        }
        check::shape(
            ("codes", self.codes),
            &[out_features as i64, words as i64],
            "the rows of the matrix and 32 bits of codes in a word",
        )?;
        check::float(("scales", self.scales))?;
        let groups = [
            out_features.div_ceil(self.group_rows.max(1)) as i64,
            self.format(in_features)?.num_groups(in_features) as i64,
        ];
        check::shape(("scales", self.scales), &groups, "a scale for each group")?;
        if let Some(zeros) = self.zeros {
            if self.code.is_float() {
                return wrong("zeros were given, but codes that are floats have none".to_owned());
            }
            if zeros.element() != ElementType::I32 {
                let element = zeros.element();
                return wrong(format!("zeros has elements of {element}, but i32 are needed"));
            }
            check::shape(("zeros", zeros), &groups, "a zero for each group")?;
        }
        Ok(())
    }

    /// Returns the tensors with their names.
    pub(in crate::ops) fn named(&self) -> impl Iterator<Item = check::Named<'_>> {
        let zeros = self.zeros.map(|zeros| ("zeros", zeros));
        [("codes", self.codes), ("scales", self.scales)].into_iter().chain(zeros)
    }

    fn format(&self, in_features: usize) -> Result<QuantFormat> {
        Ok(QuantFormat {
            code: self.code,
            group_size: if self.group_size == 0 { in_features.max(1) } else { self.group_size },
            has_zeros: self.zeros.is_some(),
            scale: check::float(("scales", self.scales))?,
            quantises_inputs: false,
        })
    }

    /// Reads the matrix, whose tensors have been checked, to the host. Scales that are not finite,
    /// zeros that are no codes and codes of floats that are no numbers are refused, as they are in
    /// files.
    pub(in crate::ops) fn read(
        &self,
        context: &ComputeContext,
        out_features: usize,
        in_features: usize,
    ) -> Result<QuantisedMatrix> {
        let format = self.format(in_features)?;
        let mut matrix = QuantisedMatrix::empty(out_features, in_features, format)?;
        let codes = on_host(context, self.codes)?;
        for (to, word) in matrix.codes.chunks_mut(4).zip(integers(&codes)) {
            let bytes = word.to_le_bytes();
            to.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
        }
        if let Some(at) = matrix.codes.iter().position(|&code| !self.code.is_number(code)) {
            let place = [at / in_features.max(1), at % in_features.max(1)];
            return wrong(format!("codes has no number (NaN) at {place:?} of the matrix"));
        }
        let num_groups = matrix.num_groups().max(1);
        let scales = floats(&on_host(context, self.scales)?, format.scale)?;
        if let Some(at) = scales.iter().position(|scale| !scale.is_finite()) {
            let (place, scale) = ([at / num_groups, at % num_groups], scales.get(at));
            let scale = scale.copied().unwrap_or(f32::NAN);
            return wrong(format!("scales has {scale} at {place:?}, but scales are finite"));
        }
        let shared = |row: usize| row / self.group_rows.max(1) * num_groups;
        for (row, to) in matrix.scales.chunks_mut(num_groups).enumerate() {
            let from = scales.get(shared(row)..).unwrap_or_default();
            to.iter_mut().zip(from).for_each(|(to, &from)| *to = from);
        }
        let Some(zeros) = self.zeros else { return Ok(matrix) };
        let mut read = try_with_capacity(zeros.num_elements() as usize, "zeros")?;
        let most = (1i32 << self.code.bits()) - 1;
        for (index, zero) in integers(&on_host(context, zeros)?).enumerate() {
            if !(0..=most).contains(&zero) {
                let place = [index / num_groups, index % num_groups];
                return wrong(format!("zeros has {zero} at {place:?}, but 0 to {most} are codes"));
            }
            read.push(zero as u8);
        }
        for (row, to) in matrix.zeros.chunks_mut(num_groups).enumerate() {
            let from = read.get(shared(row)..).unwrap_or_default();
            to.iter_mut().zip(from).for_each(|(to, &from)| *to = from);
        }
        Ok(matrix)
    }
}

/// Returns a contiguous copy of a tensor on the host.
pub(in crate::ops) fn on_host(context: &ComputeContext, tensor: &Tensor) -> Result<HostTensor> {
    let host = HostTensor::zeroed(tensor.element(), tensor.shape())?;
    copy(context, tensor, &host)?;
    Ok(host)
}

fn integers(host: &HostTensor) -> impl Iterator<Item = i32> + '_ {
    host.bytes().chunks_exact(4).map(|bytes| match *bytes {
        [a, b, c, d] => i32::from_ne_bytes([a, b, c, d]),
        _ => 0,
    })
}

/// Returns the elements of a tensor of `dtype`.
pub(in crate::ops) fn floats(host: &HostTensor, dtype: DType) -> Result<Vec<f32>> {
    let size = dtype.size_bytes();
    let mut values = try_with_capacity(host.bytes().len() / size, "numbers of a tensor")?;
    values.extend(host.bytes().chunks_exact(size).map(|bytes| match (dtype, bytes) {
        (DType::F32, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]),
        (DType::F16, &[a, b]) => half::f16::from_ne_bytes([a, b]).to_f32(),
        (DType::BF16, &[a, b]) => half::bf16::from_ne_bytes([a, b]).to_f32(),
        _ => 0.0,
    }));
    Ok(values)
}

/// Makes a tensor of f32 on the host.
pub(in crate::ops) fn host_floats(shape: &[i64], values: &[f32]) -> Result<HostTensor> {
    let mut host = HostTensor::zeroed(ElementType::Float(DType::F32), shape)?;
    for (to, value) in host.bytes_mut().chunks_exact_mut(4).zip(values) {
        to.copy_from_slice(&value.to_ne_bytes());
    }
    Ok(host)
}

/// Copies a matrix to the context's device in the order of its kernels.
pub(in crate::ops) fn to_tiles(
    context: &ComputeContext,
    matrix: &QuantisedMatrix,
) -> Result<(TileLayout, DeviceTensor)> {
    let layout = TileLayout::new(matrix.out_features, matrix.in_features, matrix.format, false)?;
    let words = layout.len_bytes().div_ceil(4);
    let mut host = HostTensor::zeroed(ElementType::I32, &[words as i64])?;
    let tiles = 0..layout.num_tiles();
    let place = layout.place(tiles.clone());
    let lost = || Error::internal("the tiles of a matrix have no room");
    let (codes, rest) =
        host.bytes_mut().split_at_mut_checked(place.scales.start).ok_or_else(lost)?;
    let (scales, zeros) =
        rest.split_at_mut_checked(place.zeros.start - place.scales.start).ok_or_else(lost)?;
    let out = TileMemory {
        codes: codes.get_mut(..place.codes.len()).ok_or_else(lost)?,
        scales: scales.get_mut(..place.scales.len()).ok_or_else(lost)?,
        zeros: zeros.get_mut(..place.zeros.len()).ok_or_else(lost)?,
    };
    layout.pack(matrix, tiles, out)?;
    let memory =
        DeviceTensor::temporary(context, ElementType::I32, &[words], "a quantised weight")?;
    copy(context, &host, &memory)?;
    Ok((layout, memory))
}

/// Computes the numbers of a quantised matrix: `out[o, i] = (code - zero) * scale` in f32, rounded
/// once to the type of `out` `[out_features, in_features]`.
pub fn dequantise(
    context: &ComputeContext,
    matrix: &QuantisedTensors<'_>,
    out: &Tensor,
) -> Result<()> {
    check::float(("out", out))?;
    let [rows, columns] = matrix_sizes(("out", out))?;
    matrix.check(rows, columns)?;
    for named in matrix.named() {
        check::reachable(context, &[named])?;
        check::result(("out", out), &[named], InPlace::Refused)?;
    }
    check::reachable(context, &[("out", out)])?;
    if out.is_empty() {
        return Ok(());
    }
    let numbers = matrix.read(context, rows, columns)?;
    match context.backend() {
        ContextBackend::Cpu { backend, .. } => {
            let len = rows.saturating_mul(columns);
            let mut values = try_filled(len, 0.0_f32, "the numbers of a matrix")?;
            backend.parallel_rows(&mut values, columns, |first, rows| {
                for (row, out) in (first..).zip(rows.chunks_exact_mut(columns)) {
                    // This cannot fail: rows and columns are those of the matrix.
                    let _ = numbers.row_to_f32(row, out);
                }
            })?;
            cast(context, &*host_floats(&[rows as i64, columns as i64], &values)?, out)
        }
        ContextBackend::Cuda(_) => {
            let (layout, memory) = to_tiles(context, &numbers)?;
            let tiles = QuantisedTiles::new(layout, &memory)?;
            let place = output(context, out, |out| {
                out.is_contiguous() && (out.data() as usize).is_multiple_of(16)
            })?;
            dequantise_on_cuda(context, &tiles, 0..rows, &place.tensor)?;
            place.finish(context)
        }
    }
}

/// Quantises a matrix x `[out_features, in_features]` as [`quantise_row`] does, and writes codes,
/// scales and, of 4 bits, zeros; `matrix.zeros` of 8 bits is `None`. Scales are f32 or bf16, and
/// every row has its own. On CUDA the host does it, and the call returns when it is done.
pub fn quantise(context: &ComputeContext, x: &Tensor, matrix: &QuantisedTensors<'_>) -> Result<()> {
    let dtype = check::float(("x", x))?;
    let [rows, columns] = matrix_sizes(("x", x))?;
    match (matrix.code, matrix.zeros) {
        (code, _) if code.is_float() => {
            return Err(Error::unsupported("matrices are quantised to integers, not to floats"))
        }
        (Code::Int4, None) => return wrong("zeros is NULL, but codes of 4 bits need it".into()),
        (Code::Int8, Some(_)) => {
            return wrong("zeros were given, but all zeros of codes of 8 bits are 128".into())
        }
        _ => {}
    }
    if matrix.group_rows > 1 {
        return wrong(format!("{} rows are to share a scale, not 1", matrix.group_rows));
    }
    matrix.check(rows, columns)?;
    if matrix.scales.element() == ElementType::Float(DType::F16) {
        return wrong("scales has elements of f16, but bf16 or f32 hold them".into());
    }
    check::reachable(context, &[("x", x)])?;
    for (index, named) in matrix.named().enumerate() {
        check::reachable(context, &[named])?;
        check::result(named, &[("x", x)], InPlace::Refused)?;
        for other in matrix.named().skip(index + 1) {
            check::result(named, &[other], InPlace::Refused)?;
        }
    }
    if x.is_empty() {
        return Ok(());
    }
    let numbers = floats(&on_host(context, x)?, dtype)?;
    let format = quantised_format(matrix.code, matrix.format(columns)?.group_size);
    let mut made = QuantisedMatrix::empty(rows, columns, format)?;
    let own;
    let backend = match context.backend() {
        ContextBackend::Cpu { backend, .. } => backend,
        ContextBackend::Cuda(_) => {
            own = CpuBackend::new(1)?;
            &own
        }
    };
    quantise_rows(backend, &numbers, &mut made)?;
    let mut codes = HostTensor::zeroed(ElementType::I32, matrix.codes.shape())?;
    for (to, from) in codes.bytes_mut().chunks_exact_mut(4).zip(made.codes.chunks_exact(4)) {
        if let [a, b, c, d] = *from {
            to.copy_from_slice(&u32::from_le_bytes([a, b, c, d]).to_ne_bytes());
        }
    }
    let mut scales = HostTensor::zeroed(matrix.scales.element(), matrix.scales.shape())?;
    let size = matrix.scales.element().size_bytes();
    for (to, &scale) in scales.bytes_mut().chunks_exact_mut(size).zip(&made.scales) {
        match to.len() {
            4 => to.copy_from_slice(&scale.to_ne_bytes()),
            _ => to.copy_from_slice(&half::bf16::from_f32(scale).to_ne_bytes()),
        }
    }
    copy(context, &codes, matrix.codes)?;
    copy(context, &scales, matrix.scales)?;
    if let Some(zeros) = matrix.zeros {
        let mut host = HostTensor::zeroed(ElementType::I32, zeros.shape())?;
        for (to, &zero) in host.bytes_mut().chunks_exact_mut(4).zip(&made.zeros) {
            to.copy_from_slice(&i32::from(zero).to_ne_bytes());
        }
        copy(context, &host, zeros)?;
    }
    Ok(())
}

/// Quantises all rows on all threads.
fn quantise_rows(backend: &CpuBackend, numbers: &[f32], made: &mut QuantisedMatrix) -> Result<()> {
    let format = made.format;
    let (columns, groups) = (made.in_features.max(1), made.num_groups().max(1));
    let row_bytes = format.code.row_bytes(columns);
    let mut rows = try_with_capacity(made.out_features, "the rows of a matrix")?;
    let mut zeros = made.zeros.chunks_mut(groups);
    let parts = made.codes.chunks_mut(row_bytes).zip(made.scales.chunks_mut(groups));
    for (row, (codes, scales)) in numbers.chunks_exact(columns).zip(parts) {
        let zeros = zeros.next().unwrap_or_default();
        rows.push(Mutex::new(Some((row, RowOut { codes, scales, zeros }))));
    }
    let failure: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    backend.parallel_for(rows.len(), &|index| {
        let row = rows
            .get(index)
            .and_then(|row| row.lock().unwrap_or_else(PoisonError::into_inner).take());
        let Some((numbers, out)) = row else { return };
        if let Err(error) = quantise_row(backend, numbers, &format, out) {
            let mut first = failure.lock().unwrap_or_else(PoisonError::into_inner);
            if first.as_ref().is_none_or(|(row, _)| index < *row) {
                *first = Some((index, error.with_kind(ErrorKind::InvalidArgument)));
            }
        }
    })?;
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((row, error)) => Err(error).context(|| format!("x, row {row}")),
        None => Ok(()),
    }
}
