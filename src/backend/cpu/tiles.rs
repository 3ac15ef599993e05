//! Products of tiles: a unit that multiplies 16 rows by 16 columns over 32 values of k in bf16 at once
//! ([`super::amx`]), and its twin in plain Rust for machines without one. Of integers of 8 bits it
//! takes 64 values of k at once; see [`IntegerOperands`].
//!
//! A tile of the left operand is [16 rows][32 k] bf16, one kilobyte without gaps. A tile of the
//! right operand is [16 pairs of k][16 columns][2] bf16; its pairs are `b_stride` bytes apart, or, in
//! a panel of weights, it is one kilobyte without gaps too, which loads 1.3 times as fast. A tile of
//! sums is [16][16] f32. An instruction adds up, for each sum,
//!
//! ```text
//! even = 0; odd = 0
//! for each pair p:  even = fma(a[2p], b[2p], even);  odd = fma(a[2p+1], b[2p+1], odd)
//! sum = sum + (even + odd)
//! ```
//!
//! rounded to nearest even whatever the thread's floating-point mode, with subnormal operands and
//! results taken as zero ("Intel 64 and IA-32 Architectures Software Developer's Manual", volume 2,
//! TDPBF16PS). A sum depends on its own row and column alone.

use std::marker::PhantomData;

/// The number of rows of a tile, and of columns of a tile of sums.
pub const TILE_ROWS: usize = 16;
/// The number of values of k that one instruction adds up.
pub const TILE_K: usize = 32;
/// The number of elements of a tile of the left operand.
pub const TILE_LEN: usize = TILE_ROWS * TILE_K;
/// The number of bytes of a tile, and of one of its rows.
pub const TILE_BYTES: usize = 2 * TILE_LEN;
pub const ROW_BYTES: usize = TILE_BYTES / TILE_ROWS;
/// The number of tiles beside each other in a panel of weights; those of the next 32 values of k
/// follow them.
pub const PANEL_TILES: usize = 4;

/// The operands of a block of `ROWS` by `COLUMNS` tiles of sums.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct TileOperands {
    /// The first row of tiles, [num_steps] tiles.
    pub a: *const u16,
    /// Bytes from a row of tiles to the next.
    pub a_stride: usize,
    /// The tiles of the first step, beside each other: [16 pairs][16 * COLUMNS][2]. In a panel,
    /// [PANEL_TILES] tiles of a step, or the last ones of these.
    pub b: *const u16,
    /// Bytes from pair to pair of `b`; a step is 16 pairs. Of no account in a panel.
    pub b_stride: usize,
    /// Steps of 32 values of k: at least one.
    pub num_steps: usize,
    /// [16 * ROWS][16 * COLUMNS] f32.
    pub out: *mut f32,
    /// Bytes from row to row of `out`.
    pub out_stride: usize,
    /// Whether to start from the sums that `out` holds (1), rather than from zero (0).
    pub accumulate: usize,
    /// Where to begin to prefetch, and how many lines a step: any address, or none.
    pub prefetch: *const u8,
    pub prefetch_lines: usize,
}

/// The number of values of k that one instruction adds up of integers of 8 bits.
pub const TILE_BYTES_K: usize = 64;

/// The operands of a block of 16 rows by 32 columns of sums of integers.
///
/// Activations are integers of 16 bits, `256 * upper + lower`, both of them signed bytes. A tile of
/// the left operand is [16 rows][64 k] bytes, one kilobyte without gaps. A tile of the right operand
/// is [16 fours of k][16 columns][4] bytes without a sign. Sums are exact, modulo 2^32.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct IntegerOperands {
    /// [num_steps][upper, lower] tiles.
    pub a: *const i8,
    /// The two tiles of the first step, beside each other.
    pub b: *const u8,
    /// Bytes from four to four of `b`; a step is 16 fours.
    pub b_stride: usize,
    /// Steps of 64 values of k: at least one.
    pub num_steps: usize,
    /// The sums of the upper bytes and those of the lower ones, [2][16][32].
    pub out: *mut i32,
}

/// The operands of a block of `ROWS` tiles of 16 rows by 32 columns of sums of signed bytes.
///
/// Tiles are as in [`IntegerOperands`], each one kilobyte without gaps. Sums are exact, modulo 2^32.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ByteOperands {
    /// The first row of tiles, a tile for each step.
    pub a: *const i8,
    /// Bytes from a row of tiles to the next.
    pub a_stride: usize,
    /// Bytes from a tile to that of the next step.
    pub a_step: usize,
    /// The two tiles of the first step, beside each other; those of a step are [`PANEL_TILES`] further.
    pub b: *const i8,
    /// Steps of 64 values of k: at least one.
    pub num_steps: usize,
    /// [16 * ROWS][32].
    pub out: *mut i32,
}

/// A unit that multiplies tiles, ready for use by this thread until it is dropped.
///
/// # Safety
/// `block` writes all sums of its block and nothing else, and so do `panel_block`, `gathered_block`,
/// `integer_block` and `byte_block`.
pub unsafe trait TileUnit: Sized {
    /// Makes the unit of this thread ready; None if the instruction set has none.
    /// # Safety
    /// The machine supports the instruction set that this unit belongs to. No other unit of this
    /// thread is ready.
    unsafe fn ready() -> Option<Self>;

    /// Computes a block of `ROWS` by `COLUMNS` tiles, of the shapes (1, 1), (1, 2), (2, 1) and
    /// (2, 2).
    /// # Safety
    /// The pointers of `operands` cover what its fields say.
    unsafe fn block<const ROWS: usize, const COLUMNS: usize>(&mut self, operands: &TileOperands);

    /// Computes a block of the shape (1, 4) or (2, 2) whose right operand is a panel of weights, or
    /// half of its columns.
    /// # Safety
    /// As for `block`.
    unsafe fn panel_block<const ROWS: usize, const COLUMNS: usize>(
        &mut self,
        operands: &TileOperands,
    );

    /// Computes a block whose right operand lies in several places: the tiles of step i at
    /// `steps[i]`, of which there is at least one. `b`, `num_steps` and `prefetch` of the operands
    /// do not count.
    /// # Safety
    /// As for `block`.
    unsafe fn gathered_block<const ROWS: usize, const COLUMNS: usize>(
        &mut self,
        operands: &TileOperands,
        steps: &[*const u16],
    );

    /// Computes a block of integers.
    /// # Safety
    /// The pointers of `operands` cover what its fields say.
    unsafe fn integer_block(&mut self, operands: &IntegerOperands);

    /// Computes a block of one or two rows of tiles of signed bytes.
    /// # Safety
    /// The pointers of `operands` cover what its fields say.
    unsafe fn byte_block<const ROWS: usize>(&mut self, operands: &ByteOperands);

    /// Computes the first `num_rows` of 16 rows times a panel, at least one. It is for few rows whose
    /// right operand comes from memory. The other rows of `out` may be left as they are. The bits are
    /// those of `panel_block`, with `accumulate` or without.
    /// # Safety
    /// As for `block`.
    #[inline(always)]
    unsafe fn few_rows(&mut self, _num_rows: usize, operands: &TileOperands) {
        // SAFETY: passed on to the caller.
        unsafe { self.panel_block::<1, 4>(operands) }
    }
}

/// The twin in plain Rust: the same bits as the instruction's, on any machine.
pub struct EmulatedTiles(PhantomData<*const ()>);

// SAFETY: `block` goes over the sums of its block, once each.
unsafe impl TileUnit for EmulatedTiles {
    #[inline(always)]
    unsafe fn ready() -> Option<Self> {
        Some(EmulatedTiles(PhantomData))
    }

    unsafe fn block<const ROWS: usize, const COLUMNS: usize>(&mut self, operands: &TileOperands) {
        let step = |step| operands.b.wrapping_byte_add(TILE_ROWS * step * operands.b_stride);
        // SAFETY: passed on to the caller.
        unsafe { emulate::<ROWS, COLUMNS>(operands, operands.num_steps, 2 * TILE_ROWS, step) }
    }

    unsafe fn panel_block<const ROWS: usize, const COLUMNS: usize>(
        &mut self,
        operands: &TileOperands,
    ) {
        let step = |step| operands.b.wrapping_add(step * PANEL_TILES * TILE_LEN);
        let operands = &TileOperands { b_stride: ROW_BYTES, ..*operands };
        // SAFETY: passed on to the caller.
        unsafe { emulate::<ROWS, COLUMNS>(operands, operands.num_steps, TILE_LEN, step) }
    }

    unsafe fn gathered_block<const ROWS: usize, const COLUMNS: usize>(
        &mut self,
        operands: &TileOperands,
        steps: &[*const u16],
    ) {
        // SAFETY: passed on to the caller.
        unsafe {
            emulate::<ROWS, COLUMNS>(operands, steps.len(), 2 * TILE_ROWS, |step| steps[step])
        }
    }

    unsafe fn integer_block(&mut self, operands: &IntegerOperands) {
        let IntegerOperands { a, b, b_stride, num_steps, out } = *operands;
        let columns = 2 * TILE_ROWS;
        for (part, row) in (0..2).flat_map(|part| (0..TILE_ROWS).map(move |row| (part, row))) {
            let mut sums = [0_i32; 2 * TILE_ROWS];
            for (step, four) in
                (0..num_steps).flat_map(|step| (0..TILE_ROWS).map(move |four| (step, four)))
            {
                // SAFETY: a step has two tiles of 16 rows on the left, and 16 fours of 32 columns on
                // the right.
                unsafe {
                    let a = a.add((2 * step + part) * TILE_BYTES_K * TILE_ROWS);
                    let a = a.add(row * TILE_BYTES_K + 4 * four).cast::<[i8; 4]>().read_unaligned();
                    let b = b.add((step * TILE_ROWS + four) * b_stride);
                    let b = b.cast::<[[u8; 4]; 2 * TILE_ROWS]>().read_unaligned();
                    for (sum, b) in sums.iter_mut().zip(b) {
                        for (a, b) in a.into_iter().zip(b) {
                            *sum = sum.wrapping_add(i32::from(a) * i32::from(b));
                        }
                    }
                }
            }
            // SAFETY: there are 16 rows of 32 sums for each of the two parts.
            unsafe {
                let out = out.add((part * TILE_ROWS + row) * columns);
                out.cast::<[i32; 2 * TILE_ROWS]>().write_unaligned(sums);
            }
        }
    }

    unsafe fn byte_block<const ROWS: usize>(&mut self, operands: &ByteOperands) {
        let ByteOperands { a, a_stride, a_step, b, num_steps, out } = *operands;
        for row in 0..TILE_ROWS * ROWS {
            for column in 0..2 * TILE_ROWS {
                let mut sum = 0_i32;
                for four in 0..num_steps * TILE_ROWS {
                    let (step, four) = (four / TILE_ROWS, four % TILE_ROWS);
                    // SAFETY: a step has a tile on the left for each row of tiles, and two on the right,
                    // of 16 rows of 64 bytes.
                    unsafe {
                        let a = a.add(row / TILE_ROWS * a_stride + step * a_step);
                        let a = a.add(row % TILE_ROWS * ROW_BYTES + 4 * four).cast::<[i8; 4]>();
                        let b = b.add((step * PANEL_TILES + column / TILE_ROWS) * TILE_BYTES);
                        let b =
                            b.add(four * ROW_BYTES + 4 * (column % TILE_ROWS)).cast::<[i8; 4]>();
                        for (a, b) in a.read_unaligned().into_iter().zip(b.read_unaligned()) {
                            sum = sum.wrapping_add(i32::from(a) * i32::from(b));
                        }
                    }
                }
                // SAFETY: there are 16 * ROWS rows of 32 sums.
                unsafe { out.add(row * 2 * TILE_ROWS + column).write_unaligned(sum) };
            }
        }
    }
}

/// Computes a block. `step(i)` is where the tiles of step i of the right operand lie, `column_len`
/// elements apart.
///
/// # Safety
/// As for [`TileUnit::block`].
unsafe fn emulate<const ROWS: usize, const COLUMNS: usize>(
    operands: &TileOperands,
    num_steps: usize,
    column_len: usize,
    step: impl Fn(usize) -> *const u16,
) {
    let TileOperands { a, a_stride, b_stride, out, out_stride, .. } = *operands;
    for row in 0..TILE_ROWS * ROWS {
        for tile_column in 0..COLUMNS {
            // SAFETY: the rows and columns are those of the block, and the steps those of the
            // operands; nothing need be aligned.
            unsafe {
                let out = out.byte_add(row * out_stride).add(TILE_ROWS * tile_column);
                let mut sums = [0.0; TILE_ROWS];
                if operands.accumulate != 0 {
                    sums = out.cast::<[f32; TILE_ROWS]>().read_unaligned();
                }
                let a = a.byte_add(row / TILE_ROWS * a_stride).add(row % TILE_ROWS * TILE_K);
                for index in 0..num_steps {
                    let a = a.add(index * TILE_LEN).cast::<[u16; TILE_K]>().read_unaligned();
                    let b = step(index).add(column_len * tile_column);
                    let pair = |p: usize| {
                        b.byte_add(p * b_stride).cast::<[u16; 2 * TILE_ROWS]>().read_unaligned()
                    };
                    add_products(&mut sums, &a, pair);
                }
                out.cast::<[f32; TILE_ROWS]>().write_unaligned(sums);
            }
        }
    }
}

/// One instruction, for one row: `sums[c] += sum over k of a[k] * b[k][c]`. `pair(p)` is
/// [16 columns][2] of `b`.
fn add_products(
    sums: &mut [f32; TILE_ROWS],
    a: &[u16; TILE_K],
    pair: impl Fn(usize) -> [u16; 2 * TILE_ROWS],
) {
    let mut parts = [0.0; 2 * TILE_ROWS];
    for p in 0..TILE_ROWS {
        let b = pair(p);
        for (i, part) in parts.iter_mut().enumerate() {
            let (a, b) = (operand(a[2 * p + i % 2]), operand(b[i]));
            *part = flushed(multiply_add(a, b, *part));
        }
    }
    for (sum, parts) in sums.iter_mut().zip(parts.chunks_exact(2)) {
        *sum = flushed(flushed(*sum) + flushed(parts[0] + parts[1]));
    }
}

/// Returns a bf16 as f32, a subnormal one as zero.
#[inline(always)]
fn operand(bits: u16) -> f32 {
    flushed(f32::from_bits(u32::from(bits) << 16))
}

/// Returns a subnormal number as a zero of its sign.
#[inline(always)]
fn flushed(x: f32) -> f32 {
    // By its bits: the thread's floating-point mode may take subnormal numbers as zero in
    // comparisons.
    let bits = x.to_bits();
    if bits & 0x7f80_0000 == 0 {
        f32::from_bits(bits & 0x8000_0000)
    } else {
        x
    }
}

/// Returns `a * b + c`, rounded once.
#[inline(always)]
fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    let product = a * b;
    // The product of two bf16 has sixteen bits, so f32 holds it exactly, inside its range.
    let exponent = product.to_bits() & 0x7f80_0000;
    if exponent != 0 && exponent != 0x7f80_0000 {
        product + c
    } else {
        a.mul_add(b, c)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers from -2 to 2, and now and then one of `special`.
    fn numbers(len: usize, seed: u64, special: &[u16]) -> Vec<u16> {
        let mut state = seed;
        let mut next = move || {
            // Knuth's MMIX generator.
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize
        };
        (0..len)
            .map(|_| match special {
                [_, ..] if next() % 40 == 0 => special[next() % special.len()],
                _ => half::bf16::from_f32((next() % 4001) as f32 / 1000.0 - 2.0).to_bits(),
            })
            .collect()
    }

    /// Zeros, subnormal numbers, the least and the largest numbers, infinities and NaN.
    const SPECIAL: [u16; 14] = [
        0, 0x8000, 1, 0x8001, 0x7f, 0x80, 0x8080, 0x100, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0,
        0x2000,
    ];

    struct Case {
        a: Vec<u16>,
        b: Vec<u16>,
        b_stride: usize,
        num_steps: usize,
        out_stride: usize,
        accumulate: bool,
    }

    const GUARD: f32 = 12345.0;

    /// How the right operand of a block lies.
    #[derive(Clone, Copy, PartialEq)]
    enum Right {
        Beside,
        Gathered,
        Panel,
    }

    /// Arranges a right operand in tiles without gaps, `PANEL_TILES` a step.
    fn panel_of(case: &Case, columns: usize) -> Vec<u16> {
        let mut panel = vec![0x7fc0; case.num_steps * PANEL_TILES * TILE_LEN];
        for (tile, to) in panel.chunks_exact_mut(TILE_LEN).enumerate() {
            let (step, column) = (tile / PANEL_TILES, tile % PANEL_TILES);
            for (pair, to) in to.chunks_exact_mut(32).enumerate().filter(|_| column < columns) {
                let from = (16 * step + pair) * case.b_stride + 32 * column;
                to.copy_from_slice(&case.b[from..from + 32]);
            }
        }
        panel
    }

    /// Computes a block from its operands in unaligned memory; all of `out`, with what lies between
    /// its rows.
    fn block<T: TileUnit, const ROWS: usize, const COLUMNS: usize>(
        case: &Case,
        right: Right,
    ) -> Vec<f32> {
        let mut out = vec![GUARD; 16 * ROWS * case.out_stride];
        for (row, out) in out.chunks_exact_mut(case.out_stride).enumerate() {
            out[..16 * COLUMNS].fill(0.25 * row as f32);
        }
        let operands = TileOperands {
            a: case.a.as_ptr(),
            a_stride: case.num_steps * TILE_LEN * 2,
            b: case.b.as_ptr(),
            b_stride: 2 * case.b_stride,
            num_steps: case.num_steps,
            out: out.as_mut_ptr(),
            out_stride: 4 * case.out_stride,
            accumulate: usize::from(case.accumulate),
            prefetch: case.b.as_ptr().cast(),
            prefetch_lines: 3,
        };
        let steps: Vec<*const u16> =
            (0..case.num_steps).map(|step| case.b[16 * step * case.b_stride..].as_ptr()).collect();
        let panel = panel_of(case, COLUMNS);
        // SAFETY: the callers have found the instruction set; the operands are as large as they
        // say.
        unsafe {
            let mut unit = T::ready().unwrap();
            match right {
                Right::Beside => unit.block::<ROWS, COLUMNS>(&operands),
                Right::Gathered => unit.gathered_block::<ROWS, COLUMNS>(&operands, &steps),
                Right::Panel => unit
                    .panel_block::<ROWS, COLUMNS>(&TileOperands { b: panel.as_ptr(), ..operands }),
            }
        }
        out
    }

    fn case<const ROWS: usize, const COLUMNS: usize>(seed: u64, special: &[u16]) -> Case {
        let num_steps = 1 + seed as usize % 5;
        let b_stride = 32 * COLUMNS + 6 * (seed as usize % 3);
        Case {
            a: numbers(ROWS * num_steps * TILE_LEN, seed, special),
            b: numbers(16 * num_steps * b_stride, seed + 100, special),
            b_stride,
            num_steps,
            out_stride: 16 * COLUMNS + seed as usize % 4,
            accumulate: seed % 2 == 1,
        }
    }

    /// Returns how the right operand of a shape may lie.
    fn rights<const ROWS: usize, const COLUMNS: usize>() -> Vec<Right> {
        match (ROWS, COLUMNS) {
            (1, 4) => vec![Right::Panel],
            (2, 2) => vec![Right::Beside, Right::Gathered, Right::Panel],
            _ => vec![Right::Beside, Right::Gathered],
        }
    }

    /// The sums in float64, in no particular order.
    fn check_sums<const ROWS: usize, const COLUMNS: usize>() {
        for seed in 0..6 {
            let case = case::<ROWS, COLUMNS>(seed, &[]);
            let f64_of = |bits: u16| f64::from(half::bf16::from_bits(bits).to_f32());
            for right in rights::<ROWS, COLUMNS>() {
                let out = block::<EmulatedTiles, ROWS, COLUMNS>(&case, right);
                for (place, &got) in out.iter().enumerate() {
                    let (row, column) = (place / case.out_stride, place % case.out_stride);
                    if column >= 16 * COLUMNS {
                        assert_eq!(got, GUARD);
                        continue;
                    }
                    let mut sum = if case.accumulate { 0.25 * row as f64 } else { 0.0 };
                    for k in 0..TILE_K * case.num_steps {
                        let tile = row / 16 * case.num_steps + k / TILE_K;
                        let a = case.a[tile * TILE_LEN + row % 16 * TILE_K + k % TILE_K];
                        let b = case.b[k / 2 * case.b_stride + 2 * column + k % 2];
                        sum += f64_of(a) * f64_of(b);
                    }
                    let error = (f64::from(got) - sum).abs();
                    assert!(error < 1e-4, "{ROWS}x{COLUMNS} [{row}][{column}]: {got}, {sum}");
                }
            }
        }
    }

    #[test]
    fn blocks_are_products() {
        check_sums::<1, 1>();
        check_sums::<1, 2>();
        check_sums::<1, 4>();
        check_sums::<2, 1>();
        check_sums::<2, 2>();
    }

    #[test]
    fn even_and_odd_k_are_summed_apart_and_subnormal_numbers_are_zero() {
        let pairs = |values: [u16; 4]| {
            move |p: usize| match p {
                0 => [values[0], values[1]].repeat(16).try_into().unwrap(),
                1 => [values[2], values[3]].repeat(16).try_into().unwrap(),
                _ => [0; 32],
            }
        };
        let sum_of = |start: f32, a: [u16; 4], b: [u16; 4]| {
            let mut all = [0; TILE_K];
            all[..4].copy_from_slice(&a);
            let mut sums = [start; TILE_ROWS];
            add_products(&mut sums, &all, pairs(b));
            sums[7]
        };
        let bits = |x: f32| half::bf16::from_f32(x).to_bits();
        let one = bits(1.0);
        // 2^24 + 1 is 2^24, so that in order the sum would be 0; the even ones cancel exactly.
        let (large, minus_large) = (bits(16_777_216.0), bits(-16_777_216.0));
        assert_eq!(sum_of(0.0, [large, one, minus_large, 0], [one; 4]), 1.0);
        // A subnormal operand, a subnormal product, and a subnormal sum to start from.
        assert_eq!(sum_of(0.0, [1, 0, 0, 0], [large, 0, 0, 0]).to_bits(), 0);
        let (tiny, small) = (bits(f32::MIN_POSITIVE), bits(0.5));
        assert_eq!(sum_of(0.0, [tiny, 0, 0, 0], [small, 0, 0, 0]).to_bits(), 0);
        assert_eq!(sum_of(1e-40, [0; 4], [0; 4]).to_bits(), 0);
        assert!(sum_of(f32::NAN, [0; 4], [0; 4]).is_nan());
        assert_eq!(sum_of(0.0, [bits(f32::INFINITY), 0, 0, 0], [one; 4]), f32::INFINITY);
        assert!(sum_of(0.0, [bits(f32::INFINITY), 0, 0, 0], [0; 4]).is_nan());
    }

    /// The bits of the twin and of the processor.
    #[cfg(target_arch = "x86_64")]
    fn check_bits<const ROWS: usize, const COLUMNS: usize>() {
        use crate::backend::cpu::amx::Amx;
        for (seed, special) in (0..40).zip([&[][..], &SPECIAL].into_iter().cycle()) {
            let case = case::<ROWS, COLUMNS>(seed, special);
            for right in rights::<ROWS, COLUMNS>() {
                let emulated = block::<EmulatedTiles, ROWS, COLUMNS>(&case, right);
                let own = block::<Amx, ROWS, COLUMNS>(&case, right);
                for (place, (a, b)) in emulated.iter().zip(&own).enumerate() {
                    let is_same = a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                    assert!(is_same, "{ROWS}x{COLUMNS} of seed {seed}, {place}: {a:e}, {b:e}");
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn few_rows_have_the_bits_of_many() {
        use crate::backend::cpu::amx::Amx;
        if !crate::backend::cpu::amx::is_available() {
            eprintln!("no AMX here");
            return;
        }
        for (seed, special) in (0..40).zip([&[][..], &SPECIAL].into_iter().cycle()) {
            let case = Case { accumulate: false, ..case::<1, 4>(seed, special) };
            let expected = block::<EmulatedTiles, 1, 4>(&case, Right::Panel);
            let panel = panel_of(&case, 4);
            for num_rows in 1..=3 {
                let mut out = vec![GUARD; 16 * case.out_stride];
                let operands = TileOperands {
                    a: case.a.as_ptr(),
                    a_stride: 0,
                    b: panel.as_ptr(),
                    b_stride: 0,
                    num_steps: case.num_steps,
                    out: out.as_mut_ptr(),
                    out_stride: 4 * case.out_stride,
                    accumulate: 0,
                    prefetch: panel.as_ptr().cast(),
                    prefetch_lines: 0,
                };
                // SAFETY: as in `block`.
                unsafe { Amx::ready().unwrap().few_rows(num_rows, &operands) };
                for row in 0..num_rows {
                    for column in 0..64 {
                        let place = row * case.out_stride + column;
                        let (a, b) = (expected[place], out[place]);
                        let is_same = a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                        assert!(is_same, "seed {seed}, [{row}][{column}]: {a:e}, {b:e}");
                    }
                }
            }
        }
    }

    /// Computes a block of bytes of every value.
    fn integers<T: TileUnit>(num_steps: usize, b_stride: usize) -> (Vec<i8>, Vec<u8>, Vec<i32>) {
        let bytes = |len, seed| -> Vec<u8> {
            numbers(len, seed, &[]).iter().map(|n| (n >> 3) as u8).collect()
        };
        let a: Vec<i8> =
            bytes(num_steps * 2 * 16 * TILE_BYTES_K, 1).iter().map(|&b| b as i8).collect();
        let b = bytes(num_steps * 16 * b_stride, 2);
        let mut out = vec![0; 2 * 16 * 32];
        let (a_start, b_start) = (a.as_ptr(), b.as_ptr());
        let operands =
            IntegerOperands { a: a_start, b: b_start, b_stride, num_steps, out: out.as_mut_ptr() };
        // SAFETY: the callers have found the instruction set; the operands are as large as they
        // say.
        unsafe { T::ready().unwrap().integer_block(&operands) };
        (a, b, out)
    }

    #[test]
    fn blocks_of_integers_are_products() {
        for (num_steps, b_stride) in [(1, 128), (2, 256), (5, 131)] {
            let (a, b, out) = integers::<EmulatedTiles>(num_steps, b_stride);
            for (place, &got) in out.iter().enumerate() {
                let (part, row, column) = (place / 512, place / 32 % 16, place % 32);
                let mut sum = 0_i64;
                for k in 0..num_steps * TILE_BYTES_K {
                    let (step, k) = (k / TILE_BYTES_K, k % TILE_BYTES_K);
                    let a = a[((2 * step + part) * 16 + row) * TILE_BYTES_K + k];
                    let b = b[(16 * step + k / 4) * b_stride + 4 * column + k % 4];
                    sum += i64::from(a) * i64::from(b);
                }
                assert_eq!(i64::from(got), sum, "{num_steps} steps, part {part} [{row}][{column}]");
            }
        }
    }

    /// Computes a block of signed bytes of every value, whose rows of tiles are apart.
    fn bytes<T: TileUnit, const ROWS: usize>(
        num_steps: usize,
        is_mixed: bool,
    ) -> (Vec<i8>, Vec<i8>, Vec<i32>) {
        let bytes = |len, seed| -> Vec<i8> {
            numbers(len, seed, &[]).iter().map(|n| (n >> 3) as i8).collect()
        };
        let (a_stride, a_step) = byte_strides::<ROWS>(num_steps, is_mixed);
        let a = bytes(ROWS * (num_steps + 1) * TILE_BYTES, 3);
        let b = bytes(num_steps * PANEL_TILES * TILE_BYTES, 4);
        let mut out = vec![0; ROWS * 16 * 32];
        let (a_start, b_start) = (a.as_ptr(), b.as_ptr());
        let operands = ByteOperands {
            a: a_start,
            a_stride,
            a_step,
            b: b_start,
            num_steps,
            out: out.as_mut_ptr(),
        };
        // SAFETY: the callers have found the instruction set; the operands are as large as they
        // say.
        unsafe { T::ready().unwrap().byte_block::<ROWS>(&operands) };
        (a, b, out)
    }

    /// Whole rows of tiles after each other, or the tiles of a step.
    fn byte_strides<const ROWS: usize>(num_steps: usize, is_mixed: bool) -> (usize, usize) {
        match is_mixed {
            true => (TILE_BYTES, ROWS * TILE_BYTES),
            false => ((num_steps + 1) * TILE_BYTES, TILE_BYTES),
        }
    }

    fn check_bytes<const ROWS: usize>() {
        for (num_steps, is_mixed) in [(1, false), (2, true), (5, false), (5, true)] {
            let (a, b, out) = bytes::<EmulatedTiles, ROWS>(num_steps, is_mixed);
            let (a_stride, a_step) = byte_strides::<ROWS>(num_steps, is_mixed);
            for (place, &got) in out.iter().enumerate() {
                let (row, column) = (place / 32, place % 32);
                let mut sum = 0_i64;
                for k in 0..num_steps * TILE_BYTES_K {
                    let (step, k) = (k / TILE_BYTES_K, k % TILE_BYTES_K);
                    let tile = row / 16 * a_stride + step * a_step;
                    let a = a[tile + row % 16 * TILE_BYTES_K + k];
                    let tile = PANEL_TILES * step + column / 16;
                    let b = b[(tile * 16 + k / 4) * 64 + 4 * (column % 16) + k % 4];
                    sum += i64::from(a) * i64::from(b);
                }
                assert_eq!(i64::from(got), sum, "{ROWS} rows, {num_steps} steps [{row}][{column}]");
            }
        }
    }

    #[test]
    fn blocks_of_bytes_are_products() {
        check_bytes::<1>();
        check_bytes::<2>();
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_twin_has_the_bits_of_the_processor() {
        if !crate::backend::cpu::amx::is_available() {
            eprintln!("no AMX here");
            return;
        }
        use crate::backend::cpu::amx::Amx;
        for (num_steps, b_stride) in [(1, 128), (2, 256), (5, 131)] {
            let (_, _, emulated) = integers::<EmulatedTiles>(num_steps, b_stride);
            assert_eq!(integers::<Amx>(num_steps, b_stride).2, emulated);
            for is_mixed in [false, true] {
                let expected = bytes::<EmulatedTiles, 1>(num_steps, is_mixed).2;
                assert_eq!(bytes::<Amx, 1>(num_steps, is_mixed).2, expected);
                let expected = bytes::<EmulatedTiles, 2>(num_steps, is_mixed).2;
                assert_eq!(bytes::<Amx, 2>(num_steps, is_mixed).2, expected);
            }
        }
        check_bits::<1, 1>();
        check_bits::<1, 2>();
        check_bits::<1, 4>();
        check_bits::<2, 1>();
        check_bits::<2, 2>();
    }
}
