// What the memory-bound kernels share: 16-byte accesses, conversion to FP32, reductions over a block, and the choice of
// a kernel's template arguments by dtype and width.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "copies.cuh"
#include "launchers.h"

// Tunables: the threads of the largest block, and the elements of a row that one thread holds in registers.
constexpr int MAX_THREADS = 512;
constexpr int FEW_ITEMS = 16;
constexpr int MANY_ITEMS = 32;                               // of wide rows, and where registers are left
constexpr int WIDEST = MAX_THREADS * MANY_ITEMS;
constexpr float LOG2_E = 1.4426950408889634f;

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// Two values in one instruction, where the hardware has one.
__device__ inline void round_pair(float* to, float low, float high) { to[0] = low, to[1] = high; }
__device__ inline void round_pair(__half* to, float low, float high) {
    *reinterpret_cast<__half2*>(to) = __floats2half2_rn(low, high);
}
__device__ inline void round_pair(__nv_bfloat16* to, float low, float high) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(low, high);
}
__device__ inline void round_one(float* to, float value) { *to = value; }
__device__ inline void round_one(__half* to, float value) { *to = __float2half_rn(value); }
__device__ inline void round_one(__nv_bfloat16* to, float value) { *to = __float2bfloat16_rn(value); }

// N neighbouring elements that one instruction moves: 16 bytes, or a single element where rows are not so aligned.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
    using Bits = std::conditional_t<sizeof(T) * N == 16, uint4,
                                    std::conditional_t<sizeof(T) == 4, unsigned, unsigned short>>;
    T values[N];

    __device__ float operator[](int i) const {
        if constexpr (N > 1 && std::is_same_v<T, __nv_bfloat16>) {           // FP32's upper half: one instruction
            const unsigned pair = reinterpret_cast<const unsigned*>(values)[i / 2];
            return __uint_as_float(i % 2 ? pair & 0xFFFF0000 : pair << 16);
        }
        return to_float(values[i]);
    }

    __device__ void set(const float (&from)[N]) {
        if constexpr (N == 1)
            round_one(values, from[0]);
        else
            for (int i = 0; i < N; i += 2)
                round_pair(values + i, from[i], from[i + 1]);
    }

    __device__ void fill(float value) {
        for (int i = 0; i < N; ++i)
            round_one(values + i, value);
    }

    // STREAMED data is the first that the caches drop: a tunable of each kernel.
    template <bool STREAMED = false>
    __device__ void read(const T* from) {
        const Bits* const bits = reinterpret_cast<const Bits*>(from);
        *reinterpret_cast<Bits*>(this) = STREAMED ? __ldcs(bits) : __ldg(bits);
    }
    template <bool STREAMED = false>
    __device__ void write(T* to) const {
        const Bits bits = *reinterpret_cast<const Bits*>(this);
        STREAMED ? __stcs(reinterpret_cast<Bits*>(to), bits) : void(*reinterpret_cast<Bits*>(to) = bits);
    }
};

// How a block holds a row: thread t has the vectors t, t + blockDim.x, t + 2 blockDim.x, ...: neighbouring threads read
// neighbouring addresses, and a warp's access is one contiguous stretch of memory.
template <typename T_, int N_, int ITEMS>
struct Layout {
    using T = T_;
    static constexpr int N = N_, VECTORS = ITEMS / N_, MOST_THREADS = std::min(MAX_THREADS, WIDEST / ITEMS);
    using Row = Vector<T, N>[VECTORS];

    __device__ static int column(int v) { return (v * blockDim.x + threadIdx.x) * N; }

    // A thread has the same columns of every row: its part of the weights stays in registers, where these are left.
    static constexpr bool KEEPS_WEIGHTS = ITEMS <= FEW_ITEMS;

    // Whether RowPairs waits in shared memory: it is copied there in 16 bytes, and where a thread holds so much of a row
    // a block of MAX_THREADS needs 128 KB.
    static constexpr bool STAGED = N > 1 && sizeof(Row) <= 64;

    // Vector v of the weights; 0 behind the row.
    __device__ static Vector<T, N> read(int v, const T* from, int width) {
        Vector<T, N> found;
        if (column(v) < width)
            found.read(from + column(v));
        else
            found.fill(0.0f);
        return found;
    }

    // All loads are issued before the first value is needed. What is beyond `width` is 0.
    template <bool STREAMED = false>
    __device__ static void load(Row& row, const T* from, int width) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            if (column(v) < width)
                row[v].template read<STREAMED>(from + column(v));
            else
                row[v].fill(0.0f);
    }
};

// The rows that a block works on, one after the other, of two tensors [rows, width]: number blockIdx.x, and each
// gridDim.x behind it. While one is used the next are on their way from memory to shared memory, for which no registers
// are needed. A thread copies what it reads itself, so no thread waits for another. Where there is no shared memory
// (wide rows, and vectors of one element, for which there is no such copy) a row is loaded when it is asked for.
constexpr int STAGES = 2;                                    // rows that are on their way: a tunable

template <typename L>
class RowPairs {
    using T = typename L::T;
    using Part = Vector<T, L::N>;
    const T* const tensors[2];
    const unsigned rows, width;
    const bool staged;
    Part* place;                                             // of this thread: a warp's lie together
    int64_t ahead;                                           // where the next row to be sent begins
    int stage = 0;

    __device__ Part& part(int tensor, int v) const { return place[((stage * 2 + tensor) * L::VECTORS + v) * 32]; }

    // Behind the last row there is nothing to copy, but the groups of copies are still one a row.
    __device__ void send(unsigned row) {
        for (int tensor = 0; tensor < 2; ++tensor)
#pragma unroll
            for (int v = 0; v < L::VECTORS; ++v)
                copy_async(&part(tensor, v), tensors[tensor] + ahead + L::column(v),
                           row < rows && L::column(v) < width);
        end_of_copies();
        ahead += static_cast<int64_t>(gridDim.x) * width;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

public:
    // `room`: the bytes of dynamic shared memory, as `shared_bytes` says.
    __device__ RowPairs(const T* a, const T* b, unsigned rows, int width, int room)
        : tensors{a, b}, rows(rows), width(width), staged(L::STAGED && room > 0),
          ahead(static_cast<int64_t>(blockIdx.x) * width) {
        extern __shared__ uint4 shared[];
        constexpr int PARTS = STAGES * 2 * L::VECTORS;       // of a thread
        place = reinterpret_cast<Part*>(shared) + threadIdx.x / 32 * 32 * PARTS + threadIdx.x % 32;
        if (staged)
            for (unsigned i = 0; i < STAGES; ++i)
                send(blockIdx.x + i * gridDim.x);
    }

    // The next row of each, number `row`, which begins at `start`; 0 behind its end.
    __device__ void take(typename L::Row& a, typename L::Row& b, unsigned row, int64_t start) {
        if (!staged) {
            L::load(a, tensors[0] + start, width);
            L::load(b, tensors[1] + start, width);
            return;
        }
        wait_for_copies<STAGES - 1>();
#pragma unroll
        for (int v = 0; v < L::VECTORS; ++v) {
            a[v] = part(0, v);
            b[v] = part(1, v);
        }
        send(row + STAGES * gridDim.x);                      // the place is this thread's own, and free again
    }
};

__device__ inline float exp2_approximate(float x) {          // within 2 units in the last place; exp2f adds denormals
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float reciprocal_approximate(float x) {    // within 1 unit in the last place
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / (1 + exp(-x)).
__device__ inline float sigmoid(float x) { return reciprocal_approximate(1.0f + exp2_approximate(-LOG2_E * x)); }

struct Sum {
    static constexpr float neutral = 0.0f;
    __device__ static float of(float a, float b) { return a + b; }
};
struct Max {                                                 // of numbers: NaN is left to the sum that follows
    static constexpr float neutral = -INFINITY;
    __device__ static float of(float a, float b) { return fmaxf(a, b); }
};

// Each lane gets the same bits: at every step both partners combine the same two values.
template <typename Op>
__device__ float reduce_warp(float value) {
    for (int distance = 16; distance; distance /= 2)
        value = Op::of(value, __shfl_xor_sync(~0u, value, distance));
    return value;
}

// Over all threads of the block; each gets the result, in an order that never changes. `turn` is 0 and 1 by turns from
// one call to the next: a thread that is ahead writes where the others do not read any more, and one barrier a call is
// enough. (Each Op has memory of its own, so that their turns are counted apart.)
template <typename Op>
__device__ float reduce_block(float value, int turn) {
    __shared__ float of_warp[2][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    value = reduce_warp<Op>(value);
    if (warps == 1)                                          // a row is one warp's: no thread waits for another
        return value;
    if (lane == 0)
        of_warp[turn][warp] = value;
    __syncthreads();
    return reduce_warp<Op>(lane < warps ? of_warp[turn][lane] : Op::neutral);
}

// The same for two sums at once, in half the instructions: half of a warp's lanes add up `a`, half `b`.
__device__ inline void add_up_block(float& a, float& b, int turn) {
    constexpr int HALF = 16;
    static_assert(MAX_THREADS / 32 <= HALF);                 // a half also adds up what the warps have found
    __shared__ float of_warp[2][2][HALF];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, place = lane % HALF, warps = blockDim.x / 32;
    const bool second = lane >= HALF;
    float sum = (second ? b : a) + __shfl_xor_sync(~0u, second ? a : b, HALF);
    for (int distance = HALF / 2; distance; distance /= 2)
        sum += __shfl_xor_sync(~0u, sum, distance);
    if (warps > 1) {
        if (place == 0)
            of_warp[turn][second][warp] = sum;
        __syncthreads();
        sum = place < warps ? of_warp[turn][second][place] : 0.0f;
        for (int distance = HALF / 2; distance; distance /= 2)
            sum += __shfl_xor_sync(~0u, sum, distance);
    }
    const float other = __shfl_xor_sync(~0u, sum, HALF);
    a = second ? other : sum;
    b = second ? sum : other;
}

// N neighbouring FP32 numbers, 16 bytes at a time where N allows it: a thread's numbers lie apart from the next one's,
// so that a warp's access of 4 bytes each would touch as many sectors of the cache as one of 16.
template <int N>
__device__ void write_floats(float* to, const float (&from)[N]) {
    if constexpr (N % 4 == 0)
#pragma unroll
        for (int i = 0; i < N; i += 4)
            *reinterpret_cast<float4*>(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
    else
        for (int i = 0; i < N; ++i)
            to[i] = from[i];
}

// One total for each of `columns`: the sum of the rows of [parts, columns], in an order that never changes.
constexpr int PARTS_AT_ONCE = 32;

template <typename T>
__global__ void __launch_bounds__(32 * PARTS_AT_ONCE)
add_up(const float* __restrict__ sums, T* __restrict__ totals, int parts, int columns) {
    __shared__ float of_warp[PARTS_AT_ONCE][32];
    const int column = blockIdx.x * 32 + threadIdx.x;
    float total = 0.0f;
    if (column < columns)
        for (int part = threadIdx.y; part < parts; part += PARTS_AT_ONCE)
            total += sums[static_cast<int64_t>(part) * columns + column];
    of_warp[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y > 0 || column >= columns)
        return;
    for (int i = 1; i < PARTS_AT_ONCE; ++i)
        total += of_warp[i][threadIdx.x];
    round_one(totals + column, total);
}

// The rest runs on the CPU.

// How much shared memory RowPairs gets in a block of `kernel`: 0 where there is not enough on this GPU.
template <typename L, typename Kernel>
int shared_bytes(Kernel kernel, int threads) {
    if (!L::STAGED)
        return 0;
    int device = 0, most = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    most -= 1024;                                            // the reductions' own, and more
    const int bytes = STAGES * 2 * threads * static_cast<int>(sizeof(typename L::Row));
    if (bytes > most)
        return 0;
    // The same at every call: the host's threads share it. An error is found where the launch is checked.
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    return bytes;
}

template <typename T>
void start_add_up(const float* sums, T* totals, int parts, int columns, cudaStream_t stream) {
    add_up<<<(columns + 31) / 32, dim3(32, PARTS_AT_ONCE), 0, stream>>>(sums, totals, parts, columns);
}

template <typename... Pointers>
bool aligned(Pointers... pointers) {
    return ((reinterpret_cast<uintptr_t>(pointers) | ...) % 16) == 0;
}

// body(T()) for the C++ type T of `type`.
template <typename Body>
void with_type(Float type, Body body) {
    switch (type) {
        case Float::half: return body(__half());
        case Float::bfloat16: return body(__nv_bfloat16());
        case Float::single: return body(float());
    }
}

// body(Layout(), threads) for rows of `width` elements, ITEMS in a thread, or twice or four times as many of wide rows.
template <typename T, int N, int ITEMS, typename Body>
void with_items(int width, Body body) {
    if constexpr (ITEMS < MANY_ITEMS)
        if (width > MAX_THREADS * ITEMS)
            return with_items<T, N, 2 * ITEMS>(width, body);
    body(Layout<T, N, ITEMS>(), (width + ITEMS * 32 - 1) / (ITEMS * 32) * 32);
}

// The same by dtype; `vectors` says whether the rows' addresses allow 16-byte accesses. Without them a thread holds
// FEW_ITEMS, if ITEMS are more.
template <int ITEMS, typename Body>
void with_layout(Float type, int width, bool vectors, Body body) {
    with_type(type, [&](auto zero) {
        constexpr int N = 16 / sizeof(zero);
        if (vectors && width % N == 0)
            with_items<decltype(zero), N, ITEMS>(width, body);
        else
            with_items<decltype(zero), 1, std::min(ITEMS, FEW_ITEMS)>(width, body);
    });
}
