// Rung 9: consumers in ping-pong, and softmax under products.
//
// In rung 8 a warpgroup's tensor cores are idle while it computes its softmax. Here they are busy with something else:
// - with another warpgroup's products. The consumers take turns: a named barrier lets one issue its products while
//   another is at its softmax. There are two of them at D 128, and three at D 64, whose sums take fewer registers.
// - with its own: the scores of the next tile are issued before the product of this one's P and v.
// So k and v are no longer read together, and each has barriers of its own.
#include "series.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace {

template <int D_>
struct Shape {
    static constexpr int D = D_, CONSUMERS = D == 64 ? 3 : 2, REGISTERS = D == 64 ? 160 : 240;
    static constexpr int ROWS = 64 * CONSUMERS, KEYS = 128, STAGES = 2, THREADS = 128 * (CONSUMERS + 1);
    static constexpr int SHARED = (ROWS + 2 * STAGES * KEYS) * D * 2 + (4 * STAGES + 1) * sizeof(tma::Barrier);
};

// The consumers take turns: each waits for the one before it, and then lets the next one go on.
__device__ void wait_for_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory"); }
__device__ void end_turn(int next) { asm volatile("bar.arrive %0, 256;" ::"r"(next + 1) : "memory"); }

template <typename T, typename A>
__global__ void __launch_bounds__(A::THREADS, 1)
attention_forward(const Inputs<T> in, const __grid_constant__ tma::Matrix q,
                  const __grid_constant__ tma::Matrix k, const __grid_constant__ tma::Matrix v) {
    constexpr int D = A::D, CONSUMERS = A::CONSUMERS, ROWS = A::ROWS, KEYS = A::KEYS, STAGES = A::STAGES;
    extern __shared__ __align__(1024) unsigned char shared[];
    T* const q_tile = reinterpret_cast<T*>(shared);
    T* const k_tiles = q_tile + ROWS * D;
    T* const v_tiles = k_tiles + STAGES * KEYS * D;
    auto* const k_arrived = reinterpret_cast<tma::Barrier*>(v_tiles + STAGES * KEYS * D);    // of each stage, as all four
    tma::Barrier *const v_arrived = k_arrived + STAGES, *const k_was_read = v_arrived + STAGES;
    tma::Barrier *const v_was_read = k_was_read + STAGES, *const q_arrived = v_was_read + STAGES;
    const int head = blockIdx.y, group = threadIdx.x / 128, lane = threadIdx.x % 32;
    const int first_row = blockIdx.x * ROWS, tiles = (in.length + KEYS - 1) / KEYS;

    if (threadIdx.x == 0) {
        tma::prepare(q_arrived, 1);
        for (int stage = 0; stage < STAGES; ++stage) {
            tma::prepare(&k_arrived[stage], 1);
            tma::prepare(&v_arrived[stage], 1);
            tma::prepare(&k_was_read[stage], 4 * CONSUMERS);                                 // by each warp
            tma::prepare(&v_was_read[stage], 4 * CONSUMERS);
        }
        tma::show_barriers();
    }
    __syncthreads();

    if (group == CONSUMERS) {
        wgmma::keep_registers<24>();
        if (threadIdx.x % 128 > 0)
            return;
        const int kv_head = in.kv_head(head);
        tma::expect(q_arrived, ROWS * D * 2);
        tma::load<ROWS, D>(q_tile, q.map, first_row, head, q_arrived);
        for (int tile = 0; tile < tiles; ++tile) {
            const int stage = tile % STAGES, phase_before = (tile / STAGES - 1) % 2;
            if (tile >= STAGES)
                tma::wait(&k_was_read[stage], phase_before);
            tma::expect(&k_arrived[stage], KEYS * D * 2);
            tma::load<KEYS, D>(k_tiles + stage * KEYS * D, k.map, tile * KEYS, kv_head, &k_arrived[stage]);
            if (tile >= STAGES)
                tma::wait(&v_was_read[stage], phase_before);
            tma::expect(&v_arrived[stage], KEYS * D * 2);
            tma::load<KEYS, D>(v_tiles + stage * KEYS * D, v.map, tile * KEYS, kv_head, &v_arrived[stage]);
        }
        return;
    }

    wgmma::take_registers<A::REGISTERS>();
    const int next = (group + 1) % CONSUMERS;
    const int row = first_row + threadIdx.x / 32 * 16 + lane / 4;                            // and row + 8
    float peak[2] = {-INFINITY, -INFINITY}, total[2] = {}, out[D / 8][4] = {};
    float s[KEYS / 8][4], shrink[2];
    unsigned p[KEYS / 16][4];

    // Starts s = q k^T, 16 of D at a time.
    const auto start_scores = [&](int tile) {
        const T* const k_tile = k_tiles + tile % STAGES * KEYS * D;
        wgmma::begin();
#pragma unroll
        for (int d = 0; d < D / 16; ++d)
            wgmma::multiply<T, KEYS>(s, wgmma::described(q_tile + wgmma::place<ROWS>(64 * group, 2 * d), 0),
                                     wgmma::described(k_tile + wgmma::place<KEYS>(0, 2 * d), 0), d > 0);
        wgmma::end();
    };

    // Starts out += P v, 16 keys at a time.
    const auto start_output = [&](int tile) {
        const T* const v_tile = v_tiles + tile % STAGES * KEYS * D;
        wgmma::begin();
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j)
            wgmma::multiply<T, D>(out, p[j], wgmma::described(v_tile + wgmma::place<KEYS>(16 * j, 0), KEYS * 128));
        wgmma::end();
    };

    // s becomes exp(s - peak); `shrink` is by what all that has been summed is to be scaled down.
    const auto exponentials = [&](int tile) {
        const int first_key = tile * KEYS;
        if (in.is_causal || first_key + KEYS > in.length)
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (!in.sees(row + i / 2 * 8, first_key + 8 * n + lane % 4 * 2 + i % 2))
                        s[n][i] = -INFINITY;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float highest = peak[half];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
                highest = fmaxf(highest, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
            const float shift = finite_or_zero(highest) * in.scale;
            shrink[half] = exp2_approximate(peak[half] * in.scale - shift);
            peak[half] = highest;
            total[half] *= shrink[half];                     // of this lane's keys: the quad's meet at the end
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    s[n][i] = exp2_approximate(s[n][i] * in.scale - shift);
                    total[half] += s[n][i];
                }
        }
    };

    const auto round_exponentials = [&] {
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                p[j][i] = pack<T>(s[2 * j + i / 2][i % 2 * 2], s[2 * j + i / 2][i % 2 * 2 + 1]);
    };

    const auto was_read = [&](tma::Barrier* barriers, int tile) {
        if (lane == 0)
            tma::arrive(&barriers[tile % STAGES]);
    };

    if (group == CONSUMERS - 1)
        end_turn(0);                                         // the first one begins
    tma::wait(q_arrived, 0);
    tma::wait(&k_arrived[0], 0);
    wait_for_turn(group);
    start_scores(0);
    end_turn(next);
    wgmma::wait<0>(s);
    was_read(k_was_read, 0);
    exponentials(0);
    round_exponentials();

    for (int tile = 1; tile < tiles; ++tile) {
        tma::wait(&k_arrived[tile % STAGES], tile / STAGES % 2);
        wait_for_turn(group);
        start_scores(tile);
        tma::wait(&v_arrived[(tile - 1) % STAGES], (tile - 1) / STAGES % 2);
        start_output(tile - 1);
        end_turn(next);
        wgmma::wait<1>(s);
        was_read(k_was_read, tile);
        exponentials(tile);
        wgmma::wait<0>(out);
        was_read(v_was_read, tile - 1);
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                out[n][i] *= shrink[i / 2];
        round_exponentials();
    }
    tma::wait(&v_arrived[(tiles - 1) % STAGES], (tiles - 1) / STAGES % 2);
    start_output(tiles - 1);
    wgmma::wait<0>(out);

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
    using A = Shape<D>;
    const tma::Matrix q(a.q, a.is_bfloat16, a.batch * a.heads, a.length, D, A::ROWS);
    const tma::Matrix k(a.k, a.is_bfloat16, a.batch * a.kv_heads, a.length, D, A::KEYS);
    const tma::Matrix v(a.v, a.is_bfloat16, a.batch * a.kv_heads, a.length, D, A::KEYS);
    if (!q.ok || !k.ok || !v.ok)
        return "the driver makes no tensor map of q, k and v";
    return start(attention_forward<T, A>, A::ROWS, A::THREADS, A::SHARED, a, Inputs<T>(a), q, k, v);
}
