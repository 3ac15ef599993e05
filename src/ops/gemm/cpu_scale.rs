//! The factors of a product, `C = alpha A B + beta C`.

use crate::ops::common::storage::Storage;

/// The factors that turn one sum into an element of C.
#[derive(Clone, Copy)]
pub(crate) struct Scale {
    pub alpha: f32,
    pub beta: f32,
}

impl Scale {
    #[inline(always)]
    pub fn store<T: Storage>(self, sum: f32, c: &mut T) {
        let old = if self.beta == 0.0 { 0.0 } else { self.beta * c.to_f32() };
        *c = T::from_f32(self.alpha * sum + old);
    }
}
