/* A program with a stream at either end: how whole directories come in and go out, as tar. */
#pragma once

#include "json.h"
#include "streams.h"

void pipe_begin(struct stream *stream, struct json **request);
/* The environment of such programs. */
void pipes_begin(char *const *env);
