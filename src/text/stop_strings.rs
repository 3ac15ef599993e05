//! Stop strings in a stream of text pieces.
//!
//! A stop string must never be seen by the caller, not even its first half, and it may be split
//! over any number of tokens. So [`StopMatcher`] holds back the longest suffix of the text that
//! could still become a stop string, and releases it as soon as it cannot.
//!
//! All stop strings are followed at the same time, each by the automaton of Knuth, Morris and Pratt
//! ("Fast pattern matching in strings", 1977): one state per string, which is the length of its
//! longest prefix that the text ends with. The longest of these states is what must be held back.
//! Matching is by bytes; since all strings are UTF-8, matches begin and end at characters.

use crate::error::{try_filled, try_with_capacity, Error, Result};

/// The most stop strings of one request. Hosted services allow four; sixty-four leaves room and
/// keeps the work per byte of text small.
pub const MAX_STOP_STRINGS: usize = 64;

/// The longest stop string, in bytes.
pub const MAX_STOP_STRING_BYTES: usize = 1024;

/// The result of matching a piece of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopOutput {
    /// The text that may be shown now. Empty while everything is held back.
    pub text: String,
    /// The index of the stop string that is now complete. The text before it is in `text`; the
    /// stop string itself and everything after it are dropped.
    pub matched: Option<usize>,
}

/// One stop string and the state of its automaton.
#[derive(Clone, Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// `fallback[i]`: the length of the longest proper prefix of the string that its first `i + 1`
    /// bytes end with.
    fallback: Vec<u16>,
    /// The number of bytes of the string that the text ends with. Less than its length until it is
    /// complete.
    state: usize,
}

/// Watches a stream of text for stop strings.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    /// The suffix of the text so far that could still become a stop string, so that it is shorter
    /// than the longest.
    held: String,
    stopped: bool,
}

impl Pattern {
    fn new(stop_string: &str) -> Result<Self> {
        let bytes = stop_string.as_bytes();
        let mut fallback = try_filled(bytes.len(), 0u16, "a stop string")?;
        let mut length = 0usize;
        for i in 1..bytes.len() {
            while length > 0 && bytes[i] != bytes[length] {
                length = usize::from(fallback[length - 1]);
            }
            if bytes[i] == bytes[length] {
                length += 1;
            }
            fallback[i] = length as u16;
        }
        let mut copy = try_with_capacity(bytes.len(), "a stop string")?;
        copy.extend_from_slice(bytes);
        Ok(Pattern { bytes: copy, fallback, state: 0 })
    }

    /// Takes one byte of text; returns whether it completes the string.
    fn step(&mut self, byte: u8) -> bool {
        while self.state > 0 && self.bytes[self.state] != byte {
            self.state = usize::from(self.fallback[self.state - 1]);
        }
        if self.bytes[self.state] == byte {
            self.state += 1;
        }
        self.state == self.bytes.len()
    }
}

impl StopMatcher {
    /// Makes a matcher for the given strings: at most [`MAX_STOP_STRINGS`], none empty, none longer
    /// than [`MAX_STOP_STRING_BYTES`]. Without any string nothing is held back.
    pub fn new<S: AsRef<str>>(stop_strings: &[S]) -> Result<Self> {
        if stop_strings.len() > MAX_STOP_STRINGS {
            return Err(Error::invalid_argument(format!(
                "{} stop strings were given, at most {MAX_STOP_STRINGS} are allowed",
                stop_strings.len()
            )));
        }
        let mut patterns = try_with_capacity(stop_strings.len(), "stop strings")?;
        for (index, stop_string) in stop_strings.iter().enumerate() {
            let stop_string = stop_string.as_ref();
            if stop_string.is_empty() {
                return Err(Error::invalid_argument(format!("stop string {index} is empty")));
            }
            if stop_string.len() > MAX_STOP_STRING_BYTES {
                return Err(Error::invalid_argument(format!(
                    "stop string {index} has {} bytes, at most {MAX_STOP_STRING_BYTES} are allowed",
                    stop_string.len()
                )));
            }
            patterns.push(Pattern::new(stop_string)?);
        }
        Ok(StopMatcher { patterns, held: String::new(), stopped: false })
    }

    /// Whether there are no stop strings, in which case `push` returns its input.
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// Takes the next piece of text. If the text completes several stop strings, the one that is
    /// complete first counts, and of those the longest, so that nothing of either is shown. After a
    /// match everything is dropped.
    ///
    /// The error is [`crate::error::ErrorKind::OutOfMemory`], after which the piece has not been
    /// taken.
    pub fn push(&mut self, piece: &str) -> Result<StopOutput> {
        if self.stopped {
            return Ok(StopOutput::default());
        }
        let already_read = self.held.len();
        let no_memory = |_| Error::out_of_memory("a piece of text", already_read + piece.len());
        let longest = self.patterns.iter().map(|p| p.bytes.len()).max().unwrap_or(0);
        self.held.try_reserve(longest.saturating_sub(already_read)).map_err(no_memory)?;
        let mut text = String::new();
        text.try_reserve(already_read + piece.len()).map_err(no_memory)?;
        // From here on nothing is allocated.
        text.push_str(&self.held);
        text.push_str(piece);
        self.held.clear();
        for (index, &byte) in text.as_bytes().iter().enumerate().skip(already_read) {
            let mut complete: Option<(usize, usize)> = None;
            for (number, pattern) in self.patterns.iter_mut().enumerate() {
                let length = pattern.bytes.len();
                if pattern.step(byte) && complete.is_none_or(|(_, longest)| length > longest) {
                    complete = Some((number, length));
                }
            }
            if let Some((number, length)) = complete {
                text.truncate((index + 1).saturating_sub(length));
                self.stopped = true;
                return Ok(StopOutput { text, matched: Some(number) });
            }
        }
        let hold = self.patterns.iter().map(|p| p.state).max().unwrap_or(0);
        let shown = text.len().saturating_sub(hold);
        self.held.push_str(text.get(shown..).unwrap_or_default());
        text.truncate(shown);
        Ok(StopOutput { text, matched: None })
    }

    /// Returns the text that was held back, once it is certain that nothing follows. Empty after a
    /// match.
    pub fn finish(&mut self) -> String {
        for pattern in &mut self.patterns {
            pattern.state = 0;
        }
        std::mem::take(&mut self.held)
    }
}
