//! Tests of `model/`: reading folders, refusing bad ones, and the forward passes against reference
//! data.

#[path = "../support/model_files.rs"]
mod files;
#[path = "../support/model_golden.rs"]
mod golden;
#[path = "../support/model_packing.rs"]
mod packing;

#[path = "../support/model_driver.rs"]
mod driver;
#[path = "../support/model_quantised.rs"]
mod quantised;

mod config;
mod config_families;
mod cuda;
mod deterministic;
mod experts;
mod folder;
mod forward;
mod fp8_cache;
mod inspect;
mod kept_weights;
mod kv_swap;
mod load;
mod logits;
mod mutations;
mod one_token;
mod plan;
mod prompts;
mod quantised_at_load;
mod quantised_formats;
mod quantised_models;
mod random;
mod resources;
mod rope;
mod safetensors;
mod shard_index;
mod steps;
mod tied;
