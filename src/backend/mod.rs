//! How to run anything anywhere; knows no operator.

pub mod cpu;
