//! The weights of a folder as its files describe them: one safetensors file, or several with an
//! index. Headers only; no weight is read here.

use std::collections::hash_map::{Entry, HashMap};
use std::fs::File;

use super::folder::{shown_name, FileStamp, Folder};
use super::safetensors::{compute_dtype, read_header, read_header_length, StoredDType, TensorInfo};
use super::shard_index::{ShardIndex, INDEX_FILE, MAX_INDEX_BYTES, MAX_TENSORS_IN_ALL};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::DType;

/// The file of a model that is not split.
pub const SINGLE_FILE: &str = "model.safetensors";
/// The maximum number of bytes of all headers together: their names stay in memory, and each takes
/// time to parse.
pub const MAX_HEADER_BYTES_IN_ALL: u64 = 32 << 20;

/// One file with weights.
#[derive(Clone, Debug)]
pub struct Shard {
    /// Plain file name.
    pub name: String,
    /// The state of the file when its header was read.
    pub stamp: FileStamp,
}

/// A tensor, and the shard that holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorEntry {
    /// Position in [`Checkpoint::shards`].
    pub shard: usize,
    /// The type, shape and place of the tensor.
    pub info: TensorInfo,
}

/// A tensor that was found and is what the model needs: of a computable type, of the right shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// The name in the file.
    pub name: String,
    /// Position in [`Checkpoint::shards`].
    pub shard: usize,
    /// The element type in the file.
    pub dtype: DType,
    /// The offset of the first byte in the file.
    pub file_offset: u64,
    /// The length in bytes.
    pub len_bytes: u64,
}

/// The place of a tensor in the files.
pub trait InFile {
    /// Returns the name of the tensor.
    fn name(&self) -> &str;
    /// Position in [`Checkpoint::shards`].
    fn shard(&self) -> usize;
    /// Returns the offset of the first byte in the file.
    fn file_offset(&self) -> u64;
}

impl InFile for Tensor {
    fn name(&self) -> &str {
        &self.name
    }
    fn shard(&self) -> usize {
        self.shard
    }
    fn file_offset(&self) -> u64 {
        self.file_offset
    }
}

impl InFile for RawTensor {
    fn name(&self) -> &str {
        &self.name
    }
    fn shard(&self) -> usize {
        self.shard
    }
    fn file_offset(&self) -> u64 {
        self.file_offset
    }
}

/// A tensor as a file holds it, of whatever type: a part of a quantised weight.
#[derive(Clone, Debug, PartialEq)]
pub struct RawTensor {
    /// The name in the file.
    pub name: String,
    /// Position in [`Checkpoint::shards`].
    pub shard: usize,
    /// Plain name of the file.
    pub file: String,
    /// The element type in the file.
    pub dtype: StoredDType,
    /// The dimensions, outermost first.
    pub shape: Vec<u64>,
    /// The offset of the first byte in the file.
    pub file_offset: u64,
    /// The length in bytes.
    pub len_bytes: u64,
}

/// All tensors of a folder.
#[derive(Debug, Default)]
pub struct Checkpoint {
    /// The files.
    pub shards: Vec<Shard>,
    /// The tensors by name.
    pub tensors: HashMap<String, TensorEntry>,
    header_bytes: u64,
    /// The element type of all tensors where there are no files.
    random: Option<DType>,
}

impl Checkpoint {
    /// Returns a checkpoint without files for weights that are random numbers: it has every tensor
    /// that it is asked for, of whatever shape, stored as `dtype`. [`Checkpoint::contains`] is
    /// false of all names.
    pub fn random(dtype: DType) -> Self {
        Checkpoint { random: Some(dtype), ..Checkpoint::default() }
    }

    /// Whether there are no files, and the weights are random numbers.
    pub fn is_random(&self) -> bool {
        self.random.is_some()
    }

    /// Reads the headers of the weights in `folder`.
    ///
    /// As in Transformers, `model.safetensors` is preferred to an index beside it.
    pub fn open(folder: &Folder) -> Result<Self> {
        if folder.contains(SINGLE_FILE)? {
            let mut checkpoint = Checkpoint::default();
            checkpoint.add_shard(folder, SINGLE_FILE, None)?;
            return Ok(checkpoint);
        }
        if let Some(json) = folder.read_optional_file(INDEX_FILE, MAX_INDEX_BYTES)? {
            return Self::open_sharded(folder, &ShardIndex::parse(&json)?);
        }
        for other in ["pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5"] {
            if folder.contains(other)? {
                return Err(Error::unsupported(format!(
                    "the folder has {other} but no {SINGLE_FILE}; only safetensors files are read"
                )));
            }
        }
        Err(Error::new(
            ErrorKind::NotFound,
            format!(
                "the folder {} has neither {SINGLE_FILE} nor {INDEX_FILE}",
                folder.path().display()
            ),
        ))
    }

    fn open_sharded(folder: &Folder, index: &ShardIndex) -> Result<Self> {
        let mut checkpoint = Checkpoint::default();
        for shard in &index.shards {
            checkpoint.add_shard(folder, shard, Some(index)).map_err(|e| match e.kind() {
                ErrorKind::NotFound => Error::new(
                    ErrorKind::NotFound,
                    format!("{INDEX_FILE} names a file that is missing: {}", e.message()),
                ),
                _ => e,
            })?;
        }
        let is_missing = |&(name, _): &(&String, _)| !checkpoint.tensors.contains_key(name);
        // The first by name, so that the same folder is refused in the same words each time.
        if let Some((tensor, &shard)) = index.tensors.iter().filter(is_missing).min() {
            let file = index.shards.get(shard).map_or("?", String::as_str);
            return Err(Error::invalid_file(format!(
                "{INDEX_FILE} says that {} is in {file}, but it is not",
                shown_name(tensor)
            )));
        }
        Ok(checkpoint)
    }

    /// Adds the tensors of the file `name`: those that the index assigns to it, and those that the
    /// index does not know at all.
    fn add_shard(&mut self, folder: &Folder, name: &str, index: Option<&ShardIndex>) -> Result<()> {
        let (file, stamp) = folder.open_file(name)?;
        let length = read_header_length(name, &file, stamp)?;
        self.header_bytes = self.header_bytes.saturating_add(length);
        if self.header_bytes > MAX_HEADER_BYTES_IN_ALL {
            return Err(Error::invalid_file(format!(
                "{name}: the headers of the files have more than {MAX_HEADER_BYTES_IN_ALL} bytes in all"
            )));
        }
        let header = read_header(name, &file, stamp)?;
        let shard = self.shards.len();
        // The first by name, as above.
        let mut known_before: Option<String> = None;
        for (tensor, info) in header {
            match index.and_then(|index| index.tensors.get(&tensor)) {
                Some(&home) if home != shard => continue,
                _ => {}
            }
            if self.tensors.len() == MAX_TENSORS_IN_ALL {
                return Err(Error::invalid_file(format!(
                    "the files have more than {MAX_TENSORS_IN_ALL} tensors in all"
                )));
            }
            self.tensors
                .try_reserve(1)
                .map_err(|_| Error::out_of_memory("the list of tensors", self.tensors.len()))?;
            match self.tensors.entry(tensor) {
                Entry::Vacant(vacant) => drop(vacant.insert(TensorEntry { shard, info })),
                Entry::Occupied(known) => {
                    if known_before.as_ref().is_none_or(|first| known.key() < first) {
                        known_before = Some(known.key().clone());
                    }
                }
            }
        }
        if let Some(tensor) = known_before {
            return Err(Error::invalid_file(format!(
                "{name}: tensor {} is in more than one file",
                shown_name(&tensor)
            )));
        }
        self.shards.push(Shard { name: name.to_owned(), stamp });
        Ok(())
    }

    /// Whether there is a tensor of that name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns the tensor `name` as it is, if there is one.
    pub fn raw(&self, name: &str) -> Option<RawTensor> {
        let entry = self.tensors.get(name)?;
        let file = self.shards.get(entry.shard).map_or("?", |shard| shard.name.as_str());
        Some(RawTensor {
            name: name.to_owned(),
            shard: entry.shard,
            file: file.to_owned(),
            dtype: entry.info.dtype,
            shape: entry.info.shape.clone(),
            file_offset: entry.info.file_offset,
            len_bytes: entry.info.len_bytes,
        })
    }

    /// Returns the name of the files in messages about missing tensors.
    pub(super) fn files_name(&self) -> &str {
        match self.shards.as_slice() {
            [one] => one.name.as_str(),
            _ => "the files of the model",
        }
    }

    /// Returns the tensor `name`, which must exist with this shape and a supported element type.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        if let Some(dtype) = self.random {
            let len_bytes = shape
                .iter()
                .try_fold(dtype.size_bytes() as u64, |len, &size| len.checked_mul(size as u64))
                .ok_or_else(|| Error::out_of_memory(name, usize::MAX))?;
            return Ok(Tensor {
                name: name.to_owned(),
                shard: 0,
                dtype,
                file_offset: 0,
                len_bytes,
            });
        }
        let entry = self.tensors.get(name).ok_or_else(|| {
            Error::invalid_file(format!("tensor {name} is missing from {}", self.files_name()))
        })?;
        let file = self.shards.get(entry.shard).map_or("?", |shard| shard.name.as_str());
        let same = entry.info.shape.len() == shape.len()
            && entry.info.shape.iter().zip(shape).all(|(&found, &wanted)| found == wanted as u64);
        if !same {
            return Err(Error::invalid_file(format!(
                "{file}: tensor {name} has shape {:?}, expected {shape:?} from config.json",
                entry.info.shape
            )));
        }
        let dtype = compute_dtype(entry.info.dtype).ok_or_else(|| {
            Error::unsupported(format!(
                "{file}: tensor {name} has element type {}, supported are F32, F16 and BF16",
                entry.info.dtype
            ))
        })?;
        Ok(Tensor {
            name: name.to_owned(),
            shard: entry.shard,
            dtype,
            file_offset: entry.info.file_offset,
            len_bytes: entry.info.len_bytes,
        })
    }

    /// Opens a shard again for reading its data, and makes sure that it is still the same file.
    pub fn reopen(&self, folder: &Folder, shard: usize) -> Result<File> {
        let shard = self
            .shards
            .get(shard)
            .ok_or_else(|| Error::internal(format!("there is no shard {shard}")))?;
        let (file, stamp) = folder.open_file(&shard.name)?;
        if stamp != shard.stamp {
            return Err(Error::new(
                ErrorKind::Io,
                format!("{} changed while the model was being loaded", shard.name),
            ));
        }
        Ok(file)
    }

    /// Returns the bytes of the files' tensors by element type, the largest first.
    pub fn bytes_by_dtype(&self) -> Vec<(StoredDType, u64)> {
        let mut sums: Vec<(StoredDType, u64)> = Vec::new();
        for entry in self.tensors.values() {
            match sums.iter_mut().find(|(dtype, _)| *dtype == entry.info.dtype) {
                Some((_, sum)) => *sum = sum.saturating_add(entry.info.len_bytes),
                None => sums.push((entry.info.dtype, entry.info.len_bytes)),
            }
        }
        sums.sort_by_key(|&(dtype, sum)| (std::cmp::Reverse(sum), dtype));
        sums
    }
}
