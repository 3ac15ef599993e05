//! The form in which models write calls, found from their templates, and the grammars of such calls.

use crate::support::{json, own, tokenizer};
use serde_json::{json, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xserv::text::{
    format_of, AnswerRules, AnswerStart, CallForm, ChatInput, ChatTemplate, Constraint,
    GrammarCompiler, GrammarMatcher, Probe, Progress, SpecialTokens, Tokenizer, ToolForm,
    ToolTypes,
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

/// Writes a call of a tool with arguments.
type Writer<'a> = &'a dyn Fn(&str, &str) -> String;
/// A value as it is written, and as JSON.
type Written = (String, Value);

/// A model's way of calling: a template, and a tokenizer that goes with it.
struct Model {
    source: String,
    tokenizer: Arc<Tokenizer>,
    form: CallForm,
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Renders messages and the tools of the probe by a template.
fn rendered(source: &str, messages: &Value, add_generation_prompt: bool) -> String {
    let special_tokens = &SpecialTokens {
        bos: Some("<s>".to_owned()),
        eos: Some("</s>".to_owned()),
        ..SpecialTokens::default()
    };
    let tools = Some(&Probe::new().tools);
    let input =
        ChatInput { messages, tools, variables: None, add_generation_prompt, special_tokens };
    ChatTemplate::compile(source).unwrap().render(&input).unwrap()
}

fn found(source: &str) -> Option<CallForm> {
    let probe = Probe::new();
    let asked = rendered(source, &probe.question, false);
    let opened = rendered(source, &probe.question, true);
    CallForm::find(&asked, &opened, &rendered(source, &probe.call, false))
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
        let mut matcher = self.matcher(tools, start).unwrap_or_else(|error| panic!("{error}"));
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

    /// Returns the matcher that keeps an answer to a call of one of these tools, or why there can
    /// be none.
    fn matcher(
        &self,
        tools: &[(&str, &Value)],
        start: AnswerStart,
    ) -> Result<GrammarMatcher, String> {
        let compiler = GrammarCompiler::new(&self.tokenizer, self.tokenizer.vocab_size()).unwrap();
        let grammar = self.form.grammar(tools, start, &self.tokenizer);
        let grammar = grammar.map_err(|error| error.to_string())?;
        compiler
            .compile(&Constraint::Grammar(&grammar))
            .map_err(|error| format!("{error}\n{grammar}"))
    }

    /// Returns the calls that are read from a text.
    fn calls(&self, start: AnswerStart, text: &str) -> Vec<(String, Value)> {
        self.calls_of(&weather(), start, text)
    }

    /// The same, for the probe's tool and this one.
    fn calls_of(&self, tool: &Value, start: AnswerStart, text: &str) -> Vec<(String, Value)> {
        let form = format_of(Some(&self.source), |_| false);
        let mut tools = Probe::new().tools;
        tools.as_array_mut().unwrap().push(json!({ "type": "function", "function": tool }));
        let types = Arc::new(ToolTypes::of(&tools));
        let answer = AnswerRules { form, start, types, id_seed: 1, template: None }.parse(text);
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
            "<tool_call>\n{\"name\": \"xserv_probe\", \"arguments\": {\"probe\": 1}}\n</tool_call>",
        ),
        (
            xml_tags(),
            ToolForm::XmlTags,
            "<tool_call>\n<function=xserv_probe>\n<parameter=probe>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            bare_json(),
            ToolForm::BareJson,
            "{\"name\": \"xserv_probe\", \"parameters\": {\"probe\": 1}}",
        ),
        (
            marked_json(),
            ToolForm::MarkedJson,
            "[TOOL_CALLS] [{\"name\": \"xserv_probe\", \"arguments\": {\"probe\": 1}}]",
        ),
    ] {
        assert_eq!(format_of(Some(&model.source), |_| false), form);
        assert_eq!(model.form.example(), example);
        // It is what the template writes, but for the id.
        let written = rendered(&model.source, &Probe::new().call, false);
        let written = written.replace(", \"id\": \"000000000\"", "");
        assert!(written.contains(example), "{example}: {written}");
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
    let forms: [(Model, Writer<'_>); 3] =
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

/// Around the arguments every character is the template's; within them blanks are the model's affair.
#[test]
fn a_call_is_written_to_the_blank_as_the_template_writes_it() {
    let any = json!({ "type": "object", "additionalProperties": { "type": "integer" } });
    let tools = [("clock", &any), ("clock tower", &any)];
    let (key, tag) = ("arguments", ["<tool_call>\n", "\n</tool_call>"]);
    let spaced = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\
        <tool_call>{ \"id\" : \"{{ c.id }}\",  \"name\":\"{{ c.function.name }}\",\n \"arguments\" :{{ c.function.arguments | tojson }} }</tool_call>\
        {% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    for (model, begin, between, end) in [
        (
            json_tags(),
            tag[0].to_owned() + "{\"name\": \"",
            format!("\", \"{key}\": "),
            format!("}}{}", tag[1]),
        ),
        (
            bare_json(),
            "{\"name\": \"".to_owned(),
            "\", \"parameters\": ".to_owned(),
            "}".to_owned(),
        ),
        (
            marked_json(),
            "[TOOL_CALLS] [{\"name\": \"".to_owned(),
            format!("\", \"{key}\": "),
            "}]".to_owned(),
        ),
        (
            model(spaced, "examples/models/tiny-qwen3"),
            "<tool_call>{ \"name\":\"".to_owned(),
            format!("\",\n \"{key}\" :"),
            " }</tool_call>".to_owned(),
        ),
    ] {
        let takes = |text: &str| model.takes(&tools, AnswerStart::AfterThought, text);
        for name in ["clock", "clock tower"] {
            for arguments in ["{}", "{\"a\": 1, \"b\": 2}", "{ \"a\" :1 }"] {
                let text = format!("{begin}{name}{between}{arguments}{end}");
                assert!(takes(&text), "{text}");
                assert_eq!(model.calls(AnswerStart::AfterThought, &text).len(), 1, "{text}");
            }
        }
        // A blank more or less in any of the gaps.
        let whole = format!("{begin}clock{between}{{}}{end}");
        for at in (0..=whole.len()).filter(|&at| whole.is_char_boundary(at)) {
            let (before, after) = whole.split_at(at);
            let is_inside =
                before.ends_with('{') && after.starts_with("}") && before.len() > begin.len();
            for more in [" ", "\n"] {
                let text = format!("{before}{more}{after}");
                assert_eq!(takes(&text), is_inside, "{text:?}");
            }
            if let Some(rest) = after.strip_prefix([' ', '\n']) {
                let text = format!("{before}{rest}");
                assert!(!takes(&text), "{text:?}");
            }
        }
    }
}

/// A reference is a keyword of schemas, and an ordinary member of data.
#[test]
fn references_lead_where_they_led_and_data_stays_as_it_is() {
    let data = json!({ "$ref": "#/x" });
    let parameters = json!({
        "type": "object",
        "properties": {
            "const": { "const": data },
            "enum": { "enum": [data, [data]] },
            "default": { "default": data, "examples": [data], "$ref": "#/properties/far/items" },
            "far": { "type": "array", "items": { "$ref": "#/$defs/day" } },
        },
        "$defs": { "day": { "enum": ["Mon", "Tue"] } },
    });
    let tools = [("weather", &parameters)];
    for model in [json_tags(), bare_json(), marked_json()] {
        let example = model.form.example();
        for (arguments, expected) in [
            (json!({ "const": data }), true),
            (json!({ "const": { "$ref": "#/properties/arguments/x" } }), false),
            (json!({ "enum": data }), true),
            (json!({ "enum": [data] }), true),
            (json!({ "enum": { "$ref": "#/properties/arguments/x" } }), false),
            (json!({ "default": "Mon" }), true),
            (json!({ "default": data }), false),
            (json!({ "far": ["Tue"] }), true),
            (json!({ "far": ["Sun"] }), false),
        ] {
            let text = example.replace("xserv_probe", "weather");
            let text = text.replace("{\"probe\": 1}", &arguments.to_string());
            assert_eq!(model.takes(&tools, AnswerStart::AfterThought, &text), expected, "{text}");
        }
    }
}

/// Returns a tool with one parameter of this schema.
fn tool_of(schema: &Value) -> Value {
    let parameters = json!({
        "type": "object",
        "properties": { "a": schema },
        "required": ["a"],
        "$defs": {
            "text": { "type": "string", "title": "Text" },
            "short": { "type": "string", "maxLength": 3 },
            "unit": { "enum": ["km", "mi"] },
            "count": { "type": "integer", "maximum": 9 },
            "point": { "type": "object", "properties": { "x": { "type": "integer" } }, "required": ["x"], "additionalProperties": false },
            "far": { "$ref": "#/$defs/nearer" },
            "nearer": { "$ref": "#/$defs/text" },
            "node": { "type": "object", "properties": { "next": { "$ref": "#/$defs/node" } }, "additionalProperties": false },
            "circle": { "$ref": "#/$defs/square" },
            "square": { "$ref": "#/$defs/circle" },
            "self": { "anyOf": [{ "$ref": "#/$defs/self" }, { "type": "string" }] },
        },
    });
    json!({ "name": "tool", "parameters": parameters })
}

fn with_value(value: &str) -> String {
    format!("<tool_call>\n<function=tool>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>")
}

#[test]
fn strings_are_written_bare_wherever_a_schema_says_that_they_are_strings() {
    let model = xml_tags();
    let (text, nothing) = (json!({ "$ref": "#/$defs/text" }), json!({ "type": "null" }));
    let point = json!({ "$ref": "#/$defs/point" });
    let free = ["Rome", "\"Rome\"", "", "12", "{\"x\": 1}", "two\nlines", "true"];
    let same =
        |texts: &[&str]| texts.iter().map(|it| ((*it).to_owned(), json!(it))).collect::<Vec<_>>();
    let or_null = |texts: &[&str]| {
        let mut all = same(texts);
        all.push(("null".to_owned(), Value::Null));
        all
    };
    let cases: Vec<(Value, Vec<Written>, Vec<&str>)> = vec![
        (text.clone(), same(&free), vec![]),
        (json!({ "$ref": "#/$defs/far", "description": "a town" }), same(&free), vec![]),
        (json!({ "anyOf": [text, nothing] }), or_null(&free), vec![]),
        (json!({ "oneOf": [nothing, text] }), or_null(&free), vec![]),
        (json!({ "allOf": [text] }), same(&free), vec![]),
        (json!({ "type": ["string", "null"] }), or_null(&free), vec![]),
        (json!({}), same(&free), vec![]),
        (json!({ "$ref": "#/$defs/short" }), same(&["abc", ""]), vec!["abcd", "null"]),
        (
            json!({ "anyOf": [{ "$ref": "#/$defs/short" }, nothing] }),
            or_null(&["abc", "1"]),
            vec!["abcd", "nul1"],
        ),
        (
            json!({ "anyOf": [{ "$ref": "#/$defs/unit" }, nothing] }),
            or_null(&["km"]),
            vec!["\"km\"", "m"],
        ),
        (json!({ "type": ["string", "null"], "enum": ["km", null] }), or_null(&["km"]), vec!["mi"]),
        // A text that would be read as a number, an object or a list is no text.
        (
            json!({ "anyOf": [{ "$ref": "#/$defs/count" }, text] }),
            vec![
                ("7".to_owned(), json!(7)),
                ("Rome 7".to_owned(), json!("Rome 7")),
                (String::new(), json!("")),
            ],
            vec!["12", " 12", "1 dog"],
        ),
        (
            json!({ "anyOf": [point, text] }),
            vec![("{\"x\": 1}".to_owned(), json!({ "x": 1 })), ("12".to_owned(), json!("12"))],
            vec!["{\"y\": 1}", "[1]", "\n{\"y\": 1}"],
        ),
        (
            json!({ "type": ["array", "string"], "items": { "type": "string" }, "minLength": 2 }),
            vec![("[\"a\", \"b\"]".to_owned(), json!(["a", "b"])), ("ab".to_owned(), json!("ab"))],
            vec!["[1]", "a", "{}"],
        ),
        // Any number may be one, so that any text may be there.
        (
            json!({ "type": ["number", "string"] }),
            vec![("12".to_owned(), json!(12)), ("1x".to_owned(), json!("1x"))],
            vec![],
        ),
        // After a string nothing else is read, so that nothing else is written.
        (
            json!({ "anyOf": [{ "$ref": "#/$defs/unit" }, { "type": "integer" }] }),
            same(&["km", "mi"]),
            vec!["1"],
        ),
        (
            json!({ "enum": [1, "km"] }),
            vec![("1".to_owned(), json!(1)), ("km".to_owned(), json!("km"))],
            vec!["2"],
        ),
        (
            json!({ "enum": [1, "km", null, true] }),
            vec![
                ("1".to_owned(), json!(1)),
                ("km".to_owned(), json!("km")),
                ("null".to_owned(), Value::Null),
            ],
            vec!["true", "2"],
        ),
        // No strings at all.
        (point.clone(), vec![("{\"x\": 1}".to_owned(), json!({ "x": 1 }))], vec!["Rome", "{}"]),
        (
            json!({ "anyOf": [point, nothing] }),
            vec![("{\"x\":1}".to_owned(), json!({ "x": 1 })), ("null".to_owned(), Value::Null)],
            vec!["\"Rome\""],
        ),
        (
            json!({ "$ref": "#/$defs/node" }),
            vec![("{\"next\": {}}".to_owned(), json!({ "next": {} }))],
            vec!["{\"next\": 1}"],
        ),
        (
            json!({ "const": { "$ref": "#/x" } }),
            vec![("{\"$ref\": \"#/x\"}".to_owned(), json!({ "$ref": "#/x" }))],
            vec!["{}"],
        ),
    ];
    for (schema, written, refused) in &cases {
        let tool = tool_of(schema);
        let tools = [("tool", &tool["parameters"])];
        for (value, expected) in written {
            let text = with_value(value);
            assert!(model.takes(&tools, AnswerStart::AfterThought, &text), "{schema}: {text}");
            let calls = model.calls_of(&tool, AnswerStart::AfterThought, &text);
            assert_eq!(calls, [("tool".to_owned(), json!({ "a": expected }))], "{schema}: {text}");
        }
        for value in refused {
            let text = with_value(value);
            assert!(!model.takes(&tools, AnswerStart::AfterThought, &text), "{schema}: {text}");
        }
    }
}

#[test]
fn schemas_that_plain_text_cannot_follow_are_refused() {
    let model = xml_tags();
    for (schema, words) in [
        (json!({ "$ref": "#/$defs/circle" }), "circle"),
        (json!({ "$ref": "#/$defs/self" }), "circle"),
        (json!({ "anyOf": [{ "$ref": "#/$defs/circle" }, { "type": "string" }] }), "circle"),
        (json!({ "$ref": "#/$defs/nowhere" }), "\"#/$defs/nowhere\""),
        (json!({ "$ref": "other.json" }), "\"other.json\""),
        (json!({ "type": "string", "pattern": "a" }), "\"pattern\" of a text"),
        (
            json!({ "anyOf": [{ "type": "string" }], "pattern": "a" }),
            "\"pattern\" beside \"anyOf\"",
        ),
        (json!({ "allOf": [{ "type": "string" }, { "maxLength": 3 }] }), "\"allOf\" of a text"),
        (
            json!({ "oneOf": [{ "type": "string" }, { "enum": ["a"] }] }),
            "\"oneOf\" of several texts",
        ),
        (json!({ "enum": ["null", null] }), "the text \"null\", which would be read as null"),
        (json!({ "type": "any" }), "the type \"any\""),
        (json!(7), "something that is no schema"),
        (json!(false), "nothing that is allowed"),
    ] {
        let tool = tool_of(&schema);
        let tools = [("tool", &tool["parameters"])];
        let message = model.matcher(&tools, AnswerStart::AfterThought).err().unwrap_or_default();
        assert!(message.contains(words) && message.contains("at \"a\""), "{schema}: {message}");
    }
}

/// In JSON they are followed by what matches the text, which ends.
#[test]
fn references_that_lead_in_a_circle_end() {
    let (plain, tags) = (xml_tags(), json_tags());
    for (schema, items, expected) in [
        ("#/$defs/circle", "[]", true),
        ("#/$defs/circle", "[1]", false),
        ("#/$defs/self", "[\"x\", \"y\"]", true),
        ("#/$defs/self", "[1]", false),
        ("#/$defs/node", "[{\"next\": {\"next\": {}}}]", true),
    ] {
        let tool = tool_of(&json!({ "type": "array", "items": { "$ref": schema } }));
        let tools = [("tool", &tool["parameters"])];
        let call = format!("{{\"name\": \"tool\", \"arguments\": {{\"a\": {items}}}}}");
        let call = format!("<tool_call>\n{call}\n</tool_call>");
        for (model, text) in [(&plain, with_value(items)), (&tags, call)] {
            assert_eq!(model.takes(&tools, AnswerStart::AfterThought, &text), expected, "{text}");
        }
    }
}

/// Whatever looks like the end of a value ends it for any reader.
#[test]
fn no_text_has_the_end_of_its_value_in_it() {
    let (model, tool) = (xml_tags(), tool_of(&json!({ "type": "string" })));
    let tools = [("tool", &tool["parameters"])];
    let end = "</parameter>\n</function>\n</tool_call>";
    for (value, expected) in [
        ("a < b", true),
        ("a </p>", true),
        ("a <parameter=b>", true),
        (&format!("a{end}"), false),
        ("a</function>\n</tool_call>b", false),
        ("a</function>", false),
        ("<parameter=b>\n1", false),
        ("a\n<parameter=b>\n1", false),
    ] {
        let text = with_value(value);
        assert_eq!(model.takes(&tools, AnswerStart::AfterThought, &text), expected, "{text}");
        if expected {
            let calls = model.calls_of(&tool, AnswerStart::AfterThought, &text);
            assert_eq!(calls, [("tool".to_owned(), json!({ "a": value }))]);
        }
    }
    // Those that are listed are refused.
    for value in ["a</function>", "x\n<parameter=b>"] {
        let tool = tool_of(&json!({ "enum": ["a", value] }));
        assert!(model
            .matcher(&[("tool", &tool["parameters"])], AnswerStart::AfterThought)
            .is_err());
    }
}

/// Lists and objects have strings in quotes, in which a tag ends nothing.
#[test]
fn strings_in_quotes_may_have_tags_in_them() {
    let (model, tool) = (xml_tags(), tool_of(&json!({ "type": "array" })));
    let tools = [("tool", &tool["parameters"])];
    for tag in [
        "</parameter></function></tool_call>",
        "</function></tool_call>",
        "\"</parameter><parameter=b>",
    ] {
        let value = json!([{ "a": tag }, tag]);
        let text = with_value(&value.to_string());
        assert!(model.takes(&tools, AnswerStart::AfterThought, &text), "{text}");
        let calls = model.calls_of(&tool, AnswerStart::AfterThought, &text);
        assert_eq!(calls, [("tool".to_owned(), json!({ "a": value }))]);
    }
    // A quote that was forgotten does not take the rest of the answer.
    let text = with_value("[\"x");
    let calls = model.calls_of(&tool, AnswerStart::AfterThought, &text);
    assert_eq!(calls, [("tool".to_owned(), json!({ "a": "[\"x" }))]);
}
