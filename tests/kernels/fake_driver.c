// SPDX-License-Identifier: Apache-2.0
// A driver for machines without one: it keeps what it was given, and fails where it is told to.
#include <stdlib.h>
#include <string.h>

struct launch {
    void* function;
    unsigned sizes[7];
    void* stream;
    unsigned char parameters[512];
};
struct launch last;
struct setting {
    void* function;
    int attribute;
    int value;
};
struct setting last_setting;
int fail_with;
int launches;
size_t parameter_bytes;

int cuDriverGetVersion(int* version) {
    *version = 13000;
    return fail_with;
}

int cuGetErrorString(int code, const char** text) {
    *text = code == 209 ? "no kernel image is available" : NULL;
    return code == 209 ? 0 : 1;
}

int cuModuleLoadData(void** module, const void* image) {
    *module = (void*)image;
    return memcmp(image, "\177ELF", 4) ? 200 : fail_with;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
    *function = (void*)(0x7000000000000000 + strlen(name));
    return fail_with;
}

int cuFuncGetAttribute(int* value, int attribute, void* function) {
    *value = attribute == 4 ? 48 : 0;
    return fail_with;
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
    last_setting = (struct setting){function, attribute, value};
    return fail_with;
}

int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** parameters, void** extra) {
    struct launch now = {function, {grid_x, grid_y, grid_z, block_x, block_y, block_z, shared}, stream, {0}};
    if (extra) return 1;
    memcpy(now.parameters, parameters[0], parameter_bytes);
    last = now;
    ++launches;
    return fail_with;
}
