#include "file_system.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ledger.h"
#include "world.h"

#define WORK "/box"
#define SHELL_DIRECTORY "/run/.shell-"
#define LONG_FILE_BYTES 300000

int __real_open(const char *path, int flags, ...);
int __real_openat(int directory, const char *path, int flags, ...);
int __real_mkdir(const char *path, mode_t mode);
int __real_rename(const char *from, const char *to);
int __real_pipe2(int ends[2], int flags);
int __real_memfd_create(const char *name, unsigned flags);
int __real_posix_openpt(int flags);
int __real_fcntl(int fd, int command, long argument);
ssize_t __real_getrandom(void *data, size_t length, unsigned flags);

static bool is_changed = true;
static uint64_t next_random;

static int remove_one(const char *path, const struct stat *info, int type, struct FTW *place)
{
    (void)info;
    (void)type;
    if (place->level)
        remove(path);
    return 0;
}

static void make(const char *path, off_t bytes)
{
    int fd = __real_open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || ftruncate(fd, bytes) < 0)
        fault("%s cannot be made: %s", path, strerror(errno));
    close(fd);
}

static void wipe(const char *path)
{
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

void files_tidy(void)
{
    next_random = 0;
    if (access("/etc", F_OK) == 0 || chdir(WORK) < 0)
        fault("this runs the agent on any input, and so only in a sandbox of its own");
    wipe("/run");
    if (!is_changed)
        return;
    wipe("/tmp");
    wipe(WORK);
    make("file", 5);
    make("long", LONG_FILE_BYTES);
    __real_mkdir("dir", 0755);
    __real_mkdir("dir/deeper", 0755);
    make("dir/deeper/file", 0);
    is_changed = false;
}

static bool is_creating(int flags)
{
    return flags & (O_CREAT | O_TRUNC);
}

int __wrap_open(const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;
    va_end(more);
    is_changed |= is_creating(flags);
    return world_fails() ? -1 : __real_open(path, flags, mode);
}

int __wrap_openat(int directory, const char *path, int flags, ...)
{
    return world_fails() ? -1 : __real_openat(directory, path, flags);
}

int __wrap_mkdir(const char *path, mode_t mode)
{
    is_changed |= strncmp(path, SHELL_DIRECTORY, sizeof SHELL_DIRECTORY - 1) != 0;
    return world_fails() ? -1 : __real_mkdir(path, mode);
}

int __wrap_rename(const char *from, const char *to)
{
    is_changed = true;
    return world_fails() ? -1 : __real_rename(from, to);
}

int __wrap_pipe2(int ends[2], int flags)
{
    return world_fails() ? -1 : __real_pipe2(ends, flags);
}

int __wrap_memfd_create(const char *name, unsigned flags)
{
    return world_fails() ? -1 : __real_memfd_create(name, flags);
}

int __wrap_posix_openpt(int flags)
{
    return world_fails() ? -1 : __real_posix_openpt(flags);
}

/* Leave the agent's standard streams unchanged: they are the fuzzer's. */
int __wrap_fcntl(int fd, int command, ...)
{
    va_list more;
    va_start(more, command);
    long argument = va_arg(more, long);
    va_end(more);
    return world_is_running() && fd <= STDERR_FILENO ? 0 : __real_fcntl(fd, command, argument);
}

/* Return a counter instead of random bytes, so that each run of an input is the same. */
ssize_t __wrap_getrandom(void *data, size_t length, unsigned flags)
{
    if (!world_is_running())
        return __real_getrandom(data, length, flags);
    next_random++;
    memset(data, 0, length);
    memcpy(data, &next_random, length < sizeof next_random ? length : sizeof next_random);
    return (ssize_t)length;
}
