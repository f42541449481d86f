/* Frames: `u32 stream, u8 type, u32 length`, big-endian, and `length` bytes; see protocol.py. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define PROTOCOL_VERSION 4
#define FRAME_HEADER_BYTES 9
#define WINDOW_BYTES (256u << 10)
#define FIRST_WINDOW_BYTES (16u << 10)
#define MAX_DATA_BYTES (64u << 10)
#define MAX_FRAME_BYTES (16u << 20)

enum frame_type {
    FRAME_HELLO = 1,
    FRAME_OPEN,
    FRAME_DATA,
    FRAME_STDERR,
    FRAME_TAIL,
    FRAME_STDERR_TAIL,
    FRAME_EOF,
    FRAME_WINDOW,
    FRAME_END,
    FRAME_RESET,
    FRAME_PING,
    FRAME_PONG,
    FRAME_ACK,
};

struct frame {
    uint32_t stream;
    uint8_t type;
    uint32_t length;
    char *payload;
};

enum frame_state { FRAME_IS_COMPLETE, FRAME_IS_INCOMPLETE, FRAME_IS_TOO_LONG };

/* Parse the frame at the start of `data`. The payload is not copied. */
enum frame_state frame_parse(char *data, size_t length, struct frame *frame);
void frame_header(char header[FRAME_HEADER_BYTES], const struct frame *frame);

uint32_t read_u32(const char bytes[4]);
void write_u32(char bytes[4], uint32_t number);
