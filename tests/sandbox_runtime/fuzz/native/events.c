#include "events.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "frames.h"
#include "host.h"
#include "programs.h"
#include "world.h"

#define TICK_S 0.05

enum {
    SEND,
    SEND_MUCH,
    SEND_RAW,
    GRANT,
    HOST_READS,
    HOST_READS_ALL,
    PRINT,
    PRINT_MUCH,
    PROGRAM_READS,
    PROGRAM_ENDS,
    CALL,
    CALLER_SENDS,
    CALLER_READS,
    HANG_UP,
    WAIT,
    MAKE_FILE,
    FAIL,
    EVENTS,
};

static const uint8_t *at, *end;

void events_begin(const uint8_t *data, size_t length)
{
    at = data;
    end = data + length;
}

size_t events_left(void)
{
    return (size_t)(end - at);
}

static uint8_t next_byte(void)
{
    return at < end ? *at++ : 0;
}

static size_t next_bytes(size_t most, const uint8_t **bytes)
{
    size_t left = (size_t)(end - at);
    *bytes = at;
    at += left < most ? left : most;
    return left < most ? left : most;
}

static void send_frame(void)
{
    const uint8_t *payload;
    uint8_t stream = next_byte(), type = next_byte(), high = next_byte();
    size_t length = next_bytes((size_t)high << 8 | next_byte(), &payload);
    host_send(stream, type, payload, length);
}

/* Send more data than an input can contain. */
static void send_much(void)
{
    static char data[UINT8_MAX * 256];
    uint8_t stream = next_byte();
    host_send(stream, FRAME_DATA, data, 256 * (size_t)next_byte());
}

static void send_raw(void)
{
    const uint8_t *data;
    size_t length = next_bytes(next_byte(), &data);
    host_send_raw(data, length);
}

static void print(void)
{
    const uint8_t *data;
    uint8_t program = next_byte(), stdio = next_byte();
    size_t length = next_bytes(next_byte(), &data);
    program_writes(program, stdio, data, length);
}

static void print_much(void)
{
    static char data[UINT8_MAX * 256];
    uint8_t program = next_byte(), stdio = next_byte(), length = next_byte();
    memset(data, next_byte(), 256 * (size_t)length);
    program_writes(program, stdio, data, 256 * (size_t)length);
}

static void call(void)
{
    const uint8_t *data;
    uint8_t number = next_byte();
    size_t length = next_bytes(next_byte(), &data);
    caller_sends(number, data, length);
}

/* Make a file of any kind, as a command could. The input has its name. */
static void make_file(void)
{
    const uint8_t *bytes;
    char name[UINT8_MAX + 1] = "";
    uint8_t kind = next_byte();
    size_t length = next_bytes(next_byte(), &bytes);
    memcpy(name, bytes, length);
    if (!*name || strchr(name, '/'))
        return;
    if (kind % 4 == 0) {
        int fd = open(name, O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0644);
        if (fd >= 0 && ftruncate(fd, kind) == 0)
            close(fd);
    } else if (kind % 4 == 1) {
        mkdir(name, 0755);
    } else if (kind % 4 == 2) {
        mkfifo(name, 0644);
    } else if (symlink(kind & 4 ? name : "file", name) < 0) {
        return;
    }
}

static void end_program(void)
{
    uint8_t number = next_byte();
    program_ends(number, next_byte());
}

static void hang_up(void)
{
    uint8_t number = next_byte();
    if (number & 0x80)
        caller_leaves(number & 0x7F);
    else
        caller_finishes(number);
}

void event_play(void)
{
    switch (next_byte() % EVENTS) {
    case SEND:
        send_frame();
        break;
    case SEND_MUCH:
        send_much();
        break;
    case SEND_RAW:
        send_raw();
        break;
    case GRANT:
        host_grant(next_byte());
        break;
    case HOST_READS:
        world_let_host_read(16 * (size_t)next_byte());
        break;
    case HOST_READS_ALL:
        world_let_host_read(SIZE_MAX);
        break;
    case PRINT:
        print();
        break;
    case PRINT_MUCH:
        print_much();
        break;
    case PROGRAM_READS:
        program_reads(next_byte());
        break;
    case PROGRAM_ENDS:
        end_program();
        break;
    case CALL:
        caller_connects();
        break;
    case CALLER_SENDS:
        call();
        break;
    case CALLER_READS:
        caller_reads(next_byte());
        break;
    case HANG_UP:
        hang_up();
        break;
    case WAIT:
        world_wait(TICK_S * next_byte());
        break;
    case MAKE_FILE:
        make_file();
        break;
    case FAIL:
        world_let_fail(next_byte());
        break;
    }
}
