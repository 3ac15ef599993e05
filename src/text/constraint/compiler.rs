//! From constraints to matchers, within limits of time and memory.

use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};
use serde_json::json;

use super::embedded::with_rewritten_schemas;
use super::kept::{Home, KeptParsers, Key};
use super::limits::{
    check_alternatives, check_depth, check_repetitions, num_alternatives, num_repetitions,
};
use super::matcher::GrammarMatcher;
use super::numbers;
use super::rewritten::rewritten;
use super::schema;
use super::sentence::{sentence, Told};
use super::vocabulary::vocabulary;
use super::Constraint;
use crate::error::{check_room, Context, Error, ErrorKind, Result};
use crate::text::{guarded, Tokenizer};
use crate::threads;

/// The longest constraint, in bytes; of choices all of them together.
pub const MAX_CONSTRAINT_BYTES: usize = 2 << 20;
/// The most choices.
pub const MAX_CHOICES: usize = 4096;

/// Work and sizes beyond which a constraint is refused, or a matcher ends with an error. The crate
/// itself allows some more by default; these keep compiling within two seconds and 256 MiB.
const INITIAL_FUEL: u64 = 1_000_000;
const STEP_FUEL: u64 = 200_000;
const STEP_ITEMS: usize = 50_000;
const MAX_LEXER_STATES: usize = 50_000;
const MAX_GRAMMAR_SIZE: usize = 300_000;

/// Bytes that compiling takes at most, and those beside for each byte of the constraint.
const ROOM: usize = 64 << 20;
const ROOM_PER_BYTE: usize = 64;

/// The stack on which constraints are compiled: the crate calls itself for everything that is nested.
const STACK_BYTES: usize = 16 << 20;

/// Lengths in characters of tokens that stand in JSON strings as they are: those up to each length
/// are a set that is allowed as one where a string has room for them, beside the crate's own sets
/// of up to ten and thirty. The masks of strings with maxLength take a quarter less for 15 and 20
/// on average, as they did for 5. More sets would gain little: each takes 8 MB with the tokens of
/// Qwen3.
const TEXT_LENGTHS: [usize; 3] = [5, 15, 20];

/// The name of a constraint in a grammar of what comes before it ([`GrammarCompiler::compile_within`]).
pub const ANSWER: &str = "@xserv-answer";

/// Compiles constraints for one vocabulary. Calls take `&self` and may come from several threads.
pub struct GrammarCompiler {
    factory: ParserFactory,
    vocab_size: usize,
    kept: Arc<KeptParsers>,
}

impl GrammarCompiler {
    /// Returns a compiler for the tokens of a model with `vocab_size` rows of logits. Takes less
    /// than a second for the tokens of Qwen3.
    pub fn new(tokenizer: &Tokenizer, vocab_size: usize) -> Result<Self> {
        guarded(ErrorKind::Unsupported, "constraints cannot be used with this tokenizer", || {
            let env = vocabulary(tokenizer, vocab_size)?;
            let mut slices = SlicedBiasComputer::general_slices();
            let up_to = |length| format!(r#"[^"\\\x00-\x1F\x7F]{{1,{length}}}"#);
            slices.extend(TEXT_LENGTHS.map(up_to));
            let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
                .map_err(|error| Error::unsupported(sentence(&error.to_string())))?;
            factory.quiet();
            let limits = factory.limits_mut();
            limits.initial_lexer_fuel = INITIAL_FUEL;
            limits.step_lexer_fuel = STEP_FUEL;
            limits.step_max_items = STEP_ITEMS;
            limits.max_lexer_states = MAX_LEXER_STATES;
            limits.max_grammar_size = MAX_GRAMMAR_SIZE;
            limits.precompute_large_lexemes = true;
            limits.verbose_errors = false;
            Ok(GrammarCompiler { factory, vocab_size, kept: Arc::default() })
        })
    }

    /// Compiles a constraint. It takes milliseconds as a rule and at most two seconds, less if it is one of
    /// the last that were compiled; what the crate does not implement is refused with a sentence that says
    /// where it is.
    pub fn compile(&self, constraint: &Constraint<'_>) -> Result<GrammarMatcher> {
        self.compile_within(constraint, None)
    }

    /// Compiles a constraint of a part of a text. `around`: the grammar of the whole, in Lark's
    /// EBNF, in which [`ANSWER`] stands for the part. It is the library's own and not checked.
    pub fn compile_within(
        &self,
        constraint: &Constraint<'_>,
        around: Option<&str>,
    ) -> Result<GrammarMatcher> {
        let len = checked_len(constraint)?;
        let key = Key::of(constraint, around);
        if let Some((start, home)) = key.as_ref().and_then(|key| self.kept.get(key)) {
            return Ok(GrammarMatcher::new(start, self.vocab_size, Some(home)));
        }
        check_room(ROOM.saturating_add(len.saturating_mul(ROOM_PER_BYTE)), "a constraint")?;
        threads::run_apart("xserv-grammar", STACK_BYTES, || {
            let name = constraint.name();
            let compiled = || self.compile_here(constraint, around, key);
            guarded(ErrorKind::Unsupported, name, compiled).context(|| name)
        })
    }

    fn compile_here(
        &self,
        constraint: &Constraint<'_>,
        around: Option<&str>,
        key: Option<Key>,
    ) -> Result<GrammarMatcher> {
        let mut given = None;
        let mut grammar = match constraint {
            Constraint::JsonSchema(text) => {
                let schema = given.insert(schema::parse(text)?);
                schema::check_patterns(schema)?;
                numbers::check(text)?;
                TopLevelGrammar::from_json_schema(rewritten(schema)?)
            }
            Constraint::JsonObject => {
                TopLevelGrammar::from_json_schema(json!({ "type": "object" }))
            }
            Constraint::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Constraint::Grammar(grammar) => {
                TopLevelGrammar::from_lark(with_rewritten_schemas(grammar)?)
            }
            Constraint::Choice(choices) => TopLevelGrammar::from_regex(&any_of(choices)),
        };
        if let Some(around) = around {
            for part in &mut grammar.grammars {
                part.name = Some(ANSWER.trim_start_matches('@').to_owned());
            }
            let whole = TopLevelGrammar::from_lark(around.to_owned());
            grammar.grammars.splice(..0, whole.grammars);
        }
        let refused = |message: &str| {
            let told = Told::of(message);
            Error::invalid_argument(match (&given, constraint) {
                (Some(schema), _) => schema::located(schema, message, &told),
                // The grammar around it is the library's own.
                (None, Constraint::Regex(_) | Constraint::Choice(_)) => told.what,
                (None, _) => told.in_grammar(),
            })
        };
        let start = self.factory.create_parser(grammar);
        let mut start = start.map_err(|error| refused(&error.to_string()))?;
        start.start_without_prompt();
        // Whether anything fits is known with the first mask only. The copy shares the automaton.
        let first = Matcher::new(Ok(start.clone())).compute_mask();
        first.map_err(|error| refused(&error.to_string()))?;
        let home = key.map(|key| {
            let key = Arc::new(key);
            self.kept.keep(key.clone(), start.deep_clone());
            Home::new(&self.kept, key, &start)
        });
        Ok(GrammarMatcher::new(start, self.vocab_size, home))
    }
}

/// Returns the length of a constraint, which is checked against the limits.
fn checked_len(constraint: &Constraint<'_>) -> Result<usize> {
    let name = constraint.name();
    let len = match constraint {
        Constraint::JsonObject => 0,
        Constraint::JsonSchema(text) | Constraint::Regex(text) | Constraint::Grammar(text) => {
            if text.trim().is_empty() {
                return Err(Error::invalid_argument(format!("{name} is empty")));
            }
            text.len()
        }
        Constraint::Choice(choices) => {
            if choices.is_empty() {
                return Err(Error::invalid_argument("there are no choices"));
            }
            if choices.len() > MAX_CHOICES {
                return Err(Error::invalid_argument(format!(
                    "there are {} choices, but at most {MAX_CHOICES} are allowed",
                    choices.len()
                )));
            }
            if let Some(place) = choices.iter().position(|choice| choice.is_empty()) {
                return Err(Error::invalid_argument(format!("choice {place} is empty")));
            }
            choices.iter().map(|choice| choice.len()).sum()
        }
    };
    if len > MAX_CONSTRAINT_BYTES {
        return Err(Error::invalid_argument(format!(
            "{name}: {len} bytes, but at most {MAX_CONSTRAINT_BYTES} are allowed"
        )));
    }
    match constraint {
        Constraint::Regex(text) => {
            check_depth(name, text)?;
            check_repetitions(name, num_repetitions(text))?;
            check_alternatives(name, num_alternatives(text))?;
        }
        Constraint::Grammar(text) => {
            check_depth(name, text)?;
            check_repetitions(name, num_repetitions(text))?;
            check_alternatives(name, num_alternatives(text))?;
            schema::check_grammar(text)?;
        }
        Constraint::JsonSchema(_) | Constraint::JsonObject | Constraint::Choice(_) => {}
    }
    Ok(len)
}

/// Returns the regular expression that matches each of these texts, and nothing else.
fn any_of(choices: &[&str]) -> String {
    let mut regex = String::from("(?:");
    for (place, choice) in choices.iter().enumerate() {
        if place > 0 {
            regex.push('|');
        }
        for character in choice.chars() {
            if r"\.+*?()|[]{}^$#&-~".contains(character) {
                regex.push('\\');
            }
            regex.push(character);
        }
    }
    regex.push(')');
    regex
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_escaped() {
        assert_eq!(any_of(&["a.b", "(c|d)", "é\n"]), "(?:a\\.b|\\(c\\|d\\)|é\n)");
    }
}
