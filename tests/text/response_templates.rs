//! Answers are read by response templates as Transformers reads them (`tests/golden/answers/templates.json`),
//! however they are cut into pieces, and no template and no text takes long.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{json, Value};
use xserv::text::{AnswerRules, ResponseTemplate, TemplateRules, ToolTypes};

use super::answers::{assert_cuts_do_not_matter, streamed};
use super::support::{json as read_json, own, Watch};

fn golden() -> Value {
    read_json(&own("answers/templates.json"))
}

fn rules_of(template: &ResponseTemplate, prefix: &str, tools: &Value) -> AnswerRules {
    let begun = template.begun(prefix).to_owned();
    let template = Arc::new(template.clone());
    AnswerRules {
        types: Arc::new(ToolTypes::of(tools)),
        template: Some(TemplateRules { template, begun, reads_calls: true }),
        ..AnswerRules::default()
    }
}

fn calls_of(message: &Value) -> Vec<Value> {
    let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    calls.iter().map(|call| call.get("function").unwrap_or(call).clone()).collect()
}

#[test]
fn answers_are_those_of_transformers() {
    let golden = golden();
    for case in golden["cases"].as_array().expect("cases") {
        let name = case["name"].as_str().expect("a name");
        let template = &golden["templates"][case["template"].as_str().expect("a template")];
        let template = ResponseTemplate::new(template).unwrap_or_else(|e| panic!("{name}: {e}"));
        let text = case["text"].as_str().expect("a text");
        let rules = rules_of(&template, case["prefix"].as_str().expect("a prefix"), &case["tools"]);
        let answer = assert_cuts_do_not_matter(&rules, text);
        let (message, here) = (&case["message"], &case["here"]);
        let expected = |key: &str| here.get(key).unwrap_or(&message[key]);
        let thought = ["reasoning_content", "reasoning", "thinking"].map(expected);
        let thought = thought.iter().find_map(|it| it.as_str()).unwrap_or_default();
        assert_eq!(answer.reasoning, thought, "{name}");
        assert_eq!(answer.content, expected("content").as_str().unwrap_or_default(), "{name}");
        let calls = if here["tool_calls"].is_array() { calls_of(here) } else { calls_of(message) };
        assert_eq!(answer.calls.len(), calls.len(), "{name}: {answer:?}");
        for (call, expected) in answer.calls.iter().zip(&calls) {
            assert_eq!(call.name, expected["name"], "{name}");
            match &expected["arguments"] {
                Value::String(text) => assert_eq!(call.arguments, *text, "{name}"),
                arguments => {
                    let read: Value = serde_json::from_str(&call.arguments).expect("JSON");
                    assert_eq!(read, *arguments, "{name}");
                }
            }
        }
        let incomplete = answer.calls.iter().filter(|call| !call.is_complete).count();
        assert_eq!(incomplete as u64, here["incomplete"].as_u64().unwrap_or(0), "{name}");
    }
}

#[test]
fn without_tools_calls_are_content() {
    let golden = golden();
    let template = ResponseTemplate::new(&golden["templates"]["tags"]).expect("a template");
    let mut rules = rules_of(&template, "", &Value::Null);
    if let Some(template) = &mut rules.template {
        template.reads_calls = false;
    }
    let text = "a <tool_call>{}</tool_call> <think>b</think>";
    let answer = assert_cuts_do_not_matter(&rules, text);
    assert_eq!(answer.content, "a <tool_call>{}</tool_call>");
    assert_eq!((answer.reasoning.as_str(), answer.calls.len()), ("b", 0));
}

#[test]
fn without_a_prompt_the_end_of_a_thought_says_that_it_began() {
    let golden = golden();
    let template = ResponseTemplate::new(&golden["templates"]["turns"]).expect("a template");
    let begun = |text| template.begun_before(text);
    assert_eq!(begun("Hm.<channel|>Yes."), "<|channel>thought\n");
    assert_eq!(begun("<|channel>thought\nHm.<channel|>Yes."), "");
    assert_eq!(begun("Yes."), "");
}

#[test]
fn what_is_not_supported_is_named() {
    let field = |field: Value| json!({"start_anchor": "a", "fields": {"content": field}});
    let cases = [
        (json!(7), "no object"),
        (json!({"start_anchor": "a"}), "fields"),
        (json!({"fields": {"content": {}}}), "start_anchor"),
        (json!({"version": 2, "start_anchor": "a", "fields": {"content": {}}}), "version"),
        (json!({"x": 2, "start_anchor": "a", "fields": {"content": {}}}), "\"x\""),
        (json!({"start_anchor": "a", "start_anchor_pattern": "a", "fields": {"c": {}}}), "both"),
        (json!({"start_anchor": "a", "fields": {"a": {}, "b": {}}}), "two"),
        (field(json!([])), "fields.content"),
        (field(json!({"x-regex": "a"})), "fields.content: the key \"x-regex\""),
        (field(json!({"open": ""})), "fields.content: open"),
        (field(json!({"open": []})), "fields.content: open"),
        (field(json!({"open": "a", "open_pattern": "a"})), "fields.content: there are both"),
        (field(json!({"open_pattern": "a*"})), "fields.content: open_pattern"),
        (field(json!({"open_pattern": "(?=a)b"})), "fields.content: open_pattern"),
        (field(json!({"close_pattern": "(a"})), "fields.content: close_pattern"),
        (field(json!({"close_pattern": "(a{1000}){1000}"})), "fields.content: close_pattern"),
        (field(json!({"content": "toml"})), "fields.content: content"),
        (field(json!({"content": "xml-inline"})), "tag_pattern"),
        (field(json!({"content": "xml-inline", "content_args": {"tag_pattern": "a"}})), "\"key\""),
        (
            field(json!({"content": "json", "content_args": {"string_delims": [["", "x"]]}})),
            "delims",
        ),
        (field(json!({"transform": ["a {content}"]})), "fields.content: transform"),
        (field(json!({"close": "x".repeat(70_000)})), "bytes"),
    ];
    for (template, named) in cases {
        let error = ResponseTemplate::new(&template).expect_err("refused").to_string();
        assert!(error.contains(named) && error.len() < 500, "{error} has no {named}");
    }
    let config = json!({"response_schema": {"x-regex": "a"}}).to_string();
    assert!(ResponseTemplate::from_config(config.as_bytes()).expect("ignored").is_none());
    let config = json!({"response_template": {"fields": 1}}).to_string();
    let error = ResponseTemplate::from_config(config.as_bytes()).expect_err("refused").to_string();
    assert!(error.starts_with("response_template: "), "{error}");
}

fn pieces() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "{\"name\": \"f\", \"arguments\": {}}",
        "<",
        "a",
        " ",
        "\n",
        "<function=f>",
        "</function>",
        "<parameter=n>",
        "</parameter>",
        "7",
        "<|im_end|>",
        "é",
        "<|channel|>",
        "analysis<|message|>",
        "<|end|>",
        "commentary to=functions.f",
        "<|message|>",
        "<|call|>",
        "{}",
        "final",
        "<|tool_call>call:f",
        "<tool_call|>",
        "<|\"|>",
        "{a:",
        "}",
        "[f()]",
        "#f\n",
        "##",
        "x=1\n",
        "<end>",
        "!",
    ]);
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn cuts_do_not_matter(text in pieces(), prefix in pieces(), number in 0..8usize) {
        let golden = golden();
        let (_, template) = golden["templates"].as_object().expect("templates").iter().nth(number).expect("eight");
        let mut template = template.clone();
        template["start_anchor"] = json!("a");
        template.as_object_mut().expect("an object").remove("start_anchor_pattern");
        let template = ResponseTemplate::new(&template).expect("a template");
        assert_cuts_do_not_matter(&rules_of(&template, &format!("a{prefix}"), &Value::Null), &text);
    }
}

/// Expressions that explode in other engines, and long texts for them.
#[test]
fn neither_templates_nor_texts_take_long() {
    const SIZE: usize = 1 << 18;
    let call = json!({"type": "function", "function": {"name": "f", "arguments": "{content}"}});
    let with = |open: &str, close: &str, tag: &str| {
        json!({"start_anchor_pattern": "(?:x+)+y", "fields": {
            "tool_calls": {"open_pattern": open, "close_pattern": close, "content": "xml-inline", "transform": call,
                "content_args": {"tag_pattern": tag}},
            "content": {"close_pattern": close},
        }})
    };
    let tag = "<(?P<key>x*)*>(?P<value>.*x.*y)?";
    let templates = [
        with("(?:x+x+)+y", "(?:x|x)*z", tag),
        with("x(?:.*y)?", "z(?:.*y)?", tag),
        with("(?:x?){300}x{300}", "(?:.*a){12}", tag),
        with("<", ">x", "(?P<key>x)(?:.*y)?"),
    ];
    let texts =
        ["x", "xz", "<x", "<", "z", "<x>", "xy", "é"].map(|unit| unit.repeat(SIZE / unit.len()));
    let mut slow = Vec::new();
    for template in &templates {
        let template = ResponseTemplate::new(template).expect("a template");
        for text in &texts {
            let begin = Watch::start();
            let rules = rules_of(&template, &text[..SIZE / 64], &Value::Null);
            let whole = streamed(&rules, [text.as_str()]);
            let places: Vec<usize> =
                text.char_indices().map(|(at, _)| at).step_by(7).chain([text.len()]).collect();
            let cut = streamed(&rules, places.windows(2).map(|pair| &text[pair[0]..pair[1]]));
            let took = begin.elapsed().as_secs_f64();
            assert_eq!(cut, whole);
            // Twice, in a build for tests and on a busy machine.
            if took > 6.0 {
                slow.push(format!("{:?}...: {took:.1} s", &text[..8]));
            }
        }
    }
    assert!(slow.is_empty(), "{}", slow.join("\n"));
}
