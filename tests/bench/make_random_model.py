#!/usr/bin/env python3
"""Writes a model of random weights in the shape of a published one, for measuring speed.

    python3 tests/bench/make_random_model.py --shape qwen3-0.6b --out /tmp/qwen3-0.6b
    target/examples-c/bench /tmp/qwen3-0.6b

The text that such a model generates is noise; its speed is that of the real one. Needs nothing but
Python. Weights are bfloat16 with magnitudes from 2^-7 to 2^-5 (root mean square 0.019; published
models are initialised with 0.02), the scales of norms are 1. Sizes: qwen3-8b takes 16 GB.
"""

import argparse
import json
import random
import struct
import sys
from pathlib import Path

# From the config.json of Qwen/Qwen3-0.6B, -1.7B, -4B, -8B and openai-community/gpt2. The tiny ones are our own.
QWEN3 = {
    "qwen3-tiny": dict(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=640, tied=True),
    "qwen3-0.6b": dict(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=3072, vocab=151936, tied=True),
    "qwen3-1.7b": dict(hidden=2048, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=6144, vocab=151936, tied=True),
    "qwen3-4b": dict(hidden=2560, layers=36, heads=32, kv_heads=8, head_dim=128, ffn=9728, vocab=151936, tied=True),
    "qwen3-8b": dict(hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, ffn=12288, vocab=151936, tied=False),
}
GPT2 = {
    "gpt2-tiny": dict(hidden=64, layers=2, heads=4, positions=256, vocab=640),
    "gpt2": dict(hidden=768, layers=12, heads=12, positions=1024, vocab=50257),
}
QWEN3_POSITIONS = 40960
# Ids of the special tokens in a vocabulary of full size; in a smaller one they are the last three.
QWEN3_SPECIALS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}

CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def qwen3_tensors(s):
    """Name and shape of each tensor; `scale` marks the norms."""
    yield "model.embed_tokens.weight", (s["vocab"], s["hidden"])
    for layer in range(s["layers"]):
        prefix = f"model.layers.{layer}."
        q, kv = s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"]
        yield prefix + "input_layernorm.weight", (s["hidden"],)
        yield prefix + "self_attn.q_proj.weight", (q, s["hidden"])
        yield prefix + "self_attn.k_proj.weight", (kv, s["hidden"])
        yield prefix + "self_attn.v_proj.weight", (kv, s["hidden"])
        yield prefix + "self_attn.o_proj.weight", (s["hidden"], q)
        yield prefix + "self_attn.q_norm.weight", (s["head_dim"],)
        yield prefix + "self_attn.k_norm.weight", (s["head_dim"],)
        yield prefix + "post_attention_layernorm.weight", (s["hidden"],)
        yield prefix + "mlp.gate_proj.weight", (s["ffn"], s["hidden"])
        yield prefix + "mlp.up_proj.weight", (s["ffn"], s["hidden"])
        yield prefix + "mlp.down_proj.weight", (s["hidden"], s["ffn"])
    yield "model.norm.weight", (s["hidden"],)
    if not s["tied"]:
        yield "lm_head.weight", (s["vocab"], s["hidden"])


def gpt2_tensors(s):
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


def write_weights(path, tensors, seed):
    """Writes the safetensors format: length of the header, the header, the tensors one after another."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors:
        size = 2
        for extent in shape:
            size *= extent
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
    return offset // 2


def byte_characters():
    """The printable character that byte-level BPE, as GPT-2 does it, writes for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def tokenizer(vocab_size, specials):
    """A byte-level vocabulary without merges, filled up with tokens that no text contains."""
    vocab = {character: byte for byte, character in sorted(byte_characters().items())}
    taken = set(vocab.values()) | set(specials.values())
    vocab.update({f"<|unused_{i}|>": i for i in range(vocab_size) if i not in taken})
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
    return dict(
        version="1.0", truncation=None, padding=None, added_tokens=added, normalizer=None,
        pre_tokenizer=byte_level, post_processor=None, decoder=byte_level, model=model,
    )  # fmt: skip


def write_qwen3(out, s, seed):
    full = s["vocab"] > max(QWEN3_SPECIALS.values())
    specials = QWEN3_SPECIALS if full else {t: s["vocab"] - 3 + i for i, t in enumerate(QWEN3_SPECIALS)}
    end_of_text, end = specials["<|endoftext|>"], specials["<|im_end|>"]
    config = dict(
        architectures=["Qwen3ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=end_of_text,
        eos_token_id=end, head_dim=s["head_dim"], hidden_act="silu", hidden_size=s["hidden"], initializer_range=0.02,
        intermediate_size=s["ffn"], max_position_embeddings=QWEN3_POSITIONS, max_window_layers=s["layers"],
        model_type="qwen3", num_attention_heads=s["heads"], num_hidden_layers=s["layers"],
        num_key_value_heads=s["kv_heads"], rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000,
        sliding_window=None, tie_word_embeddings=s["tied"], torch_dtype="bfloat16", use_cache=True,
        use_sliding_window=False, vocab_size=s["vocab"],
    )  # fmt: skip
    generation = dict(
        bos_token_id=end_of_text, do_sample=True, eos_token_id=[end, end_of_text], pad_token_id=end_of_text,
        temperature=0.6, top_k=20, top_p=0.95,
    )  # fmt: skip
    tokenizer_config = dict(
        tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE, model_max_length=QWEN3_POSITIONS,
    )  # fmt: skip
    write_json(out, config, generation, tokenizer_config, tokenizer(s["vocab"], specials))
    return write_weights(out / "model.safetensors", list(qwen3_tensors(s)), seed)


def write_gpt2(out, s, seed):
    end = s["vocab"] - 1
    config = dict(
        activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1, bos_token_id=end,
        embd_pdrop=0.1, eos_token_id=end, initializer_range=0.02, layer_norm_epsilon=1e-5, model_type="gpt2",
        n_ctx=s["positions"], n_embd=s["hidden"], n_head=s["heads"], n_layer=s["layers"],
        n_positions=s["positions"], resid_pdrop=0.1, torch_dtype="bfloat16", vocab_size=s["vocab"],
    )  # fmt: skip
    generation = dict(bos_token_id=end, eos_token_id=end)
    tokenizer_config = dict(tokenizer_class="GPT2Tokenizer", eos_token="<|endoftext|>", model_max_length=s["positions"])
    write_json(out, config, generation, tokenizer_config, tokenizer(s["vocab"], {"<|endoftext|>": end}))
    return write_weights(out / "model.safetensors", list(gpt2_tensors(s)), seed)


def write_json(out, config, generation, tokenizer_config, tokenizer_json):
    out.mkdir(parents=True, exist_ok=True)
    for name, value in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
        ("tokenizer.json", tokenizer_json),
    ):
        (out / name).write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=[*QWEN3, *GPT2])
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.shape in QWEN3:
        count = write_qwen3(arguments.out, QWEN3[arguments.shape], arguments.seed)
    else:
        count = write_gpt2(arguments.out, GPT2[arguments.shape], arguments.seed)
    print(f"{arguments.out}: {arguments.shape}, {count:,} weights, {2 * count / 1e9:.3g} GB", file=sys.stderr)


if __name__ == "__main__":
    main()
