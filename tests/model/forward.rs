//! The forward pass against itself (bits must not depend on batching, chunking or threads), against
//! a plain f64 reference, and with batches that make no sense.

use xserv::error::ErrorKind;
use xserv::memory::DType;
use xserv::model::KvFormat;
use xserv::model::{ForwardBatch, KvCache, Model, Workspace};

use crate::driver::{argmax, bits, load, Driver, Sequence};
use crate::files::{Family, Random, Store, TestModel};
use crate::golden;
use crate::rope::yarn_f64;

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Returns the prompts of a model cut to 80 tokens: enough to cross two block boundaries.
fn prompts(golden: &golden::Golden) -> Vec<Vec<u32>> {
    golden.prompts.iter().map(|p| p.ids[..p.ids.len().min(80)].to_vec()).collect()
}

#[test]
fn bits_do_not_depend_on_chunks() {
    for golden in golden::all() {
        for dtype in DTYPES {
            let model = load(golden.model_path(), Some(dtype), 2);
            let mut driver = Driver::new(&model, 16);
            for ids in prompts(&golden) {
                let whole = bits(&driver.logits(&ids, usize::MAX));
                for chunk in [1, 7, 16] {
                    let same = bits(&driver.logits(&ids, chunk)) == whole;
                    assert!(same, "{} {dtype}: pieces of {chunk} differ", golden.name);
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    for golden in golden::all() {
        for dtype in DTYPES {
            let models: Vec<Model> =
                [1, 2, 3].map(|n| load(golden.model_path(), Some(dtype), n)).into();
            let mut drivers: Vec<Driver> = models.iter().map(|m| Driver::new(m, 16)).collect();
            for ids in prompts(&golden) {
                let mut results =
                    drivers.iter_mut().map(|driver| bits(&driver.logits(&ids, usize::MAX)));
                let one = results.next().expect("three models");
                let same = results.all(|other| other == one);
                assert!(same, "{} {dtype}: threads change bits", golden.name);
            }
        }
    }
}

/// All prompts side by side, prefilled in pieces of different sizes and decoded together, must give
/// the bits that each gives alone.
#[test]
fn bits_do_not_depend_on_neighbours() {
    const STEPS: usize = 12;
    for golden in golden::all() {
        for dtype in DTYPES {
            let model = load(golden.model_path(), Some(dtype), 2);
            let mut driver = Driver::new(&model, 64);
            let prompts = prompts(&golden);
            let alone: Vec<(Vec<u32>, Vec<f32>)> =
                prompts.iter().map(|ids| driver.greedy(ids, usize::MAX, STEPS)).collect();

            // Sequence i joins at round i and is fed 5 + 3 i tokens a round until it decodes.
            let mut sequences: Vec<Sequence> =
                prompts.iter().map(|_| Sequence::default()).collect();
            let mut fed = vec![0; prompts.len()];
            let mut tokens: Vec<Vec<u32>> = vec![Vec::new(); prompts.len()];
            let mut logits: Vec<Vec<f32>> = vec![Vec::new(); prompts.len()];
            let mut round = 0;
            while tokens.iter().any(|t| t.len() < STEPS) {
                let mut new: Vec<(usize, Vec<u32>)> = Vec::new();
                for i in 0..prompts.len() {
                    if i > round || tokens[i].len() == STEPS {
                        continue;
                    }
                    let rest = &prompts[i][fed[i]..];
                    new.push((
                        i,
                        match tokens[i].last() {
                            Some(&last) => vec![last],
                            None => rest[..rest.len().min(5 + 3 * i)].to_vec(),
                        },
                    ));
                }
                let mut parts: Vec<(&mut Sequence, &[u32])> = Vec::new();
                let mut ids = new.iter().peekable();
                for (i, sequence) in sequences.iter_mut().enumerate() {
                    if let Some((_, piece)) = ids.next_if(|(of, _)| *of == i) {
                        parts.push((sequence, piece));
                    }
                }
                let results = driver.step(&mut parts, false);
                for ((i, piece), last) in new.iter().zip(results) {
                    fed[*i] = (fed[*i] + piece.len()).min(prompts[*i].len());
                    if fed[*i] == prompts[*i].len() {
                        tokens[*i].push(argmax(&last));
                        logits[*i].extend(last);
                    }
                }
                round += 1;
            }
            for (i, (ids, own)) in alone.iter().enumerate() {
                assert_eq!(&tokens[i], ids, "{} {dtype} prompt {i}", golden.name);
                assert!(bits(&logits[i]) == bits(own), "{} {dtype} prompt {i}: bits", golden.name);
            }
        }
    }
}

/// Any choice of rows gives the bits that all rows together give: none, some, in any order.
#[test]
fn bits_do_not_depend_on_the_rows_wanted() {
    for (family, dtype) in Family::ALL.map(|family| DTYPES.map(|dtype| (family, dtype))).concat() {
        let dir = TestModel::qwen3(2).of(family).write(Store::BF16);
        let model = load(dir.str(), Some(dtype), 2);
        let mut kv = KvCache::new(model.kv_layout(), 2).expect("a cache");
        let mut workspace = Workspace::new();
        let ids: Vec<u32> = (0..40).map(|i| i * 7 % 70).collect();
        let positions: Vec<u32> = (0..40).collect();
        let mut run = |rows: &[u32]| {
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
            model
                .forward(&batch, &mut kv, &mut workspace, &mut logits, &|| false)
                .expect("the forward pass");
            bits(&logits)
        };
        let all = run(&positions);
        let choices: [&[u32]; 7] =
            [&[], &[0], &[39], &[3, 5, 38], &[38, 5, 3], &[7, 7], &[0, 1, 2, 3]];
        for rows in choices {
            let want: Vec<u32> = rows
                .iter()
                .flat_map(|&row| all[row as usize * 70..(row as usize + 1) * 70].to_vec())
                .collect();
            assert!(run(rows) == want, "{family:?} {dtype}: rows {rows:?}");
        }
    }
}

/// Qwen3 with biases, in f64, as the paper has it: no cache, no batch, one loop per sum.
fn reference_logits(model: &TestModel, ids: &[u32]) -> Vec<f64> {
    let size = |name: &str| model.config[name].as_u64().expect("a count") as usize;
    let (hidden, heads, kv_heads) =
        (size("hidden_size"), size("num_attention_heads"), size("num_key_value_heads"));
    let (head_dim, layers) = (size("head_dim"), size("num_hidden_layers"));
    let theta = model.config["rope_theta"].as_f64().expect("a number");
    let eps = model.config["rms_norm_eps"].as_f64().expect("a number");
    let has_bias = model.config["attention_bias"].as_bool().expect("a flag");
    let weight = |name: &str| -> Vec<f64> {
        model.tensor(name).values.iter().map(|&x| f64::from(x)).collect()
    };
    let norm = |x: &[f64], w: &[f64]| -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        x.iter().zip(w).map(|(v, w)| v / (mean + eps).sqrt() * w).collect()
    };
    let product = |w: &[f64], x: &[f64]| -> Vec<f64> {
        w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    };
    let linear = |name: &str, x: &[f64]| -> Vec<f64> {
        let mut y = product(&weight(&format!("{name}.weight")), x);
        if has_bias && name.contains("self_attn") {
            y.iter_mut().zip(weight(&format!("{name}.bias"))).for_each(|(y, b)| *y += b);
        }
        y
    };
    let (frequencies, scaling): (Vec<f64>, f64) = match model.config.get("rope_scaling") {
        Some(yarn) => {
            let number = |name: &str| yarn[name].as_f64().expect("a number");
            let (factor, original) = (number("factor"), number("original_max_position_embeddings"));
            let frequencies = yarn_f64(head_dim, theta, factor, original, (32.0, 1.0), true);
            (frequencies, 0.1 * factor.ln() + 1.0)
        }
        None => {
            let frequency = |i: usize| theta.powf(-2.0 * i as f64 / head_dim as f64);
            ((0..head_dim / 2).map(frequency).collect(), 1.0)
        }
    };
    let rotate = |head: &[f64], position: usize| -> Vec<f64> {
        let half = head_dim / 2;
        let mut out = head.to_vec();
        for i in 0..half {
            let angle = position as f64 * frequencies[i];
            let (sin, cos) = (scaling * angle.sin(), scaling * angle.cos());
            out[i] = head[i] * cos - head[i + half] * sin;
            out[i + half] = head[i + half] * cos + head[i] * sin;
        }
        out
    };

    let embedding = weight("model.embed_tokens.weight");
    let mut stream: Vec<Vec<f64>> = ids
        .iter()
        .map(|&id| embedding[id as usize * hidden..(id as usize + 1) * hidden].to_vec())
        .collect();
    for layer in 0..layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let (q_norm, k_norm) =
            (weight(&name("self_attn.q_norm.weight")), weight(&name("self_attn.k_norm.weight")));
        let input_norm = weight(&name("input_layernorm.weight"));
        let normed: Vec<Vec<f64>> = stream.iter().map(|x| norm(x, &input_norm)).collect();
        let heads_of = |part: &str, w: &[f64]| -> Vec<Vec<f64>> {
            let turned = |(position, x): (usize, &Vec<f64>)| {
                linear(&name(part), x)
                    .chunks_exact(head_dim)
                    .flat_map(|head| rotate(&norm(head, w), position))
                    .collect()
            };
            normed.iter().enumerate().map(turned).collect()
        };
        let q = heads_of("self_attn.q_proj", &q_norm);
        let k = heads_of("self_attn.k_proj", &k_norm);
        let v: Vec<Vec<f64>> =
            normed.iter().map(|x| linear(&name("self_attn.v_proj"), x)).collect();
        for (position, x) in stream.iter_mut().enumerate() {
            let mut seen: Vec<f64> = Vec::new();
            for head in 0..heads {
                let kv = head / (heads / kv_heads) * head_dim..;
                let q = &q[position][head * head_dim..(head + 1) * head_dim];
                let scores: Vec<f64> = (0..=position)
                    .map(|t| {
                        let k = &k[t][kv.clone()][..head_dim];
                        q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() / (head_dim as f64).sqrt()
                    })
                    .collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let total: f64 = weights.iter().sum();
                seen.extend((0..head_dim).map(|d| {
                    let sum: f64 = weights.iter().zip(&v).map(|(w, v)| w * v[kv.clone()][d]).sum();
                    sum / total
                }));
            }
            let out = linear(&name("self_attn.o_proj"), &seen);
            x.iter_mut().zip(out).for_each(|(x, y)| *x += y);
        }
        let post_norm = weight(&name("post_attention_layernorm.weight"));
        for x in &mut stream {
            let normed = norm(x, &post_norm);
            let gate = linear(&name("mlp.gate_proj"), &normed);
            let up = linear(&name("mlp.up_proj"), &normed);
            let act: Vec<f64> =
                gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let out = linear(&name("mlp.down_proj"), &act);
            x.iter_mut().zip(out).for_each(|(x, y)| *x += y);
        }
    }
    let final_norm = weight("model.norm.weight");
    let output = weight("lm_head.weight");
    stream.iter().flat_map(|x| product(&output, &norm(x, &final_norm))).collect()
}

#[test]
fn attention_bias_and_yarn_against_an_f64_reference() {
    for seed in [1, 2, 3] {
        let mut random = Random(seed + 100);
        let ids: Vec<u32> = (0..100).map(|_| random.below(70) as u32).collect();
        for (attention_bias, factor) in [(true, None), (false, None), (true, Some(4.0))] {
            let mut model = TestModel::qwen3(seed);
            model.config["attention_bias"] = attention_bias.into();
            if let Some(factor) = factor {
                model.config["rope_scaling"] = serde_json::json!({
                    "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 64
                });
            }
            let what = format!("bias {attention_bias}, YaRN {factor:?}, seed {seed}");
            let want = reference_logits(&model, &ids);
            let mean = want.iter().sum::<f64>() / want.len() as f64;
            let std =
                (want.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / want.len() as f64).sqrt();
            let dir = model.write(Store::F32);
            let loaded = load(dir.str(), None, 2);
            assert_eq!(loaded.dtype(), DType::F32);
            let got = Driver::new(&loaded, 8).logits(&ids, 11);
            let worst = got
                .iter()
                .zip(&want)
                .map(|(&g, &w)| (f64::from(g) - w).abs() / std)
                .fold(0.0, f64::max);
            eprintln!("{what}: max difference {worst:.2e} std");
            assert!(worst <= 2e-5, "{what}: {worst:.2e} std");
        }
    }
}

/// Rounding the stored weights changes the result by what the rounding is worth, no more: the
/// reference gets the rounded weights.
#[test]
fn stored_f16_and_bf16_are_used_as_they_are() {
    let mut random = Random(7);
    let ids: Vec<u32> = (0..40).map(|_| random.below(70) as u32).collect();
    for (store, dtype, bar) in [(Store::F16, DType::F16, 5e-3), (Store::BF16, DType::BF16, 6e-2)] {
        let mut model = TestModel::qwen3(5);
        let dir = model.write(store);
        for tensor in &mut model.tensors {
            for value in &mut tensor.values {
                *value = match store {
                    Store::F16 => half::f16::from_f32(*value).to_f32(),
                    _ => half::bf16::from_f32(*value).to_f32(),
                };
            }
        }
        let want: Vec<f32> = reference_logits(&model, &ids).iter().map(|&x| x as f32).collect();
        let std = golden::std_of(&want);
        let compare = |dtype: Option<DType>| {
            let loaded = load(dir.str(), dtype, 2);
            let got = Driver::new(&loaded, 8).logits(&ids, usize::MAX);
            let square: f64 = got.iter().zip(&want).map(|(&g, &w)| f64::from(g - w).powi(2)).sum();
            (loaded.dtype(), (square / got.len() as f64).sqrt() / std)
        };
        // Widened to f32 the weights are the same numbers.
        let (_, exact) = compare(Some(DType::F32));
        let (stored, rms) = compare(None);
        eprintln!("{dtype}: rms {rms:.2e} std as stored, {exact:.2e} std in f32");
        assert_eq!(stored, dtype);
        assert!(exact < 1e-5, "{dtype} widened: {exact:.2e} std");
        assert!(rms < bar, "{dtype}: {rms:.2e} std");
    }
}

#[test]
fn batches_that_make_no_sense_are_refused() {
    let dir = TestModel::qwen3(1).write(Store::F32);
    let model = load(dir.str(), None, 1);
    let mut kv = KvCache::new(model.kv_layout(), 4).expect("a cache");
    let mut workspace = Workspace::new();
    let good = ForwardBatch {
        token_ids: &[1, 2, 3],
        positions: &[0, 1, 0],
        slot_mapping: &[64, 65, 0],
        cu_seqlens_q: &[0, 2, 3],
        context_lens: &[2, 1],
        block_tables: &[2, 0],
        max_blocks_per_seq: 1,
        logits_rows: &[1, 2],
    };
    let mut logits = vec![0.0; 2 * 70];
    let mut run = |batch: &ForwardBatch<'_>, logits: &mut [f32]| {
        model.forward(batch, &mut kv, &mut workspace, logits, &|| false)
    };
    run(&good, &mut logits).expect("a good batch");
    let bad: Vec<(&str, ForwardBatch<'_>)> = vec![
        ("token id 70", ForwardBatch { token_ids: &[1, 70, 3], ..good }),
        ("token id 4294967295", ForwardBatch { token_ids: &[1, 2, u32::MAX], ..good }),
        ("positions", ForwardBatch { positions: &[0, 1], ..good }),
        ("position 5", ForwardBatch { positions: &[0, 5, 0], ..good }),
        ("slot 66", ForwardBatch { slot_mapping: &[64, 66, 0], ..good }),
        ("slot 4294967295", ForwardBatch { slot_mapping: &[64, 65, u32::MAX], ..good }),
        ("cu_seqlens_q", ForwardBatch { cu_seqlens_q: &[], ..good }),
        ("cu_seqlens_q", ForwardBatch { cu_seqlens_q: &[0, 2], ..good }),
        ("cu_seqlens_q", ForwardBatch { cu_seqlens_q: &[1, 2, 3], ..good }),
        ("cu_seqlens_q", ForwardBatch { cu_seqlens_q: &[0, 2, 4], ..good }),
        ("sequence 0", ForwardBatch { cu_seqlens_q: &[0, 4, 3], ..good }),
        ("sequence 0", ForwardBatch { context_lens: &[1, 1], ..good }),
        ("sequence 0", ForwardBatch { context_lens: &[33, 1], ..good }),
        ("context of 256", ForwardBatch { context_lens: &[257, 1], ..good }),
        ("context of 256", ForwardBatch { context_lens: &[u32::MAX, 1], ..good }),
        ("block_tables", ForwardBatch { block_tables: &[2], ..good }),
        ("block_tables", ForwardBatch { max_blocks_per_seq: usize::MAX, ..good }),
        ("block 4 of 4", ForwardBatch { block_tables: &[4, 0], ..good }),
        ("row 3 of 3", ForwardBatch { logits_rows: &[1, 3], ..good }),
    ];
    for (named, batch) in &bad {
        let error = run(batch, &mut logits).expect_err(named);
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.message().contains(named), "{error} does not name {named}");
    }
    assert!(run(&good, &mut logits[1..]).is_err());
    let nothing = ForwardBatch {
        token_ids: &[],
        positions: &[],
        slot_mapping: &[],
        cu_seqlens_q: &[0],
        context_lens: &[],
        block_tables: &[],
        max_blocks_per_seq: 0,
        logits_rows: &[],
    };
    run(&nothing, &mut []).expect("an empty batch does nothing");
    run(&good, &mut logits).expect("and the model still works");
}

#[test]
fn a_pass_can_be_stopped_and_another_models_cache_is_refused() {
    let dir = TestModel::qwen3(1).write(Store::F32);
    let model = load(dir.str(), None, 1);
    let batch = ForwardBatch {
        token_ids: &[1],
        positions: &[0],
        slot_mapping: &[0],
        cu_seqlens_q: &[0, 1],
        context_lens: &[1],
        block_tables: &[0],
        max_blocks_per_seq: 1,
        logits_rows: &[0],
    };
    let mut logits = vec![0.0; 70];
    let mut workspace = Workspace::new();
    let mut kv = KvCache::new(model.kv_layout(), 1).expect("a cache");
    let error = model
        .forward(&batch, &mut kv, &mut workspace, &mut logits, &|| true)
        .expect_err("was stopped");
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    let mut other =
        KvCache::new(model.config().kv_layout(DType::BF16, KvFormat::Dense), 1).expect("a cache");
    assert!(model.forward(&batch, &mut other, &mut workspace, &mut logits, &|| false).is_err());
    assert!(KvCache::new(model.kv_layout(), usize::MAX).is_err());
    workspace.reserve(model.config(), 64, 8).expect("room");
    assert!(workspace.reserve(model.config(), usize::MAX / 8, 1).is_err());
    assert!(workspace.size_bytes() > 0);
}
