//! Weights into device memory: row-major in the model's element type, `[out_features, in_features]`
//! or, where they are stored so, `[in_features, out_features]`; one arena for all. First every
//! weight gets its place; then [`super::transfer`] reads the files in their order, or the device
//! makes up the numbers itself ([`super::random`]).

use std::ops::Range;
use std::sync::Arc;

use super::device_quantised::{device_tiles, takes_experts, DenseRows, Upload};
use super::geometry::Geometry;
use super::heads::HeadSpacing;
use super::random::WeightNoise;
use super::transfer::{Sink, Transfer};
use super::weights::{MatrixPlan, VectorPlan, WeightReader};
use super::Loader;
use crate::backend::{Arena, ComputeContext, DeviceTensor, PinnedBuffer};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, HostBuffer};
use crate::model::checkpoint::Tensor;
use crate::model::decoder::block::{Decoder, DecoderPlan};
use crate::ops::fill::{fill, Noise};
use crate::ops::linear::{Matrix, MatrixLayout, WeightFormat};
use crate::ops::quantised::tiles::TileLayout;

/// Matrices lie on the device as in their files.
pub(in crate::model) fn matrix_geometry(plan: &MatrixPlan, spacing: HeadSpacing) -> Geometry {
    match plan.layout {
        MatrixLayout::Rows => {
            Geometry::new(plan.out_features, plan.in_features, plan.shard, spacing)
        }
        MatrixLayout::Columns => {
            let shard = plan.shard.transposed();
            Geometry::new(plan.in_features, plan.out_features, shard, spacing)
        }
    }
}

fn vector_geometry(plan: &VectorPlan, spacing: HeadSpacing) -> Geometry {
    Geometry::new(plan.len, 1, plan.shard, spacing)
}

/// Returns the 32-bit words that tiles take.
fn words(layout: &TileLayout) -> usize {
    layout.len_bytes().div_ceil(4)
}

/// Adds up the bytes of an arena that the weights take.
struct DeviceBytes {
    element: ElementType,
    spacing: HeadSpacing,
    bytes: usize,
}

impl DeviceBytes {
    fn add(&mut self, shape: &[usize]) -> Result<()> {
        self.add_bytes(Arena::bytes_for(self.element, shape)?)
    }

    fn add_bytes(&mut self, bytes: usize) -> Result<()> {
        let sum = self.bytes.checked_add(bytes);
        self.bytes = sum.ok_or_else(|| Error::out_of_memory("the weights", usize::MAX))?;
        Ok(())
    }
}

impl WeightReader for DeviceBytes {
    type Matrix = ();
    type Vector = ();

    fn matrix(&mut self, plan: &MatrixPlan) -> Result<()> {
        if let Some(layout) = device_tiles(plan, self.spacing)? {
            return self.add_bytes(Arena::bytes_for(ElementType::I32, &[words(&layout)])?);
        }
        let geometry = matrix_geometry(plan, self.spacing);
        self.add(&[geometry.device_rows(), geometry.device_columns()])
    }

    fn takes_formats_of_experts(
        &self,
        gate_up: &[MatrixPlan],
        down: &[MatrixPlan],
    ) -> Result<bool> {
        takes_experts([gate_up, down], self.element)
    }

    fn vector(&mut self, plan: &VectorPlan) -> Result<()> {
        self.add(&[vector_geometry(plan, self.spacing).device_rows()])
    }
}

/// Returns the bytes of device memory that the weights take.
pub(in crate::model) fn device_bytes(
    plan: &DecoderPlan,
    dtype: DType,
    spacing: HeadSpacing,
) -> Result<usize> {
    let mut total = DeviceBytes { element: ElementType::Float(dtype), spacing, bytes: 0 };
    plan.read(&mut total)?;
    Ok(total.bytes)
}

/// Pinned memory, copied to an arena of a device by its own stream.
struct ToDevice<'c> {
    context: &'c Arc<ComputeContext>,
    /// The whole arena.
    arena: DeviceTensor,
}

impl Sink for ToDevice<'_> {
    /// The offset in the arena, in bytes.
    type Place = usize;
    type Slot = PinnedBuffer;

    fn slots(&self, memory: HostBuffer, len_bytes: usize) -> Result<Vec<PinnedBuffer>> {
        PinnedBuffer::parts(self.context, memory, len_bytes, "reading weights")
    }

    fn bytes<'s>(&self, slot: &'s mut PinnedBuffer) -> Result<&'s mut [u8]> {
        slot.bytes()
    }

    fn copy(
        &self,
        slot: &mut PinnedBuffer,
        from: Range<usize>,
        place: &usize,
        offset: usize,
    ) -> Result<()> {
        slot.upload(from, &self.arena, place.saturating_add(offset))
    }

    fn fence(&self, slot: &mut PinnedBuffer) -> Result<()> {
        slot.fence()
    }
}

/// Assigns every weight its place in an arena, and has it read to that place.
struct Placing<'l, 'a> {
    loader: &'l mut Loader<'a>,
    taken: DeviceBytes,
    transfer: Transfer<usize>,
    quantised: Vec<QuantisedJob>,
}

/// A quantised matrix and its place in the arena, in bytes.
struct QuantisedJob {
    plan: MatrixPlan,
    place: usize,
}

impl Placing<'_, '_> {
    /// Has the tensor of a file read to `rows` rows of a weight from `first_row` (of the file's)
    /// on.
    fn add(
        &mut self,
        source: &Tensor,
        rows: usize,
        first_row: usize,
        geometry: &Geometry,
        place: usize,
    ) -> Result<()> {
        self.loader.files.open(source)?;
        self.transfer.add(source, rows, first_row, geometry, place)
    }
}

impl WeightReader for Placing<'_, '_> {
    type Matrix = ();
    type Vector = ();

    fn matrix(&mut self, plan: &MatrixPlan) -> Result<()> {
        let geometry = matrix_geometry(plan, self.taken.spacing);
        let place = self.taken.bytes;
        self.taken.matrix(plan)?;
        if plan.is_stored_quantised() || device_tiles(plan, self.taken.spacing)?.is_some() {
            let room = self.quantised.try_reserve(1);
            room.map_err(|_| Error::out_of_memory("the list of weights", 1))?;
            self.quantised.push(QuantisedJob { plan: plan.clone(), place });
            return Ok(());
        }
        let mut first = 0;
        for part in &plan.parts {
            let rows = match plan.layout {
                MatrixLayout::Rows => part.out_features,
                MatrixLayout::Columns if part.out_features == plan.out_features => plan.in_features,
                MatrixLayout::Columns => {
                    return Err(Error::internal("a matrix stored by columns in several tensors"));
                }
            };
            self.add(part.dense()?, rows, first, &geometry, place)?;
            first += rows;
        }
        Ok(())
    }

    fn takes_formats_of_experts(
        &self,
        gate_up: &[MatrixPlan],
        down: &[MatrixPlan],
    ) -> Result<bool> {
        self.taken.takes_formats_of_experts(gate_up, down)
    }

    fn vector(&mut self, plan: &VectorPlan) -> Result<()> {
        let geometry = vector_geometry(plan, self.taken.spacing);
        let place = self.taken.bytes;
        self.taken.vector(plan)?;
        let mut first = 0;
        for part in &plan.parts {
            let len = usize::try_from(part.len_bytes)
                .map_err(|_| Error::out_of_memory(&part.name, usize::MAX))?
                / part.dtype.size_bytes();
            self.add(part, len, first, &geometry, place)?;
            first += len;
        }
        Ok(())
    }
}

/// The same arena divided among tensors, in the same order.
struct Dividing {
    arena: Arena,
    dtype: DType,
    spacing: HeadSpacing,
}

impl WeightReader for Dividing {
    type Matrix = Matrix;
    type Vector = DeviceTensor;

    fn matrix(&mut self, plan: &MatrixPlan) -> Result<Matrix> {
        if let Some(layout) = device_tiles(plan, self.spacing)? {
            let data = self.arena.tensor(ElementType::I32, &[words(&layout)])?;
            return Ok(Matrix::quantised(data, layout, plan.shard));
        }
        let geometry = matrix_geometry(plan, self.spacing);
        let shape = [geometry.device_rows(), geometry.device_columns()];
        let data = self.arena.tensor(ElementType::Float(self.dtype), &shape)?;
        Ok(Matrix::dense(data, self.dtype, plan.layout, plan.shard))
    }

    fn takes_formats_of_experts(
        &self,
        gate_up: &[MatrixPlan],
        down: &[MatrixPlan],
    ) -> Result<bool> {
        takes_experts([gate_up, down], ElementType::Float(self.dtype))
    }

    fn vector(&mut self, plan: &VectorPlan) -> Result<DeviceTensor> {
        let geometry = vector_geometry(plan, self.spacing);
        self.arena.tensor(ElementType::Float(self.dtype), &[geometry.device_rows()])
    }
}

/// Divides the arena among tensors, and has the device fill each with random numbers.
struct Filling<'l, 'a> {
    dividing: Dividing,
    context: &'l Arc<ComputeContext>,
    loader: &'l mut Loader<'a>,
    noise: WeightNoise,
    upload: Upload<'l>,
}

impl Filling<'_, '_> {
    /// Queues the numbers of a weight that would have `stored_bytes` in files; what lies between
    /// its heads stays.
    fn fill(
        &mut self,
        weight: &DeviceTensor,
        geometry: &Geometry,
        noise: &Noise,
        stored_bytes: u64,
    ) -> Result<()> {
        let (count, len, distance) = geometry.stretches();
        let numbers = weight.view(0, &[count, len], Some(&[distance, 1]))?;
        fill(self.context, noise, &numbers)?;
        self.loader.advance(stored_bytes as usize)
    }

    fn fill_vector(&mut self, plan: &VectorPlan, noise: &Noise) -> Result<DeviceTensor> {
        let vector = self.dividing.vector(plan)?;
        let stored_bytes = plan.parts.iter().map(|part| part.len_bytes).sum();
        self.fill(&vector, &vector_geometry(plan, self.dividing.spacing), noise, stored_bytes)?;
        Ok(vector)
    }
}

impl WeightReader for Filling<'_, '_> {
    type Matrix = Matrix;
    type Vector = DeviceTensor;

    fn matrix(&mut self, plan: &MatrixPlan) -> Result<Matrix> {
        let matrix = self.dividing.matrix(plan)?;
        let geometry = matrix_geometry(plan, self.dividing.spacing);
        let noise = self.noise.matrix(plan);
        if let WeightFormat::Quantised(layout) = matrix.format() {
            let made = self.loader.random_quantised(plan, layout.format(), noise.seed)?;
            self.upload.tiles(self.loader, &made, &layout, matrix.data(), 0)?;
            return Ok(matrix);
        }
        let stored_bytes = plan.stored_bytes();
        self.fill(matrix.data(), &geometry, &noise, stored_bytes)?;
        Ok(matrix)
    }

    fn takes_formats_of_experts(
        &self,
        gate_up: &[MatrixPlan],
        down: &[MatrixPlan],
    ) -> Result<bool> {
        self.dividing.takes_formats_of_experts(gate_up, down)
    }

    fn vector(&mut self, plan: &VectorPlan) -> Result<DeviceTensor> {
        let noise = self.noise.bias();
        self.fill_vector(plan, &noise)
    }

    fn norm_weight(&mut self, plan: &VectorPlan) -> Result<DeviceTensor> {
        let noise = self.noise.norm_weight();
        self.fill_vector(plan, &noise)
    }

    fn table(&mut self, plan: &VectorPlan) -> Result<DeviceTensor> {
        let noise = self.noise.table();
        self.fill_vector(plan, &noise)
    }
}

/// The weights on their way to a device, which need not be there before [`WeightsLoad::finish`].
pub(in crate::model) struct WeightsLoad<'a> {
    plan: &'a DecoderPlan,
    loader: Loader<'a>,
    transfer: Transfer<usize>,
    quantised: Vec<QuantisedJob>,
    /// The bytes that they take there.
    bytes: usize,
    dtype: DType,
    spacing: HeadSpacing,
}

impl<'a> WeightsLoad<'a> {
    /// Gives every weight its place.
    pub fn new(
        plan: &'a DecoderPlan,
        mut loader: Loader<'a>,
        dtype: DType,
        spacing: HeadSpacing,
    ) -> Result<Self> {
        let element = ElementType::Float(dtype);
        let mut placing = Placing {
            loader: &mut loader,
            taken: DeviceBytes { element, spacing, bytes: 0 },
            transfer: Transfer::new(dtype),
            quantised: Vec::new(),
        };
        if placing.loader.files.are_random() {
            plan.read(&mut placing.taken)?;
        } else {
            plan.read(&mut placing)?;
        }
        let Placing { taken: DeviceBytes { bytes, .. }, transfer, quantised, .. } = placing;
        Ok(WeightsLoad { plan, loader, transfer, quantised, bytes, dtype, spacing })
    }

    /// Returns the bytes that they take on the device.
    pub fn device_bytes(&self) -> usize {
        self.bytes
    }

    /// Makes ready what needs no device.
    pub fn prepare(&mut self) -> Result<()> {
        if self.loader.files.are_random() {
            return Ok(());
        }
        self.transfer.prepare(&self.loader)
    }

    /// Reads everything to the device, or has it make up the numbers, and waits for the end.
    /// Meanwhile `beside` is done on this thread, with the tensors as they will be.
    pub fn finish<T>(
        self,
        context: &Arc<ComputeContext>,
        beside: impl FnOnce(&Decoder<Matrix, DeviceTensor>) -> Result<T>,
    ) -> Result<(Decoder<Matrix, DeviceTensor>, T)> {
        let WeightsLoad { plan, mut loader, transfer, quantised, bytes, dtype, spacing } = self;
        let arena = Arena::new(context, bytes, "the weights")?;
        let whole = arena.whole(ElementType::Float(dtype))?;
        if spacing.is_spaced() {
            // Zeros what lies between the heads.
            whole.zero(context)?;
        }
        let mut dividing = Dividing { arena, dtype, spacing };
        if loader.files.are_random() {
            let (loader, noise) = (&mut loader, WeightNoise::default());
            let upload = Upload::new(context);
            let done = plan
                .read(&mut Filling { dividing, context, loader, noise, upload })
                .and_then(|weights| beside(&weights).map(|made| (weights, made)));
            context.synchronize()?;
            let done = done?;
            loader.end()?;
            return Ok(done);
        }
        let weights = plan.read(&mut dividing)?;
        let (mut beside, mut made) = (Some(beside), None);
        let mut before = || {
            if let Some(beside) = beside.take() {
                made = Some(beside(&weights)?);
            }
            Ok(())
        };
        let sink = ToDevice { context, arena: whole };
        let done = transfer
            .run(&mut loader, &sink, &mut before)
            .and_then(|()| read_quantised(&mut loader, &quantised, spacing, dtype, &sink))
            .and_then(|()| loader.finish_kept(plan));
        context.synchronize()?;
        done?;
        loader.end()?;
        let made = made.ok_or_else(|| Error::internal("a load without an end"))?;
        Ok((weights, made))
    }
}

/// Reads quantised matrices, one after the other, to their places.
fn read_quantised(
    loader: &mut Loader<'_>,
    jobs: &[QuantisedJob],
    spacing: HeadSpacing,
    dtype: DType,
    sink: &ToDevice<'_>,
) -> Result<()> {
    let mut upload = Upload::new(sink.context);
    for QuantisedJob { plan, place } in jobs {
        if let Some(layout) = device_tiles(plan, spacing)? {
            let matrix = loader.quantised(plan, layout.format())?;
            upload.tiles(loader, &matrix, &layout, &sink.arena, *place)?;
            continue;
        }
        let dense = DenseRows { geometry: matrix_geometry(plan, spacing), dtype };
        let mut first = 0;
        for part in &plan.parts {
            let rows = loader.part_rows(part, plan.in_features)?;
            upload.rows(loader, &rows, &dense, first, &sink.arena, *place)?;
            first += part.out_features;
        }
    }
    Ok(())
}
