//! Rotary position embedding: its configuration, and the frequencies that follow from it.
//!
//! Plain RoPE (Su et al. 2021, arXiv 2104.09864): pair i of a head of dimension d turns by
//! `position * theta^(-2i/d)`.
//!
//! YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2 "NTK-by-parts" and 3.4) stretches the
//! context by `factor`: pairs that turn often within the original context keep their frequency,
//! pairs that turn less than once are slowed by `factor`, and a linear ramp over the pair index
//! joins the two; cos and sin are scaled by `0.1 ln(factor) + 1`. The ramp's ends, their rounding
//! (`truncate`) and the order of the fields follow Transformers 5.17 (`modeling_rope_utils.py`).
//!
//! Llama 3.1 stretches by wavelength (`_compute_llama3_parameters` there): pairs whose wavelength is
//! short beside the original context keep their frequency, long ones are slowed by `factor`, and
//! between them the two are mixed by how often a pair turns within the original context. Linear
//! scaling (Chen et al. 2023, arXiv 2306.15595) slows all pairs by `factor`.

use serde_json::Map;

use super::fields::Fields;
use crate::error::{Error, Result};

/// The theta of most families if config.json gives none: the default of Transformers.
pub(in crate::model) const DEFAULT_THETA: f64 = 10_000.0;
/// The number of turns within the original context from which on a pair keeps its frequency (YaRN's
/// beta).
const DEFAULT_BETA_FAST: f64 = 32.0;
/// The number of turns below which a pair is fully interpolated (YaRN's alpha).
const DEFAULT_BETA_SLOW: f64 = 1.0;

/// The supported kinds of scaling, as config.json spells them.
const SUPPORTED: [&str; 4] = ["default", "linear", "llama3", "yarn"];

/// The rotation of the heads of q and k by their positions.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// The base of the frequencies.
    pub theta: f64,
    /// The way in which a longer context than that of the pretraining is reached.
    pub scaling: RopeScaling,
}

/// The scaling of the frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All are divided by this factor, at least 1.
    Linear(f64),
    /// YaRN.
    Yarn(YarnConfig),
    /// Llama 3.1's way.
    ByWavelength(ByWavelength),
}

/// The parameters of Llama 3.1's scaling.
#[derive(Clone, Debug, PartialEq)]
pub struct ByWavelength {
    /// The factor by which slow pairs are slowed further, at least 1.
    pub factor: f64,
    /// Pairs that turn less often than this within the original context are slowed in full.
    pub low_freq_factor: f64,
    /// Pairs that turn more often than this keep their frequency; more than `low_freq_factor`.
    pub high_freq_factor: f64,
    /// The context length of the pretraining, in tokens.
    pub original_max_position_embeddings: usize,
}

/// The parameters of YaRN.
#[derive(Clone, Debug, PartialEq)]
pub struct YarnConfig {
    /// The factor by which the context is stretched, at least 1.
    pub factor: f64,
    /// The context length of the pretraining, in tokens.
    pub original_max_position_embeddings: usize,
    /// The number of turns from which on a pair keeps its frequency.
    pub beta_fast: f64,
    /// The number of turns below which a pair is fully interpolated.
    pub beta_slow: f64,
    /// The scale of cos and sin.
    pub attention_factor: f64,
    /// Whether the ends of the ramp are rounded outwards to whole pairs.
    pub truncate: bool,
}

impl RopeConfig {
    /// Reads the old spelling (`rope_theta` beside `rope_scaling`) and the new one
    /// (`rope_parameters` with everything in it).
    pub(in crate::model) fn parse(
        config: Fields<'_>,
        default_theta: f64,
        max_position_embeddings: usize,
        max_positions: usize,
    ) -> Result<Self> {
        let empty = Map::new();
        // Transformers: a non-empty rope_scaling wins over rope_parameters.
        let (name, map) = match config.optional_object("rope_scaling")? {
            Some(map) => ("rope_scaling", map),
            None => match config.optional_object("rope_parameters")? {
                Some(map) => ("rope_parameters", map),
                None => ("rope_parameters", &empty),
            },
        };
        let place = format!("{}: {name}", config.place());
        let rope = Fields::new(map, &place);
        for layer_type in ["full_attention", "sliding_attention"] {
            if rope.has(layer_type) {
                return Err(Error::unsupported(format!(
                    "{place} has an entry for {layer_type}; one rotary embedding per layer type is not supported"
                )));
            }
        }

        let theta = match rope.optional_number("rope_theta", 1.0, 1e30)? {
            Some(theta) => theta,
            None => config.optional_number("rope_theta", 1.0, 1e30)?.unwrap_or(default_theta),
        };
        for fields in [rope, config] {
            if let Some(part) = fields.optional_number("partial_rotary_factor", 0.0, 1.0)? {
                if part != 1.0 {
                    return Err(Error::unsupported(format!(
                        "{}: partial_rotary_factor {part} is not supported",
                        fields.place()
                    )));
                }
            }
        }
        let rope_type = match rope.optional_string("rope_type")? {
            Some(rope_type) => rope_type,
            None => rope.optional_string("type")?.unwrap_or("default"),
        };
        if rope.has("llama_4_scaling_beta") {
            return Err(Error::unsupported(format!(
                "{place}: llama_4_scaling_beta (queries scaled by their position) is not supported"
            )));
        }
        let original = || original_context(config, rope, max_position_embeddings, max_positions);
        let scaling = match rope_type {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear(factor(rope)?.ok_or_else(|| rope.missing("factor"))?),
            "yarn" => {
                let yarn = YarnConfig::parse(rope, max_position_embeddings, original()?)?;
                RopeScaling::Yarn(yarn)
            }
            "llama3" => RopeScaling::ByWavelength(ByWavelength::parse(rope, original()?)?),
            other => {
                return Err(Error::unsupported(format!(
                    "{place}: rope type \"{}\" is not supported (supported: {})",
                    crate::model::folder::shown_name(other),
                    SUPPORTED.join(", ")
                )))
            }
        };
        Ok(RopeConfig { theta, scaling })
    }

    /// Returns the angle per position of each pair, `[head_dim / 2]`, in the precision of
    /// Transformers: the exponent and the result are f32, the power itself is exact to f32.
    pub fn inv_freq(&self, head_dim: usize) -> Result<Vec<f32>> {
        let num_pairs = head_dim / 2;
        // First the wavelengths, in units of 2 pi.
        let mut inv_freq = crate::error::try_with_capacity(num_pairs, "rotary frequencies")?;
        for pair in 0..num_pairs {
            let exponent = (2 * pair) as f32 / head_dim as f32;
            inv_freq.push(self.theta.powf(f64::from(exponent)) as f32);
        }
        // A loop for each kind: in one loop over all, the compiler looks at the parameters of every kind
        // before it knows which there is, and reads memory that was never written.
        match &self.scaling {
            RopeScaling::None => inv_freq.iter_mut().for_each(|x| *x = 1.0 / *x),
            RopeScaling::Linear(factor) => {
                inv_freq.iter_mut().for_each(|x| *x = 1.0 / *x / *factor as f32);
            }
            RopeScaling::ByWavelength(scaling) => {
                inv_freq.iter_mut().for_each(|x| *x = scaling.scaled(1.0 / *x));
            }
            RopeScaling::Yarn(yarn) => {
                let (low, high) = yarn.ramp(head_dim, self.theta);
                for (pair, x) in inv_freq.iter_mut().enumerate() {
                    let interpolated = 1.0 / (yarn.factor as f32 * *x);
                    let slowed = ((pair as f32 - low) / (high - low)).clamp(0.0, 1.0);
                    let kept = 1.0 - slowed;
                    *x = interpolated * (1.0 - kept) + 1.0 / *x * kept;
                }
            }
        }
        Ok(inv_freq)
    }

    /// Returns the scale of cos and sin; 1 without YaRN.
    pub fn attention_scaling(&self) -> f32 {
        match &self.scaling {
            RopeScaling::Yarn(yarn) => yarn.attention_factor as f32,
            _ => 1.0,
        }
    }
}

/// Reads `factor`, a number of at least 1; `None` if it is absent or `null`.
fn factor(rope: Fields<'_>) -> Result<Option<f64>> {
    match rope.optional_number("factor", 0.0, 65_536.0)? {
        Some(factor) if factor < 1.0 => Err(rope.wrong("factor", "a number of at least 1")),
        factor => Ok(factor),
    }
}

/// Reads the context length of the pretraining. As in Transformers the one beside `rope` wins, and
/// where there is none it is `max_position_embeddings`.
fn original_context(
    config: Fields<'_>,
    rope: Fields<'_>,
    max_position_embeddings: usize,
    max_positions: usize,
) -> Result<usize> {
    const NAME: &str = "original_max_position_embeddings";
    match config.optional_count(NAME, max_positions)? {
        Some(n) => Ok(n),
        None => Ok(rope.optional_count(NAME, max_positions)?.unwrap_or(max_position_embeddings)),
    }
}

impl ByWavelength {
    fn parse(rope: Fields<'_>, original: usize) -> Result<Self> {
        let number = |name: &str| {
            rope.optional_number(name, 0.0, 65_536.0)?.ok_or_else(|| rope.missing(name))
        };
        let parsed = ByWavelength {
            factor: factor(rope)?.ok_or_else(|| rope.missing("factor"))?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_position_embeddings: original,
        };
        if parsed.high_freq_factor <= parsed.low_freq_factor {
            let expected = format!("more than low_freq_factor ({})", parsed.low_freq_factor);
            return Err(rope.wrong("high_freq_factor", &expected));
        }
        Ok(parsed)
    }

    /// Returns the frequency that a pair of frequency `inv_freq` has after scaling.
    fn scaled(&self, inv_freq: f32) -> f32 {
        let original = self.original_max_position_embeddings as f32;
        let (low, high) = (self.low_freq_factor as f32, self.high_freq_factor as f32);
        let wavelength = std::f32::consts::TAU / inv_freq;
        if wavelength > original / low {
            inv_freq / self.factor as f32
        } else if wavelength < original / high {
            inv_freq
        } else {
            let kept = (original / wavelength - low) / (high - low);
            (1.0 - kept) * inv_freq / self.factor as f32 + kept * inv_freq
        }
    }
}

impl YarnConfig {
    fn parse(rope: Fields<'_>, max_position_embeddings: usize, original: usize) -> Result<Self> {
        let factor = match factor(rope)? {
            Some(factor) => factor,
            // Transformers treats an explicit null this way; an absent factor is an error there.
            None if rope.has("factor") => {
                (max_position_embeddings as f64 / original as f64).max(1.0)
            }
            None => return Err(rope.missing("factor")),
        };
        // As with Python's `or`, zero means the default.
        let beta = |name: &str, default: f64| match rope.get(name) {
            Some(value) if value.as_f64() == Some(0.0) => Ok(default),
            _ => Ok(rope.optional_number(name, 0.0, 1e9)?.unwrap_or(default)),
        };
        let beta_fast = beta("beta_fast", DEFAULT_BETA_FAST)?;
        let beta_slow = beta("beta_slow", DEFAULT_BETA_SLOW)?;
        if beta_fast < beta_slow {
            return Err(rope.wrong("beta_fast", &format!("at least beta_slow ({beta_slow})")));
        }
        let magnitude = |scale: f64| {
            if factor <= 1.0 {
                1.0
            } else {
                0.1 * scale * factor.ln() + 1.0
            }
        };
        let scale = |name: &str| match rope.get(name) {
            Some(value) if value.as_f64() == Some(0.0) => Ok(None),
            _ => rope.optional_number(name, 0.0, 1e6),
        };
        let (mscale, mscale_all_dim) = (scale("mscale")?, scale("mscale_all_dim")?);
        let attention_factor = match rope.optional_number("attention_factor", 0.0, 1e6)? {
            Some(attention_factor) => attention_factor,
            None => match (mscale, mscale_all_dim) {
                (Some(mscale), Some(all_dim)) => magnitude(mscale) / magnitude(all_dim),
                _ => magnitude(1.0),
            },
        };
        Ok(YarnConfig {
            factor,
            original_max_position_embeddings: original,
            beta_fast,
            beta_slow,
            attention_factor,
            // A null counts as false there.
            truncate: rope.flag("truncate", !rope.has("truncate"))?,
        })
    }

    /// Returns the pair indices between which the frequencies change from kept to interpolated.
    fn ramp(&self, head_dim: usize, theta: f64) -> (f32, f32) {
        // The pair that turns `turns` times within the original context:
        // original * theta^(-2 i / d) = 2 pi * turns, solved for i.
        let pair_of = |turns: f64| {
            let original = self.original_max_position_embeddings as f64;
            head_dim as f64 * (original / (turns * 2.0 * std::f64::consts::PI)).ln()
                / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (pair_of(self.beta_fast), pair_of(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        low = low.max(0.0);
        high = high.min(head_dim as f64 - 1.0);
        if low == high {
            high += 0.001; // as Transformers: no division by zero
        }
        (low as f32, high as f32)
    }
}
