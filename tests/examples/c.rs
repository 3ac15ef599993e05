//! The C examples: built by CMake against the build tree, and run.

use std::path::PathBuf;
use std::sync::OnceLock;

use crate::support::*;

/// Returns the folder of the programs; None if there is no CMake.
pub fn programs() -> Option<&'static PathBuf> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT
        .get_or_init(|| {
            let cmake = cmake()?;
            let build = work_folder("c-build-tree");
            let library = format!("-DXSERV_LIBDIR={}", library_folder().display());
            cmake_build(cmake, &repository().join("examples/c"), &build, &[library]);
            Some(build)
        })
        .as_ref()
}

#[test]
fn kernels_compute_what_plain_loops_do() {
    let Some(programs) = programs() else { return };
    let on_cpu = run(command(programs.join("kernels")).arg("cpu"));
    assert_eq!(on_cpu.stdout.matches(" ok\n").count(), 6, "{}", on_cpu.stdout);
    // Wherever there is something better.
    let anywhere = run(&mut command(programs.join("kernels")));
    assert_eq!(anywhere.stdout.matches(" ok\n").count(), 6, "{}", anywhere.stdout);
}

#[test]
fn generate_streams_a_completion() {
    let Some(programs) = programs() else { return };
    let arguments = ["Once upon a time", "--max-tokens", "24", "--temperature", "0"];
    let first = run(command(programs.join("generate")).arg(model()).args(arguments));
    assert!(first.stdout.trim().len() > 10, "too little text: {:?}", first.stdout);
    assert!(first.stderr.contains("generated"));
    let threads = ["--threads", "1"];
    let second = run(command(programs.join("generate")).arg(model()).args(arguments).args(threads));
    assert_eq!(first.stdout, second.stdout, "greedy text depends on the number of threads");

    let seeded = ["--chat", "--max-tokens", "40", "--temperature", "1.0", "--seed", "5"];
    let [one, two] = [0, 1].map(|_| {
        run(command(programs.join("generate")).arg(model()).arg("Tell me a story.").args(seeded))
            .stdout
    });
    assert_eq!(one, two, "the same seed gave two texts");
}

#[test]
fn generate_reports_errors() {
    let Some(programs) = programs() else { return };
    let missing = outcome(command(programs.join("generate")).arg("/no/such/folder"));
    assert_eq!(missing.code, Some(1));
    assert!(missing.stderr.contains("XSERV_STATUS_NOT_FOUND"), "{}", missing.stderr);
    assert!(missing.stderr.contains("/no/such/folder"), "{}", missing.stderr);
    for wrong in [&["--max-tokens"][..], &["--max-tokens", "-3"], &["--seed", "x"], &["--what"]] {
        let refused = outcome(command(programs.join("generate")).arg(model()).arg("x").args(wrong));
        assert_eq!(refused.code, Some(2), "{wrong:?}: {}", refused.stderr);
    }
}

#[test]
fn batch_answers_what_generate_answers() {
    let Some(programs) = programs() else { return };
    let questions = ["Hello!", "Tell me a story.", "What is 2 plus 3?", "Show me a fox emoji."];
    let answers = questions.map(|question| {
        let arguments = [question, "--chat", "--max-tokens", "40", "--temperature", "0"];
        run(command(programs.join("generate")).arg(model()).args(arguments)).stdout
    });
    let arguments = ["--max-tokens", "40", "--temperature", "0"];
    let together =
        run(command(programs.join("batch")).arg(model()).args(questions).args(arguments));
    for (question, answer) in questions.iter().zip(&answers) {
        let expected = format!("> {question}\n{}", answer.trim_end());
        assert!(together.stdout.contains(&expected), "no {expected:?} in {}", together.stdout);
    }
    let lines = questions.join("\n");
    let piped =
        run_with_input(command(programs.join("batch")).arg(model()).args(arguments), &lines);
    assert_eq!(piped.stdout.matches("> ").count(), questions.len(), "{}", piped.stdout);
    let samples = ["Tell me a story.", "--samples", "3", "--max-tokens", "8"];
    let several = run(command(programs.join("batch")).arg(model()).args(samples));
    assert_eq!(several.stdout.matches("> Tell").count(), 3, "{}", several.stdout);
}

#[test]
fn chat_answers_lines_from_a_pipe() {
    let Some(programs) = programs() else { return };
    let chat = || {
        let mut chat = command(programs.join("chat"));
        chat.arg(model()).args(["--temperature", "0", "--max-tokens", "120"]);
        chat
    };
    let turns = "Hello!\n\"quotes\", \\ and \ttabs, naïve 🙂\nHello!\n";
    let several = run_with_input(&mut chat(), turns);
    assert_eq!(
        several.stdout.lines().filter(|line| !line.is_empty()).count(),
        3,
        "{}",
        several.stdout
    );
    assert!(!several.stdout.contains("> "), "a prompt is printed though no one types");

    // The earlier conversation matters, unless it is cleared.
    let alone = run_with_input(&mut chat(), "Hello!\n").stdout;
    assert!(several.stdout.starts_with(alone.trim_end()), "the first answers differ");
    let cleared =
        run_with_input(&mut chat(), "Tell me a story.\n/clear\nHello!\n/exit\nHello!\n").stdout;
    assert!(cleared.ends_with(&alone), "{cleared:?} does not end with {alone:?}");

    // A line that can't be sent is reported, and the conversation goes on.
    let broken = outcome_with_input(&mut chat(), b"\xff\xfe\nHello!\n");
    assert_eq!(broken.code, Some(1));
    assert_eq!(broken.stdout, alone);
    assert!(broken.stderr.starts_with("chat: "), "{}", broken.stderr);
}

#[test]
fn every_program_tells_how_to_use_it() {
    let Some(programs) = programs() else { return };
    for name in ["generate", "chat", "batch", "kernels", "bench"] {
        let help = run(command(programs.join(name)).arg("--help"));
        assert!(help.stdout.starts_with(&format!("usage: {name} ")), "{}", help.stdout);
        assert_eq!(help.stderr, "");
        let refused = outcome(command(programs.join(name)).arg("--what"));
        assert_eq!(refused.code, Some(2));
        let sentence = format!("{name}: unknown option --what; --help lists the options\n");
        assert_eq!(refused.stderr, sentence);
    }
}

/// Runs a test of tests/examples/chat_in_terminal.py.
pub fn in_terminal(test: &str, program: PathBuf, model: PathBuf) {
    let script = repository().join("tests/examples/chat_in_terminal.py");
    run(command("python3").arg(script).arg(test).arg(program).arg(model));
}

/// Returns a model with the words of the small one, and 30 times its weights, which are random: a
/// long prompt takes it seconds.
pub fn slow_model() -> PathBuf {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    let make = || {
        let sizes = ["--vocab", "2048", "--layers", "6", "--positions", "32768"];
        let folder =
            crate::random_model::random_model("slow", &[&["qwen3-0.6b"][..], &sizes].concat());
        for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
            std::fs::copy(model().join(file), folder.join(file)).expect("a copy");
        }
        folder
    };
    MADE.get_or_init(make).clone()
}

#[test]
fn ctrl_c_stops_the_answer_and_not_the_program() {
    let Some(programs) = programs() else { return };
    in_terminal("example", programs.join("chat"), model());
}

#[test]
fn ctrl_c_stops_a_prompt() {
    let Some(programs) = programs() else { return };
    in_terminal("example_prompt", programs.join("chat"), slow_model());
}

#[test]
fn json_strings_survive_every_byte() {
    let folder = work_folder("json");
    let sources = [
        repository().join("tests/examples/print_json.c"),
        repository().join("examples/c/common/text_buffer.c"),
    ];
    let include = format!("-I{}", repository().join("examples/c").display());
    let program = folder.join("print_json");
    build_program(
        &cc(),
        &sources,
        &["-std=c11", &include, "-fsanitize=address,undefined"],
        &program,
    );
    let printed = run(command(&program).env("LD_LIBRARY_PATH", staged_library())).stdout;
    let expected: String = (1..=0x7fu8).map(char::from).chain("\0é你🙂\u{2028}".chars()).collect();
    let texts: Vec<String> = serde_json::from_str(&printed).expect("valid JSON");
    assert_eq!(texts, [expected, String::new()], "what was truncated is there");
}
