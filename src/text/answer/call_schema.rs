//! The parameters of a tool as parts of a grammar.

use std::fmt::Write as _;

use serde_json::{Map, Value};

use super::call_values::{quoted, Values, REMARKS, SHARED};
use crate::error::{Error, Result};

/// Returns the schema of a tool's arguments, which are an object: any one if the tool has no schema.
pub(super) fn arguments_of(parameters: &Value) -> Map<String, Value> {
    let mut arguments = parameters.as_object().cloned().unwrap_or_default();
    arguments.entry("type").or_insert_with(|| "object".into());
    arguments
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
    let object = arguments_of(parameters);
    let known = ["type", "properties", "required", "additionalProperties", "strict"];
    let unknown = |key: &&String| {
        let key = key.as_str();
        !known.contains(&key) && !REMARKS.contains(&key) && !SHARED.contains(&key)
    };
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
        Values::of(schema, parameters)
            .and_then(|values| values.write(&rule, parameters, rules))
            .map_err(|what| cannot(&format!("{what} at {key:?}")))?;
    }
    Ok(given)
}
