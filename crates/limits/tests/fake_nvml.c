// Plays NVIDIA's management library in tests. What it answers is in the file STATE, which is read at every call:
//   gpu DOMAIN BUS DEVICE TOTAL FREE
//   process GPU PID MEMORY PERCENT     (PERCENT of the GPU's time; -1: no sample)
//   sleep SECONDS                      (every reading of memory takes so long)
// With -DOLD it has only the functions that every version has.
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

struct pci { char legacy[16]; unsigned domain, bus, device, device_id, subsystem; char id[32]; };
struct memory { unsigned long long total, free, used; };
struct process { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; };
struct sample { unsigned pid; unsigned long long at_us; unsigned computing, memory, encoder, decoder; };

static struct { unsigned domain, bus, device; unsigned long long total, free; } gpus[8];
static struct { unsigned gpu, pid; unsigned long long memory; int percent; } processes[512];
static unsigned gpu_count, process_count, sleep_s;

static int load(void) {
    char line[256];
    FILE *file = fopen(STATE, "r");
    if (!file) return 9;
    gpu_count = process_count = sleep_s = 0;
    while (fgets(line, sizeof line, file)) {
        unsigned a, b, c;
        unsigned long long d, e;
        int f;
        if (gpu_count < 8 && sscanf(line, "gpu %u %u %u %llu %llu", &a, &b, &c, &d, &e) == 5) {
            gpus[gpu_count].domain = a, gpus[gpu_count].bus = b, gpus[gpu_count].device = c;
            gpus[gpu_count].total = d, gpus[gpu_count++].free = e;
        }
        if (process_count < 512 && sscanf(line, "process %u %u %llu %d", &a, &b, &d, &f) == 4) {
            processes[process_count].gpu = a, processes[process_count].pid = b;
            processes[process_count].memory = d, processes[process_count++].percent = f;
        }
        sscanf(line, "sleep %u", &sleep_s);
    }
    fclose(file);
    return 0;
}

int nvmlInit_v2(void) { return load(); }
int nvmlShutdown(void) { return 0; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = gpu_count;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)(unsigned long)(index + 1);
    return index < gpu_count ? 0 : 2;
}

int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *pci) {
    unsigned index = (unsigned long)handle - 1;
    memset(pci, 0, sizeof *pci);
    pci->domain = gpus[index].domain, pci->bus = gpus[index].bus, pci->device = gpus[index].device;
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
    unsigned index = (unsigned long)handle - 1;
    if (load()) return 15;
    if (sleep_s) sleep(sleep_s);
    memory->total = gpus[index].total, memory->free = gpus[index].free;
    memory->used = gpus[index].total - gpus[index].free;
    return 0;
}

#ifndef OLD
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *list) {
    unsigned index = (unsigned long)handle - 1, room = *count, found = 0;
    for (unsigned i = 0; i < process_count; i++) {
        if (processes[i].gpu != index) continue;
        if (found < room) {
            memset(&list[found], 0, sizeof list[found]);
            list[found].pid = processes[i].pid, list[found].memory = processes[i].memory;
        }
        found++;
    }
    *count = found;
    return found > room ? 7 : 0;
}

int nvmlDeviceGetProcessUtilization(void *handle, struct sample *list, unsigned *count, unsigned long long since) {
    unsigned index = (unsigned long)handle - 1, room = *count, found = 0;
    struct timeval now;
    gettimeofday(&now, 0);
    unsigned long long at_us = now.tv_sec * 1000000ull + now.tv_usec;
    if (at_us <= since) at_us = since + 1;
    for (unsigned i = 0; i < process_count; i++) {
        if (processes[i].gpu != index || processes[i].percent <= 0) continue;
        if (found < room) {
            memset(&list[found], 0, sizeof list[found]);
            list[found].pid = processes[i].pid, list[found].at_us = at_us;
            list[found].computing = processes[i].percent;
        }
        found++;
    }
    *count = found;
    return !found ? 6 : found > room ? 7 : 0;
}
#endif
