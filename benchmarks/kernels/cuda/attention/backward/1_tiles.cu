// Rung 1 of the backward: five products in tiles, on ordinary cores.
//
// A block has 64 keys of one head of k and v, and goes through the rows that see them, tile by tile. Scores are computed
// anew, and with the logarithm of each row's sum they are probabilities at once. A thread has four rows and, of each tile,
// four keys. P and dS are put into shared memory, where the products that sum over rows and over keys find them.
#include "backward.cuh"

namespace {

constexpr int ROWS = 64, KEYS = 64, THREADS = 256;

template <typename T, int D>
struct Tiles {
    T q[ROWS][D + 2], dy[ROWS][D + 2], k[KEYS][D + 2], v[KEYS][D + 2];          // rows that start in different banks
    T p[ROWS][KEYS + 2], ds[ROWS][KEYS + 2];
};

// Loads 64 rows from row `first` on; zeros behind the last one.
template <typename T, int D>
__device__ void load(T (&to)[64][D + 2], const T* from, int first, int length) {
    for (int i = threadIdx.x; i < 64 * D / 2; i += THREADS) {
        const int row = i / (D / 2), column = i % (D / 2) * 2;
        const bool inside = first + row < length;
        const unsigned pair =
            inside ? *reinterpret_cast<const unsigned*>(from + static_cast<int64_t>(first + row) * D + column) : 0u;
        *reinterpret_cast<unsigned*>(&to[row][column]) = pair;
    }
}

template <typename T>
__device__ float2 pair_at(const T* pointer) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    return unpacked(*reinterpret_cast<const Pair*>(pointer));
}

// c[i][j] = the product of this thread's four rows of a and its four keys of b, over D.
template <typename T, int D>
__device__ void over_width(float (&c)[4][4], const T (&a)[ROWS][D + 2], const T (&b)[KEYS][D + 2]) {
    const int row = threadIdx.x / 16 * 4, key = threadIdx.x % 16;
    for (auto& of_row : c)
        for (float& sum : of_row)
            sum = 0.0f;
#pragma unroll 4
    for (int d = 0; d < D; d += 2) {
        float2 x[4], y[4];
        for (int i = 0; i < 4; ++i) {
            x[i] = pair_at(&a[row + i][d]);
            y[i] = pair_at(&b[key + 16 * i][d]);
        }
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 4; ++j)
                c[i][j] += x[i].x * y[j].x + x[i].y * y[j].y;
    }
}

// c += a b: a(i, n) for this thread's four rows i, b a tile of 64 rows n; a thread has D / 16 columns.
template <typename T, int D, typename Left>
__device__ void over_tile(float (&c)[4][D / 16], Left a, const T (&b)[64][D + 2]) {
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 2;
    for (int n = 0; n < 64; ++n)
        for (int i = 0; i < 4; ++i) {
            const float left = a(row + i, n);
#pragma unroll
            for (int part = 0; part < D / 32; ++part) {
                const float2 pair = pair_at(&b[n][32 * part + column]);
                c[i][2 * part] += left * pair.x;
                c[i][2 * part + 1] += left * pair.y;
            }
        }
}

template <typename T, int D>
__global__ void __launch_bounds__(THREADS) attention_backward(const BackwardInputs<T> in) {
    extern __shared__ __align__(16) unsigned char shared[];
    auto& tiles = *reinterpret_cast<Tiles<T, D>*>(shared);
    const int first_key = blockIdx.x * KEYS, kv_head = blockIdx.y;
    const int64_t size = static_cast<int64_t>(in.length) * D;
    const int row = threadIdx.x / 16 * 4, key = threadIdx.x % 16, column = threadIdx.x % 16 * 2;

    float dk[4][D / 16] = {}, dv[4][D / 16] = {};
    load<T, D>(tiles.k, in.k + kv_head * size, first_key, in.length);
    load<T, D>(tiles.v, in.v + kv_head * size, first_key, in.length);

    for (int head = in.first_head(kv_head); head < in.first_head(kv_head + 1); ++head)
        for (int first_row = in.is_causal ? first_key : 0; first_row < in.length; first_row += ROWS) {
            __syncthreads();
            load<T, D>(tiles.q, in.q + head * size, first_row, in.length);
            load<T, D>(tiles.dy, in.dy + head * size, first_row, in.length);
            __syncthreads();

            float s[4][4], dp[4][4];
            over_width<T, D>(s, tiles.q, tiles.k);
            over_width<T, D>(dp, tiles.dy, tiles.v);
            for (int i = 0; i < 4; ++i) {
                const int at = first_row + row + i;
                const float2 numbers = in.row_numbers[static_cast<int64_t>(head) * in.padded_length + at];
                for (int j = 0; j < 4; ++j) {
                    const bool seen = in.sees(at, first_key + key + 16 * j);
                    const float p = seen ? exp2f(s[i][j] * in.scale - numbers.x) : 0.0f;
                    tiles.p[row + i][key + 16 * j] = p;
                    tiles.ds[row + i][key + 16 * j] = seen ? p * (dp[i][j] - numbers.y) : 0.0f;
                }
            }
            __syncthreads();

            over_tile<T, D>(dv, [&](int i, int n) { return static_cast<float>(tiles.p[n][i]); }, tiles.dy);
            over_tile<T, D>(dk, [&](int i, int n) { return static_cast<float>(tiles.ds[n][i]); }, tiles.q);
            float dq[4][D / 16] = {};
            over_tile<T, D>(dq, [&](int i, int n) { return static_cast<float>(tiles.ds[i][n]); }, tiles.k);
            for (int i = 0; i < 4; ++i)
                if (first_row + row + i < in.length)
#pragma unroll
                    for (int part = 0; part < D / 32; ++part) {
                        float* const sums = in.dq_sums + head * size + static_cast<int64_t>(first_row + row + i) * D;
                        atomicAdd(reinterpret_cast<float2*>(sums + 32 * part + column),
                                  make_float2(dq[i][2 * part], dq[i][2 * part + 1]));
                    }
        }

    for (int i = 0; i < 4; ++i) {
        if (first_key + row + i >= in.length)
            continue;
        const int64_t at = kv_head * size + static_cast<int64_t>(first_key + row + i) * D + column;
#pragma unroll
        for (int part = 0; part < D / 32; ++part) {
            const float *const of_k = &dk[i][2 * part], *const of_v = &dv[i][2 * part];
            *reinterpret_cast<unsigned*>(in.dk + at + 32 * part) = pack<T>(of_k[0] * in.root, of_k[1] * in.root);
            *reinterpret_cast<unsigned*>(in.dv + at + 32 * part) = pack<T>(of_v[0], of_v[1]);
        }
    }
}

}  // namespace

template <typename T, int D>
const char* launch(const Arguments& a) {
    return run_backward<T, D>(attention_backward<T, D>, KEYS, THREADS, sizeof(Tiles<T, D>), a, BackwardInputs<T>(a));
}
