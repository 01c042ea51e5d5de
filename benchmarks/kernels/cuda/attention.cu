// FlashAttention, forward: y = softmax(q k^T / sqrt(D)) v for each head, without a score ever reaching memory.
//
// A block owns ROWS queries of one head and walks over the keys, KEYS at a time. For each tile of keys it multiplies
// S = q k^T on the tensor cores, turns S into P = exp(S - peak), and adds P v to its output. The softmax is "online":
// peak and total of each row are those of the keys seen so far, and when the peak grows, what has been summed is scaled
// down by exp(old peak - new peak). All of S, P and the output stays in registers.
//
// Three things make it fast:
//  - Accumulator and operand have one layout. Where a lane holds S as the result of one product is where the next
//    product wants P as its operand (see `multiply`): P needs a rounding to 16 bits and no exchange between lanes.
//  - The next tile of k and v is copied (cp.async) while this one is multiplied: two buffers, one barrier a tile.
//  - Under the causal mask, tiles behind the diagonal are never loaded, only tiles that touch it are masked, and a
//    head's heaviest blocks, those of its last queries, start first.
//
// Each of the WARPS warps owns 16 TALL neighbouring rows: what it loads of k or v serves TALL products. q, k and v come
// from shared memory, swizzled (see tensor_core.cuh). A row of a 16 x 8 result lies in four neighbouring lanes, a quad.
#include "rows.cuh"
#include "tensor_core.cuh"

namespace {

// Tunables. BLOCKS is how many blocks a multiprocessor is meant to hold: it bounds the registers of a thread.
template <int D> struct Tuned;
template <> struct Tuned<64> { static constexpr int WARPS = 4, TALL = 2, KEYS = 64, BLOCKS = 2; };
template <> struct Tuned<128> { static constexpr int WARPS = 4, TALL = 2, KEYS = 64, BLOCKS = 2; };

template <typename T_, int D_>
struct Shape : Tuned<D_> {
    using T = T_;
    static constexpr int D = D_, THREADS = 32 * Tuned<D>::WARPS, ROWS = 16 * Tuned<D>::TALL * Tuned<D>::WARPS;
    static constexpr int TILE = Tuned<D>::KEYS * D;          // elements
    static constexpr int BYTES = (ROWS * D + 4 * TILE) * 2;  // q, and two buffers of k and v each
};

template <typename T>
__device__ unsigned pack(float low, float high) {
    unsigned packed;
    round_pair(reinterpret_cast<T*>(&packed), low, high);
    return packed;
}

// Starts copying rows [first, first + COUNT) of a [length, D] matrix; rows behind its end become zeros.
template <typename A, int COUNT>
__device__ void copy_rows(typename A::T* to, const typename A::T* from, unsigned first, unsigned length) {
    constexpr unsigned CHUNKS = A::D / 8, STEP = A::THREADS / CHUNKS;              // all threads copy STEP rows at once
    static_assert(STEP % 8 == 0 && COUNT % STEP == 0, "the swizzle repeats every 8 rows");
    const unsigned row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    to += swizzled<A::D>(row, chunk);
    from += static_cast<int64_t>(first + row) * A::D + chunk * 8;
#pragma unroll
    for (unsigned i = 0; i < COUNT; i += STEP)
        copy_async(to + i * A::D, from + i * A::D, first + row + i < length);
}

template <typename A>
__global__ void __launch_bounds__(A::THREADS, A::BLOCKS)
forward(const typename A::T* __restrict__ q, const typename A::T* __restrict__ k, const typename A::T* __restrict__ v,
        typename A::T* __restrict__ y, int length, float scale, bool causal) {
    using T = typename A::T;
    constexpr int D = A::D, KEYS = A::KEYS, TALL = A::TALL;
    extern __shared__ __align__(128) unsigned char shared[];
    T* const q_tile = reinterpret_cast<T*>(shared);
    T* const k_tiles = q_tile + A::ROWS * D;
    T* const v_tiles = k_tiles + 2 * A::TILE;

    const int blocks = (length + A::ROWS - 1) / A::ROWS;     // of one head: neighbours share its k and v in L2
    const int first_row = (blocks - 1 - blockIdx.x % blocks) * A::ROWS;
    const int64_t head = static_cast<int64_t>(blockIdx.x / blocks) * length * D;
    q += head, k += head, v += head, y += head;

    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * TALL;
    const int quad_row = lane / 4, quad_column = lane % 4 * 2;
    // Which row this lane names to ldmatrix. The four matrices of q and v: rows 0-7 and 8-15 of chunk 0, then those of
    // chunk 1; of k: chunks 0 and 1 of keys 0-7, then of keys 8-15. Two chunks on is ^ 16, since places are made by ^.
    const unsigned q_lane = swizzled<D>(warp_row + lane % 16, lane / 16);
    const unsigned k_lane = swizzled<D>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const unsigned v_lane = swizzled<D>(lane % 16, lane / 16);

    float out[TALL][D / 8][4] = {}, peak[TALL][2], total[TALL][2] = {};
    for (auto& pair : peak)
        pair[0] = pair[1] = -INFINITY;

    const int seen = causal ? min(first_row + A::ROWS, length) : length;           // keys that any row here sees
    copy_rows<A, A::ROWS>(q_tile, q, first_row, length);
    copy_rows<A, KEYS>(k_tiles, k, 0, length);
    copy_rows<A, KEYS>(v_tiles, v, 0, length);

    for (int first_key = 0, stage = 0; first_key < seen; first_key += KEYS, stage ^= 1) {
        wait_for_all_copies();
        __syncthreads();                                     // this tile is here, and no warp is still at the last one
        if (first_key + KEYS < seen) {
            copy_rows<A, KEYS>(k_tiles + (stage ^ 1) * A::TILE, k, first_key + KEYS, length);
            copy_rows<A, KEYS>(v_tiles + (stage ^ 1) * A::TILE, v, first_key + KEYS, length);
        }
        const int top = first_row + warp_row;
        if (causal && first_key > top + 16 * TALL - 1)
            continue;                                        // this warp's rows all end before these keys

        // S = q k^T, 16 of D at a time.
        const T* const k_tile = k_tiles + stage * A::TILE;
        float s[TALL][KEYS / 8][4] = {};
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            unsigned a[TALL][4];
#pragma unroll
            for (int m = 0; m < TALL; ++m)
                load_matrices(a[m], q_tile + 16 * m * D + (q_lane ^ 16 * d));
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                unsigned b[4];
                load_matrices(b, k_tile + 16 * n * D + (k_lane ^ 16 * d));
#pragma unroll
                for (int m = 0; m < TALL; ++m) {
                    multiply<T>(s[m][2 * n], a[m], b[0], b[1]);
                    multiply<T>(s[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }

        if (first_key + KEYS > length || (causal && first_key + KEYS - 1 > top))
#pragma unroll
            for (int m = 0; m < TALL; ++m)
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int key = first_key + 8 * n + quad_column + i % 2;
                        if (key >= length || (causal && key > top + 16 * m + quad_row + i / 2 * 8))
                            s[m][n][i] = -INFINITY;
                    }

        // P = exp(S - peak), as a power of two: `scale` has log2(e) in it.
#pragma unroll
        for (int m = 0; m < TALL; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {           // rows g and g + 8
                float highest = peak[m][half];
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n)
                    highest = fmaxf(highest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
                highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
                const float shift = highest == -INFINITY ? 0.0f : highest * scale;     // or -inf - -inf would be NaN
                const float shrink = exp2_approximate(peak[m][half] * scale - shift);
                peak[m][half] = highest;
                float sum = 0.0f;                            // of this lane's keys; the quad's sums meet at the end
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; ++i) {
                        s[m][n][i] = exp2_approximate(s[m][n][i] * scale - shift);
                        sum += s[m][n][i];
                    }
                total[m][half] = total[m][half] * shrink + sum;
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
                    out[m][n][2 * half] *= shrink;
                    out[m][n][2 * half + 1] *= shrink;
                }
            }

        // out += P v, 16 keys at a time.
        const T* const v_tile = v_tiles + stage * A::TILE;
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j) {
            unsigned a[TALL][4];
#pragma unroll
            for (int m = 0; m < TALL; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i)                  // rows g and g + 8 of the first 8 keys, then of the next 8
                    a[m][i] = pack<T>(s[m][2 * j + i / 2][i % 2 * 2], s[m][2 * j + i / 2][i % 2 * 2 + 1]);
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                unsigned b[4];
                load_transposed(b, v_tile + 16 * j * D + (v_lane ^ 16 * n));
#pragma unroll
                for (int m = 0; m < TALL; ++m) {
                    multiply<T>(out[m][2 * n], a[m], b[0], b[1]);
                    multiply<T>(out[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

#pragma unroll
    for (int m = 0; m < TALL; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = total[m][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const float inverse = 1.0f / sum;
            const int row = first_row + warp_row + 16 * m + quad_row + 8 * half;
            if (row < length)
#pragma unroll
                for (int n = 0; n < D / 8; ++n)
                    *reinterpret_cast<unsigned*>(y + static_cast<int64_t>(row) * D + 8 * n + quad_column) =
                        pack<T>(out[m][n][2 * half] * inverse, out[m][n][2 * half + 1] * inverse);
        }
}

template <typename T, int D>
bool launch(const void* q, const void* k, const void* v, void* y, int64_t heads, int length, bool causal,
            cudaStream_t stream) {
    using A = Shape<T, D>;
    if (cudaFuncSetAttribute(forward<A>, cudaFuncAttributeMaxDynamicSharedMemorySize, A::BYTES) != cudaSuccess) {
        cudaGetLastError();                                  // or the next call would find this error
        return false;
    }
    const int64_t blocks = heads * ((length + A::ROWS - 1) / A::ROWS);
    const float scale = LOG2_E / sqrtf(D);
    forward<A><<<blocks, A::THREADS, A::BYTES, stream>>>(
        static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), static_cast<T*>(y), length, scale,
        causal);
    return true;
}

}  // namespace

bool attention_forward(Float type, const void* q, const void* k, const void* v, void* y, int64_t heads, int length,
                       int head_width, bool causal, cudaStream_t stream) {
    const auto with_width = [&](auto zero) {
        using T = decltype(zero);
        return head_width == 64 ? launch<T, 64>(q, k, v, y, heads, length, causal, stream)
                                : launch<T, 128>(q, k, v, y, heads, length, causal, stream);
    };
    return type == Float::half ? with_width(__half()) : with_width(__nv_bfloat16());
}
