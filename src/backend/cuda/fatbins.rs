//! The compiled kernels of `csrc`, made by the build script; empty in builds without nvcc.

/// The driver reads whole words. Builds without kernels have no use for it.
#[allow(dead_code)]
#[repr(C, align(64))]
struct Aligned<T>(T);

/// The fatbins, each with the path of its source without `csrc/ops/` (or `csrc/`) and extension.
static FATBINS: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// Stands for every fatbin in tests without nvcc: their driver does not look at it.
#[cfg(debug_assertions)]
static NO_KERNELS: Aligned<[u8; 64]> = Aligned([0; 64]);

/// Whether a test wants to go on without kernels, because its driver runs none: builds with debug
/// assertions look at `XSERV_TEST_WITHOUT_KERNELS`, others do not have this way.
fn are_not_needed() -> bool {
    #[cfg(debug_assertions)]
    return std::env::var_os("XSERV_TEST_WITHOUT_KERNELS").is_some();
    #[cfg(not(debug_assertions))]
    false
}

/// Whether this library was built with kernels.
pub(super) fn are_built_in() -> bool {
    !FATBINS.is_empty() || are_not_needed()
}

/// Returns the fatbin of a source, such as `attention/flash` for `csrc/ops/attention/flash.cu`.
pub(super) fn find(name: &str) -> Option<&'static [u8]> {
    #[cfg(debug_assertions)]
    if are_not_needed() {
        return Some(&NO_KERNELS.0);
    }
    FATBINS.iter().find(|(stem, _)| *stem == name).map(|(_, fatbin)| *fatbin)
}
