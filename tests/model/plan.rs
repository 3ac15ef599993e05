//! Compares the memory that the headers of a model plan with the memory that a run takes.

use xserv::memory::DType;
use xserv::model::{ActivationFormat, KvFormat};
use xserv::model::{Model, PassLimits};

use crate::driver::{cuda_context, load, load_fp8_cache_on_cuda, load_on_cuda, Driver, Sequence};
use crate::files::{Family, Random, Store, TempDir, TestModel, TestTensor};

/// The bar: planned sizes are within 2 % of what is used.
const TOLERANCE: f64 = 0.02;

/// Returns a model whose feed-forward part is wide enough for sums in stretches.
fn wide_model(family: Family) -> TempDir {
    const INTERMEDIATE: usize = 3200;
    let mut model = TestModel::qwen3(7);
    model.config["intermediate_size"] = INTERMEDIATE.into();
    model.config["max_position_embeddings"] = 2048.into();
    let mut random = Random(8);
    for TestTensor { name, shape, values } in &mut model.tensors {
        let size = match name {
            name if name.contains("gate_proj") || name.contains("up_proj") => [INTERMEDIATE, 24],
            name if name.contains("down_proj") => [24, INTERMEDIATE],
            _ => continue,
        };
        *shape = size.to_vec();
        *values = (0..size[0] * size[1]).map(|_| 0.1 * random.signed() as f32).collect();
    }
    model.of(family).write(Store::BF16)
}

fn assert_close(what: &str, planned: u64, used: u64) {
    let off = (planned as f64 - used as f64) / used as f64;
    println!("{what}: planned {planned}, used {used} bytes ({:+.2} %)", 100.0 * off);
    assert!(off.abs() <= TOLERANCE, "{what}: planned {planned}, used {used} bytes");
}

/// A long prompt in pieces of `chunk`, then some tokens alone.
fn run(driver: &mut Driver<'_>, num_tokens: usize, chunk: usize) {
    let ids: Vec<u32> = (0..num_tokens as u32).map(|i| i * 7 % 70).collect();
    let mut sequence = Sequence::default();
    for piece in ids.chunks(chunk) {
        driver.step(&mut [(&mut sequence, piece)], false);
    }
    for _ in 0..5 {
        driver.step(&mut [(&mut sequence, &[3])], false);
    }
    driver.free(sequence);
}

#[test]
fn the_work_space_of_the_host_is_what_was_planned() {
    const CHUNK: usize = 512;
    for family in Family::ALL {
        let dir = wide_model(family);
        let threads_of = |dtype| [1, 2, 3].map(|num_threads| (dtype, num_threads));
        let settings = [DType::F32, DType::F16, DType::BF16].map(threads_of).concat();
        for (dtype, num_threads) in settings {
            let folder = Model::open(dir.str()).expect("a folder");
            let plan = folder
                .host_plan(
                    dtype,
                    KvFormat::Dense,
                    ActivationFormat::AsComputed,
                    num_threads,
                    CHUNK,
                    1,
                )
                .expect("a plan");
            let model = load(dir.str(), Some(dtype), num_threads);
            assert_eq!(plan.weights_bytes, model.weights_bytes());
            let per_token = model.kv_cache(3).expect("a cache").size_bytes() / 96;
            assert_eq!(plan.kv_bytes_per_token, per_token as u64);
            let mut driver = Driver::new(&model, 64);
            run(&mut driver, 3 * CHUNK + 100, CHUNK);
            let what = format!("work space of {family:?}, {dtype}, {num_threads} threads");
            assert_close(&what, plan.workspace_bytes, driver.workspace_bytes() as u64);
        }
    }
}

/// The peak of the allocator of a model's device is the plan.
#[test]
fn the_memory_of_a_device_is_what_was_planned() {
    const CHUNK: usize = 2048;
    const NUM_BLOCKS: usize = 4096;
    use KvFormat::{Dense, Fp8};
    for (dir, dtype, kv_format) in [
        (wide_model(Family::Qwen3), DType::F32, Dense),
        (wide_model(Family::Qwen3), DType::BF16, Dense),
        (wide_model(Family::Qwen3), DType::BF16, Fp8),
        (wide_model(Family::Llama), DType::F32, Dense),
        (wide_model(Family::Llama), DType::BF16, Dense),
        (wide_model(Family::Qwen2), DType::BF16, Dense),
        (TestModel::wide_gpt2(7).write(Store::BF16), DType::F32, Dense),
        (TestModel::wide_gpt2(7).write(Store::BF16), DType::BF16, Dense),
        (TestModel::wide_gpt2(7).write(Store::BF16), DType::F32, Fp8),
    ] {
        let Some(context) = cuda_context() else { return };
        let folder = Model::open(dir.str()).expect("a folder");
        let limits = PassLimits::of_tokens(folder.config(), CHUNK);
        let plan = folder.device_plan(dtype, kv_format, &limits, false).expect("a plan");
        let model = match kv_format {
            Dense => load_on_cuda(dir.str(), Some(dtype), context.clone()),
            Fp8 => load_fp8_cache_on_cuda(dir.str(), dtype, context.clone(), false),
        };
        let model = model.expect("a model");
        assert_eq!(plan.weights_bytes, model.weights_bytes());
        let loaded = context.memory_stats();
        assert_close("weights on CUDA", plan.weights_bytes, loaded.peak as u64);
        let mut driver = Driver::new(&model, NUM_BLOCKS);
        let cache = context.memory_stats().allocated - loaded.allocated;
        assert_close(
            "KV cache on CUDA",
            plan.kv_bytes_per_token * 32 * NUM_BLOCKS as u64,
            cache as u64,
        );
        // Together with the tokens after it as long as the model's context.
        run(&mut driver, CHUNK - 5, CHUNK);
        let peak = context.memory_stats().peak as u64;
        let cache = plan.kv_bytes_per_token * 32 * NUM_BLOCKS as u64;
        let planned = plan.weights_bytes + plan.workspace_bytes + cache;
        println!("all on CUDA, {dtype}: planned {planned}, used {peak} bytes");
        assert!(peak <= planned, "used {peak} bytes, more than the {planned} planned");
        assert_close("all on CUDA", planned, peak);
    }
}
