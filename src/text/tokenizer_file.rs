//! Reads `tokenizer.json` under limits, into the parts that the `tokenizers` crate is built from.
//!
//! That crate's own reader is not used: it panics on crafted files, builds the vocabulary twice,
//! silently gives added tokens other ids than the file says, and keeps a cache per thread that is
//! never freed. Only byte-pair encoding is read, which is what all supported families use. `truncation`
//! and `padding` are ignored, as Transformers ignores them unless asked.

use super::shortened;
use crate::error::{Error, ErrorKind, Result};
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::Value;
use std::fmt;
pub(super) use tokenizers::models::bpe::Vocab;

/// The largest `tokenizer.json`, in bytes. The published ones of Qwen3 have 5 to 11 MiB.
pub const MAX_TOKENIZER_BYTES: usize = 64 << 20;
/// The most entries of the vocabulary, and the most merges (Qwen3: 151,643 and 151,387).
const MAX_ENTRIES: usize = 1 << 20;
/// Ids must be below this, so that tables by id stay small. Twenty times the largest vocabulary
/// known.
const MAX_ID: u32 = 1 << 22;
/// The longest token, in bytes.
const MAX_TOKEN_BYTES: usize = 4096;
/// The most added tokens (Qwen3: 26), and the most bytes of all of them: an automaton is built from
/// them.
const MAX_ADDED_TOKENS: usize = 16_384;
const MAX_ADDED_BYTES: usize = 1 << 20;
/// The largest normalizer, pre-tokenizer, post-processor or decoder, in bytes of text.
const MAX_COMPONENT_BYTES: usize = 64 << 10;

/// The parts of a tokenizer file.
pub(super) struct TokenizerFile {
    /// The added tokens, sorted by id; ids are unique.
    pub added_tokens: Vec<AddedTokenEntry>,
    pub normalizer: Value,
    pub pre_tokenizer: Value,
    pub post_processor: Value,
    pub decoder: Value,
    pub vocab: Vocab,
    pub merges: Vec<(String, String)>,
    pub options: BpeOptions,
}

/// The settings of the byte-pair model.
#[derive(Default)]
pub(super) struct BpeOptions {
    pub unk_token: Option<String>,
    pub end_of_word_suffix: Option<String>,
    pub fuse_unk: bool,
    pub byte_fallback: bool,
    pub ignore_merges: bool,
}

/// A token that is found in the text before anything else is done with the text.
#[derive(Deserialize)]
#[serde(expecting = "an added token: an object with id and content")]
pub(super) struct AddedTokenEntry {
    pub id: u32,
    pub content: String,
    #[serde(default)]
    pub single_word: bool,
    #[serde(default)]
    pub lstrip: bool,
    #[serde(default)]
    pub rstrip: bool,
    #[serde(default)]
    pub normalized: bool,
    #[serde(default)]
    pub special: bool,
}

/// The structure of the file.
#[derive(Deserialize)]
#[serde(expecting = "an object with a tokenizer")]
struct Layout<'a> {
    #[serde(default)]
    version: Option<String>,
    #[serde(default)]
    added_tokens: AddedTokens,
    #[serde(borrow, default)]
    normalizer: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pre_tokenizer: Option<&'a RawValue>,
    #[serde(borrow, default)]
    post_processor: Option<&'a RawValue>,
    #[serde(borrow, default)]
    decoder: Option<&'a RawValue>,
    model: ModelLayout,
}

#[derive(Deserialize)]
#[serde(expecting = "a model: an object with type, vocab and merges")]
struct ModelLayout {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    vocab: VocabLayout,
    #[serde(default)]
    merges: MergesLayout,
    #[serde(default)]
    dropout: Option<f32>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: Option<bool>,
    #[serde(default)]
    byte_fallback: Option<bool>,
    #[serde(default)]
    ignore_merges: Option<bool>,
}

impl TokenizerFile {
    /// Reads and checks a file. Errors are sentences without the file's name, which the caller
    /// adds.
    pub fn parse(json: &[u8]) -> Result<Self> {
        if json.len() > MAX_TOKENIZER_BYTES {
            return Err(Error::invalid_file(format!(
                "the file has {} bytes, at most {MAX_TOKENIZER_BYTES} are read",
                json.len()
            )));
        }
        let layout: Layout<'_> = serde_json::from_slice(json)
            .map_err(|e| Error::invalid_file(shortened(&e.to_string())))?;
        if let Some(version) = layout.version.as_deref().filter(|v| *v != "1.0") {
            return Err(Error::unsupported(format!(
                "version is \"{}\", expected \"1.0\"",
                shortened(version)
            )));
        }
        let model = layout.model;
        check_model(&model)?;
        let mut added_tokens = layout.added_tokens.0;
        check_added_tokens(&mut added_tokens)?;
        Ok(TokenizerFile {
            added_tokens,
            normalizer: component("normalizer", layout.normalizer)?,
            pre_tokenizer: component("pre_tokenizer", layout.pre_tokenizer)?,
            post_processor: component("post_processor", layout.post_processor)?,
            decoder: component("decoder", layout.decoder)?,
            vocab: model.vocab.entries,
            merges: model.merges.merges,
            options: BpeOptions {
                unk_token: model.unk_token,
                end_of_word_suffix: model.end_of_word_suffix.filter(|s| !s.is_empty()),
                fuse_unk: model.fuse_unk.unwrap_or(false),
                byte_fallback: model.byte_fallback.unwrap_or(false),
                ignore_merges: model.ignore_merges.unwrap_or(false),
            },
        })
    }
}

fn check_model(model: &ModelLayout) -> Result<()> {
    if let Some(kind) = model.kind.as_deref().filter(|kind| *kind != "BPE") {
        return Err(Error::unsupported(format!(
            "model.type is \"{}\", only \"BPE\" is supported",
            shortened(kind)
        )));
    }
    if model.vocab.no_memory || model.merges.no_memory {
        return Err(Error::new(ErrorKind::OutOfMemory, "cannot allocate the vocabulary"));
    }
    if model.vocab.is_list {
        return Err(Error::unsupported("model.vocab is a list; only BPE models are supported"));
    }
    if model.vocab.entries.is_empty() {
        return Err(Error::invalid_file("model.vocab is empty"));
    }
    if model.dropout.is_some_and(|dropout| dropout != 0.0) {
        return Err(Error::unsupported("model.dropout is set; it makes encoding random"));
    }
    // The crate cuts the prefix's number of bytes off every second half of a merge, whatever they
    // are.
    if model.continuing_subword_prefix.as_deref().is_some_and(|prefix| !prefix.is_empty()) {
        return Err(Error::unsupported("model.continuing_subword_prefix is not supported"));
    }
    if let Some(unk) = &model.unk_token {
        if !model.vocab.entries.contains_key(unk) {
            return Err(Error::invalid_file(format!(
                "model.unk_token \"{}\" is not in model.vocab",
                shortened(unk)
            )));
        }
    }
    let mut whole = String::new();
    for (number, (left, right)) in model.merges.merges.iter().enumerate() {
        whole.clear();
        whole.push_str(left);
        whole.push_str(right);
        for part in [left, right, &whole] {
            if !model.vocab.entries.contains_key(part) {
                return Err(Error::invalid_file(format!(
                    "model.merges[{number}]: \"{}\" is not in model.vocab",
                    shortened(part)
                )));
            }
        }
    }
    Ok(())
}

fn check_added_tokens(added_tokens: &mut [AddedTokenEntry]) -> Result<()> {
    let mut bytes = 0usize;
    for (number, token) in added_tokens.iter().enumerate() {
        bytes += token.content.len();
        if token.content.is_empty() {
            return Err(Error::invalid_file(format!("added_tokens[{number}].content is empty")));
        }
        if token.content.len() > MAX_TOKEN_BYTES || bytes > MAX_ADDED_BYTES {
            return Err(Error::invalid_file(format!(
                "added_tokens[{number}] is longer than {MAX_TOKEN_BYTES} bytes, or all together are \
                 longer than {MAX_ADDED_BYTES}"
            )));
        }
        if token.id >= MAX_ID {
            return Err(Error::invalid_file(format!(
                "added_tokens[{number}].id is {}, ids must be below {MAX_ID}",
                token.id
            )));
        }
    }
    // The crate numbers tokens in the order in which they are added.
    added_tokens.sort_by_key(|token| token.id);
    for pair in added_tokens.windows(2) {
        if let [a, b] = pair {
            if a.id == b.id {
                return Err(Error::invalid_file(format!(
                    "added_tokens has id {} for both \"{}\" and \"{}\"",
                    a.id,
                    shortened(&a.content),
                    shortened(&b.content)
                )));
            }
        }
    }
    Ok(())
}

fn component(name: &str, raw: Option<&RawValue>) -> Result<Value> {
    let Some(raw) = raw else { return Ok(Value::Null) };
    if raw.get().len() > MAX_COMPONENT_BYTES {
        return Err(Error::invalid_file(format!(
            "{name} has {} bytes, at most {MAX_COMPONENT_BYTES} are allowed",
            raw.get().len()
        )));
    }
    serde_json::from_str(raw.get()).map_err(|e| Error::invalid_file(format!("{name}: {e}")))
}

/// The list of added tokens, bounded while it is read.
#[derive(Default)]
struct AddedTokens(Vec<AddedTokenEntry>);

impl<'de> Deserialize<'de> for AddedTokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = AddedTokens;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of added tokens")
            }

            fn visit_unit<E>(self) -> std::result::Result<AddedTokens, E> {
                Ok(AddedTokens::default())
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> std::result::Result<AddedTokens, A::Error> {
                let mut tokens = Vec::new();
                while let Some(token) = seq.next_element()? {
                    if tokens.len() == MAX_ADDED_TOKENS {
                        return Err(serde::de::Error::custom(format_args!(
                            "added_tokens has more than {MAX_ADDED_TOKENS} entries"
                        )));
                    }
                    tokens.push(token);
                }
                Ok(AddedTokens(tokens))
            }
        }
        deserializer.deserialize_any(List)
    }
}

/// `model.vocab`: token to id. Other kinds of models write a list here.
#[derive(Default)]
struct VocabLayout {
    entries: Vocab,
    is_list: bool,
    /// Whether memory was short, which the error of a deserializer cannot tell.
    no_memory: bool,
}

impl<'de> Deserialize<'de> for VocabLayout {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Table;
        impl<'de> Visitor<'de> for Table {
            type Value = VocabLayout;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a vocabulary: an object of tokens and ids")
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> std::result::Result<VocabLayout, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(VocabLayout { is_list: true, ..VocabLayout::default() })
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<VocabLayout, A::Error> {
                use serde::de::Error as _;
                let mut entries = Vocab::new();
                while let Some(token) = map.next_key::<String>()? {
                    let id: u32 = map.next_value().map_err(|e| {
                        A::Error::custom(format_args!(
                            "model.vocab[\"{}\"]: {e}",
                            shortened(&token)
                        ))
                    })?;
                    if entries.len() == MAX_ENTRIES {
                        return Err(A::Error::custom(format_args!(
                            "model.vocab has more than {MAX_ENTRIES} entries"
                        )));
                    }
                    if id >= MAX_ID {
                        return Err(A::Error::custom(format_args!(
                            "model.vocab[\"{}\"] is {id}, ids must be below {MAX_ID}",
                            shortened(&token)
                        )));
                    }
                    if token.len() > MAX_TOKEN_BYTES {
                        return Err(A::Error::custom(format_args!(
                            "token {id} of model.vocab is longer than {MAX_TOKEN_BYTES} bytes"
                        )));
                    }
                    if entries.try_reserve(1).is_err() {
                        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                        return Ok(VocabLayout { no_memory: true, ..VocabLayout::default() });
                    }
                    entries.insert(token, id);
                }
                Ok(VocabLayout { entries, ..VocabLayout::default() })
            }
        }
        deserializer.deserialize_any(Table)
    }
}

/// `model.merges`: each `"left right"` or `["left", "right"]`.
#[derive(Default)]
struct MergesLayout {
    merges: Vec<(String, String)>,
    /// As in [`VocabLayout`].
    no_memory: bool,
}

impl<'de> Deserialize<'de> for MergesLayout {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = MergesLayout;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of merges")
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> std::result::Result<MergesLayout, A::Error> {
                use serde::de::Error as _;
                let mut merges = Vec::new();
                while let Some(Merge(left, right)) = seq.next_element()? {
                    if merges.len() == MAX_ENTRIES {
                        return Err(A::Error::custom(format_args!(
                            "model.merges has more than {MAX_ENTRIES} entries"
                        )));
                    }
                    if merges.try_reserve(1).is_err() {
                        while seq.next_element::<IgnoredAny>()?.is_some() {}
                        return Ok(MergesLayout { no_memory: true, ..MergesLayout::default() });
                    }
                    merges.push((left, right));
                }
                Ok(MergesLayout { merges, no_memory: false })
            }
        }
        deserializer.deserialize_seq(List)
    }
}

struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Pair;
        impl<'de> Visitor<'de> for Pair {
            type Value = Merge;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a merge: \"left right\" or [\"left\", \"right\"]")
            }

            fn visit_str<E: serde::de::Error>(self, line: &str) -> std::result::Result<Merge, E> {
                match line.split_once(' ') {
                    Some((left, right)) if !right.contains(' ') => {
                        Ok(Merge(left.to_owned(), right.to_owned()))
                    }
                    _ => Err(E::custom(format_args!(
                        "the merge \"{}\" is not two tokens with a space between",
                        shortened(line)
                    ))),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> std::result::Result<Merge, A::Error> {
                use serde::de::Error as _;
                let (Some(left), Some(right)) = (seq.next_element()?, seq.next_element()?) else {
                    return Err(A::Error::custom("a merge has fewer than two tokens"));
                };
                if seq.next_element::<IgnoredAny>()?.is_some() {
                    return Err(A::Error::custom("a merge has more than two tokens"));
                }
                Ok(Merge(left, right))
            }
        }
        deserializer.deserialize_any(Pair)
    }
}
