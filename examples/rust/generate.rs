//! Streams an answer of a model: cargo run --release --example generate -- MODEL "What is 27 plus 58?"

use std::io::Write;

use xserv::{Message, Model, Request, Result};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or_else(|| "examples/models/tiny-qwen3".to_owned());
    let question = arguments.next().unwrap_or_else(|| "Tell me a story.".to_owned());

    let model = Model::open(path)?;
    let request = Request::chat(&[Message::user(&question)]).max_tokens(512);
    let mut pieces = model.stream(&request)?.text();
    for piece in &mut pieces {
        print!("{}", piece?);
        // Whoever closes the pipe ends the answer.
        if std::io::stdout().flush().is_err() {
            return Ok(());
        }
    }
    for answer in pieces.finish()? {
        let (tokens, speed) = (answer.token_ids.len(), answer.tokens_per_second);
        eprintln!("\n{tokens} tokens, {speed:.0} per second");
    }
    Ok(())
}
