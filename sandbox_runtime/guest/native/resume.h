/* The link over packets, which goes on when a connection is lost and the host connects again. */
#pragma once

#include <stdbool.h>
#include <sys/types.h>

#include "memory.h"

/* Begin, with the token as hexadecimal digits. `sent` has the bytes for the host, which are removed
   when the host has received them. If `lease_s` is not 0, the agent ends that long after it has sent
   the last packet that the host is known to have received. `on_adopt` is called when another host
   has adopted the link: it drops all bytes for and from the earlier host. */
void resume_begin(const char *token, double lease_s, struct buffer *sent, void (*on_adopt)(void));
/* Read packets and append their new bytes to `received`. Return the result of read(2). */
ssize_t resume_read(struct buffer *received);
/* Write packets until there are no more, or standard output takes no more. Return true if there are
   more. */
bool resume_flush(void);
