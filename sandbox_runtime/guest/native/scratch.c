#include "scratch.h"

char scratch[MAX_DATA_BYTES];
