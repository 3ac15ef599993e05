//! xserv.hpp: alone, against the C headers, in the examples, and in a program that tries all of it.

use std::collections::BTreeSet;
use std::path::Path;

use crate::support::*;

/// The warnings under which the header is silent, in a program that is compiled with them.
const STRICT: [&str; 5] =
    ["-Wconversion", "-Wsign-conversion", "-Wshadow", "-Wold-style-cast", "-fsyntax-only"];

/// C++17, 20 and 23.
const STANDARDS: [&str; 3] = ["-std=c++17", "-std=c++20", "-std=c++2b"];

/// Returns the C++ compilers that are installed, each once, whatever names it has.
fn compilers() -> Vec<String> {
    let file = |name: &str| {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let named = std::env::split_paths(&path).map(|folder| folder.join(name));
        let file = named.into_iter().find(|file| file.is_file())?;
        std::fs::canonicalize(file).ok()
    };
    let mut found = vec![cxx()];
    for name in ["g++", "clang++"].into_iter().filter(|name| have(name)) {
        if found.iter().all(|other| file(other) != file(name)) {
            found.push(name.to_string());
        }
    }
    found
}

fn compiles_without_warnings(source: &Path) {
    let include = format!("-I{}", repository().join("include").display());
    for compiler in compilers() {
        for standard in STANDARDS {
            run(command(&compiler)
                .args([standard, &include])
                .args(STRICT)
                .args(WARNINGS)
                .arg(source));
        }
    }
}

#[test]
fn header_compiles_alone() {
    let source = work_folder("hpp").join("alone.cpp");
    std::fs::write(&source, "#include <xserv.hpp>\n#include <xserv.hpp>\n").expect("a source file");
    compiles_without_warnings(&source);
}

#[test]
fn header_is_silent_where_it_is_used() {
    // Templates are compiled where they are used.
    compiles_without_warnings(&repository().join("tests/examples/xserv_hpp.cpp"));
    compiles_without_warnings(&repository().join("examples/cpp/kernels.cpp"));
}

fn read(path: &str) -> String {
    std::fs::read_to_string(repository().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Returns the text of a C or C++ source without its comments.
fn without_comments(source: &str) -> String {
    let mut code = String::new();
    for (index, part) in source.split("/*").enumerate() {
        let part = if index == 0 { part } else { part.split_once("*/").expect("an end").1 };
        code += part;
    }
    code.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
}

/// Returns the names in a text that begin with xserv_ and are called or declared, in their order.
fn functions(code: &str) -> Vec<&str> {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let mut found = Vec::new();
    for (start, _) in code.match_indices("xserv_") {
        let before = code[..start].chars().next_back();
        let name = &code[start..];
        let end = name.find(|c| !is_name(c)).unwrap_or(name.len());
        if !before.is_some_and(is_name)
            && name[end..].starts_with('(')
            && !found.contains(&&name[..end])
        {
            found.push(&name[..end]);
        }
    }
    found
}

/// Whether a text has a word, and not only as a part of another.
fn has_word(text: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.match_indices(word).any(|(start, _)| {
        let (before, after) = (&text[..start], &text[start + word.len()..]);
        !before.ends_with(is_part) && !after.starts_with(is_part)
    })
}

#[test]
fn every_operator_has_a_form_in_cpp() {
    let (c, cpp) = (
        without_comments(&read("include/xserv_ops.h")),
        without_comments(&read("include/xserv.hpp")),
    );
    let tests = without_comments(&read("tests/examples/xserv_hpp.cpp"));
    let context = cpp.split_once("class Context {").expect("the class").1;
    let operators = |code| -> Vec<String> {
        let named = functions(code).into_iter().filter(|name| name.starts_with("xserv_op_"));
        named.map(|name| name.trim_start_matches("xserv_op_").to_string()).collect()
    };
    let expected = operators(&c);
    assert!(expected.len() > 15, "{expected:?}");
    assert_eq!(
        operators(context),
        expected,
        "not every operator, or not in the order of xserv_ops.h"
    );
    for name in &expected {
        assert!(context.contains(&format!("  void {name}(")), "Context has no {name}()");
        assert!(tests.contains(&format!("context.{name}(")), "xserv_hpp.cpp does not try {name}()");
    }
}

#[test]
fn every_function_has_a_form_in_cpp() {
    let cpp = without_comments(&read("include/xserv.hpp"));
    let mut expected = BTreeSet::new();
    for header in ["include/xserv.h", "include/xserv_ops.h"] {
        let code = without_comments(&read(header));
        expected.extend(functions(&code).into_iter().map(String::from));
    }
    assert!(expected.len() > 70, "{expected:?}");
    let used: BTreeSet<&str> = functions(&cpp).into_iter().collect();
    let missing: Vec<&String> = expected
        .iter()
        // Every _init is behind a _default, and a result's text in its info; a Deleter frees.
        .filter(|name| !name.ends_with("_init") && *name != "xserv_result_text")
        .filter(|name| {
            let is_freed = name.ends_with("_free") && has_word(&cpp, name);
            !(used.contains(name.as_str()) || is_freed)
        })
        .collect();
    assert!(missing.is_empty(), "xserv.hpp has no form of {missing:?}");
}

#[test]
fn every_option_can_be_set_in_cpp() {
    let c = without_comments(&(read("include/xserv.h") + &read("include/xserv_ops.h")));
    let cpp = without_comments(&read("include/xserv.hpp"));
    for (kind, class) in [
        ("load_options", "class LoadOptions"),
        ("request", "class Request"),
        ("submit_options", "class SubmitOptions"),
        ("logits_options", "class Model"),
        ("score_options", "class ScoreOptions"),
        ("tokenize_options", "class Model"),
        ("chat_options", "class Model"),
        ("context_options", "class ContextOptions"),
        ("gemm_options", "class GemmOptions"),
        ("attention_options", "class AttentionOptions"),
        ("grad_check_options", "class GradCheckOptions"),
    ] {
        let start = c.split_once(&format!("typedef struct xserv_{kind} {{")).expect(kind).1;
        let fields = start.split_once('}').expect("an end").0;
        let fields = fields.split(';').filter_map(|field| {
            let name = field.trim().split('[').next()?.rsplit([' ', '*']).next()?;
            let is_set = !["", "struct_size"].contains(&name) && !name.starts_with("reserved");
            is_set.then_some(name)
        });
        let fields: Vec<&str> = fields.collect();
        assert!(fields.len() > 1, "{kind}: {fields:?}");
        let after = cpp.split_once(&format!("{class} {{")).expect(class).1;
        // With the function of the model or the context that takes them.
        let users = match kind {
            "request" | "load_options" | "submit_options" => cpp.as_str(),
            "attention_options" => after,
            _ => after.split_once("\n};").expect("an end").0,
        };
        for field in fields {
            assert!(
                has_word(users, &format!("raw_.{field}"))
                    || has_word(users, &format!("raw.{field}"))
                    || has_word(users, &format!("options.{field}"))
                    || has_word(users, &format!("raw_options.{field}")),
                "{class} does not set {field} of xserv_{kind}"
            );
        }
    }
}

/// Programs that must not compile, as the body of a function, and what the compiler says of them,
/// in one error.
const REFUSED: &[(&str, &str)] = &[
    // Callbacks: the int of a printf would stop the generation when it is 0.
    ("model.generate(request, [](std::string_view text) { return text.size(); });", "xserv: the callback of generate() takes"),
    ("model.generate(request, [](int) { return true; });", "xserv: the callback of generate() takes"),
    ("model.generate(request, nullptr);", "xserv: the callback of generate() takes"),
    ("options.progress([](std::string) {});", "xserv: progress() takes"),
    ("options.progress([](float) { return 1; });", "xserv: progress() takes"),
    ("options.log([](const char *) {});", "xserv: log() takes"),
    ("options.log([own = std::make_unique<int>(1)](xserv_log_level, const char *, const char *) {});", "copyable"),
    ("xserv::SubmitOptions().wake([](int) {});", "xserv: wake() takes"),
    ("xserv::self_test({}, [](int) {});", "xserv: the report of self_test() takes"),
    ("xserv::grad_check(values, values, [](float) { return 1.0; });", "xserv: the loss of grad_check() takes"),
    // These would dangle.
    ("std::string_view text = model.generate(request).text();", "deleted"),
    ("std::string_view text(model.generate(request).text(1));", "deleted"),
    ("const auto &info = model.generate(request).info();", "deleted"),
    ("auto sample = model.generate(request).sample(0);", "deleted"),
    ("auto info = xserv::inspect(\"x\").info();", "deleted"),
    ("auto info = xserv::Model(\"x\").info();", "deleted"),
    ("auto view = context.tensor<float>({2}).view();", "deleted"),
    ("xserv::TensorView view = context.tensor<float>({2});", "deleted"),
    ("auto tensor = xserv::TensorView(values, {4}).get();", "deleted"),
    ("xserv::ConstTensorView view(std::vector<float>(4), {4});", "a view of a temporary container would dangle"),
    ("xserv::ConstTensorView view = std::vector<float>(4);", "a view of a temporary container would dangle"),
    // Tensors.
    ("const std::vector<float> fixed(4); xserv::TensorView view(fixed, {4});", "this memory is const"),
    ("const float *fixed = values.data(); xserv::TensorView view(fixed, {4});", "this memory is const"),
    ("std::vector<double> doubles(4); xserv::TensorView view(doubles, {4});", "a tensor has elements of float"),
    ("context.tensor<char>({4});", "a tensor has elements of float"),
    ("xserv::ConstTensorView view(values, {4}); context.softmax(view, view);", "TensorView"),
    // One owner.
    ("xserv::Model copy = model;", "deleted"),
];

/// The same things as they are meant.
const ACCEPTED: &str = "
    model.generate(request, [](std::string_view) {});
    model.generate(request, [](const xserv::TokenEvent &) { return true; });
    options.progress([](float) {}).progress(nullptr).log(nullptr);
    options.log([](xserv_log_level, const char *, std::string_view) {});
    xserv::SubmitOptions().wake([] {}).wake(nullptr);
    std::string text = model.generate(request).text();
    const auto result = model.generate(request);
    const auto &info = result.info();
    const auto tensor = context.tensor<float>({2});
    xserv::TensorView view = tensor, other(values, {4});
    xserv::ConstTensorView fixed = view;
    context.softmax(fixed, other);
    (void)info;
";

#[test]
fn mistakes_do_not_compile() {
    let folder = work_folder("hpp-mistakes");
    let include = format!("-I{}", repository().join("include").display());
    for compiler in compilers() {
        let compile = |name: String, body: &str| {
            let source = folder.join(name);
            let program = format!(
                "#include <xserv.hpp>\nvoid f(xserv::Model &model, xserv::Request &request, \
                 xserv::LoadOptions &options, xserv::Context &context, std::vector<float> &values);\n\
                 void f(xserv::Model &model, xserv::Request &request, xserv::LoadOptions &options, \
                 xserv::Context &context, std::vector<float> &values) {{\n  {body}\n  \
                 (void)model, (void)request, (void)options, (void)context, (void)values;\n}}\n"
            );
            std::fs::write(&source, program).expect("a source file");
            outcome(command(&compiler).args(["-std=c++17", "-fsyntax-only", &include]).arg(&source))
        };
        let right = compile("right.cpp".into(), ACCEPTED);
        assert_eq!(right.code, Some(0), "{compiler}: {}", right.stderr);
        for (number, (body, message)) in REFUSED.iter().enumerate() {
            let wrong = compile(format!("{number}.cpp"), body);
            assert_ne!(wrong.code, Some(0), "{compiler} compiled: {body}");
            let errors: Vec<&str> =
                wrong.stderr.lines().filter(|line| line.contains("error: ")).collect();
            let said = &wrong.stderr;
            assert_eq!(errors.len(), 1, "{compiler} says more of: {body}\n{said}");
            assert!(errors[0].contains(message), "{compiler} says of: {body}\n{said}");
        }
    }
}

#[test]
fn examples_run() {
    let Some(cmake) = cmake() else { return };
    let build = work_folder("cpp-build-tree");
    let library = format!("-DXSERV_LIBDIR={}", library_folder().display());
    cmake_build(cmake, &repository().join("examples/cpp"), &build, &[library]);
    let printed = run(command(build.join("generate")).arg(model()).arg("Once upon a time"));
    assert!(printed.stdout.trim().len() > 10, "too little text: {:?}", printed.stdout);
    let missing = outcome(command(build.join("generate")).arg("/no/such/folder"));
    assert_eq!(missing.code, Some(1));
    assert!(missing.stderr.contains("XSERV_STATUS_NOT_FOUND"), "{}", missing.stderr);

    // On the CPU, and wherever there is something better.
    for arguments in [&["cpu"][..], &[]] {
        let computed = run(command(build.join("kernels")).args(arguments));
        assert_eq!(computed.stdout.matches(" ok\n").count(), 5, "{}", computed.stdout);
    }
    let refused = outcome(command(build.join("kernels")).arg("tpu"));
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);

    let server = build.join("server");
    if !server.is_file() {
        return skip("the example server", "cpp-httplib or nlohmann-json is not installed");
    }
    let client = repository().join("tests/examples/cpp_server.py");
    let said = run(command("python3").arg(client).arg(server).arg(model())).stdout;
    assert_eq!(said.matches(" ok\n").count(), 5, "{said}");
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
