//! Host memory for blocks of the KV cache whose sequences have to wait: a place for each block,
//! `[num_layers, 2, BLOCK_SIZE, num_kv_heads, head_dim]`, keys before values.
//!
//! It grows in slabs when it proves too small, and never shrinks. For a model on a device it is
//! pinned, and the device copies by itself, in the order of its stream: after the steps that were
//! begun before the copies, and before later ones.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::kv_cache::KvCache;
use super::loaded::{Compute, Model};
use crate::backend::cuda::{CudaContext, Event};
use crate::backend::{ComputeContext, PinnedBuffer};
use crate::error::{check_room, Error, Result};
use crate::memory::{HostBuffer, Pages};
use crate::ops::kv_cache::cuda_swap::{kv_cache_swap, KvCopy, MAX_KV_COPIES};
use crate::ops::kv_cache::layout::KvLayout;
use crate::threads::{Thread, STACK_BYTES};

/// The direction in which a block is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// From the KV cache to the place on the host.
    ToHost,
    /// From the place on the host to the KV cache.
    FromHost,
}

/// A copy of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block of the KV cache.
    pub block: u32,
    /// The place on the host.
    pub place: u32,
    /// The direction of the copy.
    pub direction: CopyDirection,
}

/// The size of a slab in bytes, unless a place is larger.
const SLAB_BYTES: usize = 256 << 20;

/// The places of one model.
pub struct KvSwap {
    layout: KvLayout,
    /// The slabs of a model on the host.
    slabs: Vec<HostBuffer>,
    /// The slabs of a model on a device.
    pinned: Vec<PinnedBuffer>,
    growing: Option<Growing>,
    context: Option<Arc<ComputeContext>>,
    /// The marks before and after copies whose time has not been taken yet.
    marks: Option<(Event, Event)>,
    /// The number of blocks between the marks.
    marked: usize,
    /// Whether copies have been queued before.
    is_warm: bool,
    /// The number of blocks of completed copies, and the time that the copies took.
    timed: Option<(usize, Duration)>,
}

/// Pinned memory that a separate thread allocates, because a slab takes some time.
struct Growing {
    thread: Thread<PinnedBuffer>,
    num_places: usize,
}

impl Model {
    /// Returns an empty swap for blocks of this model's KV caches.
    pub fn kv_swap(&self) -> KvSwap {
        let context = match &self.compute {
            Compute::Cpu(_) => None,
            Compute::Device(cuda) => Some(cuda.context.clone()),
        };
        let mut swap = KvSwap::on_host(self.kv_layout());
        swap.context = context;
        swap
    }

    /// Copies blocks between a KV cache and its places on the host, one after the other. On a
    /// device the copies are queued: after the steps that were begun earlier, before those that are
    /// begun later. After an error none, some or all of the copies were done.
    pub fn copy_blocks(
        &self,
        kv: &mut KvCache,
        swap: &mut KvSwap,
        copies: &[BlockCopy],
    ) -> Result<()> {
        match &self.compute {
            Compute::Cpu(_) => swap.copy_now(kv, copies),
            Compute::Device(model) => {
                let cuda = model.cuda()?;
                let _entered = cuda.enter()?;
                swap.queue_all(&model.context, cuda, kv, copies)
            }
        }
    }
}

impl KvSwap {
    /// Returns an empty swap for blocks of a cache on the host.
    pub fn on_host(layout: KvLayout) -> Self {
        KvSwap {
            layout,
            slabs: Vec::new(),
            pinned: Vec::new(),
            growing: None,
            context: None,
            marks: None,
            marked: 0,
            is_warm: false,
            timed: None,
        }
    }

    /// Returns the size of a place in bytes.
    pub fn place_bytes(&self) -> usize {
        self.layout.block_bytes()
    }

    /// Returns the number of places in a slab.
    fn slab_places(&self) -> usize {
        (SLAB_BYTES / self.place_bytes().max(1)).max(1)
    }

    /// Allocates memory for at most `most` more places, which are numbered after the existing ones,
    /// and returns their number. `None` means that pinned memory is being allocated; call this
    /// again some time later.
    pub fn grow(&mut self, most: usize) -> Result<Option<usize>> {
        let num_places = self.slab_places().min(most);
        let bytes = num_places.saturating_mul(self.place_bytes());
        let no_memory = |_| Error::out_of_memory(WHAT, bytes);
        self.slabs.try_reserve(1).map_err(no_memory)?;
        self.pinned.try_reserve(1).map_err(no_memory)?;
        let Some(context) = &self.context else {
            self.slabs.push(HostBuffer::zeroed(bytes, Pages::Huge)?);
            return Ok(Some(num_places));
        };
        match self.growing.take() {
            None => self.growing = Some(Growing::start(context.clone(), num_places, bytes)?),
            Some(growing) if !growing.thread.is_finished() => self.growing = Some(growing),
            Some(Growing { thread, num_places }) => {
                self.pinned.push(thread.join()?);
                return Ok(Some(num_places));
            }
        }
        Ok(None)
    }

    fn copy_now(&mut self, kv: &mut KvCache, copies: &[BlockCopy]) -> Result<()> {
        let begin = Instant::now();
        copies.iter().try_for_each(|copy| self.copy_on_host(kv, copy))?;
        self.timed = Some((copies.len(), begin.elapsed()));
        Ok(())
    }

    fn queue_all(
        &mut self,
        context: &ComputeContext,
        cuda: &CudaContext,
        kv: &KvCache,
        copies: &[BlockCopy],
    ) -> Result<()> {
        let marks = self.marks_for(cuda)?;
        if let Some((begin, _)) = &marks {
            begin.record(cuda)?;
        }
        let same_way = copies.chunk_by(|a, b| a.direction == b.direction);
        let mut launches = same_way.flat_map(|copies| copies.chunks(MAX_KV_COPIES));
        launches.try_for_each(|copies| self.queue(context, kv, copies))?;
        if let Some((begin, end)) = marks {
            end.record(cuda)?;
            self.marks = Some((begin, end));
            self.marked = copies.len();
        }
        Ok(())
    }

    /// Returns the number of blocks that were copied recently, and the time that the copies took.
    /// Copies may be reported much later, or never.
    pub fn take_time(&mut self) -> Option<(usize, Duration)> {
        self.timed.take()
    }

    /// Returns marks to take the time with, unless the previous ones have not been reached yet.
    fn marks_for(&mut self, cuda: &CudaContext) -> Result<Option<(Event, Event)>> {
        let Some((begin, end)) = self.marks.take() else {
            if !self.is_warm {
                // The first copies are not timed, because the kernel has to be loaded.
                self.is_warm = true;
                return Ok(None);
            }
            return Ok(Some((Event::timed(cuda)?, Event::timed(cuda)?)));
        };
        if !end.is_reached(cuda)? {
            self.marks = Some((begin, end));
            return Ok(None);
        }
        self.timed = Some((self.marked, end.since(&begin, cuda)?));
        Ok(Some((begin, end)))
    }

    /// Returns the index of a place's slab, and the offset of the place in it in bytes.
    fn find(&self, place: u32) -> (usize, usize) {
        let (places, place) = (self.slab_places(), place as usize);
        (place / places, place % places * self.place_bytes())
    }

    fn copy_on_host(&mut self, kv: &mut KvCache, copy: &BlockCopy) -> Result<()> {
        let ((slab, start), bytes) = (self.find(copy.place), self.place_bytes());
        let slab = self.slabs.get_mut(slab);
        let place = slab.and_then(|slab| slab.as_bytes_mut().get_mut(start..start + bytes));
        let block = kv.host_block(copy.block)?;
        let place = place.filter(|place| place.len() == block.len());
        let place =
            place.ok_or_else(|| Error::internal(format!("place {} on the host", copy.place)))?;
        match copy.direction {
            CopyDirection::ToHost => place.copy_from_slice(block),
            CopyDirection::FromHost => block.copy_from_slice(place),
        }
        Ok(())
    }

    /// Queues copies in one direction, at most as many as fit into one launch.
    fn queue(
        &mut self,
        context: &ComputeContext,
        kv: &KvCache,
        copies: &[BlockCopy],
    ) -> Result<()> {
        let parts = kv.device_parts()?;
        if parts.place_bytes() != self.place_bytes() {
            return Err(Error::internal("a place of another KV cache"));
        }
        let mut places = [KvCopy { block: 0, buffer: 0, offset: 0 }; MAX_KV_COPIES];
        for (place, copy) in places.iter_mut().zip(copies) {
            let (buffer, offset) = self.find(copy.place);
            *place = KvCopy { block: copy.block, buffer, offset };
        }
        let to_host = copies.first().is_some_and(|copy| copy.direction == CopyDirection::ToHost);
        let places = places.get(..copies.len()).unwrap_or_default();
        kv_cache_swap(context, &parts, &mut self.pinned, places, to_host)
    }
}

/// The purpose of the memory, for error messages.
const WHAT: &str = "preempted requests";

impl Growing {
    fn start(context: Arc<ComputeContext>, num_places: usize, bytes: usize) -> Result<Self> {
        check_room(bytes, WHAT)?;
        let thread = Thread::start("xserv-swap", STACK_BYTES, move || pinned(&context, bytes))?;
        Ok(Growing { thread, num_places })
    }
}

/// Allocates huge pages and touches them before the driver pins them, because it holds up the steps
/// while it pins. Huge pages give it five hundred times less to do.
fn pinned(context: &Arc<ComputeContext>, bytes: usize) -> Result<PinnedBuffer> {
    let mut memory = HostBuffer::zeroed(bytes, Pages::Huge)?;
    memory.as_bytes_mut().fill(0);
    let mut parts = PinnedBuffer::parts(context, memory, bytes, WHAT)?;
    parts.pop().ok_or_else(|| Error::out_of_memory(WHAT, bytes))
}

impl Drop for KvSwap {
    fn drop(&mut self) {
        if let Some(growing) = self.growing.take() {
            // The thread must not outlive the model. Its result is dropped.
            let _ = growing.thread.join();
        }
    }
}
