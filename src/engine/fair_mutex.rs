//! A mutex that is handed over in the order of asking, and whose queue can be left.
//!
//! Requests hold the runner for one forward pass and ask again at once; with the standard mutex the
//! thread that has just let go usually wins again, and the others starve. A request that is cancelled
//! while it stands in line leaves at once.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};

/// How often a waiting thread asks whether it should go on waiting.
const PATIENCE: Duration = Duration::from_millis(10);

#[derive(Default)]
struct Queue {
    next_ticket: u64,
    /// Tickets in the order of asking; the first is the holder's, or its turn has come.
    line: VecDeque<u64>,
}

/// First come, first served. Not reentrant.
pub struct FairMutex<T> {
    queue: Mutex<Queue>,
    turn: Condvar,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a FairGuard, and only the thread whose ticket is first in
// line has one; the queue's mutex orders its accesses after those of the thread before.
unsafe impl<T: Send> Sync for FairMutex<T> {}

/// Gives the turn to the next in line when dropped.
pub struct FairGuard<'a, T> {
    mutex: &'a FairMutex<T>,
    /// Makes the guard as shareable between threads as the value is.
    _value: PhantomData<&'a mut T>,
}

impl<T> FairMutex<T> {
    /// A mutex that nobody holds.
    pub fn new(value: T) -> Self {
        FairMutex { queue: Mutex::default(), turn: Condvar::new(), value: UnsafeCell::new(value) }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // A queue of numbers is never left half-changed by a panic.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the turn of this call. `None` if `give_up`, asked now and then, says so first.
    pub fn lock_unless(&self, give_up: &dyn Fn() -> bool) -> Result<Option<FairGuard<'_, T>>> {
        let mut queue = self.queue();
        let mine = queue.next_ticket;
        queue.next_ticket += 1;
        let room = queue.line.try_reserve(1);
        room.map_err(|_| Error::out_of_memory("a place in line", size_of::<u64>()))?;
        queue.line.push_back(mine);
        while queue.line.front() != Some(&mine) {
            if give_up() {
                queue.line.retain(|ticket| *ticket != mine);
                return Ok(None);
            }
            let waited = self.turn.wait_timeout(queue, PATIENCE);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(Some(FairGuard { mutex: self, _value: PhantomData }))
    }

    /// Waits, without standing in line, until somebody lets go of the mutex, but not long.
    pub fn wait_for_change(&self) {
        let _ = self.turn.wait_timeout(self.queue(), PATIENCE);
    }
}

impl<T> Drop for FairGuard<'_, T> {
    fn drop(&mut self) {
        self.mutex.queue().line.pop_front();
        self.mutex.turn.notify_all();
    }
}

impl<T> Deref for FairGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one (see `Sync` above) and borrows the mutex.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T> DerefMut for FairGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { &mut *self.mutex.value.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn lock<T>(mutex: &FairMutex<T>) -> FairGuard<'_, T> {
        mutex.lock_unless(&|| false).unwrap().unwrap()
    }

    #[test]
    fn threads_exclude_one_another_and_all_get_their_turn() {
        let mutex = Arc::new(FairMutex::new((0u32, Vec::new())));
        let threads: Vec<_> = (0..4)
            .map(|id| {
                let mutex = mutex.clone();
                std::thread::spawn(move || {
                    for _ in 0..200 {
                        let mut guard = lock(&mutex);
                        let before = guard.0;
                        guard.1.push(id);
                        std::thread::yield_now();
                        guard.0 = before + 1;
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        let guard = lock(&mutex);
        assert_eq!(guard.0, 800);
        assert_eq!(guard.1.len(), 800);
    }

    #[test]
    fn a_panic_inside_lets_the_next_one_in() {
        let mutex = Arc::new(FairMutex::new(0));
        let inside = mutex.clone();
        let _ = std::thread::spawn(move || {
            let _guard = lock(&inside);
            panic!("while holding the lock");
        })
        .join();
        *lock(&mutex) += 1;
        assert_eq!(*lock(&mutex), 1);
    }

    #[test]
    fn who_gives_up_does_not_block_those_behind() {
        let mutex = Arc::new(FairMutex::new(0));
        let guard = lock(&mutex);
        let impatient = mutex.clone();
        let left = std::thread::spawn(move || impatient.lock_unless(&|| true).unwrap().is_none());
        assert!(left.join().unwrap());
        let patient = mutex.clone();
        let behind = std::thread::spawn(move || *lock(&patient) += 1);
        drop(guard);
        behind.join().unwrap();
        assert_eq!(*lock(&mutex), 1);
    }
}
