#include "config.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "files.h"
#include "frames.h"
#include "memory.h"

extern char **environ;

static const struct {
    const char *name;
    int resource;
} limits[] = {
    {"RLIMIT_AS", RLIMIT_AS},           {"RLIMIT_CORE", RLIMIT_CORE},
    {"RLIMIT_CPU", RLIMIT_CPU},         {"RLIMIT_DATA", RLIMIT_DATA},
    {"RLIMIT_FSIZE", RLIMIT_FSIZE},     {"RLIMIT_MEMLOCK", RLIMIT_MEMLOCK},
    {"RLIMIT_MSGQUEUE", RLIMIT_MSGQUEUE}, {"RLIMIT_NICE", RLIMIT_NICE},
    {"RLIMIT_NOFILE", RLIMIT_NOFILE},   {"RLIMIT_NPROC", RLIMIT_NPROC},
    {"RLIMIT_RSS", RLIMIT_RSS},         {"RLIMIT_RTPRIO", RLIMIT_RTPRIO},
    {"RLIMIT_RTTIME", RLIMIT_RTTIME},   {"RLIMIT_SIGPENDING", RLIMIT_SIGPENDING},
    {"RLIMIT_STACK", RLIMIT_STACK},
};

/* Read exactly `length` bytes; exit at the end of input. */
static void read_exactly(char *data, size_t length)
{
    while (length) {
        ssize_t count = read(STDIN_FILENO, data, length);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            _exit(0);
        data += count;
        length -= (size_t)count;
    }
}

static bool is_named(const char *entry, const struct json *variable)
{
    size_t length = variable->name_length;
    return strncmp(entry, variable->name, length) == 0 && entry[length] == '=';
}

static bool is_replaced(const char *entry, const struct json *variables)
{
    for (const struct json *variable = variables->first; variable; variable = variable->next)
        if (is_named(entry, variable))
            return true;
    return false;
}

/* Return the agent's own variables, overridden by the configured ones. */
static char **make_env(const struct json *variables)
{
    size_t count = 0;
    for (char **entry = environ; *entry; entry++)
        count++;
    for (const struct json *variable = variables->first; variable; variable = variable->next)
        count++;
    char **env = allocate((count + 1) * sizeof *env), **end = env;
    for (char **entry = environ; *entry; entry++)
        if (!is_replaced(*entry, variables))
            *end++ = *entry;
    for (const struct json *variable = variables->first; variable; variable = variable->next) {
        if (variable->kind != JSON_TEXT || !json_to_native(variable))
            die("the configuration has an invalid variable %s", variable->name);
        *end++ = format("%s=%s", variable->name, variable->text);
    }
    return env;
}

struct config config_read(void)
{
    char header[4];
    read_exactly(header, sizeof header);
    size_t length = read_u32(header);
    if (length > MAX_FRAME_BYTES)
        die("a configuration of %zu bytes, at most %u allowed", length, MAX_FRAME_BYTES);
    char *text = allocate(length);
    read_exactly(text, length);
    struct json *root = json_parse(text, length);
    free(text);
    if (!root || root->kind != JSON_OBJECT)
        die("the configuration is not a JSON object");
    const struct json *token = json_member(root, "link_token");
    return (struct config){
        .root = root,
        .env = make_env(json_require(root, "env", JSON_OBJECT)),
        .working_dir = json_require(root, "working_dir", JSON_TEXT)->text,
        .watchdog_s = json_number(root, "watchdog_s"),
        .lifetime_s = json_number(root, "lifetime_s"),
        .egress_port = (int)json_count(root, "egress_port"),
        .link_token = token && token->kind == JSON_TEXT ? token->text : NULL,
    };
}

static void set_limit(const struct json *limit)
{
    rlim_t value = limit->number < 0 ? RLIM_INFINITY : (rlim_t)limit->number;
    for (size_t n = 0; n < sizeof limits / sizeof *limits; n++) {
        if (strcmp(limits[n].name, limit->name) != 0)
            continue;
        if (setrlimit(limits[n].resource, &(struct rlimit){value, value}) < 0)
            die("cannot set %s to %.0f: %s", limit->name, limit->number, strerror(errno));
        return;
    }
    die("unknown resource limit %s", limit->name);
}

void config_apply(const struct config *config)
{
    const struct json *directories = json_require(config->root, "directories", JSON_ARRAY);
    const struct json *rlimits = json_require(config->root, "rlimits", JSON_OBJECT);
    for (const struct json *limit = rlimits->first; limit; limit = limit->next)
        set_limit(limit);
    for (const struct json *path = directories->first; path; path = path->next) {
        int error = path->kind == JSON_TEXT ? make_directories(path->text) : EINVAL;
        if (error)
            die("cannot make the directory %s: %s", path->text, strerror(error));
    }
    if (chdir(config->working_dir) < 0)
        die("cannot change to the directory %s: %s", config->working_dir, strerror(errno));
}
