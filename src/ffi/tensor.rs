//! Tensors: descriptors of the caller's memory, and tensors in the library's own memory.

#![allow(non_camel_case_types)]

use std::ffi::c_void;
use std::sync::Arc;

use super::context::{context_of, xserv_context, ContextObject};
use super::guard::{array_argument, guard, guard_or, guard_work, Out};
use super::handle::HandleTable;
use super::status::xserv_status;
use super::types::{xserv_device_kind, xserv_dtype};
use crate::error::{Error, Result};
use crate::memory::{Block, DType, Device, Dims, ElementType, Tensor, MAX_RANK};

/// The device of a tensor's memory; layout and numbers of DLPack's DLDevice.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct xserv_tensor_device {
    /// 1: host memory (kDLCPU). 2: memory of a CUDA device (kDLCUDA). Also accepted: 3, pinned host
    /// memory, as 1; 13, managed memory, as 2.
    pub device_type: i32,
    /// The index among the devices of that type.
    pub device_id: i32,
}

/// The type of the elements; layout and numbers of DLPack's DLDataType. Supported: {2, 32, 1} f32,
/// {2, 16, 1} f16, {4, 16, 1} bf16, {0, 32, 1} i32, {0, 64, 1} i64. For the block caches of
/// xserv_op_attention() alone also {10, 8, 1}, floats of 8 bits (kDLFloat8_e4m3fn).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct xserv_tensor_dtype {
    /// 0: signed integer (kDLInt), 2: IEEE floating point (kDLFloat), 4: bfloat (kDLBfloat),
    /// 10: a float of 8 bits (kDLFloat8_e4m3fn).
    pub code: u8,
    /// Bits of an element.
    pub bits: u8,
    /// Always 1.
    pub lanes: u16,
}

/// A view of elements in memory that belongs to somebody else: layout-compatible with DLPack's
/// DLTensor, so that a tensor of PyTorch, CuPy, JAX or NumPy is used in place by passing the
/// address of its DLTensor. The library reads the descriptor during the call only.
///
/// A tensor has at most 8 dimensions. Strides are counted in elements, not bytes, and must not be
/// negative; strides may be NULL for a contiguous row-major tensor. The first element is at data +
/// byte_offset and must be aligned to its size. A tensor with a size of 0 is valid, has no
/// elements, and may have NULL data.
///
/// Memory on a CUDA device must stay valid until the work that uses it is done.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xserv_tensor {
    /// The memory.
    pub data: *mut c_void,
    /// The device that the memory is on.
    pub device: xserv_tensor_device,
    /// The number of dimensions; 0 for a scalar.
    pub ndim: i32,
    /// The type of the elements.
    pub dtype: xserv_tensor_dtype,
    /// [ndim] sizes, outermost first. May be NULL with ndim 0.
    pub shape: *mut i64,
    /// [ndim] distances in elements, or NULL.
    pub strides: *mut i64,
    /// Bytes from data to the first element.
    pub byte_offset: u64,
}

/// Returns the tensor type of an xserv_dtype (XSERV_DTYPE_F32 to XSERV_DTYPE_I64); all zeros, which
/// no operator accepts, for another value.
#[no_mangle]
pub extern "C" fn xserv_tensor_dtype_of(dtype: u32) -> xserv_tensor_dtype {
    match element_type(dtype) {
        Ok(element) => dtype_of(element),
        Err(_) => xserv_tensor_dtype { code: 0, bits: 0, lanes: 0 },
    }
}

/// Returns the tensor device of an xserv_device_kind (XSERV_DEVICE_CPU or XSERV_DEVICE_CUDA) and an
/// index; device_type 0, which no operator accepts, for another kind.
#[no_mangle]
pub extern "C" fn xserv_tensor_device_of(
    device_kind: u32,
    device_index: u32,
) -> xserv_tensor_device {
    let device_type = match device_kind {
        kind if kind == xserv_device_kind::XSERV_DEVICE_CPU as u32 => CPU,
        kind if kind == xserv_device_kind::XSERV_DEVICE_CUDA as u32 => CUDA,
        _ => 0,
    };
    let device_id = i32::try_from(device_index).unwrap_or(i32::MAX);
    xserv_tensor_device { device_type, device_id }
}

// DLTensor on a 64-bit machine; tests/abi compares with dlpack.h where it is installed.

/// A tensor in memory of a context.
pub struct xserv_owned_tensor {
    _private: [u8; 0],
}

pub(super) struct OwnedTensor {
    element: ElementType,
    device: xserv_tensor_device,
    shape: Dims,
    strides: Dims,
    block: Option<Block>,
    /// Keeps alive the stream that orders the reuse of the block; dropped after the block.
    context: Arc<ContextObject>,
}

impl OwnedTensor {
    /// Fails in a process that was forked after the tensor's context was made.
    pub(super) fn check_process(&self) -> Result<()> {
        self.context.get().map(drop)
    }

    /// Whether the process was forked after the tensor's context was made.
    pub(super) fn is_forked(&self) -> bool {
        self.check_process().is_err()
    }
}

/// Returns the object of a handle.
pub(super) fn owned_tensor(tensor: *const xserv_owned_tensor) -> Result<Arc<OwnedTensor>> {
    TENSORS.get(tensor)
}

/// Returns the descriptor of an owned tensor, whose pointers are valid as long as the object.
pub(super) fn view_of(object: &OwnedTensor) -> xserv_tensor {
    let start = object.block.as_ref().map_or(std::ptr::null_mut(), Block::start);
    xserv_tensor {
        data: start.cast(),
        device: object.device,
        ndim: object.shape.len() as i32,
        dtype: dtype_of(object.element),
        // The object does not move until it is freed; nobody writes through these.
        shape: object.shape.as_ptr().cast_mut(),
        strides: object.strides.as_ptr().cast_mut(),
        byte_offset: 0,
    }
}

// The values of DLPack's DLDeviceType that are supported.
const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const CUDA_MANAGED: i32 = 13;

static TENSORS: HandleTable<OwnedTensor> = HandleTable::new(9, "tensor");

/// Returns the tensor that a descriptor describes.
///
/// # Safety
/// `tensor` is NULL or readable, as are its shape and strides; its memory is as the header says.
pub(super) unsafe fn tensor_argument(tensor: *const xserv_tensor, name: &str) -> Result<Tensor> {
    let wrong = |what: String| Err(Error::invalid_argument(format!("{name}: {what}")));
    // SAFETY: NULL and misaligned ones are refused; else readable by contract.
    let descriptor = match unsafe { array_argument(tensor, 1, name) }? {
        [descriptor] => descriptor,
        _ => return wrong("is no descriptor".to_string()),
    };
    let device = match descriptor.device.device_type {
        CPU | CUDA_HOST => Device::Cpu,
        CUDA | CUDA_MANAGED => Device::Cuda(descriptor.device.device_id),
        other => {
            return wrong(format!("device_type {other} is not supported (1 is the CPU, 2 is CUDA)"))
        }
    };
    let dtype = descriptor.dtype;
    let element = match (dtype.code, dtype.bits, dtype.lanes) {
        (2, 32, 1) => ElementType::Float(DType::F32),
        (2, 16, 1) => ElementType::Float(DType::F16),
        (4, 16, 1) => ElementType::Float(DType::BF16),
        (10, 8, 1) => ElementType::Fp8,
        (0, 32, 1) => ElementType::I32,
        (0, 64, 1) => ElementType::I64,
        (code, bits, lanes) => {
            return wrong(format!(
                "a dtype of code {code}, {bits} bits and {lanes} lanes is not supported (f32, f16, bf16, i32 and \
                 i64 are, and e4m3fn for block caches)"
            ))
        }
    };
    let rank = match usize::try_from(descriptor.ndim) {
        Ok(rank) if rank <= MAX_RANK => rank,
        _ => return wrong(format!("ndim is {}, not between 0 and {MAX_RANK}", descriptor.ndim)),
    };
    // SAFETY: readable for ndim values by contract.
    let shape = unsafe { array_argument(descriptor.shape, rank, format_args!("{name}.shape")) }?;
    let strides = if descriptor.strides.is_null() {
        None
    } else {
        // SAFETY: as above.
        Some(unsafe { array_argument(descriptor.strides, rank, format_args!("{name}.strides")) }?)
    };
    let data = descriptor.data as *mut u8;
    let offset = match usize::try_from(descriptor.byte_offset) {
        Ok(offset) if (data as usize).checked_add(offset).is_some() => offset,
        _ => {
            return wrong(format!(
                "byte_offset {} leads out of the address space",
                descriptor.byte_offset
            ))
        }
    };
    // NULL stays NULL, whatever the offset.
    let first = if data.is_null() { data } else { data.wrapping_add(offset) };
    // SAFETY: the memory is as the header asks, by contract.
    unsafe { Tensor::from_raw(first, element, device, shape, strides, name) }
}

/// Returns the tensor of a descriptor that may be NULL.
///
/// # Safety
/// As [`tensor_argument`].
pub(super) unsafe fn optional_tensor(
    tensor: *const xserv_tensor,
    name: &str,
) -> Result<Option<Tensor>> {
    if tensor.is_null() {
        Ok(None)
    } else {
        // SAFETY: by contract.
        unsafe { tensor_argument(tensor, name) }.map(Some)
    }
}

/// Makes a contiguous row-major tensor in memory of the context's device. Its content is arbitrary.
///
/// dtype: XSERV_DTYPE_F32, _F16, _BF16, _I32 or _I64. shape: [ndim] sizes, at most 8 of them. The
/// memory comes from the context's caching allocator, aligned to 64 bytes, and returns to it with
/// xserv_owned_tensor_free().
///
/// Errors: XSERV_STATUS_OUT_OF_MEMORY with sizes, only after the memory that the context keeps was
/// given back to the device; XSERV_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// `shape` is readable for `ndim` sizes; `tensor` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_owned_tensor_new(
    context: *const xserv_context,
    dtype: u32,
    ndim: u32,
    shape: *const i64,
    tensor: *mut *mut xserv_owned_tensor,
) -> xserv_status {
    // SAFETY: by the contract above.
    guard_work(|| unsafe { new_tensor(context, dtype, ndim, shape, false, tensor) })
}

/// Makes a tensor as xserv_owned_tensor_new() does, but in host memory that the context's device
/// copies from and to at full speed (pinned memory on CUDA, ordinary memory on the CPU), for
/// tensors that are often copied with xserv_op_copy(). It does not count towards the context's
/// memory budget. Its descriptor has device_type 3 (kDLCUDAHost) on CUDA.
///
/// # Safety
/// As xserv_owned_tensor_new().
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_owned_tensor_new_pinned(
    context: *const xserv_context,
    dtype: u32,
    ndim: u32,
    shape: *const i64,
    tensor: *mut *mut xserv_owned_tensor,
) -> xserv_status {
    // SAFETY: by the contract above.
    guard_work(|| unsafe { new_tensor(context, dtype, ndim, shape, true, tensor) })
}

/// # Safety
/// As [`xserv_owned_tensor_new`].
unsafe fn new_tensor(
    context: *const xserv_context,
    dtype: u32,
    ndim: u32,
    shape: *const i64,
    is_pinned: bool,
    tensor: *mut *mut xserv_owned_tensor,
) -> Result<()> {
    // SAFETY: by the contract.
    let out = unsafe { Out::new(tensor, "tensor") }?;
    let object = context_of(context)?;
    let context = object.get()?;
    let element = element_type(dtype)?;
    if ndim as usize > MAX_RANK {
        return Err(Error::invalid_argument(format!(
            "ndim is {ndim}, at most {MAX_RANK} is supported"
        )));
    }
    // SAFETY: by the contract.
    let shape = unsafe { array_argument(shape, ndim as usize, "shape") }?;
    let device = context.device();
    // Any address will do for checking the sizes.
    // SAFETY: the descriptor is never followed.
    let checked = unsafe {
        let address = std::ptr::without_provenance_mut(64);
        Tensor::from_raw(address, element, device, shape, None, "tensor")
    }?;
    let block = match (checked.size_bytes(), is_pinned) {
        (0, _) => None,
        (bytes, false) => Some(context.allocate(bytes, "a tensor")?),
        (bytes, true) => Some(context.allocate_pinned(bytes, "a tensor")?),
    };
    let device_type = match (device, is_pinned) {
        (Device::Cpu, _) => CPU,
        (Device::Cuda(_), false) => CUDA,
        (Device::Cuda(_), true) => CUDA_HOST,
    };
    let device_id = match device {
        Device::Cuda(index) if !is_pinned => index,
        _ => 0,
    };
    let made = OwnedTensor {
        element,
        device: xserv_tensor_device { device_type, device_id },
        shape: *checked.shape(),
        strides: *checked.strides(),
        block,
        context: object.clone(),
    };
    out.set(TENSORS.insert(Arc::new(made))?);
    Ok(())
}

fn element_type(dtype: u32) -> Result<ElementType> {
    let types = [
        (xserv_dtype::XSERV_DTYPE_F32, ElementType::Float(DType::F32)),
        (xserv_dtype::XSERV_DTYPE_F16, ElementType::Float(DType::F16)),
        (xserv_dtype::XSERV_DTYPE_BF16, ElementType::Float(DType::BF16)),
        (xserv_dtype::XSERV_DTYPE_I32, ElementType::I32),
        (xserv_dtype::XSERV_DTYPE_I64, ElementType::I64),
    ];
    let found = types.iter().find(|(number, _)| *number as u32 == dtype);
    found.map(|(_, element)| *element).ok_or_else(|| {
        Error::invalid_argument(format!(
            "dtype is {dtype}, not the xserv_dtype of a tensor's elements"
        ))
    })
}

fn dtype_of(element: ElementType) -> xserv_tensor_dtype {
    let (code, bits) = match element {
        ElementType::Float(DType::F32) => (2, 32),
        ElementType::Float(DType::F16) => (2, 16),
        ElementType::Float(DType::BF16) => (4, 16),
        ElementType::I32 => (0, 32),
        ElementType::I64 => (0, 64),
        ElementType::Fp8 => (10, 8),
    };
    xserv_tensor_dtype { code, bits, lanes: 1 }
}

/// Gives the descriptor of an owned tensor. Its pointers stay valid until the tensor is freed.
///
/// # Safety
/// `view` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_owned_tensor_view(
    tensor: *const xserv_owned_tensor,
    view: *mut xserv_tensor,
) -> xserv_status {
    guard(|| {
        // SAFETY: by the contract above.
        let out = unsafe { Out::new(view, "view") }?;
        // The handle keeps the object.
        out.set(view_of(&*owned_tensor(tensor)?));
        Ok(())
    })
}

/// Returns an owned tensor's memory to its context; NULL is allowed. Work that was queued earlier
/// and uses it is not disturbed.
#[no_mangle]
pub extern "C" fn xserv_owned_tensor_free(tensor: *mut xserv_owned_tensor) {
    guard_or((), || TENSORS.remove(tensor).map(drop))
}
