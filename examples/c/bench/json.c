#define _POSIX_C_SOURCE 200809L /* fseeko */

#include "json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char *read_part(const char *path, uint64_t begin, uint64_t len) {
  FILE *file = fopen(path, "rb");
  char *bytes = file != NULL && len < SIZE_MAX ? malloc((size_t)len + 1) : NULL;
  bool good = bytes != NULL && fseeko(file, (off_t)begin, SEEK_SET) == 0 && fread(bytes, 1, (size_t)len, file) == len;
  if (file != NULL) fclose(file);
  if (!good) {
    free(bytes);
    return NULL;
  }
  bytes[len] = '\0';
  return bytes;
}

char *read_json(const char *folder, const char *name) {
  char path[MAX_PATH];
  if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return NULL;
  FILE *file = fopen(path, "rb");
  const off_t len = file != NULL && fseeko(file, 0, SEEK_END) == 0 ? ftello(file) : -1;
  if (file != NULL) fclose(file);
  return len < 0 ? NULL : read_part(path, 0, (uint64_t)len);
}

static const char *skip_space(const char *at) { return at + strspn(at, " \t\r\n"); }

const char *skip_string(const char *at) {
  for (at++; *at != '\0' && *at != '"'; at++)
    if (*at == '\\' && at[1] != '\0') at++;
  return *at == '"' ? at + 1 : at;
}

const char *member(const char *at, const char *key) {
  const size_t key_len = strlen(key);
  int depth = 0;
  while (at != NULL && *at != '\0') {
    if (*at == '"') {
      const char *end = skip_string(at), *colon = skip_space(end);
      const bool is_key = depth == 1 && *colon == ':' && (size_t)(end - at) == key_len + 2;
      if (is_key && strncmp(at + 1, key, key_len) == 0) return skip_space(colon + 1);
      at = end;
      continue;
    }
    if (*at == '{' || *at == '[') depth++;
    if ((*at == '}' || *at == ']') && --depth == 0) return NULL;
    at++;
  }
  return NULL;
}

bool begins_with(const char *text, const char *start) {
  return text != NULL && strncmp(text, start, strlen(start)) == 0;
}
