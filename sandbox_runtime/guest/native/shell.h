/* The sandbox's shell: a fresh bash for each command, the state carried over by a snapshot.

   A fresh shell survives `exit`, syntax errors, `set -e` and timeouts of the command before it. The
   snapshot is taken as the shell ends, and replaces the last one only if the shell ended by
   itself. The shell's part of it is the same text as in shell.py. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "json.h"
#include "processes.h"

/* A command about to run; its texts are the request's. */
struct order {
    const char *command;
    size_t command_length;
    const char *cwd;        /* NULL: where the last one left */
    const struct json *env; /* an object of texts */
    bool has_state;
};

/* Whether these texts can be a command's; makes them what the kernel takes. */
bool order_read(struct order *order, const struct json *request);

void shell_begin(char *const *env);
/* Start a command; returns errno. A terminal comes as stdio[3], for bash would make what it finds as
   its input the session's own, and end with it whatever runs in the background. `snapshot` is where its state will be, NULL if it is not kept,
   and the caller's to free. */
int shell_start(const struct order *order, const int stdio[4], struct child *child,
                void (*ended)(void *owner, const struct ending *ending), void *owner,
                char **snapshot);
/* Make a command's snapshot the state of the next, or drop it. */
void shell_commit(const char *snapshot, bool keep);
/* How often the state was replaced. */
unsigned shell_commits(void);
/* A program's path by PATH; NULL if there is none; the caller frees it. */
char *find_program(const char *name, char *const *env);
