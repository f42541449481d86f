#include "reading.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "files.h"
#include "memory.h"
#include "report.h"

static void remove_file(struct output_file *file)
{
    close(file->fd);
    unlink(file->path);
    *file->left += file->length;
    file->fd = -1;
    file->length = 0;
}

/* Begin the file. The caller adds the output so far. */
static void output_file_begin(struct output_file *file)
{
    char *parent = format("%s", file->path);
    char *slash = strrchr(parent, '/');
    if (slash)
        slash[1] = 0;
    int error = slash ? make_directories(parent) : ENOENT;
    free(parent);
    file->has_begun = true;
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
    file->fd = error || !*file->left ? -1 : open(file->path, flags, 0644);
}

/* Append while the command may keep more; after the limit was reached, append nothing. */
static void output_file_append(struct output_file *file, const char *data, size_t length)
{
    if (file->is_full)
        return;
    file->is_full = length > *file->left;
    length = file->is_full ? *file->left : length;
    while (length && file->fd >= 0) {
        ssize_t written = write(file->fd, data, length);
        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0) {
            remove_file(file);
            return;
        }
        file->length += (size_t)written;
        *file->left -= (size_t)written;
        data += written;
        length -= (size_t)written;
    }
}

/* Close the file, or remove it if it is not needed; return its length, 0 if there is none. */
static size_t output_file_end(struct output_file *file, bool is_needed)
{
    if (file->has_begun && file->fd >= 0) {
        if (is_needed)
            close(file->fd);
        else
            remove_file(file);
    }
    free(file->path);
    file->path = NULL;
    file->fd = -1;
    return file->length;
}

struct piece {
    enum frame_type type;
    size_t length;
};

static const enum frame_type heads[OUTPUTS] = {FRAME_DATA, FRAME_STDERR};
static const enum frame_type tails[OUTPUTS] = {FRAME_TAIL, FRAME_STDERR_TAIL};

static const char *const output_names[OUTPUTS] = {"stdout", "stderr"};

struct reading *reading_new(unsigned number, struct cap cap, struct keep keep)
{
    struct reading *reading = allocate(sizeof *reading);
    reading->number = number;
    reading->cap = cap;
    reading->keep = keep;
    for (int n = 0; n < OUTPUTS; n++)
        reading->captures[n] = capture_begin(cap);
    return reading;
}

static struct piece piece_at(const struct reading *reading, size_t offset)
{
    struct piece piece;
    memcpy(&piece, buffer_data(&reading->pieces) + offset, sizeof piece);
    return piece;
}

/* Add output to deliver; append it to the last piece if that has the same type. */
static void add_piece(struct reading *reading, enum frame_type type, const char *data,
                      size_t length)
{
    struct piece piece = {type, 0};
    if (length == 0)
        return;
    if (reading->pieces.length && piece_at(reading, reading->last_piece).type == type) {
        piece = piece_at(reading, reading->last_piece);
    } else {
        reading->last_piece = reading->pieces.length;
        buffer_append(&reading->pieces, &piece, sizeof piece);
    }
    piece.length += length;
    memcpy(buffer_data(&reading->pieces) + reading->last_piece, &piece, sizeof piece);
    buffer_append(&reading->pieces, data, length);
}

/* Write output past the head to a file, which begins with the head. */
static void write_to_file(struct reading *reading, enum output output, const char *data,
                       size_t length)
{
    struct output_file *file = &reading->files[output];
    if (!file->has_begun) {
        file->path = format("%s-%u.%s", reading->keep.name, reading->number, output_names[output]);
        file->left = reading->keep.left;
        output_file_begin(file);
        for (size_t offset = 0; offset < reading->pieces.length;) {
            struct piece piece = piece_at(reading, offset);
            offset += sizeof piece;
            if (piece.type == heads[output])
                output_file_append(file, buffer_data(&reading->pieces) + offset, piece.length);
            offset += piece.length;
        }
    }
    output_file_append(file, data, length);
}

bool reading_feed(struct reading *reading, enum output output, const char *data, size_t length)
{
    size_t head = capture_feed(&reading->captures[output], data, length);
    add_piece(reading, heads[output], data, head);
    if (head < length && reading->keep.name)
        write_to_file(reading, output, data + head, length - head);
    return head > 0;
}

size_t reading_total(const struct reading *reading)
{
    return reading->captures[STDOUT_OUTPUT].total_bytes +
           reading->captures[STDERR_OUTPUT].total_bytes;
}

static void end_capture(struct reading *reading, enum output output)
{
    static const char *const byte_counts[OUTPUTS] = {"stdout_bytes", "stderr_bytes"};
    static const char *const line_counts[OUTPUTS] = {"stdout_omitted_lines",
                                                     "stderr_omitted_lines"};
    static const char *const kept_counts[OUTPUTS] = {"stdout_kept_bytes", "stderr_kept_bytes"};
    struct capture *capture = &reading->captures[output];
    size_t length;
    char *tail = capture_tail(capture, &length);
    add_piece(reading, tails[output], tail, length);
    free(tail);
    size_t omitted = capture->total_lines - capture->shown_lines;
    report_count(&reading->report, byte_counts[output], (long long)capture->total_bytes);
    report_count(&reading->report, line_counts[output], (long long)omitted);
    bool is_cut = capture->shown_bytes < capture->total_bytes;
    size_t kept = output_file_end(&reading->files[output], is_cut);
    report_count(&reading->report, kept_counts[output], (long long)kept);
    capture_free(capture);
}

void reading_end(struct reading *reading, const struct outcome *outcome)
{
    struct buffer *report = &reading->report;
    report_begin(report);
    report_count(report, "exit_code", outcome->exit_code);
    report_flag(report, "timed_out", outcome->timed_out);
    report_number(report, "duration_s", outcome->duration_s);
    report_number(report, "cpu_s", outcome->cpu_s);
    report_count(report, "peak_memory_bytes", outcome->peak_memory_bytes);
    report_flag(report, "running", outcome->is_running);
    report_flag(report, "waiting", outcome->is_waiting);
    report_count(report, "oom_kills", outcome->oom_kills);
    report_count(report, "pids_refused", outcome->pids_refused);
    for (int n = 0; n < OUTPUTS; n++)
        end_capture(reading, n);
    report_count(report, "reading", reading->number);
    report_end(report);
    reading->has_ended = true;
}

size_t reading_next(const struct reading *reading, struct cursor *cursor, size_t max_bytes,
                    enum frame_type *type, const char **data)
{
    if (cursor->piece == reading->pieces.length)
        return 0;
    struct piece piece = piece_at(reading, cursor->piece);
    size_t next = cursor->piece + sizeof piece + piece.length;
    if (cursor->offset == piece.length) {
        if (next == reading->pieces.length)
            return 0; /* it may still grow */
        *cursor = (struct cursor){next, 0};
        piece = piece_at(reading, next);
    }
    size_t left = piece.length - cursor->offset;
    size_t length = left < max_bytes ? left : max_bytes;
    *type = piece.type;
    *data = buffer_data(&reading->pieces) + cursor->piece + sizeof piece + cursor->offset;
    cursor->offset += length;
    return length;
}

void reading_free(struct reading *reading)
{
    if (!reading)
        return;
    for (int n = 0; n < OUTPUTS; n++) {
        capture_free(&reading->captures[n]);
        if (reading->files[n].path)
            output_file_end(&reading->files[n], true);
    }
    buffer_free(&reading->pieces);
    buffer_free(&reading->report);
    free(reading);
}
