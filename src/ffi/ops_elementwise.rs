//! Operators on single elements: activations, add, mul, cast; and transpose, as C functions.

#![allow(non_camel_case_types)]
