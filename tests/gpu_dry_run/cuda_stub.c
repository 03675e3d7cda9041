/* GPU executor dry run: a CUDA stack that computes nothing.
 *
 * It lets a CUDA build of MXNet be imported and run on a machine that has no
 * GPU: graphs are built for the GPU, device memory is handed out and counted,
 * and kernel launches and library calls are recorded but not carried out.
 * It shows crashes, memory and call sequences. It says nothing about numbers
 * (device memory is never computed) or speed.
 *
 * Only the functions that must hand a value back are written here;
 * gen_stub.py writes the rest. A function that neither of them knows reports
 * an error when it is called: it never answers garbage.
 *
 *   CUDASTUB_TRACE=FILE   write one line per recorded call
 *   CUDASTUB_DEVICES=N    how many GPUs there are (default 1, at most 8)
 *   CUDASTUB_MEM_MB=N     size of the memory of each (default 32768)
 *   CUDASTUB_SM=MN        compute capability (default 70)
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define OK 0
#define PAGE 4096
typedef void *H; /* any handle or pointer that is only passed through */

/* ---- bookkeeping ------------------------------------------------------ */

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static FILE *trace_file;
#define MOST_DEVICES 8
static size_t total, used[MOST_DEVICES], peak[MOST_DEVICES];
static int sm, devices;
static __thread int device; /* the one that this thread has chosen */

__attribute__((constructor)) static void setup(void) {
  const char *s = getenv("CUDASTUB_TRACE");
  if (s) trace_file = fopen(s, "w");
  s = getenv("CUDASTUB_MEM_MB");
  total = (s ? strtoull(s, 0, 10) : 32768) << 20;
  s = getenv("CUDASTUB_SM");
  sm = s ? atoi(s) : 70;
  s = getenv("CUDASTUB_DEVICES");
  devices = s ? atoi(s) : 1;
  if (devices > MOST_DEVICES) devices = MOST_DEVICES;
}

void cudastub_trace(const char *fmt, ...) {
  if (!trace_file) return;
  va_list ap;
  va_start(ap, fmt);
  pthread_mutex_lock(&mu);
  vfprintf(trace_file, fmt, ap);
  fputc('\n', trace_file);
  fflush(trace_file);
  pthread_mutex_unlock(&mu);
  va_end(ap);
}

/* For ctypes: bytes that a GPU holds now, the most it ever held, and a way to start over; and the
 * size of the memory of each. */
size_t cudastub_used(int dev) { return used[dev]; }
size_t cudastub_peak(int dev) { return peak[dev]; }
void cudastub_reset_peak(void) { memcpy(peak, used, sizeof peak); }
void cudastub_resize(size_t mb) { total = mb << 20; }

static int handle(H *out) {
  static uintptr_t next = 0x1000;
  *out = (H)__sync_add_and_fetch(&next, 16);
  return OK;
}

/* ---- device and memory ------------------------------------------------ */

int cudaGetDeviceCount(int *n) { *n = devices; return OK; }
int cudaGetDevice(int *dev) { *dev = device; return OK; }
int cudaSetDevice(int dev) {
  if (dev < 0 || dev >= devices) return 101; /* invalid device ordinal */
  device = dev;
  return OK;
}
int cudaDriverGetVersion(int *v) { *v = 11020; return OK; }
int cuDeviceGet(int *dev, int ordinal) { *dev = ordinal; return OK; }
int cudaDeviceCanAccessPeer(int *yes) { *yes = 0; return OK; }
const char *cudaGetErrorString(int e) { return e == 2 ? "out of memory" : "not in the CUDA stub"; }
const char *cudaGetErrorName(int e) {
  return e == 2 ? "cudaErrorMemoryAllocation" : "cudaStubError";
}
const char *cudnnGetErrorString(int e) { return "not in the CUDA stub"; }
const char *nvrtcGetErrorString(int e) { return "not in the CUDA stub"; }
int cuGetErrorString(int e, const char **s) { *s = "not in the CUDA stub"; return OK; }

int cudaDeviceGetAttribute(int *v, int attr, int dev) {
  switch (attr) {
    case 1: *v = 1024; break;                                    /* threads per block */
    case 2: case 3: *v = 1024; break;                            /* block dim x, y */
    case 4: *v = 64; break;                                      /* block dim z */
    case 5: *v = 0x7fffffff; break;                              /* grid dim x */
    case 6: case 7: *v = 65535; break;                           /* grid dim y, z */
    case 8: case 97: *v = 48 << 10; break;                       /* shared memory per block */
    case 10: *v = 32; break;                                     /* warp size */
    case 16: *v = 80; break;                                     /* multiprocessors */
    case 39: *v = 2048; break;                                   /* threads per multiprocessor */
    case 75: *v = sm / 10; break;
    case 76: *v = sm % 10; break;
    default: *v = 0;
  }
  return OK;
}

int cudaGetDeviceProperties(char *p, int dev) { /* cudaDeviceProp of CUDA 11 */
  memset(p, 0, 640);
  strcpy(p, "CUDA stub");
  *(size_t *)(p + 288) = total;
  *(size_t *)(p + 296) = 48 << 10;        /* sharedMemPerBlock */
  int *q = (int *)(p + 304);
  q[0] = 65536; q[1] = 32;                /* regsPerBlock, warpSize */
  q[4] = 1024;                            /* maxThreadsPerBlock @320 */
  q[5] = q[6] = 1024; q[7] = 64;          /* maxThreadsDim */
  q[8] = 0x7fffffff; q[9] = q[10] = 65535; /* maxGridSize */
  q[14] = sm / 10; q[15] = sm % 10;       /* major @360, minor */
  q[21] = 80;                             /* multiProcessorCount @388 */
  return OK;
}

typedef struct { size_t size; int device; } Block;

int cudaMalloc(void **out, size_t n) {
  pthread_mutex_lock(&mu);
  int fits = used[device] + n <= total;
  if (fits && (used[device] += n) > peak[device]) peak[device] = used[device];
  pthread_mutex_unlock(&mu);
  cudastub_trace("cudaMalloc %zu%s", n, fits ? "" : " (out of memory)");
  if (!fits) return 2;
  /* Address space that takes no memory until written, with size and GPU in front. */
  char *p = mmap(0, n + PAGE, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return 2;
  *(Block *)p = (Block){n, device};
  *out = p + PAGE;
  return OK;
}

int cudaFree(char *p) {
  if (!p) return OK;
  Block b = *(Block *)(p - PAGE);
  munmap(p - PAGE, b.size + PAGE);
  pthread_mutex_lock(&mu);
  used[b.device] -= b.size;
  pthread_mutex_unlock(&mu);
  cudastub_trace("cudaFree %zu", b.size);
  return OK;
}

int cudaMemGetInfo(size_t *f, size_t *t) { *f = total - used[device]; *t = total; return OK; }
int cudaHostAlloc(void **out, size_t n) { return (*out = malloc(n)) ? OK : 2; }
int cudaFreeHost(void *p) { free(p); return OK; }

static int copy(void *dst, const void *src, size_t n, int kind) {
  if (kind < 3) memcpy(dst, src, n); /* only copies that touch the host are made */
  return OK;
}
int cudaMemcpy(void *d, const void *s, size_t n, int kind) { return copy(d, s, n, kind); }
int cudaMemcpyAsync(void *d, const void *s, size_t n, int kind) { return copy(d, s, n, kind); }
int cudaMemcpy2DAsync(char *d, size_t dpitch, const char *s, size_t spitch, size_t width,
                      size_t height, int kind, H stream) {
  for (size_t i = 0; i < height; ++i) copy(d + i * dpitch, s + i * spitch, width, kind);
  return OK;
}

/* ---- kernels ---------------------------------------------------------- */

#define NSLOT (1 << 20)
static struct { const void *fun; const char *name; } slots[NSLOT];
static size_t slot(const void *fun) {
  size_t i = ((uintptr_t)fun >> 4) % NSLOT;
  while (slots[i].fun && slots[i].fun != fun) i = (i + 1) % NSLOT;
  return i;
}

H *__cudaRegisterFatBinary(void *bin) { static H h; return &h; }
void __cudaRegisterFatBinaryEnd(H *h) {}
void __cudaUnregisterFatBinary(H *h) {}
void __cudaRegisterVar(H *h) {}
char __cudaInitModule(H *h) { return 1; }
void __cudaRegisterFunction(H *h, const char *fun, char *dev, const char *name) {
  size_t i = slot(fun);
  slots[i].fun = fun;
  slots[i].name = name;
}

typedef struct { unsigned x, y, z; } dim3;
static __thread struct { dim3 grid, block; size_t shared; H stream; } call;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, H stream) {
  call.grid = grid; call.block = block; call.shared = shared; call.stream = stream;
  return OK;
}
int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, H *stream) {
  *grid = call.grid; *block = call.block; *shared = call.shared; *stream = call.stream;
  return OK;
}
int cudaLaunchKernel(const void *fun, dim3 grid, dim3 block, void **args, size_t shared, H stream) {
  const char *name = slots[slot(fun)].name;
  cudastub_trace("kernel %s", name ? name : "?");
  return OK;
}
int cudaFuncGetAttributes(int *a, const void *fun) {
  memset(a, 0, 56);
  a[6] = 1024; a[7] = 32; /* maxThreadsPerBlock, numRegs */
  a[8] = a[9] = sm;       /* ptx and binary version */
  return OK;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n) { *n = 2; return OK; }

int nvrtcCreateProgram(H *prog, const char *src, const char *name) { return handle(prog); }
int nvrtcGetPTXSize(H prog, size_t *n) { *n = 1; return OK; }
int nvrtcGetPTX(H prog, char *s) { *s = 0; return OK; }
int nvrtcGetProgramLogSize(H prog, size_t *n) { *n = 1; return OK; }
int nvrtcGetProgramLog(H prog, char *s) { *s = 0; return OK; }
int nvrtcGetLoweredName(H prog, const char *name, const char **out) { *out = name; return OK; }
int cuDevicePrimaryCtxRetain(H *c) { return handle(c); }
int cuModuleLoadData(H *m) { return handle(m); }
int cuModuleLoadDataEx(H *m) { return handle(m); }
int cuModuleGetFunction(const char **fun, H mod, const char *name) {
  *fun = strdup(name);
  return OK;
}
int cuLaunchKernel(const char *fun) { cudastub_trace("kernel %s", fun); return OK; }

/* ---- streams, handles, descriptors ------------------------------------ */

#define CREATE(name) int name(H *out) { return handle(out); }
CREATE(cudaStreamCreate) CREATE(cudaEventCreateWithFlags)
CREATE(cublasCreate_v2) CREATE(cusolverDnCreate) CREATE(curandCreateGenerator)
CREATE(cudnnCreate) CREATE(cudnnCreateFilterDescriptor)
CREATE(cudnnCreateConvolutionDescriptor) CREATE(cudnnCreatePoolingDescriptor)
CREATE(cudnnCreateActivationDescriptor) CREATE(cudnnCreateDropoutDescriptor)
CREATE(cudnnCreateRNNDataDescriptor) CREATE(cudnnCreateSpatialTransformerDescriptor)
int cublasGetMathMode(H h, int *mode) { *mode = 0; return OK; }

/* ---- cuDNN: sizes and choices ----------------------------------------- */

size_t cudnnGetVersion(void) { return 8101; }
int cudnnDropoutGetStatesSize(H h, size_t *n) { *n = 1 << 20; return OK; }

typedef struct {
  int algo, status; float time; size_t memory; int determinism, math, reserved[3];
} Perf;
#define CONV(which)                                                                          \
  int cudnnGetConvolution##which##WorkspaceSize(H h, H a, H b, H c, H d, int alg, size_t *n) \
  { *n = 0; return OK; }                                                                     \
  int cudnnGetConvolution##which##AlgorithmMaxCount(H h, int *n) { *n = 1; return OK; }      \
  int cudnnGetConvolution##which##Algorithm_v7(H h, H a, H b, H c, H d, int want, int *got,  \
                                               Perf *perf) {                                 \
    memset(perf, 0, sizeof *perf);                                                           \
    perf->algo = perf->determinism = 1;                                                      \
    *got = 1;                                                                                \
    return OK;                                                                               \
  }                                                                                          \
  int cudnnFindConvolution##which##Algorithm(H h, H a, H b, H c, H d, int want, int *got,    \
                                             Perf *perf)                                     \
  { return cudnnGetConvolution##which##Algorithm_v7(h, a, b, c, d, want, got, perf); }
CONV(Forward) CONV(BackwardData) CONV(BackwardFilter)

int cudnnBatchNormalizationForwardTraining(H h, int mode, H a, H b, H xd, H x, H yd, H y, H bnd,
                                           H gamma, H beta, double factor, H mean, H var,
                                           double eps, H save_mean, H save_var) {
  cudastub_trace("cudnnBatchNormalizationForwardTraining factor=%g mean=%p thread=%lx",
                 factor, mean, (unsigned long)pthread_self());
  return OK;
}

/* ---- cuDNN: dropout and recurrent networks -----------------------------
 *
 * MXNet checks the sizes that cuDNN reports: the reserve of a dropout against
 * its mask (src/operator/nn/dropout-inl.h), the parameters of an RNN against
 * its own count (src/operator/rnn-inl.h, Init). So these descriptors remember
 * what was set. Forward and backward themselves are recorded by what
 * gen_stub.py writes.
 */

typedef struct { int dtype, ndim, dim[8]; } Tensor;
typedef struct { int hidden, layers, directions, gates, projection; } Rnn;
static const int gates_of_mode[] = {1, 1, 4, 3};      /* relu, tanh, LSTM, GRU */
static const size_t bytes_of_dtype[] = {4, 8, 2};     /* float, double, half */

int cudnnCreateTensorDescriptor(Tensor **out) {
  return (*out = calloc(1, sizeof **out)) ? OK : 2;
}
int cudnnDestroyTensorDescriptor(Tensor *t) { free(t); return OK; }
int cudnnSetTensorNdDescriptor(Tensor *t, int dtype, int n, const int *dim, const int *stride) {
  t->dtype = dtype;
  t->ndim = n < 8 ? n : 8;
  memcpy(t->dim, dim, t->ndim * sizeof *dim);
  return OK;
}

/* What cuDNN keeps is its secret: the least it can be is one bit an element. */
int cudnnDropoutGetReserveSpaceSize(Tensor *x, size_t *n) {
  size_t count = 1;
  for (int i = 0; i < x->ndim; ++i) count *= x->dim[i];
  *n = (count + 7) / 8;
  return OK;
}

int cudnnCreateRNNDescriptor(Rnn **out) { return (*out = calloc(1, sizeof **out)) ? OK : 2; }
int cudnnDestroyRNNDescriptor(Rnn *r) { free(r); return OK; }
int cudnnSetRNNDescriptor_v6(H h, Rnn *r, int hidden, int layers, H dropout, int input_mode,
                             int direction, int mode, int algo, int precision) {
  r->hidden = r->projection = hidden;
  r->layers = layers;
  r->directions = direction ? 2 : 1;
  r->gates = gates_of_mode[mode & 3];
  return OK;
}
int cudnnSetRNNProjectionLayers(H h, Rnn *r, int recurrent, int output) {
  r->projection = recurrent;
  return OK;
}

/* Two weight matrices and two bias vectors a gate, and the projection if there is one. */
int cudnnGetRNNParamsSize(H h, Rnn *r, Tensor *x, size_t *n, int dtype) {
  size_t count = 0, out = r->projection;
  for (int layer = 0; layer < r->layers; ++layer) {
    size_t in = layer ? out * r->directions : (size_t)x->dim[1];
    size_t one = r->gates * (size_t)r->hidden * (in + out + 2);
    if (r->projection != r->hidden) one += out * r->hidden;
    count += one * r->directions;
  }
  *n = count * bytes_of_dtype[dtype];
  return OK;
}

/* What is kept for backward is cuDNN's secret. A developer of it once gave it for an LSTM and a GRU
 * (see memonger/costs/held.py); of the others this is the gate and the output. The workspace counts as 0,
 * as it does for convolutions. */
int cudnnGetRNNTrainingReserveSize(H h, Rnn *r, int steps, Tensor **x, size_t *n) {
  size_t kept = r->gates == 1 ? 2 : r->gates == 3 ? 7 : 6; /* of each layer, one less in all */
  *n = (size_t)steps * x[0]->dim[0] * r->hidden * r->directions * (kept * r->layers - 1)
       * bytes_of_dtype[x[0]->dtype];
  cudastub_trace("cudnnGetRNNTrainingReserveSize %zu", *n);
  return OK;
}
int cudnnGetRNNWorkspaceSize(H h, Rnn *r, int steps, Tensor **x, size_t *n) { *n = 0; return OK; }
