/* Room for what is read and passed on at once: nothing in it lasts longer than that. */
#pragma once

#include "frames.h"

extern char scratch[MAX_DATA_BYTES];
