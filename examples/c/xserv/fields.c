#include "fields.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include <xserv.h>

#include "../common/text_buffer.h"

field text_field(const char *name, const char *text) {
  return (field){.name = name, .kind = FIELD_TEXT, .text = text, .number = strlen(text)};
}
field number_field(const char *name, uint64_t number) {
  return (field){.name = name, .kind = FIELD_NUMBER, .number = number};
}
field bytes_field(const char *name, uint64_t bytes) {
  return (field){.name = name, .kind = FIELD_BYTES, .number = bytes};
}
field real_field(const char *name, double real) {
  return (field){.name = name, .kind = FIELD_REAL, .real = isfinite(real) ? real : 0};
}
field truth_field(const char *name, bool is_true) {
  return (field){.name = name, .kind = FIELD_TRUTH, .number = is_true};
}

field unknown_field(const char *name, const char *why) {
  return (field){.name = name, .kind = FIELD_UNKNOWN, .text = why, .number = strlen(why)};
}

const char *describe_bytes(uint64_t bytes, char buffer[32]) {
  static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  double number = (double)bytes;
  size_t unit = 0;
  while (number >= 1024 && unit + 1 < sizeof units / sizeof *units) {
    number /= 1024;
    unit++;
  }
  snprintf(buffer, 32, unit == 0 ? "%.0f %s" : "%.1f %s", number, units[unit]);
  return buffer;
}

static void print_json(const field *fields, size_t num_fields) {
  text_buffer out = {0};
  char number[32];
  for (size_t i = 0; i < num_fields; i++) {
    const field *of = &fields[i];
    text_append(&out, i == 0 ? "{\n  " : ",\n  ");
    text_append_json_string(&out, of->name, strlen(of->name));
    text_append(&out, ": ");
    number[0] = '\0';
    switch (of->kind) {
    case FIELD_TEXT: text_append_json_string(&out, of->text, of->number); break;
    case FIELD_NUMBER:
    case FIELD_BYTES: snprintf(number, sizeof number, "%llu", (unsigned long long)of->number); break;
    case FIELD_REAL: snprintf(number, sizeof number, "%.9g", of->real); break;
    case FIELD_UNKNOWN: text_append(&out, "null"); break;
    case FIELD_TRUTH: text_append(&out, of->number != 0 ? "true" : "false"); break;
    case FIELD_IDS:
      text_append(&out, "[");
      for (uint64_t k = 0; k < of->number; k++) {
        snprintf(number, sizeof number, k == 0 ? "%u" : ", %u", of->ids[k]);
        text_append(&out, number);
      }
      text_append(&out, "]");
      number[0] = '\0';
      break;
    }
    text_append(&out, number);
  }
  text_append(&out, "\n}\n");
  fwrite(out.data, 1, out.len, stdout);
  text_free(&out);
}

void print_fields(const field *fields, size_t num_fields, bool json) {
  if (json) {
    print_json(fields, num_fields);
    return;
  }
  for (size_t i = 0; i < num_fields; i++) {
    const field *of = &fields[i];
    char label[40], bytes[32];
    if (of->kind == FIELD_IDS || (of->kind == FIELD_TEXT && of->number == 0)) continue;
    snprintf(label, sizeof label, "%s", of->name);
    for (char *at = label; *at != '\0'; at++)
      if (*at == '_') *at = ' ';
    printf("%-24s", label);
    switch (of->kind) {
    case FIELD_TEXT:
    case FIELD_UNKNOWN: puts(of->text); break;
    case FIELD_NUMBER: printf("%llu\n", (unsigned long long)of->number); break;
    case FIELD_BYTES:
      if (of->number < 1024) printf("%llu\n", (unsigned long long)of->number);
      else printf("%llu (%s)\n", (unsigned long long)of->number, describe_bytes(of->number, bytes));
      break;
    case FIELD_REAL: printf("%.4g\n", of->real); break;
    case FIELD_TRUTH: puts(of->number != 0 ? "yes" : "no"); break;
    case FIELD_IDS: break;
    }
  }
}

const char *dtype_name(uint32_t dtype) {
  static const char *const names[] = {"auto", "f32", "f16", "bf16"};
  return dtype < sizeof names / sizeof *names ? names[dtype] : "unknown";
}

const char *device_name(uint32_t device_kind) { return device_kind == XSERV_DEVICE_CUDA ? "cuda" : "cpu"; }

const char *finish_name(uint32_t finish_reason) {
  static const char prefix[] = "XSERV_FINISH_";
  static char small[48];
  const char *name = xserv_finish_reason_name(finish_reason);
  if (strncmp(name, prefix, sizeof prefix - 1) != 0) return name;
  snprintf(small, sizeof small, "%s", name + sizeof prefix - 1);
  for (char *at = small; *at != '\0'; at++)
    if (*at >= 'A' && *at <= 'Z') *at = (char)(*at - 'A' + 'a');
  return small;
}
