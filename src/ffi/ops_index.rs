//! Operators with indices: embedding, rotary embeddings, argmax, top-k; as C functions.

#![allow(non_camel_case_types)]
