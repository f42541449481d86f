#include "listing.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files.h"
#include "loop.h"
#include "memory.h"
#include "report.h"
#include "streams.h"
#include "sha256.h"

#define MAX_LISTING_BYTES (4u << 20)
/* Maximum work before other streams are served, in hashed bytes; an entry counts as ENTRY_BYTES. */
#define TURN_BYTES (sizeof scratch)
#define ENTRY_BYTES 1024u

struct directory {
    char *prefix; /* its path below the root: "" or ending with a slash */
    size_t depth; /* of its entries, from 1 */
    struct directory *next;
};

struct listing {
    struct stream *stream;
    char *root;
    size_t entries_left, bytes_left, max_depth;
    bool has_hashes, is_truncated, is_complete;
    off_t hash_bytes;  /* larger files are not hashed */
    double hash_end_s; /* no more hashing after this time of now_s() */
    struct directory *waiting; /* to be read, the last found first */
    struct directory *current;
    DIR *entries; /* of the current directory */
    int hash_fd; /* the file that is being hashed; -1: none */
    size_t hash_left;
    struct sha256 digest;
    struct buffer text; /* the last line is incomplete while its file is hashed */
};

static void leave_directory(struct listing *listing)
{
    if (listing->entries)
        closedir(listing->entries);
    free(listing->current->prefix);
    free(listing->current);
    listing->entries = NULL;
    listing->current = NULL;
}

static void add_directory(struct listing *listing, char *prefix, size_t depth)
{
    struct directory *directory = allocate(sizeof *directory);
    *directory = (struct directory){prefix, depth, listing->waiting};
    listing->waiting = directory;
}

static void enter_directory(struct listing *listing)
{
    listing->current = listing->waiting;
    if (!listing->current) {
        listing->is_complete = true;
        return;
    }
    listing->waiting = listing->current->next;
    char *path = format("%s/%s", listing->root, listing->current->prefix);
    int fd = open(path, READ_FLAGS | O_DIRECTORY);
    free(path);
    listing->entries = fd < 0 ? NULL : fdopendir(fd);
    if (fd >= 0 && !listing->entries)
        close(fd);
    if (!listing->entries)
        leave_directory(listing); /* removed or unreadable */
}

static void begin_hash(struct listing *listing, const char *name, off_t size)
{
    struct stat info;
    int fd = openat(dirfd(listing->entries), name, READ_FLAGS);
    if (fd < 0 || fstat(fd, &info) < 0 || !S_ISREG(info.st_mode)) {
        buffer_append_text(&listing->text, ", \"\"]\n");
        if (fd >= 0)
            close(fd);
        return;
    }
    listing->hash_fd = fd;
    listing->hash_left = (size_t)size; /* so that a growing file ends */
    listing->digest = sha256_begin();
}

/* Hash the next piece of the file; return its length. */
static size_t hash_next(struct listing *listing)
{
    size_t max_bytes = listing->hash_left < sizeof scratch ? listing->hash_left : sizeof scratch;
    bool is_late = now_s() >= listing->hash_end_s;
    ssize_t length = is_late ? -1 : read(listing->hash_fd, scratch, max_bytes);
    if (length > 0) {
        sha256_add(&listing->digest, scratch, (size_t)length);
        listing->hash_left -= (size_t)length;
        return (size_t)length;
    }
    char hex[SHA256_HEX_BYTES] = "";
    if (length == 0)
        sha256_end(&listing->digest, hex);
    buffer_printf(&listing->text, ", \"%s\"]\n", hex);
    close(listing->hash_fd);
    listing->hash_fd = -1;
    return 0;
}

/* Add the beginning of a line; return false if a limit is reached. */
static bool add_line(struct listing *listing, const char *path, const struct stat *info)
{
    static const char *const kinds[] = {"other", "file", "directory"};
    bool is_directory = S_ISDIR(info->st_mode);
    struct buffer line = {0};
    buffer_append_text(&line, "[");
    report_path(&line, path);
    buffer_printf(&line, ", \"%s\", %lld", kinds[is_directory ? 2 : S_ISREG(info->st_mode)],
                is_directory ? 0LL : (long long)info->st_size);
    bool has_room = listing->entries_left && line.length + 2 <= listing->bytes_left;
    if (has_room) {
        listing->entries_left--;
        listing->bytes_left -= line.length + 2;
        buffer_append(&listing->text, buffer_data(&line), line.length);
    }
    buffer_free(&line);
    return has_room;
}

static bool wants_hash(const struct listing *listing, const struct stat *info)
{
    return listing->has_hashes && S_ISREG(info->st_mode) &&
           info->st_size <= listing->hash_bytes && now_s() < listing->hash_end_s;
}

/* Return true if the path is short enough for the kernel to open. */
static bool has_path(const struct listing *listing, const char *name)
{
    size_t length = strlen(listing->root) + 1 + strlen(listing->current->prefix) + strlen(name);
    return length < PATH_MAX;
}

static void add_entry(struct listing *listing, const char *name)
{
    struct stat info;
    if (!has_path(listing, name) ||
        fstatat(dirfd(listing->entries), name, &info, AT_SYMLINK_NOFOLLOW) < 0)
        return;
    char *path = format("%s%s", listing->current->prefix, name);
    if (!add_line(listing, path, &info)) {
        listing->is_truncated = listing->is_complete = true;
    } else if (wants_hash(listing, &info)) {
        begin_hash(listing, name, info.st_size);
    } else {
        buffer_append_text(&listing->text, "]\n");
        if (S_ISDIR(info.st_mode) && listing->current->depth < listing->max_depth)
            add_directory(listing, format("%s/", path), listing->current->depth + 1);
    }
    free(path);
}

/* Do one step; return its cost in bytes. */
static size_t list_step(struct listing *listing)
{
    if (listing->hash_fd >= 0)
        return hash_next(listing);
    if (!listing->current) {
        enter_directory(listing);
        return ENTRY_BYTES;
    }
    const struct dirent *entry = readdir(listing->entries);
    if (!entry)
        leave_directory(listing);
    else if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
        add_entry(listing, entry->d_name);
    return ENTRY_BYTES;
}

static void list_free(void *owner)
{
    struct listing *listing = owner;
    if (listing->current)
        leave_directory(listing);
    for (struct directory *next; listing->waiting; listing->waiting = next) {
        next = listing->waiting->next;
        free(listing->waiting->prefix);
        free(listing->waiting);
    }
    if (listing->hash_fd >= 0)
        close(listing->hash_fd);
    buffer_free(&listing->text);
    free(listing->root);
    free(listing);
}

static enum pump_result list_send(void *owner, size_t credit)
{
    struct listing *listing = owner;
    size_t done = 0;
    while (!listing->is_complete && listing->text.length < credit && done < TURN_BYTES)
        done += list_step(listing);
    size_t length = listing->text.length < credit ? listing->text.length : credit;
    if (length == credit || (length && listing->is_complete)) {
        stream_send(listing->stream, FRAME_DATA, buffer_data(&listing->text), length);
        buffer_consume(&listing->text, length);
        return PUMP_MORE;
    }
    if (!listing->is_complete)
        return PUMP_MORE;
    struct buffer report = {0};
    report_begin(&report);
    report_flag(&report, "truncated", listing->is_truncated);
    report_end(&report);
    stream_finish(listing->stream, &report);
    list_free(listing);
    return PUMP_CLOSED;
}

static const struct operation listing_operation = {ignore_data, ignore_end, list_send, list_free,
                                                    NULL};

void list_begin(struct stream *stream, struct json **request)
{
    struct stat info;
    const char *path = path_or_fail(stream, *request);
    if (!path)
        return;
    int error = lstat(path, &info) < 0 ? errno : S_ISDIR(info.st_mode) ? 0 : ENOTDIR;
    if (error) {
        stream_fail_errno(stream, error, path);
        return;
    }
    bool is_deep = !json_member(*request, "max_depth");
    bool has_hashes = json_member(*request, "hash_bytes");
    struct listing *listing = allocate(sizeof *listing);
    *listing = (struct listing){
        .stream = stream,
        .root = format("%s", path),
        .entries_left = json_count(*request, "max_entries"),
        .bytes_left = MAX_LISTING_BYTES,
        .max_depth = is_deep ? (size_t)-1 : json_count(*request, "max_depth"),
        .has_hashes = has_hashes,
        .hash_fd = -1,
    };
    if (has_hashes) {
        listing->hash_bytes = (off_t)json_count(*request, "hash_bytes");
        listing->hash_end_s = now_s() + json_number(*request, "hash_s");
    }
    add_directory(listing, format("%s", ""), 1);
    stream_attach(stream, &listing_operation, listing);
    stream_ready(stream);
}
