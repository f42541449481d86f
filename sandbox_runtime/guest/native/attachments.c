#include "attachments.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "command.h"
#include "memory.h"
#include "report.h"

#define CANNOT_START "the command cannot be started"

/* An exec request whose standard input is being received. The command starts at its end. */
struct pending_exec {
    struct stream *stream;
    struct json *request;
    int input;
};

/* Delivery of readings */

static void write_input(void *owner, const char *data, size_t length)
{
    struct command *command = owner;
    if (command->terminal)
        terminal_write(command->terminal, data, length);
    else
        stream_grant_credit(command->stream, length);
}

static void finish_input(void *owner)
{
    struct command *command = owner;
    if (command->terminal)
        terminal_write_eof(command->terminal);
}

static enum pump_result deliver(void *owner, size_t credit)
{
    struct command *command = owner;
    struct stream *stream = command->stream;
    enum frame_type frame_type;
    const char *data;
    size_t length = reading_next(command->delivered, &command->cursor, credit, &frame_type, &data);
    if (length) {
        stream_send(stream, frame_type, data, length);
        return PUMP_MORE;
    }
    if (!command->delivered->has_ended)
        return PUMP_IDLE;
    struct buffer report = {0};
    buffer_append(&report, buffer_data(&command->delivered->report),
                  command->delivered->report.length);
    command->stream = NULL;
    stream_finish(stream, &report);
    commands_settle(command);
    return PUMP_CLOSED;
}

/* The host has cancelled the stream, and with it the command. */
static void cancel(void *owner)
{
    struct command *command = owner;
    command->stream = NULL;
    command_kill(command);
    command->is_acknowledged = true;
    commands_settle(command);
}

/* The command runs on. Its current reading is delivered to the next host that requests it. */
static void leave(void *owner)
{
    struct command *command = owner;
    command->stream = NULL;
    if (command->terminal)
        terminal_drop_credit(command->terminal);
    commands_settle(command);
}

static const struct operation delivering = {write_input, finish_input, deliver, cancel, leave};

/* Return the oldest reading that may be requested again. */
static struct reading *current_reading(const struct command *command)
{
    return command->finished ? command->finished : command->reading;
}

/* End the delivery of the command on its stream, if there is one. */
static void detach(struct command *command)
{
    if (command->stream)
        stream_fail(command->stream, "detached", "the command was attached to another stream");
    if (command->terminal)
        terminal_drop_credit(command->terminal);
    command->stream = NULL;
}

/* Deliver the current reading on this stream from its start, and on no other. */
static void deliver_on(struct command *command, struct stream *stream, const struct json *request)
{
    const struct json *wait = json_member(request, "wait_s");
    detach(command);
    command->stream = stream;
    command->delivered = current_reading(command);
    command->cursor = (struct cursor){0};
    stream_attach(stream, &delivering, command);
    stream_ready(stream);
    if (command->delivered->has_ended)
        return;
    timer_clear(&command->pause);
    if (wait)
        command_pause_after(command, wait->number);
    command_watch_for_prompt(command);
}

/* exec */

static void run(struct stream *stream, const struct json *request, int input)
{
    const struct cap cap = {json_count(request, "max_bytes"), json_count(request, "max_lines")};
    struct command *command = command_start(request, input, cap);
    if (!command) {
        stream_fail_errno(stream, errno, CANNOT_START);
        return;
    }
    commands_add(command);
    deliver_on(command, stream, request);
}

/* If the command was started before, attach to it and return true. */
static bool attach_if_known(struct stream *stream, const struct json *request)
{
    struct command *known = commands_find(json_require(request, "id", JSON_TEXT)->text);
    if (known)
        deliver_on(known, stream, request);
    return known;
}

static void free_pending(struct pending_exec *pending)
{
    if (pending->input >= 0)
        close(pending->input);
    json_free(pending->request);
    free(pending);
}

static void collect(void *owner, const char *data, size_t length)
{
    struct pending_exec *pending = owner;
    stream_grant_credit(pending->stream, length);
    while (length) {
        ssize_t count = write(pending->input, data, length);
        if (count < 0) {
            stream_fail_errno(pending->stream, errno, CANNOT_START);
            free_pending(pending);
            return;
        }
        data += count;
        length -= (size_t)count;
    }
}

static void start_collected(void *owner)
{
    struct pending_exec *pending = owner;
    if (!attach_if_known(pending->stream, pending->request)) {
        lseek(pending->input, 0, SEEK_SET);
        run(pending->stream, pending->request, pending->input);
        pending->input = -1;
    }
    free_pending(pending);
}

static void cancel_pending(void *owner)
{
    free_pending(owner);
}

static const struct operation collecting = {collect, start_collected, send_nothing, cancel_pending,
                                             NULL};

static void collect_stdin(struct stream *stream, struct json **request)
{
    int input = memfd_create("stdin", MFD_CLOEXEC);
    if (input < 0) {
        stream_fail_errno(stream, errno, CANNOT_START);
        return;
    }
    struct pending_exec *pending = allocate(sizeof *pending);
    *pending = (struct pending_exec){stream, *request, input};
    *request = NULL;
    stream_attach(stream, &collecting, pending);
}

void exec_begin(struct stream *stream, struct json **request)
{
    const char *input = json_require(*request, "stdin", JSON_TEXT)->text;
    if (attach_if_known(stream, *request))
        return;
    if (strcmp(input, "data") == 0) {
        collect_stdin(stream, request);
    } else if (strcmp(input, "terminal") == 0) {
        run(stream, *request, INPUT_TERMINAL);
    } else {
        int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (nothing < 0)
            stream_fail_errno(stream, errno, CANNOT_START);
        else
            run(stream, *request, nothing);
    }
}

/* attach and stop */

/* Return the command, or NULL after failing the stream. */
static struct command *find_or_fail(struct stream *stream, const struct json *request)
{
    const char *id = json_require(request, "id", JSON_TEXT)->text;
    struct command *command = commands_find(id);
    if (!command) {
        char *message = format("there is no command %s", id);
        stream_fail(stream, "unknown", message);
        free(message);
    }
    return command;
}

void attach_begin(struct stream *stream, struct json **request)
{
    struct command *command = find_or_fail(stream, *request);
    size_t number = json_count(*request, "reading");
    if (!command)
        return;
    bool is_next = command->finished && number == command->reading->number;
    if (!is_next && number != current_reading(command)->number) {
        stream_fail(stream, "unknown", "the command has no such reading");
        return;
    }
    detach(command);
    if (is_next) { /* the host has the finished reading */
        reading_free(command->finished);
        command->finished = NULL;
    }
    deliver_on(command, stream, *request);
}

void stop_begin(struct stream *stream, struct json **request)
{
    struct command *command = find_or_fail(stream, *request);
    struct buffer report = {0};
    if (!command)
        return;
    report_begin(&report);
    report_end(&report);
    stream_finish(stream, &report);
    command_stop(command);
}
