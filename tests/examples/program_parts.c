/*
 * Calls parts of examples/c/xserv for tests:
 *
 *     program_parts thinking INSIDE TEXT    for each way of cutting the text into two pieces and into
 *                                           single bytes, a line: what is thought, a tab, the rest
 *     program_parts decode HEX              the character of these bytes, and how many it has
 *     program_parts size TEXT               the number of bytes that a size stands for
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/options.h"
#include "common/text_buffer.h"
#include "xserv/thinking.h"
#include "xserv/utf8.h"

typedef struct parts {
  text_buffer thought, answer;
} parts;

static bool take(const char *text, size_t len, bool thought, void *user_data) {
  parts *self = user_data;
  text_append_bytes(thought ? &self->thought : &self->answer, text, len);
  return true;
}

/* Pieces of `step` bytes, the first one of `first`. */
static void cut(const char *text, bool inside, size_t first, size_t step) {
  parts all = {{0}, {0}};
  thinking filter;
  thinking_begin(&filter, inside, take, &all);
  const size_t len = strlen(text);
  for (size_t at = 0, piece = first; at < len; at += piece, piece = step) {
    if (piece > len - at) piece = len - at;
    thinking_push(&filter, text + at, piece);
  }
  thinking_end(&filter);
  printf("%s\t%s\n", all.thought.len > 0 ? all.thought.data : "", all.answer.len > 0 ? all.answer.data : "");
  text_free(&all.thought);
  text_free(&all.answer);
}

int main(int argc, char **argv) {
  if (argc == 4 && strcmp(argv[1], "thinking") == 0) {
    const size_t len = strlen(argv[3]);
    for (size_t first = 1; first <= len; first++) cut(argv[3], argv[2][0] == '1', first, len);
    cut(argv[3], argv[2][0] == '1', 1, 1);
  } else if (argc == 3 && strcmp(argv[1], "decode") == 0) {
    char bytes[8];
    size_t len = 0;
    for (const char *at = argv[2]; at[0] != '\0' && len < sizeof bytes; at += 2)
      bytes[len++] = (char)strtol((char[]){at[0], at[1], '\0'}, NULL, 16);
    uint32_t character = 0;
    const size_t used = utf8_decode(bytes, len, &character);
    printf("%x %zu\n", (unsigned)character, used);
  } else if (argc == 3 && strcmp(argv[1], "size") == 0) {
    uint64_t size = 0;
    const command_option options[] = {{"--size", "SIZE", OPTION_SIZE, &size, "", 0, 0}, {0}};
    const command command = {"program_parts", "", "", {{"", options}}};
    char *words[] = {"program_parts", "--size", argv[2]};
    parse_command(&command, 3, words, NULL, 0);
    printf("%llu\n", (unsigned long long)size);
  } else {
    return 2;
  }
  return 0;
}
