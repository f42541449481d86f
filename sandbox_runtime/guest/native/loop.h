/* The event loop: callbacks for descriptors and for timers. */
#pragma once

#include <poll.h>
#include <stdbool.h>
#include <stddef.h>

/* Embedded in its owner; all zero while nothing is watched. */
struct watch {
    int fd;
    short events;
    void (*ready)(void *owner);
    void *owner;
    size_t slot; /* in the table, counted from 1 */
};

/* Call `ready` whenever `fd` can be read (POLLIN) or written (POLLOUT), or has failed. Calling this
   again changes the events; without events the descriptor is ignored. */
void watch(struct watch *watch, int fd, short events, void (*ready)(void *owner), void *owner);
void unwatch(struct watch *watch);

struct timer {
    double at;
    void (*due)(void *owner);
    void *owner;
    struct timer *next;
    bool is_set;
};

/* Call `due` once, after a delay. A timer that is already set is reset. */
void timer_set(struct timer *timer, double delay_s, void (*due)(void *owner), void *owner);
void timer_clear(struct timer *timer);

/* Return the time of the monotonic clock in seconds. */
double now_s(void);

/* Run for ever: call `round`, wait unless it returned true (it has more work), then call the
   callbacks that are ready or due. Signals are delivered only while the loop waits. */
_Noreturn void loop_run(bool (*round)(void));
