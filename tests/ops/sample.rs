//! The choice of tokens: on the CPU against a plain sort in f64, and on a GPU against the sampler of
//! the host.

use std::sync::Arc;

use crate::support::chi_square::assert_fits;
use crate::support::device::{cuda_context, upload};
use crate::support::{rounded, to_bytes};
use xserv::backend::cpu::{CpuBackend, Isa};
use xserv::backend::{Arena, ComputeContext, DeviceTensor, PinnedBuffer};
use xserv::engine::{Sampler, SamplingOverrides, SamplingParams};
use xserv::memory::{DType, ElementType};
use xserv::model::NO_TOKEN;
use xserv::ops::sample::cpu::Candidates;
use xserv::ops::sample::{
    sample, Draw, SampleBuffers, SampleRow, SAMPLE_COUNTERS, SAMPLE_PARTIALS, SAMPLE_ROW_WORDS,
};

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.expect("a row").0 as u32
}

/// The probabilities that the filters leave, by sorting.
fn plainly(logits: &[f32], draw: &Draw) -> Vec<f64> {
    let highest = logits.iter().copied().fold(f32::MIN, f32::max);
    let distance =
        |id: usize| (f64::from(highest) - f64::from(logits[id])) / f64::from(draw.temperature);
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.retain(|&id| logits[id] > f32::MIN || highest == f32::MIN);
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let weight = |id: usize| (-distance(id)).exp();
    let sum = |ids: &[usize]| ids.iter().map(|&id| weight(id)).sum::<f64>();
    if let Some(&last) = ids.get((draw.top_k as usize).wrapping_sub(1)) {
        ids.retain(|&id| logits[id] >= logits[last]);
    }
    // Returns the number of tokens that reach a share of the probability.
    let reaching = |ids: &[usize], share: f32| {
        let (goal, mut before) = (f64::from(share) * sum(ids), 0.0);
        let reached = ids.iter().position(|&id| {
            before += weight(id);
            before >= goal
        });
        reached.map_or(ids.len(), |place| place + 1)
    };
    if draw.top_p < 1.0 {
        ids.truncate(reaching(&ids, draw.top_p));
    }
    ids.retain(|&id| weight(id) >= f64::from(draw.min_p));
    if draw.typical_p < 1.0 {
        let mean = ids.iter().map(|&id| weight(id) * distance(id)).sum::<f64>() / sum(&ids);
        let far = |id: usize| (distance(id) - mean).abs();
        ids.sort_by(|&a, &b| far(a).total_cmp(&far(b)).then(a.cmp(&b)));
        let last = ids[reaching(&ids, draw.typical_p) - 1];
        ids.retain(|&id| far(id) <= far(last) * (1.0 + 1e-12));
    }
    let all = sum(&ids);
    let mut out = vec![0.0; logits.len()];
    ids.iter().for_each(|&id| out[id] = weight(id) / all);
    out
}

/// Checks what the CPU leaves of a row, and a few of its draws.
fn check_on_cpu(backend: &CpuBackend, logits: &[f32], draw: Draw) {
    let what = format!("{draw:?} of {} on {}", logits.len(), backend.isa().name());
    let highest = logits.iter().copied().fold(f32::MIN, f32::max);
    let mut candidates = Candidates::default();
    // What an earlier row left in the memory does not matter.
    candidates.fill(backend, &[1.0, 2.0, 3.0], 3.0, &draw).expect("room");
    candidates.fill(backend, logits, highest, &draw).expect("room");
    let mut found = vec![0.0; logits.len()];
    candidates.probabilities().for_each(|(id, probability)| found[id as usize] = probability);
    let expected = plainly(logits, &draw);
    let kept = |p: &[f64]| p.iter().filter(|p| **p > 0.0).count();
    assert_eq!(kept(&found), kept(&expected), "{what}");
    for (id, (&found, &expected)) in found.iter().zip(&expected).enumerate() {
        assert!((found - expected).abs() <= 1e-11 * expected, "{what}: {id}: {found}, {expected}");
    }
    let mut before = 0.0;
    let ends: Vec<f64> = expected
        .iter()
        .map(|p| {
            before += p;
            before
        })
        .collect();
    // The numbers from 0 to 1 that belong to the tokens rise with them.
    let mut drawn: Vec<u32> =
        (0..64).map(|index| candidates.draw(&Draw { index, ..draw }).expect("a token")).collect();
    assert!(drawn.iter().all(|&id| expected[id as usize] > 0.0), "{what}");
    drawn.sort_unstable();
    let below = |share: f64| ends.iter().position(|&end| end > share).unwrap_or(ends.len() - 1);
    // Six standard deviations of the 64 draws' median.
    let (low, high) = (below(0.5 - 0.375), below(0.5 + 0.375));
    assert!((low..=high).contains(&(drawn[32] as usize)), "{what}: {}", drawn[32]);
}

#[test]
fn the_cpu_leaves_what_a_sort_leaves() {
    let neutral = Draw { seed: 5, ..Draw::default() };
    let filters = [
        neutral,
        Draw { top_k: 40, ..neutral },
        Draw { top_k: 20, top_p: 0.95, ..neutral },
        Draw { top_p: 0.1, ..neutral },
        Draw { top_p: 0.95, ..neutral },
        Draw { top_p: 0.9999, ..neutral },
        Draw { min_p: 0.05, ..neutral },
        Draw { top_p: 0.9, min_p: 0.01, ..neutral },
        Draw { typical_p: 0.2, ..neutral },
        Draw { typical_p: 0.95, ..neutral },
        Draw { top_k: 3000, top_p: 0.97, min_p: 1e-4, typical_p: 0.8, ..neutral },
    ];
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        let backend = CpuBackend::with_isa(1, isa).expect("a backend");
        // The largest sizes for one of them only, as they take long without optimisation.
        let is_whole = isa == Isa::detect();
        for vocab_size in
            [1, 2, 7, 255, 256, 257, 3001, 151_936].into_iter().take(7 + usize::from(is_whole))
        {
            for (row, spread) in [0.0, 0.01, 0.6, 2.0, 9.0].into_iter().enumerate() {
                let mut logits = noise((vocab_size + row) as u64, vocab_size);
                // A zero below zero is equal to one above, which a sort does not see.
                logits.iter_mut().for_each(|x| *x = *x * spread + 0.0);
                if row == 2 {
                    // Many equals.
                    logits.iter_mut().for_each(|x| *x = (*x * 4.0).round() / 4.0 + 0.0);
                }
                if row == 3 {
                    logits.iter_mut().step_by(3).for_each(|x| *x = f32::MIN);
                }
                for filter in filters {
                    for temperature in [0.7, 30.0] {
                        check_on_cpu(&backend, &logits, Draw { temperature, ..filter });
                    }
                }
            }
        }
        // Differences that no probability shows, and such as leave one token alone.
        for temperature in [1e-40, 1e30] {
            let logits = noise(9, 257);
            check_on_cpu(&backend, &logits, Draw { temperature, top_p: 0.5, ..neutral });
        }
        check_on_cpu(&backend, &[f32::MIN; 5], Draw { top_p: 0.5, ..neutral });
    }
}

/// Rows of logits on the device, and memory for choosing from them.
struct Rows {
    context: Arc<ComputeContext>,
    logits: DeviceTensor,
    rows: DeviceTensor,
    tokens: DeviceTensor,
    host_tokens: DeviceTensor,
    partials: DeviceTensor,
    counters: DeviceTensor,
    host: PinnedBuffer,
}

fn le(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_ne_bytes).collect()
}

impl Rows {
    fn new(context: &Arc<ComputeContext>, dtype: DType, logits: &[Vec<f32>]) -> Self {
        let (num_rows, vocab_size) = (logits.len(), logits[0].len());
        let mut arena = Arena::new(context, 192 << 20, "a test").expect("memory");
        let mut tensor = |element, shape: &[usize], bytes: Vec<u8>| {
            let tensor = arena.tensor(element, shape).expect("room");
            upload(context, &tensor, &bytes);
            tensor
        };
        let host = PinnedBuffer::new(context, num_rows * 4, "tokens").expect("room");
        let address = host.device_address(0);
        let values: Vec<u8> = logits.iter().flat_map(|row| to_bytes(row, dtype)).collect();
        let (len, num_partials) = (num_rows * SAMPLE_COUNTERS, num_rows * SAMPLE_PARTIALS);
        Rows {
            context: context.clone(),
            logits: tensor(ElementType::Float(dtype), &[num_rows, vocab_size], values),
            rows: tensor(
                ElementType::I32,
                &[num_rows, SAMPLE_ROW_WORDS],
                vec![0; num_rows * SAMPLE_ROW_WORDS * 4],
            ),
            tokens: tensor(ElementType::I32, &[num_rows], vec![0; num_rows * 4]),
            host_tokens: tensor(
                ElementType::I32,
                &[2],
                le([address as u32, (address >> 32) as u32]),
            ),
            partials: tensor(ElementType::I64, &[num_partials], vec![0xee; num_partials * 8]),
            counters: tensor(ElementType::I32, &[len], vec![0; len * 4]),
            host,
        }
    }

    fn choose(&mut self, how: &[SampleRow]) -> Vec<u32> {
        upload(&self.context, &self.rows, &le(how.iter().flat_map(SampleRow::words)));
        let buffers = SampleBuffers {
            rows: &self.rows,
            tokens: &self.tokens,
            host_tokens: &self.host_tokens,
            partials: &self.partials,
            counters: &self.counters,
        };
        let is_typical = |how: &SampleRow| how.typical_p > 0.0 && how.typical_p < 1.0;
        let is_filtered = how.iter().any(|how| how.top_k > 0 || how.top_p < 1.0 || is_typical(how));
        sample(&self.context, &self.logits, &buffers, is_filtered).expect("a choice");
        self.host.set_in_use().expect("an event");
        let words = self.host.bytes().expect("tokens").chunks(4);
        words.map(|b| u32::from_ne_bytes(b.try_into().expect("four"))).collect()
    }
}

/// Chooses from new rows.
struct Chooser {
    context: Arc<ComputeContext>,
}

impl Chooser {
    fn run(&self, logits: &[Vec<f32>], how: &[SampleRow]) -> Vec<u32> {
        let mut rows = Rows::new(&self.context, DType::F32, logits);
        let tokens = rows.choose(how);
        assert_eq!(rows.choose(how), tokens, "the counters are left as they should be");
        tokens
    }
}

fn chooser() -> Option<Chooser> {
    Some(Chooser { context: cuda_context()? })
}

/// Returns the tokens that the CPU's sampler leaves, with their probabilities.
fn candidates(overrides: &SamplingOverrides, logits: &[f32]) -> Vec<(u32, f64)> {
    let params = SamplingParams::resolve(overrides, &SamplingOverrides::default()).expect("valid");
    let mut sampler = Sampler::new(params, 0, &[]).expect("a sampler");
    let backend = CpuBackend::new(1).expect("a backend");
    sampler.probabilities(&backend, &mut logits.to_vec(), &[]).expect("candidates")
}

/// Returns the probabilities of all tokens by the CPU's sampler.
fn probabilities(overrides: &SamplingOverrides, logits: &[f32]) -> Vec<f64> {
    let mut out = vec![0.0; logits.len()];
    for (token, probability) in candidates(overrides, logits) {
        out[token as usize] = probability;
    }
    out
}

fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..len).map(|_| (next() + next() + next() - 1.5) * 6.0).collect()
}

#[test]
fn greedy_on_cuda_is_the_first_of_the_largest() {
    let Some(chooser) = chooser() else { return };
    for vocab_size in [1, 3, 4, 7, 1000, 151_936, 151_937] {
        let mut rows: Vec<Vec<f32>> = (0..4).map(|seed| noise(seed, vocab_size)).collect();
        // Equals, far apart.
        let last = vocab_size - 1;
        rows[1][last] = 50.0;
        rows[1][last / 2] = 50.0;
        rows[2].fill(-3.0);
        let want: Vec<u32> = rows.iter().map(|row| argmax(row)).collect();
        let how = SampleRow { top_p: 1.0, ..SampleRow::default() };
        assert_eq!(chooser.run(&rows, &[how; 4]), want, "vocabulary of {vocab_size}");
        for (row, bad) in rows.iter_mut().zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0]) {
            row[last / 3] = bad;
        }
        let tokens = chooser.run(&rows, &[how; 4]);
        assert_eq!(tokens[..3], [NO_TOKEN; 3]);
        assert_ne!(tokens[3], NO_TOKEN);
        let caller = SampleRow { temperature: -1.0, ..how };
        assert_eq!(chooser.run(&rows[3..], &[caller]), [NO_TOKEN]);
    }
}

/// Tokens that are drawn have the distribution of the CPU's sampler: the same tokens in the choice,
/// and a share within five standard deviations.
#[test]
fn draws_on_cuda_have_the_distribution_of_the_host() {
    let Some(chooser) = chooser() else { return };
    const DRAWS: usize = 4000;
    let cases = [
        (1.0, None, None, None, None),
        (0.7, Some(5), None, None, None),
        (1.0, None, Some(0.8), None, None),
        (1.3, Some(40), Some(0.9), Some(0.02), None),
        (1.0, None, None, Some(0.1), None),
        (0.3, Some(1), None, None, None),
        (1.0, Some(1000), Some(0.999), None, None),
        (1e-6, None, None, None, None),
        (1e-40, None, None, Some(0.1), None),
        (1.0, None, None, None, Some(0.2)),
        (0.7, Some(50), Some(0.95), Some(0.01), Some(0.7)),
        (1.5, None, Some(0.9), None, Some(1e-20)),
        (1e-6, None, None, None, Some(0.5)),
    ];
    // The last ones: more equals than are sorted, more of the likely tokens, and too large a k.
    let flat = [
        (1.0, Some(5), Some(0.9), None, None),
        (1.0, None, Some(0.7), None, None),
        (0.8, Some(700), Some(0.9), Some(0.5), None),
        (1.0, None, Some(0.7), None, Some(0.6)),
    ];
    let cases = cases.map(|case| (case, false)).into_iter().chain(flat.map(|case| (case, true)));
    for (case, ((temperature, top_k, top_p, min_p, typical_p), is_flat)) in cases.enumerate() {
        let mut logits = noise(case as u64 + 10, if is_flat { 6000 } else { 203 });
        // Rounded, so that there are equals, at the borders of the filters too.
        match is_flat {
            true => logits.iter_mut().for_each(|x| *x = x.signum()),
            false => logits.iter_mut().for_each(|x| *x = (*x * 4.0).round() / 4.0),
        }
        let caller = SamplingOverrides {
            temperature: Some(temperature),
            top_k,
            top_p,
            min_p,
            typical_p,
            ..SamplingOverrides::default()
        };
        let want = probabilities(&caller, &logits);
        let how = |index: usize| SampleRow {
            seed: 1 << 40 | case as u64,
            index: index as u64,
            temperature,
            top_p: top_p.unwrap_or(1.0),
            min_p: min_p.unwrap_or(0.0),
            top_k: top_k.unwrap_or(0) as i32,
            typical_p: typical_p.unwrap_or(1.0),
            reserved: 0,
        };
        let rows: Vec<SampleRow> = (0..DRAWS).map(how).collect();
        let tokens = chooser.run(&vec![logits.clone(); DRAWS], &rows);
        let mut counts = vec![0usize; logits.len()];
        tokens.iter().for_each(|&token| counts[token as usize] += 1);
        for (id, (&count, &p)) in counts.iter().zip(&want).enumerate() {
            assert!(count == 0 || p > 0.0, "case {case}: token {id} is not in the choice");
            let (n, expected) = (DRAWS as f64, DRAWS as f64 * p);
            let bar = 5.0 * (n * p * (1.0 - p)).sqrt() + 1.0;
            assert!(
                (count as f64 - expected).abs() <= bar,
                "case {case}: {id}: {count}, {expected}"
            );
        }
        // The same alone, and again.
        assert_eq!(chooser.run(&[logits.clone()], &rows[7..8]), tokens[7..8], "case {case}");
    }
}

/// Filters over a whole vocabulary: the token is one that the CPU's sampler leaves. Few tokens and
/// many, more equals than the device sorts, and more tokens than it sorts, without equals.
#[test]
fn filters_on_cuda_leave_what_they_leave_on_the_host() {
    // So many draws miss a tenth of the probability once in 10^11.
    const DRAWS: u64 = 256;
    let Some(chooser) = chooser() else { return };
    let filters = [
        (Some(50), None, None),
        (None, Some(0.5), None),
        (Some(20), Some(0.95), None),
        (None, Some(0.05), None),
        (Some(512), Some(0.3), None),
        (Some(513), None, None),
        (Some(3000), Some(0.6), None),
        (None, Some(0.97), None),
        (None, None, Some(0.3)),
        (None, None, Some(0.95)),
        (Some(2000), Some(0.8), Some(0.5)),
    ];
    let cases = filters.iter().flat_map(|filter| [(*filter, 1.0), (*filter, 0.05), (*filter, 0.0)]);
    for (case, ((top_k, top_p, typical_p), spread)) in cases.enumerate() {
        let mut logits = noise(case as u64 + 90, 151_936);
        logits.iter_mut().for_each(|x| *x = half::bf16::from_f32(*x * spread).to_f32());
        let caller = SamplingOverrides {
            temperature: Some(0.6),
            top_k,
            top_p,
            typical_p,
            ..SamplingOverrides::default()
        };
        let mut kept: Vec<(f64, u32)> = candidates(&caller, &logits)
            .into_iter()
            .map(|(token, probability)| (probability, token))
            .collect();
        kept.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        let rows: Vec<SampleRow> = (0..DRAWS)
            .map(|index| SampleRow {
                seed: 3,
                index,
                temperature: 0.6,
                top_p: top_p.unwrap_or(1.0),
                min_p: 0.0,
                top_k: top_k.unwrap_or(0) as i32,
                typical_p: typical_p.unwrap_or(1.0),
                reserved: 0,
            })
            .collect();
        // The tokens that come last among those that are kept, which have a tenth of the probability.
        let mut before = 0.0;
        let last: Vec<u32> = kept
            .iter()
            .filter(|(weight, _)| {
                before += weight;
                before - weight >= 0.9
            })
            .map(|&(_, token)| token)
            .collect();
        let tokens = chooser.run(&vec![logits.clone(); DRAWS as usize], &rows);
        for token in &tokens {
            let is_kept = kept.iter().any(|(_, kept)| kept == token);
            assert!(
                is_kept,
                "{top_k:?} {top_p:?} {typical_p:?} {spread}: {token} is not among {}",
                kept.len()
            );
        }
        let has_last = last.len() < 10 || tokens.iter().any(|token| last.contains(token));
        assert!(
            has_last,
            "{top_k:?} {top_p:?} {typical_p:?} {spread}: none of the last of {}",
            kept.len()
        );
    }
}

/// The tokens of 10^5 draws occur as often as the CPU's sampler says: where the largest tokens decide,
/// and where the filters leave many, with and without equals. In a whole vocabulary, tokens with about
/// the same probability count together.
#[test]
fn draws_on_cuda_fit_the_probabilities_of_the_host() {
    const DRAWS: usize = 100_000;
    const CLASSES: usize = 200;
    let Some(chooser) = chooser() else { return };
    let sizes = [(2000, 512), (151_936, 64)];
    let filters = [
        (1.0, None, None, None, None),
        (0.7, Some(20), Some(0.95), None, None),
        (1.0, None, Some(0.9), None, None),
        (1.4, None, Some(0.99), Some(0.001), None),
        (1.0, Some(600), None, None, None),
        (2.0, Some(1500), Some(0.9), None, None),
        (1.0, None, None, None, Some(0.5)),
        (0.8, Some(1000), Some(0.95), None, Some(0.9)),
    ];
    let cases = sizes.iter().flat_map(|size| filters.iter().map(move |filter| (*size, *filter)));
    for (case, ((vocab_size, num_rows), filter)) in cases.enumerate() {
        let (temperature, top_k, top_p, min_p, typical_p) = filter;
        // All three: single precision has no equals, bf16 a great many.
        let dtype = [DType::F32, DType::BF16, DType::F16][case % 3];
        let mut logits = noise(case as u64 + 300, vocab_size);
        logits.iter_mut().for_each(|x| *x = rounded(*x * 0.7 + 9.0, dtype));
        let overrides = SamplingOverrides {
            temperature: Some(temperature),
            top_k,
            top_p,
            min_p,
            typical_p,
            ..SamplingOverrides::default()
        };
        let want = probabilities(&overrides, &logits);
        let mut ids: Vec<usize> = (0..vocab_size).filter(|&id| want[id] > 0.0).collect();
        ids.sort_unstable_by(|&a, &b| want[b].total_cmp(&want[a]));
        let per_class = if vocab_size > 2000 { ids.len().div_ceil(CLASSES) } else { 1 };
        let mut class_of = vec![None; vocab_size];
        let mut classes = vec![0.0; ids.len().div_ceil(per_class)];
        for (place, &id) in ids.iter().enumerate() {
            class_of[id] = Some(place / per_class);
            classes[place / per_class] += want[id];
        }

        let mut rows = Rows::new(&chooser.context, dtype, &vec![logits; num_rows]);
        let mut counts = vec![0; classes.len()];
        for first in (0..DRAWS).step_by(num_rows) {
            let how: Vec<SampleRow> = (first..first + num_rows)
                .map(|index| SampleRow {
                    seed: 77 + case as u64,
                    index: index as u64,
                    temperature,
                    top_p: top_p.unwrap_or(1.0),
                    min_p: min_p.unwrap_or(0.0),
                    top_k: top_k.unwrap_or(0) as i32,
                    typical_p: typical_p.unwrap_or(1.0),
                    reserved: 0,
                })
                .collect();
            for token in rows.choose(&how) {
                let class = class_of.get(token as usize).copied().flatten();
                counts[class.unwrap_or_else(|| panic!("case {case}: {token} is out"))] += 1;
            }
        }
        assert!(assert_fits(&counts, &classes, &format!("case {case}")) > 0, "case {case}");
    }
}
