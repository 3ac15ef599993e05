//! How a model writes the call of a tool, found out from a call that its chat template writes, and the
//! grammar of answers that are such a call.

use std::fmt::Write as _;

use serde_json::{json, Map, Value};

use super::call_schema::{arguments_of, parameters_of, quoted, rebase};
use super::parser::AnswerStart;
use super::tag::THINK_TAGS;
use crate::error::Result;
use crate::text::Tokenizer;

/// The name of the tool in the probe, its parameter, and what that is.
const PROBE: &str = "xserv_probe";
const PARAMETER: &str = "probe";
const VALUE: u32 = 1;
/// Templates of some models take ids of nine letters and digits only.
const ID: &str = "000000000";

/// What is between the beginning and the end of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Shape {
    /// An object of the name and the arguments.
    Object { name_key: String, arguments_key: String },
    /// The name, this text, and an object of the arguments.
    Named { between: String },
    /// `<function=NAME>` and the parameters one by one, as text.
    Parameters,
}

/// How a model writes a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallForm {
    before: String,
    after: String,
    shape: Shape,
}

/// A conversation with a call, for a chat template to write.
pub struct Probe {
    /// The messages before the call.
    pub question: Value,
    /// The same and the call.
    pub call: Value,
    /// The tools.
    pub tools: Value,
}

impl Probe {
    /// The conversation from which [`CallForm::find`] learns.
    pub fn new() -> Self {
        let question = json!({ "role": "user", "content": "?" });
        let function = json!({ "name": PROBE, "arguments": { PARAMETER: VALUE } });
        let call = json!({ "id": ID, "type": "function", "function": function });
        let answer = json!({ "role": "assistant", "content": "", "tool_calls": [call] });
        let schema =
            json!({ "type": "object", "properties": { PARAMETER: { "type": "integer" } } });
        let tool = json!({ "name": PROBE, "description": "", "parameters": schema });
        Probe {
            question: json!([question]),
            call: json!([question, answer]),
            tools: json!([{ "type": "function", "function": tool }]),
        }
    }
}

impl Default for Probe {
    fn default() -> Self {
        Probe::new()
    }
}

impl CallForm {
    /// Finds the form from what a template writes: `asked` is the question of the [`Probe`], `opened` the
    /// same with the beginning of an answer, and `called` the whole. `None` if the call has no form that is
    /// known here.
    pub fn find(asked: &str, opened: &str, called: &str) -> Option<CallForm> {
        // What comes before the call, from the end of what the prompt of an answer has.
        let turn = opened.strip_prefix(asked).unwrap_or_default();
        let turn = turn.split("<think>").next().unwrap_or_default().trim_end();
        let name_at = called.rfind(PROBE)?;
        let begin = match called.get(..name_at)?.rfind(turn) {
            Some(at) if !turn.is_empty() => at + turn.len(),
            _ => common_prefix(opened, called),
        };
        let own = called.get(begin..)?;
        let without_thought = |text: &str| {
            let text = text.trim_start();
            let thought = text.strip_prefix("<think>").and_then(|rest| rest.split_once("</think>"));
            match thought {
                Some((inside, rest)) if inside.trim().is_empty() => rest.trim_start().to_owned(),
                _ => text.to_owned(),
            }
        };
        let form = |before: &str, rest: &str, shape: Shape| {
            let before = without_thought(before);
            let after = closing(&before, rest).to_owned();
            Some(CallForm { before, after, shape })
        };
        if let Some((before, rest)) = own.split_once(&format!("<function={PROBE}>")) {
            let body = format!("\n<parameter={PARAMETER}>\n{VALUE}\n</parameter>\n</function>");
            return form(before, rest.strip_prefix(body.as_str())?, Shape::Parameters);
        }
        let (before, named) = own.split_once(PROBE)?;
        // An object that begins before the name.
        if let Some(begin) = before.rfind('{').filter(|_| named.starts_with('"')) {
            let (object, rest) = first_value(own.get(begin..)?)?;
            let keys = |wanted: &Value| {
                let found = object.as_object()?.iter().filter(|(_, value)| *value == wanted);
                let mut found = found.map(|(key, _)| key.clone());
                found.next().filter(|_| found.next().is_none())
            };
            let name_key = keys(&json!(PROBE))?;
            let arguments_key = keys(&json!({ PARAMETER: VALUE }))?;
            // The program that calls the tool gives ids.
            let others = object.as_object()?.iter().filter(|(key, value)| {
                **key != name_key && **key != arguments_key && **value != json!(ID)
            });
            if others.count() > 0 {
                return None;
            }
            return form(own.get(..begin)?, rest, Shape::Object { name_key, arguments_key });
        }
        let object = named.find('{')?;
        let (arguments, rest) = first_value(named.get(object..)?)?;
        let between = named.get(..object)?.to_owned();
        let is_call = arguments == json!({ PARAMETER: VALUE });
        // Further parts, such as an id, would be taken for a part of this text.
        let is_plain = between.len() <= MAX_BETWEEN && !between.contains(ID);
        if !(is_call && is_plain) {
            return None;
        }
        form(before, rest, Shape::Named { between })
    }

    /// The call of the probe in this form.
    pub fn example(&self) -> String {
        let Self { before, after, shape } = self;
        let arguments = json!({ PARAMETER: VALUE });
        let call = match shape {
            Shape::Object { name_key, arguments_key } => {
                json!({ name_key: PROBE, arguments_key: arguments }).to_string()
            }
            Shape::Named { between } => format!("{PROBE}{between}{arguments}"),
            Shape::Parameters => format!(
                "<function={PROBE}>\n<parameter={PARAMETER}>\n{VALUE}\n</parameter>\n</function>"
            ),
        };
        format!("{before}{call}{after}")
    }

    /// Whether an answer has been read as the call of the probe.
    pub fn is_example(name: &str, arguments: &str) -> bool {
        let arguments: Option<Value> = serde_json::from_str(arguments).ok();
        name == PROBE && arguments == Some(json!({ PARAMETER: VALUE }))
    }

    /// Returns the grammar of answers that are one call of one of these tools, after a thought where the
    /// model has begun one or may. Fails where the form cannot keep a call to the schema of its tool.
    pub fn grammar(
        &self,
        tools: &[(&str, &Value)],
        start: AnswerStart,
        tokenizer: &Tokenizer,
    ) -> Result<String> {
        let mut rules = String::new();
        let mut calls = Vec::new();
        for (index, (name, parameters)) in tools.iter().enumerate() {
            let body = match &self.shape {
                Shape::Object { name_key, arguments_key } => {
                    let mut arguments = match parameters {
                        Value::Object(_) => (*parameters).clone(),
                        _ => json!({ "type": "object" }),
                    };
                    rebase(&mut arguments, &format!("/properties/{}", pointer(arguments_key)));
                    if let Value::Object(object) = &mut arguments {
                        object.entry("type").or_insert_with(|| "object".into());
                    }
                    let mut schema = Map::new();
                    schema.insert("type".into(), "object".into());
                    let properties =
                        json!({ name_key: { "const": name }, arguments_key: arguments });
                    schema.insert("properties".into(), properties);
                    schema.insert("required".into(), json!([name_key, arguments_key]));
                    schema.insert("additionalProperties".into(), false.into());
                    format!("%json {}", Value::Object(schema))
                }
                Shape::Named { between } => {
                    let (arguments, shared) = arguments_of(parameters);
                    let mut schema = arguments.as_object().cloned().unwrap_or_default();
                    schema.extend(shared);
                    let between = literal(between, tokenizer);
                    format!("{}{between} %json {}", quoted(name), Value::Object(schema))
                }
                Shape::Parameters => {
                    let begin = quoted(&format!("<function={name}>\n"));
                    let given = parameters_of(name, parameters, index, &mut rules)?;
                    format!("{begin}{given} {}", quoted("</function>"))
                }
            };
            let _ = writeln!(rules, "call_{index}: {body}");
            calls.push(format!("call_{index}"));
        }
        let (before, after) = (literal(&self.before, tokenizer), literal(&self.after, tokenizer));
        let think = thought(start, tokenizer, &mut rules);
        Ok(format!("start: {think}call\ncall: {before} ( {} ) {after}\n{rules}", calls.join(" | ")))
    }
}

/// The longest text between a name and its arguments.
const MAX_BETWEEN: usize = 64;

/// Appends the rules of a thought, and returns what stands for it in front of a call.
fn thought(start: AnswerStart, tokenizer: &Tokenizer, rules: &mut String) -> &'static str {
    // Models that think have a token for it.
    let known = THINK_TAGS.iter().find(|(_, close)| tokenizer.token_to_id(close).is_some());
    let (open, close) = match (known, start) {
        (_, AnswerStart::AfterThought) | (None, AnswerStart::Open) => return "",
        (Some(tags), _) => *tags,
        (None, AnswerStart::InThought) => ("<think>", "</think>"),
    };
    let special = |tag| tokenizer.token_to_id(tag).filter(|&id| tokenizer.is_special(id));
    let _ = match special(close) {
        Some(id) => writeln!(rules, "thought: /(.|\\n)*/ <[{id}]>"),
        None => writeln!(rules, "thought[suffix={}]: /(.|\\n)*/", quoted(close)),
    };
    let open = match start {
        AnswerStart::InThought => String::new(),
        _ => literal(open, tokenizer),
    };
    let _ = writeln!(rules, "think: {open} thought /\\n{{0,2}}/");
    match start {
        AnswerStart::InThought => "think ",
        _ => "think? ",
    }
}

/// Returns a key as a part of a JSON pointer.
fn pointer(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// Returns a text as Lark writes it, with its special tokens by their ids; nothing of an empty one.
fn literal(text: &str, tokenizer: &Tokenizer) -> String {
    let mut rest = text;
    let mut found = String::new();
    let mut push = |part: String| {
        found.push(' ');
        found.push_str(&part);
    };
    let ids = tokenizer.encode(text, false, true).unwrap_or_default();
    for id in ids.into_iter().filter(|&id| tokenizer.is_special(id)) {
        let name = tokenizer.id_to_token(id).unwrap_or_default();
        let Some((before, after)) = rest.split_once(&name) else { continue };
        if !before.is_empty() {
            push(quoted(before));
        }
        push(format!("<[{id}]>"));
        rest = after;
    }
    if !rest.is_empty() {
        push(quoted(rest));
    }
    found
}

/// Returns the number of bytes that two texts begin with in common, whole characters.
fn common_prefix(a: &str, b: &str) -> usize {
    let mut same = a.char_indices().zip(b.chars()).take_while(|((_, a), b)| a == b);
    same.by_ref().last().map_or(0, |((at, character), _)| at + character.len_utf8())
}

/// Returns the JSON value with which a text begins, and the rest.
fn first_value(text: &str) -> Option<(Value, &str)> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let value = values.next()?.ok()?;
    let end = values.byte_offset();
    Some((value, text.get(end..)?))
}

/// Returns what of `rest` closes what `before` has opened: a list, a tag.
fn closing<'a>(before: &str, rest: &'a str) -> &'a str {
    let mut end = 0;
    let blank = |at: usize| {
        let rest = rest.get(at..).unwrap_or_default();
        at + rest.len() - rest.trim_start().len()
    };
    let mut at = blank(0);
    if before.trim_end().ends_with('[') && rest.get(at..).is_some_and(|it| it.starts_with(']')) {
        end = at + 1;
        at = blank(end);
    }
    let tag = rest.get(at..).and_then(|it| it.strip_prefix("</")?.split_once('>'));
    if let Some((name, _)) = tag.filter(|(name, _)| before.contains(&format!("<{name}>"))) {
        end = at + name.len() + 3;
    }
    rest.get(..end).unwrap_or_default()
}
