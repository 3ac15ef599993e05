//! Constants and enums that several groups of functions share.

use std::ffi::c_char;

// cbindgen cannot print these two; cbindgen.toml has their C form, and tests/abi compares.
/// Used as the length of a text: the text ends at its NUL.
///
/// cbindgen:ignore
pub const XSERV_NUL_TERMINATED: usize = super::guard::NUL_TERMINATED;
/// Used for a float of xserv_request that is not set: the model's generation_config.json decides.
///
/// cbindgen:ignore
pub const XSERV_UNSET_FLOAT: f32 = f32::MIN;
/// Used for an integer of xserv_request that is not set: the model's generation_config.json
/// decides.
pub const XSERV_UNSET_INT: u32 = u32::MAX;
/// Used for xserv_request.seed: a fresh seed is drawn from the operating system; the result tells
/// which.
pub const XSERV_SEED_RANDOM: u64 = u64::MAX;
/// Used in xserv_token_event.token_id: the event carries held-back text and no new token.
pub const XSERV_NO_TOKEN: u32 = u32::MAX;

/// Where a model or a compute context runs.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_device_kind {
    /// The processor, with the best instruction set that it has.
    XSERV_DEVICE_CPU = 0,
    /// An NVIDIA GPU (compute capability 8.0 or later, driver 580 or later): the one that device_index
    /// names, by default the first. XSERV_STATUS_NO_DEVICE without one.
    XSERV_DEVICE_CUDA = 1,
    /// That GPU where it can be used and the model runs and fits there, else the CPU.
    XSERV_DEVICE_AUTO = 2,
}

/// How matrices are stored in memory: those of the layers (xserv_load_options.weights), or the embedding
/// and the output matrix (xserv_load_options.embeddings). Norms and biases are never quantised.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_weights {
    /// As the files have them: also quantised ones, which are kept so.
    XSERV_WEIGHTS_AS_STORED = 0,
    /// Numbers of 32 and 16 bits become 8-bit integers while they are read, with a scale (bf16) for
    /// each group of inputs of a row: about 8.1 bits a number.
    XSERV_WEIGHTS_INT8 = 1,
    /// Numbers of 32 and 16 bits become 4-bit integers while they are read, with a scale (bf16) and a
    /// zero for each group of inputs of a row: 4.75 bits a number with groups of 32, 4.2 with 128.
    XSERV_WEIGHTS_INT4 = 2,
}

/// What the KV cache stores.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_kv_cache_format {
    /// Keys and values of the type that is computed with, the dtype of the load.
    XSERV_KV_CACHE_AS_COMPUTED = 0,
    /// Floats of 8 bits (e4m3fn of the OCP standard, torch.float8_e4m3fn) without a scale: half the
    /// memory of bf16 for each token, so twice as many tokens, and half the bytes to read in a long
    /// context. A key or value of at least 2^-6 is kept to within a sixteenth, a smaller one to within
    /// 2^-10; those beyond 448 become 448, and NaN stays NaN. Attention computes with the
    /// same type as without it.
    XSERV_KV_CACHE_FP8 = 1,
}

/// What products with quantised weights take their activations as.
///
/// With weights of 4 and 8 bits on the CPU (integers, quantised at load or stored so) these are integers of
/// 16 bits, unless XSERV_ACTIVATIONS_INT8 is chosen, with a scale for each group of inputs, or each 128 of a
/// longer one: within 1/65024 of the largest activation of the group. In steps of many tokens of a bf16
/// model, a processor with AMX or AMD's AVX-512 BF16 may take them in bf16 instead, unless
/// xserv_load_options.deterministic is 1.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_activations {
    /// Where weights are FP8, as the folder's config says: if it quantises activations to FP8 (quant_method
    /// fp8 and modelopt, and groups of compressed-tensors with input_activations of 8 bits and type float),
    /// they are e4m3 with a scale for each token and 128 inputs, found as they come, on the CPU and on a
    /// GPU. Scales in the files (input_scale) are not used. Activations stay as they are computed where a
    /// scale of the weight is for a part of a row that is no multiple of 128 inputs, and on Hopper in steps
    /// of up to 8 requests of models up to 2,048 wide that are not deterministic.
    ///
    /// Where weights are integers of 8 bits with a scale for each row, and the config has input_activations of
    /// 8 bits and type int without zeros, of any strategy (W8A8 of compressed-tensors), steps of more than 256
    /// tokens on Hopper take them as integers of 8 bits with a scale for each token, max |x| / 127, in models of
    /// f16 and bf16 that are not deterministic.
    XSERV_ACTIVATIONS_AS_COMPUTED = 0,
    /// The same, and with weights of 4 and 8 bits on the CPU integers of 8 bits, within 1/254 of the largest
    /// activation of the group. Prompts are faster, most with long groups, where the processor multiplies
    /// bytes (AMX, VNNI). With groups of fewer than 64 inputs, a processor with AMX may take them in bf16 in
    /// steps of many tokens as well. Without such weights, and on a GPU, it changes nothing.
    XSERV_ACTIVATIONS_INT8 = 1,
    /// Never 8 bits, whatever the folder's config says: with FP8 weights, and in prompts of W8A8, activations
    /// stay as they are computed. Results are nearer to those of the numbers that the codes stand for; on a GPU
    /// prompts and many requests at once take longer.
    XSERV_ACTIVATIONS_UNQUANTISED = 2,
}

/// Element types.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_dtype {
    /// The type in which the model folder stores its weights.
    XSERV_DTYPE_AUTO = 0,
    /// IEEE 754 binary32. All arithmetic in binary32: slowest, closest to the reference.
    XSERV_DTYPE_F32 = 1,
    /// IEEE 754 binary16 weights and KV cache; sums in binary32. Activations are binary32 on the
    /// CPU, and binary16 on a GPU, rounded where Transformers rounds them.
    XSERV_DTYPE_F16 = 2,
    /// bfloat16 weights and KV cache; sums in binary32. On the CPU the inputs of matrix products
    /// are rounded to bfloat16 and the residual stream is binary32; on a GPU all activations are
    /// bfloat16, rounded where Transformers rounds them.
    XSERV_DTYPE_BF16 = 3,
    /// 32-bit signed integers: for tensors of token ids, positions and indices only.
    XSERV_DTYPE_I32 = 4,
    /// 64-bit signed integers: for tensors of token ids, positions and indices only.
    XSERV_DTYPE_I64 = 5,
}

/// The severity of a log message.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_log_level {
    /// Something is odd and may not be what you want, but the call goes on.
    XSERV_LOG_WARNING = 1,
    /// A choice or an action of the library: device, sizes, times.
    XSERV_LOG_INFO = 2,
    /// Details for finding faults.
    XSERV_LOG_DEBUG = 3,
}

/// Why a generation ended.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum xserv_finish_reason {
    /// The model gave an end token, or one of the request's stop tokens. It is the last id of the
    /// result; the text does not show it.
    XSERV_FINISH_STOP_TOKEN = 0,
    /// One of the request's stop strings was generated. The text ends right before it.
    XSERV_FINISH_STOP_STRING = 1,
    /// max_tokens were generated.
    XSERV_FINISH_MAX_TOKENS = 2,
    /// The context is full.
    XSERV_FINISH_CONTEXT_FULL = 3,
    /// The callback returned false.
    XSERV_FINISH_CALLBACK = 4,
    /// The request was cancelled, or the model was freed.
    XSERV_FINISH_CANCELLED = 5,
    /// The request's time limit (xserv_request.time_limit_ms) was reached.
    XSERV_FINISH_DEADLINE = 6,
    /// The text is all that the request's constraint (xserv_request.constraint_kind) asks for, and nothing
    /// can follow.
    XSERV_FINISH_COMPLETE = 7,
}

/// Returns the name of an xserv_finish_reason, for example "XSERV_FINISH_MAX_TOKENS", as a static
/// string; "unknown finish reason" for a value that this version does not have.
#[no_mangle]
pub extern "C" fn xserv_finish_reason_name(finish_reason: u32) -> *const c_char {
    let name = match finish_reason {
        0 => c"XSERV_FINISH_STOP_TOKEN",
        1 => c"XSERV_FINISH_STOP_STRING",
        2 => c"XSERV_FINISH_MAX_TOKENS",
        3 => c"XSERV_FINISH_CONTEXT_FULL",
        4 => c"XSERV_FINISH_CALLBACK",
        5 => c"XSERV_FINISH_CANCELLED",
        6 => c"XSERV_FINISH_DEADLINE",
        7 => c"XSERV_FINISH_COMPLETE",
        _ => c"unknown finish reason",
    };
    name.as_ptr()
}
