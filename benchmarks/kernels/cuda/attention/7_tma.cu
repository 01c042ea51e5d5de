// Rung 7: TMA with barriers.
//
// In rung 6 all threads computed addresses and issued copies of 16 bytes. Here one thread names a whole tile, and the
// hardware copies, swizzles and fills it with zeros behind the end. A barrier in shared memory counts the bytes that have
// arrived; whoever needs the tile waits for that.
#include "series.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace {

constexpr int ROWS = 64, KEYS = 64, THREADS = 128;

template <typename T, int D>
__global__ void __launch_bounds__(THREADS)
attention_forward(const Inputs<T> in, const __grid_constant__ tma::Matrix q,
                  const __grid_constant__ tma::Matrix k, const __grid_constant__ tma::Matrix v) {
    extern __shared__ __align__(1024) unsigned char shared[];
    T* const q_tile = reinterpret_cast<T*>(shared);
    T* const k_tiles = q_tile + ROWS * D;
    T* const v_tiles = k_tiles + 2 * KEYS * D;
    auto* const arrived = reinterpret_cast<tma::Barrier*>(v_tiles + 2 * KEYS * D);          // k and v of each stage; q
    const int head = blockIdx.y, kv_head = in.kv_head(head);
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
    const int first_row = blockIdx.x * ROWS, row = first_row + warp_row + lane / 4;         // and row + 8

    float peak[2] = {-INFINITY, -INFINITY}, total[2] = {}, out[D / 8][4] = {};
    const auto load = [&](int tile) {
        tma::expect(&arrived[tile % 2], 2 * KEYS * D * 2);
        tma::load<KEYS, D>(k_tiles + tile % 2 * KEYS * D, k.map, tile * KEYS, kv_head, &arrived[tile % 2]);
        tma::load<KEYS, D>(v_tiles + tile % 2 * KEYS * D, v.map, tile * KEYS, kv_head, &arrived[tile % 2]);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < 3; ++i)
            tma::prepare(&arrived[i], 1);
        tma::show_barriers();
        tma::expect(&arrived[2], ROWS * D * 2);
        tma::load<ROWS, D>(q_tile, q.map, first_row, head, &arrived[2]);
        load(0);
    }
    __syncthreads();
    tma::wait(&arrived[2], 0);

    const int tiles = (in.length + KEYS - 1) / KEYS;
    for (int tile = 0; tile < tiles; ++tile) {
        const int first_key = tile * KEYS, stage = tile % 2;
        __syncthreads();                                     // no warp still reads the last tile
        if (threadIdx.x == 0 && tile + 1 < tiles)
            load(tile + 1);
        tma::wait(&arrived[stage], tile / 2 % 2);
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
    const tma::Matrix q(a.q, a.is_bfloat16, a.batch * a.heads, a.length, D, ROWS);
    const tma::Matrix k(a.k, a.is_bfloat16, a.batch * a.kv_heads, a.length, D, KEYS);
    const tma::Matrix v(a.v, a.is_bfloat16, a.batch * a.kv_heads, a.length, D, KEYS);
    if (!q.ok || !k.ok || !v.ok)
        return "the driver makes no tensor map of q, k and v";
    constexpr int SHARED = (ROWS + 4 * KEYS) * D * 2 + 3 * sizeof(tma::Barrier);
    return start(attention_forward<T, D>, ROWS, THREADS, SHARED, a, Inputs<T>(a), q, k, v);
}
