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
#include "scratch.h"
#include "shell.h"

#define LAST_WORDS_BYTES 4096u
#define MAX_LAST_READS 32 /* more than a pipe holds */

struct pipe {
    struct stream *stream; /* NULL: it was given up, or never began */
    struct child child;
    bool has_exited;
    int exit_code;
    int in, out, error; /* our ends; -1: closed */
    struct watch writing, reading, listening;
    struct bytes unwritten;
    bool input_ends;
    char words[LAST_WORDS_BYTES];
    size_t words_length;
};

static char *const *environment;

void pipes_begin(char *const *env)
{
    environment = env;
}

static void shut(int *fd, struct watch *watch)
{
    unwatch(watch);
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* In */

static void take(struct pipe *pipe, size_t count)
{
    bytes_drop(&pipe->unwritten, count);
    stream_grant(pipe->stream, count);
}

static void write_on(void *owner)
{
    struct pipe *pipe = owner;
    while (pipe->unwritten.length && pipe->in >= 0) {
        ssize_t count = write(pipe->in, bytes_front(&pipe->unwritten), pipe->unwritten.length);
        if (count >= 0) {
            take(pipe, (size_t)count);
        } else if (errno == EAGAIN || errno == EINTR) {
            watch(&pipe->writing, pipe->in, POLLOUT, write_on, pipe);
            return;
        } else {
            shut(&pipe->in, &pipe->writing); /* it reads no more */
        }
    }
    take(pipe, pipe->unwritten.length);
    if (pipe->input_ends)
        shut(&pipe->in, &pipe->writing);
    else
        unwatch(&pipe->writing);
}

static void pipe_feed(void *owner, const char *data, size_t length)
{
    struct pipe *pipe = owner;
    bytes_add(&pipe->unwritten, data, length);
    write_on(pipe);
}

static void pipe_finish_input(void *owner)
{
    struct pipe *pipe = owner;
    pipe->input_ends = true;
    write_on(pipe);
}

/* Out */

/* Keep the end of what it says; returns whether there may be more. */
static bool hear(struct pipe *pipe)
{
    char data[LAST_WORDS_BYTES];
    ssize_t length = read(pipe->error, data, sizeof data);
    if (length < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (length <= 0) {
        shut(&pipe->error, &pipe->listening);
        return false;
    }
    size_t kept = LAST_WORDS_BYTES - (size_t)length;
    kept = kept < pipe->words_length ? kept : pipe->words_length;
    memmove(pipe->words, pipe->words + pipe->words_length - kept, kept);
    memcpy(pipe->words + kept, data, (size_t)length);
    pipe->words_length = kept + (size_t)length;
    return true;
}

static void hear_on(void *owner)
{
    hear(owner);
}

static void close_all(struct pipe *pipe)
{
    shut(&pipe->in, &pipe->writing);
    shut(&pipe->out, &pipe->reading);
    shut(&pipe->error, &pipe->listening);
    bytes_free(&pipe->unwritten);
}

static void finish(struct pipe *pipe)
{
    struct bytes report = {0};
    for (int n = 0; n < MAX_LAST_READS && pipe->error >= 0 && hear(pipe); n++)
        continue;
    report_begin(&report);
    report_count(&report, "exit_code", pipe->exit_code);
    report_words(&report, "stderr", pipe->words, pipe->words_length);
    report_end(&report);
    stream_finish(pipe->stream, &report);
    close_all(pipe);
    free(pipe);
}

static void read_on(void *owner)
{
    struct pipe *pipe = owner;
    unwatch(&pipe->reading); /* until that much has been sent */
    stream_ready(pipe->stream);
}

static enum pumped pipe_send(void *owner, size_t credit)
{
    struct pipe *pipe = owner;
    ssize_t length = pipe->out < 0 ? 0 : read(pipe->out, scratch, credit);
    if (length > 0) {
        stream_send(pipe->stream, FRAME_DATA, scratch, (size_t)length);
        return PUMPED_SOME;
    }
    if (length < 0 && (errno == EAGAIN || errno == EINTR)) {
        watch(&pipe->reading, pipe->out, POLLIN, read_on, pipe);
        return PUMPED_ALL;
    }
    shut(&pipe->out, &pipe->reading);
    if (!pipe->has_exited)
        return PUMPED_ALL;
    finish(pipe);
    return PUMPED_LAST;
}

/* Its life */

static void exited(void *owner, const struct ending *ending)
{
    struct pipe *pipe = owner;
    pipe->has_exited = true;
    pipe->exit_code = ending->exit_code;
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
        free(pipe); /* something it started still holds its output */
        return;
    }
    session_kill(pipe->child.pid);
}

static const struct operation piping = {pipe_feed, pipe_finish_input, pipe_send, pipe_reset};

/* Three pipes: of each one end is ours, and blocks nobody. Returns errno. */
static int open_pipes(struct pipe *pipe, int stdio[3])
{
    int *const ends[3][2] = {
        {&stdio[0], &pipe->in}, {&pipe->out, &stdio[1]}, {&pipe->error, &stdio[2]}};
    int *const ours[3] = {&pipe->in, &pipe->out, &pipe->error};
    for (int n = 0; n < 3; n++) {
        int opened[2];
        if (pipe2(opened, O_CLOEXEC) < 0)
            return errno;
        *ends[n][0] = opened[0];
        *ends[n][1] = opened[1];
        fcntl(*ours[n], F_SETFL, O_NONBLOCK);
    }
    return 0;
}

/* Returns errno. */
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
        error = process_start(&program, &pipe->child, exited, pipe);
    }
    for (int n = 0; n < 3; n++)
        if (stdio[n] >= 0)
            close(stdio[n]);
    return error;
}

/* The texts of an array, and a NULL; NULL if there is none that can be a program's arguments. */
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
    watch(&pipe->listening, pipe->error, POLLIN, hear_on, pipe);
    stream_attend(stream, &piping, pipe);
    stream_ready(stream);
}

void pipe_begin(struct stream *stream, struct json **request)
{
    char **argv = read_arguments(json_need(*request, "argv", JSON_ARRAY));
    if (argv)
        run(stream, argv);
    else
        stream_fail(stream, "io", "these are no arguments");
    free(argv);
}
