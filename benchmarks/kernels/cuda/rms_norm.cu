// RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, each row of x on its own.
//
// Forward: one block a row. Each thread reads its part of the row once, in 16-byte vectors, and keeps it in registers;
// the block adds up the squares (shuffles in a warp, then shared memory between warps), and each thread scales and
// writes its part. So memory sees one read and one write of x, which is all the time that the kernel needs.
//
// Backward: with n = x * rstd and g = dy * weight,
//     dx = rstd * (g - n * mean(g * n)),    dweight = sum over rows of dy * n.
// A fixed number of blocks share the rows; while a block works on one, its next are on the way (RowPairs). Each thread
// sums dweight for its own columns in registers and writes it once; the blocks' sums are added afterwards in a fixed
// order, so that each run gives the same bits; with atomics the order, and so the bits, would change.
#include "rows.cuh"

namespace {

template <typename L>
__global__ void __launch_bounds__(MAX_THREADS)
forward(const typename L::T* __restrict__ x, const typename L::T* __restrict__ weight, typename L::T* __restrict__ y,
        float* __restrict__ rstds, int width, float eps) {
    const int64_t start = static_cast<int64_t>(blockIdx.x) * width;
    typename L::Row x_row, w_row;
    L::load(x_row, x + start, width);
    if (L::KEEPS_WEIGHTS)                                    // on its way during the sum, where registers are left
        L::load(w_row, weight, width);
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v)
#pragma unroll
        for (int i = 0; i < L::N; ++i)
            squares += x_row[v][i] * x_row[v][i];
    const float rstd = rsqrtf(reduce_block<Sum>(squares, 0) / width + eps);
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v) {
        const int column = L::column(v);
        if (column >= width)
            break;
        Vector<typename L::T, L::N> w, out;
        if (L::KEEPS_WEIGHTS)
            w = w_row[v];
        else
            w.read(weight + column);
        float values[L::N];
#pragma unroll
        for (int i = 0; i < L::N; ++i)
            values[i] = x_row[v][i] * rstd * w[i];
        out.set(values);
        out.write(y + start + column);
    }
    if (threadIdx.x == 0)
        rstds[blockIdx.x] = rstd;
}

template <typename L>
__global__ void __launch_bounds__(MAX_THREADS)
backward(const typename L::T* __restrict__ x, const typename L::T* __restrict__ weight, const float* __restrict__ rstds,
         const typename L::T* __restrict__ dy, typename L::T* __restrict__ dx, float* __restrict__ sums,
         unsigned rows, int width, int room) {
    float dweight_row[L::VECTORS][L::N] = {};
    RowPairs<L> pairs(x, dy, rows, width, room);
    typename L::Row w;
    if (L::KEEPS_WEIGHTS)
#pragma unroll
        for (int v = 0; v < L::VECTORS; ++v)
            w[v] = L::read(v, weight, width);
    const float share = 1.0f / width;
    const int64_t step = static_cast<int64_t>(gridDim.x) * width;
    int64_t start = static_cast<int64_t>(blockIdx.x) * width;
    // One lane's: of wide rows the compiler keeps it in a register for the whole warp else (see layer_norm_gelu.cu).
    const bool first = threadIdx.x % 32 == 0;
    float next_rstd = first ? rstds[blockIdx.x] : 0.0f;
    int turn = 0;
    for (unsigned row = blockIdx.x; row < rows; row += gridDim.x, start += step, turn ^= 1) {
        typename L::Row x_row, dy_row;
        pairs.take(x_row, dy_row, row, start);
        const float rstd = __shfl_sync(~0u, next_rstd, 0);
        if (first)
            next_rstd = rstds[min(row + gridDim.x, rows - 1)];
        float dot = 0.0f;
#pragma unroll
        for (int v = 0; v < L::VECTORS; ++v) {               // behind the row all is 0
            if (!L::KEEPS_WEIGHTS)
                w[v] = L::read(v, weight, width);
#pragma unroll
            for (int i = 0; i < L::N; ++i) {
                const float term = dy_row[v][i] * (x_row[v][i] * rstd);
                dweight_row[v][i] += term;
                dot += term * w[v][i];
            }
        }
        const float along = reduce_block<Sum>(dot, turn) * share * rstd * rstd;
#pragma unroll
        for (int v = 0; v < L::VECTORS; ++v) {
            const int column = L::column(v);
            if (column >= width)
                break;
            if (!L::KEEPS_WEIGHTS)
                w[v] = L::read(v, weight, width);
            float values[L::N];
#pragma unroll
            for (int i = 0; i < L::N; ++i)
                values[i] = dy_row[v][i] * w[v][i] * rstd - x_row[v][i] * along;
            Vector<typename L::T, L::N> out;
            out.set(values);
            out.write(dx + start + column);
        }
    }
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v)
        if (L::column(v) < width)
            write_floats(sums + static_cast<int64_t>(blockIdx.x) * width + L::column(v), dweight_row[v]);
}

}  // namespace

void rms_norm_forward(Float type, const void* x, const void* weight, void* y, float* rstd, int64_t rows, int width,
                      float eps, cudaStream_t stream) {
    with_layout<FEW_ITEMS>(type, width, aligned(x, weight, y), [&](auto layout, int threads) {
        using L = decltype(layout);
        using T = typename L::T;
        forward<L><<<rows, threads, 0, stream>>>(static_cast<const T*>(x), static_cast<const T*>(weight),
                                                 static_cast<T*>(y), rstd, width, eps);
    });
}

void rms_norm_backward(Float type, const void* x, const void* weight, const float* rstd, const void* dy, void* dx,
                       void* dweight, float* sums, int64_t rows, int width, int blocks, cudaStream_t stream) {
    with_layout<FEW_ITEMS>(type, width, aligned(x, weight, dy, dx), [&](auto layout, int threads) {
        using L = decltype(layout);
        using T = typename L::T;
        const int room = shared_bytes<L>(backward<L>, threads);
        backward<L><<<blocks, threads, room, stream>>>(
            static_cast<const T*>(x), static_cast<const T*>(weight), rstd, static_cast<const T*>(dy),
            static_cast<T*>(dx), sums, rows, width, room);
        start_add_up(sums, static_cast<T*>(dweight), blocks, width, stream);
    });
}
