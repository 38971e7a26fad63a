// numpy keeps the raw stream of a bit generator for ever, so these two follow it: SeedSequence (after M. O'Neill's
// seed_seq_fe, https://www.pcg-random.org/posts/developing-a-seed_seq-alternative.html) and PCG64, the generator PCG
// XSL RR 128/64 (M. O'Neill, "PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms for Random
// Number Generation", 2014).

#include "order.h"

#include <stdlib.h>

#define POOL 4

typedef unsigned __int128 uint128_t;

typedef struct generator_t {
  uint128_t state, increment;
} generator_t;

static uint32_t hash(uint32_t value, uint32_t* constant) {
  value ^= *constant;
  *constant *= 0x931e8875u;
  value *= *constant;
  return value ^ value >> 16;
}

static uint32_t mix(uint32_t x, uint32_t y) {
  uint32_t mixed = x * 0xca01f9ddu - y * 0x4973f715u;
  return mixed ^ mixed >> 16;
}

// The words of a number, the lowest first; at least one.
static size_t add_words(uint64_t number, uint32_t* words, size_t count) {
  words[count++] = (uint32_t)number;
  if (number >> 32) words[count++] = (uint32_t)(number >> 32);
  return count;
}

static void seed_pool(uint64_t seed, uint64_t epoch, uint32_t pool[POOL]) {
  uint32_t words[POOL] = {0}, constant = 0x43b0d7e5u;
  add_words(epoch, words, add_words(seed, words, 0));  // never more than four
  for (size_t i = 0; i < POOL; ++i) pool[i] = hash(words[i], &constant);
  for (size_t from = 0; from < POOL; ++from) {
    for (size_t to = 0; to < POOL; ++to) {
      if (from != to) pool[to] = mix(pool[to], hash(pool[from], &constant));
    }
  }
}

static void step(generator_t* generator) {
  const uint128_t multiplier = (uint128_t)2549297995355413924u << 64 | 4865540595714422341u;
  generator->state = generator->state * multiplier + generator->increment;
}

static generator_t seed_generator(uint64_t seed, uint64_t epoch) {
  uint32_t pool[POOL], constant = 0x8b51f9ddu;
  uint64_t words[4] = {0};
  seed_pool(seed, epoch, pool);
  for (size_t i = 0; i < 8; ++i) {
    uint32_t word = pool[i % POOL] ^ constant;
    constant *= 0x58f38dedu;
    word *= constant;
    word ^= word >> 16;
    words[i / 2] |= (uint64_t)word << (32 * (i % 2));
  }
  generator_t generator = {0, ((uint128_t)words[2] << 64 | words[3]) << 1 | 1};
  step(&generator);
  generator.state += (uint128_t)words[0] << 64 | words[1];
  step(&generator);
  return generator;
}

static uint64_t next_word(generator_t* generator) {
  step(generator);
  uint64_t folded = (uint64_t)(generator->state >> 64) ^ (uint64_t)generator->state;
  unsigned rotation = (unsigned)(generator->state >> 122);
  return folded >> rotation | folded << (-rotation & 63);
}

typedef struct drawn_t {
  uint64_t word;
  size_t index;
} drawn_t;

static int compare_drawn(const void* a, const void* b) {
  const drawn_t *x = a, *y = b;
  if (x->word != y->word) return x->word < y->word ? -1 : 1;
  return x->index < y->index ? -1 : x->index > y->index;
}

status_t fx_order_shuffle(uint64_t seed, uint64_t epoch, size_t count, size_t* out_order, fixstep_error_t** out_error) {
  drawn_t* drawn = fx_allocate_zeroed(count, sizeof(*drawn));
  if (!drawn) return fx_fail_memory(out_error);
  generator_t generator = seed_generator(seed, epoch);
  for (size_t i = 0; i < count; ++i) drawn[i] = (drawn_t){next_word(&generator), i};
  qsort(drawn, count, sizeof(*drawn), compare_drawn);
  for (size_t i = 0; i < count; ++i) out_order[i] = drawn[i].index;
  free(drawn);
  return FIXSTEP_OK;
}
