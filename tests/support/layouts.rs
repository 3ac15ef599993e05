//! Shapes and strides that operators over rows and over elements are tested with.

use super::tensors::*;

/// Shapes, strides and how far the first element is off its alignment.
pub const LAYOUTS: [(&[i64], &[i64], usize); 12] = [
    (&[0, 8], &[8, 1], 0),
    (&[], &[], 0),
    (&[1], &[1], 0),
    (&[31], &[1], 0),
    (&[33], &[1], 1),
    (&[4, 520], &[520, 1], 0),
    (&[3, 1031], &[1031, 1], 0),
    (&[2, 3, 40], &[160, 48, 1], 0),
    (&[2, 3, 40], &[161, 41, 1], 0),
    (&[7, 16], &[16, 1], 3),
    (&[24, 9], &[1, 24], 0),
    (&[5, 6], &[20, 3], 0),
];

/// Returns the elements of a shape.
pub fn len(shape: &[i64]) -> usize {
    shape.iter().product::<i64>() as usize
}

/// Widths around vectors, warps and the limits between kernels, for vectors of 4 and of 8 elements.
const ROW_SHAPES: [(usize, usize); 24] = [
    (1, 1),
    (3, 7),
    (2, 8),
    (33, 31),
    (31, 32),
    (5, 33),
    (17, 64),
    (32, 68),
    (33, 128),
    (9, 132),
    (9, 136),
    (10, 260),
    (7, 264),
    (9, 516),
    (9, 520),
    (3, 1032),
    (2, 2560),
    (1, 4096),
    (2, 4100),
    (1, 16384),
    (2, 16392),
    (1, 20001),
    (0, 16),
    (5, 0),
];

/// A way to lay out rows of some width.
pub struct Layout {
    pub name: &'static str,
    pub shape: Vec<i64>,
    pub strides: Vec<i64>,
    pub misalign: usize,
}

fn row_layouts(rows: usize, width: usize) -> Vec<Layout> {
    let padded = width.next_multiple_of(8) as i64;
    let (rows, width) = (rows as i64, width as i64);
    let mut all = vec![
        Layout {
            name: "contiguous",
            shape: vec![rows, width],
            strides: vec![width, 1],
            misalign: 0,
        },
        Layout {
            name: "misaligned",
            shape: vec![rows, width],
            strides: vec![width + 1, 1],
            misalign: 1,
        },
    ];
    if rows * width > 50_000 || width == 0 {
        return all;
    }
    all.push(Layout {
        name: "row stride of whole vectors",
        shape: vec![rows, width],
        strides: vec![padded + 16, 1],
        misalign: 0,
    });
    all.push(Layout {
        name: "columns",
        shape: vec![rows, width],
        strides: vec![1, rows.max(1)],
        misalign: 0,
    });
    if rows % 3 == 0 && rows > 0 {
        // The heads of one part of a fused projection, then an order that no two levels describe.
        all.push(Layout {
            name: "heads",
            shape: vec![rows / 3, 3, width],
            strides: vec![5 * padded, padded, 1],
            misalign: 0,
        });
        all.push(Layout {
            name: "permuted",
            shape: vec![3, rows / 3, 1, width],
            strides: vec![padded, 3 * padded, 0, 1],
            misalign: 0,
        });
    }
    all
}

/// Returns a tensor of these values, or one of NaN to be written.
pub fn laid_out<'a>(
    context: &'a Context,
    element: Type,
    layout: &Layout,
    values: Option<&[f64]>,
) -> TestTensor<'a> {
    let len: i64 = layout.shape.iter().product();
    let blank = vec![f64::NAN; len as usize];
    let values = values.unwrap_or(&blank);
    TestTensor::strided(context, element, &layout.shape, &layout.strides, layout.misalign, values)
}

/// Calls `check` for every device, element type, shape and layout.
pub fn for_all_rows(op: &str, mut check: impl FnMut(&Context, Type, usize, usize, &Layout, &str)) {
    for context in contexts() {
        for element in FLOATS {
            for (rows, width) in ROW_SHAPES {
                for layout in row_layouts(rows, width) {
                    let what = format!(
                        "{op} {element:?} {rows}x{width} {} on {}",
                        layout.name, context.name
                    );
                    check(&context, element, rows, width, &layout, &what);
                }
            }
        }
    }
}
