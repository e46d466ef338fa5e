// Plays a CUDA driver in tests: it only counts what it is asked.
// The functions of a CUDA driver that a program finds, as far as this library catches them. Device n lies on bus n.
// The stream at address 16 records a graph: `asked` counts the calls that would break its recording. After `record(1)`
// some stream records in the usual mode, and every wait in this mode breaks it: `broken` counts such waits, as an H200
// with driver 580 does. `launched` counts launches, and `last` adds the arguments of the last launch of a kernel up.
#include <string.h>
#include <unistd.h>
static int waits, calls, launches, sum, current, recording, breaks;
static __thread int mode;
int cuThreadExchangeStreamCaptureMode(int *other) { int before = mode; mode = *other; *other = before; return 0; }
int record(int now) { recording = now; return 0; }
int broken(void) { return breaks + 1000 * mode; }
static int checked(void) { int is_bad = recording && mode != 2; calls++; breaks += is_bad; return is_bad ? 900 : 0; }
static int launch(long arguments) { launches++; sum = arguments; usleep(200); return 0; }
#define GEOMETRY unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h
#define KERNEL(NAME) int NAME(void *f, GEOMETRY, void *stream, void **parameters, void **extra) { \
    return launch(a + b + c + d + e + g + h + (long)parameters + (long)extra); }
#define COOPERATIVE(NAME) int NAME(void *f, GEOMETRY, void *stream, void **parameters) { \
    return launch(a + b + c + d + e + g + h + (long)parameters); }
#define EX(NAME) int NAME(const unsigned *config, void *f, void **parameters, void **extra) { \
    return launch(config[0] + (long)parameters + (long)extra); }
#define GRAPH(NAME) int NAME(void *graph, void *stream) { return launch(0); }
KERNEL(cuLaunchKernel)
KERNEL(cuLaunchKernel_ptsz)
COOPERATIVE(cuLaunchCooperativeKernel)
COOPERATIVE(cuLaunchCooperativeKernel_ptsz)
EX(cuLaunchKernelEx)
EX(cuLaunchKernelEx_ptsz)
GRAPH(cuGraphLaunch)
GRAPH(cuGraphLaunch_ptsz)
int cuStreamSynchronize(void *stream) { usleep(1000); return checked() | (stream == (void *)16 ? 900 : 0); }
int cuStreamSynchronize_ptsz(void *stream) { return cuStreamSynchronize(stream); }
int cuCtxSynchronize(void) { return checked(); }
int cuEventCreate(void **event, unsigned flags) { calls++; *event = &waits; return 0; }
int cuEventRecord(void *event, void *stream) { calls++; return stream == (void *)16 ? 900 : 0; }
int cuEventRecord_ptsz(void *event, void *stream) { return cuEventRecord(event, stream); }
int cuEventSynchronize(void *event) { waits++; return checked(); }
int waited(void) { return waits; }
int asked(void) { return calls; }
int launched(void) { return launches; }
int last(void) { return sum; }
int cuStreamIsCapturing(void *stream, int *status) { *status = stream == (void *)16; return 0; }
int cuStreamIsCapturing_ptsz(void *stream, int *status) { return cuStreamIsCapturing(stream, status); }
int cuDevicePrimaryCtxRetain(void **context, int device) { current = device; return 0; }
int cuCtxGetDevice(int *device) { *device = current; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 33 ? device : 0; return 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, int *status) {
    *found = !strcmp(name, "cuLaunchKernel") ? (void *)cuLaunchKernel
           : !strcmp(name, "cuGraphLaunch") ? (void *)cuGraphLaunch
           : !strcmp(name, "cuStreamSynchronize") ? (void *)cuStreamSynchronize
           : !strcmp(name, "cuDevicePrimaryCtxRetain") ? (void *)cuDevicePrimaryCtxRetain : 0;
    return *found ? 0 : 500;
}
