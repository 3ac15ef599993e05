//! The compiled kernels of `csrc`, made by the build script; empty in builds without nvcc.

/// The driver reads whole words. Builds without kernels have no use for it.
#[allow(dead_code)]
#[repr(C, align(64))]
struct Aligned<T>(T);

/// The fatbins, each with the path of its source without `csrc/ops/` (or `csrc/`) and extension.
static FATBINS: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// Whether this library was built with kernels.
pub(super) fn are_built_in() -> bool {
    !FATBINS.is_empty()
}

/// Returns the fatbin of a source, such as `attention/flash` for `csrc/ops/attention/flash.cu`.
pub(super) fn find(name: &str) -> Option<&'static [u8]> {
    FATBINS.iter().find(|(stem, _)| *stem == name).map(|(_, fatbin)| *fatbin)
}
