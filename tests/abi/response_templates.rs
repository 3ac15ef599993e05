//! Answers taken apart by the response template in a model's tokenizer_config.json, and constraints
//! that begin after a thought, through the C interface.

use std::ffi::{c_char, CStr};
use std::ptr;

use serde_json::{json, Value};
use xserv::ffi::xserv_answer_format::*;
use xserv::ffi::xserv_constraint_kind::*;
use xserv::ffi::*;

use crate::client::*;
use crate::files::TempDir;

const MESSAGES: &CStr = c"[{\"role\": \"user\", \"content\": \"What is the weather?\"}]";
const TOOLS: &CStr = c"[{\"name\": \"weather\", \"parameters\": {\"type\": \"object\", \"properties\": {\"days\": {\"type\": \"integer\"}}}}]";
const TURNS: &str = "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\
    {%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";
/// With marks that are special tokens of the repository's model.
const ANSWER: &str = "<|object_ref_start|>\nLet me see.\n<|object_ref_end|>\n I look.\n<|box_start|>weather{\"days\": \"2\", \"city\": \"Rome\"}<|box_end|>";

fn template() -> Value {
    let call =
        json!({"type": "function", "function": {"name": "{name}", "arguments": "{content}"}});
    json!({"start_anchor": "<|im_start|>assistant\n", "fields": {
        "thinking": {"open": "<|object_ref_start|>", "close": "<|object_ref_end|>"},
        "tool_calls": {"open_pattern": r"<\|box_start\|>(?P<name>\w+)", "close": "<|box_end|>", "repeats": true,
            "content": "json", "transform": call},
        "content": {},
    }})
}

/// Returns the repository's model with a chat template that writes no calls, and this response
/// template.
fn with_template(response_template: Value) -> (TempDir, Model) {
    let folder = TempDir::new();
    for entry in std::fs::read_dir(tiny()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    std::fs::write(folder.path().join("chat_template.jinja"), TURNS).unwrap();
    let config = folder.path().join("tokenizer_config.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    json["response_template"] = response_template;
    std::fs::remove_file(&config).unwrap();
    std::fs::write(&config, json.to_string()).unwrap();
    let model = Model::open(folder.path());
    (folder, model)
}

struct Parts {
    text: String,
    reasoning: String,
    content: String,
    calls: Vec<(String, String, u32)>,
}

fn text_of(text: *const c_char) -> String {
    match text.is_null() {
        true => String::new(),
        false => unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned(),
    }
}

fn parts_of(result: *mut xserv_result) -> Parts {
    let mut info: xserv_result_info = unsafe { std::mem::zeroed() };
    info.struct_size = size_of::<xserv_result_info>();
    check(unsafe { xserv_result_get_info(result, &mut info) }).unwrap();
    let calls = (0..info.num_tool_calls).map(|at| unsafe { &*info.tool_calls.add(at) });
    let calls =
        calls.map(|call| (text_of(call.name), text_of(call.arguments_json), call.is_complete));
    let parts = Parts {
        text: text_of(info.text),
        reasoning: text_of(info.reasoning),
        content: text_of(info.content),
        calls: calls.collect(),
    };
    xserv_result_free(result);
    parts
}

fn generate(model: &Model, request: &xserv_request) -> Parts {
    let mut result = ptr::null_mut();
    check(unsafe { xserv_generate(model.0, request, None, ptr::null_mut(), &mut result) }).unwrap();
    parts_of(result)
}

fn parse(model: &Model, text: &str, prompt: Option<&CStr>) -> Parts {
    let mut options: xserv_parse_options = unsafe { std::mem::zeroed() };
    unsafe { xserv_parse_options_init(&mut options, size_of_val(&options)) };
    options.prompt = prompt.map_or(ptr::null(), CStr::as_ptr);
    let mut result = ptr::null_mut();
    let bytes = text.as_bytes();
    check(unsafe {
        xserv_parse_response(model.0, bytes.as_ptr().cast(), bytes.len(), &options, &mut result)
    })
    .unwrap();
    parts_of(result)
}

#[test]
fn answers_are_read_by_the_response_template() {
    let (_folder, model) = with_template(template());
    let ids = model.tokenize(&format!("{ANSWER}<|im_end|>")).unwrap();
    let chat = xserv_request {
        messages_json: MESSAGES.as_ptr(),
        tools_json: TOOLS.as_ptr(),
        first_tokens: ids.as_ptr(),
        num_first_tokens: ids.len(),
        max_tokens: 200,
        temperature: 0.0,
        answer_format: XSERV_ANSWER_AUTO as u32,
        ..request()
    };
    let found = generate(&model, &chat);
    assert_eq!(found.reasoning, "Let me see.");
    assert_eq!(found.content, "I look.");
    let call = ("weather".to_owned(), "{\"days\":2,\"city\":\"Rome\"}".to_owned(), 1);
    assert_eq!(found.calls, [call]);
    // Special tokens are not shown, but say what is what.
    assert!(!found.text.contains("<|box_start|>") && found.text.contains("weather{"));

    // Without tools nothing is a call; a format that is named has no template.
    let without = xserv_request { tools_json: ptr::null(), ..chat };
    let found = generate(&model, &without);
    assert_eq!((found.reasoning.as_str(), found.calls.len()), ("Let me see.", 0));
    assert!(found.content.contains("weather{"), "{}", found.content);
    let named = xserv_request { answer_format: XSERV_ANSWER_JSON_TAGS as u32, ..chat };
    let found = generate(&model, &named);
    assert_eq!((found.reasoning.as_str(), found.calls.len()), ("", 0));
}

#[test]
fn texts_are_taken_apart_by_the_response_template() {
    let (_folder, model) = with_template(template());
    let found = parse(&model, ANSWER, None);
    assert_eq!((found.reasoning.as_str(), found.content.as_str()), ("Let me see.", "I look."));
    // Without tools arguments keep their types.
    assert_eq!(found.calls[0].1, "{\"days\":\"2\",\"city\":\"Rome\"}");
    let prompt = c"<|im_start|>assistant\n<|object_ref_start|>";
    for prompt in [Some(prompt), None] {
        let found = parse(&model, "Hm.<|object_ref_end|>Yes.", prompt);
        assert_eq!((found.reasoning.as_str(), found.content.as_str()), ("Hm.", "Yes."));
    }
}

#[test]
fn templates_that_are_not_supported_change_nothing() {
    let mut bad = template();
    bad["fields"]["tool_calls"]["close_pattern"] = json!("(?=a)");
    let (_folder, model) = with_template(bad);
    let text = "<think>Hm.</think>a<|box_start|>";
    let found = parse(&model, text, None);
    assert_eq!((found.reasoning.as_str(), found.content.as_str()), ("Hm.", "a<|box_start|>"));
}

#[test]
fn constraints_begin_after_a_thought_that_the_prompt_has_begun() {
    let model = Model::open(&tiny());
    let prompt = c"<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n<think>\n";
    let close = model.tokenize("</think>").unwrap()[0];
    let biases = [xserv_logit_bias { token_id: close, bias: 16.0 }];
    let forms = [
        (XSERV_CONSTRAINT_JSON_SCHEMA, "{\"type\": \"integer\", \"minimum\": 0, \"maximum\": 9}"),
        (XSERV_CONSTRAINT_REGEX, "[0-9]"),
        (XSERV_CONSTRAINT_GRAMMAR, "start: digit\ndigit: /[0-9]/"),
    ];
    for (seed, (kind, text)) in forms.iter().enumerate() {
        let request = xserv_request {
            prompt: prompt.as_ptr(),
            constraint_kind: *kind as u32,
            constraint: text.as_ptr() as *const c_char,
            constraint_len: text.len(),
            logit_bias: biases.as_ptr(),
            num_logit_bias: biases.len(),
            max_tokens: 400,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            seed: seed as u64,
            answer_format: XSERV_ANSWER_AUTO as u32,
            ..request()
        };
        for _ in 0..2 {
            let found = generate(&model, &request);
            assert!(found.text.contains("</think>"), "{}", found.text);
            let digit: u32 = found.content.parse().unwrap_or_else(|_| panic!("{}", found.text));
            assert!(digit < 10);
        }
        // A text that is not taken apart has the form from its first token on.
        let plain = xserv_request { answer_format: XSERV_ANSWER_NONE as u32, ..request };
        let digit: u32 = generate(&model, &plain).text.trim().parse().unwrap();
        assert!(digit < 10);
    }
}
