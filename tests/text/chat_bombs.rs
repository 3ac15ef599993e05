//! Templates that mean harm: each in a process of its own, so that a crash, a hang or the peak of
//! memory is seen. Required are an end within two seconds and 256 MiB, and no signal.

use serde_json::{json, Value};
use std::process::Command;
use xserv::text::{ChatInput, ChatTemplate, SpecialTokens};

/// Processor time of this process: templates are rendered on threads of their own, and a clock runs
/// while other programs do.
fn process_milliseconds() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, which lies on this stack.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) }, 0);
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

/// Returns the peak of resident memory of this process, in KiB.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn bombs() -> Vec<(String, String)> {
    let mut bombs: Vec<(String, String)> = Vec::new();
    let mut add = |name: &str, source: String| bombs.push((name.to_owned(), source));
    for n in [100usize, 1_000, 10_000, 100_000] {
        let chain = |before: &str, unit: &str, after: &str| {
            format!("{}{}{}", before, unit.repeat(n), after)
        };
        add(&format!("not {n}"), chain("{{ ", "not ", "x }}"));
        add(&format!("minus {n}"), chain("{{ ", "-", "1 }}"));
        add(&format!("plus one {n}"), chain("{{ x", "+1", " }}"));
        add(&format!("attributes {n}"), chain("{{ messages", ".a", " }}"));
        add(&format!("filters {n}"), chain("{{ 'a'", "|trim", " }}"));
        add(&format!("inline if {n}"), chain("{{ 1", " if 1 else 2", " }}"));
        add(&format!("elif {n}"), chain("{% if x %}a", "{% elif x %}b", "{% endif %}"));
        add(&format!("parentheses {n}"), format!("{{{{ {}1{} }}}}", "(".repeat(n), ")".repeat(n)));
        add(&format!("lists {n}"), format!("{{{{ {}1{} }}}}", "[".repeat(n), "]".repeat(n)));
        add(&format!("and {n}"), chain("{{ x", " and x", " }}"));
        add(&format!("concat {n}"), chain("{{ 'a'", "~'a'", " }}"));
        add(&format!("calls {n}"), chain("{{ range", "(1)", " }}"));
        add(&format!("indices {n}"), chain("{{ messages", "[0]", " }}"));
        add(&format!("compare {n}"), chain("{{ 1", "<2", " }}"));
        let nested = "{% if 1 %}".repeat(n) + &"{% endif %}".repeat(n);
        add(&format!("nested ifs {n}"), nested);
        let nested = "{% for a in [1] %}".repeat(n) + &"{% endfor %}".repeat(n);
        add(&format!("nested fors {n}"), nested);
        add(&format!("line breaks {n}"), "\n".repeat(n) + "{{ 1 }}");
        // As many rounds of a loop.
        let rounds = |body: &str| {
            let (outer, inner) = (n.div_ceil(1000), n.min(1000));
            format!(
                "{{% set ns = namespace(s='ab', l=[1], m={{}}) %}}{{% for i in range({outer}) %}}\
                 {{% for j in range({inner}) %}}{body}{{% endfor %}}{{% endfor %}}\
                 {{{{ ns.s | length }}}}"
            )
        };
        add(&format!("double + {n}"), rounds("{% set ns.s = ns.s + ns.s %}"));
        add(&format!("double ~ {n}"), rounds("{% set ns.s = ns.s ~ ns.s %}"));
        add(&format!("double * {n}"), rounds("{% set ns.s = ns.s * 2 %}"));
        add(&format!("replace {n}"), rounds("{% set ns.s = ns.s | replace('a', 'aa') %}"));
        add(&format!("replace method {n}"), rounds("{% set ns.s = ns.s.replace('a', 'aa') %}"));
        add(&format!("replace nothing {n}"), rounds("{% set ns.s = ns.s.replace('', 'xx') %}"));
        add(&format!("join {n}"), rounds("{% set ns.s = [ns.s, ns.s] | join(ns.s) %}"));
        add(&format!("join method {n}"), rounds("{% set ns.s = ns.s.join([ns.s, ns.s]) %}"));
        add(&format!("format {n}"), rounds("{% set ns.s = '{}{}'.format(ns.s, ns.s) %}"));
        add(&format!("set block {n}"), rounds("{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"));
        add(&format!("escape {n}"), rounds("{% set ns.s = (ns.s ~ '&') | escape %}"));
        add(&format!("indent {n}"), rounds("{% set ns.s = (ns.s ~ '\\n' ~ ns.s) | indent %}"));
        add(&format!("upper {n}"), rounds("{% set ns.s = (ns.s ~ ns.s) | upper %}"));
        add(&format!("tojson {n}"), rounds("{% set ns.s = [ns.s, ns.s] | tojson %}"));
        add(&format!("nest list {n}"), rounds("{% set ns.l = [ns.l] %}") + "{{ ns.l }}");
        add(&format!("nest list silently {n}"), rounds("{% set ns.l = [ns.l] %}"));
        let deep = format!("{{% set ns.l = {}ns.l{} %}}", "[".repeat(40), "]".repeat(40));
        add(&format!("nest many lists {n}"), rounds(&deep));
        add(&format!("nest more lists {n}"), rounds(&deep.repeat(100)));
        add(&format!("nest many lists {} times", n / 5), {
            let body = format!("{{% for i in range({}) %}}{deep}{{% endfor %}}", n / 5);
            format!("{{% set ns = namespace(l=1) %}}{body}{{{{ ns.l is string }}}}")
        });
        add(&format!("double list {n}"), rounds("{% set ns.l = ns.l + ns.l %}"));
        add(&format!("repeat list {n}"), rounds("{% set ns.l = ns.l * 2 %}"));
        add(&format!("shared lists {n}"), rounds("{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l }}");
        add(&format!("grow list {n}"), rounds("{% set ns.l = ns.l + [ns.s] %}"));
        add(&format!("nest map {n}"), rounds("{% set ns.m = {'k': ns.m, 'l': ns.m} %}"));
        add(&format!("namespaces {n}"), rounds("{% set ns.l = [ns.l, namespace(a=ns.l)] %}"));
        add(&format!("macros {n}"), rounds("{% macro f() %}{{ ns.s }}{% endmacro %}{{ f() }}"));
        add(&format!("text {n}"), rounds(&"0123456789".repeat(100)));
        add(&format!("captured text {n}"), {
            format!("{{% set x %}}{}{{% endset %}}", rounds(&"0123456789".repeat(100)))
        });
        add(&format!("with {n}"), rounds(&"{% with %}{% endwith %}".repeat(200)));
    }
    let big = "{% set ns = namespace(s='abcdefgh') %}{% for i in range(20) %}\
               {% set ns.s = ns.s + ns.s %}{% endfor %}";
    let many = "{% for i in range(100) %}{% for j in range(1000) %}";
    let end = "{% endfor %}{% endfor %}";
    for (name, source) in [
        ("tojson indent", "{{ [[1], 2] | tojson(indent=2000000000) }}".to_owned()),
        ("tojson indent text", format!("{big}{{{{ [[1], 2] | tojson(indent=ns.s) }}}}")),
        ("format width", "{{ '{:2000000000}'.format(1) }}".to_owned()),
        ("format precision", "{{ '{:.2000000000f}'.format(1.5) }}".to_owned()),
        ("format nested", "{{ '{:{}}'.format(1, 2000000000) }}".to_owned()),
        ("format many", "{{ ('{:>999}' * 20000).format('a') }}".to_owned()),
        ("percent format", "{{ '%2000000000d' % 1 }}".to_owned()),
        ("format filter", "{{ '%2000000000d' | format(1) }}".to_owned()),
        ("indent width", "{{ 'a\\nb' | indent(2000000000) }}".to_owned()),
        ("indent text", format!("{big}{{{{ ('a\\n' * 100000) | indent(ns.s) }}}}")),
        ("batch", "{{ [1] | batch(2000000000, 0) | list }}".to_owned()),
        ("slice", "{{ [1] | slice(2000000000, 0) | list }}".to_owned()),
        ("repeat", "{{ 'ab' * 2000000000 }}".to_owned()),
        ("repeat negative", "{{ 'ab' * -2000000000 }}".to_owned()),
        ("repeat list", "{{ [1] * 2000000000 }}".to_owned()),
        ("repeat to the limit", "{{ 'a' * 16777216 }}{{ 'a' * 16777216 }}".to_owned()),
        ("ljust", "{{ 'a'.ljust(2000000000) }}".to_owned()),
        ("center", "{{ 'a'.center(9000000000000000000) }}".to_owned()),
        ("zfill", "{{ 'a'.zfill(2000000000) }}".to_owned()),
        ("range", "{{ range(2000000000) | list | length }}".to_owned()),
        ("range extremes", "{{ range(-9223372036854775808, 9223372036854775807, 1) }}".to_owned()),
        ("range extremes down", "{{ range(9223372036854775807, -9223372036854775808, -1) }}".into()),
        ("power", "{{ 2 ** 1000000000 }}{{ 2 ** 127 }}{{ 10 ** 400 }}".to_owned()),
        ("endless recursion", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_owned()),
        ("recursion in two", "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}".into()),
        ("tree of macros", "{% macro f(n) %}{% if n > 0 %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}\
                            {% endmacro %}{{ f(40) }}".to_owned()),
        ("self include", "{% include 'chat_template' %}".to_owned()),
        ("self block", "{% block a %}{{ self.a() }}{% endblock %}".to_owned()),
        ("loop recursion", "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}".to_owned()),
        ("cyclic namespace", "{% set ns = namespace() %}{% set ns.ns = ns %}{{ ns }}".to_owned()),
        ("cyclic list", "{% set ns = namespace() %}{% set ns.l = [ns] %}{{ ns.l | tojson }}".into()),
        ("characters as a list", format!("{big}{{{{ ns.s | list | length }}}}")),
        ("split into characters", format!("{big}{{{{ ns.s.split('a') | length }}}}")),
        ("strip quadratic", format!("{big}{many}{{% set x = ns.s.strip(ns.s) %}}{end}")),
        ("reverse many", format!("{big}{many}{{% set x = ns.s[::-1] %}}{end}")),
        ("index many", format!("{big}{many}{{% set x = ns.s[8000000] %}}{end}")),
        ("key many", format!("{big}{{% set m = {{}} %}}{many}{{% set x = m[ns.s] %}}{end}")),
        ("compare many", format!("{big}{{% set t = ns.s ~ '' %}}{many}{{% if ns.s == t %}}{{% endif %}}{end}")),
        ("search many", format!("{big}{many}{{% if 'zz' in ns.s %}}{{% endif %}}{end}")),
        ("iterate a string", format!("{big}{many}{{% for c in ns.s %}}{{% break %}}{{% endfor %}}{end}")),
        ("alias of the loop", format!("{big}{{% for x in [1, 2, 3, 4] recursive %}}{{% set l = loop %}}\
            {{% for j in range(10000) %}}{{{{ l(ns.s) }}}}{{% endfor %}}{{% break %}}{{% endfor %}}")),
        ("lower many", format!("{big}{many}{{% set x = ns.s | lower %}}{end}")),
        ("length many", format!("{big}{many}{{% set x = ns.s | length %}}{end}")),
        ("lists of strings", format!("{{% set ns = namespace(l=[]) %}}{many}\
            {{% set ns.l = [ns.l, 'x' * 1000 ~ j] %}}{end}")),
        ("lists of short strings", format!("{{% set ns = namespace(l=[]) %}}{many}\
            {{% set ns.l = [ns.l, 'x' * 60 ~ i ~ j] %}}{end}")),
        ("keep ranges", format!("{{% set ns = namespace(l=[]) %}}{many}\
            {{% set ns.l = [ns.l, range(100000)] %}}{end}")),
        ("keep maps", format!("{{% set ns = namespace(l=[]) %}}{many}\
            {{% set ns.l = [ns.l, {{'a': i, 'b': j, 'c': 1, 'd': 2}}] %}}{end}")),
        ("sort", format!("{many}{{% set x = range(100000) | sort %}}{end}")),
        ("compare shared lists", "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}\
            {% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}\
            {{ ns.a == ns.b }}".to_owned()),
        ("changed shared lists", "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}\
            {% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}\
            {% for i in [1] %}{{ loop.changed(ns.a) }}{{ loop.changed(ns.b) }}{% endfor %}".to_owned()),
        ("map path", format!("{{{{ range(100000) | map(attribute='{}') | list }}}}", "a.".repeat(20_000))),
        ("select by a filter's name", format!("{big}{many}{{% set x = [ns.s] | map('upper') | list %}}{end}")),
        ("hidden names", "{{ [1] | map('§tick') | list }}{{ [ns] | select('§x') }}".to_owned()),
        ("splat", "{% macro f() %}{% endmacro %}{% for i in range(10000) %}\
            {{ f(*range(100000)) }}{% endfor %}".to_owned()),
        ("deep frames", "{% with %}".repeat(150) + "{% for i in range(1000) %}{% for j in range(1000) %}\
            {% set x = nothing %}{% endfor %}{% endfor %}" + &"{% endwith %}".repeat(150)),
        ("long raise", format!("{big}{{{{ raise_exception(ns.s) }}}}")),
        ("files", "{{ open('/etc/passwd') }}".to_owned()),
        ("environment", "{{ env }}{{ os.environ }}{{ ''.__class__.__mro__ }}".to_owned()),
        ("ten megabytes", "x".repeat(10 << 20)),
        ("many names", (0..4000).map(|n| format!("{{% set a{n}=1 %}}")).collect()),
        ("many arguments", format!("{{{{ dict({}) }}}}", "a=1,".repeat(15_000))),
        ("unclosed", "{% for x in [".repeat(1000)),
    ] {
        add(name, source);
    }
    bombs
}

fn messages() -> Value {
    json!([{"role": "user", "content": "hi"}])
}

/// The child process: one template, and a line about it.
#[test]
fn child() {
    let Ok(wanted) = std::env::var("XSERV_TEXT_BOMB") else { return };
    let source = bombs().into_iter().find(|(name, _)| *name == wanted).unwrap().1;
    let before = peak_kib();
    let begin = process_milliseconds();
    let outcome = ChatTemplate::compile(&source).and_then(|template| {
        template.render(&ChatInput {
            messages: &messages(),
            tools: None,
            variables: None,
            add_generation_prompt: true,
            special_tokens: &SpecialTokens::default(),
        })
    });
    let elapsed = process_milliseconds() - begin;
    let what = match &outcome {
        Ok(text) => format!("ok, {} bytes", text.len()),
        Err(e) => {
            assert!(e.message().len() < 1000, "a flood of {} bytes", e.message().len());
            format!("{:?}: {e}", e.kind())
        }
    };
    println!("\nBOMB {elapsed} {} {what}", peak_kib().saturating_sub(before));
    // The host goes on working.
    let fine = ChatTemplate::compile("{{ messages[0].content }}").unwrap();
    let input = ChatInput {
        messages: &messages(),
        tools: None,
        variables: None,
        add_generation_prompt: false,
        special_tokens: &SpecialTokens::default(),
    };
    assert_eq!(fine.render(&input).unwrap(), "hi");
}

/// Every bomb in a child: ends by itself, in time, within memory.
#[test]
fn every_bomb_ends_with_an_answer() {
    let program = std::env::current_exe().unwrap();
    let only = std::env::var("XSERV_TEXT_ONLY").unwrap_or_default();
    let mut failures = Vec::new();
    let (mut slowest, mut largest) = ((0u64, String::new()), (0u64, String::new()));
    let all = bombs();
    for (name, _) in all.iter().filter(|(name, _)| name.contains(&only)) {
        let output = Command::new(&program)
            .args(["--exact", "chat_bombs::child", "--nocapture", "--test-threads=1"])
            .env("XSERV_TEXT_BOMB", name)
            .env_remove("RUST_BACKTRACE")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let Some(line) = text.lines().find(|line| line.starts_with("BOMB ")) else {
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            failures.push(format!("{name}: {}: {}", output.status, stderr.trim()));
            continue;
        };
        let mut words = line.splitn(4, ' ').skip(1);
        let millis: u64 = words.next().unwrap().parse().unwrap();
        let kib: u64 = words.next().unwrap().parse().unwrap();
        println!("{name}: {millis} ms, {} MiB, {}", kib >> 10, words.next().unwrap_or_default());
        if !output.status.success() || millis > 2500 || kib > 256 << 10 {
            failures.push(format!("{name}: {}, {millis} ms, {kib} KiB", output.status));
        }
        slowest = slowest.max((millis, name.clone()));
        largest = largest.max((kib, name.clone()));
    }
    println!("slowest: {slowest:?} ms; largest: {largest:?} KiB; {} bombs", all.len());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
