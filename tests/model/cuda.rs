//! The forward pass on a GPU: against Transformers at the bars of the CPU, against the CPU, and
//! against itself in pieces and beside others.

use xserv::error::{ErrorKind, Result};
use xserv::memory::DType;
use xserv::model::KvFormat;
use xserv::model::{ForwardBatch, MemoryNeeds, Model, ModelFolder, PassLimits, Workspace};

use crate::driver::{bits, cuda_context, load, load_on_cuda, Driver, Sequence};
use crate::files::{Family, Random, Store, TestModel};
use crate::golden::{self, std_of, Golden};
use crate::logits::{
    difference, Difference, BF16_MAX_FACTOR, BF16_MAX_FLOOR, BF16_RMS_FACTOR, BF16_RMS_FLOOR,
    F32_MAX_OVER_STD,
};

/// f16 has three more bits than bf16, and is rounded at the same places: a quarter is generous.
const F16_OF_BF16: f64 = 0.25;

/// Pieces in which prompts are fed: one token runs the kernels of decoding.
const CHUNKS: [usize; 4] = [usize::MAX, 1, 7, 16];

fn on_cuda(golden: &Golden, dtype: DType) -> Option<Model> {
    let context = cuda_context()?;
    Some(load_on_cuda(golden.model_path(), Some(dtype), context).expect("a model on CUDA"))
}

#[test]
fn f32_logits_on_cuda_are_those_of_transformers() {
    for golden in golden::every_seed() {
        let Some(model) = on_cuda(&golden, DType::F32) else { return };
        let mut driver = Driver::new(&model, 64);
        let mut worst = 0.0_f64;
        for prompt in &golden.prompts {
            let want = &golden.logits[&prompt.name];
            for chunk in CHUNKS {
                let got = golden.kept(prompt, &driver.logits(&prompt.ids, chunk));
                let over_std = difference(&got, want).max / std_of(want);
                worst = worst.max(over_std);
                assert!(
                    over_std <= F32_MAX_OVER_STD,
                    "{} {} in pieces of {chunk}: max difference {over_std:.2e} std",
                    golden.name,
                    prompt.name
                );
            }
        }
        println!("{} f32 on CUDA: max difference {worst:.2e} std", golden.name);
    }
}

#[test]
fn bf16_and_f16_logits_on_cuda_lose_no_more_than_transformers_own() {
    for golden in golden::every_seed() {
        for (dtype, part) in [(DType::BF16, 1.0), (DType::F16, F16_OF_BF16)] {
            let Some(model) = on_cuda(&golden, dtype) else { return };
            let mut driver = Driver::new(&model, 64);
            let (mut worst_rms, mut worst_max) = (0.0_f64, 0.0_f64);
            for prompt in &golden.prompts {
                let Some(loss) = golden.bf16.get(&prompt.name) else { continue };
                // Only in rows that are compared is it clear which experts a token has.
                let is_whole = prompt.rows.len() == prompt.ids.len();
                let part = if golden.has_experts() && !is_whole { 1.0 } else { part };
                let rms_bar =
                    (BF16_RMS_FACTOR * loss.rms_diff).max(BF16_RMS_FLOOR * loss.logits_std);
                let max_bar =
                    (BF16_MAX_FACTOR * loss.max_abs_diff).max(BF16_MAX_FLOOR * loss.logits_std);
                for chunk in [usize::MAX, 1] {
                    let got = golden.kept(prompt, &driver.logits(&prompt.ids, chunk));
                    let Difference { max, rms } = difference(&got, &golden.logits[&prompt.name]);
                    worst_rms = worst_rms.max(rms / loss.rms_diff);
                    worst_max = worst_max.max(max / loss.max_abs_diff);
                    assert!(
                        rms <= part * rms_bar && max <= part * max_bar,
                        "{} {} {dtype} in pieces of {chunk}: rms {rms:.2e} (bar {:.2e}), max {max:.2e} (bar {:.2e})",
                        golden.name,
                        prompt.name,
                        part * rms_bar,
                        part * max_bar
                    );
                }
            }
            println!(
                "{} {dtype} on CUDA: worst rms {worst_rms:.2} and max {worst_max:.2} of Transformers' bf16 loss",
                golden.name
            );
        }
    }
}

#[test]
fn f32_greedy_tokens_on_cuda_are_those_of_transformers() {
    for golden in golden::all() {
        let Some(model) = on_cuda(&golden, DType::F32) else { return };
        let mut driver = Driver::new(&model, 64);
        for greedy in &golden.greedy {
            for chunk in CHUNKS {
                let (ids, _) = driver.greedy(&greedy.prompt_ids, chunk, greedy.ids.len());
                let same = ids.iter().zip(&greedy.ids).take_while(|(a, b)| a == b).count();
                if let Some(margin) = greedy.margins.get(same).filter(|_| same < ids.len()) {
                    assert!(
                        *margin < 2e-3,
                        "{} {} in pieces of {chunk}: step {same} differs, margin {margin}",
                        golden.name,
                        greedy.name
                    );
                }
            }
        }
    }
}

#[test]
fn bf16_greedy_tokens_on_cuda_follow_where_the_margin_is_clear() {
    for golden in golden::all() {
        let Some(model) = on_cuda(&golden, DType::BF16) else { return };
        let mut driver = Driver::new(&model, 64);
        let (mut equal, mut total) = (0, 0);
        for greedy in &golden.greedy {
            let Some(loss) = golden.bf16.get(&greedy.name) else { continue };
            let (ids, _) = driver.greedy(&greedy.prompt_ids, usize::MAX, greedy.ids.len());
            total += ids.len();
            let same = ids.iter().zip(&greedy.ids).take_while(|(a, b)| a == b).count();
            equal += same;
            if let Some(margin) = greedy.margins.get(same).filter(|_| same < ids.len()) {
                assert!(
                    f64::from(*margin) < 3.0 * loss.max_abs_diff,
                    "{} {}: step {same} differs although its margin is {margin}",
                    golden.name,
                    greedy.name
                );
            }
        }
        println!("{} bf16 on CUDA: {equal} of {total} greedy steps equal", golden.name);
    }
}

#[test]
fn the_long_prompt_on_cuda() {
    for golden in golden::all() {
        let file = golden.refs_dir.join("long.safetensors");
        if !file.is_file() {
            continue;
        }
        let refs = golden::tensors(&file);
        let ids: Vec<u32> = refs["ids"].i32s.iter().map(|&id| id as u32).collect();
        let Some(model) = on_cuda(&golden, DType::F32) else { return };
        let mut driver = Driver::new(&model, 64);
        let last = &refs["last_logits"].f32s;
        for chunk in [usize::MAX, 512, 100] {
            let logits = driver.logits(&ids, chunk);
            let max = difference(&logits[logits.len() - last.len()..], last).max;
            let worst = max / std_of(&logits);
            println!("{} long on CUDA in pieces of {chunk}: {worst:.2e} std", golden.name);
            assert!(worst <= F32_MAX_OVER_STD, "{} long: {worst:.2e} std", golden.name);
        }
        let want: Vec<u32> = refs["greedy_ids"].i32s.iter().map(|&id| id as u32).collect();
        let (tokens, _) = driver.greedy(&ids, 256, want.len());
        assert_eq!(tokens, want, "{} long", golden.name);
    }
}

/// Prompts and single tokens of several sequences in one batch, of very different lengths.
#[test]
fn ragged_batches_on_cuda_are_the_sequences_alone() {
    for golden in golden::all() {
        let Some(model) = on_cuda(&golden, DType::F32) else { return };
        let mut driver = Driver::new(&model, 128);
        let prompts: Vec<&[u32]> = golden.prompts.iter().map(|p| p.ids.as_slice()).collect();
        let mut sequences: Vec<Sequence> = prompts.iter().map(|_| Sequence::default()).collect();
        // In the first batch all but the last token of every other sequence, and one of the others; then the
        // rest.
        let cut = |i: usize, ids: &[u32]| if i.is_multiple_of(2) { ids.len() - 1 } else { 1 };
        let mut got: Vec<Vec<f32>> = vec![Vec::new(); prompts.len()];
        for round in 0..2 {
            let mut which = Vec::new();
            let mut parts: Vec<(&mut Sequence, &[u32])> = Vec::new();
            for (i, sequence) in sequences.iter_mut().enumerate() {
                let at = cut(i, prompts[i]);
                let piece = if round == 0 { &prompts[i][..at] } else { &prompts[i][at..] };
                if !piece.is_empty() {
                    which.push(i);
                    parts.push((sequence, piece));
                }
            }
            for (i, logits) in which.into_iter().zip(driver.step(&mut parts, true)) {
                got[i].extend(logits);
            }
        }
        for (prompt, got) in golden.prompts.iter().zip(&got) {
            let want = &golden.logits[&prompt.name];
            let max = difference(&golden.kept(prompt, got), want).max;
            let over_std = max / std_of(want);
            assert!(
                over_std <= F32_MAX_OVER_STD,
                "{} {}: {over_std:.2e}",
                golden.name,
                prompt.name
            );
        }
    }
}

#[test]
fn twice_the_same_run_on_cuda_gives_the_same_bits() {
    for golden in golden::all() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let Some(model) = on_cuda(&golden, dtype) else { return };
            let mut driver = Driver::new(&model, 64);
            for prompt in golden.prompts.iter().take(4) {
                for chunk in [usize::MAX, 1] {
                    let first = bits(&driver.logits(&prompt.ids, chunk));
                    let again = bits(&driver.logits(&prompt.ids, chunk));
                    assert!(first == again, "{} {dtype} {}", golden.name, prompt.name);
                }
            }
        }
    }
}

/// Biases and YaRN, which no reference model has; heads of 10 elements. GPT-2 with both forms of
/// GELU, an output matrix of its own, and rows that are no whole vectors.
#[test]
fn cuda_and_the_cpu_agree() {
    let mut models = Vec::new();
    for (seed, attention_bias, factor) in
        [(1, true, None), (2, false, Some(4.0)), (3, true, Some(4.0))]
    {
        let mut model = TestModel::qwen3(seed);
        model.config["attention_bias"] = attention_bias.into();
        if let Some(factor) = factor {
            model.config["rope_scaling"] = serde_json::json!({
                "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 64
            });
        }
        models.push((seed, model));
    }
    for (seed, gelu) in [(4, "gelu_new"), (5, "gelu_pytorch_tanh")] {
        let mut model = TestModel::gpt2(seed);
        model.config["activation_function"] = gelu.into();
        models.push((seed, model));
    }
    models.push((6, TestModel::wide_gpt2(6)));
    for (seed, family) in [(7, Family::Llama), (8, Family::Qwen2)] {
        models.push((seed, TestModel::qwen3(seed).of(family)));
        models.push((seed, TestModel::wide_qwen3(seed).of(family)));
    }
    for (seed, head_dim) in [(9, 80), (10, 96), (11, 100), (12, 256)] {
        models.push((seed, TestModel::long_qwen3(seed, head_dim)));
    }
    for (seed, model) in models {
        let mut random = Random(seed + 100);
        let ids: Vec<u32> = (0..100).map(|_| random.below(70) as u32).collect();
        let dir = model.write(Store::F32);
        for (dtype, bar) in [(DType::F32, 1e-4), (DType::F16, 2e-2), (DType::BF16, 0.15)] {
            let Some(context) = cuda_context() else { return };
            let on_cuda = load_on_cuda(dir.str(), Some(dtype), context).expect("a model on CUDA");
            let want = Driver::new(&load(dir.str(), Some(dtype), 2), 8).logits(&ids, usize::MAX);
            let mut driver = Driver::new(&on_cuda, 8);
            for chunk in [usize::MAX, 11, 1] {
                let Difference { max, rms } = difference(&driver.logits(&ids, chunk), &want);
                let std = std_of(&want);
                println!(
                    "seed {seed} {dtype} pieces of {chunk}: max {:.2e} rms {:.2e} std",
                    max / std,
                    rms / std
                );
                let measure = if dtype == DType::F32 { max } else { rms };
                assert!(measure <= bar * std, "seed {seed} {dtype} pieces of {chunk}");
            }
        }
    }
}

#[test]
fn any_rows_can_be_wanted_on_cuda() {
    for family in Family::DENSE {
        any_rows_can_be_wanted(TestModel::qwen3(2).of(family));
    }
    any_rows_can_be_wanted(TestModel::gpt2(2));
}

fn any_rows_can_be_wanted(model: TestModel) {
    let Some(context) = cuda_context() else { return };
    let dir = model.write(Store::F32);
    let model = load_on_cuda(dir.str(), Some(DType::F32), context).expect("a model on CUDA");
    let mut kv = model.kv_cache(2).expect("a cache");
    let mut workspace = Workspace::new();
    let ids: Vec<u32> = (0..40).map(|i| i * 7 % 70).collect();
    let positions: Vec<u32> = (0..40).collect();
    let mut run = |rows: &[u32], should_stop: &dyn Fn() -> bool| {
        let batch = ForwardBatch {
            token_ids: &ids,
            positions: &positions,
            slot_mapping: &positions,
            cu_seqlens_q: &[0, 40],
            context_lens: &[40],
            block_tables: &[0, 1],
            max_blocks_per_seq: 2,
            logits_rows: rows,
        };
        let mut logits = vec![f32::NAN; rows.len() * 70];
        model.forward(&batch, &mut kv, &mut workspace, &mut logits, should_stop).map(|()| logits)
    };
    let all = run(&positions, &|| false).expect("the forward pass");
    let std = std_of(&all);
    let choices: [&[u32]; 7] = [&[], &[0], &[39], &[3, 5, 38], &[38, 5, 3], &[7, 7], &[0, 1, 2, 3]];
    for rows in choices {
        let want: Vec<f32> = rows
            .iter()
            .flat_map(|&row| all[row as usize * 70..(row as usize + 1) * 70].to_vec())
            .collect();
        let got = run(rows, &|| false).expect("the forward pass");
        let worst =
            got.iter().zip(&want).map(|(g, w)| f64::from((g - w).abs())).fold(0.0, f64::max);
        assert!(worst <= F32_MAX_OVER_STD * std, "rows {rows:?}: {worst:.2e}");
    }
    // Stopped before the second layer; the model can be used afterwards.
    let asked = std::cell::Cell::new(0);
    let stop = || {
        asked.set(asked.get() + 1);
        asked.get() > 1
    };
    assert_eq!(run(&[39], &stop).unwrap_err().kind(), ErrorKind::Cancelled);
    let again = run(&positions, &|| false).expect("the forward pass");
    assert!(bits(&again) == bits(&all));
}

/// A pass of few tokens has more rows behind its last attention than the kernels for few tokens take.
#[test]
fn each_row_can_be_wanted_many_times_on_cuda() {
    let Some(context) = cuda_context() else { return };
    let model = TestModel::wide_qwen3(2);
    let vocab_size = model.config["vocab_size"].as_u64().expect("a number") as usize;
    let dir = model.write(Store::F32);
    let model = load_on_cuda(dir.str(), Some(DType::BF16), context).expect("a model on CUDA");
    let mut kv = model.kv_cache(10).expect("a cache");
    let mut workspace = Workspace::new();
    let mut run = |num_tokens: u32, rows: &[u32]| {
        let ids: Vec<u32> = (0..num_tokens).map(|i| i * 7 % 70).collect();
        let positions: Vec<u32> = (0..num_tokens).collect();
        let batch = ForwardBatch {
            token_ids: &ids,
            positions: &positions,
            slot_mapping: &positions,
            cu_seqlens_q: &[0, num_tokens],
            context_lens: &[num_tokens],
            block_tables: &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
            max_blocks_per_seq: 10,
            logits_rows: rows,
        };
        let mut logits = vec![f32::NAN; rows.len() * vocab_size];
        let done = model.forward(&batch, &mut kv, &mut workspace, &mut logits, &|| false);
        done.expect("the forward pass");
        logits
    };
    // The longer pass also makes room for so many rows.
    let all = run(160, &(0..160).collect::<Vec<_>>());
    let rows: Vec<u32> = (0..160).map(|i| i % 40).collect();
    let of_row = |&row: &u32| &all[row as usize * vocab_size..][..vocab_size];
    let want: Vec<f32> = rows.iter().flat_map(of_row).copied().collect();
    let Difference { rms, .. } = difference(&run(40, &rows), &want);
    assert!(rms <= 0.15 * std_of(&want), "{rms:.2e}");
}

/// Decoding asks the driver for nothing once every buffer has been used; prints what a token costs.
#[test]
fn steady_state_decoding_on_cuda_allocates_nothing() {
    for name in ["qwen3-tiny-tied", "gpt2-tiny"] {
        if let Some(golden) = golden::all().into_iter().find(|golden| golden.name == name) {
            steady_state_decoding_allocates_nothing(&golden);
        }
    }
}

fn steady_state_decoding_allocates_nothing(golden: &Golden) {
    let Some(context) = cuda_context() else { return };
    let model =
        load_on_cuda(golden.model_path(), Some(DType::BF16), context.clone()).expect("a model");
    let mut driver = Driver::new(&model, 32);
    driver.greedy(&golden.prompts[0].ids, usize::MAX, 64);
    let launches = || match context.backend() {
        xserv::backend::ContextBackend::Cuda(cuda) => cuda.num_launches(),
        _ => 0,
    };
    let (before, first) = (context.memory_stats(), launches());
    const STEPS: usize = 200;
    driver.greedy(&golden.prompts[0].ids[..1], usize::MAX, STEPS);
    let after = context.memory_stats();
    assert_eq!(after.num_driver_calls, before.num_driver_calls);
    assert_eq!(after.reserved, before.reserved);
    println!(
        "{}: {} layers, {:.1} launches a token (beside those of cuBLAS)",
        golden.name,
        model.config().num_layers,
        (launches() - first) as f64 / STEPS as f64
    );
}

fn plan_of(folder: &ModelFolder, dtype: DType, num_tokens: usize) -> Result<MemoryNeeds> {
    folder.device_plan(
        dtype,
        KvFormat::Dense,
        &PassLimits::of_tokens(folder.config(), num_tokens),
        false,
    )
}

/// Without a GPU: matrices stored [in_features, out_features], with heads along either axis,
/// learned positions and no tables of rotary ones.
#[test]
fn the_plan_of_gpt2_on_a_device_is_its_tensors() {
    let dir = TestModel::gpt2(2).write(Store::F32);
    let folder = Model::open(dir.str()).expect("a folder");
    for (dtype, size) in [(DType::F32, 4), (DType::F16, 2), (DType::BF16, 2)] {
        let plan = plan_of(&folder, dtype, 64).expect("a plan");
        // 2 layers of 3 heads of 10 elements, 64 apart; keys and values.
        assert_eq!(plan.kv_bytes_per_token, 2 * 3 * 64 * 2 * size);
        let (hidden, wide, spaced, vocab, positions) = (30, 50, 3 * 64, 70, 512);
        let of_a_layer = [
            [hidden * 3 * spaced, 3 * spaced, spaced * hidden, hidden],
            [hidden * wide, wide, wide * hidden, hidden],
            [hidden; 4],
        ];
        let others = [vocab * hidden, vocab * hidden, positions * hidden, hidden, hidden];
        // Tensors begin at multiples of 256 bytes.
        let bytes = |len: u64| (len * size).next_multiple_of(256);
        let layer: u64 = of_a_layer.into_iter().flatten().map(bytes).sum();
        assert_eq!(plan.weights_bytes, 2 * layer + others.into_iter().map(bytes).sum::<u64>());
    }
}

/// Without a GPU: what the headers alone tell of the memory on one.
#[test]
fn the_plan_of_a_device_counts_padded_heads() {
    let dir = TestModel::qwen3(2).write(Store::BF16);
    let folder = Model::open(dir.str()).expect("a folder");
    let plan = plan_of(&folder, DType::BF16, 64).expect("a plan");
    // 2 layers of 2 kv heads of 10 elements, 64 apart; keys and values of 2 bytes.
    assert_eq!(plan.kv_bytes_per_token, 2 * 2 * 64 * 2 * 2);
    let f32 = plan_of(&folder, DType::F32, 64).expect("a plan");
    assert_eq!(f32.kv_bytes_per_token, 2 * plan.kv_bytes_per_token);
    assert!(f32.weights_bytes > plan.weights_bytes);
    assert!(
        plan_of(&folder, DType::BF16, 2048).expect("a plan").workspace_bytes > plan.workspace_bytes
    );
}
