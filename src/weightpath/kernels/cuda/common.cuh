// What both tensor-core kernels share: unpacking a lane's share of a tile (layouts/gpu_tiles.py) into
// the left operand of a matrix product, and asynchronous copies. Included as text; no CUDA header is
// needed, so that the run-time compiler alone builds it.
//
// Set by the compile call: BITS 4 or 8; BF16 1 or 0 (fp16); ASYM 1 or 0; GROUP 32, 64 (any multiple
// of it) or 0 (one scale a row); SCALE_BYTES 2 or 4; SCALE_BF16 1 or 0; EARLY 1 where the launch lets
// a kernel start before the one before it has ended (sm_90 and later), else 0.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define GROUPS_A_CHUNK (GROUP == 32 ? 2 : 1)

static __device__ __forceinline__ u32 shared_address(const void* pointer) {
  return (u32)__cvta_generic_to_shared(pointer);
}

// Weights may be copied before the kernel before this one has ended; x, and what is written, not.
static __device__ __forceinline__ void wait_for_kernels_before() {
#if EARLY
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ __forceinline__ void let_kernels_after_start() {
#if EARLY
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// (a & mask) | magic
static __device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 magic) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(a), "r"(mask), "r"(magic));
  return out;
}

// a * b + c on two 16-bit floats
static __device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 out;
#if BF16
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
#else
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
#endif
  return out;
}

static __device__ __forceinline__ u32 multiply2(u32 a, u32 b) {
#if BF16
  return fma2(a, b, 0x80008000u);  // minus zero: keeps the product's sign
#else
  u32 out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
#endif
}

static __device__ __forceinline__ u32 pack2(float low, float high) {
  u32 out;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#endif
  return out;
}

static __device__ __forceinline__ u16 pack1(float value) { return (u16)(pack2(value, 0.f)); }

static __device__ __forceinline__ float half_as_float(u16 bits) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
  return out;
}

static __device__ __forceinline__ float scale_as_float(const void* scales, u64 at) {
#if SCALE_BYTES == 4
  return ((const float*)scales)[at];
#elif SCALE_BF16
  return __uint_as_float((u32)((const u16*)scales)[at] << 16);
#else
  return half_as_float(((const u16*)scales)[at]);
#endif
}

static __device__ __forceinline__ float activation_as_float(u16 bits) {
#if BF16
  return __uint_as_float((u32)bits << 16);
#else
  return half_as_float(bits);
#endif
}

// The constants that take a zero point off both codes of a register, for rows g and g + 8.
struct Zeros {
  u32 low[2];   // against codes unpacked from bits 0..3 (bf16: all)
  u32 high[2];  // fp16: against codes unpacked from bits 4..7
};

static __device__ __forceinline__ Zeros zeros_of(u32 first, u32 second) {
  Zeros out;
#if BF16
  out.low[0] = (0xC300u | first) * 0x10001u;  // -(128 + zero)
  out.low[1] = (0xC300u | second) * 0x10001u;
  out.high[0] = out.high[1] = 0;
#else
  out.low[0] = (0xE400u | first) * 0x10001u;         // -(1024 + zero)
  out.low[1] = (0xE400u | second) * 0x10001u;
  out.high[0] = (0xD400u | first << 4) * 0x10001u;   // -(64 + zero)
  out.high[1] = (0xD400u | second << 4) * 0x10001u;
#endif
  return out;
}

#if BITS == 4
// One word: the left operand of one step, code - zero, exact.
static __device__ __forceinline__ void unpack_step(u32 word, const Zeros& zeros, u32 (&a)[4]) {
#if BF16
  const u32 one = 0x3F803F80u;
#pragma unroll
  for (int p = 0; p < 4; ++p)
    a[p] = fma2(and_or(word >> 4 * p, 0x000F000Fu, 0x43004300u), one, zeros.low[p & 1]);
#else
  const u32 one = 0x3C003C00u, sixteenth = 0x2C002C00u;
#pragma unroll
  for (int p = 0; p < 4; p += 2) {
    const u32 shifted = word >> 4 * p;
    a[p] = fma2(and_or(shifted, 0x000F000Fu, 0x64006400u), one, zeros.low[0]);
    a[p + 1] = fma2(and_or(shifted, 0x00F000F0u, 0x64006400u), sixteenth, zeros.high[1]);
  }
#endif
}
#else
// Two words: the left operand of one step; an int8 is exact in either format.
static __device__ __forceinline__ void unpack_step(u32 first, u32 second, u32 (&a)[4]) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const u32 word = (p < 2 ? first : second) >> 8 * (p & 1);
#if BF16
    // 128 + the low seven bits, less 128 or, for a negative one, 256
    const u32 low = and_or(word, 0x007F007Fu, 0x43004300u);
    a[p] = fma2(and_or(word, 0x00800080u, 0x43004300u), 0xBF80BF80u, low);
#else
    a[p] = fma2(and_or(word ^ 0x00800080u, 0x00FF00FFu, 0x64006400u), 0x3C003C00u, 0xE480E480u);
#endif
  }
}
#endif
