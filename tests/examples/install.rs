//! The install tree: csrc/install, find_package, pkg-config, the shared and the static library;
//! also after the tree was moved.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

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

/// Returns a folder with both libraries of this test run. The static one is made of what Cargo has
/// built: nothing is compiled for it.
fn libraries() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = work_folder("install-libraries");
        fs::copy(library_folder().join("libxserv.so"), folder.join("libxserv.so")).expect("a copy");
        run(command(repository().join("csrc/packaging/static"))
            .arg(library_folder())
            .arg(folder.join("libxserv.a")));
        folder
    })
}

/// csrc/install with the libraries of this test run.
fn install_command(prefix: &Path) -> Command {
    let mut install = command(repository().join("csrc/install"));
    install.arg("--prefix").arg(prefix).arg("--library").arg(libraries().join("libxserv.so"));
    install
}

/// Returns the version as the header has it, which says nothing of a development version.
fn header_version() -> &'static str {
    env!("CARGO_PKG_VERSION").trim_end_matches("-dev")
}

/// Major, minor and patch version.
fn version_parts() -> [u32; 3] {
    let mut parts = header_version().split('.').map(|part| part.parse().expect("a number"));
    std::array::from_fn(|_| parts.next().expect("three numbers"))
}

fn install(name: &str, libdir: &str) -> PathBuf {
    let prefix = work_folder(name).join("prefix");
    run(install_command(&prefix).args(["--no-program", "--libdir", libdir]));
    prefix
}

/// Returns the paths of all files and folders below a folder, in their order.
fn tree(folder: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let entry = entry.expect("an entry");
        if entry.file_type().expect("a type").is_dir() {
            found.append(&mut tree(&entry.path()));
        }
        found.insert(entry.path());
    }
    found
}

/// Returns the last words of the lines that a tool like nm prints.
fn last_words(command: &mut Command) -> BTreeSet<String> {
    let said = run(command).stdout;
    said.lines()
        .filter_map(|line| line.split_whitespace().last())
        .filter(|word| !word.ends_with(':'))
        .map(String::from)
        .collect()
}

/// Builds and runs programs with what pkg-config says about a tree.
fn use_pkg_config(prefix: &Path, libdir: &str) {
    if !have("pkg-config") {
        return skip("pkg-config", "it is not installed");
    }
    let pkg_config = |arguments: &[&str]| {
        let path = prefix.join(libdir).join("pkgconfig");
        run(command("pkg-config").args(arguments).env("PKG_CONFIG_PATH", path)).stdout
    };
    assert_eq!(pkg_config(&["--modversion", "xserv"]).trim(), header_version());
    let source = prefix.with_extension("c");
    fs::write(&source, PROGRAM).expect("a source file");
    let build = |kind: &str, arguments: &[&str], flags: &[&str]| {
        let program = prefix.with_extension(kind);
        run(command(cc())
            .args(WARNINGS)
            .arg("-std=c11")
            .arg(&source)
            .args(pkg_config(arguments).split_whitespace())
            .args(flags)
            .arg("-o")
            .arg(&program));
        program
    };
    let shared = build("shared", &["--cflags", "--libs", "xserv"], &[]);
    let used = run(command(shared).arg(model()).env("LD_LIBRARY_PATH", prefix.join(libdir)));
    assert_eq!(used.stdout.trim(), env!("CARGO_PKG_VERSION"));
    // Nothing says where a shared library is, so these contain it.
    let mut contain = vec![build("static", &["--cflags", "--libs", "xserv-static"], &[])];
    let libc = run(command(cc()).arg("-print-file-name=libc.a")).stdout;
    if Path::new(libc.trim()).is_absolute() {
        let arguments = ["--static", "--cflags", "--libs", "xserv"];
        contain.push(build("all-static", &arguments, &["-static"]));
    } else {
        skip("a program without any shared library", "the C library has no static form");
    }
    for program in contain {
        let used = run(command(program).arg(model()));
        assert_eq!(used.stdout.trim(), env!("CARGO_PKG_VERSION"));
    }
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
    let own_name = format!("libxserv.so.{}", header_version());
    for (link, target) in [("libxserv.so", "libxserv.so.1"), ("libxserv.so.1", own_name.as_str())] {
        assert_eq!(fs::read_link(lib.join(link)).expect("a link"), Path::new(target));
    }
    for file in ["include/xserv.h", "include/xserv.hpp", "lib/cmake/xserv/xservConfig.cmake"] {
        assert!(prefix.join(file).is_file(), "no {file}");
    }
    let document = |name: &str| {
        fs::read_to_string(prefix.join("share/doc/xserv").join(name)).expect("a document")
    };
    assert_eq!(document("LICENSE"), fs::read_to_string(repository().join("LICENSE")).unwrap());
    assert!(document("THIRD-PARTY-NOTICES.txt").contains("tokenizers 0.23.2"));
    use_pkg_config(&prefix, "lib");
    use_find_package(&prefix);

    let moved = prefix.with_file_name("moved");
    fs::rename(&prefix, &moved).expect("the tree can be moved");
    use_pkg_config(&moved, "lib");
    use_find_package(&moved);

    // Over an older one.
    run(install_command(&moved).arg("--no-program"));
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
    run(install_command(Path::new("/opt/xserv"))
        .args(["--no-program", "--destdir"])
        .arg(&destination));
    assert!(destination.join("opt/xserv/lib/libxserv.so.1").is_file());
    let manifest = destination.join("opt/xserv/share/doc/xserv/manifest");
    let listed = fs::read_to_string(manifest).expect("a manifest");
    assert!(!listed.contains("opt"), "a path that is not relative to the prefix: {listed}");
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
    let [major, minor, patch] = version_parts();
    assert!(configure("same", &format!("{major}.{minor}")));
    assert!(configure("exact", &format!("{major}.{minor}.{patch} EXACT")));
    assert!(!configure("older", &format!("{major}.{}", minor - 1)));
    assert!(!configure("newer", &format!("{major}.{}", minor + 1)));
    assert!(!configure("major", &format!("{}.0", major + 1)));
    assert!(!configure("patch", &format!("{major}.{minor}.{}", patch + 1)));
}

/// Writes a CMake project with these files and configures it for a tree.
fn configure(cmake: &str, folder: &Path, files: &[(&str, &str)], arguments: &[String]) -> Outcome {
    fs::create_dir_all(folder).expect("a folder");
    for (name, text) in files {
        fs::write(folder.join(name), text).expect("a file of the project");
    }
    outcome(
        command(cmake).arg("-S").arg(folder).arg("-B").arg(folder.join("build")).args(arguments),
    )
}

fn assert_success(done: &Outcome) {
    assert_eq!(done.code, Some(0), "{}\n{}", done.stdout, done.stderr);
}

#[test]
fn cmake_links_the_static_library_into_c_programs() {
    let Some(cmake) = cmake() else { return };
    let prefix = install("install-cmake-static", "lib");
    let folder = prefix.with_file_name("project");
    // No C++ here: nothing may ask for its compiler.
    let [major, minor, _] = version_parts();
    let lists = format!(
        "cmake_minimum_required(VERSION 3.16)\nproject(p C)\n\
         find_package(xserv {major}.{minor} CONFIG REQUIRED COMPONENTS shared static)\n\
         add_executable(program main.c)\n\
         target_link_libraries(program PRIVATE xserv::static)\n\
         add_executable(other main.c)\n\
         target_link_libraries(other PRIVATE xserv::xserv)\n"
    );
    let definition = format!("-DCMAKE_PREFIX_PATH={}", prefix.display());
    let files = [("CMakeLists.txt", lists.as_str()), ("main.c", PROGRAM)];
    assert_success(&configure(cmake, &folder, &files, &[definition]));
    run(command(cmake).arg("--build").arg(folder.join("build")));
    let shared = run(command(folder.join("build/other")).arg(model())).stdout;
    fs::remove_dir_all(&prefix).expect("the tree can be removed");
    let contained = run(command(folder.join("build/program")).arg(model())).stdout;
    assert_eq!(contained, shared);
}

#[test]
fn find_package_refuses_unknown_and_missing_components() {
    let Some(cmake) = cmake() else { return };
    let prefix = install("install-components", "lib");
    let ask = |name: &str, components: &str| {
        let lists = format!(
            "cmake_minimum_required(VERSION 3.16)\nproject(p C)\n\
             find_package(xserv CONFIG REQUIRED {components})\n"
        );
        let folder = prefix.with_file_name(name);
        let definition = format!("-DCMAKE_PREFIX_PATH={}", prefix.display());
        configure(cmake, &folder, &[("CMakeLists.txt", &lists)], &[definition])
    };
    assert_success(&ask("known", "COMPONENTS shared static"));
    assert_success(&ask("optional", "OPTIONAL_COMPONENTS cuda"));
    let unknown = ask("unknown", "COMPONENTS shared cuda");
    assert_ne!(unknown.code, Some(0));
    assert!(unknown.stderr.contains("xserv has no component cuda"), "{}", unknown.stderr);
    run(install_command(&prefix).args(["--no-program", "--no-static"]));
    assert_success(&ask("shared", "COMPONENTS shared"));
    let missing = ask("missing", "COMPONENTS static");
    assert_ne!(missing.code, Some(0));
    assert!(missing.stderr.contains("no libxserv.a in"), "{}", missing.stderr);
}

#[test]
fn cpp_before_17_is_told_so_and_keeps_the_c_header() {
    let folder = work_folder("install-cpp14");
    let source = folder.join("empty.cpp");
    fs::write(&source, "#include <xserv.hpp>\n").expect("a source file");
    let compile = |standard: &str| {
        let include = format!("-I{}", repository().join("include").display());
        outcome(command(cxx()).args([standard, "-fsyntax-only", &include]).arg(&source))
    };
    let told = compile("-std=c++14").stderr;
    assert_eq!(told.matches("error:").count(), 1, "{told}");
    assert!(told.contains("xserv.hpp needs C++17"), "{told}");
    assert_eq!(compile("-std=c++17").code, Some(0));

    let Some(cmake) = cmake() else { return };
    let prefix = install("install-standards", "lib");
    // A compiler whose default is C++14, as it was for years.
    let compiler = folder.join("c++14");
    fs::write(&compiler, format!("#!/bin/sh\nexec {} -std=gnu++14 \"$@\"\n", cxx()))
        .expect("a file");
    fs::set_permissions(&compiler, fs::Permissions::from_mode(0o755)).expect("a script");
    for (name, standard, expected) in
        [("default", "", "__cplusplus >= 201703L"), ("chosen", "14", "__cplusplus == 201402L")]
    {
        let lists = format!(
            "cmake_minimum_required(VERSION 3.16)\nproject(p CXX)\nset(CMAKE_CXX_STANDARD {standard})\n\
             find_package(xserv CONFIG REQUIRED)\nadd_library(p OBJECT p.cpp)\n\
             target_link_libraries(p PRIVATE xserv::xserv)\n"
        );
        let program =
            format!("#include <xserv.h>\nstatic_assert({expected}, \"another standard\");\n");
        let project = folder.join(name);
        let arguments = [
            format!("-DCMAKE_PREFIX_PATH={}", prefix.display()),
            format!("-DCMAKE_CXX_COMPILER={}", compiler.display()),
        ];
        let files = [("CMakeLists.txt", lists.as_str()), ("p.cpp", &program)];
        assert_success(&configure(cmake, &project, &files, &arguments));
        run(command(cmake).arg("--build").arg(project.join("build")));
    }
}

/// Returns the shared library's functions, which the header test compares with the headers.
fn functions() -> BTreeSet<String> {
    let library = libraries().join("libxserv.so");
    last_words(command("nm").args(["-D", "--defined-only"]).arg(library))
}

#[test]
fn the_static_library_has_no_symbols_but_the_functions() {
    let library = libraries().join("libxserv.a");
    let global = last_words(command("nm").args(["--extern-only", "--defined-only"]).arg(library));
    assert!(global.len() > 50);
    assert_eq!(global, functions());
}

/// A static library of someone else, with Rust's standard library and an allocator of its own, which counts.
const OTHER_RUST: &str = r#"
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, Ordering};
static ALLOCATIONS: AtomicU32 = AtomicU32::new(0);
struct Counting;
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        System.alloc(layout)
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        System.dealloc(pointer, layout)
    }
}
#[global_allocator]
static COUNTING: Counting = Counting;
thread_local!(static LINES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) });
#[no_mangle]
pub extern "C" fn other_allocations() -> u32 {
    ALLOCATIONS.load(Ordering::Relaxed)
}
/// Allocates, panics and catches it, in a thread with a destructor.
#[no_mangle]
pub extern "C" fn other_work() -> u32 {
    std::panic::set_hook(Box::new(|_| ()));
    let work = || {
        let caught = std::panic::catch_unwind(|| {
            LINES.with(|lines| lines.borrow_mut().push("a line".to_string()));
            panic!("caught");
        });
        u32::from(caught.is_err())
    };
    std::thread::spawn(work).join().unwrap_or(0)
}
"#;

const TWO_LIBRARIES: &str = r#"
#include <stdint.h>
#include <stdio.h>
#include <xserv.h>
uint32_t other_allocations(void);
uint32_t other_work(void);
int main(int argc, char **argv) {
  if (argc != 2 || other_work() != 1) return 2;
  uint32_t before = other_allocations();
  xserv_model *model = NULL;
  if (xserv_load(argv[1], NULL, &model) != XSERV_STATUS_OK) return puts(xserv_last_error()), 1;
  xserv_request request;
  xserv_request_default(&request);
  request.prompt = "Once";
  request.max_tokens = 8;
  xserv_status status = xserv_generate(model, &request, NULL, NULL, NULL);
  xserv_model_free(model);
  if (status != XSERV_STATUS_OK) return puts(xserv_last_error()), 1;
  /* A path that does not exist fails with a message: that is Rust's formatting and allocating. */
  if (xserv_load("/nonexistent", NULL, &model) == XSERV_STATUS_OK) return 3;
  printf("%u of xserv's allocations went to the other library\n", (unsigned)(other_allocations() - before));
  return before == 0 || other_work() != 1;
}
"#;

#[test]
fn two_rust_libraries_live_in_one_program() {
    let folder = work_folder("install-two-libraries");
    fs::write(folder.join("other.rs"), OTHER_RUST).expect("a source file");
    fs::write(folder.join("main.c"), TWO_LIBRARIES).expect("a source file");
    let other = folder.join("libother.a");
    run(command("rustc")
        .args(["--edition", "2021", "-O", "--crate-type", "staticlib", "-o"])
        .arg(&other)
        .arg(folder.join("other.rs")));
    let xserv = libraries().join("libxserv.a");
    for (name, order) in [("first", [&xserv, &other]), ("last", [&other, &xserv])] {
        run(command(cc())
            .args(WARNINGS)
            .arg("-std=c11")
            .arg("-I")
            .arg(repository().join("include"))
            .arg(folder.join("main.c"))
            .args(order)
            .args(["-lm", "-ldl", "-lpthread", "-o"])
            .arg(folder.join(name)));
        let said = run(command(folder.join(name)).arg(model())).stdout;
        assert_eq!(said, "0 of xserv's allocations went to the other library\n");
    }
}

const PLUGIN: &str = r#"
#include <xserv.h>
int plugin_run(const char *folder);
int plugin_run(const char *folder) {
  xserv_model *model = 0;
  if (xserv_load(folder, 0, &model) != XSERV_STATUS_OK) return 1;
  xserv_request request;
  xserv_request_default(&request);
  request.prompt = "Once";
  request.max_tokens = 4;
  xserv_status status = xserv_generate(model, &request, 0, 0, 0);
  xserv_model_free(model);
  return status != XSERV_STATUS_OK;
}
"#;

const PLUGIN_HOST: &str = r#"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
static char **arguments;
static void *plugin;
/* Ends after the plugin is closed, with the library's thread-local variables in it. */
static void *work(void *unused) {
  int (*run)(const char *) = 0;
  *(void **)&run = dlsym(plugin, "plugin_run");
  if (run == NULL || run(arguments[2]) != 0 || dlclose(plugin) != 0) return unused;
  return &arguments;
}
int main(int argc, char **argv) {
  arguments = argv;
  if (argc != 3 || (plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL)) == NULL) return puts(dlerror()), 1;
  pthread_t thread;
  void *done = NULL;
  if (pthread_create(&thread, NULL, work, NULL) != 0 || pthread_join(thread, &done) != 0) return 2;
  return done != &arguments || dlopen(argv[1], RTLD_NOW | RTLD_NOLOAD) == NULL;
}
"#;

#[test]
fn a_plugin_contains_the_library_and_exports_nothing_of_it() {
    let Some(cmake) = cmake() else { return };
    let prefix = install("install-plugin", "lib");
    let folder = prefix.with_file_name("project");
    let lists = "cmake_minimum_required(VERSION 3.16)\nproject(p C)\n\
                 find_package(xserv CONFIG REQUIRED COMPONENTS static)\n\
                 add_library(plugin MODULE plugin.c)\n\
                 target_link_libraries(plugin PRIVATE xserv::static)\n\
                 add_executable(host host.c)\n\
                 target_link_libraries(host PRIVATE dl pthread)\n";
    let files = [("CMakeLists.txt", lists), ("plugin.c", PLUGIN), ("host.c", PLUGIN_HOST)];
    let definition = format!("-DCMAKE_PREFIX_PATH={}", prefix.display());
    assert_success(&configure(cmake, &folder, &files, &[definition]));
    run(command(cmake).arg("--build").arg(folder.join("build")));
    let plugin = folder.join("build/libplugin.so");
    let exported = last_words(command("nm").args(["-D", "--defined-only"]).arg(&plugin));
    assert_eq!(exported, BTreeSet::from(["plugin_run".to_string()]));
    run(command(folder.join("build/host")).arg(plugin).arg(model()));
}

#[test]
fn a_dry_run_prints_what_an_installation_makes_and_uninstalling_leaves_nothing() {
    let folder = work_folder("install-manifest");
    let prefix = folder.join("prefix");
    let dry = run(install_command(&prefix).arg("--dry-run")).stdout;
    assert!(!prefix.exists(), "a dry run made something");
    let said: BTreeSet<PathBuf> = dry.lines().map(PathBuf::from).collect();
    run(&mut install_command(&prefix));
    let made = tree(&prefix);
    let is_folder = |path: &PathBuf| path.is_dir() && !path.is_symlink();
    let files: BTreeSet<PathBuf> = made.iter().filter(|path| !is_folder(path)).cloned().collect();
    assert_eq!(said, files);
    assert!(files.contains(&prefix.join("lib/libxserv.a")));

    // Again, and the manifest does not change; then into other folders, and the old files go.
    let manifest = || fs::read(prefix.join("share/doc/xserv/manifest")).expect("a manifest");
    let first = manifest();
    run(&mut install_command(&prefix));
    assert!(manifest() == first && tree(&prefix) == made);
    run(install_command(&prefix).args(["--libdir", "lib64", "--no-static", "--no-program"]));
    assert!(!prefix.join("lib/libxserv.so").exists() && !prefix.join("bin/xserv").exists());
    assert!(prefix.join("lib64/libxserv.so").exists() && !prefix.join("lib64/libxserv.a").exists());

    // Files that others put there stay.
    let uninstall = || {
        let mut uninstall = command(repository().join("csrc/install"));
        uninstall.arg("--uninstall").arg("--prefix").arg(&prefix);
        uninstall
    };
    let kept = prefix.join("lib/libother.so");
    fs::write(&kept, "").expect("a file");
    let before = tree(&prefix);
    run(uninstall().arg("--dry-run"));
    assert_eq!(tree(&prefix), before);
    run(&mut uninstall());
    assert_eq!(tree(&prefix), BTreeSet::from([prefix.join("lib"), kept.clone()]));
    assert_eq!(outcome(&mut uninstall()).code, Some(1), "there was nothing to uninstall");
    fs::remove_dir_all(&prefix).expect("the tree can be removed");
    run(install_command(&prefix).arg("--no-program"));
    run(&mut uninstall());
    assert!(!prefix.exists(), "{:?} is left", tree(&prefix));

    // A manifest that names what is not in the prefix removes nothing.
    run(install_command(&prefix).arg("--no-program"));
    let path = prefix.join("share/doc/xserv/manifest");
    let evil = fs::read_to_string(&path).expect("a manifest") + "../precious\n";
    fs::write(&path, evil).expect("a manifest");
    let precious = folder.join("precious");
    fs::write(&precious, "").expect("a file");
    assert_eq!(outcome(&mut uninstall()).code, Some(1));
    assert!(precious.exists() && prefix.join("include/xserv.h").exists());
}

#[test]
fn the_installed_program_finds_the_library_beside_it() {
    if !repository().join("examples/c/xserv").is_dir() {
        return;
    }
    let Some(_) = cmake() else { return };
    let prefix = work_folder("install-program").join("prefix");
    run(install_command(&prefix).args(["--libdir", "lib/some-triplet"]));
    let moved = prefix.with_file_name("moved");
    fs::rename(&prefix, &moved).expect("the tree can be moved");
    let said = run(command(moved.join("bin/xserv")).arg("inspect").arg(model())).stdout;
    assert!(said.contains("Qwen3ForCausalLM"), "{said}");
}

/// Stands in for cargo, whose build would take minutes: does with its arguments what cargo does, with the
/// library of this test run.
const STAND_IN: &str = r#"#!/bin/sh
set -e
echo "$*" >> "$LIBRARY_FOLDER/arguments"
while [ $# -gt 0 ]; do
  [ "$1" != --target-dir ] || target=$2
  shift
done
mkdir -p "$target/release/deps"
cmp -s "$LIBRARY_FOLDER/libxserv.so" "$target/release/libxserv.so" ||
  cp "$LIBRARY_FOLDER/libxserv.so" "$target/release/libxserv.so"
[ -f "$target/release/libxserv.rlib" ] || ln "$RLIB" "$target/release/libxserv.rlib" ||
  cp "$RLIB" "$target/release/libxserv.rlib"
ln -sf "$(dirname "$RLIB")"/* "$target/release/deps/"
"#;

#[test]
fn cmake_projects_build_it_with_cargo() {
    let Some(cmake) = cmake() else { return };
    let folder = work_folder("install-add-subdirectory");
    let tools = folder.join("tools");
    fs::create_dir(&tools).expect("a folder");
    let rustc = "#!/bin/sh\nexec rustc \"$@\"\n";
    for (name, text) in [("cargo", STAND_IN), ("rustc", rustc)] {
        fs::write(tools.join(name), text).expect("a script");
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(tools.join(name), executable).expect("a script");
    }
    fs::copy(library_folder().join("libxserv.so"), tools.join("libxserv.so")).expect("a copy");
    let lists = |before: &str| {
        format!(
            "cmake_minimum_required(VERSION 3.16)\nproject(p C)\n{before}\n\
             add_subdirectory({}/csrc/packaging xserv)\n\
             add_executable(program main.c)\ntarget_link_libraries(program PRIVATE xserv::xserv)\n\
             add_executable(contains EXCLUDE_FROM_ALL main.c)\n\
             target_link_libraries(contains PRIVATE xserv::static)\n",
            repository().display()
        )
    };
    let cargo = format!("-DXSERV_CARGO={}", tools.join("cargo").display());
    let build = |project: &Path, target: &str| {
        run(command(cmake)
            .args(["--build"])
            .arg(project.join("build"))
            .args(["--target", target])
            .env("LIBRARY_FOLDER", &tools)
            .env("RLIB", library_folder().join("libxserv.rlib")));
    };
    let version = env!("CARGO_PKG_VERSION");
    let runs = |program: PathBuf| {
        assert_eq!(run(command(program).arg(model())).stdout.trim(), version);
    };

    let shared = folder.join("shared");
    let text = lists("");
    let files = [("CMakeLists.txt", text.as_str()), ("main.c", PROGRAM)];
    assert_success(&configure(cmake, &shared, &files, std::slice::from_ref(&cargo)));
    build(&shared, "all");
    runs(shared.join("build/program"));
    let arguments = fs::read_to_string(tools.join("arguments")).expect("the arguments of cargo");
    assert!(arguments.starts_with("build --release --locked --lib --target-dir "), "{arguments}");
    let contained = shared.join("build/xserv/lib/libxserv.a");
    assert!(!contained.exists(), "a static library that nothing uses");
    build(&shared, "contains");
    runs(shared.join("build/contains"));

    // Cargo is asked every time; the program is linked again if the library has changed.
    let linked =
        || fs::metadata(shared.join("build/program")).expect("a program").modified().unwrap();
    let before = linked();
    build(&shared, "all");
    assert_eq!(linked(), before);
    let asked = fs::read_to_string(tools.join("arguments")).expect("the arguments of cargo");
    assert_eq!(asked.lines().count(), 3, "{asked}");
    let mut changed = fs::read(tools.join("libxserv.so")).expect("the library");
    changed.push(0);
    fs::write(tools.join("libxserv.so"), changed).expect("the library");
    build(&shared, "all");
    assert!(linked() > before, "the library has changed, but the program was not linked again");

    // A project without shared libraries.
    let contains = folder.join("static");
    let text = lists("set(BUILD_SHARED_LIBS OFF)");
    let files = [("CMakeLists.txt", text.as_str()), ("main.c", PROGRAM)];
    assert_success(&configure(cmake, &contains, &files, &[cargo]));
    build(&contains, "all");
    fs::remove_file(contains.join("build/xserv/lib/libxserv.so.1")).expect("the shared library");
    runs(contains.join("build/program"));

    let none = folder.join("none");
    let missing = ["-DXSERV_CARGO=XSERV_CARGO-NOTFOUND".to_string()];
    let text = lists(
        "set(CMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH OFF)\nset(ENV{PATH} \"\")\n\
                      set(ENV{HOME} /nonexistent)\nset(ENV{CARGO_HOME} /nonexistent)",
    );
    let files = [("CMakeLists.txt", text.as_str()), ("main.c", PROGRAM)];
    let told = configure(cmake, &none, &files, &missing);
    assert_ne!(told.code, Some(0));
    assert!(told.stderr.contains("xserv needs Rust's cargo"), "{}", told.stderr);
}
