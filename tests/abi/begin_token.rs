//! The token that begins a text, of tokenizers that add one: never twice, however a prompt is given.

use std::path::Path;

use serde_json::{json, Value};
use xserv::ffi::*;

use crate::client::*;
use crate::files::TempDir;

fn golden(name: &str) -> std::path::PathBuf {
    root().join("tests/golden").join(name)
}

/// Returns the tiny model with the tokenizer of a family and this template.
fn model(family: &str, template: &str) -> (TempDir, Model) {
    let folder = TempDir::new();
    let tokenizer = golden("text").join(family);
    let copy =
        |from: &Path, name: &str| folder.write(name, std::fs::read(from.join(name)).unwrap());
    for name in ["config.json", "model.safetensors"] {
        copy(&tiny(), name);
    }
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        copy(&tokenizer, name);
    }
    folder.write("chat_template.jinja", template);
    let model = Model::open(folder.path());
    (folder, model)
}

/// Returns a template of families.json.
fn template(name: &str) -> String {
    let text = std::fs::read_to_string(golden("chat_template/families.json")).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap();
    file["templates"][name]["source"].as_str().unwrap().to_owned()
}

#[test]
fn a_text_begins_once() {
    let written = "<|begin_of_text|>{% for m in messages %}{{ m.content }}{% endfor %}".to_owned();
    for (family, bos, template) in [
        ("llama3", "<|begin_of_text|>", template("llama 3")),
        ("llama3", "<|begin_of_text|>", template("llama 3.1")),
        ("llama3", "<|begin_of_text|>", written),
        ("llama2", "<s>", template("mistral 0.1")),
        ("mistral", "<s>", template("mistral 0.3")),
    ] {
        let (_folder, model) = model(family, &template);
        let bos_id = model.tokenize(bos).unwrap()[0];
        let begins_once = |ids: &[u32]| {
            ids.first() == Some(&bos_id) && ids.iter().filter(|id| **id == bos_id).count() == 1
        };
        // A plain text, and one in which it is written.
        let plain = model.tokenize("hello world").unwrap();
        assert!(begins_once(&plain), "{family}: {plain:?}");
        let text = format!("{bos}hello world");
        assert!(begins_once(&model.tokenize(&text).unwrap()), "{family}");
        // Written elsewhere, it is another one.
        assert!(!begins_once(&model.tokenize(&format!("a{bos}")).unwrap()), "{family}");

        let messages = json!([{"role": "user", "content": "hello world"}]).to_string();
        let rendered = model.apply_chat_template(&messages, None, None, true).unwrap();
        assert!(rendered.starts_with(bos), "{family}: {rendered:?}");
        let ids = model.tokenize(&rendered).unwrap();
        assert!(begins_once(&ids), "{family}: {ids:?}");

        // As a prompt: the conversation, its text and its tokens are the same.
        let (messages, rendered, hello) =
            (c_string(&messages), c_string(&rendered), c_string("hello world"));
        let base = xserv_request { max_tokens: 8, temperature: 0.0, ignore_eos: 1, ..request() };
        let expected = model.generate(&xserv_request { ignore_eos: 1, ..greedy(&ids, 8) }).unwrap();
        for request in [
            xserv_request { messages_json: messages.as_ptr(), ..base },
            xserv_request { prompt: rendered.as_ptr(), ..base },
            xserv_request { prompt: rendered.as_ptr(), add_special_tokens: 0, ..base },
        ] {
            let got = model.generate(&request).unwrap();
            assert_eq!(got.num_prompt_tokens, ids.len(), "{family}");
            assert_eq!((&got.ids, &got.text), (&expected.ids, &expected.text), "{family}");
            assert_eq!(got.text, model.detokenize(&got.ids, true).unwrap(), "{family}");
        }
        let with = xserv_request { prompt: hello.as_ptr(), ..base };
        let without = xserv_request { add_special_tokens: 0, ..with };
        assert_eq!(model.generate(&with).unwrap().num_prompt_tokens, plain.len());
        assert_eq!(model.generate(&without).unwrap().num_prompt_tokens, plain.len() - 1);
    }
}

/// A vocabulary with tokens for single bytes streams whole characters.
#[test]
fn byte_tokens_stream_whole_characters() {
    let (_folder, model) = model("mistral", "x");
    let ids = model.tokenize("hello \u{fffd}€ 中").unwrap();
    let chunks = model.stream_chunks(&ids, true).unwrap();
    assert_eq!(chunks.concat(), "hello \u{fffd}€ 中");
    assert_eq!(chunks.concat(), model.detokenize(&ids, true).unwrap());
    assert_eq!(chunks.iter().filter(|chunk| chunk.contains('€')).count(), 1, "{chunks:?}");
    assert!(chunks.iter().filter(|chunk| chunk.is_empty()).count() >= 6, "{chunks:?}");
}
