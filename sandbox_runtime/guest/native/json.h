/* A parser of the JSON that the host sends. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

enum json_kind {
    JSON_NULL,
    JSON_FALSE,
    JSON_TRUE,
    JSON_NUMBER,
    JSON_TEXT,
    JSON_ARRAY,
    JSON_OBJECT,
};

struct json {
    enum json_kind kind;
    double number;
    char *text; /* UTF-8, lone surrogates as three bytes; NUL-terminated */
    size_t length;
    char *name; /* of an object's member */
    size_t name_length;
    struct json *first; /* the first element or member */
    struct json *next;  /* the next element or member of the parent */
    char *buffer;       /* only in the outermost value: contains all texts */
};

/* Return the parsed value, or NULL if the text is not JSON. */
struct json *json_parse(const char *text, size_t length);
void json_free(struct json *value);

/* Return an object's member, or NULL if it is missing or null. */
const struct json *json_member(const struct json *object, const char *name);
/* Return an object's member of this kind; end the agent if there is none. */
const struct json *json_require(const struct json *object, const char *name, enum json_kind kind);
double json_number(const struct json *object, const char *name);
size_t json_count(const struct json *object, const char *name);
bool json_flag(const struct json *object, const char *name);

/* Convert a text to the kernel's encoding in place: surrogate escapes become single bytes. Return
   false if the text contains a NUL or another surrogate. */
bool json_to_native(const struct json *text);
