/* System calls that change the process itself. In a fuzz target, the agent's have no effect. */
#include <signal.h>
#include <stdbool.h>
#include <sys/resource.h>

#include "world.h"

void (*__real_signal(int number, void (*handler)(int)))(int);
int __real_sigprocmask(int how, const sigset_t *set, sigset_t *before);
int __real_setrlimit(int resource, const struct rlimit *limit);

/* Calls before and after an input are made by the fuzzer and take effect. */

void (*__wrap_signal(int number, void (*handler)(int)))(int)
{
    /* The agent ignores SIGPIPE. Without that, its write to a closed pipe would end the fuzzer. */
    if (world_is_running() && number != SIGPIPE)
        return SIG_DFL;
    return __real_signal(number, handler);
}

int __wrap_sigprocmask(int how, const sigset_t *set, sigset_t *before)
{
    return world_is_running() ? 0 : __real_sigprocmask(how, set, before);
}

int __wrap_setrlimit(int resource, const struct rlimit *limit)
{
    return world_is_running() ? 0 : __real_setrlimit(resource, limit);
}

/* Only the agent makes these calls: close_range(), and prctl() with PR_SET_DUMPABLE. */

long __wrap_syscall(void)
{
    return 0;
}

int __wrap_prctl(void)
{
    return 0;
}
