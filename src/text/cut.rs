//! The places where a long text may be cut before it is encoded.
//!
//! The `tokenizers` crate takes 100 to 400 bytes of memory per byte of text while it works: ten
//! megabytes of digits took 3.6 GB. So long texts are encoded in pieces, cut where the patterns of
//! Qwen, Llama 3 and GPT-2 begin a new word in any context: no match of theirs contains both sides,
//! and none looks back.
//!
//! | before the cut | after the cut |
//! | --- | --- |
//! | anything but white space | a space and then no white space |
//! | an ASCII letter or digit, an ideograph, kana, a Hangul syllable | punctuation |
//! | anything but white space | an ASCII digit, where each digit is a word (Qwen) |
//!
//! A run without any such place (a megabyte of one letter) is cut after [`MAX_PIECE_BYTES`] anyway,
//! and only there can the tokens differ from those of the whole text.

use super::tokenizer_components::{ONE_DIGIT_PATTERN, THREE_DIGITS_PATTERN};
use super::tokenizer_file::TokenizerFile;
use serde_json::Value;

/// The length of a piece from which on a place to cut is searched.
const PIECE_BYTES: usize = 64 << 10;
/// The largest length of a piece.
const MAX_PIECE_BYTES: usize = 512 << 10;

/// The most places inside added tokens that are passed over; a hostile file could put every place
/// inside one, and searching costs time.
const MAX_REFUSED_PLACES: usize = 1000;

/// The rules by which texts of one tokenizer may be cut.
pub(super) struct CutRules {
    /// Whether each digit is a word of its own.
    single_digits: bool,
    /// The texts of the added tokens: none may be cut in two.
    added_tokens: Vec<String>,
}

impl CutRules {
    /// Derives the rules of a tokenizer; `None` if it is not known well enough: other patterns, a
    /// normalizer that looks further than NFC does, added tokens that take white space with them.
    pub fn of(file: &TokenizerFile) -> Option<Self> {
        let single_digits = match kind(&file.pre_tokenizer)? {
            "ByteLevel" if is_byte_level(&file.pre_tokenizer, true) => false,
            "Sequence" => match file.pre_tokenizer.get("pretokenizers")?.as_array()?.as_slice() {
                [split, bytes] if is_byte_level(bytes, false) => match known_pattern(split)? {
                    ONE_DIGIT_PATTERN => true,
                    THREE_DIGITS_PATTERN => false,
                    _ => return None,
                },
                _ => return None,
            },
            _ => return None,
        };
        let is_simple = matches!(kind(&file.normalizer), None | Some("NFC"))
            && file.added_tokens.iter().all(|t| !t.lstrip && !t.rstrip && !t.single_word);
        let added_tokens = file.added_tokens.iter().map(|token| token.content.clone()).collect();
        is_simple.then_some(CutRules { single_digits, added_tokens })
    }

    /// Returns the end of the first piece of `text`.
    pub fn first_piece(&self, text: &str) -> usize {
        if text.len() <= PIECE_BYTES {
            return text.len();
        }
        let mut at = PIECE_BYTES;
        while !text.is_char_boundary(at) {
            at += 1;
        }
        let (head, tail) = text.split_at(at);
        let mut before = head.chars().next_back().unwrap_or(' ');
        let mut rest = tail.char_indices().map(|(offset, c)| (at + offset, c)).peekable();
        let mut forced = None;
        let mut num_refused = 0;
        while let Some((position, character)) = rest.next() {
            let next = rest.peek().map_or(' ', |(_, c)| *c);
            if self.is_boundary(before, character, next) {
                if num_refused > MAX_REFUSED_PLACES || !self.is_inside_token(text, position) {
                    return position;
                }
                num_refused += 1;
            }
            // No cut before a character that could combine with the one before it.
            let stands_alone = character.is_ascii() || is_cjk(character) || character > '\u{1f000}';
            if position >= MAX_PIECE_BYTES && (stands_alone || forced.is_some()) {
                if num_refused > MAX_REFUSED_PLACES || !self.is_inside_token(text, position) {
                    return position;
                }
                num_refused += 1;
                forced = Some(position);
            }
            before = character;
        }
        text.len()
    }

    fn is_boundary(&self, before: char, character: char, next: char) -> bool {
        if before.is_whitespace() {
            return false;
        }
        match character {
            ' ' => !next.is_whitespace(),
            '0'..='9' => self.single_digits,
            _ => {
                (before.is_ascii_alphanumeric() || is_cjk(before))
                    && (character.is_ascii_punctuation()
                        || matches!(character, '、' | '。' | '，' | '！' | '？' | '：' | '；'))
            }
        }
    }

    /// Whether an added token begins before `position` and ends after it.
    fn is_inside_token(&self, text: &str, position: usize) -> bool {
        self.added_tokens.iter().any(|token| {
            let begin = position.saturating_sub(token.len().saturating_sub(1));
            let end = (position + token.len().saturating_sub(1)).min(text.len());
            let around = text.as_bytes().get(begin..end).unwrap_or_default();
            around.windows(token.len()).any(|window| window == token.as_bytes())
        })
    }
}

/// Whether this is an ideograph, kana or Hangul syllable: a letter that nothing before it combines
/// with.
fn is_cjk(character: char) -> bool {
    matches!(character,
        '\u{4e00}'..='\u{9fff}' | '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}'
        | '\u{ac00}'..='\u{d7a3}')
}

fn kind(value: &Value) -> Option<&str> {
    value.get("type").and_then(Value::as_str)
}

fn is_byte_level(value: &Value, use_regex: bool) -> bool {
    kind(value) == Some("ByteLevel")
        && value.get("add_prefix_space") == Some(&Value::Bool(false))
        && value.get("use_regex").and_then(Value::as_bool).unwrap_or(true) == use_regex
}

/// Returns the pattern of a `Split` whose matches are the words.
fn known_pattern(value: &Value) -> Option<&str> {
    let pattern = value.get("pattern")?.get("Regex")?.as_str()?;
    let is_plain = kind(value) == Some("Split")
        && value.get("behavior").and_then(Value::as_str) == Some("Isolated")
        && value.get("invert") == Some(&Value::Bool(false));
    is_plain.then_some(pattern)
}
