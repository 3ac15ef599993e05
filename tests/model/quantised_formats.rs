//! Quantised modules as the formats' own packages wrote them (tests/golden/quantised), and files
//! that are wrong: each is refused with a sentence that names the tensor or the key.

use serde_json::json;
use xserv::error::ErrorKind;
use xserv::memory::DType;
use xserv::model::quantised::{is_harmless, QuantModule};
use xserv::ops::quantised::{Code, QuantFormat, QuantisedMatrix};

use crate::files::Random;
use crate::golden;
use crate::quantised::{cases, Case, Opened, Stored, MODULES, UP};

#[track_caller]
fn assert_is(matrix: &QuantisedMatrix, expected: &[f32], what: &str) {
    let mut row = vec![0.0; matrix.in_features];
    for (index, expected) in expected.chunks_exact(matrix.in_features).enumerate() {
        matrix.row_to_f32(index, &mut row).expect("a row");
        let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&row), bits(expected), "{what}: row {index}");
    }
}

#[test]
fn all_formats_are_what_their_writers_say() {
    let int4 = |group_size, has_zeros, scale| QuantFormat {
        code: Code::Int4,
        group_size,
        has_zeros,
        scale,
        quantises_inputs: false,
    };
    let int8 = |group_size, has_zeros, scale| QuantFormat {
        code: Code::Int8,
        group_size,
        has_zeros,
        scale,
        quantises_inputs: false,
    };
    // Activations are quantised as the config says, but not with a scale for fewer inputs than 128 and than a row.
    let fp8 = |group_size, scale, quantises_inputs| QuantFormat {
        code: Code::Fp8,
        group_size,
        has_zeros: false,
        scale,
        quantises_inputs,
    };
    use DType::{BF16, F16, F32};
    // The formats of up_proj, which has 64 inputs.
    let expected = [
        ("auto-round", int4(32, true, F16)),
        ("auto-round-awq", int4(32, true, F16)),
        ("auto-round-gptq", int4(32, false, F16)),
        ("awq", int4(32, true, F16)),
        ("awq-rows", int4(64, true, F16)),
        ("fp8-block", fp8(32, BF16, false)),
        ("fp8-blocks", fp8(32, BF16, false)),
        ("fp8-dynamic", fp8(64, BF16, false)),
        ("fp8-partial-blocks", fp8(40, F32, false)),
        ("fp8-static", fp8(64, F32, false)),
        ("fp8-tensor", fp8(64, F32, true)),
        ("gptq-desc-act", int4(32, true, F16)),
        ("gptq-desc-act-8-bits", int8(48, false, F16)),
        ("gptq-partial-group", int4(40, true, F16)),
        ("gptq-v1", int4(32, true, F16)),
        ("gptq-v1-symmetric", int4(64, false, F16)),
        ("gptq-v2-8-bits", int8(32, true, F16)),
        ("w4a16", int4(32, false, BF16)),
        ("w4a16-asymmetric", int4(16, true, F16)),
        ("w8a16", int8(64, false, F32)),
        ("w8a8", int8(64, false, BF16)),
        ("w8a8-asymmetric", int8(64, true, BF16)),
    ];
    for (name, format) in expected {
        let path = cases().join(name);
        let opened = Opened::new(&path).expect("a good folder");
        let reference = golden::tensors(&path.join("expected.safetensors"));
        let mut names = Vec::new();
        for module in MODULES {
            let found = opened.find(module).expect("a good module").expect("a quantised module");
            if module.0 == UP {
                assert_eq!(found.format, format, "{name}");
            }
            let bytes: u64 = found.tensors().map(|tensor| tensor.len_bytes).sum();
            assert_eq!(found.stored_bytes(), bytes);
            names.extend(found.tensor_names().map(str::to_owned));
            let matrix = found.decode(|tensor| opened.bytes(tensor)).expect("a good module");
            assert_eq!(matrix.order.is_empty(), !name.contains("desc-act"), "{name}");
            let weight = &reference[&format!("{}.weight", module.0)].f32s;
            assert_eq!(weight.len(), module.1 * module.2);
            assert_is(&matrix, weight, name);
            assert_eq!(in_parts(&found, &opened), matrix, "{name}");
        }
        names.sort();
        let mut all: Vec<&String> = opened.checkpoint.tensors.keys().collect();
        all.sort();
        assert!(names.iter().eq(all), "{name}: {names:?}");
    }
}

/// Decodes a module by parts of its rows.
fn in_parts(module: &QuantModule, opened: &Opened) -> QuantisedMatrix {
    let bytes = module.bytes(|tensor| opened.bytes(tensor)).expect("good bytes");
    let (out, inputs) = (module.out_features, module.in_features);
    let mut matrix = QuantisedMatrix::empty(out, inputs, module.format).expect("memory");
    let (groups, row_bytes) = (matrix.num_groups(), module.format.code.row_bytes(inputs));
    for (first, last) in [(40, 56), (0, 8), (8, 40), (56, out), (16, 16)] {
        let zeros = if module.format.has_zeros { first * groups..last * groups } else { 0..0 };
        module
            .decode_rows(
                &bytes,
                first..last,
                &mut matrix.codes[first * row_bytes..last * row_bytes],
                &mut matrix.scales[first * groups..last * groups],
                &mut matrix.zeros[zeros],
            )
            .expect("good rows");
    }
    matrix.order = bytes.order;
    matrix
}

#[test]
fn rows_that_a_caller_may_not_ask_for() {
    let opened = Opened::new(&cases().join("awq")).expect("a good folder");
    let module = opened.find(MODULES[0]).expect("a good module").expect("a quantised module");
    let bytes = module.bytes(|tensor| opened.bytes(tensor)).expect("good bytes");
    for (rows, num_codes) in [(4..8, 128), (0..4, 128), (0..8, 255), (96..104, 256), (0..104, 3328)]
    {
        let len = rows.len() * 2;
        let (mut codes, mut scales, mut zeros) = (vec![0; num_codes], vec![0.0; len], vec![0; len]);
        let error = module
            .decode_rows(&bytes, rows, &mut codes, &mut scales, &mut zeros)
            .expect_err("must be refused");
        assert_eq!(error.kind(), ErrorKind::Internal, "{error}");
    }
    let error = module.bytes(|_| Ok(&[0; 3])).expect_err("must be refused");
    assert_eq!(error.kind(), ErrorKind::Internal, "{error}");
}

const NAN_F16: [u8; 2] = [0x00, 0x7e];
const INF_F16: [u8; 2] = [0x00, 0x7c];
const INF_BF16: [u8; 2] = [0x80, 0xff];

#[test]
fn shapes_that_are_not_those_of_the_config() {
    let read = Case::read;
    for name in ["awq", "gptq-v1"] {
        let codes = &read(name).tensor("qweight").shape.clone();
        let [rows, columns] = codes[..] else { panic!("{codes:?}") };
        for shape in [
            vec![rows - 1, columns],
            vec![rows, columns + 1],
            vec![columns, rows],
            vec![rows * columns],
        ] {
            read(name).reshaped("qweight", &shape).refused("qweight", &["expected", "96 x 64"]);
        }
        for shape in [[1, 96], [2, 95], [3, 96], [96, 2]] {
            read(name).reshaped("scales", &shape).refused("scales", &["shape", "expected [2, 96]"]);
        }
        for shape in [[1, 12], [2, 11], [2, 96]] {
            read(name).reshaped("qzeros", &shape).refused("qzeros", &["shape", "expected [2, 12]"]);
        }
        read(name).say("group_size", json!(16)).refused("scales", &["expected [4, 96]"]);
        read(name).say("group_size", json!(-1)).refused("scales", &["expected [1, 96]"]);
    }
    read("awq").say("group_size", json!(48)).refused("qweight", &["groups of 48"]);
    read("awq").say("group_size", json!(128)).refused("qweight", &["groups of 128"]);
    read("gptq-v1").say("bits", json!(8)).refused("qweight", &["expected [16, 96]"]);
    for shape in [vec![63], vec![65], vec![64, 1], vec![8, 8]] {
        read("gptq-v1").reshaped("g_idx", &shape).refused("g_idx", &["expected [64]"]);
    }
    read("w4a16")
        .reshaped("weight_packed", &[96, 7])
        .refused("weight_packed", &["expected [96, 8]"]);
    read("w4a16").reshaped("weight_scale", &[96, 1]).refused("weight_scale", &["expected [96, 2]"]);
    read("w4a16").reshaped("weight_scale", &[2, 96]).refused("weight_scale", &["expected [96, 2]"]);
    read("w4a16").reshaped("weight_shape", &[3]).refused("weight_shape", &["expected [2]"]);
    for (at, wrong) in [(0, 64_i64), (8, 65), (8, -1), (0, i64::MAX)] {
        let case = read("w4a16").patched("weight_shape", at, &wrong.to_le_bytes());
        case.refused("weight_shape", &["expected [96, 64]", &wrong.to_string()]);
    }
    let zeros = read("w4a16-asymmetric").reshaped("weight_zero_point", &[96, 4]);
    zeros.refused("weight_zero_point", &["expected [12, 4]"]);
    read("w8a8").reshaped("weight", &[96, 63]).refused("weight", &["expected [96, 64]"]);
    read("w8a8").reshaped("weight_scale", &[95, 1]).refused("weight_scale", &["expected [96, 1]"]);
    let zeros = read("w8a8-asymmetric").reshaped("weight_zero_point", &[1, 96]);
    zeros.refused("weight_zero_point", &["expected [96, 1]"]);
    for shape in [vec![2, 2], vec![3, 3], vec![6], vec![2, 3]] {
        let case = read("fp8-blocks").reshaped("weight_scale_inv", &shape);
        case.refused("weight_scale_inv", &["expected [3, 2]"]);
    }
    for block in [json!([128, 128]), json!([32, 64]), json!([1, 1])] {
        let case = read("fp8-blocks").say("weight_block_size", block);
        case.refused("weight_scale_inv", &["expected"]);
    }
    read("fp8-blocks")
        .say("weight_block_size", json!(null))
        .refused("weight_scale_inv", &["expected [96, 1]"]);
    read("fp8-static").reshaped("weight_scale", &[2]).refused("weight_scale", &["expected [1]"]);
    read("fp8-tensor")
        .reshaped("weight_scale_inv", &[2])
        .refused("weight_scale_inv", &["expected"]);
    // Rows may each have a scale, or each one of a list.
    read("fp8-dynamic").reshaped("weight_scale", &[96]).is_good();
}

#[test]
fn types_that_are_not_those_of_the_format() {
    for (name, last, dtype) in [
        ("awq", "qweight", "F32"),
        ("awq", "qzeros", "U32"),
        ("gptq-v1", "qweight", "F32"),
        ("gptq-v1", "g_idx", "F32"),
        ("gptq-v1", "scales", "I16"),
        ("w4a16", "weight_packed", "F32"),
        ("w4a16", "weight_scale", "U16"),
        ("w4a16", "weight_shape", "F64"),
        ("w4a16-asymmetric", "weight_zero_point", "U32"),
        ("w8a8", "weight", "U8"),
        ("w8a8", "weight", "F8_E4M3"),
        ("w8a8-asymmetric", "weight_zero_point", "U8"),
        ("fp8-blocks", "weight", "F8_E5M2"),
        ("fp8-blocks", "weight", "I8"),
        ("fp8-blocks", "weight_scale_inv", "I16"),
    ] {
        let mut case = Case::read(name);
        case.tensor(last).dtype = dtype.to_owned();
        case.refused(last, &["element type", dtype, "expected"]);
    }
    let exponents =
        Case::read("fp8-blocks").with("weight_scale_inv", "F8_E8M0", &[3, 2], &[127; 6]);
    exponents.refused("weight_scale_inv", &["F8_E8M0", "expected F32 or F16 or BF16"]);
}

#[test]
fn modules_of_both_forms_and_of_none() {
    let whole = vec![0; 96 * 64 * 2];
    let dense = |case: Case, dtype: &str| case.with("weight", dtype, &[96, 64], &whole);
    for name in ["awq", "gptq-v1", "w4a16"] {
        dense(Case::read(name), "F16").refused("weight", &["F16", "as well"]);
    }
    // One that is quantised twice.
    let twice = Case::read("awq").with("weight", "I8", &[96, 64], &whole[..96 * 64]);
    twice.refused("weight", &["not of the form", "qweight"]);
    let twice = Case::read("fp8-blocks").with("weight_packed", "I32", &[1], &[0; 4]);
    twice.refused("weight_packed", &["not of the form"]);
    let twice = Case::read("fp8-blocks").with("weight_scale", "F32", &[1], &[0; 4]);
    twice.refused("weight_scale", &["not of the form"]);
    let third = Case::read("fp8-static").with("weight_scale_2", "F32", &[1], &[0; 4]);
    third.refused("weight_scale_2", &["not of the form"]);
    // A whole weight whose scale stayed behind.
    let mut left = Case::read("fp8-dynamic");
    *left.tensor("weight") =
        Stored { dtype: "BF16".to_owned(), shape: vec![96, 64], bytes: whole.clone() };
    left.refused("weight", &["BF16", "weight_scale"]);

    for (name, tensors) in [
        ("awq", ["qweight", "qzeros", "scales"].as_slice()),
        ("gptq-v1", &["qweight", "qzeros", "scales"]),
        ("gptq-desc-act", &["qweight", "qzeros", "scales", "g_idx"]),
        ("w4a16-asymmetric", &["weight_packed", "weight_scale", "weight_zero_point"]),
        ("w8a8", &["weight", "weight_scale"]),
        ("w8a8-asymmetric", &["weight", "weight_zero_point"]),
        ("fp8-blocks", &["weight", "weight_scale_inv"]),
        ("fp8-dynamic", &["weight", "weight_scale"]),
    ] {
        let mut none = Case::read(name);
        for last in tensors {
            Case::read(name).without(last).refused(last, &["missing"]);
        }
        none.tensors.retain(|tensor, _| !tensor.starts_with(UP));
        none.refused(tensors[0], &["missing"]);
        // The weight alone is whole: taken for what it is, unless the config names all that are quantised.
        let whole = dense(none, "BF16");
        if whole.config["quantization_config"]["quant_method"] == "compressed-tensors" {
            whole.refused("weight", &["BF16", "config.json", "quantised"]);
        } else {
            whole.is_dense();
        }
    }
    // These tensors may be missing.
    Case::read("gptq-v1").without("g_idx").is_good();
    Case::read("gptq-v1-symmetric").without("qzeros").is_good();
    Case::read("w4a16").without("weight_shape").is_good();
}

#[test]
fn configs_that_leave_out_what_the_file_has_quantised() {
    let skipped = json!(["up_proj"]);
    let case = Case::read("awq").say("modules_to_not_convert", skipped.clone());
    case.refused("qweight", &["not quantised", "config.json"]);
    let case = Case::read("fp8-blocks").say("modules_to_not_convert", skipped);
    case.refused("weight_scale_inv", &["not quantised", "config.json"]);
    let case = Case::read("gptq-v1").say("dynamic", json!({"-:.*up_proj": {}}));
    case.refused("qweight", &["not quantised", "config.json"]);
    let case = Case::read("w4a16").say("ignore", json!(["re:.*up_proj"]));
    case.refused("weight_packed", &["not quantised", "config.json"]);
    // A weight in FP8 without a scale, which nothing says is quantised.
    let case = Case::read("fp8-dynamic").say("ignore", json!([UP])).without("weight_scale");
    case.refused("weight", &["not quantised"]);
    // Other modules may be whole.
    let mut dense = Case::read("w4a16").say("ignore", json!([UP]));
    dense.tensors.retain(|tensor, _| !tensor.starts_with(UP));
    dense.is_dense();
    dense.with("weight", "BF16", &[96, 64], &vec![0; 96 * 64 * 2]).is_dense();
    // Configs of other methods.
    let other = json!({"quant_method": "awq", "bits": 4, "group_size": 32});
    let mut case = Case::read("gptq-v1");
    case.config["quantization_config"] = other;
    case.refused("qweight", &["shape [8, 96]", "expected [64, 12]"]);
    let mut case = Case::read("fp8-blocks");
    case.config["quantization_config"]["quant_method"] = json!("mxfp4");
    let error = case.decode().expect_err("must be refused");
    assert!(error.message().contains("quant_method \"mxfp4\""), "{error}");
}

#[test]
fn scales_that_are_no_numbers() {
    let read = Case::read;
    read("awq").patched("scales", 2 * (96 + 5), &NAN_F16).refused("scales", &["NaN", "[1, 5]"]);
    read("gptq-v1").patched("scales", 0, &INF_F16).refused("scales", &["inf", "[0, 0]"]);
    read("w4a16")
        .patched("weight_scale", 2 * 7, &INF_BF16)
        .refused("weight_scale", &["-inf", "[3, 1]"]);
    let last = 4 * 95;
    read("w8a16")
        .patched("weight_scale", last, &f32::NAN.to_le_bytes())
        .refused("weight_scale", &["NaN", "[95, 0]"]);
    read("fp8-blocks")
        .patched("weight_scale_inv", 10, &INF_BF16)
        .refused("weight_scale_inv", &["-inf", "[2, 1]"]);
    read("fp8-tensor")
        .patched("weight_scale_inv", 0, &f32::INFINITY.to_le_bytes())
        .refused("weight_scale_inv", &["inf"]);
    for code in [0x7f_u8, 0xff] {
        read("fp8-dynamic")
            .patched("weight", 64 * 40 + 9, &[code])
            .refused("weight", &["NaN", "[40, 9]"]);
    }
    // A group of zeros, or one turned round.
    for scale in [[0, 0], [0, 0xbc]] {
        let matrix = read("gptq-v1").patched("scales", 0, &scale).is_good();
        assert_eq!(matrix.group(0, 0).0, half::f16::from_le_bytes(scale).to_f32());
    }
}

#[test]
fn groups_and_zeros_that_are_none() {
    let read = Case::read;
    for (name, input, wrong) in [
        ("gptq-v1", 63, 2_i32),
        ("gptq-v1", 0, -1),
        ("gptq-desc-act", 7, i32::MAX),
        ("gptq-desc-act", 7, i32::MIN),
    ] {
        let case = read(name).patched("g_idx", 4 * input, &wrong.to_le_bytes());
        case.refused("g_idx", &[&format!("input {input} into group {wrong}"), "expected 0 to 1"]);
    }
    // Scattered although the config says that they are not.
    let case = read("gptq-desc-act").say("desc_act", json!(false));
    case.refused("g_idx", &["desc_act"]);
    // More inputs in a group than there is room for.
    let mut case = read("gptq-desc-act");
    let first: [u8; 4] = case.tensor("g_idx").bytes[..4].try_into().expect("a number");
    let other = 1 - i32::from_le_bytes(first);
    case = case.patched("g_idx", 0, &other.to_le_bytes());
    case.refused("g_idx", &["inputs into group 0", "expected 32"]);
    // Zeros that belie the config.
    let case = read("gptq-v1-symmetric").patched("qzeros", 4 * 2, &[0x78]);
    case.refused("qzeros", &["output 16, group 0: 9"]);
    read("gptq-v1").say("sym", json!(true)).refused("qzeros", &["symmetric"]);
    read("awq").say("zero_point", json!(false)).refused("qzeros", &["symmetric"]);
    let even = read("w8a8").with("weight_zero_point", "I8", &[96, 1], &[0; 96]);
    even.is_good();
    even.patched("weight_zero_point", 9, &[1]).refused("weight_zero_point", &["byte 9"]);
    let even = read("w4a16").with("weight_zero_point", "I32", &[12, 2], &[0x88; 96]);
    even.is_good();
    even.patched("weight_zero_point", 9, &[0x78]).refused("weight_zero_point", &["symmetric"]);
}

/// The two versions of GPTQ differ in the zeros alone, by one, modulo 16.
#[test]
fn zeros_of_both_versions_of_gptq() {
    let first = Case::read("gptq-v1").patched("qzeros", 0, &[0xf7]).is_good();
    let second = Case::read("gptq-v1")
        .patched("qzeros", 0, &[0xf7])
        .say("checkpoint_format", json!("gptq_v2"))
        .is_good();
    assert_eq!(first.codes, second.codes);
    assert_eq!((first.group(0, 0).1, first.group(1, 0).1), (8, 0));
    assert_eq!((second.group(0, 0).1, second.group(1, 0).1), (7, 15));
    let less_one: Vec<u8> = first.zeros.iter().map(|zero| zero.wrapping_sub(1) & 15).collect();
    assert_eq!(less_one, second.zeros);
}

/// Older compressed-tensors scatters groups; the writer of today does not.
#[test]
fn groups_of_compressed_tensors() {
    let plain = Case::read("w4a16").is_good();
    let places = |group: &dyn Fn(i32) -> i32| -> Vec<u8> {
        (0..64).flat_map(|input| group(input).to_le_bytes()).collect()
    };
    for group in [&|_| -1, &|input| input / 32] as [&dyn Fn(i32) -> i32; 2] {
        let case = Case::read("w4a16").with("weight_g_idx", "I32", &[64], &places(group));
        assert_eq!(case.is_good(), plain);
    }
    let odd = Case::read("w4a16").with("weight_g_idx", "I32", &[64], &places(&|input| input % 2));
    let scattered = odd.is_good();
    let order: Vec<u32> = (0..32).map(|i| 2 * i).chain((0..32).map(|i| 2 * i + 1)).collect();
    assert_eq!(scattered.order, order);
    let mut row = vec![0.0; 64];
    for index in 0..96 {
        scattered.row_to_f32(index, &mut row).expect("a row");
        for (input, &value) in row.iter().enumerate() {
            let (scale, zero) = plain.group(index, input % 2);
            let code = f32::from(plain.code(index, input)) - f32::from(zero);
            assert_eq!(value, code * scale);
        }
    }
    let wrong = Case::read("w4a16").with("weight_g_idx", "I32", &[64], &places(&|input| input));
    wrong.refused("weight_g_idx", &["input 2 into group 2"]);
}

#[test]
fn tensors_that_say_nothing_of_weights() {
    let case = Case::read("fp8-static").with("input_scale", "F32", &[1], &[0; 4]).with(
        "k_scale",
        "F32",
        &[],
        &[0; 4],
    );
    case.is_good();
    for name in ["model.layers.0.self_attn.k_scale", "a.input_scale", "a.activation_scale"] {
        assert!(is_harmless(name), "{name}");
    }
    for name in ["a.weight_scale", "a.scales", "input_scale", "a.bias"] {
        assert!(!is_harmless(name), "{name}");
    }
}

/// Any bytes and any lengths end in a matrix or in an error.
#[test]
fn random_damage() {
    let mut random = Random(7);
    for name in [
        "awq",
        "gptq-desc-act",
        "gptq-partial-group",
        "w4a16-asymmetric",
        "w8a8",
        "fp8-partial-blocks",
    ] {
        for _ in 0..60 {
            let mut case = Case::read(name);
            let names: Vec<String> =
                case.tensors.keys().filter(|name| name.starts_with(UP)).cloned().collect();
            let last =
                names[random.below(names.len())].rsplit('.').next().expect("a part").to_owned();
            let len = case.tensor(&last).bytes.len();
            match random.below(3) {
                0 => {
                    let shape = vec![random.below(100), random.below(100)];
                    case = case.reshaped(&last, &shape);
                }
                1 => drop(case.tensors.remove(&format!("{UP}.{last}"))),
                _ => {
                    for _ in 0..1 + random.below(8) {
                        let byte = random.next() as u8;
                        case = case.patched(&last, random.below(len), &[byte]);
                    }
                }
            }
            if let Err(error) = case.decode() {
                assert!(error.message().contains(UP), "{error}");
                assert_ne!(error.kind(), ErrorKind::Internal, "{error}");
            }
        }
    }
}
