//! The special tokens that a post-processor puts around a text.
//!
//! They do not depend on the text. So the post-processor is run once, when the file is read, and a
//! text can be encoded in pieces.

use super::{crate_error, pipeline};
use crate::error::{Error, Result};
use serde_json::Value;
use tokenizers::{Encoding, PostProcessor, PostProcessorWrapper, Token};

/// See the module's description.
#[derive(Default)]
pub(super) struct Frame {
    /// The tokens before the text, such as `<|begin_of_text|>`.
    pub before: Vec<u32>,
    /// The tokens after it.
    pub after: Vec<u32>,
}

impl Frame {
    /// Finds out what the post-processor of this JSON adds to a text of one token.
    pub fn of(post_processor: &Value) -> Result<Self> {
        if post_processor.is_null() {
            return Ok(Frame::default());
        }
        let processor: PostProcessorWrapper = pipeline::read("post_processor", post_processor)?;
        let text = Encoding::from_tokens(vec![Token::new(0, String::new(), (0, 0))], 0);
        let framed = processor.process(text, None, true).map_err(crate_error)?;
        // Every token but that of the text is marked as special.
        let is_added = framed.get_special_tokens_mask();
        let mut parts = is_added.iter().enumerate().filter(|(_, mark)| **mark == 0);
        let (Some((position, _)), None) = (parts.next(), parts.next()) else {
            return Err(Error::invalid_file("post_processor does not keep the text as it is"));
        };
        let ids = framed.get_ids();
        Ok(Frame {
            before: ids.get(..position).unwrap_or_default().to_vec(),
            after: ids.get(position + 1..).unwrap_or_default().to_vec(),
        })
    }
}
