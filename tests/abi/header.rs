//! `include/xserv.h` is what cbindgen makes of `src/ffi` today, and compiles alone as C and C++.

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files that speak to C, in the order of the manual.
const SOURCES: [&str; 20] = [
    "version",
    "types",
    "status",
    "model",
    "inspect",
    "plan",
    "text",
    "evaluate",
    "request",
    "generate",
    "submit",
    "stats",
    "context",
    "tensor",
    "ops_copy",
    "ops_rows",
    "ops_index",
    "ops_elementwise",
    "ops_gemm",
    "ops_attention",
];

fn generate() -> String {
    let config = cbindgen::Config::from_file(root().join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        builder = builder.with_src(root().join(format!("src/ffi/{source}.rs")));
    }
    let mut out = Vec::new();
    builder.generate().unwrap().write(&mut out);
    String::from_utf8(out).unwrap()
}

#[test]
fn header_is_fresh() {
    let path = root().join("include/xserv.h");
    let fresh = generate();
    if std::env::var_os("XSERV_BLESS").is_some() {
        std::fs::write(&path, &fresh).unwrap();
    }
    assert!(
        std::fs::read_to_string(&path).unwrap_or_default() == fresh,
        "include/xserv.h is stale: XSERV_BLESS=1 cargo test --test abi header"
    );
}

#[test]
fn every_source_with_c_functions_is_in_the_header() {
    for entry in std::fs::read_dir(root().join("src/ffi")).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap().to_string();
        let text = std::fs::read_to_string(&path).unwrap();
        if text.contains("#[no_mangle]") {
            assert!(SOURCES.contains(&stem.as_str()), "{} is missing in SOURCES", path.display());
        }
    }
}

fn compile_alone(compiler: &str, language: &[&str], header: &str) {
    let dir = std::env::temp_dir().join(format!("xserv-header-{}-{compiler}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let extension = if compiler == "c++" { "cpp" } else { "c" };
    let file: PathBuf = dir.join(format!("alone-{}.{extension}", language.join("")));
    std::fs::write(&file, format!("#include <{header}>\n#include <{header}>\n")).unwrap();
    let output = Command::new(compiler)
        .args(language)
        .args(["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror", "-fsyntax-only"])
        .arg("-I")
        .arg(root().join("include"))
        .arg(&file)
        .output()
        .unwrap_or_else(|e| panic!("{compiler} must be installed for this test: {e}"));
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn header_compiles_alone_as_c() {
    compile_alone("cc", &["-std=c11"], "xserv.h");
    compile_alone("cc", &["-std=c99"], "xserv.h");
}

#[test]
fn headers_compile_alone_as_cpp() {
    compile_alone("c++", &["-std=c++11"], "xserv.h");
    compile_alone("c++", &["-std=c++17"], "xserv.h");
    compile_alone("c++", &["-std=c++17"], "xserv.hpp");
}
