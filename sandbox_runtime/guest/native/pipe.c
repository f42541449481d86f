#include "pipe.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "loop.h"
#include "memory.h"
#include "processes.h"
#include "report.h"
#include "streams.h"
#include "shell.h"

#define STDERR_TAIL_BYTES 4096u
#define MAX_STDERR_READS 32 /* after the exit; more than a pipe holds */

struct pipe {
    struct stream *stream; /* NULL: it was cancelled */
    struct child child;
    bool has_exited;
    int exit_code;
    int in, out, error; /* the agent's ends; -1: closed */
    struct watch input_watch, output_watch, stderr_watch;
    struct buffer unwritten;
    bool input_ends;
    char stderr_tail[STDERR_TAIL_BYTES];
    size_t stderr_length;
};

static char *const *environment;

void pipes_begin(char *const *env)
{
    environment = env;
}

static void close_end(int *fd, struct watch *watch)
{
    unwatch(watch);
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* Input */

static void consume(struct pipe *pipe, size_t count)
{
    buffer_consume(&pipe->unwritten, count);
    stream_grant_credit(pipe->stream, count);
}

static void write_input(void *owner)
{
    struct pipe *pipe = owner;
    while (pipe->unwritten.length && pipe->in >= 0) {
        ssize_t count = write(pipe->in, buffer_data(&pipe->unwritten), pipe->unwritten.length);
        if (count >= 0) {
            consume(pipe, (size_t)count);
        } else if (errno == EAGAIN || errno == EINTR) {
            watch(&pipe->input_watch, pipe->in, POLLOUT, write_input, pipe);
            return;
        } else {
            close_end(&pipe->in, &pipe->input_watch); /* the program has closed its input */
        }
    }
    consume(pipe, pipe->unwritten.length);
    if (pipe->input_ends)
        close_end(&pipe->in, &pipe->input_watch);
    else
        unwatch(&pipe->input_watch);
}

static void pipe_feed(void *owner, const char *data, size_t length)
{
    struct pipe *pipe = owner;
    buffer_append(&pipe->unwritten, data, length);
    write_input(pipe);
}

static void pipe_finish_input(void *owner)
{
    struct pipe *pipe = owner;
    pipe->input_ends = true;
    write_input(pipe);
}

/* Output */

/* Read standard error and keep its tail; return true if there may be more. */
static bool read_stderr(struct pipe *pipe)
{
    char data[STDERR_TAIL_BYTES];
    ssize_t length = read(pipe->error, data, sizeof data);
    if (length < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (length <= 0) {
        close_end(&pipe->error, &pipe->stderr_watch);
        return false;
    }
    size_t kept = STDERR_TAIL_BYTES - (size_t)length;
    kept = kept < pipe->stderr_length ? kept : pipe->stderr_length;
    memmove(pipe->stderr_tail, pipe->stderr_tail + pipe->stderr_length - kept, kept);
    memcpy(pipe->stderr_tail + kept, data, (size_t)length);
    pipe->stderr_length = kept + (size_t)length;
    return true;
}

static void on_stderr_readable(void *owner)
{
    read_stderr(owner);
}

static void close_all(struct pipe *pipe)
{
    close_end(&pipe->in, &pipe->input_watch);
    close_end(&pipe->out, &pipe->output_watch);
    close_end(&pipe->error, &pipe->stderr_watch);
    buffer_free(&pipe->unwritten);
}

static void finish(struct pipe *pipe)
{
    struct buffer report = {0};
    for (int n = 0; n < MAX_STDERR_READS && pipe->error >= 0 && read_stderr(pipe); n++)
        continue;
    report_begin(&report);
    report_count(&report, "exit_code", pipe->exit_code);
    report_text(&report, "stderr", pipe->stderr_tail, pipe->stderr_length);
    report_end(&report);
    stream_finish(pipe->stream, &report);
    close_all(pipe);
    free(pipe);
}

static void on_output_readable(void *owner)
{
    struct pipe *pipe = owner;
    unwatch(&pipe->output_watch); /* until the available output has been sent */
    stream_ready(pipe->stream);
}

static enum pump_result pipe_send(void *owner, size_t credit)
{
    struct pipe *pipe = owner;
    ssize_t length = pipe->out < 0 ? 0 : read(pipe->out, scratch, credit);
    if (length > 0) {
        stream_send(pipe->stream, FRAME_DATA, scratch, (size_t)length);
        return PUMP_MORE;
    }
    if (length < 0 && (errno == EAGAIN || errno == EINTR)) {
        watch(&pipe->output_watch, pipe->out, POLLIN, on_output_readable, pipe);
        return PUMP_IDLE;
    }
    close_end(&pipe->out, &pipe->output_watch);
    if (!pipe->has_exited)
        return PUMP_IDLE;
    finish(pipe);
    return PUMP_CLOSED;
}

/* Start and end */

static void on_child_exit(void *owner, const struct child_exit *status)
{
    struct pipe *pipe = owner;
    pipe->has_exited = true;
    pipe->exit_code = status->exit_code;
    if (!pipe->stream)
        free(pipe);
    else if (pipe->out < 0)
        finish(pipe);
}

static void pipe_reset(void *owner)
{
    struct pipe *pipe = owner;
    pipe->stream = NULL;
    close_all(pipe);
    if (pipe->has_exited) {
        free(pipe); /* a process that it started still holds its output */
        return;
    }
    session_kill(pipe->child.pid);
}

static const struct operation piping = {pipe_feed, pipe_finish_input, pipe_send, pipe_reset, NULL};

/* Open three pipes; the agent's ends are non-blocking. Return errno. */
static int open_pipes(struct pipe *pipe, int stdio[3])
{
    int *const ends[3][2] = {
        {&stdio[0], &pipe->in}, {&pipe->out, &stdio[1]}, {&pipe->error, &stdio[2]}};
    int *const agent_ends[3] = {&pipe->in, &pipe->out, &pipe->error};
    for (int n = 0; n < 3; n++) {
        int opened[2];
        if (pipe2(opened, O_CLOEXEC) < 0)
            return errno;
        *ends[n][0] = opened[0];
        *ends[n][1] = opened[1];
        fcntl(*agent_ends[n], F_SETFL, O_NONBLOCK);
    }
    return 0;
}

/* Return errno. */
static int start(struct pipe *pipe, const char *path, char *const *argv)
{
    int stdio[3] = {-1, -1, -1};
    int error = open_pipes(pipe, stdio);
    if (!error) {
        const struct program program = {
            .path = path,
            .argv = argv,
            .env = environment,
            .stdio = {stdio[0], stdio[1], stdio[2], -1},
        };
        error = process_start(&program, &pipe->child, on_child_exit, pipe);
    }
    for (int n = 0; n < 3; n++)
        if (stdio[n] >= 0)
            close(stdio[n]);
    return error;
}

/* Return the texts of an array as a program's arguments, or NULL if they cannot be. */
static char **read_arguments(const struct json *array)
{
    size_t count = 0;
    char **arguments = allocate(sizeof *arguments);
    for (const struct json *text = array->first; text; text = text->next) {
        if (text->kind != JSON_TEXT || !json_to_native(text)) {
            free(arguments);
            return NULL;
        }
        arguments = resize(arguments, (count + 2) * sizeof *arguments);
        arguments[count++] = text->text;
        arguments[count] = NULL;
    }
    if (count)
        return arguments;
    free(arguments);
    return NULL;
}

static void run(struct stream *stream, char *const *argv)
{
    char *path = find_program(argv[0], environment);
    if (!path) {
        stream_fail_errno(stream, ENOENT, argv[0]);
        return;
    }
    struct pipe *pipe = allocate(sizeof *pipe);
    *pipe = (struct pipe){.stream = stream, .in = -1, .out = -1, .error = -1};
    int error = start(pipe, path, argv);
    free(path);
    if (error) {
        stream_fail_errno(stream, error, argv[0]);
        close_all(pipe);
        free(pipe);
        return;
    }
    watch(&pipe->stderr_watch, pipe->error, POLLIN, on_stderr_readable, pipe);
    stream_attach(stream, &piping, pipe);
    stream_ready(stream);
}

void pipe_begin(struct stream *stream, struct json **request)
{
    char **argv = read_arguments(json_require(*request, "argv", JSON_ARRAY));
    if (argv)
        run(stream, argv);
    else
        stream_fail(stream, "io", "argv must be an array of at least one text without NUL");
    free(argv);
}
