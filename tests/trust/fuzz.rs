//! Fuzzing on stable Rust: files that are kept in `corpora/` are changed at random and given to the
//! parsers, and random sequences of calls to the C functions. Each target runs in a process of its own
//! on a thread with the least stack; what it must hold is more than not to crash (see the targets).
//!
//! Inputs that get an answer which no other got are kept in memory and changed further, so that the
//! walk goes deeper than single changes of the files. `XSERV_FUZZ_SECONDS` is the time for each
//! target; `XSERV_FUZZ_SEED` the number of the first change, and a run says with which to go on.
//! An input that fails is written to the folder that the failure names; once mended, it goes into
//! `corpora/` for ever, all of which is run first.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{json, Value};
use xserv::engine::GenerationConfig;
use xserv::error::{Error, ErrorKind};
use xserv::ffi::xserv_status::XSERV_STATUS_OK;
use xserv::model::config::ModelConfig;
use xserv::model::safetensors::parse_header;
use xserv::model::shard_index::ShardIndex;
use xserv::panic_guard;
use xserv::text::{parse_messages, ChatInput, ChatTemplate, Detokenizer, SpecialTokens, Tokenizer};

use crate::client::*;
use crate::files::Random;
use crate::functions::{functions, Function, HANDLES};
use crate::scale::{scaled, PATIENCE};
use crate::world::*;

/// The kind of input that was accepted, or the error.
type Outcome = Result<String, Error>;

/// A target: what it does with an input. An error of the library is an answer; a panic of the target
/// is a failure.
struct Target {
    name: &'static str,
    /// Whether inputs are JSON, or several of them with zeros between.
    is_json: bool,
    make: fn() -> Box<dyn FnMut(&[u8]) -> Outcome>,
}

const TARGETS: [Target; 8] = [
    Target { name: "safetensors_header", is_json: true, make: || Box::new(safetensors_header) },
    Target { name: "shard_index", is_json: true, make: || Box::new(shard_index) },
    Target { name: "config", is_json: true, make: || Box::new(config) },
    Target { name: "tokenizer", is_json: true, make: || Box::new(tokenizer) },
    Target { name: "template", is_json: false, make: || Box::new(template) },
    Target { name: "settings", is_json: true, make: || Box::new(settings) },
    Target { name: "calls", is_json: false, make: calls },
    Target { name: "planted", is_json: false, make: || Box::new(planted) },
];

/// Accepts no more than the reference implementation, and every tensor is inside the file and as long
/// as its shape says.
fn safetensors_header(input: &[u8]) -> Outcome {
    // The data is as long as the input says, so that most changes do not fail for its length.
    let text = String::from_utf8_lossy(input);
    let value: Value = serde_json::from_slice(input).unwrap_or_default();
    let ends =
        value.as_object().into_iter().flatten().filter_map(|(_, t)| t["data_offsets"][1].as_u64());
    let data_len = ends.max().unwrap_or(0).min(1 << 16);
    let tensors = parse_header(input, data_len)?;
    let header_len = input.len() as u64 + 8;
    for (name, tensor) in &tensors {
        let end = tensor.file_offset.checked_add(tensor.len_bytes).expect("no overflow");
        assert!(
            tensor.file_offset >= header_len && end <= header_len + data_len,
            "{name} in {text}"
        );
        let elements = tensor.shape.iter().try_fold(1u64, |n, size| n.checked_mul(*size));
        let bits = elements.and_then(|n| n.checked_mul(tensor.dtype.bitsize() as u64));
        assert_eq!(bits, Some(tensor.len_bytes * 8), "{name} in {text}");
    }
    let mut file = (input.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(input);
    file.resize(file.len() + data_len as usize, 0);
    let reference = safetensors::SafeTensors::deserialize(&file);
    assert!(reference.is_ok(), "{:?}: {text}", reference.err());
    Ok(String::new())
}

/// Only plain file names come out.
fn shard_index(input: &[u8]) -> Outcome {
    let index = ShardIndex::parse(input)?;
    for shard in &index.shards {
        let bad = shard.contains(['/', '\\', '\0']) || ["", ".", ".."].contains(&shard.as_str());
        assert!(!bad && shard.len() <= 255 && !shard.contains(char::is_control), "{shard:?}");
    }
    assert!(index.tensors.values().all(|shard| *shard < index.shards.len()));
    Ok(String::new())
}

/// Every accepted config can be computed: no size overflows, and rotations are finite.
fn config(input: &[u8]) -> Outcome {
    let config = ModelConfig::parse(input)?;
    assert!(config.num_heads.is_multiple_of(config.num_kv_heads) && config.num_kv_heads > 0);
    let sizes = [config.hidden_size, config.q_size(), config.kv_size(), config.intermediate_size];
    let (width, layers) = (sizes.iter().max().unwrap(), config.num_layers as u128);
    let largest =
        (*width as u128).pow(2) * 8 * layers + (config.vocab_size * config.hidden_size) as u128 * 8;
    assert!(largest < i64::MAX as u128, "{config:?}");
    assert!(config.norm_eps.is_finite() && config.attention_scale().is_finite());
    if let Some(rope) = config.rope.as_ref().filter(|_| config.head_dim <= 1024) {
        let frequencies = rope.inv_freq(config.head_dim)?;
        assert!(frequencies.iter().all(|f| f.is_finite()), "{config:?}");
        assert!(rope.attention_scaling().is_finite());
    }
    Ok(String::new())
}

const TEXTS: [&str; 3] = [
    "the 12 abs\n\n it's \u{e9} <|im_end|>",
    "\u{65e5}\u{1f600}\u{200d} a\u{301} ",
    "  <think>1234 the the",
];

/// Ids are below the vocabulary's size, and decoding them as a stream gives the whole text.
fn tokenizer(input: &[u8]) -> Outcome {
    let tokenizer = Arc::new(Tokenizer::from_bytes(input, None)?);
    for text in TEXTS {
        let ids = tokenizer.encode(text, true, true)?;
        assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()), "{ids:?}");
        let whole = tokenizer.decode(&ids, false)?;
        let mut stream = Detokenizer::new(tokenizer.clone(), false);
        let mut streamed = String::new();
        for id in &ids {
            streamed.push_str(&stream.push(*id)?);
        }
        streamed.push_str(&stream.finish()?);
        if tokenizer.has_token_bytes() {
            assert_eq!(streamed, whole);
        }
    }
    Ok(String::new())
}

/// A template's source, a zero, and messages.
fn template(input: &[u8]) -> Outcome {
    let text = String::from_utf8_lossy(input);
    let (source, messages) = text.split_once('\0').unwrap_or((&text, "[]"));
    let template = ChatTemplate::compile(source)?;
    let special_tokens = SpecialTokens::default();
    let messages = parse_messages(messages.as_bytes())?;
    let input = ChatInput {
        messages: &messages,
        tools: None,
        variables: None,
        add_generation_prompt: true,
        special_tokens: &special_tokens,
    };
    let rendered = template.render(&input)?;
    assert!(rendered.len() <= 16 << 20);
    Ok(String::new())
}

/// generation_config.json, a zero, and tokenizer_config.json.
fn settings(input: &[u8]) -> Outcome {
    let split = input.iter().position(|byte| *byte == 0).unwrap_or(input.len());
    let (generation, tokenizer) = (&input[..split], input.get(split + 1..).unwrap_or(b"{}"));
    let read = GenerationConfig::from_files(Some(generation), Some(tokenizer), 2048)?;
    let sampling = read.sampling;
    let numbers =
        [sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty];
    assert!(numbers.into_iter().flatten().all(f32::is_finite), "{read:?}");
    assert!(read.eos_token_ids.iter().all(|id| *id < 2048), "{read:?}");
    SpecialTokens::from_config(tokenizer)?;
    ChatTemplate::from_files(Some(tokenizer), None, None)?;
    Ok(String::new())
}

/// Fails with most inputs: to see that failures are reported.
fn planted(input: &[u8]) -> Outcome {
    if input.contains(&b'x') {
        std::process::abort();
    }
    Err(Error::invalid_file(format!("{} bytes", input.len())))
}

/// A sequence of calls, two bytes and one for each argument that is a handle: live, freed, of another
/// kind or forged. A model of the handles says which calls must succeed.
struct Calls {
    world: World,
    functions: Vec<Function>,
    freed: Vec<u64>,
    is_result_taken: bool,
    expected: Vec<u32>,
    sequences: u64,
    /// The slow calls of a sequence, and their processor time.
    slow: Vec<(String, f64)>,
}

fn calls() -> Box<dyn FnMut(&[u8]) -> Outcome> {
    let world = World::new();
    let expected =
        std::mem::ManuallyDrop::new(Model(world.model())).generate(&greedy(&IDS, 2)).unwrap().ids;
    let mut calls = Calls {
        world,
        functions: functions(),
        freed: vec![0x0100_0000_0000_0001],
        is_result_taken: false,
        expected,
        sequences: 0,
        slow: Vec::new(),
    };
    Box::new(move |input| {
        calls.run(input);
        // Every sequence is an answer of its own kind: by the first functions that it calls.
        let kind: String =
            input.iter().step_by(4).take(2).map(|b| char::from(b'a' + b % 26)).collect();
        Ok(kind)
    })
}

impl Calls {
    fn run(&mut self, input: &[u8]) {
        let before = crate::files::cpu_seconds();
        self.slow.clear();
        let mut bytes = input.iter().copied();
        for _ in 0..200 {
            let (Some(which), Some(flags)) = (bytes.next(), bytes.next()) else { break };
            self.step(which, flags, &mut bytes);
        }
        self.sequences += 1;
        if self.sequences.is_multiple_of(64) {
            let model = std::mem::ManuallyDrop::new(Model(self.world.model()));
            assert_eq!(model.generate(&greedy(&IDS, 2)).unwrap().ids, self.expected);
        }
        let seconds = crate::files::cpu_seconds() - before;
        assert!(seconds < MAX_SECONDS, "{seconds:.1} s, of which {:?}", self.slow);
    }

    fn step(&mut self, which: u8, flags: u8, bytes: &mut impl Iterator<Item = u8>) {
        let function = self.functions[which as usize % self.functions.len()].clone();
        let is_slow =
            ["xserv_load", "xserv_inspect", "xserv_plan", "xserv_model_free", "xserv_self_test"];
        // A few of them in a sequence, which together stay below the bar of one input.
        if is_slow.contains(&function.name.as_str()) && (flags >= 8 || self.slow.len() >= 4) {
            return;
        }
        let mut arguments = self.world.arguments(&function);
        let mut all_live = true;
        for (i, parameter) in function.parameters.iter().enumerate() {
            let Some(kind) = parameter.pointee(1).filter(|k| HANDLES.contains(k)) else { continue };
            let byte = bytes.next().unwrap_or_default();
            let other = HANDLES[byte as usize % HANDLES.len()];
            let bad = match byte {
                0..208 => continue,
                208..230 => self.freed[byte as usize % self.freed.len()],
                230..245 if other != kind => self.world.handle::<c_void>(other).addr() as u64,
                245..250 => 0,
                _ => u64::from(byte) << 40 | u64::from(byte),
            };
            *arguments.word(i) = bad;
            all_live = false;
        }
        self.world.timeout_ms = u32::from(flags & 1);
        let before = crate::files::cpu_seconds();
        let returned = call(&function, &arguments);
        let seconds = crate::files::cpu_seconds() - before;
        let name = function.name.as_str();
        assert!(seconds < MAX_SECONDS, "{name}: {seconds:.1} s");
        if seconds > MAX_SECONDS / 40.0 {
            self.slow.push((function.name.clone(), seconds));
        }
        // There may be no GPU, and no message left.
        let may_fail = [
            "xserv_cuda_device_get_info",
            "xserv_owned_tensor_new_pinned",
            "xserv_messages_remove",
        ]
        .contains(&name)
            || name == "xserv_submission_take_result" && self.is_result_taken;
        match returned {
            Returned::Status(status) if !all_live => {
                assert_ne!(status, XSERV_STATUS_OK as u32, "{name} with bad handles")
            }
            Returned::Status(_) => {
                assert!(returned.is_ok() || may_fail, "{name}: {returned:?}: {}", last_error())
            }
            Returned::Pointer(pointer) => assert_eq!(pointer != 0, all_live, "{name}"),
            Returned::Number(_) | Returned::Nothing => {}
        }
        for (kind, handle) in made(&function, &mut arguments, returned) {
            free(kind, handle);
            self.remember(handle);
        }
        self.is_result_taken |= name == "xserv_submission_take_result" && returned.is_ok();
        if let (Some(kind), true) = (function.frees(), all_live) {
            let kind = HANDLES.iter().find(|known| **known == kind).unwrap();
            self.remember(self.world.handle::<c_void>(kind).addr() as u64);
            self.world.renew(kind);
            self.is_result_taken &= *kind != "xserv_submission";
        }
    }

    fn remember(&mut self, freed: u64) {
        if self.freed.len() > 64 {
            self.freed.remove(0);
        }
        self.freed.push(freed);
    }
}

/// Pieces that mean something to the formats.
const WORDS: [&str; 56] = [
    "null",
    "true",
    "-1",
    "0",
    "1e309",
    "1e-400",
    "18446744073709551615",
    "18446744073709551616",
    "9223372036854775808",
    "-0.0",
    "NaN",
    "\"\"",
    "[]",
    "{}",
    "\\u0000",
    "\\ud800",
    "\u{1f600}",
    "..",
    "/",
    "\\",
    "\0",
    "\u{1b}[2J",
    "\"dtype\"",
    "\"shape\"",
    "\"data_offsets\"",
    "BF16",
    "F32",
    "\"__metadata__\"",
    "\"weight_map\"",
    "yarn",
    "{{",
    "}}",
    "{%",
    "%}",
    "{% for i in range(99999) %}",
    "{% endfor %}",
    "{% if x %}",
    "{% elif x %}",
    "{% endif %}",
    "{% set x = x ~ x %}",
    "{% macro f() %}",
    "{% endmacro %}",
    "{{ f() }}",
    " | tojson(indent=99999999)",
    " | replace('a', 'aa')",
    ".items()",
    "[::-1]",
    " * 99999999",
    " ~ ",
    "raise_exception(",
    "namespace(",
    "(a+)+$",
    "(?=",
    "\\p{L}{1000}",
    "[^",
    "(?i:",
];

fn odd_value(random: &mut Random) -> Value {
    match random.below(12) {
        0 => Value::Null,
        1 => json!(random.next().is_multiple_of(2)),
        2 => json!(random.next()),
        3 => json!(random.next() as i64 >> random.below(64)),
        4 => json!(random.signed() * 10f64.powi(random.below(600) as i32 - 300)),
        5 => json!([]),
        6 => json!({}),
        7 => json!(WORDS[random.below(WORDS.len())]),
        8 => json!("x".repeat(1 << random.below(14))),
        9 => json!(random.below(70_000)),
        10 => (0..1 + random.below(150)).fold(json!(1), |inner, _| json!([inner])),
        _ => json!(-1),
    }
}

/// Returns a random place of a JSON value: walks down until it stops or there is nothing below.
fn some_place<'a>(value: &'a mut Value, random: &mut Random) -> &'a mut Value {
    let stops = random.below(4) == 0;
    let children = match value {
        Value::Array(list) => list.len(),
        Value::Object(map) => map.len(),
        _ => 0,
    };
    if children == 0 || stops {
        return value;
    }
    let index = random.below(children);
    match value {
        Value::Array(list) => some_place(&mut list[index], random),
        Value::Object(map) => some_place(map.values_mut().nth(index).unwrap(), random),
        _ => unreachable!(),
    }
}

fn change_json(value: &mut Value, other: &Value, random: &mut Random) {
    let mut donor = other.clone();
    let place = some_place(value, random);
    match (random.below(6), place) {
        (0, Value::Object(map)) if !map.is_empty() => {
            let key = map.keys().nth(random.below(map.len())).unwrap().clone();
            map.remove(&key);
        }
        (1, Value::Object(map)) if !map.is_empty() => {
            let value = map.values().nth(random.below(map.len())).unwrap().clone();
            let key = map.keys().nth(random.below(map.len())).unwrap().clone();
            map.insert(format!("{key}{}", random.below(3)), value);
        }
        (0, Value::Array(list)) if !list.is_empty() => drop(list.remove(random.below(list.len()))),
        (1, Value::Array(list)) if !list.is_empty() => {
            let copy = list[random.below(list.len())].clone();
            list.extend(std::iter::repeat_n(copy, 1 << random.below(6)));
        }
        (2, place) => *place = some_place(&mut donor, random).clone(),
        (3, Value::String(text)) => {
            text.insert_str(0, WORDS[random.below(WORDS.len())]);
        }
        (_, Value::Number(number)) if random.below(2) == 0 => {
            let old = number.as_i64().unwrap_or(1);
            *number = old.wrapping_add(random.below(5) as i64 - 2).into();
        }
        (_, place) => *place = odd_value(random),
    }
}

fn change_bytes(bytes: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    let at = random.below(bytes.len() + 1);
    let end = (at + 1 + random.below(16)).min(bytes.len());
    match random.below(8) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        1 if at < bytes.len() => bytes[at] = random.next() as u8,
        2 if at < end => drop(bytes.drain(at..end)),
        3 => bytes.truncate(at),
        4 if at < end => {
            let piece = bytes[at..end].repeat(1 << random.below(10));
            bytes.splice(at..at, piece);
        }
        5 if !other.is_empty() => {
            let from = random.below(other.len());
            let piece = other[from..(from + random.below(200)).min(other.len())].to_vec();
            bytes.splice(at..at, piece);
        }
        6 => bytes.insert(at, random.next() as u8),
        _ => drop(bytes.splice(at..at, WORDS[random.below(WORDS.len())].bytes())),
    }
}

const MAX_INPUT_BYTES: usize = 128 << 10;

fn changed(target: &Target, seed: &[u8], other: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    if target.is_json && random.below(3) > 0 {
        // The parts between zeros, each of which is JSON.
        let mut parts: Vec<Vec<u8>> = bytes.split(|byte| *byte == 0).map(<[u8]>::to_vec).collect();
        let part = random.below(parts.len());
        let other = other.split(|byte| *byte == 0).next().unwrap_or_default();
        let other: Value = serde_json::from_slice(other).unwrap_or_default();
        if let Ok(mut value) = serde_json::from_slice::<Value>(&parts[part]) {
            for _ in 0..1 + random.below(4) {
                change_json(&mut value, &other, random);
            }
            parts[part] = value.to_string().into_bytes();
        }
        bytes = parts.join(&0);
        if random.below(4) > 0 {
            bytes.truncate(MAX_INPUT_BYTES);
            return bytes;
        }
    }
    for _ in 0..1 << random.below(5) {
        change_bytes(&mut bytes, other, random);
        bytes.truncate(MAX_INPUT_BYTES);
    }
    bytes
}

/// The memory in which the child writes where the test can see it, whatever becomes of the child.
struct Slate(*mut u8);

// One thread writes, the numbers are atomic, and the input is read when it has ended.
unsafe impl Sync for Slate {}

const SLATE_BYTES: usize = 32 + MAX_INPUT_BYTES;

impl Slate {
    fn new(path: &Path) -> Slate {
        let file =
            File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap();
        file.set_len(SLATE_BYTES as u64).unwrap();
        let (both, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let place = unsafe {
            libc::mmap(std::ptr::null_mut(), SLATE_BYTES, both, shared, file.as_raw_fd(), 0)
        };
        assert_ne!(place, libc::MAP_FAILED);
        Slate(place.cast())
    }

    /// Executions, kinds of answers, bytes of the input that is being run, inputs that were accepted.
    fn number(&self, index: usize) -> &AtomicU64 {
        assert!(index < 4);
        unsafe { &*(self.0 as *const AtomicU64).add(index) }
    }

    fn put(&self, input: &[u8]) {
        self.number(2).store(input.len() as u64, Ordering::SeqCst);
        unsafe { self.0.add(32).copy_from_nonoverlapping(input.as_ptr(), input.len()) };
    }

    fn input(&self) -> Vec<u8> {
        let length = self.number(2).load(Ordering::SeqCst) as usize;
        unsafe { std::slice::from_raw_parts(self.0.add(32), length) }.to_vec()
    }
}

impl Drop for Slate {
    fn drop(&mut self) {
        unsafe { libc::munmap(self.0.cast(), SLATE_BYTES) };
    }
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = root().join("tests/trust/corpora").join(target);
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.iter().map(|file| std::fs::read(file).unwrap()).collect()
}

/// Returns the kind and the words of an answer, without numbers and quotations.
fn answer_of(outcome: &Outcome) -> String {
    let error = match outcome {
        Ok(kind) => return format!("accepted {kind}"),
        Err(error) => error,
    };
    let mut is_quoted = false;
    let words = error.message().chars().filter(|c| {
        is_quoted ^= *c == '"';
        !is_quoted && !c.is_numeric()
    });
    format!("{:?}{}", error.kind(), words.take(80).collect::<String>())
}

/// Processor time for one input, and so for each call of a sequence: the bar of all hostile input.
const MAX_SECONDS: f64 = 2.0;

fn fuzz(target: &Target, slate: &Slate, seed: u64, length: Duration) {
    let mut run = (target.make)();
    let (mut pool, begin) = (corpus(target.name), Instant::now());
    assert!(!pool.is_empty());
    let kept = pool.len() as u64;
    let mut answers = BTreeSet::new();
    let mut next = 0;
    while next < kept || begin.elapsed() < length {
        let mut random = Random(seed.wrapping_add(next));
        let input = match pool.get(next as usize) {
            // All that is kept is run first, as it is.
            Some(input) if next < kept => input.clone(),
            _ => {
                // Half of them are made of what is kept, which is mostly valid.
                let one = match random.below(2) {
                    0 => random.below(kept as usize),
                    _ => random.below(pool.len()),
                };
                let other = random.below(pool.len());
                changed(target, &pool[one], &pool[other], &mut random)
            }
        };
        slate.put(&input);
        let before = crate::files::cpu_seconds();
        let outcome = panic_guard::catch(|| run(&input));
        let seconds = crate::files::cpu_seconds() - before;
        if let Err(error) = &outcome {
            assert_ne!(error.kind(), ErrorKind::Internal, "{error}");
            let message = error.message();
            assert!(!message.contains(char::is_control), "{message:?}");
            assert!(!message.is_empty() && message.len() <= 1000, "{message}");
        }
        assert!(seconds < MAX_SECONDS, "{seconds:.1} s");
        if answers.insert(answer_of(&outcome)) && pool.len() < 4000 {
            slate.number(1).fetch_add(1, Ordering::SeqCst);
            pool.push(input);
        }
        next += 1;
        slate.number(0).store(next, Ordering::SeqCst);
        slate.number(3).fetch_add(u64::from(outcome.is_ok()), Ordering::SeqCst);
    }
}

#[test]
#[ignore = "run by the other tests of this module, as a child process"]
fn child() {
    let Ok(name) = std::env::var("XSERV_FUZZ_TARGET") else { return };
    let number = |name: &str| std::env::var(name).unwrap().parse::<u64>().unwrap();
    let slate = Slate::new(Path::new(&std::env::var("XSERV_FUZZ_SLATE").unwrap()));
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let length = Duration::from_secs(number("XSERV_FUZZ_SECONDS"));
    let seed = number("XSERV_FUZZ_SEED");
    // Under a sanitizer the frames of JSON's parsers, of the tests' own as well, are several times as large.
    let times = std::env::var("XSERV_FUZZ_STACKS").map_or(1, |times| times.parse().unwrap());
    let stack_bytes = crate::hostile_child::SMALL_STACK_BYTES * 2 * times;
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().stack_size(stack_bytes);
        let thread = builder.spawn_scoped(scope, || fuzz(target, &slate, seed, length)).unwrap();
        thread.join().unwrap();
    });
    unsafe { libc::_exit(0) };
}

/// The result of a run: the executions, the kinds of answers, the inputs accepted, and what went
/// wrong.
struct Ran {
    executions: u64,
    answers: u64,
    accepted: u64,
    wrong: Option<String>,
    input: Vec<u8>,
}

fn run_target(name: &str, seconds: u64, seed: u64) -> Ran {
    let folder = crate::files::TempDir::new();
    let path = folder.path().join("slate");
    let slate = Slate::new(&path);
    let said = folder.path().join("said");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "fuzz::child", "--ignored", "--nocapture", "--test-threads=1"])
        .env("XSERV_FUZZ_TARGET", name)
        .env("XSERV_FUZZ_SLATE", &path)
        .env("XSERV_FUZZ_SECONDS", seconds.to_string())
        .env("XSERV_FUZZ_SEED", seed.to_string())
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&said).unwrap())
        .spawn()
        .unwrap();
    let (mut seen, mut since) = (0, Instant::now());
    let wrong = loop {
        if let Some(status) = child.try_wait().unwrap() {
            let said = std::fs::read_to_string(&said).unwrap();
            let how = match status.signal() {
                _ if status.success() => break None,
                Some(signal) => format!("was killed by signal {signal}"),
                None => format!("ended with {status}"),
            };
            break Some(format!("{how}: {said:.2000}"));
        }
        let now = slate.number(0).load(Ordering::SeqCst);
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
        if since.elapsed() > PATIENCE {
            child.kill().unwrap();
            child.wait().unwrap();
            break Some(format!("hung for {} s", PATIENCE.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    Ran {
        executions: slate.number(0).load(Ordering::SeqCst),
        answers: slate.number(1).load(Ordering::SeqCst),
        accepted: slate.number(3).load(Ordering::SeqCst),
        wrong,
        input: slate.input(),
    }
}

fn fuzz_target(name: &str) {
    let number = |name: &str, default: u64| match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, no number")),
        Err(_) => default,
    };
    let seconds = number("XSERV_FUZZ_SECONDS", scaled(3, 1200) as u64);
    let seed = number("XSERV_FUZZ_SEED", 1);
    let ran = run_target(name, seconds, seed);
    println!(
        "{name}: {} executions, {} accepted, {} kinds of answers; go on with XSERV_FUZZ_SEED={}",
        ran.executions,
        ran.accepted,
        ran.answers,
        seed + ran.executions
    );
    if let Some(wrong) = ran.wrong {
        let file =
            std::env::temp_dir().join(format!("xserv-fuzz-{name}-{}", seed + ran.executions));
        std::fs::write(&file, ran.input).unwrap();
        panic!("{name} {wrong}\nthe input is in {}", file.display());
    }
    assert!(ran.executions > 10 && ran.answers > 2, "{} executions", ran.executions);
}

#[test]
fn headers_of_safetensors() {
    fuzz_target("safetensors_header");
}

#[test]
fn indexes_of_shards() {
    fuzz_target("shard_index");
}

#[test]
fn configs() {
    fuzz_target("config");
}

#[test]
fn tokenizers() {
    fuzz_target("tokenizer");
}

#[test]
fn templates_and_messages() {
    fuzz_target("template");
}

#[test]
fn settings_of_generation_and_tokenizer() {
    fuzz_target("settings");
}

#[test]
fn sequences_of_calls() {
    fuzz_target("calls");
}

#[test]
fn a_fault_that_is_planted_is_found_and_its_input_kept() {
    let ran = run_target("planted", 60, 1);
    assert!(ran.wrong.is_some_and(|wrong| wrong.contains("signal 6")));
    assert!(ran.input.contains(&b'x'), "{:?}", ran.input);
}
