#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "memory.h"
#include "report.h"
#include "streams.h"

#ifndef RENAME_EXCHANGE /* older versions of musl lack it */
#define RENAME_EXCHANGE (1 << 1)
#endif

const char *path_or_fail(struct stream *stream, const struct json *request)
{
    const struct json *path = json_require(request, "path", JSON_TEXT);
    if (json_to_native(path))
        return path->text;
    stream_fail(stream, "io", "the path is not valid");
    return NULL;
}

int make_directories(const char *path)
{
    struct stat info;
    char *made = format("%s", path);
    int error = 0;
    for (char *slash = made; slash && !error; *slash = '/') {
        slash = *slash ? strchr(slash + 1, '/') : NULL;
        if (slash)
            *slash = 0;
        if (*made && mkdir(made, 0777) < 0 && errno != EEXIST)
            error = errno;
        if (!slash)
            break;
    }
    if (!error && (stat(made, &info) < 0 || !S_ISDIR(info.st_mode)))
        error = ENOTDIR;
    free(made);
    return error;
}

static void finish_with_size(struct stream *stream, size_t size)
{
    struct buffer report = {0};
    report_begin(&report);
    report_count(&report, "bytes", (long long)size);
    report_end(&report);
    stream_finish(stream, &report);
}

/* put */

struct put {
    struct stream *stream;
    char *path, *temp_path;
    int fd;
    size_t bytes;
};

static void put_free(struct put *put)
{
    if (put->fd >= 0)
        close(put->fd);
    free(put->path);
    free(put->temp_path);
    free(put);
}

/* Remove the temporary file. */
static void put_drop(void *owner)
{
    struct put *put = owner;
    if (put->temp_path)
        unlink(put->temp_path); /* a command may have removed it already */
    put_free(put);
}

static void put_fail(struct put *put, int error)
{
    char *message = format("%s: %s", put->path, strerror(error));
    stream_fail(put->stream, "io", message);
    free(message);
    put_drop(put);
}

static void put_write(void *owner, const char *data, size_t length)
{
    struct put *put = owner;
    stream_grant_credit(put->stream, length);
    while (length) {
        ssize_t count = write(put->fd, data, length);
        if (count < 0) {
            put_fail(put, errno);
            return;
        }
        put->bytes += (size_t)count;
        data += count;
        length -= (size_t)count;
    }
}

static int exchange(const char *path, const char *other)
{
    return (int)syscall(SYS_renameat2, AT_FDCWD, path, AT_FDCWD, other, RENAME_EXCHANGE);
}

/* Move the temporary file to the target; return errno. ext4 writes a file to the disk, at the
   sandbox's limited speed, before `rename` lets it replace another. So the two are exchanged, and the
   old one is removed. Overlayfs copies a file of the image before an exchange, so a larger one is
   replaced by `rename`. Some file systems, and gVisor, cannot exchange files. */
static int put_move(const struct put *put)
{
    struct stat info;
    bool is_file = lstat(put->path, &info) == 0 && S_ISREG(info.st_mode);
    bool is_larger = is_file && (size_t)info.st_size > put->bytes;
    if (!is_file || is_larger || exchange(put->temp_path, put->path) < 0)
        return rename(put->temp_path, put->path) < 0 ? errno : 0;
    if (unlink(put->temp_path) < 0 && errno == EISDIR) { /* a command has put a directory there */
        exchange(put->temp_path, put->path);
        return EISDIR;
    }
    return 0;
}

/* Replace the target by the complete file. */
static void put_finish(void *owner)
{
    struct put *put = owner;
    struct stat info;
    bool is_there = stat(put->path, &info) == 0 && S_ISREG(info.st_mode);
    int error = is_there && fchmod(put->fd, info.st_mode & 07777) < 0 ? errno : put_move(put);
    if (error) {
        put_fail(put, error);
        return;
    }
    finish_with_size(put->stream, put->bytes);
    put_free(put);
}

static const struct operation putting = {put_write, put_finish, send_nothing, put_drop, NULL};

/* Open the temporary file beside the target; return errno. */
static int open_temp_file(struct put *put)
{
    uint64_t number = 0;
    const char *slash = strrchr(put->path, '/');
    char *parent = slash ? format("%.*s/", (int)(slash - put->path), put->path) : format("./");
    int error = make_directories(parent);
    if (!error && getrandom(&number, sizeof number, 0) != sizeof number)
        error = errno;
    if (!error) {
        char *temp_path = format("%s.put-%016llx", parent, (unsigned long long)number);
        put->fd = open(temp_path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
        error = put->fd < 0 ? errno : 0;
        put->temp_path = temp_path;
    }
    free(parent);
    return error;
}

void put_begin(struct stream *stream, struct json **request)
{
    struct stat info;
    const char *path = path_or_fail(stream, *request);
    if (!path)
        return;
    struct put *put = allocate(sizeof *put);
    *put = (struct put){.stream = stream, .path = format("%s", path), .fd = -1};
    bool exists = json_flag(*request, "new") && lstat(path, &info) == 0;
    bool is_directory = !exists && stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    int error = exists ? EEXIST : is_directory ? EISDIR : open_temp_file(put);
    if (error) {
        stream_fail_errno(stream, error, path);
        put_free(put);
        return;
    }
    stream_attach(stream, &putting, put);
}

/* get */

struct get {
    struct stream *stream;
    int fd;
    size_t left, sent;
};

static void get_drop(void *owner)
{
    struct get *get = owner;
    close(get->fd);
    free(get);
}

static enum pump_result get_send(void *owner, size_t credit)
{
    struct get *get = owner;
    ssize_t length = read(get->fd, scratch, credit);
    if (length > 0 && (size_t)length <= get->left) {
        get->left -= (size_t)length;
        get->sent += (size_t)length;
        stream_send(get->stream, FRAME_DATA, scratch, (size_t)length);
        return PUMP_MORE;
    }
    if (length < 0) /* an I/O error */
        stream_fail(get->stream, "io", strerror(errno));
    else if (length > 0)
        stream_fail(get->stream, "too_large", "the file grew while it was read");
    else
        finish_with_size(get->stream, get->sent);
    get_drop(get);
    return PUMP_CLOSED;
}

static const struct operation getting = {ignore_data, ignore_end, get_send, get_drop, NULL};

void get_begin(struct stream *stream, struct json **request)
{
    struct stat info;
    const char *path = path_or_fail(stream, *request);
    if (!path)
        return;
    size_t max_bytes = json_count(*request, "max_bytes");
    int fd = open(path, READ_FLAGS);
    int error = fd < 0 || fstat(fd, &info) < 0 ? errno : 0;
    if (!error && !S_ISREG(info.st_mode))
        error = EISDIR;
    if (error) {
        stream_fail_errno(stream, error, path);
    } else if ((size_t)info.st_size > max_bytes) {
        stream_fail(stream, "too_large", "the file is larger than max_bytes");
    } else {
        struct get *get = allocate(sizeof *get);
        *get = (struct get){stream, fd, max_bytes, 0};
        stream_attach(stream, &getting, get);
        stream_ready(stream);
        return;
    }
    if (fd >= 0)
        close(fd);
}
