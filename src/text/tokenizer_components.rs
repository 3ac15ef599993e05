//! The checks of normalizers, pre-tokenizers, post-processors and decoders.
//!
//! These parts are small programs that come with a file: each can make the text longer, and regular
//! expressions can take exponential time. The checks are on the JSON, before the `tokenizers` crate
//! builds anything from it. Faults that they cannot see (a slow expression) show in the trial run
//! of `tokenizer.rs`.

use super::shortened;
use crate::error::{Error, Result};
use serde_json::Value;

/// The most parts in one place, over all sequences.
const MAX_PARTS: usize = 32;
/// The deepest nesting of sequences: the crate parses each level again.
const MAX_DEPTH: usize = 4;
/// The longest regular expression (Qwen3: 128 bytes), string pattern or replacement, in bytes.
const MAX_PATTERN_BYTES: usize = 2048;
/// The factor by which all parts of one place together may lengthen a text: published ones put
/// three bytes in place of one, and one beside each.
const MAX_GROWTH: u64 = 4;

/// The pattern that Qwen3 and Qwen2.5 publish.
pub(super) const ONE_DIGIT_PATTERN: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// The pattern that Llama 3 publishes: up to three digits are a word.
pub(super) const THREE_DIGITS_PATTERN: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// The patterns that are known to take linear time. An alternative fails after a bounded number of
/// characters or, at a run of white space, after reading that run, which is then a match as a whole
/// or but for its last character: so no character is read more than a few times.
pub(super) const TRUSTED_PATTERNS: [&str; 2] = [ONE_DIGIT_PATTERN, THREE_DIGITS_PATTERN];

/// The four places of `tokenizer.json`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Normalizer,
    PreTokenizer,
    PostProcessor,
    Decoder,
}

/// The findings of the checks.
#[derive(Default)]
pub(super) struct Findings {
    /// The regular expressions other than [`TRUSTED_PATTERNS`].
    pub untrusted_patterns: Vec<String>,
    /// The factor by which the pre-tokenizers can lengthen a text; 0 if there are none.
    pub pre_tokenizer_growth: u64,
    parts: usize,
}

impl Place {
    fn name(self) -> &'static str {
        match self {
            Place::Normalizer => "normalizer",
            Place::PreTokenizer => "pre_tokenizer",
            Place::PostProcessor => "post_processor",
            Place::Decoder => "decoder",
        }
    }

    /// Returns the key under which a Sequence of this place has its parts.
    fn sequence_key(self) -> &'static str {
        match self {
            Place::Normalizer => "normalizers",
            Place::PreTokenizer => "pretokenizers",
            Place::PostProcessor => "processors",
            Place::Decoder => "decoders",
        }
    }

    fn knows(self, kind: &str) -> bool {
        let kinds: &[&str] = match self {
            Place::Normalizer => &[
                "NFC",
                "NFD",
                "NFKC",
                "NFKD",
                "Lowercase",
                "Strip",
                "StripAccents",
                "Nmt",
                "BertNormalizer",
                "Prepend",
                "Replace",
                "ByteLevel",
            ],
            Place::PreTokenizer => &[
                "ByteLevel",
                "Split",
                "Digits",
                "Punctuation",
                "Whitespace",
                "WhitespaceSplit",
                "BertPreTokenizer",
                "Metaspace",
                "UnicodeScripts",
                "FixedLength",
            ],
            Place::PostProcessor => {
                &["ByteLevel", "TemplateProcessing", "RobertaProcessing", "BertProcessing"]
            }
            Place::Decoder => &[
                "ByteLevel",
                "Replace",
                "ByteFallback",
                "Fuse",
                "Strip",
                "Metaspace",
                "BPEDecoder",
                "WordPiece",
            ],
        };
        kinds.contains(&kind)
    }
}

/// Checks one place; `null` is accepted. `findings` collects over all four.
pub(super) fn check(place: Place, value: &Value, findings: &mut Findings) -> Result<()> {
    if value.is_null() {
        return Ok(());
    }
    let growth = check_part(place, value, 0, findings)?;
    if growth > MAX_GROWTH {
        return Err(Error::invalid_file(format!(
            "{} could make a text {growth} times longer, at most {MAX_GROWTH} times is allowed",
            place.name()
        )));
    }
    if place == Place::PreTokenizer {
        findings.pre_tokenizer_growth = growth;
    }
    Ok(())
}

/// Returns the factor by which the part can lengthen a text.
fn check_part(place: Place, value: &Value, depth: usize, findings: &mut Findings) -> Result<u64> {
    let name = place.name();
    let Some(kind) = value.get("type").and_then(Value::as_str) else {
        return Err(Error::invalid_file(format!("{name} has a part without a \"type\"")));
    };
    findings.parts += 1;
    if findings.parts > MAX_PARTS || depth > MAX_DEPTH {
        return Err(Error::invalid_file(format!(
            "{name} has more than {MAX_PARTS} parts, or sequences more than {MAX_DEPTH} deep"
        )));
    }
    if kind == "Sequence" {
        let Some(parts) = value.get(place.sequence_key()).and_then(Value::as_array) else {
            return Err(Error::invalid_file(format!(
                "{name}: a Sequence has no list \"{}\"",
                place.sequence_key()
            )));
        };
        return parts.iter().try_fold(1u64, |growth, part| {
            Ok(growth.saturating_mul(check_part(place, part, depth + 1, findings)?))
        });
    }
    if !place.knows(kind) {
        return Err(Error::unsupported(format!(
            "{name} of type \"{}\" is not supported",
            shortened(kind)
        )));
    }
    let growth = match kind {
        "Replace" => {
            let shortest = check_pattern(place, value, findings)?;
            let content = value.get("content").and_then(Value::as_str).unwrap_or_default().len();
            // An expression may match the empty string, in which case the text stays as well.
            match shortest {
                Some(length) => content.div_ceil(length.max(1)).max(1),
                None => content + 1,
            }
        }
        "Split" => {
            check_pattern(place, value, findings)?;
            1
        }
        // A few bytes for each part of a text, which are counted when they are added.
        "Prepend" => {
            bounded_text(place, value, "prepend")?;
            1
        }
        // At most three bytes for one, and before each word.
        "Metaspace" if place == Place::PreTokenizer => {
            1 + bounded_text(place, value, "replacement")?
        }
        // The byte-level alphabet has two-byte characters; one of them can go before each word.
        "ByteLevel" if place == Place::PreTokenizer => match value.get("add_prefix_space") {
            Some(Value::Bool(false)) => 2,
            _ => 4,
        },
        "ByteLevel" if place == Place::Normalizer => 2,
        "FixedLength" => {
            if value.get("length").is_some_and(|length| length.as_u64() == Some(0)) {
                return Err(Error::invalid_file(format!("{name}: FixedLength has length 0")));
            }
            1
        }
        "Strip" if place == Place::Decoder => {
            for key in ["start", "stop"] {
                if value.get(key).and_then(Value::as_u64).is_some_and(|n| n > 16) {
                    return Err(Error::invalid_file(format!("{name}: Strip.{key} is over 16")));
                }
            }
            1
        }
        "TemplateProcessing" => {
            check_template(value)?;
            1
        }
        _ => 1,
    };
    Ok(growth as u64)
}

/// Checks a `pattern`; returns the length of its matches if that is certain.
fn check_pattern(place: Place, value: &Value, findings: &mut Findings) -> Result<Option<usize>> {
    let name = place.name();
    let pattern = value.get("pattern").unwrap_or(&Value::Null);
    let (text, shortest) = match (pattern.get("String"), pattern.get("Regex")) {
        (Some(Value::String(text)), None) => (text, Some(text.len())),
        (None, Some(Value::String(_))) if place == Place::Decoder => {
            return Err(Error::unsupported("decoder: a regular expression is not supported"));
        }
        (None, Some(Value::String(text))) => {
            if !TRUSTED_PATTERNS.contains(&text.as_str()) {
                findings.untrusted_patterns.push(text.clone());
            }
            (text, None)
        }
        _ => {
            return Err(Error::invalid_file(format!(
                "{name}: a pattern is neither {{\"String\": ...}} nor {{\"Regex\": ...}}"
            )))
        }
    };
    if text.is_empty() || text.len() > MAX_PATTERN_BYTES {
        return Err(Error::invalid_file(format!(
            "{name}: a pattern has {} bytes, 1 to {MAX_PATTERN_BYTES} are allowed",
            text.len()
        )));
    }
    // The compiler expands counted repetition: {1000} inside {1000} is a million states.
    if shortest.is_none() && repetition(text) > 10_000 {
        return Err(Error::invalid_file(format!(
            "{name}: the counted repetitions of a pattern multiply to more than 10000"
        )));
    }
    Ok(shortest)
}

/// Returns the product of all numbers in braces in an expression.
fn repetition(pattern: &str) -> u64 {
    let mut product = 1u64;
    for braces in pattern.split('{').skip(1) {
        let inside = braces.split('}').next().unwrap_or_default();
        let largest = inside
            .split(',')
            .filter_map(|number| number.trim().parse::<u64>().ok())
            .max()
            .unwrap_or(1);
        product = product.saturating_mul(largest.max(1));
    }
    product
}

fn bounded_text(place: Place, value: &Value, key: &str) -> Result<usize> {
    let length = value.get(key).and_then(Value::as_str).unwrap_or_default().len();
    if length > 64 {
        return Err(Error::invalid_file(format!("{}: {key} is over 64 bytes", place.name())));
    }
    Ok(length)
}

/// Checks that a template names each input at most once, and only special tokens that it defines.
fn check_template(value: &Value) -> Result<()> {
    for key in ["single", "pair"] {
        let pieces = value.get(key).and_then(Value::as_array).map_or(&[] as &[Value], |v| v);
        for input in ["A", "B"] {
            let uses = pieces.iter().filter(|piece| {
                piece.get("Sequence").and_then(|s| s.get("id")).and_then(Value::as_str)
                    == Some(input)
            });
            if uses.count() > 1 {
                return Err(Error::invalid_file(format!(
                    "post_processor: the template \"{key}\" repeats sequence {input}"
                )));
            }
        }
        for piece in pieces {
            let Some(id) = piece.get("SpecialToken").and_then(|s| s.get("id")) else { continue };
            let id = id.as_str().unwrap_or_default();
            if value.get("special_tokens").and_then(|tokens| tokens.get(id)).is_none() {
                return Err(Error::invalid_file(format!(
                    "post_processor: the template \"{key}\" names the special token \"{}\", which \
                     it does not define",
                    shortened(id)
                )));
            }
        }
    }
    Ok(())
}
