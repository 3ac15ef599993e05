#!/usr/bin/env python3
"""Writes a model of random weights in the shape of a published one, for measuring speed.

    python3 tests/bench/make_random_model.py --shape qwen3-0.6b --out /tmp/qwen3-0.6b
    target/examples-c/bench /tmp/qwen3-0.6b

Sizes of the shape are changed by options, which makes a model of any size of the shape's family:

    python3 tests/bench/make_random_model.py --shape llama-3.2-1b --layers 4 --vocab 32000 --untied --out /tmp/llama

The text that such a model generates is noise; its speed is that of the real one. Needs nothing but
Python. Weights are bfloat16 with magnitudes from 2^-7 to 2^-5 (root mean square 0.019; published
models are initialised with 0.02), the scales of norms are 1 and biases are as small as weights. Sizes:
qwen3-8b takes 16 GB, qwen3-32b 66 GB. --config-only writes everything but the weights, which is enough for programs
that have the library make the weights up: `bench FOLDER --random` and `cargo bench --bench steps -- FOLDER --random`.
"""

import argparse
import json
import random
import struct
import sys
from pathlib import Path

# From the config.json of Qwen/Qwen3-0.6B to -32B and -30B-A3B, meta-llama/Llama-3.1-8B and Llama-3.2-1B,
# mistralai/Mistral-7B-v0.3 and Mixtral-8x7B-v0.1, Qwen/Qwen2.5-7B and openai-community/gpt2. The tiny ones are our own.
QWEN3 = dict(family="qwen3", kv_heads=8, head_dim=128, vocab=151936, tied=False, theta=1000000, positions=40960)
LLAMA = dict(family="llama", heads=32, kv_heads=8, vocab=128256, theta=500000.0, positions=131072)
# The config does not name the width of a head, which is hidden_size / num_attention_heads.
DERIVED = dict(derives_head_dim=True)
SHAPES = {
    "qwen3-tiny": QWEN3
    | dict(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=640, tied=True),
    "qwen3-0.6b": QWEN3 | dict(hidden=1024, layers=28, heads=16, intermediate=3072, tied=True),
    "qwen3-1.7b": QWEN3 | dict(hidden=2048, layers=28, heads=16, intermediate=6144, tied=True),
    "qwen3-4b": QWEN3 | dict(hidden=2560, layers=36, heads=32, intermediate=9728, tied=True),
    "qwen3-8b": QWEN3 | dict(hidden=4096, layers=36, heads=32, intermediate=12288),
    "qwen3-14b": QWEN3 | dict(hidden=5120, layers=40, heads=40, intermediate=17408),
    "qwen3-32b": QWEN3 | dict(hidden=5120, layers=64, heads=64, intermediate=25600),
    # intermediate is that of layers without experts, of which there are none.
    "qwen3-30b-a3b": QWEN3
    | dict(family="qwen3_moe", hidden=2048, layers=48, heads=32, kv_heads=4, intermediate=6144)
    | dict(experts=128, experts_per_token=8, moe_intermediate=768),
    "llama-3.1-8b": LLAMA
    | DERIVED
    | dict(hidden=4096, layers=32, head_dim=128, intermediate=14336, tied=False, rope_factor=8.0),
    "llama-3.2-1b": LLAMA
    | dict(hidden=2048, layers=16, head_dim=64, intermediate=8192, tied=True, rope_factor=32.0),
    "mistral-7b": dict(family="mistral", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336)
    | dict(vocab=32768, tied=False, theta=1000000.0, positions=32768)
    | DERIVED,
    # intermediate is that of an expert.
    "mixtral-8x7b": dict(family="mixtral", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336)
    | dict(experts=8, experts_per_token=2, vocab=32000, tied=False, theta=1000000.0, positions=32768)
    | DERIVED,
    "qwen2.5-7b": dict(family="qwen2", hidden=3584, layers=28, heads=28, kv_heads=4, head_dim=128, intermediate=18944)
    | dict(vocab=152064, tied=False, theta=1000000.0, positions=131072)
    | DERIVED,
    "gpt2-tiny": dict(family="gpt2", hidden=64, layers=2, heads=4, positions=256, vocab=640),
    "gpt2": dict(family="gpt2", hidden=768, layers=12, heads=12, positions=1024, vocab=50257),
}
# Sizes that an option may change, where the shape has them.
SIZES = {
    "hidden": "width of the residual stream",
    "layers": "number of layers",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "width of a head",
    "intermediate": "width of the MLP",
    "vocab": "rows of the embedding",
    "positions": "longest context",
    "experts": "experts of a layer",
    "experts_per_token": "experts that a token takes",
    "moe_intermediate": "width of an expert",
}

# Texts and published ids of special tokens: that of the beginning (or padding), the end, and others. In a vocabulary
# that is too small for these ids they are the last ones.
QWEN_SPECIALS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
LLAMA_SPECIALS = {
    "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001,
    "<|start_header_id|>": 128006,
    "<|end_header_id|>": 128007,
    "<|eot_id|>": 128009,
}
MISTRAL_SPECIALS = {"<unk>": 0, "<s>": 1, "</s>": 2, "[INST]": 3, "[/INST]": 4}

CHAT_ML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA_TEMPLATE = (
    "{{- '<|begin_of_text|>' }}{%- for message in messages %}{{- '<|start_header_id|>' + message.role"
    " + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
MISTRAL_TEMPLATE = (
    "{{- '<s>' }}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{{- '[INST] ' + message.content + '[/INST]' }}{%- else %}{{- ' ' + message.content + '</s>' }}{%- endif %}"
    "{%- endfor %}"
)


def mlp_tensors(prefix, hidden, intermediate):
    yield prefix + "gate_proj.weight", (intermediate, hidden)
    yield prefix + "up_proj.weight", (intermediate, hidden)
    yield prefix + "down_proj.weight", (hidden, intermediate)


def decoder_tensors(s):
    """Name and shape of each tensor of Qwen, Llama, Mistral and Mixtral."""
    hidden, family = s["hidden"], s["family"]
    yield "model.embed_tokens.weight", (s["vocab"], hidden)
    for layer in range(s["layers"]):
        prefix = f"model.layers.{layer}."
        q, kv = s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"]
        yield prefix + "input_layernorm.weight", (hidden,)
        for name, width in (("q", q), ("k", kv), ("v", kv)):
            yield prefix + f"self_attn.{name}_proj.weight", (width, hidden)
            if family == "qwen2":
                yield prefix + f"self_attn.{name}_proj.bias", (width,)
        yield prefix + "self_attn.o_proj.weight", (hidden, q)
        if family in ("qwen3", "qwen3_moe"):
            yield prefix + "self_attn.q_norm.weight", (s["head_dim"],)
            yield prefix + "self_attn.k_norm.weight", (s["head_dim"],)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        if family == "qwen3_moe":
            yield prefix + "mlp.gate.weight", (s["experts"], hidden)
            for expert in range(s["experts"]):
                yield from mlp_tensors(prefix + f"mlp.experts.{expert}.", hidden, s["moe_intermediate"])
        elif family == "mixtral":
            yield prefix + "block_sparse_moe.gate.weight", (s["experts"], hidden)
            for expert in range(s["experts"]):
                of_expert = prefix + f"block_sparse_moe.experts.{expert}."
                yield of_expert + "w1.weight", (s["intermediate"], hidden)
                yield of_expert + "w2.weight", (hidden, s["intermediate"])
                yield of_expert + "w3.weight", (s["intermediate"], hidden)
        else:
            yield from mlp_tensors(prefix + "mlp.", hidden, s["intermediate"])
    yield "model.norm.weight", (hidden,)
    if not s["tied"]:
        yield "lm_head.weight", (s["vocab"], hidden)


def gpt2_tensors(s):
    """The same of GPT-2."""
    hidden = s["hidden"]
    yield "wte.weight", (s["vocab"], hidden)
    yield "wpe.weight", (s["positions"], hidden)
    for layer in range(s["layers"]):
        prefix = f"h.{layer}."
        for norm in ("ln_1", "ln_2"):
            yield prefix + norm + ".weight", (hidden,)
            yield prefix + norm + ".bias", (hidden,)
        for linear, width_in, width_out in (
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, 4 * hidden),
            ("mlp.c_proj", 4 * hidden, hidden),
        ):
            yield prefix + linear + ".weight", (width_in, width_out)
            yield prefix + linear + ".bias", (width_out,)
    yield "ln_f.weight", (hidden,)
    yield "ln_f.bias", (hidden,)


def is_scale(name):
    return name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"))


# High byte of a bfloat16: the sign of the random byte, and an exponent of which the low byte has the last bit.
HIGH_BYTES = bytes((byte & 0x80) | 0x3C for byte in range(256))
CHUNK = 4 << 20  # elements


def num_elements(shape):
    count = 1
    for extent in shape:
        count *= extent
    return count


def write_weights(path, tensors, seed):
    """Writes the safetensors format: length of the header, the header, the tensors one after another."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors:
        size = 2 * num_elements(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = random.Random(seed)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, _ in tensors:
            begin, end = header[name]["data_offsets"]
            left = (end - begin) // 2
            while left > 0:
                count = min(left, CHUNK)
                values = bytearray(2 * count)
                if is_scale(name):
                    values[1::2] = b"\x3f" * count
                    values[0::2] = b"\x80" * count
                else:
                    values[0::2] = rng.randbytes(count)
                    values[1::2] = rng.randbytes(count).translate(HIGH_BYTES)
                file.write(values)
                left -= count


def byte_characters():
    """The printable character that byte-level BPE, as GPT-2 does it, writes for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def tokenizer(vocab_size, specials, begin=None):
    """A byte-level vocabulary without merges, filled up with tokens that no text contains. begin: put before texts."""
    free = (i for i in range(vocab_size) if i not in set(specials.values()))
    vocab = {character: next(free) for _, character in sorted(byte_characters().items())}
    vocab.update({f"<|unused_{i}|>": i for i in free})
    vocab.update(specials)
    added = [
        dict(id=i, content=text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        for text, i in specials.items()
    ]
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=True)
    model = dict(
        type="BPE", dropout=None, unk_token=None, continuing_subword_prefix="", end_of_word_suffix="",
        fuse_unk=False, byte_fallback=False, vocab=vocab, merges=[],
    )  # fmt: skip
    post_processor = None
    if begin is not None:
        first, text = [{"SpecialToken": {"id": begin, "type_id": 0}}], [{"Sequence": {"id": "A", "type_id": 0}}]
        second = [{"SpecialToken": {"id": begin, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
        post_processor = dict(
            type="TemplateProcessing", single=first + text, pair=first + text + second,
            special_tokens={begin: dict(id=begin, ids=[specials[begin]], tokens=[begin])},
        )  # fmt: skip
    return dict(
        version="1.0", truncation=None, padding=None, added_tokens=added, normalizer=None,
        pre_tokenizer=byte_level, post_processor=post_processor, decoder=byte_level, model=model,
    )  # fmt: skip


def placed(specials, vocab_size):
    """The special tokens by their published ids, or in a small vocabulary the last ones."""
    if vocab_size > max(specials.values()):
        return specials
    return {text: vocab_size - len(specials) + i for i, text in enumerate(specials)}


def decoder_config(s, **family):
    """Returns the fields that the families have in common, and those that a family adds; keys sorted, as in the
    published files."""
    common = dict(
        attention_dropout=0.0, hidden_act="silu", hidden_size=s["hidden"], initializer_range=0.02,
        intermediate_size=s["intermediate"], max_position_embeddings=s["positions"],
        num_attention_heads=s["heads"], num_hidden_layers=s["layers"], num_key_value_heads=s["kv_heads"],
        rope_theta=s["theta"], tie_word_embeddings=s["tied"], torch_dtype="bfloat16", use_cache=True,
        vocab_size=s["vocab"],
    )  # fmt: skip
    if not s.get("derives_head_dim") or s["heads"] * s["head_dim"] != s["hidden"]:
        common["head_dim"] = s["head_dim"]
    return dict(sorted((common | family).items()))


def qwen3_files(s):
    specials = placed(QWEN_SPECIALS, s["vocab"])
    end_of_text, end = specials["<|endoftext|>"], specials["<|im_end|>"]
    family = dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False, bos_token_id=end_of_text,
        eos_token_id=end, max_window_layers=s["layers"], rms_norm_eps=1e-6,
        rope_scaling=None, sliding_window=None, use_sliding_window=False,
    )  # fmt: skip
    if s["family"] == "qwen3_moe":
        family |= dict(
            architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[],
            moe_intermediate_size=s["moe_intermediate"], norm_topk_prob=True, num_experts=s["experts"],
            num_experts_per_tok=s["experts_per_token"], output_router_logits=False, router_aux_loss_coef=0.001,
        )  # fmt: skip
    generation = dict(
        bos_token_id=end_of_text, do_sample=True, eos_token_id=[end, end_of_text], pad_token_id=end_of_text,
        temperature=0.6, top_k=20, top_p=0.95,
    )  # fmt: skip
    tokenizer_config = dict(
        tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_ML,
        model_max_length=s["positions"],
    )  # fmt: skip
    return decoder_config(s, **family), generation, tokenizer_config, tokenizer(s["vocab"], specials)


def qwen2_files(s):
    specials = placed(QWEN_SPECIALS, s["vocab"])
    end_of_text = specials["<|endoftext|>"]
    # The file says nothing of the biases of q, k and v, which all models of the family have.
    config = decoder_config(
        s, architectures=["Qwen2ForCausalLM"], model_type="qwen2", bos_token_id=end_of_text,
        eos_token_id=end_of_text, max_window_layers=s["layers"], rms_norm_eps=1e-6, sliding_window=s["positions"],
        use_mrope=False, use_sliding_window=False,
    )  # fmt: skip
    generation = dict(bos_token_id=end_of_text, do_sample=False, eos_token_id=end_of_text)
    tokenizer_config = dict(
        tokenizer_class="Qwen2Tokenizer", eos_token="<|endoftext|>", pad_token="<|endoftext|>",
        chat_template=CHAT_ML, model_max_length=s["positions"],
    )  # fmt: skip
    return config, generation, tokenizer_config, tokenizer(s["vocab"], specials)


def llama_files(s):
    specials = placed(LLAMA_SPECIALS, s["vocab"])
    begin, end = specials["<|begin_of_text|>"], specials["<|end_of_text|>"]
    config = decoder_config(
        s, architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, bos_token_id=begin,
        eos_token_id=end, mlp_bias=False, pretraining_tp=1, rms_norm_eps=1e-5,
        rope_scaling=dict(
            factor=s["rope_factor"], high_freq_factor=4.0, low_freq_factor=1.0,
            original_max_position_embeddings=8192, rope_type="llama3",
        ),
    )  # fmt: skip
    generation = dict(bos_token_id=begin, do_sample=True, eos_token_id=end, temperature=0.6, top_p=0.9)
    tokenizer_config = dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>",
        chat_template=LLAMA_TEMPLATE, model_max_length=s["positions"],
    )  # fmt: skip
    return config, generation, tokenizer_config, tokenizer(s["vocab"], specials, "<|begin_of_text|>")


def mistral_files(s):
    specials = placed(MISTRAL_SPECIALS, s["vocab"])
    begin, end = specials["<s>"], specials["</s>"]
    family = dict(
        architectures=["MistralForCausalLM"], model_type="mistral", bos_token_id=begin, eos_token_id=end,
        rms_norm_eps=1e-5, sliding_window=None,
    )  # fmt: skip
    if s["family"] == "mixtral":
        family |= dict(
            architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=s["experts"],
            num_experts_per_tok=s["experts_per_token"], output_router_logits=False, router_aux_loss_coef=0.02,
        )  # fmt: skip
    config = decoder_config(s, **family)
    generation = dict(bos_token_id=begin, eos_token_id=end)
    tokenizer_config = dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        chat_template=MISTRAL_TEMPLATE, model_max_length=s["positions"],
    )  # fmt: skip
    return config, generation, tokenizer_config, tokenizer(s["vocab"], specials, "<s>")


def gpt2_files(s):
    end = s["vocab"] - 1
    config = dict(
        activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1, bos_token_id=end,
        embd_pdrop=0.1, eos_token_id=end, initializer_range=0.02, layer_norm_epsilon=1e-5, model_type="gpt2",
        n_ctx=s["positions"], n_embd=s["hidden"], n_head=s["heads"], n_layer=s["layers"],
        n_positions=s["positions"], resid_pdrop=0.1, torch_dtype="bfloat16", vocab_size=s["vocab"],
    )  # fmt: skip
    generation = dict(bos_token_id=end, eos_token_id=end)
    tokenizer_config = dict(tokenizer_class="GPT2Tokenizer", eos_token="<|endoftext|>", model_max_length=s["positions"])
    return config, generation, tokenizer_config, tokenizer(s["vocab"], {"<|endoftext|>": end})


# The function that writes the JSON files of a family, and the one that names its tensors.
FAMILIES = {
    "qwen3": (qwen3_files, decoder_tensors),
    "qwen3_moe": (qwen3_files, decoder_tensors),
    "qwen2": (qwen2_files, decoder_tensors),
    "llama": (llama_files, decoder_tensors),
    "mistral": (mistral_files, decoder_tensors),
    "mixtral": (mistral_files, decoder_tensors),
    "gpt2": (gpt2_files, gpt2_tensors),
}


def write_json(out, files):
    out.mkdir(parents=True, exist_ok=True)
    names = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
    for name, value in zip(names, files):
        (out / name).write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def sizes(arguments, refuse):
    """The sizes of the shape, changed as the options say."""
    s = dict(SHAPES[arguments.shape])
    for name in SIZES:
        value = getattr(arguments, name)
        if value is not None:
            if name not in s:
                refuse(f"--{name.replace('_', '-')}: {arguments.shape} has no such size")
            if value < 1:
                refuse(f"--{name.replace('_', '-')}: {value} is less than 1")
            s[name] = value
    if arguments.tied is not None:
        if "tied" not in s:
            refuse(f"{arguments.shape} is always tied")
        s["tied"] = arguments.tied
    if s["vocab"] < 256 + 8:
        refuse("--vocab: the bytes and the special tokens need 264")
    if s["family"] == "gpt2":
        if s["hidden"] % s["heads"] != 0:
            refuse(f"{s['hidden']} numbers cannot be divided among {s['heads']} heads")
        return s
    if s["heads"] % s["kv_heads"] != 0:
        refuse(f"{s['heads']} heads cannot be divided among {s['kv_heads']} kv heads")
    if s["head_dim"] % 2 != 0:
        refuse(f"--head-dim: {s['head_dim']} is odd")
    if s.get("experts_per_token", 0) > s.get("experts", 0):
        refuse(f"a token cannot take {s['experts_per_token']} of {s['experts']} experts")
    return s


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--config-only", action="store_true", help="no weights, only config and tokenizer")
    parser.add_argument("--tied", action="store_true", default=None, help="the embedding is the output matrix too")
    parser.add_argument("--untied", action="store_false", dest="tied", help="the output matrix has weights of its own")
    for name, meaning in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{meaning}, instead of the shape's")
    arguments = parser.parse_args()
    s = sizes(arguments, parser.error)
    files, tensors_of = FAMILIES[s["family"]]
    tensors = list(tensors_of(s))
    write_json(arguments.out, files(s))
    if not arguments.config_only:
        write_weights(arguments.out / "model.safetensors", tensors, arguments.seed)
    count = sum(num_elements(shape) for _, shape in tensors)
    what = "config only, " if arguments.config_only else ""
    print(f"{arguments.out}: {what}{arguments.shape}, {count:,} weights, {2 * count / 1e9:.3g} GB", file=sys.stderr)


if __name__ == "__main__":
    main()
