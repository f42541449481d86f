/* What the host tells the agent before it serves: on standard input, u32 length and JSON. */
#pragma once

#include "json.h"

struct config {
    struct json *root; /* whose texts these are */
    char **env;        /* of all commands: the image's and what is configured */
    const char *working_dir;
    double watchdog_s, lifetime_s; /* 0: none */
    int egress_port;               /* 0: none */
};

struct config config_read(void);
/* Make directories, take the limits, go where commands start. The agent ends if that cannot be. */
void config_apply(const struct config *config);
