/* Stands in for libnvidia-ml: a machine with FAKE_GPUS (8) H100, as far as vLLM's CUDA platform and
 * pynvml look. What is not here cannot be looked up, which is an error as in an old driver.
 * Source of signatures: NVIDIA's NVML API reference. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef void *Device; /* index + 1: null is no device */

enum { OK = 0, INVALID_ARGUMENT = 2 };

static const unsigned long long TOTAL = 85520809984ull; /* as an H100 SXM says it has */
static const unsigned long long USED = 520809984ull;

static int count(void) {
    const char *said = getenv("FAKE_GPUS");
    return said ? atoi(said) : 8;
}

static unsigned index_of(Device device) { return (unsigned)(unsigned long)device - 1; }

/* Programs look up either name: pynvml the newer, torch the older. */
Result nvmlInit(void) { return OK; }
Result nvmlInit_v2(void) { return OK; }
Result nvmlInitWithFlags(unsigned flags) { (void)flags; return OK; }
Result nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(Result result) { return result ? "an error of a stub" : "ok"; }

Result nvmlSystemGetDriverVersion(char *text, unsigned length) {
    snprintf(text, length, "580.95.05");
    return OK;
}
Result nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
Result nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return OK; }

Result nvmlDeviceGetCount(unsigned *found) { *found = count(); return OK; }
Result nvmlDeviceGetCount_v2(unsigned *found) { *found = count(); return OK; }
Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    if ((int)index >= count()) return INVALID_ARGUMENT;
    *device = (Device)(unsigned long)(index + 1);
    return OK;
}
Result nvmlDeviceGetHandleByIndex(unsigned index, Device *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}
Result nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
    const char *last = strrchr(uuid, '-');
    return last ? nvmlDeviceGetHandleByIndex_v2(atoi(last + 1), device) : INVALID_ARGUMENT;
}
Result nvmlDeviceGetIndex(Device device, unsigned *index) { *index = index_of(device); return OK; }
Result nvmlDeviceGetName(Device device, char *text, unsigned length) {
    (void)device;
    snprintf(text, length, "NVIDIA H100 80GB HBM3");
    return OK;
}
Result nvmlDeviceGetUUID(Device device, char *text, unsigned length) {
    snprintf(text, length, "GPU-00000000-0000-0000-0000-%012u", index_of(device));
    return OK;
}
Result nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor) {
    (void)device;
    *major = 9;
    *minor = 0;
    return OK;
}

struct memory { unsigned long long total, free, used; };
Result nvmlDeviceGetMemoryInfo(Device device, struct memory *memory) {
    (void)device;
    *memory = (struct memory){TOTAL, TOTAL - USED, USED};
    return OK;
}
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
Result nvmlDeviceGetMemoryInfo_v2(Device device, struct memory_v2 *memory) {
    (void)device;
    *memory = (struct memory_v2){memory->version, TOTAL, 0, TOTAL - USED, USED};
    return OK;
}

Result nvmlDeviceGetP2PStatus(Device one, Device other, int kind, int *status) {
    (void)one, (void)other, (void)kind;
    *status = 0; /* they reach each other */
    return OK;
}
Result nvmlDeviceGetMigMode(Device device, unsigned *now, unsigned *next) {
    (void)device;
    *now = *next = 0;
    return OK;
}
Result nvmlDeviceGetMaxMigDeviceCount(Device device, unsigned *most) {
    (void)device;
    *most = 0;
    return OK;
}
Result nvmlDeviceGetNumaNodeId(Device device, unsigned *node) {
    (void)device;
    *node = 0;
    return OK;
}
Result nvmlDeviceGetMemoryAffinity(Device device, unsigned size, unsigned long *set, int scope) {
    (void)device, (void)scope;
    memset(set, 0, size * sizeof *set);
    set[0] = 1;
    return OK;
}
Result nvmlDeviceGetCpuAffinity(Device device, unsigned size, unsigned long *set) {
    (void)device;
    memset(set, 0, size * sizeof *set);
    set[0] = 3;
    return OK;
}
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
Result nvmlDeviceGetPciInfo_v3(Device device, struct pci *pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = index_of(device) + 1;
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
    return OK;
}
