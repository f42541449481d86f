/* The operations exec, attach and stop: they start a command, deliver its readings on a stream, and
   stop it. */
#pragma once

#include "json.h"
#include "streams.h"

void exec_begin(struct stream *stream, struct json **request);
void attach_begin(struct stream *stream, struct json **request);
void stop_begin(struct stream *stream, struct json **request);
