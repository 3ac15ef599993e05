#!/usr/bin/env python3
"""Writes what Transformers' configuration classes make of config.json, with every field and with few: configs.json.

    pip install torch transformers
    python configs.py

configs.json is a list of {name, config, expected}: a config.json and what follows from it. `inv_freq` are the angles per
position of the pairs of a head, as the bits of float32 in hexadecimal, and `attention_scaling` is the factor of cos and sin,
both from the rotary embedding of the model's own module. `biases` are those that the model has, in the order of
q, k, v, o, gate, up, down. `sliding_windows` has the window of each layer, or null. `experts` of a mixture are
their number, how many a token takes, whether their weights have the sum 1, their width, and which layers have them.
"""
import json
import os
import struct
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
BARE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}


def of(family, **more):
    names = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
             "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM"}
    return {"architectures": [names[family]], "model_type": family, **BARE, **more}


CASES = [
    ("bare llama", of("llama")),
    ("llama with nulls", of("llama", head_dim=None, num_key_value_heads=None, rope_scaling=None, pretraining_tp=1, pad_token_id=None)),
    ("llama with everything", of("llama", head_dim=32, num_key_value_heads=2, max_position_embeddings=4096, rms_norm_eps=1e-5, rope_theta=500000.0,
                                 attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="silu", pretraining_tp=2)),
    ("llama, biases of the attention", of("llama", attention_bias=True)),
    ("llama, biases of the MLP", of("llama", mlp_bias=True)),
    ("Llama-2-7b", of("llama", num_key_value_heads=8, max_position_embeddings=4096, rms_norm_eps=1e-5, pretraining_tp=1, rope_scaling=None)),
    ("Llama-3.1-8B", of("llama", head_dim=128, num_key_value_heads=2, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=LLAMA3)),
    ("Llama-3.2-1B", of("llama", head_dim=64, num_key_value_heads=2, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
                        rope_theta=500000.0, rope_scaling={**LLAMA3, "factor": 32.0})),
    ("Llama-3.2-1B in the new spelling", of("llama", head_dim=64, num_key_value_heads=2, max_position_embeddings=131072, rms_norm_eps=1e-5,
                                            tie_word_embeddings=True, rope_parameters={**LLAMA3, "factor": 32.0, "rope_theta": 500000.0})),
    ("llama3 by type alone", of("llama", head_dim=128, max_position_embeddings=131072, rope_theta=500000.0,
                                rope_scaling={**{k: v for k, v in LLAMA3.items() if k != "rope_type"}, "type": "llama3"})),
    ("llama3 with whole numbers", of("llama", head_dim=80, max_position_embeddings=4096, rope_theta=10000,
                                     rope_scaling={**LLAMA3, "factor": 4, "low_freq_factor": 1, "high_freq_factor": 8, "original_max_position_embeddings": 512})),
    ("llama3 without the original context", of("llama", head_dim=64, max_position_embeddings=4096, rope_theta=500000.0,
                                               rope_scaling={k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"})),
    ("llama3 with the original context beside it", of("llama", head_dim=64, max_position_embeddings=16384, rope_theta=500000.0,
                                                      original_max_position_embeddings=2048, rope_scaling=LLAMA3)),
    ("both spellings", of("llama", head_dim=64, rope_theta=20000.0, rope_scaling={"rope_type": "linear", "factor": 2.0},
                          rope_parameters={"rope_type": "linear", "factor": 8.0, "rope_theta": 40000.0})),
    ("two types", of("llama", head_dim=64, rope_scaling={"rope_type": "linear", "type": "default", "factor": 2.0})),
    ("linear", of("llama", head_dim=128, max_position_embeddings=16384, rope_theta=100000, rope_scaling={"type": "linear", "factor": 4.0})),
    ("llama with YaRN", of("llama", head_dim=128, max_position_embeddings=65536, rope_scaling={"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096})),
    ("bare mistral", of("mistral", num_attention_heads=16)),
    ("mistral with nulls", of("mistral", head_dim=None, sliding_window=None)),
    ("Mistral-7B-v0.1", of("mistral", num_key_value_heads=2, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=4096)),
    ("Mistral-7B-v0.3", of("mistral", head_dim=128, num_key_value_heads=2, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=1000000.0,
                           sliding_window=None)),
    ("mistral with a window beyond its context", of("mistral", max_position_embeddings=2048, sliding_window=8192)),
    ("mistral asked for biases that it has not", of("mistral", attention_bias=True, mlp_bias=True, sliding_window=None)),
    ("qwen2 with few fields", of("qwen2", num_key_value_heads=4)),
    ("qwen2 with nulls", of("qwen2", num_key_value_heads=None, rope_scaling=None, layer_types=None)),
    ("Qwen2.5-0.5B", of("qwen2", num_key_value_heads=2, max_position_embeddings=32768, max_window_layers=1, rms_norm_eps=1e-6, rope_theta=1000000.0,
                        sliding_window=32768, tie_word_embeddings=True, use_mrope=False, use_sliding_window=False)),
    ("Qwen2.5-7B in the new spelling", of("qwen2", head_dim=128, num_key_value_heads=2, max_position_embeddings=32768, max_window_layers=2, sliding_window=None,
                                          layer_types=["full_attention"] * 2, rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"})),
    ("Qwen2.5 with YaRN", of("qwen2", head_dim=128, num_key_value_heads=2, max_position_embeddings=32768, rope_theta=1000000.0,
                             rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"})),
    ("qwen2, a window behind its last layer", of("qwen2", num_key_value_heads=8, sliding_window=16, use_sliding_window=True, max_window_layers=2)),
    ("qwen2, a window that is null", of("qwen2", num_key_value_heads=8, sliding_window=None, use_sliding_window=True, max_window_layers=0)),
    ("qwen2, a window that no layer has", of("qwen2", num_key_value_heads=8, sliding_window=16, use_sliding_window=True, max_window_layers=0,
                                             layer_types=["full_attention"] * 2)),
    ("qwen2, a window in its last layer", of("qwen2", num_key_value_heads=8, sliding_window=16, use_sliding_window=True, max_window_layers=1)),
    ("qwen2, a window in all layers", of("qwen2", num_key_value_heads=8, use_sliding_window=True, max_window_layers=0)),
    ("qwen2, a window in the layers that are named", of("qwen2", num_key_value_heads=8, sliding_window=100, use_sliding_window=True, max_window_layers=1,
                                                        layer_types=["sliding_attention", "full_attention"])),
    ("qwen2, a window and no first layer", of("qwen2", num_key_value_heads=8, sliding_window=16, use_sliding_window=True, num_hidden_layers=30)),
    ("qwen3, a window in its last layer", of("qwen3", num_key_value_heads=8, sliding_window=16, use_sliding_window=True, max_window_layers=1)),
    ("qwen3, a window in the layers that are named", of("qwen3", num_key_value_heads=8, sliding_window=100, use_sliding_window=True,
                                                        layer_types=["sliding_attention", "full_attention"])),
    ("qwen3, a window that is switched off", of("qwen3", num_key_value_heads=8, sliding_window=16, use_sliding_window=False, max_window_layers=0)),
    ("qwen2 asked for biases that it has not", of("qwen2", num_key_value_heads=8, attention_bias=False, mlp_bias=True)),
    ("bare qwen3_moe", of("qwen3_moe")),
    ("qwen3_moe with nulls", of("qwen3_moe", mlp_only_layers=None, rope_scaling=None)),
    ("Qwen3-30B-A3B", of("qwen3_moe", head_dim=128, num_key_value_heads=4, decoder_sparse_step=1, max_position_embeddings=40960, max_window_layers=48,
                         mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8, rms_norm_eps=1e-6,
                         rope_scaling=None, rope_theta=1000000.0, sliding_window=None, use_sliding_window=False)),
    ("qwen3_moe in the new spelling", of("qwen3_moe", num_local_experts=6, num_experts_per_tok=6, moe_intermediate_size=32,
                                         rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"})),
    ("qwen3_moe, every third layer", of("qwen3_moe", num_experts=4, num_experts_per_tok=2, decoder_sparse_step=3, num_hidden_layers=7)),
    ("qwen3_moe, some layers without", of("qwen3_moe", num_experts=4, num_experts_per_tok=1, decoder_sparse_step=2, mlp_only_layers=[0, 3, 9],
                                          num_hidden_layers=6, norm_topk_prob=True)),
    ("qwen3_moe without experts", of("qwen3_moe", num_experts=4, num_experts_per_tok=2, mlp_only_layers=[1, 0], attention_bias=True)),
    ("qwen3_moe with a window", of("qwen3_moe", num_experts=4, num_experts_per_tok=2, sliding_window=16, use_sliding_window=True, max_window_layers=2)),
    ("qwen3_moe, the window of no file", of("qwen3_moe", num_experts=4, num_experts_per_tok=2, use_sliding_window=True)),
    ("qwen3_moe, a window that is switched off", of("qwen3_moe", num_experts=4, num_experts_per_tok=2, sliding_window=16)),
    ("bare mixtral", of("mixtral")),
    ("mixtral with nulls", of("mixtral", head_dim=None, sliding_window=None)),
    ("Mixtral-8x7B", of("mixtral", num_key_value_heads=8, max_position_embeddings=32768, num_experts_per_tok=2, num_local_experts=8, rms_norm_eps=1e-5,
                        rope_theta=1000000.0, sliding_window=None)),
    ("mixtral in the new spelling", of("mixtral", num_experts=4, num_experts_per_tok=1, num_key_value_heads=2, head_dim=32, sliding_window=32,
                                       rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})),
]


def experts(config, model):
    layers = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    if True not in layers:
        return None
    mlp = model.model.layers[layers.index(True)].mlp
    return {"num_experts": mlp.experts.num_experts, "per_token": mlp.gate.top_k, "renormalises": getattr(mlp.gate, "norm_topk_prob", True),
            "width": mlp.experts.intermediate_dim, "layers": layers}


def expected(values):
    # Transformers moves what it finds in a nested object, so each gets its own copy.
    config = AutoConfig.for_model(**json.loads(json.dumps(values)))
    model = AutoModelForCausalLM.from_config(config)
    rotary, attention = model.model.rotary_emb, model.model.layers[0].self_attn
    names = {name for name, _ in model.named_parameters()}
    layer = "model.layers.1."
    parts = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    if config.model_type in ("qwen2", "qwen3", "qwen3_moe"):
        windows = [l.self_attn.sliding_window for l in model.model.layers]
    else:
        windows = [getattr(config, "sliding_window", None)] * config.num_hidden_layers
    inv_freq = rotary.inv_freq.float()
    assert 2 * len(inv_freq) == attention.head_dim
    return {"head_dim": attention.head_dim, "num_key_value_heads": attention.k_proj.out_features // attention.head_dim,
            "max_position_embeddings": config.max_position_embeddings, "rms_norm_eps": model.model.norm.variance_epsilon,
            "tie_word_embeddings": config.tie_word_embeddings, "sliding_windows": windows, "experts": experts(config, model),
            "biases": [f"{layer}{part}.bias" in names for part in parts],
            "attention_scaling": rotary.attention_scaling, "inv_freq": " ".join(struct.pack(">f", float(f)).hex() for f in inv_freq)}


def main():
    transformers.utils.logging.set_verbosity_error()
    rows = [{"name": name, "config": config, "expected": expected(config)} for name, config in CASES]
    text = ",\n".join(json.dumps(row) for row in rows)
    (HERE / "configs.json").write_text(f"[\n{text}\n]\n")
    for row in rows:
        print(f"{row['name']:44}", {key: value for key, value in row["expected"].items() if key != "inv_freq"})


if __name__ == "__main__":
    main()
