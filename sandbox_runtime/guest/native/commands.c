#include "commands.h"

#include <string.h>

#define MAX_ENDED 64

static struct command *commands;

struct command *commands_find(const char *id)
{
    struct command *command = commands;
    while (command && strcmp(command->id, id) != 0)
        command = command->next;
    return command;
}

void commands_add(struct command *command)
{
    struct command **end = &commands;
    while (*end)
        end = &(*end)->next;
    *end = command;
}

static void forget(struct command *command)
{
    struct command **link = &commands;
    while (*link != command)
        link = &(*link)->next;
    *link = command->next;
    command_free(command);
}

/* The oldest that has ended and that nobody hears, if there are more than we keep. */
static struct command *oldest_to_go(void)
{
    struct command *oldest = NULL;
    int ended = 0;
    for (struct command *command = commands; command; command = command->next) {
        ended += command->has_ended;
        if (!oldest && command->has_ended && !command->stream)
            oldest = command;
    }
    return ended > MAX_ENDED ? oldest : NULL;
}

void commands_acknowledge(const char *id)
{
    struct command *command = commands_find(id);
    if (!command)
        return;
    command->is_acknowledged = true;
    commands_settle(command);
}

void commands_settle(struct command *command)
{
    struct command *oldest;
    if (command->has_ended && command->is_acknowledged && !command->stream)
        forget(command);
    while ((oldest = oldest_to_go()))
        forget(oldest);
}
