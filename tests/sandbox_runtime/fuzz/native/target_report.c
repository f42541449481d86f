/* Reports with any output and file names are valid JSON, and a path can be parsed back. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "ledger.h"
#include "report.h"

static struct json *parse(struct buffer *report)
{
    struct json *value = json_parse(buffer_data(report), report->length);
    if (!value)
        fault("a report that is no JSON: %.*s", (int)report->length, buffer_data(report));
    buffer_free(report);
    return value;
}

static void check_words(const char *words, size_t length)
{
    struct buffer report = {0};
    report_begin(&report);
    report_text(&report, "words", words, length);
    report_count(&report, "length", (long long)length);
    report_end(&report);
    struct json *value = parse(&report);
    json_require(value, "words", JSON_TEXT);
    if (json_count(value, "length") != length)
        fault("a report says %zu for %zu", json_count(value, "length"), length);
    json_free(value);
}

static void check_path(const char *path)
{
    struct buffer report = {0};
    report_path(&report, path);
    struct json *value = parse(&report);
    if (!json_to_native(value) || strcmp(value->text, path) != 0)
        fault("a path comes back as another one");
    json_free(value);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *path = calloc(1, size + 1);
    memcpy(path, data, size);
    check_words((const char *)data, size);
    check_path(path);
    free(path);
    return 0;
}
