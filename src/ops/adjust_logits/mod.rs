//! Changes to the logits of single tokens before one is chosen: biases, bans, penalties.
//!
//! In the order of Transformers' `generation/logits_process.py`: the bias of a token is added
//! (`SequenceBiasLogitsProcessor`); tokens that end the text are banned while they may not be chosen
//! (`MinNewTokensLengthLogitsProcessor`); tokens that were seen are divided by the repetition penalty
//! where they are positive and else multiplied (`RepetitionPenaltyLogitsProcessor`; Keskar et al.
//! 2019, arXiv:1909.05858); from those that were generated the presence penalty is subtracted once
//! and the frequency penalty once for each time, as the OpenAI interface does. All of it is in f32,
//! each step rounded to nearest even, with the same bits on the CPU and on CUDA.
//!
//! After that, a mask may ban all tokens that cannot come next, as those of a constraint do.
//!
//! A logit that is a number stays one that is finite: a banned token gets the lowest one.

pub mod cpu;
pub mod cuda;

use crate::backend::cuda::kernel_struct;

kernel_struct! {
    /// The state of a token whose logit changes; `csrc/ops/adjust_logits/adjust_logits.cu` has the
    /// same struct.
    #[derive(Clone, Copy, Debug, Default, PartialEq)]
    pub struct Adjustment {
        /// The token.
        pub token_id: u32,
        /// The number of times that it was generated.
        pub num_generated: u32,
        /// The sum of [`Adjustment::SEEN`] and [`Adjustment::ENDS`], where they hold.
        pub flags: u32,
        /// The bias that is added; minus infinity bans the token.
        pub bias: f32,
    }
}

impl Adjustment {
    /// The token is in the prompt or was generated.
    pub const SEEN: u32 = 1;
    /// The token ends the text.
    pub const ENDS: u32 = 2;
}

kernel_struct! {
    /// The changes to a row of logits; `csrc/ops/adjust_logits/adjust_logits.cu` has the same struct.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct AdjustedRow {
        /// The first of its [`Adjustment`]s among those of all rows. They are of different tokens.
        pub first: u32,
        /// Their number.
        pub count: u32,
        /// A row of the tokens chosen last, whose token was generated too but is not counted in the
        /// adjustments yet; `u32::MAX`: there is none.
        pub pending: u32,
        /// Not 0: tokens that end the text are banned.
        pub bans_ends: u32,
        /// Above 0; 1 is neutral.
        pub repetition_penalty: f32,
        /// 0 is neutral.
        pub presence_penalty: f32,
        /// 0 is neutral.
        pub frequency_penalty: f32,
        /// Unused, 0.
        pub reserved: u32,
    }
}

impl AdjustedRow {
    /// The value of [`AdjustedRow::pending`] where all tokens are counted.
    pub const NONE_PENDING: u32 = u32::MAX;

    /// A row that stays as it is.
    pub const UNCHANGED: AdjustedRow = AdjustedRow {
        first: 0,
        count: 0,
        pending: AdjustedRow::NONE_PENDING,
        bans_ends: 0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        reserved: 0,
    };
}

impl Default for AdjustedRow {
    fn default() -> Self {
        AdjustedRow::UNCHANGED
    }
}

/// The number of 32-bit words of an [`Adjustment`].
pub const ADJUSTMENT_WORDS: usize = size_of::<Adjustment>() / 4;
/// The number of 32-bit words of an [`AdjustedRow`].
pub const ADJUSTED_ROW_WORDS: usize = size_of::<AdjustedRow>() / 4;

impl Adjustment {
    /// Returns the struct as words of 32 bits.
    pub fn words(&self) -> [u32; ADJUSTMENT_WORDS] {
        [self.token_id, self.num_generated, self.flags, self.bias.to_bits()]
    }
}

impl AdjustedRow {
    /// Returns the struct as words of 32 bits.
    pub fn words(&self) -> [u32; ADJUSTED_ROW_WORDS] {
        [
            self.first,
            self.count,
            self.pending,
            self.bans_ends,
            self.repetition_penalty.to_bits(),
            self.presence_penalty.to_bits(),
            self.frequency_penalty.to_bits(),
            self.reserved,
        ]
    }
}
