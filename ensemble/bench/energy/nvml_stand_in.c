/* Stands in for NVIDIA's management library, with the devices that the environment describes.
 *
 * STAND_IN_GPUS has one word a device, separated by commas: MODEL:GIB, and for a device in MIG mode
 * MODEL:GIB:INSTANCES. Device i has the UUID GPU-i, its instance j MIG-i-j. A model whose name begins with "Old" has
 * no energy counter. Each reading of a counter adds 250 mJ to it, unless the state says what it is at. An instance has
 * no energy, power, compute mode, utilization or events of its own. A GPU has seven slices, an A30 four; its instances
 * have equal parts of them.
 *
 * STAND_IN_STATE may name a file, read at each call, with what befalls devices, a line each: UUID WHAT VALUE. The last
 * line of a kind counts, of `process` that of each process.
 *
 *   held GIB           processes that are not listed hold so much of its memory
 *   process PID GIB    that process, while it lives, is listed with so much of its memory; 0: it is not said how much.
 *                      One from 4194304 on is of another process namespace, and lives
 *   mode NUMBER        its compute mode
 *   xid NUMBER         the driver reports an event; those who registered before get it once
 *   ecc NUMBER         uncorrected ECC errors since the driver was loaded
 *   lost 1             it has fallen off the bus
 *   energy MILLIJOULES what its energy counter says
 *   power MILLIWATTS   its present power
 *   load PERCENT       of the last period in which kernels ran on it; it is not told where this is not said
 *   slices NUMBER      of an instance
 *   mps PID            that process is a client of a Multi-Process Service on it; `process` may name the server
 *   util PID PERCENT   of its multiprocessors that process keeps so much busy from here on; 0: it is idle
 *   util PID PERCENT T a sample of the driver's, recorded at T microseconds since 1970: that process was on it. As
 *                      the driver does, it answers with a process's mean over all samples after the time asked for
 *   fails CODE         its utilization is answered with this error
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define MOST 16
#define LINES 2048
#define OK 0
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define TIMEOUT 10
#define GPU_IS_LOST 15
#define XID_EVENT 8ULL
#define FOREIGN 4194304 /* the kernel's limit of process ids */

typedef struct {
    char model[64], uuid[32];
    double gib;
    int instances;
    unsigned long long energy_mj;
} gpu;
typedef gpu *device;
typedef struct { char uuid[32], what[16]; double value, more, at; } line;
typedef struct { unsigned pid; unsigned long long at; unsigned sm, memory, encoder, decoder; } utilization;
typedef struct { unsigned sm, copy, decoders, encoders, jpeg, ofa, gpu_slices, slices; unsigned long long mb; } attributes;
typedef struct { unsigned id, p2p, slices, instances, sm, copy, decoders, encoders, jpeg, ofa; unsigned long long mb; } profile;
typedef struct { unsigned pid; unsigned long long bytes; unsigned instance, compute; } process;
typedef struct { device which; unsigned long long type, data; unsigned instance, compute; } event;
typedef struct { int delivered; } event_set;

static gpu gpus[MOST], parts[MOST][8];
static unsigned count;
static line lines[LINES];

/* Reads the file, unless it is as it was and has long been so; returns the number of its complete lines. */
static int read_state(void) {
    static struct stat last;
    static int n;
    const char *path = getenv("STAND_IN_STATE");
    struct stat now;
    struct timespec t;
    char text[128];
    FILE *file;
    if (!path || stat(path, &now)) return 0;
    clock_gettime(CLOCK_REALTIME, &t);
    if (now.st_ino == last.st_ino && now.st_size == last.st_size && !memcmp(&now.st_mtim, &last.st_mtim, sizeof t))
        return n;
    n = 0;
    last = now;
    if (t.tv_sec - now.st_mtim.tv_sec < 2) last.st_ino = 0; /* it may change again within the clock's tick */
    if (!(file = fopen(path, "r"))) return 0;
    while (n < LINES && fgets(text, sizeof text, file) && strchr(text, '\n')) {
        line *l = &lines[n];
        l->more = l->at = 0;
        if (sscanf(text, "%31s %15s %lf %lf %lf", l->uuid, l->what, &l->value, &l->more, &l->at) >= 3) n++;
    }
    fclose(file);
    return n;
}
static double state_or(const char *uuid, const char *what, double value) {
    for (int n = read_state(), i = 0; i < n; i++)
        if (!strcmp(lines[i].uuid, uuid) && !strcmp(lines[i].what, what)) value = lines[i].value;
    return value;
}
static double state_of(const char *uuid, const char *what) { return state_or(uuid, what, 0); }
static device whole_of(device d) {
    return d >= gpus && d < gpus + MOST ? d : &gpus[(d - &parts[0][0]) / 8];
}
static int is_instance(device d) { return whole_of(d) != d; }
static int check(device d) { return state_of(whole_of(d)->uuid, "lost") ? GPU_IS_LOST : OK; }
static unsigned list_processes(device d, const char *what, process *found) {
    int n = read_state();
    unsigned listed = 0;
    for (int i = 0; i < n && listed < 64; i++) {
        int again = 0;
        if (strcmp(lines[i].uuid, d->uuid) || strcmp(lines[i].what, what)) continue;
        for (int j = i + 1; j < n; j++)
            again |= lines[j].value == lines[i].value && !strcmp(lines[j].uuid, lines[i].uuid)
                     && !strcmp(lines[j].what, what);
        if (again) continue;
        if (lines[i].value < FOREIGN && kill((int)lines[i].value, 0)) continue;
        found[listed].pid = (unsigned)lines[i].value;
        found[listed].bytes = lines[i].more ? (unsigned long long)(lines[i].more * (1ULL << 30)) : ~0ULL;
        found[listed].instance = found[listed].compute = ~0U;
        listed++;
    }
    return listed;
}
static unsigned long long used_bytes(device d) {
    process found[64];
    unsigned long long used = (unsigned long long)(state_of(d->uuid, "held") * (1ULL << 30));
    for (unsigned n = list_processes(d, "process", found), i = 0; i < n; i++) used += found[i].bytes == ~0ULL ? 0 : found[i].bytes;
    return used;
}

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
const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "an error of the stand-in"; }

int nvmlDeviceGetCount_v2(unsigned *n) { *n = count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device *d) {
    if (i >= count) return INVALID_ARGUMENT;
    *d = &gpus[i];
    return check(*d);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, device *d) {
    for (unsigned i = 0; i < count; i++) {
        if (!strcmp(gpus[i].uuid, uuid)) { *d = &gpus[i]; return check(*d); }
        for (int j = 0; j < gpus[i].instances; j++)
            if (!strcmp(parts[i][j].uuid, uuid)) { *d = &parts[i][j]; return check(*d); }
    }
    return NOT_FOUND;
}
int nvmlDeviceGetIndex(device d, unsigned *i) {
    *i = is_instance(d) ? (d - &parts[0][0]) % 8 : d - gpus;
    return OK;
}
int nvmlDeviceGetUUID(device d, char *s, unsigned n) { snprintf(s, n, "%s", d->uuid); return OK; }
int nvmlDeviceGetName(device d, char *s, unsigned n) { snprintf(s, n, "%s", d->model); return OK; }
int nvmlDeviceGetMemoryInfo(device d, unsigned long long *m) {
    m[0] = (unsigned long long)(d->gib * (1ULL << 30));
    m[2] = used_bytes(d);
    m[1] = m[0] - m[2];
    return check(d);
}
int nvmlDeviceGetMemoryInfo_v2(device d, unsigned long long *m) { /* version, total, reserved, free, used */
    m[1] = (unsigned long long)(d->gib * (1ULL << 30));
    m[2] = 1ULL << 29;
    m[4] = used_bytes(d);
    m[3] = m[1] - m[2] - m[4];
    return check(d);
}
static int copy_processes(device d, const char *what, unsigned *n, process *found) {
    process listed[64];
    unsigned most = *n;
    *n = list_processes(d, what, listed);
    if (*n > most || (*n && !found)) return INSUFFICIENT_SIZE;
    if (found) memcpy(found, listed, *n * sizeof *found);
    return check(d);
}
int nvmlDeviceGetComputeRunningProcesses_v3(device d, unsigned *n, process *found) {
    return copy_processes(d, "process", n, found);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(device d, unsigned *n, process *found) {
    return copy_processes(d, "mps", n, found);
}
/* The samples of a GPU after a time, by process; returns the number of processes. */
static unsigned list_utilization(device d, unsigned long long since, utilization *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    double now_us = now.tv_sec * 1e6 + now.tv_nsec / 1e3, counted[LINES];
    unsigned listed = 0, samples = 0, k, c;
    int n = read_state();
    for (int i = 0; i < n; i++) {
        line *l = &lines[i];
        if (strcmp(l->uuid, d->uuid) || strcmp(l->what, "util") || (l->at && l->at <= since)) continue;
        if (l->at) { /* the processes of one time share a sample */
            for (c = 0; c < samples && counted[c] != l->at; c++);
            if (c == samples) counted[samples++] = l->at;
        }
        for (k = 0; k < listed && found[k].pid != (unsigned)l->value; k++);
        if (k == listed && listed < 64) found[listed++] = (utilization){(unsigned)l->value, 0, 0, 0, 0, 0};
        if (k == 64) continue;
        if (!l->at) found[k].at = (unsigned long long)now_us, found[k].sm = (unsigned)l->more;
        else if (l->at >= found[k].at) found[k].at = (unsigned long long)l->at;
        if (l->at) found[k].sm += (unsigned)l->more;
    }
    for (k = c = 0; k < listed; k++) {
        if (samples) found[k].sm = (found[k].sm + samples / 2) / samples;
        if (found[k].sm && found[k].at > since) found[c++] = found[k];
    }
    return c;
}
int nvmlDeviceGetProcessUtilization(device d, utilization *found, unsigned *n, unsigned long long since) {
    utilization listed[64];
    unsigned most = *n, code = (unsigned)state_of(d->uuid, "fails");
    if (check(d)) return GPU_IS_LOST;
    if (code) return (int)code;
    if (is_instance(d) || d->instances) return NOT_SUPPORTED;
    if (!(*n = list_utilization(d, since, listed))) return NOT_FOUND;
    if (!found || *n > most) return INSUFFICIENT_SIZE;
    memcpy(found, listed, *n * sizeof *found);
    return OK;
}
static unsigned slices_of(device d) {
    unsigned all = strncmp(d->model, "A30", 3) ? 7 : 4;
    return is_instance(d) ? (unsigned)state_or(d->uuid, "slices", all / whole_of(d)->instances) : all;
}
int nvmlDeviceGetAttributes_v2(device d, attributes *found) {
    if (!is_instance(d)) return NOT_SUPPORTED;
    unsigned slices = slices_of(d);
    *found = (attributes){14 * slices, 1, 0, 0, 0, 0, slices, slices, (unsigned long long)(d->gib * 1024)};
    return check(d);
}
/* Of profiles of one, two, three, four and seven slices. */
int nvmlDeviceGetGpuInstanceProfileInfo(device d, unsigned which, profile *found) {
    static const unsigned sizes[] = {1, 2, 3, 4, 7};
    if (which > 4 || !d->instances || sizes[which] > slices_of(d)) return NOT_SUPPORTED;
    *found = (profile){which, 0, sizes[which], slices_of(d) / sizes[which], 14 * sizes[which], 1, 0, 0, 0, 0, 1024};
    return check(d);
}
int nvmlDeviceGetComputeMode(device d, unsigned *mode) {
    *mode = (unsigned)state_of(d->uuid, "mode");
    return is_instance(d) ? NOT_SUPPORTED : check(d);
}
int nvmlDeviceGetTotalEccErrors(device d, unsigned type, unsigned counter, unsigned long long *n) {
    *n = type == 1 && counter == 0 ? (unsigned long long)state_of(whole_of(d)->uuid, "ecc") : 0;
    return check(d);
}
int nvmlEventSetCreate(event_set **set) {
    *set = malloc(sizeof **set);
    (*set)->delivered = read_state();
    return OK;
}
int nvmlDeviceRegisterEvents(device d, unsigned long long types, event_set *set) {
    return types == XID_EVENT && !is_instance(d) ? check(d) : NOT_SUPPORTED;
}
int nvmlEventSetWait_v2(event_set *set, event *data, unsigned timeout_ms) {
    for (int n = read_state(); set->delivered < n;) {
        line *next = &lines[set->delivered++];
        for (unsigned i = 0; i < count; i++)
            if (!strcmp(next->uuid, gpus[i].uuid) && !strcmp(next->what, "xid")) {
                *data = (event){&gpus[i], XID_EVENT, (unsigned long long)next->value, ~0U, ~0U};
                return OK;
            }
    }
    return TIMEOUT;
}
int nvmlEventSetFree(event_set *set) { free(set); return OK; }
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
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device part, device *d) {
    if (!is_instance(part)) return INVALID_ARGUMENT;
    *d = whole_of(part);
    return OK;
}
int nvmlDeviceGetTotalEnergyConsumption(device d, unsigned long long *mj) {
    if (is_instance(d) || !strncmp(d->model, "Old", 3)) return NOT_SUPPORTED;
    double said = state_or(d->uuid, "energy", -1);
    *mj = said >= 0 ? (unsigned long long)said : (d->energy_mj += 250);
    return check(d);
}
int nvmlDeviceGetUtilizationRates(device d, unsigned *rates) { /* of computing, of memory */
    double load = state_or(d->uuid, "load", -1);
    rates[0] = rates[1] = (unsigned)load;
    return is_instance(d) || load < 0 ? NOT_SUPPORTED : check(d);
}
int nvmlDeviceGetPowerUsage(device d, unsigned *mw) {
    *mw = (unsigned)state_or(d->uuid, "power", 40000);
    return is_instance(d) ? NOT_SUPPORTED : check(d);
}
