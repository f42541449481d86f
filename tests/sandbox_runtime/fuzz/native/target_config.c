/* The configuration: the agent starts with it, or ends with an error message. */
#include "world.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    world_play((const char *)data, size, data + size, 0);
    return 0;
}
