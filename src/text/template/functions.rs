//! Global functions: those of Jinja that chat templates use, and Transformers' two.

use super::budget::{fail, Budget};
use super::cycle::{Cycler, Joiner};
use super::namespace::Namespace;
use super::operators::{arg, split_args};
use super::values::to_text;
use minijinja::value::{Rest, Value, ValueOrKwargs};
use minijinja::{Environment, Error, State};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// Adds the functions.
pub(super) fn register(env: &mut Environment<'static>, budget: &Arc<Budget>) {
    type Global = fn(&Arc<Budget>, &[Value]) -> Result<Value, Error>;
    let functions: [(&'static str, Global); 6] = [
        ("range", range),
        ("namespace", namespace),
        ("dict", dict),
        ("cycler", |budget, args| {
            budget.list(args.len())?;
            Ok(Value::from_object(Cycler::new(args.to_vec())?))
        }),
        ("joiner", |_, args| {
            let (positional, kwargs) = split_args(args)?;
            let separator = match positional.first() {
                Some(separator) => Some(separator.clone()),
                None => kwargs.get::<Option<Value>>("sep")?,
            };
            Ok(Value::from_object(Joiner::new(separator.unwrap_or_else(|| Value::from(", ")))))
        }),
        ("raise_exception", |budget, args| {
            let message = to_text(budget, arg(args, 0)?)?;
            Err(fail(format!("raise_exception: {}", crate::text::shortened(&message))))
        }),
    ];
    for (name, function) in functions {
        let budget = Arc::clone(budget);
        env.add_function(name, move |_: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            budget.work(60)?;
            function(&budget, &args)
        });
    }
    let budget = Arc::clone(budget);
    env.add_function("strftime_now", move |args: Rest<Value>| {
        let format = arg(&args, 0)?;
        let format =
            format.as_str().ok_or_else(|| fail("strftime_now: the format must be a string"))?;
        budget.work(60)?;
        budget.bytes(format.len().saturating_mul(16))?;
        let since = budget.now().duration_since(UNIX_EPOCH).unwrap_or_default();
        budget.string(strftime(format, since)?)
    });
}

fn range(budget: &Arc<Budget>, args: &[Value]) -> Result<Value, Error> {
    const MAX_ELEMENTS: i64 = 100_000;
    let bound = |index: usize| {
        arg(args, index)?.as_i64().ok_or_else(|| fail("range: the bounds must be integers"))
    };
    let (start, stop, step) = match args.len() {
        1 => (0, bound(0)?, 1),
        2 => (bound(0)?, bound(1)?, 1),
        _ => (bound(0)?, bound(1)?, bound(2)?),
    };
    if step == 0 {
        return Err(fail("range: the step is 0"));
    }
    let distance = if step > 0 { stop.saturating_sub(start) } else { start.saturating_sub(stop) };
    let size = step.unsigned_abs();
    let count = u64::try_from(distance).unwrap_or(0).div_ceil(size);
    if count > MAX_ELEMENTS as u64 {
        return Err(fail(format!("range: more than {MAX_ELEMENTS} elements")));
    }
    budget.list(count as usize)?;
    let number = |index: u64| start.saturating_add((index as i64).saturating_mul(step));
    Ok(Value::from((0..count).map(|index| Value::from(number(index))).collect::<Vec<_>>()))
}

fn namespace(budget: &Arc<Budget>, args: &[Value]) -> Result<Value, Error> {
    let namespace = Arc::new(Namespace::default());
    budget.keep(namespace.clone())?;
    for (name, value) in entries(args)? {
        let name = name.as_str().ok_or_else(|| fail("namespace: the names must be strings"))?;
        namespace.set(budget, name, value)?;
    }
    Ok(Value::from_dyn_object(namespace))
}

fn dict(budget: &Arc<Budget>, args: &[Value]) -> Result<Value, Error> {
    let entries = entries(args)?;
    budget.structure(entries.len().saturating_mul(120).saturating_add(120))?;
    Ok(Value::from_pairs(entries))
}

/// Returns the entries of a map argument and of the keyword arguments.
fn entries(args: &[Value]) -> Result<Vec<(Value, Value)>, Error> {
    let (positional, kwargs) = split_args(args)?;
    let mut entries = Vec::new();
    if let Some(map) = positional.first() {
        let pairs = map.as_object().and_then(|object| object.try_iter_pairs());
        entries.extend(pairs.ok_or_else(|| fail("expected a map or named arguments"))?);
    }
    for name in kwargs.args().map(str::to_owned).collect::<Vec<_>>() {
        let value = kwargs.get::<Value>(&name)?;
        entries.push((Value::from(name), value));
    }
    Ok(entries)
}

const DAYS: [&str; 7] =
    ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A flag between `%` and the letter of a directive, as glibc has them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flag {
    None,
    /// `-`: without leading zeros or blanks.
    Plain,
    /// `_`: leading blanks.
    Blanks,
    /// `0`: leading zeros.
    Zeros,
    /// `^`: in capitals.
    Upper,
}

/// Implements Python's `datetime.strftime` of a time without a zone, in English, in UTC: the
/// directives that Python documents and those that glibc adds. Others stay as they are. The local
/// time zone is not used: reading it is not safe while another thread of the host changes its
/// environment.
fn strftime(format: &str, since_epoch: Duration) -> Result<String, Error> {
    let mut text = super::budget::Text::default();
    write_time(&mut text, format, since_epoch)?;
    Ok(text.into_string())
}

fn write_time(
    text: &mut super::budget::Text,
    format: &str,
    since_epoch: Duration,
) -> Result<(), Error> {
    let unix_seconds = since_epoch.as_secs();
    let days = unix_seconds / 86_400;
    let (hour, minute, second) =
        (unix_seconds / 3600 % 24, unix_seconds / 60 % 60, unix_seconds % 60);
    let (year, month, day, day_of_year) = civil_date(days);
    // Monday is 0.
    let weekday = (days + 3) % 7;
    let from_sunday = (weekday + 1) % 7;
    let day_name = DAYS.get(weekday as usize).copied().unwrap_or_default();
    let month_name = MONTHS.get(month as usize - 1).copied().unwrap_or_default();
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    // In ISO 8601 a week belongs to the year of its Thursday, and the first week is number 1.
    let (iso_year, _, _, thursday) = civil_date(days + 3 - weekday);
    let iso_week = thursday.div_ceil(7);
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push_char(character)?;
            continue;
        }
        let mut directive = characters.next();
        let flag = match directive {
            Some('-') => Flag::Plain,
            Some('_') => Flag::Blanks,
            Some('0') => Flag::Zeros,
            Some('^') => Flag::Upper,
            _ => Flag::None,
        };
        if flag != Flag::None {
            directive = characters.next();
        }
        let padded = |number: u64, width: usize, flag: Flag| match flag {
            Flag::Plain => number.to_string(),
            Flag::Blanks => format!("{number:width$}"),
            _ => format!("{number:0width$}"),
        };
        let two = |number: u64| padded(number, 2, flag);
        // Padded with blanks unless a flag says otherwise.
        let blank = |number: u64| match flag {
            Flag::None => padded(number, 2, Flag::Blanks),
            _ => padded(number, 2, flag),
        };
        let name = |name: &str, length: usize| {
            let name = name.get(..length).unwrap_or(name);
            if flag == Flag::Upper {
                name.to_uppercase()
            } else {
                name.to_owned()
            }
        };
        let half = if hour < 12 { "AM" } else { "PM" };
        let piece = match directive {
            Some('Y') => year.to_string(),
            Some('C') => two(year / 100),
            Some('y') => two(year % 100),
            Some('G') => iso_year.to_string(),
            Some('g') => two(iso_year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => blank(day),
            Some('j') => padded(day_of_year, 3, flag),
            Some('U') => two((day_of_year + 6 - from_sunday) / 7),
            Some('W') => two((day_of_year + 6 - weekday) / 7),
            Some('V') => two(iso_week),
            Some('u') => (weekday + 1).to_string(),
            Some('w') => from_sunday.to_string(),
            Some('H') => two(hour),
            Some('I') => two(hour12),
            Some('k') => blank(hour),
            Some('l') => blank(hour12),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('f') => format!("{:06}", since_epoch.subsec_micros()),
            Some('p') => half.to_owned(),
            Some('P') => half.to_lowercase(),
            Some('A') => name(day_name, usize::MAX),
            Some('a') => name(day_name, 3),
            Some('B') => name(month_name, usize::MAX),
            Some('b' | 'h') => name(month_name, 3),
            Some('s') => unix_seconds.to_string(),
            // There is no zone.
            Some('Z' | 'z') => String::new(),
            Some('n') => "\n".to_owned(),
            Some('t') => "\t".to_owned(),
            Some('%') => "%".to_owned(),
            Some(letter @ ('c' | 'D' | 'x' | 'F' | 'T' | 'X' | 'R' | 'r')) => {
                let expanded = match letter {
                    'c' => "%a %b %e %H:%M:%S %Y",
                    'D' | 'x' => "%m/%d/%y",
                    'F' => "%Y-%m-%d",
                    'R' => "%H:%M",
                    'r' => "%I:%M:%S %p",
                    _ => "%H:%M:%S",
                };
                write_time(text, expanded, since_epoch)?;
                continue;
            }
            Some(other) => format!("%{other}"),
            None => "%".to_owned(),
        };
        text.push(&piece)?;
    }
    Ok(())
}

/// Returns the year, month, day and day of the year of a day since 1970-01-01 (Howard Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`).
fn civil_date(days: u64) -> (u64, u64, u64, u64) {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * from_march + 2) / 153;
    let day = from_march - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let leap = (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400);
    let before_month = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    let before = before_month.get(month as usize - 1).copied().unwrap_or(0);
    (year, month, day, before + day + u64::from(leap && month > 2))
}

#[cfg(test)]
mod tests {
    use super::strftime;
    use std::time::Duration;

    fn at(format: &str, unix_seconds: u64) -> String {
        strftime(format, Duration::from_secs(unix_seconds)).unwrap()
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        // 2024-02-29 13:05:09 UTC, a Thursday; `date -u -d @1709211909`.
        let format = "%Y-%m-%d %H:%M:%S %A %a %B %b %j %I %p %-m/%-d/%y %q %%";
        assert_eq!(
            at(format, 1_709_211_909),
            "2024-02-29 13:05:09 Thursday Thu February Feb 060 01 PM 2/29/24 %q %"
        );
        assert_eq!(at("%d %b %Y %A", 0), "01 Jan 1970 Thursday");
        assert_eq!(at("%F %T %j", 1_735_689_599), "2024-12-31 23:59:59 366");
    }

    /// As Python 3.11 gives them for a datetime without a zone.
    #[test]
    fn directives_are_pythons() {
        assert_eq!(
            at("%c|%C|%D|%e|%g|%G|%k|%l|%P|%r|%R|%s|%u|%U|%V|%w|%W|%x|%X|%z%Z|", 1_709_211_909),
            "Thu Feb 29 13:05:09 2024|20|02/29/24|29|24|2024|13| 1|pm|01:05:09 PM|13:05|1709211909|\
             4|08|09|4|09|02/29/24|13:05:09||"
        );
        // 2024-02-03 04:05:09, a Saturday.
        assert_eq!(
            at("%-d|%_d|%0e|%^b|%^A|%-I|%_H|%-j|%_j|%-y|%_m|%-e|%", 1_706_933_109),
            "3| 3|03|FEB|SATURDAY|4| 4|34| 34|24| 2|3|%"
        );
        // The ends of years: 2021-01-03, 2024-12-30, 2026-12-31.
        assert_eq!(at("%G %V %U %W", 1_609_632_000), "2020 53 01 00");
        assert_eq!(at("%G %V %g %u", 1_735_516_800), "2025 01 25 1");
        assert_eq!(at("%G %V %U %W", 1_798_675_200), "2026 53 52 52");
        let time = Duration::new(1, 42_000);
        assert_eq!(strftime("%S.%f", time).unwrap(), "01.000042");
    }
}
