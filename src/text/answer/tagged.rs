//! Takes answers apart in which tags that are known say what is what.

use super::call_object::{CallObject, News, Outcome};
use super::event::{append, AnswerPart};
use super::json::{is_blank, push_control, Scanner, Step};
use super::rules::{AnswerRules, AnswerStart, ToolForm};
use super::tag::{
    begins, find, Found, ARGUMENTS_MARK, CALL, CODE_MARK, END_OF_CALL, FUNCTION, ID_MARK, MARK,
    THINK_TAGS,
};
use super::xml::{key_of, Progress, XmlCall};

/// The longest name of a tool, in bytes, where nothing else ends it.
const MAX_NAME_BYTES: usize = 256;
/// The longest id that a model writes before arguments, with its tags.
const MAX_ID_BYTES: usize = 128;
/// White space between two tags, in bytes, beyond which they do not belong together.
const MAX_BLANKS: usize = 64;

/// What follows a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    /// A closing tag.
    Tag,
    /// The rest of a list.
    List,
    /// Another call without tags, perhaps after a semicolon.
    Bare,
}

#[derive(Clone, Debug)]
enum State {
    /// Before the first text; whether the prompt has opened a thought.
    Start(bool),
    Thought,
    Content,
    /// After the opening tag of a call.
    Opened,
    /// In the name of a function.
    FunctionName,
    Function(Box<XmlCall>),
    Object(Box<CallObject>, After),
    /// In an object that is no call: how many braces are open, and whether this is in a string,
    /// after a backslash.
    Passing {
        open: usize,
        in_string: bool,
        escaped: bool,
    },
    /// In what is left of a call that is damaged.
    Skipping,
    Ended(After),
    /// After the mark before calls.
    Marked,
    List,
    MarkedName,
    MarkedArguments(Box<Scanner>),
}

/// Takes the text of an answer in pieces, and tells its parts.
#[derive(Clone, Debug)]
pub(super) struct TaggedParser {
    rules: AnswerRules,
    state: State,
    /// Text that was not understood yet.
    held: String,
    /// White space that is left out if a tag follows.
    blanks: String,
    /// Whether white space is left out until there is text.
    trims: bool,
    /// What was taken of a call that has not begun, and is content if it never does.
    aside: String,
    /// Whether a closing tag is to come for a thought that has ended without.
    is_unclosed: bool,
    num_calls: usize,
}

impl TaggedParser {
    /// A parser at the beginning of an answer.
    pub fn new(rules: AnswerRules) -> Self {
        let state = match rules.start {
            AnswerStart::Open => State::Start(false),
            AnswerStart::InThought => State::Start(true),
            AnswerStart::AfterThought => State::Content,
        };
        let trims = rules.start != AnswerStart::Open;
        TaggedParser {
            rules,
            state,
            held: String::new(),
            blanks: String::new(),
            trims,
            aside: String::new(),
            is_unclosed: false,
            num_calls: 0,
        }
    }

    /// The rules that it follows.
    pub fn rules(&self) -> &AnswerRules {
        &self.rules
    }

    /// Takes the next piece of text, and appends what became certain with it.
    pub fn push(&mut self, piece: &str, parts: &mut Vec<AnswerPart>) {
        self.advance(piece, false, parts);
    }

    /// Ends the answer: what could have become a tag is text. The parser takes no more.
    pub fn finish(&mut self, parts: &mut Vec<AnswerPart>) {
        self.advance("", true, parts);
        match std::mem::replace(&mut self.state, State::Content) {
            State::Object(object, _) if !object.has_begun() => self.aside += &object.into_text(),
            State::Object(..) | State::MarkedArguments(_) => self.end_call(false, parts),
            State::Thought => self.blanks.clear(),
            _ => {}
        }
        let aside = std::mem::take(&mut self.aside);
        self.content(&aside, parts);
        let blanks = std::mem::take(&mut self.blanks);
        if !blanks.is_empty() {
            append(parts, AnswerPart::Content(blanks));
        }
    }

    fn advance(&mut self, piece: &str, is_whole: bool, parts: &mut Vec<AnswerPart>) {
        let mut held = std::mem::take(&mut self.held);
        held.push_str(piece);
        let mut at = 0;
        loop {
            let (taken, goes_on) = self.step(held.get(at..).unwrap_or_default(), is_whole, parts);
            at += taken;
            if !goes_on {
                break;
            }
        }
        held.drain(..at.min(held.len()));
        self.held = held;
    }

    /// Takes the beginning of `text`: returns how many bytes of it, and whether there is more to be
    /// done before more text comes.
    fn step(&mut self, text: &str, is_whole: bool, parts: &mut Vec<AnswerPart>) -> (usize, bool) {
        match std::mem::replace(&mut self.state, State::Content) {
            State::Start(is_open) => self.start(text, is_open, is_whole),
            State::Thought => self.thought(text, is_whole, parts),
            State::Content => self.take_content(text, is_whole, parts),
            State::Opened => self.opened(text, is_whole, parts),
            State::FunctionName => self.function_name(text, is_whole, parts),
            State::Function(call) => self.function(call, text, is_whole, parts),
            State::Object(object, after) => self.object(object, after, text, parts),
            State::Passing { open, in_string, escaped } => {
                self.pass(text, (open, in_string, escaped), parts)
            }
            State::Skipping => self.skip(text, is_whole),
            State::Ended(after) => self.ended(after, text, is_whole),
            State::Marked => self.marked(text, parts),
            State::List => self.list(text, parts),
            State::MarkedName => self.marked_name(text, is_whole, parts),
            State::MarkedArguments(scanner) => self.marked_arguments(scanner, text, parts),
        }
    }

    /// Tells text of the answer or, if `is_thought`, of a thought.
    fn text(&mut self, text: &str, is_thought: bool, parts: &mut Vec<AnswerPart>) {
        let text = if self.trims { text.trim_start_matches(is_blank) } else { text };
        let body = text.trim_end_matches(is_blank);
        if !body.is_empty() {
            self.trims = false;
            self.blanks.push_str(body);
            let told = std::mem::take(&mut self.blanks);
            append(
                parts,
                if is_thought { AnswerPart::Reasoning(told) } else { AnswerPart::Content(told) },
            );
        }
        self.blanks.push_str(text.get(body.len()..).unwrap_or_default());
    }

    fn content(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        self.text(text, false, parts);
    }

    /// Makes content of what was taken for the beginning of a call.
    fn give_back(&mut self, parts: &mut Vec<AnswerPart>) {
        let aside = std::mem::take(&mut self.aside);
        self.content(&aside, parts);
        self.state = State::Content;
    }

    /// Leaves out the white space around a tag.
    fn trim(&mut self) {
        self.blanks.clear();
        self.trims = true;
    }

    fn begin_call(&mut self, name: String, parts: &mut Vec<AnswerPart>) {
        self.trim();
        self.aside.clear();
        let (index, id) = (self.num_calls, self.rules.id_of(self.num_calls));
        self.num_calls += 1;
        parts.push(AnswerPart::CallBegin { index, id, name });
    }

    fn arguments(&self, piece: String, parts: &mut Vec<AnswerPart>) {
        if !piece.is_empty() {
            let index = self.num_calls.saturating_sub(1);
            append(parts, AnswerPart::Arguments { index, piece });
        }
    }

    fn end_call(&self, is_complete: bool, parts: &mut Vec<AnswerPart>) {
        let index = self.num_calls.saturating_sub(1);
        parts.push(AnswerPart::CallEnd { index, is_complete });
    }

    fn start(&mut self, text: &str, is_open: bool, is_whole: bool) -> (usize, bool) {
        let rest = text.trim_start_matches(is_blank);
        let skipped = text.len() - rest.len();
        self.blanks.push_str(text.get(..skipped).unwrap_or_default());
        self.state = State::Start(is_open);
        if rest.is_empty() && !is_whole {
            return (skipped, false);
        }
        for (tag, _) in THINK_TAGS {
            match begins(rest, tag, is_whole) {
                Some(true) => {
                    self.state = State::Thought;
                    self.trim();
                    return (skipped + tag.len(), true);
                }
                Some(false) => {}
                None => return (skipped, false),
            }
        }
        self.state = if is_open { State::Thought } else { State::Content };
        (skipped, true)
    }

    fn thought(
        &mut self,
        text: &str,
        is_whole: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        let [(_, close), (_, other_close)] = THINK_TAGS;
        let tags = match self.rules.form {
            ToolForm::XmlTags => &[close, other_close, CALL] as &[&str],
            _ => &[close, other_close],
        };
        self.state = State::Thought;
        let (at, number) = match find(text, tags, is_whole) {
            Found::At(at, number) => (at, number),
            Found::Maybe(at) => {
                self.text(text.get(..at).unwrap_or_default(), true, parts);
                return (at, false);
            }
            Found::Nowhere => {
                self.text(text, true, parts);
                return (text.len(), false);
            }
        };
        let (before, rest) = text.split_at(at);
        let tag = tags.get(number).map_or(0, |tag| tag.len());
        if number < THINK_TAGS.len() {
            self.text(before, true, parts);
            self.trim();
            self.state = State::Content;
            return (at + tag, true);
        }
        // Some models call a tool while they think, and do not say that the thought is over. A thought
        // about such tags goes on.
        let after = rest.get(tag..).unwrap_or_default();
        let call = after.trim_start_matches(is_blank);
        let is_near = after.len() - call.len() <= MAX_BLANKS;
        match begins(call, FUNCTION, is_whole).filter(|_| is_near).or((!is_near).then_some(false)) {
            Some(true) => {
                self.text(before, true, parts);
                self.trim();
                self.is_unclosed = true;
                self.state = State::Content;
                (at, true)
            }
            Some(false) => {
                self.text(text.get(..at + tag).unwrap_or_default(), true, parts);
                (at + tag, true)
            }
            None => {
                self.text(before, true, parts);
                (at, false)
            }
        }
    }

    fn take_content(
        &mut self,
        text: &str,
        is_whole: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        let close = THINK_TAGS[0].1;
        let mut tags = match self.rules.form {
            ToolForm::None => Vec::new(),
            ToolForm::JsonTags => vec![CALL],
            ToolForm::XmlTags => vec![CALL, FUNCTION],
            ToolForm::MarkedJson => vec![MARK],
            ToolForm::BareJson => vec![CODE_MARK, "{"],
        };
        if self.is_unclosed {
            tags.push(close);
        }
        let (at, tag) = match find(text, &tags, is_whole) {
            Found::At(at, number) => (at, tags.get(number).copied().unwrap_or_default()),
            Found::Maybe(at) => {
                self.content(text.get(..at).unwrap_or_default(), parts);
                return (at, false);
            }
            Found::Nowhere => {
                self.content(text, parts);
                return (text.len(), false);
            }
        };
        self.content(text.get(..at).unwrap_or_default(), parts);
        match tag {
            CALL => {
                self.aside.push_str(tag);
                self.state = State::Opened;
            }
            FUNCTION => {
                self.aside.push_str(tag);
                self.state = State::FunctionName;
            }
            MARK => self.state = State::Marked,
            "{" => {
                self.state = State::Object(Box::new(CallObject::new(true)), After::Bare);
                return (at, true);
            }
            CODE_MARK => {}
            _ => {
                self.is_unclosed = false;
                self.trim();
            }
        }
        (at + tag.len(), true)
    }

    fn opened(&mut self, text: &str, is_whole: bool, parts: &mut Vec<AnswerPart>) -> (usize, bool) {
        let rest = text.trim_start_matches(is_blank);
        let skipped = text.len() - rest.len();
        self.aside.push_str(text.get(..skipped).unwrap_or_default());
        self.state = State::Opened;
        if rest.is_empty() {
            return (skipped, false);
        }
        if rest.starts_with('{') {
            self.state = State::Object(Box::new(CallObject::new(false)), After::Tag);
            return (skipped, true);
        }
        match begins(rest, FUNCTION, is_whole) {
            Some(true) => {
                self.aside.push_str(FUNCTION);
                self.state = State::FunctionName;
                (skipped + FUNCTION.len(), true)
            }
            Some(false) => {
                self.give_back(parts);
                (skipped, true)
            }
            None => (skipped, false),
        }
    }

    fn function_name(
        &mut self,
        text: &str,
        is_whole: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        match key_of(text, is_whole) {
            None => {
                self.state = State::FunctionName;
                (0, false)
            }
            Some(name) if name.trim().is_empty() || name.contains(char::is_control) => {
                self.give_back(parts);
                (0, true)
            }
            Some(name) => {
                self.begin_call(name.trim().to_owned(), parts);
                self.state = State::Function(Box::new(XmlCall::new(name.trim().to_owned())));
                (name.len() + 1, true)
            }
        }
    }

    fn function(
        &mut self,
        mut call: Box<XmlCall>,
        text: &str,
        is_whole: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        let mut piece = String::new();
        let (taken, progress) = call.step(text, is_whole, &self.rules.types, &mut piece);
        self.arguments(piece, parts);
        match progress {
            Progress::Over(is_complete) => {
                self.end_call(is_complete, parts);
                self.state = State::Ended(After::Tag);
            }
            Progress::Again | Progress::More => self.state = State::Function(call),
        }
        (taken, progress != Progress::More)
    }

    fn object(
        &mut self,
        mut object: Box<CallObject>,
        after: After,
        text: &str,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        let mut news = Vec::new();
        let (taken, outcome) = object.push(text, &mut news);
        for news in news {
            match news {
                News::Begin(name) => self.begin_call(name, parts),
                News::Arguments(piece) => self.arguments(piece, parts),
            }
        }
        match outcome {
            Outcome::More => {
                self.state = State::Object(object, after);
                return (taken, false);
            }
            Outcome::Over => {
                self.end_call(true, parts);
                self.state = State::Ended(after);
            }
            Outcome::Bad | Outcome::Foreign if object.has_begun() => {
                self.end_call(false, parts);
                self.state = if after == After::Tag { State::Skipping } else { State::Content };
            }
            Outcome::Bad => {
                self.aside.push_str(&object.into_text());
                self.give_back(parts);
            }
            Outcome::Foreign => {
                self.state = State::Passing { open: 0, in_string: false, escaped: false };
                let (passed, _) = self.pass(&object.into_text(), (0, false, false), parts);
                debug_assert!(passed > 0);
            }
        }
        (taken, true)
    }

    /// Takes text of an object that is no call, up to its last brace.
    fn pass(
        &mut self,
        text: &str,
        (mut open, mut in_string, mut escaped): (usize, bool, bool),
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                _ if escaped => escaped = false,
                b'\\' if in_string => escaped = true,
                b'"' => in_string = !in_string,
                b'{' if !in_string => open += 1,
                b'}' if !in_string => open = open.saturating_sub(1),
                _ => {}
            }
            if open == 0 {
                self.content(text.get(..=at).unwrap_or_default(), parts);
                self.state = State::Content;
                return (at + 1, true);
            }
        }
        self.content(text, parts);
        self.state = State::Passing { open, in_string, escaped };
        (text.len(), false)
    }

    fn skip(&mut self, text: &str, is_whole: bool) -> (usize, bool) {
        match find(text, &[END_OF_CALL, CALL], is_whole) {
            Found::At(at, 0) => (at + END_OF_CALL.len(), true),
            Found::At(at, _) => (at, true),
            Found::Maybe(at) => {
                self.state = State::Skipping;
                (at, false)
            }
            Found::Nowhere => {
                self.state = State::Skipping;
                (text.len(), false)
            }
        }
    }

    fn ended(&mut self, after: After, text: &str, is_whole: bool) -> (usize, bool) {
        if after == After::List {
            self.state = State::List;
            return (0, true);
        }
        let rest = text.trim_start_matches(|c| match after {
            // Models close more braces than they have opened.
            After::Tag => is_blank(c) || c == '}',
            _ => is_blank(c) || c == ';',
        });
        let skipped = text.len() - rest.len();
        self.state = State::Ended(after);
        if rest.is_empty() {
            return (skipped, false);
        }
        let tag =
            if after == After::Tag { begins(rest, END_OF_CALL, is_whole) } else { Some(false) };
        let Some(is_closed) = tag else { return (skipped, false) };
        self.state = State::Content;
        (skipped + if is_closed { END_OF_CALL.len() } else { 0 }, true)
    }

    fn marked(&mut self, text: &str, parts: &mut Vec<AnswerPart>) -> (usize, bool) {
        let rest = text.trim_start_matches(is_blank);
        let skipped = text.len() - rest.len();
        self.aside.push_str(text.get(..skipped).unwrap_or_default());
        match rest.chars().next() {
            None => {
                self.state = State::Marked;
                (skipped, false)
            }
            Some('[') => {
                self.aside.push('[');
                self.state = State::List;
                (skipped + 1, true)
            }
            Some(c) if is_of_name(c) => {
                self.state = State::MarkedName;
                (skipped, true)
            }
            Some(_) => {
                self.give_back(parts);
                (skipped, true)
            }
        }
    }

    fn list(&mut self, text: &str, parts: &mut Vec<AnswerPart>) -> (usize, bool) {
        let rest = text.trim_start_matches(|c| is_blank(c) || c == ',');
        let skipped = text.len() - rest.len();
        if !self.aside.is_empty() {
            self.aside.push_str(text.get(..skipped).unwrap_or_default());
        }
        match rest.chars().next() {
            None => {
                self.state = State::List;
                (skipped, false)
            }
            Some('{') => {
                self.state = State::Object(Box::new(CallObject::new(false)), After::List);
                (skipped, true)
            }
            Some(']') if self.aside.is_empty() => (skipped + 1, true),
            Some(_) => {
                self.give_back(parts);
                (skipped, true)
            }
        }
    }

    fn marked_name(
        &mut self,
        text: &str,
        is_whole: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        let after = text.trim_start_matches(is_of_name);
        let name = text.get(..text.len() - after.len()).unwrap_or_default();
        // `None`: more must come to tell where the arguments begin, if they do.
        let arguments = || -> Option<Option<&str>> {
            if after.is_empty() && !is_whole {
                return None;
            }
            let mut rest = after;
            if begins(rest, ID_MARK, is_whole)? {
                let Some(at) = rest.find(ARGUMENTS_MARK) else {
                    return if rest.len() > MAX_ID_BYTES || is_whole { Some(None) } else { None };
                };
                rest = rest.get(at..).filter(|_| at <= MAX_ID_BYTES).unwrap_or_default();
            }
            if begins(rest, ARGUMENTS_MARK, is_whole)? {
                rest = rest.get(ARGUMENTS_MARK.len()..).unwrap_or_default();
            }
            let inside = rest.trim_start_matches(is_blank);
            let is_near = rest.len() - inside.len() <= MAX_BLANKS;
            if inside.is_empty() && is_near && !is_whole {
                return None;
            }
            Some(Some(inside).filter(|inside| is_near && inside.starts_with('{')))
        };
        let found = if name.len() > MAX_NAME_BYTES { Some(None) } else { arguments() };
        match found {
            None => {
                self.state = State::MarkedName;
                (0, false)
            }
            Some(None) => {
                self.give_back(parts);
                (0, true)
            }
            Some(Some(inside)) => {
                self.begin_call(name.to_owned(), parts);
                self.state = State::MarkedArguments(Box::new(Scanner::new()));
                (text.len() - inside.len(), true)
            }
        }
    }

    fn marked_arguments(
        &mut self,
        mut scanner: Box<Scanner>,
        text: &str,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        let mut piece = String::new();
        let mut copied = 0;
        for (at, byte) in text.bytes().enumerate() {
            let step = scanner.step(byte);
            if step == Step::Inside {
                continue;
            }
            let end = if step == Step::Last { at + 1 } else { at };
            piece.push_str(text.get(copied..end).unwrap_or_default());
            copied = at + 1;
            if step == Step::Control {
                push_control(&mut piece, byte);
                continue;
            }
            self.arguments(piece, parts);
            self.end_call(step == Step::Last, parts);
            self.state = State::Ended(After::Bare);
            return (end, true);
        }
        piece.push_str(text.get(copied..).unwrap_or_default());
        self.arguments(piece, parts);
        self.state = State::MarkedArguments(scanner);
        (text.len(), false)
    }
}

/// Whether names of tools have this character, where no tag ends them.
fn is_of_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '-' | '.' | '/' | ':')
}
