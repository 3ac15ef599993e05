//! Planning: the memory that loading a model would take.

#![allow(non_camel_case_types)]

use std::ffi::c_char;

use super::guard::{
    checked_size, guard_work, read_struct, text_argument, write_struct, GrowingStruct,
    NUL_TERMINATED,
};
use super::model::{dtype_code, engine_options, xserv_load_options};
use super::status::xserv_status;
use super::types::xserv_device_kind;
use crate::engine;

/// The memory that a model would take on its device. Set struct_size, then call xserv_plan(). All
/// sizes are of that device's memory: the GPU's for a model on a GPU, else the host's.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_memory_plan {
    /// sizeof(xserv_memory_plan), set by the caller.
    pub struct_size: usize,
    /// The xserv_device_kind on which the model would run: XSERV_DEVICE_CPU or XSERV_DEVICE_CUDA.
    pub device_kind: u32,
    /// The index of the GPU; 0 on the CPU.
    pub device_index: u32,
    /// The xserv_dtype that is computed with (see xserv_load_options), never XSERV_DTYPE_AUTO.
    pub dtype: u32,
    /// 1: total_bytes is no more than memory_bytes, or the available memory is unknown; 0: it is
    /// more.
    pub fits: u8,
    /// 1: text can be tokenized; 0: the folder has no tokenizer.json, so that only token ids would
    /// work.
    pub has_tokenizer: u8,
    /// Unused, 0.
    pub reserved: [u8; 2],
    /// Bytes of the weights, on a GPU with the tables of positions, as later in xserv_model_info.
    pub weights_bytes: u64,
    /// The most bytes that activations and scratch memory of the operators take while requests run.
    /// On a GPU they are all taken at load, so that a run takes what was planned:
    /// xserv_model_stats.peak_memory_bytes becomes total_bytes, apart from rounding. Memory that
    /// the CUDA driver takes for itself, its kernels and graphs (a few hundred MB) is not counted.
    pub workspace_bytes: u64,
    /// Bytes of KV cache for one token.
    pub kv_bytes_per_token: u64,
    /// Number of tokens that the KV cache would hold, of all requests together; 0 if the model does
    /// not fit.
    pub kv_cache_tokens: u64,
    /// Longest context of one request, in tokens; 0 if the model does not fit.
    pub max_context_tokens: u64,
    /// weights_bytes + workspace_bytes + kv_cache_tokens * kv_bytes_per_token. If the model does
    /// not fit, the total with the smallest KV cache that the options allow.
    pub total_bytes: u64,
    /// The smallest max_memory_bytes that xserv_load would accept with these options.
    pub minimum_bytes: u64,
    /// The bytes available: options.max_memory_bytes, or the memory that is available at the moment
    /// if that is less or there is no such limit; 0 if neither is known.
    pub memory_bytes: u64,
}

// SAFETY: repr(C), struct_size first, integers only.
unsafe impl GrowingStruct for xserv_memory_plan {
    const SIZES: &'static [usize] = &[88];
    const NAME: &'static str = "xserv_memory_plan";
    const HOW: &'static str = "set it to sizeof(xserv_memory_plan)";
    fn defaults() -> Self {
        xserv_memory_plan {
            struct_size: size_of::<Self>(),
            device_kind: 0,
            device_index: 0,
            dtype: 0,
            fits: 0,
            has_tokenizer: 0,
            reserved: [0; 2],
            weights_bytes: 0,
            workspace_bytes: 0,
            kv_bytes_per_token: 0,
            kv_cache_tokens: 0,
            max_context_tokens: 0,
            total_bytes: 0,
            minimum_bytes: 0,
            memory_bytes: 0,
        }
    }
}

/// Tells what xserv_load would take with the same options, from the configs and the headers of the
/// weight files, with random_weights from the configs alone. No GPU is needed to plan for one, and no
/// weights are read, but for an output matrix that is stored although it is declared tied: that is
/// compared with the embedding, as in xserv_inspect. It is the same computation by which xserv_load
/// sizes the KV cache, so that the two agree as long as the memory that is available does not change.
///
/// To plan for a GPU of a given size, set device_kind to XSERV_DEVICE_CUDA and max_memory_bytes to its
/// memory, less what the driver needs (a few hundred MB). Where there is a GPU, it is asked for its
/// free memory, which starts it in this process; where there is none, or no driver, only
/// max_memory_bytes is known. XSERV_DEVICE_AUTO plans for the device that xserv_load would choose
/// on this machine. Progress and log callbacks of the options are not called. The file of kept_weights is
/// neither read nor made: what is planned does not depend on it.
///
/// A model that does not fit is a success here: see fits, minimum_bytes and memory_bytes. (On the
/// CPU without max_memory_bytes, xserv_load tries all the same: the system may have more memory to
/// give than it reports.)
///
/// Not counted: the tokenizer, tables of positions on the CPU and the logits of requests (some tens
/// of MB of the host); the driver's own memory on a GPU (kernels, its context); while a model is
/// loaded to a GPU, up to 64 MiB of pinned host memory.
///
/// path, options: as in xserv_load. plan: struct_size must be set; written on success.
///
/// Errors: those of xserv_load for a folder or options that it refuses regardless of memory:
/// XSERV_STATUS_NOT_FOUND, XSERV_STATUS_IO, XSERV_STATUS_INVALID_ARGUMENT,
/// XSERV_STATUS_INVALID_FILE, XSERV_STATUS_UNSUPPORTED.
///
/// # Safety
/// `path` ends in a NUL; `options` is NULL or readable for its struct_size, with texts that are
/// NULL or end in a NUL; `plan` is writable for the struct_size that it claims.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_plan(
    path: *const c_char,
    options: *const xserv_load_options,
    plan: *mut xserv_memory_plan,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        unsafe { checked_size(plan.cast_const(), "plan") }?;
        // SAFETY: as above.
        let path = unsafe { text_argument(path, NUL_TERMINATED, "path") }?;
        // SAFETY: as above.
        let options = unsafe { read_struct(options, "options") }?;
        // SAFETY: as above.
        let found = engine::plan(path, &unsafe { engine_options(&options) }?)?;
        let device = if found.on_device {
            xserv_device_kind::XSERV_DEVICE_CUDA
        } else {
            xserv_device_kind::XSERV_DEVICE_CPU
        };
        let value = xserv_memory_plan {
            struct_size: size_of::<xserv_memory_plan>(),
            device_kind: device as u32,
            device_index: if found.on_device { options.device_index } else { 0 },
            dtype: dtype_code(found.dtype),
            fits: u8::from(found.fits),
            has_tokenizer: u8::from(found.has_tokenizer),
            reserved: [0; 2],
            weights_bytes: found.weights_bytes,
            workspace_bytes: found.workspace_bytes,
            kv_bytes_per_token: found.kv_bytes_per_token,
            kv_cache_tokens: found.kv_cache_tokens,
            max_context_tokens: found.max_context_tokens,
            total_bytes: found.total_bytes,
            minimum_bytes: found.minimum_bytes,
            memory_bytes: found.memory_bytes.unwrap_or(0),
        };
        // SAFETY: by the contract above.
        unsafe { write_struct(plan, "plan", &value) }
    })
}
