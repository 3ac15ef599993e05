//! Quantised weights in files: which formats there are, how they are recognised and what their
//! numbers are.
//!
//! ```text
//! config       quantization_config of config.json
//! auto_round   that of auto-round, which has the layouts of GPTQ and AWQ
//! compressed   that of compressed-tensors, which has a scheme for each group of modules
//! model_opt    that of NVIDIA's Model Optimizer
//! pattern      modules that a config names, by name or by regular expression
//! scheme       what the config says of one module
//! module       the tensors of a module, checked against that
//! decode       their bytes turned into a matrix: order of the inputs, packed words
//! ```
//!
//! Which modules are quantised is said twice: by the config, and by the tensors that are there.
//! Neither is believed alone.

mod auto_round;
mod compressed;
mod config;
mod decode;
mod model_opt;
mod module;
mod order;
mod pattern;
mod scheme;
mod values;
mod words;

pub use config::{QuantConfig, OLDER_FILES};
pub use decode::{ModuleBytes, ROWS_AT_ONCE};
pub use module::{is_harmless, QuantModule};
pub use scheme::{ScaleShape, Scheme};
