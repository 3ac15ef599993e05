//! The order of the inputs of a module whose groups are scattered over them.

use super::module::QuantModule;
use super::words::word_at;
use crate::error::{try_filled, Error, Result};
use crate::model::checkpoint::RawTensor;

/// Reads the group of each input, and returns the inputs in the order of their groups; nothing if
/// they stand in it already.
///
/// The groups of a matrix lie one after the other, each of as many inputs as the next, but for the
/// last. A file whose groups are of other sizes is refused.
pub(super) fn order_of(module: &QuantModule, tensor: &RawTensor, bytes: &[u8]) -> Result<Vec<u32>> {
    let inputs = module.in_features;
    let group_size = module.format.group_size.max(1);
    let num_groups = module.format.num_groups(inputs);
    let group = |input: usize| word_at(bytes, input) as i32;
    let wrong = |what: String| {
        Error::invalid_file(format!("{}: tensor {} {what}", tensor.file, tensor.name))
    };
    // compressed-tensors writes -1 throughout where the order is that of the inputs.
    if (0..inputs).all(|input| group(input) == -1) {
        return Ok(Vec::new());
    }
    let mut next = try_filled(num_groups, 0_usize, "groups of inputs")?;
    let mut is_sorted = true;
    for input in 0..inputs {
        let found = group(input);
        let count = usize::try_from(found).ok().and_then(|group| next.get_mut(group));
        *count.ok_or_else(|| {
            wrong(format!(
                "puts input {input} into group {found}, expected 0 to {}",
                num_groups - 1
            ))
        })? += 1;
        is_sorted &= found as usize == input / group_size;
    }
    if is_sorted {
        return Ok(Vec::new());
    }
    if !module.layout.groups_are_scattered {
        return Err(wrong(format!(
            "puts inputs into other groups than the first {group_size} into the first and so on, \
             but the config says that desc_act is false"
        )));
    }
    for (index, count) in next.iter_mut().enumerate() {
        let begin = index * group_size;
        let expected = group_size.min(inputs - begin);
        if *count != expected {
            return Err(wrong(format!(
                "puts {count} inputs into group {index}, expected {expected}"
            )));
        }
        *count = begin;
    }
    let mut order = try_filled(inputs, 0_u32, "the order of inputs")?;
    for input in 0..inputs {
        let place = usize::try_from(group(input)).ok().and_then(|group| next.get_mut(group));
        if let Some(place) = place {
            if let Some(at) = order.get_mut(*place) {
                *at = input as u32;
            }
            *place += 1;
        }
    }
    Ok(order)
}
