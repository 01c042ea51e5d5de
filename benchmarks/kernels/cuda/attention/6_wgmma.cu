// Rung 6: wgmma.
//
// In rung 5 each warp loads what it multiplies from shared memory into registers, and mma does not reach what
// Hopper's tensor cores can do. wgmma multiplies 64 rows by a tile that the tensor cores themselves read from shared
// memory: four warps together, and no ldmatrix. Only P comes from registers.
#include "../copies.cuh"
#include "series.cuh"
#include "wgmma.cuh"

namespace {

constexpr int ROWS = 64, KEYS = 64, THREADS = 128;

// Starts to copy 64 rows from row `first` on; zeros behind the last one.
template <typename T, int D>
__device__ void load(T* to, const T* from, int first, int length) {
    for (int i = threadIdx.x; i < 64 * D / 8; i += THREADS) {
        const int row = i / (D / 8), chunk = i % (D / 8);
        copy_async(to + wgmma::place<64>(row, chunk), from + static_cast<int64_t>(first + row) * D + chunk * 8,
                   first + row < length);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(THREADS) attention_forward(const Inputs<T> in) {
    extern __shared__ __align__(1024) unsigned char shared[];
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
        wgmma::show_writes();
        __syncthreads();                                     // this tile is here, and no warp still reads the last one
        if (first_key + KEYS < in.length) {
            load<T, D>(k_tiles + (stage ^ 1) * KEYS * D, k, first_key + KEYS, in.length);
            load<T, D>(v_tiles + (stage ^ 1) * KEYS * D, v, first_key + KEYS, in.length);
        }
        const T* const k_tile = k_tiles + stage * KEYS * D;
        const T* const v_tile = v_tiles + stage * KEYS * D;

        // S = q k^T, 16 of D at a time.
        float s[KEYS / 8][4];
        wgmma::begin();
#pragma unroll
        for (int d = 0; d < D / 16; ++d)
            wgmma::multiply<T, KEYS>(s, wgmma::described(q_tile + wgmma::place<ROWS>(0, 2 * d), 0),
                                     wgmma::described(k_tile + wgmma::place<KEYS>(0, 2 * d), 0), d > 0);
        wgmma::end();
        wgmma::wait<0>(s);

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
        unsigned p[KEYS / 16][4];
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                p[j][i] = pack<T>(s[2 * j + i / 2][i % 2 * 2], s[2 * j + i / 2][i % 2 * 2 + 1]);
        wgmma::begin();
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j)
            wgmma::multiply<T, D>(out, p[j], wgmma::described(v_tile + wgmma::place<KEYS>(16 * j, 0), KEYS * 128));
        wgmma::end();
        wgmma::wait<0>(out);
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
