//! Recognises the folders of other formats, so that the refusal says what was passed and what to
//! take instead.

use super::config::CONFIG_FILE;
use super::folder::{shown_name, Folder};
use crate::error::{Error, ErrorKind};

/// The configuration of a checkpoint in the form of Meta's and other makers' own programs.
const MAKERS_FILE: &str = "params.json";
/// The configuration of an adapter of PEFT (LoRA and its like).
const ADAPTER_FILE: &str = "adapter_config.json";
/// The file that lists the parts of a pipeline of Diffusers.
const PIPELINE_FILE: &str = "model_index.json";
/// The most names of a folder that are looked at for other formats.
const MAX_NAMES: usize = 1000;

/// Returns the refusal of a folder without a configuration.
pub fn has_no_config(folder: &Folder) -> Error {
    let shown = shown_name(&folder.path().display().to_string());
    let has = |name: &str| folder.contains(name).unwrap_or(false);
    let names = folder.some_names(MAX_NAMES);
    let one_with = |ending: &str| {
        names.iter().find(|name| name.to_ascii_lowercase().ends_with(ending)).map(|n| shown_name(n))
    };
    let unsupported = |what: String| {
        Error::unsupported(format!("the folder {shown} has no {CONFIG_FILE}, but {what}"))
    };
    if has(MAKERS_FILE) {
        return unsupported(format!(
            "{MAKERS_FILE}: a checkpoint in its makers' own form is not supported; take the model's Transformers \
             release"
        ));
    }
    if has(ADAPTER_FILE) {
        return unsupported(format!(
            "{ADAPTER_FILE}: adapters (LoRA) are not supported; pass the folder of the whole model, or merge the \
             adapter into it"
        ));
    }
    if has(PIPELINE_FILE) {
        return unsupported(format!(
            "{PIPELINE_FILE}: pipelines of image models are not supported"
        ));
    }
    if let Some(name) = one_with(".gguf") {
        return unsupported(format!(
            "{name}: GGUF files are not supported; take the model's repository with safetensors files"
        ));
    }
    if let Some(name) = one_with(".bin").or_else(|| one_with(".pt")).or_else(|| one_with(".pth")) {
        return unsupported(format!(
            "{name}: take the model's repository with {CONFIG_FILE} and safetensors files"
        ));
    }
    let rest = if names.is_empty() { ": it is empty" } else { "" };
    Error::new(ErrorKind::NotFound, format!("the folder {shown} has no {CONFIG_FILE}{rest}"))
}
