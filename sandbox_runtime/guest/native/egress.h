/* Egress: each connection to a port on the sandbox's loopback interface becomes a stream to the
   host, which allows or denies it. The agent does not inspect the bytes. */
#pragma once

/* Listen on the port. Without it (no loopback, or the port is taken) there is no egress. */
void egress_begin(int port);
