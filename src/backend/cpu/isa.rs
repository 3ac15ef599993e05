//! The instruction sets that kernels are compiled for, and their detection at run time.

/// An instruction set for which the kernels are compiled, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// The baseline of the target architecture.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// [`Isa::Avx512`], the bf16 dot product, and permutations of bytes (VBMI).
    Avx512Bf16,
    /// The tiles of AMX in plain Rust, and [`Isa::Portable`] for all else: for tests, on any
    /// machine.
    EmulatedAmx,
    /// [`Isa::Avx512`], conversions to bf16, and the bf16 tiles of AMX.
    Avx512Amx,
}

impl Isa {
    /// All instruction sets, in ascending order.
    pub const ALL: [Isa; 6] =
        [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::EmulatedAmx, Isa::Avx512Amx];

    /// Returns the fastest that this machine supports.
    ///
    /// On AMD's Zen 4 and 5 the bf16 dot product does twice the work of an f32 multiply-add. On
    /// Intel's it does half: 83 against 177 GFLOP/s on one core of an Emerald Rapids without AMX.
    /// There bf16 is widened to f32. This is a fixed rule, not a measurement at start-up: the
    /// choice decides the last bits of results and must be the same in every run.
    pub fn detect() -> Isa {
        let supported = Self::ALL.iter().rev().copied().filter(|isa| isa.is_supported());
        let fast = |isa: &Isa| match isa {
            Isa::Avx512Bf16 => is_amd(),
            Isa::EmulatedAmx => false,
            _ => true,
        };
        supported.into_iter().find(fast).unwrap_or(Isa::Portable)
    }

    /// Whether this machine can run kernels compiled for this set.
    #[cfg(target_arch = "x86_64")]
    pub fn is_supported(self) -> bool {
        let avx2 = || {
            is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
        };
        let avx512 = || {
            avx2()
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
        };
        match self {
            Isa::Portable | Isa::EmulatedAmx => true,
            Isa::Avx2 => avx2(),
            Isa::Avx512 => avx512(),
            Isa::Avx512Bf16 => {
                avx512()
                    && is_x86_feature_detected!("avx512bf16")
                    && is_x86_feature_detected!("avx512vbmi")
            }
            Isa::Avx512Amx => {
                avx512() && is_x86_feature_detected!("avx512bf16") && super::amx::is_available()
            }
        }
    }

    /// Whether this machine can run kernels compiled for this set.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_supported(self) -> bool {
        matches!(self, Isa::Portable | Isa::EmulatedAmx)
    }

    /// Whether this machine adds the product of bytes that belongs to the set (VNNI).
    #[cfg(target_arch = "x86_64")]
    pub(super) fn has_byte_dot(self) -> bool {
        match self {
            Isa::Portable | Isa::EmulatedAmx => false,
            Isa::Avx2 => is_x86_feature_detected!("avxvnni"),
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Avx512Amx => {
                is_x86_feature_detected!("avx512vnni")
            }
        }
    }

    /// Whether this machine adds the product of bytes that belongs to the set (VNNI).
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn has_byte_dot(self) -> bool {
        false
    }

    /// Whether bf16 is multiplied by bf16 instructions rather than widened to f32.
    pub(crate) fn has_native_bf16(self) -> bool {
        self == Isa::Avx512Bf16
    }

    /// Whether bf16 is multiplied in tiles of 16 rows by 16 columns.
    pub(crate) fn has_tiles(self) -> bool {
        matches!(self, Isa::EmulatedAmx | Isa::Avx512Amx)
    }

    /// Returns the short name: `portable`, `avx2`, `avx512`, `avx512-bf16`, `emulated-amx`,
    /// `avx512-amx`.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512-bf16",
            Isa::EmulatedAmx => "emulated-amx",
            Isa::Avx512Amx => "avx512-amx",
        }
    }
}

/// Whether the processor is AMD's.
#[cfg(target_arch = "x86_64")]
pub(super) fn is_amd() -> bool {
    // Every x86-64 processor has leaf 0: the vendor's name in ebx, edx, ecx.
    let leaf = std::arch::x86_64::__cpuid(0);
    let mut vendor = [0; 12];
    for (bytes, register) in vendor.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
        bytes.copy_from_slice(&register.to_le_bytes());
    }
    &vendor == b"AuthenticAMD"
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn is_amd() -> bool {
    false
}
