//! Encoding, decoding and streaming: the vectors of the reference data, exactly.

use super::support::{golden, ids, json, own, real_tokenizers, tokenizer};
use serde_json::{json, Value};
use std::path::Path;
use std::sync::Arc;
use xserv::text::{Detokenizer, Tokenizer};

/// Folders of `tests/golden/text`.
const FAMILIES: [&str; 3] = ["llama3", "llama2", "mistral"];

#[test]
fn own_vectors() {
    let tokenizer = tokenizer(&own("text"));
    check_vectors(&tokenizer, &own("text"));
    assert_eq!(tokenizer.eos_token_id(), tokenizer.token_to_id("<|end|>"));
    assert!(tokenizer.is_special(tokenizer.eos_token_id().unwrap()));
}

#[test]
fn qwen_vectors() {
    let Some(golden) = golden() else { return };
    let tokenizer = tokenizer(&golden.join("models/qwen3-tiny-tied"));
    check_vectors(&tokenizer, &golden.join("tokenizer/qwen"));
}

#[test]
fn gpt2_vectors() {
    let Some(golden) = golden() else { return };
    let tokenizer = tokenizer(&golden.join("models/gpt2-tiny"));
    check_vectors(&tokenizer, &golden.join("tokenizer/gpt2"));
}

/// The forms in which the families are published; `make_families.py` beside the data wrote them.
#[test]
fn forms_of_families() {
    for name in FAMILIES {
        let tokenizer = tokenizer(&own("text").join(name));
        assert!(tokenizer.has_token_bytes(), "{name}");
        check_vectors(&tokenizer, &own("text").join(name));
    }
}

/// Merges are written in two ways, which mean the same.
#[test]
fn both_spellings_of_merges() {
    for name in FAMILIES {
        let folder = own("text").join(name);
        let mut file = json(&folder.join("tokenizer.json"));
        for merge in file["model"]["merges"].as_array_mut().unwrap() {
            *merge = match &*merge {
                Value::String(line) => line.split(' ').map(Value::from).collect(),
                Value::Array(pair) => {
                    let pair: Vec<_> = pair.iter().map(|token| token.as_str().unwrap()).collect();
                    pair.join(" ").into()
                }
                other => panic!("{other}"),
            };
        }
        let tokenizer = Tokenizer::from_bytes(&serde_json::to_vec(&file).unwrap(), None).unwrap();
        check_vectors(&Arc::new(tokenizer), &folder);
    }
}

/// Texts longer than the pieces in which they are encoded have the tokens of the whole, framed.
#[test]
fn long_texts_of_families() {
    for name in FAMILIES {
        let tokenizer = tokenizer(&own("text").join(name));
        for case in json(&own("text").join(name).join("long.json")).as_array().unwrap() {
            let unit = case["unit"].as_str().unwrap();
            let text = unit.repeat(case["count"].as_u64().unwrap() as usize);
            let ids = tokenizer.encode(&text, true, true).unwrap();
            assert_eq!(ids.len() as u64, case["num_ids"].as_u64().unwrap(), "{name}, {unit:?}");
            let hash = ids
                .iter()
                .flat_map(|id| id.to_le_bytes())
                .fold(0xcbf2_9ce4_8422_2325u64, |state, byte| {
                    (state ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
                });
            assert_eq!(format!("{hash:016x}"), case["fnv"].as_str().unwrap(), "{name}, {unit:?}");
        }
    }
}

/// Sequences of any tokens, most of them single bytes, good and bad.
#[test]
fn random_sequences_stream_as_the_whole() {
    for name in FAMILIES {
        let tokenizer = tokenizer(&own("text").join(name));
        let byte = |byte: u8| {
            let spelling = format!("<0x{byte:02X}>");
            let id = (0..tokenizer.vocab_size() as u32).find(|id| {
                let is_spelled = tokenizer.id_to_token(*id).as_deref() == Some(&spelling);
                is_spelled || tokenizer.token_bytes(*id) == Some(&[byte])
            });
            id.unwrap_or(u32::MAX)
        };
        let bytes: Vec<u32> = (0..=255).map(byte).collect();
        let mut state = 3u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % below
        };
        for _ in 0..20_000 {
            let mut sequence = Vec::new();
            for _ in 0..1 + random(12) {
                match random(4) {
                    // Past the last id too.
                    0 => sequence.push(random(tokenizer.vocab_size() + 3) as u32),
                    1 => sequence.push(bytes[random(256)]),
                    _ => {
                        let character = ["é", "€", "🎉", " ", "\u{10000}"][random(5)];
                        let cut = random(character.len()) + 1;
                        sequence.extend(character.bytes().take(cut).map(|b| bytes[usize::from(b)]));
                    }
                }
            }
            check_streams(&tokenizer, &sequence);
        }
    }
}

/// The token that begins a text: once, whether the tokenizer adds it or a template writes it.
#[test]
fn the_token_that_begins_a_text() {
    for (name, written) in [("llama3", "<|begin_of_text|>"), ("llama2", "<s>"), ("mistral", "<s>")]
    {
        let tokenizer = tokenizer(&own("text").join(name));
        let bos = tokenizer.token_to_id(written).unwrap();
        let count = |ids: Vec<u32>| ids.iter().filter(|id| **id == bos).count();
        assert_eq!(tokenizer.special_tokens().bos.as_deref(), Some(written));
        assert_eq!(tokenizer.encode("", true, true).unwrap(), [bos]);
        let text = "the fox ".repeat(40_000);
        assert_eq!(count(tokenizer.encode(&text, true, true).unwrap()), 1, "{name}");
        assert_eq!(count(tokenizer.encode(&text, false, true).unwrap()), 0, "{name}");
        // A rendered conversation is encoded so.
        let text = format!("{written}{text}");
        assert_eq!(count(tokenizer.encode(&text, false, true).unwrap()), 1, "{name}");
        // Transformers adds it to such a text all the same; a prompt does not begin twice.
        let prompt = |parse| tokenizer.encode_prompt(&text, true, parse, usize::MAX, &|| false);
        assert_eq!(count(tokenizer.encode(&text, true, true).unwrap()), 2, "{name}");
        assert_eq!(count(prompt(true).unwrap().0), 1, "{name}");
        // In a text that is not trusted it is text.
        assert_eq!(count(tokenizer.encode(&text, true, false).unwrap()), 1, "{name}");
        assert_eq!(prompt(false).unwrap().0, tokenizer.encode(&text, true, false).unwrap());
        // Encoding stops after the piece that exceeds the limit; here that piece is the whole text.
        let (ids, is_whole) = tokenizer.encode_prompt("the fox", true, true, 1, &|| false).unwrap();
        assert!(is_whole && ids.len() > 1, "{name}");
    }
}

fn check_vectors(tokenizer: &Arc<Tokenizer>, folder: &Path) {
    let mut num_vectors = 0;
    for case in json(&folder.join("encode.json")).as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let expected = ids(&case["ids"]);
        assert_eq!(tokenizer.encode(text, false, true).unwrap(), expected, "{text:?}");
        let framed = case.get("ids_with_special").map_or_else(|| expected.clone(), ids);
        assert_eq!(
            tokenizer.encode(text, true, true).unwrap(),
            framed,
            "{text:?} with special tokens"
        );
        assert_eq!(tokenizer.decode(&expected, false).unwrap(), case["decoded"].as_str().unwrap());
        let skipped = case["decoded_skip_special"].as_str().unwrap();
        assert_eq!(tokenizer.decode(&expected, true).unwrap(), skipped);
        for (id, token) in expected.iter().zip(case["tokens"].as_array().unwrap()) {
            assert_eq!(tokenizer.id_to_token(*id).as_deref(), token.as_str());
        }
        check_chunks(tokenizer, &expected, false, case.get("stream_chunks"), text);
        check_streams(tokenizer, &expected);
        num_vectors += 1;
    }
    for case in json(&folder.join("decode.json")).as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let sequence = ids(&case["ids"]);
        assert_eq!(tokenizer.decode(&sequence, false).unwrap(), case["text"].as_str().unwrap());
        let skipped = case["text_skip_special"].as_str().unwrap();
        assert_eq!(tokenizer.decode(&sequence, true).unwrap(), skipped, "{name}");
        let hex = case.get("token_bytes_hex").and_then(Value::as_array);
        for (id, hex) in sequence.iter().zip(hex.into_iter().flatten()) {
            let bytes: String =
                tokenizer.token_bytes(*id).unwrap().iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(bytes, hex.as_str().unwrap(), "{name}");
        }
        check_chunks(tokenizer, &sequence, false, case.get("stream_chunks"), name);
        check_chunks(tokenizer, &sequence, true, case.get("stream_chunks_skip_special"), name);
        check_streams(tokenizer, &sequence);
        num_vectors += 1;
    }
    assert!(num_vectors > 10, "only {num_vectors} vectors in {}", folder.display());
    println!("{num_vectors} vectors of {}", folder.display());
}

/// The pieces of a stream, where the vectors have them.
fn check_chunks(
    tokenizer: &Arc<Tokenizer>,
    sequence: &[u32],
    skip: bool,
    expected: Option<&Value>,
    name: &str,
) {
    let Some(expected) = expected else { return };
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), skip);
    let mut chunks: Vec<String> =
        sequence.iter().map(|id| detokenizer.push(*id).unwrap()).collect();
    chunks.push(detokenizer.finish().unwrap());
    assert_eq!(json!(chunks), *expected, "{name:?}, special tokens skipped: {skip}");
}

/// All pieces together are the whole, with and without special tokens.
fn check_streams(tokenizer: &Arc<Tokenizer>, sequence: &[u32]) {
    for skip in [false, true] {
        let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), skip);
        let mut text = String::new();
        for id in sequence {
            text.push_str(&detokenizer.push(*id).unwrap());
        }
        text.push_str(&detokenizer.finish().unwrap());
        assert_eq!(text, tokenizer.decode(sequence, skip).unwrap());
    }
}

/// Ids of the published Qwen3 vocabulary, by Transformers' AutoTokenizer.
#[test]
fn published_qwen3() {
    let Some(folder) = real_tokenizers() else { return };
    let tokenizer = tokenizer(&folder.join("qwen3"));
    assert_eq!(tokenizer.vocab_size(), 151_669);
    assert_eq!(tokenizer.encode("Hello, world!", false, true).unwrap(), [9707, 11, 1879, 0]);
    assert_eq!(
        tokenizer.encode("<|im_start|>user\n你好 🎉<|im_end|>", true, true).unwrap(),
        [151_644, 872, 198, 108_386, 11_162, 236, 231, 151_645]
    );
    assert_eq!(tokenizer.eos_token_id(), Some(151_645));
    assert!(tokenizer.is_special(151_645) && !tokenizer.is_special(151_667));
    // The model has more rows than the vocabulary has tokens; those have no text.
    assert_eq!(tokenizer.decode(&[9707, 151_900], false).unwrap(), "Hello");
    round_trips(&tokenizer);
}

#[test]
fn published_gpt2() {
    let Some(folder) = real_tokenizers() else { return };
    let tokenizer = tokenizer(&folder.join("gpt2"));
    assert_eq!(tokenizer.encode("Hello world", false, true).unwrap(), [15_496, 995]);
    assert_eq!(tokenizer.encode("a<|endoftext|>b", false, true).unwrap(), [64, 50_256, 65]);
    assert_eq!(tokenizer.vocab_size(), 50_257);
    round_trips(&tokenizer);
}

fn round_trips(tokenizer: &Arc<Tokenizer>) {
    let texts = [
        "",
        " ",
        "\n\n \t\r\n",
        "The quick brown fox's 12345 jumps; it'll DON'T stop.",
        "日本語と中文、한국어. Ελληνικά, русский, العربية",
        "👩‍👩‍👧‍👦 family, 👍🏽, 🇩🇪 and \u{0}NUL",
        "fn main() { println!(\"{:?}\", x); }   // trailing   ",
    ];
    for text in texts {
        let ids = tokenizer.encode(text, false, true).unwrap();
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        check_streams(tokenizer, &ids);
    }
}
