// What all rungs of the series share: what one is called with, and how it is started.
#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// What a kernel takes of a multiprocessor.
struct Facts {
    int32_t registers;                           // of a thread, when it starts
    int32_t shared_bytes, threads;               // of a block
    int32_t blocks;                              // that a multiprocessor holds at once
    int32_t spilled_bytes;                       // of a thread's registers, to memory
};

struct Arguments {
    const void *q, *k, *v;                       // [B, H, S, D], [B, G, S, D], [B, G, S, D]: H / G heads of q share one
    void* y;                                     // [B, H, S, D]
    float* log_sum;                              // [B, H, S]: the logarithm of each row's sum of exp(score)
    const void* dy;                              // from here on of the backward alone, null in the forward: [B, H, S, D]
    void *dq, *dk, *dv;                          // like q, k and v
    float *dq_sums, *row_numbers;                // room to work in: backward/backward.cuh
    int32_t batch, heads, kv_heads, length, width, is_bfloat16, is_causal;
    cudaStream_t stream;
    Facts* facts;                                // where it is not null, they are told, and nothing runs
};

constexpr float LOG2_E = 1.4426950408889634f;    // exp(x) is exp2(LOG2_E x), and exp2 is one instruction

// A kernel's own view of them. Block (x, y) has the rows of head y from ROWS x on.
template <typename T>
struct Inputs {
    const T *q, *k, *v;
    T* y;
    float* log_sum;
    int heads, kv_heads, length;
    bool is_causal;
    float scale;                                 // LOG2_E / sqrt(D)

    explicit Inputs(const Arguments& a)
        : q(static_cast<const T*>(a.q)), k(static_cast<const T*>(a.k)), v(static_cast<const T*>(a.v)),
          y(static_cast<T*>(a.y)), log_sum(a.log_sum), heads(a.heads), kv_heads(a.kv_heads), length(a.length),
          is_causal(a.is_causal), scale(LOG2_E / sqrtf(a.width)) {}

    // The head of k and v that head `head` of all batches' q attends to.
    __device__ int kv_head(int head) const { return head / heads * kv_heads + head % heads / (heads / kv_heads); }

    // Whether row `row` sees key `key`.
    __device__ bool sees(int row, int key) const { return key < length && !(is_causal && key > row); }
};

// What -inf - -inf would make NaN: a row that has seen no key yet.
__device__ inline float finite_or_zero(float peak) { return peak == -INFINITY ? 0.0f : peak; }

__device__ inline float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two numbers rounded to T, in one register: the first in its lower half.
template <typename T>
__device__ unsigned pack(float first, float second) {
    unsigned packed;
    if constexpr (std::is_same_v<T, __half>)
        *reinterpret_cast<__half2*>(&packed) = __floats2half2_rn(first, second);
    else
        *reinterpret_cast<__nv_bfloat162*>(&packed) = __floats2bfloat162_rn(first, second);
    return packed;
}

__device__ inline float2 unpacked(__half2 pair) { return __half22float2(pair); }
__device__ inline float2 unpacked(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }

inline cudaError_t tell(const void* kernel, int threads, int shared_bytes, Facts& facts) {
    cudaFuncAttributes attributes;
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel))
        return error;
    facts.registers = attributes.numRegs;
    facts.shared_bytes = shared_bytes + static_cast<int>(attributes.sharedSizeBytes);
    facts.threads = threads;
    facts.spilled_bytes = static_cast<int>(attributes.localSizeBytes);
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&facts.blocks, kernel, threads, shared_bytes);
}

// Starts a kernel, or tells its facts. Returns what went wrong, or null.
template <typename Kernel, typename... Parameters>
const char* start(Kernel kernel, dim3 blocks, int threads, int shared_bytes, const Arguments& a,
                  Parameters... parameters) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    cudaError_t error;
    if (a.facts) {
        error = tell(reinterpret_cast<const void*>(kernel), threads, shared_bytes, *a.facts);
    } else {
        kernel<<<blocks, threads, shared_bytes, a.stream>>>(parameters...);
        error = cudaGetLastError();
    }
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// The same, with a block for each `rows` rows of each head of q.
template <typename Kernel, typename... Parameters>
const char* start(Kernel kernel, int rows, int threads, int shared_bytes, const Arguments& a, Parameters... parameters) {
    const dim3 blocks((a.length + rows - 1) / rows, a.batch * a.heads);
    return start(kernel, blocks, threads, shared_bytes, a, parameters...);
}

// Each rung's own.
template <typename T, int D>
const char* launch(const Arguments& a);

extern "C" const char* run(const Arguments* a) {
    if (a->width == 64)
        return a->is_bfloat16 ? launch<__nv_bfloat16, 64>(*a) : launch<__half, 64>(*a);
    return a->is_bfloat16 ? launch<__nv_bfloat16, 128>(*a) : launch<__half, 128>(*a);
}
