//! Whole models with quantised linear layers, packed here as the formats are described and not as the library
//! reads them; and beside each the same model with every number written out.

#![allow(dead_code)] // each test binary uses its part

use serde_json::{json, Map, Value};

use crate::files::{raw_safetensors, Random, Store, TempDir, TestModel, TestTensor};
use crate::quantised::Stored;

/// The output matrix.
pub const OUTPUT: &str = "lm_head";

/// The form in which the weight of a linear layer is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    /// 4 bits with zeros.
    Awq { group: usize },
    /// 4 bits without zeros. Scattered: `g_idx` is any, and that of layers with the same inputs is the same.
    Gptq { group: usize, scattered: bool },
    /// e4m3 with a scale for 128 x 128 numbers in `weight_scale_inv`.
    Fp8Blocks,
    /// e4m3 with a scale for so many rows and inputs, or the whole of them, in `weight_scale`.
    Fp8 { block: [usize; 2] },
    /// `weight_packed`.
    Packed { bits: usize, group: usize, symmetric: bool },
    /// Bytes with a sign and a scale for each row.
    Int8Channel,
}

/// A quantised model, and the same as f32.
pub struct Folders {
    pub quantised: TempDir,
    pub dense: TempDir,
}

/// Returns the bytes of a model's one file.
pub fn file_bytes(tensors: &[(String, Stored)]) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, tensor) in tensors {
        let begin = data.len();
        data.extend(&tensor.bytes);
        header.insert(
            name.clone(),
            json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, data.len()]}),
        );
    }
    raw_safetensors(&Value::Object(header).to_string(), &data)
}

/// Returns the name of a linear layer, of a block or the output matrix, of which a tensor is the
/// weight.
fn linear_layer(name: &str) -> Option<&str> {
    let layer = name.strip_suffix(".weight")?;
    (layer.ends_with("_proj") || layer == OUTPUT).then_some(layer)
}

/// Stores the layers that `form_of` has a form for, and all other numbers as bf16.
pub fn stored(
    model: &TestModel,
    form_of: &dyn Fn(&str) -> Option<Form>,
) -> (Vec<(String, Stored)>, TestModel) {
    let mut dense = model.clone();
    let mut all = Vec::new();
    for tensor in &mut dense.tensors {
        match linear_layer(&tensor.name).and_then(|layer| Some((layer, form_of(layer)?))) {
            Some((layer, form)) => {
                let (tensors, values) = pack(form, layer, &tensor.shape, &tensor.values);
                all.extend(tensors.into_iter().map(|(last, t)| (format!("{layer}.{last}"), t)));
                tensor.values = values;
            }
            None => {
                let bytes = Store::BF16.bytes(&tensor.values);
                tensor.values.iter_mut().for_each(|x| *x = half::bf16::from_f32(*x).to_f32());
                all.push((tensor.name.clone(), new("BF16", &tensor.shape, bytes)));
            }
        }
    }
    (all, dense)
}

/// Writes both folders.
pub fn folders(
    model: &TestModel,
    quantization_config: Value,
    form_of: &dyn Fn(&str) -> Option<Form>,
) -> Folders {
    let (tensors, dense) = stored(model, form_of);
    let quantised = TempDir::new();
    let mut config = model.config.clone();
    config["quantization_config"] = quantization_config;
    quantised.write("config.json", config.to_string());
    quantised.write("model.safetensors", file_bytes(&tensors));
    Folders { quantised, dense: dense.write(Store::F32) }
}

fn new(dtype: &str, shape: &[usize], bytes: Vec<u8>) -> Stored {
    Stored { dtype: dtype.to_owned(), shape: shape.to_vec(), bytes }
}

/// Returns the tensors of a layer, after the last dot of their names, and the numbers that they
/// stand for.
fn pack(
    form: Form,
    layer: &str,
    shape: &[usize],
    values: &[f32],
) -> (Vec<(&'static str, Stored)>, Vec<f32>) {
    let (out, inputs) = (shape[0], shape[1]);
    match form {
        Form::Awq { group } => {
            let made = Integers::new(values, inputs, in_order(inputs, group), 4, Store::F16, true);
            // The column that each half byte of a word is of.
            let columns = [0, 2, 4, 6, 1, 3, 5, 7];
            let codes = words(inputs, out / 8, 4, &|i, word, place| {
                made.code(8 * word + columns[place], i)
            });
            let zeros = words(made.groups, out / 8, 4, &|group, word, place| {
                made.zero(8 * word + columns[place], group)
            });
            let tensors = vec![
                ("qweight", new("I32", &[inputs, out / 8], codes)),
                ("qzeros", new("I32", &[made.groups, out / 8], zeros)),
                ("scales", made.scales_by_input(Store::F16)),
            ];
            (tensors, made.values())
        }
        Form::Gptq { group, scattered } => {
            let group_of = match scattered {
                true => shuffled(layer, inputs).into_iter().map(|place| place / group).collect(),
                false => in_order(inputs, group),
            };
            let made = Integers::new(values, inputs, group_of, 4, Store::F16, false);
            let codes = words(inputs / 8, out, 4, &|row, o, place| made.code(o, 8 * row + place));
            // Zeros are stored less one.
            let zeros = words(made.groups, out / 8, 4, &|group, word, place| {
                made.zero(8 * word + place, group) - 1
            });
            let group_of: Vec<u8> =
                made.group_of.iter().flat_map(|&group| (group as i32).to_le_bytes()).collect();
            let tensors = vec![
                ("qweight", new("I32", &[inputs / 8, out], codes)),
                ("qzeros", new("I32", &[made.groups, out / 8], zeros)),
                ("scales", made.scales_by_input(Store::F16)),
                ("g_idx", new("I32", &[inputs], group_of)),
            ];
            (tensors, made.values())
        }
        Form::Packed { bits, group, symmetric } => {
            let group_of = in_order(inputs, group);
            let made = Integers::new(values, inputs, group_of, bits, Store::BF16, !symmetric);
            let per_word = 32 / bits;
            let code = |o: usize, word: usize, place| {
                let input = per_word * word + place;
                if input < inputs {
                    made.code(o, input)
                } else {
                    0
                }
            };
            let num_words = inputs.div_ceil(per_word);
            let shape = [out, inputs].iter().flat_map(|&n| (n as i64).to_le_bytes()).collect();
            let scales = Store::BF16.bytes(&made.scales);
            let mut tensors = vec![
                (
                    "weight_packed",
                    new("I32", &[out, num_words], words(out, num_words, bits, &code)),
                ),
                ("weight_scale", new("BF16", &[out, made.groups], scales)),
                ("weight_shape", new("I64", &[2], shape)),
            ];
            if !symmetric {
                let num_words = out.div_ceil(per_word);
                let zeros = words(num_words, made.groups, bits, &|word, group, place| {
                    let row = per_word * word + place;
                    if row < out {
                        made.zero(row, group)
                    } else {
                        0
                    }
                });
                tensors.push(("weight_zero_point", new("I32", &[num_words, made.groups], zeros)));
            }
            (tensors, made.values())
        }
        Form::Int8Channel => {
            let group_of = in_order(inputs, inputs);
            let made = Integers::new(values, inputs, group_of, 8, Store::BF16, false);
            let codes =
                made.codes.iter().map(|&code| (i32::from(code) - 128) as i8 as u8).collect();
            let tensors = vec![
                ("weight", new("I8", &[out, inputs], codes)),
                ("weight_scale", new("BF16", &[out, 1], Store::BF16.bytes(&made.scales))),
            ];
            (tensors, made.values())
        }
        Form::Fp8Blocks => fp8("weight_scale_inv", [128, 128], out, inputs, values),
        Form::Fp8 { block } => fp8("weight_scale", block, out, inputs, values),
    }
}

fn in_order(inputs: usize, group: usize) -> Vec<usize> {
    (0..inputs).map(|input| input / group).collect()
}

/// Returns the places of inputs in any order, which is one for all layers that have the same
/// inputs.
fn shuffled(layer: &str, inputs: usize) -> Vec<usize> {
    let block = layer.rsplit_once('.').map_or(layer, |(block, _)| block);
    let seed =
        block.bytes().fold(inputs as u64, |seed, byte| seed.wrapping_mul(31) + u64::from(byte));
    let mut random = Random(seed);
    let mut places: Vec<usize> = (0..inputs).collect();
    for last in (1..inputs).rev() {
        places.swap(last, random.below(last + 1));
    }
    places
}

/// Little-endian words `[rows, columns]`, `code(row, column, place)` at each place from the lowest bits on.
fn words(
    rows: usize,
    columns: usize,
    bits: usize,
    code: &dyn Fn(usize, usize, usize) -> u8,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    for row in 0..rows {
        for column in 0..columns {
            let word = (0..32 / bits).fold(0_u32, |word, place| {
                word | u32::from(code(row, column, place)) << (place * bits)
            });
            bytes.extend(word.to_le_bytes());
        }
    }
    bytes
}

/// Integers from 0 on with a scale and a zero for each group of a row.
struct Integers {
    out: usize,
    inputs: usize,
    groups: usize,
    /// The group of each input.
    group_of: Vec<usize>,
    /// `[out, inputs]`
    codes: Vec<u8>,
    /// `[out, groups]`
    scales: Vec<f32>,
    /// `[out, groups]`
    zeros: Vec<u8>,
}

impl Integers {
    /// Rounds numbers to the nearest code, with scales that `store` holds.
    fn new(
        values: &[f32],
        inputs: usize,
        group_of: Vec<usize>,
        bits: usize,
        store: Store,
        with_zeros: bool,
    ) -> Self {
        let groups = group_of.iter().max().expect("inputs") + 1;
        let out = values.len() / inputs;
        let (most, middle) = (((1 << bits) - 1) as f32, (1 << (bits - 1)) as f32);
        let (mut codes, mut scales, mut zeros) = (vec![], vec![], vec![]);
        for row in values.chunks(inputs) {
            let mut ranges = vec![(0.0_f32, 0.0_f32); groups];
            for (&x, &group) in row.iter().zip(&group_of) {
                let (low, high) = &mut ranges[group];
                (*low, *high) = (low.min(x), high.max(x));
            }
            let grid: Vec<(f32, f32)> = ranges
                .iter()
                .map(|&(low, high)| {
                    let width = if with_zeros {
                        (high - low) / most
                    } else {
                        high.max(-low) / (middle - 1.0)
                    };
                    let scale = rounded(width.max(1e-6), store);
                    let zero = if with_zeros { (-low / scale).round().min(most) } else { middle };
                    (scale, zero)
                })
                .collect();
            for (&x, &group) in row.iter().zip(&group_of) {
                let (scale, zero) = grid[group];
                codes.push(((x / scale).round() + zero).clamp(0.0, most) as u8);
            }
            scales.extend(grid.iter().map(|(scale, _)| scale));
            zeros.extend(grid.iter().map(|(_, zero)| *zero as u8));
        }
        Integers { out, inputs, groups, group_of, codes, scales, zeros }
    }

    fn code(&self, row: usize, input: usize) -> u8 {
        self.codes[row * self.inputs + input]
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        self.zeros[row * self.groups + group]
    }

    fn scales_by_input(&self, store: Store) -> Stored {
        let at = |group: usize, row: usize| self.scales[row * self.groups + group];
        let scales: Vec<f32> = (0..self.groups)
            .flat_map(|group| (0..self.out).map(move |row| at(group, row)))
            .collect();
        new(store.name(), &[self.groups, self.out], store.bytes(&scales))
    }

    /// Returns the values that the codes stand for.
    fn values(&self) -> Vec<f32> {
        let number = |row: usize, input: usize| {
            let group = self.group_of[input];
            let steps = f32::from(self.code(row, input)) - f32::from(self.zero(row, group));
            steps * self.scales[row * self.groups + group]
        };
        (0..self.out)
            .flat_map(|row| (0..self.inputs).map(move |input| (row, input)))
            .map(|(row, input)| number(row, input))
            .collect()
    }
}

fn rounded(x: f32, store: Store) -> f32 {
    match store {
        Store::F32 => x,
        Store::F16 => half::f16::from_f32(x).to_f32(),
        Store::BF16 => half::bf16::from_f32(x).to_f32(),
    }
}

/// Returns the number that a byte of e4m3fn without its sign stands for.
fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3), f32::from(byte & 7));
    match exponent {
        0 => mantissa / 8.0 * 2.0_f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7),
    }
}

fn fp8(
    scale_name: &'static str,
    [rows, columns]: [usize; 2],
    out: usize,
    inputs: usize,
    values: &[f32],
) -> (Vec<(&'static str, Stored)>, Vec<f32>) {
    let (down, across) = (out.div_ceil(rows), inputs.div_ceil(columns));
    let block_of = |row: usize, input: usize| row / rows * across + input / columns;
    let mut scales = vec![1e-6_f32; down * across];
    for (index, x) in values.iter().enumerate() {
        let scale = &mut scales[block_of(index / inputs, index % inputs)];
        *scale = scale.max(x.abs() / 448.0);
    }
    scales.iter_mut().for_each(|scale| *scale = rounded(*scale, Store::BF16));
    // 0x7f is no number.
    let table: Vec<f32> = (0..0x7f).map(e4m3).collect();
    let (mut codes, mut numbers) = (Vec::new(), Vec::new());
    for (index, x) in values.iter().enumerate() {
        let scale = scales[block_of(index / inputs, index % inputs)];
        let size = x.abs() / scale;
        let above = table.partition_point(|&value| value < size).min(table.len() - 1);
        let below = above.saturating_sub(1);
        let code = if size - table[below] < table[above] - size { below } else { above };
        let sign = if *x < 0.0 { -1.0 } else { 1.0 };
        codes.push(code as u8 | if *x < 0.0 { 0x80 } else { 0 });
        numbers.push(sign * table[code] * scale);
    }
    let tensors = vec![
        ("weight", new("F8_E4M3", &[out, inputs], codes)),
        (scale_name, new("BF16", &[down, across], Store::BF16.bytes(&scales))),
    ];
    (tensors, numbers)
}

/// Returns a model as a test makes it, of a folder with one file of bf16.
pub fn read(path: &str) -> TestModel {
    let bytes = std::fs::read(format!("{path}/model.safetensors")).expect("a file");
    let config = std::fs::read(format!("{path}/config.json")).expect("a config");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a valid file");
    let mut tensors: Vec<TestTensor> = file
        .iter()
        .map(|(name, view)| {
            assert_eq!(view.dtype(), safetensors::Dtype::BF16, "{name}");
            let number = |pair: &[u8]| half::bf16::from_le_bytes([pair[0], pair[1]]).to_f32();
            let values = view.data().chunks_exact(2).map(number).collect();
            let shape = view.shape().to_vec();
            TestTensor { name: name.to_owned(), shape, values }
        })
        .collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    TestModel { config: serde_json::from_slice(&config).expect("JSON"), tensors }
}
