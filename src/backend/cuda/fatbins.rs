//! The compiled kernels of `csrc/ops`, made by the build script; empty in builds without nvcc.

/// The path of each source below `csrc/ops`, without its extension, and the fatbin made of it.
static FATBINS: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// True if this library was built with kernels.
pub(super) fn are_built_in() -> bool {
    !FATBINS.is_empty()
}

/// The fatbin of `csrc/ops/<name>.cu`.
pub(super) fn find(name: &str) -> Option<&'static [u8]> {
    FATBINS.iter().find(|(stem, _)| *stem == name).map(|(_, fatbin)| *fatbin)
}
