// Hopper's copies of whole tiles: one thread names a box of a matrix, and the hardware copies and swizzles it.
//
// A barrier counts what is still to arrive: threads, and bytes of copies. Its phases alternate, and `wait` names the one
// to wait for the end of: 0 for the first.
#pragma once
#include <cstdint>

#include <cuda.h>
#include <cuda_runtime.h>

#include "../copies.cuh"

namespace tma {

using Barrier = uint64_t;

__device__ inline void prepare(Barrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// What `prepare` wrote is seen by copies only after this, and by other threads after a barrier of the block.
__device__ inline void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and says that so many bytes will.
__device__ inline void expect(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ inline void wait(Barrier* barrier, int phase) {
    asm volatile("{ .reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again; }" ::"r"(shared_address(barrier)), "r"(phase) : "memory");
}

// Starts to copy ROWS rows of D elements from row `first` of a head on, in panels as wgmma.cuh has them; rows behind the
// end of the head become zeros. The barrier must expect them.
template <int ROWS, int D, typename T>
__device__ void load(T* to, const CUtensorMap& map, int first, int head, Barrier* barrier) {
#pragma unroll
    for (int panel = 0; panel < D / 64; ++panel)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to + panel * ROWS * 64)), "l"(&map),
                     "r"(panel * 64), "r"(first), "r"(head), "r"(shared_address(barrier)) : "memory");
}

// Starts to copy so many bytes, a multiple of 16, as they lie. The barrier must expect them.
__device__ inline void load(void* to, const void* from, int bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// A matrix [heads, length, width] of 16-bit elements, in boxes of 64 columns and `rows` rows; `ok` is false where the
// driver refuses it.
struct Matrix {
    CUtensorMap map;
    bool ok;

    Matrix(const void* data, bool is_bfloat16, int heads, int length, int width, int rows) {
        const cuuint64_t sizes[] = {cuuint64_t(width), cuuint64_t(length), cuuint64_t(heads)};
        const cuuint64_t strides[] = {cuuint64_t(width) * 2, cuuint64_t(width) * 2 * length};
        const cuuint32_t box[] = {64, cuuint32_t(rows), 1}, steps[] = {1, 1, 1};
        void* encode = nullptr;
        cudaDriverEntryPointQueryResult found;
        ok = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found)
                 == cudaSuccess && found == cudaDriverEntryPointSuccess;
        ok = ok && reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
                 &map, is_bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3,
                 const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
    }
};

}  // namespace tma
