/* Captures of command output: at most the cap is shown, however the output is split. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "capture.h"
#include "ledger.h"

static size_t next(const uint8_t **at, const uint8_t *end)
{
    return *at < end ? *(*at)++ : 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *at = data, *end = data + size;
    struct cap cap = {next(&at, end) << 4, next(&at, end)};
    cap.bytes += next(&at, end);
    size_t total = 0, shown = 0, length;
    ledger_begin();
    struct capture capture = capture_begin(cap);
    while (at < end) {
        size_t count = next(&at, end) << 3;
        count = count < (size_t)(end - at) ? count : (size_t)(end - at);
        size_t head = capture_feed(&capture, (const char *)at, count);
        if (head > count)
            fault("%zu of %zu bytes are shown", head, count);
        shown += head;
        total += count;
        at += count;
    }
    free(capture_tail(&capture, &length));
    if (shown + length > cap.bytes || shown + length != capture.shown_bytes)
        fault("%zu and %zu bytes are shown of %zu", shown, length, cap.bytes);
    if (capture.total_bytes != total || capture.shown_lines > capture.total_lines)
        fault("%zu bytes, and %zu lines of %zu are counted", capture.total_bytes,
              capture.shown_lines, capture.total_lines);
    capture_free(&capture);
    if (ledger_blocks())
        fault("%zu blocks of memory are left", ledger_blocks());
    ledger_end();
    return 0;
}
