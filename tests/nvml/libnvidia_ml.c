/* A stand-in for libnvidia-ml.so.1, NVIDIA's management library, for machines without an NVIDIA GPU.
 *
 * The environment variable NVML_STATE names a text file that says what the library answers. It is read
 * again whenever it changed, so a test can rewrite it while a program uses the library. Each line is a key
 * and its values. Lines before the first `gpu` are about the machine:
 *
 *   driver 550.54.15            version of the driver
 *   cuda 12040                  version of CUDA
 *   fail FUNCTION CODE          this function returns the error code (nvmlReturn_t)
 *   crash FUNCTION              this function ends the process with SIGSEGV
 *   hang FUNCTION               this function never returns
 *
 * A line `gpu` begins a GPU, a line `mig` a MIG device of the GPU before it. A function whose key is absent
 * returns NVML_ERROR_NOT_SUPPORTED:
 *
 *   uuid U, name N, pci DDDDDDDD:BB:DD.F, memory TOTAL USED [RESERVED] (bytes), utilization GPU MEMORY (%),
 *   temperature C, power MILLIWATTS, energy MILLIJOULES, ecc UNCORRECTED, rows CORRECTABLE UNCORRECTABLE
 *   PENDING FAILED, pages_pending 0|1, clocks HEX (reasons), numa NODE, recovery ACTION,
 *   capability MAJOR MINOR, mig_mode 0|1, lost, process PID BYTES, mps PID BYTES,
 *   nvlink LINK gpu|switch REMOTE_PCI, event NUMBER xid CODE, instance GPU_INSTANCE COMPUTE_INSTANCE,
 *   slices GPU COMPUTE
 *
 * An event is delivered once, to an event set created before the line appeared; numbers grow.
 *
 * Compiled with -DWITH_NVML_H, it takes all types and prototypes from NVIDIA's nvml.h, so that the compiler
 * compares them; `standin_layout` lets a test compare the layouts. Compiled with -DOLD_DRIVER it lacks the
 * functions that came after driver 450.
 */
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef WITH_NVML_H
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
#else
typedef struct nvmlDevice_st *nvmlDevice_t;
typedef struct nvmlEventSet_st *nvmlEventSet_t;
typedef unsigned int nvmlReturn_t, nvmlEnableState_t, nvmlTemperatureSensors_t, nvmlMemoryErrorType_t,
    nvmlEccCounterType_t, nvmlIntNvLinkDeviceType_t, nvmlAffinityScope_t;
enum {
    NVML_SUCCESS = 0, NVML_ERROR_UNINITIALIZED = 1, NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3, NVML_ERROR_NOT_FOUND = 6, NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9, NVML_ERROR_TIMEOUT = 10, NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18, NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
};
typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned int pid; unsigned long long usedGpuMemory; } nvmlProcessInfo_v1_t;
typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
typedef nvmlProcessInfo_t nvmlProcessInfo_v2_t;
typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;
typedef struct {
    unsigned int multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount,
        sharedJpegCount, sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;
typedef union {
    double dVal;
    int siVal;
    unsigned int uiVal;
    unsigned long ulVal;
    unsigned long long ullVal;
    signed long long sllVal;
    unsigned short usVal;
} nvmlValue_t;
typedef struct {
    unsigned int fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned int valueType;
    nvmlReturn_t nvmlReturn;
    nvmlValue_t value;
} nvmlFieldValue_t;
#define NVML_FI_DEV_GET_GPU_RECOVERY_ACTION 230
#define NVML_VALUE_TYPE_UNSIGNED_INT 1
#define nvmlEventTypeXidCriticalError 8LL
#endif

#define MAX_GPUS 64
#define MAX_MIG 8
#define MAX_LINES 64

typedef struct {
    int count;
    char key[MAX_LINES][24], value[MAX_LINES][200];
} Lines;

typedef struct nvmlDevice_st {
    Lines lines;
    int parent; /* slot of the GPU of a MIG device, else -1 */
} Device;

static Lines machine;
static Device gpus[MAX_GPUS], migs[MAX_GPUS * MAX_MIG];
static int gpu_count, users;
static struct stat seen;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct nvmlEventSet_st { unsigned long long last; };

static const char *at(const Lines *lines, const char *key, int number) {
    for (int i = 0; i < lines->count; i++)
        if (strcmp(lines->key[i], key) == 0 && number-- == 0)
            return lines->value[i];
    return NULL;
}

static const char *get(const Lines *lines, const char *key) { return at(lines, key, 0); }

static unsigned long long last_event(void) {
    unsigned long long found, last = 0;
    for (int gpu = 0; gpu < gpu_count; gpu++)
        for (int i = 0; at(&gpus[gpu].lines, "event", i); i++)
            if (sscanf(at(&gpus[gpu].lines, "event", i), "%llu", &found) == 1 && found > last)
                last = found;
    return last;
}

/* Read the state again if its file changed; a test replaces the file in one step, so it is never half one. */
static void load(void) {
    const char *path = getenv("NVML_STATE");
    struct stat now;
    char line[256], key[24], value[200];
    if (path == NULL || stat(path, &now) != 0)
        return;
    if (now.st_ino == seen.st_ino && now.st_size == seen.st_size &&
        now.st_mtim.tv_sec == seen.st_mtim.tv_sec && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return;
    seen = now;
    gpu_count = 0;
    machine.count = 0;
    for (int i = 0; i < MAX_GPUS * MAX_MIG; i++)
        migs[i].lines.count = -1;
    Lines *lines = &machine;
    int mig = 0;
    while (fgets(line, sizeof line, file)) {
        value[0] = 0;
        if (sscanf(line, " %23s %199[^\n]", key, value) < 1 || key[0] == '#')
            continue;
        if (strcmp(key, "gpu") == 0 && gpu_count < MAX_GPUS) {
            gpus[gpu_count].parent = -1;
            lines = &gpus[gpu_count++].lines;
            lines->count = mig = 0;
        } else if (strcmp(key, "mig") == 0 && gpu_count > 0 && mig < MAX_MIG) {
            Device *device = &migs[(gpu_count - 1) * MAX_MIG + mig++];
            device->parent = gpu_count - 1;
            lines = &device->lines;
            lines->count = 0;
        } else if (lines->count < MAX_LINES) {
            strcpy(lines->key[lines->count], key);
            strcpy(lines->value[lines->count++], value);
        }
    }
    fclose(file);
}

/* Begin a function: what the state says about it by name, and whether its device can be reached. */
static nvmlReturn_t enter(const char *function, nvmlDevice_t device, int of_device) {
    char name[100];
    int code;
    pthread_mutex_lock(&lock);
    load();
    pthread_mutex_unlock(&lock);
    for (int i = 0; at(&machine, "crash", i); i++)
        if (strcmp(at(&machine, "crash", i), function) == 0)
            raise(SIGSEGV);
    for (int i = 0; at(&machine, "hang", i); i++)
        if (strcmp(at(&machine, "hang", i), function) == 0)
            for (;;)
                pause();
    for (int i = 0; at(&machine, "fail", i); i++)
        if (sscanf(at(&machine, "fail", i), "%99s %d", name, &code) == 2 && strcmp(name, function) == 0)
            return (nvmlReturn_t)code;
    if (users == 0 && strcmp(function, "nvmlInit_v2") != 0 && strcmp(function, "nvmlInitWithFlags") != 0)
        return NVML_ERROR_UNINITIALIZED;
    if (!of_device)
        return NVML_SUCCESS;
    if (device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    const Device *whole = device->parent < 0 ? device : &gpus[device->parent];
    if (whole - gpus >= gpu_count || device->lines.count < 0 || get(&whole->lines, "lost"))
        return NVML_ERROR_GPU_IS_LOST;
    return NVML_SUCCESS;
}

#define ENTER(device, of_device)                                     \
    do {                                                             \
        nvmlReturn_t entered = enter(__func__, device, of_device);   \
        if (entered != NVML_SUCCESS)                                 \
            return entered;                                          \
    } while (0)

/* The value of a key of the device, or return that this is not supported. */
#define VALUE(variable, device, key)                  \
    ENTER(device, 1);                                 \
    const char *variable = get(&device->lines, key);  \
    if (variable == NULL)                             \
        return NVML_ERROR_NOT_SUPPORTED

static nvmlReturn_t text(const char *value, char *out, unsigned int length) {
    if (strlen(value) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, value);
    return NVML_SUCCESS;
}

static nvmlReturn_t number(const char *value, unsigned int *out) {
    *out = (unsigned int)strtoul(value, NULL, 0);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void) {
    ENTER(NULL, 0);
    users++;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    ENTER(NULL, 0);
    users++;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlShutdown(void) {
    ENTER(NULL, 0);
    users--;
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result) {
    switch (result) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    ENTER(NULL, 0);
    const char *value = get(&machine, "driver");
    return value ? text(value, version, length) : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ENTER(NULL, 0);
    const char *value = get(&machine, "cuda");
    *version = value ? atoi(value) : 0;
    return value ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    ENTER(NULL, 0);
    *count = (unsigned int)gpu_count;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    ENTER(NULL, 0);
    if (index >= (unsigned int)gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = &gpus[index];
    return enter(__func__, *device, 1);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    ENTER(NULL, 0);
    for (int i = 0; i < gpu_count * (1 + MAX_MIG); i++) {
        Device *found = i < gpu_count ? &gpus[i] : &migs[i - gpu_count];
        if (found->lines.count >= 0 && get(&found->lines, "uuid") && strcmp(get(&found->lines, "uuid"), uuid) == 0) {
            *device = found;
            return enter(__func__, found, 1);
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

static unsigned long pci_number(const char *address, int part) {
    unsigned int parts[3] = {0, 0, 0};
    sscanf(address, "%x:%x:%x", &parts[0], &parts[1], &parts[2]);
    return parts[part];
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *device) {
    ENTER(NULL, 0);
    for (int i = 0; i < gpu_count; i++) {
        const char *own = get(&gpus[i].lines, "pci");
        if (own && pci_number(own, 0) == pci_number(address, 0) && pci_number(own, 1) == pci_number(address, 1)) {
            *device = &gpus[i];
            return enter(__func__, *device, 1);
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    VALUE(value, device, "uuid");
    return text(value, uuid, length);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    VALUE(value, device, "name");
    return text(value, name, length);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    ENTER(device, 1);
    *index = device->parent < 0 ? (unsigned int)(device - gpus) : (unsigned int)((device - migs) % MAX_MIG);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor) {
    ENTER(device, 1);
    if (get(&device->lines, "minor") == NULL)
        return nvmlDeviceGetIndex(device, minor);
    sscanf(get(&device->lines, "minor"), "%u", minor);
    return NVML_SUCCESS;
}

static void write_pci(const char *address, nvmlPciInfo_t *pci) {
    memset(pci, 0, sizeof *pci);
    pci->domain = (unsigned int)pci_number(address, 0);
    pci->bus = (unsigned int)pci_number(address, 1);
    pci->device = (unsigned int)pci_number(address, 2);
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
             pci->device & 0xff);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    VALUE(value, device, "pci");
    write_pci(value, pci);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    VALUE(value, device, "memory");
    unsigned long long reserved = 0;
    sscanf(value, "%llu %llu %llu", &memory->total, &memory->used, &reserved);
    memory->used += reserved; /* the first version of this function counts reserved memory as used */
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

#ifndef OLD_DRIVER
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    VALUE(value, device, "memory");
    if (memory->version != (sizeof *memory | 2u << 24))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory->reserved = 0;
    sscanf(value, "%llu %llu %llu", &memory->total, &memory->used, &memory->reserved);
    memory->free = memory->total - memory->used - memory->reserved;
    return NVML_SUCCESS;
}
#endif

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    VALUE(value, device, "utilization");
    rates->memory = 0;
    sscanf(value, "%u %u", &rates->gpu, &rates->memory);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *degrees) {
    (void)sensor;
    VALUE(value, device, "temperature");
    return number(value, degrees);
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    VALUE(value, device, "power");
    return number(value, milliwatts);
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules) {
    VALUE(value, device, "energy");
    *millijoules = strtoull(value, NULL, 0);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                         nvmlEccCounterType_t counter, unsigned long long *errors) {
    VALUE(value, device, "ecc");
    *errors = type == 1 && counter == 0 ? strtoull(value, NULL, 0) : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *pending) {
    VALUE(value, device, "pages_pending");
    *pending = atoi(value) != 0;
    return NVML_SUCCESS;
}

#ifndef OLD_DRIVER
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *correctable, unsigned int *uncorrectable,
                                       unsigned int *pending, unsigned int *failed) {
    VALUE(value, device, "rows");
    sscanf(value, "%u %u %u %u", correctable, uncorrectable, pending, failed);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) {
    VALUE(value, device, "clocks");
    *reasons = strtoull(value, NULL, 0);
    return NVML_SUCCESS;
}
#endif

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
    VALUE(value, device, "clocks");
    *reasons = strtoull(value, NULL, 0);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int size, unsigned long *nodes,
                                         nvmlAffinityScope_t scope) {
    (void)scope;
    VALUE(value, device, "numa");
    unsigned int node = (unsigned int)atoi(value), bits = 8 * sizeof *nodes;
    if (node >= size * bits)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memset(nodes, 0, size * sizeof *nodes);
    nodes[node / bits] = 1ul << node % bits;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    VALUE(value, device, "capability");
    sscanf(value, "%d %d", major, minor);
    return NVML_SUCCESS;
}

static const char *nvlink(nvmlDevice_t device, unsigned int link, char kind[16], char remote[40]) {
    unsigned int found;
    for (int i = 0; at(&device->lines, "nvlink", i); i++) {
        const char *value = at(&device->lines, "nvlink", i);
        if (sscanf(value, "%u %15s %39s", &found, kind, remote) == 3 && found == link)
            return value;
    }
    return NULL;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active) {
    char kind[16], remote[40];
    VALUE(any, device, "nvlink");
    (void)any;
    if (link >= 18)
        return NVML_ERROR_INVALID_ARGUMENT;
    *active = nvlink(device, link, kind, remote) != NULL;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci) {
    char kind[16], remote[40];
    ENTER(device, 1);
    if (!nvlink(device, link, kind, remote))
        return NVML_ERROR_NOT_SUPPORTED;
    write_pci(remote, pci);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link,
                                                 nvmlIntNvLinkDeviceType_t *type) {
    char kind[16], remote[40];
    ENTER(device, 1);
    if (!nvlink(device, link, kind, remote))
        return NVML_ERROR_NOT_SUPPORTED;
    *type = strcmp(kind, "switch") == 0 ? 2 : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    VALUE(value, device, "mig_mode");
    number(value, current);
    return number(value, pending);
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) {
    ENTER(device, 1);
    *count = get(&device->lines, "mig_mode") ? MAX_MIG : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig) {
    ENTER(device, 1);
    if (device->parent >= 0 || index >= MAX_MIG)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mig = &migs[(device - gpus) * MAX_MIG + index];
    return (*mig)->lines.count < 0 ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device) {
    ENTER(mig, 1);
    if (mig->parent < 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = &gpus[mig->parent];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig) {
    ENTER(device, 1);
    *is_mig = device->parent >= 0;
    return NVML_SUCCESS;
}

static nvmlReturn_t instance(nvmlDevice_t device, int part, unsigned int *id) {
    unsigned int ids[2] = {0, 0};
    const char *value = get(&device->lines, "instance");
    if (value == NULL)
        return NVML_ERROR_NOT_SUPPORTED;
    sscanf(value, "%u %u", &ids[0], &ids[1]);
    *id = ids[part];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id) {
    ENTER(device, 1);
    return instance(device, 0, id);
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id) {
    ENTER(device, 1);
    return instance(device, 1, id);
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) {
    VALUE(value, device, "slices");
    unsigned long long bytes = 0;
    memset(attributes, 0, sizeof *attributes);
    sscanf(value, "%u %u", &attributes->gpuInstanceSliceCount, &attributes->computeInstanceSliceCount);
    if (get(&device->lines, "memory"))
        sscanf(get(&device->lines, "memory"), "%llu", &bytes);
    attributes->memorySizeMB = bytes >> 20;
    return NVML_SUCCESS;
}

/* Write the processes of the device under this key; `stride` tells the first version's struct from later ones. */
static nvmlReturn_t running(nvmlDevice_t device, const char *key, unsigned int *count, void *out, size_t stride) {
    unsigned int found = 0, room = *count, ids[2] = {~0u, ~0u};
    while (at(&device->lines, key, (int)found))
        found++;
    *count = found;
    if (found > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    instance(device, 0, &ids[0]);
    instance(device, 1, &ids[1]);
    for (unsigned int i = 0; i < found; i++) {
        nvmlProcessInfo_t process = {0, ~0ull, ids[0], ids[1]}; /* without bytes: not available */
        sscanf(at(&device->lines, key, (int)i), "%u %llu", &process.pid, &process.usedGpuMemory);
        memcpy((char *)out + i * stride, &process, stride);
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *count,
                                                  nvmlProcessInfo_v1_t *out) {
    ENTER(device, 1);
    return running(device, "process", count, out, sizeof *out);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses(nvmlDevice_t device, unsigned int *count,
                                                   nvmlProcessInfo_v1_t *out) {
    ENTER(device, 1);
    return running(device, "graphics", count, out, sizeof *out);
}

#ifndef OLD_DRIVER
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_v2_t *out) {
    ENTER(device, 1);
    return running(device, "process", count, out, sizeof *out);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_t *out) {
    ENTER(device, 1);
    return running(device, "process", count, out, sizeof *out);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                        nvmlProcessInfo_t *out) {
    ENTER(device, 1);
    return running(device, "mps", count, out, sizeof *out);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                      nvmlProcessInfo_t *out) {
    ENTER(device, 1);
    return running(device, "graphics", count, out, sizeof *out);
}
#endif

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    ENTER(device, 1);
    for (int i = 0; i < count; i++) {
        const char *recovery = get(&device->lines, "recovery");
        values[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
        if (values[i].fieldId == NVML_FI_DEV_GET_GPU_RECOVERY_ACTION && recovery) {
            values[i].valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
            values[i].nvmlReturn = number(recovery, &values[i].value.uiVal);
        }
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    ENTER(NULL, 0);
    *set = malloc(sizeof **set);
    (*set)->last = last_event();
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    free(set);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    ENTER(device, 1);
    *types = nvmlEventTypeXidCriticalError;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    (void)types;
    (void)set;
    ENTER(device, 1);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms) {
    for (unsigned int waited = 0;; waited++) {
        ENTER(NULL, 0);
        unsigned long long event, code, next = ~0ull;
        for (int gpu = 0; gpu < gpu_count; gpu++)
            for (int i = 0; at(&gpus[gpu].lines, "event", i); i++)
                if (sscanf(at(&gpus[gpu].lines, "event", i), "%llu xid %llu", &event, &code) == 2 &&
                    event > set->last && event < next) {
                    next = event;
                    *data = (nvmlEventData_t){&gpus[gpu], nvmlEventTypeXidCriticalError, code, ~0u, ~0u};
                }
        if (next != ~0ull) {
            set->last = next;
            return NVML_SUCCESS;
        }
        if (waited >= timeout_ms)
            return NVML_ERROR_TIMEOUT;
        usleep(1000);
    }
}

/* Sizes and offsets of the structs, for a comparison with those of nvml.h. */
#define SIZE(type) out += sprintf(out, #type " %zu\n", sizeof(type))
#define OFFSET(type, member) out += sprintf(out, #type "." #member " %zu\n", offsetof(type, member))
const char *standin_layout(void) {
    static char layout[4096];
    char *out = layout;
    SIZE(nvmlPciInfo_t); OFFSET(nvmlPciInfo_t, bus); OFFSET(nvmlPciInfo_t, busId);
    SIZE(nvmlMemory_t); OFFSET(nvmlMemory_t, used);
    SIZE(nvmlMemory_v2_t); OFFSET(nvmlMemory_v2_t, total); OFFSET(nvmlMemory_v2_t, reserved);
    OFFSET(nvmlMemory_v2_t, used);
    SIZE(nvmlUtilization_t); OFFSET(nvmlUtilization_t, memory);
    SIZE(nvmlProcessInfo_v1_t); OFFSET(nvmlProcessInfo_v1_t, usedGpuMemory);
    SIZE(nvmlProcessInfo_t); OFFSET(nvmlProcessInfo_t, gpuInstanceId); OFFSET(nvmlProcessInfo_t, computeInstanceId);
    SIZE(nvmlEventData_t); OFFSET(nvmlEventData_t, eventType); OFFSET(nvmlEventData_t, eventData);
    OFFSET(nvmlEventData_t, computeInstanceId);
    SIZE(nvmlDeviceAttributes_t); OFFSET(nvmlDeviceAttributes_t, gpuInstanceSliceCount);
    OFFSET(nvmlDeviceAttributes_t, memorySizeMB);
    SIZE(nvmlFieldValue_t); OFFSET(nvmlFieldValue_t, nvmlReturn); OFFSET(nvmlFieldValue_t, value);
    return layout;
}
