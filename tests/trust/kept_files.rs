//! Files of kept weights that are damaged, or lie.

use std::ffi::{c_void, CString};
use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{json, Value};
use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;
use crate::hostile_child::{check_failure, run_group, Bench, Group, TempDir, PROMPT};
use crate::hostile_files::{make_pipe, meddle, Meddler};

/// The groups of cases by name.
pub const GROUPS: &[Group] = &[("kept weights", kept_weights)];

#[test]
fn files_of_kept_weights_are_checked() {
    run_group("kept weights");
}

const KEY: &str = "xserv.kept_weights";
const UP: &str = "model.layers.0.mlp.up_proj.weight";

/// What a load may make of a file.
#[derive(Clone, Copy)]
enum Outlook {
    /// Refuses it, with these words.
    Refused(&'static str),
    /// Refuses it, or gives the tokens that it gives without it.
    Harmless,
}

/// A file, taken apart.
struct Kept {
    header: Value,
    description: Value,
    data: Vec<u8>,
}

impl Kept {
    fn read(file: &Path) -> Self {
        let bytes = std::fs::read(file).unwrap();
        let (length, rest) = bytes.split_at(8);
        let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&rest[..length]).unwrap();
        let text = header["__metadata__"][KEY].as_str().unwrap();
        let description = serde_json::from_str(text).unwrap();
        Kept { header, description, data: rest[length..].to_vec() }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut header = self.header.clone();
        // Unless a case has put something else there.
        if header["__metadata__"][KEY].is_string() {
            header["__metadata__"][KEY] = json!(self.description.to_string());
        }
        file_of(&header.to_string(), &self.data)
    }
}

fn file_of(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

fn options(file: &CString) -> xserv_load_options {
    let weights = xserv_weights::XSERV_WEIGHTS_INT4 as u32;
    xserv_load_options { num_threads: 2, weights, kept_weights: file.as_ptr(), ..load_options() }
}

fn tokens(model: &Model) -> Vec<u32> {
    model.generate(&greedy(&PROMPT, 3)).unwrap().ids
}

/// Loads with the file `damage` has made of a good one, and looks at what comes of it.
fn case(
    bench: &mut Bench,
    name: impl Into<String>,
    expect: Outlook,
    damage: impl FnOnce(&Path) + Send,
) {
    bench.case(name, move |meter| {
        let dir = TempDir::new();
        let path = dir.path().join("kept.safetensors");
        let file = c_string(path.to_str().unwrap());
        let (want, outcome) = std::thread::scope(|scope| {
            let model = Model::load(&tiny(), &options(&file)).expect("a model");
            let want = tokens(&model);
            drop(model);
            // The damage itself may need the stack that a test has.
            scope.spawn(|| damage(&path)).join().unwrap();
            (want, meter.time("load", || Model::load(&tiny(), &options(&file))))
        });
        judge(expect, &want, outcome)
    });
}

fn judge(expect: Outlook, want: &[u32], outcome: Outcome<Model>) -> Result<String, String> {
    match (outcome, expect) {
        (Ok(_), Outlook::Refused(_)) => Err("was accepted".to_string()),
        (Ok(model), Outlook::Harmless) => match tokens(&model) == want {
            true => Ok("loads".to_string()),
            false => Err("other tokens".to_string()),
        },
        (Err(failure), expect) => {
            check_failure(&failure)?;
            let words = match expect {
                Outlook::Refused(words) => words,
                Outlook::Harmless => "",
            };
            let is_good = failure.status == XSERV_STATUS_INVALID_FILE
                && failure.message.contains(words)
                && failure.message.contains("kept.safetensors");
            match is_good {
                true => Ok(failure.message),
                false => Err(format!("{:?}: {}", failure.status, failure.message)),
            }
        }
    }
}

/// A case whose damage is to the header and the description.
fn edited(
    bench: &mut Bench,
    name: impl Into<String>,
    expect: Outlook,
    edit: impl FnOnce(&mut Kept) + Send,
) {
    case(bench, name, expect, |path| {
        let mut kept = Kept::read(path);
        edit(&mut kept);
        std::fs::write(path, kept.bytes()).unwrap();
    });
}

fn odd_values() -> Vec<Value> {
    let long = "9".repeat(400);
    let numbers = [json!(-1), json!(1.5), json!(u64::MAX), json!(1e300)];
    let others =
        [json!(null), json!(true), json!("x"), json!([]), json!({}), json!([[1]]), json!(long)];
    numbers.into_iter().chain(others).collect()
}

/// Gives a file a description that begins with `head`, and then has `one` in a list as often as a header has
/// room for.
fn many(path: &Path, one: &str, head: &str) {
    let Kept { mut header, data, .. } = Kept::read(path);
    header.as_object_mut().unwrap().remove("__metadata__");
    let text = serde_json::to_string(one).unwrap();
    let one = text.trim_matches('"');
    let head = serde_json::to_string(head).unwrap();
    let tail = serde_json::to_string(&header).unwrap();
    let tail = tail.trim_start_matches('{');
    let times = ((16 << 20) - tail.len() - 1000) / one.len();
    let list = one.repeat(times);
    let text = format!(
        r#"{{"__metadata__":{{"{KEY}":{}{}]}}"}},{tail}"#,
        head.trim_end_matches('"'),
        list.trim_end_matches(','),
    );
    drop(list);
    std::fs::write(path, file_of(&text, &data)).unwrap();
}

fn kept_weights(bench: &mut Bench) {
    use Outlook::{Harmless, Refused};
    // Every field of the description.
    for value in odd_values() {
        edited(bench, format!("the description is {value:.40}"), Refused(""), |kept| {
            kept.description = value.clone();
        });
        // Texts are tried below.
        if !value.is_string() {
            let name = format!("instead of the text of the description {value:.40}");
            edited(bench, name, Refused(""), |kept| {
                kept.header["__metadata__"][KEY] = value.clone();
            });
        }
        edited(bench, format!("the metadata are {value:.40}"), Refused(""), |kept| {
            kept.header["__metadata__"] = value.clone();
        });
        for field in ["version", "source", "tensors"] {
            edited(bench, format!("{field} is {value:.40}"), Refused(""), |kept| {
                kept.description[field] = value.clone();
            });
        }
        for field in ["name", "bytes", "header_crc32"] {
            edited(bench, format!("{field} of a source is {value:.40}"), Refused(""), |kept| {
                kept.description["source"][0][field] = value.clone();
            });
        }
        // Of a model that stores no output matrix it says nothing.
        let name = format!("whether the output matrix is the embedding is {value:.40}");
        let is_one = value.is_null() || value.is_boolean();
        edited(bench, name, if is_one { Harmless } else { Refused("") }, |kept| {
            kept.description["output_is_embedding"] = value.clone();
        });
        // Another time has the checksums of the source compared, and those fit.
        edited(bench, format!("the time of a source is {value:.40}"), Harmless, |kept| {
            kept.description["source"][0]["modified"] = value.clone();
        });
        for field in ["name", "code", "group_size", "scales_crc32", "codes_crc32", "zeros_crc32"] {
            edited(bench, format!("{field} of a tensor is {value:.40}"), Refused(""), |kept| {
                kept.description["tensors"][3][field] = value.clone();
            });
        }
    }
    for field in ["version", "source", "tensors"] {
        edited(bench, format!("no {field}"), Refused(""), |kept| {
            kept.description.as_object_mut().unwrap().remove(field);
        });
    }
    for time in [[i64::MIN, 0], [i64::MAX, i64::MAX], [0, -1]] {
        edited(bench, format!("the time of a source is {time:?}"), Harmless, |kept| {
            kept.description["source"][0]["modified"] = json!(time);
        });
    }
    edited(bench, "a field that is not known", Refused("unknown field"), |kept| {
        kept.description["more"] = json!(1);
    });
    edited(bench, "another source of a tensor", Refused("other numbers"), |kept| {
        kept.description["source"][0]["modified"] = json!([1, 2]);
        kept.description["tensors"][3]["source_crc32"] = json!("01234567");
    });
    case(bench, "a hundred thousand sources", Refused("weight files"), |path| {
        let one = r#"{"name": "", "bytes": 0, "modified": [0, 0], "header_crc32": "00000000"},"#;
        many(path, one, r#"{"version": 1, "tensors": [], "source": ["#);
    });
    case(bench, "a hundred thousand tensors", Refused("twice"), |path| {
        let one = r#"{"name": "", "code": "", "group_size": 0, "source_crc32": "00000000", "#;
        let rest =
            r#""scales_crc32": "00000000", "codes_crc32": "00000000", "zeros_crc32": "00000000"},"#;
        many(path, &format!("{one}{rest}"), r#"{"version": 1, "source": [], "tensors": ["#);
    });
    edited(bench, "tensors in another order", Harmless, |kept| {
        kept.description["tensors"].as_array_mut().unwrap().reverse();
    });
    edited(bench, "a description that is nested deep", Refused(""), |kept| {
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        kept.header["__metadata__"][KEY] = json!(format!("{{\"version\": 1, \"source\": {deep}}}"));
        kept.description = json!({});
    });
    for text in ["", " ", "{", "{}", "nul", "[1", "\u{0}", "{\"version\":1", "{\"version\":1}x"] {
        case(bench, format!("a description {text:?}"), Refused(""), |path| {
            let mut kept = Kept::read(path);
            kept.header["__metadata__"][KEY] = json!(text);
            std::fs::write(path, file_of(&kept.header.to_string(), &kept.data)).unwrap();
        });
    }
    // Every field of a tensor, of each part.
    for part in ["codes", "scales", "zeros"] {
        let name = format!("{UP}.{part}");
        for field in ["dtype", "shape", "data_offsets"] {
            for value in odd_values() {
                let name = name.clone();
                edited(
                    bench,
                    format!("{field} of {part} is {value:.40}"),
                    Refused(""),
                    move |kept| {
                        kept.header[&name][field] = value;
                    },
                );
            }
        }
        for dtype in ["I8", "F16", "F32", "BOOL"] {
            let name = name.clone();
            edited(bench, format!("{part} of type {dtype}"), Refused(""), move |kept| {
                kept.header[&name]["dtype"] = json!(dtype);
            });
        }
        let lost = name.clone();
        edited(bench, format!("no {part}"), Refused(""), move |kept| {
            kept.header.as_object_mut().unwrap().remove(&lost);
        });
        let other = name.clone();
        edited(bench, format!("{part} under another name"), Refused(""), move |kept| {
            let entry = kept.header.as_object_mut().unwrap().remove(&other).unwrap();
            kept.header["other"] = entry;
        });
        let turned = name.clone();
        edited(bench, format!("{part} turned"), Refused("expected"), move |kept| {
            kept.header[&turned]["shape"].as_array_mut().unwrap().reverse();
        });
        let begin = name.clone();
        edited(bench, format!("a bit of {part} is another"), Refused("checksum"), move |kept| {
            let offset = kept.header[&begin]["data_offsets"][0].as_u64().unwrap() as usize;
            kept.data[offset + 5] ^= 4;
        });
    }
    // Files that are cut, or none.
    for share in 0..40 {
        case(bench, format!("cut after {share} of 40 parts"), Refused(""), move |path| {
            let file = File::options().write(true).open(path).unwrap();
            let len = file.metadata().unwrap().len();
            file.set_len(len * share / 40).unwrap();
        });
    }
    for len in [0, 1, 7, 9, u64::MAX, 1 << 40, 17 << 20] {
        case(bench, format!("a header of {len} bytes"), Refused(""), move |path| {
            let mut bytes = std::fs::read(path).unwrap();
            bytes[..8].copy_from_slice(&len.to_le_bytes());
            std::fs::write(path, bytes).unwrap();
        });
    }
    case(bench, "a sparse file of 1 TiB", Refused(""), |path| {
        File::options().write(true).open(path).unwrap().set_len(1 << 40).unwrap();
    });
    case(bench, "a folder", Refused("not a regular file"), |path| {
        std::fs::remove_file(path).unwrap();
        std::fs::create_dir(path).unwrap();
    });
    case(bench, "a pipe", Refused("not a regular file"), |path| {
        std::fs::remove_file(path).unwrap();
        make_pipe(path);
    });
    for target in ["/dev/zero", "/dev/null", "/proc/self/mem", "kept.safetensors", "nothing"] {
        case(bench, format!("a link to {target}"), Refused(""), move |path| {
            std::fs::remove_file(path).unwrap();
            symlink(target, path).unwrap();
        });
    }
    changes_meanwhile(bench);
}

/// The file changes while it is read.
fn changes_meanwhile(bench: &mut Bench) {
    fn cut(path: &Path) {
        File::options().write(true).open(path).unwrap().set_len(5000).unwrap();
    }
    fn zeros(path: &Path) {
        let len = std::fs::metadata(path).unwrap().len();
        std::fs::write(path, vec![0; len as usize]).unwrap();
    }
    fn remove(path: &Path) {
        std::fs::remove_file(path).unwrap();
    }
    let changes: [(&str, fn(&Path)); 3] = [("cut", cut), ("zeros", zeros), ("removed", remove)];
    for (what, change) in changes {
        for after in [0.0, 0.5, 0.9] {
            bench.case(format!("the file is {what} after {after}"), move |meter| {
                let dir = TempDir::new();
                let path = dir.path().join("kept.safetensors");
                let file = c_string(path.to_str().unwrap());
                let want = tokens(&Model::load(&tiny(), &options(&file)).expect("a model"));
                let mut meddler = Meddler { path, after, meddle: change, done: false };
                let options = xserv_load_options {
                    progress: Some(meddle),
                    progress_user_data: &raw mut meddler as *mut c_void,
                    ..options(&file)
                };
                match meter.time("load", || Model::load(&tiny(), &options)) {
                    Err(failure) if failure.status == XSERV_STATUS_IO => {
                        check_failure(&failure)?;
                        match failure.message.contains("kept.safetensors") {
                            true => Ok(failure.message),
                            false => Err(format!("does not name the file: {}", failure.message)),
                        }
                    }
                    outcome => judge(Outlook::Harmless, &want, outcome),
                }
            });
        }
    }
}
