// llama.cpp's CUDA backend over memory that somebody else owns, on a stream that somebody else gives.
//
// Each function that makes work returns a ggml graph, to be launched as often as one likes. The backend runs it as it
// does in its engine, with what it fuses; no kernel is changed. Only where its streams come from is.

#include "ggml-alloc.h"
#include "ggml-backend-impl.h"
#include "ggml-cuda.h"
#include "ggml-cuda/common.cuh"

#include <strings.h>

struct work {
    int            device;
    ggml_context * context;
    ggml_cgraph *  graph;
    ggml_backend_buffer_t between;  // memory of what is computed on the way; null if there is none
};

static ggml_backend_t backend(int device) {
    static ggml_backend_t opened[GGML_CUDA_MAX_DEVICES] = {};
    if (opened[device] == nullptr) {
        opened[device] = ggml_backend_cuda_init(device);  // kept for good: it would destroy the streams it was given
    }
    return opened[device];
}

static ggml_type type_of(const char * format) {
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const char * name = ggml_type_name((ggml_type) i);
        if (name != nullptr && strcasecmp(name, format) == 0) {
            return (ggml_type) i;
        }
    }
    GGML_ABORT("no type %s", format);
}

// Memory of the caller's as that of a tensor. The backend asks what buffer it is in, and never for its bounds.
static ggml_tensor * placed(int device, ggml_tensor * tensor, void * data) {
    static ggml_backend_buffer_t lent[GGML_CUDA_MAX_DEVICES] = {};
    if (lent[device] == nullptr) {
        lent[device] = ggml_backend_buft_alloc_buffer(ggml_backend_cuda_buffer_type(device), 1);
        ggml_backend_buffer_set_usage(lent[device], GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    tensor->data   = data;
    tensor->buffer = lent[device];
    return tensor;
}

static work * begun(int device) {
    backend(device);
    const size_t room = 128 * ggml_tensor_overhead() + ggml_graph_overhead();
    ggml_context * context = ggml_init({ room, nullptr, /*no_alloc =*/ true });
    return new work{ device, context, ggml_new_graph(context), nullptr };
}

static work * finished(work * w, ggml_tensor * y) {
    ggml_build_forward_expand(w->graph, y);
    w->between = ggml_backend_alloc_ctx_tensors_from_buft(w->context, ggml_backend_cuda_buffer_type(w->device));
    return w;
}

extern "C" {

// y [N, rows] = x [N, K] W^T, W [rows, K] in blocks; x and y fp32.
work * lab_product(int device, const char * format, int64_t rows, int64_t K, int64_t N, void * W, void * x, void * y) {
    work * w = begun(device);
    ggml_context * c = w->context;
    ggml_tensor * a = placed(device, ggml_new_tensor_2d(c, type_of(format), K, rows), W);
    ggml_tensor * b = placed(device, ggml_new_tensor_2d(c, GGML_TYPE_F32, K, N), x);
    return finished(w, placed(device, ggml_mul_mat(c, a, b), y));
}

// y [N, hidden] of routed experts, in the order in which the engine's graphs have it: gate, up, SiLU, down, weighted sum.
// gate, up [E, width, hidden], down [E, hidden, width] in blocks; x [N, hidden], weights [N, top_k], y fp32; ids int32.
work * lab_routed(int device, const char * format, int64_t E, int64_t top_k, int64_t hidden, int64_t width, int64_t N,
                  void * gate, void * up, void * down, void * x, void * ids, void * weights, void * y) {
    work * w = begun(device);
    ggml_context * c = w->context;
    const ggml_type type = type_of(format);
    ggml_tensor * g = placed(device, ggml_new_tensor_3d(c, type, hidden, width, E), gate);
    ggml_tensor * u = placed(device, ggml_new_tensor_3d(c, type, hidden, width, E), up);
    ggml_tensor * d = placed(device, ggml_new_tensor_3d(c, type, width, hidden, E), down);
    ggml_tensor * v = placed(device, ggml_new_tensor_3d(c, GGML_TYPE_F32, hidden, 1, N), x);
    ggml_tensor * i = placed(device, ggml_new_tensor_2d(c, GGML_TYPE_I32, top_k, N), ids);
    ggml_tensor * s = placed(device, ggml_new_tensor_3d(c, GGML_TYPE_F32, 1, top_k, N), weights);

    ggml_tensor * middle = ggml_swiglu_split(c, ggml_mul_mat_id(c, g, v, i), ggml_mul_mat_id(c, u, v, i));
    ggml_tensor * parts  = ggml_mul(c, ggml_mul_mat_id(c, d, middle, i), s);
    ggml_build_forward_expand(w->graph, parts);
    ggml_tensor * of_slot[16];  // the caller has looked: no more are summed in one kernel
    for (int64_t k = 0; k < top_k; k++) {
        of_slot[k] = ggml_view_2d(c, parts, hidden, N, parts->nb[2], k * parts->nb[1]);
        ggml_build_forward_expand(w->graph, of_slot[k]);
    }
    ggml_tensor * sum = of_slot[0];
    for (int64_t k = 1; k < top_k; k++) {
        sum = ggml_add(c, sum, of_slot[k]);
    }
    return finished(w, placed(device, sum, y));
}

// 0 if it was launched. The first launch on a device allocates; later ones, and captured ones, find what it left.
int lab_launch(work * w, cudaStream_t stream) {
    ggml_backend_t one = backend(w->device);
    auto * c = (ggml_backend_cuda_context *) one->context;
    stream = stream != nullptr ? stream : cudaStreamLegacy;  // it takes null for "none yet"
    cublasHandle_t cublas = c->cublas_handles[w->device][0];
    if (cublas != nullptr && c->streams[w->device][0] != stream) {
        cublasSetStream(cublas, stream);  // which takes its workspace away
        cublasSetWorkspace(cublas, c->cublas_workspaces[w->device][0], c->cublas_workspace_sizes[w->device]);
    }
    c->streams[w->device][0] = stream;
    return (int) one->iface.graph_compute(one, w->graph);
}

void lab_free(work * w) {
    ggml_backend_buffer_free(w->between);
    ggml_free(w->context);
    delete w;
}
}
