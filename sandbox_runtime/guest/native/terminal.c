#include "terminal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <termios.h>
#include <unistd.h>

#include "memory.h"
#include "loop.h"
#include "processes.h"

#define END_OF_INPUT "\004"

struct terminal {
    int master; /* -1: all programs have closed their end, or the command has ended */
    bool is_pipe, has_eof; /* a pipe instead of a terminal; its end of input was written */
    char name[64];
    struct watch watch;
    struct buffer typed;
    size_t credited_from, credited; /* the part of `typed` that is reported to `on_consumed` */
    void (*on_consumed)(void *owner, size_t count);
    void *owner;
};

static void flush_typed(void *owner);

static void set_modes(int slave)
{
    struct termios modes;
    tcgetattr(slave, &modes);
    modes.c_iflag &= ~(tcflag_t)(IXON | ICRNL);
    modes.c_lflag &= ~(tcflag_t)(ECHO | ISIG);
    tcsetattr(slave, TCSANOW, &modes);
}

static int open_slave(struct terminal *terminal)
{
    if (grantpt(terminal->master) < 0 || unlockpt(terminal->master) < 0 ||
        ptsname_r(terminal->master, terminal->name, sizeof terminal->name))
        return -1;
    return open(terminal->name, O_RDWR | O_NOCTTY | O_CLOEXEC);
}

/* Return the command's end, or -1 if no pseudo-terminal is available. */
static int open_terminal(struct terminal *terminal)
{
    terminal->master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (terminal->master < 0)
        return -1;
    int slave = open_slave(terminal);
    if (slave < 0)
        close(terminal->master);
    else
        set_modes(slave);
    return slave;
}

/* Return the command's end, or -1 and set errno. */
static int open_pipe(struct terminal *terminal)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0)
        return -1;
    struct stat info;
    fstat(ends[0], &info);
    terminal->is_pipe = true;
    terminal->master = ends[1];
    fcntl(terminal->master, F_SETFL, O_NONBLOCK);
    snprintf(terminal->name, sizeof terminal->name, "pipe:[%llu]",
             (unsigned long long)info.st_ino);
    return ends[0];
}

struct terminal *terminal_open(int *slave, void (*on_consumed)(void *owner, size_t count),
                               void *owner)
{
    struct terminal *terminal = allocate(sizeof *terminal);
    terminal->on_consumed = on_consumed;
    terminal->owner = owner;
    *slave = open_terminal(terminal);
    if (*slave < 0)
        *slave = open_pipe(terminal);
    if (*slave < 0) {
        free(terminal);
        return NULL;
    }
    watch(&terminal->watch, terminal->master, POLLIN, flush_typed, terminal);
    return terminal;
}

/* Remove the first bytes of `typed` and report them. */
static void consume(struct terminal *terminal, size_t count)
{
    size_t before = count < terminal->credited_from ? count : terminal->credited_from;
    size_t credited = count - before < terminal->credited ? count - before : terminal->credited;
    terminal->credited_from -= before;
    terminal->credited -= credited;
    buffer_consume(&terminal->typed, count);
    if (credited)
        terminal->on_consumed(terminal->owner, credited);
}

static void hang_up(struct terminal *terminal)
{
    if (terminal->master >= 0) {
        unwatch(&terminal->watch);
        close(terminal->master);
        terminal->master = -1;
    }
    consume(terminal, terminal->typed.length);
}

bool terminal_is_pipe(const struct terminal *terminal)
{
    return terminal->is_pipe;
}

/* Return true if a program still has the other end open. Output that programs write to their input
   is dropped. */
static bool has_reader(const struct terminal *terminal)
{
    if (terminal->is_pipe) {
        struct pollfd polled = {terminal->master, 0, 0};
        return poll(&polled, 1, 0) <= 0;
    }
    char dropped[4096];
    ssize_t count = read(terminal->master, dropped, sizeof dropped);
    return count > 0 || errno == EAGAIN || errno == EINTR;
}

static void flush_typed(void *owner)
{
    struct terminal *terminal = owner;
    ssize_t count = 1;
    while (terminal->typed.length && count > 0) {
        count = write(terminal->master, buffer_data(&terminal->typed), terminal->typed.length);
        if (count > 0)
            consume(terminal, (size_t)count);
    }
    bool has_failed = count < 0 && errno != EAGAIN && errno != EINTR;
    bool is_over = terminal->has_eof && terminal->typed.length == 0;
    if (has_failed || is_over || !has_reader(terminal)) {
        hang_up(terminal);
        return;
    }
    short events = terminal->typed.length ? POLLIN | POLLOUT : POLLIN;
    watch(&terminal->watch, terminal->master, events, flush_typed, terminal);
}

static void write_data(struct terminal *terminal, const char *data, size_t length)
{
    buffer_append(&terminal->typed, data, length);
    if (terminal->master < 0)
        hang_up(terminal); /* no program reads it any more */
    else
        flush_typed(terminal);
}

void terminal_write(struct terminal *terminal, const char *data, size_t length)
{
    if (terminal->credited == 0)
        terminal->credited_from = terminal->typed.length;
    terminal->credited += length;
    write_data(terminal, data, length);
}

void terminal_write_eof(struct terminal *terminal)
{
    terminal->has_eof = terminal->is_pipe;
    write_data(terminal, END_OF_INPUT, terminal->is_pipe ? 0 : 1);
}

void terminal_drop_credit(struct terminal *terminal)
{
    terminal->credited = 0;
}

/* Return non-zero if a process blocks in a read of the file called `name`. */
static int is_reading(pid_t pid, const void *name)
{
    char path[64], text[128], link[64];
    snprintf(path, sizeof path, "/proc/%d/syscall", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    text[length > 0 ? length : 0] = 0;
    long number;
    unsigned long read_from;
    if (sscanf(text, "%ld %lx", &number, &read_from) != 2 || number != SYS_read)
        return 0;
    snprintf(path, sizeof path, "/proc/%d/fd/%lu", pid, read_from);
    length = readlink(path, link, sizeof link - 1);
    link[length > 0 ? length : 0] = 0;
    return strcmp(link, name) == 0;
}

bool terminal_has_waiting_reader(const struct terminal *terminal, pid_t session)
{
    return terminal->master >= 0 && terminal->typed.length == 0 &&
           session_visit(session, is_reading, terminal->name);
}

void terminal_close(struct terminal *terminal)
{
    hang_up(terminal);
    buffer_free(&terminal->typed);
    free(terminal);
}
