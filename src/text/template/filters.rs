//! Filters and tests.
//!
//! A filter is written here if its result can be much larger than the input; the others are
//! minijinja's own, called after a price has been paid: the walk through their arguments, or the
//! number of elements. Filters that chat templates never use are left out (`pprint`, `urlencode`,
//! `zip`, ...).

use super::budget::{fail, Budget, Text};
use super::cycle::Cycler;
use super::json::{write_json, JsonStyle};
use super::kinds::{is_list, to_list};
use super::methods::{replace, strip, Side};
use super::namespace::Namespace;
use super::operators::{add_filter, arg, split_args, Native};
use super::percent::percent;
use super::values::{to_text, write_text};
use minijinja::value::{Rest, Tuple, Value, ValueKind, ValueOrKwargs};
use minijinja::{filters as native, tests as native_tests, Environment, Error, State};
use std::sync::Arc;

/// The price that a filter or test of minijinja pays before it runs.
#[derive(Clone, Copy)]
enum Price {
    /// No more than any call.
    Flat,
    /// A price for each element of the operand, each with the text of the other arguments.
    PerElement,
    /// A walk through all arguments, times the logarithm of the number of elements.
    Walk,
}

pub(super) fn register(env: &mut Environment<'static>, budget: &Arc<Budget>) {
    let own: [(&'static str, Native); 24] = [
        ("default", |_, _, args| default(args)),
        ("d", |_, _, args| default(args)),
        ("int", |budget, _, args| number(budget, args, true)),
        ("float", |budget, _, args| number(budget, args, false)),
        ("tojson", |budget, _, args| tojson(budget, args)),
        ("string", |budget, _, args| {
            let text = to_text(budget, arg(args, 0)?)?;
            budget.string(text)
        }),
        ("safe", |budget, _, args| {
            let text = to_text(budget, arg(args, 0)?)?;
            budget.string(text)
        }),
        ("escape", |budget, _, args| escape(budget, arg(args, 0)?)),
        ("e", |budget, _, args| escape(budget, arg(args, 0)?)),
        ("length", |budget, _, args| length(budget, arg(args, 0)?)),
        ("count", |budget, _, args| length(budget, arg(args, 0)?)),
        ("list", |budget, _, args| Ok(Value::from(to_list(budget, arg(args, 0)?)?))),
        ("join", |budget, _, args| join(budget, args)),
        ("replace", |budget, _, args| {
            let (positional, _) = split_args(args)?;
            let text = to_text(budget, arg(positional, 0)?)?;
            let old = to_text(budget, arg(positional, 1)?)?;
            let new = to_text(budget, arg(positional, 2)?)?;
            let count = positional.get(3).and_then(Value::as_usize);
            replace(budget, &text, &old, &new, count)
        }),
        ("trim", |budget, _, args| {
            let text = to_text(budget, arg(args, 0)?)?;
            strip(budget, &text, args.get(1), Side::Both)
        }),
        ("indent", |budget, _, args| indent(budget, args)),
        ("format", |budget, _, args| format(budget, args)),
        ("truncate", |budget, _, args| truncate(budget, args)),
        ("wordcount", |budget, _, args| {
            let text = to_text(budget, arg(args, 0)?)?;
            budget.bytes(text.len())?;
            let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
            Ok(Value::from(words.filter(|word| !word.is_empty()).count()))
        }),
        ("sum", |budget, state, args| sum(budget, state, args)),
        ("batch", |budget, state, args| {
            chunks(budget, state, args, Value::from_function(native::batch))
        }),
        ("slice", |budget, state, args| {
            chunks(budget, state, args, Value::from_function(native::slice))
        }),
        ("reverse", |budget, _, args| {
            let value = arg(args, 0)?;
            if let Some(text) = value.as_str() {
                budget.bytes(text.len().saturating_mul(8))?;
                return budget.string(text.chars().rev().collect());
            }
            let mut list = to_list(budget, value)?;
            list.reverse();
            Ok(Value::from(list))
        }),
        ("items", |budget, _, args| {
            let value = arg(args, 0)?;
            if value.is_undefined() {
                return Ok(Value::from(Vec::<Value>::new()));
            }
            super::methods::items(budget, value)
        }),
    ];
    for (name, filter) in own {
        add_filter(env, budget, name, filter);
    }
    use Price::{Flat, PerElement, Walk};
    let priced = [
        ("attr", Walk, Value::from_function(native::attr)),
        ("abs", Flat, Value::from_function(native::abs)),
        ("round", Flat, Value::from_function(native::round)),
        ("first", PerElement, Value::from_function(native::first)),
        ("last", PerElement, Value::from_function(native::last)),
        ("select", PerElement, Value::from_function(native::select)),
        ("reject", PerElement, Value::from_function(native::reject)),
        ("selectattr", PerElement, Value::from_function(native::selectattr)),
        ("rejectattr", PerElement, Value::from_function(native::rejectattr)),
        ("map", PerElement, Value::from_function(native::map)),
        ("lower", Walk, Value::from_function(native::lower)),
        ("upper", Walk, Value::from_function(native::upper)),
        ("title", Walk, Value::from_function(native::title)),
        ("capitalize", Walk, Value::from_function(native::capitalize)),
        ("sort", Walk, Value::from_function(native::sort)),
        ("unique", Walk, Value::from_function(native::unique)),
        ("min", Walk, Value::from_function(native::min)),
        ("max", Walk, Value::from_function(native::max)),
        ("groupby", Walk, Value::from_function(native::groupby)),
        ("dictsort", Walk, Value::from_function(native::dictsort)),
    ];
    for (name, price, function) in priced {
        let budget = Arc::clone(budget);
        env.add_filter(name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            pay(&budget, price, &args)?;
            budget.result(function.call(state, &args)?)
        });
    }
    register_tests(env, budget);
}

fn register_tests(env: &mut Environment<'static>, budget: &Arc<Budget>) {
    use Price::{Flat, Walk};
    let equal = || Value::from_function(native_tests::is_eq);
    let unequal = || Value::from_function(native_tests::is_ne);
    let less = || Value::from_function(native_tests::is_lt);
    let less_equal = || Value::from_function(native_tests::is_le);
    let greater = || Value::from_function(native_tests::is_gt);
    let greater_equal = || Value::from_function(native_tests::is_ge);
    let is_integer = || Value::from_function(native_tests::is_integer);
    let all = [
        ("undefined", Flat, Value::from_function(native_tests::is_undefined)),
        ("defined", Flat, Value::from_function(native_tests::is_defined)),
        ("none", Flat, Value::from_function(native_tests::is_none)),
        ("boolean", Flat, Value::from_function(native_tests::is_boolean)),
        ("odd", Flat, Value::from_function(native_tests::is_odd)),
        ("even", Flat, Value::from_function(native_tests::is_even)),
        ("divisibleby", Flat, Value::from_function(native_tests::is_divisibleby)),
        ("number", Flat, Value::from_function(native_tests::is_number)),
        ("integer", Flat, is_integer()),
        ("int", Flat, is_integer()),
        ("float", Flat, Value::from_function(native_tests::is_float)),
        ("string", Flat, Value::from_function(native_tests::is_string)),
        ("sequence", Flat, Value::from_function(is_sequence)),
        ("iterable", Flat, Value::from_function(is_iterable)),
        ("mapping", Flat, Value::from_function(native_tests::is_mapping)),
        ("callable", Flat, Value::from_function(is_callable)),
        ("sameas", Flat, Value::from_function(native_tests::is_sameas)),
        ("true", Flat, Value::from_function(native_tests::is_true)),
        ("false", Flat, Value::from_function(native_tests::is_false)),
        ("filter", Walk, Value::from_function(native_tests::is_filter)),
        ("test", Walk, Value::from_function(native_tests::is_test)),
        ("startingwith", Walk, Value::from_function(native_tests::is_startingwith)),
        ("endingwith", Walk, Value::from_function(native_tests::is_endingwith)),
        ("lower", Walk, Value::from_function(native_tests::is_lower)),
        ("upper", Walk, Value::from_function(native_tests::is_upper)),
        ("in", Walk, Value::from_function(native_tests::is_in)),
        ("eq", Walk, equal()),
        ("equalto", Walk, equal()),
        ("==", Walk, equal()),
        ("ne", Walk, unequal()),
        ("!=", Walk, unequal()),
        ("lt", Walk, less()),
        ("lessthan", Walk, less()),
        ("<", Walk, less()),
        ("le", Walk, less_equal()),
        ("<=", Walk, less_equal()),
        ("gt", Walk, greater()),
        ("greaterthan", Walk, greater()),
        (">", Walk, greater()),
        ("ge", Walk, greater_equal()),
        (">=", Walk, greater_equal()),
    ];
    for (name, price, function) in all {
        let budget = Arc::clone(budget);
        env.add_test(name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            pay(&budget, price, &args)?;
            Ok::<bool, Error>(function.call(state, &args)?.is_true())
        });
    }
}

fn pay(budget: &Budget, price: Price, args: &[Value]) -> Result<(), Error> {
    budget.work(60)?;
    let elements = |value: &Value| match value.as_str() {
        Some(text) => text.len(),
        None => value.len().unwrap_or(0),
    };
    let count = args.first().map_or(0, elements);
    match price {
        Price::Flat => Ok(()),
        Price::PerElement => {
            let rest = args.iter().skip(1).map(|value| value.as_str().map_or(0, str::len));
            let each = 100 + rest.sum::<usize>().saturating_mul(4);
            budget.work((count as u64).saturating_mul(each as u64))?;
            if args.first().is_some_and(|value| value.as_str().is_none()) {
                budget.list(count)?;
            }
            Ok(())
        }
        Price::Walk => {
            let before = budget.work_done();
            for value in args {
                budget.walk(value)?;
            }
            let walked = budget.work_done() - before;
            budget.work(walked.saturating_mul(u64::from((count + 2).ilog2())))
        }
    }
}

/// Whether a value is a sequence: anything with a length and indices, in Python strings and maps
/// too.
fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::String | ValueKind::Map
    )
}

/// Whether a value can be called: functions, macros and joiners.
fn is_callable(value: &Value) -> bool {
    value.kind() == ValueKind::Plain
        && value.downcast_object_ref::<Namespace>().is_none()
        && value.downcast_object_ref::<Cycler>().is_none()
}

/// Whether a value is iterable, as in Jinja2, where undefined is iterable as well.
fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || value.is_undefined()
}

fn length(budget: &Budget, value: &Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        budget.bytes(text.len())?;
    }
    if value.is_undefined() {
        return Ok(Value::from(0));
    }
    value
        .len()
        .map(Value::from)
        .ok_or_else(|| fail(format!("a value of type {} has no length", value.kind())))
}

/// Implements `default(value, default_value='', boolean=False)`.
fn default(args: &[Value]) -> Result<Value, Error> {
    let (positional, kwargs) = split_args(args)?;
    let value = arg(positional, 0)?;
    let fallback = match positional.get(1) {
        Some(fallback) => fallback.clone(),
        None => kwargs.get::<Option<Value>>("default_value")?.unwrap_or_else(|| Value::from("")),
    };
    let even_if_false = match positional.get(2) {
        Some(flag) => flag.is_true(),
        None => kwargs.get::<Option<Value>>("boolean")?.is_some_and(|flag| flag.is_true()),
    };
    let use_fallback = value.is_undefined() || (even_if_false && !value.is_true());
    Ok(if use_fallback { fallback } else { value.clone() })
}

/// Implements `int(value, default=0, base=10)` and `float(value, default=0.0)`: a value that is not
/// a number becomes the default.
fn number(budget: &Budget, args: &[Value], is_int: bool) -> Result<Value, Error> {
    let (positional, kwargs) = split_args(args)?;
    let option = |name: &str, index: usize| match positional.get(index) {
        Some(value) => Ok(Some(value.clone())),
        None => kwargs.get::<Option<Value>>(name),
    };
    let fallback = option("default", 1)?.unwrap_or_else(|| {
        if is_int {
            Value::from(0)
        } else {
            Value::from(0.0)
        }
    });
    let base = option("base", 2)?.and_then(|base| base.as_usize()).unwrap_or(10);
    let value = arg(positional, 0)?;
    let float = match value.as_str() {
        Some(text) => {
            budget.bytes(text.len())?;
            let text = text.trim().replace('_', "");
            if is_int && (2..=36).contains(&base) {
                let digits = match base {
                    16 => text.trim_start_matches("0x"),
                    8 => text.trim_start_matches("0o"),
                    2 => text.trim_start_matches("0b"),
                    _ => &text,
                };
                if let Ok(integer) = i64::from_str_radix(digits, base as u32) {
                    return Ok(Value::from(integer));
                }
            }
            text.parse::<f64>().ok()
        }
        None => match value.kind() {
            ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
            ValueKind::Number if is_int && value.is_integer() => return Ok(value.clone()),
            ValueKind::Number => f64::try_from(value.clone()).ok(),
            _ => None,
        },
    };
    Ok(match float {
        Some(float) if !is_int => Value::from(float),
        Some(float) if float.is_finite() && float.abs() < 9e18 => Value::from(float as i64),
        _ => fallback,
    })
}

fn tojson(budget: &Budget, args: &[Value]) -> Result<Value, Error> {
    let (positional, kwargs) = split_args(args)?;
    let option = |name: &str, index: usize| match positional.get(index) {
        Some(value) => Ok(Some(value.clone())),
        None => kwargs.get::<Option<Value>>(name),
    };
    // As in Transformers: tojson(x, ensure_ascii=False, indent=None, separators=None,
    // sort_keys=False).
    let ensure_ascii = option("ensure_ascii", 1)?.is_some_and(|value| value.is_true());
    let indent = match option("indent", 2)? {
        None => None,
        Some(value) if value.is_none() => None,
        Some(value) => Some(match value.as_str() {
            Some(text) => text.to_owned(),
            None => spaces(value.as_i64().unwrap_or(0))?,
        }),
    };
    let separators = match option("separators", 3)? {
        Some(pair) if is_list(&pair) => {
            let pair = to_list(budget, &pair)?;
            Some((to_text(budget, arg(&pair, 0)?)?, to_text(budget, arg(&pair, 1)?)?))
        }
        _ => None,
    };
    let (item_separator, key_separator) = separators.unwrap_or_else(|| {
        let item = if indent.is_some() { "," } else { ", " };
        (item.to_owned(), ": ".to_owned())
    });
    let sort_keys = option("sort_keys", 4)?.is_some_and(|value| value.is_true());
    let style = JsonStyle { indent, item_separator, key_separator, ensure_ascii, sort_keys };
    let mut text = Text::default();
    write_json(budget, &mut text, arg(positional, 0)?, &style, 0)?;
    budget.string(text.into_string())
}

/// Returns one level of indentation. Very wide ones are a mistake or an attack.
fn spaces(width: i64) -> Result<String, Error> {
    const MAX_WIDTH: i64 = 1000;
    if width > MAX_WIDTH {
        return Err(fail(format!("an indentation of {width} is over {MAX_WIDTH}")));
    }
    Ok(" ".repeat(usize::try_from(width).unwrap_or(0)))
}

fn escape(budget: &Budget, value: &Value) -> Result<Value, Error> {
    let plain = to_text(budget, value)?;
    budget.bytes(plain.len().saturating_mul(20))?;
    let mut text = Text::default();
    for character in plain.chars() {
        match character {
            '&' => text.push("&amp;")?,
            '<' => text.push("&lt;")?,
            '>' => text.push("&gt;")?,
            '"' => text.push("&#34;")?,
            '\'' => text.push("&#39;")?,
            other => text.push_char(other)?,
        }
    }
    budget.string(text.into_string())
}

/// Implements `format(value, *args, **kwargs)`, which is `value % args`.
fn format(budget: &Budget, args: &[Value]) -> Result<Value, Error> {
    let (positional, kwargs) = split_args(args)?;
    let format = to_text(budget, arg(positional, 0)?)?;
    let values = positional.get(1..).unwrap_or_default();
    let names: Vec<String> = kwargs.args().map(str::to_owned).collect();
    if names.is_empty() {
        return percent(budget, &format, &Value::from(Tuple::new(values.to_vec())));
    }
    if !values.is_empty() {
        return Err(fail("format: values with and without names"));
    }
    let mut named = Vec::with_capacity(names.len());
    for name in names {
        let value = kwargs.get::<Value>(&name)?;
        named.push((name, value));
    }
    percent(budget, &format, &Value::from_pairs(named))
}

/// Implements `truncate(s, length=255, killwords=False, end='...', leeway=5)`.
fn truncate(budget: &Budget, args: &[Value]) -> Result<Value, Error> {
    let (positional, kwargs) = split_args(args)?;
    let option = |name: &str, index: usize| match positional.get(index) {
        Some(value) => Ok(Some(value.clone())),
        None => kwargs.get::<Option<Value>>(name),
    };
    let number = |name: &str, index: usize, default: usize| match option(name, index)? {
        Some(value) if !value.is_none() => value
            .as_usize()
            .ok_or_else(|| fail(format!("truncate: {name} must be a whole number, 0 or more"))),
        _ => Ok::<_, Error>(default),
    };
    let text = to_text(budget, arg(positional, 0)?)?;
    let (length, leeway) = (number("length", 1, 255)?, number("leeway", 4, 5)?);
    let kills_words = option("killwords", 2)?.is_some_and(|value| value.is_true());
    let end = match option("end", 3)? {
        Some(end) => to_text(budget, &end)?,
        None => "...".to_owned(),
    };
    budget.bytes(text.len())?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return budget.string(text);
    }
    let kept = length
        .checked_sub(end.chars().count())
        .ok_or_else(|| fail("truncate: the end is longer than the length"))?;
    let at = text.char_indices().nth(kept).map_or(text.len(), |(at, _)| at);
    let mut kept = text.get(..at).unwrap_or_default();
    if !kills_words {
        kept = kept.rsplit_once(' ').map_or(kept, |(before, _)| before);
    }
    let mut result = Text::default();
    result.push(kept)?;
    result.push(&end)?;
    budget.string(result.into_string())
}

fn join(budget: &Budget, args: &[Value]) -> Result<Value, Error> {
    let (positional, kwargs) = split_args(args)?;
    let separator = match positional.get(1) {
        Some(separator) => to_text(budget, separator)?,
        None => match kwargs.get::<Option<Value>>("d")? {
            Some(separator) => to_text(budget, &separator)?,
            None => String::new(),
        },
    };
    let attribute = match positional.get(2) {
        Some(attribute) => Some(attribute.clone()),
        None => kwargs.get::<Option<Value>>("attribute")?,
    };
    let mut text = Text::default();
    for (index, item) in to_list(budget, arg(positional, 0)?)?.iter().enumerate() {
        if index > 0 {
            budget.bytes(separator.len())?;
            text.push(&separator)?;
        }
        match attribute.as_ref().and_then(|attribute| attribute.as_str()) {
            Some(path) => write_text(budget, &mut text, &attribute_of(budget, item, path)?)?,
            None => write_text(budget, &mut text, item)?,
        }
    }
    budget.string(text.into_string())
}

/// Returns the attribute `a.b.c` of a value.
fn attribute_of(budget: &Budget, value: &Value, path: &str) -> Result<Value, Error> {
    let mut current = value.clone();
    for name in path.split('.') {
        budget.bytes(40 + name.len())?;
        current = current.get_attr(name)?;
    }
    Ok(current)
}

fn indent(budget: &Budget, args: &[Value]) -> Result<Value, Error> {
    let (positional, kwargs) = split_args(args)?;
    let option = |name: &str, index: usize| match positional.get(index) {
        Some(value) => Ok(Some(value.clone())),
        None => kwargs.get::<Option<Value>>(name),
    };
    let width = option("width", 1)?.unwrap_or_else(|| Value::from(4));
    let indentation = match width.as_str() {
        Some(text) => text.to_owned(),
        None => spaces(width.as_i64().ok_or_else(|| fail("indent: the width is no integer"))?)?,
    };
    let first = option("first", 2)?.is_some_and(|value| value.is_true());
    let blank = option("blank", 3)?.is_some_and(|value| value.is_true());
    let plain = to_text(budget, arg(positional, 0)?)?;
    budget.bytes(plain.len())?;
    let mut text = Text::default();
    for (index, line) in plain.split('\n').enumerate() {
        let line = line.strip_suffix('\r').unwrap_or(line);
        if index > 0 {
            text.push("\n")?;
        }
        if (index == 0 && first) || (index > 0 && (blank || !line.is_empty())) {
            budget.bytes(indentation.len())?;
            text.push(&indentation)?;
        }
        text.push(line)?;
    }
    budget.string(text.into_string())
}

/// Returns the sum of numbers. Strings and lists are not added up, as in Python.
fn sum(budget: &Budget, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
    let (positional, kwargs) = split_args(args)?;
    let attribute = match positional.get(1) {
        Some(attribute) => Some(attribute.clone()),
        None => kwargs.get::<Option<Value>>("attribute")?,
    };
    let start = match positional.get(2) {
        Some(start) => start.clone(),
        None => kwargs.get::<Option<Value>>("start")?.unwrap_or_else(|| Value::from(0)),
    };
    let mut total = start;
    for item in to_list(budget, arg(positional, 0)?)? {
        let item = match attribute.as_ref().and_then(|attribute| attribute.as_str()) {
            Some(path) => attribute_of(budget, &item, path)?,
            None => item,
        };
        if item.kind() != ValueKind::Number {
            return Err(fail(format!("sum: an element is of type {}", item.kind())));
        }
        total = state.apply_filter("§add", &[total, item])?;
    }
    Ok(total)
}

/// Runs minijinja's `batch` and `slice`, with a bound on the number of parts.
fn chunks(
    budget: &Budget,
    state: &mut State<'_, '_>,
    args: &[Value],
    function: Value,
) -> Result<Value, Error> {
    const MAX_COUNT: usize = 10_000;
    let count = arg(args, 1)?.as_usize().unwrap_or(0);
    if count == 0 || count > MAX_COUNT {
        return Err(fail(format!("batch and slice take a number from 1 to {MAX_COUNT}")));
    }
    let list = to_list(budget, arg(args, 0)?)?;
    // Each element may become a list of its own; the last one is filled up.
    budget.list(list.len().saturating_mul(4).saturating_add(count.saturating_mul(4)))?;
    let mut all = vec![Value::from(list)];
    all.extend(args.iter().skip(1).cloned());
    function.call(state, &all)
}
