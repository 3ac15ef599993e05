//! Threads that keep a template compiled, and render it for one caller after the other.
//!
//! They are begun by the first rendering and end with the template. A caller takes one that is idle or
//! begins another; at its end it leaves it to others or, if there are enough, ends it. Their stacks are
//! small, so a rendering that does more than a little work, which might build lists within lists as
//! deep as that work allows, is given up, to be done again where there is a larger one.

use super::compiled::{compile_and, Compiled, Runner};
use crate::error::{ErrorKind, Result};
use crate::process::Process;
use crate::text::guarded;
use crate::threads::Thread;
use minijinja::value::Value;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// The deepest nesting of a template that is compiled on such a thread.
pub(super) const MAX_DEPTH: usize = 100;
/// The units of work of a rendering on such a thread. A list within a list costs more than 100 of them, so
/// none is nested more than 10,000 deep.
const MAX_WORK: u64 = 1_000_000;
/// The stack of such a thread: 800 bytes for each of those levels, of which dropping one takes less than
/// 200.
const STACK_BYTES: usize = 8 << 20;
/// The most threads that wait for a rendering.
const MAX_IDLE: usize = 4;

/// A rendering to be done.
pub(super) struct Job {
    pub variables: Value,
    pub now: SystemTime,
}

/// The threads of a template.
#[derive(Debug)]
pub(super) struct Renderers {
    source: Arc<str>,
    idle: Mutex<Vec<Renderer>>,
    process: Process,
}

impl Renderers {
    pub fn new(source: Arc<str>) -> Self {
        Renderers { source, idle: Mutex::default(), process: Process::current() }
    }

    /// Renders on an idle thread or on a new one. Returns nothing if the rendering takes more than is done
    /// there.
    pub fn render(&self, job: Job) -> Result<Option<String>> {
        if !self.process.is_current() {
            // The threads are the parent's, one of which may have held the lock at the fork.
            return Ok(None);
        }
        let idle = lock(&self.idle).pop();
        let renderer = match idle {
            Some(renderer) => renderer,
            None => Renderer::start(self.source.clone())?,
        };
        let Answer { text, goes_on } = renderer.render(job);
        let mut idle = lock(&self.idle);
        if goes_on && idle.len() < MAX_IDLE {
            idle.push(renderer);
        } else {
            drop(idle);
            drop(renderer);
        }
        text.transpose()
    }
}

impl Drop for Renderers {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // In a forked child the threads do not exist: waiting for them would never end.
            let idle = self.idle.get_mut().unwrap_or_else(PoisonError::into_inner);
            idle.drain(..).for_each(std::mem::forget);
        }
    }
}

/// What came of a rendering.
struct Answer {
    /// The text, or nothing if the rendering was given up.
    text: Option<Result<String>>,
    /// Whether the thread takes further renderings.
    goes_on: bool,
}

/// What a thread and the one caller that has it tell each other.
enum State {
    Idle,
    Asked(Job),
    Working,
    Answered(Answer),
    Closed,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// A thread that renders. Dropping it ends the thread.
struct Renderer {
    shared: Arc<Shared>,
    thread: Option<Thread<()>>,
}

impl std::fmt::Debug for Renderer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Renderer")
    }
}

impl Renderer {
    fn start(source: Arc<str>) -> Result<Self> {
        let shared = Arc::new(Shared { state: Mutex::new(State::Idle), changed: Condvar::new() });
        let of_thread = shared.clone();
        let thread = Thread::start("xserv-template", STACK_BYTES, move || {
            let outcome = guarded(ErrorKind::Template, "the chat template fails", || {
                compile_and(&source, |compiled| {
                    of_thread.serve(compiled);
                    Ok(())
                })
            });
            // What was asked meanwhile, or is being worked on, has no other end.
            if let Err(error) = outcome {
                of_thread.answer(Answer { text: Some(Err(error)), goes_on: false });
            }
            Ok(())
        })?;
        Ok(Renderer { shared, thread: Some(thread) })
    }

    fn render(&self, job: Job) -> Answer {
        let mut state = lock(&self.shared.state);
        if let State::Idle = *state {
            *state = State::Asked(job);
            self.shared.changed.notify_all();
        }
        loop {
            match std::mem::replace(&mut *state, State::Idle) {
                State::Answered(answer) => return answer,
                other => *state = other,
            }
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Renderer {
    fn drop(&mut self) {
        *lock(&self.shared.state) = State::Closed;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It catches every panic; there is nothing to report here.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Renders what is asked until the end.
    fn serve(&self, compiled: &Compiled<'_>) {
        let runner = Runner::new();
        while let Some(job) = self.next() {
            runner.budget().begin(MAX_WORK, job.now);
            let text = runner.run(compiled, job.variables);
            let is_given_up = text.is_err() && runner.budget().work_done() > MAX_WORK;
            // An unusual rendering may have committed much of the stack, which ends with the thread.
            let goes_on = !is_given_up;
            self.answer(Answer { text: Some(text).filter(|_| !is_given_up), goes_on });
            if !goes_on {
                return;
            }
        }
    }

    /// Waits for something to be asked. Returns nothing at the end.
    fn next(&self) -> Option<Job> {
        let mut state = lock(&self.state);
        loop {
            match std::mem::replace(&mut *state, State::Working) {
                State::Asked(job) => return Some(job),
                State::Closed => return None,
                other => *state = other,
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn answer(&self, answer: Answer) {
        let mut state = lock(&self.state);
        if !matches!(*state, State::Closed) {
            *state = State::Answered(answer);
        }
        drop(state);
        self.changed.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
