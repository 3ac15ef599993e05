//! The rules by which an answer is read.

use std::sync::Arc;

use super::response_template::ResponseTemplate;
use super::tag::{ARGUMENTS_MARK, CALL, CODE_MARK, END_OF_CALL, ID_MARK, MARK, THINK_TAGS};
use super::types::ToolTypes;

/// The form in which a model writes calls of tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolForm {
    /// It writes none.
    #[default]
    None,
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5 and Qwen3.
    JsonTags,
    /// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`:
    /// Qwen3-Coder, and Qwen3.5 and later. (The form before is taken too.)
    XmlTags,
    /// `{"name": ..., "parameters": {...}}` without tags, or after `<|python_tag|>`: Llama 3.
    BareJson,
    /// `[TOOL_CALLS]` and a list of such objects, or a name and arguments: Mistral.
    MarkedJson,
}

/// The part in which an answer begins, which its prompt determines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AnswerStart {
    /// Before anything: the model opens a thought, or does not.
    #[default]
    Open,
    /// Within a thought that the prompt has opened.
    InThought,
    /// After a thought that the prompt has closed.
    AfterThought,
}

/// The rules by which the answers of a request are read.
#[derive(Clone, Debug, Default)]
pub struct AnswerRules {
    /// The form in which calls are written.
    pub form: ToolForm,
    /// The part in which the answer begins.
    pub start: AnswerStart,
    /// The parameters of the tools, as far as they are known.
    pub types: Arc<ToolTypes>,
    /// The seed of the ids of calls: other seeds give other ids.
    pub id_seed: u64,
    /// The response template of the model, which is followed in the place of `form` and `start`.
    pub template: Option<TemplateRules>,
}

/// The rules of a response template for reading an answer.
#[derive(Clone, Debug)]
pub struct TemplateRules {
    /// The template.
    pub template: Arc<ResponseTemplate>,
    /// The prompt from the beginning of the answer's turn on: see [`ResponseTemplate::begun`].
    pub begun: String,
    /// Whether calls of tools are looked for; if not, they are content.
    pub reads_calls: bool,
}

impl AnswerRules {
    /// Whether a special token is one that says what the text around it is.
    pub(super) fn is_mark(&self, token: &str) -> bool {
        if let Some(template) = &self.template {
            return template.template.is_mark(token);
        }
        [CALL, END_OF_CALL, MARK, ID_MARK, ARGUMENTS_MARK, CODE_MARK].contains(&token)
            || THINK_TAGS.iter().any(|(open, close)| [*open, *close].contains(&token))
    }

    /// Whether a text ends a thought that it has not begun.
    pub fn closes_a_thought(text: &str) -> bool {
        THINK_TAGS.iter().any(|(open, close)| {
            text.find(close).is_some_and(|end| !text.get(..end).unwrap_or_default().contains(open))
        })
    }

    /// Returns the id of the call with this number.
    pub(super) fn id_of(&self, index: usize) -> String {
        const LETTERS: &[u8; 62] =
            b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        // The templates of models with this form take ids of nine letters and digits only.
        let (prefix, len) = if self.form == ToolForm::MarkedJson { ("", 9) } else { ("call_", 16) };
        let mut state = self.id_seed ^ (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let letters = (0..len).map(|_| {
            // SplitMix64 (Steele, Lea and Flood 2014).
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let place = ((mixed ^ (mixed >> 31)) % LETTERS.len() as u64) as usize;
            LETTERS.get(place).copied().map_or('0', char::from)
        });
        prefix.chars().chain(letters).collect()
    }
}
