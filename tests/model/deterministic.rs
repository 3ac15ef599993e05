//! Models that are loaded as deterministic on a GPU: a row's logits have the same bits alone, in
//! any batch, in any pieces of its prompt, and when it was decoded.

use xserv::memory::DType;
use xserv::model::{Model, TokenChoice};

use crate::driver::{
    bits, cuda_context, load_deterministic, load_fp8_cache_on_cuda, load_on_cuda, Driver, Sequence,
};
use crate::files::{Family, Random, Store, TempDir, TestModel};
use crate::golden;

/// The longest context of a test.
const CONTEXT: usize = 5000;

/// A sequence, and the bits of the logits `[len, vocab_size]` when it is computed alone in one piece.
struct Known {
    ids: Vec<u32>,
    logits: Vec<u32>,
}

/// Rows that were compared, and of them those whose bits differ.
#[derive(Default)]
struct Count {
    rows: usize,
    different: usize,
    first: Option<String>,
}

impl Count {
    /// The rows of `known` from token `first` on.
    fn compare(&mut self, known: &Known, first: usize, got: &[f32], what: &str) {
        let vocab_size = known.logits.len() / known.ids.len();
        assert!(!got.is_empty() && got.len().is_multiple_of(vocab_size));
        let want = known.logits[first * vocab_size..].chunks(vocab_size);
        for (index, (want, got)) in want.zip(got.chunks(vocab_size)).enumerate() {
            self.rows += 1;
            if want != bits(got) {
                self.different += 1;
                let row = first + index;
                self.first.get_or_insert_with(|| format!("{what}: row {row} of {}", want.len()));
            }
        }
    }

    fn add(&mut self, other: Count) {
        self.rows += other.rows;
        self.different += other.different;
        self.first = self.first.take().or(other.first);
    }
}

fn alone(model: &Model, ids: Vec<u32>) -> Known {
    let mut driver = Driver::new(model, ids.len().div_ceil(32));
    driver.reserve(ids.len());
    let logits = bits(&driver.logits(&ids, usize::MAX));
    Known { ids, logits }
}

fn random_ids(random: &mut Random, len: usize, vocab_size: usize) -> Vec<u32> {
    (0..len).map(|_| random.below(vocab_size) as u32).collect()
}

/// One sequence in pieces of one length.
fn in_pieces(model: &Model, known: &Known, chunk: usize) -> Count {
    let mut driver = Driver::new(model, known.ids.len().div_ceil(32));
    let mut count = Count::default();
    let got = driver.logits(&known.ids, chunk);
    count.compare(known, 0, &got, &format!("pieces of {chunk}"));
    count
}

/// Returns the last tokens of many sequences decoded together, in steps as an engine takes them.
fn decoded(model: &Model, all: &[Known], steps: usize) -> Count {
    let mut count = Count::default();
    let blocks: usize = all.iter().map(|known| known.ids.len().div_ceil(32)).sum();
    let mut driver = Driver::new(model, blocks);
    driver.reserve(all.iter().map(|known| known.ids.len()).sum());
    let mut sequences: Vec<Sequence> = all.iter().map(|_| Sequence::default()).collect();
    let prompts = |known: &Known| known.ids.len() - steps;
    let mut parts: Vec<(&mut Sequence, &[u32])> =
        sequences.iter_mut().zip(all).map(|(s, known)| (s, &known.ids[..prompts(known)])).collect();
    let got = driver.step(&mut parts, false);
    let what = format!("{} sequences", all.len());
    for (known, got) in all.iter().zip(&got) {
        count.compare(known, prompts(known) - 1, got, &format!("prompts of {what}"));
    }
    let choices = vec![TokenChoice::Caller; all.len()];
    for step in 0..steps {
        let mut parts: Vec<(&mut Sequence, &[u32])> = sequences
            .iter_mut()
            .zip(all)
            .map(|(s, known)| (s, &known.ids[prompts(known) + step..][..1]))
            .collect();
        driver.begin(&mut parts, &[], &choices).expect("a step");
        let logits = driver.finish().logits;
        let vocab_size = logits.len() / all.len();
        for (known, got) in all.iter().zip(logits.chunks(vocab_size)) {
            count.compare(known, prompts(known) + step, got, &format!("decoding {what}"));
        }
    }
    count
}

/// Steps of whatever mixture: of some of the sequences the next token, of others a piece of any length.
fn scrambled(model: &Model, all: &[Known], random: &mut Random) -> Count {
    let mut count = Count::default();
    let blocks: usize = all.iter().map(|known| known.ids.len().div_ceil(32)).sum();
    let mut driver = Driver::new(model, blocks);
    driver.reserve(all.iter().map(|known| known.ids.len()).sum());
    let mut sequences: Vec<(Sequence, usize)> = all.iter().map(|_| Default::default()).collect();
    while sequences.iter().zip(all).any(|((_, done), known)| *done < known.ids.len()) {
        let share = 1 + random.below(4);
        let mut chosen = Vec::new();
        for (index, ((sequence, done), known)) in sequences.iter_mut().zip(all).enumerate() {
            let rest = &known.ids[*done..];
            if rest.is_empty() || random.below(4) >= share {
                continue;
            }
            let most = [1, 1, 1, 30, 300, usize::MAX][random.below(6)].min(rest.len());
            let len = 1 + random.below(most);
            chosen.push((index, *done, (sequence, &rest[..len])));
            *done += len;
        }
        if chosen.is_empty() {
            continue;
        }
        // As an engine has them: those with one token in front.
        chosen.sort_by_key(|(_, _, (_, piece))| piece.len() > 1);
        let about: Vec<(usize, usize, usize)> =
            chosen.iter().map(|(index, at, (_, piece))| (*index, *at, piece.len())).collect();
        let mut parts: Vec<(&mut Sequence, &[u32])> =
            chosen.into_iter().map(|(_, _, part)| part).collect();
        let what = format!("a mixed step of {} sequences", parts.len());
        if random.below(2) == 0 {
            for ((index, at, _), got) in about.iter().zip(driver.step(&mut parts, true)) {
                count.compare(&all[*index], *at, &got, &what);
            }
        } else {
            let choices = vec![TokenChoice::Caller; parts.len()];
            driver.begin(&mut parts, &[], &choices).expect("a step");
            let logits = driver.finish().logits;
            let vocab_size = logits.len() / about.len();
            for ((index, at, len), got) in about.iter().zip(logits.chunks(vocab_size)) {
                count.compare(&all[*index], at + len - 1, got, &what);
            }
        }
    }
    count
}

fn everything(model: &Model, longest: usize) -> Count {
    let mut random = Random(17);
    let vocab_size = model.config().vocab_size;
    let mut count = Count::default();
    let long = alone(model, random_ids(&mut random, longest, vocab_size));
    for chunk in [1, 2, 31, 64, 128, 129, 300, 513] {
        count.add(in_pieces(model, &long, chunk));
    }
    let lens: Vec<usize> =
        (0..130).map(|i| 5 + random.below(if i < 8 { 400 } else { 60 })).collect();
    let mut all: Vec<Known> = lens
        .into_iter()
        .map(|len| alone(model, random_ids(&mut random, len, vocab_size)))
        .collect();
    for batch in [1, 2, 3, 8, 33, 70, 128, 130] {
        count.add(decoded(model, &all[..batch], 4));
    }
    all.truncate(20);
    all.push(long);
    for _ in 0..3 {
        count.add(scrambled(model, &all, &mut random));
    }
    count
}

/// That both models compute the same, but for roundings on the way: the root mean square of the
/// differences of each row, in standard deviations of the row. (Equal bits alone could be equally
/// wrong.)
fn check_near(with: &Known, without: &Known, dtype: DType) {
    let floats = |known: &Known| -> Vec<f32> {
        known.logits.iter().map(|&bits| f32::from_bits(bits)).collect()
    };
    let vocab_size = with.logits.len() / with.ids.len();
    let mut worst = 0.0f64;
    let (with, without) = (floats(with), floats(without));
    for (a, b) in with.chunks(vocab_size).zip(without.chunks(vocab_size)) {
        let sum: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let rms = (sum / vocab_size as f64).sqrt() / golden::std_of(b);
        assert!(rms.is_finite());
        worst = worst.max(rms);
    }
    println!("{dtype}: at most {worst:.2e} std from the model without the option");
    let bar = match dtype {
        DType::F32 => 1e-4,
        DType::F16 => 8e-3,
        DType::BF16 => 6e-2,
    };
    assert!(worst <= bar, "{dtype}: {worst:.2e}");
}

fn write(mut model: TestModel) -> TempDir {
    model.config["max_position_embeddings"] = CONTEXT.into();
    model.write(Store::F32)
}

/// Logits of a model of `head_dim`, and how many rows would differ without the option.
fn check(dir: &TempDir, name: &str, dtypes: &[DType], longest: usize) {
    for &dtype in dtypes {
        let Some(context) = cuda_context() else { return };
        let model = load_deterministic(dir.str(), Some(dtype), context).expect("a model");
        let with = everything(&model, longest);
        let ids = random_ids(&mut Random(4), longest, model.config().vocab_size);
        let known = alone(&model, ids.clone());
        drop(model);
        let Some(context) = cuda_context() else { return };
        let model = load_on_cuda(dir.str(), Some(dtype), context).expect("a model");
        check_near(&known, &alone(&model, ids), dtype);
        let without = everything(&model, longest);
        println!(
            "{name} {dtype}: {} of {} rows differ; without the option {} of {}",
            with.different, with.rows, without.different, without.rows
        );
        assert_eq!(with.different, 0, "{name} {dtype}: {:?}", with.first);
    }
}

/// Over a cache of 8-bit floats, whose keys and values are widened for the kernels of all of them.
#[test]
fn a_cache_of_8_bits_on_cuda_has_the_same_bits_in_any_batch() {
    for (head_dim, dtype) in [(128, DType::BF16), (64, DType::F32)] {
        let dir = write(TestModel::long_qwen3(11, head_dim));
        let Some(context) = cuda_context() else { return };
        let model = load_fp8_cache_on_cuda(dir.str(), dtype, context, true).expect("a model");
        let found = everything(&model, 700);
        assert!(found.rows > 1000);
        assert_eq!(found.different, 0, "{dtype}: {:?}", found.first);
    }
}

/// The chain of kernels of Hopper with its attention for heads of 128.
#[test]
fn wide_heads_on_cuda_have_the_same_bits_in_any_batch() {
    let dir = write(TestModel::long_qwen3(11, 128));
    check(&dir, "heads of 128", &[DType::BF16, DType::F16, DType::F32], 700);
}

/// The same with the attention of all GPUs.
#[test]
fn narrow_heads_on_cuda_have_the_same_bits_in_any_batch() {
    let dir = write(TestModel::long_qwen3(12, 64));
    check(&dir, "heads of 64", &[DType::BF16, DType::F16, DType::F32], 700);
}

/// Biases, and sizes that no vector divides: the kernels of all GPUs.
#[test]
fn odd_models_on_cuda_have_the_same_bits_in_any_batch() {
    let dir = write(TestModel::qwen3(13));
    check(&dir, "heads of 10", &[DType::BF16, DType::F16, DType::F32], 700);
}

/// The other families, with heads of 64 and 128, and with biases everywhere and sizes that no vector divides.
#[test]
fn families_on_cuda_have_the_same_bits_in_any_batch() {
    for family in [Family::Llama, Family::Qwen2] {
        for head_dim in [64, 128] {
            let dir = write(TestModel::long_qwen3(11, head_dim).of(family));
            let name = format!("{family:?}, heads of {head_dim}");
            check(&dir, &name, &[DType::BF16, DType::F16], 700);
        }
        let dir = write(TestModel::qwen3(13).of(family));
        check(&dir, &format!("{family:?}, heads of 10"), &[DType::BF16, DType::F32], 500);
    }
}

/// A window in one of two layers: shorter than a tile of keys, longer than a segment, and over a cache of
/// 8-bit floats.
#[test]
fn windows_on_cuda_have_the_same_bits_in_any_batch() {
    for (head_dim, window, longest) in [(128, 50, 700), (64, 150, 700), (128, 1100, 1500)] {
        let dir = write(TestModel::long_qwen3(11, head_dim).in_window(window));
        let name = format!("a window of {window}, heads of {head_dim}");
        check(&dir, &name, &[DType::BF16, DType::F32], longest);
        let Some(context) = cuda_context() else { return };
        let model = load_fp8_cache_on_cuda(dir.str(), DType::BF16, context, true).expect("a model");
        let found = everything(&model, longest);
        assert_eq!(found.different, 0, "{name}: {:?}", found.first);
    }
}

/// GPT-2, with heads of 64 and with sizes that no vector divides.
#[test]
fn gpt2_on_cuda_has_the_same_bits_in_any_batch() {
    let dtypes = [DType::BF16, DType::F16, DType::F32];
    check(&TestModel::wide_gpt2(15).write(Store::F32), "gpt2, heads of 64", &dtypes, 700);
    check(&TestModel::gpt2(16).write(Store::F32), "gpt2, heads of 10", &dtypes, 500);
}

/// Contexts of several thousand tokens.
#[test]
fn long_contexts_on_cuda_have_the_same_bits_in_any_piece() {
    let dir = write(TestModel::long_qwen3(14, 128));
    let Some(context) = cuda_context() else { return };
    let model = load_deterministic(dir.str(), Some(DType::BF16), context).expect("a model");
    let mut random = Random(3);
    let known = alone(&model, random_ids(&mut random, 4500, 1000));
    let mut count = Count::default();
    for chunk in [100, 1000, 2048, 3000] {
        count.add(in_pieces(&model, &known, chunk));
    }
    let Some(context) = cuda_context() else { return };
    let other = load_on_cuda(dir.str(), Some(DType::BF16), context).expect("a model");
    check_near(&known, &alone(&other, known.ids.clone()), DType::BF16);
    drop(other);
    // Decoded at its end, beside others.
    let mut all = vec![known];
    all.extend([3000, 1500, 40].map(|len| alone(&model, random_ids(&mut random, len, 1000))));
    // So many that no block is free for a part of a sequence.
    all.extend((0..138).map(|i| alone(&model, random_ids(&mut random, 8 + i % 9, 1000))));
    for batch in [1, 2, 4, 142] {
        count.add(decoded(&model, &all[..batch], 6));
    }
    println!("{} of {} rows differ", count.different, count.rows);
    assert_eq!(count.different, 0, "{:?}", count.first);
}
