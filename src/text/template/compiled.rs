//! Compiles a template, and runs what was compiled.

use super::budget::{Budget, NoMemory, MAX_OUTPUT_BYTES};
use super::{filters, functions, methods, operators, rewrite, source};
use crate::error::{check_room, Error, ErrorKind, Result};
use crate::text::shortened;
use minijinja::machinery::{eval, make_string_output, parse, CodeGenerator, Instructions};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The longest template source, in bytes. The longest published ones have about 20 KiB.
pub(in crate::text) const MAX_SOURCE_BYTES: usize = 64 << 10;
/// The bytes of memory that syntax trees and instructions take for each byte of the source, at most.
const ROOM_PER_SOURCE_BYTE: usize = 512;
/// The limit of minijinja's instructions. The rewriting adds up to one for each of the template's.
const FUEL: u64 = 2_000_000;

/// A template as minijinja runs it, which borrows from its source.
pub(super) struct Compiled<'a> {
    instructions: Instructions<'a>,
    blocks: BTreeMap<&'a str, Instructions<'a>>,
    /// The deepest nesting of statements and expressions.
    pub depth: usize,
}

/// What runs templates: the functions that they reach, and the budget that these draw on.
pub(super) struct Runner {
    env: Environment<'static>,
    budget: Arc<Budget>,
}

/// Parses, rewrites and compiles, and hands the result to `then`. All trees are dropped before that.
pub(super) fn compile_and<T>(
    source: &str,
    then: impl FnOnce(&Compiled<'_>) -> Result<T>,
) -> Result<T> {
    if source.len() > MAX_SOURCE_BYTES {
        return Err(Error::new(
            ErrorKind::Template,
            format!(
                "the chat template has {} bytes, at most {MAX_SOURCE_BYTES} are allowed",
                source.len()
            ),
        ));
    }
    check_room(source.len().saturating_mul(ROOM_PER_SOURCE_BYTE), "the chat template")?;
    let source = source::prepared(source)?;
    // These are the settings of Transformers' `_compile_jinja_template`
    // (utils/chat_template_utils.py).
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|e| template_error(&e))?;
    let compiled = {
        let tree = parse(&source, "chat_template", syntax).map_err(|e| template_error(&e))?;
        let (tree, depth) = rewrite::rewrite(&tree)?;
        let mut generator = CodeGenerator::new("chat_template", &source);
        generator.compile_stmt(&tree);
        let (instructions, blocks) = generator.finish();
        Compiled { instructions, blocks, depth }
    };
    then(&compiled)
}

impl Runner {
    pub fn new() -> Self {
        let budget = Arc::new(Budget::new());
        let mut env = Environment::empty();
        env.set_fuel(Some(FUEL));
        operators::register(&mut env, &budget);
        filters::register(&mut env, &budget);
        functions::register(&mut env, &budget);
        methods::register(&mut env, &budget);
        Runner { env, budget }
    }

    /// Returns the budget, to be begun before each [`Runner::run`].
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Returns the text that a template writes.
    pub fn run(&self, template: &Compiled<'_>, context: Value) -> Result<String> {
        let mut text = String::new();
        let outcome = {
            let mut output = make_string_output(&mut text);
            let Compiled { instructions, blocks, .. } = template;
            eval(&self.env, instructions, context, blocks, &mut output, AutoEscape::None).map(drop)
        };
        self.budget.empty_kept();
        outcome.map_err(|e| template_error(&e))?;
        if text.len() > MAX_OUTPUT_BYTES {
            return Err(Error::new(
                ErrorKind::Template,
                format!("the chat template's text is longer than {MAX_OUTPUT_BYTES} bytes"),
            ));
        }
        Ok(text)
    }
}

/// Makes a sentence from minijinja's error: its message, the line, and the innermost cause.
fn template_error(error: &minijinja::Error) -> Error {
    use std::fmt::Write as _;
    let mut innermost = error;
    while let Some(cause) = std::error::Error::source(innermost) {
        if cause.is::<NoMemory>() {
            return Error::new(ErrorKind::OutOfMemory, "out of memory for the chat template");
        }
        let Some(cause) = cause.downcast_ref::<minijinja::Error>() else { break };
        innermost = cause;
    }
    let mut sentence = "chat template".to_owned();
    if let Some(line) = innermost.line().or_else(|| error.line()) {
        let _ = write!(sentence, ", line {line}");
    }
    let what = match innermost.kind() {
        minijinja::ErrorKind::OutOfFuel => format!("it takes more than {FUEL} steps"),
        kind => match innermost.detail() {
            Some(detail) => shortened(detail),
            None => kind.to_string(),
        },
    };
    let _ = write!(sentence, ": {what}");
    Error::new(ErrorKind::Template, sentence)
}

#[cfg(test)]
mod tests {
    use super::super::budget;
    use super::template_error;
    use crate::error::ErrorKind;

    #[test]
    fn lack_of_memory_is_not_the_templates_fault() {
        let outer = |cause| {
            minijinja::Error::new(minijinja::ErrorKind::BadInclude, "outer").with_source(cause)
        };
        for error in [budget::no_memory(), outer(budget::no_memory())] {
            assert_eq!(template_error(&error).kind(), ErrorKind::OutOfMemory, "{error}");
        }
        for error in [budget::fail("too long"), outer(budget::fail("too long"))] {
            let told = template_error(&error);
            assert_eq!(told.kind(), ErrorKind::Template);
            assert!(told.message().contains("too long"), "{told}");
        }
    }
}
