//! Tensors, with every backend that a device has.

use crate::support::tensors::*;
use crate::support::{golden, reference, Random};
use xserv::ffi::xserv_attention_backend::*;
use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

const BACKENDS: [xserv_attention_backend; 4] =
    [XSERV_ATTENTION_AUTO, XSERV_ATTENTION_NAIVE, XSERV_ATTENTION_FLASH, XSERV_ATTENTION_SPLIT_KV];
pub(super) const FUSED_DIMS: [usize; 5] = [64, 80, 96, 128, 256];

/// Query heads, kv heads, elements of a head.
pub(super) type Heads = (usize, usize, usize);

pub(super) fn options(causal: bool, backend: xserv_attention_backend) -> xserv_attention_options {
    // SAFETY: plain numbers and pointers, filled by the call.
    let mut options = unsafe {
        let mut options = std::mem::zeroed();
        xserv_attention_options_init(&mut options, size_of_val(&options));
        options
    };
    options.causal = causal.into();
    options.backend = backend as u32;
    options
}

pub(super) fn call(
    context: &Context,
    options: &xserv_attention_options,
    [q, k, v, out]: [&TestTensor<'_>; 4],
) -> xserv_status {
    // SAFETY: live tensors, and descriptors that outlive the call.
    unsafe {
        xserv_op_attention(context.handle, options, &q.view(), &k.view(), &v.view(), &out.view())
    }
}

fn synchronize(context: &Context) {
    ok(xserv_context_synchronize(context.handle));
}

/// Sequences one after the other.
pub(super) struct Case {
    q_lens: Vec<usize>,
    kv_lens: Vec<usize>,
    heads: Heads,
    element: Type,
    /// What a block cache stores.
    stored: Type,
    causal: bool,
    window: Option<usize>,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    want: Vec<f64>,
}

impl Case {
    pub(super) fn new(
        random: &mut Random,
        element: Type,
        heads: Heads,
        lens: (&[usize], &[usize]),
        causal: bool,
    ) -> Self {
        Case::with_mask(random, element, heads, lens, (causal, None))
    }

    /// A causal case with a window.
    pub(super) fn in_window(
        random: &mut Random,
        element: Type,
        heads: Heads,
        lens: (&[usize], &[usize]),
        window: usize,
    ) -> Self {
        Case::with_mask(random, element, heads, lens, (true, Some(window)))
    }

    fn with_mask(
        random: &mut Random,
        element: Type,
        heads: Heads,
        (q_lens, kv_lens): (&[usize], &[usize]),
        (causal, window): (bool, Option<usize>),
    ) -> Self {
        let (num_heads, num_kv_heads, dim) = heads;
        let mut normals = |lens: &[usize], heads: usize| {
            element.round_all(&random.normals(lens.iter().sum::<usize>() * heads * dim))
        };
        let q = normals(q_lens, num_heads);
        let (k, v) = (normals(kv_lens, num_kv_heads), normals(kv_lens, num_kv_heads));
        let (q_lens, kv_lens) = (q_lens.to_vec(), kv_lens.to_vec());
        let (stored, want) = (element, Vec::new());
        let mut case =
            Case { q_lens, kv_lens, heads, element, stored, causal, window, q, k, v, want };
        case.want = case.expected((dim as f64).powf(-0.5));
        case
    }

    /// Returns the last `count` queries of each sequence over the same keys.
    pub(super) fn last_queries(&self, count: usize) -> Case {
        let row = self.heads.0 * self.heads.2;
        let mut case = self.poisoned(&[]);
        (case.q, case.want) = (Vec::new(), Vec::new());
        let mut end = 0;
        for len in &mut case.q_lens {
            end += *len * row;
            *len = (*len).min(count);
            case.q.extend(&self.q[end - *len * row..end]);
            case.want.extend(&self.want[end - *len * row..end]);
        }
        case
    }

    pub(super) fn options(&self, backend: xserv_attention_backend) -> xserv_attention_options {
        let mut options = options(self.causal, backend);
        options.window = self.window.unwrap_or(0) as u32;
        options
    }

    /// Returns the case with keys and values that a cache stores as this type.
    pub(super) fn stored_as(mut self, stored: Type) -> Case {
        for values in [&mut self.k, &mut self.v] {
            values.iter_mut().for_each(|x| *x = stored.round(*x));
        }
        self.stored = stored;
        self.want = self.expected((self.heads.2 as f64).powf(-0.5));
        self
    }

    fn expected(&self, scale: f64) -> Vec<f64> {
        let (num_heads, num_kv_heads, dim) = self.heads;
        let (mut q, mut kv, mut want) = (0, 0, Vec::new());
        for (&q_len, &kv_len) in self.q_lens.iter().zip(&self.kv_lens) {
            let (q_size, kv_size) = (q_len * num_heads * dim, kv_len * num_kv_heads * dim);
            let operands =
                (&self.q[q..q + q_size], &self.k[kv..kv + kv_size], &self.v[kv..kv + kv_size]);
            let window = self.window.unwrap_or(usize::MAX);
            let (heads, causal) = (self.heads, self.causal);
            want.extend(reference::windowed_attention(operands, heads, causal, window, scale));
            (q, kv) = (q + q_size, kv + kv_size);
        }
        want
    }

    /// Returns the case with NaN for the keys and values of some sequences, whose results alone
    /// become NaN.
    pub(super) fn poisoned(&self, seqs: &[usize]) -> Case {
        let (num_heads, num_kv_heads, dim) = self.heads;
        let Case { q_lens, kv_lens, heads, element, stored, causal, window, q, k, v, want } = self;
        let mut case = Case {
            q_lens: q_lens.clone(),
            kv_lens: kv_lens.clone(),
            heads: *heads,
            element: *element,
            stored: *stored,
            causal: *causal,
            window: *window,
            q: q.clone(),
            k: k.clone(),
            v: v.clone(),
            want: want.clone(),
        };
        for &seq in seqs {
            let range = |lens: &[usize], row: usize| {
                let begin = lens[..seq].iter().sum::<usize>() * row;
                begin..begin + lens[seq] * row
            };
            case.k[range(kv_lens, num_kv_heads * dim)].fill(f64::NAN);
            case.v[range(kv_lens, num_kv_heads * dim)].fill(f64::NAN);
            case.want[range(q_lens, num_heads * dim)].fill(f64::NAN);
        }
        case
    }

    /// [seqs, tokens, heads, dim], or [tokens, heads, dim].
    fn shapes(&self, batched: bool) -> [Vec<i64>; 2] {
        let (num_heads, num_kv_heads, dim) = self.heads;
        [(&self.q_lens, num_heads), (&self.kv_lens, num_kv_heads)].map(|(lens, heads)| {
            let (heads, dim) = (heads as i64, dim as i64);
            match batched {
                true => vec![lens.len() as i64, lens[0] as i64, heads, dim],
                false => vec![lens.iter().sum::<usize>() as i64, heads, dim],
            }
        })
    }

    fn what(&self, form: &str, context: &Context) -> String {
        let Case { q_lens, kv_lens, heads, element, stored, causal, window, .. } = self;
        let lens = format!("{q_lens:?} queries, {kv_lens:?} keys of {stored:?}");
        let mask = format!("causal {causal}, window {window:?}");
        format!("{form} {element:?} {heads:?} {lens}, {mask}, on {}", context.name)
    }

    fn bar(&self) -> f64 {
        self.element.bar(2e-5, 2e-3, 1.6e-2)
    }

    /// Runs a batched call with these strides and compares.
    pub(super) fn batched(
        &self,
        context: &Context,
        backend: xserv_attention_backend,
        layout: &str,
        strides: impl Fn(&[i64]) -> Vec<i64>,
        misalign: usize,
    ) {
        let what = self.what(&format!("{layout} {backend:?}"), context);
        let [q_shape, k_shape] = self.shapes(true);
        let tensor = |shape: &[i64], values: &[f64]| {
            TestTensor::strided(context, self.element, shape, &strides(shape), misalign, values)
        };
        let (q, k, v) =
            (tensor(&q_shape, &self.q), tensor(&k_shape, &self.k), tensor(&k_shape, &self.v));
        let out = tensor(&q_shape, &vec![f64::NAN; self.q.len()]);
        ok(call(context, &self.options(backend), [&q, &k, &v, &out]));
        synchronize(context);
        let found = out.read(&what);
        compare(&what, &found, &self.want, self.bar());
        assert_eq!(q.read(&what), self.q, "{what}: q was changed");
        let again = tensor(&q_shape, &vec![f64::NAN; self.q.len()]);
        ok(call(context, &self.options(backend), [&q, &k, &v, &again]));
        synchronize(context);
        assert_eq!(again.read(&what), found, "{what}: not the same twice");
    }

    /// Runs packed calls, with more tokens than the sequences have.
    pub(super) fn packed(&self, context: &Context, backend: xserv_attention_backend) -> Vec<f64> {
        let what = self.what(&format!("packed {backend:?}"), context);
        let [mut q_shape, k_shape] = self.shapes(false);
        let row = self.heads.0 * self.heads.2;
        let (mut q, mut out) = (self.q.clone(), vec![f64::NAN; self.q.len()]);
        q_shape[0] += 2;
        q.extend(vec![0.0; 2 * row]);
        out.extend(vec![7.0; 2 * row]);
        let tensor =
            |shape: &[i64], values: &[f64]| TestTensor::new(context, self.element, shape, values);
        let (k, v) = (tensor(&k_shape, &self.k), tensor(&k_shape, &self.v));
        let q = tensor(&q_shape, &q);
        let (q_ends, k_ends) = (ends(context, &self.q_lens), ends(context, &self.kv_lens));
        let (q_ends, k_ends) = (q_ends.view(), k_ends.view());
        let mut options = self.options(backend);
        (options.cu_seqlens_q, options.cu_seqlens_k) = (&q_ends, &k_ends);
        options.max_q_len = self.q_lens.iter().copied().max().unwrap_or(0) as u32;
        let mut found = Vec::new();
        for max_kv_len in [0, self.kv_lens.iter().copied().max().unwrap_or(0)] {
            options.max_kv_len = max_kv_len as u32;
            // The second result is misaligned.
            let misalign = usize::from(max_kv_len > 0);
            let strides = row_major(&q_shape);
            let result =
                TestTensor::strided(context, self.element, &q_shape, &strides, misalign, &out);
            ok(call(context, &options, [&q, &k, &v, &result]));
            synchronize(context);
            let mut values = result.read(&what);
            assert!(values.split_off(self.q.len()).iter().all(|&x| x == 7.0), "{what}: the rest");
            compare(&what, &values, &self.want, self.bar());
            let is_same = |(x, y): (&f64, &f64)| x == y || x.is_nan() && y.is_nan();
            let is_again = found.is_empty() || found.iter().zip(&values).all(is_same);
            assert!(is_again, "{what}: not the same twice");
            found = values;
        }
        found
    }

    /// Runs paged calls over blocks in a shuffled order; what no sequence owns is NaN.
    pub(super) fn paged(
        &self,
        context: &Context,
        random: &mut Random,
        backend: xserv_attention_backend,
        (block_size, packed_q): (usize, bool),
    ) -> Vec<f64> {
        let what = self.what(&format!("paged by {block_size} {backend:?}"), context);
        let cache = Blocks::new(self, random, block_size);
        let [q_shape, _] = self.shapes(!packed_q);
        let tensor =
            |shape: &[i64], values: &[f64]| TestTensor::new(context, self.element, shape, values);
        let q = tensor(&q_shape, &self.q);
        let cached = |values: &[f64]| TestTensor::new(context, self.stored, &cache.shape, values);
        let (k, v) = (cached(&cache.k), cached(&cache.v));
        let out = TestTensor::blank(context, self.element, &q_shape);
        let (tables, lens) = cache.indices(context, self);
        let q_ends = ends(context, &self.q_lens);
        let (tables, lens, q_ends) = (tables.view(), lens.view(), q_ends.view());
        let mut options = self.options(backend);
        (options.block_tables, options.context_lens) = (&tables, &lens);
        if packed_q {
            options.cu_seqlens_q = &q_ends;
            options.max_q_len = self.q_lens.iter().copied().max().unwrap_or(0) as u32;
        }
        ok(call(context, &options, [&q, &k, &v, &out]));
        synchronize(context);
        let found = out.read(&what);
        compare(&what, &found, &self.want, self.bar());
        found
    }
}

/// A cache of blocks that holds the keys and values of a case.
struct Blocks {
    shape: Vec<i64>,
    k: Vec<f64>,
    v: Vec<f64>,
    max_blocks: usize,
    tables: Vec<f64>,
}

impl Blocks {
    fn new(case: &Case, random: &mut Random, block_size: usize) -> Self {
        let (_, num_kv_heads, dim) = case.heads;
        let needed = |len: usize| len.div_ceil(block_size);
        let max_blocks = case.kv_lens.iter().map(|&len| needed(len)).max().unwrap_or(0) + 1;
        let num_blocks = case.kv_lens.iter().map(|&len| needed(len)).sum::<usize>() + 2;
        let mut order: Vec<usize> = (0..num_blocks).collect();
        (1..num_blocks).rev().for_each(|i| order.swap(i, random.below(i + 1)));
        let row = num_kv_heads * dim;
        let mut k = vec![f64::NAN; num_blocks * block_size * row];
        let mut v = k.clone();
        let mut tables = vec![1e9; case.kv_lens.len() * max_blocks];
        let (mut token, mut next) = (0, 0);
        for (seq, &len) in case.kv_lens.iter().enumerate() {
            for j in 0..len {
                if j % block_size == 0 {
                    tables[seq * max_blocks + j / block_size] = order[next] as f64;
                    next += 1;
                }
                let place = (order[next - 1] * block_size + j % block_size) * row;
                k[place..place + row].copy_from_slice(&case.k[token * row..][..row]);
                v[place..place + row].copy_from_slice(&case.v[token * row..][..row]);
                token += 1;
            }
        }
        let shape = [num_blocks, block_size, num_kv_heads, dim].map(|n| n as i64).to_vec();
        Blocks { shape, k, v, max_blocks, tables }
    }

    fn indices<'a>(&self, context: &'a Context, case: &Case) -> (TestTensor<'a>, TestTensor<'a>) {
        let num_seqs = case.kv_lens.len() as i64;
        let lens: Vec<f64> = case.kv_lens.iter().map(|&len| len as f64).collect();
        let shape = [num_seqs, self.max_blocks as i64];
        (
            TestTensor::new(context, Type::I32, &shape, &self.tables),
            TestTensor::new(context, Type::I32, &[num_seqs], &lens),
        )
    }
}

fn ends<'a>(context: &'a Context, lens: &[usize]) -> TestTensor<'a> {
    let mut ends = vec![0.0];
    lens.iter().for_each(|&len| ends.push(ends[ends.len() - 1] + len as f64));
    TestTensor::new(context, Type::I32, &[ends.len() as i64], &ends)
}

pub(super) fn row_major(shape: &[i64]) -> Vec<i64> {
    (0..shape.len()).map(|i| shape[i + 1..].iter().product()).collect()
}

/// [seqs, tokens, heads, dim] as a view of [seqs, heads, tokens, dim].
fn by_head(shape: &[i64]) -> Vec<i64> {
    let [_, tokens, heads, dim] = shape.try_into().unwrap();
    vec![heads * tokens * dim, dim, tokens * dim, 1]
}

const LENS: [(usize, usize); 9] =
    [(1, 1), (1, 33), (17, 17), (64, 65), (127, 300), (129, 129), (1, 4097), (70, 70), (2, 600)];

#[test]
fn batched_and_paged() {
    let mut random = Random::new(80);
    let contexts = contexts();
    for (turn, dim) in [64, 80, 96, 128, 256, 40, 1].into_iter().enumerate() {
        for (index, element) in FLOATS.into_iter().enumerate() {
            for (n, (q_len, kv_len)) in LENS.into_iter().enumerate() {
                // Many lengths take all types below; here they take turns.
                if dim != 128 && (n + turn) % 3 != index {
                    continue;
                }
                let kv_len = if (dim, kv_len) == (128, 1100) { 4097 } else { kv_len };
                let (num_kv_heads, ratio) =
                    [(2, 1), (1, 4), (1, 5), (1, 8), (1, 12)][random.below(5)];
                let heads = (num_kv_heads * ratio, num_kv_heads, dim);
                // The longest of the references take the most time.
                let num_seqs = if q_len * kv_len > 4000 { 1 } else { 2 };
                let (q_lens, kv_lens) = ([q_len; 2], [kv_len; 2]);
                let lens = (&q_lens[..num_seqs], &kv_lens[..num_seqs]);
                let causal = random.below(2) == 0;
                let case = Case::new(&mut random, element, heads, lens, causal);
                let all_backends = random.below(4) == 0;
                let odd_layouts = random.below(4) == 0;
                for context in &contexts {
                    let is_fused = context.name == "cpu" || FUSED_DIMS.contains(&dim);
                    for backend in BACKENDS {
                        let serves = match backend {
                            XSERV_ATTENTION_FLASH => is_fused,
                            XSERV_ATTENTION_SPLIT_KV => is_fused && q_len == 1,
                            _ => true,
                        };
                        if serves && (all_backends || backend == XSERV_ATTENTION_AUTO) {
                            case.batched(context, backend, "batched", row_major, 0);
                        }
                    }
                    let auto = XSERV_ATTENTION_AUTO;
                    case.batched(context, auto, "by head", by_head, 0);
                    if odd_layouts {
                        let gaps = |shape: &[i64]| {
                            let row = shape[2] * (shape[3] + 1) + 3;
                            vec![shape[1] * row + 1, row, shape[3] + 1, 1]
                        };
                        case.batched(context, auto, "gaps", gaps, 1);
                        let columns =
                            |shape: &[i64]| row_major(shape).iter().map(|s| s * 2).collect();
                        case.batched(context, auto, "columns", columns, 0);
                    }
                    if is_fused {
                        let blocks = ([16, 32, 64][random.below(3)], random.below(2) == 0);
                        case.paged(context, &mut random, auto, blocks);
                    }
                }
            }
        }
    }
}

#[test]
fn sequences_of_many_lengths() {
    let mut random = Random::new(81);
    let contexts = contexts();
    let q_lens = [1, 0, 17, 129, 3, 64, 5, 0, 1, 70];
    let kv_lens = [300, 0, 17, 130, 35, 65, 64, 9, 1, 97];
    for (n, dim) in FUSED_DIMS.into_iter().enumerate() {
        for element in FLOATS {
            for causal in [false, true] {
                let heads = [(4, 2, dim), (5, 1, dim)][n % 2];
                let case = Case::new(&mut random, element, heads, (&q_lens, &kv_lens), causal);
                let poisoned = case.poisoned(&[3, 7]);
                for context in &contexts {
                    case.packed(context, XSERV_ATTENTION_AUTO);
                    poisoned.packed(context, XSERV_ATTENTION_AUTO);
                    case.paged(context, &mut random, XSERV_ATTENTION_FLASH, (16, true));
                }
            }
        }
    }
}

/// Prompts of many tiles in every form, which Hopper computes with instructions of its own.
#[test]
fn prompts() {
    let mut random = Random::new(88);
    let contexts = contexts();
    let ragged = ([300, 1, 515, 128], [300, 33, 700, 1000]);
    for (n, element) in [Type::F16, Type::BF16].into_iter().enumerate() {
        for (heads, causal) in [
            ((4, 2, 128), true),
            ((8, 1, 128), false),
            ((3, 3, 128), true),
            ((4, 2, 64), true),
            ((6, 1, 64), false),
        ] {
            let even = Case::new(&mut random, element, heads, (&[333; 2], &[417; 2]), causal);
            let ragged = Case::new(&mut random, element, heads, (&ragged.0, &ragged.1), causal);
            let poisoned = ragged.poisoned(&[1, 3]);
            for context in &contexts {
                even.batched(context, XSERV_ATTENTION_AUTO, "batched", row_major, 0);
                even.batched(context, XSERV_ATTENTION_AUTO, "by head", by_head, 0);
                let packed_q = n == 0;
                even.paged(context, &mut random, XSERV_ATTENTION_AUTO, (32, packed_q));
                ragged.packed(context, XSERV_ATTENTION_AUTO);
                poisoned.packed(context, XSERV_ATTENTION_AUTO);
                ragged.paged(context, &mut random, XSERV_ATTENTION_AUTO, (32, true));
            }
        }
    }
}

/// One query a sequence, or none: split-KV, the same bits in any batch and in every form.
#[test]
fn decoding() {
    let mut random = Random::new(82);
    let contexts = contexts();
    let q_lens = [1, 1, 1, 0, 1, 1, 1];
    let kv_lens = [1, 0, 256, 40, 257, 2049, 33];
    for (n, dim) in FUSED_DIMS.into_iter().enumerate() {
        for element in FLOATS {
            let heads = [(8, 1, dim), (2, 2, dim), (9, 1, dim)][n % 3];
            let case = Case::new(&mut random, element, heads, (&q_lens, &kv_lens), n % 2 == 0);
            for context in &contexts {
                let found = case.packed(context, XSERV_ATTENTION_SPLIT_KV);
                let blocks = ([16, 64][n % 2], true);
                let paged = case.paged(context, &mut random, XSERV_ATTENTION_SPLIT_KV, blocks);
                let what = case.what("decoding", context);
                // The host takes runs of keys that lie together.
                assert!(context.name == "cpu" || paged == found, "{what}: paged is not packed");
                let row = heads.0 * dim;
                let (mut q, mut kv) = (0, 0);
                for (seq, &kv_len) in kv_lens.iter().enumerate() {
                    let (q_size, kv_size) = (q_lens[seq] * row, kv_len * heads.1 * dim);
                    let alone = Case {
                        q_lens: vec![q_lens[seq]],
                        kv_lens: vec![kv_len],
                        q: case.q[q..q + q_size].to_vec(),
                        k: case.k[kv..kv + kv_size].to_vec(),
                        v: case.v[kv..kv + kv_size].to_vec(),
                        want: case.want[q..q + q_size].to_vec(),
                        ..case
                    };
                    if q_size > 0 && (kv_len > 33 || n == 0) {
                        let alone = alone.packed(context, XSERV_ATTENTION_SPLIT_KV);
                        assert_eq!(alone, found[q..q + q_size], "{what}: sequence {seq} alone");
                    }
                    (q, kv) = (q + q_size, kv + kv_size);
                }
            }
        }
    }
}

/// So many sequences beside a long one that their partial results (a quarter of a MB each) are not
/// computed by one launch.
#[test]
fn decoding_of_many_sequences() {
    let mut random = Random::new(87);
    let contexts = contexts();
    // Some without a query, on both sides of the border.
    let q_lens: Vec<usize> = (0..150).map(|i| usize::from(i % 11 != 3)).collect();
    let mut kv_lens: Vec<usize> = (0..150).map(|i| i % 37 + 1).collect();
    kv_lens[130] = 8200;
    for element in [Type::F32, Type::BF16] {
        let heads = (64, 2, 64);
        let case = Case::new(&mut random, element, heads, (&q_lens, &kv_lens), true);
        for context in &contexts {
            case.paged(context, &mut random, XSERV_ATTENTION_SPLIT_KV, (32, true));
        }
    }
}

#[test]
fn golden_vectors() {
    let Some(golden) = golden::open("attention") else { return };
    for context in contexts() {
        for case in &golden.cases {
            let element = if case.name.ends_with(".f32") { Type::F32 } else { Type::BF16 };
            // Stored [seqs, heads, tokens, dim].
            let tensor = |name: &str, blank: bool| {
                let stored = golden.tensor(case, name);
                let [seqs, heads, tokens, dim] = stored.shape.clone().try_into().unwrap();
                let mut values = Vec::new();
                for row in 0..seqs * tokens * heads {
                    let (seq, token, head) =
                        (row / heads / tokens, row / heads % tokens, row % heads);
                    let at = ((seq * heads + head) * tokens + token) * dim;
                    values.extend(&stored.values[at..at + dim]);
                }
                let shape = [seqs, tokens, heads, dim].map(|n| n as i64);
                let content = if blank { vec![f64::NAN; values.len()] } else { values.clone() };
                let strides = by_head(&shape);
                (TestTensor::strided(&context, element, &shape, &strides, 0, &content), values)
            };
            let (q, k, v) = (tensor("q", false), tensor("k", false), tensor("v", false));
            for backend in [XSERV_ATTENTION_AUTO, XSERV_ATTENTION_NAIVE] {
                let (out, want) = tensor("y", true);
                let mut options = options(case.params["causal"] == true, backend);
                options.scale = case.params["scale"].as_f64().unwrap() as f32;
                ok(call(&context, &options, [&q.0, &k.0, &v.0, &out]));
                synchronize(&context);
                let what = format!("attention {} {backend:?} on {}", case.name, context.name);
                compare(&what, &out.read(&what), &want, element.bar(2e-5, 2e-3, 1.6e-2));
            }
        }
    }
}

#[test]
fn scales_and_special_values() {
    let mut random = Random::new(83);
    for context in contexts() {
        for (element, lens) in FLOATS.into_iter().flat_map(|e| [(e, (1, 700)), (e, (70, 100))]) {
            let lens = (&[lens.0][..], &[lens.1][..]);
            let mut case = Case::new(&mut random, element, (4, 2, 64), lens, true);
            let [q_shape, k_shape] = case.shapes(true);
            let tensor = |shape: &[i64], x: &[f64]| TestTensor::new(&context, element, shape, x);
            let (k, v) = (tensor(&k_shape, &case.k), tensor(&k_shape, &case.v));
            let run = |q: &[f64], scale: f32| {
                let (q, out) =
                    (tensor(&q_shape, q), TestTensor::blank(&context, element, &q_shape));
                let mut options = options(true, XSERV_ATTENTION_AUTO);
                options.scale = scale;
                ok(call(&context, &options, [&q, &k, &v, &out]));
                synchronize(&context);
                out.read("special values")
            };
            // 30 makes the softmax sharp.
            for scale in [0.0f32, -0.0, -0.125, 30.0] {
                let what = case.what(&format!("scale {scale}"), &context);
                let want = case.expected(scale.into());
                // A score of some hundreds has few bits after the point.
                let bar = if scale == 30.0 { case.bar().max(1e-3) } else { case.bar() };
                compare(&what, &run(&case.q, scale), &want, bar);
            }
            // NaN stays in the row and head where it is.
            let row = case.q_lens[0] - 1;
            let at = (row * 4 + 1) * 64;
            case.q[at + 5] = f64::NAN;
            let what = case.what("a NaN", &context);
            case.want[at..at + 64].fill(f64::NAN);
            compare(&what, &run(&case.q, 0.125), &case.want, case.bar());
        }
    }
}

#[test]
fn without_elements() {
    for context in contexts() {
        for (q_shape, k_shape) in [
            ([0, 3, 4, 64], [0, 5, 2, 64]),
            ([2, 0, 4, 64], [2, 5, 2, 64]),
            ([2, 3, 0, 64], [2, 5, 2, 64]),
            ([2, 3, 0, 64], [2, 5, 0, 64]),
            ([2, 3, 4, 0], [2, 5, 2, 0]),
            ([2, 3, 4, 64], [2, 0, 2, 64]),
            ([2, 1, 4, 64], [2, 0, 2, 64]),
            ([2, 1, 4, 40], [2, 0, 2, 40]),
        ] {
            let q_len = q_shape.iter().product::<i64>() as usize;
            let k_len = k_shape.iter().product::<i64>() as usize;
            let q = TestTensor::new(&context, Type::F16, &q_shape, &vec![1.0; q_len]);
            let k = TestTensor::new(&context, Type::F16, &k_shape, &vec![1.0; k_len]);
            let out = TestTensor::blank(&context, Type::F16, &q_shape);
            ok(call(&context, &options(false, XSERV_ATTENTION_AUTO), [&q, &k, &k, &out]));
            synchronize(&context);
            assert!(out.read("no elements").iter().all(|&x| x == 0.0), "{q_shape:?} {k_shape:?}");
        }
        // No sequences.
        let nothing = TestTensor::new(&context, Type::F32, &[0, 2, 64], &[]);
        let lens = ends(&context, &[]);
        let view = lens.view();
        let mut options = options(true, XSERV_ATTENTION_AUTO);
        (options.cu_seqlens_q, options.cu_seqlens_k) = (&view, &view);
        ok(call(&context, &options, [&nothing, &nothing, &nothing, &nothing]));
        let out = TestTensor::new(&context, Type::F32, &[2, 2, 64], &[3.0; 256]);
        let q = TestTensor::new(&context, Type::F32, &[2, 2, 64], &[1.0; 256]);
        ok(call(&context, &options, [&q, &nothing, &nothing, &out]));
        synchronize(&context);
        assert_eq!(out.read("no sequences"), vec![3.0; 256]);
    }
}

/// Bad entries of an index array are refused on the CPU, and harmless on CUDA.
#[test]
fn bad_indices() {
    let mut random = Random::new(84);
    for context in contexts() {
        let on_cpu = context.name == "cpu";
        for (element, q_lens) in FLOATS.into_iter().flat_map(|e| [(e, [3, 40]), (e, [1, 1])]) {
            let case = Case::new(&mut random, element, (4, 2, 64), (&q_lens, &[50, 40]), true);
            let cache = Blocks::new(&case, &mut random, 16);
            let num_blocks = cache.shape[0] as f64;
            let [q_shape, k_shape] = case.shapes(false);
            let tensor = |shape: &[i64], x: &[f64]| TestTensor::new(&context, element, shape, x);
            let q = tensor(&q_shape, &case.q);
            let indices = |shape: &[i64], x: &[f64]| TestTensor::new(&context, Type::I32, shape, x);
            let max_q_len = q_lens[1] as u32;

            // Blocks that no sequence owns hold NaN, which a bad block must not bring in.
            let (k, v) = (tensor(&cache.shape, &cache.k), tensor(&cache.shape, &cache.v));
            for bad in [-1.0, num_blocks, 1e9, -2147483648.0] {
                let mut tables = cache.tables.clone();
                tables[cache.max_blocks + 1] = bad;
                let tables = indices(&[2, cache.max_blocks as i64], &tables);
                let (lens, q_ends) = (indices(&[2], &[50.0, 40.0]), ends(&context, &q_lens));
                let (tables, lens, q_ends) = (tables.view(), lens.view(), q_ends.view());
                let mut options = options(true, XSERV_ATTENTION_AUTO);
                (options.block_tables, options.context_lens) = (&tables, &lens);
                options.cu_seqlens_q = &q_ends;
                options.max_q_len = max_q_len;
                let out = TestTensor::blank(&context, element, &q_shape);
                let status = call(&context, &options, [&q, &k, &v, &out]);
                if on_cpu {
                    let message = refused(status);
                    assert!(message.contains(&format!("block_tables[1][1] is {bad}")), "{message}");
                    continue;
                }
                ok(status);
                let message = refused(xserv_context_synchronize(context.handle));
                let entry = format!("entry {} is {bad}", cache.max_blocks + 1);
                assert!(message.contains("block") && message.contains(&entry), "{message}");
                let found = out.read("a bad block");
                assert!(found.iter().all(|x| x.is_finite()), "{element:?} {bad}");
                let first = q_lens[0] * 4 * 64;
                compare("beside a bad block", &found[..first], &case.want[..first], case.bar());
                synchronize(&context);
            }
            // More keys than the table can name.
            for bad in [-1.0, (cache.max_blocks * 16 + 1) as f64, 2147483647.0] {
                let tables = vec![0.0; 2 * cache.max_blocks];
                let tables = indices(&[2, cache.max_blocks as i64], &tables);
                let (lens, q_ends) = (indices(&[2], &[50.0, bad]), ends(&context, &q_lens));
                let (tables, lens, q_ends) = (tables.view(), lens.view(), q_ends.view());
                let mut options = options(true, XSERV_ATTENTION_AUTO);
                (options.block_tables, options.context_lens) = (&tables, &lens);
                options.cu_seqlens_q = &q_ends;
                options.max_q_len = max_q_len;
                let out = TestTensor::blank(&context, element, &q_shape);
                let status = call(&context, &options, [&q, &k, &v, &out]);
                if on_cpu {
                    let message = refused(status);
                    assert!(message.contains(&format!("context_lens[1] is {bad}")), "{message}");
                } else {
                    ok(status);
                    synchronize(&context);
                    out.read("a bad context length");
                }
            }

            let (k, v) = (tensor(&k_shape, &case.k), tensor(&k_shape, &case.v));
            let total = q_shape[0] as f64;
            for (bad, of_q) in [
                ([-5.0, 3.0, total], true),
                ([1.0, 3.0, total], true),
                ([0.0, 3.0, total + 1.0], true),
                ([0.0, total, 1.0], true),
                ([2147483647.0, -2147483648.0, 2147483647.0], true),
                ([0.0, 50.0, 91.0], false),
                ([0.0, -50.0, 90.0], false),
                ([-2147483648.0, 2147483647.0, -1.0], false),
            ] {
                let bad = indices(&[3], &bad);
                let (q_ends, k_ends) = (ends(&context, &q_lens), ends(&context, &[50, 40]));
                let (q_ends, k_ends, bad) = (q_ends.view(), k_ends.view(), bad.view());
                let mut options = options(true, XSERV_ATTENTION_AUTO);
                options.cu_seqlens_q = if of_q { &bad } else { &q_ends };
                options.cu_seqlens_k = if of_q { &k_ends } else { &bad };
                options.max_q_len = max_q_len;
                let out = TestTensor::blank(&context, element, &q_shape);
                let status = call(&context, &options, [&q, &k, &v, &out]);
                if on_cpu {
                    let name = if of_q { "cu_seqlens_q" } else { "cu_seqlens_k" };
                    let message = refused(status);
                    assert!(message.contains(name), "{message}");
                } else {
                    ok(status);
                    synchronize(&context);
                    out.read("bad ends of sequences");
                }
            }
        }
    }
}

#[test]
fn refusals() {
    for context in contexts() {
        let blank = |element, shape: &[i64]| TestTensor::blank(&context, element, shape);
        let f32 = |shape: &[i64]| blank(Type::F32, shape);
        let (q, out) = (f32(&[2, 3, 4, 64]), f32(&[2, 3, 4, 64]));
        let k = f32(&[2, 5, 2, 64]);
        let default = options(false, XSERV_ATTENTION_AUTO);
        ok(call(&context, &default, [&q, &k, &k, &out]));
        // SAFETY: live tensors; NULL stands for the defaults.
        ok(unsafe {
            let (q, k, out) = (q.view(), k.view(), out.view());
            xserv_op_attention(context.handle, std::ptr::null(), &q, &k, &k, &out)
        });

        let expect = |status, parts: &[&str]| {
            let message = refused(status);
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        };
        let with =
            |q: &TestTensor<'_>, k: &TestTensor<'_>, v: &TestTensor<'_>, out: &TestTensor<'_>| {
                call(&context, &default, [q, k, v, out])
            };
        let f16 = blank(Type::F16, &[2, 5, 2, 64]);
        let i32 = blank(Type::I32, &[2, 3, 4, 64]);
        expect(with(&i32, &k, &k, &out), &["q has elements of i32"]);
        expect(with(&q, &f16, &k, &out), &["k has elements of f16"]);
        expect(with(&q, &k, &f16, &out), &["v has elements of f16"]);
        expect(with(&q, &k, &k, &f32(&[2, 3, 4, 32])), &["out has shape [2, 3, 4, 32]"]);
        expect(
            with(&q, &k, &f32(&[2, 4, 2, 64]), &out),
            &["v has shape [2, 4, 2, 64]", "[2, 5, 2, 64]"],
        );
        let other = f32(&[3, 5, 2, 64]);
        expect(with(&q, &other, &other, &out), &["q has batch 2", "k has 3"]);
        let other = f32(&[2, 5, 2, 32]);
        expect(with(&q, &other, &other, &out), &["k has head_dim 32", "q has 64"]);
        let other = f32(&[2, 5, 3, 64]);
        expect(with(&q, &other, &other, &out), &["q has 4 heads", "the 3 of k"]);
        let other = f32(&[2, 5, 0, 64]);
        expect(with(&q, &other, &other, &out), &["q has 4 heads", "the 0 of k"]);
        let other = f32(&[10, 2, 64]);
        expect(with(&q, &other, &other, &out), &["k has 3 dimensions"]);
        let flat = f32(&[6, 4, 64]);
        expect(with(&flat, &k, &k, &f32(&[6, 4, 64])), &["q has 3 dimensions"]);
        expect(with(&q, &k, &k, &q), &["out overlaps q"]);
        let same = f32(&[2, 3, 4, 64]);
        expect(with(&q, &same, &q, &same), &["out overlaps k"]);
        let mut shared = out.view();
        let mut strides = [256, 256, 64, 1];
        shared.strides = strides.as_mut_ptr();
        // SAFETY: live tensors.
        expect(
            unsafe {
                let (q, k) = (q.view(), k.view());
                xserv_op_attention(context.handle, &default, &q, &k, &k, &shared)
            },
            &["out", "share"],
        );

        let asked = |change: &dyn Fn(&mut xserv_attention_options)| {
            let mut options = default;
            change(&mut options);
            call(&context, &options, [&q, &k, &k, &out])
        };
        expect(asked(&|o| o.backend = 4), &["backend is 4"]);
        expect(asked(&|o| o.causal = 2), &["causal is 2"]);
        expect(asked(&|o| o.window = 5), &["window is 5", "needs causal"]);
        expect(asked(&|o| o.scale = f32::NAN), &["scale is NaN"]);
        expect(asked(&|o| o.scale = f32::INFINITY), &["scale is inf"]);
        expect(asked(&|o| o.struct_size = 8), &["struct_size is 8"]);
        let short = f32(&[2, 2, 2, 64]);
        let causal = options(true, XSERV_ATTENTION_AUTO);
        let status = call(&context, &causal, [&q, &short, &short, &out]);
        expect(status, &["3 queries", "2 keys", "causal"]);

        let i32s =
            |len: i64| TestTensor::new(&context, Type::I32, &[len], &vec![0.0; len as usize]);
        let (three, four) = (i32s(3), i32s(4));
        let tables = TestTensor::new(&context, Type::I32, &[3, 2], &[0.0; 6]);
        let (three, four, tables) = (three.view(), four.view(), tables.view());
        expect(asked(&|o| o.cu_seqlens_q = &three), &["cu_seqlens_k is NULL"]);
        expect(asked(&|o| o.cu_seqlens_k = &three), &["cu_seqlens_q is NULL"]);
        expect(asked(&|o| o.context_lens = &three), &["block_tables is NULL"]);
        expect(asked(&|o| o.block_tables = &tables), &["context_lens is NULL"]);
        let paged = |o: &mut xserv_attention_options| {
            (o.block_tables, o.context_lens) = (&tables, &three);
        };
        expect(asked(&|o| paged(o)), &["q has 2 sequences", "context_lens 3"]);
        let both = |o: &mut xserv_attention_options| {
            paged(o);
            o.cu_seqlens_k = &four;
        };
        expect(asked(&both), &["cu_seqlens_k", "block_tables"]);
        let longer = |o: &mut xserv_attention_options| {
            (o.block_tables, o.context_lens) = (&tables, &four);
        };
        expect(asked(&longer), &["block_tables has shape [3, 2]"]);
        let wide = TestTensor::new(&context, Type::I64, &[3], &[0.0; 3]);
        let wide = wide.view();
        let wide = |o: &mut xserv_attention_options| {
            (o.cu_seqlens_q, o.cu_seqlens_k) = (&wide, &three);
        };
        expect(asked(&wide), &["cu_seqlens_q has elements of i64"]);
        let packed = |o: &mut xserv_attention_options| {
            (o.cu_seqlens_q, o.cu_seqlens_k) = (&three, &three);
        };
        expect(asked(&|o| packed(o)), &["k has 4 dimensions"]);
        let tokens = f32(&[10, 2, 64]);
        let mut options = default;
        (options.cu_seqlens_q, options.cu_seqlens_k) = (&three, &four);
        let result = f32(&[6, 4, 64]);
        let status = call(&context, &options, [&flat, &tokens, &tokens, &result]);
        expect(status, &["cu_seqlens_q has 2 sequences", "3"]);

        // Backends that do not serve the call.
        let unsupported = |status, part: &str| {
            assert_eq!(status, XSERV_STATUS_UNSUPPORTED, "{}", message());
            assert!(message().contains(part), "{}", message());
        };
        unsupported(asked(&|o| o.backend = XSERV_ATTENTION_SPLIT_KV as u32), "one query");
        options.cu_seqlens_k = &three;
        options.backend = XSERV_ATTENTION_NAIVE as u32;
        unsupported(call(&context, &options, [&flat, &tokens, &tokens, &result]), "batched form");
        let odd = [f32(&[1, 2, 1, 300]), f32(&[1, 2, 1, 300]), f32(&[1, 2, 1, 300])];
        let [odd_q, odd_k, odd_out] = &odd;
        for backend in BACKENDS.into_iter().skip(2) {
            let mut options = default;
            options.backend = backend as u32;
            unsupported(call(&context, &options, [odd_q, odd_k, odd_k, odd_out]), "head_dim 300");
        }
    }
}

/// Flash allocates nothing on CUDA, and scores that do not fit are refused.
#[test]
fn memory_on_cuda() {
    let Some(context) = cuda() else { return };
    let stats = |context: &Context| {
        // SAFETY: plain numbers, with their size set.
        unsafe {
            let mut stats: xserv_memory_stats = std::mem::zeroed();
            stats.struct_size = size_of::<xserv_memory_stats>();
            ok(xserv_context_get_memory_stats(context.handle, &mut stats));
            stats
        }
    };
    let owned = |context: &Context, shape: [i64; 4]| {
        let mut owned = std::ptr::null_mut();
        // SAFETY: valid pointers; the view is filled by the call.
        unsafe {
            let dtype = xserv_dtype::XSERV_DTYPE_BF16 as u32;
            ok(xserv_owned_tensor_new(context.handle, dtype, 4, shape.as_ptr(), &mut owned));
            let mut view = std::mem::zeroed();
            ok(xserv_owned_tensor_view(owned, &mut view));
            (owned, view)
        }
    };
    // The first call brings what a context keeps for all that follow.
    for tokens in [64, 8192, 32768] {
        let (q, k) = (owned(&context, [1, tokens, 8, 128]), owned(&context, [1, tokens, 2, 128]));
        let (v, out) = (owned(&context, [1, tokens, 2, 128]), owned(&context, [1, tokens, 8, 128]));
        let before = stats(&context);
        let causal = options(true, XSERV_ATTENTION_AUTO);
        // SAFETY: live tensors, of arbitrary content.
        ok(unsafe { xserv_op_attention(context.handle, &causal, &q.1, &k.1, &v.1, &out.1) });
        synchronize(&context);
        let after = stats(&context);
        if tokens > 64 {
            assert_eq!(after.num_allocations, before.num_allocations, "{tokens} tokens");
            assert_eq!((after.allocated, after.peak), (before.allocated, before.peak));
        } else {
            assert!(after.peak <= before.peak + (64 << 10), "{tokens} tokens");
        }
        [q, k, v, out].into_iter().for_each(|tensor| xserv_owned_tensor_free(tensor.0));
    }
    // 32 GiB of scores under a budget of 1.
    let mut handle = std::ptr::null_mut();
    // SAFETY: plain out-pointers and a filled struct.
    unsafe {
        let mut options = std::mem::zeroed();
        xserv_context_options_init(&mut options, size_of_val(&options));
        options.device_kind = xserv_device_kind::XSERV_DEVICE_CUDA as u32;
        options.max_memory_bytes = 1 << 30;
        ok(xserv_context_new(&options, &mut handle));
    }
    let small = Context { handle, name: "cuda" };
    let (q, k) = (owned(&small, [1, 32768, 8, 128]), owned(&small, [1, 32768, 2, 128]));
    let out = owned(&small, [1, 32768, 8, 128]);
    let naive = options(true, XSERV_ATTENTION_NAIVE);
    // SAFETY: as above.
    let status = unsafe { xserv_op_attention(small.handle, &naive, &q.1, &k.1, &k.1, &out.1) };
    assert_eq!(status, XSERV_STATUS_OUT_OF_MEMORY, "{}", message());
    assert!(message().contains(&(8u64 * 32768 * 32768 * 4).to_string()), "{}", message());
    [q, k, out].into_iter().for_each(|tensor| xserv_owned_tensor_free(tensor.0));
}

/// On CUDA head_dims and block sizes without a kernel are refused where no other backend serves
/// them.
#[test]
fn unserved_on_cuda() {
    let Some(context) = cuda() else { return };
    let mut random = Random::new(85);
    for (dim, block_size, part) in
        [(40, 16, "head_dim 40"), (64, 8, "block_size 8"), (64, 48, "48")]
    {
        let lens = (&[1, 1][..], &[20, 30][..]);
        let case = Case::new(&mut random, Type::BF16, (2, 1, dim), lens, false);
        let cache = Blocks::new(&case, &mut random, block_size);
        let [q_shape, _] = case.shapes(true);
        let q = TestTensor::new(&context, Type::BF16, &q_shape, &case.q);
        let k = TestTensor::new(&context, Type::BF16, &cache.shape, &cache.k);
        let out = TestTensor::blank(&context, Type::BF16, &q_shape);
        let (tables, lens) = cache.indices(&context, &case);
        let (tables, lens) = (tables.view(), lens.view());
        let mut options = options(false, XSERV_ATTENTION_AUTO);
        (options.block_tables, options.context_lens) = (&tables, &lens);
        let status = call(&context, &options, [&q, &k, &k, &out]);
        assert_eq!(status, XSERV_STATUS_UNSUPPORTED, "{}", message());
        assert!(message().contains(part), "{}", message());
    }
}
