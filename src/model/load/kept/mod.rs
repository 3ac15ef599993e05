//! Matrices that are quantised at load, kept in a file that the caller names, so that the next load
//! reads them and computes nothing.
//!
//! The file is a safetensors file. For each tensor `NAME` of the model's files that is quantised it has
//!
//! ```text
//! NAME.scales  BF16  [out_features, num_groups]
//! NAME.codes   U8    [out_features, row_bytes]     of two codes of 4 bits in a byte the first is in the low half
//! NAME.zeros   U8    [out_features, num_groups]    4 bits only
//! ```
//!
//! the rows of a [`QuantisedMatrix`](crate::ops::quantised::QuantisedMatrix), which no kernel's layout
//! enters: every device packs them as it packs what it has just quantised. The metadata hold a
//! [`description`]: the version, the files that the numbers came from, and for each tensor its format and
//! the CRC-32 of its source and of all that is kept of it.
//!
//! A file that is there is read or refused; nothing overwrites it. Checksums find accidents: who can write
//! the file can write fitting ones. So whatever it says is checked like any other file of a model.

mod checksum;
mod description;
mod reader;
mod source;
mod wanted;
mod writer;

use std::path::Path;
use std::sync::Arc;

pub(super) use self::checksum::PieceSums;
pub(super) use self::reader::KeptFile;
pub(super) use self::wanted::is_quantised_at_load;
pub(super) use self::writer::KeptWriter;

use self::source::source_files;
use self::wanted::wanted;
use crate::error::{Context, Result};
use crate::model::checkpoint::Checkpoint;
use crate::model::decoder::block::DecoderPlan;
use crate::model::folder::Folder;

/// What a load does with the matrices that it quantises.
#[derive(Clone, Default)]
pub(super) enum Kept {
    /// Nothing else.
    #[default]
    No,
    /// Reads them from a file instead.
    Read(Arc<KeptFile>),
    /// Writes them to a file.
    Write(Arc<KeptWriter>),
}

impl Kept {
    /// Opens the file at `path` for the matrices of `plan`, or begins it if there is none. `is_tied`: whether
    /// an output matrix that is stored although it is declared tied is the embedding, if there is one.
    pub fn open(
        path: &Path,
        plan: &DecoderPlan,
        folder: &Folder,
        checkpoint: &Checkpoint,
        is_tied: Option<bool>,
    ) -> Result<Kept> {
        let wanted = wanted(plan)?;
        let sources = source_files(folder, checkpoint)?;
        let shown = format!("kept_weights {}", path.display());
        let open = || match KeptFile::open(path, &shown, &wanted, &sources)? {
            Some(file) => Ok(Kept::Read(Arc::new(file))),
            None => {
                let writer = KeptWriter::new(path, &shown, &wanted, sources, is_tied)?;
                Ok(Kept::Write(Arc::new(writer)))
            }
        };
        open().context(|| &shown)
    }
}

/// Returns what the file at `path` tells of an output matrix that is stored although it is declared tied:
/// whether it is the embedding. `None` if it does not tell, if the model may have changed since, or if there
/// is no such file: what is wrong with it is told by [`Kept::open`].
pub(in crate::model) fn recorded_tie(
    path: &Path,
    folder: &Folder,
    checkpoint: &Checkpoint,
) -> Option<bool> {
    let description = reader::read_description(path).ok()??;
    let sources = source_files(folder, checkpoint).ok()?;
    description.output_is_embedding.filter(|_| description.is_made_from(&sources))
}
