//! One valid call of every function, made from its declaration: a world of live handles and the
//! arguments that each function takes of it. Tests change an argument, or when and where the call is
//! made.

use std::collections::BTreeMap;
use std::ffi::{c_void, CString};
use std::ptr;

use xserv::ffi::xserv_status::XSERV_STATUS_OK;
use xserv::ffi::*;

use crate::client::*;
use crate::functions::{Function, Parameter, HANDLES};

/// The prompt of all requests here.
pub static IDS: [u32; 4] = [10, 20, 30, 40];
/// A path, text and messages that are valid.
const TEXT: &std::ffi::CStr = c"Once";
const MESSAGE: &std::ffi::CStr = c"{\"role\": \"user\", \"content\": \"Once\"}";
static SHAPE: [i64; 2] = [4, 4];
/// Largest alignment of what a parameter points to.
const WORD: usize = 8;

macro_rules! sizes {
    ($($name:ident)*) => {
        /// Returns the size of a struct that begins with its size.
        pub fn size_of_struct(name: &str) -> Option<usize> {
            match name {
                $(stringify!($name) => Some(size_of::<$name>()),)*
                _ => None,
            }
        }
    };
}

sizes! {
    xserv_load_options xserv_model_info xserv_inspection_info xserv_memory_plan
    xserv_tokenize_options xserv_chat_options xserv_request xserv_result_info xserv_submit_options
    xserv_event xserv_parse_options xserv_logits_options xserv_score_options xserv_model_stats xserv_device_info
    xserv_context_options xserv_memory_stats xserv_gemm_options xserv_grad_check_options xserv_grad_check_result
    xserv_attention_options
}

/// The arguments of a call, and the memory that they point to.
pub struct Arguments {
    /// One for each parameter that is no float, in order.
    pub words: Vec<u64>,
    pub floats: Vec<f32>,
    /// The place of each parameter's value: its index among the words, or None for floats.
    places: Vec<Option<usize>>,
    memory: Vec<Box<[u64]>>,
    strings: Vec<CString>,
}

// SAFETY: the memory that the arguments point to is their own.
unsafe impl Send for Arguments {}

impl Arguments {
    fn allocate(&mut self, bytes: usize) -> *mut u8 {
        self.memory.push(vec![0; bytes.div_ceil(WORD).max(1)].into_boxed_slice());
        self.memory.last_mut().unwrap().as_mut_ptr().cast()
    }

    fn store<T: Copy>(&mut self, value: T) -> *mut T {
        const { assert!(align_of::<T>() <= WORD) };
        let place = self.allocate(size_of::<T>()) as *mut T;
        unsafe { place.write(value) };
        place
    }

    /// Returns the value of a parameter, which is no float.
    pub fn word(&mut self, parameter: usize) -> &mut u64 {
        let place = self.places[parameter].expect("a float");
        &mut self.words[place]
    }

    /// Returns the object that the parameter points to.
    pub fn pointed<T>(&mut self, parameter: usize) -> &mut T {
        let address = *self.word(parameter) as usize as *mut T;
        unsafe { &mut *address }
    }
}

/// The value that a call returned, cut to the width of its type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Returned {
    Status(u32),
    Pointer(u64),
    Number(u64),
    Nothing,
}

impl Returned {
    pub fn is_ok(self) -> bool {
        self == Returned::Status(XSERV_STATUS_OK as u32)
    }
}

/// Calls a function as C does.
pub fn call(function: &Function, arguments: &Arguments) -> Returned {
    assert!(arguments.words.len() <= 10 && arguments.floats.len() <= 2);
    let word = |i: usize| arguments.words.get(i).copied().unwrap_or_default();
    let float = |i: usize| arguments.floats.get(i).copied().unwrap_or_default();
    // Arguments that are no floats go into registers, then onto the stack, in order; floats into
    // registers of their own. What a function does not take is not looked at.
    type Any =
        unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, f32, f32) -> u64;
    let any: Any = unsafe { std::mem::transmute(function.address) };
    let value = unsafe {
        any(
            word(0),
            word(1),
            word(2),
            word(3),
            word(4),
            word(5),
            word(6),
            word(7),
            word(8),
            word(9),
            float(0),
            float(1),
        )
    };
    match function.result.as_str() {
        "xserv_status" => Returned::Status(value as u32),
        "void" => Returned::Nothing,
        "uint32_t" | "xserv_tensor_dtype" => Returned::Number(u64::from(value as u32)),
        "xserv_tensor_device" | "size_t" => Returned::Number(value),
        kind if kind.ends_with('*') => Returned::Pointer(value),
        other => panic!("{}: a result of type {other}", function.name),
    }
}

pub unsafe extern "C" fn go_on(_: *const xserv_token_event, _: *mut c_void) -> bool {
    true
}

unsafe extern "C" fn go_on_testing(_: *const xserv_self_test_line, _: *mut c_void) -> bool {
    true
}

unsafe extern "C" fn loss(
    values: *const f32,
    count: usize,
    loss: *mut f64,
    _: *mut c_void,
) -> bool {
    let values = unsafe { std::slice::from_raw_parts(values, count) };
    unsafe { *loss = values.iter().map(|v| f64::from(*v)).sum() };
    true
}

/// The sizes of the tensors of an operator's call: rows, and what a row holds.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub rows: i64,
    pub width: i64,
}

/// The sizes of the calls that are made where sizes do not matter.
const SIZES: Sizes = Sizes { rows: 3, width: 4 };

/// Returns the shape of a tensor, and whether it holds indices.
fn tensor_shape(function: &str, name: &str, Sizes { rows, width }: Sizes) -> (Vec<i64>, bool) {
    match (function, name) {
        ("xserv_op_embedding", "ids") => (vec![rows], true),
        ("xserv_op_embedding", "table") => (vec![8, width], false),
        ("xserv_op_rope_table", "inv_freq") => (vec![width], false),
        ("xserv_op_rope", "positions") => (vec![rows], true),
        ("xserv_op_rope", "cos" | "sin") => (vec![rows.max(1), width], false),
        ("xserv_op_rope", _) => (vec![rows, 2, 2 * width], false),
        ("xserv_op_argmax", "out") => (vec![rows], true),
        ("xserv_op_top_k", "values") => (vec![rows, width.min(2)], false),
        ("xserv_op_top_k", "indices") => (vec![rows, width.min(2)], true),
        ("xserv_op_attention", _) => (vec![1, 2, rows, width], false),
        ("xserv_op_transpose", "out") => (vec![width, rows], false),
        ("xserv_op_gemm" | "xserv_op_gemm_backward", "b" | "db") => (vec![width, 5], false),
        ("xserv_op_gemm", "c") | ("xserv_op_gemm_backward", "dc") => (vec![rows, 5], false),
        // Codes of 4 bits, of which all of a row share a scale.
        ("xserv_op_quantise", "x") | ("xserv_op_dequantise", "out") => {
            (vec![rows, 8 * width], false)
        }
        ("xserv_op_quantise" | "xserv_op_dequantise", "scales") => {
            (vec![rows, width.min(1)], false)
        }
        ("xserv_op_quantise" | "xserv_op_dequantise", "zeros") => (vec![rows, width.min(1)], true),
        ("xserv_op_quantise" | "xserv_op_dequantise", "codes") => (vec![rows, width], true),
        ("xserv_op_linear_quantised", "x") => (vec![rows, 8 * width], false),
        ("xserv_op_linear_quantised", "scales") => (vec![5, width.min(1)], false),
        ("xserv_op_linear_quantised", "zeros") => (vec![5, width.min(1)], true),
        ("xserv_op_linear_quantised", "codes") => (vec![5, width], true),
        ("xserv_op_linear_quantised", "bias") => (vec![5], false),
        ("xserv_op_linear_quantised", "out") => (vec![rows, 5], false),
        (_, "weight" | "bias") => (vec![width], false),
        _ => (vec![rows, width], false),
    }
}

/// Live handles of every kind.
pub struct World {
    handles: BTreeMap<&'static str, usize>,
    path: CString,
    /// The timeout of calls that have one, in milliseconds.
    pub timeout_ms: u32,
    vocab_size: usize,
    /// The tensors of operators.
    pub sizes: Sizes,
    pub lay: Lay,
}

/// Returns a model that is loaded fast.
pub fn quick_options() -> xserv_load_options {
    xserv_load_options {
        num_threads: 1,
        kv_cache_tokens: 512,
        max_context_tokens: 128,
        ..load_options()
    }
}

impl World {
    pub fn new() -> World {
        let mut world = World::empty();
        for kind in HANDLES {
            world.renew(kind);
        }
        world
    }

    /// Without a handle yet.
    pub fn empty() -> World {
        World {
            handles: BTreeMap::new(),
            path: c_string(tiny().to_str().unwrap()),
            timeout_ms: 0,
            vocab_size: 2048,
            sizes: SIZES,
            lay: Lay::Dense,
        }
    }

    pub fn handle<T>(&self, kind: &str) -> *mut T {
        ptr::without_provenance_mut(self.handles.get(kind).copied().unwrap_or_default())
    }

    pub fn set<T>(&mut self, kind: &'static str, handle: *mut T) {
        self.handles.insert(kind, handle.addr());
    }

    /// Leaves the handles to others.
    pub fn forget(&mut self) {
        self.handles.clear();
    }

    pub fn model(&self) -> *mut xserv_model {
        self.handle("xserv_model")
    }

    /// Makes a handle of this kind; the one that was there is not freed.
    pub fn renew(&mut self, kind: &'static str) {
        let model = self.model();
        let none = ptr::null_mut();
        macro_rules! made {
            ($call:expr) => {{
                let mut out = ptr::null_mut();
                #[allow(clippy::redundant_closure_call)]
                check(unsafe { $call(&mut out) }).unwrap();
                self.set(kind, out);
            }};
        }
        match kind {
            "xserv_model" => made!(|out| xserv_load(self.path.as_ptr(), &quick_options(), out)),
            "xserv_inspection" => made!(|out| xserv_inspect(self.path.as_ptr(), out)),
            "xserv_detokenizer" => made!(|out| xserv_detokenizer_new(model, true, out)),
            "xserv_text" => made!(|out| xserv_detokenize(model, IDS.as_ptr(), 4, true, out)),
            "xserv_tokens" => {
                made!(|out| xserv_tokenize(model, TEXT.as_ptr(), 4, ptr::null(), out))
            }
            "xserv_messages" => {
                made!(|out| xserv_messages_new(out));
                let message = (TEXT.as_ptr(), TEXT.as_ptr());
                let messages = self.handle(kind);
                check(unsafe { xserv_messages_add(messages, message.0, message.1) }).unwrap();
            }
            "xserv_cancel_token" => made!(|out| xserv_cancel_token_new(out)),
            "xserv_result" => {
                let request = greedy(&IDS, 2);
                made!(|out| xserv_generate(model, &request, None, none, out))
            }
            "xserv_submission" => {
                let request = greedy(&IDS, 2);
                made!(|out| xserv_submit(model, &request, ptr::null(), out));
                drain(self.handle(kind));
            }
            "xserv_context" => self.set(kind, std::mem::ManuallyDrop::new(Context::new(1)).0),
            "xserv_owned_tensor" => {
                let context = self.handle("xserv_context");
                made!(|out| xserv_owned_tensor_new(context, 1, 2, SHAPE.as_ptr(), out))
            }
            _ => panic!("{kind}"),
        }
    }

    /// Returns the arguments of a valid call.
    pub fn arguments(&self, function: &Function) -> Arguments {
        let mut arguments = Arguments {
            words: Vec::new(),
            floats: Vec::new(),
            places: Vec::new(),
            memory: Vec::new(),
            strings: Vec::new(),
        };
        for parameter in &function.parameters {
            if parameter.is_float() {
                arguments.places.push(None);
                arguments.floats.push(1.0);
                continue;
            }
            let word = self.word(function, parameter, &mut arguments);
            arguments.places.push(Some(arguments.words.len()));
            arguments.words.push(word);
        }
        arguments
    }

    fn word(&self, function: &Function, p: &Parameter, memory: &mut Arguments) -> u64 {
        if let Some(kind) = p.pointee(1).filter(|kind| HANDLES.contains(kind)) {
            return self.handles.get(kind).copied().unwrap_or_default() as u64;
        }
        if let Some(name) = p.pointee(1) {
            if let Some(size) = size_of_struct(name) {
                return self.options(name, size, memory) as u64;
            }
        }
        let place = match (p.kind.as_str(), p.name.as_str()) {
            ("char *", "path") => self.path.as_ptr() as *mut u8,
            ("char *", "json") => MESSAGE.as_ptr() as *mut u8,
            ("char *", "text" | "role" | "content" | "tool_call_id" | "name") => {
                TEXT.as_ptr() as *mut u8
            }
            ("uint32_t *", "token_ids") => IDS.as_ptr() as *mut u8,
            ("int64_t *", "shape") => SHAPE.as_ptr() as *mut u8,
            ("float *", "logits") => memory.allocate(self.vocab_size * 4),
            ("xserv_token_score *", _) => memory.allocate(3 * size_of::<xserv_token_score>()),
            ("float *", "values") => memory.store([1f32; 4]).cast(),
            ("float *", "gradient") => memory.store([1f32; 4]).cast(),
            ("xserv_tensor *", "view") => memory.allocate(size_of::<xserv_tensor>()),
            ("xserv_tensor *", name) => {
                let (name_of, sizes) = (function.name.as_str(), self.sizes);
                tensor_of(name_of, name, sizes, self.lay, memory).cast()
            }
            ("void *", _) => ptr::null_mut(),
            ("xserv_token_callback", _) => go_on as *const () as *mut u8,
            ("xserv_loss_callback", _) => loss as *const () as *mut u8,
            ("xserv_self_test_callback", _) => go_on_testing as *const () as *mut u8,
            ("size_t", "struct_size") => {
                let name = function.parameters[0].pointee(1).unwrap();
                return size_of_struct(name).unwrap() as u64;
            }
            ("size_t", "num_logits") => return self.vocab_size as u64,
            ("size_t", "num_given") => return 1,
            ("size_t", "num_scores") => return 3,
            ("size_t", "sample" | "index") => return 0,
            ("size_t", _) => return 4,
            ("uint32_t", "timeout_ms") => return u64::from(self.timeout_ms),
            ("uint32_t", "dtype") => return 1,
            ("uint32_t", "ndim") => return 2,
            ("uint32_t", "token_id") => return 5,
            ("uint32_t", _) => return 0,
            ("uint64_t", "flags") => return XSERV_DLPACK_READ_ONLY,
            ("bool", _) => return 1,
            // An output of the call.
            (kind, _) if kind.ends_with('*') => memory.allocate(WORD),
            (kind, name) => panic!("{}: {kind} {name}", function.name),
        };
        place as u64
    }

    /// Returns a struct that begins with its size, as a careful caller fills it.
    fn options(&self, name: &str, size: usize, memory: &mut Arguments) -> *mut u8 {
        macro_rules! defaults {
            ($init:ident) => {{
                let mut options = unsafe { std::mem::zeroed() };
                unsafe { $init(&mut options, size_of_val(&options)) };
                options
            }};
        }
        match name {
            "xserv_load_options" => memory.store(quick_options()).cast(),
            "xserv_tokenize_options" => memory.store(defaults!(xserv_tokenize_options_init)).cast(),
            "xserv_request" => memory.store(greedy(&IDS, 2)).cast(),
            "xserv_logits_options" => memory.store(logits_options(0)).cast(),
            "xserv_score_options" => memory.store(defaults!(xserv_score_options_init)).cast(),
            "xserv_submit_options" => memory.store(defaults!(xserv_submit_options_init)).cast(),
            "xserv_parse_options" => memory.store(defaults!(xserv_parse_options_init)).cast(),
            "xserv_gemm_options" => memory.store(defaults!(xserv_gemm_options_init)).cast(),
            "xserv_grad_check_options" => {
                memory.store(defaults!(xserv_grad_check_options_init)).cast()
            }
            "xserv_attention_options" => {
                memory.store(defaults!(xserv_attention_options_init)).cast()
            }
            "xserv_chat_options" => {
                let mut options: xserv_chat_options = defaults!(xserv_chat_options_init);
                memory.strings.push(c_string(crate::hostile_child::MESSAGES));
                options.messages_json = memory.strings.last().unwrap().as_ptr();
                memory.store(options).cast()
            }
            "xserv_context_options" => {
                let mut options: xserv_context_options = defaults!(xserv_context_options_init);
                options.device_kind = xserv_device_kind::XSERV_DEVICE_CPU as u32;
                options.num_threads = 1;
                memory.store(options).cast()
            }
            // Filled by the library.
            _ => {
                let place = memory.allocate(size);
                unsafe { (place as *mut usize).write(size) };
                place
            }
        }
    }
}

/// The layout of a tensor in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lay {
    Dense,
    /// Every second element of each row, with NaN or indices out of range between.
    Spread,
    /// Dense, but for two elements before the first, which byte_offset skips.
    Shifted,
}

/// Returns the descriptor of a tensor of small numbers.
fn tensor_of(
    function: &str,
    name: &str,
    sizes: Sizes,
    lay: Lay,
    memory: &mut Arguments,
) -> *mut xserv_tensor {
    let (shape, is_index) = tensor_shape(function, name, sizes);
    let step = if lay == Lay::Spread { 2 } else { 1 };
    let before = if lay == Lay::Shifted { 2 } else { 0 };
    let count = shape.iter().product::<i64>() as usize;
    let total = before + count * step;
    let data = memory.allocate(total.max(1) * 4);
    for i in 0..total {
        let is_element = i >= before && (i - before).is_multiple_of(step);
        let element = i.saturating_sub(before) / step;
        // Small numbers of both signs without a pattern of the row's length.
        let value = ((element * 37) % 23) as f32 * 0.25 - 2.5;
        let bits = match (is_index, is_element) {
            (false, true) => value.to_bits(),
            (false, false) => f32::NAN.to_bits(),
            (true, true) => 0,
            (true, false) => 0x7fff_ffff,
        };
        unsafe { (data as *mut u32).add(i).write(bits) };
    }
    let mut strides = vec![step as i64; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1);
    }
    let mut keep = |numbers: &[i64]| {
        let place = memory.allocate(numbers.len() * 8) as *mut i64;
        unsafe { place.copy_from_nonoverlapping(numbers.as_ptr(), numbers.len()) };
        place
    };
    let strides = if lay == Lay::Spread { keep(&strides) } else { ptr::null_mut() };
    let ndim = shape.len() as i32;
    let shape = keep(&shape);
    memory.store(xserv_tensor {
        data: data.cast(),
        device: xserv_tensor_device { device_type: 1, device_id: 0 },
        ndim,
        dtype: xserv_tensor_dtype { code: if is_index { 0 } else { 2 }, bits: 32, lanes: 1 },
        shape,
        strides,
        byte_offset: before as u64 * 4,
    })
}

/// Returns the bits of a tensor's elements, in order, whatever its strides.
pub fn elements(tensor: &xserv_tensor) -> Vec<u32> {
    let shape = unsafe { std::slice::from_raw_parts(tensor.shape, tensor.ndim as usize) };
    let count = shape.iter().product::<i64>() as usize;
    // The strides of `tensor_of` are those of a dense tensor, times a step.
    let step = match tensor.strides.is_null() {
        true => 1,
        false => unsafe { *tensor.strides.add(shape.len() - 1) as usize },
    };
    let first = unsafe { tensor.data.byte_add(tensor.byte_offset as usize) } as *const u32;
    (0..count).map(|i| unsafe { first.add(i * step).read() }).collect()
}

/// Takes the events of a submission to their end.
pub fn drain(submission: *mut xserv_submission) {
    let mut event: xserv_event = unsafe { std::mem::zeroed() };
    event.struct_size = size_of::<xserv_event>();
    while event.kind != xserv_event_kind::XSERV_EVENT_DONE as u32 {
        let wait = crate::scale::PATIENCE.as_millis() as u32;
        check(unsafe { xserv_next(submission, wait, &mut event) }).unwrap();
        assert_ne!(event.kind, xserv_event_kind::XSERV_EVENT_NONE as u32, "no event came");
    }
}

/// Frees a handle of this kind.
pub fn free(kind: &str, handle: u64) {
    let handle = handle as usize;
    macro_rules! end {
        ($free:ident) => {
            $free(ptr::without_provenance_mut(handle))
        };
    }
    match kind {
        "xserv_model" => end!(xserv_model_free),
        "xserv_inspection" => end!(xserv_inspection_free),
        "xserv_detokenizer" => end!(xserv_detokenizer_free),
        "xserv_text" => end!(xserv_text_free),
        "xserv_tokens" => end!(xserv_tokens_free),
        "xserv_messages" => end!(xserv_messages_free),
        "xserv_cancel_token" => end!(xserv_cancel_token_free),
        "xserv_result" => end!(xserv_result_free),
        "xserv_submission" => end!(xserv_submission_free),
        "xserv_context" => end!(xserv_context_free),
        "xserv_owned_tensor" => end!(xserv_owned_tensor_free),
        "xserv_managed_tensor" => {
            let managed: *mut xserv_managed_tensor = ptr::with_exposed_provenance_mut(handle);
            unsafe { (*managed).deleter.unwrap()(managed) }
        }
        "xserv_managed_tensor_versioned" => {
            let managed: *mut xserv_managed_tensor_versioned =
                ptr::with_exposed_provenance_mut(handle);
            unsafe { (*managed).deleter.unwrap()(managed) }
        }
        _ => panic!("{kind}"),
    }
}

/// The kinds of structs that a call makes and their own deleter frees.
const MANAGED: [&str; 2] = ["xserv_managed_tensor", "xserv_managed_tensor_versioned"];

/// Returns the handles that a successful call made, by kind.
pub fn made<'a>(
    function: &'a Function,
    arguments: &mut Arguments,
    returned: Returned,
) -> Vec<(&'a str, u64)> {
    if !returned.is_ok() {
        return Vec::new();
    }
    let outs = function.parameters.iter().enumerate().filter_map(|(i, p)| {
        let kind = p.pointee(2).filter(|kind| HANDLES.contains(kind) || MANAGED.contains(kind))?;
        // The result of a generation may be left out.
        (*arguments.word(i) != 0).then(|| (kind, *arguments.pointed::<u64>(i)))
    });
    outs.collect()
}

/// Frees what a successful call made.
pub fn free_made(function: &Function, arguments: &mut Arguments, returned: Returned) {
    for (kind, handle) in made(function, arguments, returned) {
        free(kind, handle);
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for (kind, handle) in std::mem::take(&mut self.handles) {
            free(kind, handle as u64);
        }
    }
}

/// Asserts that every function succeeds with the arguments made for it, or refuses for the one reason
/// that is given here.
#[test]
fn every_function_has_a_valid_call() {
    let mut world = World::new();
    for function in crate::functions::functions() {
        let mut arguments = world.arguments(&function);
        let returned = call(&function, &arguments);
        match (function.name.as_str(), returned) {
            // There may be no such device, and ordinary memory is not pinned for it.
            ("xserv_cuda_device_get_info" | "xserv_owned_tensor_new_pinned", _) => {}
            (_, Returned::Status(_)) => {
                assert!(returned.is_ok(), "{}: {}", function.name, last_error())
            }
            (_, Returned::Pointer(pointer)) => assert_ne!(pointer, 0, "{}", function.name),
            (_, Returned::Number(_) | Returned::Nothing) => {}
        }
        free_made(&function, &mut arguments, returned);
        renew_used(&mut world, &function);
    }
}

/// Replaces what a call of the function has used up.
pub fn renew_used(world: &mut World, function: &Function) {
    let kinds = function.parameters.iter().filter_map(|p| p.pointee(1));
    let used = match function.name.as_str() {
        "xserv_submission_take_result" => Some("xserv_submission"),
        "xserv_cancel_token_cancel" => Some("xserv_cancel_token"),
        "xserv_messages_remove" => Some("xserv_messages"),
        _ => function.frees(),
    };
    let kinds: Vec<&str> = kinds.collect();
    if let Some(kind) = HANDLES.iter().find(|kind| Some(**kind) == used && kinds.contains(*kind)) {
        free(kind, world.handle::<c_void>(kind).addr() as u64);
        world.renew(kind);
    }
}
