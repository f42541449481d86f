/* The agent: serves the host over standard input and output; see protocol.py.

   It ends, and with it everything in the sandbox, when its input does, or when the host has been
   silent for too long: a dead host leaves nothing running. */
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "attachments.h"
#include "commands.h"
#include "config.h"
#include "descriptors.h"
#include "egress.h"
#include "files.h"
#include "link.h"
#include "listing.h"
#include "loop.h"
#include "memory.h"
#include "pipe.h"
#include "pressure.h"
#include "processes.h"
#include "report.h"
#include "shell.h"
#include "streams.h"

static const struct {
    const char *name;
    /* Finishes the stream, fails it or attends to it; keeps the request by setting it to NULL. */
    void (*begin)(struct stream *stream, struct json **request);
} operations[] = {
    {"exec", exec_begin}, {"attach", attach_begin}, {"stop", stop_begin}, {"pipe", pipe_begin},
    {"put", put_begin},   {"get", get_begin},       {"list", list_begin},
};

static void open_stream(const struct frame *frame)
{
    struct json *request = json_parse(frame->payload, frame->length);
    if (!request || request->kind != JSON_OBJECT || frame->stream % 2 == 0)
        die("the host broke the protocol: it opened stream %u with no request", frame->stream);
    const char *name = json_need(request, "op", JSON_TEXT)->text;
    size_t n = 0;
    while (n < sizeof operations / sizeof *operations && strcmp(operations[n].name, name) != 0)
        n++;
    if (n == sizeof operations / sizeof *operations)
        die("the host broke the protocol: there is no operation %s", name);
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

static void greet(void)
{
    struct bytes hello = {0};
    report_begin(&hello);
    report_count(&hello, "version", PROTOCOL_VERSION);
    report_words(&hello, "agent", "c", 1);
    report_end(&hello);
    link_send(0, FRAME_HELLO, bytes_front(&hello), hello.length);
    bytes_free(&hello);
}

static void end_of_life(void *nobody)
{
    (void)nobody;
    _exit(0);
}

static bool round_of_work(void)
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
    /* Commands may be of our user: they are not to look into us. */
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    processes_begin();
    shell_begin(config.env);
    pipes_begin(config.env);
    pressure_begin(json_need(config.root, "pressure", JSON_OBJECT));
    if (config.egress_port)
        egress_begin(config.egress_port);
    if (config.lifetime_s > 0)
        timer_set(&lifetime, config.lifetime_s, end_of_life, NULL);
    link_begin(receive, config.watchdog_s);
    greet();
    loop_run(round_of_work);
}
