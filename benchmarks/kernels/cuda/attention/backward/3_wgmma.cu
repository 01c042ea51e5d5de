// Rung 3 of the backward: wgmma.
//
// One warpgroup has the 64 keys of a block. The tensor cores read k, v, q and dy from shared memory themselves, in both
// directions: S^T and dP^T take them along a row, and dv, dk and dq across. P^T and dS^T come from registers; of dq both
// operands come from shared memory, dS^T read across.
#include "../../copies.cuh"
#include "../wgmma.cuh"
#include "backward.cuh"

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

// Starts c = a b^T over D: a and b tiles of 64 rows.
template <typename T, int D>
__device__ void start_over_width(float (&c)[8][4], const T* a_tile, const T* b_tile) {
#pragma unroll
    for (int d = 0; d < D / 16; ++d)
        wgmma::multiply<T, 64>(c, wgmma::described(a_tile + wgmma::place<64>(0, 2 * d), 0),
                               wgmma::described(b_tile + wgmma::place<64>(0, 2 * d), 0), d > 0);
    wgmma::end();
}

// Starts c += a b: a [64 x 64] in registers, b a tile of 64 rows.
template <typename T, int D>
__device__ void start_over_rows(float (&c)[D / 8][4], const unsigned (&a)[4][4], const T* b_tile) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
        wgmma::multiply<T, D>(c, a[j], wgmma::described(b_tile + wgmma::place<64>(16 * j, 0), 64 * 128));
    wgmma::end();
}

template <typename T, int D>
__global__ void __launch_bounds__(THREADS) attention_backward(const BackwardInputs<T> in) {
    extern __shared__ __align__(1024) unsigned char shared[];
    T* const k_tile = reinterpret_cast<T*>(shared);
    T* const v_tile = k_tile + KEYS * D;
    T* const q_tiles = v_tile + KEYS * D;
    T* const dy_tiles = q_tiles + 2 * ROWS * D;
    T* const ds_tile = dy_tiles + 2 * ROWS * D;              // dS^T: [KEYS, ROWS]
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
    const int first_key = blockIdx.x * KEYS, kv_head = blockIdx.y, key = first_key + warp_row + lane / 4;   // and key + 8
    const int64_t size = static_cast<int64_t>(in.length) * D;
    const int start_row = in.is_causal ? first_key : 0, tiles = (in.length - start_row + ROWS - 1) / ROWS;

    const auto load_rows = [&](int tile) {
        const int head = in.first_head(kv_head) + tile / tiles, first_row = start_row + tile % tiles * ROWS;
        load<T, D>(q_tiles + tile % 2 * ROWS * D, in.q + head * size, first_row, in.length);
        load<T, D>(dy_tiles + tile % 2 * ROWS * D, in.dy + head * size, first_row, in.length);
    };

    float dk[D / 8][4] = {}, dv[D / 8][4] = {};
    load<T, D>(k_tile, in.k + kv_head * size, first_key, in.length);
    load<T, D>(v_tile, in.v + kv_head * size, first_key, in.length);
    load_rows(0);

    for (int tile = 0; tile < tiles * in.sharing(); ++tile) {
        const int head = in.first_head(kv_head) + tile / tiles, first_row = start_row + tile % tiles * ROWS;
        const T* const q_tile = q_tiles + tile % 2 * ROWS * D;
        const T* const dy_tile = dy_tiles + tile % 2 * ROWS * D;
        wait_for_all_copies();
        wgmma::show_writes();
        __syncthreads();                                     // this tile is here, and no warp still reads the last one
        if (tile + 1 < tiles * in.sharing())
            load_rows(tile + 1);

        float s[ROWS / 8][4], dp[ROWS / 8][4];
        wgmma::begin();
        start_over_width<T, D>(s, k_tile, q_tile);
        start_over_width<T, D>(dp, v_tile, dy_tile);
        wgmma::wait<0>(s);
        wgmma::wait<0>(dp);

        // s becomes P, and dp becomes dS.
        const float2* const numbers = in.row_numbers + static_cast<int64_t>(head) * in.padded_length + first_row;
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 8 * n + lane % 4 * 2 + i % 2;
                const float2 of_row = numbers[row];
                const bool seen = in.sees(first_row + row, key + i / 2 * 8);
                s[n][i] = seen ? exp2_approximate(s[n][i] * in.scale - of_row.x) : 0.0f;
                dp[n][i] = seen ? s[n][i] * (dp[n][i] - of_row.y) : 0.0f;
            }

        unsigned p[ROWS / 16][4], ds[ROWS / 16][4];
#pragma unroll
        for (int j = 0; j < ROWS / 16; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int n = 2 * j + i / 2, half = i % 2 * 2;
                p[j][i] = pack<T>(s[n][half], s[n][half + 1]);
                ds[j][i] = pack<T>(dp[n][half], dp[n][half + 1]);
                T* const eight = ds_tile + wgmma::place<KEYS>(warp_row + lane / 4 + i % 2 * 8, n);
                *reinterpret_cast<unsigned*>(eight + lane % 4 * 2) = ds[j][i];
            }
        wgmma::show_writes();
        __syncthreads();                                     // all of dS is there

        // dv += P^T dy, dk += dS^T q, and dq of this tile, 16 keys at a time.
        float dq[D / 8][4];
        wgmma::begin();
        start_over_rows<T, D>(dv, p, dy_tile);
        start_over_rows<T, D>(dk, ds, q_tile);
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j)
            wgmma::multiply<T, D, true>(dq, wgmma::described(ds_tile + wgmma::place<KEYS>(16 * j, 0), 0),
                                         wgmma::described(k_tile + wgmma::place<KEYS>(16 * j, 0), KEYS * 128), j > 0);
        wgmma::end();
        wgmma::wait<0>(dv);
        wgmma::wait<0>(dk);
        wgmma::wait<0>(dq);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + warp_row + lane / 4 + 8 * half;
            float* const sums = in.dq_sums + head * size + static_cast<int64_t>(row) * D + lane % 4 * 2;
            if (row < in.length)
#pragma unroll
                for (int n = 0; n < D / 8; ++n)
                    atomicAdd(reinterpret_cast<float2*>(sums + 8 * n),
                              make_float2(dq[n][2 * half], dq[n][2 * half + 1]));
        }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (key + 8 * half >= in.length)
            continue;
        const int64_t at = kv_head * size + static_cast<int64_t>(key + 8 * half) * D + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
            const float *const of_k = &dk[n][2 * half], *const of_v = &dv[n][2 * half];
            *reinterpret_cast<unsigned*>(in.dk + at + 8 * n) = pack<T>(of_k[0] * in.root, of_k[1] * in.root);
            *reinterpret_cast<unsigned*>(in.dv + at + 8 * n) = pack<T>(of_v[0], of_v[1]);
        }
    }
}

}  // namespace

template <typename T, int D>
const char* launch(const Arguments& a) {
    constexpr int SHARED = (2 * KEYS * D + 4 * ROWS * D + KEYS * ROWS) * 2;
    return run_backward<T, D>(attention_backward<T, D>, KEYS, THREADS, SHARED, a, BackwardInputs<T>(a));
}
