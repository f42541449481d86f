/* The sandbox's shell: a fresh bash for each command; a snapshot carries the state over.

   A fresh shell survives `exit`, syntax errors, `set -e` and timeouts of the command before it. The
   snapshot is taken when the shell ends, and replaces the last one only if the shell ended by
   itself. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "json.h"
#include "processes.h"

/* A command to run. The request owns the strings. */
struct shell_command {
    const char *text;
    size_t length;
    const char *cwd;        /* NULL: the directory of the last command */
    const struct json *env; /* an object of texts */
    bool has_state;
};

/* Parse a request and convert its strings to the kernel's encoding in place. Return false if that
   is impossible. */
bool shell_command_parse(struct shell_command *command, const struct json *request);

void shell_begin(char *const *env);
/* Start a command; return errno. A terminal is passed as stdio[3]: as standard input, bash would
   make it the session's controlling terminal, and background processes would end with it.
   `snapshot` is set to the path of the state to commit, or NULL if none is saved; the caller frees
   it. */
int shell_start(const struct shell_command *command, const int stdio[4], struct child *child,
                void (*on_child_exit)(void *owner, const struct child_exit *status), void *owner,
                char **snapshot);
/* Make a command's snapshot the state of the next command, or remove it. */
void shell_commit(const char *snapshot, bool keep);
/* Return how often the state was replaced. */
unsigned shell_commits(void);
/* Return the path of a program found by PATH, or NULL. The caller frees it. */
char *find_program(const char *name, char *const *env);
