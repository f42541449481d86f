/* How often the sandbox has hit a limit, as its control group counts it. */
#pragma once

#include "json.h"

struct pressure {
    long long oom_kills, pids_refused;
};

/* Of each list of paths in {"oom": [..], "pids": [..]} the first that can be opened is read. */
void pressure_begin(const struct json *paths);
/* The counters now; what cannot be read counts nothing. */
struct pressure pressure_read(void);
