//! Messages go to a function that the host gives at load; the library never prints.

use super::host_call::HostCall;

/// The severity of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// Something is odd, but the call goes on.
    Warning,
    /// A choice or an action of the library.
    Info,
    /// Details for finding faults.
    Debug,
}

/// The part of the library that a message is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogTarget {
    /// The files of the model, and the sizes that were chosen.
    Load,
    /// The requests, and the steps that serve them.
    Scheduler,
    /// The device.
    Device,
}

type Sink = Box<dyn Fn(LogLevel, LogTarget, &str) + Send + Sync>;

/// The place where messages go.
#[derive(Default)]
pub struct Logger {
    sink: Option<Sink>,
    calls: HostCall,
}

impl Logger {
    /// Returns a logger that says nothing.
    pub fn silent() -> Self {
        Logger::default()
    }

    /// Returns a logger that calls `sink`: on the thread that loads during a load, then on the
    /// scheduler's thread.
    pub fn new(sink: impl Fn(LogLevel, LogTarget, &str) + Send + Sync + 'static) -> Self {
        Logger { sink: Some(Box::new(sink)), calls: HostCall::default() }
    }

    /// Logs a message; `message` is only called if there is a sink.
    pub fn log(&self, level: LogLevel, target: LogTarget, message: impl FnOnce() -> String) {
        if let Some(sink) = &self.sink {
            let message = message();
            self.calls.call(|| sink(level, target, &message));
        }
    }

    /// Ends the messages. Waits for a running call of the sink, unless the sink calls this.
    pub fn end(&self) {
        self.calls.end();
    }
}
