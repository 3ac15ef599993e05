//! The messages, tools and variables that callers pass.

use super::support::Watch;
use serde_json::json;
use std::time::Duration;
use xserv::text::{
    parse_messages, parse_tools, parse_variables, ChatInput, ChatTemplate, SpecialTokens,
};

fn message_of(json: &[u8]) -> String {
    parse_messages(json).unwrap_err().message().to_owned()
}

#[test]
fn errors_name_the_message() {
    assert!(parse_messages(b"[]").is_ok());
    assert!(parse_messages(br#"[{"role": "user", "content": "a"}]"#).is_ok());
    assert_eq!(message_of(b"{}"), "messages is an object, expected a JSON array of objects");
    assert_eq!(message_of(b"null"), "messages is null, expected a JSON array of objects");
    assert_eq!(
        message_of(br#"[{"role": "user"}, 5]"#),
        "messages[1] is a number, expected an object"
    );
    assert_eq!(message_of(br#"[{"content": "a"}]"#), "messages[0] has no \"role\"");
    assert_eq!(message_of(br#"[{"role": null}]"#), "messages[0].role is null, expected a string");
    assert!(message_of(b"[").starts_with("messages JSON: "));
    assert!(message_of(b"[{\"role\": \"\xff\"}]").starts_with("messages JSON: "));
    assert!(parse_tools(b"{}").unwrap_err().message().starts_with("tools is an object"));
    assert!(parse_variables(b"[]").unwrap_err().message().starts_with("template variables are"));
    assert_eq!(parse_variables(br#"{"enable_thinking": false}"#).unwrap().len(), 1);
}

#[test]
fn size_and_depth_are_bounded() {
    let begin = Watch::start();
    let deep =
        format!("[{{\"role\": \"u\", \"x\": {}{}}}]", "[".repeat(100_000), "]".repeat(100_000));
    assert!(message_of(deep.as_bytes()).contains("recursion limit"));
    let many = format!("[{}{{\"role\": \"u\"}}]", "[],".repeat(5_000_000));
    assert!(message_of(many.as_bytes()).contains("more than 250000 values"));
    let long = format!("[{{\"role\": \"{}\"}}]", "x".repeat(17 << 20));
    assert!(message_of(long.as_bytes()).contains("at most 16777216 are allowed"));
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
}

/// Trees that did not come through the parser are checked as well.
#[test]
fn rendering_checks_its_input() {
    let template = ChatTemplate::compile("{{ messages }}").unwrap();
    let render = |messages: &serde_json::Value, variables: serde_json::Value| {
        template.render(&ChatInput {
            messages,
            tools: None,
            variables: variables.as_object(),
            add_generation_prompt: true,
            special_tokens: &SpecialTokens::default(),
        })
    };
    assert!(render(&json!("x"), json!({})).is_err());
    assert!(render(&json!([1]), json!({})).unwrap_err().message().contains("messages[0]"));
    let mut deep = json!(1);
    for _ in 0..500 {
        deep = json!([deep]);
    }
    let error = render(&json!([{"role": "user", "content": deep}]), json!({})).unwrap_err();
    assert!(error.message().contains("nested more than 128 deep"), "{error}");
    let error = render(&json!([]), json!({"§tick": 1})).unwrap_err();
    assert!(error.message().contains("is not a name"), "{error}");
    let wide = json!(vec![0; 300_000]);
    assert!(render(&json!([]), json!({"x": wide})).is_err());
}
