//! Which tools an answer may, must or must not call.

use super::engine::Engine;
use super::request::{Prompt, Request, ToolChoice};
use crate::error::{Error, Result};
use crate::text::{
    parse_tools, AnswerRules, AnswerStart, CallForm, ChatInput, Constraint, Probe, ToolTypes,
};
use crate::threads::{run_apart, STACK_BYTES};
use serde_json::Value;

impl Request<'_> {
    /// Returns the prompt of the request, which shows the model no tools that it must not call.
    pub(super) fn shown_prompt(&self) -> Prompt<'_> {
        match (self.prompt, self.tool_choice) {
            (Prompt::Chat(mut chat), ToolChoice::None) => {
                chat.tools = None;
                Prompt::Chat(chat)
            }
            (prompt, _) => prompt,
        }
    }
}

impl Engine {
    /// Checks the tool choice of a request, and returns the grammar of its answers if they must be a
    /// call. `start`: where an answer begins.
    pub(super) fn call_grammar(
        &self,
        request: &Request<'_>,
        start: impl FnOnce() -> Result<AnswerStart>,
    ) -> Result<Option<String>> {
        let wanted = match request.tool_choice {
            ToolChoice::Auto => return Ok(None),
            ToolChoice::None | ToolChoice::Required => None,
            ToolChoice::Named(name) => Some(name),
        };
        let Prompt::Chat(chat) = request.prompt else {
            return Err(Error::invalid_argument("tool_choice needs messages"));
        };
        let tools = chat.tools.map(|json| parse_tools(json.as_bytes())).transpose()?;
        if request.tool_choice == ToolChoice::None {
            return Ok(None);
        }
        let tools = tools.as_ref().map(named_tools).unwrap_or_default();
        if tools.is_empty() {
            return Err(Error::invalid_argument(
                "tool_choice says that a tool must be called, but there are no tools",
            ));
        }
        let allowed: Vec<(&str, &Value)> =
            tools.into_iter().filter(|(name, _)| wanted.is_none_or(|it| it == *name)).collect();
        if let (Some(name), true) = (wanted, allowed.is_empty()) {
            return Err(Error::invalid_argument(format!(
                "tool_choice names {:?}, which is none of the tools",
                shortened(name)
            )));
        }
        if let (None, Some(name)) = (wanted, repeated(&allowed)) {
            return Err(Error::invalid_argument(format!(
                "tool_choice says that a tool must be called, but two of them are called {:?}",
                shortened(name)
            )));
        }
        if request.constraint.is_some() {
            return Err(Error::invalid_argument(
                "a constraint cannot be given with a tool_choice that says that a tool must be called",
            ));
        }
        let tokenizer = self.tokenizer()?;
        let form = self.call_form().ok_or_else(|| {
            Error::unsupported(
                "calls of tools cannot be enforced with this model: its chat template writes them in no form that is known",
            )
        })?;
        let start = start()?;
        // Schemas of tools may be deep, and the stack of the caller small.
        run_apart("xserv-tools", STACK_BYTES, || form.grammar(&allowed, start, tokenizer)).map(Some)
    }

    /// Returns the form in which the model writes calls, if it is known and calls can be enforced.
    pub(super) fn call_form(&self) -> Option<&CallForm> {
        self.call_form.get_or_init(|| self.find_call_form()).as_ref()
    }

    /// Learns from the chat template how calls are written; only a form that is read back counts.
    fn find_call_form(&self) -> Option<CallForm> {
        let probe = Probe::new();
        let render = |messages, add_generation_prompt| {
            let input = ChatInput {
                messages,
                tools: Some(&probe.tools),
                variables: None,
                add_generation_prompt,
                special_tokens: self.special_tokens(),
            };
            self.chat_template().and_then(|template| template.render(&input)).ok()
        };
        let asked = render(&probe.question, false)?;
        let opened = render(&probe.question, true)?;
        let form = CallForm::find(&asked, &opened, &render(&probe.call, false)?)?;
        let rules = AnswerRules {
            form: self.tool_form(),
            start: AnswerStart::AfterThought,
            types: ToolTypes::of(&probe.tools).into(),
            ..AnswerRules::default()
        };
        let answer = rules.parse(&form.example());
        let is_read = match &answer.calls[..] {
            [call] => CallForm::is_example(&call.name, &call.arguments),
            _ => false,
        };
        is_read.then_some(form)
    }
}

/// Returns the names of tools and the schemas of their parameters; null where a tool has none.
fn named_tools(tools: &Value) -> Vec<(&str, &Value)> {
    let described = tools.as_array().into_iter().flatten().filter_map(|tool| {
        let function = tool.get("function").unwrap_or(tool);
        let name = function.get("name").and_then(Value::as_str)?;
        Some((name, function.get("parameters").unwrap_or(&Value::Null)))
    });
    described.collect()
}

/// Returns a name that two tools have.
fn repeated<'a>(tools: &[(&'a str, &Value)]) -> Option<&'a str> {
    let mut names: Vec<&str> = tools.iter().map(|(name, _)| *name).collect();
    names.sort_unstable();
    names.windows(2).find_map(|pair| match pair {
        [a, b] if a == b => Some(*a),
        _ => None,
    })
}

/// Returns the beginning of a name, for a message.
fn shortened(name: &str) -> String {
    name.chars().take(128).collect()
}

/// Returns the constraint that a request has itself, or the grammar of a call that it must be.
pub(super) fn constraint_of<'a>(
    request: &'a Request<'_>,
    calls: Option<&'a str>,
) -> Option<Constraint<'a>> {
    calls.map(Constraint::Grammar).or_else(|| request.constraint.clone())
}
