//! The chain of kernels that decodes one sequence of a small model on a Hopper GPU, against the
//! forward pass.

use xserv::memory::DType;

use crate::driver::{cuda_context, load_on_cuda};
use crate::files::{Store, TestModel};
use crate::steps::compare_chain;

/// By steps, as graphs too, with contexts that both forms of the attention serve.
#[test]
fn decoding_a_small_model_in_chains_on_cuda_is_the_forward_pass() {
    for dtype in [DType::BF16, DType::F16] {
        let Some(context) = cuda_context() else { return };
        let dir = TestModel::small_qwen3(5).write(Store::BF16);
        let model = load_on_cuda(dir.str(), Some(dtype), context).expect("a model");
        for (batch, lens) in [(1, 1..151), (1, 2100..2500), (2, 1..151), (3, 1..151)] {
            compare_chain(&model, batch, lens);
        }
    }
}
