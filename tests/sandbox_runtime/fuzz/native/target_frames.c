/* Frames: the same frames are parsed from bytes in arbitrary pieces. */
#include <stdint.h>
#include <string.h>

#include "frames.h"
#include "ledger.h"

/* The frames of bytes that come `piece` at a time, as a number; and how many bytes are left. */
static uint64_t read_frames(char *data, size_t size, size_t piece, size_t *left)
{
    uint64_t seen = 0;
    size_t used = 0;
    for (size_t length = piece < size ? piece : size;;) {
        struct frame frame;
        enum frame_state state = frame_parse(data + used, length - used, &frame);
        if (state == FRAME_IS_COMPLETE) {
            if (frame.payload + frame.length > data + length)
                fault("a frame is longer than what is there");
            char header[FRAME_HEADER_BYTES];
            frame_header(header, &frame);
            if (memcmp(header, data + used, sizeof header) != 0)
                fault("a header is not what it was");
            used += sizeof header + frame.length;
            seen = seen * 31 + used;
        } else if (state == FRAME_IS_TOO_LONG || length == size) {
            *left = state == FRAME_IS_TOO_LONG ? SIZE_MAX : size - used;
            return seen;
        } else {
            length += piece < size - length ? piece : size - length;
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t left, left_in_pieces;
    if (size < 1)
        return 0;
    size_t piece = 1 + data[0] % 16;
    uint64_t seen = read_frames((char *)data + 1, size - 1, size, &left);
    if (read_frames((char *)data + 1, size - 1, piece, &left_in_pieces) != seen ||
        left != left_in_pieces)
        fault("pieces of %zu bytes make other frames", piece);
    return 0;
}
