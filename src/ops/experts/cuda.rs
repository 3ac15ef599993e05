//! The CUDA half: `csrc/ops/experts`. Tokens choose their experts, are sorted by them, and each expert
//! multiplies its own; then every token adds up the results of its experts.

use super::cuda_products::{Product, Products};
use super::cuda_routes::{has_normed_experts, most_words, Routes, Stream};
use super::matrices::ExpertLayer;
use super::ExpertSizes;
use crate::backend::cuda::CudaContext;
use crate::backend::{Arena, ComputeContext, DeviceTensor};
use crate::error::{Error, Result};
use crate::memory::{DType, ElementType, Tensor};
use crate::ops::common::contiguous::{check, cuda, matrix_size};
use crate::ops::embedding::embedding;

/// The most experts that a token chooses from, and that it has.
const MAX_EXPERTS: usize = 1024;
const MAX_EXPERTS_PER_TOKEN: usize = 32;

/// The tokens that pass at a time, so that the rows of all their experts take a bounded memory.
const MAX_TOKENS: usize = 4096;
const WHAT: &str = "the experts of tokens";

/// Returns the device memory that [`experts`] and the logits of the router take for a pass of `num_tokens`
/// tokens; the most there is if that cannot be counted.
pub fn scratch_bytes(dtype: DType, num_tokens: usize, sizes: &ExpertSizes) -> usize {
    let ExpertSizes { routing, hidden_size, width } = *sizes;
    let at_a_time = num_tokens.min(MAX_TOKENS);
    let assignments = at_a_time.saturating_mul(routing.experts_per_token());
    let element = ElementType::Float(dtype);
    let bytes = |element, shape: &[usize]| Arena::bytes_for(element, shape).unwrap_or(usize::MAX);
    bytes(element, &[num_tokens, routing.num_experts()])
        .saturating_add(bytes(ElementType::I32, &[most_words(&routing, at_a_time)]))
        .saturating_add(bytes(element, &[assignments, width]))
        .saturating_add(bytes(element, &[assignments, hidden_size]))
}

/// Computes `out += sum of w_e * W_down,e (silu(W_gate,e x) * (W_up,e x))` over the experts of each token; see
/// the head of the folder. x and out `[num_tokens, hidden_size]`; logits `[num_tokens, num_experts]`, the
/// products of x and the router. All are of one type.
pub fn experts(
    context: &ComputeContext,
    layer: &ExpertLayer<'_>,
    x: &DeviceTensor,
    logits: &DeviceTensor,
    out: &DeviceTensor,
) -> Result<()> {
    let routing = &layer.routing;
    let (num_tokens, hidden) = matrix_size("out", out)?;
    let num_experts = routing.num_experts();
    check("x", x, out.element(), &[num_tokens.into(), hidden.into()])?;
    check("logits", logits, out.element(), &[num_tokens.into(), num_experts as i64])?;
    check_layer(layer, hidden as usize)?;
    let hidden = hidden as usize;
    let mut first = 0;
    while first < num_tokens as usize {
        let rows = (num_tokens as usize - first).min(MAX_TOKENS);
        let part =
            |tensor: &DeviceTensor, width: usize| tensor.view(first * width, &[rows, width], None);
        let (x, out) = (part(x, hidden)?, part(out, hidden)?);
        let logits = part(logits, num_experts)?;
        some_tokens(context, layer, &x, &out, |cuda, routes| {
            routes.choose(cuda, routing, &logits)
        })?;
        first += rows;
    }
    Ok(())
}

/// Computes the same as the norm, the products with the router and [`experts`] in turn, with fewer kernels.
pub fn normed_experts(
    context: &ComputeContext,
    layer: &ExpertLayer<'_>,
    stream: &Stream<'_>,
) -> Result<()> {
    let (num_tokens, hidden) = matrix_size("the stream", stream.hidden)?;
    let num_experts = layer.routing.num_experts();
    let element = stream.hidden.element();
    check("normed", stream.normed, element, &[num_tokens.into(), hidden.into()])?;
    check("the norm", stream.norm.0, element, &[hidden.into()])?;
    check("router", stream.router, element, &[num_experts as i64, hidden.into()])?;
    check_layer(layer, hidden as usize)?;
    if !has_normed_experts(stream) {
        return Err(Error::internal(format!("experts of a stream of {num_tokens} x {hidden}")));
    }
    if num_tokens == 0 {
        return Ok(());
    }
    let shape = [num_tokens as usize, num_experts];
    let logits = DeviceTensor::temporary(context, element, &shape, WHAT)?;
    some_tokens(context, layer, stream.normed, stream.hidden, |cuda, routes| {
        routes.choose_by_stream(cuda, &layer.routing, stream, &logits)
    })
}

/// Checks the matrices of a layer against each other.
fn check_layer(layer: &ExpertLayer<'_>, hidden: usize) -> Result<()> {
    let ExpertLayer { routing, gate_up, down, .. } = layer;
    let (num_experts, width) = (routing.num_experts(), down.in_features());
    let fits = gate_up.out_features() == 2 * width
        && gate_up.in_features() == hidden
        && down.out_features() == hidden
        && [gate_up.num_experts(), down.num_experts()] == [num_experts; 2];
    if !fits || num_experts > MAX_EXPERTS || routing.experts_per_token() > MAX_EXPERTS_PER_TOKEN {
        return Err(Error::internal(format!(
            "{routing:?} of {gate_up:?} and {down:?} for rows of {hidden}"
        )));
    }
    Ok(())
}

/// Queues the experts of tokens x, for which `choose` queues the choice, and adds the results to `out`.
fn some_tokens(
    context: &ComputeContext,
    layer: &ExpertLayer<'_>,
    x: &DeviceTensor,
    out: &DeviceTensor,
    choose: impl FnOnce(&CudaContext, &Routes) -> Result<()>,
) -> Result<()> {
    let (cuda, routing) = (cuda(context)?, &layer.routing);
    let (num_tokens, hidden) = matrix_size("x", x)?;
    let products = Products::new(layer, num_tokens as usize, x.element());
    let routes = Routes::new(context, routing, num_tokens as usize, products.tile_slots())?;
    choose(cuda, &routes)?;
    cuda.mark("experts_route", 0, 0.0)?;
    let rows = routes.num_assignments;
    let temporary =
        |width: usize| DeviceTensor::temporary(context, x.element(), &[rows, width], WHAT);
    let (activated, results) = (temporary(layer.down.in_features())?, temporary(hidden as usize)?);
    let tokens = if products.gathers() {
        // The results take their place.
        embedding(context, x, &*routes.token_ids()?, &results)?;
        None
    } else {
        Some(routes.tokens())
    };
    let source: &Tensor = if tokens.is_some() { x } else { &results };
    let (bytes, flops) = products.estimate(&layer.gate_up, rows);
    let product = Product { matrices: &layer.gate_up, is_gated: true, tokens };
    products.launch(cuda, &product, &routes, source, &activated)?;
    cuda.mark("experts_gate_up", bytes, flops)?;
    let (bytes, flops) = products.estimate(&layer.down, rows);
    let product = Product { matrices: &layer.down, is_gated: false, tokens: None };
    products.launch(cuda, &product, &routes, &activated, &results)?;
    cuda.mark("experts_down", bytes, flops)?;
    routes.combine(cuda, routing.experts_per_token(), &results, out)?;
    cuda.mark("experts_combine", 0, 0.0)
}
