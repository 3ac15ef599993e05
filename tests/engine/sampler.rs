//! Probabilities after the whole chain of processors, against Transformers' own
//! (`ops/sampling.*` of the shared golden data), and against a plain second computation.

use std::path::{Path, PathBuf};

use crate::chi_square::assert_fits;
use safetensors::SafeTensors;
use xserv::backend::cpu::CpuBackend;
use xserv::engine::{LogitBias, Sampler, SamplingOverrides, SamplingParams};

fn golden() -> Option<PathBuf> {
    let path = match std::env::var_os("XSERV_GOLDEN") {
        Some(path) => PathBuf::from(path),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/golden"),
    };
    if !path.is_dir() {
        eprintln!("skipped: no shared golden data at {}", path.display());
        return None;
    }
    Some(path)
}

fn params(caller: &SamplingOverrides) -> SamplingParams {
    SamplingParams::resolve(caller, &SamplingOverrides::default()).unwrap()
}

fn backend() -> CpuBackend {
    CpuBackend::new(1).unwrap()
}

/// Probabilities of all tokens, zero for those that are out.
fn probabilities(caller: &SamplingOverrides, previous: &[u32], logits: &[f32]) -> Vec<f64> {
    let mut sampler = Sampler::new(params(caller), 0, previous).unwrap();
    let mut out = vec![0.0; logits.len()];
    for (token, probability) in
        sampler.probabilities(&backend(), &mut logits.to_vec(), &[]).unwrap()
    {
        out[token as usize] = probability;
    }
    out
}

#[test]
fn probabilities_are_those_of_transformers() {
    let Some(golden) = golden() else { return };
    let cases = std::fs::read(golden.join("ops/sampling.json")).unwrap();
    let cases: serde_json::Value = serde_json::from_slice(&cases).unwrap();
    let bytes = std::fs::read(golden.join("ops/sampling.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: &str| -> Vec<f64> {
        let tensor = tensors.tensor(name).unwrap();
        match tensor.dtype() {
            safetensors::Dtype::F32 => tensor
                .data()
                .chunks_exact(4)
                .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
                .collect(),
            safetensors::Dtype::F64 => tensor
                .data()
                .chunks_exact(8)
                .map(|b| f64::from_le_bytes(b.try_into().unwrap()))
                .collect(),
            other => panic!("{name} is {other:?}"),
        }
    };
    let logits: Vec<f32> = floats("logits").iter().map(|v| *v as f32).collect();
    let ids = tensors.tensor("previous_ids").unwrap();
    let width = if ids.dtype() == safetensors::Dtype::I64 { 8 } else { 4 };
    let previous: Vec<u32> = ids
        .data()
        .chunks_exact(width)
        .map(|b| u32::from_le_bytes(b[..4].try_into().unwrap()))
        .collect();
    // One row of logits for each row of previous ids, or one row in all.
    let shape = tensors.tensor("logits").unwrap().shape().to_vec();
    let vocab_size = *shape.last().unwrap();
    let rows = logits.len() / vocab_size;
    let mut tested = 0;
    for case in cases["cases"].as_array().unwrap() {
        let caller = overrides(case);
        let expected = floats(case["key"].as_str().unwrap());
        assert_eq!(expected.len(), logits.len(), "{case}");
        for row in 0..rows {
            let range = row * vocab_size..(row + 1) * vocab_size;
            let previous =
                &previous[row * previous.len() / rows..(row + 1) * previous.len() / rows];
            let got = probabilities(&caller, previous, &logits[range.clone()]);
            for (id, (got, expected)) in got.iter().zip(&expected[range]).enumerate() {
                let bar = 2e-6 * (1.0 + expected);
                assert!(
                    (got - expected).abs() <= bar,
                    "{case} row {row} token {id}: {got} {expected}"
                );
            }
            tested += 1;
        }
    }
    assert!(tested >= 10, "{tested} cases");
}

/// The chain written down plainly, with one sort.
fn plainly(logits: &[f64], temperature: f64, top_k: usize, top_p: f64, min_p: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    let highest = logits[order[0]];
    let weight = |id: usize| ((logits[id] - highest) / temperature).exp();
    if top_k > 0 {
        order.truncate(top_k);
    }
    let sum: f64 = order.iter().map(|id| weight(*id)).sum();
    let mut before = 0.0;
    let mut out = vec![0.0; logits.len()];
    for id in order {
        if before >= top_p * sum {
            break;
        }
        before += weight(id);
        if weight(id) >= min_p {
            out[id] = weight(id);
        }
    }
    let sum: f64 = out.iter().sum();
    out.iter().map(|w| w / sum).collect()
}

#[test]
fn probabilities_of_random_logits() {
    let mut state = 42u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    for vocab_size in [1, 2, 31, 1000, 20_000] {
        // Sixteenths, so that scaling by the temperature 0.5 is exact; all different at 1,000 and below.
        let logits: Vec<f32> =
            (0..vocab_size).map(|_| (random() * 262_144.0).round() / 16_384.0).collect();
        for (top_k, top_p, min_p) in
            [(0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.2), (50, 0.8, 0.05)]
        {
            let caller = SamplingOverrides {
                temperature: Some(0.5),
                top_k: Some(top_k),
                top_p: Some(top_p),
                min_p: Some(min_p),
                ..Default::default()
            };
            let got = probabilities(&caller, &[], &logits);
            let exact: Vec<f64> = logits.iter().map(|v| f64::from(*v)).collect();
            let expected = plainly(&exact, 0.5, top_k as usize, f64::from(top_p), f64::from(min_p));
            // Ties at the edge of top_k stay in; skip what they make incomparable.
            let kept = |p: &[f64]| p.iter().filter(|v| **v > 0.0).count();
            if kept(&got) != kept(&expected) {
                let mut sorted = logits.clone();
                sorted.sort_by(f32::total_cmp);
                sorted.dedup();
                assert!(sorted.len() < logits.len(), "{vocab_size} {top_k} {top_p} {min_p}");
                continue;
            }
            for (got, expected) in got.iter().zip(&expected) {
                assert!((got - expected).abs() < 1e-12, "{vocab_size} {top_k} {top_p} {min_p}");
            }
        }
    }
}

/// The cases of `tests/golden/sampling`: what Transformers' processors leave of given logits.
struct Cases {
    golden: serde_json::Value,
}

fn numbers(value: &serde_json::Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

impl Cases {
    fn read() -> Cases {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/sampling/processors.json");
        Cases { golden: serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap() }
    }

    fn all(&self) -> &[serde_json::Value] {
        self.golden["cases"].as_array().unwrap()
    }

    /// Returns the tokens before.
    fn before(&self) -> Vec<u32> {
        numbers(&self.golden["before"]).iter().map(|&id| id as u32).collect()
    }

    fn logits(&self, case: &serde_json::Value) -> Vec<f32> {
        let row = case["row"].as_u64().unwrap() as usize;
        numbers(&self.golden["logits"][row]).iter().map(|&x| x as f32).collect()
    }
}

fn overrides(case: &serde_json::Value) -> SamplingOverrides {
    let number = |key: &str| case[key].as_f64().map(|v| v as f32);
    SamplingOverrides {
        temperature: Some(number("temperature").unwrap_or(1.0)),
        top_k: case["top_k"].as_u64().map(|k| k as u32),
        top_p: number("top_p"),
        min_p: number("min_p"),
        repetition_penalty: number("repetition_penalty"),
        typical_p: number("typical_p"),
        no_repeat_ngram_size: case["no_repeat_ngram_size"].as_u64().map(|n| n as u32),
        ..Default::default()
    }
}

/// One by one and together.
#[test]
fn processors_leave_what_those_of_transformers_leave() {
    let cases = Cases::read();
    let (before, backend) = (cases.before(), backend());
    for case in cases.all() {
        let biases = case["logit_bias"].as_array().cloned().unwrap_or_default();
        let biases: Vec<LogitBias> = biases
            .iter()
            .map(|pair| LogitBias {
                token_id: pair[0].as_u64().unwrap() as u32,
                bias: pair[1].as_f64().unwrap() as f32,
            })
            .collect();
        let mut sampler = Sampler::new(params(&overrides(case)), 0, &before).unwrap();
        sampler.add_biases(&biases).unwrap();
        let mut logits = cases.logits(case);
        let mut found = vec![0.0; logits.len()];
        for (token, probability) in sampler.probabilities(&backend, &mut logits, &before).unwrap() {
            found[token as usize] = probability;
        }
        let mut shown = case.clone();
        shown.as_object_mut().unwrap().remove("probabilities");
        for (id, (found, expected)) in found.iter().zip(numbers(&case["probabilities"])).enumerate()
        {
            let is_close = (found - expected).abs() <= 1e-6 + 1e-5 * expected;
            assert!(is_close, "{shown}: token {id} has {found}, not {expected}");
        }
    }
    assert!(cases.all().len() >= 60);
}

/// The tokens of 10^5 draws occur as often as Transformers' processors say.
#[test]
fn draws_have_the_probabilities_of_transformers() {
    const DRAWS: u64 = 100_000;
    let (cases, backend) = (Cases::read(), backend());
    let is_plain = |case: &&serde_json::Value| {
        ["logit_bias", "repetition_penalty", "no_repeat_ngram_size"]
            .iter()
            .all(|key| case[key].is_null())
    };
    let mut tested = 0;
    for (index, case) in cases.all().iter().filter(is_plain).enumerate() {
        let logits = cases.logits(case);
        let seed = 1000 + index as u64;
        let mut sampler = Sampler::new(params(&overrides(case)), seed, &[]).unwrap();
        let mut counts = vec![0u64; logits.len()];
        for step in 0..DRAWS {
            let chosen =
                sampler.choose(&backend, &mut logits.clone(), step, &[], None, None).unwrap();
            counts[chosen.token as usize] += 1;
        }
        let probabilities = numbers(&case["probabilities"]);
        if assert_fits(&counts, &probabilities, &format!("case {index}")) > 0 {
            tested += 1;
        }
    }
    assert!(tested >= 25, "{tested}");
}
