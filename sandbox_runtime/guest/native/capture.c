#include "capture.h"

#include <stdlib.h>
#include <string.h>

#include "memory.h"

#define MIN_RING_BYTES 4096u

struct capture capture_begin(struct cap cap)
{
    return (struct capture){
        .head = {cap.bytes - cap.bytes / 2, cap.lines - cap.lines / 2},
        .tail = {cap.bytes / 2, cap.lines / 2},
    };
}

static size_t count_lines(const char *data, size_t length)
{
    size_t count = 0;
    const char *end = data + length;
    while (length && (data = memchr(data, '\n', (size_t)(end - data)))) {
        data++;
        count++;
    }
    return count;
}

/* Return the length of the first `count` lines; the data must have more. */
static size_t lines_length(const char *data, size_t length, size_t count)
{
    const char *at = data, *end = data + length;
    while (count--)
        at = (const char *)memchr(at, '\n', (size_t)(end - at)) + 1;
    return (size_t)(at - data);
}

/* Return `length` without an incomplete UTF-8 character at the end. */
static size_t trim_partial_character(const char *data, size_t length)
{
    for (size_t back = 1; back <= 4 && back <= length; back++) {
        unsigned char byte = (unsigned char)data[length - back];
        if (byte >= 0xC0)
            return back >= (byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4) ? length : length - back;
        if (byte < 0x80)
            break;
    }
    return length;
}

/* Return how many bytes at the start continue a character whose beginning is missing. */
static size_t partial_character_length(const char *data, size_t length)
{
    size_t start = 0;
    while (start < length && (data[start] & 0xC0) == 0x80)
        start++;
    return start < 4 ? start : 0; /* more than three are not UTF-8 */
}

static size_t take_head(struct capture *capture, const char *data, size_t length)
{
    size_t head = length < capture->head.bytes ? length : capture->head.bytes;
    if (head < length)
        head = trim_partial_character(data, head);
    size_t lines = count_lines(data, head);
    if (lines > capture->head.lines) {
        lines = capture->head.lines;
        head = lines_length(data, head, lines);
    }
    capture->head.bytes -= head;
    capture->head.lines -= lines;
    capture->shown_lines += lines;
    return head;
}

static char *copy_ring(const struct capture *capture)
{
    char *kept = allocate(capture->ring_length);
    size_t to_end = capture->ring_capacity - capture->ring_start;
    size_t first = capture->ring_length < to_end ? capture->ring_length : to_end;
    if (first) {
        memcpy(kept, capture->ring + capture->ring_start, first);
        memcpy(kept + first, capture->ring, capture->ring_length - first);
    }
    return kept;
}

static void grow_ring(struct capture *capture, size_t wanted)
{
    size_t capacity = capture->ring_capacity ? 2 * capture->ring_capacity : MIN_RING_BYTES;
    capacity = capacity < wanted ? wanted : capacity;
    capacity = capacity > capture->tail.bytes ? capture->tail.bytes : capacity;
    if (capacity <= capture->ring_capacity)
        return;
    char *kept = copy_ring(capture);
    free(capture->ring);
    capture->ring = resize(kept, capacity);
    capture->ring_capacity = capacity;
    capture->ring_start = 0;
}

/* Append to the ring; new bytes replace the oldest when it is full. */
static void append_to_ring(struct capture *capture, const char *data, size_t length)
{
    size_t max_bytes = capture->tail.bytes;
    if (length > max_bytes) {
        data += length - max_bytes;
        length = max_bytes;
    }
    if (length == 0)
        return;
    if (capture->ring_length + length > capture->ring_capacity)
        grow_ring(capture, capture->ring_length + length);
    size_t total = capture->ring_length + length;
    size_t dropped = total > capture->ring_capacity ? total - capture->ring_capacity : 0;
    capture->ring_start = (capture->ring_start + dropped) % capture->ring_capacity;
    capture->ring_length -= dropped;
    size_t end = (capture->ring_start + capture->ring_length) % capture->ring_capacity;
    size_t to_end = capture->ring_capacity - end;
    size_t first = length < to_end ? length : to_end;
    memcpy(capture->ring + end, data, first);
    memcpy(capture->ring, data + first, length - first);
    capture->ring_length += length;
}

size_t capture_feed(struct capture *capture, const char *data, size_t length)
{
    capture->total_bytes += length;
    capture->total_lines += count_lines(data, length);
    size_t head = capture->is_past_head ? 0 : take_head(capture, data, length);
    capture->shown_bytes += head;
    if (head < length) {
        capture->is_past_head = true;
        capture->past_head_bytes += length - head;
        append_to_ring(capture, data + head, length - head);
    }
    return head;
}

char *capture_tail(struct capture *capture, size_t *length)
{
    char *tail = copy_ring(capture);
    size_t start = 0, end = capture->ring_length;
    if (end < capture->past_head_bytes)
        start = partial_character_length(tail, end);
    size_t lines = count_lines(tail + start, end - start);
    bool has_partial_line = end > start && tail[end - 1] != '\n'; /* counts as a line */
    if (lines + has_partial_line > capture->tail.lines) {
        size_t excess = lines + has_partial_line - capture->tail.lines;
        start = excess > lines ? end : start + lines_length(tail + start, end - start, excess);
    }
    *length = end - start;
    memmove(tail, tail + start, *length);
    capture->shown_bytes += *length;
    capture->shown_lines += count_lines(tail, *length);
    return tail;
}

void capture_free(struct capture *capture)
{
    free(capture->ring);
    *capture = (struct capture){0};
}
