//! A GPU: its properties, its primary context, and the kernels loaded into it. There is one object
//! per device, which lives as long as the process: other libraries use the same primary context.

use super::driver::{available, check, count_devices, is_refused_for_memory, shortage};
use super::fatbins;
use super::kernels::Kernel;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Device;
use crate::process::Process;
use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUfunction, CUmodule, CUresult,
};
use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

/// The properties of a GPU.
#[derive(Clone, Debug)]
pub struct CudaDeviceInfo {
    /// The vendor's name, such as "NVIDIA H200".
    pub name: String,
    /// Bytes of device memory.
    pub memory_bytes: usize,
    /// Major and minor number, such as (9, 0).
    pub compute_capability: (i32, i32),
    /// The number of multiprocessors.
    pub num_multiprocessors: i32,
    /// Bytes of the second-level cache.
    pub l2_bytes: usize,
    /// The most shared memory that a block can ask for, in bytes.
    pub shared_memory_bytes: usize,
}

/// A GPU in use by this process.
pub struct CudaDevice {
    index: i32,
    info: CudaDeviceInfo,
    /// The process that started it: the driver must not be called in forked children.
    process: Process,
    context: CUcontext,
    /// Whether a fault has ended all work on the device in this process: that of every context, because
    /// all share the primary one of the driver.
    is_lost: AtomicBool,
    loaded: RwLock<Loaded>,
}

/// The modules and kernels loaded into a device.
#[derive(Default)]
struct Loaded {
    /// The modules, by name of the source.
    modules: HashMap<&'static str, Module>,
    /// By name of the kernel: no two sources share one. Each with its source.
    functions: HashMap<&'static str, (Function, &'static str)>,
    /// The sources of kernels that found no memory for their first launch.
    failed: HashSet<&'static str>,
}

/// The kernels of one source.
#[derive(Clone, Copy)]
struct Module(CUmodule);

// SAFETY: driver handles are numbers that any thread may use; modules are never unloaded.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A loaded kernel.
#[derive(Clone, Copy)]
pub(super) struct Function(pub CUfunction);

// SAFETY: driver handles are numbers that any thread may use; modules are never unloaded.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}
// SAFETY: the context handle may be used by any thread, and is retained for the lifetime of the
// process.
unsafe impl Send for CudaDevice {}
// SAFETY: as above; the map has a lock.
unsafe impl Sync for CudaDevice {}

/// Keeps the device's context current on this thread while it lives, and then restores the one that
/// was current before, because the host may use CUDA too. If the context was current already,
/// nothing is done.
pub(crate) struct Current {
    was_pushed: bool,
}

impl Drop for Current {
    fn drop(&mut self) {
        if !self.was_pushed {
            return;
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: pops what `CudaDevice::enter` pushed on this thread.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut context) };
    }
}

fn handle(index: i32) -> Result<CUdevice> {
    available()?;
    let count = count_devices()?;
    if !(0..count).contains(&index) {
        return Err(Error::new(
            ErrorKind::NoDevice,
            format!("there is no CUDA device {index}, the driver shows {count}"),
        ));
    }
    let mut device = 0;
    // SAFETY: the driver is initialised; one handle is written.
    check(unsafe { sys::cuDeviceGet(&mut device, index) }, "cuDeviceGet")?;
    Ok(device)
}

/// Returns the number of usable CUDA devices: 0 without a driver, or in a build without kernels.
pub fn num_cuda_devices() -> i32 {
    available().and_then(|()| count_devices()).unwrap_or(0)
}

impl CudaDeviceInfo {
    /// Asks the driver about a device, without starting anything on it.
    pub fn of(index: i32) -> Result<Self> {
        use CUdevice_attribute::*;
        let device = handle(index)?;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: a valid device; one int is written.
            let status = unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) };
            check(status, "cuDeviceGetAttribute")?;
            Ok::<i32, Error>(value)
        };
        let mut name = [0u8; 256];
        let mut memory_bytes = 0;
        // SAFETY: a valid device; up to 256 bytes are written.
        let status = unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), 256, device) };
        check(status, "cuDeviceGetName")?;
        // SAFETY: a valid device; one size is written.
        check(unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, device) }, "cuDeviceTotalMem")?;
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        Ok(CudaDeviceInfo {
            name: String::from_utf8_lossy(name).into_owned(),
            memory_bytes,
            compute_capability: (
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            num_multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            l2_bytes: attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
            shared_memory_bytes: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                as usize,
        })
    }
}

impl CudaDevice {
    /// Returns the device with this number, started if it was not in use yet.
    pub fn get(index: i32) -> Result<Arc<Self>> {
        static DEVICES: OnceLock<Mutex<HashMap<i32, Arc<CudaDevice>>>> = OnceLock::new();
        let device = handle(index)?;
        let mut devices =
            DEVICES.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = devices.get(&index) {
            device.check_alive()?;
            return Ok(device.clone());
        }
        let info = CudaDeviceInfo::of(index)?;
        if info.compute_capability.0 < 8 {
            let (major, minor) = info.compute_capability;
            return Err(Error::unsupported(format!(
                "{} has compute capability {major}.{minor}, 8.0 (Ampere) or later is needed",
                info.name
            )));
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: a valid device; one handle is written, retained until the process ends.
        let status = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) };
        check(status, "starting the CUDA device")?;
        let made = Arc::new(CudaDevice {
            index,
            info,
            process: Process::current(),
            context,
            is_lost: AtomicBool::new(false),
            loaded: RwLock::default(),
        });
        devices.insert(index, made.clone());
        Ok(made)
    }

    /// Returns the driver's number of the device.
    pub fn index(&self) -> i32 {
        self.index
    }

    /// Returns the properties of the device.
    pub fn info(&self) -> &CudaDeviceInfo {
        &self.info
    }

    /// Returns the bytes of device memory that nobody uses at the moment.
    pub fn free_memory_bytes(&self) -> Result<usize> {
        self.memory_info().map(|(free, _)| free)
    }

    /// Returns the bytes of device memory that nobody uses at the moment, and those of all.
    pub(super) fn memory_info(&self) -> Result<(usize, usize)> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current; two sizes are written.
        let status = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
        self.check(status, "asking for free memory")?;
        Ok((free, total))
    }

    /// Fails if the device was lost earlier.
    pub(super) fn check_alive(&self) -> Result<()> {
        if !self.is_lost.load(Ordering::Relaxed) {
            return Ok(());
        }
        let place = Device::Cuda(self.index);
        let message =
            format!("{place} was lost by an earlier fault; only a new process can use it");
        Err(Error::new(ErrorKind::DeviceLost, message))
    }

    /// Turns a driver status into an error, and remembers the loss of the device.
    pub(super) fn check(&self, status: CUresult, what: &str) -> Result<()> {
        let checked = check(status, what);
        if matches!(&checked, Err(error) if error.kind() == ErrorKind::DeviceLost) {
            self.is_lost.store(true, Ordering::Relaxed);
        }
        checked
    }

    pub(super) fn raw_context(&self) -> CUcontext {
        self.context
    }

    /// Makes the device current on this thread until the result is dropped. Fails in a forked
    /// child, so that what a child drops is left to its parent.
    pub(super) fn enter(&self) -> Result<Current> {
        if !self.process.is_current() {
            return available().and_then(|()| Err(Error::internal("a device of another process")));
        }
        let mut current = std::ptr::null_mut();
        // SAFETY: one handle is written.
        let status = unsafe { sys::cuCtxGetCurrent(&mut current) };
        if status == CUresult::CUDA_SUCCESS && current == self.context {
            return Ok(Current { was_pushed: false });
        }
        // SAFETY: the context is retained for the lifetime of the process.
        let status = unsafe { sys::cuCtxPushCurrent_v2(self.context) };
        self.check(status, "making the CUDA context current")?;
        Ok(Current { was_pushed: true })
    }

    /// Returns a kernel, which is loaded first if it was not yet, and is allowed as much shared memory as
    /// the device gives.
    pub(super) fn function(&self, kernel: Kernel) -> Result<Function> {
        let (source, name) = (kernel.source(), kernel.name());
        let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
        if let Some((function, _)) = loaded.functions.get(name) {
            if !loaded.failed.contains(source) {
                return Ok(*function);
            }
        }
        drop(loaded);
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        let _current = self.enter()?;
        if loaded.failed.contains(source) && shortage().is_none() {
            // A kernel that found no memory for its code never runs again (seen with 13.0), so there
            // are new ones. The old ones stay where they are: they may be in graphs.
            loaded.failed.remove(source);
            loaded.modules.remove(source);
            loaded.functions.retain(|_, (_, from)| *from != source);
        }
        if let Some((function, _)) = loaded.functions.get(name) {
            return Ok(*function);
        }
        let module = match loaded.modules.get(source) {
            Some(module) => *module,
            None => {
                let module = self.load(source)?;
                loaded.modules.insert(source, module);
                module
            }
        };
        let c_name = CString::new(name).map_err(|_| Error::internal("a kernel name with a NUL"))?;
        let mut function = std::ptr::null_mut();
        // SAFETY: a loaded module; one handle is written.
        let status = unsafe { sys::cuModuleGetFunction(&mut function, module.0, c_name.as_ptr()) };
        if is_refused_for_memory(status) {
            loaded.failed.insert(source);
        }
        self.check(status, &format!("finding the kernel {name}"))?;
        self.allow_shared_memory(function);
        loaded.functions.insert(name, (Function(function), source));
        Ok(Function(function))
    }

    /// Notes that a launch of a kernel may have found no memory: it is loaded again once there is some.
    pub(super) fn found_no_memory(&self, kernel: Kernel) {
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        loaded.failed.insert(kernel.source());
    }

    fn allow_shared_memory(&self, function: CUfunction) {
        use sys::CUfunction_attribute::*;
        let mut fixed = 0;
        // SAFETY: a loaded kernel; one int is written. A refusal only leaves the default limit in
        // place.
        unsafe {
            let _ =
                sys::cuFuncGetAttribute(&mut fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function);
            let most = (self.info.shared_memory_bytes as i32).saturating_sub(fixed);
            let _ = sys::cuFuncSetAttribute(
                function,
                CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                most,
            );
            if self.info.compute_capability.0 >= 9 {
                // Allows clusters of more than eight blocks.
                let _ = sys::cuFuncSetAttribute(
                    function,
                    CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
                    1,
                );
            }
        }
    }

    /// Loads the kernels of a source into the current context.
    fn load(&self, source: &'static str) -> Result<Module> {
        let fatbin = fatbins::find(source)
            .ok_or_else(|| Error::internal(format!("the kernels of {source} are not built in")))?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the fatbin is a whole, aligned, static image; one handle is written.
        let status = unsafe { sys::cuModuleLoadData(&mut module, fatbin.as_ptr().cast()) };
        self.check(status, &format!("loading the kernels of {source}"))?;
        Ok(Module(module))
    }
}
