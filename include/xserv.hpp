/*
 * xserv for C++17: owning handles, exceptions and std types over xserv.h, in this header alone.
 *
 *     xserv::Model model("path/to/folder");
 *     model.generate(xserv::Request::from_prompt("Once upon a time").max_tokens(64),
 *                    [](std::string_view text) { std::cout << text << std::flush; return true; });
 *
 * Handles can be moved, not copied, and free themselves. A call that fails throws xserv::Error.
 * Threads are as in xserv.h: several threads may use any object at once, except a Detokenizer (one
 * thread at a time) and an object that is being moved from, assigned to or destroyed. An exception
 * thrown by a callback stops the call and is rethrown from it; it never crosses the C code.
 */

#ifndef XSERV_HPP
#define XSERV_HPP

#if __cplusplus < 201703L
#error "xserv.hpp needs C++17: compile with -std=c++17 (in CMake: set CMAKE_CXX_STANDARD to 17)"
#else

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <xserv.h>

namespace xserv {

/* A failed call: what() is the library's sentence, status() its status code. */
class Error : public std::runtime_error {
 public:
  Error(xserv_status status, const std::string &message) : std::runtime_error(message), status_(status) {}
  xserv_status status() const noexcept { return status_; }
  const char *status_name() const noexcept { return xserv_status_name(static_cast<std::uint32_t>(status_)); }

 private:
  xserv_status status_;
};

using TokenId = std::uint32_t;
using ModelInfo = xserv_model_info;
using InspectionInfo = xserv_inspection_info;
using MemoryPlan = xserv_memory_plan;
using ResultInfo = xserv_result_info;
using ModelStats = xserv_model_stats;

/* One step of a generation, for callbacks that want more than the text. Valid during the callback
 * only. */
using TokenEvent = xserv_token_event;

namespace detail {

inline void check(xserv_status status) {
  if (status != XSERV_STATUS_OK) throw Error(status, xserv_last_error());
}

/* For functions that return NULL for a bad handle. */
template <typename T>
T *check(T *pointer) {
  if (pointer == nullptr) throw Error(XSERV_STATUS_BAD_HANDLE, xserv_last_error());
  return pointer;
}

template <typename Handle, void (*Free)(Handle *)>
struct Deleter {
  void operator()(Handle *handle) const noexcept { Free(handle); }
};
template <typename Handle, void (*Free)(Handle *)>
using Owner = std::unique_ptr<Handle, Deleter<Handle, Free>>;

using ModelHandle = Owner<xserv_model, xserv_model_free>;
using ResultHandle = Owner<xserv_result, xserv_result_free>;
using TextHandle = Owner<xserv_text, xserv_text_free>;
using TokensHandle = Owner<xserv_tokens, xserv_tokens_free>;
using InspectionHandle = Owner<xserv_inspection, xserv_inspection_free>;
using DetokenizerHandle = Owner<xserv_detokenizer, xserv_detokenizer_free>;
using CancelHandle = Owner<xserv_cancel_token, xserv_cancel_token_free>;
using SubmissionHandle = Owner<xserv_submission, xserv_submission_free>;

inline std::string take_text(xserv_text *raw) {
  TextHandle text(raw);
  std::size_t len = 0;
  const char *bytes = check(xserv_text_data(text.get(), &len));
  return std::string(bytes, len);
}

/* A callable and the exception that it threw. Callbacks of the library get a pointer to it. */
template <typename Function>
struct Guarded {
  Function &function;
  std::exception_ptr thrown;

  template <typename... Arguments>
  bool call(Arguments &&...arguments) noexcept {
    if (thrown) return false;
    try {
      return function(std::forward<Arguments>(arguments)...);
    } catch (...) {
      thrown = std::current_exception();
      return false;
    }
  }
  void rethrow() const {
    if (thrown) std::rethrow_exception(thrown);
  }
};

}  // namespace detail

/* How to load a model. Setters can be chained; unset options have the library's defaults. */
class LoadOptions {
 public:
  LoadOptions() { xserv_load_options_default(&raw_); }

  LoadOptions &device(xserv_device_kind kind) { return raw_.device_kind = static_cast<std::uint32_t>(kind), *this; }
  LoadOptions &device_index(std::uint32_t index) { return raw_.device_index = index, *this; }
  LoadOptions &dtype(xserv_dtype type) { return raw_.dtype = static_cast<std::uint32_t>(type), *this; }
  LoadOptions &num_threads(std::uint32_t count) { return raw_.num_threads = count, *this; }
  LoadOptions &random_weights(bool on) { return raw_.random_weights = on, *this; }
  LoadOptions &map_files(bool on) { return raw_.map_files = on, *this; }
  LoadOptions &max_context_tokens(std::uint64_t count) { return raw_.max_context_tokens = count, *this; }
  LoadOptions &kv_cache_tokens(std::uint64_t count) { return raw_.kv_cache_tokens = count, *this; }
  LoadOptions &max_memory_bytes(std::uint64_t bytes) { return raw_.max_memory_bytes = bytes, *this; }
  LoadOptions &deterministic(bool on) { return raw_.deterministic = on, *this; }
  LoadOptions &max_batch_size(std::uint32_t count) { return raw_.max_batch_size = count, *this; }
  LoadOptions &max_prefill_tokens(std::uint64_t count) { return raw_.max_prefill_tokens = count, *this; }
  LoadOptions &max_swap_bytes(std::uint64_t bytes) { return raw_.max_swap_bytes = bytes, *this; }
  LoadOptions &prefix_cache(bool on) { return raw_.prefix_cache = on, *this; }
  /* Called with the progress of the load, 0 to 1; returning false cancels it. */
  LoadOptions &progress(std::function<bool(float)> f) { return progress_ = std::move(f), *this; }
  /* Called with log messages (level, target, message), on this thread while the model is loaded and then
   * on a thread of the model's, until it is freed. Exceptions from it are dropped. */
  LoadOptions &log(std::function<void(xserv_log_level, const char *, const char *)> f) { return log_ = std::move(f), *this; }

 private:
  friend class Model;
  friend MemoryPlan plan(const std::string &path, const LoadOptions &options);
  xserv_load_options raw_;
  std::function<bool(float)> progress_;
  std::function<void(xserv_log_level, const char *, const char *)> log_;
};

/* A switch that stops requests from another thread. Must outlive the calls that carry it. */
class CancelToken {
 public:
  CancelToken() {
    xserv_cancel_token *raw = nullptr;
    detail::check(xserv_cancel_token_new(&raw));
    handle_.reset(raw);
  }
  void cancel() const { detail::check(xserv_cancel_token_cancel(handle_.get())); }
  const xserv_cancel_token *get() const noexcept { return handle_.get(); }

 private:
  detail::CancelHandle handle_;
};

/* A request to generate. Setters can be chained; unset values come from the model's
 * generation_config.json. Each has the meaning of the field of xserv_request. */
class Request {
 public:
  static Request from_prompt(std::string text) {
    Request request;
    request.kind_ = Kind::prompt, request.text_ = std::move(text);
    return request;
  }
  static Request from_tokens(std::vector<TokenId> ids) {
    Request request;
    request.kind_ = Kind::tokens, request.tokens_ = std::move(ids);
    return request;
  }
  /* A JSON array of messages, for the model's chat template. */
  static Request from_messages(std::string json) {
    Request request;
    request.kind_ = Kind::messages, request.text_ = std::move(json);
    return request;
  }

  Request &tools(std::string json) { return tools_ = std::move(json), *this; }
  Request &template_variables(std::string json) { return variables_ = std::move(json), *this; }
  Request &stop(std::string text) { return stop_strings_.push_back(std::move(text)), *this; }
  Request &stop_token(TokenId id) { return stop_tokens_.push_back(id), *this; }
  Request &cancel(const CancelToken &token) { return raw_.cancel = token.get(), *this; }
  Request &max_tokens(std::uint32_t count) { return raw_.max_tokens = count, *this; }
  Request &temperature(float value) { return raw_.temperature = value, *this; }
  Request &top_k(std::uint32_t count) { return raw_.top_k = count, *this; }
  Request &top_p(float value) { return raw_.top_p = value, *this; }
  Request &min_p(float value) { return raw_.min_p = value, *this; }
  Request &repetition_penalty(float value) { return raw_.repetition_penalty = value, *this; }
  Request &presence_penalty(float value) { return raw_.presence_penalty = value, *this; }
  Request &frequency_penalty(float value) { return raw_.frequency_penalty = value, *this; }
  Request &seed(std::uint64_t value) { return raw_.seed = value, *this; }
  Request &add_generation_prompt(bool on) { return raw_.add_generation_prompt = on, *this; }
  Request &add_special_tokens(bool on) { return raw_.add_special_tokens = on, *this; }
  Request &parse_special_tokens(bool on) { return raw_.parse_special_tokens = on, *this; }
  Request &skip_special_tokens(bool on) { return raw_.skip_special_tokens = on, *this; }
  Request &ignore_eos(bool on) { return raw_.ignore_eos = on, *this; }
  Request &num_samples(std::uint32_t count) { return raw_.num_samples = count, *this; }
  Request &priority(std::int32_t value) { return raw_.priority = value, *this; }
  Request &cache_key(std::uint64_t key) { return raw_.cache_key = key, *this; }
  /* Counted from the call; a negative limit means no time at all. */
  Request &time_limit(std::chrono::milliseconds limit) {
    return raw_.time_limit_ms = limit.count() > 0 ? static_cast<std::uint64_t>(limit.count()) : 1, *this;
  }

 private:
  friend class Model;
  enum class Kind { prompt, tokens, messages };

  Request() { xserv_request_default(&raw_); }

  /* Calls f with the C struct, whose pointers are valid for that call only. */
  template <typename Function>
  auto with_raw(Function &&f) const {
    xserv_request raw = raw_;
    std::vector<const char *> stops;
    for (const std::string &stop : stop_strings_) stops.push_back(stop.c_str());
    switch (kind_) {
      case Kind::prompt:
        raw.prompt = text_.c_str(), raw.prompt_len = text_.size();
        break;
      case Kind::tokens: {
        static constexpr TokenId none = 0; /* the library refuses an empty list */
        raw.prompt_tokens = tokens_.empty() ? &none : tokens_.data();
        raw.num_prompt_tokens = tokens_.size();
        break;
      }
      case Kind::messages:
        raw.messages_json = text_.c_str();
        break;
    }
    if (!tools_.empty()) raw.tools_json = tools_.c_str();
    if (!variables_.empty()) raw.template_variables_json = variables_.c_str();
    raw.stop_strings = stops.data(), raw.num_stop_strings = stops.size();
    raw.stop_token_ids = stop_tokens_.data(), raw.num_stop_token_ids = stop_tokens_.size();
    return f(raw);
  }

  xserv_request raw_;
  Kind kind_ = Kind::prompt;
  std::string text_, tools_, variables_;
  std::vector<TokenId> tokens_, stop_tokens_;
  std::vector<std::string> stop_strings_;
};

/* The result of a generation: the first of several samples, and sample() for each. The views and
 * pointers that it returns live as long as it does. */
class Result {
 public:
  const ResultInfo &info() const noexcept { return info_; }
  std::string_view text() const noexcept { return {info_.text, info_.text_len}; }
  std::vector<TokenId> token_ids() const { return {info_.token_ids, info_.token_ids + info_.num_tokens}; }
  xserv_finish_reason finish_reason() const noexcept { return static_cast<xserv_finish_reason>(info_.finish_reason); }

  std::size_t num_samples() const noexcept { return info_.num_samples; }
  ResultInfo sample(std::size_t index) const {
    ResultInfo info{};
    info.struct_size = sizeof info;
    detail::check(xserv_result_get_sample(handle_.get(), index, &info));
    return info;
  }

 private:
  friend class Model;
  friend class Submission;
  explicit Result(xserv_result *raw) : handle_(raw) {
    info_.struct_size = sizeof info_;
    detail::check(xserv_result_get_info(raw, &info_));
  }
  detail::ResultHandle handle_;
  ResultInfo info_{};
};

/* An event of a submission: kind says which of the other fields are set, as in xserv_event. */
struct Event {
  xserv_event_kind kind = XSERV_EVENT_NONE;
  std::uint32_t sample = 0;
  std::string text;
  TokenId token_id = XSERV_NO_TOKEN;
  std::uint32_t num_tokens = 0;
  xserv_finish_reason finish_reason{};
};

/* How to be notified of a submission's events. A notification is given once: take events until
 * there are none before waiting again. */
class SubmitOptions {
 public:
  SubmitOptions() { xserv_submit_options_default(&raw_); }

  /* Called when there are events, on one of the library's threads: it must be quick, and may do
   * what does not wait for the model: submit, poll, take events with a timeout of zero, cancel and
   * destroy. Exceptions from it are dropped. */
  SubmitOptions &wake(std::function<void()> f) { return wake_ = std::move(f), *this; }
  /* A non-blocking descriptor, such as an eventfd; the caller owns it. */
  SubmitOptions &wake_fd(int descriptor) { return raw_.wake_fd = descriptor, *this; }

 private:
  friend class Model;
  xserv_submit_options raw_;
  std::function<void()> wake_;
};

/* A submitted request. Destroying it cancels the request if it still runs. */
class Submission {
 public:
  Submission(Submission &&) noexcept = default;
  Submission &operator=(Submission &&other) noexcept {
    /* The handle first: afterwards nobody calls the old function. */
    handle_ = std::move(other.handle_);
    wake_ = std::move(other.wake_);
    return *this;
  }

  /* Waits for the next event. The failure of a sample is thrown; the next call continues with the
   * others. */
  Event next() { return take(XSERV_WAIT_FOREVER); }
  /* Returns the next event, or XSERV_EVENT_NONE when there is none within the timeout; zero does
   * not wait. */
  Event next(std::chrono::milliseconds timeout) {
    constexpr std::int64_t most = XSERV_WAIT_FOREVER - 1;
    const std::int64_t count = timeout.count();
    return take(static_cast<std::uint32_t>(count < 0 ? 0 : count < most ? count : most));
  }
  /* Whether next() would have an event without waiting. */
  bool poll() const {
    std::uint8_t ready = 0;
    detail::check(xserv_poll(handle_.get(), &ready));
    return ready != 0;
  }
  /* May be called from any thread, at any time. */
  void cancel() const { detail::check(xserv_cancel(handle_.get())); }
  /* Takes the result, once, after XSERV_EVENT_DONE. */
  Result take_result() {
    xserv_result *result = nullptr;
    detail::check(xserv_submission_take_result(handle_.get(), &result));
    return Result(result);
  }

 private:
  friend class Model;
  /* Also kept alive by a call under way, which may destroy the submission. */
  struct Wake : std::enable_shared_from_this<Wake> {
    std::function<void()> function;
  };
  Submission() = default;

  static void on_wake(void *self) {
    auto kept = static_cast<Wake *>(self)->shared_from_this();
    try {
      kept->function();
    } catch (...) { /* there is no one to tell */
    }
  }
  Event take(std::uint32_t timeout_ms) {
    xserv_event raw{};
    raw.struct_size = sizeof raw;
    detail::check(xserv_next(handle_.get(), timeout_ms, &raw));
    Event event;
    event.kind = static_cast<xserv_event_kind>(raw.kind), event.sample = raw.sample;
    event.text.assign(raw.text, raw.text_len);
    event.token_id = raw.token_id, event.num_tokens = raw.num_tokens;
    event.finish_reason = static_cast<xserv_finish_reason>(raw.finish_reason);
    return event;
  }

  /* In this order, so that the handle is freed first. */
  std::shared_ptr<Wake> wake_;
  detail::SubmissionHandle handle_;
};

/* Turns token ids that come one at a time into text. One thread at a time may use it. */
class Detokenizer {
 public:
  /* Returns the text that is final now: whole UTF-8 characters, possibly none. */
  std::string push(TokenId id) {
    const char *text = nullptr;
    std::size_t len = 0;
    detail::check(xserv_detokenizer_push(handle_.get(), id, &text, &len));
    return std::string(text, len);
  }
  /* Returns the text that is still held back; the object is then ready for another stream. */
  std::string finish() {
    const char *text = nullptr;
    std::size_t len = 0;
    detail::check(xserv_detokenizer_finish(handle_.get(), &text, &len));
    return std::string(text, len);
  }

 private:
  friend class Model;
  explicit Detokenizer(xserv_detokenizer *raw) : handle_(raw) {}
  detail::DetokenizerHandle handle_;
};

/* The findings about a folder that was not loaded. Pointers in info() live as long as it does. */
class Inspection {
 public:
  explicit Inspection(const std::string &path) {
    xserv_inspection *raw = nullptr;
    detail::check(xserv_inspect(path.c_str(), &raw));
    handle_.reset(raw);
    info_.struct_size = sizeof info_;
    detail::check(xserv_inspection_get_info(raw, &info_));
  }
  const InspectionInfo &info() const noexcept { return info_; }
  bool supported() const noexcept { return info_.supported != 0; }

 private:
  detail::InspectionHandle handle_;
  InspectionInfo info_{};
};

inline Inspection inspect(const std::string &path) { return Inspection(path); }

/* Returns the memory that a model would take, without loading it, as xserv_plan() does. */
inline MemoryPlan plan(const std::string &path, const LoadOptions &options = LoadOptions()) {
  MemoryPlan plan{};
  plan.struct_size = sizeof plan;
  detail::check(xserv_plan(path.c_str(), &options.raw_, &plan));
  return plan;
}

/* A loaded model. */
class Model {
 public:
  explicit Model(const std::string &path, const LoadOptions &options = LoadOptions()) {
    xserv_load_options raw = options.raw_;
    detail::Guarded<const std::function<bool(float)>> progress{options.progress_, nullptr};
    if (options.progress_) {
      raw.progress_user_data = &progress;
      raw.progress = [](float fraction, void *self) {
        return static_cast<decltype(progress) *>(self)->call(fraction);
      };
    }
    if (options.log_) {
      log_.reset(new Log(options.log_));
      raw.log_user_data = log_.get();
      raw.log = [](std::uint32_t level, const char *target, const char *message, void *self) {
        try {
          (*static_cast<Log *>(self))(static_cast<xserv_log_level>(level), target, message);
        } catch (...) { /* there is no one to tell */
        }
      };
    }
    xserv_model *model = nullptr;
    xserv_status status = xserv_load(path.c_str(), &raw, &model);
    handle_.reset(model);
    progress.rethrow();
    detail::check(status);
  }

  Model(Model &&) noexcept = default;
  Model &operator=(Model &&other) noexcept {
    handle_ = std::move(other.handle_); /* the old model is freed before what it logs to */
    log_ = std::move(other.log_);
    return *this;
  }

  const xserv_model *get() const noexcept { return handle_.get(); }

  /* Pointers in it live as long as the model. */
  ModelInfo info() const {
    ModelInfo info{};
    info.struct_size = sizeof info;
    detail::check(xserv_model_get_info(get(), &info));
    return info;
  }

  std::vector<TokenId> tokenize(std::string_view text, bool parse_special_tokens = true,
                                bool add_special_tokens = true) const {
    xserv_tokenize_options options;
    xserv_tokenize_options_default(&options);
    options.parse_special_tokens = parse_special_tokens;
    options.add_special_tokens = add_special_tokens;
    xserv_tokens *raw = nullptr;
    const char *bytes = text.data() != nullptr ? text.data() : "";
    detail::check(xserv_tokenize(get(), bytes, text.size(), &options, &raw));
    detail::TokensHandle tokens(raw);
    std::size_t count = 0;
    const TokenId *ids = xserv_tokens_data(raw, &count);
    return count == 0 ? std::vector<TokenId>() : std::vector<TokenId>(ids, ids + count);
  }

  std::string detokenize(const std::vector<TokenId> &ids, bool skip_special_tokens = true) const {
    xserv_text *raw = nullptr;
    detail::check(xserv_detokenize(get(), ids.data(), ids.size(), skip_special_tokens, &raw));
    return detail::take_text(raw);
  }

  Detokenizer detokenizer(bool skip_special_tokens = true) const {
    xserv_detokenizer *raw = nullptr;
    detail::check(xserv_detokenizer_new(get(), skip_special_tokens, &raw));
    return Detokenizer(raw);
  }

  /* Messages, tools and variables are JSON; the latter two may be empty. */
  std::string apply_chat_template(const std::string &messages, bool add_generation_prompt = true,
                                  const std::string &tools = "", const std::string &variables = "") const {
    xserv_chat_options options;
    xserv_chat_options_default(&options);
    options.messages_json = messages.c_str();
    options.add_generation_prompt = add_generation_prompt;
    if (!tools.empty()) options.tools_json = tools.c_str();
    if (!variables.empty()) options.template_variables_json = variables.c_str();
    xserv_text *raw = nullptr;
    detail::check(xserv_apply_chat_template(get(), &options, &raw));
    return detail::take_text(raw);
  }

  /* Returns scores before softmax, [rows, vocab_size] row-major: one row per token, or of the last
   * token only. `cancel` stops it from another thread. */
  std::vector<float> logits(const std::vector<TokenId> &ids, xserv_logits_rows rows = XSERV_LOGITS_ALL,
                            const CancelToken *cancel = nullptr) const {
    std::size_t num_rows = rows == XSERV_LOGITS_ALL ? ids.size() : 1;
    std::vector<float> scores(num_rows * info().vocab_size);
    xserv_logits_options options;
    xserv_logits_options_default(&options);
    options.rows = static_cast<std::uint32_t>(rows);
    if (cancel != nullptr) options.cancel = cancel->get();
    detail::check(xserv_logits(get(), ids.data(), ids.size(), &options, scores.data(), scores.size()));
    return scores;
  }

  Result generate(const Request &request) const {
    return request.with_raw([this](const xserv_request &raw) {
      xserv_result *result = nullptr;
      detail::check(xserv_generate(get(), &raw, nullptr, nullptr, &result));
      return Result(result);
    });
  }

  /* Streaming: `callback` receives each piece of text (std::string_view), or the whole event
   * (const TokenEvent &), as it comes, and returns true to continue, false to stop. */
  template <typename Callback>
  Result generate(const Request &request, Callback &&callback) const {
    using Function = std::remove_reference_t<Callback>;
    detail::Guarded<Function> guarded{callback, nullptr};
    return request.with_raw([&](const xserv_request &raw) {
      xserv_result *result = nullptr;
      xserv_status status = xserv_generate(get(), &raw, &Model::on_token<Function>, &guarded, &result);
      detail::ResultHandle owner(result);
      guarded.rethrow();
      detail::check(status);
      return Result(owner.release());
    });
  }

  /* Submits a request and returns; the submission delivers what is generated. For event loops. */
  Submission submit(const Request &request, const SubmitOptions &options = SubmitOptions()) const {
    Submission submission;
    xserv_submit_options raw_options = options.raw_;
    if (options.wake_) {
      submission.wake_ = std::make_shared<Submission::Wake>();
      submission.wake_->function = options.wake_;
      raw_options.wake_user_data = submission.wake_.get();
      raw_options.wake = &Submission::on_wake;
    }
    request.with_raw([&](const xserv_request &raw) {
      xserv_submission *handle = nullptr;
      detail::check(xserv_submit(get(), &raw, &raw_options, &handle));
      submission.handle_.reset(handle);
    });
    return submission;
  }

  /* Returns the state of the model's requests, and totals. */
  ModelStats stats() const {
    ModelStats stats{};
    stats.struct_size = sizeof stats;
    detail::check(xserv_model_get_stats(get(), &stats));
    return stats;
  }

 private:
  template <typename Function>
  static bool on_token(const xserv_token_event *event, void *self) {
    auto &guarded = *static_cast<detail::Guarded<Function> *>(self);
    if constexpr (std::is_invocable_r_v<bool, Function &, const TokenEvent &>)
      return guarded.call(*event);
    else
      return event->text_len == 0 || guarded.call(std::string_view(event->text, event->text_len));
  }

  using Log = std::function<void(xserv_log_level, const char *, const char *)>;
  std::unique_ptr<Log> log_; /* outlives the model */
  detail::ModelHandle handle_;
};

}  // namespace xserv

#endif /* C++17 */

#endif
