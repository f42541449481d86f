/* The memory and the descriptors that the agent holds while a target runs it. */
#pragma once

#include <stddef.h>

/* Start to record: allocations, and descriptors that are opened from now on. */
void ledger_begin(void);
/* How many allocations and descriptors the agent holds. */
size_t ledger_blocks(void);
size_t ledger_descriptors(void);
/* Stop to record; free and close all that the agent still holds. */
void ledger_end(void);

/* Say what is wrong and abort: the fuzzer keeps the input. */
_Noreturn void fault(const char *format, ...) __attribute__((format(printf, 1, 2)));
