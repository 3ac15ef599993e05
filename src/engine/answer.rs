//! Answers taken apart: by which rules, for requests and for texts that a program has.

use std::sync::Arc;

use super::engine::Engine;
use super::generate::random_seed;
use super::request::{AnswerFormat, Prompt, Request, ToolChoice};
use crate::error::{Error, Result};
use crate::text::{
    format_of, parse_tools, start_of, Answer, AnswerRules, AnswerStart, ResponseTemplate,
    TemplateRules, ToolForm, ToolTypes,
};

/// The last tokens of a prompt, in which an open thought is looked for.
const MAX_LOOKED_AT: usize = 8192;

/// A generated text whose token ids are not known.
#[derive(Clone, Copy, Debug)]
pub struct Response<'a> {
    /// The text, best with its special tokens.
    pub text: &'a str,
    /// The prompt before it, or the end of that.
    pub prompt: Option<&'a str>,
    /// The tools, as JSON, for the types of parameters.
    pub tools: Option<&'a str>,
    /// The format in which calls are written.
    pub format: AnswerFormat,
}

impl Engine {
    /// Returns the form in which the model writes calls of tools.
    pub(super) fn tool_form(&self) -> ToolForm {
        let template = self.chat_template().ok().map(|template| template.source());
        let tokenizer = self.tokenizer().ok();
        format_of(template, |token| {
            tokenizer.is_some_and(|tokenizer| tokenizer.token_to_id(token).is_some())
        })
    }

    /// Returns where an answer begins that continues a prompt of these tokens.
    pub(super) fn answer_start(&self, prompt: &[u32]) -> Result<AnswerStart> {
        Ok(start_of(&self.end_of_prompt(prompt)?))
    }

    /// Returns the text of the last tokens of a prompt.
    fn end_of_prompt(&self, prompt: &[u32]) -> Result<String> {
        let tail = prompt.len().saturating_sub(MAX_LOOKED_AT);
        self.tokenizer()?.decode(prompt.get(tail..).unwrap_or_default(), false)
    }

    /// Returns the response template by which answers are read where no format is named: the
    /// model's, unless it writes thoughts and calls as is known without one, which then tells the
    /// arguments of calls as they come.
    fn followed_template(&self) -> Option<&Arc<ResponseTemplate>> {
        let template = self.response_template.as_ref()?;
        let is_known = template.has_known_thoughts() && self.call_form().is_some();
        (!is_known).then_some(template)
    }

    /// Returns the rules by which the answers to a request with this prompt are taken apart.
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
        let types = Arc::new(types_of(tools)?);
        let (id_seed, prompt) = (random_seed(), self.end_of_prompt(prompt)?);
        let is_without_calls = match shown {
            // Calls are neither asked for nor read, however they are written.
            _ if request.tool_choice == ToolChoice::None => true,
            // A model that quotes a call means none.
            Prompt::Chat(_) => format == AnswerFormat::Auto && types.is_empty(),
            Prompt::Text { .. } | Prompt::TokenIds(_) => false,
        };
        if let (AnswerFormat::Auto, Some(template)) = (format, self.followed_template()) {
            let begun = template.begun(&prompt).to_owned();
            let reads_calls = !is_without_calls;
            let template = Some(TemplateRules { template: template.clone(), begun, reads_calls });
            return Ok(Some(AnswerRules { types, id_seed, template, ..AnswerRules::default() }));
        }
        let form = match (format, shown) {
            _ if is_without_calls => ToolForm::None,
            (AnswerFormat::Named(form), _) => form,
            (AnswerFormat::Auto, Prompt::Chat(_)) => self.tool_form(),
            // Whether there are tools is not known; JSON may be an answer, a tag is none.
            (AnswerFormat::Auto, _) => match self.tool_form() {
                ToolForm::BareJson => ToolForm::None,
                form => form,
            },
        };
        let start = start_of(&prompt);
        Ok(Some(AnswerRules { form, start, types, id_seed, template: None }))
    }
}

fn types_of(tools: Option<&str>) -> Result<ToolTypes> {
    let tools = tools.map(|json| parse_tools(json.as_bytes())).transpose()?;
    Ok(tools.map_or_else(ToolTypes::default, |tools| ToolTypes::of(&tools)))
}

/// Takes a text apart. `engine`: whose text it is, where the format is not named.
pub fn parse_response(engine: Option<&Engine>, response: &Response<'_>) -> Result<Answer> {
    let (types, id_seed) = (Arc::new(types_of(response.tools)?), random_seed());
    let followed = engine.filter(|_| response.format == AnswerFormat::Auto);
    if let Some(template) = followed.and_then(Engine::followed_template) {
        let begun = match response.prompt {
            Some(prompt) => template.begun(prompt).to_owned(),
            None => template.begun_before(response.text),
        };
        let template = Some(TemplateRules { template: template.clone(), begun, reads_calls: true });
        let rules = AnswerRules { types, id_seed, template, ..AnswerRules::default() };
        return Ok(rules.parse(response.text));
    }
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
    Ok(AnswerRules { form, start, types, id_seed, template: None }.parse(response.text))
}
