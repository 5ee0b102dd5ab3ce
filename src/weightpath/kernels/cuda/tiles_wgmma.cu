// out[m, n] = sum_k x[m, k] w[n, k] + bias[n] for many rows of x, on Hopper's wgmma (sm_90a).
//
// Weights are the left operand, in registers: GROUPS warpgroups of 64 of their rows each, by COLUMNS
// rows of x, which lie in shared memory. Four more warps copy x (a tensor map: 128-byte swizzle, zeros
// beyond the matrix), codes, scales and zeros, STAGES blocks of 64 columns ahead. While one block's
// products run, the next one's codes are unpacked and scaled; the warpgroups fill each other's waits.
//
// SPLIT > 1: a cluster of so many blocks divides the columns of a tile and adds its partial sums
// through distributed shared memory, in a fixed order. SPLIT = 1: blocks take tile after tile, the
// copying warps already at the next one's.
//
// Set by the compile call beside common.cuh's: GROUPS, COLUMNS, STAGES, SPLIT, BLOCKS. The
// macro WGMMA(d, a, descriptor) is generated in tiles_linear.py, since it lists COLUMNS / 2 registers.

#define ROWS (64 * GROUPS)  // of the weight a tile
#define CODE_BYTES (BITS * 8 * ROWS)
#define SCALES_STAGED (GROUP != 0)
#define SCALE_AREA (SCALES_STAGED ? ROWS * SCALE_BYTES * GROUPS_A_CHUNK : 0)
#define ZERO_AREA (SCALES_STAGED && ASYM ? ROWS * GROUPS_A_CHUNK : 0)
#define X_BYTES (COLUMNS * 128)
#define STAGE_BYTES ((X_BYTES + CODE_BYTES + SCALE_AREA + ZERO_AREA + 1023) / 1024 * 1024)
#define COPIED_BYTES (X_BYTES + CODE_BYTES + SCALE_AREA + ZERO_AREA)
#define SUMS (COLUMNS / 2)
#define COPYING_WARPS (2 + SCALES_STAGED + (SCALES_STAGED && ASYM))
// Registers that the copying warps leave to the others, where those need them.
#define MOVE_REGISTERS (GROUPS == 2 && (COLUMNS == 256 || (COLUMNS >= 64 && BLOCKS == 2)))
#define THREADS (128 * (GROUPS + 1))
#define M_TILES_TOGETHER 8  // tiles of x that are taken in turns, so that they stay in the L2 cache

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
  const u8* const codes = stage + X_BYTES + half * (CODE_BYTES / GROUPS) + warp * (CODE_BYTES / GROUPS / 4) + lane * 16;
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

// The order of tiles: some tiles of x in turns for each tile of the weight, so that it is read once.
static __device__ __forceinline__ void place_of(int tile, int m_tiles, int n_tiles, int& m_tile, int& n_tile) {
  const int band = tile / (M_TILES_TOGETHER * n_tiles), first = band * M_TILES_TOGETHER;
  const int height = min(M_TILES_TOGETHER, m_tiles - first), within = tile - first * n_tiles;
  m_tile = first + within % height;
  n_tile = within / height;
}

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
            int m_all, int n_all, int chunks, int groups, u32 group_inverse, int out_fp32) {
  extern __shared__ u8 memory_start[];
  u8* const memory = memory_start + (-shared_address(memory_start) & 1023);
  u8* const out_tile = memory + STAGES * STAGE_BYTES;  // SPLIT 1: 16-bit [COLUMNS][ROWS]
  const u32 full = shared_address(memory) + STAGES * STAGE_BYTES + (SPLIT == 1 ? COLUMNS * ROWS * 2 : 0);
  const u32 empty = full + 8 * STAGES;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int m_tiles = (m_all + COLUMNS - 1) / COLUMNS, blocks64 = (n_all + 63) / 64;
  const int n_tiles = (blocks64 + GROUPS - 1) / GROUPS, tiles = n_tiles * m_tiles;
  int rank = 0;
#if SPLIT > 1
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  const int first_chunk = rank * chunks / SPLIT, mine = (rank + 1) * chunks / SPLIT - first_chunk;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + 8 * s, COPYING_WARPS);
      barrier_init(empty + 8 * s, 4 * GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_kernels_after_start();
  const int step = gridDim.x / SPLIT;

  if (warp >= 4 * GROUPS) {
    // Four copying warps: x, codes, scales, zeros. One thread of each issues its copies.
#if MOVE_REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(BLOCKS == 2 ? 32 : 40));
#endif
    const int role = warp - 4 * GROUPS;
    if (lane == 0 && role < COPYING_WARPS) {
      int s = 0, turn = 0;
      const auto free_stage = [&](int bytes) {
        if (turn) barrier_wait(empty + 8 * s, (turn - 1) & 1);
        barrier_expect(full + 8 * s, bytes);
        return shared_address(memory) + s * STAGE_BYTES;
      };
      const auto next = [&]() {
        if (++s == STAGES) s = 0, ++turn;
      };
      for (int tile = blockIdx.x / SPLIT; tile < tiles; tile += step) {
        int m_tile, n_tile;
        place_of(tile, m_tiles, n_tiles, m_tile, n_tile);
        const auto block_of = [&](int half) { return (u64)min(n_tile * GROUPS + half, blocks64 - 1); };
        if (role == 0) {
          wait_for_kernels_before();
          for (int i = 0; i < mine; ++i, next()) {
            const u32 to = free_stage(X_BYTES);
            copy_box(to, &x, (first_chunk + i) * 64, m_tile * COLUMNS, full + 8 * s);
          }
        } else if (role == 1) {
          const u8* from[GROUPS];
#pragma unroll
          for (int half = 0; half < GROUPS; ++half)
            from[half] = codes + (block_of(half) * chunks + first_chunk) * (CODE_BYTES / GROUPS);
          for (int i = 0; i < mine; ++i, next()) {
            const u32 to = free_stage(CODE_BYTES) + X_BYTES;
#pragma unroll
            for (int half = 0; half < GROUPS; ++half) {
              copy_bulk(to + half * (CODE_BYTES / GROUPS), from[half], CODE_BYTES / GROUPS, full + 8 * s);
              from[half] += CODE_BYTES / GROUPS;
            }
          }
        } else {
#if GROUP != 0
          const int bytes = role == 2 ? SCALE_AREA : ZERO_AREA, a_group = role == 2 ? 64 * SCALE_BYTES : 64;
          const u8* const all = role == 2 ? scales : zeros;
          const u8* from[GROUPS];
#pragma unroll
          for (int half = 0; half < GROUPS; ++half) from[half] = all + block_of(half) * groups * a_group;
          const int at = X_BYTES + CODE_BYTES + (role == 2 ? 0 : SCALE_AREA);
          for (int i = 0; i < mine; ++i, next()) {
            const u32 chunk = first_chunk + i;
            const int group = GROUP == 32 ? 2 * chunk : group_inverse ? __umulhi(chunk, group_inverse) : chunk;
            const u32 to = free_stage(bytes) + at;
#pragma unroll
            for (int half = 0; half < GROUPS; ++half)
              copy_bulk(to + half * (bytes / GROUPS), from[half] + group * a_group, bytes / GROUPS, full + 8 * s);
          }
#endif
        }
      }
    }
    __syncwarp();
#if SPLIT > 1
    cluster_sync();
#endif
  } else {
#if MOVE_REGISTERS
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(BLOCKS == 2 ? 104 : 232));
#endif
  [[maybe_unused]] const int half = warp >> 2, part = warp & 3, g = lane >> 2, q = lane & 3;
  int at = 0;
  for (int tile = blockIdx.x / SPLIT; tile < tiles; tile += step) {
    int m_tile, n_tile;
    place_of(tile, m_tiles, n_tiles, m_tile, n_tile);
    const int m0 = m_tile * COLUMNS, block = n_tile * GROUPS + half;
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
      const u32 barrier = empty + 8 * ((at + i) % STAGES);
      if (lane == 0) barrier_arrive(barrier);
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
    // Partial sums [COLUMNS][ROWS + 4] over the stages; each block then adds its share of the columns.
    float* const partial = (float*)memory;
    asm volatile("bar.sync 1, %0;" ::"n"(128 * GROUPS) : "memory");
#pragma unroll
    for (int i = 0; i < SUMS; ++i)
      partial[(8 * (i / 4) + 2 * q + (i & 1)) * (ROWS + 4) + half * 64 + part * 16 + g + 8 * (i >> 1 & 1)] = sums[i];
    cluster_sync();
    // Four rows of the weight a thread: the copies of all blocks are on their way at once.
    const u32 base = shared_address(memory);
    for (int e = threadIdx.x; e < COLUMNS / SPLIT * ROWS / 4; e += 128 * GROUPS) {
      const int four = e % (ROWS / 4) * 4, n = n_tile * ROWS + four;
      const int column = rank * (COLUMNS / SPLIT) + e / (ROWS / 4), m = m0 + column;
      float4 parts[SPLIT];
#pragma unroll
      for (int other = 0; other < SPLIT; ++other) {
        u32 remote;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(base + (u32)(column * (ROWS + 4) + four) * 4), "r"(other));
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(parts[other].x), "=f"(parts[other].y), "=f"(parts[other].z), "=f"(parts[other].w)
                     : "r"(remote) : "memory");
      }
      float total[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int other = 0; other < SPLIT; ++other) {
        total[0] += parts[other].x, total[1] += parts[other].y;
        total[2] += parts[other].z, total[3] += parts[other].w;
      }
      if (m >= m_all) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (n + i >= n_all) break;
#if GROUP == 0
        const int row = n + i;
        total[i] *= scale_as_float(scales, (u64)(row >> 6) * 64 + (row >> 4 & 3) * 16 + 2 * (row & 7) + (row >> 3 & 1));
#endif
        if (bias != nullptr) total[i] += activation_as_float(bias[n + i]);
      }
      const u64 place = (u64)m * n_all + n;
      if (!out_fp32 && n + 3 < n_all && !(n_all & 3)) {
        *(uint2*)((u16*)out + place) = make_uint2(pack2(total[0], total[1]), pack2(total[2], total[3]));
        continue;
      }
      for (int i = 0; i < 4 && n + i < n_all; ++i) {
        if (out_fp32)
          ((float*)out)[place + i] = total[i];
        else
          ((u16*)out)[place + i] = pack1(total[i]);
      }
    }
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
                         to + column * (ROWS * 2) + ((segment ^ (column & 7)) << 4)),
                     "r"(block4[0]), "r"(block4[1]), "r"(block4[2]), "r"(block4[3]) : "memory");
      }
      asm volatile("bar.sync %0, 128;" ::"r"(half + 1) : "memory");
      const int thread = threadIdx.x & 127, segment = thread & 7;
      for (int column = thread >> 3; column < COLUMNS; column += 16) {
        const int m = m0 + column, n = n_half + segment * 8;
        if (m >= m_all || n >= n_all) continue;
        const uint4 eight = *(const uint4*)(out_tile + column * (ROWS * 2) + (((half * 8 + segment) ^ (column & 7)) << 4));
        *(uint4*)((u16*)out + (u64)m * n_all + n) = eight;
      }
      asm volatile("bar.sync %0, 128;" ::"r"(half + 1) : "memory");
    }
#endif
  }
  }
#if SPLIT > 1
  cluster_sync();  // no block ends while another reads its memory or arrives at its barriers
#endif
}
