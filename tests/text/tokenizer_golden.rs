//! Encoding, decoding and streaming: the vectors of the reference data, exactly.

use super::support::{golden, ids, json, own, real_tokenizers, tokenizer};
use std::path::Path;
use std::sync::Arc;
use xserv::text::{Detokenizer, Tokenizer};

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

fn check_vectors(tokenizer: &Arc<Tokenizer>, folder: &Path) {
    let mut num_vectors = 0;
    for case in json(&folder.join("encode.json")).as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let expected = ids(&case["ids"]);
        assert_eq!(tokenizer.encode(text, false, true).unwrap(), expected, "{text:?}");
        assert_eq!(
            tokenizer.encode(text, true, true).unwrap(),
            expected,
            "{text:?} with special tokens"
        );
        assert_eq!(tokenizer.decode(&expected, false).unwrap(), case["decoded"].as_str().unwrap());
        let skipped = case["decoded_skip_special"].as_str().unwrap();
        assert_eq!(tokenizer.decode(&expected, true).unwrap(), skipped);
        for (id, token) in expected.iter().zip(case["tokens"].as_array().unwrap()) {
            assert_eq!(tokenizer.id_to_token(*id).as_deref(), token.as_str());
        }
        check_streams(tokenizer, &expected);
        num_vectors += 1;
    }
    for case in json(&folder.join("decode.json")).as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let sequence = ids(&case["ids"]);
        assert_eq!(tokenizer.decode(&sequence, false).unwrap(), case["text"].as_str().unwrap());
        let skipped = case["text_skip_special"].as_str().unwrap();
        assert_eq!(tokenizer.decode(&sequence, true).unwrap(), skipped, "{name}");
        for (id, hex) in sequence.iter().zip(case["token_bytes_hex"].as_array().unwrap()) {
            let bytes: String =
                tokenizer.token_bytes(*id).unwrap().iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(bytes, hex.as_str().unwrap(), "{name}");
        }
        let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), false);
        let mut chunks: Vec<String> =
            sequence.iter().map(|id| detokenizer.push(*id).unwrap()).collect();
        chunks.push(detokenizer.finish().unwrap());
        let expected: Vec<&str> =
            case["stream_chunks"].as_array().unwrap().iter().map(|c| c.as_str().unwrap()).collect();
        assert_eq!(chunks, expected, "{name}");
        check_streams(tokenizer, &sequence);
        num_vectors += 1;
    }
    assert!(num_vectors > 10, "only {num_vectors} vectors in {}", folder.display());
    println!("{num_vectors} vectors of {}", folder.display());
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
