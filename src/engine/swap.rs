//! Room on the host for the keys and values of sequences that lost their blocks, and the decision
//! whether keeping them there is cheaper than recomputing them. This is bookkeeping of numbers;
//! [`crate::model::KvSwap`] is the memory.
//!
//! The costs of both ways are learned from the times of copies and steps: the blocks of a model of
//! many layers with few heads are copied in less time than they are computed, those of a small
//! model are not.

use std::time::Duration;

use crate::error::{try_filled, Error, Result};

/// Counts of swapping. Totals are since loading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapCounts {
    /// Places for a block, for which there is memory.
    pub places: usize,
    /// Places in use.
    pub used: usize,
    /// Blocks that were copied to the host.
    pub blocks_out: u64,
    /// Blocks that were copied back.
    pub blocks_in: u64,
}

/// The blocks of a preempted sequence on the host.
#[derive(Debug, Default)]
pub(super) struct Saved {
    /// The first block of the sequence that is there: the blocks before it had other owners, and
    /// were left to them.
    pub first_block: usize,
    /// Places of the blocks from the first one on; none if nothing was kept.
    pub places: Vec<u32>,
    /// Tokens from the beginning of the sequence to the end of these blocks.
    pub num_tokens: usize,
}

impl Saved {
    /// Whether it has blocks beyond the `num_found` first ones, which are on the device already.
    pub fn goes_beyond(&self, num_found: usize) -> bool {
        !self.places.is_empty()
            && self.first_block <= num_found
            && num_found < self.first_block + self.places.len()
    }

    /// Returns the number of first blocks that have their content once these are copied back.
    pub fn num_blocks_with(&self, num_found: usize) -> usize {
        if self.goes_beyond(num_found) {
            self.first_block + self.places.len()
        } else {
            num_found
        }
    }
}

/// The costs of copying and computing, as far as they are known.
#[derive(Clone, Copy, Debug, Default)]
pub struct SwapCosts {
    /// Seconds for a block, one way.
    copy: Option<f64>,
    /// Seconds for a token of a long input.
    compute: Option<f64>,
    /// Seconds of the last step without long inputs.
    decode: f64,
}

/// The time of a step with at least this many tokens of long inputs tells the cost of a token.
const TELLING_TOKENS: usize = 64;

/// Copies must be cheaper by this factor: they take memory of the host too.
const MARGIN: f64 = 1.25;

/// Moves a running average towards a new value.
fn learn(average: &mut Option<f64>, seen: f64) {
    *average = Some(average.map_or(seen, |average| average + (seen - average) / 8.0));
}

impl SwapCosts {
    /// Records that `num_blocks` blocks were copied, one way.
    pub fn copied(&mut self, num_blocks: usize, time: Duration) {
        if num_blocks > 0 {
            learn(&mut self.copy, time.as_secs_f64() / num_blocks as f64);
        }
    }

    /// Records the time of a step with `num_long` tokens of long inputs and `num_single` sequences
    /// with one token.
    pub fn computed(&mut self, num_long: usize, num_single: usize, time: Duration) {
        let seconds = time.as_secs_f64();
        if num_long == 0 {
            self.decode = seconds;
        } else if num_long >= TELLING_TOKENS {
            // The time that the single tokens would have taken alone is not counted.
            let others = if num_single > 0 { self.decode } else { 0.0 };
            learn(&mut self.compute, (seconds - others).max(seconds / 8.0) / num_long as f64);
        }
    }

    /// Whether copying `num_blocks` blocks there and back is cheaper than computing `num_tokens`
    /// tokens. A way that was not tried yet, or not for long, is taken to be cheap.
    pub fn is_copy_cheaper(&mut self, num_blocks: usize, num_tokens: usize) -> bool {
        let (Some(copy), Some(compute)) = (&mut self.copy, self.compute) else { return true };
        let both_ways = 2.0 * *copy * (num_blocks as f64);
        let is_cheaper = both_ways * MARGIN < compute * num_tokens as f64;
        if !is_cheaper {
            // Without copies nothing new is learned, so the estimate decays until they are tried
            // again.
            *copy -= *copy / 32.0;
        }
        is_cheaper
    }
}

/// The places on the host and their owners.
#[derive(Debug, Default)]
pub(super) struct SwapSpace {
    /// Places without an owner; the last one is taken next.
    free: Vec<u32>,
    num_places: usize,
    max_places: usize,
    is_short: bool,
    pub costs: SwapCosts,
    pub blocks_out: u64,
    pub blocks_in: u64,
}

impl SwapSpace {
    /// Returns a space that may grow to `max_places` places, of which it has none yet.
    pub fn new(max_places: usize) -> Self {
        SwapSpace { max_places, ..SwapSpace::default() }
    }

    /// Whether there can be places at all.
    pub fn is_wanted(&self) -> bool {
        self.max_places > 0
    }

    /// Returns the number of further places that there may be, if a sequence found too few; else 0.
    pub fn num_wanted(&self) -> usize {
        if self.is_short {
            self.max_places - self.num_places
        } else {
            0
        }
    }

    /// Records that there is memory for `num_places` more places.
    pub fn grow(&mut self, num_places: usize) {
        let end = self.num_places.saturating_add(num_places).min(self.max_places);
        // The list has room for all places at any time.
        if self.free.try_reserve_exact(end - self.free.len()).is_err() {
            return self.stop_growing();
        }
        // The lowest numbers go first.
        self.free.extend((self.num_places..end).map(|place| place as u32));
        self.free.sort_unstable_by(|a, b| b.cmp(a));
        self.num_places = end;
        self.is_short = false;
    }

    /// Records that there will be no more places.
    pub fn stop_growing(&mut self) {
        self.max_places = self.num_places;
    }

    /// Takes places for `count` blocks, or none. False if there are too few.
    pub fn take(&mut self, count: usize, places: &mut Vec<u32>) -> bool {
        let Some(rest) = self.free.len().checked_sub(count) else {
            self.is_short = true;
            return false;
        };
        if places.try_reserve(count).is_err() {
            return false;
        }
        places.extend(self.free.drain(rest..).rev());
        true
    }

    /// Takes places back, leaving the list empty.
    pub fn give_back(&mut self, places: &mut Vec<u32>) {
        self.free.extend(places.drain(..).rev());
    }

    /// Counts for statistics.
    pub fn counts(&self) -> SwapCounts {
        SwapCounts {
            places: self.num_places,
            used: self.num_places - self.free.len(),
            blocks_out: self.blocks_out,
            blocks_in: self.blocks_in,
        }
    }

    /// Counts everything again from the places of all owners; an error says which count is wrong.
    pub fn audit<'a>(&'a self, places: impl Iterator<Item = &'a u32>) -> Result<()> {
        let mut seen = try_filled(self.num_places, false, "an audit")?;
        let mut count = 0;
        for place in places.chain(&self.free) {
            match seen.get_mut(*place as usize) {
                Some(seen) if !*seen => *seen = true,
                _ => {
                    return Err(Error::internal(format!(
                        "place {place} on the host has two owners"
                    )))
                }
            }
            count += 1;
        }
        if count == self.num_places {
            return Ok(());
        }
        Err(Error::internal(format!("{count} of {} places on the host", self.num_places)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_grow_to_the_limit_and_come_back() {
        let mut space = SwapSpace::new(5);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(!space.take(2, &mut a) && space.num_wanted() == 5);
        space.grow(3);
        assert!(space.num_wanted() == 0 && space.take(2, &mut a) && !space.take(2, &mut b));
        assert_eq!((&a[..], b.len(), space.num_wanted()), (&[0, 1][..], 0, 2));
        space.grow(3);
        assert!(space.take(3, &mut b) && !space.take(1, &mut b) && space.num_wanted() == 0);
        space.audit(a.iter().chain(&b)).unwrap();
        assert!(space.audit(a.iter()).is_err());
        assert!(space.audit(a.iter().chain(&b).chain(&b)).is_err());
        space.give_back(&mut a);
        assert_eq!((space.counts().used, space.counts().places), (3, 5));
    }

    #[test]
    fn the_cheaper_way_is_learned_from_what_both_take() {
        let mut costs = SwapCosts::default();
        assert!(costs.is_copy_cheaper(8, 256));
        costs.copied(10, Duration::from_millis(10));
        costs.computed(0, 4, Duration::from_millis(5));
        // 20 ms more than the step without it, for 1000 tokens.
        costs.computed(1000, 4, Duration::from_millis(25));
        // 1 ms a block, and again back, against 20 us a token.
        assert!(costs.is_copy_cheaper(1, 150));
        assert!(!costs.is_copy_cheaper(1, 100));
        // Short inputs say nothing.
        costs.computed(2, 4, Duration::from_millis(25));
        assert!(!costs.is_copy_cheaper(1, 100));
        for _ in 0..50 {
            costs.copied(10, Duration::from_millis(1));
        }
        assert!(costs.is_copy_cheaper(1, 32) && !costs.is_copy_cheaper(1, 10));
    }

    #[test]
    fn the_costlier_way_is_tried_again_now_and_then() {
        let mut costs = SwapCosts::default();
        costs.copied(1, Duration::from_millis(10));
        costs.computed(100, 0, Duration::from_millis(10));
        let refused = (0..1000).take_while(|_| !costs.is_copy_cheaper(1, 100)).count();
        // Copies cost twice as much, and a margin: they are tried when the estimate is below half
        // of that.
        assert!((25..35).contains(&refused), "{refused}");
    }

    #[test]
    fn blocks_saved_after_blocks_that_are_gone_are_useless() {
        let saved = Saved { first_block: 2, places: vec![7, 8, 9], num_tokens: 150 };
        let ends: Vec<usize> = (0..7).map(|found| saved.num_blocks_with(found)).collect();
        assert_eq!(ends, [0, 1, 5, 5, 5, 5, 6]);
    }
}
