/* The command line of a program: its options are a table, from which they are read and explained. */

#ifndef EXAMPLES_OPTIONS_H
#define EXAMPLES_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MAX_LIST = 16, MAX_TEXTS = 64, MAX_GROUPS = 4 };

typedef struct number_list {
  uint32_t values[MAX_LIST];
  size_t len;
} number_list;

typedef struct text_list {
  const char *values[MAX_TEXTS];
  size_t len;
} text_list;

/* The kind of an option's value, and the type that `value` points to. */
typedef enum option_kind {
  OPTION_FLAG,    /* bool: no value, being given makes it true */
  OPTION_TEXT,    /* const char * */
  OPTION_TEXTS,   /* text_list: the option may be given several times */
  OPTION_UINT32,  /* uint32_t, from min to max */
  OPTION_UINT64,  /* uint64_t, from min to max */
  OPTION_FLOAT,   /* float */
  OPTION_SIZE,    /* uint64_t, bytes: 8G and 8GiB count in 1024, 8GB in 1000; at least 1 */
  OPTION_CHOICE,  /* uint32_t: the index of the value among those in `argument`, "cpu|cuda|auto" */
  OPTION_NUMBERS, /* number_list: "1,2,3", each from min to max */
} option_kind;

typedef struct command_option {
  const char *name;     /* "--threads"; NULL ends a list of options */
  const char *argument; /* what the usage calls the value, "N" */
  option_kind kind;
  void *value;      /* untouched if the option is not given */
  const char *help; /* line breaks in it are kept */
  uint64_t min, max;
} command_option;

typedef struct option_group {
  const char *title;
  const command_option *options;
} option_group;

typedef struct command {
  const char *name;     /* as messages begin: "xserv chat" */
  const char *operands; /* "MODEL [PROMPT]" */
  const char *about;    /* what the program does: lines for its usage */
  option_group groups[MAX_GROUPS]; /* those without options are left out */
} command;

/*
 * Reads the options of a command line into their values ("--name value" or "--name=value"; "--"
 * ends the options), and stores pointers to the other arguments in `operands`. Returns the number
 * of operands. --help prints the usage and ends the program with exit status 0; a mistake prints a
 * sentence, and ends it with 2.
 */
size_t parse_command(const command *command, int argc, char **argv, const char **operands, size_t max_operands);

/* Prints a sentence about a mistake in the command line, and ends the program with exit status 2. */
#ifdef __GNUC__
__attribute__((noreturn, format(printf, 2, 3)))
#endif
void refuse(const command *command, const char *format, ...);

#endif
