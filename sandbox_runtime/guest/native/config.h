/* The configuration that the host sends on standard input before the first frame: a u32 length and
   JSON. */
#pragma once

#include "json.h"

struct config {
    struct json *root; /* owns the strings below */
    char **env;        /* of all commands: the image's, overridden by the configured variables */
    const char *working_dir;
    double watchdog_s, lifetime_s; /* 0: none */
    int egress_port;               /* 0: none */
    const char *link_token;        /* NULL: the link is not resumable */
};

struct config config_read(void);
/* Set the resource limits, create the directories and change to the working directory. Ends the
   agent if that fails. */
void config_apply(const struct config *config);
