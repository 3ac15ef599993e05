//! Renders conversations to text with the template that comes with a model.
//!
//! Semantics are those of `apply_chat_template` in Transformers (utils/chat_template_utils.py):
//! Jinja2 in an immutable sandbox with `trim_blocks`, `lstrip_blocks` and loop controls,
//! `raise_exception`, `strftime_now`, a `tojson` that is `json.dumps`, and `{% generation %}`
//! without effect. Templates are untrusted; `template/` has the precautions which that takes.

use super::json_input::{check_messages, check_size, check_tools};
use super::special_tokens::{parse_config, SpecialTokens};
use super::template::{Template, Variable, Variables, MAX_SOURCE_BYTES};
use crate::error::{Context, Error, ErrorKind, Result};
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::SystemTime;

/// The template for conversations with tools, as Transformers saves it.
const TOOL_USE_FILE: &str = "additional_chat_templates/tool_use.jinja";

/// A compiled-and-checked chat template, or the pair of them that some models have.
///
/// Calls take `&self`; several threads may render at the same time. The first rendering begins a thread
/// that keeps the template compiled, for as long as the template lives.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    default: Arc<Template>,
    /// The template used instead of `default` when tools are given.
    tool_use: Option<Arc<Template>>,
}

/// The input from which a conversation is rendered.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// A JSON array of objects, each with a `role`; see [`super::parse_messages`].
    pub messages: &'a Value,
    /// A JSON array, or nothing. An empty array counts as no tools.
    pub tools: Option<&'a Value>,
    /// Further variables, such as `enable_thinking`. They take precedence over the others of the
    /// same name.
    pub variables: Option<&'a Map<String, Value>>,
    /// Whether to end with the opening of the model's answer.
    pub add_generation_prompt: bool,
    /// The special tokens, which templates see as `bos_token`, `eos_token` and so on, where set.
    pub special_tokens: &'a SpecialTokens,
}

impl ChatTemplate {
    /// Makes a template from its source, which is checked in size and syntax but not yet run.
    pub fn compile(source: &str) -> Result<Self> {
        Ok(ChatTemplate { default: Arc::new(Template::new(source)?), tool_use: None })
    }

    /// Makes the template of a model folder, from the contents of `chat_template.jinja`, which
    /// takes precedence, and `tokenizer_config.json`, whose `chat_template` is a string or a list
    /// of named templates; and of `additional_chat_templates/tool_use.jinja`, which is used when tools are given,
    /// in place of one of that name in the list. `None` if there is none.
    pub fn from_files(
        tokenizer_config_json: Option<&[u8]>,
        chat_template_jinja: Option<&[u8]>,
        tool_use_jinja: Option<&[u8]>,
    ) -> Result<Option<Self>> {
        let mut found = match chat_template_jinja {
            Some(bytes) => Some(Self::from_file(bytes, "chat_template.jinja")?),
            None => {
                let config = tokenizer_config_json.map(parse_config).transpose()?;
                let value = config.as_ref().and_then(|config| config.get("chat_template"));
                Self::from_value(value).context(|| "tokenizer_config.json")?
            }
        };
        if let Some(bytes) = tool_use_jinja {
            let ChatTemplate { default, .. } = Self::from_file(bytes, TOOL_USE_FILE)?;
            let tool_use = Some(default.clone());
            match &mut found {
                Some(found) => found.tool_use = tool_use,
                // As in a list that has no other.
                None => found = Some(ChatTemplate { default, tool_use }),
            }
        }
        Ok(found)
    }

    fn from_file(bytes: &[u8], name: &str) -> Result<Self> {
        let source = std::str::from_utf8(bytes)
            .map_err(|_| Error::invalid_file(format!("{name} is not valid UTF-8")))?;
        Self::compile(source).context(|| name)
    }

    fn from_value(value: Option<&Value>) -> Result<Option<Self>> {
        let list = match value {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::String(source)) => return Self::compile(source).map(Some),
            Some(Value::Array(list)) => list,
            Some(_) => {
                return Err(Error::invalid_file(
                    "chat_template is neither a string nor a list of named templates",
                ))
            }
        };
        let named = |wanted: &str| {
            list.iter().find_map(|entry| {
                let is_it = entry.get("name").and_then(Value::as_str) == Some(wanted);
                entry.get("template").and_then(Value::as_str).filter(|_| is_it)
            })
        };
        let tool_use = named("tool_use");
        let Some(default) = named("default").or(tool_use) else {
            return Err(Error::invalid_file(
                "chat_template is a list without a template named \"default\"",
            ));
        };
        let mut compiled = Self::compile(default)?;
        if let Some(source) = tool_use {
            let template = Template::new(source).context(|| "the template \"tool_use\"")?;
            compiled.tool_use = Some(Arc::new(template));
        }
        Ok(Some(compiled))
    }

    /// Puts a string in place of each content that is a list of texts (`[{"type": "text", "text":
    /// ...}]`, as hosted services take it), with line breaks between them, where the template takes
    /// strings alone: many drop a list silently. A template that goes through lists gets them.
    pub fn join_parts(&self, messages: &mut Value, special_tokens: &SpecialTokens) -> Result<()> {
        let contents = || {
            messages.as_array().into_iter().flatten().filter_map(|message| message.get("content"))
        };
        if !contents().any(|content| texts_of(content).is_some())
            || self.takes_parts(special_tokens)
        {
            return Ok(());
        }
        check_size("messages", messages)?;
        for message in messages.as_array_mut().into_iter().flatten() {
            let Some(content) = message.get_mut("content") else { continue };
            if let Some(texts) = texts_of(content) {
                *content = Value::String(texts.join("\n"));
            }
        }
        Ok(())
    }

    /// Whether the template finds the text in a content that is a list.
    fn takes_parts(&self, special_tokens: &SpecialTokens) -> bool {
        const PROBE: &str = "a text that no template has";
        let messages = serde_json::json!(
            [{"role": "user", "content": [{"type": "text", "text": PROBE}]}]
        );
        let input = ChatInput {
            messages: &messages,
            tools: None,
            variables: None,
            add_generation_prompt: false,
            special_tokens,
        };
        // One that prints the list as it is has the names in it too.
        self.render(&input).is_ok_and(|text| {
            text.contains(PROBE) && !text.contains("'type'") && !text.contains("\"type\"")
        })
    }

    /// Returns the source, the one for tools if there is one.
    pub fn source(&self) -> &str {
        self.tool_use.as_ref().unwrap_or(&self.default).source()
    }

    /// Returns the text of a conversation. Errors are of kind
    /// [`Template`](crate::error::ErrorKind::Template) if they are the template's
    /// (`raise_exception` included), of kind
    /// [`InvalidArgument`](crate::error::ErrorKind::InvalidArgument) if they are the input's. Takes
    /// at most two seconds and 256 MiB beyond the input, whatever the template does.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String> {
        self.render_at(input, SystemTime::now())
    }

    /// As [`ChatTemplate::render`], with another time than now for `strftime_now`, which tells the
    /// date in UTC: for prompts that are to be the same tomorrow.
    pub fn render_at(&self, input: &ChatInput<'_>, now: SystemTime) -> Result<String> {
        let messages = input
            .messages
            .as_array()
            .ok_or_else(|| Error::invalid_argument("messages is not a JSON array of objects"))?;
        check_size("messages", input.messages)?;
        check_messages(messages)?;
        let tools = match input.tools {
            Some(tools) => {
                check_size("tools", tools)?;
                check_tools(tools)?;
                Some(tools).filter(|tools| tools.as_array().is_some_and(|list| !list.is_empty()))
            }
            None => None,
        };
        let tokens = input.special_tokens;
        let null = Value::Null;
        let mut variables: Variables<'_> = Vec::new();
        for (name, token) in [
            ("bos_token", &tokens.bos),
            ("eos_token", &tokens.eos),
            ("pad_token", &tokens.pad),
            ("unk_token", &tokens.unk),
        ] {
            if let Some(token) = token {
                variables.push((name, Variable::Text(token)));
            }
        }
        variables.extend(
            tokens.others.iter().map(|(name, token)| (name.as_str(), Variable::Text(token))),
        );
        // A model may have given a token one of these names, and they come last.
        variables.extend([
            ("messages", Variable::Json(input.messages)),
            // Transformers passes None, so that `tools is not none` works.
            ("tools", Variable::Json(tools.unwrap_or(&null))),
            ("documents", Variable::Json(&null)),
            ("add_generation_prompt", Variable::Flag(input.add_generation_prompt)),
        ]);
        for (name, value) in input.variables.into_iter().flatten() {
            check_size("template variables", value)?;
            if !is_identifier(name) {
                return Err(Error::invalid_argument(format!(
                    "\"{}\" is not a name that a template variable can have",
                    super::shortened(name)
                )));
            }
            variables.push((name, Variable::Json(value)));
        }
        let template = self.tool_use.as_ref().filter(|_| tools.is_some()).unwrap_or(&self.default);
        match template.render(&variables, now) {
            Err(error) if error.kind() == ErrorKind::Template => {
                // "+ is not defined for string and sequence" says little: if the template takes the
                // same conversation with plain contents, these are what is wrong with it.
                if messages.is_empty() {
                    let what = format!("messages is empty ({})", error.message());
                    return Err(Error::invalid_argument(what));
                }
                check_size("messages", input.messages)?;
                let Some((plain, what)) = with_plain_contents(messages) else { return Err(error) };
                let others = variables.into_iter().filter(|(name, _)| *name != "messages");
                let plain = ("messages", Variable::Json(&plain));
                let variables = others.chain([plain]).collect();
                Err(match template.render(&variables, now) {
                    Ok(_) => Error::invalid_argument(what),
                    Err(_) => error,
                })
            }
            outcome => outcome,
        }
    }
}

/// The roles that conversations have everywhere. A template may still ignore one of them on purpose.
const COMMON_ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Returns the conversation with a string for every content, and a sentence about the first one
/// that is not one.
fn with_plain_contents(messages: &[Value]) -> Option<(Value, String)> {
    let mut plain = messages.to_vec();
    let mut first = None;
    for (index, message) in plain.iter_mut().enumerate() {
        let Value::Object(message) = message else { continue };
        let what = match message.get("content") {
            Some(Value::String(_)) => continue,
            Some(Value::Array(_)) => {
                "is a list, and this model's template takes a string: join the texts of its parts"
            }
            None | Some(Value::Null) => "is missing, and this model's template takes a string",
            Some(_) => "is not a string",
        };
        message.insert("content".to_owned(), Value::String(String::new()));
        first.get_or_insert_with(|| format!("messages[{index}].content {what}"));
    }
    first.map(|what| (Value::Array(plain), what))
}

/// Returns a sentence about a message of which the rendered `text` says nothing though it should:
/// templates skip roles that they do not know ("usr") and write nothing for a content that is
/// missing, and the model answers to half a conversation. Transformers renders such conversations
/// silently, so they are no errors.
pub fn what_was_left_out(messages: &Value, text: &str) -> Option<String> {
    let messages = messages.as_array()?;
    messages.iter().enumerate().find_map(|(index, message)| {
        let string = |name: &str| message.get(name).and_then(Value::as_str).unwrap_or_default();
        let (role, content) = (string("role"), string("content").trim());
        if role == "user" && message.get("content").is_none() {
            return Some(format!("messages[{index}] has no \"content\""));
        }
        let is_missing = !content.is_empty() && !text.contains(content);
        (is_missing && !COMMON_ROLES.contains(&role)).then(|| {
            let role = super::shortened(role);
            format!("messages[{index}] has the role \"{role}\", which the model's chat template leaves out")
        })
    })
}

/// Returns the texts of a content that is a list of nothing else.
fn texts_of(content: &Value) -> Option<Vec<&str>> {
    let parts = content.as_array().filter(|parts| !parts.is_empty())?;
    let text = |part: &'_ Value| part.get("type").and_then(Value::as_str) == Some("text");
    parts
        .iter()
        .map(|part| part.get("text").and_then(Value::as_str).filter(|_| text(part)))
        .collect()
}

fn is_identifier(name: &str) -> bool {
    let mut characters = name.chars();
    characters.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && characters.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The most bytes of `chat_template.jinja` that a reader of a folder should read.
pub const MAX_TEMPLATE_BYTES: usize = MAX_SOURCE_BYTES;
