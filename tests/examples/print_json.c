/* Prints strings made by examples/c/common/text_buffer.c, for a JSON parser to read back. */

#include <stdio.h>
#include <string.h>

#include "common/text_buffer.h"

int main(void) {
  char bytes[256];
  size_t len = 0;
  for (int byte = 1; byte < 128; byte++) bytes[len++] = (char)byte;
  bytes[len++] = '\0';
  const char *others = "é你🙂\xe2\x80\xa8"; /* the last is U+2028 */
  memcpy(bytes + len, others, strlen(others));
  len += strlen(others);

  text_buffer buffer = {0};
  text_append(&buffer, "[");
  text_append_json_string(&buffer, bytes, len);
  text_append(&buffer, ", ");
  text_append_json_string(&buffer, "", 0);
  size_t end = buffer.len;
  text_append(&buffer, ", ");
  text_append_json_string(&buffer, "forgotten", 9);
  text_truncate(&buffer, end);
  text_append(&buffer, "]");
  int printed = puts(buffer.data);
  text_free(&buffer);
  return printed < 0;
}
