//! Changed logits against f64, and CUDA against the CPU bit by bit.

use std::sync::Arc;

use crate::support::device::{cuda_context, upload};
use crate::support::random::Random;
use crate::support::{rounded, to_bytes};
use xserv::backend::{Arena, ComputeContext, DeviceTensor, PinnedBuffer};
use xserv::memory::{DType, ElementType};
use xserv::ops::adjust_logits::{cpu, cuda, AdjustedRow, Adjustment};
use xserv::ops::adjust_logits::{ADJUSTED_ROW_WORDS, ADJUSTMENT_WORDS};

/// Returns the changed logit, in f64, by the formulas of the processors.
fn reference(logit: f64, row: &AdjustedRow, adjustment: &Adjustment) -> f64 {
    if row.bans_ends != 0 && adjustment.flags & Adjustment::ENDS != 0 {
        return f64::NEG_INFINITY;
    }
    let mut logit = logit + f64::from(adjustment.bias);
    if adjustment.flags & Adjustment::SEEN != 0 {
        let penalty = f64::from(row.repetition_penalty);
        logit = if logit < 0.0 { logit * penalty } else { logit / penalty };
    }
    let times = f64::from(adjustment.num_generated);
    let presence = if times > 0.0 { f64::from(row.presence_penalty) } else { 0.0 };
    logit - presence - times * f64::from(row.frequency_penalty)
}

/// Rows of logits, and changes of some of their tokens.
struct Case {
    vocab_size: usize,
    logits: Vec<f32>,
    rows: Vec<AdjustedRow>,
    adjustments: Vec<Adjustment>,
    chosen: Vec<u32>,
}

fn case(seed: u64, num_rows: usize, vocab_size: usize, per_row: usize) -> Case {
    let mut random = Random::new(seed);
    let mut number =
        |low: f32, high: f32| low + (high - low) * (random.signed() as f32 + 1.0) / 2.0;
    let logits = (0..num_rows * vocab_size).map(|_| number(-20.0, 20.0)).collect();
    let (mut rows, mut adjustments) = (Vec::new(), Vec::new());
    for row in 0..num_rows {
        let first = adjustments.len() as u32;
        // Different tokens: every third one from a place of its own.
        let count = per_row.min(vocab_size / 3);
        for place in 0..count {
            let bias = match place % 4 {
                0 => number(-100.0, 100.0),
                1 => f32::NEG_INFINITY,
                _ => 0.0,
            };
            adjustments.push(Adjustment {
                token_id: ((place * 3 + row) % vocab_size) as u32,
                num_generated: (place % 5) as u32,
                flags: [0, Adjustment::SEEN, Adjustment::ENDS, Adjustment::SEEN][place % 4],
                bias,
            });
        }
        rows.push(AdjustedRow {
            first,
            count: count as u32,
            bans_ends: (row % 2) as u32,
            repetition_penalty: [1.0, 1.3, 0.7][row % 3],
            presence_penalty: number(-2.0, 2.0),
            frequency_penalty: number(-0.5, 0.5),
            ..AdjustedRow::default()
        });
    }
    Case { vocab_size, logits, rows, adjustments, chosen: vec![u32::MAX; num_rows] }
}

impl Case {
    fn of(&self, row: &AdjustedRow) -> &[Adjustment] {
        &self.adjustments[row.first as usize..][..row.count as usize]
    }

    fn on_cpu(&self) -> Vec<f32> {
        let mut logits = self.logits.clone();
        for (row, logits) in self.rows.iter().zip(logits.chunks_mut(self.vocab_size)) {
            cpu::adjust_logits(logits, row, self.of(row));
        }
        logits
    }

    fn on_cuda(&self, context: &Arc<ComputeContext>) -> Vec<f32> {
        let (num_rows, vocab_size) = (self.rows.len(), self.vocab_size);
        let mut arena = Arena::new(context, 192 << 20, "a test").expect("memory");
        let mut upload = |element, shape: &[usize], words: Vec<u32>| -> DeviceTensor {
            let tensor = arena.tensor(element, shape).expect("room");
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let mut host = PinnedBuffer::new(context, bytes.len(), "a test").expect("room");
            host.bytes().expect("bytes").copy_from_slice(&bytes);
            host.upload(0..bytes.len(), &tensor, 0).expect("a copy");
            host.wait().expect("the copy");
            tensor
        };
        let words = self.logits.iter().map(|x| x.to_bits()).collect();
        let logits = upload(ElementType::Float(DType::F32), &[num_rows, vocab_size], words);
        let words = self.rows.iter().flat_map(AdjustedRow::words).collect();
        let rows = upload(ElementType::I32, &[num_rows, ADJUSTED_ROW_WORDS], words);
        let words = self.adjustments.iter().flat_map(Adjustment::words).collect();
        let shape = [self.adjustments.len(), ADJUSTMENT_WORDS];
        let adjustments = upload(ElementType::I32, &shape, words);
        let chosen = upload(ElementType::I32, &[self.chosen.len()], self.chosen.clone());
        cuda::adjust_logits(context, &logits, &rows, &adjustments, &chosen).expect("a launch");
        let mut host = PinnedBuffer::new(context, logits.size_bytes(), "a test").expect("room");
        host.download(&logits, 0).expect("a copy");
        let words = host.bytes().expect("logits").chunks_exact(4);
        words.map(|b| f32::from_ne_bytes(b.try_into().expect("four"))).collect()
    }
}

#[test]
fn logits_change_as_the_formulas_say() {
    let case = case(1, 6, 4000, 900);
    let found = case.on_cpu();
    for (index, row) in case.rows.iter().enumerate() {
        let begin = index * case.vocab_size;
        let mut expected: Vec<f64> =
            case.logits[begin..][..case.vocab_size].iter().map(|&x| f64::from(x)).collect();
        for adjustment in case.of(row) {
            let place = &mut expected[adjustment.token_id as usize];
            *place = reference(*place, row, adjustment);
        }
        for (&found, &expected) in found[begin..].iter().zip(&expected) {
            if expected == f64::NEG_INFINITY {
                assert_eq!(found, f32::MIN);
            } else {
                let error = (f64::from(found) - expected).abs();
                assert!(error <= 3e-5, "{found} instead of {expected}");
            }
        }
    }
}

#[test]
fn damaged_logits_stay_damaged() {
    let row = AdjustedRow { repetition_penalty: 2.0, ..AdjustedRow::default() };
    let change =
        |token_id| Adjustment { token_id, num_generated: 1, flags: Adjustment::SEEN, bias: 1.0 };
    let mut logits = [f32::NAN, f32::INFINITY, 1.0];
    cpu::adjust_logits(&mut logits, &row, &[change(0), change(1), change(7)]);
    assert!(logits[0].is_nan() && logits[1] == f32::INFINITY && logits[2] == 1.0);
}

#[test]
fn cuda_gives_the_bits_of_the_cpu() {
    let Some(context) = cuda_context() else { return };
    for (seed, num_rows, vocab_size, per_row) in
        [(1, 1, 7, 2), (2, 3, 4001, 1200), (3, 64, 151_936, 300), (4, 2, 151_937, 40_000)]
    {
        let case = case(seed, num_rows, vocab_size, per_row);
        let (found, expected) = (case.on_cuda(&context), case.on_cpu());
        let differs = found.iter().zip(&expected).position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!(differs, None, "{num_rows} rows of {vocab_size}");
    }
}

/// A token that the step before chose counts as if the host had known it.
#[test]
fn a_pending_token_counts_on_cuda() {
    let Some(context) = cuda_context() else { return };
    let mut waiting = case(5, 4, 1000, 100);
    let mut known = case(5, 4, 1000, 100);
    // Row 0 waits for a token that has changes already, row 1 for one that has none, row 2 for none,
    // row 3 for one that could not be chosen.
    waiting.chosen = vec![3, 2, 5, u32::MAX];
    let new = [3, 2];
    for (row, &token_id) in new.iter().enumerate() {
        waiting.rows[row].pending = row as u32;
        let range = known.rows[row];
        let own = &mut known.adjustments[range.first as usize..][..range.count as usize];
        match own.iter_mut().find(|adjustment| adjustment.token_id == token_id) {
            Some(adjustment) => {
                adjustment.num_generated += 1;
                adjustment.flags |= Adjustment::SEEN;
            }
            None => {
                // In place of the last one of the row, in both cases.
                let last = (range.first + range.count - 1) as usize;
                waiting.rows[row].count -= 1;
                known.adjustments[last] =
                    Adjustment { token_id, num_generated: 1, flags: Adjustment::SEEN, bias: 0.0 };
            }
        }
    }
    waiting.rows[3].pending = 3;
    assert!(known.of(&known.rows[0]).iter().any(|it| it.token_id == 3 && it.num_generated > 0));
    assert_eq!(waiting.on_cuda(&context), known.on_cpu());
}

/// Words of a mask in which about this share of the bits is set, some words wholly or not at all.
fn mask(random: &mut Random, vocab_size: usize, share: f64) -> Vec<u32> {
    let mut word = |_| match random.signed() {
        x if x < -0.6 => 0,
        x if x > 0.6 => u32::MAX,
        _ => (0..32)
            .fold(0, |word, bit| word | u32::from(random.signed() < 2.0 * share - 1.0) << bit),
    };
    (0..vocab_size.div_ceil(32)).map(&mut word).collect()
}

/// Returns the masked row, computed token by token.
fn masked(logits: &[f32], mask: &[u32]) -> Vec<f32> {
    let is_allowed = |id: usize| (mask[id / 32] >> (id % 32)) & 1 == 1;
    let banned = |x: f32| if x.is_nan() || x.is_infinite() { x } else { f32::MIN };
    logits.iter().enumerate().map(|(id, &x)| if is_allowed(id) { x } else { banned(x) }).collect()
}

#[test]
fn masks_ban_what_they_do_not_allow() {
    let mut random = Random::new(9);
    for vocab_size in [1, 31, 32, 33, 1000, 4097] {
        for share in [0.0, 0.1, 0.9] {
            let mut logits: Vec<f32> = (0..vocab_size).map(|_| random.signed() as f32).collect();
            if vocab_size > 32 {
                (logits[3], logits[17], logits[30]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
            }
            let mask = mask(&mut random, vocab_size, share);
            let expected = masked(&logits, &mask);
            cpu::mask_logits(&mut logits, &mask);
            let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&logits), bits(&expected), "{vocab_size} {share}");
        }
    }
    // Tokens beyond the mask are banned.
    let mut logits = vec![1.0; 70];
    cpu::mask_logits(&mut logits, &[u32::MAX]);
    assert!(logits[..32].iter().all(|&x| x == 1.0) && logits[32..].iter().all(|&x| x == f32::MIN));
}

/// Some rows of a batch have masks, from logits of every type and in place.
#[test]
fn masks_on_cuda_give_the_bits_of_the_cpu() {
    let Some(context) = cuda_context() else { return };
    let mut random = Random::new(11);
    let sizes = [(1, 7), (5, 1000), (64, 151_936), (3, 151_937), (256, 2049)];
    for (dtype, (num_rows, vocab_size)) in
        [DType::F32, DType::F16, DType::BF16].into_iter().flat_map(|d| sizes.map(|s| (d, s)))
    {
        for in_place in [false, true] {
            if in_place && !cuda::masks_in_place(dtype) {
                continue;
            }
            let mut logits: Vec<f32> = (0..num_rows * vocab_size)
                .map(|_| rounded(random.signed() as f32 * 20.0, dtype))
                .collect();
            if num_rows > 2 {
                (logits[vocab_size], logits[2 * vocab_size - 1]) = (f32::NAN, f32::INFINITY);
            }
            let masks: Vec<Vec<u32>> = (0..num_rows.div_ceil(2))
                .map(|row| mask(&mut random, vocab_size, [0.01, 0.5, 0.99][row % 3]))
                .collect();
            let index = |row: usize| if row.is_multiple_of(2) { row as i32 / 2 } else { -1 };
            let expected: Vec<f32> = logits
                .chunks(vocab_size)
                .enumerate()
                .flat_map(|(row, logits)| match row % 2 {
                    0 => masked(logits, &masks[row / 2]),
                    _ => logits.to_vec(),
                })
                .collect();

            let mut arena = Arena::new(&context, 256 << 20, "a test").expect("memory");
            let mut tensor = |element, shape: &[usize], bytes: Vec<u8>| {
                let tensor = arena.tensor(element, shape).expect("room");
                upload(&context, &tensor, &bytes);
                tensor
            };
            let shape = [num_rows, vocab_size];
            let source = tensor(ElementType::Float(dtype), &shape, to_bytes(&logits, dtype));
            let target = match in_place {
                true => source.clone(),
                false => tensor(
                    ElementType::Float(DType::F32),
                    &shape,
                    vec![0xee; num_rows * vocab_size * 4],
                ),
            };
            let indices: Vec<u8> = (0..num_rows).flat_map(|row| index(row).to_ne_bytes()).collect();
            let indices = tensor(ElementType::I32, &[num_rows], indices);
            let words: Vec<u8> = masks.iter().flatten().flat_map(|w| w.to_ne_bytes()).collect();
            let shape = [masks.len(), vocab_size.div_ceil(32)];
            let masks = tensor(ElementType::I32, &shape, words);
            cuda::mask_logits(&context, &source, &target, &indices, &masks).expect("a launch");
            let mut host =
                PinnedBuffer::new(&context, target.size_bytes(), "a test").expect("room");
            host.download(&target, 0).expect("a copy");
            let bytes = host.bytes().expect("logits");
            let is_bf16 = target.element() == ElementType::Float(DType::BF16);
            let found: Vec<f32> = match is_bf16 {
                true => bytes
                    .chunks_exact(2)
                    .map(|b| half::bf16::from_ne_bytes(b.try_into().expect("two")).to_f32())
                    .collect(),
                false => bytes
                    .chunks_exact(4)
                    .map(|b| f32::from_ne_bytes(b.try_into().expect("four")))
                    .collect(),
            };
            assert_eq!(found.len(), expected.len());
            let lowest =
                |x: f32| if is_bf16 && x == f32::MIN { half::bf16::MIN.to_f32() } else { x };
            // Which NaN it is does not matter.
            let differs = found.iter().zip(&expected).position(|(found, &expected)| {
                found.to_bits() != lowest(expected).to_bits()
                    && !(found.is_nan() && expected.is_nan())
            });
            assert_eq!(differs, None, "{dtype}: {num_rows} rows of {vocab_size}, {in_place}");
        }
    }
}
