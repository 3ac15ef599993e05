//! A cache of graphs, for work on a device that is queued again and again.

use std::collections::HashMap;
use std::hash::Hash;

use super::cuda::Graph;
use super::{ComputeContext, ContextBackend, DeviceTensor};
use crate::error::{try_with_capacity, Error, Result};
use crate::memory::Block;

/// The most graphs that are kept: each holds some of the driver's memory.
const MAX_GRAPHS: usize = 64;

/// Graphs by the key of the work that they were recorded for.
pub(crate) struct GraphCache<K> {
    /// `None`: this work has been queued once without a graph, and all its kernels are loaded.
    graphs: HashMap<K, Option<Recorded>>,
}

/// A graph and the memory that its work uses.
struct Recorded {
    graph: Graph,
    /// The memory that operators took temporarily while the graph was recorded.
    _scratch: Vec<Block>,
    _tensors: Vec<DeviceTensor>,
}

impl<K> Default for GraphCache<K> {
    fn default() -> Self {
        GraphCache { graphs: HashMap::new() }
    }
}

impl<K: Copy + Eq + Hash> GraphCache<K> {
    /// Forgets all graphs.
    pub fn clear(&mut self) {
        self.graphs.clear();
    }

    /// Queues the work for `key`: kernel by kernel the first time, then as a graph. `queue` queues
    /// the same work for the same key each time, on the memory of `tensors` and memory that
    /// operators take from the context meanwhile; it does not wait for the device. The tensors are
    /// kept as long as the graph. Work that cannot be recorded, because the context would have to
    /// ask the driver for memory, is queued kernel by kernel once more.
    pub fn run(
        &mut self,
        context: &ComputeContext,
        key: K,
        tensors: &[&DeviceTensor],
        queue: impl Fn() -> Result<()>,
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
                .map_err(|_| Error::out_of_memory("graphs", size_of::<K>()))?;
            self.graphs.insert(key, None);
            return Ok(());
        }
        let slot = self.graphs.entry(key).or_default();
        let recorded = match slot.take() {
            Some(recorded) => recorded,
            None => {
                let recorded = context.hold_memory(|| Graph::record(cuda, &queue));
                let Ok((graph, scratch)) = recorded else {
                    cuda.check_alive()?;
                    return queue();
                };
                let mut kept = try_with_capacity(tensors.len(), "the tensors of a graph")?;
                kept.extend(tensors.iter().map(|&tensor| tensor.clone()));
                Recorded { graph, _scratch: scratch, _tensors: kept }
            }
        };
        // SAFETY: the memory that the recorded kernels use is kept with the graph.
        let done = unsafe { recorded.graph.launch(cuda) };
        *slot = Some(recorded);
        done
    }
}
