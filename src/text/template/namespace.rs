//! The object that templates make by `namespace(...)`.

use super::budget::{fail, Budget, Emptied};
use minijinja::value::{Enumerator, Object, ObjectRepr, Value};
use minijinja::Error;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The most entries of a namespace.
const MAX_NAMESPACE_ENTRIES: usize = 1024;

/// The object made by `namespace(...)`: variables that keep their values after the end of a loop.
///
/// It replaces minijinja's own, which may contain itself and is then never freed: this one is
/// emptied when the rendering is over.
#[derive(Debug, Default)]
pub(super) struct Namespace {
    entries: Mutex<BTreeMap<String, Value>>,
}

impl Namespace {
    pub fn set(&self, budget: &Budget, name: &str, value: Value) -> Result<(), Error> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.get_mut(name) {
            *entry = value;
            return Ok(());
        }
        if entries.len() >= MAX_NAMESPACE_ENTRIES {
            return Err(fail(format!("a namespace has more than {MAX_NAMESPACE_ENTRIES} entries")));
        }
        budget.structure(600 + name.len())?;
        entries.insert(name.to_owned(), value);
        Ok(())
    }
}

impl Emptied for Namespace {
    fn empty(&self) {
        let entries =
            std::mem::take(&mut *self.entries.lock().unwrap_or_else(PoisonError::into_inner));
        // Dropped without the lock, because a value may lead back here.
        drop(entries);
    }
}

impl Object for Namespace {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.get(key.as_str()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::NonEnumerable
    }
}
