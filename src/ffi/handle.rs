//! Handles: C holds a number to look up, not an address.
//!
//! A handle is a kind, a slot and a generation packed into a pointer-sized number. The library
//! looks it up in a table, so that NULL, a forged value, a handle of another kind and one that was
//! already freed are all noticed instead of being undefined behaviour. Objects are
//! reference-counted: freeing a handle while another thread is inside a call with it is safe, and
//! the object is dropped when that call ends.

use std::sync::{Arc, PoisonError, RwLock};

use crate::error::{Error, ErrorKind, Result};
use crate::process::{watch_forks, NoFork};

const INDEX_BITS: u32 = 24;
const GENERATION_BITS: u32 = 32;

struct Slot<T> {
    generation: u32,
    object: Option<Arc<T>>,
}

struct Slots<T> {
    slots: Vec<Slot<T>>,
    free: Vec<usize>,
}

/// All live handles of one C type.
pub(super) struct HandleTable<T> {
    /// Distinguishes C types; from 1 to 127, so that no handle is NULL.
    kind: u8,
    /// The C name of the argument, for messages.
    name: &'static str,
    /// Locked with forks kept out, so that it is free in a forked child.
    inner: RwLock<Slots<T>>,
}

impl<T> HandleTable<T> {
    pub(super) const fn new(kind: u8, name: &'static str) -> Self {
        HandleTable {
            kind,
            name,
            inner: RwLock::new(Slots { slots: Vec::new(), free: Vec::new() }),
        }
    }

    /// Makes a handle for `object`, of the opaque C type `C`.
    pub(super) fn insert<C>(&self, object: Arc<T>) -> Result<*mut C> {
        watch_forks()?;
        let _no_fork = NoFork::new();
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        let inner = &mut *inner;
        let index = match inner.free.pop() {
            Some(index) => index,
            None => {
                let index = inner.slots.len();
                let full = || Error::out_of_memory("a handle", size_of::<Slot<T>>());
                if index >= 1 << INDEX_BITS {
                    return Err(full());
                }
                // Reserves room in `free` too, so that freeing a handle never allocates.
                inner.slots.try_reserve(1).map_err(|_| full())?;
                inner.free.try_reserve(index + 1 - inner.free.len()).map_err(|_| full())?;
                inner.slots.push(Slot { generation: 0, object: None });
                index
            }
        };
        let slot = inner
            .slots
            .get_mut(index)
            .ok_or_else(|| Error::internal("the handle table lost a slot"))?;
        slot.object = Some(object);
        let bits = (u64::from(self.kind) << (INDEX_BITS + GENERATION_BITS))
            | (u64::from(slot.generation) << INDEX_BITS)
            | index as u64;
        Ok(std::ptr::without_provenance_mut(bits as usize))
    }

    fn split<C>(&self, handle: *const C) -> Result<(usize, u32)> {
        let bits = handle.addr() as u64;
        if bits == 0 {
            return Err(Error::invalid_argument(format!("{} is NULL", self.name)));
        }
        if (bits >> (INDEX_BITS + GENERATION_BITS)) != u64::from(self.kind) {
            return Err(self.bad("is not a handle of its type"));
        }
        let index = (bits & ((1 << INDEX_BITS) - 1)) as usize;
        Ok((index, (bits >> INDEX_BITS) as u32))
    }

    fn bad(&self, why: &str) -> Error {
        Error::new(ErrorKind::BadHandle, format!("{} {why}", self.name))
    }

    /// Returns the object of a handle.
    pub(super) fn get<C>(&self, handle: *const C) -> Result<Arc<T>> {
        let (index, generation) = self.split(handle)?;
        let _no_fork = NoFork::new();
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        match inner.slots.get(index) {
            Some(Slot { generation: g, object: Some(object) }) if *g == generation => {
                Ok(object.clone())
            }
            _ => Err(self.bad("was freed, or never was a handle")),
        }
    }

    /// Ends a handle and returns its object, or `None` for NULL.
    pub(super) fn remove<C>(&self, handle: *mut C) -> Result<Option<Arc<T>>> {
        if handle.is_null() {
            return Ok(None);
        }
        let (index, generation) = self.split(handle)?;
        let _no_fork = NoFork::new();
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        let inner = &mut *inner;
        match inner.slots.get_mut(index) {
            Some(slot) if slot.generation == generation && slot.object.is_some() => {
                slot.generation = slot.generation.wrapping_add(1);
                let object = slot.object.take();
                inner.free.push(index);
                Ok(object)
            }
            _ => Err(self.bad("was freed already, or never was a handle")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    enum Thing {}

    #[test]
    fn stale_foreign_and_forged_handles_are_refused() {
        let table = HandleTable::new(1, "thing");
        let other = HandleTable::new(2, "other");
        let handle: *mut Thing = table.insert(Arc::new(5)).unwrap();
        let foreign: *mut Thing = other.insert(Arc::new(6)).unwrap();
        assert_eq!(*table.get(handle).unwrap(), 5);
        assert_eq!(table.get(foreign).unwrap_err().kind(), ErrorKind::BadHandle);
        let forged = std::ptr::without_provenance::<Thing>(0x7fff_1234_5678);
        assert_eq!(table.get(forged).unwrap_err().kind(), ErrorKind::BadHandle);
        assert_eq!(
            table.get(std::ptr::null::<Thing>()).unwrap_err().kind(),
            ErrorKind::InvalidArgument
        );
        assert!(table.remove(handle).unwrap().is_some());
        assert_eq!(table.get(handle).unwrap_err().kind(), ErrorKind::BadHandle);
        assert_eq!(table.remove(handle).unwrap_err().kind(), ErrorKind::BadHandle);
        // The slot is used again under another generation.
        let second: *mut Thing = table.insert(Arc::new(7)).unwrap();
        assert_ne!(second, handle);
        assert_eq!(table.get(handle).unwrap_err().kind(), ErrorKind::BadHandle);
        assert!(table.remove(std::ptr::null_mut::<Thing>()).unwrap().is_none());
    }
}
