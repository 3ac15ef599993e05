//! The C interface: every `extern "C"` function, one file for each C object, and all contact with
//! raw pointers of callers. `include/xserv.h` is generated from these files; their doc comments are
//! its manual, so they speak to readers of C.

mod guard;
mod handle;

mod answer;
mod context;
mod dlpack;
mod evaluate;
mod generate;
mod inspect;
mod messages;
mod model;
mod ops_attention;
mod ops_copy;
mod ops_elementwise;
mod ops_gemm;
mod ops_index;
mod ops_quantised;
mod ops_rows;
mod parse;
mod plan;
mod request;
mod self_test;
mod stats;
mod status;
mod submit;
mod tensor;
mod text;
mod types;
mod version;
mod wake;

pub use answer::*;
pub use context::*;
pub use dlpack::*;
pub use evaluate::*;
pub use generate::*;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub use guard::test_panic;
pub use inspect::*;
pub use messages::*;
pub use model::*;
pub use ops_attention::*;
pub use ops_copy::*;
pub use ops_elementwise::*;
pub use ops_gemm::*;
pub use ops_index::*;
pub use ops_quantised::*;
pub use ops_rows::*;
pub use parse::*;
pub use plan::*;
pub use request::*;
pub use self_test::*;
pub use stats::*;
pub use status::*;
pub use submit::*;
pub use tensor::*;
pub use text::*;
pub use types::*;
pub use version::*;
