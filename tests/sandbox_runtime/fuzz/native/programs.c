#include "programs.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ledger.h"
#include "world.h"

#define MAX_PROGRAMS 64
#define MAX_CALLERS 300
#define STDIO 4
#define FIRST_PID 1000000 /* no process of this machine has it */
#define NO_FD -1

int __real_accept4(int fd, struct sockaddr *address, socklen_t *length, int flags);
int __real_sigaction(int signal, const struct sigaction *action, struct sigaction *before);
int __real_socket(int domain, int type, int protocol);
int __real_kill(pid_t pid, int signal);
pid_t __real_wait4(pid_t pid, int *status, int options, struct rusage *usage);
int __real_posix_spawn_file_actions_adddup2(posix_spawn_file_actions_t *actions, int from, int to);

static struct {
    int stdio[STDIO];
    bool has_ended, is_collected;
    int status;
} programs[MAX_PROGRAMS];
static size_t program_count;
static int next_stdio[STDIO]; /* of the program that is being started */
static void (*on_child)(int number);
static bool has_news;

static int callers[MAX_CALLERS];
static size_t caller_count, waiting;
static int port;

void programs_begin(void)
{
    program_count = caller_count = waiting = 0;
    on_child = NULL;
    has_news = false;
    port = NO_FD;
    for (int n = 0; n < STDIO; n++)
        next_stdio[n] = NO_FD;
}

/* Programs that the agent has started */

int __wrap_sigaction(int signal, const struct sigaction *action, struct sigaction *before)
{
    if (!world_is_running())
        return __real_sigaction(signal, action, before);
    if (signal == SIGCHLD)
        on_child = action->sa_handler;
    return 0;
}

int __wrap_posix_spawn_file_actions_adddup2(posix_spawn_file_actions_t *actions, int from, int to)
{
    if (!world_is_running())
        return __real_posix_spawn_file_actions_adddup2(actions, from, to);
    if (fcntl(from, F_GETFD) < 0 || to < 0 || to >= STDIO)
        fault("a program is to have descriptor %d as its %d", from, to);
    next_stdio[to] = from;
    return 0;
}

int __wrap_posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                       const posix_spawnattr_t *attributes, char *const argv[], char *const env[])
{
    (void)actions;
    (void)attributes;
    bool fails = world_fails() || program_count == MAX_PROGRAMS;
    size_t read = strlen(path);
    for (; *argv; argv++)
        read += strlen(*argv);
    for (; *env; env++)
        read += strlen(*env);
    for (int n = 0; n < STDIO; n++) {
        int fd = next_stdio[n];
        next_stdio[n] = NO_FD;
        if (!fails)
            programs[program_count].stdio[n] = fd < 0 ? NO_FD : fcntl(fd, F_DUPFD_CLOEXEC, 0);
    }
    if (fails || !read)
        return EAGAIN;
    programs[program_count].has_ended = programs[program_count].is_collected = false;
    *pid = FIRST_PID + (pid_t)program_count++;
    return 0;
}

static int stdio_of(uint8_t number, int stdio)
{
    return number < program_count ? programs[number].stdio[stdio % STDIO] : NO_FD;
}

/* The agent runs in the same process, so a blocking call would never end. */
static void set_nonblocking(int fd)
{
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

void program_writes(uint8_t number, int stdio, const void *data, size_t length)
{
    int fd = stdio_of(number, stdio);
    if (fd < 0)
        return;
    set_nonblocking(fd);
    if (write(fd, data, length) < 0)
        return; /* the pipe is full, or the descriptor is not open for writing */
}

void program_reads(uint8_t number)
{
    char read_by_it[1 << 16];
    for (int stdio = 0; stdio < STDIO; stdio += STDIO - 1) {
        int fd = stdio_of(number, stdio);
        if (fd < 0)
            continue;
        set_nonblocking(fd);
        if (read(fd, read_by_it, sizeof read_by_it) < 0)
            continue;
    }
}

bool programs_have_ended(void)
{
    bool have = has_news;
    has_news = false;
    return have;
}

/* Call the agent's handler of SIGCHLD, which ends its wait. */
static void tell_agent(void)
{
    has_news = true;
    if (on_child)
        on_child(SIGCHLD);
}

static void end(size_t number, int status)
{
    for (int n = 0; n < STDIO; n++)
        if (programs[number].stdio[n] >= 0)
            close(programs[number].stdio[n]);
    memset(programs[number].stdio, 0xFF, sizeof programs[number].stdio);
    if (programs[number].has_ended)
        return;
    programs[number].has_ended = true;
    programs[number].status = status;
    tell_agent();
}

/* End a program: by a signal, by exit, or (UINT8_MAX) with its output kept open by another. */
void program_ends(uint8_t number, uint8_t status)
{
    if (number >= program_count || programs[number].has_ended)
        return;
    if (status == UINT8_MAX) {
        programs[number].has_ended = true;
        programs[number].status = 0;
        tell_agent();
    } else {
        end(number, status % 2 ? SIGSEGV : (status << 8));
    }
}

pid_t __wrap_wait4(pid_t pid, int *status, int options, struct rusage *usage)
{
    if (!world_is_running())
        return __real_wait4(pid, status, options, usage);
    for (size_t n = 0; n < program_count; n++) {
        if (!programs[n].has_ended || programs[n].is_collected)
            continue;
        programs[n].is_collected = true;
        *status = programs[n].status;
        *usage = (struct rusage){0};
        return FIRST_PID + (pid_t)n;
    }
    errno = ECHILD;
    return -1;
}

int __wrap_kill(pid_t pid, int signal)
{
    if (!world_is_running())
        return __real_kill(pid, signal);
    pid_t number = (pid < 0 ? -pid : pid) - FIRST_PID;
    if (number < 0 || (size_t)number >= program_count)
        fault("signal %d goes to %d", signal, pid);
    if (number % 2 && !programs[number].has_ended) /* every second program ends by signals */
        end((size_t)number, signal);
    return 0;
}

/* Replaced, because the agent looks for the processes of a session in /proc. */
void __wrap_session_kill(pid_t leader)
{
    end((size_t)(leader - FIRST_PID), SIGKILL);
}

int __wrap_session_visit(pid_t leader, int (*visit)(pid_t pid, const void *context),
                         const void *context)
{
    size_t number = (size_t)(leader - FIRST_PID);
    visit(getpid(), context); /* runs the code that reads the files of a process */
    return number % 2 == 0 && !programs[number].has_ended;
}

/* Callers of the agent's port */

int __wrap_socket(int domain, int type, int protocol)
{
    if (!world_is_running())
        return __real_socket(domain, type, protocol);
    return port = world_fails() ? NO_FD : open("/dev/null", O_RDWR | O_CLOEXEC);
}

int __wrap_setsockopt(void)
{
    return 0;
}

int __wrap_bind(void)
{
    return world_fails() ? -1 : 0;
}

int __wrap_listen(void)
{
    return 0;
}

bool is_port(int fd)
{
    return fd == port && fd >= 0;
}

bool port_is_called(void)
{
    return waiting;
}

void caller_connects(void)
{
    waiting += caller_count + waiting < MAX_CALLERS;
}

int __wrap_accept4(int fd, struct sockaddr *address, socklen_t *length, int flags)
{
    int ends[2];
    if (!world_is_running())
        return __real_accept4(fd, address, length, flags);
    if (!waiting || world_fails())
        return -1;
    waiting--;
    if (socketpair(AF_UNIX, SOCK_STREAM | flags, 0, ends) < 0)
        return -1;
    callers[caller_count++] = ends[1];
    return ends[0];
}

static int caller(uint8_t number)
{
    return number < caller_count ? callers[number] : NO_FD;
}

void caller_sends(uint8_t number, const void *data, size_t length)
{
    if (caller(number) >= 0)
        send(caller(number), data, length, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void caller_reads(uint8_t number)
{
    char read_by_it[1 << 16];
    if (caller(number) >= 0)
        recv(caller(number), read_by_it, sizeof read_by_it, MSG_DONTWAIT);
}

void caller_finishes(uint8_t number)
{
    if (caller(number) >= 0)
        shutdown(caller(number), SHUT_WR);
}

void caller_leaves(uint8_t number)
{
    if (caller(number) >= 0)
        close(caller(number));
    if (number < caller_count)
        callers[number] = NO_FD;
}

void programs_end(void)
{
    waiting = 0;
    for (size_t n = 0; n < program_count; n++)
        end(n, 0);
    for (size_t n = 0; n < caller_count; n++) {
        if (callers[n] >= 0)
            close(callers[n]);
        callers[n] = NO_FD;
    }
}
