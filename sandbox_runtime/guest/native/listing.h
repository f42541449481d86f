/* The operation list: one JSON array `[path, kind, bytes]` a line. If hashes are requested, the
   array of a file ends with its hash. */
#pragma once

#include "json.h"
#include "streams.h"

void list_begin(struct stream *stream, struct json **request);
