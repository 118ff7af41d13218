// SGLang's GEMV of one token over memory of the caller's, on a stream of the caller's.
//
// `released_kernel.h` includes its file and says, in its own words, which instance of it is KERNEL. What it checks, its
// grid and its launch are its own; only where its stream comes from is not.

#include "released_kernel.h"

#include <cstdio>
#include <exception>

static thread_local void * current;

extern "C" {

// What its launch asks for the stream.
TVMFFIStreamHandle TVMFFIEnvGetStream(int32_t, int32_t) { return current; }

// y [1, N] = x [1, K] W^T, W [N, K], all bf16. 0 if it was launched.
int lab_gemv(int device, void * stream, int64_t N, int64_t K, void * W, void * x, void * y) {
    int64_t of_W[] = { N, K }, of_x[] = { 1, K }, of_y[] = { 1, N }, by_K[] = { K, 1 }, by_N[] = { N, 1 };
    auto tensor = [&](void * data, int64_t * shape, int64_t * strides) {
        return DLTensor{ data, { kDLCUDA, device }, 2, { kDLBfloat, 16, 1 }, shape, strides, 0 };
    };
    DLTensor a = tensor(x, of_x, by_K), b = tensor(W, of_W, by_K), c = tensor(y, of_y, by_N);
    current = stream;
    try {
        KERNEL(tvm::ffi::TensorView(&a), tvm::ffi::TensorView(&b), tvm::ffi::TensorView(&c));
    } catch (const std::exception & problem) {
        std::fprintf(stderr, "%s\n", problem.what());
        return 1;
    }
    return 0;
}
}
