//! Whether two stored matrices are equal: what a config that declares the output matrix tied leaves open when
//! the files hold both.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::files::{WeightFiles, PIECES_PER_REPORT, PIECE_BYTES};
use super::weights::{MatrixPlan, PartSource};
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, ErrorKind, Result};

/// Bytes that are compared first. Matrices that differ nearly always do so here.
const SAMPLE_BYTES: usize = 1 << 20;
/// Matrices that take more bytes than this in the files count as different without being read: more than
/// twice the embedding of any published model that is tied, and few enough for a sparse file, which costs its
/// author nothing, to be compared within seconds.
const MAX_COMPARED_BYTES: u64 = 8 << 30;

/// Whether `a` and `b`, of the same shape, are stored as the same bytes. Reads them in pieces up to the first
/// difference, on the threads of `backend` or on this one alone, and calls `go_on` between pieces, which ends
/// the comparison with [`ErrorKind::Cancelled`] by returning false.
pub(in crate::model) fn are_equal(
    a: &MatrixPlan,
    b: &MatrixPlan,
    mut files: WeightFiles<'_>,
    backend: Option<&CpuBackend>,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<bool> {
    let ([a], [b]) = (a.parts.as_slice(), b.parts.as_slice()) else {
        return Ok(false);
    };
    let (PartSource::Dense(a), PartSource::Dense(b)) = (&a.source, &b.source) else {
        return Ok(false);
    };
    if a.dtype != b.dtype || a.len_bytes != b.len_bytes || a.len_bytes > MAX_COMPARED_BYTES {
        return Ok(false);
    }
    let Ok(len) = usize::try_from(a.len_bytes) else {
        return Ok(false);
    };
    files.open(a)?;
    files.open(b)?;
    let differ = AtomicBool::new(false);
    let failure: Mutex<Option<Error>> = Mutex::new(None);
    let compare = |begin: usize, end: usize| {
        if differ.load(Ordering::Relaxed) {
            return;
        }
        let equal = files.with_bytes(a, begin, end - begin, |a_bytes| {
            files.with_bytes(b, begin, end - begin, |b_bytes| Ok(a_bytes == b_bytes))
        });
        match equal {
            Ok(true) => {}
            Ok(false) => differ.store(true, Ordering::Relaxed),
            Err(error) => {
                differ.store(true, Ordering::Relaxed);
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        }
    };
    let num_threads = backend.map_or(1, CpuBackend::num_threads);
    let group = PIECE_BYTES * PIECES_PER_REPORT * num_threads;
    let mut begin = len.min(SAMPLE_BYTES);
    compare(0, begin);
    while begin < len && !differ.load(Ordering::Relaxed) {
        if !go_on() {
            return Err(Error::new(
                ErrorKind::Cancelled,
                "loading was cancelled by the progress callback",
            ));
        }
        let end = len.min(begin.saturating_add(group));
        let num_pieces = (end - begin).div_ceil(PIECE_BYTES);
        let compare_piece = |index: usize| {
            let first = begin + index * PIECE_BYTES;
            compare(first, end.min(first + PIECE_BYTES));
        };
        match backend {
            Some(backend) => backend.parallel_for(num_pieces, &compare_piece)?,
            None => (0..num_pieces).for_each(compare_piece),
        }
        begin = end;
    }
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(!differ.into_inner()),
    }
}
