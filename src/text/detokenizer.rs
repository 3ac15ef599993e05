//! Turns token ids into text, one by one, in whole characters.

use super::token_bytes::ByteText;
use super::tokenizer::Tokenizer;
use crate::error::{try_with_capacity, Error, Result};
use std::sync::Arc;

/// After this many tokens without a whole character, the bytes that a decoder without a table of
/// bytes calls invalid are accepted as invalid. A character has at most four.
const MAX_PENDING_TOKENS: usize = 16;

/// The tokens of a prompt that the first one after it is decoded with: those of a character, and so the last one.
const NUM_NEIGHBOURS: usize = 4;

/// Turns the tokens of one generation into pieces of text.
///
/// Each piece is valid UTF-8: a character whose bytes are spread over several tokens appears with
/// the last of them. Bytes that can no longer become a character appear at once as U+FFFD, as in
/// [`Tokenizer::decode`]. All pieces together are the text that it gives for all tokens together; so
/// with the vocabularies of Llama 2 and Mistral the first word comes without the space before it.
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special_tokens: bool,
    /// For vocabularies whose tokens stand for bytes.
    text: ByteText,
    /// For other vocabularies: the tokens whose text is still needed to decode the next one. Their
    /// decoders look at neighbours (whether a space is kept depends on what precedes it).
    window: Vec<u32>,
    /// The number of tokens of `window` that have been shown.
    num_shown: usize,
}

/// Returns an empty text with room for `len` bytes and one more.
fn text_with_room(len: usize) -> Result<String> {
    let most = len.saturating_add(1);
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
            text: ByteText::default(),
            window: Vec::new(),
            num_shown: 0,
        }
    }

    /// Makes a detokenizer for tokens that go on with a text, as those do that complete a prompt of the
    /// tokens `before`: where [`Detokenizer::new`] leaves out the space before the first word of a text, this
    /// one keeps it.
    pub fn continuing(
        tokenizer: Arc<Tokenizer>,
        skip_special_tokens: bool,
        before: &[u32],
    ) -> Result<Self> {
        let mut made = Self::new(tokenizer, skip_special_tokens);
        if made.tokenizer.byte_table().is_some() {
            made.text = ByteText::continuing();
            return Ok(made);
        }
        // Those that this decoder may look at, as if they had been shown just now.
        let is_shown = |id: &u32| {
            !(skip_special_tokens && made.tokenizer.is_special(*id))
                && made.tokenizer.id_to_token(*id).is_some()
        };
        let mut window: Vec<u32> = try_with_capacity(NUM_NEIGHBOURS, "tokens")?;
        window.extend(before.iter().copied().rev().filter(is_shown).take(NUM_NEIGHBOURS));
        window.reverse();
        made.num_shown = window.len();
        made.window = window;
        Ok(made)
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Takes the next token and returns the text that it completes, often empty; otherwise there is
    /// room for one more byte, for callers that need a NUL. An id without a token has no text. After
    /// an error the token has not been taken.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if self.skip_special_tokens && self.tokenizer.is_special(id) {
            return Ok(String::new());
        }
        let Some(table) = self.tokenizer.byte_table() else { return self.push_by_difference(id) };
        let mut text = text_with_room(self.text.reserve(table, id)?)?;
        self.text.push(table, id, &mut text);
        Ok(text)
    }

    /// Returns the rest of the text when no token follows: an unfinished character becomes U+FFFD.
    /// The detokenizer is then at the beginning of a text again.
    pub fn finish(&mut self) -> Result<String> {
        let Some(table) = self.tokenizer.byte_table() else {
            let text = self.unshown()?;
            self.window.clear();
            self.num_shown = 0;
            return Ok(text);
        };
        let mut text = text_with_room(self.text.most_left())?;
        self.text.finish(table, &mut text);
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
