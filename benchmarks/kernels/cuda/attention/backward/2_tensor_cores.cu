// Rung 2 of the backward: tensor cores, by mma.
//
// A warp has 16 keys, and computes scores the other way round: S^T = k q^T. Where a lane holds P^T and dS^T is then where
// the products that sum over rows, dv += P^T dy and dk += dS^T q, want them: only dq needs them from other warps, and gets
// them through shared memory. Tiles are swizzled, and the next one is copied meanwhile, as in the forward's rungs 4 and 5.
#include "../../tensor_core.cuh"
#include "backward.cuh"

namespace {

constexpr int ROWS = 64, KEYS = 64, THREADS = 128;

// Starts to copy 64 rows from row `first` on; zeros behind the last one.
template <typename T, int D>
__device__ void load(T* to, const T* from, int first, int length) {
    for (int i = threadIdx.x; i < 64 * D / 8; i += THREADS) {
        const int row = i / (D / 8), chunk = i % (D / 8);
        copy_async(to + swizzled<D>(row, chunk), from + static_cast<int64_t>(first + row) * D + chunk * 8,
                   first + row < length);
    }
}

// c [16 x 64] = a b^T over D: a the 16 rows of a tile from row `first` on, b the other tile.
template <typename T, int D>
__device__ void over_width(float (&c)[8][4], const T* a_tile, int first, const T* b_tile) {
    const int lane = threadIdx.x % 32;
    for (auto& four : c)
        for (float& sum : four)
            sum = 0.0f;
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
        unsigned a[4], b[4];
        load_matrices(a, a_tile + swizzled<D>(first + lane % 16, 2 * d + lane / 16));
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            load_matrices(b, b_tile + swizzled<D>(16 * n + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2));
            multiply<T>(c[2 * n], a, b[0], b[1]);
            multiply<T>(c[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// c [16 x D] += a b: a [16 x 16] in registers, b the 16 rows of a tile from row `first` on.
template <typename T, int D>
__device__ void over_rows(float (&c)[D / 8][4], const unsigned (&a)[4], const T* b_tile, int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
        unsigned b[4];
        load_transposed(b, b_tile + swizzled<D>(first + lane % 16, 2 * n + lane / 16));
        multiply<T>(c[2 * n], a, b[0], b[1]);
        multiply<T>(c[2 * n + 1], a, b[2], b[3]);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(THREADS) attention_backward(const BackwardInputs<T> in) {
    extern __shared__ __align__(128) unsigned char shared[];
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
        __syncthreads();                                     // this tile is here, and no warp still reads the last one
        if (tile + 1 < tiles * in.sharing())
            load_rows(tile + 1);

        float s[ROWS / 8][4], dp[ROWS / 8][4];
        over_width<T, D>(s, k_tile, warp_row, q_tile);
        over_width<T, D>(dp, v_tile, warp_row, dy_tile);

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

        // dv += P^T dy and dk += dS^T q, 16 rows at a time.
#pragma unroll
        for (int j = 0; j < ROWS / 16; ++j) {
            unsigned p[4], ds[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int n = 2 * j + i / 2, half = i % 2 * 2;
                p[i] = pack<T>(s[n][half], s[n][half + 1]);
                ds[i] = pack<T>(dp[n][half], dp[n][half + 1]);
                T* const eight = ds_tile + swizzled<ROWS>(warp_row + lane / 4 + i % 2 * 8, n);
                *reinterpret_cast<unsigned*>(eight + lane % 4 * 2) = ds[i];
            }
            over_rows<T, D>(dv, p, dy_tile, 16 * j);
            over_rows<T, D>(dk, ds, q_tile, 16 * j);
        }
        __syncthreads();                                     // all of dS is there

        // dq += dS k for the 16 rows of a warp, 16 keys at a time.
        float dq[D / 8][4] = {};
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j) {
            unsigned ds[4];
            load_transposed(ds, ds_tile + swizzled<ROWS>(16 * j + lane % 8 + lane / 16 * 8, warp_row / 8 + lane / 8 % 2));
            over_rows<T, D>(dq, ds, k_tile, 16 * j);
        }
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
