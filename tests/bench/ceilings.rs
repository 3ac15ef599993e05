//! Measures how fast a device reads its memory and multiplies large matrices, by operators of the
//! library through its C interface. The same as `examples/c/bench/ceilings.h`, which says more.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::Instant;

use xserv::ffi::*;

use super::limits::Ceilings;
use super::tensors::{ok, Context};

/// The settings of a measurement.
pub struct Probes {
    /// The type of the weights that are read, and of the product: f32, f16 or bf16.
    pub dtype: xserv_dtype,
    /// Bytes to read: a multiple of 4 MiB, and several times the caches.
    pub num_bytes: usize,
    /// Rows and columns of the matrices of the product.
    pub gemm_size: i64,
    /// The length of a measurement; the result is the median of several.
    pub round_seconds: f64,
}

const ROUNDS: usize = 5;
/// The number of random values, which are then repeated.
const PATTERN_LEN: i64 = 1 << 20;
/// Columns of the matrix that is multiplied with one row.
const COLUMNS: i64 = 4096;
/// Bytes of each row that is searched for its largest element.
const ROW_BYTES: i64 = 256 << 10;

/// Measures both rates. That of reads is the better one of two kernels that do little else, a
/// product of one row with a matrix and a search for the largest elements of rows; that of products
/// is the library's own choice of a kernel on random numbers, kept up for some rounds.
pub fn measure(context: &Context, probes: &Probes) -> Ceilings {
    let read_gbs = read_rate(context, probes);
    // The memory that the reads took goes back to the driver, for the products and their workspace.
    ok(xserv_context_trim(context.handle));
    Ceilings { read_gbs, tflops: product_rate(context, probes) }
}

/// A tensor of one dimension.
struct Array {
    owned: *mut xserv_owned_tensor,
    view: xserv_tensor,
    count: i64,
}

impl Drop for Array {
    fn drop(&mut self) {
        xserv_owned_tensor_free(self.owned);
    }
}

impl Array {
    fn new(context: &Context, dtype: xserv_dtype, count: i64) -> Self {
        let mut owned = null_mut();
        // SAFETY: one size; the out-pointers are writable, and a descriptor is plain data.
        let view = unsafe {
            ok(xserv_owned_tensor_new(context.handle, dtype as u32, 1, &count, &mut owned));
            let mut view = std::mem::zeroed();
            ok(xserv_owned_tensor_view(owned, &mut view));
            view
        };
        Array { owned, view, count }
    }

    /// Random numbers from -1 to 1, made on the host once and doubled on the device until the array
    /// is full.
    fn random(context: &Context, dtype: xserv_dtype, count: i64, mut seed: u64) -> Self {
        let array = Array::new(context, dtype, count);
        let mut filled = count.min(PATTERN_LEN);
        let mut values: Vec<f32> = (0..filled)
            .map(|_| {
                // Knuth's MMIX generator.
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect();
        let pattern = Array::new(context, xserv_dtype::XSERV_DTYPE_F32, filled);
        let host = xserv_tensor {
            data: values.as_mut_ptr().cast::<c_void>(),
            device: xserv_tensor_device { device_type: 1, device_id: 0 },
            ..pattern.view
        };
        let begin = array.slice(0, &mut filled);
        // SAFETY: the descriptors are those of owned tensors and of `values`, and all have `filled`
        // elements.
        unsafe {
            ok(xserv_op_copy(context.handle, &host, &pattern.view));
            ok(xserv_op_cast(context.handle, &pattern.view, &begin));
        }
        while filled < count {
            let mut len = filled.min(count - filled);
            let (from, to) = (array.slice(0, &mut len), array.slice(filled, &mut len));
            // SAFETY: parts of the array that share nothing.
            ok(unsafe { xserv_op_copy(context.handle, &from, &to) });
            filled += len;
        }
        array
    }

    /// `len` elements from `first` on; the descriptor points to `len`.
    fn slice(&self, first: i64, len: &mut i64) -> xserv_tensor {
        let bytes = u64::from(self.view.dtype.bits / 8);
        assert!(first + *len <= self.count, "a part of the array");
        xserv_tensor {
            shape: len,
            strides: null_mut(),
            byte_offset: first as u64 * bytes,
            ..self.view
        }
    }

    /// Returns the array as a matrix; the descriptor points to `shape`.
    fn matrix(&self, shape: &mut [i64; 2]) -> xserv_tensor {
        assert_eq!(shape[0] * shape[1], self.count, "all elements");
        xserv_tensor { ndim: 2, shape: shape.as_mut_ptr(), strides: null_mut(), ..self.view }
    }
}

/// Queues c = a b^T.
///
/// # Safety
/// The descriptors are those of memory that lives until the context has been synchronised.
unsafe fn multiply(context: &Context, [a, b, c]: &[xserv_tensor; 3]) {
    // SAFETY: options are plain data, filled before they are used; the rest is passed on to the
    // caller.
    unsafe {
        let mut options: xserv_gemm_options = std::mem::zeroed();
        xserv_gemm_options_init(&mut options, size_of_val(&options));
        options.transpose_b = 1;
        ok(xserv_op_gemm(context.handle, &options, a, b, c));
    }
}

fn read_rate(context: &Context, probes: &Probes) -> f64 {
    let &Probes { dtype, num_bytes, round_seconds, .. } = probes;
    let bytes_each = if dtype == xserv_dtype::XSERV_DTYPE_F32 { 4 } else { 2 };
    let rows = num_bytes as i64 / bytes_each / COLUMNS;
    let weight = Array::random(context, dtype, rows * COLUMNS, 1);
    let row = Array::random(context, dtype, COLUMNS, 2);
    let out = Array::new(context, dtype, rows);
    let (mut row_shape, mut weight_shape, mut out_shape) =
        ([1, COLUMNS], [rows, COLUMNS], [1, rows]);
    let matrices =
        [row.matrix(&mut row_shape), weight.matrix(&mut weight_shape), out.matrix(&mut out_shape)];
    // SAFETY: the arrays live until the end of this function.
    let product = time(context, round_seconds, || unsafe { multiply(context, &matrices) });

    // The same memory, taken for f32: the fewest comparisons for a byte.
    let num_searched = num_bytes as i64 / ROW_BYTES;
    let places = Array::new(context, xserv_dtype::XSERV_DTYPE_I32, num_searched);
    let mut shape = [num_searched, ROW_BYTES / 4];
    let searched = xserv_tensor {
        ndim: 2,
        dtype: xserv_tensor_dtype { code: 2, bits: 32, lanes: 1 },
        shape: shape.as_mut_ptr(),
        strides: null_mut(),
        ..weight.view
    };
    let search = time(context, round_seconds, || {
        // SAFETY: as before; the rows are all of the array's bytes, and there is a place for each.
        ok(unsafe { xserv_op_argmax(context.handle, &searched, &places.view) });
    });
    num_bytes as f64 / product.min(search) * 1e-9
}

fn product_rate(context: &Context, probes: &Probes) -> f64 {
    let &Probes { dtype, gemm_size: size, round_seconds, .. } = probes;
    let a = Array::random(context, dtype, size * size, 3);
    let b = Array::random(context, dtype, size * size, 4);
    let c = Array::new(context, dtype, size * size);
    let mut shapes = [[size, size]; 3];
    let [a_shape, b_shape, c_shape] = &mut shapes;
    let matrices = [a.matrix(a_shape), b.matrix(b_shape), c.matrix(c_shape)];
    // SAFETY: the arrays live until the end of this function.
    let seconds = time(context, round_seconds, || unsafe { multiply(context, &matrices) });
    2.0 * (size as f64).powi(3) / seconds * 1e-12
}

/// Seconds of a call: the median of some rounds, after a first call that loads the kernel, one that
/// tells how many a round has, and a round that brings the device to the speed that it keeps.
fn time(context: &Context, round_seconds: f64, queue: impl Fn()) -> f64 {
    let seconds_of = |count: usize| {
        let begin = Instant::now();
        (0..count).for_each(|_| queue());
        ok(xserv_context_synchronize(context.handle));
        begin.elapsed().as_secs_f64() / count as f64
    };
    seconds_of(1);
    let count = (round_seconds / seconds_of(1).max(1e-6)).clamp(1.0, 1e4) as usize;
    let mut rounds: Vec<f64> = (0..=ROUNDS).map(|_| seconds_of(count)).skip(1).collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}
