//! Prompts on Hopper, against products in f64 that are rounded where Transformers rounds.

use std::sync::Arc;

use crate::support::device::{
    cuda_context, decode, download, encode, last_place, round, upload, HALVES,
};
use crate::support::{rounded, Random};
use xserv::backend::{Arena, ComputeContext, DeviceTensor};
use xserv::memory::{DType, ElementType};
use xserv::ops::linear::cuda_prefill::{has_linear_prefill, linear_prefill};
use xserv::ops::linear::Epilogue;

/// Rows of x repeat with this period, which no tile has: every element of the result is known from
/// few products, and rows in each other's place are found.
const PERIOD: usize = 37;

/// Rows after those of the result, which stay as they are.
const GUARD_ROWS: usize = 70;

/// Tokens, columns of the result, in_features. Narrow weights with k divided in both tiles and
/// whole, each with tokens and columns that no tile has; pairs of tiles of tokens, and of weights
/// where there is an odd number of the former; more tiles than the chip holds at a time.
const PLAIN: [(usize, usize, usize); 10] = [
    (129, 1024, 2048),
    (161, 1000, 1088),
    (256, 1024, 512),
    (300, 936, 3072),
    (512, 1024, 576),
    (577, 1016, 1024),
    (1100, 1024, 512),
    (200, 4104, 320),
    (384, 4096, 192),
    (640, 6144, 128),
];
const GATED: [(usize, usize, usize); 5] =
    [(129, 264, 256), (384, 2048, 192), (640, 3072, 128), (300, 1032, 320), (513, 3072, 1024)];

struct Case {
    dtype: DType,
    result: Epilogue,
    num_tokens: usize,
    n: usize,
    k: usize,
    x: DeviceTensor,
    weight: DeviceTensor,
    /// With the rows that guard it.
    all_out: DeviceTensor,
}

impl Case {
    fn run(&self, context: &Arc<ComputeContext>, x: &[u8]) -> Vec<u8> {
        upload(context, &self.x, x);
        upload(context, &self.all_out, &vec![0xee; self.all_out.size_bytes()]);
        let out = self.all_out.view(0, &[self.num_tokens, self.n], None).expect("a view");
        linear_prefill(context, &self.x, &self.weight, self.result, &out).expect("the operator");
        context.synchronize().expect("no fault");
        let mut bytes = download(context, &self.all_out);
        let guard = bytes.split_off(self.num_tokens * self.n * 2);
        assert!(guard.iter().all(|&byte| byte == 0xee), "{}: rows behind the result", self.name());
        bytes
    }

    fn name(&self) -> String {
        let Case { dtype, result, num_tokens, n, k, .. } = self;
        format!("{dtype} {result:?} {num_tokens} x {n} x {k}")
    }

    /// Returns the rows of one period, and what f32 may be off by before the roundings.
    fn reference(&self, x: &[f64], weight: &[f64]) -> Vec<(f64, f64)> {
        let product = |row: &[f64], i: usize| {
            let column = &weight[i * self.k..(i + 1) * self.k];
            let terms = || row.iter().zip(column).map(|(a, b)| a * b);
            (terms().sum::<f64>(), 2e-6 * terms().map(f64::abs).sum::<f64>())
        };
        let round = |value| round(self.dtype, value);
        let rows = x.chunks_exact(self.k).take(PERIOD);
        rows.flat_map(|row| {
            (0..self.n).map(move |i| {
                let (value, error) = product(row, i);
                if self.result != Epilogue::SwiGlu {
                    return (round(value), error);
                }
                let (up, up_error) = product(row, i + self.n);
                let (gate, up) = (round(value), round(up));
                let activated = round(gate / (1.0 + (-gate).exp()));
                // The slope of silu is at most 1.1.
                let error = 1.1 * error * up.abs() + up_error * activated.abs();
                (rounded::silu_mul(self.dtype, gate, up), error)
            })
        })
        .collect()
    }
}

fn check(
    context: &Arc<ComputeContext>,
    dtype: DType,
    result: Epilogue,
    sizes: (usize, usize, usize),
) {
    let (num_tokens, n, k) = sizes;
    let rows = if result == Epilogue::SwiGlu { 2 * n } else { n };
    let mut random = Random::new((num_tokens * 31 + n) as u64);
    let mut random_bytes = |len: usize, scale: f64| {
        encode(dtype, &(0..len).map(|_| scale * random.signed()).collect::<Vec<_>>())
    };
    let weight_bytes = random_bytes(rows * k, 3.0 / (k as f64).sqrt());
    let period_bytes = random_bytes(PERIOD * k, 1.0);
    let x_bytes: Vec<u8> = (0..num_tokens)
        .flat_map(|row| &period_bytes[row % PERIOD * k * 2..][..k * 2])
        .copied()
        .collect();

    let element = ElementType::Float(dtype);
    let elements = (num_tokens + GUARD_ROWS) * (n + k) + rows * k;
    let mut arena = Arena::new(context, 2 * elements + 8192, "a test").expect("memory");
    let all_x = arena.tensor(element, &[num_tokens + GUARD_ROWS, k]).expect("room");
    // NaN after the tokens.
    upload(context, &all_x, &vec![0xff; all_x.size_bytes()]);
    let case = Case {
        dtype,
        result,
        num_tokens,
        n,
        k,
        x: all_x.view(0, &[num_tokens, k], None).expect("a view"),
        weight: arena.tensor(element, &[rows, k]).expect("room"),
        all_out: arena.tensor(element, &[num_tokens + GUARD_ROWS, n]).expect("room"),
    };
    upload(context, &case.weight, &weight_bytes);
    let got = case.run(context, &x_bytes);

    let want = case.reference(&decode(dtype, &period_bytes), &decode(dtype, &weight_bytes));
    // The unit of the last place; each of three roundings may flip it.
    let unit = last_place(dtype);
    let units = if result == Epilogue::SwiGlu { 3.0 } else { 1.0 };
    let mut num_flipped = 0;
    for (i, got) in decode(dtype, &got).into_iter().enumerate() {
        let (row, column) = (i / n, i % n);
        let (want, error) = want[row % PERIOD * n + column];
        num_flipped += usize::from(got != want);
        let most = units * unit * want.abs() + error + 1e-7;
        assert!(
            (got - want).abs() <= most,
            "{}: {got:e} at ({row}, {column}), not {want:e}",
            case.name()
        );
    }
    let share = num_flipped as f64 / (num_tokens * n) as f64;
    println!("{}: {:.3} % of the roundings flipped", case.name(), share * 100.0);
    assert!(
        share < 0.01,
        "{}: {share} of the elements are not those of the reference",
        case.name()
    );

    assert!(case.run(context, &x_bytes) == got, "{}: another time other bits", case.name());
    // Other tokens do not matter, whatever they are.
    let mut others = vec![0xff; x_bytes.len()];
    let kept = |row: &usize| row % PERIOD == 3 || row + 1 == num_tokens;
    for row in (0..num_tokens).filter(kept) {
        others[row * k * 2..][..k * 2].copy_from_slice(&x_bytes[row * k * 2..][..k * 2]);
    }
    let beside_nan = case.run(context, &others);
    for row in (0..num_tokens).filter(kept) {
        let row_of = |bytes: &'_ [u8]| bytes[row * n * 2..][..n * 2].to_vec();
        assert!(row_of(&beside_nan) == row_of(&got), "{}: row {row} beside others", case.name());
    }
}

#[test]
fn products_of_prompts_on_cuda_are_rounded_as_in_transformers() {
    let Some(context) = cuda_context() else { return };
    if !has_linear_prefill(&context).unwrap() {
        println!("skipped: not a Hopper GPU");
        return;
    }
    for dtype in HALVES {
        for sizes in PLAIN {
            check(&context, dtype, Epilogue::Store, sizes);
        }
        for sizes in GATED {
            check(&context, dtype, Epilogue::SwiGlu, sizes);
        }
    }
}
