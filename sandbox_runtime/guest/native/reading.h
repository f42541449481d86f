/* A reading: a part of a command's output, kept for as long as it may be asked for again. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "bytes.h"
#include "capture.h"
#include "frames.h"
#include "spool.h"

enum output { STDOUT_OUTPUT, STDERR_OUTPUT, OUTPUTS };

/* Where the outputs are kept whole: the beginning of the files' names, NULL for nowhere; and how
   much the command may still keep, in all its readings. */
struct keep {
    const char *name;
    size_t *room;
};

struct reading {
    unsigned number;
    struct cap cap;
    struct keep keep;
    struct capture captures[OUTPUTS];
    struct spool spools[OUTPUTS];
    struct bytes pieces; /* what is delivered, each a struct piece and its bytes */
    size_t last_piece;
    bool has_ended;
    struct bytes report; /* once it has */
};

/* How a command is when a reading ends. */
struct outcome {
    int exit_code;
    bool timed_out, is_running, is_waiting;
    double duration_s, cpu_s;
    long long peak_memory_bytes, oom_kills, pids_refused;
};

/* How far somebody has come in a reading. */
struct place {
    size_t piece, offset;
};

/* What `keep` points to must live as long. */
struct reading *reading_new(unsigned number, struct cap cap, struct keep keep);
/* Take output in; returns whether there is something new to deliver. */
bool reading_feed(struct reading *reading, enum output output, const char *data, size_t length);
/* How much was written since it began. */
size_t reading_total(const struct reading *reading);
/* Complete it: the tails, the counts, the report. */
void reading_end(struct reading *reading, const struct outcome *outcome);
/* The next piece to send, no longer than `most`; returns its length, 0 when there is none yet. */
size_t reading_next(const struct reading *reading, struct place *place, size_t most,
                    enum frame_type *type, const char **data);
void reading_free(struct reading *reading);
