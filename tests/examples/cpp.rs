//! xserv.hpp: alone, in the example, and in a program that tries all of it.

use crate::support::*;

#[test]
fn header_compiles_alone() {
    let folder = work_folder("hpp");
    std::fs::write(folder.join("alone.cpp"), "#include <xserv.hpp>\n").expect("a source file");
    let include = format!("-I{}", repository().join("include").display());
    for standard in ["-std=c++17", "-std=c++20"] {
        run(command(cxx())
            .args([standard, "-Wshadow", "-Wconversion", "-fsyntax-only", &include])
            .args(WARNINGS)
            .arg(folder.join("alone.cpp")));
    }
}

#[test]
fn example_generates() {
    let Some(cmake) = cmake() else { return };
    let build = work_folder("cpp-build-tree");
    let library = format!("-DXSERV_LIBDIR={}", library_folder().display());
    cmake_build(cmake, &repository().join("examples/cpp"), &build, &[library]);
    let printed = run(command(build.join("generate")).arg(model()).arg("Once upon a time"));
    assert!(printed.stdout.trim().len() > 10, "too little text: {:?}", printed.stdout);
    let missing = outcome(command(build.join("generate")).arg("/no/such/folder"));
    assert_eq!(missing.code, Some(1));
    assert!(missing.stderr.contains("XSERV_STATUS_NOT_FOUND"), "{}", missing.stderr);
}

#[test]
fn everything_in_the_header_works() {
    let program = work_folder("hpp-program").join("xserv_hpp");
    let source = repository().join("tests/examples/xserv_hpp.cpp");
    // The sanitizers watch the header's side: what it frees, and how often.
    let flags = ["-std=c++17", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    build_program(&cxx(), &[source], &flags, &program);
    run(command(&program).arg(model()).env("LD_LIBRARY_PATH", staged_library()));
}
