/* The loop: who waits for a descriptor or for a time is called when it comes. */
#pragma once

#include <poll.h>
#include <stdbool.h>
#include <stddef.h>

/* Part of what it serves; all zero where nothing is watched. */
struct watch {
    int fd;
    short events;
    void (*ready)(void *owner);
    void *owner;
    size_t place; /* in the table, counted from 1 */
};

/* Call `ready` whenever `fd` can be read (POLLIN) or written (POLLOUT), or has failed.
   Called again, it changes what is waited for; with no events it rests. */
void watch(struct watch *watch, int fd, short events, void (*ready)(void *owner), void *owner);
void unwatch(struct watch *watch);

struct timer {
    double at;
    void (*due)(void *owner);
    void *owner;
    struct timer *next;
    bool is_set;
};

/* Call `due` once, after a delay; a timer that was set before is set anew. */
void timer_set(struct timer *timer, double delay_s, void (*due)(void *owner), void *owner);
void timer_clear(struct timer *timer);

/* Seconds on a clock that nobody sets. */
double now_s(void);

/* For ever: `round` does what there is to do and says whether it wants to be called again at
   once; then all that is ready or due is called. Signals are let in only while we wait. */
_Noreturn void loop_run(bool (*round)(void));
