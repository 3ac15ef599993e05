//! The weight files of a model as a file of kept weights knows them again.
//!
//! A file with the same name, size, modification time and header is taken for the same, as make and other
//! tools do: a change of its numbers that leaves all four is not noticed. Archives keep whole seconds of a
//! time alone. Where the time alone differs, as after a copy that did not keep it, the checksums of the
//! tensors decide, for which the loader reads them.

use serde::{Deserialize, Serialize};

use super::checksum::Checksum;
use crate::error::{try_filled, try_with_capacity, Result};
use crate::model::checkpoint::Checkpoint;
use crate::model::folder::{io_error, Folder};
use crate::model::safetensors::{read_header_length, LENGTH_BYTES};
use std::os::unix::fs::FileExt;

/// A weight file of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SourceFile {
    /// The plain name of the file.
    pub name: String,
    /// The length in bytes.
    pub bytes: u64,
    /// The modification time: seconds since 1970, and nanoseconds.
    pub modified: (i64, i64),
    /// The checksum of the header: which tensors there are, and where.
    pub header_crc32: Checksum,
}

impl SourceFile {
    /// Whether the file was modified when `now` was, as far as both times tell.
    pub fn has_time_of(&self, now: &SourceFile) -> bool {
        let ((old_s, old_ns), (now_s, now_ns)) = (self.modified, now.modified);
        old_s == now_s && (old_ns == now_ns || old_ns == 0 || now_ns == 0)
    }

    /// Returns how `now` differs but for the time; `None` if it does not.
    pub fn difference(&self, now: &SourceFile) -> Option<String> {
        if self.name != now.name {
            return Some(format!("its first other file was {}, not {}", self.name, now.name));
        }
        if self.bytes != now.bytes {
            return Some(format!("{} had {} bytes, not {}", now.name, self.bytes, now.bytes));
        }
        let differs = self.header_crc32 != now.header_crc32;
        differs.then(|| format!("{} had another header", now.name))
    }
}

/// Describes the weight files of `checkpoint`.
pub(super) fn source_files(folder: &Folder, checkpoint: &Checkpoint) -> Result<Vec<SourceFile>> {
    let mut files = try_with_capacity(checkpoint.shards.len(), "the list of weight files")?;
    for (index, shard) in checkpoint.shards.iter().enumerate() {
        let file = checkpoint.reopen(folder, index)?;
        let len = read_header_length(&shard.name, &file, shard.stamp)?;
        // At most 16 MiB, so the conversion cannot fail.
        let mut header = try_filled(len as usize, 0_u8, "a safetensors header")?;
        file.read_exact_at(&mut header, LENGTH_BYTES).map_err(|e| io_error(&shard.name, &e))?;
        files.push(SourceFile {
            name: shard.name.clone(),
            bytes: shard.stamp.len,
            modified: shard.stamp.modified(),
            header_crc32: Checksum::of(&header),
        });
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_keep_whole_seconds() {
        let at = |s: i64, ns: i64| SourceFile {
            name: "model.safetensors".to_owned(),
            bytes: 100,
            modified: (s, ns),
            header_crc32: Checksum(7),
        };
        let same = [((5, 7), (5, 7)), ((5, 7), (5, 0)), ((5, 0), (5, 7)), ((0, 0), (0, 0))];
        let other = [((5, 7), (5, 8)), ((5, 7), (6, 0)), ((5, 0), (4, 0)), ((5, 7), (6, 7))];
        for ((old, now), is_same) in
            same.map(|t| (t, true)).into_iter().chain(other.map(|t| (t, false)))
        {
            assert_eq!(at(old.0, old.1).has_time_of(&at(now.0, now.1)), is_same, "{old:?} {now:?}");
        }
    }
}
