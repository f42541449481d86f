/* A record of the memory blocks and descriptors of the agent while a target runs it. */
#pragma once

#include <stddef.h>

/* Start recording new allocations and descriptors. */
void ledger_begin(void);
/* Return the number of allocations and of descriptors that the agent has not released. */
size_t ledger_blocks(void);
size_t ledger_descriptors(void);
/* Stop recording; free and close everything that the agent has not released. */
void ledger_end(void);

/* Print the fault and abort, so that the fuzzer keeps the input. */
_Noreturn void fault(const char *format, ...) __attribute__((format(printf, 1, 2)));
