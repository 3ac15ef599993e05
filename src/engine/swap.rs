//! Room on the host for the keys and values of sequences that lost their blocks, and when it is cheaper to keep
//! them there than to compute them anew. Bookkeeping of numbers; [`crate::model::KvSwap`] is the memory.
//!
//! What either way costs is learned from what the copies and the steps take: a model of many layers with few heads
//! is copied in less time than it is computed, a small one is not.

use std::time::Duration;

use crate::error::{try_filled, Error, Result};

/// Counts of swapping. Totals are since loading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapCounts {
    /// Places for a block that there is memory for.
    pub places: usize,
    /// Of these, those in use.
    pub used: usize,
    /// Blocks that were copied to the host.
    pub blocks_out: u64,
    /// Blocks that were copied back.
    pub blocks_in: u64,
}

/// What a preempted sequence has on the host.
#[derive(Debug, Default)]
pub(super) struct Saved {
    /// The first block of the sequence that is there: those before it had other owners, and were left to them.
    pub first_block: usize,
    /// Places of the blocks behind it, none if nothing was kept.
    pub places: Vec<u32>,
    /// Tokens that they complete, from the beginning of the sequence.
    pub num_tokens: usize,
}

impl Saved {
    /// Whether there is more to be had than the `num_found` blocks that lie where they are wanted.
    pub fn goes_beyond(&self, num_found: usize) -> bool {
        !self.places.is_empty()
            && self.first_block <= num_found
            && num_found < self.first_block + self.places.len()
    }

    /// The blocks that are there in the end.
    pub fn num_blocks_with(&self, num_found: usize) -> usize {
        match self.goes_beyond(num_found) {
            true => self.first_block + self.places.len(),
            false => num_found,
        }
    }
}

/// What copying and computing take, as far as is known.
#[derive(Clone, Copy, Debug, Default)]
pub struct SwapCosts {
    /// Seconds for a block, one way.
    copy: Option<f64>,
    /// Seconds for a token of a long input.
    compute: Option<f64>,
    /// Seconds of the last step without long inputs.
    decode: f64,
}

/// Tokens of long inputs from which the time of a step tells what one costs.
const TELLING_TOKENS: usize = 64;

/// Copies must be that much cheaper: they take memory of the host too.
const MARGIN: f64 = 1.25;

/// An average that forgets.
fn learn(average: &mut Option<f64>, seen: f64) {
    *average = Some(average.map_or(seen, |average| average + (seen - average) / 8.0));
}

impl SwapCosts {
    /// Tells that so many blocks were copied, one way.
    pub fn copied(&mut self, num_blocks: usize, time: Duration) {
        if num_blocks > 0 {
            learn(&mut self.copy, time.as_secs_f64() / num_blocks as f64);
        }
    }

    /// Tells what a step took: with `num_long` tokens of long inputs, and `num_single` sequences with one token.
    pub fn computed(&mut self, num_long: usize, num_single: usize, time: Duration) {
        let seconds = time.as_secs_f64();
        if num_long == 0 {
            self.decode = seconds;
        } else if num_long >= TELLING_TOKENS {
            // What the others would have taken without them is not theirs.
            let others = if num_single > 0 { self.decode } else { 0.0 };
            learn(&mut self.compute, (seconds - others).max(seconds / 8.0) / num_long as f64);
        }
    }

    /// Is copying so many blocks there and back cheaper than computing so many tokens? What was not tried yet, or not
    /// for long, is taken for cheap.
    pub fn is_copy_cheaper(&mut self, num_blocks: usize, num_tokens: usize) -> bool {
        let (Some(copy), Some(compute)) = (&mut self.copy, self.compute) else { return true };
        let both_ways = 2.0 * *copy * (num_blocks as f64);
        let is_cheaper = both_ways * MARGIN < compute * num_tokens as f64;
        if !is_cheaper {
            // Nobody learns from what is not done.
            *copy -= *copy / 32.0;
        }
        is_cheaper
    }
}

/// The places, and who has them.
#[derive(Debug, Default)]
pub(super) struct SwapSpace {
    /// Without owner; the last one is the next.
    free: Vec<u32>,
    num_places: usize,
    max_places: usize,
    is_short: bool,
    pub costs: SwapCosts,
    pub blocks_out: u64,
    pub blocks_in: u64,
}

impl SwapSpace {
    /// May grow to so many places, of which it has none yet.
    pub fn new(max_places: usize) -> Self {
        SwapSpace { max_places, ..SwapSpace::default() }
    }

    /// Whether there can be places at all.
    pub fn is_wanted(&self) -> bool {
        self.max_places > 0
    }

    /// How many places more there may be, if a sequence found too few; else 0.
    pub fn num_wanted(&self) -> usize {
        match self.is_short {
            true => self.max_places - self.num_places,
            false => 0,
        }
    }

    /// There is memory for so many places more.
    pub fn grow(&mut self, num_places: usize) {
        let end = self.num_places.saturating_add(num_places).min(self.max_places);
        // Room for all that come back at any time.
        if self.free.try_reserve_exact(end - self.free.len()).is_err() {
            return self.stop_growing();
        }
        // The lowest numbers go first.
        self.free.extend((self.num_places..end).map(|place| place as u32));
        self.free.sort_unstable_by(|a, b| b.cmp(a));
        self.num_places = end;
        self.is_short = false;
    }

    /// There will be no more places.
    pub fn stop_growing(&mut self) {
        self.max_places = self.num_places;
    }

    /// Places for `count` blocks, or none.
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

    pub fn counts(&self) -> SwapCounts {
        SwapCounts {
            places: self.num_places,
            used: self.num_places - self.free.len(),
            blocks_out: self.blocks_out,
            blocks_in: self.blocks_in,
        }
    }

    /// Counts everything again, given the places of all owners; an error says what does not add up.
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
        match count == self.num_places {
            true => Ok(()),
            false => {
                Err(Error::internal(format!("{count} of {} places on the host", self.num_places)))
            }
        }
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
    fn the_dearer_way_is_tried_again_now_and_then() {
        let mut costs = SwapCosts::default();
        costs.copied(1, Duration::from_millis(10));
        costs.computed(100, 0, Duration::from_millis(10));
        let refused = (0..1000).take_while(|_| !costs.is_copy_cheaper(1, 100)).count();
        // Twice as dear, and a margin: until it has been taken for less than half of that.
        assert!((25..35).contains(&refused), "{refused}");
    }

    #[test]
    fn what_was_saved_behind_blocks_that_are_gone_is_of_no_use() {
        let saved = Saved { first_block: 2, places: vec![7, 8, 9], num_tokens: 150 };
        let ends: Vec<usize> = (0..7).map(|found| saved.num_blocks_with(found)).collect();
        assert_eq!(ends, [0, 1, 5, 5, 5, 5, 6]);
    }
}
