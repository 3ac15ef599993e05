//! Contexts, their allocator, and the checks of tensor descriptors, through the C functions.

use super::support::tensors::*;
use std::ffi::c_void;
use xserv::ffi::*;

fn stats(context: &Context) -> xserv_memory_stats {
    // SAFETY: a live context; the struct has its size set.
    unsafe {
        let mut stats: xserv_memory_stats = std::mem::zeroed();
        stats.struct_size = size_of::<xserv_memory_stats>();
        ok(xserv_context_get_memory_stats(context.handle, &mut stats));
        stats
    }
}

fn with_budget(context: &Context, max_memory_bytes: u64) -> Context {
    let mut handle = std::ptr::null_mut();
    // SAFETY: plain out-pointers and a filled struct.
    unsafe {
        let mut options = std::mem::zeroed();
        xserv_context_options_init(&mut options, size_of_val(&options));
        let mut kind = 0;
        ok(xserv_context_get_device(context.handle, &mut kind));
        options.device_kind = kind;
        options.num_threads = 1;
        options.max_memory_bytes = max_memory_bytes;
        ok(xserv_context_new(&options, &mut handle));
    }
    Context { handle, name: context.name }
}

#[test]
fn a_loop_of_the_same_work_asks_the_driver_for_nothing_after_its_first_round() {
    for context in contexts() {
        let round = |seed: usize| {
            let values: Vec<f64> = (0..300).map(|i| (i * seed % 17) as f64).collect();
            let x = TestTensor::new(&context, Type::F32, &[3, 100], &values);
            let w = TestTensor::new(&context, Type::F32, &[100], &values[..100]);
            // Strided, so that the operator takes memory of its own too.
            let strides = [1, 3];
            let out = TestTensor::strided(&context, Type::F32, &[3, 100], &strides, 0, &values);
            // SAFETY: live tensors.
            unsafe {
                ok(xserv_op_rms_norm(context.handle, &x.view(), &w.view(), 1e-6, &out.view()));
            }
            ok(xserv_context_synchronize(context.handle));
        };
        round(1);
        let first = stats(&context);
        assert!(first.num_driver_calls > 0 && first.peak > 0, "{first:?}");
        (2..50).for_each(round);
        let last = stats(&context);
        assert_eq!(last.num_driver_calls, first.num_driver_calls, "on {}", context.name);
        assert_eq!((last.allocated, last.reserved, last.peak), (0, first.reserved, first.peak));
        assert!(last.num_allocations > first.num_allocations);
        ok(xserv_context_trim(context.handle));
        assert_eq!(stats(&context).reserved, 0);
    }
}

#[test]
fn a_budget_is_kept_and_named() {
    for context in contexts() {
        let small = with_budget(&context, 1 << 20);
        let new = |len: i64| {
            let mut tensor = std::ptr::null_mut();
            let shape = [len];
            let dtype = xserv_dtype::XSERV_DTYPE_F32 as u32;
            // SAFETY: plain pointers.
            let status = unsafe {
                xserv_owned_tensor_new(small.handle, dtype, 1, shape.as_ptr(), &mut tensor)
            };
            (status, tensor)
        };
        let (status, first) = new(100_000);
        ok(status);
        xserv_owned_tensor_free(first);
        // The first is still kept, and must give way.
        let (status, second) = new(200_000);
        ok(status);
        let (status, third) = new(200_000);
        assert_eq!(status, xserv_status::XSERV_STATUS_OUT_OF_MEMORY);
        assert!(third.is_null());
        let said = message();
        assert!(said.contains("800000 bytes") && said.contains("budget is 1048576"), "{said}");
        // A tensor outlives its context.
        drop(small);
        let mut view = std::mem::MaybeUninit::<xserv_tensor>::uninit();
        // SAFETY: a live tensor, a writable place.
        unsafe { ok(xserv_owned_tensor_view(second, view.as_mut_ptr())) };
        xserv_owned_tensor_free(second);
    }
}

#[test]
fn absurd_tensors_are_refused() {
    for context in contexts() {
        for (dtype, shape) in
            [(0u32, &[1i64][..]), (1, &[-1]), (1, &[i64::MAX, i64::MAX]), (1, &[1; 9]), (77, &[1])]
        {
            let mut tensor = std::ptr::null_mut();
            // SAFETY: plain pointers.
            let status = unsafe {
                let ndim = shape.len() as u32;
                xserv_owned_tensor_new(context.handle, dtype, ndim, shape.as_ptr(), &mut tensor)
            };
            refused(status);
        }
        let huge = [1i64 << 50];
        let mut tensor = std::ptr::null_mut();
        // SAFETY: plain pointers.
        let status =
            unsafe { xserv_owned_tensor_new(context.handle, 1, 1, huge.as_ptr(), &mut tensor) };
        assert_eq!(status, xserv_status::XSERV_STATUS_OUT_OF_MEMORY, "{}", message());
    }
}

#[test]
fn addresses_are_aligned_and_empty_tensors_have_none() {
    for context in contexts() {
        for len in [0i64, 1, 100, 1_000_000] {
            for is_pinned in [false, true] {
                let mut tensor = std::ptr::null_mut();
                let mut view = std::mem::MaybeUninit::<xserv_tensor>::uninit();
                let new =
                    if is_pinned { xserv_owned_tensor_new_pinned } else { xserv_owned_tensor_new };
                // SAFETY: plain pointers.
                let view = unsafe {
                    ok(new(context.handle, 1, 1, &len, &mut tensor));
                    ok(xserv_owned_tensor_view(tensor, view.as_mut_ptr()));
                    view.assume_init()
                };
                assert_eq!(view.data as usize % 64, 0);
                assert_eq!(view.data.is_null(), len == 0);
                // SAFETY: one size and one stride, alive with the tensor.
                unsafe { assert_eq!((*view.shape, *view.strides), (len, 1)) };
                xserv_owned_tensor_free(tensor);
            }
        }
    }
}

#[test]
fn contexts_of_several_threads_are_independent() {
    if cuda().is_none() && contexts().is_empty() {
        return;
    }
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            scope.spawn(move || {
                for context in contexts() {
                    for round in 0..20u32 {
                        let x: Vec<f64> =
                            (0..512).map(|i| f64::from(i % (thread + 2) + round)).collect();
                        let tensor = TestTensor::new(&context, Type::F32, &[512], &x);
                        let copy = TestTensor::blank(&context, Type::F32, &[512]);
                        // SAFETY: live tensors.
                        unsafe { ok(xserv_op_copy(context.handle, &tensor.view(), &copy.view())) };
                        assert_eq!(copy.read("a copy"), x);
                    }
                }
            });
        }
    });
}

#[test]
fn descriptors_are_checked() {
    for context in contexts() {
        let x = TestTensor::new(&context, Type::F32, &[4, 8], &[1.0; 32]);
        let w = TestTensor::new(&context, Type::F32, &[8], &[1.0; 8]);
        let out = TestTensor::blank(&context, Type::F32, &[4, 8]);
        let call =
            |x: *const xserv_tensor, w: *const xserv_tensor, eps: f32, out: *const xserv_tensor| {
                // SAFETY: descriptors that must be found wrong before memory is touched.
                let said = refused(unsafe { xserv_op_rms_norm(context.handle, x, w, eps, out) });
                assert!(out.is_null() || !said.is_empty());
                said
            };
        let (xv, wv, ov) = (x.view(), w.view(), out.view());
        let bad = |change: &dyn Fn(&mut xserv_tensor)| {
            let mut view = x.view();
            change(&mut view);
            call(&view, &wv, 1e-6, &ov)
        };
        let null = std::ptr::null();
        assert!(call(null, &wv, 1e-6, &ov).contains("x is NULL"));
        assert!(call(&xv, &wv, f32::NAN, &ov).contains("eps is NaN"));
        assert!(call(&xv, &wv, -1.0, &ov).contains("eps is -1"));
        assert!(call(&xv, &xv, 1e-6, &ov).contains("weight has shape [4, 8]"));
        assert!(call(&xv, &wv, 1e-6, &wv).contains("out has shape [8], but x has [4, 8]"));
        assert!(bad(&|v| v.data = std::ptr::null_mut()).contains("data is NULL"));
        assert!(bad(&|v| v.byte_offset += 1).contains("aligned"));
        assert!(bad(&|v| v.byte_offset = u64::MAX).contains("byte_offset"));
        assert!(bad(&|v| v.ndim = -1).contains("ndim is -1"));
        assert!(bad(&|v| v.ndim = 9).contains("ndim is 9"));
        assert!(bad(&|v| v.shape = std::ptr::null_mut()).contains("x.shape is NULL"));
        assert!(bad(&|v| v.dtype.bits = 64).contains("64 bits"));
        assert!(bad(&|v| v.dtype.lanes = 4).contains("4 lanes"));
        assert!(bad(&|v| v.device.device_type = 7).contains("device_type 7"));
        assert!(
            bad(&|v| v.dtype = xserv_tensor_dtype { code: 0, bits: 32, lanes: 1 }).contains("i32")
        );
        assert!(
            bad(&|v| v.dtype = xserv_tensor_dtype { code: 2, bits: 16, lanes: 1 }).contains("f16")
        );
        assert!(bad(&|v| v.ndim = 0).contains("dimension"));
        let negative = [-8i64, 1];
        assert!(bad(&|v| v.strides = negative.as_ptr().cast_mut()).contains("negative"));
        // The other device than the context's.
        let other = if context.name == "cpu" { 2 } else { 1 };
        let said = bad(&|v| v.device = xserv_tensor_device { device_type: other, device_id: 0 });
        assert!(said.contains("the context works on"), "{said}");
        // Shared places and partial overlaps.
        let mut shared = out.view();
        let zeros = [0i64, 1];
        shared.strides = zeros.as_ptr().cast_mut();
        assert!(call(&xv, &wv, 1e-6, &shared).contains("share one place"));
        let mut shifted = x.view();
        shifted.byte_offset -= 4;
        assert!(call(&xv, &wv, 1e-6, &shifted).contains("overlaps x"));
        // The same view is fine.
        // SAFETY: live tensors.
        unsafe { ok(xserv_op_rms_norm(context.handle, &xv, &wv, 1e-6, &xv)) };
        assert_eq!(out.read("out").iter().filter(|x| x.is_nan()).count(), 32);
        if context.name == "cuda" {
            // Host memory that says it is a device's, and an extent beyond the allocation.
            let host = [0f32; 32];
            let said = bad(&|v| v.data = host.as_ptr() as *mut c_void);
            assert!(said.contains("no memory that CUDA knows"), "{said}");
            let long = [1i64 << 40, 8];
            let mut big_out = ov;
            big_out.shape = long.as_ptr().cast_mut();
            big_out.strides = std::ptr::null_mut();
            let mut big = xv;
            big.shape = long.as_ptr().cast_mut();
            big.strides = std::ptr::null_mut();
            let said = call(&big, &wv, 1e-6, &big_out);
            assert!(said.contains("the allocation ends"), "{said}");
        }
    }
}

#[test]
fn handles_of_contexts_and_tensors_are_checked() {
    let forged = std::ptr::without_provenance_mut::<xserv_context>(0x1234_5678);
    assert_eq!(xserv_context_synchronize(forged), xserv_status::XSERV_STATUS_BAD_HANDLE);
    assert_eq!(
        xserv_context_synchronize(std::ptr::null()),
        xserv_status::XSERV_STATUS_INVALID_ARGUMENT
    );
    let context = context(xserv_device_kind::XSERV_DEVICE_CPU).unwrap();
    let freed = context.handle;
    drop(context);
    assert_eq!(xserv_context_synchronize(freed), xserv_status::XSERV_STATUS_BAD_HANDLE);
    xserv_context_free(std::ptr::null_mut());
    xserv_owned_tensor_free(std::ptr::null_mut());
}

#[test]
fn options_of_contexts_are_checked() {
    let make = |change: &dyn Fn(&mut xserv_context_options)| {
        let mut handle = std::ptr::null_mut();
        // SAFETY: plain out-pointers and a filled struct.
        unsafe {
            let mut options = std::mem::zeroed();
            xserv_context_options_init(&mut options, size_of_val(&options));
            change(&mut options);
            let status = xserv_context_new(&options, &mut handle);
            assert_eq!(handle.is_null(), status != xserv_status::XSERV_STATUS_OK);
            xserv_context_free(handle);
            status
        }
    };
    let cpu = xserv_device_kind::XSERV_DEVICE_CPU as u32;
    assert_eq!(make(&|_| ()), xserv_status::XSERV_STATUS_OK);
    refused(make(&|o| o.device_kind = 9));
    refused(make(&|o| o.use_stream = 2));
    refused(make(&|o| (o.device_kind, o.use_stream) = (cpu, 1)));
    assert_eq!(make(&|o| (o.device_kind, o.num_threads) = (cpu, 0)), xserv_status::XSERV_STATUS_OK);
    refused(make(&|o| (o.device_kind, o.num_threads) = (cpu, 1 << 20)));
    refused(make(&|o| o.struct_size = 8));
    let no_device = xserv_status::XSERV_STATUS_NO_DEVICE;
    assert_eq!(make(&|o| (o.device_kind, o.device_index) = (cpu, 1)), no_device);
    let cuda = xserv_device_kind::XSERV_DEVICE_CUDA as u32;
    assert_eq!(make(&|o| (o.device_kind, o.device_index) = (cuda, 4000)), no_device);
    println!("CUDA device 4000: {}", message());
}

/// A fault in a kernel takes neither the process nor the CPU with it. In a child process: the
/// device's context is of no use afterwards.
#[test]
fn a_lost_device_is_reported() {
    let Some(cuda) = cuda() else { return };
    drop(cuda);
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["compute_context::child_loses_its_device", "--exact", "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("device lost, process alive"), "{said}");
}

#[test]
#[ignore = "run by a_lost_device_is_reported, as a child process"]
fn child_loses_its_device() {
    let Some(context) = cuda() else { return };
    let x = TestTensor::new(&context, Type::F32, &[4, 8], &[1.0; 32]);
    fault();
    let lost = xserv_status::XSERV_STATUS_DEVICE_LOST;
    assert_eq!(xserv_context_synchronize(context.handle), lost, "{}", message());
    println!("{}", message());
    // Everything on that device says so from now on, and nothing hangs or ends the process.
    let w = x.view();
    // SAFETY: live descriptors.
    let status = unsafe { xserv_op_rms_norm(context.handle, &w, &w, 1e-6, &w) };
    assert_ne!(status, xserv_status::XSERV_STATUS_OK);
    assert_eq!(xserv_context_synchronize(context.handle), lost);
    drop(x);
    drop(context);
    let cpu = self::context(xserv_device_kind::XSERV_DEVICE_CPU).unwrap();
    let y = TestTensor::new(&cpu, Type::F32, &[4], &[1.0; 4]);
    assert_eq!(y.read("on the CPU"), [1.0; 4]);
    println!("device lost, process alive");
}

/// Launches a kernel that writes to address 16, in the context that the library uses.
fn fault() {
    use cudarc::driver::sys::*;
    let ptx = c".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry f() { .reg .b64 %a; .reg .b32 %v; mov.b64 %a, 16; mov.b32 %v, 1; st.global.b32 [%a], %v; ret; }";
    // SAFETY: the library has initialised the driver and retained the primary context of device 0.
    unsafe {
        let (mut device, mut context) = (0, std::ptr::null_mut());
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        assert_eq!(cuDeviceGet(&mut device, 0) as u32, 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&mut context, device) as u32, 0);
        assert_eq!(cuCtxPushCurrent_v2(context) as u32, 0);
        assert_eq!(cuModuleLoadData(&mut module, ptx.as_ptr().cast()) as u32, 0);
        assert_eq!(cuModuleGetFunction(&mut function, module, c"f".as_ptr()) as u32, 0);
        let null = std::ptr::null_mut();
        assert_eq!(
            cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, null as _, null as _, null as _) as u32,
            0
        );
        let _ = cuCtxSynchronize();
        let _ = cuCtxPopCurrent_v2(&mut context);
    }
}
