//! bench on a model of random weights. What it measures is not judged here, only that it measures.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use crate::random_model::random_model;
use crate::support::*;

const ARGUMENTS: [&str; 16] = [
    "--prompts",
    "16,40",
    "--gen",
    "6",
    "--depths",
    "0,20",
    "--threads",
    "1,2",
    "--batch",
    "1,3",
    "--reps",
    "2",
    "--read-gbs",
    "10",
    "--tflops",
    "0.5",
];

#[test]
fn json_has_a_line_for_every_measurement() {
    let Some(programs) = crate::c::programs() else { return };
    let model = random_model("bench-qwen3", &["qwen3-tiny"]);
    let printed =
        run(command(programs.join("bench")).arg(model).args(ARGUMENTS).arg("--json")).stdout;
    let mut metrics = BTreeMap::new();
    for line in printed.lines() {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
        let value = line["value"].as_f64().expect("a number");
        assert!(value.is_finite() && value > 0.0, "{line}");
        assert!(line["unit"].is_string() && line["better"].is_string(), "{line}");
        let name = line["metric"].as_str().expect("a name").to_string();
        assert_eq!(metrics.insert(name.clone(), value), None, "{name} comes twice");
    }
    for threads in ["t1", "t2"] {
        for test in ["pp16", "pp40", "tg6", "tg6_d20"] {
            for batch in ["", "_b3"] {
                for unit in ["tok_s", "tok_cpus"] {
                    let name = format!("{test}{batch}_{threads}_{unit}");
                    assert!(metrics.remove(&name).is_some(), "no {name} in {printed}");
                }
                let mut others = vec!["ms", "limit_ms", "share"];
                if test.starts_with("tg") {
                    others.push("idle");
                }
                for other in others {
                    let name = format!("{test}_{other}{batch}_{threads}");
                    assert!(metrics.remove(&name).is_some(), "no {name} in {printed}");
                }
                // If the rate of multiply-adds can be measured, prompts have a share of it.
                let share = metrics.remove(&format!("{test}_multiply_share{batch}_{threads}"));
                let rate = metrics.get(&format!("fma_tflop_s_{threads}"));
                let is_told = test.starts_with("pp") && rate.is_some();
                assert_eq!(share.is_some(), is_told, "{test}{batch} in {printed}");
            }
        }
        metrics.remove(&format!("fma_tflop_s_{threads}"));
        metrics.remove(&format!("amx_tflop_s_{threads}"));
        for test in ["load_s", "ttft128_cold_s", "weights_gb_s", "memory_gb_s", "memory_share"] {
            let name = format!("{test}_{threads}");
            assert!(metrics.remove(&name).is_some(), "no {name} in {printed}");
        }
    }
    assert_eq!(metrics.into_keys().collect::<Vec<_>>(), ["peak_rss_mib"]);
}

#[test]
fn names_are_plain_when_one_thread_count_and_batch_is_asked_for() {
    let Some(programs) = crate::c::programs() else { return };
    let model = random_model("bench-gpt2", &["gpt2-tiny"]);
    let arguments =
        ["--prompts", "16", "--gen", "6", "--depths", "0,8", "--reps", "1", "--serve", "3"];
    let table = run(command(programs.join("bench")).arg(model).args(arguments)).stdout;
    let names =
        ["load_s", "ttft128_cold_s", "pp16_tok_s", "tg6_tok_s", "tg6_d8_tok_s", "peak_rss_mib"];
    let serving = ["serve3_tok_s", "serve3_first_p95_s", "serve3_next_p50_s"];
    for name in names.iter().chain(&serving) {
        assert!(table.contains(&format!("| {name} ")), "no {name} in\n{table}");
    }
}

/// Returns a folder with a config.json and nothing else; `arguments` begin with the shape.
fn config_alone(name: &str, arguments: &[&str]) -> PathBuf {
    let made = random_model(name, &[arguments, &["--config-only"]].concat());
    for entry in fs::read_dir(&made).expect("the folder") {
        let path = entry.expect("a file").path();
        if !path.ends_with("config.json") {
            fs::remove_file(path).expect("a file that is not needed");
        }
    }
    made
}

/// The table and each line of JSON say that nothing was read.
#[test]
fn random_weights_are_measured_from_a_config_alone() {
    let Some(programs) = crate::c::programs() else { return };
    let sizes = "--layers 2 --hidden 128 --heads 4 --kv-heads 2 --head-dim 64 --vocab 1024";
    let experts = "--experts 8 --experts-per-token 2 --moe-intermediate 64";
    let mut sparse = vec!["qwen3-30b-a3b"];
    sparse.extend(sizes.split(' ').chain(experts.split(' ')));
    for shape in [&["qwen3-tiny"][..], &["gpt2-tiny"], &sparse[..]] {
        let folder = config_alone(&format!("bench-config-{}", shape[0]), shape);
        let bench = || {
            let mut bench = command(programs.join("bench"));
            bench.arg(&folder).args(["--device", "cpu", "--threads", "1", "--reps", "1"]);
            bench
        };
        let refused = outcome(&mut bench());
        assert_eq!(refused.code, Some(1), "{}", refused.stderr);
        assert!(refused.stderr.contains("model.safetensors"), "{}", refused.stderr);
        let said = run(bench().args(["--random", "--prompts", "8", "--gen", "4"]));
        assert!(said.stdout.starts_with("| metric (random weights) "), "{}", said.stdout);
        assert!(said.stderr.contains(" GB of random weights, "), "{}", said.stderr);
        for metric in ["pp8_tok_s", "tg4_tok_s"] {
            assert!(said.stdout.contains(&format!("| {metric} ")), "{}", said.stdout);
        }
        let quantised = ["--weights", "int4", "--embeddings", "int8", "--no-speed", "--serve", "2"];
        let printed = run(bench().args(["--random", "--json"]).args(quantised)).stdout;
        for line in printed.lines() {
            let line: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
            assert_eq!(line["random_weights"], true, "{line}");
        }
        assert!(printed.contains("\"serve2_tok_s\""), "{printed}");
    }
    let stored = ["--no-speed", "--device", "cpu", "--threads", "1"];
    let stored = run(command(programs.join("bench")).arg(model()).args(stored));
    assert!(!stored.stdout.contains("random") && !stored.stderr.contains("random"));
}

/// Returns the lines of a run with --json.
fn metrics(arguments: &[&str]) -> BTreeMap<String, f64> {
    let programs = crate::c::programs().expect("CMake, as the caller has seen");
    let printed = run(command(programs.join("bench")).args(arguments).arg("--json")).stdout;
    let lines = printed.lines().map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
        let name = line["metric"].as_str().expect("a name").to_string();
        (name, line["value"].as_f64().expect("a number"))
    });
    lines.collect()
}

/// An embedding that is not the output matrix too is no part of a step, so that a model reads the
/// same with tied weights and without.
#[test]
fn limits_count_what_a_step_reads() {
    if crate::c::programs().is_none() {
        return;
    }
    for (name, arguments) in
        [("bench-tied", &["qwen3-tiny"][..]), ("bench-untied", &["qwen3-tiny", "--untied"])]
    {
        let model = random_model(name, arguments);
        let model = model.to_str().expect("a path");
        let common = [model, "--prompts", "8", "--gen", "4", "--depths", "8", "--reps", "1"];
        // One byte takes a microsecond, arithmetic nothing.
        let rates = ["--threads", "1", "--read-gbs", "0.001", "--tflops", "1000000"];
        let found = metrics(&[&common[..], &rates].concat());
        // 115,072 numbers in 2 layers and the output matrix, 256 bytes of keys and values a token,
        // 10 tokens on average.
        let decode = 2.0 * 115_072.0 + 10.0 * 256.0;
        assert!((found["tg4_d8_limit_ms"] * 1e3 / decode - 1.0).abs() < 1e-4, "{found:?}");
        let prompt = 2.0 * 115_072.0 + 8.0 * 256.0;
        assert!((found["pp8_limit_ms"] * 1e3 / prompt - 1.0).abs() < 1e-4, "{found:?}");
        // So does the shape alone, whatever the folder stores.
        let random = metrics(&[&common[..], &rates, &["--random"]].concat());
        for limit in ["tg4_d8_limit_ms", "pp8_limit_ms"] {
            assert_eq!(random[limit], found[limit], "{name}: {limit}");
        }
        // One rate is not enough.
        let found = metrics(&[&common[..], &rates[..4]].concat());
        assert!(!found.keys().any(|name| name.contains("limit")), "{found:?}");
    }
}

#[test]
fn serving_is_measured_alone_and_at_a_rate() {
    if crate::c::programs().is_none() {
        return;
    }
    let model = random_model("bench-serving", &["qwen3-tiny"]);
    let model = model.to_str().expect("a path");
    let waits = |what: &str| {
        ["first_p50_s", "first_p95_s", "first_p99_s", "next_p50_s", "next_p95_s", "next_p99_s"]
            .map(|wait| format!("{what}_{wait}"))
    };
    let common = [model, "--no-speed", "--reps", "3"];
    for extra in [&[][..], &["--no-chunked-prefill"], &["--max-prefill-tokens", "64"]] {
        // The offline run, which tells the rate, comes by itself.
        let serving = [
            "--ttft",
            "40,600",
            "--poisson",
            "50,400",
            "--poisson-requests",
            "9",
            "--threads",
            "1",
        ];
        let found = metrics(&[&common[..], &serving, extra].concat());
        for what in ["offline9", "poisson50", "poisson400"] {
            let sorted = waits(what).map(|name| found[&name]);
            assert!(
                sorted[..3].is_sorted() && sorted[3..].is_sorted() && sorted[0] > 0.0,
                "{found:?}"
            );
            assert!(found[&format!("{what}_tok_s")] > 0.0 && found[&format!("{what}_req_s")] > 0.0);
            let idle = found[&format!("{what}_idle")];
            assert!((0.0..1.0).contains(&idle), "{found:?}");
        }
        for prompt in ["ttft40", "ttft600"] {
            let (least, median) =
                (found[&format!("{prompt}_min_s")], found[&format!("{prompt}_p50_s")]);
            assert!(0.0 < least && least <= median, "{found:?}");
        }
        assert!(!found.keys().any(|name| name.starts_with("pp") || name.starts_with("tg")));
    }
    // Ten requests that arrive 20 times a second cannot be through before the last one has come: with the
    // generator's seed that is after 0.2 s and more.
    let slow = ["--poisson", "200", "--offline-rate", "10", "--poisson-requests", "10"];
    let found = metrics(&[&common[..], &slow].concat());
    assert!(found["poisson200_req_s"] < 50.0, "{found:?}");
    assert!(!found.contains_key("offline10_req_s"), "{found:?}");
    // Room for one long request or two short ones, and a place for the others on the host or not.
    // Which of them lose their blocks, and whether a copy is worth it, depends on how long steps
    // and copies take, so a run in which nothing was worth a copy proves nothing.
    let tight = |bytes: &str| {
        let tight = ["--offline", "6", "--kv-cache-tokens", "2048", "--max-swap-bytes", bytes];
        let found = metrics(&[&common[..], &tight].concat());
        assert!(found["offline6_preempted"] > 0.0, "{found:?}");
        found["offline6_swapped"]
    };
    assert!((0..8).any(|_| tight("100000000") > 0.0), "nothing was copied to the host in 8 runs");
    assert_eq!(tight("1"), 0.0, "copied to a place that is not there");
}

#[test]
fn refuses_what_it_cannot_measure() {
    let Some(programs) = crate::c::programs() else { return };
    for wrong in [
        &["--prompts", "0"][..],
        &["--batch", "1,,2"],
        &["--gen", "4x"],
        &["--what"],
        &["--untied"],
        &["--poisson", "0"],
        &["--offline-rate", "-1"],
        &["--max-prefill-tokens", "x"],
    ] {
        let refused = outcome(command(programs.join("bench")).arg(model()).args(wrong));
        assert_eq!(refused.code, Some(2), "{wrong:?}: {}", refused.stderr);
    }
    let too_long = ["--prompts", "100000", "--reps", "1"];
    let refused = outcome(command(programs.join("bench")).arg(model()).args(too_long));
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    assert!(refused.stderr.contains("XSERV_STATUS_CONTEXT_FULL"), "{}", refused.stderr);
}
