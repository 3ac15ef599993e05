//! The program xserv: its commands, and the conversation in a terminal.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use crate::c::{in_terminal, slow_model};
use crate::support::*;

const COMMANDS: [&str; 5] = ["chat", "generate", "bench", "inspect", "plan"];

/// Returns the program; None if there is no CMake.
fn program() -> Option<PathBuf> {
    crate::c::programs().map(|programs| programs.join("xserv"))
}

fn xserv(program: &Path, arguments: &[&str]) -> Command {
    let mut xserv = command(program);
    xserv.args(arguments);
    xserv
}

/// Returns the small model's folder as an argument.
fn small() -> String {
    model().to_str().expect("a path").to_string()
}

/// Returns a copy of the small model with another chat template, or without one.
fn with_template(name: &str, template: Option<&str>) -> PathBuf {
    let folder = work_folder(name);
    for entry in fs::read_dir(model()).expect("the model") {
        let entry = entry.expect("a file");
        if entry.file_name() != "chat_template.jinja" {
            fs::copy(entry.path(), folder.join(entry.file_name())).expect("a copy");
        }
    }
    if let Some(template) = template {
        fs::write(folder.join("chat_template.jinja"), template).expect("a template");
    }
    folder
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

#[test]
fn every_command_tells_how_to_use_it() {
    let Some(program) = program() else { return };
    let help = run(&mut xserv(&program, &["--help"])).stdout;
    for name in COMMANDS {
        assert!(help.contains(&format!("\n  {name} ")), "{help}");
        let help = run(&mut xserv(&program, &[name, "--help"]));
        assert!(help.stdout.starts_with(&format!("usage: xserv {name} ")), "{}", help.stdout);
        assert!(help.stdout.lines().all(|line| line.len() <= 100), "{}", help.stdout);
        assert_eq!(help.stderr, "");
    }
    for option in ["--device", "--dtype", "--max-memory", "--context", "--kv-cache-tokens"] {
        for name in ["chat", "generate", "bench", "plan"] {
            let help = run(&mut xserv(&program, &[name, "--help"])).stdout;
            assert!(help.contains(&format!("\n  {option} ")), "{name} has no {option}:\n{help}");
        }
    }
    assert!(help.contains("\n  self-test "), "{help}");
    let version = run(&mut xserv(&program, &["--version"])).stdout;
    assert_eq!(version, format!("xserv {} (ABI 1)\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn mistakes_are_answered_in_a_sentence() {
    let Some(program) = program() else { return };
    let small = small();
    let small = small.as_str();
    let mistakes: [&[&str]; 21] = [
        &[],
        &["talk"],
        &["--what"],
        &["chat"],
        &["generate"],
        &["bench"],
        &["inspect"],
        &["plan"],
        &["chat", small, "--what"],
        &["chat", small, "two"],
        &["chat", small, "--system"],
        &["chat", small, "--temperature", "warm"],
        &["chat", small, "--device", "tpu"],
        &["chat", small, "--thinking=maybe"],
        &["generate", small, "x", "--max-tokens", "-1"],
        &["generate", small, "x", "--json=yes"],
        &["generate", small, "x", "--file", "y"],
        &["generate", small, "x", "--system", "y"],
        &["inspect", small, "--device", "cpu"],
        &["plan", small, "--max-memory", "3Q"],
        &["plan", small, "--context", "many"],
    ];
    for arguments in mistakes {
        let refused = outcome(&mut xserv(&program, arguments));
        assert_eq!(refused.code, Some(2), "{arguments:?}: {}", refused.stderr);
        assert_eq!(refused.stderr.lines().count(), 1, "{arguments:?}: {}", refused.stderr);
        assert!(refused.stderr.starts_with("xserv"), "{arguments:?}: {}", refused.stderr);
        assert_eq!(refused.stdout, "");
    }
    for name in COMMANDS {
        let missing: &[&str] = &[name, "/no/such/folder"];
        let failed = outcome(&mut xserv(&program, missing));
        assert_eq!(failed.code, Some(1), "{name}: {}", failed.stderr);
        assert!(failed.stderr.contains("/no/such/folder"), "{name}: {}", failed.stderr);
    }
    // A failed write is a failure of the program.
    for words in ["plan SMALL", "generate SMALL Once --max-tokens 4"] {
        let words = words.replace("SMALL", small);
        let script = format!("{} {words} > /dev/full", program.display());
        let failed = outcome(command("bash").args(["-c", &script]));
        assert_eq!(failed.code, Some(1), "{words}");
        assert!(failed.stderr.contains("standard output"), "{words}: {}", failed.stderr);
    }
}

#[test]
fn the_self_test_tells_of_every_operator() {
    let Some(program) = program() else { return };
    let help = run(&mut xserv(&program, &["self-test", "--help"])).stdout;
    assert!(
        help.starts_with("usage: xserv self-test ") && help.contains("\n  --device "),
        "{help}"
    );
    assert!(help.lines().all(|line| line.len() <= 100), "{help}");
    let short = run(&mut xserv(&program, &["self-test", "--device", "cpu"])).stdout;
    let long = run(&mut xserv(&program, &["self-test", "--device", "cpu", "--verbose"])).stdout;
    for name in ["rms_norm", "gemm", "attention", "top_k"] {
        let line = short.lines().find(|line| line.starts_with(&format!("{name} ")));
        let line = line.unwrap_or_else(|| panic!("{name} is missing in {short}"));
        assert!(line.contains(" ok ") && line.contains("largest error"), "{line}");
        assert!(long.contains(&format!("ok          {name} f32 ")), "{long}");
    }
    assert!(long.lines().count() > short.lines().count() + 200, "{long}");
    let refused = outcome(&mut xserv(&program, &["self-test", "a-model"]));
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    let failed = outcome(&mut xserv(&program, &["self-test", "--device-index", "999999"]));
    assert_eq!(failed.code, Some(1), "{}", failed.stderr);
    assert!(failed.stderr.starts_with("xserv self-test: "), "{}", failed.stderr);
}

#[test]
fn inspect_and_plan_tell_what_the_folder_says() {
    let Some(program) = program() else { return };
    let small = small();
    let found = json(&run(&mut xserv(&program, &["inspect", &small, "--json"])).stdout);
    assert_eq!(found["architecture"], "Qwen3ForCausalLM");
    assert_eq!((&found["supported"], &found["has_chat_template"]), (&true.into(), &true.into()));
    assert_eq!((&found["num_layers"], &found["vocab_size"]), (&6.into(), &2048.into()));
    assert_eq!(found["dtype"], "bf16");
    let table = run(&mut xserv(&program, &["inspect", &small])).stdout;
    assert!(table.contains("\nnum layers              6\n"), "{table}");

    // A folder that can't be run is described too.
    let empty = work_folder("program-empty");
    let empty = empty.to_str().expect("a path");
    let found = json(&run(&mut xserv(&program, &["inspect", empty, "--json"])).stdout);
    assert_eq!(found["supported"], false);
    assert!(found["unsupported_reason"].as_str().is_some_and(|why| why.contains("config.json")));

    let plan = |arguments: &[&str]| {
        let all = [&["plan", &small, "--json", "--device", "cpu"], arguments].concat();
        json(&run(&mut xserv(&program, &all)).stdout)
    };
    let tight = plan(&["--max-memory", "100M", "--context", "1024"]);
    assert_eq!(tight["fits"], true);
    assert_eq!(tight["memory_bytes"], 100 << 20);
    assert_eq!(tight["max_context_tokens"], 1024);
    let total = tight["total_bytes"].as_u64().expect("a number");
    let parts = ["weights_bytes", "workspace_bytes", "kv_cache_bytes"];
    assert_eq!(
        parts.map(|part| tight[part].as_u64().expect("a number")).iter().sum::<u64>(),
        total
    );
    let minimum = tight["minimum_bytes"].to_string();
    assert_eq!(plan(&["--max-memory", &minimum, "--context", "1024"])["fits"], true);
    assert_eq!(plan(&["--max-memory", "1MB"])["fits"], false);
    assert_eq!(plan(&["--kv-cache-tokens=64"])["kv_cache_tokens"], 64);
    assert_eq!(plan(&["--dtype", "f32"])["dtype"], "f32");
    // Nothing but a config is needed to plan for random weights.
    let shape = work_folder("program-config");
    fs::copy(model().join("config.json"), shape.join("config.json")).expect("a copy");
    let shape = shape.to_str().expect("a path");
    let random = ["plan", shape, "--json", "--device", "cpu", "--random"];
    let found = json(&run(&mut xserv(&program, &random)).stdout);
    assert_eq!(found["weights_bytes"], tight["weights_bytes"]);
    assert_eq!(found["has_tokenizer"], false);
    let refused = outcome(&mut xserv(&program, &random[..5]));
    assert_eq!(refused.code, Some(1), "{}", refused.stdout);
    assert!(refused.stderr.contains("model.safetensors"), "{}", refused.stderr);
    let gpu = ["plan", &small, "--device", "cuda", "--max-memory", "8GB", "--json"];
    assert_eq!(json(&run(&mut xserv(&program, &gpu)).stdout)["device"], "cuda");
    // Without a GPU, nobody knows what fits.
    let mut nowhere = xserv(&program, &["plan", &small, "--device", "cuda", "--json"]);
    let found = json(&run(nowhere.env("CUDA_VISIBLE_DEVICES", "")).stdout);
    assert_eq!((&found["fits"], &found["memory_bytes"]), (&Value::Null, &Value::Null));
}

#[test]
fn generate_takes_prompts_from_everywhere() {
    let Some(program) = program() else { return };
    let small = small();
    let greedy = ["--temperature", "0", "--max-tokens", "24"];
    let generate = |arguments: &[&str], input: &str| {
        let all = [&["generate", &small], arguments, &greedy].concat();
        run_with_input(&mut xserv(&program, &all), input).stdout
    };
    let text = generate(&["Once upon a time"], "");
    assert!(text.trim().len() > 10, "{text:?}");
    assert_eq!(generate(&[], "Once upon a time\n"), text);
    let file = work_folder("program-generate").join("prompt");
    fs::write(&file, "Once upon a time").expect("a file");
    assert_eq!(generate(&["--file", file.to_str().expect("a path")], ""), text);
    let dashes = [&["generate", &small][..], &greedy, &["--", "Once upon a time"]].concat();
    assert_eq!(run(&mut xserv(&program, &dashes)).stdout, text);

    let result = json(&generate(&["Once upon a time", "--json"], ""));
    assert_eq!(result["text"].as_str().map(|whole| format!("{whole}\n")), Some(text.clone()));
    assert_eq!(result["finish_reason"], "max_tokens");
    assert_eq!(result["num_tokens"], 24);
    assert_eq!(result["token_ids"].as_array().map(Vec::len), Some(24));

    // The stop text and what comes after it is left out.
    let stop = text.trim().split(' ').nth(3).expect("a word");
    let cut = generate(&["Once upon a time", "--stop", "never said", "--stop", stop], "");
    assert!(text.starts_with(cut.trim_end_matches('\n')) && cut.len() < text.len(), "{cut:?}");

    let answer = generate(&["--chat", "Hello!"], "");
    let other = ["Hello!", "--chat", "--temperature", "0", "--max-tokens", "24"];
    let example = crate::c::programs().expect("the programs").join("generate");
    assert_eq!(answer, run(command(example).arg(&small).args(other)).stdout);
    // A seed makes draws repeatable.
    let draw = || {
        let all = ["generate", &small, "--chat", "Tell me a story.", "--seed", "5", "--top-k=40"];
        run(&mut xserv(&program, &all)).stdout
    };
    assert_eq!(draw(), draw());
}

#[test]
fn chat_answers_lines_from_a_pipe() {
    let Some(program) = program() else { return };
    let small = small();
    let chat = ["chat", &small, "--temperature", "0", "--max-tokens", "120"];
    let alone = run_with_input(&mut xserv(&program, &chat), "Hello!").stdout;
    assert_eq!(alone.lines().count(), 1, "{alone:?}");
    let cleared = "Tell me a story.\n/clear\nHello!\n/exit\nHello!\n";
    let cleared = run_with_input(&mut xserv(&program, &chat), cleared).stdout;
    assert!(cleared.ends_with(&alone), "{cleared:?} does not end with {alone:?}");
    assert!(cleared.len() > alone.len());
    // As the example does.
    let turns = "Hello!\n\"quotes\", \\ and \ttabs, naïve 🙂\nHello!\n";
    let example = crate::c::programs().expect("the programs").join("chat");
    let expected = run_with_input(command(example).args(&chat[1..]), turns).stdout;
    assert_eq!(run_with_input(&mut xserv(&program, &chat), turns).stdout, expected);

    // A line that can't be sent is reported, and the conversation goes on.
    for broken in [&b"\xff\xfe\nHello!\n"[..], b"/fooo\nHello!\n"] {
        let said = outcome_with_input(&mut xserv(&program, &chat), broken);
        assert_eq!(said.code, Some(1));
        assert_eq!(said.stdout, alone);
        assert!(said.stderr.starts_with("xserv chat: "), "{}", said.stderr);
    }
    let longest = format!("{}\n", "word ".repeat(5000));
    let said = outcome_with_input(&mut xserv(&program, &chat), longest + "Hello!\n");
    assert_eq!((said.code, &said.stdout), (Some(1), &alone));
    assert!(said.stderr.contains("it is not sent"), "{}", said.stderr);
}

#[test]
fn chat_needs_a_chat_template() {
    let Some(program) = program() else { return };
    let folder = with_template("program-no-template", None);
    let refused = outcome(command(program).arg("chat").arg(folder));
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("no usable chat template"), "{}", refused.stderr);
    assert!(refused.stderr.contains("xserv generate"), "{}", refused.stderr);
}

#[test]
fn bench_prints_json_lines() {
    let Some(program) = program() else { return };
    let small = small();
    let bench = ["bench", &small, "--prompts", "16", "--gen", "4", "--reps", "1", "--json"];
    let printed = run(&mut xserv(&program, &bench)).stdout;
    let names: Vec<Value> = printed.lines().map(|line| json(line)["metric"].clone()).collect();
    assert!(names.len() > 5 && names.iter().all(Value::is_string), "{printed}");
    assert!(names.contains(&"ttft128_cold_s".into()), "{printed}");
}

macro_rules! in_terminal {
    ($($name:ident: $test:literal, $model:expr;)*) => {$(
        #[test]
        fn $name() {
            if let Some(program) = program() {
                in_terminal($test, program, $model);
            }
        }
    )*};
}

in_terminal! {
    keys_edit_the_line: "editing", model();
    pasted_text_is_one_turn: "paste", model();
    commands_do_not_go_to_the_model: "commands", model();
    ctrl_c_stops_an_answer: "interrupt", model();
    ctrl_c_stops_a_load: "loading", slow_model();
    ctrl_c_stops_a_prompt: "prompt", slow_model();
    ctrl_c_stops_a_prompt_of_generate: "generate", slow_model();
    old_turns_are_dropped_when_the_context_is_full: "context", model();
    the_terminal_is_left_as_it_was: "modes", model();
    a_terminal_without_drawing_gives_lines: "plain", model();
    ctrl_z_suspends_and_fg_continues: "suspend", model();
}

#[test]
fn what_is_thought_is_dimmed() {
    let Some(program) = program() else { return };
    let template = fs::read_to_string(model().join("chat_template.jinja")).expect("a template");
    let opening = "{{- '<|im_start|>assistant\\n' }}";
    assert!(template.contains(opening));
    let opens = template.replace(opening, "{{- '<|im_start|>assistant\\n<think>\\n' }}");
    in_terminal("thinking", program, with_template("program-thinking", Some(&opens)));
}

/// Runs tests/examples/program_parts.c.
fn parts(arguments: &[&str]) -> Outcome {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| {
        let program = work_folder("program-parts").join("program_parts");
        let mut sources = vec![repository().join("tests/examples/program_parts.c")];
        let names =
            ["xserv/thinking.c", "xserv/utf8.c", "common/options.c", "common/text_buffer.c"];
        sources.extend(names.map(|name| repository().join("examples/c").join(name)));
        let include = format!("-I{}", repository().join("examples/c").display());
        let flags = ["-std=c11", &include, "-fsanitize=address,undefined"];
        build_program(&cc(), &sources, &flags, &program);
        program
    });
    outcome(command(program).args(arguments).env("LD_LIBRARY_PATH", staged_library()))
}

#[test]
fn thoughts_are_told_from_answers_however_the_text_is_cut() {
    for (inside, text, thought, answer) in [
        ("0", "<think>\na < b </ c\n</think>\n\nHello <think>!", "a < b </ c", "Hello <think>!"),
        ("0", "<think>\n\n</think>\n\nHello", "", "Hello"),
        ("0", " <think>never ended </thin", "never ended </thin", ""),
        ("0", "a <think>b</think>", "", "a <think>b</think>"),
        ("0", "<thinker", "", "<thinker"),
        ("0", "<thin", "", "<thin"),
        ("1", "\nnaïve 🙂</think></think>x", "naïve 🙂", "</think>x"),
    ] {
        let said = parts(&["thinking", inside, text]).stdout;
        assert_eq!(said.lines().count(), text.len() + 1);
        for line in said.lines() {
            assert_eq!(line, format!("{thought}\t{answer}"), "{text:?}");
        }
    }
}

#[test]
fn characters_and_sizes_are_read() {
    for (bytes, expected) in [
        ("41", "41 1"),
        ("c3a9", "e9 2"),
        ("e282ac41", "20ac 3"),
        ("f09f9982", "1f642 4"),
        ("c080", "0 0"),
        ("eda080", "0 0"),
        ("f4908080", "0 0"),
        ("e282", "0 0"),
        ("80", "0 0"),
    ] {
        assert_eq!(parts(&["decode", bytes]).stdout.trim(), expected, "{bytes}");
    }
    for (size, bytes) in [
        ("1", 1),
        ("500M", 500 << 20),
        ("8G", 8 << 30),
        ("8GiB", 8 << 30),
        ("8GB", 8_000_000_000u64),
        ("1.5k", 1536),
        ("7B", 7),
    ] {
        assert_eq!(parts(&["size", size]).stdout.trim(), bytes.to_string(), "{size}");
    }
    for size in ["", "G", "0", "-1", "1e3", "3Q", "1GBs", "0x10", "nan", "99999999T"] {
        assert_eq!(parts(&["size", size]).code, Some(2), "{size}");
    }
}

/// The command by which the program can be built without CMake.
#[test]
fn one_command_builds_it() {
    let folder = work_folder("program-by-hand");
    let script = format!(
        "{} -std=c11 -O2 -Wall -Wextra -Wpedantic -Werror examples/c/xserv/*.c \
         examples/c/common/*.c examples/c/bench/*.c -Iinclude -L{} -lxserv -lm -lpthread -o {}",
        cc(),
        library_folder().display(),
        folder.join("xserv").display()
    );
    run(command("bash").args(["-c", &script]));
    let said = run(command(folder.join("xserv"))
        .arg("--version")
        .env("LD_LIBRARY_PATH", staged_library()));
    assert!(said.stdout.starts_with("xserv "), "{}", said.stdout);
}
