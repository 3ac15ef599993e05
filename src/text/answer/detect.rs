//! Detects the form of a model's answers, and where one begins.

use super::rules::{AnswerStart, ToolForm};
use super::tag::THINK_TAGS;

/// The beginnings of an assistant's turn: what is before the last one is not the model's.
const TURNS: [&str; 6] = [
    "<|im_start|>assistant",
    "<|start_header_id|>assistant<|end_header_id|>",
    "<|assistant|>",
    "<\u{ff5c}Assistant\u{ff5c}>",
    "[/INST]",
    "<start_of_turn>model",
];

/// Returns the form in which a chat template writes calls of tools, which is that in which the model
/// was taught to write them; without a template, the one for which the vocabulary has a token.
pub fn format_of(template: Option<&str>, has_token: impl Fn(&str) -> bool) -> ToolForm {
    let is_known = |mark: &str| match template {
        Some(source) => source.contains(mark),
        None => has_token(mark),
    };
    // A template with the tags of both forms describes the JSON that it does not want.
    if template.is_some_and(|source| source.contains("<function=")) {
        ToolForm::XmlTags
    } else if is_known("<tool_call>") {
        ToolForm::JsonTags
    } else if is_known("[TOOL_CALLS]") {
        ToolForm::MarkedJson
    } else if is_known("<|python_tag|>")
        || template.is_some_and(|source| {
            source.contains("<|start_header_id|>") && source.contains("parameters")
        })
    {
        ToolForm::BareJson
    } else {
        ToolForm::None
    }
}

/// Returns where an answer begins that goes on with a prompt. `prompt`: its text or the end of it.
pub fn start_of(prompt: &str) -> AnswerStart {
    let turn = TURNS.iter().filter_map(|mark| Some(prompt.rfind(mark)? + mark.len())).max();
    let own = match turn {
        Some(at) => prompt.get(at..).unwrap_or_default(),
        // Only the very end counts: a user's words about thoughts must not be taken for one.
        None => {
            let end = prompt.trim_end();
            let tags = THINK_TAGS.iter().flat_map(|(open, close)| [*open, *close]);
            let last = tags.filter(|tag| end.ends_with(tag)).max_by_key(|tag| tag.len());
            last.unwrap_or_default()
        }
    };
    let last = |tags: fn(&(&'static str, &'static str)) -> &'static str| {
        THINK_TAGS.iter().filter_map(|pair| own.rfind(tags(pair))).max()
    };
    match (last(|pair| pair.0), last(|pair| pair.1)) {
        (Some(open), close) if close.is_none_or(|close| close < open) => AnswerStart::InThought,
        (_, Some(_)) => AnswerStart::AfterThought,
        _ => AnswerStart::Open,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_prompt_says_where_the_answer_begins() {
        let turn = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n";
        for (end, expected) in [
            ("", AnswerStart::Open),
            ("<think>\n", AnswerStart::InThought),
            ("<think>\nFirst, ", AnswerStart::InThought),
            ("<think>\n\n</think>\n\n", AnswerStart::AfterThought),
            ("<think>\nYes.\n</think>\n\nIt is", AnswerStart::AfterThought),
        ] {
            assert_eq!(start_of(&format!("{turn}{end}")), expected, "{end:?}");
        }
        for (prompt, expected) in [
            ("", AnswerStart::Open),
            ("What is <think> for?", AnswerStart::Open),
            ("Solve. <think>\n", AnswerStart::InThought),
            ("Solve. <think></think>\n", AnswerStart::AfterThought),
            ("[INST]Why?[/INST][THINK]", AnswerStart::InThought),
            ("[INST]What is [THINK]?[/INST]", AnswerStart::Open),
        ] {
            assert_eq!(start_of(prompt), expected, "{prompt:?}");
        }
    }

    #[test]
    fn the_template_says_how_tools_are_called() {
        let template = |source| format_of(Some(source), |_| panic!("the template decides"));
        assert_eq!(template("<tool_call>\\n<function=NAME>"), ToolForm::XmlTags);
        assert_eq!(template("<tool_call>\\n{\\\"name\\\""), ToolForm::JsonTags);
        assert_eq!(template("[TOOL_CALLS]"), ToolForm::MarkedJson);
        assert_eq!(template("<|python_tag|>"), ToolForm::BareJson);
        assert_eq!(template("{{ messages }}"), ToolForm::None);
        assert_eq!(format_of(None, |token| token == "[TOOL_CALLS]"), ToolForm::MarkedJson);
        assert_eq!(format_of(None, |_| false), ToolForm::None);
    }
}
