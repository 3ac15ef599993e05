//! The CPU half: f32 tokens, and matrices as [`linear`] takes them. A token's weights stay f32, as its
//! activations do.
//!
//! The tokens of an expert are gathered, so that each matrix is read once however many tokens share it.
//! The results of a token's experts are added up in the order of the experts, so that the bits of a row
//! depend on nothing but the row wherever those of [`linear`] do.

use crate::backend::cpu::simd::{Kernel, Simd};
use crate::backend::cpu::{CpuBackend, SendPointer};
use crate::error::{Error, Result};
use crate::memory::HostBuffer;
use crate::ops::common::panel_product::grow;
use crate::ops::experts::{ExpertSizes, Routing};
use crate::ops::linear::cpu::{gated_mlp, linear, LinearScratch, Store};
use crate::ops::linear::{HostMatrix, HostWeight};
use crate::ops::softmax::cpu::softmax_in_place;

/// The matrices of a mixture of experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertMatrices<'a> {
    /// `[num_experts, hidden_size]`
    pub router: &'a HostMatrix,
    /// `[2 * width, hidden_size]` of each expert: gate on top of up.
    pub gate_up: &'a [HostMatrix],
    /// `[hidden_size, width]` of each expert.
    pub down: &'a [HostMatrix],
}

/// Buffers that [`experts`] needs beside those of its products; they grow to the largest call and are then
/// reused.
#[derive(Debug, Default)]
pub struct ExpertsScratch {
    /// The router's logits and then probabilities, `[num_tokens, num_experts]`.
    probabilities: HostBuffer,
    /// The experts of each token in rising order, `[num_tokens, experts_per_token]`.
    ids: HostBuffer,
    /// Their weights.
    weights: HostBuffer,
    /// The places in `ids`, ordered by expert and then by token.
    places: HostBuffer,
    /// Where the places of each expert end, `[num_experts]`.
    ends: HostBuffer,
    /// The tokens of an expert, `[num_tokens, hidden_size]`.
    gathered: HostBuffer,
    /// `[num_tokens, 2 * width]`
    products: HostBuffer,
    /// `[num_tokens, width]`
    activated: HostBuffer,
    /// What an expert makes of its tokens, `[num_tokens, hidden_size]`.
    results: HostBuffer,
}

impl ExpertsScratch {
    /// Makes empty buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of bytes held.
    pub fn size_bytes(&self) -> usize {
        [
            &self.probabilities,
            &self.ids,
            &self.weights,
            &self.places,
            &self.ends,
            &self.gathered,
            &self.products,
            &self.activated,
            &self.results,
        ]
        .iter()
        .map(|buffer| buffer.len_bytes())
        .sum()
    }

    /// Returns the bytes held after a call with `num_tokens` tokens.
    pub fn bytes_for(sizes: &ExpertSizes, num_tokens: usize) -> usize {
        let lens = lens(sizes, num_tokens);
        lens.iter().fold(0, |sum: usize, len| sum.saturating_add(len.saturating_mul(4)))
    }

    /// Makes the buffers large enough, and cuts them to the sizes of a call.
    fn cut(&mut self, sizes: &ExpertSizes, num_tokens: usize) -> Result<Buffers<'_>> {
        let lens = lens(sizes, num_tokens);
        let [of_probabilities, of_ids, of_weights, of_places, of_ends, of_gathered, ..] = lens;
        let [.., of_products, of_activated, of_results] = lens;
        Ok(Buffers {
            probabilities: floats(&mut self.probabilities, of_probabilities)?,
            ids: numbers(&mut self.ids, of_ids)?,
            weights: floats(&mut self.weights, of_weights)?,
            places: numbers(&mut self.places, of_places)?,
            ends: numbers(&mut self.ends, of_ends)?,
            gathered: floats(&mut self.gathered, of_gathered)?,
            products: floats(&mut self.products, of_products)?,
            activated: floats(&mut self.activated, of_activated)?,
            results: floats(&mut self.results, of_results)?,
        })
    }
}

/// Returns the lengths of the buffers in numbers of 4 bytes, in the order of [`ExpertsScratch`].
fn lens(sizes: &ExpertSizes, num_tokens: usize) -> [usize; 9] {
    let ExpertSizes { routing, hidden_size, width } = *sizes;
    let of = |columns: usize| num_tokens.saturating_mul(columns);
    let (num_experts, chosen) = (routing.num_experts(), of(routing.experts_per_token()));
    let (hidden, inner) = (of(hidden_size), of(width));
    let products = inner.saturating_mul(2);
    [of(num_experts), chosen, chosen, chosen, num_experts, hidden, products, inner, hidden]
}

fn floats(buffer: &mut HostBuffer, len: usize) -> Result<&mut [f32]> {
    grow::<f32>(buffer, len, "the tokens of experts")?;
    Ok(buffer.as_mut_slice().get_mut(..len).unwrap_or_default())
}

fn numbers(buffer: &mut HostBuffer, len: usize) -> Result<&mut [u32]> {
    grow::<u32>(buffer, len, "the experts of tokens")?;
    Ok(buffer.as_mut_slice().get_mut(..len).unwrap_or_default())
}

/// The buffers of [`ExpertsScratch`] in the sizes of a call.
struct Buffers<'a> {
    probabilities: &'a mut [f32],
    ids: &'a mut [u32],
    weights: &'a mut [f32],
    places: &'a mut [u32],
    ends: &'a mut [u32],
    gathered: &'a mut [f32],
    products: &'a mut [f32],
    activated: &'a mut [f32],
    results: &'a mut [f32],
}

/// Adds to `out` [num_tokens, hidden_size] what the experts of each token make of x [num_tokens,
/// hidden_size].
#[allow(clippy::too_many_arguments)]
pub fn experts(
    backend: &CpuBackend,
    x: &[f32],
    num_tokens: usize,
    routing: Routing,
    matrices: ExpertMatrices<'_>,
    out: &mut [f32],
    products: &mut LinearScratch,
    scratch: &mut ExpertsScratch,
) -> Result<()> {
    let sizes = check(x.len(), num_tokens, routing, &matrices, out.len())?;
    let per_token = routing.experts_per_token();
    if num_tokens == 0 || sizes.hidden_size == 0 {
        return Ok(());
    }
    let hidden_size = sizes.hidden_size;
    let Buffers {
        probabilities,
        ids,
        weights,
        places,
        ends,
        gathered,
        products: inner,
        activated,
        results,
    } = scratch.cut(&sizes, num_tokens)?;
    let router: HostWeight<'_> = matrices.router.into();
    linear(backend, x, num_tokens, router, None, probabilities, Store::Overwrite, products)?;
    route(backend, probabilities, routing, ids, weights)?;
    group(ids, places, ends)?;
    let mut begin = 0;
    for ((gate_up, down), &end) in matrices.gate_up.iter().zip(matrices.down).zip(&*ends) {
        let end = end as usize;
        let of_expert = places.get(begin..end).unwrap_or_default();
        begin = end;
        if of_expert.is_empty() {
            continue;
        }
        // Another batch may send more of its tokens here.
        products.reserve(backend, num_tokens, gate_up, false)?;
        products.reserve(backend, num_tokens, down, true)?;
        let num_rows = of_expert.len();
        let part = |len: usize| num_rows * len;
        let gathered = gathered.get_mut(..part(hidden_size)).unwrap_or_default();
        let inner = inner.get_mut(..part(2 * sizes.width)).unwrap_or_default();
        let activated = activated.get_mut(..part(sizes.width)).unwrap_or_default();
        let results = results.get_mut(..part(hidden_size)).unwrap_or_default();
        backend.parallel_rows(gathered, hidden_size, |first, rows| {
            let places = of_expert.iter().skip(first);
            for (row, &place) in rows.chunks_exact_mut(hidden_size).zip(places) {
                row.copy_from_slice(row_of(x, place as usize / per_token, hidden_size));
            }
        })?;
        results.fill(0.0);
        let (gate_up, down) = ((gate_up.into(), None), (down.into(), None));
        gated_mlp(backend, gathered, num_rows, gate_up, down, inner, activated, results, products)?;
        add(backend, results, of_expert, per_token, weights, hidden_size, out)?;
    }
    Ok(())
}

/// Checks the sizes of a call against each other.
fn check(
    x_len: usize,
    num_tokens: usize,
    routing: Routing,
    matrices: &ExpertMatrices<'_>,
    out_len: usize,
) -> Result<ExpertSizes> {
    let router: HostWeight<'_> = matrices.router.into();
    let hidden_size = router.in_features();
    let width = matrices.down.first().map_or(0, |down| HostWeight::from(down).in_features());
    let num_experts = routing.num_experts();
    let has_shape = |matrix: &HostMatrix, rows: usize, columns: usize| {
        let matrix = HostWeight::from(matrix);
        (matrix.out_features(), matrix.in_features()) == (rows, columns)
    };
    let is_whole = router.out_features() == num_experts
        && matrices.gate_up.len() == num_experts
        && matrices.down.len() == num_experts
        && matrices.gate_up.iter().all(|m| has_shape(m, 2 * width, hidden_size))
        && matrices.down.iter().all(|m| has_shape(m, hidden_size, width))
        && num_tokens.checked_mul(hidden_size) == Some(x_len)
        && x_len == out_len
        && num_tokens
            .checked_mul(routing.experts_per_token())
            .is_some_and(|places| u32::try_from(places).is_ok());
    if !is_whole {
        return Err(Error::internal(format!(
            "experts: {num_tokens} tokens, {x_len} inputs, {out_len} outputs, for {num_experts} \
             experts of {width} x {hidden_size}"
        )));
    }
    Ok(ExpertSizes { routing, hidden_size, width })
}

/// Returns row `row` of a matrix with rows of `width`.
fn row_of(matrix: &[f32], row: usize, width: usize) -> &[f32] {
    matrix.get(row * width..(row + 1) * width).unwrap_or_default()
}

/// Chooses the experts of each token from the router's `logits` [num_tokens, num_experts], which become
/// probabilities. Writes the experts in rising order to `ids` and their weights to `weights`, both
/// [num_tokens, experts_per_token].
///
/// A NaN makes all probabilities of its token NaN, and so its weights; its experts are then the first.
pub fn route(
    backend: &CpuBackend,
    logits: &mut [f32],
    routing: Routing,
    ids: &mut [u32],
    weights: &mut [f32],
) -> Result<()> {
    let (num_experts, per_token) = (routing.num_experts(), routing.experts_per_token());
    let num_tokens = logits.len() / num_experts;
    let is_whole = num_tokens * num_experts == logits.len()
        && num_tokens.checked_mul(per_token) == Some(ids.len())
        && ids.len() == weights.len();
    if !is_whole {
        return Err(Error::internal(format!(
            "experts: {} logits of {num_experts} experts, {} ids, {} weights",
            logits.len(),
            ids.len(),
            weights.len()
        )));
    }
    let (ids, weights) = (SendPointer(ids.as_mut_ptr()), SendPointer(weights.as_mut_ptr()));
    backend.parallel_rows(logits, num_experts, |first, logits| {
        let num_rows = logits.len() / num_experts;
        let (begin, len) = (first * per_token, num_rows * per_token);
        // SAFETY: rows first..first + num_rows are below num_tokens, of which both have `per_token`
        // numbers each; every row is given out once.
        let (ids, weights) = unsafe {
            (
                std::slice::from_raw_parts_mut(ids.get().add(begin), len),
                std::slice::from_raw_parts_mut(weights.get().add(begin), len),
            )
        };
        backend.run(Route { logits, routing, ids, weights });
    })
}

/// Chooses the experts of some tokens.
struct Route<'a> {
    logits: &'a mut [f32],
    routing: Routing,
    ids: &'a mut [u32],
    weights: &'a mut [f32],
}

impl Kernel for Route<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Route { logits, routing, ids, weights } = self;
        let per_token = routing.experts_per_token();
        let rows = logits.chunks_exact_mut(routing.num_experts());
        let chosen = ids.chunks_exact_mut(per_token).zip(weights.chunks_exact_mut(per_token));
        for (row, (ids, weights)) in rows.zip(chosen) {
            softmax_in_place::<S>(row);
            choose(row, ids, weights);
            if routing.renormalises() {
                let sum: f32 = weights.iter().sum();
                weights.iter_mut().for_each(|weight| *weight /= sum);
            }
            sort_by_id(ids, weights);
        }
    }
}

/// Finds the largest probabilities, the largest first, and of equal ones the first; NaN is the largest.
/// `ids` and `weights` have room for equally many, at most all.
fn choose(probabilities: &[f32], ids: &mut [u32], weights: &mut [f32]) {
    let is_before = |a: f32, b: f32| a > b || (a.is_nan() && !b.is_nan());
    let mut len = 0;
    for (id, &probability) in (0..).zip(probabilities) {
        let found = weights[..len].iter().rev();
        let place = len - found.take_while(|&&other| is_before(probability, other)).count();
        if place == ids.len() {
            continue;
        }
        len = (len + 1).min(ids.len());
        ids.copy_within(place..len - 1, place + 1);
        weights.copy_within(place..len - 1, place + 1);
        (ids[place], weights[place]) = (id, probability);
    }
}

/// Brings the experts of a token, with their weights, into rising order.
fn sort_by_id(ids: &mut [u32], weights: &mut [f32]) {
    for end in 1..ids.len() {
        let (id, weight) = (ids[end], weights[end]);
        let place = ids[..end].iter().take_while(|&&other| other < id).count();
        ids.copy_within(place..end, place + 1);
        weights.copy_within(place..end, place + 1);
        (ids[place], weights[place]) = (id, weight);
    }
}

/// Orders the places in `ids` by what is there, equal ones as they are. `ends` has the end of each run of
/// equals.
fn group(ids: &[u32], places: &mut [u32], ends: &mut [u32]) -> Result<()> {
    let out_of_range = || Error::internal("experts: an expert out of range");
    ends.fill(0);
    for &id in ids {
        *ends.get_mut(id as usize).ok_or_else(out_of_range)? += 1;
    }
    // First the beginnings, which move to the ends as the runs fill.
    let mut begin = 0;
    for end in &mut *ends {
        begin += std::mem::replace(end, begin);
    }
    for (place, &id) in (0..).zip(ids) {
        let next = ends.get_mut(id as usize).ok_or_else(out_of_range)?;
        *places.get_mut(*next as usize).ok_or_else(out_of_range)? = place;
        *next += 1;
    }
    Ok(())
}

/// Adds the results of an expert, times the weights of its tokens, to their rows of `out`.
fn add(
    backend: &CpuBackend,
    results: &[f32],
    places: &[u32],
    per_token: usize,
    weights: &[f32],
    hidden_size: usize,
    out: &mut [f32],
) -> Result<()> {
    let num_tokens = out.len() / hidden_size;
    let out = SendPointer(out.as_mut_ptr());
    backend.parallel_tokens(places.len(), hidden_size, |rows| {
        let results = results.chunks_exact(hidden_size).zip(places);
        for (result, &place) in results.skip(rows.start).take(rows.len()) {
            let token = place as usize / per_token;
            let Some(&weight) = weights.get(place as usize) else { return };
            if token >= num_tokens {
                return;
            }
            // SAFETY: the token is one of `out`, which is borrowed by this call; an expert has a token
            // once, so that no other row of `results` is added to it.
            let out = unsafe {
                std::slice::from_raw_parts_mut(out.get().add(token * hidden_size), hidden_size)
            };
            out.iter_mut().zip(result).for_each(|(out, &result)| *out += weight * result);
        }
    })
}
