//! The chain of kernels that decodes one sequence of a small model on a Hopper GPU, against the
//! forward pass.

use xserv::memory::DType;

use crate::driver::{cuda_context, load_on_cuda};
use crate::files::{Family, Store, TestModel};
use crate::steps::compare_chain;

/// By steps, as graphs too, with contexts that both forms of the attention serve.
#[test]
fn decoding_a_small_model_in_chains_on_cuda_is_the_forward_pass() {
    let files = |family| TestModel::small_qwen3(5).of(family);
    for (dtype, files) in [
        (DType::BF16, files(Family::Qwen3)),
        (DType::F16, files(Family::Qwen3)),
        (DType::BF16, files(Family::Llama)),
        (DType::F16, files(Family::Qwen2)),
        (DType::BF16, files(Family::Qwen3).in_window(10)),
        (DType::F16, files(Family::Qwen3).in_window(333)),
    ] {
        let Some(context) = cuda_context() else { return };
        let dir = files.write(Store::BF16);
        let model = load_on_cuda(dir.str(), Some(dtype), context).expect("a model");
        for (batch, lens) in [(1, 1..151), (1, 2100..2500), (2, 1..151), (3, 1..151)] {
            compare_chain(&model, batch, lens);
        }
    }
}
