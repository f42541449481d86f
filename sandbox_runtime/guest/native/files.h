/* Files of the sandbox: written whole or not at all, read without following links. */
#pragma once

#include "json.h"
#include "streams.h"

#define READ_FLAGS (O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOCTTY)

/* The request's path as the kernel takes it; NULL where it cannot be one: the stream has failed. */
const char *path_or_fail(struct stream *stream, const struct json *request);
/* Make a directory and those above it; returns errno. */
int make_directories(const char *path);

/* For operations that take no input. */
void ignore_data(void *owner, const char *data, size_t length);
void ignore_end(void *owner);

void put_begin(struct stream *stream, struct json **request);
void get_begin(struct stream *stream, struct json **request);
