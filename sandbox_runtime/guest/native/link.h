/* The link to the host: frames in on standard input, frames out on standard output.
   The agent ends when the host does. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "frames.h"

/* Call `receive` with each frame from the host; the agent ends, where `patience_s` is not 0,
   when nothing came for so long. */
void link_begin(void (*receive)(const struct frame *frame), double patience_s);
void link_send(uint32_t stream, enum frame_type type, const void *payload, size_t length);
/* Whether so much waits for the host to read that there should not be more. */
bool link_is_full(void);
void link_flush(void);
