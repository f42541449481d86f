/* The link to the host: frames arrive on standard input and are sent on standard output. The agent
   ends when the host closes its end, unless the link is resumable. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "frames.h"

/* Call `receive` with each frame from the host. If `timeout_s` is not 0, the agent ends after that
   long without data from the host. With a token, the frames travel in packets, and `on_adopt` is
   called when another host has adopted the link; see resume.h. */
void link_begin(void (*receive)(const struct frame *frame), double timeout_s, const char *token,
                void (*on_adopt)(void));
/* Drop all bytes that the host has sent and that are to be sent. */
void link_clear(void);
void link_send(uint32_t stream, enum frame_type type, const void *payload, size_t length);
/* Return true if no more data should be queued until the host has read some. */
bool link_is_full(void);
void link_flush(void);
