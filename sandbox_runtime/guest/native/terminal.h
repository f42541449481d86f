/* A terminal as a command's standard input: somebody may type into it, and see that it waits.
   It is nobody's controlling one, so no key is a signal. Where there is no pseudo-terminal to be
   had, a pipe takes its place. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct terminal;

/* A new one, and in `slave` the command's end, which the caller closes; NULL and errno. `taken`
   hears how many of the bytes that were typed have gone in or been dropped. */
struct terminal *terminal_open(int *slave, void (*taken)(void *owner, size_t count), void *owner);
bool terminal_is_pipe(const struct terminal *terminal);
void terminal_type(struct terminal *terminal, const char *data, size_t length);
/* Type the end of input, of which `taken` does not hear. */
void terminal_type_end(struct terminal *terminal);
/* `taken` does not hear of what was typed up to now. */
void terminal_forget_typist(struct terminal *terminal);
/* Whether all that was typed has gone in and a process of the session stands in a read. */
bool terminal_is_awaited(const struct terminal *terminal, pid_t session);
/* Hang up. */
void terminal_close(struct terminal *terminal);
