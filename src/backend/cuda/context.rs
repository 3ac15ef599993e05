//! A stream of work on one GPU, with its allocator.

use super::blas::{Blas, MAX_CUBLAS_WORKSPACE_BYTES};
use super::device::{CudaDevice, Current, Function};
use super::driver::{is_lost, is_refused_for_memory, shortage};
use super::kernels::Kernel;
use super::layout::kernel_struct;
use super::memory::{DeviceMemory, PinnedMemory};
use super::profile::Profile;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Block, CachingAllocator, Device, Tensor};
use cudarc::driver::sys::{self, CUresult, CUstream};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

kernel_struct! {
    /// The record in which kernels report an index that they were given and did not follow: the
    /// first offence only, in host memory that the GPU writes. Layout shared with
    /// `csrc/common/fault.cuh`.
    pub(crate) struct FaultRecord {
        /// 0: none. Else one of the `FAULT_` numbers.
        code: AtomicI32,
        _padding: i32,
        /// The position in the index array.
        index: AtomicI64,
        /// The value found there.
        value: AtomicI64,
    }
}

/// The meanings of the codes of a [`FaultRecord`].
const FAULTS: [&str; 4] = [
    "",
    "a token id is outside the embedding table",
    "a position is outside the table of rotary embeddings",
    "a block table names a block that the cache does not have",
];

/// A stream, its allocators and its state. Several threads may use it at the same time: the driver
/// orders launches by arrival. While a graph is recorded, only the recording thread may.
pub struct CudaContext {
    /// The first field, so that it is dropped before the device.
    blas: OnceLock<Blas>,
    device: Arc<CudaDevice>,
    stream: CUstream,
    /// Whether the context owns the stream; false for a stream of the caller's.
    owns_stream: bool,
    allocator: Arc<CachingAllocator>,
    pinned: Arc<CachingAllocator>,
    /// A [`FaultRecord`], shared with the GPU.
    faults: Block,
    num_launches: AtomicU64,
    /// See [`CudaContext::prefer_shared_memory`]; negative: no preference.
    shared_memory_percent: AtomicI32,
    /// See [`CudaContext::counters`].
    counters: OnceLock<Block>,
    /// See [`CudaContext::start_profile`].
    profile: Mutex<Option<Profile>>,
    is_profiling: AtomicBool,
    num_profiles: AtomicU64,
    /// See [`CudaContext::limit_library_workspace`].
    cublas_workspace_bytes: OnceLock<usize>,
}

// SAFETY: stream handles may be used by any thread; the rest is shared safely.
unsafe impl Send for CudaContext {}
// SAFETY: as above.
unsafe impl Sync for CudaContext {}

/// The number of words of [`CudaContext::counters`].
pub(crate) const MAX_COUNTERS: usize = 1 << 14;

/// The stream that a context works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamChoice {
    /// A new stream that waits for no other.
    Own,
    /// A `cudaStream_t` of the caller, as a number; 0 is the default stream.
    Callers(usize),
}

/// The extents of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    pub grid: (u32, u32, u32),
    pub block: u32,
    pub shared_bytes: u32,
}

impl Launch {
    /// Makes extents of `grid` blocks of `block` threads in one dimension.
    pub(crate) fn linear(grid: u32, block: u32) -> Self {
        Launch { grid: (grid, 1, 1), block, shared_bytes: 0 }
    }
}

/// The most arguments of a kernel.
const MAX_ARGUMENTS: usize = 32;

/// The arguments of a kernel, in order.
pub(crate) struct Arguments<'a> {
    /// The arguments, each in the lower bytes of its own word.
    words: [u64; MAX_ARGUMENTS],
    pointers: [*mut c_void; MAX_ARGUMENTS],
    len: usize,
    _structs: std::marker::PhantomData<&'a ()>,
}

impl<'a> Arguments<'a> {
    pub(crate) fn new() -> Self {
        Arguments {
            words: [0; MAX_ARGUMENTS],
            pointers: [std::ptr::null_mut(); MAX_ARGUMENTS],
            len: 0,
            _structs: std::marker::PhantomData,
        }
    }

    fn word(mut self, word: u64) -> Self {
        if let Some(slot) = self.words.get_mut(self.len) {
            *slot = word;
        }
        self.len += 1;
        self
    }

    pub(crate) fn pointer(self, pointer: *mut u8) -> Self {
        self.word(pointer as u64)
    }

    pub(crate) fn tensor(self, tensor: &Tensor) -> Self {
        self.pointer(tensor.data())
    }

    pub(crate) fn optional(self, tensor: Option<&Tensor>) -> Self {
        self.pointer(tensor.map_or(std::ptr::null_mut(), Tensor::data))
    }

    pub(crate) fn i64(self, value: i64) -> Self {
        self.word(value as u64)
    }

    pub(crate) fn i32(self, value: i32) -> Self {
        self.word(u64::from(value as u32))
    }

    pub(crate) fn f32(self, value: f32) -> Self {
        self.word(u64::from(value.to_bits()))
    }

    /// Adds a `repr(C)` struct that the kernel takes by value.
    pub(crate) fn value<T: Copy>(mut self, value: &'a T) -> Self {
        if let Some(slot) = self.pointers.get_mut(self.len) {
            *slot = (value as *const T).cast_mut().cast();
        }
        self.len += 1;
        self
    }
}

/// Whether a failure of this kind says nothing about what the device can do.
fn is_passing(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::OutOfMemory | ErrorKind::DeviceLost)
}

impl CudaContext {
    /// Makes a context on device `index`, taking at most `memory_budget` bytes of its memory.
    pub fn new(index: i32, stream: StreamChoice, memory_budget: usize) -> Result<Self> {
        let device = CudaDevice::get(index)?;
        let _current = device.enter()?;
        let mut handle: CUstream = std::ptr::null_mut();
        match stream {
            StreamChoice::Own => {
                let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
                // SAFETY: a context is current; one handle is written.
                let status = unsafe { sys::cuStreamCreate(&mut handle, flags) };
                device.check(status, "making a CUDA stream")?;
            }
            StreamChoice::Callers(number) => {
                handle = number as CUstream;
                let mut its_context = std::ptr::null_mut();
                // SAFETY: the caller vouches that the handle is a stream or 0; one handle is
                // written.
                let status = unsafe { sys::cuStreamGetCtx(handle, &mut its_context) };
                device
                    .check(status, "asking the caller's stream for its context")
                    .map_err(|e| Error::invalid_argument(format!("stream: {}", e.message())))?;
                if handle as usize > 2 && its_context != device.raw_context() {
                    return Err(Error::invalid_argument(format!(
                        "stream belongs to another context than the primary one of CUDA device {index}"
                    )));
                }
            }
        }
        let made = Self::with_stream(&device, handle, stream == StreamChoice::Own, memory_budget);
        if made.is_err() && stream == StreamChoice::Own {
            // SAFETY: made above, used by nobody.
            let _ = unsafe { sys::cuStreamDestroy_v2(handle) };
        }
        made
    }

    fn with_stream(
        device: &Arc<CudaDevice>,
        stream: CUstream,
        owns_stream: bool,
        memory_budget: usize,
    ) -> Result<Self> {
        let source = Box::new(DeviceMemory { device: device.clone() });
        let allocator = CachingAllocator::new(source, memory_budget);
        let pinned =
            CachingAllocator::new(Box::new(PinnedMemory { device: device.clone() }), usize::MAX);
        let faults = pinned.allocate(size_of::<FaultRecord>(), "the record of faults")?;
        // SAFETY: fresh host memory of that size, aligned to 64; zeros are a valid record.
        unsafe { faults.start().write_bytes(0, size_of::<FaultRecord>()) };
        Ok(CudaContext {
            blas: OnceLock::new(),
            device: device.clone(),
            stream,
            owns_stream,
            allocator,
            pinned,
            faults,
            num_launches: AtomicU64::new(0),
            shared_memory_percent: AtomicI32::new(-1),
            counters: OnceLock::new(),
            profile: Mutex::default(),
            is_profiling: AtomicBool::new(false),
            num_profiles: AtomicU64::new(0),
            cublas_workspace_bytes: OnceLock::new(),
        })
    }

    /// Returns the GPU.
    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    pub(super) fn shared_device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// Makes the device current on this thread until the result is dropped, so that the launches in
    /// between need not do so one by one.
    pub(crate) fn enter(&self) -> Result<Current> {
        self.check_alive()?;
        self.device.enter()
    }

    pub(super) fn profile(&self) -> MutexGuard<'_, Option<Profile>> {
        self.profile.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_profiling(&self) -> bool {
        self.is_profiling.load(Ordering::Relaxed)
    }

    /// Notes that a profile has begun and returns its number.
    pub(super) fn next_profile(&self) -> u64 {
        self.is_profiling.store(true, Ordering::Relaxed);
        self.num_profiles.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn end_profile(&self) {
        self.is_profiling.store(false, Ordering::Relaxed);
    }

    /// Returns the device as a place of memory.
    pub fn place(&self) -> Device {
        Device::Cuda(self.device.index())
    }

    /// Returns the allocator of its device memory.
    pub fn allocator(&self) -> &Arc<CachingAllocator> {
        &self.allocator
    }

    /// Returns the allocator of its pinned host memory.
    pub fn pinned(&self) -> &Arc<CachingAllocator> {
        &self.pinned
    }

    /// Returns cuBLASLt for this context's stream, if it is installed.
    pub(crate) fn blas(&self) -> Result<&Blas> {
        if let Some(blas) = self.blas.get() {
            return Ok(blas);
        }
        let (device, allocator) = (self.device.clone(), self.allocator.clone());
        let made = Blas::new(device, allocator, self.stream, self.cublas_workspace_bytes())?;
        Ok(self.blas.get_or_init(|| made))
    }

    /// Returns the number of kernels of the library that have been queued.
    pub fn num_launches(&self) -> u64 {
        self.num_launches.load(Ordering::Relaxed)
    }

    pub(crate) fn raw_stream(&self) -> CUstream {
        self.stream
    }

    /// Fails if the device was lost earlier.
    pub(crate) fn check_alive(&self) -> Result<()> {
        self.device.check_alive()
    }

    /// Turns a driver status into an error, and remembers the loss of the device.
    pub(crate) fn check(&self, status: CUresult, what: &str) -> Result<()> {
        self.device.check(status, what)
    }

    /// Runs `body` with this device's context current.
    pub(crate) fn with_current<R>(&self, body: impl FnOnce() -> Result<R>) -> Result<R> {
        self.check_alive()?;
        let _current = self.device.enter()?;
        body()
    }

    /// Returns the address of the fault record, for kernels that follow indices.
    pub(crate) fn faults(&self) -> *mut u8 {
        self.faults.start()
    }

    /// Returns `count` zero words of device memory, in which kernels count to find out which of
    /// their blocks is the last, and which they leave zero; `None` for more than [`MAX_COUNTERS`].
    /// Launches of one stream follow each other, so all kernels share them.
    pub(crate) fn counters(&self, count: usize) -> Result<Option<*mut u8>> {
        if count > MAX_COUNTERS {
            return Ok(None);
        }
        if let Some(counters) = self.counters.get() {
            return Ok(Some(counters.start()));
        }
        let made = self.allocator.allocate_exact(Self::COUNTERS_BYTES, "counters")?;
        // SAFETY: fresh device memory of that size.
        unsafe { self.fill(made.start(), 0, Self::COUNTERS_BYTES) }?;
        Ok(Some(self.counters.get_or_init(|| made).start()))
    }

    /// The size of [`CudaContext::counters`] in bytes.
    pub(crate) const COUNTERS_BYTES: usize = MAX_COUNTERS * 4;

    /// Limits the workspace of cuBLAS to `bytes`, and to [`MAX_CUBLAS_WORKSPACE_BYTES`]: what the context is
    /// used for needs no more. The first limit holds, unless products came before it.
    pub(crate) fn limit_library_workspace(&self, bytes: usize) {
        let _ = self.cublas_workspace_bytes.set(bytes.min(MAX_CUBLAS_WORKSPACE_BYTES));
    }

    fn cublas_workspace_bytes(&self) -> usize {
        *self.cublas_workspace_bytes.get_or_init(|| MAX_CUBLAS_WORKSPACE_BYTES)
    }

    /// Queues a kernel.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and its accesses with these extents lie in memory
    /// that is valid until the work is done.
    pub(crate) unsafe fn launch(
        &self,
        kernel: Kernel,
        launch: Launch,
        arguments: Arguments<'_>,
    ) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.launch_as(kernel, launch, arguments, false, 1) }
    }

    /// As [`CudaContext::launch`], for a kernel that itself waits for the kernels before it
    /// (`csrc/common/pdl.cuh`): it may begin while they are running, where the chip supports that.
    ///
    /// # Safety
    /// As [`CudaContext::launch`].
    pub(crate) unsafe fn launch_overlapping(
        &self,
        kernel: Kernel,
        launch: Launch,
        arguments: Arguments<'_>,
    ) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.launch_clusters(kernel, launch, 1, arguments) }
    }

    /// As [`CudaContext::launch_overlapping`], with clusters of `cluster` blocks along the first
    /// dimension of the grid.
    ///
    /// # Safety
    /// As [`CudaContext::launch`].
    pub(crate) unsafe fn launch_clusters(
        &self,
        kernel: Kernel,
        launch: Launch,
        cluster: u32,
        arguments: Arguments<'_>,
    ) -> Result<()> {
        let overlaps = self.device.info().compute_capability.0 >= 9;
        // SAFETY: passed on to the caller.
        unsafe { self.launch_as(kernel, launch, arguments, overlaps, cluster) }
    }

    /// Makes later launches ask for `percent` % of an SM's memory as shared memory, the rest being
    /// first-level cache; with `None` the driver decides. Kernels that overlap should ask for the
    /// same share, because an SM changes its split only when it is idle.
    pub(crate) fn prefer_shared_memory(&self, percent: Option<i32>) {
        let percent = if self.device.info().compute_capability.0 >= 9 { percent } else { None };
        self.shared_memory_percent.store(percent.unwrap_or(-1), Ordering::Relaxed);
    }

    /// Returns whether a kernel is built in for this device: some exist only for the chips that have their
    /// instructions. Fails if that could not be found out, for lack of memory or of the device.
    pub(crate) fn has_kernel(&self, kernel: Kernel) -> Result<bool> {
        match self.device.function(kernel) {
            Ok(_) => Ok(true),
            Err(error) if is_passing(error.kind()) => Err(error),
            Err(_) => Ok(false),
        }
    }

    /// # Safety
    /// As [`CudaContext::launch`].
    unsafe fn launch_as(
        &self,
        kernel: Kernel,
        launch: Launch,
        mut arguments: Arguments<'_>,
        overlaps: bool,
        cluster: u32,
    ) -> Result<()> {
        if arguments.len > MAX_ARGUMENTS {
            return Err(Error::internal(format!("{}: too many arguments", kernel.name())));
        }
        let function = self.device.function(kernel)?;
        for (pointer, word) in
            arguments.pointers.iter_mut().zip(&mut arguments.words).take(arguments.len)
        {
            if pointer.is_null() {
                *pointer = (word as *mut u64).cast();
            }
        }
        let mut attributes = [sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        }; 3];
        let [overlap, clusters, carveout] = &mut attributes;
        let percent = self.shared_memory_percent.load(Ordering::Relaxed);
        if percent >= 0 {
            use sys::CUlaunchAttributeID::*;
            carveout.id = CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            carveout.value.sharedMemCarveout = percent as u32;
        }
        if overlaps {
            overlap.id =
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            overlap.value.programmaticStreamSerializationAllowed = 1;
        }
        if cluster > 1 {
            clusters.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            clusters.value.clusterDim =
                sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 };
        }
        let (x, y, z) = launch.grid;
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: self.stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        self.num_launches.fetch_add(1, Ordering::Relaxed);
        self.with_current(|| {
            let mut queue = |function: Function| {
                // SAFETY: the caller vouches for arguments and extents; each pointer points to a word
                // of `arguments` (little-endian: the lower bytes come first) or to a struct that it
                // borrows.
                unsafe {
                    sys::cuLaunchKernelEx(
                        &config,
                        function.0,
                        arguments.pointers.as_mut_ptr(),
                        std::ptr::null_mut(),
                    )
                }
            };
            let mut status = queue(function);
            if is_refused_for_memory(status) {
                // Either there is no memory now, or there was none for the code of this kernel once: it is
                // loaded anew as soon as there is some, which may be at once.
                self.device.found_no_memory(kernel);
                if shortage().is_none() {
                    if let Ok(function) = self.device.function(kernel) {
                        status = queue(function);
                    }
                }
            }
            self.check(status, kernel.name())
        })
    }

    /// Queues a copy of `bytes` bytes between any two places.
    ///
    /// # Safety
    /// Both are valid for `bytes` until the copy is done.
    pub(crate) unsafe fn copy(
        &self,
        target: *mut u8,
        source: *const u8,
        bytes: usize,
    ) -> Result<()> {
        if bytes == 0 {
            return self.check_alive();
        }
        self.with_current(|| {
            // SAFETY: the caller vouches for both sides; addresses are unified.
            let status =
                unsafe { sys::cuMemcpyAsync(target as u64, source as u64, bytes, self.stream) };
            self.check(status, "copying")
        })
    }

    /// Queues filling `bytes` bytes with one value.
    ///
    /// # Safety
    /// `target` is device memory, valid for `bytes` until the work is done.
    pub(crate) unsafe fn fill(&self, target: *mut u8, byte: u8, bytes: usize) -> Result<()> {
        self.with_current(|| {
            // SAFETY: the caller vouches for the target.
            let status = unsafe { sys::cuMemsetD8Async(target as u64, byte, bytes, self.stream) };
            self.check(status, "filling")
        })
    }

    /// Waits for all queued work, and reports what went wrong in it: a lost device, or an index
    /// that a kernel did not follow (once).
    pub fn synchronize(&self) -> Result<()> {
        self.with_current(|| {
            // SAFETY: our stream, or the caller's, which lives as long as the context by contract.
            let status = unsafe { sys::cuStreamSynchronize(self.stream) };
            self.check(status, "waiting for the device")
        })?;
        self.take_fault()
    }

    /// Reports an index that a kernel did not follow, once. The report is complete for work that
    /// the caller has waited for.
    pub(crate) fn take_fault(&self) -> Result<()> {
        // SAFETY: host memory with the layout of a record, which the GPU writes in whole words.
        let record = unsafe { &*self.faults.start().cast::<FaultRecord>() };
        let code = record.code.swap(0, Ordering::Acquire);
        if code == 0 {
            return Ok(());
        }
        let what =
            usize::try_from(code).ok().and_then(|code| FAULTS.get(code)).unwrap_or(&"a bad index");
        Err(Error::invalid_argument(format!(
            "{what}: entry {} is {}",
            record.index.load(Ordering::Relaxed),
            record.value.load(Ordering::Relaxed)
        )))
    }

    /// Fails if a tensor's bytes are not memory that this device can reach.
    pub(crate) fn check_reachable(&self, tensor: &Tensor, name: &str) -> Result<()> {
        if tensor.is_empty() {
            return Ok(());
        }
        self.with_current(|| {
            let (mut start, mut len) = (0u64, 0usize);
            // SAFETY: two words are written; an address that CUDA does not know is an error status.
            let status =
                unsafe { sys::cuMemGetAddressRange_v2(&mut start, &mut len, tensor.data() as u64) };
            if status == CUresult::CUDA_SUCCESS {
                let end = tensor.data() as u64 + tensor.span_bytes() as u64;
                if end > start + len as u64 {
                    return Err(Error::invalid_argument(format!(
                        "{name}: {} bytes are needed, but the allocation ends after {}",
                        tensor.span_bytes(),
                        start + len as u64 - tensor.data() as u64
                    )));
                }
                return Ok(());
            }
            self.check_alive()?;
            if is_lost(status) {
                return self.check(status, "asking about an address");
            }
            Err(Error::invalid_argument(format!(
                "{name}: data is said to lie on {}, but it is no memory that CUDA knows",
                self.place()
            )))
        })
    }
}

impl Drop for CudaContext {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        // SAFETY: work that is under way uses memory that is about to be released, so it is waited
        // for; afterwards nobody uses our stream.
        unsafe {
            let _ = sys::cuStreamSynchronize(self.stream);
            if self.owns_stream {
                let _ = sys::cuStreamDestroy_v2(self.stream);
            }
        }
    }
}
