/* The host's end of the link, which checks each frame of the agent as the real host does. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

void host_begin(void);
/* Send a frame and update the state of its stream. */
void host_send(uint32_t stream, uint8_t type, const void *payload, size_t length);
/* Send bytes that need not be frames. After that, only the syntax of the agent's frames is
   checked. */
void host_send_raw(const void *data, size_t length);
/* Give credit for all data received on a stream. */
void host_grant(uint8_t stream);
/* Process bytes that the agent has written. */
void host_take(const char *data, size_t length);
/* Reset all open streams. */
void host_give_up(void);
/* Return true if the host has sent only valid frames. */
bool host_is_exact(void);
