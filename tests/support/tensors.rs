//! Tensors for the tests of the operators, through the C interface, on the CPU and on CUDA.
//!
//! Every tensor lies between two guards that must stay as they are; results begin as NaN.
//! References are computed in f64 from the values as they are stored.

use super::fp8;
use super::random::Random;
use std::ffi::{c_void, CStr};
use xserv::ffi::*;

/// An element type and its C number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    F32,
    F16,
    BF16,
    /// Floats of 8 bits, for caches of keys and values alone.
    Fp8,
    I32,
    I64,
}

pub const FLOATS: [Type; 3] = [Type::F32, Type::F16, Type::BF16];

impl Type {
    pub fn size(self) -> usize {
        match self {
            Type::Fp8 => 1,
            Type::F16 | Type::BF16 => 2,
            Type::F32 | Type::I32 => 4,
            Type::I64 => 8,
        }
    }

    fn c(self) -> u32 {
        (match self {
            Type::F32 => xserv_dtype::XSERV_DTYPE_F32,
            Type::F16 => xserv_dtype::XSERV_DTYPE_F16,
            Type::BF16 => xserv_dtype::XSERV_DTYPE_BF16,
            Type::I32 => xserv_dtype::XSERV_DTYPE_I32,
            Type::I64 => xserv_dtype::XSERV_DTYPE_I64,
            Type::Fp8 => unreachable!("the library makes no such tensors"),
        }) as u32
    }

    fn dl(self) -> xserv_tensor_dtype {
        let (code, bits) = match self {
            Type::F32 => (2, 32),
            Type::F16 => (2, 16),
            Type::BF16 => (4, 16),
            Type::I32 => (0, 32),
            Type::I64 => (0, 64),
            Type::Fp8 => (10, 8),
        };
        xserv_tensor_dtype { code, bits, lanes: 1 }
    }

    pub fn encode(self, x: f64) -> Vec<u8> {
        match self {
            Type::F32 => (x as f32).to_le_bytes().to_vec(),
            Type::F16 => half::f16::from_f64(x).to_le_bytes().to_vec(),
            Type::BF16 => half::bf16::from_f64(x).to_le_bytes().to_vec(),
            Type::I32 => (x as i32).to_le_bytes().to_vec(),
            Type::I64 => (x as i64).to_le_bytes().to_vec(),
            Type::Fp8 => vec![fp8::code(x)],
        }
    }

    pub fn decode(self, bytes: &[u8]) -> f64 {
        match self {
            Type::F32 => f32::from_le_bytes(bytes.try_into().unwrap()).into(),
            Type::F16 => half::f16::from_le_bytes(bytes.try_into().unwrap()).into(),
            Type::BF16 => half::bf16::from_le_bytes(bytes.try_into().unwrap()).into(),
            Type::I32 => i32::from_le_bytes(bytes.try_into().unwrap()).into(),
            Type::I64 => i64::from_le_bytes(bytes.try_into().unwrap()) as f64,
            Type::Fp8 => fp8::number(bytes[0]),
        }
    }

    /// Returns the nearest value of the type.
    pub fn round(self, x: f64) -> f64 {
        self.decode(&self.encode(x))
    }

    pub fn round_all(self, x: &[f32]) -> Vec<f64> {
        x.iter().map(|&x| self.round(x.into())).collect()
    }

    /// Returns the one of three bars that is for this type.
    pub fn bar(self, f32: f64, f16: f64, bf16: f64) -> f64 {
        match self {
            Type::F16 => f16,
            Type::BF16 => bf16,
            _ => f32,
        }
    }
}

/// A compute context.
pub struct Context {
    pub handle: *mut xserv_context,
    pub name: &'static str,
}

impl Drop for Context {
    fn drop(&mut self) {
        xserv_context_free(self.handle);
    }
}

pub fn message() -> String {
    // SAFETY: a NUL-terminated string of this thread.
    unsafe { CStr::from_ptr(xserv_last_error()) }.to_str().unwrap().to_string()
}

/// Panics with the message unless the call succeeded.
#[track_caller]
pub fn ok(status: xserv_status) {
    assert!(status == xserv_status::XSERV_STATUS_OK, "{status:?}: {}", message());
}

/// Returns the message of a call that must be refused for an argument.
#[track_caller]
pub fn refused(status: xserv_status) -> String {
    assert_eq!(status, xserv_status::XSERV_STATUS_INVALID_ARGUMENT, "{}", message());
    message()
}

pub fn context(kind: xserv_device_kind) -> Option<Context> {
    context_with(kind, 2)
}

/// The same with a number of threads on the CPU.
pub fn context_with(kind: xserv_device_kind, num_threads: u32) -> Option<Context> {
    let mut handle = std::ptr::null_mut();
    // SAFETY: plain out-pointers and a filled struct.
    let status = unsafe {
        let mut options = std::mem::zeroed();
        xserv_context_options_init(&mut options, size_of_val(&options));
        options.device_kind = kind as u32;
        options.num_threads = num_threads;
        xserv_context_new(&options, &mut handle)
    };
    let name = if kind == xserv_device_kind::XSERV_DEVICE_CPU { "cpu" } else { "cuda" };
    match status {
        xserv_status::XSERV_STATUS_OK => Some(Context { handle, name }),
        xserv_status::XSERV_STATUS_NO_DEVICE => None,
        other => panic!("{other:?}: {}", message()),
    }
}

/// Returns a context on CUDA, or a line that says why not. `XSERV_REQUIRE_GPU=1` makes the lack of
/// one a failure.
pub fn cuda() -> Option<Context> {
    let found = context(xserv_device_kind::XSERV_DEVICE_CUDA);
    if found.is_none() {
        assert!(std::env::var_os("XSERV_REQUIRE_GPU").is_none(), "no CUDA device: {}", message());
        println!("skipped: no CUDA device ({})", message());
    }
    found
}

/// Returns the CPU, and CUDA where there is one. `XSERV_TEST_DEVICE=cpu` or `cuda` picks one.
pub fn contexts() -> Vec<Context> {
    let only = std::env::var("XSERV_TEST_DEVICE").unwrap_or_default();
    let mut all = Vec::new();
    if only != "cuda" {
        all.extend(context(xserv_device_kind::XSERV_DEVICE_CPU));
    }
    if only != "cpu" {
        all.extend(cuda());
    }
    all
}

const GUARD_BYTES: usize = 64;
const GUARD: u8 = 0xa5;

/// A tensor in memory of a context, with guards on both sides.
pub struct TestTensor<'a> {
    context: &'a Context,
    owned: *mut xserv_owned_tensor,
    element: Type,
    pub shape: Vec<i64>,
    pub strides: Vec<i64>,
    /// Elements from the first to the last, gaps included.
    span: usize,
    /// Bytes before the first element.
    offset: usize,
    data: *mut c_void,
    device: xserv_tensor_device,
}

impl Drop for TestTensor<'_> {
    fn drop(&mut self) {
        xserv_owned_tensor_free(self.owned);
    }
}

fn row_major(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1);
    }
    strides
}

impl<'a> TestTensor<'a> {
    /// Returns a contiguous tensor of these values, rounded to the type.
    pub fn new(context: &'a Context, element: Type, shape: &[i64], values: &[f64]) -> Self {
        Self::strided(context, element, shape, &row_major(shape), 0, values)
    }

    /// Returns a contiguous tensor full of NaN (of -1 for integers), to be written.
    pub fn blank(context: &'a Context, element: Type, shape: &[i64]) -> Self {
        let len: i64 = shape.iter().product();
        let blank = if matches!(element, Type::I32 | Type::I64) { -1.0 } else { f64::NAN };
        Self::new(context, element, shape, &vec![blank; len as usize])
    }

    /// Returns a tensor with these strides in elements; `misalign` elements push the first off its
    /// alignment. The gaps are guards too.
    pub fn strided(
        context: &'a Context,
        element: Type,
        shape: &[i64],
        strides: &[i64],
        misalign: usize,
        values: &[f64],
    ) -> Self {
        let len: i64 = shape.iter().product();
        assert_eq!(len as usize, values.len());
        let last: i64 = shape.iter().zip(strides).map(|(n, s)| (n - 1) * s).sum();
        let span = if len == 0 { 0 } else { last as usize + 1 };
        let offset = GUARD_BYTES + misalign * element.size();
        let total = (offset + span * element.size() + GUARD_BYTES).div_ceil(4);
        let mut owned = std::ptr::null_mut();
        // SAFETY: valid pointers; the view is filled by the call.
        let view = unsafe {
            let total = [total as i64];
            ok(xserv_owned_tensor_new(
                context.handle,
                Type::I32.c(),
                1,
                total.as_ptr(),
                &mut owned,
            ));
            let mut view = std::mem::zeroed();
            ok(xserv_owned_tensor_view(owned, &mut view));
            view
        };
        let made = TestTensor {
            context,
            owned,
            element,
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            span,
            offset,
            data: view.data,
            device: view.device,
        };
        let mut bytes = vec![GUARD; total * 4];
        for (index, value) in values.iter().enumerate() {
            let at = made.offset + made.place(index) * element.size();
            bytes[at..at + element.size()].copy_from_slice(&element.encode(*value));
        }
        made.transfer(&mut bytes, true);
        made
    }

    /// Returns where in the memory the element with this row-major index lies, in elements.
    fn place(&self, mut index: usize) -> usize {
        let mut place = 0;
        for (&size, &stride) in self.shape.iter().zip(&self.strides).rev() {
            place += (index % size as usize) * stride as usize;
            index /= size as usize;
        }
        place
    }

    fn transfer(&self, bytes: &mut [u8], up: bool) {
        let mut len = [(bytes.len() / 4) as i64];
        let describe = |data: *mut c_void, device, len: &mut [i64; 1]| xserv_tensor {
            data,
            device,
            ndim: 1,
            dtype: Type::I32.dl(),
            shape: len.as_mut_ptr(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        };
        let host_device = xserv_tensor_device { device_type: 1, device_id: 0 };
        // The host side must be aligned too.
        let mut words = vec![0u32; bytes.len() / 4];
        if up {
            for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
                *word = u32::from_le_bytes(bytes.try_into().unwrap());
            }
        }
        let host = describe(words.as_mut_ptr().cast(), host_device, &mut len.clone());
        let own = describe(self.data, self.device, &mut len);
        let mut host_len = [(bytes.len() / 4) as i64];
        let host = xserv_tensor { shape: host_len.as_mut_ptr(), ..host };
        // SAFETY: both descriptors span memory of `len` words.
        unsafe {
            match up {
                true => ok(xserv_op_copy(self.context.handle, &host, &own)),
                false => ok(xserv_op_copy(self.context.handle, &own, &host)),
            }
        }
        if !up {
            for (word, bytes) in words.iter().zip(bytes.chunks_exact_mut(4)) {
                bytes.copy_from_slice(&word.to_le_bytes());
            }
        }
    }

    /// Returns the descriptor. Valid as long as the tensor is.
    pub fn view(&self) -> xserv_tensor {
        xserv_tensor {
            data: self.data,
            device: self.device,
            ndim: self.shape.len() as i32,
            dtype: self.element.dl(),
            shape: self.shape.as_ptr().cast_mut(),
            strides: self.strides.as_ptr().cast_mut(),
            byte_offset: self.offset as u64,
        }
    }

    /// Returns the values, once all guards (gaps included) are found untouched.
    #[track_caller]
    pub fn read(&self, what: &str) -> Vec<f64> {
        let mut bytes =
            vec![
                0u8;
                (self.offset + self.span * self.element.size() + GUARD_BYTES).div_ceil(4) * 4
            ];
        self.transfer(&mut bytes, false);
        let size = self.element.size();
        let len: i64 = self.shape.iter().product();
        let mut values = Vec::new();
        for index in 0..len as usize {
            let at = self.offset + self.place(index) * size;
            values.push(self.element.decode(&bytes[at..at + size]));
        }
        for index in 0..len as usize {
            let at = self.offset + self.place(index) * size;
            bytes[at..at + size].fill(GUARD);
        }
        assert!(bytes.iter().all(|&b| b == GUARD), "{what}: wrote outside its output");
        values
    }
}

/// Compares with a reference: `|got - want| <= bar * (|want| + rms(want))` for every element; NaN
/// only where the reference has it, infinities equal. Prints the worst coordinate when it fails.
#[track_caller]
pub fn compare(what: &str, got: &[f64], want: &[f64], bar: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let finite: Vec<f64> = want.iter().copied().filter(|x| x.is_finite()).collect();
    let rms = (finite.iter().map(|x| x * x).sum::<f64>() / finite.len().max(1) as f64).sqrt();
    let mut worst = (0.0, 0);
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        if !w.is_finite() {
            assert!(g == w || (g.is_nan() && w.is_nan()), "{what}: element {i} is {g}, not {w}");
            continue;
        }
        let error = (g - w).abs() / (w.abs() + rms + 1e-300);
        if error.is_nan() || error > worst.0 {
            worst = (error, i);
        }
    }
    assert!(
        worst.0 <= bar,
        "{what}: element {} is {}, not {}: error {:.3e}, bar {bar:.1e}",
        worst.1,
        got[worst.1],
        want[worst.1],
        worst.0
    );
}

/// Returns a view of some of another's elements, `first` elements after its first. Its shape is
/// leaked.
pub fn slice(
    base: &xserv_tensor,
    element: Type,
    shape: &[i64],
    strides: &[i64],
    first: usize,
) -> xserv_tensor {
    assert_eq!(shape.len(), strides.len());
    xserv_tensor {
        ndim: shape.len() as i32,
        shape: shape.to_vec().leak().as_mut_ptr(),
        strides: strides.to_vec().leak().as_mut_ptr(),
        byte_offset: base.byte_offset + (first * element.size()) as u64,
        ..*base
    }
}

/// Returns how often the context's allocator was asked for memory so far.
pub fn num_allocations(context: &Context) -> u64 {
    // SAFETY: a filled struct of the library's size.
    unsafe {
        let mut stats: xserv_memory_stats = std::mem::zeroed();
        stats.struct_size = size_of::<xserv_memory_stats>();
        ok(xserv_context_get_memory_stats(context.handle, &mut stats));
        stats.num_allocations
    }
}

/// The types that an index may have.
pub const INDICES: [Type; 2] = [Type::I32, Type::I64];

pub fn ids_below(random: &mut Random, n: usize, len: usize) -> Vec<f64> {
    (0..len).map(|_| random.below(n) as f64).collect()
}

/// A wrong index is reported at once on the CPU, and by the wait on CUDA; it is never followed.
#[track_caller]
pub fn reported(context: &Context, status: xserv_status) -> String {
    if context.name == "cpu" {
        return refused(status);
    }
    ok(status);
    let message = refused(xserv_context_synchronize(context.handle));
    // Once.
    ok(xserv_context_synchronize(context.handle));
    message
}

/// Rows with many equal values, and some with NaN, infinities and zeros of both signs.
pub fn logits(random: &mut Random, element: Type, rows: usize, width: usize) -> Vec<f64> {
    let mut x = element.round_all(&random.normals(rows * width));
    for (number, row) in x.chunks_exact_mut(width.max(1)).enumerate() {
        match number % 6 {
            1 => row.fill(f64::NEG_INFINITY),
            2 => {
                row[width / 2] = f64::NAN;
                row[width / 3] = f64::NAN;
            }
            3 => row
                .iter_mut()
                .enumerate()
                .for_each(|(i, x)| *x = if i % 2 == 0 { -0.0 } else { 0.0 }),
            4 => row.iter_mut().for_each(|x| *x = x.round()),
            5 => row[width - 1] = f64::INFINITY,
            _ => {}
        }
    }
    x
}

/// Returns the type of a case of the golden data.
pub fn golden_type(case: &str) -> Type {
    match case.rsplit('.').next() {
        Some("f32") => Type::F32,
        Some("bf16") => Type::BF16,
        other => panic!("{case}: a case of type {other:?}"),
    }
}

/// A call is refused, with a message that begins like this and says that too.
#[track_caller]
pub fn says(status: xserv_status, start: &str, also: &str) {
    let message = refused(status);
    assert!(message.starts_with(start) && message.contains(also), "{message}");
}

/// The bar of the golden vectors: relative to 1 + |want| in f32, one rounding in bf16.
#[track_caller]
pub fn close_to_golden(what: &str, element: Type, f32_bar: f64, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let bar = f32_bar * (1.0 + w.abs()) + element.bar(0.0, 0.0, 8e-3 * w.abs());
        let same = g == w || g.is_nan() && w.is_nan() || element.round(*w) == *g;
        assert!(same || (g - w).abs() <= bar, "{what}: element {i} is {g}, not {w}");
    }
}
