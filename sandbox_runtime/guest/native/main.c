/* The guest agent: serves the host over standard input and output; see protocol.py.

   The agent ends, and with it everything in the sandbox, when its input ends or when the host has
   been silent for too long: a dead host leaves nothing running. Only a resumable link may be without
   a connection for some time. */
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "attachments.h"
#include "command.h"
#include "config.h"
#include "processes.h"
#include "egress.h"
#include "files.h"
#include "link.h"
#include "listing.h"
#include "loop.h"
#include "memory.h"
#include "pipe.h"
#include "report.h"
#include "shell.h"
#include "streams.h"

static const struct {
    const char *name;
    /* Finish, fail or attach the stream. Sets the request to NULL to take ownership of it. */
    void (*begin)(struct stream *stream, struct json **request);
} operations[] = {
    {"exec", exec_begin}, {"attach", attach_begin}, {"stop", stop_begin}, {"pipe", pipe_begin},
    {"put", put_begin},   {"get", get_begin},       {"list", list_begin},
};

static void open_stream(const struct frame *frame)
{
    struct json *request = json_parse(frame->payload, frame->length);
    if (!request || request->kind != JSON_OBJECT || frame->stream % 2 == 0)
        die("the host broke the protocol: stream %u was opened with an invalid request",
            frame->stream);
    const char *name = json_require(request, "op", JSON_TEXT)->text;
    size_t n = 0;
    while (n < sizeof operations / sizeof *operations && strcmp(operations[n].name, name) != 0)
        n++;
    if (n == sizeof operations / sizeof *operations)
        die("the host broke the protocol: unknown operation %s", name);
    operations[n].begin(stream_open(frame->stream), &request);
    json_free(request);
}

static void acknowledge(const struct frame *frame)
{
    char id[65] = "";
    if (frame->length < sizeof id)
        memcpy(id, frame->payload, frame->length);
    commands_acknowledge(id);
}

static void receive(const struct frame *frame)
{
    switch (frame->type) {
    case FRAME_OPEN:
        open_stream(frame);
        break;
    case FRAME_PING:
        link_send(0, FRAME_PONG, NULL, 0);
        break;
    case FRAME_ACK:
        acknowledge(frame);
        break;
    default:
        streams_receive(frame);
    }
}

static void send_hello(void)
{
    struct buffer hello = {0};
    report_begin(&hello);
    report_count(&hello, "version", PROTOCOL_VERSION);
    report_text(&hello, "agent", "c", 1);
    report_end(&hello);
    link_send(0, FRAME_HELLO, buffer_data(&hello), hello.length);
    buffer_free(&hello);
}

/* Another host continues with the commands, but knows none of the streams. */
static void change_host(void)
{
    streams_abandon();
    link_clear();
    send_hello();
}

static void on_lifetime_over(void *unused)
{
    (void)unused;
    _exit(0);
}

static bool serve_round(void)
{
    processes_reap();
    bool is_busy = streams_pump();
    link_flush();
    return is_busy && !link_is_full();
}

int main(void)
{
    static struct timer lifetime;
    descriptors_begin();
    struct config config = config_read();
    config_apply(&config);
    /* Commands may run as the same user and must not read the agent's memory. */
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    processes_begin();
    shell_begin(config.env);
    pipes_begin(config.env);
    limit_events_begin(json_require(config.root, "pressure", JSON_OBJECT));
    if (config.egress_port)
        egress_begin(config.egress_port);
    if (config.lifetime_s > 0)
        timer_set(&lifetime, config.lifetime_s, on_lifetime_over, NULL);
    link_begin(receive, config.watchdog_s, config.link_token, change_host);
    send_hello();
    loop_run(serve_round);
}
