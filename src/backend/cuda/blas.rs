//! Matrix products by cuBLASLt, where it is installed: found at run time, never required.

use super::device::CudaDevice;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{CachingAllocator, DType};
use crate::panic_guard;
use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::CUstream;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The largest workspace of cuBLAS, for split sums, in bytes. cuBLAS recommends 32 MiB for Hopper;
/// earlier chips need less.
pub(crate) const MAX_CUBLAS_WORKSPACE_BYTES: usize = 32 << 20;
/// The most plans kept; when a program uses more shapes, all plans are dropped and made again.
const MAX_PLANS: usize = 4096;

/// `C = alpha op(A) op(B) + beta C`, row-major: op(A) is [m, k], op(B) [k, n], C [m, n], with
/// leading dimensions in elements, `batch` times at the given strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MatmulShape {
    pub dtype: DType,
    pub transpose_a: bool,
    pub transpose_b: bool,
    pub m: u64,
    pub n: u64,
    pub k: u64,
    pub lda: i64,
    pub ldb: i64,
    pub ldc: i64,
    pub batch: i32,
    pub batch_stride_a: i64,
    pub batch_stride_b: i64,
    pub batch_stride_c: i64,
    /// Whether a vector of n elements is added to every row of C before it is rounded.
    pub has_bias: bool,
    /// The smallest power of two, at most 16, of which all three addresses are multiples.
    pub alignment: u32,
}

/// A cuBLASLt handle.
#[derive(Clone, Copy)]
struct Handle(sys::cublasLtHandle_t);

// SAFETY: a cuBLASLt handle may be used by several threads at the same time, and is never destroyed.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// The handle of each device, by its index. All contexts of a device share it, and it lives as long as
/// the process: destroying one synchronises everything on the device, and has crashed in the driver
/// (seen with 13.0) while other threads worked on it.
static HANDLES: Mutex<Vec<(i32, Handle)>> = Mutex::new(Vec::new());

fn handle_of(device: &CudaDevice) -> Result<Handle> {
    let index = device.index();
    let mut handles = HANDLES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, handle)) = handles.iter().find(|(of, _)| *of == index) {
        return Ok(*handle);
    }
    let no_memory = |_| Error::out_of_memory("a handle of cuBLASLt", size_of::<(i32, Handle)>());
    handles.try_reserve(1).map_err(no_memory)?;
    // If the installed version lacks a function that we need, the bindings panic.
    let make = || result::create_handle().map_err(failed("making a handle"));
    device.check_alive()?;
    let _current = device.enter()?;
    let handle = Handle(panic_guard::catch(make)?);
    handles.push((index, handle));
    Ok(handle)
}

/// The device's cuBLASLt handle and the plans made so far, for the stream of one context.
pub(crate) struct Blas {
    device: Arc<CudaDevice>,
    allocator: Arc<CachingAllocator>,
    stream: CUstream,
    handle: Handle,
    /// The bytes of workspace that a product may use.
    workspace_bytes: usize,
    plans: Mutex<HashMap<MatmulShape, Plan>>,
}

// SAFETY: any thread may use the handle and the stream; the plans, which hold pointers, are guarded by
// a lock.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

/// The descriptors and the algorithm for one shape.
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    a: sys::cublasLtMatrixLayout_t,
    b: sys::cublasLtMatrixLayout_t,
    c: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by `Plan::new`, each once; NULL where making it failed.
        unsafe {
            for layout in [self.a, self.b, self.c] {
                if !layout.is_null() {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
            if !self.description.is_null() {
                let _ = result::destroy_matmul_desc(self.description);
            }
        }
    }
}

fn failed(what: &'static str) -> impl Fn(result::CublasError) -> Error {
    move |e| Error::internal(format!("cuBLASLt: {what}: {e}"))
}

/// Whether cuBLASLt is installed. `XSERV_CUBLAS=0` in the environment hides it.
pub(crate) fn is_present() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let hidden = std::env::var_os("XSERV_CUBLAS").is_some_and(|value| value == "0");
        // SAFETY: opens the library, which starts no work of its own.
        !hidden && unsafe { sys::is_culib_present() }
    })
}

impl Blas {
    /// Makes what multiplies on `stream` of the device, which lives as long as the result. Products
    /// take `workspace_bytes` of `allocator`.
    pub(super) fn new(
        device: Arc<CudaDevice>,
        allocator: Arc<CachingAllocator>,
        stream: CUstream,
        workspace_bytes: usize,
    ) -> Result<Self> {
        if !is_present() {
            return Err(Error::new(
                ErrorKind::NoDevice,
                "cuBLASLt is not installed (libcublasLt.so was not found)",
            ));
        }
        let handle = handle_of(&device)?;
        Ok(Blas { device, allocator, stream, handle, workspace_bytes, plans: Mutex::default() })
    }

    /// Queues a product. `bias` is what the shape says that it has, contiguous, or null.
    ///
    /// # Safety
    /// The matrices and the bias are valid device memory of the shape's extents until the work is done; C
    /// overlaps none of the others.
    #[allow(clippy::too_many_arguments)]
    pub(crate) unsafe fn matmul(
        &self,
        shape: &MatmulShape,
        alpha: f32,
        a: *const u8,
        b: *const u8,
        beta: f32,
        c: *mut u8,
        bias: *const u8,
    ) -> Result<()> {
        if shape.has_bias == bias.is_null() {
            return Err(Error::internal("a bias that the shape of a product does not name"));
        }
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if plans.len() >= MAX_PLANS {
            plans.clear();
        }
        // Dropped while the product is only queued: the next owner of the memory queues its work
        // after it.
        let bytes = self.workspace_bytes;
        let workspace = self.allocator.allocate(bytes, "the workspace of cuBLASLt")?;
        self.device.check_alive()?;
        let _current = self.device.enter()?;
        if !plans.contains_key(shape) {
            let plan = Plan::new(self.handle.0, shape, self.workspace_bytes)?;
            plans.insert(*shape, plan);
        }
        let plan = plans.get(shape).ok_or_else(|| Error::internal("a plan was lost"))?;
        if shape.has_bias {
            let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            let pointer: *const c_void = (&raw const bias).cast();
            // SAFETY: a live description, which nobody else uses while the lock is held; the attribute is a
            // pointer.
            unsafe { result::set_matmul_desc_attribute(plan.description, attribute, pointer, 8) }
                .map_err(failed("a bias"))?;
        }
        // Row-major C = A B is column-major C^T = B^T A^T, so the operands are swapped.
        // SAFETY: the caller vouches for the matrices; the plan's parts are alive while the lock is
        // held; the workspace is of an allocator whose memory our stream's order protects.
        unsafe {
            result::matmul(
                self.handle.0,
                plan.description,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                b.cast(),
                plan.b,
                a.cast(),
                plan.a,
                c.cast_const().cast(),
                plan.c,
                c.cast(),
                plan.c,
                &plan.algorithm,
                workspace.start().cast(),
                workspace.len_bytes(),
                self.stream.cast(),
            )
        }
        .map_err(failed("a product"))
    }
}

impl Plan {
    fn new(
        handle: sys::cublasLtHandle_t,
        shape: &MatmulShape,
        workspace_bytes: usize,
    ) -> Result<Self> {
        use sys::cublasLtMatmulDescAttributes_t::*;
        use sys::cublasLtMatmulPreferenceAttributes_t::*;
        let matrix_type = match shape.dtype {
            DType::F32 => sys::cudaDataType::CUDA_R_32F,
            DType::F16 => sys::cudaDataType::CUDA_R_16F,
            DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        };
        let null = std::ptr::null_mut();
        // SAFETY: an opaque struct of integers, overwritten before use.
        let algorithm = unsafe { std::mem::zeroed() };
        let mut plan =
            Plan { description: null as _, a: null as _, b: null as _, c: null as _, algorithm };
        // f32 is multiplied as f32, never silently as TF32.
        plan.description = result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType::CUDA_R_32F,
        )
        .map_err(failed("a description"))?;
        let operation = |transpose: bool| i32::from(transpose);
        for (attribute, value) in [
            (CUBLASLT_MATMUL_DESC_TRANSA, operation(shape.transpose_b)),
            (CUBLASLT_MATMUL_DESC_TRANSB, operation(shape.transpose_a)),
        ] {
            let value: *const c_void = (&raw const value).cast();
            // SAFETY: a live description; the attribute is an i32.
            unsafe { result::set_matmul_desc_attribute(plan.description, attribute, value, 4) }
                .map_err(failed("a transpose"))?;
        }
        if shape.has_bias {
            // It has an element for each row of the column-major result, which is a column of C.
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            let value: *const c_void = (&raw const epilogue).cast();
            let size = size_of_val(&epilogue);
            let attribute = CUBLASLT_MATMUL_DESC_EPILOGUE;
            // SAFETY: as above; the attribute is this enumeration.
            unsafe { result::set_matmul_desc_attribute(plan.description, attribute, value, size) }
                .map_err(failed("an epilogue"))?;
        }
        // The stored matrix [rows, columns] row-major is [columns, rows] column-major.
        let layout = |rows: u64, columns: u64, leading: i64, stride: i64| {
            let made = result::create_matrix_layout(matrix_type, columns, rows, leading)
                .map_err(failed("a layout"))?;
            batched(made, shape.batch, stride)?;
            Ok::<_, Error>(made)
        };
        let (m, n, k) = (shape.m, shape.n, shape.k);
        let (a_rows, a_columns) = if shape.transpose_a { (k, m) } else { (m, k) };
        let (b_rows, b_columns) = if shape.transpose_b { (n, k) } else { (k, n) };
        plan.a = layout(a_rows, a_columns, shape.lda, shape.batch_stride_a)?;
        plan.b = layout(b_rows, b_columns, shape.ldb, shape.batch_stride_b)?;
        plan.c = layout(m, n, shape.ldc, shape.batch_stride_c)?;

        let preference = result::create_matmul_pref().map_err(failed("a preference"))?;
        let chosen = (|| {
            let bytes: *const c_void = (&raw const workspace_bytes).cast();
            let alignment: *const c_void = (&raw const shape.alignment).cast();
            // SAFETY: a live preference; the first attribute is a size, the others are u32.
            unsafe {
                let workspace = CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
                result::set_matmul_pref_attribute(preference, workspace, bytes, 8)?;
                for attribute in [
                    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                ] {
                    result::set_matmul_pref_attribute(preference, attribute, alignment, 4)?;
                }
                result::get_matmul_algo_heuristic(
                    handle,
                    plan.description,
                    plan.b,
                    plan.a,
                    plan.c,
                    plan.c,
                    preference,
                )
            }
        })();
        // SAFETY: made above.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        plan.algorithm = chosen.map_err(failed("no algorithm for this shape"))?.algo;
        Ok(plan)
    }
}

fn batched(layout: sys::cublasLtMatrixLayout_t, batch: i32, stride: i64) -> Result<()> {
    use sys::cublasLtMatrixLayoutAttribute_t::*;
    if batch == 1 {
        return Ok(());
    }
    // SAFETY: a live layout; the attributes are an i32 and an i64.
    unsafe {
        let count: *const c_void = (&raw const batch).cast();
        let stride: *const c_void = (&raw const stride).cast();
        result::set_matrix_layout_attribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count, 4)
            .and_then(|()| {
                let offset = CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
                result::set_matrix_layout_attribute(layout, offset, stride, 8)
            })
    }
    .map_err(failed("a batch"))
}
