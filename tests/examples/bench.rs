//! bench on a model of random weights. What it measures is not judged here, only that it measures.

use std::collections::BTreeMap;

use crate::support::*;

const ARGUMENTS: [&str; 12] = [
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
];

fn random_model(name: &str, shape: &str) -> std::path::PathBuf {
    let folder = work_folder(name);
    let script = repository().join("tests/bench/make_random_model.py");
    run(command("python3").arg(script).args(["--shape", shape, "--out"]).arg(&folder));
    folder
}

#[test]
fn json_has_a_line_for_every_measurement() {
    let Some(programs) = crate::c::programs() else { return };
    let model = random_model("bench-qwen3", "qwen3-tiny");
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
            }
        }
        for test in ["load_s", "ttft128_s", "weights_gb_s", "memory_gb_s", "memory_share"] {
            let name = format!("{test}_{threads}");
            assert!(metrics.remove(&name).is_some(), "no {name} in {printed}");
        }
    }
    assert_eq!(metrics.into_keys().collect::<Vec<_>>(), ["peak_rss_mib"]);
}

#[test]
fn names_are_plain_when_one_thread_count_and_batch_is_asked_for() {
    let Some(programs) = crate::c::programs() else { return };
    let model = random_model("bench-gpt2", "gpt2-tiny");
    let arguments =
        ["--prompts", "16", "--gen", "6", "--depths", "0,8", "--reps", "1", "--serve", "3"];
    let table = run(command(programs.join("bench")).arg(model).args(arguments)).stdout;
    let names = ["load_s", "ttft128_s", "pp16_tok_s", "tg6_tok_s", "tg6_d8_tok_s", "peak_rss_mib"];
    let serving = ["serve3_tok_s", "serve3_first_p95_s", "serve3_next_p50_s"];
    for name in names.iter().chain(&serving) {
        assert!(table.contains(&format!("| {name} ")), "no {name} in\n{table}");
    }
}

#[test]
fn refuses_what_it_cannot_measure() {
    let Some(programs) = crate::c::programs() else { return };
    for wrong in [&["--prompts", "0"][..], &["--batch", "1,,2"], &["--gen", "4x"], &["--what"]] {
        let refused = outcome(command(programs.join("bench")).arg(model()).args(wrong));
        assert_eq!(refused.code, Some(2), "{wrong:?}: {}", refused.stderr);
    }
    let too_long = ["--prompts", "100000", "--reps", "1"];
    let refused = outcome(command(programs.join("bench")).arg(model()).args(too_long));
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    assert!(refused.stderr.contains("XSERV_STATUS_CONTEXT_FULL"), "{}", refused.stderr);
}
