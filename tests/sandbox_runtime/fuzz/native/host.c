#include "host.h"

#include <string.h>

#include "frames.h"
#include "json.h"
#include "ledger.h"
#include "world.h"

#define STREAMS 1024 /* more than an input can open */
#define MAX_REPORT_BYTES (64u << 10)

enum stream_state { NEVER_OPENED, IS_OPEN, GIVEN_UP, IS_OVER };

static struct {
    enum stream_state state;
    size_t allowed; /* bytes that the agent may still send */
    size_t received, sent;
    bool agent_has_finished, host_has_finished;
} streams[STREAMS];
static uint32_t last_from_inside;
static bool is_exact, has_greeted;
static size_t pings;
static char unread[FRAME_HEADER_BYTES + MAX_REPORT_BYTES];
static size_t unread_length;

void host_begin(void)
{
    memset(streams, 0, sizeof streams);
    last_from_inside = 0;
    is_exact = true;
    has_greeted = false;
    pings = unread_length = 0;
}

bool host_is_exact(void)
{
    return is_exact;
}

static void open_stream(uint32_t number)
{
    streams[number].state = IS_OPEN;
    streams[number].allowed = FIRST_WINDOW_BYTES;
}

static void leave_if_over(uint32_t number)
{
    if (streams[number].agent_has_finished && streams[number].host_has_finished)
        streams[number].state = GIVEN_UP; /* credit sent before the end may still arrive */
}

void host_send(uint32_t stream, uint8_t type, const void *payload, size_t length)
{
    static char sent[FRAME_HEADER_BYTES + (1 << 16)];
    bool is_theirs = stream && stream % 2 == 0;
    if (is_theirs && streams[stream].state == NEVER_OPENED)
        return; /* the agent has not opened the stream */
    const struct frame frame = {stream, type, (uint32_t)length, NULL};
    frame_header(sent, &frame);
    if (length)
        memcpy(sent + FRAME_HEADER_BYTES, payload, length);
    if (!world_send(sent, FRAME_HEADER_BYTES + length))
        return;
    pings += type == FRAME_PING;
    if (type == FRAME_OPEN && streams[stream].state != NEVER_OPENED)
        is_exact = false; /* the real host uses no number twice */
    if (type == FRAME_OPEN && stream % 2)
        open_stream(stream);
    if (streams[stream].state != IS_OPEN)
        return;
    if (type == FRAME_DATA)
        streams[stream].sent += length;
    if (type == FRAME_WINDOW && length == 4)
        streams[stream].allowed += read_u32(payload);
    if (type == FRAME_RESET)
        streams[stream].state = GIVEN_UP;
    if (type == FRAME_EOF && stream % 2 == 0) {
        streams[stream].host_has_finished = true;
        leave_if_over(stream);
    }
}

void host_send_raw(const void *data, size_t length)
{
    is_exact = false;
    world_send(data, length);
}

void host_grant(uint8_t stream)
{
    char credit[4];
    write_u32(credit, (uint32_t)streams[stream].received);
    streams[stream].received = 0;
    if (streams[stream].state == IS_OPEN)
        host_send(stream, FRAME_WINDOW, credit, sizeof credit);
}

void host_give_up(void)
{
    for (uint32_t number = 0; number < STREAMS; number++)
        if (streams[number].state == IS_OPEN)
            host_send(number, FRAME_RESET, NULL, 0);
}

static void check_report(const struct frame *frame)
{
    struct json *report = json_parse(frame->payload, frame->length);
    if (!report || report->kind != JSON_OBJECT)
        fault("a report that is none: %.*s", (int)frame->length, frame->payload);
    json_free(report);
}

static void take_data(const struct frame *frame)
{
    if (!frame->length || frame->length > streams[frame->stream].allowed)
        fault("%u bytes where %zu are allowed", frame->length, streams[frame->stream].allowed);
    streams[frame->stream].allowed -= frame->length;
    streams[frame->stream].received += frame->length;
}

static void take_credit(const struct frame *frame)
{
    size_t credit = frame->length == 4 ? read_u32(frame->payload) : 0;
    if (!credit || credit > streams[frame->stream].sent)
        fault("credit for %zu bytes of %zu", credit, streams[frame->stream].sent);
    streams[frame->stream].sent -= credit;
}

static void take_from_operation(const struct frame *frame)
{
    switch (frame->type) {
    case FRAME_DATA:
    case FRAME_STDERR:
    case FRAME_TAIL:
    case FRAME_STDERR_TAIL:
        take_data(frame);
        break;
    case FRAME_WINDOW:
        take_credit(frame);
        break;
    case FRAME_END:
        check_report(frame);
        streams[frame->stream].state = IS_OVER;
        break;
    default:
        fault("frame type %u on stream %u", frame->type, frame->stream);
    }
}

static void take_from_connection(const struct frame *frame)
{
    uint32_t number = frame->stream;
    bool has_finished = streams[number].agent_has_finished;
    if (frame->type == FRAME_DATA && !has_finished) {
        take_data(frame);
    } else if (frame->type == FRAME_WINDOW) {
        take_credit(frame);
    } else if (frame->type == FRAME_EOF && !has_finished) {
        streams[number].agent_has_finished = true;
        leave_if_over(number);
    } else if (frame->type == FRAME_RESET) {
        streams[number].state = IS_OVER;
    } else {
        fault("frame type %u on stream %u", frame->type, frame->stream);
    }
}

static void greet(const struct frame *frame)
{
    if (frame->type == FRAME_HELLO && !has_greeted) {
        has_greeted = true;
        check_report(frame);
    } else if (frame->type == FRAME_PONG && (pings || !is_exact)) {
        pings -= is_exact;
    } else {
        fault("frame type %u on stream 0", frame->type);
    }
}

static void take(const struct frame *frame)
{
    if (frame->length > MAX_REPORT_BYTES)
        fault("a frame of %u bytes", frame->length);
    if (frame->stream == 0) {
        greet(frame);
        return;
    }
    if (frame->stream % 2 == 0 && frame->type == FRAME_OPEN) {
        if (frame->stream != last_from_inside + 2)
            fault("stream %u opened after %u", frame->stream, last_from_inside);
        last_from_inside = frame->stream;
        if (frame->stream < STREAMS)
            open_stream(frame->stream);
        return;
    }
    if (!is_exact || frame->stream >= STREAMS || streams[frame->stream].state == GIVEN_UP)
        return;
    if (streams[frame->stream].state != IS_OPEN)
        fault("frame type %u on stream %u, which is not open", frame->type, frame->stream);
    if (frame->stream % 2)
        take_from_operation(frame);
    else
        take_from_connection(frame);
}

void host_take(const char *data, size_t length)
{
    while (length) {
        struct frame frame;
        size_t room = sizeof unread - unread_length;
        size_t count = length < room ? length : room;
        memcpy(unread + unread_length, data, count);
        unread_length += count;
        data += count;
        length -= count;
        size_t used = 0;
        enum frame_state state;
        while ((state = frame_parse(unread + used, unread_length - used, &frame)) ==
               FRAME_IS_COMPLETE) {
            take(&frame);
            used += FRAME_HEADER_BYTES + frame.length;
        }
        if (used == 0 && unread_length == sizeof unread)
            fault("a frame of %u bytes", frame.length);
        memmove(unread, unread + used, unread_length - used);
        unread_length -= used;
    }
}
