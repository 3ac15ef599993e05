//! The config of NVIDIA's Model Optimizer, whose weights are FP8 here.
//!
//! It is `quantization_config` of config.json, or `quantization` in that, or in a file of its own in older
//! repositories. The keys and what they mean are those that vLLM reads.

use super::pattern::{has_parts, optional_names, Budget, Expression};
use super::scheme::{ScaleShape, Scheme};
use super::values::one_of;
use crate::error::Result;
use crate::model::config::fields::Fields;

/// The algorithms that are read, and the numbers of a weight that share a scale.
const ALGORITHMS: [(&str, ScaleShape); 2] =
    [("FP8", ScaleShape::Tensor), ("FP8_PER_CHANNEL_PER_TOKEN", ScaleShape::Channel)];

/// The fields of the config.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ModelOpt {
    scales: ScaleShape,
    /// Modules that are not quantised: whole parts of their names.
    skipped: Vec<String>,
    /// The same as expressions of whole names.
    skipped_expressions: Vec<Expression>,
}

impl ModelOpt {
    pub fn parse(fields: Fields<'_>) -> Result<Self> {
        match fields.optional_object("quantization")? {
            Some(inner) => {
                let place = format!("{}: quantization", fields.place());
                Self::parse_fields(Fields::new(inner, &place))
            }
            None => Self::parse_fields(fields),
        }
    }

    fn parse_fields(fields: Fields<'_>) -> Result<Self> {
        let names = ALGORITHMS.map(|(name, _)| name);
        let algorithm =
            one_of(fields, "quant_algo", &names)?.ok_or_else(|| fields.missing("quant_algo"))?;
        let scales = ALGORITHMS.iter().find(|(name, _)| *name == algorithm);
        let key = match fields.get("exclude_modules") {
            Some(_) => "exclude_modules",
            None => "ignore",
        };
        let (place, budget) = (format!("{}: {key}", fields.place()), Budget::default());
        let mut model_opt = ModelOpt {
            scales: scales.map_or(ScaleShape::Tensor, |&(_, scales)| scales),
            skipped: Vec::new(),
            skipped_expressions: Vec::new(),
        };
        for name in optional_names(fields, key)?.unwrap_or_default() {
            if name.contains(['*', '?', '[']) {
                let expression = Expression::new(&place, &of_wildcards(&name), &budget)?;
                model_opt.skipped_expressions.push(expression);
            } else {
                model_opt.skipped.push(name);
            }
        }
        Ok(model_opt)
    }

    pub fn scheme(&self, module: &str) -> Result<Option<Scheme>> {
        if self.skipped.iter().any(|key| has_parts(module, key)) {
            return Ok(None);
        }
        for expression in &self.skipped_expressions {
            if expression.matches(module)? {
                return Ok(None);
            }
        }
        Ok(Some(Scheme::Fp8 { scales: Some(self.scales), has_fp8_inputs: true }))
    }
}

/// Returns the expression of the whole names that wildcards stand for, as Python's `fnmatch` has them: `*` is any
/// text, `?` a character, and `[...]` one of several (`[!...]` none of them).
fn of_wildcards(text: &str) -> String {
    let mut expression = String::from("^");
    let mut rest = text.chars();
    while let Some(character) = rest.next() {
        match character {
            '*' => expression.push_str(".*"),
            '?' => expression.push('.'),
            '[' => match rest.as_str().split_once(']') {
                Some((set, after)) if !set.is_empty() && set != "!" => {
                    let (not, set) = set.strip_prefix('!').map_or(("", set), |set| ("^", set));
                    let set: String = set.chars().flat_map(in_set).collect();
                    expression.push_str(&format!("[{not}{set}]"));
                    rest = after.chars();
                }
                _ => expression.push_str("\\["),
            },
            _ => {
                if !(character.is_alphanumeric() || character == '_' || character == '-') {
                    expression.push('\\');
                }
                expression.push(character);
            }
        }
    }
    expression.push('$');
    expression
}

/// Returns a character of a set as it is written in an expression.
fn in_set(character: char) -> impl Iterator<Item = char> {
    let is_escaped = "\\^[&~".contains(character);
    is_escaped.then_some('\\').into_iter().chain([character])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_are_those_of_fnmatch() {
        // As fnmatch.fnmatchcase of Python 3.11 answers.
        for (wildcards, name, is_match) in [
            ("lm_head*", "lm_head", true),
            ("lm_head*", "model.lm_head", false),
            ("model.layers.1.*", "model.layers.1.mlp.up_proj", true),
            ("model.layers.1.*", "model.layers.11.mlp.up_proj", false),
            ("model.layers.1.*", "model_layers_1_", false),
            ("*.layers.?.mlp*", "model.layers.3.mlp.gate", true),
            ("*.layers.?.mlp*", "model.layers.13.mlp.gate", false),
            ("*.[!12].*", "model.layers.3.x", true),
            ("*.[!12].*", "model.layers.2.x", false),
            ("*[1-3].q", "a2.q", true),
            ("*[1-3].q", "a4.q", false),
            ("a[", "a[", true),
            ("a+*", "a+b", true),
            ("a+*", "aab", false),
        ] {
            let expression = Expression::new("here", &of_wildcards(wildcards), &Budget::default());
            let found = expression.and_then(|expression| expression.matches(name));
            assert_eq!(found.expect("an expression"), is_match, "{wildcards}, {name}");
        }
    }
}
