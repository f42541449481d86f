/* Parts of the agent, each fed with cases from standard input: u32 length and bytes.
   For each case, a part prints one line, which a test compares. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "capture.h"
#include "frames.h"
#include "json.h"
#include "packets.h"

/* Read a case into a block of its exact length, so that a read beyond it is detected. */
static char *read_block(size_t *length)
{
    char header[4];
    if (fread(header, 1, sizeof header, stdin) != sizeof header)
        return NULL;
    *length = read_u32(header);
    char *block = malloc(*length ? *length : 1);
    return fread(block, 1, *length, stdin) == *length ? block : NULL;
}

static void print_hex(const char *data, size_t length)
{
    for (size_t n = 0; n < length; n++)
        printf("%02x", (unsigned char)data[n]);
}

static void print_value(const struct json *value)
{
    static const char words[] = "nft";
    switch (value->kind) {
    case JSON_NUMBER:
        printf("#%.17g", value->number);
        break;
    case JSON_TEXT:
        putchar('"');
        print_hex(value->text, value->length);
        break;
    case JSON_ARRAY:
    case JSON_OBJECT:
        putchar(value->kind == JSON_ARRAY ? '[' : '{');
        for (const struct json *member = value->first; member; member = member->next) {
            print_hex(member->name, member->name_length);
            putchar(':');
            print_value(member);
            putchar(',');
        }
        putchar(']');
        break;
    default:
        putchar(words[value->kind]);
    }
}

static void show_json(char *data, size_t length)
{
    struct json *value = json_parse(data, length);
    if (value)
        print_value(value);
    else
        putchar('-');
    json_free(value);
}

static void show_native(char *data, size_t length)
{
    struct json *value = json_parse(data, length);
    if (value && value->kind == JSON_TEXT && json_to_native(value))
        print_hex(value->text, strlen(value->text));
    else
        putchar('-');
    json_free(value);
}

static void show_frames(char *data, size_t length)
{
    struct frame frame;
    enum frame_state state;
    while ((state = frame_parse(data, length, &frame)) == FRAME_IS_COMPLETE) {
        printf("%u %u ", frame.stream, frame.type);
        print_hex(frame.payload, frame.length);
        putchar(',');
        data += FRAME_HEADER_BYTES + frame.length;
        length -= FRAME_HEADER_BYTES + frame.length;
    }
    printf("%s", state == FRAME_IS_TOO_LONG ? "too long" : "");
}

/* A token, then bytes. */
static void show_packets(char *data, size_t length)
{
    struct packet packet;
    size_t start = TOKEN_BYTES, used;
    while (packet_parse(data, data + start, length - start, &packet, &used) == PACKET_IS_COMPLETE) {
        printf("%u %u %llu %llu %llu ", packet.kind, packet.connection,
               (unsigned long long)packet.offset, (unsigned long long)packet.received,
               (unsigned long long)packet.clock);
        print_hex(packet.payload, packet.length);
        char *copy = malloc(MAX_PACKET_BYTES);
        size_t written = packet_write(copy, data, &packet);
        printf("%s,", memcmp(copy, data + start + used - written, written) ? " differs" : "");
        free(copy);
        start += used;
    }
}

/* The cap as two u32, then pieces of output as blocks. */
static void show_capture(char *data, size_t length)
{
    struct capture capture = capture_begin((struct cap){read_u32(data), read_u32(data + 4)});
    for (size_t at = 8; at < length;) {
        size_t size = read_u32(data + at);
        print_hex(data + at + 4, capture_feed(&capture, data + at + 4, size));
        at += 4 + size;
    }
    size_t tail_length;
    char *tail = capture_tail(&capture, &tail_length);
    putchar(' ');
    print_hex(tail, tail_length);
    printf(" %zu %zu %zu", capture.total_bytes, capture.total_lines, capture.shown_lines);
    free(tail);
    capture_free(&capture);
}

int main(int count, char **arguments)
{
    static const struct {
        const char *name;
        void (*show)(char *data, size_t length);
    } parts[] = {
        {"json", show_json}, {"native", show_native}, {"frames", show_frames}, {"packets", show_packets},
        {"capture", show_capture}};
    size_t length;
    for (size_t n = 0; count == 2 && n < sizeof parts / sizeof *parts; n++) {
        if (strcmp(arguments[1], parts[n].name) != 0)
            continue;
        for (char *data; (data = read_block(&length)); free(data)) {
            parts[n].show(data, length);
            putchar('\n');
            fflush(stdout);
        }
    }
    return 0;
}
