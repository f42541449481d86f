/* What the host does with commands: start one and hear it, hear one again or on, stop one. */
#pragma once

#include "json.h"
#include "streams.h"

void exec_begin(struct stream *stream, struct json **request);
void attach_begin(struct stream *stream, struct json **request);
void stop_begin(struct stream *stream, struct json **request);
