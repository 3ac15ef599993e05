//! The functions that `rewrite.rs` puts in place of operators, and of output.
//!
//! Operators have Python's meaning, as Jinja templates expect: `+` on strings and lists, `*`
//! repeats, slices with any step, `str()` around the operands of `~`.

use super::budget::{fail, Budget, Text};
use super::kinds::{float, integer, is_list, is_number, to_list};
use super::namespace::Namespace;
use super::percent::percent;
use super::values::{to_text, write_text};
use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State};
use std::cmp::Ordering;
use std::sync::Arc;

/// A function that a template reaches as a filter, a test or a global: the budget, minijinja's
/// state and the arguments, the operand of a filter first.
pub(super) type Native = fn(&Arc<Budget>, &mut State<'_, '_>, &[Value]) -> Result<Value, Error>;

/// Adds a [`Native`] as a filter. Each call has a price of its own.
pub(super) fn add_filter(
    env: &mut Environment<'static>,
    budget: &Arc<Budget>,
    name: &'static str,
    native: Native,
) {
    let budget = Arc::clone(budget);
    env.add_filter(name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        budget.work(60)?;
        native(&budget, state, &args)
    });
}

pub(super) fn register(env: &mut Environment<'static>, budget: &Arc<Budget>) {
    let filters: [(&'static str, Native); 19] = [
        ("§add", |budget, _, args| add(budget, arg(args, 0)?, arg(args, 1)?)),
        ("§concat", |budget, _, args| concat(budget, arg(args, 0)?, arg(args, 1)?)),
        ("§mul", |budget, _, args| multiply(budget, arg(args, 0)?, arg(args, 1)?)),
        ("§rem", |budget, _, args| match arg(args, 0)?.as_str() {
            Some(format) => percent(budget, format, arg(args, 1)?),
            None => remainder(arg(args, 0)?, arg(args, 1)?),
        }),
        ("§lt", |_, _, args| compare("<", args, Ordering::is_lt)),
        ("§le", |_, _, args| compare("<=", args, Ordering::is_le)),
        ("§gt", |_, _, args| compare(">", args, Ordering::is_gt)),
        ("§ge", |_, _, args| compare(">=", args, Ordering::is_ge)),
        ("§in", |_, _, args| contains(arg(args, 1)?, arg(args, 0)?).map(Value::from)),
        ("§item", |budget, _, args| item(budget, arg(args, 0)?, arg(args, 1)?)),
        ("§slice", |budget, _, args| slice(budget, args)),
        ("§walk", |budget, _, args| {
            budget.walk(arg(args, 0)?)?;
            arg(args, 0).cloned()
        }),
        ("§map", |budget, _, args| {
            let map = arg(args, 0)?;
            budget.structure(120 + 120 * map.len().unwrap_or(0))?;
            Ok(map.clone())
        }),
        ("§list", |budget, _, args| {
            let list = arg(args, 0)?;
            budget.list(list.len().unwrap_or(0))?;
            Ok(list.clone())
        }),
        ("§iter", |budget, _, args| iterated(budget, arg(args, 0)?)),
        ("§splat", |budget, _, args| {
            // All elements become arguments at once, or entries of a map.
            let value = arg(args, 0)?;
            budget.structure(120 * value.len().unwrap_or(0))?;
            Ok(value.clone())
        }),
        ("§paid", |budget, _, args| {
            budget.work(100)?;
            arg(args, 0).cloned()
        }),
        ("§tick", |budget, _, args| {
            let num_nodes = arg(args, 0)?.as_usize().unwrap_or(1) as u64;
            budget.work(num_nodes.saturating_mul(20))?;
            Ok(Value::UNDEFINED)
        }),
        ("§set", |budget, _, args| {
            let Some(namespace) = arg(args, 0)?.downcast_object_ref::<Namespace>() else {
                return Err(fail("an attribute can only be set on a namespace"));
            };
            let name = arg(args, 1)?.as_str().unwrap_or_default();
            namespace.set(budget, name, arg(args, 2)?.clone())?;
            Ok(Value::UNDEFINED)
        }),
    ];
    for (name, native) in filters {
        add_filter(env, budget, name, native);
    }
    let budget = Arc::clone(budget);
    env.set_formatter(move |out, _, value| {
        let write = |out: &mut minijinja::Output<'_>, text: &str| {
            budget.write(text.len())?;
            out.write_str(text).map_err(|_| fail("the text cannot be written"))
        };
        match value.as_str() {
            Some(text) => write(out, text),
            None if value.is_undefined() => Ok(()),
            None => write(out, &to_text(&budget, value)?),
        }
    });
}

/// Returns the argument at a position; minijinja's own message if it is missing.
pub(super) fn arg(args: &[Value], index: usize) -> Result<&Value, Error> {
    args.get(index).ok_or_else(|| Error::from(ErrorKind::MissingArgument))
}

/// Splits the arguments after the operand into positional and keyword arguments.
pub(super) fn split_args(args: &[Value]) -> Result<(&[Value], Kwargs), Error> {
    match args.split_last() {
        Some((last, rest)) if last.is_kwargs() => Ok((rest, Kwargs::try_from(last.clone())?)),
        _ => Ok((args, Kwargs::from_iter(std::iter::empty::<(&str, Value)>()))),
    }
}

fn iterated(budget: &Budget, value: &Value) -> Result<Value, Error> {
    if value.is_none() {
        return Err(fail("none is not iterable"));
    }
    match value.as_str() {
        Some(text) => budget.bytes(text.len())?,
        None => budget.work(20 * value.len().unwrap_or(0) as u64)?,
    }
    Ok(value.clone())
}

fn unsupported(op: &str, left: &Value, right: &Value) -> Error {
    if left.is_undefined() || right.is_undefined() {
        return Error::new(ErrorKind::UndefinedError, format!("an operand of {op} is undefined"));
    }
    fail(format!("{op} is not defined for {} and {}", left.kind(), right.kind()))
}

fn from_integer(integer: Option<i128>) -> Result<Value, Error> {
    match integer {
        Some(integer) => {
            Ok(i64::try_from(integer).map_or_else(|_| Value::from(integer), Value::from))
        }
        None => Err(fail("an integer is too large")),
    }
}

/// Compares two values that Python has an order for.
fn compare(op: &str, args: &[Value], is_so: fn(Ordering) -> bool) -> Result<Value, Error> {
    let (left, right) = (arg(args, 0)?, arg(args, 1)?);
    let are_texts = left.as_str().is_some() && right.as_str().is_some();
    let are_alike =
        are_texts || is_number(left) && is_number(right) || is_list(left) && is_list(right);
    if !are_alike {
        return Err(unsupported(op, left, right));
    }
    Ok(Value::from(left.partial_cmp(right).is_some_and(is_so)))
}

/// Whether a container has a value. (The walk through both has been paid for.)
fn contains(container: &Value, value: &Value) -> Result<bool, Error> {
    if let Some(text) = container.as_str() {
        let part = value.as_str().ok_or_else(|| unsupported("in", value, container))?;
        return Ok(text.contains(part));
    }
    match container.kind() {
        ValueKind::Undefined => Ok(false),
        ValueKind::Map => Ok(container.as_object().is_some_and(|it| it.get_value(value).is_some())),
        _ if is_list(container) => Ok(container.try_iter()?.any(|item| item == *value)),
        _ => Err(unsupported("in", value, container)),
    }
}

fn add(budget: &Budget, left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        let mut text = Text::default();
        text.push(a)?;
        text.push(b)?;
        return budget.string(text.into_string());
    }
    if is_list(left) && is_list(right) {
        let mut list = to_list(budget, left)?;
        list.extend(to_list(budget, right)?);
        return Ok(if left.is_tuple() && right.is_tuple() {
            Value::from(minijinja::value::Tuple::new(list))
        } else {
            Value::from(list)
        });
    }
    if is_number(left) && is_number(right) {
        if let (Some(a), Some(b)) = (integer(left), integer(right)) {
            return from_integer(a.checked_add(b));
        }
        if let (Some(a), Some(b)) = (float(left), float(right)) {
            return Ok(Value::from(a + b));
        }
    }
    Err(unsupported("+", left, right))
}

fn concat(budget: &Budget, left: &Value, right: &Value) -> Result<Value, Error> {
    let mut text = Text::default();
    write_text(budget, &mut text, left)?;
    write_text(budget, &mut text, right)?;
    budget.string(text.into_string())
}

fn multiply(budget: &Budget, left: &Value, right: &Value) -> Result<Value, Error> {
    for (value, count) in [(left, right), (right, left)] {
        let Some(count) = integer(count) else { continue };
        let count = usize::try_from(count.max(0)).unwrap_or(usize::MAX);
        if let Some(piece) = value.as_str() {
            let mut text = Text::default();
            text.push_repeated(piece, count)?;
            return budget.string(text.into_string());
        }
        if is_list(value) {
            let once = to_list(budget, value)?;
            budget.list(once.len().saturating_mul(count))?;
            let mut list = Vec::new();
            for _ in 0..if once.is_empty() { 0 } else { count } {
                list.extend(once.iter().cloned());
            }
            return Ok(Value::from(list));
        }
    }
    if let (Some(a), Some(b)) = (integer(left), integer(right)) {
        return from_integer(a.checked_mul(b));
    }
    match (float(left), float(right)) {
        (Some(a), Some(b)) => Ok(Value::from(a * b)),
        _ => Err(unsupported("*", left, right)),
    }
}

/// Returns the remainder with the sign of the divisor, as in Python.
fn remainder(left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (integer(left), integer(right)) {
        if b == 0 {
            return Err(fail("division by zero"));
        }
        let rest = a.checked_rem(b).unwrap_or(0);
        return from_integer(Some(if rest != 0 && (rest < 0) != (b < 0) {
            rest + b
        } else {
            rest
        }));
    }
    match (float(left), float(right)) {
        (Some(_), Some(0.0)) => Err(fail("division by zero")),
        (Some(a), Some(b)) => Ok(Value::from(a - b * (a / b).floor())),
        _ => Err(unsupported("%", left, right)),
    }
}

/// Returns `value[key]`: an error if the value is undefined, undefined if there is no such element.
fn item(budget: &Budget, value: &Value, key: &Value) -> Result<Value, Error> {
    budget.walk(key)?;
    if let Some(text) = value.as_str() {
        let Some(index) = integer(key) else { return Ok(Value::UNDEFINED) };
        budget.bytes(text.len())?;
        let character = match usize::try_from(index) {
            Ok(index) => text.chars().nth(index),
            Err(_) => usize::try_from(-1 - index).ok().and_then(|i| text.chars().rev().nth(i)),
        };
        return Ok(character.map_or(Value::UNDEFINED, Value::from));
    }
    if value.kind() == ValueKind::Iterable {
        budget.work(20 * value.len().unwrap_or(0) as u64)?;
        let Some(index) = integer(key) else { return Ok(Value::UNDEFINED) };
        let index = if index < 0 { index + value.len().unwrap_or(0) as i128 } else { index };
        let index = usize::try_from(index).ok();
        return Ok(match index {
            Some(index) => value.try_iter()?.nth(index).unwrap_or(Value::UNDEFINED),
            None => Value::UNDEFINED,
        });
    }
    value.get_item(key)
}

/// Returns `value[start:stop:step]` of strings and lists, like Python's `slice.indices`.
fn slice(budget: &Budget, args: &[Value]) -> Result<Value, Error> {
    let value = arg(args, 0)?;
    let bound = |index: usize| -> Result<Option<i128>, Error> {
        let value = arg(args, index)?;
        if value.is_none() {
            return Ok(None);
        }
        integer(value).map(Some).ok_or_else(|| fail("a slice's bounds must be integers"))
    };
    let (start, stop, step) = (bound(1)?, bound(2)?, bound(3)?.unwrap_or(1));
    if step == 0 {
        return Err(fail("a slice's step is 0"));
    }
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "the sliced value is undefined"));
    }
    let indices = |len: usize| {
        let len = len as i128;
        let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
        let place = |bound: Option<i128>, missing: i128| match bound {
            None => missing,
            Some(bound) if bound < 0 => (bound.saturating_add(len)).max(low),
            Some(bound) => bound.min(high),
        };
        let (first, end) = if step > 0 {
            (place(start, low), place(stop, high))
        } else {
            (place(start, high), place(stop, low))
        };
        let mut index = first;
        std::iter::from_fn(move || {
            let inside = if step > 0 { index < end } else { index > end };
            let current = index;
            index = index.saturating_add(step);
            inside.then(|| usize::try_from(current).unwrap_or(usize::MAX))
        })
    };
    if let Some(text) = value.as_str() {
        budget.bytes(text.len().saturating_mul(10))?;
        let mut result = Text::default();
        if step == 1 {
            let mut wanted = indices(text.chars().count());
            if let Some(first) = wanted.next() {
                let count = wanted.count();
                for character in text.chars().skip(first).take(count + 1) {
                    result.push_char(character)?;
                }
            }
        } else {
            let characters: Vec<char> = text.chars().collect();
            for index in indices(characters.len()) {
                if let Some(character) = characters.get(index) {
                    result.push_char(*character)?;
                }
            }
        }
        return budget.string(result.into_string());
    }
    if !is_list(value) {
        return Err(fail(format!("a value of type {} cannot be sliced", value.kind())));
    }
    let list = to_list(budget, value)?;
    let chosen: Vec<Value> =
        indices(list.len()).filter_map(|index| list.get(index).cloned()).collect();
    Ok(if value.is_tuple() {
        Value::from(minijinja::value::Tuple::new(chosen))
    } else {
        Value::from(chosen)
    })
}
