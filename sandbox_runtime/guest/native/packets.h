/* Packets carry the bytes of a link over connections that may be lost, replaced and overlap; see
   packets.py. Each is a header, a payload and a trailer, with big-endian numbers:

       token[16], u8 kind, u32 connection, u64 offset, u64 received, u64 clock, u32 length
       payload[length]
       u32 connection, u64 offset, both XOR the beginning of the token */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define TOKEN_BYTES 16
#define PACKET_HEADER_BYTES 49
#define PACKET_TRAILER_BYTES 12
#define MAX_PACKET_BYTES (32u << 10)
#define MAX_PAYLOAD_BYTES (MAX_PACKET_BYTES - PACKET_HEADER_BYTES - PACKET_TRAILER_BYTES)

/* The upper bits of a connection's number: how many hosts have adopted the link before. */
#define GENERATION_SHIFT 20

/* The host sends the last two: the agent ends; the host adopts the link, as a new generation. */
enum packet_kind { PACKET_DATA = 1, PACKET_END, PACKET_ADOPT };

struct packet {
    uint8_t kind;
    uint32_t connection; /* the number of the newest connection that the sender knows */
    uint64_t offset;     /* of the payload in all bytes that the sender has sent */
    uint64_t received;   /* how many bytes the sender has received */
    uint64_t clock;      /* the agent's, in ms; the host sends back the newest that it has received */
    uint32_t length;
    const char *payload;
};

enum packet_state { PACKET_IS_COMPLETE, PACKET_IS_INCOMPLETE };

/* Find the first packet in `data`. Bytes that are none are skipped: the rest of a packet whose
   beginning is lost, or a packet that another connection has interrupted. Set `used` to the number
   of bytes that are not needed again. The payload is not copied. */
enum packet_state packet_parse(const char token[TOKEN_BYTES], const char *data, size_t length,
                               struct packet *packet, size_t *used);
/* Write a packet, with a copy of its payload. Return its length. */
size_t packet_write(char target[MAX_PACKET_BYTES], const char token[TOKEN_BYTES],
                    const struct packet *packet);
