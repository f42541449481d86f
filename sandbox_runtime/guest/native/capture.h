/* What is shown of an output stream: its head and its tail, all of it counted. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

struct cap {
    size_t bytes, lines;
};

struct capture {
    struct cap head; /* what it may still take */
    struct cap tail;
    bool is_past_head;
    char *ring; /* the last bytes after the head; made when there are some */
    size_t ring_room, ring_start, ring_length;
    size_t past_head_bytes;
    size_t total_bytes, total_lines, shown_bytes, shown_lines;
};

/* Half of the cap for each end. */
struct capture capture_begin(struct cap cap);
/* Take output in; returns how much of it, from its start, still belongs to the head. */
size_t capture_feed(struct capture *capture, const char *data, size_t length);
/* The end of the stream, as much as the cap allows; the caller frees it. */
char *capture_tail(struct capture *capture, size_t *length);
void capture_free(struct capture *capture);
