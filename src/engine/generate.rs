//! One request from prompt to result.

use std::time::Instant;

use super::engine_load::Engine;
use super::request::Request;
use super::runner::LogitsRows;
use super::sampler::{Sampler, SamplingParams};
use crate::error::{try_filled, try_with_capacity, Error, ErrorKind, Result};
use crate::text::{Detokenizer, StopMatcher};

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token of the model or of the request.
    StopToken,
    /// A stop string of the request.
    StopString,
    /// The request's most tokens.
    MaxTokens,
    /// No position is left.
    ContextFull,
    /// The callback said so.
    Callback,
    /// Another thread said so, or the model was freed.
    Cancelled,
}

/// What a request came to.
#[derive(Clone, Debug)]
pub struct Generation {
    /// The generated text, without stop token and stop string.
    pub text: String,
    /// The generated ids, with the stop token.
    pub token_ids: Vec<u32>,
    /// Tokens of the prompt.
    pub num_prompt_tokens: usize,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// The seed that was used.
    pub seed: u64,
    /// From the call to the first token; 0 if there is none.
    pub time_to_first_token_seconds: f64,
    /// The whole call.
    pub total_seconds: f64,
    /// Prompt tokens per second of prompt processing.
    pub prompt_tokens_per_second: f64,
    /// Tokens per second after the first.
    pub tokens_per_second: f64,
}

/// Told of every token: the token (none for text that was held back at the end), the text that became
/// certain, and the number of tokens so far. Returns false to stop.
pub type OnToken<'a> = dyn FnMut(Option<u32>, &str, usize) -> Result<bool> + 'a;

/// The text side of a request: ids to text, stop strings. Without a tokenizer there is no text.
struct TextOutput {
    detokenizer: Option<Detokenizer>,
    stop: StopMatcher,
    text: String,
}

impl TextOutput {
    fn new(engine: &Engine, request: &Request<'_>) -> Result<Self> {
        let stop = StopMatcher::new(&request.stop_strings)?;
        let detokenizer = match engine.tokenizer() {
            Ok(_) => Some(engine.detokenizer(request.skip_special)?),
            // Ids in, ids out works without a tokenizer; stop strings do not.
            Err(_) if request.stop_strings.is_empty() => None,
            Err(error) => return Err(error),
        };
        Ok(TextOutput { detokenizer, stop, text: String::new() })
    }

    fn append(&mut self, piece: &str) -> Result<()> {
        let no_memory = |_| Error::out_of_memory("the generated text", piece.len());
        self.text.try_reserve(piece.len()).map_err(no_memory)?;
        self.text.push_str(piece);
        Ok(())
    }

    /// Takes a token; returns the text that may be shown, and whether a stop string came.
    fn push(&mut self, token: u32) -> Result<(String, bool)> {
        let Some(detokenizer) = &mut self.detokenizer else { return Ok((String::new(), false)) };
        let piece = detokenizer.push(token)?;
        let output = self.stop.push(&piece);
        self.append(&output.text)?;
        Ok((output.text, output.matched.is_some()))
    }

    /// Ends the stream; returns the text that was held back, and whether a stop string came in it.
    fn finish(&mut self) -> Result<(String, bool)> {
        let Some(detokenizer) = &mut self.detokenizer else { return Ok((String::new(), false)) };
        let rest = detokenizer.finish()?;
        let output = self.stop.push(&rest);
        let mut piece = output.text;
        if output.matched.is_none() {
            piece.push_str(&self.stop.finish());
        }
        self.append(&piece)?;
        Ok((piece, output.matched.is_some()))
    }
}

/// A seed of the operating system's.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The standard library keys each of these from the system's random numbers.
    let seed = std::collections::hash_map::RandomState::new().build_hasher().finish();
    // u64::MAX stands for "draw one" at the C interface.
    seed.min(u64::MAX - 1)
}

fn rate(count: usize, seconds: f64) -> f64 {
    if count > 0 && seconds > 0.0 {
        count as f64 / seconds
    } else {
        0.0
    }
}

impl Engine {
    /// Runs a request to its end. Being stopped is a success with what was generated.
    pub fn generate(
        &self,
        request: &Request<'_>,
        on_token: &mut OnToken<'_>,
    ) -> Result<Generation> {
        let begin = Instant::now();
        let config = self.generation_config();
        let params = SamplingParams::resolve(&request.sampling, config)?;
        let seed = request.seed.unwrap_or_else(random_seed);
        let mut output = TextOutput::new(self, request)?;
        let should_stop =
            || self.is_closed() || request.cancel.as_ref().is_some_and(|c| c.is_cancelled());
        let mut ids = match should_stop() {
            // Tokenizing a long prompt would be in vain.
            true => Vec::new(),
            false => self.prompt_ids(&request.prompt)?,
        };
        let num_prompt_tokens = ids.len();
        let max_tokens = request.max_tokens.or(config.max_new_tokens).unwrap_or(u32::MAX) as usize;
        let capacity = self.max_context_tokens() as usize;
        let mut sampler = Sampler::new(params, seed, &ids)?;
        let mut logits = try_filled(self.shape().vocab_size, 0.0f32, "logits")?;
        let is_stop_token = |token: u32| {
            request.stop_token_ids.contains(&token)
                || (!request.ignore_eos && self.eos_token_ids().contains(&token))
        };

        let sequence = self.turns().sequence()?;
        let mut first_token_at = None;
        let prompt_begin = Instant::now();
        let mut prompt_seconds = 0.0;
        // Whether the callback wants to hear more.
        let mut listening = true;
        let mut finish_reason = loop {
            // The callback may have forked.
            self.check_process()?;
            if should_stop() {
                break FinishReason::Cancelled;
            }
            let num_tokens = ids.len() - num_prompt_tokens;
            if num_tokens >= max_tokens {
                break FinishReason::MaxTokens;
            }
            // The last token of a full context is generated but never computed.
            if ids.len() > capacity {
                break FinishReason::ContextFull;
            }
            let rows = LogitsRows::Last;
            match sequence.compute(self.model(), &ids, rows, &mut logits, &should_stop) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Cancelled => {
                    break FinishReason::Cancelled
                }
                Err(error) => return Err(error),
            }
            if num_tokens == 0 {
                prompt_seconds = prompt_begin.elapsed().as_secs_f64();
            }
            let token = sampler.sample(&mut logits, num_tokens as u64)?;
            ids.try_reserve(1).map_err(|_| Error::out_of_memory("token ids", 4 * ids.len()))?;
            ids.push(token);
            let num_tokens = num_tokens + 1;
            first_token_at.get_or_insert_with(Instant::now);
            if is_stop_token(token) {
                listening = on_token(Some(token), "", num_tokens)?;
                break FinishReason::StopToken;
            }
            let (piece, stopped) = output.push(token)?;
            listening = on_token(Some(token), &piece, num_tokens)?;
            if stopped {
                break FinishReason::StopString;
            }
            if !listening {
                break FinishReason::Callback;
            }
        };
        drop(sequence);
        let generated = ids.get(num_prompt_tokens..).unwrap_or_default();
        let mut token_ids = try_with_capacity(generated.len(), "token ids")?;
        token_ids.extend_from_slice(generated);
        if finish_reason != FinishReason::StopString {
            let (piece, stopped) = output.finish()?;
            if listening && !piece.is_empty() {
                on_token(None, &piece, token_ids.len())?;
            }
            if listening && stopped {
                finish_reason = FinishReason::StopString;
            }
        }
        let end = Instant::now();
        let since = |t: Instant| t.duration_since(begin).as_secs_f64();
        let after_first = first_token_at.map_or(0.0, |t| end.duration_since(t).as_secs_f64());
        Ok(Generation {
            text: output.text,
            num_prompt_tokens,
            finish_reason,
            seed,
            time_to_first_token_seconds: first_token_at.map_or(0.0, since),
            total_seconds: since(end),
            prompt_tokens_per_second: rate(num_prompt_tokens, prompt_seconds),
            tokens_per_second: rate(token_ids.len().saturating_sub(1), after_first),
            token_ids,
        })
    }

    /// The logits after the last token, or after every token, of `ids`.
    ///
    /// `out`: [rows, vocab_size] with 1 or `ids.len()` rows.
    pub fn logits(&self, ids: &[u32], all: bool, out: &mut [f32]) -> Result<()> {
        self.check_tokens(ids)?;
        let rows = if all { LogitsRows::All } else { LogitsRows::Last };
        self.turns().sequence()?.compute(self.model(), ids, rows, out, &|| self.is_closed())
    }
}
