// out[m, n] = sum_k x[m, k] w[n, k] + bias[n] for few rows of x, on mma.m16n8k16 (sm_80 and later).
//
// Weights are the left operand: 16 of their rows by 8 NT rows of x a product. A block has WN x WK
// warps; warp (wn, wk) takes R tiles of 16 rows and every WK-th step of C blocks of 64 columns. Codes, scales,
// zeros and x come through a ring of STAGES blocks of columns in shared memory, copied
// asynchronously. Within a group of columns the products are of integers and x (exact in fp32 but
// for the order of sums); the group's scale multiplies in fp32. At the end the WK partial sums are
// added in a fixed order: two runs give the same bits.
//
// Set by the compile call beside common.cuh's: ROWS (of x a block, at most 8 NT), NT, R, WN, WK,
// STAGES, C, BLOCKS (resident a multiprocessor). GROUP is 128 here for multiples of 128 columns when C > 1.

#define X_ROWS (8 * NT)
#define CODE_BYTES (C * R * 128 * BITS)
#define SCALE_ROW (16 * SCALE_BYTES)
// Groups that a step of C blocks of columns touches, and pairs of products that share one.
#define PARTS (GROUP == 0 ? 0 : GROUP == 32 ? 2 * C : GROUP == 64 ? C : (C + 1) / 2)
#define PAIRS_A_PART (GROUP == 0 ? 2 * C : 2 * C / PARTS)
#define SCALE_AREA (PARTS * R * SCALE_ROW)
#define ZERO_AREA (ASYM ? PARTS * R * 16 : 0)
#define WARP_AREA (CODE_BYTES + SCALE_AREA + ZERO_AREA)
#define X_AREA (X_ROWS * 128)
#define STAGE_BYTES (WN * WARP_AREA + C * X_AREA)
// Rows of x that the WN warps copy in one turn, and turns.
#define X_STEP ((WN * 32) / (8 * C) < X_ROWS ? (WN * 32) / (8 * C) : X_ROWS)
#define X_TURNS ((ROWS + X_STEP - 1) / X_STEP)
#define GROUP_OF(chunk) \
  (GROUP == 32 ? 2 * (chunk) : group_inverse ? (int)__umulhi(chunk, group_inverse) : (chunk))

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
          int m_all, int n_all, int k_all, int x_stride, int chunks, int groups, u32 group_inverse,
          int out_fp32) {
  extern __shared__ __align__(128) u8 memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int wn = warp % WN, wk = warp / WN;
  const int g = lane >> 2, q = lane & 3;
  const int m0 = blockIdx.y * ROWS;
  const int rows = min(ROWS, m_all - m0);
  const int tiles = (n_all + 63) / 64 * 4;
  const int first_tile = (blockIdx.x * WN + wn) * R;
  u8* const ring = memory + wk * STAGES * STAGE_BYTES;
  const int steps_all = (chunks + C - 1) / C;
  const int mine = wk < steps_all ? (steps_all - wk + WK - 1) / WK : 0;

  // This lane's sources and targets of the next copy; every copy moves all of them on by WK steps.
  const int tile = min(first_tile, tiles - R);
  const uint4* next_codes = codes + (((u64)(tile >> 2) * chunks + (u64)wk * C) * 4 + (tile & 3)) * (BITS / 4) * 32 + lane;
  const u64 place = (u64)(tile >> 2) * groups * 64 + (tile & 3) * 16;  // of this warp's scales in group 0
  const int x_row = (wn * 32 + lane) / (8 * C), x_segment = (wn * 32 + lane) % (8 * C);
  const u16* next_x = x + (u64)(m0 + x_row) * x_stride + wk * 64 * C + x_segment * 8;
  int next_column = wk * 64 * C + x_segment * 8, next_chunk = wk * C;
  u32 next_stage = shared_address(ring), next_x_stage = next_stage;
  const u32 ring_end = next_stage + STAGES * STAGE_BYTES;
  const u32 x_target = WN * WARP_AREA + (x_segment >> 3) * X_AREA + x_row * 128;

  auto fetch_weights = [&]() {
    const u32 own = next_stage + wn * WARP_AREA + lane * 16;
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (C > 1 && next_chunk + c >= chunks) break;
#pragma unroll
      for (int r = 0; r < R * (BITS / 4); ++r)
        copy16(own + (c * R * (BITS / 4) + r) * 512, next_codes + (c * 4 * (BITS / 4) + r) * 32);
    }
    next_codes += WK * C * 4 * (BITS / 4) * 32;
#if GROUP != 0
    // Pieces of 16 bytes: part by part, tile by tile.
#pragma unroll
    for (int first = 0; first < PARTS * R * SCALE_BYTES; first += 32) {
      const int at = first + lane, part = at / (R * SCALE_BYTES), piece = at % (R * SCALE_BYTES);
      if (at >= PARTS * R * SCALE_BYTES) break;
      const u64 row = place + (u64)min(GROUP_OF(next_chunk) + part, groups - 1) * 64;
      copy16(own + CODE_BYTES + first * 16, scales + row * SCALE_BYTES + piece * 16);
    }
#if ASYM
#pragma unroll
    for (int first = 0; first < PARTS * R; first += 32) {
      const int at = first + lane, part = at / R, piece = at % R;
      if (at >= PARTS * R) break;
      const u64 row = place + (u64)min(GROUP_OF(next_chunk) + part, groups - 1) * 64;
      copy16(own + CODE_BYTES + SCALE_AREA + first * 16, zeros + row + piece * 16);
    }
#endif
#endif
    next_chunk += WK * C;
    next_stage += STAGE_BYTES;
    if (next_stage == ring_end) next_stage -= STAGES * STAGE_BYTES;
  };
  auto fetch_x = [&]() {
#pragma unroll
    for (int turn = 0; turn < X_TURNS; ++turn) {
      const int row = x_row + turn * X_STEP;
      if (row < rows && (X_STEP * 8 * C == WN * 32 || x_row < X_STEP)) {
        const bool real = next_column < k_all;
        const u32 swizzled = ((x_segment & 7) ^ (row & 7)) << 4;
        copy16_or_zero(next_x_stage + x_target + turn * X_STEP * 128 + swizzled, real ? next_x + (u64)turn * X_STEP * x_stride : x, real);
      }
    }
    next_x += WK * C * 64;
    next_column += WK * C * 64;
    next_x_stage += STAGE_BYTES;
    if (next_x_stage == ring_end) next_x_stage -= STAGES * STAGE_BYTES;
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
    const int tile = min(first_tile, tiles - R) + r;
    const u8* const pair = zeros + (u64)(tile >> 2) * 64 + (tile & 3) * 16 + 2 * g;
    zero[r] = zeros_of(pair[0], pair[1]);
#else
    zero[r] = zeros_of(8, 8);
#endif
  }

#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i)
    if (i < mine) fetch_weights();
  wait_for_kernels_before();
  let_kernels_after_start();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < mine) fetch_x();
    asm volatile("cp.async.commit_group;");
  }
  const u8* stage = ring;
  int left = chunks - wk * C;
  for (int i = 0; i < mine; ++i) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
#if WN == 1
    __syncwarp();
#else
    asm volatile("bar.sync %0, %1;" ::"r"(wk + 1), "n"(WN * 32) : "memory");
#endif
    if (i + STAGES - 1 < mine) {
      fetch_weights();
      fetch_x();
    }
    asm volatile("cp.async.commit_group;");

    const u8* const own = stage + wn * WARP_AREA;
    const u32 shared_x = shared_address(stage + WN * WARP_AREA);
    float part[R][NT][4];
#pragma unroll
    for (int pair = 0; pair < 2 * C; ++pair) {
      if (C > 1 && (pair >> 1) >= left) break;  // the last step, of fewer blocks
#if GROUP != 0
      if (pair % PAIRS_A_PART == 0) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int t = 0; t < NT; ++t)
#pragma unroll
            for (int c = 0; c < 4; ++c) part[r][t][c] = 0.f;
#if ASYM
          const u32 two = *(const u16*)(own + CODE_BYTES + SCALE_AREA + (pair / PAIRS_A_PART * R + r) * 16 + 2 * g);
          zero[r] = zeros_of(two & 255, two >> 8);
#endif
        }
      }
#endif
      u32 b[NT][4];
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        const int row = min(8 * t + (lane & 7), rows - 1), segment = 4 * (pair & 1) + (lane >> 3);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(b[t][0]), "=r"(b[t][1]), "=r"(b[t][2]), "=r"(b[t][3])
                     : "r"(shared_x + (pair >> 1) * X_AREA + row * 128 + ((segment ^ (row & 7)) << 4)));
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
#if BITS == 4
        const uint2 words = *(const uint2*)(own + (((pair >> 1) * R + r) * 32 + lane) * 16 + 8 * (pair & 1));
#else
        const uint4 words = *(const uint4*)(own + ((((pair >> 1) * R + r) * 2 + (pair & 1)) * 32 + lane) * 16);
#endif
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          u32 a[4];
#if BITS == 4
          unpack_step(step ? words.y : words.x, zero[r], a);
#else
          unpack_step(step ? words.z : words.x, step ? words.w : words.y, a);
#endif
#pragma unroll
          for (int t = 0; t < NT; ++t)
#if GROUP != 0
            multiply_add(part[r][t], a, b[t][2 * step], b[t][2 * step + 1]);
#else
            multiply_add(sums[r][t], a, b[t][2 * step], b[t][2 * step + 1]);
#endif
        }
      }
#if GROUP != 0
      if (pair % PAIRS_A_PART == PAIRS_A_PART - 1 || (C > 1 && pair == 2 * left - 1)) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const u8* const at = own + CODE_BYTES + (pair / PAIRS_A_PART * R + r) * SCALE_ROW;
#if SCALE_BYTES == 4
          const float2 two = ((const float2*)at)[g];
          const float first = two.x, second = two.y;
#else
          const u32 two = ((const u32*)at)[g];
#if SCALE_BF16
          const float first = __uint_as_float(two << 16), second = __uint_as_float(two & 0xFFFF0000u);
#else
          const float first = half_as_float((u16)two), second = half_as_float((u16)(two >> 16));
#endif
#endif
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
    left -= WK * C;
    stage += STAGE_BYTES;
    if (stage == ring + STAGES * STAGE_BYTES) stage = ring;
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
