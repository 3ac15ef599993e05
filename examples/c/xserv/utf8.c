#define _XOPEN_SOURCE 700 /* wcwidth */

#include "utf8.h"

#include <langinfo.h>
#include <locale.h>
#include <string.h>
#include <wchar.h>

void utf8_begin(void) {
  /* Only the character type of the locale is set, so that numbers are always written in the same
   * way. */
  setlocale(LC_CTYPE, "");
  if (strcmp(nl_langinfo(CODESET), "UTF-8") != 0) setlocale(LC_CTYPE, "C.UTF-8");
}

size_t utf8_length(unsigned char first) {
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4) return 0;
  return first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

size_t utf8_decode(const char *text, size_t len, uint32_t *character) {
  static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
  const size_t bytes = len == 0 ? 0 : utf8_length((unsigned char)text[0]);
  if (bytes == 0 || bytes > len) return 0;
  uint32_t value = (unsigned char)text[0];
  if (bytes > 1) value &= 0x3fu >> (bytes - 1);
  for (size_t i = 1; i < bytes; i++) {
    if (((unsigned char)text[i] & 0xc0) != 0x80) return 0;
    value = value << 6 | ((unsigned char)text[i] & 0x3f);
  }
  if (value < least[bytes] || value > 0x10ffff || (value >= 0xd800 && value < 0xe000)) return 0;
  *character = value;
  return bytes;
}

int utf8_width(uint32_t character) {
  if (character < 0x7f) return 1;
  const int width = wcwidth((wchar_t)character);
  return width < 0 ? 1 : width; /* one that the C library does not know yet */
}

int utf8_is_control(uint32_t character) { return character < 0x20 || (character >= 0x7f && character < 0xa0); }
