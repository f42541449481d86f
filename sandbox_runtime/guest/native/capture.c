#include "capture.h"

#include <stdlib.h>
#include <string.h>

#include "memory.h"

#define LEAST_RING_BYTES 4096u

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

/* How long `count` lines at the start of `data` are, which has more. */
static size_t lines_length(const char *data, size_t length, size_t count)
{
    const char *at = data, *end = data + length;
    while (count--)
        at = (const char *)memchr(at, '\n', (size_t)(end - at)) + 1;
    return (size_t)(at - data);
}

/* `length` less a UTF-8 character at its end that is not whole. */
static size_t without_cut_character(const char *data, size_t length)
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

/* How many bytes at the start belong to a character whose beginning is gone. */
static size_t cut_character_length(const char *data, size_t length)
{
    size_t start = 0;
    while (start < length && (data[start] & 0xC0) == 0x80)
        start++;
    return start < 4 ? start : 0; /* where there are more, they are no characters at all */
}

static size_t take_head(struct capture *capture, const char *data, size_t length)
{
    size_t head = length < capture->head.bytes ? length : capture->head.bytes;
    if (head < length)
        head = without_cut_character(data, head);
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

static char *kept_after_head(const struct capture *capture)
{
    char *kept = allocate(capture->ring_length);
    size_t to_edge = capture->ring_room - capture->ring_start;
    size_t first = capture->ring_length < to_edge ? capture->ring_length : to_edge;
    if (first) {
        memcpy(kept, capture->ring + capture->ring_start, first);
        memcpy(kept + first, capture->ring, capture->ring_length - first);
    }
    return kept;
}

static void grow_ring(struct capture *capture, size_t wanted)
{
    size_t room = capture->ring_room ? 2 * capture->ring_room : LEAST_RING_BYTES;
    room = room < wanted ? wanted : room;
    room = room > capture->tail.bytes ? capture->tail.bytes : room;
    if (room <= capture->ring_room)
        return;
    char *kept = kept_after_head(capture);
    free(capture->ring);
    capture->ring = resize(kept, room);
    capture->ring_room = room;
    capture->ring_start = 0;
}

/* The last bytes of `data` push the first ones out of the ring. */
static void keep(struct capture *capture, const char *data, size_t length)
{
    size_t most = capture->tail.bytes;
    if (length > most) {
        data += length - most;
        length = most;
    }
    if (length == 0)
        return;
    if (capture->ring_length + length > capture->ring_room)
        grow_ring(capture, capture->ring_length + length);
    size_t over = capture->ring_length + length;
    over = over > capture->ring_room ? over - capture->ring_room : 0;
    capture->ring_start = (capture->ring_start + over) % capture->ring_room;
    capture->ring_length -= over;
    size_t end = (capture->ring_start + capture->ring_length) % capture->ring_room;
    size_t to_edge = capture->ring_room - end;
    size_t first = length < to_edge ? length : to_edge;
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
        keep(capture, data + head, length - head);
    }
    return head;
}

char *capture_tail(struct capture *capture, size_t *length)
{
    char *tail = kept_after_head(capture);
    size_t start = 0, end = capture->ring_length;
    if (end < capture->past_head_bytes)
        start = cut_character_length(tail, end);
    size_t lines = count_lines(tail + start, end - start);
    bool has_rest = end > start && tail[end - 1] != '\n'; /* it counts as a line */
    if (lines + has_rest > capture->tail.lines) {
        size_t excess = lines + has_rest - capture->tail.lines;
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
