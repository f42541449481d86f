/* Packets: arbitrary bytes are parsed or skipped, in any pieces, and what is written is read back. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ledger.h"
#include "packets.h"

static const char token[TOKEN_BYTES] = "defghijklmnopqrs";

/* Make each token the beginning of a valid packet, so that a fuzzer gets beyond the trailer. */
static void repair(char *data, size_t size)
{
    static char written[MAX_PACKET_BYTES];
    const size_t least = PACKET_HEADER_BYTES + PACKET_TRAILER_BYTES;
    for (size_t at = 0; at + least <= size; at++) {
        if (memcmp(data + at, token, TOKEN_BYTES) != 0)
            continue;
        const unsigned char *fields = (const unsigned char *)data + at + TOKEN_BYTES;
        size_t left = size - at - least;
        const struct packet packet = {
            .kind = fields[0],
            .connection = 1u + fields[1],
            .offset = fields[2],
            .received = fields[3],
            .clock = fields[4],
            .length = (uint32_t)(fields[5] < left ? fields[5] : left),
            .payload = data + at + PACKET_HEADER_BYTES,
        };
        memcpy(data + at, written, packet_write(written, token, &packet));
        size_t end = at + least + packet.length;
        at = end - 1;
    }
}

/* The packets of bytes that come `piece` at a time, as a number. */
static uint64_t read_packets(const char *data, size_t size, size_t piece)
{
    uint64_t seen = 0;
    size_t start = 0, length = piece < size ? piece : size, used;
    for (;;) {
        struct packet packet;
        enum packet_state state = packet_parse(token, data + start, length - start, &packet, &used);
        if (used > length - start)
            fault("%zu of %zu bytes are used", used, length - start);
        start += used;
        if (state == PACKET_IS_COMPLETE) {
            if (packet.payload + packet.length > data + length)
                fault("a packet is longer than what is there");
            seen = seen * 31 + packet.offset + packet.received + packet.connection + packet.kind;
            seen = seen * 31 + packet.length + 1;
        } else if (length == size) {
            return seen;
        } else {
            length += piece < size - length ? piece : size - length;
        }
    }
}

/* A packet is found behind any bytes, unless they end with the beginning of another one. */
static void check_found_behind(const char *data, size_t size)
{
    static const char payload[] = "payload";
    const struct packet packet = {PACKET_DATA, 2, 3, 4, 5, sizeof payload, payload};
    char *whole = malloc(size + MAX_PACKET_BYTES);
    memcpy(whole, data, size);
    size_t length = size + packet_write(whole + size, token, &packet), used;
    struct packet found = {0};
    for (size_t start = 0; found.payload != whole + size + PACKET_HEADER_BYTES; start += used)
        if (packet_parse(token, whole + start, length - start, &found, &used) ==
            PACKET_IS_INCOMPLETE)
            fault("a packet is not found behind %zu bytes", size);
    if (found.kind != packet.kind || found.connection != 2 || found.offset != 3 ||
        found.received != 4 || found.clock != 5 || found.length != sizeof payload ||
        memcmp(found.payload, payload, sizeof payload) != 0)
        fault("a packet is not what was written");
    free(whole);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    char *bytes = malloc(size);
    memcpy(bytes, data, size);
    if (data[0] & 1)
        repair(bytes + 2, size - 2);
    uint64_t seen = read_packets(bytes + 2, size - 2, size);
    if (read_packets(bytes + 2, size - 2, 1 + data[1]) != seen)
        fault("pieces of %u bytes make other packets", 1u + data[1]);
    check_found_behind(bytes + 2, size - 2);
    free(bytes);
    return 0;
}
