//! Intel's Advanced Matrix Extensions: eight tile registers of one kilobyte, and an instruction
//! that multiplies two of them.
//!
//! The registers are state that the system keeps for a process only if it has asked for it. The
//! library asks once, when the first backend looks for its instruction set. From then on signal
//! frames may have 8 KB more, and the system refuses smaller alternative signal stacks than that
//! needs; where a thread of the host has a smaller one already, the system refuses the state, and
//! the library does without. `XSERV_AMX=0` in the environment keeps the library from asking.
//!
//! A thread's registers are in use from [`Amx::ready`] until the value is dropped. All other time
//! they are in their initial state, in which the system neither saves nor restores them, on the
//! library's threads as on the host's.

use super::amx_rows::few_rows;
use super::tiles::{
    ByteOperands, IntegerOperands, TileOperands, TileUnit, PANEL_TILES, ROW_BYTES, TILE_BYTES,
    TILE_ROWS,
};
use std::arch::asm;
use std::marker::PhantomData;
use std::mem::offset_of;
use std::sync::OnceLock;

/// Whether this process may use the instructions. It asks the system the first time.
pub fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        let is_hidden = std::env::var_os("XSERV_AMX").is_some_and(|value| value == "0");
        !is_hidden && has_instructions() && is_state_kept() && ask_for_tile_data()
    })
}

/// Whether the processor has tiles of bf16 and of bytes, of the sizes that this file takes for granted.
fn has_instructions() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count, __get_cpuid_max};
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const AMX_INT8: u32 = 1 << 25;
    const AMX: u32 = AMX_BF16 | AMX_TILE | AMX_INT8;
    const OSXSAVE: u32 = 1 << 27;
    if __get_cpuid_max(0).0 < 0x1e || __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    if __cpuid_count(7, 0).edx & AMX != AMX {
        return false;
    }
    // Palette 1: bytes of all tiles and of one; bytes of a row and the number of tiles; rows.
    let palette = __cpuid_count(0x1d, 1);
    palette.eax == 1024 << 16 | 8192 && palette.ebx == 8 << 16 | 64 && palette.ecx & 0xffff == 16
}

/// Whether the system saves and restores the tiles and their configuration.
fn is_state_kept() -> bool {
    const TILE_STATE: u64 = 0b11 << 17;
    let (low, high): (u32, u32);
    // SAFETY: `has_instructions` has found OSXSAVE, under which the register can be read.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack))
    };
    (u64::from(high) << 32 | u64::from(low)) & TILE_STATE == TILE_STATE
}

/// Asks the system to keep tile data for this process.
#[cfg(target_os = "linux")]
fn ask_for_tile_data() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: takes two numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

/// Other systems have other ways, which nobody has tried.
#[cfg(not(target_os = "linux"))]
fn ask_for_tile_data() -> bool {
    false
}

/// What LDTILECFG reads.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

/// Eight tiles of 16 rows of 64 bytes.
static FULL_TILES: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    bytes_per_row: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Bytes from a tile of the right operand to the one of the next 16 columns, where they lie beside
/// each other.
const SIDE_BY_SIDE: usize = ROW_BYTES;

/// The tile registers of this thread; it stays on the thread that made it.
pub struct Amx(PhantomData<*const ()>);

impl Drop for Amx {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: there is a value only after `ready`, so the instructions are there. Nobody else
        // uses this thread's tiles; a panic comes by here too.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

/// One block: the sums in tmm0 to tmm3 (row by row), the left operand in tmm4 and tmm5, the right
/// one in tmm6 and tmm7.
macro_rules! block {
    (
        $operands:ident, $start:expr, $column:expr, $b_step:expr,
        begin: [$($begin:literal),* $(,)?], end: [$($end:literal),* $(,)?],
        zero: [$($zero:literal),* $(,)?],
        load: [$($load:literal),* $(,)?], load_second: [$($load_second:literal),* $(,)?],
        step: [$($step:expr),* $(,)?],
        store: [$($store:literal),* $(,)?], store_second: [$($store_second:literal),* $(,)?] $(,)?
    ) => {{
        let operands: &TileOperands = $operands;
        asm!(
            "cmp qword ptr [{p} + {accumulate}], 0",
            "jne 2f",
            $($zero,)*
            "jmp 3f",
            "2:",
            "mov {t}, [{p} + {out}]",
            "mov {u}, [{p} + {out_stride}]",
            $($load,)*
            "shl {u}, 4",
            "add {t}, {u}",
            "shr {u}, 4",
            $($load_second,)*
            "3:",
            "mov {u}, [{p} + {prefetch_lines}]",
            "4:",
            "test {u}, {u}",
            "jz 6f",
            "mov {t}, {u}",
            "5:",
            "prefetcht1 [{f}]",
            "add {f}, 64",
            "dec {t}",
            "jnz 5b",
            "6:",
            $($begin,)*
            $($step,)*
            "/* {column} {two_columns} {three_columns} */",
            "add {a}, 1024",
            "add {a2}, 1024",
            $($end,)*
            "dec {n}",
            "jnz 4b",
            "mov {t}, [{p} + {out}]",
            "mov {u}, [{p} + {out_stride}]",
            $($store,)*
            "shl {u}, 4",
            "add {t}, {u}",
            "shr {u}, 4",
            $($store_second,)*
            p = in(reg) operands,
            a = inout(reg) operands.a => _,
            a2 = inout(reg) operands.a.wrapping_byte_add(operands.a_stride) => _,
            b = inout(reg) operands.b => _,
            bs = in(reg) operands.b_stride,
            b_step = in(reg) $b_step,
            n = inout(reg) operands.num_steps => _,
            f = inout(reg) $start => _,
            row = in(reg) 64usize,
            t = out(reg) _,
            u = out(reg) _,
            column = const $column,
            two_columns = const 2 * $column,
            three_columns = const 3 * $column,
            accumulate = const offset_of!(TileOperands, accumulate),
            out = const offset_of!(TileOperands, out),
            out_stride = const offset_of!(TileOperands, out_stride),
            prefetch_lines = const offset_of!(TileOperands, prefetch_lines),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack)
        );
    }};
}

/// Calls [`block`] for the shape that is wanted.
macro_rules! block_of_shape {
    (
        $rows:ident, $columns:ident, $operands:ident, $start:expr, $begin:tt, $end:tt,
        right: $right:literal, $column:expr, $b_step:expr $(,)?
    ) => {
        match ($rows, $columns) {
            (1, 1) => block!(
                $operands, $start, $column, $b_step, begin: $begin, end: $end,
                zero: [
                    "tilezero tmm0",
                ],
                load: [
                    "tileloadd tmm0, [{t} + {u}*1]",
                ],
                load_second: [],
                step: [
                    concat!($right, " tmm6, [{b} + {bs}*1]"),
                    "tileloadd tmm4, [{a} + {row}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                ],
                store: [
                    "tilestored [{t} + {u}*1], tmm0",
                ],
                store_second: [],
            ),
            (1, 2) => block!(
                $operands, $start, $column, $b_step, begin: $begin, end: $end,
                zero: [
                    "tilezero tmm0",
                    "tilezero tmm1",
                ],
                load: [
                    "tileloadd tmm0, [{t} + {u}*1]",
                    "tileloadd tmm1, [{t} + {u}*1 + 64]",
                ],
                load_second: [],
                step: [
                    concat!($right, " tmm6, [{b} + {bs}*1]"),
                    "tileloadd tmm4, [{a} + {row}*1]",
                    concat!($right, " tmm7, [{b} + {bs}*1 + {column}]"),
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                ],
                store: [
                    "tilestored [{t} + {u}*1], tmm0",
                    "tilestored [{t} + {u}*1 + 64], tmm1",
                ],
                store_second: [],
            ),
            (1, 4) => block!(
                $operands, $start, $column, $b_step, begin: $begin, end: $end,
                zero: [
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                ],
                load: [
                    "tileloadd tmm0, [{t} + {u}*1]",
                    "tileloadd tmm1, [{t} + {u}*1 + 64]",
                    "tileloadd tmm2, [{t} + {u}*1 + 128]",
                    "tileloadd tmm3, [{t} + {u}*1 + 192]",
                ],
                load_second: [],
                step: [
                    "tileloadd tmm4, [{a} + {row}*1]",
                    concat!($right, " tmm5, [{b} + {bs}*1]"),
                    concat!($right, " tmm6, [{b} + {bs}*1 + {column}]"),
                    "tdpbf16ps tmm0, tmm4, tmm5",
                    concat!($right, " tmm7, [{b} + {bs}*1 + {two_columns}]"),
                    "tdpbf16ps tmm1, tmm4, tmm6",
                    concat!($right, " tmm5, [{b} + {bs}*1 + {three_columns}]"),
                    "tdpbf16ps tmm2, tmm4, tmm7",
                    "tdpbf16ps tmm3, tmm4, tmm5",
                ],
                store: [
                    "tilestored [{t} + {u}*1], tmm0",
                    "tilestored [{t} + {u}*1 + 64], tmm1",
                    "tilestored [{t} + {u}*1 + 128], tmm2",
                    "tilestored [{t} + {u}*1 + 192], tmm3",
                ],
                store_second: [],
            ),
            (2, 1) => block!(
                $operands, $start, $column, $b_step, begin: $begin, end: $end,
                zero: [
                    "tilezero tmm0",
                    "tilezero tmm1",
                ],
                load: [
                    "tileloadd tmm0, [{t} + {u}*1]",
                ],
                load_second: [
                    "tileloadd tmm1, [{t} + {u}*1]",
                ],
                step: [
                    concat!($right, " tmm6, [{b} + {bs}*1]"),
                    "tileloadd tmm4, [{a} + {row}*1]",
                    "tileloadd tmm5, [{a2} + {row}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm5, tmm6",
                ],
                store: [
                    "tilestored [{t} + {u}*1], tmm0",
                ],
                store_second: [
                    "tilestored [{t} + {u}*1], tmm1",
                ],
            ),
            (2, 2) => block!(
                $operands, $start, $column, $b_step, begin: $begin, end: $end,
                zero: [
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                ],
                load: [
                    "tileloadd tmm0, [{t} + {u}*1]",
                    "tileloadd tmm1, [{t} + {u}*1 + 64]",
                ],
                load_second: [
                    "tileloadd tmm2, [{t} + {u}*1]",
                    "tileloadd tmm3, [{t} + {u}*1 + 64]",
                ],
                step: [
                    concat!($right, " tmm6, [{b} + {bs}*1]"),
                    "tileloadd tmm4, [{a} + {row}*1]",
                    concat!($right, " tmm7, [{b} + {bs}*1 + {column}]"),
                    "tileloadd tmm5, [{a2} + {row}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                ],
                store: [
                    "tilestored [{t} + {u}*1], tmm0",
                    "tilestored [{t} + {u}*1 + 64], tmm1",
                ],
                store_second: [
                    "tilestored [{t} + {u}*1], tmm2",
                    "tilestored [{t} + {u}*1 + 64], tmm3",
                ],
            ),
            // Checked when it is compiled.
            _ => const { assert!(has_shape($rows, $columns)) },
        }
    };
}

// SAFETY: a block stores 16 rows of 64 bytes for each of its tiles of sums, at `out`, and writes
// nothing else.
unsafe impl TileUnit for Amx {
    #[inline(always)]
    unsafe fn ready() -> Option<Self> {
        // SAFETY: the caller has found the instructions and the permission (`is_available`);
        // FULL_TILES is a configuration of palette 1.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &FULL_TILES, options(nostack, preserves_flags, readonly))
        };
        Some(Amx(PhantomData))
    }

    #[inline(always)]
    unsafe fn block<const ROWS: usize, const COLUMNS: usize>(&mut self, operands: &TileOperands) {
        // SAFETY: `self` says that the tiles of this thread are configured, each with 16 rows of 64
        // bytes, and the caller that all tiles read and written lie in the operands. All uses of
        // the registers are inside one `asm!`, which begins by writing those that it reads, so
        // nothing has to be kept between two of them; they are named as clobbered nevertheless.
        unsafe {
            block_of_shape!(
                ROWS,
                COLUMNS,
                operands,
                operands.prefetch,
                ["/* {f} */"],
                ["add {b}, {b_step}"],
                right: "tileloadd",
                SIDE_BY_SIDE,
                operands.b_stride * TILE_ROWS,
            )
        }
    }

    #[inline(always)]
    unsafe fn panel_block<const ROWS: usize, const COLUMNS: usize>(
        &mut self,
        operands: &TileOperands,
    ) {
        let contiguous = TileOperands { b_stride: ROW_BYTES, ..*operands };
        let operands = &contiguous;
        // SAFETY: as in `block`. The panel comes from the second-level cache and is not used again
        // soon: its loads are told not to push the rows out of the first-level one, which is worth 9
        // to 15 percent of 512 x 1,024 x 6,144 (in a harness, on a Xeon with AMX).
        unsafe {
            block_of_shape!(
                ROWS,
                COLUMNS,
                operands,
                operands.prefetch,
                ["/* {f} */"],
                ["add {b}, {b_step}"],
                right: "tileloaddt1",
                TILE_BYTES,
                PANEL_TILES * TILE_BYTES,
            )
        }
    }

    #[inline(always)]
    unsafe fn gathered_block<const ROWS: usize, const COLUMNS: usize>(
        &mut self,
        operands: &TileOperands,
        steps: &[*const u16],
    ) {
        let gathered = TileOperands { num_steps: steps.len(), prefetch_lines: 0, ..*operands };
        let operands = &gathered;
        // SAFETY: as in `block`; a pointer is read of `steps` in each step.
        unsafe {
            block_of_shape!(
                ROWS,
                COLUMNS,
                operands,
                steps.as_ptr().cast::<u8>(),
                ["mov {b}, [{f}]", "add {f}, 8"],
                ["/* {b_step} */"],
                right: "tileloadd",
                SIDE_BY_SIDE,
                0usize,
            )
        }
    }

    #[inline(always)]
    unsafe fn integer_block(&mut self, operands: &IntegerOperands) {
        // SAFETY: as in `block`; the sums are in tmm0 and tmm1 (upper) and tmm2 and tmm3 (lower), the
        // left operand in tmm4 and tmm5, the right one in tmm6 and tmm7.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tileloadd tmm6, [{b} + {bs}*1]",
                "tileloadd tmm4, [{a} + {row}*1]",
                "tileloadd tmm7, [{b} + {bs}*1 + 64]",
                "tileloadd tmm5, [{a} + {row}*1 + 1024]",
                "tdpbsud tmm0, tmm4, tmm6",
                "tdpbsud tmm1, tmm4, tmm7",
                "tdpbsud tmm2, tmm5, tmm6",
                "tdpbsud tmm3, tmm5, tmm7",
                "add {a}, 2048",
                "add {b}, {b_step}",
                "dec {n}",
                "jnz 2b",
                "tilestored [{out} + {row}*2], tmm0",
                "tilestored [{out} + {row}*2 + 64], tmm1",
                "tilestored [{out} + {row}*2 + 2048], tmm2",
                "tilestored [{out} + {row}*2 + 2112], tmm3",
                a = inout(reg) operands.a => _,
                b = inout(reg) operands.b => _,
                bs = in(reg) operands.b_stride,
                b_step = in(reg) operands.b_stride * 16,
                n = inout(reg) operands.num_steps => _,
                row = in(reg) 64usize,
                out = in(reg) operands.out,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            );
        }
    }

    #[inline(always)]
    unsafe fn byte_block<const ROWS: usize>(&mut self, operands: &ByteOperands) {
        // SAFETY: as in `block`; the sums are in tmm0 and tmm1, and those of the second row of tiles in
        // tmm2 and tmm3.
        unsafe {
            match ROWS {
                1 => asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "2:",
                    "tileloadd tmm6, [{b} + {row}*1]",
                    "tileloadd tmm4, [{a} + {row}*1]",
                    "tileloadd tmm7, [{b} + {row}*1 + 1024]",
                    "tdpbssd tmm0, tmm4, tmm6",
                    "tdpbssd tmm1, tmm4, tmm7",
                    "add {a}, {a_step}",
                    "add {b}, {b_step}",
                    "dec {n}",
                    "jnz 2b",
                    "tilestored [{out} + {row}*2], tmm0",
                    "tilestored [{out} + {row}*2 + 64], tmm1",
                    a = inout(reg) operands.a => _,
                    a_step = in(reg) operands.a_step,
                    b = inout(reg) operands.b => _,
                    b_step = const PANEL_TILES * TILE_BYTES,
                    n = inout(reg) operands.num_steps => _,
                    row = in(reg) ROW_BYTES,
                    out = in(reg) operands.out,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                ),
                2 => asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "2:",
                    "tileloadd tmm6, [{b} + {row}*1]",
                    "tileloadd tmm4, [{a} + {row}*1]",
                    "tileloadd tmm7, [{b} + {row}*1 + 1024]",
                    "tileloadd tmm5, [{a2} + {row}*1]",
                    "tdpbssd tmm0, tmm4, tmm6",
                    "tdpbssd tmm1, tmm4, tmm7",
                    "tdpbssd tmm2, tmm5, tmm6",
                    "tdpbssd tmm3, tmm5, tmm7",
                    "add {a}, {a_step}",
                    "add {a2}, {a_step}",
                    "add {b}, {b_step}",
                    "dec {n}",
                    "jnz 2b",
                    "tilestored [{out} + {row}*2], tmm0",
                    "tilestored [{out} + {row}*2 + 64], tmm1",
                    "tilestored [{out} + {row}*2 + 2048], tmm2",
                    "tilestored [{out} + {row}*2 + 2112], tmm3",
                    a = inout(reg) operands.a => _,
                    a2 = inout(reg) operands.a.wrapping_add(operands.a_stride) => _,
                    a_step = in(reg) operands.a_step,
                    b = inout(reg) operands.b => _,
                    b_step = const PANEL_TILES * TILE_BYTES,
                    n = inout(reg) operands.num_steps => _,
                    row = in(reg) ROW_BYTES,
                    out = in(reg) operands.out,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                ),
                // Checked when it is compiled.
                _ => const { assert!(ROWS == 1 || ROWS == 2) },
            }
        }
    }

    #[inline(always)]
    unsafe fn few_rows(&mut self, num_rows: usize, operands: &TileOperands) {
        // SAFETY: an instruction set with this unit has AVX-512; the rest is passed on to the
        // caller.
        unsafe {
            match (num_rows, operands.accumulate) {
                (1, 0) => few_rows::<1>(operands),
                (2, 0) => few_rows::<2>(operands),
                _ => self.panel_block::<1, 4>(operands),
            }
        }
    }
}

/// Whether there is a block of `rows` by `columns` tiles.
const fn has_shape(rows: usize, columns: usize) -> bool {
    matches!((rows, columns), (1, 1 | 2 | 4) | (2, 1 | 2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Whether the registers of this thread are in use: bits 17 and 18 of XINUSE.
    fn are_tiles_in_use() -> bool {
        let low: u32;
        // SAFETY: reads a register that every processor with AMX has.
        unsafe {
            asm!("xgetbv", in("ecx") 1, out("eax") low, out("edx") _, options(nomem, nostack))
        };
        low & 0b11 << 17 != 0
    }

    #[test]
    fn tiles_are_released_after_use_and_after_a_panic() {
        if !is_available() {
            eprintln!("no AMX here");
            return;
        }
        assert!(!are_tiles_in_use());
        // SAFETY: the instructions are there.
        let unit = unsafe { Amx::ready() };
        assert!(are_tiles_in_use());
        drop(unit);
        assert!(!are_tiles_in_use());
        let caught = std::panic::catch_unwind(|| {
            // SAFETY: as above.
            let _unit = unsafe { Amx::ready() };
            assert!(are_tiles_in_use());
            std::panic::resume_unwind(Box::new("planted"));
        });
        assert!(caught.is_err() && !are_tiles_in_use());
    }

    /// Runs a test that is otherwise ignored in a process of its own, which has not asked for
    /// tiles.
    fn passes_in_a_fresh_process(name: &str, amx: &str) -> bool {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--ignored", "--exact", &format!("backend::cpu::amx::tests::{name}")]);
        let output = child.env("XSERV_AMX", amx).output().unwrap();
        output.status.success() && String::from_utf8_lossy(&output.stdout).contains("1 passed")
    }

    #[test]
    #[ignore = "run by the test after it, in a process with XSERV_AMX=0"]
    fn is_not_available() {
        assert!(!is_available());
    }

    #[test]
    fn the_environment_hides_tiles() {
        assert!(passes_in_a_fresh_process("is_not_available", "0"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    #[ignore = "run by the test after it, in a process that has not asked for tiles"]
    fn is_not_available_beside_a_small_signal_stack() {
        let mut memory = [0u64; 512];
        let stack = libc::stack_t {
            ss_sp: memory.as_mut_ptr().cast(),
            ss_flags: 0,
            ss_size: size_of_val(&memory),
        };
        let mut before = libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: 0, ss_size: 0 };
        // SAFETY: `memory` outlives its use as a signal stack, which ends with the second call.
        assert_eq!(unsafe { libc::sigaltstack(&stack, &mut before) }, 0);
        let available = is_available();
        // SAFETY: as above.
        assert_eq!(unsafe { libc::sigaltstack(&before, std::ptr::null_mut()) }, 0);
        assert!(!available);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_small_signal_stack_means_no_tiles_and_no_failure() {
        let name = "is_not_available_beside_a_small_signal_stack";
        assert!(passes_in_a_fresh_process(name, "1"));
    }
}
