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
#include "scratch.h"
#include "sha256.h"

#define MAX_LISTING_BYTES (4u << 20)
/* How much is done before others have their turn: bytes hashed, and so many for an entry. */
#define TURN_BYTES (sizeof scratch)
#define ENTRY_BYTES 1024u

struct directory {
    char *prefix; /* its path below the root, "" or ending with a slash */
    size_t depth; /* of what is in it, from 1 */
    struct directory *next;
};

struct listing {
    struct stream *stream;
    char *root;
    size_t entries_left, bytes_left, max_depth;
    bool has_hashes, is_truncated, is_complete;
    off_t hash_bytes;   /* a larger file is not hashed */
    double hash_end_s; /* nothing is hashed after that, by the loop's clock */
    struct directory *waiting; /* to be read, the last found first */
    struct directory *current;
    DIR *entries; /* of the current one */
    int hashed; /* the file being hashed; -1: none */
    size_t hash_left;
    struct sha256 digest;
    struct bytes text; /* the last line lacks its end while its file is hashed */
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
        leave_directory(listing); /* gone or unreadable since its parent was read */
}

static void begin_hash(struct listing *listing, const char *name, off_t size)
{
    struct stat facts;
    int fd = openat(dirfd(listing->entries), name, READ_FLAGS);
    if (fd < 0 || fstat(fd, &facts) < 0 || !S_ISREG(facts.st_mode)) {
        bytes_add_text(&listing->text, ", \"\"]\n");
        if (fd >= 0)
            close(fd);
        return;
    }
    listing->hashed = fd;
    listing->hash_left = (size_t)size; /* a file that grows for ever has an end here */
    listing->digest = sha256_begin();
}

/* Hash the next piece of the file; returns how many bytes. */
static size_t hash_on(struct listing *listing)
{
    size_t most = listing->hash_left < sizeof scratch ? listing->hash_left : sizeof scratch;
    bool is_late = now_s() >= listing->hash_end_s;
    ssize_t length = is_late ? -1 : read(listing->hashed, scratch, most);
    if (length > 0) {
        sha256_add(&listing->digest, scratch, (size_t)length);
        listing->hash_left -= (size_t)length;
        return (size_t)length;
    }
    char hex[SHA256_HEX_BYTES] = "";
    if (length == 0)
        sha256_end(&listing->digest, hex);
    bytes_print(&listing->text, ", \"%s\"]\n", hex);
    close(listing->hashed);
    listing->hashed = -1;
    return 0;
}

/* Write a line; false if there is no room for it. */
static bool add_line(struct listing *listing, const char *path, const struct stat *facts)
{
    static const char *const kinds[] = {"other", "file", "directory"};
    bool is_directory = S_ISDIR(facts->st_mode);
    struct bytes line = {0};
    bytes_add_text(&line, "[");
    report_path(&line, path);
    bytes_print(&line, ", \"%s\", %lld", kinds[is_directory ? 2 : S_ISREG(facts->st_mode)],
                is_directory ? 0LL : (long long)facts->st_size);
    bool has_room = listing->entries_left && line.length + 2 <= listing->bytes_left;
    if (has_room) {
        listing->entries_left--;
        listing->bytes_left -= line.length + 2;
        bytes_add(&listing->text, bytes_front(&line), line.length);
    }
    bytes_free(&line);
    return has_room;
}

static bool wants_hash(const struct listing *listing, const struct stat *facts)
{
    return listing->has_hashes && S_ISREG(facts->st_mode) &&
           facts->st_size <= listing->hash_bytes && now_s() < listing->hash_end_s;
}

/* Whether a path leads to it: what lies deeper could be listed, but never read. */
static bool has_path(const struct listing *listing, const char *name)
{
    size_t length = strlen(listing->root) + 1 + strlen(listing->current->prefix) + strlen(name);
    return length < PATH_MAX;
}

static void add_entry(struct listing *listing, const char *name)
{
    struct stat facts;
    if (!has_path(listing, name) || fstatat(dirfd(listing->entries), name, &facts, AT_SYMLINK_NOFOLLOW) < 0)
        return;
    char *path = format("%s%s", listing->current->prefix, name);
    if (!add_line(listing, path, &facts)) {
        listing->is_truncated = listing->is_complete = true;
    } else if (wants_hash(listing, &facts)) {
        begin_hash(listing, name, facts.st_size);
    } else {
        bytes_add_text(&listing->text, "]\n");
        if (S_ISDIR(facts.st_mode) && listing->current->depth < listing->max_depth)
            add_directory(listing, format("%s/", path), listing->current->depth + 1);
    }
    free(path);
}

/* Do a little; returns how much it was, in bytes. */
static size_t take_step(struct listing *listing)
{
    if (listing->hashed >= 0)
        return hash_on(listing);
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

static void list_drop(void *owner)
{
    struct listing *listing = owner;
    if (listing->current)
        leave_directory(listing);
    for (struct directory *next; listing->waiting; listing->waiting = next) {
        next = listing->waiting->next;
        free(listing->waiting->prefix);
        free(listing->waiting);
    }
    if (listing->hashed >= 0)
        close(listing->hashed);
    bytes_free(&listing->text);
    free(listing->root);
    free(listing);
}

static enum pumped list_send(void *owner, size_t credit)
{
    struct listing *listing = owner;
    size_t done = 0;
    while (!listing->is_complete && listing->text.length < credit && done < TURN_BYTES)
        done += take_step(listing);
    size_t length = listing->text.length < credit ? listing->text.length : credit;
    if (length == credit || (length && listing->is_complete)) {
        stream_send(listing->stream, FRAME_DATA, bytes_front(&listing->text), length);
        bytes_drop(&listing->text, length);
        return PUMPED_SOME;
    }
    if (!listing->is_complete)
        return PUMPED_SOME;
    struct bytes report = {0};
    report_begin(&report);
    report_flag(&report, "truncated", listing->is_truncated);
    report_end(&report);
    stream_finish(listing->stream, &report);
    list_drop(listing);
    return PUMPED_LAST;
}

static const struct operation listed = {ignore_data, ignore_end, list_send, list_drop};

void list_begin(struct stream *stream, struct json **request)
{
    struct stat facts;
    const char *path = path_or_fail(stream, *request);
    if (!path)
        return;
    int error = lstat(path, &facts) < 0 ? errno : S_ISDIR(facts.st_mode) ? 0 : ENOTDIR;
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
        .hashed = -1,
    };
    if (has_hashes) {
        listing->hash_bytes = (off_t)json_count(*request, "hash_bytes");
        listing->hash_end_s = now_s() + json_number(*request, "hash_s");
    }
    add_directory(listing, format("%s", ""), 1);
    stream_attend(stream, &listed, listing);
    stream_ready(stream);
}
