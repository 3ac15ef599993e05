//! Versions.

use std::ffi::c_char;

/// The major version of the header. Compare with xserv_version() at run time if it matters.
pub const XSERV_VERSION_MAJOR: u32 = 0;
/// The minor version of the header.
pub const XSERV_VERSION_MINOR: u32 = 3;
/// The patch version of the header.
pub const XSERV_VERSION_PATCH: u32 = 0;

/// The version of the binary interface that this header describes; the number in the SONAME
/// (libxserv.so.1). A library of the same ABI version runs every program built with an older header
/// of that version.
pub const XSERV_ABI_VERSION: u32 = 1;

/// Returns the version of the library that is loaded, for example "0.3.0", as a static string.
#[no_mangle]
pub extern "C" fn xserv_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr() as *const c_char
}

/// Returns the ABI version of the library that is loaded. If it differs from XSERV_ABI_VERSION of
/// the header that the program was built with, the two do not fit.
#[no_mangle]
pub extern "C" fn xserv_abi_version() -> u32 {
    XSERV_ABI_VERSION
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_constants_are_the_package_version() {
        let from_constants =
            format!("{XSERV_VERSION_MAJOR}.{XSERV_VERSION_MINOR}.{XSERV_VERSION_PATCH}");
        let package = env!("CARGO_PKG_VERSION");
        assert_eq!(from_constants, package.trim_end_matches("-dev"));
    }
}
