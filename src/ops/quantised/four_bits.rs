//! The search for the scale and the zero of each group of 4 bits, for sixteen groups at a time: each has a lane
//! of its own, so that every operation is one of vectors, and sums need not be added up across lanes.

// Indices of constant extent into several arrays at once, which the compiler makes vectors of.
#![allow(clippy::needless_range_loop)]

/// The groups that are searched together.
pub(super) const LANES: usize = 16;

/// A number of each group.
pub(super) type Lanes = [f32; LANES];

/// The ranges that are tried for a group are fractions of the full one, this far apart.
const RANGE_STEP: f32 = 0.04;
/// The number of ranges that are tried.
const NUM_RANGES: usize = 11;

/// Returns the integer nearest to x, of at most 2^22, ties to even. Without a call, so that loops are vectorised.
#[inline(always)]
pub(super) fn nearest(x: f32) -> f32 {
    /// 1.5 * 2^23, which leaves no room for fractions.
    const ROUND: f32 = 12_582_912.0;
    (x + ROUND) - ROUND
}

#[inline(always)]
pub(super) fn inverse(scale: f32) -> f32 {
    if scale > 0.0 {
        1.0 / scale
    } else {
        0.0
    }
}

/// Returns the code of a number.
#[inline(always)]
pub(super) fn code(x: f32, inverse: f32, zero: f32) -> f32 {
    nearest(x * inverse + zero).clamp(0.0, 15.0)
}

/// Rounds to bf16, ties to even. What is not finite remains so.
#[inline(always)]
fn round_to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

/// The scales and the zeros of sixteen groups.
#[derive(Clone, Copy)]
pub(super) struct FourBits {
    pub scale: Lanes,
    pub inverse: Lanes,
    pub zero: Lanes,
}

impl FourBits {
    /// Returns the scales, rounded, and zeros for them.
    #[inline(always)]
    fn of(scale: &Lanes, least: &Lanes) -> Self {
        let mut all = FourBits { scale: [0.0; LANES], inverse: [0.0; LANES], zero: [0.0; LANES] };
        for lane in 0..LANES {
            let scale = round_to_bf16(scale[lane]);
            let inverse = inverse(scale);
            // The reciprocal of a number below 2^-126 is infinite.
            let is_usable = inverse.is_finite() && scale != 0.0;
            let scale = if is_usable { scale } else { 0.0 };
            let inverse = if is_usable { inverse } else { 0.0 };
            all.scale[lane] = scale;
            all.inverse[lane] = inverse;
            all.zero[lane] = nearest(-least[lane] * inverse).clamp(0.0, 15.0);
        }
        all
    }

    /// Returns the sums of squared errors, and the scales that fit the codes best.
    #[inline(always)]
    fn try_on(&self, numbers: &[Lanes]) -> (Lanes, Lanes) {
        let [mut errors, mut products, mut squares] = [[0.0; LANES]; 3];
        for x in numbers {
            for lane in 0..LANES {
                let q = code(x[lane], self.inverse[lane], self.zero[lane]) - self.zero[lane];
                let error = q * self.scale[lane] - x[lane];
                errors[lane] += error * error;
                products[lane] += q * x[lane];
                squares[lane] += q * q;
            }
        }
        for lane in 0..LANES {
            let fit = products[lane] / squares[lane];
            products[lane] = if squares[lane] > 0.0 { fit } else { self.scale[lane] };
        }
        (errors, products)
    }
}

/// The best of what has been tried.
struct Best {
    found: FourBits,
    least_errors: Lanes,
}

impl Best {
    /// Keeps the better candidate of each group, and returns the scales that fit the candidate's codes best. In
    /// groups whose numbers are all zero, or whose range is no number, no error is below the first one.
    // Not a closure, which would be compiled without the instruction set of its caller.
    #[inline(always)]
    fn challenge(&mut self, candidate: FourBits, numbers: &[Lanes]) -> Lanes {
        let (errors, fit) = candidate.try_on(numbers);
        for lane in 0..LANES {
            let is_better = errors[lane] < self.least_errors[lane];
            let choose = |new: f32, old: f32| if is_better { new } else { old };
            self.least_errors[lane] = choose(errors[lane], self.least_errors[lane]);
            self.found.scale[lane] = choose(candidate.scale[lane], self.found.scale[lane]);
            self.found.inverse[lane] = choose(candidate.inverse[lane], self.found.inverse[lane]);
            self.found.zero[lane] = choose(candidate.zero[lane], self.found.zero[lane]);
        }
        fit
    }
}

/// Finds the scales and the zeros of sixteen groups, of which `numbers` has a number each at every place. Zeros
/// change nothing: they fill up what is shorter.
#[inline(always)]
pub(super) fn search(numbers: &[Lanes]) -> FourBits {
    let [mut least, mut most] = [[0.0_f32; LANES]; 2];
    for x in numbers {
        for lane in 0..LANES {
            least[lane] = if x[lane] < least[lane] { x[lane] } else { least[lane] };
            most[lane] = if x[lane] > most[lane] { x[lane] } else { most[lane] };
        }
    }
    let range: Lanes = std::array::from_fn(|lane| most[lane] - least[lane]);
    let steps = |fraction: f32| range.map(|range| range * fraction / 15.0);
    let first = FourBits::of(&steps(1.0), &least);
    let (least_errors, mut fitted) = first.try_on(numbers);
    let mut best = Best { found: first, least_errors };
    for step in 0..NUM_RANGES {
        let fraction = 1.0 - RANGE_STEP * step as f32;
        let least = least.map(|x| x * fraction);
        if step > 0 {
            fitted = best.challenge(FourBits::of(&steps(fraction), &least), numbers);
        }
        best.challenge(FourBits::of(&fitted, &least), numbers);
    }
    best.found
}
