//! A model whose next token is a function of all tokens before it, as far as they lie in the cache where the block
//! table says: whatever is computed into the wrong place, or not at all, changes what comes after. It fails when
//! it is told to.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use xserv::engine::harness::StepModel;
use xserv::error::{Error, ErrorKind, Result};
use xserv::model::{
    BlockCopy, CopyDirection, ForwardBatch, KvCache, KvSwap, ScoresOut, Step, StepResult,
    TokenChoice, Workspace, FROM_BATCH, NO_TOKEN,
};

/// Tokens are below this.
pub const VOCAB: usize = 50;

const BLOCK: usize = 32;

/// What becomes of a step.
#[derive(Clone, Debug)]
pub enum Fault {
    /// It does not begin.
    Begin(ErrorKind),
    /// It has no result.
    Finish(ErrorKind),
    /// The model panics as it begins.
    Panic,
}

/// What the toy tells of a step before it is computed.
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
    num_tried: usize,
    /// The most tokens of a step that was computed.
    largest: usize,
}

pub struct Toy {
    depth: usize,
    decide: Mutex<Decide>,
    /// By the number of the copy.
    fails_copy: Mutex<Box<dyn Fn(usize) -> bool + Send + Sync>>,
    state: Mutex<State>,
}

/// The past of a token behind another's.
fn behind(before: u64, token: u32) -> u64 {
    let mut hasher = DefaultHasher::new();
    (before, token).hash(&mut hasher);
    hasher.finish()
}

fn choose(past: u64) -> u32 {
    (past % VOCAB as u64) as u32
}

/// What a request alone gets.
pub fn expected(prompt: &[u32], num_new: usize) -> Vec<u32> {
    let mut past = prompt.iter().fold(0, |past, token| behind(past, *token));
    let mut next = || {
        let token = choose(past);
        past = behind(past, token);
        token
    };
    (0..num_new).map(|_| next()).collect()
}

impl Toy {
    pub fn new(
        depth: usize,
        decide: impl Fn(&Attempt) -> Option<Fault> + Send + Sync + 'static,
    ) -> Self {
        let fails_copy = Mutex::new(Box::new(|_| false) as _);
        Toy { depth, decide: Mutex::new(Box::new(decide)), fails_copy, state: Mutex::default() }
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

/// Tells who failed.
pub fn injected(kind: ErrorKind) -> Error {
    Error::new(kind, "the toy was told to fail")
}

/// Computes a step into the cache, or rubbish; gives what it comes to.
fn compute(state: &mut State, step: &Step<'_>, rubbish: bool) -> StepResult {
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
    for (row, choice) in batch.logits_rows.iter().zip(step.choices) {
        let token = choose(state.cache[&batch.slot_mapping[*row as usize]]);
        state.last.push(token);
        match choice {
            TokenChoice::Caller => {
                result.tokens.push(NO_TOKEN);
                let logit = |id| if id == token as usize { 1.0 } else { 0.0 };
                result.logits.extend((0..VOCAB).map(logit));
            }
            _ => result.tokens.push(token),
        }
    }
    result
}

impl StepModel for Toy {
    fn vocab_size(&self) -> usize {
        VOCAB
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
        let attempt = Attempt { number: state.num_tried, token_ids: step.batch.token_ids.to_vec() };
        state.num_tried += 1;
        let fault = (self.decide.lock().unwrap_or_else(PoisonError::into_inner))(&attempt);
        let result = compute(state, step, fault.is_some());
        match fault {
            None => {
                state.largest = state.largest.max(step.batch.num_tokens());
                state.pending.push_back(Ok(result));
            }
            Some(Fault::Begin(kind)) => {
                // The tokens of the step before are overwritten.
                state.last.clear();
                return Err(injected(kind));
            }
            Some(Fault::Finish(kind)) => state.pending.push_back(Err(injected(kind))),
            Some(Fault::Panic) => panic!("the toy was told to panic"),
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
        *result = self.state().pending.pop_front().expect("a step is under way")?;
        Ok(())
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
