//! Finds the end of a JSON value that comes byte by byte, without recursion.

/// The deepest value that is taken. Readers of JSON stop at less; this is what a program that checks
/// no depth survives.
const MAX_DEPTH: usize = 512;

/// The role of a byte for the value before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// It belongs to the value.
    Inside,
    /// It belongs to the value, as a control character in a string, which JSON requires escaped and
    /// models forget to.
    Control,
    /// It is the value's last.
    Last,
    /// The value, a number, has ended before it.
    After,
    /// No value of JSON goes on like this.
    Bad,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A value must begin.
    Value,
    /// A value or the end of an array that is empty so far.
    ValueOrEnd,
    /// A key or the end of an object that is empty so far.
    KeyOrEnd,
    Key,
    Colon,
    /// A comma or the end of what the value is in.
    Comma,
    String,
    Escape,
    Hex(u8),
    Literal(&'static [u8]),
    Number(Digits),
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Digits {
    Minus,
    Zero,
    Whole,
    Point,
    Fraction,
    Exponent,
    Sign,
    Power,
}

impl Digits {
    fn may_end(self) -> bool {
        matches!(self, Digits::Zero | Digits::Whole | Digits::Fraction | Digits::Power)
    }

    fn next(self, byte: u8) -> Option<Digits> {
        match (self, byte) {
            (Digits::Minus, b'0') => Some(Digits::Zero),
            (Digits::Minus, b'1'..=b'9') => Some(Digits::Whole),
            (Digits::Whole, b'0'..=b'9') => Some(Digits::Whole),
            (Digits::Zero | Digits::Whole, b'.') => Some(Digits::Point),
            (Digits::Point | Digits::Fraction, b'0'..=b'9') => Some(Digits::Fraction),
            (Digits::Zero | Digits::Whole | Digits::Fraction, b'e' | b'E') => {
                Some(Digits::Exponent)
            }
            (Digits::Exponent, b'+' | b'-') => Some(Digits::Sign),
            (Digits::Exponent | Digits::Sign | Digits::Power, b'0'..=b'9') => Some(Digits::Power),
            _ => None,
        }
    }
}

/// Reads one value; see the module's description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Scanner {
    state: State,
    /// For each list or object that is open, whether it is an object.
    open: Vec<bool>,
    /// Whether the string under way is a key.
    is_key: bool,
}

impl Scanner {
    pub fn new() -> Self {
        Scanner { state: State::Value, open: Vec::new(), is_key: false }
    }

    /// Whether the value is whole if nothing follows: a number that could go on.
    pub fn may_end(&self) -> bool {
        self.open.is_empty() && matches!(self.state, State::Number(digits) if digits.may_end())
    }

    /// Whether the next byte belongs to a string.
    pub fn is_in_string(&self) -> bool {
        matches!(self.state, State::String | State::Escape | State::Hex(_))
    }

    /// Takes the next byte, white space before the value included.
    pub fn step(&mut self, byte: u8) -> Step {
        match self.state {
            State::String => match byte {
                b'"' => self.end_string(),
                b'\\' => self.go(State::Escape),
                0..=0x1f => Step::Control,
                _ => Step::Inside,
            },
            State::Escape => match byte {
                b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => self.go(State::String),
                b'u' => self.go(State::Hex(4)),
                _ => Step::Bad,
            },
            State::Hex(left) if byte.is_ascii_hexdigit() => match left {
                1 => self.go(State::String),
                _ => self.go(State::Hex(left - 1)),
            },
            State::Hex(_) | State::Over => Step::Bad,
            State::Literal(rest) => match rest {
                [first, rest @ ..] if *first == byte => match rest {
                    [] => self.end_value(),
                    _ => self.go(State::Literal(rest)),
                },
                _ => Step::Bad,
            },
            State::Number(digits) => match digits.next(byte) {
                Some(next) => self.go(State::Number(next)),
                None if !digits.may_end() => Step::Bad,
                None if self.open.is_empty() => {
                    self.state = State::Over;
                    Step::After
                }
                None => {
                    self.state = State::Comma;
                    self.step(byte)
                }
            },
            _ if matches!(byte, b' ' | b'\n' | b'\r' | b'\t') => Step::Inside,
            State::Value => self.begin(byte),
            State::ValueOrEnd if byte == b']' => self.close(false),
            State::ValueOrEnd => self.begin(byte),
            State::KeyOrEnd if byte == b'}' => self.close(true),
            State::KeyOrEnd | State::Key if byte == b'"' => {
                self.is_key = true;
                self.go(State::String)
            }
            State::Colon if byte == b':' => self.go(State::Value),
            State::Comma if byte == b',' => match self.open.last() {
                Some(true) => self.go(State::Key),
                _ => self.go(State::Value),
            },
            State::Comma if byte == b']' => self.close(false),
            State::Comma if byte == b'}' => self.close(true),
            State::KeyOrEnd | State::Key | State::Colon | State::Comma => Step::Bad,
        }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::Inside
    }

    fn begin(&mut self, byte: u8) -> Step {
        match byte {
            b'{' | b'[' if self.open.len() >= MAX_DEPTH => Step::Bad,
            b'{' => {
                self.open.push(true);
                self.go(State::KeyOrEnd)
            }
            b'[' => {
                self.open.push(false);
                self.go(State::ValueOrEnd)
            }
            b'"' => {
                self.is_key = false;
                self.go(State::String)
            }
            b't' => self.go(State::Literal(b"rue")),
            b'f' => self.go(State::Literal(b"alse")),
            b'n' => self.go(State::Literal(b"ull")),
            b'-' => self.go(State::Number(Digits::Minus)),
            b'0' => self.go(State::Number(Digits::Zero)),
            b'1'..=b'9' => self.go(State::Number(Digits::Whole)),
            _ => Step::Bad,
        }
    }

    fn close(&mut self, is_object: bool) -> Step {
        match self.open.pop() {
            Some(opened) if opened == is_object => self.end_value(),
            _ => Step::Bad,
        }
    }

    fn end_string(&mut self) -> Step {
        if self.is_key {
            self.is_key = false;
            return self.go(State::Colon);
        }
        self.end_value()
    }

    fn end_value(&mut self) -> Step {
        if self.open.is_empty() {
            self.state = State::Over;
            return Step::Last;
        }
        self.go(State::Comma)
    }
}

/// Whether a text is one JSON value of at most the depth that is taken.
pub(super) fn is_json(text: &str) -> bool {
    let mut scanner = Scanner::new();
    let bytes = text.trim_matches(is_blank).as_bytes();
    for (at, byte) in bytes.iter().enumerate() {
        match scanner.step(*byte) {
            Step::Inside => {}
            Step::Last => return at + 1 == bytes.len(),
            Step::Control | Step::After | Step::Bad => return false,
        }
    }
    scanner.may_end()
}

/// Whether a character is white space of JSON.
pub(super) fn is_blank(character: char) -> bool {
    matches!(character, ' ' | '\n' | '\r' | '\t')
}

/// Appends a control character as JSON writes it.
pub(super) fn push_control(text: &mut String, byte: u8) {
    match byte {
        b'\n' => text.push_str("\\n"),
        b'\r' => text.push_str("\\r"),
        b'\t' => text.push_str("\\t"),
        _ => {
            use std::fmt::Write as _;
            let _ = write!(text, "\\u{byte:04x}");
        }
    }
}

/// Appends a text as the inside of a JSON string.
pub(super) fn push_escaped(to: &mut String, text: &str) {
    for character in text.chars() {
        match character {
            '"' => to.push_str("\\\""),
            '\\' => to.push_str("\\\\"),
            '\0'..='\u{1f}' => push_control(to, character as u8),
            _ => to.push(character),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{is_json, push_escaped};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_serde_json(text in r#"[\[\]{},:"a\\u0e1.+\- tfn]{0,12}|(true|false|null|-?[0-9.e+-]{1,6}|"[a\\n"u0-9]{0,7}")"#) {
            // serde_json refuses escapes of surrogates that have no partner, and numbers beyond f64.
            let parsed = serde_json::from_str::<serde_json::Value>(&text);
            let excused = parsed.as_ref().is_err_and(|error| {
                let told = error.to_string();
                told.contains("surrogate") || told.contains("hex escape") || told.contains("out of range")
            });
            prop_assert!(excused || is_json(&text) == parsed.is_ok(), "{text}: {parsed:?}");
        }

        #[test]
        fn escaped_texts_are_read_back(text in any::<String>()) {
            let mut json = String::from("\"");
            push_escaped(&mut json, &text);
            json.push('"');
            prop_assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        }
    }

    #[test]
    fn depth_ends() {
        for depth in [1, 511, 512, 513, 100_000] {
            let text = "[".repeat(depth) + &"]".repeat(depth);
            assert_eq!(is_json(&text), depth <= 512, "{depth}");
        }
    }
}
