/* Stands in for NVIDIA's management library, with the devices that the environment describes.
 *
 * STAND_IN_GPUS has one word a device, separated by commas: MODEL:GIB, and for a device in MIG mode
 * MODEL:GIB:INSTANCES. Device i has the UUID GPU-i, its instance j MIG-i-j. A model whose name begins with "Old" has
 * no energy counter. Each reading of a counter adds 250 mJ to it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 16
#define OK 0
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6

typedef struct {
    char model[64], uuid[32];
    double gib;
    int instances;
    unsigned long long energy_mj;
} gpu;
typedef gpu *device;

static gpu gpus[MOST], parts[MOST][8];
static unsigned count;

int nvmlInit_v2(void) {
    const char *said = getenv("STAND_IN_GPUS");
    char copy[1024], *rest = copy, *word;
    snprintf(copy, sizeof copy, "%s", said ? said : "");
    for (count = 0; count < MOST && (word = strsep(&rest, ",")) && *word; count++) {
        gpu *each = &gpus[count];
        each->instances = 0;
        if (sscanf(word, "%63[^:]:%lf:%d", each->model, &each->gib, &each->instances) < 2) return INVALID_ARGUMENT;
        snprintf(each->uuid, sizeof each->uuid, "GPU-%u", count);
        if (!each->energy_mj) each->energy_mj = 5000;
        for (int j = 0; j < each->instances && j < 8; j++) {
            gpu *part = &parts[count][j];
            snprintf(part->model, sizeof part->model, "%.40s MIG 1g", each->model);
            snprintf(part->uuid, sizeof part->uuid, "MIG-%u-%d", count, j);
            part->gib = each->gib / each->instances;
        }
    }
    return OK;
}
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return "an error of the stand-in"; }

int nvmlDeviceGetCount_v2(unsigned *n) { *n = count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device *d) {
    if (i >= count) return INVALID_ARGUMENT;
    *d = &gpus[i];
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, device *d) {
    for (unsigned i = 0; i < count; i++) {
        if (!strcmp(gpus[i].uuid, uuid)) { *d = &gpus[i]; return OK; }
        for (int j = 0; j < gpus[i].instances; j++)
            if (!strcmp(parts[i][j].uuid, uuid)) { *d = &parts[i][j]; return OK; }
    }
    return NOT_FOUND;
}
int nvmlDeviceGetIndex(device d, unsigned *i) { *i = d - gpus; return OK; }
int nvmlDeviceGetUUID(device d, char *s, unsigned n) { snprintf(s, n, "%s", d->uuid); return OK; }
int nvmlDeviceGetName(device d, char *s, unsigned n) { snprintf(s, n, "%s", d->model); return OK; }
int nvmlDeviceGetMemoryInfo(device d, unsigned long long *m) {
    m[0] = m[1] = (unsigned long long)(d->gib * (1ULL << 30));
    m[2] = 0;
    return OK;
}
int nvmlDeviceGetMigMode(device d, unsigned *current, unsigned *pending) {
    *current = *pending = d->instances > 0;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(device d, unsigned *n) { *n = d->instances ? 8 : 0; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(device d, unsigned j, device *part) {
    if ((int)j >= d->instances) return NOT_FOUND;
    *part = &parts[d - gpus][j];
    return OK;
}
int nvmlDeviceGetTotalEnergyConsumption(device d, unsigned long long *mj) {
    if (!strncmp(d->model, "Old", 3)) return NOT_SUPPORTED;
    *mj = d->energy_mj += 250;
    return OK;
}
int nvmlDeviceGetPowerUsage(device d, unsigned *mw) { *mw = 40000; return OK; }
