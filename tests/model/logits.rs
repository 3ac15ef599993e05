//! The forward passes against Transformers: logits of every position, and greedy tokens.

use xserv::backend::cpu::{CpuBackend, Isa};
use xserv::memory::DType;
use xserv::model::Model;

use crate::driver::{argmax, bits, load, load_on, Driver};
use crate::golden::{self, std_of, Golden};

/// Bar: the largest difference, in standard deviations of the reference logits. Measured: see the
/// output; typically 1e-5.
pub const F32_MAX_OVER_STD: f64 = 2e-4;
/// Bars on the differences of bf16, in units of what Transformers' own bf16 run loses, and their
/// floors in standard deviations.
pub const BF16_RMS_FACTOR: f64 = 2.5;
pub const BF16_MAX_FACTOR: f64 = 3.0;
pub const BF16_RMS_FLOOR: f64 = 0.02;
pub const BF16_MAX_FLOOR: f64 = 0.1;

pub struct Difference {
    pub max: f64,
    pub rms: f64,
}

pub fn difference(got: &[f32], want: &[f32]) -> Difference {
    assert_eq!(got.len(), want.len());
    let (mut max, mut sum) = (0.0_f64, 0.0_f64);
    for (&g, &w) in got.iter().zip(want) {
        let d = (f64::from(g) - f64::from(w)).abs();
        assert!(!d.is_nan(), "NaN among the logits");
        max = max.max(d);
        sum += d * d;
    }
    Difference { max, rms: (sum / got.len() as f64).sqrt() }
}

fn blocks_for(golden: &Golden) -> usize {
    golden.prompts.iter().map(|p| (p.ids.len() + 64).div_ceil(32)).sum::<usize>() + 48
}

#[test]
fn f32_logits_are_those_of_transformers() {
    for golden in golden::every_seed() {
        let model = load(golden.model_path(), Some(DType::F32), 2);
        let mut driver = Driver::new(&model, blocks_for(&golden));
        let mut worst = 0.0_f64;
        for prompt in &golden.prompts {
            let want = &golden.logits[&prompt.name];
            let got = golden.kept(prompt, &driver.logits(&prompt.ids, usize::MAX));
            let over_std = difference(&got, want).max / std_of(want);
            worst = worst.max(over_std);
            assert!(
                over_std <= F32_MAX_OVER_STD,
                "{} {}: max difference {over_std:.2e} std",
                golden.name,
                prompt.name
            );
        }
        eprintln!(
            "{} f32: max difference {worst:.2e} std (bar {F32_MAX_OVER_STD:.0e})",
            golden.name
        );
    }
}

#[test]
fn bf16_logits_lose_no_more_than_transformers_own() {
    for golden in golden::every_seed() {
        let model = load(golden.model_path(), Some(DType::BF16), 2);
        let mut driver = Driver::new(&model, blocks_for(&golden));
        let (mut worst_rms, mut worst_max) = (0.0_f64, 0.0_f64);
        for prompt in &golden.prompts {
            let Some(loss) = golden.bf16.get(&prompt.name) else { continue };
            let got = golden.kept(prompt, &driver.logits(&prompt.ids, usize::MAX));
            let own = difference(&got, &golden.logits[&prompt.name]);
            let rms_bar = (BF16_RMS_FACTOR * loss.rms_diff).max(BF16_RMS_FLOOR * loss.logits_std);
            let max_bar =
                (BF16_MAX_FACTOR * loss.max_abs_diff).max(BF16_MAX_FLOOR * loss.logits_std);
            worst_rms = worst_rms.max(own.rms / loss.rms_diff);
            worst_max = worst_max.max(own.max / loss.max_abs_diff);
            assert!(
                own.rms <= rms_bar && own.max <= max_bar,
                "{} {}: rms {:.2e} (bar {rms_bar:.2e}), max {:.2e} (bar {max_bar:.2e})",
                golden.name,
                prompt.name,
                own.rms,
                own.max
            );
        }
        eprintln!(
            "{} bf16: worst rms {worst_rms:.2} and max {worst_max:.2} of Transformers' loss (bars \
             {BF16_RMS_FACTOR} and {BF16_MAX_FACTOR})",
            golden.name
        );
    }
}

/// f16 has three more bits than bf16, and only the weights and the cache are rounded to it, so it
/// must come much closer.
#[test]
fn f16_logits_are_between_f32_and_bf16() {
    for golden in golden::every_seed() {
        let model = load(golden.model_path(), Some(DType::F16), 2);
        let mut driver = Driver::new(&model, blocks_for(&golden));
        let mut worst = 0.0_f64;
        for prompt in &golden.prompts {
            let want = &golden.logits[&prompt.name];
            let got = golden.kept(prompt, &driver.logits(&prompt.ids, usize::MAX));
            let own = difference(&got, want);
            worst = worst.max(own.rms / std_of(want));
            // No more than twice what Transformers loses, where that was measured.
            // A token may choose other experts, as in a run of Transformers in bf16.
            let losses = if model.config().experts.is_some() { &golden.bf16 } else { &golden.f16 };
            let (rms_bar, max_bar) = match losses.get(&prompt.name) {
                Some(loss) => (2.0 * loss.rms_diff, 2.0 * loss.max_abs_diff),
                None => (2e-3 * std_of(want), 2e-2 * std_of(want)),
            };
            assert!(
                own.rms <= rms_bar && own.max <= max_bar,
                "{} {}: rms {:.2e} (bar {rms_bar:.2e}), max {:.2e} (bar {max_bar:.2e})",
                golden.name,
                prompt.name,
                own.rms,
                own.max
            );
        }
        eprintln!("{} f16: worst rms {worst:.2e} std", golden.name);
    }
}

#[test]
fn f32_greedy_tokens_are_those_of_transformers() {
    for golden in golden::every_seed() {
        let model = load(golden.model_path(), Some(DType::F32), 2);
        let mut driver = Driver::new(&model, blocks_for(&golden));
        for greedy in &golden.greedy {
            for chunk in [usize::MAX, 1, 7, 16] {
                let (ids, _) = driver.greedy(&greedy.prompt_ids, chunk, greedy.ids.len());
                assert_eq!(ids, greedy.ids, "{} {} in pieces of {chunk}", golden.name, greedy.name);
            }
        }
    }
}

/// In bf16 a step may only go another way where the reference's margin is within the noise.
#[test]
fn bf16_greedy_tokens_follow_where_the_margin_is_clear() {
    for golden in golden::all() {
        let model = load(golden.model_path(), Some(DType::BF16), 2);
        let mut driver = Driver::new(&model, blocks_for(&golden));
        let (mut equal, mut total) = (0, 0);
        // Rounding may have a token choose another expert, at any step: the noise is then that of the
        // prompt in which this happened to Transformers.
        let largest = golden.bf16.values().map(|loss| loss.max_abs_diff).fold(0.0, f64::max);
        for greedy in &golden.greedy {
            let Some(loss) = golden.bf16.get(&greedy.name) else { continue };
            let noise = if model.config().experts.is_some() { largest } else { loss.max_abs_diff };
            let (ids, _) = driver.greedy(&greedy.prompt_ids, usize::MAX, greedy.ids.len());
            total += ids.len();
            let same = ids.iter().zip(&greedy.ids).take_while(|(a, b)| a == b).count();
            equal += same;
            if let Some(margin) = greedy.margins.get(same).filter(|_| same < ids.len()) {
                assert!(
                    f64::from(*margin) < 3.0 * noise,
                    "{} {}: step {same} differs although its margin is {margin}",
                    golden.name,
                    greedy.name
                );
            }
        }
        eprintln!(
            "{} bf16: {equal} of {total} greedy steps equal before a divergence",
            golden.name
        );
    }
}

/// The 1200 tokens that qwen3-tiny-tied has references for.
#[test]
fn the_long_prompt() {
    for golden in golden::all() {
        let file = golden.refs_dir.join("long.safetensors");
        if !file.is_file() {
            continue;
        }
        let refs = golden::tensors(&file);
        let ids: Vec<u32> = refs["ids"].i32s.iter().map(|&id| id as u32).collect();
        let model = load(golden.model_path(), Some(DType::F32), 2);
        let mut driver = Driver::new(&model, 64);
        let logits = driver.logits(&ids, 512);
        check_long(&golden, &model, &refs, &logits);
        let count = refs["greedy_ids"].i32s.len();
        let (tokens, _) = driver.greedy(&ids, 256, count);
        let want: Vec<u32> = refs["greedy_ids"].i32s.iter().map(|&id| id as u32).collect();
        assert_eq!(tokens, want, "{} long", golden.name);

        let Some(loss) = golden.bf16.get("long") else { continue };
        let bf16 = load(golden.model_path(), Some(DType::BF16), 2);
        let got = Driver::new(&bf16, 64).logits(&ids, 512);
        let own = difference(&got, &logits);
        eprintln!(
            "{} long bf16: rms {:.2} and max {:.2} of Transformers' loss",
            golden.name,
            own.rms / loss.rms_diff,
            own.max / loss.max_abs_diff
        );
        assert!(own.rms <= (BF16_RMS_FACTOR * loss.rms_diff).max(BF16_RMS_FLOOR * loss.logits_std));
        assert!(
            own.max <= (BF16_MAX_FACTOR * loss.max_abs_diff).max(BF16_MAX_FLOOR * loss.logits_std)
        );
    }
}

fn check_long(
    golden: &Golden,
    model: &Model,
    refs: &std::collections::HashMap<String, golden::RefTensor>,
    logits: &[f32],
) {
    let vocab_size = model.config().vocab_size;
    let std = std_of(logits);
    let last = &refs["last_logits"].f32s;
    let own = difference(&logits[logits.len() - last.len()..], last);
    let mut worst = own.max / std;
    let top = refs["top5.ids"].i32s.chunks_exact(5).zip(refs["top5.logits"].f32s.chunks_exact(5));
    for (row, (ids, values)) in logits.chunks_exact(vocab_size).zip(top) {
        for (&id, &value) in ids.iter().zip(values) {
            worst = worst.max(f64::from((row[id as usize] - value).abs()) / std);
        }
        if f64::from(values[0] - values[1]) > 4.0 * F32_MAX_OVER_STD * std {
            assert_eq!(argmax(row) as i32, ids[0]);
        }
    }
    eprintln!("{} long f32: max difference {worst:.2e} std", golden.name);
    assert!(worst <= F32_MAX_OVER_STD, "{} long: {worst:.2e} std", golden.name);
}

/// The bars, and the independence of the bits from chunks, on every instruction set of this machine
/// and not only on the one that is chosen.
#[test]
fn every_instruction_set() {
    for golden in golden::all() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            for dtype in [DType::F32, DType::BF16] {
                let backend = CpuBackend::with_isa(2, isa).expect("a backend");
                let model = load_on(golden.model_path(), Some(dtype), backend);
                let mut driver = Driver::new(&model, 32);
                let prompts = golden.prompts.iter().filter(|prompt| prompt.ids.len() <= 80);
                for prompt in prompts {
                    let what = format!("{} {} {dtype} {}", golden.name, isa.name(), prompt.name);
                    let got = driver.logits(&prompt.ids, usize::MAX);
                    let same = bits(&got) == bits(&driver.logits(&prompt.ids, 7));
                    assert!(same, "{what}: pieces of 7 differ");
                    let want = &golden.logits[&prompt.name];
                    let own = difference(&golden.kept(prompt, &got), want);
                    let max_bar = match (dtype, golden.bf16.get(&prompt.name)) {
                        (DType::F32, _) => F32_MAX_OVER_STD * std_of(want),
                        (_, Some(loss)) => (BF16_MAX_FACTOR * loss.max_abs_diff)
                            .max(BF16_MAX_FLOOR * loss.logits_std),
                        (_, None) => f64::INFINITY,
                    };
                    assert!(own.max <= max_bar, "{what}: {:.2e} (bar {max_bar:.2e})", own.max);
                }
            }
        }
    }
}
