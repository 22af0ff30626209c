// SPDX-License-Identifier: Apache-2.0
// What Triton's own launcher asks of a driver, on a machine without one: it keeps the last launch.
#include <stddef.h>
#include <string.h>

struct launch {
    unsigned grid[3], block[3], shared;
    void* stream;
    void* function;
    unsigned char parameters[64][8];
};
struct launch last;
int launches;
int parameter_count;
int parameter_sizes[64];

// the beginning of CUlaunchConfig
struct config {
    unsigned grid[3], block[3], shared;
    void* stream;
};

int cuLaunchKernelEx(const struct config* config, void* function, void** parameters, void** extra) {
    memset(&last, 0, sizeof last);
    memcpy(last.grid, config->grid, sizeof last.grid);
    memcpy(last.block, config->block, sizeof last.block);
    last.shared = config->shared;
    last.stream = config->stream;
    last.function = function;
    for (int i = 0; i < parameter_count; ++i) memcpy(last.parameters[i], parameters[i], parameter_sizes[i]);
    ++launches;
    return extra != NULL;
}

int cuPointerGetAttribute(void* data, int attribute, unsigned long long pointer) {
    memcpy(data, &pointer, sizeof pointer);
    return 0;
}

int cuCtxGetCurrent(void** context) {
    *context = (void*)1;
    return 0;
}

// linked with, and never called
int cuFuncSetAttribute(void) { return 1; }
int cuDeviceGet(void) { return 1; }
int cuDevicePrimaryCtxRetain(void) { return 1; }
int cuCtxSetCurrent(void) { return 1; }

int cuGetErrorString(int code, const char** text) {
    *text = "the fake driver was given more than parameters";
    return 0;
}
