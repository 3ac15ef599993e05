//! Build script: link arguments of the shared library, and the CUDA kernels of `csrc`.
//!
//! Every `.cu` file under `csrc` becomes one fatbin, which `src/backend/cuda/fatbins.rs` includes under
//! the path of its source without `csrc/ops/` and the extension: `attention/flash`. Environment:
//!
//! * `NVCC`: the compiler; `none` builds without CUDA kernels. Else it is looked for in `CUDA_HOME/bin`,
//!   `CUDA_PATH/bin`, `.cuda/nvidia/cu13/bin` (the Python wheels), `PATH` and `/usr/local/cuda/bin`.
//! * `XSERV_CUDA_ARCHS`: what to compile for, such as `90a` or `80,90a,ptx80`; the default is all.
//! * `XSERV_NVCC_FLAGS`: further arguments, such as `-lineinfo`.
//! * `XSERV_REQUIRE_CUDA=1`: a missing nvcc is an error.
//! * `XSERV_BLESS=1`: the list of kernels, `src/backend/cuda/kernels.rs`, is rewritten from what was
//!   compiled. Else a build with nvcc fails if the two differ; one without nvcc uses the list as it is.
//!   Layouts of structs are not compared with `csrc/common/layouts.cuh`, so that `src/ops/layouts.rs` can
//!   rewrite that file.

mod kernel_list;
mod layout_table;

use std::collections::hash_map::DefaultHasher;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number in the SONAME; `src/ffi/version.rs` says the same to C, and a test compares the two.
const ABI_VERSION: u32 = 1;

/// Machine code for every generation from Ampere on, and PTX for later ones. `a` targets have
/// instructions of one chip that plain ones lack.
const ALL_ARCHS: &str = "80,86,89,90a,100,120,ptx90";

/// The PTX of which machine code for plain targets is made, and that which a source names besides
/// (`__CUDA_ARCH__ >= 890`): the newest one that the target runs. Making PTX is two thirds of a compilation.
const PTX_VERSIONS: [u32; 2] = [80, 90];

/// What the sources ask to distinguish versions.
const VERSION_CHECK: &str = "__CUDA_ARCH__ >= ";
/// Chips of Jetson, which run no code of others, nor others theirs.
const JETSON: [u32; 3] = [72, 87, 101];
/// What they ask before they use instructions of Hopper alone.
const FEATURE_CHECK: &str = "__CUDA_ARCH_FEAT_SM90_ALL";

/// Kernels are compiled two at a time: one compilation takes up to 1 GB.
const PARALLEL_COMPILATIONS: usize = 2;

/// The constants by which the library launches kernels.
const KERNEL_LIST: &str = "src/backend/cuda/kernels.rs";

fn main() {
    // Not all of csrc: what is packed and installed makes no other library.
    for part in ["backend", "common", "ops", "build.rs", "kernel_list.rs", "layout_table.rs"] {
        println!("cargo:rerun-if-changed=csrc/{part}");
    }
    println!("cargo:rerun-if-changed={KERNEL_LIST}");
    for name in [
        "NVCC",
        "CUDA_HOME",
        "CUDA_PATH",
        "XSERV_CUDA_ARCHS",
        "XSERV_NVCC_FLAGS",
        "XSERV_REQUIRE_CUDA",
        "XSERV_BLESS",
    ] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    link_arguments();
    layouts();
    kernels();
}

fn link_arguments() {
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return;
    }
    // Programs that link against the library ask the loader for this name.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libxserv.so.{ABI_VERSION}");
    // dlclose must not unmap code that our threads or thread-local destructors still run.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Nothing of the crates we link is exported.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    // The C library's function ends the process where memory is short: see src/thread_exit.rs.
    let arch = std::env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    let is_gnu = std::env::var("CARGO_CFG_TARGET_ENV").as_deref() == Ok("gnu");
    if is_gnu && matches!(arch.as_str(), "x86_64" | "aarch64") {
        for kind in ["cdylib-link-arg", "link-arg-tests"] {
            println!("cargo:rustc-{kind}=-Wl,--wrap=__cxa_thread_atexit_impl");
        }
    }
}

/// Writes the layouts of the kernels' structs for Rust to compare its own with.
fn layouts() {
    let root = PathBuf::from(variable("CARGO_MANIFEST_DIR").unwrap_or_default());
    let out = PathBuf::from(variable("OUT_DIR").unwrap_or_default());
    let header = root.join("csrc/common/layouts.cuh");
    let text = layout_table::macro_of(&header, variable("XSERV_BLESS").is_some());
    write(&out.join("layouts.rs"), text.as_bytes());
}

fn kernels() {
    let out = PathBuf::from(variable("OUT_DIR").unwrap_or_default());
    let table = out.join("fatbins.rs");
    let Some(nvcc) = find_nvcc() else {
        if variable("XSERV_REQUIRE_CUDA").is_some_and(|v| v != "0") {
            panic!("XSERV_REQUIRE_CUDA is set, but there is no nvcc (set NVCC or CUDA_HOME)");
        }
        println!(
            "cargo:warning=no nvcc found (NVCC, CUDA_HOME, .cuda, PATH): building for the CPU only"
        );
        write(&table, b"&[]");
        return;
    };
    let root = PathBuf::from(variable("CARGO_MANIFEST_DIR").unwrap_or_default());
    let folder = root.join("csrc");
    let mut sources = Vec::new();
    files(&folder, "cu", &mut sources);
    sources.sort();
    // Debug and release builds, and checkouts whose target folder is copied, share what is compiled: a kernel
    // depends on its source, the headers that it includes and the arguments alone.
    let cache = out.ancestors().nth(4).unwrap_or(&out).join("kernels");
    std::fs::create_dir_all(&cache).unwrap_or_else(|e| panic!("{}: {e}", cache.display()));
    let mut common = DefaultHasher::new();
    version(&nvcc).hash(&mut common);

    let next = AtomicUsize::new(0);
    let jobs: Vec<(PathBuf, Vec<String>)> = sources
        .iter()
        .map(|source| {
            let mut hasher = common.clone();
            let files: Vec<_> =
                with_headers(source, &folder).iter().map(|file| read(file)).collect();
            let arguments = arguments(&files);
            (&files, &arguments).hash(&mut hasher);
            let name = key(source, &folder).replace('/', "-");
            (cache.join(format!("{name}-{:016x}.fatbin", hasher.finish())), arguments)
        })
        .collect();
    std::thread::scope(|scope| {
        for _ in 0..PARALLEL_COMPILATIONS {
            scope.spawn(|| loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let (Some(source), Some(job)) = (sources.get(index), jobs.get(index)) else {
                    return;
                };
                let (fatbin, arguments) = job;
                if !fatbin.exists() || !names_of(fatbin).exists() {
                    compile(&nvcc, &folder, arguments, source, fatbin);
                }
            });
        }
    });

    let mut text = String::from("&[\n");
    let mut compiled = BTreeMap::new();
    for (source, (fatbin, _)) in sources.iter().zip(&jobs) {
        let names = String::from_utf8_lossy(&read(&names_of(fatbin))).into_owned();
        compiled.insert(key(source, &folder), names.lines().map(str::to_string).collect());
        let key = key(source, &folder);
        let copy = out.join(format!("{}.fatbin", key.replace('/', "-")));
        write(&copy, &read(fatbin));
        let _ = writeln!(text, "({key:?}, &Aligned(*include_bytes!({copy:?})).0),");
    }
    text.push(']');
    write(&table, text.as_bytes());
    let archs = archs();
    let targets: Vec<&str> = archs.iter().map(String::as_str).collect();
    // ptxas names the kernels; it does not see those that are kept as PTX.
    if targets.iter().any(|target| !target.starts_with("ptx")) {
        kernel_list::check(&root.join(KERNEL_LIST), &compiled, &targets);
    }
}

/// Returns the path, beside a fatbin, of the names of its kernels, one a line.
fn names_of(fatbin: &Path) -> PathBuf {
    fatbin.with_extension("names")
}

/// Returns a source file and the headers of `csrc` that it includes, directly or not.
fn with_headers(source: &Path, folder: &Path) -> Vec<PathBuf> {
    let mut files = vec![source.to_path_buf()];
    let mut next = 0;
    while let Some(file) = files.get(next) {
        let text = String::from_utf8_lossy(&read(file)).into_owned();
        let names = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix("#include \"")?.strip_suffix('"'));
        let headers: Vec<PathBuf> = names.map(|name| folder.join(name)).collect();
        headers.into_iter().for_each(|header| {
            if !files.contains(&header) {
                files.push(header);
            }
        });
        next += 1;
    }
    files
}

fn compile(nvcc: &Path, folder: &Path, arguments: &[String], source: &Path, fatbin: &Path) {
    // Under another name first: a build that is stopped must not leave half a file behind.
    let unfinished = fatbin.with_extension(format!("{}.tmp", std::process::id()));
    let output = Command::new(nvcc)
        .current_dir(folder)
        .args(arguments)
        .arg("-o")
        .arg(&unfinished)
        .arg(source)
        .env_remove("NVCC_APPEND_FLAGS")
        .env_remove("NVCC_PREPEND_FLAGS")
        .output()
        .unwrap_or_else(|e| panic!("{}: {e}", nvcc.display()));
    if !output.status.success() {
        panic!(
            "{} failed on {}:\n{}{}",
            nvcc.display(),
            source.display(),
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let names = kernel_list::names_in(&String::from_utf8_lossy(&output.stderr));
    let lines: String = names.iter().map(|name| format!("{name}\n")).collect();
    write(&names_of(fatbin), lines.as_bytes());
    std::fs::rename(&unfinished, fatbin).unwrap_or_else(|e| panic!("{}: {e}", fatbin.display()));
}

/// The arguments of nvcc for a source whose text and headers are `files`.
fn arguments(files: &[Vec<u8>]) -> Vec<String> {
    let fixed = "-std=c++17 -O3 --fatbin --compress-mode=size -Werror all-warnings";
    let mut arguments: Vec<String> = fixed.split(' ').map(str::to_string).collect();
    arguments.push("-I.".to_string()); // of csrc
                                       // ptxas says which kernels it compiles; see `kernel_list`.
    arguments.extend(["-Xptxas", "-v"].map(str::to_string));
    for (ptx, code) in targets(&archs(), files) {
        arguments.push("-gencode".to_string());
        arguments.push(format!("arch=compute_{ptx},code={code}"));
    }
    if let Some(flags) = variable("XSERV_NVCC_FLAGS") {
        arguments.extend(flags.split_whitespace().map(str::to_string));
    }
    arguments
}

/// Returns for what a source whose text and headers are `files` is compiled: versions of PTX, and
/// the code that is made of each. Nothing is made twice: of one PTX, machine code for a chip runs
/// on later ones of its generation too, and what uses no instructions of Hopper alone shares its
/// PTX with later generations.
fn targets(archs: &[String], files: &[Vec<u8>]) -> Vec<(String, String)> {
    let texts: Vec<_> = files.iter().map(|file| String::from_utf8_lossy(file)).collect();
    let has_features = texts.iter().any(|text| text.contains(FEATURE_CHECK));
    let mut numbers: Vec<u32> = archs.iter().filter_map(|arch| arch.parse().ok()).collect();
    numbers.sort_unstable();
    let mut targets = Vec::new();
    let mut made = Vec::new();
    for number in numbers {
        let ptx = ptx_for(number, &texts);
        let generation = if JETSON.contains(&number) { number } else { number / 10 };
        if !made.contains(&(ptx, generation)) {
            made.push((ptx, generation));
            targets.push((ptx.to_string(), format!("sm_{number}")));
        }
    }
    for arch in archs.iter().filter(|arch| arch.parse::<u32>().is_err()) {
        let target = match arch.strip_prefix("ptx") {
            Some(number) => (number.to_string(), format!("compute_{number}")),
            None if arch == "90a" && !has_features => ("90".to_string(), "sm_90".to_string()),
            None => (arch.clone(), format!("sm_{arch}")),
        };
        if !targets.contains(&target) {
            targets.push(target);
        }
    }
    targets
}

/// The version of PTX of which machine code for `target`, such as 86, is made.
fn ptx_for(target: u32, texts: &[impl AsRef<str>]) -> u32 {
    let mut versions = PTX_VERSIONS.to_vec();
    for text in texts {
        for text in text.as_ref().split(VERSION_CHECK).skip(1) {
            let digits = text.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
            versions.extend(digits.parse::<u32>().map(|number| number / 10));
        }
    }
    versions.into_iter().filter(|&version| version <= target).max().unwrap_or(target)
}

/// Returns the targets to compile for, such as `90a` and `ptx90`.
fn archs() -> Vec<String> {
    let archs = variable("XSERV_CUDA_ARCHS").unwrap_or_else(|| ALL_ARCHS.to_string());
    archs.split(',').map(str::trim).filter(|arch| !arch.is_empty()).map(str::to_string).collect()
}

fn find_nvcc() -> Option<PathBuf> {
    if let Some(nvcc) = variable("NVCC") {
        return (nvcc != "none").then(|| PathBuf::from(nvcc));
    }
    let root = PathBuf::from(variable("CARGO_MANIFEST_DIR").unwrap_or_default());
    let mut folders: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"]
        .iter()
        .filter_map(|name| variable(name))
        .map(|v| Path::new(&v).join("bin"))
        .collect();
    folders.push(root.join(".cuda/nvidia/cu13/bin"));
    folders.extend(
        variable("PATH").iter().flat_map(|path| std::env::split_paths(path).collect::<Vec<_>>()),
    );
    folders.push(PathBuf::from("/usr/local/cuda/bin"));
    folders.into_iter().map(|folder| folder.join("nvcc")).find(|path| path.is_file())
}

fn version(nvcc: &Path) -> String {
    let output = Command::new(nvcc).arg("--version").output();
    output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default()
}

/// Adds the files below a folder with an extension.
fn files(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for path in std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
    {
        if path.is_dir() {
            files(&path, extension, found);
        } else if path.extension().is_some_and(|e| e == extension) {
            found.push(path);
        }
    }
}

/// Returns the name of a source in the library: its path without `csrc/ops/` and the extension.
fn key(source: &Path, folder: &Path) -> String {
    let path = source.strip_prefix(folder).unwrap_or(source).with_extension("");
    path.strip_prefix("ops").unwrap_or(&path).to_string_lossy().into_owned()
}

/// Returns an environment variable that is set and not empty.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn write(path: &Path, content: &[u8]) {
    std::fs::write(path, content).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}
