//! Turns prompts into token ids.

use super::engine::Engine;
use super::request::{ChatPrompt, Prompt};
use crate::error::{try_with_capacity, Error, ErrorKind, Result};
use crate::text::{
    parse_messages, parse_tools, parse_variables, what_was_left_out, ChatInput, Conversation,
    Marks, ShouldStop,
};

/// Makes the error for a prompt of which `num_tokens` tokens were counted before its end.
fn too_long(num_tokens: usize, limit: usize) -> Error {
    Error::new(
        ErrorKind::ContextFull,
        format!("the prompt has more than {num_tokens} tokens, but the context holds {limit}"),
    )
}

impl Engine {
    /// Returns the token ids of a text, as of a prompt. Ends with [`ErrorKind::Cancelled`] if the
    /// model is freed meanwhile.
    pub fn tokenize(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<u32>> {
        let is_freed = || self.is_closed();
        let all = usize::MAX;
        let tokenizer = self.tokenizer()?;
        Ok(tokenizer.encode_prompt(text, add_special, parse_special, all, &is_freed)?.0)
    }

    /// Renders a conversation with the model's template.
    pub fn apply_chat_template(&self, chat: &ChatPrompt<'_>) -> Result<String> {
        self.render_chat(&self.read_chat(chat)?, chat.add_generation_prompt)
    }

    /// Reads the JSON of a conversation.
    fn read_chat(&self, chat: &ChatPrompt<'_>) -> Result<Conversation> {
        let template = self.chat_template()?;
        let mut messages = parse_messages(chat.messages.as_bytes())?;
        template.join_parts(&mut messages, self.special_tokens())?;
        let tools = chat.tools.map(|json| parse_tools(json.as_bytes())).transpose()?;
        let variables = chat.variables.map(|json| parse_variables(json.as_bytes())).transpose()?;
        Ok(Conversation { messages, tools, variables })
    }

    fn render_chat(&self, input: &Conversation, add_generation_prompt: bool) -> Result<String> {
        let text = self.chat_template()?.render(&ChatInput {
            messages: &input.messages,
            tools: input.tools.as_ref(),
            variables: input.variables.as_ref(),
            add_generation_prompt,
            special_tokens: self.special_tokens(),
        })?;
        if let Some(remark) = what_was_left_out(&input.messages, &text) {
            self.service().remark(remark);
        }
        Ok(text)
    }

    /// Returns the token ids of a prompt, checked against the vocabulary and the context. `should_stop` ends
    /// the work with [`ErrorKind::Cancelled`] by returning true.
    pub(super) fn prompt_ids(
        &self,
        prompt: &Prompt<'_>,
        should_stop: &ShouldStop<'_>,
    ) -> Result<Vec<u32>> {
        let ids = match prompt {
            Prompt::Text { text, add_special, parse_special } => {
                self.encode_prompt(text, *add_special, *parse_special, should_stop)?
            }
            Prompt::TokenIds(given) => {
                self.check_context(given.len())?;
                let mut ids = try_with_capacity(given.len(), "the prompt's token ids")?;
                ids.extend_from_slice(given);
                ids
            }
            Prompt::Chat(chat) => {
                self.encode_chat(chat, self.max_context_tokens() as usize, should_stop)?
            }
        };
        self.check_tokens(&ids)?;
        Ok(ids)
    }

    /// Returns the token ids of a conversation, as of a prompt.
    pub fn tokenize_chat(&self, chat: &ChatPrompt<'_>) -> Result<Vec<u32>> {
        self.encode_chat(chat, usize::MAX, &|| self.is_closed())
    }

    fn encode_chat(
        &self,
        chat: &ChatPrompt<'_>,
        limit: usize,
        should_stop: &ShouldStop<'_>,
    ) -> Result<Vec<u32>> {
        let tokenizer = self.tokenizer()?;
        let mut input = self.read_chat(chat)?;
        // Without a single spelling of a special token in it, the conversation is rendered as it is.
        let marks =
            if chat.parse_special { Marks::default() } else { tokenizer.mark(&mut input)? };
        let text = self.render_chat(&input, chat.add_generation_prompt)?;
        // The template writes the special tokens itself.
        let (ids, is_whole) = tokenizer.encode_marked(&text, &marks, limit, should_stop)?;
        if is_whole {
            return Ok(ids);
        }
        Err(too_long(ids.len(), limit))
    }

    /// Returns the tokens of a text. Stops as soon as the text is known not to fit into the
    /// context, so that refusing ten megabytes does not take seconds.
    fn encode_prompt(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
        should_stop: &ShouldStop<'_>,
    ) -> Result<Vec<u32>> {
        let limit = self.max_context_tokens() as usize;
        let tokenizer = self.tokenizer()?;
        let (ids, whole) =
            tokenizer.encode_prompt(text, add_special, parse_special, limit, should_stop)?;
        if whole {
            return Ok(ids);
        }
        Err(too_long(ids.len(), limit))
    }

    /// Checks that there is at least one id, that all are in the vocabulary, and that they fit into
    /// the context.
    pub(super) fn check_tokens(&self, ids: &[u32]) -> Result<()> {
        if ids.is_empty() {
            return Err(Error::invalid_argument("the prompt has no tokens"));
        }
        self.check_context(ids.len())?;
        let vocab_size = self.shape().vocab_size;
        match ids.iter().position(|id| *id as usize >= vocab_size) {
            Some(at) => Err(Error::invalid_argument(format!(
                "token id {} at position {at} of the prompt is outside the vocabulary of {vocab_size}",
                ids.get(at).copied().unwrap_or_default()
            ))),
            None => Ok(()),
        }
    }

    fn check_context(&self, num_tokens: usize) -> Result<()> {
        let limit = self.max_context_tokens();
        if num_tokens as u64 <= limit {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::ContextFull,
            format!("the prompt has {num_tokens} tokens, but the context holds {limit}"),
        ))
    }
}
