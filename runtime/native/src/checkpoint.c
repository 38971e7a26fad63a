#include "checkpoint.h"

#include <inttypes.h>
#include <sodium.h>
#include <stdlib.h>

#include "file.h"
#include "safetensors.h"

#define ENTRY "fixstep"
static const char no_digest[DIGEST_LENGTH + 1] = "0000000000000000000000000000000000000000000000000000000000000000";

// Where text first occurs in bytes; NULL if it does not.
static const uint8_t* find_text(const uint8_t* data, size_t byte_length, const char* text) {
  size_t length = strlen(text);
  for (const uint8_t* at = data; byte_length - (size_t)(at - data) >= length; ++at) {
    at = memchr(at, text[0], byte_length - (size_t)(at - data) - length + 1);
    if (!at) return NULL;
    if (memcmp(at, text, length) == 0) return at;
  }
  return NULL;
}

static void finish_digest(crypto_hash_sha256_state* hash, char out_digest[DIGEST_LENGTH + 1]) {
  unsigned char bytes[crypto_hash_sha256_BYTES];
  crypto_hash_sha256_final(hash, bytes);
  sodium_bin2hex(out_digest, DIGEST_LENGTH + 1, bytes, sizeof(bytes));
}

static void add_contents(text_t* text, const leaf_list_t* leaves, const char* program, uint64_t steps,
                         const char* position) {
  fx_text_add(text, "{\"version\":1,\"sha256\":\"%s\",\"program\":\"%s\",\"steps\":%" PRIu64 ",\"position\":%s",
              no_digest, program, steps, position);
  fx_text_add(text, ",\"template\":[");
  for (size_t i = 0; i < leaves->count; ++i) {
    if (i) fx_text_add(text, ",");
    fx_text_add_leaf_json(text, &leaves->items[i]);
  }
  fx_text_add(text, "]}");
}

// Writes the digest of the header and the data that follow it into the header.
static status_t put_digest(text_t* header, const span_t* spans, size_t count, fixstep_error_t** out_error) {
  const uint8_t* place = find_text((const uint8_t*)header->data, header->length, no_digest);
  if (!place) return fx_fail(out_error, FIXSTEP_CHECKPOINT_ERROR, "the header has no place for the digest");
  crypto_hash_sha256_state hash;
  crypto_hash_sha256_init(&hash);
  for (size_t i = 0; i < count; ++i) {
    if (spans[i].byte_length) crypto_hash_sha256_update(&hash, spans[i].data, spans[i].byte_length);
  }
  char digest[DIGEST_LENGTH + 1];
  finish_digest(&hash, digest);
  memcpy(header->data + (place - (const uint8_t*)header->data), digest, DIGEST_LENGTH);
  return FIXSTEP_OK;
}

status_t fx_checkpoint_write(const char* path, const leaf_list_t* leaves, const void* const* data, const char* program,
                             uint64_t steps, const char* position, fixstep_error_t** out_error) {
  text_t contents = {0}, header = {0};
  size_t* order = NULL;
  add_contents(&contents, leaves, program, steps, position);
  status_t status = contents.failed ? fx_fail_memory(out_error) : FIXSTEP_OK;
  if (status == FIXSTEP_OK) status = fx_safetensors_encode_header(leaves, contents.data, &header, &order, out_error);
  span_t* spans = status == FIXSTEP_OK ? fx_allocate_zeroed(leaves->count + 1, sizeof(*spans)) : NULL;
  if (status == FIXSTEP_OK && !spans) status = fx_fail_memory(out_error);
  if (status == FIXSTEP_OK) {
    spans[0] = (span_t){header.data, header.length};
    for (size_t i = 0; i < leaves->count; ++i) {
      spans[i + 1] = (span_t){data[order[i]], leaves->items[order[i]].byte_length};
    }
    status = put_digest(&header, spans, leaves->count + 1, out_error);
  }
  if (status == FIXSTEP_OK) status = fx_file_write(path, spans, leaves->count + 1, FIXSTEP_CHECKPOINT_ERROR, out_error);
  free(spans);
  free(order);
  fx_text_release(&header);
  fx_text_release(&contents);
  return status;
}

// Compares the SHA-256 of the whole file, which covers the header too, however it is laid out.
static status_t check_digest(const uint8_t* file, size_t byte_length, const char* digest, fixstep_error_t** out_error) {
  const uint8_t* at = digest && strlen(digest) == DIGEST_LENGTH ? find_text(file, byte_length, digest) : NULL;
  if (!at) return fx_fail(out_error, FIXSTEP_CHECKPOINT_ERROR, "damaged: expected a SHA-256 in the metadata");
  crypto_hash_sha256_state hash;
  crypto_hash_sha256_init(&hash);
  crypto_hash_sha256_update(&hash, file, (size_t)(at - file));
  crypto_hash_sha256_update(&hash, (const unsigned char*)no_digest, DIGEST_LENGTH);
  const uint8_t* after = at + DIGEST_LENGTH;
  crypto_hash_sha256_update(&hash, after, byte_length - (size_t)(after - file));
  char got[DIGEST_LENGTH + 1];
  finish_digest(&hash, got);
  if (strcmp(got, digest) == 0) return FIXSTEP_OK;
  return fx_fail(out_error, FIXSTEP_CHECKPOINT_ERROR, "damaged: expected SHA-256 %s, got %s", digest, got);
}

// The contents of the metadata, and their text, which belongs to the header.
static status_t parse_contents(checkpoint_t* checkpoint, const char** out_text, fixstep_error_t** out_error) {
  const json_t* metadata = json_object_get(checkpoint->header, "__metadata__");
  const json_t* entry = json_object_get(metadata, ENTRY);
  if (!json_is_string(entry)) {
    return fx_fail(out_error, FIXSTEP_CHECKPOINT_ERROR,
                   "not a fixstep checkpoint: its metadata has no entry '" ENTRY "'");
  }
  *out_text = json_string_value(entry);
  status_t status =
      fx_json_parse(*out_text, json_string_length(entry), FIXSTEP_CHECKPOINT_ERROR, &checkpoint->contents, out_error);
  uint64_t version;
  if (status != FIXSTEP_OK) return status;
  if (!fx_json_count(json_object_get(checkpoint->contents, "version"), INT64_MAX, &version)) {
    return fx_fail(out_error, FIXSTEP_CHECKPOINT_ERROR, "not a fixstep checkpoint: its metadata states no version");
  }
  if (version == 1) return FIXSTEP_OK;
  return fx_fail(out_error, FIXSTEP_CHECKPOINT_ERROR,
                 "checkpoint version %" PRIu64 ", and this fixstep reads 1: use the fixstep that wrote it", version);
}

static status_t read_contents(checkpoint_t* checkpoint, const char* text, fixstep_error_t** out_error) {
  const json_t* contents = checkpoint->contents;
  checkpoint->program = json_string_value(json_object_get(contents, "program"));
  if (!checkpoint->program || !*checkpoint->program) {
    return fx_fail(out_error, FIXSTEP_CHECKPOINT_ERROR, "program: expected a digest");
  }
  if (!fx_json_count(json_object_get(contents, "steps"), INT64_MAX, &checkpoint->steps)) {
    return fx_fail(out_error, FIXSTEP_CHECKPOINT_ERROR, "steps: expected an integer from 0");
  }
  if (!json_is_object(json_object_get(contents, "position")) ||
      !fx_json_find(text, strlen(text), "position", &checkpoint->position, &checkpoint->position_length)) {
    return fx_fail(out_error, FIXSTEP_CHECKPOINT_ERROR, "position: expected an object");
  }
  return fx_leaf_list_parse(json_object_get(contents, "template"), "template", FIXSTEP_CHECKPOINT_ERROR,
                            &checkpoint->leaves, out_error);
}

status_t fx_checkpoint_parse(uint8_t* file, size_t byte_length, checkpoint_t* out_checkpoint,
                             fixstep_error_t** out_error) {
  *out_checkpoint = (checkpoint_t){.file = file};
  const char* text = NULL;
  status_t status =
      fx_safetensors_header(file, byte_length, FIXSTEP_CHECKPOINT_ERROR, &out_checkpoint->header, out_error);
  if (status == FIXSTEP_OK) status = parse_contents(out_checkpoint, &text, out_error);
  if (status == FIXSTEP_OK) {
    const char* digest = json_string_value(json_object_get(out_checkpoint->contents, "sha256"));
    status = check_digest(file, byte_length, digest, out_error);
  }
  if (status == FIXSTEP_OK) status = read_contents(out_checkpoint, text, out_error);
  if (status != FIXSTEP_OK) return status;
  out_checkpoint->data = fx_allocate_zeroed(out_checkpoint->leaves.count, sizeof(void*));
  if (!out_checkpoint->data) return fx_fail_memory(out_error);
  return fx_safetensors_decode(file, byte_length, &out_checkpoint->leaves, FIXSTEP_CHECKPOINT_ERROR,
                               out_checkpoint->data, out_error);
}

status_t fx_checkpoint_read(const char* path, checkpoint_t* out_checkpoint, fixstep_error_t** out_error) {
  *out_checkpoint = (checkpoint_t){0};
  uint8_t* file;
  size_t byte_length;
  status_t status = fx_file_read(path, INT64_MAX, FIXSTEP_CHECKPOINT_ERROR, &file, &byte_length, out_error);
  if (status != FIXSTEP_OK) return status;
  fixstep_error_t* inner = NULL;
  status = fx_checkpoint_parse(file, byte_length, out_checkpoint, &inner);
  if (status == FIXSTEP_OK) return FIXSTEP_OK;
  text_t before = {0};
  fx_text_add(&before, "%s: ", path);
  status =
      fx_fail_prefixed(out_error, status, inner, before.data ? before.data : "", ". Use the checkpoint before it.");
  fx_text_release(&before);
  return status;
}

void fx_checkpoint_release(checkpoint_t* checkpoint) {
  fx_leaf_list_release(&checkpoint->leaves);
  free(checkpoint->data);
  json_decref(checkpoint->contents);
  json_decref(checkpoint->header);
  free(checkpoint->file);
  *checkpoint = (checkpoint_t){0};
}

static void add_with_key(text_t* text, const fixstep_leaf_t* leaf) {
  fx_text_add_type(text, leaf->dtype, leaf->rank, leaf->shape);
  if (leaf->key) fx_text_add(text, " (a %s key)", leaf->key);
}

static void add_line_start(text_t* text, const fixstep_leaf_t* leaf) {
  fx_text_add(text, "\n  ");
  fx_text_add_path(text, leaf->path, "state");
  fx_text_add(text, ": ");
}

void fx_text_add_mismatch(text_t* text, const leaf_list_t* expected, const leaf_list_t* got) {
  size_t before = text->length;
  for (size_t i = 0; i < expected->count; ++i) {
    const fixstep_leaf_t* ours = &expected->items[expected->sorted[i]];
    const fixstep_leaf_t* theirs = fx_leaf_list_find(got, ours->path);
    if (!theirs || fx_leaf_equal(ours, theirs, true)) continue;
    add_line_start(text, ours);
    fx_text_add(text, "expected ");
    add_with_key(text, ours);
    fx_text_add(text, ", got ");
    add_with_key(text, theirs);
  }
  for (size_t i = 0; i < expected->count; ++i) {
    const fixstep_leaf_t* ours = &expected->items[expected->sorted[i]];
    if (fx_leaf_list_find(got, ours->path)) continue;
    add_line_start(text, ours);
    fx_text_add(text, "expected ");
    add_with_key(text, ours);
    fx_text_add(text, ", missing");
  }
  for (size_t i = 0; i < got->count; ++i) {
    const fixstep_leaf_t* theirs = &got->items[got->sorted[i]];
    if (fx_leaf_list_find(expected, theirs->path)) continue;
    add_line_start(text, theirs);
    fx_text_add(text, "unexpected, got ");
    add_with_key(text, theirs);
  }
  if (text->length == before && !fx_leaf_list_equal(expected, got, true)) {
    fx_text_add(text, "\n  the same leaves in another order");
  }
}
