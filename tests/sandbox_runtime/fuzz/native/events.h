/* The events of an input: a byte that says which, and what belongs to it; see seeds.py. */
#pragma once

#include <stddef.h>
#include <stdint.h>

void events_begin(const uint8_t *data, size_t length);
/* How many bytes of them are left. */
size_t events_left(void);
/* Let the next one happen. */
void event_play(void);
