#include "report.h"

#include <stdint.h>
#include <string.h>

/* Return the length in bytes of the UTF-8 character at `text`, or 0 if it is invalid. */
static size_t character_length(const unsigned char *text, size_t length)
{
    static const uint32_t min_code[] = {0, 0, 0x80, 0x800, 0x10000};
    if (text[0] < 0x80)
        return 1;
    if (text[0] < 0xC2 || text[0] > 0xF4)
        return 0;
    size_t wanted = text[0] < 0xE0 ? 2 : text[0] < 0xF0 ? 3 : 4;
    if (wanted > length)
        return 0;
    uint32_t code = text[0] & (0xFFu >> (wanted + 1));
    for (size_t n = 1; n < wanted; n++) {
        if ((text[n] & 0xC0) != 0x80)
            return 0;
        code = code << 6 | (text[n] & 0x3F);
    }
    bool is_surrogate = code >= 0xD800 && code <= 0xDFFF;
    return code < min_code[wanted] || code > 0x10FFFF || is_surrogate ? 0 : wanted;
}

static bool needs_escape(unsigned char byte)
{
    return byte < 0x20 || byte == '"' || byte == '\\';
}

static void add_quoted(struct buffer *out, const char *text, size_t length, bool is_path)
{
    const unsigned char *at = (const unsigned char *)text, *end = at + length;
    buffer_append(out, "\"", 1);
    while (at < end) {
        size_t character = character_length(at, (size_t)(end - at));
        if (character == 0)
            buffer_printf(out, "\\u%04x", is_path ? 0xDC00 | *at : 0xFFFD);
        else if (needs_escape(*at))
            buffer_printf(out, "\\u%04x", *at);
        else
            buffer_append(out, at, character);
        at += character ? character : 1;
    }
    buffer_append(out, "\"", 1);
}

static void add_key(struct buffer *report, const char *key)
{
    buffer_printf(report, "%s\"%s\": ", report->length > 1 ? ", " : "", key);
}

void report_begin(struct buffer *report)
{
    buffer_append(report, "{", 1);
}

void report_number(struct buffer *report, const char *key, double number)
{
    add_key(report, key);
    buffer_printf(report, "%.6f", number);
}

void report_count(struct buffer *report, const char *key, long long count)
{
    add_key(report, key);
    buffer_printf(report, "%lld", count);
}

void report_flag(struct buffer *report, const char *key, bool flag)
{
    add_key(report, key);
    buffer_append_text(report, flag ? "true" : "false");
}

void report_text(struct buffer *report, const char *key, const char *text, size_t length)
{
    add_key(report, key);
    add_quoted(report, text, length, false);
}

void report_end(struct buffer *report)
{
    buffer_append(report, "}", 1);
}

void report_path(struct buffer *out, const char *path)
{
    add_quoted(out, path, strlen(path), true);
}
