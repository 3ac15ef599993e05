//! Tokenizer files that mean harm, or are broken: an error that names the thing, soon, and no
//! panic that gets through.

use super::support::{own, Watch};
use serde_json::{json, Value};
use std::time::Duration;
use xserv::error::ErrorKind;
use xserv::text::Tokenizer;

/// Returns a small valid file to break.
fn valid() -> Value {
    serde_json::from_slice(&std::fs::read(own("text/tokenizer.json")).unwrap()).unwrap()
}

fn load(file: &Value) -> xserv::error::Result<Tokenizer> {
    let begin = Watch::start();
    let result = Tokenizer::from_bytes(&serde_json::to_vec(file).unwrap(), None);
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    result
}

/// Must not load; the message begins with the file's name and contains `part`.
fn refused(what: &str, part: &str, change: impl FnOnce(&mut Value)) {
    let mut file = valid();
    change(&mut file);
    let error = match load(&file) {
        Ok(_) => panic!("{what} was accepted"),
        Err(error) => error,
    };
    assert!(error.message().starts_with("tokenizer.json: "), "{what}: {error}");
    assert!(error.message().contains(part), "{what}: {error}");
    assert!(error.message().len() < 800, "{what}: a flood of {} bytes", error.message().len());
}

/// May load; then encoding and decoding give an answer or an error, in time.
fn survives(what: &str, change: impl FnOnce(&mut Value)) {
    let mut file = valid();
    change(&mut file);
    let begin = Watch::start();
    let outcome = load(&file).and_then(|tokenizer| {
        let long = "ab ".repeat(2000);
        for text in ["", "a", "the <|end|> quick", "日本語", &long] {
            let ids = tokenizer.encode(text, true, true)?;
            tokenizer.decode(&ids, false)?;
        }
        tokenizer.decode(&[0, 1, 2, u32::MAX, 300], true)
    });
    assert!(begin.elapsed() < Duration::from_secs(2), "{what}: {:?}", begin.elapsed());
    println!("{what}: {:?}", outcome.map(|text| text.len()));
}

#[test]
fn not_json() {
    for bytes in [&b""[..], b"{", b"[]", b"null", b"\xff\xfe", b"{\"model\": 1}", b"{}", b"\"x\""] {
        let error = Tokenizer::from_bytes(bytes, None).unwrap_err();
        assert!(error.message().starts_with("tokenizer.json: "), "{error}");
    }
    let deep = "[".repeat(100_000);
    assert!(Tokenizer::from_bytes(deep.as_bytes(), None).is_err());
    let deep = format!("{{\"x\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(Tokenizer::from_bytes(deep.as_bytes(), None).is_err());
    let large = vec![b' '; (64 << 20) + 1];
    let error = Tokenizer::from_bytes(&large, None).unwrap_err();
    assert!(error.message().contains("at most 67108864 are read"), "{error}");
}

#[test]
fn config() {
    let good = std::fs::read(own("text/tokenizer.json")).unwrap();
    for config in [&b"["[..], b"[]", b"\xff", b"{\"eos_token\": 5}", b"{\"eos_token\": {\"x\": 1}}"]
    {
        let error = Tokenizer::from_bytes(&good, Some(config)).unwrap_err();
        assert!(error.message().starts_with("tokenizer_config.json"), "{error}");
    }
    // A name that the vocabulary does not have is no error, only no id.
    let tokenizer = Tokenizer::from_bytes(&good, Some(b"{\"eos_token\": \"<none>\"}")).unwrap();
    assert_eq!(tokenizer.eos_token_id(), None);
}

#[test]
fn vocabulary() {
    refused("empty vocabulary", "model.vocab is empty", |f| f["model"]["vocab"] = json!({}));
    refused("no vocabulary", "model.vocab is empty", |f| {
        f["model"].as_object_mut().unwrap().remove("vocab");
    });
    refused("no model", "model", |f| {
        f.as_object_mut().unwrap().remove("model");
    });
    refused("negative id", "model.vocab[\"a\"]", |f| f["model"]["vocab"]["a"] = json!(-1));
    refused("id 2^32", "model.vocab[\"a\"]", |f| f["model"]["vocab"]["a"] = json!(1u64 << 32));
    refused("huge id", "ids must be below", |f| f["model"]["vocab"]["a"] = json!(u32::MAX));
    refused("float id", "model.vocab[\"a\"]", |f| f["model"]["vocab"]["a"] = json!(1.5));
    refused("text id", "model.vocab[\"a\"]", |f| f["model"]["vocab"]["a"] = json!("1"));
    refused("long token", "longer than 4096", |f| {
        f["model"]["vocab"]["a".repeat(5000)] = json!(70_000);
    });
    refused("unigram", "only \"BPE\" is supported", |f| {
        f["model"] = json!({"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0]]});
    });
    refused("word pieces", "only \"BPE\" is supported", |f| {
        f["model"]["type"] = json!("WordPiece")
    });
    refused("vocabulary as a list", "is a list", |f| f["model"]["vocab"] = json!([["a", 1]]));
    refused("merge out of vocabulary", "model.merges[0]", |f| {
        f["model"]["merges"] = json!([["nope", "nope"]]);
    });
    refused("merge whose whole is missing", "model.merges[0]: \"z7\"", |f| {
        f["model"]["merges"] = json!([["z", "7"]]);
    });
    refused("merge of one", "fewer than two", |f| f["model"]["merges"] = json!([["a"]]));
    refused("merge of three", "more than two", |f| f["model"]["merges"] = json!([["a", "b", "c"]]));
    refused("merge in a line", "two tokens", |f| f["model"]["merges"] = json!(["a b c"]));
    refused("prefix", "continuing_subword_prefix", |f| {
        f["model"]["continuing_subword_prefix"] = json!("##");
    });
    refused("dropout", "dropout", |f| f["model"]["dropout"] = json!(0.5));
    refused("unknown token", "unk_token", |f| f["model"]["unk_token"] = json!("<nope>"));
    refused("version", "version", |f| f["version"] = json!("9.9"));
    survives("ids with gaps", |f| f["model"]["vocab"]["z"] = json!(65_000));
    survives("ids twice", |f| f["model"]["vocab"]["z"] = f["model"]["vocab"]["a"].clone());
    survives("no merges", |f| f["model"]["merges"] = json!([]));
    survives("suffix", |f| f["model"]["end_of_word_suffix"] = json!("</w>"));
    survives("byte fallback", |f| f["model"]["byte_fallback"] = json!(true));
}

#[test]
fn added_tokens() {
    let token = |id: u64, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": true})
    };
    refused("out of range", "ids must be below", |f| {
        f["added_tokens"] = json!([token(1 << 30, "x")])
    });
    refused("negative", "expected u32", |f| {
        f["added_tokens"] = json!([{"id": -1, "content": "x"}])
    });
    // An id beyond a gap is the file's to give.
    survives("gap", |f| f["added_tokens"] = json!([token(5000, "<x>")]));
    refused("an id of another token", "has id 5, but the vocabulary before it leads to 320", |f| {
        f["added_tokens"] = json!([token(5, "<x>")]);
    });
    refused("empty", "added_tokens[0].content is empty", |f| {
        f["added_tokens"] = json!([token(320, "")])
    });
    refused("same id", "has id 320 for both", |f| {
        f["added_tokens"] = json!([token(320, "<x>"), token(320, "<y>")]);
    });
    refused("same content", "<x>", |f| {
        f["added_tokens"] = json!([token(320, "<x>"), token(321, "<x>")])
    });
    refused("of the vocabulary, under another id", "has id 400", |f| {
        f["added_tokens"] = json!([token(400, "a")]);
    });
    refused("too long", "longer than", |f| {
        f["added_tokens"] = json!([token(320, &"x".repeat(5000))])
    });
    refused("no object", "expected an added token", |f| f["added_tokens"] = json!(["x"]));
    survives("none", |f| f["added_tokens"] = json!(null));
    survives("stripping", |f| {
        let mut both = token(320, "<x>");
        both["lstrip"] = json!(true);
        both["rstrip"] = json!(true);
        both["single_word"] = json!(true);
        f["added_tokens"] = json!([both]);
    });
    // Two million of them, written by hand: 100 MB of JSON values would be the test's own.
    let mut text = String::from(
        "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]},\"added_tokens\":[",
    );
    for id in 0..1_400_000 {
        text.push_str(&format!("{{\"id\":{},\"content\":\"<{}>\"}},", id + 1, id));
    }
    text.pop();
    text.push_str("]}");
    assert!(text.len() < 64 << 20);
    let begin = Watch::start();
    let error = Tokenizer::from_bytes(text.as_bytes(), None).unwrap_err();
    assert!(error.message().contains("more than 16384 entries"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(2));
}

/// The structures that make the crate panic at load, encode or decode.
#[test]
fn known_panics() {
    refused("FixedLength 0", "FixedLength has length 0", |f| {
        f["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0});
    });
    refused("bad Precompiled map", "Precompiled", |f| {
        f["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
    });
    refused("template with an absent token", "[CLS]", |f| {
        f["post_processor"] = json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [], "special_tokens": {}});
    });
    for id in [9_999, u32::MAX] {
        refused("template with an id of no token", "post_processor adds the token id", |f| {
            f["post_processor"] = json!({"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                           {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [id], "tokens": ["<s>"]}}});
        });
        refused("a frame with an id of no token", "post_processor adds the token id", |f| {
            f["post_processor"] = json!({"type": "RobertaProcessing", "sep": ["</s>", id],
                "cls": ["<s>", 0], "trim_offsets": true, "add_prefix_space": false});
        });
    }
    refused("template that repeats", "repeats sequence A", |f| {
        let once = json!({"Sequence": {"id": "A", "type_id": 0}});
        f["post_processor"] = json!({"type": "TemplateProcessing", "single": vec![once; 100],
            "pair": [], "special_tokens": {}});
    });
    survives("truncation with stride >= length", |f| {
        f["truncation"] = json!({"max_length": 1, "stride": 5, "strategy": "LongestFirst",
                                 "direction": "Right"});
    });
    survives("padding to a huge length", |f| {
        f["padding"] = json!({"strategy": {"Fixed": 4_000_000_000u32}, "direction": "Right",
            "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"});
    });
    survives("Strip decoder on short tokens", |f| {
        f["decoder"] = json!({"type": "Strip", "content": "a", "start": 1, "stop": 9});
    });
    refused("Strip decoder far out", "Strip.stop", |f| {
        f["decoder"] =
            json!({"type": "Strip", "content": "a", "start": 0, "stop": 4_000_000_000u32});
    });
    refused("part of no type", "without a \"type\"", |f| {
        f["normalizer"] = json!({"normalizers": []});
    });
    refused("unknown part", "not supported", |f| f["decoder"] = json!({"type": "Nope"}));
    refused("part of wrong fields", "pre_tokenizer", |f| {
        f["pre_tokenizer"] = json!({"type": "Split", "pattern": {"Regex": "a"}});
    });
    refused("number as a part", "normalizer", |f| f["normalizer"] = json!(5));
    survives("no parts at all", |f| {
        for part in ["normalizer", "pre_tokenizer", "post_processor", "decoder"] {
            f[part] = json!(null);
        }
    });
    survives("metaspace", |f| {
        f["pre_tokenizer"] =
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"});
        f["decoder"] = f["pre_tokenizer"].clone();
    });
}

#[test]
fn growth_and_depth() {
    let sequence = |parts: Vec<Value>| json!({"type": "Sequence", "normalizers": parts});
    refused("long replacement", "times longer", |f| {
        f["normalizer"] = json!({"type": "Replace", "pattern": {"String": "a"},
                                 "content": "a".repeat(1_000)});
    });
    refused("eight bytes for one", "at most 4 times is allowed", |f| {
        f["normalizer"] = json!({"type": "Replace", "pattern": {"String": "a"},
                                 "content": "b".repeat(8)});
    });
    refused("many doublings", "times longer", |f| {
        let double = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
        f["normalizer"] = sequence(vec![double; 20]);
    });
    refused("many parts", "more than 32 parts", |f| {
        f["normalizer"] = sequence(vec![json!({"type": "NFC"}); 100]);
    });
    refused("large part", "at most 65536", |f| {
        f["normalizer"] = json!({"type": "Replace", "pattern": {"String": "a"},
                                 "content": "a".repeat(100_000)});
    });
    let mut nested = json!({"type": "NFC"});
    for _ in 0..40 {
        nested = json!({"type": "Sequence", "normalizers": [nested]});
    }
    refused("deep sequences", "deep", |f| f["normalizer"] = nested);
    survives("a few replacements", |f| {
        f["normalizer"] = sequence(vec![
            json!({"type": "Prepend", "prepend": "▁"}),
            json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
        ]);
    });
}

#[test]
fn regular_expressions() {
    for pattern in [
        r"(a+)+(?!a)$b",
        r"(?=(a|aa)+(?!a)b)",
        r"((a*)*)*(?<=b)c",
        r"(?:(?:(?:a?){20}){20}){30}(?!x)",
        r"(\s|\s\s)*(?=q)z",
        r"(a|b|ab)*(?=c)c\1",
        r"(x+x+)+(?!x)y|(a|a)*(?!a)!b",
    ] {
        survives(pattern, |f| f["pre_tokenizer"] = split(pattern));
    }
    refused("expression that does not parse", "pre_tokenizer", |f| {
        f["pre_tokenizer"] = split("(a")
    });
    refused("empty expression", "0 bytes", |f| f["pre_tokenizer"] = split(""));
    refused("long expression", "3000 bytes", |f| f["pre_tokenizer"] = split(&"a".repeat(3000)));
    refused("large repetition", "repetitions", |f| {
        f["pre_tokenizer"] = split(r"(?:\p{L}{1000}){1000}");
    });
    survives("nested groups", |f| {
        f["pre_tokenizer"] = split(&format!("{}a{}", "(".repeat(900), ")".repeat(900)));
    });
    survives("Llama 3's", |f| {
        f["pre_tokenizer"] = split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        );
    });
}

/// Returns an expression that takes two to the power of `exponent` steps for each `unit`.
fn branching(unit: &str, exponent: u32) -> Value {
    let branch = format!("(?:(?={unit}){unit}|(?={unit}){unit}){{{exponent}}}");
    split(&format!("(?:(?={branch}!)|){unit}|[^é]+|."))
}

fn split(pattern: &str) -> Value {
    json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}]})
}

/// Expressions are tried on the letters that they name, written as themselves or by number.
#[test]
fn slow_expressions_show_at_load() {
    for unit in ["é", r"\x{e9}", r"\u00e9", r"\xe9"] {
        refused(unit, "regular expressions take more", |f| {
            f["pre_tokenizer"] = branching(unit, 18)
        });
    }
}

/// An expression that is slow on two letters together is not found at load.
#[test]
fn a_text_is_given_up_when_it_takes_too_long() {
    let mut file = valid();
    file["pre_tokenizer"] = branching("éü", 16);
    let tokenizer = load(&file).unwrap();
    assert!(tokenizer.encode("the quick brown fox", false, true).is_ok());
    let text = "éü".repeat(20_000);
    let begin = Watch::start();
    let error = tokenizer.encode(&text, false, true).map(|ids| ids.len()).unwrap_err();
    assert!(error.message().contains("ms of processor time"), "{error}");
    assert_eq!(error.kind(), ErrorKind::InvalidFile);
    // A second and a third of one, by its length.
    assert!(begin.elapsed() < Duration::from_secs(8), "{:?}", begin.elapsed());

    let begin = Watch::start();
    let is_late = || begin.elapsed() > Duration::from_millis(50);
    let error = tokenizer.encode_prompt(&text, false, true, usize::MAX, &is_late).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert!(begin.elapsed() < Duration::from_millis(900), "{:?}", begin.elapsed());
}

/// A search that looks to the end of the text from each place sees only a part of it.
#[test]
fn quadratic_searches_are_given_up() {
    for pattern in ["(?=[^é]*é)x", "(?:[^é](?=[^é]*é)|[^é](?=[^é]*é|))*é"] {
        let mut file = valid();
        file["pre_tokenizer"] = split(pattern);
        let begin = Watch::start();
        match load(&file) {
            Ok(tokenizer) => {
                let outcome = tokenizer.encode(&"ab ".repeat(300_000), false, true);
                println!("{pattern}: {:?}", outcome.map(|ids| ids.len()));
            }
            Err(error) => assert!(error.message().contains("regular expressions take"), "{error}"),
        }
        // Unbounded, one takes hours; a busy machine may make seconds of one a minute.
        assert!(begin.elapsed() < Duration::from_secs(60), "{pattern}: {:?}", begin.elapsed());
    }
}

/// Searches in windows find what searches in the whole text find.
#[test]
fn windows_do_not_change_tokens() {
    let patterns = [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"\d{1,3}(?=(?:\d{3}){0,5}\b)",
        r"\p{N}",
        r"q*",
        r"(?<=b)a|\bthe\b",
    ];
    let text = |seed: u64| {
        let units = ["the ", "a", "b", "  ", "\n", "1", "日本", "q", "é!", "'s"];
        let mut state = seed;
        let mut text = String::new();
        while text.len() < 30_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let unit = units[(state >> 33) as usize % units.len()];
            // Some runs are longer than a window, some places without a match too.
            let count = if (state >> 50).is_multiple_of(60) { 7_000 } else { 1 };
            text.push_str(&unit.repeat(count));
        }
        text
    };
    for pattern in patterns {
        let mut file = valid();
        file["pre_tokenizer"] = split(pattern);
        let tokenizer = load(&file).unwrap();
        let whole = tokenizers::Tokenizer::from_bytes(serde_json::to_vec(&file).unwrap()).unwrap();
        for seed in 1..6 {
            let text = text(seed);
            let expected = whole.encode_fast(text.as_str(), false).unwrap();
            let ids = tokenizer.encode(&text, false, true).unwrap();
            assert!(ids == expected.get_ids(), "{pattern}, text {seed}");
        }
    }
}

/// A few characters grow to many times their length under compatibility forms.
#[test]
fn texts_that_normalizers_make_are_bounded() {
    let mut file = valid();
    file["normalizer"] = json!({"type": "NFKD"});
    let tokenizer = load(&file).unwrap();
    assert!(tokenizer.encode("\u{fdfa}", false, true).unwrap().len() > 18);
    let error = tokenizer
        .encode(&"\u{fdfa}".repeat(100_000), false, true)
        .map(|ids| ids.len())
        .unwrap_err();
    assert!(error.message().contains("longer than 2097152 bytes"), "{error}");
    let text = "the quick brown fox ".repeat(50_000);
    assert!(tokenizer.encode(&text, false, true).is_ok());

    let mut file = valid();
    file["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
    let tokenizer = load(&file).unwrap();
    assert!(tokenizer.encode(&text, false, true).is_ok());
    let error =
        tokenizer.encode(&" ".repeat(1_000_000), false, true).map(|ids| ids.len()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

/// A file cut anywhere, and with any byte changed, is an error or a tokenizer, never a panic.
#[test]
fn cut_and_changed_files() {
    let good = std::fs::read(own("text/tokenizer.json")).unwrap();
    for length in (0..good.len()).step_by(7) {
        assert!(Tokenizer::from_bytes(&good[..length], None).is_err(), "cut at {length}");
    }
    let mut state = 99u64;
    for _ in 0..1500 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let mut bytes = good.clone();
        let position = (state >> 20) as usize % bytes.len();
        bytes[position] = (state >> 50) as u8;
        if let Ok(tokenizer) = Tokenizer::from_bytes(&bytes, None) {
            let ids = tokenizer.encode("the quick 日本 <|end|> x", true, true);
            if let Ok(ids) = ids {
                let _ = tokenizer.decode(&ids, false);
            }
        }
    }
}
