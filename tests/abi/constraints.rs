//! Constrained output: the forms that a request can ask for, by what comes out of the repository's
//! model, which knows nothing of them. The tokens of given texts are forced as first_tokens.

use std::ffi::{c_char, CString};
use std::process::Command;
use std::ptr;

use serde_json::{json, Value};
use xserv::ffi::xserv_constraint_kind::*;
use xserv::ffi::xserv_finish_reason::*;
use xserv::ffi::*;

use crate::batching::{tokens, Submission};
use crate::client::*;
use crate::cuda::shared_cuda;

/// Returns the request with a constraint of this kind, whose text must live as long.
fn constrained(request: xserv_request, kind: xserv_constraint_kind, text: &str) -> xserv_request {
    xserv_request {
        constraint_kind: kind as u32,
        constraint: text.as_ptr() as *const c_char,
        constraint_len: text.len(),
        ..request
    }
}

fn schema(request: xserv_request, text: &str) -> xserv_request {
    constrained(request, XSERV_CONSTRAINT_JSON_SCHEMA, text)
}

/// Drawn tokens, of all that there are.
fn drawn(ids: &[u32], max_tokens: u32, seed: u64) -> xserv_request {
    let all = xserv_request { top_k: 0, top_p: 1.0, min_p: 0.0, ..greedy(ids, max_tokens) };
    xserv_request { temperature: 1.0, seed, ..all }
}

fn is_whole(output: &Output) -> bool {
    let reasons = [XSERV_FINISH_COMPLETE as u32, XSERV_FINISH_STOP_TOKEN as u32];
    reasons.contains(&output.finish_reason)
}

#[test]
fn every_form_is_kept_to() {
    let model = Model::open(&tiny());
    let ids = tokens(20, 1);
    let texts =
        ["yes", "no", "perhaps.", "a (b|c)* \n\"d\" \\e é"].map(|text| CString::new(text).unwrap());
    let pointers: Vec<_> = texts.iter().map(|text| text.as_ptr()).collect();
    let choice = |request| xserv_request {
        constraint_kind: XSERV_CONSTRAINT_CHOICE as u32,
        choices: pointers.as_ptr(),
        num_choices: pointers.len(),
        ..request
    };
    let regex = "[A-Z][a-z]{2,5} (18|19|20)[0-9]{2}";
    let grammar =
        "start: term ((\"+\" | \"-\") term)*\nterm: NUMBER | \"(\" start \")\"\nNUMBER: /[0-9]+/";
    for seed in 0..12 {
        let request = drawn(&ids, 60, seed);
        let output = model.generate(&choice(request)).unwrap();
        assert_eq!(output.finish_reason, XSERV_FINISH_COMPLETE as u32, "{output:?}");
        assert!(texts.iter().any(|text| text.to_str().unwrap() == output.text), "{output:?}");

        let output = model.generate(&constrained(request, XSERV_CONSTRAINT_REGEX, regex)).unwrap();
        assert_eq!(output.finish_reason, XSERV_FINISH_COMPLETE as u32, "{output:?}");
        let (name, year) = output.text.split_once(' ').unwrap();
        assert!(
            (3..=6).contains(&name.len()) && name.starts_with(|c: char| c.is_ascii_uppercase())
        );
        assert!((1800..2100).contains(&year.parse::<u32>().unwrap()), "{output:?}");

        let request = constrained(request, XSERV_CONSTRAINT_GRAMMAR, grammar);
        let output = model.generate(&request).unwrap();
        assert!(output.text.chars().all(|c| "0123456789()+-".contains(c)), "{output:?}");
        if is_whole(&output) {
            assert!(is_sum(&mut output.text.as_bytes()), "{output:?}");
        }

        let object = xserv_request {
            constraint_kind: XSERV_CONSTRAINT_JSON_OBJECT as u32,
            ..drawn(&ids, 300, seed)
        };
        let output = model.generate(&object).unwrap();
        assert!(output.text.starts_with('{'), "{output:?}");
        if is_whole(&output) {
            let value: Value = serde_json::from_str(&output.text).unwrap();
            assert!(value.is_object());
        }
    }
}

/// Whether a text is one of the grammar above: sums of numbers and of sums in brackets.
fn is_sum(text: &mut &[u8]) -> bool {
    fn sum(rest: &mut &[u8]) -> bool {
        while term(rest) {
            match rest.first() {
                Some(b'+' | b'-') => *rest = &rest[1..],
                _ => return true,
            }
        }
        false
    }
    fn term(rest: &mut &[u8]) -> bool {
        if rest.first() == Some(&b'(') {
            *rest = &rest[1..];
            let closes = sum(rest) && rest.first() == Some(&b')');
            *rest = rest.get(1..).unwrap_or_default();
            return closes;
        }
        let digits = rest.iter().take_while(|b| b.is_ascii_digit()).count();
        *rest = &rest[digits..];
        digits > 0
    }
    sum(text) && text.is_empty()
}

/// Random numbers that are the same every time.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % end
    }
}

/// Returns a random schema of what constraints know.
fn random_schema(random: &mut Random, depth: u32) -> Value {
    let kinds = if depth == 0 { 7 } else { 11 };
    match random.below(kinds) {
        0 => json!({ "type": "integer", "minimum": -50, "exclusiveMaximum": random.below(5000) }),
        1 => json!({ "type": "number", "minimum": 0.5, "maximum": 99.25 }),
        2 => json!({ "type": "string", "minLength": 1, "maxLength": 2 + random.below(9) }),
        3 => json!({ "type": "string", "pattern": "^[a-f]{2,4}(-[0-9]+)?$", "maxLength": 12 }),
        4 => json!({ "enum": ["red", "gr\u{fc}n", 7, null, [1, { "a": 2 }]] }),
        5 => json!({ "type": ["boolean", "null"] }),
        6 => {
            // Not those with times: a leap second may come at any minute.
            let formats = ["date", "ipv4", "uuid", "email"];
            json!({ "type": "string", "format": formats[random.below(4) as usize] })
        }
        7 => json!({
            "type": "array",
            "items": random_schema(random, depth - 1),
            "minItems": random.below(3),
            "maxItems": 3,
        }),
        8 => json!({ "anyOf": [random_schema(random, depth - 1), { "const": "none" }] }),
        _ => {
            let names = ["id", "name with space", "tags", "gr\u{f6}\u{df}e", "x\"y"];
            let count = 1 + random.below(4) as usize;
            let properties: serde_json::Map<_, _> = names[..count]
                .iter()
                .map(|name| (name.to_string(), random_schema(random, depth - 1)))
                .collect();
            let required: Vec<_> = names[..count].iter().filter(|_| random.below(3) > 0).collect();
            json!({
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": false,
            })
        }
    }
}

#[test]
fn answers_to_random_schemas_are_valid() {
    let model = Model::open(&tiny());
    let ids = tokens(20, 1);
    let mut random = Random(5);
    let (mut num_whole, mut num_cut) = (0, 0);
    // Several at a time, of different schemas.
    for round in 0..63 {
        let schemas: Vec<Value> = (0..8).map(|_| random_schema(&mut random, 3)).collect();
        let texts: Vec<String> = schemas.iter().map(Value::to_string).collect();
        let requests = texts.iter().map(|text| schema(drawn(&ids, 160, round), text));
        let under_way: Vec<_> = requests
            .map(|request| Submission::new(&model, &request, ptr::null()).unwrap())
            .collect();
        for (submission, value) in under_way.iter().zip(&schemas) {
            let (_, text, reason) = submission.finish(1).remove(0);
            if reason == XSERV_FINISH_MAX_TOKENS as u32 {
                num_cut += 1;
                continue;
            }
            num_whole += 1;
            let instance: Value =
                serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
            let validator = jsonschema::options()
                .with_draft(jsonschema::Draft::Draft202012)
                .should_validate_formats(true)
                .build(value)
                .unwrap();
            assert!(validator.is_valid(&instance), "{text}\nof {value}");
        }
    }
    assert!(num_whole > 300, "{num_whole} were whole, {num_cut} cut");
}

/// Whether the first tokens, which spell a text and its end, fit to a schema.
fn fits(model: &Model, request: xserv_request, text: &str) -> bool {
    let mut first = model.tokenize(text).unwrap();
    let info = model.info();
    first.push(unsafe { *info.eos_token_ids });
    let forced = xserv_request {
        first_tokens: first.as_ptr(),
        num_first_tokens: first.len(),
        max_tokens: 1,
        ..request
    };
    match model.generate(&forced) {
        Ok(_) => true,
        Err(failure) => {
            assert_eq!(failure.status, xserv_status::XSERV_STATUS_INVALID_ARGUMENT);
            assert!(failure.message.contains("first_tokens["), "{}", failure.message);
            false
        }
    }
}

#[test]
fn the_test_suite_holds_through_this_interface() {
    let model = Model::open(&tiny());
    let ids = tokens(2, 1);
    let path = root().join("tests/golden/constraints/json-schema-test-suite.json");
    let cases: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let (mut num_accepted, mut num_valid, mut num_invalid) = (0, 0, 0);
    // All of them are in the tests of matchers.
    for case in cases.as_array().unwrap().iter().step_by(4) {
        let text = case["schema"].to_string();
        let request = schema(greedy(&ids, 1), &text);
        if let Err(failure) = model.generate(&request) {
            assert_eq!(failure.status, xserv_status::XSERV_STATUS_INVALID_ARGUMENT);
            assert!(failure.message.starts_with("the JSON schema: "), "{}", failure.message);
            continue;
        }
        num_accepted += 1;
        for test in case["tests"].as_array().unwrap() {
            let fits = fits(&model, request, &test["data"].to_string());
            match test["valid"].as_bool().unwrap() {
                true => num_valid += usize::from(fits),
                false => {
                    assert!(!fits, "{} takes {}", case["name"], test["data"]);
                    num_invalid += 1;
                }
            }
        }
    }
    assert!(
        num_accepted > 30 && num_valid > 50 && num_invalid > 50,
        "{num_accepted} {num_valid} {num_invalid}"
    );
}

/// Returns the answer to a request that is refused.
fn refusal(model: &Model, request: &xserv_request) -> Failure {
    match model.generate(request) {
        Ok(output) => panic!("{output:?}"),
        Err(failure) => failure,
    }
}

#[test]
fn what_cannot_be_followed_is_refused_by_its_path() {
    let model = Model::open(&tiny());
    let ids = tokens(4, 1);
    for (text, words) in [
        (
            r#"{"properties": {"a/b": {"items": {"uniqueItems": true}}}}"#,
            "#/properties/a~1b/items/uniqueItems is not",
        ),
        (r##"{"$defs": {"x": {"if": true}}, "$ref": "#/$defs/x"}"##, "#/$defs/x/if is not"),
        (
            r#"{"properties": {"d": {"format": "chickenbutt"}}}"#,
            "#/properties/d/format: Unknown format",
        ),
        (r#"{"type": "strnig"}"#, "#/type: Invalid type: strnig"),
        (r#"{"$ref": "https://example.com/schema.json"}"#, "#/$ref: "),
        (r##"{"properties": {"a": {"$ref": "#/$defs/none"}}}"##, "#/properties/a/$ref: "),
        (r#"{"oneOf": [{"type": "integer"}, {"minimum": 2}]}"#, "#/oneOf: "),
        (
            r#"{"properties": {"n": {"oneOf": [{"minimum": 2}, {"type": "number"}]}, "o": {"oneOf": [{"type": "null"}, {"type": "string"}]}}}"#,
            "#/properties/n/oneOf, or another of 2 oneOf: ",
        ),
        (r#"{"x-guidance": {"lenient": true}, "not": {}}"#, "#/x-guidance is not allowed"),
        (r#"{"x-guidanc\u0065": {"coerce_one_of": true}}"#, "#/x-guidance is not allowed"),
        (r#"{"enum": []}"#, "Unsatisfiable"),
        ("false", "Unsatisfiable"),
        ("[1]", "neither an object nor a boolean"),
        ("{\"a\": ", "it is not JSON"),
        (" ", "is empty"),
    ] {
        let failure = refusal(&model, &schema(greedy(&ids, 4), text));
        assert_eq!(failure.status, xserv_status::XSERV_STATUS_INVALID_ARGUMENT, "{text}");
        assert!(failure.message.contains(words), "{text}: {}", failure.message);
        assert!(
            !failure.message.contains("lenient") && !failure.message.contains("coerce"),
            "{}",
            failure.message
        );
    }
    for (kind, text, words) in [
        (XSERV_CONSTRAINT_REGEX, "a(b", "the regular expression: "),
        (XSERV_CONSTRAINT_REGEX, "", "is empty"),
        (XSERV_CONSTRAINT_GRAMMAR, "start: nothing", "the grammar: "),
        (
            XSERV_CONSTRAINT_GRAMMAR,
            "start: %json {\"x-guidance\": {\"lenient\": true}, \"not\": {}}",
            "x-guidance",
        ),
        (
            XSERV_CONSTRAINT_GRAMMAR,
            "start: %json {\"x-guidanc\\u0065\": {\"lenient\": true}}",
            "x-guidance",
        ),
    ] {
        let failure = refusal(&model, &constrained(greedy(&ids, 4), kind, text));
        assert_eq!(failure.status, xserv_status::XSERV_STATUS_INVALID_ARGUMENT, "{text}");
        assert!(failure.message.contains(words), "{text}: {}", failure.message);
    }
    let refused = |request: xserv_request, words: &str| {
        let failure = refusal(&model, &request);
        assert_eq!(failure.status, xserv_status::XSERV_STATUS_INVALID_ARGUMENT);
        assert!(failure.message.contains(words), "{}", failure.message);
    };
    let usual = greedy(&ids, 4);
    refused(xserv_request { constraint_kind: 6, ..usual }, "constraint_kind is 6");
    refused(xserv_request { constraint_kind: 1, ..usual }, "request.constraint is NULL");
    refused(constrained(usual, XSERV_CONSTRAINT_JSON_OBJECT, "{}"), "its kind has no text");
    refused(constrained(usual, XSERV_CONSTRAINT_NONE, "{}"), "its kind has no text");
    refused(xserv_request { constraint_kind: 5, ..usual }, "no choices");
    let empty = CString::default();
    let pointers = [empty.as_ptr(); 5000];
    let choices = |kind, num_choices| xserv_request {
        constraint_kind: kind,
        choices: pointers.as_ptr(),
        num_choices,
        ..usual
    };
    refused(choices(5, 2), "choice 0 is empty");
    refused(choices(5, 5000), "num_choices is 5000");
    refused(choices(0, 1), "XSERV_CONSTRAINT_CHOICE");
}

/// Each is refused in one sentence, or taken, within two seconds.
/// Words that no draft has are annotations, and those of the drafts that allow or forbid are refused.
#[test]
fn words_of_no_draft_count_for_nothing() {
    let model = Model::open(&tiny());
    let ids = tokens(2, 1);
    for words in ["", r#", "chickenbutt": {"not": {}}"#, r#", "title": "t", "deprecated": true"#] {
        let text = format!(r#"{{"type": "integer"{words}}}"#);
        let request = schema(greedy(&ids, 1), &text);
        assert!(fits(&model, request, "12"), "{text}");
        assert!(!fits(&model, request, "\"a\""), "{text}");
    }
    let text = r#"{"type": "integer", "not": {}}"#;
    assert!(model.generate(&schema(greedy(&ids, 1), text)).is_err());
}

#[test]
fn constraints_compose_with_everything_else() {
    let model = Model::open(&tiny());
    let ids = tokens(30, 2);
    let text = r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 999, "minimum": 0}}, "required": ["name", "n"], "additionalProperties": false}"#;
    let check = |output: &Output| {
        let value: Value =
            serde_json::from_str(&output.text).unwrap_or_else(|_| panic!("{output:?}"));
        assert!(value["name"].as_str().unwrap().chars().count() <= 12);
        assert!(value["n"].as_u64().unwrap() < 1000);
    };
    // The same alone, in a batch, and as a sample; the seed decides.
    let request = schema(drawn(&ids, 120, 40), text);
    let alone: Vec<Output> = (0..6)
        .map(|i| model.generate(&xserv_request { seed: 40 + i, ..request }).unwrap())
        .collect();
    assert!(alone.iter().any(|output| output.text != alone[0].text));
    alone.iter().filter(|output| is_whole(output)).for_each(check);
    let samples =
        Submission::new(&model, &xserv_request { num_samples: 6, ..request }, ptr::null()).unwrap();
    let free = Submission::new(&model, &drawn(&ids, 120, 3), ptr::null()).unwrap();
    let got = samples.finish(6);
    for (alone, (got_ids, ..)) in alone.iter().zip(&got) {
        assert_eq!(&alone.ids, got_ids);
    }
    drop(free);

    // Everything at once.
    let bias = [xserv_logit_bias { token_id: 7, bias: 3.0 }];
    let request = xserv_request {
        repetition_penalty: 1.2,
        presence_penalty: 0.3,
        frequency_penalty: 0.1,
        top_k: 40,
        top_p: 0.95,
        min_p: 0.01,
        min_tokens: 5,
        logit_bias: bias.as_ptr(),
        num_logit_bias: 1,
        num_log_probs: 5,
        processed_log_probs: 1,
        ..schema(drawn(&ids, 200, 1), text)
    };
    for (temperature, typical_p, no_repeat_ngram_size) in
        [(0.0, 1.0, 0), (0.7, 0.9, 0), (1e30, 1.0, 0), (1.0, 1.0, 9)]
    {
        let request = xserv_request { temperature, typical_p, no_repeat_ngram_size, ..request };
        let output = model.generate(&request).unwrap();
        if is_whole(&output) {
            check(&output);
        }
    }

    // An answer that begins as it should goes on as it should; one that does not is refused.
    let first = model.tokenize("{\"name\": \"ab").unwrap();
    let begun = |first: &[u32], request: xserv_request| {
        let request = xserv_request {
            first_tokens: first.as_ptr(),
            num_first_tokens: first.len(),
            ..request
        };
        model.generate(&request)
    };
    let output = begun(&first, schema(drawn(&ids, 100, 2), text)).unwrap();
    assert!(output.text.starts_with("{\"name\": \"ab"), "{output:?}");
    let wrong = model.tokenize("{\"name\": 1").unwrap();
    let failure = begun(&wrong, schema(drawn(&ids, 100, 2), text)).unwrap_err();
    assert!(failure.message.contains(&format!("first_tokens[{}]", wrong.len() - 1)), "{failure:?}");

    // A stop string ends the text before it is complete.
    let stop = c_string("\"n\"");
    let stops = [stop.as_ptr()];
    let request = xserv_request {
        stop_strings: stops.as_ptr(),
        num_stop_strings: 1,
        ..schema(drawn(&ids, 300, 8), text)
    };
    let output = model.generate(&request).unwrap();
    assert!(!output.text.contains("\"n\""), "{output:?}");
}

#[test]
fn ends_come_where_the_text_is_complete() {
    let model = Model::open(&tiny());
    let ids = tokens(30, 2);
    let info = model.info();
    let end = unsafe { *info.eos_token_ids };
    // The end is the likeliest by far.
    let bias = [xserv_logit_bias { token_id: end, bias: 1000.0 }];
    let eager = xserv_request { logit_bias: bias.as_ptr(), num_logit_bias: 1, ..greedy(&ids, 50) };
    let request = constrained(eager, XSERV_CONSTRAINT_REGEX, "[0-9]{3}[a-z]*");
    let output = model.generate(&request).unwrap();
    assert_eq!(output.finish_reason, XSERV_FINISH_STOP_TOKEN as u32);
    assert_eq!(output.ids.last(), Some(&end));
    assert!(
        output.text.len() >= 3 && output.text.as_bytes()[..3].iter().all(u8::is_ascii_digit),
        "{output:?}"
    );
    // min_tokens keeps it away.
    let output = model.generate(&xserv_request { min_tokens: 20, ..request }).unwrap();
    assert!(output.ids.len() >= 20, "{output:?}");
    // An end token that ends nothing is no text either.
    let output = model.generate(&xserv_request { ignore_eos: 1, ..request }).unwrap();
    assert_eq!((output.finish_reason, output.ids.len()), (XSERV_FINISH_MAX_TOKENS as u32, 50));
    assert!(!output.ids.contains(&end));
    // Nor is a token of text that ends the answer, where the text is not complete.
    let digits = model.tokenize("7").unwrap();
    assert_eq!(digits.len(), 1);
    let request = xserv_request {
        stop_token_ids: digits.as_ptr(),
        num_stop_token_ids: 1,
        ..constrained(greedy(&ids, 50), XSERV_CONSTRAINT_REGEX, "7?[0-9]{4}")
    };
    let output = model.generate(&request).unwrap();
    assert!(!output.text.contains('7'), "{output:?}");
    // What the text needs may be in such a token alone.
    let needed = constrained(request, XSERV_CONSTRAINT_REGEX, "7");
    let failure = refusal(&model, &needed);
    assert!(failure.message.contains("end and stop tokens"), "{failure:?}");
    // Everything that is allowed is banned.
    let bans: Vec<_> = (0..info.vocab_size)
        .filter(|token_id| !digits.contains(token_id))
        .map(|token_id| xserv_logit_bias { token_id, bias: f32::NEG_INFINITY })
        .collect();
    for temperature in [0.0, 1.0, 1e30] {
        let request = xserv_request {
            logit_bias: bans.as_ptr(),
            num_logit_bias: bans.len(),
            ..xserv_request {
                temperature,
                ..constrained(drawn(&ids, 50, 1), XSERV_CONSTRAINT_REGEX, "7[a-z]+")
            }
        };
        let failure = refusal(&model, &request);
        assert!(failure.message.contains("no token is left"), "{failure:?}");
        let one = constrained(request, XSERV_CONSTRAINT_REGEX, "7{30}");
        assert_eq!(model.generate(&one).unwrap().text, "7".repeat(30));
    }
}

/// Sequences that lose their blocks go on where they were.
#[test]
fn preempted_answers_are_the_same() {
    let text = r#"{"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"], "additionalProperties": false}, "minItems": 40}"#;
    let roomy = Model::open(&tiny());
    let prompts: Vec<Vec<u32>> = (0..6).map(|salt| tokens(40, salt)).collect();
    let expected: Vec<_> = prompts
        .iter()
        .map(|ids| roomy.generate(&schema(drawn(ids, 300, 9), text)).unwrap().ids)
        .collect();
    let small = xserv_load_options { kv_cache_tokens: 1024, ..load_options() };
    let model = Model::load(&tiny(), &small).unwrap();
    let under_way: Vec<_> = prompts
        .iter()
        .map(|ids| Submission::new(&model, &schema(drawn(ids, 300, 9), text), ptr::null()).unwrap())
        .collect();
    for (submission, expected) in under_way.iter().zip(&expected) {
        assert_eq!(&submission.finish(1)[0].0, expected);
    }
    assert!(crate::batching::stats(&model).total_preemptions > 0);
}

/// The tests of this file once more, over a model on a GPU.
#[test]
fn all_of_it_holds_on_cuda() {
    let Some(_device) = shared_cuda() else { return };
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["constraints::", "--skip", "constraints::all_of_it_holds_on_cuda"])
        .env(TEST_ON_CUDA, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("test result: ok. "), "{text}{errors}");
}
