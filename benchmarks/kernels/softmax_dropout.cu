// Softmax over the last dimension, with or without a causal mask, then dropout: what stands between attention's two
// matrix products when they are not fused.
//
// Forward: one block a row. The row is read once into registers; the block finds its maximum (so that no exponential
// overflows), then the sum of the exponentials, then writes. Under the causal mask, row i of a square matrix has i + 1
// elements and no vector behind them is read.
//
// Dropout's mask is never stored. Philox is a random number generator without a state, a function of (seed, counter):
// whoever asks for element 7's number gets the same one, in the backward too. A call gives four 32-bit words, which
// serve eight neighbouring elements, 16 bits each: an element is dropped where its number is below `threshold`, of
// 65536.
//
// Backward: with p = softmax(scores), recomputed from the row's maximum and sum, and dp = dy * mask / (1 - dropped),
//     dscores = p * (dp - sum over the row of dp * p).
#include "rows.cuh"

namespace {

constexpr int ROUNDS = 10;                                   // of Philox4x32: what its authors recommend

__device__ uint4 philox(uint64_t seed, uint64_t counter) {
    uint4 state = {static_cast<unsigned>(counter), static_cast<unsigned>(counter >> 32), 0, 0};
    unsigned key_low = seed, key_high = seed >> 32;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const uint64_t a = 0xD2511F53ull * state.x, b = 0xCD9E8D57ull * state.z;
        state = {static_cast<unsigned>(b >> 32) ^ state.y ^ key_low, static_cast<unsigned>(b),
                 static_cast<unsigned>(a >> 32) ^ state.w ^ key_high, static_cast<unsigned>(a)};
        key_low += 0x9E3779B9;
        key_high += 0xBB67AE85;
    }
    return state;
}

// What dropout multiplies the N elements from `index` on with. `index` is a multiple of N, and N divides 8.
template <int N>
__device__ void dropout_factors(float (&factors)[N], uint64_t seed, int64_t index, unsigned threshold) {
    if (threshold == 0) {
        for (float& factor : factors)
            factor = 1.0f;
        return;
    }
    const uint4 words = philox(seed, index / 8);
    const uint64_t low = words.x | static_cast<uint64_t>(words.y) << 32;
    const uint64_t high = words.z | static_cast<uint64_t>(words.w) << 32;
    const int first = N == 8 ? 0 : index % 8;
    const float kept = 65536.0f / (65536 - threshold);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int place = first + i;
        const unsigned number = (place < 4 ? low : high) >> place % 4 * 16 & 0xFFFF;
        factors[i] = number < threshold ? 0.0f : kept;
    }
}

template <typename L>
__global__ void __launch_bounds__(MAX_THREADS)
forward(const typename L::T* __restrict__ scores, typename L::T* __restrict__ y, float* __restrict__ peaks,
        float* __restrict__ totals, int width, unsigned threshold, uint64_t seed, bool causal) {
    const int64_t start = static_cast<int64_t>(blockIdx.x) * width;
    const int end = causal ? blockIdx.x % width + 1 : width;
    typename L::Row row;
    L::load(row, scores + start, end, -INFINITY);
    float e[L::VECTORS][L::N], peak = -INFINITY, total = 0.0f;
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v) {
        if (L::column(v) >= end)
            break;                                           // warps that lie behind the diagonal have nothing to do
#pragma unroll
        for (int i = 0; i < L::N; ++i) {
            e[v][i] = L::column(v) + i < end ? row[v][i] : -INFINITY;
            peak = fmaxf(peak, e[v][i]);
        }
    }
    peak = reduce_block<Max>(peak, 0);
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v) {
        if (L::column(v) >= end)
            break;
#pragma unroll
        for (int i = 0; i < L::N; ++i) {
            e[v][i] = exp2_approximate(LOG2_E * (e[v][i] - peak));
            total += e[v][i];
        }
    }
    total = reduce_block<Sum>(total, 1);
    const float scale = 1.0f / total;
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v) {
        const int column = L::column(v);
        if (column >= width)
            break;
        float values[L::N];
        if (column < end)
            dropout_factors(values, seed, start + column, threshold);
#pragma unroll
        for (int i = 0; i < L::N; ++i)                       // a factor of 0, too: NaN stays NaN, as in eager PyTorch
            values[i] = column < end ? values[i] * e[v][i] * scale : 0.0f * scale;
        Vector<typename L::T, L::N> out;
        out.set(values);
        out.stream_out(y + start + column);
    }
    if (threadIdx.x == 0) {
        peaks[blockIdx.x] = peak;
        totals[blockIdx.x] = total;
    }
}

template <typename L>
__global__ void __launch_bounds__(MAX_THREADS)
backward(const typename L::T* __restrict__ scores, const float* __restrict__ peaks, const float* __restrict__ totals,
         const typename L::T* __restrict__ dy, typename L::T* __restrict__ dscores, int width, unsigned threshold,
         uint64_t seed, bool causal) {
    const int64_t start = static_cast<int64_t>(blockIdx.x) * width;
    const int end = causal ? blockIdx.x % width + 1 : width;
    typename L::Row row, dy_row;
    L::load(row, scores + start, end);
    L::load(dy_row, dy + start, end);
    const float peak = peaks[blockIdx.x], scale = 1.0f / totals[blockIdx.x];
    float p[L::VECTORS][L::N], dp[L::VECTORS][L::N], dot = 0.0f;
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v) {
        if (L::column(v) >= end)
            break;
        dropout_factors(dp[v], seed, start + L::column(v), threshold);
#pragma unroll
        for (int i = 0; i < L::N; ++i) {
            const bool inside = L::column(v) + i < end;
            p[v][i] = inside ? exp2_approximate(LOG2_E * (row[v][i] - peak)) * scale : 0.0f;
            dp[v][i] = inside ? dp[v][i] * dy_row[v][i] : 0.0f;
            dot += p[v][i] * dp[v][i];
        }
    }
    dot = reduce_block<Sum>(dot, 0);
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v) {
        const int column = L::column(v);
        if (column >= width)
            break;
        float values[L::N] = {};
        if (column < end)
#pragma unroll
            for (int i = 0; i < L::N; ++i)
                values[i] = column + i < end ? p[v][i] * (dp[v][i] - dot) : 0.0f;
        Vector<typename L::T, L::N> out;
        out.set(values);
        out.stream_out(dscores + start + column);
    }
}

}  // namespace

void softmax_dropout_forward(Float type, const void* scores, void* y, float* peak, float* total, int64_t rows,
                             int width, unsigned threshold, uint64_t seed, bool causal, cudaStream_t stream) {
    with_layout<FEW_ITEMS>(type, width, aligned(scores, y), [&](auto layout, int threads) {
        using L = decltype(layout);
        using T = typename L::T;
        forward<L><<<rows, threads, 0, stream>>>(static_cast<const T*>(scores), static_cast<T*>(y), peak, total, width,
                                                 threshold, seed, causal);
    });
}

void softmax_dropout_backward(Float type, const void* scores, const float* peak, const float* total, const void* dy,
                              void* dscores, int64_t rows, int width, unsigned threshold, uint64_t seed, bool causal,
                              cudaStream_t stream) {
    with_layout<FEW_ITEMS>(type, width, aligned(scores, dy, dscores), [&](auto layout, int threads) {
        using L = decltype(layout);
        using T = typename L::T;
        backward<L><<<rows, threads, 0, stream>>>(static_cast<const T*>(scores), peak, total,
                                                  static_cast<const T*>(dy), static_cast<T*>(dscores), width, threshold,
                                                  seed, causal);
    });
}
