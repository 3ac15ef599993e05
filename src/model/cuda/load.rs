//! Weights into device memory: row-major in the model's element type, `[out_features, in_features]` or, where they
//! are stored so, `[in_features, out_features]`; one arena for all. First every weight gets its place; then
//! [`super::transfer`] reads the files in their order.

use std::ops::Range;
use std::sync::Arc;

use super::geometry::Geometry;
use super::heads::HeadSpacing;
use super::transfer::{Sink, Transfer};
use crate::backend::{Arena, ComputeContext, DeviceTensor, PinnedBuffer};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType};
use crate::model::checkpoint::Tensor;
use crate::model::load::Loader;
use crate::model::weights::{MatrixLayout, MatrixPlan, VectorPlan, WeightReader, WeightsPlan};

/// Matrices lie on the device as in their files.
fn matrix_geometry(plan: &MatrixPlan, spacing: HeadSpacing) -> Geometry {
    match plan.layout {
        MatrixLayout::Rows => {
            Geometry::new(plan.out_features, plan.in_features, plan.heads, spacing)
        }
        MatrixLayout::Columns => {
            let heads = plan.heads.transposed();
            Geometry::new(plan.in_features, plan.out_features, heads, spacing)
        }
    }
}

fn vector_geometry(plan: &VectorPlan, spacing: HeadSpacing) -> Geometry {
    Geometry::new(plan.len, 1, plan.heads, spacing)
}

/// Adds up what the weights take of an arena.
struct DeviceBytes {
    element: ElementType,
    spacing: HeadSpacing,
    bytes: usize,
}

impl DeviceBytes {
    fn add(&mut self, shape: &[usize]) -> Result<()> {
        let bytes = Arena::bytes_for(self.element, shape)?;
        let sum = self.bytes.checked_add(bytes);
        self.bytes = sum.ok_or_else(|| Error::out_of_memory("the weights", usize::MAX))?;
        Ok(())
    }
}

impl WeightReader for DeviceBytes {
    type Matrix = ();
    type Vector = ();

    fn matrix(&mut self, plan: &MatrixPlan) -> Result<()> {
        let geometry = matrix_geometry(plan, self.spacing);
        self.add(&[geometry.device_rows(), geometry.device_columns()])
    }

    fn vector(&mut self, plan: &VectorPlan) -> Result<()> {
        self.add(&[vector_geometry(plan, self.spacing).device_rows()])
    }

    /// Taken on trust, as in [`crate::model::weights::Totals`].
    fn same(&mut self, _: &MatrixPlan, _: &MatrixPlan) -> Result<bool> {
        Ok(true)
    }
}

/// Bytes of device memory that the weights take, if a tied output matrix that is stored all the same equals
/// the embedding.
pub(super) fn device_bytes(
    plan: &WeightsPlan,
    dtype: DType,
    spacing: HeadSpacing,
) -> Result<usize> {
    let mut total = DeviceBytes { element: ElementType::Float(dtype), spacing, bytes: 0 };
    plan.read(&mut total)?;
    Ok(total.bytes)
}

/// Pinned memory, copied to tensors of a device by its own stream.
struct ToDevice {
    context: Arc<ComputeContext>,
}

impl Sink for ToDevice {
    type Place = DeviceTensor;
    type Slot = PinnedBuffer;

    fn slot(&self, len_bytes: usize) -> Result<PinnedBuffer> {
        PinnedBuffer::new(&self.context, len_bytes, "reading weights")
    }

    fn bytes<'s>(&self, slot: &'s mut PinnedBuffer) -> Result<&'s mut [u8]> {
        slot.bytes()
    }

    fn copy(
        &self,
        slot: &mut PinnedBuffer,
        from: Range<usize>,
        place: &DeviceTensor,
        offset: usize,
    ) -> Result<()> {
        slot.upload(from, place, offset)
    }

    fn fence(&self, slot: &mut PinnedBuffer) -> Result<()> {
        slot.fence()
    }
}

/// Turns plans into tensors on a device, which are filled by [`DeviceReader::finish`].
pub(super) struct DeviceReader<'a, 'b> {
    loader: &'b mut Loader<'a>,
    sink: ToDevice,
    arena: Arena,
    dtype: DType,
    spacing: HeadSpacing,
    transfer: Transfer<DeviceTensor>,
}

impl<'a, 'b> DeviceReader<'a, 'b> {
    /// A reader into `arena`, whose tensors have element type `dtype`.
    pub(super) fn new(
        loader: &'b mut Loader<'a>,
        context: &Arc<ComputeContext>,
        arena: Arena,
        dtype: DType,
        spacing: HeadSpacing,
    ) -> Result<Self> {
        if spacing.is_spaced() {
            // What lies between the heads.
            arena.whole(ElementType::Float(dtype))?.zero(context)?;
        }
        let sink = ToDevice { context: context.clone() };
        Ok(DeviceReader { loader, sink, arena, dtype, spacing, transfer: Transfer::new(dtype) })
    }

    /// Reads the files, and waits for the last copies.
    pub(super) fn finish(self) -> Result<()> {
        let done = self.transfer.run(self.loader, &self.sink);
        self.sink.context.synchronize()?;
        // The pinned memory has served.
        self.sink.context.trim();
        done
    }

    /// The next part of the arena; a further arena for a weight that was not planned (an output matrix
    /// that is declared to be the embedding, but is not).
    fn tensor(&mut self, shape: &[usize]) -> Result<DeviceTensor> {
        let element = ElementType::Float(self.dtype);
        if let Ok(tensor) = self.arena.tensor(element, shape) {
            return Ok(tensor);
        }
        let bytes = Arena::bytes_for(element, shape)?;
        let mut arena = Arena::new(&self.sink.context, bytes, "a weight matrix")?;
        let tensor = arena.tensor(element, shape)?;
        if self.spacing.is_spaced() {
            tensor.zero(&self.sink.context)?;
        }
        Ok(tensor)
    }

    /// Has the tensor of a file read to `rows` rows of `target` from `first_row` (of the file's) on.
    fn add(
        &mut self,
        source: &Tensor,
        rows: usize,
        first_row: usize,
        geometry: &Geometry,
        target: &DeviceTensor,
    ) -> Result<()> {
        self.loader.files.open(source)?;
        self.transfer.add(source, rows, first_row, geometry, target.clone())
    }
}

impl WeightReader for DeviceReader<'_, '_> {
    type Matrix = DeviceTensor;
    type Vector = DeviceTensor;

    fn matrix(&mut self, plan: &MatrixPlan) -> Result<DeviceTensor> {
        let geometry = matrix_geometry(plan, self.spacing);
        let tensor = self.tensor(&[geometry.device_rows(), geometry.device_columns()])?;
        let mut first = 0;
        for part in &plan.parts {
            let rows = match plan.layout {
                MatrixLayout::Rows => part.out_features,
                MatrixLayout::Columns if part.out_features == plan.out_features => plan.in_features,
                MatrixLayout::Columns => {
                    return Err(Error::internal("a matrix stored by columns in several tensors"));
                }
            };
            self.add(&part.tensor, rows, first, &geometry, &tensor)?;
            first += rows;
        }
        Ok(tensor)
    }

    fn vector(&mut self, plan: &VectorPlan) -> Result<DeviceTensor> {
        let geometry = vector_geometry(plan, self.spacing);
        let tensor = self.tensor(&[geometry.device_rows()])?;
        let mut first = 0;
        for part in &plan.parts {
            let len = usize::try_from(part.len_bytes)
                .map_err(|_| Error::out_of_memory(&part.name, usize::MAX))?
                / part.dtype.size_bytes();
            self.add(part, len, first, &geometry, &tensor)?;
            first += len;
        }
        Ok(tensor)
    }

    fn same(&mut self, a: &MatrixPlan, b: &MatrixPlan) -> Result<bool> {
        self.loader.same(a, b)
    }
}
