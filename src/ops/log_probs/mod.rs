//! Log-probabilities of some tokens of rows of logits: the natural logarithm of the softmax over the
//! whole row, of the logits divided by a temperature.
//!
//! `out[r, i] = x - m - log(sum(exp(x' - m)))` over the row's `x' = logits[r] / temperatures[r]`, where
//! `x` is that of token `ids[r, i]` and `m` the largest. A row's results depend on nothing but the row.
//! A token whose logit is the lowest f32, as [`adjust_logits`](super::adjust_logits) leaves it where
//! it bans one, has minus infinity.

pub mod cpu;
pub mod cuda;
