//! Which experts tokens have, and which tokens experts: `csrc/ops/experts/route.cu`, `normed_route.cu` and
//! `combine.cu`.

use super::Routing;
use crate::backend::cuda::{kernels, Arguments, CudaContext, Launch};
use crate::backend::{ComputeContext, DeviceTensor};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};
use crate::ops::common::contiguous::{float, matrix_size, vector_len};

/// Up to so many tokens one block chooses and sorts.
const MAX_TOKENS_OF_BLOCK: usize = 32;
const ROUTE_THREADS: u32 = 512;
const SORT_THREADS: u32 = 1024;
const COMBINE_THREADS: u32 = 256;
/// The threads of a block of normed_route.cu, its experts, the most tokens that it takes, and the widest of them.
const NORMED_ROUTE_THREADS: u32 = 256;
const EXPERTS_OF_BLOCK: usize = 8;
const MAX_STREAM_TOKENS: usize = 2;
const MAX_STREAM_WIDTH: usize = 8192;
const WHAT: &str = "the experts of tokens";
/// The words of a tile of slots.
const TILE_WORDS: usize = 4;

/// The residual stream of one or two tokens, from which they choose.
#[derive(Clone, Copy, Debug)]
pub struct Stream<'a> {
    /// `[num_tokens, hidden_size]`, to which the results are added.
    pub hidden: &'a DeviceTensor,
    /// The weight `[hidden_size]` and the epsilon of the RMSNorm before the experts.
    pub norm: (&'a Tensor, f32),
    /// `[num_experts, hidden_size]`
    pub router: &'a Tensor,
    /// `[num_tokens, hidden_size]`, where the normalised stream goes.
    pub normed: &'a DeviceTensor,
}

/// The places of the parts of the memory for routes, in words.
#[derive(Clone, Copy, Debug)]
struct RoutePlaces {
    tiles: usize,
    tokens: usize,
    places: usize,
    ids: usize,
    weights: usize,
    end: usize,
}

impl RoutePlaces {
    fn new(num_assignments: usize, max_tiles: usize) -> Self {
        // The number of tiles comes first; tiles begin at multiples of 16 bytes.
        let tiles = TILE_WORDS;
        let tokens = tiles.saturating_add(max_tiles.saturating_mul(TILE_WORDS));
        let part = |index: usize| tokens.saturating_add(num_assignments.saturating_mul(index));
        RoutePlaces { tiles, tokens, places: part(1), ids: part(2), weights: part(3), end: part(4) }
    }
}

/// The tokens of a pass, sorted by expert.
pub(super) struct Routes {
    memory: DeviceTensor,
    at: RoutePlaces,
    pub num_tokens: usize,
    pub num_assignments: usize,
    /// The slots of a tile.
    pub tile_slots: usize,
    /// The most tiles that there can be.
    pub max_tiles: usize,
}

/// Returns the most tiles of that many slots.
fn max_tiles(num_assignments: usize, tile_slots: usize, num_experts: usize) -> usize {
    let whole = num_assignments / tile_slots.max(1);
    whole.saturating_add(num_experts).min(num_assignments)
}

impl Routes {
    pub fn new(
        context: &ComputeContext,
        routing: &Routing,
        num_tokens: usize,
        tile_slots: usize,
    ) -> Result<Self> {
        let num_assignments = num_tokens.saturating_mul(routing.experts_per_token());
        let max_tiles = max_tiles(num_assignments, tile_slots, routing.num_experts());
        let at = RoutePlaces::new(num_assignments, max_tiles);
        let memory = DeviceTensor::temporary(context, ElementType::I32, &[at.end], WHAT)?;
        Ok(Routes { memory, at, num_tokens, num_assignments, tile_slots, max_tiles })
    }

    fn pointer(&self, word: usize) -> *mut u8 {
        self.memory.data().wrapping_add(word * size_of::<i32>())
    }

    fn num_tiles(&self) -> *mut u8 {
        self.pointer(0)
    }

    fn tiles(&self) -> *mut u8 {
        self.pointer(self.at.tiles)
    }

    /// Adds what every product takes: the tiles, and the token of each slot unless slots are rows.
    pub fn add_to<'a>(&self, arguments: Arguments<'a>, tokens: Option<*mut u8>) -> Arguments<'a> {
        arguments
            .pointer(self.tiles())
            .pointer(self.num_tiles())
            .pointer(tokens.unwrap_or(std::ptr::null_mut()))
    }

    /// Begins the arguments of a kernel that sorts.
    fn sorting(&self) -> Arguments<'static> {
        Arguments::new()
            .pointer(self.pointer(self.at.places))
            .pointer(self.tokens())
            .pointer(self.tiles())
            .pointer(self.num_tiles())
    }

    /// Returns the token of each slot, `[num_assignments]`.
    pub fn token_ids(&self) -> Result<DeviceTensor> {
        self.memory.view(self.at.tokens, &[self.num_assignments], None)
    }

    pub fn tokens(&self) -> *mut u8 {
        self.pointer(self.at.tokens)
    }

    /// Queues the norm of the stream, its products with the router, and the choice of experts by these.
    pub fn choose_by_stream(
        &self,
        cuda: &CudaContext,
        routing: &Routing,
        from: &Stream<'_>,
        logits: &Tensor,
    ) -> Result<()> {
        let kernel = kernels::EXPERTS_NORMED_ROUTE.of(float("normed", from.normed)?);
        let (num_tokens, width) = matrix_size("the stream", from.hidden)?;
        let num_experts = routing.num_experts();
        let (Some(kernel), Some(counter)) = (kernel, cuda.counters(1)?) else {
            return Err(Error::internal("no kernel for the routes of a stream"));
        };
        let (norm, eps) = from.norm;
        let arguments = self
            .sorting()
            .pointer(self.pointer(self.at.weights))
            .tensor(from.normed)
            .tensor(logits)
            .pointer(counter)
            .tensor(from.hidden)
            .tensor(norm)
            .tensor(from.router)
            .i32(num_tokens as i32)
            .i32(width)
            .f32(eps)
            .i32(num_experts as i32)
            .i32(routing.experts_per_token() as i32)
            .i32(routing.renormalises().into())
            .i32(self.tile_slots as i32);
        let launch = Launch {
            grid: (num_experts.div_ceil(EXPERTS_OF_BLOCK) as u32, 1, 1),
            block: NORMED_ROUTE_THREADS,
            shared_bytes: num_tokens * width.unsigned_abs() * 2,
        };
        // SAFETY: the arguments of the kernel, of the shapes that `normed_experts` has checked; the parts of
        // the memory have room for every assignment and for the most tiles.
        unsafe { cuda.launch_overlapping(kernel, launch, arguments) }
    }

    /// Queues the choice of experts by logits `[num_tokens, num_experts]`.
    pub fn choose(&self, cuda: &CudaContext, routing: &Routing, logits: &Tensor) -> Result<()> {
        let dtype = float("logits", logits)?;
        let (num_tokens, num_experts) = matrix_size("logits", logits)?;
        let per_token = routing.experts_per_token() as i32;
        let is_one_block = self.num_tokens <= MAX_TOKENS_OF_BLOCK;
        let blocks = match is_one_block {
            true => 1,
            // One warp for each token; several blocks, so that none of them sorts.
            false => num_tokens.div_ceil(ROUTE_THREADS / 32).max(2),
        };
        let arguments = self
            .sorting()
            .pointer(self.pointer(self.at.ids))
            .pointer(self.pointer(self.at.weights))
            .tensor(logits)
            .i32(num_tokens as i32)
            .i32(num_experts)
            .i32(per_token)
            .i32(routing.renormalises().into())
            .i32(self.tile_slots as i32);
        // A thread for each expert or two, and a warp for each token.
        let sorting = (num_experts as u32).next_multiple_of(64) / 2;
        let threads = match is_one_block {
            true => sorting.max(32 * num_tokens).clamp(64, ROUTE_THREADS),
            false => ROUTE_THREADS,
        };
        let launch = Launch::linear(blocks, threads);
        // SAFETY: the arguments of the kernel; the parts of the memory have room for every assignment and
        // for the most tiles, and logits has these rows.
        unsafe { cuda.launch_overlapping(kernels::EXPERTS_ROUTE.of(dtype), launch, arguments)? };
        if is_one_block {
            return Ok(());
        }
        let arguments = self
            .sorting()
            .pointer(self.pointer(self.at.ids))
            .i32(self.num_assignments as i32)
            .i32(num_experts)
            .i32(per_token)
            .i32(self.tile_slots as i32);
        let launch = Launch::linear(1, SORT_THREADS);
        // SAFETY: the same; the kernel before has written the ids, which are below num_experts.
        unsafe { cuda.launch_overlapping(kernels::EXPERTS_SORT, launch, arguments) }
    }

    /// Queues `out += sum of weight * y` over each token's experts. y has a row for each slot.
    pub fn combine(
        &self,
        cuda: &CudaContext,
        per_token: usize,
        y: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        let dtype = float("out", out)?;
        let (num_tokens, width) = matrix_size("out", out)?;
        let vector = vector_len(dtype, width, &[y, out]);
        let kernel = match vector {
            1 => kernels::EXPERTS_COMBINE_ONE.of(dtype),
            _ => kernels::EXPERTS_COMBINE_VEC.of(dtype),
        };
        let columns = (width / vector).unsigned_abs();
        let threads = COMBINE_THREADS.min(columns.next_multiple_of(32));
        let launch = Launch {
            grid: (num_tokens, columns.div_ceil(threads), 1),
            block: threads,
            shared_bytes: 0,
        };
        let arguments = Arguments::new()
            .tensor(out)
            .tensor(y)
            .pointer(self.pointer(self.at.places))
            .pointer(self.pointer(self.at.weights))
            .i32(width)
            .i32(per_token as i32);
        // SAFETY: the arguments of the kernel; places are rows of y, and whole vectors lie in all rows.
        unsafe { cuda.launch_overlapping(kernel, launch, arguments) }
    }
}

/// Returns the most words that the routes of tokens take.
pub(super) fn most_words(routing: &Routing, num_tokens: usize) -> usize {
    let num_assignments = num_tokens.saturating_mul(routing.experts_per_token());
    // The smallest tiles are the most.
    let tiles = max_tiles(num_assignments, 1, routing.num_experts());
    RoutePlaces::new(num_assignments, tiles).end
}

/// Whether [`normed_experts`](super::normed_experts) takes these tokens.
pub fn has_normed_experts(stream: &Stream<'_>) -> bool {
    let [num_tokens, width] =
        [0, 1].map(|i| stream.hidden.shape().get(i).copied().unwrap_or(0) as usize);
    num_tokens <= MAX_STREAM_TOKENS
        && width <= MAX_STREAM_WIDTH
        && width.is_multiple_of(8)
        && stream.hidden.element() != ElementType::Float(DType::F32)
        && [stream.hidden.data(), stream.normed.data(), stream.norm.0.data(), stream.router.data()]
            .iter()
            .all(|data| (*data as usize).is_multiple_of(16))
}
