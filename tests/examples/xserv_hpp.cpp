// Tries everything that xserv.hpp has: xserv_hpp MODEL. Ends with 0 if all of it is right.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
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

static void check_ownership(const std::string &path) {
  static_assert(!std::is_copy_constructible_v<xserv::Model> && !std::is_copy_assignable_v<xserv::Model>);
  static_assert(!std::is_copy_constructible_v<xserv::Result> && !std::is_copy_constructible_v<xserv::Detokenizer>);
  static_assert(std::is_nothrow_move_constructible_v<xserv::Model> && std::is_nothrow_move_assignable_v<xserv::Model>);

  xserv::Model one(path), two = std::move(one);
  REQUIRE(one.get() == nullptr && two.get() != nullptr);
  REQUIRE(thrown_by([&] { one.tokenize("x"); }) != XSERV_STATUS_OK);
  one = std::move(two);
  REQUIRE(!one.tokenize("x").empty());

  // What comes from a model outlives it.
  auto result = one.generate(xserv::Request::from_prompt("Once").max_tokens(4).ignore_eos(true));
  auto detokenizer = one.detokenizer();
  auto ids = one.tokenize("naïve 🙂");
  { auto gone = std::move(one); }
  REQUIRE(result.token_ids().size() == 4);
  std::string text;
  for (auto id : ids) text += detokenizer.push(id);
  REQUIRE(text + detokenizer.finish() == "naïve 🙂");
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
}

static void check_streaming(const xserv::Model &model) {
  auto request = xserv::Request::from_prompt("Once upon a time").temperature(0).max_tokens(400).ignore_eos(true);
  std::string text;
  auto result = model.generate(request, [&](std::string_view piece) {
    text += piece;
    return true;
  });
  REQUIRE(text == result.text() && result.finish_reason() == XSERV_FINISH_MAX_TOKENS);

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
  }
  REQUIRE(model.stats().num_running == 0 && model.stats().total_generated_tokens >= 180);

  // What a waker throws goes nowhere; it is not called once the submission is gone.
  auto calls = std::make_shared<std::atomic<int>>(0);
  xserv::SubmitOptions options;
  options.wake([calls] {
    ++*calls;
    throw std::runtime_error("dropped");
  });
  request.num_samples(1).max_tokens(XSERV_UNSET_INT);
  auto running = model.submit(request, options);
  while (!running.poll()) std::this_thread::yield();
  REQUIRE(*calls >= 1 && running.next().kind == XSERV_EVENT_TOKEN);
  auto moved = std::move(running);
  REQUIRE(thrown_by([&] { running.next(); }) != XSERV_STATUS_OK);
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
    xserv::Model other(path, xserv::LoadOptions().max_batch_size(2).prefix_cache(false));
    auto open = xserv::Request::from_prompt("Once").ignore_eos(true);
    for (int i = 0; i < 5; i++) left.push_back(other.submit(open));
  }
  for (auto &each : left) {
    auto event = each.next();
    while (event.kind != XSERV_EVENT_END) event = each.next();
    REQUIRE(event.finish_reason == XSERV_FINISH_CANCELLED);
  }
}

int main(int argc, char **argv) {
  if (argc != 2) return 2;
  check_ownership(argv[1]);
  check_loading(argv[1]);
  xserv::Model model(argv[1]);
  check_text(model);
  check_streaming(model);
  check_submitting(argv[1], model);
}
