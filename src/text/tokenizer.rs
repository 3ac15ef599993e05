//! Turns text into token ids and back, by the `tokenizer.json` of a model.
//!
//! Encoding is done by the `tokenizers` crate; reading the file is our own code
//! (`tokenizer_file.rs`). Decoding is our own as well where tokens stand for bytes (`token_bytes.rs`),
//! as those of all supported families do: a table from ids to bytes, which the streaming detokenizer
//! also uses. Other vocabularies go through the crate's decoder.

use super::cut::CutRules;
use super::frame::Frame;
use super::marks::{Conversation, Marks, Spellings};
use super::pipeline::{self, Pipeline};
use super::special_tokens::SpecialTokens;
use super::token_bytes::{ByteDecoder, ByteText, TokenBytes, MAX_GROWTH};
use super::tokenizer_components::{check, Findings, Place};
use super::tokenizer_file::{AddedTokenEntry, TokenizerFile, Vocab};
use super::trial::trial_texts;
use super::watch::{ShouldStop, Watch};
use super::{crate_error, guarded, shortened};
use crate::error::{check_room, try_with_capacity, Context, Error, ErrorKind, Result};
use serde_json::Value;
use std::collections::HashSet;
use std::time::Duration;
use tokenizers::models::bpe::BPE;
use tokenizers::{AddedToken, AddedVocabulary, Decoder, DecoderWrapper, Model};

/// The longest text that is encoded at once, in bytes.
pub const MAX_TEXT_BYTES: usize = 16 << 20;
/// The longest text for tokenizers whose texts cannot be cut: the crate takes up to 400 times as
/// much memory while it works.
const MAX_UNCUT_BYTES: usize = 1 << 20;

/// Bytes reserved for each byte of tokenizer.json: more than the crate takes, for expressions and
/// the like too.
const ROOM_PER_FILE_BYTE: usize = 4;
const ROOM_FOR_PARTS: usize = 8 << 20;
/// Bytes that the crate takes for each token that it decodes, and for each byte of its text.
const ROOM_PER_DECODED_TOKEN: usize = 256;
const ROOM_PER_DECODED_BYTE: usize = 8;

/// The treatment of special tokens that are to be added before a text which begins with them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WhenWritten {
    /// They are added again, as in Transformers.
    Again,
    /// The text is left as it is.
    Leave,
}

/// A model's tokenizer. Calls take `&self`, change nothing and may come from several threads.
pub struct Tokenizer {
    model: BPE,
    added: AddedVocabulary,
    /// No tokens, for texts in which the added ones are not to be recognised.
    none_added: AddedVocabulary,
    pipeline: Pipeline,
    /// The tokens around a text for which special tokens are asked.
    frame: Frame,
    decoder: Option<DecoderWrapper>,
    /// The highest id plus one.
    vocab_size: usize,
    special_ids: HashSet<u32>,
    special_tokens: SpecialTokens,
    /// The spellings that are not taken for special tokens in the contents of messages.
    spellings: Spellings,
    /// Set if tokens stand for bytes.
    token_bytes: Option<TokenBytes>,
    /// The rules by which long texts may be cut, if they may.
    cut_rules: Option<CutRules>,
}

/// Makes the crate give added tokens the ids of the file. It numbers those that are not in the
/// vocabulary from the vocabulary's size on; if the file has other ids (gaps, padding), these
/// tokens are put into the vocabulary.
fn with_misplaced_tokens(mut vocab: Vocab, added: &[AddedTokenEntry]) -> Result<Vocab> {
    let mut next = vocab.len();
    let misplaced = added.iter().any(|token| match vocab.get(&token.content) {
        Some(id) => *id != token.id,
        None => {
            next += 1;
            token.id as usize != next - 1
        }
    });
    if !misplaced {
        return Ok(vocab);
    }
    let taken: HashSet<u32> = vocab.values().copied().collect();
    for token in added {
        if !vocab.contains_key(&token.content) && !taken.contains(&token.id) {
            vocab.insert(token.content.clone(), token.id);
        }
    }
    Ok(vocab)
}

/// Replaces each maximal part that is not UTF-8 by U+FFFD, in memory that is reserved first.
fn replace_invalid(bytes: &[u8]) -> Result<String> {
    const REPLACEMENT: &str = "\u{fffd}";
    let parts = || {
        bytes.utf8_chunks().flat_map(|chunk| {
            [chunk.valid(), if chunk.invalid().is_empty() { "" } else { REPLACEMENT }]
        })
    };
    let length = parts().map(str::len).sum();
    let mut text = String::new();
    text.try_reserve_exact(length).map_err(|_| Error::out_of_memory("decoded text", length))?;
    parts().for_each(|part| text.push_str(part));
    Ok(text)
}

impl Tokenizer {
    /// Builds a tokenizer from the contents of `tokenizer.json` and, for the names of the special
    /// tokens, `tokenizer_config.json`.
    pub fn from_bytes(json: &[u8], config_json: Option<&[u8]>) -> Result<Self> {
        Self::from_files(json, config_json, None)
    }

    /// As [`Tokenizer::from_bytes`], with the contents of `special_tokens_map.json` too.
    pub fn from_files(
        json: &[u8],
        config_json: Option<&[u8]>,
        special_tokens_map_json: Option<&[u8]>,
    ) -> Result<Self> {
        let special_tokens = SpecialTokens::from_files(config_json, special_tokens_map_json)?;
        guarded(ErrorKind::InvalidFile, "it makes the tokenizer fail", || {
            let room = json.len().saturating_mul(ROOM_PER_FILE_BYTE);
            check_room(room.saturating_add(ROOM_FOR_PARTS), "the tokenizer")?;
            Self::build(TokenizerFile::parse(json)?, special_tokens)
        })
        .context(|| "tokenizer.json")
    }

    fn build(file: TokenizerFile, special_tokens: SpecialTokens) -> Result<Self> {
        let mut findings = Findings::default();
        check(Place::Normalizer, &file.normalizer, &mut findings)?;
        check(Place::PreTokenizer, &file.pre_tokenizer, &mut findings)?;
        check(Place::PostProcessor, &file.post_processor, &mut findings)?;
        check(Place::Decoder, &file.decoder, &mut findings)?;
        let cut_rules = CutRules::of(&file);
        let byte_decoder = ByteDecoder::of(&file.decoder);

        let highest = file.vocab.values().chain(file.added_tokens.iter().map(|t| &t.id)).max();
        let vocab_size = highest.map_or(0, |id| *id as usize + 1);
        let options = file.options;
        let vocab = with_misplaced_tokens(file.vocab, &file.added_tokens)?;
        // The cache is disabled: the crate keeps one per thread and tokenizer and never frees it.
        let mut model = BPE::builder()
            .vocab_and_merges(vocab, file.merges)
            .cache_capacity(0)
            .fuse_unk(options.fuse_unk)
            .byte_fallback(options.byte_fallback)
            .ignore_merges(options.ignore_merges);
        if let Some(unk) = options.unk_token {
            model = model.unk_token(unk);
        }
        if let Some(suffix) = options.end_of_word_suffix {
            model = model.end_of_word_suffix(suffix);
        }
        let model = model.build().map_err(crate_error)?;
        let growth = findings.pre_tokenizer_growth;
        let pipeline = Pipeline::build(&file.normalizer, &file.pre_tokenizer, growth)?;
        let tokens = file.added_tokens.iter().map(|token| AddedToken {
            content: token.content.clone(),
            single_word: token.single_word,
            lstrip: token.lstrip,
            rstrip: token.rstrip,
            normalized: token.normalized,
            special: token.special,
        });
        let mut added = AddedVocabulary::new();
        // Tokens that are looked for in the normalized text are normalized themselves.
        let bytes = file.added_tokens.iter().map(|token| token.content.len()).sum();
        let watch = Watch::over_text(bytes, &|| false);
        added
            .add_tokens(tokens, &model, Some(&pipeline.normalizer(&watch, 0)))
            .map_err(crate_error)?;
        watch.check()?;
        for token in &file.added_tokens {
            let id = added.token_to_id(&token.content, &model);
            if id != Some(token.id) {
                return Err(Error::invalid_file(format!(
                    "the added token \"{}\" has id {}, but the vocabulary before it leads to {}",
                    shortened(&token.content),
                    token.id,
                    id.map_or("none".to_owned(), |id| id.to_string())
                )));
            }
        }
        let spellings = Spellings::of(&file.added_tokens)?;
        let special_ids = file.added_tokens.iter().filter(|t| t.special).map(|t| t.id).collect();
        let token_bytes = match byte_decoder {
            Some(decoder) => Some(TokenBytes::new(&decoder, &added, &model, vocab_size)?),
            None => None,
        };
        let decoder = match &file.decoder {
            Value::Null => None,
            decoder => Some(pipeline::read("decoder", decoder)?),
        };
        let tokenizer = Tokenizer {
            model,
            added,
            none_added: AddedVocabulary::new(),
            pipeline,
            frame: Frame::of(&file.post_processor)?,
            decoder,
            vocab_size,
            special_ids,
            special_tokens,
            spellings,
            token_bytes,
            cut_rules,
        };
        if !findings.untrusted_patterns.is_empty() {
            tokenizer.try_patterns(&findings.untrusted_patterns)?;
        }
        tokenizer.check_frame()?;
        Ok(tokenizer)
    }

    /// Refuses a post-processor that adds ids which the vocabulary does not have.
    fn check_frame(&self) -> Result<()> {
        let Frame { before, after } = &self.frame;
        match before.iter().chain(after).find(|id| self.id_to_token(**id).is_none()) {
            None => Ok(()),
            Some(id) => Err(Error::invalid_file(format!(
                "post_processor adds the token id {id}, which the vocabulary does not have"
            ))),
        }
    }

    /// Returns the tokens of `text`. With `parse_special_tokens`, added tokens (special ones and
    /// others, such as `<think>`) that are written in the text become their ids; else they are
    /// ordinary text. `add_special_tokens` lets the post-processor add its own (none for Qwen and
    /// GPT-2, the token that begins a text for Llama and Mistral), as in Transformers whether or not
    /// the text begins with them; a rendered conversation has them already.
    ///
    /// Time is linear in the text, about half a second per megabyte; a file with which it is not is
    /// given up with [`ErrorKind::InvalidFile`] after a time that follows from the text's length.
    /// With the patterns of Qwen, Llama 3 and GPT-2, texts are encoded in pieces, so that memory
    /// stays small; a run of more than 512 KiB without a place to cut is cut all the same, and its
    /// tokens may differ there (see `cut.rs`).
    pub fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        parse_special_tokens: bool,
    ) -> Result<Vec<u32>> {
        let all = usize::MAX;
        let go_on = &|| false;
        let frame = add_special_tokens.then_some(WhenWritten::Again);
        let marks = Marks::default();
        Ok(self.encode_until(text, &marks, frame, parse_special_tokens, all, go_on)?.0)
    }

    /// As [`Tokenizer::encode`], for the prompt of a model: where the text begins with the special
    /// tokens that are to be added before it (a rendered conversation of Llama does), they are not
    /// added again, because no model knows texts that begin twice. More than `enough` tokens are of
    /// no use: stops after the piece that exceeds them. Also returns whether the tokens are those of
    /// the whole text. `should_stop` is asked every few milliseconds, and ends the work with
    /// [`ErrorKind::Cancelled`] by returning true.
    pub fn encode_prompt(
        &self,
        text: &str,
        add_special_tokens: bool,
        parse_special_tokens: bool,
        enough: usize,
        should_stop: &ShouldStop<'_>,
    ) -> Result<(Vec<u32>, bool)> {
        let frame = add_special_tokens.then_some(WhenWritten::Leave);
        let marks = Marks::default();
        self.encode_until(text, &marks, frame, parse_special_tokens, enough, should_stop)
    }

    /// Puts marks into a conversation, with which the special tokens that are written in it stay plain
    /// text in [`Tokenizer::encode_marked`]. Without such spellings the conversation stays as it is.
    pub fn mark(&self, conversation: &mut Conversation) -> Result<Marks> {
        self.spellings.mark(conversation)
    }

    /// As [`Tokenizer::encode_prompt`], for a rendered conversation with marks in it: special tokens without
    /// a mark become their ids, and none are added.
    pub fn encode_marked(
        &self,
        text: &str,
        marks: &Marks,
        enough: usize,
        should_stop: &ShouldStop<'_>,
    ) -> Result<(Vec<u32>, bool)> {
        self.encode_until(text, marks, None, true, enough, should_stop)
    }

    fn encode_until(
        &self,
        text: &str,
        marks: &Marks,
        add_special_tokens: Option<WhenWritten>,
        parse_special_tokens: bool,
        enough: usize,
        should_stop: &ShouldStop<'_>,
    ) -> Result<(Vec<u32>, bool)> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(Error::invalid_argument(format!(
                "the text has {} bytes, at most {MAX_TEXT_BYTES} can be encoded",
                text.len()
            )));
        }
        guarded(ErrorKind::InvalidFile, "tokenizer.json makes the tokenizer fail on a text", || {
            let cut_rules = self.cut_rules.as_ref();
            if cut_rules.is_none() && text.len() > MAX_UNCUT_BYTES {
                return Err(Error::unsupported(format!(
                    "the text has {} bytes, but this tokenizer can encode {MAX_UNCUT_BYTES} at most: how to \
                     cut longer ones is not known for its pattern",
                    text.len()
                )));
            }
            let added = if parse_special_tokens { &self.added } else { &self.none_added };
            let watch = Watch::over_text(text.len(), should_stop);
            let none = Frame::default();
            let frame = if add_special_tokens.is_some() { &self.frame } else { &none };
            let mut ids = Vec::new();
            let mut rest = text;
            // Runs once for the empty text as well: the normalizer may make something of it.
            loop {
                let cut = cut_rules.map_or(rest.len(), |rules| rules.first_piece(rest));
                let (piece, after) = rest.split_at(cut);
                let encoding = self.pipeline.encode(piece, marks, added, &self.model, &watch);
                let encoding = encoding.map_err(|error| match error.kind() {
                    ErrorKind::InvalidFile => {
                        let message = error.message();
                        Error::invalid_file(format!("tokenizer.json fails on a text: {message}"))
                    }
                    _ => error,
                })?;
                let new = encoding.get_ids();
                let is_first = rest.len() == text.len();
                let is_written = add_special_tokens == Some(WhenWritten::Leave)
                    && new.starts_with(&frame.before);
                if is_first && !is_written {
                    append(&mut ids, &frame.before)?;
                }
                append(&mut ids, new)?;
                rest = after;
                if rest.is_empty() {
                    append(&mut ids, &frame.after)?;
                    return Ok((ids, true));
                }
                if ids.len() > enough {
                    return Ok((ids, false));
                }
            }
        })
    }

    /// Returns the text of `ids`. Bytes that are not UTF-8 become U+FFFD: at the byte level one for
    /// each maximal part; where tokens such as `<0xE2>` stand for single bytes, one for each byte, as
    /// in SentencePiece (the `tokenizers` package replaces all bytes of a run of such tokens if one
    /// is bad). Ids without a token have no text, as in Transformers (models round their vocabulary
    /// up).
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        if let Some(table) = &self.token_bytes {
            let shown = || ids.iter().filter(|id| !(skip_special_tokens && self.is_special(**id)));
            let bytes = || shown().map(|id| table.get(*id).unwrap_or_default());
            let length = bytes().fold(0usize, |sum, token| sum.saturating_add(token.len()));
            if !table.is_byte_level() {
                let most = length.saturating_mul(MAX_GROWTH);
                let mut text = String::new();
                text.try_reserve(most).map_err(|_| Error::out_of_memory("decoded text", most))?;
                let mut stream = ByteText::default();
                for id in shown() {
                    stream.reserve(table, *id)?;
                    stream.push(table, *id, &mut text);
                }
                stream.finish(table, &mut text);
                return Ok(text);
            }
            let mut joined: Vec<u8> = try_with_capacity(length, "decoded text")?;
            bytes().for_each(|token| joined.extend_from_slice(token));
            let bytes = joined;
            return match String::from_utf8(bytes) {
                Ok(text) => Ok(text),
                Err(e) => replace_invalid(e.as_bytes()),
            };
        }
        guarded(ErrorKind::InvalidFile, "tokenizer.json makes the decoder fail", || {
            let shown =
                |token: &String| !skip_special_tokens || !self.added.is_special_token(token);
            let shown = || ids.iter().filter_map(|id| self.id_to_token(*id).filter(shown));
            let length = shown().fold(0usize, |sum, token| sum.saturating_add(token.len()));
            let room = ids.len().saturating_mul(ROOM_PER_DECODED_TOKEN);
            let room = room.saturating_add(length.saturating_mul(ROOM_PER_DECODED_BYTE));
            check_room(room, "decoding")?;
            let tokens: Vec<String> = shown().collect();
            match &self.decoder {
                Some(decoder) => decoder.decode(tokens).map_err(crate_error),
                None => Ok(tokens.join(" ")),
            }
        })
    }

    /// Returns the highest id plus one, added tokens included. A model's own vocabulary may be
    /// larger.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the id of a token, as it is written in the vocabulary or added.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.added.token_to_id(token, &self.model)
    }

    /// Returns a token as the vocabulary writes it (byte level: `Ġ` for a space).
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.added.simple_id_to_token(id).or_else(|| self.model.id_to_token(id))
    }

    /// Returns the bytes that a token stands for within a text; the decoder of Llama 2 and Mistral
    /// leaves out one space at the beginning of a text. `None` for an unknown id, and for all ids of
    /// a vocabulary whose tokens have no bytes of their own.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.token_bytes.as_ref()?.get(id)
    }

    /// Whether tokens stand for bytes, so that [`Tokenizer::token_bytes`] has an answer: the
    /// vocabulary is of the byte level, or has tokens such as `<0xE2>` for single bytes.
    pub fn has_token_bytes(&self) -> bool {
        self.token_bytes.is_some()
    }

    pub(super) fn byte_table(&self) -> Option<&TokenBytes> {
        self.token_bytes.as_ref()
    }

    /// Whether `skip_special_tokens` leaves this token out.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.contains(&id)
    }

    /// Returns the special tokens that `tokenizer_config.json` names.
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.special_tokens
    }

    /// Returns the id of `eos_token`, if the config names one that the vocabulary has.
    pub fn eos_token_id(&self) -> Option<u32> {
        self.token_to_id(self.special_tokens.eos.as_deref()?)
    }

    /// Runs unknown expressions over texts that expose bad ones. Lengths grow slowly, so that
    /// exponential time shows before it hurts. The limit counts this thread's processor time, so that
    /// the verdict depends little on what else the machine does, and grows with the text, as that of
    /// [`Watch::over_text`] does: on a slow machine an ordinary expression with a look ahead took more
    /// than 5 ms on 2,049 characters.
    fn try_patterns(&self, patterns: &[String]) -> Result<()> {
        /// The time allowed for any text, and for each of its characters.
        const LIMIT: Duration = Duration::from_millis(5);
        const LIMIT_PER_CHARACTER: Duration = Duration::from_micros(10);
        for text in trial_texts(patterns) {
            let length = text.chars().count();
            let limit = LIMIT + LIMIT_PER_CHARACTER * u32::try_from(length).unwrap_or(u32::MAX);
            let is_slow = || {
                let watch = Watch::with_limit(2 * limit, &|| false);
                // A search that gives up is slow, and so is a text that the watch ends.
                let none = Marks::default();
                let outcome = self.pipeline.encode(&text, &none, &self.added, &self.model, &watch);
                match outcome {
                    Ok(_) => Ok(watch.elapsed() > limit),
                    Err(error) if error.kind() == ErrorKind::InvalidFile => Ok(true),
                    Err(error) => Err(error),
                }
            };
            // Tried three times: a run may have met cold caches or a busy machine.
            if is_slow()? && is_slow()? && is_slow()? {
                return Err(Error::invalid_file(format!(
                    "its regular expressions take more than {} ms on {length} characters",
                    limit.as_millis()
                )));
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size).finish_non_exhaustive()
    }
}

/// Appends ids, in memory that is reserved first.
fn append(ids: &mut Vec<u32>, new: &[u32]) -> Result<()> {
    ids.try_reserve(new.len()).map_err(|_| Error::out_of_memory("token ids", new.len() * 4))?;
    ids.extend_from_slice(new);
    Ok(())
}
