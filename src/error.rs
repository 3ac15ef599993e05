//! The one error type of the library.
//!
//! An [`Error`] is a kind, which becomes the `xserv_status` of the C interface, and one sentence
//! that names what was wrong and where: file, tensor, argument, expected and found. Layers add what
//! they know with [`Context::context`].

use std::fmt;

/// The class of an error, of the few that a caller can act upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// An argument was outside its contract.
    InvalidArgument,
    /// A handle was not (or no longer) one of this library's.
    BadHandle,
    /// A file or folder does not exist.
    NotFound,
    /// The operating system refused to read a file.
    Io,
    /// A file exists but its content does not follow its format.
    InvalidFile,
    /// The model, tokenizer or option is valid, but not implemented by this library.
    Unsupported,
    /// A memory budget or the machine's memory is exhausted.
    OutOfMemory,
    /// The prompt does not fit into the context.
    ContextFull,
    /// The caller asked to stop.
    Cancelled,
    /// The chat template failed or exceeded its limits.
    Template,
    /// The requested device does not exist, or this build cannot use it.
    NoDevice,
    /// The GPU failed for good: a fault in a kernel, a bus error. Only a new process helps.
    DeviceLost,
    /// The process was forked after the model was loaded; its threads do not exist in the child.
    Forked,
    /// The library itself is at fault.
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
    /// Makes an error of the given kind. `message` is one sentence without a final period. Control
    /// characters, which can come from files, are replaced, because the message may be shown on a
    /// terminal or be a line of a log.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error { kind, message: one_line(message.into()) }
    }

    /// Makes an [`ErrorKind::InvalidArgument`].
    pub fn invalid_argument(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// Makes an [`ErrorKind::InvalidFile`].
    pub fn invalid_file(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidFile, message)
    }

    /// Makes an [`ErrorKind::Unsupported`].
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// Makes an [`ErrorKind::Internal`].
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// Makes an [`ErrorKind::OutOfMemory`] that names what was to be allocated and its size.
    pub fn out_of_memory(what: &str, bytes: usize) -> Self {
        Self::new(ErrorKind::OutOfMemory, format!("cannot allocate {bytes} bytes for {what}"))
    }

    /// Returns the class of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the sentence.
    pub fn message(&self) -> &str {
        &self.message
    }
}

/// Replaces line ends and tabs of `message` by blanks, and other control characters by U+FFFD.
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

/// Makes a vector with room for `capacity` elements, or fails with [`ErrorKind::OutOfMemory`].
///
/// Every allocation whose size comes from a file or a caller goes through this (or
/// [`try_filled`]): Rust's own growth aborts the process when memory is short.
pub fn try_with_capacity<T>(capacity: usize, what: &str) -> Result<Vec<T>> {
    let mut v = Vec::new();
    v.try_reserve_exact(capacity)
        .map_err(|_| Error::out_of_memory(what, capacity.saturating_mul(size_of::<T>())))?;
    Ok(v)
}

/// Fails if `bytes` could not be allocated now.
///
/// Used before calls into dependencies, whose allocations abort the process when memory is short:
/// if more than they will take is available now, they will find it (unless another thread takes it
/// first).
pub fn check_room(bytes: usize, what: &str) -> Result<()> {
    let room: Vec<u8> = try_with_capacity(bytes, what)?;
    // Otherwise the compiler may remove the allocation and assume that it succeeded.
    std::hint::black_box(room.as_ptr());
    Ok(())
}

/// Makes a vector of `len` copies of `value`, or fails with [`ErrorKind::OutOfMemory`].
pub fn try_filled<T: Clone>(len: usize, value: T, what: &str) -> Result<Vec<T>> {
    let mut v = try_with_capacity(len, what)?;
    v.resize(len, value);
    Ok(v)
}
