#include "spool.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "files.h"
#include "memory.h"

static void remove_file(struct spool *spool)
{
    close(spool->fd);
    unlink(spool->path);
    *spool->room += spool->length;
    spool->fd = -1;
    spool->length = 0;
}

void spool_begin(struct spool *spool)
{
    char *parent = format("%s", spool->path);
    char *slash = strrchr(parent, '/');
    if (slash)
        slash[1] = 0;
    int error = slash ? make_directories(parent) : ENOENT;
    free(parent);
    spool->has_begun = true;
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
    spool->fd = error || !*spool->room ? -1 : open(spool->path, flags, 0644);
}

void spool_add(struct spool *spool, const char *data, size_t length)
{
    if (spool->is_full)
        return;
    spool->is_full = length > *spool->room;
    length = spool->is_full ? *spool->room : length;
    while (length && spool->fd >= 0) {
        ssize_t written = write(spool->fd, data, length);
        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0) {
            remove_file(spool);
            return;
        }
        spool->length += (size_t)written;
        *spool->room -= (size_t)written;
        data += written;
        length -= (size_t)written;
    }
}

size_t spool_end(struct spool *spool, bool is_needed)
{
    if (spool->has_begun && spool->fd >= 0) {
        if (is_needed)
            close(spool->fd);
        else
            remove_file(spool);
    }
    free(spool->path);
    spool->path = NULL;
    spool->fd = -1;
    return spool->length;
}
