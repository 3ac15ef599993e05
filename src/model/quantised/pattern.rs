//! Modules that a config names: by name, by part of a name, or by regular expression.
//!
//! The expressions are untrusted. Their number and length, the size of what they are compiled to
//! and the steps of a search are limited, so that a hostile one is refused, not waited for.

use std::cell::Cell;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::model::config::fields::Fields;
use crate::model::folder::shown_name;

/// The most entries of a list of modules; a model of a hundred layers has some hundred modules.
pub(super) const MAX_ENTRIES: usize = 1 << 14;
/// The most regular expressions of a config; published ones have a few.
const MAX_EXPRESSIONS: usize = 512;
/// The most of them that take more than a walk along a name: that repeat a counted number of times,
/// look around or refer back.
const MAX_COSTLY_EXPRESSIONS: usize = 16;
/// The most bytes of an expression.
const MAX_EXPRESSION_BYTES: usize = 1024;
/// The most bytes of all expressions of a config.
const MAX_EXPRESSION_BYTES_IN_ALL: usize = 32 << 10;
/// The most bytes that a part of an expression may be compiled to.
const MAX_COMPILED_BYTES: usize = 64 << 10;
/// The most steps that one search may take back, which only expressions that look around do.
const BACKTRACK_LIMIT: usize = 1000;

/// The remaining budget of all expressions of a config.
pub(super) struct Budget {
    expressions: Cell<usize>,
    costly: Cell<usize>,
    bytes: Cell<usize>,
}

impl Default for Budget {
    fn default() -> Self {
        Budget {
            expressions: Cell::new(MAX_EXPRESSIONS),
            costly: Cell::new(MAX_COSTLY_EXPRESSIONS),
            bytes: Cell::new(MAX_EXPRESSION_BYTES_IN_ALL),
        }
    }
}

impl Budget {
    /// Counts one more expression; returns false if that is more than is left.
    fn take(&self, text: &str) -> bool {
        let left = |cell: &Cell<usize>, n: usize| {
            cell.get().checked_sub(n).map(|left| cell.set(left)).is_some()
        };
        left(&self.expressions, 1)
            && left(&self.bytes, text.len())
            && left(&self.costly, usize::from(is_costly(text)))
    }
}

/// Whether matching may take more than one walk along the name, or compiling more than one along
/// the expression.
fn is_costly(text: &str) -> bool {
    let rest_after = |mark: &str| -> Vec<&str> {
        text.match_indices(mark).filter_map(|(at, _)| text.get(at + mark.len()..)).collect()
    };
    ["{", "*+", "++", "?+"].iter().any(|mark| text.contains(mark))
        || rest_after("(?").iter().any(|rest| !rest.starts_with(':'))
        || rest_after("\\").iter().any(|rest| {
            let escaped = |c: char| c.is_ascii_alphanumeric() && !"dDwWsS".contains(c);
            rest.starts_with(escaped)
        })
}

/// A regular expression for the names of modules.
#[derive(Clone, Debug)]
pub(super) struct Expression {
    /// The place in the config, for messages.
    place: String,
    text: String,
    regex: fancy_regex::Regex,
}

impl PartialEq for Expression {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Expression {
    /// Compiles `text`, which stands at `place`.
    pub fn new(place: &str, text: &str, budget: &Budget) -> Result<Self> {
        let refuse =
            |why: &str| Error::invalid_file(format!("{place}: \"{}\" {why}", shown_name(text)));
        if text.len() > MAX_EXPRESSION_BYTES {
            return Err(refuse(&format!("has more than {MAX_EXPRESSION_BYTES} bytes")));
        }
        if !budget.take(text) {
            return Err(refuse(&format!(
                "is one too many: a config may have {MAX_EXPRESSIONS} regular expressions of \
                 {MAX_EXPRESSION_BYTES_IN_ALL} bytes in all, {MAX_COSTLY_EXPRESSIONS} of them with counts or \
                 looks ahead"
            )));
        }
        let regex = fancy_regex::RegexBuilder::new(text)
            .backtrack_limit(BACKTRACK_LIMIT)
            .delegate_size_limit(MAX_COMPILED_BYTES)
            .delegate_dfa_size_limit(MAX_COMPILED_BYTES)
            .build()
            .map_err(|e| {
                refuse(&format!("is no regular expression: {}", shown_name(&e.to_string())))
            })?;
        Ok(Expression { place: place.to_owned(), text: text.to_owned(), regex })
    }

    /// Whether the expression matches the beginning of the name, as Python's `re.match` does: from the
    /// first character on, and not necessarily to the last.
    pub fn matches(&self, module: &str) -> Result<bool> {
        // The first match of all begins at 0 if any does, so the expression need not be anchored,
        // which a stray parenthesis in it could undo.
        Ok(self.first(module)? == Some(0))
    }

    /// Whether the expression matches anywhere in the name, as Python's `re.search` does.
    pub fn is_in(&self, module: &str) -> Result<bool> {
        Ok(self.first(module)?.is_some())
    }

    /// Returns where the first match begins.
    fn first(&self, module: &str) -> Result<Option<usize>> {
        let found = self.regex.find(module).map_err(|_| {
            Error::invalid_file(format!(
                "{}: the regular expression \"{}\" takes too long on {}",
                self.place,
                shown_name(&self.text),
                shown_name(module)
            ))
        })?;
        Ok(found.map(|found| found.start()))
    }
}

/// Returns the list of strings `name`, or `None` if it is absent.
pub(super) fn optional_names(fields: Fields<'_>, name: &str) -> Result<Option<Vec<String>>> {
    match fields.get(name) {
        None => Ok(None),
        Some(value) => names_of(value).map(Some).ok_or_else(|| wrong_names(fields, name)),
    }
}

/// Returns the list of strings `name`, which must be there.
pub(super) fn names(fields: Fields<'_>, name: &str) -> Result<Vec<String>> {
    optional_names(fields, name)?.ok_or_else(|| fields.missing(name))
}

fn wrong_names(fields: Fields<'_>, name: &str) -> Error {
    fields.wrong(name, &format!("a list of at most {MAX_ENTRIES} strings"))
}

/// Returns a value that is a list of strings.
pub(super) fn names_of(value: &Value) -> Option<Vec<String>> {
    let list = value.as_array().filter(|list| list.len() <= MAX_ENTRIES)?;
    list.iter().map(|name| name.as_str().map(str::to_owned)).collect()
}

/// Whether `key` occurs in a module's name as one or several whole parts between dots.
pub(super) fn has_parts(module: &str, key: &str) -> bool {
    let ends = |at: usize| at == 0 || at == module.len();
    let dot_before = |at: usize| module.get(..at).is_some_and(|s| s.ends_with('.'));
    let dot_after = |at: usize| module.get(at..).is_some_and(|s| s.starts_with('.'));
    !key.is_empty()
        && module.match_indices(key).any(|(begin, found)| {
            let end = begin + found.len();
            (ends(begin) || dot_before(begin)) && (ends(end) || dot_after(end))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(text: &str, module: &str) -> bool {
        let expression = Expression::new("here", text, &Budget::default()).expect("an expression");
        expression.matches(module).expect("a quick search")
    }

    #[test]
    fn an_expression_matches_the_beginning() {
        assert!(matches("model", "model.layers.0"));
        assert!(!matches("layers", "model.layers.0"));
        assert!(matches(".*layers", "model.layers.0"));
        assert!(matches(r".*\.1\.", "model.layers.1.mlp"));
        assert!(!matches(r".*\.1\.", "model.layers.11.mlp"));
        assert!(matches("model$|model", "model.layers"));
        assert!(matches(r"^(?!.*self_attn).*mlp", "model.layers.1.mlp.up_proj"));
        assert!(!matches(r"^(?!.*self_attn)", "model.layers.1.self_attn.q_proj"));
        assert!(matches("", "model"));
    }

    #[test]
    fn hostile_expressions_are_refused() {
        let module = "model.layers.3.mlp.down_proj";
        let deep = "(".repeat(1000);
        let long = "a".repeat(MAX_EXPRESSION_BYTES + 1);
        for text in ["(", "[", r"\", "(?:(?:a{1000}){1000}){1000}", "a**b(", &deep, &long] {
            let error = Expression::new("config.json: ignore", text, &Budget::default())
                .expect_err("must be refused");
            assert!(error.message().starts_with("config.json: ignore"), "{error}");
            assert!(error.message().len() < 500, "{error}");
        }
        let slow =
            Expression::new("config.json: ignore", r"(?=(\w|\.|\w\w)*!)(a)\1", &Budget::default())
                .expect("an expression");
        let slower =
            Expression::new("here", r"(?:(?:(?!x)\w|\.|(?!x)\w\w)*)*!", &Budget::default());
        for expression in [Ok(slow), slower] {
            let answer = expression.and_then(|expression| expression.matches(module));
            assert!(!matches!(answer, Ok(true)));
        }
        let budget = Budget::default();
        let refused = (0..=MAX_EXPRESSIONS)
            .find(|i| Expression::new("here", &format!("{i}"), &budget).is_err());
        assert_eq!(refused, Some(MAX_EXPRESSIONS));
        let budget = Budget::default();
        let refused =
            (0..).find(|i| Expression::new("here", &format!("(?!{i})"), &budget).is_err());
        assert_eq!(refused, Some(MAX_COSTLY_EXPRESSIONS));
    }

    #[test]
    fn parts_are_whole() {
        let module = "model.layers.1.mlp.gate_proj";
        for key in ["model", "model.layers.1", "layers.1.mlp", "gate_proj", "mlp", module] {
            assert!(has_parts(module, key), "{key}");
        }
        for key in ["model.layers.1.mlp.gate", "gate", "proj", "odel", "layers.11", "", "."] {
            assert!(!has_parts(module, key), "{key}");
        }
        assert!(has_parts("gate.gate_proj.gate", "gate"));
        assert!(!has_parts("model.layers.10", "model.layers.1"));
    }
}
