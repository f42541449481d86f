/* A file inside that has an output stream whole, where more was written than is shown. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

struct spool {
    char *path; /* NULL: none is wanted */
    size_t *room; /* of all that its command may still keep */
    bool has_begun, is_full;
    int fd; /* once it has begun; -1 where it cannot be written */
    size_t length;
};

/* Begin the file; what was written so far is added by the caller. */
void spool_begin(struct spool *spool);
/* Write on while there is room; once there was none, there is no more of it. */
void spool_add(struct spool *spool, const char *data, size_t length);
/* Close it; returns how much it has, 0 where there is none. */
size_t spool_end(struct spool *spool, bool is_needed);
