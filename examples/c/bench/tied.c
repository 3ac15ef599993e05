#include "tied.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"

#define COMPARED_BYTES ((size_t)1 << 20)

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
