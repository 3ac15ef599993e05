//! The one error type of the library.
//!
//! An [`Error`] is a kind, which becomes the `xserv_status` of the C interface, and one sentence
//! that names what was wrong and where: file, tensor, argument, expected and found. Layers add what
//! they know with [`Context::context`].

use std::borrow::Cow;
use std::fmt::{self, Write};

use crate::reserve;

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
    /// The requested device does not exist, or this build or this process cannot use it.
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
    message: Cow<'static, str>,
}

/// The result of everything fallible in the library.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Makes an error of the given kind. `message` is one sentence without a final period. Control
    /// characters, which can come from files, are replaced, because the message may be shown on a
    /// terminal or be a line of a log.
    ///
    /// A message that is a constant needs no memory.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Error { kind, message: one_line(message.into()) }
    }

    /// Makes an [`ErrorKind::InvalidArgument`].
    pub fn invalid_argument(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// Makes an [`ErrorKind::InvalidFile`].
    pub fn invalid_file(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::InvalidFile, message)
    }

    /// Makes an [`ErrorKind::Unsupported`].
    pub fn unsupported(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// Makes an [`ErrorKind::Internal`].
    pub fn internal(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// Makes an [`ErrorKind::OutOfMemory`] that names what was to be allocated and its size
    /// (`usize::MAX` where that is more than a process can address). Where even the sentence finds
    /// no memory, it is a shorter one.
    pub fn out_of_memory(what: &str, bytes: usize) -> Self {
        let message = if bytes == usize::MAX {
            try_format(format_args!("{what} would take more bytes than a process can address"))
        } else {
            try_format(format_args!("cannot allocate {bytes} bytes for {what}"))
        };
        let message = message.map_or(Cow::Borrowed("cannot allocate memory"), Cow::Owned);
        Self::new(ErrorKind::OutOfMemory, message)
    }

    /// Returns the same message as an error of another class.
    pub fn with_kind(self, kind: ErrorKind) -> Self {
        Error { kind, ..self }
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

/// Formats a message, or returns `None` if there is no memory for it.
fn try_format(message: fmt::Arguments<'_>) -> Option<String> {
    struct Growing(String);
    impl Write for Growing {
        fn write_str(&mut self, piece: &str) -> fmt::Result {
            self.0.try_reserve(piece.len()).map_err(|_| fmt::Error)?;
            self.0.push_str(piece);
            Ok(())
        }
    }
    let mut text = Growing(String::new());
    text.write_fmt(message).is_ok().then_some(text.0)
}

/// Replaces line ends and tabs of `message` by blanks, and other control characters by U+FFFD.
fn one_line(message: Cow<'static, str>) -> Cow<'static, str> {
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
        self.map_err(|e| match try_format(format_args!("{}: {}", place(), e.message)) {
            Some(message) => Error::new(e.kind, message),
            None => e,
        })
    }
}

/// Makes a vector with room for `capacity` elements, or fails with [`ErrorKind::OutOfMemory`].
///
/// Every allocation whose size comes from a file or a caller goes through this (or
/// [`try_filled`]): Rust's own growth aborts the process when memory is short.
pub fn try_with_capacity<T>(capacity: usize, what: &str) -> Result<Vec<T>> {
    reserve::vec_with_capacity(capacity)
        .ok_or_else(|| Error::out_of_memory(what, capacity.saturating_mul(size_of::<T>())))
}

/// Fails if `bytes` could not be allocated now.
///
/// Used before calls into dependencies, whose allocations abort the process when memory is short:
/// if more than they will take is available now, they will find it (unless another thread takes it
/// first).
pub fn check_room(bytes: usize, what: &str) -> Result<()> {
    // The reserve counts: the dependencies can use it.
    let mut room: Vec<u8> = Vec::new();
    room.try_reserve_exact(bytes).map_err(|_| Error::out_of_memory(what, bytes))?;
    // Otherwise the compiler may remove the allocation and assume that it succeeded.
    std::hint::black_box(room.as_ptr());
    Ok(())
}

/// The most bytes that a tree of serde_json takes, while it is built, for each byte of its text:
/// `[0,0,...]` has an element of 72 bytes for every two, in a list that doubles.
const ROOM_PER_JSON_BYTE: usize = 128;

/// [`check_room`] for the tree of a JSON text.
pub fn check_room_for_json(json: &[u8], what: &str) -> Result<()> {
    check_room(json.len().saturating_mul(ROOM_PER_JSON_BYTE), what)
}

/// Makes a vector of `len` copies of `value`, or fails with [`ErrorKind::OutOfMemory`].
pub fn try_filled<T: Clone>(len: usize, value: T, what: &str) -> Result<Vec<T>> {
    let mut v = try_with_capacity(len, what)?;
    v.resize(len, value);
    Ok(v)
}
