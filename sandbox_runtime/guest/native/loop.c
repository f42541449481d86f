#include "loop.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <time.h>

#include "memory.h"

#define MAX_WAIT_S 3600.0

static struct watch **watches; /* NULL: removed since the last round */
static struct pollfd *polled;
static size_t watch_count, watch_room;
static struct timer *timers;

void watch(struct watch *watch, int fd, short events, void (*ready)(void *owner), void *owner)
{
    watch->fd = fd;
    watch->events = events;
    watch->ready = ready;
    watch->owner = owner;
    if (watch->slot)
        return;
    if (watch_count == watch_room) {
        watch_room = watch_room ? 2 * watch_room : 16;
        watches = resize(watches, watch_room * sizeof *watches);
        polled = resize(polled, watch_room * sizeof *polled);
    }
    watches[watch_count++] = watch;
    watch->slot = watch_count;
}

void unwatch(struct watch *watch)
{
    if (watch->slot)
        watches[watch->slot - 1] = NULL;
    watch->slot = 0;
}

static void close_gaps(void)
{
    size_t kept = 0;
    for (size_t n = 0; n < watch_count; n++) {
        if (!watches[n])
            continue;
        watches[kept++] = watches[n];
        watches[kept - 1]->slot = kept;
    }
    watch_count = kept;
}

void timer_set(struct timer *timer, double delay_s, void (*due)(void *owner), void *owner)
{
    timer_clear(timer);
    *timer = (struct timer){now_s() + delay_s, due, owner, timers, true};
    timers = timer;
}

void timer_clear(struct timer *timer)
{
    if (!timer->is_set)
        return;
    struct timer **link = &timers;
    while (*link != timer)
        link = &(*link)->next;
    *link = timer->next;
    timer->is_set = false;
}

double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static struct timer *earliest(void)
{
    struct timer *found = timers;
    for (struct timer *timer = timers; timer; timer = timer->next)
        if (timer->at < found->at)
            found = timer;
    return found;
}

static void call_due(void)
{
    double now = now_s();
    for (struct timer *timer = earliest(); timer && timer->at <= now; timer = earliest()) {
        timer_clear(timer);
        timer->due(timer->owner);
    }
}

static struct timespec poll_timeout(bool is_busy)
{
    double wait = MAX_WAIT_S;
    const struct timer *next = earliest();
    if (is_busy)
        wait = 0;
    else if (next && next->at - now_s() < wait)
        wait = next->at - now_s();
    if (wait < 0)
        wait = 0;
    time_t seconds = (time_t)wait;
    return (struct timespec){seconds, (long)((wait - (double)seconds) * 1e9)};
}

/* Wait, then call the ready callbacks; watches added meanwhile are served in the next round. */
static void wait_and_call(bool is_busy)
{
    close_gaps();
    size_t count = watch_count;
    for (size_t n = 0; n < count; n++) {
        const struct watch *watch = watches[n];
        polled[n] = (struct pollfd){watch->events ? watch->fd : -1, watch->events, 0};
    }
    struct timespec wait = poll_timeout(is_busy);
    sigset_t none;
    sigemptyset(&none);
    if (ppoll(polled, count, &wait, &none) < 0) {
        if (errno != EINTR)
            die("cannot wait: %s", strerror(errno));
        return;
    }
    for (size_t n = 0; n < count; n++)
        if (polled[n].revents && watches[n] && watches[n]->events)
            watches[n]->ready(watches[n]->owner);
}

void loop_run(bool (*round)(void))
{
    for (;;) {
        wait_and_call(round());
        call_due();
    }
}
