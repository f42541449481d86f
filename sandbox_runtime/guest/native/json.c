#include "json.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"

#define MAX_DEPTH 64

struct parser {
    char *at, *end;
    int depth;
};

static struct json *parse_value(struct parser *parser);

static void skip_blanks(struct parser *parser)
{
    while (parser->at < parser->end && memchr(" \t\n\r", *parser->at, 4))
        parser->at++;
}

static bool skip(struct parser *parser, char expected)
{
    if (parser->at == parser->end || *parser->at != expected)
        return false;
    parser->at++;
    return true;
}

/* Parse four hexadecimal digits; return -1 if there are others. */
static int32_t parse_hex(struct parser *parser)
{
    int32_t code = 0;
    if (parser->end - parser->at < 4)
        return -1;
    for (int n = 0; n < 4; n++) {
        static const char digits[] = "0123456789abcdef0123456789ABCDEF";
        const char *digit = memchr(digits, *parser->at++, sizeof digits - 1);
        if (!digit)
            return -1;
        code = code * 16 + (int32_t)(digit - digits) % 16;
    }
    return code;
}

/* Parse an escape after its `\u`, with the second escape of a surrogate pair. Return the code
   point, or -1 if the escape is malformed. */
static int32_t parse_code_point(struct parser *parser)
{
    int32_t code = parse_hex(parser);
    if (code < 0xD800 || code > 0xDBFF)
        return code;
    char *after = parser->at;
    if (skip(parser, '\\') && skip(parser, 'u')) {
        int32_t low = parse_hex(parser);
        if (low >= 0xDC00 && low <= 0xDFFF)
            return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    parser->at = after;
    return code;
}

static char *add_utf8(char *out, int32_t code)
{
    if (code < 0x80) {
        *out++ = (char)code;
        return out;
    }
    int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const int marks[] = {0, 0xC0, 0xE0, 0xF0};
    *out++ = (char)(marks[more] | code >> 6 * more);
    while (more--)
        *out++ = (char)(0x80 | (code >> 6 * more & 0x3F));
    return out;
}

/* Parse an escape after its backslash and write the character to `out`. Return the end of `out`, or
   NULL if the escape is malformed. */
static char *parse_escape(struct parser *parser, char *out)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    if (parser->at == parser->end)
        return NULL;
    char name = *parser->at++;
    if (name == 'u') {
        int32_t code = parse_code_point(parser);
        return code < 0 ? NULL : add_utf8(out, code);
    }
    const char *found = memchr(names, name, sizeof names - 1);
    if (!found)
        return NULL;
    *out++ = values[found - names];
    return out;
}

/* Parse a text and decode it in place: a text is never longer than its JSON. */
static bool parse_text(struct parser *parser, char **text, size_t *length)
{
    if (!skip(parser, '"'))
        return false;
    char *out = *text = parser->at;
    while (parser->at < parser->end && *parser->at != '"') {
        char byte = *parser->at++;
        if (byte == '\\') {
            out = parse_escape(parser, out);
            if (!out)
                return false;
        } else if ((unsigned char)byte < 0x20) {
            return false;
        } else {
            *out++ = byte;
        }
    }
    if (!skip(parser, '"'))
        return false;
    *out = 0;
    *length = (size_t)(out - *text);
    return true;
}

static bool skip_digits(struct parser *parser)
{
    char *start = parser->at;
    while (parser->at < parser->end && *parser->at >= '0' && *parser->at <= '9')
        parser->at++;
    return parser->at > start;
}

static bool parse_number(struct parser *parser, double *number)
{
    char *start = parser->at;
    skip(parser, '-');
    if (!skip(parser, '0') && !skip_digits(parser))
        return false;
    if (skip(parser, '.') && !skip_digits(parser))
        return false;
    if (skip(parser, 'e') || skip(parser, 'E')) {
        if (!skip(parser, '+'))
            skip(parser, '-');
        if (!skip_digits(parser))
            return false;
    }
    char after = *parser->at;
    *parser->at = 0;
    *number = strtod(start, NULL);
    *parser->at = after;
    return true;
}

static bool parse_member(struct parser *parser, bool is_named, struct json **end)
{
    char *name = NULL;
    size_t name_length = 0;
    skip_blanks(parser);
    if (is_named) {
        if (!parse_text(parser, &name, &name_length))
            return false;
        skip_blanks(parser);
        if (!skip(parser, ':'))
            return false;
    }
    *end = parse_value(parser);
    if (!*end)
        return false;
    (*end)->name = name;
    (*end)->name_length = name_length;
    skip_blanks(parser);
    return true;
}

/* Parse the members of an array or object, after its opening bracket. */
static bool parse_members(struct parser *parser, struct json *value)
{
    bool is_object = value->kind == JSON_OBJECT;
    char bracket = is_object ? '}' : ']';
    struct json **end = &value->first;
    skip_blanks(parser);
    if (skip(parser, bracket))
        return true;
    if (++parser->depth > MAX_DEPTH)
        return false;
    do {
        if (!parse_member(parser, is_object, end))
            return false;
        end = &(*end)->next;
    } while (skip(parser, ','));
    parser->depth--;
    return skip(parser, bracket);
}

static bool parse_word(struct parser *parser, const char *word)
{
    size_t length = strlen(word);
    if ((size_t)(parser->end - parser->at) < length || memcmp(parser->at, word, length) != 0)
        return false;
    parser->at += length;
    return true;
}

static bool parse_into(struct parser *parser, struct json *value)
{
    switch (parser->at < parser->end ? *parser->at : 0) {
    case '"':
        value->kind = JSON_TEXT;
        return parse_text(parser, &value->text, &value->length);
    case '{':
    case '[':
        value->kind = *parser->at++ == '{' ? JSON_OBJECT : JSON_ARRAY;
        return parse_members(parser, value);
    case 'n':
        value->kind = JSON_NULL;
        return parse_word(parser, "null");
    case 't':
        value->kind = JSON_TRUE;
        return parse_word(parser, "true");
    case 'f':
        value->kind = JSON_FALSE;
        return parse_word(parser, "false");
    default:
        value->kind = JSON_NUMBER;
        return parse_number(parser, &value->number);
    }
}

static struct json *parse_value(struct parser *parser)
{
    struct json *value = allocate(sizeof *value);
    skip_blanks(parser);
    if (parse_into(parser, value))
        return value;
    json_free(value);
    return NULL;
}

struct json *json_parse(const char *text, size_t length)
{
    char *buffer = allocate(length + 1);
    memcpy(buffer, text, length);
    struct parser parser = {buffer, buffer + length, 0};
    struct json *value = parse_value(&parser);
    skip_blanks(&parser);
    if (value && parser.at == parser.end) {
        value->buffer = buffer;
        return value;
    }
    json_free(value);
    free(buffer);
    return NULL;
}

void json_free(struct json *value)
{
    while (value) {
        struct json *next = value->next;
        json_free(value->first);
        free(value->buffer);
        free(value);
        value = next;
    }
}

const struct json *json_member(const struct json *object, const char *name)
{
    const struct json *found = NULL;
    for (const struct json *member = object->first; member; member = member->next)
        if (member->name && strcmp(member->name, name) == 0)
            found = member; /* the last one counts, as in Python */
    return found && found->kind != JSON_NULL ? found : NULL;
}

const struct json *json_require(const struct json *object, const char *name, enum json_kind kind)
{
    const struct json *member = json_member(object, name);
    if (!member || member->kind != kind)
        die("the host broke the protocol: no usable %s", name);
    return member;
}

double json_number(const struct json *object, const char *name)
{
    return json_require(object, name, JSON_NUMBER)->number;
}

size_t json_count(const struct json *object, const char *name)
{
    double number = json_number(object, name);
    return number < 0 ? 0 : number < 1e15 ? (size_t)number : (size_t)1e15;
}

bool json_flag(const struct json *object, const char *name)
{
    const struct json *member = json_member(object, name);
    return member && member->kind == JSON_TRUE;
}

bool json_to_native(const struct json *text)
{
    char *out = text->text;
    if (strlen(text->text) != text->length)
        return false;
    for (const unsigned char *in = (unsigned char *)text->text; *in; in++) {
        bool is_surrogate = in[0] == 0xED && in[1] >= 0xA0 && in[2] >= 0x80;
        int32_t code = is_surrogate ? 0xD000 | (in[1] & 0x3F) << 6 | (in[2] & 0x3F) : 0;
        if (is_surrogate && (code < 0xDC80 || code > 0xDCFF))
            return false;
        *out++ = is_surrogate ? (char)(code & 0xFF) : (char)*in;
        in += is_surrogate ? 2 : 0;
    }
    *out = 0;
    return true;
}
