/* The events of a fuzz input: each is a byte for its kind, and its arguments; see seeds.py. */
#pragma once

#include <stddef.h>
#include <stdint.h>

void events_begin(const uint8_t *data, size_t length);
/* Return the number of input bytes that are left. */
size_t events_left(void);
/* Perform the next event. */
void event_play(void);
