/* Commands: processes and their output, each from its start until the host has acknowledged its
   report, and the table of them by id. */
#pragma once

#include <stdbool.h>

#include "json.h"
#include "loop.h"
#include "processes.h"
#include "reading.h"
#include "shell.h"
#include "streams.h"
#include "terminal.h"

/* The reader of one output pipe. It outlives the command: background processes that still write
   must not block. */
struct drain;

struct command {
    char *id;
    char *keep_name;          /* of struct keep */
    size_t keep_left;         /* of struct keep */
    struct command *next;     /* in the order of their starts */
    struct reading *reading;  /* the reading that output is added to */
    struct reading *finished; /* the previous reading, until the host requests the next; or NULL */
    struct stream *stream;    /* the stream that a reading is delivered on; or NULL */
    struct reading *delivered; /* the reading that is delivered on `stream` */
    struct cursor cursor;      /* how much of `delivered` has been sent */
    bool is_acknowledged, has_ended;

    struct child child;
    bool has_exited, is_stopping, has_timed_out;
    struct outcome outcome; /* complete when the command has ended */
    double started_s;
    struct limit_events events_at_start;
    struct drain *drains[OUTPUTS];
    struct terminal *terminal;
    char *snapshot;
    unsigned commits_at_start; /* shell_commits() at the start */
    struct timer deadline, next_signal, drain_deadline, pause, prompt_check;
    int signals_sent;
    size_t prompt_total; /* reading_total() when the command last waited; or NOT_WAITING */
};

#define INPUT_TERMINAL -1

/* Start a command. Takes ownership of the descriptor `input`; INPUT_TERMINAL requests a terminal.
   Return NULL and set errno if it cannot be started. */
struct command *command_start(const struct json *request, int input, struct cap cap);
/* Send the command SIGINT, then SIGTERM, then SIGKILL. */
void command_stop(struct command *command);
/* Kill all processes of the command's session. */
void command_kill(struct command *command);
/* End the current reading after `delay_s` while the command keeps running. */
void command_pause_after(struct command *command, double delay_s);
/* End the current reading once the command waits for input from its terminal. */
void command_watch_for_prompt(struct command *command);

/* Return the command with this id, or NULL. */
struct command *commands_find(const char *id);
void commands_add(struct command *command);
/* Record that the host has the report or does not need it. An unknown `id` is ignored. */
void commands_acknowledge(const char *id);
/* Free the command if its report is no longer needed, and the oldest ended commands beyond the
   limit. */
void commands_settle(struct command *command);
