//! The install tree: csrc/install, find_package, pkg-config; also after the tree was moved.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::*;

const PROGRAM: &str = r#"
#include <stdio.h>
#include <string.h>
#include <xserv.h>
int main(int argc, char **argv) {
  xserv_inspection *inspection = NULL;
  if (argc != 2 || xserv_abi_version() != XSERV_ABI_VERSION) return 2;
  if (xserv_inspect(argv[1], &inspection) != XSERV_STATUS_OK) return puts(xserv_last_error()), 1;
  xserv_inspection_free(inspection);
  return puts(xserv_version()) < 0;
}
"#;

fn install(name: &str, libdir: &str) -> PathBuf {
    let prefix = work_folder(name).join("prefix");
    run(command(repository().join("csrc/install"))
        .arg("--prefix")
        .arg(&prefix)
        .args(["--libdir", libdir, "--library"])
        .arg(library_folder().join("libxserv.so")));
    prefix
}

/// Builds and runs a program with what pkg-config says about a tree.
fn use_pkg_config(prefix: &Path, libdir: &str) {
    if !have("pkg-config") {
        return skip("pkg-config", "it is not installed");
    }
    let pkg_config = |arguments: &[&str]| {
        let path = prefix.join(libdir).join("pkgconfig");
        run(command("pkg-config").args(arguments).arg("xserv").env("PKG_CONFIG_PATH", path)).stdout
    };
    let version = env!("CARGO_PKG_VERSION").trim_end_matches("-dev");
    assert_eq!(pkg_config(&["--modversion"]).trim(), version);
    let source = prefix.with_extension("c");
    let program = prefix.with_extension("program");
    fs::write(&source, PROGRAM).expect("a source file");
    run(command(cc())
        .args(WARNINGS)
        .arg("-std=c11")
        .arg(&source)
        .args(pkg_config(&["--cflags", "--libs"]).split_whitespace())
        .arg("-o")
        .arg(&program));
    let used = run(command(&program).arg(model()).env("LD_LIBRARY_PATH", prefix.join(libdir)));
    assert_eq!(used.stdout.trim(), env!("CARGO_PKG_VERSION"));
}

/// Builds the C and C++ examples against a tree and runs them.
fn use_find_package(prefix: &Path) {
    let Some(cmake) = cmake() else { return };
    for (example, arguments) in [("c", &["Once", "--max-tokens", "4"][..]), ("cpp", &["Once"])] {
        let build = prefix.with_extension(format!("build-{example}"));
        let definition = format!("-DCMAKE_PREFIX_PATH={}", prefix.display());
        cmake_build(cmake, &repository().join("examples").join(example), &build, &[definition]);
        let cache = fs::read_to_string(build.join("CMakeCache.txt")).expect("CMake's cache");
        let found = cache.lines().find(|line| line.starts_with("xserv_DIR:")).expect("xserv_DIR");
        assert!(found.contains(&prefix.display().to_string()), "another xserv was found: {found}");
        run(command(build.join("generate")).arg(model()).args(arguments));
    }
}

#[test]
fn an_installed_tree_serves_programs_and_can_be_moved() {
    let prefix = install("install", "lib");
    let lib = prefix.join("lib");
    for (link, target) in [("libxserv.so", "libxserv.so.1"), ("libxserv.so.1", "libxserv.so.0.2.0")]
    {
        assert_eq!(fs::read_link(lib.join(link)).expect("a link"), Path::new(target));
    }
    for file in ["include/xserv.h", "include/xserv.hpp", "lib/cmake/xserv/xservConfig.cmake"] {
        assert!(prefix.join(file).is_file(), "no {file}");
    }
    use_pkg_config(&prefix, "lib");
    use_find_package(&prefix);

    let moved = prefix.with_file_name("moved");
    fs::rename(&prefix, &moved).expect("the tree can be moved");
    use_pkg_config(&moved, "lib");
    use_find_package(&moved);

    // Over an older one.
    run(command(repository().join("csrc/install"))
        .arg("--prefix")
        .arg(&moved)
        .arg("--library")
        .arg(library_folder().join("libxserv.so")));
    use_pkg_config(&moved, "lib");
}

#[test]
fn a_deeper_library_folder_works_too() {
    let prefix = install("install-multiarch", "lib/some-triplet");
    use_pkg_config(&prefix, "lib/some-triplet");
    let Some(cmake) = cmake() else { return };
    let build = prefix.with_extension("build");
    let package = prefix.join("lib/some-triplet/cmake/xserv");
    let definition = format!("-Dxserv_DIR={}", package.display());
    cmake_build(cmake, &repository().join("examples/cpp"), &build, &[definition]);
    run(command(build.join("generate")).arg(model()));
}

#[test]
fn destdir_goes_before_the_prefix() {
    let destination = work_folder("install-destdir");
    run(command(repository().join("csrc/install"))
        .args(["--prefix", "/opt/xserv", "--destdir"])
        .arg(&destination)
        .arg("--library")
        .arg(library_folder().join("libxserv.so")));
    assert!(destination.join("opt/xserv/lib/libxserv.so.1").is_file());
}

#[test]
fn find_package_knows_versions() {
    let Some(cmake) = cmake() else { return };
    let folder = work_folder("install-versions");
    let library = format!("-DXSERV_LIBDIR={}", library_folder().display());
    let configure = |name: &str, version: &str| {
        let project = folder.join(name);
        fs::create_dir_all(&project).expect("a folder");
        let lists = format!(
            "cmake_minimum_required(VERSION 3.16)\nproject(p C)\nfind_package(xserv {version} CONFIG REQUIRED)\n"
        );
        fs::write(project.join("CMakeLists.txt"), lists).expect("CMakeLists.txt");
        let package = repository().join("csrc/packaging");
        outcome(
            command(cmake)
                .arg("-S")
                .arg(&project)
                .arg("-B")
                .arg(project.join("build"))
                .arg(format!("-Dxserv_DIR={}", package.display()))
                .arg(&library),
        )
        .code
            == Some(0)
    };
    assert!(configure("any", ""));
    assert!(configure("same", "0.2"));
    assert!(configure("exact", "0.2.0 EXACT"));
    assert!(!configure("older", "0.1"));
    assert!(!configure("newer", "0.3"));
    assert!(!configure("major", "1.0"));
    assert!(!configure("patch", "0.2.1"));
}
