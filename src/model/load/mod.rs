//! Reads the weights into the library's own memory.
//!
//! Each tensor is read in pieces of a few MiB, and each piece is packed into its matrix by the
//! thread that read it, so the peak is the weights plus one piece per thread. `pread` is the
//! default: a file that is cut short under a mapping kills the process with SIGBUS, while a short
//! read is an error like any other.

pub(super) mod device;
pub(super) mod equal;
mod geometry;
pub(super) mod heads;
mod pieces;
pub mod plan;
mod transfer;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use self::plan::{MatrixPart, MatrixPlan, VectorPlan, WeightReader};
use super::checkpoint::{Checkpoint, Tensor};
use super::decoder::block::DecoderPlan;
use super::folder::{io_error, Folder};
use super::LoadedWeights;
use crate::backend::cpu::CpuBackend;
use crate::error::{try_filled, Error, ErrorKind, Result};
use crate::memory::DType;
use crate::ops::common::packed_matrix::PANEL_COLUMNS;
use crate::ops::common::packed_matrix::{PackedMatrix, PanelWriter};
use crate::ops::linear::MatrixLayout;

/// Bytes that one thread reads at once: large enough for a sequential read to run at the device's
/// speed, small enough for the L2 cache to hold a good part while it is being packed.
pub(super) const PIECE_BYTES: usize = 4 << 20;
/// Pieces per thread between two calls of the progress callback.
const PIECES_PER_REPORT: usize = 8;

/// How a model is loaded.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Element type of the weights and the KV cache; `None` takes the one that is stored.
    pub dtype: Option<DType>,
    /// Read through a mapping of the files instead of `pread`. A file that another process cuts
    /// short meanwhile then kills this process.
    pub map_files: bool,
    /// On a GPU: a row's logits have the same bits whatever is computed beside it, however its prompt is cut, and
    /// whether it is computed for the first time or again. On the CPU that is always so.
    pub deterministic: bool,
}

/// Reads what `plan` names. `progress` gets the fraction done, on this thread, and stops the load
/// by returning false. Also returns the bytes of memory that the weights take.
pub(super) fn load_weights(
    plan: &DecoderPlan,
    folder: &Folder,
    checkpoint: &Checkpoint,
    backend: &CpuBackend,
    options: &LoadOptions,
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<(LoadedWeights, u64)> {
    let totals = plan.totals()?;
    let dtype = options.dtype.unwrap_or(totals.stored_dtype());
    let mut loader =
        Loader::new(folder, checkpoint, backend, dtype, options, totals.stored_bytes, progress)?;
    let weights = plan.read(&mut loader)?;
    Ok((weights, loader.weights_bytes))
}

/// The state of one load.
pub(super) struct Loader<'a> {
    pub(super) files: WeightFiles<'a>,
    pub(super) backend: &'a CpuBackend,
    dtype: DType,
    /// Memory that the weights take.
    weights_bytes: u64,
    done_bytes: u64,
    total_bytes: u64,
    progress: &'a mut dyn FnMut(f32) -> bool,
}

/// The part of the state that all threads use.
pub(super) struct WeightFiles<'a> {
    folder: &'a Folder,
    checkpoint: &'a Checkpoint,
    map_files: bool,
    /// The files opened so far, by their position in the checkpoint.
    open: Vec<(usize, Source)>,
    /// Buffers that no thread uses at the moment.
    staging: Mutex<Vec<Vec<u8>>>,
}

/// Where a shard's bytes come from.
enum Source {
    File { file: File, name: String },
    Map { map: memmap2::Mmap, name: String },
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
    /// `len` bytes from `offset` on, in `buffer` unless they can be lent.
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
            Source::Map { map, name } => usize::try_from(offset)
                .ok()
                .and_then(|begin| map.get(begin..begin.checked_add(len)?))
                .ok_or_else(|| cut(name)),
        }
    }
}

impl<'a> WeightFiles<'a> {
    /// The files of `checkpoint`, which lie in `folder`; none is open yet.
    pub(super) fn new(folder: &'a Folder, checkpoint: &'a Checkpoint, map_files: bool) -> Self {
        let (open, staging) = (Vec::new(), Mutex::new(Vec::new()));
        WeightFiles { folder, checkpoint, map_files, open, staging }
    }

    /// Makes sure that the tensor's file is open.
    pub(super) fn open(&mut self, tensor: &Tensor) -> Result<()> {
        let shard = tensor.shard;
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
            Source::Map { map, name }
        } else {
            Source::File { file, name }
        };
        self.open.push((shard, source));
        Ok(())
    }

    /// Calls `use_bytes` with `len` bytes of `tensor` from byte `begin` on.
    pub(super) fn with_bytes<T>(
        &self,
        tensor: &Tensor,
        begin: usize,
        len: usize,
        use_bytes: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let source = self.source(tensor)?;
        let mut buffer = self.lock_staging().pop().unwrap_or_default();
        let result = source
            .bytes(tensor.file_offset.saturating_add(begin as u64), len, &mut buffer)
            .and_then(use_bytes);
        self.lock_staging().push(buffer);
        result
    }

    /// Reads bytes of `tensor` from byte `begin` on into `out`, which they fill.
    pub(super) fn read_into(&self, tensor: &Tensor, begin: usize, out: &mut [u8]) -> Result<()> {
        let offset = tensor.file_offset.saturating_add(begin as u64);
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

    fn source(&self, tensor: &Tensor) -> Result<&Source> {
        let source = self.open.iter().find(|(open, _)| *open == tensor.shard);
        source
            .map(|(_, source)| source)
            .ok_or_else(|| Error::internal(format!("the file of {} is not open", tensor.name)))
    }

    fn lock_staging(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'a> Loader<'a> {
    /// The state before anything is read; tells `progress` so.
    pub(super) fn new(
        folder: &'a Folder,
        checkpoint: &'a Checkpoint,
        backend: &'a CpuBackend,
        dtype: DType,
        options: &LoadOptions,
        total_bytes: u64,
        progress: &'a mut dyn FnMut(f32) -> bool,
    ) -> Result<Self> {
        let mut loader = Loader {
            files: WeightFiles::new(folder, checkpoint, options.map_files),
            backend,
            dtype,
            weights_bytes: 0,
            done_bytes: 0,
            total_bytes,
            progress,
        };
        loader.report()?;
        Ok(loader)
    }

    /// So many more bytes of the files are done.
    pub(super) fn advance(&mut self, bytes: usize) -> Result<()> {
        self.done_bytes += bytes as u64;
        self.report()
    }

    /// Calls `task` for each piece `[begin, end)` of `0..len` on all threads, `piece` long but for
    /// the last, and reports progress of `bytes_each` for each unit in between.
    fn in_pieces(
        &mut self,
        len: usize,
        piece: usize,
        bytes_each: usize,
        task: &(dyn Fn(&WeightFiles<'_>, usize, usize) -> Result<()> + Sync),
    ) -> Result<()> {
        let group = piece * PIECES_PER_REPORT * self.backend.num_threads();
        let mut begin = 0;
        while begin < len {
            let end = len.min(begin.saturating_add(group));
            let failure: Mutex<Option<Error>> = Mutex::new(None);
            let files = &self.files;
            self.backend.parallel_for((end - begin).div_ceil(piece), &|index| {
                let first = begin + index * piece;
                let last = end.min(first + piece);
                if let Err(error) = task(files, first, last) {
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
            })?;
            if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
                return Err(error);
            }
            self.advance((end - begin) * bytes_each)?;
            begin = end;
        }
        Ok(())
    }

    /// Reports the end.
    pub(super) fn end(&mut self) -> Result<()> {
        report(self.progress, self.total_bytes, self.total_bytes)
    }

    fn report(&mut self) -> Result<()> {
        report(self.progress, self.done_bytes, self.total_bytes)
    }

    /// Does steps `0..num_steps`, begun in this order, on this thread and up to `max_threads - 1` others, each
    /// of which goes on with the next as soon as it is done with one. `step` gives the bytes of the files that are done
    /// with it. This thread does `before` first. Progress is reported on it, between its own steps.
    pub(super) fn stream(
        &mut self,
        num_steps: usize,
        max_threads: usize,
        before: &mut dyn FnMut() -> Result<()>,
        step: &(dyn Fn(&WeightFiles<'_>, usize) -> Result<u64> + Sync),
    ) -> Result<()> {
        let next = AtomicUsize::new(0);
        let done_bytes = AtomicU64::new(self.done_bytes);
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        let fail = |error: Error| {
            // Nobody begins another step.
            next.store(num_steps, Ordering::Relaxed);
            failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        };
        let files = &self.files;
        // Does the next step; false if there is none, or it failed.
        let advance = || -> bool {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= num_steps {
                return false;
            }
            match step(files, index) {
                Ok(bytes) => {
                    done_bytes.fetch_add(bytes, Ordering::Relaxed);
                    true
                }
                Err(error) => {
                    fail(error);
                    false
                }
            }
        };
        let num_threads = AtomicUsize::new(1);
        let helper = |_: usize| {
            if num_threads.fetch_add(1, Ordering::Relaxed) < max_threads {
                while advance() {}
            }
        };
        let (progress, total_bytes) = (&mut self.progress, self.total_bytes);
        self.backend.with_helpers(&helper, &mut || {
            if let Err(error) = before() {
                fail(error);
            }
            while advance() {
                let done = done_bytes.load(Ordering::Relaxed);
                if let Err(error) = report(progress, done, total_bytes) {
                    fail(error);
                }
            }
        })?;
        if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        self.done_bytes = done_bytes.into_inner();
        self.report()
    }

    /// Packs a part stored `[out_features, in_features]` from row `first_row` of the matrix on.
    fn pack_rows(
        &mut self,
        part: &MatrixPart,
        in_features: usize,
        first_row: usize,
        writer: &PanelWriter<'_>,
    ) -> Result<()> {
        let row_bytes = in_features * part.tensor.dtype.size_bytes();
        // Whole panels, unless a row is so long that 64 of them are no small piece.
        let rows = (PIECE_BYTES / row_bytes).max(1);
        let rows = if rows < PANEL_COLUMNS { rows } else { rows - rows % PANEL_COLUMNS };
        self.in_pieces(part.out_features, rows, row_bytes, &|files, first, last| {
            let (begin, len) = (first * row_bytes, (last - first) * row_bytes);
            files.with_bytes(&part.tensor, begin, len, |bytes| {
                writer.pack_rows(first_row + first, bytes, part.tensor.dtype)
            })
        })
    }

    /// Packs a part stored `[in_features, out_features]`.
    fn pack_columns(
        &mut self,
        part: &MatrixPart,
        in_features: usize,
        first_column: usize,
        writer: &PanelWriter<'_>,
    ) -> Result<()> {
        let row_bytes = part.out_features * part.tensor.dtype.size_bytes();
        // An even number, because bf16 panels hold pairs.
        let rows = (PIECE_BYTES / row_bytes).max(2) & !1;
        self.in_pieces(in_features, rows, row_bytes, &|files, first, last| {
            let (begin, num_k) = (first * row_bytes, last - first);
            files.with_bytes(&part.tensor, begin, num_k * row_bytes, |bytes| {
                writer.pack_columns(first, num_k, first_column, bytes, part.tensor.dtype)
            })
        })
    }
}

impl WeightReader for Loader<'_> {
    type Matrix = PackedMatrix;
    type Vector = Vec<f32>;

    fn matrix(&mut self, plan: &MatrixPlan) -> Result<PackedMatrix> {
        let mut matrix = PackedMatrix::zeroed(plan.out_features, plan.in_features, self.dtype)?;
        let writer = matrix.writer()?;
        let mut first = 0;
        for part in &plan.parts {
            self.files.open(&part.tensor)?;
            match plan.layout {
                MatrixLayout::Rows => self.pack_rows(part, plan.in_features, first, &writer)?,
                MatrixLayout::Columns => {
                    self.pack_columns(part, plan.in_features, first, &writer)?
                }
            }
            first += part.out_features;
        }
        drop(writer);
        self.weights_bytes += matrix.size_bytes() as u64;
        Ok(matrix)
    }

    fn vector(&mut self, plan: &VectorPlan) -> Result<Vec<f32>> {
        let mut vector = crate::error::try_with_capacity(plan.len, "a weight vector")?;
        for tensor in &plan.parts {
            self.files.open(tensor)?;
            let len = usize::try_from(tensor.len_bytes)
                .map_err(|_| Error::out_of_memory(&tensor.name, usize::MAX))?;
            let mut begin = 0;
            while begin < len {
                let piece = PIECE_BYTES.min(len - begin);
                self.files.with_bytes(tensor, begin, piece, |bytes| {
                    extend_f32(&mut vector, bytes, tensor.dtype);
                    Ok(())
                })?;
                begin += piece;
                self.done_bytes += piece as u64;
            }
        }
        if vector.len() != plan.len {
            return Err(Error::internal(format!(
                "a vector of {} numbers was planned, {} were read",
                plan.len,
                vector.len()
            )));
        }
        self.weights_bytes += (plan.len * size_of::<f32>()) as u64;
        Ok(vector)
    }
}

/// Tells `progress` how far loading has come; an error if it wants no more.
fn report(progress: &mut dyn FnMut(f32) -> bool, done: u64, total: u64) -> Result<()> {
    let fraction = match total {
        0 => 1.0,
        total => (done as f64 / total as f64).min(1.0) as f32,
    };
    match progress(fraction) {
        true => Ok(()),
        false => {
            Err(Error::new(ErrorKind::Cancelled, "loading was cancelled by the progress callback"))
        }
    }
}

/// Appends little-endian numbers of type `dtype`, as f32; the room is there already.
fn extend_f32(out: &mut Vec<f32>, bytes: &[u8], dtype: DType) {
    match dtype {
        DType::F32 => out.extend(bytes.chunks_exact(4).map(|b| match *b {
            [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
            _ => 0.0,
        })),
        DType::F16 => out.extend(pairs(bytes).map(|bits| half::f16::from_bits(bits).to_f32())),
        DType::BF16 => out.extend(pairs(bytes).map(|bits| half::bf16::from_bits(bits).to_f32())),
    }
}

fn pairs(bytes: &[u8]) -> impl Iterator<Item = u16> + '_ {
    bytes.chunks_exact(2).map(|b| match *b {
        [a, b] => u16::from_le_bytes([a, b]),
        _ => 0,
    })
}
