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

#include "memory.h"

/* Linux allows 128 KiB in one argument; a longer command is read from a file. */
#define MAX_ARGUMENT_BYTES 100000u
#define LAST_LINE ": whole\n" /* the last line of every snapshot */

/* `set --` hides the script's argument from the command. The script is one line, so that bash
   numbers the command's lines from 1. The save runs at most twice: as EXIT trap, and for commands
   that replace the trap. */
#define RESTORE                                                                                    \
    "builtin source %s >/dev/null 2>&1; builtin hash -r; [[ $PWD -ef . ]] || "                     \
    "{ builtin cd -P .; builtin echo \"bash: the directory was removed, this is $PWD\" >&2; }"
#define SAVE                                                                                       \
    "{ builtin set -- \"$?\"; builtin set +eux; builtin trap - DEBUG ERR RETURN; [[ -e %s ]] || "  \
    "{ builtin printf 'builtin cd -- %%q\\n' \"$PWD\"; builtin umask -p; builtin shopt -p; "       \
    "builtin declare -p; builtin echo 'builtin set +o posix'; builtin declare -f; "                \
    "builtin echo ': whole'; } >%s; } 2>/dev/null"

static char *const *environment;
static char *bash; /* NULL: use sh */
static char *directory, *state;
static unsigned commands_started, commits;

static bool is_directory(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

static bool is_program(const char *path)
{
    struct stat info;
    return access(path, X_OK) == 0 && stat(path, &info) == 0 && S_ISREG(info.st_mode);
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

/* Remove NULs, which bash rejects, and replace surrogates by `?`; return the length. */
static size_t sanitize_text(char *text, size_t length)
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

bool shell_command_parse(struct shell_command *command, const struct json *request)
{
    const struct json *text = json_require(request, "command", JSON_TEXT);
    const struct json *cwd = json_member(request, "cwd");
    const char *shell_state = json_require(request, "shell_state", JSON_TEXT)->text;
    command->env = json_require(request, "env", JSON_OBJECT);
    command->has_state = strcmp(shell_state, "snapshot") == 0;
    command->cwd = cwd && cwd->length ? cwd->text : NULL;
    command->text = text->text;
    command->length = sanitize_text(text->text, text->length);
    if (cwd && !json_to_native(cwd))
        return false;
    for (const struct json *value = command->env->first; value; value = value->next) {
        bool has_valid_name = strlen(value->name) == value->name_length;
        if (!has_valid_name || value->kind != JSON_TEXT || !json_to_native(value))
            return false;
    }
    return true;
}

static void add_quoted(struct buffer *out, const char *text)
{
    buffer_append(out, "'", 1);
    for (; *text; text++)
        if (*text == '\'')
            buffer_append_text(out, "'\\''");
        else
            buffer_append(out, text, 1);
    buffer_append(out, "'", 1);
}

/* Return the script that the shell runs; `$1` is the command. */
static struct buffer write_script(const struct shell_command *command, bool has_terminal,
                                  bool restore, const char *snapshot)
{
    struct buffer script = {0};
    if (has_terminal)
        buffer_append_text(&script, "exec 0<&3 3<&-; ");
    char *save = snapshot ? format(SAVE, snapshot, snapshot) : NULL;
    if (bash)
        buffer_append_text(&script, "unset BASH_EXECUTION_STRING; shopt -s expand_aliases; ");
    if (restore)
        buffer_printf(&script, RESTORE "; ", state);
    if (command->cwd) {
        buffer_append_text(&script, "cd -- ");
        add_quoted(&script, command->cwd);
        buffer_append_text(&script, " || exit; ");
    }
    for (const struct json *value = command->env->first; value; value = value->next) {
        buffer_printf(&script, "export %s=", value->name);
        add_quoted(&script, value->text);
        buffer_append_text(&script, "; ");
    }
    if (save) {
        buffer_append_text(&script, "trap ");
        add_quoted(&script, save);
        buffer_append_text(&script, " EXIT; ");
    }
    buffer_printf(&script, "%seval \"set -- ; $1\"", bash ? "builtin " : "");
    if (save)
        buffer_printf(&script, "; %s; builtin exit \"$1\"", save);
    buffer_append(&script, "", 1);
    free(save);
    return script;
}

/* Write a new file. An existing one is removed: a FIFO put there would block the agent. */
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

/* Set the argument to the command, or to a command that reads a long one from a file. */
static int write_argument(const struct shell_command *command, char **argument)
{
    if (command->length <= MAX_ARGUMENT_BYTES) {
        *argument = format("%s", command->text);
        return 0;
    }
    char *path = format("%s/%u.command", directory, commands_started);
    int error = write_file(path, command->text, command->length);
    *argument = format(bash ? "builtin eval \"$(<%s)\"" : ". %s", path);
    free(path);
    return error;
}

static int run_shell(const char *script, char *argument, bool has_snapshot, const int stdio[4],
                     struct child *child,
                     void (*on_child_exit)(void *owner, const struct child_exit *status),
                     void *owner)
{
    char *shell = bash ? bash : "/bin/sh";
    char *const with_bash[] = {shell, "--noprofile", "--norc", "-c", (char *)script, "bash",
                               argument, NULL};
    char *const with_sh[] = {shell, "-c", (char *)script, "bash", argument, NULL};
    char *const nothing[] = {NULL};
    const struct program program = {
        .path = shell,
        .argv = bash ? with_bash : with_sh,
        /* A snapshot has all variables; those that were unset must stay unset. */
        .env = has_snapshot ? nothing : environment,
        .stdio = {stdio[0], stdio[1], stdio[2], stdio[3]},
    };
    return process_start(&program, child, on_child_exit, owner);
}

int shell_start(const struct shell_command *command, const int stdio[4], struct child *child,
                void (*on_child_exit)(void *owner, const struct child_exit *status), void *owner,
                char **snapshot)
{
    commands_started++;
    if (!is_directory(directory)) { /* a command has removed it */
        int error = make_private_directory();
        if (error)
            return error;
    }
    bool has_state = bash && command->has_state;
    bool has_snapshot = has_state && access(state, F_OK) == 0;
    bool is_saved = has_state && !command->cwd && !command->env->first;
    char *argument;
    int error = write_argument(command, &argument);
    char *place = is_saved ? format("%s/%u", directory, commands_started) : NULL;
    if (!error) {
        struct buffer script = write_script(command, stdio[3] >= 0, has_snapshot, place);
        error = run_shell(buffer_data(&script), argument, has_snapshot, stdio, child, on_child_exit,
                          owner);
        buffer_free(&script);
    }
    free(argument);
    if (error) {
        free(place);
        place = NULL;
    }
    *snapshot = place;
    return error;
}

/* Return true if a snapshot is complete; a full disk can cut it short. */
static bool is_complete(const char *snapshot)
{
    char end[sizeof LAST_LINE - 1];
    int fd = open(snapshot, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return false;
    bool is_read = lseek(fd, -(off_t)sizeof end, SEEK_END) >= 0 &&
                   read(fd, end, sizeof end) == (ssize_t)sizeof end;
    close(fd);
    return is_read && memcmp(end, LAST_LINE, sizeof end) == 0;
}

void shell_commit(const char *snapshot, bool keep)
{
    if (!snapshot)
        return;
    if (keep && is_complete(snapshot) && rename(snapshot, state) == 0)
        commits++;
    else
        unlink(snapshot);
}

unsigned shell_commits(void)
{
    return commits;
}
