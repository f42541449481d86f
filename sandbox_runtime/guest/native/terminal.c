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

#include "bytes.h"
#include "loop.h"
#include "memory.h"
#include "processes.h"

#define END_OF_INPUT "\004"

struct terminal {
    int master; /* -1: every program has closed its end, or the command has ended */
    bool is_pipe, has_ended; /* a pipe in place of a terminal; its last byte was typed */
    char name[64];
    struct watch watch;
    struct bytes typed;
    size_t owed_from, owed; /* the part of `typed` that `taken` will hear of */
    void (*taken)(void *owner, size_t count);
    void *owner;
};

static void type_on(void *owner);

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

/* Returns the command's end; -1 where there is no pseudo-terminal. */
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

/* Returns the command's end; -1 and errno. */
static int open_pipe(struct terminal *terminal)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0)
        return -1;
    struct stat facts;
    fstat(ends[0], &facts);
    terminal->is_pipe = true;
    terminal->master = ends[1];
    fcntl(terminal->master, F_SETFL, O_NONBLOCK);
    snprintf(terminal->name, sizeof terminal->name, "pipe:[%llu]",
             (unsigned long long)facts.st_ino);
    return ends[0];
}

struct terminal *terminal_open(int *slave, void (*taken)(void *owner, size_t count), void *owner)
{
    struct terminal *terminal = allocate(sizeof *terminal);
    terminal->taken = taken;
    terminal->owner = owner;
    *slave = open_terminal(terminal);
    if (*slave < 0)
        *slave = open_pipe(terminal);
    if (*slave < 0) {
        free(terminal);
        return NULL;
    }
    watch(&terminal->watch, terminal->master, POLLIN, type_on, terminal);
    return terminal;
}

/* The first bytes of what was typed are gone. */
static void take(struct terminal *terminal, size_t count)
{
    size_t before = count < terminal->owed_from ? count : terminal->owed_from;
    size_t owed = count - before < terminal->owed ? count - before : terminal->owed;
    terminal->owed_from -= before;
    terminal->owed -= owed;
    bytes_drop(&terminal->typed, count);
    if (owed)
        terminal->taken(terminal->owner, owed);
}

static void hang_up(struct terminal *terminal)
{
    if (terminal->master >= 0) {
        unwatch(&terminal->watch);
        close(terminal->master);
        terminal->master = -1;
    }
    take(terminal, terminal->typed.length);
}

bool terminal_is_pipe(const struct terminal *terminal)
{
    return terminal->is_pipe;
}

/* Whether any program still has its end open. What programs write to a terminal, though it is their
   input, is dropped. */
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

static void type_on(void *owner)
{
    struct terminal *terminal = owner;
    ssize_t count = 1;
    while (terminal->typed.length && count > 0) {
        count = write(terminal->master, bytes_front(&terminal->typed), terminal->typed.length);
        if (count > 0)
            take(terminal, (size_t)count);
    }
    bool has_failed = count < 0 && errno != EAGAIN && errno != EINTR;
    bool is_over = terminal->has_ended && terminal->typed.length == 0;
    if (has_failed || is_over || !has_reader(terminal)) {
        hang_up(terminal);
        return;
    }
    short events = terminal->typed.length ? POLLIN | POLLOUT : POLLIN;
    watch(&terminal->watch, terminal->master, events, type_on, terminal);
}

static void type(struct terminal *terminal, const char *data, size_t length)
{
    bytes_add(&terminal->typed, data, length);
    if (terminal->master < 0)
        hang_up(terminal); /* nobody reads any more */
    else
        type_on(terminal);
}

void terminal_type(struct terminal *terminal, const char *data, size_t length)
{
    if (terminal->owed == 0)
        terminal->owed_from = terminal->typed.length;
    terminal->owed += length;
    type(terminal, data, length);
}

void terminal_type_end(struct terminal *terminal)
{
    terminal->has_ended = terminal->is_pipe;
    type(terminal, END_OF_INPUT, terminal->is_pipe ? 0 : 1);
}

void terminal_forget_typist(struct terminal *terminal)
{
    terminal->owed = 0;
}

/* Whether a process is blocked in reading the file called `name`. */
static int reads(pid_t pid, const void *name)
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

bool terminal_is_awaited(const struct terminal *terminal, pid_t session)
{
    return terminal->master >= 0 && terminal->typed.length == 0 &&
           session_visit(session, reads, terminal->name);
}

void terminal_close(struct terminal *terminal)
{
    hang_up(terminal);
    bytes_free(&terminal->typed);
    free(terminal);
}
