#include "attachments.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "commands.h"
#include "memory.h"
#include "report.h"

#define CANNOT_START "the command cannot be started"

/* A command whose standard input is being collected; it starts once all is here. */
struct waiting_order {
    struct stream *stream;
    struct json *request;
    int input;
};

/* A stream on which a reading is heard */

static void type(void *owner, const char *data, size_t length)
{
    struct command *command = owner;
    if (command->terminal)
        terminal_type(command->terminal, data, length);
    else
        stream_grant(command->stream, length);
}

static void type_end(void *owner)
{
    struct command *command = owner;
    if (command->terminal)
        terminal_type_end(command->terminal);
}

static enum pumped deliver(void *owner, size_t credit)
{
    struct command *command = owner;
    struct stream *stream = command->stream;
    enum frame_type frame_type;
    const char *data;
    size_t length = reading_next(command->heard, &command->place, credit, &frame_type, &data);
    if (length) {
        stream_send(stream, frame_type, data, length);
        return PUMPED_SOME;
    }
    if (!command->heard->has_ended)
        return PUMPED_ALL;
    struct bytes report = {0};
    bytes_add(&report, bytes_front(&command->heard->report), command->heard->report.length);
    command->stream = NULL;
    stream_finish(stream, &report);
    commands_settle(command);
    return PUMPED_LAST;
}

/* The host has lost interest in the command. */
static void give_up(void *owner)
{
    struct command *command = owner;
    command->stream = NULL;
    command_kill(command);
    command->is_acknowledged = true;
    commands_settle(command);
}

static const struct operation hearing = {type, type_end, deliver, give_up};

/* The reading that may be asked for again. */
static struct reading *current(const struct command *command)
{
    return command->finished ? command->finished : command->reading;
}

/* Nobody hears the command on a stream any more. */
static void detach(struct command *command)
{
    if (command->stream)
        stream_fail(command->stream, "detached", "another stream has taken over");
    if (command->terminal)
        terminal_forget_typist(command->terminal);
    command->stream = NULL;
}

/* Deliver its reading on this stream, from its start, and on no other any more. */
static void follow(struct command *command, struct stream *stream, const struct json *request)
{
    const struct json *wait = json_member(request, "wait_s");
    detach(command);
    command->stream = stream;
    command->heard = current(command);
    command->place = (struct place){0};
    stream_attend(stream, &hearing, command);
    stream_ready(stream);
    if (command->heard->has_ended)
        return;
    timer_clear(&command->pause);
    if (wait)
        command_pause_after(command, wait->number);
    command_look_after(command);
}

/* Starting one */

static void run(struct stream *stream, const struct json *request, int input)
{
    const struct cap cap = {json_count(request, "max_bytes"), json_count(request, "max_lines")};
    struct command *command = command_start(request, input, cap);
    if (!command) {
        stream_fail_errno(stream, errno, CANNOT_START);
        return;
    }
    commands_add(command);
    follow(command, stream, request);
}

/* Attach to the command instead, if it was started before. */
static bool follow_known(struct stream *stream, const struct json *request)
{
    struct command *known = commands_find(json_need(request, "id", JSON_TEXT)->text);
    if (known)
        follow(known, stream, request);
    return known;
}

static void free_order(struct waiting_order *order)
{
    if (order->input >= 0)
        close(order->input);
    json_free(order->request);
    free(order);
}

static void collect(void *owner, const char *data, size_t length)
{
    struct waiting_order *order = owner;
    stream_grant(order->stream, length);
    while (length) {
        ssize_t count = write(order->input, data, length);
        if (count < 0) {
            stream_fail_errno(order->stream, errno, CANNOT_START);
            free_order(order);
            return;
        }
        data += count;
        length -= (size_t)count;
    }
}

static void start_collected(void *owner)
{
    struct waiting_order *order = owner;
    if (!follow_known(order->stream, order->request)) {
        lseek(order->input, 0, SEEK_SET);
        run(order->stream, order->request, order->input);
        order->input = -1;
    }
    free_order(order);
}

static enum pumped send_nothing(void *owner, size_t credit)
{
    (void)owner;
    (void)credit;
    return PUMPED_ALL;
}

static void drop_order(void *owner)
{
    free_order(owner);
}

static const struct operation collecting = {collect, start_collected, send_nothing, drop_order};

static void collect_input(struct stream *stream, struct json **request)
{
    int input = memfd_create("stdin", MFD_CLOEXEC);
    if (input < 0) {
        stream_fail_errno(stream, errno, CANNOT_START);
        return;
    }
    struct waiting_order *order = allocate(sizeof *order);
    *order = (struct waiting_order){stream, *request, input};
    *request = NULL;
    stream_attend(stream, &collecting, order);
}

void exec_begin(struct stream *stream, struct json **request)
{
    const char *input = json_need(*request, "stdin", JSON_TEXT)->text;
    if (follow_known(stream, *request))
        return;
    if (strcmp(input, "data") == 0) {
        collect_input(stream, request);
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

/* Known ones */

/* NULL where there is none, and the stream has failed. */
static struct command *find_or_fail(struct stream *stream, const struct json *request)
{
    const char *id = json_need(request, "id", JSON_TEXT)->text;
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
    if (!is_next && number != current(command)->number) {
        stream_fail(stream, "unknown", "the command has no such reading");
        return;
    }
    detach(command);
    if (is_next) { /* so the last one has arrived */
        reading_free(command->finished);
        command->finished = NULL;
    }
    follow(command, stream, *request);
}

void stop_begin(struct stream *stream, struct json **request)
{
    struct command *command = find_or_fail(stream, *request);
    struct bytes report = {0};
    if (!command)
        return;
    report_begin(&report);
    report_end(&report);
    stream_finish(stream, &report);
    command_stop(command);
}
