/* The part of an output stream that is shown: its head and its tail. All bytes are counted. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

struct cap {
    size_t bytes, lines;
};

struct capture {
    struct cap head; /* the bytes and lines that may still be added to the head */
    struct cap tail;
    bool is_past_head;
    char *ring; /* the last bytes after the head; allocated with the first of them */
    size_t ring_capacity, ring_start, ring_length;
    size_t past_head_bytes;
    size_t total_bytes, total_lines, shown_bytes, shown_lines;
};

/* Return an empty capture. The head and the tail get half of the cap each. */
struct capture capture_begin(struct cap cap);
/* Add output. Return how many of its first bytes belong to the head. */
size_t capture_feed(struct capture *capture, const char *data, size_t length);
/* Return the tail of the complete stream, within the cap. The caller frees it. */
char *capture_tail(struct capture *capture, size_t *length);
void capture_free(struct capture *capture);
