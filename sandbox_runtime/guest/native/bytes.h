/* A run of bytes that grows at its end and is used up from its start. */
#pragma once

#include <stddef.h>
#include <sys/types.h>

struct bytes {
    char *block;
    size_t start, length, room; /* those that count lie at block + start */
};

static inline char *bytes_front(const struct bytes *bytes)
{
    return bytes->block + bytes->start;
}

void bytes_add(struct bytes *bytes, const void *data, size_t length);
void bytes_add_text(struct bytes *bytes, const char *text);
void bytes_print(struct bytes *bytes, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Use up the first `length`; with the last of them the memory is given back. */
void bytes_drop(struct bytes *bytes, size_t length);
void bytes_free(struct bytes *bytes);
/* One read(2) of at most `most` bytes onto the end; what it returned. */
ssize_t bytes_read(struct bytes *bytes, int fd, size_t most);
