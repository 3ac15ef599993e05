//! The engine's loop around any [`StepModel`], for tests: models that fail, that are slow, that
//! check their input. It is not part of the library's interface.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::batch_builder::BatchBuilder;
use super::block_pool::BlockPool;
use super::constrained::Constrained;
use super::inbox::{Inbox, Waker};
use super::log::Logger;
use super::request::{CancelToken, FinishReason};
use super::sampler::{Sampler, SamplingOverrides, SamplingParams};
use super::scheduler::Scheduler;
use super::sequence::NewSequence;
use super::service::Service;
use super::stats::EngineStats;
pub use super::step_model::StepModel;
use super::step_resources::StepResources;
use super::step_size::Limits;
use super::submission::{SampleWork, Submission, Work};
use super::ticket::{TextRules, Ticket};
use crate::backend::cpu::CpuBackend;
use crate::error::Result;
use crate::memory::DType;
use crate::model::{KvCache, KvSwap, TokenChoice, Workspace};
use crate::ops::kv_cache::layout::{KvFormat, KvLayout};
use crate::text::{GrammarMatcher, Tokenizer};

/// The sizes of an engine.
#[derive(Clone, Copy, Debug)]
pub struct HarnessOptions {
    /// Blocks of the KV cache, which are as small as can be.
    pub num_blocks: u32,
    /// The largest steps.
    pub limits: Limits,
    /// Whether blocks of equal beginnings are shared.
    pub prefix_cache: bool,
    /// Blocks of preempted sequences that may be kept on the host.
    pub max_swapped: usize,
}

/// A constraint of a request, before its first token.
pub struct HarnessConstraint {
    /// The constraint, of a vocabulary as large as the model's.
    pub matcher: GrammarMatcher,
    /// The tokenizer that it was compiled for.
    pub tokenizer: Arc<Tokenizer>,
}

/// A request of one sample.
#[derive(Default)]
pub struct HarnessRequest {
    /// The prompt.
    pub token_ids: Vec<u32>,
    /// Tokens to generate.
    pub max_new: usize,
    /// Higher goes first.
    pub priority: i32,
    /// Whether the model chooses the tokens, as [`TokenChoice::Greedy`]; else the engine does, from
    /// the logits.
    pub by_model: bool,
    /// The settings with which the engine chooses.
    pub sampling: SamplingOverrides,
    /// The constraint that its text must follow.
    pub constraint: Option<HarnessConstraint>,
    /// Cancels it from anywhere.
    pub cancel: Option<Arc<CancelToken>>,
    /// The time after which it ends.
    pub time_limit: Option<Duration>,
    /// Called on the scheduler's thread.
    pub waker: Option<Waker>,
}

/// An engine without tokenizer and folder.
pub struct Harness {
    service: Service,
    closed: Arc<AtomicBool>,
}

impl Harness {
    /// Returns an engine that runs requests on `model`.
    pub fn new(model: Arc<dyn StepModel>, options: &HarnessOptions) -> Result<Self> {
        let pool = BlockPool::new(options.num_blocks, options.prefix_cache)?;
        let layout = KvLayout {
            dtype: DType::F32,
            format: KvFormat::Dense,
            num_layers: 1,
            num_kv_heads: 1,
            head_dim: 2,
        };
        let resources = StepResources {
            kv: KvCache::new(layout, options.num_blocks as usize)?,
            swap: KvSwap::on_host(layout),
            workspace: Workspace::new(),
            builder: BatchBuilder::with_room(&options.limits, options.num_blocks as usize)?,
        };
        let closed = Arc::new(AtomicBool::new(false));
        let mut scheduler = Scheduler::new(pool, options.limits)?;
        scheduler.set_max_swapped(options.max_swapped);
        let backend = Arc::new(CpuBackend::new(1)?);
        let service = Service::new(
            model,
            backend,
            resources,
            scheduler,
            closed.clone(),
            Arc::new(Logger::silent()),
        );
        Ok(Harness { service, closed })
    }

    /// Hands a request to the scheduler.
    pub fn submit(&self, request: HarnessRequest) -> Result<Ticket> {
        let begin = Instant::now();
        let num_prompt_tokens = request.token_ids.len();
        let max_tokens = num_prompt_tokens + request.max_new;
        let inbox = Arc::new(Inbox::new(
            1,
            request.max_new,
            request.cancel,
            self.closed.clone(),
            request.time_limit.and_then(|limit| begin.checked_add(limit)),
            request.waker,
        )?);
        let rules = TextRules {
            tokenizer: None,
            skip_special: true,
            after: None,
            stop_strings: &[],
            answer: None,
        };
        let seeds = std::iter::once(0);
        let ticket = Ticket::new(inbox.clone(), &rules, seeds, num_prompt_tokens, begin)?;
        let params = SamplingParams::resolve(&request.sampling, &SamplingOverrides::default())?;
        let mut sampler = Sampler::new(params, 0, &request.token_ids)?;
        sampler.changes_mut().reserve(request.max_new)?;
        let work = SampleWork {
            inbox,
            sample: 0,
            sampler,
            constrained: request.constraint.map(|HarnessConstraint { matcher, tokenizer }| {
                Box::new(Constrained::new(matcher, tokenizer, Arc::default()))
            }),
            stop_token_ids: Arc::default(),
            num_prompt_tokens,
            max_tokens,
            reason_at_max: FinishReason::MaxTokens,
            choice: if request.by_model { TokenChoice::Greedy } else { TokenChoice::Caller },
            log_probs: None,
            asks_host: false,
        };
        let mut token_ids = request.token_ids;
        token_ids.reserve(request.max_new);
        let sequence = NewSequence {
            token_ids,
            max_tokens,
            priority: request.priority,
            max_cached_tokens: usize::MAX,
            runs_ahead: request.by_model,
            by_model: request.by_model,
            ..NewSequence::default()
        };
        let work = Work::Sample(Box::new(work));
        self.service.submit(vec![Submission::Run { sequence, work }])?;
        Ok(ticket)
    }

    /// Ends every request as cancelled, now and later.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Statistics of what the engine has done and is doing.
    pub fn stats(&self) -> EngineStats {
        self.service.stats()
    }
}
