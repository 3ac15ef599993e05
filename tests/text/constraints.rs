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
