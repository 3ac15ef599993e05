//! The options of a caller for a product.

/// The implementation that computes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmBackend {
    /// The fastest one that serves the call.
    Auto,
    /// The plain triple loop.
    Naive,
    /// CUDA: tiles in shared memory, any type and layout.
    Tiled,
    /// CUDA: cuBLASLt, where it is installed.
    Cublas,
    /// CUDA: this library's kernels for the tensor cores, f16 and bf16.
    TensorCore,
    /// CPU: packed panels and SIMD.
    Blocked,
}

/// The order in which the products along k are added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SumOrder {
    /// Whichever order is fastest for the sizes.
    #[default]
    Fastest,
    /// CUDA: an order that depends on n and k alone. A row of C has the same bits whatever the
    /// other rows of A are, and however many there are.
    ByRow,
    /// Hopper, f16 and bf16, B stored [n, k]: such an order, by wgmma, with k in this number of
    /// parts, as [`linear_skinny`](crate::ops::linear::cuda_skinny::linear_skinny) adds them up.
    Parts(u32),
}

/// The options of a product.
#[derive(Clone, Copy, Debug)]
pub struct GemmOptions {
    /// Whether A is stored [k, m].
    pub transpose_a: bool,
    /// Whether B is stored [n, k].
    pub transpose_b: bool,
    /// The factor of the product.
    pub alpha: f32,
    /// The factor of the previous contents of C.
    pub beta: f32,
    /// The implementation that computes it.
    pub backend: GemmBackend,
    /// The order of the sums; on CUDA any order other than `Fastest` decides the implementation.
    pub order: SumOrder,
}

impl Default for GemmOptions {
    fn default() -> Self {
        GemmOptions {
            transpose_a: false,
            transpose_b: false,
            alpha: 1.0,
            beta: 0.0,
            backend: GemmBackend::Auto,
            order: SumOrder::Fastest,
        }
    }
}
