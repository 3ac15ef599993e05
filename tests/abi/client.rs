//! A thin Rust client of the C functions, for the tests: what a careful C program would do.

use std::ffi::{c_char, c_void, CStr, CString};
use std::path::{Path, PathBuf};
use std::ptr;

use xserv::ffi::*;

pub type Status = xserv_status;

/// The status and the message of a failure.
#[derive(Debug)]
pub struct Failure {
    pub status: xserv_status,
    pub message: String,
}

pub type Outcome<T> = Result<T, Failure>;

pub fn check(status: xserv_status) -> Outcome<()> {
    if status == xserv_status::XSERV_STATUS_OK {
        return Ok(());
    }
    Err(Failure { status, message: last_error() })
}

pub fn last_error() -> String {
    let message = unsafe { CStr::from_ptr(xserv_last_error()) };
    message.to_str().expect("last_error is UTF-8").to_string()
}

pub fn c_string(text: impl AsRef<str>) -> CString {
    CString::new(text.as_ref()).unwrap()
}

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Names another folder for [`tiny`].
pub const TEST_MODEL: &str = "XSERV_TEST_MODEL";

/// Returns the model that tests load: the repository's own, a Qwen3, unless the environment names
/// another folder with the same tokenizer and texts (over_llama.rs does).
pub fn tiny() -> PathBuf {
    match std::env::var_os(TEST_MODEL) {
        Some(folder) => folder.into(),
        None => root().join("examples/models/tiny-qwen3"),
    }
}

/// Returns the shared golden data, where it exists.
pub fn shared_golden() -> Option<PathBuf> {
    let path = match std::env::var_os("XSERV_GOLDEN") {
        Some(path) => PathBuf::from(path),
        None => root().join("../shared/golden"),
    };
    if !path.is_dir() {
        eprintln!("skipped: no shared golden data at {}", path.display());
        return None;
    }
    Some(path)
}

/// Set where tests of the CPU are to run on a GPU, in f32, where results depend on the request
/// alone as on the CPU.
pub const TEST_ON_CUDA: &str = "XSERV_TEST_ON_CUDA";

/// Returns the defaults, but for the device: what is tested is the CPU, on machines with a GPU too,
/// unless the environment asks for a GPU (choosing.rs does).
pub fn load_options() -> xserv_load_options {
    let mut options: xserv_load_options = unsafe { std::mem::zeroed() };
    unsafe { xserv_load_options_init(&mut options, size_of_val(&options)) };
    assert_eq!(options.device_kind, xserv_device_kind::XSERV_DEVICE_AUTO as u32);
    options.device_kind = xserv_device_kind::XSERV_DEVICE_CPU as u32;
    if std::env::var_os(TEST_ON_CUDA).is_some() {
        options.device_kind = xserv_device_kind::XSERV_DEVICE_CUDA as u32;
        options.dtype = xserv_dtype::XSERV_DTYPE_F32 as u32;
        options.deterministic = 1;
        // Dozens of models at once share a card, which a cache of the default size would fill.
        options.kv_cache_tokens = 1 << 15;
    }
    options
}

pub fn logits_options(rows: u32) -> xserv_logits_options {
    let mut options: xserv_logits_options = unsafe { std::mem::zeroed() };
    unsafe { xserv_logits_options_init(&mut options, size_of_val(&options)) };
    options.rows = rows;
    options
}

pub fn request() -> xserv_request {
    let mut request = unsafe { std::mem::zeroed() };
    unsafe { xserv_request_init(&mut request, size_of_val(&request)) };
    request
}

/// Returns a request for the greedy continuation of ids.
pub fn greedy(ids: &[u32], max_tokens: u32) -> xserv_request {
    xserv_request {
        prompt_tokens: ids.as_ptr(),
        num_prompt_tokens: ids.len(),
        max_tokens,
        temperature: 0.0,
        ..request()
    }
}

pub struct Model(pub *mut xserv_model);
// The handle may be used from any thread.
unsafe impl Send for Model {}
unsafe impl Sync for Model {}

impl Drop for Model {
    fn drop(&mut self) {
        xserv_model_free(self.0);
    }
}

/// A context on the CPU.
pub struct Context(pub *mut xserv_context);

impl Context {
    pub fn new(num_threads: u32) -> Context {
        let mut options: xserv_context_options = unsafe { std::mem::zeroed() };
        unsafe { xserv_context_options_init(&mut options, size_of_val(&options)) };
        options.device_kind = xserv_device_kind::XSERV_DEVICE_CPU as u32;
        options.num_threads = num_threads;
        let mut context = ptr::null_mut();
        check(unsafe { xserv_context_new(&options, &mut context) }).unwrap();
        Context(context)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        xserv_context_free(self.0);
    }
}

/// Returns the descriptor of these values, contiguous, in this shape.
pub fn tensor(values: &mut [f32], shape: &mut [i64]) -> xserv_tensor {
    assert_eq!(values.len() as i64, shape.iter().product::<i64>());
    xserv_tensor {
        data: values.as_mut_ptr().cast(),
        device: xserv_tensor_device { device_type: 1, device_id: 0 },
        ndim: shape.len() as i32,
        dtype: xserv_tensor_dtype { code: 2, bits: 32, lanes: 1 },
        shape: shape.as_mut_ptr(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    }
}

/// The output of a generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    pub text: String,
    pub ids: Vec<u32>,
    pub num_prompt_tokens: usize,
    pub finish_reason: u32,
    pub seed: u64,
}

/// A token as the callback saw it.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub id: u32,
    pub text: String,
    pub num_tokens: u32,
}

/// Returns the plan of `xserv_plan`, if its numbers agree with each other.
pub fn plan(path: &Path, options: &xserv_load_options) -> Outcome<xserv_memory_plan> {
    let path = c_string(path.to_str().unwrap());
    let mut plan: xserv_memory_plan = unsafe { std::mem::zeroed() };
    plan.struct_size = size_of::<xserv_memory_plan>();
    check(unsafe { xserv_plan(path.as_ptr(), options, &mut plan) })?;
    let kv_bytes = plan.kv_cache_tokens * plan.kv_bytes_per_token;
    if plan.kv_cache_tokens > 0 {
        assert_eq!(plan.total_bytes, plan.weights_bytes + plan.workspace_bytes + kv_bytes);
    }
    assert!(plan.minimum_bytes <= plan.total_bytes);
    assert_eq!(plan.fits == 1, plan.memory_bytes == 0 || plan.total_bytes <= plan.memory_bytes);
    Ok(plan)
}

type OnEvent<'a> = &'a mut dyn FnMut(Event) -> bool;

unsafe extern "C" fn trampoline(event: *const xserv_token_event, user_data: *mut c_void) -> bool {
    let on_event = unsafe { &mut *(user_data as *mut OnEvent<'_>) };
    let event = unsafe { &*event };
    let bytes = unsafe { std::slice::from_raw_parts(event.text as *const u8, event.text_len + 1) };
    assert_eq!(bytes[event.text_len], 0, "the piece ends in a NUL");
    let text = std::str::from_utf8(&bytes[..event.text_len]).expect("pieces are whole UTF-8");
    on_event(Event { id: event.token_id, text: text.to_string(), num_tokens: event.num_tokens })
}

impl Model {
    pub fn load(path: &Path, options: &xserv_load_options) -> Outcome<Model> {
        let path = c_string(path.to_str().unwrap());
        let mut model = ptr::null_mut();
        check(unsafe { xserv_load(path.as_ptr(), options, &mut model) })?;
        assert!(!model.is_null());
        Ok(Model(model))
    }

    pub fn open(path: &Path) -> Model {
        Model::load(path, &load_options()).unwrap()
    }

    pub fn with_dtype(path: &Path, dtype: xserv_dtype) -> Model {
        Model::load(path, &xserv_load_options { dtype: dtype as u32, ..load_options() }).unwrap()
    }

    pub fn info(&self) -> xserv_model_info {
        let mut info: xserv_model_info = unsafe { std::mem::zeroed() };
        info.struct_size = size_of::<xserv_model_info>();
        check(unsafe { xserv_model_get_info(self.0, &mut info) }).unwrap();
        info
    }

    pub fn generate(&self, request: &xserv_request) -> Outcome<Output> {
        let mut result = ptr::null_mut();
        check(unsafe { xserv_generate(self.0, request, None, ptr::null_mut(), &mut result) })?;
        Ok(take_result(result))
    }

    pub fn stream(&self, request: &xserv_request, mut on: OnEvent<'_>) -> Outcome<Output> {
        let mut result = ptr::null_mut();
        let data = &raw mut on as *mut c_void;
        check(unsafe { xserv_generate(self.0, request, Some(trampoline), data, &mut result) })?;
        Ok(take_result(result))
    }

    pub fn logits(&self, ids: &[u32], all: bool) -> Outcome<Vec<f32>> {
        let rows = if all { ids.len() } else { 1 };
        let mut out = vec![f32::NAN; rows * self.info().vocab_size as usize];
        let code = match all {
            true => xserv_logits_rows::XSERV_LOGITS_ALL,
            false => xserv_logits_rows::XSERV_LOGITS_LAST,
        };
        check(unsafe {
            let options = logits_options(code as u32);
            xserv_logits(self.0, ids.as_ptr(), ids.len(), &options, out.as_mut_ptr(), out.len())
        })?;
        Ok(out)
    }

    pub fn tokenize(&self, text: &str) -> Outcome<Vec<u32>> {
        let mut tokens = ptr::null_mut();
        let data = text.as_ptr() as *const c_char;
        check(unsafe { xserv_tokenize(self.0, data, text.len(), ptr::null(), &mut tokens) })?;
        let mut len = 0;
        let ids = unsafe { xserv_tokens_data(tokens, &mut len) };
        let ids = unsafe { std::slice::from_raw_parts(ids, len) }.to_vec();
        xserv_tokens_free(tokens);
        Ok(ids)
    }

    pub fn detokenize(&self, ids: &[u32], skip_special: bool) -> Outcome<String> {
        let mut text = ptr::null_mut();
        check(unsafe {
            xserv_detokenize(self.0, ids.as_ptr(), ids.len(), skip_special, &mut text)
        })?;
        Ok(take_text(text))
    }

    /// Returns the pieces of a streaming detokenizer, one for each id and one for the end.
    pub fn stream_chunks(&self, ids: &[u32], skip_special: bool) -> Outcome<Vec<String>> {
        let mut detokenizer = ptr::null_mut();
        check(unsafe { xserv_detokenizer_new(self.0, skip_special, &mut detokenizer) })?;
        let mut chunks = Vec::new();
        for i in 0..=ids.len() {
            let (mut text, mut len) = (ptr::null(), 0);
            check(match ids.get(i) {
                Some(id) => unsafe {
                    xserv_detokenizer_push(detokenizer, *id, &mut text, &mut len)
                },
                None => unsafe { xserv_detokenizer_finish(detokenizer, &mut text, &mut len) },
            })?;
            let piece = unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_string();
            assert!(piece.len() <= len);
            chunks.push(piece);
        }
        xserv_detokenizer_free(detokenizer);
        Ok(chunks)
    }

    pub fn apply_chat_template(
        &self,
        messages: &str,
        tools: Option<&str>,
        variables: Option<&str>,
        add_generation_prompt: bool,
    ) -> Outcome<String> {
        let mut options = unsafe { std::mem::zeroed() };
        unsafe { xserv_chat_options_init(&mut options, size_of_val(&options)) };
        let messages = c_string(messages);
        let tools = tools.map(c_string);
        let variables = variables.map(c_string);
        options.messages_json = messages.as_ptr();
        options.tools_json = tools.as_ref().map_or(ptr::null(), |s| s.as_ptr());
        options.template_variables_json = variables.as_ref().map_or(ptr::null(), |s| s.as_ptr());
        options.add_generation_prompt = u8::from(add_generation_prompt);
        let mut text = ptr::null_mut();
        check(unsafe { xserv_apply_chat_template(self.0, &options, &mut text) })?;
        Ok(take_text(text))
    }
}

fn take_text(text: *mut xserv_text) -> String {
    let mut len = 0;
    let data = unsafe { xserv_text_data(text, &mut len) };
    let bytes = unsafe { std::slice::from_raw_parts(data as *const u8, len + 1) };
    assert_eq!(bytes[len], 0);
    let out = std::str::from_utf8(&bytes[..len]).unwrap().to_string();
    xserv_text_free(text);
    out
}

pub fn take_result(result: *mut xserv_result) -> Output {
    let mut info: xserv_result_info = unsafe { std::mem::zeroed() };
    info.struct_size = size_of::<xserv_result_info>();
    check(unsafe { xserv_result_get_info(result, &mut info) }).unwrap();
    let text = unsafe { std::slice::from_raw_parts(info.text as *const u8, info.text_len) };
    let ids = unsafe { std::slice::from_raw_parts(info.token_ids, info.num_tokens) };
    let output = Output {
        text: std::str::from_utf8(text).expect("the text is UTF-8").to_string(),
        ids: ids.to_vec(),
        num_prompt_tokens: info.num_prompt_tokens,
        finish_reason: info.finish_reason,
        seed: info.seed,
    };
    let whole = unsafe { CStr::from_ptr(xserv_result_text(result)) };
    assert!(output.text.as_bytes().starts_with(whole.to_bytes()));
    xserv_result_free(result);
    output
}

/// Returns a handle value that never was one.
pub fn forged<T>() -> *mut T {
    ptr::without_provenance_mut(0x0123_4567_89ab_cdef)
}
