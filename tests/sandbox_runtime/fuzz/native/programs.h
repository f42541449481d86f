/* The programs inside: what the agent has started, and who connects to its port. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

void programs_begin(void);
/* A program writes to one of its descriptors, or reads from its input, or ends. */
void program_writes(uint8_t number, int stdio, const void *data, size_t length);
void program_reads(uint8_t number);
void program_ends(uint8_t number, uint8_t status);
/* Whether one has since this was asked last. */
bool programs_have_ended(void);
/* Somebody connects to the agent's port. */
void caller_connects(void);
void caller_sends(uint8_t number, const void *data, size_t length);
void caller_reads(uint8_t number);
/* It finishes writing, or closes its connection, perhaps with unread bytes: a reset. */
void caller_finishes(uint8_t number);
void caller_leaves(uint8_t number);
/* All end, and leave. */
void programs_end(void);
/* Whether a descriptor is the agent's port, and whether somebody waits there. */
bool is_port(int fd);
bool port_is_called(void);
