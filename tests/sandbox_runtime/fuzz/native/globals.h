/* The agent's global variables lie between these, for its objects are linked between ours. */
#pragma once

extern char agent_data_begin[], agent_data_end[], agent_bss_begin[], agent_bss_end[];
