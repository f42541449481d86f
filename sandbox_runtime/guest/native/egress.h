/* The way out: every connection to a port on the sandbox's loopback becomes a stream to the host,
   which decides. Nothing of what passes is looked at in here. */
#pragma once

/* Where the port cannot be had, there is no way out. */
void egress_begin(int port);
