/* The host's end of the link: it checks each frame that the agent sends as a host of ours does. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

void host_begin(void);
/* Send a frame and take account of it. */
void host_send(uint32_t stream, uint8_t type, const void *payload, size_t length);
/* Send bytes that need not be frames; from now on only the agent's syntax is checked. */
void host_send_raw(const void *data, size_t length);
/* Give credit for all that came on a stream. */
void host_grant(uint8_t stream);
/* The agent has written. */
void host_take(const char *data, size_t length);
/* Reset every stream that is open. */
void host_give_up(void);
/* Whether everything that was sent was a frame. */
bool host_is_exact(void);
