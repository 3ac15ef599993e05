//! A conversation that grows: the JSON of its messages, without a caller's having to escape anything.

use serde_json::{Map, Value};

use super::json_input::{parse_messages, MAX_JSON_BYTES};
use crate::error::{check_room, Error, Result};

/// A list of messages as a JSON array that is always whole.
#[derive(Clone, Debug)]
pub struct Messages {
    /// "[", the messages with commas between them, "]", and a NUL for readers in C.
    json: Vec<u8>,
    /// The end of each message in `json`.
    ends: Vec<usize>,
}

/// The text that follows the last message.
const CLOSING: &[u8] = b"]\0";

impl Messages {
    /// Returns an empty conversation.
    pub fn new() -> Result<Self> {
        let mut messages = Messages { json: Vec::new(), ends: Vec::new() };
        messages.reserve(1 + CLOSING.len(), 0)?;
        messages.json.push(b'[');
        messages.json.extend_from_slice(CLOSING);
        Ok(messages)
    }

    /// Returns the number of messages.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no message.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the JSON array, with a NUL after it.
    pub fn json_with_nul(&self) -> &[u8] {
        &self.json
    }

    /// Adds a message of a role. Both are any text.
    pub fn add(&mut self, role: &str, content: &str) -> Result<()> {
        self.add_fields(&[("role", Some(role)), ("content", Some(content))])
    }

    /// Adds the result of a tool call: a message of the role "tool", with the id of the call and
    /// the name of the tool where they are given.
    pub fn add_tool_result(
        &mut self,
        call_id: Option<&str>,
        name: Option<&str>,
        content: &str,
    ) -> Result<()> {
        let fields = [
            ("role", Some("tool")),
            ("tool_call_id", call_id),
            ("name", name),
            ("content", Some(content)),
        ];
        self.add_fields(&fields)
    }

    /// Adds what `json` holds: a message, or an array of them.
    pub fn add_json(&mut self, json: &[u8]) -> Result<()> {
        let array = json.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[');
        let parsed = if array {
            parse_messages(json)?
        } else {
            let mut wrapped = Vec::new();
            let no_room = |_| Error::out_of_memory("a message", json.len());
            wrapped.try_reserve_exact(json.len() + 2).map_err(no_room)?;
            wrapped.push(b'[');
            wrapped.extend_from_slice(json);
            wrapped.push(b']');
            parse_messages(&wrapped)?
        };
        let count = parsed.as_array().map_or(0, Vec::len);
        if !array && count != 1 {
            return Err(Error::invalid_argument(
                "messages JSON: expected a message or an array of messages",
            ));
        }
        let before = self.ends.len();
        for message in parsed.as_array().into_iter().flatten() {
            if let Err(error) = self.add_value(message) {
                // All or none.
                while self.ends.len() > before {
                    self.remove(self.ends.len() - 1)?;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Removes the message `index`, so that those after it move up.
    pub fn remove(&mut self, index: usize) -> Result<()> {
        let Some(&end) = self.ends.get(index) else {
            return Err(Error::invalid_argument(format!(
                "index is {index}, but there are {} messages",
                self.ends.len()
            )));
        };
        let begin = index.checked_sub(1).and_then(|before| self.ends.get(before)).map_or(1, |e| *e);
        // The comma goes with the message, be it before or after it.
        let end = if index == 0 && self.ends.len() > 1 { end + 1 } else { end };
        self.json.drain(begin..end);
        self.ends.remove(index);
        for later in self.ends.iter_mut().skip(index) {
            *later -= end - begin;
        }
        Ok(())
    }

    /// Adds a message of those fields that there are.
    fn add_fields(&mut self, fields: &[(&str, Option<&str>)]) -> Result<()> {
        let texts = fields.iter().filter_map(|(_, text)| *text);
        let bytes = texts.fold(0_usize, |sum, text| sum.saturating_add(text.len()));
        self.check_size(bytes)?;
        // The copy, and its JSON, which is at most six times as long.
        check_room(bytes.saturating_mul(8), "a message")?;
        let given = fields.iter().filter_map(|&(key, text)| Some((key, text?)));
        let map: Map<String, Value> =
            given.map(|(key, text)| (key.to_owned(), Value::from(text))).collect();
        self.add_value(&Value::Object(map))
    }

    fn add_value(&mut self, message: &Value) -> Result<()> {
        let text = message.to_string();
        self.check_size(text.len())?;
        self.reserve(text.len() + 1, 1)?;
        self.json.truncate(self.json.len() - CLOSING.len());
        if !self.ends.is_empty() {
            self.json.push(b',');
        }
        self.json.extend_from_slice(text.as_bytes());
        self.ends.push(self.json.len());
        self.json.extend_from_slice(CLOSING);
        Ok(())
    }

    fn check_size(&self, more: usize) -> Result<()> {
        if self.json.len().saturating_add(more) <= MAX_JSON_BYTES {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "the messages have more than {MAX_JSON_BYTES} bytes, the most that a chat template takes"
        )))
    }

    fn reserve(&mut self, bytes: usize, messages: usize) -> Result<()> {
        let no_room = |_| Error::out_of_memory("the messages", bytes);
        self.json.try_reserve(bytes).map_err(no_room)?;
        self.ends.try_reserve(messages).map_err(no_room)
    }
}
