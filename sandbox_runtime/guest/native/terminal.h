/* A terminal as a command's standard input, which shows whether the command waits for input. It is
   not a controlling terminal, so no key sends a signal. If no pseudo-terminal is available, a pipe
   is used instead. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct terminal;

/* Return a new terminal and, in `slave`, the command's end, which the caller closes. Return NULL
   and set errno on failure. `on_consumed` is called with the number of written bytes that the
   command's end has taken or that were dropped. */
struct terminal *terminal_open(int *slave, void (*on_consumed)(void *owner, size_t count),
                               void *owner);
bool terminal_is_pipe(const struct terminal *terminal);
void terminal_write(struct terminal *terminal, const char *data, size_t length);
/* Write the end of input, which `on_consumed` does not count. */
void terminal_write_eof(struct terminal *terminal);
/* Do not report the bytes written so far to `on_consumed`. */
void terminal_drop_credit(struct terminal *terminal);
/* Return true if all written data was consumed and a process of the session blocks in a read. */
bool terminal_has_waiting_reader(const struct terminal *terminal, pid_t session);
/* Hang up and free the terminal. */
void terminal_close(struct terminal *terminal);
