//! The CPU half.
