//! Structs whose size the caller knows: nothing beyond it is read or written, whatever the library
//! knows today, and programs that were built with an older header of this ABI version go on.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use xserv::ffi::*;

use crate::client::*;
use crate::files::TempDir;
use crate::symbols::shared_object;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Each struct of options with the function that fills it, its size, and its defaults.
fn option_structs() -> Vec<(&'static str, unsafe fn(*mut c_void, usize), usize)> {
    macro_rules! all {
        ($($name:ident $init:ident),*) => {
            vec![$((
                stringify!($name),
                |to: *mut c_void, size: usize| unsafe { $init(to.cast::<$name>(), size) },
                size_of::<$name>(),
            )),*]
        };
    }
    all![
        xserv_load_options xserv_load_options_init,
        xserv_tokenize_options xserv_tokenize_options_init,
        xserv_chat_options xserv_chat_options_init,
        xserv_request xserv_request_init,
        xserv_submit_options xserv_submit_options_init,
        xserv_parse_options xserv_parse_options_init,
        xserv_logits_options xserv_logits_options_init,
        xserv_score_options xserv_score_options_init,
        xserv_context_options xserv_context_options_init,
        xserv_gemm_options xserv_gemm_options_init,
        xserv_grad_check_options xserv_grad_check_options_init,
        xserv_attention_options xserv_attention_options_init
    ]
}

const UNTOUCHED: u8 = 0xa5;

/// Returns the bytes of a struct that was filled for a caller who knows `size` bytes of it, and what follows.
fn filled(init: unsafe fn(*mut c_void, usize), size: usize) -> Vec<u8> {
    let mut space = vec![u64::from_ne_bytes([UNTOUCHED; 8]); 64];
    unsafe { init(space.as_mut_ptr().cast(), size) };
    space.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

#[test]
fn no_byte_beyond_the_callers_struct_is_written() {
    for (name, init, whole) in option_structs() {
        let defaults = filled(init, whole);
        for size in (8..whole + 64).step_by(4) {
            let found = filled(init, size);
            assert_eq!(found[..8], size.to_ne_bytes(), "{name}: struct_size for {size}");
            let known = size.min(whole);
            assert_eq!(found[8..known], defaults[8..known], "{name}: the defaults for {size}");
            assert!(found[known..size].iter().all(|b| *b == 0), "{name}: unknown bytes for {size}");
            assert!(found[size..].iter().all(|b| *b == UNTOUCHED), "{name}: beyond {size} bytes");
        }
        for size in 0..8 {
            assert!(filled(init, size).iter().all(|b| *b == UNTOUCHED), "{name}: {size} bytes");
        }
        unsafe { init(ptr::null_mut(), whole) };
    }
}

#[test]
fn every_option_struct_of_the_headers_is_tested_here() {
    let tested: Vec<&str> = option_structs().iter().map(|(name, _, _)| *name).collect();
    for header in ["include/xserv.h", "include/xserv_ops.h"] {
        let text = std::fs::read_to_string(root().join(header)).unwrap();
        for line in text.lines().filter(|line| line.starts_with("static inline void ")) {
            let name = line.split(['(', ' ']).nth(4).unwrap();
            assert!(tested.contains(&name), "{name} of {header} is not tested here");
        }
    }
    assert!(tested.len() > 9);
}

#[test]
fn sizes_that_no_version_has_are_refused() {
    let path = std::ffi::CString::new(tiny().to_str().unwrap()).unwrap();
    let whole = size_of::<xserv_load_options>();
    // 104 is the size of 0.2.0.
    for struct_size in (0..whole + 64).filter(|size| ![104, whole].contains(size)) {
        let options = xserv_load_options { struct_size, ..load_options() };
        let mut model = ptr::null_mut();
        let status = unsafe { xserv_load(path.as_ptr(), &options, &mut model) };
        assert_eq!(status, xserv_status::XSERV_STATUS_INVALID_ARGUMENT, "{struct_size}");
        assert!(last_error().contains(&format!("struct_size is {struct_size}")));
    }
}

/// Programs that were built with the header of 0.2.0 say the sizes of its structs: what they do not
/// have has its default, and is not written.
#[test]
fn the_sizes_of_older_versions_are_taken() {
    let model = Model::open(&tiny());
    let ids = [10_u32, 20, 30];
    let bias = [xserv_logit_bias { token_id: 7, bias: f32::NAN }];
    // Fields that such a program does not have are what happens to follow its struct.
    let request = xserv_request {
        struct_size: 176,
        logit_bias: bias.as_ptr(),
        num_logit_bias: 1,
        min_tokens: 99,
        num_log_probs: 99,
        ..greedy(&ids, 4)
    };
    let whole = model.generate(&greedy(&ids, 4)).unwrap();
    assert_eq!(model.generate(&request).unwrap().ids, whole.ids);
    let mut result = ptr::null_mut();
    check(unsafe { xserv_generate(model.0, &request, None, ptr::null_mut(), &mut result) })
        .unwrap();
    let mut info: xserv_result_info = unsafe { std::mem::zeroed() };
    info.struct_size = 112;
    info.num_top_log_probs = 77;
    check(unsafe { xserv_result_get_info(result, &mut info) }).unwrap();
    assert_eq!((info.num_tokens, info.num_top_log_probs), (whole.ids.len(), 77));
    xserv_result_free(result);

    let mut submission = ptr::null_mut();
    check(unsafe { xserv_submit(model.0, &request, ptr::null(), &mut submission) }).unwrap();
    let mut event: xserv_event = unsafe { std::mem::zeroed() };
    (event.struct_size, event.log_prob, event.num_top_log_probs) = (48, 5.0, 77);
    let mut found = Vec::new();
    while event.kind != xserv_event_kind::XSERV_EVENT_DONE as u32 {
        check(unsafe { xserv_next(submission, XSERV_WAIT_FOREVER, &mut event) }).unwrap();
        assert_eq!((event.struct_size, event.log_prob, event.num_top_log_probs), (48, 5.0, 77));
        if event.kind == xserv_event_kind::XSERV_EVENT_TOKEN as u32 {
            found.push(event.token_id);
        }
    }
    assert_eq!(found, whole.ids);
    xserv_submission_free(submission);

    for struct_size in (0..256).filter(|size| ![176, size_of::<xserv_request>()].contains(size)) {
        let request = xserv_request { struct_size, ..greedy(&ids, 4) };
        let failure = model.generate(&request).unwrap_err();
        assert_eq!(failure.status, xserv_status::XSERV_STATUS_INVALID_ARGUMENT, "{struct_size}");
    }
}

#[test]
fn reserved_fields_must_be_zero() {
    let model = Model::open(&tiny());
    let ids = [1_u32, 2];
    let bad = |status: xserv_status| {
        assert_eq!(status, xserv_status::XSERV_STATUS_INVALID_ARGUMENT);
        assert!(last_error().contains("reserved"), "{}", last_error());
    };
    unsafe {
        let request = xserv_request { reserved: [1], ..greedy(&ids, 1) };
        bad(xserv_generate(model.0, &request, None, ptr::null_mut(), ptr::null_mut()));
        let mut parse: xserv_parse_options = std::mem::zeroed();
        xserv_parse_options_init(&mut parse, size_of_val(&parse));
        parse.reserved = 1;
        let mut result = ptr::null_mut();
        bad(xserv_parse_response(model.0, c"a".as_ptr(), 1, &parse, &mut result));
        let mut tokenize: xserv_tokenize_options = std::mem::zeroed();
        xserv_tokenize_options_init(&mut tokenize, size_of_val(&tokenize));
        tokenize.reserved[5] = 1;
        let mut tokens = ptr::null_mut();
        bad(xserv_tokenize(model.0, c"a".as_ptr(), 1, &tokenize, &mut tokens));
        let mut chat: xserv_chat_options = std::mem::zeroed();
        xserv_chat_options_init(&mut chat, size_of_val(&chat));
        (chat.messages_json, chat.reserved[0]) = (c"[]".as_ptr(), 1);
        let mut text = ptr::null_mut();
        bad(xserv_apply_chat_template(model.0, &chat, &mut text));
        let rows = xserv_logits_options { reserved: 1, ..logits_options(0) };
        let mut logits = [0_f32; 8];
        bad(xserv_logits(model.0, ids.as_ptr(), 2, &rows, logits.as_mut_ptr(), 8));
    }
}

/// Runs a command and returns what it prints.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {} {errors}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Compiles a C program against the headers in a folder and the library of this test.
fn compile(dir: &TempDir, source: &Path, include: &Path, name: &str) -> PathBuf {
    let program = dir.path().join(name);
    let soname = dir.path().join(format!("libxserv.so.{XSERV_ABI_VERSION}"));
    if !soname.exists() {
        std::os::unix::fs::symlink(shared_object(), &soname).unwrap();
    }
    run(Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-fstack-protector-all", "-I"])
        .args([include, source, &soname])
        .arg(format!("-Wl,-rpath,{}", dir.path().display()))
        .arg("-o")
        .arg(&program));
    program
}

/// Returns the folders with the headers of all versions of this ABI.
fn kept_headers() -> Vec<PathBuf> {
    let folder = root().join("tests/abi/headers");
    let mut found: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    assert!(!found.is_empty(), "no headers in {}", folder.display());
    found
}

/// A header stays as it was released. Until then the copy follows the header of today.
#[test]
fn todays_headers_are_kept() {
    let version = env!("CARGO_PKG_VERSION");
    let folder = root().join("tests/abi/headers").join(version.trim_end_matches("-dev"));
    let is_blessed = std::env::var_os("XSERV_BLESS").is_some() && version.ends_with("-dev");
    for name in ["xserv.h", "xserv_ops.h"] {
        let today = std::fs::read_to_string(root().join("include").join(name)).unwrap();
        if is_blessed {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(name), &today).unwrap();
        }
        let kept = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        assert!(
            kept == today,
            "{} is not {name} of today: XSERV_BLESS=1 cargo test --test abi structs",
            folder.join(name).display()
        );
    }
}

#[test]
fn programs_built_with_kept_headers_run() {
    let source = root().join("tests/abi/headers/client.c");
    for include in kept_headers() {
        let dir = TempDir::new();
        let program = compile(&dir, &source, &include, "client");
        let said = run(Command::new(&program).arg(tiny()));
        assert!(said.ends_with("16 tokens\n"), "{}: {said}", include.display());
    }
}

/// Returns the structs of a header: each with its fields.
fn structs(header: &str) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for part in header.split("typedef struct ").skip(1) {
        let Some((name, rest)) = part.split_once(" {\n") else { continue };
        if name.contains(['*', ';', '\n']) {
            continue;
        }
        let body = rest.split("\n}").next().unwrap();
        let lines = body.lines().map(str::trim);
        let code = lines.filter(|line| line.ends_with(';') && !line.starts_with(['*', '/']));
        let field = |line: &str| {
            // A pointer to a function: void (*name)(...).
            if let Some((_, rest)) = line.split_once("(*") {
                return rest.split(')').next().unwrap().to_string();
            }
            let end = line.trim_end_matches(';').split('[').next().unwrap().to_string();
            end.rsplit([' ', '*']).next().unwrap().to_string()
        };
        found.push((name.to_string(), code.map(field).collect()));
    }
    found
}

/// Returns the layout of the fields of all structs: name -> (size, offset), as a C compiler has
/// them.
fn layout(include: &Path) -> BTreeMap<String, (usize, usize)> {
    let mut source =
        "#include <stddef.h>\n#include <stdio.h>\n#include <xserv.h>\nint main(void) {\n"
            .to_string();
    for name in ["xserv.h", "xserv_ops.h"] {
        let header = std::fs::read_to_string(include.join(name)).unwrap();
        for (name, fields) in structs(&header) {
            source += &format!("  printf(\"{name} %zu 0\\n\", sizeof({name}));\n");
            for field in fields {
                source += &format!(
                    "  printf(\"{name}.{field} %zu %zu\\n\", sizeof((({name} *)0)->{field}), \
                     offsetof({name}, {field}));\n"
                );
            }
        }
    }
    let dir = TempDir::new();
    let file = dir.path().join("layout.c");
    std::fs::write(&file, source + "}\n").unwrap();
    let said = run(&mut Command::new(compile(&dir, &file, include, "layout")));
    let lines = said.lines().map(|line| {
        let parts: Vec<&str> = line.split(' ').collect();
        (parts[0].to_string(), (parts[1].parse().unwrap(), parts[2].parse().unwrap()))
    });
    lines.collect()
}

#[test]
fn structs_only_grow_at_their_end() {
    let today = layout(&root().join("include"));
    assert!(today.len() > 150, "only {} fields", today.len());
    for include in kept_headers() {
        for (name, (size, offset)) in layout(&include) {
            let found = today.get(&name).copied();
            if let (None, Some((owner, "reserved"))) = (found, name.split_once('.')) {
                // All of its bytes may have got a meaning, which 0 leaves unused.
                let mut fields = today
                    .iter()
                    .filter(|(field, _)| field.split_once('.').is_some_and(|(of, _)| of == owner));
                assert!(fields.any(|(_, &place)| place == (size, offset)), "{name} is gone");
                continue;
            }
            let (size_now, offset_now) = found.unwrap_or_else(|| panic!("{name} is gone"));
            if name.contains(".reserved") {
                // Some of its bytes may have got a meaning, which 0 leaves unused.
                let (end, end_now) = (offset + size, offset_now + size_now);
                assert!(offset <= offset_now && end_now <= end, "{name} has moved");
                continue;
            }
            assert_eq!(offset, offset_now, "{name} of {} has moved", include.display());
            if name.contains('.') {
                assert_eq!(size, size_now, "{name} of {} has another size", include.display());
            } else {
                assert!(size <= size_now, "{name} of {} has shrunk", include.display());
            }
        }
    }
}
