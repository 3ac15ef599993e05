//! Builds and runs everything around the library: the C, C++ and Python examples, the install tree, and
//! what the README says.
//!
//! A test whose tool is not on this machine prints "skipped" with the reason; with XSERV_REQUIRE_TOOLS=1
//! in the environment it fails instead, so that "all passed" can't mean "all skipped".

mod bench;
mod bench_parts;
mod c;
mod cpp;
mod docs;
mod install;
mod packaging;
mod page;
mod program;
mod python;
mod random_model;
mod ray;
mod readme;
mod rust;
mod server;
mod support;
mod tables;
