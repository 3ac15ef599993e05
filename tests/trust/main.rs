//! The battery: what an application that embeds the library must be able to rely on, attacked in
//! numbers: hostile input, storms of calls, and faults of all kinds in processes of their own, which
//! must end neither the process nor the next call. `tests/TRUST.md` says what is run, how, and what
//! it found to be the limits.
//!
//! Each subject has a size that runs at every change, and a full one: `XSERV_TRUST=full`.

// Calling C functions is what these tests are for; the contract of each call is in the header, and where
// a test breaks it on purpose, that is its subject.
#![allow(clippy::undocumented_unsafe_blocks)]
// Tables of cases read better with their tuples written out.
#![allow(clippy::type_complexity)]

#[path = "../abi/client.rs"]
#[allow(dead_code)]
mod client;
#[path = "../support/model_files.rs"]
mod files;
#[path = "../abi/hostile_child.rs"]
mod hostile_child;

mod allocations;
mod corpus;
mod corpus_calls;
mod corpus_files;
mod corpus_text;
mod cuda;
mod exports;
mod functions;
mod fuzz;
mod hostile_answers;
mod hostile_files;
mod hostile_requests;
mod hostile_surroundings;
mod identity;
mod kept_files;
mod lifetimes;
mod page;
mod reads;
mod scale;
mod storms;
mod subprocess;
mod world;

/// The groups of cases that [`hostile_child`] runs in children of this test binary.
const GROUPS: &[&[hostile_child::Group]] = &[
    corpus_calls::GROUPS,
    corpus_files::GROUPS,
    corpus_text::GROUPS,
    hostile_answers::GROUPS,
    hostile_files::GROUPS,
    hostile_requests::GROUPS,
    hostile_surroundings::GROUPS,
    kept_files::GROUPS,
];
