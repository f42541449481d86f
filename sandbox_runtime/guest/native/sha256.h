/* SHA-256, by FIPS 180-4. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define SHA256_HEX_BYTES 65

struct sha256 {
    uint32_t state[8];
    unsigned char block[64];
    uint64_t length; /* in bytes, of all added data */
};

struct sha256 sha256_begin(void);
void sha256_add(struct sha256 *digest, const void *data, size_t length);
/* Write the digest in hexadecimal, with a NUL. */
void sha256_end(struct sha256 *digest, char hex[SHA256_HEX_BYTES]);
