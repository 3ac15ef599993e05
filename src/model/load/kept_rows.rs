//! Rows of quantised matrices from and to a file of kept weights, on all threads.

use std::sync::atomic::{AtomicBool, Ordering};

use super::files::PIECE_BYTES;
use super::kept::{is_quantised_at_load, Kept, KeptFile, KeptWriter, PieceSums};
use super::loader::{piece_rows, Loader};
use super::options::LoadOptions;
use super::quantised::Rows;
use super::weights::{MatrixPlan, VectorPlan, WeightReader};
use crate::error::{Context, Error, Result};
use crate::model::checkpoint::{Checkpoint, Tensor};
use crate::model::decoder::block::DecoderPlan;
use crate::model::folder::Folder;
use crate::ops::linear::MatrixLayout;

impl Loader<'_> {
    /// Opens the file that the options name, if they name one: what `plan` quantises is then read from it, or
    /// written to it. `is_tied`: see [`Kept::open`].
    pub(in crate::model) fn open_kept(
        &mut self,
        plan: &DecoderPlan,
        folder: &Folder,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        is_tied: Option<bool>,
    ) -> Result<()> {
        let Some(path) = &options.kept_weights else { return Ok(()) };
        if checkpoint.is_random() {
            return Err(Error::invalid_argument(
                "kept_weights was given, but random weights are not kept",
            ));
        }
        self.kept = Kept::open(path, plan, folder, checkpoint, is_tied)?;
        Ok(())
    }

    /// Returns the rows of a part that a thread reads or writes at once.
    fn kept_rows_at_once(&self, num_rows: usize, target: &Rows<'_>) -> usize {
        let share = num_rows.div_ceil(self.backend.num_threads());
        piece_rows(MatrixLayout::Rows, target.row_bytes().max(1)).min(share).max(1)
    }

    /// Reads what is kept of a tensor to the rows from `first_row` on. The tensor itself is read only if
    /// nothing else tells that it is what it was.
    pub(super) fn read_kept(
        &mut self,
        kept: &KeptFile,
        source: &Tensor,
        num_rows: usize,
        first_row: usize,
        target: &Rows<'_>,
    ) -> Result<()> {
        let tensor = kept.tensor(source)?;
        if tensor.is_in_doubt() {
            let sums = self.source_sums(source)?;
            tensor.check_source(source, &sums).context(|| kept.shown())?;
        }
        let rows_at_once = self.kept_rows_at_once(num_rows, target);
        let sums = tensor.sums(rows_at_once)?;
        let are_sound = AtomicBool::new(true);
        let bytes_each = source.len_bytes as usize / num_rows.max(1);
        self.in_rows(
            num_rows,
            rows_at_once,
            bytes_each,
            first_row,
            target,
            &|files, first, mut rows| {
                let num_rows = rows.codes.len() / target.row_bytes().max(1);
                files.with_buffer(num_rows * tensor.scales_bytes(), |scales| {
                    if !kept.read_rows(tensor, first, &mut rows, scales, &sums)? {
                        are_sound.store(false, Ordering::Relaxed);
                    }
                    Ok(())
                })
            },
        )
        .and_then(|()| kept.check(tensor, &sums, are_sound.into_inner()))
        .context(|| kept.shown())
    }

    /// Reads a tensor of the model for its checksum.
    fn source_sums(&mut self, source: &Tensor) -> Result<PieceSums> {
        self.files.open(source)?;
        let len = usize::try_from(source.len_bytes)
            .map_err(|_| Error::out_of_memory(&source.name, usize::MAX))?;
        let sums = PieceSums::new(len, PIECE_BYTES)?;
        // Progress is that of what is kept.
        self.in_pieces(len, PIECE_BYTES, 0, &|files, first, last| {
            files.with_bytes(source, first, last - first, |bytes| {
                sums.set(first, bytes);
                Ok(())
            })
        })?;
        Ok(sums)
    }

    /// Writes the rows of a tensor, which are those from `first_row` on. `read` are the checksums of the
    /// tensor.
    pub(super) fn write_kept(
        &mut self,
        kept: &KeptWriter,
        source: &Tensor,
        num_rows: usize,
        first_row: usize,
        target: &Rows<'_>,
        read: &PieceSums,
    ) -> Result<()> {
        let rows_at_once = self.kept_rows_at_once(num_rows, target);
        let sums = kept.sums(source, rows_at_once)?;
        self.in_rows(num_rows, rows_at_once, 0, first_row, target, &|_, first, rows| {
            kept.write_rows(source, first, &rows, &sums)
        })
        .and_then(|()| kept.done(source, read, &sums))
        .context(|| kept.shown())
    }

    /// Ends what [`open_kept`](Loader::open_kept) began, when all else has been read.
    pub(super) fn finish_kept(&mut self, plan: &DecoderPlan) -> Result<()> {
        match self.kept.clone() {
            Kept::No => Ok(()),
            Kept::Read(kept) => kept.check_unchanged(),
            Kept::Write(kept) => {
                // Those that stay dense on this device; on another they do not.
                plan.read(&mut Rest { loader: self, kept: &kept })?;
                self.files.check_unchanged()?;
                kept.finish().context(|| kept.shown())
            }
        }
    }
}

/// Quantises the matrices that a load has left dense, for the file alone.
struct Rest<'l, 'a> {
    loader: &'l mut Loader<'a>,
    kept: &'l KeptWriter,
}

impl WeightReader for Rest<'_, '_> {
    type Matrix = ();
    type Vector = ();

    fn matrix(&mut self, plan: &MatrixPlan) -> Result<()> {
        let Some(format) = plan.quantised.filter(|_| is_quantised_at_load(plan)) else {
            return Ok(());
        };
        let is_done = |part: &_| self.kept.is_done(part);
        if plan.parts.iter().filter_map(|part| part.dense().ok()).all(is_done) {
            return Ok(());
        }
        self.loader.quantised(plan, format).map(|_| ())
    }

    fn vector(&mut self, _: &VectorPlan) -> Result<()> {
        Ok(())
    }
}
