//! Finds out how a model writes the call of a tool, from a call that its chat template writes, and
//! makes the grammar of answers that are such a call.

use std::fmt::Write as _;

use serde_json::{json, Value};

use super::call_schema::{arguments_of, parameters_of};
use super::call_values::quoted;
use super::rules::AnswerStart;
use super::thought::{literal, thought};
use crate::error::Result;
use crate::text::Tokenizer;

/// The name of the tool in the probe, its parameter, and what that is.
const PROBE: &str = "xserv_probe";
const PARAMETER: &str = "probe";
const VALUE: u32 = 1;
/// Templates of some models take ids of nine letters and digits only.
const ID: &str = "000000000";

/// The exact form of the name and the arguments of a call, including white space.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Shape {
    /// The name and then an object of the arguments, with these texts before, between and after them.
    Json { around: [String; 3], name_is_json: bool },
    /// `<function=NAME>` and the parameters one by one, as text.
    Parameters,
}

/// The form in which a model writes a call.
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
    /// Returns the conversation from which [`CallForm::find`] learns.
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
        // The text before the call, with which the prompt of an answer ends.
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
            let written = own.get(begin..)?.strip_suffix(rest)?;
            return form(own.get(..begin)?, rest, around_parts(&object, written)?);
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
        let around = [String::new(), between, String::new()];
        form(before, rest, Shape::Json { around, name_is_json: false })
    }

    /// Returns the call of the probe in this form.
    pub fn example(&self) -> String {
        let Self { before, after, shape } = self;
        let call = match shape {
            Shape::Json { around: [begin, between, end], name_is_json } => {
                let quote = if *name_is_json { "\"" } else { "" };
                let arguments = format!("{{\"{PARAMETER}\": {VALUE}}}");
                format!("{begin}{quote}{PROBE}{quote}{between}{arguments}{end}")
            }
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
                Shape::Json { around: [begin, between, end], name_is_json } => {
                    let name = if *name_is_json { &quoted(name) } else { *name };
                    let arguments = Value::Object(arguments_of(parameters));
                    let [begin, between, end] =
                        [begin, between, end].map(|text| literal(text, tokenizer));
                    format!("{begin} {}{between} %json {arguments}{end}", quoted(name))
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

/// Returns the number of bytes that two texts begin with in common, whole characters.
fn common_prefix(a: &str, b: &str) -> usize {
    let mut same = a.char_indices().zip(b.chars()).take_while(|((_, a), b)| a == b);
    same.by_ref().last().map_or(0, |((at, character), _)| at + character.len_utf8())
}

/// Returns the texts around the name and the arguments of a call that is an object, as it is written.
/// `None` if it has other members than these and an id, which the caller of the tool gives.
fn around_parts(object: &Value, written: &str) -> Option<Shape> {
    let object = object.as_object()?;
    let key_of = |wanted: Value| {
        let mut found = object.iter().filter(|(_, value)| **value == wanted).map(|(key, _)| key);
        found.next().filter(|_| found.next().is_none())
    };
    key_of(json!(PROBE))?;
    key_of(json!({ PARAMETER: VALUE }))?;
    let without_id = match object.len() {
        2 => written.to_owned(),
        3 => {
            let member = json!(key_of(json!(ID))?).to_string();
            let begin = written.find(&member)?;
            let end = begin + written.get(begin..)?.find(ID)? + ID.len() + 1;
            let (before, after) = (written.get(..begin)?.trim_end(), written.get(end..)?);
            match before.strip_suffix(',') {
                Some(before) => format!("{before}{after}"),
                None => format!(
                    "{}{}",
                    written.get(..begin)?,
                    after.trim_start().strip_prefix(',')?.trim_start()
                ),
            }
        }
        _ => return None,
    };
    let name = format!("\"{PROBE}\"");
    let name = (without_id.find(&name)?, name.len());
    let mut braces = without_id.match_indices('{').map(|(at, _)| at);
    let arguments = braces.find_map(|at| {
        let (value, rest) = first_value(without_id.get(at..)?)?;
        let len = without_id.len() - at - rest.len();
        (value == json!({ PARAMETER: VALUE })).then_some((at, len))
    })?;
    let around = [
        without_id.get(..name.0)?.to_owned(),
        without_id.get(name.0 + name.1..arguments.0)?.to_owned(),
        without_id.get(arguments.0 + arguments.1..)?.to_owned(),
    ];
    Some(Shape::Json { around, name_is_json: true })
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
