//! Build script: link arguments of the shared library. (The CUDA kernels of this folder will be compiled
//! here too.)

/// The number in the SONAME; `src/ffi/version.rs` says the same to C, and a test compares the two.
const ABI_VERSION: u32 = 0;

fn main() {
    println!("cargo:rerun-if-changed=csrc/build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return;
    }
    // Programs that link against the library ask the loader for this name.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libxserv.so.{ABI_VERSION}");
    // dlclose must not unmap code that our threads or thread-local destructors still run.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Nothing of the crates we link is exported.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
}
