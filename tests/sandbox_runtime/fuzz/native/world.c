#include "world.h"

#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "command.h"
#include "command.h"
#include "events.h"
#include "file_system.h"
#include "frames.h"
#include "globals.h"
#include "host.h"
#include "ledger.h"
#include "programs.h"

#define MAX_UNREAD (1u << 20) /* bytes of the host that the agent has not read */
#define MAX_COMMANDS 128
#define MAX_ID_CHARS 64 /* commands with longer ids are not acknowledged */
#define LAST_ROUNDS 12
#define LAST_WAIT_S 2.0
#define MOMENT_S 1e-6
#define MAX_POLLED 2048
#define MAX_ROUNDS 20000 /* between two events */

int agent_main(void);
int __real_ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout,
                 const sigset_t *mask);
ssize_t __real_read(int fd, void *data, size_t length);
ssize_t __real_write(int fd, const void *data, size_t length);
int __real_clock_gettime(clockid_t clock, struct timespec *time);
void __real_commands_add(struct command *command);
_Noreturn void __real__exit(int code);

static bool is_running;
static jmp_buf out;
static char sent[MAX_UNREAD]; /* by the host */
static size_t sent_start, sent_end;
static size_t room;           /* bytes that the host still reads */
static unsigned calls_until_failure; /* 0: none fails */
static double clock_s;
static size_t blocks_at_rest, descriptors_at_rest;
static char ids[MAX_COMMANDS][MAX_ID_CHARS + 1];
static size_t id_count;
static bool has_odd_ids; /* some commands cannot be acknowledged */
static bool has_begun;   /* the agent has waited for the first time */
static int rounds_left;
static unsigned rounds;

bool world_is_running(void)
{
    return is_running;
}

bool world_fails(void)
{
    static const int errors[] = {EMFILE, ENOSPC, EIO, EACCES};
    if (!is_running || !calls_until_failure || --calls_until_failure)
        return false;
    errno = errors[events_left() % 4];
    return true;
}

bool world_send(const void *data, size_t length)
{
    if (length > sizeof sent - sent_end)
        return false;
    memcpy(sent + sent_end, data, length);
    sent_end += length;
    return true;
}

void world_wait(double seconds)
{
    clock_s += seconds;
}

void world_let_host_read(size_t bytes)
{
    room = bytes;
}

void world_let_fail(unsigned calls)
{
    calls_until_failure = calls;
}

/* The end: the host resets all streams, programs end, and the clock advances. */

static void check_nothing_is_left(void)
{
    if (!host_is_exact() || has_odd_ids)
        return;
    if (ledger_blocks() != blocks_at_rest)
        fault("%zu blocks of memory are left, there were %zu", ledger_blocks(), blocks_at_rest);
    if (ledger_descriptors() != descriptors_at_rest)
        fault("%zu descriptors are left, there were %zu", ledger_descriptors(),
              descriptors_at_rest);
}

static void play_last_round(void)
{
    if (rounds_left-- == 0) {
        check_nothing_is_left();
        longjmp(out, 1);
    }
    room = SIZE_MAX;
    calls_until_failure = 0;
    clock_s += LAST_WAIT_S;
    host_give_up();
    if (rounds_left < LAST_ROUNDS - 1)
        programs_end(); /* after the agent has processed the resets */
    for (size_t n = 0; n < id_count; n++)
        if (commands_find(ids[n]))
            host_send(0, FRAME_ACK, ids[n], strlen(ids[n]));
}

void __wrap_commands_add(struct command *command)
{
    size_t length = strlen(command->id);
    if (length > MAX_ID_CHARS || id_count == MAX_COMMANDS)
        has_odd_ids = true;
    else
        strcpy(ids[id_count++], command->id);
    __real_commands_add(command);
}

/* System calls */

static bool is_ready_here(const struct pollfd *polled, short *events)
{
    *events = 0;
    if (polled->fd == STDIN_FILENO)
        *events = sent_end > sent_start ? POLLIN : 0;
    else if (polled->fd == STDOUT_FILENO)
        *events = room ? POLLOUT : 0;
    else if (is_port(polled->fd))
        *events = port_is_called() ? POLLIN : 0;
    else
        return false;
    *events &= polled->events;
    return true;
}

static int look(struct pollfd *fds, nfds_t count)
{
    static const struct timespec at_once;
    static struct pollfd elsewhere[MAX_POLLED];
    int ready = 0;
    if (count > MAX_POLLED)
        fault("%zu descriptors are watched", (size_t)count);
    memcpy(elsewhere, fds, count * sizeof *fds);
    for (nfds_t n = 0; n < count; n++)
        if (is_ready_here(&fds[n], &fds[n].revents))
            elsewhere[n].fd = -1;
    __real_ppoll(elsewhere, count, &at_once, NULL);
    for (nfds_t n = 0; n < count; n++) {
        if (elsewhere[n].fd >= 0)
            fds[n].revents = elsewhere[n].revents;
        ready += fds[n].revents != 0;
    }
    return ready;
}

static void begin(void)
{
    if (has_begun)
        return;
    has_begun = true;
    blocks_at_rest = ledger_blocks();
    descriptors_at_rest = ledger_descriptors();
}

int __wrap_ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout,
                 const sigset_t *mask)
{
    if (!is_running)
        return __real_ppoll(fds, count, timeout, mask);
    double until = clock_s + (double)timeout->tv_sec + (double)timeout->tv_nsec / 1e9;
    int ready;
    while (!(ready = look(fds, count)) && clock_s < until) {
        begin();
        rounds = 0;
        if (events_left())
            event_play();
        else
            play_last_round();
        if (programs_have_ended()) {
            errno = EINTR;
            return -1;
        }
    }
    clock_s += MOMENT_S;
    if (++rounds > MAX_ROUNDS)
        fault("the agent is busy without end");
    return ready;
}

ssize_t __wrap_read(int fd, void *data, size_t length)
{
    if (!is_running || fd != STDIN_FILENO)
        return world_fails() ? -1 : __real_read(fd, data, length);
    size_t left = sent_end - sent_start;
    size_t count = left < length ? left : length;
    if (count == 0 && has_begun) {
        errno = EAGAIN;
        return -1;
    }
    memcpy(data, sent + sent_start, count);
    sent_start += count;
    if (sent_start == sent_end)
        sent_start = sent_end = 0;
    return (ssize_t)count;
}

ssize_t __wrap_write(int fd, const void *data, size_t length)
{
    if (!is_running || fd != STDOUT_FILENO)
        return world_fails() ? -1 : __real_write(fd, data, length);
    size_t count = length < room ? length : room;
    if (count == 0) {
        errno = EAGAIN;
        return -1;
    }
    room -= room == SIZE_MAX ? 0 : count;
    host_take(data, count);
    return (ssize_t)count;
}

int __wrap_clock_gettime(clockid_t clock, struct timespec *time)
{
    if (!is_running)
        return __real_clock_gettime(clock, time);
    time->tv_sec = (time_t)clock_s;
    time->tv_nsec = (long)((clock_s - (double)time->tv_sec) * 1e9);
    return 0;
}

_Noreturn void __wrap__exit(int code)
{
    if (is_running)
        longjmp(out, 1);
    __real__exit(code);
}

_Noreturn void __wrap_die(const char *format, ...)
{
    static char words[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    if (!is_running)
        fault("%s", words);
    longjmp(out, 1);
}

/* One input */

/* Copies words without instrumentation: memcpy() would touch the sanitizer's guards between
   variables. */
__attribute__((no_sanitize("address"))) static void restore(char *start, const char *end,
                                                            const char *saved)
{
    volatile uint64_t *at = (uint64_t *)start;
    for (size_t n = 0; n < (size_t)(end - start) / sizeof *at; n++)
        at[n] = saved ? ((const uint64_t *)saved)[n] : 0;
}

__attribute__((no_sanitize("address"))) static char *save(const char *start, const char *end)
{
    static uint64_t saved[1 << 16];
    if ((size_t)(end - start) > sizeof saved)
        fault("the agent has %zu bytes of variables", (size_t)(end - start));
    for (size_t n = 0; n < (size_t)(end - start) / sizeof *saved; n++)
        saved[n] = ((const volatile uint64_t *)start)[n];
    return (char *)saved;
}

static void restore_globals(void)
{
    static char *saved;
    if (!saved)
        saved = save(agent_data_begin, agent_data_end);
    restore(agent_data_begin, agent_data_end, saved);
    restore(agent_bss_begin, agent_bss_end, NULL);
}

void world_play(const char *config, size_t config_length, const uint8_t *events, size_t length)
{
    char header[4];
    restore_globals();
    files_tidy();
    host_begin();
    programs_begin();
    events_begin(events, length);
    sent_start = sent_end = id_count = calls_until_failure = rounds = 0;
    has_odd_ids = has_begun = false;
    rounds_left = LAST_ROUNDS;
    room = SIZE_MAX;
    clock_s = 1000;
    write_u32(header, (uint32_t)config_length);
    world_send(header, sizeof header);
    world_send(config, config_length);
    ledger_begin();
    is_running = true;
    if (!_setjmp(out))
        agent_main();
    is_running = false;
    ledger_end();
}
