//! Packed words turned into rows of codes.
//!
//! Files store them along the inputs or in words of several outputs, so that the neighbours of a
//! row are far apart. Both directions go through tiles that fit the first cache.

/// The nibble of a word of AWQ that holds each of its eight outputs.
pub(super) const AWQ_NIBBLES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// The words of a line of cache.
const LINE_WORDS: usize = 16;
/// The bytes of a line of cache.
const LINE_BYTES: usize = 4 * LINE_WORDS;
/// The inputs of a tile of AWQ.
const AWQ_INPUTS: usize = 2 * LINE_BYTES;

/// Returns a little-endian word; 0 beyond the end.
pub(super) fn word_at(bytes: &[u8], index: usize) -> u32 {
    match bytes.get(4 * index..4 * index + 4) {
        Some(&[a, b, c, d]) => u32::from_le_bytes([a, b, c, d]),
        _ => 0,
    }
}

/// Turns words `[inputs per word, out]` of GPTQ into rows from `first_row` on. A word holds
/// neighbours of a row, the first lowest, as a row does; so whole words move.
pub(super) fn gptq_rows(
    words: &[u8],
    out_features: usize,
    first_row: usize,
    codes: &mut [u8],
    row_bytes: usize,
) {
    let mut tile = [[0_u8; LINE_BYTES]; LINE_WORDS];
    for (index, rows) in codes.chunks_mut(LINE_WORDS * row_bytes).enumerate() {
        let first = 4 * (first_row + index * LINE_WORDS);
        let len = 4 * (rows.len() / row_bytes);
        let mut begin = 0;
        for lines in words.chunks(LINE_WORDS * 4 * out_features) {
            for (at, line) in lines.chunks_exact(4 * out_features).enumerate() {
                let line = line.get(first..first + len).unwrap_or_default();
                for (word, row) in line.chunks_exact(4).zip(&mut tile) {
                    row[4 * at..4 * at + 4].copy_from_slice(word);
                }
            }
            copy_tile(&tile, rows, row_bytes, begin);
            begin += LINE_BYTES;
        }
    }
}

/// Turns words `[in, out / 8]` of AWQ into rows from `first_row` on, a multiple of 8.
pub(super) fn awq_rows(
    words: &[u8],
    out_features: usize,
    first_row: usize,
    codes: &mut [u8],
    row_bytes: usize,
) {
    let line_bytes = out_features / 8 * 4;
    if line_bytes == 0 || row_bytes == 0 {
        return;
    }
    let mut tile = [[0_u8; LINE_BYTES]; 8 * LINE_WORDS];
    for (index, rows) in codes.chunks_mut(8 * LINE_WORDS * row_bytes).enumerate() {
        let first = 4 * (first_row / 8 + index * LINE_WORDS);
        let len = rows.len() / row_bytes / 8 * 4;
        let mut begin = 0;
        for lines in words.chunks(AWQ_INPUTS * line_bytes) {
            for (at, pair) in lines.chunks(2 * line_bytes).enumerate() {
                let (even, odd) = pair.split_at(line_bytes.min(pair.len()));
                let even = even.get(first..first + len).unwrap_or_default();
                // A last input without a neighbour has zeros beside it.
                let odd = odd.get(first..first + len).unwrap_or_default();
                for (word, rows) in tile.chunks_exact_mut(8).enumerate() {
                    if 4 * word >= len {
                        break;
                    }
                    let bytes = two_inputs(word_at(even, word), word_at(odd, word));
                    for (row, byte) in rows.iter_mut().zip(bytes) {
                        row[at] = byte;
                    }
                }
            }
            copy_tile(&tile, rows, row_bytes, begin);
            begin += LINE_BYTES;
        }
    }
}

/// Returns the bytes of the eight outputs of a word of one input and of one of the next.
fn two_inputs(even: u32, odd: u32) -> [u8; 8] {
    const LOW: u32 = 0x0f0f_0f0f;
    // Nibbles 0, 2, 4 and 6 are outputs 0, 4, 1 and 5; the others 2, 6, 3 and 7.
    let [a, e, b, f] = ((even & LOW) | ((odd & LOW) << 4)).to_le_bytes();
    let [c, g, d, h] = (((even >> 4) & LOW) | (odd & !LOW)).to_le_bytes();
    [a, b, c, d, e, f, g, h]
}

/// Copies a tile into rows, to byte `begin` of each, as far as they go.
fn copy_tile(tile: &[[u8; LINE_BYTES]], rows: &mut [u8], row_bytes: usize, begin: usize) {
    for (row, line) in rows.chunks_exact_mut(row_bytes).zip(tile) {
        let row = row.get_mut(begin..).unwrap_or_default();
        let len = row.len().min(LINE_BYTES);
        for (byte, &from) in row.iter_mut().take(len).zip(line) {
            *byte = from;
        }
    }
}

/// Turns codes of 4 bits, of which a byte has two, into bytes.
pub(super) fn unpack_nibbles(packed: &[u8], codes: &mut [u8]) {
    for (pair, byte) in codes.chunks_mut(2).zip(packed) {
        for (code, shift) in pair.iter_mut().zip([0, 4]) {
            *code = byte >> shift & 15;
        }
    }
}

/// Does the opposite.
pub(super) fn pack_nibbles(codes: &[u8], packed: &mut [u8]) {
    for (pair, byte) in codes.chunks(2).zip(packed) {
        *byte = match *pair {
            [low, high] => low | high << 4,
            [low] => low,
            _ => 0,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers without a pattern.
    fn some_words(len: usize) -> Vec<u8> {
        let mix = |i: u32| i.wrapping_add(1).wrapping_mul(0x9e37_79b9).rotate_left(i % 29);
        (0..len as u32).flat_map(|i| mix(mix(i)).to_le_bytes()).collect()
    }

    #[test]
    fn tiles_of_all_sizes() {
        for (inputs, out) in [(1, 8), (2, 8), (7, 16), (64, 24), (129, 256), (256, 136)] {
            let row_bytes = usize::div_ceil(inputs, 2);
            let words = some_words(inputs * out / 8);
            for (first, last) in [(0, out), (8.min(out), out), (0, out / 16 * 8)] {
                let mut codes = vec![0xff; (last - first) * row_bytes];
                awq_rows(&words, out, first, &mut codes, row_bytes);
                for row in first..last {
                    for input in 0..inputs {
                        let word = word_at(&words, input * out / 8 + row / 8);
                        let expected = word >> (4 * AWQ_NIBBLES[row % 8]) & 15;
                        let byte = codes[(row - first) * row_bytes + input / 2];
                        assert_eq!(u32::from(byte >> (input % 2 * 4) & 15), expected);
                    }
                    if inputs % 2 == 1 {
                        assert_eq!(codes[(row - first + 1) * row_bytes - 1] >> 4, 0);
                    }
                }
            }
            let words = some_words(inputs * out);
            for (first, last) in [(0, out), (8.min(out), out), (0, out / 16 * 8)] {
                let mut codes = vec![0xff; (last - first) * inputs * 4];
                gptq_rows(&words, out, first, &mut codes, inputs * 4);
                for row in first..last {
                    for word in 0..inputs {
                        let found = word_at(&codes, (row - first) * inputs + word);
                        assert_eq!(found, word_at(&words, word * out + row));
                    }
                }
            }
        }
    }

    #[test]
    fn nibbles() {
        let mut codes = [0; 5];
        unpack_nibbles(&[0x21, 0x43, 0xf5], &mut codes);
        assert_eq!(codes, [1, 2, 3, 4, 5]);
        let mut packed = [0xff; 3];
        pack_nibbles(&codes, &mut packed);
        assert_eq!(packed, [0x21, 0x43, 0x05]);
    }
}
