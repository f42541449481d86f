#include "link.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "loop.h"
#include "memory.h"
#include "resume.h"

#define BLOCK_BYTES (4u << 10) /* most operations are no larger: nothing is allocated for them */
#define READ_BYTES (256u << 10)
#define MAX_UNSENT_BYTES (1u << 20)

static void (*on_frame)(const struct frame *frame);
static char received_block[BLOCK_BYTES], unsent_block[BLOCK_BYTES];
static struct buffer received = {.fixed_block = received_block, .fixed_capacity = BLOCK_BYTES};
static struct buffer unsent = {.fixed_block = unsent_block, .fixed_capacity = BLOCK_BYTES};
static struct watch input, output;
static struct timer watchdog;
static double timeout;
static bool is_resumable;

/* The host has closed the link or is silent. */
static void exit_agent(void *unused)
{
    (void)unused;
    _exit(0);
}

static void reset_watchdog(void)
{
    if (timeout > 0)
        timer_set(&watchdog, timeout, exit_agent, NULL);
}

/* Append what the host has sent to `received`. */
static ssize_t read_input(void)
{
    static bool has_more; /* the last read filled the block */
    if (is_resumable)
        return resume_read(&received);
    size_t max_bytes = has_more || received.length ? READ_BYTES : BLOCK_BYTES;
    ssize_t count = buffer_read(&received, STDIN_FILENO, max_bytes);
    has_more = count >= (ssize_t)BLOCK_BYTES;
    if (count > 0)
        reset_watchdog();
    return count;
}

static void receive(void *unused)
{
    (void)unused;
    ssize_t count = read_input();
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (count <= 0 && !is_resumable)
        exit_agent(NULL);
    if (count <= 0)
        unwatch(&input); /* until the lease ends */
    struct frame frame;
    size_t used = 0;
    enum frame_state state;
    while ((state = frame_parse(buffer_data(&received) + used, received.length - used, &frame)) ==
           FRAME_IS_COMPLETE) {
        on_frame(&frame);
        used += FRAME_HEADER_BYTES + frame.length;
    }
    if (state == FRAME_IS_TOO_LONG)
        die("the host broke the protocol: a frame of %u bytes", frame.length);
    buffer_consume(&received, used);
}

void link_begin(void (*receiver)(const struct frame *frame), double timeout_s, const char *token,
                void (*on_adopt)(void))
{
    on_frame = receiver;
    timeout = token ? 0 : timeout_s;
    is_resumable = token != NULL;
    if (token)
        resume_begin(token, timeout_s, &unsent, on_adopt);
    for (int fd = STDIN_FILENO; fd <= STDOUT_FILENO; fd++)
        if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) < 0)
            die("the link cannot be used: %s", strerror(errno));
    watch(&input, STDIN_FILENO, POLLIN, receive, NULL);
    reset_watchdog();
}

void link_send(uint32_t stream, enum frame_type type, const void *payload, size_t length)
{
    const struct frame frame = {stream, (uint8_t)type, (uint32_t)length, NULL};
    char header[FRAME_HEADER_BYTES];
    frame_header(header, &frame);
    buffer_append(&unsent, header, sizeof header);
    buffer_append(&unsent, payload, length);
}

void link_clear(void)
{
    buffer_consume(&received, received.length);
    buffer_consume(&unsent, unsent.length);
}

bool link_is_full(void)
{
    return unsent.length >= MAX_UNSENT_BYTES;
}

/* Write the unsent bytes; return true if standard output does not take all of them now. */
static bool write_unsent(void)
{
    while (unsent.length) {
        ssize_t count = write(STDOUT_FILENO, buffer_data(&unsent), unsent.length);
        if (count >= 0)
            buffer_consume(&unsent, (size_t)count);
        else if (errno == EAGAIN)
            return true;
        else if (errno != EINTR)
            exit_agent(NULL);
    }
    return false;
}

static void flush(void *unused)
{
    (void)unused;
    bool is_blocked = is_resumable ? resume_flush() : write_unsent();
    watch(&output, STDOUT_FILENO, is_blocked ? POLLOUT : 0, flush, NULL);
}

void link_flush(void)
{
    flush(NULL);
}
