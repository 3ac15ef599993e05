//! Structs that kernels take or write, whose layout both languages must agree on.
//!
//! [`kernel_struct!`] declares such a struct. A test (`src/ops/layouts.rs`) writes what the compiler
//! made of all of them into `csrc/common/layouts.cuh`, with which nvcc checks the size of the struct
//! and the place and size of every field. The names are the same on both sides.

/// Declares a `#[repr(C)]` struct that a kernel has as well. An array that the kernel has as several
/// scalars names them: `strides: [i64; 2] => [token_stride, head_stride]`.
macro_rules! kernel_struct {
    (
        $(#[$meta:meta])*
        $visibility:vis struct $name:ident {
            $(
                $(#[$field_meta:meta])*
                $field_visibility:vis $field:ident: $type:ty $(=> [$($part:ident),+ $(,)?])?
            ),+ $(,)?
        }
    ) => {
        $(#[$meta])*
        #[repr(C)]
        $visibility struct $name {
            $(
                $(#[$field_meta])*
                $field_visibility $field: $type,
            )+
        }

        #[cfg(test)]
        impl $name {
            /// Returns the layout for `csrc/common/layouts.cuh`.
            #[allow(clippy::identity_op)]
            pub(crate) fn layout() -> $crate::backend::cuda::layout::Layout {
                use $crate::backend::cuda::layout::{names, Field, Layout};
                Layout {
                    name: stringify!($name),
                    bytes: size_of::<$name>(),
                    fields: vec![$(Field {
                        names: names!($field $([$($part),+])?),
                        offset: std::mem::offset_of!($name, $field),
                        bytes: size_of::<$type>(),
                    }),+],
                }
            }
        }
    };
}
pub(crate) use kernel_struct;

/// What the kernel calls a field, or the scalars that make it up.
#[cfg(test)]
macro_rules! names {
    ($field:ident) => {
        &[stringify!($field)]
    };
    ($field:ident [$($part:ident),+]) => {
        &[$(stringify!($part)),+]
    };
}
#[cfg(test)]
pub(crate) use names;

/// The layout of a struct, in bytes.
#[cfg(test)]
pub(crate) struct Layout {
    pub name: &'static str,
    pub bytes: usize,
    pub fields: Vec<Field>,
}

/// A field, or several of the kernel's that follow each other.
#[cfg(test)]
pub(crate) struct Field {
    pub names: &'static [&'static str],
    pub offset: usize,
    /// Of all names together.
    pub bytes: usize,
}
