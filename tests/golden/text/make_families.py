"""Writes small tokenizers in the forms of Llama 3, Llama 2 and Mistral, and their vectors.

    python make_families.py

Needs tokenizers (made with 0.23.3). One folder for each form. All ids and texts are those of that
package's Python binding, but for runs of byte tokens that are not UTF-8: the package makes U+FFFD of
every byte of such a run; here, as in SentencePiece, of every bad one. The stream chunks are Python's
own incremental UTF-8 decoder.
"""
import codecs
import json
import os
import random
import re

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

HERE = os.path.dirname(os.path.abspath(__file__))
CORPUS = ["the quick brown fox jumps over the lazy dog", "the then there these They're THE", "hello hello world world Hello World",
          "日本語 日本 日本語", "🎉🎉 party 🎉", "1234 5678 123 456 12 2024 2025", "it's don't we'll I'm you've he'd",
          "    indented code\n        return x\n", "été naïve Zürich", "print(x) == [1, 2]; // a comment!\n\n", "привет мир", "...\n\n\n"] * 4
LLAMA3_PATTERN = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
                  "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")
TEXTS = [
    "", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "a", " a", "a ", " a ", "  a  b   c    ", "the quick brown fox", "The Quick BROWN fox",
    "hello world!", "hello  world", "Hello, World.", "it's don't we'll I'm you've he'd they're", "IT'S DON'T WE'LL 'S 'sx", "'", "''s",
    "0", "12", "123", "1234", "1234567", " 2024-11-23 12:30", "3.14159, 1e-7; ½ ² ٣٤٥٦", "日本語 🎉 party", "日本語日本語", "中文字符和数字123",
    "🎉", "🎉🎉🎉", "\U0001F469\u200D\U0001F469\u200D\U0001F467 family", "👍🏽 🇩🇪", "e\u0301 \u00e9 \u212b", "Zürich naïve été", "привет, мир!",
    "مرحبا بالعالم", "हिन्दी क्षि", "한국어", "    indented code\n        return x\n", "a\n\n\n b \n", "\n  \n  x", "a\r\n\r\nb\tc", "trailing   ",
    "tabs\t\tand\u00a0nbsp\u3000wide", "print(x) == [1, 2]; // comment!!!\n\n", "x\u0000y\u007f\u0085", "\ufeffbom", "€ and €€", "\u2581 a\u2581b",
    "unmergeable words", " unmergeable", "<0x41><0xE2>", "%%%---___===", "a" * 40, "ab " * 30, " " * 33 + "x", "\U00100000\U00100001x \U00100000",
]


# The character of each byte in vocabularies of the byte level.
BYTE_LEVEL = {}
for byte in range(256):
    is_plain = 0x21 <= byte <= 0x7e or 0xa1 <= byte <= 0xac or 0xae <= byte
    BYTE_LEVEL[byte] = chr(byte if is_plain else 256 + sum(1 for piece in BYTE_LEVEL.values() if ord(piece) > 255))


def write(name, value):
    with open(os.path.join(HERE, name), "w", encoding="utf-8") as file:
        # A line for each case.
        file.write("[\n" + ",\n".join(json.dumps(case, ensure_ascii=False) for case in value) + "\n]\n")


def added(id, content, special=True, normalized=False):
    return {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": normalized, "special": special}


def trained(pre_tokenizer, size, alphabet, limit=None):
    """The vocabulary in order and the merges of a training."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    options = {"limit_alphabet": limit} if limit else {}
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, **options))
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), model["merges"]


def template(token, id):
    return {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                     {"SpecialToken": {"id": token, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}}}


def llama3():
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pieces, merges = trained(pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), 400, sorted(pre_tokenizers.ByteLevel.alphabet()))
    # Words that no merge leads to: only `ignore_merges` finds them.
    pieces += ["Ġunmergeable", "unmergeable"]
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|finetune_right_pad_id|>",
             "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
    tokens = [added(len(pieces) + number, name) for number, name in enumerate(names)]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}, byte_level]},
        "post_processor": {"type": "Sequence", "processors": [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
            template(names[0], tokens[0]["id"])]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                  "vocab": {piece: id for id, piece in enumerate(pieces)}, "merges": merges},
    }, {"bos_token": names[0], "eos_token": names[7]}


def sentence_pieces(names, missing=()):
    """A vocabulary in the order of SentencePiece: control tokens, bytes, merged pieces, characters."""
    alphabet = ["▁"] + [chr(c) for c in range(0x21, 0x7f)]
    pieces, merges = trained(pre_tokenizers.Metaspace(), 330, alphabet, limit=110)
    merged = ["".join(merge) for merge in merges]
    characters = [piece for piece in pieces if piece not in set(merged)]
    # Runs of spaces, as published vocabularies have them; a merge of them crosses no word.
    runs = [("▁", "▁"), ("▁▁", "▁▁"), ("▁▁", "▁")]
    runs = [run for run in runs if "".join(run) not in merged]
    order = names + [f"<0x{byte:02X}>" for byte in range(256) if byte not in missing] + merged + ["".join(r) for r in runs] + characters
    return {piece: id for id, piece in enumerate(order)}, [list(m) for m in merges] + [list(r) for r in runs]


def bpe(vocab, merges):
    return {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": vocab, "merges": merges}


DECODER = {"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}


def llama2():
    names = ["<unk>", "<s>", "</s>"]
    vocab, merges = sentence_pieces(names)
    merges = [" ".join(merge) for merge in merges]
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [added(0, "<unk>", normalized=True), added(1, "<s>"), added(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": None, "post_processor": template("<s>", 1), "decoder": DECODER, "model": bpe(vocab, merges),
    }, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def mistral():
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
             "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    # Without the first byte of planes 16 and up, so that there is something unknown.
    vocab, merges = sentence_pieces(names, missing=(0xF4,))
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [added(id, name) for id, name in enumerate(names)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        "post_processor": template("<s>", 1), "decoder": DECODER, "model": bpe(vocab, merges),
    }, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def decoded(tokenizer, ids, skip):
    """The package's text. Skips by ids: the package overlooks special tokens that are `normalized`."""
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return tokenizer.decode([id for id in ids if not (skip and id in special)], skip_special_tokens=False)


def replace_each_byte(error):
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("replace_each_byte", replace_each_byte)


def byte_level_chunks(tokenizer, ids, skip):
    """The text that each token completes, and the rest, for a vocabulary of the byte level."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    added = tokenizer.get_added_tokens_decoder()
    byte_of = {piece: byte for byte, piece in BYTE_LEVEL.items()}
    chunks = []
    for id in ids:
        token = "" if id in added and skip else tokenizer.id_to_token(id) or ""
        data = token.encode() if id in added else bytes(byte_of[character] for character in token)
        chunks.append(decoder.decode(data))
    chunks.append(decoder.decode(b"", True))
    assert "".join(chunks) == decoded(tokenizer, ids, skip), (ids, chunks)
    return chunks


def byte_fallback_chunks(tokenizer, ids, skip):
    """The same for a vocabulary with byte tokens."""
    added = tokenizer.get_added_tokens_decoder()
    chunks, runs = [], [b""]
    decoder = codecs.getincrementaldecoder("utf-8")("replace_each_byte")
    for id in ids:
        token = "" if id in added and skip else tokenizer.id_to_token(id) or ""
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            byte = bytes([int(token[3:5], 16)])
            runs[-1] += byte
            chunks.append(decoder.decode(byte))
        elif token:
            chunks.append(decoder.decode(b"", True) + token.replace("▁", " "))
            decoder.reset()
            runs.append(b"")
        else:
            chunks.append("")
    chunks.append(decoder.decode(b"", True))
    # One space at the beginning is left out.
    first = next((number for number, chunk in enumerate(chunks) if chunk), None)
    if first is not None and chunks[first].startswith(" "):
        chunks[first] = chunks[first][1:]
    text, package = "".join(chunks), decoded(tokenizer, ids, skip)
    is_mixed = any(len(run) != run.decode(errors="replace_each_byte").count("\ufffd") for run in runs if not is_utf8(run))
    assert text == package or is_mixed and len(text) <= len(package), (ids, text, package)
    return chunks


def is_utf8(data):
    try:
        data.decode()
        return True
    except UnicodeDecodeError:
        return False


def fnv(ids):
    state = 0xcbf29ce484222325
    for id in ids:
        for byte in id.to_bytes(4, "little"):
            state = (state ^ byte) * 0x100000001b3 & (1 << 64) - 1
    return f"{state:016x}"


for name, (file, config), special_texts in [
    ("llama3", llama3(), ["<|begin_of_text|>Hi", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>",
                          "a<|eot_id|> b", "<|eot_id|", " <|python_tag|> x", "<|begin_of_text|><|begin_of_text|>"]),
    ("llama2", llama2(), ["<s>", "<s>[INST] Hi [/INST] Hello </s><s>[INST] x [/INST]", "a<s>b", "a <s> b", "<unk>", "a <unk> b", "</s", "</s> "]),
    ("mistral", mistral(), ["<s>", "<s>[INST] Hi[/INST] Hello</s>[INST] x[/INST]", "a<s>b", "a [INST] b", "[INST]x", "<unk>", "[INST", "</s> "]),
]:
    os.makedirs(os.path.join(HERE, name), exist_ok=True)
    text = json.dumps(file, ensure_ascii=False)
    with open(os.path.join(HERE, name, "tokenizer.json"), "w", encoding="utf-8") as out:
        out.write(text + "\n")
    with open(os.path.join(HERE, name, "tokenizer_config.json"), "w", encoding="utf-8") as out:
        out.write(json.dumps(config) + "\n")
    tokenizer = Tokenizer.from_str(text)
    vocab = tokenizer.get_vocab()
    by_byte = ({byte: vocab[f"<0x{byte:02X}>"] for byte in range(256) if f"<0x{byte:02X}>" in vocab} if name != "llama3" else
               {byte: vocab[piece] for byte, piece in BYTE_LEVEL.items()})
    letter = tokenizer.encode("x", add_special_tokens=False).ids[-1:]
    chunks_of = byte_level_chunks if name == "llama3" else byte_fallback_chunks
    encode = []
    for text in TEXTS + special_texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        encode.append({"text": text, "ids": ids, "ids_with_special": tokenizer.encode(text).ids,
                       "tokens": [tokenizer.id_to_token(i) for i in ids],
                       "decoded": decoded(tokenizer, ids, False), "decoded_skip_special": decoded(tokenizer, ids, True),
                       "stream_chunks": chunks_of(tokenizer, ids, False)})
    write(f"{name}/encode.json", encode)
    random.seed(14)
    sequences = [(case, [by_byte[byte] for byte in data]) for case, data in [
        ("a character byte by byte", "€".encode()), ("two characters", "€🎉".encode()), ("cut emoji", "🎉".encode()[:3]),
        ("lone continuation", b"\x80\xbf"), ("bad after a good one", "é".encode() + b"\xff"), ("good after a bad one", b"\xffa\xc3\xa9"),
        ("surrogate", b"\xed\xa0\x80"), ("overlong", b"\xc0\xaf\xe0\x80\x80"), ("half surrogate at the end", b"a\xed\xa0"),
        ("spaces as bytes", b"  a"), ("line break", b"\n")]]
    sequences += [("a letter between bytes", [by_byte[0xe2], by_byte[0x82]] + letter + [by_byte[0xac]]),
                  ("a special token between bytes", [by_byte[0xe2], by_byte[0x82], vocab[config["eos_token"]], by_byte[0xac]]),
                  ("an id of no token between bytes", [by_byte[0xe2], by_byte[0x82], len(vocab) + 7, by_byte[0xac]])]
    everything = sorted(vocab.values())
    good = [by_byte[byte] for byte in "é€🎉日".encode()]
    for number in range(60):
        sequence = []
        for _ in range(random.randrange(1, 14)):
            kind = random.randrange(5)
            sequence += ([random.choice(everything)] if kind < 2 else [random.choice(list(by_byte.values()))] if kind == 2 else
                         [by_byte[byte] for byte in random.choice("é€🎉日").encode()] if kind == 3 else [random.choice(good)])
        sequences.append((f"random {number}", sequence))
    decode = []
    for case, ids in sequences:
        chunks, skipped = chunks_of(tokenizer, ids, False), chunks_of(tokenizer, ids, True)
        decode.append({"name": case, "ids": ids, "text": "".join(chunks), "text_skip_special": "".join(skipped),
                       "stream_chunks": chunks, "stream_chunks_skip_special": skipped})
    write(f"{name}/decode.json", decode)
    # Texts longer than the pieces in which long ones are encoded, in one piece here.
    long = []
    for unit, count in [("the fox's 12345 jumps, 67 89; don't! ", 8000), ("日本語。12 ", 12000), ("1234567890", 30000), ("it's\n\n  x ", 20000),
                        ("a", 70000), ("🎉 1 22 333 4444 ", 9000)]:
        ids = tokenizer.encode(unit * count).ids
        long.append({"unit": unit, "count": count, "num_ids": len(ids), "fnv": fnv(ids)})
    write(f"{name}/long.json", long)
