//! Sentences of the messages of `llguidance`.

use crate::text::shortened;

/// Returns the part of a message of the crate that is a sentence: it may be followed by a
/// backtrace, or by the state of the parser.
pub(super) fn sentence(message: &str) -> String {
    let end =
        ["\n<", "<state>", "<non-verbose/>"].iter().filter_map(|mark| message.find(mark)).min();
    let message = message.get(..end.unwrap_or(message.len())).unwrap_or(message);
    if message.contains("NoExtensionBias") {
        return "no text of this vocabulary fits".to_owned();
    }
    shortened(message.trim().trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_without_backtraces_and_states() {
        assert_eq!(sentence("panic: no\n<backtrace>\n 0: x"), "panic: no");
        assert_eq!(sentence("too large\n<non-verbose/>"), "too large");
        assert_eq!(sentence(" fine. "), "fine");
    }
}
