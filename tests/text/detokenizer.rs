//! Streams of vocabularies that are not of the byte level, and of tokens that do not exist.

use super::support::{own, tokenizer};
use serde_json::json;
use std::sync::Arc;
use xserv::text::{Detokenizer, Tokenizer};

/// A vocabulary in the manner of SentencePiece: `▁` for spaces, bytes as `<0xE2>`.
fn metaspace() -> Arc<Tokenizer> {
    let mut vocab = serde_json::Map::new();
    vocab.insert("<unk>".to_owned(), json!(0));
    for byte in 0..=255u32 {
        vocab.insert(format!("<0x{byte:02X}>"), json!(byte + 1));
    }
    for (index, token) in ["▁", "h", "i", "hi", "▁hi", "t"].iter().enumerate() {
        vocab.insert((*token).to_owned(), json!(300 + index));
    }
    let file = json!({
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["h", "i"], ["▁", "hi"]],
                  "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true},
    });
    Arc::new(Tokenizer::from_bytes(&serde_json::to_vec(&file).unwrap(), None).unwrap())
}

#[test]
fn other_vocabularies_stream_by_difference() {
    let tokenizer = metaspace();
    assert!(!tokenizer.is_byte_level());
    assert_eq!(tokenizer.token_bytes(300), None);
    for text in ["hi hi", "hit hi", "hi €🎉 hi", "🎉", "日本 hi"] {
        let ids = tokenizer.encode(text, false, true).unwrap();
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), false);
        let mut streamed = String::new();
        for id in &ids {
            let piece = detokenizer.push(*id).unwrap();
            assert!(!piece.contains('\u{fffd}'), "{text}: {piece:?}");
            streamed.push_str(&piece);
        }
        streamed.push_str(&detokenizer.finish().unwrap());
        assert_eq!(streamed, text);
    }
    // Bytes that never become a character are not held back for ever.
    let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), false);
    let mut streamed = String::new();
    for _ in 0..100 {
        streamed.push_str(&detokenizer.push(0xff + 1).unwrap());
    }
    assert!(streamed.contains('\u{fffd}'));
    detokenizer.finish().unwrap();
}

#[test]
fn ids_without_a_token_have_no_text() {
    let tokenizer = tokenizer(&own("text"));
    let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), true);
    assert_eq!(detokenizer.push(u32::MAX).unwrap(), "");
    assert_eq!(detokenizer.push(100_000).unwrap(), "");
    let end = tokenizer.token_to_id("<|end|>").unwrap();
    assert_eq!(detokenizer.push(end).unwrap(), "");
    assert_eq!(tokenizer.decode(&[end, u32::MAX], true).unwrap(), "");
    assert_eq!(tokenizer.decode(&[end, u32::MAX], false).unwrap(), "<|end|>");
}

/// A detokenizer can be used again after its end.
#[test]
fn finishing_begins_anew() {
    let tokenizer = tokenizer(&own("text"));
    let ids = tokenizer.encode("🎉", false, true).unwrap();
    let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), false);
    let first = tokenizer.encode("\u{1f469}", false, true).unwrap()[0];
    assert_eq!(detokenizer.push(first).unwrap(), "");
    assert_eq!(detokenizer.finish().unwrap(), "\u{fffd}");
    let text: String = ids.iter().map(|id| detokenizer.push(*id).unwrap()).collect();
    assert_eq!(text, "🎉");
    assert_eq!(detokenizer.finish().unwrap(), "");
}
