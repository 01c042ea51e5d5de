// Softmax over the last dimension, with or without a causal mask, then dropout: what stands between attention's two
// matrix products when they are not fused.
//
// Forward: a row is read once into the registers of a warp, or of a block where it is wide; they find its maximum (so
// that no exponential overflows), then the sum of the exponentials, then write. Under the causal mask, row i of a
// square matrix has i + 1 elements, and no vector behind them is read. A thread holds many elements, which share the
// instructions that are spent once a row.
//
// Dropout's mask is never stored. Philox is a random number generator without a state, a function of (seed, counter):
// whoever asks for element 7's number gets the same one, in the backward too. A call gives four 32-bit words, 16 bits
// for each of eight neighbouring elements: an element is dropped where its number is below `threshold`, of 65536.
// (A thread whose vectors are shorter than eight elements repeats its neighbours' call.)
//
// Backward: with p = softmax(scores), recomputed from the row's maximum and sum, and dp = dy * mask / (1 - dropped),
//     dscores = p * (dp - sum over the row of dp * p).
#include "rows.cuh"

namespace {

constexpr int HELD_FORWARD = 64, HELD_BACKWARD = 32;         // elements of a row in a thread's registers: tunables
constexpr int THREADS = 128;                                 // of a block in which each warp has a row
constexpr int RESIDENT_FORWARD = 768, RESIDENT_BACKWARD = 1024;      // threads on a multiprocessor: tunables, see below
constexpr int ROUNDS = 7;                                    // of Philox4x32: see softmax.py

// Which elements of a launch are dropped. The rounds' keys follow from the seed alone, and come ready from the CPU.
struct Dropout {
    unsigned threshold;                                      // of 65536 numbers, how many drop their element
    unsigned low[ROUNDS], high[ROUNDS];

    Dropout(unsigned threshold, uint64_t seed) : threshold(threshold) {
        for (unsigned round = 0; round < ROUNDS; ++round) {
            low[round] = static_cast<unsigned>(seed) + round * 0x9E3779B9u;
            high[round] = static_cast<unsigned>(seed >> 32) + round * 0xBB67AE85u;
        }
    }

    __device__ uint4 philox(uint64_t counter) const {
        uint4 state = {static_cast<unsigned>(counter), static_cast<unsigned>(counter >> 32), 0, 0};
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const uint64_t a = 0xD2511F53ull * state.x, b = 0xCD9E8D57ull * state.z;
            state = {static_cast<unsigned>(b >> 32) ^ state.y ^ low[round], static_cast<unsigned>(b),
                     static_cast<unsigned>(a >> 32) ^ state.w ^ high[round], static_cast<unsigned>(a)};
        }
        return state;
    }

    // `scale` times what the N elements from `index` on are multiplied with. `index` is a multiple of N; N divides 8.
    template <int N>
    __device__ void factors(float (&to)[N], float scale, int64_t index) const {
        if (threshold == 0) {
            for (float& factor : to)
                factor = scale;
            return;
        }
        const uint4 state = philox(index / 8);
        const unsigned words[4] = {state.x, state.y, state.z, state.w};
        const float kept = scale * (65536.0f / (65536 - threshold)), dropped = scale * 0.0f;      // NaN where scale is
        const unsigned in_high_half = threshold << 16;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int place = N == 8 ? i : index % 8 + i;
            unsigned word = words[0];
            if (N == 8)
                word = words[place / 2];
            else
                for (int other = 1; other < 4; ++other)      // a register has no index
                    word = place / 2 == other ? words[other] : word;
            to[i] = (place % 2 ? word : word << 16) < in_high_half ? dropped : kept;
        }
    }
};

__device__ float exp_of_difference(float score, float peak) { return exp2_approximate(LOG2_E * (score - peak)); }

// The row that this thread's warp, or block, works on.
__device__ int64_t this_row() { return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; }

// RESIDENT_FORWARD makes the compiler spill a few registers, so that one more block fits on each multiprocessor; so
// does RESIDENT_BACKWARD for 16-bit elements (an element of FP32 takes twice the registers: half of it).
template <typename L>
__global__ void __launch_bounds__(L::MOST_THREADS, RESIDENT_FORWARD / L::MOST_THREADS)
forward(const typename L::T* __restrict__ scores, typename L::T* __restrict__ y, float* __restrict__ peaks,
        float* __restrict__ totals, int64_t rows, int width, __grid_constant__ const Dropout dropout, bool causal) {
    const int64_t row = this_row(), start = row * width;
    if (row >= rows)
        return;
    const int end = causal ? static_cast<unsigned>(row) % width + 1 : width;
    typename L::Row values;
    L::template load<true>(values, scores + start, end);
    float e[L::VECTORS][L::N], peak = -INFINITY, total = 0.0f;
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v) {
        const int column = L::column(v);
        if (column >= end)
            break;                                           // warps that lie behind the diagonal have nothing to do
#pragma unroll
        for (int i = 0; i < L::N; ++i)
            e[v][i] = values[v][i];
        if (column + L::N > end)
#pragma unroll
            for (int i = 1; i < L::N; ++i)
                e[v][i] = column + i < end ? e[v][i] : -INFINITY;
#pragma unroll
        for (int i = 0; i < L::N; ++i)
            peak = fmaxf(peak, e[v][i]);
    }
    peak = reduce_block<Max>(peak, 0);
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v) {
        if (L::column(v) >= end)
            break;
#pragma unroll
        for (int i = 0; i < L::N; ++i) {
            e[v][i] = exp_of_difference(e[v][i], peak);
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
        float written[L::N];
#pragma unroll
        for (float& value : written)                         // a factor of 0: NaN stays NaN, as in eager PyTorch
            value = 0.0f * scale;
        if (column < end) {
            dropout.factors(written, scale, start + column);
#pragma unroll
            for (int i = 0; i < L::N; ++i)
                written[i] *= e[v][i];                       // behind the diagonal it is 0
        }
        Vector<typename L::T, L::N> out;
        out.set(written);
        out.template write<true>(y + start + column);
    }
    if (threadIdx.x == 0) {
        peaks[row] = peak;
        totals[row] = total;
    }
}

template <typename L>
__global__ void __launch_bounds__(L::MOST_THREADS, RESIDENT_BACKWARD * 2 / sizeof(typename L::T) / L::MOST_THREADS)
backward(const typename L::T* __restrict__ scores, const float* __restrict__ peaks, const float* __restrict__ totals,
         const typename L::T* __restrict__ dy, typename L::T* __restrict__ dscores, int64_t rows, int width,
         __grid_constant__ const Dropout dropout, bool causal) {
    const int64_t row = this_row(), start = row * width;
    if (row >= rows)
        return;
    const int end = causal ? static_cast<unsigned>(row) % width + 1 : width;
    typename L::Row values, dy_row;
    L::template load<true>(values, scores + start, end);
    L::template load<true>(dy_row, dy + start, end);
    const float peak = peaks[row], scale = 1.0f / totals[row];
    float g[L::VECTORS][L::N], dot = 0.0f;                   // g = dp * scale
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v) {
        const int column = L::column(v);
        if (column >= end)
            break;
        dropout.factors(g[v], scale, start + column);
        float e[L::N];
#pragma unroll
        for (int i = 0; i < L::N; ++i) {
            e[i] = exp_of_difference(values[v][i], peak);
            g[v][i] *= dy_row[v][i];
        }
        if (column + L::N > end)
#pragma unroll
            for (int i = 1; i < L::N; ++i)
                if (column + i >= end)
                    e[i] = g[v][i] = 0.0f;
#pragma unroll
        for (int i = 0; i < L::N; ++i)
            dot += e[i] * g[v][i];
    }
    const float mean = reduce_block<Sum>(dot, 0) * scale;
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v) {
        const int column = L::column(v);
        if (column >= width)
            break;
        float written[L::N] = {};
        if (column < end) {
#pragma unroll
            for (int i = 0; i < L::N; ++i)                   // the exponential once more: to keep it costs a register
                written[i] = exp_of_difference(values[v][i], peak) * (g[v][i] - mean);
            if (column + L::N > end)                         // 0 even where the mean is NaN
#pragma unroll
                for (int i = 1; i < L::N; ++i)
                    written[i] = column + i < end ? written[i] : 0.0f;
        }
        Vector<typename L::T, L::N> out;
        out.set(written);
        out.template write<true>(dscores + start + column);
    }
}

// start(blocks, threads) for rows that `threads` threads hold: one warp, and several rows in a block, or more.
template <typename Start>
void with_blocks(int64_t rows, int threads, Start start) {
    const dim3 block(threads, threads == 32 ? THREADS / 32 : 1);
    start((rows + block.y - 1) / block.y, block);
}

}  // namespace

void softmax_dropout_forward(Float type, const void* scores, void* y, float* peak, float* total, int64_t rows,
                             int width, unsigned threshold, uint64_t seed, bool causal, cudaStream_t stream) {
    with_layout<HELD_FORWARD>(type, width, aligned(scores, y), [&](auto layout, int threads) {
        using L = decltype(layout);
        using T = typename L::T;
        with_blocks(rows, threads, [&](unsigned blocks, dim3 block) {
            forward<L><<<blocks, block, 0, stream>>>(static_cast<const T*>(scores), static_cast<T*>(y), peak, total,
                                                     rows, width, Dropout(threshold, seed), causal);
        });
    });
}

void softmax_dropout_backward(Float type, const void* scores, const float* peak, const float* total, const void* dy,
                              void* dscores, int64_t rows, int width, unsigned threshold, uint64_t seed, bool causal,
                              cudaStream_t stream) {
    with_layout<HELD_BACKWARD>(type, width, aligned(scores, dy, dscores), [&](auto layout, int threads) {
        using L = decltype(layout);
        using T = typename L::T;
        with_blocks(rows, threads, [&](unsigned blocks, dim3 block) {
            backward<L><<<blocks, block, 0, stream>>>(static_cast<const T*>(scores), peak, total,
                                                      static_cast<const T*>(dy), static_cast<T*>(dscores), rows, width,
                                                      Dropout(threshold, seed), causal);
        });
    });
}
