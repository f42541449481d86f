#include "memory.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("agent: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    _exit(1);
}

void *allocate(size_t bytes)
{
    void *block = calloc(1, bytes ? bytes : 1);
    if (!block)
        die("no memory for %zu bytes", bytes);
    return block;
}

void *resize(void *block, size_t bytes)
{
    void *resized = realloc(block, bytes ? bytes : 1);
    if (!resized)
        die("no memory for %zu bytes", bytes);
    return resized;
}

char *format(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    char *text = NULL;
    if (vasprintf(&text, format, arguments) < 0)
        die("no memory for a text");
    va_end(arguments);
    return text;
}

#define MIN_CAPACITY 256

/* Make room for `more` bytes after the data. */
static void reserve(struct buffer *buffer, size_t more)
{
    if (buffer->start + buffer->length + more <= buffer->capacity)
        return;
    if (buffer->start) {
        memmove(buffer->block, buffer_data(buffer), buffer->length);
        buffer->start = 0;
    }
    if (buffer->length + more <= buffer->capacity)
        return;
    if (!buffer->block && more <= buffer->fixed_capacity) {
        buffer->block = buffer->fixed_block;
        buffer->capacity = buffer->fixed_capacity;
        return;
    }
    size_t capacity = buffer->capacity ? buffer->capacity : MIN_CAPACITY;
    while (capacity < buffer->length + more)
        capacity *= 2;
    if (buffer->block && buffer->block == buffer->fixed_block) {
        buffer->block = resize(NULL, capacity);
        memcpy(buffer->block, buffer->fixed_block, buffer->length);
    } else {
        buffer->block = resize(buffer->block, capacity);
    }
    buffer->capacity = capacity;
}

void buffer_append(struct buffer *buffer, const void *data, size_t length)
{
    if (length == 0)
        return;
    reserve(buffer, length);
    memcpy(buffer_data(buffer) + buffer->length, data, length);
    buffer->length += length;
}

void buffer_append_text(struct buffer *buffer, const char *text)
{
    buffer_append(buffer, text, strlen(text));
}

void buffer_printf(struct buffer *buffer, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    char *text = NULL;
    int length = vasprintf(&text, format, arguments);
    va_end(arguments);
    if (length < 0)
        die("no memory for a text");
    buffer_append(buffer, text, (size_t)length);
    free(text);
}

void buffer_consume(struct buffer *buffer, size_t length)
{
    buffer->start += length;
    buffer->length -= length;
    if (buffer->length == 0)
        buffer_free(buffer);
}

void buffer_free(struct buffer *buffer)
{
    if (buffer->block != buffer->fixed_block)
        free(buffer->block);
    *buffer = (struct buffer){.fixed_block = buffer->fixed_block,
                              .fixed_capacity = buffer->fixed_capacity};
}

ssize_t buffer_read(struct buffer *buffer, int fd, size_t max_bytes)
{
    reserve(buffer, max_bytes);
    ssize_t count = read(fd, buffer_data(buffer) + buffer->length, max_bytes);
    if (count > 0)
        buffer->length += (size_t)count;
    return count;
}
