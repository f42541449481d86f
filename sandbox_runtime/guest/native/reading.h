/* Readings: parts of a command's output. Each is kept until the next one is requested, so that it
   can be delivered again. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "capture.h"
#include "frames.h"
#include "memory.h"

enum output { STDOUT_OUTPUT, STDERR_OUTPUT, OUTPUTS };

/* The files that keep the full output. */
struct keep {
    const char *name; /* the beginning of the files' names; NULL: no files */
    size_t *left;     /* bytes that the command may still keep, in all its readings */
};

/* A file in the sandbox with the full output of one stream. It is written only if the output
   exceeds the cap. */
struct output_file {
    char *path;   /* NULL: no file is wanted */
    size_t *left; /* as in struct keep */
    bool has_begun, is_full;
    int fd; /* once it has begun; -1: it cannot be written */
    size_t length;
};

struct reading {
    unsigned number;
    struct cap cap;
    struct keep keep;
    struct capture captures[OUTPUTS];
    struct output_file files[OUTPUTS];
    struct buffer pieces; /* the output to deliver: each piece is a struct piece and its bytes */
    size_t last_piece;
    bool has_ended;
    struct buffer report; /* once it has ended */
};

/* The state of a command when a reading ends. */
struct outcome {
    int exit_code;
    bool timed_out, is_running, is_waiting;
    double duration_s, cpu_s;
    long long peak_memory_bytes, oom_kills, pids_refused;
};

/* A position in a reading. */
struct cursor {
    size_t piece, offset;
};

/* The pointers in `keep` must stay valid as long as the reading. */
struct reading *reading_new(unsigned number, struct cap cap, struct keep keep);
/* Add output. Return true if there is something new to deliver. */
bool reading_feed(struct reading *reading, enum output output, const char *data, size_t length);
/* Return how many bytes were written since the reading began. */
size_t reading_total(const struct reading *reading);
/* Complete the reading: add the tails and write the report. */
void reading_end(struct reading *reading, const struct outcome *outcome);
/* Return the length of the next data to send, at most `max_bytes`, and advance the cursor; 0 if
   there is none yet. */
size_t reading_next(const struct reading *reading, struct cursor *cursor, size_t max_bytes,
                    enum frame_type *type, const char **data);
void reading_free(struct reading *reading);
