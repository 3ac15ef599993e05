//! Constrained requests on a model that chooses tokens by itself, several steps at a time: the
//! masks come when the passes are under way already.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use xserv::engine::harness::{Harness, HarnessConstraint, HarnessOptions, HarnessRequest};
use xserv::engine::scheduler::Limits;
use xserv::engine::{FinishReason, Ticket};
use xserv::error::ErrorKind;
use xserv::text::{Constraint, GrammarCompiler, Progress, Tokenizer};

use crate::toy_model::{follow, injected, outcome, Attempt, Fault, Toy};

/// Constraints: one that ends soon, one that never does, one that leaves little choice.
const FORMS: [Constraint<'static>; 3] = [
    Constraint::Regex("[a-z]{3,9}[0-9]+!"),
    Constraint::Regex("([a-z]+ )+"),
    Constraint::JsonSchema(
        r#"{"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["name", "n"], "additionalProperties": false}"#,
    ),
];

struct Grammars {
    tokenizer: Arc<Tokenizer>,
    compiler: GrammarCompiler,
}

impl Grammars {
    fn new() -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-qwen3");
        let json = std::fs::read(folder.join("tokenizer.json")).unwrap();
        let tokenizer = Arc::new(Tokenizer::from_bytes(&json, None).unwrap());
        let compiler = GrammarCompiler::new(&tokenizer, tokenizer.vocab_size()).unwrap();
        Grammars { tokenizer, compiler }
    }

    fn toy(
        &self,
        depth: usize,
        decide: impl Fn(&Attempt) -> Option<Fault> + Send + Sync + 'static,
    ) -> Arc<Toy> {
        Arc::new(Toy::new(depth, decide).with_vocab_size(self.tokenizer.vocab_size()))
    }

    /// Returns the result of a request alone: its constraint takes each token before the next mask.
    fn expected(&self, job: &Job) -> (Vec<u32>, FinishReason) {
        let vocab_size = self.tokenizer.vocab_size();
        let form = job.form.as_ref();
        let mut matcher = form.map(|form| self.compiler.compile(form).unwrap());
        let (mut tokens, mut reason) = (Vec::new(), FinishReason::MaxTokens);
        follow(&job.prompt, vocab_size, |token| {
            tokens.extend(token);
            if let (Some(matcher), Some(token)) = (&mut matcher, token) {
                if matcher.consume(token).unwrap() == Progress::Complete {
                    reason = FinishReason::Complete;
                    return None;
                }
            }
            let goes_on = tokens.len() < job.max_new;
            goes_on.then(|| match &mut matcher {
                Some(matcher) => matcher.mask(&[], |_| false).unwrap().words.to_vec(),
                None => vec![u32::MAX; vocab_size.div_ceil(32)],
            })
        });
        (tokens, reason)
    }

    fn submit(&self, engine: &Harness, job: &Job, by_model: bool) -> Ticket {
        let constraint = job.form.as_ref().map(|form| HarnessConstraint {
            matcher: self.compiler.compile(form).unwrap(),
            tokenizer: self.tokenizer.clone(),
        });
        let (token_ids, max_new) = (job.prompt.clone(), job.max_new);
        let request = HarnessRequest {
            token_ids,
            max_new,
            by_model,
            constraint,
            ..HarnessRequest::default()
        };
        engine.submit(request).unwrap()
    }
}

struct Job {
    prompt: Vec<u32>,
    max_new: usize,
    form: Option<Constraint<'static>>,
}

/// Requests of every form, some without, of different lengths.
fn jobs() -> Vec<Job> {
    let prompt = |i: usize| (0..10 + 3 * i).map(|k| ((k * k + 31 * i + 5) % 97) as u32).collect();
    let job = |i: usize| Job {
        prompt: prompt(i),
        max_new: 90 + 15 * (i % 5),
        form: FORMS.get(i % 4).cloned(),
    };
    (0..12).map(job).collect()
}

fn options(num_blocks: u32) -> HarnessOptions {
    HarnessOptions {
        num_blocks,
        limits: Limits { max_sequences: 6, max_prefill_tokens: 64 },
        prefix_cache: true,
        max_swapped: 0,
    }
}

/// All at once get what each gets alone, also where some lose their blocks on the way.
#[test]
fn texts_follow_their_constraints_whoever_chooses() {
    let grammars = Grammars::new();
    let jobs = jobs();
    let expected: Vec<_> = jobs.iter().map(|job| grammars.expected(job)).collect();
    let complete = expected.iter().filter(|(_, reason)| *reason == FinishReason::Complete).count();
    assert!(complete > 0 && complete < jobs.len(), "both ends should occur: {complete}");
    for (depth, by_model, num_blocks) in
        [(1, false, 64), (2, false, 64), (1, true, 64), (2, true, 64), (2, true, 9)]
    {
        let engine = Harness::new(grammars.toy(depth, |_| None), &options(num_blocks)).unwrap();
        let mut tickets: Vec<_> =
            jobs.iter().map(|job| grammars.submit(&engine, job, by_model)).collect();
        for (ticket, (tokens, reason)) in tickets.iter_mut().zip(&expected) {
            let (found, end) = outcome(ticket);
            assert_eq!((&found, end.unwrap()), (tokens, *reason), "{depth} {by_model}");
        }
        let stats = engine.stats();
        assert_eq!((stats.scheduler.blocks.used, stats.submitted), (0, stats.ended));
        assert!(num_blocks > 9 || stats.scheduler.preemptions > 0, "nobody lost blocks");
    }
}

/// Steps that fail before, while and after their tokens are chosen.
#[test]
fn a_choice_that_fails_ends_those_in_its_step_and_nobody_else() {
    let grammars = Grammars::new();
    let jobs = jobs();
    let expected: Vec<_> = jobs.iter().map(|job| grammars.expected(job)).collect();
    for at in [0, 5, 11] {
        for fault in [
            Fault::Choose(ErrorKind::DeviceLost),
            Fault::Begin(ErrorKind::Internal),
            Fault::Finish(ErrorKind::Internal),
            Fault::Begin(ErrorKind::OutOfMemory),
            Fault::Finish(ErrorKind::OutOfMemory),
        ] {
            let told = fault.clone();
            let is_open = Arc::new(AtomicBool::new(false));
            let waits_for = is_open.clone();
            let toy = grammars.toy(2, move |attempt| {
                // All requests are there before the first step ends.
                while !waits_for.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                (attempt.number == at).then(|| told.clone())
            });
            let engine = Harness::new(toy, &options(64)).unwrap();
            let mut tickets: Vec<_> =
                jobs.iter().map(|job| grammars.submit(&engine, job, true)).collect();
            is_open.store(true, Ordering::Release);
            let mut num_failed = 0;
            for (ticket, (tokens, reason)) in tickets.iter_mut().zip(&expected) {
                let (found, end) = outcome(ticket);
                assert_eq!(found, tokens[..found.len()], "{fault:?} at {at}");
                match end {
                    Ok(end) => assert_eq!((found.len(), end), (tokens.len(), *reason)),
                    Err(error) => {
                        assert_eq!(error.message(), injected(error.kind()).message());
                        num_failed += 1;
                    }
                }
            }
            // A step without memory is computed again.
            let is_memory = matches!(
                fault,
                Fault::Begin(ErrorKind::OutOfMemory) | Fault::Finish(ErrorKind::OutOfMemory)
            );
            assert!(num_failed <= 6 && (num_failed == 0) == is_memory, "{num_failed} {fault:?}");
            let stats = engine.stats();
            assert_eq!((stats.scheduler.blocks.used, stats.submitted), (0, stats.ended));
        }
    }
}
