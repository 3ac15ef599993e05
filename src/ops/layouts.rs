//! The test that keeps `csrc/common/layouts.cuh` equal to the structs and numbers which the kernels
//! share with the library: `NVCC=none XSERV_BLESS=1 cargo test --lib layouts` rewrites it.

use crate::backend::cuda::layout::Layout;
use crate::backend::cuda::{FaultRecord, TensorMap};
use crate::ops::attention::layouts as attention;
use crate::ops::common::launch::KernelRows;
use crate::ops::common::strided::StridedLayout;
use crate::ops::linear::{
    cuda_gemv, cuda_gemv_mma, cuda_prefill, cuda_prefill_heads, cuda_quantised,
    cuda_quantised_many, cuda_skinny,
};
use crate::ops::{
    adjust_logits, embedding, gemm, kv_cache, qk_norm_rope_append, quantised, rms_norm, rope,
    sample,
};
use std::fmt::Write as _;
use std::path::Path;

const PATH: &str = "csrc/common/layouts.cuh";

const HEAD: &str = "\
// The definitions that the kernels and the library (src/) share: the layout of the structs that kernels take, and
// numbers. Generated from the Rust side: `NVCC=none XSERV_BLESS=1 cargo test --lib layouts` rewrites it, and without
// that variable the test fails if it is out of date. A kernel's source says XSERV_LAYOUT_<struct>; after the struct.
#pragma once

#include <stddef.h>
";

fn layouts() -> Vec<Layout> {
    vec![
        FaultRecord::layout(),
        TensorMap::layout(),
        KernelRows::layout(),
        StridedLayout::layout(),
        attention::AttentionParams::layout(),
        attention::AttentionDecodeParams::layout(),
        attention::AttentionFlashWgmmaParams::layout(),
        attention::FusedArgs::layout(),
        attention::OutputProjection::layout(),
        attention::FusedProjectArgs::layout(),
        embedding::cuda_quantised::EmbeddingQuantisedParams::layout(),
        gemm::GemmParams::layout(),
        gemm::GemvParams::layout(),
        gemm::SimtGemmParams::layout(),
        kv_cache::cuda_swap::KvSwapCopy::layout(),
        kv_cache::cuda_swap::KvSwapParams::layout(),
        cuda_gemv::LinearGemvParams::layout(),
        cuda_gemv_mma::GemvMmaParams::layout(),
        crate::ops::linear::cuda_narrow::LinearNarrowParams::layout(),
        crate::ops::linear::cuda_narrow_quantised::LinearNarrowQuantisedParams::layout(),
        cuda_prefill::PrefillParams::layout(),
        cuda_prefill_heads::PrefillHeadsParams::layout(),
        crate::ops::linear::cuda_prefill_int8::PrefillInt8Params::layout(),
        crate::ops::quantised::cuda_integers::IntegersParams::layout(),
        crate::ops::linear::cuda_fp8::Fp8Params::layout(),
        crate::ops::linear::cuda_fp8_many::Fp8ManyParams::layout(),
        crate::ops::linear::cuda_fp8_prefill::Fp8PrefillParams::layout(),
        cuda_quantised::QuantisedParams::layout(),
        cuda_quantised_many::QuantisedManyParams::layout(),
        crate::ops::linear::cuda_quantised_one::QuantisedOneParams::layout(),
        cuda_skinny::SkinnyParams::layout(),
        qk_norm_rope_append::QkNormRopeAppendArgs::layout(),
        quantised::cuda::DequantiseParams::layout(),
        rms_norm::cuda_rounded::RmsNormRoundedParams::layout(),
        rope::RopeArgs::layout(),
        adjust_logits::Adjustment::layout(),
        adjust_logits::AdjustedRow::layout(),
        sample::SampleRow::layout(),
        sample::SampleArgs::layout(),
    ]
}

/// Returns the names and values, each with a description.
fn numbers() -> Vec<(&'static str, usize, &'static str)> {
    vec![
        ("kBlockTokens", kv_cache::layout::BLOCK_SIZE, "of a block of the paged cache"),
        ("kGroupHeads", attention::GROUP_HEADS as usize, "query heads that a block serves"),
        ("kSegmentKeys", attention::SEGMENT_KEYS as usize, "of a segment of flash_wgmma"),
        ("kNoWindow", attention::NO_WINDOW as usize, "keys of a window that hides none"),
        ("kMaxSwapCopies", kv_cache::cuda_swap::MAX_KV_COPIES, "of a launch of kv_cache/swap"),
        ("kNumSums", cuda_gemv_mma::NUM_SUMS, "that gemv_mma adds up"),
        ("kMaxRank", crate::memory::MAX_RANK, "axes of a tensor"),
        ("kMaxNormedHeadDim", qk_norm_rope_append::MAX_HEAD_DIM as usize, "of q and k"),
        ("kMaxSampleParts", sample::MAX_PARTS, "blocks that share a row of logits"),
        ("kMaxCandidates", sample::MAX_CANDIDATES, "of a row of logits"),
        ("kMaxTeamBlocks", sample::MAX_TEAM_BLOCKS, "that search a row of logits together"),
        ("kSampleCounterWords", sample::SAMPLE_COUNTERS, "of 32 bits, of a row of logits"),
    ]
}

fn shared_bytes() -> Vec<(String, u32)> {
    [
        attention::flash_shared_bytes(),
        attention::split_kv_shared_bytes(),
        attention::flash_wgmma_shared_bytes(),
        attention::fused_shared_bytes(),
        attention::fused_project_shared_bytes(),
        gemm::simt_shared_bytes(),
        gemm::tile_shared_bytes(),
        cuda_prefill::shared_bytes(),
        cuda_skinny::shared_bytes(),
    ]
    .concat()
}

fn render() -> String {
    let mut text = HEAD.to_string();
    text.push_str("\nnamespace xserv {\n\n");
    for (name, value, what) in numbers() {
        let _ = writeln!(text, "constexpr int {name} = {value};  // {what}");
    }
    text.push_str("\n// Dynamic shared memory that the library asks for, by kernel.\nnamespace shared_bytes {\n");
    for (name, bytes) in shared_bytes() {
        let _ = writeln!(text, "constexpr int {name} = {bytes};");
    }
    text.push_str("}  // namespace shared_bytes\n\n}  // namespace xserv\n\n");
    text.push_str("// The head dims that the fused kernels of attention are compiled for.\n");
    let dims = attention::KERNEL_HEAD_DIMS.map(|dim| format!("KERNEL({dim})"));
    let _ = writeln!(text, "#define XSERV_FOR_HEAD_DIMS(KERNEL) {}", dims.join(" "));
    text.push_str(
        "
#define XSERV_FIELD(T, field, offset, bytes)                              \\
  static_assert(offsetof(T, field) == offset && sizeof(T::field) == bytes, \\
                #T \"::\" #field \" lies elsewhere in Rust\")
",
    );
    for layout in layouts() {
        let Layout { name, bytes, fields } = layout;
        let _ = write!(text, "\n#define XSERV_LAYOUT_{name} \\\n");
        for field in fields {
            let each = field.bytes / field.names.len();
            for (i, part) in field.names.iter().enumerate() {
                let offset = field.offset + i * each;
                let _ = writeln!(text, "  XSERV_FIELD({name}, {part}, {offset}, {each}); \\");
            }
        }
        let _ = writeln!(
            text,
            "  static_assert(sizeof({name}) == {bytes}, \"{name} has another size in Rust\")"
        );
    }
    text
}

#[test]
fn the_header_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(PATH);
    let text = render();
    if std::env::var_os("XSERV_BLESS").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap();
    assert!(committed == text, "{PATH} is stale: NVCC=none XSERV_BLESS=1 cargo test --lib layouts");
}

#[test]
fn names_are_unique() {
    let mut names: Vec<&str> = layouts().iter().map(|layout| layout.name).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
}
