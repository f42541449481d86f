#include "sha256.h"

#include <stdio.h>
#include <string.h>

#include "frames.h"

/* The first 32 bits of the fractional parts of the cube roots of the first 64 primes. */
static const uint32_t rounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

struct sha256 sha256_begin(void)
{
    /* The first 32 bits of the fractional parts of the square roots of the first 8 primes. */
    return (struct sha256){.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f,
                                     0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

static uint32_t rotate(uint32_t word, int count)
{
    return word >> count | word << (32 - count);
}

static void expand(uint32_t words[64], const unsigned char block[64])
{
    for (int n = 0; n < 16; n++)
        words[n] = read_u32((const char *)block + 4 * n);
    for (int n = 16; n < 64; n++) {
        uint32_t old = words[n - 15], new = words[n - 2];
        uint32_t low = rotate(old, 7) ^ rotate(old, 18) ^ old >> 3;
        uint32_t high = rotate(new, 17) ^ rotate(new, 19) ^ new >> 10;
        words[n] = words[n - 16] + low + words[n - 7] + high;
    }
}

static void mix(uint32_t state[8], const unsigned char block[64])
{
    uint32_t words[64], s[8];
    expand(words, block);
    memcpy(s, state, sizeof s);
    for (unsigned n = 0; n < 64; n++) {
        /* The indices rotate instead of the values: a is s[0] in this round, s[7] in the next. */
        uint32_t *a = &s[-n & 7], *d = &s[(3 - n) & 7], *h = &s[(7 - n) & 7];
        uint32_t b = s[(1 - n) & 7], c = s[(2 - n) & 7];
        uint32_t e = s[(4 - n) & 7], f = s[(5 - n) & 7], g = s[(6 - n) & 7];
        uint32_t high = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
        uint32_t low = rotate(*a, 2) ^ rotate(*a, 13) ^ rotate(*a, 22);
        uint32_t first = *h + high + ((e & f) ^ (~e & g)) + rounds[n] + words[n];
        *d += first;
        *h = first + low + ((*a & b) ^ (*a & c) ^ (b & c));
    }
    for (int n = 0; n < 8; n++)
        state[n] += s[n];
}

void sha256_add(struct sha256 *digest, const void *data, size_t length)
{
    const unsigned char *at = data;
    while (length) {
        size_t filled = digest->length % sizeof digest->block;
        size_t room = sizeof digest->block - filled;
        size_t count = length < room ? length : room;
        memcpy(digest->block + filled, at, count);
        digest->length += count;
        if (count == room)
            mix(digest->state, digest->block);
        at += count;
        length -= count;
    }
}

void sha256_end(struct sha256 *digest, char hex[SHA256_HEX_BYTES])
{
    static const unsigned char padding[64] = {0x80};
    uint64_t bits = digest->length * 8;
    char size[8];
    write_u32(size, (uint32_t)(bits >> 32));
    write_u32(size + 4, (uint32_t)bits);
    size_t filled = digest->length % sizeof digest->block;
    sha256_add(digest, padding, filled < 56 ? 56 - filled : 120 - filled);
    sha256_add(digest, size, sizeof size);
    for (int n = 0; n < 8; n++)
        snprintf(hex + 8 * n, 9, "%08x", digest->state[n]);
}
