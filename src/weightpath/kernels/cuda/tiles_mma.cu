// out[m, n] = sum_k x[m, k] w[n, k] + bias[n] for few rows of x, on mma.m16n8k16 (sm_80 and later).
//
// Weights are the left operand: 16 of their rows by 8 NT rows of x a product. A block has WN x WK
// warps; warp (wn, wk) takes R tiles of 16 rows and every WK-th block of 64 columns. Codes, scales,
// zeros and x come through a ring of STAGES blocks of columns in shared memory, copied
// asynchronously. Within a group of columns the products are of integers and x (exact in fp32 but
// for the order of sums); the group's scale multiplies in fp32. At the end the WK partial sums are
// added in a fixed order: two runs give the same bits.
//
// Set by the compile call beside common.cuh's: NT, R, WN, WK, STAGES, BLOCKS (resident a multiprocessor).

#define X_ROWS (8 * NT)
#define CODE_BYTES (R * 128 * BITS)
#define SCALE_ROW (16 * SCALE_BYTES)
#define SCALES_STAGED (GROUP != 0)
#define SCALE_AREA (SCALES_STAGED ? R * GROUPS_A_CHUNK * SCALE_ROW : 0)
#define ZERO_AREA (SCALES_STAGED && ASYM ? R * GROUPS_A_CHUNK * 16 : 0)
#define WARP_AREA (CODE_BYTES + SCALE_AREA + ZERO_AREA)
#define X_AREA (X_ROWS * 128)
#define STAGE_BYTES (WN * WARP_AREA + X_AREA)

static __device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

static __device__ __forceinline__ void copy16_or_zero(u32 to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0));
}

static __device__ __forceinline__ void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BF16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(WN * WK * 32, BLOCKS)
tiles_mma(const uint4* __restrict__ codes, const u8* __restrict__ scales, const u8* __restrict__ zeros,
          const u16* __restrict__ x, const u16* __restrict__ bias, void* __restrict__ out,
          int m_all, int n_all, int k_all, int x_stride, int chunks, int groups, int chunks_a_group,
          int out_fp32) {
  extern __shared__ __align__(128) u8 memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int wn = warp % WN, wk = warp / WN;
  const int g = lane >> 2, q = lane & 3;
  const int m0 = blockIdx.y * X_ROWS;
  const int rows = min(X_ROWS, m_all - m0);
  const int tiles = (n_all + 63) / 64 * 4;
  const int first_tile = (blockIdx.x * WN + wn) * R;
  u8* const ring = memory + wk * STAGES * STAGE_BYTES;
  const int mine = wk < chunks ? (chunks - wk + WK - 1) / WK : 0;

  auto fetch = [&](int i) {
    const int chunk = wk + i * WK;
    u8* const stage = ring + i % STAGES * STAGE_BYTES;
    const u32 own = shared_address(stage + wn * WARP_AREA);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int tile = min(first_tile + r, tiles - 1);
      const u64 at = ((u64)(tile >> 2) * chunks + chunk) * 4 + (tile & 3);
#pragma unroll
      for (int s = 0; s < BITS / 4; ++s)
        copy16(own + ((r * (BITS / 4) + s) * 32 + lane) * 16, codes + (at * (BITS / 4) + s) * 32 + lane);
    }
#if GROUP != 0
    const int group = GROUP == 32 ? 2 * chunk : chunk / chunks_a_group;
    if (lane < R * GROUPS_A_CHUNK * SCALE_BYTES) {
      const int piece = lane % SCALE_BYTES, place = lane / SCALE_BYTES;
      const int r = place / GROUPS_A_CHUNK, part = place % GROUPS_A_CHUNK;
      const int tile = min(first_tile + r, tiles - 1);
      const u64 at = ((u64)(tile >> 2) * groups + group + part) * 64 + (tile & 3) * 16;
      copy16(own + CODE_BYTES + place * SCALE_ROW + piece * 16, scales + at * SCALE_BYTES + piece * 16);
    }
#if ASYM
    if (lane < R * GROUPS_A_CHUNK) {
      const int r = lane / GROUPS_A_CHUNK, part = lane % GROUPS_A_CHUNK;
      const int tile = min(first_tile + r, tiles - 1);
      const u64 at = ((u64)(tile >> 2) * groups + group + part) * 64 + (tile & 3) * 16;
      copy16(own + CODE_BYTES + SCALE_AREA + lane * 16, zeros + at);
    }
#endif
#endif
    const u32 shared_x = shared_address(stage + WN * WARP_AREA);
    for (int e = wn * 32 + lane; e < rows * 8; e += WN * 32) {
      const int row = e >> 3, segment = e & 7, column = chunk * 64 + segment * 8;
      const bool real = column < k_all;
      copy16_or_zero(shared_x + row * 128 + ((segment ^ (row & 7)) << 4),
                     x + (u64)(m0 + row) * x_stride + (real ? column : 0), real);
    }
  };

  float sums[R][NT][4];
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[r][t][i] = 0.f;

  Zeros zero[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
#if GROUP == 0 && ASYM
    const int tile = min(first_tile + r, tiles - 1);
    const u8* const pair = zeros + (u64)(tile >> 2) * 64 + (tile & 3) * 16 + 2 * g;
    zero[r] = zeros_of(pair[0], pair[1]);
#else
    zero[r] = zeros_of(8, 8);
#endif
  }

#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < mine) fetch(i);
    asm volatile("cp.async.commit_group;");
  }
  for (int i = 0; i < mine; ++i) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
#if WN == 1
    __syncwarp();
#else
    asm volatile("bar.sync %0, %1;" ::"r"(wk + 1), "n"(WN * 32) : "memory");
#endif
    if (i + STAGES - 1 < mine) fetch(i + STAGES - 1);
    asm volatile("cp.async.commit_group;");

    const u8* const stage = ring + i % STAGES * STAGE_BYTES;
    const u8* const own = stage + wn * WARP_AREA;
    const u32 shared_x = shared_address(stage + WN * WARP_AREA);
    uint4 words[R][BITS / 4];
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int s = 0; s < BITS / 4; ++s)
        words[r][s] = *(const uint4*)(own + ((r * (BITS / 4) + s) * 32 + lane) * 16);

    float part[R][NT][4];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
#if GROUP != 0
      if (pair == 0 || GROUP == 32) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int t = 0; t < NT; ++t)
#pragma unroll
            for (int c = 0; c < 4; ++c) part[r][t][c] = 0.f;
#if ASYM
          const u32 two = *(const u16*)(own + CODE_BYTES + SCALE_AREA +
                                        (r * GROUPS_A_CHUNK + (GROUP == 32 ? pair : 0)) * 16 + 2 * g);
          zero[r] = zeros_of(two & 255, two >> 8);
#endif
        }
      }
#endif
      u32 b[NT][4];
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        const int row = min(8 * t + (lane & 7), rows - 1), segment = 4 * pair + (lane >> 3);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(b[t][0]), "=r"(b[t][1]), "=r"(b[t][2]), "=r"(b[t][3])
                     : "r"(shared_x + row * 128 + ((segment ^ (row & 7)) << 4)));
      }
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int r = 0; r < R; ++r) {
          u32 a[4];
#if BITS == 4
          const uint4 w = words[r][0];
          unpack_step(pair ? (step ? w.w : w.z) : (step ? w.y : w.x), zero[r], a);
#else
          const uint4 w = words[r][pair];
          unpack_step(step ? w.z : w.x, step ? w.w : w.y, a);
#endif
#pragma unroll
          for (int t = 0; t < NT; ++t)
#if GROUP != 0
            multiply_add(part[r][t], a, b[t][2 * step], b[t][2 * step + 1]);
#else
            multiply_add(sums[r][t], a, b[t][2 * step], b[t][2 * step + 1]);
#endif
        }
#if GROUP != 0
      if (pair == 1 || GROUP == 32) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const u8* const at = own + CODE_BYTES + (r * GROUPS_A_CHUNK + (GROUP == 32 ? pair : 0)) * SCALE_ROW;
          const float first = scale_as_float(at, 2 * g), second = scale_as_float(at, 2 * g + 1);
#pragma unroll
          for (int t = 0; t < NT; ++t) {
            sums[r][t][0] += first * part[r][t][0];
            sums[r][t][1] += first * part[r][t][1];
            sums[r][t][2] += second * part[r][t][2];
            sums[r][t][3] += second * part[r][t][3];
          }
        }
      }
#endif
    }
  }

  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  const int height = WN * R * 16;  // rows of the weight in this block
  float* const partial = (float*)memory;  // [WK][X_ROWS][height + 4]
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        partial[(wk * X_ROWS + 8 * t + 2 * q + (c & 1)) * (height + 4) + (wn * R + r) * 16 + g + 8 * (c >> 1)] =
            sums[r][t][c];
  __syncthreads();
  for (int e = threadIdx.x; e < height * rows; e += WN * WK * 32) {
    const int row = e / height, place = e % height, n = blockIdx.x * height + place;
    if (n >= n_all) continue;
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < WK; ++w) total += partial[(w * X_ROWS + row) * (height + 4) + place];
#if GROUP == 0
    total *= scale_as_float(scales, (u64)(n >> 6) * 64 + (n >> 4 & 3) * 16 + 2 * (n & 7) + (n >> 3 & 1));
#endif
    if (bias != nullptr) total += activation_as_float(bias[n]);
    const u64 at = (u64)(m0 + row) * n_all + n;
    if (out_fp32)
      ((float*)out)[at] = total;
    else
      ((u16*)out)[at] = pack1(total);
  }
}
