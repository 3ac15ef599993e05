//! Turns panics into errors, silently and without allocating in the panic hook.
//!
//! A panic that leaves an `extern "C"` function kills the host, and the default hook prints and may
//! take a backtrace (which allocates, and was seen to hang when memory is short). So the library
//! installs a hook of its own, which acts only on threads that are inside [`catch_panic`]: it notes
//! the message and the location in a fixed thread-local buffer. The shared object carries its own
//! copy of the standard library, so the host's hook is not touched; elsewhere (a Rust program that
//! links the rlib) panics outside [`catch_panic`] go to the previous hook.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt::Write;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use crate::error::{Error, Result};

/// The room for a panic's message and location; longer ones are cut.
const NOTE_BYTES: usize = 512;

/// A fixed buffer that `write!` fills without allocating.
struct Note {
    bytes: [u8; NOTE_BYTES],
    len: usize,
}

impl Note {
    const EMPTY: Note = Note { bytes: [0; NOTE_BYTES], len: 0 };
}

impl Write for Note {
    fn write_str(&mut self, s: &str) -> std::fmt::Result {
        let room = NOTE_BYTES - self.len;
        let mut take = s.len().min(room);
        while !s.is_char_boundary(take) {
            take -= 1;
        }
        if let (Some(to), Some(from)) =
            (self.bytes.get_mut(self.len..self.len + take), s.as_bytes().get(..take))
        {
            to.copy_from_slice(from);
            self.len += take;
        }
        Ok(())
    }
}

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static NOTE: RefCell<Note> = const { RefCell::new(Note::EMPTY) };
}

static HOOK: Once = Once::new();

fn install_hook() {
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let guarded = DEPTH.try_with(Cell::get).unwrap_or(0) > 0;
            if !guarded {
                return before(info);
            }
            let _ = NOTE.try_with(|note| {
                let Ok(mut note) = note.try_borrow_mut() else { return };
                *note = Note::EMPTY;
                let payload = info.payload();
                let _ = write!(note, "{}", payload_text(payload));
                if let Some(place) = info.location() {
                    let _ = write!(note, " at {}:{}", place.file(), place.line());
                }
            });
        }));
    });
}

fn payload_text(payload: &(dyn Any + Send)) -> &str {
    match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (_, Some(text)) => text,
        _ => "a panic without a message",
    }
}

/// Runs `f`; a panic inside is returned as its message and location. Nothing is printed.
pub fn catch_panic<T>(f: impl FnOnce() -> T) -> std::result::Result<T, String> {
    install_hook();
    DEPTH.with(|depth| depth.set(depth.get() + 1));
    let outcome = panic::catch_unwind(AssertUnwindSafe(f));
    DEPTH.with(|depth| depth.set(depth.get() - 1));
    outcome.map_err(|_payload| {
        NOTE.with(|note| {
            let note = note.borrow();
            String::from_utf8_lossy(note.bytes.get(..note.len).unwrap_or_default()).into_owned()
        })
    })
}

/// Runs `f`; a panic inside becomes an [`crate::error::ErrorKind::Internal`] error.
pub fn catch<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_panic(f).unwrap_or_else(|text| {
        Err(Error::internal(format!("internal fault (a bug in the library): {text}")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_panic_becomes_an_error_that_names_it() {
        let error = catch::<()>(|| panic!("number {}", 7)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal);
        assert!(error.message().contains("number 7"), "{error}");
        assert!(error.message().contains("panic_guard.rs"), "{error}");
    }

    #[test]
    fn values_and_errors_pass_through() {
        assert_eq!(catch(|| Ok(3)).unwrap(), 3);
        let error = catch::<()>(|| Err(Error::invalid_argument("no"))).unwrap_err();
        assert_eq!(error.message(), "no");
    }
}
