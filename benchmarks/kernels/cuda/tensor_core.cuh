// The three instructions that attention.cu's products are made of, and how shared memory is laid out for them.
#pragma once
#include <type_traits>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "copies.cuh"

// A tile is rows of WIDTH 16-bit elements, cut into chunks of 8 (16 bytes). ldmatrix reads one chunk of each of eight
// neighbouring rows at once. A row is a multiple of 128 bytes, which is all 32 banks: in plain order the eight chunks
// would lie in the same four banks and be read one after the other. So chunk c of row r is kept at place c ^ (r % 8),
// and the eight chunks lie in all banks. Returns an offset in elements.
template <int WIDTH>
__device__ int swizzled(unsigned row, unsigned chunk) { return row * WIDTH + (chunk ^ (row % 8)) * 8; }

// Four 8 x 8 matrices of 16-bit elements; lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i. Of each
// matrix, lane l gets elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.
__device__ inline void load_matrices(unsigned (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}

// The same of the transposed matrices.
__device__ inline void load_transposed(unsigned (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}

// c [16 x 8] += a [16 x 16] b [16 x 8] by one warp, FP32 sums. With g = lane / 4 and t = 2 (lane % 4), a lane holds
//     c: (g, t), (g, t + 1), (g + 8, t), (g + 8, t + 1)
//     a: (g, t..), (g + 8, t..), (g, t + 8..), (g + 8, t + 8..)    two neighbours along the row in each register
//     b: (t.., g), (t + 8.., g)                                    two neighbours along the column in each register
template <typename T>
__device__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if constexpr (std::is_same_v<T, __half>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
