#include "memory.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
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
