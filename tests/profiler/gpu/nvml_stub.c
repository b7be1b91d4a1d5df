/* A stand-in for NVIDIA's driver library, libnvidia-ml.so.1: GPUs as a file describes them.
 *
 * The file is named by the environment variable NVML_STUB (see nvml_stub.py, which writes it) and
 * read again whenever it changes. A line is "DEVICE ATTRIBUTE ANSWERS": device 0 is the machine,
 * and ANSWERS are separated by ";": each question takes the next of them, and the last one stays.
 * "!15" answers with NVML's error 15, "-" is an empty list; an attribute without a line is not
 * supported. Every answer takes the machine's "delay_ms"; after "lost_after" questions about devices
 * all of them are lost. As NVIDIA's own, the library answers only the process that initialized it.
 * DRIVER is the version of the driver whose functions the library has.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef DRIVER
#define DRIVER 580
#endif

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
       INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };
enum { MAX_DEVICES = 64, MAX_LINES = 1024, LONGEST = 2048 };

typedef unsigned long long u64;
typedef struct { int place; } *Device;
typedef struct { int device; char attribute[48], answers[LONGEST]; size_t next; } Line;

static struct { int place; } devices[MAX_DEVICES];
static Line *lines;
static int line_count;
static struct stat known;
static char known_path[LONGEST];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pid_t owner;
static long questions;
static int used_place; /* the device of this process's fake CUDA context, and its memory */
static u64 used_bytes;

static Line *line_of(Line *among, int count, int device, const char *attribute)
{
    for (int i = 0; i < count; i++)
        if (among[i].device == device && !strcmp(among[i].attribute, attribute))
            return &among[i];
    return NULL;
}

static void read_file(void)
{
    const char *path = getenv("NVML_STUB");
    struct stat now;
    if (path == NULL || stat(path, &now) != 0)
        return;
    if (lines && now.st_ino == known.st_ino && now.st_mtim.tv_nsec == known.st_mtim.tv_nsec
        && now.st_mtim.tv_sec == known.st_mtim.tv_sec && now.st_size == known.st_size)
        return;
    int same_file = !strcmp(path, known_path);
    questions = same_file ? questions : 0;
    FILE *file = fopen(path, "r");
    Line *fresh = calloc(MAX_LINES, sizeof(Line));
    int count = 0;
    while (file && count < MAX_LINES
           && fscanf(file, "%d %47s %2047[^\n]", &fresh[count].device, fresh[count].attribute,
                     fresh[count].answers) == 3) {
        Line *old = line_of(lines, line_count, fresh[count].device, fresh[count].attribute);
        if (old && same_file && !strcmp(old->answers, fresh[count].answers))
            fresh[count].next = old->next; /* what has not changed continues */
        count++;
    }
    if (file)
        fclose(file);
    free(lines);
    lines = fresh;
    line_count = count;
    known = now;
    snprintf(known_path, sizeof known_path, "%s", path);
}

/* A number of the machine itself; the mutex is held. */
static long of_machine(const char *attribute, long otherwise)
{
    Line *line = line_of(lines, line_count, 0, attribute);
    return line ? atol(line->answers) : otherwise;
}

/* The next answer of an attribute, as text. */
static int text(int device, const char *attribute, char *answer, size_t size)
{
    if (owner != getpid())
        return UNINITIALIZED;
    pthread_mutex_lock(&mutex);
    read_file();
    struct timespec delay = {0, 1000000 * of_machine("delay_ms", 0)};
    long lost_after = of_machine("lost_after", -1);
    int lost = device && lost_after >= 0 && questions >= lost_after;
    questions += device != 0;
    Line *line = lost ? NULL : line_of(lines, line_count, device, attribute);
    *answer = 0;
    if (line) {
        const char *begin = line->answers + line->next;
        size_t length = strcspn(begin, ";");
        snprintf(answer, size, "%.*s", (int)length, begin);
        if (begin[length] == ';')
            line->next += length + 1;
    }
    pthread_mutex_unlock(&mutex);
    nanosleep(&delay, NULL);
    if (lost)
        return GPU_IS_LOST;
    if (!line)
        return NOT_SUPPORTED;
    return answer[0] == '!' ? atoi(answer + 1) : SUCCESS;
}

/* The next answer as up to two numbers. */
static int numbers(Device device, const char *attribute, u64 *first, u64 *second)
{
    char answer[LONGEST];
    u64 ignored;
    int code = text(device->place, attribute, answer, sizeof answer);
    if (code == SUCCESS)
        sscanf(answer, "%llu %llu", first, second ? second : &ignored);
    return code;
}

static int number(Device device, const char *attribute, unsigned *value)
{
    u64 wide = 0;
    int code = numbers(device, attribute, &wide, NULL);
    if (code == SUCCESS)
        *value = (unsigned)wide;
    return code;
}

static int pair(Device device, const char *attribute, unsigned *first, unsigned *second)
{
    u64 one = 0, two = 0;
    int code = numbers(device, attribute, &one, &two);
    if (code == SUCCESS) {
        *first = (unsigned)one;
        *second = (unsigned)two;
    }
    return code;
}

static Device place(int number)
{
    devices[number].place = number;
    return (Device)&devices[number];
}

/* The device at an index of a list of places, such as "1 4 5". */
static int at_index(int device, const char *attribute, unsigned index, Device *found)
{
    char answer[LONGEST], *rest, *word;
    int code = text(device, attribute, answer, sizeof answer);
    if (code != SUCCESS)
        return code;
    for (word = strtok_r(answer, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        if (atoi(word) && index-- == 0) {
            *found = place(atoi(word));
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlInitWithFlags(unsigned flags)
{
    char answer[LONGEST];
    (void)flags;
    owner = getpid();
    return text(0, "init", answer, sizeof answer);
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code)
{
    return code == 26 ? "The requested functionality has been deprecated" : "an error of the stub";
}

int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    return text(0, "driver", version, length);
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    Device found;
    for (*count = 0; at_index(0, "boards", *count, &found) == SUCCESS;)
        ++*count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device)
{
    char answer[LONGEST];
    int code = at_index(0, "boards", index, device);
    return code != SUCCESS ? INVALID_ARGUMENT
                           : text((*device)->place, "handle", answer, sizeof answer);
}

int nvmlDeviceGetUUID(Device device, char *uuid, unsigned length)
{
    return text(device->place, "uuid", uuid, length);
}

int nvmlDeviceGetName(Device device, char *name, unsigned length)
{
    return text(device->place, "name", name, length);
}

#if DRIVER >= 450
int nvmlDeviceGetMigMode(Device device, unsigned *now, unsigned *pending)
{
    return pair(device, "mig", now, pending);
}

int nvmlDeviceGetMaxMigDeviceCount(Device device, unsigned *count)
{
    return number(device, "most_instances", count);
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned index, Device *instance)
{
    return at_index(device->place, "instances", index, instance);
}
#endif

/* Has this process use a device, as a CUDA context does: no other process sees it. */
void stub_use(Device device, u64 bytes)
{
    used_place = device->place;
    used_bytes = bytes;
}

static int used(Device device, u64 *bytes)
{
    int code = numbers(device, "used", bytes, NULL);
    *bytes += device->place == used_place ? used_bytes : 0;
    return code;
}

typedef struct { u64 total, free, used; } Memory;

int nvmlDeviceGetMemoryInfo(Device device, Memory *memory)
{
    int code = numbers(device, "total", &memory->total, NULL);
    if (code == SUCCESS)
        code = used(device, &memory->used);
    memory->free = memory->total - memory->used;
    return code;
}

#if DRIVER >= 510
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;

int nvmlDeviceGetMemoryInfo_v2(Device device, MemoryV2 *memory)
{
    int code = numbers(device, "total", &memory->total, NULL);
    if (code == SUCCESS)
        code = used(device, &memory->used);
    if (code == SUCCESS)
        code = numbers(device, "reserved", &memory->reserved, NULL);
    memory->free = memory->total - memory->used;
    return code;
}
#endif

typedef struct { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; } Process;

/* Processes as "7:1024 8:-": the second one's memory is not available. */
static int processes(Device device, unsigned *count, Process *found)
{
    char answer[LONGEST], *rest, *word;
    unsigned room = *count, listed = 0;
    int code = text(device->place, "processes", answer, sizeof answer);
    if (code != SUCCESS)
        return code;
    if (device->place == used_place && strcmp(answer, "nobody")) {
        size_t length = strlen(answer);
        snprintf(answer + length, sizeof answer - length, " %d:%llu", (int)getpid(), used_bytes);
    }
    for (word = strtok_r(answer, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        const char *bytes = strchr(word, ':');
        if (bytes && found && listed < room) {
            memset(&found[listed], 0, sizeof *found);
            found[listed].pid = (unsigned)atoi(word);
            found[listed].bytes = bytes[1] == '-' ? (u64)-1 : strtoull(bytes + 1, NULL, 10);
        }
        listed += bytes != NULL;
    }
    *count = listed;
    return listed > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(Device device, unsigned *count, Process *found)
{
    return processes(device, count, found);
}

#if DRIVER >= 510
int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, Process *found)
{
    return processes(device, count, found);
}
#endif

int nvmlDeviceGetTotalEnergyConsumption(Device device, u64 *millijoules)
{
    return numbers(device, "energy_mj", millijoules, NULL);
}

int nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatts)
{
    return number(device, "power_mw", milliwatts);
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int type, code;
    union { unsigned narrow; u64 wide; } value;
} FieldValue;

int nvmlDeviceGetFieldValues(Device device, int count, FieldValue *values)
{
    for (int i = 0; i < count; i++) {
        char attribute[32];
        snprintf(attribute, sizeof attribute, "field_%u", values[i].field);
        values[i].type = 1; /* an unsigned int */
        values[i].value.wide = 0;
        values[i].code = number(device, attribute, &values[i].value.narrow);
    }
    return SUCCESS;
}

typedef struct { unsigned gpu, memory; } Rates;

int nvmlDeviceGetUtilizationRates(Device device, Rates *rates)
{
    return pair(device, "utilization", &rates->gpu, &rates->memory);
}

int nvmlDeviceGetClockInfo(Device device, int kind, unsigned *mhz)
{
    return number(device, kind == 1 ? "sm_clock_mhz" : "memory_clock_mhz", mhz);
}

int nvmlDeviceGetApplicationsClock(Device device, int kind, unsigned *mhz)
{
    return kind == 1 ? number(device, "application_clock_mhz", mhz) : NOT_SUPPORTED;
}

int nvmlDeviceGetTemperature(Device device, int sensor, unsigned *celsius)
{
    return sensor == 0 ? number(device, "temperature_c", celsius) : INVALID_ARGUMENT;
}

#if DRIVER >= 535
typedef struct { unsigned version; int sensor, celsius; } Temperature;

int nvmlDeviceGetTemperatureV(Device device, Temperature *temperature)
{
    return number(device, "temperature_v_c", (unsigned *)&temperature->celsius);
}
#endif

int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, u64 *reasons)
{
    return numbers(device, "reasons", reasons, NULL);
}

#if DRIVER >= 535
int nvmlDeviceGetCurrentClocksEventReasons(Device device, u64 *reasons)
{
    return numbers(device, "reasons", reasons, NULL);
}
#endif

/* Cores as "0 1 2 3". */
int nvmlDeviceGetCpuAffinity(Device device, unsigned size, u64 *masks)
{
    char answer[LONGEST], *rest, *word;
    int code = text(device->place, "cores", answer, sizeof answer);
    memset(masks, 0, size * sizeof *masks);
    for (word = strtok_r(answer, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        if (code == SUCCESS && (unsigned)atoi(word) / 64 < size)
            masks[atoi(word) / 64] |= 1ULL << atoi(word) % 64;
    return code;
}

int nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor)
{
    return pair(device, "capability", (unsigned *)major, (unsigned *)minor);
}

int nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned *milliwatts)
{
    return number(device, "power_limit_mw", milliwatts);
}

int nvmlDeviceGetEccMode(Device device, unsigned *now, unsigned *pending)
{
    return pair(device, "ecc", now, pending);
}

int nvmlDeviceGetPersistenceMode(Device device, unsigned *mode)
{
    return number(device, "persistence", mode);
}
