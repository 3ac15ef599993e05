//! The tokens of a model as `llguidance` knows them: a trie over their bytes.

use std::sync::Arc;

use toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::error::{check_room, try_with_capacity, Error, Result};
use crate::text::Tokenizer;

/// The longest token that a text can have: the trie of the crate has room for 1024 bytes.
const MAX_TOKEN_BYTES: usize = 1000;

/// Bytes that the trie and its copies for common parts of JSON take for each byte of a token, and for
/// each token.
const ROOM_PER_TOKEN_BYTE: usize = 64;
const ROOM_PER_TOKEN: usize = 256;

/// A trie, and the crate's view of it.
struct Vocabulary {
    trie: TokTrie,
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// For grammars that name texts to be matched by their tokens.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.greedy_tokenize(bytes)
    }

    /// Tokens are never forced, so that the model keeps the choice between all that spell a text.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

/// Returns the trie of the tokens of a model with `vocab_size` rows of logits. Beyond them it has one
/// id more, which stands for the end of the text. May panic: call it guarded.
pub(super) fn vocabulary(tokenizer: &Tokenizer, vocab_size: usize) -> Result<TokEnv> {
    if !tokenizer.has_token_bytes() {
        return Err(Error::unsupported(
            "constraints need a tokenizer whose tokens stand for bytes, which this one's do not",
        ));
    }
    let size = u32::try_from(vocab_size).unwrap_or(u32::MAX);
    let bytes_of = |id| tokenizer.token_bytes(id).unwrap_or_default();
    let len: usize = (0..size).map(|id| bytes_of(id).len()).sum();
    let room = len.saturating_mul(ROOM_PER_TOKEN_BYTE);
    check_room(
        room.saturating_add(vocab_size.saturating_mul(ROOM_PER_TOKEN)),
        "the trie of a vocabulary",
    )?;
    let mut words = try_with_capacity(vocab_size.saturating_add(1), "the trie of a vocabulary")?;
    for id in 0..size {
        let bytes = bytes_of(id);
        if bytes.len() > MAX_TOKEN_BYTES {
            words.push(Vec::new());
        } else if tokenizer.is_special(id) {
            // The marker keeps it from being matched as the text of its name.
            let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
            word.extend_from_slice(tokenizer.id_to_token(id).unwrap_or_default().as_bytes());
            words.push(word);
        } else {
            words.push(bytes.to_vec());
        }
    }
    words.push(Vec::new());
    let info = TokRxInfo::new(size.saturating_add(1), size);
    Ok(Arc::new(Vocabulary { trie: TokTrie::from(&info, &words) }))
}
