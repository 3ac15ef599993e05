//! The header of a safetensors file: which tensors it holds, and where.
//!
//! ```text
//! u64 little-endian N | N bytes of JSON | data
//! {"__metadata__": {"key": "value"}, "name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}
//! ```
//!
//! The element types are the reference crate's; the parsing is our own, because an embedder needs
//! tighter limits than the crate has (a 70 MB header took it 1.15 GB), and because it silently takes
//! a name that occurs twice. Files accepted here are a subset of those that the crate accepts: the
//! tensors must cover the data without hole, overlap or rest.

use std::cell::Cell;
use std::collections::hash_map::{Entry, HashMap};
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;

pub use safetensors::tensor::Dtype as StoredDType;
use serde::de::{
    DeserializeSeed, Error as _, IgnoredAny, IntoDeserializer, MapAccess, SeqAccess, Visitor,
};
use serde::{Deserialize, Deserializer};

use super::folder::{io_error, refuse_lfs_pointer, shown_name, FileStamp, LFS_POINTER};
use crate::error::{check_room, try_filled, Context, Error, Result};
use crate::memory::DType;

/// The maximum length of a header, in bytes.
pub const MAX_HEADER_BYTES: u64 = 16 << 20;
/// The maximum number of tensors in one file.
pub const MAX_TENSORS: usize = 65_536;
/// The maximum number of dimensions of a tensor; weights have one or two, GPT-2's mask buffers
/// four.
const MAX_RANK: usize = 8;
/// The size of the length field before the header, in bytes.
pub(in crate::model) const LENGTH_BYTES: u64 = 8;

/// One tensor as a file describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// The element type, which need not be one that the library computes with.
    pub dtype: StoredDType,
    /// The dimensions, row-major, outermost first.
    pub shape: Vec<u64>,
    /// The offset of the first byte in the file.
    pub file_offset: u64,
    /// The length in bytes; the file is at least this long.
    pub len_bytes: u64,
}

/// The tensors of one file, by name.
pub type TensorMap = HashMap<String, TensorInfo>;

/// Returns the library's element type for a stored one, if it computes with that.
pub fn compute_dtype(stored: StoredDType) -> Option<DType> {
    match stored {
        StoredDType::F32 => Some(DType::F32),
        StoredDType::F16 => Some(DType::F16),
        StoredDType::BF16 => Some(DType::BF16),
        _ => None,
    }
}

/// Returns the length that `file` claims for its header, checked against the limit and the file's
/// own length. `name` is for messages.
pub fn read_header_length(name: &str, file: &File, stamp: FileStamp) -> Result<u64> {
    let mut length = [0_u8; LENGTH_BYTES as usize];
    if stamp.len < LENGTH_BYTES {
        return Err(Error::invalid_file(format!(
            "{name} has {} bytes, too few for a safetensors file",
            stamp.len
        )));
    }
    file.read_exact_at(&mut length, 0).map_err(|e| io_error(name, &e))?;
    let header_len = u64::from_le_bytes(length);
    if header_len > MAX_HEADER_BYTES {
        let mut beginning = [0_u8; LFS_POINTER.len()];
        if file.read_exact_at(&mut beginning, 0).is_ok() {
            refuse_lfs_pointer(name, &beginning)?;
        }
        return Err(Error::invalid_file(format!(
            "{name}: the header claims {header_len} bytes, more than the {MAX_HEADER_BYTES} that are accepted"
        )));
    }
    if header_len > stamp.len - LENGTH_BYTES {
        return Err(Error::invalid_file(format!(
            "{name} is cut off: the header claims {header_len} bytes, but the file has {}",
            stamp.len
        )));
    }
    Ok(header_len)
}

/// Reads and checks the header of `file`. `name` is for messages.
pub fn read_header(name: &str, file: &File, stamp: FileStamp) -> Result<TensorMap> {
    let header_len = read_header_length(name, file, stamp)?;
    // At most 16 MiB, so the conversion cannot fail.
    let mut header = try_filled(header_len as usize, 0_u8, "a safetensors header")?;
    file.read_exact_at(&mut header, LENGTH_BYTES).map_err(|e| io_error(name, &e))?;
    parse_header(&header, stamp.len - LENGTH_BYTES - header_len).context(|| name)
}

/// Checks the JSON of a header that is followed by `data_len` bytes of data.
pub fn parse_header(header: &[u8], data_len: u64) -> Result<TensorMap> {
    let text =
        std::str::from_utf8(header).map_err(|_| Error::invalid_file("the header is not UTF-8"))?;
    // The parser's copy of a name, which grows by doubling.
    check_room(header.len().saturating_mul(2), "a safetensors header")?;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let no_memory = Cell::new(false);
    let raw = HeaderSeed { no_memory: &no_memory }
        .deserialize(&mut deserializer)
        .and_then(|raw| deserializer.end().map(|()| raw))
        .map_err(|e| {
            if no_memory.get() {
                Error::out_of_memory("a safetensors header", header.len())
            } else {
                Error::invalid_file(format!("bad header: {}", shown_name(&e.to_string())))
            }
        })?;
    place_tensors(raw, header.len() as u64, data_len)
}

/// Checks that the tensors cover the data exactly, and turns offsets into file offsets.
fn place_tensors(
    raw: HashMap<String, RawInfo>,
    header_len: u64,
    data_len: u64,
) -> Result<TensorMap> {
    let mut by_offset: Vec<(&String, &RawInfo)> =
        crate::error::try_with_capacity(raw.len(), "a safetensors header")?;
    by_offset.extend(raw.iter());
    // By name too, so that the same file is refused in the same words each time.
    by_offset.sort_unstable_by_key(|&(name, info)| (info.data_offsets, name));
    let mut covered = 0_u64;
    for (name, info) in &by_offset {
        let (begin, end) = info.data_offsets;
        let bad =
            |what: String| Err(Error::invalid_file(format!("tensor {}: {what}", shown_name(name))));
        if end < begin {
            return bad(format!("its data ends at {end}, before it begins at {begin}"));
        }
        if begin < covered {
            return bad(format!(
                "its data begins at {begin}, inside another tensor's that ends at {covered}"
            ));
        }
        if begin > covered {
            return bad(format!(
                "nothing covers the data from {covered} to its beginning at {begin}"
            ));
        }
        let size_bytes = info
            .shape
            .iter()
            .try_fold(1_u64, |product, &dim| product.checked_mul(dim))
            .and_then(|elements| elements.checked_mul(info.dtype.bitsize() as u64))
            .filter(|bits| bits.is_multiple_of(8))
            .map(|bits| bits / 8);
        if size_bytes != Some(end - begin) {
            return bad(format!(
                "shape {:?} of {} does not fill its {} bytes",
                info.shape,
                info.dtype,
                end - begin
            ));
        }
        covered = end;
    }
    if covered != data_len {
        let what =
            if covered > data_len { "the file is cut off" } else { "there are trailing bytes" };
        return Err(Error::invalid_file(format!(
            "{what}: the tensors take {covered} bytes, but {data_len} follow the header"
        )));
    }
    drop(by_offset);
    let data_begin = LENGTH_BYTES + header_len;
    let mut tensors = TensorMap::new();
    tensors
        .try_reserve(raw.len())
        .map_err(|_| Error::out_of_memory("a safetensors header", raw.len()))?;
    tensors.extend(raw.into_iter().map(|(name, info)| {
        let (begin, end) = info.data_offsets;
        let placed = TensorInfo {
            dtype: info.dtype,
            shape: info.shape,
            // Both are at most the file's length.
            file_offset: data_begin + begin,
            len_bytes: end - begin,
        };
        (name, placed)
    }));
    Ok(tensors)
}

/// The value of one entry of the header.
struct RawInfo {
    dtype: StoredDType,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for RawInfo {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Info;
        impl<'de> Visitor<'de> for Info {
            type Value = RawInfo;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object that describes a tensor")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<RawInfo, A::Error> {
                let (mut dtype, mut shape, mut data_offsets) = (None, None, None);
                while let Some(field) = map.next_key::<Field>()? {
                    match field {
                        Field::Dtype => set(&mut dtype, "dtype", map.next_value_seed(DtypeSeed)?)?,
                        Field::Shape => set(&mut shape, "shape", map.next_value_seed(ShapeSeed)?)?,
                        Field::DataOffsets => {
                            set(&mut data_offsets, "data_offsets", map.next_value()?)?
                        }
                        Field::Other => map.next_value::<Skipped>().map(|_| ())?,
                    }
                }
                Ok(RawInfo {
                    dtype: dtype.ok_or_else(|| A::Error::missing_field("dtype"))?,
                    shape: shape.ok_or_else(|| A::Error::missing_field("shape"))?,
                    data_offsets: data_offsets
                        .ok_or_else(|| A::Error::missing_field("data_offsets"))?,
                })
            }
        }

        fn set<T, E: serde::de::Error>(
            place: &mut Option<T>,
            name: &'static str,
            value: T,
        ) -> std::result::Result<(), E> {
            match place.replace(value) {
                None => Ok(()),
                Some(_) => Err(E::duplicate_field(name)),
            }
        }

        deserializer.deserialize_map(Info)
    }
}

/// The name of a field of an entry.
#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    Dtype,
    Shape,
    DataOffsets,
    #[serde(other)]
    Other,
}

/// The value of a field that is of no use to us, read as the format's own reader reads it. What
/// serde skips by itself ([`IgnoredAny`]) may have numbers that are out of range, and any depth.
struct Skipped;

impl<'de> Deserialize<'de> for Skipped {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Anything;
        impl<'de> Visitor<'de> for Anything {
            type Value = Skipped;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("anything")
            }

            fn visit_bool<E>(self, _: bool) -> std::result::Result<Skipped, E> {
                Ok(Skipped)
            }

            fn visit_i64<E>(self, _: i64) -> std::result::Result<Skipped, E> {
                Ok(Skipped)
            }

            fn visit_u64<E>(self, _: u64) -> std::result::Result<Skipped, E> {
                Ok(Skipped)
            }

            fn visit_f64<E>(self, _: f64) -> std::result::Result<Skipped, E> {
                Ok(Skipped)
            }

            fn visit_str<E>(self, _: &str) -> std::result::Result<Skipped, E> {
                Ok(Skipped)
            }

            fn visit_unit<E>(self) -> std::result::Result<Skipped, E> {
                Ok(Skipped)
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut list: A,
            ) -> std::result::Result<Skipped, A::Error> {
                while list.next_element::<Skipped>()?.is_some() {}
                Ok(Skipped)
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Skipped, A::Error> {
                while map.next_key::<IgnoredAny>()?.is_some() {
                    map.next_value::<Skipped>()?;
                }
                Ok(Skipped)
            }
        }
        deserializer.deserialize_any(Anything)
    }
}

/// Reads the name of an element type.
struct DtypeSeed;

impl<'de> DeserializeSeed<'de> for DtypeSeed {
    type Value = StoredDType;

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<StoredDType, D::Error> {
        let name = String::deserialize(deserializer)?;
        let known: std::result::Result<_, serde::de::value::Error> =
            StoredDType::deserialize(name.as_str().into_deserializer());
        known.map_err(|_| {
            D::Error::custom(format_args!("unknown element type {}", shown_name(&name)))
        })
    }
}

/// Reads a list of at most [`MAX_RANK`] dimensions.
struct ShapeSeed;

impl<'de> DeserializeSeed<'de> for ShapeSeed {
    type Value = Vec<u64>;

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Vec<u64>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for ShapeSeed {
    type Value = Vec<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of dimensions")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Vec<u64>, A::Error> {
        let mut dims = Vec::new();
        while let Some(dim) = list.next_element()? {
            if dims.len() == MAX_RANK {
                return Err(A::Error::custom(format_args!("more than {MAX_RANK} dimensions")));
            }
            dims.push(dim);
        }
        Ok(dims)
    }
}

/// Reads the header's object entry by entry, so that limits and duplicates are met at once.
struct HeaderSeed<'a> {
    /// Set when memory is short, which the error of a deserializer cannot tell.
    no_memory: &'a Cell<bool>,
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = HashMap<String, RawInfo>;

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = HashMap<String, RawInfo>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(
        self,
        mut map: A,
    ) -> std::result::Result<Self::Value, A::Error> {
        let mut tensors = HashMap::new();
        let mut has_metadata = false;
        while let Some(name) = map.next_key::<String>()? {
            let in_tensor =
                |e: A::Error| A::Error::custom(format_args!("{}: {e}", shown_name(&name)));
            if name == "__metadata__" {
                if has_metadata {
                    return Err(A::Error::custom("__metadata__ occurs twice"));
                }
                has_metadata = true;
                map.next_value::<Option<Metadata>>().map_err(in_tensor)?;
                continue;
            }
            if tensors.len() == MAX_TENSORS {
                return Err(A::Error::custom(format_args!("more than {MAX_TENSORS} tensors")));
            }
            let info = map.next_value::<RawInfo>().map_err(in_tensor)?;
            tensors.try_reserve(1).map_err(|e| {
                self.no_memory.set(true);
                A::Error::custom(e)
            })?;
            match tensors.entry(name) {
                Entry::Vacant(vacant) => drop(vacant.insert(info)),
                Entry::Occupied(known) => {
                    let name = shown_name(known.key());
                    return Err(A::Error::custom(format_args!("tensor {name} occurs twice")));
                }
            }
        }
        Ok(tensors)
    }
}

/// `__metadata__`: an object of strings, of no use to us but part of the format.
struct Metadata;

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Strings;
        impl<'de> Visitor<'de> for Strings {
            type Value = Metadata;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Metadata, A::Error> {
                while map.next_key::<IgnoredAny>()?.is_some() {
                    map.next_value::<String>()?;
                }
                Ok(Metadata)
            }
        }
        deserializer.deserialize_map(Strings)
    }
}
