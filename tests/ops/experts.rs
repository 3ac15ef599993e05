//! Mixtures of experts against a reference in f64: weights of all types, ties, experts that tokens share
//! and experts without tokens.

mod cuda;

use crate::linear::cpu_quantised::weights;
use crate::quantised::random_matrix;
use crate::support::{
    assert_close, assert_same_bits, backends, rounded_all, to_bytes, Guarded, Random, Tolerance,
    DTYPES,
};
use xserv::backend::cpu::CpuBackend;
use xserv::error::ErrorKind;
use xserv::memory::DType;
use xserv::ops::common::packed_matrix::{PackedMatrix, PairOrder};
use xserv::ops::experts::cpu::{experts, route, ExpertMatrices, ExpertsScratch};
use xserv::ops::experts::{ExpertSizes, Routing};
use xserv::ops::linear::cpu::LinearScratch;
use xserv::ops::linear::HostMatrix;
use xserv::ops::quantised::{Code, QuantFormat, QuantisedPanels};

/// The least distance between the logits of the last expert that a token takes and of the first that it does
/// not: more than rounding to bf16 moves them.
const GAP: f64 = 0.05;

/// The sizes of a mixture of experts.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub num_experts: usize,
    pub per_token: usize,
    pub renormalises: bool,
    pub hidden: usize,
    pub width: usize,
    pub num_tokens: usize,
}

/// Everything that goes into a mixture of experts, row after row.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// `[num_tokens, hidden]`
    pub x: Vec<f32>,
    /// `[num_experts, hidden]`
    pub router: Vec<f32>,
    /// `[2 * width, hidden]` of each expert.
    pub gate_up: Vec<Vec<f32>>,
    /// `[hidden, width]` of each expert.
    pub down: Vec<Vec<f32>>,
    /// What the result is added to, `[num_tokens, hidden]`.
    pub out: Vec<f32>,
}

pub const CASES: [Case; 10] = [
    Case::new((8, 2, true), (64, 48), 5),
    Case::new((8, 2, false), (64, 48), 1),
    Case::new((4, 1, true), (96, 64), 7),
    Case::new((4, 1, false), (33, 31), 3),
    Case::new((4, 4, true), (64, 64), 6),
    Case::new((1, 1, true), (40, 64), 2),
    Case::new((128, 8, true), (128, 96), 33),
    Case::new((6, 3, false), (31, 65), 40),
    Case::new((3, 2, true), (128, 128), 130),
    Case::new((8, 2, true), (64, 48), 0),
];

impl Case {
    pub const fn new(
        (num_experts, per_token, renormalises): (usize, usize, bool),
        (hidden, width): (usize, usize),
        num_tokens: usize,
    ) -> Case {
        Case { num_experts, per_token, renormalises, hidden, width, num_tokens }
    }

    pub fn routing(&self) -> Routing {
        Routing::new(self.num_experts, self.per_token, self.renormalises).unwrap()
    }

    /// Returns weights of this type and tokens whose choices are clear.
    pub fn inputs(&self, random: &mut Random, dtype: DType) -> Inputs {
        let mut matrix = |rows: usize, columns: usize| {
            let scale = 1.0 / (columns as f32).sqrt();
            let values = random.normals(rows * columns);
            rounded_all(&values.iter().map(|v| v * scale).collect::<Vec<_>>(), dtype)
        };
        let router = matrix(self.num_experts, self.hidden);
        let gate_up = (0..self.num_experts).map(|_| matrix(2 * self.width, self.hidden)).collect();
        let down = (0..self.num_experts).map(|_| matrix(self.hidden, self.width)).collect();
        let mut x = Vec::new();
        while x.len() < self.num_tokens * self.hidden {
            let token = random.normals(self.hidden);
            let mut logits = product(&token, &router);
            logits.sort_by(|a, b| b.total_cmp(a));
            let is_clear = |last: &f64, next: &f64| last - next > GAP;
            if logits
                .get(self.per_token)
                .is_none_or(|next| is_clear(&logits[self.per_token - 1], next))
            {
                x.extend(token);
            }
        }
        Inputs { out: random.normals(x.len()), x, router, gate_up, down }
    }

    /// Returns the experts of a token with these logits, in rising order, and their weights.
    pub fn choose(&self, logits: &[f64]) -> Vec<(usize, f64)> {
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let powers: Vec<f64> = logits.iter().map(|logit| (logit - max).exp()).collect();
        let sum: f64 = powers.iter().sum();
        let mut ids: Vec<usize> = (0..logits.len()).collect();
        // This sort leaves equals in their order.
        ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        ids.truncate(self.per_token);
        ids.sort_unstable();
        let of_chosen: f64 = ids.iter().map(|&id| powers[id]).sum();
        let divisor = if self.renormalises { of_chosen } else { sum };
        ids.into_iter().map(|id| (id, powers[id] / divisor)).collect()
    }

    /// Returns the logits of all tokens in f64.
    pub fn logits(&self, inputs: &Inputs) -> Vec<f64> {
        inputs.x.chunks(self.hidden).flat_map(|x| product(x, &inputs.router)).collect()
    }

    /// Returns the result in f64.
    pub fn reference(&self, inputs: &Inputs) -> Vec<f64> {
        self.reference_by(inputs, &self.logits(inputs))
    }

    /// Returns the result with these logits.
    pub fn reference_by(&self, inputs: &Inputs, logits: &[f64]) -> Vec<f64> {
        let mut all: Vec<f64> = inputs.out.iter().map(|&v| f64::from(v)).collect();
        let tokens = inputs.x.chunks(self.hidden).zip(logits.chunks(self.num_experts));
        for ((x, logits), out) in tokens.zip(all.chunks_mut(self.hidden)) {
            for (id, weight) in self.choose(logits) {
                let products = product(x, &inputs.gate_up[id]);
                let (gate, up) = products.split_at(self.width);
                let inner: Vec<f64> =
                    gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                for (out, row) in out.iter_mut().zip(inputs.down[id].chunks(self.width)) {
                    let sum: f64 = row.iter().zip(&inner).map(|(w, x)| f64::from(*w) * x).sum();
                    *out += weight * sum;
                }
            }
        }
        all
    }
}

/// Returns a matrix, row after row, times x.
fn product(x: &[f32], matrix: &[f32]) -> Vec<f64> {
    let sum = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
    matrix.chunks(x.len()).map(sum).collect()
}

fn packed(backend: &CpuBackend, weight: &[f32], columns: usize, dtype: DType) -> HostMatrix {
    let order = PairOrder::of(backend);
    let rows = weight.len() / columns;
    let mut matrix = PackedMatrix::zeroed(rows, columns, dtype, order).unwrap();
    matrix.writer().unwrap().pack_rows(0, &to_bytes(weight, dtype), dtype).unwrap();
    HostMatrix::Dense(matrix)
}

/// The matrices of a mixture as a backend takes them.
struct Packed {
    router: HostMatrix,
    gate_up: Vec<HostMatrix>,
    down: Vec<HostMatrix>,
}

impl Packed {
    fn dense(backend: &CpuBackend, case: &Case, inputs: &Inputs, dtype: DType) -> Packed {
        let all = |matrices: &[Vec<f32>], columns| {
            matrices.iter().map(|matrix| packed(backend, matrix, columns, dtype)).collect()
        };
        Packed {
            router: packed(backend, &inputs.router, case.hidden, dtype),
            gate_up: all(&inputs.gate_up, case.hidden),
            down: all(&inputs.down, case.width),
        }
    }

    fn matrices(&self) -> ExpertMatrices<'_> {
        ExpertMatrices { router: &self.router, gate_up: &self.gate_up, down: &self.down }
    }

    /// Runs tokens, and checks what the scratch has grown to.
    fn run(&self, backend: &CpuBackend, case: &Case, x: &[f32], out: &[f32]) -> Vec<f32> {
        let mut result = Guarded::of(out);
        let num_tokens = x.len() / case.hidden;
        let (routing, matrices) = (case.routing(), self.matrices());
        let (products, scratch) = (&mut LinearScratch::new(), &mut ExpertsScratch::new());
        experts(backend, x, num_tokens, routing, matrices, result.get(), products, scratch)
            .unwrap();
        if num_tokens > 0 {
            let sizes = ExpertSizes { routing, hidden_size: case.hidden, width: case.width };
            assert_eq!(scratch.size_bytes(), ExpertsScratch::bytes_for(&sizes, num_tokens));
        }
        result.checked("experts").to_vec()
    }
}

#[test]
fn dense_experts() {
    let mut random = Random::new(1);
    for case in CASES {
        for dtype in DTYPES {
            let inputs = case.inputs(&mut random, dtype);
            let expected = case.reference(&inputs);
            // With weights of bf16, what goes into a product is rounded to bf16 first.
            let tolerance = if dtype == DType::BF16 { 2e-2 } else { 2e-5 };
            for backend in backends(&[1, 3]) {
                let packed = Packed::dense(&backend, &case, &inputs, dtype);
                let got = packed.run(&backend, &case, &inputs.x, &inputs.out);
                let what = format!("{case:?} {dtype} on {}", backend.name());
                assert_close(&what, &got, &expected, Tolerance::Rms(tolerance));
            }
        }
    }
}

#[test]
fn quantised_experts_beside_a_dense_router() {
    let mut random = Random::new(2);
    for case in CASES {
        let inputs = case.inputs(&mut random, DType::BF16);
        for (code, group_size, has_zeros, quantises_inputs) in [
            (Code::Int4, 32, true, false),
            (Code::Int8, 128, false, false),
            (Code::Fp8, 128, false, false),
        ] {
            let format =
                QuantFormat { code, group_size, has_zeros, scale: DType::F32, quantises_inputs };
            let mut matrices = |rows, columns, size| -> Vec<_> {
                let all = 0..case.num_experts;
                all.map(|_| random_matrix(&mut random, rows, columns, format, size)).collect()
            };
            let gate_up = matrices(2 * case.width, case.hidden, 0.1);
            let down = matrices(case.hidden, case.width, 0.1);
            let inputs = Inputs {
                gate_up: gate_up.iter().map(weights).collect(),
                down: down.iter().map(weights).collect(),
                ..inputs.clone()
            };
            let expected = case.reference(&inputs);
            for backend in backends(&[2]) {
                let pack = |matrix| {
                    HostMatrix::Quantised(QuantisedPanels::pack(&backend, matrix).unwrap())
                };
                let packed = Packed {
                    router: packed(&backend, &inputs.router, case.hidden, DType::F32),
                    gate_up: gate_up.iter().map(pack).collect(),
                    down: down.iter().map(pack).collect(),
                };
                let got = packed.run(&backend, &case, &inputs.x, &inputs.out);
                let what = format!("{case:?} {format:?} on {}", backend.name());
                assert_close(&what, &got, &expected, Tolerance::Rms(1e-3));
            }
        }
    }
}

/// The bits of a token depend neither on the others nor on the number of threads.
#[test]
fn bits_of_a_token_are_its_own() {
    let mut random = Random::new(3);
    for case in CASES {
        for dtype in DTYPES {
            let inputs = case.inputs(&mut random, dtype);
            for backend in backends(&[1]) {
                let isa = backend.isa();
                let packed = Packed::dense(&backend, &case, &inputs, dtype);
                let all = packed.run(&backend, &case, &inputs.x, &inputs.out);
                for num_threads in [2, 3] {
                    let backend = CpuBackend::with_isa(num_threads, isa).unwrap();
                    let what = format!("{case:?} {dtype} on {}", backend.name());
                    let got = packed.run(&backend, &case, &inputs.x, &inputs.out);
                    assert_same_bits(&what, &got, &all);
                    for (row, expected) in all.chunks(case.hidden).enumerate() {
                        let part = row * case.hidden..(row + 1) * case.hidden;
                        let (x, out) = (&inputs.x[part.clone()], &inputs.out[part]);
                        let alone = packed.run(&backend, &case, x, out);
                        assert_same_bits(&format!("{what}, token {row}"), &alone, expected);
                    }
                }
            }
        }
    }
}

fn routed(backend: &CpuBackend, case: &Case, logits: &[f32]) -> (Vec<u32>, Vec<f32>) {
    let len = logits.len() / case.num_experts * case.per_token;
    let (mut ids, mut weights) = (vec![u32::MAX; len], Guarded::new(len));
    route(backend, &mut logits.to_vec(), case.routing(), &mut ids, weights.get()).unwrap();
    (ids, weights.checked("route").to_vec())
}

#[test]
fn routes() {
    let mut random = Random::new(4);
    for case in CASES {
        for num_tokens in [0, 1, 5, 700] {
            let logits: Vec<f32> =
                random.normals(num_tokens * case.num_experts).iter().map(|l| l * 3.0).collect();
            for backend in backends(&[1, 2]) {
                let (ids, weights) = routed(&backend, &case, &logits);
                let rows = logits.chunks(case.num_experts).map(|row| {
                    let row: Vec<f64> = row.iter().map(|&logit| f64::from(logit)).collect();
                    case.choose(&row)
                });
                let (expected_ids, expected): (Vec<u32>, Vec<f64>) =
                    rows.flatten().map(|(id, weight)| (id as u32, weight)).unzip();
                assert_eq!(ids, expected_ids, "{case:?}");
                assert_close("weights", &weights, &expected, Tolerance::OnePlus(1e-6));
            }
        }
    }
}

#[test]
fn equal_logits_go_to_the_first_experts() {
    let case = Case::new((6, 3, true), (1, 1), 1);
    for backend in backends(&[1]) {
        let route = |logits: [f32; 6]| routed(&backend, &case, &logits);
        let third = 1.0 / 3.0;
        assert_eq!(route([2.0; 6]), (vec![0, 1, 2], vec![third; 3]));
        assert_eq!(route([0.0, 5.0, 5.0, 5.0, 5.0, 0.0]), (vec![1, 2, 3], vec![third; 3]));
        assert_eq!(route([5.0, 0.0, 1.0, 0.0, 1.0, 1.0]).0, [0, 2, 4]);
        // All but the first have no probability at all.
        assert_eq!(route([900.0, -900.0, -900.0, -900.0, -900.0, -900.0]).0, [0, 1, 2]);
        let large = f32::MAX;
        assert_eq!(route([-large, -large, large, -large, large, large]).0, [2, 4, 5]);
    }
}

/// Whatever a router makes of a token, its experts are some of those that there are, each once.
#[test]
fn what_is_no_number_stays_in_range() {
    let (nan, infinity) = (f32::NAN, f32::INFINITY);
    let case = Case::new((4, 3, true), (1, 1), 1);
    for backend in backends(&[1]) {
        for logits in [
            [nan, 0.0, 1.0, 2.0],
            [0.0, 1.0, 2.0, nan],
            [nan; 4],
            [infinity; 4],
            [-infinity; 4],
            [-infinity, infinity, 0.0, 1.0],
        ] {
            let (ids, _) = routed(&backend, &case, &logits);
            assert!(ids.is_sorted_by(|a, b| a < b) && ids.iter().all(|&id| id < 4), "{ids:?}");
        }
    }
    // A token that is no number leaves the others alone.
    let mut random = Random::new(5);
    let case = Case::new((8, 2, true), (64, 48), 5);
    let inputs = case.inputs(&mut random, DType::F32);
    for backend in backends(&[2]) {
        let packed = Packed::dense(&backend, &case, &inputs, DType::F32);
        let expected = packed.run(&backend, &case, &inputs.x, &inputs.out);
        let mut x = inputs.x.clone();
        x[2 * 64 + 5] = nan;
        let got = packed.run(&backend, &case, &x, &inputs.out);
        for (row, (got, expected)) in got.chunks(64).zip(expected.chunks(64)).enumerate() {
            if row == 2 {
                assert!(got.iter().all(|v| v.is_nan()));
            } else {
                assert_same_bits("beside NaN", got, expected);
            }
        }
    }
}

/// All tokens choose the same experts, so that the others have none; then every expert has some.
#[test]
fn experts_without_tokens() {
    let mut random = Random::new(6);
    let case = Case::new((8, 2, true), (64, 48), 30);
    let mut inputs = case.inputs(&mut random, DType::F32);
    inputs.x.iter_mut().step_by(64).for_each(|first| *first = 100.0);
    for (expert, row) in inputs.router.chunks_mut(64).enumerate() {
        row[0] = [0.1, 0.3, -0.4, 0.2, -0.1, 0.0, 0.35, -0.2][expert];
    }
    let chosen = |token: &[f32]| -> Vec<usize> {
        let experts = case.choose(&product(token, &inputs.router));
        experts.into_iter().map(|(id, _)| id).collect()
    };
    assert!(inputs.x.chunks(64).all(|token| chosen(token) == [1, 6]));
    let expected = case.reference(&inputs);
    for backend in backends(&[2]) {
        let packed = Packed::dense(&backend, &case, &inputs, DType::F32);
        let got = packed.run(&backend, &case, &inputs.x, &inputs.out);
        assert_close("shared experts", &got, &expected, Tolerance::Rms(2e-5));
    }
}

/// Buffers that have grown to a batch serve every smaller one, whatever its tokens choose.
#[test]
fn buffers_grow_once() {
    let mut random = Random::new(7);
    let case = Case::new((8, 2, true), (64, 48), 60);
    for dtype in DTYPES {
        let inputs = case.inputs(&mut random, dtype);
        for backend in backends(&[2]) {
            let packed = Packed::dense(&backend, &case, &inputs, dtype);
            let (products, scratch) = (&mut LinearScratch::new(), &mut ExpertsScratch::new());
            let mut run = |tokens: std::ops::Range<usize>| {
                let part = tokens.start * 64..tokens.end * 64;
                let (x, mut out) = (&inputs.x[part.clone()], inputs.out[part].to_vec());
                let (routing, matrices) = (case.routing(), packed.matrices());
                experts(&backend, x, tokens.len(), routing, matrices, &mut out, products, scratch)
                    .unwrap();
                products.size_bytes() + scratch.size_bytes()
            };
            let all = run(0..60);
            for tokens in [0..1, 5..40, 59..60, 1..60, 30..38] {
                assert_eq!(run(tokens), all);
            }
        }
    }
}

#[test]
fn sizes_that_do_not_match_are_refused() {
    assert!(Routing::new(4, 0, true).is_err() && Routing::new(4, 5, true).is_err());
    assert!(Routing::new(0, 0, true).is_err() && Routing::new(4, 4, true).is_ok());
    let mut random = Random::new(8);
    let case = Case::new((4, 2, true), (64, 48), 3);
    let inputs = case.inputs(&mut random, DType::F32);
    let backend = CpuBackend::new(1).unwrap();
    let packed = Packed::dense(&backend, &case, &inputs, DType::F32);
    let refused = |x: &[f32], num_tokens, routing, matrices, out_len| {
        let (products, scratch) = (&mut LinearScratch::new(), &mut ExpertsScratch::new());
        let mut out = vec![0.0; out_len];
        experts(&backend, x, num_tokens, routing, matrices, &mut out, products, scratch)
            .is_err_and(|error| error.kind() == ErrorKind::Internal)
    };
    let (x, routing, all) = (&inputs.x[..], case.routing(), packed.matrices());
    assert!(!refused(x, 3, routing, all, x.len()));
    assert!(refused(x, 2, routing, all, x.len()));
    assert!(refused(x, 3, routing, all, x.len() - 1));
    assert!(refused(x, 3, Routing::new(5, 2, true).unwrap(), all, x.len()));
    let fewer = ExpertMatrices { down: &packed.down[1..], ..all };
    assert!(refused(x, 3, routing, fewer, x.len()));
    let swapped = ExpertMatrices { down: all.gate_up, ..all };
    assert!(refused(x, 3, routing, swapped, x.len()));
    let (mut ids, mut weights) = (vec![0; 6], vec![0.0; 5]);
    assert!(route(&backend, &mut [0.0; 12], routing, &mut ids, &mut weights).is_err());
    assert!(route(&backend, &mut [0.0; 13], routing, &mut ids, &mut [0.0; 6]).is_err());
}
