//! Matrices of tests/golden/quantised as operands: their packages' own tensors, in row-major order,
//! against what the same packages say that they stand for.

use crate::support::tensors::*;
use crate::support::Random;
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};
use xserv::ffi::*;

/// Module, out, in.
const MODULES: [(&str, usize, usize); 2] =
    [("model.layers.0.mlp.up_proj", 96, 64), ("model.layers.0.mlp.down_proj", 64, 96)];

/// The order in which AutoAWQ puts eight columns in a word.
const AWQ_NIBBLES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A tensor of a file.
struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Stored {
    fn find(file: &SafeTensors<'_>, module: &str, last: &str) -> Option<Self> {
        let view = file.tensor(&format!("{module}.{last}")).ok()?;
        let (dtype, shape) = (view.dtype(), view.shape().to_vec());
        Some(Stored { dtype, shape, bytes: view.data().to_vec() })
    }

    /// Four bytes.
    fn word(&self, row: usize, column: usize) -> u32 {
        let at = (row * self.shape[1] + column) * 4;
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    fn element(&self) -> Type {
        match self.dtype {
            Dtype::F32 => Type::F32,
            Dtype::F16 => Type::F16,
            Dtype::BF16 => Type::BF16,
            other => panic!("scales of {other:?}"),
        }
    }

    fn floats(&self) -> Vec<f64> {
        let element = self.element();
        self.bytes.chunks_exact(element.size()).map(|bytes| element.decode(bytes)).collect()
    }
}

/// A tensor as an operator takes it: the numbers in row-major order, and whether columns lie beside
/// each other in memory.
struct Part {
    element: Type,
    shape: [usize; 2],
    by_column: bool,
    values: Vec<f64>,
}

impl Part {
    fn new(element: Type, shape: [usize; 2], value: impl Fn(usize, usize) -> f64) -> Self {
        let places = (0..shape[0]).flat_map(|row| (0..shape[1]).map(move |column| (row, column)));
        let values = places.map(|(row, column)| value(row, column)).collect();
        Part { element, shape, by_column: false, values }
    }

    fn words(shape: [usize; 2], word: impl Fn(usize, usize) -> u32) -> Self {
        Part::new(Type::I32, shape, |row, column| f64::from(word(row, column) as i32))
    }

    fn by_column(self) -> Self {
        Part { by_column: true, ..self }
    }

    fn tensor<'a>(&self, context: &'a Context) -> TestTensor<'a> {
        let [rows, columns] = self.shape.map(|size| size as i64);
        let strides = if self.by_column { [1, rows] } else { [columns, 1] };
        let shape = [rows, columns];
        TestTensor::strided(context, self.element, &shape, &strides, 0, &self.values)
    }
}

/// A matrix as an operator takes it.
struct Operand {
    code: xserv_quant_code,
    group_rows: u32,
    group_size: u32,
    codes: Part,
    scales: Part,
    zeros: Option<Part>,
}

fn int_code(bits: usize) -> xserv_quant_code {
    match bits {
        4 => xserv_quant_code::XSERV_QUANT_INT4,
        8 => xserv_quant_code::XSERV_QUANT_INT8,
        _ => panic!("{bits} bits"),
    }
}

/// 0, which is all of a row, for -1.
fn group_size(config: &serde_json::Value) -> usize {
    config["group_size"].as_i64().unwrap().max(0) as usize
}

/// AWQ: words `[in, out / 8]`, which are packed again.
fn awq(file: &SafeTensors<'_>, module: &str, [out, inputs]: [usize; 2], group: usize) -> Operand {
    let [codes, zeros, scales] = ["qweight", "qzeros", "scales"]
        .map(|last| Stored::find(file, module, last).expect("a tensor"));
    let nibble = |tensor: &Stored, row: usize, column: usize| {
        tensor.word(row, column / 8) >> (4 * AWQ_NIBBLES[column % 8]) & 15
    };
    let word = |row: usize, word: usize| {
        (0..8).fold(0, |bits, i| bits | nibble(&codes, word * 8 + i, row) << (4 * i))
    };
    let (groups, numbers) = ([out, scales.shape[0]], scales.floats());
    Operand {
        code: int_code(4),
        group_rows: 1,
        group_size: group as u32,
        codes: Part::words([out, inputs / 8], word),
        scales: Part::new(scales.element(), groups, |row, group| numbers[group * out + row])
            .by_column(),
        zeros: Some(Part::words(groups, |row, group| nibble(&zeros, group, row))),
    }
}

/// GPTQ: words `[in * bits / 32, out]`, which are taken as they lie in the file.
fn gptq(
    file: &SafeTensors<'_>,
    module: &str,
    [out, inputs]: [usize; 2],
    group: usize,
    is_v2: bool,
) -> Operand {
    let [codes, zeros, scales] = ["qweight", "qzeros", "scales"]
        .map(|last| Stored::find(file, module, last).expect("a tensor"));
    let bits = codes.shape[0] * 32 / inputs;
    let per_word = 32 / bits;
    let (mask, one) = ((1 << bits) - 1, u32::from(!is_v2));
    let zero = |row: usize, group: usize| {
        ((zeros.word(group, row / per_word) >> (row % per_word * bits)) + one) & mask
    };
    let groups = scales.shape[0];
    let (element, numbers) = (scales.element(), scales.floats());
    let index = Stored::find(file, module, "g_idx");
    let group_of = |input: usize| match &index {
        Some(index) => {
            i32::from_le_bytes(index.bytes[input * 4..][..4].try_into().unwrap()) as usize
        }
        None => input / group.max(1),
    };
    let whole = if group == 0 { inputs } else { group };
    let is_scattered = (0..inputs).any(|input| group_of(input) != input / whole);
    // Groups that are scattered over the inputs become one for each input.
    let (group_size, shape) =
        if is_scattered { (1, [out, inputs]) } else { (group, [out, groups]) };
    let of = |place: usize| if is_scattered { group_of(place) } else { place };
    Operand {
        code: int_code(bits),
        group_rows: 1,
        group_size: group_size as u32,
        codes: Part::words([out, codes.shape[0]], |row, word| codes.word(word, row)).by_column(),
        scales: Part::new(element, shape, |row, place| numbers[of(place) * out + row]).by_column(),
        zeros: Some(Part::words(shape, |row, place| zero(row, of(place)))),
    }
}

/// compressed-tensors, pack-quantized: words `[out, in * bits / 32]`.
fn packed(file: &SafeTensors<'_>, module: &str, [out, inputs]: [usize; 2]) -> Operand {
    let [codes, scales] = ["weight_packed", "weight_scale"]
        .map(|last| Stored::find(file, module, last).expect("a tensor"));
    let zeros = Stored::find(file, module, "weight_zero_point");
    let bits = codes.shape[1] * 32 / inputs;
    let (per_word, mask) = (32 / bits, (1 << bits) - 1);
    let (groups, numbers) = ([out, scales.shape[1]], scales.floats());
    let zero = |zeros: Stored| {
        Part::words(groups, |row, group| {
            zeros.word(row / per_word, group) >> (row % per_word * bits) & mask
        })
    };
    Operand {
        code: int_code(bits),
        group_rows: 1,
        group_size: (inputs / groups[1]) as u32,
        codes: Part::words([out, codes.shape[1]], |row, word| codes.word(row, word)),
        scales: Part::new(scales.element(), groups, |row, group| numbers[row * groups[1] + group]),
        zeros: zeros.map(zero),
    }
}

/// Bytes `[out, in]`, integers with a sign or FP8, with scales for blocks, for rows or for all.
fn bytes(
    file: &SafeTensors<'_>,
    module: &str,
    [out, inputs]: [usize; 2],
    block: Option<[usize; 2]>,
) -> Operand {
    let codes = Stored::find(file, module, "weight").expect("a weight");
    let scales = ["weight_scale", "weight_scale_inv"]
        .into_iter()
        .find_map(|last| Stored::find(file, module, last))
        .expect("scales");
    let zeros = Stored::find(file, module, "weight_zero_point");
    let (code, flipped) = match codes.dtype {
        Dtype::F8_E4M3 => (xserv_quant_code::XSERV_QUANT_FP8, 0),
        Dtype::I8 => (xserv_quant_code::XSERV_QUANT_INT8, 0x8080_8080),
        other => panic!("a weight of {other:?}"),
    };
    let numbers = scales.floats();
    let (group_rows, group_size) = match (block, numbers.len()) {
        (Some([rows, columns]), _) => (rows, columns),
        (None, 1) => (out, 0),
        (None, _) => (1, 0),
    };
    let columns = if group_size == 0 { 1 } else { inputs.div_ceil(group_size) };
    let groups = [out.div_ceil(group_rows), columns];
    let word = |row: usize, word: usize| {
        let at = row * inputs + word * 4;
        u32::from_le_bytes(codes.bytes[at..at + 4].try_into().unwrap()) ^ flipped
    };
    Operand {
        code,
        group_rows: group_rows as u32,
        group_size: group_size as u32,
        codes: Part::words([out, inputs / 4], word),
        scales: Part::new(scales.element(), groups, |row, group| numbers[row * columns + group]),
        zeros: zeros.map(|zeros| {
            Part::words(groups, |row, group| u32::from(zeros.bytes[row * columns + group] ^ 0x80))
        }),
    }
}

fn block(config: &serde_json::Value) -> Option<[usize; 2]> {
    let own = &config["weight_block_size"];
    let group = &config["config_groups"]["group_0"]["weights"]["block_structure"];
    let sizes = own.as_array().or(group.as_array())?;
    Some([0, 1].map(|i| sizes[i].as_u64().unwrap() as usize))
}

fn operand(file: &SafeTensors<'_>, config: &serde_json::Value, module: usize) -> Operand {
    let (name, out, inputs) = MODULES[module];
    let sizes = [out, inputs];
    if Stored::find(file, name, "weight_packed").is_some() {
        return packed(file, name, sizes);
    }
    match Stored::find(file, name, "qweight") {
        Some(codes) if codes.shape[0] == inputs => awq(file, name, sizes, group_size(config)),
        Some(_) => {
            // auto-round's own layout has the zeros as they are, too.
            let is_v2 = config["checkpoint_format"] == "gptq_v2"
                || config["packing_format"] == "auto_round";
            gptq(file, name, sizes, group_size(config), is_v2)
        }
        None => bytes(file, name, sizes, block(config)),
    }
}

fn folders() -> Vec<PathBuf> {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/quantised");
    let entries = std::fs::read_dir(all).expect("the folder of golden data");
    let mut folders: Vec<PathBuf> =
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

#[test]
fn matrices_of_folders_are_what_their_writers_say() {
    let folders = folders();
    assert!(folders.len() >= 22, "{folders:?}");
    for context in contexts() {
        let mut random = Random::new(4);
        for folder in &folders {
            let read = |name: &str| std::fs::read(folder.join(name)).expect(name);
            let config: serde_json::Value = serde_json::from_slice(&read("config.json")).unwrap();
            let (file, expected) = (read("model.safetensors"), read("expected.safetensors"));
            let file = SafeTensors::deserialize(&file).expect("a file");
            let expected = SafeTensors::deserialize(&expected).expect("a file");
            for (module, (name, out, inputs)) in MODULES.into_iter().enumerate() {
                let what = format!("{}, {name} on {}", folder.display(), context.name);
                let operand = operand(&file, &config["quantization_config"], module);
                let want = Stored::find(&expected, name, "weight").expect("its numbers").floats();
                assert_eq!(want.len(), out * inputs, "{what}");
                compare_operand(&context, &operand, [out, inputs], &want, &mut random, &what);
            }
        }
    }
}

fn compare_operand(
    context: &Context,
    operand: &Operand,
    sizes: [usize; 2],
    want: &[f64],
    random: &mut Random,
    what: &str,
) {
    let [n, k] = sizes.map(|size| size as i64);
    let [codes, scales] = [&operand.codes, &operand.scales].map(|part| part.tensor(context));
    let zeros = operand.zeros.as_ref().map(|part| part.tensor(context));
    let (codes, scales) = (codes.view(), scales.view());
    let zeros = zeros.as_ref().map(TestTensor::view);
    let zeros = zeros.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let (code, rows, size) = (operand.code as u32, operand.group_rows, operand.group_size);
    let numbers = TestTensor::blank(context, Type::F32, &[n, k]);
    let c = context.handle;
    // SAFETY: live tensors of the context, or NULL.
    unsafe {
        ok(xserv_op_dequantise(c, code, rows, size, &codes, &scales, zeros, &numbers.view()));
    }
    for (place, (got, want)) in numbers.read(what).iter().zip(want).enumerate() {
        let [got_bits, want_bits] = [got, want].map(|&x| (x as f32).to_bits());
        assert_eq!(got_bits, want_bits, "{what}: [{place}] is {got}, not {want}");
    }

    let tokens = 3;
    let x = Type::F32.round_all(&random.normals(tokens * k as usize));
    let given = TestTensor::new(context, Type::F32, &[tokens as i64, k], &x);
    let product = TestTensor::blank(context, Type::F32, &[tokens as i64, n]);
    let null = std::ptr::null();
    // SAFETY: as before.
    unsafe {
        ok(xserv_op_linear_quantised(
            c,
            &given.view(),
            code,
            rows,
            size,
            &codes,
            &scales,
            zeros,
            null,
            &product.view(),
        ));
    }
    let width = k as usize;
    let products = x.chunks_exact(width).flat_map(|x| {
        want.chunks_exact(width).map(move |w| {
            x.iter()
                .zip(w)
                .fold((0.0, 0.0), |(sum, size), (x, w)| (sum + x * w, size + (x * w).abs()))
        })
    });
    for (got, (sum, size)) in product.read(what).iter().zip(products) {
        // The CPU rounds activations to 16 bits.
        assert!((got - sum).abs() <= 3e-4 * size, "{what}: {got}, not {sum}");
    }
}
