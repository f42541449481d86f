/* A directory being listed: one JSON array `[path, kind, bytes]` a line, files' with a hash at its
   end where that is asked for. */
#pragma once

#include "json.h"
#include "streams.h"

void list_begin(struct stream *stream, struct json **request);
