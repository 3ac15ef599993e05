//! The tensors of a quantised module: which there are, and whether they are what the config says.

use super::config::QuantConfig;
use super::scheme::{ScaleShape, Scheme};
use crate::error::{Error, Result};
use crate::memory::DType;
use crate::model::checkpoint::{Checkpoint, RawTensor};
use crate::model::safetensors::{compute_dtype, StoredDType};
use crate::ops::quantised::{Code, QuantFormat};

/// Tensors that only a quantised module has, after its name and a dot.
const MARKERS: [&str; 14] = [
    "qweight",
    "weight_packed",
    "qzeros",
    "scales",
    "g_idx",
    "weight_scale_inv",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    // From formats that are refused by their configs.
    "weight_global_scale",
    "weight_scale_2",
    "weight_bitmask",
    "weight.absmax",
];

/// Tensors that say how others quantise activations or the KV cache, and nothing of the weights.
const HARMLESS: [&str; 11] = [
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "output_zero_point",
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_scale",
    "prob_scale",
];

/// Types of scales.
const SCALE_TYPES: [StoredDType; 3] = [StoredDType::F32, StoredDType::F16, StoredDType::BF16];

/// Whether a tensor says how others quantise activations or the KV cache: here scales of activations are
/// found as they come, and the KV cache has none.
pub fn is_harmless(tensor: &str) -> bool {
    tensor.rsplit_once('.').is_some_and(|(_, last)| HARMLESS.contains(&last))
}

/// A quantised linear layer in the files.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantModule {
    /// The name, such as `model.layers.3.mlp.down_proj`.
    pub name: String,
    /// Rows.
    pub out_features: usize,
    /// Columns.
    pub in_features: usize,
    /// The format of the matrix that it becomes.
    pub format: QuantFormat,
    pub(super) layout: Layout,
    pub(super) codes: RawTensor,
    pub(super) scales: RawTensor,
    pub(super) zeros: Option<RawTensor>,
    /// The group of each input.
    pub(super) groups: Option<RawTensor>,
    /// `[out, in]`, where codes are padded.
    pub(super) shape: Option<RawTensor>,
    harmless: Vec<String>,
}

/// The layout of the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub codes: CodeLayout,
    pub scales: ScaleLayout,
    pub zeros: ZeroLayout,
    /// Whether the file may have zeros, but all must be the middle.
    pub zeros_are_middle: bool,
    /// Whether inputs may be in any group, or else must be in that of their place.
    pub groups_are_scattered: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CodeLayout {
    /// Words `[in, out / 8]`, the outputs in AWQ's order.
    Awq,
    /// Words `[in * bits / 32, out]`.
    Gptq,
    /// Words `[out, ceil(in * bits / 32)]`.
    Packed,
    /// Bytes `[out, in]`, integers with a sign.
    Signed,
    /// Bytes `[out, in]`, the codes as they are.
    Plain,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleLayout {
    /// `[groups, out]`
    ByInput,
    /// `[ceil(out / rows), groups]`
    ByOutput { rows: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ZeroLayout {
    /// Words `[groups, out / 8]`, the outputs in AWQ's order.
    Awq,
    /// Words `[groups, out * bits / 32]`.
    Gptq { less_one: bool },
    /// Words `[ceil(out * bits / 32), groups]`.
    Packed,
    /// Bytes like the scales, with a sign.
    Signed,
}

impl QuantModule {
    /// Finds the tensors of a linear layer `[out_features, in_features]` and checks them against
    /// the config. `None` if the layer is not quantised, or there are no files but random numbers.
    ///
    /// The tensors decide whether it is. A config that says otherwise is refused, except that one
    /// of a method that silently leaves out routers and the like may have a plain `weight`.
    pub fn find(
        checkpoint: &Checkpoint,
        config: &QuantConfig,
        module: &str,
        out_features: usize,
        in_features: usize,
    ) -> Result<Option<Self>> {
        if checkpoint.is_random() {
            return Ok(None);
        }
        let scheme = config.scheme(module)?;
        let weight = checkpoint.raw(&format!("{module}.weight"));
        let marker =
            MARKERS.iter().find_map(|marker| checkpoint.raw(&format!("{module}.{marker}")));
        let dense = weight.as_ref().filter(|weight| compute_dtype(weight.dtype).is_some());
        match (dense, &marker, scheme) {
            (Some(dense), Some(marker), _) => Err(Error::invalid_file(format!(
                "{}: tensor {} ({}) is a whole weight, but there is {} of a quantised one as well",
                dense.file, dense.name, dense.dtype, marker.name
            ))),
            (Some(dense), None, Some(_)) if config.is_complete() => {
                Err(Error::invalid_file(format!(
                    "{}: tensor {} is {}, but {} says that it is quantised",
                    dense.file, dense.name, dense.dtype, config.place
                )))
            }
            (Some(_), None, _) => Ok(None),
            // A module that the model lacks altogether is reported where it is read.
            (None, None, None) if weight.is_none() => Ok(None),
            (None, _, None) => {
                let (file, name) = marker
                    .or(weight)
                    .map_or_else(Default::default, |tensor| (tensor.file, tensor.name));
                Err(Error::invalid_file(format!(
                    "{file}: tensor {name} is of a quantised module, but {} says that {module} is not quantised",
                    config.place
                )))
            }
            (None, _, Some(scheme)) => {
                let finder = Finder { checkpoint, config, module, out_features, in_features };
                finder.find(scheme).map(Some)
            }
        }
    }

    /// Returns the tensors that [`QuantModule::decode`] reads.
    pub fn tensors(&self) -> impl Iterator<Item = &RawTensor> {
        let others = [&self.zeros, &self.groups, &self.shape];
        [&self.codes, &self.scales].into_iter().chain(others.into_iter().flatten())
    }

    /// Returns the names of all tensors that are known to belong to the module, those that only say
    /// how to quantise activations included; not that of a bias.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        let used = self.tensors().map(|tensor| tensor.name.as_str());
        used.chain(self.harmless.iter().map(String::as_str))
    }

    /// Whether inputs may be stored in another order than their own.
    pub fn may_be_ordered(&self) -> bool {
        self.groups.is_some() && self.layout.groups_are_scattered
    }

    /// Returns the bytes of its tensors in the files.
    pub fn stored_bytes(&self) -> u64 {
        self.tensors().map(|tensor| tensor.len_bytes).fold(0, u64::saturating_add)
    }
}

/// Looks for the tensors of one module.
struct Finder<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a QuantConfig,
    module: &'a str,
    out_features: usize,
    in_features: usize,
}

impl Finder<'_> {
    fn find(&self, scheme: Scheme) -> Result<QuantModule> {
        let mut module = match scheme {
            Scheme::Awq { group_size, has_zeros } => self.awq(group_size, has_zeros)?,
            Scheme::Gptq { bits, group_size, symmetric, desc_act, is_v2 } => {
                self.gptq(bits, group_size, symmetric, desc_act, is_v2)?
            }
            Scheme::Packed { bits, scales, symmetric } => self.packed(bits, scales, symmetric)?,
            Scheme::Int8 { scales, symmetric, .. } => {
                self.bytes(Code::Int8, Some(scales), symmetric)?
            }
            Scheme::Fp8 { scales, .. } => self.bytes(Code::Fp8, scales, true)?,
        };
        module.format.quantises_inputs =
            scheme.quantises_inputs(module.format.group_size, module.in_features);
        let unexpected = ["weight"].iter().chain(&MARKERS).find_map(|marker| {
            let name = format!("{}.{marker}", self.module);
            self.checkpoint.raw(&name).filter(|_| !module.tensors().any(|known| known.name == name))
        });
        match unexpected {
            Some(tensor) => Err(Error::invalid_file(format!(
                "{}: tensor {} is not of the form that {} says, which has {}",
                tensor.file, tensor.name, self.config.place, module.codes.name
            ))),
            None => Ok(module),
        }
    }

    fn awq(&self, group_size: Option<usize>, has_zeros: bool) -> Result<QuantModule> {
        let (out, inputs) = (self.out_features, self.in_features);
        let codes = self.needed("qweight")?;
        self.check_multiple(&codes, "outputs", out, 8)?;
        self.check(&codes, &[StoredDType::I32], &[&[inputs, out / 8]])?;
        let group_size = self.whole_groups(&codes, group_size)?;
        let num_groups = inputs / group_size.max(1);
        let scales = self.needed("scales")?;
        self.check(&scales, &SCALE_TYPES, &[&[num_groups, out]])?;
        let zeros = self.zeros("qzeros", has_zeros)?;
        if let Some(zeros) = &zeros {
            self.check(zeros, &[StoredDType::I32], &[&[num_groups, out / 8]])?;
        }
        let layout = Layout {
            codes: CodeLayout::Awq,
            scales: ScaleLayout::ByInput,
            zeros: ZeroLayout::Awq,
            zeros_are_middle: !has_zeros,
            groups_are_scattered: false,
        };
        self.module(Code::Int4, group_size, layout, codes, scales, zeros)
    }

    fn gptq(
        &self,
        bits: usize,
        group_size: Option<usize>,
        symmetric: bool,
        desc_act: bool,
        is_v2: bool,
    ) -> Result<QuantModule> {
        let (out, inputs) = (self.out_features, self.in_features);
        let (code, per_word) = (integers(bits), 32 / bits.max(1));
        let codes = self.needed("qweight")?;
        self.check_multiple(&codes, "outputs", out, per_word)?;
        self.check_multiple(&codes, "inputs", inputs, per_word)?;
        self.check(&codes, &[StoredDType::I32], &[&[inputs / per_word, out]])?;
        let group_size = group_size.unwrap_or(inputs).clamp(1, inputs.max(1));
        let num_groups = inputs.div_ceil(group_size);
        let scales = self.needed("scales")?;
        self.check(&scales, &SCALE_TYPES, &[&[num_groups, out]])?;
        let zeros = self.zeros("qzeros", !symmetric)?;
        if let Some(zeros) = &zeros {
            self.check(zeros, &[StoredDType::I32], &[&[num_groups, out / per_word]])?;
        }
        let layout = Layout {
            codes: CodeLayout::Gptq,
            scales: ScaleLayout::ByInput,
            zeros: ZeroLayout::Gptq { less_one: !is_v2 },
            zeros_are_middle: symmetric,
            groups_are_scattered: desc_act,
        };
        let mut module = self.module(code, group_size, layout, codes, scales, zeros)?;
        module.groups = if desc_act { Some(self.needed("g_idx")?) } else { self.raw("g_idx") };
        if let Some(groups) = &module.groups {
            self.check(groups, &[StoredDType::I32], &[&[inputs]])?;
        }
        Ok(module)
    }

    fn packed(&self, bits: usize, scales: ScaleShape, symmetric: bool) -> Result<QuantModule> {
        let (out, inputs) = (self.out_features, self.in_features);
        let words = |len: usize| len.checked_mul(bits).map_or(usize::MAX, |bits| bits.div_ceil(32));
        let codes = self.needed("weight_packed")?;
        self.check(&codes, &[StoredDType::I32], &[&[out, words(inputs)]])?;
        let (group_size, scale_layout, scale) =
            self.scales(&codes, "weight_scale", Some(scales))?;
        let num_groups = inputs.div_ceil(group_size.max(1));
        let zeros = self.zeros("weight_zero_point", !symmetric)?;
        let mut zero_layout = ZeroLayout::Packed;
        if let Some(zeros) = &zeros {
            if symmetric && zeros.dtype == StoredDType::I8 {
                zero_layout = ZeroLayout::Signed;
            } else {
                self.check(zeros, &[StoredDType::I32], &[&[words(out), num_groups]])?;
            }
        }
        let layout = Layout {
            codes: CodeLayout::Packed,
            scales: scale_layout,
            zeros: zero_layout,
            zeros_are_middle: symmetric,
            groups_are_scattered: true,
        };
        let mut module = self.module(integers(bits), group_size, layout, codes, scale, zeros)?;
        module.groups = self.raw("weight_g_idx");
        if let Some(groups) = &module.groups {
            self.check(groups, &[StoredDType::I32], &[&[inputs]])?;
        }
        module.shape = self.raw("weight_shape");
        if let Some(shape) = &module.shape {
            self.check(shape, &[StoredDType::I64, StoredDType::I32], &[&[2]])?;
        }
        Ok(module)
    }

    /// Codes of a byte each, which are not packed.
    fn bytes(
        &self,
        code: Code,
        scales: Option<ScaleShape>,
        symmetric: bool,
    ) -> Result<QuantModule> {
        let (codes, stored) = (
            self.needed("weight")?,
            match code {
                Code::Fp8 => StoredDType::F8_E4M3,
                Code::Int4 | Code::Int8 => StoredDType::I8,
            },
        );
        self.check(&codes, &[stored], &[&[self.out_features, self.in_features]])?;
        // Two names of one thing: both multiply.
        let inverse = "weight_scale_inv";
        let has_inverse = code.is_float() && self.raw(inverse).is_some();
        let name = match scales {
            Some(ScaleShape::Block(_)) if self.config.method_name() == "fp8" => inverse,
            _ if has_inverse => inverse,
            _ => "weight_scale",
        };
        let (group_size, scale_layout, scale) = self.scales(&codes, name, scales)?;
        let zeros = self.zeros("weight_zero_point", !symmetric)?;
        if let Some(zeros) = zeros.as_ref().filter(|_| !symmetric) {
            let shape: Vec<usize> =
                scale.shape.iter().filter_map(|&size| usize::try_from(size).ok()).collect();
            self.check(zeros, &[StoredDType::I8], &[&shape])?;
        }
        let layout = Layout {
            codes: if code.is_float() { CodeLayout::Plain } else { CodeLayout::Signed },
            scales: scale_layout,
            zeros: ZeroLayout::Signed,
            zeros_are_middle: symmetric,
            groups_are_scattered: false,
        };
        self.module(code, group_size, layout, codes, scale, zeros)
    }

    /// Returns how many inputs share a scale, and where the scales are.
    fn scales(
        &self,
        codes: &RawTensor,
        name: &str,
        shape: Option<ScaleShape>,
    ) -> Result<(usize, ScaleLayout, RawTensor)> {
        let (out, inputs) = (self.out_features, self.in_features);
        let tensor = self.needed(name)?;
        let (one, each_row): ([&[usize]; 3], [&[usize]; 2]) =
            ([&[1], &[], &[1, 1]], [&[out, 1], &[out]]);
        let found = match shape {
            Some(shape) => shape,
            // Whichever the file has.
            None if tensor.len_bytes == element_bytes(tensor.dtype) => ScaleShape::Tensor,
            None => ScaleShape::Channel,
        };
        let (group_size, rows) = match found {
            ScaleShape::Tensor => {
                self.check(&tensor, &SCALE_TYPES, &one)?;
                (inputs, out)
            }
            ScaleShape::Channel => {
                self.check(&tensor, &SCALE_TYPES, &each_row)?;
                (inputs, 1)
            }
            ScaleShape::Group(size) => {
                let size = self.whole_groups(codes, Some(size))?;
                self.check(&tensor, &SCALE_TYPES, &[&[out, inputs / size.max(1)]])?;
                (size, 1)
            }
            ScaleShape::Block([rows, columns]) => {
                let blocks = [out.div_ceil(rows.max(1)), inputs.div_ceil(columns.max(1))];
                self.check(&tensor, &SCALE_TYPES, &[&blocks])?;
                (columns, rows)
            }
        };
        // A row of no inputs has no groups; it is refused with the model's config.
        let group_size = group_size.clamp(1, inputs.max(1));
        Ok((group_size, ScaleLayout::ByOutput { rows: rows.max(1) }, tensor))
    }

    /// Returns the tensor of the zeros: needed if zeros are stored, read and checked if they are
    /// there.
    fn zeros(&self, name: &str, needed: bool) -> Result<Option<RawTensor>> {
        if needed {
            self.needed(name).map(Some)
        } else {
            Ok(self.raw(name))
        }
    }

    fn module(
        &self,
        code: Code,
        group_size: usize,
        layout: Layout,
        codes: RawTensor,
        scales: RawTensor,
        zeros: Option<RawTensor>,
    ) -> Result<QuantModule> {
        let scale = compute_dtype(scales.dtype).unwrap_or(DType::F32);
        let has_zeros = zeros.is_some() && !layout.zeros_are_middle;
        let names = HARMLESS.iter().map(|last| format!("{}.{last}", self.module));
        Ok(QuantModule {
            name: self.module.to_owned(),
            out_features: self.out_features,
            in_features: self.in_features,
            format: QuantFormat { code, group_size, has_zeros, scale, quantises_inputs: false },
            layout,
            codes,
            scales,
            zeros,
            groups: None,
            shape: None,
            harmless: names.filter(|name| self.checkpoint.contains(name)).collect(),
        })
    }

    fn raw(&self, last: &str) -> Option<RawTensor> {
        self.checkpoint.raw(&format!("{}.{last}", self.module))
    }

    fn needed(&self, last: &str) -> Result<RawTensor> {
        self.raw(last).ok_or_else(|| {
            Error::invalid_file(format!(
                "tensor {}.{last} is missing from {}, though {} says that the module is quantised ({})",
                self.module,
                self.checkpoint.files_name(),
                self.config.place,
                self.config.method_name()
            ))
        })
    }

    /// Refuses a tensor of another type, or of none of the shapes.
    fn check(&self, tensor: &RawTensor, types: &[StoredDType], shapes: &[&[usize]]) -> Result<()> {
        let RawTensor { file, name, .. } = tensor;
        if !types.contains(&tensor.dtype) {
            let expected: Vec<String> = types.iter().map(StoredDType::to_string).collect();
            return Err(Error::invalid_file(format!(
                "{file}: tensor {name} has element type {}, expected {} by {}",
                tensor.dtype,
                expected.join(" or "),
                self.config.place
            )));
        }
        let is = |shape: &&[usize]| {
            shape.len() == tensor.shape.len()
                && shape.iter().zip(&tensor.shape).all(|(&wanted, &found)| wanted as u64 == found)
        };
        if !shapes.iter().any(is) {
            return Err(Error::invalid_file(format!(
                "{file}: tensor {name} has shape {:?}, expected {:?} by {} for a matrix of {} x {}",
                tensor.shape,
                shapes.first().copied().unwrap_or_default(),
                self.config.place,
                self.out_features,
                self.in_features
            )));
        }
        Ok(())
    }

    /// Refuses a matrix whose sides do not fill words.
    fn check_multiple(&self, codes: &RawTensor, what: &str, len: usize, of: usize) -> Result<()> {
        if len.is_multiple_of(of) {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "{}: tensor {} packs {of} numbers into a word, but the matrix has {len} {what}",
            codes.file, codes.name
        )))
    }

    /// Returns the inputs of a group, which must divide those of a row.
    fn whole_groups(&self, codes: &RawTensor, group_size: Option<usize>) -> Result<usize> {
        let size = group_size.unwrap_or(self.in_features);
        if size == 0 || !self.in_features.is_multiple_of(size) {
            return Err(Error::invalid_file(format!(
                "{}: tensor {} has rows of {} inputs, no whole number of the groups of {size} that {} says",
                codes.file, codes.name, self.in_features, self.config.place
            )));
        }
        Ok(size)
    }
}

fn integers(bits: usize) -> Code {
    if bits == 4 {
        Code::Int4
    } else {
        Code::Int8
    }
}

fn element_bytes(dtype: StoredDType) -> u64 {
    (dtype.bitsize() / 8) as u64
}
