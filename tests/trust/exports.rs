//! Every exported function: a panic inside it is caught, and it may be called from callbacks.

use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;
use crate::functions::{functions, Function};
use crate::scale::{watched, PATIENCE};
use crate::world::*;

/// Functions that only return constants: nothing in them can panic, and they have no guard.
#[cfg(debug_assertions)]
fn is_constant(function: &Function) -> bool {
    const NAMES: [&str; 7] = [
        "xserv_version",
        "xserv_abi_version",
        "xserv_finish_reason_name",
        "xserv_last_error",
        "xserv_status_name",
        "xserv_tensor_dtype_of",
        "xserv_tensor_device_of",
    ];
    NAMES.contains(&function.name.as_str())
}

fn tokens(model: *mut xserv_model) -> Vec<u32> {
    // Not dropped: the world frees it.
    let model = std::mem::ManuallyDrop::new(Model(model));
    model.generate(&greedy(&IDS, 2)).unwrap().ids
}

/// The switch that makes functions panic is not in release builds.
#[cfg(debug_assertions)]
#[test]
fn a_panic_in_any_function_is_reported_and_harms_nothing() {
    let mut world = World::new();
    let expected = tokens(world.model());
    let mut guarded = 0;
    for function in functions() {
        let arguments = world.arguments(&function);
        test_panic::set_due(true);
        let returned = call(&function, &arguments);
        let was_ignored = test_panic::is_due();
        test_panic::set_due(false);
        assert_eq!(was_ignored, is_constant(&function), "{} has no guard", function.name);
        if was_ignored {
            continue;
        }
        guarded += 1;
        match returned {
            Returned::Status(status) => {
                assert_eq!(status, XSERV_STATUS_INTERNAL as u32, "{}", function.name)
            }
            Returned::Pointer(pointer) => assert_eq!(pointer, 0, "{}", function.name),
            Returned::Number(number) => assert_eq!(number, 0, "{}", function.name),
            Returned::Nothing => {}
        }
        let said = last_error();
        assert!(said.contains("asked for by a test at "), "{}: {said}", function.name);
        // The call had no effect: the same one works now.
        let mut arguments = world.arguments(&function);
        let returned = call(&function, &arguments);
        if let Returned::Status(status) = returned {
            let may_fail = ["xserv_cuda_device_get_info", "xserv_owned_tensor_new_pinned"];
            let is_fine = returned.is_ok() || may_fail.contains(&function.name.as_str());
            assert!(is_fine, "{} gives {status} after a panic: {}", function.name, last_error());
        }
        free_made(&function, &mut arguments, returned);
        renew_used(&mut world, &function);
        assert_eq!(tokens(world.model()), expected, "after a panic in {}", function.name);
    }
    println!("{guarded} functions panicked");
    assert!(guarded >= 60);
}

/// A call that a callback makes, once.
struct Inside {
    function: Function,
    arguments: Mutex<Arguments>,
    returned: Mutex<Option<Returned>>,
    times: AtomicU32,
}

impl Inside {
    fn happen(&self) {
        if self.times.fetch_add(1, Ordering::SeqCst) > 0 {
            return;
        }
        let mut arguments = self.arguments.lock().unwrap();
        let returned = call(&self.function, &arguments);
        free_made(&self.function, &mut arguments, returned);
        *self.returned.lock().unwrap() = Some(returned);
    }

    unsafe fn at<'a>(user_data: *mut c_void) -> &'a Inside {
        unsafe { &*(user_data as *const Inside) }
    }
}

unsafe extern "C" fn on_token(_: *const xserv_token_event, inside: *mut c_void) -> bool {
    unsafe { Inside::at(inside) }.happen();
    true
}

unsafe extern "C" fn on_logits(_: *const xserv_logits_event, inside: *mut c_void) -> bool {
    unsafe { Inside::at(inside) }.happen();
    true
}

unsafe extern "C" fn on_progress(_: f32, inside: *mut c_void) -> bool {
    unsafe { Inside::at(inside) }.happen();
    true
}

unsafe extern "C" fn on_log(_: u32, _: *const c_char, _: *const c_char, inside: *mut c_void) {
    unsafe { Inside::at(inside) }.happen();
}

unsafe extern "C" fn on_wake(inside: *mut c_void) {
    unsafe { Inside::at(inside) }.happen();
}

/// Calls every function once inside a callback: `run` makes a call that has `inside` as the user data
/// of its callback, `check_return` looks at what the inner call returned.
fn from_inside(
    what: &'static str,
    run: impl Fn(&World, &Inside) + Send + 'static,
    check_return: impl Fn(&Function, Returned) + Send + 'static,
) {
    // Each function takes some milliseconds; a deadlock takes for ever.
    watched(what, 4 * PATIENCE, move || {
        let mut world = World::new();
        let expected = tokens(world.model());
        let all = functions();
        let slowest = all.iter().map(|function| {
            let begin = Instant::now();
            let inside = Inside {
                arguments: Mutex::new(world.arguments(function)),
                function: function.clone(),
                returned: Mutex::new(None),
                times: AtomicU32::new(0),
            };
            run(&world, &inside);
            let returned = inside.returned.lock().unwrap().take();
            let returned = returned.unwrap_or_else(|| panic!("{} was not called", function.name));
            check_return(function, returned);
            renew_used(&mut world, function);
            assert_eq!(tokens(world.model()), expected, "after {}", function.name);
            (begin.elapsed(), function.name.as_str())
        });
        let slowest = slowest.max().unwrap();
        println!("{} functions from {what}, slowest {slowest:?}", all.len());
    });
}

/// A call inside a callback works as outside.
fn works(function: &Function, returned: Returned) {
    let may_fail = ["xserv_cuda_device_get_info", "xserv_owned_tensor_new_pinned"];
    if may_fail.contains(&function.name.as_str()) {
        return;
    }
    match returned {
        Returned::Status(_) => assert!(returned.is_ok(), "{}: {returned:?}", function.name),
        Returned::Pointer(pointer) => assert_ne!(pointer, 0, "{}", function.name),
        Returned::Number(_) | Returned::Nothing => {}
    }
}

#[test]
fn every_function_may_be_called_in_a_token_callback() {
    from_inside(
        "a token callback",
        |world, inside| {
            let mut result = std::ptr::null_mut();
            let request = greedy(&IDS, 3);
            let data = std::ptr::from_ref(inside) as *mut c_void;
            check(unsafe {
                xserv_generate(world.model(), &request, Some(on_token), data, &mut result)
            })
            .unwrap();
            xserv_result_free(result);
        },
        works,
    );
}

#[test]
fn every_function_may_be_called_in_a_logits_callback() {
    from_inside(
        "a logits callback",
        |world, inside| {
            let mut result = std::ptr::null_mut();
            let data = std::ptr::from_ref(inside) as *mut c_void;
            let request = xserv_request {
                logits_callback: Some(on_logits),
                logits_user_data: data,
                ..greedy(&IDS, 3)
            };
            check(unsafe {
                xserv_generate(world.model(), &request, None, std::ptr::null_mut(), &mut result)
            })
            .unwrap();
            xserv_result_free(result);
        },
        works,
    );
}

/// Loads a model with these options.
fn load(options: &xserv_load_options) {
    drop(Model::load(&tiny(), options).unwrap());
}

#[test]
fn every_function_may_be_called_in_a_progress_callback() {
    from_inside(
        "a progress callback",
        |_, inside| {
            let data = std::ptr::from_ref(inside) as *mut c_void;
            load(&xserv_load_options {
                progress: Some(on_progress),
                progress_user_data: data,
                ..quick_options()
            });
        },
        works,
    );
}

#[test]
fn every_function_may_be_called_in_a_log_callback() {
    from_inside(
        "a log callback",
        |_, inside| {
            let data = std::ptr::from_ref(inside) as *mut c_void;
            load(&xserv_load_options { log: Some(on_log), log_user_data: data, ..quick_options() });
        },
        works,
    );
}

#[test]
fn no_function_deadlocks_in_a_wake_up_callback() {
    // Functions that would wait for the model that waits for the callback.
    const REFUSED: [&str; 3] = ["xserv_generate", "xserv_logits", "xserv_score"];
    from_inside(
        "a wake-up callback",
        |world, inside| {
            let mut options: xserv_submit_options = unsafe { std::mem::zeroed() };
            unsafe { xserv_submit_options_init(&mut options, size_of_val(&options)) };
            options.wake = Some(on_wake);
            options.wake_user_data = std::ptr::from_ref(inside) as *mut c_void;
            let mut submission = std::ptr::null_mut();
            let request = greedy(&IDS, 2);
            check(unsafe { xserv_submit(world.model(), &request, &options, &mut submission) })
                .unwrap();
            let until = Instant::now() + PATIENCE;
            while inside.returned.lock().unwrap().is_none() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            xserv_submission_free(submission);
        },
        |function, returned| {
            if REFUSED.contains(&function.name.as_str()) {
                let refused = Returned::Status(XSERV_STATUS_INVALID_ARGUMENT as u32);
                assert_eq!(returned, refused, "{}", function.name);
            } else {
                works(function, returned);
            }
        },
    );
}
