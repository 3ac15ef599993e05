//! Constrained output: texts that follow a JSON schema, a regular expression or a grammar, token by
//! token. The crate `llguidance` does the matching; here are the limits under which it works on what
//! callers hand in.
//!
//! A [`GrammarCompiler`] is made once for a vocabulary. It compiles a [`Constraint`] to a
//! [`GrammarMatcher`], which says after each token which may come next. What the crate does not
//! implement is refused, never left out: a text that a matcher has taken to its end follows the whole
//! constraint.

mod classes;
mod compiler;
mod disjoint;
mod embedded;
mod kept;
mod limits;
mod matcher;
mod numbers;
mod rewritten;
mod schema;
mod sentence;
mod vocabulary;

pub use compiler::{GrammarCompiler, ANSWER, MAX_CHOICES, MAX_CONSTRAINT_BYTES};
pub use matcher::{GrammarMatcher, Progress, TokenMask};

/// The form that a text must have.
#[derive(Clone, Debug, PartialEq)]
pub enum Constraint<'a> {
    /// A JSON value that a JSON schema allows.
    JsonSchema(&'a str),
    /// Any JSON object.
    JsonObject,
    /// A text that a regular expression matches as a whole.
    Regex(&'a str),
    /// A text of a context-free grammar in the syntax of Lark, as `llguidance` reads it.
    Grammar(&'a str),
    /// One of these texts.
    Choice(Vec<&'a str>),
}

impl Constraint<'_> {
    /// Returns its name in error messages.
    fn name(&self) -> &'static str {
        match self {
            Constraint::JsonSchema(_) => "the JSON schema",
            Constraint::JsonObject => "the JSON object",
            Constraint::Regex(_) => "the regular expression",
            Constraint::Grammar(_) => "the grammar",
            Constraint::Choice(_) => "the choices",
        }
    }
}
