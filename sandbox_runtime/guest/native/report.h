/* Writes the JSON that the agent sends: reports, and the lines of a listing. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "memory.h"

void report_begin(struct buffer *report);
void report_number(struct buffer *report, const char *key, double number);
void report_count(struct buffer *report, const char *key, long long count);
void report_flag(struct buffer *report, const char *key, bool flag);
/* Add a text; bytes that are not UTF-8 become U+FFFD. */
void report_text(struct buffer *report, const char *key, const char *text, size_t length);
void report_end(struct buffer *report);

/* Append a quoted path; bytes that are not UTF-8 become surrogate escapes, as in Python. */
void report_path(struct buffer *out, const char *path);
