//! generation_config.json: the model's own defaults.

use serde_json::{Map, Value};

use super::config_fields::{count, wrong};
use super::sampler::SamplingOverrides;
use crate::error::{check_room_for_json, Context, Error, Result};
use crate::model::folder::shown_name;

/// The settings of generation_config.json (and the end tokens of config.json). `None` where it is
/// silent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// The settings of sampling. The temperature is `None` unless the file asks for sampling, and is
    /// then 1 if it states none, as in Transformers.
    pub sampling: SamplingOverrides,
    /// Most tokens to generate.
    pub max_new_tokens: Option<u32>,
    /// Tokens that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// Names of fields that are set to something and would change the output, but are not
    /// implemented.
    pub ignored: Vec<&'static str>,
}

/// Fields of Transformers that change the output, and the values of them that change nothing.
const NOT_IMPLEMENTED: [(&str, &[&str]); 17] = [
    ("num_beams", &["1"]),
    ("min_length", &["0"]),
    ("min_new_tokens", &["0"]),
    ("encoder_no_repeat_ngram_size", &["0"]),
    ("epsilon_cutoff", &["0.0", "0"]),
    ("eta_cutoff", &["0.0", "0"]),
    ("suppress_tokens", &["[]"]),
    ("begin_suppress_tokens", &["[]"]),
    ("bad_words_ids", &["[]"]),
    ("sequence_bias", &["{}"]),
    ("forced_bos_token_id", &[]),
    ("forced_eos_token_id", &["[]"]),
    ("exponential_decay_length_penalty", &[]),
    ("stop_strings", &["[]"]),
    ("guidance_scale", &["1.0", "1"]),
    ("encoder_repetition_penalty", &["1.0", "1"]),
    // Of prompt and answer together. 20 is its default.
    ("max_length", &["20"]),
];

/// The most end tokens that are taken from a file.
const MAX_EOS_TOKENS: usize = 1024;

impl GenerationConfig {
    /// Reads the two files (each may be absent). `vocab_size` bounds the end tokens.
    pub fn from_files(
        generation_config: Option<&[u8]>,
        config: Option<&[u8]>,
        vocab_size: usize,
    ) -> Result<Self> {
        let mut out = GenerationConfig::default();
        if let Some(bytes) = generation_config {
            let file = "generation_config.json";
            let json = object(bytes).context(|| file)?;
            out.read(&json, vocab_size).context(|| file)?;
        }
        if let (true, Some(bytes)) = (out.eos_token_ids.is_empty(), config) {
            let json = object(bytes).context(|| "config.json")?;
            out.eos_token_ids =
                token_ids(&json, "eos_token_id", vocab_size).context(|| "config.json")?;
        }
        Ok(out)
    }

    fn read(&mut self, json: &Map<String, Value>, vocab_size: usize) -> Result<()> {
        let does_sample = match json.get("do_sample") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(b)) => *b,
            Some(other) => return Err(wrong("do_sample", "true or false", other)),
        };
        self.sampling = SamplingOverrides::from_json(json)?;
        self.sampling.temperature = does_sample.then(|| self.sampling.temperature.unwrap_or(1.0));
        self.max_new_tokens = count(json, "max_new_tokens")?;
        self.eos_token_ids = token_ids(json, "eos_token_id", vocab_size)?;
        let is_set = |(key, neutral): &(&'static str, &[&str])| match json.get(*key) {
            None | Some(Value::Null) => false,
            Some(value) => !neutral.contains(&value.to_string().as_str()),
        };
        self.ignored = NOT_IMPLEMENTED.iter().filter(|f| is_set(f)).map(|f| f.0).collect();
        if self.max_new_tokens.is_some() {
            self.ignored.retain(|&name| name != "max_length"); // as in Transformers
        }
        Ok(())
    }
}

fn object(bytes: &[u8]) -> Result<Map<String, Value>> {
    check_room_for_json(bytes, "a config")?;
    serde_json::from_slice(bytes).map_err(|e| {
        Error::invalid_file(format!("not a JSON object: {}", shown_name(&e.to_string())))
    })
}

fn token_ids(json: &Map<String, Value>, key: &str, vocab_size: usize) -> Result<Vec<u32>> {
    let one = |value: &Value| match value.as_u64() {
        Some(id) if id < vocab_size as u64 => Ok(id as u32),
        _ => Err(wrong(key, &format!("token ids below the vocabulary size {vocab_size}"), value)),
    };
    match json.get(key) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() > MAX_EOS_TOKENS => {
            Err(Error::invalid_file(format!("{key} lists {} tokens", list.len())))
        }
        Some(Value::Array(list)) => list.iter().map(one).collect(),
        Some(value) => Ok(vec![one(value)?]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<GenerationConfig> {
        GenerationConfig::from_files(Some(text.as_bytes()), Some(br#"{"eos_token_id": 7}"#), 100)
    }

    #[test]
    fn fields_are_read_and_absent_ones_stay_open() {
        let config = parse(
            r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
                "eos_token_id": [5, 6], "transformers_version": "5"}"#,
        )
        .unwrap();
        let expected = SamplingOverrides {
            temperature: Some(0.6),
            top_k: Some(20),
            top_p: Some(0.95),
            ..Default::default()
        };
        assert_eq!(config.sampling, expected);
        assert_eq!(config.eos_token_ids, [5, 6]);
        assert!(config.ignored.is_empty());
        let config =
            parse(r#"{"num_beams": 4, "typical_p": 1.0, "bad_words_ids": [[5]]}"#).unwrap();
        assert_eq!(config.ignored, ["num_beams", "bad_words_ids"]);
        let config = parse(
            r#"{"forced_eos_token_id": 5, "forced_bos_token_id": 7, "stop_strings": ["x"], "guidance_scale": 2.0,
                "exponential_decay_length_penalty": [1, 1.5], "encoder_repetition_penalty": 2.0, "max_length": 5}"#,
        );
        let ignored = config.unwrap().ignored;
        assert_eq!(ignored.len(), 7, "{ignored:?}");
        let config = parse(
            r#"{"forced_eos_token_id": null, "stop_strings": [], "guidance_scale": 1.0, "max_length": 20,
                "encoder_repetition_penalty": 1.0}"#,
        );
        assert!(config.unwrap().ignored.is_empty());
        assert_eq!(parse("{}").unwrap().eos_token_ids, [7]);
    }

    #[test]
    fn a_temperature_counts_only_with_do_sample() {
        let temperature = |text: &str| parse(text).unwrap().sampling.temperature;
        assert_eq!(temperature(r#"{"temperature": 0.6}"#), None);
        assert_eq!(temperature(r#"{"temperature": 0.6, "do_sample": false}"#), None);
        assert_eq!(temperature(r#"{"do_sample": true}"#), Some(1.0));
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        for (text, key) in [
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"temperature": "hot"}"#, "temperature"),
            (r#"{"top_p": 0}"#, "top_p"),
            (r#"{"top_p": 1e300}"#, "top_p"),
            (r#"{"top_k": -1}"#, "top_k"),
            (r#"{"do_sample": 1}"#, "do_sample"),
            (r#"{"eos_token_id": 100}"#, "eos_token_id"),
            (r#"{"eos_token_id": [1, -1]}"#, "eos_token_id"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
            ("[]", "generation_config.json"),
            ("{", "generation_config.json"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.message().contains(key), "{text}: {error}");
        }
    }
}
