// LayerNorm, then GELU in its tanh form: y = gelu(n * weight + bias) with n = (x - mean) * rstd, each row on its own.
//
// Forward: one block a row, as in rms_norm.cu: one read of x into registers, two sums over the block, one write of y.
// The second sum is of squares around the mean: mean(x^2) - mean(x)^2 would cancel where the mean is large.
//
// Backward: with h = n * weight + bias, dh = dy * gelu'(h) and g = dh * weight,
//     dx = rstd * (g - mean(g) - n * mean(g * n)),    dweight = sum over rows of dh * n,    dbias = sum of dh.
// h is computed anew from x: to store it would cost a write and a read of a whole tensor. Who sums what, and in which
// order: see rms_norm.cu.
#include "rows.cuh"

namespace {

// 0.5 (1 + tanh z) is sigmoid(2 z), and 2 z is SLOPE h + CUBIC h^3.
constexpr float SLOPE = 1.5957691216057308f;                 // 2 sqrt(2 / pi)
constexpr float CUBIC = 0.044715f * SLOPE;

// -2 z log2 e, from h and its square.
__device__ float gelu_exponent(float h, float square) {
    return h * (-LOG2_E * SLOPE + -LOG2_E * CUBIC * square);
}

__device__ float gelu(float h) {
    return h * reciprocal_approximate(1.0f + exp2_approximate(gelu_exponent(h, h * h)));
}

// GELU's slope at N places. Step by step for all of them: one place's exponential, and then its reciprocal, is on its
// way while the others' are asked for.
template <int N>
__device__ void gelu_slopes(float (&to)[N], const float (&h)[N]) {
    float gate[N], square[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        square[i] = h[i] * h[i];
        gate[i] = gelu_exponent(h[i], square[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
        gate[i] = exp2_approximate(gate[i]);
#pragma unroll
    for (int i = 0; i < N; ++i)
        gate[i] = reciprocal_approximate(1.0f + gate[i]);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float slope = h[i] * (gate[i] - gate[i] * gate[i]);        // of a large h 0, before a factor is infinite
        to[i] = gate[i] + slope * (SLOPE + 3.0f * CUBIC * square[i]);
    }
}

template <typename L>
__global__ void __launch_bounds__(MAX_THREADS)
forward(const typename L::T* __restrict__ x, const typename L::T* __restrict__ weight,
        const typename L::T* __restrict__ bias, typename L::T* __restrict__ y, float* __restrict__ means,
        float* __restrict__ rstds, int width, float eps) {
    const int64_t start = static_cast<int64_t>(blockIdx.x) * width;
    typename L::Row x_row;
    L::template load<true>(x_row, x + start, width);        // streamed: faster at 64 rows, at more the same
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v)
#pragma unroll
        for (int i = 0; i < L::N; ++i)
            sum += x_row[v][i];
    const float mean = reduce_block<Sum>(sum, 0) / width;
    float centred[L::VECTORS][L::N];
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v)
#pragma unroll
        for (int i = 0; i < L::N; ++i) {
            centred[v][i] = L::column(v) < width ? x_row[v][i] - mean : 0.0f;
            squares += centred[v][i] * centred[v][i];
        }
    const float rstd = rsqrtf(reduce_block<Sum>(squares, 1) / width + eps);
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v) {
        const int column = L::column(v);
        if (column >= width)
            break;
        Vector<typename L::T, L::N> w, b, out;
        w.read(weight + column);
        b.read(bias + column);
        float values[L::N];
#pragma unroll
        for (int i = 0; i < L::N; ++i)
            values[i] = gelu(centred[v][i] * rstd * w[i] + b[i]);
        out.set(values);
        out.write(y + start + column);
    }
    if (threadIdx.x == 0) {
        means[blockIdx.x] = mean;
        rstds[blockIdx.x] = rstd;
    }
}

template <typename L>
__global__ void __launch_bounds__(MAX_THREADS)
backward(const typename L::T* __restrict__ x, const typename L::T* __restrict__ weight,
         const typename L::T* __restrict__ bias, const float* __restrict__ means, const float* __restrict__ rstds,
         const typename L::T* __restrict__ dy, typename L::T* __restrict__ dx, float* __restrict__ sums, unsigned rows,
         int width, int room) {
    constexpr bool KEEP = L::KEEPS_WEIGHTS;                  // g in registers, too; wide rows repeat it
    float dweight_row[L::VECTORS][L::N] = {}, dbias_row[L::VECTORS][L::N] = {};
    RowPairs<L> pairs(x, dy, rows, width, room);
    typename L::Row w, b;
    if (KEEP)
#pragma unroll
        for (int v = 0; v < L::VECTORS; ++v) {
            w[v] = L::read(v, weight, width);
            b[v] = L::read(v, bias, width);
        }
    const float share = 1.0f / width;
    const int64_t step = static_cast<int64_t>(gridDim.x) * width;
    int64_t start = static_cast<int64_t>(blockIdx.x) * width;
    // Even lanes load the mean, odd ones rstd, for the next row: were the address the same for all lanes, the compiler
    // would keep the value in a register for the whole warp, and getting it there waits for memory at once.
    const float* const statistics = threadIdx.x % 2 ? rstds : means;
    float next = statistics[blockIdx.x];
    int turn = 0;
    for (unsigned row = blockIdx.x; row < rows; row += gridDim.x, start += step, turn ^= 1) {
        typename L::Row x_row, dy_row;
        pairs.take(x_row, dy_row, row, start);
        const float mean = __shfl_sync(~0u, next, 0), rstd = __shfl_sync(~0u, next, 1);
        next = statistics[min(row + gridDim.x, rows - 1)];
        float g[L::VECTORS][L::N], totals[2] = {};
#pragma unroll
        for (int v = 0; v < L::VECTORS; ++v) {               // behind the row dy, and so all sums, are 0
            if (!KEEP) {
                w[v] = L::read(v, weight, width);
                b[v] = L::read(v, bias, width);
            }
            float normal[L::N], h[L::N], dh[L::N];
#pragma unroll
            for (int i = 0; i < L::N; ++i) {
                normal[i] = (x_row[v][i] - mean) * rstd;
                h[i] = normal[i] * w[v][i] + b[v][i];
            }
            gelu_slopes(dh, h);
#pragma unroll
            for (int i = 0; i < L::N; ++i) {
                dh[i] *= dy_row[v][i];
                g[v][i] = dh[i] * w[v][i];
                dweight_row[v][i] += dh[i] * normal[i];
                dbias_row[v][i] += dh[i];
                totals[0] += g[v][i];
                totals[1] += g[v][i] * normal[i];
            }
        }
        add_up_block(totals[0], totals[1], turn);
        // rstd * mean(g) + normal * rstd * mean(g * n), as offset + x * along
        const float along = totals[1] * share * rstd * rstd, offset = totals[0] * share * rstd - mean * along;
#pragma unroll
        for (int v = 0; v < L::VECTORS; ++v) {
            const int column = L::column(v);
            if (column >= width)
                break;
            if (!KEEP) {
                x_row[v].template read<true>(x + start + column);
                dy_row[v].template read<true>(dy + start + column);
                w[v] = L::read(v, weight, width);
                b[v] = L::read(v, bias, width);
                float h[L::N];
#pragma unroll
                for (int i = 0; i < L::N; ++i)
                    h[i] = (x_row[v][i] - mean) * rstd * w[v][i] + b[v][i];
                gelu_slopes(g[v], h);
#pragma unroll
                for (int i = 0; i < L::N; ++i)
                    g[v][i] *= dy_row[v][i] * w[v][i];
            }
            float values[L::N];
#pragma unroll
            for (int i = 0; i < L::N; ++i)
                values[i] = rstd * g[v][i] - (x_row[v][i] * along + offset);
            Vector<typename L::T, L::N> out;
            out.set(values);
            out.write(dx + start + column);
        }
    }
#pragma unroll
    for (int v = 0; v < L::VECTORS; ++v)
        if (L::column(v) < width) {
            float* const here = sums + 2 * static_cast<int64_t>(blockIdx.x) * width + L::column(v);
            write_floats(here, dweight_row[v]);
            write_floats(here + width, dbias_row[v]);
        }
}

}  // namespace

void layer_norm_gelu_forward(Float type, const void* x, const void* weight, const void* bias, void* y, float* mean,
                             float* rstd, int64_t rows, int width, float eps, cudaStream_t stream) {
    with_layout<MANY_ITEMS>(type, width, aligned(x, weight, bias, y), [&](auto layout, int threads) {
        using L = decltype(layout);
        using T = typename L::T;
        forward<L><<<rows, threads, 0, stream>>>(static_cast<const T*>(x), static_cast<const T*>(weight),
                                                 static_cast<const T*>(bias), static_cast<T*>(y), mean, rstd, width,
                                                 eps);
    });
}

void layer_norm_gelu_backward(Float type, const void* x, const void* weight, const void* bias, const float* mean,
                              const float* rstd, const void* dy, void* dx, void* dvectors, float* sums, int64_t rows,
                              int width, int blocks, cudaStream_t stream) {
    with_layout<FEW_ITEMS>(type, width, aligned(x, weight, bias, dy, dx), [&](auto layout, int threads) {
        using L = decltype(layout);
        using T = typename L::T;
        const int room = shared_bytes<L>(backward<L>, threads);
        backward<L><<<blocks, threads, room, stream>>>(
            static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<const T*>(bias), mean, rstd,
            static_cast<const T*>(dy), static_cast<T*>(dx), sums, rows, width, room);
        start_add_up(sums, static_cast<T*>(dvectors), blocks, 2 * width, stream);
    });
}
