/* The operation pipe: a program whose input and output are a stream. The host packs and unpacks
   directories with it, by tar. */
#pragma once

#include "json.h"
#include "streams.h"

void pipe_begin(struct stream *stream, struct json **request);
/* Set the environment of the programs. */
void pipes_begin(char *const *env);
