//! Messages go to a function that the host gives at load; the library never prints.

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

type Sink = Box<dyn Fn(LogLevel, &str) + Send + Sync>;

/// The place where messages go.
pub struct Logger {
    sink: Option<Sink>,
}

impl Logger {
    /// A logger that says nothing.
    pub const fn silent() -> Self {
        Logger { sink: None }
    }

    /// A logger that calls `sink`, on the thread that has the message.
    pub fn new(sink: impl Fn(LogLevel, &str) + Send + Sync + 'static) -> Self {
        Logger { sink: Some(Box::new(sink)) }
    }

    /// Logs a message; `message` is only called if there is a sink.
    pub fn log(&self, level: LogLevel, message: impl FnOnce() -> String) {
        if let Some(sink) = &self.sink {
            sink(level, &message());
        }
    }
}
