/* UTF-8, and the width of characters on a terminal. */

#ifndef XSERV_PROGRAM_UTF8_H
#define XSERV_PROGRAM_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Makes the widths of characters known, also where the locale does not use UTF-8. Call it once. */
void utf8_begin(void);

/* Reads the character at `text`. Returns its bytes, or 0 if what is there is not a whole one. */
size_t utf8_decode(const char *text, size_t len, uint32_t *character);

/* Returns the number of bytes that a character beginning with this byte has; 0 if none does. */
size_t utf8_length(unsigned char first);

/* Returns the columns that a character takes: 0 (it joins the one before), 1 or 2. */
int utf8_width(uint32_t character);

/* Whether a terminal would act on the character instead of showing it (line breaks and tabs too). */
int utf8_is_control(uint32_t character);

#endif
