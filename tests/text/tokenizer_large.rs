//! Long texts: linear time, and the same tokens as in one piece.

use super::support::{golden, own, real_tokenizers, tokenizer, Watch};
use xserv::text::MAX_TEXT_BYTES;

#[test]
fn long_texts_take_linear_time() {
    let Some(folder) = real_tokenizers() else { return };
    for name in ["qwen3", "gpt2"] {
        let tokenizer = tokenizer(&folder.join(name));
        for (what, unit) in [
            ("one letter", "a"),
            ("one space", " "),
            ("line breaks", "\n"),
            ("digits", "7"),
            ("marks", "!"),
            ("Chinese", "你好世界"),
            ("emoji", "🎉"),
            ("words", "the quick brown fox "),
            ("combining", "e\u{301}"),
            ("special tokens", "<|endoftext|>"),
            ("almost special tokens", "<|endoftex"),
        ] {
            let text = unit.repeat((1 << 20) / unit.len());
            let begin = Watch::start();
            let ids = tokenizer.encode(&text, false, true).unwrap();
            let elapsed = begin.elapsed();
            println!("{name}, 1 MiB of {what}: {} tokens, {elapsed:?}", ids.len());
            assert!(elapsed.as_secs() < 10, "{what}: {elapsed:?}");
            if what != "combining" || name != "qwen3" {
                assert_eq!(tokenizer.decode(&ids, false).unwrap(), text, "{name}, {what}");
            }
        }
    }
}

#[test]
fn ten_megabytes() {
    let Some(folder) = real_tokenizers() else { return };
    let tokenizer = tokenizer(&folder.join("qwen3"));
    let text = "It was the best of times; it was the worst of times (1859).\n".repeat(170_000);
    let begin = Watch::start();
    let ids = tokenizer.encode(&text, false, true).unwrap();
    println!("{} MB: {} tokens in {:?}", text.len() / 1_000_000, ids.len(), begin.elapsed());
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    let error = tokenizer.encode(&"a".repeat(MAX_TEXT_BYTES + 1), false, true).unwrap_err();
    assert!(error.message().contains("at most 16777216"), "{error}");
}

/// Texts on which a pattern could go back and forth, 256 KiB of each: the library's own limit of
/// time for a text, which grows with its length, would end a search that is not linear. At most a
/// piece is searched at once, and Llama 2's normalizer makes three bytes of a space.
#[test]
fn long_texts_of_families() {
    for name in ["llama3", "llama2", "mistral"] {
        let tokenizer = tokenizer(&own("text").join(name));
        for unit in [
            "a", " ", "\n", "7", "!", "\t\n", " \n", "\n ", "  a", "'", "'s", "' ", "7 ", "77!",
            "!\n", "\u{3000}", "é", "日本", "🎉", "\r", "\u{301}", "<|", "<s", "<unk>",
        ] {
            // Not a space first, which Mistral's form takes for the one that it adds itself.
            let text = format!("x{}", unit.repeat((1 << 18) / unit.len()));
            let ids = tokenizer
                .encode(&text, true, true)
                .unwrap_or_else(|error| panic!("{name}, {unit:?}: {error}"));
            assert_eq!(tokenizer.decode(&ids[1..], false).unwrap(), text, "{name}, {unit:?}");
        }
    }
}

/// Cutting a long text does not change its tokens: the text is made of paragraphs shorter than a
/// piece, each of which is encoded by itself as well. A paragraph ends where any text may be cut:
/// in a letter, with a space and a letter after it.
#[test]
fn pieces_have_the_tokens_of_the_whole() {
    let Some(golden) = golden() else { return };
    let units = [
        "the ",
        "fox's ",
        "  x",
        "\n",
        "日本",
        "日本。",
        " 12",
        "345",
        "don't stop",
        "e\u{301} a",
        "!? ",
        "<|endoftext|>",
        "a b",
        "a,b",
        "x_y|z>",
        "한국，",
        "\u{301}",
        "\r\n\r\n",
        "\t",
        "...",
        "🎉",
        "<tool_call>",
        "</think>",
        "'S ",
        "²½",
        "\u{a0}",
        "क्षि",
    ];
    for model in ["qwen3-tiny-tied", "gpt2-tiny"] {
        let tokenizer = tokenizer(&golden.join("models").join(model));
        let mut state = 5u64;
        for _ in 0..12 {
            let (mut whole, mut parts) = (String::new(), Vec::new());
            while whole.len() < 200_000 {
                let mut paragraph = String::from(" p");
                while paragraph.len() < 300 {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    paragraph.push_str(units[(state >> 33) as usize % units.len()]);
                }
                paragraph.push('p');
                parts.extend(tokenizer.encode(&paragraph, false, true).unwrap());
                whole.push_str(&paragraph);
            }
            assert!(tokenizer.encode(&whole, false, true).unwrap() == parts, "{model}");
        }
    }
}

/// The peak of memory while megabytes are encoded, in a process of its own.
#[test]
fn memory_is_bounded() {
    let Some(_) = real_tokenizers() else { return };
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tokenizer_large::memory_child", "--nocapture", "--test-threads=1"])
        .env("XSERV_TEXT_MEMORY", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{text}");
    assert!(output.status.success());
    let peak = text.lines().find_map(|line| line.strip_prefix("PEAK ")).unwrap();
    assert!(peak.parse::<u64>().unwrap() < 256 << 10, "{peak} KiB");
}

#[test]
fn memory_child() {
    if std::env::var_os("XSERV_TEXT_MEMORY").is_none() {
        return;
    }
    let peak = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().to_owned()
    };
    let folder = real_tokenizers().unwrap();
    for name in ["qwen3", "gpt2"] {
        let begin = Watch::start();
        let tokenizer = tokenizer(&folder.join(name));
        println!("\n{name} loaded in {:?}: {} KiB", begin.elapsed(), peak());
        for unit in
            ["the quick brown fox ", "a", "你好世界，", "7", "\n", "!", "🎉", "<|endoftext|>"]
        {
            let text = unit.repeat(2_000_000 / unit.len());
            let begin = Watch::start();
            let ids = tokenizer.encode(&text, false, true).unwrap();
            println!("{unit:?}: {} tokens, {:?}, {} KiB", ids.len(), begin.elapsed(), peak());
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        }
    }
    println!("PEAK {}", peak());
}
