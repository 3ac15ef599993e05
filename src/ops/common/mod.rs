//! Building blocks that several operators share. Nothing here depends on a particular operator.

pub(in crate::ops) mod check;
pub(in crate::ops) mod contiguous;
pub(in crate::ops) mod copy;
pub(in crate::ops) mod cpu_turn;
pub mod index;
pub(in crate::ops) mod launch;
pub(in crate::ops) mod made_product;
pub mod packed_matrix;
pub(in crate::ops) mod panel_product;
pub(in crate::ops) mod row_kernels;
pub(in crate::ops) mod row_sums;
pub(in crate::ops) mod selection;
pub(in crate::ops) mod staging;
pub mod storage;
pub(in crate::ops) mod strided;
pub(in crate::ops) mod tile_product;
pub(in crate::ops) mod tile_rows;
pub(in crate::ops) mod turn;
