//! The building blocks of a model on a device: tensors that own their memory, and the host memory
//! through which they are filled and read.

use super::cuda::{CudaContext, Event, RegisteredBuffer};
use super::{ComputeContext, ContextBackend};
use crate::error::{try_with_capacity, Error, Result};
use crate::memory::{Block, Device, ElementType, HostBuffer, Tensor, MAX_RANK};
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Tensors of an [`Arena`] begin at multiples of this many bytes.
const ALIGNMENT: usize = 256;

/// A tensor that keeps its memory alive, which other tensors may share.
#[derive(Clone)]
pub struct DeviceTensor {
    tensor: Tensor,
    memory: Arc<Block>,
}

impl Deref for DeviceTensor {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

impl fmt::Debug for DeviceTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceTensor({} {})", self.tensor.element(), self.tensor.shape())
    }
}

/// Converts sizes or strides to the form of descriptors.
fn dims(values: &[usize]) -> Result<([i64; MAX_RANK], usize)> {
    let mut dims = [0; MAX_RANK];
    if values.len() > MAX_RANK {
        return Err(Error::internal("a tensor of too many dimensions"));
    }
    for (dim, &value) in dims.iter_mut().zip(values) {
        *dim = i64::try_from(value)
            .map_err(|_| Error::invalid_argument(format!("{value} is too large for a tensor")))?;
    }
    Ok((dims, values.len()))
}

impl DeviceTensor {
    /// Allocates a contiguous tensor for work that is queued before it is dropped. Its content is
    /// arbitrary.
    pub fn temporary(
        context: &ComputeContext,
        element: ElementType,
        shape: &[usize],
        what: &str,
    ) -> Result<DeviceTensor> {
        let memory = Arc::new(context.allocate(Arena::bytes_for(element, shape)?, what)?);
        place(&memory, 0, element, context.device(), shape, None)
    }

    /// Returns a view of the same memory from element `offset` on, row-major contiguous without
    /// `strides`.
    pub fn view(
        &self,
        offset: usize,
        shape: &[usize],
        strides: Option<&[usize]>,
    ) -> Result<DeviceTensor> {
        let element = self.tensor.element();
        let start = (self.tensor.data() as usize - self.memory.start() as usize)
            .saturating_add(offset.saturating_mul(element.size_bytes()));
        place(&self.memory, start, element, self.tensor.device(), shape, strides)
    }

    /// Queues filling the tensor with zeros.
    pub fn zero(&self, context: &ComputeContext) -> Result<()> {
        let ContextBackend::Cuda(cuda) = context.backend() else {
            return Err(Error::internal("a device tensor on the CPU"));
        };
        if !self.tensor.is_contiguous() {
            return Err(Error::internal("zeros for a tensor with gaps"));
        }
        // SAFETY: the tensor's own memory, on the context's device; freed memory is reused in the
        // order of the stream.
        unsafe { cuda.fill(self.tensor.data(), 0, self.tensor.size_bytes()) }
    }
}

/// Makes a tensor from byte `start` of `memory` on, which must hold all of it.
fn place(
    memory: &Arc<Block>,
    start: usize,
    element: ElementType,
    device: Device,
    shape: &[usize],
    strides: Option<&[usize]>,
) -> Result<DeviceTensor> {
    let (shape, rank) = dims(shape)?;
    let strides = strides.map(dims).transpose()?;
    let data = memory.start().wrapping_add(start);
    let shape = shape.get(..rank).unwrap_or_default();
    let strides = strides.as_ref().map(|(strides, rank)| strides.get(..*rank).unwrap_or_default());
    // SAFETY: the span is compared with the memory below, which the tensor keeps.
    let tensor = unsafe { Tensor::from_raw(data, element, device, shape, strides, "a tensor") }?;
    let end = start.checked_add(tensor.span_bytes());
    if end.is_some_and(|end| end <= memory.len_bytes()) {
        Ok(DeviceTensor { tensor, memory: memory.clone() })
    } else {
        Err(Error::internal(format!(
            "a tensor of shape {} from byte {start} on in {} bytes",
            tensor.shape(),
            memory.len_bytes()
        )))
    }
}

/// One allocation that is divided among tensors, which are never given back.
pub struct Arena {
    memory: Arc<Block>,
    device: Device,
    used: usize,
}

impl Arena {
    /// Allocates exactly `len_bytes` for `what`. The content is arbitrary.
    pub fn new(context: &ComputeContext, len_bytes: usize, what: &str) -> Result<Self> {
        let memory = Arc::new(context.allocate_exact(len_bytes, what)?);
        Ok(Arena { memory, device: context.device(), used: 0 })
    }

    /// Returns the bytes that a tensor takes of an arena.
    pub fn bytes_for(element: ElementType, shape: &[usize]) -> Result<usize> {
        let bytes = shape
            .iter()
            .try_fold(element.size_bytes(), |product, &size| product.checked_mul(size))
            .and_then(|bytes| bytes.checked_next_multiple_of(ALIGNMENT));
        bytes.ok_or_else(|| Error::out_of_memory("a tensor", usize::MAX))
    }

    /// Returns the next tensor, contiguous.
    pub fn tensor(&mut self, element: ElementType, shape: &[usize]) -> Result<DeviceTensor> {
        let bytes = Self::bytes_for(element, shape)?;
        let tensor = place(&self.memory, self.used, element, self.device, shape, None)?;
        self.used += bytes;
        Ok(tensor)
    }

    /// Returns the whole arena as elements of a type.
    pub fn whole(&self, element: ElementType) -> Result<DeviceTensor> {
        let len = self.memory.len_bytes() / element.size_bytes();
        place(&self.memory, 0, element, self.device, &[len], None)
    }
}

/// Host memory that a device copies from and to directly.
pub struct PinnedBuffer {
    context: Arc<ComputeContext>,
    memory: PinnedMemory,
    /// Whether the device may be using the memory.
    is_busy: bool,
    /// The event, made by the first [`PinnedBuffer::fence`].
    event: Option<Event>,
    /// Whether the event was recorded after the last copy.
    is_fenced: bool,
}

/// The memory of a [`PinnedBuffer`], by its origin.
enum PinnedMemory {
    /// A block of an allocator of pinned memory.
    Block(Block),
    /// A part, used by nobody else, of memory that was pinned as a whole.
    Part { whole: Arc<RegisteredBuffer>, offset: usize, len: usize },
}

impl PinnedMemory {
    fn start(&self) -> *mut u8 {
        match self {
            PinnedMemory::Block(block) => block.start(),
            PinnedMemory::Part { whole, offset, .. } => whole.start().wrapping_add(*offset),
        }
    }

    fn len_bytes(&self) -> usize {
        match self {
            PinnedMemory::Block(block) => block.len_bytes(),
            PinnedMemory::Part { len, .. } => *len,
        }
    }
}

impl PinnedBuffer {
    /// Allocates zeroed memory of `len_bytes` for `what`.
    pub fn new(context: &Arc<ComputeContext>, len_bytes: usize, what: &str) -> Result<Self> {
        let memory = context.allocate_pinned(len_bytes, what)?;
        // SAFETY: fresh host memory of that size.
        unsafe { memory.start().write_bytes(0, len_bytes) };
        Ok(Self::of(context, PinnedMemory::Block(memory)))
    }

    /// Pins existing memory and returns it as buffers of `len_bytes` each. Pinned in huge pages it
    /// is ready ten times as soon as memory that an allocator of pinned memory has to fetch, which
    /// is the fallback where the system refuses to pin.
    pub fn parts(
        context: &Arc<ComputeContext>,
        memory: HostBuffer,
        len_bytes: usize,
        what: &str,
    ) -> Result<Vec<Self>> {
        let count = memory.len_bytes().checked_div(len_bytes).unwrap_or(0);
        let mut parts = try_with_capacity(count, what)?;
        match RegisteredBuffer::new(cuda(context)?, memory) {
            Some(whole) => {
                let whole = Arc::new(whole);
                for index in 0..count {
                    let offset = index * len_bytes;
                    let part = PinnedMemory::Part { whole: whole.clone(), offset, len: len_bytes };
                    parts.push(Self::of(context, part));
                }
            }
            None => {
                cuda(context)?.check_alive()?;
                for _ in 0..count {
                    parts.push(Self::new(context, len_bytes, what)?);
                }
            }
        }
        Ok(parts)
    }

    fn of(context: &Arc<ComputeContext>, memory: PinnedMemory) -> Self {
        let context = context.clone();
        PinnedBuffer { context, memory, is_busy: false, event: None, is_fenced: false }
    }

    /// Returns the length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.memory.len_bytes()
    }

    /// Waits for all copies and returns the bytes.
    pub fn bytes(&mut self) -> Result<&mut [u8]> {
        self.wait()?;
        // SAFETY: initialised host memory of that length, owned by self, that no copy uses now.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.memory.start(), self.memory.len_bytes()) })
    }

    /// Waits for the uses that were queued here: up to the fence, or, without one, for all work
    /// queued so far.
    pub fn wait(&mut self) -> Result<()> {
        if !self.is_busy {
            return Ok(());
        }
        if !self.is_fenced {
            self.fence()?;
        }
        if let Some(event) = &self.event {
            event.synchronize(cuda(&self.context)?)?;
        }
        self.is_busy = false;
        Ok(())
    }

    /// Notes that work queued up to now uses the memory: [`PinnedBuffer::wait`] then waits for that
    /// work.
    pub fn set_in_use(&mut self) -> Result<()> {
        self.is_busy = true;
        self.fence()
    }

    /// Notes that work being queued uses the memory: [`PinnedBuffer::wait`] then waits for
    /// everything queued by the time it is called.
    pub fn set_in_use_unmarked(&mut self) {
        self.is_busy = true;
        self.is_fenced = false;
    }

    /// Returns the address at which kernels of the device find byte `offset`.
    pub fn device_address(&self, offset: usize) -> u64 {
        self.memory.start() as u64 + offset as u64
    }

    /// Marks the end of the uses queued so far, so that waiting for them does not wait for anything
    /// that is queued later. The next copy needs a fence of its own.
    pub fn fence(&mut self) -> Result<()> {
        let cuda = cuda(&self.context)?;
        let event = match self.event.take() {
            Some(event) => event,
            None => Event::new(cuda)?,
        };
        let recorded = event.record(cuda);
        self.event = Some(event);
        self.is_fenced = recorded.is_ok();
        recorded
    }

    /// Has the work that is queued to `context` from now on wait for the copies up to the fence, which are
    /// in another stream of the same device.
    pub fn hold_back(&self, context: &ComputeContext) -> Result<()> {
        match &self.event {
            Some(event) if self.is_fenced => event.hold_back(cuda(context)?),
            _ => Err(Error::internal("copies without a fence")),
        }
    }

    /// Queues a copy of the bytes `from` to a contiguous tensor, from its byte `target_offset` on.
    pub fn upload(
        &mut self,
        from: Range<usize>,
        target: &DeviceTensor,
        target_offset: usize,
    ) -> Result<()> {
        let bytes = from.len();
        check_copy(target, target_offset, bytes)?;
        if from.end > self.len_bytes() {
            return Err(Error::internal("an upload beyond the staging memory"));
        }
        let source = self.memory.start().wrapping_add(from.start);
        // SAFETY: both sides were checked to span the bytes; ours stays valid until the copy is
        // done (`is_busy`).
        unsafe { self.copy(target.data().wrapping_add(target_offset), source, bytes) }
    }

    /// Queues a copy of a contiguous tensor to the bytes from `offset` on.
    pub fn download(&mut self, source: &DeviceTensor, offset: usize) -> Result<()> {
        let bytes = source.size_bytes();
        check_copy(source, 0, bytes)?;
        if offset.checked_add(bytes).is_none_or(|end| end > self.len_bytes()) {
            return Err(Error::internal("a download larger than the staging memory"));
        }
        // SAFETY: as in `upload`.
        unsafe { self.copy(self.memory.start().wrapping_add(offset), source.data(), bytes) }
    }

    /// # Safety
    /// Both are valid for `bytes` until the copy is done.
    unsafe fn copy(&mut self, target: *mut u8, source: *const u8, bytes: usize) -> Result<()> {
        self.is_busy = true;
        self.is_fenced = false;
        // SAFETY: passed on to the caller.
        unsafe { cuda(&self.context)?.copy(target, source, bytes) }
    }
}

/// Returns the CUDA half of a context.
fn cuda(context: &ComputeContext) -> Result<&CudaContext> {
    match context.backend() {
        ContextBackend::Cuda(cuda) => Ok(cuda),
        ContextBackend::Cpu { .. } => Err(Error::internal("pinned memory on the CPU")),
    }
}

fn check_copy(tensor: &DeviceTensor, offset: usize, bytes: usize) -> Result<()> {
    let fits = offset.checked_add(bytes).is_some_and(|end| end <= tensor.size_bytes());
    if fits && tensor.is_contiguous() {
        Ok(())
    } else {
        Err(Error::internal("a copy beyond a tensor"))
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // The memory may be given to another owner next, so no copy may still be using it.
        let _ = self.wait();
    }
}
