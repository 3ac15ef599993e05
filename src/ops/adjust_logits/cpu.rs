//! The CPU half, on a row of f32.

use super::{AdjustedRow, Adjustment};

/// Changes the logits of the tokens of `adjustments` in a row of logits, as `row` says; its range and
/// its pending token do not count here. Tokens beyond the row are left out.
pub fn adjust_logits(logits: &mut [f32], row: &AdjustedRow, adjustments: &[Adjustment]) {
    for adjustment in adjustments {
        if let Some(logit) = logits.get_mut(adjustment.token_id as usize) {
            *logit = adjusted(*logit, row, adjustment);
        }
    }
}

/// Bans the tokens of a row of logits whose bits are not set: the bit `id % 32` of the word `id / 32`.
/// Tokens beyond the words are banned too. What is not a number stays so.
pub fn mask_logits(logits: &mut [f32], mask: &[u32]) {
    let words = mask.iter().copied().chain(std::iter::repeat(0));
    for (logits, word) in logits.chunks_mut(32).zip(words) {
        if word == u32::MAX {
            continue;
        }
        for (bit, logit) in logits.iter_mut().enumerate() {
            // An infinity of damaged weights stays to be found.
            if word >> bit & 1 == 0 && logit.is_finite() {
                *logit = f32::MIN;
            }
        }
    }
}

fn adjusted(logit: f32, row: &AdjustedRow, adjustment: &Adjustment) -> f32 {
    if logit.is_nan() {
        return logit;
    }
    if row.bans_ends != 0 && adjustment.flags & Adjustment::ENDS != 0 {
        return f32::MIN;
    }
    let mut logit = logit + adjustment.bias;
    if adjustment.flags & Adjustment::SEEN != 0 {
        let penalty = row.repetition_penalty;
        logit = if logit < 0.0 { logit * penalty } else { logit / penalty };
    }
    if adjustment.num_generated > 0 {
        logit -= row.presence_penalty + row.frequency_penalty * adjustment.num_generated as f32;
    }
    // Not clamp, which would make the infinity of damaged weights look right.
    if logit < f32::MIN {
        f32::MIN
    } else {
        logit
    }
}
