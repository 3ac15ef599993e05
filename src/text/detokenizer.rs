//! Turns token ids into text, one by one, in whole characters.

use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};
use std::sync::Arc;

/// After this many tokens without a whole character, the bytes that a decoder not of the byte level
/// calls invalid are accepted as invalid. A character has at most four.
const MAX_PENDING_TOKENS: usize = 16;

/// Turns the tokens of one generation into pieces of text.
///
/// Each piece is valid UTF-8: a character whose bytes are spread over several tokens appears with
/// the last of them. Bytes that can no longer become a character appear at once as U+FFFD, one for
/// each maximal ill-formed part. All pieces together are the text that [`Tokenizer::decode`] gives
/// for all tokens together.
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special_tokens: bool,
    /// For byte-level vocabularies: the bytes of an unfinished character, at most three.
    pending: Vec<u8>,
    /// For other vocabularies: the tokens whose text is still needed to decode the next one. Their
    /// decoders look at neighbours (whether a space is kept depends on what precedes it).
    window: Vec<u32>,
    /// The number of tokens of `window` that have been shown.
    num_shown: usize,
}

/// Returns an empty text with room for all that `num_bytes` bytes of tokens can become: at worst
/// every byte is shown as U+FFFD.
fn text_with_room(num_bytes: usize) -> Result<String> {
    let most = num_bytes.saturating_mul(char::REPLACEMENT_CHARACTER.len_utf8()) + 1;
    let mut text = String::new();
    text.try_reserve(most).map_err(|_| Error::out_of_memory("the text of a token", most))?;
    Ok(text)
}

impl Detokenizer {
    /// Makes a detokenizer at the beginning of a text.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special_tokens: bool) -> Self {
        Detokenizer {
            tokenizer,
            skip_special_tokens,
            pending: Vec::new(),
            window: Vec::new(),
            num_shown: 0,
        }
    }

    /// Takes the next token and returns the text that it completes, often empty; otherwise there is
    /// room for one more byte, for callers that need a NUL. An id without a token has no text. After
    /// an error the token has not been taken.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if self.skip_special_tokens && self.tokenizer.is_special(id) {
            return Ok(String::new());
        }
        if !self.tokenizer.is_byte_level() {
            return self.push_by_difference(id);
        }
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
        let no_memory = |_| Error::out_of_memory("the bytes of a token", bytes.len());
        self.pending.try_reserve(bytes.len()).map_err(no_memory)?;
        let mut text = text_with_room(self.pending.len() + bytes.len())?;
        self.pending.extend_from_slice(bytes);
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
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = rest.get(bad..).unwrap_or_default();
                }
            }
        }
        let kept = rest.len();
        self.pending.drain(..self.pending.len() - kept);
        Ok(text)
    }

    /// Returns the rest of the text when no token follows: an unfinished character becomes U+FFFD.
    /// The detokenizer is then at the beginning of a text again.
    pub fn finish(&mut self) -> Result<String> {
        if !self.tokenizer.is_byte_level() {
            let text = self.unshown()?;
            self.window.clear();
            self.num_shown = 0;
            return Ok(text);
        }
        let mut text = text_with_room(self.pending.len())?;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.pending.clear();
        Ok(text)
    }

    /// Returns the text of the window without that of its shown tokens.
    fn unshown(&self) -> Result<String> {
        let shown = self.window.get(..self.num_shown).unwrap_or_default();
        let before = self.tokenizer.decode(shown, self.skip_special_tokens)?;
        let mut all = self.tokenizer.decode(&self.window, self.skip_special_tokens)?;
        all.try_reserve(1).map_err(|_| Error::out_of_memory("the text of a token", 1))?;
        // If the decoder now gives other text for the shown tokens, nothing can be taken back.
        let common = all.bytes().zip(before.bytes()).take_while(|(a, b)| a == b).count();
        let mut cut = common.min(before.len());
        while !all.is_char_boundary(cut) {
            cut -= 1;
        }
        all.drain(..cut);
        Ok(all)
    }

    fn push_by_difference(&mut self, id: u32) -> Result<String> {
        let size = size_of_val(self.window.as_slice());
        self.window.try_reserve(1).map_err(|_| Error::out_of_memory("tokens", size))?;
        self.window.push(id);
        let text = match self.unshown() {
            Ok(text) => text,
            Err(error) => {
                self.window.pop();
                return Err(error);
            }
        };
        let waiting = self.window.len() - self.num_shown;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && waiting < MAX_PENDING_TOKENS {
            return Ok(String::new());
        }
        // The tokens just shown are the neighbours of the next one; earlier ones are not needed.
        self.window.drain(..self.num_shown);
        self.num_shown = self.window.len();
        Ok(text)
    }
}
