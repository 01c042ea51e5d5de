// Rung 4: asynchronous copies, two stages.
//
// In rung 3 all warps waited for each tile to arrive. Here the next tile of k and v is copied (cp.async, through no
// registers) while this one is multiplied: two buffers, and one barrier a tile in place of two.
#include "../tensor_core.cuh"
#include "series.cuh"

namespace {

constexpr int ROWS = 64, KEYS = 64, THREADS = 128;

// Where eight elements from column 8 `chunk` on lie in a tile of rows of D elements.
template <int D>
__device__ int place(int row, int chunk) { return row * D + chunk * 8; }

// Starts to copy 64 rows from row `first` on; zeros behind the last one.
template <typename T, int D>
__device__ void load(T* to, const T* from, int first, int length) {
    for (int i = threadIdx.x; i < 64 * D / 8; i += THREADS) {
        const int row = i / (D / 8), chunk = i % (D / 8);
        copy_async(to + place<D>(row, chunk), from + static_cast<int64_t>(first + row) * D + chunk * 8,
                   first + row < length);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(THREADS) attention_forward(const Inputs<T> in) {
    extern __shared__ __align__(128) unsigned char shared[];
    T* const q_tile = reinterpret_cast<T*>(shared);
    T* const k_tiles = q_tile + ROWS * D;
    T* const v_tiles = k_tiles + 2 * KEYS * D;
    const int head = blockIdx.y, lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
    const int64_t size = static_cast<int64_t>(in.length) * D;
    const T *q = in.q + head * size, *k = in.k + in.kv_head(head) * size, *v = in.v + in.kv_head(head) * size;
    const int first_row = blockIdx.x * ROWS, row = first_row + warp_row + lane / 4;         // and row + 8

    float peak[2] = {-INFINITY, -INFINITY}, total[2] = {}, out[D / 8][4] = {};
    load<T, D>(q_tile, q, first_row, in.length);
    load<T, D>(k_tiles, k, 0, in.length);
    load<T, D>(v_tiles, v, 0, in.length);

    for (int first_key = 0, stage = 0; first_key < in.length; first_key += KEYS, stage ^= 1) {
        wait_for_all_copies();
        __syncthreads();                                     // this tile is here, and no warp still reads the last one
        if (first_key + KEYS < in.length) {
            load<T, D>(k_tiles + (stage ^ 1) * KEYS * D, k, first_key + KEYS, in.length);
            load<T, D>(v_tiles + (stage ^ 1) * KEYS * D, v, first_key + KEYS, in.length);
        }
        const T* const k_tile = k_tiles + stage * KEYS * D;
        const T* const v_tile = v_tiles + stage * KEYS * D;

        // S = q k^T, 16 of D at a time.
        float s[KEYS / 8][4] = {};
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            unsigned a[4], b[4];
            load_matrices(a, q_tile + place<D>(warp_row + lane % 16, 2 * d + lane / 16));
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                load_matrices(b, k_tile + place<D>(16 * n + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2));
                multiply<T>(s[2 * n], a, b[0], b[1]);
                multiply<T>(s[2 * n + 1], a, b[2], b[3]);
            }
        }

        if (in.is_causal || first_key + KEYS > in.length)
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (!in.sees(row + i / 2 * 8, first_key + 8 * n + lane % 4 * 2 + i % 2))
                        s[n][i] = -INFINITY;

        // P = exp(S - peak), and what has been summed scaled down.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float highest = peak[half];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
                highest = fmaxf(highest, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
            const float shift = finite_or_zero(highest) * in.scale;
            const float shrink = exp2_approximate(peak[half] * in.scale - shift);
            peak[half] = highest;
            total[half] *= shrink;                           // of this lane's keys: the quad's meet at the end
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    s[n][i] = exp2_approximate(s[n][i] * in.scale - shift);
                    total[half] += s[n][i];
                }
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
                out[n][2 * half] *= shrink;
                out[n][2 * half + 1] *= shrink;
            }
        }

        // out += P v, 16 keys at a time.
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j) {
            unsigned a[4], b[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                a[i] = pack<T>(s[2 * j + i / 2][i % 2 * 2], s[2 * j + i / 2][i % 2 * 2 + 1]);
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                load_transposed(b, v_tile + place<D>(16 * j + lane % 16, 2 * n + lane / 16));
                multiply<T>(out[2 * n], a, b[0], b[1]);
                multiply<T>(out[2 * n + 1], a, b[2], b[3]);
            }
        }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = total[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (row + 8 * half >= in.length)
            continue;
        const int64_t at = static_cast<int64_t>(head) * in.length + row + 8 * half;
        T* const y = in.y + at * D + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
            *reinterpret_cast<unsigned*>(y + 8 * n) = pack<T>(out[n][2 * half] / sum, out[n][2 * half + 1] / sum);
        if (lane % 4 == 0)
            in.log_sum[at] = (peak[half] * in.scale + log2f(sum)) / LOG2_E;
    }
}

}  // namespace

template <typename T, int D>
const char* launch(const Arguments& a) {
    return start(attention_forward<T, D>, ROWS, THREADS, (ROWS + 4 * KEYS) * D * 2, a, Inputs<T>(a));
}
