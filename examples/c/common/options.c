#include "options.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void refuse(const command *command, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "%s: ", command->name);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  exit(2);
}

enum { HELP_COLUMN = 30 };

/* Prints "  --name N      help", further lines of the help below its first. */
static void print_option(const char *name, const char *argument, const char *help) {
  char left[128];
  snprintf(left, sizeof left, "  %s%s%s", name, argument != NULL ? " " : "", argument != NULL ? argument : "");
  fputs(left, stdout);
  size_t column = strlen(left);
  if (column + 2 > HELP_COLUMN) {
    putchar('\n');
    column = 0;
  }
  for (;;) {
    size_t len = strcspn(help, "\n");
    printf("%*s%.*s\n", (int)(HELP_COLUMN - column), "", (int)len, help);
    if (help[len] == '\0') return;
    help += len + 1;
    column = 0;
  }
}

static void print_help(const command *command) {
  printf("usage: %s %s [OPTIONS]\n\n%s\n", command->name, command->operands, command->about);
  for (size_t i = 0; i < MAX_GROUPS; i++) {
    const option_group *group = &command->groups[i];
    if (group->options == NULL) continue;
    printf("\n%s:\n", group->title);
    for (const command_option *option = group->options; option->name != NULL; option++)
      print_option(option->name, option->argument, option->help);
  }
  putchar('\n');
  print_option("--help", NULL, "print this, and leave");
  exit(fflush(stdout) == 0 ? 0 : 1);
}

static const command_option *find(const command *command, const char *name, size_t len) {
  for (size_t i = 0; i < MAX_GROUPS; i++) {
    const command_option *option = command->groups[i].options;
    for (; option != NULL && option->name != NULL; option++)
      if (strlen(option->name) == len && memcmp(option->name, name, len) == 0) return option;
  }
  return NULL;
}

/* Reads digits and returns where they end; NULL if they are no number of the option's range. */
static const char *read_number(const command_option *option, const char *text, uint64_t *value) {
  char *end;
  errno = 0;
  unsigned long long number = strtoull(text, &end, 10);
  if (text[0] < '0' || text[0] > '9' || errno != 0 || number < option->min || number > option->max) return NULL;
  *value = number;
  return end;
}

static bool read_numbers(const command_option *option, const char *text, number_list *list) {
  list->len = 0;
  for (;; text++) {
    uint64_t number = 0;
    text = read_number(option, text, &number);
    if (text == NULL || list->len == MAX_LIST || (*text != ',' && *text != '\0')) return false;
    list->values[list->len++] = (uint32_t)number;
    if (*text == '\0') return true;
  }
}

static bool read_size(const char *text, uint64_t *value) {
  static const char units[] = "KMGT";
  size_t digits = strspn(text, "0123456789.");
  char *end;
  double number = strtod(text, &end);
  if (digits == 0 || end != text + digits) return false;
  if (*end != '\0' && *end != 'B') {
    const char upper = *end >= 'a' && *end <= 'z' ? (char)(*end - 'a' + 'A') : *end;
    const char *unit = strchr(units, upper);
    if (unit == NULL) return false;
    end++;
    const bool decimal = strcmp(end, "B") == 0;
    if (!decimal && *end != '\0' && strcmp(end, "iB") != 0) return false;
    for (const char *at = units; at <= unit; at++) number *= decimal ? 1000 : 1024;
  } else if (strcmp(end, "B") != 0 && *end != '\0') {
    return false;
  }
  if (number < 1 || number >= 0x1p63) return false;
  *value = (uint64_t)number;
  return true;
}

static bool read_choice(const char *names, const char *text, uint32_t *value) {
  const size_t len = strlen(text);
  for (*value = 0;; ++*value) {
    size_t name_len = strcspn(names, "|");
    if (name_len == len && memcmp(names, text, len) == 0) return true;
    if (names[name_len] == '\0') return false;
    names += name_len + 1;
  }
}

static void store(const command *command, const command_option *option, const char *text) {
  uint64_t number = 0;
  const char *end;
  switch (option->kind) {
  case OPTION_FLAG: *(bool *)option->value = true; return;
  case OPTION_TEXT: *(const char **)option->value = text; return;
  case OPTION_TEXTS: {
    text_list *list = option->value;
    if (list->len == MAX_TEXTS) refuse(command, "%s may be given %d times", option->name, MAX_TEXTS);
    list->values[list->len++] = text;
    return;
  }
  case OPTION_UINT32:
  case OPTION_UINT64:
    end = read_number(option, text, &number);
    if (end == NULL || *end != '\0')
      refuse(command, "%s must be a whole number from %llu to %llu, not \"%s\"", option->name,
             (unsigned long long)option->min, (unsigned long long)option->max, text);
    if (option->kind == OPTION_UINT32) *(uint32_t *)option->value = (uint32_t)number;
    else *(uint64_t *)option->value = number;
    return;
  case OPTION_FLOAT: {
    char *after;
    *(float *)option->value = strtof(text, &after);
    if (after == text || *after != '\0') refuse(command, "%s must be a number, not \"%s\"", option->name, text);
    return;
  }
  case OPTION_SIZE:
    if (!read_size(text, option->value))
      refuse(command, "%s must be a size such as 500M or 8G, not \"%s\"", option->name, text);
    return;
  case OPTION_CHOICE:
    if (!read_choice(option->argument, text, option->value))
      refuse(command, "%s must be one of %s, not \"%s\"", option->name, option->argument, text);
    return;
  case OPTION_NUMBERS:
    if (!read_numbers(option, text, option->value))
      refuse(command, "%s must be at most %d numbers from %llu to %llu with commas between them, not \"%s\"",
             option->name, MAX_LIST, (unsigned long long)option->min, (unsigned long long)option->max, text);
    return;
  }
}

size_t parse_command(const command *command, int argc, char **argv, const char **operands, size_t max_operands) {
  size_t num_operands = 0;
  bool options_are_over = false;
  for (int i = 1; i < argc; i++) {
    const char *word = argv[i];
    if (options_are_over || word[0] != '-' || word[1] == '\0') {
      if (num_operands == max_operands)
        refuse(command, "\"%s\" is one argument too many; a text with spaces needs quotes", word);
      operands[num_operands++] = word;
      continue;
    }
    if (strcmp(word, "--") == 0) {
      options_are_over = true;
      continue;
    }
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) print_help(command);
    size_t len = strcspn(word, "=");
    const command_option *option = find(command, word, len);
    if (option == NULL) refuse(command, "unknown option %.*s; --help lists the options", (int)len, word);
    const bool has_value = word[len] == '=';
    if (option->kind == OPTION_FLAG && has_value) refuse(command, "%s takes no value", option->name);
    if (option->kind != OPTION_FLAG && !has_value && i + 1 == argc) refuse(command, "%s needs a value", option->name);
    const char *value = has_value ? word + len + 1 : option->kind == OPTION_FLAG ? NULL : argv[++i];
    store(command, option, value);
  }
  return num_operands;
}
