/* Child processes, each the leader of its own session; the agent's descriptors; and the counters of
   the cgroup's limits. */
#pragma once

#include <sys/types.h>

#include "json.h"

/* Open /dev/null for each of the descriptors 0, 1 and 2 that is closed; close all others. */
void descriptors_begin(void);

struct child_exit {
    int exit_code; /* as a shell reports it: 128 + n for signal n */
    double cpu_s;
    long long peak_memory_bytes;
};

/* A child process. Embedded in its owner, which must exist until `on_child_exit` was called. */
struct child {
    pid_t pid;
    void (*on_child_exit)(void *owner, const struct child_exit *status);
    void *owner;
    struct child *next;
};

struct program {
    const char *path;
    char *const *argv;
    char *const *env;
    int stdio[4]; /* the program's descriptors 0 to 3; -1: none */
};

void processes_begin(void);
/* Start a program that inherits only the descriptors in `stdio`; return errno. */
int process_start(const struct program *program, struct child *child,
                  void (*on_child_exit)(void *owner, const struct child_exit *status), void *owner);
/* Reap all children that have exited, including orphans that the agent has inherited. */
void processes_reap(void);

/* Call `visit` with each process of a session until it returns non-zero; return that value. */
int session_visit(pid_t leader, int (*visit)(pid_t pid, const void *context), const void *context);
/* Send SIGKILL to each process of a session. */
void session_kill(pid_t leader);

/* How often the sandbox has hit a limit, as counted by its cgroup. */
struct limit_events {
    long long oom_kills, pids_refused;
};

/* Open the counters: of each list of paths in {"oom": [..], "pids": [..]} the first that exists. */
void limit_events_begin(const struct json *paths);
/* Return the counters; one that cannot be read is 0. */
struct limit_events limit_events_read(void);
