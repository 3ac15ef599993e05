//! The work and memory that one rendering may use.
//!
//! Memory is counted in three pots. *Strings* that templates build are watched by weak references:
//! dropped ones no longer count, because a template that copies each message ten times is fine.
//! *Structure* (list elements, map entries) cannot be watched and counts to the end. *Output*
//! counts to the end too, captures included. The sum of the three, with the copies that are in
//! flight while a string is built, stays under 256 MiB; the inputs come on top.
//!
//! Work is counted in units of about a nanosecond. The clock is the second line of defence, against
//! a very slow machine or work that was counted too low.

use minijinja::value::Value;
use minijinja::{Error, ErrorKind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::error::check_room;

/// The longest rendered text, and the longest intermediate string, in bytes.
pub(super) const MAX_OUTPUT_BYTES: usize = 16 << 20;
/// Bytes of strings alive at the same time.
const MAX_STRING_BYTES: usize = 48 << 20;
/// Bytes of list elements and map entries over the whole rendering.
const MAX_STRUCTURE_BYTES: u64 = 48 << 20;
/// Bytes written over the whole rendering, into captures and into the result.
const MAX_WRITTEN_BYTES: u64 = 24 << 20;
/// Text that is written and shorter than this is not checked to find memory.
const CHECKED_BYTES: usize = 64 << 10;
/// Units of work over the whole rendering.
pub(super) const MAX_WORK: u64 = 1_000_000_000;
/// The time limit.
const MAX_TIME: Duration = Duration::from_millis(1800);
/// Strings shorter than this are not watched: the number of instructions bounds them.
const SMALL_STRING_BYTES: usize = 64;
/// The deepest nesting of lists and maps.
pub(super) const MAX_VALUE_DEPTH: usize = 150;

/// An object that may contain itself, so that it is freed only when somebody empties it.
pub(super) trait Emptied: Send + Sync {
    /// Releases all that it contains.
    fn empty(&self);
}

/// The budget of one rendering after the other, shared by all functions of a template.
pub(super) struct Budget {
    clock: Mutex<Clock>,
    work: AtomicU64,
    max_work: AtomicU64,
    calls: AtomicU64,
    structure: AtomicU64,
    written: AtomicU64,
    strings: Mutex<Strings>,
    kept: Mutex<Vec<Arc<dyn Emptied>>>,
}

struct Clock {
    started: Instant,
    now: SystemTime,
}

#[derive(Default)]
struct Strings {
    watched: Vec<Weak<str>>,
    /// The bytes of all strings in `watched`, dropped ones included.
    bytes: usize,
}

/// Makes an error that the template caused.
pub(super) fn fail(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Marks an error that lack of memory caused, as its source.
#[derive(Debug)]
pub(super) struct NoMemory;

impl std::fmt::Display for NoMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("out of memory")
    }
}

impl std::error::Error for NoMemory {}

/// Makes an error that lack of memory caused.
pub(super) fn no_memory() -> Error {
    Error::from(ErrorKind::InvalidOperation).with_source(NoMemory)
}

impl Budget {
    pub fn new() -> Self {
        Budget {
            clock: Mutex::new(Clock { started: Instant::now(), now: UNIX_EPOCH }),
            work: AtomicU64::new(0),
            max_work: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            structure: AtomicU64::new(0),
            written: AtomicU64::new(0),
            strings: Mutex::default(),
            kept: Mutex::default(),
        }
    }

    /// Begins a rendering of at most `max_work` units, up to [`MAX_WORK`]. `now`: the time that
    /// `strftime_now` gives.
    pub fn begin(&self, max_work: u64, now: SystemTime) {
        *self.clock.lock().unwrap_or_else(PoisonError::into_inner) =
            Clock { started: Instant::now(), now };
        self.max_work.store(max_work.min(MAX_WORK), Ordering::Relaxed);
        for count in [&self.work, &self.calls, &self.structure, &self.written] {
            count.store(0, Ordering::Relaxed);
        }
        *self.strings.lock().unwrap_or_else(PoisonError::into_inner) = Strings::default();
    }

    /// Returns the time that `strftime_now` gives.
    pub fn now(&self) -> SystemTime {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner).now
    }

    fn elapsed(&self) -> Duration {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner).started.elapsed()
    }

    /// Takes units of work.
    pub fn work(&self, units: u64) -> Result<(), Error> {
        let before = self.work.fetch_add(units, Ordering::Relaxed);
        let after = before.saturating_add(units);
        if after > self.max_work.load(Ordering::Relaxed) {
            return Err(fail("it does more work than is allowed"));
        }
        // The clock is read at most 64 calls or a quarter of a million units apart.
        let calls = self.calls.fetch_add(1, Ordering::Relaxed);
        let ask = calls.is_multiple_of(64) || before >> 18 != after >> 18;
        if ask && self.elapsed() > MAX_TIME {
            return Err(fail(format!("it takes longer than {} ms", MAX_TIME.as_millis())));
        }
        Ok(())
    }

    /// Returns all work so far.
    pub fn work_done(&self) -> u64 {
        self.work.load(Ordering::Relaxed)
    }

    /// Takes the work of reading or copying bytes.
    pub fn bytes(&self, bytes: usize) -> Result<(), Error> {
        self.work(20 + bytes as u64 / 2)
    }

    /// Takes room for list elements (24 bytes each, plus the list) or other structure.
    pub fn structure(&self, bytes: usize) -> Result<(), Error> {
        let before = self.structure.fetch_add(bytes as u64, Ordering::Relaxed);
        if before.saturating_add(bytes as u64) > MAX_STRUCTURE_BYTES {
            return Err(fail(format!(
                "its lists and maps take more than {MAX_STRUCTURE_BYTES} bytes"
            )));
        }
        self.work(20 + bytes as u64)
    }

    /// Takes room for a list.
    pub fn list(&self, len: usize) -> Result<(), Error> {
        self.structure(len.saturating_mul(24).saturating_add(64))
    }

    /// Takes room for text that is written.
    pub fn write(&self, bytes: usize) -> Result<(), Error> {
        let before = self.written.fetch_add(bytes as u64, Ordering::Relaxed);
        if before.saturating_add(bytes as u64) > MAX_WRITTEN_BYTES {
            return Err(fail(format!("it writes more than {MAX_WRITTEN_BYTES} bytes")));
        }
        // minijinja's own string, which doubles when it is full: asked for in good time.
        let (before, after) = (before as usize, before as usize + bytes);
        let room = after.next_power_of_two().saturating_mul(2);
        if room > CHECKED_BYTES && before.next_power_of_two() != after.next_power_of_two() {
            check_room(room, "the chat template's text").map_err(|_| no_memory())?;
        }
        self.bytes(bytes)
    }

    /// Makes a value of a string that was built with [`Text`].
    pub fn string(&self, text: String) -> Result<Value, Error> {
        self.bytes(text.len())?;
        check_length(text.len())?;
        if text.len() < SMALL_STRING_BYTES {
            return Ok(Value::from(text));
        }
        let shared: Arc<str> = Arc::from(text);
        self.watch(&shared)?;
        Ok(Value::from(shared))
    }

    /// Counts a value that a function of minijinja made.
    pub fn result(&self, value: Value) -> Result<Value, Error> {
        if let Some(text) = value.as_str() {
            self.bytes(text.len())?;
            check_length(text.len())?;
            if text.len() >= SMALL_STRING_BYTES {
                if let Some(shared) = value.to_str() {
                    self.watch(&shared)?;
                }
            }
        } else if let Some(len) = value.as_object().and_then(|object| object.enumerator_len()) {
            self.list(len)?;
        }
        Ok(value)
    }

    fn watch(&self, shared: &Arc<str>) -> Result<(), Error> {
        let mut strings = self.strings.lock().unwrap_or_else(PoisonError::into_inner);
        if strings.bytes.saturating_add(shared.len()) > MAX_STRING_BYTES {
            self.work(strings.watched.len() as u64 * 10)?;
            let mut alive = 0;
            strings.watched.retain(|string| match string.upgrade() {
                Some(string) => {
                    alive += string.len();
                    true
                }
                None => false,
            });
            strings.bytes = alive;
            if alive.saturating_add(shared.len()) > MAX_STRING_BYTES {
                return Err(fail(format!("its strings take more than {MAX_STRING_BYTES} bytes")));
            }
        }
        strings.bytes += shared.len();
        strings.watched.try_reserve(1).map_err(|_| no_memory())?;
        strings.watched.push(Arc::downgrade(shared));
        Ok(())
    }

    /// Walks a whole value and takes the work of that, so that a function of minijinja may walk it
    /// afterwards. Lists that contain each other many times over are refused here. Returns the
    /// approximate number of bytes of the value when written out.
    pub fn walk(&self, value: &Value) -> Result<usize, Error> {
        self.walk_at(value, 0)
    }

    fn walk_at(&self, value: &Value, depth: usize) -> Result<usize, Error> {
        if depth > MAX_VALUE_DEPTH {
            return Err(fail(format!("a value is nested more than {MAX_VALUE_DEPTH} deep")));
        }
        if let Some(text) = value.as_str() {
            self.work(20 + text.len() as u64 / 4)?;
            return Ok(text.len() + 2);
        }
        self.work(50)?;
        let Some(object) = value.as_object() else { return Ok(24) };
        let mut bytes = 4usize;
        if let Some(pairs) = object.try_iter_pairs() {
            for (key, item) in pairs {
                bytes = bytes.saturating_add(self.walk_at(&key, depth + 1)?);
                bytes = bytes.saturating_add(self.walk_at(&item, depth + 1)?);
            }
        } else if let Some(items) = object.try_iter() {
            for item in items {
                bytes = bytes.saturating_add(self.walk_at(&item, depth + 1)?);
            }
        }
        Ok(bytes.saturating_add(4))
    }

    /// Remembers an object until the rendering is over, when it is emptied.
    pub fn keep(&self, object: Arc<dyn Emptied>) -> Result<(), Error> {
        self.structure(160)?;
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).push(object);
        Ok(())
    }

    /// Empties all objects that were kept.
    pub fn empty_kept(&self) {
        let all = std::mem::take(&mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner));
        for object in all {
            object.empty();
        }
    }
}

/// Refuses strings that are too long.
pub(super) fn check_length(bytes: usize) -> Result<(), Error> {
    if bytes > MAX_OUTPUT_BYTES {
        return Err(fail(format!("it builds a string of more than {MAX_OUTPUT_BYTES} bytes")));
    }
    Ok(())
}

/// A string that is built piece by piece, bounded in length, with fallible allocation.
#[derive(Default)]
pub(super) struct Text {
    text: String,
}

impl Text {
    pub fn push(&mut self, piece: &str) -> Result<(), Error> {
        check_length(self.text.len().saturating_add(piece.len()))?;
        self.text.try_reserve(piece.len()).map_err(|_| no_memory())?;
        self.text.push_str(piece);
        Ok(())
    }

    pub fn push_char(&mut self, character: char) -> Result<(), Error> {
        self.push(character.encode_utf8(&mut [0; 4]))
    }

    /// Appends a piece `count` times.
    pub fn push_repeated(&mut self, piece: &str, count: usize) -> Result<(), Error> {
        let bytes = piece.len().saturating_mul(count);
        check_length(self.text.len().saturating_add(bytes))?;
        self.text.try_reserve(bytes).map_err(|_| no_memory())?;
        for _ in 0..count {
            self.text.push_str(piece);
        }
        Ok(())
    }

    pub fn into_string(self) -> String {
        self.text
    }
}
