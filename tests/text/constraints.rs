//! Matchers against instances of JSON schemas that are known to be valid or not.

use crate::support::{json, own, real_tokenizers, tokenizer};
use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities};
use llguidance::{Matcher, ParserFactory};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use xserv::error::{Error, ErrorKind};
use xserv::text::{Constraint, GrammarCompiler, GrammarMatcher, Progress, Tokenizer};

/// Returns the end token of a matcher: the vocabulary's last id.
fn compiler(tokenizer: &Tokenizer) -> GrammarCompiler {
    GrammarCompiler::new(tokenizer, tokenizer.vocab_size()).unwrap()
}

fn own_tokenizer() -> Arc<Tokenizer> {
    tokenizer(&Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-qwen3"))
}

/// Times of masks, in microseconds.
#[derive(Default)]
struct Times(Vec<u64>);

impl Times {
    fn quantile(&mut self, share: f64) -> u64 {
        self.0.sort_unstable();
        self.0.get((self.0.len() as f64 * share) as usize).copied().unwrap_or(0)
    }
}

/// Returns the tokens of a text as it is: where the tokenizer would normalize it, those of its
/// characters.
fn spelt(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let ids = tokenizer.encode(text, false, false).unwrap();
    if tokenizer.decode(&ids, false).unwrap() == text {
        return ids;
    }
    let single = |byte: u8| {
        let mut all = 0..tokenizer.vocab_size() as u32;
        all.find(|id| tokenizer.token_bytes(*id) == Some(&[byte])).unwrap()
    };
    text.bytes().map(single).collect()
}

/// Whether a matcher takes a text token by token, and it may end there; an error if it breaks. Each mask
/// allows exactly what the matcher takes.
fn takes(
    matcher: &mut GrammarMatcher,
    tokenizer: &Tokenizer,
    text: &str,
    times: &mut Times,
) -> Result<bool, Error> {
    let end = tokenizer.eos_token_id().unwrap();
    let mut progress = Progress::Open;
    for id in spelt(tokenizer, text) {
        if progress == Progress::Complete {
            return Ok(false);
        }
        let begin = Instant::now();
        let is_allowed = matcher.mask(&[end], |id| tokenizer.is_special(id))?.allows(id);
        times.0.push(begin.elapsed().as_micros() as u64);
        match matcher.consume(id) {
            Ok(now) => progress = now,
            Err(error) if error.kind() == ErrorKind::Unsupported => return Err(error),
            Err(error) => {
                assert!(!is_allowed, "{text}: {error}");
                return Ok(false);
            }
        }
        assert!(is_allowed, "{text}: the mask does not allow {id}");
    }
    if progress == Progress::Complete {
        return Ok(true);
    }
    let is_complete = matcher.is_complete()?;
    let mask = matcher.mask(&[end], |id| tokenizer.is_special(id))?;
    assert_eq!(mask.allows(end), is_complete, "{text}");
    Ok(is_complete)
}

/// The counts over many schemas.
struct Tally {
    factory: ParserFactory,
    schemas: usize,
    refused: Vec<String>,
    valid_taken: usize,
    valid_refused: Vec<String>,
    invalid_taken: Vec<String>,
    invalid_refused: usize,
    broken: Vec<String>,
    masks: Times,
    compile: Times,
    /// Schemas that llguidance accepts with its own settings, and those of them that are refused here.
    accepted_by_default: usize,
    refused_here_alone: Vec<String>,
}

/// Returns a factory of parsers with llguidance's own settings, over bytes: which schemas it
/// accepts does not depend on the vocabulary.
fn default_factory() -> ParserFactory {
    let env = ApproximateTokEnv::single_byte_env();
    let slices = SlicedBiasComputer::general_slices();
    let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices).unwrap();
    factory.quiet();
    factory
}

/// Whether llguidance accepts a schema with these settings.
fn is_accepted(factory: &ParserFactory, schema: &Value) -> bool {
    let accepted = || {
        let mut parser =
            factory.create_parser(TopLevelGrammar::from_json_schema(schema.clone()))?;
        parser.start_without_prompt();
        Matcher::new(Ok(parser)).compute_mask().map(drop)
    };
    // It fails by panics, too.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(accepted))
        .is_ok_and(|outcome| outcome.is_ok())
}

impl Tally {
    fn new() -> Self {
        Tally {
            factory: default_factory(),
            schemas: 0,
            refused: Vec::new(),
            valid_taken: 0,
            valid_refused: Vec::new(),
            invalid_taken: Vec::new(),
            invalid_refused: 0,
            broken: Vec::new(),
            masks: Times::default(),
            compile: Times::default(),
            accepted_by_default: 0,
            refused_here_alone: Vec::new(),
        }
    }

    fn schema(
        &mut self,
        name: &str,
        schema: &Value,
        tests: &[Value],
        compiler: &GrammarCompiler,
        tokenizer: &Tokenizer,
    ) {
        self.schemas += 1;
        let text = schema.to_string();
        let begin = Instant::now();
        let compiled = compiler.compile(&Constraint::JsonSchema(&text));
        self.compile.0.push(begin.elapsed().as_micros() as u64);
        let by_default = is_accepted(&self.factory, schema);
        self.accepted_by_default += usize::from(by_default);
        let fresh = match compiled {
            Ok(fresh) => fresh,
            Err(error) => {
                let refusal = format!("{name}: {error}");
                if by_default {
                    self.refused_here_alone.push(refusal.clone());
                }
                return self.refused.push(refusal);
            }
        };
        for (place, test) in tests.iter().enumerate() {
            let mut matcher = fresh.try_clone().unwrap();
            let text = test["data"].to_string();
            let name = format!("{name} #{place}");
            let is_taken = match takes(&mut matcher, tokenizer, &text, &mut self.masks) {
                Ok(is_taken) => is_taken,
                Err(error) => {
                    self.broken.push(format!("{name}: {error}"));
                    continue;
                }
            };
            match (test["valid"].as_bool().unwrap(), is_taken) {
                (true, true) => self.valid_taken += 1,
                (true, false) => self.valid_refused.push(name),
                (false, true) => self.invalid_taken.push(name),
                (false, false) => self.invalid_refused += 1,
            }
        }
    }

    fn print(&mut self) {
        for line in self.refused.iter().take(40) {
            println!("refused {line}");
        }
        for line in self.valid_refused.iter().take(40) {
            println!("valid instance refused: {line}");
        }
        for line in self.invalid_taken.iter().take(40) {
            println!("invalid instance taken: {line}");
        }
        for line in self.broken.iter().take(40) {
            println!("broken {line}");
        }
        println!(
            "{} schemas, {} refused, {} instances broken; valid instances: {} taken, {} refused; invalid: {} refused, {} taken",
            self.schemas,
            self.refused.len(),
            self.broken.len(),
            self.valid_taken,
            self.valid_refused.len(),
            self.invalid_refused,
            self.invalid_taken.len()
        );
        println!(
            "{} schemas are accepted, {} with llguidance's own settings; refused here alone:",
            self.schemas - self.refused.len(),
            self.accepted_by_default
        );
        self.refused_here_alone.iter().for_each(|refusal| println!("  {refusal}"));
        for (what, times) in [("mask", &mut self.masks), ("compile", &mut self.compile)] {
            println!(
                "{what} of {} in µs: p50 {} p90 {} p99 {} p99.9 {} max {}",
                times.0.len(),
                times.quantile(0.5),
                times.quantile(0.9),
                times.quantile(0.99),
                times.quantile(0.999),
                times.quantile(1.0 - 1e-9)
            );
        }
    }
}

/// For a folder of MaskBench (`maskbench/data` of the public repository guidance-ai/jsonschemabench):
/// `XSERV_MASKBENCH=FOLDER cargo test --release --test text -- maskbench --nocapture`. With the tokenizer
/// of Qwen3 where that is there.
#[test]
fn maskbench() {
    let Some(folder) = std::env::var_os("XSERV_MASKBENCH").map(PathBuf::from) else {
        return println!("skipped: XSERV_MASKBENCH is not set");
    };
    let every: usize = std::env::var("XSERV_MASKBENCH_EVERY").map_or(1, |n| n.parse().unwrap());
    let tokenizer = match real_tokenizers() {
        Some(folder) => tokenizer(&folder.join("qwen3")),
        None => own_tokenizer(),
    };
    let begin = Instant::now();
    let compiler = compiler(&tokenizer);
    println!("trie of {} tokens: {:?}", tokenizer.vocab_size(), begin.elapsed());
    let mut files: Vec<_> =
        std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut tally = Tally::new();
    for file in files.iter().step_by(every) {
        let data = json(file);
        let name = file.file_name().unwrap().to_string_lossy();
        let tests = data["tests"].as_array().cloned().unwrap_or_default();
        tally.schema(&name, &data["schema"], &tests, &compiler, &tokenizer);
    }
    tally.print();
    assert!(tally.invalid_taken.is_empty(), "invalid instances were taken");
    let unknown: Vec<&String> =
        tally.refused_here_alone.iter().filter(|refusal| !is_on_purpose(refusal)).collect();
    assert!(unknown.is_empty(), "llguidance accepts these: {unknown:#?}");
}

/// Whether a schema is refused for a reason of the library's own: for words that llguidance passes
/// over, or for the limits of time and memory.
fn is_on_purpose(refusal: &str) -> bool {
    ["is not supported", "too large", "too complex", "at most"]
        .iter()
        .any(|reason| refusal.contains(reason))
}

/// Valid instances that no constraint lets come, because a matcher knows one spelling of a value only:
/// numbers as a const or an enum writes them, the properties of a const object and of several schemas
/// together in their order.
const OTHERWISE_SPELT: [&str; 11] = [
    "allOf: allOf #0",
    "const: const with object #1",
    "const: const with 0 does not match other zero-like types #2",
    "const: const with 1 does not match true #2",
    "const: const with -2.0 matches integer and float types #2",
    "const: float and integers are equal up to 64-bit representation limits #2",
    "enum: enum with 0 does not match false #2",
    "enum: enum with [0] does not match [false] #2",
    "enum: enum with 1 does not match true #2",
    "enum: enum with [1] does not match [true] #2",
    "type: integer type matches integers #1",
];

/// The schemas of the repository, which say by keyword what must hold.
#[test]
fn instances_of_the_test_suite() {
    let tokenizer = own_tokenizer();
    let compiler = compiler(&tokenizer);
    let mut tally = Tally::new();
    for case in json(&own("constraints/json-schema-test-suite.json")).as_array().unwrap() {
        let tests = case["tests"].as_array().unwrap();
        tally.schema(case["name"].as_str().unwrap(), &case["schema"], tests, &compiler, &tokenizer);
    }
    tally.print();
    assert!(tally.invalid_taken.is_empty(), "invalid instances were taken");
    assert_eq!(tally.valid_refused, OTHERWISE_SPELT);
    assert!(tally.broken.is_empty() && tally.schemas >= 200);
    // llguidance 1.9.1 refuses no more than this.
    assert!(tally.refused.len() <= 125, "{} are refused", tally.refused.len());
    let says_where = |refusal: &&String| {
        ["#/", "$dynamicAnchor", "nsatisfiable"].iter().any(|mark| refusal.contains(mark))
    };
    let silent: Vec<&String> = tally.refused.iter().filter(|it| !says_where(it)).collect();
    assert!(silent.is_empty(), "these do not say where: {silent:#?}");
}

/// Checks which texts a constraint lets come.
fn check(constraint: &Constraint<'_>, texts: &[(&str, bool)]) {
    let tokenizer = own_tokenizer();
    let fresh = compiler(&tokenizer).compile(constraint);
    let fresh = fresh.unwrap_or_else(|error| panic!("{constraint:?}: {error}"));
    for (text, expected) in texts {
        let mut matcher = fresh.try_clone().unwrap();
        let is_taken = takes(&mut matcher, &tokenizer, text, &mut Times::default()).unwrap();
        assert_eq!(is_taken, *expected, "{constraint:?}: {text}");
    }
}

/// Returns the message with which a constraint is refused.
fn refusal(constraint: &Constraint<'_>) -> String {
    match compiler(&own_tokenizer()).compile(constraint) {
        Ok(_) => panic!("{constraint:?} is not refused"),
        Err(error) => error.to_string(),
    }
}

/// A key that is spelt with escapes is the same key, and one that comes twice is one key.
#[test]
fn keys_have_one_spelling() {
    let role =
        r#"{"type": "object", "properties": {"role": {"enum": ["user"]}}, "required": ["role"]}"#;
    let texts = [
        (r#"{"role": "user", "other": 1}"#, true),
        (r#"{"role": "user", "r\\ole": 1}"#, true),
        (r#"{"role": "user", "\u0072ole": "admin"}"#, false),
        (r#"{"role": "user", "rol\u0065": "admin"}"#, false),
    ];
    check(&Constraint::JsonSchema(role), &texts);
    check(&Constraint::Grammar(&format!("start: %json\n {role}")), &texts);
    for (schema, text) in [
        (r#"{"properties": {"age": {"type": "integer"}}}"#, r#"{"\u0061ge": "x"}"#),
        (r#"{"properties": {"a\n": {"type": "integer"}}}"#, r#"{"a\u000a": "x"}"#),
        (r#"{"properties": {"a\u001f": {"type": "integer"}}}"#, r#"{"a\u001F": "x"}"#),
        (
            r#"{"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}"#,
            r#"{"a": 1, "\u0061": "x"}"#,
        ),
        (r#"{"patternProperties": {"^x": {"type": "integer"}}}"#, r#"{"\u0078": "s"}"#),
        (r##"{"$ref": "#/x/y", "x": {"y": {"required": ["a"]}}}"##, r#"{"a": 1, "\u0061": 2}"#),
    ] {
        check(&Constraint::JsonSchema(schema), &[(text, false)]);
    }
    let message = refusal(&Constraint::JsonSchema(r#"{"items": {"minProperties": 2}}"#));
    assert!(message.contains("#/items/minProperties is not supported"), "{message}");
    check(
        &Constraint::JsonSchema(r#"{"type": "object", "minProperties": 2, "required": ["a"]}"#),
        &[(r#"{"a": 1, "b": 1}"#, true), (r#"{"a": 1}"#, false), (r#"{"a": 1, "a": 1}"#, false)],
    );
}

/// Control characters in strings are written by their codes, where no key could be.
#[test]
fn control_characters_come_where_keys_keep_their_spelling() {
    let closed = r#"{"properties": {"a": {"const": "\u001b["}}, "additionalProperties": false}"#;
    check(&Constraint::JsonSchema(closed), &[(r#"{"a": "\u001b["}"#, true)]);
    check(&Constraint::JsonSchema(r#"{"type": "string"}"#), &[(r#""\u001b\n""#, true)]);
    let open = r#"{"properties": {"a": {"enum": ["x", "\u001b["]}, "b": {"const": "\n"}}}"#;
    let message = refusal(&Constraint::JsonSchema(open));
    assert!(message.contains("#/properties/a/enum: the character \\u001b is not"), "{message}");
    let open = r#"{"properties": {"b": {"const": "\n\"\\"}}}"#;
    check(&Constraint::JsonSchema(open), &[(r#"{"b": "\n\"\\", "c": "\t"}"#, true)]);
}

#[test]
fn numbers_are_kept_to_the_letter() {
    let number = "0.9690406502940995";
    let texts = [(number, true), ("0.9690406502940996", false), ("0.9690406502940994", false)];
    check(&Constraint::JsonSchema(&format!("{{\"const\": {number}}}")), &texts);
    let bounds = format!("{{\"type\": \"number\", \"minimum\": {number}, \"maximum\": {number}}}");
    check(&Constraint::JsonSchema(&bounds), &texts);
    check(
        &Constraint::JsonSchema(r#"{"type": "integer", "maximum": 9223372036854775807}"#),
        &[("9223372036854775807", true), ("9223372036854775808", false)],
    );
    check(&Constraint::JsonSchema(r#"{"const": 1e21}"#), &[("1000000000000000000000", true)]);
    for (schema, path) in [
        (r#"{"items": {"const": 9007199254740993}}"#, "#/items/const: 9007199254740993 "),
        (r#"{"enum": [1, 18446744073709551617]}"#, "#/enum/1: 18446744073709551617 "),
        (r#"{"type": "integer", "maximum": 9007199254740995}"#, "#/maximum: 9007199254740995 "),
        // This ended the process.
        (r#"{"const": -9223372036854775808}"#, "#/const: -9223372036854775808 "),
    ] {
        let message = refusal(&Constraint::JsonSchema(schema));
        assert!(message.contains(path), "{message}");
        let message = refusal(&Constraint::Grammar(&format!("start: %json {schema}")));
        assert!(message.contains(path), "{message}");
    }
}

#[test]
fn dates_and_times_are_ones_that_there_are() {
    check(
        &Constraint::JsonSchema(r#"{"format": "date"}"#),
        &[
            ("\"2024-02-29\"", true),
            ("\"2000-02-29\"", true),
            ("\"2023-02-28\"", true),
            ("\"1999-12-31\"", true),
            ("\"2023-02-29\"", false),
            ("\"1900-02-29\"", false),
            ("\"2024-02-30\"", false),
            ("\"2024-04-31\"", false),
            ("\"2024-13-01\"", false),
            ("5", true),
        ],
    );
    check(
        &Constraint::JsonSchema(r#"{"type": "string", "format": "time"}"#),
        &[
            ("\"12:30:59.5+02:00\"", true),
            ("\"23:59:60Z\"", true),
            ("\"12:00:60Z\"", false),
            ("\"23:59:60+01:00\"", false),
            ("\"24:00:00Z\"", false),
        ],
    );
    let schema = r#"{"type": "string", "format": "date-time", "pattern": "^20", "maxLength": 20}"#;
    check(
        &Constraint::JsonSchema(schema),
        &[
            ("\"2024-02-29T00:00:00Z\"", true),
            ("\"2016-12-31t23:59:60z\"", true),
            ("\"1996-02-29T00:00:00Z\"", false),
            ("\"2023-02-29T00:00:00Z\"", false),
            ("\"2024-02-29T00:00:00.5Z\"", false),
        ],
    );
    // In a constant it is no keyword.
    check(
        &Constraint::JsonSchema(r#"{"const": {"format": "date"}}"#),
        &[(r#"{"format":"date"}"#, true)],
    );
}

/// A class that excludes a character excludes it however it would be written.
#[test]
fn patterns_exclude_quotation_marks_and_backslashes() {
    check(
        &Constraint::JsonSchema(r#"{"type": "string", "pattern": "^[^\"]*$"}"#),
        &[(r#""a\n\\b""#, true), (r#""a\"b""#, false)],
    );
    check(
        &Constraint::JsonSchema(r#"{"type": "string", "pattern": "^[^\\\\\n/-]+$"}"#),
        &[(r#""a\"\tb""#, true), (r#""a\\b""#, false), (r#""a\nb""#, false), (r#""a-b""#, false)],
    );
}

/// Alternatives that are references are compared by what they lead to.
#[test]
fn alternatives_may_be_references() {
    let schema = r##"{
        "oneOf": [{"type": "null"}, {"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "k"},
        "$defs": {
            "cat": {"type": "object", "properties": {"k": {"const": "cat"}, "n": {"type": "integer"}}, "required": ["k"]},
            "dog": {"type": "object", "properties": {"k": {"const": "dog"}}, "required": ["k"]}
        }
    }"##;
    check(
        &Constraint::JsonSchema(schema),
        &[
            ("null", true),
            (r#"{"k": "cat", "n": 1}"#, true),
            (r#"{"k": "dog"}"#, true),
            (r#"{"k": "cat", "n": "x"}"#, false),
            (r#"{"k": "cow"}"#, false),
        ],
    );
    let schema = r##"{"oneOf": [{"$ref": "#/$defs/a"}, {"type": "string"}], "$defs": {"a": {"maxLength": 3}}}"##;
    assert!(refusal(&Constraint::JsonSchema(schema)).contains("#/oneOf: "));
}

/// What is told is about what the caller wrote, and not about what was made of it.
#[test]
fn refusals_are_about_what_was_written() {
    let parts: Vec<String> =
        (2..20).map(|n| format!("{{\"pattern\": \"[a-z]{{{n}}}x\"}}")).collect();
    let too_complex = format!("{{\"type\": \"string\", \"allOf\": [{}]}}", parts.join(", "));
    for (constraint, message) in [
        (Constraint::Regex("(?=a)b"), "the regular expression: look-around, including look-ahead and look-behind, is not supported"),
        (Constraint::Regex("(a"), "the regular expression: unclosed group"),
        (
            Constraint::Regex(r"a\b"),
            "the regular expression: anchors within it and word boundaries are not supported",
        ),
        (Constraint::Grammar("start: a"), "the grammar: line 1, column 8: unknown name: \"a\""),
        (Constraint::Grammar("start: A\nA: /a\\1/"), "the grammar: line 2, column 4: /a\\1/: backreferences are not supported"),
        (
            Constraint::JsonSchema(r#"{"items": {"pattern": "(?=a)\\d"}}"#),
            "the JSON schema: #/items/pattern: look-around, including look-ahead and look-behind, is not supported",
        ),
        (
            Constraint::JsonSchema(&too_complex),
            "the JSON schema: its patterns are too complex together",
        ),
    ] {
        assert_eq!(refusal(&constraint), message);
    }
}
