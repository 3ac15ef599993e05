//! Answers are read as `tests/golden/answers/cases.json` says, however they are cut into pieces, and
//! no text takes the parser long or makes it fail.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{json, Value};
use xserv::text::{
    Answer, AnswerParser, AnswerPart, AnswerRules, AnswerStart, ToolForm, ToolTypes,
};

use super::files::cpu_seconds;
use super::support::{json as read_json, own};

const FORMS: [(&str, ToolForm); 5] = [
    ("none", ToolForm::None),
    ("json_tags", ToolForm::JsonTags),
    ("xml_tags", ToolForm::XmlTags),
    ("bare_json", ToolForm::BareJson),
    ("marked_json", ToolForm::MarkedJson),
];
const STARTS: [(&str, AnswerStart); 3] = [
    ("open", AnswerStart::Open),
    ("in_thought", AnswerStart::InThought),
    ("after_thought", AnswerStart::AfterThought),
];

fn named<T: Copy>(all: &[(&str, T)], name: &Value) -> T {
    all.iter().find(|(known, _)| name == known).unwrap_or_else(|| panic!("{name}")).1
}

fn rules(case: &Value) -> AnswerRules {
    AnswerRules {
        form: named(&FORMS, &case["form"]),
        start: named(&STARTS, &case["start"]),
        types: Arc::new(ToolTypes::of(&case["tools"])),
        id_seed: 7,
        template: None,
    }
}

/// Returns the answer that the pieces give, put together. Asserts that the parts are in an order
/// that makes sense.
pub fn streamed<'a>(rules: &AnswerRules, pieces: impl IntoIterator<Item = &'a str>) -> Answer {
    let mut parser = AnswerParser::new(rules.clone());
    let mut parts = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut parts);
    }
    parser.finish(&mut parts);
    let mut answer = Answer::default();
    let (mut num_calls, mut is_in_call) = (0, false);
    for part in &parts {
        match part {
            AnswerPart::Reasoning(text) | AnswerPart::Content(text) => {
                assert!(!text.is_empty() && !is_in_call, "{parts:?}");
            }
            AnswerPart::CallBegin { index, id, name } => {
                assert!(!is_in_call && *index == num_calls && !id.is_empty() && !name.is_empty());
                (num_calls, is_in_call) = (num_calls + 1, true);
            }
            AnswerPart::Arguments { index, piece } => {
                assert!(is_in_call && *index + 1 == num_calls && !piece.is_empty());
            }
            AnswerPart::CallEnd { index, .. } => {
                assert!(is_in_call && *index + 1 == num_calls);
                is_in_call = false;
            }
        }
        answer.add(part);
    }
    assert!(!is_in_call, "{parts:?}");
    answer
}

/// Every way to cut a text once, and the way to cut it everywhere.
pub fn assert_cuts_do_not_matter(rules: &AnswerRules, text: &str) -> Answer {
    let whole = rules.clone().parse(text);
    let places: Vec<usize> = (0..=text.len()).filter(|at| text.is_char_boundary(*at)).collect();
    for at in &places {
        let (before, after) = text.split_at(*at);
        assert_eq!(streamed(rules, [before, after]), whole, "{before:?} and {after:?}");
    }
    let characters = places.windows(2).map(|pair| &text[pair[0]..pair[1]]);
    assert_eq!(streamed(rules, characters), whole, "character by character: {text:?}");
    whole
}

#[test]
fn the_cases_are_read_right_however_they_are_cut() {
    let file = read_json(&own("answers/cases.json"));
    let cases = file["cases"].as_array().unwrap();
    let mut wrong = Vec::new();
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let found = assert_cuts_do_not_matter(&rules(case), text);
        let expected = case["calls"].as_array().unwrap();
        let mut is_right = found.reasoning == case["reasoning"].as_str().unwrap()
            && found.content == case["content"].as_str().unwrap()
            && found.calls.len() == expected.len();
        for (call, expected) in found.calls.iter().zip(expected) {
            let parsed: Option<Value> = serde_json::from_str(&call.arguments).ok();
            is_right &= call.name == expected["name"].as_str().unwrap()
                && call.is_complete == (expected["complete"] != json!(false))
                && match &expected["arguments"] {
                    Value::String(text) => *text == call.arguments,
                    Value::Object(map) if map.len() == 1 && map.contains_key("json") => {
                        parsed.as_ref() == Some(&map["json"])
                    }
                    value => parsed.as_ref() == Some(value),
                };
        }
        if !is_right {
            wrong.push(format!("{}: {found:#?}", case["name"]));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    assert!(cases.len() > 120);
}

#[test]
fn ids_tell_calls_apart_and_follow_from_their_seed() {
    let text = "<tool_call>{\"name\": \"f\"}</tool_call><tool_call>{\"name\": \"f\"}</tool_call>";
    let ids = |form, id_seed| -> Vec<String> {
        let text =
            if form == ToolForm::MarkedJson { "[TOOL_CALLS]f{}[TOOL_CALLS]f{}" } else { text };
        let rules = AnswerRules { form, id_seed, ..AnswerRules::default() };
        rules.parse(text).calls.into_iter().map(|call| call.id).collect()
    };
    let [first, second] = <[String; 2]>::try_from(ids(ToolForm::JsonTags, 1)).unwrap();
    assert!(first != second && first.starts_with("call_") && first.len() == 21, "{first}");
    assert_eq!(ids(ToolForm::JsonTags, 1), [first.clone(), second]);
    assert_ne!(ids(ToolForm::JsonTags, 2)[0], first);
    // Mistral's templates refuse others.
    for id in ids(ToolForm::MarkedJson, 3) {
        assert!(id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
    }
}

/// Pieces of which texts with much to be mistaken are made.
const PIECES: [&str; 44] = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "<function=f>",
    "</function>",
    "<parameter=",
    "<parameter=a>",
    "</parameter>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
    "<|python_tag|>",
    "{\"name\": \"f\", \"arguments\": {",
    "{\"name\":\"f\",\"parameters\":{}}",
    "{",
    "}",
    "[",
    "]",
    "\"",
    "\\",
    ":",
    ",",
    ";",
    "\n",
    " ",
    "f",
    "é",
    "日本",
    "🎉",
    "<",
    ">",
    "</",
    "12",
    "null",
    "\"a\": ",
    "\"name\"",
    "\t",
    "<<",
    "=",
    "\u{1}",
];

fn text_of_pieces() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        8 => (0..PIECES.len()).prop_map(|at| PIECES[at].to_owned()),
        1 => "[a-z<{\\[]{1,3}",
    ];
    proptest::collection::vec(piece, 0..14).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn cuts_do_not_matter(text in text_of_pieces(), form in 0..5usize, start in 0..3usize) {
        let tools = json!([{"name": "f", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}]);
        let rules = AnswerRules {
            form: FORMS[form].1,
            start: STARTS[start].1,
            types: Arc::new(if text.len() % 2 == 0 { ToolTypes::of(&tools) } else { ToolTypes::default() }),
            id_seed: 1,
            template: None,
        };
        let answer = assert_cuts_do_not_matter(&rules, &text);
        for call in answer.calls.iter().filter(|call| call.is_complete) {
            prop_assert!(serde_json::from_str::<Value>(&call.arguments).is_ok(), "{text:?}: {call:?}");
        }
    }

    #[test]
    fn text_without_tags_is_content(text in "[a-z <>=/\n]{0,40}", form in 0..5usize) {
        let rules = AnswerRules { form: FORMS[form].1, ..AnswerRules::default() };
        prop_assume!(!["<think>", "<tool_call>", "<function="].iter().any(|tag| text.contains(tag)));
        prop_assert_eq!(rules.parse(&text).content, text);
    }
}

/// Texts of a megabyte that mean no good, whole and byte by byte.
#[test]
fn no_text_takes_long() {
    const SIZE: usize = 1 << 20;
    let full = |unit: &str| unit.repeat(SIZE / unit.len());
    let after = |begin: &str, unit: &str| format!("{begin}{}", full(unit));
    let texts = [
        full("<"),
        full(" "),
        full("<think>"),
        full("<tool_call>"),
        full("<tool_call>{"),
        full("<tool_call>{\"name\":\""),
        full("<function=f>"),
        full("{"),
        full("{\"name\":"),
        full("[TOOL_CALLS]"),
        full("[TOOL_CALLS]["),
        full("[TOOL_CALLS]f{"),
        after("<think>", "</thin"),
        after("<think>", "<tool_call> "),
        after("<tool_call>", " "),
        after("<tool_call>{\"name\": \"f\", \"arguments\": ", "["),
        after("<tool_call>{\"name\": \"f\", \"arguments\": ", "{\"a\":"),
        after("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"", "\n"),
        after("<tool_call>{\"arguments\": {\"a\": \"", "<tool_call>"),
        after("<tool_call><function=f><parameter=a>", "</parameter>"),
        after("<tool_call><function=f><parameter=a>", "</parameter> "),
        after("<tool_call><function=f><parameter=a>", "\n<parameter=a>"),
        after("<tool_call><function=f><parameter=a>", "</function>"),
        after("<tool_call><function=f><parameter=a></parameter>", " "),
        after("<tool_call><function=f><parameter=b>", "</parameter>x"),
        after("<tool_call><function=f>", "<parameter=a>1</parameter>"),
        after("{\"x\": ", "{\"name\": \"f\", \"parameters\": "),
    ];
    let tools = json!([{"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}]);
    let mut slow = Vec::new();
    for text in &texts {
        for (name, form) in FORMS {
            let rules = AnswerRules {
                form,
                types: Arc::new(ToolTypes::of(&tools)),
                ..AnswerRules::default()
            };
            let begin = cpu_seconds();
            let whole = rules.clone().parse(text);
            let by_bytes = streamed(&rules, (0..text.len()).map(|at| &text[at..=at]));
            let took = cpu_seconds() - begin;
            assert_eq!(by_bytes, whole);
            if took > 2.0 {
                slow.push(format!("{name}, {:?}...: {took:.1} s", &text[..40]));
            }
        }
    }
    assert!(slow.is_empty(), "{}", slow.join("\n"));
}
