//! The one error type of the library.
//!
//! An [`Error`] is a kind, which becomes the `xserv_status` of the C interface, and one sentence
//! that names what was wrong and where: file, tensor, argument, expected and found. Layers add what
//! they know with [`Context::context`].

use std::fmt;

/// What went wrong, in the few classes that a caller can act upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// An argument was outside its contract.
    InvalidArgument,
    /// A handle that is not (or no longer) one of this library's.
    BadHandle,
    /// A file or folder is not there.
    NotFound,
    /// The operating system refused to read a file.
    Io,
    /// A file is there but its content is not what its format demands.
    InvalidFile,
    /// A valid model, tokenizer or option that this library does not implement.
    Unsupported,
    /// A memory budget or the machine's memory is exhausted.
    OutOfMemory,
    /// The prompt does not fit into the context.
    ContextFull,
    /// The caller asked to stop.
    Cancelled,
    /// The chat template failed or exceeded its limits.
    Template,
    /// The asked-for device is not there, or this build cannot use it.
    NoDevice,
    /// The GPU failed for good: a fault in a kernel, a bus error. Only a new process helps.
    DeviceLost,
    /// The process was forked after the model was loaded; its threads are not in the child.
    Forked,
    /// A fault of the library itself.
    Internal,
}

/// A kind and one sentence. Cheap to move; cloned only for reports.
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

/// The result of everything fallible in the library.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of the given kind. `message` is one sentence without a final period. Control characters,
    /// which can come in from files, are replaced: it may be shown on a terminal or be a line of a log.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error { kind, message: one_line(message.into()) }
    }

    /// Shorthand for [`ErrorKind::InvalidArgument`].
    pub fn invalid_argument(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// Shorthand for [`ErrorKind::InvalidFile`].
    pub fn invalid_file(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidFile, message)
    }

    /// Shorthand for [`ErrorKind::Unsupported`].
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// Shorthand for [`ErrorKind::Internal`].
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// Shorthand for [`ErrorKind::OutOfMemory`], naming what was to be allocated and its size.
    pub fn out_of_memory(what: &str, bytes: usize) -> Self {
        Self::new(ErrorKind::OutOfMemory, format!("cannot allocate {bytes} bytes for {what}"))
    }

    /// What class of error this is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The sentence.
    pub fn message(&self) -> &str {
        &self.message
    }
}

/// `message` with blanks in place of line ends and tabs, and U+FFFD in place of other control characters.
fn one_line(message: String) -> String {
    if !message.contains(char::is_control) {
        return message;
    }
    let shown = |c: char| match c {
        '\n' | '\r' | '\t' => ' ',
        c if c.is_control() => '\u{FFFD}',
        c => c,
    };
    message.chars().map(shown).collect()
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// Adds the place where an error happened: `"config.json: hidden_size is 0"`.
pub trait Context<T> {
    /// Prefixes the message with what `place` returns and a colon.
    fn context<S: fmt::Display>(self, place: impl FnOnce() -> S) -> Result<T>;
}

impl<T> Context<T> for Result<T> {
    fn context<S: fmt::Display>(self, place: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|e| Error::new(e.kind, format!("{}: {}", place(), e.message)))
    }
}

/// A vector with room for `capacity` elements, or [`ErrorKind::OutOfMemory`].
///
/// Every allocation whose size comes from a file or a caller goes through this (or
/// [`try_filled`]): Rust's own growth aborts the process when memory is short.
pub fn try_with_capacity<T>(capacity: usize, what: &str) -> Result<Vec<T>> {
    let mut v = Vec::new();
    v.try_reserve_exact(capacity)
        .map_err(|_| Error::out_of_memory(what, capacity.saturating_mul(size_of::<T>())))?;
    Ok(v)
}

/// Refuses if `bytes` could not be allocated now.
///
/// For calls into dependencies, whose allocations abort the process when memory is short: asked with
/// more than they will take, they find it (unless another thread is faster).
pub fn check_room(bytes: usize, what: &str) -> Result<()> {
    let room: Vec<u8> = try_with_capacity(bytes, what)?;
    // Else the compiler may leave the allocation out and take it for granted.
    std::hint::black_box(room.as_ptr());
    Ok(())
}

/// A vector of `len` copies of `value`, or [`ErrorKind::OutOfMemory`].
pub fn try_filled<T: Clone>(len: usize, value: T, what: &str) -> Result<Vec<T>> {
    let mut v = try_with_capacity(len, what)?;
    v.resize(len, value);
    Ok(v)
}
