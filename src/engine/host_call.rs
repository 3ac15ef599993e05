//! Calls of a host's function from the scheduler's thread, which the host can end: after that no
//! call is under way and none begins, so that what the function uses can be freed.

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

thread_local! {
    /// The address of the `HostCall` that this thread is inside, else 0. (Only the scheduler's own
    /// loop makes such calls, so none is made from within another.)
    static INSIDE: Cell<usize> = const { Cell::new(0) };
}

/// The state of the calls of one function.
#[derive(Default)]
struct State {
    /// Whether it may not be called any more.
    is_over: bool,
    is_running: bool,
}

/// The calls of one function. No lock is held during a call.
#[derive(Default)]
pub(super) struct HostCall {
    state: Mutex<State>,
    /// Notified when a call has ended.
    ended: Condvar,
}

/// A call under way. It also ends when the function panics.
struct Running<'a>(&'a HostCall);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        INSIDE.set(0);
        self.0.state().is_running = false;
        self.0.ended.notify_all();
    }
}

impl HostCall {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Calls `function`, unless [`HostCall::end`] was called before.
    pub fn call(&self, function: impl FnOnce()) {
        let mut state = self.state();
        if state.is_over {
            return;
        }
        state.is_running = true;
        drop(state);
        let _running = Running(self);
        INSIDE.set(self.address());
        function();
    }

    /// Ends the calls. Waits for one that is running, unless it is the one that calls this.
    pub fn end(&self) {
        let mut state = self.state();
        state.is_over = true;
        while state.is_running && INSIDE.get() != self.address() {
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
