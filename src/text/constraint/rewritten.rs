//! Schemas as the crate gets them: rewritten where it would allow more than they say, or does not see that it
//! implements them.

use serde_json::{json, Map, Value};

use super::classes::precise;
use super::disjoint::{has_inner_ids, Disjoint};
use super::schema::{escaped, BY_NAME, DATA, SWITCHES};
use crate::error::{Error, Result};

/// A date that there is, with the leap years of the Gregorian calendar.
macro_rules! date {
    () => {
        concat!(
            "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
            "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))",
            "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
        )
    };
}

/// A time, with a leap second where one can be without knowledge of time zones: at 23:59:60 UTC.
macro_rules! time {
    () => {
        concat!(
            "(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?",
            "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])",
            "|23:59:60(?:\\.[0-9]+)?(?:[zZ]|[+-]00:00))"
        )
    };
}

/// The formats that the crate takes too widely, as patterns.
const FORMATS: [(&str, &str); 3] = [
    ("date", concat!("^", date!(), "$")),
    ("time", concat!("^", time!(), "$")),
    ("date-time", concat!("^", date!(), "[tT]", time!(), "$")),
];

/// Escapes in strings that leave one spelling only of each character: none by its code.
const ONE_SPELLING: &str = "nrbtf\\\"";

/// Returns a schema as the crate is to get it.
pub(super) fn rewritten(schema: &Value) -> Result<Value> {
    let mut rewriter = Rewriter {
        is_spelt_once: has_open_names(schema),
        may_compare: !has_inner_ids(schema),
        alternatives: Disjoint::new(schema),
        path: String::from("#"),
    };
    let mut schema = rewriter.schema(schema)?;
    if let (true, Some(root)) = (rewriter.is_spelt_once, schema.as_object_mut()) {
        root.insert(SWITCHES.to_owned(), json!({ "json_allowed_escapes": ONE_SPELLING }));
    }
    Ok(schema)
}

/// Whether an object may have keys that are not named beside ones that something is said of. Then a second
/// spelling of a key would be taken for another key. Looks at everything that could be such a schema.
fn has_open_names(schema: &Value) -> bool {
    const NAMES: [&str; 5] =
        ["properties", "required", "patternProperties", "minProperties", "maxProperties"];
    let mut pending = vec![schema];
    while let Some(value) = pending.pop() {
        match value {
            Value::Array(items) => pending.extend(items),
            Value::Object(members) => {
                let is_closed = members.get("additionalProperties") == Some(&Value::Bool(false))
                    && !members.contains_key("patternProperties");
                if !is_closed && NAMES.iter().any(|name| members.contains_key(*name)) {
                    return true;
                }
                pending.extend(members.values());
            }
            _ => {}
        }
    }
    false
}

struct Rewriter<'a> {
    /// Whether a character in a string has one spelling only.
    is_spelt_once: bool,
    /// Whether references lead where they seem to.
    may_compare: bool,
    alternatives: Disjoint<'a>,
    path: String,
}

impl<'a> Rewriter<'a> {
    fn schema(&mut self, schema: &'a Value) -> Result<Value> {
        match schema {
            Value::Array(items) => {
                let items = items.iter().enumerate();
                let items = items
                    .map(|(place, item)| self.at(&place.to_string(), |it| it.schema(item)))
                    .collect::<Result<_>>()?;
                Ok(Value::Array(items))
            }
            Value::Object(members) => self.members(members).map(Value::Object),
            other => Ok(other.clone()),
        }
    }

    fn members(&mut self, members: &'a Map<String, Value>) -> Result<Map<String, Value>> {
        self.check_num_keys(members)?;
        let format = members.get("format").and_then(Value::as_str);
        let pattern = FORMATS.iter().find(|(name, _)| Some(*name) == format).map(|it| it.1);
        let mut found = Map::new();
        for (key, value) in members {
            let name = match (key.as_str(), value) {
                ("format", _) if pattern.is_some() => continue,
                ("oneOf", Value::Array(all)) if !members.contains_key("anyOf") => {
                    let is_any = self.may_compare && self.alternatives.are_all(all);
                    if is_any {
                        "anyOf"
                    } else {
                        "oneOf"
                    }
                }
                (name, _) => name,
            };
            let value = self.at(key, |it| match value {
                Value::Object(named) if BY_NAME.contains(&key.as_str()) => it.named(named),
                _ if key == "const" || key == "enum" => {
                    it.check_characters(value)?;
                    Ok(value.clone())
                }
                Value::String(pattern) if key == "pattern" => Ok(precise(pattern).into()),
                _ if DATA.contains(&key.as_str()) => Ok(value.clone()),
                _ => it.schema(value),
            })?;
            found.insert(name.to_owned(), value);
        }
        let Some(pattern) = pattern else { return Ok(found) };
        if !found.contains_key("pattern") {
            found.insert("pattern".to_owned(), pattern.into());
        } else if let Value::Array(parts) = found.entry("allOf").or_insert_with(|| json!([])) {
            parts.push(json!({ "pattern": pattern }));
        }
        Ok(found)
    }

    fn named(&mut self, named: &'a Map<String, Value>) -> Result<Value> {
        let mut found = Map::new();
        for (name, schema) in named {
            found.insert(name.clone(), self.at(name, |it| it.schema(schema))?);
        }
        Ok(Value::Object(found))
    }

    /// Calls `body` at the path of a member.
    fn at<T>(&mut self, key: &str, body: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let len = self.path.len();
        self.path.push('/');
        self.path.push_str(&escaped(key));
        let outcome = body(self);
        self.path.truncate(len);
        outcome
    }

    /// Refuses a least number of keys that could be reached by one key that comes twice.
    fn check_num_keys(&self, members: &Map<String, Value>) -> Result<()> {
        let least = members.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
        let required = members.get("required").and_then(Value::as_array).into_iter().flatten();
        let mut required: Vec<&str> = required.filter_map(Value::as_str).collect();
        required.sort_unstable();
        required.dedup();
        let num_free = least.saturating_sub(u64::try_from(required.len()).unwrap_or(u64::MAX));
        let is_closed = members.get("additionalProperties") == Some(&Value::Bool(false))
            && !members.contains_key("patternProperties");
        let may_be_object = match members.get("type") {
            Some(Value::String(name)) => name == "object",
            Some(Value::Array(names)) => names.iter().any(|name| name == "object"),
            _ => true,
        };
        if num_free < 2 || is_closed || !may_be_object {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{}/minProperties is not supported where it asks for more than one key beside those in required: a key \
             that is not named may come twice",
            self.path
        )))
    }

    /// Refuses strings in which a character has no spelling that is allowed.
    fn check_characters(&self, value: &Value) -> Result<()> {
        if !self.is_spelt_once {
            return Ok(());
        }
        let mut pending = vec![value];
        while let Some(value) = pending.pop() {
            match value {
                Value::Array(items) => pending.extend(items),
                Value::Object(members) => pending.extend(members.values()),
                Value::String(text) => {
                    let needs_code =
                        |it: &char| it.is_ascii_control() && !"\n\r\t\u{8}\u{c}".contains(*it);
                    if let Some(character) = text.chars().find(needs_code) {
                        return Err(Error::invalid_argument(format!(
                            "{}: the character \\u{:04x} is not supported beside objects with keys that the schema \
                             does not name",
                            self.path,
                            u32::from(character)
                        )));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_have_one_spelling_where_keys_are_free_beside_names() {
        let closed = json!({ "properties": { "a": {} }, "additionalProperties": false });
        assert_eq!(rewritten(&closed).unwrap(), closed);
        let any = json!({ "type": "object", "items": { "type": "string" } });
        assert_eq!(rewritten(&any).unwrap(), any);
        for open in [
            json!({ "properties": { "a": {} } }),
            json!({ "anyOf": [closed, { "required": ["a"] }] }),
            json!({ "patternProperties": { "^a": {} }, "additionalProperties": false }),
        ] {
            let new = rewritten(&open).unwrap();
            assert_eq!(new[SWITCHES], json!({ "json_allowed_escapes": ONE_SPELLING }));
        }
    }
}
