/* Allocation that ends the agent when memory runs out, and a growable buffer. */
#pragma once

#include <stddef.h>
#include <sys/types.h>

/* Print an error to standard error and exit. The sandbox ends with the agent. */
_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Return zeroed memory. */
void *allocate(size_t bytes);
void *resize(void *block, size_t bytes);
/* Return a new string, formatted as by printf(3). */
char *format(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Bytes that are appended at the end and consumed from the start. */
struct buffer {
    char *block;
    size_t start, length, capacity; /* the data begins at block + start */
    char *fixed_block;              /* or NULL; holds the data while it fits, so none is allocated */
    size_t fixed_capacity;
};

static inline char *buffer_data(const struct buffer *buffer)
{
    return buffer->block + buffer->start;
}

void buffer_append(struct buffer *buffer, const void *data, size_t length);
void buffer_append_text(struct buffer *buffer, const char *text);
void buffer_printf(struct buffer *buffer, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Remove the first `length` bytes. Frees allocated memory when the buffer becomes empty. */
void buffer_consume(struct buffer *buffer, size_t length);
void buffer_free(struct buffer *buffer);
/* Append the bytes of one read(2) of at most `max_bytes`; return the result of read(2). */
ssize_t buffer_read(struct buffer *buffer, int fd, size_t max_bytes);
