//! Model folders that are damaged, or lie.

use std::ffi::c_void;
use std::fs::File;
use std::os::unix::fs::{symlink, FileExt};
use std::path::Path;
use std::time::Duration;

use serde_json::{json, Value};
use xserv::ffi::xserv_finish_reason::{XSERV_FINISH_CANCELLED, XSERV_FINISH_DEADLINE};
use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;
use crate::hostile_child::Expect::*;
use crate::hostile_child::*;

/// The groups of cases by name.
pub const GROUPS: &[Group] = &[
    ("configurations", configurations),
    ("generation defaults", generation_defaults),
    ("tokenizers", tokenizers),
    ("tokenizer settings", tokenizer_settings),
    ("weights", weights),
    ("weights that are no numbers", weights_that_are_no_numbers),
    ("indexes", indexes),
    ("things in place of files", things_in_place_of_files),
    ("changes during the load", changes_during_the_load),
    ("paths", paths),
    ("reads that fail", reads_that_fail),
    ("slow tokenizers", slow_tokenizers),
    ("little memory for files", little_memory_for_files),
];

#[test]
fn configurations_are_checked() {
    run_group("configurations");
}

#[test]
fn generation_defaults_are_checked() {
    run_group("generation defaults");
}

#[test]
fn tokenizers_are_checked() {
    run_group("tokenizers");
    run_group("tokenizer settings");
}

#[test]
fn weights_are_checked() {
    run_group("weights");
    run_group("weights that are no numbers");
    run_group("indexes");
}

#[test]
fn folders_are_checked() {
    run_group("things in place of files");
    run_group("changes during the load");
    run_group("paths");
}

#[test]
fn failing_reads_are_not_missing_files() {
    run_group("reads that fail");
}

#[test]
fn slow_tokenizers_can_be_stopped() {
    run_group("slow tokenizers");
}

#[test]
fn lack_of_memory_is_not_a_damaged_file() {
    run_group("little memory for files");
}

const BAD: xserv_status = XSERV_STATUS_INVALID_FILE;

fn configurations(bench: &mut Bench) {
    const FILE: &str = "config.json";
    let set = |field: &'static str, value: Value| {
        move |copy: &Copy| copy.edit(FILE, |config| config[field] = value)
    };
    bench.folder("undamaged", Same, |_| {});
    for field in [
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ] {
        for value in [json!(0), json!(-1), json!(1u64 << 31), json!(u64::MAX), json!(1e300)] {
            bench.folder(format!("{field} = {value}"), Refused(BAD, field), set(field, value));
        }
    }
    for (field, value, words) in [
        // Plausible, but not what the weights are.
        ("hidden_size", json!(96), "model.embed_tokens.weight"),
        ("hidden_size", json!(65_536), "model.embed_tokens.weight"),
        ("intermediate_size", json!(511), "mlp"),
        ("vocab_size", json!(2047), "model.embed_tokens.weight"),
        ("vocab_size", json!(4_194_304), "model.embed_tokens.weight"),
        ("num_hidden_layers", json!(7), "model.layers.6"),
        ("num_hidden_layers", json!(1024), "model.layers.6"),
        ("num_attention_heads", json!(12), "q_proj"),
        ("num_attention_heads", json!(5), "num_attention_heads"),
        ("num_key_value_heads", json!(6), "k_proj"),
        ("head_dim", json!(64), "self_attn"),
        ("max_position_embeddings", json!(1_000_000_000_000u64), "max_position_embeddings"),
        ("rope_theta", json!(0), "rope_theta"),
        ("rope_theta", json!(-1e6), "rope_theta"),
        ("rope_theta", json!("NaN"), "rope_theta"),
        ("rms_norm_eps", json!(-1e-6), "rms_norm_eps"),
        ("rms_norm_eps", json!(1e300), "rms_norm_eps"),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 0}), "rope_scaling"),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": -4.0}), "rope_scaling"),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 1e300}), "rope_scaling"),
        ("rope_scaling", json!({"rope_type": 7}), "rope"),
        ("tie_word_embeddings", json!("yes"), "tie_word_embeddings"),
        ("tie_word_embeddings", json!(false), "lm_head.weight"),
        ("architectures", json!([["Qwen3ForCausalLM"]]), "architectures"),
        ("model_type", json!("gpt2"), "model_type"),
        ("layer_types", json!(["full_attention"]), "layer_types"),
        ("attention_bias", json!(true), "proj.bias"),
    ] {
        bench.folder(format!("{field} is {value}"), Refused(BAD, words), set(field, value));
    }
    for (field, value, words) in [
        ("architectures", json!(["MambaForCausalLM"]), "MambaForCausalLM"),
        ("architectures", json!(["\u{1b}[2J".repeat(5000)]), "architecture"),
        ("quantization_config", json!({"quant_method": "bitsandbytes"}), "bitsandbytes"),
        ("hidden_act", json!("relu"), "hidden_act"),
        ("rope_scaling", json!({"rope_type": "longrope"}), "longrope"),
        ("head_dim", json!(47), "head_dim"),
    ] {
        let expect = Refused(XSERV_STATUS_UNSUPPORTED, words);
        bench.folder(format!("{field} is {value:.60}"), expect, set(field, value));
    }
    // The largest sizes that are let through must not take their memory at once.
    bench.folder("16,777,216 positions", Works, set("max_position_embeddings", json!(1 << 24)));
    bench.folder("one position", Answers, set("max_position_embeddings", json!(1)));
    bench.folder("fewer layers than stored", Works, set("num_hidden_layers", json!(1)));
    bench.folder("a tiny rope_theta", Answers, set("rope_theta", json!(1e-300)));
    bench.folder("a large rope_theta", Answers, set("rope_theta", json!(1e30)));
    bench.folder(
        "an end token out of range, not read",
        Same,
        set("eos_token_id", json!(1u64 << 40)),
    );
    bench.folder("an end token out of range, read", Refused(BAD, "eos_token_id"), |copy| {
        copy.remove("generation_config.json");
        copy.edit(FILE, |config| config["eos_token_id"] = json!(2048));
    });
    bench.folder("two thousand end tokens", Refused(BAD, "eos_token_id"), |copy| {
        copy.remove("generation_config.json");
        copy.edit(FILE, |config| config["eos_token_id"] = json!(vec![1; 2000]));
    });
    let deep = format!("{{\"a\":{}1{}}}", "[".repeat(200_000), "]".repeat(200_000));
    let twice = "{\"hidden_size\": 1, \"hidden_size\": 2}";
    for (what, text) in [
        ("nothing", b"".to_vec()),
        ("a list", b"[]".to_vec()),
        ("null", b"null".to_vec()),
        ("half an object", b"{\"hidden_size\": 1".to_vec()),
        ("an endless nest", deep.into_bytes()),
        ("bytes that are no text", vec![0xff; 1000]),
        ("zeros", vec![0; 4096]),
        ("UTF-16", b"\xff\xfe{\0}\0".to_vec()),
        ("a field twice", twice.as_bytes().to_vec()),
        ("an empty object", b"{}".to_vec()),
        ("too many bytes", vec![b' '; (1 << 20) + 1]),
        ("NaN", b"{\"rope_theta\": NaN}".to_vec()),
        ("1e309", b"{\"rope_theta\": 1e309}".to_vec()),
    ] {
        bench.folder(format!("config.json is {what}"), Refused(BAD, FILE), |copy| {
            copy.write(FILE, text)
        });
    }
}

fn generation_defaults(bench: &mut Bench) {
    const FILE: &str = "generation_config.json";
    for (field, value) in [
        ("temperature", json!(-1)),
        ("temperature", json!("hot")),
        ("temperature", json!(1e300)),
        ("top_k", json!(-1)),
        ("top_k", json!(1.5)),
        ("top_p", json!(0)),
        ("top_p", json!(2)),
        ("min_p", json!(-0.1)),
        ("repetition_penalty", json!(0)),
        ("repetition_penalty", json!(-2)),
        ("repetition_penalty", json!(1e-45)),
        ("repetition_penalty", json!(3e38)),
        ("do_sample", json!("yes")),
        ("max_new_tokens", json!(-5)),
        ("max_new_tokens", json!([1])),
        ("eos_token_id", json!(2048)),
        ("eos_token_id", json!(-1)),
        ("eos_token_id", json!([2024, "x"])),
        ("eos_token_id", json!(u64::MAX)),
        ("eos_token_id", json!(vec![0; 5000])),
    ] {
        let name = format!("{field} = {:.40}", value.to_string());
        bench.folder(name, Refused(BAD, field), |copy| copy.edit(FILE, |c| c[field] = value));
    }
    for (what, text) in [
        ("a list", "[]".to_string()),
        ("nothing", String::new()),
        ("a nest", "[".repeat(100_000)),
        ("a long text", format!("\"{}\"", "x".repeat(10_000))),
        ("1e309", "{\"temperature\": 1e309}".to_string()),
        ("too many bytes", " ".repeat((1 << 20) + 1)),
    ] {
        bench.folder(format!("generation_config.json is {what}"), Refused(BAD, FILE), |copy| {
            copy.write(FILE, text)
        });
    }
    bench.folder("no generation_config.json", Same, |copy| copy.remove(FILE));
    for (field, value) in [
        ("max_new_tokens", json!(u64::MAX)),
        ("max_new_tokens", json!(0)),
        ("top_k", json!(u64::MAX)),
        ("temperature", json!(1e-45)),
        ("temperature", json!(3e38)),
        ("top_p", json!(1e-45)),
        ("eos_token_id", json!([])),
    ] {
        bench.folder(format!("{field} may be {value}"), Works, |copy| {
            copy.edit(FILE, |c| c[field] = value)
        });
    }
}

fn tokenizers(bench: &mut Bench) {
    const FILE: &str = "tokenizer.json";
    type Change = fn(&mut Value);
    fn split(pattern: &str) -> Value {
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}]})
    }
    fn added(id: u64, content: &str) -> Value {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": true})
    }
    let changes: &[(&str, &str, Change)] = &[
        ("a normalizer with a broken map", "Precompiled", |f| {
            f["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"})
        }),
        ("pieces of length 0", "FixedLength", |f| {
            f["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0})
        }),
        ("a template with an absent token", "[CLS]", |f| {
            f["post_processor"] = json!({"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}],
                "pair": [], "special_tokens": {}})
        }),
        ("a decoder that strips far", "Strip", |f| {
            f["decoder"] = json!({"type": "Strip", "content": "a", "start": 0, "stop": u32::MAX})
        }),
        ("no model", "model", |f| drop(f.as_object_mut().unwrap().remove("model"))),
        ("no vocabulary", "vocab", |f| f["model"]["vocab"] = json!({})),
        ("a negative id", "vocab", |f| f["model"]["vocab"]["x1"] = json!(-1)),
        ("a huge id", "ids must be below", |f| f["model"]["vocab"]["x1"] = json!(u32::MAX)),
        ("a merge of strangers", "merges", |f| f["model"]["merges"] = json!([["qq1", "zz2"]])),
        ("another kind of model", "only \"BPE\"", |f| f["model"]["type"] = json!("Unigram")),
        ("dropout", "dropout", |f| f["model"]["dropout"] = json!(0.5)),
        ("a later version", "version", |f| f["version"] = json!("9.0")),
        ("an added token out of range", "ids must be below", |f| {
            f["added_tokens"] = json!([added(1 << 31, "x")])
        }),
        ("an empty added token", "empty", |f| f["added_tokens"] = json!([added(2022, "")])),
        ("two added tokens of one id", "2022", |f| {
            f["added_tokens"] = json!([added(2022, "<x>"), added(2022, "<y>")])
        }),
        ("an expression that does not parse", "pre_tokenizer", |f| {
            f["pre_tokenizer"] = split("(a")
        }),
        ("an expression too long", "pre_tokenizer", |f| {
            f["pre_tokenizer"] = split(&"a".repeat(9000))
        }),
        ("a repetition of repetitions", "repetitions", |f| {
            f["pre_tokenizer"] = split(r"(?:\p{L}{1000}){1000}")
        }),
        ("eight bytes for one", "at most 4 times", |f| {
            f["normalizer"] =
                json!({"type": "Replace", "pattern": {"String": "a"}, "content": "bbbbbbbb"})
        }),
        ("a slow expression for one letter", "regular expressions take more", |f| {
            f["pre_tokenizer"] = split("(?:(?=(?:(?=é)é|(?=é)é){18}!)|)é|[^é]+")
        }),
        ("doublings", "times longer", |f| {
            let double = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
            f["normalizer"] = json!({"type": "Sequence", "normalizers": vec![double; 20]})
        }),
        ("deep sequences", "deep", |f| {
            let mut part = json!({"type": "NFC"});
            for _ in 0..40 {
                part = json!({"type": "Sequence", "normalizers": [part]});
            }
            f["normalizer"] = part
        }),
        ("a decoder of no kind", "not supported", |f| f["decoder"] = json!({"type": "Nope"})),
    ];
    for (name, words, change) in changes {
        // Valid files for other programs, or none that is known.
        let foreign = ["Precompiled", "only \"BPE\"", "dropout", "version", "not supported"];
        let status = if foreign.contains(words) { XSERV_STATUS_UNSUPPORTED } else { BAD };
        bench.folder(*name, Refused(status, words), |copy| {
            let mut value = copy.json(FILE);
            change(&mut value);
            copy.write(FILE, value.to_string());
        });
    }
    let answers: &[(&str, Change)] = &[
        ("truncation with a stride", |f| {
            f["truncation"] = json!({"max_length": 1, "stride": 5, "strategy": "LongestFirst",
                                     "direction": "Right"})
        }),
        ("padding to four billion", |f| {
            f["padding"] = json!({"strategy": {"Fixed": 4_000_000_000u32}, "direction": "Right",
                "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"})
        }),
        ("a decoder that strips", |f| {
            f["decoder"] = json!({"type": "Strip", "content": "a", "start": 1, "stop": 9})
        }),
        ("nested groups", |f| {
            f["pre_tokenizer"] = split(&format!("{}a{}", "(".repeat(900), ")".repeat(900)))
        }),
        ("nested repetitions", |f| f["pre_tokenizer"] = split(r"(a+)+(?!a)$b")),
        ("a back reference", |f| f["pre_tokenizer"] = split(r"(a|b|ab)*(?=c)c\1")),
        ("many alternatives", |f| f["pre_tokenizer"] = split(&"a|".repeat(1000))),
        ("nested look-aheads", |f| {
            f["pre_tokenizer"] = split(&format!("{}a{}", "(?=".repeat(500), ")".repeat(500)))
        }),
        ("ids beyond the model's", |f| f["model"]["vocab"]["zz9"] = json!(60_000)),
        ("ids with gaps", |f| f["added_tokens"] = json!([added(9000, "<x>")])),
        ("no parts", |f| {
            for part in ["normalizer", "pre_tokenizer", "post_processor", "decoder"] {
                f[part] = json!(null)
            }
        }),
        ("no merges", |f| f["model"]["merges"] = json!([])),
    ];
    for (name, change) in answers {
        bench.folder(*name, Answers, |copy| copy.edit(FILE, change));
    }
    let deep = format!("{{\"x\":{}{}}}", "[".repeat(300_000), "]".repeat(300_000));
    let huge_list = format!("{{\"model\":{{\"vocab\":[{}0]}}}}", "0,".repeat(8 << 20));
    for (what, text) in [
        ("nothing", Vec::new()),
        ("a list", b"[]".to_vec()),
        ("null", b"null".to_vec()),
        ("bytes that are no text", vec![0xfe; 5000]),
        ("a deep nest", deep.into_bytes()),
        ("too many bytes", vec![b' '; (64 << 20) + 1]),
        ("sixty megabytes of blanks", vec![b' '; 60 << 20]),
    ] {
        bench.folder(format!("tokenizer.json is {what}"), Refused(BAD, FILE), |copy| {
            copy.write(FILE, text)
        });
    }
    let expect = Refused(XSERV_STATUS_UNSUPPORTED, "model.vocab is a list");
    bench.folder("a vocabulary of eight million zeros", expect, |copy| copy.write(FILE, huge_list));
    for tenth in 1..10 {
        bench.folder(format!("cut at {tenth} tenths"), Refused(BAD, FILE), |copy| {
            let text = copy.read(FILE);
            copy.write(FILE, &text[..text.len() * tenth / 10]);
        });
    }
    bench.folder("no tokenizer.json", NoText("no tokenizer.json"), |copy| copy.remove(FILE));
}

fn tokenizer_settings(bench: &mut Bench) {
    const FILE: &str = "tokenizer_config.json";
    for (what, text) in [
        ("nothing", Vec::new()),
        ("a list", b"[]".to_vec()),
        ("half", b"{\"eos_token\": ".to_vec()),
        ("bytes that are no text", vec![0xc0; 999]),
        ("a deep nest", vec![b'['; 300_000]),
        ("a token that is a number", b"{\"eos_token\": 5}".to_vec()),
        ("a token without content", b"{\"bos_token\": {\"x\": 1}}".to_vec()),
        ("too many bytes", vec![b' '; (16 << 20) + 1]),
        ("a list of five million", format!("[{}0]", "0,".repeat(5 << 20)).into_bytes()),
    ] {
        bench.folder(format!("tokenizer_config.json is {what}"), Refused(BAD, FILE), |copy| {
            copy.write(FILE, text)
        });
    }
    bench.folder("no tokenizer_config.json", Same, |copy| copy.remove(FILE));
    bench.folder("an unknown end token", Same, |copy| {
        copy.edit(FILE, |f| f["eos_token"] = json!("<none>"))
    });
    for (what, template, words) in [
        ("a number", json!(7), "chat_template"),
        ("an unnamed list", json!([{"template": "x"}]), "default"),
        ("a broken template", json!("{% for"), "tokenizer_config.json"),
    ] {
        let expect = NoChat(XSERV_STATUS_UNSUPPORTED, words);
        bench.folder(format!("chat_template is {what}"), expect, |copy| {
            copy.remove("chat_template.jinja");
            copy.edit(FILE, |f| f["chat_template"] = template);
        });
    }
}

/// The first tensor of the header, for damage.
const FIRST: &str = "model.embed_tokens.weight";

fn weights(bench: &mut Bench) {
    const FILE: &str = "model.safetensors";
    let length = std::fs::metadata(tiny().join(FILE)).unwrap().len();
    let header = {
        let copy = Copy::new();
        copy.weights().0.to_string().len() as u64 + 8
    };
    let mut cuts = vec![0, 1, 7, 8, 9, length - 1];
    cuts.extend((0..header + 4096).step_by(512).skip(1));
    cuts.extend((1..8).map(|eighth| length * eighth / 8));
    for cut in cuts {
        bench.folder(format!("cut to {cut} bytes"), Refused(BAD, FILE), |copy| {
            File::options().write(true).open(copy.file(FILE)).unwrap().set_len(cut).unwrap();
        });
    }
    bench.folder("a byte too many", Refused(BAD, FILE), |copy| {
        let file = File::options().write(true).open(copy.file(FILE)).unwrap();
        file.write_all_at(b"x", length).unwrap();
    });
    bench.folder("a terabyte of nothing behind", Refused(BAD, FILE), |copy| {
        File::options().write(true).open(copy.file(FILE)).unwrap().set_len(1 << 40).unwrap();
    });
    for claimed in [0, 1, 2, (16 << 20) + 1, 1 << 40, u64::MAX / 2 + 1, u64::MAX - 7, u64::MAX] {
        bench.folder(format!("a header of {claimed} bytes"), Refused(BAD, FILE), |copy| {
            let file = File::options().write(true).open(copy.file(FILE)).unwrap();
            file.write_all_at(&claimed.to_le_bytes(), 0).unwrap();
        });
    }
    type Change = fn(&mut Value);
    let changes: &[(&str, &str, Change)] = &[
        ("a shape that overflows", FIRST, |h| {
            h[FIRST]["shape"] = json!([u64::MAX / 2, u64::MAX / 2])
        }),
        ("a negative size", FILE, |h| h[FIRST]["shape"] = json!([-2048, -192])),
        ("a size that is no whole number", FILE, |h| h[FIRST]["shape"] = json!([2048.5, 192])),
        ("a size of 1e308", FILE, |h| h[FIRST]["shape"] = json!([1e308, 192])),
        ("another shape of as many", FIRST, |h| h[FIRST]["shape"] = json!([192, 2048])),
        ("one dimension", FIRST, |h| h[FIRST]["shape"] = json!([393_216])),
        ("no dimension", FILE, |h| h[FIRST]["shape"] = json!([])),
        ("a hundred dimensions", FILE, |h| h[FIRST]["shape"] = json!(vec![1; 100])),
        ("offsets backwards", FILE, |h| h[FIRST]["data_offsets"] = json!([786_432, 0])),
        ("offsets beyond the file", FILE, |h| h[FIRST]["data_offsets"] = json!([0, 1u64 << 62])),
        ("negative offsets", FILE, |h| h[FIRST]["data_offsets"] = json!([-1, 786_431])),
        ("one offset", FILE, |h| h[FIRST]["data_offsets"] = json!([0])),
        ("an unknown type", FILE, |h| h[FIRST]["dtype"] = json!("F7")),
        ("a type of another width", FILE, |h| h[FIRST]["dtype"] = json!("F32")),
        ("a tensor less", FILE, |h| drop(h.as_object_mut().unwrap().remove("model.norm.weight"))),
        ("a tensor that is a list", FILE, |h| h[FIRST] = json!([1])),
        ("an overlap", FILE, |h| {
            h["model.layers.0.mlp.up_proj.weight"]["data_offsets"] = json!([983_424, 1_180_032])
        }),
    ];
    for (name, words, change) in changes {
        bench.folder(*name, Refused(BAD, words), |copy| copy.edit_header(change));
    }
    bench.folder("integers for weights", Refused(XSERV_STATUS_UNSUPPORTED, FIRST), |copy| {
        copy.edit_header(|h| h[FIRST]["dtype"] = json!("I16"))
    });
    bench.folder("a tensor renamed", Refused(BAD, "model.norm.weight"), |copy| {
        copy.edit_header(|h| {
            let tensor = h.as_object_mut().unwrap().remove("model.norm.weight").unwrap();
            h["model.nomr.weight"] = tensor;
        })
    });
    bench.folder("a tensor twice", Refused(BAD, FILE), |copy| {
        let (header, data) = copy.weights();
        let text = header.to_string();
        let again = format!("{},\"{FIRST}\":{}}}", &text[..text.len() - 1], header[FIRST]);
        copy.write_weights(again, &data);
    });
    for (what, header) in [
        ("no JSON", vec![b'x'; 100]),
        ("no text", vec![0xff; 100]),
        ("a deep nest", vec![b'['; 1 << 20]),
        ("deep metadata", format!("{{\"__metadata__\":{}", "{\"a\":".repeat(1 << 20)).into_bytes()),
        ("no tensor", b"{}".to_vec()),
        ("sixteen megabytes of blanks", vec![b' '; 16 << 20]),
    ] {
        bench.folder(format!("the header is {what}"), Refused(BAD, ""), |copy| {
            copy.write_weights(header, b"")
        });
    }
    bench.folder("another format", Refused(BAD, FILE), |copy| {
        copy.write(FILE, b"PK\x03\x04 a zip, as torch writes it".repeat(100));
    });
}

fn weights_that_are_no_numbers(bench: &mut Bench) {
    // bf16: 0x7fc0 is NaN, 0x7f80 infinity, 0x7f7f the largest number.
    for (what, bits) in [("NaN", 0x7fc0u16), ("infinity", 0x7f80), ("-infinity", 0xff80)] {
        bench.folder(format!("all weights are {what}"), NoGenerate("not finite"), |copy| {
            let (header, mut data) = copy.weights();
            data.chunks_exact_mut(2).for_each(|b| b.copy_from_slice(&bits.to_le_bytes()));
            copy.write_weights(header.to_string(), &data);
        });
        bench.folder(format!("the last norm has one {what}"), NoGenerate("not finite"), |copy| {
            let (header, mut data) = copy.weights();
            let at = header["model.norm.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
            data[at..at + 2].copy_from_slice(&bits.to_le_bytes());
            copy.write_weights(header.to_string(), &data);
        });
    }
    for (what, byte) in [("zero", 0u8), ("the largest", 0x7f)] {
        bench.folder(format!("all weights are {what}"), Answers, |copy| {
            let (header, mut data) = copy.weights();
            data.fill(byte);
            copy.write_weights(header.to_string(), &data);
        });
    }
}

const SHARD: &str = "model-00001-of-00001.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Moves the weights into a shard that an index names.
fn split(copy: &Copy) -> Value {
    std::fs::rename(copy.file("model.safetensors"), copy.file(SHARD)).unwrap();
    let bytes = copy.read(SHARD);
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let names = header.as_object().unwrap().keys().filter(|name| *name != "__metadata__");
    let map: serde_json::Map<String, Value> =
        names.map(|name| (name.clone(), json!(SHARD))).collect();
    json!({"metadata": {"total_size": bytes.len()}, "weight_map": map})
}

fn indexes(bench: &mut Bench) {
    bench.folder("a good index", Same, |copy| {
        let index = split(copy);
        copy.write(INDEX, index.to_string());
    });
    let long = "a".repeat(4096);
    let outside = tiny().join("model.safetensors").to_str().unwrap().to_string();
    for name in [
        "../model.safetensors",
        "..",
        ".",
        "",
        "/etc/passwd",
        "/dev/zero",
        "a/b.safetensors",
        "a\\b.safetensors",
        "a\0b",
        "\u{1b}[2J",
        &long,
        &outside,
    ] {
        let shown = name.chars().take(30).collect::<String>().escape_debug().to_string();
        let name = name.to_string();
        bench.folder(format!("a shard called {shown}"), Refused(BAD, "plain file name"), |copy| {
            let mut index = split(copy);
            index["weight_map"][FIRST] = json!(name);
            copy.write(INDEX, index.to_string());
        });
    }
    bench.folder("a shard that is not there", Refused(XSERV_STATUS_NOT_FOUND, "none.st"), |copy| {
        let mut index = split(copy);
        index["weight_map"][FIRST] = json!("none.st");
        copy.write(INDEX, index.to_string());
    });
    bench.folder("config.json as a shard", Refused(BAD, "config.json"), |copy| {
        let mut index = split(copy);
        index["weight_map"][FIRST] = json!("config.json");
        copy.write(INDEX, index.to_string());
    });
    bench.folder("a tensor that no shard has", Refused(BAD, "model.extra.weight"), |copy| {
        let mut index = split(copy);
        index["weight_map"]["model.extra.weight"] = json!(SHARD);
        copy.write(INDEX, index.to_string());
    });
    bench.folder("ten thousand shards", Refused(BAD, "4096"), |copy| {
        split(copy);
        let map: serde_json::Map<String, Value> =
            (0..10_000).map(|n| (n.to_string(), json!(n.to_string()))).collect();
        copy.write(INDEX, json!({ "weight_map": map }).to_string());
    });
    for (what, text) in [
        ("nothing", String::new()),
        ("a list", "[]".to_string()),
        ("without a map", "{}".to_string()),
        ("an empty map", "{\"weight_map\": {}}".to_string()),
        ("a map to numbers", "{\"weight_map\": {\"a\": 1}}".to_string()),
        ("a name twice", "{\"weight_map\": {\"a\": \"b\", \"a\": \"b\"}}".to_string()),
        ("a deep nest", "[".repeat(1 << 20)),
        ("too many bytes", " ".repeat((16 << 20) + 1)),
    ] {
        bench.folder(format!("the index is {what}"), Refused(BAD, INDEX), |copy| {
            split(copy);
            copy.write(INDEX, text);
        });
    }
}

pub fn make_pipe(path: &Path) {
    let path = c_string(path.to_str().unwrap());
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
}

fn things_in_place_of_files(bench: &mut Bench) {
    for file in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    ] {
        type Make = fn(&Path);
        let things: &[(&str, xserv_status, &str, Make)] = &[
            ("a folder", BAD, "not a regular file", |p| std::fs::create_dir(p).unwrap()),
            ("a pipe", BAD, "not a regular file", make_pipe),
            ("a socket", BAD, "not a regular file", |p| {
                drop(std::os::unix::net::UnixListener::bind(p).unwrap())
            }),
            ("a link to itself", BAD, "circle", |p| symlink(p, p).unwrap()),
            ("a link to a device", BAD, "leads out", |p| symlink("/dev/zero", p).unwrap()),
            ("a link out", BAD, "leads out", |p| {
                symlink(tiny().join(p.file_name().unwrap()), p).unwrap()
            }),
            ("a link up", BAD, "leads out", |p| {
                symlink(format!("{}etc/passwd", "../".repeat(40)), p).unwrap()
            }),
        ];
        for (what, status, words, make) in things {
            let expect = match file {
                // A model is of use without conversations.
                "chat_template.jinja" => NoChat(XSERV_STATUS_UNSUPPORTED, words),
                _ => Refused(*status, words),
            };
            bench.folder(format!("{file} is {what}"), expect, |copy| {
                copy.remove(file);
                make(&copy.file(file));
            });
        }
    }
    let missing = XSERV_STATUS_NOT_FOUND;
    bench.folder("no config.json", Refused(missing, "config.json"), |c| c.remove("config.json"));
    bench.folder("no weights", Refused(missing, "model.safetensors"), |copy| {
        copy.remove("model.safetensors")
    });
    bench.folder("a link that leads nowhere", Refused(missing, "config.json"), |copy| {
        copy.remove("config.json");
        symlink("nowhere", copy.file("config.json")).unwrap();
    });
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        bench.folder(format!("{file} leads nowhere"), Refused(BAD, file), |copy| {
            copy.remove(file);
            symlink("nowhere", copy.file(file)).unwrap();
        });
    }
    bench.folder("a link within the folder", Same, |copy| {
        std::fs::rename(copy.file("config.json"), copy.file("other")).unwrap();
        symlink("other", copy.file("config.json")).unwrap();
    });
    bench.folder("an empty folder", Refused(missing, "config.json"), |copy| {
        for entry in std::fs::read_dir(copy.path()).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
    });
    bench.folder("everything empty", Refused(BAD, "config.json"), |copy| {
        for entry in std::fs::read_dir(copy.path()).unwrap() {
            std::fs::write(entry.unwrap().path(), "").unwrap();
        }
    });
    if unsafe { libc::geteuid() } != 0 {
        bench.folder("no permission", Refused(XSERV_STATUS_IO, "no permission"), |copy| {
            use std::os::unix::fs::PermissionsExt;
            let none = std::fs::Permissions::from_mode(0o000);
            std::fs::set_permissions(copy.file("model.safetensors"), none).unwrap();
        });
    }
}

/// A progress callback that changes a file once, when the weights are partly read.
pub struct Meddler {
    pub path: std::path::PathBuf,
    pub after: f32,
    pub meddle: fn(&Path),
    pub done: bool,
}

pub unsafe extern "C" fn meddle(fraction: f32, user_data: *mut c_void) -> bool {
    let meddler = unsafe { &mut *(user_data as *mut Meddler) };
    if fraction >= meddler.after && !meddler.done {
        meddler.done = true;
        (meddler.meddle)(&meddler.path);
    }
    true
}

fn changes_during_the_load(bench: &mut Bench) {
    fn cut(path: &Path) {
        File::options().write(true).open(path).unwrap().set_len(100_000).unwrap();
    }
    fn empty(path: &Path) {
        File::options().write(true).open(path).unwrap().set_len(0).unwrap();
    }
    fn remove(path: &Path) {
        std::fs::remove_file(path).unwrap();
    }
    fn replace(path: &Path) {
        remove(path);
        std::fs::write(path, "something else").unwrap();
    }
    fn pipe(path: &Path) {
        remove(path);
        make_pipe(path);
    }
    let reference = bench.reference.clone();
    type Change = (&'static str, fn(&Path));
    let changes: [Change; 5] = [
        ("cut", cut),
        ("emptied", empty),
        ("removed", remove),
        ("replaced", replace),
        ("a pipe", pipe),
    ];
    for (what, change) in changes {
        for after in [0.0, 0.2, 0.5, 0.9] {
            let reference = reference.clone();
            bench.case(format!("the weights are {what} after {after}"), move |meter| {
                let copy = Copy::new();
                let mut meddler = Meddler {
                    path: copy.file("model.safetensors"),
                    after,
                    meddle: change,
                    done: false,
                };
                let options = xserv_load_options {
                    num_threads: 2,
                    progress: Some(meddle),
                    progress_user_data: &raw mut meddler as *mut c_void,
                    ..load_options()
                };
                match meter.time("load", || Model::load(copy.path(), &options)) {
                    // The file was open already, or what was cut off had been read.
                    Ok(model) => {
                        let ids = model.generate(&greedy(&PROMPT, 3)).unwrap().ids;
                        match ids == reference {
                            true => Ok("loads as it was".to_string()),
                            false => Err(format!("loads, and generates {ids:?}")),
                        }
                    }
                    Err(failure) => {
                        check_failure(&failure)?;
                        match failure.message.contains("model.safetensors") {
                            true => Ok(failure.message),
                            false => Err(format!("does not name the file: {}", failure.message)),
                        }
                    }
                }
            });
        }
    }
}

fn paths(bench: &mut Bench) {
    let long = "x/".repeat(3000);
    let name = "y".repeat(300);
    let file = tiny().join("config.json").to_str().unwrap().to_string();
    let slashes = format!("{}{}", tiny().to_str().unwrap(), "/".repeat(3000));
    for path in [
        "",
        "/nowhere/at/all",
        "no-such-model",
        "nobody/no-such-model",
        "../../../../../../../../nowhere",
        "https://example.com/model",
        "/dev/null",
        "/proc/self/fd/0",
        "\n",
        "a\u{1b}[2Jb",
        &long,
        &name,
        &file,
        &slashes,
    ] {
        let shown = path.chars().take(40).collect::<String>().escape_debug().to_string();
        let path = path.to_string();
        bench.case(format!("the path {shown}"), move |meter| {
            let path = Path::new(&path);
            expect_answer(meter.time("inspect", || inspect(path)))?;
            let loaded = meter.time("load", || Model::load(path, &load_options()));
            let Err(failure) = loaded else { return Ok("loads".to_string()) };
            check_failure(&failure)?;
            Ok(format!("{:?}: {}", failure.status, failure.message))
        });
    }
    for bytes in [&b"\xff\xfe"[..], b"a\xc3", b"\xed\xa0\x80"] {
        bench.case(format!("the path {bytes:?}"), move |_| {
            let path = std::ffi::CString::new(bytes).unwrap();
            let mut model = std::ptr::null_mut();
            let status = unsafe { xserv_load(path.as_ptr(), std::ptr::null(), &mut model) };
            expect_failure(check(status), XSERV_STATUS_INVALID_ARGUMENT, "UTF-8")?;
            let mut found = std::ptr::null_mut();
            let status = unsafe { xserv_inspect(path.as_ptr(), &mut found) };
            expect_failure(check(status), XSERV_STATUS_INVALID_ARGUMENT, "UTF-8")?;
            Ok(String::new())
        });
    }
}

/// Reads that the system refuses for reasons that say nothing about the files: here names that are
/// too long, which a disk that fails looks like.
fn reads_that_fail(bench: &mut Bench) {
    for file in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    ] {
        bench.case(format!("{file} cannot be opened"), move |_| {
            let copy = Copy::new();
            copy.remove(file);
            symlink("a".repeat(300), copy.file(file)).unwrap();
            expect_failure(inspect(copy.path()).map(|i| i.supported), XSERV_STATUS_IO, file)?;
            let loaded = Model::load(copy.path(), &load_options());
            expect_failure(loaded.map(|_| ()), XSERV_STATUS_IO, file)?;
            Ok(String::new())
        });
    }
    // The files with longer names cannot even be looked for.
    bench.case("a path that is almost too long", |_| {
        let copy = Copy::new();
        let mut path = copy.path().to_str().unwrap().to_string();
        let longest = libc::PATH_MAX as usize - 1 - "model.safetensors".len();
        path.push_str(&"/".repeat(longest - path.len()));
        let path = Path::new(&path);
        expect_failure(inspect(path).map(|i| i.supported), XSERV_STATUS_IO, "name too long")?;
        let loaded = Model::load(path, &load_options());
        expect_failure(loaded.map(|_| ()), XSERV_STATUS_IO, "name too long")?;
        Ok(String::new())
    });
}

/// Returns a tokenizer that takes some milliseconds for each `éü`, which its load cannot find out.
fn slow_tokenizer() -> (Copy, String) {
    let copy = Copy::new();
    let branch = "(?:(?=éü)éü|(?=éü)éü){16}";
    copy.edit("tokenizer.json", |f| {
        f["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": format!("(?:(?={branch}!)|)éü|[^é]+|.")},
             "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
             "use_regex": false}]})
    });
    (copy, "éü".repeat(5000))
}

fn slow_tokenizers(bench: &mut Bench) {
    // Processor time, as a clock runs on while other programs do.
    let soon = |begin: f64| match cpu_seconds() - begin {
        elapsed if elapsed < 0.7 => Ok(()),
        elapsed => Err(format!("took {elapsed} s")),
    };
    bench.case("a text that takes too long", |meter| {
        let (copy, text) = slow_tokenizer();
        let model = Model::open(copy.path());
        let tokens = meter.time("tokenize", || model.tokenize(&text));
        expect_failure(tokens, BAD, "ms of processor time")?;
        let prompt = c_string(text);
        let request = xserv_request { prompt: prompt.as_ptr(), max_tokens: 1, ..request() };
        let output = meter.time("generate", || model.generate(&request));
        expect_failure(output, BAD, "ms of processor time")?;
        all_well(&model)
    });
    bench.case("a time limit", move |_| {
        let (copy, text) = slow_tokenizer();
        let model = Model::open(copy.path());
        let prompt = c_string(text);
        let request = xserv_request {
            prompt: prompt.as_ptr(),
            time_limit_ms: 100,
            max_tokens: 1,
            ..request()
        };
        let begin = cpu_seconds();
        let output = model.generate(&request).map_err(|failure| failure.message)?;
        soon(begin)?;
        if output.finish_reason != XSERV_FINISH_DEADLINE as u32 || !output.ids.is_empty() {
            return Err(format!("{output:?}"));
        }
        all_well(&model)
    });
    bench.case("a cancel token", move |_| {
        let (copy, text) = slow_tokenizer();
        let model = Model::open(copy.path());
        let prompt = c_string(text);
        let mut token = std::ptr::null_mut();
        check(unsafe { xserv_cancel_token_new(&mut token) }).unwrap();
        let thrown = token as usize;
        let cancel = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            check(xserv_cancel_token_cancel(thrown as *const _)).unwrap();
        });
        let request =
            xserv_request { prompt: prompt.as_ptr(), cancel: token, max_tokens: 1, ..request() };
        let begin = cpu_seconds();
        let output = model.generate(&request).map_err(|failure| failure.message)?;
        soon(begin)?;
        cancel.join().unwrap();
        xserv_cancel_token_free(token);
        if output.finish_reason != XSERV_FINISH_CANCELLED as u32 {
            return Err(format!("{output:?}"));
        }
        all_well(&model)
    });
}

/// Whether the model generates after all.
fn all_well(model: &Model) -> Result<String, String> {
    model.generate(&greedy(&PROMPT, 3)).map_err(|failure| failure.message)?;
    Ok(String::new())
}

/// Runs `body` with this much more address space than the process has.
fn with_room<T>(room: u64, body: impl FnOnce() -> T) -> T {
    unsafe { libc::malloc_trim(0) };
    let before = limit(libc::RLIMIT_AS, status_bytes("VmSize") + room);
    let out = body();
    limit(libc::RLIMIT_AS, before);
    out
}

fn little_memory_for_files(bench: &mut Bench) {
    for mib in [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64] {
        bench.case(format!("an inspection with {mib} MiB"), move |_| {
            match with_room(mib << 20, || inspect(tiny().as_path())) {
                Ok(found) if found.supported && found.has_tokenizer && found.has_chat_template => {
                    Ok("supported".to_string())
                }
                Ok(found) => Err(format!("not supported: {:?}", found.reason)),
                Err(failure) if failure.status == XSERV_STATUS_OUT_OF_MEMORY => Ok(failure.message),
                Err(failure) => Err(format!("{:?}: {}", failure.status, failure.message)),
            }
        });
    }
    // The stack of a thread for a template of the longest kind would not fit.
    bench.case("a load with 128 MiB", |_| {
        let options = xserv_load_options { num_threads: 2, kv_cache_tokens: 256, ..load_options() };
        let loaded = with_room(128 << 20, || Model::load(tiny().as_path(), &options));
        let model = loaded.map_err(|failure| failure.message)?;
        match model.info().has_chat_template {
            1 => all_well(&model),
            _ => Err("has no chat template".to_string()),
        }
    });
    bench.case("a text that grows", |_| {
        let copy = Copy::new();
        copy.edit("tokenizer.json", |f| {
            f["normalizer"] =
                json!({"type": "Replace", "pattern": {"String": "a"}, "content": "bbbb"})
        });
        let model = Model::open(copy.path());
        let text = "a".repeat(400 << 10);
        let tokens = with_room(256 << 20, || model.tokenize(&text));
        expect_failure(tokens, XSERV_STATUS_OUT_OF_MEMORY, "")?;
        if model.tokenize("a").map_err(|failure| failure.message)?.is_empty() {
            return Err("no tokens".to_string());
        }
        all_well(&model)
    });
}
