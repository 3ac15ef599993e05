//! Sampling of a token from each row of logits.

use crate::backend::cuda::{kernel_struct, kernels, Arguments, Launch};
use crate::backend::ComputeContext;
use crate::error::{Error, Result};
use crate::memory::{ElementType, Tensor};
use crate::ops::common::contiguous::{check, cuda, float, matrix_size};

pub mod cpu;

/// The parameters of a random draw from the logits divided by the temperature, after the filters
/// top-k, top-p, min-p and typical-p in this order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// The temperature, above 0.
    pub temperature: f32,
    /// The number of the most likely tokens kept; 0 keeps all tokens.
    pub top_k: u32,
    /// The total probability of the tokens kept, above 0; 1 keeps all tokens.
    pub top_p: f32,
    /// The fraction of the top probability below which a token is dropped; 0 keeps all tokens.
    pub min_p: f32,
    /// The total probability of the tokens kept whose information is nearest to the entropy, above 0; 1
    /// keeps all tokens.
    pub typical_p: f32,
    /// The seed. The draw depends on seed and index alone.
    pub seed: u64,
    /// The number of the token in its sequence.
    pub index: u64,
}

kernel_struct! {
    /// The choice of a row's token; `csrc/ops/sample/sample.cu` has the same struct and documents
    /// its fields.
    #[derive(Clone, Copy, Debug, Default)]
    pub struct SampleRow {
        /// The seed. The draw is a function of seed and index alone.
        pub seed: u64,
        /// The index of the draw; see `seed`.
        pub index: u64,
        /// The temperature. 0 chooses the most likely token; with a negative value none is chosen.
        pub temperature: f32,
        /// The top-p threshold; 1 keeps all tokens.
        pub top_p: f32,
        /// The min-p threshold; 0 keeps all tokens.
        pub min_p: f32,
        /// The top-k count; 0 keeps all tokens.
        pub top_k: i32,
        /// The typical-p threshold; 0 and 1 keep all tokens.
        pub typical_p: f32,
        /// Unused, 0.
        pub reserved: u32,
    }
}

/// The number of 32-bit words of a [`SampleRow`].
pub const SAMPLE_ROW_WORDS: usize = size_of::<SampleRow>() / 4;
const _: () = assert!(size_of::<SampleRow>() == 40);

/// The smallest temperature. The kernel also multiplies by 1 divided by the temperature, which has
/// to be finite; below this value the likeliest token is chosen all the same.
pub const LEAST_TEMPERATURE: f32 = 1e-30;

impl From<Draw> for SampleRow {
    fn from(draw: Draw) -> Self {
        SampleRow {
            seed: draw.seed,
            index: draw.index,
            temperature: draw.temperature,
            top_p: draw.top_p,
            min_p: draw.min_p,
            top_k: i32::try_from(draw.top_k).unwrap_or(i32::MAX),
            typical_p: draw.typical_p,
            reserved: 0,
        }
    }
}

impl Default for Draw {
    /// Returns a draw at temperature 1 from all tokens: every filter is neutral.
    fn default() -> Self {
        Draw {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            seed: 0,
            index: 0,
        }
    }
}

impl Draw {
    /// Whether top-k, top-p or typical-p may remove tokens.
    pub fn is_filtered(&self) -> bool {
        self.top_k > 0 || self.top_p < 1.0 || self.typical_p < 1.0
    }
}

impl SampleRow {
    /// Returns the struct as words of 32 bits.
    pub fn words(&self) -> [u32; SAMPLE_ROW_WORDS] {
        let is_draw = self.temperature > 0.0;
        let temperature =
            if is_draw { self.temperature.max(LEAST_TEMPERATURE) } else { self.temperature };
        let halves = |value: u64| [value as u32, (value >> 32) as u32];
        let ([seed_low, seed_high], [index_low, index_high]) =
            (halves(self.seed), halves(self.index));
        [
            seed_low,
            seed_high,
            index_low,
            index_high,
            temperature.to_bits(),
            self.top_p.to_bits(),
            self.min_p.to_bits(),
            self.top_k as u32,
            self.typical_p.to_bits(),
            self.reserved,
        ]
    }
}

/// The most blocks that share a row; `csrc/ops/sample/sample.cu` takes it from here.
pub(in crate::ops) const MAX_PARTS: usize = 64;
/// The number of tokens that the filters of a row are applied to; `csrc/ops/sample/sample.cu` takes
/// it from here.
pub(in crate::ops) const MAX_CANDIDATES: usize = 1024;
/// The most blocks that search a row together; `csrc/ops/sample/cut.cuh` takes it from here.
pub(in crate::ops) const MAX_TEAM_BLOCKS: usize = 8;
/// The numbers of [`SampleBuffers::partials`] per row.
pub const SAMPLE_PARTIALS: usize = 2 * MAX_PARTS + MAX_CANDIDATES;
/// The numbers of [`SampleBuffers::counters`] per row.
pub const SAMPLE_COUNTERS: usize = 8;

/// The destination of the tokens, and memory for choosing them.
#[derive(Clone, Copy, Debug)]
pub struct SampleBuffers<'a> {
    /// A [`SampleRow`] for each row, at a multiple of 8 bytes, i32 [num_rows, SAMPLE_ROW_WORDS].
    pub rows: &'a Tensor,
    /// The tokens, or `u32::MAX` where none was chosen, i32 [at least num_rows].
    pub tokens: &'a Tensor,
    /// The address of host memory that the tokens are also written to, i32 [2].
    pub host_tokens: &'a Tensor,
    /// Partial results, i64 [at least num_rows * SAMPLE_PARTIALS].
    pub partials: &'a Tensor,
    /// Counters, i32 [at least num_rows * SAMPLE_COUNTERS], zero before the first use; nothing else
    /// writes there.
    pub counters: &'a Tensor,
}

kernel_struct! {
    /// `csrc/ops/sample/sample.cu` has the same struct.
    #[derive(Clone, Copy)]
    pub(in crate::ops) struct SampleArgs {
        logits: *mut u8,
        rows: *mut u8,
        tokens: *mut u8,
        host_tokens: *mut u8,
        partials: *mut u8,
        counters: *mut u8,
        vocab_size: i32,
        parts: i32,
    }
}

const THREADS: u32 = 512;
/// Their registers leave room for this many.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 2;

/// Returns how many blocks share a row: few rows leave room for many. The choice does not depend on
/// it.
fn parts(num_rows: u32) -> u32 {
    match num_rows {
        0..=4 => MAX_PARTS as u32,
        5..=8 => 32,
        9..=64 => 16,
        _ => 8,
    }
}

/// Returns how many blocks search a row together where the largest tokens do not decide what its
/// filters keep. What they exchange takes time from other rows, if these are enough for the device.
fn team_blocks(num_rows: u32, has_clusters: bool) -> u32 {
    match num_rows {
        _ if !has_clusters => 1,
        0..=16 => MAX_TEAM_BLOCKS as u32,
        17..=64 => 4,
        65..=128 => 2,
        _ => 1,
    }
}

/// Chooses a token from each row of `logits` [num_rows, vocab_size]. `is_filtered` says whether
/// top-k, top-p or typical-p may remove tokens of any row; without it such a row may get no token.
pub fn sample(
    context: &ComputeContext,
    logits: &Tensor,
    buffers: &SampleBuffers<'_>,
    is_filtered: bool,
) -> Result<()> {
    let (dtype, (num_rows, vocab_size)) =
        (float("logits", logits)?, matrix_size("logits", logits)?);
    check("rows", buffers.rows, ElementType::I32, &[num_rows.into(), SAMPLE_ROW_WORDS as i64])?;
    check("host_tokens", buffers.host_tokens, ElementType::I32, &[2])?;
    let room = |tensor: &Tensor, len: i64| tensor.is_contiguous() && tensor.num_elements() >= len;
    let rows = i64::from(num_rows);
    if !room(buffers.tokens, rows)
        || !room(buffers.partials, rows * SAMPLE_PARTIALS as i64)
        || !room(buffers.counters, rows * SAMPLE_COUNTERS as i64)
        || num_rows > 65535
        || !(buffers.rows.data() as usize).is_multiple_of(8)
        || !(buffers.counters.data() as usize).is_multiple_of(8)
        || !(buffers.host_tokens.data() as usize).is_multiple_of(8)
    {
        return Err(Error::internal(format!("no room to choose the tokens of {num_rows} rows")));
    }
    if logits.is_empty() {
        return Ok(());
    }
    let arguments = SampleArgs {
        logits: logits.data(),
        rows: buffers.rows.data(),
        tokens: buffers.tokens.data(),
        host_tokens: buffers.host_tokens.data(),
        partials: buffers.partials.data(),
        counters: buffers.counters.data(),
        vocab_size,
        parts: parts(num_rows) as i32,
    };
    let launch = Launch { grid: (parts(num_rows), num_rows, 1), block: THREADS, shared_bytes: 0 };
    let cuda = cuda(context)?;
    for kernel in [kernels::SAMPLE_SCAN, kernels::SAMPLE_CHOOSE] {
        let arguments = Arguments::new().value(&arguments);
        // SAFETY: the argument of the kernels; the buffers have room for every row, checked above,
        // and the address in `host_tokens` is the caller's to keep alive.
        unsafe { cuda.launch_overlapping(kernel.of(dtype), launch, arguments) }?;
    }
    if !is_filtered {
        return Ok(());
    }
    // As many teams as there is room for take the rows that are left, one after another.
    let info = cuda.device().info();
    let blocks = team_blocks(num_rows, info.compute_capability.0 >= 9);
    let room = info.num_multiprocessors.unsigned_abs() * BLOCKS_PER_MULTIPROCESSOR / blocks;
    let grid = (blocks, num_rows.min(room.max(1)), 1);
    let launch = Launch { grid, block: THREADS, shared_bytes: 0 };
    let arguments = Arguments::new().value(&arguments);
    // SAFETY: as above.
    unsafe { cuda.launch_clusters(kernels::SAMPLE_CUT.of(dtype), launch, blocks, arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temperatures_have_a_finite_inverse_and_keep_their_meaning() {
        let uploaded = |temperature| {
            f32::from_bits(SampleRow { temperature, ..SampleRow::default() }.words()[4])
        };
        assert!((1.0 / uploaded(f32::from_bits(1))).is_finite());
        for temperature in [0.0, -1.0, 1e-6, 0.6, 1e30] {
            assert_eq!(uploaded(temperature), temperature);
        }
    }
}
