// What the rungs of the backward share: a kernel's view of its arguments, what runs before it and what after it.
//
// With scores S = q k^T / sqrt(D), P = exp(S - log_sum) and y = P v:
//
//     dv = P^T dy        dP = dy v^T        dS = P (dP - dot)        dq = dS k / sqrt(D)        dk = dS^T q / sqrt(D)
//
// where dot is a row's sum of dy y: how much the row's softmax would grow as a whole, which it can't. A block has some
// keys and goes through all rows that see them. Its dk and dv stay in registers. Each row's dq gets a part from every
// block of keys, so that these are added in memory, in FP32; their order, and with it the last bits, may differ between
// calls.
#pragma once
#include "../series.cuh"

constexpr int PADDED_TO = 128;                   // rows of a head in row_numbers

template <typename T>
struct BackwardInputs : Inputs<T> {
    const T* dy;
    T *dq, *dk, *dv;
    float* dq_sums;                              // [B, H, S, D]: dq sqrt(D), not rounded yet
    float2* row_numbers;                         // [B, H, padded S]: LOG2_E log_sum, and the dot; zeros behind the end
    int padded_length;
    float root;                                  // 1 / sqrt(D)

    explicit BackwardInputs(const Arguments& a)
        : Inputs<T>(a), dy(static_cast<const T*>(a.dy)), dq(static_cast<T*>(a.dq)), dk(static_cast<T*>(a.dk)),
          dv(static_cast<T*>(a.dv)), dq_sums(a.dq_sums), row_numbers(reinterpret_cast<float2*>(a.row_numbers)),
          padded_length((a.length + PADDED_TO - 1) / PADDED_TO * PADDED_TO),
          root(1.0f / sqrtf(a.width)) {}

    // Whether row `row` is there and sees key `key`.
    __device__ bool sees(int row, int key) const { return row < this->length && Inputs<T>::sees(row, key); }

    // How many heads of q share one of k and v, and the first of those that share `kv_head` of all batches.
    __device__ int sharing() const { return this->heads / this->kv_heads; }
    __device__ int first_head(int kv_head) const { return kv_head * sharing(); }
};

// A warp has a row: its numbers, and zeros in its dq_sums.
template <typename T, int D>
__global__ void attention_backward_prepare(const BackwardInputs<T> in) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, head = blockIdx.y, lane = threadIdx.x % 32;
    float2* const numbers = in.row_numbers + static_cast<int64_t>(head) * in.padded_length + row;
    if (row >= in.length) {
        if (row < in.padded_length && lane == 0)
            *numbers = {};
        return;
    }
    const int64_t at = static_cast<int64_t>(head) * in.length + row;
    float dot = 0.0f;
    for (int column = 2 * lane; column < D; column += 64) {
        const float2 dy = unpacked(*reinterpret_cast<const Pair*>(in.dy + at * D + column));
        const float2 y = unpacked(*reinterpret_cast<const Pair*>(in.y + at * D + column));
        dot += dy.x * y.x + dy.y * y.y;
        *reinterpret_cast<float2*>(in.dq_sums + at * D + column) = {};
    }
    for (int lanes = 16; lanes > 0; lanes /= 2)
        dot += __shfl_xor_sync(~0u, dot, lanes);
    if (lane == 0)
        *numbers = {in.log_sum[at] * LOG2_E, dot};
}

// Rounds dq to T.
template <typename T>
__global__ void attention_backward_finish(const BackwardInputs<T> in, int64_t pairs) {
    const int64_t pair = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (pair >= pairs)
        return;
    const float2 sum = reinterpret_cast<const float2*>(in.dq_sums)[pair];
    reinterpret_cast<unsigned*>(in.dq)[pair] = pack<T>(sum.x * in.root, sum.y * in.root);
}

// A rung's kernel, with a block for each KEYS keys of each head of k, between the two.
template <typename T, int D, typename Kernel, typename... Parameters>
const char* run_backward(Kernel kernel, int keys, int threads, int shared_bytes, const Arguments& a,
                         Parameters... parameters) {
    const BackwardInputs<T> in(a);
    constexpr int WARPS = 8, THREADS = 256;
    const dim3 blocks_of_rows(in.padded_length / WARPS, a.batch * a.heads);
    if (!a.facts)
        attention_backward_prepare<T, D><<<blocks_of_rows, 32 * WARPS, 0, a.stream>>>(in);
    const dim3 blocks((a.length + keys - 1) / keys, a.batch * a.kv_heads);
    if (const char* error = start(kernel, blocks, threads, shared_bytes, a, parameters...); error || a.facts)
        return error;
    const int64_t pairs = static_cast<int64_t>(a.batch) * a.heads * a.length * D / 2;
    const dim3 blocks_of_pairs((pairs + THREADS - 1) / THREADS);
    attention_backward_finish<T><<<blocks_of_pairs, THREADS, 0, a.stream>>>(in, pairs);
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
