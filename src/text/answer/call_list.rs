//! Calls as Python writes them, with named arguments: `[get_weather(city="Paris", days=3)]`.

use serde_json::{Map, Number, Value};

/// Lists and dictionaries that may be in one another.
const MAX_DEPTH: usize = 100;
/// The largest integer that every reader of JSON holds exactly.
const MAX_INTEGER: u64 = (1 << 53) - 1;

/// Returns the calls of a list as `[{"name", "arguments"}]`, or `None` if the text is no such list.
/// The grammar is that of Transformers' `python-call-list`: every argument has a name, names do not
/// repeat, and values are strings, numbers, lists, dictionaries, `True`, `False` and `None`.
pub(super) fn call_list(text: &str) -> Option<Value> {
    let mut reader = Reader { rest: text };
    reader.expect('[')?;
    let mut calls = Vec::new();
    reader.items(']', |reader| {
        let name = reader.name()?;
        reader.expect('(')?;
        let mut arguments = Map::new();
        reader.items(')', |reader| {
            let key = reader.name()?.to_owned();
            reader.expect('=')?;
            let value = reader.value(0)?;
            arguments.insert(key, value).is_none().then_some(())
        })?;
        let mut call = Map::new();
        call.insert("name".to_owned(), name.into());
        call.insert("arguments".to_owned(), Value::Object(arguments));
        calls.push(Value::Object(call));
        Some(())
    })?;
    reader.skip_blanks();
    reader.rest.is_empty().then_some(Value::Array(calls))
}

struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn skip_blanks(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', '\t', '\n', '\r']);
    }

    fn is_at(&mut self, character: char) -> bool {
        self.skip_blanks();
        self.rest.starts_with(character)
    }

    fn expect(&mut self, character: char) -> Option<()> {
        self.skip_blanks();
        self.rest = self.rest.strip_prefix(character)?;
        Some(())
    }

    /// Reads what is between commas up to `close`.
    fn items(&mut self, close: char, mut item: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        if self.is_at(close) {
            return self.expect(close);
        }
        loop {
            item(self)?;
            if self.is_at(close) {
                return self.expect(close);
            }
            self.expect(',')?;
        }
    }

    fn take(&mut self, len: usize) -> Option<&'a str> {
        let (taken, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(taken)
    }

    /// Words of ASCII letters, digits and underscores, with hyphens and dots between.
    fn name(&mut self) -> Option<&'a str> {
        self.skip_blanks();
        let bytes = self.rest.as_bytes();
        let is_word =
            |at: usize| bytes.get(at).is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
        if !is_word(0) || bytes.first().is_some_and(u8::is_ascii_digit) {
            return None;
        }
        let mut len = 1;
        loop {
            match bytes.get(len) {
                _ if is_word(len) => len += 1,
                Some(b'-' | b'.') if is_word(len + 1) => len += 2,
                _ => return self.take(len),
            }
        }
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if self.is_at('\'') || self.is_at('"') {
            return self.string().map(Value::String);
        }
        if self.is_at('[') || self.is_at('{') {
            if depth >= MAX_DEPTH {
                return None;
            }
            if self.take(1)? == "[" {
                let mut values = Vec::new();
                self.items(']', |reader| {
                    values.push(reader.value(depth + 1)?);
                    Some(())
                })?;
                return Some(Value::Array(values));
            }
            let mut members = Map::new();
            self.items('}', |reader| {
                if !(reader.is_at('\'') || reader.is_at('"')) {
                    return None;
                }
                let key = reader.string()?;
                reader.expect(':')?;
                let value = reader.value(depth + 1)?;
                members.insert(key, value).is_none().then_some(())
            })?;
            return Some(Value::Object(members));
        }
        if let Some(len) = number_len(self.rest) {
            return number(self.take(len)?);
        }
        match self.name()? {
            "True" | "true" => Some(true.into()),
            "False" | "false" => Some(false.into()),
            "None" | "null" => Some(Value::Null),
            _ => None,
        }
    }

    /// Returns a string between single or double quotes, without line breaks.
    fn string(&mut self) -> Option<String> {
        let quote = self.rest.chars().next()?;
        let mut characters = self.rest.get(1..)?.char_indices();
        let mut found = String::new();
        while let Some((at, character)) = characters.next() {
            match character {
                '\n' | '\r' => return None,
                _ if character == quote => {
                    self.take(1 + at + 1)?;
                    return Some(found);
                }
                '\\' => {
                    let (place, escaped) = characters.next()?;
                    found.push(match escaped {
                        '\\' | '\'' | '"' | '/' => escaped,
                        'b' => '\x08',
                        'f' => '\x0c',
                        'n' => '\n',
                        'r' => '\r',
                        't' => '\t',
                        'u' => {
                            let digits = self.rest.get(1 + place + 1..)?;
                            let (unescaped, len) = unescaped(digits)?;
                            for _ in 0..len {
                                characters.next();
                            }
                            unescaped
                        }
                        _ => return None,
                    });
                }
                _ => found.push(character),
            }
        }
        None
    }
}

/// Returns the character that four digits stand for, or two surrogates; and how many characters
/// they take.
fn unescaped(digits: &str) -> Option<(char, usize)> {
    let unit = |from: &str| {
        let digits = from.get(..4)?;
        let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_hex.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
    };
    let first = unit(digits)?;
    if !(0xd800..0xdc00).contains(&first) {
        return Some((char::from_u32(first)?, 4));
    }
    let second = unit(digits.get(4..)?.strip_prefix("\\u")?)?;
    if !(0xdc00..0xe000).contains(&second) {
        return None;
    }
    let code = 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
    Some((char::from_u32(code)?, 10))
}

/// Returns the length of the number that a text begins with, written as in JSON.
fn number_len(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let digits = |from: usize| {
        let rest = bytes.get(from..).unwrap_or_default();
        rest.iter().take_while(|byte| byte.is_ascii_digit()).count()
    };
    let begin = usize::from(bytes.first() == Some(&b'-'));
    let mut len = begin
        + match bytes.get(begin)? {
            b'0' => 1,
            b'1'..=b'9' => digits(begin),
            _ => return None,
        };
    if bytes.get(len) == Some(&b'.') && digits(len + 1) > 0 {
        len += 1 + digits(len + 1);
    }
    if matches!(bytes.get(len), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(len + 1), Some(b'+' | b'-')));
        let exponent = digits(len + 1 + sign);
        if exponent > 0 {
            len += 1 + sign + exponent;
        }
    }
    Some(len)
}

fn number(text: &str) -> Option<Value> {
    if text.contains(['.', 'e', 'E']) {
        return Number::from_f64(text.parse().ok()?).map(Value::Number);
    }
    let integer: i64 = text.parse().ok()?;
    (integer.unsigned_abs() <= MAX_INTEGER).then(|| integer.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lists_of_calls_are_read() {
        let calls = call_list(
            " [f(), get.it-now ( a = 'x\\'y\\u00e9\\ud83d\\ude00', b=[1, -2.5e3, {\"k\": None}], c=True ) ] ",
        );
        let expected = json!([
            { "name": "f", "arguments": {} },
            { "name": "get.it-now", "arguments": {
                "a": "x'y\u{e9}\u{1f600}", "b": [1, -2500.0, { "k": null }], "c": true } },
        ]);
        assert_eq!(calls, Some(expected));
        assert_eq!(call_list("[]"), Some(json!([])));
    }

    #[test]
    fn other_texts_are_none() {
        let deep = format!("[f(a={})]", "[".repeat(101) + &"]".repeat(101));
        for text in [
            "",
            "f()",
            "[f(1)]",
            "[f(a=1,)]",
            "[f(a=1, a=2)]",
            "[f(a=x)]",
            "[f(a='x)]",
            "[f(a='\n')]",
            "[f(a='\\ud83d')]",
            "[f(a='\\x41')]",
            "[f(a=9007199254740992)]",
            "[f(a=1e999)]",
            "[f()] x",
            "[1f()]",
            "[f(a={1: 2})]",
            &deep,
        ] {
            assert_eq!(call_list(text), None, "{text}");
        }
    }
}
