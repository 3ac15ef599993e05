//! Reads the weights into the library's own memory.
//!
//! Each tensor is read in pieces of a few MiB, and each piece is packed into its matrix by the
//! thread that read it, so the peak is the weights plus one piece per thread. `pread` is the
//! default: a file that is cut short under a mapping kills the process with SIGBUS, while a short
//! read is an error like any other.

pub(super) mod device;
pub(super) mod device_quantised;
pub(super) mod equal;
mod files;
mod geometry;
pub(super) mod heads;
pub(super) mod kept;
mod kept_rows;
mod loader;
mod options;
mod pieces;
pub mod plan;
mod quantised;
mod random;
mod transfer;
pub mod weights;

pub(super) use self::files::WeightFiles;
pub(super) use self::loader::Loader;
pub use self::options::{ActivationFormat, LoadOptions, WeightStorage};

use self::random::RandomWeights;
use super::checkpoint::Checkpoint;
use super::decoder::block::{Decoder, DecoderPlan};
use super::folder::Folder;
use crate::backend::cpu::CpuBackend;
use crate::error::Result;
use crate::ops::linear::HostMatrix;

/// The weights of a model on the CPU.
pub(super) type LoadedWeights = Decoder<HostMatrix, Vec<f32>>;

/// Reads what `plan` names, or makes it up for a checkpoint without files. `progress` gets the
/// fraction done, on this thread, and stops the load by returning false. `is_tied`: whether an output
/// matrix that is stored although it is declared tied is the embedding, if there is one. Also returns
/// the bytes of memory that the weights take.
pub(super) fn load_weights(
    plan: &DecoderPlan,
    folder: &Folder,
    checkpoint: &Checkpoint,
    backend: &CpuBackend,
    options: &LoadOptions,
    is_tied: Option<bool>,
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<(LoadedWeights, u64)> {
    let totals = plan.totals()?;
    let dtype = options.dtype.unwrap_or(totals.stored_dtype());
    let mut loader =
        Loader::new(folder, checkpoint, backend, dtype, options, totals.stored_bytes, progress)?;
    loader.open_kept(plan, folder, checkpoint, options, is_tied)?;
    let weights = if checkpoint.is_random() {
        plan.read(&mut RandomWeights::new(&mut loader))?
    } else {
        plan.read(&mut loader)?
    };
    loader.finish_kept(plan)?;
    loader.files.check_unchanged()?;
    Ok((weights, loader.weights_bytes))
}
