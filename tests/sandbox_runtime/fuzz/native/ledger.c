#include "ledger.h"

#include <dirent.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SLOTS (1u << 16) /* twice the number of blocks that an input can make the agent allocate */
#define MAX_DESCRIPTORS 1024
#define MAX_DIRECTORIES 64

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *block, size_t size);
void __real_free(void *block);
int __real_vasprintf(char **text, const char *format, va_list arguments);
DIR *__real_fdopendir(int fd);
int __real_closedir(DIR *directory);

static bool is_recording;
static void *blocks[SLOTS]; /* a hash table with linear probing */
static size_t block_count;
static DIR *directories[MAX_DIRECTORIES];
static bool was_open[MAX_DESCRIPTORS];

void fault(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    is_recording = false;
    fputs("fault: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

static size_t home_of(const void *block)
{
    return ((uintptr_t)block >> 4) * 0x9E3779B97F4A7C15u >> 48; /* 16 bits are left */
}

static void *record(void *block)
{
    if (!is_recording || !block)
        return block;
    size_t slot = home_of(block);
    while (blocks[slot])
        slot = (slot + 1) % SLOTS;
    blocks[slot] = block;
    if (++block_count > SLOTS / 2)
        fault("the agent holds %zu blocks of memory", block_count);
    return block;
}

/* Move displaced blocks towards their slots after a block was removed. */
static void close_gap(size_t gap)
{
    for (size_t slot = (gap + 1) % SLOTS; blocks[slot]; slot = (slot + 1) % SLOTS) {
        size_t distance = (slot - home_of(blocks[slot])) % SLOTS;
        if (distance < (slot - gap) % SLOTS)
            continue;
        blocks[gap] = blocks[slot];
        gap = slot;
    }
    blocks[gap] = NULL;
}

static void forget(const void *block)
{
    size_t slot = home_of(block);
    while (blocks[slot] && blocks[slot] != block)
        slot = (slot + 1) % SLOTS;
    if (!blocks[slot])
        return;
    block_count--;
    close_gap(slot);
}

void *__wrap_malloc(size_t size)
{
    return record(__real_malloc(size));
}

void *__wrap_calloc(size_t count, size_t size)
{
    return record(__real_calloc(count, size));
}

void *__wrap_realloc(void *block, size_t size)
{
    if (is_recording && block)
        forget(block);
    return record(__real_realloc(block, size));
}

void __wrap_free(void *block)
{
    if (is_recording && block)
        forget(block);
    __real_free(block);
}

int __wrap_vasprintf(char **text, const char *format, va_list arguments)
{
    int length = __real_vasprintf(text, format, arguments);
    if (length >= 0)
        record(*text);
    return length;
}

DIR *__wrap_fdopendir(int fd)
{
    DIR *opened = __real_fdopendir(fd);
    size_t n = 0;
    while (is_recording && opened && n < MAX_DIRECTORIES && directories[n])
        n++;
    if (n == MAX_DIRECTORIES)
        fault("the agent has more than %d directories open", MAX_DIRECTORIES);
    if (is_recording && opened)
        directories[n] = opened;
    return opened;
}

int __wrap_closedir(DIR *directory)
{
    for (size_t n = 0; n < MAX_DIRECTORIES; n++)
        if (directories[n] == directory)
            directories[n] = NULL;
    return __real_closedir(directory);
}

static void look_at_descriptors(bool is_open[MAX_DESCRIPTORS])
{
    static struct pollfd polled[MAX_DESCRIPTORS];
    for (int fd = 0; fd < MAX_DESCRIPTORS; fd++)
        polled[fd] = (struct pollfd){fd, 0, 0};
    poll(polled, MAX_DESCRIPTORS, 0);
    for (int fd = 0; fd < MAX_DESCRIPTORS; fd++)
        is_open[fd] = !(polled[fd].revents & POLLNVAL);
}

void ledger_begin(void)
{
    look_at_descriptors(was_open);
    is_recording = true;
}

size_t ledger_blocks(void)
{
    return block_count;
}

size_t ledger_descriptors(void)
{
    static bool is_open[MAX_DESCRIPTORS];
    size_t count = 0;
    look_at_descriptors(is_open);
    for (int fd = 0; fd < MAX_DESCRIPTORS; fd++)
        count += is_open[fd] && !was_open[fd];
    return count;
}

void ledger_end(void)
{
    static bool is_open[MAX_DESCRIPTORS];
    is_recording = false;
    for (size_t n = 0; n < MAX_DIRECTORIES; n++)
        if (directories[n])
            __wrap_closedir(directories[n]);
    for (size_t slot = 0; block_count && slot < SLOTS; slot++) {
        if (!blocks[slot])
            continue;
        block_count--;
        __real_free(blocks[slot]);
        blocks[slot] = NULL;
    }
    look_at_descriptors(is_open);
    for (int fd = 0; fd < MAX_DESCRIPTORS; fd++)
        if (is_open[fd] && !was_open[fd])
            close(fd);
}
