//! The parameters of a tool as parts of a grammar.

use std::fmt::Write as _;

use serde_json::{json, Map, Value};

use crate::error::{Error, Result};

/// Where schemas keep those that they refer to, which stay at the root.
const SHARED: [&str; 2] = ["$defs", "definitions"];
/// Keywords that say nothing of what is allowed.
const REMARKS: [&str; 8] =
    ["description", "title", "default", "examples", "$schema", "$comment", "$id", "deprecated"];

/// Returns a text as Lark writes it.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Returns the schema of a tool's arguments, which are any object if there is none, and the schemas that
/// it refers to from the root.
pub(super) fn arguments_of(parameters: &Value) -> (Value, Map<String, Value>) {
    let Value::Object(given) = parameters else {
        return (json!({ "type": "object" }), Map::new());
    };
    let (mut arguments, mut shared) = (given.clone(), Map::new());
    for key in SHARED {
        shared.extend(arguments.remove(key).map(|schemas| (key.to_owned(), schemas)));
    }
    arguments.entry("type").or_insert_with(|| "object".into());
    (Value::Object(arguments), shared)
}

/// Keywords whose values are no schemas, so that a reference in them is none.
const DATA: [&str; 4] = ["const", "enum", "default", "examples"];

/// Changes a schema that is to stand at `place` of another one, so that its references from its root lead
/// where they led before. `place`: a JSON pointer.
pub(super) fn rebase(schema: &mut Value, place: &str) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(|item| rebase(item, place)),
        Value::Object(object) => {
            for (key, value) in object {
                match value {
                    Value::String(target) if key == "$ref" => {
                        if let Some(path) = target.strip_prefix('#') {
                            *target = format!("#{place}{path}");
                        }
                    }
                    // A property may have the name of a keyword: then it has a schema.
                    value if DATA.contains(&key.as_str()) && !value.is_object() => {}
                    value => rebase(value, place),
                }
            }
        }
        _ => {}
    }
}

/// Returns the parameters of a tool one by one, as tags and text, in the order of its schema; their rules,
/// whose names begin with `p` and `index`, go to `rules`.
pub(super) fn parameters_of(
    tool: &str,
    parameters: &Value,
    index: usize,
    rules: &mut String,
) -> Result<String> {
    let cannot = |what: &str| {
        Error::unsupported(format!(
            "the tool {tool:?} has {what}, to which calls of this model's form cannot be kept"
        ))
    };
    if tool.contains(['>', '\n']) {
        return Err(cannot("such a name"));
    }
    let (arguments, shared) = arguments_of(parameters);
    let object = arguments.as_object().cloned().unwrap_or_default();
    let known = ["type", "properties", "required", "additionalProperties", "strict"];
    let unknown =
        |key: &&String| !known.contains(&key.as_str()) && !REMARKS.contains(&key.as_str());
    if let Some(key) = object.keys().find(unknown) {
        return Err(cannot(&format!("{key:?}")));
    }
    let required = object.get("required").and_then(Value::as_array);
    let is_required =
        |key: &str| required.is_some_and(|names| names.iter().any(|name| name == key));
    let properties = object.get("properties").and_then(Value::as_object);
    let properties = properties.cloned().unwrap_or_default();
    let missing = required.into_iter().flatten().filter_map(Value::as_str);
    if let Some(name) = missing.clone().find(|name| !properties.contains_key(*name)) {
        return Err(cannot(&format!("{name:?} as required, but not as a property")));
    }
    let mut given = String::new();
    for (place, (key, schema)) in properties.iter().enumerate() {
        if key.contains(['>', '\n']) {
            return Err(cannot(&format!("the name {key:?}")));
        }
        let rule = format!("p{index}_{place}");
        let optional = if is_required(key) { "" } else { "?" };
        let _ = write!(given, " {rule}{optional}");
        let _ = writeln!(rules, "{rule}: {} {rule}_value", quoted(&format!("<parameter={key}>\n")));
        let value =
            value_of(schema, &shared).map_err(|what| cannot(&format!("{what} at {key:?}")))?;
        let _ = writeln!(rules, "{rule}_value{value}");
    }
    Ok(given)
}

/// References that are followed before a schema is given up.
const MAX_REFERENCES: usize = 8;
/// What ends a value.
const END: &str = "\n</parameter>\n";

/// Returns the rest of a rule for a value, or what of its schema the form cannot have.
fn value_of(schema: &Value, shared: &Map<String, Value>) -> std::result::Result<String, String> {
    let end = quoted(END);
    let root = Value::Object(shared.clone());
    let mut schema = schema;
    for _ in 0..MAX_REFERENCES {
        let Some(reference) = schema.get("$ref").and_then(Value::as_str) else { break };
        let target = reference.strip_prefix('#').and_then(|path| root.pointer(path));
        schema = target.ok_or_else(|| format!("the reference {reference:?}"))?;
    }
    let Some(object) = schema.as_object() else {
        return Err("something that is no schema".to_owned());
    };
    let texts = |values: &[Value]| -> Option<Vec<String>> {
        values.iter().map(|value| Some(quoted(value.as_str()?))).collect()
    };
    let constant = object.get("const").map(std::slice::from_ref);
    let listed = object.get("enum").and_then(Value::as_array).map(Vec::as_slice);
    if let Some(values) = constant.or(listed) {
        if let Some(texts) = texts(values) {
            return Ok(format!(": ( {} ) {end}", texts.join(" | ")));
        }
        if values.iter().any(Value::is_string) {
            return Err("texts among other values".to_owned());
        }
    } else if may_be_text(object, 8) {
        let kinds = object.get("type");
        let is_text = kinds.is_none_or(|kind| match kind {
            Value::Array(names) => {
                // What is read of a text that looks like a number is one.
                names.iter().all(|name| !matches!(name.as_str(), Some("object" | "array")))
            }
            kind => kind == "string",
        });
        let number = |key: &str| object.get(key).map(|value| value.as_u64());
        let known = ["type", "minLength", "maxLength"];
        let unknown = object
            .keys()
            .find(|key| !known.contains(&key.as_str()) && !REMARKS.contains(&key.as_str()));
        return match (unknown, number("minLength"), number("maxLength")) {
            (Some(key), ..) => Err(format!("{key:?} of a text")),
            (None, ..) if !is_text => Err("a text or a structure".to_owned()),
            (None, Some(None), _) | (None, _, Some(None)) => {
                Err("a length that is none".to_owned())
            }
            (None, None, None) => Ok(format!("[suffix={end}]: /(.|\\n)*/")),
            (None, least, most) => {
                let least = least.flatten().unwrap_or(0);
                let most = most.flatten().map(|most| most.to_string()).unwrap_or_default();
                Ok(format!("[suffix={end}]: /(.|\\n){{{least},{most}}}/"))
            }
        };
    }
    let mut schema = object.clone();
    schema.extend(shared.clone());
    Ok(format!(": %json {} {end}", Value::Object(schema)))
}

/// Whether a value of a schema may be a text, so that it is written without quotes. References count as
/// structures, whose texts would have quotes.
fn may_be_text(schema: &Map<String, Value>, depth: usize) -> bool {
    let alternatives = ["anyOf", "oneOf", "allOf"].iter().filter_map(|key| schema.get(*key));
    let mut alternatives = alternatives.filter_map(Value::as_array).flatten().peekable();
    match schema.get("type") {
        Some(Value::String(name)) => name == "string",
        Some(Value::Array(names)) => names.iter().any(|name| name == "string"),
        _ if schema.contains_key("$ref") => false,
        _ if alternatives.peek().is_some() => alternatives.any(|schema| match schema.as_object() {
            Some(schema) if depth > 0 => may_be_text(schema, depth - 1),
            _ => true,
        }),
        _ => true,
    }
}
