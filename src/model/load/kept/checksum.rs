//! CRC-32 (that of zlib and PNG) of bytes that several threads read in pieces.

use std::sync::atomic::{AtomicU32, Ordering};

use crc32fast::Hasher;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{try_with_capacity, Result};

/// A checksum. In JSON it has 8 digits whatever its value, so that a header keeps its length when the
/// checksums are filled in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Checksum(pub u32);

impl Checksum {
    /// Returns the checksum of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Checksum(crc32fast::hash(bytes))
    }
}

impl Serialize for Checksum {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:08x}", self.0))
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let is_hex = text.len() == 8 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let value = u32::from_str_radix(&text, 16).ok().filter(|_| is_hex);
        value.map(Checksum).ok_or_else(|| serde::de::Error::custom("a checksum has 8 hex digits"))
    }
}

/// The checksums of the pieces of `len_bytes` bytes, each `piece_bytes` long but for the last.
pub(in crate::model::load) struct PieceSums {
    len_bytes: usize,
    piece_bytes: usize,
    sums: Vec<AtomicU32>,
}

impl PieceSums {
    /// Returns checksums to be filled in.
    pub fn new(len_bytes: usize, piece_bytes: usize) -> Result<Self> {
        let piece_bytes = piece_bytes.max(1);
        let num_pieces = len_bytes.div_ceil(piece_bytes);
        let mut sums = try_with_capacity(num_pieces, "the checksums of a weight")?;
        sums.resize_with(num_pieces, AtomicU32::default);
        Ok(PieceSums { len_bytes, piece_bytes, sums })
    }

    /// Fills in the piece that begins at byte `begin` and has these bytes.
    pub fn set(&self, begin: usize, bytes: &[u8]) {
        if let Some(sum) = self.sums.get(begin / self.piece_bytes) {
            sum.store(crc32fast::hash(bytes), Ordering::Relaxed);
        }
    }

    /// Returns the checksum of all bytes.
    pub(super) fn total(&self) -> Checksum {
        let mut total = Hasher::new();
        for (index, sum) in self.sums.iter().enumerate() {
            let len = self.piece_bytes.min(self.len_bytes - index * self.piece_bytes);
            let sum = sum.load(Ordering::Relaxed);
            total.combine(&Hasher::new_with_initial_len(sum, len as u64));
        }
        Checksum(total.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_make_the_checksum_of_the_whole() {
        let bytes: Vec<u8> = (0..1000_u32).map(|i| ((i * 37) >> 3) as u8).collect();
        for piece in [1, 7, 100, 999, 1000, 5000] {
            let sums = PieceSums::new(bytes.len(), piece).expect("room");
            for (index, piece_bytes) in bytes.chunks(piece).enumerate().rev() {
                sums.set(index * piece, piece_bytes);
            }
            assert_eq!(sums.total(), Checksum::of(&bytes), "pieces of {piece}");
        }
        assert_eq!(Checksum::of(b"123456789").0, 0xcbf4_3926, "the check value of CRC-32");
        assert_eq!(PieceSums::new(0, 0).expect("room").total(), Checksum::of(b""));
    }

    #[test]
    fn a_checksum_has_eight_digits() {
        for (value, text) in [(0, "\"00000000\""), (0xab, "\"000000ab\"")] {
            assert_eq!(serde_json::to_string(&Checksum(value)).expect("text"), text);
            assert_eq!(serde_json::from_str::<Checksum>(text).expect("a number").0, value);
        }
        for text in ["\"+0000001\"", "\"0\"", "\"000000000\"", "\"\"", "0", "\"0000000g\""] {
            assert!(serde_json::from_str::<Checksum>(text).is_err(), "{text}");
        }
    }
}
