//! The weight files of a model while they are read.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{try_filled, Error, ErrorKind, Result};
use crate::model::checkpoint::{Checkpoint, InFile};
use crate::model::folder::{io_error, Folder};

/// Bytes that one thread reads at once: large enough for a sequential read to run at the device's
/// speed, small enough for the L2 cache to hold a good part while it is being packed.
pub(super) const PIECE_BYTES: usize = 4 << 20;

/// Pieces per thread between two calls of the progress callback.
pub(super) const PIECES_PER_REPORT: usize = 8;

/// The files of a checkpoint while it is read, which all threads use.
pub(in crate::model) struct WeightFiles<'a> {
    folder: &'a Folder,
    checkpoint: &'a Checkpoint,
    map_files: bool,
    /// The files opened so far, by their position in the checkpoint.
    open: Vec<(usize, Source)>,
    /// Buffers that no thread uses at the moment.
    staging: Mutex<Vec<Vec<u8>>>,
}

/// The source of a shard's bytes.
enum Source {
    File { file: File, name: String },
    Map { map: memmap2::Mmap, file: File, name: String },
}

fn cut(name: &str) -> Error {
    Error::new(ErrorKind::Io, format!("{name} was cut off while it was being loaded"))
}

fn read_error(name: &str, error: &io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => cut(name),
        _ => io_error(name, error),
    }
}

impl Source {
    /// Returns `len` bytes from `offset` on, in `buffer` unless they can be lent.
    fn bytes<'b>(&'b self, offset: u64, len: usize, buffer: &'b mut Vec<u8>) -> Result<&'b [u8]> {
        match self {
            Source::File { file, name } => {
                if buffer.len() < len {
                    *buffer = try_filled(len, 0_u8, "a piece of a weight file")?;
                }
                let bytes = buffer.get_mut(..len).ok_or_else(|| cut(name))?;
                file.read_exact_at(bytes, offset).map_err(|e| read_error(name, &e))?;
                Ok(bytes)
            }
            Source::Map { map, name, .. } => usize::try_from(offset)
                .ok()
                .and_then(|begin| map.get(begin..begin.checked_add(len)?))
                .ok_or_else(|| cut(name)),
        }
    }
}

impl<'a> WeightFiles<'a> {
    /// Returns the files of `checkpoint`, which lie in `folder`; none is open yet.
    pub(in crate::model) fn new(
        folder: &'a Folder,
        checkpoint: &'a Checkpoint,
        map_files: bool,
    ) -> Self {
        let (open, staging) = (Vec::new(), Mutex::new(Vec::new()));
        WeightFiles { folder, checkpoint, map_files, open, staging }
    }

    /// Whether there are no files, and the weights are random numbers.
    pub(super) fn are_random(&self) -> bool {
        self.checkpoint.is_random()
    }

    /// Calls `use_buffer` with a buffer of `len` bytes, whose contents are arbitrary.
    pub(super) fn with_buffer<T>(
        &self,
        len: usize,
        use_buffer: impl FnOnce(&mut [u8]) -> Result<T>,
    ) -> Result<T> {
        let mut buffer = self.lock_staging().pop().unwrap_or_default();
        if buffer.len() < len {
            buffer = try_filled(len, 0_u8, "a piece of a weight")?;
        }
        let result = use_buffer(buffer.get_mut(..len).unwrap_or_default());
        self.lock_staging().push(buffer);
        result
    }

    /// Makes sure that the tensor's file is open.
    pub(super) fn open(&mut self, tensor: &impl InFile) -> Result<()> {
        let shard = tensor.shard();
        if self.open.iter().any(|(open, _)| *open == shard) {
            return Ok(());
        }
        let file = self.checkpoint.reopen(self.folder, shard)?;
        let name = self.checkpoint.shards.get(shard).map_or("?", |s| s.name.as_str()).to_owned();
        let source = if self.map_files {
            // SAFETY: the mapping is private and read-only, and only bytes are read from it, for
            // which every value is valid. Nothing can keep another process from cutting the file,
            // which would raise SIGBUS: the documented price of `map_files`, which is off by
            // default.
            let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| io_error(&name, &e))?;
            Source::Map { map, file, name }
        } else {
            Source::File { file, name }
        };
        self.open.push((shard, source));
        Ok(())
    }

    /// Fails if a file has changed since its header was read: what was read of it may then be of
    /// two states. To be called when all has been read.
    pub(super) fn check_unchanged(&self) -> Result<()> {
        for (shard, source) in &self.open {
            let (Source::File { file, name } | Source::Map { file, name, .. }) = source;
            if let Some(shard) = self.checkpoint.shards.get(*shard) {
                shard.stamp.check(file, name)?;
            }
        }
        Ok(())
    }

    /// Calls `use_bytes` with `len` bytes of `tensor` from byte `begin` on.
    pub(super) fn with_bytes<T>(
        &self,
        tensor: &impl InFile,
        begin: usize,
        len: usize,
        use_bytes: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let source = self.source(tensor)?;
        let mut buffer = self.lock_staging().pop().unwrap_or_default();
        let result = source
            .bytes(tensor.file_offset().saturating_add(begin as u64), len, &mut buffer)
            .and_then(use_bytes);
        self.lock_staging().push(buffer);
        result
    }

    /// Reads bytes of `tensor` from byte `begin` on into `out`, which they fill.
    pub(super) fn read_into(
        &self,
        tensor: &impl InFile,
        begin: usize,
        out: &mut [u8],
    ) -> Result<()> {
        let offset = tensor.file_offset().saturating_add(begin as u64);
        match self.source(tensor)? {
            Source::File { file, name } => {
                file.read_exact_at(out, offset).map_err(|e| read_error(name, &e))
            }
            mapped => {
                out.copy_from_slice(mapped.bytes(offset, out.len(), &mut Vec::new())?);
                Ok(())
            }
        }
    }

    fn source(&self, tensor: &impl InFile) -> Result<&Source> {
        let source = self.open.iter().find(|(open, _)| *open == tensor.shard());
        source
            .map(|(_, source)| source)
            .ok_or_else(|| Error::internal(format!("the file of {} is not open", tensor.name())))
    }

    fn lock_staging(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
