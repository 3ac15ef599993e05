//! References in f64, one for each operator: plain loops over the same bits that the operators get,
//! whatever the form of the operator and the type that it stores.

fn wide<T: Copy + Into<f64>>(x: &[T]) -> Vec<f64> {
    x.iter().map(|&x| x.into()).collect()
}

/// x [rows, width] -> the same shape; weight [width].
pub fn rms_norm<T: Copy + Into<f64>>(x: &[T], weight: &[T], eps: f64) -> Vec<f64> {
    let (x, weight) = (wide(x), wide(weight));
    let mut out = Vec::new();
    for row in x.chunks_exact(weight.len()) {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (mean + eps).sqrt();
        out.extend(row.iter().zip(&weight).map(|(x, w)| x * scale * w));
    }
    out
}

/// x [rows, width] -> the same shape; weight and bias [width].
pub fn layer_norm<T: Copy + Into<f64>>(
    x: &[T],
    weight: &[T],
    bias: Option<&[T]>,
    eps: f64,
) -> Vec<f64> {
    let (x, weight, bias) = (wide(x), wide(weight), bias.map(wide));
    let mut out = Vec::new();
    for row in x.chunks_exact(weight.len()) {
        let len = row.len() as f64;
        let mean = row.iter().sum::<f64>() / len;
        let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / len;
        let scale = 1.0 / (variance + eps).sqrt();
        let added = |i: usize| bias.as_ref().map_or(0.0, |bias| bias[i]);
        let normed = row.iter().zip(&weight).map(|(x, w)| (x - mean) * scale * w);
        out.extend(normed.enumerate().map(|(i, y)| y + added(i)));
    }
    out
}

/// x / (1 + exp(-x)).
pub fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Returns the error function's complement: its Taylor series, and for large x the continued
/// fraction.
fn erfc(x: f64) -> f64 {
    let z = x.abs();
    let upper = if z < 2.0 {
        let (mut term, mut sum, mut n) = (z, z, 0.0);
        while term.abs() > 1e-18 * sum.abs() {
            n += 1.0;
            term *= -z * z / n;
            sum += term / (2.0 * n + 1.0);
        }
        1.0 - std::f64::consts::FRAC_2_SQRT_PI * sum
    } else {
        let mut fraction = z;
        for n in (1..200).rev() {
            fraction = z + f64::from(n) / 2.0 / fraction;
        }
        (-z * z).exp() / std::f64::consts::PI.sqrt() / fraction
    };
    if x < 0.0 {
        2.0 - upper
    } else {
        upper
    }
}

/// Returns the exact GELU.
pub fn gelu(x: f64) -> f64 {
    0.5 * x * erfc(-x / 2f64.sqrt())
}

/// GPT-2's GELU.
pub fn gelu_tanh(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    x / (1.0 + (-2.0 * inner).exp())
}

/// Rows of `row_len`; a row of -infinity alone gives zeros.
pub fn softmax<T: Copy + Into<f64>>(x: &[T], row_len: usize) -> Vec<f64> {
    let mut out = Vec::new();
    for row in wide(x).chunks(row_len.max(1)) {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let base = if max == f64::NEG_INFINITY { 0.0 } else { max };
        let powers: Vec<f64> = row.iter().map(|x| (x - base).exp()).collect();
        let sum: f64 = powers.iter().sum();
        out.extend(powers.iter().map(|power| if sum == 0.0 { 0.0 } else { power / sum }));
    }
    out
}

/// x [num_tokens, k], weight [n, k], bias [n] -> [num_tokens, n].
pub fn linear<T: Copy + Into<f64>>(
    x: &[T],
    weight: &[T],
    bias: Option<&[T]>,
    k: usize,
    n: usize,
) -> Vec<f64> {
    let (x, weight, bias) = (wide(x), wide(weight), bias.map(wide));
    let num_tokens = x.len() / k;
    let mut out = Vec::with_capacity(num_tokens * n);
    for row in x.chunks_exact(k) {
        for (i, column) in weight.chunks_exact(k).enumerate() {
            let product: f64 = row.iter().zip(column).map(|(a, b)| a * b).sum();
            out.push(product + bias.as_ref().map_or(0.0, |bias| bias[i]));
        }
    }
    out
}

/// `alpha op(a) op(b) + beta c` with the layout of c, which keeps what is between its rows; without
/// c and beta [m, n]. op(a) is [m, k] and op(b) [k, n]; a and b are row-major with rows `lda` and
/// `ldb` apart.
pub fn gemm<T: Copy + Into<f64>>(
    (a, b, c): (&[T], &[T], &[T]),
    (m, n, k): (usize, usize, usize),
    (transpose_a, transpose_b): (bool, bool),
    (lda, ldb, ldc): (usize, usize, usize),
    (alpha, beta): (f32, f32),
) -> Vec<f64> {
    let (a, b) = (wide(a), wide(b));
    let mut out = if c.is_empty() { vec![0.0; m * n] } else { wide(c) };
    // Rows of op(a) and columns of op(b), so that the sums run along memory.
    let gather = |x: &[f64], count: usize, stride: usize, is_turned: bool| -> Vec<f64> {
        let place = |i: usize, l: usize| if is_turned { l * stride + i } else { i * stride + l };
        (0..count).flat_map(|i| (0..k).map(move |l| (i, l))).map(|(i, l)| x[place(i, l)]).collect()
    };
    let rows = gather(&a, m, lda, transpose_a);
    let columns = gather(&b, n, ldb, !transpose_b);
    for i in 0..m {
        for j in 0..n {
            let out = &mut out[i * ldc + j];
            let product = dot(&rows[i * k..(i + 1) * k], &columns[j * k..(j + 1) * k]);
            let old = if beta == 0.0 { 0.0 } else { f64::from(beta) * *out };
            *out = f64::from(alpha) * product + old;
        }
    }
    out
}

/// Returns the scalar product, as eight sums that the compiler can put into vectors.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    for (a, b) in a.chunks(8).zip(b.chunks(8)) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}

/// One sequence: q [q_len, heads, head_dim], k and v [kv_len, kv_heads, head_dim] -> [q_len, heads,
/// head_dim]. With `causal` query i sees keys 0..=kv_len - q_len + i; without keys the result is
/// zero.
pub fn attention<T: Copy + Into<f64>>(
    operands: (&[T], &[T], &[T]),
    sizes: (usize, usize, usize),
    causal: bool,
    scale: f64,
) -> Vec<f64> {
    windowed_attention(operands, sizes, causal, usize::MAX, scale)
}

/// The same with a window: of the keys that a query sees by `causal`, it sees the last `window`.
pub fn windowed_attention<T: Copy + Into<f64>>(
    (q, k, v): (&[T], &[T], &[T]),
    (num_heads, num_kv_heads, head_dim): (usize, usize, usize),
    causal: bool,
    window: usize,
    scale: f64,
) -> Vec<f64> {
    let (q, k, v) = (wide(q), wide(k), wide(v));
    let q_len = q.len() / (num_heads * head_dim);
    let kv_len = k.len() / (num_kv_heads * head_dim);
    let mut out = vec![0.0; q.len()];
    let mut weights = vec![0.0; kv_len];
    for i in 0..q_len {
        let visible = if causal { (kv_len + i + 1).saturating_sub(q_len) } else { kv_len };
        let first = visible.saturating_sub(window);
        for head in 0..num_heads {
            let kv_head = head / (num_heads / num_kv_heads);
            let row = (i * num_heads + head) * head_dim;
            let weights = &mut weights[first..visible];
            for (weight, j) in weights.iter_mut().zip(first..) {
                let k = &k[(j * num_kv_heads + kv_head) * head_dim..][..head_dim];
                *weight = dot(&q[row..row + head_dim], k) * scale;
            }
            let max = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            weights.iter_mut().for_each(|w| *w = (*w - max).exp());
            let sum: f64 = weights.iter().sum();
            for (weight, j) in weights.iter().zip(first..) {
                let v = &v[(j * num_kv_heads + kv_head) * head_dim..][..head_dim];
                for (out, v) in out[row..row + head_dim].iter_mut().zip(v) {
                    *out += weight / sum * v;
                }
            }
        }
    }
    out
}

/// Rotates the heads of x, rows of `num_heads * head_dim` elements `row_stride` apart, by rows of
/// cos and sin [max_position, head_dim / 2]. Pairs are (i, i + head_dim / 2), or neighbours if
/// `interleaved`.
pub fn rope<T: Copy + Into<f64>>(
    x: &[T],
    (row_stride, num_heads, head_dim): (usize, usize, usize),
    positions: &[usize],
    cos: &[f64],
    sin: &[f64],
    interleaved: bool,
) -> Vec<f64> {
    let half = head_dim / 2;
    let mut out = wide(x);
    for (token, &position) in positions.iter().enumerate() {
        for head in 0..num_heads {
            let head = &mut out[token * row_stride + head * head_dim..][..head_dim];
            for i in 0..half {
                let (c, s) = (cos[position * half + i], sin[position * half + i]);
                let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
                (head[a], head[b]) = (head[a] * c - head[b] * s, head[b] * c + head[a] * s);
            }
        }
    }
    out
}

/// Returns the rows of table [vocab_size, width] that `ids` name.
pub fn embedding<T: Copy>(table: &[T], width: usize, ids: &[usize]) -> Vec<T> {
    ids.iter().flat_map(|&id| table[id * width..][..width].iter().copied()).collect()
}

/// x [rows, columns] -> [columns, rows].
pub fn transpose<T: Copy>(x: &[T], rows: usize, columns: usize) -> Vec<T> {
    (0..columns).flat_map(|c| (0..rows).map(move |r| x[r * columns + c])).collect()
}

/// Returns the places of the k largest, NaN first, the lowest of equals first.
pub fn largest<T: Copy + Into<f64>>(row: &[T], k: usize) -> Vec<usize> {
    let row = wide(row);
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| {
        let key = |i: usize| (row[i].is_nan(), if row[i].is_nan() { 0.0 } else { row[i] });
        let (a, b) = (key(a), key(b));
        // Zeros of both signs are equal.
        b.0.cmp(&a.0).then(b.1.partial_cmp(&a.1).expect("numbers"))
    });
    order.truncate(k);
    order
}
