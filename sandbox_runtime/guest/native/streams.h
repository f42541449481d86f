/* Streams: each carries an operation of the host, or a connection of a program to the way out. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bytes.h"
#include "frames.h"

enum pumped {
    PUMPED_ALL,  /* nothing to send until stream_ready() */
    PUMPED_SOME, /* there may be more */
    PUMPED_LAST, /* the stream is over and must not be touched */
};

/* What a stream's frames mean to its owner. */
struct operation {
    /* Input; the credit for it is the owner's to give back, by stream_grant(). */
    void (*feed)(void *owner, const char *data, size_t length);
    void (*finish_input)(void *owner);
    /* Send the next piece, no longer than `credit`, by stream_send(). */
    enum pumped (*pump)(void *owner, size_t credit);
    /* The host has given it up; the stream is over when this returns. */
    void (*reset)(void *owner);
};

struct stream;

/* A stream the host has opened, or one of ours, of which the host is told. */
struct stream *stream_open(uint32_t number);
struct stream *stream_open_ours(void);
/* From now on the stream is `owner`'s. */
void stream_attend(struct stream *stream, const struct operation *operation, void *owner);
/* There is something to send: pump. */
void stream_ready(struct stream *stream);
void stream_send(struct stream *stream, enum frame_type type, const char *data, size_t length);
/* A frame that takes no credit. */
void stream_tell(struct stream *stream, enum frame_type type);
/* So much input has been dealt with. */
void stream_grant(struct stream *stream, size_t length);

/* The stream is over, and must not be touched any more: for both sides; with a report, which is
   freed; with an error; with the error of a system call about `subject`. */
void stream_leave(struct stream *stream);
void stream_finish(struct stream *stream, struct bytes *report);
void stream_fail(struct stream *stream, const char *code, const char *message);
void stream_fail_errno(struct stream *stream, int error, const char *subject);

/* A frame for an open stream; those for others are ignored, they crossed with its end. */
void streams_receive(const struct frame *frame);
/* Let the ready streams send some pieces in turn; returns whether there is more to send now. */
bool streams_pump(void);
