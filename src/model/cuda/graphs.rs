//! Graphs of steps, by their shapes.

use std::collections::HashMap;

use super::record::RecordShape;
use crate::backend::{ComputeContext, ContextBackend, WorkGraph};
use crate::error::{Error, Result};
use crate::memory::Block;

/// The most graphs that are kept: each holds memory of the driver's.
const MAX_GRAPHS: usize = 64;

/// What a graph was recorded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GraphKey {
    pub shape: RecordShape,
    /// Where the KV cache begins.
    pub cache: usize,
}

/// See the head of the file.
#[derive(Default)]
pub(super) struct StepGraphs {
    /// `None`: this work has been queued once without a graph, and all its kernels are loaded.
    graphs: HashMap<GraphKey, Option<Recorded>>,
}

/// A graph and the memory that operators took for a while as it was recorded.
struct Recorded {
    graph: WorkGraph,
    _scratch: Vec<Block>,
}

impl StepGraphs {
    /// Forgets all graphs, because memory that they use goes.
    pub fn clear(&mut self) {
        self.graphs.clear();
    }

    /// Queues the work for `key`: kernel by kernel the first time, then as a graph.
    ///
    /// # Safety
    /// `queue` queues the same work for the same key each time, on memory that stays until
    /// [`StepGraphs::clear`]; it neither waits for the device nor asks the driver for memory.
    pub unsafe fn run(
        &mut self,
        context: &ComputeContext,
        key: GraphKey,
        queue: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let ContextBackend::Cuda(cuda) = context.backend() else {
            return Err(Error::internal("a graph on the CPU"));
        };
        if !self.graphs.contains_key(&key) {
            queue()?;
            if self.graphs.len() >= MAX_GRAPHS {
                self.clear();
            }
            self.graphs
                .try_reserve(1)
                .map_err(|_| Error::out_of_memory("graphs", size_of::<GraphKey>()))?;
            self.graphs.insert(key, None);
            return Ok(());
        }
        let slot = self.graphs.entry(key).or_default();
        let recorded = match slot.take() {
            Some(recorded) => recorded,
            None => {
                let (graph, scratch) = context.hold_memory(|| WorkGraph::record(cuda, queue))?;
                Recorded { graph, _scratch: scratch }
            }
        };
        // SAFETY: the caller keeps what the graph uses.
        let done = unsafe { recorded.graph.launch(cuda) };
        *slot = Some(recorded);
        done
    }
}

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
