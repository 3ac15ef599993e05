// Serves a model to OpenAI's clients, on this machine:  server MODEL [PORT]
//
// POST /v1/chat/completions (streaming and not), GET /v1/models and GET /health, with cpp-httplib
// and nlohmann-json. Each connection has a thread of cpp-httplib; the library computes the requests
// of all threads together.

#include <atomic>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <thread>

#include <unistd.h>

#include <httplib.h>
#include <nlohmann/json.hpp>
#include <xserv.hpp>

using nlohmann::json;

static constexpr std::size_t MAX_BODY_BYTES = 8 << 20, MAX_CONNECTIONS = 64;

// A request that is refused, with the field that is wrong.
struct Refused : std::runtime_error {
  Refused(std::string field, const std::string &message) : std::runtime_error(message), param(std::move(field)) {}
  std::string param;
};

static json error_of(const std::string &message, const char *type, const json &param = nullptr) {
  return {{"error", {{"message", message}, {"type", type}, {"param", param}, {"code", nullptr}}}};
}

static void answer(httplib::Response &response, int status, const json &body) {
  response.status = status;
  // Text that a client has sent may be quoted, and need not be UTF-8.
  response.set_content(body.dump(-1, ' ', false, json::error_handler_t::replace), "application/json");
}

struct Chat {
  json messages;
  xserv::Request request = xserv::Request::from_messages("[]");
  bool streams = false, with_usage = false;
};

template <typename Number>
static Number number(const std::string &name, const json &value, double least, double most) {
  if (!value.is_number() || value < least || value > most || (std::is_integral_v<Number> && !value.is_number_integer()))
    throw Refused(name, name + " must be a number from " + json(least).dump() + " to " + json(most).dump());
  return value.get<Number>();
}

static bool flag(const std::string &name, const json &value) {
  if (!value.is_boolean()) throw Refused(name, name + " must be true or false");
  return value;
}

// Reads the body of a request. It refuses what it does not know, as leaving it out would change the answer.
static Chat read(const std::string &text, const std::string &model_name) {
  // The parser needs no stack for what is nested, but others do.
  const auto is_shallow = [](int depth, json::parse_event_t, json &) {
    return depth < 100 ? true : throw Refused("", "the body is nested too deeply");
  };
  const json body = json::parse(text, is_shallow);
  if (!body.is_object()) throw Refused("", "the body must be an object");
  if (!body.contains("messages") || !body["messages"].is_array()) throw Refused("messages", "messages must be a list");
  Chat chat;
  chat.request = xserv::Request::from_messages(body["messages"].dump());
  chat.request.answer_format(body.contains("tools") ? XSERV_ANSWER_AUTO : XSERV_ANSWER_THINKING);
  const auto set_max_tokens = [&](const json &value) {
    chat.request.max_tokens(number<std::uint32_t>("max_tokens", value, 1, XSERV_NO_TOKEN - 1.0));
  };
  const std::map<std::string, std::function<void(const json &)>> fields = {
      {"messages", [](const json &) {}},
      {"model", [&](const json &value) {
         if (value != model_name) throw Refused("model", "there is no model " + value.dump() + " here");
       }},
      {"stream", [&](const json &value) { chat.streams = flag("stream", value); }},
      {"stream_options", [&](const json &value) {
         if (value.is_object() && value.contains("include_usage"))
           chat.with_usage = flag("stream_options.include_usage", value["include_usage"]);
       }},
      {"max_tokens", set_max_tokens},
      {"max_completion_tokens", set_max_tokens},
      {"temperature", [&](const json &value) { chat.request.temperature(number<float>("temperature", value, 0, 100)); }},
      {"top_p", [&](const json &value) { chat.request.top_p(number<float>("top_p", value, 0, 1)); }},
      {"seed", [&](const json &value) { chat.request.seed(number<std::uint64_t>("seed", value, 0, 9007199254740992.0)); }},
      {"stop", [&](const json &value) {
         for (const json &each : value.is_array() ? value : json::array({value})) {
           if (!each.is_string()) throw Refused("stop", "stop must be a text or a list of texts");
           chat.request.stop(each.get<std::string>());
         }
       }},
      {"tools", [&](const json &value) { chat.request.tools(value.dump()); }},
      {"chat_template_kwargs", [&](const json &value) { chat.request.template_variables(value.dump()); }},
  };
  for (const auto &[name, value] : body.items()) {
    const auto field = fields.find(name);
    if (field == fields.end()) throw Refused(name, "there is no parameter " + name);
    if (!value.is_null()) field->second(value);
  }
  return chat;
}

// An answer that is being generated. Destroying it cancels what has not ended.
struct Answer {
  xserv::Submission submission;
  json head;
  bool streams, with_usage, has_calls = false;

  std::string chunk(const json &choices, const json &usage = nullptr) const {
    json whole = head;
    whole["object"] = "chat.completion.chunk", whole["choices"] = choices;
    if (with_usage) whole["usage"] = usage;
    return "data: " + whole.dump() + "\n\n";
  }
  std::string delta(const json &delta, const json &reason = nullptr) const {
    return chunk(json::array({{{"index", 0}, {"delta", delta}, {"finish_reason", reason}}}));
  }
  std::string reason(std::uint32_t reason) const {
    if (reason == XSERV_FINISH_MAX_TOKENS || reason == XSERV_FINISH_CONTEXT_FULL) return "length";
    return has_calls ? "tool_calls" : "stop";
  }
  static json usage(const xserv::ResultInfo &info) {
    return {{"prompt_tokens", info.num_prompt_tokens},
            {"completion_tokens", info.num_tokens},
            {"total_tokens", info.num_prompt_tokens + info.num_tokens},
            {"prompt_tokens_details", {{"cached_tokens", info.num_cached_tokens}}}};
  }

  // Returns the text that an event adds to the stream.
  std::string text_of(const xserv::Event &event) {
    const auto call = [&](json fields) {
      fields["index"] = event.tool_call_index;
      return delta({{"tool_calls", json::array({fields})}});
    };
    switch (event.kind) {
      case XSERV_EVENT_CONTENT: return delta({{"content", event.text}});
      case XSERV_EVENT_REASONING: return delta({{"reasoning_content", event.text}});
      case XSERV_EVENT_TOOL_CALL_BEGIN:
        has_calls = true;
        return call({{"id", event.tool_call_id}, {"type", "function"},
                     {"function", {{"name", event.tool_name}, {"arguments", ""}}}});
      case XSERV_EVENT_TOOL_CALL_ARGUMENTS: return call({{"function", {{"arguments", event.text}}}});
      case XSERV_EVENT_END: return delta(json::object(), reason(event.finish_reason));
      default: return "";
    }
  }

  // The end of the stream, or the whole answer.
  std::string end() {
    const xserv::Result result = submission.take_result();
    if (streams) return (with_usage ? chunk(json::array(), usage(result.info())) : "") + "data: [DONE]\n\n";
    json message = {{"role", "assistant"}, {"content", std::string(result.content())}};
    if (!result.reasoning().empty()) message["reasoning_content"] = std::string(result.reasoning());
    for (const xserv::ToolCall &call : result.tool_calls()) {
      has_calls = true;
      message["tool_calls"].push_back(
          {{"id", call.id}, {"type", "function"}, {"function", {{"name", call.name}, {"arguments", call.arguments_json}}}});
    }
    json whole = head;
    whole["object"] = "chat.completion", whole["usage"] = usage(result.info());
    whole["choices"] = json::array({{{"index", 0}, {"message", message}, {"finish_reason", reason(result.info().finish_reason)}}});
    return whole.dump();
  }

  // Sends the next event. False ends the connection: the client has left, or the generation has failed.
  bool send_next(httplib::DataSink &sink) try {
    const xserv::Event event = submission.next(std::chrono::milliseconds(50));
    const std::string text = event.kind == XSERV_EVENT_DONE ? end() : streams ? text_of(event) : "";
    if (!sink.is_writable() || (!text.empty() && !sink.write(text.data(), text.size()))) return false;
    if (event.kind == XSERV_EVENT_DONE) sink.done();
    return true;
  } catch (const std::exception &error) {
    // The status has been sent; a stream can still say what went wrong.
    const std::string text = "data: " + error_of(error.what(), "server_error").dump() + "\n\n";
    if (streams) sink.write(text.data(), text.size());
    return false;
  }
};

int main(int argc, char **argv) try {
  if (argc < 2) return std::cerr << "usage: server MODEL [PORT]\n", 2;
  sigset_t ends;  // a thread waits for them; those that begin later have them blocked as well
  sigemptyset(&ends), sigaddset(&ends, SIGINT), sigaddset(&ends, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &ends, nullptr);
  const xserv::Model model(argv[1]);
  const std::string name = std::filesystem::canonical(argv[1]).filename();
  const std::time_t created = std::time(nullptr);
  httplib::Server server;
  server.new_task_queue = [] { return new httplib::ThreadPool(MAX_CONNECTIONS); };
  server.set_payload_max_length(MAX_BODY_BYTES).set_tcp_nodelay(true);
  // A page of another origin could otherwise reach the server by a name that leads to this machine.
  server.set_pre_routing_handler([](const httplib::Request &request, httplib::Response &response) {
    const std::string host = request.get_header_value("Host"), bare = host.substr(0, host.find(':'));
    if (bare == "127.0.0.1" || bare == "localhost") return httplib::Server::HandlerResponse::Unhandled;
    answer(response, 403, error_of("this server is 127.0.0.1 or localhost, not " + host, "invalid_request_error"));
    return httplib::Server::HandlerResponse::Handled;
  });
  server.set_error_handler([](const httplib::Request &, httplib::Response &response) {
    if (!response.body.empty()) return;
    const int status = response.status;
    const char *what = status == 404 ? "there is nothing at this path" : status == 413 ? "the body is too large"
                       : status >= 500 ? "the server has failed" : "the request is malformed";
    answer(response, status, error_of(what, status >= 500 ? "server_error" : "invalid_request_error"));
  });
  server.Get("/health", [](const httplib::Request &, httplib::Response &response) { answer(response, 200, {{"status", "ok"}}); });
  server.Get("/v1/models", [&](const httplib::Request &, httplib::Response &response) {
    const json entry = {{"id", name}, {"object", "model"}, {"created", created}, {"owned_by", "xserv"},
                        {"max_model_len", model.info().max_context_tokens}};
    answer(response, 200, {{"object", "list"}, {"data", json::array({entry})}});
  });
  server.Post("/v1/chat/completions", [&](const httplib::Request &request, httplib::Response &response) {
    try {
      if (request.get_header_value("Content-Type").rfind("application/json", 0) != 0)
        throw Refused("", "the body must have the type application/json");
      const Chat chat = read(request.body, name);
      const auto kinds = {XSERV_EVENT_CONTENT, XSERV_EVENT_REASONING, XSERV_EVENT_TOOL_CALL_BEGIN,
                          XSERV_EVENT_TOOL_CALL_ARGUMENTS, XSERV_EVENT_END};
      auto submission = model.submit(chat.request, xserv::SubmitOptions().events(kinds));
      static std::atomic<std::uint64_t> count{0};
      const json head = {{"id", "chatcmpl-" + std::to_string(++count)}, {"created", std::time(nullptr)}, {"model", name}};
      auto generated = std::make_shared<Answer>(Answer{std::move(submission), head, chat.streams, chat.with_usage});
      response.set_chunked_content_provider(
          chat.streams ? "text/event-stream" : "application/json",
          [generated](std::size_t, httplib::DataSink &sink) { return generated->send_next(sink); });
    } catch (const Refused &refused) {
      const json param = refused.param.empty() ? json() : json(refused.param);
      answer(response, 400, error_of(refused.what(), "invalid_request_error", param));
    } catch (const json::exception &error) {
      answer(response, 400, error_of(std::string("the body is not JSON: ") + error.what(), "invalid_request_error"));
    } catch (const xserv::Error &error) {
      const bool is_ours = error.status() == XSERV_STATUS_OUT_OF_MEMORY || error.status() >= XSERV_STATUS_NO_DEVICE;
      answer(response, is_ours ? 503 : 400, error_of(error.what(), is_ours ? "server_error" : "invalid_request_error"));
    }
  });
  const int wanted = argc > 2 ? std::stoi(argv[2]) : 8000;
  const int port = wanted == 0 ? server.bind_to_any_port("127.0.0.1") : server.bind_to_port("127.0.0.1", wanted) ? wanted : -1;
  if (port < 0) return std::cerr << "server: port " << wanted << " cannot be had\n", 1;
  std::cerr << "http://127.0.0.1:" << port << std::endl;
  std::thread waits([&] {
    int signal;
    sigwait(&ends, &signal);
    server.stop();
  });
  const bool has_listened = server.listen_after_bind();
  kill(getpid(), SIGTERM);  // for the thread, where no signal has ended the server
  waits.join();
  return has_listened ? 0 : 1;
} catch (const std::exception &error) {
  std::cerr << "server: " << error.what() << "\n";
  return 1;
}
