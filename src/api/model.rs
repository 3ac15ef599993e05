//! Models.

use std::path::Path;
use std::sync::Arc;

use super::{LoadOptions, Logger, Message, Request, Stream};
use crate::engine::{
    parse_response, Answer, ChatPrompt, Engine, EngineStats, Generation, LogitsEvent, ModelShape,
    Response, TokenScore,
};
use crate::error::{try_filled, Error, Result};
use serde_json::Value;

/// A loaded model. All methods take `&self` and may be called from any number of threads at once.
///
/// ```
/// # fn main() -> xserv::Result<()> {
/// use xserv::{DeviceChoice, LoadOptions, Message, Model, Request};
///
/// let options = LoadOptions {
///     device: DeviceChoice::Cpu,
///     max_memory_bytes: 64 << 20,
///     ..LoadOptions::default()
/// };
/// let model = Model::load("examples/models/tiny-qwen3".as_ref(), &options)?;
/// let request = Request::chat(&[Message::user("What is 27 plus 58?")]).temperature(0.0);
/// let answer = model.generate(&request)?;
/// assert_eq!(answer.text, "27 plus 58 is 85.");
/// println!("{:.0} tokens per second", answer.tokens_per_second);
/// # Ok(())
/// # }
/// ```
pub struct Model {
    engine: Arc<Engine>,
}

impl Model {
    /// Opens a folder as Hugging Face publishes it, or the name of a repository (`org/name`) that
    /// the local Hugging Face cache holds, with the default options: on the first NVIDIA GPU where
    /// the model runs and fits, else on the CPU.
    pub fn open(path: impl AsRef<Path>) -> Result<Model> {
        Model::load(path.as_ref(), &LoadOptions::default())
    }

    /// The same with options.
    pub fn load(path: &Path, options: &LoadOptions) -> Result<Model> {
        Model::load_with(path, options, Logger::silent(), |_| true)
    }

    /// The same with a log, and with a function that is told the fraction of the weights that is
    /// loaded, from 0 to 1; the load ends as cancelled when it returns false.
    pub fn load_with(
        path: &Path,
        options: &LoadOptions,
        log: Logger,
        mut progress: impl FnMut(f32) -> bool,
    ) -> Result<Model> {
        let path = path.to_str().ok_or_else(|| {
            Error::invalid_argument(format!("the path {} is not UTF-8", path.display()))
        })?;
        let engine = Engine::load(path, options, Arc::new(log), &mut progress)?;
        Ok(Model { engine: Arc::new(engine) })
    }

    /// Runs a request of one sample to its end.
    pub fn generate(&self, request: &Request) -> Result<Generation> {
        let mut generations = self.generate_all(request)?;
        match generations.len() {
            1 => generations.pop().ok_or_else(|| Error::internal("one sample is none")),
            n => Err(Error::invalid_argument(format!(
                "the request has {n} samples: call generate_all for their outcomes"
            ))),
        }
    }

    /// Runs a request to its end and returns each sample's outcome.
    pub fn generate_all(&self, request: &Request) -> Result<Vec<Generation>> {
        self.stream(request)?.finish()
    }

    /// As [`generate_all`](Model::generate_all), and calls `change` on this thread before every
    /// choice of a token, with the model's logits: `vocab_size` numbers, which it may change before
    /// biases, penalties and filters are applied; minus infinity bans a token. It returns false to
    /// stop the request. The request's samples wait for it, others do not.
    pub fn generate_with_logits(
        &self,
        request: &Request,
        mut change: impl FnMut(&LogitsEvent<'_>, &mut [f32]) -> Result<bool>,
    ) -> Result<Vec<Generation>> {
        self.engine.check_process()?;
        let request = request.as_engine();
        self.engine.generate_with(&request, &mut |_, _, _, _| Ok(true), &mut change)
    }

    /// Begins a request and returns its events as they come. Tokenizes the prompt on this thread.
    pub fn stream(&self, request: &Request) -> Result<Stream> {
        self.engine.check_process()?;
        Ok(Stream::new(self.engine.submit(&request.as_engine(), None)?))
    }

    /// Returns the token ids of a text, with the tokens that the tokenizer adds by itself. Special
    /// tokens written in the text become their ids.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        self.engine.tokenize(text, true, true)
    }

    /// Returns the text of token ids; `skip_special` leaves out special tokens.
    pub fn detokenize(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.engine.detokenize(ids, skip_special)
    }

    /// Returns the prompt that a conversation becomes, with the opening of the model's answer.
    pub fn render_chat(&self, messages: &[Message]) -> Result<String> {
        let messages = messages.iter().map(Message::json).cloned().collect();
        self.engine.apply_chat_template(&ChatPrompt {
            messages: &Value::Array(messages).to_string(),
            tools: None,
            variables: None,
            add_generation_prompt: true,
            parse_special: true,
        })
    }

    /// Takes a text apart that the model has generated, into thoughts, content and calls of tools.
    pub fn parse_response(&self, response: &Response<'_>) -> Result<Answer> {
        parse_response(Some(&self.engine), response)
    }

    /// Returns the logits after the last token of `ids`: `vocab_size` numbers.
    pub fn logits(&self, ids: &[u32]) -> Result<Vec<f32>> {
        self.engine.check_process()?;
        let mut logits = try_filled(self.shape().vocab_size, 0.0, "logits")?;
        self.engine.logits(ids, false, None, &mut logits)?;
        Ok(logits)
    }

    /// Returns the log-probabilities that the model gives the tokens of `ids` from index
    /// `num_given` (at least 1) on, each after all those before it. The sum of their `log_prob` is
    /// the log-likelihood, `exp` of minus the mean the perplexity. Calls and requests with the same
    /// `cache_key` (0 is the usual one) share the keys and values of the tokens before `num_given`.
    pub fn score(&self, ids: &[u32], num_given: usize, cache_key: u64) -> Result<Vec<TokenScore>> {
        self.engine.check_process()?;
        let count = ids.len().saturating_sub(num_given);
        let mut scores = try_filled(count, TokenScore::default(), "scores")?;
        self.engine.score(ids, num_given, cache_key, None, &mut scores)?;
        Ok(scores)
    }

    /// Statistics of what the model has done and is doing.
    pub fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    /// Sizes of the model.
    pub fn shape(&self) -> ModelShape {
        self.engine.shape()
    }

    /// Returns the engine beneath, with all that it tells: device, element type, memory, tokenizer,
    /// end tokens.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }
}

impl Drop for Model {
    /// Ends the model's requests as cancelled; a [`Stream`] of it tells that they have ended. Waits
    /// for calls of other threads on it, and releases its memory.
    fn drop(&mut self) {
        self.engine.close();
        if self.engine.check_process().is_err() {
            // In a forked child the threads that dropping would wait for do not exist.
            std::mem::forget(self.engine.clone());
        }
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("path", &self.engine.path())
            .field("architecture", &self.engine.architecture())
            .field("device", &self.engine.device_name())
            .finish()
    }
}
