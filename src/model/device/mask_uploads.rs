//! The masks of steps on their way to the device. They are copied in a stream of their own, so that
//! the copy is done while the device computes the pass whose logits they mask, and not after it.

use std::sync::Arc;

use super::limits::{MAX_STEP_ROWS, STEPS_IN_FLIGHT};
use crate::backend::cuda::{CudaContext, Event};
use crate::backend::{ComputeContext, ContextBackend, DeviceTensor, PinnedBuffer};
use crate::error::{try_with_capacity, Error, Result};
use crate::memory::Device;
use crate::model::step::{mask_words, Step, WriteMasks};

/// The memory of the masks of steps.
pub(super) struct MaskUploads {
    context: Arc<ComputeContext>,
    /// Made by the first step with masks.
    copies: Option<Copies>,
    /// One for each step in flight, made by the first steps that have any. Dropped before what they
    /// are copied to.
    host: Vec<Option<PinnedBuffer>>,
    next: usize,
    /// The masks of a step: those of the rows' indices, then the masks.
    masks: DeviceTensor,
    vocab_size: usize,
}

/// The stream of the copies.
struct Copies {
    context: Arc<ComputeContext>,
    /// Recorded in the stream of the steps after the last use of the masks on the device.
    used: Event,
}

/// The masks of a step on the device.
pub(super) struct UploadedMasks {
    /// `[num_rows]`, the mask of each row, or negative.
    pub indices: DeviceTensor,
    /// `[num_masks, words]`
    pub masks: DeviceTensor,
}

fn no_memory() -> Error {
    Error::internal("no memory for masks")
}

/// Returns the CUDA half of a context.
fn cuda(context: &ComputeContext) -> Result<&CudaContext> {
    match context.backend() {
        ContextBackend::Cuda(cuda) => Ok(cuda),
        ContextBackend::Cpu { .. } => Err(Error::internal("uploads of masks on the CPU")),
    }
}

impl Copies {
    fn new(context: &ComputeContext) -> Result<Self> {
        let Device::Cuda(index) = context.device() else {
            return Err(Error::internal("uploads of masks on the CPU"));
        };
        // It has no device memory.
        let copies = Arc::new(ComputeContext::cuda_private(index, 0)?);
        let used = Event::new(cuda(context)?)?;
        // Work queued so far may use the previous contents of the memory.
        used.record(cuda(context)?)?;
        Ok(Copies { context: copies, used })
    }
}

impl MaskUploads {
    /// Returns the number of words on the device, in `masks` of [`MaskUploads::new`].
    pub fn len(vocab_size: usize) -> usize {
        MAX_STEP_ROWS.saturating_mul(1 + mask_words(vocab_size))
    }

    /// Masks of steps of `context`, in the words `masks` of its device.
    pub fn new(
        context: &Arc<ComputeContext>,
        masks: DeviceTensor,
        vocab_size: usize,
    ) -> Result<Self> {
        let mut host = try_with_capacity(STEPS_IN_FLIGHT, "steps")?;
        host.resize_with(STEPS_IN_FLIGHT, || None);
        let context = context.clone();
        Ok(MaskUploads { context, copies: None, host, next: 0, masks, vocab_size })
    }

    /// Makes room for the masks of a step that is beginning.
    pub fn reserve(&mut self, step: &Step<'_>) -> Result<()> {
        if step.masked_rows.is_empty() {
            return Ok(());
        }
        let [masks_at, words] = self.places(step);
        let bytes = masks_at.saturating_add(words).saturating_mul(4);
        if bytes > self.masks.size_bytes() {
            return Err(Error::internal("more masks than rows of logits"));
        }
        let copies = match self.copies.take() {
            Some(copies) => copies,
            None => Copies::new(&self.context)?,
        };
        let context = &self.copies.insert(copies).context;
        self.next = (self.next + 1) % self.host.len().max(1);
        let place = self.host.get_mut(self.next).ok_or_else(no_memory)?;
        if place.as_ref().is_none_or(|host| host.len_bytes() < bytes) {
            // Powers of two, for few sizes: pinned memory is kept for good.
            let len = bytes.next_power_of_two().min(self.masks.size_bytes());
            *place = None;
            *place = Some(PinnedBuffer::new(context, len, "masks")?);
        }
        Ok(())
    }

    /// Returns where the masks of a step begin, and their length, in words.
    fn places(&self, step: &Step<'_>) -> [usize; 2] {
        let num_masks = step.masked_rows.len();
        [step.choices.len().next_multiple_of(4), num_masks * mask_words(self.vocab_size)]
    }

    /// Queues the copy of a step's masks to the device, for which there is room. What is queued for
    /// the step from now on waits for it.
    pub fn upload(&mut self, step: &Step<'_>, write: &mut WriteMasks<'_>) -> Result<UploadedMasks> {
        let (num_rows, num_masks) = (step.choices.len(), step.masked_rows.len());
        let [masks_at, words] = self.places(step);
        let host = self.host.get_mut(self.next).and_then(Option::as_mut).ok_or_else(no_memory)?;
        let all = 0..(masks_at + words) * 4;
        let room = host.bytes()?.get_mut(all.clone());
        let room = room.ok_or_else(|| Error::internal("no room for masks"))?;
        let (indices, masks) = room.split_at_mut_checked(masks_at * 4).unwrap_or_default();
        let mut masked = step.masked_rows.iter().zip(0u32..).peekable();
        let index_of = |row: u32| match masked.next_if(|(&next, _)| next == row) {
            Some((_, index)) => index,
            None => u32::MAX,
        };
        for (word, index) in indices.chunks_exact_mut(4).zip((0..num_rows as u32).map(index_of)) {
            word.copy_from_slice(&index.to_ne_bytes());
        }
        write(masks)?;
        let copies = self.copies.as_ref().ok_or_else(no_memory)?;
        copies.used.hold_back(cuda(&copies.context)?)?;
        host.upload(all, &self.masks, 0)?;
        host.fence()?;
        host.hold_back(&self.context)?;
        Ok(UploadedMasks {
            indices: self.masks.view(0, &[num_rows], None)?,
            masks: self.masks.view(masks_at, &[num_masks, mask_words(self.vocab_size)], None)?,
        })
    }

    /// Notes that what was queued so far is all that uses the masks uploaded last.
    pub fn set_used(&self) -> Result<()> {
        let copies = self.copies.as_ref().ok_or_else(no_memory)?;
        copies.used.record(cuda(&self.context)?)
    }
}
