//! Values that the configs of several methods have.

use serde_json::Value;

use crate::error::{Error, Result};
use crate::model::config::fields::Fields;
use crate::model::folder::shown_name;

/// The largest group or block; rows of weights are shorter.
const MAX_GROUP_SIZE: usize = 1 << 20;

/// Refuses a string that is none of `supported`, without regard to case. Absent is the first.
pub(super) fn one_of<'s>(
    fields: Fields<'_>,
    name: &str,
    supported: &[&'s str],
) -> Result<Option<&'s str>> {
    let Some(found) = fields.optional_string(name)? else { return Ok(None) };
    let known = supported.iter().find(|known| known.eq_ignore_ascii_case(found));
    known.copied().map(Some).ok_or_else(|| {
        Error::unsupported(format!(
            "{}: {name} \"{}\" is not supported (supported: {})",
            fields.place(),
            shown_name(found),
            supported.join(", ")
        ))
    })
}

/// Refuses a key that is set to anything but `null`, `false`, or nothing at all.
pub(super) fn refuse_set(fields: Fields<'_>, name: &str) -> Result<()> {
    let is_set = match fields.get(name) {
        None | Some(Value::Bool(false)) => false,
        Some(Value::Object(map)) => !map.is_empty(),
        Some(Value::Array(list)) => !list.is_empty(),
        Some(_) => true,
    };
    if is_set {
        return Err(Error::unsupported(format!("{}: {name} is not supported", fields.place())));
    }
    Ok(())
}

/// Returns a group size, which is -1 for the whole row (`None`).
pub(super) fn group_size(fields: Fields<'_>, name: &str, default: usize) -> Result<Option<usize>> {
    if fields.get(name).and_then(Value::as_i64) == Some(-1) {
        return Ok(None);
    }
    let wrong = || {
        fields.wrong(
            name,
            &format!("-1 for the whole row, or a whole number from 1 to {MAX_GROUP_SIZE}"),
        )
    };
    fields
        .optional_count(name, MAX_GROUP_SIZE)
        .map(|n| Some(n.unwrap_or(default)))
        .map_err(|_| wrong())
}

/// Returns the sizes of a block, `[out, in]`, or `None` if they are absent.
pub(super) fn block_sizes(fields: Fields<'_>, name: &str) -> Result<Option<[usize; 2]>> {
    let size = |value: &Value| {
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok())?;
        (1..=MAX_GROUP_SIZE).contains(&size).then_some(size)
    };
    let sizes = |value: &Value| match value.as_array()?.as_slice() {
        [rows, columns] => Some([size(rows)?, size(columns)?]),
        _ => None,
    };
    // Old versions of compressed-tensors write "128x128".
    let from_text = |text: &str| {
        let (rows, columns) = text.split_once('x')?;
        sizes(&serde_json::json!([rows.parse::<u64>().ok()?, columns.parse::<u64>().ok()?]))
    };
    let Some(value) = fields.get(name) else { return Ok(None) };
    value.as_str().map_or_else(|| sizes(value), from_text).map(Some).ok_or_else(|| {
        let found = shown_name(&value.to_string());
        Error::invalid_file(format!(
            "{}: {name} is {found}, expected two whole numbers from 1 to {MAX_GROUP_SIZE}",
            fields.place()
        ))
    })
}
