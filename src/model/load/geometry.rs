//! The layout of a weight on the device compared with that of its file: the element type may
//! differ, and heads may lie further apart.

use super::heads::HeadSpacing;
use crate::memory::DType;
use crate::ops::linear::{ShardAxis, ShardUnit};

/// The rows and row lengths of a weight, in the file and on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) struct Geometry {
    pub rows: usize,
    pub columns: usize,
    spacing: HeadSpacing,
    heads_along_rows: bool,
    heads_along_columns: bool,
}

impl Geometry {
    pub fn new(rows: usize, columns: usize, shard: ShardAxis, spacing: HeadSpacing) -> Self {
        Geometry {
            rows,
            columns,
            spacing,
            heads_along_rows: shard == ShardAxis::Out(ShardUnit::Head),
            heads_along_columns: shard == ShardAxis::In(ShardUnit::Head),
        }
    }

    /// Returns the same numbers without division into rows, which makes no difference if nothing
    /// lies between heads; `None` otherwise.
    pub fn flat(&self) -> Option<Geometry> {
        if self.spacing.is_spaced() && (self.heads_along_rows || self.heads_along_columns) {
            return None;
        }
        let len = self.rows.checked_mul(self.columns)?;
        Some(Geometry::new(len, 1, ShardAxis::None, self.spacing))
    }

    /// Whether rows on the device are those of the file.
    pub fn keeps_rows(&self) -> bool {
        self.columns == self.device_columns()
    }

    /// Returns the number of rows on the device.
    pub fn device_rows(&self) -> usize {
        if self.heads_along_rows {
            self.spacing.spaced(self.rows)
        } else {
            self.rows
        }
    }

    /// Returns the number of columns on the device.
    pub fn device_columns(&self) -> usize {
        if self.heads_along_columns {
            self.spacing.spaced(self.columns)
        } else {
            self.columns
        }
    }

    /// Returns the stretches of the device's memory between which zeros lie, and which hold the
    /// numbers of the file in their order: how many there are, the length of each, and the distance
    /// from one to the next.
    pub fn stretches(&self) -> (usize, usize, usize) {
        let HeadSpacing { head_dim, stride } = self.spacing;
        let (rows, columns) = (self.rows, self.columns);
        if self.spacing.is_spaced() && self.heads_along_rows {
            (rows / head_dim, head_dim * columns, stride * columns)
        } else if self.spacing.is_spaced() && self.heads_along_columns {
            (rows * (columns / head_dim), head_dim, stride)
        } else {
            (1, rows * columns, rows * columns)
        }
    }

    /// Returns the runs of rows `first..last` that stay together: (first row, first row on the device, rows).
    pub fn runs(
        &self,
        first: usize,
        last: usize,
    ) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        let head = if self.heads_along_rows && self.spacing.is_spaced() {
            self.spacing.head_dim
        } else {
            usize::MAX
        };
        let mut row = first;
        std::iter::from_fn(move || {
            let rows = (last.checked_sub(row)?).min(head - row % head);
            let run =
                (row, if head == usize::MAX { row } else { self.spacing.spaced_index(row) }, rows);
            row += rows;
            (rows > 0).then_some(run)
        })
    }
}

/// Writes whole rows of a file as rows of the device, with the heads spaced.
pub(in crate::model) fn convert(
    bytes: &[u8],
    from: DType,
    out: &mut [u8],
    to: DType,
    geometry: &Geometry,
) {
    let (columns, device_columns) = (geometry.columns, geometry.device_columns());
    if geometry.keeps_rows() {
        return convert_run(bytes, from, out, to);
    }
    let spacing = geometry.spacing;
    let rows = bytes.chunks_exact(columns * from.size_bytes());
    let out_rows = out.chunks_exact_mut(device_columns * to.size_bytes());
    for (row, out_row) in rows.zip(out_rows) {
        let heads = row.chunks_exact(spacing.head_dim * from.size_bytes());
        let out_heads = out_row.chunks_exact_mut(spacing.stride * to.size_bytes());
        for (head, out_head) in heads.zip(out_heads) {
            let (used, gap) = out_head.split_at_mut(spacing.head_dim * to.size_bytes());
            convert_run(head, from, used, to);
            gap.fill(0);
        }
    }
}

/// Converts little-endian numbers to numbers of the machine.
pub(super) fn convert_run(bytes: &[u8], from: DType, out: &mut [u8], to: DType) {
    if from == to && cfg!(target_endian = "little") {
        if let Some(out) = out.get_mut(..bytes.len()) {
            out.copy_from_slice(bytes);
        }
        return;
    }
    match from {
        DType::F32 => narrow(words(bytes).map(f32::from_le_bytes), out, to),
        DType::F16 => {
            let value = |b| half::f16::from_le_bytes(b).to_f32();
            narrow(words(bytes).map(value), out, to)
        }
        DType::BF16 => {
            let value = |b| half::bf16::from_le_bytes(b).to_f32();
            narrow(words(bytes).map(value), out, to)
        }
    }
}

fn narrow(values: impl Iterator<Item = f32>, out: &mut [u8], to: DType) {
    match to {
        DType::F32 => fill(out, values.map(f32::to_ne_bytes)),
        DType::F16 => fill(out, values.map(|x| half::f16::from_f32(x).to_ne_bytes())),
        DType::BF16 => fill(out, values.map(|x| half::bf16::from_f32(x).to_ne_bytes())),
    }
}

fn fill<const N: usize>(out: &mut [u8], values: impl Iterator<Item = [u8; N]>) {
    out.chunks_exact_mut(N).zip(values).for_each(|(out, value)| out.copy_from_slice(&value));
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.chunks_exact(N).map(|word| {
        let mut value = [0; N];
        value.copy_from_slice(word);
        value
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn rows_of_heads_are_spaced_out() {
        let spacing = HeadSpacing { head_dim: 48, stride: 64 };
        let geometry = Geometry::new(144, 5, ShardAxis::Out(ShardUnit::Head), spacing);
        assert_eq!((geometry.device_rows(), geometry.device_columns()), (192, 5));
        let runs: Vec<_> = geometry.runs(40, 100).collect();
        assert_eq!(runs, [(40, 40, 8), (48, 64, 48), (96, 128, 4)]);
        assert_eq!(geometry.runs(7, 7).count(), 0);
        assert_eq!(geometry.stretches(), (3, 240, 320));
        let whole = Geometry::new(144, 5, ShardAxis::None, spacing);
        assert_eq!(whole.runs(40, 100).collect::<Vec<_>>(), [(40, 40, 60)]);
        assert_eq!(whole.stretches(), (1, 720, 720));
        let same = HeadSpacing { head_dim: 64, stride: 64 };
        let geometry = Geometry::new(144, 5, ShardAxis::Out(ShardUnit::Head), same);
        assert_eq!(geometry.runs(0, 144).collect::<Vec<_>>(), [(0, 0, 144)]);
    }

    #[test]
    fn columns_of_heads_are_spaced_out() {
        let spacing = HeadSpacing { head_dim: 2, stride: 3 };
        let geometry = Geometry::new(2, 4, ShardAxis::In(ShardUnit::Head), spacing);
        assert_eq!((geometry.device_rows(), geometry.device_columns()), (2, 6));
        assert_eq!(geometry.stretches(), (4, 2, 3));
        let mut out = vec![9; 2 * 6 * 4];
        let bytes = f32s(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        convert(&bytes, DType::F32, &mut out, DType::F32, &geometry);
        assert_eq!(out, f32s(&[1.0, 2.0, 0.0, 3.0, 4.0, 0.0, 5.0, 6.0, 0.0, 7.0, 8.0, 0.0]));
    }

    #[test]
    fn numbers_are_rounded_to_the_nearest() {
        let values = [1.0, -3.25, 65504.0, 1e-8, f32::INFINITY];
        for to in [DType::F32, DType::F16, DType::BF16] {
            let mut out = vec![0; values.len() * to.size_bytes()];
            convert_run(&f32s(&values), DType::F32, &mut out, to);
            let mut back = vec![0; values.len() * 4];
            convert_run(&out, to, &mut back, DType::F32);
            let expected: Vec<f32> = values
                .iter()
                .map(|&x| match to {
                    DType::F32 => x,
                    DType::F16 => half::f16::from_f32(x).to_f32(),
                    DType::BF16 => half::bf16::from_f32(x).to_f32(),
                })
                .collect();
            assert_eq!(back, f32s(&expected));
        }
    }
}
