//! Which steps share a graph.

use super::record::RecordShape;
use crate::backend::GraphCache;

/// What a graph was recorded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GraphKey {
    pub shape: RecordShape,
    /// Where the KV cache begins.
    pub cache: usize,
    /// The profile that it is for; 0: none.
    pub profile: u64,
}

/// Graphs of steps, by their shapes.
pub(super) type StepGraphs = GraphCache<GraphKey>;

/// The number of rows that a step of `len` rows is filled up to.
pub(super) fn row_bucket(len: usize) -> usize {
    match len {
        0..=2 => len,
        3..=4 => 4,
        5..=8 => 8,
        9..=32 => len.next_multiple_of(8),
        33..=128 => len.next_multiple_of(16),
        _ => len.next_multiple_of(32),
    }
}

/// The number of blocks that tables of up to `len` blocks are filled up to.
pub(super) fn table_bucket(len: usize) -> usize {
    len.max(4).next_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_what_they_are_for() {
        let mut buckets = Vec::new();
        for len in 1..=256 {
            let bucket = row_bucket(len);
            assert!(bucket >= len && bucket <= 256 && row_bucket(bucket) == bucket);
            buckets.push(bucket);
            assert!(table_bucket(len) >= len);
        }
        buckets.dedup();
        assert_eq!(buckets.len(), 17);
    }
}
