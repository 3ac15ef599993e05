//! Statistics of a model: the state of its requests, and totals.

#![allow(non_camel_case_types)]

use super::guard::{guard, write_struct, GrowingStruct};
use super::model::{engine_of, xserv_model};
use super::status::xserv_status;
use crate::engine::{FIRST_BUCKET_US, NUM_STEP_BUCKETS};

/// The number of buckets of the histogram of step times.
pub const XSERV_STEP_BUCKETS: usize = 20;
const _: () = assert!(XSERV_STEP_BUCKETS == NUM_STEP_BUCKETS);

/// The state of a model's requests at one moment, and totals since it was loaded. A sample that
/// makes room for others is preempted and waits. Set struct_size, then call
/// xserv_model_get_stats().
#[repr(C)]
#[derive(Clone, Copy)]
pub struct xserv_model_stats {
    /// sizeof(xserv_model_stats), set by the caller.
    pub struct_size: usize,
    /// Number of samples that are running, which each step computes.
    pub num_running: u64,
    /// Number of samples that wait for room, preempted ones included.
    pub num_waiting: u64,
    /// Number of waiting samples that were preempted.
    pub num_preempted: u64,
    /// Number of samples submitted. A call of xserv_logits() or xserv_score() counts as one.
    pub total_submitted: u64,
    /// Number of samples ended, for whatever reason.
    pub total_ended: u64,
    /// Number of preemptions.
    pub total_preemptions: u64,
    /// Number of forward passes.
    pub total_steps: u64,
    /// Number of prompt tokens computed, including those computed again after a preemption.
    pub total_prompt_tokens: u64,
    /// Number of tokens generated.
    pub total_generated_tokens: u64,
    /// Number of prompt tokens of admitted requests, all looked up in the prefix cache.
    pub total_looked_up_tokens: u64,
    /// Number of looked-up tokens whose keys and values were found.
    pub total_cached_tokens: u64,
    /// total_cached_tokens / total_looked_up_tokens; 0 at first.
    pub cache_hit_rate: f64,
    /// Tokens generated per second by all requests together, over the last second or two of work.
    pub tokens_per_second: f64,
    /// Seconds spent on steps.
    pub busy_seconds: f64,
    /// Number of blocks of the KV cache, of 32 tokens each.
    pub num_kv_blocks: u64,
    /// Number of KV blocks that requests use.
    pub num_used_kv_blocks: u64,
    /// Number of unused KV blocks whose content is kept for prompts with the same prefix.
    pub num_cached_kv_blocks: u64,
    /// The largest value that num_used_kv_blocks has had.
    pub peak_used_kv_blocks: u64,
    /// Peak bytes of weights, work space and KV cache: on a GPU as its allocator counts them, on
    /// the CPU with the blocks that have been used.
    pub peak_memory_bytes: u64,
    /// Histogram of step times: bucket i counts the steps shorter than step_bucket_us[i]
    /// microseconds that are in no earlier bucket.
    pub step_counts: [u64; XSERV_STEP_BUCKETS],
    /// Upper bounds of the buckets; the last is UINT64_MAX.
    pub step_bucket_us: [u64; XSERV_STEP_BUCKETS],
    /// Seconds from the beginnings to the ends of steps: on a GPU by its own clock, from the first
    /// kernel to the last or, where a step was queued after another, from the end of that one; on
    /// the CPU by the host's clock.
    pub device_busy_seconds: f64,
    /// Seconds between steps in which the device waited for the host although there were requests
    /// to compute. A GPU's waits for the next kernel within a step, and its work for
    /// xserv_logits() and xserv_score(), count as busy.
    pub device_idle_seconds: f64,
    /// Number of KV blocks that the host memory taken for swapping has room for (see
    /// xserv_load_options.max_swap_bytes).
    pub num_swap_blocks: u64,
    /// Number of swap blocks in use by preempted requests.
    pub num_used_swap_blocks: u64,
    /// Number of KV blocks copied to the host.
    pub total_swapped_out_blocks: u64,
    /// Number of KV blocks copied back.
    pub total_swapped_in_blocks: u64,
}

// SAFETY: repr(C), struct_size first, integers and floats only.
unsafe impl GrowingStruct for xserv_model_stats {
    const SIZES: &'static [usize] = &[528];
    const NAME: &'static str = "xserv_model_stats";
    const HOW: &'static str = "set it to sizeof(xserv_model_stats)";
    fn defaults() -> Self {
        // SAFETY: integers and floats, for which all bits zero are valid.
        let zero: Self = unsafe { std::mem::zeroed() };
        xserv_model_stats { struct_size: size_of::<Self>(), ..zero }
    }
}

/// Gives the state of a model's requests. The call is cheap; any thread may make it at any time.
///
/// stats: struct_size must be set.
///
/// # Safety
/// `stats` is writable for the struct_size that it claims.
#[must_use]
#[no_mangle]
pub unsafe extern "C" fn xserv_model_get_stats(
    model: *const xserv_model,
    stats: *mut xserv_model_stats,
) -> xserv_status {
    guard(|| {
        let engine = engine_of(model)?;
        let s = engine.stats();
        let counts = s.scheduler;
        let ratio = |part: u64, whole: u64| match whole {
            0 => 0.0,
            whole => part as f64 / whole as f64,
        };
        let mut step_bucket_us = [u64::MAX; XSERV_STEP_BUCKETS];
        for (i, bound) in step_bucket_us.iter_mut().take(XSERV_STEP_BUCKETS - 1).enumerate() {
            *bound = FIRST_BUCKET_US << i;
        }
        let blocks = counts.blocks;
        let value = xserv_model_stats {
            struct_size: size_of::<xserv_model_stats>(),
            num_running: counts.running as u64,
            num_waiting: counts.waiting as u64,
            num_preempted: counts.preempted as u64,
            total_submitted: s.submitted,
            total_ended: s.ended,
            total_preemptions: counts.preemptions,
            total_steps: s.steps,
            total_prompt_tokens: s.prompt_tokens,
            total_generated_tokens: s.generated_tokens,
            total_looked_up_tokens: counts.looked_up_tokens,
            total_cached_tokens: counts.cached_tokens,
            cache_hit_rate: ratio(counts.cached_tokens, counts.looked_up_tokens),
            tokens_per_second: s.tokens_per_second,
            busy_seconds: s.busy.as_secs_f64(),
            num_kv_blocks: (blocks.used + blocks.idle + blocks.free) as u64,
            num_used_kv_blocks: blocks.used as u64,
            num_cached_kv_blocks: blocks.idle as u64,
            peak_used_kv_blocks: s.peak_used_blocks as u64,
            peak_memory_bytes: engine.peak_memory_bytes(),
            step_counts: s.step_times,
            step_bucket_us,
            device_busy_seconds: s.device_busy.as_secs_f64(),
            device_idle_seconds: s.device_idle.as_secs_f64(),
            num_swap_blocks: counts.swap.places as u64,
            num_used_swap_blocks: counts.swap.used as u64,
            total_swapped_out_blocks: counts.swap.blocks_out,
            total_swapped_in_blocks: counts.swap.blocks_in,
        };
        // SAFETY: by the contract above.
        unsafe { write_struct(stats, "stats", &value) }
    })
}
