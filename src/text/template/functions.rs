//! Global functions: those of Jinja that chat templates use, and Transformers' two.

use super::budget::{fail, Budget};
use super::operators::{arg, split_args};
use super::values::to_text;
use minijinja::value::{Enumerator, Object, ObjectRepr, Rest, Value, ValueOrKwargs};
use minijinja::{Environment, Error, State};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// The most entries of a namespace.
const MAX_NAMESPACE_ENTRIES: usize = 1024;

/// The object made by `namespace(...)`: variables that keep their values after the end of a loop.
///
/// It replaces minijinja's own, which may contain itself and is then never freed: this one is
/// emptied when the rendering is over.
#[derive(Debug, Default)]
pub(super) struct Namespace {
    entries: Mutex<BTreeMap<String, Value>>,
}

impl Namespace {
    pub fn set(&self, budget: &Budget, name: &str, value: Value) -> Result<(), Error> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.get_mut(name) {
            *entry = value;
            return Ok(());
        }
        if entries.len() >= MAX_NAMESPACE_ENTRIES {
            return Err(fail(format!("a namespace has more than {MAX_NAMESPACE_ENTRIES} entries")));
        }
        budget.structure(600 + name.len())?;
        entries.insert(name.to_owned(), value);
        Ok(())
    }

    pub fn clear(&self) {
        let entries =
            std::mem::take(&mut *self.entries.lock().unwrap_or_else(PoisonError::into_inner));
        // Dropped without the lock, because a value may lead back here.
        drop(entries);
    }
}

impl Object for Namespace {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.get(key.as_str()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::NonEnumerable
    }
}

pub(super) fn register(env: &mut Environment<'static>, budget: &Arc<Budget>) {
    type Global = fn(&Arc<Budget>, &[Value]) -> Result<Value, Error>;
    let functions: [(&'static str, Global); 5] = [
        ("range", range),
        ("namespace", namespace),
        ("dict", dict),
        ("raise_exception", |budget, args| {
            let message = to_text(budget, arg(args, 0)?)?;
            Err(fail(format!("raise_exception: {}", crate::text::shortened(&message))))
        }),
        ("strftime_now", |budget, args| {
            let format = arg(args, 0)?.as_str().unwrap_or_default();
            budget.bytes(format.len().saturating_mul(16))?;
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            budget.string(strftime(format, since.as_secs())?)
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
    budget.keep_namespace(&namespace)?;
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

/// Implements `strftime` in UTC, in English, for the directives that occur in dates of prompts;
/// others stay as they are. The local time zone is not used: reading it is not safe while another
/// thread of the host changes its environment.
fn strftime(format: &str, unix_seconds: u64) -> Result<String, Error> {
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
    let days = unix_seconds / 86_400;
    let (hour, minute, second) =
        (unix_seconds / 3600 % 24, unix_seconds / 60 % 60, unix_seconds % 60);
    let (year, month, day, day_of_year) = civil_date(days);
    let weekday = DAYS.get(((days + 3) % 7) as usize).copied().unwrap_or_default();
    let month_name = MONTHS.get(month as usize - 1).copied().unwrap_or_default();
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    let short = |name: &str| name.get(..3).unwrap_or_default().to_owned();

    let mut text = super::budget::Text::default();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push_char(character)?;
            continue;
        }
        let mut directive = characters.next();
        // glibc's `%-d` leaves out the leading zero.
        let plain = directive == Some('-');
        if plain {
            directive = characters.next();
        }
        let two = |number: u64| if plain { number.to_string() } else { format!("{number:02}") };
        let piece = match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('j') => {
                if plain {
                    day_of_year.to_string()
                } else {
                    format!("{day_of_year:03}")
                }
            }
            Some('H') => two(hour),
            Some('I') => two(hour12),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => short(weekday),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => short(month_name),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('s') => unix_seconds.to_string(),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => format!("%{other}"),
            None => "%".to_owned(),
        };
        text.push(&piece)?;
    }
    Ok(text.into_string())
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

    #[test]
    fn dates_are_those_of_the_calendar() {
        // 2024-02-29 13:05:09 UTC, a Thursday; `date -u -d @1709211909`.
        let format = "%Y-%m-%d %H:%M:%S %A %a %B %b %j %I %p %-m/%-d/%y %q %%";
        assert_eq!(
            strftime(format, 1_709_211_909).unwrap(),
            "2024-02-29 13:05:09 Thursday Thu February Feb 060 01 PM 2/29/24 %q %"
        );
        assert_eq!(strftime("%d %b %Y %A", 0).unwrap(), "01 Jan 1970 Thursday");
        assert_eq!(strftime("%F %T %j", 1_735_689_599).unwrap(), "2024-12-31 23:59:59 366");
    }
}
