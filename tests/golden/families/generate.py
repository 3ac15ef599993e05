#!/usr/bin/env python3
"""References for the families Llama, Mistral and Qwen2, Qwen3 with windows, and mixtures of experts, computed by PyTorch and Transformers.

    pip install torch transformers safetensors numpy
    python generate.py                  # every model; or: generate.py <folder>...
    python generate.py --check          # computes the logits again and compares them with the files

The models are published configurations, scaled down, with random weights. No weights are stored: a tensor's
elements are `offset + scale * u`, where the u in -1..1 come from SplitMix64 seeded with the FNV-1a hash of
"<seed>/<name>" (`values` below; `family_weights` in tests/support/model_golden.rs makes the same). Everything is computed
in float64 and rounded once to float32 and once to the stored type; `checksum` says whether both made the same.

Each folder holds one configuration:

    config.json         as a published model has it (`torch_dtype` or `dtype` is set to the stored type of the seed)
    references.json     tensors: {name, shape, scale, offset}; shards: how many files the weights are spread over;
                        mistakes: how far (max abs / std) the logits of the first seed move when a reader makes one;
                        models: one for each seed, of {seed, store, checksum, prompts}, and of each prompt the ids, the rows
                        (positions) whose logits are kept, 24 greedy tokens with the margin (top1 - top2) of every step, and
                        what Transformers' own runs in bfloat16 and float16 lose against float32 on these rows
    logits.safetensors  "<seed>.<prompt>": f32 [rows, vocab_size]

The logits are computed in float32 from the stored weights with eager attention on one thread.
"""
import json
import math
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
NEW = 24
MASK = (1 << 64) - 1
# The stored type of each seed.
STORES = {1: "BF16", 2: "F16", 3: "F32", 4: "BF16", 5: "F16"}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# (name, tokens, rows whose logits are kept)
PROMPTS = [("long", 96, [0, 1, 31, 32, 63, 64, 95]), ("short", 7, list(range(7))), ("one_token", 1, [0])]
# The bar of the comparison in float32, as max abs / std; a mistake has to move the logits by 20 times as much.
BAR = 2e-4


def llama(**more):
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 2,
            "initializer_range": 0.02, "use_cache": True, **more}


def llama3(factor, original, kind="rope_type", **more):
    return {"factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": original, kind: "llama3", **more}


def mistral(**more):
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "num_hidden_layers": 2,
            "initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0, **more}


def qwen2(**more):
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "num_hidden_layers": 2, "attention_dropout": 0.0,
            "initializer_range": 0.02, "rms_norm_eps": 1e-6, "use_cache": True, **more}


def qwen3(**more):
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "num_hidden_layers": 2, "attention_bias": False,
            "attention_dropout": 0.0, "initializer_range": 0.02, "rms_norm_eps": 1e-6, "use_cache": True, **more}


def qwen3_moe(**more):
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
            "initializer_range": 0.02, "rms_norm_eps": 1e-6, "use_cache": True, "output_router_logits": False, "router_aux_loss_coef": 0.001, **more}


def mixtral(**more):
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02,
            "output_router_logits": False, "rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.02, "use_cache": True, **more}


# Folder -> (config.json, what else the folder holds). Widths, layers, vocabularies and lengths are smaller than published; ratios, dimensions of
# heads, constants, and which fields there are, are not. Where `original_max_position_embeddings` is given, the long prompt reaches beyond it.
MODELS = {
    "llama-3.1-8b": (llama(attention_bias=False, attention_dropout=0.0, bos_token_id=250, eos_token_id=[251, 253, 254], hidden_size=64, head_dim=128,
                           intermediate_size=224, max_position_embeddings=512, mlp_bias=False, num_attention_heads=4, num_key_value_heads=1,
                           pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=llama3(8.0, 64), rope_theta=500000.0, tie_word_embeddings=False,
                           torch_dtype=None, vocab_size=256),
                     {"shards": 3, "generation_config": {"bos_token_id": 250, "do_sample": True, "eos_token_id": [251, 253, 254], "temperature": 0.6,
                                                         "top_p": 0.9}}),
    # 32 heads over 8, as in the new spelling that Transformers 5 writes.
    "llama-3.2-1b": (llama(attention_bias=False, attention_dropout=0.0, bos_token_id=250, eos_token_id=251, head_dim=64, hidden_size=64, dtype=None,
                           intermediate_size=256, max_position_embeddings=1024, mlp_bias=False, num_attention_heads=8, num_key_value_heads=2,
                           pad_token_id=None, pretraining_tp=1, rms_norm_eps=1e-5, rope_parameters=llama3(32.0, 32, rope_theta=500000.0),
                           tie_word_embeddings=True, vocab_size=256), {}),
    # 24 heads over 8, with the oldest spelling of the type.
    "llama-3.2-3b": (llama(attention_bias=False, bos_token_id=250, eos_token_id=[251, 253, 254], head_dim=128, hidden_size=96, intermediate_size=256,
                           max_position_embeddings=1024, mlp_bias=False, num_attention_heads=6, num_key_value_heads=2, pretraining_tp=1,
                           rms_norm_eps=1e-5, rope_scaling=llama3(32.0, 32, "type"), rope_theta=500000.0, tie_word_embeddings=True,
                           torch_dtype=None, vocab_size=256), {}),
    # The first Llama: no heads of keys, no theta, no head_dim; and with heads of 80 as some others have.
    "llama-7b": (llama(bos_token_id=1, eos_token_id=2, hidden_size=160, intermediate_size=216, max_position_embeddings=256, num_attention_heads=2,
                       pad_token_id=0, rms_norm_eps=1e-6, tie_word_embeddings=False, torch_dtype=None, vocab_size=256), {}),
    # Llama 2 with fields that are null, and a longer context by linear scaling.
    "llama-2-linear": (llama(bos_token_id=1, eos_token_id=2, head_dim=None, hidden_size=96, intermediate_size=256, max_position_embeddings=256,
                             num_attention_heads=4, num_key_value_heads=None, pretraining_tp=1, rms_norm_eps=1e-5,
                             rope_scaling={"type": "linear", "factor": 4.0}, tie_word_embeddings=False, torch_dtype=None, vocab_size=260), {}),
    # Every bias that the configuration can ask for.
    "llama-biases": (llama(attention_bias=True, mlp_bias=True, bos_token_id=1, eos_token_id=2, hidden_size=128, intermediate_size=192,
                           max_position_embeddings=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-5, rope_theta=10000.0,
                           rope_scaling=None, tie_word_embeddings=False, torch_dtype=None, vocab_size=256), {}),
    "mistral-7b-v0.1": (mistral(bos_token_id=1, eos_token_id=2, hidden_size=96, intermediate_size=336, max_position_embeddings=1024,
                                num_attention_heads=4, num_key_value_heads=1, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=128,
                                tie_word_embeddings=False, torch_dtype=None, vocab_size=256), {}),
    "mistral-7b-v0.3": (mistral(bos_token_id=1, eos_token_id=2, hidden_size=64, head_dim=128, intermediate_size=224, max_position_embeddings=1024,
                                num_attention_heads=4, num_key_value_heads=1, rms_norm_eps=1e-5, rope_theta=1000000.0, sliding_window=None,
                                tie_word_embeddings=False, torch_dtype=None, vocab_size=256), {"shards": 2}),
    # head_dim is not hidden_size / num_attention_heads, as in Mistral-Nemo.
    "mistral-nemo": (mistral(bos_token_id=1, eos_token_id=2, head_dim=64, hidden_size=160, intermediate_size=288, max_position_embeddings=2048, dtype=None,
                             num_attention_heads=4, num_key_value_heads=1, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
                             sliding_window=None, tie_word_embeddings=False, vocab_size=320), {}),
    # The window is shorter than the prompts, and switched off.
    "qwen2.5-0.5b": (qwen2(bos_token_id=250, eos_token_id=251, hidden_size=224, intermediate_size=128, max_position_embeddings=1024, max_window_layers=1,
                           num_attention_heads=14, num_key_value_heads=2, rope_theta=1000000.0, sliding_window=32, tie_word_embeddings=True,
                           torch_dtype=None, use_mrope=False, use_sliding_window=False, vocab_size=256), {}),
    # 28 heads over 4, heads of 128, in the new spelling.
    "qwen2.5-7b": (qwen2(bos_token_id=250, eos_token_id=251, hidden_size=112, head_dim=128, intermediate_size=256, max_position_embeddings=1024, dtype=None,
                         max_window_layers=2, layer_types=["full_attention"] * 2, num_attention_heads=7, num_key_value_heads=1, pad_token_id=None,
                         rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"}, sliding_window=None, tie_word_embeddings=False,
                         use_sliding_window=False, vocab_size=256), {}),
    # With the entry for long texts that its card gives.
    "qwen2.5-yarn": (qwen2(bos_token_id=250, eos_token_id=251, hidden_size=128, intermediate_size=256, max_position_embeddings=256, max_window_layers=2,
                           num_attention_heads=2, num_key_value_heads=2, rope_theta=1000000.0, sliding_window=32, tie_word_embeddings=False, torch_dtype=None,
                           rope_scaling={"factor": 4.0, "original_max_position_embeddings": 64, "type": "yarn"}, use_sliding_window=False,
                           vocab_size=256), {}),
    # Windows much shorter than the long prompt: in all layers, in those from max_window_layers on, and in those that layer_types names.
    "mistral-window": (mistral(bos_token_id=1, eos_token_id=2, hidden_size=64, head_dim=128, intermediate_size=224, max_position_embeddings=256,
                               num_attention_heads=4, num_key_value_heads=1, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=7,
                               tie_word_embeddings=False, torch_dtype=None, vocab_size=256), {}),
    "qwen2.5-window": (qwen2(bos_token_id=250, eos_token_id=251, hidden_size=112, intermediate_size=256, max_position_embeddings=256, max_window_layers=1,
                             num_attention_heads=7, num_key_value_heads=1, rope_theta=1000000.0, sliding_window=40, tie_word_embeddings=False,
                             head_dim=64, torch_dtype=None, use_sliding_window=True, vocab_size=256), {}),
    "qwen3-window": (qwen3(bos_token_id=250, eos_token_id=251, hidden_size=128, head_dim=128, intermediate_size=256, max_position_embeddings=256,
                           max_window_layers=2, layer_types=["sliding_attention", "full_attention", "sliding_attention"], num_hidden_layers=3,
                           num_attention_heads=4, num_key_value_heads=2, rope_theta=1000000.0, sliding_window=21, tie_word_embeddings=True,
                           torch_dtype=None, use_sliding_window=True, vocab_size=256), {}),
    # As Transformers 5 holds it: the experts of a layer in one tensor, and their number under its other name.
    "qwen3-30b-a3b": (qwen3_moe(bos_token_id=250, eos_token_id=251, hidden_size=64, head_dim=64, intermediate_size=192, max_position_embeddings=256,
                                dtype=None, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=1, decoder_sparse_step=1, mlp_only_layers=[],
                                moe_intermediate_size=48, norm_topk_prob=True, num_experts_per_tok=3, num_local_experts=8, sliding_window=None,
                                rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"}, tie_word_embeddings=False, use_sliding_window=False,
                                vocab_size=256), {"fused": True}),
    # Experts in the second and the last of six layers, whose weights do not have the sum 1.
    "qwen3-moe-steps": (qwen3_moe(bos_token_id=250, eos_token_id=251, hidden_size=96, intermediate_size=160, max_position_embeddings=256, torch_dtype=None,
                                  num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=32, decoder_sparse_step=2, mlp_only_layers=[3],
                                  max_window_layers=6, moe_intermediate_size=64, norm_topk_prob=False, num_experts=6, num_experts_per_tok=2,
                                  rope_scaling=None, rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=True, use_sliding_window=False,
                                  vocab_size=256), {}),
    "mixtral-8x7b": (mixtral(bos_token_id=1, eos_token_id=2, hidden_size=64, intermediate_size=224, max_position_embeddings=256, num_attention_heads=4,
                             num_hidden_layers=2, num_key_value_heads=1, num_experts_per_tok=2, num_local_experts=8, rope_theta=1000000.0,
                             sliding_window=None, tie_word_embeddings=False, torch_dtype=None, vocab_size=256), {"shards": 2}),
}


def fnv1a(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 & MASK
    return h


def values(seed, tensor):
    """The elements of a tensor as float32."""
    start, count = fnv1a(f"{seed}/{tensor['name']}".encode()), math.prod(tensor["shape"])
    z = np.uint64(start) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    signed = (z >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1.0
    return torch.from_numpy((tensor["offset"] + tensor["scale"] * signed).astype(np.float32).reshape(tensor["shape"]))


def checksum(weights):
    """Returns the checksum of the stored bits, in the order of the tensors."""
    total = 0
    for tensor in weights.values():
        words = tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy().reshape(-1)
        words = words.view(np.uint32 if tensor.dtype == torch.float32 else np.uint16).astype(np.uint64)
        total = (total * 31 + int((words * np.arange(1, words.size + 1, dtype=np.uint64)).sum(dtype=np.uint64))) & MASK
    return f"{total:016x}"


def stored_names(config, name, shape, fused):
    """The names and shapes under which a module's weight is stored: experts by themselves, unless they are fused."""
    layer, found, part = name.partition(".mlp.experts.")
    router = name.endswith(".mlp.gate.weight")
    published = config["model_type"] == "mixtral"
    if fused or not (found or router):
        return [(name, shape)]
    if router:
        return [(name.replace(".mlp.", ".block_sparse_moe."), shape)] if published else [(name, shape)]
    prefix = f"{layer}.{'block_sparse_moe' if published else 'mlp'}.experts"
    gate, up, down = ("w1", "w3", "w2") if published else ("gate_proj", "up_proj", "down_proj")
    count, rows, columns = shape
    kinds, rows = ((gate, up), rows // 2) if part == "gate_up_proj" else ((down,), rows)
    return [(f"{prefix}.{expert}.{kind}.weight", [rows, columns]) for expert in range(count) for kind in kinds]


def recipe(config, fused=False):
    """Names, shapes, scales and offsets of the tensors, with logits of about unit variance and scores that are not flat."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tied = config["tie_word_embeddings"]
    gains = {"q_proj": 1.5, "k_proj": 1.5, "v_proj": 1.0, "o_proj": 1.5, "gate_proj": 1.0, "up_proj": 1.0, "down_proj": 1.5, "lm_head": 1.0}
    # A router, and the experts of a mixture.
    gains |= {"gate": 1.5, "gate_up_proj": 1.0, "w1": 1.0, "w3": 1.0, "w2": 1.5}
    tensors = []
    stored = [pair for name, weight in model.state_dict().items() for pair in stored_names(config, name, list(weight.shape), fused)]
    for name, shape in stored:
        part, kind = name.split(".")[-2:]
        if part == "experts":
            part = kind
        if part == "lm_head" and tied:
            continue
        if part == "embed_tokens":      # small beside the epsilon of the norms, so that it matters
            scale, offset = 1 / 64, 0.0
        elif part == "norm" and tied:   # and large again before the output
            scale, offset = 4.0, 16.0
        elif "norm" in part:
            scale, offset = 0.25, 1.0
        elif kind == "bias":
            scale, offset = 0.5, 0.0
        else:
            scale, offset = round(gains[part] * math.sqrt(3 / shape[-1]) * 1024) / 1024, 0.0
        tensors.append({"name": name, "shape": shape, "scale": scale, "offset": offset})
    return tensors


def build(config, weights, store, dtype, change=None):
    """The model as Transformers reads it from a folder."""
    config = {key: (NAMES[store] if key in ("dtype", "torch_dtype") else value) for key, value in config.items()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**config, **(change or {})}))
        save_file(weights, str(Path(folder) / "model.safetensors"), metadata={"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


@torch.no_grad()
def run(model, ids):
    return model(input_ids=torch.tensor([ids])).logits[0].float()


@torch.no_grad()
def greedy(model, ids):
    """Greedy tokens with end tokens ignored, and the top1 - top2 margin of every step."""
    out, margins, past, x = [], [], None, torch.tensor([ids])
    for _ in range(NEW):
        r = model(input_ids=x, past_key_values=past, use_cache=True)
        past, top = r.past_key_values, r.logits[0, -1].float().topk(2)
        out.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
        x = torch.tensor([[out[-1]]])
    return out, margins


class Choices:
    """How clearly tokens choose their experts: the gaps between the logits of the last that is taken and of the first that is not, in
    standard deviations of the router's logits; a row for each layer of a pass."""

    def __init__(self, model):
        self.gaps = []
        for name, module in model.named_modules():
            if name.endswith(".mlp.gate"):
                module.register_forward_hook(self.keep)

    def keep(self, module, _, output):
        logits = output[0].float()
        top = logits.topk(module.top_k + 1, dim=-1).values
        self.gaps.append((top[:, -2] - top[:, -1]) / logits.std())

    def least(self, rows):
        """The least gap of these rows since the last call."""
        gaps, self.gaps = self.gaps, []
        return min((float(gap[rows].min()) for gap in gaps), default=math.inf)


def loss(low, full):
    d = (low - full).abs()
    return {"logits_std": float(full.std()), "max_abs_diff": float(d.max()), "rms_diff": float(d.pow(2).mean().sqrt())}


def mistakes(config, weights, store, ids, rows, full):
    """Measures how far the logits move, in standard deviations, when something is read wrong."""
    def moved(change=None, weights=weights):
        return float((run(build(config, weights, store, torch.float32, change), ids)[rows] - full).abs().max() / full.std())

    zeroed = lambda parts: {n: torch.zeros_like(t) if n.endswith(".bias") and n.split(".")[-2] in parts else t for n, t in weights.items()}
    has_biases = lambda part: any(n.endswith(f"{part}.bias") for n in weights)
    found = {"norm epsilon": moved({"rms_norm_eps": 1e-6 if config["rms_norm_eps"] == 1e-5 else 1e-5})}
    for part in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        if has_biases(part):
            found[f"no bias of {part}"] = moved(weights=zeroed((part,)))
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key) or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    plain = {"rope_type": "default", "rope_theta": theta}
    found["twice the theta"] = moved({key: {**rope, "rope_theta": 2 * theta}})
    if kind != "default":
        found["no rope scaling"] = moved({key: plain})
        found["half the rope factor"] = moved({key: {**rope, "factor": rope["factor"] / 2}})
    if kind == "llama3":
        found["no middle band"] = moved({key: {**rope, "low_freq_factor": 4.0, "high_freq_factor": 4.000001}})
        found["no long band"] = moved({key: {**rope, "low_freq_factor": 1e-3}})
        found["original context doubled"] = moved({key: {**rope, "original_max_position_embeddings": 128}})
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    if config["model_type"] == "mistral":
        found["a window of 64"] = moved({"sliding_window": 64})
    if config["model_type"] == "qwen2" and window and not config["use_sliding_window"]:
        found["the window is used"] = moved({"use_sliding_window": True, "max_window_layers": 0})
    if config.get("use_sliding_window") or (window or 64) < 64:
        found["a key more"] = moved({"sliding_window": window + 1})
        found["a key less"] = moved({"sliding_window": window - 1})
    if config.get("use_sliding_window"):
        found["no window"] = moved({"layer_types": ["full_attention"] * layers})
        found["windows in all layers"] = moved({"layer_types": ["sliding_attention"] * layers})
    if more := config.get("num_experts_per_tok"):
        found["an expert more"] = moved({"num_experts_per_tok": more + 1})
        found["an expert less"] = moved({"num_experts_per_tok": more - 1})
        swap = lambda n: n.replace(".experts.0.", ".experts.x.").replace(".experts.1.", ".experts.0.").replace(".experts.x.", ".experts.1.")
        turned = lambda n, t: t.roll(1, 0) if ".experts." in n and t.dim() == 3 else t
        found["other experts"] = moved(weights={swap(n): turned(n, t).contiguous() for n, t in weights.items()})
    if "norm_topk_prob" in config:
        found["the other norm_topk_prob"] = moved({"norm_topk_prob": not config["norm_topk_prob"]})
    for what, by in found.items():
        assert by > 20 * BAR, (what, by)
    return {what: float(f"{by:.2g}") for what, by in found.items()}


def references(folder, config, more, check):
    tensors = recipe(config, more.get("fused", False))
    models, logits, found = [], {}, None
    for seed, store in STORES.items():
        weights = {t["name"]: values(seed, t).to(DTYPES[store]) for t in tensors}
        full, low, half = (build(config, weights, store, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16))
        prompts, choices = [], Choices(full)
        for name, count, rows in PROMPTS:
            # The first that leaves no step of decoding in doubt, nor the experts of any row that is kept.
            for attempt in range(20000):
                r = random.Random(f"{folder} {seed} {name} {attempt}")
                ids = [r.randrange(config["vocab_size"]) for _ in range(count)]
                kept = run(full, ids)[rows].contiguous()
                if choices.least(rows) < 0.05:
                    continue
                tokens, margins = greedy(full, ids)
                if choices.least([-1]) < 0.02:
                    continue
                if min(margins) > 0.005 * float(kept.std()) and len(set(tokens)) > 2:
                    break
            else:
                raise SystemExit(f"{folder}: no prompt {name} with clear margins")
            logits[f"{seed}.{name}"] = kept
            if name == "long" and found is None:
                found = mistakes(config, weights, store, ids, rows, kept)
            prompts.append({"name": name, "ids": ids, "rows": rows, "greedy_ids": tokens, "margins": [round(m, 5) for m in margins],
                            "bf16": loss(run(low, ids)[rows], kept), "f16": loss(run(half, ids)[rows], kept)})
        models.append({"seed": seed, "store": store, "checksum": checksum(weights), "prompts": prompts})
        long = prompts[0]
        print(f"{folder} seed {seed}: {len(set(long['greedy_ids']))} of {NEW} tokens distinct, std {long['bf16']['logits_std']:.2f}, "
              f"bf16 loses {long['bf16']['rms_diff'] / long['bf16']['logits_std']:.1e} std, f16 {long['f16']['rms_diff'] / long['f16']['logits_std']:.1e}")
    print(folder, found)
    out = HERE / folder
    if check:
        stored = load_file(str(out / "logits.safetensors"))
        worst = max(float((stored[name] - logits[name]).abs().max() / stored[name].std()) for name in logits)
        assert stored.keys() == logits.keys() and worst < BAR / 10, worst
        print(f"{folder}: within {worst:.1e} std of the files")
        return
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if "generation_config" in more:
        (out / "generation_config.json").write_text(json.dumps(more["generation_config"], indent=2) + "\n")
    made = {"torch": torch.__version__, "transformers": transformers.__version__}
    row = lambda entries: "[\n" + ",\n".join("  " + json.dumps(entry) for entry in entries) + "\n ]"
    (out / "references.json").write_text(
        f'{{\n "made": {json.dumps(made)},\n "shards": {more.get("shards", 1)},\n "mistakes": {json.dumps(found)},\n'
        f' "tensors": {row(tensors)},\n "models": {row(models)}\n}}\n')
    save_file(logits, str(out / "logits.safetensors"))
    (out / "logits.safetensors").chmod(0o644)


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    only = [name for name in sys.argv[1:] if name != "--check"]
    for folder, (config, more) in MODELS.items():
        if not only or folder in only:
            references(folder, config, more, "--check" in sys.argv)


if __name__ == "__main__":
    main()
