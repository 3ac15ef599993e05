//! Answers that must be the call of a tool, or must not, by what comes out of the repository's
//! model, which knows little of tools.

use std::ffi::{c_char, CStr};
use std::path::Path;
use std::ptr;

use serde_json::{json, Value};
use xserv::ffi::xserv_answer_format::*;
use xserv::ffi::xserv_event_kind::*;
use xserv::ffi::xserv_finish_reason::*;
use xserv::ffi::xserv_status::*;
use xserv::ffi::xserv_tool_choice::*;
use xserv::ffi::*;

use crate::batching::Submission;
use crate::client::*;
use crate::files::TempDir;

const MESSAGES: &CStr = c"[{\"role\": \"user\", \"content\": \"What is the weather?\"}]";
const TOOLS: &CStr = c"[{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"parameters\": {\"type\": \"object\", \"properties\": {\"city\": {\"enum\": [\"Rome\", \"Oslo\"]}, \"days\": {\"$ref\": \"#/$defs/days\"}}, \"required\": [\"city\", \"days\"], \"additionalProperties\": false, \"$defs\": {\"days\": {\"type\": \"integer\", \"minimum\": 1, \"maximum\": 14}}}}}, {\"name\": \"clock\", \"parameters\": {\"type\": \"object\", \"properties\": {\"zone\": {\"type\": \"boolean\"}}, \"required\": [\"zone\"], \"additionalProperties\": false}}]";
const NO_THOUGHT: &CStr = c"{\"enable_thinking\": false}";

/// A template whose calls are tags of parameters, as Qwen3-Coder's.
const XML: &str = "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}\
    {%- for call in message.tool_calls or [] %}{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}\
    {%- for key, value in call.function.arguments | items %}\
    {{- '<parameter=' + key + '>\\n' + (value | tojson) + '\\n</parameter>\\n' }}{%- endfor %}\
    {{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}\
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}\
    {%- endif %}{%- endif %}";
/// Bare JSON, as Llama 3's.
const BARE: &str = "{%- for message in messages %}\
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content }}\
    {%- for call in message.tool_calls or [] %}\
    {{- '{\"name\": \"' + call.function.name + '\", \"parameters\": ' + (call.function.arguments | tojson) + '}' }}\
    {%- endfor %}{{- '<|eot_id|>' }}{%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}";
/// A list after a mark, as Mistral's.
const MARKED: &str = "{%- for message in messages %}\
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}\
    {%- else %}{{- message.content }}{%- for call in message.tool_calls or [] %}\
    {{- '[TOOL_CALLS] [{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}\
    {{- (call.function.arguments | tojson) + ', \"id\": \"' + call.id + '\"}]' }}{%- endfor %}{%- endif %}{%- endfor %}\
    {%- if add_generation_prompt %}{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}";

/// Returns the repository's model with another template.
fn with_template(source: &str) -> (TempDir, Model) {
    let folder = TempDir::new();
    for entry in std::fs::read_dir(tiny()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    std::fs::write(folder.path().join("chat_template.jinja"), source).unwrap();
    let model = Model::open(Path::new(folder.path()));
    (folder, model)
}

fn chat(choice: xserv_tool_choice, name: Option<&CStr>, seed: u64) -> xserv_request {
    xserv_request {
        messages_json: MESSAGES.as_ptr(),
        tools_json: TOOLS.as_ptr(),
        template_variables_json: NO_THOUGHT.as_ptr(),
        tool_choice: choice as u32,
        tool_choice_name: name.map_or(ptr::null(), CStr::as_ptr),
        answer_format: XSERV_ANSWER_AUTO as u32,
        max_tokens: 300,
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        seed,
        ..request()
    }
}

/// Biases against blanks, of which the repository's model, that was never taught to call tools,
/// makes many between the parts of JSON.
fn against_blanks(model: &Model) -> Vec<xserv_logit_bias> {
    let is_blank = |id: &u32| {
        let text = model.detokenize(&[*id], false).unwrap();
        text.chars().all(char::is_whitespace)
    };
    let text_tokens = 0..2022;
    let blanks = text_tokens.filter(is_blank);
    blanks.map(|token_id| xserv_logit_bias { token_id, bias: -50.0 }).collect()
}

fn with_biases(request: xserv_request, biases: &[xserv_logit_bias]) -> xserv_request {
    xserv_request { logit_bias: biases.as_ptr(), num_logit_bias: biases.len(), ..request }
}

fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
}

struct Found {
    text: String,
    reasoning: String,
    content: String,
    reason: u32,
    calls: Vec<(String, String, u32)>,
}

/// Returns the samples of a request.
fn generate(model: &Model, request: &xserv_request) -> Vec<Found> {
    let mut result = ptr::null_mut();
    check(unsafe { xserv_generate(model.0, request, None, ptr::null_mut(), &mut result) }).unwrap();
    let found = (0..request.num_samples).map(|sample| {
        let mut info: xserv_result_info = unsafe { std::mem::zeroed() };
        info.struct_size = size_of::<xserv_result_info>();
        check(unsafe { xserv_result_get_sample(result, sample as usize, &mut info) }).unwrap();
        let calls = (0..info.num_tool_calls).map(|at| unsafe { *info.tool_calls.add(at) });
        Found {
            text: text_of(info.text),
            reasoning: text_of(info.reasoning),
            content: text_of(info.content),
            reason: info.finish_reason,
            calls: calls
                .map(|it| (text_of(it.name), text_of(it.arguments_json), it.is_complete))
                .collect(),
        }
    });
    let found = found.collect();
    xserv_result_free(result);
    found
}

/// Checks that an answer is one whole call that its tool allows, and returns the tool.
fn check_call(found: &Found) -> String {
    let text = &found.text;
    let whole = [XSERV_FINISH_COMPLETE as u32, XSERV_FINISH_STOP_TOKEN as u32];
    assert!(whole.contains(&found.reason), "{text}");
    assert_eq!(found.content, "", "{text}");
    let [(name, arguments, is_complete)] = &found.calls[..] else { panic!("{text}") };
    assert_eq!(*is_complete, 1, "{text}");
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    match name.as_str() {
        "weather" => {
            assert_eq!(arguments.as_object().unwrap().len(), 2, "{text}");
            assert!(["Rome", "Oslo"].contains(&arguments["city"].as_str().unwrap()), "{text}");
            assert!((1..=14).contains(&arguments["days"].as_u64().unwrap()), "{text}");
        }
        "clock" => {
            assert_eq!(arguments.as_object().unwrap().len(), 1, "{text}");
            assert!(arguments["zone"].is_boolean(), "{text}");
        }
        other => panic!("{other}: {text}"),
    }
    name.clone()
}

#[test]
fn a_required_call_has_the_form_of_the_template_and_follows_its_schema() {
    let own = std::fs::read_to_string(tiny().join("chat_template.jinja")).unwrap();
    for (source, before) in [
        (own.as_str(), "<tool_call>"),
        (XML, "<tool_call>\n<function="),
        (BARE, "{"),
        (MARKED, "[TOOL_CALLS]"),
    ] {
        let (_folder, model) = with_template(source);
        let biases = against_blanks(&model);
        for seed in [0, 100] {
            let request = with_biases(chat(XSERV_TOOL_CHOICE_REQUIRED, None, seed), &biases);
            for found in generate(&model, &xserv_request { num_samples: 8, ..request }) {
                assert!(found.text.trim_start().starts_with(before), "{}", found.text);
                check_call(&found);
            }
        }
        for name in [c"weather", c"clock"] {
            let request = chat(XSERV_TOOL_CHOICE_NAMED, Some(name), 5);
            let found = &generate(&model, &with_biases(request, &biases))[0];
            assert_eq!(check_call(found), name.to_str().unwrap());
        }
    }
}

#[test]
fn a_thought_may_come_before_a_required_call() {
    let model = Model::open(&tiny());
    let call = "<tool_call>\n{\"name\": \"clock\", \"arguments\": {\"zone\": true}}\n</tool_call>";
    for (thought, reasoning) in [("", ""), ("<think>\nThe time.\n</think>\n\n", "The time.")] {
        let ids = model.tokenize(&format!("{thought}{call}")).unwrap();
        let request = xserv_request {
            template_variables_json: ptr::null(),
            first_tokens: ids.as_ptr(),
            num_first_tokens: ids.len(),
            ..chat(XSERV_TOOL_CHOICE_REQUIRED, None, 1)
        };
        let found = &generate(&model, &request)[0];
        assert_eq!(check_call(found), "clock");
        assert_eq!(found.reasoning, reasoning);
    }
    // After a thought that the prompt has ended there is none.
    let ids = model.tokenize("<think>").unwrap();
    let request = xserv_request {
        first_tokens: ids.as_ptr(),
        num_first_tokens: ids.len(),
        ..chat(XSERV_TOOL_CHOICE_REQUIRED, None, 1)
    };
    let error = model.generate(&request).unwrap_err();
    assert!(error.message.contains("first_tokens[0]"), "{error:?}");
}

#[test]
fn streams_tell_the_call() {
    let model = Model::open(&tiny());
    let biases = against_blanks(&model);
    for seed in 0..4 {
        let request = with_biases(chat(XSERV_TOOL_CHOICE_NAMED, Some(c"clock"), seed), &biases);
        let whole = &generate(&model, &request)[0];
        assert_eq!(check_call(whole), "clock");
        let mut options: xserv_submit_options = unsafe { std::mem::zeroed() };
        unsafe { xserv_submit_options_init(&mut options, size_of_val(&options)) };
        options.events = (1 << 11) - 2;
        let submission = Submission::new(&model, &request, &options).unwrap();
        let mut told = Vec::new();
        loop {
            let event = submission.next(XSERV_WAIT_FOREVER).unwrap();
            if event.kind == XSERV_EVENT_DONE as u32 {
                break;
            }
            told.push(event);
        }
        let count = |kind| told.iter().filter(|it| it.kind == kind as u32).count();
        assert_eq!(count(XSERV_EVENT_TOOL_CALL_BEGIN), 1, "{told:?}");
        assert_eq!(count(XSERV_EVENT_TOOL_CALL_END), 1, "{told:?}");
        assert_eq!(count(XSERV_EVENT_CONTENT), 0, "{told:?}");
        let pieces = told.iter().filter(|it| it.kind == XSERV_EVENT_TOOL_CALL_ARGUMENTS as u32);
        let arguments: String = pieces.map(|it| it.text.as_str()).collect();
        assert_eq!(arguments, whole.calls[0].1);
    }
}

#[test]
fn no_tool_is_shown_or_read_with_none() {
    let model = Model::open(&tiny());
    let call = "<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>";
    let ids = model.tokenize(&format!("{call}<|im_end|>")).unwrap();
    let none = xserv_request {
        first_tokens: ids.as_ptr(),
        num_first_tokens: ids.len(),
        ..chat(XSERV_TOOL_CHOICE_NONE, None, 1)
    };
    let found = &generate(&model, &none)[0];
    assert_eq!((found.calls.len(), found.content.as_str()), (0, call));
    let without = xserv_request {
        tools_json: ptr::null(),
        tool_choice: XSERV_TOOL_CHOICE_AUTO as u32,
        ..none
    };
    let prompt = model.generate(&without).unwrap().num_prompt_tokens;
    assert_eq!(model.generate(&none).unwrap().num_prompt_tokens, prompt);
    let auto = xserv_request { tool_choice: XSERV_TOOL_CHOICE_AUTO as u32, ..none };
    assert!(model.generate(&auto).unwrap().num_prompt_tokens > prompt);
    assert_eq!(generate(&model, &auto)[0].calls.len(), 1);
    // Nor is one read by a format that the request names; a thought is.
    let thought = format!("<think>\nThe time.\n</think>\n\n{call}<|im_end|>");
    let ids = model.tokenize(&thought).unwrap();
    for format in [XSERV_ANSWER_JSON_TAGS, XSERV_ANSWER_AUTO, XSERV_ANSWER_THINKING] {
        let thinking = xserv_request {
            template_variables_json: ptr::null(),
            first_tokens: ids.as_ptr(),
            num_first_tokens: ids.len(),
            answer_format: format as u32,
            ..none
        };
        let found = &generate(&model, &thinking)[0];
        assert_eq!((found.calls.len(), found.content.as_str()), (0, call), "{format:?}");
        assert_eq!(found.reasoning, "The time.", "{format:?}");
    }
    // A form of the content can stand beside it, as no call is forced.
    let regex = "a+";
    let found = &generate(
        &model,
        &xserv_request {
            first_tokens: ptr::null(),
            num_first_tokens: 0,
            constraint_kind: xserv_constraint_kind::XSERV_CONSTRAINT_REGEX as u32,
            constraint: regex.as_ptr() as *const c_char,
            constraint_len: regex.len(),
            max_tokens: 5,
            ..none
        },
    )[0];
    assert!(
        found.content.chars().all(|it| it == 'a') && !found.content.is_empty(),
        "{}",
        found.content
    );
}

#[test]
fn choices_that_cannot_be_followed_are_refused() {
    let model = Model::open(&tiny());
    let required = chat(XSERV_TOOL_CHOICE_REQUIRED, None, 1);
    let ids = [1_u32, 2];
    let regex = "a+";
    let prompt = xserv_request {
        messages_json: ptr::null(),
        tools_json: ptr::null(),
        template_variables_json: ptr::null(),
        prompt_tokens: ids.as_ptr(),
        num_prompt_tokens: ids.len(),
        ..required
    };
    let twice = json!([{ "name": "a" }, { "name": "a" }]);
    let twice = c_string(twice.to_string());
    let bad = c_string(
        json!([{ "name": "a", "parameters": { "properties": { "b": { "not": {} } } } }])
            .to_string(),
    );
    for (request, words) in [
        (chat(XSERV_TOOL_CHOICE_NAMED, Some(c"sundial"), 1), "\"sundial\""),
        (chat(XSERV_TOOL_CHOICE_NAMED, None, 1), "tool_choice_name"),
        (chat(XSERV_TOOL_CHOICE_REQUIRED, Some(c"clock"), 1), "tool_choice_name"),
        (xserv_request { tools_json: ptr::null(), ..required }, "no tools"),
        (xserv_request { tools_json: c"[]".as_ptr(), ..required }, "no tools"),
        (xserv_request { tools_json: twice.as_ptr(), ..required }, "two of them"),
        (xserv_request { tools_json: bad.as_ptr(), ..required }, "not"),
        (prompt, "messages"),
        (
            xserv_request {
                constraint_kind: xserv_constraint_kind::XSERV_CONSTRAINT_REGEX as u32,
                constraint: regex.as_ptr() as *const c_char,
                constraint_len: regex.len(),
                ..required
            },
            "a constraint cannot be given",
        ),
        (xserv_request { tool_choice: 4, ..required }, "tool_choice is 4"),
    ] {
        let Failure { status, message } = model.generate(&request).unwrap_err();
        assert_eq!(status, XSERV_STATUS_INVALID_ARGUMENT, "{message}");
        assert!(message.contains(words), "{message}");
    }
    let (_folder, plain) = with_template("{{ messages[0].content }}");
    let Failure { status, message } = plain.generate(&required).unwrap_err();
    assert_eq!(status, XSERV_STATUS_UNSUPPORTED, "{message}");
}
