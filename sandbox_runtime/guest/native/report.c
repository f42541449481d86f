#include "report.h"

#include <stdint.h>
#include <string.h>

/* How many bytes the UTF-8 character at `text` has; 0 if there is none. */
static size_t character_length(const unsigned char *text, size_t length)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
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
    return code < least[wanted] || code > 0x10FFFF || is_surrogate ? 0 : wanted;
}

static bool needs_escape(unsigned char byte)
{
    return byte < 0x20 || byte == '"' || byte == '\\';
}

static void add_quoted(struct bytes *out, const char *text, size_t length, bool is_path)
{
    const unsigned char *at = (const unsigned char *)text, *end = at + length;
    bytes_add(out, "\"", 1);
    while (at < end) {
        size_t whole = character_length(at, (size_t)(end - at));
        if (whole == 0)
            bytes_print(out, "\\u%04x", is_path ? 0xDC00 | *at : 0xFFFD);
        else if (needs_escape(*at))
            bytes_print(out, "\\u%04x", *at);
        else
            bytes_add(out, at, whole);
        at += whole ? whole : 1;
    }
    bytes_add(out, "\"", 1);
}

static void add_key(struct bytes *report, const char *key)
{
    bytes_print(report, "%s\"%s\": ", report->length > 1 ? ", " : "", key);
}

void report_begin(struct bytes *report)
{
    bytes_add(report, "{", 1);
}

void report_number(struct bytes *report, const char *key, double number)
{
    add_key(report, key);
    bytes_print(report, "%.6f", number);
}

void report_count(struct bytes *report, const char *key, long long count)
{
    add_key(report, key);
    bytes_print(report, "%lld", count);
}

void report_flag(struct bytes *report, const char *key, bool flag)
{
    add_key(report, key);
    bytes_add_text(report, flag ? "true" : "false");
}

void report_words(struct bytes *report, const char *key, const char *words, size_t length)
{
    add_key(report, key);
    add_quoted(report, words, length, false);
}

void report_end(struct bytes *report)
{
    bytes_add(report, "}", 1);
}

void report_path(struct bytes *out, const char *path)
{
    add_quoted(out, path, strlen(path), true);
}
