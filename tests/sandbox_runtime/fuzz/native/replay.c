/* Replaces libFuzzer: runs the target on each file of the command line. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int main(int count, char **names)
{
    static uint8_t data[1 << 20];
    for (int n = 1; n < count; n++) {
        FILE *file = fopen(names[n], "rb");
        if (!file)
            return perror(names[n]), 1;
        size_t size = fread(data, 1, sizeof data, file);
        fclose(file);
        fprintf(stderr, "%s\n", names[n]);
        uint8_t *input = malloc(size ? size : 1); /* exact, so that a read beyond it is detected */
        for (size_t at = 0; at < size; at++)
            input[at] = data[at];
        LLVMFuzzerTestOneInput(input, size);
        free(input);
    }
    return 0;
}
