/* Streams. Each carries an operation of the host, or an egress connection of a program. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "frames.h"
#include "memory.h"

enum pump_result {
    PUMP_IDLE,   /* nothing to send until stream_ready() */
    PUMP_MORE,   /* there may be more to send */
    PUMP_CLOSED, /* the stream is closed and freed */
};

/* The callbacks of a stream's owner. */
struct operation {
    /* Take input. The owner grants credit for it by stream_grant_credit(). */
    void (*feed)(void *owner, const char *data, size_t length);
    void (*finish_input)(void *owner);
    /* Send the next piece, of at most `credit` bytes, by stream_send(). */
    enum pump_result (*pump)(void *owner, size_t credit);
    /* The host has cancelled the stream, which is freed after this returns. */
    void (*reset)(void *owner);
    /* The host is gone, and with it the stream, which is freed after this returns; the work goes on
       for the next host. NULL: the same as `reset`. */
    void (*abandon)(void *owner);
};

struct stream;

/* Open a stream that the host has requested; open one from the agent and announce it. */
struct stream *stream_open(uint32_t number);
struct stream *stream_open_from_agent(void);
/* Set the stream's owner and callbacks. */
void stream_attach(struct stream *stream, const struct operation *operation, void *owner);
/* Let the event loop call `pump`: there is something to send. */
void stream_ready(struct stream *stream);
void stream_send(struct stream *stream, enum frame_type type, const char *data, size_t length);
/* Send a frame without a payload, which needs no credit. */
void stream_send_control(struct stream *stream, enum frame_type type);
/* Allow the host to send `length` more bytes. */
void stream_grant_credit(struct stream *stream, size_t length);

/* Close and free the stream: without a frame; with a report, which is freed; with an error; with
   the error of a system call about `subject`. */
void stream_close(struct stream *stream);
void stream_finish(struct stream *stream, struct buffer *report);
void stream_fail(struct stream *stream, const char *code, const char *message);
void stream_fail_errno(struct stream *stream, int error, const char *subject);

/* Process a frame for a stream. Frames for closed streams are ignored: they were in flight. */
void streams_receive(const struct frame *frame);
/* Close all streams: the host is gone, and another one follows. */
void streams_abandon(void);
/* Let the ready streams send some pieces in turn. Return true if there is more to send now. */
bool streams_pump(void);

/* Callbacks for operations without input, and without output. */
void ignore_data(void *owner, const char *data, size_t length);
void ignore_end(void *owner);
enum pump_result send_nothing(void *owner, size_t credit);

/* A buffer for data that is read and passed on at once. */
extern char scratch[MAX_DATA_BYTES];
