// The likeness of two texts: twice the characters in matching blocks, divided by all. The longest matching block is
// found first, then the longest ones before and behind it (Ratcliff and Obershelp, "Pattern matching: the Gestalt
// approach", Dr. Dobb's Journal, July 1988). It follows Python's difflib in what that leaves open: which of several
// longest blocks is taken, and that characters which are frequent in a text of 200 or more begin no block.

#include <stdlib.h>

#include "template.h"

#define FREQUENT_FROM 200

typedef struct characters_t {
  uint32_t* data;
  size_t count;
} characters_t;

// The characters of UTF-8; bytes that are none count as themselves.
static characters_t decode(const char* text) {
  size_t length = strlen(text);
  characters_t characters = {fx_allocate_zeroed(length, sizeof(uint32_t)), 0};
  for (size_t i = 0; characters.data && i < length; ++i) {
    unsigned char c = (unsigned char)text[i];
    if ((c & 0xC0) == 0x80 && characters.count) {
      uint32_t* last = &characters.data[characters.count - 1];
      *last = *last << 6 | (c & 0x3F);
    } else {
      characters.data[characters.count++] = c;
    }
  }
  return characters;
}

typedef struct matcher_t {
  characters_t a, b;
  bool* frequent;  // [b.count]
  size_t* run;     // [b.count + 1], for one row of the search
  size_t* next_run;
} matcher_t;

static void find_frequent(matcher_t* matcher) {
  size_t count = matcher->b.count;
  for (size_t i = 0; count >= FREQUENT_FROM && i < count; ++i) {
    size_t occurrences = 0;
    for (size_t j = 0; j < count; ++j) occurrences += matcher->b.data[j] == matcher->b.data[i];
    matcher->frequent[i] = occurrences > count / 100 + 1;
  }
}

typedef struct block_t {
  size_t a, b, length;
} block_t;

// The first of the longest blocks in a[a_low, a_high) and b[b_low, b_high).
static block_t longest(matcher_t* matcher, size_t a_low, size_t a_high, size_t b_low, size_t b_high) {
  const uint32_t *a = matcher->a.data, *b = matcher->b.data;
  block_t best = {a_low, b_low, 0};
  memset(matcher->run, 0, (matcher->b.count + 1) * sizeof(size_t));
  for (size_t i = a_low; i < a_high; ++i) {
    memset(matcher->next_run, 0, (matcher->b.count + 1) * sizeof(size_t));
    for (size_t j = b_low; j < b_high; ++j) {
      if (a[i] != b[j] || matcher->frequent[j]) continue;
      size_t length = matcher->run[j] + 1;
      matcher->next_run[j + 1] = length;
      if (length > best.length) best = (block_t){i + 1 - length, j + 1 - length, length};
    }
    size_t* swapped = matcher->run;
    matcher->run = matcher->next_run;
    matcher->next_run = swapped;
  }
  while (best.a > a_low && best.b > b_low && a[best.a - 1] == b[best.b - 1]) {
    --best.a;
    --best.b;
    ++best.length;
  }
  while (best.a + best.length < a_high && best.b + best.length < b_high &&
         a[best.a + best.length] == b[best.b + best.length]) {
    ++best.length;
  }
  return best;
}

static size_t matching(matcher_t* matcher, size_t a_low, size_t a_high, size_t b_low, size_t b_high) {
  size_t total = 0;
  while (a_low < a_high && b_low < b_high) {
    block_t block = longest(matcher, a_low, a_high, b_low, b_high);
    if (!block.length) break;
    total += block.length + matching(matcher, a_low, block.a, b_low, block.b);
    a_low = block.a + block.length;
    b_low = block.b + block.length;
  }
  return total;
}

// No less than the ratio, and quick: what the counts of characters allow.
static double most(const matcher_t* matcher) {
  size_t counts[256] = {0}, both = 0;
  for (size_t i = 0; i < matcher->b.count; ++i) ++counts[matcher->b.data[i] & 0xFF];
  for (size_t i = 0; i < matcher->a.count; ++i) {
    size_t* count = &counts[matcher->a.data[i] & 0xFF];
    both += *count > 0;
    *count -= *count > 0;
  }
  return 2.0 * (double)both / (double)(matcher->a.count + matcher->b.count);
}

double fx_similarity(const char* a, const char* b, double least) {
  // Longer ones are not worth the time, which grows with their product.
  if (strlen(a) > 2 * MAX_PATH_LENGTH || strlen(b) > 2 * MAX_PATH_LENGTH) return 0;
  matcher_t matcher = {decode(a), decode(b), NULL, NULL, NULL};
  matcher.frequent = fx_allocate_zeroed(matcher.b.count, sizeof(bool));
  matcher.run = fx_allocate_zeroed(matcher.b.count + 1, sizeof(size_t));
  matcher.next_run = fx_allocate_zeroed(matcher.b.count + 1, sizeof(size_t));
  double ratio = 0;
  if (matcher.a.data && matcher.b.data && matcher.frequent && matcher.run && matcher.next_run) {
    size_t all = matcher.a.count + matcher.b.count;
    if (all && most(&matcher) < least) all = SIZE_MAX;  // not worth looking
    if (all != SIZE_MAX) find_frequent(&matcher);
    ratio = all == SIZE_MAX ? 0
            : all           ? 2.0 * (double)matching(&matcher, 0, matcher.a.count, 0, matcher.b.count) / (double)all
                            : 1.0;
  }
  free(matcher.a.data);
  free(matcher.b.data);
  free(matcher.frequent);
  free(matcher.run);
  free(matcher.next_run);
  return ratio;
}
