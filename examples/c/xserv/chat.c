/* xserv chat: a conversation in the terminal. */

#define _POSIX_C_SOURCE 200809L

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <xserv.h>

#include "../common/interrupt.h"
#include "../common/stream.h"
#include "arguments.h"
#include "commands.h"
#include "conversation.h"
#include "fields.h"
#include "input.h"
#include "load.h"
#include "terminal.h"
#include "thinking.h"
#include "utf8.h"

static const char name[] = "xserv chat";

typedef struct chat {
  const xserv_model *model;
  const char *model_name;
  xserv_model_info info;
  xserv_request request;
  input input;
  conversation conversation;
  xserv_messages *messages; /* of the last request */
  int failures;
  bool is_styled;
} chat;

static const char dim[] = "\033[2m", plain[] = "\033[0m";

/* Says something that is neither question nor answer: to the person, or into the log of a pipe. */
#ifdef __GNUC__
__attribute__((format(printf, 2, 3)))
#endif
static void note(const chat *self, const char *format, ...) {
  FILE *out = self->input.is_interactive ? stdout : stderr;
  va_list arguments;
  if (self->is_styled) fputs(dim, out);
  else if (!self->input.is_interactive) fprintf(out, "%s: ", name);
  va_start(arguments, format);
  vfprintf(out, format, arguments);
  va_end(arguments);
  fprintf(out, "%s\n", self->is_styled ? plain : "");
  fflush(out);
}

/* Fitting the conversation into the context. */

/* Counts the tokens of self->messages as a prompt; sets `opens_thinking` to whether the template
 * has opened <think> at its end. Returns false if the library refuses. */
static bool count_tokens(const chat *self, size_t *num_tokens, bool *opens_thinking) {
  xserv_chat_options options;
  xserv_text *text = NULL;
  xserv_tokens *tokens = NULL;
  xserv_chat_options_default(&options);
  options.messages_json = xserv_messages_json(self->messages);
  options.template_variables_json = self->request.template_variables_json;
  xserv_status status = xserv_tokenize_chat(self->model, &options, &tokens);
  if (status == XSERV_STATUS_OK) status = xserv_apply_chat_template(self->model, &options, &text);
  if (status == XSERV_STATUS_OK) {
    size_t len = 0;
    const char *prompt = xserv_text_data(text, &len);
    static const char tag[] = "<think>";
    while (len > 0 && (prompt[len - 1] == '\n' || prompt[len - 1] == ' ')) len--;
    *opens_thinking = len >= sizeof tag - 1 && memcmp(prompt + len - (sizeof tag - 1), tag, sizeof tag - 1) == 0;
  }
  if (status == XSERV_STATUS_OK) xserv_tokens_data(tokens, num_tokens);
  xserv_tokens_free(tokens);
  xserv_text_free(text);
  return status == XSERV_STATUS_OK;
}

typedef enum fit { FITS, TOO_LONG, REFUSED } fit;

/*
 * Makes self->messages for the question, with as many of the turns as leave room for an answer: a
 * quarter of the context, or max_tokens if that is less. Older turns are dropped, unless the
 * question does not even fit alone.
 */
static fit make_prompt(chat *self, const text_buffer *question, size_t *num_tokens, bool *opens_thinking) {
  const size_t context = (size_t)self->info.max_context_tokens;
  size_t room = context / 4, first = 0;
  if (self->request.max_tokens < room) room = self->request.max_tokens;
  for (;; first++) {
    if (conversation_messages(&self->conversation, first, question, self->messages) != XSERV_STATUS_OK) return REFUSED;
    if (!count_tokens(self, num_tokens, opens_thinking)) return REFUSED;
    if (*num_tokens + room <= context || first == self->conversation.num_turns) break;
  }
  if (*num_tokens > context) return TOO_LONG;
  conversation_drop(&self->conversation, first);
  if (first > 0)
    note(self, first == 1 ? "[the context is full: the oldest turn is dropped]"
                          : "[the context is full: the oldest %zu turns are dropped]", first);
  return FITS;
}

/* Answering. */

typedef struct answer {
  const chat *chat;
  thinking thinking;
  text_buffer text; /* without what was thought */
  bool was_thought; /* of what was shown last */
  bool is_empty;    /* nothing was shown yet */
  bool failed;      /* standard output cannot be written */
} answer;

static bool show(const char *text, size_t len, bool thought, void *user_data) {
  answer *self = user_data;
  if (!thought) text_append_bytes(&self->text, text, len);
  if (!self->chat->is_styled) return true; /* it was printed as it came */
  if (thought && (self->is_empty || !self->was_thought)) fputs(dim, stdout);
  if (!thought && self->was_thought) printf("%s\n\n", plain);
  self->is_empty = false;
  self->was_thought = thought;
  self->failed = !terminal_write_text(text, len);
  return !self->failed;
}

static bool take_text(const char *text, size_t len, void *user_data) {
  answer *self = user_data;
  if (!self->chat->is_styled) {
    self->is_empty = false;
    self->failed = !terminal_write_text(text, len);
  }
  return !self->failed && thinking_push(&self->thinking, text, len);
}

/* Says how an answer ended, where that is not plain. */
static void note_end(const chat *self, const answer *answer, const xserv_result_info *info, bool stopped,
                     size_t num_tokens) {
  if (stopped) note(self, answer->is_empty ? "[stopped]" : " [stopped]");
  else if (!answer->is_empty || !self->is_styled) putchar('\n');
  if (!stopped && info->finish_reason == XSERV_FINISH_CONTEXT_FULL)
    note(self, "[the context is full, so the answer ends here]");
  if (!stopped && info->finish_reason == XSERV_FINISH_MAX_TOKENS && self->is_styled)
    note(self, "[the answer has reached its limit of tokens]");
  if (answer->text.len == 0) note(self, "[there is no answer, so this turn is not kept]");
  if (!stopped && self->is_styled)
    note(self, "[%zu tokens, %.1f per second, the first after %.2f s; context %zu of %llu]", info->num_tokens,
         info->tokens_per_second, info->time_to_first_token_seconds, num_tokens + info->num_tokens,
         (unsigned long long)self->info.max_context_tokens);
}

/* Answers a question, and adds both to the conversation unless it fails. */
static void answer_question(chat *self, const text_buffer *question) {
  size_t num_tokens = 0;
  bool opens_thinking = false;
  interrupt_take(); /* a Ctrl-C from before is not about this answer */
  const fit fit = make_prompt(self, question, &num_tokens, &opens_thinking);
  if (fit == TOO_LONG)
    fprintf(stderr,
            "%s: this makes a prompt of %zu tokens without any earlier turn, but the context holds %llu: "
            "it is not sent\n",
            name, num_tokens, (unsigned long long)self->info.max_context_tokens);
  if (fit == REFUSED) report_error(name);
  if (fit != FITS) {
    self->failures++;
    return;
  }

  answer answer = {.chat = self, .is_empty = true};
  xserv_result *result = NULL; /* stays NULL if the answer is stopped */
  xserv_result_info info = {.struct_size = sizeof info};
  thinking_begin(&answer.thinking, opens_thinking, show, &answer);
  self->request.messages_json = xserv_messages_json(self->messages);
  xserv_status status =
      stream(self->model, &self->request, self->input.interrupt_fd, take_text, &answer, &result);
  if (status == XSERV_STATUS_OK && result != NULL) status = xserv_result_get_info(result, &info);
  thinking_end(&answer.thinking);
  if (self->is_styled && answer.was_thought) fputs(plain, stdout);
  if (answer.failed) {
    fprintf(stderr, "%s: standard output cannot be written\n", name);
    exit(1);
  }
  if (status == XSERV_STATUS_OK) {
    note_end(self, &answer, &info, result == NULL, num_tokens);
    if (answer.text.len > 0) conversation_add(&self->conversation, question, &answer.text);
  } else {
    if (!answer.is_empty) putchar('\n');
    fflush(stdout);
    report_error(name);
    self->failures++;
  }
  fflush(stdout);
  xserv_result_free(result);
  text_free(&answer.text);
}

/* Commands. */

static void print_commands(const chat *self) {
  note(self,
       "/clear            start over\n"
       "/system TEXT      set the system message from here on; - for none; alone: show it\n"
       "/thinking on|off  whether to think first, where the model can; auto: as it likes\n"
       "/stats            tokens and memory\n"
       "/exit             leave, as Ctrl-D does\n"
       "A line that begins with a slash and a word is a command; put a space before it to\n"
       "send it. Ctrl-C stops an answer or its prompt. Up and Down go through what you\n"
       "said; Alt-Enter begins another line, and a pasted text keeps its lines.");
}

static void print_stats(const chat *self) {
  xserv_model_stats stats = {.struct_size = sizeof stats};
  char bytes[32];
  if (xserv_model_get_stats(self->model, &stats) != XSERV_STATUS_OK) {
    report_error(name);
    return;
  }
  note(self,
       "turns: %zu\n"
       "prompt tokens: %llu computed, %llu found in the prefix cache\n"
       "generated tokens: %llu\n"
       "memory: %s at most\n"
       "KV cache: %llu tokens, contexts of %llu",
       self->conversation.num_turns, (unsigned long long)stats.total_prompt_tokens,
       (unsigned long long)stats.total_cached_tokens, (unsigned long long)stats.total_generated_tokens,
       describe_bytes(stats.peak_memory_bytes, bytes), (unsigned long long)self->info.kv_cache_tokens,
       (unsigned long long)self->info.max_context_tokens);
}

static void set_system(chat *self, const char *text, size_t len) {
  conversation *conversation = &self->conversation;
  if (len == 0) {
    if (conversation->system.len == 0) note(self, "[there is no system message]");
    else note(self, "[system: %s]", conversation->system.data);
    return;
  }
  text_truncate(&conversation->system, 0);
  if (len == 1 && text[0] == '-') len = 0;
  text_append_bytes(&conversation->system, text, len);
  note(self, len == 0 ? "[there is no system message any more]" : "[the system message is set]");
}

static void set_thinking(chat *self, const char *text) {
  static const char *const values[] = {"auto", "on", "off"};
  for (uint32_t i = 0; i < 3; i++) {
    if (strcmp(text, values[i]) != 0) continue;
    self->request.template_variables_json = thinking_variables(i);
    note(self, "[thinking: %s]", text);
    return;
  }
  note(self, "[/thinking takes on, off or auto]");
}

/* Whether a text is a command: "/word", alone or before a space. A path or a comment is none. */
static bool is_command(const text_buffer *text) {
  if (text->len == 0 || text->data[0] != '/') return false;
  size_t at = 1;
  while (at < text->len && ((text->data[at] >= 'a' && text->data[at] <= 'z') || text->data[at] == '_' ||
                            (text->data[at] >= 'A' && text->data[at] <= 'Z')))
    at++;
  return at > 1 && (at == text->len || text->data[at] == ' ');
}

/* Returns false if the conversation is to end. */
static bool run_command(chat *self, const text_buffer *text) {
  const size_t word = strcspn(text->data, " ");
  const char *rest = text->data + word + strspn(text->data + word, " ");
  char command[16];
  snprintf(command, sizeof command, "%.*s", (int)word, text->data);
  if (strcmp(command, "/exit") == 0 || strcmp(command, "/quit") == 0) return false;
  if (strcmp(command, "/help") == 0) {
    print_commands(self);
  } else if (strcmp(command, "/clear") == 0) {
    conversation_drop(&self->conversation, self->conversation.num_turns);
    if (self->input.is_interactive) note(self, "[the conversation starts over]");
  } else if (strcmp(command, "/system") == 0) {
    set_system(self, rest, text->len - (size_t)(rest - text->data));
  } else if (strcmp(command, "/thinking") == 0) {
    set_thinking(self, rest);
  } else if (strcmp(command, "/stats") == 0) {
    print_stats(self);
  } else {
    note(self, "[there is no command %.*s; /help lists them]", (int)word, text->data);
    self->failures++;
  }
  return true;
}

/* The conversation. */

static void print_banner(const chat *self) {
  const xserv_model_info *info = &self->info;
  const double parameters = (double)info->num_parameters;
  note(self, "%s: %s of %.3g %s parameters, %s on %s, context of %llu tokens", self->model_name, info->architecture,
       parameters / (parameters < 1e9 ? 1e6 : 1e9), parameters < 1e9 ? "million" : "billion", dtype_name(info->dtype),
       info->device, (unsigned long long)info->max_context_tokens);
  note(self, "Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands.");
}

/* Reads and answers until the input ends. Returns the exit status. */
static int converse(chat *self) {
  text_buffer text = {0};
  bool is_open = true;
  int exit_code = 0;
  if (self->input.is_interactive) print_banner(self);
  while (is_open && exit_code == 0) {
    const edit_result result = input_read(&self->input, &text);
    if (result == EDIT_END) break;
    if (result == EDIT_INTERRUPT) {
      if (!self->input.is_interactive) exit_code = EXIT_INTERRUPTED;
      else if (text.len == 0) note(self, "(Ctrl-D or /exit leaves)");
      continue;
    }
    if (text.len == 0) continue;
    if (strlen(text.data) != text.len) {
      fprintf(stderr, "%s: a line that contains a NUL is not sent\n", name);
      self->failures++;
      continue;
    }
    input_remember(&self->input, &text);
    if (is_command(&text)) {
      is_open = run_command(self, &text);
    } else {
      answer_question(self, &text);
      /* With nobody to type on, Ctrl-C is meant for the program. */
      if (interrupt_take() && !self->input.is_interactive) exit_code = EXIT_INTERRUPTED;
    }
  }
  text_free(&text);
  if (exit_code != 0 || self->input.is_interactive) return exit_code;
  return self->failures == 0 ? 0 : 1;
}

int run_chat(int argc, char **argv) {
  const char *path = NULL, *system_text = NULL;
  load_arguments load;
  sampling_arguments sampling;
  load_arguments_begin(&load);
  sampling_arguments_begin(&sampling);
  const command_option options[] = {
      {"--system", "TEXT", OPTION_TEXT, &system_text, "a system message before the conversation", 0, 0},
      {0},
  };
  const command command = {name, "MODEL",
                           "A conversation in the terminal, or with the lines of a pipe. MODEL is a folder as Hugging\n"
                           "Face publishes it, or the name of a repository in the local Hugging Face cache. Ctrl-C\n"
                           "stops an answer, Ctrl-D leaves, /help lists commands and keys. When the context is full\n"
                           "the oldest turns are dropped. What is not set below is as the model's\n"
                           "generation_config.json says.",
                           {{"Options", options}, {"Sampling", sampling.rows}, {"Model", load.rows}}};
  if (parse_command(&command, argc, argv, &path, 1) == 0)
    refuse(&command, "the folder of a model is missing; --help tells more");
  load_arguments_end(&load);
  sampling_arguments_end(&sampling);
  utf8_begin();

  xserv_model *model = NULL;
  int exit_code = load_model(name, path, &load, &model);
  if (exit_code != 0) return exit_code;
  chat self = {.model = model, .model_name = path, .request = sampling.request};
  self.info.struct_size = sizeof self.info;
  if (xserv_model_get_info(model, &self.info) != XSERV_STATUS_OK || xserv_messages_new(&self.messages) != XSERV_STATUS_OK) {
    exit_code = report_error(name);
  } else if (!self.info.has_tokenizer || !self.info.has_chat_template) {
    fprintf(stderr, "%s: %s has no usable %s; xserv inspect tells why%s\n", name, path,
            self.info.has_tokenizer ? "chat template" : "tokenizer",
            self.info.has_tokenizer ? ", and xserv generate continues texts without one" : "");
    exit_code = 1;
  } else {
    if (system_text != NULL) text_append(&self.conversation.system, system_text);
    input_begin(&self.input, interrupt_begin(false));
    self.is_styled = self.input.is_interactive && terminal_is_drawable(STDOUT_FILENO) && getenv("NO_COLOR") == NULL;
    exit_code = converse(&self);
    input_end(&self.input);
  }
  conversation_free(&self.conversation);
  xserv_messages_free(self.messages);
  xserv_model_free(model);
  return exit_code;
}
