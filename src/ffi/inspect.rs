//! Inspection: describes a model folder without loading it.

#![allow(non_camel_case_types)]

use std::ffi::c_char;
use std::sync::Arc;

use super::guard::{
    guard, guard_or, guard_work, text_argument, with_nul, write_struct, GrowingStruct, Out,
    NUL_TERMINATED,
};
use super::handle::HandleTable;
use super::model::dtype_code;
use super::status::xserv_status;
use crate::engine::{self, Inspection};

/// The findings about a model folder. It is immutable; any number of threads may read it.
pub struct xserv_inspection {
    _opaque: [u8; 0],
}

/// A description of a model folder. Set struct_size, then call xserv_inspection_get_info().
/// Pointers belong to the inspection and are valid until it is freed. Unknown numbers are 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_inspection_info {
    /// sizeof(xserv_inspection_info), set by the caller.
    pub struct_size: usize,
    /// The folder.
    pub path: *const c_char,
    /// The architecture as config.json names it, for example "Qwen3ForCausalLM"; empty if it does
    /// not.
    pub architecture: *const c_char,
    /// Why xserv_load would refuse the folder; empty if it would not.
    pub unsupported_reason: *const c_char,
    /// Why text can't be tokenized; empty if it can. A tokenizer.json that is damaged or not supported keeps
    /// the model from being loaded; a missing one does not.
    pub tokenizer_problem: *const c_char,
    /// Why messages can't be rendered; empty if they can. This never keeps a model from being loaded.
    pub chat_template_problem: *const c_char,
    /// The stored element types and their bytes, for example "bf16: 1192099840"; several are
    /// separated by ", ".
    pub stored_dtypes: *const c_char,
    /// Number of weights (tied embeddings count once).
    pub num_parameters: u64,
    /// Bytes that the weights take when loaded with XSERV_DTYPE_AUTO.
    pub weights_bytes: u64,
    /// Bytes of KV cache for one token when loaded with XSERV_DTYPE_AUTO.
    pub kv_bytes_per_token: u64,
    /// The longest context that the config allows, in tokens.
    pub max_context_tokens: u64,
    /// The xserv_dtype that XSERV_DTYPE_AUTO would choose.
    pub dtype: u32,
    /// Length of a row of logits.
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
    /// 1: xserv_load accepts the folder (memory permitting); 0: see unsupported_reason.
    pub supported: u8,
    /// 1: text can be tokenized; 0: see tokenizer_problem.
    pub has_tokenizer: u8,
    /// 1: messages can be rendered; 0: see chat_template_problem.
    pub has_chat_template: u8,
    /// Unused, 0.
    pub reserved: u8,
}

// SAFETY: repr(C), struct_size first, integers and pointers only.
unsafe impl GrowingStruct for xserv_inspection_info {
    const SIZES: &'static [usize] = &[120];
    const NAME: &'static str = "xserv_inspection_info";
    const HOW: &'static str = "set it to sizeof(xserv_inspection_info)";
    fn defaults() -> Self {
        let empty = c"".as_ptr();
        xserv_inspection_info {
            struct_size: size_of::<Self>(),
            path: empty,
            architecture: empty,
            unsupported_reason: empty,
            tokenizer_problem: empty,
            chat_template_problem: empty,
            stored_dtypes: empty,
            num_parameters: 0,
            weights_bytes: 0,
            kv_bytes_per_token: 0,
            max_context_tokens: 0,
            dtype: 0,
            vocab_size: 0,
            hidden_size: 0,
            num_layers: 0,
            num_heads: 0,
            num_kv_heads: 0,
            head_dim: 0,
            supported: 0,
            has_tokenizer: 0,
            has_chat_template: 0,
            reserved: 0,
        }
    }
}

struct InspectionObject {
    inspection: Inspection,
    path: Vec<u8>,
    architecture: Vec<u8>,
    unsupported_reason: Vec<u8>,
    tokenizer_problem: Vec<u8>,
    chat_template_problem: Vec<u8>,
    stored_dtypes: Vec<u8>,
}

static INSPECTIONS: HandleTable<InspectionObject> = HandleTable::new(7, "inspection");

/// Looks at a model folder (or cached repo id, as in xserv_load) without loading it: reads the configs, the
/// tokenizer and the headers of the weight files, and no weights, with one exception. If the config declares
/// the output matrix tied to the embedding and the files hold both all the same, the two are compared, up to
/// the first difference, on this thread (600 MB and a fraction of a second for Qwen3-0.6B, which is published
/// so): matrices that differ, or that take more than 8 GiB each, are two. A folder that xserv_load would
/// refuse is a success here: the inspection says why.
///
/// path: NUL-terminated UTF-8. inspection: receives a handle that the caller frees with
/// xserv_inspection_free().
///
/// Errors: XSERV_STATUS_NOT_FOUND (no such folder or cached repo), XSERV_STATUS_INVALID_ARGUMENT (a path
/// that is not a folder), XSERV_STATUS_IO (a file could not be read: no permission, too many open
/// files, a failing disk), XSERV_STATUS_OUT_OF_MEMORY. The last two say nothing about the folder.
///
/// # Safety
/// `path` ends in a NUL; `inspection` is writable.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_inspect(
    path: *const c_char,
    inspection: *mut *mut xserv_inspection,
) -> xserv_status {
    guard_work(|| {
        // SAFETY: by the contract above.
        let out = unsafe { Out::new(inspection, "inspection") }?;
        // SAFETY: as above.
        let path = unsafe { text_argument(path, NUL_TERMINATED, "path") }?;
        let inspection = engine::inspect(path)?;
        let object = InspectionObject {
            path: with_nul(&inspection.path.to_string_lossy())?,
            architecture: with_nul(&inspection.architecture)?,
            unsupported_reason: with_nul(inspection.reason.as_deref().unwrap_or(""))?,
            tokenizer_problem: with_nul(inspection.tokenizer_problem.as_deref().unwrap_or(""))?,
            chat_template_problem: with_nul(
                inspection.chat_template_problem.as_deref().unwrap_or(""),
            )?,
            stored_dtypes: with_nul(&inspection.stored_dtypes)?,
            inspection,
        };
        out.set(INSPECTIONS.insert(Arc::new(object))?);
        Ok(())
    })
}

/// Describes an inspection.
///
/// info: struct_size must be set. Its pointers belong to the inspection.
///
/// # Safety
/// `info` is writable for the struct_size that it claims.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_inspection_get_info(
    inspection: *const xserv_inspection,
    info: *mut xserv_inspection_info,
) -> xserv_status {
    guard(|| {
        let object = INSPECTIONS.get(inspection)?;
        let i = &object.inspection;
        let shape = i.shape.unwrap_or_default();
        let value = xserv_inspection_info {
            struct_size: size_of::<xserv_inspection_info>(),
            path: object.path.as_ptr() as *const c_char,
            architecture: object.architecture.as_ptr() as *const c_char,
            unsupported_reason: object.unsupported_reason.as_ptr() as *const c_char,
            tokenizer_problem: object.tokenizer_problem.as_ptr() as *const c_char,
            chat_template_problem: object.chat_template_problem.as_ptr() as *const c_char,
            stored_dtypes: object.stored_dtypes.as_ptr() as *const c_char,
            num_parameters: i.num_parameters,
            weights_bytes: i.weights_bytes,
            kv_bytes_per_token: i.kv_bytes_per_token,
            max_context_tokens: i.max_context_tokens,
            dtype: i.dtype.map_or(0, dtype_code),
            vocab_size: shape.vocab_size as u32,
            hidden_size: shape.hidden_size as u32,
            num_layers: shape.num_layers as u32,
            num_heads: shape.num_heads as u32,
            num_kv_heads: shape.num_kv_heads as u32,
            head_dim: shape.head_dim as u32,
            supported: u8::from(i.reason.is_none()),
            has_tokenizer: u8::from(i.tokenizer_problem.is_none()),
            has_chat_template: u8::from(i.chat_template_problem.is_none()),
            reserved: 0,
        };
        // SAFETY: by the contract above.
        unsafe { write_struct(info, "info", &value) }
    })
}

/// Frees an inspection; NULL is allowed.
#[no_mangle]
pub extern "C" fn xserv_inspection_free(inspection: *mut xserv_inspection) {
    guard_or((), || INSPECTIONS.remove(inspection).map(drop))
}
