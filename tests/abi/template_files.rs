//! The files of a folder that say what a conversation looks like, and which of them counts.

use serde_json::json;

use crate::client::*;
use crate::files::TempDir;

const MESSAGES: &str = r#"[{"role": "user", "content": "Hi"}]"#;
const TOOLS: &str = r#"[{"type": "function", "function": {"name": "f", "parameters": {}}}]"#;

/// Returns the tiny model's folder with these other files.
fn folder(files: &[(&str, &str)]) -> TempDir {
    let folder = TempDir::new();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        folder.write(name, std::fs::read(tiny().join(name)).unwrap());
    }
    files.iter().for_each(|(name, text)| folder.write(name, text));
    folder
}

fn rendered(files: &[(&str, &str)], tools: Option<&str>) -> String {
    let folder = folder(files);
    Model::open(folder.path()).apply_chat_template(MESSAGES, tools, None, false).unwrap()
}

#[test]
fn a_template_for_tools_in_a_file_of_its_own() {
    let files = [
        ("chat_template.jinja", "plain"),
        ("additional_chat_templates/tool_use.jinja", "with {{ tools | length }}"),
        ("additional_chat_templates/rag.jinja", "{% not read"),
    ];
    assert_eq!(rendered(&files, None), "plain");
    assert_eq!(rendered(&files, Some(TOOLS)), "with 1");
    assert_eq!(rendered(&files[1..], Some(TOOLS)), "with 1");

    let files =
        [("chat_template.jinja", "plain"), ("additional_chat_templates/tool_use.jinja", "{%")];
    let failure = Model::open(folder(&files).path())
        .apply_chat_template(MESSAGES, None, None, false)
        .unwrap_err();
    let begin = "additional_chat_templates/tool_use.jinja: chat template, line 1";
    assert!(failure.message.starts_with(begin), "{}", failure.message);
}

#[test]
fn special_tokens_from_either_file() {
    let template = ("chat_template.jinja", "{{ bos_token }}{{ eos_token }}{{ sep_token }}");
    let map =
        json!({"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}}).to_string();
    let map = ("special_tokens_map.json", map.as_str());
    let config = ("tokenizer_config.json", r#"{"eos_token": null, "sep_token": "|"}"#);
    assert_eq!(rendered(&[template, config, map], None), "<s></s>|");
    assert_eq!(rendered(&[template, map], None), "<s></s>");
    // A newer tokenizer_config.json has all of them.
    let newer = r#"{"eos_token": "<end>", "added_tokens_decoder": {}}"#;
    assert_eq!(rendered(&[template, ("tokenizer_config.json", newer), map], None), "<end>");
}
