#include "globals.h"

char agent_data_begin[8] __attribute__((aligned(64))) = {1};
char agent_bss_begin[8] __attribute__((aligned(64)));
