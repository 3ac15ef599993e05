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
//! Parsing, running and dropping values also need a stack, as deep as chains such as `not not not
//! ...` and lists within lists go, so none of it happens on the caller's. Ordinary templates have
//! threads that keep them compiled and render for one caller after the other (`renderers.rs`). What
//! these do not take has a thread of its own with a stack for the worst, which ends with the
//! rendering.

mod budget;
mod compiled;
mod cycle;
mod filters;
mod functions;
mod json;
mod kinds;
mod methods;
mod namespace;
mod operators;
mod percent;
mod renderers;
mod rewrite;
mod source;
mod values;

pub(super) use self::compiled::MAX_SOURCE_BYTES;

use self::compiled::{compile_and, Runner};
use self::renderers::{Job, Renderers};
use super::guarded;
use crate::error::{ErrorKind, Result};
use crate::threads::run_apart;
use minijinja::value::Value;
use std::sync::Arc;
use std::time::SystemTime;

/// The stack of a thread that renders anything, enough for the deepest chain that fits into
/// [`MAX_SOURCE_BYTES`] and for the deepest value that the budget pays for; committed as it is used.
const RENDER_STACK_BYTES: usize = 256 << 20;
/// The stack of a thread that only compiles: for each byte of the source, and for short ones.
const CHECK_STACK_PER_BYTE: usize = RENDER_STACK_BYTES / MAX_SOURCE_BYTES;
const CHECK_STACK_BYTES: usize = 1 << 20;
/// The deepest nesting of variables that are converted on the stack of the caller.
const MAX_DEPTH_HERE: usize = 24;

/// The variables that a template sees: names and JSON values.
pub(super) type Variables<'a> = Vec<(&'a str, Variable<'a>)>;

/// One variable of a template.
pub(super) enum Variable<'a> {
    Json(&'a serde_json::Value),
    Text(&'a str),
    Flag(bool),
}

/// A template that can be compiled.
#[derive(Debug)]
pub(super) struct Template {
    source: Arc<str>,
    /// The threads that keep it compiled; `None` if it is nested too deeply for their stacks.
    renderers: Option<Renderers>,
}

impl Template {
    /// Checks that the template can be compiled.
    pub fn new(source: &str) -> Result<Self> {
        let per_source = source.len().min(MAX_SOURCE_BYTES) * CHECK_STACK_PER_BYTE;
        let depth = on_own_thread(per_source + CHECK_STACK_BYTES, || {
            compile_and(source, |compiled| Ok(compiled.depth))
        })?;
        let source: Arc<str> = source.into();
        let renderers = (depth <= renderers::MAX_DEPTH).then(|| Renderers::new(source.clone()));
        Ok(Template { source, renderers })
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders the template. `now`: the time that `strftime_now` gives.
    pub fn render(&self, variables: &Variables<'_>, now: SystemTime) -> Result<String> {
        if let Some(renderers) = &self.renderers {
            if let Some(variables) = context(variables, MAX_DEPTH_HERE) {
                if let Some(text) = renderers.render(Job { variables, now })? {
                    return Ok(text);
                }
            }
        }
        on_own_thread(RENDER_STACK_BYTES, || {
            compile_and(&self.source, |compiled| {
                let variables = context(variables, usize::MAX).unwrap_or_default();
                let runner = Runner::new();
                runner.budget().begin(budget::MAX_WORK, now);
                runner.run(compiled, variables)
            })
        })
    }
}

/// Returns the variables as minijinja takes them, or nothing if one is nested more than `max_depth` deep.
fn context(variables: &Variables<'_>, max_depth: usize) -> Option<Value> {
    let mut pairs = Vec::with_capacity(variables.len());
    for (name, variable) in variables {
        let value = match variable {
            Variable::Json(json) => values::from_json(json, max_depth)?,
            Variable::Text(text) => Value::from(*text),
            Variable::Flag(flag) => Value::from(*flag),
        };
        pairs.push((Value::from(*name), value));
    }
    Some(Value::from_pairs(pairs))
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
