/* LD_PRELOAD: the time of day is off by what TURNED_CLOCK, a file of eight bytes, says at the moment: signed
   microseconds. The monotonic clock is as it was. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *turned_us;

__attribute__((constructor)) static void map_it(void) {
    const char *path = getenv("TURNED_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = fd >= 0 ? mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    turned_us = page == MAP_FAILED ? NULL : page;
    if (fd >= 0) close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && turned_us && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t ns = now->tv_nsec + (*turned_us % 1000000) * 1000;
        int64_t carry = ns < 0 ? -1 : ns / 1000000000;
        now->tv_sec += *turned_us / 1000000 + carry;
        now->tv_nsec = ns - carry * 1000000000;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
