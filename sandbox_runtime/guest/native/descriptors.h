/* The agent's descriptors: 0, 1 and 2 lead to the host, no other goes to anybody. */
#pragma once

/* Have 0, 1 and 2, whatever was closed, and nothing else, whatever was left open to us. */
void descriptors_begin(void);
/* Let exec close every descriptor of ours, also one that was opened without a thought of that. */
void descriptors_seal(void);
