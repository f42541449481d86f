/* The programs inside: those that the agent has started, and callers, which connect to its port. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

void programs_begin(void);
/* Let a program write to one of its descriptors, read its input, or end. */
void program_writes(uint8_t number, int stdio, const void *data, size_t length);
void program_reads(uint8_t number);
void program_ends(uint8_t number, uint8_t status);
/* Return true if a program has ended since the last call. */
bool programs_have_ended(void);
/* Let a caller connect to the agent's port, send, or read. */
void caller_connects(void);
void caller_sends(uint8_t number, const void *data, size_t length);
void caller_reads(uint8_t number);
/* Let a caller finish writing, or close its connection; with unread bytes that resets it. */
void caller_finishes(uint8_t number);
void caller_leaves(uint8_t number);
/* Let all programs end and all callers close their connections. */
void programs_end(void);
/* Return true if a descriptor is the agent's port; if a caller waits to be accepted there. */
bool is_port(int fd);
bool port_is_called(void);
