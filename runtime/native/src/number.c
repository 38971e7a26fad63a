#include "number.h"

#include <math.h>

static double from_float16(uint16_t bits) {
  int exponent = bits >> 10 & 0x1F;
  double mantissa = bits & 0x3FF;
  double value = exponent == 0x1F ? (mantissa != 0 ? (double)NAN : (double)INFINITY)
                 : exponent       ? ldexp(mantissa + 1024, exponent - 25)
                                  : ldexp(mantissa, -24);
  return bits >> 15 ? -value : value;
}

static double from_float32(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return (double)value;
}

static double from_float64(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

bool fx_number_of(fixstep_dtype_t dtype, const void* data, double* out_value) {
  const uint8_t* p = data;
  switch (dtype) {
    case FIXSTEP_BOOL:
    case FIXSTEP_UINT8:
      *out_value = p[0];
      return true;
    case FIXSTEP_INT8:
      *out_value = (int8_t)p[0];
      return true;
    case FIXSTEP_INT16:
      *out_value = (int16_t)load_u16(p);
      return true;
    case FIXSTEP_UINT16:
      *out_value = load_u16(p);
      return true;
    case FIXSTEP_INT32:
      *out_value = (int32_t)load_u32(p);
      return true;
    case FIXSTEP_UINT32:
      *out_value = load_u32(p);
      return true;
    case FIXSTEP_INT64:
      *out_value = (double)(int64_t)load_u64(p);
      return true;
    case FIXSTEP_UINT64:
      *out_value = (double)load_u64(p);
      return true;
    case FIXSTEP_FLOAT16:
      *out_value = from_float16(load_u16(p));
      return true;
    case FIXSTEP_BFLOAT16:
      *out_value = from_float32((uint32_t)load_u16(p) << 16);
      return true;
    case FIXSTEP_FLOAT32:
      *out_value = from_float32(load_u32(p));
      return true;
    case FIXSTEP_FLOAT64:
      *out_value = from_float64(load_u64(p));
      return true;
    default:
      return false;
  }
}

double fx_number_of_words(const void* data) { return (double)(int64_t)load_u64(data); }
