//! What the library has to say goes to a function that the host gives at load; it never prints.

/// How grave a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// Something is odd, but the call goes on.
    Warning,
    /// What the library chose and did.
    Info,
    /// Details for finding faults.
    Debug,
}

type Sink = Box<dyn Fn(LogLevel, &str) + Send + Sync>;

/// Where messages go.
pub struct Logger {
    sink: Option<Sink>,
}

impl Logger {
    /// A logger that says nothing.
    pub const fn silent() -> Self {
        Logger { sink: None }
    }

    /// A logger that calls `sink`, on whatever thread has something to say.
    pub fn new(sink: impl Fn(LogLevel, &str) + Send + Sync + 'static) -> Self {
        Logger { sink: Some(Box::new(sink)) }
    }

    /// Says something; `message` is only run if somebody listens.
    pub fn log(&self, level: LogLevel, message: impl FnOnce() -> String) {
        if let Some(sink) = &self.sink {
            sink(level, &message());
        }
    }
}
