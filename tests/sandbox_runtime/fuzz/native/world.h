/* The agent's world in a fuzz target: its clock, its link, its files, and system calls that fail.

   The whole agent runs, from its main() on. The linker's --wrap redirects system calls with effects
   outside the process to these files. Whenever the agent would wait, the next event of the input
   happens. After the last event the host resets all streams, and the agent must then have released
   all memory and descriptors. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Run the agent with a configuration, encoded as by the host, and with events. */
void world_play(const char *config, size_t config_length, const uint8_t *events, size_t length);

/* Return true if the agent makes the system call, false if the fuzzer does. */
bool world_is_running(void);
/* Return true and set errno if an event has made the calling system call fail. */
bool world_fails(void);
/* Send data from the host. If it does not fit into the buffer, drop it and return false. */
bool world_send(const void *data, size_t length);
/* Effects of events: advance the clock; let the host read only `bytes` more; make the system call
   after `calls` more fail. */
void world_wait(double seconds);
void world_let_host_read(size_t bytes);
void world_let_fail(unsigned calls);
