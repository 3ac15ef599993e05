//! Reads the tokenizer while the weights are read: a large one takes a quarter of a second of one
//! core.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use super::text_files::read_tokenizer;
use crate::error::{Error, ErrorKind, Result};
use crate::model::folder::Folder;
use crate::panic_guard;
use crate::text::Tokenizer;
use crate::threads::{Thread, STACK_BYTES};

/// A tokenizer that is being read. Waits for that when dropped: no thread outlives the load.
pub(super) struct TokenizerReader {
    work: Option<Work>,
    failed: Arc<AtomicBool>,
}

enum Work {
    Thread(Thread<Tokenizer>),
    /// The result, where no thread could be started.
    Done(Box<Result<Tokenizer>>),
}

impl TokenizerReader {
    /// Begins to read the tokenizer of `folder`.
    pub(super) fn start(folder: &Folder) -> Self {
        let failed = Arc::new(AtomicBool::new(false));
        let read = {
            let (folder, failed) = (folder.clone(), failed.clone());
            move || {
                let tokenizer = panic_guard::catch(|| read_tokenizer(&folder));
                if tokenizer.as_ref().is_err_and(|error| error.kind() != ErrorKind::NotFound) {
                    failed.store(true, Ordering::Relaxed);
                }
                tokenizer
            }
        };
        let work = match Thread::start("xserv-tokenizer", STACK_BYTES, read.clone()) {
            Ok(thread) => Work::Thread(thread),
            Err(_) => Work::Done(Box::new(read())),
        };
        TokenizerReader { work: Some(work), failed }
    }

    /// Whether the tokenizer is known to be damaged, so that the load cannot succeed.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Waits for the tokenizer. [`ErrorKind::NotFound`] if the folder has none.
    pub(super) fn finish(mut self) -> Result<Tokenizer> {
        let lost = || Error::internal("the thread that reads the tokenizer was lost");
        match self.work.take() {
            Some(Work::Thread(thread)) => thread.join(),
            Some(Work::Done(tokenizer)) => *tokenizer,
            None => Err(lost()),
        }
    }
}

impl Drop for TokenizerReader {
    fn drop(&mut self) {
        if let Some(Work::Thread(thread)) = self.work.take() {
            // The load is over, so nobody needs the tokenizer.
            let _ = thread.join();
        }
    }
}
