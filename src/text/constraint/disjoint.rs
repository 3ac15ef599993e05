//! Whether no value can be of two of a schema's alternatives, as far as that shows.

use serde_json::Value;

/// References that are followed before one leads in a circle.
const MAX_DEPTH: usize = 16;
/// Pairs of schemas and values that are looked at for one schema.
const MAX_STEPS: usize = 200_000;

const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

/// Looks at alternatives of a schema.
pub(super) struct Disjoint<'a> {
    root: &'a Value,
    steps: usize,
}

impl<'a> Disjoint<'a> {
    /// `root`: the schema in which references lead to places.
    pub fn new(root: &'a Value) -> Self {
        Disjoint { root, steps: MAX_STEPS }
    }

    /// Whether every pair of these schemas is known to have no value in common.
    pub fn are_all(&mut self, schemas: &'a [Value]) -> bool {
        schemas.iter().enumerate().all(|(place, schema)| {
            let mut others = schemas.iter().skip(place + 1);
            others.all(|other| self.are(schema, other, MAX_DEPTH))
        })
    }

    fn are(&mut self, a: &'a Value, b: &'a Value, depth: usize) -> bool {
        if self.steps == 0 || depth == 0 {
            return false;
        }
        self.steps -= 1;
        if a == &Value::Bool(false) || b == &Value::Bool(false) {
            return true;
        }
        let depth = depth - 1;
        for (one, other) in [(a, b), (b, a)] {
            // The drafts differ in whether keywords beside a reference count: those of its target do.
            if let Some(reference) = one.get("$ref") {
                let target = reference.as_str().and_then(|it| self.target(it));
                return target.is_some_and(|target| self.are(target, other, depth));
            }
        }
        for (one, other) in [(a, b), (b, a)] {
            for key in ["anyOf", "oneOf"] {
                let alternatives = one.get(key).and_then(Value::as_array);
                if alternatives.is_some_and(|all| all.iter().all(|it| self.are(it, other, depth))) {
                    return true;
                }
            }
            let parts = one.get("allOf").and_then(Value::as_array);
            if parts.is_some_and(|parts| parts.iter().any(|it| self.are(it, other, depth))) {
                return true;
            }
        }
        if let (Some(a), Some(b)) = (constants(a), constants(b)) {
            self.steps = self.steps.saturating_sub(a.len().saturating_mul(b.len()));
            return self.steps > 0 && a.iter().all(|a| b.iter().all(|b| differ(a, b)));
        }
        let (of_a, of_b) = (types(a), types(b));
        let mut shared = TYPES.iter().filter(|name| of_a.contains(name) && of_b.contains(name));
        shared.all(|name| *name == "object" && self.are_objects(a, b, depth))
    }

    /// Whether no object can be of both: for a property that one of them requires.
    fn are_objects(&mut self, a: &'a Value, b: &'a Value, depth: usize) -> bool {
        let required = [a, b].map(|schema| schema.get("required").and_then(Value::as_array));
        let names = required.into_iter().flatten().flatten().filter_map(Value::as_str);
        names.into_iter().any(|name| match (property(a, name), property(b, name)) {
            (Some(a), Some(b)) => self.are(a, b, depth),
            _ => false,
        })
    }

    fn target(&self, reference: &str) -> Option<&'a Value> {
        let path = reference.strip_prefix('#')?;
        self.root.pointer(path).filter(|_| !path.contains('%'))
    }
}

/// Returns the schema of a property, if one says what it must be.
fn property<'a>(schema: &'a Value, name: &str) -> Option<&'a Value> {
    let named = schema.get("properties").and_then(|named| named.get(name));
    let others = || schema.get("additionalProperties");
    named.or_else(|| others().filter(|_| schema.get("patternProperties").is_none()))
}

/// Returns the only values that a schema may allow, if it lists them.
fn constants(schema: &Value) -> Option<&[Value]> {
    let one = schema.get("const").map(std::slice::from_ref);
    one.or_else(|| Some(schema.get("enum")?.as_array()?.as_slice()))
}

/// Whether two values are known to differ: 1 and 1.0 are the same number.
fn differ(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() != b.as_f64(),
        (Value::Array(_), Value::Array(_)) | (Value::Object(_), Value::Object(_)) => false,
        _ => a != b,
    }
}

/// Returns the types that a schema may allow; integers are numbers.
fn types(schema: &Value) -> Vec<&str> {
    let of = |value: &Value| match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    if let Some(values) = constants(schema) {
        return values.iter().map(of).collect();
    }
    match schema.get("type") {
        Some(Value::String(name)) if name == "integer" => vec!["number"],
        Some(Value::String(name)) => vec![name],
        Some(Value::Array(names)) => {
            let names = names.iter().filter_map(Value::as_str);
            names.map(|name| if name == "integer" { "number" } else { name }).collect()
        }
        _ => TYPES.to_vec(),
    }
}

/// Whether an identifier within a schema may change where references lead. That of the schema itself does not.
pub(super) fn has_inner_ids(schema: &Value) -> bool {
    let mut pending = vec![(schema, true)];
    while let Some((value, is_root)) = pending.pop() {
        match value {
            Value::Array(items) => pending.extend(items.iter().map(|item| (item, false))),
            Value::Object(members) => {
                let is_id = |key: &str| members.get(key).is_some_and(Value::is_string);
                if !is_root && (is_id("$id") || is_id("id")) {
                    return true;
                }
                pending.extend(members.values().map(|value| (value, false)));
            }
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn are_disjoint(a: Value, b: Value) -> bool {
        let defs = json!({ "text": { "type": "string" }, "circle": { "$ref": "#/$defs/circle" },
            "cat": { "type": "object", "properties": { "k": { "const": "cat" } }, "required": ["k"] } });
        let root = json!({ "$defs": defs, "oneOf": [a, b] });
        Disjoint::new(&root).are_all(root["oneOf"].as_array().unwrap())
    }

    #[test]
    fn alternatives_are_compared() {
        let text = json!({ "$ref": "#/$defs/text" });
        let dog = json!({ "type": "object", "properties": { "k": { "enum": ["dog", "wolf"] } } });
        assert!(are_disjoint(json!({ "type": "null" }), text.clone()));
        assert!(are_disjoint(json!({ "$ref": "#/$defs/cat" }), dog.clone()));
        assert!(are_disjoint(json!({ "anyOf": [{ "type": "integer" }, false] }), text.clone()));
        assert!(are_disjoint(json!({ "allOf": [{}, { "const": 5 }] }), text.clone()));
        assert!(are_disjoint(json!({ "const": 1 }), json!({ "enum": [2, "1", null] })));
        assert!(!are_disjoint(json!({ "const": 1 }), json!({ "const": 1.0 })));
        assert!(!are_disjoint(json!({ "type": "number" }), json!({ "type": ["integer", "null"] })));
        assert!(!are_disjoint(json!({ "type": "string", "maxLength": 1 }), text.clone()));
        assert!(!are_disjoint(json!({ "$ref": "#/$defs/circle" }), text.clone()));
        assert!(!are_disjoint(json!({ "$ref": "#/$defs/none" }), text.clone()));
        assert!(!are_disjoint(json!({}), text));
        let closed = json!({ "type": "object", "additionalProperties": false });
        assert!(are_disjoint(json!({ "$ref": "#/$defs/cat" }), closed));
        let open = json!({ "properties": { "k": { "const": "x" } }, "required": ["k"] });
        assert!(are_disjoint(open.clone(), dog));
        // Without a type, texts are of both.
        assert!(!are_disjoint(open, json!({ "properties": { "k": { "const": "y" } } })));
    }
}
