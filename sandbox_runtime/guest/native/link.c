#include "link.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "bytes.h"
#include "loop.h"
#include "memory.h"

#define READ_BYTES (256u << 10)
#define MAX_UNSENT_BYTES (1u << 20)

static void (*take)(const struct frame *frame);
static struct bytes received, unsent;
static struct watch input, output;
static struct timer watchdog;
static double patience;

/* The host is gone. */
static void leave(void *nobody)
{
    (void)nobody;
    _exit(0);
}

static void heard(void)
{
    if (patience > 0)
        timer_set(&watchdog, patience, leave, NULL);
}

static void receive(void *nobody)
{
    (void)nobody;
    ssize_t count = bytes_read(&received, STDIN_FILENO, READ_BYTES);
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (count <= 0)
        leave(NULL);
    heard();
    struct frame frame;
    size_t used = 0;
    enum frame_state state;
    while ((state = frame_parse(bytes_front(&received) + used, received.length - used, &frame)) ==
           FRAME_IS_WHOLE) {
        take(&frame);
        used += FRAME_HEADER_BYTES + frame.length;
    }
    if (state == FRAME_IS_TOO_LONG)
        die("the host broke the protocol: a frame of %u bytes", frame.length);
    bytes_drop(&received, used);
}

void link_begin(void (*receiver)(const struct frame *frame), double patience_s)
{
    take = receiver;
    patience = patience_s;
    for (int fd = STDIN_FILENO; fd <= STDOUT_FILENO; fd++)
        if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) < 0)
            die("the link cannot be used: %s", strerror(errno));
    watch(&input, STDIN_FILENO, POLLIN, receive, NULL);
    heard();
}

void link_send(uint32_t stream, enum frame_type type, const void *payload, size_t length)
{
    const struct frame frame = {stream, (uint8_t)type, (uint32_t)length, NULL};
    char header[FRAME_HEADER_BYTES];
    frame_header(header, &frame);
    bytes_add(&unsent, header, sizeof header);
    bytes_add(&unsent, payload, length);
}

bool link_is_full(void)
{
    return unsent.length >= MAX_UNSENT_BYTES;
}

static void flush(void *nobody)
{
    (void)nobody;
    while (unsent.length) {
        ssize_t count = write(STDOUT_FILENO, bytes_front(&unsent), unsent.length);
        if (count >= 0)
            bytes_drop(&unsent, (size_t)count);
        else if (errno == EAGAIN)
            break;
        else if (errno != EINTR)
            leave(NULL);
    }
    watch(&output, STDOUT_FILENO, unsent.length ? POLLOUT : 0, flush, NULL);
}

void link_flush(void)
{
    flush(NULL);
}
