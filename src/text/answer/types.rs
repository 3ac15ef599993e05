//! The types of tools' parameters, for forms of calls that write values as plain text.

use std::collections::HashMap;

use serde_json::Value;

use super::json::{is_blank, is_json, push_escaped};

/// References that are followed before a schema is given up.
const MAX_REFERENCES: usize = 8;
/// Alternatives of alternatives that are looked at.
const MAX_ALTERNATIVES: usize = 64;

/// A type of JSON, as far as the text of a value tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Integer,
    Number,
    Truth,
    Null,
    /// A list or an object.
    Structure,
}

/// The kinds of values that a parameter takes, in the order of its schema.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Kinds(Vec<Kind>);

/// The parameters of tools, by the names of both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolTypes {
    tools: HashMap<String, HashMap<String, Kinds>>,
}

impl ToolTypes {
    /// Reads tools as requests have them: `{"type": "function", "function": {"name", "parameters"}}`, or the
    /// inner object alone. What is not understood is left out; its values stay text.
    pub fn of(tools: &Value) -> Self {
        let mut found = ToolTypes::default();
        for tool in tools.as_array().into_iter().flatten() {
            let function = tool.get("function").unwrap_or(tool);
            let Some(name) = function.get("name").and_then(Value::as_str) else { continue };
            let schema = function.get("parameters").unwrap_or(&Value::Null);
            let properties = schema.get("properties").and_then(Value::as_object);
            let kinds = properties.into_iter().flatten();
            let kinds = kinds.map(|(key, property)| (key.clone(), Kinds::of(property, schema)));
            found.tools.insert(name.to_owned(), kinds.collect());
        }
        found
    }

    /// Whether there are tools at all.
    pub fn is_empty(&self) -> bool {
        self.tools.is_empty()
    }

    /// Returns the kinds of a parameter. One that is not declared takes any text.
    pub(super) fn of_parameter(&self, tool: &str, parameter: &str) -> Kinds {
        let kinds = self.tools.get(tool).and_then(|tool| tool.get(parameter));
        kinds.cloned().unwrap_or_default()
    }

    /// Converts arguments that are text to the types of the tool's schema, as far as possible.
    pub(super) fn convert(&self, tool: &str, arguments: &mut Value) {
        let Some(known) = self.tools.get(tool) else { return };
        for (key, value) in arguments.as_object_mut().into_iter().flatten() {
            let Some(kinds) = known.get(key) else { continue };
            match value {
                Value::String(_) => kinds.convert(value),
                // Values of one name, put together.
                Value::Array(values) if !kinds.0.contains(&Kind::Structure) => {
                    values.iter_mut().for_each(|value| kinds.convert(value));
                }
                _ => {}
            }
        }
    }

    /// Whether the tool may have this parameter, as far as is known.
    pub(super) fn may_have(&self, tool: &str, parameter: &str) -> bool {
        match self.tools.get(tool) {
            Some(known) if !known.is_empty() => known.contains_key(parameter),
            _ => true,
        }
    }
}

impl Kinds {
    /// Returns the kinds of a schema, whose references are looked up in `root`.
    pub fn of(schema: &Value, root: &Value) -> Self {
        let mut kinds = Kinds::default();
        let mut left = MAX_ALTERNATIVES;
        kinds.add(schema, root, &mut left);
        kinds
    }

    /// Returns the kinds, in the order in which a value is tried as each of them.
    pub fn tried(&self) -> &[Kind] {
        &self.0
    }

    fn add(&mut self, schema: &Value, root: &Value, left: &mut usize) {
        let mut schema = schema;
        for _ in 0..MAX_REFERENCES {
            let Some(reference) = schema.get("$ref").and_then(Value::as_str) else { break };
            let target = reference.strip_prefix('#').and_then(|path| root.pointer(path));
            let Some(target) = target else { return };
            schema = target;
        }
        if *left == 0 {
            return;
        }
        *left -= 1;
        match schema.get("type") {
            Some(Value::String(name)) => self.add_named(name),
            Some(Value::Array(names)) => {
                names.iter().filter_map(Value::as_str).for_each(|name| self.add_named(name));
            }
            _ => {}
        }
        for key in ["anyOf", "oneOf", "allOf"] {
            for alternative in schema.get(key).and_then(Value::as_array).into_iter().flatten() {
                // Depth is bounded by that of the JSON, and the number by `left`.
                self.add(alternative, root, left);
            }
        }
        if schema.get("type").is_none() {
            let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
            for value in values.chain(schema.get("const")) {
                self.add_named(match value {
                    Value::String(_) => "string",
                    Value::Number(_) => "number",
                    Value::Bool(_) => "boolean",
                    Value::Null => "null",
                    Value::Array(_) | Value::Object(_) => "object",
                });
            }
        }
    }

    fn add_named(&mut self, name: &str) {
        let kind = match name {
            "integer" | "int" => Kind::Integer,
            "number" | "float" => Kind::Number,
            "boolean" | "bool" => Kind::Truth,
            "null" => Kind::Null,
            "object" | "array" => Kind::Structure,
            _ => Kind::Text,
        };
        if !self.0.contains(&kind) {
            self.0.push(kind);
        }
    }

    /// Whether every value is text, so that it can be passed on before its end is known.
    pub fn is_text_alone(&self) -> bool {
        self.0.iter().all(|kind| *kind == Kind::Text)
    }

    fn convert(&self, value: &mut Value) {
        let Value::String(text) = value else { return };
        let mut json = String::new();
        self.push_value(&mut json, text);
        if let Ok(converted) = serde_json::from_str(&json) {
            *value = converted;
        }
    }

    /// Appends a value as JSON: of the first kind that it can be, or else as text.
    pub fn push_value(&self, to: &mut String, value: &str) {
        let bare = value.trim_matches(is_blank);
        if self.0.contains(&Kind::Null) && matches!(bare, "null" | "None") {
            return to.push_str("null");
        }
        for kind in &self.0 {
            let is_number =
                || bare.starts_with(|c: char| c == '-' || c.is_ascii_digit()) && is_json(bare);
            match kind {
                Kind::Text => break,
                Kind::Integer if is_number() && !bare.contains(['.', 'e', 'E']) => {
                    return to.push_str(bare)
                }
                Kind::Number if is_number() => return to.push_str(bare),
                Kind::Truth if bare.eq_ignore_ascii_case("true") => return to.push_str("true"),
                Kind::Truth if bare.eq_ignore_ascii_case("false") => return to.push_str("false"),
                Kind::Structure if bare.starts_with(['{', '[']) && is_json(bare) => {
                    return to.push_str(bare)
                }
                _ => {}
            }
        }
        to.push('"');
        push_escaped(to, value);
        to.push('"');
    }
}
