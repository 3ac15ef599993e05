//! The C interface as a user meets it: the header, the exported symbols, and every function called
//! through its C signature.

// Calling C functions is what these tests are for; the contract of each call is in the header, and where
// a test breaks it on purpose, that is its subject.
#![allow(clippy::undocumented_unsafe_blocks)]
// Tables of cases read better with their tuples written out.
#![allow(clippy::type_complexity)]

#[path = "../support/model_golden.rs"]
mod family_models;
#[path = "../support/model_files.rs"]
mod files;

mod answers;
mod arguments;
mod batching;
mod begin_token;
mod choosing;
mod client;
mod constraints;
mod cuda;
mod deterministic;
mod dlpack;
mod dlpack_export;
mod families;
mod floating_point;
mod forks;
mod generation;
mod golden;
mod guide;
mod header;
#[allow(dead_code)] // the battery uses the rest
mod hostile_child;
mod house;
mod layering;
mod load_options;
mod logits_callback;
mod memory;
mod messages;
mod over_llama;
mod padding;
mod plan;
mod prompt_log_probs;
mod response_templates;
mod scoring;
mod self_test;
mod soak;
mod structs;
mod symbols;
mod template_files;
mod threads;
mod tool_choice;
mod wakers;

/// The groups of cases that [`hostile_child`] runs in children of this test binary.
const GROUPS: &[&[hostile_child::Group]] =
    &[floating_point::GROUPS, forks::GROUPS, threads::GROUPS];
