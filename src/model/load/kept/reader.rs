//! Reads a file of kept weights.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::checksum::{Checksum, PieceSums};
use super::description::{Description, Quantised};
use super::source::SourceFile;
use super::wanted::{Wanted, WantedTensor};
use crate::error::{try_filled, Error, ErrorKind, Result};
use crate::model::checkpoint::Tensor;
use crate::model::folder::{io_error, open_regular, shown_name, FileStamp};
use crate::model::safetensors::{parse_header, read_header_length, TensorMap, LENGTH_BYTES};
use crate::ops::quantised::{Code, RowOut};

/// What messages call the file: those of this module are given its path as context.
const THE_FILE: &str = "the file";

/// A file of kept weights that fits the load.
pub(in crate::model::load) struct KeptFile {
    file: File,
    stamp: FileStamp,
    /// By the name of the tensor in the model's files.
    tensors: HashMap<String, KeptTensor>,
    /// Its name in messages.
    shown: String,
}

/// What is kept of a tensor.
pub(in crate::model::load) struct KeptTensor {
    out_features: usize,
    in_features: usize,
    code: Code,
    scales: Rows,
    codes: Rows,
    zeros: Option<Rows>,
    /// The checksum that the tensor of the model must have, if the time of its file does not vouch for it.
    source: Option<Checksum>,
}

/// The rows of a tensor of the file.
struct Rows {
    name: String,
    offset: u64,
    row_bytes: usize,
    checksum: Checksum,
}

/// The checksums of what has been read of a tensor.
pub(in crate::model::load) struct KeptSums {
    scales: PieceSums,
    codes: PieceSums,
    zeros: Option<PieceSums>,
}

impl Rows {
    fn find(wanted: &WantedTensor, header: &mut TensorMap, checksum: Checksum) -> Result<Self> {
        let name = wanted.name.as_str();
        let found = header.remove(name);
        let found = found.ok_or_else(|| Error::invalid_file(format!("the file lacks {name}")))?;
        if found.dtype != wanted.dtype || found.shape != wanted.shape.map(|n| n as u64) {
            return Err(Error::invalid_file(format!(
                "{name} is {} {:?}, expected {} {:?}",
                found.dtype, found.shape, wanted.dtype, wanted.shape
            )));
        }
        let offset = found.file_offset;
        Ok(Rows { name: wanted.name.clone(), offset, row_bytes: wanted.row_bytes, checksum })
    }

    /// Reads rows from `first` on into `out`, which they fill, and fills in their checksum.
    fn read(&self, file: &File, first: usize, out: &mut [u8], sums: &PieceSums) -> Result<()> {
        let begin = first.saturating_mul(self.row_bytes);
        file.read_exact_at(out, self.offset.saturating_add(begin as u64)).map_err(|e| {
            match e.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    Error::new(ErrorKind::Io, "the file was cut off while it was being loaded")
                }
                _ => io_error(THE_FILE, &e),
            }
        })?;
        sums.set(begin, out);
        Ok(())
    }

    fn sums(&self, num_rows: usize, rows_at_once: usize) -> Result<PieceSums> {
        let bytes = |rows: usize| rows.saturating_mul(self.row_bytes);
        PieceSums::new(bytes(num_rows), bytes(rows_at_once))
    }

    fn check(&self, sums: &PieceSums) -> Result<()> {
        if sums.total() == self.checksum {
            return Ok(());
        }
        Err(Error::invalid_file(format!(
            "the file is damaged: the checksum of {} fails",
            self.name
        )))
    }
}

impl KeptTensor {
    fn find(
        wanted: &Wanted,
        described: &Quantised,
        header: &mut TensorMap,
        is_known: bool,
    ) -> Result<Self> {
        let mut find = |wanted: &WantedTensor, sum| Rows::find(wanted, header, sum);
        let zeros = wanted.zeros();
        Ok(KeptTensor {
            out_features: wanted.out_features,
            in_features: wanted.in_features,
            code: wanted.format.code,
            scales: find(&wanted.scales(), described.scales_crc32)?,
            codes: find(&wanted.codes(), described.codes_crc32)?,
            zeros: zeros.map(|zeros| find(&zeros, described.zeros_crc32)).transpose()?,
            source: (!is_known).then_some(described.source_crc32),
        })
    }

    /// Whether the file of the model that the tensor is in has another time than when it was kept, so that
    /// its checksum decides.
    pub fn is_in_doubt(&self) -> bool {
        self.source.is_some()
    }

    /// Refuses a tensor of the model, read whole, that has another checksum than what was kept.
    pub fn check_source(&self, source: &Tensor, sums: &PieceSums) -> Result<()> {
        if self.source.is_none_or(|kept| kept == sums.total()) {
            return Ok(());
        }
        Err(Error::invalid_file(format!(
            "the file was made from another model: {} had other numbers",
            source.name
        )))
    }

    /// Returns the bytes of the scales of a row.
    pub fn scales_bytes(&self) -> usize {
        self.scales.row_bytes
    }

    /// Returns the checksums of the tensor when `rows_at_once` rows are read at once.
    pub fn sums(&self, rows_at_once: usize) -> Result<KeptSums> {
        let sums = |rows: &Rows| rows.sums(self.out_features, rows_at_once);
        Ok(KeptSums {
            scales: sums(&self.scales)?,
            codes: sums(&self.codes)?,
            zeros: self.zeros.as_ref().map(sums).transpose()?,
        })
    }

    /// Whether rows that were read are such as the quantiser writes.
    fn are_sound(&self, rows: &RowOut<'_>) -> bool {
        let has_half_byte = self.code.bits() == 4 && self.in_features % 2 == 1;
        let half_bytes_are_zero = || {
            let mut rows = rows.codes.chunks_exact(self.codes.row_bytes.max(1));
            rows.all(|row| row.last().is_none_or(|&last| last < 16))
        };
        let zeros_are_codes =
            self.code.bits() == 8 || rows.zeros.iter().fold(true, |all, &zero| all & (zero < 16));
        let scales_are_numbers =
            rows.scales.iter().fold(true, |all, scale| all & scale.is_finite());
        scales_are_numbers && zeros_are_codes && (!has_half_byte || half_bytes_are_zero())
    }
}

/// A file that was opened, and its header.
struct Opened {
    file: File,
    stamp: FileStamp,
    header: Vec<u8>,
    places: TensorMap,
}

/// Opens the file at `path` and reads its header. Returns `None` if there is none.
fn open_file(path: &Path) -> Result<Option<Opened>> {
    let is_absent = |e: &std::io::Error| e.kind() == std::io::ErrorKind::NotFound;
    let canonical = match path.canonicalize() {
        Err(error) if is_absent(&error) => {
            return match path.symlink_metadata() {
                Err(error) if is_absent(&error) => Ok(None),
                Err(error) => Err(io_error(THE_FILE, &error)),
                Ok(_) => Err(Error::invalid_file("the file is a link to one that is not there")),
            }
        }
        canonical => canonical.map_err(|e| io_error(THE_FILE, &e))?,
    };
    let (file, stamp) = open_regular(&canonical, THE_FILE)?;
    let header_len = read_header_length(THE_FILE, &file, stamp)?;
    // At most 16 MiB, so the conversion cannot fail.
    let mut header = try_filled(header_len as usize, 0_u8, "a safetensors header")?;
    file.read_exact_at(&mut header, LENGTH_BYTES).map_err(|e| io_error(THE_FILE, &e))?;
    let places = parse_header(&header, stamp.len - LENGTH_BYTES - header_len)?;
    Ok(Some(Opened { file, stamp, header, places }))
}

/// Reads the description of the file at `path`. Returns `None` if there is no file.
pub(super) fn read_description(path: &Path) -> Result<Option<Description>> {
    open_file(path)?.map(|opened| Description::parse(&opened.header)).transpose()
}

impl KeptFile {
    /// Opens the file at `path`, which must hold what is wanted, made from `sources`. Returns `None` if there
    /// is none.
    pub(super) fn open(
        path: &Path,
        shown: &str,
        wanted: &[Wanted],
        sources: &[SourceFile],
    ) -> Result<Option<Self>> {
        let Some(Opened { file, stamp, header, mut places }) = open_file(path)? else {
            return Ok(None);
        };
        let description = Description::parse(&header)?;
        let described = description.fit(wanted, sources)?;
        let mut tensors = HashMap::new();
        let room = tensors.try_reserve(wanted.len());
        room.map_err(|_| Error::out_of_memory("the list of kept weights", wanted.len()))?;
        for (wanted, described) in wanted.iter().zip(described) {
            let shard = wanted.source.shard;
            let is_known = match (description.source.get(shard), sources.get(shard)) {
                (Some(old), Some(now)) => old.has_time_of(now),
                _ => false,
            };
            let tensor = KeptTensor::find(wanted, described, &mut places, is_known)?;
            tensors.insert(wanted.source.name.clone(), tensor);
        }
        if let Some(name) = places.keys().min() {
            return Err(Error::invalid_file(format!(
                "the file has a tensor {} too many",
                shown_name(name)
            )));
        }
        Ok(Some(KeptFile { file, stamp, tensors, shown: shown.to_owned() }))
    }

    /// Returns what is kept of a tensor of the model.
    pub fn tensor(&self, source: &Tensor) -> Result<&KeptTensor> {
        let found = self.tensors.get(&source.name);
        found.ok_or_else(|| Error::internal(format!("{} was not planned to be kept", source.name)))
    }

    /// Returns the name of the file in messages.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// Fails if the file has changed since its header was read: what was read of it may then be of two
    /// states.
    pub fn check_unchanged(&self) -> Result<()> {
        self.stamp.check(&self.file, &self.shown)
    }

    /// Reads rows from `first` on, as many as `out` has, and fills in their checksums. `scales` is memory for
    /// them as they are stored. Returns whether the rows are such as the quantiser writes: a file whose
    /// checksums hold may have others all the same.
    pub fn read_rows(
        &self,
        tensor: &KeptTensor,
        first: usize,
        out: &mut RowOut<'_>,
        scales: &mut [u8],
        sums: &KeptSums,
    ) -> Result<bool> {
        tensor.codes.read(&self.file, first, out.codes, &sums.codes)?;
        tensor.scales.read(&self.file, first, scales, &sums.scales)?;
        for (to, from) in out.scales.iter_mut().zip(scales.chunks_exact(2)) {
            *to = match *from {
                [low, high] => half::bf16::from_le_bytes([low, high]).to_f32(),
                _ => 0.0,
            };
        }
        if let (Some(zeros), Some(sums)) = (&tensor.zeros, &sums.zeros) {
            zeros.read(&self.file, first, out.zeros, sums)?;
        }
        Ok(tensor.are_sound(out))
    }

    /// Refuses a tensor whose checksums fail, or of which a row is not `sound`.
    pub fn check(&self, tensor: &KeptTensor, sums: &KeptSums, sound: bool) -> Result<()> {
        tensor.codes.check(&sums.codes)?;
        tensor.scales.check(&sums.scales)?;
        if let (Some(zeros), Some(sums)) = (&tensor.zeros, &sums.zeros) {
            zeros.check(sums)?;
        }
        if sound {
            return Ok(());
        }
        Err(Error::invalid_file(format!(
            "{} or what belongs to it is not what xserv writes: a scale that is no number, a zero or a code \
             out of its range",
            tensor.codes.name
        )))
    }
}
