#include "egress.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "loop.h"
#include "memory.h"
#include "scratch.h"
#include "streams.h"

#define BACKLOG 128
#define MAX_CONNECTIONS 256
#define RETRY_S 0.1

struct connection {
    struct stream *stream;
    int fd;
    struct watch watch;
    bool waits_to_read;
    struct bytes unwritten;
    bool has_sent_all; /* the program has finished writing, and the host knows */
    bool host_ends;    /* the host has finished, */
    bool is_shut;      /* and the program knows */
};

static struct watch port;
static struct timer retry;
static int connections;

static void write_on(struct connection *connection);

/* Its life */

static void accept_on(void *nobody);

static void accept_again(void *nobody)
{
    (void)nobody;
    if (connections < MAX_CONNECTIONS)
        watch(&port, port.fd, POLLIN, accept_on, NULL);
}

static void close_connection(struct connection *connection)
{
    unwatch(&connection->watch);
    close(connection->fd);
    bytes_free(&connection->unwritten);
    free(connection);
    connections--;
    accept_again(NULL);
}

/* It has failed; the host is told. */
static void abort_connection(struct connection *connection)
{
    stream_tell(connection->stream, FRAME_RESET);
    stream_leave(connection->stream);
    close_connection(connection);
}

/* Whether it was over, both ways, and is gone. */
static bool close_if_over(struct connection *connection)
{
    if (!connection->has_sent_all || !connection->is_shut)
        return false;
    stream_leave(connection->stream);
    close_connection(connection);
    return true;
}

static void happened(void *owner)
{
    struct connection *connection = owner;
    if (connection->waits_to_read) {
        connection->waits_to_read = false;
        stream_ready(connection->stream);
    }
    write_on(connection);
}

static void watch_connection(struct connection *connection)
{
    int reading = connection->waits_to_read ? POLLIN : 0;
    int writing = connection->unwritten.length ? POLLOUT : 0;
    watch(&connection->watch, connection->fd, (short)(reading | writing), happened, connection);
}

/* From the program to the host */

static enum pumped connection_send(void *owner, size_t credit)
{
    struct connection *connection = owner;
    if (connection->has_sent_all)
        return PUMPED_ALL;
    ssize_t length = recv(connection->fd, scratch, credit, 0);
    if (length > 0) {
        stream_send(connection->stream, FRAME_DATA, scratch, (size_t)length);
        return PUMPED_SOME;
    }
    if (length == 0) {
        connection->has_sent_all = true;
        stream_tell(connection->stream, FRAME_EOF);
        return close_if_over(connection) ? PUMPED_LAST : PUMPED_ALL;
    }
    if (errno == EAGAIN || errno == EINTR) {
        connection->waits_to_read = true;
        watch_connection(connection);
        return PUMPED_ALL;
    }
    abort_connection(connection);
    return PUMPED_LAST;
}

/* From the host to the program */

/* Write what there is; false if that failed. */
static bool write_some(struct connection *connection)
{
    while (connection->unwritten.length) {
        ssize_t count = send(connection->fd, bytes_front(&connection->unwritten),
                             connection->unwritten.length, MSG_NOSIGNAL);
        if (count < 0)
            return errno == EAGAIN || errno == EINTR;
        bytes_drop(&connection->unwritten, (size_t)count);
        stream_grant(connection->stream, (size_t)count);
    }
    if (!connection->host_ends || connection->is_shut)
        return true;
    connection->is_shut = true;
    return shutdown(connection->fd, SHUT_WR) == 0;
}

static void write_on(struct connection *connection)
{
    if (!write_some(connection)) {
        abort_connection(connection);
        return;
    }
    watch_connection(connection);
    close_if_over(connection);
}

static void connection_feed(void *owner, const char *data, size_t length)
{
    struct connection *connection = owner;
    bytes_add(&connection->unwritten, data, length);
    write_on(connection);
}

static void connection_finish_input(void *owner)
{
    struct connection *connection = owner;
    connection->host_ends = true;
    write_on(connection);
}

static void connection_reset(void *owner)
{
    close_connection(owner);
}

static const struct operation forwarding = {connection_feed, connection_finish_input,
                                            connection_send, connection_reset};

/* The port */

static void accept_on(void *nobody)
{
    (void)nobody;
    int fd = accept4(port.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) { /* it has gone again, or we have no descriptor left for it just now */
        watch(&port, port.fd, 0, accept_on, NULL);
        timer_set(&retry, RETRY_S, accept_again, NULL);
        return;
    }
    struct connection *connection = allocate(sizeof *connection);
    connection->fd = fd;
    connection->stream = stream_open_ours();
    stream_attend(connection->stream, &forwarding, connection);
    stream_ready(connection->stream);
    connections++;
    if (connections == MAX_CONNECTIONS)
        watch(&port, port.fd, 0, accept_on, NULL);
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
        close(fd); /* there is no loopback, or a program of the image has the port */
    else
        watch(&port, fd, POLLIN, accept_on, NULL);
}
