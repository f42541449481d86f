#include "command.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "memory.h"
#include "streams.h"

#define GRACE_S 0.3  /* between SIGINT, SIGTERM and SIGKILL */
#define DRAIN_S 0.05 /* wait for output after the shell, if its children keep the pipes open */
#define MAX_PIPE_READS 32 /* more than a pipe holds, so all that the shell wrote is read */
#define FIRST_PROMPT_CHECK_S 1.0
#define NEXT_PROMPT_CHECK_S 0.5
#define MAX_ENDED 64 /* ended commands whose report is kept */
#define NOT_WAITING ((size_t)-1)
#define NO_TERMINAL "sandbox: no pseudo-terminal is free: the input of this command is a pipe\n"

struct drain {
    int fd;
    enum output output;
    struct command *command; /* NULL: the command was freed, its output is dropped */
    struct watch watch;
};

static void end(void *owner);

/* Output */

static void notify_stream(struct command *command)
{
    if (command->stream)
        stream_ready(command->stream);
}

static bool is_open(const struct command *command)
{
    return command->drains[STDOUT_OUTPUT] || command->drains[STDERR_OUTPUT];
}

static void close_drain(struct drain *drain)
{
    struct command *command = drain->command;
    unwatch(&drain->watch);
    close(drain->fd);
    if (command) {
        command->drains[drain->output] = NULL;
        if (command->has_exited && !command->has_ended && !is_open(command))
            end(command);
    }
    free(drain);
}

/* Read from one pipe; return true if there may be more. */
static bool read_drain(struct drain *drain)
{
    struct command *command = drain->command;
    ssize_t length = read(drain->fd, scratch, sizeof scratch);
    if (length < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (length <= 0) {
        close_drain(drain);
        return false;
    }
    if (!command || command->has_ended)
        return false;
    if (reading_feed(command->reading, drain->output, scratch, (size_t)length))
        notify_stream(command);
    return true;
}

static void on_readable(void *owner)
{
    read_drain(owner);
}

static int open_drain(struct command *command, enum output output)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0)
        return -1;
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    struct drain *drain = allocate(sizeof *drain);
    *drain = (struct drain){.fd = ends[0], .output = output, .command = command};
    watch(&drain->watch, drain->fd, POLLIN, on_readable, drain);
    command->drains[output] = drain;
    return ends[1];
}

/* End */

static void on_kill_due(void *owner)
{
    command_kill(owner);
}

static void send_next_signal(void *owner)
{
    static const int signals[] = {SIGINT, SIGTERM};
    struct command *command = owner;
    kill(-command->child.pid, signals[command->signals_sent++]);
    timer_set(&command->next_signal, GRACE_S,
              command->signals_sent < 2 ? send_next_signal : on_kill_due, command);
}

void command_stop(struct command *command)
{
    if (command->has_exited || command->is_stopping)
        return;
    command->is_stopping = true;
    send_next_signal(command);
}

static void on_deadline(void *owner)
{
    struct command *command = owner;
    command->has_timed_out = true;
    command_stop(command);
}

void command_kill(struct command *command)
{
    if (command->has_ended)
        return; /* its background processes may go on */
    command->is_stopping = true;
    session_kill(command->child.pid);
}

static void clear_timers(struct command *command)
{
    timer_clear(&command->deadline);
    timer_clear(&command->next_signal);
    timer_clear(&command->drain_deadline);
    timer_clear(&command->pause);
    timer_clear(&command->prompt_check);
}

static void on_child_exit(void *owner, const struct child_exit *status)
{
    struct command *command = owner;
    timer_clear(&command->deadline);
    timer_clear(&command->next_signal);
    command->outcome.exit_code = status->exit_code;
    command->outcome.cpu_s = status->cpu_s;
    command->outcome.peak_memory_bytes = status->peak_memory_bytes;
    command->outcome.duration_s = now_s() - command->started_s;
    if (command->is_stopping)
        command_kill(command);
    /* A job must not replace the state of commands that ended after its start. */
    bool is_late = command->reading->number > 0 && shell_commits() > command->commits_at_start;
    shell_commit(command->snapshot, !command->is_stopping && !is_late);
    for (int n = 0; n < OUTPUTS; n++)
        for (int reads = 0; reads < MAX_PIPE_READS && command->drains[n]; reads++)
            if (!read_drain(command->drains[n]))
                break;
    command->has_exited = true;
    if (is_open(command))
        timer_set(&command->drain_deadline, DRAIN_S, end, command);
    else
        end(command);
}

static void end(void *owner)
{
    struct command *command = owner;
    struct limit_events now = limit_events_read();
    clear_timers(command);
    if (command->terminal)
        terminal_close(command->terminal);
    command->terminal = NULL;
    command->has_ended = true;
    command->outcome.timed_out = command->has_timed_out;
    command->outcome.oom_kills = now.oom_kills - command->events_at_start.oom_kills;
    command->outcome.pids_refused = now.pids_refused - command->events_at_start.pids_refused;
    reading_end(command->reading, &command->outcome);
    notify_stream(command);
    commands_settle(command);
}

/* Readings */

static void pause_reading(struct command *command, bool is_waiting)
{
    if (command->has_ended)
        return;
    timer_clear(&command->pause);
    timer_clear(&command->prompt_check);
    reading_end(command->reading, &(struct outcome){
                                      .duration_s = now_s() - command->started_s,
                                      .is_running = true,
                                      .is_waiting = is_waiting,
                                  });
    command->finished = command->reading;
    command->reading = reading_new(command->finished->number + 1, command->finished->cap,
                                   command->finished->keep);
    notify_stream(command);
}

static void on_pause_due(void *owner)
{
    pause_reading(owner, false);
}

void command_pause_after(struct command *command, double delay_s)
{
    timer_set(&command->pause, delay_s, on_pause_due, command);
}

/* The command waits for input if two checks in a row see it. */
static void check_for_prompt(void *owner)
{
    struct command *command = owner;
    size_t total = reading_total(command->reading);
    bool waits = terminal_has_waiting_reader(command->terminal, command->child.pid);
    if (waits && command->prompt_total == total) {
        pause_reading(command, true);
        return;
    }
    command->prompt_total = waits ? total : NOT_WAITING;
    timer_set(&command->prompt_check, NEXT_PROMPT_CHECK_S, check_for_prompt, command);
}

void command_watch_for_prompt(struct command *command)
{
    command->prompt_total = NOT_WAITING;
    if (command->terminal)
        timer_set(&command->prompt_check, FIRST_PROMPT_CHECK_S, check_for_prompt, command);
}

/* Start */

static void on_consumed(void *owner, size_t count)
{
    struct command *command = owner;
    if (command->stream)
        stream_grant_credit(command->stream, count);
}

static void free_command(struct command *command)
{
    clear_timers(command);
    for (int n = 0; n < OUTPUTS; n++)
        if (command->drains[n])
            command->drains[n]->command = NULL;
    if (command->terminal)
        terminal_close(command->terminal);
    reading_free(command->reading);
    reading_free(command->finished);
    free(command->snapshot);
    free(command->keep_name);
    free(command->id);
    free(command);
}

/* Start the process with output pipes; `stdio` has its input and its terminal. */
static int start_process(struct command *command, const struct json *request, int stdio[4])
{
    struct shell_command shell_command;
    int error = shell_command_parse(&shell_command, request) ? 0 : EILSEQ;
    for (int n = 0; n < OUTPUTS && !error; n++)
        if ((stdio[n + 1] = open_drain(command, n)) < 0)
            error = errno;
    if (!error) {
        command->events_at_start = limit_events_read();
        command->commits_at_start = shell_commits();
        command->started_s = now_s();
        error = shell_start(&shell_command, stdio, &command->child, on_child_exit, command,
                            &command->snapshot);
    }
    return error;
}

struct command *command_start(const struct json *request, int input, struct cap cap)
{
    struct command *command = allocate(sizeof *command);
    int stdio[4] = {input, -1, -1, -1}, error = 0;
    if (input == INPUT_TERMINAL) {
        stdio[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (stdio[0] >= 0)
            command->terminal = terminal_open(&stdio[3], on_consumed, command);
        if (!command->terminal)
            error = errno;
    }
    if (!error)
        error = start_process(command, request, stdio);
    for (int n = 0; n < 4; n++)
        if (stdio[n] >= 0)
            close(stdio[n]);
    if (error) {
        free_command(command);
        errno = error;
        return NULL;
    }
    command->id = format("%s", json_require(request, "id", JSON_TEXT)->text);
    const struct json *keep_name = json_member(request, "keep");
    struct keep keep = {NULL, NULL};
    if (keep_name && keep_name->kind == JSON_TEXT) {
        command->keep_name = format("%s", keep_name->text);
        command->keep_left = json_count(request, "max_kept_bytes");
        keep = (struct keep){command->keep_name, &command->keep_left};
    }
    command->reading = reading_new(0, cap, keep);
    if (command->terminal && terminal_is_pipe(command->terminal))
        reading_feed(command->reading, STDERR_OUTPUT, NO_TERMINAL, sizeof NO_TERMINAL - 1);
    timer_set(&command->deadline, json_number(request, "timeout_s"), on_deadline, command);
    return command;
}

/* The table of commands */

static struct command *commands;

struct command *commands_find(const char *id)
{
    struct command *command = commands;
    while (command && strcmp(command->id, id) != 0)
        command = command->next;
    return command;
}

void commands_add(struct command *command)
{
    struct command **end = &commands;
    while (*end)
        end = &(*end)->next;
    *end = command;
}

static void remove_command(struct command *command)
{
    struct command **link = &commands;
    while (*link != command)
        link = &(*link)->next;
    *link = command->next;
    free_command(command);
}

/* Return the oldest ended command without a stream, if more than MAX_ENDED have ended. */
static struct command *oldest_to_remove(void)
{
    struct command *oldest = NULL;
    int ended = 0;
    for (struct command *command = commands; command; command = command->next) {
        ended += command->has_ended;
        if (!oldest && command->has_ended && !command->stream)
            oldest = command;
    }
    return ended > MAX_ENDED ? oldest : NULL;
}

void commands_acknowledge(const char *id)
{
    struct command *command = commands_find(id);
    if (!command)
        return;
    command->is_acknowledged = true;
    commands_settle(command);
}

void commands_settle(struct command *command)
{
    struct command *oldest;
    if (command->has_ended && command->is_acknowledged && !command->stream)
        remove_command(command);
    while ((oldest = oldest_to_remove()))
        remove_command(oldest);
}
