//! Speed of the operators beside what the machine can do, measured in the same run.
//!
//! `cargo bench --bench kernels -- [filter]...`: a table on stderr, one JSON object a line on stdout.
//! Times are the least of many repetitions: with one thread of its CPU time, which other programs
//! disturb less, else of wall-clock time. GB/s count compulsory traffic, GFLOP/s two per multiply-add.

mod host;

use std::time::Instant;
use xserv::backend::cpu::{CpuBackend, Isa};
use xserv::memory::{DType, HostBuffer, Pages};
use xserv::ops::activation::cpu::{activation_in_place, silu, Activation};
use xserv::ops::argmax::cpu_checked::argmax;
use xserv::ops::attention::cpu_paged::{attention, AttentionBatch, AttentionScratch};
use xserv::ops::common::packed_matrix::{PackedMatrix, PairOrder};
use xserv::ops::kv_cache::cpu::kv_cache_append;
use xserv::ops::kv_cache::layout::KvFormat;
use xserv::ops::kv_cache::layout::{KvBlocks, KvLayout, BLOCK_SIZE};
use xserv::ops::layer_norm::cpu::layer_norm;
use xserv::ops::linear::cpu::{linear, LinearScratch, Store};
use xserv::ops::rms_norm::cpu::rms_norm;
use xserv::ops::rms_norm::cpu_heads::rms_norm_heads;
use xserv::ops::rope::cpu_table::{rope, RopeTable};
use xserv::ops::rope::RopePairing;
use xserv::ops::silu_mul::cpu_stacked::silu_mul;
use xserv::ops::softmax::cpu::softmax;

fn main() {
    // Cargo passes `--bench`.
    let filters: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let bench = Bench { filters };
    for num_threads in [1, 2] {
        let backend = CpuBackend::new(num_threads).unwrap();
        bench.say(&format!("\n== {} ==", backend.name()));
        ceilings(&bench, &backend);
        decode(&bench, &backend);
        prefill(&bench, &backend);
        attentions(&bench, &backend);
        elementwise(&bench, &backend);
        host::all(&bench, &backend);
        packing(&bench, &backend);
        dispatch(&bench, &backend);
    }
}

struct Bench {
    filters: Vec<String>,
}

/// The work that the rate of a benchmark counts, per call.
enum Work {
    Bytes(f64),
    Flops(f64),
    Nothing,
}

impl Bench {
    fn say(&self, line: &str) {
        eprintln!("{line}");
    }

    fn wanted(&self, name: &str) -> bool {
        self.filters.is_empty() || self.filters.iter().any(|f| name.contains(f.as_str()))
    }

    /// Runs `f` for about `seconds` and reports the least time of a call.
    fn run(&self, backend: &CpuBackend, name: &str, seconds: f64, work: Work, mut f: impl FnMut()) {
        if !self.wanted(name) {
            return;
        }
        f();
        // Enough calls in one measurement to stand above the clock's resolution.
        let start = Instant::now();
        f();
        let calls = (2e-5 / start.elapsed().as_secs_f64().max(1e-9)).ceil().max(1.0) as usize;
        let (mut wall, mut cpu, mut repetitions) = (f64::INFINITY, f64::INFINITY, 0);
        let begin = Instant::now();
        while repetitions < 5 || begin.elapsed().as_secs_f64() < seconds {
            let (start, cpu_start) = (Instant::now(), thread_cpu_seconds());
            for _ in 0..calls {
                f();
            }
            wall = wall.min(start.elapsed().as_secs_f64() / calls as f64);
            cpu = cpu.min((thread_cpu_seconds() - cpu_start) / calls as f64);
            repetitions += 1;
        }
        let threads = backend.num_threads();
        // A thread that waits for others' programs is not slow: alone, its own time counts.
        let least = if threads == 1 { cpu } else { wall };
        let (rate, unit) = match work {
            Work::Bytes(bytes) => (bytes / least / 1e9, "GB/s"),
            Work::Flops(flops) => (flops / least / 1e9, "GFLOP/s"),
            Work::Nothing => (0.0, ""),
        };
        let micros = least * 1e6;
        self.say(&format!("{name:44} {micros:12.2} us  {rate:8.2} {unit}"));
        println!(
            "{{\"metric\":\"{name}_{threads}t\",\"value\":{micros:.3},\"unit\":\"us\",\
             \"better\":\"lower\",\"threads\":{threads},\"wall_us\":{:.3},\"rate\":{rate:.3},\
             \"rate_unit\":\"{unit}\",\"isa\":\"{}\",\"n\":{repetitions}}}",
            wall * 1e6,
            backend.isa().name()
        );
    }
}

/// Processor seconds of this thread.
fn thread_cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable; the clock exists on every system with POSIX threads.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64
}

const GIB: usize = 1 << 30;

fn ceilings(bench: &Bench, backend: &CpuBackend) {
    let threads = backend.num_threads();
    if bench.wanted("dram_read") {
        let mut buffer = HostBuffer::zeroed(GIB, Pages::Huge).unwrap();
        buffer.as_bytes_mut().fill(1);
        let part = GIB / threads;
        bench.run(backend, "dram_read", 2.0, Work::Bytes(GIB as f64), || {
            let bytes = buffer.as_bytes();
            backend.parallel_for(threads, &|t| read(&bytes[t * part..(t + 1) * part])).unwrap();
        });
    }
    #[cfg(target_arch = "x86_64")]
    if Isa::Avx512.is_supported() {
        let steps = 1_000_000u64;
        let total = (steps * 12 * threads as u64) as f64;
        bench.run(backend, "peak_fma_512", 0.5, Work::Flops(32.0 * total), || {
            backend.parallel_for(threads, &|_| x86::fma(steps)).unwrap();
        });
        if Isa::Avx512Bf16.is_supported() {
            bench.run(backend, "peak_vdpbf16ps", 0.5, Work::Flops(64.0 * total), || {
                backend.parallel_for(threads, &|_| x86::bf16_dot(steps)).unwrap();
            });
        }
        if Isa::Avx512Amx.is_supported() {
            let flops = (steps * 4 * threads as u64) as f64 * 2.0 * 16.0 * 16.0 * 32.0;
            bench.run(backend, "peak_tdpbf16ps", 0.5, Work::Flops(flops), || {
                backend.parallel_for(threads, &|_| x86::tiles(steps)).unwrap();
            });
        }
    }
}

/// Reads all bytes as fast as one thread can.
fn read(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if Isa::Avx512.is_supported() {
        return x86::read(bytes);
    }
    let (words, _) = bytes.as_chunks::<64>();
    let mut sum = [0u8; 64];
    for word in words {
        for i in 0..64 {
            sum[i] ^= word[i];
        }
    }
    std::hint::black_box(sum);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::*;

    pub fn read(bytes: &[u8]) {
        // SAFETY: the caller has found AVX-512.
        unsafe { read_512(bytes) }
    }

    #[target_feature(enable = "avx512f")]
    fn read_512(bytes: &[u8]) {
        let mut sums = [_mm512_setzero_si512(); 8];
        let (chunks, _) = bytes.as_chunks::<512>();
        for chunk in chunks {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: 8 x 64 bytes lie in the chunk.
                let value = unsafe { _mm512_loadu_si512(chunk.as_ptr().add(64 * i).cast()) };
                *sum = _mm512_add_epi64(*sum, value);
            }
        }
        let sum = sums.into_iter().fold(_mm512_setzero_si512(), |a, b| _mm512_xor_si512(a, b));
        std::hint::black_box(_mm512_reduce_add_epi64(sum));
    }

    /// Twelve independent accumulators, in assembly so that nothing is optimised away.
    macro_rules! peak {
        ($name:ident, $op:literal) => {
            pub fn $name(steps: u64) {
                // SAFETY: the caller has found the instructions; only the named registers change.
                unsafe {
                    asm!(
                        "2:",
                        concat!($op, " zmm0, zmm12, zmm13"),
                        concat!($op, " zmm1, zmm12, zmm13"),
                        concat!($op, " zmm2, zmm12, zmm13"),
                        concat!($op, " zmm3, zmm12, zmm13"),
                        concat!($op, " zmm4, zmm12, zmm13"),
                        concat!($op, " zmm5, zmm12, zmm13"),
                        concat!($op, " zmm6, zmm12, zmm13"),
                        concat!($op, " zmm7, zmm12, zmm13"),
                        concat!($op, " zmm8, zmm12, zmm13"),
                        concat!($op, " zmm9, zmm12, zmm13"),
                        concat!($op, " zmm10, zmm12, zmm13"),
                        concat!($op, " zmm11, zmm12, zmm13"),
                        "dec {steps}",
                        "jnz 2b",
                        steps = inout(reg) steps => _,
                        out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _,
                        out("zmm4") _, out("zmm5") _, out("zmm6") _, out("zmm7") _,
                        out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
                        out("zmm12") _, out("zmm13") _,
                        options(nomem, nostack)
                    );
                }
            }
        };
    }
    peak!(fma, "vfmadd231ps");
    peak!(bf16_dot, "vdpbf16ps");

    #[repr(C, align(64))]
    struct TileConfig {
        palette: u8,
        reserved: [u8; 15],
        bytes_per_row: [u16; 16],
        rows: [u8; 16],
    }

    /// Four sums in tiles.
    pub fn tiles(steps: u64) {
        let mut config =
            TileConfig { palette: 1, reserved: [0; 15], bytes_per_row: [0; 16], rows: [0; 16] };
        config.bytes_per_row[..8].fill(64);
        config.rows[..8].fill(16);
        // SAFETY: the caller has found the instructions and the permission; the tiles are released at
        // the end.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {steps}",
                "jnz 2b",
                "tilerelease",
                config = in(reg) &config,
                steps = inout(reg) steps => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            );
        }
    }
}

/// Small numbers with all mantissa bits in use.
fn numbers(len: usize) -> Vec<f32> {
    let mut state = 12345u32;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn matrix(
    backend: &CpuBackend,
    out_features: usize,
    in_features: usize,
    dtype: DType,
) -> PackedMatrix {
    let order = PairOrder::of(backend);
    let mut matrix = PackedMatrix::zeroed(out_features, in_features, dtype, order).unwrap();
    let writer = matrix.writer().unwrap();
    let rows: Vec<u8> = numbers(64 * in_features)
        .iter()
        .flat_map(|&x| half::bf16::from_f32(x).to_le_bytes())
        .collect();
    for first in (0..out_features).step_by(64) {
        let count = (out_features - first).min(64);
        writer.pack_rows(first, &rows[..count * in_features * 2], DType::BF16).unwrap();
    }
    drop(writer);
    matrix
}

/// (name, in_features, out_features, how many) of Qwen3-0.6B.
const SHAPES: [(&str, usize, usize, usize); 5] = [
    ("qkv", 1024, 4096, 28),
    ("attn_out", 2048, 1024, 28),
    ("gate_up", 1024, 6144, 28),
    ("down", 3072, 1024, 28),
    ("lm_head", 1024, 151_936, 1),
];

fn decode(bench: &Bench, backend: &CpuBackend) {
    for dtype in [DType::BF16, DType::F16] {
        let named = |shape: &str| format!("linear_decode_{dtype}_{shape}_all_layers");
        let name = format!("linear_decode_{dtype}_token");
        if !bench.wanted(&name) && !SHAPES.iter().any(|shape| bench.wanted(&named(shape.0))) {
            continue;
        }
        let layers: Vec<(&str, Vec<PackedMatrix>)> = SHAPES
            .iter()
            .map(|&(name, k, n, count)| {
                (name, (0..count).map(|_| matrix(backend, n, k, dtype)).collect())
            })
            .collect();
        let x = numbers(3072);
        let mut out = vec![0.0; 151_936];
        let mut scratch = LinearScratch::new();
        let mut call = |weight: &PackedMatrix| {
            let (x, out) = (&x[..weight.in_features()], &mut out[..weight.out_features()]);
            linear(backend, x, 1, weight, None, out, Store::Overwrite, &mut scratch).unwrap();
        };
        let bytes = |weights: &[PackedMatrix]| {
            weights.iter().map(PackedMatrix::size_bytes).sum::<usize>() as f64
        };
        let total: f64 = layers.iter().map(|(_, weights)| bytes(weights)).sum();
        bench.run(backend, &name, 3.0, Work::Bytes(total), || {
            for layer in 0..28 {
                layers.iter().filter_map(|(_, w)| w.get(layer)).for_each(&mut call);
            }
        });
        for (name, weights) in &layers {
            bench.run(backend, &named(name), 1.0, Work::Bytes(bytes(weights)), || {
                weights.iter().for_each(&mut call);
            });
        }
    }
}

fn prefill(bench: &Bench, backend: &CpuBackend) {
    let mut scratch = LinearScratch::new();
    let shapes = [("torch", 2048, 6144), ("1.7b_down", 6144, 2048), ("8b_down", 12288, 4096)]
        .into_iter()
        .chain(SHAPES[..4].iter().map(|s| (s.0, s.1, s.2)));
    for (label, k, n) in shapes {
        for (dtype, num_tokens) in [
            (DType::BF16, 512),
            (DType::BF16, 128),
            (DType::BF16, 8),
            (DType::F32, 512),
            (DType::F16, 512),
        ] {
            let name = format!("linear_prefill_{dtype}_{num_tokens}x{k}x{n}_{label}");
            if !bench.wanted(&name) {
                continue;
            }
            let weight = matrix(backend, n, k, dtype);
            let x = numbers(num_tokens * k);
            let mut out = vec![0.0; num_tokens * n];
            let flops = 2.0 * (num_tokens * k * n) as f64;
            bench.run(backend, &name, 1.0, Work::Flops(flops), || {
                let (out, store) = (&mut out[..], Store::Overwrite);
                linear(backend, &x, num_tokens, &weight, None, out, store, &mut scratch).unwrap();
            });
        }
    }
}

fn attentions(bench: &Bench, backend: &CpuBackend) {
    let (num_heads, num_kv_heads, head_dim) = (16, 8, 128);
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (name, q_len, context_len) in
            [("prefill", 512, 512), ("decode", 1, 512), ("decode", 1, 2048), ("decode", 1, 32_768)]
        {
            let name = format!("attention_{name}_{dtype}_16x8x128_ctx{context_len}");
            if !bench.wanted(&name) {
                continue;
            }
            let layout =
                KvLayout { dtype, format: KvFormat::Dense, num_layers: 1, num_kv_heads, head_dim };
            let num_blocks = context_len / BLOCK_SIZE;
            let mut bytes =
                HostBuffer::zeroed(num_blocks * layout.block_bytes(), Pages::Huge).unwrap();
            let mut cache = KvBlocks::new(layout, bytes.as_bytes_mut(), 0).unwrap();
            let row = num_kv_heads * head_dim;
            let k = numbers(context_len * row);
            let slots: Vec<u32> = (0..context_len as u32).collect();
            kv_cache_append(backend, &k, &k, row, &slots, &mut cache).unwrap();
            let q = numbers(q_len * num_heads * head_dim);
            let mut out = vec![0.0; q.len()];
            let table: Vec<u32> = (0..num_blocks as u32).collect();
            let batch = AttentionBatch {
                cu_seqlens_q: &[0, q_len as u32],
                context_lens: &[context_len as u32],
                block_tables: &table,
                max_blocks_per_seq: num_blocks,
            };
            let mut scratch = AttentionScratch::new();
            let work = if q_len == 1 {
                Work::Bytes((num_blocks * layout.block_bytes()) as f64)
            } else {
                Work::Flops(2.0 * (num_heads * q_len * (q_len + 1) * head_dim) as f64)
            };
            bench.run(backend, &name, 0.5, work, || {
                let stride = num_heads * head_dim;
                let out = &mut out[..];
                let (how, scratch) = ((0.088, None), &mut scratch);
                attention(backend, &q, stride, &cache, &batch, num_heads, how, out, scratch)
                    .unwrap();
            });
            if q_len > 1 {
                let work = Work::Bytes((2 * k.len() * (4 + dtype.size_bytes())) as f64);
                bench.run(backend, &name.replace("attention", "kv_append"), 0.3, work, || {
                    kv_cache_append(backend, &k, &k, row, &slots, &mut cache).unwrap();
                });
            }
        }
    }
}

fn elementwise(bench: &Bench, backend: &CpuBackend) {
    for (rows, width) in [(1, 1024), (512, 1024), (512, 4096)] {
        let x = numbers(rows * width);
        let weight = numbers(width);
        let mut out = vec![0.0; x.len()];
        let bytes = 8.0 * x.len() as f64;
        bench.run(backend, &format!("rms_norm_{rows}x{width}"), 0.3, Work::Bytes(bytes), || {
            rms_norm(backend, &x, &weight, 1e-6, &mut out).unwrap();
        });
        bench.run(backend, &format!("layer_norm_{rows}x{width}"), 0.3, Work::Bytes(bytes), || {
            layer_norm(backend, &x, &weight, Some(&weight), 1e-6, &mut out).unwrap();
        });
    }
    for (rows, width) in [(1, 3072), (512, 3072), (512, 12_288)] {
        let x = numbers(2 * rows * width);
        let mut out = vec![0.0; rows * width];
        let bytes = 12.0 * out.len() as f64;
        bench.run(backend, &format!("silu_mul_{rows}x{width}"), 0.3, Work::Bytes(bytes), || {
            silu_mul(backend, &x, width, &mut out).unwrap();
        });
        let bytes = 8.0 * out.len() as f64;
        bench.run(backend, &format!("silu_{rows}x{width}"), 0.3, Work::Bytes(bytes), || {
            silu(backend, &x[..rows * width], &mut out).unwrap();
        });
        let mut x = numbers(rows * width);
        bench.run(backend, &format!("gelu_tanh_{rows}x{width}"), 0.3, Work::Bytes(bytes), || {
            activation_in_place(backend, Activation::GeluTanh, &mut x).unwrap();
            // The result shrinks from call to call; the time does not depend on the values.
        });
    }
    for (rows, width) in [(16, 512), (8192, 512), (1, 151_936)] {
        let x = numbers(rows * width);
        let mut out = vec![0.0; x.len()];
        let bytes = 8.0 * x.len() as f64;
        bench.run(backend, &format!("softmax_{rows}x{width}"), 0.3, Work::Bytes(bytes), || {
            softmax(backend, &x, width, &mut out).unwrap();
        });
        let mut index = vec![0; rows];
        let bytes = 4.0 * x.len() as f64;
        bench.run(backend, &format!("argmax_{rows}x{width}"), 0.3, Work::Bytes(bytes), || {
            argmax(backend, &x, width, &mut index).unwrap();
        });
    }
    let inv_freq: Vec<f32> = (0..64).map(|i| 1e6f32.powf(-(i as f32) / 64.0)).collect();
    let table = RopeTable::new(&inv_freq, 1.0, 4096).unwrap();
    for tokens in [1, 512] {
        let mut x = numbers(tokens * 16 * 128);
        let positions: Vec<u32> = (0..tokens as u32).collect();
        let bytes = 8.0 * x.len() as f64;
        bench.run(backend, &format!("rope_{tokens}x16x128"), 0.3, Work::Bytes(bytes), || {
            let pairing = RopePairing::SplitHalf;
            rope(backend, &mut x, 2048, 16, &positions, &table, pairing).unwrap();
        });
        let weight = numbers(128);
        bench.run(
            backend,
            &format!("rms_norm_heads_{tokens}x16x128"),
            0.3,
            Work::Bytes(bytes),
            || {
                rms_norm_heads(backend, &mut x, tokens, 2048, 16, &weight, 1e-6).unwrap();
            },
        );
    }
}

fn packing(bench: &Bench, backend: &CpuBackend) {
    let (n, k) = (6144, 1024);
    for source in [DType::BF16, DType::F32] {
        let order = PairOrder::of(backend);
        let mut matrix = PackedMatrix::zeroed(n, k, DType::BF16, order).unwrap();
        let rows = vec![1u8; n * k * source.size_bytes()];
        let writer = matrix.writer().unwrap();
        let name = format!("pack_{source}_to_bf16_{n}x{k}");
        bench.run(backend, &name, 0.3, Work::Bytes(rows.len() as f64), || {
            backend
                .parallel_for(n / 64, &|panel| {
                    let size = 64 * k * source.size_bytes();
                    let rows = &rows[panel * size..(panel + 1) * size];
                    writer.pack_rows(panel * 64, rows, source).unwrap();
                })
                .unwrap();
        });
    }
}

fn dispatch(bench: &Bench, backend: &CpuBackend) {
    bench.run(backend, "pool_dispatch", 0.3, Work::Nothing, || {
        backend.parallel_for(backend.num_threads(), &|_| {}).unwrap();
    });
}
