//! The functions of two operands.

/// A function of two operands, element by element.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Binary {
    /// The sum.
    Add,
    /// The product.
    Mul,
}
