//! Constraints, tools and response templates that mean harm: refused in a sentence, or followed within the
//! bars of time and memory.

use std::ffi::{c_char, CString};
use std::ptr;

use serde_json::{json, Value};
use xserv::ffi::xserv_answer_format::*;
use xserv::ffi::xserv_constraint_kind::*;
use xserv::ffi::xserv_tool_choice::*;
use xserv::ffi::*;

use crate::client::*;
use crate::hostile_child::Expect::*;
use crate::hostile_child::*;

/// The groups of cases by name.
pub const GROUPS: &[Group] =
    &[("constraints", constraints), ("tools", tools), ("response templates", response_templates)];

#[test]
fn constraints_are_held() {
    run_group("constraints");
}

#[test]
fn tools_are_held() {
    run_group("tools");
}

#[test]
fn response_templates_are_held() {
    run_group("response templates");
}

/// Three tokens, of all that there are.
fn drawn() -> xserv_request {
    xserv_request { temperature: 1.0, top_k: 0, top_p: 1.0, ..greedy(&PROMPT, 3) }
}

fn constrained(kind: xserv_constraint_kind, text: &str) -> xserv_request {
    xserv_request {
        constraint_kind: kind as u32,
        constraint: text.as_ptr() as *const c_char,
        constraint_len: text.len(),
        ..drawn()
    }
}

fn constraints(bench: &mut Bench) {
    let model = &Model::open(&tiny());
    // The trie of the vocabulary is made once.
    model.generate(&constrained(XSERV_CONSTRAINT_JSON_SCHEMA, "true")).unwrap();
    let nested =
        |open: &str, close: &str, n: usize| format!("{}{}", open.repeat(n), close.repeat(n));
    let properties: Vec<String> =
        (0..50_000).map(|i| format!("\"p{i}\":{{\"type\":\"string\"}}")).collect();
    let literal = format!("\"{}\"", "x".repeat(1 << 20));
    let long = "x".repeat(10 << 20);
    let cases: Vec<(xserv_constraint_kind, String)> = vec![
        (XSERV_CONSTRAINT_JSON_SCHEMA, format!("{{\"const\": \"{long}\"}}")),
        (XSERV_CONSTRAINT_JSON_SCHEMA, format!("{{\"description\": \"{}\"}}", &long[..(2 << 20) - 100])),
        (XSERV_CONSTRAINT_JSON_SCHEMA, "{\"$ref\": \"https://json-schema.org/draft/2020-12/schema\"}".into()),
        (XSERV_CONSTRAINT_JSON_SCHEMA, format!("{{\"type\": \"string\", \"pattern\": \"{}\"}}", "(x+x+)+".repeat(200))),
        (XSERV_CONSTRAINT_REGEX, long.clone()),
        (XSERV_CONSTRAINT_GRAMMAR, long),
        (XSERV_CONSTRAINT_JSON_SCHEMA, format!("{{\"enum\": [{}]}}", vec!["\"word\""; 1_200_000].join(","))),
        (XSERV_CONSTRAINT_JSON_SCHEMA, nested("{\"items\":", "}", 10_000)),
        (XSERV_CONSTRAINT_JSON_SCHEMA, "[".repeat(10_000)),
        (XSERV_CONSTRAINT_JSON_SCHEMA, nested("{\"items\":", "}", 100).replace(":}", ":true}")),
        (XSERV_CONSTRAINT_JSON_SCHEMA, "{\"$ref\": \"#\"}".into()),
        (XSERV_CONSTRAINT_JSON_SCHEMA, r##"{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}"##.into()),
        (XSERV_CONSTRAINT_JSON_SCHEMA, r##"{"allOf": [{"$ref": "#"}, {"$ref": "#"}]}"##.into()),
        (XSERV_CONSTRAINT_JSON_SCHEMA, format!("{{\"properties\": {{{}}}}}", properties.join(","))),
        (XSERV_CONSTRAINT_JSON_SCHEMA, "{\"maxLength\": 1000000000, \"type\": \"string\", \"minLength\": 999999999}".into()),
        (XSERV_CONSTRAINT_JSON_SCHEMA, "{\"type\": \"array\", \"minItems\": 1000000000}".into()),
        (XSERV_CONSTRAINT_JSON_SCHEMA, "{\"type\": \"array\", \"minItems\": 18446744073709551615}".into()),
        (XSERV_CONSTRAINT_JSON_SCHEMA, "{\"type\": \"number\", \"multipleOf\": 1e-300, \"minimum\": 1e300}".into()),
        (XSERV_CONSTRAINT_JSON_SCHEMA, "{\"pattern\": \"((a{0,1000}){0,1000}){0,1000}\"}".into()),
        (XSERV_CONSTRAINT_JSON_SCHEMA, format!("{{\"const\": {literal}}}")),
        (XSERV_CONSTRAINT_JSON_SCHEMA, exponential_all_of(18)),
        (XSERV_CONSTRAINT_JSON_SCHEMA, exponential_refs(40)),
        (XSERV_CONSTRAINT_JSON_SCHEMA, format!("{{\"pattern\": \"{}b\"}}", "a|".repeat(900_000))),
        (XSERV_CONSTRAINT_REGEX, "(a|a)*(a|a)*b(.*a){200}".into()),
        (XSERV_CONSTRAINT_REGEX, "(.*a.{20}){20}".into()),
        (XSERV_CONSTRAINT_REGEX, "((((a{1,100}){1,100}){1,100}){1,100}){1,100}".into()),
        (XSERV_CONSTRAINT_REGEX, nested("(", ")", 10_000)),
        (XSERV_CONSTRAINT_REGEX, "a|".repeat(900_000) + "b"),
        (XSERV_CONSTRAINT_REGEX, "a?".repeat(50_000) + &"a".repeat(50_000)),
        (XSERV_CONSTRAINT_REGEX, "a?".repeat(1_999) + &"a".repeat(2_000)),
        (XSERV_CONSTRAINT_JSON_SCHEMA, format!("{{\"pattern\": \"{}\"}}", "a?".repeat(1_999) + &"a".repeat(2_000))),
        (XSERV_CONSTRAINT_GRAMMAR, format!("start: A\nA: {}", "\"a\"? ".repeat(1_999) + &"\"a\" ".repeat(2_000))),
        (XSERV_CONSTRAINT_REGEX, "\\p{L}".repeat(20_000)),
        (XSERV_CONSTRAINT_REGEX, "x".repeat(2 << 20)),
        (XSERV_CONSTRAINT_GRAMMAR, format!("start: {}", nested("(", ")", 10_000).replace("()", "(\"a\")"))),
        (XSERV_CONSTRAINT_GRAMMAR, "start: start start | \"a\" | \"\"".into()),
        (XSERV_CONSTRAINT_GRAMMAR, "start: a\na: a | b\nb: b | a | \"x\"".into()),
        (XSERV_CONSTRAINT_GRAMMAR, format!("start: {}", "\"a\" ".repeat(300_000))),
        (XSERV_CONSTRAINT_GRAMMAR, exponential_rules(60)),
        (XSERV_CONSTRAINT_GRAMMAR, "start: \"a\"{1000000000}".into()),
        (XSERV_CONSTRAINT_GRAMMAR, "A: B\nB: A\nstart: A".into()),
    ];
    for (number, (kind, text)) in cases.iter().enumerate() {
        let begin: String = text.chars().take(40).collect();
        bench.case(format!("{number}: {begin}"), move |meter| {
            let outcome = meter.time("generate", || model.generate(&constrained(*kind, text)));
            let said = outcome.as_ref().map_or_else(|f| f.message.clone(), |_| String::new());
            expect_answer(outcome)?;
            match said.len() < 600 {
                true => Ok(said),
                false => Err(format!("a message of {} bytes", said.len())),
            }
        });
    }
    bench.case("choices of all lengths", |meter| {
        let texts: Vec<CString> =
            (1..=2000).map(|len| c_string("ab".repeat(len / 4 + 1))).collect();
        let choices: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
        let request = xserv_request {
            constraint_kind: XSERV_CONSTRAINT_CHOICE as u32,
            choices: choices.as_ptr(),
            num_choices: choices.len(),
            ..drawn()
        };
        expect_answer(meter.time("generate", || model.generate(&request)))?;
        Ok(String::new())
    });
    // A text that goes on for long makes more and more of the automaton.
    for regex in ["(a|b)*a(a|b){12}", "(.*a.{9}){3}", "(?:[ab]{0,40}c?){40}"] {
        bench.case(format!("a long text of {regex}"), move |meter| {
            let request =
                xserv_request { max_tokens: 200, ..constrained(XSERV_CONSTRAINT_REGEX, regex) };
            // Two hundred steps, each of which may take some milliseconds of masks and of the model.
            expect_answer(meter.time("generate", || model.generate(&request)))?;
            Ok(String::new())
        });
    }
}

/// Returns `n` definitions, each of which refers to the next one twice.
fn exponential_refs(n: usize) -> String {
    let mut defs: Vec<String> = (0..n)
        .map(|i| {
            let next = format!("{{\"$ref\": \"#/$defs/d{}\"}}", i + 1);
            format!("\"d{i}\": {{\"properties\": {{\"a\": {next}, \"b\": {next}}}}}")
        })
        .collect();
    defs.push(format!("\"d{n}\": {{\"type\": \"null\"}}"));
    format!("{{\"$defs\": {{{}}}, \"$ref\": \"#/$defs/d0\"}}", defs.join(","))
}

fn exponential_all_of(n: usize) -> String {
    let pair = |i: usize| {
        format!("{{\"anyOf\": [{{\"minLength\": {i}}}, {{\"maxLength\": {}}}]}}", 100 + i)
    };
    let all: Vec<String> = (0..n).map(pair).collect();
    format!("{{\"type\": \"string\", \"allOf\": [{}]}}", all.join(","))
}

fn exponential_rules(n: usize) -> String {
    let rules: Vec<String> = (0..n).map(|i| format!("r{i}: r{} r{}\n", i + 1, i + 1)).collect();
    format!("start: r0\n{}r{n}: \"a\"", rules.concat())
}

/// Returns a conversation with these tools, of which the answer must call one.
fn call(model: &Model, tools: &str, meter: &mut Meter) -> Result<String, String> {
    let (messages, tools) = (c_string(MESSAGES), c_string(tools));
    let request = xserv_request {
        messages_json: messages.as_ptr(),
        tools_json: tools.as_ptr(),
        tool_choice: XSERV_TOOL_CHOICE_REQUIRED as u32,
        answer_format: XSERV_ANSWER_AUTO as u32,
        max_tokens: 2,
        ..request()
    };
    let outcome = meter.time("generate", || model.generate(&request));
    let said = outcome.as_ref().map_or_else(|f| f.message.clone(), |_| "works".to_string());
    expect_answer(outcome)?;
    let mut result = ptr::null_mut();
    let options = xserv_parse_options { tools_json: tools.as_ptr(), ..parse_options() };
    let text = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>";
    let parsed = meter.time("parse", || {
        let (text, len) = (text.as_ptr() as *const c_char, text.len());
        check(unsafe { xserv_parse_response(model.0, text, len, &options, &mut result) })
    });
    xserv_result_free(result);
    expect_answer(parsed)?;
    Ok(said)
}

fn parse_options() -> xserv_parse_options {
    let mut options = std::mem::MaybeUninit::uninit();
    unsafe {
        xserv_parse_options_init(options.as_mut_ptr(), size_of::<xserv_parse_options>());
        options.assume_init()
    }
}

fn tools(bench: &mut Bench) {
    let model = &Model::open(&tiny());
    // The trie of the vocabulary is made once.
    let fine = json!([{"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}]);
    call(model, &fine.to_string(), &mut Meter::default()).unwrap();
    let with = |parameters: &str| format!("[{{\"name\": \"f\", \"parameters\": {parameters}}}]");
    let nested = |n: usize| format!("{}true{}", "{\"items\":".repeat(n), "}".repeat(n));
    let properties: Vec<String> =
        (0..20_000).map(|i| format!("\"p{i}\": {{\"type\": \"string\"}}")).collect();
    let many: Vec<String> = (0..5_000).map(|i| format!("{{\"name\": \"f{i}\"}}")).collect();
    let cases = [
        ("no JSON", "[{".to_string()),
        ("no list", "{}".to_string()),
        ("a list of nothing", "[]".to_string()),
        ("numbers", "[1, 2]".to_string()),
        ("tools without names", "[{}, {\"function\": 7}]".to_string()),
        ("ten megabytes", with(&format!("{{\"const\": \"{}\"}}", "x".repeat(10 << 20)))),
        ("a long description", with(&format!("{{\"description\": \"{}\"}}", "x".repeat(500_000)))),
        ("a long name", format!("[{{\"name\": \"{}\"}}]", "x".repeat(500_000))),
        ("a name of quotes", "[{\"name\": \"\\\"> \\n start: \\u0000\"}]".to_string()),
        ("10,000 deep", with(&nested(10_000))),
        ("100 deep", with(&nested(100))),
        ("many properties", with(&format!("{{\"properties\": {{{}}}}}", properties.join(",")))),
        ("many tools", format!("[{}]", many.join(","))),
        ("a reference to itself", with("{\"$ref\": \"#\"}")),
        ("a reference elsewhere", with("{\"$ref\": \"file:///etc/passwd\"}")),
        ("references that double", with(&exponential_refs(40))),
        (
            "alternatives that double",
            with(&format!("{{\"properties\": {{\"a\": {}}}}}", exponential_all_of(18))),
        ),
        (
            "an expression",
            with("{\"properties\": {\"a\": {\"pattern\": \"(a{0,1000}){0,1000}\"}}}"),
        ),
        ("a switch", with("{\"x-guidance\": {\"lenient\": true}}")),
    ];
    for (name, text) in &cases {
        bench.case(*name, move |meter| call(model, text, meter));
    }
}

fn response_templates(bench: &mut Bench) {
    let field = |field: Value| json!({"start_anchor": "a", "fields": {"content": field}});
    let mut deep = json!("{content}");
    (0..100).for_each(|_| deep = json!([deep]));
    let many: Value = (0..10_000).map(|i| (format!("f{i}"), json!({"open": "a"}))).collect();
    let marks: Vec<String> = (0..60).map(|i| format!("{}{i}", "ab".repeat(400))).collect();
    let cases = [
        ("a number", json!(7)),
        ("three megabytes", field(json!({"close": "x".repeat(3 << 20)}))),
        ("deep", field(json!({"transform": deep}))),
        ("many fields", json!({"start_anchor": "a", "fields": many})),
        ("long marks", field(json!({"close": marks}))),
        ("lookaround", field(json!({"close_pattern": "(?=a)(?<!b)"}))),
        ("a large automaton", field(json!({"close_pattern": "(?:\\w{50}){50}"}))),
        (
            "repetitions",
            field(json!({"close_pattern": "((((a{0,100}){0,100}){0,100}){0,100}){0,100}"})),
        ),
        ("classes", field(json!({"close_pattern": "\\p{L}".repeat(600)}))),
        ("alternatives", field(json!({"close_pattern": "a|".repeat(2_000)}))),
        ("brackets", field(json!({"close_pattern": "(".repeat(4_000)}))),
        ("an expression that explodes", field(json!({"open_pattern": "(?:x+x+)+y"}))),
        (
            "an anchor that explodes",
            json!({"start_anchor_pattern": "(?:.*a){20}", "fields": {"content": {}}}),
        ),
        (
            "a tag that explodes",
            field(json!({"content": "xml-inline",
            "content_args": {"tag_pattern": "(?P<key>(?:.*a){20})"}})),
        ),
    ];
    for (name, template) in &cases {
        bench.folder(*name, Same, |copy| {
            copy.edit("tokenizer_config.json", |config| {
                config["response_template"] = template.clone()
            });
        });
    }
}
