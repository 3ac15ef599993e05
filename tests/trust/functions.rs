//! The functions of the headers, as their declarations say: names, parameters and results. A function
//! that is added to the library is in every test that goes over them all.

use std::sync::OnceLock;

use crate::client::root;

/// A parameter: its type, `xserv_model *` without `const` and `struct`, and its name.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    pub kind: String,
    pub name: String,
    pub is_const: bool,
}

impl Parameter {
    /// Returns the type that a pointer of this many levels points to.
    pub fn pointee(&self, levels: usize) -> Option<&str> {
        let stars = self.kind.matches('*').count();
        (stars == levels).then(|| self.kind.trim_end_matches([' ', '*']))
    }

    pub fn is_float(&self) -> bool {
        self.kind == "float"
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    pub name: String,
    /// `xserv_status`, `void`, `char *` and so on.
    pub result: String,
    pub parameters: Vec<Parameter>,
    /// The address in this process.
    pub address: usize,
}

impl Function {
    pub fn gives_status(&self) -> bool {
        self.result == "xserv_status"
    }

    /// Returns the handle that the function frees.
    pub fn frees(&self) -> Option<&str> {
        self.name.ends_with("_free").then(|| self.parameters[0].pointee(1).unwrap())
    }
}

/// The kinds of handles.
pub const HANDLES: [&str; 11] = [
    "xserv_model",
    "xserv_inspection",
    "xserv_detokenizer",
    "xserv_text",
    "xserv_tokens",
    "xserv_messages",
    "xserv_cancel_token",
    "xserv_result",
    "xserv_submission",
    "xserv_context",
    "xserv_owned_tensor",
];

fn spaced(kind: &str) -> String {
    let words: Vec<&str> =
        kind.split_whitespace().filter(|w| !["const", "struct", "enum"].contains(w)).collect();
    words.join(" ")
}

fn parameter(text: &str) -> Parameter {
    let at = text.rfind([' ', '*']).expect("a type and a name") + 1;
    let (kind, name) = text.split_at(at);
    Parameter {
        kind: spaced(kind),
        name: name.to_string(),
        is_const: kind.trim_start().starts_with("const"),
    }
}

fn parse(header: &str) -> Vec<Function> {
    let mut code = String::new();
    for line in header.lines() {
        // Declarations begin at the margin, and go on far from it; fields are two blanks from it.
        let is_declaration = !line.starts_with(' ') || line.starts_with("    ");
        if is_declaration && !line.trim_start().starts_with(['*', '/', '#']) {
            code.push_str(line);
            code.push(' ');
        }
    }
    let mut functions = Vec::new();
    for declaration in code.split([';', '{', '}']) {
        let Some((head, rest)) = declaration.split_once('(') else { continue };
        let Some((parameters, "")) = rest.split_once(')').map(|(p, end)| (p, end.trim())) else {
            continue;
        };
        let head = head.replace("XSERV_MUST_USE", "");
        let head = head.trim();
        let at = head.rfind([' ', '*']).unwrap_or(0) + 1;
        let (result, name) = head.split_at(at.min(head.len()));
        if !name.starts_with("xserv_") || head.contains("typedef") || head.contains("static") {
            continue;
        }
        functions.push(Function {
            address: address(name),
            name: name.to_string(),
            result: spaced(result),
            parameters: match parameters.trim() {
                "void" => Vec::new(),
                list => list.split(',').map(|p| parameter(p.trim())).collect(),
            },
        });
    }
    functions
}

/// Every function of both headers.
pub fn functions() -> Vec<Function> {
    let read = |name| std::fs::read_to_string(root().join("include").join(name)).unwrap();
    let mut functions = parse(&read("xserv.h"));
    functions.extend(parse(&read("xserv_ops.h")));
    functions
}

macro_rules! addresses {
    ($($name:ident)*) => {
        vec![$((stringify!($name), xserv::ffi::$name as *const () as usize)),*]
    };
}

/// Returns the addresses of the functions in this process.
fn addresses() -> &'static [(&'static str, usize)] {
    static ALL: OnceLock<Vec<(&'static str, usize)>> = OnceLock::new();
    ALL.get_or_init(|| {
        addresses! {
            xserv_version xserv_abi_version xserv_finish_reason_name xserv_last_error
            xserv_status_name xserv_load_options_init xserv_load xserv_model_free
            xserv_model_get_info xserv_inspect xserv_inspection_get_info xserv_inspection_free
            xserv_plan xserv_tokenize_options_init xserv_tokenize xserv_tokens_data
            xserv_tokens_free xserv_detokenize xserv_text_data xserv_text_free
            xserv_detokenizer_new xserv_detokenizer_push xserv_detokenizer_finish
            xserv_detokenizer_free xserv_chat_options_init xserv_apply_chat_template xserv_tokenize_chat
            xserv_parse_options_init xserv_parse_response
            xserv_messages_new xserv_messages_add xserv_messages_add_tool_result
            xserv_messages_add_json xserv_messages_remove xserv_messages_count
            xserv_messages_json xserv_messages_free
            xserv_request_init xserv_cancel_token_new xserv_cancel_token_cancel
            xserv_cancel_token_free xserv_generate xserv_result_get_info xserv_result_get_sample
            xserv_result_text xserv_result_free xserv_submit_options_init xserv_submit xserv_next
            xserv_poll xserv_cancel xserv_submission_take_result xserv_submission_free
            xserv_logits_options_init xserv_logits xserv_score_options_init xserv_score
            xserv_model_get_stats xserv_cuda_device_count
            xserv_cuda_device_get_info xserv_context_options_init xserv_context_new
            xserv_context_get_device xserv_context_synchronize xserv_context_trim
            xserv_context_get_memory_stats xserv_context_free xserv_tensor_dtype_of
            xserv_tensor_device_of xserv_owned_tensor_new xserv_owned_tensor_new_pinned
            xserv_owned_tensor_view xserv_owned_tensor_to_dlpack
            xserv_owned_tensor_to_dlpack_versioned xserv_owned_tensor_free xserv_op_copy xserv_op_rms_norm
            xserv_op_add_rms_norm xserv_op_layer_norm xserv_op_softmax xserv_op_embedding
            xserv_op_rope_table xserv_op_rope xserv_op_argmax xserv_op_top_k xserv_op_gelu
            xserv_op_gelu_tanh xserv_op_silu xserv_op_silu_mul xserv_op_add xserv_op_mul
            xserv_op_cast xserv_op_transpose xserv_op_quantise
            xserv_op_dequantise xserv_op_linear_quantised xserv_gemm_options_init xserv_op_gemm
            xserv_op_gemm_backward xserv_grad_check_options_init xserv_grad_check
            xserv_attention_options_init xserv_op_attention xserv_self_test
        }
    })
}

fn address(name: &str) -> usize {
    let found = addresses().iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("{name} is not in the list of addresses")).1
}

#[test]
fn every_function_of_the_headers_is_known() {
    let functions = functions();
    let declared: Vec<&str> = functions.iter().map(|f| f.name.as_str()).collect();
    for (name, _) in addresses() {
        assert!(declared.contains(name), "{name} is not in the headers");
    }
    assert_eq!(declared.len(), addresses().len());
    let next = functions.iter().find(|f| f.name == "xserv_next").unwrap();
    let named = |kind: &str, name: &str, is_const| Parameter {
        kind: kind.to_string(),
        name: name.to_string(),
        is_const,
    };
    assert_eq!(
        next.parameters,
        [
            named("xserv_submission *", "submission", true),
            named("uint32_t", "timeout_ms", false),
            named("xserv_event *", "event", false),
        ]
    );
    assert!(next.gives_status());
}
