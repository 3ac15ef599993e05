//! Limits of the texts of constraints, which keep the crate's parsers from calling themselves too often,
//! and its automata from growing without end.

use crate::error::{Error, Result};

/// The most brackets within each other in a regular expression or a grammar. The crate's parsers call
/// themselves for each.
const MAX_DEPTH: usize = 200;

/// The most repetitions in a regular expression, and in a grammar or a schema together. Those in a row
/// make states whose size and number grow with them: `a?a?...aa...` with 4000 takes a second for a token.
const MAX_REPETITIONS: usize = 2000;

/// The most alternatives in the regular expressions of a constraint. Each takes some 200 bytes.
const MAX_ALTERNATIVES: usize = 100_000;

/// Refuses texts with brackets within brackets beyond [`MAX_DEPTH`]. Those in strings count as well,
/// where they may also close what they did not open.
pub(super) fn check_depth(name: &str, text: &str) -> Result<()> {
    let mut depth = 0usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Err(Error::invalid_argument(format!(
                "{name}: more than {MAX_DEPTH} brackets are within each other"
            )));
        }
    }
    Ok(())
}

/// Returns the number of repetitions in a regular expression, those that are not meant as such included.
pub(super) fn num_repetitions(text: &str) -> usize {
    text.bytes().filter(|byte| b"?*+{".contains(byte)).count()
}

/// Refuses more than [`MAX_REPETITIONS`].
pub(super) fn check_repetitions(name: &str, count: usize) -> Result<()> {
    if count <= MAX_REPETITIONS {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "{name}: {count} repetitions (? * + {{), but at most {MAX_REPETITIONS} are allowed"
    )))
}

/// Returns the number of alternatives in a regular expression, as [`num_repetitions`].
pub(super) fn num_alternatives(text: &str) -> usize {
    text.bytes().filter(|byte| *byte == b'|').count()
}

/// Refuses more than [`MAX_ALTERNATIVES`].
pub(super) fn check_alternatives(name: &str, count: usize) -> Result<()> {
    match count <= MAX_ALTERNATIVES {
        true => Ok(()),
        false => Err(Error::invalid_argument(format!(
            "{name}: {count} alternatives (|), but at most {MAX_ALTERNATIVES} are allowed"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_is_counted() {
        let nested = |n: usize| format!("{}a{}", "(".repeat(n), ")".repeat(n));
        assert!(check_depth("it", &nested(MAX_DEPTH)).is_ok());
        assert!(check_depth("it", &nested(MAX_DEPTH + 1)).is_err());
        assert!(check_depth("it", &"()".repeat(1000)).is_ok());
    }
}
