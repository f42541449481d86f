/* JSON as we send it: reports, and the lines of a listing. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "bytes.h"

void report_begin(struct bytes *report);
void report_number(struct bytes *report, const char *key, double number);
void report_count(struct bytes *report, const char *key, long long count);
void report_flag(struct bytes *report, const char *key, bool flag);
/* Words to read: what is not UTF-8 becomes U+FFFD. */
void report_words(struct bytes *report, const char *key, const char *words, size_t length);
void report_end(struct bytes *report);

/* A path in quotes: what is not UTF-8 becomes surrogate escapes, as Python writes it. */
void report_path(struct bytes *out, const char *path);
