/* JSON from the host: all bytes are parsed or refused, and members of parsed values are found. */
#include <stdint.h>
#include <string.h>

#include "json.h"
#include "ledger.h"

static void visit(struct json *value)
{
    for (struct json *member = value->first; member; member = member->next) {
        if (member->name && strlen(member->name) == member->name_length)
            json_member(value, member->name);
        visit(member);
    }
    if (value->kind != JSON_TEXT)
        return;
    if (value->text[value->length])
        fault("a text has no end");
    if (json_to_native(value) && strlen(value->text) > value->length)
        fault("a text has grown");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ledger_begin();
    struct json *value = json_parse((const char *)data, size);
    if (value)
        visit(value);
    json_free(value);
    if (ledger_blocks())
        fault("%zu blocks of memory are left", ledger_blocks());
    ledger_end();
    return 0;
}
