//! Attention, as C functions.

#![allow(non_camel_case_types)]
