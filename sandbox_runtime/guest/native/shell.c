#include "shell.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bytes.h"
#include "memory.h"

/* Linux allows 128 KiB in one argument; a longer command is read from a file. */
#define MAX_ARGUMENT_BYTES 100000u
#define WHOLE ": whole\n" /* the last line of every snapshot */

/* `set --` hides our argument from the command. All is one line, so bash counts the command's
   lines from 1. The save runs twice at most: as EXIT trap, and for commands that replace it. */
#define RESTORE                                                                                    \
    "builtin source %s >/dev/null 2>&1; builtin hash -r; [[ $PWD -ef . ]] || "                     \
    "{ builtin cd -P .; builtin echo \"bash: the directory was removed, this is $PWD\" >&2; }"
#define SAVE                                                                                       \
    "{ builtin set -- \"$?\"; builtin set +eux; builtin trap - DEBUG ERR RETURN; [[ -e %s ]] || "  \
    "{ builtin printf 'builtin cd -- %%q\\n' \"$PWD\"; builtin umask -p; builtin shopt -p; "       \
    "builtin declare -p; builtin echo 'builtin set +o posix'; builtin declare -f; "                \
    "builtin echo ': whole'; } >%s; } 2>/dev/null"

static char *const *environment;
static char *bash; /* NULL: there is only sh */
static char *directory, *state;
static unsigned started, commits;

static bool is_directory(const char *path)
{
    struct stat facts;
    return stat(path, &facts) == 0 && S_ISDIR(facts.st_mode);
}

static bool is_program(const char *path)
{
    struct stat facts;
    return access(path, X_OK) == 0 && stat(path, &facts) == 0 && S_ISREG(facts.st_mode);
}

static const char *search_path(char *const *env)
{
    for (; *env; env++)
        if (strncmp(*env, "PATH=", 5) == 0)
            return *env + 5;
    return "/bin:/usr/bin";
}

char *find_program(const char *name, char *const *env)
{
    if (*name == '/')
        return is_program(name) ? format("%s", name) : NULL;
    for (const char *at = search_path(env);;) {
        size_t length = strcspn(at, ":");
        char *path = format("%.*s%s%s", (int)length, at, length ? "/" : "", name);
        if (is_program(path))
            return path;
        free(path);
        if (!at[length])
            return NULL;
        at += length + 1;
    }
}

static int make_private_directory(void)
{
    static const char *const places[] = {"/run", "/var/tmp", "/tmp"};
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, 0) != sizeof number)
        return errno;
    for (size_t n = 0; n < sizeof places / sizeof *places; n++) {
        char *path = format("%s/.shell-%016llx", places[n], (unsigned long long)number);
        if (mkdir(path, 0700) == 0) {
            free(directory);
            free(state);
            directory = path;
            state = format("%s/state", path);
            return 0;
        }
        free(path);
    }
    return errno;
}

void shell_begin(char *const *env)
{
    environment = env;
    bash = find_program("bash", env);
    int error = make_private_directory();
    if (error)
        die("no writable directory in /run, /var/tmp or /tmp: %s", strerror(error));
}

/* A command's text as bash takes it: without NULs, and with `?` for a surrogate. */
static size_t clean_command(char *text, size_t length)
{
    size_t kept = 0;
    for (size_t n = 0; n < length; n++) {
        bool is_surrogate = n + 2 < length && (unsigned char)text[n] == 0xED &&
                            (unsigned char)text[n + 1] >= 0xA0;
        if (is_surrogate)
            n += 2;
        if (is_surrogate || text[n])
            text[kept++] = is_surrogate ? '?' : text[n];
    }
    text[kept] = 0;
    return kept;
}

bool order_read(struct order *order, const struct json *request)
{
    const struct json *command = json_need(request, "command", JSON_TEXT);
    const struct json *cwd = json_member(request, "cwd");
    order->env = json_need(request, "env", JSON_OBJECT);
    order->has_state = strcmp(json_need(request, "shell_state", JSON_TEXT)->text, "snapshot") == 0;
    order->cwd = cwd && cwd->length ? cwd->text : NULL;
    order->command = command->text;
    order->command_length = clean_command(command->text, command->length);
    if (cwd && !json_to_native(cwd))
        return false;
    for (const struct json *value = order->env->first; value; value = value->next) {
        bool has_name = strlen(value->name) == value->name_length;
        if (!has_name || value->kind != JSON_TEXT || !json_to_native(value))
            return false;
    }
    return true;
}

static void add_quoted(struct bytes *out, const char *text)
{
    bytes_add(out, "'", 1);
    for (; *text; text++)
        if (*text == '\'')
            bytes_add_text(out, "'\\''");
        else
            bytes_add(out, text, 1);
    bytes_add(out, "'", 1);
}

/* What the shell runs; `$1` is the command. */
static struct bytes write_script(const struct order *order, bool has_terminal, bool restore,
                                 const char *snapshot)
{
    struct bytes script = {0};
    if (has_terminal)
        bytes_add_text(&script, "exec 0<&3 3<&-; ");
    char *save = snapshot ? format(SAVE, snapshot, snapshot) : NULL;
    if (bash)
        bytes_add_text(&script, "unset BASH_EXECUTION_STRING; shopt -s expand_aliases; ");
    if (restore)
        bytes_print(&script, RESTORE "; ", state);
    if (order->cwd) {
        bytes_add_text(&script, "cd -- ");
        add_quoted(&script, order->cwd);
        bytes_add_text(&script, " || exit; ");
    }
    for (const struct json *value = order->env->first; value; value = value->next) {
        bytes_print(&script, "export %s=", value->name);
        add_quoted(&script, value->text);
        bytes_add_text(&script, "; ");
    }
    if (save) {
        bytes_add_text(&script, "trap ");
        add_quoted(&script, save);
        bytes_add_text(&script, " EXIT; ");
    }
    bytes_print(&script, "%seval \"set -- ; $1\"", bash ? "builtin " : "");
    if (save)
        bytes_print(&script, "; %s; builtin exit \"$1\"", save);
    bytes_add(&script, "", 1);
    free(save);
    return script;
}

/* A new file: what a command has put there, a pipe perhaps, would hold us up. */
static int write_file(const char *path, const char *data, size_t length)
{
    unlink(path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return errno;
    int error = 0;
    while (length && !error) {
        ssize_t count = write(fd, data, length);
        error = count < 0 ? errno : 0;
        data += count < 0 ? 0 : count;
        length -= count < 0 ? 0 : (size_t)count;
    }
    close(fd);
    return error;
}

/* The command as an argument; a long one becomes one that reads it. */
static int write_argument(const struct order *order, char **argument)
{
    if (order->command_length <= MAX_ARGUMENT_BYTES) {
        *argument = format("%s", order->command);
        return 0;
    }
    char *path = format("%s/%u.command", directory, started);
    int error = write_file(path, order->command, order->command_length);
    *argument = format(bash ? "builtin eval \"$(<%s)\"" : ". %s", path);
    free(path);
    return error;
}

static int run_shell(const char *script, char *argument, bool is_restored, const int stdio[4],
                     struct child *child,
                     void (*ended)(void *owner, const struct ending *ending), void *owner)
{
    char *shell = bash ? bash : "/bin/sh";
    char *const with_bash[] = {shell, "--noprofile", "--norc", "-c", (char *)script, "bash",
                               argument, NULL};
    char *const with_sh[] = {shell, "-c", (char *)script, "bash", argument, NULL};
    char *const nothing[] = {NULL};
    const struct program program = {
        .path = shell,
        .argv = bash ? with_bash : with_sh,
        /* A snapshot holds the whole environment, and what was unset must stay so. */
        .env = is_restored ? nothing : environment,
        .stdio = {stdio[0], stdio[1], stdio[2], stdio[3]},
    };
    return process_start(&program, child, ended, owner);
}

int shell_start(const struct order *order, const int stdio[4], struct child *child,
                void (*ended)(void *owner, const struct ending *ending), void *owner,
                char **snapshot)
{
    started++;
    if (!is_directory(directory)) { /* a command has removed it */
        int error = make_private_directory();
        if (error)
            return error;
    }
    bool has_state = bash && order->has_state;
    bool is_restored = has_state && access(state, F_OK) == 0;
    bool is_saved = has_state && !order->cwd && !order->env->first;
    char *argument;
    int error = write_argument(order, &argument);
    char *place = is_saved ? format("%s/%u", directory, started) : NULL;
    if (!error) {
        struct bytes script = write_script(order, stdio[3] >= 0, is_restored, place);
        error = run_shell(bytes_front(&script), argument, is_restored, stdio, child, ended, owner);
        bytes_free(&script);
    }
    free(argument);
    if (error) {
        free(place);
        place = NULL;
    }
    *snapshot = place;
    return error;
}

/* Whether a snapshot was written to its end, which a full disk prevents. */
static bool is_whole(const char *snapshot)
{
    char end[sizeof WHOLE - 1];
    int fd = open(snapshot, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return false;
    bool is_read = lseek(fd, -(off_t)sizeof end, SEEK_END) >= 0 &&
                   read(fd, end, sizeof end) == (ssize_t)sizeof end;
    close(fd);
    return is_read && memcmp(end, WHOLE, sizeof end) == 0;
}

void shell_commit(const char *snapshot, bool keep)
{
    if (!snapshot)
        return;
    if (keep && is_whole(snapshot) && rename(snapshot, state) == 0)
        commits++;
    else
        unlink(snapshot);
}

unsigned shell_commits(void)
{
    return commits;
}
