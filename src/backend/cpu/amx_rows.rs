//! One or two rows times 64 columns on the vector units, with the very sums of AMX's tiles
//! ([`super::tiles`]): a row in a batch has the bits that it has alone. Rows so few are bound by
//! the reading of the weights, which loads of vectors do 6 percent faster than those of tiles
//! (Emerald Rapids, 18.4 against 17.3 GB/s).

use super::tiles::TileOperands;
use std::arch::asm;

/// How far ahead of the reads the panel is prefetched, line by line: the reads of a step go to its
/// four tiles in turn, which the prefetchers of the processor follow less well.
const PREFETCH_BYTES: usize = 8192;

/// Round to nearest, no exceptions, subnormal operands and results as zero.
static TILE_MODE: u32 = 0x9fc0;

/// The even and the odd values of k of 16 pairs are summed apart and then added to the sum. zmm0 to
/// zmm7: sums; 8 to 15: even ones; 16 to 23: odd ones; 24, 25: weights; 26 to 29: activations.
macro_rules! rows {
    ($operands:ident, [$($line:literal,)*]) => {{
        let mut mode = 0u32;
        asm!(
            "stmxcsr [{mode}]",
            "ldmxcsr [{tile_mode}]",
            "vpternlogd zmm31, zmm31, zmm31, 255",
            "vpslld zmm31, zmm31, 16",
            $($line,)*
            "ldmxcsr [{mode}]",
            "/* {out_stride} */",
            mode = in(reg) &mut mode,
            tile_mode = in(reg) &TILE_MODE,
            a = inout(reg) $operands.a => _,
            b = inout(reg) $operands.b => _,
            f = inout(reg) $operands.b.wrapping_byte_add(PREFETCH_BYTES) => _,
            n = inout(reg) $operands.num_steps => _,
            pairs = out(reg) _,
            out = inout(reg) $operands.out => _,
            out_stride = in(reg) $operands.out_stride,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _,
            out("zmm4") _, out("zmm5") _, out("zmm6") _, out("zmm7") _,
            out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
            out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _,
            out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _,
            out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
            out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _,
            out("zmm28") _, out("zmm29") _, out("zmm30") _, out("zmm31") _,
            options(nostack)
        );
    }};
}

/// Computes `ROWS` (1 or 2) rows of a tile by four tiles of columns, from zero.
///
/// # Safety
/// The machine has AVX-512 F; the pointers of `operands` cover what its fields say, of which `out`
/// needs to have `ROWS` rows only.
#[inline(always)]
pub unsafe fn few_rows<const ROWS: usize>(operands: &TileOperands) {
    // SAFETY: 16 pairs are read of the rows in each of num_steps tiles, one kilobyte apart, and of
    // the four tiles of each step of `b`; 64 sums are written for each row; prefetches may point anywhere. The floating-point mode
    // is the thread's own again at the end, and nothing but this block computes in between.
    unsafe {
        match ROWS {
            1 => rows!(
                operands,
                [
                    "vpxord zmm0, zmm0, zmm0",
                    "vpxord zmm1, zmm1, zmm1",
                    "vpxord zmm2, zmm2, zmm2",
                    "vpxord zmm3, zmm3, zmm3",
                    "2:",
                    "vpxord zmm8, zmm8, zmm8",
                    "vpxord zmm16, zmm16, zmm16",
                    "vpxord zmm9, zmm9, zmm9",
                    "vpxord zmm17, zmm17, zmm17",
                    "vpxord zmm10, zmm10, zmm10",
                    "vpxord zmm18, zmm18, zmm18",
                    "vpxord zmm11, zmm11, zmm11",
                    "vpxord zmm19, zmm19, zmm19",
                    "mov {pairs:e}, 16",
                    "3:",
                    "vpbroadcastd zmm27, [{a}]",
                    "vpslld zmm26, zmm27, 16",
                    "vpandd zmm27, zmm27, zmm31",
                    "vmovdqu32 zmm24, [{b}]",
                    "prefetcht1 [{f}]",
                    "vpslld zmm25, zmm24, 16",
                    "vpandd zmm24, zmm24, zmm31",
                    "vfmadd231ps zmm8, zmm25, zmm26",
                    "vfmadd231ps zmm16, zmm24, zmm27",
                    "vmovdqu32 zmm24, [{b} + 1024]",
                    "prefetcht1 [{f} + 64]",
                    "vpslld zmm25, zmm24, 16",
                    "vpandd zmm24, zmm24, zmm31",
                    "vfmadd231ps zmm9, zmm25, zmm26",
                    "vfmadd231ps zmm17, zmm24, zmm27",
                    "vmovdqu32 zmm24, [{b} + 2048]",
                    "prefetcht1 [{f} + 128]",
                    "vpslld zmm25, zmm24, 16",
                    "vpandd zmm24, zmm24, zmm31",
                    "vfmadd231ps zmm10, zmm25, zmm26",
                    "vfmadd231ps zmm18, zmm24, zmm27",
                    "vmovdqu32 zmm24, [{b} + 3072]",
                    "prefetcht1 [{f} + 192]",
                    "vpslld zmm25, zmm24, 16",
                    "vpandd zmm24, zmm24, zmm31",
                    "vfmadd231ps zmm11, zmm25, zmm26",
                    "vfmadd231ps zmm19, zmm24, zmm27",
                    "add {a}, 4",
                    "add {b}, 64",
                    "add {f}, 256",
                    "dec {pairs:e}",
                    "jnz 3b",
                    "vaddps zmm8, zmm8, zmm16",
                    "vaddps zmm0, zmm0, zmm8",
                    "vaddps zmm9, zmm9, zmm17",
                    "vaddps zmm1, zmm1, zmm9",
                    "vaddps zmm10, zmm10, zmm18",
                    "vaddps zmm2, zmm2, zmm10",
                    "vaddps zmm11, zmm11, zmm19",
                    "vaddps zmm3, zmm3, zmm11",
                    "add {a}, 960",
                    "add {b}, 3072",
                    "dec {n}",
                    "jnz 2b",
                    "vmovups [{out}], zmm0",
                    "vmovups [{out} + 64], zmm1",
                    "vmovups [{out} + 128], zmm2",
                    "vmovups [{out} + 192], zmm3",
                ]
            ),
            _ => rows!(
                operands,
                [
                    "vpxord zmm0, zmm0, zmm0",
                    "vpxord zmm1, zmm1, zmm1",
                    "vpxord zmm2, zmm2, zmm2",
                    "vpxord zmm3, zmm3, zmm3",
                    "vpxord zmm4, zmm4, zmm4",
                    "vpxord zmm5, zmm5, zmm5",
                    "vpxord zmm6, zmm6, zmm6",
                    "vpxord zmm7, zmm7, zmm7",
                    "2:",
                    "vpxord zmm8, zmm8, zmm8",
                    "vpxord zmm16, zmm16, zmm16",
                    "vpxord zmm9, zmm9, zmm9",
                    "vpxord zmm17, zmm17, zmm17",
                    "vpxord zmm10, zmm10, zmm10",
                    "vpxord zmm18, zmm18, zmm18",
                    "vpxord zmm11, zmm11, zmm11",
                    "vpxord zmm19, zmm19, zmm19",
                    "vpxord zmm12, zmm12, zmm12",
                    "vpxord zmm20, zmm20, zmm20",
                    "vpxord zmm13, zmm13, zmm13",
                    "vpxord zmm21, zmm21, zmm21",
                    "vpxord zmm14, zmm14, zmm14",
                    "vpxord zmm22, zmm22, zmm22",
                    "vpxord zmm15, zmm15, zmm15",
                    "vpxord zmm23, zmm23, zmm23",
                    "mov {pairs:e}, 16",
                    "3:",
                    "vpbroadcastd zmm27, [{a}]",
                    "vpslld zmm26, zmm27, 16",
                    "vpandd zmm27, zmm27, zmm31",
                    "vpbroadcastd zmm29, [{a} + 64]",
                    "vpslld zmm28, zmm29, 16",
                    "vpandd zmm29, zmm29, zmm31",
                    "vmovdqu32 zmm24, [{b}]",
                    "prefetcht1 [{f}]",
                    "vpslld zmm25, zmm24, 16",
                    "vpandd zmm24, zmm24, zmm31",
                    "vfmadd231ps zmm8, zmm25, zmm26",
                    "vfmadd231ps zmm16, zmm24, zmm27",
                    "vfmadd231ps zmm12, zmm25, zmm28",
                    "vfmadd231ps zmm20, zmm24, zmm29",
                    "vmovdqu32 zmm24, [{b} + 1024]",
                    "prefetcht1 [{f} + 64]",
                    "vpslld zmm25, zmm24, 16",
                    "vpandd zmm24, zmm24, zmm31",
                    "vfmadd231ps zmm9, zmm25, zmm26",
                    "vfmadd231ps zmm17, zmm24, zmm27",
                    "vfmadd231ps zmm13, zmm25, zmm28",
                    "vfmadd231ps zmm21, zmm24, zmm29",
                    "vmovdqu32 zmm24, [{b} + 2048]",
                    "prefetcht1 [{f} + 128]",
                    "vpslld zmm25, zmm24, 16",
                    "vpandd zmm24, zmm24, zmm31",
                    "vfmadd231ps zmm10, zmm25, zmm26",
                    "vfmadd231ps zmm18, zmm24, zmm27",
                    "vfmadd231ps zmm14, zmm25, zmm28",
                    "vfmadd231ps zmm22, zmm24, zmm29",
                    "vmovdqu32 zmm24, [{b} + 3072]",
                    "prefetcht1 [{f} + 192]",
                    "vpslld zmm25, zmm24, 16",
                    "vpandd zmm24, zmm24, zmm31",
                    "vfmadd231ps zmm11, zmm25, zmm26",
                    "vfmadd231ps zmm19, zmm24, zmm27",
                    "vfmadd231ps zmm15, zmm25, zmm28",
                    "vfmadd231ps zmm23, zmm24, zmm29",
                    "add {a}, 4",
                    "add {b}, 64",
                    "add {f}, 256",
                    "dec {pairs:e}",
                    "jnz 3b",
                    "vaddps zmm8, zmm8, zmm16",
                    "vaddps zmm0, zmm0, zmm8",
                    "vaddps zmm9, zmm9, zmm17",
                    "vaddps zmm1, zmm1, zmm9",
                    "vaddps zmm10, zmm10, zmm18",
                    "vaddps zmm2, zmm2, zmm10",
                    "vaddps zmm11, zmm11, zmm19",
                    "vaddps zmm3, zmm3, zmm11",
                    "vaddps zmm12, zmm12, zmm20",
                    "vaddps zmm4, zmm4, zmm12",
                    "vaddps zmm13, zmm13, zmm21",
                    "vaddps zmm5, zmm5, zmm13",
                    "vaddps zmm14, zmm14, zmm22",
                    "vaddps zmm6, zmm6, zmm14",
                    "vaddps zmm15, zmm15, zmm23",
                    "vaddps zmm7, zmm7, zmm15",
                    "add {a}, 960",
                    "add {b}, 3072",
                    "dec {n}",
                    "jnz 2b",
                    "vmovups [{out}], zmm0",
                    "vmovups [{out} + 64], zmm1",
                    "vmovups [{out} + 128], zmm2",
                    "vmovups [{out} + 192], zmm3",
                    "add {out}, {out_stride}",
                    "vmovups [{out}], zmm4",
                    "vmovups [{out} + 64], zmm5",
                    "vmovups [{out} + 128], zmm6",
                    "vmovups [{out} + 192], zmm7",
                ]
            ),
        }
    }
}
