#include "processes.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>


#define FIRST_DESCRIPTOR (STDERR_FILENO + 1)
#define CLOEXEC (1u << 2) /* CLOSE_RANGE_CLOEXEC of the kernel headers, which musl-gcc lacks */

/* By number, because the C library may not have the call. Older kernels do not either: the error is
   ignored. */
static void close_range_from(unsigned first, unsigned flags)
{
    syscall(SYS_close_range, first, ~0u, flags);
}

void descriptors_begin(void)
{
    while (fcntl(STDERR_FILENO, F_GETFD) < 0)
        if (open("/dev/null", O_RDWR) < 0)
            _exit(1);
    close_range_from(FIRST_DESCRIPTOR, 0);
}

/* Set FD_CLOEXEC on all descriptors of the agent, also those opened without O_CLOEXEC. */
static void set_close_on_exec(void)
{
    close_range_from(FIRST_DESCRIPTOR, CLOEXEC);
}

#define KILL_ROUNDS 3

static struct child *children;
static volatile sig_atomic_t has_exited_children;

static void on_sigchld(int number)
{
    (void)number;
    has_exited_children = 1;
}

void processes_begin(void)
{
    /* Blocked except while the loop waits, so that no exit is missed. */
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigprocmask(SIG_BLOCK, &blocked, NULL);
    sigaction(SIGCHLD, &(struct sigaction){.sa_handler = on_sigchld}, NULL);
    static const int ignored[] = {SIGPIPE, SIGXFSZ, SIGINT};
    for (size_t n = 0; n < sizeof ignored / sizeof *ignored; n++)
        signal(ignored[n], SIG_IGN);
}

static void prepare_signals(posix_spawnattr_t *attributes)
{
    sigset_t set;
    sigemptyset(&set);
    posix_spawnattr_setsigmask(attributes, &set);
    static const int reset[] = {SIGPIPE, SIGXFSZ, SIGINT, SIGTERM, SIGCHLD};
    for (size_t n = 0; n < sizeof reset / sizeof *reset; n++)
        sigaddset(&set, reset[n]);
    posix_spawnattr_setsigdefault(attributes, &set);
    posix_spawnattr_setflags(attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK |
                                             POSIX_SPAWN_SETSIGDEF);
}

int process_start(const struct program *program, struct child *child,
                  void (*on_child_exit)(void *owner, const struct child_exit *status), void *owner)
{
    posix_spawnattr_t attributes;
    posix_spawn_file_actions_t actions;
    posix_spawnattr_init(&attributes);
    posix_spawn_file_actions_init(&actions);
    prepare_signals(&attributes);
    int error = 0;
    for (int n = 0; n < 4 && !error; n++)
        if (program->stdio[n] >= 0)
            error = posix_spawn_file_actions_adddup2(&actions, program->stdio[n], n);
    set_close_on_exec();
    if (!error)
        error = posix_spawn(&child->pid, program->path, &actions, &attributes, program->argv,
                            program->env);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    if (error)
        return error;
    child->on_child_exit = on_child_exit;
    child->owner = owner;
    child->next = children;
    children = child;
    return 0;
}

/* Remove a child from the list and return it, or NULL if it was not in the list. */
static struct child *take_child(pid_t pid)
{
    struct child **link = &children;
    while (*link && (*link)->pid != pid)
        link = &(*link)->next;
    struct child *child = *link;
    if (child)
        *link = child->next;
    return child;
}

static double seconds(struct timeval time)
{
    return (double)time.tv_sec + (double)time.tv_usec / 1e6;
}

void processes_reap(void)
{
    if (!has_exited_children)
        return;
    has_exited_children = 0;
    for (;;) {
        int status;
        struct rusage used;
        pid_t pid = wait4(-1, &status, WNOHANG, &used);
        if (pid <= 0)
            return;
        struct child *child = take_child(pid);
        if (!child)
            continue;
        const struct child_exit result = {
            WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status),
            seconds(used.ru_utime) + seconds(used.ru_stime),
            used.ru_maxrss * 1024LL,
        };
        child->on_child_exit(child->owner, &result);
    }
}

/* Return the session of a process, or 0 if the process is gone. */
static pid_t read_session(const char *pid)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%.20s/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    text[length > 0 ? length : 0] = 0;
    char *name_end = strrchr(text, ')'); /* the name may contain any byte */
    int session = 0;
    if (name_end)
        sscanf(name_end + 1, " %*c %*d %*d %d", &session);
    return session;
}

int session_visit(pid_t leader, int (*visit)(pid_t pid, const void *context), const void *context)
{
    DIR *processes = opendir("/proc");
    if (!processes)
        return 0;
    int result = 0;
    for (struct dirent *entry; !result && (entry = readdir(processes));) {
        int pid = atoi(entry->d_name);
        if (pid > 0 && read_session(entry->d_name) == leader)
            result = visit(pid, context);
    }
    closedir(processes);
    return result;
}

static int kill_one(pid_t pid, const void *context)
{
    (void)context;
    kill(pid, SIGKILL);
    return 0;
}

void session_kill(pid_t leader)
{
    /* Several rounds: a process may start others during one. */
    for (int n = 0; n < KILL_ROUNDS; n++)
        session_visit(leader, kill_one, NULL);
}

static int oom_events = -1, pids_events = -1;

static int open_first(const struct json *paths)
{
    int fd = -1;
    for (const struct json *path = paths ? paths->first : NULL; path && fd < 0; path = path->next)
        if (path->kind == JSON_TEXT)
            fd = open(path->text, O_RDONLY | O_CLOEXEC);
    return fd;
}

void limit_events_begin(const struct json *paths)
{
    oom_events = open_first(json_member(paths, "oom"));
    pids_events = open_first(json_member(paths, "pids"));
}

/* Return the number in the line that begins with `word`. */
static long long read_counter(int fd, const char *word)
{
    char text[4096];
    ssize_t length = fd < 0 ? -1 : pread(fd, text, sizeof text - 1, 0);
    text[length > 0 ? length : 0] = 0;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"))
        if (strncmp(line, word, strlen(word)) == 0)
            return atoll(line + strlen(word));
    return 0;
}

struct limit_events limit_events_read(void)
{
    return (struct limit_events){
        .oom_kills = read_counter(oom_events, "oom_kill "),
        .pids_refused = read_counter(pids_events, "max "),
    };
}
