//! The form in which models write calls, found from their templates, and the grammars of such calls.

use crate::support::{json, own, tokenizer};
use serde_json::{json, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xserv::text::{
    format_of, AnswerRules, AnswerStart, CallForm, ChatInput, ChatTemplate, Constraint,
    GrammarCompiler, Probe, Progress, SpecialTokens, Tokenizer, ToolForm, ToolTypes,
};

/// A template with calls in the form of Qwen3-Coder.
const XML: &str = r"{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
        {%- for key, value in call.function.arguments | items %}
            {{- '<parameter=' + key + '>\n' + (value | tojson) + '\n</parameter>\n' }}
        {%- endfor %}
        {{- '</function>\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";

/// A model's way of calling: a template, and a tokenizer that goes with it.
struct Model {
    source: String,
    tokenizer: Arc<Tokenizer>,
    form: CallForm,
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn found(source: &str) -> Option<CallForm> {
    let template = ChatTemplate::compile(source).unwrap();
    let special_tokens = SpecialTokens {
        bos: Some("<s>".to_owned()),
        eos: Some("</s>".to_owned()),
        ..SpecialTokens::default()
    };
    let probe = Probe::new();
    let render = |messages, add_generation_prompt| {
        let tools = Some(&probe.tools);
        let special_tokens = &special_tokens;
        let input =
            ChatInput { messages, tools, variables: None, add_generation_prompt, special_tokens };
        template.render(&input).unwrap()
    };
    let (asked, opened) = (render(&probe.question, false), render(&probe.question, true));
    CallForm::find(&asked, &opened, &render(&probe.call, false))
}

fn model(source: &str, tokenizer_folder: &str) -> Model {
    Model {
        source: source.to_owned(),
        tokenizer: tokenizer(&folder(tokenizer_folder)),
        form: found(source).unwrap(),
    }
}

fn template_of(name: &str) -> String {
    let file = json(&own("chat_template/families.json"));
    file["templates"][name]["source"].as_str().unwrap().to_owned()
}

fn json_tags() -> Model {
    model(&template_of("qwen 2.5"), "examples/models/tiny-qwen3")
}

fn xml_tags() -> Model {
    model(XML, "examples/models/tiny-qwen3")
}

fn bare_json() -> Model {
    model(&template_of("llama 3.1"), "tests/golden/text/llama3")
}

fn marked_json() -> Model {
    model(&template_of("mistral 0.3"), "tests/golden/text/mistral")
}

impl Model {
    /// Whether the grammar of calls of these tools takes a text to its end.
    fn takes(&self, tools: &[(&str, &Value)], start: AnswerStart, text: &str) -> bool {
        let grammar = self.form.grammar(tools, start, &self.tokenizer).unwrap();
        let compiler = GrammarCompiler::new(&self.tokenizer, self.tokenizer.vocab_size()).unwrap();
        let mut matcher = compiler
            .compile(&Constraint::Grammar(&grammar))
            .unwrap_or_else(|error| panic!("{error}:\n{grammar}"));
        let mut progress = Progress::Open;
        for id in self.tokenizer.encode(text, false, true).unwrap() {
            if progress == Progress::Complete {
                return false;
            }
            let mask = matcher.mask(&[], |id| self.tokenizer.is_special(id)).unwrap();
            let is_allowed = mask.allows(id);
            let consumed = matcher.consume(id);
            assert_eq!(consumed.is_ok(), is_allowed, "{text}");
            match consumed {
                Ok(now) => progress = now,
                Err(_) => return false,
            }
        }
        progress == Progress::Complete || matcher.is_complete().unwrap()
    }

    /// The calls that are read from a text.
    fn calls(&self, start: AnswerStart, text: &str) -> Vec<(String, Value)> {
        let form = format_of(Some(&self.source), |_| false);
        let mut tools = Probe::new().tools;
        let weather = json!({ "type": "function", "function": weather() });
        tools.as_array_mut().unwrap().push(weather);
        let types = Arc::new(ToolTypes::of(&tools));
        let answer = AnswerRules { form, start, types, id_seed: 1 }.parse(text);
        let arguments = |text: &str| serde_json::from_str(text).unwrap();
        answer.calls.iter().map(|call| (call.name.clone(), arguments(&call.arguments))).collect()
    }
}

fn weather() -> Value {
    let parameters = json!({
        "type": "object",
        "properties": { "city": { "type": "string" }, "days": { "$ref": "#/$defs/days" } },
        "required": ["city"],
        "additionalProperties": false,
        "$defs": { "days": { "type": "integer", "minimum": 1, "maximum": 14 } },
    });
    json!({ "name": "weather", "parameters": parameters })
}

#[test]
fn forms_are_found_from_templates() {
    for (model, form, example) in [
        (
            json_tags(),
            ToolForm::JsonTags,
            "<tool_call>\n{\"name\":\"xserv_probe\",\"arguments\":{\"probe\":1}}\n</tool_call>",
        ),
        (
            xml_tags(),
            ToolForm::XmlTags,
            "<tool_call>\n<function=xserv_probe>\n<parameter=probe>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            bare_json(),
            ToolForm::BareJson,
            "{\"name\":\"xserv_probe\",\"parameters\":{\"probe\":1}}",
        ),
        (
            marked_json(),
            ToolForm::MarkedJson,
            "[TOOL_CALLS] [{\"name\":\"xserv_probe\",\"arguments\":{\"probe\":1}}]",
        ),
    ] {
        assert_eq!(format_of(Some(&model.source), |_| false), form);
        assert_eq!(model.form.example(), example);
        let calls = model.calls(AnswerStart::Open, &model.form.example());
        let [(name, arguments)] = &calls[..] else { panic!("{example}: {calls:?}") };
        assert!(CallForm::is_example(name, &arguments.to_string()), "{example}");
    }
    for name in ["llama 2", "mistral 0.1"] {
        let source = template_of(name);
        let template = ChatTemplate::compile(&source).unwrap();
        assert_eq!(format_of(Some(template.source()), |_| false), ToolForm::None, "{name}");
    }
}

#[test]
fn grammars_take_a_call_of_a_tool_and_nothing_else() {
    let (tool, other) = (weather(), json!({ "type": "object" }));
    let tools = [("weather", &tool["parameters"]), ("clock", &other)];
    let object = |key: &'static str, before: &'static str, after: &'static str| {
        move |name: &str, arguments: &str| {
            format!("{before}{{\"name\": \"{name}\", \"{key}\": {arguments}}}{after}")
        }
    };
    let tags = object("arguments", "<tool_call>\n", "\n</tool_call>");
    let bare = object("parameters", "", "");
    let marked = object("arguments", "[TOOL_CALLS] [", "]");
    let forms: [(Model, &dyn Fn(&str, &str) -> String); 3] =
        [(json_tags(), &tags), (bare_json(), &bare), (marked_json(), &marked)];
    for (model, call) in &forms {
        for (name, arguments) in [
            ("weather", json!({ "city": "Rome" })),
            ("weather", json!({ "city": "a \"b\" <c>\n", "days": 14 })),
            ("clock", json!({ "anything": [1, null] })),
        ] {
            let text = call(name, &arguments.to_string());
            assert!(model.takes(&tools, AnswerStart::AfterThought, &text), "{text}");
            let calls = model.calls(AnswerStart::AfterThought, &text);
            assert_eq!(calls, [(name.to_owned(), arguments)], "{text}");
        }
        for text in [
            call("weather", "{}"),
            call("weather", "{\"city\": 1}"),
            call("weather", "{\"city\": \"Rome\", \"days\": 15}"),
            call("weather", "{\"city\": \"Rome\", \"town\": 1}"),
            call("sundial", "{}"),
            format!("Well: {}", call("clock", "{}")),
            format!("{}{}", call("clock", "{}"), call("clock", "{}")),
            "It rains.".to_owned(),
        ] {
            assert!(!model.takes(&tools, AnswerStart::AfterThought, &text), "{text}");
        }
        let named = [("clock", &other)];
        let text = call("weather", "{\"city\": \"Rome\"}");
        assert!(!model.takes(&named, AnswerStart::AfterThought, &text), "{text}");
    }
}

#[test]
fn grammars_of_parameters_take_what_their_schemas_allow() {
    let (model, tool) = (xml_tags(), weather());
    let tools = [("weather", &tool["parameters"])];
    let call = |parameters: &[(&str, &str)]| {
        let given: String = parameters
            .iter()
            .map(|(key, value)| format!("<parameter={key}>\n{value}\n</parameter>\n"))
            .collect();
        format!("<tool_call>\n<function=weather>\n{given}</function>\n</tool_call>")
    };
    for (parameters, arguments) in [
        (vec![("city", "Rome")], json!({ "city": "Rome" })),
        (
            vec![("city", "two\nlines <b>"), ("days", "14")],
            json!({ "city": "two\nlines <b>", "days": 14 }),
        ),
    ] {
        let text = call(&parameters);
        assert!(model.takes(&tools, AnswerStart::AfterThought, &text), "{text}");
        let calls = model.calls(AnswerStart::AfterThought, &text);
        assert_eq!(calls, [("weather".to_owned(), arguments)], "{text}");
    }
    for text in [
        call(&[]),
        call(&[("days", "1")]),
        call(&[("city", "Rome"), ("days", "15")]),
        call(&[("city", "Rome"), ("town", "1")]),
        "It rains.".to_owned(),
    ] {
        assert!(!model.takes(&tools, AnswerStart::AfterThought, &text), "{text}");
    }
}

#[test]
fn thoughts_come_before_calls_where_the_answer_may_have_one() {
    let (model, any) = (json_tags(), json!({ "type": "object" }));
    let tools = [("clock", &any)];
    let call = "<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>";
    let thought = format!("<think>\nWhat <tool_call> is for?\n</think>\n\n{call}");
    let rest = format!("So.\n</think>\n\n{call}");
    for (start, text, expected) in [
        (AnswerStart::Open, call, true),
        (AnswerStart::Open, &thought, true),
        (AnswerStart::Open, &rest, false),
        (AnswerStart::InThought, &rest, true),
        (AnswerStart::AfterThought, call, true),
        (AnswerStart::AfterThought, &thought, false),
    ] {
        assert_eq!(model.takes(&tools, start, text), expected, "{start:?}: {text}");
        if expected {
            assert_eq!(model.calls(start, text).len(), 1, "{start:?}: {text}");
        }
    }
}
