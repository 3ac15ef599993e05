//! Times steps of a model on a GPU, beside what the memory and the tensor cores of the card allow:
//!
//! ```text
//! cargo bench --bench steps -- FOLDER [--random] [--decode 1x512,32x4096] [--prefill 512,2048] [--steps 64]
//!     [--profile] [--draw TEMPERATURE,TOP_K,TOP_P] [--deterministic] [--f16] [--cpu THREADS] [--read-gbs N]
//!     [--tflops N] [--json] [--weights int8|int4] [--group-size N] [--embeddings int8] [--fp8-cache]
//!     [--unquantised-activations]
//! ```
//!
//! `--random` reads config.json alone: the GPU fills its memory with random weights, so a shape of
//! 32B is timed without 60 GB of files. A mixture of experts takes random tokens too (`--draw 1,0,1`):
//! where all sequences go on with the same token, they choose the same experts.
//!
//! `--decode BxC`: B sequences of C tokens take one greedy token each, steps following each other
//! without a gap, as in an engine; with `--draw` a random one (TOP_K 0 and TOP_P 1: of all tokens).
//! `--prefill T`: a prompt of T tokens up to its first token. Times are medians, in milliseconds.
//! The limits follow from the rates at which the GPU reads and multiplies, which are measured in
//! the same run (`ceilings.rs`) unless `--read-gbs` and `--tflops` set them. Weights are bf16, or
//! f16 with `--f16`; `--fp8-cache` keeps keys and values in 8 bits, `--unquantised-activations`
//! keeps activations that the config of FP8 weights quantises. `--profile` adds where each
//! step's time goes: a table of the parts of all layers that adds up to the step. `--cpu` times the
//! CPU instead. `tests/bench/make_random_model.py` makes folders, with `--config-only` those that
//! `--random` needs.

use std::sync::Arc;
use std::time::Instant;

use xserv::backend::cpu::CpuBackend;
use xserv::backend::cuda::ProfiledPart;
use xserv::ffi::{xserv_device_kind, xserv_dtype};
use xserv::memory::DType;
use xserv::model::{Draw, KvFormat, LoadOptions, Model, TokenChoice, WeightStorage};

mod ceilings;
#[path = "../support/model_driver.rs"]
mod driver;
#[allow(dead_code)] // tensors use its part
#[path = "../support/fp8.rs"]
mod fp8;
mod limits;
#[allow(dead_code)] // what tensors are filled with
#[path = "../support/random.rs"]
mod random;
#[allow(dead_code)] // benches use its part
#[path = "../support/tensors.rs"]
mod tensors;

use ceilings::Probes;
use limits::{Ceilings, ModelWork, Work};

use driver::{cuda_context, Driver, Sequence};

struct Options {
    folder: String,
    random: bool,
    weights: WeightStorage,
    group_size: usize,
    embeddings: WeightStorage,
    /// Threads of the CPU, where the model is to be there.
    cpu_threads: Option<usize>,
    decode: Vec<(usize, usize)>,
    prefill: Vec<usize>,
    steps: usize,
    read_gbs: Option<f64>,
    tflops: Option<f64>,
    profile: bool,
    deterministic: bool,
    kv_format: KvFormat,
    keeps_activations: bool,
    dtype: DType,
    choice: TokenChoice,
    json: bool,
}

fn numbers(list: &str) -> Vec<usize> {
    list.split(',').filter_map(|n| n.parse().ok()).collect()
}

fn options() -> Option<Options> {
    let mut options = Options {
        folder: String::new(),
        random: false,
        weights: WeightStorage::AsStored,
        group_size: 0,
        embeddings: WeightStorage::AsStored,
        cpu_threads: None,
        decode: vec![(1, 512), (1, 4096)],
        prefill: vec![512, 2048],
        steps: 64,
        read_gbs: None,
        tflops: None,
        profile: false,
        deterministic: false,
        kv_format: KvFormat::Dense,
        keeps_activations: false,
        dtype: DType::BF16,
        choice: TokenChoice::Greedy,
        json: false,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--bench" => {}
            "--json" => options.json = true,
            "--profile" => options.profile = true,
            "--random" => options.random = true,
            "--cpu" => options.cpu_threads = Some(args.next()?.parse().ok()?),
            "--deterministic" => options.deterministic = true,
            "--fp8-cache" => options.kv_format = KvFormat::Fp8,
            "--unquantised-activations" => options.keeps_activations = true,
            "--draw" => {
                let text = args.next()?;
                let mut parts = text.split(',');
                options.choice = TokenChoice::Draw(Draw {
                    temperature: parts.next()?.parse().ok()?,
                    top_k: parts.next()?.parse().ok()?,
                    top_p: parts.next()?.parse().ok()?,
                    seed: 1,
                    ..Draw::default()
                });
            }
            "--f16" => options.dtype = DType::F16,
            "--weights" => {
                options.weights = match args.next()?.as_str() {
                    "int8" => WeightStorage::Int8,
                    "int4" => WeightStorage::Int4,
                    _ => return None,
                }
            }
            "--embeddings" => {
                options.embeddings = match args.next()?.as_str() {
                    "int8" => WeightStorage::Int8,
                    _ => return None,
                }
            }
            "--group-size" => options.group_size = args.next()?.parse().ok()?,
            "--decode" => {
                let pair = |s: &str| {
                    let (b, c) = s.split_once('x')?;
                    Some((b.parse().ok()?, c.parse().ok()?))
                };
                options.decode = args.next()?.split(',').filter_map(pair).collect();
            }
            "--prefill" => options.prefill = numbers(&args.next()?),
            "--steps" => options.steps = args.next()?.parse().ok()?,
            "--read-gbs" => options.read_gbs = Some(args.next()?.parse().ok()?),
            "--tflops" => options.tflops = Some(args.next()?.parse().ok()?),
            other if !other.starts_with('-') => options.folder = other.to_string(),
            _ => return None,
        }
    }
    let is_possible = !(options.profile && options.cpu_threads.is_some());
    (is_possible && !options.folder.is_empty()).then_some(options)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn report(options: &Options, name: &str, times: &Times, limit_ms: f64, tokens: usize) {
    let &Times { step_ms: ms, queue_ms } = times;
    let (share, rate) = (limit_ms / ms * 100.0, tokens as f64 / ms * 1e3);
    match options.json {
        true => println!(
            "{{\"metric\": \"{name}\", \"ms\": {ms:.4}, \"limit_ms\": {limit_ms:.4}, \"queue_ms\": {queue_ms:.4}, \"tokens_per_second\": {rate:.1}}}"
        ),
        false => println!("{name:<22} {ms:>9.3} ms  limit {limit_ms:>8.3} ({share:>5.1} %)  {rate:>9.0} tok/s  queued in {queue_ms:.3} ms"),
    }
}

fn main() {
    let Some(options) = options() else {
        println!("usage: steps FOLDER [--random] [--decode 1x512] [--prefill 512] [--steps 64] [--profile | --cpu THREADS] [--json]");
        return;
    };
    let begin = Instant::now();
    let Some(model) = load(&options) else { return };
    println!("{}: loaded in {:.2} s", model.device_name(), begin.elapsed().as_secs_f64());
    let ceilings = ceilings_of(&options);
    let work = work_of(&model, options.embeddings);
    if let (Some(&(batch, context_len)), None) = (options.decode.first(), options.cpu_threads) {
        // Right after a load steps of small models take up to 8 % longer (H200).
        let begin = Instant::now();
        while begin.elapsed().as_secs_f64() < 0.5 {
            decode(&model, batch, context_len, &options);
        }
    }
    for &(batch, context_len) in &options.decode {
        let times = decode(&model, batch, context_len, &options);
        let operations = work.decode(batch as f64, context_len as f64);
        let name = format!("decode {batch} x {context_len}");
        report(&options, &name, &times, ceilings.limit_ms(&operations), batch);
        if options.profile {
            let parts = profile_decode(&model, batch, context_len, &options);
            table(&options, &ceilings, &name, &parts, times.step_ms, operations[2]);
        }
    }
    for &len in &options.prefill {
        let times = prefill(&model, len);
        let operations = work.prompt(len as f64);
        let name = format!("prefill {len}");
        report(&options, &name, &times, ceilings.limit_ms(&operations), len);
        if options.profile && len <= LONGEST_PIECE {
            let parts = profile_prefill(&model, len);
            table(&options, &ceilings, &name, &parts, times.step_ms, operations[2]);
        }
    }
}

/// Returns the model, or `None` where there is no GPU for it.
fn load(options: &Options) -> Option<Model> {
    let path = &options.folder;
    let headers =
        if options.random { Model::read_config_alone(path) } else { Model::read_headers(path) };
    let mut headers = headers.expect("a folder");
    if let Some(format) = options.weights.format(options.group_size).expect("a group size") {
        headers.quantise(format);
    }
    if let Some(format) = options.embeddings.embeddings_format().expect("a format") {
        headers.quantise_tokens(format);
    }
    if options.keeps_activations {
        headers.keep_activations();
    }
    let folder = headers.settle(None, &mut |_| true).expect("a folder");
    let load_options = LoadOptions {
        dtype: Some(options.dtype),
        deterministic: options.deterministic,
        kv_format: options.kv_format,
        ..LoadOptions::default()
    };
    let model = if let Some(num_threads) = options.cpu_threads {
        let backend = CpuBackend::new(num_threads).expect("threads");
        folder.load(Arc::new(backend), &load_options, &mut |_| true)
    } else {
        let context = cuda_context()?;
        let backend = CpuBackend::new(2).expect("threads");
        folder.load_on_device(context, &backend, &load_options, &mut |_| true)
    };
    Some(model.expect("a model"))
}

/// Returns the rates of the GPU (or with `--cpu` of the CPU): measured beside the model, except
/// those that the options set.
fn ceilings_of(options: &Options) -> Ceilings {
    if let (Some(read_gbs), Some(tflops)) = (options.read_gbs, options.tflops) {
        return Ceilings { read_gbs, tflops };
    }
    let (context, num_bytes, gemm_size) = if let Some(num_threads) = options.cpu_threads {
        let kind = xserv_device_kind::XSERV_DEVICE_CPU;
        (tensors::context_with(kind, num_threads as u32), 256 << 20, 1024)
    } else {
        (tensors::cuda(), 4 << 30, 8192)
    };
    let context = context.expect("the device of the model");
    let dtype = match options.dtype {
        DType::F16 => xserv_dtype::XSERV_DTYPE_F16,
        _ => xserv_dtype::XSERV_DTYPE_BF16,
    };
    let probes = Probes { dtype, num_bytes, gemm_size, round_seconds: 0.08 };
    let measured = ceilings::measure(&context, &probes);
    if options.json {
        let Ceilings { read_gbs, tflops } = measured;
        println!("{{\"metric\": \"ceilings\", \"memory_gb_s\": {read_gbs:.1}, \"gemm_tflop_s\": {tflops:.1}}}");
    } else {
        println!(
            "measured: reads of {:.0} GB/s, products of {:.1} TFLOP/s",
            measured.read_gbs, measured.tflops
        );
    }
    Ceilings {
        read_gbs: options.read_gbs.unwrap_or(measured.read_gbs),
        tflops: options.tflops.unwrap_or(measured.tflops),
    }
}

fn work_of(model: &Model, embeddings: WeightStorage) -> ModelWork {
    let config = model.config();
    let embedding = config.vocab_size as f64 * config.hidden_size as f64;
    let num_embeddings = if config.tie_word_embeddings { 1.0 } else { 2.0 };
    // In groups of 128 with a scale of two bytes, or bf16 or f16.
    let is_int8 = matches!(embeddings, WeightStorage::Int8);
    let output_bytes = embedding * if is_int8 { 1.0 + 2.0 / 128.0 } else { 2.0 };
    let layer_weights = model.num_parameters() as f64 - embedding * num_embeddings;
    // The windows of a model are all alike.
    let windows = config.windows.iter().flatten();
    // Memory beyond the numbers is padding between small tensors, which no step reads.
    let in_memory = model.weights_bytes() as f64 - output_bytes * num_embeddings;
    let layer_bytes = in_memory.min(2.0 * layer_weights);
    let (expert_weights, num_experts, experts_per_token) =
        config.experts.as_ref().map_or((0.0, 1.0, 1.0), |experts| {
            let count = experts.routing.num_experts();
            let of_a_layer = count * 3 * experts.width * config.hidden_size;
            let num_layers = experts.layers.iter().filter(|&&has_experts| has_experts).count();
            let per_token = experts.routing.experts_per_token();
            ((num_layers * of_a_layer) as f64, count as f64, per_token as f64)
        });
    // Experts take the share of the layers' bytes that they have of their numbers.
    let expert_bytes = layer_bytes * expert_weights / layer_weights;
    ModelWork {
        layer_weights: layer_weights - expert_weights,
        output_weights: embedding,
        expert_weights,
        num_experts,
        experts_per_token,
        layer_bytes: layer_bytes - expert_bytes,
        output_bytes,
        expert_bytes,
        kv_bytes: model.kv_layout().bytes_per_token() as f64,
        attention_flops: 4.0 * (config.num_heads * config.head_dim * config.num_layers) as f64,
        window: windows.clone().next().map_or(f64::INFINITY, |&window| window as f64),
        windowed: windows.count() as f64 / config.num_layers as f64,
    }
}

/// Medians, in milliseconds.
struct Times {
    step_ms: f64,
    /// The time of the host until a step was queued.
    queue_ms: f64,
}

/// Tokens of a prompt in one step.
const LONGEST_PIECE: usize = 8192;

/// Sequences of a length, and what their steps choose.
struct Decoding<'a> {
    driver: Driver<'a>,
    sequences: Vec<Sequence>,
    choices: Vec<TokenChoice>,
    /// The tokens of the first step.
    first: Vec<u32>,
    sources: Vec<u32>,
}

impl<'a> Decoding<'a> {
    fn new(model: &'a Model, batch: usize, context_len: usize, options: &Options) -> Self {
        let blocks_per_seq = (context_len + options.steps + 16).div_ceil(32) + 1;
        let mut driver = Driver::new(model, batch * blocks_per_seq);
        // All have the keys and values of one prompt, each in memory of its own. Zeros would do for
        // the work, but they take less power, and cards slow down at the most that they may draw.
        let mut prompt = Sequence::default();
        driver.reserve(context_len.min(LONGEST_PIECE));
        run_prompt(&mut driver, &mut prompt, &prompt_ids(model, context_len));
        let mut swap = model.kv_swap();
        let num_blocks = context_len.div_ceil(32);
        let mut num_places = 0;
        while num_places < num_blocks {
            num_places += swap.grow(num_blocks - num_places).expect("memory").unwrap_or(0);
            std::thread::yield_now();
        }
        driver.swap_out(&mut prompt, &mut swap, 0);
        let mut sequences: Vec<Sequence> = (0..batch).map(|_| Sequence::default()).collect();
        for sequence in &mut sequences {
            driver.copy_in(sequence, context_len, &mut swap, 0);
        }
        let choices = vec![choice_on(model, options.choice); batch];
        let first = prompt_ids(model, batch);
        Decoding { driver, sequences, choices, first, sources: (0..batch as u32).collect() }
    }

    fn begin(&mut self, step: usize) {
        let mut parts: Vec<(&mut Sequence, &[u32])> =
            self.sequences.iter_mut().zip(self.first.chunks(1)).collect();
        // The CPU has finished the step before.
        let has_lead = step > 0 && self.driver.model.max_steps_in_flight() > 1;
        let sources = if has_lead { &self.sources } else { &[][..] };
        self.driver.begin(&mut parts, sources, &self.choices).expect("a step");
    }
}

/// Steps that follow each other without a gap.
fn decode(model: &Model, batch: usize, context_len: usize, options: &Options) -> Times {
    let mut decoding = Decoding::new(model, batch, context_len, options);
    let (mut times, mut queue_times) = (Vec::new(), Vec::new());
    // A step is begun before the one before it is finished, where the device can do that.
    let lead = usize::from(model.max_steps_in_flight() > 1);
    let mut last = Instant::now();
    for step in 0..options.steps + 8 + lead {
        let begin = Instant::now();
        decoding.begin(step);
        queue_times.push(begin.elapsed().as_secs_f64() * 1e3);
        if step >= lead {
            decoding.driver.finish();
            let now = Instant::now();
            times.push((now - last).as_secs_f64() * 1e3);
            last = now;
        }
    }
    if lead > 0 {
        decoding.driver.finish();
    }
    Times { step_ms: median(times.split_off(8)), queue_ms: median(queue_times.split_off(8)) }
}

/// Returns the parts of a step, each the mean of some steps.
fn profile_decode(
    model: &Model,
    batch: usize,
    context_len: usize,
    options: &Options,
) -> Vec<ProfiledPart> {
    let mut decoding = Decoding::new(model, batch, context_len, options);
    model.start_profile().expect("a profile");
    let mut sum = Vec::new();
    for step in 0..options.steps + 8 {
        decoding.begin(step);
        decoding.driver.finish();
        if step >= 8 {
            add(&mut sum, model.read_profile().expect("a profile"));
        }
    }
    model.stop_profile().expect("the end of a profile");
    mean(&mut sum, options.steps);
    sum
}

fn add(sum: &mut Vec<ProfiledPart>, parts: Vec<ProfiledPart>) {
    if sum.is_empty() {
        *sum = parts;
        return;
    }
    assert_eq!(sum.len(), parts.len(), "all steps have the same parts");
    sum.iter_mut().zip(parts).for_each(|(sum, part)| {
        sum.seconds += part.seconds;
        sum.queue_seconds += part.queue_seconds;
    });
}

fn mean(sum: &mut [ProfiledPart], count: usize) {
    for part in sum {
        part.seconds /= count as f64;
        part.queue_seconds /= count as f64;
    }
}

/// Returns the choice of a step on the model's device; the CPU leaves it to the caller, who does
/// not choose.
fn choice_on(model: &Model, wanted: TokenChoice) -> TokenChoice {
    if model.can_choose(&wanted) {
        wanted
    } else {
        TokenChoice::Caller
    }
}

fn prompt_ids(model: &Model, len: usize) -> Vec<u32> {
    let num_ids = model.config().vocab_size.min(50_000) as u32;
    (0..len as u32).map(|i| i * 7919 % num_ids).collect()
}

/// Runs a prompt, and returns the milliseconds until it was queued.
fn run_prompt(driver: &mut Driver<'_>, sequence: &mut Sequence, ids: &[u32]) -> f64 {
    let mut queue_time = 0.0;
    for piece in ids.chunks(LONGEST_PIECE) {
        let begin = Instant::now();
        let choice = choice_on(driver.model, TokenChoice::Greedy);
        driver.begin(&mut [(sequence, piece)], &[], &[choice]).expect("a step");
        queue_time += begin.elapsed().as_secs_f64() * 1e3;
        driver.finish();
    }
    queue_time
}

/// Runs a prompt some times; `done` gets the milliseconds of all and those until it was queued.
fn prompt(model: &Model, len: usize, mut done: impl FnMut(f64, f64)) {
    let ids = prompt_ids(model, len);
    for _ in 0..PROMPTS {
        let mut driver = Driver::new(model, len.div_ceil(32) + 1);
        driver.reserve(len.min(LONGEST_PIECE));
        let mut sequence = Sequence::default();
        let begin = Instant::now();
        let queue_time = run_prompt(&mut driver, &mut sequence, &ids);
        done(begin.elapsed().as_secs_f64() * 1e3, queue_time);
    }
}

const PROMPTS: usize = 7;

fn prefill(model: &Model, len: usize) -> Times {
    let (mut times, mut queue_times) = (Vec::new(), Vec::new());
    prompt(model, len, |ms, queue_ms| {
        times.push(ms);
        queue_times.push(queue_ms);
    });
    Times { step_ms: median(times), queue_ms: median(queue_times) }
}

fn profile_prefill(model: &Model, len: usize) -> Vec<ProfiledPart> {
    model.start_profile().expect("a profile");
    let (mut sum, mut count) = (Vec::new(), 0);
    prompt(model, len, |_, _| {
        count += 1;
        // The first begins to use kernels and plans of cuBLAS.
        if count > 1 {
            add(&mut sum, model.read_profile().expect("a profile"));
        }
    });
    model.stop_profile().expect("the end of a profile");
    mean(&mut sum, count - 1);
    sum
}

/// The parts by name, largest first, beside what the hardware needs for them. Marks take time of
/// their own: the difference to the step without them is divided among all.
fn table(
    options: &Options,
    ceilings: &Ceilings,
    name: &str,
    parts: &[ProfiledPart],
    step_ms: f64,
    attention: Work,
) {
    let mut rows: Vec<(&str, usize, f64, Work, f64)> = Vec::new();
    for part in parts {
        let index = rows.iter().position(|row| row.0 == part.name).unwrap_or_else(|| {
            rows.push((part.name, 0, 0.0, Work::default(), 0.0));
            rows.len() - 1
        });
        let (_, count, us, work, queue_us) = &mut rows[index];
        *count += 1;
        *queue_us += part.queue_seconds * 1e6;
        *us += part.seconds * 1e6;
        work.bytes += part.bytes as f64;
        work.flops += part.flops;
    }
    if let Some(row) = rows.iter_mut().find(|row| row.0 == "attention") {
        row.3 = attention;
    }
    let marked: f64 = rows.iter().map(|row| row.2).sum();
    let mark = (marked - step_ms * 1e3) / parts.len() as f64;
    rows.sort_by(|a, b| b.2.total_cmp(&a.2));
    if !options.json {
        println!(
            "  {:<20} {:>5} {:>9} {:>8} {:>8} {:>9} {:>7}  {:>8}",
            "part", "count", "us", "us each", "MB", "GFLOP", "limit", "queueing"
        );
    }
    for (part, count, us, work, queue_us) in &rows {
        let us = us - mark * *count as f64;
        let limit = ceilings.operation_ms(work) * 1e3;
        match options.json {
            true => println!(
                "{{\"metric\": \"{name}\", \"part\": \"{part}\", \"count\": {count}, \"us\": {us:.2}, \"bytes\": {:.0}, \"flops\": {:.0}, \"limit_us\": {limit:.2}, \"queue_us\": {queue_us:.2}}}",
                work.bytes, work.flops
            ),
            false => println!(
                "  {part:<20} {count:>5} {us:>9.1} {:>8.2} {:>8.1} {:>9.1} {:>5.1} %  {:>8.2}",
                us / *count as f64, work.bytes * 1e-6, work.flops * 1e-9, limit / us * 100.0, queue_us / *count as f64
            ),
        }
    }
    if !options.json {
        println!(
            "  sum {:.1} us; with marks {marked:.1} us: {} marks of {mark:.2} us are taken off",
            step_ms * 1e3,
            parts.len()
        );
    }
}
