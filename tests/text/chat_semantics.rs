//! The sources of templates, what they see, and what their errors say.

use serde_json::json;
use std::time::{Duration, UNIX_EPOCH};
use xserv::error::ErrorKind;
use xserv::text::{what_was_left_out, ChatInput, ChatTemplate, SpecialTokens};

fn render_with(template: &ChatTemplate, tools: Option<&serde_json::Value>) -> String {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let special_tokens =
        SpecialTokens { eos: Some("<|end|>".to_owned()), ..SpecialTokens::default() };
    template
        .render(&ChatInput {
            messages: &messages,
            tools,
            variables: None,
            add_generation_prompt: false,
            special_tokens: &special_tokens,
        })
        .unwrap_or_else(|error| format!("{:?}: {error}", error.kind()))
}

fn render(source: &str) -> String {
    match ChatTemplate::compile(source) {
        Ok(template) => render_with(&template, None),
        Err(error) => format!("{:?}: {error}", error.kind()),
    }
}

#[test]
fn the_jinja_file_wins() {
    let config = br#"{"chat_template": "config"}"#;
    let of = |config: Option<&[u8]>, file: Option<&[u8]>| {
        ChatTemplate::from_files(config, file, None).map(|t| t.map(|t| render_with(&t, None)))
    };
    assert_eq!(of(Some(config), Some(b"file")).unwrap().as_deref(), Some("file"));
    assert_eq!(of(Some(config), None).unwrap().as_deref(), Some("config"));
    assert_eq!(of(Some(b"{}"), None).unwrap(), None);
    assert_eq!(of(Some(br#"{"chat_template": null}"#), None).unwrap(), None);
    assert_eq!(of(None, None).unwrap(), None);
    let error = of(None, Some(b"\xff{{ x }}")).unwrap_err();
    assert_eq!(error.message(), "chat_template.jinja is not valid UTF-8");
    let error = of(None, Some(b"{% if %}")).unwrap_err();
    assert!(error.message().starts_with("chat_template.jinja: chat template, line 1"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Template);
    assert!(of(Some(br#"{"chat_template": 5}"#), None).is_err());
}

/// Jinja has `\n` for every line break of a source, and takes the first after a tag away.
#[test]
fn line_breaks_of_other_systems() {
    let source = "a\r\n{% if true %}\r\n  b\r{% endif %}\rc{{ 'd\r\ne' }}\r\n";
    assert_eq!(render(source), "a\n  b\ncd\ne");
    assert_eq!(render("{{ 'a\\r\\nb' }}"), "a\r\nb");
}

#[test]
fn a_file_for_tools() {
    let of = |config: Option<&[u8]>, file: Option<&[u8]>| {
        let template =
            ChatTemplate::from_files(config, file, Some(b"with tools")).unwrap().unwrap();
        [None, Some(&json!([{}]))].map(|tools| render_with(&template, tools))
    };
    let config = br#"{"chat_template": [{"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "another"}]}"#;
    assert_eq!(of(None, Some(b"plain")), ["plain", "with tools"]);
    assert_eq!(of(Some(config), None), ["plain", "with tools"]);
    assert_eq!(of(None, None), ["with tools", "with tools"]);
}

#[test]
fn named_templates() {
    let config = br#"{"chat_template": [{"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools | length }}"}, {"name": "rag"}]}"#;
    let template = ChatTemplate::from_files(Some(config), None, None).unwrap().unwrap();
    assert_eq!(render_with(&template, None), "plain");
    assert_eq!(render_with(&template, Some(&json!([]))), "plain");
    assert_eq!(render_with(&template, Some(&json!([{"a": 1}, {}]))), "with 2");
    let none = br#"{"chat_template": [{"name": "rag", "template": "x"}]}"#;
    let error = ChatTemplate::from_files(Some(none), None, None).unwrap_err();
    assert!(error.message().contains("without a template named \"default\""), "{error}");
    let broken = br#"{"chat_template": [{"name": "default", "template": "x"},
        {"name": "tool_use", "template": "{% for %}"}]}"#;
    assert!(ChatTemplate::from_files(Some(broken), None, None).is_err());
}

#[test]
fn errors_say_where_and_what() {
    assert_eq!(
        render("a\n{{ raise_exception('only ' ~ 'users') }}"),
        "Template: chat template, line 2: raise_exception: only users"
    );
    assert!(
        render("{{ nothing.at.all }}").contains("line 1: "),
        "{}",
        render("{{ nothing.at.all }}")
    );
    assert!(render("{{ 1 | nosuch }}").contains("filter nosuch is unknown"));
    assert!(render("{% include 'x' %}").contains("refers to another template"));
    assert!(render("{% autoescape true %}{% endautoescape %}").contains("autoescape"));
    assert!(render(&"x".repeat(65_537)).contains("65537 bytes, at most 65536"));
    assert_eq!(render(&"x".repeat(65_536)).len(), 65_536);
}

#[test]
fn output_is_bounded_at_the_limit() {
    let at_limit = "{{ 'a' * 16777216 }}";
    assert_eq!(render(at_limit).len(), 16 << 20);
    assert!(render("{{ 'a' * 16777217 }}").contains("more than 16777216 bytes"));
    assert!(render("{{ 'a' * 16777216 }}b").contains("longer than 16777216 bytes"));
}

#[test]
fn special_tokens_are_variables() {
    assert_eq!(
        render("{{ eos_token }}{{ bos_token }}|{{ bos_token is defined }}"),
        "<|end|>|False"
    );
    let tokens = SpecialTokens::from_config(
        br#"{"bos_token": {"content": "<s>", "special": true}, "eos_token": "</s>", "unk_token": null}"#,
    )
    .unwrap();
    assert_eq!(tokens.bos.as_deref(), Some("<s>"));
    assert_eq!(tokens.eos.as_deref(), Some("</s>"));
    assert_eq!((tokens.pad, tokens.unk), (None, None));
}

/// All special tokens that have a name, which a model may make up.
#[test]
fn named_special_tokens_are_variables() {
    let config = br#"{"sep_token": "[SEP]", "cls_token": {"content": "[CLS]"}, "mask_token": null, "a_token": "[A]",
        "split_token": true, "extra_special_tokens": {"image_token": "[IMG]", "messages": "[M]", "wrong": 5}}"#;
    let special_tokens = SpecialTokens::from_config(config).unwrap();
    let source = "{{ sep_token }}{{ cls_token }}{{ mask_token }}{{ a_token }}{{ split_token }}\
        {{ image_token }}{{ wrong }}{{ messages | length }}";
    let text = ChatTemplate::compile(source).unwrap().render(&ChatInput {
        messages: &json!([{"role": "user", "content": "Hi"}]),
        tools: None,
        variables: None,
        add_generation_prompt: false,
        special_tokens: &special_tokens,
    });
    assert_eq!(text.unwrap(), "[SEP][CLS][A][IMG]1");
    assert!(SpecialTokens::from_config(br#"{"sep_token": 5}"#).is_err());
}

/// What Jinja gives for methods, operators and literals, on texts that are not plain.
#[test]
fn python_has_its_own_ways() {
    for (source, wanted) in [
        (r"{{ '\U0001f600\a\v\0'|tojson }}", "\"😀\\u0007\\u000b\\u0000\""),
        (r"{{ 'a\/b\U00000027' }}", r"a\/b'"),
        (r"{{ {'a': {'b': '\U0001f600'}}.a.b }}", "😀"),
        (r"{% raw %}{{ '\a' }}{% endraw %}{# '\N #}", r"{{ '\a' }}"),
        (r"{{ 'a\rb\x0bc\x1cd\x85e\u2028f\r\ng\n'.splitlines()|join('|') }}", "a|b|c|d|e|f|g"),
        (r"{{ 'a\r\nb'.splitlines(true)|tojson }}", r#"["a\r\n", "b"]"#),
        (r"[{{ '\x1c a\x1f\x1d'.strip() }}{{ '\x1ea'|trim }}]{{ 'a\x1cb'.split()|length }}", "[aa]2"),
        (r#"{{ "it's a dog's".title() }}"#, "It'S A Dog'S"),
        (r"{{ 'abcab'.find('b', 2) }}{{ 'äb'.find('b') }}{{ 'ab'.find('c') }}{{ 'ab'.rindex('b') }}", "41-11"),
        ("{{ '%s-%5.2f|%-4d|%03d%%' % ('a', 2.5, 7, -5) }}", "a- 2.50|7   |-05%"),
        ("{{ '%(a)s %(b)r' % {'a': 1, 'b': 'x'} }}{{ '%s' % none }}{{ '%x' % 255 }}", "1 'x'Noneff"),
        ("{{ '%s and %s'|format('a', 'b') }}{{ '%(n)d'|format(n=3) }}", "a and b3"),
        ("{{ 'one two_3, four'|wordcount }}", "3"),
        ("{{ 'one two three'|truncate(8, leeway=0) }}{{ 'one two'|truncate(5) }}", "one...one two"),
        ("{{ 'one two three'|truncate(9, true, '~', 0) }}", "one two ~"),
        ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.current }}{{ c.next() }}{{ c.next() }}", "abba"),
        ("{% set j = joiner('|') %}{% for x in 'abc' %}{{ j() }}{{ x }}{% endfor %}", "a|b|c"),
        ("{{ range is callable }}{{ messages is callable }}{{ 'x' is callable }}", "TrueFalseFalse"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{%- endgeneration %}{{ x }}", "21"),
        ("{{ 'b' < 'c' }}{{ 2 >= 2.0 }}{{ 1 in [1] }}{{ 'b' not in 'abc' }}{{ 1 < 2 < 3 }}", "TrueTrueTrueFalseTrue"),
        ("{{ 'role' in messages[0] }}{{ 'x' in missing }}", "TrueFalse"),
    ] {
        assert_eq!(render(source), wanted, "{source}");
    }
    for (source, words) in [
        ("{% set n = none %}{{ n < 1 }}", "< is not defined"),
        ("{% set a = 'a' %}{{ a < 1 }}", "< is not defined"),
        ("{{ missing > 1 }}", "undefined"),
        ("{% set n = none %}{{ n in 'None' }}", "in is not defined"),
        ("{% set n = none %}{{ 'a' in n }}", "in is not defined"),
        ("{{ none|list }}", "none is not iterable"),
        ("{{ none|join }}", "none is not iterable"),
        ("{{ '%s %s' % 'a' }}", "fewer values"),
        ("{{ '%s' % (1, 2) }}", "more values"),
        ("{{ '%d' % 'a' }}", "%d needs a number"),
        ("{{ '%9999d' % 1 }}", "over 1000"),
        ("{{ 'a'.index('b') }}", "does not contain"),
        (r"{{ '\N{BULLET}' }}", r"a string has \N"),
    ] {
        assert!(render(source).contains(words), "{source}: {}", render(source));
    }
}

#[test]
fn the_date_of_today() {
    let date = render("{{ strftime_now('%Y-%m-%d') }}");
    assert_eq!(date.len(), 10, "{date}");
    assert!(date.starts_with("20"), "{date}");
}

/// A conversation far longer than any context costs little.
#[test]
fn long_conversations_are_within_the_budget() {
    let source = "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% if m.role == 'user' and \
        not (m.content.startswith('<x>') and m.content.endswith('</x>')) %}{% set ns.n = ns.n + 1 %}\
        {% endif %}{% endfor %}{% for m in messages %}{{ '<' + m.role + '>' + m.content.strip() + \
        '</' ~ m.role ~ '>\\n' }}{% if loop.index0 > messages | length - 3 %}\
        {{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endif %}{% endfor %}{{ ns.n }}";
    let template = ChatTemplate::compile(source).unwrap();
    let content = "All work and no play makes a dull test. ".repeat(100);
    let messages: Vec<_> = (0..2000)
        .map(|n| json!({"role": if n % 2 == 0 { "user" } else { "assistant" }, "content": content}))
        .collect();
    let begin = std::time::Instant::now();
    let text = template
        .render(&ChatInput {
            messages: &json!(messages),
            tools: None,
            variables: None,
            add_generation_prompt: true,
            special_tokens: &SpecialTokens::default(),
        })
        .unwrap();
    println!("{} bytes in {:?}", text.len(), begin.elapsed());
    assert!(text.len() > 8_000_000 && text.ends_with("1000"));
}

/// Callers share the threads that render, and never each other's texts.
#[test]
fn many_threads_at_once() {
    let template =
        ChatTemplate::compile("{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..20 {
                    assert_eq!(render_with(&template, None), "Hi");
                    let own = json!([{"role": "user", "content": format!("{:?}", std::thread::current().id())}]);
                    let input = ChatInput {
                        messages: &own,
                        tools: None,
                        variables: None,
                        add_generation_prompt: false,
                        special_tokens: &SpecialTokens::default(),
                    };
                    let text = template.render(&input).unwrap();
                    assert_eq!(Some(text.as_str()), own[0]["content"].as_str());
                }
            });
        }
    });
}

/// The thread that keeps a template compiled renders many conversations, of which each has all of
/// its budget, its own variables and its own time, whatever became of the ones before.
#[test]
fn renderings_leave_nothing_behind() {
    let source = "{{ strftime_now('%Y') }}{% set ns = namespace(l=[], old=old) %}{% if fail %}\
        {% set ns.ns = ns %}{{ raise_exception('no') }}{% endif %}{% for i in range(2000) %}\
        {% set ns.l = [ns.l, i] %}{% endfor %}{{ ns.old }} {{ fresh is defined }}{% set fresh = 1 %}";
    let template = ChatTemplate::compile(source).unwrap();
    let at = |year: u64, variables: serde_json::Value| {
        let input = ChatInput {
            messages: &json!([{"role": "user", "content": "Hi"}]),
            tools: None,
            variables: variables.as_object(),
            add_generation_prompt: false,
            special_tokens: &SpecialTokens::default(),
        };
        let now = UNIX_EPOCH + Duration::from_secs((year - 1970) * 31_557_600 + 1_000_000);
        template.render_at(&input, now).map_err(|error| error.to_string())
    };
    for year in 1990..2020 {
        assert_eq!(at(year, json!({"old": year})).unwrap(), format!("{year}{year} False"));
        assert_eq!(at(year, json!({})).unwrap(), format!("{year} False"));
        assert!(at(year, json!({"fail": true})).unwrap_err().contains("raise_exception: no"));
    }
}

/// Variables that are deep have a stack that is deep enough, however small the caller's.
#[test]
fn deep_variables_are_rendered_like_others() {
    let template = ChatTemplate::compile("{{ a | string | length }} {{ a is sequence }}").unwrap();
    for depth in [1, 23, 24, 25, 120] {
        let nested = (0..depth).fold(json!(1), |inner, _| json!([inner]));
        let body = || {
            let variables = json!({"a": nested});
            let input = ChatInput {
                messages: &json!([{"role": "user", "content": "Hi"}]),
                tools: None,
                variables: variables.as_object(),
                add_generation_prompt: false,
                special_tokens: &SpecialTokens::default(),
            };
            template.render(&input).unwrap()
        };
        let text = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(128 << 10);
            thread.spawn_scoped(scope, body).unwrap().join().unwrap()
        });
        assert_eq!(text, format!("{} True", 2 * depth + 1));
    }
}

#[test]
fn all_types_may_cross_threads() {
    fn check<T: Send + Sync>() {}
    check::<xserv::text::Tokenizer>();
    check::<xserv::text::Detokenizer>();
    check::<xserv::text::StopMatcher>();
    check::<ChatTemplate>();
}

/// Errors that a template cannot report itself, because the conversation is not what it expects.
#[test]
fn conversations_that_a_template_does_not_expect() {
    let chatml = "{% for m in messages %}{% if m.role in ['user', 'assistant', 'tool'] %}\
        {{ '<' + m.role + '>' + m.content }}{% endif %}{% endfor %}";
    let first = "{{ messages[0].content + '!' }}";
    let message = |source: &str, messages: serde_json::Value| {
        let input = ChatInput {
            messages: &messages,
            tools: None,
            variables: None,
            add_generation_prompt: false,
            special_tokens: &SpecialTokens::default(),
        };
        let error = ChatTemplate::compile(source).unwrap().render(&input);
        error.map_err(|error| (error.kind(), error.message().to_owned()))
    };
    let refused = |source: &str, messages: serde_json::Value| {
        let (kind, text) = message(source, messages).expect_err("a refusal");
        assert_eq!(kind, ErrorKind::InvalidArgument, "{text}");
        text
    };
    let user = |content: serde_json::Value| json!({"role": "user", "content": content});

    assert!(refused(first, json!([])).starts_with("messages is empty (chat template, line 1: "));
    // A template that needs no message gets none.
    assert_eq!(message(chatml, json!([])).unwrap(), "");
    let parts = json!([{"type": "text", "text": "Hi"}]);
    assert_eq!(
        refused(chatml, json!([user(json!("a")), user(parts.clone())])),
        "messages[1].content is a list, and this model's template takes a string: join the texts of its parts"
    );
    assert_eq!(
        refused(chatml, json!([{"role": "assistant"}])),
        "messages[0].content is missing, and this model's template takes a string"
    );
    // One that takes parts takes them, and what it raises is its own.
    let with_parts = "{{ messages[0].content[0].text }}{{ raise_exception('no') if messages[1] }}";
    assert_eq!(message(with_parts, json!([user(parts.clone())])).unwrap(), "Hi");
    let (kind, text) = message(with_parts, json!([user(parts), user(json!("b"))])).unwrap_err();
    assert_eq!(kind, ErrorKind::Template);
    assert!(text.ends_with("raise_exception: no"), "{text}");

    // A message that a template leaves out is no error, and is remarked upon.
    let remark = |source: &str, messages: serde_json::Value| {
        what_was_left_out(&messages, &message(source, messages.clone()).unwrap())
    };
    let misspelt = json!([user(json!("a")), {"role": "usr", "content": "Is anybody there?"}]);
    assert_eq!(
        remark(chatml, misspelt).unwrap(),
        "messages[1] has the role \"usr\", which the model's chat template leaves out"
    );
    let tolerant = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let missing = json!([{"role": "user"}]);
    assert_eq!(remark(tolerant, missing).unwrap(), "messages[0] has no \"content\"");
    // A role of the template's own, and one of everybody's that this template ignores.
    let own = json!([{"role": "critic", "content": " well "}]);
    assert_eq!(remark("{{ messages[0].content | trim }}", own), None);
    assert_eq!(remark(chatml, json!([{"role": "system", "content": "x"}])), None);
}
