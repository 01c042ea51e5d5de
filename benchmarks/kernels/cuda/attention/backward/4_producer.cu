// Rung 4 of the backward: a producer warp, and two consumers that share dS.
//
// One thread copies tiles of q and dy by TMA, as in the forward's rungs 7 and 8. A block has twice as many keys, 64 for each
// of two warpgroups, so that each tile of rows serves twice as many, and half as many parts of dq are added in memory: the
// two put their dS side by side, and each computes half of dq. Products go on under the exponentials and the additions.
#include "../tma.cuh"
#include "../wgmma.cuh"
#include "backward.cuh"

namespace {

template <int D_>
struct Shape {
    static constexpr int D = D_, CONSUMERS = 2, KEYS = 64 * CONSUMERS, STAGES = 2, THREADS = 128 * (CONSUMERS + 1);
    static constexpr int ROWS = D == 64 ? 128 : 64;          // what registers and shared memory hold
    static constexpr int TILES = 2 * KEYS * D + 2 * STAGES * ROWS * D + 2 * KEYS * ROWS;
    static constexpr int SHARED = TILES * 2 + STAGES * ROWS * sizeof(float2) + (3 * STAGES + 1) * sizeof(tma::Barrier);
};

// All consumers are here.
__device__ void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

template <typename T, typename A>
__global__ void __launch_bounds__(A::THREADS, 1)
attention_backward(const BackwardInputs<T> in, const __grid_constant__ tma::Matrix q,
                   const __grid_constant__ tma::Matrix k, const __grid_constant__ tma::Matrix v,
                   const __grid_constant__ tma::Matrix dy) {
    constexpr int D = A::D, ROWS = A::ROWS, KEYS = A::KEYS, STAGES = A::STAGES;
    extern __shared__ __align__(1024) unsigned char shared[];
    T* const k_tile = reinterpret_cast<T*>(shared);
    T* const v_tile = k_tile + KEYS * D;
    T* const q_tiles = v_tile + KEYS * D;
    T* const dy_tiles = q_tiles + STAGES * ROWS * D;
    T* const ds_tiles = dy_tiles + STAGES * ROWS * D;        // dS^T: [KEYS, ROWS], of this tile and of the last one
    auto* const numbers = reinterpret_cast<float2*>(ds_tiles + 2 * KEYS * ROWS);
    auto* const q_arrived = reinterpret_cast<tma::Barrier*>(numbers + STAGES * ROWS);        // of each stage, as all three
    tma::Barrier *const dy_arrived = q_arrived + STAGES, *const were_read = dy_arrived + STAGES;
    tma::Barrier* const kv_arrived = were_read + STAGES;
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    const int first_key = blockIdx.x * KEYS, kv_head = blockIdx.y;
    const int start_row = in.is_causal ? first_key : 0, of_head = (in.length - start_row + ROWS - 1) / ROWS;
    const int tiles = of_head * in.sharing();
    const auto head_of = [&](int tile) { return in.first_head(kv_head) + tile / of_head; };
    const auto first_row_of = [&](int tile) { return start_row + tile % of_head * ROWS; };

    if (threadIdx.x == 0) {
        tma::prepare(kv_arrived, 1);
        for (int stage = 0; stage < STAGES; ++stage) {
            tma::prepare(&q_arrived[stage], 1);
            tma::prepare(&dy_arrived[stage], 1);
            tma::prepare(&were_read[stage], 128 * A::CONSUMERS);
        }
        tma::show_barriers();
    }
    __syncthreads();

    if (group == A::CONSUMERS) {
        wgmma::keep_registers<24>();
        if (threadIdx.x % 128 > 0)
            return;
        tma::expect(kv_arrived, 2 * KEYS * D * 2);
        tma::load<KEYS, D>(k_tile, k.map, first_key, kv_head, kv_arrived);
        tma::load<KEYS, D>(v_tile, v.map, first_key, kv_head, kv_arrived);
        for (int tile = 0; tile < tiles; ++tile) {
            const int stage = tile % STAGES, head = head_of(tile), first_row = first_row_of(tile);
            const int64_t at = static_cast<int64_t>(head) * in.padded_length + first_row;
            if (tile >= STAGES)
                tma::wait(&were_read[stage], (tile / STAGES - 1) % 2);
            tma::expect(&q_arrived[stage], ROWS * D * 2 + ROWS * sizeof(float2));
            tma::load<ROWS, D>(q_tiles + stage * ROWS * D, q.map, first_row, head, &q_arrived[stage]);
            tma::load(numbers + stage * ROWS, in.row_numbers + at, ROWS * sizeof(float2), &q_arrived[stage]);
            tma::expect(&dy_arrived[stage], ROWS * D * 2);
            tma::load<ROWS, D>(dy_tiles + stage * ROWS * D, dy.map, first_row, head, &dy_arrived[stage]);
        }
        return;
    }

    wgmma::take_registers<240>();
    const int group_key = 64 * group, warp_row = threadIdx.x % 128 / 32 * 16;
    const int key = first_key + group_key + warp_row + lane / 4;                             // and key + 8
    float dk[D / 8][4] = {}, dv[D / 8][4] = {};
    float s[ROWS / 8][4], dp[ROWS / 8][4], dq[8][4];
    unsigned p[ROWS / 16][4], ds[ROWS / 16][4];

    // Starts c = a b^T over D: a the group's 64 rows of a tile.
    const auto start_over_width = [&](float(&c)[ROWS / 8][4], const T* a_tile, const T* b_tile) {
        wgmma::begin();
#pragma unroll
        for (int d = 0; d < D / 16; ++d)
            wgmma::multiply<T, ROWS>(c, wgmma::described(a_tile + wgmma::place<KEYS>(group_key, 2 * d), 0),
                                     wgmma::described(b_tile + wgmma::place<ROWS>(0, 2 * d), 0), d > 0);
        wgmma::end();
    };

    // Starts c += a b: a [64 x ROWS] in registers.
    const auto start_over_rows = [&](float(&c)[D / 8][4], const unsigned(&a)[ROWS / 16][4], const T* b_tile) {
        wgmma::begin();
#pragma unroll
        for (int j = 0; j < ROWS / 16; ++j)
            wgmma::multiply<T, D>(c, a[j], wgmma::described(b_tile + wgmma::place<ROWS>(16 * j, 0), ROWS * 128));
        wgmma::end();
    };

    // Starts the group's half of dq, 64 x 64: of 128 rows these, or of 128 columns.
    const auto start_dq = [&](const T* ds_tile) {
        const T* const a = ds_tile + (ROWS == 128) * group * KEYS * 64;
        const T* const b = k_tile + (D == 128) * group * KEYS * 64;
        wgmma::begin();
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j)
            wgmma::multiply<T, 64, true>(dq, wgmma::described(a + wgmma::place<KEYS>(16 * j, 0), 0),
                                          wgmma::described(b + wgmma::place<KEYS>(16 * j, 0), 0), j > 0);
        wgmma::end();
    };

    const auto add_dq = [&](int tile) {
        const int first = first_row_of(tile) + (ROWS == 128) * group * 64 + warp_row + lane / 4;
        const int column = (D == 128) * group * 64 + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first + 8 * half;
            if (row >= in.length)
                continue;
            float* const sums = in.dq_sums + (static_cast<int64_t>(head_of(tile)) * in.length + row) * D + column;
#pragma unroll
            for (int n = 0; n < 8; ++n)
                atomicAdd(reinterpret_cast<float2*>(sums + 8 * n), make_float2(dq[n][2 * half], dq[n][2 * half + 1]));
        }
    };

    tma::wait(kv_arrived, 0);
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % STAGES, phase = tile / STAGES % 2, first_row = first_row_of(tile);
        const T* const q_tile = q_tiles + stage * ROWS * D;
        const T* const dy_tile = dy_tiles + stage * ROWS * D;
        T* const ds_tile = ds_tiles + tile % 2 * KEYS * ROWS;
        const auto* const pairs = reinterpret_cast<const float4*>(numbers + stage * ROWS) + lane % 4;

        tma::wait(&q_arrived[stage], phase);
        start_over_width(s, k_tile, q_tile);
        tma::wait(&dy_arrived[stage], phase);
        start_over_width(dp, v_tile, dy_tile);

        // s becomes P.
        wgmma::wait<1>(s);
        if (tile > 0)
            tma::arrive(&were_read[(tile - 1) % STAGES]);
        const bool all_see = first_row + ROWS <= in.length && first_key + KEYS <= in.length
                             && !(in.is_causal && first_row < first_key + group_key + 63);
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n) {
            const float4 of_rows = pairs[4 * n];             // of rows 8 n + lane % 4 * 2 and the next
#pragma unroll
            for (int i = 0; i < 4; ++i)
                s[n][i] = exp2_approximate(s[n][i] * in.scale - (i % 2 ? of_rows.z : of_rows.x));
        }
        if (!all_see)
#pragma unroll
            for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (!in.sees(first_row + 8 * n + lane % 4 * 2 + i % 2, key + i / 2 * 8))
                        s[n][i] = 0.0f;
#pragma unroll
        for (int j = 0; j < ROWS / 16; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                p[j][i] = pack<T>(s[2 * j + i / 2][i % 2 * 2], s[2 * j + i / 2][i % 2 * 2 + 1]);

        // dp becomes dS.
        wgmma::wait<0>(dp);
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n) {
            const float4 of_rows = pairs[4 * n];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                dp[n][i] = s[n][i] * (dp[n][i] - (i % 2 ? of_rows.w : of_rows.y));
        }
        if (!all_see)
#pragma unroll
            for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (!in.sees(first_row + 8 * n + lane % 4 * 2 + i % 2, key + i / 2 * 8))
                        dp[n][i] = 0.0f;                     // 0 times infinity, it may be
#pragma unroll
        for (int j = 0; j < ROWS / 16; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int n = 2 * j + i / 2;
                ds[j][i] = pack<T>(dp[n][i % 2 * 2], dp[n][i % 2 * 2 + 1]);
                T* const eight = ds_tile + wgmma::place<KEYS>(group_key + warp_row + lane / 4 + i % 2 * 8, n);
                *reinterpret_cast<unsigned*>(eight + lane % 4 * 2) = ds[j][i];
            }
        start_over_rows(dv, p, dy_tile);
        wgmma::show_writes();
        meet();                                              // all of dS is there

        start_dq(ds_tile);
        start_over_rows(dk, ds, q_tile);
        wgmma::wait<1>(dq);
        add_dq(tile);
        wgmma::wait<0>(dk);
        wgmma::wait<0>(dv);
    }
    wgmma::wait<0>(dv);
    wgmma::wait<0>(dk);

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (key + 8 * half >= in.length)
            continue;
        const int64_t at = (static_cast<int64_t>(kv_head) * in.length + key + 8 * half) * D + lane % 4 * 2;
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
    using A = Shape<D>;
    const tma::Matrix q(a.q, a.is_bfloat16, a.batch * a.heads, a.length, D, A::ROWS);
    const tma::Matrix k(a.k, a.is_bfloat16, a.batch * a.kv_heads, a.length, D, A::KEYS);
    const tma::Matrix v(a.v, a.is_bfloat16, a.batch * a.kv_heads, a.length, D, A::KEYS);
    const tma::Matrix dy(a.dy, a.is_bfloat16, a.batch * a.heads, a.length, D, A::ROWS);
    if (!q.ok || !k.ok || !v.ok || !dy.ok)
        return "the driver makes no tensor map of q, k, v and dy";
    return run_backward<T, D>(attention_backward<T, A>, A::KEYS, A::THREADS, A::SHARED, a, BackwardInputs<T>(a), q, k, v,
                              dy);
}
