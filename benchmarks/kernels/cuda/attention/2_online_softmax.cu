// Rung 2: online softmax.
//
// Rung 1 computed each score twice. Here the highest score of a row, its peak, is that of the keys seen so far. When it
// grows, what has been summed is scaled down by exp(old peak - new peak): one pass over the keys is enough.
#include "series.cuh"

namespace {

constexpr int ROWS = 64, KEYS = 64, THREADS = 256;

template <typename T, int D>
struct Tiles {
    T q[ROWS][D + 2], kv[KEYS][D + 2];           // rows that start in different banks
    T p[ROWS][KEYS + 2];
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

// The scores of this thread's rows and keys, times scale; -inf where a row does not see a key.
template <typename T, int D>
__device__ void scores(float (&s)[4][4], const Tiles<T, D>& tiles, const Inputs<T>& in, int first_row, int first_key) {
    const int row = threadIdx.x / 16 * 4, key = threadIdx.x % 16;
    for (auto& of_row : s)
        for (float& score : of_row)
            score = 0.0f;
#pragma unroll 4
    for (int d = 0; d < D; d += 2) {
        float2 q[4], k[4];
        for (int i = 0; i < 4; ++i) {
            q[i] = pair_at(&tiles.q[row + i][d]);
            k[i] = pair_at(&tiles.kv[key + 16 * i][d]);
        }
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 4; ++j)
                s[i][j] += q[i].x * k[j].x + q[i].y * k[j].y;
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j)
            s[i][j] = in.sees(first_row + row + i, first_key + key + 16 * j) ? s[i][j] * in.scale : -INFINITY;
}

// Over the sixteen threads of a row.
template <typename Combine>
__device__ float over_row(float value, Combine combine) {
    for (int lanes = 1; lanes < 16; lanes *= 2)
        value = combine(value, __shfl_xor_sync(~0u, value, lanes));
    return value;
}

template <typename T, int D>
__global__ void __launch_bounds__(THREADS) attention_forward(const Inputs<T> in) {
    extern __shared__ __align__(16) unsigned char shared[];
    auto& tiles = *reinterpret_cast<Tiles<T, D>*>(shared);
    const int first_row = blockIdx.x * ROWS, head = blockIdx.y;
    const int64_t size = static_cast<int64_t>(in.length) * D;
    const T *q = in.q + head * size, *k = in.k + in.kv_head(head) * size, *v = in.v + in.kv_head(head) * size;
    const int row = threadIdx.x / 16 * 4, key = threadIdx.x % 16;

    float s[4][4], peak[4], total[4] = {}, out[4][D / 16] = {};
    for (float& of_row : peak)
        of_row = -INFINITY;
    load<T, D>(tiles.q, q, first_row, in.length);

    for (int first_key = 0; first_key < in.length; first_key += KEYS) {
        __syncthreads();
        load<T, D>(tiles.kv, k, first_key, in.length);
        __syncthreads();
        scores(s, tiles, in, first_row, first_key);
        for (int i = 0; i < 4; ++i) {
            const float of_tile = fmaxf(fmaxf(s[i][0], s[i][1]), fmaxf(s[i][2], s[i][3]));
            const float highest = fmaxf(peak[i], over_row(of_tile, fmaxf));
            const float shrink = exp2f(peak[i] - finite_or_zero(highest));
            peak[i] = highest;
            total[i] *= shrink;
            for (float& sum : out[i])
                sum *= shrink;
            for (int j = 0; j < 4; ++j) {
                const float p = exp2f(s[i][j] - finite_or_zero(highest));
                total[i] += p;
                tiles.p[row + i][key + 16 * j] = p;
            }
        }
        __syncthreads();
        load<T, D>(tiles.kv, v, first_key, in.length);
        __syncthreads();
        for (int j = 0; j < KEYS; ++j)
            for (int i = 0; i < 4; ++i) {
                const float p = tiles.p[row + i][j];
#pragma unroll
                for (int c = 0; c < D / 32; ++c) {
                    const float2 pair = pair_at(&tiles.kv[j][32 * c + 2 * key]);
                    out[i][2 * c] += p * pair.x;
                    out[i][2 * c + 1] += p * pair.y;
                }
            }
    }

    for (int i = 0; i < 4; ++i) {
        const float sum = over_row(total[i], [](float a, float b) { return a + b; });
        if (first_row + row + i >= in.length)
            continue;
        const int64_t at = static_cast<int64_t>(head) * in.length + first_row + row + i;
        T* const y = in.y + at * D;
        for (int c = 0; c < D / 32; ++c)
            *reinterpret_cast<unsigned*>(y + 32 * c + 2 * key) = pack<T>(out[i][2 * c] / sum, out[i][2 * c + 1] / sum);
        if (key == 0)
            in.log_sum[at] = (peak[i] + log2f(sum)) / LOG2_E;
    }
}

}  // namespace

template <typename T, int D>
const char* launch(const Arguments& a) {
    return start(attention_forward<T, D>, ROWS, THREADS, sizeof(Tiles<T, D>), a, Inputs<T>(a));
}
