/* SHA-256, as FIPS 180-4 has it. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define SHA256_HEX_BYTES 65

struct sha256 {
    uint32_t state[8];
    unsigned char block[64];
    uint64_t length; /* of all that was added */
};

struct sha256 sha256_begin(void);
void sha256_add(struct sha256 *digest, const void *data, size_t length);
/* The digest in hexadecimal, with a NUL. */
void sha256_end(struct sha256 *digest, char hex[SHA256_HEX_BYTES]);
