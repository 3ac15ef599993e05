//! What the metadata of a file of kept weights say of it, as JSON under [`KEY`].

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::checksum::Checksum;
use super::source::SourceFile;
use super::wanted::Wanted;
use crate::error::{check_room, try_with_capacity, Error, Result};
use crate::model::folder::shown_name;
use crate::ops::quantised::QuantFormat;

/// The key in the metadata of the safetensors file.
pub(super) const KEY: &str = "xserv.kept_weights";
/// The version of the file and of the quantiser: to be counted up when a later one would read the file
/// otherwise, or would make other numbers of the same source.
pub(super) const VERSION: u64 = 1;
/// The most bytes that a description takes in memory for each byte of its header, with the parser's copies.
const ROOM_PER_BYTE: usize = 8;

/// Describes a file of kept weights.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Description {
    /// See [`VERSION`].
    pub version: u64,
    /// The files of the model.
    pub source: Vec<SourceFile>,
    /// The tensors that were quantised.
    pub tensors: Vec<Quantised>,
    /// Whether the output matrix, stored although it is declared tied, was found equal to the embedding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_is_embedding: Option<bool>,
}

/// Describes what is kept of a tensor.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Quantised {
    /// The name in the model's files.
    pub name: String,
    /// `Code::name`.
    pub code: String,
    /// The inputs that share a scale, as they were asked for: a row may have fewer.
    pub group_size: u64,
    /// The checksum of the tensor in the model's files.
    pub source_crc32: Checksum,
    /// The checksum of the scales.
    pub scales_crc32: Checksum,
    /// The checksum of the codes.
    pub codes_crc32: Checksum,
    /// The checksum of the zeros, 0 where there are none.
    pub zeros_crc32: Checksum,
}

/// The version alone, whatever else there is.
#[derive(Deserialize)]
struct VersionAlone {
    version: u64,
}

/// The metadata of a header that concern us.
#[derive(Deserialize)]
struct Header {
    #[serde(rename = "__metadata__")]
    metadata: Option<Metadata>,
}

#[derive(Deserialize)]
struct Metadata {
    #[serde(rename = "xserv.kept_weights")]
    description: Option<String>,
}

impl Quantised {
    /// Returns the description of a tensor before its checksums are known.
    pub fn of(wanted: &Wanted) -> Self {
        Quantised {
            name: wanted.source.name.clone(),
            code: wanted.format.code.name().to_owned(),
            group_size: wanted.format.group_size as u64,
            source_crc32: Checksum::default(),
            scales_crc32: Checksum::default(),
            codes_crc32: Checksum::default(),
            zeros_crc32: Checksum::default(),
        }
    }

    fn check_format(&self, format: &QuantFormat) -> Result<()> {
        let asked = (format.code.name(), format.group_size as u64);
        if (self.code.as_str(), self.group_size) == asked {
            return Ok(());
        }
        Err(Error::invalid_file(format!(
            "the file has {} as {} in groups of {}, but {} in groups of {} was asked for",
            shown_name(&self.name),
            shown_name(&self.code),
            self.group_size,
            asked.0,
            asked.1
        )))
    }
}

impl Description {
    /// Reads the description of a file from its header, whose JSON is known to be sound.
    pub fn parse(header: &[u8]) -> Result<Self> {
        let none = || {
            Error::invalid_file(format!("the file has no kept weights: its metadata have no {KEY}"))
        };
        let bad = |e: serde_json::Error| {
            Error::invalid_file(format!("bad description: {}", shown_name(&e.to_string())))
        };
        check_room(header.len().saturating_mul(ROOM_PER_BYTE), "a description of kept weights")?;
        let Header { metadata } = serde_json::from_slice(header).map_err(bad)?;
        let text = metadata.and_then(|metadata| metadata.description).ok_or_else(none)?;
        let VersionAlone { version } = serde_json::from_str(&text).map_err(bad)?;
        if version != VERSION {
            return Err(Error::invalid_file(format!(
                "the file is of version {version}, but this version of xserv reads and writes {VERSION}"
            )));
        }
        serde_json::from_str(&text).map_err(bad)
    }

    /// Checks that the file holds what is wanted, made from `now`. Returns the description of each tensor in
    /// the order of `wanted`.
    pub fn fit(&self, wanted: &[Wanted], now: &[SourceFile]) -> Result<Vec<&Quantised>> {
        let mut by_name = HashMap::new();
        let room = by_name.try_reserve(self.tensors.len());
        room.map_err(|_| Error::out_of_memory("a description of kept weights", 1))?;
        for tensor in &self.tensors {
            if by_name.insert(tensor.name.as_str(), tensor).is_some() {
                return Err(Error::invalid_file(format!(
                    "the description has {} twice",
                    shown_name(&tensor.name)
                )));
            }
        }
        self.check_source(now)?;
        let mut found = try_with_capacity(wanted.len(), "a description of kept weights")?;
        for wanted in wanted {
            let name = wanted.source.name.as_str();
            let tensor = by_name.remove(name).ok_or_else(|| {
                Error::invalid_file(format!(
                    "the file was made with other options: it lacks {name}, which is to be quantised"
                ))
            })?;
            tensor.check_format(&wanted.format)?;
            found.push(tensor);
        }
        // The first by name, so that the same file is refused in the same words each time.
        match by_name.keys().min() {
            None => Ok(found),
            Some(name) => Err(Error::invalid_file(format!(
                "the file was made with other options: it has {}, which is not to be quantised",
                shown_name(name)
            ))),
        }
    }

    /// Whether the file was made from `now`, as names, sizes, times and headers tell.
    pub fn is_made_from(&self, now: &[SourceFile]) -> bool {
        self.check_source(now).is_ok()
            && self.source.iter().zip(now).all(|(old, now)| old.has_time_of(now))
    }

    fn check_source(&self, now: &[SourceFile]) -> Result<()> {
        let other = |how: String| {
            Error::invalid_file(format!("the file was made from another model: {how}"))
        };
        if self.source.len() != now.len() {
            return Err(other(format!(
                "it had {} weight files, not {}",
                self.source.len(),
                now.len()
            )));
        }
        let mut differences =
            self.source.iter().zip(now).filter_map(|(old, now)| old.difference(now));
        differences.next().map_or(Ok(()), |how| Err(other(shown_name(&how))))
    }
}
