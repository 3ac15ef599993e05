//! The C interface as a user meets it: the header, the exported symbols, and every function called
//! through its C signature.

// Calling C functions is what these tests are for; the contract of each call is in the header, and where
// a test breaks it on purpose, that is its subject.
#![allow(clippy::undocumented_unsafe_blocks)]
// Tables of cases read better with their tuples written out.
#![allow(clippy::type_complexity)]

#[path = "../support/model_files.rs"]
mod files;

mod arguments;
mod batching;
mod client;
mod cuda;
mod deterministic;
mod dlpack;
mod generation;
mod golden;
mod guide;
mod header;
mod hostile_child;
mod hostile_files;
mod hostile_requests;
mod hostile_surroundings;
mod house;
mod layering;
mod memory;
mod plan;
mod soak;
mod symbols;
