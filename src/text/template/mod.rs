//! Runs untrusted Jinja templates.
//!
//! minijinja bounds the number of instructions and nothing else: one instruction can double a
//! string, compare two nested lists for hours, or pad to a gigabyte. So nothing of minijinja that
//! makes or walks a value is reachable from a template here. It parses; `rewrite.rs` then builds
//! another syntax tree in which every operator, index, slice, output, assignment to a namespace and
//! loop goes through a function of our own; that tree is compiled and run by minijinja. The
//! functions (`operators.rs`, `filters.rs`, `methods.rs`, `functions.rs`) draw on one
//! [`budget::Budget`] of work and memory, which ends a template with an error.
//!
//! Source, parsing and running also need a deep stack (chains such as `not not not ...` recurse),
//! so all of it happens on a thread of its own, which ends with the rendering.

mod budget;
mod filters;
mod functions;
mod json;
mod methods;
mod namespace;
mod operators;
mod rewrite;
mod values;

use super::{guarded, shortened};
use crate::error::{check_room, Error, ErrorKind, Result};
use crate::threads::run_apart;
use budget::{Budget, NoMemory};
use minijinja::machinery::{eval, make_string_output, parse, CodeGenerator};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment};
use std::sync::Arc;
use std::time::SystemTime;

/// The longest template source, in bytes. The longest published ones have about 20 KiB.
pub(super) const MAX_SOURCE_BYTES: usize = 64 << 10;
/// The bytes of memory that syntax trees and instructions take for each byte of the source, at most.
const ROOM_PER_SOURCE_BYTE: usize = 512;
/// The longest rendered text, and the longest intermediate string, in bytes.
pub(super) const MAX_OUTPUT_BYTES: usize = 16 << 20;
/// The limit of minijinja's instructions. The rewriting adds up to one for each of the template's.
const FUEL: u64 = 2_000_000;
/// The stack of a thread that renders, enough for the deepest chain that fits into
/// [`MAX_SOURCE_BYTES`] and for the deepest value that the budget pays for; committed as it is used.
const RENDER_STACK_BYTES: usize = 256 << 20;
/// The stack of a thread that only compiles: for each byte of the source, and for short ones.
const CHECK_STACK_PER_BYTE: usize = RENDER_STACK_BYTES / MAX_SOURCE_BYTES;
const CHECK_STACK_BYTES: usize = 1 << 20;

/// The variables that a template sees: names and JSON values.
pub(super) type Variables<'a> = Vec<(&'a str, Variable<'a>)>;

/// One variable of a template.
pub(super) enum Variable<'a> {
    Json(&'a serde_json::Value),
    Text(&'a str),
    Flag(bool),
}

/// Checks that a template can be compiled.
pub(super) fn check(source: &str) -> Result<()> {
    let per_source = source.len().min(MAX_SOURCE_BYTES) * CHECK_STACK_PER_BYTE;
    on_own_thread(per_source + CHECK_STACK_BYTES, || compile_and(source, |_, _| Ok(())))
}

/// Renders a template. `now`: the time that `strftime_now` gives.
pub(super) fn render(source: &str, variables: &Variables<'_>, now: SystemTime) -> Result<String> {
    on_own_thread(RENDER_STACK_BYTES, || {
        compile_and(source, |generator, budget| {
            let (instructions, blocks) = generator.finish();
            let env = environment(budget, now);
            let context = Value::from_pairs(variables.iter().map(|(name, variable)| {
                let value = match variable {
                    Variable::Json(json) => values::from_json(json),
                    Variable::Text(text) => Value::from(*text),
                    Variable::Flag(flag) => Value::from(*flag),
                };
                (Value::from(*name), value)
            }));
            let mut text = String::new();
            let outcome = {
                let mut output = make_string_output(&mut text);
                eval(&env, &instructions, context, &blocks, &mut output, AutoEscape::None).map(drop)
            };
            budget.empty_kept();
            outcome.map_err(|e| template_error(&e))?;
            if text.len() > MAX_OUTPUT_BYTES {
                return Err(Error::new(
                    ErrorKind::Template,
                    format!("the chat template's text is longer than {MAX_OUTPUT_BYTES} bytes"),
                ));
            }
            Ok(text)
        })
    })
}

/// Parses, rewrites and compiles, and hands the result to `then`. All trees are dropped while the
/// thread's deep stack exists.
fn compile_and<T>(
    source: &str,
    then: impl FnOnce(CodeGenerator<'_>, &Arc<Budget>) -> Result<T>,
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
    let budget = Arc::new(Budget::new());
    let source = rewrite::without_generation_tags(source);
    // These are the settings of Transformers' `_compile_jinja_template`
    // (utils/chat_template_utils.py).
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|e| template_error(&e))?;
    let tree = parse(&source, "chat_template", syntax).map_err(|e| template_error(&e))?;
    let tree = rewrite::rewrite(&tree)?;
    let mut generator = CodeGenerator::new("chat_template", &source);
    generator.compile_stmt(&tree);
    then(generator, &budget)
}

fn environment(budget: &Arc<Budget>, now: SystemTime) -> Environment<'static> {
    let mut env = Environment::empty();
    env.set_fuel(Some(FUEL));
    operators::register(&mut env, budget);
    filters::register(&mut env, budget);
    functions::register(&mut env, budget, now);
    methods::register(&mut env, budget);
    env
}

/// Runs `body` on a fresh thread with a stack of its own.
fn on_own_thread<T: Send>(
    stack_bytes: usize,
    body: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    run_apart("xserv-template", stack_bytes, || {
        guarded(ErrorKind::Template, "the chat template fails", body)
    })
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
    use super::{budget, template_error};
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
