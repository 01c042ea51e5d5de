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

    // Data that is read or written once passes through the caches and drives out nothing that is read again.
    __device__ void stream_in(const T* from) {
        *reinterpret_cast<Bits*>(this) = __ldcs(reinterpret_cast<const Bits*>(from));
    }
    __device__ void stream_out(T* to) const {
        __stcs(reinterpret_cast<Bits*>(to), *reinterpret_cast<const Bits*>(this));
    }
    // Data that every block reads (weights) stays in the caches.
    __device__ void read(const T* from) {
        *reinterpret_cast<Bits*>(this) = __ldg(reinterpret_cast<const Bits*>(from));
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

    // Vector v of the weights; 0 behind the row.
    __device__ static Vector<T, N> read(int v, const T* from, int width) {
        Vector<T, N> found;
        if (column(v) < width)
            found.read(from + column(v));
        else
            found.fill(0.0f);
        return found;
    }

    // All loads are issued before the first value is needed. What is beyond `width` is `filler`.
    __device__ static void load(Row& row, const T* from, int width, float filler = 0.0f) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            if (column(v) < width)
                row[v].stream_in(from + column(v));
            else
                row[v].fill(filler);
    }
};

// The rows that a block works on, one after the other, of two tensors [rows, width]: number blockIdx.x, and each
// gridDim.x behind it. While one is used the next are on their way from memory to shared memory, for which no registers
// are needed. A thread copies what it reads itself, so no thread waits for another. Where there is no shared memory
// (wide rows, and vectors of one element, for which there is no such copy) a row is loaded when it is asked for.
constexpr int STAGES = 2;                                    // rows that are on their way: a tunable
constexpr int MOST_SHARED = 96 * 1024;                       // bytes for them; the smallest GPUs have 99 KB for a block

template <typename L>
class RowPairs {
    using T = typename L::T;
    using Part = Vector<T, L::N>;
    const T* const tensors[2];
    const unsigned rows, width;
    Part* const shared;
    int stage = 0;

    __device__ Part* place(int of_stage, int tensor) const {
        return shared + (of_stage * 2 + tensor) * L::VECTORS * blockDim.x + threadIdx.x;
    }

    __device__ const T* start(int tensor, unsigned row) const {
        return tensors[tensor] + static_cast<int64_t>(row) * width;
    }

    // Behind the last row there is nothing to copy, but the groups of copies are still one a row.
    __device__ void send(int of_stage, unsigned row) const {
        for (int tensor = 0; tensor < 2; ++tensor)
#pragma unroll
            for (int v = 0; v < L::VECTORS; ++v)
                copy_async(place(of_stage, tensor) + v * blockDim.x, start(tensor, row) + L::column(v),
                           row < rows && L::column(v) < width);
        end_of_copies();
    }

public:
    // `shared` has as many bytes as `shared_bytes` says, or is null.
    __device__ RowPairs(const T* a, const T* b, unsigned rows, int width, void* shared)
        : tensors{a, b}, rows(rows), width(width), shared(static_cast<Part*>(shared)) {
        if (L::N > 1 && shared)
            for (unsigned ahead = 0; ahead < STAGES; ++ahead)
                send(ahead, blockIdx.x + ahead * gridDim.x);
    }

    // The next row of each, which is number `row`; 0 behind its end.
    __device__ void take(typename L::Row& a, typename L::Row& b, unsigned row) {
        if (L::N == 1 || !shared) {
            L::load(a, start(0, row), width);
            L::load(b, start(1, row), width);
            return;
        }
        wait_for_copies<STAGES - 1>();
#pragma unroll
        for (int v = 0; v < L::VECTORS; ++v) {
            a[v] = place(stage, 0)[v * blockDim.x];
            b[v] = place(stage, 1)[v * blockDim.x];
        }
        send(stage, row + STAGES * gridDim.x);               // the place is this thread's own, and free again
        stage = stage + 1 == STAGES ? 0 : stage + 1;
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

// COUNT values over all threads of the block; every thread gets the results, in an order that never changes. `turn` is
// 0 and 1 by turns from one call to the next: a thread that is ahead writes where the others do not read any more, and
// one barrier a call is enough. (Each Op and COUNT has memory of its own, so that their turns are counted apart.)
template <typename Op, int COUNT>
__device__ void reduce_block(float (&values)[COUNT], int turn) {
    __shared__ float of_warp[2][COUNT][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (float& value : values)
        value = reduce_warp<Op>(value);
    if (warps == 1)                                          // a row is one warp's: no thread waits for another
        return;
    if (lane == 0)
        for (int i = 0; i < COUNT; ++i)
            of_warp[turn][i][warp] = values[i];
    __syncthreads();
    for (int i = 0; i < COUNT; ++i)
        values[i] = reduce_warp<Op>(lane < warps ? of_warp[turn][i][lane] : Op::neutral);
}

template <typename Op>
__device__ float reduce_block(float value, int turn) {
    float values[1] = {value};
    reduce_block<Op>(values, turn);
    return values[0];
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

// How much shared memory RowPairs gets in a block of `kernel`: 0 where the rows are too wide for it.
template <typename L, typename Kernel>
int shared_bytes(Kernel kernel, int threads) {
    const int bytes = L::N == 1 ? 0 : STAGES * 2 * threads * static_cast<int>(sizeof(typename L::Row));
    if (bytes > MOST_SHARED)
        return 0;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess)
        return bytes;
    cudaGetLastError();                                      // or the next call would find this error
    return 0;
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
