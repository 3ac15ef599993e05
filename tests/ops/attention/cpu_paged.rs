//! The paged cache of the CPU: dtypes, head shapes, ragged batches, and bits that do not depend on
//! batch, chunks or threads.

use crate::support::{
    assert_close, assert_same_bits, backends, fp8, reference, rounded_all, Guarded, Random,
    Tolerance, DTYPES,
};
use xserv::backend::cpu::CpuBackend;
use xserv::memory::{DType, HostBuffer, Pages};
use xserv::ops::attention::cpu_paged::{attention, AttentionBatch, AttentionScratch};
use xserv::ops::kv_cache::cpu::kv_cache_append;
use xserv::ops::kv_cache::layout::KvFormat;
use xserv::ops::kv_cache::layout::{KvBlocks, KvLayout, BLOCK_SIZE};

/// A cache, and sequences whose blocks are scattered over it.
struct Cache {
    layout: KvLayout,
    window: Option<usize>,
    bytes: HostBuffer,
    tables: Vec<Vec<u32>>,
}

impl Cache {
    /// Room for sequences of up to `max_len` tokens, full of `stale` bit patterns.
    fn new(layout: KvLayout, num_seqs: usize, max_len: usize, stale: u8) -> Self {
        let per_seq = max_len.div_ceil(BLOCK_SIZE);
        let num_blocks = num_seqs * per_seq;
        let mut bytes =
            HostBuffer::zeroed(num_blocks * layout.block_bytes(), Pages::Default).unwrap();
        bytes.as_bytes_mut().fill(stale);
        let tables = (0..num_seqs)
            .map(|s| (0..per_seq).map(|b| (num_blocks - 1 - (b * num_seqs + s)) as u32).collect())
            .collect();
        Cache { layout, window: None, bytes, tables }
    }

    fn layer(&mut self) -> KvBlocks<'_> {
        KvBlocks::new(self.layout, self.bytes.as_bytes_mut(), self.layout.num_layers - 1).unwrap()
    }

    fn append(&mut self, backend: &CpuBackend, seq: usize, first: usize, k: &[f32], v: &[f32]) {
        let row = self.layout.num_kv_heads * self.layout.head_dim;
        let slots: Vec<u32> = (first..first + k.len() / row)
            .map(|t| self.tables[seq][t / BLOCK_SIZE] * BLOCK_SIZE as u32 + (t % BLOCK_SIZE) as u32)
            .collect();
        kv_cache_append(backend, k, v, row, &slots, &mut self.layer()).unwrap();
    }

    /// `parts` are (sequence, new tokens, tokens in the cache); q their new tokens in order.
    fn attend(
        &mut self,
        backend: &CpuBackend,
        q: &[f32],
        num_heads: usize,
        parts: &[(usize, usize, usize)],
    ) -> Vec<f32> {
        let mut cu_seqlens_q = vec![0];
        let max_blocks_per_seq = self.tables[0].len();
        let mut block_tables = Vec::new();
        for &(seq, q_len, _) in parts {
            cu_seqlens_q.push(cu_seqlens_q[cu_seqlens_q.len() - 1] + q_len as u32);
            block_tables.extend_from_slice(&self.tables[seq]);
        }
        let context_lens: Vec<u32> = parts.iter().map(|p| p.2 as u32).collect();
        let batch = AttentionBatch {
            cu_seqlens_q: &cu_seqlens_q,
            context_lens: &context_lens,
            block_tables: &block_tables,
            max_blocks_per_seq,
        };
        let mut out = Guarded::new(q.len());
        let head_dim = self.layout.head_dim;
        let how = (1.0 / (head_dim as f32).sqrt(), self.window);
        let scratch = &mut AttentionScratch::new();
        let stride = num_heads * head_dim;
        let cache = &self.layer();
        attention(backend, q, stride, cache, &batch, num_heads, how, out.get(), scratch).unwrap();
        out.checked("attention").to_vec()
    }
}

struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Sequence {
    fn new(random: &mut Random, len: usize, num_heads: usize, layout: &KvLayout) -> Self {
        let kv = len * layout.num_kv_heads * layout.head_dim;
        Sequence {
            q: random.normals(len * num_heads * layout.head_dim),
            k: random.normals(kv),
            v: random.normals(kv),
        }
    }
}

fn layout(dtype: DType, num_kv_heads: usize, head_dim: usize) -> KvLayout {
    KvLayout { dtype, format: KvFormat::Dense, num_layers: 3, num_kv_heads, head_dim }
}

const FORMATS: [KvFormat; 2] = [KvFormat::Dense, KvFormat::Fp8];

/// Returns keys or values as the cache stores them.
fn stored(layout: &KvLayout, x: &[f32]) -> Vec<f32> {
    match layout.format {
        KvFormat::Dense => rounded_all(x, layout.dtype),
        KvFormat::Fp8 => fp8::round_all(x),
    }
}

#[test]
fn head_shapes_and_lengths() {
    let mut random = Random::new(10);
    for (dtype, format) in DTYPES.into_iter().flat_map(|dtype| FORMATS.map(|f| (dtype, f))) {
        for (num_heads, num_kv_heads, head_dim) in [
            (4, 2, 16),
            (3, 3, 32),
            (6, 2, 64),
            (2, 1, 80),
            (4, 4, 96),
            (16, 8, 128),
            (5, 1, 256),
            (2, 1, 2),
            (2, 2, 40),
        ] {
            let layout = KvLayout { format, ..layout(dtype, num_kv_heads, head_dim) };
            for (kv_len, q_len) in
                [(1, 1), (31, 31), (32, 1), (33, 33), (65, 2), (70, 64), (100, 0), (290, 130)]
            {
                let seq = Sequence::new(&mut random, kv_len, num_heads, &layout);
                let q = &seq.q[(kv_len - q_len) * num_heads * head_dim..];
                let q_exact = rounded_all(q, dtype);
                let [k, v] = [&seq.k, &seq.v].map(|x| stored(&layout, x));
                let q_exact = if dtype == DType::BF16 { &q_exact[..] } else { q };
                let scale = 1.0 / f64::from((head_dim as f32).sqrt());
                // One that is in a block, one that is more than a block, and none.
                let windows = [Some(1 + random.below(31)), Some(33 + random.below(140)), None];
                for window in windows {
                    let expected = reference::windowed_attention(
                        (q_exact, &k, &v),
                        (num_heads, num_kv_heads, head_dim),
                        true,
                        window.unwrap_or(usize::MAX),
                        scale,
                    );
                    for backend in backends(&[1, 2]) {
                        // Stale NaNs fill the cache: slots after the last token must not be used.
                        let mut cache = Cache::new(layout, 1, kv_len, 0xff);
                        cache.window = window;
                        cache.append(&backend, 0, 0, &seq.k, &seq.v);
                        let out = cache.attend(&backend, q, num_heads, &[(0, q_len, kv_len)]);
                        let what = format!(
                            "attention {dtype} {format:?} {num_heads}/{num_kv_heads}x{head_dim} {q_len} of {kv_len}, window {window:?}, on {}",
                            backend.name()
                        );
                        let t = if dtype == DType::BF16 { 8e-3 } else { 2e-5 };
                        assert_close(&what, &out, &expected, Tolerance::Rms(t));
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch_chunk_and_number_of_threads() {
    let mut random = Random::new(11);
    for (dtype, format) in DTYPES.into_iter().flat_map(|dtype| FORMATS.map(|f| (dtype, f))) {
        for (num_heads, num_kv_heads, head_dim, window) in [
            (4, 2, 64, None),
            (3, 1, 48, None),
            (2, 2, 128, None),
            (4, 2, 64, Some(5)),
            (3, 1, 48, Some(40)),
            (2, 2, 128, Some(64)),
        ] {
            let layout = KvLayout { format, ..layout(dtype, num_kv_heads, head_dim) };
            let lens = [75usize, 1, 130, 33];
            let seqs: Vec<Sequence> = lens
                .iter()
                .map(|&len| Sequence::new(&mut random, len, num_heads, &layout))
                .collect();
            let row = num_heads * head_dim;
            for one in backends(&[1]) {
                let mut cache = Cache::new(layout, lens.len(), 160, 0);
                cache.window = window;
                for (s, seq) in seqs.iter().enumerate() {
                    cache.append(&one, s, 0, &seq.k, &seq.v);
                }
                let whole: Vec<Vec<f32>> = (0..lens.len())
                    .map(|s| cache.attend(&one, &seqs[s].q, num_heads, &[(s, lens[s], lens[s])]))
                    .collect();
                // All in one batch, on more threads.
                let q: Vec<f32> = seqs.iter().flat_map(|s| s.q.clone()).collect();
                let parts: Vec<_> = (0..lens.len()).map(|s| (s, lens[s], lens[s])).collect();
                for num_threads in [1, 2, 3] {
                    let backend = CpuBackend::with_isa(num_threads, one.isa()).unwrap();
                    let batched = cache.attend(&backend, &q, num_heads, &parts);
                    let what = format!("{dtype} batch on {}", backend.name());
                    assert_same_bits(&what, &batched, &whole.concat());
                }
                // In chunks, the cache filled chunk by chunk; the last ones single tokens.
                let mut chunked = Cache::new(layout, lens.len(), 160, 0xff);
                chunked.window = window;
                let (seq, full) = (&seqs[2], &whole[2]);
                let kv_row = num_kv_heads * head_dim;
                for (first, end) in [(0, 7), (7, 64), (64, 65), (65, 128), (128, 129), (129, 130)] {
                    let kv = first * kv_row..end * kv_row;
                    chunked.append(&one, 2, first, &seq.k[kv.clone()], &seq.v[kv]);
                    let q = &seq.q[first * row..end * row];
                    let out = chunked.attend(&one, q, num_heads, &[(2, end - first, end)]);
                    let what = format!("{dtype} chunk {first}..{end} on {}", one.name());
                    assert_same_bits(&what, &out, &full[first * row..end * row]);
                }
            }
        }
    }
}

#[test]
fn large_scores_and_growing_maxima_stay_finite() {
    let mut random = Random::new(12);
    let layout = layout(DType::F32, 1, 64);
    let mut seq = Sequence::new(&mut random, 200, 2, &layout);
    for (t, k) in seq.k.chunks_mut(64).enumerate() {
        // Later keys score higher: the maximum moves in every block.
        k.iter_mut().for_each(|k| *k *= t as f32);
    }
    seq.q.iter_mut().for_each(|q| *q *= 30.0);
    let expected = reference::attention((&seq.q, &seq.k, &seq.v), (2, 1, 64), true, 0.125);
    for backend in backends(&[2]) {
        let mut cache = Cache::new(layout, 1, 200, 0xff);
        cache.append(&backend, 0, 0, &seq.k, &seq.v);
        let out = cache.attend(&backend, &seq.q, 2, &[(0, 200, 200)]);
        // Scores of some 1e4 carry errors of 1e-3 into the exponent.
        assert_close("large scores", &out, &expected, Tolerance::Rms(2e-2));
    }
}

#[test]
fn refuses_wrong_shapes() {
    let backend = CpuBackend::new(1).unwrap();
    let layout = layout(DType::BF16, 2, 16);
    let mut bytes = HostBuffer::zeroed(4 * layout.block_bytes(), Pages::Default).unwrap();
    let cache = KvBlocks::new(layout, bytes.as_bytes_mut(), 0).unwrap();
    let good = AttentionBatch {
        cu_seqlens_q: &[0, 1],
        context_lens: &[40],
        block_tables: &[1, 3],
        max_blocks_per_seq: 2,
    };
    let attend = |batch: &AttentionBatch, num_heads, q: &[f32]| {
        let scratch = &mut AttentionScratch::new();
        let mut out = [0.0; 64];
        attention(&backend, q, 64, &cache, batch, num_heads, (1.0, None), &mut out, scratch)
    };
    let q = [0.0; 64];
    attend(&good, 4, &q).unwrap();
    assert!(attend(&good, 3, &q).is_err());
    assert!(attend(&good, 4, &q[1..]).is_err());
    assert!(attend(&AttentionBatch { block_tables: &[1, 4], ..good }, 4, &q).is_err());
    assert!(attend(&AttentionBatch { block_tables: &[1], ..good }, 4, &q).is_err());
    assert!(attend(&AttentionBatch { context_lens: &[65], ..good }, 4, &q).is_err());
    assert!(attend(&AttentionBatch { context_lens: &[0], ..good }, 4, &q).is_err());
    assert!(attend(&AttentionBatch { cu_seqlens_q: &[1, 1], ..good }, 4, &q).is_err());
    assert!(attend(&AttentionBatch { cu_seqlens_q: &[0], ..good }, 4, &q).is_err());
}
