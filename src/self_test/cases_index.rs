//! Embedding, rotary embeddings, argmax and top-k.

use crate::error::Result;
use crate::memory::{DType, ElementType};
use crate::ops;
use crate::ops::rope::{RopeHeads, RopePairing};
use crate::self_test::case::{bound, Case, Emit, Output, Values, FLOATS};
use crate::self_test::reference;

const INDICES: [ElementType; 2] = [ElementType::I32, ElementType::I64];
const F32: ElementType = ElementType::Float(DType::F32);

pub(super) fn emit(emit: &mut Emit<'_>) -> Result<()> {
    emit(rope_table())?;
    for dtype in FLOATS {
        for index in INDICES {
            emit(embedding(dtype, index))?;
            for pairing in [RopePairing::SplitHalf, RopePairing::Interleaved] {
                emit(rope(dtype, index, pairing, 64))?;
            }
            for width in [1, 67, 5003] {
                emit(argmax(dtype, index, width))?;
            }
        }
        emit(rope(dtype, ElementType::I32, RopePairing::SplitHalf, 14))?;
        for (width, k) in [(1, 1), (67, 5), (5003, 40)] {
            emit(top_k(dtype, width, k))?;
        }
    }
    Ok(())
}

fn embedding(dtype: DType, index: ElementType) -> Case {
    let (vocab_size, width) = (11, 67);
    let table = Values::random(dtype, &[vocab_size, width], 40);
    let ids = [3, 0, 10, 3, 7];
    let expected = reference::embedding(&table.values, width as usize, &ids.map(|id| id as usize));
    let shape = [ids.len() as i64, width];
    Case {
        operator: "embedding",
        what: format!("{dtype} {shape:?}, ids {index}"),
        inputs: vec![table, Values::integers(index, &[ids.len() as i64], &ids)],
        outputs: vec![Output::exact(ElementType::Float(dtype), &shape, expected)],
        is_optional: false,
        compute: Box::new(|context, i, o| ops::embedding::embedding(context, &i[0], &i[1], &o[0])),
    }
}

/// Returns the frequencies of heads of `2 * half` elements.
fn frequencies(half: i64) -> Values {
    let values = (0..half).map(|i| 10000f64.powf(-(i as f64) / half as f64)).collect();
    Values::new(F32, &[half], values)
}

/// Returns the cosines and sines of positions below `max_position`.
fn angles(half: i64, max_position: i64, scale: f64) -> [Vec<f64>; 2] {
    let frequencies = frequencies(half).values;
    let all = (0..max_position)
        .flat_map(|position| frequencies.iter().map(move |frequency| position as f64 * frequency));
    let all: Vec<f64> = all.collect();
    [all.iter().map(|a| a.cos() * scale).collect(), all.iter().map(|a| a.sin() * scale).collect()]
}

fn rope_table() -> Case {
    let (half, max_position, scale) = (33, 131, 1.25);
    let shape = [max_position, half];
    // Both are rounded once.
    let outputs = angles(half, max_position, scale);
    let outputs = outputs.map(|expected| Output::floats(DType::F32, &shape, expected, 2e-7));
    Case {
        operator: "rope_table",
        what: format!("f32 {shape:?}"),
        inputs: vec![frequencies(half)],
        outputs: outputs.into(),
        is_optional: false,
        compute: Box::new(move |context, i, o| {
            ops::rope::rope_table(context, &i[0], scale as f32, &o[0], &o[1])
        }),
    }
}

fn rope(dtype: DType, index: ElementType, pairing: RopePairing, head_dim: i64) -> Case {
    let (num_heads, num_kv_heads, half, max_position) = (3, 1, head_dim / 2, 37);
    let positions = [0, 36, 5, 5, 11];
    let num_tokens = positions.len() as i64;
    let (q_shape, k_shape) =
        ([num_tokens, num_heads, head_dim], [num_tokens, num_kv_heads, head_dim]);
    let (q, k) = (Values::random(dtype, &q_shape, 41), Values::random(dtype, &k_shape, 42));
    let [cos, sin] = angles(half, max_position, 1.0);
    let table = |values| Values::new(F32, &[max_position, half], values);
    let (cos, sin) = (table(cos), table(sin));
    let rotated = |x: &Values, heads: i64| {
        let sizes = ((heads * head_dim) as usize, heads as usize, head_dim as usize);
        let places = positions.map(|position| position as usize);
        let interleaved = pairing == RopePairing::Interleaved;
        reference::rope(&x.values, sizes, &places, &cos.values, &sin.values, interleaved)
    };
    let bound = bound(dtype, 1e-6);
    let outputs = vec![
        Output::floats(dtype, &q_shape, rotated(&q, num_heads), bound),
        Output::floats(dtype, &k_shape, rotated(&k, num_kv_heads), bound),
    ];
    let form = match pairing {
        RopePairing::SplitHalf => "split half",
        RopePairing::Interleaved => "interleaved",
    };
    Case {
        operator: "rope",
        what: format!("{dtype} {q_shape:?} {form}, positions {index}"),
        inputs: vec![q, k, Values::integers(index, &[num_tokens], &positions), cos, sin],
        outputs,
        is_optional: false,
        compute: Box::new(move |context, i, o| {
            let q = RopeHeads { x: &i[0], out: &o[0] };
            let k = RopeHeads { x: &i[1], out: &o[1] };
            ops::rope::rope(context, q, Some(k), &i[2], &i[3], &i[4], pairing)
        }),
    }
}

/// Returns the places of the k largest elements of each row.
fn places(x: &Values, width: i64, k: usize) -> Vec<usize> {
    x.values.chunks(width as usize).flat_map(|row| reference::largest(row, k)).collect()
}

fn argmax(dtype: DType, index: ElementType, width: i64) -> Case {
    let rows = 3;
    let x = Values::random(dtype, &[rows, width], 43);
    let expected = places(&x, width, 1).iter().map(|&place| place as f64).collect();
    Case {
        operator: "argmax",
        what: format!("{dtype} {:?} to {index}", x.shape),
        inputs: vec![x],
        outputs: vec![Output::exact(index, &[rows], expected)],
        is_optional: false,
        compute: Box::new(|context, i, o| ops::argmax::argmax(context, &i[0], &o[0])),
    }
}

fn top_k(dtype: DType, width: i64, k: i64) -> Case {
    let rows = 3;
    let x = Values::random(dtype, &[rows, width], 44);
    let places = places(&x, width, k as usize);
    let value = |(at, &place): (usize, &usize)| x.values[at / k as usize * width as usize + place];
    let values = places.iter().enumerate().map(value).collect();
    let indices = places.iter().map(|&place| place as f64).collect();
    Case {
        operator: "top_k",
        what: format!("{dtype} {:?}, k {k}", x.shape),
        inputs: vec![x],
        outputs: vec![
            Output::exact(ElementType::Float(dtype), &[rows, k], values),
            Output::exact(ElementType::I32, &[rows, k], indices),
        ],
        is_optional: false,
        compute: Box::new(|context, i, o| ops::top_k::top_k(context, &i[0], &o[0], &o[1])),
    }
}
