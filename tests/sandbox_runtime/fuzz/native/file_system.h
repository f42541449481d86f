/* The file system of a fuzz target: a small one of its own, the same for each input. */
#pragma once

/* Make it what it is when an input begins. Ends the process where it is not in its sandbox. */
void files_tidy(void);
