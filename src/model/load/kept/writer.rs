//! Writes a file of kept weights: beside its place under another name, which becomes its own when all is
//! there. So nobody sees half a file, and of several loads that make it at once each succeeds.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::{json, Map, Value};

use super::checksum::{Checksum, PieceSums};
use super::description::{Description, Quantised, KEY, VERSION};
use super::source::SourceFile;
use super::wanted::{Wanted, WantedTensor};
use crate::error::{check_room, try_with_capacity, Error, ErrorKind, Result};
use crate::model::checkpoint::Tensor;
use crate::model::safetensors::{LENGTH_BYTES, MAX_HEADER_BYTES};
use crate::ops::quantised::RowOut;

/// More temporary names than loads make one file at once, and killed ones leave behind.
const MAX_NAMES: usize = 1000;
/// More bytes than the header takes for a tensor, besides its name.
const HEADER_BYTES_EACH: usize = 1024;
/// The names of a tensor in the header: its own, and one for each of the three that are kept.
const NAMES_EACH: usize = 4;

/// The copies of the header that are in memory at once while it is written.
const HEADER_COPIES: usize = 4;

/// A file of kept weights while it is made.
pub(in crate::model::load) struct KeptWriter {
    file: File,
    /// Declared after the file.
    temporary: Temporary,
    path: PathBuf,
    /// Its name in messages.
    shown: String,
    /// The bytes of memory that writing the header takes, at most.
    header_room: usize,
    /// The offset of the data.
    data_begin: u64,
    /// The places of the tensors, by their names in the model's files.
    places: HashMap<String, Place>,
    /// The header but for the description.
    tensors: Map<String, Value>,
    description: Mutex<Description>,
    /// Whether each tensor of the description is written.
    done: Vec<AtomicBool>,
}

/// The name of an unfinished file, which goes with it.
struct Temporary {
    path: PathBuf,
    /// Whether the file has been renamed, so that the name may be another's by now.
    is_renamed: AtomicBool,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // Nothing can be done where it fails; a later load takes another name.
        if !self.is_renamed.load(Ordering::Relaxed) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The place of what is kept of a tensor.
struct Place {
    /// The position in the description.
    index: usize,
    out_features: usize,
    scales: Rows,
    codes: Rows,
    zeros: Option<Rows>,
}

/// Rows in the data.
struct Rows {
    offset: u64,
    row_bytes: usize,
}

/// The checksums of what is read and written of a tensor.
pub(in crate::model::load) struct WrittenSums {
    scales: PieceSums,
    codes: PieceSums,
    zeros: Option<PieceSums>,
}

/// Gives tensors their places in the data, one after the other.
struct Layout {
    end: u64,
    tensors: Map<String, Value>,
}

impl Layout {
    fn add(&mut self, tensor: &WantedTensor) -> Result<Rows> {
        let begin = self.end;
        let end = begin.checked_add(tensor.len_bytes()?);
        self.end = end.ok_or_else(|| Error::out_of_memory(&tensor.name, usize::MAX))?;
        let entry = json!({
            "dtype": tensor.dtype.to_string(),
            "shape": tensor.shape,
            "data_offsets": [begin, self.end],
        });
        self.tensors.insert(tensor.name.clone(), entry);
        Ok(Rows { offset: begin, row_bytes: tensor.row_bytes })
    }
}

impl Rows {
    fn sums(&self, num_rows: usize, rows_at_once: usize) -> Result<PieceSums> {
        let bytes = |rows: usize| rows.saturating_mul(self.row_bytes);
        PieceSums::new(bytes(num_rows), bytes(rows_at_once))
    }
}

/// Returns the error of a file that cannot be written.
fn write_error(error: &io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("the file cannot be written: {error}"))
}

/// Makes a file beside `path` under a name that no other has.
fn make_temporary(path: &Path) -> Result<(File, Temporary)> {
    let Some(name) = path.file_name() else {
        return Err(Error::invalid_argument("the path does not end in the name of a file"));
    };
    for number in 0..MAX_NAMES {
        let mut temporary = OsString::from(name);
        temporary.push(format!(".{number}.tmp"));
        let temporary = path.with_file_name(temporary);
        let made = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .custom_flags(libc::O_CLOEXEC)
            .open(&temporary);
        match made {
            Ok(file) => {
                let is_renamed = AtomicBool::new(false);
                return Ok((file, Temporary { path: temporary, is_renamed }));
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(write_error(&error)),
        }
    }
    Err(Error::new(
        ErrorKind::Io,
        format!(
            "{MAX_NAMES} files that end in .tmp, of loads that were killed, lie beside the file"
        ),
    ))
}

impl KeptWriter {
    /// Begins the file that `path` will name.
    pub(super) fn new(
        path: &Path,
        shown: &str,
        wanted: &[Wanted],
        source: Vec<SourceFile>,
        is_tied: Option<bool>,
    ) -> Result<Self> {
        let names = wanted.iter().map(|wanted| wanted.source.name.len());
        let header = names.map(|name| NAMES_EACH * name + HEADER_BYTES_EACH).sum::<usize>();
        let header_room = header.saturating_mul(HEADER_COPIES);
        check_room(header_room, "the header of kept weights")?;
        // Scales come first: so they lie at multiples of their size.
        let mut layout = Layout { end: 0, tensors: Map::new() };
        let mut scales = try_with_capacity(wanted.len(), "the header of kept weights")?;
        for wanted in wanted {
            scales.push(layout.add(&wanted.scales())?);
        }
        let mut places = HashMap::new();
        let room = places.try_reserve(wanted.len());
        room.map_err(|_| Error::out_of_memory("the header of kept weights", wanted.len()))?;
        for ((index, wanted), scales) in wanted.iter().enumerate().zip(scales) {
            let codes = layout.add(&wanted.codes())?;
            let zeros = wanted.zeros().map(|zeros| layout.add(&zeros)).transpose()?;
            let out_features = wanted.out_features;
            let place = Place { index, out_features, scales, codes, zeros };
            places.insert(wanted.source.name.clone(), place);
        }
        let tensors = wanted.iter().map(Quantised::of).collect();
        let description =
            Description { version: VERSION, source, tensors, output_is_embedding: is_tied };
        let header_len = header_json(&layout.tensors, &description)?.len() as u64;
        let mut done = try_with_capacity(wanted.len(), "the header of kept weights")?;
        done.resize_with(wanted.len(), AtomicBool::default);
        let (file, temporary) = make_temporary(path)?;
        let data_begin = LENGTH_BYTES + header_len;
        // What is not written yet reads as zeros, also if this load is killed.
        file.set_len(data_begin.saturating_add(layout.end)).map_err(|e| write_error(&e))?;
        Ok(KeptWriter {
            file,
            temporary,
            path: path.to_owned(),
            shown: shown.to_owned(),
            header_room,
            data_begin,
            places,
            tensors: layout.tensors,
            description: Mutex::new(description),
            done,
        })
    }

    /// Returns the name of the file in messages.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    fn place(&self, source: &Tensor) -> Result<&Place> {
        let found = self.places.get(&source.name);
        found.ok_or_else(|| Error::internal(format!("{} was not planned to be kept", source.name)))
    }

    fn description(&self) -> MutexGuard<'_, Description> {
        self.description.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the checksums of what is kept of a tensor when `rows_at_once` rows are written at once.
    pub fn sums(&self, source: &Tensor, rows_at_once: usize) -> Result<WrittenSums> {
        let place = self.place(source)?;
        let sums = |rows: &Rows| rows.sums(place.out_features, rows_at_once);
        Ok(WrittenSums {
            scales: sums(&place.scales)?,
            codes: sums(&place.codes)?,
            zeros: place.zeros.as_ref().map(sums).transpose()?,
        })
    }

    /// Writes rows from `first` on, and fills in their checksums.
    pub fn write_rows(
        &self,
        source: &Tensor,
        first: usize,
        rows: &RowOut<'_>,
        sums: &WrittenSums,
    ) -> Result<()> {
        let place = self.place(source)?;
        let write = |to: &Rows, bytes: &[u8], sums: &PieceSums| {
            let begin = first.saturating_mul(to.row_bytes);
            sums.set(begin, bytes);
            let offset = self.data_begin + to.offset + begin as u64;
            self.file.write_all_at(bytes, offset).map_err(|e| write_error(&e))
        };
        let mut scales = try_with_capacity(2 * rows.scales.len(), "the scales of kept weights")?;
        // Scales are numbers of bf16.
        scales.extend(rows.scales.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()));
        write(&place.scales, &scales, &sums.scales)?;
        write(&place.codes, rows.codes, &sums.codes)?;
        match (&place.zeros, &sums.zeros) {
            (Some(zeros), Some(sums)) => write(zeros, rows.zeros, sums),
            _ => Ok(()),
        }
    }

    /// Notes that all rows of a tensor are written, with the checksum of what they were made from.
    pub fn done(&self, source: &Tensor, read: &PieceSums, written: &WrittenSums) -> Result<()> {
        let place = self.place(source)?;
        let mut description = self.description();
        if let Some(tensor) = description.tensors.get_mut(place.index) {
            tensor.source_crc32 = read.total();
            tensor.scales_crc32 = written.scales.total();
            tensor.codes_crc32 = written.codes.total();
            tensor.zeros_crc32 =
                written.zeros.as_ref().map_or(Checksum::default(), PieceSums::total);
        }
        if let Some(done) = self.done.get(place.index) {
            done.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Whether all rows of a tensor are written.
    pub fn is_done(&self, source: &Tensor) -> bool {
        let done = self.place(source).ok().and_then(|place| self.done.get(place.index));
        done.is_some_and(|done| done.load(Ordering::Relaxed))
    }

    /// Writes the header, makes sure that everything is on the disk, and gives the file its name.
    pub fn finish(&self) -> Result<()> {
        if !self.done.iter().all(|done| done.load(Ordering::Relaxed)) {
            return Err(Error::internal("a tensor is missing from the kept weights"));
        }
        // Memory may have become short since it was last asked for.
        check_room(self.header_room, "the header of kept weights")?;
        let header = header_json(&self.tensors, &self.description())?;
        if LENGTH_BYTES + header.len() as u64 != self.data_begin {
            return Err(Error::internal("the header of kept weights has another length"));
        }
        let mut bytes = try_with_capacity(header.len() + 8, "the header of kept weights")?;
        bytes.extend((header.len() as u64).to_le_bytes());
        bytes.extend(header.into_bytes());
        self.file.write_all_at(&bytes, 0).map_err(|e| write_error(&e))?;
        self.file.sync_all().map_err(|e| write_error(&e))?;
        match give_name(&self.temporary.path, &self.path, hard_link)? {
            Naming::Linked => {}
            Naming::Renamed => self.temporary.is_renamed.store(true, Ordering::Relaxed),
            Naming::Taken => return Ok(()),
        }
        // The name is on the disk when its folder is. Some file systems refuse that, and the file is whole
        // either way.
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let _ = File::open(parent.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all());
        Ok(())
    }
}

/// How a file got its name.
#[derive(Debug, PartialEq)]
enum Naming {
    /// It has both names.
    Linked,
    /// It has the new name alone.
    Renamed,
    /// It has not: another load was faster.
    Taken,
}

fn hard_link(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::hard_link(from, to)
}

/// Gives the file `from` the name `to`, unless a file has it. `link` makes hard links.
fn give_name(
    from: &Path,
    to: &Path,
    link: impl Fn(&Path, &Path) -> io::Result<()>,
) -> Result<Naming> {
    match link(from, to) {
        Ok(()) => return Ok(Naming::Linked),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(Naming::Taken),
        // A file system without links. A renamed file would take the place of another.
        Err(_) if to.symlink_metadata().is_ok() => return Ok(Naming::Taken),
        Err(_) => {}
    }
    // One that has come since is as whole as this one.
    std::fs::rename(from, to).map_err(|e| write_error(&e))?;
    Ok(Naming::Renamed)
}

/// Returns the JSON of a header. Its length depends on no checksum.
fn header_json(tensors: &Map<String, Value>, description: &Description) -> Result<String> {
    let bad =
        |e: serde_json::Error| Error::internal(format!("a header that cannot be written: {e}"));
    let description = serde_json::to_string(description).map_err(bad)?;
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({ KEY: description }));
    header.extend(tensors.iter().map(|(name, entry)| (name.clone(), entry.clone())));
    let mut text = serde_json::to_string(&header).map_err(bad)?;
    // As the format's own writer aligns the data.
    while !text.len().is_multiple_of(8) {
        text.push(' ');
    }
    if text.len() as u64 > MAX_HEADER_BYTES {
        return Err(Error::unsupported("the header of the kept weights would be too long"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that goes with its contents.
    struct Folder(PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_name_is_given_with_links_or_without_and_never_taken_from_another() {
        let name = format!("xserv-kept-name-{}", std::process::id());
        let folder = Folder(std::env::temp_dir().join(name));
        std::fs::create_dir(&folder.0).expect("a folder");
        let (from, to) = (folder.0.join("from"), folder.0.join("to"));
        let refused = |_: &Path, _: &Path| Err(io::Error::from_raw_os_error(libc::EPERM));
        let exists = |path: &Path| path.symlink_metadata().is_ok();
        let read = |path: &Path| std::fs::read(path).expect("a file");

        std::fs::write(&from, "first").expect("written");
        assert_eq!(give_name(&from, &to, refused).expect("renamed"), Naming::Renamed);
        assert!(!exists(&from) && read(&to) == b"first");
        // Without links and with them.
        std::fs::write(&from, "second").expect("written");
        assert_eq!(give_name(&from, &to, refused).expect("taken"), Naming::Taken);
        assert_eq!(give_name(&from, &to, hard_link).expect("taken"), Naming::Taken);
        assert!(exists(&from) && read(&to) == b"first");
        std::fs::remove_file(&to).expect("removed");
        assert_eq!(give_name(&from, &to, hard_link).expect("linked"), Naming::Linked);
        assert!(exists(&from) && read(&to) == b"second");
        let error =
            give_name(&from, &folder.0.join("no/such/name"), refused).expect_err("no folder");
        assert!(error.kind() == ErrorKind::Io && exists(&from), "{error}");
    }
}
