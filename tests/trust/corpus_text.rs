//! More chat templates, prompts and sampling parameters that mean harm, made by rule.

use serde_json::json;
use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;
use crate::hostile_child::Expect::*;
use crate::hostile_child::*;

/// The groups of cases by name.
pub const GROUPS: &[Group] = &[
    ("more templates", templates),
    ("more prompts", prompts),
    ("more sampling", sampling),
    ("hosts", hosts),
];

#[test]
fn more_templates_are_held() {
    run_group("more templates");
}

#[test]
fn more_prompts_are_checked() {
    run_group("more prompts");
}

#[test]
fn more_sampling_numbers_are_checked() {
    run_group("more sampling");
}

fn templates(bench: &mut Bench) {
    const FILE: &str = "chat_template.jinja";
    let mut template = |name: String, source: String| {
        bench.folder(name, Answers, move |copy| copy.write(FILE, source));
    };
    // Filters and methods with a number that is far too large, and with none at all.
    for filter in [
        "abs",
        "attr",
        "batch",
        "bool",
        "capitalize",
        "chain",
        "default",
        "dictsort",
        "escape",
        "first",
        "float",
        "format",
        "groupby",
        "indent",
        "int",
        "items",
        "join",
        "last",
        "length",
        "lines",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "pprint",
        "reject",
        "replace",
        "reverse",
        "round",
        "safe",
        "select",
        "slice",
        "sort",
        "split",
        "string",
        "sum",
        "title",
        "tojson",
        "trim",
        "unique",
        "upper",
        "urlencode",
        "wordcount",
        "wordwrap",
        "zip",
    ] {
        template(format!("the filter {filter}"), format!(
            "{{{{ 'ab' | {filter}(2000000000) }}}}{{{{ [1, 'a', none] | {filter}(-9, 9999999999) }}}}{{{{ {{'a': 1}} | {filter} }}}}"
        ));
    }
    for method in [
        "center",
        "ljust",
        "rjust",
        "zfill",
        "expandtabs",
        "replace",
        "split",
        "rsplit",
        "splitlines",
        "join",
        "format",
        "count",
        "find",
        "startswith",
        "strip",
        "title",
        "upper",
        "items",
        "get",
        "append",
        "update",
        "pop",
        "copy",
        "keys",
        "encode",
        "format_map",
        "__add__",
        "translate",
    ] {
        template(format!("the method {method}"), format!(
            "{{{{ 'ab'.{method}(2000000000, 'x') }}}}{{{{ messages.{method}(2000000000) }}}}{{{{ messages[0].{method}() }}}}"
        ));
    }
    // Ways out of the sandbox of other engines.
    for way in [
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__init__.__globals__['os'].popen('id').read()",
        "self.__dict__",
        "self._TemplateReference__context",
        "cycler.__init__.__globals__.os",
        "lipsum.__globals__['os']",
        "joiner.__init__.__globals__",
        "namespace.__init__",
        "config.items()",
        "request.application.__globals__",
        "get_flashed_messages.__globals__",
        "url_for.__globals__",
        "''|attr('__class__')",
        "messages|map(attribute='__class__')|list",
        "raise_exception.__globals__",
        "strftime_now('%n' * 100000)",
        "strftime_now('%Q%E%O%-%_%^%#')",
        "debug()",
        "dict(a=1).__class__",
        "import('os')",
        "caller()",
        "loop.index",
        "super()",
        "env",
    ] {
        template(format!("the way {way}"), format!("{{{{ {way} }}}}"));
    }
    // Chains of a depth that is harmless, and of what just fits into a template.
    let chains = [
        ("not", "{{ ", "not ", "x }}"),
        ("minus", "{{ ", "-", "1 }}"),
        ("plus", "{{ x", "+1", " }}"),
        ("tilde", "{{ x", "~1", " }}"),
        ("attributes", "{{ messages", ".a", " }}"),
        ("indices", "{{ messages", "[0]", " }}"),
        ("filters", "{{ 'a'", "|trim", " }}"),
        ("elif", "{% if x %}a", "{% elif x %}b", "{% endif %}"),
        ("else", "{{ 1", " if x else 1", " }}"),
        ("and", "{{ 1", " and 1", " }}"),
        ("comparisons", "{{ 1", " < 1", " }}"),
        ("sets", "", "{% set a = 1 %}", "{{ a }}"),
        ("macros", "", "{% macro m() %}{% endmacro %}", "{{ m() }}"),
        ("comments", "", "{# #}", ""),
        ("raws", "", "{% raw %}{% endraw %}", ""),
    ];
    for (name, before, unit, after) in chains {
        for bytes in [2_000, 65_000] {
            let count = (bytes - before.len() - after.len()) / unit.len();
            template(
                format!("{count} of {name}"),
                format!("{before}{}{after}", unit.repeat(count)),
            );
        }
    }
    // The template of the model, cut.
    let source = std::fs::read_to_string(tiny().join(FILE)).unwrap();
    for at in (0..source.len()).step_by(40).filter(|at| source.is_char_boundary(*at)) {
        template(format!("the template cut at {at}"), source[..at].to_string());
    }
}

fn prompts(bench: &mut Bench) {
    let model = &Model::open(&tiny());
    let wrong = XSERV_STATUS_INVALID_ARGUMENT;
    // Every byte that cannot stand alone, in every place of a short text.
    for byte in (0x80..=0xffu8).step_by(2) {
        bench.case(format!("the byte {byte:#x}"), move |_| {
            for at in 0..4 {
                let mut text = *b"text";
                text[at] = byte;
                let mut tokens = std::ptr::null_mut();
                let data = text.as_ptr().cast();
                let status =
                    unsafe { xserv_tokenize(model.0, data, 4, std::ptr::null(), &mut tokens) };
                expect_failure(check(status), wrong, &format!("offset {at}"))?;
            }
            Ok(String::new())
        });
    }
    // Characters of two, three and four bytes, split over tokens of a byte each in every way. (The
    // first 256 ids of the vocabulary are the bytes.)
    let single = |text: &str| -> Vec<u32> {
        let of = |byte: u8| (0..256).find(|id| token_byte(*id) == byte).unwrap();
        text.bytes().map(of).collect()
    };
    for text in [
        "\u{e9}",
        "\u{65e5}",
        "\u{1f600}",
        "a\u{e9}b",
        "\u{65e5}\u{672c}",
        "\u{1f468}\u{200d}\u{1f469}",
    ] {
        let ids = single(text);
        for cut in 0..=ids.len() {
            let ids = ids.clone();
            bench.case(format!("{text:?} ends after {cut} of its bytes"), move |_| {
                let (head, tail) = (&ids[..cut], &ids[cut..]);
                let expected = |ids: &[u32]| {
                    let bytes: Vec<u8> = ids.iter().map(|id| token_byte(*id)).collect();
                    String::from_utf8_lossy(&bytes).into_owned()
                };
                for part in [head, tail] {
                    let streamed =
                        model.stream_chunks(part, false).map_err(|f| f.message)?.concat();
                    let whole = model.detokenize(part, false).map_err(|f| f.message)?;
                    if streamed != whole || whole != expected(part) {
                        return Err(format!("{whole:?}, streamed {streamed:?}"));
                    }
                }
                Ok(String::new())
            });
        }
    }
    // Lengths about the context, as ids and as logits.
    let context = model.info().max_context_tokens as usize;
    for length in [1, 31, 32, 33, 511, 512, 513, context - 1, context, context + 1] {
        bench.case(format!("{length} ids"), move |_| {
            let ids = vec![7; length];
            let output = model.generate(&greedy(&ids, 1));
            let logits = model.logits(&ids, false);
            if length > context {
                expect_failure(output, XSERV_STATUS_CONTEXT_FULL, "context")?;
                expect_failure(logits, XSERV_STATUS_CONTEXT_FULL, "context")?;
                return Ok(String::new());
            }
            output.map_err(|f| f.message)?;
            logits.map_err(|f| f.message)?;
            Ok(String::new())
        });
    }
    for (name, text) in [
        ("controls", (1..32u8).map(char::from).collect::<String>()),
        ("marks of direction", "\u{202e}\u{202d}\u{2066}\u{2069}".repeat(50)),
        ("a byte order mark", "\u{feff}a".to_string()),
        ("blanks of all kinds", "\u{a0}\u{2003}\u{3000}\u{200b}\u{2028}".repeat(50)),
        ("combining marks", format!("a{}", "\u{301}".repeat(2000))),
        ("private letters", "\u{e000}\u{10ffff}".repeat(50)),
        ("no characters", "\u{fffe}\u{ffff}".repeat(50)),
        ("Hangul", "\u{1100}\u{1161}\u{11a8}".repeat(50)),
        ("special tokens nested", "<|im_<|im_end|>end|>".repeat(20)),
        ("line ends", "\r\n\r\r\n\n".repeat(50)),
    ] {
        bench.case(format!("text of {name}"), move |_| {
            let ids = model.tokenize(&text).map_err(|f| f.message)?;
            let back = model.detokenize(&ids, false).map_err(|f| f.message)?;
            let request = xserv_request {
                prompt: text.as_ptr().cast(),
                prompt_len: text.len(),
                max_tokens: 1,
                ..request()
            };
            expect_answer(model.generate(&request))?;
            Ok(format!("{} ids, {} bytes", ids.len(), back.len()))
        });
    }
}

/// Returns the byte that the token of one byte stands for, in the order of GPT-2's vocabulary: what
/// is printable first.
fn token_byte(id: u32) -> u8 {
    let printable = (0x21..=0x7eu8).chain(0xa1..=0xac).chain(0xae..=0xff);
    let others = (0..=0x20u8).chain(0x7f..=0xa0).chain([0xad]);
    printable.chain(others).nth(id as usize).expect("an id below 256")
}

fn sampling(bench: &mut Bench) {
    let model = &Model::open(&tiny());
    let wrong = XSERV_STATUS_INVALID_ARGUMENT;
    let ok: Vec<(&str, fn(&mut xserv_request))> = vec![
        ("a priority of i32::MAX", |r| r.priority = i32::MAX),
        ("a priority of i32::MIN", |r| r.priority = i32::MIN),
        ("a time limit of u64::MAX", |r| r.time_limit_ms = u64::MAX),
        ("a time limit of one", |r| r.time_limit_ms = 1),
        ("a cache key of u64::MAX", |r| r.cache_key = u64::MAX),
        ("a seed of 0", |r| r.seed = 0),
        ("a random seed", |r| r.seed = XSERV_SEED_RANDOM),
        ("a seed of u64::MAX - 1", |r| r.seed = u64::MAX - 1),
        ("one sample", |r| r.num_samples = 1),
        ("eight samples", |r| r.num_samples = 8),
        ("everything at its edge", |r| {
            (r.temperature, r.top_k, r.top_p, r.min_p) = (1e-45, u32::MAX - 1, 1.0, 1.0);
            (r.repetition_penalty, r.presence_penalty, r.frequency_penalty) = (1e3, -1e4, 1e4);
        }),
    ];
    for (name, set) in ok {
        bench.case(name, move |_| {
            let mut request = xserv_request { temperature: 1.0, seed: 3, ..greedy(&PROMPT, 3) };
            set(&mut request);
            model.generate(&request).map_err(|f| f.message).map(|o| format!("{:?}", o.ids))
        });
    }
    let refused: Vec<(&str, &str, fn(&mut xserv_request))> = vec![
        ("four billion samples", "num_samples", |r| r.num_samples = u32::MAX),
        ("a million samples", "num_samples", |r| r.num_samples = 1_000_000),
        ("a reserved byte", "reserved", |r| r.reserved[0] = 1),
        ("add_generation_prompt of 2", "add_generation_prompt", |r| {
            (r.prompt, r.messages_json) = (std::ptr::null(), c"[]".as_ptr());
            r.add_generation_prompt = 2;
        }),
        ("add_special_tokens of 2", "add_special_tokens", |r| r.add_special_tokens = 2),
        ("parse_special_tokens of 2", "parse_special_tokens", |r| r.parse_special_tokens = 2),
        ("a million stop strings", "stop_strings", |r| {
            r.num_stop_strings = 1_000_000;
            r.stop_strings = std::ptr::without_provenance(8);
        }),
        ("stop tokens that are NULL", "stop_token_ids", |r| r.num_stop_token_ids = 1),
        ("stop tokens without end", "stop_token_ids", |r| {
            r.num_stop_token_ids = usize::MAX;
            r.stop_token_ids = PROMPT.as_ptr();
        }),
        ("two prompts", "exactly one", |r| r.messages_json = c"[]".as_ptr()),
    ];
    for (name, words, set) in refused {
        bench.case(name, move |_| {
            let mut request =
                xserv_request { prompt: c"Once".as_ptr(), max_tokens: 2, ..request() };
            set(&mut request);
            expect_failure(model.generate(&request), wrong, words)?;
            Ok(last_error())
        });
    }
}

/// Environments in which a host may run.
const HOSTS: [(&str, &str); 24] = [
    ("RUST_BACKTRACE", "full"),
    ("RUST_LOG", "trace"),
    ("RUST_LIB_BACKTRACE", "1"),
    ("LANG", "tr_TR.UTF-8"),
    ("LC_ALL", "nowhere"),
    ("LC_NUMERIC", "de_DE.UTF-8"),
    ("CUDA_VISIBLE_DEVICES", ""),
    ("CUDA_VISIBLE_DEVICES", "99"),
    ("CUDA_VISIBLE_DEVICES", "garbage"),
    ("NVIDIA_VISIBLE_DEVICES", "none"),
    ("OMP_NUM_THREADS", "0"),
    ("RAYON_NUM_THREADS", "garbage"),
    ("TOKENIZERS_PARALLELISM", "garbage"),
    ("HOME", ""),
    ("HOME", "/nowhere"),
    ("HF_HOME", "/dev/null"),
    ("HF_HUB_CACHE", "\u{1f600}"),
    ("XDG_CACHE_HOME", "../.."),
    ("PATH", ""),
    ("TZ", "garbage"),
    ("MALLOC_ARENA_MAX", "1"),
    ("MALLOC_PERTURB_", "165"),
    ("GLIBC_TUNABLES", "glibc.malloc.check=3"),
    ("TMPDIR", "/nowhere"),
];

/// A whole life of a model; the environment is that of the child.
fn hosts(bench: &mut Bench) {
    let reference = bench.reference.clone();
    bench.case("load, use and free", move |meter| {
        let model = meter.time("load", || Model::load(&tiny(), &load_options()));
        let model = model.map_err(|f| f.message)?;
        let output = model.generate(&greedy(&PROMPT, 3)).map_err(|f| f.message)?;
        if output.ids != reference {
            return Err(format!("{:?}", output.ids));
        }
        let text = model.apply_chat_template(MESSAGES, None, None, true).map_err(|f| f.message)?;
        model.tokenize(&text).map_err(|f| f.message)?;
        let number = json!([{"role": "user", "content": 1.5}]).to_string();
        expect_answer(model.apply_chat_template(&number, None, None, true))?;
        let absent = Model::load(std::path::Path::new("nobody/nothing"), &load_options());
        expect_failure(absent.map(drop), XSERV_STATUS_NOT_FOUND, "nobody/nothing")?;
        Ok(text)
    });
}

#[test]
fn the_environment_changes_nothing() {
    for variable in HOSTS {
        run_group_with("hosts", &[variable]);
    }
}

/// The number of environments that [`the_environment_changes_nothing`] tries.
pub const NUM_HOSTS: usize = HOSTS.len();
