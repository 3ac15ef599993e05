//! Answers taken apart: by which rules, for requests and for texts that a program has.

use std::sync::Arc;

use super::engine::Engine;
use super::generate::random_seed;
use super::request::{AnswerFormat, Prompt, Request, ToolChoice};
use crate::error::{Error, Result};
use crate::text::{
    format_of, parse_tools, start_of, Answer, AnswerRules, AnswerStart, ToolForm, ToolTypes,
};

/// The last tokens of a prompt, in which an open thought is looked for.
const MAX_LOOKED_AT: usize = 8192;

/// A text that a model has generated, of which only the text is left.
#[derive(Clone, Copy, Debug)]
pub struct Response<'a> {
    /// The text, best with its special tokens.
    pub text: &'a str,
    /// The prompt before it, or the end of that.
    pub prompt: Option<&'a str>,
    /// The tools, as JSON, for the types of parameters.
    pub tools: Option<&'a str>,
    /// How calls are written.
    pub format: AnswerFormat,
}

impl Engine {
    /// The form in which the model writes calls of tools.
    pub(super) fn tool_form(&self) -> ToolForm {
        let template = self.chat_template().ok().map(|template| template.source());
        let tokenizer = self.tokenizer().ok();
        format_of(template, |token| {
            tokenizer.is_some_and(|tokenizer| tokenizer.token_to_id(token).is_some())
        })
    }

    /// Where an answer begins that goes on with a prompt of these tokens.
    pub(super) fn answer_start(&self, prompt: &[u32]) -> Result<AnswerStart> {
        let tail = prompt.len().saturating_sub(MAX_LOOKED_AT);
        let text = self.tokenizer()?.decode(prompt.get(tail..).unwrap_or_default(), false)?;
        Ok(start_of(&text))
    }

    /// How the answers to a request are taken apart, whose prompt is these tokens.
    pub(super) fn answer_rules(
        &self,
        request: &Request<'_>,
        prompt: &[u32],
    ) -> Result<Option<AnswerRules>> {
        let Some(format) = request.answer_format else { return Ok(None) };
        let shown = request.shown_prompt();
        let tools = match shown {
            Prompt::Chat(chat) => chat.tools,
            Prompt::Text { .. } | Prompt::TokenIds(_) => None,
        };
        let types = types_of(tools)?;
        let form = match (format, shown) {
            // Calls are neither asked for nor read, however they are written.
            _ if request.tool_choice == ToolChoice::None => ToolForm::None,
            (AnswerFormat::Named(form), _) => form,
            // A model that quotes a call means none.
            (AnswerFormat::Auto, Prompt::Chat(_)) if types.is_empty() => ToolForm::None,
            (AnswerFormat::Auto, Prompt::Chat(_)) => self.tool_form(),
            // Whether there are tools is not known; JSON may be an answer, a tag is none.
            (AnswerFormat::Auto, _) => match self.tool_form() {
                ToolForm::BareJson => ToolForm::None,
                form => form,
            },
        };
        let start = self.answer_start(prompt)?;
        Ok(Some(AnswerRules { form, start, types: Arc::new(types), id_seed: random_seed() }))
    }
}

fn types_of(tools: Option<&str>) -> Result<ToolTypes> {
    let tools = tools.map(|json| parse_tools(json.as_bytes())).transpose()?;
    Ok(tools.map_or_else(ToolTypes::default, |tools| ToolTypes::of(&tools)))
}

/// Takes a text apart. `engine`: whose text it is, where the format is not named.
pub fn parse_response(engine: Option<&Engine>, response: &Response<'_>) -> Result<Answer> {
    let form = match (response.format, engine) {
        (AnswerFormat::Named(form), _) => form,
        (AnswerFormat::Auto, Some(engine)) => engine.tool_form(),
        (AnswerFormat::Auto, None) => {
            return Err(Error::invalid_argument(
                "the format of the answer can be found out with a model only: give one, or name the format",
            ))
        }
    };
    let start = match response.prompt {
        Some(prompt) => start_of(prompt),
        // A thought that ends was begun.
        None if AnswerRules::closes_a_thought(response.text) => AnswerStart::InThought,
        None => AnswerStart::Open,
    };
    let types = Arc::new(types_of(response.tools)?);
    Ok(AnswerRules { form, start, types, id_seed: random_seed() }.parse(response.text))
}
