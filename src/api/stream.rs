//! Requests under way.

use std::time::Duration;

use crate::engine::{Event, FinishReason, Generation, Ticket, TicketHandle};
use crate::error::{Error, Result};

/// A request under way: an iterator over its events, which waits for each. Dropping it cancels the rest.
///
/// It belongs to one thread at a time; a [`CancelToken`](super::CancelToken) or
/// [`Stream::canceller`] stops it from another.
pub struct Stream {
    ticket: Ticket,
    is_over: bool,
}

impl Stream {
    pub(super) fn new(ticket: Ticket) -> Self {
        Stream { ticket, is_over: false }
    }

    /// Returns the next event, if one comes within `timeout`; with zero, if there is one. `None`
    /// after [`Event::Done`] too.
    pub fn next_within(&mut self, timeout: Duration) -> Result<Option<Event>> {
        if self.is_over {
            return Ok(None);
        }
        let event = self.ticket.next(Some(timeout))?;
        self.is_over = event == Some(Event::Done);
        Ok(event)
    }

    /// Whether all samples have ended and all events were taken.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Ends all samples with the tokens that were taken so far.
    pub fn stop(&mut self) {
        self.ticket.stop(FinishReason::Cancelled);
    }

    /// Returns a function that cancels the request from any thread, at any time.
    pub fn canceller(&self) -> impl Fn() + Send + Sync + Clone + 'static {
        let handle: TicketHandle = self.ticket.handle();
        move || handle.cancel()
    }

    /// Returns the text alone, of the first sample, piece by piece: whole characters, no piece
    /// empty.
    pub fn text(self) -> TextStream {
        TextStream(self)
    }

    /// Waits for the end and returns each sample's outcome; events that were not taken are passed over.
    pub fn finish(mut self) -> Result<Vec<Generation>> {
        while !self.is_over {
            match self.ticket.next(None)? {
                Some(Event::Done) => self.is_over = true,
                Some(_) => {}
                None => return Err(Error::internal("a request ended without saying so")),
            }
        }
        self.ticket.take_generations()
    }
}

impl Iterator for Stream {
    type Item = Result<Event>;

    /// Waits for the next event. `None` after [`Event::Done`] has been returned. An error ends the
    /// sample in which it happened; others go on.
    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let event = self.ticket.next(None).transpose()?;
        self.is_over = matches!(event, Ok(Event::Done));
        Some(event)
    }
}

/// The pieces of text of a request's first sample; see [`Stream::text`].
pub struct TextStream(Stream);

impl TextStream {
    /// Waits for the end and returns each sample's outcome.
    pub fn finish(self) -> Result<Vec<Generation>> {
        self.0.finish()
    }
}

impl Iterator for TextStream {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.0.next()? {
                Ok(Event::Token { sample: 0, text, .. } | Event::Text { sample: 0, text, .. })
                    if !text.is_empty() =>
                {
                    return Some(Ok(text))
                }
                Ok(_) => {}
                Err(error) => return Some(Err(error)),
            }
        }
    }
}
