// A program that launches work on the driver whose file is its first argument, as it is told line by line:
// `r N` retains device N, `l N` launches N kernels, `g N` N graphs, `c N` records N kernels, `y` waits; `b 1` begins a
// recording elsewhere and `b 0` ends it; `w` counts waits for events, `k` calls that would break a recording of the
// same stream, `x` waits that broke the one elsewhere; each answers by one line.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **words) {
    void *driver = dlopen(words[1], RTLD_NOW);
    int (*get)(const char *, void **, int, unsigned long long, int *) = dlsym(driver, "cuGetProcAddress_v2");
    int (*launch)(void *, int, int, int, int, int, int, int, void *, void **, void **);
    int (*graph)(void *, void *), (*retain)(void **, int), (*wait)(void *);
    get("cuStreamSynchronize", (void **)&wait, 12000, 0, 0);
    get("cuLaunchKernel", (void **)&launch, 12000, 0, 0);
    get("cuGraphLaunch", (void **)&graph, 12000, 0, 0);
    get("cuDevicePrimaryCtxRetain", (void **)&retain, 12000, 0, 0);
    char line[100];
    while (fgets(line, sizeof line, stdin)) {
        int number = atoi(line + 1), result = 0;
        void *context, *stream = line[0] == 'c' ? (void *)16 : 0;
        if (line[0] == 'r') result = retain(&context, number);
        else if (line[0] == 'y') result = wait(0);
        else if (line[0] == 'w') result = ((int (*)(void))dlsym(driver, "waited"))();
        else if (line[0] == 'k') result = ((int (*)(void))dlsym(driver, "asked"))();
        else if (line[0] == 'b') result = ((int (*)(int))dlsym(driver, "record"))(number);
        else if (line[0] == 'x') result = ((int (*)(void))dlsym(driver, "broken"))();
        else if (line[0] == 'g') for (int i = 0; i < number; i++) result |= graph(driver, 0);
        else for (int i = 0; i < number; i++) result |= launch(0, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0);
        printf("%d\n", result);
        fflush(stdout);
    }
}
