//! The bytes that each token stands for, and how the bytes of several make text.
//!
//! There are two kinds of vocabularies whose tokens stand for bytes. Those of the byte level (GPT-2,
//! Qwen, Llama 3) write every byte as a character. Those in the manner of SentencePiece (Llama 2,
//! Mistral) write text as it is, with `▁` for a space, and have a token such as `<0xE2>` for each
//! byte, for characters that the vocabulary lacks.

use super::pipeline::leaves;
use crate::error::{try_with_capacity, Error, Result};
use serde_json::Value;
use tokenizers::models::bpe::BPE;
use tokenizers::{AddedVocabulary, Model};

/// The bytes of all tokens, concatenated.
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    /// `[vocab_size + 1]`: the offset at which each token begins. Ids without a token have no
    /// bytes.
    starts: Vec<u32>,
    /// Set if there are tokens for single bytes beside others.
    fallback: Option<Fallback>,
}

/// The tables that only vocabularies with tokens for single bytes have.
struct Fallback {
    /// `[vocab_size]`
    kinds: Vec<Kind>,
    strip: Strip,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// No token has this id.
    Missing,
    /// One byte of a character.
    Byte,
    /// Whole characters.
    Text,
}

/// The characters that a decoder strips from the beginning of a text.
#[derive(Clone, Copy)]
struct Strip {
    content: char,
    count: usize,
}

/// A decoder that gives each token bytes of its own.
pub(super) enum ByteDecoder {
    /// `ByteLevel`.
    ByteLevel,
    /// `Replace` any number of times, `ByteFallback`, `Fuse`, and perhaps `Strip` at the beginning.
    Fallback(FallbackDecoder),
}

/// See [`ByteDecoder::Fallback`].
pub(super) struct FallbackDecoder {
    replacements: Vec<(String, String)>,
    strip: Strip,
}

impl ByteDecoder {
    /// Returns the decoder of this JSON if it is one of these.
    pub fn of(decoder: &Value) -> Option<Self> {
        #[derive(PartialEq, PartialOrd)]
        enum Stage {
            Tokens,
            Bytes,
            Fused,
            Stripped,
        }
        let mut stage = Stage::Tokens;
        let mut replacements = Vec::new();
        let mut strip = Strip { content: ' ', count: 0 };
        let parts = leaves(decoder, "decoders");
        for part in &parts {
            match part.get("type").and_then(Value::as_str)? {
                "ByteLevel" if parts.len() == 1 => return Some(ByteDecoder::ByteLevel),
                "Replace" if stage == Stage::Tokens => {
                    let pattern = part.get("pattern")?.get("String")?.as_str()?;
                    let content = part.get("content")?.as_str()?;
                    replacements.push((pattern.to_owned(), content.to_owned()));
                }
                "ByteFallback" if stage == Stage::Tokens => stage = Stage::Bytes,
                "Fuse" if stage == Stage::Bytes => stage = Stage::Fused,
                "Strip" if stage == Stage::Fused && part.get("stop")?.as_u64() == Some(0) => {
                    let count = usize::try_from(part.get("start")?.as_u64()?).ok()?;
                    let content = part.get("content")?.as_str()?.chars().next()?;
                    strip = Strip { content, count };
                    stage = Stage::Stripped;
                }
                _ => return None,
            }
        }
        let is_known = stage >= Stage::Bytes;
        is_known.then_some(ByteDecoder::Fallback(FallbackDecoder { replacements, strip }))
    }
}

impl FallbackDecoder {
    /// Appends the bytes of a token; returns its kind.
    fn write(&self, token: &str, bytes: &mut Vec<u8>) -> Result<Kind> {
        let mut text = token.to_owned();
        for (pattern, content) in &self.replacements {
            text = text.replace(pattern, content);
        }
        // The crate's rule.
        let hex = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        let byte =
            hex.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok());
        let no_memory = |_| Error::out_of_memory("the token table", text.len());
        bytes.try_reserve(text.len()).map_err(no_memory)?;
        match byte {
            Some(byte) => {
                bytes.push(byte);
                Ok(Kind::Byte)
            }
            None => {
                bytes.extend_from_slice(text.as_bytes());
                Ok(Kind::Text)
            }
        }
    }
}

impl TokenBytes {
    /// Makes the table of a vocabulary.
    pub fn new(
        decoder: &ByteDecoder,
        tokens: &AddedVocabulary,
        model: &BPE,
        vocab_size: usize,
    ) -> Result<Self> {
        let alphabet = byte_alphabet();
        let mut starts = try_with_capacity(vocab_size + 1, "the token table")?;
        let mut kinds = match decoder {
            ByteDecoder::ByteLevel => Vec::new(),
            ByteDecoder::Fallback(_) => try_with_capacity(vocab_size, "the token table")?,
        };
        let mut bytes: Vec<u8> = Vec::new();
        for id in 0..vocab_size as u32 {
            starts.push(bytes.len() as u32);
            let added = tokens.simple_id_to_token(id);
            let token = added.or_else(|| model.id_to_token(id));
            match (decoder, token) {
                (ByteDecoder::ByteLevel, None) => {}
                (ByteDecoder::ByteLevel, Some(token)) => {
                    write_byte_level(&token, &alphabet, &mut bytes)?;
                }
                (ByteDecoder::Fallback(_), None) => kinds.push(Kind::Missing),
                (ByteDecoder::Fallback(decoder), Some(token)) => {
                    kinds.push(decoder.write(&token, &mut bytes)?);
                }
            }
        }
        starts.push(bytes.len() as u32);
        let fallback = match decoder {
            ByteDecoder::ByteLevel => None,
            ByteDecoder::Fallback(decoder) => Some(Fallback { kinds, strip: decoder.strip }),
        };
        Ok(TokenBytes { bytes, starts, fallback })
    }

    /// Returns the bytes of a token, none for an id without a token; `None` beyond all ids.
    pub fn get(&self, id: u32) -> Option<&[u8]> {
        let begin = *self.starts.get(id as usize)?;
        let end = *self.starts.get(id as usize + 1)?;
        self.bytes.get(begin as usize..end as usize)
    }

    /// Whether all bytes of a text may be put together before they are read as UTF-8.
    pub fn is_byte_level(&self) -> bool {
        self.fallback.is_none()
    }

    /// Whether the token stands for whole characters, so that an unfinished one before it stays so.
    fn is_whole(&self, id: u32) -> bool {
        let kind = self.fallback.as_ref().and_then(|f| f.kinds.get(id as usize));
        kind == Some(&Kind::Text)
    }
}

/// Appends the bytes of a token of the byte level. The crate's rule: a token with a character
/// outside the alphabet stands for itself.
fn write_byte_level(token: &str, alphabet: &[Option<u8>; 512], bytes: &mut Vec<u8>) -> Result<()> {
    let no_memory = |_| Error::out_of_memory("the token table", token.len());
    bytes.try_reserve(token.len()).map_err(no_memory)?;
    let start = bytes.len();
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
    Ok(())
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

/// The factor by which a text can be longer than the bytes of its tokens: at worst each is shown as
/// U+FFFD.
pub(super) const MAX_GROWTH: usize = char::REPLACEMENT_CHARACTER.len_utf8();

/// Puts the bytes of tokens together to text, in whole characters.
///
/// Bytes that cannot become a character become U+FFFD: at the byte level one for each maximal
/// ill-formed part, as in Python; with tokens for single bytes one for each byte, as in
/// SentencePiece. The `tokenizers` crate does the latter too, but for all bytes of a run of which
/// one is bad, good ones before it as well; a stream, which has shown those, could not follow it.
#[derive(Default)]
pub(super) struct ByteText {
    /// The bytes of an unfinished character, at most three.
    pending: Vec<u8>,
    /// Whether nothing more is to be stripped from the beginning.
    is_stripped: bool,
    num_stripped: usize,
}

impl ByteText {
    /// Makes text that goes on with another, of which nothing is to be stripped.
    pub fn continuing() -> Self {
        ByteText { is_stripped: true, ..ByteText::default() }
    }

    /// Makes sure that [`ByteText::push`] needs no memory but that of the text; returns the most
    /// bytes that it can append.
    pub fn reserve(&mut self, table: &TokenBytes, id: u32) -> Result<usize> {
        let len = table.get(id).unwrap_or_default().len();
        let no_memory = |_| Error::out_of_memory("the bytes of a token", len);
        self.pending.try_reserve(len).map_err(no_memory)?;
        Ok(self.pending.len().saturating_add(len).saturating_mul(MAX_GROWTH))
    }

    /// Takes a token, and appends the text that it completes.
    pub fn push(&mut self, table: &TokenBytes, id: u32, text: &mut String) {
        if table.is_whole(id) {
            self.flush(table, text);
        }
        self.pending.extend_from_slice(table.get(id).unwrap_or_default());
        let begin = text.len();
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                    rest = after;
                    // None means that the end of the input cuts a character in two.
                    let Some(bad) = error.error_len() else { break };
                    // Half a surrogate cannot become a character, but is held back all the same, as
                    // by Python's incremental decoder and the streams made with it.
                    if matches!(rest, [0xed, 0xa0..=0xbf]) {
                        break;
                    }
                    replace(table, bad, text);
                    rest = rest.get(bad..).unwrap_or_default();
                }
            }
        }
        let kept = rest.len();
        self.pending.drain(..self.pending.len() - kept);
        self.strip(table, text, begin);
    }

    /// Returns the most bytes that [`ByteText::finish`] can append.
    pub fn most_left(&self) -> usize {
        self.pending.len().saturating_mul(MAX_GROWTH)
    }

    /// Ends the text: an unfinished character becomes U+FFFD. What follows is another text.
    pub fn finish(&mut self, table: &TokenBytes, text: &mut String) {
        self.flush(table, text);
        (self.is_stripped, self.num_stripped) = (false, 0);
    }

    /// Appends the unfinished character, which nothing can finish any more.
    fn flush(&mut self, table: &TokenBytes, text: &mut String) {
        let begin = text.len();
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            replace(table, chunk.invalid().len(), text);
        }
        self.pending.clear();
        self.strip(table, text, begin);
    }

    /// Takes away from what was appended to `text` what the decoder strips from the beginning.
    fn strip(&mut self, table: &TokenBytes, text: &mut String, begin: usize) {
        let Some(Fallback { strip, .. }) = &table.fallback else { return };
        while !self.is_stripped && text.len() > begin {
            let next = text.get(begin..).and_then(|new| new.chars().next());
            if next != Some(strip.content) || self.num_stripped == strip.count {
                self.is_stripped = true;
                return;
            }
            text.drain(begin..begin + strip.content.len_utf8());
            self.num_stripped += 1;
        }
    }
}

/// Appends what stands for an ill-formed part of `len` bytes.
fn replace(table: &TokenBytes, len: usize, text: &mut String) {
    let count = if table.is_byte_level() { len.min(1) } else { len };
    (0..count).for_each(|_| text.push(char::REPLACEMENT_CHARACTER));
}
