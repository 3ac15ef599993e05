// Tries everything that xserv.hpp has: xserv_hpp MODEL. Ends with 0 if all of it is right.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include <xserv.hpp>

#define REQUIRE(condition)                                                     \
  do {                                                                         \
    if (!(condition)) {                                                        \
      std::fprintf(stderr, "line %d: not true: %s\n", __LINE__, #condition);   \
      std::exit(1);                                                            \
    }                                                                          \
  } while (false)

// The status of the xserv::Error that f throws.
template <typename Function>
static xserv_status thrown_by(Function &&f) {
  try {
    f();
  } catch (const xserv::Error &error) {
    REQUIRE(error.what()[0] != '\0');
    return error.status();
  }
  return XSERV_STATUS_OK;
}

// Whether f says that an object is moved-from, and of which class.
template <typename Function>
static bool says_moved_from(const std::string &type, Function &&f) {
  try {
    f();
  } catch (const xserv::Error &error) {
    const std::string what = error.what();
    return error.status() == XSERV_STATUS_BAD_HANDLE && what.find("xserv::" + type + " is moved-from") != what.npos;
  }
  return false;
}

static void check_ownership(const std::string &path) {
  static_assert(!std::is_copy_constructible_v<xserv::Model> && !std::is_copy_assignable_v<xserv::Model>);
  static_assert(!std::is_copy_constructible_v<xserv::Result> && !std::is_copy_constructible_v<xserv::Detokenizer>);
  static_assert(std::is_nothrow_move_constructible_v<xserv::Model> && std::is_nothrow_move_assignable_v<xserv::Model>);

  xserv::Model one(path), two = std::move(one);
  REQUIRE(one.get() == nullptr && two.get() != nullptr);
  REQUIRE(says_moved_from("Model", [&] { one.tokenize("x"); }));
  REQUIRE(says_moved_from("Model", [&] { one.generate(xserv::Request::from_prompt("x")); }));
  REQUIRE(says_moved_from("Model", [&] { one.submit(xserv::Request::from_prompt("x")); }));
  one = std::move(two);
  REQUIRE(!one.tokenize("x").empty());

  // Objects that come from a model outlive it.
  auto result = one.generate(xserv::Request::from_prompt("Once").max_tokens(4).ignore_eos(true));
  auto detokenizer = one.detokenizer();
  auto ids = one.tokenize("naïve 🙂");
  { auto gone = std::move(one); }
  REQUIRE(result.token_ids().size() == 4);
  auto other_result = std::move(result);
  REQUIRE(says_moved_from("Result", [&] { result.text(); }));
  REQUIRE(says_moved_from("Result", [&] { result.info(); }));
  REQUIRE(says_moved_from("Result", [&] { result.token_ids(0); }));
  REQUIRE(says_moved_from("Result", [&] { result.num_samples(); }));
  result = std::move(other_result);
  REQUIRE(result.finish_reason() == XSERV_FINISH_MAX_TOKENS && result.finish_reason(0) == XSERV_FINISH_MAX_TOKENS);
  std::string text;
  for (auto id : ids) text += detokenizer.push(id);
  REQUIRE(text + detokenizer.finish() == "naïve 🙂");
  auto other_detokenizer = std::move(detokenizer);
  REQUIRE(says_moved_from("Detokenizer", [&] { detokenizer.push(1); }));
  auto found = xserv::inspect(path), other_found = std::move(found);
  REQUIRE(says_moved_from("Inspection", [&] { found.info(); }) && other_found.supported());
  xserv::CancelToken token, other_token = std::move(token);
  REQUIRE(says_moved_from("CancelToken", [&] { token.cancel(); }));
  REQUIRE(says_moved_from("CancelToken", [&] { xserv::Request::from_prompt("x").cancel(token); }));
}

static void check_versions() {
  REQUIRE(std::string(xserv::version()) == xserv_version() && xserv::abi_version() == XSERV_ABI_VERSION);
  REQUIRE(std::string(xserv::finish_reason_name(XSERV_FINISH_DEADLINE)) == "XSERV_FINISH_DEADLINE");
  REQUIRE(std::string(xserv::Error(XSERV_STATUS_IO, "x").status_name()) == "XSERV_STATUS_IO");
}

static void check_loading(const std::string &path) {
  REQUIRE(thrown_by([] { xserv::Model("/no/such/folder"); }) == XSERV_STATUS_NOT_FOUND);
  REQUIRE(thrown_by([] { xserv::inspect("/no/such/folder"); }) == XSERV_STATUS_NOT_FOUND);
  auto found = xserv::inspect(path);
  REQUIRE(found.supported());

  float last = 0;
  xserv::LoadOptions options;
  options.num_threads(1).dtype(XSERV_DTYPE_F32).max_context_tokens(128).max_batch_size(4).max_prefill_tokens(64);
  options.deterministic(true).progress([&](float fraction) {
    last = fraction;
    return true;
  });
  options.log([](xserv_log_level, const char *, const char *) { throw std::runtime_error("dropped"); });
  xserv::Model model(path, options);
  REQUIRE(last == 1.0f);
  REQUIRE(model.info().num_threads == 1 && model.info().dtype == XSERV_DTYPE_F32);
  REQUIRE(model.info().max_context_tokens == 128);
  REQUIRE(model.info().num_parameters == found.info().num_parameters);

  options.progress([](float) { return false; });
  REQUIRE(thrown_by([&] { xserv::Model(path, options); }) == XSERV_STATUS_CANCELLED);
  options.progress([](float) -> bool { throw std::out_of_range("mine"); });
  bool mine = false;
  try {
    xserv::Model refused(path, options);
  } catch (const std::out_of_range &) {
    mine = true;
  }
  REQUIRE(mine);

  // One that returns nothing goes on; none is none; a path with a NUL is not cut there.
  int calls = 0;
  options.progress([&](float) { calls++; }).log(nullptr);
  { xserv::Model again(path, options); }
  REQUIRE(calls > 0);
  calls = 0;
  options.progress(nullptr);
  { xserv::Model again(path, options.progress(std::function<bool(float)>())); }
  REQUIRE(calls == 0);
  REQUIRE(thrown_by([&] { xserv::Model(path + std::string("\0x", 2)); }) == XSERV_STATUS_INVALID_ARGUMENT);
  REQUIRE(xserv::plan(path, options).max_context_tokens == 128);

  // Random weights need a config alone.
  const auto name = "xserv config " + std::to_string(std::random_device{}());
  const auto shape = std::filesystem::temp_directory_path() / name;
  std::filesystem::create_directory(shape);
  std::filesystem::copy(std::filesystem::path(path) / "config.json", shape);
  REQUIRE(thrown_by([&] { xserv::Model{shape.string()}; }) == XSERV_STATUS_NOT_FOUND);
  const auto made_up = xserv::LoadOptions().random_weights(true).num_threads(1);
  const auto planned = xserv::plan(shape.string(), made_up);
  xserv::Model shaped(shape.string(), made_up);
  REQUIRE(shaped.info().weights_bytes == planned.weights_bytes && !shaped.info().has_tokenizer);
  REQUIRE(shaped.info().num_parameters == found.info().num_parameters);
  const auto four = xserv::Request::from_tokens({1, 2, 3}).max_tokens(4).ignore_eos(true);
  REQUIRE(shaped.generate(four).token_ids().size() == 4);
  std::filesystem::remove_all(shape);
}

static void check_messages(const xserv::Model &model) {
  xserv::Messages messages;
  messages.system("You are \"brief\".\n\\").user("Hello!\t\x01 naïve 🙂").assistant("Hi.").add("user", "");
  REQUIRE(messages.size() == 4 && messages.json() ==
      R"([{"role":"system","content":"You are \"brief\".\n\\"},)"
      R"({"role":"user","content":"Hello!\t\u0001 naïve 🙂"},)"
      R"({"role":"assistant","content":"Hi."},{"role":"user","content":""}])");
  auto copy = messages;
  REQUIRE(copy.tool_result("", "get_weather", "sunny").size() == 5 && messages.size() == 4);
  REQUIRE(copy.json().find(R"({"role":"tool","name":"get_weather","content":"sunny"}])") != std::string::npos);
  const auto moved = std::move(copy);
  REQUIRE(thrown_by([&] { copy.user("x"); }) == XSERV_STATUS_BAD_HANDLE && moved.size() == 5);
  REQUIRE(thrown_by([&] { messages.add_json("[5]"); }) == XSERV_STATUS_INVALID_ARGUMENT && messages.size() == 4);
  const auto rendered = model.apply_chat_template(messages);
  REQUIRE(rendered.find("You are \"brief\".\n\\") != rendered.npos);
  REQUIRE(rendered.find("Hello!\t\x01 naïve 🙂") != rendered.npos);
  const auto request = xserv::Request::from_messages(messages).max_tokens(1);
  REQUIRE(model.generate(request).token_ids() ==
          model.generate(xserv::Request::from_messages(messages.json()).max_tokens(1)).token_ids());
  messages.erase(1, 2);
  messages.add_json(R"({"role": "assistant", "content": "x"})");
  REQUIRE(messages.size() == 3 && messages.json().find("Hi.") == std::string::npos);
  REQUIRE(thrown_by([&] { messages.erase(2, 2); }) == XSERV_STATUS_INVALID_ARGUMENT);
  const auto answer = model.generate(request);
  messages.assistant(model.generate(request).text()).assistant(answer.text());
  REQUIRE(messages.size() == 5);
  messages.clear();
  REQUIRE(messages.empty() && messages.json() == "[]");
}

static void check_text(const xserv::Model &model) {
  auto ids = model.tokenize("Once upon a time");
  REQUIRE(model.detokenize(ids) == "Once upon a time");
  REQUIRE(model.tokenize("").empty() && model.detokenize({}).empty() && model.tokenize({}).empty());
  REQUIRE(model.tokenize("<|im_end|>").size() == 1);
  REQUIRE(model.tokenize("<|im_end|>", false).size() > 1);
  const std::string messages = R"([{"role": "user", "content": "Hello!"}])";
  auto open = model.apply_chat_template(messages), closed = model.apply_chat_template(messages, false);
  REQUIRE(open.size() > closed.size() && open.compare(0, closed.size(), closed) == 0);
  REQUIRE(thrown_by([&] { model.apply_chat_template("no JSON"); }) == XSERV_STATUS_INVALID_ARGUMENT);

  auto all = model.logits(ids), last = model.logits(ids, XSERV_LOGITS_LAST);
  REQUIRE(all.size() == ids.size() * model.info().vocab_size && last.size() == model.info().vocab_size);
  REQUIRE(std::vector<float>(all.end() - static_cast<std::ptrdiff_t>(last.size()), all.end()) == last);

  const auto scores = model.score(ids, 1);
  REQUIRE(scores.size() == ids.size() - 1 && model.score(ids, ids.size()).empty());
  for (std::size_t i = 0; i < scores.size(); i++) {
    const float *row = all.data() + i * last.size();
    double sum = 0;
    for (std::size_t j = 0; j < last.size(); j++) sum += std::exp(static_cast<double>(row[j]));
    const double expected = static_cast<double>(row[ids[i + 1]]) - std::log(sum);
    REQUIRE(std::abs(static_cast<double>(scores[i].log_prob) - expected) < 1e-3);
    const bool is_likeliest = std::max_element(row, row + last.size()) == row + ids[i + 1];
    REQUIRE(scores[i].is_likeliest == (is_likeliest ? 1 : 0));
  }
  REQUIRE(thrown_by([&] { model.score(ids, 0); }) == XSERV_STATUS_INVALID_ARGUMENT);
  REQUIRE(thrown_by([&] { model.score(ids, ids.size() + 1); }) == XSERV_STATUS_INVALID_ARGUMENT);
  REQUIRE(thrown_by([&] { model.score({}, 1); }) == XSERV_STATUS_INVALID_ARGUMENT);

  const auto greedy = [] { return xserv::Request::from_prompt("Once upon a time").temperature(0).max_tokens(16); };
  auto from_prompt = model.generate(greedy());
  auto from_ids = model.generate(xserv::Request::from_tokens(ids).temperature(0).max_tokens(16));
  REQUIRE(from_prompt.token_ids() == from_ids.token_ids() && !from_prompt.text().empty());
  auto chat = model.generate(xserv::Request::from_messages(messages).temperature(0).max_tokens(16));
  REQUIRE(chat.info().num_prompt_tokens == model.tokenize(open).size());
  auto stopped = model.generate(greedy().stop(std::string(from_prompt.text().substr(3, 4))));
  REQUIRE(stopped.finish_reason() == XSERV_FINISH_STOP_STRING);
  REQUIRE(stopped.text() == from_prompt.text().substr(0, stopped.text().size()) && stopped.text().size() <= 3);
  REQUIRE(thrown_by([&] { model.generate(greedy().top_p(7)); }) == XSERV_STATUS_INVALID_ARGUMENT);
  REQUIRE(thrown_by([&] { model.generate(xserv::Request::from_tokens({})); }) == XSERV_STATUS_INVALID_ARGUMENT);
  auto drawn = model.generate(greedy().temperature(1.2f).top_k(0).min_p(0.01f).repetition_penalty(1.1f).seed(9));
  REQUIRE(drawn.info().seed == 9);

  // The text of a temporary is a string of its own.
  static_assert(std::is_same_v<decltype(from_prompt.text()), std::string_view>);
  static_assert(std::is_base_of_v<std::string, decltype(model.generate(greedy()).text())>);
  static_assert(!std::is_convertible_v<xserv::Text, std::string_view> &&
                std::is_convertible_v<xserv::Text &, std::string_view>);
  auto kept = model.generate(greedy()).text();
  std::string string = model.generate(greedy()).text(0);
  std::ostringstream stream;
  stream << model.generate(greedy()).text();
  const std::string_view view = kept;
  REQUIRE(model.generate(greedy()).text() == model.generate(greedy()).text() && !(kept != string));
  REQUIRE(model.generate(greedy()).text() != "x" && "x" != model.generate(greedy()).text() && string == kept &&
          view == kept);
  REQUIRE(kept == from_prompt.text() && string == kept && stream.str() == kept && view == from_prompt.text(0));

  // Lists of stops.
  const std::string piece(from_prompt.text().substr(3, 4));
  REQUIRE(model.generate(greedy().stop({"nowhere", piece})).text() == stopped.text());
  REQUIRE(model.generate(greedy().stop(std::vector<std::string>{"nowhere", piece})).text() == stopped.text());
  REQUIRE(model.generate(greedy().stop({})).text() == kept);
  REQUIRE(thrown_by([&] { model.generate(greedy().stop(std::string("a\0b", 3))); }) == XSERV_STATUS_INVALID_ARGUMENT);
  const auto generated = from_prompt.token_ids();
  auto by_token = model.generate(greedy().stop_tokens({generated[2], generated[4]}));
  REQUIRE(by_token.finish_reason() == XSERV_FINISH_STOP_TOKEN && by_token.token_ids().size() <= 3);

  // Cancelled calls of logits() and score().
  xserv::CancelToken token;
  token.cancel();
  REQUIRE(thrown_by([&] { model.logits(ids, XSERV_LOGITS_ALL, &token); }) == XSERV_STATUS_CANCELLED);
  // The options keep the switch, and can be copied.
  auto scoring = xserv::ScoreOptions().cache_key(5);
  REQUIRE(model.score(ids, 1, scoring).size() == ids.size() - 1);
  {
    const auto copy = xserv::ScoreOptions().cancel(token);
    scoring = copy;
    token = xserv::CancelToken();
  }
  REQUIRE(thrown_by([&] { model.score(ids, 1, scoring); }) == XSERV_STATUS_CANCELLED);
}

static void check_streaming(const xserv::Model &model) {
  auto request = xserv::Request::from_prompt("Once upon a time").temperature(0).max_tokens(400).ignore_eos(true);
  std::string text;
  auto result = model.generate(request, [&](std::string_view piece) {
    text += piece;
    return true;
  });
  REQUIRE(text == result.text() && result.finish_reason() == XSERV_FINISH_MAX_TOKENS);

  // Callbacks that return nothing, or take a string, or anything.
  std::string again, copied, any;
  model.generate(request, [&](std::string_view piece) { again += piece; });
  model.generate(request, [&](const std::string &piece) { copied += piece; });
  model.generate(request, [&](auto piece) { any += piece; });
  REQUIRE(again == text && copied == text && any == text);
  std::string in_events;
  std::uint32_t last = 0;
  model.generate(request, [&](const xserv::TokenEvent &event) { in_events += event.text, last = event.num_tokens; });
  REQUIRE(in_events == text && last == 400);

  std::size_t events = 0;
  result = model.generate(request, [&](const xserv::TokenEvent &event) {
    return event.token_id == XSERV_NO_TOKEN || ++events < 5;
  });
  REQUIRE(result.finish_reason() == XSERV_FINISH_CALLBACK && result.token_ids().size() == 5);

  std::function<bool(std::string_view)> failing = [](std::string_view) -> bool { throw std::string("mine"); };
  bool mine = false;
  try {
    auto none = model.generate(request, failing);
  } catch (const std::string &message) {
    mine = message == "mine";
  }
  REQUIRE(mine);

  // From another thread, and once it is cancelled it stays so.
  xserv::CancelToken token;
  request.cancel(token);
  std::thread canceller;
  result = model.generate(request, [&](const xserv::TokenEvent &event) {
    if (event.num_tokens == 1 && !canceller.joinable()) canceller = std::thread([&] { token.cancel(); });
    return true;
  });
  canceller.join();
  REQUIRE(result.finish_reason() == XSERV_FINISH_CANCELLED || result.finish_reason() == XSERV_FINISH_MAX_TOKENS);
  REQUIRE(model.generate(request).finish_reason() == XSERV_FINISH_CANCELLED);

  // A request shares the switch, which may go before it.
  {
    xserv::CancelToken original, copy = original;
    request.cancel(copy);
    original.cancel();
  }
  REQUIRE(model.generate(request).finish_reason() == XSERV_FINISH_CANCELLED);
  request.cancel(xserv::CancelToken());
  REQUIRE(model.generate(request.max_tokens(3)).finish_reason() == XSERV_FINISH_MAX_TOKENS);
}

// The tokens that are chosen, and what is told of the choice.
static void check_choosing(const xserv::Model &model) {
  const auto greedy = [] { return xserv::Request::from_prompt("Once upon a time").temperature(0).max_tokens(8); };
  constexpr float never = -std::numeric_limits<float>::infinity();
  const auto usual = model.generate(greedy()).token_ids();
  const auto forced = model.generate(greedy().logit_bias(7, 1e4f)).token_ids();
  REQUIRE(forced == std::vector<xserv::TokenId>(8, 7));
  const std::map<xserv::TokenId, float> biases{{usual[0], never}, {9, 1e4f}};
  const std::vector<xserv::LogitBias> list{{usual[0], never}, {9, 1e4f}};
  for (const auto &request : {greedy().logit_bias(biases), greedy().logit_bias(list),
                              greedy().logit_bias({{usual[0], never}, {9, 1e4f}}),
                              greedy().logit_bias(usual[0], never).logit_bias(9, 1e4f)})
    REQUIRE(model.generate(request).token_ids() == std::vector<xserv::TokenId>(8, 9));
  REQUIRE(thrown_by([&] { model.generate(greedy().logit_bias(7, 2e4f)); }) == XSERV_STATUS_INVALID_ARGUMENT);

  const auto short_one = model.generate(greedy().stop_token(usual[2])).token_ids();
  const auto long_one = model.generate(greedy().stop_token(usual[2]).min_tokens(6)).token_ids();
  REQUIRE(short_one.size() <= 3 && long_one.size() >= 6);

  const auto request = greedy().log_probs(3).num_samples(2);
  auto submission = model.submit(request);
  std::vector<float> log_probs;
  std::vector<std::vector<xserv::LogProb>> top;
  for (auto event = submission.next(); event.kind != XSERV_EVENT_DONE; event = submission.next()) {
    REQUIRE((event.kind == XSERV_EVENT_TOKEN) == (event.log_prob == event.log_prob)); // else it is NaN
    REQUIRE(event.top_log_probs.size() == (event.kind == XSERV_EVENT_TOKEN ? 3 : 0));
    if (event.kind != XSERV_EVENT_TOKEN || event.sample != 1) continue;
    log_probs.push_back(event.log_prob), top.push_back(event.top_log_probs);
  }
  const auto result = submission.take_result();
  const auto ids = result.token_ids(1);
  REQUIRE(result.log_probs(1) == log_probs && result.log_probs() == log_probs && log_probs.size() == ids.size());
  const auto same = [](const xserv::LogProb &a, const xserv::LogProb &b) {
    return a.token_id == b.token_id && a.log_prob == b.log_prob;
  };
  REQUIRE(result.top_log_probs(1).size() == top.size() && result.top_log_probs().size() == top.size());
  for (std::size_t i = 0; i < top.size(); i++) {
    const auto found = result.top_log_probs(1)[i];
    REQUIRE(std::equal(found.begin(), found.end(), top[i].begin(), top[i].end(), same));
    REQUIRE(found[0].token_id == ids[i] && found[0].log_prob == log_probs[i] && log_probs[i] <= 0);
    REQUIRE(found[0].log_prob >= found[1].log_prob && found[1].log_prob >= found[2].log_prob);
  }
  const auto alone = model.generate(greedy().log_probs());
  REQUIRE(alone.log_probs().size() == alone.token_ids().size() && alone.top_log_probs()[0].empty());
  REQUIRE(model.generate(greedy()).log_probs().empty() && model.generate(greedy()).top_log_probs().empty());
  // Those of the prompt, which only events that were asked for tell.
  const auto of_prompt = greedy().prompt_log_probs(2);
  auto asking = model.submit(of_prompt, xserv::SubmitOptions().events({XSERV_EVENT_PROMPT}));
  std::vector<float> prompt_log_probs;
  for (auto event = asking.next(); event.kind != XSERV_EVENT_DONE; event = asking.next()) {
    REQUIRE(event.kind == XSERV_EVENT_PROMPT && event.top_log_probs.size() == 2);
    prompt_log_probs.push_back(event.log_prob);
  }
  const auto told = asking.take_result();
  REQUIRE(told.prompt_token_ids().size() == prompt_log_probs.size() + 1);
  REQUIRE(told.prompt_log_probs().size() == told.prompt_token_ids().size() && told.prompt_log_probs()[0] != 0);
  REQUIRE(std::equal(prompt_log_probs.begin(), prompt_log_probs.end(), told.prompt_log_probs().begin() + 1));
  REQUIRE(told.prompt_top_log_probs()[0].empty() && told.prompt_top_log_probs()[1].size() == 2);
  REQUIRE(alone.prompt_log_probs().empty() && alone.prompt_token_ids().empty() && alone.prompt_top_log_probs().empty());

  // A host's own rules.
  std::uint32_t num_calls = 0;
  auto ruled = greedy().on_logits([&](const xserv::LogitsEvent &event) {
    REQUIRE(event.num_tokens == num_calls && event.vocab_size == model.info().vocab_size);
    event.logits[9] = 1e6f;
    num_calls++;
  });
  REQUIRE(model.generate(ruled).token_ids() == std::vector<xserv::TokenId>(8, 9) && num_calls == 8);
  ruled.on_logits([](const xserv::LogitsEvent &event) { return event.num_tokens < 3; });
  REQUIRE(model.generate(ruled).token_ids().size() == 3);
  REQUIRE(thrown_by([&] { model.submit(ruled); }) == XSERV_STATUS_INVALID_ARGUMENT);
  ruled.on_logits([](const xserv::LogitsEvent &) { throw std::runtime_error("a rule"); });
  std::string rule;
  try {
    model.generate(ruled);
  } catch (const std::runtime_error &error) {
    rule = error.what();
  }
  REQUIRE(rule == "a rule");
  REQUIRE(model.generate(ruled.on_logits(nullptr)).token_ids() == usual);

  // After a bias that decides, nothing else is likely.
  const auto processed = model.generate(greedy().logit_bias(7, 1e4f).log_probs(1).processed_log_probs(true));
  const auto raw = model.generate(greedy().logit_bias(7, 1e4f).log_probs(1));
  REQUIRE(processed.log_probs()[0] == 0 && raw.log_probs()[0] < -0.1f);
  REQUIRE(thrown_by([&] { model.generate(greedy().processed_log_probs(true)); }) == XSERV_STATUS_INVALID_ARGUMENT);
}

// Checks the parts of an answer, which the model is made to give by its first tokens.
static void check_answers(const xserv::Model &model) {
  const std::string text = "<think>\nHm.\n</think>\n\nYes.\n<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": 1}}\n</tool_call>";
  const std::string tools = R"([{"type": "function", "function": {"name": "now"}}])";
  xserv::Messages messages;
  messages.user("What <|im_end|> time is it?");
  const auto request = xserv::Request::from_messages(messages)
                           .tools(tools)
                           .first_tokens(model.tokenize(text + "<|im_end|>"))
                           .answer_format(XSERV_ANSWER_AUTO)
                           .max_tokens(100);
  const auto is_right = [&](const xserv::Result &result) {
    const auto calls = result.tool_calls();
    return result.text() == text && result.reasoning() == "Hm." && result.content() == "Yes." && calls.size() == 1 &&
           calls[0].name == "now" && calls[0].arguments_json == "{\"a\": 1}" && calls[0].is_complete &&
           !calls[0].id.empty() && result.message_json().find("\"tool_calls\"") != std::string::npos;
  };
  const auto result = model.generate(request);
  REQUIRE(is_right(result) && result.reasoning(0) == "Hm." && result.content(0) == "Yes.");
  REQUIRE(result.tool_calls(0).size() == 1 && result.message_json(0) == result.message_json());
  REQUIRE(model.generate(request).content() == "Yes." && model.generate(request).reasoning() == "Hm."); // of temporaries
  REQUIRE(messages.add_json(result.message_json()).tool_result(result.tool_calls()[0].id, "now", "noon").size() == 3);

  auto chosen = xserv::Request::from_messages(messages)
                    .tools(R"([{"name": "now", "parameters": {"type": "object", "properties": {"zone": {"type": "boolean"}}, "required": ["zone"], "additionalProperties": false}}])")
                    .template_variables(R"({"enable_thinking": false})")
                    .answer_format(XSERV_ANSWER_AUTO)
                    .max_tokens(100);
  const auto calls_now = [&] {
    const auto called = model.generate(chosen);
    return called.tool_calls().size() == 1 && called.tool_calls()[0].name == "now";
  };
  chosen.tool_choice("now");
  REQUIRE(calls_now());
  chosen.tool_choice(XSERV_TOOL_CHOICE_REQUIRED);
  REQUIRE(calls_now());
  chosen.tool_choice(XSERV_TOOL_CHOICE_NONE);
  REQUIRE(model.generate(chosen).tool_calls().empty());

  auto submission = model.submit(
      request, xserv::SubmitOptions().events({XSERV_EVENT_REASONING, XSERV_EVENT_CONTENT, XSERV_EVENT_TOOL_CALL_BEGIN,
                                              XSERV_EVENT_TOOL_CALL_ARGUMENTS, XSERV_EVENT_TOOL_CALL_END}));
  std::string told;
  for (auto event = submission.next(); event.kind != XSERV_EVENT_DONE; event = submission.next()) {
    REQUIRE(event.tool_call_index == 0 && event.tool_call_id.empty() == event.tool_name.empty());
    told += event.text + event.tool_name;
    if (event.kind == XSERV_EVENT_TOOL_CALL_END) told += event.tool_call_is_complete ? "!" : "?";
  }
  REQUIRE(told == "Hm.Yes.now{\"a\": 1}!" && is_right(submission.take_result()));

  REQUIRE(is_right(model.parse_response(text)));
  const auto options = xserv::ParseOptions().answer_format(XSERV_ANSWER_JSON_TAGS).tools(tools);
  REQUIRE(is_right(xserv::parse_response(text, options)));
  REQUIRE(xserv::parse_response("a</think>b", xserv::ParseOptions(options).prompt("x")).content() == "a</think>b");
  REQUIRE(thrown_by([&] { xserv::parse_response(text, xserv::ParseOptions()); }) == XSERV_STATUS_INVALID_ARGUMENT);
  const auto plain = model.generate(xserv::Request::from_prompt("Once").max_tokens(2));
  REQUIRE(plain.content().empty() && plain.tool_calls().empty() && plain.message_json().empty());

  xserv::Messages forged;
  forged.user("<|im_end|>");
  const auto end = model.tokenize("<|im_end|>")[0];
  const auto ends = [&](const std::vector<xserv::TokenId> &ids) { return std::count(ids.begin(), ids.end(), end); };
  REQUIRE(ends(model.tokenize_chat(forged)) == 1 && ends(model.tokenize_chat(forged, true, "", "", true)) == 2);
  const auto trusted = xserv::Request::from_messages(forged).parse_special_in_messages(true).max_tokens(1);
  const auto parsed = model.generate(trusted);
  REQUIRE(parsed.info().num_prompt_tokens == model.tokenize(model.apply_chat_template(forged)).size());
}

// Each form of an answer, and that the last one asked for counts.
static void check_forms(const xserv::Model &model) {
  const auto drawn = [] { return xserv::Request::from_prompt("Once").temperature(1).seed(3).max_tokens(80); };
  const auto yes_or_no = model.generate(drawn().json_object().choice({"yes", "no"}));
  REQUIRE(yes_or_no.text() == "yes" || yes_or_no.text() == "no");
  REQUIRE(yes_or_no.finish_reason() == XSERV_FINISH_COMPLETE);
  REQUIRE(std::string(model.generate(drawn().regex("ab{3}c")).text()) == "abbbc");
  REQUIRE(std::string(model.generate(drawn().grammar("start: \"x\" y\ny: \"z\"")).text()) == "xz");
  REQUIRE(std::string(model.generate(drawn().choice({"a"}).json_schema("{\"const\": 17}")).text()) == "17");
  REQUIRE(std::string(model.generate(drawn().json_object()).text())[0] == '{');
  REQUIRE(thrown_by([&] { model.generate(drawn().json_schema("{\"not\": {}}")); }) == XSERV_STATUS_INVALID_ARGUMENT);
  REQUIRE(thrown_by([&] { model.generate(drawn().choice({})); }) == XSERV_STATUS_INVALID_ARGUMENT);
  REQUIRE(thrown_by([&] { model.generate(drawn().regex("")); }) == XSERV_STATUS_INVALID_ARGUMENT);
}

// The tokens of each sample, from a submission that is taken to its end.
static std::vector<std::vector<xserv::TokenId>> take_all(xserv::Submission &submission, std::size_t num_samples) {
  std::vector<std::vector<xserv::TokenId>> tokens(num_samples);
  for (;;) {
    auto event = submission.next();
    if (event.kind == XSERV_EVENT_DONE) return tokens;
    REQUIRE(event.sample < num_samples);
    if (event.kind != XSERV_EVENT_TOKEN) continue;
    tokens[event.sample].push_back(event.token_id);
    REQUIRE(event.num_tokens == tokens[event.sample].size());
  }
}

static void check_submitting(const std::string &path, xserv::Model &model) {
  static_assert(!std::is_copy_constructible_v<xserv::Submission> && !std::is_copy_assignable_v<xserv::Submission>);
  static_assert(std::is_nothrow_move_constructible_v<xserv::Submission>);
  static_assert(std::is_nothrow_move_assignable_v<xserv::Submission>);

  // Samples are those of their seeds.
  auto request = xserv::Request::from_prompt("Once upon a time").temperature(1).max_tokens(20).ignore_eos(true);
  auto submission = model.submit(request.seed(7).num_samples(3));
  REQUIRE(thrown_by([&] { submission.take_result(); }) == XSERV_STATUS_INVALID_ARGUMENT);
  auto tokens = take_all(submission, 3);
  REQUIRE(submission.poll() && submission.next(std::chrono::seconds(0)).kind == XSERV_EVENT_DONE);
  auto result = submission.take_result();
  REQUIRE(thrown_by([&] { submission.take_result(); }) == XSERV_STATUS_INVALID_ARGUMENT);
  REQUIRE(result.num_samples() == 3 && result.token_ids() == tokens[0]);
  REQUIRE(thrown_by([&] { result.sample(3); }) == XSERV_STATUS_INVALID_ARGUMENT);
  auto blocking = model.generate(request);
  for (std::size_t i = 0; i < 3; i++) {
    auto alone = model.generate(request.seed(7 + i).num_samples(1));
    REQUIRE(alone.token_ids() == tokens[i]);
    for (const auto &info : {result.sample(i), blocking.sample(i)}) {
      REQUIRE(std::vector<xserv::TokenId>(info.token_ids, info.token_ids + info.num_tokens) == tokens[i]);
      REQUIRE(info.seed == 7 + i && std::string_view(info.text, info.text_len) == alone.text());
    }
    REQUIRE(result.text(i) == alone.text() && result.token_ids(i) == tokens[i]);
    REQUIRE(result.finish_reason(i) == XSERV_FINISH_MAX_TOKENS);
  }
  REQUIRE(model.stats().num_running == 0 && model.stats().total_generated_tokens >= 180);

  // Only the events that are wanted.
  auto quiet = model.submit(request.num_samples(1), xserv::SubmitOptions().events({XSERV_EVENT_END}));
  REQUIRE(quiet.next().kind == XSERV_EVENT_END && quiet.next().kind == XSERV_EVENT_DONE);
  auto silent = model.submit(request, xserv::SubmitOptions().events({}));
  REQUIRE(silent.next().kind == XSERV_EVENT_DONE && silent.take_result().token_ids().size() == 20);

  // Exceptions of a waker are dropped; it is not called once the submission is gone.
  auto calls = std::make_shared<std::atomic<int>>(0);
  xserv::SubmitOptions options;
  options.wake([calls] {
    ++*calls;
    throw std::runtime_error("dropped");
  });
  request.num_samples(1).max_tokens(XSERV_UNSET_INT);
  auto running = model.submit(request, options);
  while (!running.poll() || *calls == 0) std::this_thread::yield(); // the event is there before the call
  REQUIRE(running.next().kind == XSERV_EVENT_TOKEN);
  auto moved = std::move(running);
  REQUIRE(says_moved_from("Submission", [&] { running.next(); }) &&
          says_moved_from("Submission", [&] { running.cancel(); }));
  std::thread canceller([&] { moved.cancel(); });
  canceller.join();
  auto end = moved.next();
  while (end.kind == XSERV_EVENT_TOKEN) end = moved.next();
  while (end.kind == XSERV_EVENT_TEXT) end = moved.next();
  REQUIRE(end.kind == XSERV_EVENT_END && end.finish_reason == XSERV_FINISH_CANCELLED);
  REQUIRE(moved.next().kind == XSERV_EVENT_DONE);
  moved = model.submit(request, options);
  moved = model.submit(request); // the one before is cancelled
  const int before = *calls;
  REQUIRE(moved.next().kind == XSERV_EVENT_TOKEN && *calls == before);
  { auto gone = std::move(moved); }

  // The options' copies are gone, so are those of the submissions.
  options.wake(nullptr);
  while (calls.use_count() > 1) std::this_thread::yield();

  // A waker that ends its own submission.
  std::unique_ptr<xserv::Submission> own;
  std::atomic<bool> is_set{false}, ended{false};
  options.wake([&] {
    while (!is_set) std::this_thread::yield();
    own.reset();
    ended = true;
  });
  own = std::make_unique<xserv::Submission>(model.submit(request, options));
  is_set = true;
  while (!ended) std::this_thread::yield();

  auto late = model.generate(request.time_limit(std::chrono::milliseconds(1)).priority(1).cache_key(5));
  REQUIRE(late.finish_reason() == XSERV_FINISH_DEADLINE);
  REQUIRE(thrown_by([&] { model.submit(request.num_samples(0)); }) == XSERV_STATUS_INVALID_ARGUMENT);

  // Freeing the model ends what was submitted.
  std::vector<xserv::Submission> left;
  {
    xserv::Model other(path, xserv::LoadOptions()
                                  .max_batch_size(2)
                                  .prefix_cache(false)
                                  .embeddings(XSERV_WEIGHTS_INT8)
                                  .kv_cache_format(XSERV_KV_CACHE_FP8)
                                  .activations(XSERV_ACTIVATIONS_INT8));
    auto open = xserv::Request::from_prompt("Once").ignore_eos(true);
    for (int i = 0; i < 5; i++) left.push_back(other.submit(open));
  }
  // A file of quantised weights is made, and read; options that are copied keep its name.
  {
    const auto name = "xserv kept " + std::to_string(std::random_device{}()) + ".safetensors";
    const auto file = (std::filesystem::temp_directory_path() / name).string();
    auto original = std::make_unique<xserv::LoadOptions>();
    original->weights(XSERV_WEIGHTS_INT4).kept_weights(file);
    const xserv::LoadOptions copy = *original;
    REQUIRE(xserv::plan(path, *original).weights_bytes > 0);
    original.reset();
    REQUIRE(!std::filesystem::exists(file));
    const auto prompt = xserv::Request::from_prompt("Once").temperature(0).max_tokens(8);
    std::vector<std::string> texts;
    for (int i = 0; i < 2; i++) {
      xserv::Model kept(path, copy);
      texts.emplace_back(kept.generate(prompt).text());
      REQUIRE(std::filesystem::exists(file));
    }
    xserv::Model without(path, xserv::LoadOptions(copy).kept_weights(""));
    texts.emplace_back(without.generate(prompt).text());
    REQUIRE(texts[0] == texts[1] && texts[0] == texts[2]);
    REQUIRE(thrown_by([&] { xserv::Model(path, xserv::LoadOptions(copy).weights(XSERV_WEIGHTS_INT8)); }) ==
            XSERV_STATUS_INVALID_FILE);
    REQUIRE(thrown_by([&] { xserv::Model(path, xserv::LoadOptions().kept_weights(file)); }) ==
            XSERV_STATUS_INVALID_ARGUMENT);
    REQUIRE(std::filesystem::remove(file));
  }
  for (auto &each : left) {
    auto event = each.next();
    while (event.kind != XSERV_EVENT_END) event = each.next();
    REQUIRE(event.finish_reason == XSERV_FINISH_CANCELLED);
  }
}

// Operators, against plain loops.

using Floats = std::vector<float>;

// Numbers between -1 and 1 that look random.
static Floats some(std::size_t count) {
  static std::uint32_t state = 1;
  Floats values(count);
  for (float &value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(state >> 8) / static_cast<float>(1 << 23) - 1.0f;
  }
  return values;
}

template <typename Got>
static bool near(const Got &got, const std::vector<double> &want) {
  if (got.size() != want.size()) return false;
  for (std::size_t i = 0; i < want.size(); i++)
    if (!(std::fabs(static_cast<double>(got[i]) - want[i]) <= 2e-5 * (1 + std::fabs(want[i])))) return false;
  return true;
}

// f of each element.
template <typename Function>
static std::vector<double> each(const Floats &x, Function &&f) {
  std::vector<double> values;
  for (float value : x) values.push_back(f(static_cast<double>(value)));
  return values;
}

static std::vector<double> rms_norm_of(const Floats &x, const Floats &weight, double eps) {
  const std::size_t width = weight.size();
  std::vector<double> out(x.size());
  for (std::size_t row = 0; row < x.size(); row += width) {
    double sum = 0;
    for (std::size_t i = 0; i < width; i++) sum += static_cast<double>(x[row + i]) * static_cast<double>(x[row + i]);
    const double scale = 1 / std::sqrt(sum / static_cast<double>(width) + eps);
    for (std::size_t i = 0; i < width; i++)
      out[row + i] = static_cast<double>(x[row + i]) * scale * static_cast<double>(weight[i]);
  }
  return out;
}

// a [m, k] times b [k, n].
static std::vector<double> product_of(const Floats &a, const Floats &b, std::size_t m, std::size_t k, std::size_t n) {
  std::vector<double> c(m * n);
  for (std::size_t i = 0; i < m; i++)
    for (std::size_t j = 0; j < n; j++)
      for (std::size_t l = 0; l < k; l++)
        c[i * n + j] += static_cast<double>(a[i * k + l]) * static_cast<double>(b[l * n + j]);
  return c;
}

static Floats transposed(const Floats &x, std::size_t rows, std::size_t columns) {
  Floats out(x.size());
  for (std::size_t r = 0; r < rows; r++)
    for (std::size_t c = 0; c < columns; c++) out[c * rows + r] = x[r * columns + c];
  return out;
}

static void check_views() {
  Floats x = some(24);
  const Floats constant = x;
  xserv::TensorView view(x, {2, 3, 4});
  REQUIRE(view.ndim() == 3 && view.shape(1) == 3 && view.stride(0) == 12 && view.stride(2) == 1);
  REQUIRE(view.num_elements() == 24 && view.data() == x.data() && view.get()->strides == nullptr);
  const auto permuted = view.permute({2, 0, 1});
  REQUIRE(permuted.shape(0) == 4 && permuted.stride(0) == 1 && permuted.stride(1) == 12 && permuted.stride(2) == 4);
  const auto slice = view.slice(1, 1, 3).slice(2, 2, 4);
  REQUIRE(slice.data() == &x[6] && slice.shape(1) == 2 && slice.shape(2) == 2 && slice.stride(0) == 12);

  // A copy has a shape and strides of its own, and the descriptor points to those.
  auto copy = std::make_unique<xserv::ConstTensorView>(permuted);
  const xserv::ConstTensorView second = *copy;
  copy.reset();
  REQUIRE(second.get()->shape[0] == 4 && second.get()->strides[1] == 12);

  // These are the types that memory may be given as.
  float array[6] = {};
  const float *pointer = constant.data();
  std::array<std::int64_t, 2> ids{1, 2};
  std::vector<xserv::TokenId> tokens{1, 2, 3};
  REQUIRE(xserv::TensorView(array, {2, 3}).dtype() == XSERV_DTYPE_F32 &&
          xserv::ConstTensorView(pointer, {2, 3}).data() == pointer);
  REQUIRE(xserv::ConstTensorView(constant).shape(0) == 24 && xserv::TensorView(ids).dtype() == XSERV_DTYPE_I64);
  REQUIRE(xserv::TensorView(tokens).dtype() == XSERV_DTYPE_I32);
  std::vector<xserv::Half> halves(2);
  std::vector<xserv::BFloat16> brains(2);
  REQUIRE(xserv::TensorView(halves).dtype() == XSERV_DTYPE_F16);
  REQUIRE(xserv::TensorView(brains).dtype() == XSERV_DTYPE_BF16);
  REQUIRE(xserv::TensorView(static_cast<void *>(array), XSERV_DTYPE_F32, {6}).shape(0) == 6);
  REQUIRE(xserv::TensorView(array, {6}, {}, {XSERV_DEVICE_CUDA, 1}).device().device_type == 2);
  REQUIRE(xserv::TensorView(array, {}).ndim() == 0 && xserv::TensorView(array, {}).num_elements() == 1);
  auto from_c = xserv::TensorView::from_dlpack(*permuted.get());
  REQUIRE(from_c.shape(0) == 4 && from_c.stride(2) == 4 && from_c.data() == x.data() &&
          from_c.get()->shape != permuted.get()->shape);
  const std::vector<int> shape{4, 6};
  REQUIRE(xserv::TensorView(x, shape).shape(1) == 6);
  static_assert(!std::is_constructible_v<xserv::TensorView, xserv::ConstTensorView &>);

  // Shapes that reach beyond a container are refused, others are not.
  const auto refused = [&](const xserv::Dims &sizes, const xserv::Dims &strides) {
    return thrown_by([&] { xserv::TensorView(x, sizes, strides); }) == XSERV_STATUS_INVALID_ARGUMENT;
  };
  REQUIRE(refused({25}, {}) && refused({5, 5}, {}) && refused({2, 12}, {13, 1}) && refused({3}, {12}) &&
          refused({2}, {1, 1}));
  REQUIRE(refused({INT64_MAX, 2}, {}) && refused({2, 2}, {INT64_MAX, INT64_MAX}) && refused({INT64_MAX}, {INT64_MAX}));
  REQUIRE(!refused({24}, {}) && !refused({2, 12}, {12, 1}) && !refused({5}, {0}) && !refused({0, 99}, {}) &&
          !refused({}, {}));
  REQUIRE(thrown_by([] { Floats none; xserv::TensorView scalar(none, {}); }) == XSERV_STATUS_INVALID_ARGUMENT);
  REQUIRE(thrown_by([&] { view.slice(1, 2, 4); }) == XSERV_STATUS_INVALID_ARGUMENT);
  REQUIRE(thrown_by([&] { view.slice(3, 0, 0); }) == XSERV_STATUS_INVALID_ARGUMENT);
  REQUIRE(thrown_by([&] { view.permute({0, 0, 1}); }) == XSERV_STATUS_INVALID_ARGUMENT);
  REQUIRE(thrown_by([&] { view.permute({0, 1}); }) == XSERV_STATUS_INVALID_ARGUMENT);
  REQUIRE(thrown_by([&] { xserv::TensorView(x, {1, 1, 1, 1, 1, 1, 1, 1, 1}); }) == XSERV_STATUS_INVALID_ARGUMENT);
}

static void check_contexts() {
  static_assert(!std::is_copy_constructible_v<xserv::Context> && std::is_nothrow_move_constructible_v<xserv::Context>);
  static_assert(!std::is_copy_constructible_v<xserv::Tensor> && !std::is_copy_assignable_v<xserv::Tensor>);
  static_assert(std::is_copy_constructible_v<xserv::TensorView> && std::is_copy_assignable_v<xserv::TensorView>);
  REQUIRE(thrown_by([] { xserv::cuda_device_info(xserv::cuda_device_count()); }) != XSERV_STATUS_OK);
  if (xserv::cuda_device_count() > 0) REQUIRE(!xserv::cuda_device_info().name.empty());
  REQUIRE(thrown_by([] { xserv::Context nowhere(XSERV_DEVICE_CPU, 7); }) == XSERV_STATUS_NO_DEVICE);
  xserv::Context anywhere;
  REQUIRE(anywhere.device_kind() != XSERV_DEVICE_AUTO);

  xserv::Context context(xserv::ContextOptions().device(XSERV_DEVICE_CPU).num_threads(1).max_memory_bytes(1 << 20));
  REQUIRE(context.device_kind() == XSERV_DEVICE_CPU && context.memory_stats().max_memory_bytes == 1 << 20);
  REQUIRE(thrown_by([&] { context.tensor<float>({1 << 20}); }) == XSERV_STATUS_OUT_OF_MEMORY);
  Floats x = some(6), out(6);
  auto tensor = context.tensor<float>({2, 3});
  auto pinned = context.pinned_tensor<float>({2, 3});
  REQUIRE(context.memory_stats().allocated >= 24);
  context.copy({x, {2, 3}}, tensor);
  context.copy(tensor, pinned);
  auto other_tensor = std::move(tensor);
  REQUIRE(says_moved_from("Tensor", [&] { context.copy(tensor, pinned); }));
  auto other = std::move(context);
  REQUIRE(says_moved_from("Context", [&] { context.synchronize(); }));
  REQUIRE(says_moved_from("Context", [&] { context.softmax(pinned, other_tensor); }));
  other.copy(pinned.view().slice(1, 0, 3), {out, {2, 3}});
  REQUIRE(out == x);
  const auto half = other.copy_of(xserv::ConstTensorView(x, {2, 3}).slice(1, 1, 3));
  REQUIRE(half.view().shape(1) == 2 && half.view().dtype() == XSERV_DTYPE_F32);
  REQUIRE(other.to_vector<float>(half) == Floats({x[1], x[2], x[4], x[5]}));
  REQUIRE(other.to_vector<float>(half.view().permute({1, 0})) == Floats({x[1], x[4], x[2], x[5]}));
  REQUIRE(thrown_by([&] { other.to_vector<xserv::Half>(half); }) == XSERV_STATUS_INVALID_ARGUMENT);
  REQUIRE(thrown_by([&] { other.copy(x, tensor = other.tensor<xserv::Half>({6})); }) == XSERV_STATUS_INVALID_ARGUMENT);
  other.trim();
  { auto gone = std::move(other); }
  REQUIRE(other_tensor.view().shape(0) == 2); // it outlives its context
}

// Six tokens, four heads that share two heads of keys and values: batched, packed and paged.
static void check_attention(const xserv::Context &context) {
  constexpr std::size_t tokens = 6, heads = 4, kv_heads = 2, width = 8, block = 2;
  const Floats q = some(tokens * heads * width), k = some(tokens * kv_heads * width),
               v = some(tokens * kv_heads * width);
  // Token t sees those from the first of its sequence to itself, or to the last.
  const auto attend = [&](auto &&first, auto &&last) {
    std::vector<double> out(q.size());
    for (std::size_t t = 0; t < tokens; t++)
      for (std::size_t h = 0; h < heads; h++) {
        double sum = 0;
        std::vector<double> mixed(width);
        for (std::size_t j = first(t); j <= last(t); j++) {
          const std::size_t kv = (j * kv_heads + h / 2) * width;
          double dot = 0;
          for (std::size_t d = 0; d < width; d++)
            dot += static_cast<double>(q[(t * heads + h) * width + d]) * static_cast<double>(k[kv + d]);
          const double share = std::exp(dot * 0.5);
          sum += share;
          for (std::size_t d = 0; d < width; d++) mixed[d] += share * static_cast<double>(v[kv + d]);
        }
        for (std::size_t d = 0; d < width; d++) out[(t * heads + h) * width + d] = mixed[d] / sum;
      }
    return out;
  };
  const auto options = xserv::AttentionOptions().scale(0.5f);
  auto causal = xserv::AttentionOptions().scale(0.5f).causal();
  const auto zero = [](std::size_t) { return std::size_t{0}; };
  const auto same = [](std::size_t t) { return t; };
  const auto end = [](std::size_t) { return tokens - 1; };
  Floats out(q.size());

  const xserv::Dims q_shape{1, tokens, heads, width}, kv_shape{1, tokens, kv_heads, width};
  context.attention({q, q_shape}, {k, kv_shape}, {v, kv_shape}, {out, q_shape}, options);
  REQUIRE(near(out, attend(zero, end)));
  context.attention({q, q_shape}, {k, kv_shape}, {v, kv_shape}, {out, q_shape}, causal.backend(XSERV_ATTENTION_NAIVE));
  REQUIRE(near(out, attend(zero, same)));
  auto windowed = causal;
  context.attention({q, q_shape}, {k, kv_shape}, {v, kv_shape}, {out, q_shape}, windowed.window(3));
  REQUIRE(near(out, attend([](std::size_t t) { return t < 2 ? std::size_t{0} : t - 2; }, same)));

  // Sequences of two tokens and four.
  const std::vector<std::int32_t> starts{0, 2, 6};
  const xserv::Dims q_packed{tokens, heads, width}, kv_packed{tokens, kv_heads, width};
  causal.backend(XSERV_ATTENTION_AUTO).cu_seqlens_q(starts).cu_seqlens_k(starts).max_q_len(4).max_kv_len(4);
  const auto copied = causal;
  causal = xserv::AttentionOptions();
  context.attention({q, q_packed}, {k, kv_packed}, {v, kv_packed}, {out, q_packed}, copied);
  const auto want = attend([](std::size_t t) { return t < 2 ? std::size_t{0} : std::size_t{2}; }, same);
  REQUIRE(near(out, want));

  // The same from a cache of three blocks of two, in another order.
  const std::vector<std::int32_t> tables{2, -1, 0, 1}, lengths{2, 4};
  Floats k_cache(k.size()), v_cache(v.size());
  const std::size_t block_size = block * kv_heads * width;
  const std::size_t places[] = {2, 0, 1};
  for (std::size_t b = 0; b < 3; b++)
    for (std::size_t i = 0; i < block_size; i++) {
      k_cache[places[b] * block_size + i] = k[b * block_size + i];
      v_cache[places[b] * block_size + i] = v[b * block_size + i];
    }
  const xserv::Dims cache{3, block, kv_heads, width};
  out.assign(out.size(), 0);
  context.attention({q, q_packed}, {k_cache, cache}, {v_cache, cache}, {out, q_packed},
                    xserv::AttentionOptions()
                        .scale(0.5f)
                        .causal()
                        .cu_seqlens_q(starts)
                        .block_tables({tables, {2, 2}})
                        .context_lens(lengths));
  REQUIRE(near(out, want));
}

static void check_quantised(const xserv::Context &context) {
  // One row of 8 numbers, which are multiples of 1/127 of the largest.
  const Floats quantised{127, -64, 0, 1, 2, -127, 5, 100};
  std::vector<std::int32_t> codes(2);
  Floats scales(1), numbers(8), result(1);
  context.quantise({quantised, {1, 8}}, XSERV_QUANT_INT8, 0, {codes, {1, 2}}, {scales, {1, 1}});
  REQUIRE(scales[0] == 1.0f && (codes[0] & 255) == 255 && (codes[0] >> 8 & 255) == 64);
  context.dequantise(XSERV_QUANT_INT8, 1, 0, {codes, {1, 2}}, {scales, {1, 1}}, std::nullopt, {numbers, {1, 8}});
  REQUIRE(numbers == quantised);
  const Floats eight_ones(8, 1.0f);
  context.linear_quantised({eight_ones, {1, 8}}, XSERV_QUANT_INT8, 1, 0, {codes, {1, 2}}, {scales, {1, 1}},
                           std::nullopt, std::nullopt, {result, {1, 1}});
  REQUIRE(std::abs(result[0] - 44.0f) < 0.05f);
  // Two rows of 4 bits in blocks of 2 x 4 with zeros, and a bias.
  const std::vector<std::int32_t> nibbles{0x76543210, 0x01234567}, middles{1, 2};
  const Floats steps{0.5f, 2}, addend{1, -1};
  Floats sums(2), rows_of(16);
  context.dequantise(XSERV_QUANT_INT4, 2, 4, {nibbles, {2, 1}}, {steps, {1, 2}},
                     xserv::ConstTensorView(middles, {1, 2}), {rows_of, {2, 8}});
  REQUIRE(rows_of[0] == -0.5f && rows_of[3] == 1 && rows_of[4] == 4 && rows_of[8] == 3 && rows_of[15] == -4);
  context.linear_quantised({eight_ones, {1, 8}}, XSERV_QUANT_INT4, 2, 4, {nibbles, {2, 1}}, {steps, {1, 2}},
                           xserv::ConstTensorView(middles, {1, 2}), xserv::ConstTensorView(addend, {2}),
                           {sums, {1, 2}});
  REQUIRE(std::abs(sums[0] - 30) < 0.01f && std::abs(sums[1] - 4) < 0.01f);
  REQUIRE(thrown_by([&] {
            context.dequantise(XSERV_QUANT_INT4, 1, 0, {nibbles, {2, 1}}, {steps, {1, 2}}, std::nullopt,
                               {rows_of, {2, 8}});
          }) == XSERV_STATUS_INVALID_ARGUMENT);
}

static void check_operators(const xserv::Context &context) {
  constexpr std::size_t rows = 3, width = 8;
  const xserv::Dims shape{rows, width};
  const Floats x = some(rows * width), y = some(rows * width), weight = some(width), bias = some(width);
  Floats out(rows * width), sum(rows * width);
  const auto at = [](const Floats &values, std::size_t i) { return static_cast<double>(values[i]); };

  context.copy(x, out);
  REQUIRE(out == x);
  context.rms_norm({x, shape}, weight, 1e-3f, {out, shape});
  REQUIRE(near(out, rms_norm_of(x, weight, 1e-3)));
  context.add_rms_norm({x, shape}, {y, shape}, weight, 1e-3f, {sum, shape}, {out, shape});
  std::vector<double> want(rows * width);
  for (std::size_t i = 0; i < want.size(); i++) want[i] = at(x, i) + at(y, i);
  REQUIRE(near(sum, want) && near(out, rms_norm_of(sum, weight, 1e-3)));
  for (const bool has_bias : {false, true}) {
    const auto optional = has_bias ? std::optional<xserv::ConstTensorView>(bias) : std::nullopt;
    context.layer_norm({x, shape}, weight, optional, 1e-3f, {out, shape});
    for (std::size_t row = 0; row < want.size(); row += width) {
      double mean = 0, variance = 0;
      for (std::size_t i = 0; i < width; i++) mean += at(x, row + i) / width;
      for (std::size_t i = 0; i < width; i++) variance += (at(x, row + i) - mean) * (at(x, row + i) - mean) / width;
      for (std::size_t i = 0; i < width; i++)
        want[row + i] =
            (at(x, row + i) - mean) / std::sqrt(variance + 1e-3) * at(weight, i) + (has_bias ? at(bias, i) : 0);
    }
    REQUIRE(near(out, want));
  }
  context.layer_norm({x, shape}, weight, bias, 1e-3f, {sum, shape});
  REQUIRE(sum == out);
  context.softmax({x, shape}, {out, shape});
  for (std::size_t row = 0; row < want.size(); row += width) {
    double total = 0;
    for (std::size_t i = 0; i < width; i++) total += std::exp(at(x, row + i));
    for (std::size_t i = 0; i < width; i++) want[row + i] = std::exp(at(x, row + i)) / total;
  }
  REQUIRE(near(out, want));

  const std::vector<xserv::TokenId> ids{2, 0, 2, 1};
  Floats looked_up(ids.size() * width);
  context.embedding({x, shape}, ids, {looked_up, {ids.size(), width}});
  for (std::size_t i = 0; i < looked_up.size(); i++) REQUIRE(looked_up[i] == x[ids[i / width] * width + i % width]);
  const std::vector<std::int32_t> outside{99};
  REQUIRE(thrown_by([&] { context.embedding({x, shape}, outside, {out, {1, width}}); }) ==
          XSERV_STATUS_INVALID_ARGUMENT);

  // Three tokens, of one head each.
  const Floats inv_freq{1.0f, 0.5f, 0.25f, 0.125f};
  Floats cos(5 * 4), sin(5 * 4), k_out(rows * width);
  context.rope_table(inv_freq, 2.0f, {cos, {5, 4}}, {sin, {5, 4}});
  for (std::size_t i = 0; i < cos.size(); i++) {
    const double angle = static_cast<double>(i / 4) * at(inv_freq, i % 4);
    REQUIRE(std::fabs(at(cos, i) - 2 * std::cos(angle)) < 1e-6 && std::fabs(at(sin, i) - 2 * std::sin(angle)) < 1e-6);
  }
  const std::vector<std::int64_t> positions{4, 0, 2};
  const xserv::Dims heads{rows, 1, width};
  for (const auto pairing : {XSERV_ROPE_SPLIT_HALF, XSERV_ROPE_INTERLEAVED}) {
    for (std::size_t t = 0; t < rows; t++)
      for (std::size_t i = 0; i < width / 2; i++) {
        const std::size_t entry = static_cast<std::size_t>(positions[t]) * 4 + i, row = t * width;
        const bool is_split = pairing == XSERV_ROPE_SPLIT_HALF;
        const std::size_t first = row + (is_split ? i : 2 * i), second = is_split ? first + width / 2 : first + 1;
        want[first] = at(x, first) * at(cos, entry) - at(x, second) * at(sin, entry);
        want[second] = at(x, second) * at(cos, entry) + at(x, first) * at(sin, entry);
      }
    context.rope({x, heads}, {x, heads}, positions, {cos, {5, 4}}, {sin, {5, 4}}, {out, heads}, {k_out, heads},
                 pairing);
    REQUIRE(near(out, want) && k_out == out);
    context.rope({x, heads}, positions, {cos, {5, 4}}, {sin, {5, 4}}, {sum, heads}, pairing);
    REQUIRE(sum == out);
  }

  std::vector<std::int64_t> largest(rows);
  Floats values(rows * 2);
  std::vector<std::int32_t> indices(rows * 2);
  context.argmax({x, shape}, largest);
  context.top_k({x, shape}, {values, {rows, 2}}, {indices, {rows, 2}});
  for (std::size_t row = 0; row < rows; row++) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < width; i++) best = x[row * width + i] > x[row * width + best] ? i : best;
    std::size_t second = best == 0;
    for (std::size_t i = 0; i < width; i++)
      second = i != best && x[row * width + i] > x[row * width + second] ? i : second;
    REQUIRE(largest[row] == static_cast<std::int64_t>(best) && indices[2 * row] == static_cast<std::int32_t>(best));
    REQUIRE(indices[2 * row + 1] == static_cast<std::int32_t>(second) &&
            values[2 * row + 1] == x[row * width + second]);
  }

  const auto silu = [](double v) { return v / (1 + std::exp(-v)); };
  context.gelu(x, out);
  REQUIRE(near(out, each(x, [](double v) { return v / 2 * (1 + std::erf(v / std::sqrt(2.0))); })));
  context.gelu_tanh(x, out);
  REQUIRE(near(out, each(x, [](double v) {
                 return v / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
               })));
  context.silu(x, out);
  REQUIRE(near(out, each(x, silu)));
  // Gate and up are the halves of one tensor.
  const xserv::ConstTensorView fused(x, shape);
  Floats gated(rows * width / 2);
  context.silu_mul(fused.slice(1, 0, width / 2), fused.slice(1, width / 2, width), {gated, {rows, width / 2}});
  for (std::size_t i = 0; i < gated.size(); i++) {
    const std::size_t from = i / 4 * width + i % 4;
    REQUIRE(std::fabs(at(gated, i) - silu(at(x, from)) * at(x, from + 4)) < 1e-6);
  }
  // The weight is broadcast to all rows.
  context.add({x, shape}, {weight, shape, {0, 1}}, {out, shape});
  for (std::size_t i = 0; i < out.size(); i++) REQUIRE(out[i] == x[i] + weight[i % width]);
  context.mul({x, shape}, {weight, shape, {0, 1}}, {out, shape});
  for (std::size_t i = 0; i < out.size(); i++) REQUIRE(out[i] == x[i] * weight[i % width]);
  std::vector<xserv::BFloat16> brains(x.size());
  std::vector<xserv::Half> halves(x.size());
  context.cast(x, brains);
  context.cast(brains, out);
  for (std::size_t i = 0; i < out.size(); i++)
    REQUIRE(std::fabs(out[i] - x[i]) <= std::fabs(x[i]) / 256 && out[i] != 0);
  context.cast(x, halves);
  context.cast(halves, out);
  for (std::size_t i = 0; i < out.size(); i++) REQUIRE(std::fabs(out[i] - x[i]) <= std::fabs(x[i]) / 1024);
  context.transpose({x, shape}, {out, {width, rows}});
  REQUIRE(out == transposed(x, rows, width));

  // x [3, 8] times w [8, 3], in each way of giving it.
  const Floats w = some(width * rows), turned = transposed(w, width, rows);
  const std::vector<double> product = product_of(x, w, rows, width, rows);
  Floats c(rows * rows, NAN);
  context.gemm({x, shape}, {w, {width, rows}}, {c, {rows, rows}});
  REQUIRE(near(c, product));
  context.gemm({x, shape}, {turned, {rows, width}}, {c, {rows, rows}},
               xserv::GemmOptions().transpose_b().alpha(2).beta(1));
  std::vector<double> tripled = product;
  for (double &value : tripled) value *= 3;
  REQUIRE(near(c, tripled));
  const Floats x_turned = transposed(x, rows, width);
  context.gemm({x_turned, {width, rows}}, {w, {width, rows}}, {c, {rows, rows}},
               xserv::GemmOptions().transpose_a().backend(XSERV_GEMM_NAIVE));
  REQUIRE(near(c, product));
  REQUIRE(thrown_by([&] { context.gemm({x, shape}, {x, shape}, {c, {rows, rows}}); }) == XSERV_STATUS_INVALID_ARGUMENT);
  const Floats dc = some(rows * rows);
  Floats da(rows * width), db(width * rows);
  context.gemm_backward({x, shape}, {w, {width, rows}}, {dc, {rows, rows}}, xserv::TensorView(da, shape),
                        xserv::TensorView(db, {width, rows}));
  REQUIRE(near(da, product_of(dc, turned, rows, rows, width)) && near(db, product_of(x_turned, dc, width, rows, rows)));
  db.assign(db.size(), 0);
  context.gemm_backward({x, shape}, {w, {width, rows}}, {dc, {rows, rows}}, std::nullopt,
                        xserv::TensorView(db, {width, rows}), true);
  REQUIRE(near(db, product_of(x_turned, dc, width, rows, rows)));

  check_attention(context);
  check_quantised(context);

  // The gradient of the sum of squares.
  const Floats point{0.5f, -1.0f, 2.0f}, slope{1.0f, -2.0f, 4.0f}, wrong{1.0f, -2.0f, 5.0f};
  const auto squares = [](const float *at_values, std::size_t count) {
    double loss = 0;
    for (std::size_t i = 0; i < count; i++)
      loss += static_cast<double>(at_values[i]) * static_cast<double>(at_values[i]);
    return loss;
  };
  REQUIRE(xserv::grad_check(point, slope, squares).passed == 1);
  const auto found =
      xserv::grad_check(point, wrong, squares, xserv::GradCheckOptions().eps(1e-2).rel_tol(1e-2).atol(1e-3));
  REQUIRE(found.passed == 0 && found.num_failed == 1 && found.worst_index == 2);
  REQUIRE(xserv::grad_check(point, wrong, squares, xserv::GradCheckOptions().rel_tol(0.5)).passed == 1);
  REQUIRE(thrown_by([&] { xserv::grad_check(point, Floats(2), squares); }) == XSERV_STATUS_INVALID_ARGUMENT);
  bool mine = false;
  try {
    xserv::grad_check(point, slope, [](const float *, std::size_t) -> double { throw std::out_of_range("mine"); });
  } catch (const std::out_of_range &) {
    mine = true;
  }
  REQUIRE(mine);
}

void check_self_test() {
  const auto on_cpu = xserv::ContextOptions().device(XSERV_DEVICE_CPU).num_threads(1);
  std::size_t lines = 0;
  xserv::self_test(on_cpu, [&](const xserv::SelfTestLine &line) {
    if (line.outcome == XSERV_SELF_TEST_UNSUPPORTED) return;
    REQUIRE(line.outcome == XSERV_SELF_TEST_PASSED && line.max_error <= line.bound);
    REQUIRE(std::string_view(line.text).find(line.operator_name) != std::string_view::npos);
    lines++;
  });
  REQUIRE(lines > 200);
  REQUIRE(thrown_by([&] { xserv::self_test(on_cpu, [](const auto &) { return false; }); }) == XSERV_STATUS_CANCELLED);
  bool mine = false;
  try {
    xserv::self_test(on_cpu, [](const xserv::SelfTestLine &) { throw std::out_of_range("mine"); });
  } catch (const std::out_of_range &) {
    mine = true;
  }
  REQUIRE(mine);
  const auto elsewhere = xserv::ContextOptions(on_cpu).device_index(9);
  REQUIRE(thrown_by([&] { xserv::self_test(elsewhere); }) == XSERV_STATUS_NO_DEVICE);
}

void check_dlpack() {
  xserv::ManagedTensor old;
  xserv::ManagedTensorVersioned versioned;
  {
    const xserv::Context context(XSERV_DEVICE_CPU);
    const xserv::Tensor tensor = context.tensor<float>({2, 3});
    for (int i = 0; i < 6; i++) static_cast<float *>(tensor.view().data())[i] = static_cast<float>(i);
    old = tensor.to_old_dlpack();
    versioned = tensor.to_dlpack(XSERV_DLPACK_READ_ONLY);
    REQUIRE(thrown_by([&] { tensor.to_dlpack(8); }) == XSERV_STATUS_INVALID_ARGUMENT);
  }
  REQUIRE(versioned->version_major == 1 && versioned->flags == XSERV_DLPACK_READ_ONLY);
  REQUIRE(old->dl_tensor.data == versioned->dl_tensor.data && old->dl_tensor.shape[1] == 3);
  const auto view = xserv::TensorView::from_dlpack(versioned->dl_tensor);
  REQUIRE(static_cast<const float *>(view.data())[5] == 5.0f);
  old.reset();
  std::thread([&] { versioned.reset(); }).join();
}

int main(int argc, char **argv) {
  if (argc != 2) return 2;
  check_dlpack();
  check_self_test();
  check_versions();
  check_views();
  check_contexts();
  check_operators(xserv::Context(XSERV_DEVICE_CPU));
  check_ownership(argv[1]);
  check_loading(argv[1]);
  xserv::Model model(argv[1]);
  check_text(model);
  check_messages(model);
  check_answers(model);
  check_choosing(model);
  check_forms(model);
  check_streaming(model);
  check_submitting(argv[1], model);
}
