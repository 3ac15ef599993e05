//! Rotary frequencies, plain and YaRN, against the formulas of the papers in f64.

use serde_json::{json, Value};
use xserv::error::ErrorKind;
use xserv::model::{ModelConfig, RopeConfig, RopeScaling};

fn rope(rope_scaling: Value) -> Result<(RopeConfig, usize), xserv::error::Error> {
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
        "vocab_size": 151936, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "rope_theta": 1000000, "rope_scaling": rope_scaling,
    });
    let config = ModelConfig::parse(config.to_string().as_bytes())?;
    Ok((config.rope.expect("Qwen3 has rotary positions"), config.max_context_tokens))
}

/// YaRN in the words of the paper (arXiv 2309.00071, definition 2 of section 3.2): with
/// r(i) = L / wavelength(i) turns of pair i within the original context L,
/// h(i) = (1 - gamma) theta_i / s + gamma theta_i, where gamma goes from 0 to 1 between `slow` and
/// `fast` turns. Transformers takes the ramp linear in i between the (rounded) pairs that turn
/// `fast` and `slow` times; so does this.
pub fn yarn_f64(
    head_dim: usize,
    theta: f64,
    factor: f64,
    original: f64,
    (fast, slow): (f64, f64),
    truncate: bool,
) -> Vec<f64> {
    let pair_turning = |turns: f64| {
        // L theta^(-2i/d) / (2 pi) = turns
        let exponent = (original / (2.0 * std::f64::consts::PI * turns)).ln() / theta.ln();
        exponent * head_dim as f64 / 2.0
    };
    let (mut low, mut high) = (pair_turning(fast), pair_turning(slow));
    if truncate {
        low = low.floor();
        high = high.ceil();
    }
    low = low.max(0.0);
    high = high.min(head_dim as f64 - 1.0);
    if low == high {
        high += 0.001;
    }
    (0..head_dim / 2)
        .map(|i| {
            let frequency = theta.powf(-2.0 * i as f64 / head_dim as f64);
            let gamma = 1.0 - ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 - gamma) * frequency / factor + gamma * frequency
        })
        .collect()
}

#[track_caller]
fn assert_close(got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        // The exponent 2i/d is an f32 in Transformers; times ln(theta) that is some 1e-6.
        assert!((f64::from(g) / w - 1.0).abs() < 2e-6, "pair {i}: {g} against {w}");
    }
}

#[test]
fn plain_frequencies() {
    let (rope, context) = rope(Value::Null).expect("valid");
    let want: Vec<f64> = (0..64).map(|i| 1e6_f64.powf(-2.0 * f64::from(i) / 128.0)).collect();
    assert_close(&rope.inv_freq(128).expect("room"), &want);
    assert_eq!((rope.attention_scaling(), context), (1.0, 40960));
}

/// The values that PyTorch 2.11 computes for head_dim 8, theta 10000, bit for bit.
#[test]
fn plain_frequencies_have_the_bits_of_pytorch() {
    let rope = RopeConfig { theta: 10_000.0, scaling: RopeScaling::None };
    assert_eq!(rope.inv_freq(8).expect("room"), [1.0, 0.1, 0.01, 0.001]);
}

#[test]
fn yarn_as_qwen3_documents_it() {
    let scaling = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768
    });
    let (rope, context) = rope(scaling).expect("valid");
    assert_close(
        &rope.inv_freq(128).expect("room"),
        &yarn_f64(128, 1e6, 4.0, 32768.0, (32.0, 1.0), true),
    );
    assert!((f64::from(rope.attention_scaling()) - (0.1 * 4.0_f64.ln() + 1.0)).abs() < 1e-7);
    assert_eq!(context, 131_072);
}

#[test]
fn every_parameter_of_yarn_counts() {
    // Transformers takes null for false here, and for absent elsewhere.
    for truncate in [json!(false), Value::Null] {
        let scaling = json!({
            "type": "yarn", "factor": 8, "original_max_position_embeddings": 4096, "beta_fast": 16,
            "beta_slow": 2.5, "truncate": truncate, "attention_factor": 1.25
        });
        let (rope, context) = rope(scaling).expect("valid");
        assert_close(
            &rope.inv_freq(128).expect("room"),
            &yarn_f64(128, 1e6, 8.0, 4096.0, (16.0, 2.5), false),
        );
        assert_eq!((rope.attention_scaling(), context), (1.25, 40960));
    }
}

#[test]
fn mscale_of_yarn() {
    let scaling =
        json!({"rope_type": "yarn", "factor": 10.0, "mscale": 2.0, "mscale_all_dim": 0.5});
    let (rope, context) = rope(scaling).expect("valid");
    let want = (0.2 * 10.0_f64.ln() + 1.0) / (0.05 * 10.0_f64.ln() + 1.0);
    assert!((f64::from(rope.attention_scaling()) - want).abs() < 1e-7);
    // Without an original length the configured one is it.
    assert_eq!(context, 409_600);
}

#[test]
fn absurd_scalings_are_refused_by_name() {
    for (scaling, named) in [
        (json!({"rope_type": "yarn"}), "factor"),
        (json!({"rope_type": "yarn", "factor": 0.5}), "factor"),
        (json!({"rope_type": "yarn", "factor": 1e300}), "factor"),
        (json!({"rope_type": "yarn", "factor": "4"}), "factor"),
        (json!({"rope_type": "yarn", "factor": 4, "beta_fast": -1}), "beta_fast"),
        (json!({"rope_type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2}), "beta_fast"),
        (json!({"rope_type": "yarn", "factor": 4, "attention_factor": 0}), "attention_factor"),
        (
            json!({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0}),
            "original_max_position_embeddings",
        ),
        (
            json!({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 1e12}),
            "original_max_position_embeddings",
        ),
        (json!({"rope_type": "default", "rope_theta": 0}), "rope_theta"),
        (json!({"rope_type": 7}), "rope_type"),
        (json!({"rope_type": "linear"}), "factor"),
        (json!({"rope_type": "llama3", "factor": 2.0}), "low_freq_factor"),
    ] {
        let error = rope(scaling.clone()).expect_err("must be refused");
        assert_eq!(error.kind(), ErrorKind::InvalidFile, "{scaling}: {error}");
        assert!(error.message().contains(named), "{scaling}: {error}");
    }
    for (scaling, named) in [
        (json!({"rope_type": "longrope", "factor": 2.0}), "longrope"),
        (json!({"type": "dynamic", "factor": 2.0}), "dynamic"),
        (json!({"full_attention": {"rope_type": "default"}}), "full_attention"),
    ] {
        let error = rope(scaling.clone()).expect_err("must be refused");
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{scaling}: {error}");
        assert!(error.message().contains(named), "{scaling}: {error}");
    }
}

/// Some of what Transformers 5.17 with PyTorch 2.11 computes
/// (`ROPE_INIT_FUNCTIONS["yarn"]`, head_dim 128, theta 1e6, 40960 positions).
#[test]
fn yarn_gives_the_numbers_of_transformers() {
    const PAIRS: [usize; 10] = [0, 1, 20, 23, 24, 30, 35, 36, 40, 63];
    let cases: [(Value, f64, [f64; 10]); 3] = [
        (
            json!({
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768
            }),
            1.138629436111989,
            [
                1.0,
                0.8058422207832336,
                0.01333521492779255,
                0.006978305988013744,
                0.005375321488827467,
                0.0010643609566614032,
                0.0002462583943270147,
                0.0001798411540221423,
                4.4456985051510856e-05,
                3.102344408034696e-07,
            ],
        ),
        (
            json!({
                "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096,
                "beta_fast": 16, "beta_slow": 2.5, "truncate": false, "attention_factor": 1.25
            }),
            1.25,
            [
                1.0,
                0.8058422207832336,
                0.009500585496425629,
                0.0028414565604180098,
                0.001717566279694438,
                0.00019249081378802657,
                6.541238690260798e-05,
                5.271206100587733e-05,
                2.2228492525755428e-05,
                1.551172204017348e-07,
            ],
        ),
        (
            json!({"rope_type": "yarn", "factor": 10.0, "mscale": 2.0, "mscale_all_dim": 0.5}),
            1.3097289058725343,
            [
                1.0,
                0.8058422207832336,
                0.01333521492779255,
                0.006978305988013744,
                0.005623413249850273,
                0.0010507734259590507,
                0.0002185543125960976,
                0.00015379519027192146,
                2.719721305766143e-05,
                1.240937734792169e-07,
            ],
        ),
    ];
    for (scaling, factor, want) in cases {
        let (rope, _) = rope(scaling.clone()).expect("valid");
        assert_eq!(rope.attention_scaling(), factor as f32, "{scaling}");
        let got = rope.inv_freq(128).expect("room");
        for (pair, want) in PAIRS.into_iter().zip(want) {
            let off = (f64::from(got[pair]) / want - 1.0).abs();
            // A unit in the last place of f32 is up to 1.2e-7.
            assert!(off < 2.5e-7, "{scaling}: pair {pair}: {} against {want}", got[pair]);
        }
    }
}
