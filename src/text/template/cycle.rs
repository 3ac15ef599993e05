//! The objects that templates make by `cycler(...)` and `joiner(...)`.

use super::budget::fail;
use minijinja::value::{Enumerator, Object, ObjectRepr, Value};
use minijinja::{Error, ErrorKind, State};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;

/// Gives one of its values after the other, over and over.
#[derive(Debug)]
pub(super) struct Cycler {
    values: Vec<Value>,
    at: AtomicUsize,
}

impl Cycler {
    pub fn new(values: Vec<Value>) -> Result<Self, Error> {
        if values.is_empty() {
            return Err(fail("cycler: at least one value has to be given"));
        }
        Ok(Cycler { values, at: AtomicUsize::new(0) })
    }

    fn current(&self) -> Option<Value> {
        self.values.get(self.at.load(Ordering::Relaxed)).cloned()
    }
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.current().filter(|_| key.as_str() == Some("current"))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::NonEnumerable
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        method: &str,
        _: &[Value],
    ) -> Result<Value, Error> {
        match method {
            "next" => {
                let value = self.current().unwrap_or_default();
                let next = (self.at.load(Ordering::Relaxed) + 1) % self.values.len().max(1);
                self.at.store(next, Ordering::Relaxed);
                Ok(value)
            }
            "reset" => {
                self.at.store(0, Ordering::Relaxed);
                Ok(Value::from(()))
            }
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }
}

/// Gives nothing when it is first called, and its separator afterwards.
#[derive(Debug)]
pub(super) struct Joiner {
    separator: Value,
    was_called: AtomicBool,
}

impl Joiner {
    pub fn new(separator: Value) -> Self {
        Joiner { separator, was_called: AtomicBool::new(false) }
    }
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::NonEnumerable
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, _: &[Value]) -> Result<Value, Error> {
        Ok(match self.was_called.swap(true, Ordering::Relaxed) {
            true => self.separator.clone(),
            false => Value::from(""),
        })
    }
}
