//! Times steps of a model on a GPU, beside what the memory and the tensor cores of the card allow:
//!
//! ```text
//! cargo bench --bench steps -- FOLDER [--decode 1x512,32x4096] [--prefill 512,2048] [--steps 64] [--json]
//! ```
//!
//! `--decode BxC`: B sequences with C tokens behind them take one greedy token each, steps following each other
//! without a gap, as in an engine. `--prefill T`: a prompt of T tokens up to its first token. Times are medians, in
//! milliseconds. The limits are those of an H200: 4706 GB/s of reads, 680 TFLOP/s of sustained bf16 products;
//! `--read-gbs` and `--tflops` set others. `tests/bench/make_random_model.py` makes folders.

use std::time::Instant;

use xserv::memory::DType;
use xserv::model::TokenChoice;

#[path = "../support/model_driver.rs"]
mod driver;

use driver::{cuda_context, load_on_cuda, Driver, Sequence};

struct Options {
    folder: String,
    decode: Vec<(usize, usize)>,
    prefill: Vec<usize>,
    steps: usize,
    read_gbs: f64,
    tflops: f64,
    json: bool,
}

fn numbers(list: &str) -> Vec<usize> {
    list.split(',').filter_map(|n| n.parse().ok()).collect()
}

fn options() -> Option<Options> {
    let mut options = Options {
        folder: String::new(),
        decode: vec![(1, 512), (1, 4096)],
        prefill: vec![512, 2048],
        steps: 64,
        read_gbs: 4706.0,
        tflops: 680.0,
        json: false,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--bench" => {}
            "--json" => options.json = true,
            "--decode" => {
                let pair = |s: &str| {
                    let (b, c) = s.split_once('x')?;
                    Some((b.parse().ok()?, c.parse().ok()?))
                };
                options.decode = args.next()?.split(',').filter_map(pair).collect();
            }
            "--prefill" => options.prefill = numbers(&args.next()?),
            "--steps" => options.steps = args.next()?.parse().ok()?,
            "--read-gbs" => options.read_gbs = args.next()?.parse().ok()?,
            "--tflops" => options.tflops = args.next()?.parse().ok()?,
            other if !other.starts_with('-') => options.folder = other.to_string(),
            _ => return None,
        }
    }
    (!options.folder.is_empty()).then_some(options)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn report(options: &Options, name: &str, ms: f64, limit_ms: f64, tokens: usize) {
    let (share, rate) = (limit_ms / ms * 100.0, tokens as f64 / ms * 1e3);
    match options.json {
        true => println!(
            "{{\"metric\": \"{name}\", \"ms\": {ms:.4}, \"limit_ms\": {limit_ms:.4}, \"tokens_per_second\": {rate:.1}}}"
        ),
        false => println!("{name:<22} {ms:>9.3} ms  limit {limit_ms:>8.3} ({share:>5.1} %)  {rate:>9.0} tok/s"),
    }
}

fn main() {
    let Some(options) = options() else {
        println!("usage: steps FOLDER [--decode 1x512] [--prefill 512] [--steps 64] [--json]");
        return;
    };
    let Some(context) = cuda_context() else { return };
    let begin = Instant::now();
    let model = load_on_cuda(&options.folder, Some(DType::BF16), context).expect("a model");
    println!("{}: loaded in {:.2} s", model.device_name(), begin.elapsed().as_secs_f64());
    let config = model.config();
    // Bytes that every step reads: all weights but the embedding, or with it where it is the output matrix too.
    let embedding = config.vocab_size as f64 * config.hidden_size as f64;
    let matrices = model.num_parameters() as f64;
    let is_tied = config.tie_word_embeddings;
    let read_weights = matrices - if is_tied { 0.0 } else { embedding };
    let kv_bytes = model.kv_layout().bytes_per_token() as f64;
    let linear = matrices - embedding * if is_tied { 1.0 } else { 2.0 };
    let attention_flops =
        |pairs: f64| 4.0 * pairs * (config.num_heads * config.head_dim * config.num_layers) as f64;

    for &(batch, context_len) in &options.decode {
        let blocks_per_seq = (context_len + options.steps + 16).div_ceil(32) + 1;
        let mut driver = Driver::new(&model, batch * blocks_per_seq);
        let mut sequences: Vec<Sequence> = (0..batch).map(|_| Sequence::default()).collect();
        for sequence in &mut sequences {
            driver.pretend(sequence, context_len);
        }
        let choices = vec![TokenChoice::Greedy; batch];
        let sources: Vec<u32> = (0..batch as u32).collect();
        let mut times = Vec::new();
        let mut last = Instant::now();
        for step in 0..options.steps + 8 {
            let mut parts: Vec<(&mut Sequence, &[u32])> =
                sequences.iter_mut().map(|sequence| (sequence, &[7][..])).collect();
            let sources = if step == 0 { &[][..] } else { &sources };
            driver.begin(&mut parts, sources, &choices).expect("a step");
            if step > 0 {
                driver.finish();
                let now = Instant::now();
                times.push((now - last).as_secs_f64() * 1e3);
                last = now;
            }
        }
        driver.finish();
        let bytes = 2.0 * read_weights + kv_bytes * (batch * context_len) as f64;
        let limit = bytes / options.read_gbs * 1e-6;
        let name = format!("decode {batch} x {context_len}");
        report(&options, &name, median(times.split_off(8)), limit, batch);
    }
    for &len in &options.prefill {
        let ids: Vec<u32> = (0..len as u32).map(|i| i * 7919 % 50_000).collect();
        let mut times = Vec::new();
        for _ in 0..5 {
            let mut driver = Driver::new(&model, len.div_ceil(32) + 1);
            driver.reserve(len.min(8192));
            let mut sequence = Sequence::default();
            let begin = Instant::now();
            for piece in ids.chunks(8192) {
                driver
                    .begin(&mut [(&mut sequence, piece)], &[], &[TokenChoice::Greedy])
                    .expect("a step");
                driver.finish();
            }
            times.push(begin.elapsed().as_secs_f64() * 1e3);
        }
        let flops = 2.0 * linear * len as f64
            + 2.0 * embedding
            + attention_flops(len as f64 * len as f64 / 2.0);
        report(
            &options,
            &format!("prefill {len}"),
            median(times),
            flops / options.tflops * 1e-9,
            len,
        );
    }
}
