//! The library from Rust, without C.

use std::sync::Arc;
use std::time::Duration;

use xserv::{
    parse_response, Answer, AnswerFormat, CancelToken, DeviceChoice, ErrorKind, Event,
    FinishReason, LoadOptions, Message, Model, Request, Response, ToolChoice, ToolForm,
};

fn tiny() -> Model {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/tiny-qwen3");
    let options = LoadOptions { device: DeviceChoice::Cpu, ..LoadOptions::default() };
    Model::load(path.as_ref(), &options).expect("a model")
}

fn sum() -> Request {
    Request::chat(&[Message::user("What is 27 plus 58?")]).temperature(0.0)
}

#[test]
fn biases_and_log_probabilities() {
    let model = tiny();
    let usual = model.generate(&sum()).expect("an answer");
    assert!(usual.log_probs.is_empty());

    let asked = model.generate(&sum().log_probs(2)).expect("an answer");
    assert_eq!(
        (asked.token_ids, asked.log_probs.len()),
        (usual.token_ids.clone(), usual.token_ids.len())
    );
    let mut told = Vec::new();
    for event in model.stream(&sum().log_probs(2)).expect("a stream") {
        if let Event::Token { log_probs, .. } = event.expect("an event") {
            told.push(*log_probs.expect("log-probabilities"));
        }
    }
    assert_eq!(told, asked.log_probs);
    for (id, one) in usual.token_ids.iter().zip(&told) {
        assert_eq!((one.top.len(), one.top[0].token_id, one.top[0].log_prob), (2, *id, one.chosen));
        assert!(one.chosen <= 0.0 && one.top[1].log_prob <= one.chosen);
    }

    let first = usual.token_ids[0];
    let forced = sum().logit_bias(first, f32::NEG_INFINITY).logit_bias(7, 1e4).max_tokens(4);
    // The prompt's.
    let asked = model.generate(&sum().prompt_log_probs(2)).expect("an answer");
    let prompt = asked.prompt_log_probs.expect("those of the prompt");
    let told =
        model.stream(&sum().prompt_log_probs(2)).expect("a stream").filter_map(|event| match event
            .expect("an event")
        {
            Event::Prompt { index, token, log_probs } => Some((index, token, log_probs.chosen)),
            _ => None,
        });
    let expected = (1..prompt.token_ids.len())
        .map(|index| (index, prompt.token_ids[index], prompt.log_probs[index]));
    assert_eq!(told.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    assert_eq!((prompt.num_top, prompt.top.len()), (2, 2 * prompt.token_ids.len()));
    assert!(prompt.token_ids.len() > 3 && prompt.log_probs[1] < 0.0);
    // A rule of one's own.
    let ruled = model.generate_with_logits(&sum(), |event, logits| {
        assert_eq!(event.prompt_token_ids, prompt.token_ids);
        logits[9] = 1e6;
        Ok(event.token_ids.len() < 2)
    });
    assert_eq!(ruled.expect("an answer")[0].token_ids, [9, 9]);
    let processed = model.generate(&forced.clone().processed_log_probs(0)).expect("an answer");
    assert_eq!(processed.token_ids, [7; 4]);
    assert!(processed.log_probs.iter().all(|one| one.chosen == 0.0 && one.top.is_empty()));
    let own = model.generate(&forced.log_probs(0)).expect("an answer");
    assert!(own.log_probs.iter().all(|one| one.chosen < -0.1));

    let long = model.generate(&sum().min_tokens(40).max_tokens(50)).expect("an answer");
    assert!(usual.token_ids.len() < 40 && long.token_ids.len() >= 40);
    let refused = model.generate(&sum().logit_bias(3, f32::NAN)).expect_err("a refusal");
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn answers_are_taken_apart() {
    let model = tiny();
    let text = "<think>\nHm.\n</think>\n\nYes.\n<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let tools = serde_json::json!([{"type": "function", "function": {"name": "now"}}]);
    let request = Request::chat(&[Message::user("What time is it?")])
        .tools(&tools)
        .first_tokens(model.tokenize(&format!("{text}<|im_end|>")).expect("tokens"))
        .answer_format(AnswerFormat::Auto);
    let assert_right = |answer: &Answer| {
        assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("Hm.", "Yes."));
        let [call] = answer.calls.as_slice() else { panic!("{answer:?}") };
        assert_eq!((call.name.as_str(), call.arguments.as_str()), ("now", "{\"a\": 1}"));
        assert!(call.is_complete);
        let message = Message::from_json(answer.message());
        let rendered = model.render_chat(&[Message::user("What time is it?"), message]);
        assert!(rendered
            .expect("a prompt")
            .contains("{\"name\": \"now\", \"arguments\": {\"a\": 1}}"));
    };
    let whole = model.generate(&request).expect("an answer");
    assert_eq!(whole.text, text);
    assert_right(whole.answer.as_ref().expect("its parts"));

    let zone = serde_json::json!({"type": "object", "properties": {"zone": {"type": "boolean"}},
        "required": ["zone"], "additionalProperties": false});
    let described =
        serde_json::json!([{"type": "function", "function": {"name": "now", "parameters": zone}}]);
    let chosen = Request::chat(&[Message::user("What time is it?")])
        .tools(&described)
        .template_variables(&serde_json::json!({"enable_thinking": false}))
        .max_tokens(100)
        .answer_format(AnswerFormat::Auto);
    for choice in [ToolChoice::Required, ToolChoice::Named("now".to_owned())] {
        let answer = model.generate(&chosen.clone().tool_choice(choice)).expect("a call").answer;
        let calls = answer.expect("its parts").calls;
        let [call] = calls.as_slice() else { panic!("{calls:?}") };
        assert!(call.name == "now" && call.arguments.contains("zone"), "{call:?}");
    }
    let unknown = chosen.clone().tool_choice(ToolChoice::Named("then".to_owned()));
    assert_eq!(model.generate(&unknown).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let none = model.generate(&chosen.tool_choice(ToolChoice::None)).expect("an answer");
    assert!(none.answer.expect("its parts").calls.is_empty());

    let mut told = Answer::default();
    let mut stream = model.stream(&request).expect("a stream");
    for event in &mut stream {
        if let Event::Answer { sample: 0, part, .. } = event.expect("an event") {
            told.add(&part);
        }
    }
    assert_right(&told);
    assert_right(stream.finish().expect("a result")[0].answer.as_ref().expect("its parts"));
    let pieces: Result<String, _> = model.stream(&request).expect("a stream").text().collect();
    assert_eq!(pieces.expect("a text"), text);

    let response = Response { text, prompt: None, tools: None, format: AnswerFormat::Auto };
    assert_right(&model.parse_response(&response).expect("its parts"));
    let named = Response { format: AnswerFormat::Named(ToolForm::JsonTags), ..response };
    assert_right(&parse_response(None, &named).expect("its parts"));
    assert_eq!(
        parse_response(None, &response).expect_err("no model").kind(),
        ErrorKind::InvalidArgument
    );
    assert!(model.generate(&sum()).expect("an answer").answer.is_none());
}

#[test]
fn a_stream_tells_what_generate_returns() {
    let model = tiny();
    let whole = model.generate(&sum()).expect("an answer");
    assert_eq!(whole.text, "27 plus 58 is 85.");
    assert_eq!(whole.finish_reason, FinishReason::StopToken);

    let mut stream = model.stream(&sum()).expect("a stream");
    let (mut ids, mut text, mut ends) = (Vec::new(), String::new(), 0);
    for event in &mut stream {
        match event.expect("an event") {
            Event::Token { token, text: piece, .. } => {
                ids.push(token);
                text.push_str(&piece);
            }
            Event::Text { text: piece, .. } => text.push_str(&piece),
            Event::End { reason, .. } => {
                assert_eq!(reason, FinishReason::StopToken);
                ends += 1;
            }
            Event::Done => {}
            event => panic!("{event:?}, which nobody asked for"),
        }
    }
    assert!(stream.is_over() && stream.next().is_none() && ends == 1);
    assert_eq!((&ids, &text), (&whole.token_ids, &whole.text));
    assert_eq!(stream.finish().expect("the outcome")[0].text, whole.text);

    let pieces: Result<String, _> = model.stream(&sum()).expect("a stream").text().collect();
    assert_eq!(pieces.expect("pieces"), whole.text);
}

#[test]
fn settings_reach_the_engine() {
    let model = tiny();
    let story = Request::text("Once upon a time").temperature(0.0).max_tokens(20);
    let twenty = model.generate(&story).expect("a text");
    assert_eq!((twenty.token_ids.len(), twenty.finish_reason), (20, FinishReason::MaxTokens));
    let stop = twenty.text.split(' ').nth(4).expect("words").to_owned();
    let stopped = model.generate(&story.clone().stop(&stop)).expect("a text");
    assert_eq!(stopped.finish_reason, FinishReason::StopString);
    assert_eq!(stopped.text, twenty.text.split(&stop).next().expect("a beginning"));

    let drawn = || story.clone().temperature(1.5).seed(5).num_samples(3);
    let all = model.generate_all(&drawn()).expect("samples");
    assert_eq!(all.iter().map(|sample| sample.seed).collect::<Vec<_>>(), [5, 6, 7]);
    let again = model.generate(&drawn().num_samples(1).seed(6)).expect("a sample");
    assert_eq!(again.token_ids, all[1].token_ids);
    let error = model.generate(&drawn()).expect_err("three samples");
    assert!(error.message().contains("3 samples"), "{error}");

    let ids = model.tokenize("Once upon a time").expect("ids");
    assert_eq!(
        model
            .generate(&Request::tokens(ids.clone()).temperature(0.0).max_tokens(20))
            .expect("a text")
            .token_ids,
        twenty.token_ids
    );
    assert_eq!(model.detokenize(&ids, true).expect("a text"), "Once upon a time");
    let logits = model.logits(&ids).expect("logits");
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    assert_eq!(best, Some(twenty.token_ids[0] as usize));
    let tools = serde_json::json!([{"type": "function", "function": {"name": "get_weather",
        "description": "", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]);
    let weather = [Message::user("What is the weather in Lisbon?")];
    let call = model.generate(&Request::chat(&weather).tools(&tools).temperature(0.0));
    assert!(call.expect("a call").text.contains(r#"{"city": "Lisbon"}"#));
    assert!(model.render_chat(&weather).expect("a prompt").ends_with("<|im_start|>assistant\n"));
    assert!(format!("{model:?}").contains("Qwen3ForCausalLM"));
}

#[test]
fn given_tokens_are_scored() {
    let model = tiny();
    let prompt = model.tokenize("Once upon a time").expect("ids");
    let story = Request::tokens(prompt.clone()).temperature(0.0).max_tokens(9).log_probs(0);
    let told = model.generate(&story).expect("a text");
    let ids = [&prompt[..], &told.token_ids].concat();
    let scores = model.score(&ids, prompt.len(), 0).expect("scores");
    assert_eq!((scores.len(), told.log_probs.len()), (9, 9));
    for (score, told) in scores.iter().zip(&told.log_probs) {
        assert!(score.is_likeliest && (score.log_prob - told.chosen).abs() < 1e-4);
    }
    assert!(model.score(&ids, ids.len(), 3).expect("no scores").is_empty());
    for num_given in [0, ids.len() + 1] {
        let error = model.score(&ids, num_given, 0).expect_err("a refusal");
        assert!(error.message().contains(&format!("num_given is {num_given}")), "{error}");
    }
}

#[test]
fn requests_are_stopped_from_other_threads_and_by_being_dropped() {
    let model = tiny();
    let endless = Request::text("Once upon a time").ignore_eos(true);
    let token = Arc::new(CancelToken::default());
    let mut stream = model.stream(&endless.clone().cancel_with(token.clone())).expect("a stream");
    assert!(matches!(stream.next(), Some(Ok(Event::Token { .. }))));
    std::thread::spawn(move || token.cancel()).join().expect("a thread");
    let outcome = stream.finish().expect("an outcome");
    assert_eq!(outcome[0].finish_reason, FinishReason::Cancelled);

    let stream = model.stream(&endless).expect("a stream");
    let cancel = stream.canceller();
    std::thread::spawn(cancel).join().expect("a thread");
    assert_eq!(stream.finish().expect("an outcome")[0].finish_reason, FinishReason::Cancelled);

    drop(model.stream(&endless).expect("a stream"));
    let mut stream = model.stream(&endless).expect("a stream");
    stream.stop();
    assert!(stream.next_within(Duration::from_secs(60)).expect("an event").is_some());
    while model.stats().scheduler.running + model.stats().scheduler.waiting > 0 {
        std::thread::yield_now();
    }

    // A stream outlives its model, and says that the request has ended.
    let mut stream = model.stream(&endless).expect("a stream");
    drop(model);
    let last = std::iter::from_fn(|| stream.next()).last().expect("events").expect("no error");
    assert_eq!(last, Event::Done);
}

#[test]
fn threads_share_a_model() {
    let model = tiny();
    std::thread::scope(|scope| {
        let ask =
            || assert_eq!(model.generate(&sum()).expect("an answer").text, "27 plus 58 is 85.");
        (0..8).for_each(|_| {
            scope.spawn(ask);
        });
    });
}

#[test]
fn errors_have_a_kind_and_a_sentence() {
    let error = Model::open("/nowhere/at/all").expect_err("no model");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("/nowhere/at/all"));
    let model = tiny();
    let error = model.generate(&Request::text("x").temperature(-1.0)).expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("temperature is -1"), "{error}");
    let error = model.generate(&Request::chat(&[Message::from_json(serde_json::json!(5))]));
    assert!(error.expect_err("refused").message().contains("messages[0]"));
}
