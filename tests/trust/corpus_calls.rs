//! Bad arguments: every parameter of every exported function, as the headers declare it, with every
//! value of its kind that a careless or hostile caller may pass and the library can tell. And the
//! operators with sizes, strides and offsets that kernels tend to get wrong.

use std::collections::BTreeMap;
use std::ffi::{c_void, CString};

use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;
use crate::functions::{functions, Function, Parameter, HANDLES};
use crate::hostile_child::{run_group, Bench, Group};
use crate::world::*;

/// The groups of cases by name.
pub const GROUPS: &[Group] = &[
    ("handles", handles),
    ("pointers and numbers", pointers_and_numbers),
    ("texts at the end of a page", texts_at_the_end_of_a_page),
    ("tensors", tensors),
    ("overlaps", overlaps),
    ("sizes and strides", sizes_and_strides),
];

/// The required outcome of a call.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    /// A status that says what was wrong, or NULL; nothing is written.
    Refused,
    /// Success.
    Works,
    /// Either of them, in good form.
    Answered,
}

/// Makes a valid call with one change.
fn call_changed(
    world: &World,
    function: &Function,
    fate: Fate,
    change: impl FnOnce(&mut Arguments),
) -> Result<String, String> {
    let mut arguments = world.arguments(function);
    change(&mut arguments);
    let returned = call(function, &arguments);
    let said = last_error();
    let is_refused = match returned {
        Returned::Status(status) if status == XSERV_STATUS_OK as u32 => false,
        Returned::Status(status) => {
            let usual = [
                XSERV_STATUS_INVALID_ARGUMENT,
                XSERV_STATUS_BAD_HANDLE,
                XSERV_STATUS_NOT_FOUND,
                XSERV_STATUS_NO_DEVICE,
                XSERV_STATUS_CONTEXT_FULL,
                XSERV_STATUS_UNSUPPORTED,
                XSERV_STATUS_IO,
            ];
            if !usual.iter().any(|s| *s as u32 == status) {
                return Err(format!("status {status}: {said}"));
            }
            if said.is_empty() || said.len() > 1000 || said.contains(char::is_control) {
                return Err(format!("no sentence: {said:?}"));
            }
            true
        }
        Returned::Pointer(pointer) => pointer == 0,
        // Nothing can be told.
        Returned::Number(_) | Returned::Nothing => fate == Fate::Refused,
    };
    let outs = function.parameters.iter().enumerate().filter(|(_, p)| p.pointee(2).is_some());
    let outs: Vec<usize> = outs.map(|(i, _)| i).collect();
    if is_refused {
        for i in outs {
            // Out-pointers that the change made unusable are not looked at.
            let address = *arguments.word(i) as usize;
            if address > 4096 && address.is_multiple_of(8) && *arguments.pointed::<u64>(i) != 0 {
                return Err(format!("wrote {} and failed", function.parameters[i].name));
            }
        }
    } else {
        free_made(function, &mut arguments, returned);
    }
    match (fate, is_refused) {
        (Fate::Refused, false) => Err("was accepted".to_string()),
        (Fate::Works, true) => Err(format!("was refused: {said}")),
        (_, true) => Ok(said),
        (_, false) => Ok(String::new()),
    }
}

/// A case for one parameter of one function.
fn case(
    bench: &mut Bench,
    world: &World,
    function: &Function,
    parameter: usize,
    what: &str,
    fate: Fate,
    change: impl FnOnce(&mut Arguments) + Send,
) {
    let name = &function.parameters[parameter].name;
    let name = format!("{}: {name} is {what}", function.name);
    bench.case(name, |_| call_changed(world, function, fate, change));
}

/// That nothing was harmed.
fn all_works(bench: &mut Bench, world: &World) {
    bench.case("everything works afterwards", |_| {
        for function in functions() {
            let may_fail = ["xserv_cuda_device_get_info", "xserv_owned_tensor_new_pinned"];
            if function.frees().is_none() && !may_fail.contains(&function.name.as_str()) {
                call_changed(world, &function, Fate::Works, |_| ())
                    .map_err(|why| format!("{}: {why}", function.name))?;
            }
        }
        Ok(String::new())
    });
}

fn parameters(functions: &[Function]) -> impl Iterator<Item = (&Function, usize, &Parameter)> {
    functions
        .iter()
        .flat_map(|f| f.parameters.iter().enumerate().map(move |(i, parameter)| (f, i, parameter)))
}

fn handles(bench: &mut Bench) {
    let mut world = World::new();
    let mut freed = BTreeMap::new();
    for kind in HANDLES {
        let live = world.handle::<c_void>(kind);
        world.renew(kind);
        let other = world.handle::<c_void>(kind);
        free(kind, other.addr() as u64);
        freed.insert(kind, other.addr() as u64);
        world.set(kind, live);
    }
    let world = &world;
    let functions = functions();
    for (function, i, parameter) in parameters(&functions) {
        let Some(kind) = parameter.pointee(1).filter(|kind| HANDLES.contains(kind)) else {
            continue;
        };
        let live = world.handle::<c_void>(kind).addr() as u64;
        let mut values = vec![
            ("NULL".to_string(), 0),
            ("freed".to_string(), freed[kind]),
            ("all ones".to_string(), u64::MAX),
            ("an address".to_string(), &raw const values_are_forged as u64),
            ("of no kind".to_string(), live & 0x00ff_ffff_ffff_ffff),
            ("of a later generation".to_string(), live + (1 << 24)),
            ("of another slot".to_string(), live ^ 0xff_ffff),
            ("one".to_string(), 1),
        ];
        for other in HANDLES.iter().filter(|other| **other != kind) {
            let handle = world.handle::<c_void>(other).addr() as u64;
            values.push((format!("of {other}"), handle));
        }
        for (what, value) in values {
            case(bench, world, function, i, &what, Fate::Refused, |a| *a.word(i) = value);
        }
    }
    all_works(bench, world);
}

/// Something with an address.
#[allow(non_upper_case_globals)]
static values_are_forged: u64 = 7;

fn pointers_and_numbers(bench: &mut Bench) {
    use Fate::*;
    let world = &World::new();
    let functions = functions();
    // A stand-in for arguments that are to be ignored if they are zero.
    for (f, i, p) in parameters(&functions) {
        let init = f.name.ends_with("_init");
        let mut set = |what: &str, fate: Fate, value: u64| {
            case(bench, world, f, i, what, fate, |a| *a.word(i) = value);
        };
        if let Some(size) = p.pointee(1).and_then(size_of_struct) {
            let is_needed = !p.is_const || ["request", "plan"].contains(&p.name.as_str());
            let is_chat = p.pointee(1) == Some("xserv_chat_options");
            let null = match (init, is_needed || is_chat) {
                (true, _) => Refused,
                (_, true) => Refused,
                _ => Works,
            };
            set("NULL", null, 0);
            for by in [1, 2, 4] {
                case(bench, world, f, i, &format!("misaligned by {by}"), Refused, |a| {
                    *a.word(i) += by
                });
            }
            if !init {
                for wrong in [0, 1, 7, size - 1, size + 8, 1 << 40, usize::MAX] {
                    let what = format!("a struct of {wrong} bytes");
                    case(bench, world, f, i, &what, Refused, |a| *a.pointed(i) = wrong);
                }
            }
            continue;
        }
        match (p.kind.as_str(), p.name.as_str()) {
            ("char *", "path") => {
                set("NULL", Refused, 0);
                for text in [&b""[..], b"\xff", b"a\xc3", b"/nowhere", b"\x1b[2J", &[b'x'; 9000]] {
                    let text = CString::new(text).unwrap();
                    let what: String = format!("{text:?}").chars().take(20).collect();
                    case(bench, world, f, i, &what, Refused, move |a| {
                        *a.word(i) = text.as_ptr() as u64;
                        let _keep = Box::leak(Box::new(text));
                    });
                }
            }
            ("char *", name) => {
                let is_optional = ["tool_call_id", "name"].contains(&name);
                set("NULL", if is_optional { Works } else { Refused }, 0);
                set("not UTF-8", Refused, c"a\xff\xfe\x80".as_ptr() as u64);
            }
            (
                "char **" | "uint8_t *" | "uint32_t *" | "xserv_tensor *" | "xserv_token_score *",
                name,
            ) if !p.is_const || name == "text" => {
                set("NULL", Refused, 0);
                if p.kind != "uint8_t *" {
                    case(bench, world, f, i, "misaligned", Refused, |a| *a.word(i) += 1);
                }
            }
            (kind, _) if kind.ends_with("**") => {
                let is_optional = f.name == "xserv_generate";
                set("NULL", if is_optional { Works } else { Refused }, 0);
                for by in [1, 2, 4] {
                    case(bench, world, f, i, &format!("misaligned by {by}"), Refused, |a| {
                        *a.word(i) += by
                    });
                }
            }
            ("size_t *", _) => set("NULL", Works, 0),
            ("uint32_t *" | "float *" | "int64_t *", _) => {
                set("NULL", Refused, 0);
                for by in [1, 2] {
                    case(bench, world, f, i, &format!("misaligned by {by}"), Refused, |a| {
                        *a.word(i) += by
                    });
                }
            }
            ("size_t", "struct_size") => {
                for size in [0, 1, 7, 8] {
                    set(&size.to_string(), Answered, size);
                }
            }
            ("size_t", "text_len") => {
                set("0", Works, 0);
                set("up to the NUL", Works, u64::MAX);
                for size in [u64::MAX - 1, 1 << 63] {
                    set(&size.to_string(), Refused, size);
                }
            }
            ("size_t", "sample") => {
                for sample in [1, 2, 1 << 32, u64::MAX] {
                    set(&sample.to_string(), Refused, sample);
                }
            }
            ("size_t", name) => {
                for size in [u64::MAX, u64::MAX / 2, u64::MAX / 4, 1 << 62, (1 << 61) + 1] {
                    set(&size.to_string(), Refused, size);
                }
                if name == "num_logits" {
                    for size in [0, 1, 2047, 2049, 4096] {
                        set(&size.to_string(), Refused, size);
                    }
                }
                if ["num_given", "num_scores"].contains(&name) {
                    for size in [2, 5, 1 << 32] {
                        set(&size.to_string(), Refused, size);
                    }
                }
                let evaluates = ["xserv_logits", "xserv_score"].contains(&f.name.as_str());
                let empty = if evaluates { Refused } else { Answered };
                set("0", empty, 0);
            }
            ("uint32_t", name) => {
                let fate = match (name, f.name.as_str()) {
                    ("timeout_ms", _) => continue,
                    (_, "xserv_tensor_dtype_of" | "xserv_tensor_device_of") => Answered,
                    (_, "xserv_status_name" | "xserv_finish_reason_name") => Answered,
                    // Groups that are larger than a row are the row.
                    ("group_size", _) => Answered,
                    _ => Refused,
                };
                let first = match name {
                    "dtype" => 6,
                    "ndim" => 9,
                    "token_id" => 2048,
                    "device_index" => 99,
                    _ => 2,
                };
                for value in [first, first + 1, 1000 + first, 1 << 31, u32::MAX as u64] {
                    set(&value.to_string(), fate, value);
                }
            }
            ("bool", _) => set("1", Works, 1),
            ("float", _) => {
                let at = f.parameters[..i].iter().filter(|p| p.is_float()).count();
                for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, f32::MAX] {
                    let is_eps = p.name == "eps" && !(0.0..f32::INFINITY).contains(&value);
                    let fate = if is_eps { Refused } else { Answered };
                    let what = format!("{value:e}");
                    case(bench, world, f, i, &what, fate, |a| a.floats[at] = value);
                }
            }
            _ => {}
        }
    }
    all_works(bench, world);
}

/// A text whose last byte is the last of a page that nothing follows.
struct AtPageEnd {
    pages: *mut c_void,
    text: *const u8,
}

const PAGE: usize = 4096;

impl AtPageEnd {
    fn new(text: &[u8]) -> AtPageEnd {
        assert!(text.len() <= PAGE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let both = libc::PROT_READ | libc::PROT_WRITE;
        let pages = unsafe { libc::mmap(std::ptr::null_mut(), 2 * PAGE, both, flags, -1, 0) };
        assert_ne!(pages, libc::MAP_FAILED);
        let start = unsafe { (pages as *mut u8).add(PAGE - text.len()) };
        unsafe { start.copy_from_nonoverlapping(text.as_ptr(), text.len()) };
        let guard = unsafe { pages.byte_add(PAGE) };
        assert_eq!(unsafe { libc::mprotect(guard, PAGE, libc::PROT_NONE) }, 0);
        AtPageEnd { pages, text: start }
    }
}

impl Drop for AtPageEnd {
    fn drop(&mut self) {
        unsafe { libc::munmap(self.pages, 2 * PAGE) };
    }
}

/// Nothing is read beyond a length, or beyond a NUL.
fn texts_at_the_end_of_a_page(bench: &mut Bench) {
    let world = &World::new();
    let functions = functions();
    let tokenize = functions.iter().find(|f| f.name == "xserv_tokenize").unwrap();
    let texts: [&[u8]; 8] = [
        b"a",
        b"Once upon",
        b"\xe6\x97\xa5",
        b"<|im_end|>",
        b"<|im_e",
        b"'re",
        b"\r\n",
        &[b'x'; PAGE],
    ];
    for text in texts {
        let what: String = text.escape_ascii().to_string().chars().take(20).collect();
        bench.case(format!("{} bytes without a NUL: {what}", text.len()), |_| {
            let page = AtPageEnd::new(text);
            call_changed(world, tokenize, Fate::Works, |a| {
                *a.word(1) = page.text as u64;
                *a.word(2) = text.len() as u64;
            })
        });
        if text.len() < PAGE {
            bench.case(format!("{} bytes and a NUL: {what}", text.len()), |_| {
                let page = AtPageEnd::new(&[text, b"\0"].concat());
                call_changed(world, tokenize, Fate::Works, |a| {
                    *a.word(1) = page.text as u64;
                    *a.word(2) = u64::MAX;
                })
            });
        }
    }
    for text in [&b"\xe6\x97"[..], b"a\xf0\x9f", b"\xff"] {
        bench.case(format!("no text: {}", text.escape_ascii()), |_| {
            let page = AtPageEnd::new(text);
            call_changed(world, tokenize, Fate::Refused, |a| {
                *a.word(1) = page.text as u64;
                *a.word(2) = text.len() as u64;
            })
        });
    }
    // A path, messages, ids and a struct that end with their page.
    bench.case("a path", |_| {
        let inspect = functions.iter().find(|f| f.name == "xserv_inspect").unwrap();
        let path = c_string(tiny().to_str().unwrap());
        let page = AtPageEnd::new(path.as_bytes_with_nul());
        call_changed(world, inspect, Fate::Works, |a| *a.word(0) = page.text as u64)
    });
    bench.case("messages", |_| {
        let chat = functions.iter().find(|f| f.name == "xserv_apply_chat_template").unwrap();
        let messages = c_string(crate::hostile_child::MESSAGES);
        let page = AtPageEnd::new(messages.as_bytes_with_nul());
        call_changed(world, chat, Fate::Works, |a| {
            a.pointed::<xserv_chat_options>(1).messages_json = page.text.cast();
        })
    });
    bench.case("ids", |_| {
        let detokenize = functions.iter().find(|f| f.name == "xserv_detokenize").unwrap();
        let ids: Vec<u8> = IDS.iter().flat_map(|id| id.to_le_bytes()).collect();
        let page = AtPageEnd::new(&ids);
        call_changed(world, detokenize, Fate::Works, |a| *a.word(1) = page.text as u64)
    });
    bench.case("a request", |_| {
        let generate = functions.iter().find(|f| f.name == "xserv_generate").unwrap();
        let request = greedy(&IDS, 2);
        let size = size_of::<xserv_request>();
        let bytes = unsafe { std::slice::from_raw_parts((&raw const request).cast(), size) };
        let page = AtPageEnd::new(bytes);
        call_changed(world, generate, Fate::Works, |a| *a.word(1) = page.text as u64)
    });
}

fn is_tensor(p: &Parameter) -> bool {
    p.kind == "xserv_tensor *" && p.is_const
}

fn tensors(bench: &mut Bench) {
    use Fate::*;
    static HUGE: [i64; 8] = [i64::MAX; 8];
    static WIDE: [i64; 8] = [1 << 31; 8];
    static NEGATIVE: [i64; 8] = [-1; 8];
    let world = &World::new();
    let functions = functions();
    type Change = fn(&mut xserv_tensor);
    let changes: [(&str, Change); 22] = [
        ("of -1 dimensions", |t| t.ndim = -1),
        ("of 9 dimensions", |t| t.ndim = 9),
        ("of very many dimensions", |t| t.ndim = i32::MAX),
        ("of an unknown type", |t| t.dtype.code = 3),
        ("of type 255", |t| t.dtype.code = 255),
        ("of 7 bits", |t| t.dtype.bits = 7),
        ("of no bits", |t| t.dtype.bits = 0),
        ("of 8 bits", |t| t.dtype.bits = 8),
        ("of f64", |t| t.dtype.bits = 64 + u8::from(t.dtype.code == 0)),
        ("of two lanes", |t| t.dtype.lanes = 2),
        ("of no lanes", |t| t.dtype.lanes = 0),
        ("without memory", |t| t.data = std::ptr::null_mut()),
        ("misaligned", |t| t.data = unsafe { t.data.byte_add(1) }),
        ("misaligned by its offset", |t| t.byte_offset = 2),
        ("beyond the address space", |t| t.byte_offset = u64::MAX - 7),
        ("without sizes", |t| t.shape = std::ptr::null_mut()),
        ("of negative size", |t| t.shape = NEGATIVE.as_ptr().cast_mut()),
        ("of more than all memory", |t| t.shape = HUGE.as_ptr().cast_mut()),
        ("of sizes that overflow", |t| (t.shape, t.ndim) = (WIDE.as_ptr().cast_mut(), 4)),
        ("of strides that overflow", |t| t.strides = HUGE.as_ptr().cast_mut()),
        ("on a GPU that is not there", |t| t.device.device_type = 2),
        ("on no known device", |t| t.device.device_type = 99),
    ];
    for (f, i, p) in parameters(&functions) {
        if !is_tensor(p) {
            continue;
        }
        // A bias and one of two gradients may be left out, and zeros that are read.
        let is_optional = ["bias", "da", "db"].contains(&p.name.as_str())
            || (p.name == "zeros" && f.name != "xserv_op_quantise");
        let null = if is_optional { Works } else { Refused };
        case(bench, world, f, i, "NULL", null, |a| *a.word(i) = 0);
        case(bench, world, f, i, "a misaligned descriptor", Refused, |a| *a.word(i) += 1);
        for (what, change) in changes {
            case(bench, world, f, i, what, Refused, |a| change(a.pointed(i)));
        }
    }
    all_works(bench, world);
}

fn is_result(name: &str) -> bool {
    let names = ["out", "residual_out", "q_out", "k_out", "values", "indices", "c", "da", "db"];
    names.contains(&name) || name == "target"
}

/// Results that overlap what is read, by half, are refused.
fn overlaps(bench: &mut Bench) {
    let world = &mut World::new();
    world.sizes = Sizes { rows: 8, width: 8 };
    let world = &*world;
    let functions = functions();
    for (f, i, p) in parameters(&functions) {
        if !is_tensor(p) || !f.name.starts_with("xserv_op_") {
            continue;
        }
        let own: &[&str] = match f.name.as_str() {
            "xserv_op_rope_table" => &["cos", "sin"],
            "xserv_op_quantise" => &["codes", "scales", "zeros"],
            _ => &[],
        };
        if !is_result(&p.name) && !own.contains(&p.name.as_str()) {
            continue;
        }
        for (j, other) in f.parameters.iter().enumerate() {
            if j == i || !is_tensor(other) {
                continue;
            }
            let what = format!("half of {}", other.name);
            case(bench, world, f, i, &what, Fate::Refused, |a| {
                let shared = a.pointed::<xserv_tensor>(j).data;
                // An element further, so that it is not the same view.
                a.pointed::<xserv_tensor>(i).data = unsafe { shared.byte_add(4) };
            });
        }
    }
}

/// Returns the results of an operator: the elements of all tensors after the call.
fn results(world: &World, function: &Function) -> Result<Option<Vec<Vec<u32>>>, String> {
    let mut arguments = world.arguments(function);
    let returned = call(function, &arguments);
    match returned {
        Returned::Status(status) if status == XSERV_STATUS_OK as u32 => {}
        Returned::Status(status) if status == XSERV_STATUS_INVALID_ARGUMENT as u32 => {
            return Ok(None)
        }
        other => return Err(format!("{other:?}: {}", last_error())),
    }
    let tensors = function.parameters.iter().enumerate().filter(|(_, p)| is_tensor(p));
    let tensors: Vec<usize> = tensors.map(|(i, _)| i).collect();
    Ok(Some(tensors.into_iter().map(|i| elements(arguments.pointed(i))).collect()))
}

/// Every operator with sizes of nothing, of one and of primes, and the same numbers spread out in
/// memory between NaN or shifted: the results are the same to the last bit.
fn sizes_and_strides(bench: &mut Bench) {
    let functions = functions();
    let context = Context::new(2);
    let shared = context.0.addr();
    for function in functions.iter().filter(|f| f.name.starts_with("xserv_op_")) {
        for (rows, width) in [
            (0, 4),
            (3, 0),
            (0, 0),
            (1, 1),
            (1, 2),
            (2, 1),
            (1, 7),
            (7, 1),
            (5, 13),
            (13, 5),
            (3, 31),
            (31, 3),
            (2, 61),
            (61, 17),
            (17, 127),
        ] {
            bench.case(format!("{}: {rows} rows of {width}", function.name), |_| {
                let mut world = World::empty();
                let context: *mut c_void = std::ptr::without_provenance_mut(shared);
                world.set("xserv_context", context);
                world.sizes = Sizes { rows, width };
                let dense = results(&world, function);
                let mut answers = Vec::new();
                for lay in [Lay::Spread, Lay::Shifted] {
                    world.lay = lay;
                    answers.push((lay, results(&world, function)));
                }
                world.forget();
                let dense = dense?;
                let Some(dense) = dense else {
                    return match rows == 0 || width == 0 {
                        true => Ok(last_error()),
                        false => Err(format!("was refused: {}", last_error())),
                    };
                };
                for (lay, answer) in answers {
                    if answer?.as_ref() != Some(&dense) {
                        return Err(format!("differs where the tensors are {lay:?}"));
                    }
                }
                Ok(String::new())
            });
        }
    }
}

#[test]
fn arguments_are_checked() {
    run_group("handles");
    run_group("pointers and numbers");
    run_group("texts at the end of a page");
}

#[test]
fn tensors_are_checked() {
    run_group("tensors");
    run_group("overlaps");
}

#[test]
fn operators_do_not_depend_on_how_tensors_lie_in_memory() {
    run_group("sizes and strides");
}
