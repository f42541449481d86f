/* The agent's world in a fuzz target: its clock, its link, its files, and system calls that fail.

   The whole agent runs, from its main() on. System calls that would leave the process come here
   instead (the linker's --wrap); whenever the agent would wait, the next event of the input
   happens. Once there are none left, the host gives everything up, and then the agent must hold
   nothing. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Run the agent on a configuration, as the host sends it, and on events. */
void world_play(const char *config, size_t config_length, const uint8_t *events, size_t length);

/* Whether it is the agent that makes a system call, and not the fuzzer. */
bool world_is_running(void);
/* Whether the system call that asks is one that an event has told to fail; sets errno. */
bool world_fails(void);
/* Let the host send; what does not fit any more is dropped whole, and false returned. */
bool world_send(const void *data, size_t length);
/* What an event may change: time passes, the host reads only so much more, the so manieth system
   call from now fails. */
void world_wait(double seconds);
void world_let_host_read(size_t bytes);
void world_let_fail(unsigned calls);
