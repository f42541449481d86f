#include "frames.h"

uint32_t read_u32(const char bytes[4])
{
    uint32_t number = 0;
    for (int n = 0; n < 4; n++)
        number = number << 8 | (unsigned char)bytes[n];
    return number;
}

void write_u32(char bytes[4], uint32_t number)
{
    for (int n = 0; n < 4; n++)
        bytes[n] = (char)(number >> (24 - 8 * n));
}

enum frame_state frame_parse(char *data, size_t length, struct frame *frame)
{
    if (length < FRAME_HEADER_BYTES)
        return FRAME_IS_INCOMPLETE;
    frame->stream = read_u32(data);
    frame->type = (uint8_t)data[4];
    frame->length = read_u32(data + 5);
    frame->payload = data + FRAME_HEADER_BYTES;
    if (frame->length > MAX_FRAME_BYTES)
        return FRAME_IS_TOO_LONG;
    return length - FRAME_HEADER_BYTES < frame->length ? FRAME_IS_INCOMPLETE : FRAME_IS_COMPLETE;
}

void frame_header(char header[FRAME_HEADER_BYTES], const struct frame *frame)
{
    write_u32(header, frame->stream);
    header[4] = (char)frame->type;
    write_u32(header + 5, frame->length);
}
