#include "bytes.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "memory.h"

#define LEAST_ROOM 256

/* Room for so many more behind those that are there. */
static void make_room(struct bytes *bytes, size_t more)
{
    if (bytes->start + bytes->length + more <= bytes->room)
        return;
    if (bytes->start) {
        memmove(bytes->block, bytes_front(bytes), bytes->length);
        bytes->start = 0;
    }
    if (bytes->length + more <= bytes->room)
        return;
    size_t room = bytes->room ? bytes->room : LEAST_ROOM;
    while (room < bytes->length + more)
        room *= 2;
    bytes->block = resize(bytes->block, room);
    bytes->room = room;
}

void bytes_add(struct bytes *bytes, const void *data, size_t length)
{
    if (length == 0)
        return;
    make_room(bytes, length);
    memcpy(bytes_front(bytes) + bytes->length, data, length);
    bytes->length += length;
}

void bytes_add_text(struct bytes *bytes, const char *text)
{
    bytes_add(bytes, text, strlen(text));
}

void bytes_print(struct bytes *bytes, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    char *text = NULL;
    int length = vasprintf(&text, format, arguments);
    va_end(arguments);
    if (length < 0)
        die("no memory for a text");
    bytes_add(bytes, text, (size_t)length);
    free(text);
}

void bytes_drop(struct bytes *bytes, size_t length)
{
    bytes->start += length;
    bytes->length -= length;
    if (bytes->length == 0)
        bytes_free(bytes);
}

void bytes_free(struct bytes *bytes)
{
    free(bytes->block);
    *bytes = (struct bytes){0};
}

ssize_t bytes_read(struct bytes *bytes, int fd, size_t most)
{
    make_room(bytes, most);
    ssize_t count = read(fd, bytes_front(bytes) + bytes->length, most);
    if (count > 0)
        bytes->length += (size_t)count;
    return count;
}
