//! Takes answers apart by the rules of a response template.
//!
//! The text is looked at character by character: within a field for its closing mark, elsewhere for
//! all opening ones, and the first that is certain ends what was there before. What may become a
//! mark is held back. Text of thoughts and content is told as it comes; calls, and fields with
//! another kind of content, are told when they have ended.

use serde_json::Value;

use super::event::{append, AnswerPart};
use super::pattern::{Match, Pattern, Search};
use super::region_value::is_space;
use super::response_template::{Field, ResponseTemplate, Role};
use super::rules::{AnswerRules, TemplateRules};

/// The steps that an answer may take in any case, and for each of its bytes. The templates of published
/// models take a few for each. After them the rest is text of the field that it is in.
const STEPS: u64 = 4_000_000;
const STEPS_PER_BYTE: u64 = 16;

#[derive(Clone, Debug)]
struct Watched {
    field: usize,
    is_open: bool,
    search: Search,
}

/// The field in which the text is.
#[derive(Clone, Debug, Default)]
struct Region {
    /// `None`: in none.
    field: Option<usize>,
    /// Whether it has begun.
    is_begun: bool,
    groups: Vec<(String, String)>,
    /// The opening mark.
    mark: String,
    /// The text, where it is not told as it comes.
    body: String,
    /// White space that is left out if the field ends.
    blanks: String,
    has_text: bool,
}

/// Takes the text of an answer in pieces, and reports its parts.
#[derive(Clone, Debug)]
pub(super) struct TemplatedParser {
    rules: AnswerRules,
    template: std::sync::Arc<ResponseTemplate>,
    reads_calls: bool,
    /// The text that is not told yet, of which the first `at` bytes have been looked at.
    text: String,
    at: usize,
    /// The bytes before `text`, and those that have been looked at once: marks are looked for again
    /// after each.
    told: usize,
    seen: usize,
    /// The first bytes of `text` that are the prompt's.
    of_prompt: usize,
    /// The character before `at`.
    previous: Option<char>,
    watched: Vec<Watched>,
    region: Region,
    steps: u64,
    /// Whether the steps are spent.
    is_spent: bool,
    has_content: bool,
    has_reasoning: bool,
    num_calls: usize,
}

impl TemplatedParser {
    /// Returns a parser at the beginning of an answer.
    pub fn new(rules: AnswerRules, template: TemplateRules) -> Self {
        let TemplateRules { template, begun, reads_calls } = template;
        let mut parser = TemplatedParser {
            rules,
            template,
            reads_calls,
            text: String::new(),
            at: 0,
            told: 0,
            seen: 0,
            of_prompt: 0,
            previous: None,
            watched: Vec::new(),
            region: Region::default(),
            steps: STEPS,
            is_spent: false,
            has_content: false,
            has_reasoning: false,
            num_calls: 0,
        };
        parser.leave();
        // The part of the answer that is in the prompt is not reported again.
        parser.push(&begun, &mut Vec::new());
        parser.region.blanks.clear();
        parser.of_prompt = parser.text.len();
        (parser.has_content, parser.has_reasoning, parser.num_calls) = (false, false, 0);
        parser
    }

    /// Returns the rules that it follows.
    pub fn rules(&self) -> &AnswerRules {
        &self.rules
    }

    /// Takes the next piece of text, and appends what became certain with it.
    pub fn push(&mut self, piece: &str, parts: &mut Vec<AnswerPart>) {
        self.text.push_str(piece);
        self.advance(false, parts);
    }

    /// Ends the answer: what could have become a mark is text. The parser takes no more.
    pub fn finish(&mut self, parts: &mut Vec<AnswerPart>) {
        self.advance(true, parts);
        self.close(None, parts);
    }

    fn advance(&mut self, is_whole: bool, parts: &mut Vec<AnswerPart>) {
        let mut is_ended = false;
        while !self.is_spent {
            self.skip_idle();
            let next = self.text.get(self.at..).and_then(|rest| rest.chars().next());
            let looked = match next {
                Some(next) => self.look(next),
                None if is_whole && !is_ended => {
                    is_ended = true;
                    self.end_searches()
                }
                None => break,
            };
            self.is_spent = looked.is_none();
            if let Some((field, is_open, found)) = self.decided() {
                self.take(field, is_open, &found, parts);
                is_ended = false;
            }
        }
        let told = match is_whole || self.is_spent {
            true => self.text.len(),
            false => self.pending(),
        };
        self.tell_beginning(told, parts);
    }

    /// Goes on to the next byte with which a mark can begin, if none has begun.
    fn skip_idle(&mut self) {
        if !self.watched.iter().all(|it| it.search.is_idle() && !it.search.is_over()) {
            return;
        }
        let fields = &self.template.fields;
        let patterns: Vec<&Pattern> =
            self.watched.iter().filter_map(|it| pattern_of(fields, it)).collect();
        let rest = self.text.as_bytes().get(self.at..).unwrap_or_default();
        let begins = |byte: &u8| patterns.iter().any(|pattern| pattern.can_begin_with(*byte));
        // Marks are text, so they begin where a character does.
        let skipped = rest.iter().position(begins).unwrap_or(rest.len());
        let passed = self.text.get(self.at..self.at + skipped).unwrap_or_default();
        self.previous = passed.chars().next_back().or(self.previous);
        self.at += skipped;
        self.note_seen();
    }

    /// Adds the steps of bytes that were not looked at before, so that these do not depend on how the text
    /// is cut.
    fn note_seen(&mut self) {
        let seen = self.told + self.at;
        let new = seen.saturating_sub(self.seen) as u64;
        self.steps = self.steps.saturating_add(STEPS_PER_BYTE * new);
        self.seen = self.seen.max(seen);
    }

    /// Looks at the next character. `None`: the steps are spent.
    fn look(&mut self, next: char) -> Option<()> {
        for it in &mut self.watched {
            let Some(pattern) = pattern_of(&self.template.fields, it) else { continue };
            it.search.advance(pattern, self.previous, next, self.at, &mut self.steps)?;
        }
        self.previous = Some(next);
        self.at += next.len_utf8();
        self.note_seen();
        Some(())
    }

    fn end_searches(&mut self) -> Option<()> {
        for it in &mut self.watched {
            let Some(pattern) = pattern_of(&self.template.fields, it) else { continue };
            it.search.end(pattern, self.previous, self.at, &mut self.steps)?;
        }
        Some(())
    }

    /// Returns the byte from which on the text may be part of a mark.
    fn pending(&self) -> usize {
        let begun = self.watched.iter().map(|it| match it.search.found() {
            Some(found) => found.start,
            None => it.search.pending(self.at),
        });
        begun.min().unwrap_or(self.at)
    }

    /// Returns the first mark, if it is certain that nothing else comes before it; the longest of
    /// several.
    fn decided(&self) -> Option<(usize, bool, Match)> {
        let found = self.watched.iter().filter_map(|it| {
            let found = *it.search.found()?;
            let name = self.template.fields.get(it.field).map(|field| field.name.as_str());
            let longest_first = usize::MAX - (found.end - found.start);
            Some(((found.start, longest_first, !it.is_open, name), it.field, it.is_open, found))
        });
        let (_, field, is_open, found) = found.min_by_key(|(order, ..)| *order)?;
        let open = self.watched.iter().filter(|it| !it.search.is_over());
        let is_first = open.map(|it| it.search.pending(self.at)).all(|at| found.start < at);
        is_first.then_some((field, is_open, found))
    }

    /// Takes a mark: the text before it belongs to the field that was there.
    fn take(&mut self, field: usize, is_open: bool, found: &Match, parts: &mut Vec<AnswerPart>) {
        let template = self.template.clone();
        let Some(rules) = template.fields.get(field) else { return };
        let pattern = if is_open { &rules.open } else { &rules.close };
        let mark = self.text.get(found.start..found.end).unwrap_or_default().to_owned();
        let groups: Vec<(String, String)> = pattern
            .iter()
            .flat_map(|pattern| found.groups(pattern))
            .map(|(name, at)| (name.to_owned(), self.text.get(at).unwrap_or_default().to_owned()))
            .collect();
        self.tell_beginning(found.start, parts);
        self.text.drain(..mark.len().min(self.text.len()));
        self.told += mark.len();
        self.of_prompt = self.of_prompt.saturating_sub(mark.len());
        self.at = 0;
        self.previous = mark.chars().next_back();
        if is_open {
            self.close(None, parts);
            self.region =
                Region { field: Some(field), is_begun: true, groups, mark, ..Region::default() };
            self.watch();
        } else {
            self.region.groups.extend(groups);
            self.close(Some(&mark), parts);
            self.leave();
        }
    }

    /// Goes to where no field is open.
    fn leave(&mut self) {
        let field = self.template.fields.iter().position(|field| field.open.is_none());
        self.region = Region { field, ..Region::default() };
        self.watch();
    }

    /// Begins to look for the marks that may come next.
    fn watch(&mut self) {
        let fields = &self.template.fields;
        let closing = self
            .region
            .field
            .filter(|&field| fields.get(field).is_some_and(|field| field.close.is_some()));
        let is_inside =
            self.region.field.and_then(|field| fields.get(field)?.open.as_ref()).is_some();
        let opening = fields.iter().enumerate().filter(|(_, field)| {
            !is_inside && field.open.is_some() && (self.reads_calls || field.role != Role::Calls)
        });
        let opening = opening.map(|(field, _)| (field, true));
        let marks = opening.chain(closing.map(|field| (field, false)));
        let watched =
            marks.map(|(field, is_open)| Watched { field, is_open, search: Search::default() });
        self.watched = watched.collect();
    }

    fn field(&self) -> Option<&Field> {
        self.region.field.and_then(|field| self.template.fields.get(field))
    }

    /// Gives the text up to a byte to the field in which it is.
    fn tell_beginning(&mut self, end: usize, parts: &mut Vec<AnswerPart>) {
        let text: String = self.text.drain(..end.min(self.text.len())).collect();
        self.at = self.at.saturating_sub(text.len());
        self.told += text.len();
        let of_prompt = self.of_prompt.min(text.len());
        self.of_prompt -= of_prompt;
        for it in &mut self.watched {
            it.search.shift(text.len());
        }
        if text.is_empty() {
            return;
        }
        let Some(field) = self.field() else { return };
        let streams = field.content.as_text().filter(|_| field.transform.is_none());
        let (role, strips, join) = match (field.role, streams) {
            (Role::Calls, _) if !self.reads_calls => (Role::Content, true, String::new()),
            (role @ (Role::Content | Role::Reasoning), Some(strips)) => {
                (role, strips, field.join.clone())
            }
            _ => {
                self.region.is_begun = true;
                self.region.body.push_str(&text);
                return;
            }
        };
        self.region.is_begun = true;
        let text = text.get(of_prompt..).unwrap_or_default();
        let text = match strips && !self.region.has_text {
            true => text.trim_start_matches(is_space),
            false => text,
        };
        let body = if strips { text.trim_end_matches(is_space) } else { text };
        if !body.is_empty() {
            let blanks = std::mem::take(&mut self.region.blanks);
            let between = if self.region.has_text { "" } else { join.as_str() };
            self.say(role, between, &format!("{blanks}{body}"), parts);
            self.region.has_text = true;
        }
        self.region.blanks.push_str(text.get(body.len()..).unwrap_or_default());
    }

    /// Reports text of thoughts or content, after `between` if there was some before.
    fn say(&mut self, role: Role, between: &str, text: &str, parts: &mut Vec<AnswerPart>) {
        if text.is_empty() {
            return;
        }
        let had = match role {
            Role::Reasoning => std::mem::replace(&mut self.has_reasoning, true),
            _ => std::mem::replace(&mut self.has_content, true),
        };
        let text = format!("{}{text}", if had { between } else { "" });
        append(
            parts,
            match role {
                Role::Reasoning => AnswerPart::Reasoning(text),
                _ => AnswerPart::Content(text),
            },
        );
    }

    /// Ends the field. `mark`: with this text; `None`: without.
    fn close(&mut self, mark: Option<&str>, parts: &mut Vec<AnswerPart>) {
        let template = self.template.clone();
        let region = std::mem::take(&mut self.region);
        let Some(field) = region.field.and_then(|field| template.fields.get(field)) else { return };
        let is_plain = field.content.as_text().is_some() && field.transform.is_none();
        let is_told = match field.role {
            Role::Other => true,
            Role::Calls => !self.reads_calls,
            Role::Content | Role::Reasoning => is_plain,
        };
        if is_told || !region.is_begun {
            return;
        }
        let value = field.content.value(&region.body, &mut self.steps);
        let value = match &field.transform {
            Some(transform) => value.and_then(|value| transform.apply(value, &region.groups)),
            None => value,
        };
        if field.role != Role::Calls {
            let text = match value {
                Some(Value::String(text)) => text,
                Some(Value::Null) => String::new(),
                Some(value) => value.to_string(),
                None => region.body,
            };
            return self.say(field.role, &field.join, &text, parts);
        }
        let is_cut = mark.is_none() && field.close.is_some() && !field.content.says_its_end();
        match value.and_then(calls_of) {
            Some(calls) => {
                for (name, arguments) in calls {
                    self.call(name, arguments, !is_cut, parts);
                }
            }
            None => {
                // The name of a call that has been cut may be known from its opening mark.
                let name = region.groups.iter().find(|(name, _)| name == "name");
                match name.filter(|_| mark.is_none()) {
                    Some((_, name)) => {
                        let arguments = Value::from(region.body);
                        self.call(name.clone(), arguments, false, parts);
                    }
                    None => {
                        let end = mark.unwrap_or_default();
                        let text = format!("{}{}{end}", region.mark, region.body);
                        self.say(Role::Content, "", text.trim_matches(is_space), parts);
                    }
                }
            }
        }
    }

    fn call(
        &mut self,
        name: String,
        arguments: Value,
        is_complete: bool,
        parts: &mut Vec<AnswerPart>,
    ) {
        let index = self.num_calls;
        self.num_calls += 1;
        let arguments = match arguments {
            Value::String(text) => text,
            mut arguments => {
                self.rules.types.convert(&name, &mut arguments);
                arguments.to_string()
            }
        };
        parts.push(AnswerPart::CallBegin { index, id: self.rules.id_of(index), name });
        if !arguments.is_empty() {
            parts.push(AnswerPart::Arguments { index, piece: arguments });
        }
        parts.push(AnswerPart::CallEnd { index, is_complete });
    }
}

fn pattern_of<'a>(fields: &'a [Field], watched: &Watched) -> Option<&'a Pattern> {
    let field = fields.get(watched.field)?;
    if watched.is_open {
        field.open.as_ref()
    } else {
        field.close.as_ref()
    }
}

/// Returns the names and arguments of calls in the shape of hosted services, one or a list of them.
fn calls_of(value: Value) -> Option<Vec<(String, Value)>> {
    let calls = match value {
        Value::Array(calls) => calls,
        call => vec![call],
    };
    let call_of = |mut call: Value| {
        let mut function = call.get_mut("function").map(Value::take)?;
        let name = function.get("name")?.as_str().filter(|name| !name.is_empty())?.to_owned();
        let arguments = function.get_mut("arguments").map(Value::take);
        Some((name, arguments.unwrap_or_else(|| Value::Object(Default::default()))))
    };
    calls.into_iter().map(call_of).collect()
}
