//! Reads weights piece by piece on all threads, and packs them for the CPU.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::files::{WeightFiles, PIECES_PER_REPORT, PIECE_BYTES};
use super::kept::Kept;
use super::options::{ActivationFormat, LoadOptions};
use super::weights::{MatrixPart, MatrixPlan, PartSource, VectorPlan, WeightReader};
use crate::backend::cpu::CpuBackend;
use crate::error::{try_filled, try_with_capacity, Error, ErrorKind, Result};
use crate::memory::{DType, HostArena};
use crate::model::checkpoint::Checkpoint;
use crate::model::folder::Folder;
use crate::ops::common::packed_matrix::{PackedMatrix, PairOrder, PanelWriter, PANEL_COLUMNS};
use crate::ops::linear::{HostMatrix, MatrixLayout};
use crate::ops::quantised::{QuantisedMatrix, QuantisedPanels};

/// The state of one load.
pub(in crate::model) struct Loader<'a> {
    pub(in crate::model) files: WeightFiles<'a>,
    pub(in crate::model) backend: &'a CpuBackend,
    pub(super) kept: Kept,
    pub(super) dtype: DType,
    activations: ActivationFormat,
    /// See [`QuantisedPanels::rounding`].
    is_rounded: bool,
    /// Where the CPU has its weights.
    pub(super) arena: HostArena,
    /// Memory that the weights take.
    pub(super) weights_bytes: u64,
    pub(super) done_bytes: u64,
    total_bytes: u64,
    progress: &'a mut dyn FnMut(f32) -> bool,
}

impl<'a> Loader<'a> {
    /// Returns the state before anything is read, and reports it to `progress`.
    pub(in crate::model) fn new(
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
            kept: Kept::No,
            dtype,
            activations: options.activations,
            is_rounded: dtype == DType::BF16 && !options.deterministic,
            arena: HostArena::new(usize::try_from(total_bytes).unwrap_or(usize::MAX)),
            weights_bytes: 0,
            done_bytes: 0,
            total_bytes,
            progress,
        };
        loader.report()?;
        Ok(loader)
    }

    /// Adds `bytes` to the bytes of the files that are done, and reports progress.
    pub(super) fn advance(&mut self, bytes: usize) -> Result<()> {
        self.done_bytes += bytes as u64;
        self.report()
    }

    /// Calls `task` for each piece `[begin, end)` of `0..len` on all threads, `piece` long but for
    /// the last, and reports progress of `bytes_each` for each unit in between.
    pub(super) fn in_pieces(
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

    /// Reports the end, unless a file has changed meanwhile.
    pub(super) fn end(&mut self) -> Result<()> {
        self.files.check_unchanged()?;
        report(self.progress, self.total_bytes, self.total_bytes)
    }

    fn report(&mut self) -> Result<()> {
        report(self.progress, self.done_bytes, self.total_bytes)
    }

    /// Does steps `0..num_steps`, begun in this order, on this thread and up to `max_threads - 1`
    /// others, each of which goes on with the next as soon as it is done with one. `step` returns
    /// the bytes of the files that it has done. This thread calls `before` first. Progress is
    /// reported on it, between its own steps.
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
            // No thread begins another step.
            next.store(num_steps, Ordering::Relaxed);
            failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        };
        let files = &self.files;
        // Does the next step; returns false if there is none, or if it failed.
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

    /// Packs a matrix for the CPU.
    pub(super) fn pack_quantised(&mut self, mut matrix: QuantisedMatrix) -> Result<HostMatrix> {
        matrix.format = self.activations.of(matrix.format);
        let packed = QuantisedPanels::pack_in(&mut self.arena, self.backend, &matrix)?;
        let packed = packed.rounding(self.is_rounded);
        self.weights_bytes += packed.size_bytes() as u64;
        Ok(HostMatrix::Quantised(packed))
    }

    /// Packs the numbers of a part that is stored quantised, from row `first_row` of the matrix on.
    fn pack_numbers(
        &mut self,
        stored: &QuantisedMatrix,
        first_row: usize,
        writer: &PanelWriter<'_>,
    ) -> Result<()> {
        let in_features = stored.in_features;
        // The bytes of the files have been counted.
        self.in_pieces(stored.out_features, PANEL_COLUMNS, 0, &|_, first, last| {
            let mut row = try_filled(in_features, 0.0_f32, "a row of a weight")?;
            let mut bytes = try_with_capacity(in_features * size_of::<f32>(), "a row of a weight")?;
            for index in first..last {
                stored.row_to_f32(index, &mut row)?;
                bytes.clear();
                bytes.extend(row.iter().flat_map(|x| x.to_le_bytes()));
                writer.pack_rows(first_row + index, &bytes, DType::F32)?;
            }
            Ok(())
        })
    }

    /// Packs a part stored `[out_features, in_features]` from row `first_row` of the matrix on.
    fn pack_rows(
        &mut self,
        part: &MatrixPart,
        in_features: usize,
        first_row: usize,
        writer: &PanelWriter<'_>,
    ) -> Result<()> {
        let tensor = part.dense()?;
        let row_bytes = in_features * tensor.dtype.size_bytes();
        let rows = piece_rows(MatrixLayout::Rows, row_bytes);
        self.in_pieces(part.out_features, rows, row_bytes, &|files, first, last| {
            let (begin, len) = (first * row_bytes, (last - first) * row_bytes);
            files.with_bytes(tensor, begin, len, |bytes| {
                writer.pack_rows(first_row + first, bytes, tensor.dtype)
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
        let tensor = part.dense()?;
        let row_bytes = part.out_features * tensor.dtype.size_bytes();
        let rows = piece_rows(MatrixLayout::Columns, row_bytes);
        self.in_pieces(in_features, rows, row_bytes, &|files, first, last| {
            let (begin, num_k) = (first * row_bytes, last - first);
            files.with_bytes(tensor, begin, num_k * row_bytes, |bytes| {
                writer.pack_columns(first, num_k, first_column, bytes, tensor.dtype)
            })
        })
    }
}

impl WeightReader for Loader<'_> {
    type Matrix = HostMatrix;
    type Vector = Vec<f32>;

    fn matrix(&mut self, plan: &MatrixPlan) -> Result<HostMatrix> {
        if let Some(format) = plan.quantised {
            let matrix = self.quantised(plan, format)?;
            return self.pack_quantised(matrix);
        }
        let order = PairOrder::of(self.backend);
        let mut matrix = PackedMatrix::zeroed_in(
            &mut self.arena,
            plan.out_features,
            plan.in_features,
            self.dtype,
            order,
        )?;
        let writer = matrix.writer()?;
        let mut first = 0;
        for part in &plan.parts {
            if let PartSource::Quantised(module) = &part.source {
                let stored = self.decode(module)?;
                self.pack_numbers(&stored, first, &writer)?;
                first += part.out_features;
                continue;
            }
            self.files.open(part.dense()?)?;
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
        Ok(HostMatrix::Dense(matrix))
    }

    fn vector(&mut self, plan: &VectorPlan) -> Result<Vec<f32>> {
        let mut vector = try_with_capacity(plan.len, "a weight vector")?;
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

/// Returns the number of stored rows of `row_bytes` each in a piece of a matrix.
pub(super) fn piece_rows(layout: MatrixLayout, row_bytes: usize) -> usize {
    let rows = PIECE_BYTES / row_bytes;
    match layout {
        // Whole panels, unless a row is so long that 64 of them are no small piece.
        MatrixLayout::Rows if rows < PANEL_COLUMNS => rows.max(1),
        MatrixLayout::Rows => rows - rows % PANEL_COLUMNS,
        // An even number, because bf16 panels hold pairs.
        MatrixLayout::Columns => rows.max(2) & !1,
    }
}

/// Reports to `progress` how far loading has come; returns an error if it asks to stop.
fn report(progress: &mut dyn FnMut(f32) -> bool, done: u64, total: u64) -> Result<()> {
    let fraction = match total {
        0 => 1.0,
        total => (done as f64 / total as f64).min(1.0) as f32,
    };
    if progress(fraction) {
        Ok(())
    } else {
        Err(Error::new(ErrorKind::Cancelled, "loading was cancelled by the progress callback"))
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
