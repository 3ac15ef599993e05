//! The integer types of index tensors.

mod sealed {
    pub trait Sealed {}
    impl Sealed for i32 {}
    impl Sealed for i64 {}
}

/// An element type of index tensors: i32 or i64.
pub trait Index: sealed::Sealed + Copy + Send + Sync + 'static {
    /// Returns the value.
    fn to_i64(self) -> i64;
    /// Returns the value, if it is an index into `len` elements.
    #[inline(always)]
    fn to_index(self, len: usize) -> Option<usize> {
        usize::try_from(self.to_i64()).ok().filter(|&index| index < len)
    }
    /// Returns the index as this type; `None` where it does not fit.
    fn from_index(index: usize) -> Option<Self>;
}

impl Index for i32 {
    #[inline(always)]
    fn to_i64(self) -> i64 {
        self.into()
    }
    fn from_index(index: usize) -> Option<Self> {
        index.try_into().ok()
    }
}

impl Index for i64 {
    #[inline(always)]
    fn to_i64(self) -> i64 {
        self
    }
    fn from_index(index: usize) -> Option<Self> {
        index.try_into().ok()
    }
}
