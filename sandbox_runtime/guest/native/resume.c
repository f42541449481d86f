#include "resume.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "loop.h"
#include "packets.h"

#define ACKNOWLEDGE_BYTES (64u << 10)
#define ACKNOWLEDGE_DELAY_S 1.0
#define READ_BYTES (64u << 10)
#define INPUT_BYTES (2 * READ_BYTES) /* an incomplete packet, and what one read adds */

static char token[TOKEN_BYTES];
static char input_block[INPUT_BYTES];
static struct buffer input = {.fixed_block = input_block, .fixed_capacity = INPUT_BYTES};
static uint32_t connection = 1; /* the newest that the host has named */
static uint64_t received_bytes, acknowledged_bytes; /* the second: as the host was told */
static bool must_send; /* a packet, even an empty one */
static struct timer acknowledgement, lease;
static double lease_length_s;
static uint64_t lease_clock; /* the newest clock that the host has sent back */

static void (*adopted)(void);
static struct buffer *sent;     /* and to be sent: from `sent_offset` on */
static uint64_t sent_offset;    /* of the first byte that the host may not have received */
static uint64_t next_offset;    /* of the next packet */
static char packet[MAX_PACKET_BYTES];
static size_t packet_length, packet_written;

static uint64_t clock_ms(void)
{
    return (uint64_t)(now_s() * 1000);
}

/* The host has not been heard for too long, or has ended the link. */
static void end_agent(void *unused)
{
    (void)unused;
    _exit(0);
}

static void renew_lease(uint64_t clock)
{
    if (clock <= lease_clock || clock > clock_ms())
        return;
    lease_clock = clock;
    if (lease_length_s > 0)
        timer_set(&lease, (double)clock / 1000 + lease_length_s - now_s(), end_agent, NULL);
}

static void acknowledge(void *unused)
{
    (void)unused;
    must_send = true;
}

static int digit_value(char digit)
{
    static const char digits[] = "0123456789abcdef";
    const char *found = digit ? strchr(digits, digit) : NULL;
    if (!found)
        die("the configuration has an invalid token");
    return (int)(found - digits);
}

void resume_begin(const char *token_text, double lease_s, struct buffer *unsent,
                  void (*on_adopt)(void))
{
    if (strlen(token_text) != 2 * TOKEN_BYTES)
        die("the configuration has an invalid token");
    for (size_t n = 0; n < TOKEN_BYTES; n++)
        token[n] = (char)(digit_value(token_text[2 * n]) << 4 | digit_value(token_text[2 * n + 1]));
    lease_length_s = lease_s;
    sent = unsent;
    adopted = on_adopt;
    renew_lease(clock_ms());
}

/* The host has connected again, and sends which bytes it has received. */
static void use_connection(const struct packet *from_host)
{
    connection = from_host->connection;
    next_offset = from_host->received;
    must_send = true;
}

static uint32_t generation_of(uint32_t number)
{
    return number >> GENERATION_SHIFT;
}

/* Another host begins the link anew. The lease is not renewed: this packet may have been on its way
   for long. The host renews it with the clock of the answer. */
static void adopt(uint32_t number)
{
    adopted();
    connection = number;
    received_bytes = acknowledged_bytes = 0;
    sent_offset = next_offset = 0;
    timer_clear(&acknowledgement);
    must_send = true;
}

static void take(const struct packet *from_host, struct buffer *received)
{
    uint32_t generation = generation_of(from_host->connection);
    if (generation > generation_of(connection) && from_host->kind == PACKET_ADOPT)
        adopt(from_host->connection);
    if (generation != generation_of(connection))
        return; /* of an earlier host, or before its adoption has arrived */
    if (from_host->kind == PACKET_END)
        end_agent(NULL);
    if (from_host->received > sent_offset + sent->length)
        die("the host broke the protocol: it has received more than was sent");
    renew_lease(from_host->clock);
    if (from_host->connection > connection)
        use_connection(from_host);
    if (from_host->received > sent_offset) {
        buffer_consume(sent, (size_t)(from_host->received - sent_offset));
        sent_offset = from_host->received;
    }
    if (next_offset < sent_offset)
        next_offset = sent_offset;
    /* Packets of an earlier connection may arrive late, or twice; what is missing is sent again. */
    uint64_t end = from_host->offset + from_host->length;
    if (from_host->offset > received_bytes || end <= received_bytes)
        return;
    size_t known = (size_t)(received_bytes - from_host->offset);
    buffer_append(received, from_host->payload + known, from_host->length - known);
    received_bytes = end;
    if (received_bytes - acknowledged_bytes >= ACKNOWLEDGE_BYTES)
        must_send = true;
    else if (!acknowledgement.is_set)
        timer_set(&acknowledgement, ACKNOWLEDGE_DELAY_S, acknowledge, NULL);
}

ssize_t resume_read(struct buffer *received)
{
    ssize_t count = buffer_read(&input, STDIN_FILENO, READ_BYTES);
    struct packet from_host;
    size_t used;
    while (input.length && packet_parse(token, buffer_data(&input), input.length, &from_host,
                                        &used) == PACKET_IS_COMPLETE) {
        take(&from_host, received);
        buffer_consume(&input, used);
        used = 0;
    }
    if (input.length)
        buffer_consume(&input, used);
    return count;
}

/* Make the next packet; return false if there is nothing to send. */
static bool make_packet(void)
{
    size_t start = (size_t)(next_offset - sent_offset), left = sent->length - start;
    if (left == 0 && !must_send)
        return false;
    const struct packet to_host = {
        .kind = PACKET_DATA,
        .connection = connection,
        .offset = next_offset,
        .received = received_bytes,
        .clock = clock_ms(),
        .length = (uint32_t)(left < MAX_PAYLOAD_BYTES ? left : MAX_PAYLOAD_BYTES),
        .payload = buffer_data(sent) + start,
    };
    packet_length = packet_write(packet, token, &to_host);
    packet_written = 0;
    next_offset += to_host.length;
    acknowledged_bytes = received_bytes;
    must_send = false;
    timer_clear(&acknowledgement);
    return true;
}

bool resume_flush(void)
{
    while (packet_written < packet_length || make_packet()) {
        ssize_t count = write(STDOUT_FILENO, packet + packet_written, packet_length - packet_written);
        if (count >= 0)
            packet_written += (size_t)count;
        else if (errno == EAGAIN)
            return true;
        else if (errno != EINTR)
            end_agent(NULL);
    }
    return false;
}
