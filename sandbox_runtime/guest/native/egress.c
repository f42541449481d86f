#include "egress.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "loop.h"
#include "memory.h"
#include "streams.h"

#define BACKLOG 128
#define MAX_CONNECTIONS 256
#define RETRY_S 0.1

struct connection {
    struct stream *stream;
    int fd;
    struct watch watch;
    bool is_waiting; /* for the program to write */
    struct buffer unwritten;
    bool program_has_finished; /* EOF was read from the program and sent to the host */
    bool host_has_finished;    /* EOF was received from the host */
    bool is_shut_down;         /* all data and EOF were passed to the program */
};

static struct watch listener;
static struct timer retry;
static int connections;

static void flush_input(struct connection *connection);

/* Opening and closing */

static void on_acceptable(void *unused);

static void resume_accepting(void *unused)
{
    (void)unused;
    if (connections < MAX_CONNECTIONS)
        watch(&listener, listener.fd, POLLIN, on_acceptable, NULL);
}

static void close_connection(struct connection *connection)
{
    unwatch(&connection->watch);
    close(connection->fd);
    buffer_free(&connection->unwritten);
    free(connection);
    connections--;
    resume_accepting(NULL);
}

/* Close a failed connection and reset its stream. */
static void abort_connection(struct connection *connection)
{
    stream_send_control(connection->stream, FRAME_RESET);
    stream_close(connection->stream);
    close_connection(connection);
}

/* Close the connection if both directions have ended; return true if so. */
static bool close_if_over(struct connection *connection)
{
    if (!connection->program_has_finished || !connection->is_shut_down)
        return false;
    stream_close(connection->stream);
    close_connection(connection);
    return true;
}

static void on_ready(void *owner)
{
    struct connection *connection = owner;
    if (connection->is_waiting) {
        connection->is_waiting = false;
        stream_ready(connection->stream);
    }
    flush_input(connection);
}

static void watch_connection(struct connection *connection)
{
    int reading = connection->is_waiting ? POLLIN : 0;
    int writing = connection->unwritten.length ? POLLOUT : 0;
    watch(&connection->watch, connection->fd, (short)(reading | writing), on_ready, connection);
}

/* From the program to the host */

static enum pump_result connection_send(void *owner, size_t credit)
{
    struct connection *connection = owner;
    if (connection->program_has_finished)
        return PUMP_IDLE;
    ssize_t length = recv(connection->fd, scratch, credit, 0);
    if (length > 0) {
        stream_send(connection->stream, FRAME_DATA, scratch, (size_t)length);
        return PUMP_MORE;
    }
    if (length == 0) {
        connection->program_has_finished = true;
        stream_send_control(connection->stream, FRAME_EOF);
        return close_if_over(connection) ? PUMP_CLOSED : PUMP_IDLE;
    }
    if (errno == EAGAIN || errno == EINTR) {
        connection->is_waiting = true;
        watch_connection(connection);
        return PUMP_IDLE;
    }
    abort_connection(connection);
    return PUMP_CLOSED;
}

/* From the host to the program */

/* Write as much as the program accepts; return false if that failed. */
static bool write_unwritten(struct connection *connection)
{
    while (connection->unwritten.length) {
        ssize_t count = send(connection->fd, buffer_data(&connection->unwritten),
                             connection->unwritten.length, MSG_NOSIGNAL);
        if (count < 0)
            return errno == EAGAIN || errno == EINTR;
        buffer_consume(&connection->unwritten, (size_t)count);
        stream_grant_credit(connection->stream, (size_t)count);
    }
    if (!connection->host_has_finished || connection->is_shut_down)
        return true;
    connection->is_shut_down = true;
    return shutdown(connection->fd, SHUT_WR) == 0;
}

static void flush_input(struct connection *connection)
{
    if (!write_unwritten(connection)) {
        abort_connection(connection);
        return;
    }
    watch_connection(connection);
    close_if_over(connection);
}

static void connection_feed(void *owner, const char *data, size_t length)
{
    struct connection *connection = owner;
    buffer_append(&connection->unwritten, data, length);
    flush_input(connection);
}

static void connection_finish_input(void *owner)
{
    struct connection *connection = owner;
    connection->host_has_finished = true;
    flush_input(connection);
}

static void connection_reset(void *owner)
{
    close_connection(owner);
}

static const struct operation forwarding = {connection_feed, connection_finish_input,
                                            connection_send, connection_reset, NULL};

/* Listening */

static void on_acceptable(void *unused)
{
    (void)unused;
    int fd = accept4(listener.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) { /* the program has left, or the agent is out of descriptors */
        watch(&listener, listener.fd, 0, on_acceptable, NULL);
        timer_set(&retry, RETRY_S, resume_accepting, NULL);
        return;
    }
    struct connection *connection = allocate(sizeof *connection);
    connection->fd = fd;
    connection->stream = stream_open_from_agent();
    stream_attach(connection->stream, &forwarding, connection);
    stream_ready(connection->stream);
    connections++;
    if (connections == MAX_CONNECTIONS)
        watch(&listener, listener.fd, 0, on_acceptable, NULL);
}

void egress_begin(int number)
{
    const struct sockaddr_in address = {
        .sin_family = AF_INET,
        .sin_port = htons((uint16_t)number),
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
    };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    if (bind(fd, (const struct sockaddr *)&address, sizeof address) < 0 || listen(fd, BACKLOG) < 0)
        close(fd); /* no loopback, or a program of the image has the port */
    else
        watch(&listener, fd, POLLIN, on_acceptable, NULL);
}
