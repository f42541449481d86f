/* The operations put and get: files are written completely or not at all, and read without
   following links. */
#pragma once

#include "json.h"
#include "streams.h"

#define READ_FLAGS (O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOCTTY)

/* Return the request's path in the kernel's encoding. Return NULL and fail the stream if the path
   is invalid. */
const char *path_or_fail(struct stream *stream, const struct json *request);
/* Create a directory and its parents; return errno. */
int make_directories(const char *path);

void put_begin(struct stream *stream, struct json **request);
void get_begin(struct stream *stream, struct json **request);
