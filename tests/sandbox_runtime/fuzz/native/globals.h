/* The agent's global variables lie between these symbols: its objects are linked between first.c
   and last.c. */
#pragma once

extern char agent_data_begin[], agent_data_end[], agent_bss_begin[], agent_bss_end[];
