//! Turns text into token ids and back, by the `tokenizer.json` of a model.
//!
//! Encoding is done by the `tokenizers` crate; reading the file is our own code
//! (`tokenizer_file.rs`). Decoding is our own as well where the vocabulary is of the byte level, as
//! those of Qwen3 and GPT-2 are: a table from ids to bytes, which the streaming detokenizer also
//! uses. Other vocabularies go through the crate's decoder.

use super::cut::CutRules;
use super::special_tokens::SpecialTokens;
use super::tokenizer_components::{check, Findings, Place};
use super::tokenizer_file::{AddedTokenEntry, TokenizerFile, Vocab};
use super::{guarded, shortened};
use crate::error::{check_room, try_with_capacity, Context, Error, ErrorKind, Result};
use crate::thread_state::thread_cpu_time;
use serde_json::Value;
use std::collections::HashSet;
use std::sync::OnceLock;
use std::time::Duration;
use tokenizers::models::bpe::BPE;
use tokenizers::{
    AddedToken, DecoderWrapper, Model, NormalizerWrapper, PostProcessorWrapper,
    PreTokenizerWrapper, TokenizerImpl,
};

/// The longest text that is encoded at once, in bytes.
pub const MAX_TEXT_BYTES: usize = 16 << 20;
/// The longest text for tokenizers whose texts cannot be cut: the crate takes up to 400 times as
/// much memory while it works.
const MAX_UNCUT_BYTES: usize = 1 << 20;

/// Bytes reserved for each byte of tokenizer.json: more than the crate takes, for expressions and
/// the like too.
const ROOM_PER_FILE_BYTE: usize = 4;
const ROOM_FOR_PARTS: usize = 8 << 20;
/// Bytes reserved for each byte of a text: more than the crate takes to encode it (`cut.rs`), and
/// for a short one.
const ROOM_PER_TEXT_BYTE: usize = 400;
const ROOM_FOR_TEXT: usize = 64 << 10;

type Inner = TokenizerImpl<
    BPE,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// A model's tokenizer. Calls take `&self`, change nothing and may come from several threads.
pub struct Tokenizer {
    inner: Inner,
    /// `inner` without its added tokens, for texts in which they are not to be recognised. Made
    /// when it is first needed: a second copy of a large vocabulary takes some tens of MB.
    plain: OnceLock<Inner>,
    /// The highest id plus one.
    vocab_size: usize,
    special_ids: HashSet<u32>,
    special_tokens: SpecialTokens,
    /// Set if the vocabulary is of the byte level.
    token_bytes: Option<TokenBytes>,
    /// The rules by which long texts may be cut, if they may.
    cut_rules: Option<CutRules>,
    /// Whether the post-processor adds tokens of its own if asked for special tokens.
    has_template: bool,
}

/// Makes the crate give added tokens the ids of the file. It numbers those that are not in the
/// vocabulary from the vocabulary's size on; if the file has other ids (gaps, padding), these
/// tokens are put into the vocabulary.
fn with_misplaced_tokens(mut vocab: Vocab, added: &[AddedTokenEntry]) -> Result<Vocab> {
    let mut next = vocab.len();
    let misplaced = added.iter().any(|token| match vocab.get(&token.content) {
        Some(id) => *id != token.id,
        None => {
            next += 1;
            token.id as usize != next - 1
        }
    });
    if !misplaced {
        return Ok(vocab);
    }
    let taken: HashSet<u32> = vocab.values().copied().collect();
    for token in added {
        if !vocab.contains_key(&token.content) && !taken.contains(&token.id) {
            vocab.insert(token.content.clone(), token.id);
        }
    }
    Ok(vocab)
}

/// Returns the same pipeline without added tokens to look for.
fn without_added_tokens(inner: &Inner) -> Result<Inner> {
    let mut plain = TokenizerImpl::new(inner.get_model().clone());
    plain.with_normalizer(inner.get_normalizer().cloned()).map_err(crate_error)?;
    plain.with_pre_tokenizer(inner.get_pre_tokenizer().cloned());
    plain.with_post_processor(inner.get_post_processor().cloned());
    plain.with_decoder(inner.get_decoder().cloned());
    Ok(plain)
}

/// Replaces each maximal part that is not UTF-8 by U+FFFD, in memory that is reserved first.
fn replace_invalid(bytes: &[u8]) -> Result<String> {
    const REPLACEMENT: &str = "\u{fffd}";
    let parts = || {
        bytes.utf8_chunks().flat_map(|chunk| {
            [chunk.valid(), if chunk.invalid().is_empty() { "" } else { REPLACEMENT }]
        })
    };
    let length = parts().map(str::len).sum();
    let mut text = String::new();
    text.try_reserve_exact(length).map_err(|_| Error::out_of_memory("decoded text", length))?;
    parts().for_each(|part| text.push_str(part));
    Ok(text)
}

/// The bytes of all tokens, concatenated.
struct TokenBytes {
    bytes: Vec<u8>,
    /// `[vocab_size + 1]`: the offset at which each token begins. Ids without a token have no
    /// bytes.
    starts: Vec<u32>,
}

impl Tokenizer {
    /// Builds a tokenizer from the contents of `tokenizer.json` and, for the names of the special
    /// tokens, `tokenizer_config.json`.
    pub fn from_bytes(json: &[u8], config_json: Option<&[u8]>) -> Result<Self> {
        let special_tokens = match config_json {
            Some(config) => SpecialTokens::from_config(config)?,
            None => SpecialTokens::default(),
        };
        guarded(ErrorKind::InvalidFile, "it makes the tokenizer fail", || {
            let room = json.len().saturating_mul(ROOM_PER_FILE_BYTE);
            check_room(room.saturating_add(ROOM_FOR_PARTS), "the tokenizer")?;
            Self::build(TokenizerFile::parse(json)?, special_tokens)
        })
        .context(|| "tokenizer.json")
    }

    fn build(file: TokenizerFile, special_tokens: SpecialTokens) -> Result<Self> {
        let mut findings = Findings::default();
        check(Place::Normalizer, &file.normalizer, &mut findings)?;
        check(Place::PreTokenizer, &file.pre_tokenizer, &mut findings)?;
        check(Place::PostProcessor, &file.post_processor, &mut findings)?;
        check(Place::Decoder, &file.decoder, &mut findings)?;
        let cut_rules = CutRules::of(&file);
        let has_template =
            !matches!(component_type(&file.post_processor), None | Some("ByteLevel"));
        let is_byte_level = component_type(&file.decoder) == Some("ByteLevel");

        let highest = file.vocab.values().chain(file.added_tokens.iter().map(|t| &t.id)).max();
        let vocab_size = highest.map_or(0, |id| *id as usize + 1);
        let options = file.options;
        let vocab = with_misplaced_tokens(file.vocab, &file.added_tokens)?;
        // The cache is disabled: the crate keeps one per thread and tokenizer and never frees it.
        let mut model = BPE::builder()
            .vocab_and_merges(vocab, file.merges)
            .cache_capacity(0)
            .fuse_unk(options.fuse_unk)
            .byte_fallback(options.byte_fallback)
            .ignore_merges(options.ignore_merges);
        if let Some(unk) = options.unk_token {
            model = model.unk_token(unk);
        }
        if let Some(suffix) = options.end_of_word_suffix {
            model = model.end_of_word_suffix(suffix);
        }
        let mut inner = Inner::new(model.build().map_err(crate_error)?);
        inner
            .with_normalizer(part::<NormalizerWrapper>("normalizer", &file.normalizer)?)
            .map_err(crate_error)?;
        inner
            .with_pre_tokenizer(part::<PreTokenizerWrapper>("pre_tokenizer", &file.pre_tokenizer)?);
        inner.with_post_processor(part::<PostProcessorWrapper>(
            "post_processor",
            &file.post_processor,
        )?);
        inner.with_decoder(part::<DecoderWrapper>("decoder", &file.decoder)?);
        let added = file.added_tokens.iter().map(|token| AddedToken {
            content: token.content.clone(),
            single_word: token.single_word,
            lstrip: token.lstrip,
            rstrip: token.rstrip,
            normalized: token.normalized,
            special: token.special,
        });
        inner.add_tokens(added).map_err(crate_error)?;
        for token in &file.added_tokens {
            let id = inner.token_to_id(&token.content);
            if id != Some(token.id) {
                return Err(Error::invalid_file(format!(
                    "the added token \"{}\" has id {}, but the vocabulary before it leads to {}",
                    shortened(&token.content),
                    token.id,
                    id.map_or("none".to_owned(), |id| id.to_string())
                )));
            }
        }
        let special_ids = file.added_tokens.iter().filter(|t| t.special).map(|t| t.id).collect();
        let token_bytes =
            if is_byte_level { Some(TokenBytes::new(&inner, vocab_size)?) } else { None };
        let tokenizer = Tokenizer {
            inner,
            plain: OnceLock::new(),
            vocab_size,
            special_ids,
            special_tokens,
            token_bytes,
            cut_rules,
            has_template,
        };
        if findings.untrusted_pattern {
            tokenizer.try_patterns()?;
        }
        Ok(tokenizer)
    }

    /// Returns the tokens of `text`. With `parse_special_tokens`, added tokens (special ones and
    /// others, such as `<think>`) that are written in the text become their ids; else they are
    /// ordinary text. `add_special_tokens` lets the post-processor add its own (none for Qwen3 and
    /// GPT-2).
    ///
    /// Time is linear in the text, about half a second per megabyte. With the patterns of Qwen3 and
    /// GPT-2, texts are encoded in pieces, so that memory stays small; a run of more than 512 KiB
    /// without a place to cut is cut all the same, and its tokens may differ there (see `cut.rs`).
    pub fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        parse_special_tokens: bool,
    ) -> Result<Vec<u32>> {
        let all = usize::MAX;
        Ok(self.encode_beginning(text, add_special_tokens, parse_special_tokens, all)?.0)
    }

    /// As [`Tokenizer::encode`], for a text of which more than `enough` tokens are of no use: stops
    /// after the piece that exceeds them. Also returns whether the tokens are those of the whole
    /// text.
    pub fn encode_beginning(
        &self,
        text: &str,
        add_special_tokens: bool,
        parse_special_tokens: bool,
        enough: usize,
    ) -> Result<(Vec<u32>, bool)> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(Error::invalid_argument(format!(
                "the text has {} bytes, at most {MAX_TEXT_BYTES} can be encoded",
                text.len()
            )));
        }
        guarded(ErrorKind::InvalidFile, "tokenizer.json makes the tokenizer fail on a text", || {
            let is_framed = add_special_tokens && self.has_template;
            let cut_rules = self.cut_rules.as_ref().filter(|_| !is_framed);
            if cut_rules.is_none() && text.len() > MAX_UNCUT_BYTES {
                return Err(Error::unsupported(format!(
                    "the text has {} bytes, but this tokenizer can encode {MAX_UNCUT_BYTES} at most: how to \
                     cut longer ones is not known for its pattern",
                    text.len()
                )));
            }
            let inner = if parse_special_tokens { &self.inner } else { self.plain()? };
            let mut ids = Vec::new();
            let mut rest = text;
            // Runs once for the empty text as well: the post-processor may have tokens for it.
            loop {
                let cut = cut_rules.map_or(rest.len(), |rules| rules.first_piece(rest));
                let (piece, after) = rest.split_at(cut);
                let room = piece.len().saturating_mul(ROOM_PER_TEXT_BYTE);
                check_room(room.saturating_add(ROOM_FOR_TEXT), "encoding a text")?;
                let encoding = inner
                    .encode_fast(piece, add_special_tokens)
                    .map_err(crate_error)
                    .context(|| "tokenizer.json fails on a text")?;
                let new = encoding.get_ids();
                ids.try_reserve(new.len())
                    .map_err(|_| Error::out_of_memory("token ids", new.len() * 4))?;
                ids.extend_from_slice(new);
                rest = after;
                if rest.is_empty() || ids.len() > enough {
                    return Ok((ids, rest.is_empty()));
                }
            }
        })
    }

    fn plain(&self) -> Result<&Inner> {
        match self.plain.get() {
            Some(plain) => Ok(plain),
            None => {
                let made = without_added_tokens(&self.inner)?;
                Ok(self.plain.get_or_init(|| made))
            }
        }
    }

    /// Returns the text of `ids`; bytes that are not UTF-8 become U+FFFD, one for each maximal
    /// part. Ids without a token have no text, as in Transformers (models round their vocabulary
    /// up).
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        if let Some(table) = &self.token_bytes {
            let shown = || {
                ids.iter()
                    .filter(|id| !(skip_special_tokens && self.is_special(**id)))
                    .map(|id| table.get(*id).unwrap_or_default())
            };
            let length = shown().fold(0usize, |sum, bytes| sum.saturating_add(bytes.len()));
            let mut bytes: Vec<u8> = try_with_capacity(length, "decoded text")?;
            shown().for_each(|token| bytes.extend_from_slice(token));
            return match String::from_utf8(bytes) {
                Ok(text) => Ok(text),
                Err(e) => replace_invalid(e.as_bytes()),
            };
        }
        guarded(ErrorKind::InvalidFile, "tokenizer.json makes the decoder fail", || {
            self.inner.decode(ids, skip_special_tokens).map_err(crate_error)
        })
    }

    /// Returns the highest id plus one, added tokens included. A model's own vocabulary may be
    /// larger.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the id of a token, as it is written in the vocabulary or added.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns a token as the vocabulary writes it (byte level: `Ġ` for a space).
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Returns the bytes that a token stands for. `None` for an unknown id, and for all ids of a
    /// vocabulary that is not of the byte level, whose tokens have no bytes of their own.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.token_bytes.as_ref()?.get(id)
    }

    /// Whether tokens stand for bytes, so that [`Tokenizer::token_bytes`] has an answer.
    pub fn is_byte_level(&self) -> bool {
        self.token_bytes.is_some()
    }

    /// Whether `skip_special_tokens` leaves this token out.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.contains(&id)
    }

    /// Returns the special tokens that `tokenizer_config.json` names.
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.special_tokens
    }

    /// Returns the id of `eos_token`, if the config names one that the vocabulary has.
    pub fn eos_token_id(&self) -> Option<u32> {
        self.token_to_id(self.special_tokens.eos.as_deref()?)
    }

    /// Runs unknown expressions over texts that expose bad ones. Lengths grow slowly, so that
    /// exponential time shows before it hurts; fancy-regex gives up after a million steps, which
    /// bounds each match. Those steps take 20 ms and more, an ordinary expression takes well under
    /// one: the limit is far from both, and counts this thread's processor time, so that the
    /// verdict does not depend on what else the machine does.
    fn try_patterns(&self) -> Result<()> {
        const LENGTHS: [usize; 12] = [8, 12, 16, 20, 24, 32, 48, 64, 128, 512, 1024, 2048];
        const LIMIT: Duration = Duration::from_millis(5);
        for length in LENGTHS {
            for (unit, end) in [
                ("a", ""),
                ("a", "!"),
                ("ab", ""),
                ("ab", "!"),
                ("ab ", "\n"),
                (" ", ""),
                (" ", "a"),
                ("1", "a"),
                ("!", ""),
                ("\n", "a"),
            ] {
                let mut text = unit.repeat(length / unit.len());
                text.push_str(end);
                let time = |text: &str| {
                    let begin = thread_cpu_time();
                    self.inner.encode_fast(text, false).map_err(crate_error)?;
                    Ok::<_, Error>(thread_cpu_time().saturating_sub(begin))
                };
                // Tried twice: the first run may have met cold caches or a busy machine.
                if time(&text)? > LIMIT && time(&text)? > LIMIT {
                    return Err(Error::invalid_file(format!(
                        "its regular expressions take more than {} ms on {length} characters",
                        LIMIT.as_millis()
                    )));
                }
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size).finish_non_exhaustive()
    }
}

impl TokenBytes {
    fn new(inner: &Inner, vocab_size: usize) -> Result<Self> {
        let alphabet = byte_alphabet();
        let mut starts = try_with_capacity(vocab_size + 1, "the token table")?;
        let mut bytes: Vec<u8> = Vec::new();
        for id in 0..vocab_size as u32 {
            starts.push(bytes.len() as u32);
            let added = inner.get_added_vocabulary().simple_id_to_token(id);
            let Some(token) = added.or_else(|| inner.get_model().id_to_token(id)) else { continue };
            bytes
                .try_reserve(token.len())
                .map_err(|_| Error::out_of_memory("the token table", bytes.len()))?;
            let start = bytes.len();
            // The crate's rule: a token with a character outside the alphabet stands for itself.
            for character in token.chars() {
                match alphabet.get(character as usize).copied().flatten() {
                    Some(byte) => bytes.push(byte),
                    None => {
                        bytes.truncate(start);
                        bytes.extend_from_slice(token.as_bytes());
                        break;
                    }
                }
            }
        }
        starts.push(bytes.len() as u32);
        Ok(TokenBytes { bytes, starts })
    }

    fn get(&self, id: u32) -> Option<&[u8]> {
        let begin = *self.starts.get(id as usize)?;
        let end = *self.starts.get(id as usize + 1)?;
        self.bytes.get(begin as usize..end as usize)
    }
}

/// Returns the byte that each character stands for in byte-level vocabularies: printable Latin-1
/// stands for itself, U+0100 and following for the other bytes (GPT-2, `bytes_to_unicode` in
/// encoder.py).
fn byte_alphabet() -> [Option<u8>; 512] {
    let mut alphabet = [None; 512];
    let mut next = 256;
    for byte in 0..=255u8 {
        let character = match byte {
            0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => usize::from(byte),
            _ => {
                next += 1;
                next - 1
            }
        };
        if let Some(entry) = alphabet.get_mut(character) {
            *entry = Some(byte);
        }
    }
    alphabet
}

fn component_type(value: &Value) -> Option<&str> {
    value.get("type").and_then(Value::as_str)
}

fn part<T: serde::de::DeserializeOwned>(name: &str, value: &Value) -> Result<Option<T>> {
    if value.is_null() {
        return Ok(None);
    }
    serde_json::from_value(value.clone())
        .map(Some)
        .map_err(|e| Error::invalid_file(format!("{name}: {}", shortened(&e.to_string()))))
}

fn crate_error(error: impl std::fmt::Display) -> Error {
    Error::invalid_file(shortened(&error.to_string()))
}
