//! The order in which the kernels of a GPU read a quantised matrix, and how a matrix on the host is
//! brought into it.
//!
//! A *tile* has 16 rows, a *chunk* of it 64 inputs; both are padded with codes that stand for 0 and
//! scales of 0. Three regions of one allocation hold the codes, the scales and the zeros, each tile
//! after tile:
//!
//! * The codes of a chunk are what the 32 lanes of a warp pass to four products `mma.m16n8k16`, the
//!   rows of the matrix being those of the first operand. Lane `4 g + t` has rows `g` and `g + 8` and,
//!   of either half of the chunk, the inputs `8 t` to `8 t + 7`, so that it reads the eight numbers of
//!   an activation with one load. Of them the first four belong to one product and the others to
//!   the next: inputs 0 and 1 of the four to its registers 0 (row `g`) and 1 (row `g + 8`), inputs 2
//!   and 3 to its registers 2 and 3.
//!   * With 4 bits a chunk has 512 bytes, lane after lane: a word for each product, with the codes of
//!     register `i` in its nibbles `i` and `i + 4`.
//!   * With 8 bits it has 512 bytes for either half, lane after lane: two words for each product, the
//!     first with register 0 in its bytes 0 and 2 and register 1 in the others, the second with
//!     registers 2 and 3 likewise.
//!   * Where activations are FP8 too, both operands of a product are codes, and none are
//!     decoded: every 128 inputs have 2048 bytes, in pieces of 16 inputs of a row. Rows 0 to 7 come
//!     first and then rows 8 to 15; of each half, piece after piece, the rows beside each other. That
//!     is how `wgmma` takes an operand without a swizzle, and a lane of `mma.m16n8k32` has with two
//!     loads what it needs for two products. There is an even number of chunks.
//! * The scales of a tile are group after group, those of rows `g` and `g + 8` beside each other, of the
//!   type that the format says.
//! * The zeros are in the same order, a byte each; there are none unless groups have their own.

use std::ops::Range;

use super::{QuantFormat, QuantisedMatrix};
use crate::error::{Error, Result};
use crate::memory::DType;

/// The rows of a tile.
pub const TILE_ROWS: usize = 16;
/// The inputs of a chunk.
pub const CHUNK: usize = 64;
/// The alignment of regions, in bytes.
const ALIGNMENT: usize = 256;
const LANES: usize = 32;
/// The inputs of a row that lie beside each other, and those of a tile after which the next begin, where
/// activations are FP8 too.
const PIECE: usize = 16;
const PIECES_INPUTS: usize = 2 * CHUNK;

/// The layout of the tiles of a quantised matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileLayout {
    out_features: usize,
    in_features: usize,
    format: QuantFormat,
    is_gated: bool,
}

/// The memory of some tiles, as [`TileLayout::place`] says.
#[derive(Debug)]
pub struct TileMemory<'a> {
    /// The codes.
    pub codes: &'a mut [u8],
    /// The scales.
    pub scales: &'a mut [u8],
    /// The zeros; empty without [`QuantFormat::has_zeros`].
    pub zeros: &'a mut [u8],
}

/// The bytes of some tiles in the allocation of all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TilePlace {
    /// The codes.
    pub codes: Range<usize>,
    /// The scales.
    pub scales: Range<usize>,
    /// The zeros.
    pub zeros: Range<usize>,
}

impl TileLayout {
    /// Returns the layout of a matrix `[out_features, in_features]`. With `is_gated` the matrix is
    /// one for a gate on top of one of the same size, and a tile has eight rows of the gate and then
    /// the eight rows that they multiply.
    pub fn new(
        out_features: usize,
        in_features: usize,
        format: QuantFormat,
        is_gated: bool,
    ) -> Result<Self> {
        let layout = TileLayout { out_features, in_features, format, is_gated };
        if is_gated && !out_features.is_multiple_of(2) {
            return Err(Error::internal(format!("a gate of {out_features} rows and its factors")));
        }
        let fits = || {
            let padded = in_features.checked_next_multiple_of(CHUNK)?;
            let rows = out_features.checked_add(2 * TILE_ROWS)?;
            // Every number has a code, and at most a scale of 4 bytes and a zero.
            rows.checked_mul(padded)?.checked_mul(6)?.checked_add(4 * ALIGNMENT)
        };
        match fits() {
            Some(bytes) if isize::try_from(bytes).is_ok() => Ok(layout),
            _ => Err(Error::out_of_memory("a quantised weight", usize::MAX)),
        }
    }

    /// Returns the rows of the matrix.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Returns the columns of the matrix.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Returns the format of the numbers.
    pub fn format(&self) -> QuantFormat {
        self.format
    }

    /// Whether tiles have rows of a gate and of its factor.
    pub fn is_gated(&self) -> bool {
        self.is_gated
    }

    /// Returns the tiles.
    pub fn num_tiles(&self) -> usize {
        if self.is_gated {
            (self.out_features / 2).div_ceil(TILE_ROWS / 2)
        } else {
            self.out_features.div_ceil(TILE_ROWS)
        }
    }

    /// Whether codes lie in pieces of rows, as they do where activations are FP8 too.
    pub fn has_pieces(&self) -> bool {
        self.format.has_fp8_inputs()
    }

    /// Returns the chunks of a tile.
    pub fn num_chunks(&self) -> usize {
        if self.has_pieces() {
            return self.in_features.div_ceil(PIECES_INPUTS) * (PIECES_INPUTS / CHUNK);
        }
        self.in_features.div_ceil(CHUNK)
    }

    /// Returns the inputs that share a scale: all of a row if there is a single one, those after
    /// its end included.
    pub fn group_size(&self) -> usize {
        let group_size = self.format.group_size.max(1);
        if group_size >= self.in_features {
            (self.num_chunks() * CHUNK).max(1)
        } else {
            group_size
        }
    }

    /// Returns the groups of a row, those after its end included.
    pub fn num_groups(&self) -> usize {
        (self.num_chunks() * CHUNK).div_ceil(self.group_size())
    }

    /// Returns the row of the matrix that stands at `row` of a tile.
    pub fn row(&self, tile: usize, row: usize) -> Option<usize> {
        if !self.is_gated {
            return Some(tile * TILE_ROWS + row).filter(|&row| row < self.out_features);
        }
        let (half, width) = (TILE_ROWS / 2, self.out_features / 2);
        let index = Some(tile * half + row % half).filter(|&index| index < width)?;
        Some(index + row / half * width)
    }

    fn chunk_bytes(&self) -> usize {
        TILE_ROWS * CHUNK * self.format.code.bits() / 8
    }

    /// Returns the bytes of codes, scales and zeros of a tile.
    fn tile_bytes(&self) -> (usize, usize, usize) {
        let scales = self.num_groups() * TILE_ROWS;
        let zeros = if self.format.has_zeros { scales } else { 0 };
        (self.num_chunks() * self.chunk_bytes(), scales * self.format.scale.size_bytes(), zeros)
    }

    /// Returns the place of some tiles in the allocation.
    pub fn place(&self, tiles: Range<usize>) -> TilePlace {
        let (codes, scales, zeros) = self.tile_bytes();
        let part =
            |start: usize, bytes: usize| start + tiles.start * bytes..start + tiles.end * bytes;
        let first_scale = (self.num_tiles() * codes).next_multiple_of(ALIGNMENT);
        let first_zero = (first_scale + self.num_tiles() * scales).next_multiple_of(ALIGNMENT);
        TilePlace {
            codes: part(0, codes),
            scales: part(first_scale, scales),
            zeros: part(first_zero, zeros),
        }
    }

    /// Returns the bytes of the allocation.
    pub fn len_bytes(&self) -> usize {
        self.place(0..self.num_tiles()).zeros.end.next_multiple_of(ALIGNMENT)
    }

    /// Brings tiles of a matrix into the layout. Every byte of `out` is written, so that threads can
    /// share a matrix.
    pub fn pack(
        &self,
        matrix: &QuantisedMatrix,
        tiles: Range<usize>,
        out: TileMemory<'_>,
    ) -> Result<()> {
        let place = self.place(tiles.clone());
        let is_ours = (matrix.out_features, matrix.in_features, matrix.format)
            == (self.out_features, self.in_features, self.format);
        let fits = [
            (out.codes.len(), place.codes.len()),
            (out.scales.len(), place.scales.len()),
            (out.zeros.len(), place.zeros.len()),
        ];
        if !is_ours || tiles.end > self.num_tiles() || fits.iter().any(|(have, need)| have != need)
        {
            return Err(Error::internal(format!(
                "tiles {tiles:?} of {self:?} from a matrix of {} x {} {:?} into {fits:?} bytes",
                matrix.out_features, matrix.in_features, matrix.format
            )));
        }
        let (codes, scales, zeros) = self.tile_bytes();
        let mut code_tiles = out.codes.chunks_exact_mut(codes.max(1));
        let mut scale_tiles = out.scales.chunks_exact_mut(scales.max(1));
        let mut zero_tiles = out.zeros.chunks_exact_mut(zeros.max(1));
        for tile in tiles {
            let rows: [Option<usize>; TILE_ROWS] = std::array::from_fn(|row| self.row(tile, row));
            if let Some(codes) = code_tiles.next() {
                self.pack_codes(matrix, &rows, codes);
            }
            if let Some(scales) = scale_tiles.next() {
                self.pack_groups(matrix, &rows, scales, zero_tiles.next().unwrap_or_default());
            }
        }
        Ok(())
    }

    fn pack_codes(
        &self,
        matrix: &QuantisedMatrix,
        rows: &[Option<usize>; TILE_ROWS],
        out: &mut [u8],
    ) {
        if self.has_pieces() {
            return self.pack_pieces(matrix, rows, out);
        }
        let (low, high) = rows.split_at(TILE_ROWS / 2);
        for (chunk, out) in out.chunks_exact_mut(self.chunk_bytes()).enumerate() {
            for lane in 0..LANES {
                let rows = [low, high].map(|rows| rows.get(lane / 4).copied().flatten());
                for half in 0..2 {
                    let place = chunk * CHUNK + half * (CHUNK / 2) + lane % 4 * 8;
                    let [low, high] = rows.map(|row| self.eight_codes(matrix, row, place));
                    if self.format.code.bits() == 4 {
                        let words = [0, 1].map(|step| {
                            let [low, high] =
                                [low, high].map(|codes| nibbles(codes >> (32 * step)));
                            low | high << 4
                        });
                        put(out, lane * 16 + half * 8, &words);
                    } else {
                        let words = [0, 1, 2, 3].map(|pair| {
                            let [low, high] = [low, high].map(|codes| bytes(codes >> (16 * pair)));
                            low | high << 8
                        });
                        put(out, half * LANES * 16 + lane * 16, &words);
                    }
                }
            }
        }
    }

    fn pack_pieces(
        &self,
        matrix: &QuantisedMatrix,
        rows: &[Option<usize>; TILE_ROWS],
        out: &mut [u8],
    ) {
        for (stage, out) in out.chunks_exact_mut(TILE_ROWS * PIECES_INPUTS).enumerate() {
            for (index, out) in out.chunks_exact_mut(PIECE).enumerate() {
                let (half, rest) = (index / (TILE_ROWS / 2 * 8), index % (TILE_ROWS / 2 * 8));
                let (piece, row) = (rest / (TILE_ROWS / 2), rest % (TILE_ROWS / 2));
                let row = rows.get(half * (TILE_ROWS / 2) + row).copied().flatten();
                let place = stage * PIECES_INPUTS + piece * PIECE;
                for (eight, out) in out.chunks_exact_mut(8).enumerate() {
                    let codes = self.eight_codes(matrix, row, place + eight * 8);
                    out.copy_from_slice(&codes.to_le_bytes());
                }
            }
        }
    }

    /// Returns eight codes from a place of a row on, a byte each, the first in the lowest.
    fn eight_codes(&self, matrix: &QuantisedMatrix, row: Option<usize>, place: usize) -> u64 {
        let middle = u64::from(self.format.code.middle()) * 0x0101_0101_0101_0101;
        let Some(row) = row else { return middle };
        if place + 8 <= self.in_features {
            let codes = matrix.row_codes(row);
            if self.format.code.bits() == 4 {
                let four = codes.get(place / 2..).and_then(|codes| codes.first_chunk());
                return u32::from_le_bytes(four.copied().unwrap_or_default()).spread();
            }
            let eight = codes.get(place..).and_then(|codes| codes.first_chunk());
            return u64::from_le_bytes(eight.copied().unwrap_or_default());
        }
        let group_size = self.group_size();
        (place..place + 8).rev().fold(0, |codes, place| {
            let code = if place < self.in_features {
                matrix.code(row, place)
            } else if place / group_size < matrix.num_groups() {
                matrix.group(row, place / group_size).1
            } else {
                self.format.code.middle()
            };
            codes << 8 | u64::from(code)
        })
    }

    fn pack_groups(
        &self,
        matrix: &QuantisedMatrix,
        rows: &[Option<usize>; TILE_ROWS],
        scales: &mut [u8],
        zeros: &mut [u8],
    ) {
        let size = self.format.scale.size_bytes();
        for (group, scales) in scales.chunks_exact_mut(TILE_ROWS * size).enumerate() {
            let mut zeros = zeros.get_mut(group * TILE_ROWS..(group + 1) * TILE_ROWS);
            for (index, target) in scales.chunks_exact_mut(size).enumerate() {
                let row = rows.get(index / 2 + index % 2 * (TILE_ROWS / 2)).copied().flatten();
                let row = row.filter(|_| group < matrix.num_groups());
                let (scale, zero) =
                    row.map_or((0.0, self.format.code.middle()), |row| matrix.group(row, group));
                match self.format.scale {
                    DType::F32 => target.copy_from_slice(&scale.to_le_bytes()),
                    DType::F16 => {
                        target.copy_from_slice(&half::f16::from_f32(scale).to_le_bytes());
                    }
                    DType::BF16 => {
                        target.copy_from_slice(&half::bf16::from_f32(scale).to_le_bytes());
                    }
                }
                if let Some(target) = zeros.as_mut().and_then(|zeros| zeros.get_mut(index)) {
                    *target = zero;
                }
            }
        }
    }
}

/// The nibbles of a word as bytes.
trait Spread {
    fn spread(self) -> u64;
}

impl Spread for u32 {
    fn spread(self) -> u64 {
        let x = u64::from(self);
        let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
        let x = (x | x << 8) & 0x00ff_00ff_00ff_00ff;
        (x | x << 4) & 0x0f0f_0f0f_0f0f_0f0f
    }
}

/// Puts four codes, of a byte each, into nibbles 0, 4, 2 and 6.
fn nibbles(codes: u64) -> u32 {
    let code = |i: u32| (codes >> (8 * i)) as u32 & 15;
    code(0) | code(1) << 16 | code(2) << 8 | code(3) << 24
}

/// Puts two codes into bytes 0 and 2.
fn bytes(codes: u64) -> u32 {
    let codes = codes as u32;
    codes & 0xff | (codes & 0xff00) << 8
}

fn put(out: &mut [u8], at: usize, words: &[u32]) {
    for (i, word) in words.iter().enumerate() {
        if let Some(target) = out.get_mut(at + i * 4..at + i * 4 + 4) {
            target.copy_from_slice(&word.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Code;
    use super::*;

    /// Packs in two parts.
    fn packed(layout: &TileLayout, matrix: &QuantisedMatrix) -> Vec<u8> {
        let mut all = vec![0xa5; layout.len_bytes()];
        let middle = layout.num_tiles() / 2;
        for tiles in [0..middle, middle..layout.num_tiles()] {
            let place = layout.place(tiles.clone());
            let mut parts = [place.codes, place.scales, place.zeros].map(|range| {
                let part = vec![0x5a; range.len()];
                (range, part)
            });
            let [codes, scales, zeros] = &mut parts;
            let out =
                TileMemory { codes: &mut codes.1, scales: &mut scales.1, zeros: &mut zeros.1 };
            layout.pack(matrix, tiles, out).unwrap();
            for (range, part) in parts {
                all[range].copy_from_slice(&part);
            }
        }
        all
    }

    /// Returns the code of register `register`, element `element`, of product `step` of a lane.
    fn code_at(
        layout: &TileLayout,
        all: &[u8],
        (tile, chunk): (usize, usize),
        lane: usize,
        (step, register, element): (usize, usize, usize),
    ) -> u8 {
        let base = layout.place(tile..tile + 1).codes.start + chunk * layout.chunk_bytes();
        let word = |at: usize| u32::from_le_bytes(all[at..at + 4].try_into().unwrap());
        if layout.format.code == Code::Int4 {
            let word = word(base + lane * 16 + step * 4);
            return (word >> (4 * (register + 4 * element))) as u8 & 15;
        }
        let at = base + step / 2 * 512 + lane * 16 + step % 2 * 8 + register / 2 * 4;
        (word(at) >> (8 * (register % 2 + 2 * element))) as u8
    }

    fn check(layout: &TileLayout, matrix: &QuantisedMatrix) {
        let all = packed(layout, matrix);
        let groups = layout.num_groups();
        let mut seen = vec![0; matrix.out_features * matrix.in_features];
        for tile in 0..layout.num_tiles() {
            let place = layout.place(tile..tile + 1);
            let group_of = |row: usize, group: usize| {
                let index = group * TILE_ROWS + row % 8 * 2 + row / 8;
                let at = place.scales.start + index * layout.format.scale.size_bytes();
                let scale = match layout.format.scale {
                    DType::F32 => f32::from_le_bytes(all[at..at + 4].try_into().unwrap()),
                    DType::F16 => half::f16::from_le_bytes([all[at], all[at + 1]]).to_f32(),
                    DType::BF16 => half::bf16::from_le_bytes([all[at], all[at + 1]]).to_f32(),
                };
                let has_zeros = layout.format.has_zeros;
                let zero = has_zeros.then(|| all[place.zeros.start + index]);
                (scale, zero.unwrap_or(layout.format.code.middle()))
            };
            assert_eq!(place.zeros.len(), if layout.format.has_zeros { groups * 16 } else { 0 });
            for chunk in 0..layout.num_chunks() {
                for lane in 0..32 {
                    for i in 0..32 {
                        let (step, register, element) = (i / 8, i / 2 % 4, i % 2);
                        let code =
                            code_at(layout, &all, (tile, chunk), lane, (step, register, element));
                        let in_tile = lane / 4 + register % 2 * 8;
                        let input = chunk * 64
                            + step / 2 * 32
                            + lane % 4 * 8
                            + step % 2 * 4
                            + register / 2 * 2
                            + element;
                        let (scale, zero) = group_of(in_tile, input / layout.group_size());
                        let row = layout.row(tile, in_tile);
                        let Some(row) = row.filter(|_| input < matrix.in_features) else {
                            // Padding adds 0 to the sums of the kernel.
                            assert_eq!(code, zero);
                            assert!(row.is_some() || scale == 0.0);
                            continue;
                        };
                        assert_eq!(code, matrix.code(row, input), "row {row}, input {input}");
                        let group = input / layout.format.group_size;
                        assert_eq!((scale, zero), matrix.group(row, group));
                        seen[row * matrix.in_features + input] += 1;
                    }
                }
            }
        }
        assert!(seen.iter().all(|&count| count == 1));
    }

    #[test]
    fn every_code_has_one_place() {
        let mut state = 1u32;
        let mut random = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 16
        };
        for (out_features, in_features) in
            [(8, 64), (24, 200), (16, 1), (10, 96), (40, 321), (0, 64)]
        {
            for code in Code::ALL {
                for (group_size, scale) in
                    [(32, DType::F16), (64, DType::F32), (48, DType::BF16), (1000, DType::F32)]
                {
                    for has_zeros in [false, true] {
                        let has_zeros = has_zeros && !code.is_float();
                        let format = QuantFormat {
                            code,
                            group_size,
                            has_zeros,
                            scale,
                            quantises_inputs: false,
                        };
                        let mut matrix =
                            QuantisedMatrix::empty(out_features, in_features, format).unwrap();
                        let mask = if code == Code::Int4 { 15 } else { 255 };
                        matrix.codes.iter_mut().for_each(|code| *code = random() as u8);
                        matrix.zeros.iter_mut().for_each(|zero| *zero = random() as u8 & mask);
                        let scales = &mut matrix.scales;
                        scales.iter_mut().for_each(|scale| *scale = random() as u8 as f32);
                        for is_gated in [false, true] {
                            let layout =
                                TileLayout::new(out_features, in_features, format, is_gated);
                            check(&layout.unwrap(), &matrix);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn codes_that_meet_codes_lie_in_pieces() {
        for (out_features, in_features) in [(8, 128), (24, 200), (16, 1), (40, 321)] {
            let format = QuantFormat {
                code: Code::Fp8,
                group_size: 128,
                has_zeros: false,
                scale: DType::BF16,
                quantises_inputs: true,
            };
            let mut matrix = QuantisedMatrix::empty(out_features, in_features, format).unwrap();
            let codes = matrix.codes.iter_mut().enumerate();
            codes.for_each(|(i, code)| *code = (i * 7 + i / 127 + 1) as u8);
            for is_gated in [false, true] {
                let layout = TileLayout::new(out_features, in_features, format, is_gated).unwrap();
                let all = packed(&layout, &matrix);
                let inputs = layout.num_chunks() * CHUNK;
                assert_eq!(inputs, in_features.next_multiple_of(128));
                for tile in 0..layout.num_tiles() {
                    let codes = &all[layout.place(tile..tile + 1).codes];
                    assert_eq!(codes.len(), inputs * TILE_ROWS);
                    for row in 0..TILE_ROWS {
                        for input in 0..inputs {
                            let piece =
                                input / 128 * 2048 + row / 8 * 1024 + input % 128 / 16 * 128;
                            let code = codes[piece + row % 8 * 16 + input % 16];
                            let of_row = layout.row(tile, row).filter(|_| input < in_features);
                            let expected = of_row.map_or(0, |row| matrix.code(row, input));
                            assert_eq!(code, expected, "{tile} {row} {input}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let scale = DType::F32;
        let format = QuantFormat {
            code: Code::Int8,
            group_size: 64,
            has_zeros: false,
            scale,
            quantises_inputs: false,
        };
        assert!(TileLayout::new(3, 64, format, true).is_err());
        assert!(TileLayout::new(usize::MAX / 64, 64, format, false).is_err());
        assert!(TileLayout::new(1, usize::MAX, format, false).is_err());
        let layout = TileLayout::new(32, 64, format, false).unwrap();
        let matrix = QuantisedMatrix::empty(32, 64, format).unwrap();
        let (mut codes, mut scales) = ([0; 1024], [0; 64]);
        let mut pack = |matrix: &QuantisedMatrix, tiles: Range<usize>| {
            let out = TileMemory { codes: &mut codes, scales: &mut scales, zeros: &mut [] };
            layout.pack(matrix, tiles, out)
        };
        assert!(pack(&matrix, 1..2).is_ok());
        assert!(pack(&matrix, 0..2).is_err());
        assert!(pack(&matrix, 2..3).is_err());
        assert!(pack(&QuantisedMatrix::empty(32, 128, format).unwrap(), 0..1).is_err());
    }
}
