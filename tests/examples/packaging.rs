//! Packages that are passed on: pip install from a checkout, the wheel, the tarball; and how the
//! Python package finds the library.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::support::*;

/// Returns the library of this test run, without what debuggers need: it is copied and packed many
/// times.
fn library() -> PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        let file = work_folder("packaging-library").join("libxserv.so");
        fs::copy(library_folder().join("libxserv.so"), &file).expect("the library can be copied");
        if have("strip") {
            run(command("strip").arg("--strip-debug").arg(&file));
        }
        file
    })
    .clone()
}

/// Returns a program that sees none of this machine's libraries, and none of the settings that name
/// one.
fn alone(program: impl AsRef<std::ffi::OsStr>, folder: &Path) -> Command {
    let mut command = command(program);
    command.current_dir(folder).env("HOME", folder).env("PIP_DISABLE_PIP_VERSION_CHECK", "1");
    for variable in ["XSERV_LIBRARY", "CARGO_TARGET_DIR", "PYTHONPATH", "PIP_TARGET", "PIP_USER"] {
        command.env_remove(variable);
    }
    command
}

/// Returns a folder with what a checkout has for Python, but no library.
fn checkout(folder: &Path) -> PathBuf {
    let root = folder.join("checkout");
    for path in ["examples", "include"] {
        fs::create_dir_all(root.join(path)).expect("a folder");
    }
    for path in ["examples/python", "include/xserv.h", "LICENSE"] {
        run(command("cp").arg("-r").arg(repository().join(path)).arg(root.join(path)));
    }
    root
}

fn put_library(file: &Path) {
    fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
    fs::copy(library(), file).expect("the library can be copied");
}

/// Returns a new virtual environment's Python. None, with the reason printed, if it can't be had.
fn virtual_environment(folder: &Path) -> Option<PathBuf> {
    let made = outcome(alone("python3", folder).args(["-m", "venv", "venv"]));
    if made.code != Some(0) {
        skip("what needs a virtual environment", &(made.stdout + &made.stderr));
        return None;
    }
    Some(folder.join("venv/bin/python"))
}

fn pip_install(python: &Path, folder: &Path) -> Command {
    let mut pip = alone(python, folder);
    pip.args(["-m", "pip", "install", "--no-index", "--no-deps", "--force-reinstall"]);
    pip
}

/// Returns the library that a Python program loads when it imports the package.
fn loaded_library(python: &Path, folder: &Path, path: Option<&Path>) -> PathBuf {
    let program = "import xserv\n\
                   names = {line.split()[-1] for line in open('/proc/self/maps') if 'libxserv.so' in line}\n\
                   print(*names, sep='\\n')";
    let mut python = alone(python, folder);
    python.args(["-B", "-c", program]).envs(path.map(|path| ("PYTHONPATH", path)));
    PathBuf::from(run(&mut python).stdout.trim())
}

/// Every file below a folder but compiled Python.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true if path.ends_with("__pycache__") => {}
            true => found.extend(files_below(&path)),
            false => found.push(path),
        }
    }
    found.sort();
    found
}

/// Returns the platform tag that binutils' view of the library asks for.
fn expected_platform() -> Option<String> {
    if !have("objdump") {
        skip("the platform tag by objdump", "objdump is not installed");
        return None;
    }
    let symbols = run(command("objdump").arg("-T").arg(library())).stdout;
    let newest = symbols
        .split("GLIBC_2.")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u32>().ok())
        .max()
        .expect("a version");
    Some(format!("manylinux_2_{}_{}", newest.max(17), std::env::consts::ARCH))
}

/// The first Python program of README.md, from a folder where its model is.
fn run_the_readme(python: &Path, folder: &Path) {
    let text = fs::read_to_string(repository().join("README.md")).expect("README.md");
    let program = text.split("\n```python\n").nth(1).and_then(|rest| rest.split("\n```").next());
    let models = folder.join("examples/models");
    fs::create_dir_all(&models).expect("a folder");
    symlink(model(), models.join("tiny-qwen3")).expect("a link");
    let said = run(alone(python, folder).arg("-c").arg(program.expect("a program"))).stdout;
    assert!(said.len() > 100, "{said}");
}

#[test]
fn pip_takes_the_library_of_a_checkout_along() {
    let folder = work_folder("packaging-pip");
    let Some(python) = virtual_environment(&folder) else { return };
    let root = checkout(&folder);
    let package = root.join("examples/python");
    let before = files_below(&root);

    // One sentence says what is missing, and where it should be.
    let built = root.join("target/release/libxserv.so");
    let refused = outcome(pip_install(&python, &folder).arg(&package));
    assert_ne!(refused.code, Some(0));
    let sentence = format!("There is no {}: run `cargo build --release`", built.display());
    assert!(refused.stderr.contains(&sentence), "{}", refused.stderr);
    assert!(!refused.stderr.contains("Traceback"), "{}", refused.stderr);
    let mut misled = pip_install(&python, &folder);
    let misled = outcome(misled.arg(&package).env("XSERV_LIBRARY", "/no/such/file"));
    assert!(misled.stderr.contains("no file /no/such/file, which XSERV_LIBRARY names"));
    assert!(!misled.stderr.contains("Traceback"), "{}", misled.stderr);

    put_library(&built);
    run(pip_install(&python, &folder).arg(&package));
    fs::remove_dir_all(root.join("target")).expect("the build can be removed");
    assert_eq!(files_below(&root), before, "the installation left files in the checkout");
    let site = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let site = PathBuf::from(run(alone(&python, &folder).args(["-c", site])).stdout.trim());
    assert_eq!(loaded_library(&python, &folder, None), site.join("xserv/libxserv.so"));
    let version = env!("CARGO_PKG_VERSION").replace("-dev", ".dev0");
    let info = site.join(format!("xserv-{version}.dist-info"));
    let wheel = fs::read_to_string(info.join("WHEEL")).expect("WHEEL");
    if let Some(platform) = expected_platform() {
        assert!(wheel.contains(&format!("\nTag: py3-none-{platform}\n")), "{wheel}");
    }
    assert!(info.join("licenses/LICENSE").is_file());
    run_the_readme(&python, &folder);
    run(alone(&python, &folder).args(["-m", "pip", "check"]));

    // Cargo's folder may be elsewhere; an installation for development follows the checkout.
    let target = folder.join("elsewhere");
    put_library(&target.join("release/libxserv.so"));
    run(pip_install(&python, &folder).arg(&package).env("CARGO_TARGET_DIR", &target));
    assert_eq!(loaded_library(&python, &folder, None), site.join("xserv/libxserv.so"));
    put_library(&built);
    run(pip_install(&python, &folder).arg("--editable").arg(&package));
    assert_eq!(loaded_library(&python, &folder, None), built);
    assert!(!site.join("xserv").exists());
}

#[test]
fn the_package_looks_for_the_library_where_it_is_installed() {
    let folder = work_folder("packaging-places");
    run(alone("python3", &folder).args(["-m", "venv", "--without-pip", "venv"]));
    let python = folder.join("venv/bin/python");
    let root = checkout(&folder);
    let package = root.join("examples/python");

    // An ABI that no library has, so that nothing of this machine is found.
    let program = "import sys; sys.path.insert(0, sys.argv[1]); import _find; _find.load(77, {})";
    let find = || {
        let mut find = alone(&python, &folder);
        find.args(["-B", "-c", program]).arg(package.join("xserv"));
        find
    };
    fs::write(package.join("xserv/libxserv.so.77"), "no library").expect("a file");
    let said = outcome(&mut find()).stderr;
    let listed: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("  /")).collect();
    let places = [
        package.join("xserv/libxserv.so: no such file"),
        package.join("xserv/libxserv.so.77: "),
        root.join("target/release/libxserv.so: no such file"),
        root.join("target/debug/libxserv.so: no such file"),
        folder.join("venv/lib/libxserv.so.77: no such file"),
        folder.join(".local/lib/libxserv.so.77: no such file"),
        PathBuf::from("/usr/local/lib/libxserv.so.77: no such file"),
    ];
    let expected: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
    let mut listed = listed.into_iter().filter(|line| line.contains("libxserv.so"));
    for place in &expected {
        let line = listed.next().unwrap_or_else(|| panic!("{place} is not listed:\n{said}"));
        assert!(format!("/{line}").starts_with(place), "{line} is not {place}");
    }
    assert!(said.contains("\n  libxserv.so.77: cannot open"), "{said}");
    assert!(said.contains("cargo build --release") && said.contains("XSERV_LIBRARY"), "{said}");

    // If a library was chosen, nothing else is tried.
    let chosen = outcome(find().env("XSERV_LIBRARY", library())).stderr;
    assert!(chosen.contains("has ABI version 1, not 77"), "{chosen}");
    assert!(!chosen.contains("/usr/local/lib"), "{chosen}");

    // Each place is found, and the ones before it come first. One that can't be used is passed over.
    for place in [".local/lib/libxserv.so.1", "venv/lib/libxserv.so.1"] {
        put_library(&folder.join(place));
        let loaded = loaded_library(&python, &folder, Some(&package));
        assert_eq!(loaded, folder.join(place));
    }
    fs::write(package.join("xserv/libxserv.so"), "no library").expect("a file");
    for place in ["target/debug/libxserv.so", "target/release/libxserv.so"] {
        put_library(&root.join(place));
        assert_eq!(loaded_library(&python, &folder, Some(&package)), root.join(place));
    }
    put_library(&package.join("xserv/libxserv.so"));
    let loaded = loaded_library(&python, &folder, Some(&package));
    assert_eq!(loaded, package.join("xserv/libxserv.so"));
}

/// Makes something with a command of csrc/packaging, twice, and returns its path: the only file
/// beside its checksum.
fn made_twice_the_same(script: &str, folder: &Path) -> PathBuf {
    let make = |out: &str| {
        let mut make = command(repository().join("csrc/packaging").join(script));
        make.arg("--library").arg(library()).arg("--out").arg(folder.join(out));
        let path = PathBuf::from(run(&mut make).stdout.trim());
        let listed =
            run(command("sha256sum").args(["--check", "SHA256SUMS"]).current_dir(folder.join(out)));
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        assert_eq!(listed.stdout, format!("{name}: OK\n"));
        (path.clone(), fs::read(&path).expect("what was made"))
    };
    let (path, first) = make("once");
    let (_, second) = make("twice");
    assert!(first == second, "{} differs when it is made again", path.display());
    path
}

#[test]
fn a_wheel_has_the_library_and_the_licences() {
    let folder = work_folder("packaging-wheel");
    let wheel = made_twice_the_same("wheel", &folder);
    let version = env!("CARGO_PKG_VERSION").replace("-dev", ".dev0");
    let name = wheel.file_name().expect("a name").to_string_lossy().into_owned();
    if let Some(platform) = expected_platform() {
        assert_eq!(name, format!("xserv-{version}-py3-none-{platform}.whl"));
    }
    let Some(python) = virtual_environment(&folder) else { return };
    run(pip_install(&python, &folder).arg(&wheel));
    run_the_readme(&python, &folder);
    let program = "from importlib.metadata import files\n\
                   print(*(file for file in files('xserv')), sep='\\n')";
    let files = run(alone(&python, &folder).args(["-c", program])).stdout;
    for file in ["xserv/libxserv.so", "xserv/py.typed", "xserv_server/app.py"] {
        assert!(files.lines().any(|line| line == file), "no {file} in {files}");
    }
    // The server's command and what it needs besides.
    let program = "from importlib.metadata import metadata\n\
                   print(metadata('xserv').get_all('Provides-Extra'))\n\
                   print(*metadata('xserv').get_all('Requires-Dist'), sep='\\n')";
    let described = run(alone(&python, &folder).args(["-c", program])).stdout;
    assert!(described.starts_with("['server']\n"), "{described}");
    assert!(described.contains("\nfastapi>="), "{described}");
    assert!(described.lines().skip(1).all(|line| line.ends_with("; extra == \"server\"")));
    let said = outcome(&mut alone(folder.join("venv/bin/xserv-server"), &folder));
    assert!(said.stderr.contains("pip install 'xserv[server]'"), "{}", said.stderr);
    let read = "import sys; from importlib.metadata import distribution as d\n\
                print(d('xserv').read_text('licenses/' + sys.argv[1]))";
    let text = |name: &str| run(alone(&python, &folder).args(["-c", read, name])).stdout;
    assert!(text("LICENSE").contains("MIT"));
    assert!(
        text("THIRD-PARTY-NOTICES.txt").contains("tokenizers 0."),
        "the packages that the library contains"
    );
}

#[test]
fn a_tarball_serves_programs() {
    let folder = work_folder("packaging-tarball");
    let tarball = made_twice_the_same("tarball", &folder);
    run(command("tar").arg("-xzf").arg(&tarball).current_dir(&folder));
    let name = format!("xserv-{}-linux-{}", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH);
    let root = folder.join(name);
    let program = folder.join("program");
    let source = "#include <stdio.h>\n#include <xserv.h>\nint main(void) { return puts(xserv_version()) < 0; }\n";
    fs::write(folder.join("program.c"), source).expect("a source file");
    run(command(cc())
        .arg(folder.join("program.c"))
        .arg("-I")
        .arg(root.join("include"))
        .arg("-L")
        .arg(root.join("lib"))
        .args(["-lxserv", "-o"])
        .arg(&program));
    let said = run(command(&program).env("LD_LIBRARY_PATH", root.join("lib"))).stdout;
    assert_eq!(said.trim(), env!("CARGO_PKG_VERSION"));
    for file in ["lib/cmake/xserv/xservConfig.cmake", "lib/pkgconfig/xserv.pc", "include/xserv.hpp"]
    {
        assert!(root.join(file).is_file(), "no {file}");
    }
}

#[test]
fn what_does_not_fit_is_not_packed() {
    let folder = work_folder("packaging-refused");
    let source = folder.join("other.c");
    fs::write(&source, "int other(void) { return 0; }\n").expect("a source file");
    let other = folder.join("libxserv.so");
    run(command(cc()).args(["-shared", "-fPIC"]).arg(&source).arg("-o").arg(&other));
    for script in ["wheel", "tarball"] {
        let mut make = command(repository().join("csrc/packaging").join(script));
        let refused =
            outcome(make.arg("--library").arg(&other).arg("--out").arg(folder.join("out")));
        assert_eq!(refused.code, Some(1));
        assert!(
            refused.stderr.contains("does not export what the headers declare"),
            "{}",
            refused.stderr
        );
        assert!(!folder.join("out").exists());
    }
}

#[test]
fn the_platform_is_that_of_what_a_library_needs() {
    let folder = work_folder("packaging-platform");
    let compile = |name: &str, source: &str, flags: &[&str]| {
        let file = folder.join(name).with_extension("c");
        fs::write(&file, source).expect("a source file");
        let library = folder.join(name);
        run(command(cc())
            .args(["-shared", "-fPIC", "-L", "."])
            .arg(&file)
            .args(flags)
            .arg("-o")
            .arg(&library)
            .current_dir(&folder));
        library
    };
    let program = "import sys, pathlib, xserv_build as build\n\
                   print(build.platform_of(pathlib.Path(sys.argv[1])))";
    let platform = |library: &Path| {
        let mut python = alone("python3", &folder);
        let path = repository().join("examples/python");
        outcome(python.args(["-B", "-c", program]).arg(library).env("PYTHONPATH", path))
    };
    let arch = std::env::consts::ARCH;
    let nothing = compile("libnothing.so", "int nothing(void) { return 0; }\n", &[]);
    assert_eq!(platform(&nothing).stdout.trim(), format!("manylinux_2_17_{arch}"));
    // It needs a library that only this machine has.
    let source = "int nothing(void);\nint more(void) { return nothing(); }\n";
    let more = compile("libmore.so", source, &["-lnothing"]);
    assert_eq!(platform(&more).stdout.trim(), format!("linux_{arch}"));
    let refused = platform(&folder.join("libmore.c"));
    assert!(refused.stderr.contains("libmore.c is not a shared library"), "{}", refused.stderr);
    assert_eq!(refused.stderr.lines().count(), 1);
    if let Some(expected) = expected_platform() {
        assert_eq!(platform(&library()).stdout.trim(), expected);
    }
}
