//! Reads a call that is written as a JSON object with a name and arguments, byte by byte.

use super::json::{is_json, push_control, Scanner, Step};

/// News about the call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// Its name; first, and once.
    Begin(String),
    /// More of its arguments.
    Arguments(String),
}

/// The progress of the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It goes on.
    More,
    /// It has ended, and is a call.
    Over,
    /// It is no call: what comes next fits no JSON object that is a call.
    Bad,
    /// It is no call: it has a key that no call has, but may be JSON.
    Foreign,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Open,
    KeyOrEnd,
    Key,
    InKey,
    Colon,
    BeforeValue,
    InValue,
    AfterValue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Name,
    Arguments,
    Other,
}

/// The destination of a value's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Nowhere,
    /// It is looked at when it is whole.
    Literal,
    /// It is reported as it comes.
    Told,
}

/// See the module's description.
#[derive(Clone, Debug)]
pub(super) struct CallObject {
    /// Whether no tag says that this is a call: then it must look like one in every respect, and is
    /// told when it is whole.
    is_bare: bool,
    place: Place,
    scanner: Scanner,
    key: Key,
    target: Target,
    /// The string under way, as JSON.
    literal: String,
    name: Option<String>,
    has_arguments: bool,
    /// Arguments that were not reported yet.
    arguments: String,
    has_begun: bool,
    /// The text so far, in case that it is no call; empty once the call has begun.
    text: String,
}

impl CallObject {
    pub fn new(is_bare: bool) -> Self {
        CallObject {
            is_bare,
            place: Place::Open,
            scanner: Scanner::new(),
            key: Key::Other,
            target: Target::Nowhere,
            literal: String::new(),
            name: None,
            has_arguments: false,
            arguments: String::new(),
            has_begun: false,
            text: String::new(),
        }
    }

    /// Whether the call was told.
    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Returns the text that was taken, if nothing was told.
    pub fn into_text(self) -> String {
        self.text
    }

    /// Takes text; returns how many bytes of it belong to the object, which are all unless it has
    /// ended.
    pub fn push(&mut self, text: &str, news: &mut Vec<News>) -> (usize, Outcome) {
        let (taken, outcome) = self.take(text);
        if !self.has_begun {
            self.text.push_str(text.get(..taken).unwrap_or_default());
        }
        self.tell(news, outcome);
        (taken, outcome)
    }

    fn tell(&mut self, news: &mut Vec<News>, outcome: Outcome) {
        let is_over = outcome == Outcome::Over;
        if !self.has_begun {
            let is_due = is_over || (self.has_arguments && !self.is_bare);
            let Some(name) = self.name.as_ref().filter(|_| is_due) else { return };
            news.push(News::Begin(name.clone()));
            self.has_begun = true;
            self.text = String::new();
        }
        if !self.arguments.is_empty() {
            news.push(News::Arguments(std::mem::take(&mut self.arguments)));
        }
    }

    fn take(&mut self, text: &str) -> (usize, Outcome) {
        let bytes = text.as_bytes();
        let mut at = 0;
        while let Some(&byte) = bytes.get(at) {
            let is_blank = matches!(byte, b' ' | b'\n' | b'\r' | b'\t');
            match self.place {
                Place::InKey | Place::InValue => {
                    let (taken, outcome) = self.scan(text.get(at..).unwrap_or_default());
                    at += taken;
                    if outcome != Outcome::More {
                        return (at, outcome);
                    }
                    continue;
                }
                _ if is_blank => {}
                Place::Open if byte == b'{' => self.place = Place::KeyOrEnd,
                Place::KeyOrEnd | Place::AfterValue if byte == b'}' => {
                    let outcome = self.end();
                    // A brace that ends no call is part of the text that is given back.
                    return (at + 1, outcome);
                }
                Place::KeyOrEnd | Place::Key if byte == b'"' => {
                    self.begin_value(Target::Literal);
                    self.place = Place::InKey;
                    continue;
                }
                Place::Colon if byte == b':' => self.place = Place::BeforeValue,
                Place::BeforeValue => {
                    let target = match (self.key, byte) {
                        (Key::Name, b'"') => Target::Literal,
                        (Key::Name, _) => return (at, Outcome::Bad),
                        (Key::Arguments, b'"' | b'n') => Target::Literal,
                        (Key::Arguments, b'{') => Target::Told,
                        (Key::Arguments, _) if self.is_bare => return (at, Outcome::Foreign),
                        (Key::Arguments, _) => Target::Told,
                        (Key::Other, _) => Target::Nowhere,
                    };
                    self.has_arguments |= target == Target::Told;
                    self.begin_value(target);
                    self.place = Place::InValue;
                    continue;
                }
                Place::AfterValue if byte == b',' => self.place = Place::Key,
                _ => return (at, Outcome::Bad),
            }
            at += 1;
        }
        (at, Outcome::More)
    }

    fn begin_value(&mut self, target: Target) {
        self.scanner = Scanner::new();
        self.target = target;
        self.literal.clear();
    }

    /// Takes text of a key or a value, up to its end.
    fn scan(&mut self, text: &str) -> (usize, Outcome) {
        let bytes = text.as_bytes();
        let mut copied = 0;
        for (at, byte) in bytes.iter().enumerate() {
            let step = self.scanner.step(*byte);
            let end = match step {
                Step::Inside => continue,
                Step::Last => at + 1,
                Step::Control | Step::After | Step::Bad => at,
            };
            self.copy(text.get(copied..end).unwrap_or_default());
            match step {
                Step::Control => {
                    match self.target {
                        Target::Nowhere => {}
                        Target::Literal => push_control(&mut self.literal, *byte),
                        Target::Told => push_control(&mut self.arguments, *byte),
                    }
                    copied = at + 1;
                }
                Step::Bad => return (at, Outcome::Bad),
                _ => return (end, self.end_value()),
            }
        }
        self.copy(text.get(copied..).unwrap_or_default());
        (bytes.len(), Outcome::More)
    }

    fn copy(&mut self, text: &str) {
        match self.target {
            Target::Nowhere => {}
            Target::Literal => self.literal.push_str(text),
            Target::Told => self.arguments.push_str(text),
        }
    }

    fn end_value(&mut self) -> Outcome {
        let is_key = self.place == Place::InKey;
        self.place = if is_key { Place::Colon } else { Place::AfterValue };
        if self.target != Target::Literal {
            return Outcome::More;
        }
        let literal = std::mem::take(&mut self.literal);
        let text = serde_json::from_str::<String>(&literal).ok();
        if is_key {
            let Some(key) = text else { return Outcome::Bad };
            self.key = match key.as_str() {
                "name" if self.name.is_none() => Key::Name,
                "arguments" | "parameters" if !self.has_arguments => Key::Arguments,
                "type" | "id" => Key::Other,
                _ if self.is_bare => return Outcome::Foreign,
                _ => Key::Other,
            };
            return Outcome::More;
        }
        match (self.key, text) {
            (Key::Name, Some(name))
                if !name.trim().is_empty() && !name.contains(char::is_control) =>
            {
                self.name = Some(name);
            }
            (Key::Name, _) => return Outcome::Bad,
            // Some models write the object into a string.
            (_, Some(inside)) if inside.trim_start().starts_with('{') && is_json(&inside) => {
                self.arguments = inside.trim().to_owned();
                self.has_arguments = true;
            }
            (_, None) if literal == "null" => {
                self.arguments = "{}".to_owned();
                self.has_arguments = true;
            }
            (_, _) if self.is_bare => return Outcome::Foreign,
            (_, Some(_)) => {
                self.arguments = literal;
                self.has_arguments = true;
            }
            (_, None) => return Outcome::Bad,
        }
        Outcome::More
    }

    fn end(&mut self) -> Outcome {
        if self.name.is_none() || (self.is_bare && !self.has_arguments) {
            return Outcome::Bad;
        }
        if !self.has_arguments {
            self.arguments.push_str("{}");
        }
        Outcome::Over
    }
}
