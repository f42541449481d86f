#include "packets.h"

#include <stdbool.h>
#include <string.h>

#include "frames.h"

enum {
    KIND_AT = TOKEN_BYTES,
    CONNECTION_AT = 17,
    OFFSET_AT = 21,
    RECEIVED_AT = 29,
    CLOCK_AT = 37,
    LENGTH_AT = 45,
};

static uint64_t read_u64(const char bytes[8])
{
    return (uint64_t)read_u32(bytes) << 32 | read_u32(bytes + 4);
}

static void write_u64(char bytes[8], uint64_t number)
{
    write_u32(bytes, (uint32_t)(number >> 32));
    write_u32(bytes + 4, (uint32_t)number);
}

/* The connection and the offset, masked by the token: no other bytes look like them. */
static void make_trailer(char trailer[PACKET_TRAILER_BYTES], const char *header)
{
    for (size_t n = 0; n < PACKET_TRAILER_BYTES; n++)
        trailer[n] = header[CONNECTION_AT + n] ^ header[n];
}

/* Return the position of the first token at or after `at`, or that of its possible beginning at the
   end of the data. */
static size_t find_token(const char token[TOKEN_BYTES], const char *data, size_t length, size_t at)
{
    const char *found = memmem(data + at, length - at, token, TOKEN_BYTES);
    if (found)
        return (size_t)(found - data);
    size_t begin = length - at < TOKEN_BYTES ? at : length - TOKEN_BYTES + 1;
    while (begin < length && memcmp(data + begin, token, length - begin) != 0)
        begin++;
    return begin;
}

/* Return true if what has arrived of a packet has a second token: another packet has interrupted
   it, and the rest may never come. */
static bool is_interrupted(const char token[TOKEN_BYTES], const char *packet, size_t length)
{
    return memmem(packet + TOKEN_BYTES, length - TOKEN_BYTES, token, TOKEN_BYTES);
}

enum packet_state packet_parse(const char token[TOKEN_BYTES], const char *data, size_t length,
                               struct packet *packet, size_t *used)
{
    for (size_t at = 0;; at++) {
        at = find_token(token, data, length, at);
        const char *header = data + at;
        size_t left = length - at;
        *used = at;
        if (left < PACKET_HEADER_BYTES)
            return PACKET_IS_INCOMPLETE;
        *packet = (struct packet){
            .kind = (uint8_t)header[KIND_AT],
            .connection = read_u32(header + CONNECTION_AT),
            .offset = read_u64(header + OFFSET_AT),
            .received = read_u64(header + RECEIVED_AT),
            .clock = read_u64(header + CLOCK_AT),
            .length = read_u32(header + LENGTH_AT),
            .payload = header + PACKET_HEADER_BYTES,
        };
        /* Without a connection the trailer could be the beginning of the next packet's token. */
        if (packet->length > MAX_PAYLOAD_BYTES || packet->connection == 0)
            continue;
        const char *trailer = packet->payload + packet->length;
        size_t end = PACKET_HEADER_BYTES + packet->length + PACKET_TRAILER_BYTES;
        if (is_interrupted(token, header, left < end ? left : end))
            continue;
        if (left < end)
            return PACKET_IS_INCOMPLETE;
        char expected[PACKET_TRAILER_BYTES];
        make_trailer(expected, header);
        if (memcmp(trailer, expected, sizeof expected) != 0)
            continue;
        *used = at + end;
        return PACKET_IS_COMPLETE;
    }
}

size_t packet_write(char target[MAX_PACKET_BYTES], const char token[TOKEN_BYTES],
                    const struct packet *packet)
{
    char *payload = target + PACKET_HEADER_BYTES;
    memcpy(target, token, TOKEN_BYTES);
    target[KIND_AT] = (char)packet->kind;
    write_u32(target + CONNECTION_AT, packet->connection);
    write_u64(target + OFFSET_AT, packet->offset);
    write_u64(target + RECEIVED_AT, packet->received);
    write_u64(target + CLOCK_AT, packet->clock);
    write_u32(target + LENGTH_AT, packet->length);
    if (packet->length)
        memcpy(payload, packet->payload, packet->length);
    make_trailer(payload + packet->length, target);
    return PACKET_HEADER_BYTES + packet->length + PACKET_TRAILER_BYTES;
}
