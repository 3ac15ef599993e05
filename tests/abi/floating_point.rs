//! Hosts that run their threads in floating-point modes of their own: what the library computes does
//! not depend on the mode, no exception that the host unmasks is raised, callbacks run in the host's
//! mode, and the mode after a call is that before it.

use std::ffi::c_void;

use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;
use crate::hostile_child::*;

/// The groups of cases by name.
pub const GROUPS: &[Group] = &[("unmasked exceptions", unmasked_exceptions)];

/// The register that holds the mode, and modes that hosts use.
#[cfg(target_arch = "x86_64")]
pub mod register {
    pub const STANDARD: u64 = 0x1f80;
    /// Flush-to-zero and denormals-are-zero, as audio code and `-ffast-math` set them.
    pub const FLUSHING: u64 = 0x9fc0;
    /// Rounding down.
    pub const DOWNWARD: u64 = 0x3f80;
    /// No exception masked, not even that of an inexact result.
    pub const UNMASKED: u64 = 0;

    pub fn get() -> u64 {
        let mut mxcsr = 0u32;
        // SAFETY: stores MXCSR into the variable.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut mxcsr, options(nostack)) };
        u64::from(mxcsr)
    }

    pub fn set(mode: u64) {
        let mxcsr = mode as u32;
        // SAFETY: loads MXCSR of this thread, with no reserved bit set.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &mxcsr, options(nostack, readonly)) };
    }
}

#[cfg(target_arch = "aarch64")]
pub mod register {
    pub const STANDARD: u64 = 0;
    /// FZ and FZ16.
    pub const FLUSHING: u64 = 1 << 24 | 1 << 19;
    /// Rounding down.
    pub const DOWNWARD: u64 = 2 << 22;
    /// All exceptions trapped, where the processor can.
    pub const UNMASKED: u64 = 0x9f00;

    pub fn get() -> u64 {
        let mode: u64;
        // SAFETY: reads FPCR.
        unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) mode, options(nostack)) };
        mode
    }

    pub fn set(mode: u64) {
        // SAFETY: writes FPCR of this thread.
        unsafe { std::arch::asm!("msr fpcr, {}", in(reg) mode, options(nostack)) };
    }
}

/// Calls the library in this mode. Gives what the call gave, and the mode after it. No arithmetic
/// happens in the mode but the library's.
fn in_mode<T>(mode: u64, call: impl FnOnce() -> T) -> (T, u64) {
    register::set(mode);
    let out = call();
    let after = register::get();
    register::set(register::STANDARD);
    (out, after)
}

#[test]
fn operators_compute_the_same_in_every_mode() {
    // Products of which some are subnormal, some are inexact, and some have a subnormal factor.
    let mut a: Vec<f32> = (0..1 << 20).map(|n| 1.1e-20 + n as f32 * 1e-25).collect();
    let mut b: Vec<f32> = (0..1 << 20)
        .map(|n| match n % 3 {
            0 => 1.3e-20,
            1 => 1.7e20,
            _ => 1e-40,
        })
        .collect();
    let expected: Vec<u32> = a.iter().zip(&b).map(|(a, b)| (a * b).to_bits()).collect();
    assert!(expected.iter().any(|bits| f32::from_bits(*bits).is_subnormal()));
    let modes = [register::FLUSHING, register::DOWNWARD, register::STANDARD];
    for (mode, num_threads) in modes.into_iter().flat_map(|mode| [(mode, 1), (mode, 4)]) {
        // Made in that mode too: threads inherit the mode of the thread that starts them.
        let (context, after) = in_mode(mode, || Context::new(num_threads));
        assert_eq!(after, mode, "the register after the call");
        let mut out = vec![7f32; a.len()];
        let mut shape = [a.len() as i64];
        let (ta, tb) = (tensor(&mut a, &mut shape), tensor(&mut b, &mut shape));
        let to = tensor(&mut out, &mut shape);
        let (status, after) = in_mode(mode, || unsafe { xserv_op_mul(context.0, &ta, &tb, &to) });
        check(status).unwrap();
        let wrong = out.iter().zip(&expected).filter(|(o, e)| o.to_bits() != **e).count();
        assert_eq!(wrong, 0, "of {} products in the mode {mode:#x}", out.len());
        assert_eq!(after, mode, "the register after the call");
        let ((), after) = in_mode(mode, || drop(context));
        assert_eq!(after, mode);
    }
}

/// The register as a callback saw it, and the value that the callback sets.
struct Seen {
    modes: Vec<u64>,
    change_to: Option<u64>,
}

impl Seen {
    fn note(&mut self) {
        // The room is there: growing may compute.
        if self.modes.len() < self.modes.capacity() {
            self.modes.push(register::get());
        }
        if let Some(mode) = self.change_to {
            register::set(mode);
        }
    }
}

unsafe extern "C" fn on_token(_: *const xserv_token_event, seen: *mut c_void) -> bool {
    unsafe { &mut *(seen as *mut Seen) }.note();
    true
}

unsafe extern "C" fn on_progress(_: f32, seen: *mut c_void) -> bool {
    unsafe { &mut *(seen as *mut Seen) }.note();
    true
}

unsafe extern "C" fn on_log(
    _: u32,
    _: *const std::ffi::c_char,
    _: *const std::ffi::c_char,
    seen: *mut c_void,
) {
    unsafe { &mut *(seen as *mut Seen) }.note();
}

unsafe extern "C" fn on_loss(
    values: *const f32,
    _: usize,
    loss: *mut f64,
    seen: *mut c_void,
) -> bool {
    unsafe { &mut *(seen as *mut Seen) }.note();
    // Copied as bits: the value widened is 1.0.
    let is_one = unsafe { (*values).to_bits() } == 1f32.to_bits();
    unsafe { *loss = if is_one { 1.0 } else { 2.0 } };
    true
}

/// Loads and generates in this mode; the callbacks change it to `change_to`. Gives the ids, the
/// modes that the callbacks saw, and the mode in the end.
fn load_and_generate(mode: u64, change_to: Option<u64>) -> (Vec<u32>, Vec<u64>, u64) {
    let mut seen = Seen { modes: Vec::with_capacity(1000), change_to };
    let data = &raw mut seen as *mut c_void;
    let path = c_string(tiny().to_str().unwrap());
    let options = xserv_load_options {
        num_threads: 4,
        progress: Some(on_progress),
        progress_user_data: data,
        log: Some(on_log),
        log_user_data: data,
        ..load_options()
    };
    let request = xserv_request { temperature: 0.8, seed: 5, max_tokens: 6, ..greedy(&PROMPT, 6) };
    let mut model = std::ptr::null_mut();
    let mut result = std::ptr::null_mut();
    let (statuses, after) = in_mode(mode, || unsafe {
        let loaded = xserv_load(path.as_ptr(), &options, &mut model);
        (loaded, xserv_generate(model, &request, Some(on_token), data, &mut result))
    });
    assert_eq!(statuses, (XSERV_STATUS_OK, XSERV_STATUS_OK), "{}", last_error());
    let mut info: xserv_result_info = unsafe { std::mem::zeroed() };
    info.struct_size = size_of::<xserv_result_info>();
    check(unsafe { xserv_result_get_info(result, &mut info) }).unwrap();
    let ids = unsafe { std::slice::from_raw_parts(info.token_ids, info.num_tokens) }.to_vec();
    xserv_result_free(result);
    xserv_model_free(model);
    (ids, seen.modes, after)
}

#[test]
fn callbacks_run_in_the_mode_of_the_host() {
    let (expected, modes, _) = load_and_generate(register::STANDARD, None);
    assert!(modes.len() > 8, "{} callbacks", modes.len());
    for mode in [register::FLUSHING, register::DOWNWARD] {
        let (ids, modes, after) = load_and_generate(mode, None);
        assert_eq!(ids, expected);
        assert!(modes.iter().all(|seen| *seen == mode), "{modes:x?}");
        assert_eq!(after, mode);
    }
    // A callback's change on its thread stays, and affects no result.
    let (ids, modes, after) = load_and_generate(register::STANDARD, Some(register::FLUSHING));
    assert_eq!(ids, expected);
    assert_eq!(modes[0], register::STANDARD);
    assert!(modes[1..].iter().all(|seen| *seen == register::FLUSHING), "{modes:x?}");
    assert_eq!(after, register::FLUSHING);
}

#[test]
fn hosts_with_unmasked_exceptions() {
    run_group("unmasked exceptions");
}

/// Every exception unmasked: any arithmetic of the library in the host's mode would end the process.
fn unmasked_exceptions(bench: &mut Bench) {
    bench.case("load and generate", |_| {
        let (expected, _, _) = load_and_generate(register::STANDARD, None);
        let (ids, modes, after) = load_and_generate(register::UNMASKED, None);
        if ids != expected || after != register::UNMASKED {
            return Err(format!("{ids:?}, not {expected:?}; the mode afterwards is {after:x}"));
        }
        match modes.iter().all(|mode| *mode == register::UNMASKED) {
            true => Ok(format!("{} callbacks", modes.len())),
            false => Err(format!("{modes:x?}")),
        }
    });
    bench.case("text and the rest", |_| {
        let model = Model::open(&tiny());
        let mut chat: xserv_chat_options = unsafe { std::mem::zeroed() };
        unsafe { xserv_chat_options_init(&mut chat, size_of_val(&chat)) };
        let messages = c_string(MESSAGES);
        chat.messages_json = messages.as_ptr();
        let path = c_string(tiny().to_str().unwrap());
        let (mut tokens, mut text) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut inspection = std::ptr::null_mut();
        let mut logits = vec![0f32; model.info().vocab_size as usize];
        let mut seen = Seen { modes: Vec::with_capacity(100), change_to: None };
        let mut found: xserv_grad_check_result = unsafe { std::mem::zeroed() };
        found.struct_size = size_of::<xserv_grad_check_result>();
        let (statuses, after) = in_mode(register::UNMASKED, || unsafe {
            [
                xserv_tokenize(model.0, c"some text".as_ptr(), 9, std::ptr::null(), &mut tokens),
                xserv_apply_chat_template(model.0, &chat, &mut text),
                xserv_inspect(path.as_ptr(), &mut inspection),
                xserv_logits(
                    model.0,
                    PROMPT.as_ptr(),
                    4,
                    std::ptr::null(),
                    logits.as_mut_ptr(),
                    logits.len(),
                ),
                xserv_grad_check(
                    std::ptr::null(),
                    Some(on_loss),
                    &raw mut seen as *mut c_void,
                    [1f32, 2.0].as_ptr(),
                    [1f32, 2.0].as_ptr(),
                    2,
                    &mut found,
                ),
            ]
        });
        xserv_tokens_free(tokens);
        xserv_text_free(text);
        xserv_inspection_free(inspection);
        if statuses != [XSERV_STATUS_OK; 5] || after != register::UNMASKED {
            return Err(format!("{statuses:?}, {}; mode {after:x}", last_error()));
        }
        match seen.modes.len() == 4 && seen.modes.iter().all(|mode| *mode == register::UNMASKED) {
            true => Ok(String::new()),
            false => Err(format!("{:x?}", seen.modes)),
        }
    });
}
