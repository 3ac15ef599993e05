//! Forks: a forked child is refused what needs the parent's threads, and never hangs, whatever the
//! host does in its fork handlers, and whatever the child's process id.

use std::cell::UnsafeCell;
use std::ffi::{c_char, c_void, CString};
use std::mem::transmute;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;
use crate::hostile_child::*;
use crate::symbols::shared_object;

/// The groups of cases by name.
pub const GROUPS: &[Group] =
    &[("forks", forks), ("fork handlers", fork_handlers), ("namespaces", namespaces)];

#[test]
fn forked_children_get_an_answer() {
    run_group("forks");
}

#[test]
fn fork_handlers_may_call_the_library() {
    for when in ["before the library is loaded", "before the first call", "after the first call"] {
        // Cold, so that the calls of the handlers are the first ones in the process.
        run_group_with(
            "fork handlers",
            &[("XSERV_HOSTILE_WHEN", when), ("XSERV_HOSTILE_COLD", "1")],
        );
    }
}

#[test]
fn a_child_with_the_process_id_of_its_parent_is_refused() {
    run_group("namespaces");
}

/// Calls everything as a forked child does, and gives the statuses of the calls that need the model.
fn call_everything(model: *mut xserv_model) -> Vec<xserv_status> {
    let mut statuses = Vec::new();
    unsafe {
        let mut info: xserv_model_info = std::mem::zeroed();
        info.struct_size = size_of::<xserv_model_info>();
        let _ = xserv_model_get_info(model, &mut info);
        let mut tokens = std::ptr::null_mut();
        statuses.push(xserv_tokenize(
            model,
            c"some text".as_ptr(),
            9,
            std::ptr::null(),
            &mut tokens,
        ));
        let mut text = std::ptr::null_mut();
        statuses.push(xserv_detokenize(model, PROMPT.as_ptr(), 4, true, &mut text));
        let mut detokenizer = std::ptr::null_mut();
        statuses.push(xserv_detokenizer_new(model, true, &mut detokenizer));
        let mut chat = std::mem::zeroed();
        xserv_chat_options_init(&mut chat, size_of_val(&chat));
        chat.messages_json = c"[{\"role\": \"user\", \"content\": \"a\"}]".as_ptr();
        statuses.push(xserv_apply_chat_template(model, &chat, &mut text));
        let mut messages = std::ptr::null_mut();
        if xserv_messages_new(&mut messages) == XSERV_STATUS_OK {
            let _ = xserv_messages_add(messages, c"user".as_ptr(), c"a".as_ptr());
            let _ = (xserv_messages_json(messages), xserv_messages_count(messages));
            xserv_messages_free(messages);
        }
        let mut logits = vec![0f32; 2048];
        statuses.push(xserv_logits(
            model,
            PROMPT.as_ptr(),
            4,
            std::ptr::null(),
            logits.as_mut_ptr(),
            2048,
        ));
        let request = greedy(&PROMPT, 2);
        let mut result = std::ptr::null_mut();
        statuses.push(xserv_generate(model, &request, None, std::ptr::null_mut(), &mut result));
        let mut cancel = std::ptr::null_mut();
        if xserv_cancel_token_new(&mut cancel) == XSERV_STATUS_OK {
            let _ = xserv_cancel_token_cancel(cancel);
            xserv_cancel_token_free(cancel);
        }
        let _ = (xserv_version(), xserv_abi_version(), xserv_last_error(), xserv_status_name(12));
        xserv_tokens_free(tokens);
        xserv_text_free(text);
        xserv_detokenizer_free(detokenizer);
        xserv_result_free(result);
    }
    statuses
}

/// Forks, and returns the child's exit code, or a description of any other end.
fn fork_and(body: impl FnOnce() -> i32) -> Result<i32, String> {
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork");
    if child == 0 {
        // A panic of the test must not go on as a second test process.
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(99);
        unsafe { libc::_exit(code) };
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let mut status = 0;
        match unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } {
            0 if Instant::now() > deadline => {
                unsafe { libc::kill(child, libc::SIGKILL) };
                unsafe { libc::waitpid(child, &mut status, 0) };
                return Err("the forked child hung".to_string());
            }
            0 => std::thread::sleep(Duration::from_millis(1)),
            _ if libc::WIFEXITED(status) => return Ok(libc::WEXITSTATUS(status)),
            _ => return Err(format!("the forked child died of {status:#x}")),
        }
    }
}

/// All calls on a model of the parent are FORKED.
fn all_forked(model: &Model) -> i32 {
    let statuses = call_everything(model.0);
    let wrong = statuses.iter().position(|status| *status != XSERV_STATUS_FORKED);
    let code = wrong.map_or(0, |at| 10 + at as i32);
    xserv_model_free(model.0);
    code
}

fn zero(code: i32) -> Result<(), String> {
    match code {
        0 => Ok(()),
        code => Err(format!("the forked child says {code}")),
    }
}

fn forks(bench: &mut Bench) {
    let reference = bench.reference.clone();
    bench.case("while nothing runs", |_| {
        let model = Model::open(&tiny());
        // Threads that render wait for more.
        model.apply_chat_template(MESSAGES, None, None, true).map_err(|f| f.message)?;
        for _ in 0..20 {
            zero(fork_and(|| all_forked(&model))?)?;
        }
        match model.generate(&greedy(&PROMPT, 3)) {
            Ok(output) if output.ids == reference => Ok(String::new()),
            other => Err(format!("{other:?}")),
        }
    });
    bench.case("the child loads for itself", |_| {
        // These belong to this thread: the child uses the stacks of the others again.
        let reference = reference.clone();
        let model = Model::open(&tiny());
        let code = fork_and(|| {
            let own = Model::open(&tiny());
            let same = own.generate(&greedy(&PROMPT, 3)).is_ok_and(|o| o.ids == reference);
            let chat = own.apply_chat_template(MESSAGES, None, None, true).is_ok();
            let forked = call_everything(model.0).iter().all(|s| *s == XSERV_STATUS_FORKED);
            drop(own);
            i32::from(!same) + 2 * i32::from(!chat) + 4 * i32::from(!forked)
        })?;
        zero(code)?;
        Ok(String::new())
    });
    bench.case("inside the token callback", |_| {
        let model = Model::open(&tiny());
        let mut inside = Ok(());
        let output = model.stream(&greedy(&PROMPT, 3), &mut |_| {
            if inside.is_ok() {
                inside = fork_and(|| all_forked(&model)).and_then(zero);
            }
            true
        });
        inside?;
        match output {
            Ok(output) if output.ids == reference => Ok(String::new()),
            other => Err(format!("{other:?}")),
        }
    });
    bench.case("things of the parent that need no model", |_| {
        let model = Model::open(&tiny());
        let ids = model.tokenize("hello").map_err(|f| f.message)?;
        let mut tokens = std::ptr::null_mut();
        let made =
            unsafe { xserv_tokenize(model.0, c"hello".as_ptr(), 5, std::ptr::null(), &mut tokens) };
        check(made).map_err(|f| f.message)?;
        let code = fork_and(|| {
            let mut count = 0;
            let data = unsafe { xserv_tokens_data(tokens, &mut count) };
            let same = !data.is_null() && count == ids.len();
            let inspected = inspect(&tiny()).is_ok_and(|found| found.supported);
            let missing = Model::load(&tiny().join("none"), &load_options()).is_err();
            i32::from(!(same && inspected && missing))
        })?;
        zero(code)?;
        xserv_tokens_free(tokens);
        Ok(String::new())
    });
    bench.case("the last of a model is freed in the child", |_| {
        let model = Model::open(&tiny());
        let mut detokenizer = std::ptr::null_mut();
        check(unsafe { xserv_detokenizer_new(model.0, true, &mut detokenizer) })
            .map_err(|f| f.message)?;
        // The detokenizer keeps what it needs.
        drop(model);
        zero(fork_and(|| {
            xserv_detokenizer_free(detokenizer);
            0
        })?)?;
        xserv_detokenizer_free(detokenizer);
        Ok(String::new())
    });
    // Locks that another thread holds at the moment of the fork stay locked in the child.
    type Busy = fn(&Model);
    let busy: [(&str, Busy); 4] = [
        ("another thread makes and frees handles", |_| {
            let mut cancel = std::ptr::null_mut();
            check(unsafe { xserv_cancel_token_new(&mut cancel) }).unwrap();
            xserv_cancel_token_free(cancel);
        }),
        ("another thread tokenizes", |model| drop(model.tokenize("hello").unwrap())),
        ("another thread generates", |model| drop(model.generate(&greedy(&PROMPT, 4)).unwrap())),
        ("another thread loads", |_| drop(Model::open(&tiny()))),
    ];
    for (name, work) in busy {
        bench.case(format!("while {name}"), move |_| {
            let model = Model::open(&tiny());
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let other = scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        work(&model);
                    }
                });
                let outcome = (0..60).try_for_each(|round| {
                    std::thread::sleep(Duration::from_micros(137 * (round % 7)));
                    zero(fork_and(|| all_forked(&model))?)
                });
                stop.store(true, Ordering::Relaxed);
                other.join().unwrap();
                outcome
            })?;
            Ok(String::new())
        });
    }
}

/// The functions of a libxserv.so that is loaded at run time.
#[derive(Clone, Copy)]
struct Loaded {
    load: Load,
    generate: Generate,
    detokenize: Detokenize,
    text_data: TextData,
    text_free: extern "C" fn(*mut xserv_text),
    model_free: extern "C" fn(*mut xserv_model),
}

type Load = unsafe extern "C" fn(
    *const c_char,
    *const xserv_load_options,
    *mut *mut xserv_model,
) -> xserv_status;
type Generate = unsafe extern "C" fn(
    *const xserv_model,
    *const xserv_request,
    xserv_token_callback,
    *mut c_void,
    *mut *mut xserv_result,
) -> xserv_status;
type Detokenize = unsafe extern "C" fn(
    *const xserv_model,
    *const u32,
    usize,
    bool,
    *mut *mut xserv_text,
) -> xserv_status;
type TextData = unsafe extern "C" fn(*const xserv_text, *mut usize) -> *const c_char;

impl Loaded {
    fn open() -> Loaded {
        let path = CString::new(shared_object().as_os_str().as_bytes()).unwrap();
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null());
        let find = |name: &std::ffi::CStr| {
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            assert!(!found.is_null(), "{name:?}");
            found
        };
        // The types are those of the functions of the same names.
        unsafe {
            Loaded {
                load: transmute::<*mut c_void, Load>(find(c"xserv_load")),
                generate: transmute::<*mut c_void, Generate>(find(c"xserv_generate")),
                detokenize: transmute::<*mut c_void, Detokenize>(find(c"xserv_detokenize")),
                text_data: transmute::<*mut c_void, TextData>(find(c"xserv_text_data")),
                text_free: transmute::<*mut c_void, extern "C" fn(*mut xserv_text)>(find(
                    c"xserv_text_free",
                )),
                model_free: transmute::<*mut c_void, extern "C" fn(*mut xserv_model)>(find(
                    c"xserv_model_free",
                )),
            }
        }
    }

    fn generate(&self, model: *mut xserv_model) -> xserv_status {
        let request = greedy(&PROMPT, 3);
        let (callback, result) = (None, std::ptr::null_mut());
        unsafe { (self.generate)(model, &request, callback, std::ptr::null_mut(), result) }
    }

    fn new_text(&self, model: *mut xserv_model) -> (xserv_status, *mut xserv_text) {
        let mut text = std::ptr::null_mut();
        let made = unsafe { (self.detokenize)(model, PROMPT.as_ptr(), 4, true, &mut text) };
        (made, text)
    }
}

/// The state of the host's fork handlers, and what they saw.
struct Host {
    library: Loaded,
    model: *mut xserv_model,
    /// A text that the handler before the fork frees.
    text: *mut xserv_text,
    /// Generating, and making a text and freeing it.
    before: Vec<xserv_status>,
    parent: Vec<xserv_status>,
    child: Vec<xserv_status>,
}

/// The content is that of the one thread that forks.
struct TheHost(UnsafeCell<Option<Host>>);
unsafe impl Sync for TheHost {}
static HOST: TheHost = TheHost(UnsafeCell::new(None));

/// Returns the host, once it has loaded its model.
fn host() -> Option<&'static mut Host> {
    unsafe { (*HOST.0.get()).as_mut() }
}

fn use_library(host: &Host) -> Vec<xserv_status> {
    let (made, text) = host.library.new_text(host.model);
    (host.library.text_free)(text);
    vec![host.library.generate(host.model), made]
}

extern "C" fn before_fork() {
    let Some(host) = host() else { return };
    host.before = use_library(host);
    (host.library.text_free)(host.text);
}

extern "C" fn after_fork_in_parent() {
    let Some(host) = host() else { return };
    host.parent = use_library(host);
}

extern "C" fn after_fork_in_child() {
    let Some(host) = host() else { return };
    host.child = use_library(host);
    // As hosts do that want nothing of the parent's in the child.
    (host.library.model_free)(host.model);
}

fn fork_handlers(bench: &mut Bench) {
    let when = std::env::var("XSERV_HOSTILE_WHEN").unwrap();
    bench.case(format!("handlers registered {when}"), |_| {
        let register = || {
            let handlers = (
                Some(before_fork as _),
                Some(after_fork_in_parent as _),
                Some(after_fork_in_child as _),
            );
            assert_eq!(unsafe { libc::pthread_atfork(handlers.0, handlers.1, handlers.2) }, 0);
        };
        let is_outside = when == "before the library is loaded";
        if is_outside {
            register();
        }
        let library = Loaded::open();
        if when == "before the first call" {
            register();
        }
        let path = c_string(tiny().to_str().unwrap());
        let mut model = std::ptr::null_mut();
        check(unsafe { (library.load)(path.as_ptr(), &load_options(), &mut model) })
            .map_err(|f| f.message)?;
        if when == "after the first call" {
            register();
        }
        let (_, text) = library.new_text(model);
        let nothing = Vec::new;
        let (before, parent, child) = (nothing(), nothing(), nothing());
        let new = Host { library, model, text, before, parent, child };
        unsafe { *HOST.0.get() = Some(new) };
        let (works, refused) = (vec![XSERV_STATUS_OK; 2], vec![XSERV_STATUS_FORKED; 2]);
        let code = fork_and(|| {
            let host = host().unwrap();
            let in_handler = host.child == refused;
            // The handler has freed the model, unless the call did nothing.
            let expected = if is_outside { XSERV_STATUS_FORKED } else { XSERV_STATUS_BAD_HANDLE };
            let afterwards = use_library(host) == vec![expected; 2];
            i32::from(!in_handler) + 2 * i32::from(!afterwards)
        })?;
        zero(code)?;
        let host = host().unwrap();
        let expected = if is_outside { &refused } else { &works };
        if host.before != *expected || host.parent != *expected {
            return Err(format!("{:?} before the fork, {:?} after it", host.before, host.parent));
        }
        // A free in a handler that came too early did nothing, and can be done now.
        let is_left = !unsafe { (library.text_data)(text, std::ptr::null_mut()) }.is_null();
        if is_left != is_outside || use_library(host) != works {
            return Err(format!("the text is left: {is_left}; or the parent does not work on"));
        }
        (library.text_free)(text);
        unsafe { *HOST.0.get() = None };
        (library.model_free)(model);
        Ok(String::new())
    });
}

/// A parent that is the first process of a namespace forks a child that is the first of another.
fn namespaces(bench: &mut Bench) {
    bench.case("parent and child are both process 1", |_| {
        const NOT_ALLOWED: i32 = 77;
        const NOT_THE_FIRST: i32 = 78;
        let code = fork_and(|| {
            let flags = libc::CLONE_NEWUSER | libc::CLONE_NEWPID;
            if unsafe { libc::unshare(flags) } != 0 {
                return NOT_ALLOWED;
            }
            let outcome = fork_and(|| {
                let model = Model::open(&tiny());
                if model.generate(&greedy(&PROMPT, 3)).is_err() {
                    return 79;
                }
                if unsafe { libc::unshare(libc::CLONE_NEWPID) } != 0 {
                    return NOT_ALLOWED;
                }
                let outcome = fork_and(|| match std::process::id() {
                    1 => all_forked(&model),
                    _ => NOT_THE_FIRST,
                });
                // Dropping it would end its threads, for which there is no time limit here.
                std::mem::forget(model);
                outcome.unwrap_or(80)
            });
            outcome.unwrap_or(81)
        })?;
        match code {
            0 => Ok(String::new()),
            NOT_ALLOWED => Ok("skipped: this system lets no namespace be made".to_string()),
            79 => Err("the model does not work in the parent".to_string()),
            80 => Err("the child hung".to_string()),
            code => Err(format!("the child says {code}")),
        }
    });
}
