//! Matrix products, their gradients, and the check of gradients, as C functions.

#![allow(non_camel_case_types)]
