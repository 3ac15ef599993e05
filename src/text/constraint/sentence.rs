//! Sentences of the messages of `llguidance`.

use crate::text::shortened;

/// Words of messages about the limits of the crate, and what they mean to a caller.
const LIMITS: [(&str, &str); 8] = [
    ("fuel exhausted", "it is too complex"),
    ("_lexer_fuel", "it is too complex"),
    ("too many expressions constructed", "it is too complex"),
    ("too many states: ", "it is too complex"),
    ("initial lexer configuration", "it is too large"),
    ("grammar size (number of symbols) too big", "it is too large"),
    (
        "Regex is empty: ",
        "Unsatisfiable schema: no string has the pattern, the format and the length",
    ),
    ("Unable to determine if regex is empty", "its patterns are too complex together"),
];
const REGEX_ERROR: &str = "regex parse error:";
const LOOKAROUND: &str = "lookarounds not supported yet";

/// A message of the crate, taken apart.
#[derive(Debug, PartialEq)]
pub(super) struct Told {
    /// The line and the column of the grammar.
    place: Option<(usize, usize)>,
    /// The regular expression that it is about, as the crate has it.
    pub regex: Option<String>,
    /// What is wrong.
    pub what: String,
}

impl Told {
    /// Takes a message apart. It may be followed by a backtrace, by the state of the parser, or by the lines of the
    /// grammar around the place.
    pub fn of(message: &str) -> Self {
        let end =
            ["\n<", "<state>", "<non-verbose/>"].iter().filter_map(|mark| message.find(mark)).min();
        let message = message.get(..end.unwrap_or(message.len())).unwrap_or(message).trim();
        let (place, message) = placed(message);
        let told = |regex: Option<&str>, what: &str| {
            let what = shortened(what.trim().trim_end_matches('.'));
            Told { place, regex: regex.map(str::to_owned), what }
        };
        if message.contains("NoExtensionBias") {
            return told(None, "no text of this vocabulary fits");
        }
        if let Some((_, shown)) = message.split_once(REGEX_ERROR) {
            let regex = shown.trim_start_matches('\n').lines().next().map(str::trim);
            let what = shown.rsplit_once("\nerror: ").map(|(_, what)| what);
            return told(regex, what.and_then(|it| it.lines().next()).unwrap_or(REGEX_ERROR));
        }
        if let Some((_, what)) = message.split_once(LOOKAROUND) {
            let regex = what.split_once('/').and_then(|(_, rest)| rest.rsplit_once('/'));
            let what = "anchors within it and word boundaries are not supported";
            return told(regex.map(|(regex, _)| regex), what);
        }
        if let Some((_, what)) = LIMITS.iter().find(|(words, _)| message.contains(words)) {
            return Told { place: None, ..told(None, what) };
        }
        told(None, message.lines().next().unwrap_or_default())
    }

    /// Returns the sentence for the author of a grammar.
    pub fn in_grammar(&self) -> String {
        let place = self.place.map(|(line, column)| format!("line {line}, column {column}: "));
        let regex = self.regex.as_ref().map(|regex| format!("/{}/: ", shortened(regex)));
        format!("{}{}{}", place.unwrap_or_default(), regex.unwrap_or_default(), self.what)
    }
}

/// Returns the sentence of a message.
pub(super) fn sentence(message: &str) -> String {
    Told::of(message).in_grammar()
}

/// Splits the place off that a message begins with: "at 1(8): " or "1(8): ".
fn placed(message: &str) -> (Option<(usize, usize)>, &str) {
    let place = |message: &str| {
        let (line, rest) = message.split_once('(')?;
        let (column, _) = rest.split_once("): ")?;
        Some((line.parse().ok()?, column.parse().ok()?))
    };
    match place(message.strip_prefix("at ").unwrap_or(message)) {
        Some(place) => (Some(place), message.split_once("): ").map_or(message, |(_, it)| it)),
        None => (None, message),
    }
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

    #[test]
    fn sentences_say_where_and_what_without_the_grammar() {
        let message =
            "at 1(8): invalid regex \"(a\" (in regex): regex parse error:\n    (a\n    ^\n\
                       error: unclosed group\n   1 | start: /(a/\n              ^";
        assert_eq!(sentence(message), "line 1, column 8: /(a/: unclosed group");
        assert_eq!(Told::of(message).what, "unclosed group");
        let message = "at 2(3): invalid regex (in regex): lookarounds not supported yet; WordUnicode in regex /a\\b/\n";
        assert_eq!(Told::of(message).regex.as_deref(), Some("a\\b"));
        let message = "1(10): lexer error\n   1 | start: \"a\n                ^";
        assert_eq!(sentence(message), "line 1, column 10: lexer error");
        let message = "fuel exhausted when checking relevance of lexemes (1000000)";
        assert_eq!(sentence(message), "it is too complex");
    }
}
