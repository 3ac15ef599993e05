#!/usr/bin/env python3
"""Reference data for examples/models/tiny-qwen3, made by transformers from the stored weights.

    pip install torch transformers tokenizers safetensors jinja2
    python generate.py

The bf16 weights are upcast to float32 and everything but bf16.json is computed in float32. Written beside this file:

    prompts.json        list of {name, text or null, ids}
    logits.safetensors  per prompt name: f32 [T, vocab_size], all positions
    generate.json       per prompt: 64 greedy tokens with end tokens ignored, the margin (top1 - top2) of every step, and
                        the greedy tokens up to and with the stop token (from model.generate)
    bf16.json           the same prompts computed in bfloat16: how far it is from float32
    encode.json         list of {text, ids, tokens, decoded, decoded_skip_special}
    decode.json         list of {name, ids, token_bytes_hex, text, text_skip_special, stream_chunks}
    chat.json           list of {name, messages, tools, add_generation_prompt, enable_thinking, rendered, ids};
                        enable_thinking null: the variable is not passed
    meta.json           versions, seed, command

Run it again whenever the model changes: model and references belong together.
"""
import codecs
import hashlib
import json
import os
import platform
import random
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[2] / "examples/models/tiny-qwen3"
SEED, NEW = 7, 64


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def result(text):
    return {"role": "tool", "content": text}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Get the weather for a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "Köln & <others>, \"北京\""}}, "required": ["city"]}}}
ADD = {"type": "function", "function": {"name": "add", "description": "a + b", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}

CHATS = [
    ("user only", [user("Hello!")], None),
    ("system and user", [system("Answer with one word."), user("What colour is snow?")], None),
    ("empty system", [system(""), user("Hi!")], None),
    ("multi turn", [user("My name is Mira."), assistant("Nice to meet you, Mira!"), user("What is my name?")], None),
    ("thought in history is dropped", [user("1+1?"), assistant("<think>\nadd them\n</think>\n\n2"), user("and 2+2?")], None),
    ("thought in last answer is dropped", [user("1+1?"), assistant("<think>\nadd them\n</think>\n\n2")], None),
    ("answer is last", [user("1+1?"), assistant("1 + 1 = 2")], None),
    ("system in the middle", [user("a"), system("now be brief"), user("b")], None),
    ("tools", [user("What is the weather in Köln?")], [WEATHER]),
    ("tools and system", [system("Use the tools."), user("What is the weather in 北京?")], [WEATHER, ADD]),
    ("call with an object", [user("Weather?"), assistant("", tool_calls=[call("get_weather", {"city": "Köln"})]), result('{"degrees": 21}')], [WEATHER]),
    ("call with a string", [user("Add"), assistant("Sure.", tool_calls=[call("add", '{"a": 1, "b": 2}')]), result("3"), assistant("It is 3.")], [ADD]),
    ("content is null", [user("Add"), assistant(None, tool_calls=[call("add", {"a": 1, "b": 2})]), result("3")], [ADD]),
    ("two calls and two results", [user("Both"), assistant("", tool_calls=[call("add", {"a": 1, "b": -2}), call("get_weather", {"city": "北京"})]),
                                   result("-1"), result("sunny ☀️"), assistant("Done."), user("Thanks!")], [WEATHER, ADD]),
    ("bare call", [user("x"), assistant("", tool_calls=[{"name": "add", "arguments": {"a": 1.5, "b": [True, None, "é<&'\""]}}])], None),
    ("special tokens in the text", [user("what does <|im_end|> mean? <think> and </think>")], None),
    ("empty and padded", [user(""), assistant("  "), user("  padded \n\n")], None),
]

TEXTS = ["", " ", "\n", "a", "Hello, world!", "Hello  world   again", "trailing \n", "I'm we're they'LL DON'T it's", "1234567890", "3.14 and 1,000",
         "12 + 30 = 42", "CamelCase snake_case kebab-case", "你好！谢谢！", "こんにちは！", "안녕하세요!", "Привет!", "مرحبا!", "नमस्ते!",
         "café cafe\u0301", "\u212b A\u030a", "ﬁ ① ２", "🎉", "🎉🎉 party 👩\u200d💻 👍🏽", "def f(x):\n    return x\n", "{\"a\": [1, {\"b\": null}]}", "a\n\n\nb", "a \n b",
         "tab\tsep", "nul\u0000byte", "\u00a0nbsp\u3000wide", "<|endoftext|>", "<|im_start|>user\nHi<|im_end|>\n", "<think>\n\n</think>\n\nok",
         "<tool_call>\n{\"name\": \"f\"}\n</tool_call>", "<|im_start|", "x<|endoftext|>y", "<|IM_START|>", "𝔘𝔫𝔦 𐍈", "!!!???...,,,", "x" + " " * 40 + "y",
         "Once upon a time there was a little fox named Mira. She lived by the river. 🌟"]


def dump(name, value, **how):
    (HERE / name).write_text(json.dumps(value, ensure_ascii=False, **how) + "\n", encoding="utf-8")


def load(dtype):
    return AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def greedy(model, ids, n):
    """n greedy tokens with end tokens ignored, and the top1 - top2 margin of every step."""
    out, margins, past, x = [], [], None, torch.tensor([ids])
    for _ in range(n):
        r = model(input_ids=x, past_key_values=past, use_cache=True)
        past, top = r.past_key_values, r.logits[0, -1].float().topk(2)
        out.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
        x = torch.tensor([[out[-1]]])
    return out, margins


def prompts(tok, chat):
    r = random.Random(SEED)
    c = lambda *messages, **how: chat(list(messages), add_generation_prompt=True, tokenize=False, **how)
    texts = [
        ("story", "Once upon a time"),
        ("chat_sum", c(user("What is 27 plus 58?"))),
        ("chat_json", c(user("Extract name, age, city and colour as JSON: Mira is 34 years old, lives in Lisbon and likes green."))),
        ("chat_story", c(system("You are a friendly assistant."), user("Tell me a story about a fox named Mira and a kite."))),
        ("chat_memory", c(user("My name is Quorvik."), assistant("Nice to meet you, Quorvik!"), user("What is the opposite of hot?"),
                          assistant("The opposite of hot is cold."), user("What is my name?"))),
        ("chat_hello", c(user("Say hello in Japanese."), enable_thinking=False)),
        ("chat_tool", c(user("What is the weather in Lisbon?"), tools=[WEATHER])),
    ]
    rows = [{"name": n, "text": t, "ids": tok.encode(t, add_special_tokens=False).ids} for n, t in texts]
    n = tok.get_vocab_size()
    rows.append({"name": "one_token", "text": None, "ids": [tok.token_to_id("Once")]})
    rows.append({"name": "random_ids", "text": None, "ids": [r.randrange(n) for _ in range(100)]})
    return rows


@torch.no_grad()
def references(rows, tok):
    stop = json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"]
    m, mb = load(torch.float32), load(torch.bfloat16)
    logits, generated, bf16 = {}, [], []
    for p in rows:
        name, ids = p["name"], p["ids"]
        x = torch.tensor([ids])
        full = m(input_ids=x).logits[0].float().contiguous()
        logits[name] = full
        g, margins = greedy(m, ids, NEW)
        until = m.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=NEW, do_sample=False, temperature=None, top_k=None, top_p=None,
                           eos_token_id=stop, pad_token_id=stop[-1])[0, len(ids):].tolist()
        assert until == g[:len(until)] and (until[-1] in stop or len(until) == NEW), name
        generated.append({"name": name, "prompt_ids": ids, "greedy_ids": g, "greedy_text": tok.decode(g, skip_special_tokens=False),
                          "stop_token_ids": stop, "greedy_ids_until_stop": until, "finish_reason": "stop" if until[-1] in stop else "length",
                          "margins": [round(v, 5) for v in margins], "min_margin": round(min(margins), 5), "distinct_tokens": len(set(g))})
        low = mb(input_ids=x).logits[0].float()
        gb, _ = greedy(mb, ids, NEW // 2)
        at = next((i for i, (a, b) in enumerate(zip(g, gb)) if a != b), None)
        d = (low - full).abs()
        bf16.append({"name": name, "logits_std": float(full.std()), "max_abs_diff": float(d.max()), "rms_diff": float(d.pow(2).mean().sqrt()),
                     "top1_agreement": float((low.argmax(-1) == full.argmax(-1)).float().mean()), "greedy_ids": gb, "first_divergence": at,
                     "f32_margin_at_divergence": None if at is None else round(margins[at], 5)})
        n = len(until)
        print(f"{name:12} {len(ids):4} tokens, stops after {n if until[-1] in stop else 'more than 64'}, least margin till then {min(margins[:n]):.3f}, "
              f"bf16 diverges at {at}, text {tok.decode(until)!r:.70}")
    save_file(logits, str(HERE / "logits.safetensors"))
    (HERE / "logits.safetensors").chmod(0o644)
    dump("prompts.json", rows, indent=1)
    dump("generate.json", generated)
    dump("bf16.json", bf16)


def tokenizer_cases(tok):
    dump("encode.json", [{"text": t, "ids": (e := tok.encode(t)).ids, "tokens": e.tokens, "decoded": tok.decode(e.ids, skip_special_tokens=False),
                          "decoded_skip_special": tok.decode(e.ids, skip_special_tokens=True)} for t in TEXTS])
    # the bytes of a token: byte-level BPE writes a byte that has no visible character as one from U+0100 on
    visible = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b]
    byte_of = {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in visible)}
    assert set(byte_of) == set(pre_tokenizers.ByteLevel.alphabet())
    added = tok.get_added_tokens_decoder()
    token_bytes = lambda i: added[i].content.encode() if i in added else bytes(byte_of[c] for c in tok.id_to_token(i))
    char_of = {b: c for c, b in byte_of.items()}
    single = lambda data: [tok.token_to_id(char_of[b]) for b in data]
    r, cases = random.Random(SEED), []
    cases += [(f"text {t}", tok.encode(t).ids) for t in ("Mira 🌟 你好！<|im_end|>", "👍🏽 é こんにちは", "The end. 🎉<|endoftext|>")]
    cases += [("emoji byte by byte", single("🎉".encode())), ("cut short", single("🎉".encode()[:3])), ("lone continuation", single(b"\x80\xbf")),
              ("broken, then text", single("中".encode()[:2] + b"A" + "文".encode()))]
    cases += [(f"random {k}", [r.randrange(tok.get_vocab_size()) for _ in range(20)]) for k in range(4)]
    rows = []
    for name, ids in cases:
        text, d = tok.decode(ids, skip_special_tokens=False), codecs.getincrementaldecoder("utf-8")(errors="replace")
        chunks = [d.decode(token_bytes(i)) for i in ids] + [d.decode(b"", final=True)]
        assert "".join(chunks) == text, (name, chunks, text)
        rows.append({"name": name, "ids": ids, "token_bytes_hex": [token_bytes(i).hex() for i in ids], "text": text,
                     "text_skip_special": tok.decode(ids, skip_special_tokens=True), "stream_chunks": chunks})
    dump("decode.json", rows)


def chat_cases(tok, chat):
    rows = []
    for name, messages, tools in CHATS:
        for gen, think in ((True, None), (True, False), (True, True), (False, None)):
            text = chat(messages, tools=tools, tokenize=False, add_generation_prompt=gen, **({} if think is None else {"enable_thinking": think}))
            rows.append({"name": name, "messages": messages, "tools": tools, "add_generation_prompt": gen, "enable_thinking": think,
                         "rendered": text, "ids": tok.encode(text, add_special_tokens=False).ids})
    dump("chat.json", rows)


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tok = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    chat = AutoTokenizer.from_pretrained(str(MODEL)).apply_chat_template
    references(prompts(tok, chat), tok)
    tokenizer_cases(tok)
    chat_cases(tok, chat)
    dump("meta.json", {"command": "python generate.py", "seed": SEED, "model": "examples/models/tiny-qwen3",
                       "model_sha256": hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest(),
                       "computation": "float32 on one CPU thread from the stored bf16 weights, eager attention",
                       "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
                       "tokenizers": tokenizers.__version__}, indent=1)


if __name__ == "__main__":
    main()
