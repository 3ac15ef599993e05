//! Untrusted regular expressions, run so that no match takes long.
//!
//! fancy-regex counts the steps that it takes back during one search and knows no other limit: a
//! single search can scan the rest of the text at each of a million positions. So a search here
//! sees the text up to [`WINDOW_BYTES`] after the place where it begins, and more only if its match
//! reaches the end of that; between two searches the [`Watch`] is asked. A match is found as in the
//! whole text unless the expression looks further ahead than half a window past a shorter match,
//! which no published one does.

use super::shortened;
use super::watch::Watch;
use crate::error::{Error, Result};
use tokenizers::pattern::Pattern;
use tokenizers::Offsets;

/// The bytes that a search sees at first.
const WINDOW_BYTES: usize = 4 << 10;
/// The most steps that one search may take back. The searches of published expressions take back a
/// few for each character of the window.
const BACKTRACK_LIMIT: usize = 250_000;

/// A compiled expression.
pub(super) struct BoundedRegex(fancy_regex::Regex);

impl BoundedRegex {
    pub fn new(pattern: &str) -> Result<Self> {
        fancy_regex::RegexBuilder::new(pattern)
            .backtrack_limit(BACKTRACK_LIMIT)
            .build()
            .map(BoundedRegex)
            .map_err(|e| Error::invalid_file(shortened(&e.to_string())))
    }

    /// Returns the matches in `text` that do not overlap, in order, as `find_iter` of fancy-regex
    /// does: an empty match right after another one does not count.
    fn matches(&self, text: &str, watch: &Watch<'_>) -> Result<Vec<Offsets>> {
        let mut matches: Vec<Offsets> = Vec::new();
        let mut at = 0;
        let mut window = WINDOW_BYTES;
        while at <= text.len() {
            watch.tick()?;
            let end = boundary(text, at.saturating_add(window));
            let seen = text.get(..end).unwrap_or(text);
            let found = self.0.find_from_pos(seen, at).map_err(|e| {
                Error::invalid_file(format!(
                    "a regular expression fails on the text: {}",
                    shortened(&e.to_string())
                ))
            })?;
            let found = found.map(|m| (m.start(), m.end()));
            if end < text.len() {
                let middle = boundary(text, at.saturating_add(window / 2));
                match found {
                    // A match that begins in the first half has half a window to show itself.
                    Some((start, _)) if start <= middle => {}
                    _ => {
                        (at, window) = (middle, WINDOW_BYTES);
                        continue;
                    }
                }
            }
            let Some((start, stop)) = found else { break };
            if stop == end && end < text.len() {
                // With more text it may be longer, or another.
                window = window.saturating_mul(2);
                continue;
            }
            window = WINDOW_BYTES;
            let before = matches.last().map(|&(_, stop)| stop);
            at = if start == stop { boundary(text, stop + 1) } else { stop };
            if start != stop || before != Some(stop) {
                matches
                    .try_reserve(1)
                    .map_err(|_| Error::out_of_memory("matches", size_of_val(&matches[..])))?;
                matches.push((start, stop));
            }
            if start == stop && stop == text.len() {
                break;
            }
        }
        Ok(matches)
    }

    /// Returns the expression as the crate takes it, for one text.
    pub fn watched<'a>(&'a self, watch: &'a Watch<'a>) -> WatchedRegex<'a> {
        WatchedRegex { regex: self, watch }
    }
}

/// An expression that is run under a watch.
#[derive(Clone, Copy)]
pub(super) struct WatchedRegex<'a> {
    regex: &'a BoundedRegex,
    watch: &'a Watch<'a>,
}

impl Pattern for WatchedRegex<'_> {
    fn find_matches(&self, inside: &str) -> tokenizers::Result<Vec<(Offsets, bool)>> {
        if inside.is_empty() {
            return Ok(vec![((0, 0), false)]);
        }
        let matches = self.regex.matches(inside, self.watch)?;
        let mut parts = Vec::new();
        parts
            .try_reserve_exact(matches.len().saturating_mul(2).saturating_add(1))
            .map_err(|_| Error::out_of_memory("matches", matches.len()))?;
        let mut previous = 0;
        for (start, end) in matches {
            if previous != start {
                parts.push(((previous, start), false));
            }
            parts.push(((start, end), true));
            previous = end;
        }
        if previous != inside.len() {
            parts.push(((previous, inside.len()), false));
        }
        Ok(parts)
    }
}

/// Returns the first character boundary of `text` at or after `at`.
fn boundary(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at += 1;
    }
    at
}
