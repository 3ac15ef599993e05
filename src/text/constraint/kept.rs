//! Compiled constraints that are kept, since many requests come with the same one.

use std::sync::{Arc, Mutex, PoisonError};

use super::matcher::GrammarMatcher;
use super::Constraint;
use crate::error::{check_room, Result};

/// The most constraints that are kept, and the most bytes of all of them together.
const MAX_KEPT: usize = 64;
const MAX_BYTES: usize = 32 << 20;

/// The longest text of a constraint that is kept, in bytes. What its grammar takes is some hundreds of
/// bytes for each; only the automaton is counted as it is.
const MAX_TEXT_BYTES: usize = 16 << 10;
const GRAMMAR_BYTES: usize = 256;

/// Matchers before the first token, those that were used last at the end.
#[derive(Default)]
pub(super) struct KeptMatchers {
    kept: Mutex<Vec<Kept>>,
}

struct Kept {
    key: Key,
    matcher: Arc<GrammarMatcher>,
    bytes: usize,
}

/// A constraint as it was given.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Key {
    name: &'static str,
    texts: Vec<String>,
}

impl Key {
    /// The key of a constraint, or `None` if it is too long to be kept.
    pub fn of(constraint: &Constraint<'_>) -> Option<Self> {
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
        })
    }

    fn bytes(&self) -> usize {
        self.texts.iter().map(|text| text.len() * GRAMMAR_BYTES).sum()
    }
}

impl KeptMatchers {
    /// A matcher of a constraint that was compiled before.
    pub fn get(&self, key: &Key) -> Option<Result<GrammarMatcher>> {
        let (matcher, bytes) = {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            let place = kept.iter().position(|it| it.key == *key)?;
            let last = kept.remove(place);
            let found = (last.matcher.clone(), last.bytes);
            kept.push(last);
            found
        };
        // The copy is made without the lock: others may have one meanwhile.
        Some(check_room(2 * bytes, "a constraint").and_then(|()| matcher.try_clone()))
    }

    /// Keeps a matcher that has taken no token, whose automaton takes `automaton_bytes`, in the place of
    /// those that were not used for longest.
    pub fn keep(&self, key: Key, matcher: GrammarMatcher, automaton_bytes: usize) {
        let bytes = key.bytes().saturating_add(automaton_bytes);
        if bytes > MAX_BYTES / 4 {
            return;
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|it| it.key != key);
        let mut all = kept.iter().map(|it| it.bytes).sum::<usize>() + bytes;
        let mut num_dropped = (kept.len() + 1).saturating_sub(MAX_KEPT);
        all -= kept.iter().take(num_dropped).map(|it| it.bytes).sum::<usize>();
        while let (true, Some(next)) = (all > MAX_BYTES, kept.get(num_dropped)) {
            all -= next.bytes;
            num_dropped += 1;
        }
        let num_dropped = num_dropped.min(kept.len());
        let dropped: Vec<Kept> = kept.drain(..num_dropped).collect();
        if kept.try_reserve(1).is_ok() {
            kept.push(Kept { key, matcher: Arc::new(matcher), bytes });
        }
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

    fn matcher(regex: &str) -> GrammarMatcher {
        let env = ApproximateTokEnv::single_byte_env();
        let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &[]);
        let parser = factory.expect("a factory").create_parser(TopLevelGrammar::from_regex(regex));
        GrammarMatcher::new(Matcher::new(parser), 256)
    }

    fn key(text: &str) -> Key {
        Key::of(&Constraint::Regex(text)).expect("a short text")
    }

    #[test]
    fn each_gets_a_matcher_before_the_first_token() {
        let kept = KeptMatchers::default();
        kept.keep(key("ab"), matcher("ab"), 0);
        for _ in 0..2 {
            let mut first = kept.get(&key("ab")).expect("kept").expect("a copy");
            assert!(first.consume(u32::from(b'a')).is_ok());
            assert!(first.consume(u32::from(b'a')).is_err());
        }
    }

    #[test]
    fn constraints_of_another_kind_or_cut_are_others() {
        let texts = ["ab"];
        let kept = KeptMatchers::default();
        kept.keep(key("ab"), matcher("ab"), 0);
        for other in [
            Constraint::JsonSchema("ab"),
            Constraint::Grammar("ab"),
            Constraint::Choice(texts.to_vec()),
            Constraint::Regex("abc"),
            Constraint::JsonObject,
        ] {
            assert!(kept.get(&Key::of(&other).expect("short")).is_none(), "{other:?}");
        }
        let choices = |all: &[&'static str]| Key::of(&Constraint::Choice(all.to_vec()));
        assert!(choices(&["a", "b"]) != choices(&["ab"]));
    }

    #[test]
    fn those_not_used_for_longest_go_first() {
        let kept = KeptMatchers::default();
        let numbers: Vec<String> = (0..=MAX_KEPT).map(|n| n.to_string()).collect();
        for number in &numbers[..MAX_KEPT] {
            kept.keep(key(number), matcher(number), 0);
        }
        assert!(kept.get(&key("0")).is_some());
        kept.keep(key(&numbers[MAX_KEPT]), matcher("x"), 0);
        assert!(kept.get(&key("1")).is_none());
        assert!(kept.get(&key("0")).is_some() && kept.get(&key("2")).is_some());
    }

    #[test]
    fn memory_is_bounded() {
        let kept = KeptMatchers::default();
        kept.keep(key("small"), matcher("x"), 0);
        kept.keep(key("large"), matcher("x"), MAX_BYTES / 4 + 1);
        assert!(kept.get(&key("large")).is_none());
        for text in ["a", "b", "c", "d"] {
            kept.keep(key(text), matcher("x"), MAX_BYTES / 4 - GRAMMAR_BYTES);
        }
        assert!(kept.get(&key("small")).is_none());
        assert!(["a", "b", "c", "d"].iter().all(|text| kept.get(&key(text)).is_some()));
        kept.keep(key("e"), matcher("x"), MAX_BYTES / 4 - GRAMMAR_BYTES);
        assert!(kept.get(&key("a")).is_none() && kept.get(&key("e")).is_some());
        let long = "x".repeat(MAX_TEXT_BYTES);
        assert!(Key::of(&Constraint::Regex(&long)).is_none());
    }
}
