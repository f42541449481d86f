/* A command: a process and what it prints, from its start until its outcome is acknowledged. */
#pragma once

#include <stdbool.h>

#include "json.h"
#include "loop.h"
#include "pressure.h"
#include "processes.h"
#include "reading.h"
#include "shell.h"
#include "streams.h"
#include "terminal.h"

/* What reads one of its pipes, also when the command is forgotten: background processes that
   still write are to live, and never to block. */
struct drain;

struct command {
    char *id, *kept_as; /* see struct keep, */
    size_t keep_room;   /* and this too */
    struct command *next;     /* in the order of their starts */
    struct reading *reading;  /* the one that output goes to */
    struct reading *finished; /* the one before, until the next is asked for; or NULL */
    struct stream *stream;    /* on which somebody hears it; or NULL */
    struct reading *heard;    /* which of the two is heard there, */
    struct place place;       /* and how far it has come */
    bool is_acknowledged, has_ended;

    struct child child;
    bool has_exited, is_stopping, has_timed_out;
    struct outcome outcome; /* known bit by bit, whole when it has ended */
    double started_s;
    struct pressure pressure; /* at its start */
    struct drain *drains[OUTPUTS];
    struct terminal *terminal;
    char *snapshot;
    unsigned commits; /* of the shell, at its start */
    struct timer deadline, step, last_drops, pause, look;
    int steps_taken;
    size_t looked_at; /* reading_total() when it was last seen to wait; NOT_WAITING */
};

#define INPUT_TERMINAL -1

/* Start it; the descriptor of its input is taken over, INPUT_TERMINAL asks for a terminal.
   NULL and errno where it cannot be started. */
struct command *command_start(const struct json *request, int input, struct cap cap);
/* Interrupt, then terminate, then kill. */
void command_stop(struct command *command);
/* Kill every process of its session. */
void command_kill(struct command *command);
/* End the reading that is on while the command goes on, in so long, or when it waits for typing. */
void command_pause_after(struct command *command, double delay_s);
void command_look_after(struct command *command);
void command_free(struct command *command);
