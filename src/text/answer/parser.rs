//! Takes the text of an answer in pieces, and reports its parts.

use super::event::{Answer, AnswerPart};
use super::rules::AnswerRules;
use super::tagged::TaggedParser;
use super::templated::TemplatedParser;

/// See the module's description.
#[derive(Clone, Debug)]
pub struct AnswerParser(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Tagged(Box<TaggedParser>),
    Templated(Box<TemplatedParser>),
}

impl AnswerParser {
    /// Returns a parser at the beginning of an answer.
    pub fn new(rules: AnswerRules) -> Self {
        AnswerParser(match rules.template.clone() {
            Some(template) => Kind::Templated(Box::new(TemplatedParser::new(rules, template))),
            None => Kind::Tagged(Box::new(TaggedParser::new(rules))),
        })
    }

    /// Takes the next piece of text, and appends what became certain with it.
    pub fn push(&mut self, piece: &str, parts: &mut Vec<AnswerPart>) {
        match &mut self.0 {
            Kind::Tagged(parser) => parser.push(piece, parts),
            Kind::Templated(parser) => parser.push(piece, parts),
        }
    }

    /// Ends the answer: what could have become a tag is text. The parser takes no more.
    pub fn finish(&mut self, parts: &mut Vec<AnswerPart>) {
        match &mut self.0 {
            Kind::Tagged(parser) => parser.finish(parts),
            Kind::Templated(parser) => parser.finish(parts),
        }
    }

    /// Whether a special token says what the text around it is, so that the parser must see it.
    pub fn needs(&self, token: &str) -> bool {
        match &self.0 {
            Kind::Tagged(parser) => parser.rules().is_mark(token),
            Kind::Templated(parser) => parser.rules().is_mark(token),
        }
    }
}

impl AnswerRules {
    /// Reads an answer that is there as a whole.
    pub fn parse(self, text: &str) -> Answer {
        let mut parser = AnswerParser::new(self);
        let mut parts = Vec::new();
        parser.push(text, &mut parts);
        parser.finish(&mut parts);
        let mut answer = Answer::default();
        parts.iter().for_each(|part| answer.add(part));
        answer
    }
}
