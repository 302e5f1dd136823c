/* A CUDA runtime without GPUs: what torch calls of libcudart and libcuda, loaded before them (LD_PRELOAD).
 *
 * Device memory is host memory, so copies copy. Kernels do nothing: only tensors whose values nobody reads (fake ones,
 * copies) tell the truth. Streams run everything at once. What a real driver does with waits, devices and contexts is
 * written down, and read by `driver.py`.
 *
 * PRETENDED_GPUS is the number of GPUs of the machine, 8 by default; CUDA_VISIBLE_DEVICES hides some of them, as from a real
 * driver. Compiled with -DNVML, this is the library that manages GPUs (libnvidia-ml), by which torch counts them.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#define MAX_DEVICES 64
#define HERE __attribute__((visibility("default")))

static int num_installed(void) {
  const char *text = getenv("PRETENDED_GPUS");
  return text == NULL ? 8 : atoi(text);
}

#ifdef NVML

HERE int nvmlInit(void) { return 0; }
HERE int nvmlInit_v2(void) { return 0; }
HERE int nvmlShutdown(void) { return 0; }
HERE int nvmlDeviceGetCount_v2(unsigned *count) { *count = num_installed(); return 0; } /* whatever is hidden */
/* who uses the memory, which torch asks when there is none left: nobody */
HERE int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **device) { *device = NULL; return 0; }
HERE int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) { *count = 0; return 0; }
/* torch wants to find these, and calls them on machines with several nodes only */
#define NOT_SUPPORTED(name) HERE int name(void) { return 3; }
NOT_SUPPORTED(nvmlDeviceGetGpuFabricInfoV)
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NOT_SUPPORTED(nvmlSystemGetCudaDriverVersion_v2)

#else

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define DEVICE_BYTES (64ULL << 30)

static _Thread_local int current = 0;
static int has_context[MAX_DEVICES];
static long counts[8]; /* see pretended_count */
enum { STREAM_WAITS, EVENT_WAITS, DEVICE_WAITS, TO_DEVICE, TO_HOST, WITHIN, KERNELS, PINNED };

/* The GPUs that this process sees: those of CUDA_VISIBLE_DEVICES up to the first name that is no GPU, none if one is
 * named twice. */
static int count_visible(void) {
  const char *name = getenv("CUDA_VISIBLE_DEVICES");
  int count = 0, named[MAX_DEVICES] = {0};
  if (name == NULL) return num_installed();
  while (*name) {
    char *end;
    long index = strtol(name, &end, 10);
    if (end == name || index < 0 || index >= num_installed()) break;
    if (named[index]++) return 0;
    count++;
    name = *end == ',' ? end + 1 : "";
  }
  return count;
}
static int num_devices(void) { /* read once, as by a real driver: what hides GPUs later comes too late */
  static int count = -1;
  if (count < 0) count = count_visible();
  return count;
}
static void touch(void) { has_context[current] = 1; }
static void count(int what) { __atomic_fetch_add(&counts[what], 1, __ATOMIC_RELAXED); }

HERE long pretended_count(int what) { return counts[what]; }
HERE int pretended_context(int device) { return has_context[device]; }
HERE void pretended_reset(void) {
  memset(counts, 0, sizeof counts);
  memset(has_context, 0, sizeof has_context);
}

/* ---- devices ---- */

HERE cudaError_t cudaGetDeviceCount(int *found) {
  *found = num_devices();
  return *found ? cudaSuccess : cudaErrorNoDevice;
}
HERE cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
HERE cudaError_t cudaSetDevice(int device) { /* since CUDA 12 this creates the context of the device */
  if (device < 0 || device >= num_devices()) return cudaErrorInvalidDevice;
  current = device;
  touch();
  return cudaSuccess;
}
HERE cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "pretended GPU %d", device);
  p->major = 9; p->minor = 0; p->totalGlobalMem = DEVICE_BYTES; p->multiProcessorCount = 132;
  p->warpSize = 32; p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448; p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536; p->l2CacheSize = 50 << 20;
  for (int axis = 0; axis < 3; axis++) { p->maxThreadsDim[axis] = 1024; p->maxGridSize[axis] = 65535; }
  return cudaSuccess;
}
HERE cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr what, int device) { *value = 0; return cudaSuccess; }
HERE cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device); return cudaSuccess;
}
HERE cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return cudaSuccess; }
HERE cudaError_t cudaDeviceEnablePeerAccess(int device, unsigned flags) { return cudaSuccess; }
HERE cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
HERE cudaError_t cudaDeviceSynchronize(void) { touch(); count(DEVICE_WAITS); return cudaSuccess; }
HERE cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
HERE cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return cudaSuccess; }
HERE cudaError_t cudaGetLastError(void) { return cudaSuccess; }
HERE cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }

/* ---- memory ---- */

HERE cudaError_t cudaMalloc(void **memory, size_t size) {
  touch();
  return posix_memalign(memory, 512, size ? size : 1) ? cudaErrorMemoryAllocation : cudaSuccess;
}
HERE cudaError_t cudaMallocAsync(void **memory, size_t size, cudaStream_t stream) { return cudaMalloc(memory, size); }
HERE cudaError_t cudaFree(void *memory) { free(memory); return cudaSuccess; }
HERE cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream) { return cudaFree(memory); }
#define MAX_PINNED 65536
static struct { char *begin; size_t size; } pinned[MAX_PINNED];
static int num_pinned = 0;
static pthread_mutex_t pinning = PTHREAD_MUTEX_INITIALIZER;
static void pin(void *memory, size_t size) {
  pthread_mutex_lock(&pinning);
  if (num_pinned < MAX_PINNED) { pinned[num_pinned].begin = memory; pinned[num_pinned++].size = size; }
  pthread_mutex_unlock(&pinning);
  count(PINNED);
}
static void unpin(void *memory) {
  pthread_mutex_lock(&pinning);
  for (int i = 0; i < num_pinned; i++)
    if (pinned[i].begin == memory) { pinned[i] = pinned[--num_pinned]; break; }
  pthread_mutex_unlock(&pinning);
}
static int is_pinned(const char *memory) {
  int found = 0;
  pthread_mutex_lock(&pinning);
  for (int i = 0; i < num_pinned && !found; i++)
    found = memory >= pinned[i].begin && memory < pinned[i].begin + pinned[i].size;
  pthread_mutex_unlock(&pinning);
  return found;
}
HERE cudaError_t cudaHostAlloc(void **memory, size_t size, unsigned flags) {
  cudaError_t error = cudaMalloc(memory, size);
  if (error == cudaSuccess) pin(*memory, size);
  return error;
}
HERE cudaError_t cudaFreeHost(void *memory) { unpin(memory); return cudaFree(memory); }
HERE cudaError_t cudaHostRegister(void *memory, size_t size, unsigned flags) { touch(); pin(memory, size); return cudaSuccess; }
HERE cudaError_t cudaHostUnregister(void *memory) { unpin(memory); return cudaSuccess; }
HERE cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  touch(); *available = *total = DEVICE_BYTES; return cudaSuccess;
}
HERE cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *memory) {
  memset(found, 0, sizeof *found);
  found->type = is_pinned(memory) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
static cudaError_t copy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  touch();
  memcpy(to, from, size);
  count(kind == cudaMemcpyHostToDevice ? TO_DEVICE : kind == cudaMemcpyDeviceToHost ? TO_HOST : WITHIN);
  return cudaSuccess;
}
HERE cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  count(STREAM_WAITS); return copy(to, from, size, kind);
}
HERE cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, size, kind);
}
HERE cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, cudaStream_t stream) {
  return copy(to, from, size, cudaMemcpyDeviceToDevice);
}
HERE cudaError_t cudaMemset(void *memory, int value, size_t size) { memset(memory, value, size); return cudaSuccess; }
HERE cudaError_t cudaMemsetAsync(void *memory, int value, size_t size, cudaStream_t stream) {
  touch(); memset(memory, value, size); return cudaSuccess;
}

/* ---- streams, events, kernels ---- */

static void *handle(void) { touch(); return malloc(16); } /* never freed: no handle comes back as another one */
HERE cudaError_t cudaStreamCreate(cudaStream_t *stream) { *stream = handle(); return cudaSuccess; }
HERE cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreate(stream); }
HERE cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { return cudaStreamCreate(stream); }
HERE cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
HERE cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }
HERE cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
HERE cudaError_t cudaStreamSynchronize(cudaStream_t stream) { touch(); count(STREAM_WAITS); return cudaSuccess; }
HERE cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { touch(); return cudaSuccess; }
HERE cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone; return cudaSuccess;
}
#undef cudaStreamGetCaptureInfo
HERE cudaError_t pretended_capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status) __asm__("cudaStreamGetCaptureInfo");
cudaError_t pretended_capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone; return cudaSuccess; /* its other results are for captures only */
}
HERE cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
HERE cudaError_t cudaEventCreate(cudaEvent_t *event) { *event = handle(); return cudaSuccess; }
HERE cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }
HERE cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; }
HERE cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
HERE cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { touch(); return cudaSuccess; }
HERE cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
HERE cudaError_t cudaEventSynchronize(cudaEvent_t event) { count(EVENT_WAITS); return cudaSuccess; }
HERE cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) { *milliseconds = 1.0f; return cudaSuccess; }
HERE cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  touch(); count(KERNELS); return cudaSuccess;
}
HERE cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **arguments) {
  touch(); count(KERNELS); return cudaSuccess;
}
HERE cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *f) {
  memset(found, 0, sizeof *found); found->maxThreadsPerBlock = 1024; return cudaSuccess;
}
HERE cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute what, int value) { return cudaSuccess; }
HERE cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int threads, size_t shared, unsigned flags) {
  *blocks = 1; return cudaSuccess;
}

/* ---- the driver: what torch looks up by name ---- */

HERE CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0; *active = has_context[device]; return CUDA_SUCCESS;
}
HERE CUresult cuDeviceGet(CUdevice *device, int index) { *device = index; return CUDA_SUCCESS; }
HERE CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute what, CUdevice device) { *value = 0; return CUDA_SUCCESS; }
HERE CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)&has_context[current]; return CUDA_SUCCESS; }
HERE CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
HERE CUresult cuGetErrorString(CUresult error, const char **text) { *text = "pretended"; return CUDA_SUCCESS; }
static CUresult nothing(void) { return CUDA_ERROR_NOT_SUPPORTED; }
HERE cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **found, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  *found = (void *)nothing;
  if (!strcmp(name, "cuDeviceGet")) *found = (void *)cuDeviceGet;
  if (!strcmp(name, "cuDeviceGetAttribute")) *found = (void *)cuDeviceGetAttribute;
  if (!strcmp(name, "cuCtxGetCurrent")) *found = (void *)cuCtxGetCurrent;
  if (!strcmp(name, "cuCtxSetCurrent")) *found = (void *)cuCtxSetCurrent;
  if (!strcmp(name, "cuGetErrorString")) *found = (void *)cuGetErrorString;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

/* found by the dynamic linker only: their types do not matter, nobody calls them */
#define ABSENT(name) HERE CUresult absent_##name(void) __asm__(#name); CUresult absent_##name(void) { return nothing(); }
ABSENT(cuDevicePrimaryCtxRetain)
ABSENT(cuFuncGetAttribute)
ABSENT(cuFuncSetAttribute)
ABSENT(cuFuncSetCacheConfig)
ABSENT(cuLaunchCooperativeKernel)
ABSENT(cuLaunchKernel)
ABSENT(cuLinkAddData_v2)
ABSENT(cuLinkComplete)
ABSENT(cuLinkCreate_v2)
ABSENT(cuModuleGetFunction)
ABSENT(cuModuleLoad)
ABSENT(cuModuleLoadData)
ABSENT(cuModuleLoadDataEx)
ABSENT(cuModuleUnload)
ABSENT(cuOccupancyMaxActiveBlocksPerMultiprocessor)
ABSENT(cuPointerGetAttribute)
ABSENT(cuTensorMapEncodeTiled)
#endif
