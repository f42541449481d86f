#include "reading.h"

#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "report.h"

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

static struct piece piece_at(const struct reading *reading, size_t place)
{
    struct piece piece;
    memcpy(&piece, bytes_front(&reading->pieces) + place, sizeof piece);
    return piece;
}

/* Deliver more: as part of the last piece where that is of the same type. */
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
        bytes_add(&reading->pieces, &piece, sizeof piece);
    }
    piece.length += length;
    memcpy(bytes_front(&reading->pieces) + reading->last_piece, &piece, sizeof piece);
    bytes_add(&reading->pieces, data, length);
}

/* What is past the head goes into a file too, which the head begins. */
static void keep_whole(struct reading *reading, enum output output, const char *data,
                       size_t length)
{
    struct spool *spool = &reading->spools[output];
    if (!spool->has_begun) {
        spool->path = format("%s-%u.%s", reading->keep.name, reading->number, output_names[output]);
        spool->room = reading->keep.room;
        spool_begin(spool);
        for (size_t place = 0; place < reading->pieces.length;) {
            struct piece piece = piece_at(reading, place);
            place += sizeof piece;
            if (piece.type == heads[output])
                spool_add(spool, bytes_front(&reading->pieces) + place, piece.length);
            place += piece.length;
        }
    }
    spool_add(spool, data, length);
}

bool reading_feed(struct reading *reading, enum output output, const char *data, size_t length)
{
    size_t head = capture_feed(&reading->captures[output], data, length);
    add_piece(reading, heads[output], data, head);
    if (head < length && reading->keep.name)
        keep_whole(reading, output, data + head, length - head);
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
    size_t kept = spool_end(&reading->spools[output], is_cut);
    report_count(&reading->report, kept_counts[output], (long long)kept);
    capture_free(capture);
}

void reading_end(struct reading *reading, const struct outcome *outcome)
{
    struct bytes *report = &reading->report;
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

size_t reading_next(const struct reading *reading, struct place *place, size_t most,
                    enum frame_type *type, const char **data)
{
    if (place->piece == reading->pieces.length)
        return 0;
    struct piece piece = piece_at(reading, place->piece);
    size_t next = place->piece + sizeof piece + piece.length;
    if (place->offset == piece.length) {
        if (next == reading->pieces.length)
            return 0; /* it may still grow */
        *place = (struct place){next, 0};
        piece = piece_at(reading, next);
    }
    size_t left = piece.length - place->offset;
    size_t length = left < most ? left : most;
    *type = piece.type;
    *data = bytes_front(&reading->pieces) + place->piece + sizeof piece + place->offset;
    place->offset += length;
    return length;
}

void reading_free(struct reading *reading)
{
    if (!reading)
        return;
    for (int n = 0; n < OUTPUTS; n++) {
        capture_free(&reading->captures[n]);
        if (reading->spools[n].path)
            spool_end(&reading->spools[n], true);
    }
    bytes_free(&reading->pieces);
    bytes_free(&reading->report);
    free(reading);
}
