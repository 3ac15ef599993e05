//! The GPU of a test.

use std::sync::Arc;

use xserv::backend::{cuda, ComputeContext};

/// Returns the first CUDA device; `None`, with a line that says why, where there is none.
/// `XSERV_REQUIRE_GPU=1` makes the lack of one a failure.
pub fn cuda_context() -> Option<Arc<ComputeContext>> {
    let found = cuda::available().and_then(|()| ComputeContext::cuda_private(0, usize::MAX));
    match found {
        Ok(context) => Some(Arc::new(context)),
        Err(why) => {
            assert!(std::env::var_os("XSERV_REQUIRE_GPU").is_none(), "no CUDA device: {why}");
            println!("skipped: no CUDA device ({why})");
            None
        }
    }
}
