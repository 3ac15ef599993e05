//! A case of the self-test: an operator, the tensors that it gets, and what it has to write.

use crate::backend::cpu::math::{fp8_code, fp8_to_f32};
use crate::backend::ComputeContext;
use crate::error::Result;
use crate::memory::{DType, ElementType, Tensor};

/// Computes the outputs (the last argument) from the inputs on a context.
pub type Compute<'a> = dyn Fn(&ComputeContext, &[Tensor], &[Tensor]) -> Result<()> + 'a;

/// The types with which operators compute.
pub(super) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// A contiguous tensor by its values, which its element type represents exactly.
pub struct Values {
    /// The type of the elements.
    pub element: ElementType,
    /// The sizes, outermost first.
    pub shape: Vec<i64>,
    /// The elements in row-major order.
    pub values: Vec<f64>,
}

/// A tensor that an operator has to write.
pub struct Output {
    /// The type of the elements.
    pub element: ElementType,
    /// The sizes, outermost first.
    pub shape: Vec<i64>,
    /// The results in f64, in row-major order.
    pub expected: Vec<f64>,
    /// The tensor's values before the call; NaN (-1 for integers) if `None`.
    pub initial: Option<Vec<f64>>,
    /// The largest error that is no fault; 0 where every bit has to be right.
    pub bound: f64,
}

/// One call of an operator.
pub struct Case {
    /// The operator's C function without `xserv_op_`.
    pub operator: &'static str,
    /// The types, sizes and variants.
    pub what: String,
    /// The tensors that the operator reads.
    pub inputs: Vec<Values>,
    /// The tensors that it writes.
    pub outputs: Vec<Output>,
    /// Whether a device, a machine or a type may lack this variant of the operator.
    pub is_optional: bool,
    /// The call.
    pub compute: Box<Compute<'static>>,
}

/// Takes the cases one by one; an error ends the test.
pub(super) type Emit<'a> = dyn FnMut(Case) -> Result<()> + 'a;

impl Values {
    /// Rounds `values` to the element type.
    pub(super) fn new(element: ElementType, shape: &[i64], values: Vec<f64>) -> Self {
        let values = values.into_iter().map(|value| rounded(element, value)).collect();
        Values { element, shape: shape.to_vec(), values }
    }

    /// Returns reproducible numbers between -1 and 1, without a pattern.
    pub(super) fn random(dtype: DType, shape: &[i64], seed: u64) -> Self {
        let len = shape.iter().product::<i64>() as u64;
        let values = (0..len).map(|i| noise(seed, i)).collect();
        Values::new(ElementType::Float(dtype), shape, values)
    }

    /// Returns whole numbers, such as ids.
    pub(super) fn integers(element: ElementType, shape: &[i64], values: &[i64]) -> Self {
        Values::new(element, shape, values.iter().map(|&value| value as f64).collect())
    }
}

impl Output {
    /// Numbers of a floating-point type.
    pub(super) fn floats(dtype: DType, shape: &[i64], expected: Vec<f64>, bound: f64) -> Self {
        let element = ElementType::Float(dtype);
        Output { element, shape: shape.to_vec(), expected, initial: None, bound }
    }

    /// Elements of which every bit has to be right.
    pub(super) fn exact(element: ElementType, shape: &[i64], expected: Vec<f64>) -> Self {
        Output { element, shape: shape.to_vec(), expected, initial: None, bound: 0.0 }
    }
}

/// Returns the bound of a result that is computed in f32 with a relative error of at most
/// `f32_error`, and then rounded once to `dtype`.
pub(super) fn bound(dtype: DType, f32_error: f64) -> f64 {
    f32_error + rounding(dtype)
}

/// Returns the largest relative error of a rounding; 0 for f32, in whose errors it is included.
pub(super) fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 0.0,
        DType::F16 => 1.0 / 2048.0,
        DType::BF16 => 1.0 / 256.0,
    }
}

/// Returns number `index` of a sequence between -1 and 1: SplitMix64 (Steele, Lea and Flood, 2014).
fn noise(seed: u64, index: u64) -> f64 {
    let mut z = (seed << 32).wrapping_add(index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// Returns the nearest value of the type.
pub(super) fn rounded(element: ElementType, value: f64) -> f64 {
    match element {
        ElementType::Float(DType::F32) => f64::from(value as f32),
        ElementType::Float(DType::F16) => half::f16::from_f64(value).to_f64(),
        ElementType::Float(DType::BF16) => half::bf16::from_f64(value).to_f64(),
        ElementType::Fp8 => f64::from(fp8_to_f32(fp8_code(value as f32))),
        ElementType::I32 | ElementType::I64 => value.round(),
    }
}

/// Writes values as elements of the type.
pub(super) fn encode(element: ElementType, values: &[f64], bytes: &mut [u8]) {
    for (bytes, &value) in bytes.chunks_exact_mut(element.size_bytes()).zip(values) {
        match element {
            ElementType::Float(DType::F32) => {
                bytes.copy_from_slice(&(value as f32).to_ne_bytes());
            }
            ElementType::Float(DType::F16) => {
                bytes.copy_from_slice(&half::f16::from_f64(value).to_ne_bytes());
            }
            ElementType::Float(DType::BF16) => {
                bytes.copy_from_slice(&half::bf16::from_f64(value).to_ne_bytes());
            }
            ElementType::Fp8 => bytes.copy_from_slice(&[fp8_code(value as f32)]),
            ElementType::I32 => bytes.copy_from_slice(&(value as i32).to_ne_bytes()),
            ElementType::I64 => bytes.copy_from_slice(&(value as i64).to_ne_bytes()),
        }
    }
}

/// Reads elements of the type.
pub(super) fn decode(element: ElementType, bytes: &[u8]) -> Vec<f64> {
    let chunks = bytes.chunks_exact(element.size_bytes());
    let value = |bytes: &[u8]| match (element, bytes) {
        (ElementType::Float(DType::F32), &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]).into(),
        (ElementType::Float(DType::F16), &[a, b]) => half::f16::from_ne_bytes([a, b]).to_f64(),
        (ElementType::Float(DType::BF16), &[a, b]) => half::bf16::from_ne_bytes([a, b]).to_f64(),
        (ElementType::Fp8, &[code]) => fp8_to_f32(code).into(),
        (ElementType::I32, &[a, b, c, d]) => i32::from_ne_bytes([a, b, c, d]).into(),
        (ElementType::I64, bytes) => bytes.try_into().map_or(0.0, |b| i64::from_ne_bytes(b) as f64),
        _ => f64::NAN,
    };
    chunks.map(value).collect()
}
