// Hopper's own products: a warpgroup, four warps, multiplies 64 rows at a time, from operands in shared memory.
//
// They run asynchronously: `begin` once registers are written, `multiply` as often as wanted, `end`, and `wait` before
// the sums are read. A lane holds of the 64 x N sums what it holds of mma's 16 x 8 ones, warp w those of rows 16 w on.
//
// An operand in shared memory is described by a number of 64 bits: where it begins, how far apart its blocks are, and how
// it is swizzled. A tile is kept in panels of 64 columns, rows of 128 bytes, eight rows (1024 bytes) a block, in each of
// which chunk c of row r lies at place c ^ r. It must begin at a multiple of 1024 bytes.
#pragma once
#include <cstdint>
#include <type_traits>

#include <cuda_fp16.h>

namespace wgmma {

// Where eight elements from column 8 `chunk` on lie in a tile of ROWS rows, in elements.
template <int ROWS>
__device__ int place(int row, int chunk) { return chunk / 8 * ROWS * 64 + row * 64 + (chunk % 8 ^ row % 8) * 8; }

// `panels`: bytes from one panel of 64 columns to the next, where a product takes more than one.
__device__ inline uint64_t described(const void* tile, int panels) {
    constexpr uint64_t SWIZZLED_128 = 1ull << 62, BLOCKS = 1024;
    const uint64_t address = __cvta_generic_to_shared(tile);
    return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(panels >> 4) << 16 | BLOCKS >> 4 << 32 | SWIZZLED_128;
}

__device__ inline void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most the last LEFT groups are still running. `sums` are then complete: no use of them may be moved to
// before this, which the compiler would be free to do.
template <int LEFT, int N>
__device__ void wait(float (&sums)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
    for (auto& four : sums)
        asm volatile("" : "+f"(four[0]), "+f"(four[1]), "+f"(four[2]), "+f"(four[3])::"memory");
}

// What ordinary threads wrote to shared memory is seen by products and by TMA only after this.
__device__ inline void show_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// All warps of a warpgroup give registers back until each thread has COUNT, or wait until it has as many.
template <int COUNT>
__device__ void keep_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// A 64 x 64 and a 64 x 128 result have 32 and 64 registers in each lane.
#define SUMS_32 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define SUMS_64 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define SIXTEEN(n) FOUR(n), FOUR(n + 1), FOUR(n + 2), FOUR(n + 3)
#define OUT_32 SIXTEEN(0), SIXTEEN(4)
#define OUT_64 SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), SIXTEEN(12)

// The two last numbers of an instruction say whether a and b are read across their rows.
#define FROM_SHARED(SHAPE, TYPE, SUMS, OUT, A, B, ADDS, ACROSS)                                                        \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADDS ", 0; wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "."    \
                 TYPE " " SUMS ", " A ", " B ", p, 1, 1, " ACROSS ", " ACROSS "; }"                                    \
                 : OUT : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(static_cast<int>(IS_ACROSS)))

// c = a b^T where `adds` is false, else c += a b^T: a [64 x 16] and b [N x 16] in shared memory, both with their 16 along
// a row. With IS_ACROSS it is a^T b, of a [16 x 64] and b [16 x N].
template <typename T, int N, bool IS_ACROSS = false>
__device__ void multiply(float (&c)[N / 8][4], uint64_t a, uint64_t b, bool adds) {
    static_assert(N == 64 || N == 128);
    constexpr bool IS_HALF = std::is_same_v<T, __half>;
    if constexpr (N == 64 && IS_HALF)
        FROM_SHARED("m64n64k16", "f16", SUMS_32, OUT_32, "%32", "%33", "%34", "%35");
    else if constexpr (N == 64)
        FROM_SHARED("m64n64k16", "bf16", SUMS_32, OUT_32, "%32", "%33", "%34", "%35");
    else if constexpr (IS_HALF)
        FROM_SHARED("m64n128k16", "f16", SUMS_64, OUT_64, "%64", "%65", "%66", "%67");
    else
        FROM_SHARED("m64n128k16", "bf16", SUMS_64, OUT_64, "%64", "%65", "%66", "%67");
}

// c += a b: a [64 x 16] in registers, as mma has it, and b [16 x N] in shared memory, with its N along a row.
#define FROM_REGISTERS(SHAPE, TYPE, SUMS, OUT, A, B)                                                                   \
    asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " " SUMS ", " A ", " B ", 1, 1, 1, 1;"     \
                 : OUT : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <typename T, int N>
__device__ void multiply(float (&c)[N / 8][4], const unsigned (&a)[4], uint64_t b) {
    static_assert(N == 64 || N == 128);
    constexpr bool IS_HALF = std::is_same_v<T, __half>;
    if constexpr (N == 64 && IS_HALF)
        FROM_REGISTERS("m64n64k16", "f16", SUMS_32, OUT_32, "{%32, %33, %34, %35}", "%36");
    else if constexpr (N == 64)
        FROM_REGISTERS("m64n64k16", "bf16", SUMS_32, OUT_32, "{%32, %33, %34, %35}", "%36");
    else if constexpr (IS_HALF)
        FROM_REGISTERS("m64n128k16", "f16", SUMS_64, OUT_64, "{%64, %65, %66, %67}", "%68");
    else
        FROM_REGISTERS("m64n128k16", "bf16", SUMS_64, OUT_64, "{%64, %65, %66, %67}", "%68");
}

#undef FROM_SHARED
#undef FROM_REGISTERS
#undef OUT_32
#undef OUT_64
#undef SIXTEEN
#undef FOUR
#undef SUMS_32
#undef SUMS_64

}  // namespace wgmma
