//! Conversations rendered exactly as Transformers renders them.

use super::support::{golden, ids, json, own, real_tokenizers, special_tokens, tokenizer};
use serde_json::{json, Map, Value};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};
use xserv::text::{ChatInput, ChatTemplate, SpecialTokens};

fn template(folder: &Path) -> ChatTemplate {
    let config = std::fs::read(folder.join("tokenizer_config.json")).unwrap();
    ChatTemplate::from_files(Some(&config), None, None).unwrap().unwrap()
}

#[test]
fn qwen_vectors() {
    let Some(golden) = golden() else { return };
    let folder = golden.join("models/qwen3-tiny-tied");
    let (tokenizer, template) = (tokenizer(&folder), template(&folder));
    let special_tokens = special_tokens(&folder);
    let cases = json(&golden.join("tokenizer/qwen/chat.json"));
    for case in cases.as_array().unwrap() {
        let mut variables = Map::new();
        if !case["enable_thinking"].is_null() {
            variables.insert("enable_thinking".to_owned(), case["enable_thinking"].clone());
        }
        let rendered = template
            .render(&ChatInput {
                messages: &case["messages"],
                tools: case.get("tools").filter(|tools| !tools.is_null()),
                variables: Some(&variables),
                add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
                special_tokens: &special_tokens,
            })
            .unwrap();
        assert_eq!(rendered, case["rendered"].as_str().unwrap(), "{}", case["name"]);
        assert_eq!(tokenizer.encode(&rendered, false, true).unwrap(), ids(&case["ids"]));
    }
    assert!(cases.as_array().unwrap().len() > 50);
}

/// Small templates and what Transformers makes of them; `make.py` beside the data wrote it.
#[test]
fn own_vectors() {
    let cases = json(&own("chat_template/cases.json"));
    let mut failures = Vec::new();
    for case in cases.as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let template = match ChatTemplate::compile(case["template"].as_str().unwrap()) {
            Ok(template) => template,
            Err(_) if case["rendered"].is_null() => continue,
            Err(e) => {
                failures.push(format!("{name}: {e}"));
                continue;
            }
        };
        let special_tokens = SpecialTokens {
            bos: Some("<s>".to_owned()),
            eos: Some("</s>".to_owned()),
            ..SpecialTokens::default()
        };
        let got = template.render(&ChatInput {
            messages: &case["messages"],
            tools: case.get("tools").filter(|tools| !tools.is_null()),
            variables: case["variables"].as_object(),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            special_tokens: &special_tokens,
        });
        match (&case["rendered"], got) {
            (Value::String(expected), Ok(got)) if *expected == got => {}
            (Value::Null, Err(_)) => {}
            (expected, got) => failures.push(format!("{name}: expected {expected}, got {got:?}")),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Templates as Llama, Mistral and Qwen2.5 have them, at a fixed time; `make_families.py` beside the
/// data wrote them. `XSERV_CHAT_CASES` names another file of this form.
#[test]
fn templates_of_families() {
    let file = match std::env::var_os("XSERV_CHAT_CASES") {
        Some(file) => json(Path::new(&file)),
        None => json(&own("chat_template/families.json")),
    };
    let now = UNIX_EPOCH + Duration::from_secs(file["now"].as_u64().unwrap());
    let mut failures = Vec::new();
    let mut num_rendered = 0;
    for (name, entry) in file["templates"].as_object().unwrap() {
        let special_tokens = SpecialTokens {
            bos: entry["bos"].as_str().map(str::to_owned),
            eos: entry["eos"].as_str().map(str::to_owned),
            ..SpecialTokens::default()
        };
        let template = match ChatTemplate::compile(entry["source"].as_str().unwrap()) {
            Ok(template) => template,
            Err(error) => {
                failures.push(format!("{name}: {error}"));
                continue;
            }
        };
        for (number, case) in file["cases"].as_array().unwrap().iter().enumerate() {
            if case["template"] != **name {
                continue;
            }
            let got = template.render_at(
                &ChatInput {
                    messages: &file["conversations"]
                        [case["conversation"].as_u64().unwrap() as usize],
                    tools: case["has_tools"].as_bool().unwrap().then_some(&file["tools"]),
                    variables: case["variables"].as_object(),
                    add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
                    special_tokens: &special_tokens,
                },
                now,
            );
            match (&case["rendered"], &case["error"], got) {
                (Value::String(expected), _, Ok(got)) if *expected == got => num_rendered += 1,
                // An exception that the template raises is reported; other errors have words of
                // their own.
                (Value::Null, Value::String(raised), Err(error))
                    if error.message().contains(&format!("raise_exception: {raised}")) => {}
                (Value::Null, Value::Null, Err(_)) => {}
                (expected, error, got) => failures.push(format!(
                    "{name}, case {number}: expected {expected} or error {error}, got {got:?}"
                )),
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    println!("{num_rendered} renderings");
    assert!(num_rendered > 50);
}

/// The published template of Qwen3, against a rendering by Transformers.
#[test]
fn published_qwen3_template() {
    let Some(folder) = real_tokenizers() else { return };
    let template = template(&folder.join("qwen3"));
    let special_tokens = special_tokens(&folder.join("qwen3"));
    for case in json(&own("chat_template/qwen3.json")).as_array().unwrap() {
        let rendered = template
            .render(&ChatInput {
                messages: &case["messages"],
                tools: case.get("tools").filter(|tools| !tools.is_null()),
                variables: case["variables"].as_object(),
                add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
                special_tokens: &special_tokens,
            })
            .unwrap();
        assert_eq!(rendered, case["rendered"].as_str().unwrap());
    }
    // By hand, so that something holds without the file.
    let rendered = template
        .render(&ChatInput {
            messages: &json!([{"role": "user", "content": "Hi"}]),
            tools: None,
            variables: json!({"enable_thinking": false}).as_object(),
            add_generation_prompt: true,
            special_tokens: &special_tokens,
        })
        .unwrap();
    assert_eq!(
        rendered,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    );
}
