//! How products are divided among the multiprocessors of a chip: the clusters that it holds, and
//! what becomes of the rows that whole waves of blocks leave over.

/// The multiprocessors of the chips for which products are divided (H100, H200).
pub(super) const MULTIPROCESSORS: usize = 132;

/// Returns how many clusters of so many blocks are resident at a time where each block fills a
/// multiprocessor; one more would wait for another to end. No cluster leaves its group of 16 or 18
/// multiprocessors, so that those of more than two leave some idle (H200: 30 of four, 37 to 39 of three).
pub(super) const fn clusters(blocks: usize) -> usize {
    match blocks {
        ..=1 => MULTIPROCESSORS,
        2 => MULTIPROCESSORS / 2,
        3 => 36,
        4 => 30,
        5 => 22,
        6 => 16,
        _ => 14,
    }
}

/// A run of the tiles of a weight, and the blocks that compute it in one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part<B> {
    pub blocks: B,
    pub first_tile: usize,
    pub num_tiles: usize,
}

/// The parts of a product, of which the second one may be missing.
pub(super) type Parts<B> = [Option<Part<B>>; 2];

/// Blocks that each compute a tile of the product by themselves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Alone<B> {
    pub blocks: B,
    /// The tiles of a weight that one of them has.
    pub tiles: usize,
    /// How many of them have the same tiles, for other tokens.
    pub token_groups: usize,
}

/// Returns the parts of the product with a weight of `num_tiles` that take the least time, and that time: all
/// tiles in one launch, or as many as whole waves of blocks compute, and what is left over divided
/// otherwise. `fastest` returns the time of so many tiles in one launch, and its blocks; `cost` that of
/// the given ones.
pub(super) fn fastest_parts<B: Copy>(
    num_tiles: usize,
    alone: impl Iterator<Item = Alone<B>>,
    cost: impl Fn(B, usize) -> usize,
    fastest: impl Fn(usize) -> Option<(usize, B)>,
) -> Option<(usize, Parts<B>)> {
    let (least, blocks) = fastest(num_tiles)?;
    let mut best = (least, [Some(Part { blocks, first_tile: 0, num_tiles }), None]);
    for Alone { blocks, tiles, token_groups } in alone {
        let waves = num_tiles.div_ceil(tiles) * token_groups / MULTIPROCESSORS;
        let whole = (waves * MULTIPROCESSORS / token_groups).saturating_mul(tiles);
        if whole == 0 || whole >= num_tiles {
            continue;
        }
        let Some((rest, others)) = fastest(num_tiles - whole) else { continue };
        let both = cost(blocks, whole) + rest;
        // A second launch has to be worth it.
        if both + both / 32 < best.0 {
            let first = Part { blocks, first_tile: 0, num_tiles: whole };
            let second = Part { blocks: others, first_tile: whole, num_tiles: num_tiles - whole };
            best = (both, [Some(first), Some(second)]);
        }
    }
    Some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of eight tiles that take 10 units a wave, or 3 if four of them share the inputs.
    #[test]
    fn what_whole_waves_leave_over_is_divided_otherwise() {
        let cost = |splits: usize, tiles: usize| {
            let waves = |held: usize| tiles.div_ceil(8).div_ceil(held);
            if splits == 1 {
                10 * waves(clusters(1))
            } else {
                3 * waves(clusters(splits))
            }
        };
        let parts = |tiles: usize| {
            let alone = Alone { blocks: 1, tiles: 8, token_groups: 1 };
            let fastest =
                |tiles| [1, 4].map(|splits| (cost(splits, tiles), splits)).into_iter().min();
            fastest_parts(tiles, [alone].into_iter(), cost, fastest).unwrap()
        };
        let one = |blocks, num_tiles| [Some(Part { blocks, first_tile: 0, num_tiles }), None];
        assert_eq!(parts(8 * 20), (3, one(4, 8 * 20)));
        assert_eq!(parts(8 * 132), (10, one(1, 8 * 132)));
        let rest = Part { blocks: 4, first_tile: 8 * 132, num_tiles: 5 };
        let first = Part { blocks: 1, first_tile: 0, num_tiles: 8 * 132 };
        assert_eq!(parts(8 * 132 + 5), (13, [Some(first), Some(rest)]));
    }
}
