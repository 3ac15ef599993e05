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
mod operators;
mod rewrite;
mod values;

use super::{guarded, shortened};
use crate::error::{Error, ErrorKind, Result};
use crate::thread_state::SignalsBlocked;
use budget::Budget;
use minijinja::machinery::{eval, make_string_output, parse, CodeGenerator};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment};
use std::sync::Arc;

/// The longest template source, in bytes. The longest published ones have about 20 KiB.
pub(super) const MAX_SOURCE_BYTES: usize = 64 << 10;
/// The longest rendered text, and the longest intermediate string, in bytes.
pub(super) const MAX_OUTPUT_BYTES: usize = 16 << 20;
/// The limit of minijinja's instructions. The rewriting adds up to one for each of the template's.
const FUEL: u64 = 2_000_000;
/// The stack of the thread, enough for the deepest chain that fits into [`MAX_SOURCE_BYTES`];
/// committed as it is used.
const STACK_BYTES: usize = 256 << 20;

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
    on_own_thread(|| compile_and(source, |_, _| Ok(())))
}

/// Renders a template.
pub(super) fn render(source: &str, variables: &Variables<'_>) -> Result<String> {
    on_own_thread(|| {
        compile_and(source, |generator, budget| {
            let (instructions, blocks) = generator.finish();
            let env = environment(budget);
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
            budget.release_namespaces();
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

fn environment(budget: &Arc<Budget>) -> Environment<'static> {
    let mut env = Environment::empty();
    env.set_fuel(Some(FUEL));
    operators::register(&mut env, budget);
    filters::register(&mut env, budget);
    functions::register(&mut env, budget);
    methods::register(&mut env, budget);
    env
}

/// Runs `body` on a fresh thread with a deep stack.
fn on_own_thread<T: Send>(body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let _blocked = SignalsBlocked::new();
        let thread = std::thread::Builder::new()
            .name("xserv-template".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, || guarded(ErrorKind::Template, "the chat template fails", body))
            .map_err(|e| {
                Error::new(
                    ErrorKind::OutOfMemory,
                    format!("cannot start a thread with {STACK_BYTES} bytes of stack for the chat template: {e}"),
                )
            })?;
        thread.join().unwrap_or_else(|_| Err(Error::internal("the template thread panicked")))
    })
}

/// Makes a sentence from minijinja's error: its message, the line, and the innermost cause.
fn template_error(error: &minijinja::Error) -> Error {
    use std::fmt::Write as _;
    let mut innermost = error;
    while let Some(cause) =
        std::error::Error::source(innermost).and_then(|e| e.downcast_ref::<minijinja::Error>())
    {
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
