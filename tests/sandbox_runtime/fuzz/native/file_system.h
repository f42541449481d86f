/* The file system of a fuzz target, which is the same at the start of each input. */
#pragma once

/* Reset the file system for the next input. Ends the process if it does not run in its sandbox. */
void files_tidy(void);
