//! Valid files with random damage: whatever comes out, it is a result and no panic, and what the
//! safetensors parser takes the reference crate takes too.

use safetensors::SafeTensors;
use serde_json::json;
use xserv::memory::DType;
use xserv::model::safetensors::parse_header;
use xserv::model::shard_index::ShardIndex;
use xserv::model::KvFormat;
use xserv::model::ModelConfig;

use crate::driver::{load, Driver};
use crate::files::{raw_safetensors, safetensors_bytes, Random, Store, TestModel, TestTensor};

const ROUNDS: usize = 20_000;

/// Pieces that JSON files break at.
const PIECES: [&str; 16] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\u0000",
    "-",
    "1e309",
    "18446744073709551615",
    "null",
    "0",
    "\"a\":1,",
    "[[[[[[[[",
    " ",
];

/// One to four changes: a byte, a cut, an insertion, a piece said twice.
fn damage(text: &[u8], random: &mut Random) -> Vec<u8> {
    let mut text = text.to_vec();
    for _ in 0..1 + random.below(4) {
        let at = random.below(text.len().max(1));
        match random.below(5) {
            0 if at < text.len() => text[at] = random.next() as u8,
            1 if at < text.len() => text[at] = b"0123456789{}[],:\""[random.below(17)],
            2 => text.truncate(at),
            3 => {
                let piece = PIECES[random.below(PIECES.len())];
                let at = at.min(text.len());
                text.splice(at..at, piece.bytes());
            }
            _ => {
                let end = (at + random.below(60)).min(text.len());
                let piece = text.get(at..end).unwrap_or_default().to_vec();
                let to = random.below(text.len().max(1)).min(text.len());
                text.splice(to..to, piece);
            }
        }
    }
    text
}

#[test]
fn damaged_headers() {
    let tensors: Vec<TestTensor> = (0..4)
        .map(|i| TestTensor { name: format!("t{i}"), shape: vec![i, 2], values: vec![0.5; 2 * i] })
        .collect();
    let bytes = safetensors_bytes(&tensors, Store::F32);
    let header_len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let (header, data) = bytes[8..].split_at(header_len);
    let mut random = Random(11);
    let mut taken = 0;
    for round in 0..ROUNDS {
        let header = damage(header, &mut random);
        if let Ok(found) = parse_header(&header, data.len() as u64) {
            taken += 1;
            let text = String::from_utf8(header).expect("was taken as UTF-8");
            let file = raw_safetensors(&text, data);
            let theirs = SafeTensors::deserialize(&file)
                .unwrap_or_else(|e| panic!("round {round}: the crate refuses {text}: {e}"));
            assert_eq!(theirs.len(), found.len(), "{text}");
            for (name, info) in found {
                let end = info.file_offset + info.len_bytes;
                assert!(end <= file.len() as u64, "{name} of {text}");
                let view = theirs.tensor(&name).expect("the same names");
                assert_eq!(view.data().len() as u64, info.len_bytes, "{text}");
            }
        }
    }
    assert!(taken > ROUNDS / 100, "{taken} taken: the damage is too heavy to test anything");
}

#[test]
fn damaged_configurations_and_indexes() {
    let mut random = Random(12);
    let mut config = TestModel::qwen3(1).config;
    config["rope_scaling"] =
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    config["layer_types"] = json!(["full_attention", "full_attention"]);
    let config = config.to_string();
    let index = json!({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}).to_string();
    for _ in 0..ROUNDS {
        if let Ok(config) = ModelConfig::parse(&damage(config.as_bytes(), &mut random)) {
            assert!(config.kv_layout(DType::F32, KvFormat::Dense).validate().is_ok(), "{config:?}");
            let rope = config.rope.expect("Qwen3 has rotary positions");
            let frequencies = rope.inv_freq(config.head_dim).expect("room");
            assert!(frequencies.iter().all(|f| f.is_finite()), "{rope:?}");
        }
        if let Ok(index) = ShardIndex::parse(&damage(index.as_bytes(), &mut random)) {
            assert!(index.shards.iter().all(|name| !name.contains('/')));
        }
    }
}

/// NaN and infinity among the numbers do not concern the loader; the pass must come back with something.
#[test]
fn weights_of_nan_and_infinity() {
    for value in [f32::NAN, f32::INFINITY, f32::MAX] {
        let mut model = TestModel::qwen3(1);
        for tensor in &mut model.tensors {
            if let Some(first) = tensor.values.first_mut() {
                *first = value;
            }
        }
        let dir = model.write(Store::F32);
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let loaded = load(dir.str(), Some(dtype), 2);
            let logits = Driver::new(&loaded, 2).logits(&[0, 1, 2], usize::MAX);
            assert_eq!(logits.len(), 3 * 70);
        }
    }
}
