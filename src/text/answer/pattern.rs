//! Regular expressions of response templates, matched while a text comes.
//!
//! A [`Search`] takes a text character by character and tells from where on it may still match, which no
//! regular-expression crate does for a text of which more may come. It follows all ways through the automaton
//! at once, in the order in which a backtracking engine would try them, so it finds the match that such an
//! engine finds, and a character takes time in proportion to the automaton at most.

use regex_automata::nfa::thompson::{Compiler, Config, State, WhichCaptures, NFA};
use regex_automata::util::look::LookMatcher;
use regex_automata::util::primitives::StateID;
use regex_automata::util::syntax;

use crate::error::{Error, Result};
use crate::text::shortened;

/// The longest expression, in bytes, and the largest automaton.
const MAX_PATTERN_BYTES: usize = 4 << 10;
const MAX_AUTOMATON_BYTES: usize = 256 << 10;
/// The most named groups of an expression.
const MAX_GROUPS: usize = 8;

/// A compiled expression. `.` matches every character, `^` and `$` only the ends of the text.
#[derive(Clone, Debug)]
pub(super) struct Pattern {
    nfa: NFA,
    /// The named groups, each with its number in the automaton.
    groups: Vec<(String, usize)>,
    has_looks: bool,
    /// The bytes with which a match can begin.
    begins: Box<[bool; 256]>,
}

impl Pattern {
    /// Compiles an expression as Python writes it. Lookaround and backreferences are not supported.
    pub fn new(pattern: &str) -> Result<Self> {
        if pattern.len() > MAX_PATTERN_BYTES {
            return Err(Error::unsupported(format!(
                "the expression has {} bytes, at most {MAX_PATTERN_BYTES} are supported",
                pattern.len()
            )));
        }
        let config = Config::new()
            .nfa_size_limit(Some(MAX_AUTOMATON_BYTES))
            .which_captures(WhichCaptures::All);
        let nfa = Compiler::new()
            .configure(config)
            .syntax(syntax::Config::new().dot_matches_new_line(true))
            .build(&without_python_escapes(pattern))
            .map_err(|error| {
                let source = std::error::Error::source(&error).map(ToString::to_string);
                let why = source.unwrap_or_else(|| error.to_string());
                let line = why.lines().last().unwrap_or_default().to_owned();
                Error::unsupported(format!("the expression is not supported: {}", shortened(&line)))
            })?;
        let names = nfa.group_info().pattern_names(regex_automata::PatternID::ZERO);
        let groups: Vec<(String, usize)> = names
            .enumerate()
            .filter_map(|(number, name)| Some((name?.to_owned(), number)))
            .collect();
        if groups.len() > MAX_GROUPS {
            return Err(Error::unsupported(format!(
                "the expression has {} named groups, at most {MAX_GROUPS} are supported",
                groups.len()
            )));
        }
        let has_looks = !nfa.look_set_any().is_empty();
        let begins = Box::new(first_bytes(&nfa));
        Ok(Pattern { nfa, groups, has_looks, begins })
    }

    /// Returns an expression that matches one of these texts, the longest that it can.
    pub fn any_of(texts: &[&str]) -> Result<Self> {
        let mut texts = texts.to_vec();
        texts.sort_by_key(|text| std::cmp::Reverse(text.len()));
        let escaped: Vec<String> = texts.iter().map(|text| escaped(text)).collect();
        Self::new(&escaped.join("|"))
    }

    /// Returns the names of the groups.
    pub fn group_names(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().map(|(name, _)| name.as_str())
    }

    /// Whether a match can begin with this byte.
    pub fn can_begin_with(&self, byte: u8) -> bool {
        self.begins.get(usize::from(byte)).copied().unwrap_or(true)
    }

    /// Whether the expression matches the empty text.
    pub fn matches_nothing(&self) -> bool {
        self.nfa.has_empty()
    }

    /// Calls `take` with each match in a text, from the left, while it returns true. Fails if this
    /// takes more than `budget` steps, which are counted off.
    pub fn for_each_match(
        &self,
        text: &str,
        budget: &mut u64,
        mut take: impl FnMut(&Match) -> bool,
    ) -> Option<()> {
        let mut from = 0;
        loop {
            let mut search = Search::default();
            let mut previous = text.get(..from).and_then(|before| before.chars().next_back());
            for (at, next) in text.get(from..)?.char_indices() {
                search.advance(self, previous, next, from + at, budget)?;
                previous = Some(next);
                if search.is_over {
                    break;
                }
            }
            search.end(self, previous, text.len(), budget)?;
            let Some(found) = search.found else { return Some(()) };
            if !take(&found) {
                return Some(());
            }
            from = found.end;
        }
    }
}

/// A match: bytes of the text, and the named groups that took part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Match {
    pub start: usize,
    pub end: usize,
    slots: Slots,
}

/// The beginnings and ends of the named groups, in 32 bits, as they are copied often.
type Slots = [u32; 2 * MAX_GROUPS];

/// Stands for a group that took no part.
const NONE: u32 = u32::MAX;

impl Match {
    /// Returns the named groups, as bytes of the text.
    pub fn groups<'a>(
        &'a self,
        pattern: &'a Pattern,
    ) -> impl Iterator<Item = (&'a str, std::ops::Range<usize>)> {
        pattern.groups.iter().zip(self.slots.chunks_exact(2)).filter_map(|((name, _), slots)| {
            match slots {
                [NONE, _] | [_, NONE] => None,
                [start, end] => Some((name.as_str(), *start as usize..*end as usize)),
                _ => None,
            }
        })
    }
}

#[derive(Clone, Debug)]
struct Thread {
    state: StateID,
    start: usize,
    slots: Slots,
}

/// One search for the first match, on its way through a text. Empty matches do not count.
#[derive(Clone, Debug, Default)]
pub(super) struct Search {
    /// In the order of preference. For an expression with assertions, the states before what the
    /// next character decides; for others, the states that take a byte.
    threads: Vec<Thread>,
    spare: Vec<Thread>,
    /// States that are still to be expanded.
    open: Vec<Thread>,
    /// The states in `threads`, marked with the number of this round.
    seen: Vec<u32>,
    round: u32,
    found: Option<Match>,
    is_over: bool,
}

impl Search {
    /// Whether the search is over and has found nothing, or has found what it finds.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Returns the match, if it is certain.
    pub fn found(&self) -> Option<&Match> {
        self.found.as_ref().filter(|_| self.is_over)
    }

    /// Whether nothing has begun that could become a match.
    pub fn is_idle(&self) -> bool {
        self.threads.is_empty() && self.found.is_none()
    }

    /// Returns the byte from which on the text may be part of a match. `at`: the end of the text.
    pub fn pending(&self, at: usize) -> usize {
        let begun = self.threads.first().map(|thread| thread.start);
        let found = self.found.map(|found| found.start);
        begun.into_iter().chain(found).min().unwrap_or(at)
    }

    /// Counts bytes from `len` bytes later on: text before what is [pending](Search::pending) has gone.
    pub fn shift(&mut self, len: usize) {
        let moved = |at: &mut usize| *at = at.saturating_sub(len);
        let slots_moved = |slots: &mut Slots| {
            let len = u32::try_from(len).unwrap_or(u32::MAX);
            let kept = slots.iter_mut().filter(|at| **at != NONE);
            kept.for_each(|at| *at = at.saturating_sub(len));
        };
        for thread in &mut self.threads {
            moved(&mut thread.start);
            slots_moved(&mut thread.slots);
        }
        if let Some(found) = &mut self.found {
            moved(&mut found.start);
            moved(&mut found.end);
            slots_moved(&mut found.slots);
        }
    }

    /// Takes the character that begins at the byte `at`, after `previous`. `None`: the budget is spent.
    pub fn advance(
        &mut self,
        pattern: &Pattern,
        previous: Option<char>,
        next: char,
        at: usize,
        budget: &mut u64,
    ) -> Option<()> {
        if self.is_over {
            return Some(());
        }
        let around = Around { previous, next: Some(next) };
        if pattern.has_looks {
            self.close_all(pattern, at, &around, budget)?;
        }
        let mut buffer = [0; 4];
        let bytes = next.encode_utf8(&mut buffer).as_bytes();
        let begins = bytes.first().is_some_and(|&byte| pattern.can_begin_with(byte));
        if begins && self.found.is_none() {
            let state = pattern.nfa.start_anchored();
            let thread = Thread { state, start: at, slots: [NONE; 2 * MAX_GROUPS] };
            self.close(pattern, thread, at, &around, budget)?;
        }
        for (index, &byte) in bytes.iter().enumerate() {
            let place = at + index + 1;
            let is_last = index + 1 == bytes.len();
            let mut threads = std::mem::replace(&mut self.threads, std::mem::take(&mut self.spare));
            self.begin_round(pattern)?;
            *budget = budget.checked_sub(threads.len() as u64)?;
            for thread in threads.drain(..) {
                let Some(state) = stepped(pattern.nfa.state(thread.state), byte) else { continue };
                let thread = Thread { state, ..thread };
                if is_last && pattern.has_looks {
                    self.threads.push(thread);
                } else if self.close(pattern, thread, place, &around, budget)? {
                    break;
                }
            }
            threads.clear();
            self.spare = threads;
        }
        self.is_over = self.found.is_some() && self.threads.is_empty();
        Some(())
    }

    /// Ends the text at the byte `at`.
    pub fn end(
        &mut self,
        pattern: &Pattern,
        previous: Option<char>,
        at: usize,
        budget: &mut u64,
    ) -> Option<()> {
        if pattern.has_looks && !self.is_over {
            self.close_all(pattern, at, &Around { previous, next: None }, budget)?;
        }
        self.threads.clear();
        self.is_over = true;
        Some(())
    }

    fn begin_round(&mut self, pattern: &Pattern) -> Option<()> {
        self.seen.resize(pattern.nfa.states().len(), 0);
        self.round = self.round.checked_add(1)?;
        Some(())
    }

    fn close_all(
        &mut self,
        pattern: &Pattern,
        at: usize,
        around: &Around,
        budget: &mut u64,
    ) -> Option<()> {
        let mut threads = std::mem::replace(&mut self.threads, std::mem::take(&mut self.spare));
        self.begin_round(pattern)?;
        for thread in threads.drain(..) {
            if self.close(pattern, thread, at, around, budget)? {
                break;
            }
        }
        threads.clear();
        self.spare = threads;
        Some(())
    }

    /// Goes on from a state to all that take a byte, in the order of preference. Returns whether
    /// there is a match, to which everything after is the worse choice.
    fn close(
        &mut self,
        pattern: &Pattern,
        thread: Thread,
        at: usize,
        around: &Around,
        budget: &mut u64,
    ) -> Option<bool> {
        if self.seen.is_empty() {
            self.begin_round(pattern)?;
        }
        let mut open = std::mem::take(&mut self.open);
        open.push(thread);
        let has_match = self.close_each(pattern, &mut open, at, around, budget);
        open.clear();
        self.open = open;
        has_match
    }

    fn close_each(
        &mut self,
        pattern: &Pattern,
        open: &mut Vec<Thread>,
        at: usize,
        around: &Around,
        budget: &mut u64,
    ) -> Option<bool> {
        while let Some(mut thread) = open.pop() {
            *budget = budget.checked_sub(1)?;
            let seen = self.seen.get_mut(thread.state.as_usize())?;
            if *seen == self.round {
                continue;
            }
            *seen = self.round;
            match pattern.nfa.state(thread.state) {
                State::ByteRange { .. } | State::Sparse(_) | State::Dense(_) => {
                    self.threads.push(thread);
                }
                State::Look { look, next } => {
                    if around.allows(*look) {
                        open.push(Thread { state: *next, ..thread });
                    }
                }
                State::Union { alternates } => {
                    let others = alternates.iter().rev();
                    open.extend(others.map(|&state| Thread { state, ..thread.clone() }));
                }
                State::BinaryUnion { alt1, alt2 } => {
                    open.push(Thread { state: *alt2, ..thread.clone() });
                    open.push(Thread { state: *alt1, ..thread });
                }
                State::Capture { next, group_index, slot, .. } => {
                    let number = group_index.as_usize();
                    let place = pattern.groups.iter().position(|(_, group)| *group == number);
                    if let Some(place) = place {
                        // Even slots are the beginnings of groups.
                        let kept = thread.slots.get_mut(2 * place + slot.as_usize() % 2)?;
                        *kept = u32::try_from(at).unwrap_or(NONE);
                    }
                    open.push(Thread { state: *next, ..thread });
                }
                State::Fail => {}
                State::Match { .. } if thread.start == at => {}
                State::Match { .. } => {
                    self.found = Some(Match { start: thread.start, end: at, slots: thread.slots });
                    return Some(true);
                }
            }
        }
        Some(false)
    }
}

/// The characters around a place of a text.
struct Around {
    previous: Option<char>,
    next: Option<char>,
}

impl Around {
    fn allows(&self, look: regex_automata::util::look::Look) -> bool {
        let before = self.previous.map_or(0, char::len_utf8);
        let both: String = self.previous.into_iter().chain(self.next).collect();
        LookMatcher::new().matches(look, both.as_bytes(), before)
    }
}

fn stepped(state: &State, byte: u8) -> Option<StateID> {
    match state {
        State::ByteRange { trans } => trans.matches_byte(byte).then_some(trans.next),
        State::Sparse(sparse) => sparse.matches_byte(byte),
        State::Dense(dense) => dense.matches_byte(byte),
        _ => None,
    }
}

/// Returns the bytes that the automaton can take first.
fn first_bytes(nfa: &NFA) -> [bool; 256] {
    let mut bytes = [false; 256];
    let mut seen = vec![false; nfa.states().len()];
    let mut open = vec![nfa.start_anchored()];
    while let Some(id) = open.pop() {
        match seen.get_mut(id.as_usize()) {
            Some(seen) if !*seen => *seen = true,
            _ => continue,
        }
        match nfa.state(id) {
            State::Look { next, .. } | State::Capture { next, .. } => open.push(*next),
            State::Union { alternates } => open.extend(alternates.iter().copied()),
            State::BinaryUnion { alt1, alt2 } => open.extend([*alt1, *alt2]),
            State::Fail | State::Match { .. } => {}
            state => {
                for (byte, can_begin) in (0..=u8::MAX).zip(bytes.iter_mut()) {
                    *can_begin |= stepped(state, byte).is_some();
                }
            }
        }
    }
    bytes
}

/// Puts `\z` in the place of Python's `\Z`, and plain brackets in that of `\<` and `\>`, which are
/// assertions to the crate.
fn without_python_escapes(pattern: &str) -> String {
    let mut found = String::with_capacity(pattern.len());
    let mut characters = pattern.chars();
    while let Some(character) = characters.next() {
        if character != '\\' {
            found.push(character);
            continue;
        }
        match characters.next() {
            Some('Z') => found.push_str("\\z"),
            Some(bracket @ ('<' | '>')) => found.push(bracket),
            Some(escaped) => found.extend(['\\', escaped]),
            None => found.push('\\'),
        }
    }
    found
}

/// Returns an expression that matches a text alone.
fn escaped(text: &str) -> String {
    let mut found = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_ascii_punctuation() && !matches!(character, '<' | '>') {
            found.push('\\');
        }
        found.push(character);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(pattern: &str, text: &str) -> Vec<(usize, usize)> {
        let pattern = Pattern::new(pattern).expect("supported");
        let (mut found, mut budget) = (Vec::new(), 1 << 20);
        let done = pattern.for_each_match(text, &mut budget, |it| {
            found.push((it.start, it.end));
            true
        });
        done.expect("within the budget");
        found
    }

    /// Returns the matches of fancy-regex, without empty ones.
    fn reference(pattern: &str, text: &str) -> Vec<(usize, usize)> {
        let regex = fancy_regex::Regex::new(&format!("(?s){pattern}")).expect("a regex");
        let found = regex.find_iter(text).map(|it| it.expect("no limit is met"));
        found.map(|it| (it.start(), it.end())).filter(|(start, end)| start < end).collect()
    }

    #[test]
    fn matches_are_those_of_a_backtracking_engine() {
        let text = "ab <x>é</x> aab\n</tool>  <tool_call>\nabab <x></x>é́ 日本 b";
        for pattern in [
            "a|ab",
            "ab|a",
            "a+?b",
            "a*b",
            "(?:ab)+",
            "<x>.*</x>",
            "<x>.*?</x>",
            r"\s*<tool_call>",
            r"\w+",
            r"\bab\b",
            r"^ab",
            r"b\z",
            r"日|é",
            "[^a-z]+",
            r"(?:a|ab)(?:c|bab)?",
            "x{2}",
            ".",
        ] {
            assert_eq!(all(pattern, text), reference(pattern, text), "{pattern}");
        }
        assert_eq!(all(r"b\Z", text), reference(r"b\z", text));
        assert_eq!(all(r"\<x\>", text), reference("<x>", text));
    }

    #[test]
    fn a_search_says_what_may_become_a_match() {
        let pattern = Pattern::any_of(&["</a>", "</a>b"]).expect("supported");
        let mut search = Search::default();
        let mut budget = 1 << 20;
        let mut pending = Vec::new();
        for (at, next) in "x<</a>c".char_indices() {
            search.advance(&pattern, None, next, at, &mut budget).expect("within the budget");
            pending.push((search.pending(at + 1), search.is_over()));
        }
        let expected =
            [(1, false), (1, false), (2, false), (2, false), (2, false), (2, false), (2, true)];
        assert_eq!(pending, expected);
        assert_eq!(search.found().map(|it| (it.start, it.end)), Some((2, 6)));
    }

    #[test]
    fn groups_are_told_by_name() {
        let pattern = Pattern::new(r"<(?P<a>\w+)(=(?P<b>\w+))?>").expect("supported");
        let mut found = Vec::new();
        let text = "<x=1><yy>";
        let done = pattern.for_each_match(text, &mut 10_000, |it| {
            found.extend(it.groups(&pattern).map(|(name, at)| (name.to_owned(), &text[at])));
            true
        });
        assert!(done.is_some());
        let expected = [("a", "x"), ("b", "1"), ("a", "yy")];
        assert_eq!(found, expected.map(|(name, text)| (name.to_owned(), text)));
    }

    #[test]
    fn what_takes_long_is_refused_or_ends() {
        for pattern in ["(?=a)", r"(a)\1", "a{100}{100}{100}", &"(".repeat(5000), "(?P<a>"] {
            assert!(Pattern::new(pattern).is_err(), "{pattern}");
        }
        let pattern = Pattern::new("(?:a?){200}a{200}").expect("supported");
        let text = "a".repeat(100_000);
        let mut budget = 1_000_000;
        assert_eq!(pattern.for_each_match(&text, &mut budget, |_| true), None);
    }
}
