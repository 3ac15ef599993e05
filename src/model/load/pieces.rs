//! Tensors of files are cut into pieces, and the pieces are packed into loads that fill a slot
//! each.

use std::ops::Range;

use super::geometry::Geometry;
use crate::error::{Error, Result};
use crate::memory::DType;
use crate::model::checkpoint::Tensor;

/// The alignment of pieces in their slot, in bytes.
const PIECE_ALIGNMENT: usize = 256;

/// A tensor of a file, and where it goes.
pub(in crate::model) struct Job<P> {
    pub source: Tensor,
    pub rows: usize,
    /// The first row in the weight, counted in rows of the file.
    pub first_row: usize,
    pub geometry: Geometry,
    pub place: P,
}

/// Rows of a job, and where they lie in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) struct Piece {
    pub job: usize,
    pub first: usize,
    pub last: usize,
    pub slot_offset: usize,
}

/// The jobs in pieces, and the pieces in loads that fill a slot each.
pub(in crate::model) struct Loads {
    pub pieces: Vec<Piece>,
    /// The range of `pieces` of each load.
    pub loads: Vec<Range<usize>>,
    /// The size of the largest load in bytes.
    pub slot_bytes: usize,
}

/// Appends to a list; running out of memory is an error and does not end the process.
pub(in crate::model) fn push<T>(list: &mut Vec<T>, value: T) -> Result<()> {
    list.try_reserve(1).map_err(|_| {
        Error::out_of_memory("pieces of weight files", (list.len() + 1) * size_of::<T>())
    })?;
    list.push(value);
    Ok(())
}

impl<P> Job<P> {
    /// Returns the job for a tensor of a file. Its `rows` rows are those from `first_row` on of a
    /// weight of `geometry`.
    pub fn new(
        source: &Tensor,
        rows: usize,
        first_row: usize,
        geometry: &Geometry,
        place: P,
    ) -> Result<Self> {
        let too_large = || Error::out_of_memory(&source.name, usize::MAX);
        let source = source.clone();
        let job = match geometry.flat() {
            Some(flat) => Job {
                source: source.clone(),
                rows: rows.checked_mul(geometry.columns).ok_or_else(too_large)?,
                first_row: first_row.checked_mul(geometry.columns).ok_or_else(too_large)?,
                geometry: flat,
                place,
            },
            None => Job { source: source.clone(), rows, first_row, geometry: *geometry, place },
        };
        let stored = job.rows.checked_mul(job.row_from());
        if stored.map(|bytes| bytes as u64) != Some(source.len_bytes) {
            return Err(Error::internal(format!("{} is not what was planned", source.name)));
        }
        Ok(job)
    }

    /// Returns the bytes of a row in the file.
    pub fn row_from(&self) -> usize {
        self.geometry.columns * self.source.dtype.size_bytes()
    }

    /// Returns the bytes of a row on the device.
    pub fn row_to(&self, dtype: DType) -> usize {
        self.geometry.device_columns() * dtype.size_bytes()
    }
}

impl Loads {
    /// Cuts the jobs, in the order of the files, for slots of up to `slot_bytes` of elements of
    /// `dtype`.
    pub fn cut<P>(jobs: &mut [Job<P>], dtype: DType, slot_bytes: usize) -> Result<Self> {
        jobs.sort_by_key(|job| (job.source.shard, job.source.file_offset));
        let mut all = Loads { pieces: Vec::new(), loads: Vec::new(), slot_bytes: 0 };
        let (mut begin, mut used) = (0, 0usize);
        for (index, job) in jobs.iter().enumerate() {
            let (from, to) = (job.row_from(), job.row_to(dtype));
            if from == 0 || to == 0 {
                continue;
            }
            let rows_per_piece = (slot_bytes / from.max(to)).max(1);
            let mut first = 0;
            while first < job.rows {
                let last = job.rows.min(first.saturating_add(rows_per_piece));
                let bytes = (last - first)
                    .checked_mul(to)
                    .and_then(|bytes| bytes.checked_next_multiple_of(PIECE_ALIGNMENT))
                    .ok_or_else(|| Error::out_of_memory(&job.source.name, usize::MAX))?;
                if used > 0 && used.saturating_add(bytes) > slot_bytes {
                    push(&mut all.loads, begin..all.pieces.len())?;
                    (begin, used) = (all.pieces.len(), 0);
                }
                push(&mut all.pieces, Piece { job: index, first, last, slot_offset: used })?;
                used = used.saturating_add(bytes);
                all.slot_bytes = all.slot_bytes.max(used);
                first = last;
            }
        }
        if begin < all.pieces.len() {
            push(&mut all.loads, begin..all.pieces.len())?;
        }
        Ok(all)
    }

    /// Returns the pieces of one load.
    pub fn pieces_of(&self, load: usize) -> &[Piece] {
        let load = self.loads.get(load).cloned().unwrap_or_default();
        self.pieces.get(load).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::load::heads::HeadSpacing;
    use crate::ops::linear::ShardAxis;

    #[test]
    fn pieces_fill_slots_in_the_order_of_the_file() {
        let tensor = |offset: u64, len: u64| Tensor {
            name: offset.to_string(),
            shard: 0,
            dtype: DType::BF16,
            file_offset: offset,
            len_bytes: 2 * len,
        };
        let spacing = HeadSpacing { head_dim: 48, stride: 48 };
        let vector = |len: usize| Geometry::new(len, 1, ShardAxis::None, spacing);
        let mut jobs = Vec::new();
        let mut add = |tensor: &Tensor, rows: usize| {
            Job::new(tensor, rows, 0, &vector(rows), ()).map(|job| jobs.push(job))
        };
        add(&tensor(20_000, 100), 100).unwrap();
        add(&tensor(30_000, 0), 0).unwrap();
        add(&tensor(0, 4000), 4000).unwrap();
        add(&tensor(10_000, 10), 10).unwrap();
        assert!(add(&tensor(0, 10), 11).is_err());
        let all = Loads::cut(&mut jobs, DType::BF16, 4096).unwrap();
        let piece = |job, first, last, slot_offset| Piece { job, first, last, slot_offset };
        assert_eq!(
            all.pieces,
            [
                piece(0, 0, 2048, 0),
                piece(0, 2048, 4000, 0),
                piece(1, 0, 10, 0),
                piece(2, 0, 100, 256)
            ]
        );
        assert_eq!(all.loads, [0..1, 1..2, 2..4]);
        assert_eq!(all.slot_bytes, 4096);
    }
}
