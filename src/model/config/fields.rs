//! Typed access to the fields of a JSON object, with errors that name field, value and expectation.

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::model::folder::shown_name;

/// The fields of one JSON object. `null` counts as absent, as in Transformers' optional fields.
#[derive(Clone, Copy)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// The place of the object, for messages: `config.json`, `config.json: rope_scaling`.
    place: &'a str,
}

impl<'a> Fields<'a> {
    pub fn new(map: &'a Map<String, Value>, place: &'a str) -> Self {
        Fields { map, place }
    }

    /// Returns the place that messages name.
    pub fn place(&self) -> &'a str {
        self.place
    }

    /// Returns the value of `name`, if it is present and not `null`.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// Whether the key is present, even if its value is `null`.
    pub fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    pub fn missing(&self, name: &str) -> Error {
        Error::invalid_file(format!("{}: {name} is missing", self.place))
    }

    /// Returns the error `<place>: <name> is <value>, expected <expected>`.
    pub fn wrong(&self, name: &str, expected: &str) -> Error {
        let found = match self.map.get(name) {
            None => "missing".to_owned(),
            Some(Value::Array(_)) => "a list".to_owned(),
            Some(Value::Object(_)) => "an object".to_owned(),
            Some(value) => shown_name(&value.to_string()),
        };
        Error::invalid_file(format!("{}: {name} is {found}, expected {expected}", self.place))
    }

    /// Returns a whole number from 1 to `max`, or `None` if it is absent.
    pub fn optional_count(&self, name: &str, max: usize) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_u64()
            .and_then(|n| usize::try_from(n).ok())
            .filter(|n| (1..=max).contains(n))
            .map(Some)
            .ok_or_else(|| self.wrong(name, &format!("a whole number from 1 to {max}")))
    }

    /// Returns a whole number from 1 to `max`, which must be present.
    pub fn count(&self, name: &str, max: usize) -> Result<usize> {
        self.optional_count(name, max)?.ok_or_else(|| self.missing(name))
    }

    /// Returns the count under the first of several spellings that is present.
    pub fn count_of(&self, names: &[&str], max: usize) -> Result<usize> {
        for name in names {
            if let Some(n) = self.optional_count(name, max)? {
                return Ok(n);
            }
        }
        Err(self.missing(names.first().unwrap_or(&"")))
    }

    /// Returns a finite number above `above` and up to `max`, or `None` if it is absent.
    pub fn optional_number(&self, name: &str, above: f64, max: f64) -> Result<Option<f64>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_f64()
            .filter(|x| x.is_finite() && *x > above && *x <= max)
            .map(Some)
            .ok_or_else(|| self.wrong(name, &format!("a number above {above} and up to {max:e}")))
    }

    pub fn flag(&self, name: &str, default: bool) -> Result<bool> {
        match self.get(name) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(name, "true or false")),
        }
    }

    pub fn optional_string(&self, name: &str) -> Result<Option<&'a str>> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.wrong(name, "a string")),
        }
    }

    /// Returns an object, or `None` if it is absent. An empty object counts as absent, as it does
    /// in Python.
    pub fn optional_object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) if map.is_empty() => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(_) => Err(self.wrong(name, "an object")),
        }
    }

    /// Refuses a flag that is set, by name.
    pub fn refuse_flag(&self, name: &str) -> Result<()> {
        if self.flag(name, false)? {
            return Err(Error::unsupported(format!(
                "{}: {name} = true is not supported",
                self.place
            )));
        }
        Ok(())
    }
}
