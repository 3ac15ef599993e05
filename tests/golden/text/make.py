"""Writes a tiny byte-level BPE tokenizer and its vectors.

    python make.py

Needs tokenizers (made with the version that transformers 5.17.0 brings). The vectors are what that
package's Python binding gives; the stream chunks are Python's own incremental UTF-8 decoder.
"""
import codecs
import json
import os

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = os.path.dirname(os.path.abspath(__file__))
CORPUS = ["the quick brown fox jumps over the lazy dog", "the then there these", "hello hello world world",
          "日本語 日本 日本語", "🎉🎉 party 🎉", "1234 5678", "it's don't we'll"] * 4
PATTERN = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
           "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")

tokenizer = Tokenizer(models.BPE())
tokenizer.normalizer = normalizers.NFC()
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(__import__("tokenizers").Regex(PATTERN), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
tokenizer.decoder = decoders.ByteLevel()
tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
    vocab_size=320, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|start|>", special=True)])
tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
tokenizer.save(os.path.join(HERE, "tokenizer.json"), pretty=False)
with open(os.path.join(HERE, "tokenizer_config.json"), "w") as file:
    json.dump({"eos_token": {"content": "<|end|>"}, "pad_token": "<|end|>", "bos_token": None}, file)

alphabet = {}
extra = 256
for byte in range(256):
    if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
        alphabet[chr(byte)] = byte
    else:
        alphabet[chr(extra)] = byte
        extra += 1


def token_bytes(token):
    return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()


encode = []
for text in ["", " ", "the quick brown fox", "hello world!", "日本語 🎉 party", "it's\n\n  the end  ", "e\u0301 \u212b",
             "<|start|>the<|end|>", "a<tool>b", "x<|end", "unknown \u0000\u007f bytes \U0001F469\u200D\U0001F467", "\r\n\t"]:
    ids = tokenizer.encode(text).ids
    encode.append({"text": text, "ids": ids, "tokens": [tokenizer.id_to_token(i) for i in ids],
                   "decoded": tokenizer.decode(ids, skip_special_tokens=False),
                   "decoded_skip_special": tokenizer.decode(ids, skip_special_tokens=True)})
decode = []
by_byte = {token_bytes(t): i for t, i in tokenizer.get_vocab().items() if len(token_bytes(t)) == 1}
for name, data in [("emoji byte by byte", "🎉".encode()), ("cut emoji", "🎉".encode()[:3]), ("lone continuation", b"\x80\xbf"),
                   ("bad in the middle", b"a\xe6\x97b"), ("surrogate", b"\xed\xa0\x80"), ("overlong", b"\xc0\xaf\xe0\x80\x80"),
                   ("beyond the last", b"\xf4\x90\x80\x80"), ("half surrogate at the end", b"\xed\xa0")]:
    ids = [by_byte[bytes([b])] for b in data]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    chunks = [decoder.decode(bytes([b])) for b in data] + [decoder.decode(b"", True)]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(chunks) == text, (name, chunks, text)
    decode.append({"name": name, "ids": ids, "token_bytes_hex": [bytes([b]).hex() for b in data], "text": text,
                   "text_skip_special": tokenizer.decode(ids, skip_special_tokens=True), "stream_chunks": chunks})
for name, value in [("encode.json", encode), ("decode.json", decode)]:
    with open(os.path.join(HERE, name), "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=1)
        file.write("\n")
