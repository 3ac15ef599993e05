//! Prompts in one piece on a GPU, against the CPU.

use xserv::memory::DType;

use crate::driver::{cuda_context, load, load_on_cuda, Driver};
use crate::files::{Family, Random, Store, TestModel};

/// Through the kernels for linear layers of prompts and the attention after them, with lengths
/// that are no whole tiles.
#[test]
fn prompts_in_one_piece_on_cuda_are_those_of_the_cpu() {
    for family in Family::ALL {
        prompts_in_one_piece(TestModel::long_qwen3(9, 128).of(family), &format!("{family:?}"));
    }
}

fn prompts_in_one_piece(mut model: TestModel, name: &str) {
    model.config["max_position_embeddings"] = 1024.into();
    let dir = model.write(Store::F32);
    for (dtype, bar) in [(DType::F16, 2e-2), (DType::BF16, 0.15)] {
        let Some(context) = cuda_context() else { return };
        let on_cuda = load_on_cuda(dir.str(), Some(dtype), context).expect("a model on CUDA");
        let on_cpu = load(dir.str(), Some(dtype), 2);
        for len in [129, 300, 450] {
            let mut random = Random(len as u64);
            let ids: Vec<u32> = (0..len).map(|_| random.below(1000) as u32).collect();
            let want = Driver::new(&on_cpu, 16).logits(&ids, usize::MAX);
            let got = Driver::new(&on_cuda, 16).logits(&ids, usize::MAX);
            let squares =
                |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
            let both = || got.iter().zip(&want).map(|(&a, &b)| (f64::from(a), f64::from(b)));
            let error = (squares(&mut both().map(|(a, b)| a - b))
                / squares(&mut both().map(|(_, b)| b)))
            .sqrt();
            println!("{name} {dtype} {len} tokens: rms difference {error:.2e} of the logits");
            assert!(error <= bar, "{name} {dtype} {len} tokens: {error:e} of the logits");
        }
    }
}
