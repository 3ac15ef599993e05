//! References in f64: plain loops over the same bits that the operators get.

/// x [rows, width] -> the same shape.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let mut out = Vec::new();
    for row in x.chunks(weight.len()) {
        let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (mean + f64::from(eps)).sqrt();
        out.extend(row.iter().zip(weight).map(|(&x, &w)| f64::from(x) * scale * f64::from(w)));
    }
    out
}

pub fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32) -> Vec<f64> {
    let mut out = Vec::new();
    for row in x.chunks(weight.len()) {
        let n = row.len() as f64;
        let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
        let scale = 1.0 / (variance + f64::from(eps)).sqrt();
        out.extend(
            row.iter()
                .zip(weight)
                .zip(bias)
                .map(|((&x, &w), &b)| (f64::from(x) - mean) * scale * f64::from(w) + f64::from(b)),
        );
    }
    out
}

pub fn silu(x: f32) -> f64 {
    let x = f64::from(x);
    x / (1.0 + (-x).exp())
}

pub fn gelu_tanh(x: f32) -> f64 {
    let x = f64::from(x);
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    0.5 * x * (1.0 + inner.tanh())
}

/// Rows of `row_len`; a row of -infinity alone gives zeros.
pub fn softmax(x: &[f32], row_len: usize) -> Vec<f64> {
    let mut out = Vec::new();
    for row in x.chunks(row_len) {
        let max = row.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(f64::from(x)));
        if max == f64::NEG_INFINITY {
            out.extend(row.iter().map(|_| 0.0));
            continue;
        }
        let exps: Vec<f64> = row.iter().map(|&x| (f64::from(x) - max).exp()).collect();
        let sum: f64 = exps.iter().sum();
        out.extend(exps.iter().map(|e| e / sum));
    }
    out
}

/// x [num_tokens, k], weight [n, k] -> [num_tokens, n].
pub fn linear(x: &[f32], weight: &[f32], bias: Option<&[f32]>, k: usize, n: usize) -> Vec<f64> {
    let num_tokens = x.len() / k;
    let mut out = Vec::with_capacity(num_tokens * n);
    for t in 0..num_tokens {
        for o in 0..n {
            let row = &x[t * k..(t + 1) * k];
            let column = &weight[o * k..(o + 1) * k];
            let dot: f64 = row.iter().zip(column).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            out.push(dot + bias.map_or(0.0, |b| f64::from(b[o])));
        }
    }
    out
}

/// One sequence: q [q_len, num_heads, head_dim], k and v [kv_len, num_kv_heads, head_dim] ->
/// [q_len, num_heads, head_dim]. Query i sees keys 0..=kv_len - q_len + i.
pub fn attention(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    scale: f64,
) -> Vec<f64> {
    let q_len = q.len() / (num_heads * head_dim);
    let kv_len = k.len() / (num_kv_heads * head_dim);
    let mut out = vec![0.0; q.len()];
    for i in 0..q_len {
        for h in 0..num_heads {
            let kv = h / (num_heads / num_kv_heads);
            let visible = kv_len - q_len + i + 1;
            let q = &q[(i * num_heads + h) * head_dim..][..head_dim];
            let row = |x: &'_ [f32], j: usize, d: usize| {
                f64::from(x[(j * num_kv_heads + kv) * head_dim + d])
            };
            let scores: Vec<f64> = (0..visible)
                .map(|j| scale * (0..head_dim).map(|d| f64::from(q[d]) * row(k, j, d)).sum::<f64>())
                .collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for d in 0..head_dim {
                let value: f64 = (0..visible).map(|j| weights[j] * row(v, j, d)).sum();
                out[(i * num_heads + h) * head_dim + d] = value / sum;
            }
        }
    }
    out
}
