//! Matrices as the kernels take them: row-major lines, of the matrix or of its transpose; and
//! copies of matrices that lie otherwise.

use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{Block, DType, ElementType, Tensor};
use crate::ops::common::copy::copy_unchecked;

/// A stored matrix, row-major: lines of contiguous elements `ld` apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand {
    pub data: *mut u8,
    /// Whether it is the transpose of the matrix that the product needs.
    pub transposed: bool,
    pub ld: i64,
    /// The distance between the matrices of a batch; 0 if one serves every product.
    pub batch_stride: i64,
}

/// A product of matrices in layouts that the kernels take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub dtype: DType,
    pub m: i64,
    pub n: i64,
    pub k: i64,
    pub batch: i64,
    pub a: Operand,
    pub b: Operand,
    pub c: Operand,
    pub alpha: f32,
    pub beta: f32,
    /// What cuBLAS adds to every row of C, [n] and contiguous; null: nothing.
    pub bias: *const u8,
}

/// Returns the last two sizes, exchanged for a transpose.
pub(super) fn matrix_sizes(tensor: &Tensor, transpose: bool) -> (i64, i64) {
    let mut sizes = tensor.shape().iter().rev().copied();
    let (columns, rows) = (sizes.next().unwrap_or(1), sizes.next().unwrap_or(1));
    if transpose {
        (columns, rows)
    } else {
        (rows, columns)
    }
}

/// Returns the size before the last two.
pub(super) fn batch_size(tensor: &Tensor) -> Option<i64> {
    (tensor.shape().len() == 3).then(|| tensor.shape().first().copied()).flatten()
}

impl Product {
    /// Folds a batch into one product with more rows where it shares B and steps evenly through A
    /// and C.
    pub(super) fn folded(self) -> Self {
        let Product { m, k, n, batch, a, b, c, .. } = self;
        let is_even = |x: &Operand, width: i64| {
            !x.transposed
                && (m == 1 && x.batch_stride >= width
                    || m > 1 && m.checked_mul(x.ld) == Some(x.batch_stride))
        };
        let rows = m.checked_mul(batch);
        let shares = k == 0 || b.batch_stride == 0 && is_even(&a, k);
        match rows {
            Some(rows) if batch > 1 && shares && is_even(&c, n) => {
                let with_rows =
                    |x: Operand| Operand { ld: if m == 1 { x.batch_stride } else { x.ld }, ..x };
                Product { m: rows, batch: 1, a: with_rows(a), c: with_rows(c), ..self }
            }
            _ => self,
        }
    }

    /// Whether 16 bytes at a time can be read of an operand.
    pub(super) fn in_vectors(&self, operand: &Operand) -> bool {
        let vector = 16 / self.dtype.size_bytes() as i64;
        (operand.data as usize).is_multiple_of(16)
            && operand.ld % vector == 0
            && (self.batch == 1 || operand.batch_stride % vector == 0)
    }
}

/// Returns the width of rows that are whole vectors of 16 bytes for every element type.
pub(super) fn padded(width: i64) -> i64 {
    (width + 7) / 8 * 8
}

/// The layout of the elements of op(X) [rows, columns].
#[derive(Clone, Copy)]
pub(super) struct View {
    pub rows: i64,
    pub columns: i64,
    pub row_stride: i64,
    pub column_stride: i64,
}

impl View {
    pub(super) fn of(tensor: &Tensor, transpose: bool) -> Self {
        let mut strides = tensor.strides().iter().rev().copied();
        let (last, first) = (strides.next().unwrap_or(1), strides.next().unwrap_or(1));
        let (rows, columns) = matrix_sizes(tensor, transpose);
        let (row_stride, column_stride) = if transpose { (last, first) } else { (first, last) };
        View { rows, columns, row_stride, column_stride }
    }

    /// Returns how the matrix is made of lines of contiguous elements: whether those are the
    /// columns, and their distance. Where both ways hold, it prefers columns if `prefer_columns`.
    pub(super) fn lines(self, prefer_columns: bool) -> Option<(bool, i64)> {
        let View { rows, columns, row_stride, column_stride } = self;
        let by = |lines: i64, width: i64, line_stride: i64, step: i64| {
            let fits = (width <= 1 || step == 1) && (lines <= 1 || line_stride >= width.max(1));
            // The distance of a single line is free, so this is one that suits every kernel.
            fits.then(|| if lines <= 1 { padded(width.max(1)) } else { line_stride })
        };
        let in_rows = by(rows, columns, row_stride, column_stride).map(|ld| (false, ld));
        let in_columns = by(columns, rows, column_stride, row_stride).map(|ld| (true, ld));
        if prefer_columns {
            in_columns.or(in_rows)
        } else {
            in_rows.or(in_columns)
        }
    }
}

/// An operand where it lies, or a copy of it.
pub(super) struct Staged {
    pub operand: Operand,
    _copy: Option<Block>,
}

impl Staged {
    pub(super) fn nothing(lines: i64) -> Self {
        let data = std::ptr::null_mut();
        let ld = padded(lines);
        Staged { operand: Operand { data, transposed: false, ld, batch_stride: 0 }, _copy: None }
    }

    pub(super) fn of(
        context: &ComputeContext,
        tensor: &Tensor,
        transpose: bool,
        prefer_columns: bool,
    ) -> Result<Self> {
        let tensor = match (batch_size(tensor), tensor.strides().first()) {
            (Some(1), _) | (Some(_), Some(0)) => first_matrix(tensor)?,
            _ => *tensor,
        };
        let (tensor, copy) = match View::of(&tensor, transpose).lines(prefer_columns) {
            Some(_) => (tensor, None),
            None => {
                let (place, block) = padded_place(context, &tensor)?;
                // SAFETY: both are valid for their layouts; the new block overlaps nothing.
                unsafe { copy_unchecked(context, &tensor, &place) }?;
                (place, Some(block))
            }
        };
        Ok(Staged { operand: operand(&tensor, transpose, prefer_columns)?, _copy: copy })
    }
}

pub(super) fn operand(tensor: &Tensor, transpose: bool, prefer_columns: bool) -> Result<Operand> {
    let (transposed, ld) = View::of(tensor, transpose)
        .lines(prefer_columns)
        .ok_or_else(|| Error::internal("gemm: a matrix without lines"))?;
    let batch_stride = match batch_size(tensor) {
        Some(_) => tensor.strides().first().copied().unwrap_or(0),
        None => 0,
    };
    Ok(Operand { data: tensor.data(), transposed, ld, batch_stride })
}

/// Returns the first matrix of a batch.
pub(super) fn first_matrix(tensor: &Tensor) -> Result<Tensor> {
    let shape = tensor.shape().get(1..).unwrap_or_default();
    let strides = tensor.strides().get(1..).unwrap_or_default();
    let (data, element) = (tensor.data(), tensor.element());
    // SAFETY: part of what the tensor spans.
    unsafe { Tensor::from_raw(data, element, tensor.device(), shape, Some(strides), "a matrix") }
}

/// Returns the stored matrices of an operand as a tensor [batch, lines, width].
pub(super) fn matrix_tensor(
    context: &ComputeContext,
    dtype: DType,
    operand: &Operand,
    batch: i64,
    lines: i64,
    width: i64,
) -> Result<Tensor> {
    let (shape, strides) = ([batch, lines, width], [operand.batch_stride, operand.ld, 1]);
    let (element, device) = (ElementType::Float(dtype), context.device());
    // SAFETY: the operand spans these elements.
    unsafe { Tensor::from_raw(operand.data, element, device, &shape, Some(&strides), "a matrix") }
}

/// Allocates memory for a tensor in rows of whole vectors of 16 bytes, uninitialised.
pub(super) fn padded_place(context: &ComputeContext, tensor: &Tensor) -> Result<(Tensor, Block)> {
    let (rows, columns) = matrix_sizes(tensor, false);
    let (batch, size) = (batch_size(tensor), tensor.element().size_bytes() as i64);
    let what = "a copy in another layout";
    let ld = padded(columns);
    let matrix = rows.checked_mul(ld);
    let bytes = matrix.and_then(|x| x.checked_mul(batch.unwrap_or(1))?.checked_mul(size));
    let (Some(matrix), Some(bytes)) = (matrix, bytes) else {
        return Err(Error::out_of_memory(what, usize::MAX));
    };
    let block = context.allocate(bytes as usize, what)?;
    let all = [matrix, ld, 1];
    let strides = all.get(usize::from(batch.is_none())..).unwrap_or_default();
    let (element, device) = (tensor.element(), context.device());
    // SAFETY: the block is memory of the context's device of the size that shape and strides need.
    let place = unsafe {
        Tensor::from_raw(block.start(), element, device, tensor.shape(), Some(strides), what)
    }?;
    Ok((place, block))
}

/// The memory in which C is computed: its own, or one from which it is copied.
pub(super) struct Place {
    pub operand: Operand,
    staged: Option<(Tensor, Tensor, Block)>,
}

impl Place {
    pub(super) fn of(
        context: &ComputeContext,
        c: &Tensor,
        beta: f32,
        prefer_columns: bool,
    ) -> Result<Self> {
        if View::of(c, false).lines(prefer_columns).is_some() {
            return Ok(Place { operand: operand(c, false, prefer_columns)?, staged: None });
        }
        let (place, block) = padded_place(context, c)?;
        if beta != 0.0 {
            // SAFETY: both are valid for their layouts; the new block overlaps nothing.
            unsafe { copy_unchecked(context, c, &place) }?;
        }
        Ok(Place { operand: operand(&place, false, false)?, staged: Some((place, *c, block)) })
    }

    pub(super) fn finish(self, context: &ComputeContext) -> Result<()> {
        match &self.staged {
            // SAFETY: as in `of`.
            Some((place, c, _block)) => unsafe { copy_unchecked(context, place, c) },
            None => Ok(()),
        }
    }
}
