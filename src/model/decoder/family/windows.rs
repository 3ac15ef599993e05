//! Which layers have a sliding window, by `layer_types`, `sliding_window` and the fields that Qwen adds
//! (Transformers 5.17: `configuration_mistral.py`, `configuration_qwen2.py`, `configuration_qwen3.py`).
//! A query sees the keys of the last `sliding_window` tokens, its own among them (`masking_utils.py`).

use serde_json::Value;

use crate::error::{try_filled, try_with_capacity, Error, Result};
use crate::model::config::fields::Fields;
use crate::model::config::{limits, CONFIG_FILE};
use crate::model::folder::shown_name;

/// The window of each layer in tokens, `[num_layers]`; `None` in layers that see all keys.
pub(super) type Windows = Vec<Option<usize>>;

/// The window where config.json has no `sliding_window`.
const DEFAULT_WINDOW: usize = 4096;
/// The first layer with a window where config.json has no `max_window_layers`.
const DEFAULT_FIRST_LAYER: u64 = 28;

/// Returns the windows of a family that has none, and refuses `layer_types` that say otherwise.
pub(super) fn none(fields: Fields<'_>, num_layers: usize) -> Result<Windows> {
    let types = layer_types(fields, num_layers)?.unwrap_or_default();
    if types.contains(&LayerType::Sliding) {
        return Err(Error::unsupported(format!(
            "{CONFIG_FILE}: layer type sliding_attention is not supported in this architecture \
             (supported: full_attention)"
        )));
    }
    of_all(None, num_layers)
}

/// Returns the same window for all layers.
pub(super) fn of_all(window: Option<usize>, num_layers: usize) -> Result<Windows> {
    try_filled(num_layers, window, "layers")
}

/// Returns the windows of Mistral: `sliding_window` holds for all layers. Transformers does not read
/// `layer_types`, so a list that says anything else is refused.
pub(super) fn of_mistral(fields: Fields<'_>, num_layers: usize) -> Result<Windows> {
    let window = sliding_window(fields)?;
    let types = layer_types(fields, num_layers)?.unwrap_or_default();
    let other = match window {
        Some(_) => LayerType::Full,
        None => LayerType::Sliding,
    };
    if types.contains(&other) {
        return Err(Error::unsupported(format!(
            "{CONFIG_FILE}: layer_types has {}, but in this architecture all layers are as \
             sliding_window says ({})",
            other.name(),
            window.map_or_else(|| "null".to_string(), |window| window.to_string())
        )));
    }
    of_all(window, num_layers)
}

/// Returns the windows of Mixtral: as those of Mistral, but none where config.json has no
/// `sliding_window`.
pub(super) fn of_mixtral(fields: Fields<'_>, num_layers: usize) -> Result<Windows> {
    if fields.has("sliding_window") {
        return of_mistral(fields, num_layers);
    }
    none(fields, num_layers)
}

/// Returns the windows of Qwen2 and Qwen3: those of the layers that `layer_types` names, or of the
/// layers from `max_window_layers` on. Published files carry the fields and switch them off.
pub(super) fn of_qwen(fields: Fields<'_>, num_layers: usize) -> Result<Windows> {
    let types = layer_types(fields, num_layers)?;
    let is_used = fields.flag("use_sliding_window", false)?;
    let window = if is_used { sliding_window(fields)? } else { None };
    if let Some(types) = types {
        if window.is_none() && types.contains(&LayerType::Sliding) {
            return Err(Error::invalid_file(format!(
                "{CONFIG_FILE}: layer_types has sliding_attention, but {}",
                if is_used { "sliding_window is null" } else { "use_sliding_window is not true" }
            )));
        }
        let mut windows = of_all(None, num_layers)?;
        for (to, of_layer) in windows.iter_mut().zip(types) {
            *to = window.filter(|_| of_layer == LayerType::Sliding);
        }
        return Ok(windows);
    }
    let first = match fields.get("max_window_layers").filter(|_| window.is_some()) {
        None => DEFAULT_FIRST_LAYER,
        Some(value) => {
            value.as_u64().ok_or_else(|| fields.wrong("max_window_layers", "a whole number"))?
        }
    };
    let mut windows = of_all(None, num_layers)?;
    let first = usize::try_from(first).unwrap_or(usize::MAX);
    windows.iter_mut().skip(first).for_each(|to| *to = window);
    Ok(windows)
}

/// Returns the windows of Qwen's mixtures of experts: `sliding_window` holds for all layers if
/// `use_sliding_window` says so. Transformers does not read `layer_types`, see [`of_mistral`].
pub(super) fn of_qwen_moe(fields: Fields<'_>, num_layers: usize) -> Result<Windows> {
    if fields.flag("use_sliding_window", false)? {
        return of_mistral(fields, num_layers);
    }
    none(fields, num_layers)
}

/// Reads `sliding_window`: its default where there is none, and no window where it is `null`.
fn sliding_window(fields: Fields<'_>) -> Result<Option<usize>> {
    if !fields.has("sliding_window") {
        return Ok(Some(DEFAULT_WINDOW));
    }
    fields.optional_count("sliding_window", limits::POSITIONS)
}

/// The kinds of attention that a layer can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LayerType {
    Full,
    Sliding,
}

impl LayerType {
    fn name(self) -> &'static str {
        match self {
            LayerType::Full => "full_attention",
            LayerType::Sliding => "sliding_attention",
        }
    }
}

/// Reads `layer_types`, one for each layer; `None` if the field is not there. Refuses other kinds.
fn layer_types(fields: Fields<'_>, num_layers: usize) -> Result<Option<Vec<LayerType>>> {
    let Some(value) = fields.get("layer_types") else { return Ok(None) };
    let Value::Array(names) = value else {
        return Err(fields.wrong("layer_types", "a list of names"));
    };
    let kinds = [LayerType::Full, LayerType::Sliding];
    let mut types = try_with_capacity(names.len(), "layers")?;
    for name in names {
        match kinds.into_iter().find(|kind| name.as_str() == Some(kind.name())) {
            Some(kind) => types.push(kind),
            None => {
                return Err(Error::unsupported(format!(
                    "{CONFIG_FILE}: layer type {} is not supported (supported: {})",
                    shown_name(&name.to_string()),
                    kinds.map(LayerType::name).join(", ")
                )))
            }
        }
    }
    if types.len() != num_layers {
        return Err(Error::invalid_file(format!(
            "{CONFIG_FILE}: layer_types has {} entries, but num_hidden_layers is {num_layers}",
            types.len()
        )));
    }
    Ok(Some(types))
}
