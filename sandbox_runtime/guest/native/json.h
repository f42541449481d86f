/* JSON as the host sends it. */
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
    char *text; /* UTF-8, lone surrogates in their three bytes; ends with a NUL of its own */
    size_t length;
    char *name; /* of an object's member */
    size_t name_length;
    struct json *first, *next; /* what is in it; what stands beside it */
    char *buffer; /* of the outermost one: where all these texts lie */
};

/* What `text` says; NULL if it is not JSON. */
struct json *json_parse(const char *text, size_t length);
void json_free(struct json *value);

/* An object's member; NULL if there is none or it is null. */
const struct json *json_member(const struct json *object, const char *name);
/* The same, of a kind that the host has promised: the agent ends if it is missing. */
const struct json *json_need(const struct json *object, const char *name, enum json_kind kind);
double json_number(const struct json *object, const char *name);
size_t json_count(const struct json *object, const char *name);
bool json_flag(const struct json *object, const char *name);

/* Make a text what the kernel takes: surrogate escapes become the bytes they stand for.
   False if it cannot be: a NUL or a real surrogate is in it. */
bool json_to_native(const struct json *text);
