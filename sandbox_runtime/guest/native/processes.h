/* Child processes: started as leaders of sessions of their own, and waited for. */
#pragma once

#include <sys/types.h>

struct ending {
    int exit_code; /* as a shell reports it: 128 + n for signal n */
    double cpu_s;
    long long peak_memory_bytes;
};

/* A child of ours; part of what started it, and there until `ended` was called. */
struct child {
    pid_t pid;
    void (*ended)(void *owner, const struct ending *ending);
    void *owner;
    struct child *next;
};

struct program {
    const char *path;
    char *const *argv;
    char *const *env;
    int stdio[4]; /* what it has as 0 to 3; -1: nothing */
};

void processes_begin(void);
/* Start a program with nothing of ours but `stdio`; returns errno. */
int process_start(const struct program *program, struct child *child,
                  void (*ended)(void *owner, const struct ending *ending), void *owner);
/* Collect the dead, ours and those that are left to us, if there may be any. */
void processes_reap(void);

/* Call `visit` with each process of a session until it returns non-zero, and return that. */
int session_visit(pid_t leader, int (*visit)(pid_t pid, const void *context), const void *context);
/* SIGKILL to each. */
void session_kill(pid_t leader);
