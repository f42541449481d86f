/* Memory that is there: where there is none, the agent ends and says so. */
#pragma once

#include <stddef.h>

/* Say why on standard error and end; everything in the sandbox ends with us. */
_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Zeroed. */
void *allocate(size_t bytes);
void *resize(void *block, size_t bytes);
/* A new string, as printf would print it. */
char *format(const char *format, ...) __attribute__((format(printf, 1, 2)));
