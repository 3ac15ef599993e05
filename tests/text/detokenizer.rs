//! Streams of vocabularies that are not of the byte level, and of tokens that do not exist.

use super::support::{own, tokenizer};
use serde_json::json;
use std::sync::Arc;
use xserv::text::{Detokenizer, StopMatcher, Tokenizer};

/// Returns a vocabulary in the manner of SentencePiece: `▁` for spaces, bytes as `<0xE2>`.
fn sentence_pieces(decoder: serde_json::Value) -> Arc<Tokenizer> {
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
        "decoder": decoder,
        "model": {"type": "BPE", "vocab": vocab, "merges": [["h", "i"], ["▁", "hi"]],
                  "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true},
    });
    Arc::new(Tokenizer::from_bytes(&serde_json::to_vec(&file).unwrap(), None).unwrap())
}

fn byte_fallback() -> Arc<Tokenizer> {
    sentence_pieces(json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}))
}

fn pieces(tokenizer: &Arc<Tokenizer>, ids: &[u32]) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), false);
    let mut pieces: Vec<_> = ids.iter().map(|id| detokenizer.push(*id).unwrap()).collect();
    pieces.push(detokenizer.finish().unwrap());
    pieces
}

/// The ids of `<0x00>` and following begin at 1.
fn bytes(text: &[u8]) -> Vec<u32> {
    text.iter().map(|byte| u32::from(*byte) + 1).collect()
}

#[test]
fn characters_of_byte_tokens_come_whole() {
    let tokenizer = byte_fallback();
    assert_eq!(tokenizer.token_bytes(300), Some(" ".as_bytes()));
    assert_eq!(tokenizer.token_bytes(304), Some(" hi".as_bytes()));
    assert_eq!(tokenizer.token_bytes(0xe3), Some(&[0xe2][..]));
    assert_eq!(tokenizer.token_bytes(299), Some(&[][..]));
    assert_eq!(pieces(&tokenizer, &bytes("€".as_bytes())), ["", "", "€", ""]);
    assert_eq!(pieces(&tokenizer, &bytes(b"\n\n")), ["\n", "\n", ""]);
    // A character that nothing finishes.
    assert_eq!(
        pieces(&tokenizer, &[bytes(b"\xe2\x82"), vec![303]].concat()),
        ["", "", "\u{fffd}\u{fffd}hi", ""]
    );
    assert_eq!(pieces(&tokenizer, &bytes(b"\xe2\x82")), ["", "", "\u{fffd}\u{fffd}"]);
}

/// One space is left out at the beginning of a text and nowhere else.
#[test]
fn the_first_space_is_left_out_once() {
    let tokenizer = byte_fallback();
    assert_eq!(pieces(&tokenizer, &[304, 304]), ["hi", " hi", ""]);
    assert_eq!(pieces(&tokenizer, &[300, 304]), ["", " hi", ""]);
    assert_eq!(pieces(&tokenizer, &[303, 304]), ["hi", " hi", ""]);
    assert_eq!(pieces(&tokenizer, &bytes(b"  a")), ["", " ", "a", ""]);
    // After its end, a new text begins.
    let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), false);
    for _ in 0..2 {
        assert_eq!(detokenizer.push(304).unwrap(), "hi");
        assert_eq!(detokenizer.push(304).unwrap(), " hi");
        assert_eq!(detokenizer.finish().unwrap(), "");
    }
}

/// A continuation of a prompt keeps the space between its last word and the next.
#[test]
fn a_text_that_goes_on_keeps_its_first_space() {
    let tokenizer = byte_fallback();
    let mut detokenizer = Detokenizer::continuing(Arc::clone(&tokenizer), false, &[303]).unwrap();
    assert_eq!(detokenizer.push(304).unwrap(), " hi");
    assert_eq!(detokenizer.push(304).unwrap(), " hi");
    assert_eq!(detokenizer.finish().unwrap(), "");
    // Tokens of the byte level have no such space.
    let bytes = super::support::tokenizer(&own("text"));
    let ids = bytes.encode(" hi there", false, true).unwrap();
    let mut detokenizer = Detokenizer::continuing(bytes, false, &[]).unwrap();
    let text: String = ids.iter().map(|id| detokenizer.push(*id).unwrap()).collect();
    assert_eq!(text, " hi there");
}

/// Decoders that look at neighbours see the last tokens of the prompt.
#[test]
fn the_first_space_is_kept_by_other_decoders() {
    for (decoder, tokens, whole) in [
        (
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}),
            [303, 304],
            "hi hi",
        ),
        (json!({"type": "WordPiece", "prefix": "##", "cleanup": true}), [303, 302], "hi i"),
        (json!({"type": "BPEDecoder", "suffix": "▁"}), [300, 303], " hi"),
    ] {
        let tokenizer = sentence_pieces(decoder.clone());
        for skip in [false, true] {
            let before = tokenizer.decode(&tokens[..1], skip).unwrap();
            let mut detokenizer =
                Detokenizer::continuing(Arc::clone(&tokenizer), skip, &tokens[..1]).unwrap();
            let mut text = before;
            text += &detokenizer.push(tokens[1]).unwrap();
            text += &detokenizer.finish().unwrap();
            assert_eq!(tokenizer.decode(&tokens, skip).unwrap(), text, "{decoder}");
            assert_eq!(text, whole, "{decoder}");
        }
    }
}

/// A stop string that begins in the middle of a token and ends in byte tokens.
#[test]
fn stop_strings_of_byte_tokens() {
    let tokenizer = byte_fallback();
    let ids = [vec![304, 304], bytes("\n€".as_bytes()), vec![304]].concat();
    for (stop, shown, num_pushed) in
        [("i\n", "hi h", 3), ("\n", "hi hi", 3), ("€", "hi hi\n", 6), ("€ hi", "hi hi\n", 7)]
    {
        let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), true);
        let mut matcher = StopMatcher::new(&[stop]).unwrap();
        let mut text = String::new();
        let matched = ids.iter().position(|id| {
            let output = matcher.push(&detokenizer.push(*id).unwrap()).unwrap();
            text.push_str(&output.text);
            output.matched.is_some()
        });
        assert_eq!((text.as_str(), matched), (shown, Some(num_pushed - 1)), "{stop:?}");
    }
}

#[test]
fn other_vocabularies_stream_by_difference() {
    let tokenizer = sentence_pieces(json!({"type": "Sequence", "decoders": [
        {"type": "ByteFallback"},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false}]}));
    assert!(!tokenizer.has_token_bytes());
    assert_eq!(tokenizer.token_bytes(300), None);
    for text in ["hi hi", "hit hi", "hi €🎉 hi", "🎉", "日本 hi"] {
        let ids = tokenizer.encode(text, false, true).unwrap();
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        let pieces = pieces(&tokenizer, &ids);
        assert!(!pieces.iter().any(|piece| piece.contains('\u{fffd}')), "{text}: {pieces:?}");
        assert_eq!(pieces.concat(), text);
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
