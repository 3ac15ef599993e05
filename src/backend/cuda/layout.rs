//! Structs that kernels take or write, whose layout both languages must agree on.
//!
//! [`kernel_struct!`] declares such a struct. `csrc/common/layouts.cuh` has the size of each and the
//! place of every field: nvcc compares its structs with that header, and the macro compares ours, so
//! that neither side compiles with another layout. A test (`src/ops/layouts.rs`) writes the header.
//! The names are the same on both sides.

include!(concat!(env!("OUT_DIR"), "/layouts.rs"));
pub(crate) use committed;

/// Returns whether a size or an offset is the one of the header.
pub(crate) const fn agrees(committed: Option<usize>, ours: usize) -> bool {
    match committed {
        Some(bytes) => bytes == ours,
        None => true,
    }
}

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

        const _: () = {
            use $crate::backend::cuda::layout::{agrees, committed, offset_in_header};
            assert!(
                agrees(committed!($name), size_of::<$name>()),
                concat!("csrc/common/layouts.cuh has another size of ", stringify!($name))
            );
            $(assert!(
                agrees(
                    offset_in_header!($name $field $([$($part),+])?),
                    std::mem::offset_of!($name, $field)
                ),
                concat!(
                    "csrc/common/layouts.cuh has another place of ",
                    stringify!($name), "::", stringify!($field)
                )
            );)+
        };

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

/// The offset of a field in the header; of the first scalar where there are several.
macro_rules! offset_in_header {
    ($name:ident $field:ident) => {
        committed!($name $field)
    };
    ($name:ident $field:ident [$first:ident $(, $other:ident)*]) => {
        committed!($name $first)
    };
}
pub(crate) use offset_in_header;

/// The name of a field in the kernel, or of the scalars that make it up.
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
    /// The bytes that all names take together.
    pub bytes: usize,
}
