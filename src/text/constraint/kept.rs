//! Compiled constraints that are kept, since many requests come with the same one.
//!
//! The parser that is kept stands before the first token. Its automaton is made as texts need it,
//! and a matcher that ends leaves its own in the place of the one it began with: the next request
//! with the constraint finds the states that texts of its kind pass through.

use std::sync::{Arc, Mutex, PoisonError};

use llguidance::TokenParser;

use super::Constraint;
use crate::error::{check_room, ErrorKind};
use crate::text::guarded;

/// The most constraints that are kept, and the most bytes of all of them together.
const MAX_KEPT: usize = 64;
const MAX_BYTES: usize = 32 << 20;
/// The most bytes of an automaton, which is copied for each request.
const MAX_AUTOMATON_BYTES: usize = 4 << 20;
/// The most states of an automaton: a text needs most of those that one may have (`compiler.rs`) itself.
const MAX_AUTOMATON_STATES: usize = 5_000;

/// The longest text of a constraint that is kept, in bytes, and what its grammar is taken to need for
/// each: the crate tells the size of the automaton alone.
const MAX_TEXT_BYTES: usize = 16 << 10;
const GRAMMAR_BYTES: usize = 256;

/// The kept constraints of a vocabulary, those that were used last at the end.
#[derive(Default)]
pub(super) struct KeptParsers {
    kept: Mutex<Vec<Kept>>,
}

struct Kept {
    key: Arc<Key>,
    start: Arc<TokenParser>,
    bytes: usize,
}

/// A constraint as it was given.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Key {
    name: &'static str,
    texts: Vec<String>,
    /// The grammar around it, if it has one.
    around: Option<String>,
}

impl Key {
    /// Returns the key of a constraint, or `None` if it is too long to be kept.
    pub fn of(constraint: &Constraint<'_>, around: Option<&str>) -> Option<Self> {
        let texts: &[&str] = match constraint {
            Constraint::JsonObject => &[],
            Constraint::JsonSchema(text) | Constraint::Regex(text) | Constraint::Grammar(text) => {
                &[text]
            }
            Constraint::Choice(choices) => choices,
        };
        let bytes: usize = texts.iter().map(|text| text.len() + size_of::<String>()).sum();
        (bytes <= MAX_TEXT_BYTES).then(|| Key {
            name: constraint.name(),
            texts: texts.iter().map(|&text| text.to_owned()).collect(),
            around: around.map(str::to_owned),
        })
    }

    fn bytes(&self) -> usize {
        self.texts.iter().map(|text| text.len() * GRAMMAR_BYTES).sum()
    }
}

/// The cache that a matcher came from and returns its automaton to.
pub(super) struct Home {
    kept: Arc<KeptParsers>,
    key: Arc<Key>,
    /// The parser before the first token, which shares its automaton with the matcher.
    start: TokenParser,
}

impl Home {
    pub fn new(kept: &Arc<KeptParsers>, key: Arc<Key>, start: &TokenParser) -> Self {
        Home { kept: kept.clone(), key, start: start.clone() }
    }

    /// Leaves the automaton of a matcher that has not failed.
    pub fn leave(self) {
        let Home { kept, key, start } = self;
        kept.keep(key, start);
    }
}

impl KeptParsers {
    /// Returns a parser of a constraint that is kept, for a matcher, and where that leaves its
    /// automaton.
    pub fn get(self: &Arc<Self>, key: &Key) -> Option<(TokenParser, Home)> {
        let (start, key, bytes) = {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            let place = kept.iter().position(|it| *it.key == *key)?;
            let last = kept.remove(place);
            let found = (last.start.clone(), last.key.clone(), last.bytes);
            kept.push(last);
            found
        };
        // The copy is made without the lock: others may have one meanwhile. Without memory for it there is
        // none for another one either, which the caller is told when it is compiled.
        check_room(2 * bytes, "a constraint").ok()?;
        let copy = || Ok(start.deep_clone());
        let start = guarded(ErrorKind::Internal, "the constraint", copy).ok()?;
        let home = Home::new(self, key, &start);
        Some((start, home))
    }

    /// Keeps a parser that has taken no token, in the place of those that were not used for longest, unless
    /// there is one of the same constraint with a larger automaton.
    pub fn keep(&self, key: Arc<Key>, start: TokenParser) {
        let stats = || Ok(start.parser.lexer_stats());
        let Ok(stats) = guarded(ErrorKind::Internal, "the constraint", stats) else { return };
        let bytes = key.bytes().saturating_add(stats.num_bytes);
        let is_small =
            stats.num_bytes <= MAX_AUTOMATON_BYTES && stats.num_states <= MAX_AUTOMATON_STATES;
        if stats.error || !is_small || bytes > MAX_BYTES / 4 {
            return;
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut dropped = Vec::new();
        if let Some(place) = kept.iter().position(|it| it.key == key) {
            if kept.get(place).is_some_and(|it| it.bytes >= bytes) {
                return;
            }
            dropped.push(kept.remove(place));
        }
        let mut all = kept.iter().map(|it| it.bytes).sum::<usize>() + bytes;
        while !kept.is_empty() && (kept.len() >= MAX_KEPT || all > MAX_BYTES) {
            let first = kept.remove(0);
            all -= first.bytes;
            dropped.push(first);
        }
        kept.push(Kept { key, start: Arc::new(start), bytes });
        drop(kept);
        // Others need not wait for their memory to be freed.
        drop(dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities};
    use llguidance::{api::TopLevelGrammar, Matcher, ParserFactory};

    fn parser(regex: &str) -> TokenParser {
        let env = ApproximateTokEnv::single_byte_env();
        let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &[]);
        let parser = factory.expect("a factory").create_parser(TopLevelGrammar::from_regex(regex));
        let mut parser = parser.expect("a parser");
        parser.start_without_prompt();
        parser
    }

    fn key(text: &str) -> Arc<Key> {
        Arc::new(Key::of(&Constraint::Regex(text), None).expect("a short text"))
    }

    fn kept(texts: &[&str]) -> Arc<KeptParsers> {
        let kept = Arc::new(KeptParsers::default());
        texts.iter().for_each(|text| kept.keep(key(text), parser(text)));
        kept
    }

    fn has(kept: &Arc<KeptParsers>, text: &str) -> bool {
        kept.kept.lock().expect("no panic").iter().any(|it| it.key == key(text))
    }

    fn take(kept: &Arc<KeptParsers>, text: &str, tokens: &[u8]) -> bool {
        let (start, home) = kept.get(&key(text)).expect("kept");
        let mut matcher = Matcher::new(Ok(start));
        let mut is_taken = true;
        for &token in tokens {
            let mask = matcher.compute_mask().expect("a mask");
            is_taken = matcher.try_consume_tokens(&[token.into()]).expect("no fault") == 1;
            assert_eq!(is_taken, mask.is_allowed(token.into()));
        }
        home.leave();
        is_taken
    }

    #[test]
    fn each_begins_before_the_first_token() {
        let kept = kept(&["ab"]);
        let mut first = Matcher::new(Ok(kept.get(&key("ab")).expect("kept").0));
        assert_eq!(first.try_consume_tokens(&[b'a'.into()]).ok(), Some(1));
        for _ in 0..3 {
            assert!(
                take(&kept, "ab", b"a") && !take(&kept, "ab", b"b") && take(&kept, "ab", b"ab")
            );
        }
        assert_eq!(first.try_consume_tokens(&[b'b'.into()]).ok(), Some(1));
    }

    #[test]
    fn matchers_leave_their_automata() {
        let (kept, text) = (kept(&["(abc|abd)*x"]), "(abc|abd)*x");
        let states = || {
            let kept = kept.kept.lock().expect("no panic");
            kept.first().map(|it| it.start.parser.lexer_stats().num_states).expect("kept")
        };
        let before = states();
        assert!(take(&kept, text, b"abdabcx"));
        let after = states();
        assert!(after > before, "{before} {after}");
        // One that needs no more states than there are changes nothing.
        assert!(take(&kept, text, b"ab"));
        assert_eq!(states(), after);
        assert!(take(&kept, text, b"abcabdx"));
    }

    #[test]
    fn constraints_of_another_kind_or_cut_are_others() {
        let kept = kept(&["ab"]);
        for other in [
            Constraint::JsonSchema("ab"),
            Constraint::Grammar("ab"),
            Constraint::Choice(vec!["ab"]),
            Constraint::Regex("abc"),
            Constraint::JsonObject,
        ] {
            assert!(kept.get(&Key::of(&other, None).expect("short")).is_none(), "{other:?}");
        }
        let choices = |all: &[&'static str]| Key::of(&Constraint::Choice(all.to_vec()), None);
        assert_ne!(choices(&["a", "b"]), choices(&["ab"]));
        let around = Key::of(&Constraint::Regex("ab"), Some("start: @xserv-answer"));
        assert!(kept.get(&around.expect("short")).is_none());
    }

    #[test]
    fn those_not_used_for_longest_go_first() {
        let numbers: Vec<String> = (0..=MAX_KEPT).map(|n| n.to_string()).collect();
        let numbers: Vec<&str> = numbers.iter().map(String::as_str).collect();
        let kept = kept(&numbers[..MAX_KEPT]);
        assert!(kept.get(&key("0")).is_some());
        kept.keep(key(numbers[MAX_KEPT]), parser("x"));
        assert!(!has(&kept, "1") && has(&kept, "0") && has(&kept, "2"));
        assert!(has(&kept, numbers[MAX_KEPT]));
    }

    #[test]
    fn memory_is_bounded() {
        let long = "x".repeat(MAX_TEXT_BYTES);
        assert!(Key::of(&Constraint::Regex(&long), None).is_none());
        // Each grammar counts 2 MiB.
        let texts: Vec<String> =
            (0..20).map(|n| format!("{n:0width$}", width = (2 << 20) / GRAMMAR_BYTES)).collect();
        let kept = kept(&[]);
        for text in &texts {
            kept.keep(key(text), parser("x"));
        }
        let all: usize = kept.kept.lock().expect("no panic").iter().map(|it| it.bytes).sum();
        assert!(all <= MAX_BYTES && all > MAX_BYTES / 2, "{all}");
        assert!(has(&kept, &texts[19]) && !has(&kept, &texts[0]));
    }
}
