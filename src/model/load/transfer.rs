//! The transfer of the weights from the files to a device. They are cut into pieces in the order of
//! the files and packed into slots of host memory, which the device itself copies while the next
//! ones are filled.
//!
//! Each reading thread takes the next load of pieces when it is done with one: it takes the slot
//! that was used longest ago, waits for the copies from it, reads (and converts) the pieces into
//! it, queues their copies, and records a mark after them. Small tensors share a slot: each costs a
//! read and a copy, not a wait.
//!
//! The memory of the slots can be prepared before there is a device ([`Transfer::prepare`]).
//! Reading ahead into more memory does not pay: it delays the start of the driver as much, and
//! files in the system's cache are read about as fast as the bus takes them (measured on an H100
//! with 16 processors).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::geometry::{convert, Geometry};
use super::pieces::{push, Job, Loads, Piece};
use crate::backend::cpu::CpuBackend;
use crate::error::{Error, Result};
use crate::memory::{DType, HostBuffer, Pages};
use crate::model::checkpoint::Tensor;
use crate::model::load::files::WeightFiles;
use crate::model::load::loader::Loader;

/// The size of a slot in bytes: large enough for copies at the full speed of the bus, small enough
/// for a read to end in the caches of the core.
const SLOT_BYTES: usize = 2 << 20;
/// The number of slots per reader: one is filled while the other is copied.
const SLOTS_PER_READER: usize = 2;
/// The maximum number of threads that read: enough for the bus, with 64 MiB of pinned memory (which
/// is slow to pin).
const MAX_READERS: usize = 16;

/// The destination of weights. All methods may be called by several threads, each with slots of its
/// own.
pub(in crate::model) trait Sink: Sync {
    /// The place of a weight.
    type Place: Sync;
    /// Memory from which copies are made.
    type Slot: Send;

    /// Returns slots of `len_bytes` each that share this memory.
    fn slots(&self, memory: HostBuffer, len_bytes: usize) -> Result<Vec<Self::Slot>>;

    /// Returns the memory of a slot after all copies from it have ended.
    fn bytes<'s>(&self, slot: &'s mut Self::Slot) -> Result<&'s mut [u8]>;

    /// Queues a copy of the bytes `from` of a slot to a place, from its byte `offset` on.
    fn copy(
        &self,
        slot: &mut Self::Slot,
        from: Range<usize>,
        place: &Self::Place,
        offset: usize,
    ) -> Result<()>;

    /// Declares that no further copy is made of the slot's present contents.
    fn fence(&self, slot: &mut Self::Slot) -> Result<()>;
}

/// The tensors to read.
pub(in crate::model) struct Transfer<P> {
    jobs: Vec<Job<P>>,
    /// Element type on the device.
    dtype: DType,
    slot_bytes: usize,
    /// The jobs cut into pieces, and memory for the slots whose pages are already present.
    prepared: Option<(Loads, HostBuffer)>,
}

impl<P: Sync> Transfer<P> {
    /// Returns an empty transfer for places of element type `dtype`.
    pub fn new(dtype: DType) -> Self {
        Transfer { jobs: Vec::new(), dtype, slot_bytes: SLOT_BYTES, prepared: None }
    }

    /// Adds a tensor of a file. Its `rows` rows are those from `first_row` on of a weight of
    /// `geometry`.
    pub fn add(
        &mut self,
        source: &Tensor,
        rows: usize,
        first_row: usize,
        geometry: &Geometry,
        place: P,
    ) -> Result<()> {
        let job = Job::new(source, rows, first_row, geometry, place)?;
        push(&mut self.jobs, job)
    }

    /// Does the preparation that needs no device. Must be called after everything was added.
    pub fn prepare(&mut self, loader: &Loader<'_>) -> Result<()> {
        let all = Loads::cut(&mut self.jobs, self.dtype, self.slot_bytes)?;
        let mut memory = slot_memory(&all, loader.backend.num_threads())?;
        touch(loader.backend, &mut memory)?;
        self.prepared = Some((all, memory));
        Ok(())
    }

    /// Reads everything to its place; this thread calls `before` first. The last copies may still
    /// be in progress on return.
    pub fn run<S: Sink<Place = P>>(
        mut self,
        loader: &mut Loader<'_>,
        sink: &S,
        before: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        if self.prepared.is_none() {
            self.prepare(loader)?;
        }
        let (all, memory) = self.prepared.take().ok_or_else(lost)?;
        // The slot that was used longest ago comes first.
        let slots = Mutex::new(VecDeque::from(sink.slots(memory, all.slot_bytes)?));
        let (jobs, dtype) = (&self.jobs, self.dtype);
        let step = |files: &WeightFiles<'_>, index: usize| {
            let pieces = all.pieces_of(index);
            let slot = lock(&slots).pop_front();
            let mut slot = slot.ok_or_else(|| Error::internal("more readers than slots"))?;
            fill(pieces, jobs, dtype, files, sink.bytes(&mut slot)?)?;
            copy(pieces, jobs, dtype, sink, &mut slot)?;
            // This does not allocate: the slot came from there.
            lock(&slots).push_back(slot);
            let bytes = |piece: &Piece| {
                let row = jobs.get(piece.job).map_or(0, Job::row_from);
                ((piece.last - piece.first) * row) as u64
            };
            Ok(pieces.iter().map(bytes).sum())
        };
        loader.stream(all.loads.len(), MAX_READERS, before, &step)
    }
}

/// Allocates memory for the slots of `num_threads` threads.
fn slot_memory(all: &Loads, num_threads: usize) -> Result<HostBuffer> {
    let num_slots = (num_threads.min(MAX_READERS) * SLOTS_PER_READER).min(all.loads.len());
    let bytes = all.slot_bytes.checked_mul(num_slots);
    HostBuffer::zeroed(bytes.unwrap_or(usize::MAX), Pages::Huge)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the system provide the pages of `memory`, using all threads: a thread that touches a page
/// waits until it is cleared.
fn touch(backend: &CpuBackend, memory: &mut HostBuffer) -> Result<()> {
    const PAGE_BYTES: usize = 4096;
    let parts: Vec<_> = memory.as_bytes_mut().chunks_mut(SLOT_BYTES).map(Mutex::new).collect();
    backend.parallel_for(parts.len(), &|index| {
        if let Some(part) = parts.get(index) {
            let mut part = lock(part);
            part.chunks_mut(PAGE_BYTES).filter_map(|page| page.first_mut()).for_each(|b| *b = 0);
        }
    })
}

fn lost() -> Error {
    Error::internal("a piece of a weight file was lost")
}

/// Reads the pieces of one load into a slot.
fn fill<P>(
    pieces: &[Piece],
    jobs: &[Job<P>],
    dtype: DType,
    files: &WeightFiles<'_>,
    bytes: &mut [u8],
) -> Result<()> {
    for piece in pieces {
        let job = jobs.get(piece.job).ok_or_else(lost)?;
        let (from, to) = (job.row_from(), job.row_to(dtype));
        let (begin, len) = (piece.first * from, (piece.last - piece.first) * from);
        let target = piece.slot_offset..piece.slot_offset + (piece.last - piece.first) * to;
        let target = bytes.get_mut(target).ok_or_else(lost)?;
        let as_stored = job.source.dtype == dtype && cfg!(target_endian = "little");
        if as_stored && job.geometry.keeps_rows() {
            files.read_into(&job.source, begin, target)?;
        } else {
            files.with_bytes(&job.source, begin, len, |stored| {
                convert(stored, job.source.dtype, target, dtype, &job.geometry);
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// Queues the copies of the pieces of one load from their slot.
fn copy<S: Sink>(
    pieces: &[Piece],
    jobs: &[Job<S::Place>],
    dtype: DType,
    sink: &S,
    slot: &mut S::Slot,
) -> Result<()> {
    for piece in pieces {
        let job = jobs.get(piece.job).ok_or_else(lost)?;
        let to = job.row_to(dtype);
        let first_row = job.first_row + piece.first;
        // The rows follow each other without gaps in the slot.
        for (row, device_row, rows) in job.geometry.runs(first_row, job.first_row + piece.last) {
            let start = piece.slot_offset + (row - first_row) * to;
            sink.copy(slot, start..start + rows * to, &job.place, device_row * to)?;
        }
    }
    sink.fence(slot)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::checkpoint::Checkpoint;
    use crate::model::folder::Folder;
    use crate::model::load::heads::HeadSpacing;
    use crate::model::LoadOptions;
    use crate::ops::linear::{ShardAxis, ShardUnit};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    /// The memory of a fake device that copies as late as it may.
    type Memory = Arc<Mutex<Vec<u8>>>;

    struct Late {
        slots: AtomicUsize,
        fail_copy: Option<usize>,
        copies: AtomicUsize,
    }

    struct LateSlot {
        bytes: Vec<u8>,
        queued: Vec<(Range<usize>, Memory, usize)>,
        is_fenced: bool,
    }

    impl LateSlot {
        fn copy_all(&mut self) {
            for (from, memory, offset) in self.queued.drain(..) {
                let len = from.len();
                memory.lock().unwrap()[offset..offset + len].copy_from_slice(&self.bytes[from]);
            }
        }
    }

    impl Drop for LateSlot {
        fn drop(&mut self) {
            self.copy_all();
        }
    }

    impl Late {
        fn new() -> Self {
            Late { slots: AtomicUsize::new(0), fail_copy: None, copies: AtomicUsize::new(0) }
        }
    }

    impl Sink for Late {
        type Place = Memory;
        type Slot = LateSlot;

        fn slots(&self, memory: HostBuffer, len_bytes: usize) -> Result<Vec<LateSlot>> {
            let slots = memory.as_bytes().chunks(len_bytes.max(1)).map(|bytes| {
                assert_eq!(bytes.len(), len_bytes);
                LateSlot { bytes: bytes.to_vec(), queued: Vec::new(), is_fenced: true }
            });
            let slots: Vec<_> = slots.collect();
            self.slots.fetch_add(slots.len(), Ordering::Relaxed);
            Ok(slots)
        }

        fn bytes<'s>(&self, slot: &'s mut LateSlot) -> Result<&'s mut [u8]> {
            assert!(slot.is_fenced, "waiting without a fence is waiting for everything");
            slot.copy_all();
            Ok(&mut slot.bytes)
        }

        fn copy(
            &self,
            slot: &mut LateSlot,
            from: Range<usize>,
            place: &Memory,
            offset: usize,
        ) -> Result<()> {
            if Some(self.copies.fetch_add(1, Ordering::Relaxed)) == self.fail_copy {
                return Err(Error::internal("this copy fails"));
            }
            assert!(from.end <= slot.bytes.len());
            slot.is_fenced = false;
            slot.queued.push((from, place.clone(), offset));
            Ok(())
        }

        fn fence(&self, slot: &mut LateSlot) -> Result<()> {
            slot.is_fenced = true;
            Ok(())
        }
    }

    /// A folder that is removed when dropped.
    struct Files(std::path::PathBuf);

    impl Drop for Files {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// The shapes of the tests' weights, `(parts of rows, columns, shard axis)`.
    const WEIGHTS: [(&[usize], usize, ShardAxis); 8] = [
        (&[700], 24, ShardAxis::None),
        (&[24], 1, ShardAxis::None),
        (&[96, 48, 48], 24, ShardAxis::Out(ShardUnit::Head)),
        (&[96, 48, 48], 1, ShardAxis::Out(ShardUnit::Head)),
        (&[24], 96, ShardAxis::In(ShardUnit::Head)),
        (&[1], 1, ShardAxis::None),
        (&[40, 40], 24, ShardAxis::None),
        (&[24], 1, ShardAxis::None),
    ];

    fn value(index: usize) -> f32 {
        // These values are exact in every type.
        (index * 37 % 127) as f32 - 63.0
    }

    /// Writes one file with all weights, the last first.
    fn write(name: &str, is_f32: bool) -> Files {
        let dir = std::env::temp_dir().join(format!("xserv-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (mut header, mut data) = (serde_json::Map::new(), Vec::<u8>::new());
        for (weight, (parts, columns, _)) in WEIGHTS.iter().enumerate().rev() {
            for (part, rows) in parts.iter().enumerate() {
                let before: usize = parts[..part].iter().sum();
                let begin = data.len();
                for index in before * columns..(before + rows) * columns {
                    if is_f32 {
                        data.extend(value(index + weight).to_le_bytes());
                    } else {
                        data.extend(half::bf16::from_f32(value(index + weight)).to_le_bytes());
                    }
                }
                let dtype = if is_f32 { "F32" } else { "BF16" };
                header.insert(
                    format!("{weight}.{part}"),
                    serde_json::json!({
                        "dtype": dtype, "shape": [rows, columns], "data_offsets": [begin, data.len()]
                    }),
                );
            }
        }
        let header = serde_json::Value::Object(header).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        std::fs::write(dir.join("model.safetensors"), bytes).unwrap();
        Files(dir)
    }

    struct Case {
        /// Whether `prepare` is called before there is a device.
        prepare: bool,
        spacing: HeadSpacing,
        dtype: DType,
        map_files: bool,
        num_threads: usize,
        slot_bytes: usize,
    }

    /// Reads the weights and returns the memory of each.
    fn read(
        files: &Files,
        case: &Case,
        sink: &Late,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<Vec<Vec<u8>>> {
        let folder = Folder::open(&files.0)?;
        let checkpoint = Checkpoint::open(&folder)?;
        let backend = CpuBackend::new(case.num_threads)?;
        let options = LoadOptions {
            dtype: Some(case.dtype),
            map_files: case.map_files,
            ..LoadOptions::default()
        };
        let total = std::fs::metadata(files.0.join("model.safetensors")).unwrap().len();
        let mut loader =
            Loader::new(&folder, &checkpoint, &backend, case.dtype, &options, total, progress)?;
        let mut transfer = Transfer::new(case.dtype);
        transfer.slot_bytes = case.slot_bytes;
        let mut memories = Vec::new();
        for (weight, (parts, columns, shard)) in WEIGHTS.iter().enumerate() {
            let geometry = Geometry::new(parts.iter().sum(), *columns, *shard, case.spacing);
            let len = geometry.device_rows() * geometry.device_columns() * case.dtype.size_bytes();
            let memory: Memory = Arc::new(Mutex::new(vec![0; len]));
            let mut first = 0;
            for (part, rows) in parts.iter().enumerate() {
                let tensor = checkpoint.tensor(&format!("{weight}.{part}"), &[*rows, *columns])?;
                loader.files.open(&tensor)?;
                transfer.add(&tensor, *rows, first, &geometry, memory.clone())?;
                first += rows;
            }
            memories.push(memory);
        }
        if case.prepare {
            transfer.prepare(&loader)?;
            assert_eq!(sink.slots.load(Ordering::Relaxed), 0);
        }
        let mut calls = 0;
        let mut before = || {
            calls += 1;
            Ok(())
        };
        let done = transfer.run(&mut loader, sink, &mut before);
        assert_eq!(calls, 1);
        done?;
        Ok(memories.iter().map(|memory| memory.lock().unwrap().clone()).collect())
    }

    /// Returns what [`read`] must return, element by element.
    fn expected(case: &Case) -> Vec<Vec<u8>> {
        let place = |len: usize, is_axis: bool, index: usize| {
            if is_axis {
                (case.spacing.spaced(len), case.spacing.spaced_index(index))
            } else {
                (len, index)
            }
        };
        let mut all = Vec::new();
        for (weight, (parts, columns, shard)) in WEIGHTS.iter().enumerate() {
            let rows: usize = parts.iter().sum();
            let (device_rows, _) = place(rows, *shard == ShardAxis::Out(ShardUnit::Head), 0);
            let (device_columns, _) = place(*columns, *shard == ShardAxis::In(ShardUnit::Head), 0);
            let mut values = vec![0.0; device_rows * device_columns];
            for row in 0..rows {
                for column in 0..*columns {
                    let (_, to_row) = place(rows, *shard == ShardAxis::Out(ShardUnit::Head), row);
                    let (_, to_column) =
                        place(*columns, *shard == ShardAxis::In(ShardUnit::Head), column);
                    values[to_row * device_columns + to_column] =
                        value(row * columns + column + weight);
                }
            }
            all.push(match case.dtype {
                DType::F32 => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
                DType::F16 => {
                    values.iter().flat_map(|&x| half::f16::from_f32(x).to_ne_bytes()).collect()
                }
                DType::BF16 => {
                    values.iter().flat_map(|&x| half::bf16::from_f32(x).to_ne_bytes()).collect()
                }
            });
        }
        all
    }

    #[test]
    fn every_number_arrives_where_it_belongs() {
        for is_f32 in [false, true] {
            let files = write(&format!("transfer-{is_f32}"), is_f32);
            for dtype in [DType::BF16, DType::F32, DType::F16] {
                for (head_dim, stride) in [(48, 64), (48, 48)] {
                    // Less than a row, some rows, everything at once.
                    for slot_bytes in [64, 1000, 4096, 1 << 20] {
                        for (num_threads, map_files, prepare) in
                            [(1, false, false), (3, false, true), (3, true, false)]
                        {
                            let spacing = HeadSpacing { head_dim, stride };
                            let case = Case {
                                prepare,
                                spacing,
                                dtype,
                                map_files,
                                num_threads,
                                slot_bytes,
                            };
                            let sink = Late::new();
                            let got = read(&files, &case, &sink, &mut |_| true).unwrap();
                            let what = format!("{dtype} {stride} {slot_bytes} {num_threads}");
                            assert!(got == expected(&case), "{what}");
                            let slots = sink.slots.into_inner();
                            assert!((1..=2 * num_threads).contains(&slots), "{what}: {slots}");
                        }
                    }
                }
            }
        }
    }

    const CASE: Case = Case {
        prepare: false,
        spacing: HeadSpacing { head_dim: 48, stride: 48 },
        dtype: DType::BF16,
        map_files: false,
        num_threads: 3,
        slot_bytes: 1024,
    };

    #[test]
    fn progress_is_told_on_the_calling_thread_and_cancels() {
        let files = write("transfer-progress", false);
        let thread = std::thread::current().id();
        let mut seen = Vec::new();
        read(&files, &CASE, &Late::new(), &mut |fraction| {
            assert_eq!(std::thread::current().id(), thread);
            seen.push(fraction);
            true
        })
        .unwrap();
        assert!(seen.is_sorted() && seen[0] == 0.0, "{seen:?}");
        // The rest is the header.
        assert!(*seen.last().unwrap() > 0.9, "{seen:?}");
        for stop_at in 1..4 {
            let mut calls = 0;
            let error = read(&files, &Case { num_threads: 1, ..CASE }, &Late::new(), &mut |_| {
                calls += 1;
                calls < stop_at
            });
            assert_eq!(error.unwrap_err().kind(), crate::error::ErrorKind::Cancelled);
            assert_eq!(calls, stop_at);
        }
    }

    #[test]
    fn an_error_of_any_thread_ends_the_load() {
        let files = write("transfer-failure", false);
        let count = Late::new();
        read(&files, &CASE, &count, &mut |_| true).unwrap();
        for fail_copy in 0..count.copies.into_inner() {
            let sink = Late { fail_copy: Some(fail_copy), ..Late::new() };
            let error = read(&files, &CASE, &sink, &mut |_| true).unwrap_err();
            assert!(error.message().contains("this copy fails"), "{error}");
        }
        // A file that is cut while it is read.
        let path = files.0.join("model.safetensors");
        let mut calls = 0;
        let error = read(&files, &Case { num_threads: 1, ..CASE }, &Late::new(), &mut |_| {
            calls += 1;
            if calls == 2 {
                std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(2000).unwrap();
            }
            true
        });
        assert_eq!(error.unwrap_err().kind(), crate::error::ErrorKind::Io);
    }
}
