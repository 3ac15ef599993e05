//! Models: load, describe, free.

#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use super::guard::{
    call_host, check_memory, guard, guard_or, guard_work, init_struct, read_struct, text_argument,
    with_nul, write_struct, GrowingStruct, Out, NUL_TERMINATED,
};
use super::handle::HandleTable;
use super::status::xserv_status;
use super::types::{
    xserv_activations, xserv_device_kind, xserv_dtype, xserv_kv_cache_format, xserv_weights,
};
use crate::engine::{
    ActivationFormat, DeviceChoice, Engine, EngineOptions, KvFormat, LogLevel, LogTarget, Logger,
    WeightStorage,
};
use crate::error::{Error, Result};
use crate::memory::DType;

/// A loaded model: weights, tokenizer, chat template, KV cache and threads.
///
/// Any thread may use it, several at once; freeing it while calls are running is safe: they end as
/// cancelled.
pub struct xserv_model {
    _opaque: [u8; 0],
}

/// Called with the progress of a load. `fraction` goes from 0 to 1. Runs on the thread that called
/// xserv_load. Returns true to continue, false to cancel the load.
pub type xserv_progress_callback =
    Option<unsafe extern "C" fn(fraction: f32, user_data: *mut c_void) -> bool>;

/// Called with log messages. `level` is an xserv_log_level; `target` is the part of the library that
/// the message is about: "load", "scheduler" (preempted requests, slow steps) or "device" (a device
/// that was lost); `message` is one line. Both are UTF-8, valid during the call. The library prints
/// nothing itself.
///
/// Runs on the thread that called xserv_load during that call, and then on a thread of the model's,
/// one call at a time, until xserv_model_free() has returned. There it must be quick, as requests
/// wait for it, and may call only what a xserv_wake_callback may.
pub type xserv_log_callback = Option<
    unsafe extern "C" fn(
        level: u32,
        target: *const c_char,
        message: *const c_char,
        user_data: *mut c_void,
    ),
>;

/// How to load a model. Fill with xserv_load_options_default(), then change what you need.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_load_options {
    /// sizeof(xserv_load_options), set by xserv_load_options_default().
    pub struct_size: usize,
    /// An xserv_device_kind. Default XSERV_DEVICE_AUTO: the CUDA device where it can be used
    /// and the model runs and fits there, else the CPU; the log says why not.
    pub device_kind: u32,
    /// The index of the GPU among those that xserv_cuda_device_count() counts; 0 (default): the first.
    /// On the CPU it must be 0.
    pub device_index: u32,
    /// An xserv_dtype: the type that is computed with, and of weights and KV cache unless the weights are
    /// quantised or kv_cache_format says otherwise. Default XSERV_DTYPE_AUTO; another value converts the
    /// weights while they are read.
    pub dtype: u32,
    /// Number of threads for the CPU's kernels, the calling thread included, at most 1024; 0
    /// (default): one for each core that the process may run on. Results do not depend on it. On a
    /// GPU the threads only read the weights.
    pub num_threads: u32,
    /// Longest context of one request: prompt and generated tokens, of which the last one takes no
    /// room; 0 (default): the limit in the model's config. More than that is refused.
    pub max_context_tokens: u64,
    /// Number of tokens that the KV cache holds for all requests together, rounded up to blocks of
    /// 32. 0 (default): as many as max_memory_bytes leaves room for. Without such a limit, on a GPU
    /// as many as fit into nine tenths of the free memory beside weights and work space; on the CPU
    /// up to four longest contexts in a quarter of the memory that is left, or one in half of it.
    /// Where that is less than one longest context, contexts are shortened accordingly, and the log
    /// says so; more than 256 longest contexts are never taken. On the CPU the cache's memory is
    /// taken from the system as it fills, on a GPU at once. xserv_model_info gives the resulting
    /// number of tokens, xserv_plan gives it before loading.
    pub kv_cache_tokens: u64,
    /// Refuse to load if weights, activations and the smallest KV cache together need more bytes
    /// than this; 0 (default): no limit. With kv_cache_tokens 0 the KV cache takes what is left. On
    /// the CPU the tokenizer, tables of positions and each request's logits come on top: some tens
    /// of MB. On a GPU it is a limit of device memory that is never exceeded, and includes
    /// everything but the driver's own memory (its context, kernels).
    pub max_memory_bytes: u64,
    /// Largest number of bytes of host memory for the keys and values of preempted requests, which
    /// made room for others: they are kept there where copying has turned out to be faster than
    /// recomputing. 0 (default): on a GPU an eighth of the host memory that is available at load, 4
    /// GiB at most; on the CPU, where the KV cache is in the same memory, none. If it is less than
    /// the size of one block of the KV cache (1, for example), they are always recomputed. The
    /// memory is taken in pieces of about 256 MiB when a request first needs it, pinned for a GPU,
    /// and kept until the model is freed.
    pub max_swap_bytes: u64,
    /// Largest number of prompt tokens in one step, of all requests together; 0 (default): 512 on
    /// the CPU, 2048 on a GPU. Longer prompts are computed in pieces beside the requests that
    /// generate, so that these wait no longer than such a piece takes. If it is the longest context
    /// or more, no prompt is cut. The work space grows with it.
    pub max_prefill_tokens: u64,
    /// Largest number of sequences that are computed together in one step, at most 4096; 0
    /// (default): 64 on the CPU, 256 on a GPU. On a GPU a step never has more than 256, even if
    /// this is larger.
    pub max_batch_size: u32,
    /// 1 (default): requests share the keys and values of common prefixes, which are kept while
    /// there is room. 0: every prompt is computed whole.
    pub prefix_cache: u8,
    /// 1: the output of a request depends on the request alone, to the last bit: not on what is
    /// computed beside it, nor on how its prompt is cut into steps, nor on whether it was preempted or
    /// found its prefix in the cache. That holds for one version of the library on one kind of GPU with
    /// one dtype. 0 (default): on a GPU the rounding of sums may depend on the sizes of a step, and a
    /// token may differ where two are nearly as likely. The CPU works as with 1, except with quantised
    /// weights in a bf16 model on a processor with AMX or AMD's AVX-512 BF16, which may round them and
    /// their inputs to bf16 in steps of many tokens. Without that, prompts of Qwen3-0.6B's shape took 1.4
    /// to 4 times as long with AMX.
    ///
    /// On a GPU it costs speed because cuBLAS is not used and decoding takes the kernels of larger steps.
    /// On an H200 in bf16 (512 tokens of context) a step of one sequence takes twice as long with
    /// Qwen3-0.6B and 16 % longer with Qwen3-8B, a step of 8 sequences 15 % and 3 % longer, a step
    /// of 32 sequences 15 % and 6 %, a prompt of 2048 tokens 25 % and 17 %. On GPUs before Hopper
    /// it has not been measured.
    pub deterministic: u8,
    /// 1: map the weight files while they are read instead of reading them with system calls. A
    /// file that another process truncates meanwhile then kills the process. Default 0.
    pub map_files: u8,
    /// 1: config.json alone is read for the weights, which are made up on the device: to time a shape
    /// without its files. They are random numbers, the same at each load, and on a GPU the same as on
    /// the CPU but for rounding. Weight files that are there are left alone. Tokenizer and template
    /// are used where there are any. dtype XSERV_DTYPE_AUTO stands for the type that config.json
    /// names, or bf16; with weights and embeddings the numbers are made up in the quantised form.
    /// kept_weights is refused. Default 0.
    pub random_weights: u8,
    /// Called while weights are read; NULL (default): not called.
    pub progress: xserv_progress_callback,
    /// Passed to progress.
    pub progress_user_data: *mut c_void,
    /// Called with log messages, during the load and after it; NULL (default): silence.
    pub log: xserv_log_callback,
    /// Passed to log.
    pub log_user_data: *mut c_void,
    /// An xserv_weights: whether the matrices of the layers are quantised while they are read; default
    /// XSERV_WEIGHTS_AS_STORED. What is computed with is dtype as before. Folders whose weights are
    /// quantised already keep them so.
    pub weights: u32,
    /// Inputs that share a scale in weights that are quantised at load: a multiple of 32; 0
    /// (default): 32 with XSERV_WEIGHTS_INT4, 128 with XSERV_WEIGHTS_INT8. Smaller groups are
    /// closer to the original and take more memory.
    pub weights_group_size: u32,
    /// An xserv_weights: whether the embedding and the output matrix (lm_head) are quantised while they are
    /// read, whatever weights says of the layers; default XSERV_WEIGHTS_AS_STORED. XSERV_WEIGHTS_INT8 keeps
    /// them in 8 bits with a scale for every 128 inputs of a row, in half the memory of bf16. One matrix
    /// serves both where the two are tied. An output matrix that is stored quantised is kept so.
    /// XSERV_WEIGHTS_INT4 is refused.
    pub embeddings: u32,
    /// An xserv_kv_cache_format: what the KV cache stores; default XSERV_KV_CACHE_AS_COMPUTED. With
    /// deterministic on a GPU, XSERV_KV_CACHE_FP8 costs decoding a pass over all keys and values that
    /// widens them.
    pub kv_cache_format: u32,
    /// A file in which the matrices that weights and embeddings quantise are kept for later loads,
    /// on whatever device; NUL-terminated UTF-8, NULL (default): none. If the file is not there,
    /// the load makes it, under another name beside it until it is complete; several loads may do
    /// so at once. If it is there, the matrices are read from it and what they were made from is
    /// not. A file that does not fit (a version, options, or a model other than those it was made
    /// with, a damaged or another file) is refused with XSERV_STATUS_INVALID_FILE and never
    /// overwritten: remove it to have it made anew. One that cannot be written, as where the disk
    /// is full, fails the load with XSERV_STATUS_IO.
    ///
    /// The model is known again by the names, sizes, modification times and headers of its weight
    /// files; where a time differs, as after a copy, by checksums of its tensors, which are then
    /// read. A change that leaves all of these is not noticed. Refused without weights or
    /// embeddings that are quantised at load, and with random_weights. xserv_plan does not look at
    /// the file.
    pub kept_weights: *const c_char,
    /// An xserv_activations: what products with quantised weights take their activations as;
    /// default XSERV_ACTIVATIONS_AS_COMPUTED.
    pub activations: u32,
    /// Must be 0.
    pub reserved: u32,
}

// SAFETY: repr(C), struct_size first, integers, pointers and nullable function pointers; a caller
// who passes a function pointer that is none breaks the contract of that field.
unsafe impl GrowingStruct for xserv_load_options {
    const SIZES: &'static [usize] = &[104, 136];
    const NAME: &'static str = "xserv_load_options";
    const HOW: &'static str = "fill it with xserv_load_options_default()";
    fn is_reserved_zero(&self) -> bool {
        self.reserved == 0
    }
    fn defaults() -> Self {
        xserv_load_options {
            struct_size: size_of::<Self>(),
            device_kind: xserv_device_kind::XSERV_DEVICE_AUTO as u32,
            device_index: 0,
            dtype: xserv_dtype::XSERV_DTYPE_AUTO as u32,
            num_threads: 0,
            max_context_tokens: 0,
            kv_cache_tokens: 0,
            max_memory_bytes: 0,
            max_swap_bytes: 0,
            max_prefill_tokens: 0,
            max_batch_size: 0,
            prefix_cache: 1,
            deterministic: 0,
            map_files: 0,
            random_weights: 0,
            progress: None,
            progress_user_data: std::ptr::null_mut(),
            log: None,
            log_user_data: std::ptr::null_mut(),
            weights: xserv_weights::XSERV_WEIGHTS_AS_STORED as u32,
            weights_group_size: 0,
            embeddings: xserv_weights::XSERV_WEIGHTS_AS_STORED as u32,
            kv_cache_format: xserv_kv_cache_format::XSERV_KV_CACHE_AS_COMPUTED as u32,
            kept_weights: std::ptr::null(),
            activations: xserv_activations::XSERV_ACTIVATIONS_AS_COMPUTED as u32,
            reserved: 0,
        }
    }
}

/// A description of a loaded model. Set struct_size, then call xserv_model_get_info(). Pointers
/// belong to the model and are valid until it is freed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_model_info {
    /// sizeof(xserv_model_info), set by the caller.
    pub struct_size: usize,
    /// The architecture, for example "Qwen3ForCausalLM".
    pub architecture: *const c_char,
    /// The folder that was opened (for a repo id, its snapshot in the cache).
    pub path: *const c_char,
    /// The device, for example "cpu (avx512-bf16, 2 threads)" or "cuda (NVIDIA H200)".
    pub device: *const c_char,
    /// An xserv_device_kind, never XSERV_DEVICE_AUTO.
    pub device_kind: u32,
    /// The index of the GPU; 0 on the CPU.
    pub device_index: u32,
    /// An xserv_dtype, never XSERV_DTYPE_AUTO.
    pub dtype: u32,
    /// Number of threads that the kernels use; 0 on a GPU.
    pub num_threads: u32,
    /// Number of weights (tied embeddings count once).
    pub num_parameters: u64,
    /// Bytes that the weights take in memory (on a GPU with the tables of positions).
    pub weights_bytes: u64,
    /// Bytes of KV cache for one token.
    pub kv_bytes_per_token: u64,
    /// Number of tokens that the KV cache holds.
    pub kv_cache_tokens: u64,
    /// Longest context of one request, in tokens: prompt and generated.
    pub max_context_tokens: u64,
    /// Length of a row of logits. May be larger than the number of tokens that the tokenizer knows.
    pub vocab_size: u32,
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Number of transformer layers.
    pub num_layers: u32,
    /// Number of query heads.
    pub num_heads: u32,
    /// Number of key/value heads.
    pub num_kv_heads: u32,
    /// Width of one head.
    pub head_dim: u32,
    /// Number of entries of eos_token_ids.
    pub num_eos_token_ids: u32,
    /// 1: text can be tokenized; 0: the folder has no tokenizer.json, only token ids work.
    pub has_tokenizer: u8,
    /// 1: messages can be rendered; 0: the folder has no usable chat template.
    pub has_chat_template: u8,
    /// Unused, 0.
    pub reserved: [u8; 2],
    /// Tokens that end a generation, from generation_config.json or config.json.
    pub eos_token_ids: *const u32,
    /// Seconds that xserv_load took.
    pub load_seconds: f64,
    /// The most bytes that activations and scratch memory of the operators take, as planned at
    /// load.
    pub workspace_bytes: u64,
}

// SAFETY: repr(C), struct_size first, integers, floats and pointers only.
unsafe impl GrowingStruct for xserv_model_info {
    const SIZES: &'static [usize] = &[144];
    const NAME: &'static str = "xserv_model_info";
    const HOW: &'static str = "set it to sizeof(xserv_model_info)";
    fn defaults() -> Self {
        xserv_model_info {
            struct_size: size_of::<Self>(),
            architecture: c"".as_ptr(),
            path: c"".as_ptr(),
            device: c"".as_ptr(),
            device_kind: 0,
            device_index: 0,
            dtype: 0,
            num_threads: 0,
            num_parameters: 0,
            weights_bytes: 0,
            kv_bytes_per_token: 0,
            kv_cache_tokens: 0,
            max_context_tokens: 0,
            vocab_size: 0,
            hidden_size: 0,
            num_layers: 0,
            num_heads: 0,
            num_kv_heads: 0,
            head_dim: 0,
            num_eos_token_ids: 0,
            has_tokenizer: 0,
            has_chat_template: 0,
            reserved: [0; 2],
            eos_token_ids: std::ptr::null(),
            load_seconds: 0.0,
            workspace_bytes: 0,
        }
    }
}

/// The object of a model handle: the engine, and the strings that C may point to.
pub(super) struct ModelObject {
    pub(super) engine: Arc<Engine>,
    architecture: Vec<u8>,
    path: Vec<u8>,
    device: Vec<u8>,
}

pub(super) static MODELS: HandleTable<ModelObject> = HandleTable::new(1, "model");

/// Returns the engine of a model handle.
pub(super) fn engine_of(model: *const xserv_model) -> Result<Arc<Engine>> {
    let object = MODELS.get(model)?;
    object.engine.check_process()?;
    Ok(object.engine.clone())
}

/// A C function and its user data.
struct LogFunction {
    callback: unsafe extern "C" fn(u32, *const c_char, *const c_char, *mut c_void),
    user_data: *mut c_void,
}
// SAFETY: the pointer is only passed back to the caller's function, which by contract may be called
// on the threads that its comment names, one at a time.
unsafe impl Send for LogFunction {}
// SAFETY: as above.
unsafe impl Sync for LogFunction {}

fn logger(options: &xserv_load_options) -> Logger {
    let Some(callback) = options.log else { return Logger::silent() };
    let function = LogFunction { callback, user_data: options.log_user_data };
    Logger::new(move |level, target, message| {
        let function = &function;
        let Ok(text) = with_nul(message) else { return };
        let level = match level {
            LogLevel::Warning => super::types::xserv_log_level::XSERV_LOG_WARNING,
            LogLevel::Info => super::types::xserv_log_level::XSERV_LOG_INFO,
            LogLevel::Debug => super::types::xserv_log_level::XSERV_LOG_DEBUG,
        };
        let target = match target {
            LogTarget::Load => c"load",
            LogTarget::Scheduler => c"scheduler",
            LogTarget::Device => c"device",
        };
        let text = text.as_ptr() as *const c_char;
        // SAFETY: the caller's function, by contract valid until xserv_model_free has returned, which
        // ends the logger's calls; both texts end in NUL and outlive the call.
        call_host(|| unsafe {
            (function.callback)(level as u32, target.as_ptr(), text, function.user_data)
        });
    })
}

fn dtype_option(value: u32) -> Result<Option<DType>> {
    match value {
        v if v == xserv_dtype::XSERV_DTYPE_AUTO as u32 => Ok(None),
        v if v == xserv_dtype::XSERV_DTYPE_F32 as u32 => Ok(Some(DType::F32)),
        v if v == xserv_dtype::XSERV_DTYPE_F16 as u32 => Ok(Some(DType::F16)),
        v if v == xserv_dtype::XSERV_DTYPE_BF16 as u32 => Ok(Some(DType::BF16)),
        v => Err(Error::invalid_argument(format!("options.dtype is {v}, not an xserv_dtype"))),
    }
}

pub(super) fn dtype_code(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => xserv_dtype::XSERV_DTYPE_F32 as u32,
        DType::F16 => xserv_dtype::XSERV_DTYPE_F16 as u32,
        DType::BF16 => xserv_dtype::XSERV_DTYPE_BF16 as u32,
    }
}

fn weights_option(value: u32, name: &str) -> Result<WeightStorage> {
    match value {
        v if v == xserv_weights::XSERV_WEIGHTS_AS_STORED as u32 => Ok(WeightStorage::AsStored),
        v if v == xserv_weights::XSERV_WEIGHTS_INT8 as u32 => Ok(WeightStorage::Int8),
        v if v == xserv_weights::XSERV_WEIGHTS_INT4 as u32 => Ok(WeightStorage::Int4),
        v => Err(Error::invalid_argument(format!("options.{name} is {v}, not an xserv_weights"))),
    }
}

fn kv_cache_option(value: u32) -> Result<KvFormat> {
    match value {
        v if v == xserv_kv_cache_format::XSERV_KV_CACHE_AS_COMPUTED as u32 => Ok(KvFormat::Dense),
        v if v == xserv_kv_cache_format::XSERV_KV_CACHE_FP8 as u32 => Ok(KvFormat::Fp8),
        v => Err(Error::invalid_argument(format!(
            "options.kv_cache_format is {v}, not an xserv_kv_cache_format"
        ))),
    }
}

fn activations_option(value: u32) -> Result<ActivationFormat> {
    match value {
        v if v == xserv_activations::XSERV_ACTIVATIONS_AS_COMPUTED as u32 => {
            Ok(ActivationFormat::AsComputed)
        }
        v if v == xserv_activations::XSERV_ACTIVATIONS_INT8 as u32 => Ok(ActivationFormat::Int8),
        v if v == xserv_activations::XSERV_ACTIVATIONS_UNQUANTISED as u32 => {
            Ok(ActivationFormat::Unquantised)
        }
        v => Err(Error::invalid_argument(format!(
            "options.activations is {v}, not an xserv_activations"
        ))),
    }
}

fn device_option(value: u32) -> Result<DeviceChoice> {
    match value {
        v if v == xserv_device_kind::XSERV_DEVICE_CPU as u32 => Ok(DeviceChoice::Cpu),
        v if v == xserv_device_kind::XSERV_DEVICE_AUTO as u32 => Ok(DeviceChoice::Auto),
        v if v == xserv_device_kind::XSERV_DEVICE_CUDA as u32 => Ok(DeviceChoice::Cuda),
        v => Err(Error::invalid_argument(format!(
            "options.device_kind is {v}, not an xserv_device_kind"
        ))),
    }
}

/// Returns the path that an option names.
///
/// # Safety
/// `path` is NULL or ends in a NUL.
unsafe fn path_option(path: *const c_char, name: &str) -> Result<Option<PathBuf>> {
    if path.is_null() {
        return Ok(None);
    }
    // SAFETY: by the contract above.
    match unsafe { text_argument(path, NUL_TERMINATED, name) }? {
        "" => Err(Error::invalid_argument(format!("{name} is empty"))),
        path => Ok(Some(PathBuf::from(path))),
    }
}

/// Checks the options and converts them, without the callbacks.
///
/// # Safety
/// Texts of the options are NULL or end in a NUL.
pub(super) unsafe fn engine_options(options: &xserv_load_options) -> Result<EngineOptions> {
    // SAFETY: by the contract above.
    let kept_weights = unsafe { path_option(options.kept_weights, "options.kept_weights") }?;
    Ok(EngineOptions {
        device: device_option(options.device_kind)?,
        device_index: options.device_index,
        dtype: dtype_option(options.dtype)?,
        kv_format: kv_cache_option(options.kv_cache_format)?,
        activations: activations_option(options.activations)?,
        num_threads: options.num_threads as usize,
        weights: weights_option(options.weights, "weights")?,
        weights_group_size: options.weights_group_size as usize,
        embeddings: weights_option(options.embeddings, "embeddings")?,
        kept_weights,
        map_files: super::guard::flag(options.map_files, "options.map_files")?,
        max_context_tokens: options.max_context_tokens,
        kv_cache_tokens: options.kv_cache_tokens,
        max_memory_bytes: options.max_memory_bytes,
        max_batch_size: options.max_batch_size,
        max_prefill_tokens: options.max_prefill_tokens,
        max_swap_bytes: options.max_swap_bytes,
        no_prefix_cache: !super::guard::flag(options.prefix_cache, "options.prefix_cache")?,
        deterministic: super::guard::flag(options.deterministic, "options.deterministic")?,
        random_weights: super::guard::flag(options.random_weights, "options.random_weights")?,
    })
}

/// Sets every option to its default.
///
/// struct_size: sizeof(xserv_load_options) of the header that the program is built with; no byte beyond it is
/// written. xserv_load_options_default() passes it. Does nothing if options is NULL.
///
/// # Safety
/// `options` is NULL or writable for `struct_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn xserv_load_options_init(
    options: *mut xserv_load_options,
    struct_size: usize,
) {
    guard_or((), || {
        // SAFETY: writable by contract.
        unsafe { init_struct(options, struct_size) };
        Ok(())
    })
}

/// Opens a model: a folder as Hugging Face publishes it (config.json, generation_config.json,
/// tokenizer.json, tokenizer_config.json, chat_template.jinja, *.safetensors), or a repo id such as
/// "Qwen/Qwen3-0.6B" that is already in the local Hugging Face cache. The network is never used.
///
/// Architectures: Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen2ForCausalLM (Qwen2.5),
/// LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM and GPT2LMHeadModel, stored as f32, f16
/// or bf16. Anything else is refused by name before weights are read. The weights are read into
/// memory of the library's own; the folder is not needed afterwards. The call blocks while it
/// reads.
///
/// On a GPU, the start of the CUDA driver takes most of the first load of a process: about 0.25 s
/// on an H100, 0.1 s less while another process uses the GPU.
///
/// To find the cache, the environment is read (HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE, HF_HOME,
/// XDG_CACHE_HOME, HOME): as with any getenv, no other thread may change it meanwhile.
///
/// path: NUL-terminated UTF-8. options: NULL for the defaults. model: receives the handle, which
/// the caller frees with xserv_model_free(); untouched on failure.
///
/// Errors: XSERV_STATUS_NOT_FOUND (no such folder or cached repo), XSERV_STATUS_IO,
/// XSERV_STATUS_INVALID_ARGUMENT (an option; a path that is not a folder),
/// XSERV_STATUS_INVALID_FILE (damaged or inconsistent files), XSERV_STATUS_UNSUPPORTED (by name),
/// XSERV_STATUS_OUT_OF_MEMORY, XSERV_STATUS_CANCELLED (by the progress callback),
/// XSERV_STATUS_NO_DEVICE.
///
/// # Safety
/// `path` ends in a NUL; `options` is NULL or readable for its struct_size, with texts that are
/// NULL or end in a NUL; `model` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_load(
    path: *const c_char,
    options: *const xserv_load_options,
    model: *mut *mut xserv_model,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let out = unsafe { Out::new(model, "model") }?;
        // SAFETY: as above.
        let path = unsafe { text_argument(path, NUL_TERMINATED, "path") }?;
        // SAFETY: as above.
        let options = unsafe { read_struct(options, "options") }?;
        // SAFETY: as above.
        let engine_options = unsafe { engine_options(&options) }?;
        let mut progress = |fraction: f32| match options.progress {
            Some(callback) => {
                // SAFETY: the caller's function, called on its own thread with its own data.
                call_host(|| unsafe { callback(fraction, options.progress_user_data) })
            }
            None => true,
        };
        let engine =
            Engine::load(path, &engine_options, Arc::new(logger(&options)), &mut progress)?;
        let object = ModelObject {
            architecture: with_nul(engine.architecture())?,
            path: with_nul(&engine.path().to_string_lossy())?,
            device: with_nul(&engine.device_name())?,
            engine: Arc::new(engine),
        };
        // A model that keeps much of the reserve would leave too little of it to those after it.
        check_memory()?;
        out.set(MODELS.insert(Arc::new(object))?);
        Ok(())
    })
}

/// Frees a model. Calls that are running on it in other threads end as cancelled, and its memory is
/// released when the last of them has returned. NULL and handles that were freed before do nothing.
/// Results, texts and token lists made from it stay valid.
#[no_mangle]
pub extern "C" fn xserv_model_free(model: *mut xserv_model) {
    guard_or((), || {
        if let Some(object) = MODELS.remove(model)? {
            object.engine.close();
            if object.engine.check_process().is_err() {
                // In a forked child the threads that dropping would wait for do not exist.
                std::mem::forget(object);
            }
        }
        Ok(())
    })
}

/// Describes a model.
///
/// info: struct_size must be set. The strings and the array belong to the model and are valid until
/// it is freed.
///
/// # Safety
/// `info` is writable for the struct_size that it claims.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_model_get_info(
    model: *const xserv_model,
    info: *mut xserv_model_info,
) -> xserv_status {
    guard(|| {
        let object = MODELS.get(model)?;
        object.engine.check_process()?;
        let engine = &object.engine;
        let shape = engine.shape();
        let eos = engine.eos_token_ids();
        let value = xserv_model_info {
            struct_size: size_of::<xserv_model_info>(),
            architecture: object.architecture.as_ptr() as *const c_char,
            path: object.path.as_ptr() as *const c_char,
            device: object.device.as_ptr() as *const c_char,
            device_kind: engine.device_index().map_or(xserv_device_kind::XSERV_DEVICE_CPU, |_| {
                xserv_device_kind::XSERV_DEVICE_CUDA
            }) as u32,
            device_index: engine.device_index().unwrap_or(0) as u32,
            dtype: dtype_code(engine.dtype()),
            num_threads: engine.num_threads() as u32,
            num_parameters: engine.num_parameters(),
            weights_bytes: engine.weights_bytes(),
            kv_bytes_per_token: engine.kv_bytes_per_token(),
            kv_cache_tokens: engine.kv_cache_tokens(),
            max_context_tokens: engine.max_context_tokens(),
            vocab_size: shape.vocab_size as u32,
            hidden_size: shape.hidden_size as u32,
            num_layers: shape.num_layers as u32,
            num_heads: shape.num_heads as u32,
            num_kv_heads: shape.num_kv_heads as u32,
            head_dim: shape.head_dim as u32,
            num_eos_token_ids: eos.len() as u32,
            has_tokenizer: u8::from(engine.tokenizer().is_ok()),
            has_chat_template: u8::from(engine.chat_template().is_ok()),
            reserved: [0; 2],
            eos_token_ids: eos.as_ptr(),
            load_seconds: engine.load_seconds(),
            workspace_bytes: engine.workspace_bytes(),
        };
        // SAFETY: by the contract above.
        unsafe { write_struct(info, "info", &value) }
    })
}
