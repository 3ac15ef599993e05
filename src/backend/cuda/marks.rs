//! Profiles a chain of kernels part by part: between the parts a kernel of one thread notes the
//! time at which all kernels before it had ended (`csrc/backend/mark.cu`). The kernels overlap as
//! they do without it; each mark costs about a microsecond, which shows as the difference from the
//! same chain without marks.

use super::context::{Arguments, CudaContext, Launch};
use super::kernels;
use super::profile::{Profile, ProfiledPart};
use crate::error::{try_filled, Error, Result};
use std::time::Instant;

/// The most marks of a chain.
const MAX_MARKS: usize = 8192;

impl CudaContext {
    /// Starts marking chains that are queued from now on. Returns a number, above 0, that no
    /// earlier profile had.
    pub(crate) fn start_profile(&self) -> Result<u64> {
        // Not taken from the memory set apart for operators, because it outlives them.
        let times = self.allocator().allocate_exact(MAX_MARKS * 8, "the marks of a profile")?;
        let mut profile = self.profile();
        let generation = self.next_profile();
        *profile = Some(Profile {
            times,
            parts: Vec::with_capacity(MAX_MARKS),
            generation,
            queued: Instant::now(),
        });
        Ok(generation)
    }

    /// Stops marking.
    pub(crate) fn stop_profile(&self) -> Result<()> {
        self.synchronize()?;
        *self.profile() = None;
        self.end_profile();
        Ok(())
    }

    /// Returns the number of the profile that is being made; 0 if there is none.
    pub(crate) fn profile_generation(&self) -> u64 {
        if self.is_profiling() {
            self.profile().as_ref().map_or(0, |profile| profile.generation)
        } else {
            0
        }
    }

    /// Marks the beginning of the chain.
    pub(crate) fn begin_marks(&self) -> Result<()> {
        if !self.is_profiling() {
            return Ok(());
        }
        if let Some(profile) = &mut *self.profile() {
            profile.parts.clear();
            self.queue_mark(profile.times.start(), 0)?;
            profile.queued = Instant::now();
        }
        Ok(())
    }

    /// Marks the end of the part that was queued since the last mark. Does nothing if no profile is
    /// being made.
    pub(crate) fn mark(&self, name: &'static str, bytes: u64, flops: f64) -> Result<()> {
        if !self.is_profiling() {
            return Ok(());
        }
        if let Some(profile) = &mut *self.profile() {
            let queue_seconds = profile.queued.elapsed().as_secs_f64();
            let index = profile.parts.len() + 1;
            if index >= MAX_MARKS {
                return Err(Error::unsupported(format!(
                    "a profile of more than {MAX_MARKS} parts"
                )));
            }
            profile.parts.push(ProfiledPart { name, bytes, flops, seconds: 0.0, queue_seconds });
            self.queue_mark(profile.times.start(), index as i32)?;
            profile.queued = Instant::now();
        }
        Ok(())
    }

    fn queue_mark(&self, times: *mut u8, index: i32) -> Result<()> {
        let arguments = Arguments::new().pointer(times).i32(index);
        // SAFETY: the arguments of the kernel, whose index is below the number of words.
        unsafe { self.launch_overlapping(kernels::MARK, Launch::linear(1, 32), arguments) }
    }

    /// Waits for all work and returns the times of the parts of the chain that ran last.
    pub(crate) fn read_profile(&self) -> Result<Vec<ProfiledPart>> {
        self.synchronize()?;
        let profile = self.profile();
        let Some(profile) = &*profile else {
            return Err(Error::internal("no profile is being made"));
        };
        let mut times = try_filled(profile.parts.len() + 1, 0u64, "the marks of a profile")?;
        // SAFETY: as many words of device memory as marks fit; the host memory lives until the copy
        // is done.
        unsafe {
            self.copy(times.as_mut_ptr().cast(), profile.times.start(), times.len() * 8)?;
        }
        self.synchronize()?;
        let mut parts = profile.parts.clone();
        for (part, ends) in parts.iter_mut().zip(times.windows(2)) {
            if let [begin, end] = ends {
                part.seconds = end.saturating_sub(*begin) as f64 * 1e-9;
            }
        }
        Ok(parts)
    }
}
