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
