//! Thoughts as parts of grammars, in Lark's EBNF.

use std::fmt::Write as _;

use super::call_values::quoted;
use super::rules::AnswerStart;
use super::tag::THINK_TAGS;
use crate::text::Tokenizer;

/// Returns the grammar of a text that begins with a thought, where the prompt has begun one or the model
/// may, and goes on with the rule `answer`; `None` if there can be no thought.
pub fn after_thought(start: AnswerStart, tokenizer: &Tokenizer, answer: &str) -> Option<String> {
    let mut rules = String::new();
    match thought(start, tokenizer, &mut rules) {
        "" => None,
        think => Some(format!("start: {think}{answer}\n{rules}")),
    }
}

/// Appends the rules of a thought, and returns what stands for it before an answer.
pub(super) fn thought(
    start: AnswerStart,
    tokenizer: &Tokenizer,
    rules: &mut String,
) -> &'static str {
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

/// Returns a text as Lark writes it, with its special tokens by their ids; nothing of an empty one.
pub(super) fn literal(text: &str, tokenizer: &Tokenizer) -> String {
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
