//! Finds tags in a text of which more may come.

/// The spellings of the tags around thoughts.
pub(super) const THINK_TAGS: [(&str, &str); 2] = [("<think>", "</think>"), ("[THINK]", "[/THINK]")];

/// The tags and marks with which calls of tools are written.
pub(super) const CALL: &str = "<tool_call>";
pub(super) const END_OF_CALL: &str = "</tool_call>";
pub(super) const FUNCTION: &str = "<function=";
pub(super) const MARK: &str = "[TOOL_CALLS]";
pub(super) const ID_MARK: &str = "[CALL_ID]";
pub(super) const ARGUMENTS_MARK: &str = "[ARGS]";
pub(super) const CODE_MARK: &str = "<|python_tag|>";

/// The position of one of several tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The tag of this number begins at this byte.
    At(usize, usize),
    /// From this byte on the text may become a tag.
    Maybe(usize),
    /// There is none.
    Nowhere,
}

/// Finds the first tag. `is_whole`: nothing follows the text.
pub(super) fn find(text: &str, tags: &[&str], is_whole: bool) -> Found {
    for (at, byte) in text.bytes().enumerate() {
        // All tags begin with an ASCII character, before which a text can be cut.
        if !tags.iter().any(|tag| tag.as_bytes().first() == Some(&byte)) {
            continue;
        }
        let rest = text.get(at..).unwrap_or_default();
        if let Some(number) = tags.iter().position(|tag| rest.starts_with(tag)) {
            return Found::At(at, number);
        }
        if !is_whole && tags.iter().any(|tag| tag.starts_with(rest)) {
            return Found::Maybe(at);
        }
    }
    Found::Nowhere
}

/// Whether a text begins with a tag: `None` if it may when more has come.
pub(super) fn begins(text: &str, tag: &str, is_whole: bool) -> Option<bool> {
    if text.starts_with(tag) {
        return Some(true);
    }
    (is_whole || !tag.starts_with(text)).then_some(false)
}
