//! The linear layer `out = x W^T + bias`, which replaces `out` or is added to it.
//!
//! x [num_tokens, in_features] f32, W [out_features, in_features] packed, bias [out_features] f32,
//! out [num_tokens, out_features] f32; sums in f32. With bf16 weights x is rounded to bf16 first,
//! on every instruction set, and with weights of integers to 16 bits of the largest one near it
//! ([`cpu_integers`](super::cpu_integers)); f32, f16 and fp8 weights take x as it is. An output element is summed over
//! k in one order whatever `num_tokens` and the number of threads, so its bits depend on its row of
//! x alone: unless a quantised weight may be rounded to bf16 for several rows
//! ([`cpu_tiles`](super::cpu_tiles)).

use super::cpu_fp8::multiply_fp8;
use super::cpu_integer_tiles::multiply_integer_tiles;
use super::cpu_quantised::{is_in_bf16, multiply_quantised, tile_layout, QuantisedNeeds};
use super::cpu_rounded_rows::{round_rows, rounded_bytes};
use super::cpu_tiles::{are_made, made_bytes, TiledWeight};
use super::host_matrix::HostWeight;
use crate::backend::cpu::math::LANES;
use crate::backend::cpu::simd::{Simd, Vector16};
use crate::backend::cpu::tiles::{TILE_K, TILE_LEN, TILE_ROWS};
use crate::backend::cpu::{CpuBackend, Isa, SendPointer};
use crate::error::{Error, Result};
use crate::memory::{DType, HostBuffer};
use crate::ops::common::packed_matrix::PANEL_COLUMNS;
use crate::ops::common::panel_product::{
    grow, multiply, Epilogue, Packed, ProductNeeds, ProductScratch, Rows, Weight,
};
use crate::ops::common::tile_product::{self, EachPanel, TileEpilogue};
use crate::ops::common::tile_rows::tiles_bytes;
use crate::ops::quantised::QuantFormat;
use crate::ops::silu_mul::cpu::silu_mul_row;
use crate::ops::silu_mul::cpu_stacked::silu_mul;

/// What [`linear`] does with the contents of `out`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// The result replaces it.
    Overwrite,
    /// The result is added to it: the residual connection.
    Add,
}

/// Buffers that [`linear`] needs; they grow to the largest call and are then reused.
#[derive(Debug, Default)]
pub struct LinearScratch {
    /// x in the form that the kernels take: [num_tokens, in_features rounded up to even], or tiles.
    activations: HostBuffer,
    product: ProductScratch,
    /// The sums of a product in tiles.
    tile_sums: HostBuffer,
}

impl LinearScratch {
    /// Makes empty buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of bytes held.
    pub fn size_bytes(&self) -> usize {
        self.activations.len_bytes() + self.product.size_bytes() + self.tile_sums.len_bytes()
    }

    /// Returns the bytes held after calls with each of `calls`, on `num_threads` threads.
    pub fn bytes_for(
        dtype: DType,
        isa: Isa,
        num_threads: usize,
        calls: impl Iterator<Item = LinearCall>,
    ) -> usize {
        Needs::new(dtype, isa, num_threads, calls).size_bytes()
    }

    /// Makes room for a product of up to `num_tokens` rows with `weight`: calls with fewer rows then never
    /// have the buffers grow. `ends_gated_mlp` is that of [`LinearCall`].
    pub fn reserve<'a>(
        &mut self,
        backend: &CpuBackend,
        num_tokens: usize,
        weight: impl Into<HostWeight<'a>>,
        ends_gated_mlp: bool,
    ) -> Result<()> {
        let weight: HostWeight<'_> = weight.into();
        let (dtype, form) = match weight {
            HostWeight::Dense(weight) => (weight.dtype(), WeightForm::Dense),
            HostWeight::Quantised(weight) => {
                let dtype = if weight.is_rounded() { DType::BF16 } else { DType::F32 };
                let (format, is_ordered) = (weight.format(), !weight.order().is_empty());
                (dtype, WeightForm::Quantised { format, is_ordered })
            }
        };
        let in_features = weight.in_features();
        let call = LinearCall { num_tokens, in_features, form, ends_gated_mlp };
        let (isa, num_threads) = (backend.isa(), backend.num_threads());
        let needs = Needs::new(dtype, isa, num_threads, std::iter::once(call));
        grow::<u8>(&mut self.activations, needs.activations, "activations of a product")?;
        grow::<u8>(&mut self.tile_sums, needs.tile_sums, "sums of a product")?;
        self.product.reserve(&needs.product)
    }
}

/// The bytes of a [`LinearScratch`].
struct Needs {
    activations: usize,
    product: ProductNeeds,
    tile_sums: usize,
}

impl Needs {
    fn new(
        dtype: DType,
        isa: Isa,
        num_threads: usize,
        calls: impl Iterator<Item = LinearCall>,
    ) -> Self {
        let (mut activations, mut product) = (0, ProductNeeds::default());
        let mut tile_sums = 0;
        let mut quantised = QuantisedNeeds::default();
        for LinearCall { num_tokens, in_features, form, ends_gated_mlp } in calls {
            if let WeightForm::Quantised { format, is_ordered } = form {
                quantised = quantised.max(QuantisedNeeds::new(
                    isa,
                    num_threads,
                    num_tokens,
                    in_features,
                    &format,
                    is_ordered,
                ));
                if dtype == DType::BF16 && are_made(isa, num_tokens, in_features, &format) {
                    let needs = made_bytes(isa, num_threads, num_tokens, in_features);
                    activations = needs.0.max(activations);
                    tile_sums = needs.1.max(tile_sums);
                }
                if !format.code.is_float() {
                    continue;
                }
                let needs =
                    ProductNeeds::new(DType::F32, false, num_threads, num_tokens, in_features);
                product = product.max(needs);
                continue;
            }
            if dtype == DType::BF16 && isa.has_tiles() {
                // Its inputs are made where their f32 would be, from one row of tiles on.
                let is_served = ends_gated_mlp && in_features.is_multiple_of(PANEL_COLUMNS);
                let rows = if is_served { num_tokens.min(TILE_ROWS - 1) } else { num_tokens };
                activations = tiles_bytes(rows, in_features).max(activations);
                let bytes = tile_product::scratch_bytes(num_threads, num_tokens, false);
                tile_sums = bytes.max(tile_sums);
                continue;
            }
            if dtype == DType::BF16 {
                activations = rounded_bytes(num_tokens, in_features).max(activations);
            }
            let native = isa.has_native_bf16();
            let needs = ProductNeeds::new(dtype, native, num_threads, num_tokens, in_features);
            product = product.max(needs);
        }
        Needs {
            activations: activations.max(quantised.activations_bytes()),
            product: product.with_panels(quantised.panels_len()),
            tile_sums: tile_sums.max(quantised.tile_bytes()),
        }
    }

    fn size_bytes(&self) -> usize {
        self.product.size_bytes().saturating_add(self.activations).saturating_add(self.tile_sums)
    }
}

/// How the weight of a call is stored, as far as [`LinearScratch`] depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightForm {
    /// Every number is stored by itself.
    Dense,
    /// Numbers of few bits.
    Quantised {
        /// How.
        format: QuantFormat,
        /// Whether its inputs are stored in another order.
        is_ordered: bool,
    },
}

/// A call of [`linear`], as far as [`LinearScratch`] depends on it.
#[derive(Clone, Copy, Debug)]
pub struct LinearCall {
    /// The rows of x.
    pub num_tokens: usize,
    /// The columns of x.
    pub in_features: usize,
    /// How the weight is stored.
    pub form: WeightForm,
    /// Whether it is the second product of a [`gated_mlp`] without a bias before it, whose weights are
    /// all stored in one way.
    pub ends_gated_mlp: bool,
}

/// Computes a linear layer; see the head of the file.
#[allow(clippy::too_many_arguments)]
pub fn linear<'a>(
    backend: &CpuBackend,
    x: &[f32],
    num_tokens: usize,
    weight: impl Into<HostWeight<'a>>,
    bias: Option<&[f32]>,
    out: &mut [f32],
    store: Store,
    scratch: &mut LinearScratch,
) -> Result<()> {
    let weight: HostWeight<'_> = weight.into();
    let (out_features, in_features) = (weight.out_features(), weight.in_features());
    if num_tokens.checked_mul(in_features) != Some(x.len())
        || num_tokens.checked_mul(out_features) != Some(out.len())
        || bias.is_some_and(|b| b.len() != out_features)
    {
        return Err(Error::internal(format!(
            "linear: {num_tokens} tokens, {} inputs, {} outputs, bias of {:?}, for a weight of \
             {out_features} x {in_features}",
            x.len(),
            out.len(),
            bias.map(<[f32]>::len)
        )));
    }
    if out.is_empty() {
        return Ok(());
    }
    let epilogue = Finish::new(bias, store, out, out_features);
    if let Some(weight) = TiledWeight::new(backend, num_tokens, weight) {
        let LinearScratch { activations, tile_sums, .. } = scratch;
        weight.make_rows(backend, x, activations)?;
        let epilogue = EachPanel(epilogue);
        // SAFETY: the tiles hold the rows of this product.
        return unsafe {
            weight.multiply(backend, activations.as_slice(), num_tokens, &epilogue, tile_sums)
        };
    }
    let weight = match weight {
        HostWeight::Dense(weight) => weight,
        HostWeight::Quantised(weight) => {
            let LinearScratch { activations, product, tile_sums } = scratch;
            return multiply_quantised(
                backend,
                x,
                num_tokens,
                weight,
                epilogue,
                activations,
                product,
                tile_sums,
            );
        }
    };
    let LinearScratch { activations, product, .. } = scratch;
    let rows = if weight.dtype() == DType::BF16 {
        round_rows(backend, x, in_features, &[], activations)?
    } else {
        let a = SendPointer(x.as_ptr().cast_mut().cast());
        Rows { a, a_stride: in_features, num_rows: num_tokens }
    };
    // SAFETY: `a` holds num_tokens rows of a_stride activations: f32, or what `round_rows` wrote.
    unsafe { multiply(backend, &rows, &Weight::<Packed>::Packed(weight), &epilogue, product) }
}

/// Computes `out = silu(x G^T) * (x U^T)`, where `weight` is G on top of U, with their bias. x is
/// [num_tokens, in_features], out [num_tokens, out_features / 2]; `products`, [num_tokens,
/// out_features], may be used for x W^T.
#[allow(clippy::too_many_arguments)]
pub fn linear_silu_mul<'a>(
    backend: &CpuBackend,
    x: &[f32],
    num_tokens: usize,
    weight: impl Into<HostWeight<'a>>,
    bias: Option<&[f32]>,
    products: &mut [f32],
    out: &mut [f32],
    scratch: &mut LinearScratch,
) -> Result<()> {
    let weight: HostWeight<'_> = weight.into();
    let (width, in_features) = (weight.out_features() / 2, weight.in_features());
    let is_whole = weight.out_features() == 2 * width
        && width.is_multiple_of(PANEL_COLUMNS)
        && num_tokens.checked_mul(in_features) == Some(x.len())
        && num_tokens.checked_mul(width) == Some(out.len());
    let is_served = is_whole && bias.is_none() && !x.is_empty() && !out.is_empty();
    let epilogue = SiluMul { out: SendPointer(out.as_mut_ptr()), width };
    let LinearScratch { activations, tile_sums, .. } = scratch;
    if let Some(weight) = TiledWeight::new(backend, num_tokens, weight).filter(|_| is_served) {
        weight.make_rows(backend, x, activations)?;
        // SAFETY: the tiles hold the rows of this product, and both halves are whole panels.
        return unsafe {
            weight.multiply(backend, activations.as_slice(), num_tokens, &epilogue, tile_sums)
        };
    }
    if let (HostWeight::Quantised(weight), true) = (weight, is_served) {
        if is_in_bf16(backend, weight) {
            return multiply_fp8(backend, x, weight, &epilogue, activations, tile_sums);
        }
        if let Some(layout) = tile_layout(backend, num_tokens, weight) {
            // SAFETY: the backend has tiles, the layout is that of this product, and both
            // halves are whole panels.
            return unsafe {
                multiply_integer_tiles(
                    backend,
                    x,
                    num_tokens,
                    weight,
                    layout,
                    &epilogue,
                    activations,
                    tile_sums,
                )
            };
        }
    }
    linear(backend, x, num_tokens, weight, bias, products, Store::Overwrite, scratch)?;
    silu_mul(backend, products, width, out)
}

/// A weight of [`gated_mlp`] and its bias.
pub type Weights<'a> = (HostWeight<'a>, Option<&'a [f32]>);

/// Computes `out += (silu(x G^T) * (x U^T)) D^T`, where the first of `gate_up` is G on top of U and that
/// of `down` is D, with their bias: the MLP of a layer. x is [num_tokens, in_features of G]; `products`,
/// [num_tokens, 2 * width], and `activated`, [num_tokens, width], may be used for what is in between.
///
/// The bits are those of [`linear_silu_mul`] and [`linear`] in turn.
#[allow(clippy::too_many_arguments)]
pub fn gated_mlp(
    backend: &CpuBackend,
    x: &[f32],
    num_tokens: usize,
    gate_up: Weights<'_>,
    down: Weights<'_>,
    products: &mut [f32],
    activated: &mut [f32],
    out: &mut [f32],
    scratch: &mut LinearScratch,
) -> Result<()> {
    let (stacked, stacked_bias) = gate_up;
    let (narrowing, bias) = down;
    let (width, in_features) = (stacked.out_features() / 2, stacked.in_features());
    let is_whole = stacked.out_features() == 2 * width
        && width.is_multiple_of(PANEL_COLUMNS)
        && narrowing.in_features() == width
        && num_tokens.checked_mul(in_features) == Some(x.len())
        && num_tokens.checked_mul(width) == Some(activated.len())
        && num_tokens.checked_mul(narrowing.out_features()) == Some(out.len())
        && bias.is_none_or(|bias| bias.len() == narrowing.out_features());
    // From one row of tiles on, tiles of bf16 fit into the room for f32.
    let is_served = is_whole
        && stacked_bias.is_none()
        && num_tokens >= TILE_ROWS
        && !(x.is_empty() || activated.is_empty() || out.is_empty());
    let is_served = is_served && backend.has_tiles();
    let tiled = |weight| TiledWeight::new(backend, num_tokens, weight).filter(|_| is_served);
    let narrowing_tiled = tiled(narrowing).filter(|weight| weight.takes_plain_rows());
    if let (Some(stacked), Some(narrowing)) = (tiled(stacked), narrowing_tiled) {
        let LinearScratch { activations, tile_sums, .. } = scratch;
        stacked.make_rows(backend, x, activations)?;
        // SAFETY: the same bytes as integers of two bytes, of which every value is valid; nobody else has
        // them until this ends.
        let tiles = unsafe {
            std::slice::from_raw_parts_mut(
                activated.as_mut_ptr().cast::<u16>(),
                2 * activated.len(),
            )
        };
        debug_assert!(tiles_bytes(num_tokens, width) <= size_of_val(tiles));
        let epilogue = SiluMulTiles { tiles: SendPointer(tiles.as_mut_ptr()), width };
        let finish = EachPanel(Finish::new(bias, Store::Add, out, out.len() / num_tokens));
        // SAFETY: the tiles hold the rows of the first product, and both halves are whole panels. `tiles`
        // has room for those of the second, which the first makes.
        return unsafe {
            stacked.multiply(backend, activations.as_slice(), num_tokens, &epilogue, tile_sums)?;
            narrowing.multiply(backend, tiles, num_tokens, &finish, tile_sums)
        };
    }
    linear_silu_mul(backend, x, num_tokens, stacked, stacked_bias, products, activated, scratch)?;
    linear(backend, activated, num_tokens, narrowing, bias, out, Store::Add, scratch)
}

/// Arranges `silu(gate) * up`, rounded to bf16, in tiles for the next product.
struct SiluMulTiles {
    /// [rows of tiles][width / 32] tiles.
    tiles: SendPointer<u16>,
    width: usize,
}

impl TileEpilogue for SiluMulTiles {
    const IS_GATED: bool = true;

    #[inline(always)]
    fn store<S: Simd>(
        &self,
        gate: &[f32],
        up: &[f32],
        first_row: usize,
        num_rows: usize,
        columns: std::ops::Range<usize>,
    ) {
        let rows = gate.chunks_exact(PANEL_COLUMNS).zip(up.chunks_exact(PANEL_COLUMNS));
        for (row, (gate, up)) in (first_row..).zip(rows.take(num_rows)) {
            let mut values = [0.0; PANEL_COLUMNS];
            silu_mul_row::<S, f32>(gate, up, &mut values);
            for (i, values) in values.chunks_exact(TILE_K).enumerate() {
                let tile = row / TILE_ROWS * (self.width / TILE_K) + columns.start / TILE_K + i;
                // SAFETY: kernels run where S is there. row < num_tokens, and the columns are a whole
                // panel below width, so these 32 values of a tile lie in `tiles`; each row and column
                // is given out once.
                unsafe {
                    let low = S::Vector::load(values.as_ptr());
                    let high = S::Vector::load(values.as_ptr().add(LANES));
                    let place = tile * TILE_LEN + row % TILE_ROWS * TILE_K;
                    S::store_bf16(low, high, self.tiles.get().add(place));
                }
            }
        }
    }
}

/// Writes `silu(gate) * up` to `out`, [num_tokens, width].
struct SiluMul {
    out: SendPointer<f32>,
    width: usize,
}

impl TileEpilogue for SiluMul {
    const IS_GATED: bool = true;

    #[inline(always)]
    fn store<S: Simd>(
        &self,
        gate: &[f32],
        up: &[f32],
        first_row: usize,
        num_rows: usize,
        columns: std::ops::Range<usize>,
    ) {
        let rows = gate.chunks_exact(PANEL_COLUMNS).zip(up.chunks_exact(PANEL_COLUMNS));
        for (row, (gate, up)) in rows.take(num_rows).enumerate() {
            // SAFETY: first_row + row < num_tokens and the columns are below width, so this lies in
            // `out`; each row and column is given out once.
            let out = unsafe {
                std::slice::from_raw_parts_mut(
                    self.out.get().add((first_row + row) * self.width + columns.start),
                    columns.len(),
                )
            };
            silu_mul_row::<S, f32>(&gate[..columns.len()], &up[..columns.len()], out);
        }
    }
}

/// Adds the bias to finished sums and writes them, or adds them, to `out`.
struct Finish<'a> {
    bias: Option<&'a [f32]>,
    store: Store,
    /// The result, [num_tokens, out_features].
    out: SendPointer<f32>,
    out_features: usize,
    /// Whether it is written past the caches: it is large, and nothing of it is read here.
    streams: bool,
}

/// From this many bytes on, results are written past the caches: half of a second-level cache of 2 MiB.
/// Ordinary stores read what they replace first (0.84 for 0.92 TFLOP/s of 512 x 1,024 x 6,144 in bf16,
/// in a harness on a Xeon with AMX).
const STREAMED_BYTES: usize = 1 << 20;

impl<'a> Finish<'a> {
    fn new(bias: Option<&'a [f32]>, store: Store, out: &mut [f32], out_features: usize) -> Self {
        let is_aligned = out.as_ptr().addr().is_multiple_of(64)
            && (out_features * size_of::<f32>()).is_multiple_of(64);
        let streams = store == Store::Overwrite && is_aligned && size_of_val(out) >= STREAMED_BYTES;
        Finish { bias, store, out: SendPointer(out.as_mut_ptr()), out_features, streams }
    }

    /// Writes a row of finished sums past the caches.
    ///
    /// # Safety
    /// `S`'s instruction set is there; `sums` and `bias` have the columns of `out`, whose address and
    /// length are multiples of 64 bytes.
    #[inline(always)]
    unsafe fn stream<S: Simd>(sums: &[f32], bias: Option<&[f32]>, out: &mut [f32]) {
        for column in (0..out.len()).step_by(LANES) {
            // SAFETY: 16 columns are read and written from `column` on, by contract.
            unsafe {
                let mut sum = S::Vector::load(sums.as_ptr().add(column));
                if let Some(bias) = bias {
                    sum = sum.add(S::Vector::load(bias.as_ptr().add(column)));
                }
                sum.stream(out.as_mut_ptr().add(column));
            }
        }
    }
}

impl Epilogue for Finish<'_> {
    #[inline(always)]
    fn store<S: Simd>(
        &self,
        sums: &[f32],
        first_row: usize,
        num_rows: usize,
        columns: std::ops::Range<usize>,
    ) {
        for (row, sums) in sums.chunks_exact(PANEL_COLUMNS).take(num_rows).enumerate() {
            // SAFETY: first_row + row < num_tokens and the columns are below out_features, so this
            // lies in `out`; each row and column is given out once.
            let out = unsafe {
                std::slice::from_raw_parts_mut(
                    self.out.get().add((first_row + row) * self.out_features + columns.start),
                    columns.len(),
                )
            };
            if self.streams {
                let bias = self.bias.map(|bias| &bias[columns.clone()]);
                // SAFETY: kernels run where S is there. The result and its rows begin with multiples of
                // 64 bytes, and columns are cut at such or at the end of a row.
                unsafe { Self::stream::<S>(&sums[..columns.len()], bias, out) };
            } else if let Some(bias) = self.bias {
                let bias = &bias[columns.clone()];
                match self.store {
                    Store::Overwrite => {
                        for ((o, &s), &b) in out.iter_mut().zip(sums).zip(bias) {
                            *o = s + b;
                        }
                    }
                    Store::Add => {
                        for ((o, &s), &b) in out.iter_mut().zip(sums).zip(bias) {
                            *o += s + b;
                        }
                    }
                }
            } else {
                match self.store {
                    Store::Overwrite => out.copy_from_slice(&sums[..columns.len()]),
                    Store::Add => out.iter_mut().zip(sums).for_each(|(o, &s)| *o += s),
                }
            }
        }
    }
}
