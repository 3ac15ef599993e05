//! `model.safetensors.index.json`: which file holds which tensor.
//!
//! ```text
//! {"metadata": {...}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors", ...}}
//! ```

use std::cell::Cell;
use std::collections::hash_map::{Entry, HashMap};
use std::fmt;

use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::Deserializer;

use super::folder::{check_file_name, shown_name};
use crate::error::{check_room, Error, Result};

/// The name of the index file.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// The maximum size of an index in bytes; those of the largest published models have some hundreds
/// of kilobytes.
pub const MAX_INDEX_BYTES: usize = 16 << 20;
/// The maximum number of names in all shards together: twice the count of the largest published
/// mixtures of experts, and few enough for their map to stay below 100 MiB.
pub const MAX_TENSORS_IN_ALL: usize = 1 << 18;
/// The maximum number of files that an index may name.
const MAX_SHARDS: usize = 4096;

/// The content of an index.
#[derive(Debug, Default)]
pub struct ShardIndex {
    /// Plain file names, in the order of their first mention.
    pub shards: Vec<String>,
    /// The position in `shards` of each tensor's file.
    pub tensors: HashMap<String, usize>,
}

impl ShardIndex {
    /// Checks the content of an index file.
    pub fn parse(json: &[u8]) -> Result<Self> {
        // The parser's copy of a name, which grows by doubling.
        check_room(json.len().saturating_mul(2), INDEX_FILE)?;
        let mut deserializer = serde_json::Deserializer::from_slice(json);
        let no_memory = Cell::new(false);
        let index = Whole { no_memory: &no_memory }
            .deserialize(&mut deserializer)
            .and_then(|index| deserializer.end().map(|()| index))
            .map_err(|e| {
                if no_memory.get() {
                    Error::out_of_memory(INDEX_FILE, json.len())
                } else {
                    Error::invalid_file(format!("{INDEX_FILE}: {}", shown_name(&e.to_string())))
                }
            })?;
        let index = index
            .ok_or_else(|| Error::invalid_file(format!("{INDEX_FILE}: weight_map is missing")))?;
        if index.shards.is_empty() {
            return Err(Error::invalid_file(format!("{INDEX_FILE}: weight_map is empty")));
        }
        for shard in &index.shards {
            check_file_name(shard)
                .map_err(|e| Error::invalid_file(format!("{INDEX_FILE}: {}", e.message())))?;
        }
        Ok(index)
    }
}

/// The outer object, of which `weight_map` alone is kept.
#[derive(Clone, Copy)]
struct Whole<'a> {
    /// Set when memory is short, which the error of a deserializer cannot tell.
    no_memory: &'a Cell<bool>,
}

impl<'de> DeserializeSeed<'de> for Whole<'_> {
    type Value = Option<ShardIndex>;

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Whole<'_> {
    type Value = Option<ShardIndex>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(
        self,
        mut map: A,
    ) -> std::result::Result<Self::Value, A::Error> {
        let mut index = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != "weight_map" {
                map.next_value::<IgnoredAny>()?;
            } else if index.is_some() {
                return Err(A::Error::custom("weight_map occurs twice"));
            } else {
                index = Some(map.next_value_seed(WeightMap(self))?);
            }
        }
        Ok(index)
    }
}

struct WeightMap<'a>(Whole<'a>);

impl<'de> DeserializeSeed<'de> for WeightMap<'_> {
    type Value = ShardIndex;

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_> {
    type Value = ShardIndex;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("weight_map to be an object of file names")
    }

    fn visit_map<A: MapAccess<'de>>(
        self,
        mut map: A,
    ) -> std::result::Result<Self::Value, A::Error> {
        let mut index = ShardIndex::default();
        let mut known: HashMap<String, usize> = HashMap::new();
        while let Some((tensor, shard)) = map.next_entry::<String, String>()? {
            if index.tensors.len() == MAX_TENSORS_IN_ALL {
                return Err(A::Error::custom(format_args!(
                    "more than {MAX_TENSORS_IN_ALL} tensors"
                )));
            }
            let position = match known.get(&shard) {
                Some(&position) => position,
                None if index.shards.len() == MAX_SHARDS => {
                    return Err(A::Error::custom(format_args!("more than {MAX_SHARDS} files")));
                }
                None => {
                    index.shards.push(shard.clone());
                    known.insert(shard, index.shards.len() - 1);
                    index.shards.len() - 1
                }
            };
            index.tensors.try_reserve(1).map_err(|e| {
                self.0.no_memory.set(true);
                A::Error::custom(e)
            })?;
            match index.tensors.entry(tensor) {
                Entry::Vacant(vacant) => drop(vacant.insert(position)),
                Entry::Occupied(known) => {
                    let name = shown_name(known.key());
                    return Err(A::Error::custom(format_args!("tensor {name} occurs twice")));
                }
            }
        }
        Ok(index)
    }
}
