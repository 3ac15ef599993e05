//! What values are to Python: numbers and lists.

use super::budget::{fail, no_memory, Budget};
use minijinja::value::{Value, ValueKind};
use minijinja::Error;

/// Whether a value is a list in the sense of `for`: neither a string nor a map.
pub(super) fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

/// Copies a list's elements, a map's keys or a string's characters into a list that the budget pays
/// for.
pub(super) fn to_list(budget: &Budget, value: &Value) -> Result<Vec<Value>, Error> {
    let len = match value.as_str() {
        Some(text) => {
            budget.bytes(text.len())?;
            text.chars().count()
        }
        None => value.len().unwrap_or(0),
    };
    if value.is_none() {
        return Err(fail("none is not iterable"));
    }
    budget.list(len)?;
    let mut list = Vec::new();
    list.try_reserve_exact(len).map_err(|_| no_memory())?;
    for item in value.try_iter()? {
        if list.len() >= len {
            budget.list(1)?;
        }
        list.push(item);
    }
    Ok(list)
}

pub(super) fn is_number(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
}

/// Returns an integer, or a truth value as one.
pub(super) fn integer(value: &Value) -> Option<i128> {
    match value.kind() {
        ValueKind::Bool => Some(i128::from(value.is_true())),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok(),
        _ => None,
    }
}

/// Returns a number, or a truth value as one.
pub(super) fn float(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        _ => None,
    }
}
