#include "command.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "commands.h"
#include "memory.h"
#include "scratch.h"

#define GRACE_S 0.3 /* between SIGINT, SIGTERM and SIGKILL of a command whose time is up */
#define DRAIN_S 0.05 /* for output when the shell has ended but its children hold the pipes */
#define MAX_PIPE_READS 32 /* more than a pipe holds: all that the shell wrote is read */
#define FIRST_LOOK_S 1.0
#define NEXT_LOOK_S 0.5
#define NOT_WAITING ((size_t)-1)
#define NO_TERMINAL "sandbox: no pseudo-terminal is free: the input of this command is a pipe\n"

struct drain {
    int fd;
    enum output output;
    struct command *command; /* NULL: it is forgotten, what comes is dropped */
    struct watch watch;
};

static void end(void *owner);

/* Its output */

static void tell(struct command *command)
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

/* Take what one pipe holds; returns whether there may be more. */
static bool read_some(struct drain *drain)
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
        tell(command);
    return true;
}

static void read_on(void *owner)
{
    read_some(owner);
}

static int open_drain(struct command *command, enum output output)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0)
        return -1;
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    struct drain *drain = allocate(sizeof *drain);
    *drain = (struct drain){.fd = ends[0], .output = output, .command = command};
    watch(&drain->watch, drain->fd, POLLIN, read_on, drain);
    command->drains[output] = drain;
    return ends[1];
}

/* Its end */

static void kill_later(void *owner)
{
    command_kill(owner);
}

static void take_step(void *owner)
{
    static const int signals[] = {SIGINT, SIGTERM};
    struct command *command = owner;
    kill(-command->child.pid, signals[command->steps_taken++]);
    timer_set(&command->step, GRACE_S, command->steps_taken < 2 ? take_step : kill_later, command);
}

void command_stop(struct command *command)
{
    if (command->has_exited || command->is_stopping)
        return;
    command->is_stopping = true;
    take_step(command);
}

static void expire(void *owner)
{
    struct command *command = owner;
    command->has_timed_out = true;
    command_stop(command);
}

void command_kill(struct command *command)
{
    if (command->has_ended)
        return; /* what it left in the background was meant to stay */
    command->is_stopping = true;
    session_kill(command->child.pid);
}

static void clear_timers(struct command *command)
{
    timer_clear(&command->deadline);
    timer_clear(&command->step);
    timer_clear(&command->last_drops);
    timer_clear(&command->pause);
    timer_clear(&command->look);
}

static void exited(void *owner, const struct ending *ending)
{
    struct command *command = owner;
    timer_clear(&command->deadline);
    timer_clear(&command->step);
    command->outcome.exit_code = ending->exit_code;
    command->outcome.cpu_s = ending->cpu_s;
    command->outcome.peak_memory_bytes = ending->peak_memory_bytes;
    command->outcome.duration_s = now_s() - command->started_s;
    if (command->is_stopping)
        command_kill(command);
    /* What ran beside later commands is not to take their state back. */
    bool is_late = command->reading->number > 0 && shell_commits() > command->commits;
    shell_commit(command->snapshot, !command->is_stopping && !is_late);
    for (int n = 0; n < OUTPUTS; n++)
        for (int reads = 0; reads < MAX_PIPE_READS && command->drains[n]; reads++)
            if (!read_some(command->drains[n]))
                break;
    command->has_exited = true;
    if (is_open(command))
        timer_set(&command->last_drops, DRAIN_S, end, command);
    else
        end(command);
}

static void end(void *owner)
{
    struct command *command = owner;
    struct pressure now = pressure_read();
    clear_timers(command);
    if (command->terminal)
        terminal_close(command->terminal);
    command->terminal = NULL;
    command->has_ended = true;
    command->outcome.timed_out = command->has_timed_out;
    command->outcome.oom_kills = now.oom_kills - command->pressure.oom_kills;
    command->outcome.pids_refused = now.pids_refused - command->pressure.pids_refused;
    reading_end(command->reading, &command->outcome);
    tell(command);
    commands_settle(command);
}

/* Its readings */

static void pause_reading(struct command *command, bool is_waiting)
{
    if (command->has_ended)
        return;
    timer_clear(&command->pause);
    timer_clear(&command->look);
    reading_end(command->reading, &(struct outcome){
                                      .duration_s = now_s() - command->started_s,
                                      .is_running = true,
                                      .is_waiting = is_waiting,
                                  });
    command->finished = command->reading;
    command->reading = reading_new(command->finished->number + 1, command->finished->cap,
                                   command->finished->keep);
    tell(command);
}

static void pause_now(void *owner)
{
    pause_reading(owner, false);
}

void command_pause_after(struct command *command, double delay_s)
{
    timer_set(&command->pause, delay_s, pause_now, command);
}

/* It waits for somebody to type if it is seen so twice in a row. */
static void look(void *owner)
{
    struct command *command = owner;
    size_t total = reading_total(command->reading);
    bool waits = terminal_is_awaited(command->terminal, command->child.pid);
    if (waits && command->looked_at == total) {
        pause_reading(command, true);
        return;
    }
    command->looked_at = waits ? total : NOT_WAITING;
    timer_set(&command->look, NEXT_LOOK_S, look, command);
}

void command_look_after(struct command *command)
{
    command->looked_at = NOT_WAITING;
    if (command->terminal)
        timer_set(&command->look, FIRST_LOOK_S, look, command);
}

/* Its life */

static void taken(void *owner, size_t count)
{
    struct command *command = owner;
    if (command->stream)
        stream_grant(command->stream, count);
}

/* Start the process with the pipes and, in stdio, its input and its terminal. */
static int start_process(struct command *command, const struct json *request, int stdio[4])
{
    struct order order;
    int error = order_read(&order, request) ? 0 : EILSEQ;
    for (int n = 0; n < OUTPUTS && !error; n++)
        if ((stdio[n + 1] = open_drain(command, n)) < 0)
            error = errno;
    if (!error) {
        command->pressure = pressure_read();
        command->commits = shell_commits();
        command->started_s = now_s();
        error = shell_start(&order, stdio, &command->child, exited, command, &command->snapshot);
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
            command->terminal = terminal_open(&stdio[3], taken, command);
        if (!command->terminal)
            error = errno;
    }
    if (!error)
        error = start_process(command, request, stdio);
    for (int n = 0; n < 4; n++)
        if (stdio[n] >= 0)
            close(stdio[n]);
    if (error) {
        command_free(command);
        errno = error;
        return NULL;
    }
    command->id = format("%s", json_need(request, "id", JSON_TEXT)->text);
    const struct json *kept_as = json_member(request, "keep");
    struct keep keep = {NULL, NULL};
    if (kept_as && kept_as->kind == JSON_TEXT) {
        command->kept_as = format("%s", kept_as->text);
        command->keep_room = json_count(request, "max_kept_bytes");
        keep = (struct keep){command->kept_as, &command->keep_room};
    }
    command->reading = reading_new(0, cap, keep);
    if (command->terminal && terminal_is_pipe(command->terminal))
        reading_feed(command->reading, STDERR_OUTPUT, NO_TERMINAL, sizeof NO_TERMINAL - 1);
    timer_set(&command->deadline, json_number(request, "timeout_s"), expire, command);
    return command;
}

void command_free(struct command *command)
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
    free(command->kept_as);
    free(command->id);
    free(command);
}
