//! The amount of work in a run, and what ends a test that hangs.

use std::sync::mpsc;
use std::time::Duration;

/// Returns the number for this run: `gate` at every change, `full` with `XSERV_TRUST=full`.
pub fn scaled(gate: usize, full: usize) -> usize {
    match std::env::var("XSERV_TRUST").as_deref() {
        Ok("full") => full,
        Ok("gate") | Err(_) => gate,
        Ok(other) => panic!("XSERV_TRUST is {other:?}, but must be \"gate\" or \"full\""),
    }
}

/// Which share of the work this run has, and of how many: all of it, or with
/// `XSERV_TRUST_SHARE=i/n` the ith of n (from 0 on), so that several processes may divide what
/// takes hours.
pub fn share() -> (usize, usize) {
    let Ok(share) = std::env::var("XSERV_TRUST_SHARE") else { return (0, 1) };
    match share.split_once('/').map(|(i, n)| (i.parse(), n.parse())) {
        Some((Ok(i), Ok(n))) if i < n => (i, n),
        _ => panic!("XSERV_TRUST_SHARE is {share:?}, but must be like \"0/8\""),
    }
}

/// For what takes milliseconds, on a machine that is busy with other things.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Runs `body` on a thread of its own, and gives its result or that of its panic. A body that has not
/// ended after `limit` has hung: the process is ended, since its threads could not be.
pub fn watched<T: Send + 'static>(
    what: &str,
    limit: Duration,
    body: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (done, wait) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let out = body();
        let _ = done.send(());
        out
    });
    if wait.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
        eprintln!("{what}: hung for {} s", limit.as_secs());
        std::process::abort();
    }
    match thread.join() {
        Ok(out) => out,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
