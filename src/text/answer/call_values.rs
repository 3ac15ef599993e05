//! The values of a tool's parameters where they are written as plain text between tags: strings without
//! quotes, everything else as JSON.
//!
//! A value is read as the first kind of its schema that it can be, as [`Kinds`] says, and the grammar takes
//! no text that would be read as something that the schema does not allow. So if a schema allows strings and
//! other values, the strings that would be taken for one of the others are left out, and so are the others
//! that would be taken for strings.

use std::fmt::Write as _;

use serde_json::{json, Value};

use super::types::{Kind, Kinds};
use super::xml::{END_OF_FUNCTION, END_OF_VALUE, PARAMETER};

/// The keys under which schemas keep shared definitions, which stay at the root.
pub(super) const SHARED: [&str; 2] = ["$defs", "definitions"];
/// Keywords that say nothing of what is allowed.
pub(super) const REMARKS: [&str; 8] =
    ["description", "title", "default", "examples", "$schema", "$comment", "$id", "deprecated"];
/// References and alternatives in each other before a schema is given up: some lead in a circle.
const MAX_DEPTH: usize = 16;
/// Alternatives of one value.
const MAX_ALTERNATIVES: usize = 64;
/// The end of a value.
const END: &str = "\n</parameter>\n";
/// The tags of which one in a text may end the value for a reader, anywhere and where a line begins.
const TAGS: [&str; 2] = [END_OF_VALUE, END_OF_FUNCTION];
const TAG_OF_LINE: &str = PARAMETER;
/// Keywords that say nothing of strings.
const OF_OTHERS: [&str; 16] = [
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "items",
    "additionalItems",
    "prefixItems",
    "minItems",
    "maxItems",
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
];

/// Returns a text as Lark writes it.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

type Found<T> = std::result::Result<T, String>;

/// The values that a schema allows, by how they are written.
pub(super) struct Values {
    kinds: Kinds,
    /// Schemas without strings.
    json: Vec<Value>,
    /// Strings that are listed.
    listed: Vec<String>,
    /// The least and the greatest length of other strings, in characters.
    lengths: Vec<(u64, Option<u64>)>,
}

impl Values {
    /// Takes a schema apart. `root`: where its references lead. An error is what the form cannot have.
    pub fn of(schema: &Value, root: &Value) -> Found<Self> {
        let kinds = Kinds::of(schema, root);
        let mut values = Values { kinds, json: vec![], listed: vec![], lengths: vec![] };
        values.add(schema, root, MAX_DEPTH)?;
        let json = std::mem::take(&mut values.json);
        values.json = json.into_iter().filter(|schema| values.reads(schema, root)).collect();
        values.check_listed()?;
        Ok(values)
    }

    fn add(&mut self, schema: &Value, root: &Value, depth: usize) -> Found<()> {
        if depth == 0 || self.json.len() + self.lengths.len() > MAX_ALTERNATIVES {
            let what = "references or alternatives that are too many or lead in a circle";
            return Err(what.to_owned());
        }
        let object = match schema {
            Value::Bool(false) => return Ok(()),
            Value::Bool(true) => return self.add(&json!({}), root, depth - 1),
            Value::Object(object) => object,
            _ => return Err("something that is no schema".to_owned()),
        };
        // The first keyword that says something and is none of these.
        let beside = |known: &[&str]| {
            let mut keys = object.keys().map(String::as_str);
            keys.find(|key| !known.contains(key) && !REMARKS.contains(key) && !SHARED.contains(key))
        };
        if let (Some(reference), None) = (object.get("$ref"), beside(&["$ref"])) {
            let path = reference.as_str().and_then(|target| target.strip_prefix('#'));
            let target = path.and_then(|path| root.pointer(path));
            let target = target.ok_or_else(|| format!("the reference {reference}"))?;
            return self.add(target, root, depth - 1);
        }
        let may_be_text = |schema: &Value| {
            let kinds = Kinds::of(schema, root);
            kinds.tried().is_empty() || kinds.tried().contains(&Kind::Text)
        };
        if !may_be_text(schema) {
            self.json.push(schema.clone());
            return Ok(());
        }
        for key in ["anyOf", "oneOf", "allOf"] {
            let schemas = object.get(key).and_then(Value::as_array).filter(|it| !it.is_empty());
            let Some(schemas) = schemas else { continue };
            if let Some(other) = beside(&[key]) {
                return Err(format!("{other:?} beside {key:?} of a text"));
            }
            let (texts, others): (Vec<_>, Vec<_>) =
                schemas.iter().partition(|schema| may_be_text(schema));
            let is_plain = |schema: &&Value| Kinds::of(schema, root).is_text_alone();
            match key {
                "allOf" if schemas.len() > 1 => return Err("\"allOf\" of a text".to_owned()),
                // A value that two of them allow is none.
                "oneOf" if texts.len() > 1 || !texts.iter().all(is_plain) => {
                    return Err("\"oneOf\" of several texts".to_owned());
                }
                "oneOf" if others.len() > 1 => self.json.push(json!({ "oneOf": others })),
                _ => others.into_iter().try_for_each(|it| self.add(it, root, depth - 1))?,
            }
            return texts.into_iter().try_for_each(|it| self.add(it, root, depth - 1));
        }
        let types = match object.get("type") {
            None => None,
            Some(Value::Array(names)) => Some(names.as_slice()),
            Some(name) => Some(std::slice::from_ref(name)),
        };
        let listed = object.get("enum").and_then(Value::as_array).map(Vec::as_slice);
        let constant = object.get("const").map(std::slice::from_ref);
        if let Some(values) = constant.or(listed) {
            if let Some(other) = beside(&["enum", "const", "type"]) {
                return Err(format!("{other:?} of a text"));
            }
            let is_allowed = |value: &&Value| {
                listed.is_none_or(|listed| listed.contains(value))
                    && types.is_none_or(|types| types.iter().any(|name| is_a(value, name)))
            };
            let (texts, others): (Vec<_>, Vec<_>) =
                values.iter().filter(is_allowed).partition(|value| value.is_string());
            self.listed.extend(texts.into_iter().filter_map(Value::as_str).map(str::to_owned));
            let is_read = |value: &&Value| self.reads(&json!({ "const": value }), root);
            let others: Vec<_> = others.into_iter().filter(is_read).collect();
            if !others.is_empty() {
                self.json.push(json!({ "enum": others }));
            }
            return Ok(());
        }
        let any = [json!("string")];
        for name in types.unwrap_or(&any) {
            match name.as_str() {
                Some("string") => {}
                Some("integer" | "number" | "boolean" | "null" | "object" | "array") => {
                    let mut one = object.clone();
                    one.insert("type".to_owned(), name.clone());
                    self.json.push(Value::Object(one));
                    continue;
                }
                _ => return Err(format!("the type {name}")),
            }
            let mut known = vec!["type", "minLength", "maxLength"];
            known.extend(OF_OTHERS);
            if let Some(other) = beside(&known) {
                return Err(format!("{other:?} of a text"));
            }
            let length = |key: &str| match object.get(key).map(Value::as_u64) {
                Some(None) => Err(format!("a {key:?} that is no length")),
                length => Ok(length.flatten()),
            };
            self.lengths.push((length("minLength")?.unwrap_or(0), length("maxLength")?));
        }
        Ok(())
    }

    /// Returns the kinds that a text is tried as before it is taken for a string. Null is tried first always.
    fn before_text(&self) -> &[Kind] {
        let tried = self.kinds.tried();
        let text = tried.iter().position(|kind| *kind == Kind::Text).unwrap_or(tried.len());
        tried.get(..text).unwrap_or_default()
    }

    /// Whether no value of this schema, which has no strings, would be read as a string.
    fn reads(&self, schema: &Value, root: &Value) -> bool {
        let read = self.before_text();
        let mut kinds = Kinds::of(schema, root).tried().to_vec().into_iter();
        kinds.all(|kind| kind == Kind::Null || read.contains(&kind))
    }

    /// Checks that the strings that are listed are read as they are.
    fn check_listed(&self) -> Found<()> {
        for text in &self.listed {
            let mut read = String::new();
            self.kinds.push_value(&mut read, text);
            if serde_json::from_str::<Value>(&read).ok().as_ref() != Some(&json!(text)) {
                return Err(format!("the text {text:?}, which would be read as {read},"));
            }
            if has_tag(text) {
                return Err(format!("the text {text:?}"));
            }
        }
        Ok(())
    }

    /// Returns the characters with which a string must not begin, because it would be read as a value that is not
    /// allowed.
    fn barred(&self) -> String {
        let is_free = |name: &str| {
            self.json.iter().filter_map(Value::as_object).any(|schema| {
                let says_more = |key: &&String| *key != "type" && !REMARKS.contains(&key.as_str());
                schema.get("type").is_some_and(|it| it == name)
                    && !schema.keys().any(|key| says_more(&key))
            })
        };
        let mut barred = String::new();
        for kind in self.before_text() {
            let (is_any, begin) = match kind {
                Kind::Integer => (is_free("integer") || is_free("number"), "-0123456789"),
                Kind::Number => (is_free("number"), "-0123456789"),
                Kind::Truth => (is_free("boolean"), "tTfF"),
                Kind::Structure => (is_free("object") && is_free("array"), "{["),
                Kind::Null | Kind::Text => continue,
            };
            if !is_any {
                barred.extend(begin.chars().filter(|it| !barred.contains(*it)).collect::<Vec<_>>());
            }
        }
        barred
    }

    /// Writes the rule `NAME_value` and those that it needs to `rules`. `root`: as for [`Values::of`].
    pub fn write(&self, name: &str, root: &Value, rules: &mut String) -> Found<()> {
        let (end, barred, with_tag) = (quoted(END), self.barred(), any_with_tag());
        let mut alternatives = Vec::new();
        if !self.listed.is_empty() {
            let listed: Vec<String> = self.listed.iter().map(|text| quoted(text)).collect();
            alternatives.push(format!("( {} ) {end}", listed.join(" | ")));
        }
        for (place, (least, most)) in self.lengths.iter().enumerate() {
            let text = any_text(*least, *most, &barred);
            let _ = writeln!(rules, "{name}_text_{place}[suffix={end}]: /{text}/ & ~/{with_tag}/");
            alternatives.push(format!("{name}_text_{place}"));
        }
        for schema in &self.json {
            let mut schema = schema.as_object().cloned().unwrap_or_default();
            for key in SHARED {
                schema.extend(root.get(key).map(|shared| (key.to_owned(), shared.clone())));
            }
            alternatives.push(format!("%json {} {end}", Value::Object(schema)));
        }
        if alternatives.is_empty() {
            return Err("nothing that is allowed".to_owned());
        }
        let _ = writeln!(rules, "{name}_value: {}", alternatives.join("\n  | "));
        Ok(())
    }
}

/// Whether a text has a tag that may end the value.
fn has_tag(text: &str) -> bool {
    TAGS.iter().any(|tag| text.contains(tag))
        || text.split('\n').any(|line| line.starts_with(TAG_OF_LINE))
}

/// Returns a regular expression of the texts of which [`has_tag`] is true.
fn any_with_tag() -> String {
    let tags = TAGS.join("|");
    let any = "(.|\\n)*";
    format!("({any}({tags}){any})|(({any}\\n)?{TAG_OF_LINE}{any})").replace("</", "<\\/")
}

/// Returns a regular expression of texts of these lengths that begin with none of the characters `barred`, nor, if
/// there are such, with blanks, beside which they would be found.
fn any_text(least: u64, most: Option<u64>, barred: &str) -> String {
    let repeated = |least: u64, most: Option<u64>| match (least, most) {
        (0, None) => "(.|\\n)*".to_owned(),
        (least, None) => format!("(.|\\n){{{least},}}"),
        (least, Some(most)) => format!("(.|\\n){{{least},{most}}}"),
    };
    if barred.is_empty() || most == Some(0) {
        return repeated(least, most);
    }
    // Between letters and digits `-` and `[` would mean something.
    let first: String = barred.replace('-', "\\-").replace('[', "\\[");
    let rest = repeated(least.saturating_sub(1), most.map(|most| most.saturating_sub(1)));
    let text = format!("[^ \\n\\r\\t{first}]{rest}");
    if least == 0 {
        format!("({text})?")
    } else {
        text
    }
}

/// Whether a value has the type of this name.
fn is_a(value: &Value, name: &Value) -> bool {
    match name.as_str() {
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        Some("null") => value.is_null(),
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        _ => false,
    }
}
