//! The small files of a model folder that say how text becomes tokens and how tokens are chosen.

use super::generation_config::GenerationConfig;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::model::config::MAX_CONFIG_BYTES;
use crate::model::folder::{is_lasting, Folder};
use crate::model::ModelConfig;
use crate::text::{
    ChatTemplate, ResponseTemplate, Tokenizer, MAX_TEMPLATE_BYTES, MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_CONFIG_BYTES,
};

/// The tokenizer in Mistral's own format, the only one that some of its folders have.
const TEKKEN_FILE: &str = "tekken.json";

/// The folder of a model's further chat templates.
const MORE_TEMPLATES: &str = "additional_chat_templates";

/// Returns the folder's tokenizer. [`ErrorKind::NotFound`] if it has no tokenizer.json;
/// [`ErrorKind::Unsupported`] if it has the tokenizer in another form.
pub(super) fn read_tokenizer(folder: &Folder) -> Result<Tokenizer> {
    let json = folder.read_optional_file("tokenizer.json", MAX_TOKENIZER_BYTES)?;
    let Some(json) = json else {
        if folder.contains(TEKKEN_FILE)? {
            return Err(Error::unsupported(format!(
                "the folder has {TEKKEN_FILE} and no tokenizer.json: tekken is not supported; take \
                 tokenizer.json from the model's Transformers release"
            )));
        }
        return Err(Error::new(ErrorKind::NotFound, "the folder has no tokenizer.json"));
    };
    let config = read_tokenizer_config(folder)?;
    let map = folder.read_optional_file("special_tokens_map.json", MAX_TOKENIZER_CONFIG_BYTES)?;
    Tokenizer::from_files(&json, config.as_deref(), map.as_deref())
}

/// Whether the folder has a tokenizer. One that is damaged or not supported is an error, as in a
/// load; a model without one can be used with token ids.
pub(super) fn has_tokenizer(folder: &Folder) -> Result<bool> {
    match read_tokenizer(folder) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

const NO_CHAT_TEMPLATE: &str = "the model's folder has no chat template";

/// The templates of a folder, or why it has none that can be used ([`ErrorKind::NotFound`]: it has none).
pub(super) struct Templates {
    pub chat: Result<ChatTemplate>,
    pub response: Result<ResponseTemplate>,
}

/// Returns the folder's templates. Fails if they could not be found out.
pub(super) fn read_templates(folder: &Folder) -> Result<Templates> {
    let config = read_tokenizer_config(folder);
    let chat = chat_template(folder, borrowed(&config));
    let response = borrowed(&config)
        .and_then(|config| config.map(ResponseTemplate::from_config).transpose())
        .map(Option::flatten)
        .context(|| "tokenizer_config.json");
    Ok(Templates {
        chat: usable(chat, NO_CHAT_TEMPLATE)?,
        response: usable(response, "the model's folder has no response template")?,
    })
}

/// Returns the folder's chat template, as in [`Templates`].
pub(super) fn read_chat_template(folder: &Folder) -> Result<Result<ChatTemplate>> {
    let config = read_tokenizer_config(folder);
    let found = chat_template(folder, borrowed(&config));
    usable(found, NO_CHAT_TEMPLATE)
}

fn read_tokenizer_config(folder: &Folder) -> Result<Option<Vec<u8>>> {
    folder.read_optional_file("tokenizer_config.json", MAX_TOKENIZER_CONFIG_BYTES)
}

fn borrowed(file: &Result<Option<Vec<u8>>>) -> Result<Option<&[u8]>> {
    file.as_ref().map(Option::as_deref).map_err(Clone::clone)
}

/// Returns the template beside a tokenizer_config.json.
fn chat_template(folder: &Folder, config: Result<Option<&[u8]>>) -> Result<Option<ChatTemplate>> {
    let jinja = folder.read_optional_file("chat_template.jinja", MAX_TEMPLATE_BYTES)?;
    // Its other templates are for callers of Transformers that name them.
    let tool_use = match folder.subfolder(MORE_TEMPLATES)? {
        Some(more) => more
            .read_optional_file("tool_use.jinja", MAX_TEMPLATE_BYTES)
            .context(|| MORE_TEMPLATES)?,
        None => None,
    };
    ChatTemplate::from_files(config?, jinja.as_deref(), tool_use.as_deref())
}

/// Distinguishes errors that say something about the folder from others, which fail the whole call.
fn usable<T>(found: Result<Option<T>>, missing: &'static str) -> Result<Result<T>> {
    match found {
        Ok(Some(template)) => Ok(Ok(template)),
        Ok(None) => Ok(Err(Error::new(ErrorKind::NotFound, missing))),
        Err(error) if is_lasting(error.kind()) => Ok(Err(error)),
        Err(error) => Err(error),
    }
}

/// Returns the folder's generation_config.json, and the end tokens of its config.json.
pub(super) fn read_generation_config(
    folder: &Folder,
    config: &ModelConfig,
) -> Result<GenerationConfig> {
    GenerationConfig::from_files(
        folder.read_optional_file("generation_config.json", MAX_CONFIG_BYTES)?.as_deref(),
        folder.read_optional_file("config.json", MAX_CONFIG_BYTES)?.as_deref(),
        config.vocab_size,
    )
}
