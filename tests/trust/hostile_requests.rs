//! Prompts, sampling numbers, conversations and chat templates that mean harm.

use std::ffi::{c_char, CString};

use serde_json::json;
use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;
use crate::hostile_child::Expect::*;
use crate::hostile_child::*;

/// The groups of cases by name.
pub const GROUPS: &[Group] = &[
    ("prompts", prompts),
    ("sampling", sampling),
    ("conversations", conversations),
    ("templates", templates),
];

#[test]
fn prompts_are_checked() {
    run_group("prompts");
}

#[test]
fn sampling_numbers_are_checked() {
    run_group("sampling");
}

#[test]
fn conversations_are_checked() {
    run_group("conversations");
}

#[test]
fn templates_are_held() {
    run_group("templates");
}

const WRONG: xserv_status = XSERV_STATUS_INVALID_ARGUMENT;

/// Returns a request for bytes, which need not be text.
fn text_request(bytes: &[u8]) -> xserv_request {
    xserv_request {
        prompt: bytes.as_ptr() as *const c_char,
        prompt_len: bytes.len(),
        max_tokens: 2,
        temperature: 0.0,
        ..request()
    }
}

fn tokenize(model: &Model, bytes: &[u8]) -> Outcome<usize> {
    let mut tokens = std::ptr::null_mut();
    let data = bytes.as_ptr() as *const c_char;
    check(unsafe { xserv_tokenize(model.0, data, bytes.len(), std::ptr::null(), &mut tokens) })?;
    let mut count = 0;
    assert!(!unsafe { xserv_tokens_data(tokens, &mut count) }.is_null());
    xserv_tokens_free(tokens);
    Ok(count)
}

fn generate_ids(model: &Model, ids: &[u32]) -> Outcome<Output> {
    model.generate(&greedy(ids, 2))
}

fn prompts(bench: &mut Bench) {
    let model = &Model::open(&tiny());
    let full = XSERV_STATUS_CONTEXT_FULL;
    for bytes in [
        &b"\xff"[..],
        b"\x80",
        b"abc\xbf",
        b"\xc3",
        b"\xe6\x97",
        b"\xf0\x9f\x98",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\xf5\x80\x80\x80",
        b"\xf4\x90\x80\x80",
        b"ok\xfe\xff",
    ] {
        bench.case(format!("bytes that are no text: {bytes:?}"), move |_| {
            let offset =
                format!("offset {}", std::str::from_utf8(bytes).unwrap_err().valid_up_to());
            expect_failure(model.generate(&text_request(bytes)), WRONG, &offset)?;
            expect_failure(tokenize(model, bytes), WRONG, &offset)?;
            Ok(String::new())
        });
    }
    bench.case("a text of nothing", |_| {
        expect_failure(model.generate(&text_request(b"")), WRONG, "exactly one of")
            .or_else(|_| expect_failure(model.generate(&text_request(b"")), WRONG, "no tokens"))?;
        expect_answer(tokenize(model, b""))?;
        Ok(String::new())
    });
    bench.case("zeros inside", |_| {
        expect_answer(model.generate(&text_request(b"a\0b\0\0")))?;
        match tokenize(model, b"a\0b\0\0") {
            Ok(count) if count >= 5 => Ok(String::new()),
            other => Err(format!("{other:?}")),
        }
    });
    let megabyte = 1 << 20;
    let texts: Vec<(&str, String)> = vec![
        ("a megabyte of a", "a".repeat(megabyte)),
        ("a megabyte of blanks", " ".repeat(megabyte)),
        ("a megabyte of line ends", "\n".repeat(megabyte)),
        ("a megabyte of zeros", "\0".repeat(megabyte)),
        ("a megabyte of digits", "7".repeat(megabyte)),
        ("a megabyte of ideographs", "\u{65e5}".repeat(megabyte / 3)),
        ("a megabyte of accents", "\u{301}".repeat(megabyte / 2)),
        ("a megabyte of faces", "\u{1f600}\u{200d}".repeat(megabyte / 7)),
        ("a megabyte of end tokens", "<|im_end|>".repeat(megabyte / 10)),
        ("a megabyte of nearly end tokens", "<|im_end|".repeat(megabyte / 9)),
        ("a megabyte of marks", "<".repeat(megabyte)),
        ("a megabyte of replacement characters", "\u{fffd}".repeat(megabyte / 3)),
        ("ten megabytes of words", "the quick brown fox ".repeat(megabyte / 2)),
        ("ten megabytes of a", "a".repeat(10 * megabyte)),
        ("sixteen megabytes of tokens", "<|im_end|>".repeat(16 * megabyte / 10)),
        ("sixteen megabytes of line ends", "\n".repeat(16 * megabyte)),
    ];
    for (name, text) in &texts {
        bench.case(format!("{name} as a prompt"), |meter| {
            let outcome = meter.time("generate", || model.generate(&text_request(text.as_bytes())));
            expect_failure(outcome, full, "context")?;
            Ok(last_error())
        });
        // Half a second for a megabyte is what tokenizing is said to take; this build is slower than
        // the one that ships.
        let bar = 1.0 + 1.5 * text.len() as f64 / megabyte as f64;
        bench.case_with(format!("{name}, tokenized"), bar, |meter| {
            let count = meter.time("tokenize", || tokenize(model, text.as_bytes()));
            match count {
                Ok(count) => Ok(format!("{count} tokens")),
                Err(failure) => Err(failure.message),
            }
        });
    }
    let large = "a".repeat((16 << 20) + 1);
    bench.case("a text beyond the limit", |meter| {
        let limit = "16777216";
        let outcome = meter.time("generate", || model.generate(&text_request(large.as_bytes())));
        expect_failure(outcome, WRONG, limit)?;
        expect_failure(meter.time("tokenize", || tokenize(model, large.as_bytes())), WRONG, limit)?;
        Ok(String::new())
    });
    let context = model.info().max_context_tokens as usize;
    for (count, expect) in [(context + 1, Some("context")), (10_000_000, Some("context"))] {
        bench.case(format!("{count} ids"), move |meter| {
            let ids = vec![7; count];
            let outcome = meter.time("generate", || generate_ids(model, &ids));
            expect_failure(outcome, full, expect.unwrap())?;
            let logits = meter.time("logits", || model.logits(&ids, false));
            expect_failure(logits, full, "context")?;
            Ok(String::new())
        });
    }
    bench.case("a prompt that fills the context", move |meter| {
        let ids = vec![7; context];
        let output = meter.time("generate", || generate_ids(model, &ids));
        match output {
            Ok(output) if output.ids.len() == 1 => Ok(format!("{}", output.finish_reason)),
            other => Err(format!("{other:?}")),
        }
    });
    for id in [2048, 2049, 1 << 20, u32::MAX - 1, u32::MAX] {
        bench.case(format!("the id {id}"), move |_| {
            let words = format!("token id {id}");
            expect_failure(generate_ids(model, &[1, id]), WRONG, &words)?;
            expect_failure(model.logits(&[id], false), WRONG, &words)?;
            expect_failure(model.detokenize(&[1, id], false), WRONG, &words)?;
            expect_failure(model.stream_chunks(&[id], false), WRONG, &words)?;
            expect_answer(model.generate(&xserv_request {
                stop_token_ids: &id,
                num_stop_token_ids: 1,
                ..greedy(&PROMPT, 2)
            }))?;
            Ok(String::new())
        });
    }
    bench.case("a million stop tokens", |meter| {
        let stops: Vec<u32> = (0..1_000_000).map(|n| n + 3000).collect();
        let request = xserv_request {
            stop_token_ids: stops.as_ptr(),
            num_stop_token_ids: stops.len(),
            ..greedy(&PROMPT, 16)
        };
        expect_answer(meter.time("generate", || model.generate(&request)))?;
        Ok(String::new())
    });
    let long = CString::new("x".repeat(1025)).unwrap();
    let stops: [(&str, Vec<*const c_char>); 4] = [
        ("65 stop strings", vec![c"x".as_ptr(); 65]),
        ("a stop string too long", vec![long.as_ptr()]),
        ("a stop string that is no text", vec![c"\xff".as_ptr()]),
        ("an empty stop string", vec![c"a".as_ptr(), c"".as_ptr()]),
    ];
    for (name, pointers) in &stops {
        let count = pointers.len();
        let address = pointers.as_ptr() as usize;
        bench.case(*name, move |_| {
            let request = xserv_request {
                stop_strings: address as *const *const c_char,
                num_stop_strings: count,
                ..greedy(&PROMPT, 2)
            };
            expect_failure(model.generate(&request), WRONG, "stop")?;
            Ok(String::new())
        });
    }
}

fn sampling(bench: &mut Bench) {
    let model = &Model::open(&tiny());
    let values = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        -1.0,
        -0.0,
        0.0,
        1e-45,
        1e-20,
        1.000_001,
        1e20,
        3e38,
        f32::MAX,
        -3e38,
        -1e-45,
    ];
    type Field = fn(&mut xserv_request, f32);
    let fields: [(&str, Field, fn(f32) -> bool); 6] = [
        ("temperature", |r, v| r.temperature = v, |v| v >= 0.0),
        ("top_p", |r, v| r.top_p = v, |v| v > 0.0 && v <= 1.0),
        ("min_p", |r, v| r.min_p = v, |v| (0.0..=1.0).contains(&v)),
        ("repetition_penalty", |r, v| r.repetition_penalty = v, |v| (1e-3..=1e3).contains(&v)),
        ("presence_penalty", |r, v| r.presence_penalty = v, |v| v.abs() <= 1e4),
        ("frequency_penalty", |r, v| r.frequency_penalty = v, |v| v.abs() <= 1e4),
    ];
    for (name, set, valid) in fields {
        for value in values {
            // Greedy and drawn: both go through the penalties.
            for temperature in [0.0, 1.0] {
                bench.case(
                    format!("{name} = {value:e}, temperature {temperature}"),
                    move |meter| {
                        let mut request =
                            xserv_request { temperature, seed: 3, ..greedy(&PROMPT, 6) };
                        set(&mut request, value);
                        let outcome = meter.time("generate", || model.generate(&request));
                        if value.is_finite() && valid(value) {
                            let output = outcome.map_err(|f| f.message)?;
                            return Ok(format!("{:?}", output.ids));
                        }
                        expect_failure(outcome, WRONG, name)?;
                        Ok(last_error())
                    },
                );
            }
        }
    }
    for top_k in [0, 1, 2047, 2048, 2049, 1 << 31, u32::MAX - 1] {
        bench.case(format!("top_k = {top_k}"), move |_| {
            let request = xserv_request { top_k, temperature: 1.0, seed: 3, ..greedy(&PROMPT, 3) };
            model.generate(&request).map(|o| format!("{:?}", o.ids)).map_err(|f| f.message)
        });
    }
    for max_tokens in [0, u32::MAX - 1] {
        bench.case(format!("max_tokens = {max_tokens}"), move |_| {
            let ids = vec![5; 2040];
            let request = xserv_request { max_tokens, ..greedy(&ids, 0) };
            model.generate(&request).map(|o| o.ids.len().to_string()).map_err(|f| f.message)
        });
    }
    for value in values {
        for token_id in [0, 2047] {
            bench.case(format!("a bias of {value:e} for {token_id}"), move |_| {
                let biases = [xserv_logit_bias { token_id, bias: value }];
                let request = xserv_request {
                    logit_bias: biases.as_ptr(),
                    num_logit_bias: 1,
                    num_log_probs: 2,
                    processed_log_probs: 1,
                    ..greedy(&PROMPT, 3)
                };
                let outcome = model.generate(&request);
                if value.abs() <= 1e4 || value == f32::NEG_INFINITY {
                    return outcome.map(|o| format!("{:?}", o.ids)).map_err(|f| f.message);
                }
                expect_failure(outcome, WRONG, "logit_bias[0].bias")?;
                Ok(last_error())
            });
        }
    }
    for token_id in [2048, 1 << 31, u32::MAX] {
        bench.case(format!("a bias for the token {token_id}"), move |_| {
            let biases = [xserv_logit_bias { token_id, bias: 1.0 }];
            let request = xserv_request {
                logit_bias: biases.as_ptr(),
                num_logit_bias: 1,
                ..greedy(&PROMPT, 2)
            };
            expect_failure(model.generate(&request), WRONG, "logit_bias[0].token_id")?;
            Ok(last_error())
        });
    }
    bench.case("a token that has two biases", |_| {
        let biases = [xserv_logit_bias { token_id: 5, bias: 1.0 }; 2];
        let request =
            xserv_request { logit_bias: biases.as_ptr(), num_logit_bias: 2, ..greedy(&PROMPT, 2) };
        expect_failure(model.generate(&request), WRONG, "logit_bias[1].token_id")?;
        Ok(last_error())
    });
    for (what, count, words) in [
        ("a million biases", 1_000_000, "num_logit_bias"),
        ("every token banned", 2048, "every token"),
    ] {
        bench.case(what, move |meter| {
            let ban = |token_id| xserv_logit_bias { token_id, bias: f32::NEG_INFINITY };
            let biases: Vec<_> = (0..count).map(ban).collect();
            let request = xserv_request {
                logit_bias: biases.as_ptr(),
                num_logit_bias: biases.len(),
                ..greedy(&PROMPT, 2)
            };
            let outcome = meter.time("generate", || model.generate(&request));
            expect_failure(outcome, WRONG, words)?;
            Ok(last_error())
        });
    }
    for count in [usize::MAX, usize::MAX / 8, 1 << 60] {
        bench.case(format!("{count} biases"), move |_| {
            let biases = [xserv_logit_bias { token_id: 5, bias: 1.0 }];
            let request = xserv_request {
                logit_bias: biases.as_ptr(),
                num_logit_bias: count,
                ..greedy(&PROMPT, 2)
            };
            expect_failure(model.generate(&request), WRONG, "logit_bias")?;
            Ok(last_error())
        });
    }
    for min_tokens in [3, 1 << 31, u32::MAX] {
        bench.case(format!("min_tokens = {min_tokens}"), move |_| {
            let request = xserv_request { min_tokens, ..greedy(&PROMPT, 2) };
            expect_failure(model.generate(&request), WRONG, "min_tokens")?;
            Ok(last_error())
        });
    }
    for num_log_probs in [21, 2048, 1 << 31, u32::MAX - 1] {
        bench.case(format!("num_log_probs = {num_log_probs}"), move |_| {
            let request = xserv_request { num_log_probs, ..greedy(&PROMPT, 2) };
            expect_failure(model.generate(&request), WRONG, "num_log_probs")?;
            Ok(last_error())
        });
    }
    type Flag = fn(&mut xserv_request);
    let flags: [(&str, Flag); 9] = [
        ("logit_bias", |r| r.num_logit_bias = 1),
        ("logit_bias", |r| {
            r.logit_bias = std::ptr::without_provenance(PROMPT.as_ptr().addr() + 1);
            r.num_logit_bias = 1
        }),
        ("processed_log_probs", |r| (r.num_log_probs, r.processed_log_probs) = (1, 2)),
        ("processed_log_probs", |r| r.processed_log_probs = 1),
        ("ignore_eos", |r| r.ignore_eos = 2),
        ("skip_special_tokens", |r| r.skip_special_tokens = 255),
        ("struct_size", |r| r.struct_size = 0),
        ("struct_size", |r| r.struct_size = usize::MAX),
        ("cancel", |r| r.cancel = forged()),
    ];
    for (index, (name, set)) in flags.into_iter().enumerate() {
        bench.case(format!("{name}, {index}"), move |_| {
            let mut request = greedy(&PROMPT, 2);
            set(&mut request);
            let status = if name == "cancel" { XSERV_STATUS_BAD_HANDLE } else { WRONG };
            expect_failure(model.generate(&request), status, name)?;
            Ok(last_error())
        });
    }
}

fn conversations(bench: &mut Bench) {
    let model = &Model::open(&tiny());
    let long = json!([{"role": "user", "content": "a ".repeat(5 << 20)}]).to_string();
    let many = json!(vec![json!({"role": "user", "content": "a"}); 60_000]).to_string();
    let deep =
        format!("[{{\"role\":\"user\",\"content\":{}{}}}]", "[".repeat(120), "]".repeat(120));
    let deeper = format!("{}{}", "[".repeat(1_000_000), "]".repeat(1_000_000));
    let zeros = format!("[{}0]", "0,".repeat(1_000_000));
    let large = format!("[{}]", " ".repeat(17 << 20));
    let cases: Vec<(&str, String, Option<(xserv_status, &str)>)> = vec![
        ("nothing", "".into(), Some((WRONG, "messages"))),
        ("an object", "{}".into(), Some((WRONG, "messages"))),
        ("a number in the list", "[1]".into(), Some((WRONG, "messages[0]"))),
        ("no role", "[{\"content\": \"a\"}]".into(), Some((WRONG, "role"))),
        ("a role of null", "[{\"role\": null}]".into(), Some((WRONG, "role"))),
        ("no end", "[{\"role\": \"user\"".into(), Some((WRONG, "messages"))),
        ("a nest without end", deeper, Some((WRONG, "messages"))),
        ("a million numbers", zeros, Some((WRONG, "messages"))),
        ("too many bytes", large, Some((WRONG, "messages"))),
        ("a lone surrogate", "[{\"role\": \"\\ud800\"}]".into(), Some((WRONG, "messages"))),
        ("1e999", "[{\"role\": \"user\", \"content\": 1e999}]".into(), Some((WRONG, "messages"))),
        ("ten megabytes", long, Some((XSERV_STATUS_CONTEXT_FULL, "context"))),
        ("sixty thousand messages", many, None),
        ("a deep content", deep, None),
        ("no message", "[]".into(), None),
        ("content that is a number", "[{\"role\": \"user\", \"content\": 1}]".into(), None),
        ("no content", "[{\"role\": \"user\"}]".into(), None),
        ("an unknown role", "[{\"role\": \"\u{1f600}\", \"content\": \"a\"}]".into(), None),
    ];
    for (name, messages, expect) in &cases {
        bench.case(format!("messages: {name}"), |meter| {
            let text = c_string(messages);
            let request = xserv_request {
                messages_json: text.as_ptr(),
                max_tokens: 2,
                temperature: 0.0,
                ..request()
            };
            let generated = meter.time("generate", || model.generate(&request));
            let rendered =
                meter.time("chat", || model.apply_chat_template(messages, None, None, true));
            match expect {
                Some((status, words)) => expect_failure(generated, *status, words)?,
                None => expect_answer(generated)?,
            }
            match rendered {
                Ok(text) => Ok(format!("{} bytes", text.len())),
                Err(failure) => check_failure(&failure).map(|()| failure.message),
            }
        });
    }
    for (name, tools, variables, words) in [
        ("tools that are no list", Some("{}"), None, "tools"),
        ("tools that are no JSON", Some("["), None, "tools"),
        ("variables that are a list", None, Some("[]"), "variables"),
        ("a variable that is no name", None, Some("{\"a b\": 1}"), "a b"),
        ("a variable that is an expression", None, Some("{\"x}}{{y\": 1}"), "x}}{{y"),
    ] {
        bench.case(name, move |_| {
            let outcome = model.apply_chat_template(MESSAGES, tools, variables, true);
            expect_failure(outcome, WRONG, words)?;
            Ok(last_error())
        });
    }
    bench.case("variables that replace the messages", |meter| {
        let variables = r#"{"messages": 7, "loop": 1, "tools": "x", "raise_exception": 3}"#;
        expect_answer(
            meter.time("chat", || model.apply_chat_template(MESSAGES, None, Some(variables), true)),
        )?;
        Ok(String::new())
    });
    for (name, bytes) in [("messages", c"[{\"role\": \"\xff\"}]"), ("messages", c"\x80")] {
        bench.case(format!("{name} that are no text: {bytes:?}"), move |_| {
            let request = xserv_request { messages_json: bytes.as_ptr(), ..request() };
            expect_failure(model.generate(&request), WRONG, name)?;
            Ok(last_error())
        });
    }
}

fn templates(bench: &mut Bench) {
    const FILE: &str = "chat_template.jinja";
    let failed = XSERV_STATUS_TEMPLATE;
    let doubling = "{% set ns = namespace(s='ab') %}{% for i in range(60) %}";
    let run: Vec<(&str, String, &str)> = vec![
        (
            "loops without end",
            "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}x\
             {% endfor %}{% endfor %}{% endfor %}"
                .into(),
            "",
        ),
        ("a macro that calls itself", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into(), ""),
        ("doubling", format!("{doubling}{{% set ns.s = ns.s + ns.s %}}{{% endfor %}}{{{{ ns.s }}}}"), ""),
        ("doubling by replace", format!("{doubling}{{% set ns.s = ns.s | replace('a', 'aa') %}}{{% endfor %}}{{{{ ns.s }}}}"), ""),
        ("a huge indent", "{{ [[1], 2] | tojson(indent=2000000000) }}".into(), ""),
        ("a huge width", "{{ '%2000000000d' | format(1) }}".into(), ""),
        ("a huge repetition", "{{ 'ab' * 2000000000 }}".into(), ""),
        ("a huge range", "{{ range(2000000000) | list | length }}".into(), ""),
        ("a huge batch", "{{ [1] | batch(2000000000, 0) | list }}".into(), ""),
        ("a raised exception", "{{ raise_exception('roles must alternate') }}".into(), "roles must alternate"),
        ("a long exception", "{{ raise_exception('x' * 1000000) }}".into(), "xxx"),
        ("an exception of colours", "{{ raise_exception('\u{1b}[2J\n\u{7}') }}".into(), ""),
        ("a function of no name", "{{ open('/etc/passwd') }}".into(), "open"),
        ("an undefined attribute", "{{ nothing.of.the.kind }}".into(), "undefined"),
        ("a filter of no name", "{{ 1 | nope }}".into(), "nope"),
        ("a file", "{% include '/etc/passwd' %}".into(), ""),
        ("the template itself", "{% include 'chat_template' %}".into(), ""),
        ("a division by zero", "{{ 1 / 0 }}{{ 1 % 0 }}{{ 1 // 0 }}".into(), ""),
        ("numbers out of range", "{{ 9223372036854775807 + 9223372036854775807 * 2 ** 99 }}".into(), ""),
    ];
    for (name, source, words) in run {
        // A filter that is not known is found when the template is compiled.
        bench.case(name, move |meter| {
            let copy = Copy::new();
            copy.write(FILE, source);
            let model = meter.time("load", || Model::load(copy.path(), &load_options()));
            let model = model.map_err(|f| f.message)?;
            let chat = meter.time("chat", || model.apply_chat_template(MESSAGES, None, None, true));
            let messages = c_string(MESSAGES);
            let request =
                xserv_request { messages_json: messages.as_ptr(), max_tokens: 1, ..request() };
            let generated = meter.time("generate", || model.generate(&request));
            match chat {
                Ok(text) if words.is_empty() => {
                    expect_answer(generated)?;
                    return Ok(format!("{} bytes", text.len()));
                }
                Err(Failure { status: XSERV_STATUS_UNSUPPORTED, message }) => return Ok(message),
                other => expect_failure(other, failed, words)?,
            }
            expect_failure(generated, failed, words)?;
            Ok(last_error())
        });
    }
    for depth in [1000, 10_000] {
        let chains: [(&str, &str, &str, &str); 8] = [
            ("not", "{{ ", "not ", "x }}"),
            ("minus", "{{ ", "-", "1 }}"),
            ("plus", "{{ x", "+1", " }}"),
            ("attributes", "{{ messages", ".a", " }}"),
            ("filters", "{{ 'a'", "|trim", " }}"),
            ("elif", "{% if x %}a", "{% elif x %}b", "{% endif %}"),
            ("calls", "{{ range", "(1)", " }}"),
            ("tests", "{{ 1", " is defined", " }}"),
        ];
        for (name, before, unit, after) in chains {
            let source = format!("{before}{}{after}", unit.repeat(depth));
            bench.folder(format!("{depth} of {name}"), Answers, |copy| copy.write(FILE, source));
        }
        for (open, close) in
            [("(", ")"), ("[", "]"), ("{% if 1 %}", "{% endif %}"), ("{% with %}", "{% endwith %}")]
        {
            let (before, after) = if open.len() == 1 { ("{{ ", " }}") } else { ("", "") };
            let source = format!("{before}{}{}{after}", open.repeat(depth), close.repeat(depth));
            bench.folder(format!("{depth} of {open}"), Answers, |copy| copy.write(FILE, source));
        }
    }
    let no_chat = |words| NoChat(XSERV_STATUS_UNSUPPORTED, words);
    for (name, source, words) in [
        ("no text", vec![0xff; 100], "UTF-8"),
        ("no end", b"{% for m in messages %}".to_vec(), FILE),
        ("an unknown tag", b"{% nonsense %}".to_vec(), FILE),
        ("too many bytes", vec![b'x'; (64 << 10) + 1], FILE),
        ("a megabyte", vec![b'{'; 1 << 20], FILE),
        ("an endless opening", b"{{".repeat(30_000), FILE),
    ] {
        bench.folder(format!("the template is {name}"), no_chat(words), |copy| {
            copy.write(FILE, source)
        });
    }
    bench.folder("the template is empty", Works, |copy| copy.write(FILE, ""));
    bench.folder("the template is zeros", Works, |copy| copy.write(FILE, [0; 1000]));
    bench.folder("the template is full of text", Works, |copy| copy.write(FILE, [b'x'; 64 << 10]));
}
