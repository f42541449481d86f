/* The commands that somebody may still ask for, by id. */
#pragma once

#include "command.h"

/* NULL where there is none. */
struct command *commands_find(const char *id);
void commands_add(struct command *command);
/* Its outcome has arrived, or will not be asked for: `id` need not be known. */
void commands_acknowledge(const char *id);
/* Forget it if nobody can ask for it any more, and the oldest if there are many. */
void commands_settle(struct command *command);
