#include "pressure.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int oom = -1, pids = -1;

static int open_first(const struct json *paths)
{
    int fd = -1;
    for (const struct json *path = paths ? paths->first : NULL; path && fd < 0; path = path->next)
        if (path->kind == JSON_TEXT)
            fd = open(path->text, O_RDONLY | O_CLOEXEC);
    return fd;
}

void pressure_begin(const struct json *paths)
{
    oom = open_first(json_member(paths, "oom"));
    pids = open_first(json_member(paths, "pids"));
}

/* The number in the line that begins with `word`. */
static long long count(int fd, const char *word)
{
    char text[4096];
    ssize_t length = fd < 0 ? -1 : pread(fd, text, sizeof text - 1, 0);
    text[length > 0 ? length : 0] = 0;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"))
        if (strncmp(line, word, strlen(word)) == 0)
            return atoll(line + strlen(word));
    return 0;
}

struct pressure pressure_read(void)
{
    return (struct pressure){count(oom, "oom_kill "), count(pids, "max ")};
}
