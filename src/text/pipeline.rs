//! The steps from a text to its tokens: added tokens, normalizers, pre-tokenizers, the model.
//!
//! The steps are those of the `tokenizers` crate, in its order; they are called one by one so that
//! a [`Watch`] is asked between them and inside the long ones, and so that the text that
//! normalizers make is bounded before it is made.

use super::bounded_regex::BoundedRegex;
use super::growth::most_bytes;
use super::marks::Marks;
use super::tokenizer_components::TRUSTED_PATTERNS;
use super::watch::Watch;
use super::{crate_error, shortened};
use crate::error::{check_room, Context, Error, Result};
use serde::Deserialize;
use serde_json::Value;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use tokenizers::models::bpe::BPE;
use tokenizers::pattern::Invert;
use tokenizers::{
    AddedVocabulary, Encoding, Model, NormalizedString, Normalizer, NormalizerWrapper, OffsetType,
    PreTokenizedString, PreTokenizer, PreTokenizerWrapper, SplitDelimiterBehavior,
};

/// Bytes reserved for each byte of a text: more than the crate takes to encode it (`cut.rs`), and
/// for a short one.
const ROOM_PER_TEXT_BYTE: usize = 400;
const ROOM_FOR_TEXT: usize = 64 << 10;
/// Bytes reserved for each byte that a normalizer makes: the text, its alignment with the original,
/// and the copy that it is made from.
const ROOM_PER_NORMALIZED_BYTE: usize = 64;
/// The longest text that normalizers may make, in bytes.
const MAX_NORMALIZED_BYTES: usize = 2 << 20;

/// The normalizers and pre-tokenizers of a file, in order, without the sequences around them.
pub(super) struct Pipeline {
    normalizers: Vec<NormalizerStep>,
    pre_tokenizers: Vec<PreTokenizerStep>,
    /// The room for each byte of normalized text.
    room_per_byte: usize,
}

enum NormalizerStep {
    /// Takes time in proportion to the text. The value is the JSON that it was made from.
    Plain(Box<NormalizerWrapper>, Value),
    /// `Replace` with a regular expression, and the text that it puts in.
    Replace(BoundedRegex, String),
}

enum PreTokenizerStep {
    Plain(Box<PreTokenizerWrapper>),
    /// `Split` with a regular expression that is not one of [`TRUSTED_PATTERNS`].
    Split {
        regex: BoundedRegex,
        behavior: SplitDelimiterBehavior,
        invert: bool,
    },
}

#[derive(Deserialize)]
struct RegexPattern {
    #[serde(rename = "Regex")]
    regex: String,
}

#[derive(Deserialize)]
struct ReplaceFields {
    pattern: RegexPattern,
    content: String,
}

#[derive(Deserialize)]
struct SplitFields {
    pattern: RegexPattern,
    behavior: SplitDelimiterBehavior,
    invert: bool,
}

impl Pipeline {
    /// Builds the steps from JSON that `tokenizer_components.rs` has checked. `growth`: the factor
    /// by which the pre-tokenizers may lengthen a text.
    pub fn build(normalizer: &Value, pre_tokenizer: &Value, growth: u64) -> Result<Self> {
        let mut normalizers = Vec::new();
        for part in leaves(normalizer, "normalizers") {
            normalizers.push(match regex_of(part, "Replace") {
                Some(_) => {
                    let fields: ReplaceFields = read("normalizer", part)?;
                    let regex =
                        BoundedRegex::new(&fields.pattern.regex).context(|| "normalizer")?;
                    NormalizerStep::Replace(regex, fields.content)
                }
                None => NormalizerStep::Plain(Box::new(read("normalizer", part)?), part.clone()),
            });
        }
        let mut pre_tokenizers = Vec::new();
        for part in leaves(pre_tokenizer, "pretokenizers") {
            let untrusted =
                regex_of(part, "Split").filter(|regex| !TRUSTED_PATTERNS.contains(regex));
            pre_tokenizers.push(match untrusted {
                Some(_) => {
                    let fields: SplitFields = read("pre_tokenizer", part)?;
                    let regex =
                        BoundedRegex::new(&fields.pattern.regex).context(|| "pre_tokenizer")?;
                    let SplitFields { behavior, invert, .. } = fields;
                    PreTokenizerStep::Split { regex, behavior, invert }
                }
                None => PreTokenizerStep::Plain(Box::new(read("pre_tokenizer", part)?)),
            });
        }
        // The room for a text includes that the byte-level alphabet doubles it.
        let growth = usize::try_from(growth).unwrap_or(usize::MAX).max(2);
        let room_per_byte = ROOM_PER_TEXT_BYTE.saturating_mul(growth) / 2;
        Ok(Pipeline { normalizers, pre_tokenizers, room_per_byte })
    }

    /// Returns the tokens of a text, without those that a post-processor adds. `added` are the
    /// tokens to be found in the text before anything else; after that, `marks` are taken out of it.
    pub fn encode(
        &self,
        text: &str,
        marks: &Marks,
        added: &AddedVocabulary,
        model: &BPE,
        watch: &Watch<'_>,
    ) -> Result<Encoding> {
        watch.check()?;
        let room = text.len().saturating_mul(self.room_per_byte);
        check_room(room.saturating_add(ROOM_FOR_TEXT), "encoding a text")?;
        let normalizer = self.normalizer(watch, room);
        let has_normalizers = !self.normalizers.is_empty();
        let mut parts = added.extract_and_normalize(has_normalizers.then_some(&normalizer), text);
        watch.check()?;
        let made = normalizer.made.load(Relaxed);
        if made > text.len() {
            let room = made.saturating_mul(self.room_per_byte);
            check_room(room.saturating_add(ROOM_FOR_TEXT), "encoding a text")?;
        }
        for (mark, text) in marks.replacements() {
            parts.normalize(|part| part.replace(mark, text)).map_err(crate_error)?;
            watch.check()?;
        }
        for step in &self.pre_tokenizers {
            step.apply(&mut parts, watch)?;
            watch.check()?;
        }
        parts
            .tokenize(|part| {
                watch.tick()?;
                model.tokenize(part.get())
            })
            .map_err(crate_error)?;
        parts.into_encoding(None, 0, OffsetType::None).map_err(crate_error)
    }

    /// Returns the normalizers as the crate takes them, for one text. `room`: the bytes of memory
    /// that are known to be available.
    pub fn normalizer<'a>(&'a self, watch: &'a Watch<'a>, room: usize) -> WatchedNormalizer<'a> {
        WatchedNormalizer { steps: &self.normalizers, watch, room, made: AtomicUsize::new(0) }
    }
}

/// The normalizers of a pipeline, run over the parts of one text under a watch.
pub(super) struct WatchedNormalizer<'a> {
    steps: &'a [NormalizerStep],
    watch: &'a Watch<'a>,
    room: usize,
    /// The bytes of all parts that have been normalized.
    made: AtomicUsize,
}

impl WatchedNormalizer<'_> {
    fn apply(&self, text: &mut NormalizedString) -> Result<()> {
        self.watch.tick()?;
        let made_before = self.made.load(Relaxed);
        for step in self.steps {
            let most = match step {
                NormalizerStep::Plain(_, json) => most_bytes(json, text.get()),
                // It may match the empty string between any two characters.
                NormalizerStep::Replace(_, content) => {
                    text.len().saturating_add(1).saturating_mul(content.len().saturating_add(1))
                }
            };
            let all = made_before.saturating_add(most);
            let room = all.saturating_mul(ROOM_PER_NORMALIZED_BYTE);
            if room > self.room {
                check_room(room, "normalizing a text")?;
            }
            match step {
                NormalizerStep::Plain(step, _) => step.normalize(text).map_err(crate_error)?,
                NormalizerStep::Replace(regex, content) => {
                    text.replace(regex.watched(self.watch), content).map_err(crate_error)?;
                }
            }
            if made_before.saturating_add(text.len()) > MAX_NORMALIZED_BYTES {
                return Err(Error::unsupported(format!(
                    "the normalizers make the text longer than {MAX_NORMALIZED_BYTES} bytes"
                )));
            }
        }
        self.made.store(made_before.saturating_add(text.len()), Relaxed);
        Ok(())
    }
}

impl Normalizer for WatchedNormalizer<'_> {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        self.apply(text).map_err(|error| {
            // The crate drops the errors of normalizers.
            self.watch.note(error.clone());
            error.into()
        })
    }
}

impl PreTokenizerStep {
    fn apply(&self, parts: &mut PreTokenizedString, watch: &Watch<'_>) -> Result<()> {
        match self {
            PreTokenizerStep::Plain(step) => step.pre_tokenize(parts),
            PreTokenizerStep::Split { regex, behavior, invert } => {
                let pattern = regex.watched(watch);
                parts.split(|_, part| {
                    if *invert {
                        part.split(Invert(pattern), *behavior)
                    } else {
                        part.split(pattern, *behavior)
                    }
                })
            }
        }
        .map_err(crate_error)
    }
}

/// Returns the parts of a place of the file, in order, without the sequences around them. `key`:
/// where a sequence has its parts.
pub(super) fn leaves<'a>(value: &'a Value, key: &str) -> Vec<&'a Value> {
    if value.is_null() {
        return Vec::new();
    }
    match value.get(key).and_then(Value::as_array) {
        Some(parts) if kind(value) == Some("Sequence") => {
            parts.iter().flat_map(|part| leaves(part, key)).collect()
        }
        _ => vec![value],
    }
}

fn kind(value: &Value) -> Option<&str> {
    value.get("type").and_then(Value::as_str)
}

/// Returns the regular expression of a part that is of the given kind.
fn regex_of<'a>(part: &'a Value, wanted: &str) -> Option<&'a str> {
    let regex = part.get("pattern")?.get("Regex")?.as_str()?;
    (kind(part) == Some(wanted)).then_some(regex)
}

/// Reads a part of the file, or anything else that it names.
pub(super) fn read<T: serde::de::DeserializeOwned>(name: &str, value: &Value) -> Result<T> {
    serde_json::from_value(value.clone())
        .map_err(|e| Error::invalid_file(format!("{name}: {}", shortened(&e.to_string()))))
}
