//! The CPU: its instruction set, chosen at run time, and the thread pool.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_rows;
pub(crate) mod dot;
pub(crate) mod exponential;
mod isa;
pub(crate) mod math;
mod pool;
pub(crate) mod portable;
pub(crate) mod simd;
pub(crate) mod streaming;
pub(crate) mod tile;
pub(crate) mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86;
#[cfg(target_arch = "x86_64")]
mod x86_bf16;
#[cfg(target_arch = "x86_64")]
mod x86_dot;

use crate::error::{Error, Result};
use dot::DotKernel;
pub use isa::Isa;
pub use pool::MAX_THREADS;
use portable::{Emulated, Portable};
use simd::{Bf16Kernel, Kernel, TileKernel};
pub use streaming::Streaming;

/// Below this many elements an elementwise operator stays on the calling thread: waking another
/// core and moving the lines there costs more than the work.
const PARALLEL_ELEMENTS: usize = 32 * 1024;

/// Runs operators on this machine's cores. Everything that computes on them shares it.
pub struct CpuBackend {
    isa: Isa,
    has_byte_dot: bool,
    streaming: Streaming,
    name: String,
    pool: pool::Pool,
}

impl CpuBackend {
    /// Makes a backend with `num_threads` threads, of which the calling thread is one, and the best
    /// instruction set of this machine.
    pub fn new(num_threads: usize) -> Result<Self> {
        Self::with_isa(num_threads, Isa::detect())
    }

    /// Makes a backend with a given instruction set; an error if this machine does not support it.
    pub fn with_isa(num_threads: usize, isa: Isa) -> Result<Self> {
        if !isa.is_supported() {
            return Err(Error::unsupported(format!(
                "this machine does not support {}",
                isa.name()
            )));
        }
        let pool = pool::Pool::new(num_threads)?;
        let plural = if num_threads == 1 { "" } else { "s" };
        let name = format!("cpu ({}, {num_threads} thread{plural})", isa.name());
        let (has_byte_dot, streaming) = (isa.has_byte_dot(), Streaming::detect());
        Ok(CpuBackend { isa, has_byte_dot, streaming, name, pool })
    }

    /// Returns the backend without the instructions that multiply bytes, which some machines add to
    /// the instruction set. Results are the same.
    pub fn without_byte_dot(self) -> Self {
        CpuBackend { has_byte_dot: false, ..self }
    }

    /// Returns the backend with the prefetching of another processor. Results are the same.
    pub fn with_streaming(self, streaming: Streaming) -> Self {
        CpuBackend { streaming, ..self }
    }

    /// Returns the number of threads that compute, the calling one included.
    pub fn num_threads(&self) -> usize {
        self.pool.num_threads()
    }

    /// Returns the instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Whether bf16 is multiplied by bf16 instructions rather than widened to f32.
    pub(crate) fn has_native_bf16(&self) -> bool {
        self.isa.has_native_bf16()
    }

    /// Whether bf16 is multiplied in tiles of 16 rows by 16 columns.
    pub(crate) fn has_tiles(&self) -> bool {
        self.isa.has_tiles()
    }

    /// Returns how kernels fetch a matrix of which they have few rows.
    pub(crate) fn streaming(&self) -> Streaming {
        self.streaming
    }

    /// Returns a name for people, such as `cpu (avx512-bf16, 2 threads)`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Calls `task` with each of `0..num_tasks`, on all threads, in no given order, and returns
    /// when all are done. A panic in a task ends the job and becomes an internal error. May be
    /// called from several threads (they take turns) and from inside a task (then it runs on that
    /// thread).
    pub fn parallel_for(&self, num_tasks: usize, task: &(dyn Fn(usize) + Sync)) -> Result<()> {
        self.pool.parallel_for(num_tasks, task)
    }

    /// Runs `main` on this thread and, at the same time, `helper` on those of the other threads
    /// that are idle: up to `num_threads() - 1` calls of it, each with a number of its own,
    /// possibly none. Returns when `main` and all helpers that have begun are done. A panic in any
    /// becomes an internal error. `main` must not use this backend.
    pub fn with_helpers(
        &self,
        helper: &(dyn Fn(usize) + Sync),
        main: &mut dyn FnMut(),
    ) -> Result<()> {
        self.pool.with_helpers(helper, main)
    }

    /// Cuts `data`, rows of `row_len` elements, into runs of whole rows and calls `task` with the
    /// first row's number and the rows of each run: in parallel when the data is large, on this
    /// thread alone when it is small.
    pub(crate) fn parallel_rows<T: Send>(
        &self,
        data: &mut [T],
        row_len: usize,
        task: impl Fn(usize, &mut [T]) + Sync,
    ) -> Result<()> {
        if row_len == 0 || data.is_empty() {
            return Ok(());
        }
        let num_rows = data.len() / row_len;
        let runs = (data.len() / PARALLEL_ELEMENTS).min(num_rows).min(4 * self.num_threads());
        self.parallel_runs(data, row_len, runs, task)
    }

    /// Does as [`Self::parallel_rows`], with a run for each row however short it is: for work that has
    /// nothing to do with the length of rows, and takes longer for some than for others.
    pub(crate) fn parallel_each_row<T: Send>(
        &self,
        data: &mut [T],
        row_len: usize,
        task: impl Fn(usize, &mut [T]) + Sync,
    ) -> Result<()> {
        let runs = data.len().checked_div(row_len).unwrap_or_default();
        match runs {
            0 => Ok(()),
            _ => self.parallel_runs(data, row_len, runs, task),
        }
    }

    fn parallel_runs<T: Send>(
        &self,
        data: &mut [T],
        row_len: usize,
        runs: usize,
        task: impl Fn(usize, &mut [T]) + Sync,
    ) -> Result<()> {
        let num_rows = data.len() / row_len;
        if runs <= 1 || self.num_threads() == 1 {
            task(0, data);
            return Ok(());
        }
        let start = SendPointer(data.as_mut_ptr());
        self.parallel_for(runs, &|run| {
            let first = num_rows * run / runs;
            let end = num_rows * (run + 1) / runs;
            // SAFETY: rows [first, end) lie inside `data`; the ranges of different runs do not
            // overlap and each run is given out once, while `data` is borrowed by this call.
            let rows = unsafe {
                std::slice::from_raw_parts_mut(
                    start.get().add(first * row_len),
                    (end - first) * row_len,
                )
            };
            task(first, rows);
        })
    }

    /// Cuts tokens `0..num_tokens`, of `row_len` elements each, into runs and calls `task` with
    /// each: in parallel when there is much to do, on this thread alone when there is little.
    pub(crate) fn parallel_tokens(
        &self,
        num_tokens: usize,
        row_len: usize,
        task: impl Fn(std::ops::Range<usize>) + Sync,
    ) -> Result<()> {
        let runs = self.runs_of(num_tokens, row_len);
        if runs <= 1 {
            task(0..num_tokens);
            return Ok(());
        }
        self.parallel_for(runs, &|run| {
            task(num_tokens * run / runs..num_tokens * (run + 1) / runs);
        })
    }

    /// Returns into how many runs `num_tokens` rows of `row_len` values should be divided.
    pub(crate) fn runs_of(&self, num_tokens: usize, row_len: usize) -> usize {
        let elements = num_tokens.saturating_mul(row_len);
        match self.num_threads() {
            1 => 1,
            threads => (elements / PARALLEL_ELEMENTS).min(num_tokens).min(4 * threads),
        }
    }

    /// Runs a kernel compiled for this backend's instruction set, on this thread.
    #[inline]
    pub(crate) fn run<K: Kernel>(&self, kernel: K) -> K::Output {
        match self.isa {
            Isa::Portable | Isa::EmulatedAmx => kernel.run::<Portable>(),
            // SAFETY: `with_isa` has checked that the machine supports `self.isa`.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { x86::run_avx2(kernel) },
            // SAFETY: as above; those with more than AVX-512 have all of that too.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Avx512Amx => unsafe { x86::run_avx512(kernel) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => kernel.run::<Portable>(),
        }
    }

    /// Runs a kernel of products of bf16 compiled for this backend's instruction set, on this thread.
    #[inline]
    pub(crate) fn run_bf16<K: Bf16Kernel>(&self, kernel: K) {
        match self.isa {
            Isa::Portable | Isa::EmulatedAmx => kernel.run::<Portable>(),
            // SAFETY: `with_isa` has checked that the machine supports `self.isa`.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { x86::run_products_avx2(kernel) },
            // SAFETY: as above; AMX comes with AVX-512, and multiplies bf16 in tiles only.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Amx => unsafe { x86::run_products_avx512(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => unsafe { x86::run_products_avx512_bf16(kernel) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => kernel.run::<Portable>(),
        }
    }

    /// Runs a kernel of products of tiles compiled for this backend's instruction set, on this thread.
    /// Without tiles, see [`Self::has_tiles`], there is none to run.
    #[inline]
    pub(crate) fn run_tiles<K: TileKernel>(&self, kernel: K) {
        debug_assert!(self.has_tiles(), "{} has no tiles", self.isa.name());
        match self.isa {
            Isa::EmulatedAmx => kernel.run::<Emulated>(),
            // SAFETY: `with_isa` has checked that the machine supports `self.isa`.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Amx => unsafe { x86::run_tiles_avx512_amx(kernel) },
            _ => {}
        }
    }

    /// Runs a kernel of products of codes compiled for this backend's instruction set, on this
    /// thread.
    #[inline]
    pub(crate) fn run_dots<K: DotKernel>(&self, kernel: K) {
        match (self.isa, self.has_byte_dot) {
            // SAFETY: `with_isa` has checked that the machine supports `self.isa`.
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, false) => unsafe { x86_dot::run_avx2(kernel) },
            // SAFETY: as above, and it has the product of bytes.
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, true) => unsafe { x86_dot::run_avx2_vnni(kernel) },
            // SAFETY: as above; those with more than AVX-512 have all of that too.
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16 | Isa::Avx512Amx, false) => unsafe {
                x86_dot::run_avx512(kernel);
            },
            // SAFETY: as above, and it has the product of bytes.
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16 | Isa::Avx512Amx, true) => unsafe {
                x86_dot::run_avx512_vnni(kernel);
            },
            _ => kernel.run::<Portable, [i32; 16]>(),
        }
    }
}

/// A pointer that tasks on several threads use for disjoint parts of one buffer.
pub(crate) struct SendPointer<T>(pub *mut T);

impl<T> SendPointer<T> {
    /// Returns the pointer. (A method, so that closures capture the wrapper and not the field.)
    #[inline(always)]
    pub(crate) fn get(&self) -> *mut T {
        self.0
    }
}

// SAFETY: the pointer itself is a number; each use says why its accesses do not overlap.
unsafe impl<T: Send> Send for SendPointer<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SendPointer<T> {}
