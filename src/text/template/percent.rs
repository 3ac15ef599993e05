//! `%` between a string and values, as Python formats them.

use super::budget::{fail, Budget, Text};
use super::kinds::{float, integer, to_list};
use super::values::{to_repr, to_text};
use minijinja::value::{Value, ValueKind};
use minijinja::Error;
use std::fmt::Write as _;

/// The largest width and precision.
const MAX_WIDTH: usize = 1000;

/// A directive between `%` and its letter.
#[derive(Default)]
struct Directive {
    is_left: bool,
    has_zeros: bool,
    has_plus: bool,
    has_blank: bool,
    width: usize,
    precision: Option<usize>,
}

/// Returns `format % values`: a tuple has one for each directive, a map one for each name, and anything else is one.
pub(super) fn percent(budget: &Budget, format: &str, values: &Value) -> Result<Value, Error> {
    budget.bytes(format.len().saturating_mul(4))?;
    let all: Vec<Value> = match values.is_tuple() {
        true => to_list(budget, values)?,
        false => vec![values.clone()],
    };
    let is_map = values.kind() == ValueKind::Map;
    let mut unused = all.into_iter();
    let mut text = Text::default();
    let mut rest = format;
    while let Some((before, directive)) = rest.split_once('%') {
        text.push(before)?;
        rest = directive;
        let mut named = None;
        if let Some(after) = rest.strip_prefix('(') {
            let (name, after) =
                after.split_once(')').ok_or_else(|| fail("%: a name without its end"))?;
            let map = values.as_object().filter(|_| is_map);
            let map = map.ok_or_else(|| fail("%: a name needs a map"))?;
            let value = map.get_value(&Value::from(name));
            named = Some(value.ok_or_else(|| fail("%: the map has no entry of that name"))?);
            rest = after;
        }
        let spec = take_directive(&mut rest)?;
        let letter = rest.chars().next().ok_or_else(|| fail("%: the format is incomplete"))?;
        rest = rest.get(letter.len_utf8()..).unwrap_or_default();
        if letter == '%' {
            text.push("%")?;
            continue;
        }
        let value = match named {
            Some(value) => value,
            None => {
                unused.next().ok_or_else(|| fail("%: there are fewer values than directives"))?
            }
        };
        budget.work(200)?;
        write_value(budget, &mut text, &spec, letter, &value)?;
    }
    text.push(rest)?;
    if !is_map && unused.next().is_some() {
        return Err(fail("%: there are more values than directives"));
    }
    budget.string(text.into_string())
}

fn take_directive(rest: &mut &str) -> Result<Directive, Error> {
    let mut spec = Directive::default();
    let flags = rest.len() - rest.trim_start_matches(['-', '0', '+', ' ', '#']).len();
    let (flags, after) = rest.split_at_checked(flags).unwrap_or(("", rest));
    for flag in flags.chars() {
        match flag {
            '-' => spec.is_left = true,
            '0' => spec.has_zeros = true,
            '+' => spec.has_plus = true,
            ' ' => spec.has_blank = true,
            _ => return Err(fail("%: the flag # is not supported")),
        }
    }
    *rest = after;
    spec.width = take_number(rest)?.unwrap_or(0);
    if let Some(after) = rest.strip_prefix('.') {
        *rest = after;
        spec.precision = Some(take_number(rest)?.unwrap_or(0));
    }
    *rest = rest.trim_start_matches(['h', 'l', 'L']);
    Ok(spec)
}

fn take_number(rest: &mut &str) -> Result<Option<usize>, Error> {
    let num_digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let (digits, after) = rest.split_at_checked(num_digits).unwrap_or(("", rest));
    *rest = after;
    if digits.is_empty() {
        return Ok(None);
    }
    let number = digits.parse().ok().filter(|&number| number <= MAX_WIDTH);
    number.map(Some).ok_or_else(|| fail(format!("%: a width is over {MAX_WIDTH}")))
}

fn write_value(
    budget: &Budget,
    text: &mut Text,
    spec: &Directive,
    letter: char,
    value: &Value,
) -> Result<(), Error> {
    let whole = || {
        let truncated = float(value).filter(|number| number.abs() < 9e18).map(|it| it as i128);
        let number =
            integer(value).or_else(|| truncated.filter(|_| matches!(letter, 'd' | 'i' | 'u')));
        number.ok_or_else(|| fail(format!("%{letter} needs a number, not {}", value.kind())))
    };
    let mut digits = String::new();
    let (is_negative, is_number) = match letter {
        's' | 'r' => {
            digits = if letter == 's' { to_text(budget, value)? } else { to_repr(budget, value)? };
            if let Some(most) = spec.precision {
                digits = digits.chars().take(most).collect();
            }
            (false, false)
        }
        'c' => {
            let number =
                integer(value).and_then(|it| u32::try_from(it).ok()).and_then(char::from_u32);
            let one = value.as_str().filter(|text| text.chars().count() == 1);
            match (number, one) {
                (Some(character), _) => digits.push(character),
                (None, Some(one)) => digits.push_str(one),
                (None, None) => return Err(fail("%c needs a character")),
            }
            (false, false)
        }
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
            let number = whole()?;
            let size = number.unsigned_abs();
            let _ = match letter {
                'x' => write!(digits, "{size:x}"),
                'X' => write!(digits, "{size:X}"),
                'o' => write!(digits, "{size:o}"),
                _ => write!(digits, "{size}"),
            };
            let least = spec.precision.unwrap_or(0);
            digits = format!("{digits:0>least$}");
            (number < 0, true)
        }
        'f' | 'F' => {
            let number = float(value).filter(|number| number.is_finite());
            let number = number
                .ok_or_else(|| fail(format!("%{letter} needs a number, not {}", value.kind())))?;
            let precision = spec.precision.unwrap_or(6);
            let _ = write!(digits, "{:.precision$}", number.abs());
            (number.is_sign_negative(), true)
        }
        _ => return Err(fail(format!("%{letter} is not supported"))),
    };
    let sign = match (is_negative, is_number) {
        (true, _) => "-",
        (false, true) if spec.has_plus => "+",
        (false, true) if spec.has_blank => " ",
        _ => "",
    };
    let missing = spec.width.saturating_sub(digits.chars().count() + sign.len());
    let (blanks, zeros) =
        if spec.has_zeros && is_number && !spec.is_left { (0, missing) } else { (missing, 0) };
    budget.bytes(digits.len().saturating_add(missing))?;
    text.push_repeated(" ", if spec.is_left { 0 } else { blanks })?;
    text.push(sign)?;
    text.push_repeated("0", zeros)?;
    text.push(&digits)?;
    text.push_repeated(" ", if spec.is_left { blanks } else { 0 })
}
