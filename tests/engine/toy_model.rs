//! A model whose next token is a function of all tokens before it, as far as they lie in the cache
//! where the block table says: whatever is computed into the wrong place, or not at all, changes
//! what comes after. It fails when it is told to.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use xserv::engine::harness::StepModel;
use xserv::engine::{Event, FinishReason, Ticket};
use xserv::error::{Error, ErrorKind, Result};
use xserv::model::{
    mask_words, BlockCopy, CopyDirection, ForwardBatch, KvCache, KvSwap, ScoresOut, Step,
    StepResult, TokenChoice, Workspace, WriteMasks, FROM_BATCH, NO_TOKEN,
};

/// Tokens are below this.
pub const VOCAB: usize = 50;

/// The longest wait for what takes milliseconds.
pub const PATIENCE: Duration = Duration::from_secs(60);

const BLOCK: usize = 32;

/// The way in which a step fails.
#[derive(Clone, Debug)]
pub enum Fault {
    /// It does not begin.
    Begin(ErrorKind),
    /// It has no result.
    Finish(ErrorKind),
    /// Its tokens are not chosen, if that waits for masks.
    Choose(ErrorKind),
    /// The model panics as it begins.
    Panic,
}

/// The facts that the toy knows of a step before it is computed.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// Steps that were tried before.
    pub number: usize,
    pub token_ids: Vec<u32>,
}

type Decide = Box<dyn Fn(&Attempt) -> Option<Fault> + Send + Sync>;

#[derive(Default)]
struct State {
    /// By place: the hash of the token computed there and all before it.
    cache: HashMap<u32, u64>,
    /// The same by place on the host.
    swapped: HashMap<u32, u64>,
    num_copies: usize,
    pending: VecDeque<Result<StepResult>>,
    /// The tokens of the step begun last.
    last: Vec<u32>,
    /// The pasts that its rows are chosen by, and what becomes of that, while the masks are missing.
    unchosen: Option<(Vec<u64>, Option<ErrorKind>)>,
    num_tried: usize,
    /// The most tokens of a step that was computed.
    largest: usize,
}

pub struct Toy {
    depth: usize,
    vocab_size: usize,
    decide: Mutex<Decide>,
    /// By the number of the copy.
    fails_copy: Mutex<Box<dyn Fn(usize) -> bool + Send + Sync>>,
    state: Mutex<State>,
}

/// Returns the past of a token after another's.
fn behind(before: u64, token: u32) -> u64 {
    let mut hasher = DefaultHasher::new();
    (before, token).hash(&mut hasher);
    hasher.finish()
}

/// Returns the token after a past, of those that may come: the first from a place on that the past
/// decides.
fn choose(past: u64, vocab_size: usize, is_allowed: impl Fn(u32) -> bool) -> u32 {
    let from = (past % vocab_size as u64) as u32;
    let mut all = (from..vocab_size as u32).chain(0..from);
    all.find(|&id| is_allowed(id)).unwrap_or(from)
}

/// Returns the outcome of a request: its tokens, and how it ended.
pub fn outcome(ticket: &mut Ticket) -> (Vec<u32>, Result<FinishReason>) {
    let mut tokens = Vec::new();
    loop {
        match ticket.next(Some(PATIENCE)) {
            Ok(Some(Event::Token { token, .. })) => tokens.push(token),
            Ok(Some(Event::End { reason, .. })) => return (tokens, Ok(reason)),
            Ok(Some(Event::Text { .. })) => {}
            Ok(other) => panic!("{other:?} after {} tokens", tokens.len()),
            Err(error) => return (tokens, Err(error)),
        }
    }
}

/// Returns the tokens that a request gets alone.
pub fn expected(prompt: &[u32], num_new: usize) -> Vec<u32> {
    let mut tokens = Vec::new();
    follow(prompt, VOCAB, |token| {
        tokens.extend(token);
        (tokens.len() < num_new).then_some(vec![u32::MAX; VOCAB])
    });
    tokens
}

/// Goes on as a request alone does: `next` gets each token, at first none, and says by words of
/// bits which may come next, or that none does.
pub fn follow(
    prompt: &[u32],
    vocab_size: usize,
    mut next: impl FnMut(Option<u32>) -> Option<Vec<u32>>,
) {
    let mut past = prompt.iter().fold(0, |past, token| behind(past, *token));
    let mut token = None;
    while let Some(mask) = next(token) {
        let chosen = choose(past, vocab_size, |id| mask[id as usize / 32] >> (id % 32) & 1 == 1);
        past = behind(past, chosen);
        token = Some(chosen);
    }
}

impl Toy {
    pub fn new(
        depth: usize,
        decide: impl Fn(&Attempt) -> Option<Fault> + Send + Sync + 'static,
    ) -> Self {
        let fails_copy = Mutex::new(Box::new(|_| false) as _);
        let decide = Mutex::new(Box::new(decide) as _);
        Toy { depth, vocab_size: VOCAB, decide, fails_copy, state: Mutex::default() }
    }

    /// The same with another vocabulary.
    pub fn with_vocab_size(self, vocab_size: usize) -> Self {
        Toy { vocab_size, ..self }
    }

    /// From now on nothing fails.
    pub fn heal(&self) {
        *self.decide.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(|_| None);
    }

    /// Copies of blocks fail if this says so of their number.
    pub fn fail_copies(&self, fails: impl Fn(usize) -> bool + Send + Sync + 'static) {
        *self.fails_copy.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(fails);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn largest(&self) -> usize {
        self.state().largest
    }

    pub fn num_tried(&self) -> usize {
        self.state().num_tried
    }
}

/// Returns the error of a step that fails on purpose.
pub fn injected(kind: ErrorKind) -> Error {
    Error::new(kind, "the toy was told to fail")
}

/// Writes a step into the cache, or garbage; returns its results.
fn compute(
    state: &mut State,
    step: &Step<'_>,
    vocab_size: usize,
    fault: Option<&Fault>,
) -> StepResult {
    let rubbish = !matches!(fault, None | Some(Fault::Choose(_)));
    let batch = &step.batch;
    for (s, range) in batch.cu_seqlens_q.windows(2).enumerate() {
        let table = &batch.block_tables[s * batch.max_blocks_per_seq..][..batch.max_blocks_per_seq];
        for t in range[0] as usize..range[1] as usize {
            let token = match step.token_sources.get(t) {
                None | Some(&FROM_BATCH) => batch.token_ids[t],
                Some(&source) => state.last[source as usize],
            };
            let position = batch.positions[t] as usize;
            let before = position.checked_sub(1).map_or(0, |p| {
                let place = table[p / BLOCK] * BLOCK as u32 + (p % BLOCK) as u32;
                // Nothing there: a past of its own.
                state.cache.get(&place).copied().unwrap_or(u64::MAX)
            });
            let past = if rubbish { u64::MAX - t as u64 } else { behind(before, token) };
            state.cache.insert(batch.slot_mapping[t], past);
        }
    }
    let mut result = StepResult::default();
    state.last.clear();
    let past = |row: &u32| state.cache[&batch.slot_mapping[*row as usize]];
    if !step.masked_rows.is_empty() {
        let fails = match fault {
            Some(Fault::Choose(kind)) => Some(*kind),
            _ => None,
        };
        state.unchosen = Some((batch.logits_rows.iter().map(past).collect(), fails));
        result.tokens = vec![NO_TOKEN; step.choices.len()];
        assert!(!step.choices.contains(&TokenChoice::Caller), "the toy does not mix these");
        return result;
    }
    for (row, choice) in batch.logits_rows.iter().zip(step.choices) {
        let token = choose(past(row), vocab_size, |_| true);
        state.last.push(token);
        match choice {
            TokenChoice::Caller => {
                result.tokens.push(NO_TOKEN);
                // The tokens after it, in order: the likeliest that may come is the right one.
                let after = |id| (id + vocab_size - token as usize) % vocab_size;
                result.logits.extend((0..vocab_size).map(|id| -(after(id) as f32)));
            }
            _ => result.tokens.push(token),
        }
    }
    result
}

impl StepModel for Toy {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn max_steps_in_flight(&self) -> usize {
        self.depth
    }

    fn begin_step(
        &self,
        step: &Step<'_>,
        _: &mut KvCache,
        _: &mut Workspace,
        _: &dyn Fn() -> bool,
    ) -> Result<()> {
        let state = &mut *self.state();
        assert!(state.pending.len() < self.depth, "more steps than may be under way");
        assert!(state.unchosen.is_none(), "the tokens of the step before are not chosen");
        let attempt = Attempt { number: state.num_tried, token_ids: step.batch.token_ids.to_vec() };
        state.num_tried += 1;
        let fault = (self.decide.lock().unwrap_or_else(PoisonError::into_inner))(&attempt);
        let result = compute(state, step, self.vocab_size, fault.as_ref());
        match fault {
            None | Some(Fault::Choose(_)) => {
                state.largest = state.largest.max(step.batch.num_tokens());
                state.pending.push_back(Ok(result));
            }
            Some(Fault::Begin(kind)) => {
                // The tokens of the step before are overwritten.
                state.last.clear();
                state.unchosen = None;
                return Err(injected(kind));
            }
            Some(Fault::Finish(kind)) => state.pending.push_back(Err(injected(kind))),
            Some(Fault::Panic) => panic!("the toy was told to panic"),
        }
        Ok(())
    }

    fn choose_masked(
        &self,
        step: &Step<'_>,
        _: &mut Workspace,
        write_masks: &mut WriteMasks<'_>,
    ) -> Result<()> {
        let state = &mut *self.state();
        let (pasts, fails) = state.unchosen.take().expect("a step that waits for masks");
        let words = mask_words(self.vocab_size);
        let mut masks = vec![0xee; 4 * words * step.masked_rows.len()];
        write_masks(&mut masks)?;
        if let Some(kind) = fails {
            return Err(injected(kind));
        }
        let allows = |row: u32, id: u32| match step.masked_rows.binary_search(&row) {
            Ok(index) => masks[index * 4 * words + id as usize / 8] >> (id % 8) & 1 == 1,
            Err(_) => true,
        };
        let rows = pasts.iter().zip(0..);
        state.last =
            rows.map(|(past, row)| choose(*past, self.vocab_size, |id| allows(row, id))).collect();
        if let Some(Ok(result)) = state.pending.back_mut() {
            result.tokens.clone_from(&state.last);
        }
        Ok(())
    }

    fn copy_blocks(&self, _: &mut KvCache, _: &mut KvSwap, copies: &[BlockCopy]) -> Result<()> {
        let State { cache, swapped, num_copies, .. } = &mut *self.state();
        for copy in copies {
            *num_copies += 1;
            let decide = self.fails_copy.lock().unwrap_or_else(PoisonError::into_inner);
            if decide(*num_copies) {
                return Err(injected(ErrorKind::DeviceLost));
            }
            let (from, to, source, target) = match copy.direction {
                CopyDirection::ToHost => (&mut *cache, &mut *swapped, copy.block, copy.place),
                CopyDirection::FromHost => (&mut *swapped, &mut *cache, copy.place, copy.block),
            };
            for slot in 0..BLOCK as u32 {
                match from.get(&(source * BLOCK as u32 + slot)) {
                    Some(past) => to.insert(target * BLOCK as u32 + slot, *past),
                    None => to.remove(&(target * BLOCK as u32 + slot)),
                };
            }
        }
        Ok(())
    }

    fn finish_step(&self, _: &mut Workspace, result: &mut StepResult) -> Result<()> {
        let state = &mut *self.state();
        let finished = state.pending.pop_front().expect("a step is under way");
        if state.pending.is_empty() {
            state.unchosen = None;
        }
        *result = finished?;
        Ok(())
    }

    fn logits(
        &self,
        _: &ForwardBatch<'_>,
        _: &mut KvCache,
        _: &mut Workspace,
        _: &mut [f32],
        _: &dyn Fn() -> bool,
    ) -> Result<()> {
        unreachable!("nobody asks for logits")
    }

    fn score(
        &self,
        _: &ForwardBatch<'_>,
        _: &mut KvCache,
        _: &mut Workspace,
        _: ScoresOut<'_>,
        _: &dyn Fn() -> bool,
    ) -> Result<()> {
        unreachable!("nobody asks for scores")
    }
}
