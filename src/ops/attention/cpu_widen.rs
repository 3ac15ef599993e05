//! Panels of keys and values in a type that is computed with.

use crate::backend::cpu::simd::{Simd, Vector16};
use crate::backend::cpu::tile::Element;

/// A bf16 that is no number.
const BF16_NAN: u16 = 0x7fc0;

/// Converts a 16-bit panel of `rows` rows of `columns` columns to f32, [rows][columns].
///
/// # Safety
/// `panel` has these elements of `E`, which has f32 math, `wide` has room for as many, and the
/// instruction set of `E` is there.
#[inline(always)]
pub(super) unsafe fn widen_panel<E: Element>(
    panel: *const E::Weight,
    rows: usize,
    columns: usize,
    wide: *mut f32,
) {
    let step_len = columns * E::K_STEP;
    for step in 0..rows / E::K_STEP {
        for group in 0..columns / 16 {
            let first = step * step_len;
            // SAFETY: 16 * K_STEP weights, to rows `columns` apart inside the wide panel.
            unsafe {
                let weights = panel.add(first + group * 16 * E::K_STEP);
                E::widen(weights, wide.add(first + 16 * group), columns);
            }
        }
    }
}

/// Whether a code of 8 bits is no number: `load_fp8` makes a number of it all the same.
#[inline(always)]
fn is_nan(code: u8) -> bool {
    code & 0x7f == 0x7f
}

/// Whether one of some codes is no number. Keys and values of a model whose weights are damaged are none, and
/// its logits must not be either.
#[inline(always)]
fn has_nan(codes: &[u8]) -> bool {
    codes.iter().fold(0, |all, code| all | ((code & 0x7f) + 1)) & 0x80 != 0
}

/// Makes f32 of a panel of 8-bit floats, in the order in which they are.
///
/// # Safety
/// `wide` has room for as many elements as `panel` has; the instruction set is there.
#[inline(always)]
pub(super) unsafe fn widen_fp8_to_f32<S: Simd>(panel: &[u8], wide: *mut f32) {
    for (group, codes) in panel.chunks_exact(16).enumerate() {
        // SAFETY: sixteen codes are read; the caller vouches for the room and the instruction set.
        unsafe { S::Vector::load_fp8(codes.as_ptr()).store(wide.add(16 * group)) };
    }
    if has_nan(panel) {
        for (index, _) in panel.iter().enumerate().filter(|(_, code)| is_nan(**code)) {
            // SAFETY: `wide` has room for it.
            unsafe { wide.add(index).write(f32::NAN) };
        }
    }
}

/// Makes bf16 of a panel of 8-bit floats, in the order in which they are.
///
/// # Safety
/// The instruction set is there.
#[inline(always)]
pub(super) unsafe fn widen_fp8_to_bf16<S: Simd>(panel: &[u8], wide: &mut [u16]) {
    for (codes, wide) in panel.chunks_exact(16).zip(wide.chunks_exact_mut(16)) {
        // SAFETY: sixteen codes are read and as many numbers written; the caller vouches for the
        // instruction set. The upper half of the f32 holds all bits of the number.
        unsafe { S::Vector::load_fp8(codes.as_ptr()).store_high_halves(wide.as_mut_ptr()) };
    }
    if has_nan(panel) {
        let pairs = panel.iter().zip(wide);
        pairs.filter(|(code, _)| is_nan(**code)).for_each(|(_, wide)| *wide = BF16_NAN);
    }
}
