// out[m, n] = sum_k x[m, k] w[n, k] + bias[n] for many rows of x, on Hopper's wgmma (sm_90a).
//
// Weights are the left operand, in registers: two warpgroups of 64 of their rows each, by COLUMNS
// rows of x, which lie in shared memory. A ninth warp copies x (a tensor map: 128-byte swizzle, zeros
// beyond the matrix), codes, scales and zeros, STAGES blocks of 64 columns ahead. While one block's
// products run, the next one's codes are unpacked and scaled; the two warpgroups fill each other's
// waits. SPLIT > 1: a cluster of so many blocks shares the columns of a tile, adds its partial sums
// through distributed shared memory in a fixed order. SPLIT = 1: blocks take tile after tile, the
// ninth warp already copying the next one's.
//
// Set by the compile call beside common.cuh's: COLUMNS, STAGES, SPLIT, BLOCKS. WGMMA(d, a, descriptor)
// is generated in tiles_linear.py, since its text lists COLUMNS / 2 registers.

#define CODE_BYTES (BITS * 1024)  // of 128 rows
#define SCALES_STAGED (GROUP != 0)
#define SCALE_AREA (SCALES_STAGED ? 128 * SCALE_BYTES * GROUPS_A_CHUNK : 0)
#define ZERO_AREA (SCALES_STAGED && ASYM ? 128 * GROUPS_A_CHUNK : 0)
#define X_BYTES (COLUMNS * 128)
#define STAGE_BYTES ((X_BYTES + CODE_BYTES + SCALE_AREA + ZERO_AREA + 1023) / 1024 * 1024)
#define COPIED_BYTES (X_BYTES + CODE_BYTES + SCALE_AREA + ZERO_AREA)
#define SUMS (COLUMNS / 2)
// With 128 sums a thread, the copying warp's registers go to the others: that takes a whole warpgroup.
#define MOVE_REGISTERS (COLUMNS == 256)
#define THREADS (MOVE_REGISTERS ? 384 : 288)

struct __align__(64) TensorMap {
  u8 bytes[128];
};

static __device__ __forceinline__ void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

static __device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void barrier_wait(u32 barrier, int parity) {
  asm volatile(
      "{\n .reg .pred done;\n again:\n"
      " mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

static __device__ __forceinline__ void copy_bulk(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

static __device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

static __device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
}

static __device__ __forceinline__ u32 dup2(float value) { return pack2(value, value); }

// One block of columns of this warp's 16 rows: codes to the left operands of its four steps.
static __device__ __forceinline__ void unpack_chunk(const u8* stage, int half, int warp, int lane, u32 zero_pair,
                                                    u32 (&a)[4][4]) {
  const u8* const codes = stage + X_BYTES + half * (CODE_BYTES / 2) + warp * (CODE_BYTES / 8) + lane * 16;
  const int g = lane >> 2;
#if BITS == 4
  const uint4 words = *(const uint4*)codes;
  Zeros zero = zeros_of(zero_pair & 255, zero_pair >> 8);
#else
  const uint4 low = *(const uint4*)codes, high = *(const uint4*)(codes + 512);
#endif
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
#if GROUP != 0
    const int part = GROUP == 32 ? pair : 0;
    const u64 at = (u64)((half * GROUPS_A_CHUNK + part) * 64 + warp * 16 + 2 * g);
    const u8* const scales = stage + X_BYTES + CODE_BYTES;
    const u32 first = dup2(scale_as_float(scales, at)), second = dup2(scale_as_float(scales, at + 1));
#if ASYM
    const u32 two = *(const u16*)(scales + SCALE_AREA + at);
    zero = zeros_of(two & 255, two >> 8);
#endif
#endif
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      u32(&to)[4] = a[2 * pair + step];
#if BITS == 4
      unpack_step(pair ? (step ? words.w : words.z) : (step ? words.y : words.x), zero, to);
#else
      const uint4 w = pair ? high : low;
      unpack_step(step ? w.z : w.x, step ? w.w : w.y, to);
#endif
#if GROUP != 0
      to[0] = multiply2(to[0], first);
      to[1] = multiply2(to[1], second);
      to[2] = multiply2(to[2], first);
      to[3] = multiply2(to[3], second);
#endif
    }
  }
}

static __device__ __forceinline__ void multiply_chunk(float (&d)[SUMS], const u32 (&a)[4][4], u32 x) {
  // Rows of 128 bytes, swizzled; eight rows are 1,024 bytes; a step is 32 bytes further.
  const u64 descriptor = (1ull << 62) | (64ull << 32) | (1ull << 16) | ((x & 0x3FFFF) >> 4);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const u64 at = descriptor + 2 * step;
    WGMMA(d, a[step], at);
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

#define WAIT_FOR_PRODUCTS() asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory")

static __device__ __forceinline__ void keep(float (&d)[SUMS]) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
#if SPLIT > 1
    __cluster_dims__(SPLIT, 1, 1)
#endif
tiles_wgmma(const u8* __restrict__ codes, const u8* __restrict__ scales, const u8* __restrict__ zeros,
            const __grid_constant__ TensorMap x, const u16* __restrict__ bias, void* __restrict__ out,
            int m_all, int n_all, int chunks, int groups, int chunks_a_group, int out_fp32) {
  extern __shared__ u8 memory_start[];
  u8* const memory = memory_start + (-shared_address(memory_start) & 1023);
  u8* const out_tile = memory + STAGES * STAGE_BYTES;  // SPLIT 1: 16-bit [COLUMNS][128]
  const u32 full = shared_address(memory) + STAGES * STAGE_BYTES + (SPLIT == 1 ? COLUMNS * 256 : 0);
  const u32 empty = full + 8 * STAGES;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int m_tiles = (m_all + COLUMNS - 1) / COLUMNS, blocks64 = (n_all + 63) / 64;
  const int tiles = (blocks64 + 1) / 2 * m_tiles;
  int rank = 0;
#if SPLIT > 1
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  const int first_chunk = rank * chunks / SPLIT, mine = (rank + 1) * chunks / SPLIT - first_chunk;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int step = gridDim.x / SPLIT;

  if (warp >= 8) {
#if MOVE_REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#endif
    if (threadIdx.x == 256) {
      int at = 0;
      for (int tile = blockIdx.x / SPLIT; tile < tiles; tile += step) {
        const int m0 = tile % m_tiles * COLUMNS, block = tile / m_tiles * 2;
        for (int i = 0; i < mine; ++i, ++at) {
          const int s = at % STAGES, turn = at / STAGES, chunk = first_chunk + i;
          if (turn) barrier_wait(empty + 8 * s, (turn - 1) & 1);
          const u32 barrier = full + 8 * s, to = shared_address(memory + s * STAGE_BYTES);
          barrier_expect(barrier, COPIED_BYTES);
          copy_box(to, &x, chunk * 64, m0, barrier);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const u64 b = min(block + half, blocks64 - 1);
            copy_bulk(to + X_BYTES + half * (CODE_BYTES / 2), codes + (b * chunks + chunk) * (CODE_BYTES / 2),
                      CODE_BYTES / 2, barrier);
#if GROUP != 0
            const int group = GROUP == 32 ? 2 * chunk : chunk / chunks_a_group;
            copy_bulk(to + X_BYTES + CODE_BYTES + half * (SCALE_AREA / 2),
                      scales + (b * groups + group) * 64 * SCALE_BYTES, SCALE_AREA / 2, barrier);
#if ASYM
            copy_bulk(to + X_BYTES + CODE_BYTES + SCALE_AREA + half * (ZERO_AREA / 2),
                      zeros + (b * groups + group) * 64, ZERO_AREA / 2, barrier);
#endif
#endif
          }
        }
      }
    }
#if SPLIT > 1
    __syncwarp();
    cluster_sync();
    cluster_sync();
#endif
  } else {
#if MOVE_REGISTERS
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
#endif
  const int half = warp >> 2, part = warp & 3, g = lane >> 2, q = lane & 3;
  int at = 0;
  for (int tile = blockIdx.x / SPLIT; tile < tiles; tile += step) {
    const int m0 = tile % m_tiles * COLUMNS, block = tile / m_tiles * 2 + half;
    u32 zero_pair = 8 << 8 | 8;
#if GROUP == 0 && ASYM
    zero_pair = *(const u16*)(zeros + (u64)min(block, blocks64 - 1) * 64 + part * 16 + 2 * g);
#endif
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0.f;

    u32 even[4][4], odd[4][4];
    const auto stage_of = [&](int i) { return memory + (at + i) % STAGES * STAGE_BYTES; };
    const auto wait_full = [&](int i) { barrier_wait(full + 8 * ((at + i) % STAGES), ((at + i) / STAGES) & 1); };
    const auto release = [&](int i) {
      if ((threadIdx.x & 127) == 0) barrier_arrive(empty + 8 * ((at + i) % STAGES));
    };
    if (mine) {
      wait_full(0);
      unpack_chunk(stage_of(0), half, part, lane, zero_pair, even);
    }
    for (int i = 0; i < mine; i += 2) {
      multiply_chunk(sums, even, shared_address(stage_of(i)));
      if (i + 1 < mine) {
        wait_full(i + 1);
        unpack_chunk(stage_of(i + 1), half, part, lane, zero_pair, odd);
      }
      WAIT_FOR_PRODUCTS();
      keep(sums);
      release(i);
      if (i + 1 < mine) {
        multiply_chunk(sums, odd, shared_address(stage_of(i + 1)));
        if (i + 2 < mine) {
          wait_full(i + 2);
          unpack_chunk(stage_of(i + 2), half, part, lane, zero_pair, even);
        }
        WAIT_FOR_PRODUCTS();
        keep(sums);
        release(i + 1);
      }
    }
    at += mine;

#if SPLIT > 1
    // Partial sums [COLUMNS][128 + 4] over the stages; each block then adds its share of the columns.
    float* const partial = (float*)memory;
    asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll
    for (int i = 0; i < SUMS; ++i)
      partial[(8 * (i / 4) + 2 * q + (i & 1)) * 132 + half * 64 + part * 16 + g + 8 * (i >> 1 & 1)] = sums[i];
    cluster_sync();
    const u32 base = shared_address(memory);
    const int share = COLUMNS / SPLIT, n = (tile / m_tiles) * 128 + (threadIdx.x & 127);
    float scale = 1.f, add = 0.f;
    if (n < n_all) {
#if GROUP == 0
      scale = scale_as_float(scales, (u64)(n >> 6) * 64 + (n >> 4 & 3) * 16 + 2 * (n & 7) + (n >> 3 & 1));
#endif
      if (bias != nullptr) add = activation_as_float(bias[n]);
    }
    for (int c = threadIdx.x >> 7; c < share; c += 2) {
      const int column = rank * share + c, m = m0 + column;
      float total = 0.f;
#pragma unroll
      for (int other = 0; other < SPLIT; ++other) {
        u32 remote;
        float value;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(base + (u32)(column * 132 + (threadIdx.x & 127)) * 4), "r"(other));
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
        total += value;
      }
      if (m < m_all && n < n_all) {
        const u64 place = (u64)m * n_all + n;
        total = total * scale + add;
        if (out_fp32)
          ((float*)out)[place] = total;
        else
          ((u16*)out)[place] = pack1(total);
      }
    }
    cluster_sync();
#else
    const int n_half = block * 64;  // this warpgroup's first row of the weight
    float scale[2] = {1.f, 1.f}, add[2] = {0.f, 0.f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = n_half + part * 16 + g + 8 * h;
      if (n < n_all) {
#if GROUP == 0
        scale[h] = scale_as_float(scales, (u64)(n >> 6) * 64 + part * 16 + 2 * g + h);
#endif
        if (bias != nullptr) add[h] = activation_as_float(bias[n]);
      }
    }
    if (out_fp32 || (n_all & 7)) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {
        const int m = m0 + 8 * (i / 4) + 2 * q + (i & 1), h = i >> 1 & 1, n = n_half + part * 16 + g + 8 * h;
        if (m >= m_all || n >= n_all) continue;
        const float total = sums[i] * scale[h] + add[h];
        if (out_fp32)
          ((float*)out)[(u64)m * n_all + n] = total;
        else
          ((u16*)out)[(u64)m * n_all + n] = pack1(total);
      }
    } else {
      // Transposed through shared memory: 8 by 8 blocks, so that a row of out is written in 128 bytes.
      const u32 to = shared_address(out_tile);
#pragma unroll
      for (int i = 0; i < SUMS; i += 8) {  // 16 rows of x
        u32 block4[4];
#pragma unroll
        for (int b = 0; b < 4; ++b)  // rows of x 8 (b / 2).., rows of the weight 8 (b % 2)..
          block4[b] = pack2(sums[i + 2 * b] * scale[b & 1] + add[b & 1], sums[i + 2 * b + 1] * scale[b & 1] + add[b & 1]);
        const int column = i * 2 + (lane >> 4) * 8 + (lane & 7);
        const int segment = half * 8 + part * 2 + (lane >> 3 & 1);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                         to + column * 256 + ((segment ^ (column & 7)) << 4)),
                     "r"(block4[0]), "r"(block4[1]), "r"(block4[2]), "r"(block4[3]) : "memory");
      }
      asm volatile("bar.sync %0, 128;" ::"r"(half + 1) : "memory");
      const int thread = threadIdx.x & 127, segment = thread & 7;
      for (int column = thread >> 3; column < COLUMNS; column += 16) {
        const int m = m0 + column, n = n_half + segment * 8;
        if (m >= m_all || n >= n_all) continue;
        const uint4 eight = *(const uint4*)(out_tile + column * 256 + (((half * 8 + segment) ^ (column & 7)) << 4));
        *(uint4*)((u16*)out + (u64)m * n_all + n) = eight;
      }
      asm volatile("bar.sync %0, 128;" ::"r"(half + 1) : "memory");
    }
#endif
  }
  }
}
