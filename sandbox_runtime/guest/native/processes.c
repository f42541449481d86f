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
#include <sys/wait.h>
#include <unistd.h>

#include "descriptors.h"

#define KILL_ROUNDS 3

static struct child *children;
static volatile sig_atomic_t somebody_died;

static void note_death(int number)
{
    (void)number;
    somebody_died = 1;
}

void processes_begin(void)
{
    /* Blocked but while the loop waits, so no death is overlooked. */
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigprocmask(SIG_BLOCK, &blocked, NULL);
    sigaction(SIGCHLD, &(struct sigaction){.sa_handler = note_death}, NULL);
    static const int ignored[] = {SIGPIPE, SIGXFSZ, SIGINT};
    for (size_t n = 0; n < sizeof ignored / sizeof *ignored; n++)
        signal(ignored[n], SIG_IGN);
}

static void prepare_signals(posix_spawnattr_t *attributes)
{
    sigset_t set;
    sigemptyset(&set);
    posix_spawnattr_setsigmask(attributes, &set);
    static const int ours[] = {SIGPIPE, SIGXFSZ, SIGINT, SIGTERM, SIGCHLD};
    for (size_t n = 0; n < sizeof ours / sizeof *ours; n++)
        sigaddset(&set, ours[n]);
    posix_spawnattr_setsigdefault(attributes, &set);
    posix_spawnattr_setflags(attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK |
                                             POSIX_SPAWN_SETSIGDEF);
}

int process_start(const struct program *program, struct child *child,
                  void (*ended)(void *owner, const struct ending *ending), void *owner)
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
    descriptors_seal();
    if (!error)
        error = posix_spawn(&child->pid, program->path, &actions, &attributes, program->argv,
                            program->env);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    if (error)
        return error;
    child->ended = ended;
    child->owner = owner;
    child->next = children;
    children = child;
    return 0;
}

/* Take a child out of the list; NULL if it was not in it. */
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
    if (!somebody_died)
        return;
    somebody_died = 0;
    for (;;) {
        int status;
        struct rusage used;
        pid_t pid = wait4(-1, &status, WNOHANG, &used);
        if (pid <= 0)
            return;
        struct child *child = take_child(pid);
        if (!child)
            continue;
        const struct ending ending = {
            WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status),
            seconds(used.ru_utime) + seconds(used.ru_stime),
            used.ru_maxrss * 1024LL,
        };
        child->ended(child->owner, &ending);
    }
}

/* The session a process is in; 0 if it is gone. */
static pid_t session_of(const char *pid)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%.20s/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    text[length > 0 ? length : 0] = 0;
    char *name_end = strrchr(text, ')'); /* a name may hold anything */
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
        if (pid > 0 && session_of(entry->d_name) == leader)
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
    /* Who starts others while we look has them killed when we look again. */
    for (int n = 0; n < KILL_ROUNDS; n++)
        session_visit(leader, kill_one, NULL);
}
