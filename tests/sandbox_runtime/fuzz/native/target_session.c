/* The whole agent, with arbitrary frames, arbitrary programs and failing system calls. */
#include "world.h"

static const char config[] =
    "{\"working_dir\": \"/box\", \"directories\": [\"/box\"], \"rlimits\": {}, "
    "\"env\": {\"PATH\": \"/bin\"}, \"watchdog_s\": 600, \"lifetime_s\": 0, \"egress_port\": 3128, "
    "\"pressure\": {\"oom\": [\"/box/file\"], \"pids\": [\"/nowhere\"]}}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    world_play(config, sizeof config - 1, data, size);
    return 0;
}
