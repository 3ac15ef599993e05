#define _POSIX_C_SOURCE 200809L /* fseeko */

#include "tied.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PATH 4096
#define COMPARED_BYTES ((size_t)1 << 20)

/* Returns `len` bytes of a file and a NUL; NULL if it does not have them. The caller frees them. */
static char *read_part(const char *path, uint64_t begin, uint64_t len) {
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

static char *read_json(const char *folder, const char *name) {
  char path[MAX_PATH];
  if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return NULL;
  FILE *file = fopen(path, "rb");
  const off_t len = file != NULL && fseeko(file, 0, SEEK_END) == 0 ? ftello(file) : -1;
  if (file != NULL) fclose(file);
  return len < 0 ? NULL : read_part(path, 0, (uint64_t)len);
}

static const char *skip_space(const char *at) { return at + strspn(at, " \t\r\n"); }

/* Skips from the opening quote of a string to after the closing one. */
static const char *skip_string(const char *at) {
  for (at++; *at != '\0' && *at != '"'; at++)
    if (*at == '\\' && at[1] != '\0') at++;
  return *at == '"' ? at + 1 : at;
}

/* Returns the value of a member of the JSON object that begins at `at`; NULL if it has no such
 * member, or `at` is NULL. */
static const char *member(const char *at, const char *key) {
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

static bool begins_with(const char *text, const char *start) {
  return text != NULL && strncmp(text, start, strlen(start)) == 0;
}

/* The location of a tensor's bytes. */
typedef struct place {
  char path[MAX_PATH];
  uint64_t begin, len;
} place;

/* Finds the file of a tensor: the one that the index names, or the only one. */
static bool find_file(const char *folder, const char *tensor, char path[MAX_PATH]) {
  char *index = read_json(folder, "model.safetensors.index.json");
  const char *name = "model.safetensors";
  int name_len = (int)strlen(name);
  if (index != NULL) {
    name = member(member(index, "weight_map"), tensor);
    name_len = name != NULL && *name == '"' ? (int)(skip_string(name) - name) - 2 : 0;
    if (name_len > 0) name++;
  }
  const bool found = name_len > 0 && snprintf(path, MAX_PATH, "%s/%.*s", folder, name_len, name) < MAX_PATH;
  free(index);
  return found;
}

/* The header of a safetensors file is JSON, after eight bytes with its length. */
static bool find_tensor(const char *folder, const char *tensor, place *place) {
  if (!find_file(folder, tensor, place->path)) return false;
  unsigned char *len_bytes = (unsigned char *)read_part(place->path, 0, 8);
  uint64_t head_len = 0;
  for (int i = 7; i >= 0 && len_bytes != NULL; i--) head_len = head_len << 8 | len_bytes[i];
  free(len_bytes);
  char *head = head_len > 0 ? read_part(place->path, 8, head_len) : NULL;
  const char *offsets = member(member(head, tensor), "data_offsets");
  unsigned long long begin = 0, end = 0;
  const bool found = offsets != NULL && sscanf(offsets, "[ %llu , %llu", &begin, &end) == 2 && begin < end;
  free(head);
  place->begin = 8 + head_len + begin;
  place->len = end - begin;
  return found;
}

static bool begin_alike(const place *a, const place *b) {
  const uint64_t len = a->len < COMPARED_BYTES ? a->len : COMPARED_BYTES;
  if (a->len != b->len) return false;
  char *of_a = read_part(a->path, a->begin, len), *of_b = read_part(b->path, b->begin, len);
  const bool alike = of_a != NULL && of_b != NULL && memcmp(of_a, of_b, (size_t)len) == 0;
  free(of_a);
  free(of_b);
  return alike;
}

bool declares_tied_embeddings(const char *folder) {
  char *config = read_json(folder, "config.json");
  const char *said = member(config, "tie_word_embeddings");
  const bool tied = said != NULL ? begins_with(said, "true") : begins_with(member(config, "model_type"), "\"gpt2\"");
  free(config);
  return tied;
}

bool has_tied_embeddings(const char *folder) {
  const char *embeddings[] = {"model.embed_tokens.weight", "wte.weight", "transformer.wte.weight"};
  place output, embedding;
  if (!declares_tied_embeddings(folder)) return false;
  if (!find_tensor(folder, "lm_head.weight", &output)) return true;
  for (size_t i = 0; i < sizeof embeddings / sizeof *embeddings; i++)
    if (find_tensor(folder, embeddings[i], &embedding)) return begin_alike(&output, &embedding);
  return true; /* the output matrix is the embedding */
}
