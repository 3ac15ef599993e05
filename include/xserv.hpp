/*
 * xserv for C++17: owning handles, exceptions and std types over xserv.h, in this header alone.
 *
 *     xserv::Model model("path/to/folder");
 *     model.generate(xserv::Request::from_prompt("Once upon a time").max_tokens(64),
 *                    [](std::string_view text) { std::cout << text << std::flush; });
 *
 *     xserv::Context context(XSERV_DEVICE_CPU);
 *     std::vector<float> x{1, 2, 3, 4}, weight{1, 1}, out(4);
 *     context.rms_norm({x, {2, 2}}, weight, 1e-6f, {out, {2, 2}});
 *
 * A function here is one of xserv.h or xserv_ops.h, which say in full what it does. What is added is
 * the same everywhere:
 *
 * - Ownership. A handle belongs to its object, which frees it. Such objects can be moved, and cannot
 *   be copied. One that was moved from may be assigned to or destroyed; every other use throws an
 *   xserv::Error with XSERV_STATUS_BAD_HANDLE that says so. What a handle needs stays alive with it,
 *   so that objects may be destroyed in any order.
 * - Failure. A call that fails throws an xserv::Error, with the status and the library's sentence.
 *   Where memory for a std type is lacking, std::bad_alloc is thrown.
 * - Lifetime. Functions that return a view or a pointer into an object cannot be called on a
 *   temporary, where the result would dangle: `model.generate(request).info()` does not compile.
 * - Callbacks may return nothing, or a bool: true to continue, false to stop. An exception from a
 *   callback stops the call and is thrown by it; it never crosses the C code.
 * - Threads. Several threads may use one object at once, unless its class says otherwise. While an
 *   object is assigned to, moved from or destroyed, no other thread may use it. Options, requests
 *   and views are plain values without locks.
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
#include <initializer_list>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <xserv.h>

namespace xserv {

/* A failed call. what() is the library's sentence, status() its status code. It is a value
 * like any other exception, which can be copied and outlives what failed. */
class Error : public std::runtime_error {
 public:
  Error(xserv_status status, const std::string &message) : std::runtime_error(message), status_(status) {}
  xserv_status status() const noexcept { return status_; }
  /* The name of the status, for example "XSERV_STATUS_NOT_FOUND": a static string. */
  const char *status_name() const noexcept { return xserv_status_name(static_cast<std::uint32_t>(status_)); }

 private:
  xserv_status status_;
};

/* The version of the library that is loaded, for example "0.3.0": a static string. */
inline const char *version() noexcept { return xserv_version(); }
/* The ABI version of the library that is loaded, which should equal XSERV_ABI_VERSION. */
inline std::uint32_t abi_version() noexcept { return xserv_abi_version(); }
/* The name of a finish reason, for example "XSERV_FINISH_MAX_TOKENS": a static string. */
inline const char *finish_reason_name(xserv_finish_reason reason) noexcept {
  return xserv_finish_reason_name(static_cast<std::uint32_t>(reason));
}

using TokenId = std::uint32_t;
using LogitBias = xserv_logit_bias;
using LogProb = xserv_log_prob;
using LogitsEvent = xserv_logits_event;
using TokenScore = xserv_token_score;
using ModelInfo = xserv_model_info;
using InspectionInfo = xserv_inspection_info;
using MemoryPlan = xserv_memory_plan;
using ResultInfo = xserv_result_info;
using RawToolCall = xserv_tool_call;
using ModelStats = xserv_model_stats;
using MemoryStats = xserv_memory_stats;
using GradCheckResult = xserv_grad_check_result;
using SelfTestLine = xserv_self_test_line;

/* One step of a generation, for callbacks that want more than the text. `text` is valid during the
 * callback only. */
struct TokenEvent {
  std::string_view text;                /* what this token made final: whole characters, possibly none */
  TokenId token_id = XSERV_NO_TOKEN;    /* XSERV_NO_TOKEN: text that was held back, and no new token */
  std::uint32_t num_tokens = 0;         /* of the sample so far, this one included */
  std::uint32_t sample = 0;             /* which sample of the request, from 0 */
};

/* A call of a tool in an answer, as in xserv_tool_call. */
struct ToolCall {
  std::string id, name;
  std::string arguments_json;
  bool is_complete = false; /* false: it was cut, or went wrong; do not act on it */
};

/* A std::string that refuses to become a std::string_view while it is a temporary, since such a
 * view dangles as soon as it is made. text() of a temporary Result returns it; keep it as auto or
 * std::string. */
class Text : public std::string {
 public:
  explicit Text(std::string_view text) : std::string(text) {}
  operator std::string_view() const & noexcept { return {data(), size()}; }
  operator std::string_view() const && = delete; /* the view would dangle: keep the text as a std::string */

  /* With whatever is text, temporary or not. */
  friend bool operator==(const Text &a, const Text &b) noexcept { return a.compare(b) == 0; }
  friend bool operator!=(const Text &a, const Text &b) noexcept { return a.compare(b) != 0; }
  template <typename Other, typename = std::enable_if_t<std::is_convertible_v<const Other &, std::string_view>>>
  friend bool operator==(const Text &a, const Other &b) noexcept { return a.compare(b) == 0; }
  template <typename Other, typename = std::enable_if_t<std::is_convertible_v<const Other &, std::string_view>>>
  friend bool operator==(const Other &a, const Text &b) noexcept { return b.compare(a) == 0; }
  template <typename Other, typename = std::enable_if_t<std::is_convertible_v<const Other &, std::string_view>>>
  friend bool operator!=(const Text &a, const Other &b) noexcept { return a.compare(b) != 0; }
  template <typename Other, typename = std::enable_if_t<std::is_convertible_v<const Other &, std::string_view>>>
  friend bool operator!=(const Other &a, const Text &b) noexcept { return b.compare(a) != 0; }
};

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

[[noreturn]] inline void invalid(const std::string &message) {
  throw Error(XSERV_STATUS_INVALID_ARGUMENT, message);
}

[[noreturn]] inline void moved_from(const char *type) {
  throw Error(XSERV_STATUS_BAD_HANDLE, std::string("this xserv::") + type + " is moved-from and holds nothing");
}

/* The text as C takes it. One that contains a NUL would silently end there. */
inline const char *c_string(const std::string &text, const char *what) {
  if (text.find('\0') != std::string::npos) invalid(std::string(what) + " contains a NUL");
  return text.c_str();
}

/* Owns a handle. need() is for every use of it, and throws once the handle was moved away. */
template <typename Raw, void (*Free)(Raw *)>
class Handle {
 public:
  explicit Handle(Raw *raw = nullptr) noexcept : raw_(raw) {}
  Raw *get() const noexcept { return raw_.get(); }
  Raw *need(const char *type) const {
    if (!raw_) moved_from(type);
    return raw_.get();
  }
  void reset(Raw *raw) noexcept { raw_.reset(raw); }
  Raw *release() noexcept { return raw_.release(); }

 private:
  struct Deleter {
    void operator()(Raw *raw) const noexcept { Free(raw); }
  };
  std::unique_ptr<Raw, Deleter> raw_;
};

using ModelHandle = Handle<xserv_model, xserv_model_free>;
using ResultHandle = Handle<xserv_result, xserv_result_free>;
using TextHandle = Handle<xserv_text, xserv_text_free>;
using TokensHandle = Handle<xserv_tokens, xserv_tokens_free>;
using InspectionHandle = Handle<xserv_inspection, xserv_inspection_free>;
using DetokenizerHandle = Handle<xserv_detokenizer, xserv_detokenizer_free>;
using SubmissionHandle = Handle<xserv_submission, xserv_submission_free>;
using ContextHandle = Handle<xserv_context, xserv_context_free>;
using OwnedTensorHandle = Handle<xserv_owned_tensor, xserv_owned_tensor_free>;

inline std::string take_text(xserv_text *raw) {
  TextHandle text(raw);
  std::size_t len = 0;
  const char *bytes = check(xserv_text_data(text.get(), &len));
  return std::string(bytes, len);
}

inline std::vector<TokenId> take_tokens(xserv_tokens *raw) {
  TokensHandle tokens(raw);
  std::size_t count = 0;
  const TokenId *ids = xserv_tokens_data(raw, &count);
  return count == 0 ? std::vector<TokenId>() : std::vector<TokenId>(ids, ids + count);
}

/* Whether Function can be called with Arguments, and returns nothing or a bool. Other results, such
 * as the int of fputs(), would be taken for a wish to stop when they are 0. */
template <typename Function, typename... Arguments>
constexpr bool is_callback() {
  if constexpr (std::is_invocable_v<Function &, Arguments...>) {
    using Returned = std::decay_t<std::invoke_result_t<Function &, Arguments...>>;
    return std::is_void_v<Returned> || std::is_same_v<Returned, bool>;
  } else {
    return false;
  }
}

/* Calls a callback; one that returns nothing wants to go on. */
template <typename Function, typename... Arguments>
bool goes_on(Function &function, Arguments &&...arguments) {
  if constexpr (std::is_void_v<std::invoke_result_t<Function &, Arguments...>>) {
    function(std::forward<Arguments>(arguments)...);
    return true;
  } else {
    return function(std::forward<Arguments>(arguments)...);
  }
}

template <typename Function>
struct IsStdFunction : std::false_type {};
template <typename Signature>
struct IsStdFunction<std::function<Signature>> : std::true_type {};

/* Whether an optional callback is not there: nullptr, or an empty std::function. */
template <typename Function>
bool is_empty(const Function &function) {
  if constexpr (std::is_null_pointer_v<Function> || std::is_pointer_v<Function> || IsStdFunction<Function>::value)
    return function == nullptr;
  else
    return false;
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
      return goes_on(function, std::forward<Arguments>(arguments)...);
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

/* Options for loading a model. Setters can be chained; unset options have the library's defaults.
 * Each has the meaning of the field of xserv_load_options. Objects can be copied and used again. */
class LoadOptions {
 public:
  LoadOptions() { xserv_load_options_default(&raw_); }

  LoadOptions &device(xserv_device_kind kind) { return raw_.device_kind = static_cast<std::uint32_t>(kind), *this; }
  LoadOptions &device_index(std::uint32_t index) { return raw_.device_index = index, *this; }
  LoadOptions &dtype(xserv_dtype type) { return raw_.dtype = static_cast<std::uint32_t>(type), *this; }
  LoadOptions &num_threads(std::uint32_t count) { return raw_.num_threads = count, *this; }
  LoadOptions &weights(xserv_weights kind) { return raw_.weights = static_cast<std::uint32_t>(kind), *this; }
  LoadOptions &weights_group_size(std::uint32_t inputs) { return raw_.weights_group_size = inputs, *this; }
  LoadOptions &embeddings(xserv_weights kind) { return raw_.embeddings = static_cast<std::uint32_t>(kind), *this; }
  LoadOptions &kv_cache_format(xserv_kv_cache_format format) {
    return raw_.kv_cache_format = static_cast<std::uint32_t>(format), *this;
  }
  LoadOptions &activations(xserv_activations format) {
    return raw_.activations = static_cast<std::uint32_t>(format), *this;
  }
  /* The file in which quantised weights are kept; empty (default): none. */
  LoadOptions &kept_weights(std::string file) { return kept_weights_ = std::move(file), *this; }
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
  /* Called as f(float fraction) with the progress of the load, from 0 to 1, on the thread that
   * loads; returns nothing, or false to cancel. With nullptr nobody is told. */
  template <typename Function>
  LoadOptions &progress(Function f) {
    if constexpr (std::is_null_pointer_v<Function>) {
      progress_ = nullptr;
    } else {
      constexpr bool is_right = detail::is_callback<Function, float>() && std::is_copy_constructible_v<Function>;
      static_assert(is_right, "xserv: progress() takes a copyable function of a float that returns bool (true to "
                              "continue) or void");
      if constexpr (is_right) {
        progress_ = nullptr;
        if (!detail::is_empty(f))
          progress_ = [f = std::move(f)](float fraction) mutable { return detail::goes_on(f, fraction); };
      }
    }
    return *this;
  }
  /* Called as f(xserv_log_level level, const char *target, const char *message), on this thread
   * while the model is loaded and then on a thread of the model's, until it is freed; see
   * xserv_log_callback for what it may do. Exceptions from it are dropped. With nullptr nothing is
   * logged. */
  template <typename Function>
  LoadOptions &log(Function f) {
    constexpr bool is_right = std::is_copy_constructible_v<Function> &&
                              (std::is_null_pointer_v<Function> ||
                               std::is_invocable_v<Function &, xserv_log_level, const char *, const char *>);
    static_assert(is_right, "xserv: log() takes a copyable function of (xserv_log_level level, const char *target, "
                            "const char *message)");
    if constexpr (is_right) log_ = std::move(f);
    return *this;
  }

 private:
  friend class Model;
  friend MemoryPlan plan(const std::string &path, const LoadOptions &options);
  /* The options without their callbacks. They point into this object. */
  xserv_load_options plain() const {
    xserv_load_options raw = raw_;
    if (!kept_weights_.empty()) raw.kept_weights = detail::c_string(kept_weights_, "kept_weights");
    return raw;
  }
  xserv_load_options raw_;
  std::string kept_weights_;
  std::function<bool(float)> progress_;
  std::function<void(xserv_log_level, const char *, const char *)> log_;
};

/* A switch that stops requests, and calls of Model::logits() and score(), from another thread. Copies
 * share the switch, and so do the requests that carry it, so that it may be destroyed before them. Once
 * cancelled it stays so. */
class CancelToken {
 public:
  CancelToken() {
    xserv_cancel_token *raw = nullptr;
    detail::check(xserv_cancel_token_new(&raw));
    handle_ = std::shared_ptr<xserv_cancel_token>(raw, xserv_cancel_token_free);
  }
  /* May be called from any thread, any number of times, but not in a signal handler. */
  void cancel() const { detail::check(xserv_cancel_token_cancel(need().get())); }
  const xserv_cancel_token *get() const noexcept { return handle_.get(); }

 private:
  friend class Model;
  friend class Request;
  friend class ScoreOptions;
  const std::shared_ptr<xserv_cancel_token> &need() const {
    if (!handle_) detail::moved_from("CancelToken");
    return handle_;
  }
  std::shared_ptr<xserv_cancel_token> handle_;
};

/* A conversation: messages in the order in which they were said, and the JSON that a chat template
 * takes. It does the quoting, so that a content may be any UTF-8 text. It is a value,
 * which can be copied.
 *
 *     xserv::Messages messages;
 *     messages.system("You are brief.").user("Hello!");
 *     auto result = model.generate(xserv::Request::from_messages(messages));
 *     messages.assistant(result.text()).user("Tell me more."); */
class Messages {
 public:
  Messages() : handle_(made()) {}
  Messages(const Messages &other) : Messages() { add_json(other.json()); }
  Messages(Messages &&) noexcept = default;
  Messages &operator=(const Messages &other) { return *this = Messages(other); }
  Messages &operator=(Messages &&) noexcept = default;

  Messages &system(std::string_view content) { return add("system", content); }
  Messages &user(std::string_view content) { return add("user", content); }
  Messages &assistant(std::string_view content) { return add("assistant", content); }
  Messages &assistant(const Text &content) { return assistant(std::string_view(content)); } /* of a temporary Result */
  Messages &add(std::string_view role, std::string_view content) {
    const std::string role_text(role), content_text(content);
    detail::check(xserv_messages_add(need(), detail::c_string(role_text, "the role"),
                                     detail::c_string(content_text, "the content")));
    return *this;
  }
  /* Adds the result of a tool call; an empty id or name is left out. */
  Messages &tool_result(std::string_view call_id, std::string_view name, std::string_view content) {
    const std::string id_text(call_id), name_text(name), content_text(content);
    const char *id = detail::c_string(id_text, "the id of the call"), *tool = detail::c_string(name_text, "the name");
    detail::check(xserv_messages_add_tool_result(need(), *id ? id : nullptr, *tool ? tool : nullptr,
                                                 detail::c_string(content_text, "the content")));
    return *this;
  }
  /* Adds a message that is JSON already, for example one with tool calls, or an array of them. */
  Messages &add_json(const std::string &json) {
    detail::check(xserv_messages_add_json(need(), detail::c_string(json, "the JSON")));
    return *this;
  }

  std::size_t size() const { return xserv_messages_count(need()); }
  bool empty() const { return size() == 0; }
  /* Forgets `count` messages from number `first` on, to make room in the context. */
  void erase(std::size_t first, std::size_t count = 1) {
    const std::size_t all = size();
    if (first > all || count > all - first)
      detail::invalid("the conversation has " + std::to_string(all) + " messages, not " + std::to_string(count) +
                      " from number " + std::to_string(first) + " on");
    for (; count > 0; count--) detail::check(xserv_messages_remove(need(), first));
  }
  void clear() {
    for (std::size_t left = size(); left > 0; left--) erase(left - 1);
  }
  std::string json() const { return detail::check(xserv_messages_json(need())); }
  const xserv_messages *get() const noexcept { return handle_.get(); }

 private:
  static xserv_messages *made() {
    xserv_messages *raw = nullptr;
    detail::check(xserv_messages_new(&raw));
    return raw;
  }
  xserv_messages *need() const { return handle_.need("Messages"); }
  detail::Handle<xserv_messages, xserv_messages_free> handle_;
};

/* A request to generate. Setters can be chained; unset values come from the model's
 * generation_config.json. Each has the meaning of the field of xserv_request. It is a value, which
 * can be copied and used for any number of calls. A chain of setters returns a reference to the
 * object that it begins with: keep it as `auto request = ...`, not as `auto &`. */
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
  /* Messages for the model's chat template, or a JSON array of them. */
  static Request from_messages(std::string json) {
    Request request;
    request.kind_ = Kind::messages, request.text_ = std::move(json);
    return request;
  }
  static Request from_messages(const Messages &messages) { return from_messages(messages.json()); }

  Request &tools(std::string json) { return tools_ = std::move(json), *this; }
  Request &template_variables(std::string json) { return variables_ = std::move(json), *this; }
  /* Adds a stop string, or several. */
  Request &stop(std::string text) { return stop_strings_.push_back(std::move(text)), *this; }
  Request &stop(std::initializer_list<std::string_view> texts) { return add_stops(texts); }
  Request &stop(const std::vector<std::string> &texts) { return add_stops(texts); }
  /* Adds a stop token, or several. */
  Request &stop_token(TokenId id) { return stop_tokens_.push_back(id), *this; }
  Request &stop_tokens(const std::vector<TokenId> &ids) {
    return stop_tokens_.insert(stop_tokens_.end(), ids.begin(), ids.end()), *this;
  }
  /* Adds a number to the logit of a token, or to those of several: a list of {id, bias}, or any
   * container of pairs, such as a std::map<xserv::TokenId, float>. */
  Request &logit_bias(TokenId id, float bias) { return biases_.push_back(LogitBias{id, bias}), *this; }
  Request &logit_bias(std::initializer_list<LogitBias> biases) {
    return biases_.insert(biases_.end(), biases.begin(), biases.end()), *this;
  }
  template <typename Pairs>
  Request &logit_bias(const Pairs &biases) {
    for (const auto &[id, bias] : biases) biases_.push_back(LogitBias{id, bias});
    return *this;
  }
  /* The request shares the token's switch. */
  Request &cancel(const CancelToken &token) { return cancel_ = token.need(), *this; }
  Request &max_tokens(std::uint32_t count) { return raw_.max_tokens = count, *this; }
  Request &min_tokens(std::uint32_t count) { return raw_.min_tokens = count, *this; }
  Request &typical_p(float value) { return raw_.typical_p = value, *this; }
  Request &no_repeat_ngram_size(std::uint32_t size) { return raw_.no_repeat_ngram_size = size, *this; }
  /* The tokens with which the answer begins, whatever is likely. */
  Request &first_tokens(std::vector<TokenId> ids) { return first_tokens_ = std::move(ids), *this; }
  /* The form of the answer's text, of which the last one that is asked for counts: a JSON value that a
   * JSON schema allows, any JSON object, what a regular expression matches as a whole, a text of a
   * context-free grammar (EBNF of Lark), or one of several texts. See xserv_constraint_kind. */
  Request &json_schema(std::string schema) {
    return constrain(XSERV_CONSTRAINT_JSON_SCHEMA, std::move(schema));
  }
  Request &json_object() { return constrain(XSERV_CONSTRAINT_JSON_OBJECT, {}); }
  Request &regex(std::string expression) { return constrain(XSERV_CONSTRAINT_REGEX, std::move(expression)); }
  Request &grammar(std::string grammar) { return constrain(XSERV_CONSTRAINT_GRAMMAR, std::move(grammar)); }
  Request &choice(std::vector<std::string> texts) {
    constrain(XSERV_CONSTRAINT_CHOICE, {});
    return choices_ = std::move(texts), *this;
  }
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
  /* Tells the log-probability of every token, and of `num_top` of the most likely ones in its
   * place: see Event and Result. */
  Request &log_probs(std::uint32_t num_top = 0) { return raw_.num_log_probs = num_top, *this; }
  Request &processed_log_probs(bool on) { return raw_.processed_log_probs = on, *this; }
  /* Tells the log-probability of every token of the prompt, and of `num_top` of the most likely ones
   * in its place: see Result, and XSERV_EVENT_PROMPT, which SubmitOptions::events() must ask for. */
  Request &prompt_log_probs(std::uint32_t num_top = 0) { return raw_.num_prompt_log_probs = num_top, *this; }
  /* Called as f(const LogitsEvent &) before every choice of a token, on the thread in generate(), to
   * change event.logits[0] to [event.vocab_size - 1]; returns nothing, or false to stop. Exceptions
   * from it end generate(). submit() refuses such a request. With nullptr nobody is called. */
  template <typename Function>
  Request &on_logits(Function f) {
    if constexpr (std::is_null_pointer_v<Function>) {
      on_logits_ = nullptr;
    } else {
      constexpr bool is_right =
          std::is_copy_constructible_v<Function> && detail::is_callback<Function, const LogitsEvent &>();
      static_assert(is_right, "xserv: on_logits() takes a copyable function of const xserv::LogitsEvent &, which "
                              "returns bool (true to continue) or void");
      if constexpr (is_right)
        on_logits_ = [f = std::move(f)](const LogitsEvent &event) mutable { return detail::goes_on(f, event); };
    }
    return *this;
  }
  /* Takes the answer apart: see reasoning(), content() and tool_calls() of Result, and Event. */
  Request &answer_format(xserv_answer_format format) {
    return raw_.answer_format = static_cast<std::uint32_t>(format), *this;
  }
  /* Which of tools() the answer calls: as the model likes, none, or exactly one, any of them or the one of this
   * name, with arguments that its JSON schema allows. See xserv_tool_choice. */
  Request &tool_choice(xserv_tool_choice choice) {
    tool_choice_name_.reset();
    return raw_.tool_choice = static_cast<std::uint32_t>(choice), *this;
  }
  Request &tool_choice(std::string name) {
    raw_.tool_choice = XSERV_TOOL_CHOICE_NAMED;
    return tool_choice_name_ = std::move(name), *this;
  }
  /* Special tokens written in messages and tools become their ids: only for text that you trust. */
  Request &parse_special_in_messages(bool on) { return raw_.parse_special_in_messages = on, *this; }
  Request &ignore_eos(bool on) { return raw_.ignore_eos = on, *this; }
  Request &num_samples(std::uint32_t count) { return raw_.num_samples = count, *this; }
  Request &priority(std::int32_t value) { return raw_.priority = value, *this; }
  Request &cache_key(std::uint64_t key) { return raw_.cache_key = key, *this; }
  /* Counted from the call; zero or less means no time at all. */
  Request &time_limit(std::chrono::milliseconds limit) {
    return raw_.time_limit_ms = limit.count() > 0 ? static_cast<std::uint64_t>(limit.count()) : 1, *this;
  }

 private:
  friend class Model;
  enum class Kind { prompt, tokens, messages };

  Request() { xserv_request_default(&raw_); }

  Request &constrain(xserv_constraint_kind kind, std::string text) {
    raw_.constraint_kind = static_cast<std::uint32_t>(kind);
    choices_.clear();
    return constraint_ = std::move(text), *this;
  }

  template <typename Texts>
  Request &add_stops(const Texts &texts) {
    for (const auto &text : texts) stop_strings_.emplace_back(text);
    return *this;
  }

  /* Calls f with the C struct, whose pointers are valid for that call only. */
  template <typename Function>
  auto with_raw(Function &&f) const {
    xserv_request raw = raw_;
    std::vector<const char *> stops, choices;
    for (const std::string &text : choices_) choices.push_back(detail::c_string(text, "a choice"));
    for (const std::string &stop : stop_strings_) stops.push_back(detail::c_string(stop, "a stop string"));
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
        raw.messages_json = detail::c_string(text_, "the JSON of messages");
        break;
    }
    if (!tools_.empty()) raw.tools_json = detail::c_string(tools_, "the JSON of tools");
    if (!variables_.empty())
      raw.template_variables_json = detail::c_string(variables_, "the JSON of template variables");
    raw.stop_strings = stops.data(), raw.num_stop_strings = stops.size();
    raw.stop_token_ids = stop_tokens_.data(), raw.num_stop_token_ids = stop_tokens_.size();
    raw.first_tokens = first_tokens_.data(), raw.num_first_tokens = first_tokens_.size();
    switch (raw.constraint_kind) {
      case XSERV_CONSTRAINT_JSON_SCHEMA:
      case XSERV_CONSTRAINT_REGEX:
      case XSERV_CONSTRAINT_GRAMMAR:
        raw.constraint = constraint_.data(), raw.constraint_len = constraint_.size();
        break;
      case XSERV_CONSTRAINT_CHOICE:
        raw.choices = choices.data(), raw.num_choices = choices.size();
        break;
    }
    if (tool_choice_name_) raw.tool_choice_name = detail::c_string(*tool_choice_name_, "the name of a tool");
    raw.logit_bias = biases_.data(), raw.num_logit_bias = biases_.size();
    raw.cancel = cancel_.get();
    if (!on_logits_) return f(raw);
    LogitsFunction function = on_logits_;
    detail::Guarded<LogitsFunction> guarded{function, nullptr};
    raw.logits_user_data = &guarded;
    raw.logits_callback = [](const xserv_logits_event *event, void *self) {
      return static_cast<detail::Guarded<LogitsFunction> *>(self)->call(*event);
    };
    if constexpr (std::is_void_v<decltype(f(raw))>) {
      f(raw);
      guarded.rethrow();
    } else {
      auto result = f(raw);
      guarded.rethrow();
      return result;
    }
  }

  using LogitsFunction = std::function<bool(const LogitsEvent &)>;
  LogitsFunction on_logits_;
  xserv_request raw_;
  Kind kind_ = Kind::prompt;
  std::string text_, tools_, variables_, constraint_;
  std::vector<TokenId> tokens_, stop_tokens_, first_tokens_;
  std::vector<LogitBias> biases_;
  std::vector<std::string> stop_strings_, choices_;
  std::optional<std::string> tool_choice_name_;
  std::shared_ptr<xserv_cancel_token> cancel_;
};

/* The result of a generation: `sample` is the number of one of several samples, from 0. Immutable.
 * Views and pointers that it returns live as long as it does, or until it is moved from. */
class Result {
 public:
  const ResultInfo &info() const & { return need(), info_; }
  const ResultInfo &info() const && = delete; /* its pointers would dangle: keep the Result */
  std::string_view text() const & { return {info().text, info_.text_len}; }
  Text text() const && { return Text(text()); } /* of a temporary: a string of its own */
  std::vector<TokenId> token_ids() const { return ids_of((need(), info_)); }
  xserv_finish_reason finish_reason() const { return static_cast<xserv_finish_reason>((need(), info_.finish_reason)); }

  /* The log-probability of each token, and the most likely tokens in its place, the likeliest
   * first, if the request asks for them: else there are none. */
  std::vector<float> log_probs() const { return log_probs_of((need(), info_)); }
  std::vector<std::vector<LogProb>> top_log_probs() const { return top_log_probs_of((need(), info_)); }

  /* The ids of the prompt, the log-probability of each after those before it (NaN for the first), and
   * the most likely tokens in its place, if the request asks for them: else there are none. */
  std::vector<TokenId> prompt_token_ids() const {
    if ((need(), info_.prompt_tokens) == nullptr) return {};
    return {info_.prompt_tokens, info_.prompt_tokens + info_.num_prompt_tokens};
  }
  std::vector<float> prompt_log_probs() const {
    if ((need(), info_.prompt_log_probs) == nullptr) return {};
    return {info_.prompt_log_probs, info_.prompt_log_probs + info_.num_prompt_tokens};
  }
  std::vector<std::vector<LogProb>> prompt_top_log_probs() const {
    std::vector<std::vector<LogProb>> all;
    if ((need(), info_.prompt_log_probs) == nullptr) return all;
    const LogProb *first = info_.prompt_top_log_probs;
    const std::size_t count = info_.num_prompt_top_log_probs;
    for (std::size_t i = 0; i < info_.num_prompt_tokens; i++, first += count)
      all.emplace_back(i == 0 ? first + count : first, first + count); /* the first has none */
    return all;
  }
  /* The parts of the answer, if the request has an answer_format; else there are none. */
  std::string_view reasoning() const & { return reasoning_of(info()); }
  Text reasoning() const && { return Text(reasoning_of((need(), info_))); }
  std::string_view content() const & { return content_of(info()); }
  Text content() const && { return Text(content_of((need(), info_))); }
  std::vector<ToolCall> tool_calls() const { return tool_calls_of((need(), info_)); }
  /* The answer as a message, for Messages::add_json(); empty without an answer_format. */
  std::string message_json() const { return message_of((need(), info_)); }

  std::size_t num_samples() const { return need(), info_.num_samples; }
  ResultInfo sample(std::size_t index) const & { return info_of(index); }
  ResultInfo sample(std::size_t index) const && = delete; /* its pointers would dangle: keep the Result */
  std::string_view text(std::size_t sample) const & {
    const ResultInfo info = info_of(sample);
    return {info.text, info.text_len};
  }
  Text text(std::size_t sample) const && { return Text(text(sample)); }
  std::vector<TokenId> token_ids(std::size_t sample) const { return ids_of(info_of(sample)); }
  std::vector<float> log_probs(std::size_t sample) const { return log_probs_of(info_of(sample)); }
  std::vector<std::vector<LogProb>> top_log_probs(std::size_t sample) const {
    return top_log_probs_of(info_of(sample));
  }
  std::string reasoning(std::size_t sample) const { return std::string(reasoning_of(info_of(sample))); }
  std::string content(std::size_t sample) const { return std::string(content_of(info_of(sample))); }
  std::vector<ToolCall> tool_calls(std::size_t sample) const { return tool_calls_of(info_of(sample)); }
  std::string message_json(std::size_t sample) const { return message_of(info_of(sample)); }
  xserv_finish_reason finish_reason(std::size_t sample) const {
    return static_cast<xserv_finish_reason>(info_of(sample).finish_reason);
  }
  const xserv_result *get() const noexcept { return handle_.get(); }

 private:
  friend class Model;
  friend class ParseOptions;
  friend class Submission;
  explicit Result(xserv_result *raw) : handle_(raw) {
    info_.struct_size = sizeof info_;
    detail::check(xserv_result_get_info(raw, &info_));
  }
  const xserv_result *need() const { return handle_.need("Result"); }
  ResultInfo info_of(std::size_t sample) const {
    ResultInfo info{};
    info.struct_size = sizeof info;
    detail::check(xserv_result_get_sample(need(), sample, &info));
    return info;
  }
  static std::vector<TokenId> ids_of(const ResultInfo &info) {
    if (info.num_tokens == 0) return {};
    return {info.token_ids, info.token_ids + info.num_tokens};
  }
  static std::string_view reasoning_of(const ResultInfo &info) noexcept {
    return info.reasoning == nullptr ? std::string_view() : std::string_view(info.reasoning, info.reasoning_len);
  }
  static std::string_view content_of(const ResultInfo &info) noexcept {
    return info.content == nullptr ? std::string_view() : std::string_view(info.content, info.content_len);
  }
  static std::vector<ToolCall> tool_calls_of(const ResultInfo &info) {
    std::vector<ToolCall> calls;
    for (std::size_t i = 0; i < info.num_tool_calls; i++) {
      const RawToolCall &raw = info.tool_calls[i];
      calls.push_back({raw.id, raw.name, {raw.arguments_json, raw.arguments_len}, raw.is_complete != 0});
    }
    return calls;
  }
  static std::string message_of(const ResultInfo &info) {
    return info.message_json == nullptr ? std::string() : info.message_json;
  }
  static std::vector<float> log_probs_of(const ResultInfo &info) {
    if (info.log_probs == nullptr) return {};
    return {info.log_probs, info.log_probs + info.num_tokens};
  }
  static std::vector<std::vector<LogProb>> top_log_probs_of(const ResultInfo &info) {
    std::vector<std::vector<LogProb>> all;
    if (info.log_probs == nullptr) return all;
    const LogProb *first = info.top_log_probs;
    for (std::size_t i = 0; i < info.num_tokens; i++, first += info.num_top_log_probs)
      all.emplace_back(first, first + info.num_top_log_probs);
    return all;
  }
  detail::ResultHandle handle_;
  ResultInfo info_{};
};

/* An event of a submission: kind says which of the other fields are set, as in xserv_event. It is
 * a value, which outlives the submission. */
struct Event {
  xserv_event_kind kind = XSERV_EVENT_NONE;
  std::uint32_t sample = 0;
  std::string text;
  TokenId token_id = XSERV_NO_TOKEN;
  std::uint32_t num_tokens = 0;
  xserv_finish_reason finish_reason{};
  float log_prob = std::numeric_limits<float>::quiet_NaN(); /* of the token, if the request asks for it */
  std::vector<LogProb> top_log_probs;                       /* the likeliest in its place, the likeliest first */
  std::string tool_call_id, tool_name;                      /* XSERV_EVENT_TOOL_CALL_BEGIN */
  std::uint32_t tool_call_index = 0;                        /* XSERV_EVENT_TOOL_CALL_...: the number of the call */
  bool tool_call_is_complete = false;                       /* XSERV_EVENT_TOOL_CALL_END */
};

/* Options for taking apart a text that a model has generated, as in xserv_parse_options.
 * Objects can be copied and used again. */
class ParseOptions {
 public:
  ParseOptions() { xserv_parse_options_default(&raw_); }
  /* The prompt that the text goes on with, or the end of it. */
  ParseOptions &prompt(std::string text) { return prompt_ = std::move(text), has_prompt_ = true, *this; }
  /* JSON, for the types of parameters. */
  ParseOptions &tools(std::string json) { return tools_ = std::move(json), *this; }
  ParseOptions &answer_format(xserv_answer_format format) {
    return raw_.answer_format = static_cast<std::uint32_t>(format), *this;
  }

 private:
  friend class Model;
  friend Result parse_response(std::string_view text, const ParseOptions &options);
  Result parse(const xserv_model *model, std::string_view text) const {
    xserv_parse_options raw = raw_;
    if (has_prompt_) raw.prompt = detail::c_string(prompt_, "the prompt");
    if (!tools_.empty()) raw.tools_json = detail::c_string(tools_, "the JSON of tools");
    xserv_result *result = nullptr;
    const char *bytes = text.data() != nullptr ? text.data() : "";
    detail::check(xserv_parse_response(model, bytes, text.size(), &raw, &result));
    return Result(result);
  }
  xserv_parse_options raw_;
  std::string prompt_, tools_;
  bool has_prompt_ = false;
};

/* Takes a text apart; the options name its format. */
inline Result parse_response(std::string_view text, const ParseOptions &options) {
  return options.parse(nullptr, text);
}

/* Options for the notification of a submission's events. A notification is given once: take events
 * until there are none before waiting again. Objects can be copied and used again. */
class SubmitOptions {
 public:
  SubmitOptions() { xserv_submit_options_default(&raw_); }

  /* Called as f() when there are events, on one of the library's threads: it must be quick, and may
   * do what does not wait for the model: submit, poll, take events with a timeout of zero, cancel
   * and destroy. Exceptions from it are dropped. With nullptr nobody is called. */
  template <typename Function>
  SubmitOptions &wake(Function f) {
    constexpr bool is_right = std::is_copy_constructible_v<Function> &&
                              (std::is_null_pointer_v<Function> || std::is_invocable_v<Function &>);
    static_assert(is_right, "xserv: wake() takes a copyable function without arguments");
    if constexpr (is_right) wake_ = std::move(f);
    return *this;
  }
  /* A non-blocking descriptor, such as an eventfd; the caller owns it, and closes it no earlier
   * than the submission is destroyed. */
  SubmitOptions &wake_fd(int descriptor) { return raw_.wake_fd = descriptor, *this; }
  /* The kinds of events to be told; XSERV_EVENT_DONE is told in any case. Without this call, those
   * up to DONE. */
  SubmitOptions &events(std::initializer_list<xserv_event_kind> kinds) {
    raw_.events = 1u << XSERV_EVENT_DONE; /* 0 would mean all of them */
    for (const xserv_event_kind kind : kinds) raw_.events |= 1u << kind;
    return *this;
  }

 private:
  friend class Model;
  xserv_submit_options raw_;
  std::function<void()> wake_;
};

/* Options of Model::score(). Objects can be copied and used again. */
class ScoreOptions {
 public:
  ScoreOptions() { xserv_score_options_default(&raw_); }
  /* The options share the token's switch. */
  ScoreOptions &cancel(const CancelToken &token) {
    cancel_ = token.need();
    raw_.cancel = cancel_.get();
    return *this;
  }
  /* Calls and requests share the keys and values of common prefixes only with those of the same
   * number. */
  ScoreOptions &cache_key(std::uint64_t key) { return raw_.cache_key = key, *this; }

 private:
  friend class Model;
  xserv_score_options raw_;
  std::shared_ptr<xserv_cancel_token> cancel_;
};

/* A submitted request, of which next() gives the events.
 *
 *     for (auto event = submission.next(); event.kind != XSERV_EVENT_DONE; event = submission.next())
 *       std::cout << event.text;
 *
 * Any thread may use it; each event is given once, to one of the threads that ask. Destroying it
 * cancels the request if it still runs, and waits for a wake callback that runs on another
 * thread. */
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
    detail::check(xserv_poll(need(), &ready));
    return ready != 0;
  }
  /* May be called from any thread, at any time. */
  void cancel() const { detail::check(xserv_cancel(need())); }
  /* Takes the result, once, after XSERV_EVENT_DONE. */
  Result take_result() {
    xserv_result *result = nullptr;
    detail::check(xserv_submission_take_result(need(), &result));
    return Result(result);
  }
  const xserv_submission *get() const noexcept { return handle_.get(); }

 private:
  friend class Model;
  /* Also kept alive by a call under way, which may destroy the submission. */
  struct Wake : std::enable_shared_from_this<Wake> {
    std::function<void()> function;
  };
  Submission() = default;
  const xserv_submission *need() const { return handle_.need("Submission"); }

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
    detail::check(xserv_next(need(), timeout_ms, &raw));
    Event event;
    event.kind = static_cast<xserv_event_kind>(raw.kind), event.sample = raw.sample;
    event.text.assign(raw.text, raw.text_len);
    event.token_id = raw.token_id, event.num_tokens = raw.num_tokens;
    event.finish_reason = static_cast<xserv_finish_reason>(raw.finish_reason);
    event.log_prob = raw.log_prob;
    if (raw.top_log_probs != nullptr)
      event.top_log_probs.assign(raw.top_log_probs, raw.top_log_probs + raw.num_top_log_probs);
    if (raw.tool_call_id != nullptr) event.tool_call_id = raw.tool_call_id;
    if (raw.tool_name != nullptr) event.tool_name = raw.tool_name;
    event.tool_call_index = raw.tool_call_index, event.tool_call_is_complete = raw.tool_call_is_complete != 0;
    return event;
  }

  /* In this order, so that the handle is freed first. */
  std::shared_ptr<Wake> wake_;
  detail::SubmissionHandle handle_;
};

/* Turns token ids that come one at a time into text. It keeps its model alive. One thread at a time
 * may use it. */
class Detokenizer {
 public:
  /* Returns the text that is final now: whole UTF-8 characters, possibly none. */
  std::string push(TokenId id) {
    const char *text = nullptr;
    std::size_t len = 0;
    detail::check(xserv_detokenizer_push(handle_.need("Detokenizer"), id, &text, &len));
    return std::string(text, len);
  }
  /* Returns the text that is still held back; the object is then ready for another stream. */
  std::string finish() {
    const char *text = nullptr;
    std::size_t len = 0;
    detail::check(xserv_detokenizer_finish(handle_.need("Detokenizer"), &text, &len));
    return std::string(text, len);
  }

 private:
  friend class Model;
  explicit Detokenizer(xserv_detokenizer *raw) : handle_(raw) {}
  detail::DetokenizerHandle handle_;
};

/* The findings about a folder that was not loaded. Immutable. Pointers in info() live as long as it
 * does, or until it is moved from. */
class Inspection {
 public:
  explicit Inspection(const std::string &path) {
    xserv_inspection *raw = nullptr;
    detail::check(xserv_inspect(detail::c_string(path, "the path"), &raw));
    handle_.reset(raw);
    info_.struct_size = sizeof info_;
    detail::check(xserv_inspection_get_info(raw, &info_));
  }
  const InspectionInfo &info() const & { return need(), info_; }
  const InspectionInfo &info() const && = delete; /* its pointers would dangle: keep the Inspection */
  bool supported() const { return need(), info_.supported != 0; }
  const xserv_inspection *get() const noexcept { return handle_.get(); }

 private:
  const xserv_inspection *need() const { return handle_.need("Inspection"); }
  detail::InspectionHandle handle_;
  InspectionInfo info_{};
};

inline Inspection inspect(const std::string &path) { return Inspection(path); }

/* Returns the memory that a model would take, without loading it, as xserv_plan() does. */
inline MemoryPlan plan(const std::string &path, const LoadOptions &options = LoadOptions()) {
  MemoryPlan plan{};
  plan.struct_size = sizeof plan;
  const xserv_load_options raw = options.plain();
  detail::check(xserv_plan(detail::c_string(path, "the path"), &raw, &plan));
  return plan;
}

/* A loaded model. Any number of threads may call any of its functions at once. Destroying it ends
 * what runs on it as cancelled; results, submissions and detokenizers outlive it. */
class Model {
 public:
  /* Loads a folder, or a repo id of the local Hugging Face cache. Blocks while it reads. */
  explicit Model(const std::string &path, const LoadOptions &options = LoadOptions()) {
    xserv_load_options raw = options.plain();
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
    xserv_status status = xserv_load(detail::c_string(path, "the path"), &raw, &model);
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
  ModelInfo info() const & {
    ModelInfo info{};
    info.struct_size = sizeof info;
    detail::check(xserv_model_get_info(need(), &info));
    return info;
  }
  ModelInfo info() const && = delete; /* its pointers would dangle: keep the Model */

  std::vector<TokenId> tokenize(std::string_view text, bool parse_special_tokens = true,
                                bool add_special_tokens = true) const {
    xserv_tokenize_options options;
    xserv_tokenize_options_default(&options);
    options.parse_special_tokens = parse_special_tokens;
    options.add_special_tokens = add_special_tokens;
    xserv_tokens *raw = nullptr;
    const char *bytes = text.data() != nullptr ? text.data() : "";
    detail::check(xserv_tokenize(need(), bytes, text.size(), &options, &raw));
    return detail::take_tokens(raw);
  }

  std::string detokenize(const std::vector<TokenId> &ids, bool skip_special_tokens = true) const {
    xserv_text *raw = nullptr;
    detail::check(xserv_detokenize(need(), ids.data(), ids.size(), skip_special_tokens, &raw));
    return detail::take_text(raw);
  }

  Detokenizer detokenizer(bool skip_special_tokens = true) const {
    xserv_detokenizer *raw = nullptr;
    detail::check(xserv_detokenizer_new(need(), skip_special_tokens, &raw));
    return Detokenizer(raw);
  }

  /* Messages, tools and variables are JSON; the latter two may be empty. */
  std::string apply_chat_template(const std::string &messages, bool add_generation_prompt = true,
                                  const std::string &tools = "", const std::string &variables = "") const {
    xserv_chat_options options;
    xserv_chat_options_default(&options);
    options.messages_json = detail::c_string(messages, "the JSON of messages");
    options.add_generation_prompt = add_generation_prompt;
    if (!tools.empty()) options.tools_json = detail::c_string(tools, "the JSON of tools");
    if (!variables.empty())
      options.template_variables_json = detail::c_string(variables, "the JSON of template variables");
    xserv_text *raw = nullptr;
    detail::check(xserv_apply_chat_template(need(), &options, &raw));
    return detail::take_text(raw);
  }
  std::string apply_chat_template(const Messages &messages, bool add_generation_prompt = true,
                                  const std::string &tools = "", const std::string &variables = "") const {
    return apply_chat_template(messages.json(), add_generation_prompt, tools, variables);
  }

  /* The tokens of a conversation as a request has them. Messages, tools and variables are JSON; the
   * latter two may be empty. */
  std::vector<TokenId> tokenize_chat(const std::string &messages, bool add_generation_prompt = true,
                                     const std::string &tools = "", const std::string &variables = "",
                                     bool parse_special_in_messages = false) const {
    xserv_chat_options options;
    xserv_chat_options_default(&options);
    options.messages_json = detail::c_string(messages, "the JSON of messages");
    options.add_generation_prompt = add_generation_prompt;
    options.parse_special_in_messages = parse_special_in_messages;
    if (!tools.empty()) options.tools_json = detail::c_string(tools, "the JSON of tools");
    if (!variables.empty())
      options.template_variables_json = detail::c_string(variables, "the JSON of template variables");
    xserv_tokens *raw = nullptr;
    detail::check(xserv_tokenize_chat(need(), &options, &raw));
    return detail::take_tokens(raw);
  }
  std::vector<TokenId> tokenize_chat(const Messages &messages, bool add_generation_prompt = true,
                                     const std::string &tools = "", const std::string &variables = "",
                                     bool parse_special_in_messages = false) const {
    return tokenize_chat(messages.json(), add_generation_prompt, tools, variables, parse_special_in_messages);
  }

  /* Takes a text apart that the model has generated. */
  Result parse_response(std::string_view text, const ParseOptions &options = ParseOptions()) const {
    return options.parse(need(), text);
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
    if (cancel != nullptr) options.cancel = cancel->need().get();
    detail::check(xserv_logits(need(), ids.data(), ids.size(), &options, scores.data(), scores.size()));
    return scores;
  }

  /* Returns how likely the model holds the tokens from index num_given (at least 1) on, each after
   * all those before it. The sum of log_prob is their log-likelihood, exp(-sum / size) their
   * perplexity. */
  std::vector<TokenScore> score(const std::vector<TokenId> &ids, std::size_t num_given,
                                const ScoreOptions &options = ScoreOptions()) const {
    std::vector<TokenScore> scores(num_given < ids.size() ? ids.size() - num_given : 0);
    detail::check(
        xserv_score(need(), ids.data(), ids.size(), num_given, &options.raw_, scores.data(), scores.size()));
    return scores;
  }

  /* Generates, and returns when it is done. Being cancelled is no failure: see finish_reason(). */
  Result generate(const Request &request) const {
    return request.with_raw([this](const xserv_request &raw) {
      xserv_result *result = nullptr;
      detail::check(xserv_generate(need(), &raw, nullptr, nullptr, &result));
      return Result(result);
    });
  }

  /* Streaming: `callback` receives each piece of text (std::string_view or std::string), or the
   * whole event (const TokenEvent &), as it comes, on this thread. It returns nothing, or a bool:
   * true to continue, false to stop. With several samples take the event, which says of which one
   * it is. */
  template <typename Callback>
  Result generate(const Request &request, Callback &&callback) const {
    using Function = std::remove_reference_t<Callback>;
    constexpr bool takes_token = takes<Function>() != Takes::nothing;
    static_assert(takes_token, "xserv: the callback of generate() takes std::string_view or const xserv::TokenEvent &, "
                               "and returns bool (true to continue) or void");
    if constexpr (takes_token) {
      detail::Guarded<Function> guarded{callback, nullptr};
      return request.with_raw([&](const xserv_request &raw) {
        xserv_result *result = nullptr;
        xserv_status status = xserv_generate(need(), &raw, &Model::on_token<Function>, &guarded, &result);
        detail::ResultHandle owner(result);
        guarded.rethrow();
        detail::check(status);
        return Result(owner.release());
      });
    } else {
      return generate(request);
    }
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
      detail::check(xserv_submit(need(), &raw, &raw_options, &handle));
      submission.handle_.reset(handle);
    });
    return submission;
  }

  /* Returns the state of the model's requests, and totals. Cheap. */
  ModelStats stats() const {
    ModelStats stats{};
    stats.struct_size = sizeof stats;
    detail::check(xserv_model_get_stats(need(), &stats));
    return stats;
  }

 private:
  const xserv_model *need() const { return handle_.need("Model"); }

  /* The parameter that the callback of generate() takes. Text comes first: a generic lambda gets
   * that. */
  enum class Takes { nothing, view, string, event };
  template <typename Function>
  static constexpr Takes takes() {
    if constexpr (std::is_invocable_v<Function &, std::string_view>)
      return detail::is_callback<Function, std::string_view>() ? Takes::view : Takes::nothing;
    else if constexpr (std::is_invocable_v<Function &, std::string>)
      return detail::is_callback<Function, std::string>() ? Takes::string : Takes::nothing;
    else
      return detail::is_callback<Function, const TokenEvent &>() ? Takes::event : Takes::nothing;
  }
  template <typename Function>
  static bool on_token(const xserv_token_event *raw, void *self) {
    auto &guarded = *static_cast<detail::Guarded<Function> *>(self);
    const std::string_view text(raw->text, raw->text_len);
    if constexpr (takes<Function>() == Takes::event) {
      const TokenEvent event{text, raw->token_id, raw->num_tokens, raw->sample};
      return guarded.call(event);
    } else if constexpr (takes<Function>() == Takes::string) {
      return text.empty() || guarded.call(std::string(text));
    } else {
      return text.empty() || guarded.call(text);
    }
  }

  using Log = std::function<void(xserv_log_level, const char *, const char *)>;
  std::unique_ptr<Log> log_; /* outlives the model */
  detail::ModelHandle handle_;
};

/* ------------------------------------------------------------------------------------------------
 * Operators: devices, tensors, contexts. */

/* The number of usable CUDA devices; 0 without a driver, or without kernels in the library. */
inline std::uint32_t cuda_device_count() noexcept { return xserv_cuda_device_count(); }

/* The properties of a CUDA device, as in xserv_device_info. */
struct DeviceInfo {
  std::string name;
  std::uint64_t memory_bytes = 0;
  std::uint64_t l2_bytes = 0;
  std::uint32_t compute_capability_major = 0;
  std::uint32_t compute_capability_minor = 0;
  std::uint32_t num_multiprocessors = 0;
};

/* Describes a CUDA device, without starting anything on it. If CUDA cannot be used, the error says
 * what is missing. */
inline DeviceInfo cuda_device_info(std::uint32_t index = 0) {
  xserv_device_info raw{};
  raw.struct_size = sizeof raw;
  detail::check(xserv_cuda_device_get_info(index, &raw));
  DeviceInfo info;
  for (const std::uint8_t byte : raw.name) {
    if (byte == 0) break;
    info.name += static_cast<char>(byte);
  }
  info.memory_bytes = raw.memory_bytes, info.l2_bytes = raw.l2_bytes;
  info.compute_capability_major = raw.compute_capability_major;
  info.compute_capability_minor = raw.compute_capability_minor;
  info.num_multiprocessors = raw.num_multiprocessors;
  return info;
}

/* The device that holds the memory. The default is the host's. */
struct Device {
  xserv_device_kind kind = XSERV_DEVICE_CPU;
  std::uint32_t index = 0;
};

/* The bits of an IEEE binary16 and of a bfloat16 number, for tensors: Context::cast() converts them
 * from and to float. */
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

/* The xserv_dtype that tensors of a C++ type have. Specialize it for a 16-bit type of your own:
 *
 *     template <> struct xserv::DTypeOf<__half> : xserv::DTypeIs<XSERV_DTYPE_F16> {};
 *
 * Integers of 32 and 64 bits are i32 and i64, unsigned ones too: a TokenId is far below 2^31. */
template <xserv_dtype Type>
struct DTypeIs {
  static constexpr xserv_dtype value = Type;
};
template <typename T>
struct DTypeOf : DTypeIs<std::is_integral_v<T> && sizeof(T) == 4   ? XSERV_DTYPE_I32
                         : std::is_integral_v<T> && sizeof(T) == 8 ? XSERV_DTYPE_I64
                                                                   : XSERV_DTYPE_AUTO> {};
template <>
struct DTypeOf<float> : DTypeIs<XSERV_DTYPE_F32> {};
template <>
struct DTypeOf<Half> : DTypeIs<XSERV_DTYPE_F16> {};
template <>
struct DTypeOf<BFloat16> : DTypeIs<XSERV_DTYPE_BF16> {};

/* Sizes or strides of a tensor, outermost first, at most 8, of any integer type: {2, n, 64}. */
class Dims {
 public:
  static constexpr std::size_t max_size = 8;

  /* One of them. */
  class Dim {
   public:
    template <typename Integer, typename = std::enable_if_t<std::is_integral_v<Integer>>>
    Dim(Integer value) noexcept : value_(static_cast<std::int64_t>(value)) {}
    std::int64_t value() const noexcept { return value_; }

   private:
    std::int64_t value_;
  };

  Dims() = default;
  Dims(std::initializer_list<Dim> values) {
    for (const Dim &value : values) push(value.value());
  }
  template <typename Integer, typename = std::enable_if_t<std::is_integral_v<Integer>>>
  Dims(const std::vector<Integer> &values) {
    for (const Integer value : values) push(static_cast<std::int64_t>(value));
  }

  std::size_t size() const noexcept { return count_; }
  const std::int64_t *begin() const noexcept { return values_; }
  const std::int64_t *end() const noexcept { return values_ + count_; }
  std::int64_t operator[](std::size_t index) const noexcept { return values_[index]; }

 private:
  void push(std::int64_t value) {
    if (count_ == max_size) detail::invalid("a tensor has at most 8 dimensions");
    values_[count_++] = value;
  }
  std::int64_t values_[max_size] = {};
  std::size_t count_ = 0;
};

namespace detail {

template <typename Element>
constexpr void check_element() {
  static_assert(DTypeOf<Element>::value != XSERV_DTYPE_AUTO,
                "xserv: a tensor has elements of float, xserv::Half, xserv::BFloat16, or integers of 32 or 64 bits");
}

/* The types that a tensor's memory may be given as: a pointer, an array, or a container with its
 * elements side by side. Element is void for everything else. `dangles`: whether the elements end
 * with a temporary of that type. */
template <typename Memory, typename = void>
struct MemoryOf {
  using Element = void;
  static constexpr bool has_size = false;
};
template <typename T>
struct MemoryOf<T *, void> {
  using Element = T;
  static constexpr bool has_size = false, dangles = false;
};
template <typename T, std::size_t Size>
struct MemoryOf<T[Size], void> {
  using Element = T;
  static constexpr bool has_size = true, dangles = true;
};
template <typename Container>
struct MemoryOf<Container, std::enable_if_t<std::is_class_v<std::remove_cv_t<Container>> &&
                                            std::is_pointer_v<decltype(std::data(std::declval<Container &>()))> &&
                                            std::is_integral_v<decltype(std::size(std::declval<Container &>()))>>> {
  using Element = std::remove_pointer_t<decltype(std::data(std::declval<Container &>()))>;
  static constexpr bool has_size = true;
  /* A container owns its elements; a span does not, so that it gives the same pointer when
   * const. */
  static constexpr bool dangles = !std::is_same_v<decltype(std::data(std::declval<std::remove_cv_t<Container> &>())),
                                                  decltype(std::data(std::declval<const Container &>()))>;
};
/* MemoryOf for an argument, as a forwarding reference deduces it. A pointer may be const itself. */
template <typename Memory, typename Plain = std::remove_reference_t<Memory>>
using MemoryFor = MemoryOf<std::conditional_t<std::is_pointer_v<Plain>, std::remove_cv_t<Plain>, Plain>>;
template <typename Memory>
using EnableMemory = std::enable_if_t<!std::is_void_v<typename MemoryFor<Memory>::Element>>;
template <typename Memory>
using EnableSized = std::enable_if_t<MemoryFor<Memory>::has_size>;

}  // namespace detail

/* A view of elements that belong to somebody else, for tensors that are only read. See
 * TensorView. */
class ConstTensorView {
 public:
  template <typename Memory, typename = detail::EnableMemory<Memory>>
  ConstTensorView(Memory &&memory, const Dims &shape, const Dims &strides = Dims(), Device device = Device()) {
    using About = detail::MemoryFor<Memory>;
    using Element = std::remove_cv_t<typename About::Element>;
    detail::check_element<Element>();
    static_assert(std::is_lvalue_reference_v<Memory> || !About::dangles,
                  "xserv: a view of a temporary container would dangle: keep the container in a variable");
    if constexpr (About::has_size) {
      set(std::data(memory), DTypeOf<Element>::value, shape, strides, device);
      check_fits(std::size(memory));
    } else {
      set(memory, DTypeOf<Element>::value, shape, strides, device);
    }
  }
  /* A container as a tensor of one dimension. */
  template <typename Memory, typename = detail::EnableSized<Memory>>
  ConstTensorView(Memory &&memory) : ConstTensorView(std::forward<Memory>(memory), Dims{std::size(memory)}) {}
  /* Memory of which the type is known at run time only. */
  ConstTensorView(const void *data, xserv_dtype dtype, const Dims &shape, const Dims &strides = Dims(),
                  Device device = Device()) {
    set(data, dtype, shape, strides, device);
  }

  ConstTensorView(const ConstTensorView &other) noexcept { *this = other; }
  ConstTensorView &operator=(const ConstTensorView &other) noexcept {
    raw_ = other.raw_;
    for (std::size_t i = 0; i < Dims::max_size; i++) shape_[i] = other.shape_[i], strides_[i] = other.strides_[i];
    raw_.shape = shape_;
    if (raw_.strides != nullptr) raw_.strides = strides_;
    return *this;
  }

  std::size_t ndim() const noexcept { return static_cast<std::size_t>(raw_.ndim); }
  std::int64_t shape(std::size_t dim) const { return shape_[checked(dim)]; }
  /* In elements. */
  std::int64_t stride(std::size_t dim) const {
    if (raw_.strides != nullptr) return strides_[checked(dim)];
    std::uint64_t product = 1; /* unsigned: it may overflow for a shape that the library refuses */
    for (std::size_t i = checked(dim) + 1; i < ndim(); i++) product *= static_cast<std::uint64_t>(shape_[i]);
    return static_cast<std::int64_t>(product);
  }
  std::uint64_t num_elements() const noexcept {
    std::uint64_t product = 1;
    for (std::size_t i = 0; i < ndim(); i++) product *= static_cast<std::uint64_t>(shape_[i]);
    return product;
  }
  Dims shape() const { return Dims(std::vector<std::int64_t>(shape_, shape_ + ndim())); }
  /* XSERV_DTYPE_AUTO: a type that the library does not have. */
  xserv_dtype dtype() const noexcept {
    for (const xserv_dtype type :
         {XSERV_DTYPE_F32, XSERV_DTYPE_F16, XSERV_DTYPE_BF16, XSERV_DTYPE_I32, XSERV_DTYPE_I64}) {
      const xserv_tensor_dtype other = xserv_tensor_dtype_of(static_cast<std::uint32_t>(type));
      if (raw_.dtype.code == other.code && raw_.dtype.bits == other.bits && raw_.dtype.lanes == other.lanes)
        return type;
    }
    return XSERV_DTYPE_AUTO;
  }
  xserv_tensor_device device() const noexcept { return raw_.device; }
  /* The first element. */
  const void *data() const noexcept { return static_cast<const char *>(raw_.data) + raw_.byte_offset; }
  /* The descriptor, which lives as long as the view. Its layout is DLPack's DLTensor. */
  const xserv_tensor *get() const & noexcept { return &raw_; }
  const xserv_tensor *get() const && = delete; /* the descriptor would dangle: keep the view */

  /* Returns the part from begin to end (exclusive) along a dimension, in the same memory. */
  ConstTensorView slice(std::size_t dim, std::int64_t begin, std::int64_t end) const {
    ConstTensorView view(*this);
    view.cut(dim, begin, end);
    return view;
  }
  /* Returns the same elements with the dimensions in another order: dimension i is order[i] of
   * now. */
  ConstTensorView permute(const Dims &order) const {
    ConstTensorView view(*this);
    view.reorder(order);
    return view;
  }

 protected:
  explicit ConstTensorView(const xserv_tensor &raw) {
    Dims shape, strides;
    if (raw.ndim > 0) {
      const auto count = static_cast<std::size_t>(raw.ndim);
      shape = Dims(std::vector<std::int64_t>(raw.shape, raw.shape + count));
      if (raw.strides != nullptr) strides = Dims(std::vector<std::int64_t>(raw.strides, raw.strides + count));
    }
    set(raw.data, XSERV_DTYPE_AUTO, shape, strides, Device());
    raw_.device = raw.device, raw_.dtype = raw.dtype, raw_.byte_offset = raw.byte_offset;
  }

  void cut(std::size_t dim, std::int64_t begin, std::int64_t end) {
    if (begin < 0 || begin > end || end > shape(dim))
      detail::invalid("the slice [" + std::to_string(begin) + ", " + std::to_string(end) +
                      ") is not within dimension " + std::to_string(dim) + ", which has the size " +
                      std::to_string(shape(dim)));
    write_strides();
    const std::uint64_t skipped = static_cast<std::uint64_t>(begin) * static_cast<std::uint64_t>(strides_[dim]);
    raw_.byte_offset += skipped * (raw_.dtype.bits / 8u);
    shape_[dim] = end - begin;
  }
  void reorder(const Dims &order) {
    write_strides();
    const ConstTensorView now(*this);
    bool is_used[Dims::max_size] = {};
    bool is_order = order.size() == ndim();
    for (std::size_t i = 0; is_order && i < ndim(); i++) {
      is_order = order[i] >= 0 && order[i] < raw_.ndim && !is_used[order[i]];
      if (!is_order) break;
      is_used[order[i]] = true;
      shape_[i] = now.shape_[order[i]], strides_[i] = now.strides_[order[i]];
    }
    if (!is_order)
      detail::invalid("the order of permute() must name each of the " + std::to_string(ndim()) + " dimensions once");
  }

 private:
  void set(const void *data, xserv_dtype dtype, const Dims &shape, const Dims &strides, Device device) {
    if (strides.size() != 0 && strides.size() != shape.size())
      detail::invalid("the tensor has " + std::to_string(shape.size()) + " dimensions and " +
                      std::to_string(strides.size()) + " strides");
    for (std::size_t i = 0; i < shape.size(); i++) shape_[i] = shape[i];
    for (std::size_t i = 0; i < strides.size(); i++) strides_[i] = strides[i];
    raw_.data = const_cast<void *>(data); /* C does not tell the two apart; TensorView does */
    raw_.device = xserv_tensor_device_of(static_cast<std::uint32_t>(device.kind), device.index);
    raw_.dtype = xserv_tensor_dtype_of(static_cast<std::uint32_t>(dtype));
    raw_.ndim = static_cast<std::int32_t>(shape.size());
    raw_.shape = shape_;
    if (strides.size() != 0) raw_.strides = strides_;
  }
  /* That the elements are all within a container. Negative numbers are left to the library. */
  void check_fits(std::uint64_t size) const {
    for (std::size_t i = 0; i < ndim(); i++) {
      if (shape_[i] <= 0) return;
    }
    std::uint64_t last = 0, contiguous = 1;
    for (std::size_t i = ndim(); i-- > 0;) {
      if (raw_.strides != nullptr && strides_[i] < 0) return;
      const std::uint64_t step = raw_.strides != nullptr ? static_cast<std::uint64_t>(strides_[i]) : contiguous;
      const std::uint64_t others = static_cast<std::uint64_t>(shape_[i]) - 1;
      if (others != 0 && step > size / others) return does_not_fit(size);
      last += others * step;
      if (last >= size) return does_not_fit(size);
      contiguous *= others + 1;
    }
    if (size == 0) does_not_fit(size);
  }
  [[noreturn]] void does_not_fit(std::uint64_t size) const {
    std::string shape;
    for (std::size_t i = 0; i < ndim(); i++) shape += (i == 0 ? "" : ", ") + std::to_string(shape_[i]);
    detail::invalid("a tensor of shape [" + shape + "] reaches beyond its container of " + std::to_string(size) +
                    " elements");
  }
  std::size_t checked(std::size_t dim) const {
    if (dim >= ndim())
      detail::invalid("the tensor has " + std::to_string(ndim()) + " dimensions, and none with number " +
                      std::to_string(dim));
    return dim;
  }
  void write_strides() {
    if (raw_.strides != nullptr) return;
    for (std::size_t i = 0; i < ndim(); i++) strides_[i] = stride(i);
    raw_.strides = strides_;
  }

  xserv_tensor raw_{};
  std::int64_t shape_[Dims::max_size] = {}, strides_[Dims::max_size] = {};
};

/* A view of elements that belong to somebody else: memory, shape, strides in elements (none:
 * contiguous, row-major), device.
 *
 *     std::vector<float> x(12);
 *     xserv::TensorView rows(x, {3, 4}), columns(x, {4, 3}, {1, 4});
 *     xserv::TensorView on_gpu(pointer, {3, 4}, {}, {XSERV_DEVICE_CUDA, 0});
 *
 * The memory may be a pointer, an array or a container, whose size is then checked; a container
 * alone is a tensor of one dimension, and converts to it where a view is wanted. The view neither
 * copies the elements nor keeps them alive, and must not outlive them. Shape and strides are its
 * own, so that it can be copied. Operators take a ConstTensorView for what they read, which every
 * TensorView is, and a TensorView for what they write. */
class TensorView : public ConstTensorView {
 public:
  template <typename Memory, typename = detail::EnableMemory<Memory>>
  TensorView(Memory &&memory, const Dims &shape, const Dims &strides = Dims(), Device device = Device())
      : ConstTensorView(std::forward<Memory>(memory), shape, strides, device) {
    static_assert(!std::is_const_v<typename detail::MemoryFor<Memory>::Element>,
                  "xserv: a TensorView can be written to, and this memory is const: take a ConstTensorView");
  }
  template <typename Memory, typename = detail::EnableSized<Memory>>
  TensorView(Memory &&memory) : TensorView(std::forward<Memory>(memory), Dims{std::size(memory)}) {}
  TensorView(void *data, xserv_dtype dtype, const Dims &shape, const Dims &strides = Dims(), Device device = Device())
      : ConstTensorView(data, dtype, shape, strides, device) {}

  /* A tensor of another library by its DLTensor, or an xserv_tensor. The descriptor is copied. */
  template <typename Descriptor>
  static TensorView from_dlpack(const Descriptor &tensor) {
    xserv_tensor raw{};
    raw.data = tensor.data;
    raw.device.device_type = static_cast<std::int32_t>(tensor.device.device_type);
    raw.device.device_id = tensor.device.device_id;
    raw.ndim = tensor.ndim;
    raw.dtype.code = tensor.dtype.code, raw.dtype.bits = tensor.dtype.bits, raw.dtype.lanes = tensor.dtype.lanes;
    raw.shape = tensor.shape, raw.strides = tensor.strides, raw.byte_offset = tensor.byte_offset;
    return TensorView(raw);
  }

  void *data() const noexcept { return const_cast<void *>(ConstTensorView::data()); }
  TensorView slice(std::size_t dim, std::int64_t begin, std::int64_t end) const {
    TensorView view(*this);
    view.cut(dim, begin, end);
    return view;
  }
  TensorView permute(const Dims &order) const {
    TensorView view(*this);
    view.reorder(order);
    return view;
  }

 private:
  explicit TensorView(const xserv_tensor &raw) : ConstTensorView(raw) {}
};

namespace detail {

/* DLPack's managed tensors bring their own deleter. */
struct ManagedDeleter {
  template <typename Managed>
  void operator()(Managed *managed) const noexcept {
    managed->deleter(managed);
  }
};

}  // namespace detail

/* A tensor for another library to keep, in the layouts of DLPack's DLManagedTensor and
 * DLManagedTensorVersioned: a library that takes it over gets release(). */
using ManagedTensor = std::unique_ptr<xserv_managed_tensor, detail::ManagedDeleter>;
using ManagedTensorVersioned = std::unique_ptr<xserv_managed_tensor_versioned, detail::ManagedDeleter>;

/* A contiguous tensor in memory of a context's device, made by Context::tensor(). It owns its
 * memory and returns it when it is destroyed; work that was queued with it is not disturbed, and it
 * may outlive its context. It becomes a view wherever one is wanted; like a pointer, a const one
 * can be written through. Any number of threads may use it. */
class Tensor {
 public:
  TensorView view() const & { return need(); }
  TensorView view() const && = delete; /* it would dangle: keep the Tensor */
  operator const TensorView &() const & { return need(); }
  operator const TensorView &() const && = delete; /* it would dangle: keep the Tensor */
  const xserv_owned_tensor *get() const noexcept { return handle_.get(); }

  /* Shares the memory with a library that speaks DLPack from version 1.0 on, without a copy, for as
   * long as that keeps it, from any thread. flags: XSERV_DLPACK_READ_ONLY forbids writing. */
  ManagedTensorVersioned to_dlpack(std::uint64_t flags = 0) const {
    xserv_managed_tensor_versioned *managed = nullptr;
    detail::check(xserv_owned_tensor_to_dlpack_versioned(handle_.need("Tensor"), flags, &managed));
    return ManagedTensorVersioned(managed);
  }
  /* The same for a library that speaks an older DLPack. */
  ManagedTensor to_old_dlpack() const {
    xserv_managed_tensor *managed = nullptr;
    detail::check(xserv_owned_tensor_to_dlpack(handle_.need("Tensor"), &managed));
    return ManagedTensor(managed);
  }

 private:
  friend class Context;
  explicit Tensor(xserv_owned_tensor *raw) : handle_(raw), view_(descriptor_of(raw)) {}
  static TensorView descriptor_of(const xserv_owned_tensor *raw) {
    xserv_tensor descriptor{};
    detail::check(xserv_owned_tensor_view(raw, &descriptor));
    return TensorView::from_dlpack(descriptor);
  }
  const TensorView &need() const { return handle_.need("Tensor"), view_; }

  detail::OwnedTensorHandle handle_;
  TensorView view_;
};

/* Options for making a context. Setters can be chained; unset options have the library's defaults.
 * Each has the meaning of the field of xserv_context_options. Objects can be copied and used
 * again. */
class ContextOptions {
 public:
  ContextOptions() { xserv_context_options_default(&raw_); }

  ContextOptions &device(xserv_device_kind kind) { return raw_.device_kind = static_cast<std::uint32_t>(kind), *this; }
  ContextOptions &device_index(std::uint32_t index) { return raw_.device_index = index, *this; }
  ContextOptions &num_threads(std::uint32_t count) { return raw_.num_threads = count, *this; }
  /* CUDA: work is queued on this cudaStream_t (NULL is the default stream), which must outlive the
   * context. */
  ContextOptions &stream(void *stream) { return raw_.use_stream = 1, raw_.stream = stream, *this; }
  ContextOptions &max_memory_bytes(std::uint64_t bytes) { return raw_.max_memory_bytes = bytes, *this; }

  const xserv_context_options *get() const & noexcept { return &raw_; }

 private:
  friend class Context;
  xserv_context_options raw_;
};

/* Options of Context::gemm(). Each setter has the meaning of the field of xserv_gemm_options. */
class GemmOptions {
 public:
  GemmOptions() { xserv_gemm_options_default(&raw_); }

  GemmOptions &transpose_a(bool on = true) { return raw_.transpose_a = on, *this; }
  GemmOptions &transpose_b(bool on = true) { return raw_.transpose_b = on, *this; }
  GemmOptions &alpha(float factor) { return raw_.alpha = factor, *this; }
  GemmOptions &beta(float factor) { return raw_.beta = factor, *this; }
  GemmOptions &backend(xserv_gemm_backend which) { return raw_.backend = static_cast<std::uint32_t>(which), *this; }

 private:
  friend class Context;
  xserv_gemm_options raw_;
};

/* Options of Context::attention(). Each setter has the meaning of the field of
 * xserv_attention_options. The memory of the views must live until the work is done. */
class AttentionOptions {
 public:
  AttentionOptions() { xserv_attention_options_default(&raw_); }

  AttentionOptions &causal(bool on = true) { return raw_.causal = on, *this; }
  AttentionOptions &window(std::uint32_t keys) { return raw_.window = keys, *this; }
  AttentionOptions &backend(xserv_attention_backend which) {
    return raw_.backend = static_cast<std::uint32_t>(which), *this;
  }
  AttentionOptions &scale(float factor) { return raw_.scale = factor, *this; }
  AttentionOptions &max_q_len(std::uint32_t count) { return raw_.max_q_len = count, *this; }
  AttentionOptions &max_kv_len(std::uint32_t count) { return raw_.max_kv_len = count, *this; }
  AttentionOptions &cu_seqlens_q(const ConstTensorView &starts) { return cu_seqlens_q_ = starts, *this; }
  AttentionOptions &cu_seqlens_k(const ConstTensorView &starts) { return cu_seqlens_k_ = starts, *this; }
  AttentionOptions &block_tables(const ConstTensorView &tables) { return block_tables_ = tables, *this; }
  AttentionOptions &context_lens(const ConstTensorView &lengths) { return context_lens_ = lengths, *this; }

 private:
  friend class Context;
  xserv_attention_options raw_;
  std::optional<ConstTensorView> cu_seqlens_q_, cu_seqlens_k_, block_tables_, context_lens_;
};

/* A device, a stream of work on it, and the memory that the work uses; and the operators, in the
 * order of xserv_ops.h, which says of each what it computes, and which views may share memory.
 *
 * On the CPU an operator has finished when its function returns. On CUDA it has queued its work on
 * the context's stream: synchronize() waits for it, and throws what went wrong in it; the memory of
 * the views must live until then. Only copies from and to the host wait. Calls from several threads
 * are safe and queue in the order of their arrival. Destroying a context waits for its work. */
class Context {
 public:
  /* On CUDA where it can be used, else on the CPU. */
  Context() : Context(ContextOptions()) {}
  explicit Context(xserv_device_kind kind, std::uint32_t index = 0)
      : Context(ContextOptions().device(kind).device_index(index)) {}
  explicit Context(const ContextOptions &options) {
    xserv_context *raw = nullptr;
    detail::check(xserv_context_new(&options.raw_, &raw));
    handle_.reset(raw);
  }

  const xserv_context *get() const noexcept { return handle_.get(); }
  /* The kind of device that it works on, never XSERV_DEVICE_AUTO. */
  xserv_device_kind device_kind() const {
    std::uint32_t kind = 0;
    detail::check(xserv_context_get_device(need(), &kind));
    return static_cast<xserv_device_kind>(kind);
  }
  /* Waits for all work that was queued, and throws what went wrong in it. */
  void synchronize() const { detail::check(xserv_context_synchronize(need())); }
  /* Returns memory that is kept for later allocations to the driver. */
  void trim() const { detail::check(xserv_context_trim(need())); }
  MemoryStats memory_stats() const {
    MemoryStats stats{};
    stats.struct_size = sizeof stats;
    detail::check(xserv_context_get_memory_stats(need(), &stats));
    return stats;
  }

  /* Makes a tensor in the device's memory: tensor<float>({2, 3}). Its content is arbitrary. */
  template <typename Element>
  Tensor tensor(const Dims &shape) const {
    detail::check_element<Element>();
    return tensor(DTypeOf<Element>::value, shape);
  }
  Tensor tensor(xserv_dtype dtype, const Dims &shape) const {
    xserv_owned_tensor *raw = nullptr;
    const auto type = static_cast<std::uint32_t>(dtype), ndim = static_cast<std::uint32_t>(shape.size());
    detail::check(xserv_owned_tensor_new(need(), type, ndim, shape.begin(), &raw));
    return Tensor(raw);
  }
  /* Makes a tensor in host memory from which and to which the device copies at full speed. */
  template <typename Element>
  Tensor pinned_tensor(const Dims &shape) const {
    detail::check_element<Element>();
    return pinned_tensor(DTypeOf<Element>::value, shape);
  }
  Tensor pinned_tensor(xserv_dtype dtype, const Dims &shape) const {
    xserv_owned_tensor *raw = nullptr;
    const auto type = static_cast<std::uint32_t>(dtype), ndim = static_cast<std::uint32_t>(shape.size());
    detail::check(xserv_owned_tensor_new_pinned(need(), type, ndim, shape.begin(), &raw));
    return Tensor(raw);
  }

  /* Makes a contiguous tensor in the device's memory with the shape, the type and the elements of
   * another, which may be on the host. */
  Tensor copy_of(const ConstTensorView &source) const {
    Tensor made = tensor(source.dtype(), source.shape());
    copy(source, made);
    return made;
  }
  /* Returns the elements of a tensor, which may be on the device, row by row; waits for the work
   * that computes them. */
  template <typename Element>
  std::vector<Element> to_vector(const ConstTensorView &source) const {
    std::vector<Element> values(static_cast<std::size_t>(source.num_elements()));
    copy(source, {values, source.shape()});
    return values;
  }

  /* target = source, the same shape and type, any strides, between host and device too. A copy from
   * or to the host has finished when the call returns. */
  void copy(const ConstTensorView &source, const TensorView &target) const {
    detail::check(xserv_op_copy(need(), source.get(), target.get()));
  }

  /* out = x / sqrt(mean(x^2) + eps) * weight.  x, out: [..., width]; weight: [width]. */
  void rms_norm(const ConstTensorView &x, const ConstTensorView &weight, float eps, const TensorView &out) const {
    detail::check(xserv_op_rms_norm(need(), x.get(), weight.get(), eps, out.get()));
  }
  /* residual_out = x + residual, out = its rms_norm.  All [..., width]; weight: [width]. */
  void add_rms_norm(const ConstTensorView &x, const ConstTensorView &residual, const ConstTensorView &weight, float eps,
                    const TensorView &residual_out, const TensorView &out) const {
    detail::check(xserv_op_add_rms_norm(need(), x.get(), residual.get(), weight.get(), eps, residual_out.get(),
                                        out.get()));
  }
  /* out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.  x, out: [..., width]; weight, bias:
   * [width], and the bias may be std::nullopt. */
  void layer_norm(const ConstTensorView &x, const ConstTensorView &weight, const std::optional<ConstTensorView> &bias,
                  float eps, const TensorView &out) const {
    detail::check(xserv_op_layer_norm(need(), x.get(), weight.get(), get_or_null(bias), eps, out.get()));
  }
  /* out = softmax over the last dimension.  x, out: [..., width]. */
  void softmax(const ConstTensorView &x, const TensorView &out) const {
    detail::check(xserv_op_softmax(need(), x.get(), out.get()));
  }

  /* out[i] = table[ids[i]].  table: [vocab_size, width]; ids: [...], i32 or i64; out: [...,
   * width]. */
  void embedding(const ConstTensorView &table, const ConstTensorView &ids, const TensorView &out) const {
    detail::check(xserv_op_embedding(need(), table.get(), ids.get(), out.get()));
  }
  /* cos[p, i] = attention_scale * cos(p * inv_freq[i]), sin likewise.  inv_freq: [head_dim / 2];
   * cos, sin: [max_position, head_dim / 2]; all f32. */
  void rope_table(const ConstTensorView &inv_freq, float attention_scale, const TensorView &cos,
                  const TensorView &sin) const {
    detail::check(xserv_op_rope_table(need(), inv_freq.get(), attention_scale, cos.get(), sin.get()));
  }
  /* Rotary embeddings of q and k.  q, q_out: [num_tokens, num_heads, head_dim]; k, k_out:
   * [num_tokens, num_kv_heads, head_dim]; positions: [num_tokens], i32 or i64; cos, sin: as
   * rope_table() writes them. */
  void rope(const ConstTensorView &q, const ConstTensorView &k, const ConstTensorView &positions,
            const ConstTensorView &cos, const ConstTensorView &sin, const TensorView &q_out, const TensorView &k_out,
            xserv_rope_pairing pairing = XSERV_ROPE_SPLIT_HALF) const {
    detail::check(xserv_op_rope(need(), q.get(), k.get(), positions.get(), cos.get(), sin.get(),
                                static_cast<std::uint32_t>(pairing), q_out.get(), k_out.get()));
  }
  /* Rotary embeddings of q alone. */
  void rope(const ConstTensorView &q, const ConstTensorView &positions, const ConstTensorView &cos,
            const ConstTensorView &sin, const TensorView &q_out,
            xserv_rope_pairing pairing = XSERV_ROPE_SPLIT_HALF) const {
    detail::check(xserv_op_rope(need(), q.get(), nullptr, positions.get(), cos.get(), sin.get(),
                                static_cast<std::uint32_t>(pairing), q_out.get(), nullptr));
  }
  /* out = the index of the largest element of each row.  x: [..., width]; out: [...], i32 or
   * i64. */
  void argmax(const ConstTensorView &x, const TensorView &out) const {
    detail::check(xserv_op_argmax(need(), x.get(), out.get()));
  }
  /* The k largest elements of each row, descending.  x: [..., width]; values: [..., k]; indices:
   * [..., k], i32. */
  void top_k(const ConstTensorView &x, const TensorView &values, const TensorView &indices) const {
    detail::check(xserv_op_top_k(need(), x.get(), values.get(), indices.get()));
  }

  /* out = x/2 (1 + erf(x / sqrt(2))).  x, out: the same shape. */
  void gelu(const ConstTensorView &x, const TensorView &out) const {
    detail::check(xserv_op_gelu(need(), x.get(), out.get()));
  }
  /* out = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).  x, out: the same shape. */
  void gelu_tanh(const ConstTensorView &x, const TensorView &out) const {
    detail::check(xserv_op_gelu_tanh(need(), x.get(), out.get()));
  }
  /* out = x / (1 + exp(-x)).  x, out: the same shape. */
  void silu(const ConstTensorView &x, const TensorView &out) const {
    detail::check(xserv_op_silu(need(), x.get(), out.get()));
  }
  /* out = silu(gate) * up.  gate, up, out: the same shape [..., width]; gate and up may be slices
   * of one tensor. */
  void silu_mul(const ConstTensorView &gate, const ConstTensorView &up, const TensorView &out) const {
    detail::check(xserv_op_silu_mul(need(), gate.get(), up.get(), out.get()));
  }
  /* out = a + b.  The same shape; a stride of 0 broadcasts a or b. */
  void add(const ConstTensorView &a, const ConstTensorView &b, const TensorView &out) const {
    detail::check(xserv_op_add(need(), a.get(), b.get(), out.get()));
  }
  /* out = a * b, element by element.  The same shape; a stride of 0 broadcasts a or b. */
  void mul(const ConstTensorView &a, const ConstTensorView &b, const TensorView &out) const {
    detail::check(xserv_op_mul(need(), a.get(), b.get(), out.get()));
  }
  /* target = source in the target's type, rounded to nearest even.  The same shape; f32, f16 or
   * bf16 each. */
  void cast(const ConstTensorView &source, const TensorView &target) const {
    detail::check(xserv_op_cast(need(), source.get(), target.get()));
  }
  /* out[..., c, r] = x[..., r, c].  x: [..., rows, columns]; out: [..., columns, rows]. */
  void transpose(const ConstTensorView &x, const TensorView &out) const {
    detail::check(xserv_op_transpose(need(), x.get(), out.get()));
  }

  /* c = alpha * op(a) * op(b) + beta * c.  op(a): [m, k]; op(b): [k, n]; c: [m, n]; or batches of
   * them. */
  void gemm(const ConstTensorView &a, const ConstTensorView &b, const TensorView &c,
            const GemmOptions &options = GemmOptions()) const {
    detail::check(xserv_op_gemm(need(), &options.raw_, a.get(), b.get(), c.get()));
  }
  /* da = dc * b^T, db = a^T * dc.  a, da: [m, k]; b, db: [k, n]; dc: [m, n]; or batches of them.
   * One that is not wanted, da or db, may be std::nullopt. */
  void gemm_backward(const ConstTensorView &a, const ConstTensorView &b, const ConstTensorView &dc,
                     const std::optional<TensorView> &da, const std::optional<TensorView> &db,
                     bool transpose_kernels = false) const {
    detail::check(xserv_op_gemm_backward(need(), a.get(), b.get(), dc.get(), transpose_kernels, get_or_null(da),
                                         get_or_null(db)));
  }

  /* out = softmax(scale * q k^T) v.  q, out: [batch, q_len, num_heads, head_dim]; k, v: [batch,
   * kv_len, num_kv_heads, head_dim]; with index arrays in the options also the packed and the paged
   * form. */
  void attention(const ConstTensorView &q, const ConstTensorView &k, const ConstTensorView &v, const TensorView &out,
                 const AttentionOptions &options = AttentionOptions()) const {
    xserv_attention_options raw = options.raw_;
    raw.cu_seqlens_q = get_or_null(options.cu_seqlens_q_), raw.cu_seqlens_k = get_or_null(options.cu_seqlens_k_);
    raw.block_tables = get_or_null(options.block_tables_), raw.context_lens = get_or_null(options.context_lens_);
    detail::check(xserv_op_attention(need(), &raw, q.get(), k.get(), v.get(), out.get()));
  }

  /* A matrix as codes of 4 or 8 bits.  x: [out_features, in_features]; codes: [out_features,
   * in_features * bits / 32], i32; scales: [out_features, in_features / group_size], f32 or bf16; zeros: as
   * scales, i32, with 4 bits. A group size of 0 is the whole row. */
  void quantise(const ConstTensorView &x, xserv_quant_code code, std::uint32_t group_size, const TensorView &codes,
                const TensorView &scales, const std::optional<TensorView> &zeros = std::nullopt) const {
    detail::check(xserv_op_quantise(need(), x.get(), static_cast<std::uint32_t>(code), group_size, codes.get(),
                                    scales.get(), get_or_null(zeros)));
  }
  /* out = (codes - zeros) * scales.  scales, zeros: [out_features / group_rows, in_features / group_size];
   * out: [out_features, in_features]. On CUDA the matrix goes by way of the host. */
  void dequantise(xserv_quant_code code, std::uint32_t group_rows, std::uint32_t group_size,
                  const ConstTensorView &codes, const ConstTensorView &scales,
                  const std::optional<ConstTensorView> &zeros, const TensorView &out) const {
    detail::check(xserv_op_dequantise(need(), static_cast<std::uint32_t>(code), group_rows, group_size, codes.get(),
                                      scales.get(), get_or_null(zeros), out.get()));
  }
  /* out = x W^T + bias with the matrix W of dequantise().  x: [num_tokens, in_features]; bias:
   * [out_features], and may be std::nullopt; out: [num_tokens, out_features]. Every call brings W into the
   * order of the kernels, on CUDA by way of the host. */
  void linear_quantised(const ConstTensorView &x, xserv_quant_code code, std::uint32_t group_rows,
                        std::uint32_t group_size, const ConstTensorView &codes, const ConstTensorView &scales,
                        const std::optional<ConstTensorView> &zeros, const std::optional<ConstTensorView> &bias,
                        const TensorView &out) const {
    detail::check(xserv_op_linear_quantised(need(), x.get(), static_cast<std::uint32_t>(code), group_rows, group_size,
                                            codes.get(), scales.get(), get_or_null(zeros), get_or_null(bias),
                                            out.get()));
  }

 private:
  const xserv_context *need() const { return handle_.need("Context"); }
  template <typename View>
  static const xserv_tensor *get_or_null(const std::optional<View> &view) noexcept {
    return view ? view->get() : nullptr;
  }
  detail::ContextHandle handle_;
};

/* Options of grad_check(). Each setter has the meaning of the field of xserv_grad_check_options. */
class GradCheckOptions {
 public:
  GradCheckOptions() { xserv_grad_check_options_default(&raw_); }

  GradCheckOptions &eps(double distance) { return raw_.eps = distance, *this; }
  GradCheckOptions &rel_tol(double tolerance) { return raw_.rel_tol = tolerance, *this; }
  GradCheckOptions &atol(double tolerance) { return raw_.atol = tolerance, *this; }

  const xserv_grad_check_options *get() const & noexcept { return &raw_; }

 private:
  xserv_grad_check_options raw_;
};

/* Checks a gradient against central differences of a loss, as xserv_grad_check() does. `loss` is
 * called as loss(const float *values, std::size_t count) on this thread, twice for each value, and
 * returns the loss. A gradient that fails is no failure of the call: see `passed`. */
template <typename Loss>
GradCheckResult grad_check(const std::vector<float> &values, const std::vector<float> &gradient, Loss &&loss,
                           const GradCheckOptions &options = GradCheckOptions()) {
  using Function = std::remove_reference_t<Loss>;
  GradCheckResult result{};
  result.struct_size = sizeof result;
  constexpr bool is_right = std::is_invocable_r_v<double, Function &, const float *, std::size_t>;
  static_assert(is_right, "xserv: the loss of grad_check() takes (const float *values, std::size_t count) and returns "
                          "a double");
  if constexpr (is_right) {
    if (gradient.size() != values.size())
      detail::invalid("there are " + std::to_string(values.size()) + " values, and a gradient of " +
                      std::to_string(gradient.size()));
    auto store = [&loss](const float *moved, std::size_t count, double *computed) {
      *computed = static_cast<double>(loss(moved, count));
    };
    detail::Guarded<decltype(store)> guarded{store, nullptr};
    const xserv_status status = xserv_grad_check(
        options.get(),
        [](const float *moved, std::size_t count, double *computed, void *self) {
          return static_cast<decltype(guarded) *>(self)->call(moved, count, computed);
        },
        &guarded, values.data(), gradient.data(), values.size(), &result);
    guarded.rethrow();
    detail::check(status);
  }
  return result;
}

/* Tests the operators on a device, as xserv_self_test() does. `report` is called for each comparison as
 * report(const SelfTestLine &line) on this thread; what it throws ends the test and is thrown here, and it
 * may return false to end it (Error with XSERV_STATUS_CANCELLED). Throws Error with
 * XSERV_STATUS_INTERNAL, which names the operators, if some failed. */
template <typename Report>
void self_test(const ContextOptions &options, Report &&report) {
  using Function = std::remove_reference_t<Report>;
  constexpr bool is_right = std::is_invocable_v<Function &, const SelfTestLine &>;
  static_assert(is_right, "xserv: the report of self_test() takes (const xserv::SelfTestLine &line)");
  if constexpr (is_right) {
    detail::Guarded<Function> guarded{report, nullptr};
    const xserv_status status = xserv_self_test(
        options.get(),
        [](const xserv_self_test_line *line, void *self) {
          return static_cast<decltype(guarded) *>(self)->call(*line);
        },
        &guarded);
    guarded.rethrow();
    detail::check(status);
  }
}
inline void self_test(const ContextOptions &options = ContextOptions()) {
  detail::check(xserv_self_test(options.get(), nullptr, nullptr));
}

}  // namespace xserv

#endif /* C++17 */

#endif
