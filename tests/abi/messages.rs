//! Conversations that are built without writing JSON.

use std::ffi::{CStr, CString};
use std::ptr;

use serde_json::{json, Value};
use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;
use crate::files::Random;

struct Messages(*mut xserv_messages);

impl Messages {
    fn new() -> Messages {
        let mut messages = ptr::null_mut();
        check(unsafe { xserv_messages_new(&mut messages) }).unwrap();
        Messages(messages)
    }

    fn add(&self, role: &str, content: &str) -> Outcome<()> {
        let (role, content) = (c_string(role), c_string(content));
        check(unsafe { xserv_messages_add(self.0, role.as_ptr(), content.as_ptr()) })
    }

    fn add_json(&self, json: &str) -> Outcome<()> {
        let json = c_string(json);
        check(unsafe { xserv_messages_add_json(self.0, json.as_ptr()) })
    }

    fn remove(&self, index: usize) -> Outcome<()> {
        check(xserv_messages_remove(self.0, index))
    }

    /// Returns the messages as the library would read them, and checks their number.
    fn value(&self) -> Value {
        let json = xserv_messages_json(self.0);
        assert!(!json.is_null(), "{}", last_error());
        let value: Value =
            serde_json::from_slice(unsafe { CStr::from_ptr(json) }.to_bytes()).unwrap();
        assert_eq!(value.as_array().unwrap().len(), xserv_messages_count(self.0));
        value
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        xserv_messages_free(self.0);
    }
}

fn refused(outcome: Outcome<()>, words: &str) {
    let failure = outcome.expect_err(words);
    assert_eq!(failure.status, XSERV_STATUS_INVALID_ARGUMENT, "{failure:?}");
    assert!(failure.message.contains(words), "{failure:?}");
}

#[test]
fn any_text_is_a_message() {
    let messages = Messages::new();
    assert_eq!(messages.value(), json!([]));
    let texts = [
        "",
        "plain",
        "\"quoted\" \\ back\\\\slash",
        "tab\tline\nreturn\r bell\u{7} escape\u{1b}",
        "\u{2028}\u{2029} \u{feff} é 你好 🦊",
        "\"}], {\"role\": \"system",
        "\u{7f}\u{80}\u{10ffff}",
    ];
    for text in texts {
        messages.add("user", text).unwrap();
    }
    let expected: Vec<Value> =
        texts.iter().map(|text| json!({"role": "user", "content": text})).collect();
    assert_eq!(messages.value(), Value::Array(expected));
}

#[test]
fn tool_results_and_json() {
    let messages = Messages::new();
    let (id, name, content) = (c"call \"1\"", c"get_weather", c"{\"degrees\": 21}");
    unsafe {
        let none = ptr::null();
        let m = messages.0;
        check(xserv_messages_add_tool_result(m, id.as_ptr(), name.as_ptr(), content.as_ptr()))
            .unwrap();
        check(xserv_messages_add_tool_result(m, none, none, content.as_ptr())).unwrap();
    }
    messages.add_json(r#" {"role": "assistant", "content": null, "tool_calls": []}"#).unwrap();
    messages.add_json(r#"[{"role": "user", "content": "a"}, {"role": "b"}] "#).unwrap();
    messages.add_json("[]").unwrap();
    let expected = json!([
        {"role": "tool", "tool_call_id": "call \"1\"", "name": "get_weather", "content": "{\"degrees\": 21}"},
        {"role": "tool", "content": "{\"degrees\": 21}"},
        {"role": "assistant", "content": null, "tool_calls": []},
        {"role": "user", "content": "a"},
        {"role": "b"},
    ]);
    assert_eq!(messages.value(), expected);
    for (bad, words) in [
        ("", "messages JSON"),
        ("{", "messages JSON"),
        ("5", "messages[0] is a number"),
        (r#"{"content": "a"}"#, "has no \"role\""),
        (r#"{"role": "a"}, {"role": "b"}"#, "expected a message or an array"),
        (r#"[{"role": "a"}, 5]"#, "messages[1] is a number"),
    ] {
        refused(messages.add_json(bad), words);
        assert_eq!(messages.value(), expected, "something of {bad} was added");
    }
}

/// Random additions and removals, against a list.
#[test]
fn messages_are_removed() {
    let mut random = Random(3);
    let messages = Messages::new();
    let mut expected: Vec<Value> = Vec::new();
    for step in 0..400 {
        if random.below(5) < 3 {
            let text = "\"é".repeat(random.below(4)) + &step.to_string();
            messages.add("user", &text).unwrap();
            expected.push(json!({"role": "user", "content": text}));
        } else if expected.is_empty() {
            refused(messages.remove(0), "index is 0, but there are 0 messages");
        } else {
            let index = random.below(expected.len());
            messages.remove(index).unwrap();
            expected.remove(index);
        }
        assert_eq!(messages.value(), Value::Array(expected.clone()));
    }
    refused(messages.remove(usize::MAX), "but there are");
}

#[test]
fn size_and_encoding_are_checked() {
    let messages = Messages::new();
    let m = messages.0;
    let long = "x".repeat(9 << 20);
    messages.add("user", &long).unwrap();
    refused(messages.add("user", &long), "more than 16777216 bytes");
    // Short as text, long as JSON.
    refused(messages.add("user", &"\u{1}".repeat(2 << 20)), "more than 16777216 bytes");
    assert_eq!(xserv_messages_count(m), 1);
    unsafe {
        let wrong = CString::new(b"\xff".to_vec()).unwrap();
        refused(check(xserv_messages_add(m, c"user".as_ptr(), wrong.as_ptr())), "content");
        refused(check(xserv_messages_add(m, ptr::null(), c"a".as_ptr())), "role is NULL");
        refused(check(xserv_messages_add(m, c"a".as_ptr(), ptr::null())), "content is NULL");
        refused(check(xserv_messages_add_json(m, ptr::null())), "json is NULL");
        refused(check(xserv_messages_new(ptr::null_mut())), "messages is NULL");
    }
    xserv_messages_free(ptr::null_mut());
    let freed = Messages::new();
    xserv_messages_free(freed.0);
    assert!(xserv_messages_json(freed.0).is_null());
    assert_eq!(xserv_messages_count(freed.0), 0);
    assert_eq!(messages.remove(0).map(|()| messages.value()).unwrap(), json!([]));
    assert_eq!(freed.add("a", "b").unwrap_err().status, XSERV_STATUS_BAD_HANDLE);
}

#[test]
fn a_conversation_is_answered() {
    let model = Model::open(&tiny());
    let messages = Messages::new();
    messages.add("user", "My name is Mira.").unwrap();
    let answer = |messages: &Messages| {
        let json = xserv_messages_json(messages.0);
        let request =
            xserv_request { messages_json: json, temperature: 0.0, max_tokens: 40, ..request() };
        model.generate(&request).unwrap().text
    };
    let first = answer(&messages);
    messages.add("assistant", &first).unwrap();
    messages.add("user", "What is my name?").unwrap();
    let text = c_string(
        json!([
            {"role": "user", "content": "My name is Mira."},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "What is my name?"},
        ])
        .to_string(),
    );
    let by_hand = xserv_request {
        messages_json: text.as_ptr(),
        temperature: 0.0,
        max_tokens: 40,
        ..request()
    };
    assert_eq!(answer(&messages), model.generate(&by_hand).unwrap().text);
}
