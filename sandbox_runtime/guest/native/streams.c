#include "streams.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "link.h"
#include "memory.h"
#include "report.h"

#define MAX_MESSAGE_BYTES 1000u
#define PIECES_PER_ROUND 16

struct stream {
    uint32_t number;
    const struct operation *operation;
    void *owner;
    size_t credit;      /* bytes that the agent may send */
    size_t host_credit; /* bytes that the host may send */
    bool is_ready;
    struct stream *next;
};

char scratch[MAX_DATA_BYTES];

static struct stream *streams; /* in the order in which they may send next */
static struct stream **last = &streams;
static uint32_t opened; /* the newest stream from the agent */

static void append(struct stream *stream)
{
    stream->next = NULL;
    *last = stream;
    last = &stream->next;
}

static void unlink_stream(struct stream *stream)
{
    struct stream **link = &streams;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
    if (last == &stream->next)
        last = link;
}

static struct stream *find(uint32_t number)
{
    struct stream *stream = streams;
    while (stream && stream->number != number)
        stream = stream->next;
    return stream;
}

struct stream *stream_open(uint32_t number)
{
    if (find(number))
        die("the host broke the protocol: it opened stream %u twice", number);
    struct stream *stream = allocate(sizeof *stream);
    stream->number = number;
    stream->credit = FIRST_WINDOW_BYTES;
    stream->host_credit = WINDOW_BYTES;
    append(stream);
    return stream;
}

struct stream *stream_open_from_agent(void)
{
    opened += 2;
    link_send(opened, FRAME_OPEN, "{}", 2);
    return stream_open(opened);
}

void stream_attach(struct stream *stream, const struct operation *operation, void *owner)
{
    stream->operation = operation;
    stream->owner = owner;
}

void stream_ready(struct stream *stream)
{
    stream->is_ready = true;
}

void stream_send(struct stream *stream, enum frame_type type, const char *data, size_t length)
{
    stream->credit -= length;
    link_send(stream->number, type, data, length);
}

void stream_send_control(struct stream *stream, enum frame_type type)
{
    link_send(stream->number, type, NULL, 0);
}

void stream_grant_credit(struct stream *stream, size_t length)
{
    if (length == 0)
        return;
    char credit[4];
    write_u32(credit, (uint32_t)length);
    stream->host_credit += length;
    link_send(stream->number, FRAME_WINDOW, credit, sizeof credit);
}

void stream_close(struct stream *stream)
{
    unlink_stream(stream);
    free(stream);
}

void stream_finish(struct stream *stream, struct buffer *report)
{
    link_send(stream->number, FRAME_END, buffer_data(report), report->length);
    buffer_free(report);
    stream_close(stream);
}

void stream_fail(struct stream *stream, const char *code, const char *message)
{
    struct buffer report = {0};
    size_t length = strlen(message);
    report_begin(&report);
    report_text(&report, "error", code, strlen(code));
    length = length < MAX_MESSAGE_BYTES ? length : MAX_MESSAGE_BYTES;
    report_text(&report, "message", message, length);
    report_end(&report);
    stream_finish(stream, &report);
}

static const char *code_of(int error)
{
    switch (error) {
    case ENOENT:
        return "missing";
    case EEXIST:
        return "exists";
    case EISDIR:
    case ENOTDIR:
    case ELOOP: /* a link */
    case ENXIO: /* a FIFO or socket without a peer */
        return "not_regular";
    default:
        return "io";
    }
}

void stream_fail_errno(struct stream *stream, int error, const char *subject)
{
    char *message = format("%s: %s", subject, strerror(error));
    stream_fail(stream, code_of(error), message);
    free(message);
}

static void receive_data(struct stream *stream, const struct frame *frame)
{
    if (frame->length > stream->host_credit)
        die("the host broke the protocol: more data than allowed on stream %u", stream->number);
    stream->host_credit -= frame->length;
    stream->operation->feed(stream->owner, frame->payload, frame->length);
}

static void receive_credit(struct stream *stream, const struct frame *frame)
{
    size_t credit = frame->length == 4 ? read_u32(frame->payload) : WINDOW_BYTES + 1;
    if (stream->credit + credit > WINDOW_BYTES)
        die("the host broke the protocol: credit for more than was sent");
    stream->credit += credit;
    stream->is_ready = true;
}

void streams_receive(const struct frame *frame)
{
    struct stream *stream = find(frame->stream);
    if (!stream)
        return;
    switch (frame->type) {
    case FRAME_DATA:
        receive_data(stream, frame);
        break;
    case FRAME_EOF:
        stream->operation->finish_input(stream->owner);
        break;
    case FRAME_WINDOW:
        receive_credit(stream, frame);
        break;
    case FRAME_RESET:
        stream->operation->reset(stream->owner);
        stream_close(stream);
        break;
    default:
        die("the host broke the protocol: frame type %u on stream %u", frame->type, frame->stream);
    }
}

void streams_abandon(void)
{
    while (streams) {
        struct stream *stream = streams;
        const struct operation *operation = stream->operation;
        (operation->abandon ? operation->abandon : operation->reset)(stream->owner);
        stream_close(stream);
    }
    opened = 0;
}

static bool can_send(const struct stream *stream)
{
    return stream->is_ready && stream->credit > 0;
}

static struct stream *next_to_send(void)
{
    struct stream *stream = streams;
    while (stream && !can_send(stream))
        stream = stream->next;
    return stream;
}

bool streams_pump(void)
{
    struct stream *stream;
    for (int n = 0; n < PIECES_PER_ROUND && !link_is_full() && (stream = next_to_send()); n++) {
        size_t credit = stream->credit < MAX_DATA_BYTES ? stream->credit : MAX_DATA_BYTES;
        unlink_stream(stream); /* to the end: round-robin */
        append(stream);
        stream->is_ready = false;
        if (stream->operation->pump(stream->owner, credit) == PUMP_MORE)
            stream->is_ready = true;
    }
    return !link_is_full() && next_to_send();
}

void ignore_data(void *owner, const char *data, size_t length)
{
    (void)owner;
    (void)data;
    (void)length;
}

void ignore_end(void *owner)
{
    (void)owner;
}

enum pump_result send_nothing(void *owner, size_t credit)
{
    (void)owner;
    (void)credit;
    return PUMP_IDLE;
}
